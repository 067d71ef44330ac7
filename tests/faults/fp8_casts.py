"""Faults in fp8_casts.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.fp8_casts"
TESTS = "tests.fp8_casts_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_norm_is_the_quantized_unrounded_product[96-dtype1]": [
        ("x_hat not rounded", "(x * rstd).to(x_ptr.dtype.element_ty).to(tl.float32)", "x * rstd"),
        ("y rounded twice", "    y = x_hat * w\n", "    y = (x_hat * w).to(x_ptr.dtype.element_ty).to(tl.float32)\n"),
        ("no weight", "    y = x_hat * w\n", "    y = x_hat\n"),
        ("scale of x_hat", "tl.max(magnitude_bits(y), axis=0))\n    tl.store(scales_ptr + row, scale)\n    store_codes(codes_ptr + row * n_cols, y * inverse, n_cols, BLOCK_SIZE)\n\n\n# ---- SwiGLU: a", "tl.max(magnitude_bits(x_hat), axis=0))\n    tl.store(scales_ptr + row, scale)\n    store_codes(codes_ptr + row * n_cols, y * inverse, n_cols, BLOCK_SIZE)\n\n\n# ---- SwiGLU: a"),
        ("no eps", "/ n_cols + eps)", "/ n_cols)"),
    ],
    "test_norm_is_as_near_to_float64_as_e4m3_allows": [
        ("mean over the block", "tl.sum(x * x, axis=0) / n_cols", "tl.sum(x * x, axis=0) / BLOCK_SIZE"),
    ],
    "test_swiglu_is_that_of_the_separate_kernels": [
        ("gate and up exchanged", "y = swiglu_of(gate, sigmoid_of(gate), up,", "y = swiglu_of(up, sigmoid_of(up), gate,"),
        ("dup without its scale", "dup * d_inverse", "dup * y_inverse"),
        ("y with the gradients' scale", "y * y_inverse, left", "y * d_inverse, left"),
        ("dgate twice", "store_codes(dup_ptr + start, dup *", "store_codes(dup_ptr + start, dgate *"),
        ("scales exchanged", "tl.store(y_scales_ptr + row, y_scale)", "tl.store(y_scales_ptr + row, d_scale)"),
    ],
    "test_chunks_of_any_size": [
        ("maxima of the last chunk alone", "d_amax = tl.maximum(d_amax, tl", "d_amax = tl.maximum(d_amax * 0, tl"),
        ("second pass without the last chunk", "tl.range(0, n_cols, CHUNK):\n        dgate, dup, y = _chunk(dy_ptr, gate_ptr, up_ptr, start, n_cols, \"evict_first\"", "tl.range(0, n_cols - CHUNK + 1, CHUNK):\n        dgate, dup, y = _chunk(dy_ptr, gate_ptr, up_ptr, start, n_cols, \"evict_first\""),
    ],
    "test_one_scale_for_both_gradients": [
        ("scale of dgate alone", "tl.maximum(magnitude_bits(dgate), magnitude_bits(dup))", "magnitude_bits(dgate)"),
        ("scale of dup alone", "tl.maximum(magnitude_bits(dgate), magnitude_bits(dup))", "magnitude_bits(dup)"),
    ],
    "test_silu_is_rounded_before_up_multiplies_it": [
        ("silu not rounded", "y = swiglu_of(gate, sigmoid_of(gate), up, gate_ptr.dtype.element_ty)", "y = swiglu_of(gate, sigmoid_of(gate), up, tl.float32)"),
    ],
    "test_any_strides_of_inputs_that_stay_as_they_were": [
        ("gate's stride for up", "up_ptr + row * up_row_stride + cols", "up_ptr + row * gate_row_stride + cols"),
        ("gate's stride for dy in the backward", "dy_ptr += row * dy_row_stride", "dy_ptr += row * gate_row_stride"),
        ("up's stride for gate in the backward", "gate_ptr += row * gate_row_stride", "gate_ptr += row * up_row_stride"),
        ("columns of the weight taken for adjacent", "weight.contiguous(),", "weight,"),
        ("columns of x taken for adjacent", "x = adjacent_columns(x)", "pass"),
        ("columns taken for adjacent in the backward", "dy, gate, up = map(adjacent_columns, (dy, gate, up))", "pass"),
    ],
    "test_rows_beyond_int32": [
        ("32-bit offsets of x", "row = tl.program_id(0).to(tl.int64)  # row * stride", "row = tl.program_id(0)  # row * stride"),
        ("32-bit offsets in the backward", "row = tl.program_id(0).to(tl.int64)\n    dy_ptr", "row = tl.program_id(0)\n    dy_ptr"),
    ],
}  # fmt: skip
