"""Faults in fp8_layer.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.layers.fp8_layer"
TESTS = "tests.fp8_layer_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_results_and_gradients_are_those_of_the_rounded_numbers": [
        ("weights' gradients of one scale's codes", "dout, x = transpose_rows(dout), transpose_rows(x)  # (sum of O, N), (I, N)", "dout, x = (Rows(r.codes.t().contiguous(), r.scales.amax().repeat(r.codes.shape[1])) for r in (dout, x))"),
        ("down with the scale of gate and up", "        scales = scale, scale_down\n", "        scales = scale, scale / 4096\n"),
        ("residual's gradient dropped", "        dx.add_(dresidual)\n", "        pass\n"),
        ("the norm's input in place of its output", "        norm, of_results = (rmsnorm_fp8, dout) if", "        norm, of_results = (lambda x, *_: (quantize_rows(x), None), dout) if"),
        ("the norm without its weight where FP8 cannot sum", " else (rmsnorm_forward, douts)\n", " else (lambda x, w, eps: rmsnorm_forward(x, torch.ones_like(w), eps), douts)\n"),
        ("weights' gradients exact", "in_fp8 = takes_fp8(", "in_fp8 = not (", 3),
        ("any number of tokens", "in_fp8 = takes_fp8(", "in_fp8 = bool(", 3),
        ("gate and up exchanged", "dgate, dup, inner = swiglu_backward(", "dup, dgate, inner = swiglu_backward("),
        ("x of o as it was rounded in another way", "            x = quantize_rows(as_rows(x)) if in_fp8", "            x = quantize_rows(0.75 * as_rows(x)) if in_fp8"),
        ("dw of o of the wrong side", "douts = [as_rows(dout)]  # (N, O)", "douts = [as_rows(dout).flip(0)]"),
    ],
    "test_only_what_needs_a_gradient_is_multiplied": [
        ("the input's gradient always", "    if not (need_x or need_norm_weight):\n", "    if False:\n"),
        ("all weights' gradients as soon as one is needed", "    if all(needed):\n", "    if True:\n"),
        ("transposed for nothing", "    if any(need_weights):\n", "    if True:\n"),
    ],
    "test_unused_results_have_no_gradient": [
        ("zeros for what nobody used", "        ctx.set_materialize_grads(False)  # None, not zeros, for a result that nobody used\n", ""),
    ],
    "test_a_second_derivative_is_refused": [
        ("a second derivative of nothing", 'refuse_second_derivative("FP8 in the layer")', "pass", 3),
    ],
}  # fmt: skip
