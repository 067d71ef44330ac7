"""Faults in adamw_optimizer.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.adamw_optimizer"
TESTS = "tests.adamw_optimizer_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_equal_parameters_are_rounded_differently_and_alike_in_any_order": [
        ("every parameter is the first", "            index,\n            group[", "            0,\n            group["),
    ],
    "test_parameters_that_no_step_can_take_are_refused_at_construction_and_with_a_new_group[False-a float64 shard]": [
        ("doubles refused in the step alone", '            check_memory("a parameter", _local(p), FLOATS)\n', ""),
    ],
    "test_parameters_that_no_step_can_take_are_refused_at_construction_and_with_a_new_group[False-columns]": [
        ("placements not looked at", '                _check_placements(p, group["stochastic_rounding"])\n', "                pass\n"),
    ],
    "test_parameters_that_no_step_can_take_are_refused_at_construction_and_with_a_new_group[False-a shard's codes]": [
        ("shards that end in blocks", 'if group["moments_dtype"] == torch.uint8:\n                    given', 'if False:\n                    given'),
    ],
    "test_a_state_placed_otherwise_is_refused": [("state of other placements", "if given != expected:", "if False:")],
    "test_gradient_that_ddp_averages_is_left_for_step": [
        ("DDP's gradient used before it is averaged", " or _averaged_later(p):", ":"),
    ],
    "test_a_gradient_beside_the_one_that_the_backward_has_stepped_is_refused": [
        ("two steps counted as one", "if any(p in self._stepped for _, _, p in left):", "if False:"),
    ],
    "test_gradients_that_the_last_backward_does_not_reach_are_stepped_in_step": [
        ("what is left is lost", "self._step_parameter(group, index, p, p.grad)", "self._step_in_backward or self._step_parameter(group, index, p, p.grad)"),
    ],
    "test_bad_options_are_refused_with_a_sentence": [
        ("tensors not looked at", "is_real_number(value) and 0.0 <= value < below", "is_real_number(value) and (isinstance(value, torch.Tensor) or 0.0 <= value < below)"),
    ],
    "test_a_refused_group_leaves_no_hooks_and_the_optimizer_as_it_was": [
        ("a refused group stays", "group = self.param_groups.pop()", "group = self.param_groups[-1]"),
        ("hooks before all is accepted", "self._step_in_backward, self._hooks, self._stepped = False, [], {}", "self._step_in_backward, self._hooks, self._stepped = step_in_backward, [], {}"),
    ],
    "test_state_that_does_not_fit_is_refused_and_changes_nothing": [
        ("moments broadcast", "if (tensor.shape, _local(tensor).shape) != (like.shape, _local(like).shape):", "if False:"),
        ("one tensor for two numbers", "if filled.setdefault(own, number) != number:", "if filled.setdefault(own, number) is None:"),
        ("settings not looked at", "        _check_group(group)\n        for name", "        for name"),
    ],
    "test_settings_are_loaded_into_what_the_optimizer_has": [
        ("tensors not filled", "            tensor.fill_(number)\n", "            pass\n"),
        ("lr elsewhere", "    return own\n", "    return torch.tensor(number, device=own.device)\n"),
    ],
    "test_what_is_loaded_after_a_backward_replaces_what_that_stepped_and_reaches_the_hooks": [
        ("a step of before counts", "        self._stepped.clear()\n        self.__setstate__", "        self.__setstate__"),
    ],
    "test_hooks_around_loading_see_and_change_what_is_loaded": [
        ("what a hook returns is dropped", "state_dict if result is None else result", "state_dict"),
    ],
    "tests.optimizers_test::test_settings_are_pytorchs[adamw-maximize]": [
        ("maximize in the launcher alone", '            group["maximize"],\n', ""),
    ],
    "tests.optimizers_test::test_settings_are_pytorchs[adamw-groups of their own]": [
        ("first group's lr for all", '            group["lr"],\n', '            self.param_groups[0]["lr"],\n'),
    ],
    "tests.optimizers_test::test_autograd_notices_that_a_parameter_was_changed[adamw]": [
        ("steps without a word to autograd", "torch.autograd.graph.increment_version(p)", "pass"),
    ],
    "tests.optimizers_test::test_a_saved_run_continues_with_the_same_bits[adamw8-bf16]": [
        ("scales not loaded", "_with_keys_of(state[p], loaded[p]).items():", "list(loaded[p].items())[:-1]:"),
    ],
    "test_codes_are_made_of_loaded_moments_and_moments_of_loaded_codes": [
        ("v loaded without its m", "(t.float() for t in moments)", "(moments[1].float() for t in moments)"),
        ("codes called moments", 'CODED_STATE = "coded_step", "exp_avg_codes", "exp_avg_sq_codes",', "CODED_STATE = *PLAIN_STATE,"),
        ("dtype of the saved moments", '("params", *MODES)', '("params",)'),
    ],
    "test_codes_of_another_size_or_type_are_refused": [
        ("codes loaded as floats", "floats if like.is_floating_point() else [like.dtype]", "(*floats, like.dtype)"),
    ],
    "tests.optimizers_test::test_a_saved_run_continues_with_the_same_bits[rounded-bf16]": [
        ("count not loaded", "_with_keys_of(state[p], loaded[p]).items():", "list(loaded[p].items())[1:]:"),
    ],
    "test_loading_fills_the_tensors_a_cuda_graph_may_know_and_shares_none": [
        ("moments elsewhere", "self.state.get(p) or new_state", "new_state"),
    ],
    "test_steps_inside_the_backward_are_the_same_steps": [
        ("first group's settings in the backward", "group = self.param_groups[group_number]", "group = self.param_groups[0]"),
        ("parameters counted from 0 in each group", "start=before", "start=0"),
    ],
    "test_gradients_never_exist_all_at_once": [
        ("gradients kept", "grad, p.grad = p.grad, UsedGradient(p.dtype, p.device, p.shape)", "grad = p.grad"),
    ],
    "test_clipping_what_the_backward_has_used_is_refused_and_a_step_recovers[by norm]": [
        ("nothing to be clipped", "p.grad, UsedGradient(p.dtype, p.device, p.shape)", "p.grad, None"),
        ("some may be clipped", "p.grad, UsedGradient(p.dtype, p.device, p.shape)", "p.grad, None if self._stepped else UsedGradient(p.dtype, p.device, p.shape)"),
        ("clipping by nothing", "return self if max_norm == math.inf else super().__rtruediv__(max_norm)", "return self"),
    ],
    "test_a_norm_without_clipping_is_unknown_and_leaves_other_gradients_alone": [
        ("a norm of nothing is 0", "            return math.nan\n", "            return 0.0\n"),
    ],
    "test_gradient_accumulation_is_refused_and_a_step_recovers": [
        ("accumulation is told as clipping", "raise RuntimeError(SECOND_GRADIENT)", "raise RuntimeError(CLIPPED)"),
    ],
    "test_backwards_in_accumulating_add_up_and_the_next_one_steps[True]": [
        ("steps while it accumulates", "if (self._accumulating and p not in self._stepped) or", "if"),
        ("accumulates for ever", "            self._accumulating = False\n", "            pass\n"),
    ],
    "tests.optimizers_test::test_parameters_without_a_gradient_are_skipped[adamw]": [
        ("steps not counted", "list(self._stepped.values()), 1)", "list(self._stepped.values()), 0)"),
    ],
    "test_step_without_a_backward_is_refused": [("a step of nothing", "if self._step_in_backward and not self._stepped and not left:", "if False:")],
    "test_a_dropped_optimizer_frees_its_states_and_lets_go_of_the_parameters": [
        ("hooks hold the optimizer", "weakref.proxy(self)", "self"),
        ("hooks outlive it", "[hook.remove() for hook in hooks]", "None"),
    ],
    "test_close_removes_the_hooks_and_step_uses_gradients_again": [("hooks stay", "            hook.remove()\n", "            pass\n")],
}  # fmt: skip
