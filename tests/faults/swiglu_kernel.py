"""Faults in swiglu_kernel.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.swiglu_kernel"
TESTS = "tests.swiglu_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[swiglu-fp32]": [
        ("powers of 2, not of e", "tl.constexpr(1.4426950408889634)", "tl.constexpr(1.0)"),
        ("sigmoid of -gate", "tl.exp2(gate * -LOG2E)", "tl.exp2(gate * LOG2E)"),
        ("y without gate", "(gate * sigmoid).to(dtype)", "sigmoid.to(dtype)"),
        ("dgate with sigmoid held constant", "(1.0 + gate * (1.0 - sigmoid))", "1.0"),
        ("dgate with s for 1 - s", "gate * (1.0 - sigmoid)", "gate * sigmoid"),
        ("dgate without up", "dy * up * sigmoid * (1.0", "dy * sigmoid * (1.0"),
        ("dup of gate, not silu", "dup = dy * (gate * sigmoid)", "dup = dy * gate"),
        ("dup without dy", "dup = dy * (gate * sigmoid)", "dup = gate * sigmoid"),
    ],
    "test_silu_is_rounded_before_up_multiplies_it": [
        ("silu not rounded", "(gate * sigmoid).to(dtype).to(tl.float32) * up", "gate * sigmoid * up"),
    ],
    "test_steep_infinite_and_nan_gates_are_as_in_pytorch": [
        ("overflow above 88", "1.0 / (1.0 + tl.exp2(gate * -LOG2E))", "tl.exp2(gate * LOG2E) / (1.0 + tl.exp2(gate * LOG2E))"),
    ],
    "tests.contracts_numbers_test::test_ragged_sizes[swiglu-257]": [
        ("last element lost", "cols < length", "cols < length - 1"),
        ("last block lost", "-(-n_rows * n_cols // BLOCK_SIZE)", "n_rows * n_cols // BLOCK_SIZE"),
    ],
    "tests.contracts_numbers_test::test_ragged_rows_with_gaps_between_them[swiglu-257]": [
        ("last block of each row lost", "n_rows * -(-n_cols // BLOCK_SIZE)", "n_rows * (n_cols // BLOCK_SIZE)"),
    ],
    "tests.contracts_numbers_test::test_any_strides[swiglu-up-gaps and an odd offset]": [
        ("rows taken for one line", "line = all(t.is_contiguous() for t, _ in rows)", "line = True"),
        ("gate's stride for up", "up_ptr + row * up_row_stride + cols, mask=mask).to", "up_ptr + row * gate_row_stride + cols, mask=mask).to", 2),
    ],
    "tests.contracts_numbers_test::test_any_strides[swiglu-dy-gaps and an odd offset]": [
        ("gate's stride for dy", "row * dy_row_stride", "row * gate_row_stride"),
    ],
    "tests.contracts_numbers_test::test_any_strides[swiglu-gate-one row repeated (stride 0)]": [
        ("gate's stride for dgate", "dgate_ptr + row * n_cols", "dgate_ptr + row * gate_row_stride"),
    ],
    "tests.contracts_numbers_test::test_any_strides[swiglu-up-one row repeated (stride 0)]": [
        ("up's stride for dup", "dup_ptr + row * n_cols", "dup_ptr + row * up_row_stride"),
    ],
    "tests.contracts_numbers_test::test_rows_beyond_int32[swiglu-gate-0]": [
        ("32-bit offsets", "(program // blocks_per_row).to(tl.int64)", "(program // blocks_per_row)"),
    ],
    "test_launchers_write_over_what_they_were_given": [
        ("y made again is not rounded twice", "        y = swiglu_of(gate, sigmoid, up, dtype)\n", "        y = gate * sigmoid * up\n"),
        ("y made again is silu", "y = swiglu_of(gate, sigmoid, up, dtype)\n", "y = gate * sigmoid\n"),
    ],
    "tests.contracts_autograd_test::test_inputs_and_upstream_gradients_are_never_changed[swiglu]": [
        ("overwrites unasked", "results = _backward_results(dy, gate, up, need_y)", "results = gate, up, dy if need_y else None"),
    ],
    "test_inplace_allocates_only_the_output": [
        ("not in place", "inplace = ctx.inplace and may_overwrite_saved()", "inplace = False"),
    ],
    "test_inplace_under_retain_graph_leaves_gate_and_up_alone": [
        ("overwrites what is needed again", "not torch._C._autograd._get_current_graph_task_keep_graph()", "True"),
    ],
    "test_inplace_other_saved_use_raises": [
        ("overwrites without a word to autograd", "torch.autograd.graph.increment_version(t)", "pass"),
    ],
    "test_inplace_refusal_comes_in_the_forward": [
        ("a leaf is overwritten", "            support.refuse_to_overwrite(gate=gate, up=up)\n", "            pass\n"),
    ],
    "test_inplace_refuses_what_cannot_hold_a_gradient[gate]": [
        ("gaps are overwritten", "    support.refuse_to_overwrite(**sources)\n", ""),
    ],
    "test_inplace_refuses_what_cannot_hold_a_gradient[dy]": [
        ("any dy is overwritten", '({"dy": dy} if need_y else {})', "{}"),
    ],
    "test_torch_compile_of_the_backward_alone[True-True]": [
        ("compiled, does not overwrite", "return gate.copy_(dgate), up.copy_(dup), dy.copy_(y)", "return dgate, dup, y"),
    ],
    "test_torch_compile_of_the_backward_alone[True-False]": [
        ("compiled, overwrites unasked", "    if not inplace:\n", "    if False:\n"),
    ],
    "test_one_input_without_a_gradient": [
        ("overwrites an input without a gradient", "inplace and all(ctx.needs_input_grad[:2])", "inplace"),
    ],
    "tests.contracts_autograd_test::test_second_derivative_is_refused_not_silently_zero[swiglu-True]": [
        ("second derivative is zero", 'refuse_second_derivative("SwiGLU in Triton")', "pass"),
    ],
}  # fmt: skip
