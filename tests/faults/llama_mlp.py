"""Faults in llama_mlp.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.layers.llama_mlp"
TESTS = "tests.llama_mlp_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[swiglu_mlp-fp32]": [
        ("dx of gate alone", ".addmm_(dup, w_up)", ""),
        ("dW_up of gate", "dw_up = dup.t()", "dw_up = dgate.t()"),
        ("dW_down of dy", "dw_down = dout.t() @ y if", "dw_down = dout.t() @ dy.sigmoid() if"),
        ("gate and up swapped", "swiglu.swiglu_forward(gate, up) @", "swiglu.swiglu_forward(up, gate) @"),
    ],
    "tests.llama_mlp_test::test_frozen_weights_get_no_gradient_and_no_matmul": [
        ("matmul for a frozen weight", "dgate.t() @ rows if need_w_gate else None", "dgate.t() @ rows"),
    ],
    "tests.llama_mlp_test::test_hooks_are_called_and_what_they_keep_is_not_overwritten[register_forward_hook-act_fn]": [
        ("activation bypassed", "is_silu(mlp.act_fn) and not", "not"),
    ],
    "tests.llama_mlp_test::test_mlp_of_another_activation_is_refused_with_a_sentence": [
        ("any activation is silu", 'if given not in ("silu", "swish"):', "if False:"),
    ],
    "tests.llama_mlp_test::test_hooks_are_called_and_what_they_keep_is_not_overwritten": [
        ("hooks are not called", "all(map(is_matrix, projections))", "True"),
    ],
    "tests.llama_mlp_test::test_global_hooks_are_called": [
        ("global hooks are not called", " and not has_global_hooks()", ""),
    ],
    "tests.contracts_autograd_test::test_second_derivative_is_refused_not_silently_zero[swiglu_mlp-True]": [
        ("second derivative is zero", 'refuse_second_derivative("SwiGLU in Triton")', 'pass'),
    ],
}  # fmt: skip
