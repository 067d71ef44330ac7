"""Faults in fp8_kernel.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.fp8_kernel"
TESTS = "tests.fp8_kernel_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_a_scale_is_the_smallest_power_of_two_that_holds_the_row": [
        ("above 1.75 not rounded up", "ROUND_UP) >> 23) - 8", "ROUND_UP * 0) >> 23) - 8"),
        ("always rounded up", "tl.constexpr(0x1FFFFF)", "tl.constexpr(0x7FFFFF)"),
        ("scale twice as large", "ROUND_UP) >> 23) - 8", "ROUND_UP) >> 23) - 7"),
        ("the signed maximum", "bitcast=True) & 0x7FFFFFFF", "bitcast=True)"),
    ],
    "test_each_code_is_the_nearest_by_the_definition": [
        ("inverse of half the scale", "((254 - exponent) << 23).to(", "((253 - exponent) << 23).to("),
    ],
    "test_the_references_bits": [
        ("last number lost", "scaled.to(codes_ptr.dtype.element_ty), mask=cols < n_cols", "scaled.to(codes_ptr.dtype.element_ty), mask=cols < n_cols - 1"),
        ("last number not looked at", "tl.load(x_ptr + cols, mask=cols < n_cols, other", "tl.load(x_ptr + cols, mask=cols < n_cols - 1, other"),
    ],
    "test_parts_lie_side_by_side_under_one_scale": [
        ("scale without the second part", "tl.max(magnitude_bits(b), axis=0)", "amax"),
        ("scale without the third part", "tl.max(magnitude_bits(c), axis=0)", "amax"),
        ("third part over the second", "codes_ptr + a_cols + b_cols, c * inverse", "codes_ptr + a_cols, c * inverse"),
        ("second part for the third", "c * inverse, c_cols, C_BLOCK", "c * inverse * 0, c_cols, C_BLOCK"),
    ],
    "test_weights_lie_one_below_the_other": [
        ("each over the first", "for codes, scales, weight in zip(*(t.split(lengths) for t in rows), weights):", "for codes, scales, weight in zip(*([t[:n] for n in lengths] for t in rows), weights):"),
    ],
    "test_any_strides": [
        ("columns taken for adjacent", "return t if t.stride(1) == 1 else t.contiguous()", "return t"),
    ],
    "test_any_strides[1]": [
        ("first part's stride for the second", "b_ptr + row * b_row_stride", "b_ptr + row * a_row_stride"),
    ],
    "test_rows_beyond_int32": [
        ("32-bit offsets", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"),
    ],
    "test_a_row_of_zeros_has_zero_codes_and_raises_no_other_scale": [
        ("scale of about 1 for zeros", "tl.where(amax_bits < INFINITY, inverse", "tl.where(amax_bits != 0, inverse"),
    ],
    "test_a_row_that_is_not_finite_is_nan_and_stays_alone": [
        ("others of the row become 0", 'tl.where(amax_bits < INFINITY, inverse, float("nan"))', "inverse"),
        ("a NaN's bits overflow", "    amax_bits = tl.minimum(amax_bits, INFINITY)\n", ""),
    ],
    "test_denormal_rows": [
        ("scales below fp32's normal numbers", "- 8, 1)", "- 8, 0)"),
    ],
    "test_transposed_bits_are_the_references": [
        ("not moved to one scale", "        x *= tl.div_rn(tl.load(scales_ptr + rows, mask=row_mask, other=0.0), largest)[:, None]\n", "        pass\n"),
        ("last row lost", "rows < n_rows, cols < n_cols", "rows < n_rows - 1, cols < n_cols"),
        ("last column lost", "rows < n_rows, cols < n_cols", "rows < n_rows, cols < n_cols - 1"),
        ("last tile of rows lost", "(-(-n_rows // TILE_ROWS), ", "(n_rows // TILE_ROWS, "),
        ("first tile's scales alone", "tl.program_id(0) == 0:", "tl.program_id(0) + tl.program_id(1) == 0:"),
        ("scales for none", "if tl.program_id(0) == 0:", "if tl.program_id(0) < 0:"),
    ],
    "test_transposing_is_exact_but_for_subnormal_numbers": [
        ("the smallest scale", "scales, scales.amax())", "scales, scales.amin())"),
    ],
    "test_columns_of_a_wider_matrix_are_transposed": [
        ("rows taken for contiguous", "x, x.stride(0),", "x, n_cols,"),
    ],
    "test_weights_are_rounded_on_the_way": [
        ("not scaled", "        x *= tl.div_rn(tl.full((), 1.0, tl.float32), largest)\n", ""),
        ("all weights over the first", "zip(transposed.codes.split(lengths, dim=1), weights)", "zip([transposed.codes[:, : max(lengths)]] * len(weights), weights)"),
        ("results taken for contiguous", "codes, codes.stride(0),", "codes, n_rows,"),
    ],
    "test_weights_that_are_not_finite_stay_so_on_the_way": [
        ("infinity is the largest number", '        x = tl.where(magnitude_bits(x) < INFINITY, x, float("nan"))  # the cast would make it 448\n', ""),
    ],
    "test_what_does_not_fit_is_refused": [
        ("any scale", '("scale", scale, FP32, ())', '("scale", scale, FLOATS, None)'),
    ],
    "test_product_is_that_of_the_rounded_numbers": [
        ("one scale of b for all", "* b.scales[None, :]", "* b.scales[0]"),
        ("a without scales", "product * a.scales[:, None] * b", "product * b"),
    ],
    "test_sizes_that_a_product_takes": [
        ("any even size", "MULTIPLE = 16", "MULTIPLE = 2"),
        ("nothing is a size", "size > 0 and size % MULTIPLE", "size % MULTIPLE"),
    ],
    "test_a_gpu_without_fp8_is_told_in_a_sentence": [
        ("any GPU", "if capability < FIRST_CAPABILITY:", "if False:"),
        ("from sm_90 on", "FIRST_CAPABILITY = (8, 9)", "FIRST_CAPABILITY = (9, 0)"),
    ],
}  # fmt: skip
