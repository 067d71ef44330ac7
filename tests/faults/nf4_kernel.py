"""Faults in nf4_kernel.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.nf4_kernel"
TESTS = "tests.nf4_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[nf4-fp32]": [
        ("low half first", "w = tl.interleave(high, low)", "w = tl.interleave(low, high)"),
        ("absmax without its mean", "    absmax += tl.load(absmax_mean_ptr)\n", ""),
        ("absmax without its scale", "    absmax *= tl.load(absmax_scales_ptr + blocks // GROUP, mask=mask)\n", ""),
        ("absmax code in NF4's table", "tables_ptr + N_VALUES + absmax_codes", "tables_ptr + (absmax_codes & 15)"),
        ("absmax itself is not multiplied", "(codes & 15).to(tl.int32)) * absmax[:, None]", "(codes & 15).to(tl.int32)) * (absmax[:, None] * 0 + 1)"),
        ("dx of y", "return dy @ weight,", "return 0 * (dy @ weight),"),
    ],
    "test_every_code_and_every_absmax_code": [
        ("7 of 8 values", "(codes & 15).to(tl.int32)", "(codes & 14).to(tl.int32)"),
        ("first scale for all", "absmax_scales_ptr + blocks // GROUP", "absmax_scales_ptr + blocks * 0"),
        ("scale of every 128 blocks", "+ blocks // GROUP", "+ blocks // 128 % 2"),
    ],
    "tests.contracts_numbers_test::test_ragged_sizes[nf4-5-64]": [
        ("last program lost", "-(-n_blocks // TILE_BLOCKS)", "n_blocks // TILE_BLOCKS"),
        ("last block lost", "mask = blocks < n_blocks", "mask = blocks < n_blocks - 1"),
    ],
    "test_recorded_codes_and_numbers": [
        ("codes exchanged", "codes[:, ::2] << 4 | codes[:, 1::2]", "codes[:, 1::2] << 4 | codes[:, ::2]"),
        ("the value below, not the nearest", "between = (table[:-1] + table[1:]) / 2", "between = table[1:]"),
        ("equal steps for absmax", "-magnitudes, ends]).sort().values", "-magnitudes, ends]).sort().values * 0 + torch.linspace(-1, 1, 256, device='cpu')"),
        ("absmax without deviations", "_quantize_absmax(absmax - absmax_mean, absmax_map)", "_quantize_absmax(absmax, absmax_map)"),
    ],
    "test_each_code_is_the_nearest_by_the_formula_in_float64": [
        ("one scale for all groups", "scales = groups.abs().amax(1)", "scales = groups.abs().amax().expand(len(groups))"),
    ],
    "test_round_trip_is_as_near_as_the_tables_allow": [
        ("absmax of signed numbers", "absmax = blocks.abs().amax(1)", "absmax = blocks.amax(1)"),
    ],
    "test_a_block_of_zeros_among_others": [
        ("divided by an absmax of 0", "absmax.clamp(min=TINY)", "absmax"),
    ],
    "tests.contracts_numbers_test::test_any_strides[nf4-codes-every second column]": [
        ("strides of codes not looked at", "*(t.contiguous() for t in nf4),", "*nf4,"),
    ],
    "tests.contracts_autograd_test::test_second_derivative_is_refused_not_silently_zero[nf4-True]": [
        ("second derivative is zero", 'support.refuse_second_derivative("NF4\'s product")', "pass"),
    ],
    "tests.contracts_autograd_test::test_saved_tensors_are_what_the_record_says[nf4]": [
        ("the dense weight is kept", "ctx.save_for_backward(*nf4)", "ctx.save_for_backward(*nf4, nf4_dequantize(NF4(*nf4), shape, x.dtype))"),
    ],
    "tests.contracts_autograd_test::test_backward_under_autocast_has_the_forwards_dtypes[nf4]": [
        ("autocast chooses the dtype", "    @support.outside_autocast\n", ""),
    ],
}  # fmt: skip
