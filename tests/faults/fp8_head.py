"""Faults in fp8_head.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.layers.fp8_head"
TESTS = "tests.fp8_head_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_loss_and_gradients_are_those_of_the_rounded_numbers": [
        ("a mean of all rows", "1 / n_valid.clamp(min=1)", "1 / (n_valid + 1)"),
        ("the last chunk alone", "product, first == 0)", "product, True)"),
        ("the last slice alone", "product, part.start == 0)", "product, True)"),
        ("too small a scale", "largest_scale(weight[part])", "largest_scale(weight[part] / 8)"),
        ("columns beyond the vocabulary count", "logits[:, n_columns:] = -torch.inf", "pass"),
        ("ignored rows keep their logits", "cross_entropy_scale(one,", "(lambda *args: None)(one,"),
    ],
    "test_rows_beyond_the_number_of_targets_are_left_out": [
        ("all rows are computed", "if max_targets is not None and", "if False and"),
    ],
    "test_ignored_rows_count_for_nothing": [
        ("divided by no target", "1 / n_valid.clamp(min=1)", "1 / n_valid"),
    ],
    "test_the_gradient_of_the_loss_multiplies_and_the_backward_can_be_repeated": [
        ("grad_output dropped", "if gradient is not None:", "if False:"),
        ("a second derivative is zero", 'refuse_second_derivative("FP8 in the head")', "pass"),
    ],
}
