"""Faults in cross_entropy_inplace_kernel.py, as tests/mutation_test.py plants them."""

SOURCE = "cross_entropy_inplace_kernel"
TESTS = "tests.cross_entropy_more_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_inplace_writes_the_gradient_over_the_logits": [
        ("in place not divided by n_valid", "in_row, stats, scale, tile", "in_row, stats, 1.0, tile"),
        ("loss not divided by n_valid", "loss_of_row(target_logit, stats) * scale", "loss_of_row(target_logit, stats)"),
        ("only -100 is ignored", "if target == ignore_index:", "if target == 0:", 2),
        ("grad_output ignored in place", "elif scale != 1.0:", "elif scale < -1e30:"),
        ("one grad_output for all rows", "grad_output_ptr + row.to(tl.int64) * grad_output_stride", "grad_output_ptr"),
        ("edge of the row not multiplied", "edge_dlogits * scale", "edge_dlogits"),
    ],
    "tests.contracts_numbers_test::test_no_row_is_lost_between_programs[cross_entropy_inplace-17]": [
        ("a program's first row only", "range(tl.program_id(0), n_rows,", "range(tl.program_id(0), tl.num_programs(0),"),
    ],
    "test_inplace_any_other_use_of_the_logits_raises[penalty_alone]": [
        ("overwrites without a word to autograd", "torch.autograd.graph.increment_version(logits)", "pass"),
    ],
    "test_inplace_any_other_use_of_the_logits_raises[backward_twice]": [
        ("second backward scales again", "torch.autograd.graph.increment_version(dlogits)", "pass"),
    ],
    "test_inplace_leaf_is_refused_because_its_grad_would_be_its_own_memory[leaf]": [
        ("a leaf is overwritten", "\n    support.refuse_to_overwrite(logits=logits)\n", "\n"),
    ],
    "test_inplace_leaf_is_refused_because_its_grad_would_be_its_own_memory[compiled]": [
        ("compiled, a leaf is overwritten", "support.refuse_to_overwrite(logits=logits)  # inside", "pass  # inside"),
    ],
    "test_torch_compile_in_place_gives_ignored_rows_zeros_even_where_their_logits_are_nan": [
        ("compiled, ignored rows are trained", ".masked_fill(ignored, 0)", ""),
    ],
}  # fmt: skip
