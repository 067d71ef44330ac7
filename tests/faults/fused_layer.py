"""Faults in fused_layer.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.layers.fused_layer"
TESTS = "tests.fused_layer_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[norm_linear-fp32]": [
        ("dw of x, not of the norm", "y = rmsnorm_forward(x, norm_weight, ctx.eps)[0]  # again", "y = x.contiguous()"),
        ("residual's gradient dropped", "            dx.add_(dresidual)\n", "            pass\n"),
        ("residual's gradient subtracted", "dx.add_(dresidual)", "dx.sub_(dresidual)"),
    ],
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[swiglu_linear-fp32]": [
        ("gradients exchanged", "return dgate, dup, dh", "return dup, dgate, dh"),
        ("dw_down of dgate", "y = as_matrix(again if y is None else y) if need_y else None", "y = as_matrix(dgate)"),
        ("gate and up exchanged", "y = swiglu.swiglu_forward(gate, up)", "y = swiglu.swiglu_forward(up, gate)"),
    ],
    "test_eps_is_used_where_it_shows": [
        ("another eps in the forward", "rmsnorm_forward(x, norm_weight, eps)", "rmsnorm_forward(x, norm_weight, 1e-5)"),
        ("another eps in the backward", "rmsnorm_forward(x, norm_weight, ctx.eps)", "rmsnorm_forward(x, norm_weight, 1e-5)"),
    ],
    "tests.contracts_autograd_test::test_saved_tensors_are_what_the_record_says[norm_linear]": [
        ("y is saved", "        y = y if keep else None\n        ctx.save_for_backward(x,", "        ctx.save_for_backward(x,"),
    ],
    "tests.contracts_autograd_test::test_output_changed_in_place_is_allowed_or_noticed[norm_linear-residual]": [
        ("residual is copied", "return x.view_as(x), *", "return x.clone(), *"),
    ],
    "test_swiglu_linear_saves_gate_and_up_and_its_weight": [
        ("silu(gate) * up is saved", "        y = y if keep else None\n        ctx.save_for_backward(gate,", "        ctx.save_for_backward(gate,"),
    ],
    "test_norm_linear_with_frozen_inputs": [
        ("products for a frozen norm", "if not need_dy:", "if False:"),
    ],
    "test_frozen_products_need_no_second_norm": [
        ("norm for frozen products", "if lora.needs_input(douts, needed):", "if True:"),
    ],
    "tests.contracts_autograd_test::test_outputs_that_nobody_uses_send_no_gradient[norm_linear]": [
        ("gradient of the residual alone is dropped", "return dresidual, *[None] * (6 + len(needed))", "return None, *[None] * (6 + len(needed))"),
    ],
    "test_outputs_that_nobody_uses": [
        ("zeros for what nobody used", "        ctx.set_materialize_grads(False)  # None, not zeros, for a result that nobody used\n", ""),
    ],
    "test_backward_writes_over_gate_and_up_unless_the_graph_is_kept": [
        ("overwrites a graph that is kept", "swiglu.may_overwrite_saved() and", "True and"),
        ("does not overwrite", "swiglu.may_overwrite_saved() and", "False and"),
    ],
    "test_constants_are_not_overwritten": [
        ("overwrites constants", " and need_gate and need_up", ""),
    ],
    "test_frozen_weights_with_adapters_take_no_product_and_the_norm_runs_again": [
        ("the norm runs again though it is kept", "if y is None:", "if True:"),
    ],
    "tests.contracts_autograd_test::test_frozen_inputs_leave_the_others_their_gradients[norm_lora-x]": [
        ("no dh where x alone needs it", "if ctx.add and (need_dy or any(needed[1::4])):", "if ctx.add and any(needed[1::4]):"),
    ],
    "tests.contracts_autograd_test::test_second_derivative_is_refused_not_silently_zero[norm_linear-True]": [
        ("second derivative is zero", '    def backward(ctx, dresidual, *douts):\n        refuse_second_derivative("The fused layer")', '    def backward(ctx, dresidual, *douts):\n        pass'),
    ],
    "test_functions_take_the_layers_modules": [
        ("norm's eps ignored", "norm.variance_epsilon", "1e-5", 2),
    ],
}  # fmt: skip
