"""Faults in cross_entropy_kernel.py, as tests/mutation_test.py plants them."""

SOURCE = "cross_entropy_kernel"
TESTS = "tests.cross_entropy_more_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_one_tile_and_many_give_the_reference": [
        ("powers of 2, not of e", "LOG2E = tl.constexpr(1.4426950408889634)", "LOG2E = tl.constexpr(1.0)"),
        ("sum not rescaled from tile to tile", "d = d * tl.exp2(m - m_new)", "d = d"),
        ("sum not rescaled to the row", "tl.sum(d * tl.exp2(m - m_row))", "tl.sum(d)"),
        ("edge of the row not summed", " + tl.sum(_exp(edge_logits, LOG2E, m_row))", ""),
        ("mask dropped", 'body_ptr + cols, mask=cols < n_body, other=-float("inf")', "body_ptr + cols", 4),
        ("masked lanes are 0", 'mask=cols < n_body, other=-float("inf")', "mask=cols < n_body, other=0.0", 4),
        ("next column's logit for the target's", "row_ptr + target, mask", "row_ptr + (target + 1) % n_cols, mask"),
        ("target subtracted in the next column", "out_row_ptr + target\n", "out_row_ptr + (target ^ 1)\n"),
        ("target not subtracted", "(_exp(target_logit, unit, m) - d)", "_exp(target_logit, unit, m)"),
        ("sign of the gradient", 'float("nan")) / d', 'float("nan")) / -d'),
        ("gradient of the target only", "_exp(logits, unit, m) * factor", "tl.zeros_like(logits)"),
        ("one tile not written", "for done in range(0, n_body, TILE_SIZE)", "for done in range(TILE_SIZE, n_body, TILE_SIZE)"),
        ("loss not divided by n_valid", "loss_of_row(target_logit, stats) * scale)\n        for", "loss_of_row(target_logit, stats))\n        for"),
        ("gradient not divided by n_valid", "scale = scale / tl.load(n_valid_ptr)", "scale = scale"),
    ],
    "test_large_offset_does_not_cost_digits": [
        ("product rounded before m is subtracted", "tl.exp2(tl.fma(x, unit, -m))", "tl.exp2(x * unit - m)"),
        ("log(d) added to a large m", "tl.log(d / tl.exp2(t))", "tl.log(d) + m * LN2 - target_logit"),
    ],
    "test_logits_of_any_magnitude": [
        ("a huge maximum is rounded like any other", "if tl.abs(m) >= HUGE:", "if False:"),
        ("maxima are counted from too high a number on", "tl.constexpr(torch.finfo(torch.float32).min)", "tl.constexpr(-1e38)"),
        ("columns of one huge negative number overflow", "-HUGE, dtype", "LOWEST, dtype"),
    ],
    "test_loss_of_a_target_far_below_is_finite_as_long_as_pytorchs": [
        ("loss in powers of 2", "tl.log(d) - t * to_log", "tl.log(d) - t"),
        ("target times LOG2E overflows", 't == -float("inf")', "t != t"),
    ],
    "test_masked_vocabulary_is_not_nan": [
        ("column of -inf is NaN", "-HUGE, dtype", '-float("inf"), dtype'),
    ],
    "test_ignored_rows_are_neither_counted_nor_trained": [
        ("only -100 is ignored", "if target == ignore_index:", "if target == -100:", 4),
        ("ignored rows counted", "(targets.long() != ignore_index).sum()", "(targets == targets).sum()"),
    ],
    "test_no_valid_row_is_as_in_pytorch": [
        ("mean of no row is 0", "return row_loss.mean()  # NaN", "return row_loss.sum()  # NaN"),
    ],
    "test_target_outside_the_vocabulary_gives_nan_for_its_row_only": [
        ("target outside the row is trained", 'tl.where(in_row, scale, float("nan"))', "scale"),
    ],
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[cross_entropy_rows-fp32]": [
        ("grad_output ignored", "tl.load(grad_output_ptr + row.to(tl.int64) * grad_output_stride)", "tl.full((), 1.0, tl.float32)", 2),
        ("one grad_output for all rows", "grad_output_ptr + row.to(tl.int64) * grad_output_stride", "grad_output_ptr", 2),
    ],
    "tests.contracts_numbers_test::test_any_strides[cross_entropy_rows-logits-gaps and an odd offset]": [
        ("V for the logits' stride", "row, logits_row_stride, n_cols)", "row, n_cols, n_cols)", 3),
    ],
    "tests.contracts_numbers_test::test_any_strides[cross_entropy_rows-logits-one row repeated (stride 0)]": [
        ("logits' stride for dlogits", "out_cut = cut_row(dlogits_ptr, row, dlogits_row_stride", "out_cut = cut_row(dlogits_ptr, row, logits_row_stride"),
    ],
    "tests.contracts_numbers_test::test_rows_beyond_int32[cross_entropy-logits-0]": [
        ("32-bit offsets", "tl.cast(row, tl.int64) * row_stride", "tl.cast(row, tl.int32) * row_stride"),
    ],
    "tests.contracts_autograd_test::test_inputs_and_upstream_gradients_are_never_changed[cross_entropy]": [
        ("overwrites the logits unasked", "*saved, out_rows,", "*saved, rows,"),
    ],
    "test_inplace_without_a_gradient_to_compute_leaves_the_logits_alone": [
        ("overwrites under no_grad", "self.inplace and torch.is_grad_enabled() and", "self.inplace and"),
    ],
    "test_inplace_in_fp16_waits_for_the_loss_scale": [
        ("fp16 is overwritten", "if inplace and logits.dtype != torch.float16:", "if inplace:"),
    ],
    "tests.contracts_compile_test::test_operators_promise_what_they_return[cross_entropy-2-3-gaps and an odd offset]": [
        ("operator promises other strides", "_new_dlogits(logits, support.as_rows(logits)[1])[0]", "torch.empty_like(logits)"),
    ],
    "tests.contracts_autograd_test::test_second_derivative_is_refused_not_silently_zero[cross_entropy-True]": [
        ("second derivative is zero", 'support.refuse_second_derivative("TritonCrossEntropyLoss")', "pass", 2),
    ],
    "test_inplace_writes_the_gradient_over_the_logits": [
        ("in place not divided by n_valid", "cut, cut, edge_logits, target, target_logit, in_row, stats, scale,", "cut, cut, edge_logits, target, target_logit, in_row, stats, 1.0,"),
        ("loss in place not divided by n_valid", "loss_of_row(target_logit, stats) * scale)\n            store", "loss_of_row(target_logit, stats))\n            store"),
        ("only 0 is ignored", "if target == ignore_index:", "if target == 0:", 4),
        ("grad_output ignored in place", "elif scale != 1.0:", "elif scale < -1e30:"),
        ("one grad_output for all rows", "grad_output_ptr + row.to(tl.int64) * grad_output_stride", "grad_output_ptr", 2),
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
