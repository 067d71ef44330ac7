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
        ("a rule counts everywhere", "if rule.where and not any(map(holds, rule.where))", "if False"),
        ("every process is taken to be alone", '"ALONE": n == 1, "SEVERAL": n > 1', '"ALONE": True, "SEVERAL": False'),
        ("no value is read", " if patterns else flag", " if False else flag"),
    ],
    "test_a_command_that_cannot_share_a_step_is_for_one_process[distill --teacher tiny]": [
        ("several processes start a command for one", '"--parallel" not in self.flags', "False"),
    ],
    "test_what_was_a_flag_is_answered_with_its_command[--teacher-next_steps.finetuning.distill --teacher MODEL]": [
        ("an old flag is unknown", "if flag in COMMANDS", "if False"),
    ],
}  # fmt: skip
