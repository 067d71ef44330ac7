"""Faults in reverse_kl_kernel.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.reverse_kl_kernel"
TESTS = "tests.reverse_kl_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_rising_maxima_are_rescaled": [
        ("d_s not rescaled", "return a, d_s * decay_s, d_t", "return a, d_s, d_t"),
        ("d_t not rescaled", "d_t * tl.exp2(-rise_t * unit)", "d_t"),
        ("a not shifted", "(a + d_s * (rise_t - rise_s)) * decay_s, 0.0)  #", "a * decay_s, 0.0)  #"),
        ("a shifted the other way", "(rise_t - rise_s)) * decay_s, 0.0)  #", "(rise_s - rise_t)) * decay_s, 0.0)  #"),
        ("a not rescaled", "(rise_t - rise_s)) * decay_s, 0.0)  #", "(rise_t - rise_s)), 0.0)  #"),
        ("not rescaled to the row", "_rescale(a, d_s, d_t, m_s_row - m_s, m_t_row - m_t, unit)", "(a, d_s, d_t)"),
        ("teacher not rescaled to the row", "m_s_row - m_s, m_t_row - m_t, unit)", "m_s_row - m_s, m_t - m_t, unit)"),
    ],
    "test_one_tile_and_many_give_the_reference[tile0-dtype0]": [
        ("edge of the row not summed", "tl.sum(a) + tl.sum(w * x)", "tl.sum(a)"),
        ("edge of the teacher not summed", "tl.sum(d_t) + tl.sum(z)", "tl.sum(d_t)"),
        ("masked lanes are 0", 'mask=mask, other=-float("inf"), eviction', "mask=mask, other=0.0, eviction", 2),
        ("mean not subtracted", "w * factor * (x - mean_x)", "w * factor * x", 2),
        ("sign of the gradient", "w * factor * (x - mean_x)", "w * factor * (mean_x - x)", 2),
        ("student's statistics for the teacher", "return m_s_row, m_t_row,", "return m_s_row, m_s_row,"),
        ("powers of 2 in the gradient", "inverse_t / d_s * (unit * LN2)", "inverse_t / d_s * unit"),
        ("powers of 2 in the loss", "a_row / d_s_row * (unit * LN2) +", "a_row / d_s_row * unit +"),
        ("gradient not divided by n_counted", "tl.num_programs(0) if n_counted_ptr is None else tl.load(n_counted_ptr)", "1"),
        ("one tile not written", "for done in range(0, n_body, TILE_SIZE)", "for done in range(TILE_SIZE, n_body, TILE_SIZE)"),
        ("edge not written", "mask=in_edge)", "mask=in_edge & (edge < 0))"),
    ],
    "test_any_part_of_a_row_may_be_kept_in_the_cache[0]": [
        ("what is not kept is not read", "range(first_kept if kept else 0, n_read if kept else", "range(first_kept, n_read if kept else"),
    ],
    "test_any_part_of_a_row_may_be_kept_in_the_cache[300]": [
        ("what is kept is not read", "n_read if kept else first_kept, TILE_SIZE)", "first_kept, TILE_SIZE)"),
        ("a part is read twice", "range(first_kept if kept else 0, n_read", "range(0, n_read"),
    ],
    "test_temperature_divides_both_and_no_square_multiplies[dtype0-2]": [
        ("temperature multiplies", "1 / (LN2.value * SHRINK.value * temperature)", "temperature / (LN2.value * SHRINK.value)"),
        ("temperature ignored", "1 / (LN2.value * SHRINK.value * temperature)", "1 / (LN2.value * SHRINK.value)"),
        ("gradient not divided by T", "inverse_t = unit * LN2 * SHRINK", "inverse_t = 1.0"),
    ],
    "test_large_offset_does_not_cost_digits": [
        ("product rounded before m is subtracted", "tl.fma(logits[0], SHRINK, -m_s)", "tl.fma(logits[0] * 0.3, SHRINK / 0.3, -m_s)"),
    ],
    "test_logits_of_any_magnitude[True-dtype6-10000000000.0-0.6]": [
        ("maximum multiplied, and rounded", "tl.fma(logits[0], SHRINK, -m_s)", "tl.fma(logits[0], SHRINK * 0.3, -m_s * 0.3) / 0.3"),
    ],
    "test_rows_at_an_end_of_the_range[-1]": [
        ("first maximum is not the lowest number", "tl.constexpr(torch.finfo(torch.float32).min * 2.0**-24)", "tl.constexpr(-1e31)"),
    ],
    "test_vocabulary_masked_by_a_large_number[teacher--3.4028234663852886e+38]": [
        ("sum of large log-ratios overflows", "2.0**-24", "2.0**0", 2),
    ],
    "test_padded_vocabulary_is_not_nan[both-first chunk]": [
        ("-inf - -inf", "tl.where(w > 0, below_s - below_t, 0.0)", "below_s - below_t"),
        ("column of -inf is NaN", "tl.constexpr(torch.finfo(torch.float32).min * 2.0**-24)", 'tl.constexpr(-float("inf"))'),
    ],
    "test_reductions_with_and_without_a_mask[True-batchmean-1.0]": [
        ("mask ignored", "None if mask is None else mask.contiguous()", "None"),
        ("all rows counted", "n_counted = mask.sum()", "n_counted = mask.numel() + 0 * mask.sum()"),
        ("loss not divided", "return row_loss.sum() / n_counted", "return row_loss.sum()"),
    ],
    "test_nan_logits_of_rows_that_do_not_count_stay_out": [
        ("rows that do not count are read", "tl.where(counted, n_body, 0), in_edge & counted", "n_body, in_edge", 2),
    ],
    "test_targets_as_a_mask": [
        ("only -100 is ignored", "mask = mask != self.ignore_index", "mask = mask != -100"),
    ],
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[reverse_kl-fp32]": [
        ("given gradient is kept whatever grad_output", "is not None or scale != 1.0:", "is not None or scale == 3.0:"),
    ],
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[reverse_kl_rows-fp32]": [
        ("one grad_output for all rows", "grad_output_ptr + tl.cast(tl.program_id(0), tl.int64) * grad_output_stride", "grad_output_ptr"),
    ],
    "tests.contracts_numbers_test::test_any_strides[reverse_kl_rows-teacher_logits-gaps and an odd offset]": [
        ("teacher not cut like the student", "if (row_stride - logits.shape[-1]) % 8:", "if False:"),
    ],
    "tests.contracts_numbers_test::test_any_strides[reverse_kl_rows-teacher_logits-gaps of 16]": [
        ("student's stride for the teacher", "*_rows_cut_alike(teacher)\n", "_rows_cut_alike(teacher)[0], _rows_cut_alike(student)[1]\n"),
    ],
    "test_mass_that_underflows_where_the_teacher_has_none_is_not_nan": [
        ("inf * 0", "tl.where(decay_s > 0, (a + d_s * (rise_t - rise_s)) * decay_s, 0.0)", "(a + d_s * (rise_t - rise_s)) * decay_s"),
    ],
    "test_statistics_of_shards_combine_to_those_of_whole_rows": [
        ("shards' a not shifted", "(a + d_s * (rise_t - rise_s)) * decay_s, 0.0)\n    d_s, d_t", "a * decay_s, 0.0)\n    d_s, d_t"),
        ("shards' d_t not rescaled", "d_t * torch.exp2(-rise_t * _unit(temperature))", "d_t"),
    ],
    "test_gradient_of_the_forward_becomes_the_leafs_without_a_copy": [
        ("given gradient is held while it is handed out", "dstudent, ctx.dstudent = ctx.dstudent, None", "dstudent = ctx.dstudent"),
        ("given gradient not used", "mask, *options, now)", "mask, *options, False)"),
    ],
    "test_teacher_that_needs_a_gradient_is_refused": [
        ("teacher's gradient dropped", "if grad_enabled and ctx.needs_input_grad[1]:", "if False:"),
    ],
    "tests.contracts_autograd_test::test_second_derivative_is_refused_not_silently_zero[reverse_kl-True]": [
        ("second derivative is zero", 'support.refuse_second_derivative("TritonReverseKLLoss")', "pass"),
    ],
}  # fmt: skip
