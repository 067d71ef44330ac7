"""Faults in saving.py, as tests/mutation_test.py plants them."""

SOURCE = "harness.training.saving"
TESTS = "tests.files_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_a_save_killed_at_any_moment_leaves_the_whole_old_or_the_whole_new_model[False]": [
        ("config.json comes before the weights", "(name == config) - (name == weights)", "(name == weights) - (name == config)"),
    ],
    "test_a_failed_save_leaves_the_old_model_and_nothing_beside": [
        ("written in place", "yield unfinished, target", "yield target, target"),
        ("half a model stays", "        stack.callback(shutil.rmtree, unfinished, ignore_errors=True)\n", ""),
    ],
    "test_a_folder_with_another_model_is_refused[another shape]": [
        ("any configuration is replaced", "    if different:\n", "    if False:\n"),
    ],
    "test_a_folder_with_another_model_is_refused[shards]": [
        ("an index counts before the new weights", "(Path(folder) / INDEX).exists() or ", ""),
    ],
    "test_a_save_killed_at_any_moment_leaves_the_whole_old_or_the_whole_new_model[True]": [
        ("crash leaves its files", "shutil.rmtree(unfinished, ignore_errors=True)  # an interrupted save left it\n        unfinished.mkdir()", "unfinished.mkdir(exist_ok=True)"),
    ],
    "test_a_model_without_a_tokenizer_does_not_get_that_of_the_model_before_it": [
        ("old tokenizer stays", "() if TOKENIZER[0] in written else TOKENIZER", "()"),
    ],
}  # fmt: skip
