"""Faults in output_files.py, as tests/mutation_test.py plants them."""

SOURCE = "harness.cli.output_files"
TESTS = "tests.files_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_a_write_that_stops_half_way_leaves_the_old_record_and_nothing_beside": [
        ("written in place", "with open(unfinished, \"xb\") as file:", "with open(target, \"wb\") as file:"),
        ("half a file stays", "            unfinished.unlink(missing_ok=True)\n", "            pass\n"),
    ],
    "test_a_file_that_no_script_here_wrote_is_not_replaced": [
        ("any file counts as ours", "if start and not re.match(", "if not start and not re.match("),
    ],
    "test_a_link_is_followed_and_stays": [("link replaced", "target = os.path.realpath(path)\n    unfinished", "target = path\n    unfinished")],
    "test_a_pipe_gets_the_record": [("pipe replaced", "        if written_straight(path):\n            print", "        if False:\n            print")],
    "test_permissions_stay_and_a_new_file_has_the_usual_ones": [
        ("permissions lost", "shutil.copymode(target, unfinished)", "pass"),
    ],
}  # fmt: skip
