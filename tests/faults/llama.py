"""Faults in llama.py, as tests/mutation_test.py plants them."""

SOURCE = "harness.llama"
TESTS = "tests.llama_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_loss_and_gradient_are_hugging_faces[17]": [
        ("labels not shifted", "pad(labels[..., 1:], (0, 1)", "pad(labels, (0, 0)"),
    ],
    "test_another_ignore_index_is_hugging_faces[False-17]": [
        ("ignore_index dropped", "cross_entropy(logits, shift_labels, ignore_index)", "cross_entropy(logits, shift_labels, IGNORE_INDEX)"),
        ("ignored labels counted", "(shift_labels != ignore_index).sum()", "(shift_labels != IGNORE_INDEX).sum()"),
    ],
    "test_a_subclass_and_what_make_gives_back_stay": [
        ("subclass replaced", "if type(module) is cls]", "if isinstance(module, cls)]"),
    ],
    "tests.files_test::test_a_save_killed_at_any_moment_leaves_the_whole_old_or_the_whole_new_model[one file, another shape]": [
        ("config.json changes last alone", "    loaded_here.replace(target / CONFIG)\n", ""),
    ],
    "tests.files_test::test_a_save_killed_at_any_moment_leaves_the_whole_old_or_the_whole_new_model[shards become one file]": [
        ("index goes before its shards", "(*sorted(shards_of(target / INDEX)), WEIGHTS, INDEX)", "(INDEX, WEIGHTS, *sorted(shards_of(target / INDEX)))"),
        ("old shards stay", "(*sorted(shards_of(target / INDEX)), WEIGHTS, INDEX)", "(WEIGHTS, INDEX)"),
    ],
    "tests.files_test::test_what_an_earlier_crash_left_is_removed_and_files_of_that_name_are_not": [
        ("crash leaves its files", "            shutil.rmtree(folder, ignore_errors=True)\n", "            pass\n"),
    ],
    "tests.files_test::test_an_old_index_cannot_name_files_of_the_user": [
        ("index names other folders' files", "Path(str(name)).name == name and", "isinstance(name, str) and"),
    ],
}  # fmt: skip
