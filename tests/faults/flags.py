"""Faults in flags.py, as tests/mutation_test.py plants them."""

SOURCE = "harness.cli.flags"
TESTS = "tests.flags_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_a_flag_counts_as_given_when_its_value_is_the_default": [
        ("every flag counts as given", "for name, value in again.items() if value is not absent", "for name in again"),
    ],
    "test_no_part_of_a_rule_could_be_left_out": [
        ("a flag counts as given when it has a default", "            return name in given\n", "            return values[name] is not None and values[name] is not False\n"),
        ("a flag that the script lacks is missing", "holds(other) is False for", "not holds(other) for"),
        ("one of several conditions is enough", "return all(holds(each)", "return any(holds(each)"),
        ("every process is taken to be alone", "ONE: n == 1, SEVERAL: n > 1", "ONE: True, SEVERAL: False"),
        ("no value is read", "is_flag = patterns and", "is_flag = False and"),
        ("a rule of every flag spares none", "if flag not in spared", "if flag not in rule.others"),
    ],
}  # fmt: skip
