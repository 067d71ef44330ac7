"""Faults in apply_kernels.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.patches.apply_kernels"
TESTS = "tests.apply_kernels_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_in_evaluation_the_logits_are_untouched_where_gradients_are_wanted[cross_entropy]": [
        ("logits overwritten in evaluation", "inplace=without_logits", "inplace=True"),
    ],
    "test_the_gradient_takes_the_logits_memory_in_training_only": [
        ("never in place", "inplace=without_logits", "inplace=False"),
    ],
    "test_in_training_there_are_no_logits_and_a_tuple_is_refused[cross_entropy]": [
        ("overwritten logits handed out", "logits=None if without_logits else logits", "logits=logits"),
    ],
    "test_logits_that_somebody_else_holds_are_not_overwritten[cross_entropy]": [
        ("held logits overwritten", "self.training and plain_head", "self.training"),
    ],
    "test_a_step_tells_the_model_how_many_targets_its_batch_has": [
        ("number of targets dropped", "head, labels, max_targets, **kwargs", "head, labels, **kwargs"),
    ],
    "tests.known_texts_test::test_a_new_text_keeps_its_own_code_and_a_line_says_so[LlamaRMSNorm]": [
        ("a new text bypassed", " if all(map(is_known_text, stands_for(family, name)))", ""),
    ],
    "test_a_kernel_that_finds_nothing_to_replace_is_refused[swiglu]": [
        ("kernels named earlier stay in", "            module._modules.update(children)\n", ""),
    ],
    "test_the_cache_is_taken_by_each_of_its_names[cache]": [
        ("another name for the cache ignored", "    if cache is not None:", "    if False:"),
    ],
    "test_subclass_of_a_part_keeps_its_forward[model.layers.1.self_attn-False]": [
        ("subclass bypassed", "if type(module) is base:", "if isinstance(module, base):"),
    ],
    "test_forward_that_was_put_into_a_class_before_is_called[False-LlamaAttention]": [
        ("patched class bypassed", "if not exact_modules.is_as_written(base):", "if False:"),
    ],
    "test_what_counts_the_calls_of_a_part_is_called[mlp-True-in_its_forward]": [
        ("patched module bypassed", "unchanged = is_unchanged(mlp) and", "unchanged ="),
    ],
    "test_a_kernel_that_finds_nothing_to_replace_is_refused[rmsnorm]": [
        ("no replacement is no error", "    if idle and (", "    if False and ("),
    ],
    "test_a_kernel_that_finds_nothing_to_replace_is_refused[fused_layer, hooks]": [
        ("a layer that never fits", "        return any(layer.has_known_parts() for layer in found)\n", "        pass\n"),
    ],
    "test_rotary_function_that_was_replaced_before_is_called[False]": [
        ("patched rotary function bypassed", "if unchanged and own:", "if own:"),
    ],
    "test_rotary_function_that_was_replaced_before_is_called[True]": [
        ("rotary function patched before the import bypassed", "if unchanged and own:", "if unchanged:"),
    ],
    "test_rotary_function_in_a_module_of_kernels[True]": [
        ("another library's forward bypassed", "called_function(rotary)", "family.part('Attention').forward"),
    ],
    "test_what_counts_the_calls_of_a_part_is_called[mlp.act_fn-False-by_a_hook]": [
        ("activation bypassed", " or not is_silu(mlp.act_fn):", ":"),
    ],
    "test_another_loss_function_wins[cross_entropy-users_own-True-True]": [
        ("the user's loss bypassed", " and self.loss_function is ForCausalLMLoss", ""),
    ],
    "tests.families_test::test_training_has_the_unpatched_loss_and_gradients[nothing else-qwen3]": [
        ("head norms with k's weight", "(norm.weight for norm in norms)", "(norms[1].weight for norm in norms)"),
        ("head norms left out", " family.head_norms", " False", 3),
    ],
    "tests.families_test::test_training_has_the_unpatched_loss_and_gradients[nothing else-smollm3]": [
        ("rotation in a layer that has none", "family.rotates is None or getattr(attention, family.rotates)", "True"),
    ],
    "tests.families_test::test_norms_over_heads_are_in_the_kernel_of_the_rotation": [
        ("the norms' kernel never used", "takes_head_norms(attention, q.dtype):", "False:"),
    ],
    "tests.families_test::test_a_head_norm_that_somebody_changed_is_called[hooked]": [
        ("a head norm's hooks bypassed", "type(norm) in NORM and is_untouched(norm) for", "type(norm) in NORM for"),
        ("changed head norms left out", "q, k = attention.q_norm(q), attention.k_norm(k)", "pass"),
    ],
    "tests.families_test::test_a_head_norm_that_somebody_changed_is_called[with_another_eps]": [
        ("q's eps for k", "        and norms[0].variance_epsilon == norms[1].variance_epsilon\n", ""),
    ],
}  # fmt: skip
