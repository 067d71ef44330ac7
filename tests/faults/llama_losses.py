"""Faults in llama_losses.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.patches.llama_losses"
TESTS = "tests.llama_losses_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_another_label_may_be_ignored": [
        ("ignore_index dropped by cross_entropy", "TritonCrossEntropyLoss(ignore_index, ", "TritonCrossEntropyLoss("),
        ("ignore_index dropped by linear_cross_entropy", "TritonLinearCrossEntropyLoss(ignore_index)", "TritonLinearCrossEntropyLoss()"),
    ],
    "test_too_small_a_number_of_targets_is_noticed": [
        ("number of targets dropped", "self.weight, targets, max_targets)", "self.weight, targets)"),
    ],
}  # fmt: skip
