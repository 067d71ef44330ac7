"""Faults in lora_linear.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.layers.lora_linear"
TESTS = "tests.lora_linear_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_any_number_of_projections": [
        ("scale dropped in the forward", "addmm_(h_one, b_one.t(), alpha=scale)", "addmm_(h_one, b_one.t())"),
        ("adapter dropped in the forward", "            as_matrix(out).addmm_(h_one, b_one.t(), alpha=scale)\n", "            pass\n"),
        ("scale dropped in dh", "addmm_(dout, b_one, beta=0, alpha=scale)", "addmm_(dout, b_one, beta=0)"),
        ("dh on top of what was there", "addmm_(dout, b_one, beta=0, alpha=scale)", "fill_(1).addmm_(dout, b_one, alpha=scale)"),
        ("scale dropped in db", "addmm_(dout.t(), h_one, beta=0, alpha=scales[i])", "addmm_(dout.t(), h_one, beta=0)"),
        ("scale of the first in every db", "alpha=scales[i]", "alpha=2 * scales[0]"),
        ("dx of the last projection alone", "dout @ weight if dx is None else dx.addmm_(dout, weight)", "dout @ weight"),
        ("dx of the first projection alone", "dx.addmm_(dout, weight)", "dx"),
        ("dx without the adapters", "return dx if dh is None else dx.addmm_(dh, stacked)", "return dx"),
        ("da of the first for all", "da[i] if used and need_a[i] else None", "da[0] if used and need_a[i] else None"),
        ("the first columns of h for all", "h.split(ranks(b), dim=1)", "[h[:, :rank] for rank in ranks(b)]"),
    ],
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[lora_linear-fp32]": [
        ("bias forgotten", "linear(x, weight) if bias is None else biased(x, weight, bias)", "linear(x, weight)"),
        ("dbias of one row", "dout.sum(0) if", "dout[0] if"),
    ],
    "test_gradients_of_unused_results_are_none": [
        ("zeros for what nobody used", "        ctx.set_materialize_grads(False)  # None, not zeros, for a result that nobody used\n", ""),
        ("noise for what nobody used", "            dh_one.zero_()\n", "            dh_one.fill_(1)\n"),
        ("da where nobody used the result", "da[i] if used and need_a[i] else None", "da[i] if need_a[i] else None"),
    ],
    "test_there_is_nothing_between_the_products": [
        ("scaled by a pass", "as_matrix(out).addmm_(h_one, b_one.t(), alpha=scale)", "as_matrix(out).add_(scale * (h_one @ b_one.t()))"),
    ],
    "test_no_product_whose_result_nobody_asked_for": [
        ("product for a frozen weight", "dout.t() @ x if used and need_w[i] else None", "dout.t() @ x if used and x is not None else None"),
        ("dh for a frozen adapter", "if need_x or any(needed[1::4]):", "if True:"),
    ],
    "test_x_is_kept_for_the_gradients_of_w_and_a_alone": [
        ("x is kept anyway", "x if keep_x else None, h", "x, h"),
    ],
    "test_quantized_weight_is_made_in_the_forward_and_in_the_backward_and_not_kept": [
        ("another weight in the backward", "            weight = weight if base is None else base.dequantized()\n", "            weight = weight if base is None else base.weight\n"),
        ("the weight as it is kept", "base.dequantized() for w, base", "base.weight for w, base"),
    ],
    "test_what_peft_makes_otherwise_runs_pefts_code": [
        ("dropout bypassed", "without_dropout and linears", "linears"),
        ("bias of the adapter bypassed", " and a.bias is None and b.bias is None", ""),
        ("DoRA bypassed", "name not in module.lora_A or name in module.lora_variant", "name not in module.lora_A"),
    ],
    "test_what_is_changed_later_runs_pefts_code": [
        ("merged adapters added again", "module.disable_adapters or module.merged", "module.disable_adapters"),
        ("disabled adapters added", "module.disable_adapters or module.merged", "module.merged"),
        ("first of two adapters alone", "    if len(module.active_adapters) != 1:\n        return False\n    (name,) =", "    name, *_ ="),
        ("hooks bypassed", " and all(map(is_unchanged, layers))", ""),
        ("hooks on the base layer bypassed", "is_linear(layer) or", "type(layer) is torch.nn.Linear or"),
        ("hooks on A and B bypassed", "layers = module, a, b, module.lora_dropout[name]", "layers = (module,)"),
    ],
    "test_autocast_and_hooks_on_all_modules_are_pefts": [
        ("hooks on all modules bypassed", "has_global_hooks() or autocast or not fits", "autocast or not fits"),
    ],
    "test_adapters_of_one_dtype_and_an_input_of_another_are_pefts": [
        ("another dtype", "return of_dtype and", "return"),
    ],
    "tests.contracts_autograd_test::test_second_derivative_is_refused_not_silently_zero[lora_linear-True]": [
        ("second derivative is zero", 'refuse_second_derivative("A projection with LoRA")', 'pass'),
    ],
}  # fmt: skip
