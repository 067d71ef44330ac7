"""Faults in rmsnorm_kernel.py, as tests/mutation_test.py plants them."""

SOURCE = "rmsnorm_kernel"
TESTS = "tests.rmsnorm_more_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "rmsnorm_test::test_forward_and_backward_match_float64[Float32]": [
        ("c1 term dropped", " - x_hat * c1)\n        tl.store", ")\n        tl.store"),
        ("c1 term added", " - x_hat * c1)\n        tl.store", " + x_hat * c1)\n        tl.store"),
        ("dx without the weight", "dx = rstd * (w * dy", "dx = rstd * (dy"),
        ("dw of x, not x_hat", "dw += dy * x_hat", "dw += dy * x"),
    ],
    "test_x_hat_is_rounded_before_the_weight_multiplies_it": [
        ("x_hat not rounded", "(x * rstd).to(x_ptr.dtype.element_ty).to(tl.float32)", "x * rstd"),
    ],
    "test_mixed_dtypes_are_promoted_as_pytorch_does": [
        ("y in x's dtype", "x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)", "x.dtype"),
    ],
    "test_eps_is_used_where_it_shows": [
        ("eps is another", "/ n_cols + eps)", "/ n_cols + 1e-7)"),
        ("eps outside the root", "tl.rsqrt(tl.sum(x * x, axis=0) / n_cols +", "1 / (tl.sqrt(tl.sum(x * x, axis=0) / n_cols) +"),
    ],
    "tests.contracts_numbers_test::test_ragged_sizes[rmsnorm-33]": [
        ("mask dropped", "x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)\n    w =", "x_row_stride + cols).to(tl.float32)\n    w ="),
        ("masked lanes are 1", "cols, mask=mask, other=0.0).to(tl.float32)\n    w =", "cols, mask=mask, other=1.0).to(tl.float32)\n    w ="),
        ("mean over BLOCK_SIZE", "tl.sum(x * x, axis=0) / n_cols", "tl.sum(x * x, axis=0) / BLOCK_SIZE"),
        ("c1 over BLOCK_SIZE", "* rstd / n_cols", "* rstd / BLOCK_SIZE"),
    ],
    "tests.contracts_numbers_test::test_no_row_is_lost_between_programs[rmsnorm-17]": [
        ("last row skipped", "tl.range(program, n_rows,", "tl.range(program, n_rows - 1,"),
        ("dw of a program's last row only", "dw += dy", "dw = dy"),
        ("dw of one program lost", "dweight, n_programs, H", "dweight, n_programs - 1, H"),
    ],
    "tests.contracts_numbers_test::test_any_strides[rmsnorm-x-gaps and an odd offset]": [
        ("y's stride for x", "x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)\n    w =", "y_row_stride + cols, mask=mask, other=0.0).to(tl.float32)\n    w ="),
    ],
    "tests.contracts_numbers_test::test_any_strides[rmsnorm-x-one row repeated (stride 0)]": [
        ("x's stride for dx", "row * dx_row_stride", "row * x_row_stride"),
    ],
    "tests.contracts_numbers_test::test_any_strides[rmsnorm-dy-gaps and an odd offset]": [
        ("x's stride for dy", "row * dy_row_stride", "row * x_row_stride"),
    ],
    "tests.contracts_numbers_test::test_any_strides[rmsnorm-weight-every second column]": [
        ("weight taken for contiguous", "None if weight is None else weight.contiguous()", "weight", 2),
    ],
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[rmsnorm_without_weight-fp32]": [
        ("gradient without a weight is 0", "held = _load_weight(w_ptr, cols, mask)", "held = 0.0 if w_ptr is None else _load_weight(w_ptr, cols, mask)"),
    ],
    "test_module_without_a_weight_has_no_parameters": [
        ("any length without a weight", "if self.weight is None and x.shape[-1:] != (self.hidden_size,):", "if False:"),
    ],
    "test_rstd_of_another_shape_or_dtype_is_refused_with_a_sentence": [
        ("any rstd", "        (\"rstd?\", rstd, FP32, (\"n_rows\",)),\n", ""),
    ],
    "test_rstd_may_have_gaps": [
        ("rstd taken for adjacent", "rstd.contiguous()", "rstd"),
    ],
    "tests.contracts_numbers_test::test_rows_beyond_int32[rmsnorm-x-0]": [
        ("32-bit offsets forward", "tl.program_id(0).to(tl.int64)", "tl.program_id(0)"),
        ("32-bit offsets backward", "tl.cast(row_number, tl.int64)", "tl.cast(row_number, tl.int32)"),
    ],
    "test_a_weight_that_needs_no_gradient_gets_none_and_no_buffer[frozen]": [
        ("dw for a frozen weight", "need_dweight = ctx.needs_input_grad[1]", "need_dweight = True"),
    ],
    "tests.contracts_autograd_test::test_second_derivative_is_refused_not_silently_zero[rmsnorm-True]": [
        ("second derivative is zero", 'support.refuse_second_derivative("TritonRMSNorm")', "pass"),
    ],
}  # fmt: skip
