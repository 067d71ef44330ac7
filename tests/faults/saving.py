"""Faults in saving.py, as tests/mutation_test.py plants them."""

SOURCE = "harness.training.saving"
TESTS = "tests.files_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_a_save_killed_at_any_moment_leaves_the_whole_old_or_the_whole_new_model[one file, another shape]": [
        ("config.json changes last alone", "    loaded_here.replace(target / CONFIG)\n", ""),
    ],
    "test_a_save_killed_at_any_moment_leaves_the_whole_old_or_the_whole_new_model[shards become one file]": [
        ("index goes before its shards", "*sorted(shards_of(target / INDEX)), WEIGHTS, INDEX", "INDEX, WEIGHTS, *sorted(shards_of(target / INDEX))"),
        ("old shards stay", "*sorted(shards_of(target / INDEX)), WEIGHTS, INDEX", "WEIGHTS, INDEX"),
    ],
    "test_what_an_earlier_crash_left_is_removed_and_files_of_that_name_are_not": [
        ("crash leaves its files", "            shutil.rmtree(folder, ignore_errors=True)\n", "            pass\n"),
    ],
    "test_a_model_without_a_tokenizer_does_not_get_that_of_the_model_before_it": [
        ("old tokenizer stays", "() if TOKENIZER[0] in names else TOKENIZER", "()"),
    ],
    "test_an_old_index_cannot_name_files_of_the_user": [
        ("index names other folders' files", "Path(str(name)).name == name and", "isinstance(name, str) and"),
    ],
}  # fmt: skip
