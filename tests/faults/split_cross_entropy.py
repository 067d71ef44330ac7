"""Faults in split_cross_entropy.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.layers.split_cross_entropy"
TESTS = "tests.split_cross_entropy_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_slices_give_the_loss_and_the_gradients_of_the_whole[(37, 113)-mean-torch.float32]": [
        ("target of another slice subtracted here", "torch.where(is_elsewhere, first", "torch.where(is_elsewhere & False, first"),
        ("every slice begins at column 0", "targets.long() - first_column", "targets.long()"),
        ("mean over all rows", "n_valid = counts.sum()", "n_valid = (counts | True).sum()"),
    ],
    "tests.contracts_numbers_test::test_the_default_dtype_changes_nothing[split_cross_entropy]": [
        ("log(2) in the default dtype", "torch.ones_like(unit, dtype=torch.float32).masked_fill(unit != 1.0, LN2.value)", "torch.where(unit == 1.0, 1.0, LN2.value)"),
    ],
    "test_maxima_that_lie_far_apart": [
        ("sums not rescaled", "torch.where(same, torch.exp2(m - whole_m), 0.0)", "torch.where(same, 1.0, 0.0)"),
    ],
    "test_label_that_is_ignored_may_be_a_column": [
        ("a column has the ignored rows' number", "IGNORED = -100", "IGNORED = 5"),
    ],
    "test_maxima_that_lie_far_apart[(1400000000.0, 1600000000.0)]": [
        ("maxima of two units compared", "same = unit == whole_unit", "same = unit > 0"),
    ],
    "test_what_is_wrong_in_a_row_stays_there_and_reaches_every_slice": [
        ("target in no slice is 0", "nowhere = ~is_here.any(0)", "nowhere = is_here.any(0) & False"),
        ("NaN of the lower slice dropped", "d = (d * decay).sum(0)", "d = torch.where(decay > 0, d * decay, 0.0).sum(0)"),
    ],
}  # fmt: skip
