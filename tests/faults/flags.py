"""Faults in flags.py, as tests/mutation_test.py plants them."""

SOURCE = "harness.cli.flags"
TESTS = "tests.flags_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_a_flag_counts_as_given_when_its_value_is_the_default": [
        ("every flag counts as given", "for name, value in again.items() if value is not absent", "for name in again"),
    ],
}  # fmt: skip
