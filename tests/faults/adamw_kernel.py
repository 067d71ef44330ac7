"""Faults in adamw_kernel.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.adamw_kernel"
TESTS = "tests.adamw_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_steps_match_float64[FP32]": [
        ("no weight decay", "p = p * decay -", "p = p -"),
        ("weight decay without lr", "1.0 - lr * _scalar(weight_decay)", "1.0 - _scalar(weight_decay)"),
        ("uphill", "p * decay - step_size", "p * decay + step_size"),
        ("g for m", "step_size * m /", "step_size * g /"),
        ("m not corrected", "lr / _one_minus_power(log_beta1, step)", "lr"),
        ("v not corrected", "1.0 / tl.sqrt(_one_minus_power(log_beta2, step))", "1.0"),
        ("m corrected with beta2", "lr / _one_minus_power(log_beta1", "lr / _one_minus_power(log_beta2"),
        ("beta1 for 1 - beta1", "(g - m) * rate1", "(g - m) * (1.0 - rate1)"),
        ("g not squared", "g * g * rate2", "tl.abs(g) * rate2"),
        ("no square root", "tl.sqrt(v) * sqrt_scale", "v * sqrt_scale"),
        ("no eps", " * sqrt_scale + eps)", " * sqrt_scale)"),
        ("m not written", "    _store(m_ptr, lane, mask, m, seed, block, 1, index, step, BLOCK_SIZE)\n", ""),
        ("v not written", "    _store(v_ptr, lane, mask, v, seed, block, 2, index, step, BLOCK_SIZE)\n", ""),
        ("last element lost", "lane < n - start", "lane < n - start - 1"),
        ("last block lost", "n + BLOCK_SIZE - 1) // BLOCK_SIZE", "n) // BLOCK_SIZE"),
        ("steps not counted", "list(self._stepped.values()), 1)", "list(self._stepped.values()), 0)"),
    ],
    "test_step_continues_from_the_count_it_is_given[1]": [
        ("counts from 2", "tl.load(steps_done_ptr) + 1.0", "tl.load(steps_done_ptr) + 2.0"),
    ],
    "test_bias_correction_does_not_cancel_in_the_first_steps_nor_drift_in_late_ones": [
        ("1 - exp(x) cancels", "tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))", "1.0 - tl.exp(x)"),
        ("series too short", "tl.static_range(9, 1, -1)", "tl.static_range(5, 1, -1)"),
        ("series far from 0", "x > -0.5", "x > -2.5"),
    ],
    "test_representable_numbers_infinities_and_nan_stay_what_they_are": [
        ("NaN rounded to -0", "tl.where(x == x, random, 0)", "random"),
    ],
    "test_rounding_goes_to_one_of_the_two_neighbours_only": [
        ("17 random bits", "words >> 16), (BLOCK_SIZE", "words >> 15), (BLOCK_SIZE"),
    ],
    "test_rounding_is_right_on_average[60000]": [
        ("never up", "+ tl.where(x == x, random, 0)", ""),
        ("15 random bits", "words & 0xFFFF, words >> 16", "words & 0x7FFF, words >> 17"),
    ],
    "test_draws_of_other_seeds_parameters_steps_and_tensors_are_not_correlated": [
        ("every step draws alike", "index, step.to(tl.int32), ROUNDS", "index, 0, ROUNDS"),
        ("every parameter draws alike", "eight, tensor, index,", "eight, tensor, 0,"),
        ("p, m and v draw alike", "eight, tensor, index,", "eight, 0, index,"),
        ("every seed draws alike", "tl.philox(seed, eight,", "tl.philox(seed * 0, eight,"),
        ("one counter for two", "eight, tensor, index, step.to(tl.int32)", "eight, tensor, index + step.to(tl.int32), 0"),
    ],
    "test_draws_of_neighbouring_elements_are_not_correlated": [
        ("half of the bits drawn twice", "words & 0xFFFF, words >> 16", "words & 0xFFFF, words & 0xFFFF"),
        ("every block draws alike", "block * (BLOCK_SIZE // 8) + tl.arange", "tl.arange"),
    ],
    "test_second_moment_decays_by_a_tenth_of_a_percent_a_step": [
        ("v rounded to nearest", "_store(v_ptr, lane, mask, v, seed,", "_store(v_ptr, lane, mask, v, None,"),
    ],
    "test_equal_parameters_are_rounded_differently_and_alike_in_any_order": [
        ("every parameter is the first", "            index,\n            group[", "            0,\n            group["),
    ],
    "test_gradient_with_other_strides": [("p's strides for the gradient", "grad = _dense(grad.resolve_neg() if grad.is_neg() else grad, strides)", "grad = grad")],
    "test_gradient_that_autograd_leaves_negated": [("negated gradient as it lies", "grad.resolve_neg()", "grad")],
    "test_parameters_with_gaps_between_their_elements[False-columns]": [
        ("what lies in gaps is stepped", "if t.stride() == strides:", "if True:"),
        ("copies not written back", "if result is not t:", "if False:"),
    ],
    "test_parameter_whose_strides_change_keeps_its_moments": [
        ("moments not written back", "in zip((p, m, v), stepped)", "in zip((p,), stepped)"),
        ("moments as they lie", "[_dense(t, strides) for t in (p, m, v)]", "[_dense(p, strides), m, v]"),
    ],
    "test_bad_input_is_refused_with_a_sentence[windows]": [
        ("windows share memory", "stride <= reach", "stride == 0"),
    ],
    "test_dtensors_of_doubles_are_refused": [
        ("doubles refused in the step alone", '            _check_memory("a parameter", _local(p), FLOATS)\n', ""),
    ],
    "test_dtensors_that_no_step_can_take_are_refused_at_construction_and_with_a_new_group": [
        ("placements not looked at", '                _check_placements(p, group["stochastic_rounding"])\n', "                pass\n"),
    ],
    "test_a_state_placed_otherwise_is_refused": [("state of other placements", "if given != expected:", "if False:")],
    "test_gradient_that_other_processes_may_have_to_be_averaged_with_is_left_for_step": [
        ("DDP's gradient used before it is averaged", " or _averaged_later(p):", ":"),
    ],
    "test_a_gradient_beside_the_one_that_the_backward_has_stepped_is_refused": [
        ("two steps counted as one", "if any(p in self._stepped for _, _, p in left):", "if False:"),
    ],
    "test_gradients_that_the_last_backward_does_not_reach_are_stepped_in_step": [
        ("what is left is lost", "self._step_parameter(group, index, p, p.grad)", "self._step_in_backward or self._step_parameter(group, index, p, p.grad)"),
    ],
    "test_a_shards_draws_are_those_of_its_place_in_the_whole": [
        ("a shard draws as if it were whole", "tl.cast(block, tl.int32)", "tl.program_id(0)"),
        ("blocks begin where the shard does", "block.to(tl.int64) * BLOCK_SIZE - offset", "tl.program_id(0).to(tl.int64) * BLOCK_SIZE"),
    ],
    "test_numbers_and_tensors_give_the_same_bits": [
        ("1 - beta for beta", "(1 - beta).float()", "beta.float()"),
        ("log2(beta)", "beta.log().float()", "beta.log2().float()"),
    ],
    "test_maximize_goes_up_the_gradient": [
        ("maximize in name only", "MAXIMIZE=bool(maximize)", "MAXIMIZE=False"),
        ("maximize in the launcher alone", '            group["maximize"],\n', ""),
    ],
    "test_tensors_on_the_cpu_are_read_by_the_host_and_those_of_the_gpu_are_left_there": [
        ("the CPU's tensors moved", 'value.item() if value.device.type == "cpu" else', "None or"),
    ],
    "test_bad_options_are_refused_with_a_sentence": [
        ("tensors not looked at", "_is_number(value) and 0.0 <= value < below", "_is_number(value) and (isinstance(value, torch.Tensor) or 0.0 <= value < below)"),
    ],
    "test_a_refused_group_leaves_the_optimizer_as_it_was": [
        ("a refused group stays", "group = self.param_groups.pop()", "group = self.param_groups[-1]"),
    ],
    "test_a_refused_constructor_leaves_no_hooks": [
        ("hooks before all is accepted", "self._step_in_backward, self._hooks, self._stepped = False, [], {}", "self._step_in_backward, self._hooks, self._stepped = step_in_backward, [], {}"),
    ],
    "test_state_that_does_not_fit_is_refused_and_changes_nothing": [
        ("moments broadcast", "if (tensor.shape, _local(tensor).shape) != (like.shape, _local(like).shape):", "if False:"),
        ("one tensor for two numbers", "if filled.setdefault(own, number) != number:", "if filled.setdefault(own, number) is None:"),
        ("settings not looked at", "        _check_group(group)\n        for name", "        for name"),
    ],
    "test_settings_are_loaded_into_what_the_optimizer_has": [
        ("tensors not filled", "            tensor.fill_(number)\n", "            pass\n"),
    ],
    "test_state_loaded_after_a_backward_replaces_what_that_stepped": [
        ("a step of before counts", "        self._stepped.clear()\n        self.__setstate__", "        self.__setstate__"),
    ],
    "test_hooks_around_loading_see_and_change_what_is_loaded": [
        ("what a hook returns is dropped", "state_dict if result is None else result", "state_dict"),
    ],
    "test_groups_have_their_own_settings": [
        ("first group's lr for all", '            group["lr"],\n', '            self.param_groups[0]["lr"],\n'),
    ],
    "test_autograd_notices_that_a_weight_was_changed": [
        ("steps without a word to autograd", "torch.autograd.graph.increment_version(p)", "pass"),
    ],
    "test_run_continues_with_the_same_bits[bf16, stochastic-load_state_dict]": [
        ("count not loaded", "in loaded[p].items():", "in list(loaded[p].items())[1:]:"),
    ],
    "test_loading_fills_the_tensors_a_cuda_graph_may_know_and_shares_none": [
        ("moments elsewhere", "self.state.get(p) or _new_state", "_new_state"),
        ("lr elsewhere", "    return own\n", "    return torch.tensor(number, device=own.device)\n"),
    ],
    "test_loading_keeps_the_dtype_of_the_moments_that_was_asked_for": [
        ("dtype of the saved moments", '("params", *MODES)', '("params",)'),
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
    "test_step_without_a_backward_is_refused": [("a step of nothing", "if self._step_in_backward and not self._stepped and not left:", "if False:")],
    "test_a_dropped_optimizer_frees_its_states_and_lets_go_of_the_parameters": [
        ("hooks hold the optimizer", "weakref.proxy(self)", "self"),
        ("hooks outlive it", "[hook.remove() for hook in hooks]", "None"),
    ],
    "test_close_removes_the_hooks_and_step_uses_gradients_again": [("hooks stay", "            hook.remove()\n", "            pass\n")],
}  # fmt: skip
