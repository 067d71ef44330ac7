"""Faults in adamw_kernel.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.adamw_kernel"
TESTS = "tests.adamw_test"  # where a test is looked for whose file is not named

# Mistakes that show in the weights: the comparison has to reject each in fp32 and in bf16.
WRONG_WEIGHTS = [
    ("no weight decay", "p = p * decay -", "p = p -"),
    ("weight decay without lr", "1.0 - lr * _scalar(weight_decay)", "1.0 - _scalar(weight_decay)"),
    ("weight decay in the gradient", "    m = m + (g - m)", "    g, decay = g + 0.3 * p, 1.0\n    m = m + (g - m)"),
    ("uphill", "p * decay - step_size", "p * decay + step_size"),
    ("g for m", "step_size * m /", "step_size * g /"),
    ("m not corrected", "lr / _one_minus_power(log_beta1, step)", "lr"),
    ("v not corrected", "1.0 / tl.sqrt(_one_minus_power(log_beta2, step))", "1.0"),
    ("correction outside the root", "1.0 / tl.sqrt(_one_minus_power(log_beta2, step))", "1.0 / _one_minus_power(log_beta2, step)"),
    ("no square root", "tl.sqrt(v) * sqrt_scale", "v * sqrt_scale"),
    ("beta1 for 1 - beta1", "(g - m) * rate1", "(g - m) * (1.0 - rate1)"),
    ("g not squared", "g * g * rate2", "tl.abs(g) * rate2"),
    ("counts from 0", "tl.load(steps_done_ptr) + 1.0", "tl.load(steps_done_ptr) + 0.1"),
    ("counts from 2", "tl.load(steps_done_ptr) + 1.0", "tl.load(steps_done_ptr) + 2.0"),
]  # fmt: skip

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "tests.optimizers_test::test_steps_match_float64[adamw-bf16]": WRONG_WEIGHTS,
    "tests.optimizers_test::test_steps_match_float64[adamw-fp32]": [
        *WRONG_WEIGHTS,
        ("eps squared", "lr, eps = _scalar(lr), _scalar(eps)", "lr, eps = _scalar(lr), _scalar(eps) * _scalar(eps)"),
        ("m corrected with beta2", "lr / _one_minus_power(log_beta1", "lr / _one_minus_power(log_beta2"),
        ("no eps", " * sqrt_scale + eps)", " * sqrt_scale)"),
        ("m not written", "    store_rounded(m_ptr, lane, mask, m, seed, block, 1, index, step, BLOCK_SIZE)\n", ""),
        ("v not written", "    store_rounded(v_ptr, lane, mask, v, seed, block, 2, index, step, BLOCK_SIZE)\n", ""),
        ("last element lost", "lane < n - start", "lane < n - start - 1"),
        ("last block lost", "n + BLOCK_SIZE - 1) // BLOCK_SIZE", "n) // BLOCK_SIZE"),
    ],
    "test_step_continues_from_the_count_it_is_given[plain-1]": [
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
        ("v rounded to nearest", "store_rounded(v_ptr, lane, mask, v, seed,", "store_rounded(v_ptr, lane, mask, v, None,"),
    ],
    "tests.optimizers_test::test_gradients_of_any_layout[adamw-transposed]": [("p's strides for the gradient", "grad = _dense(grad, strides)", "grad = grad")],
    "tests.optimizers_test::test_views_are_stepped_in_their_memory_alone[adamw-columns]": [
        ("what lies in gaps is stepped", "if t.stride() == strides:", "if True:"),
        ("copies not written back", "if result is not t:", "if False:"),
    ],
    "test_moments_of_other_strides_than_the_parameter": [
        ("moments not written back", "in zip((p, m, v), stepped)", "in zip((p,), stepped)"),
        ("moments as they lie", "[_dense(t, strides) for t in (p, m, v)]", "[_dense(p, strides), m, v]"),
    ],
    "test_bad_input_is_refused_with_a_sentence": [
        ("a negated parameter's copy is stepped", 'takes_negated("p", "m", "v")', "takes_negated()"),
        ("any moments", '("v", v, MOMENTS, shape)', '("v", v, FLOATS, shape)'),
        ("any gradient", '("grad", grad, SAME, shape)', '("grad", grad, FLOATS, shape)'),
        ("windows share memory", "stride <= reach", "stride == 0"),
    ],
    "tests.optimizers_test::test_settings_are_pytorchs[adamw-maximize]": [
        ("maximize in name only", "MAXIMIZE=bool(maximize)", "MAXIMIZE=False"),
    ],
    "test_a_shards_draws_are_those_of_its_place_in_the_whole": [
        ("a shard draws as if it were whole", "tl.cast(block, tl.int32)", "tl.program_id(0)"),
        ("blocks begin where the shard does", "block.to(tl.int64) * BLOCK_SIZE - offset", "tl.program_id(0).to(tl.int64) * BLOCK_SIZE"),
    ],
    "tests.adamw_optimizer_test::test_numbers_and_tensors_give_the_same_bits": [
        ("a negated lr goes uphill", "value.resolve_neg()", "value"),
        ("1 - beta for beta", "(1 - beta).float()", "beta.float()"),
        ("log2(beta)", "beta.log().float()", "beta.log2().float()"),
    ],
    "test_tensors_on_the_cpu_are_read_by_the_host_and_those_of_the_gpu_are_left_there": [
        ("the CPU's tensors moved", 'value.item() if value.device.type == "cpu" else', "None or"),
    ],
}  # fmt: skip
