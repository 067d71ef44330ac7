"""Faults in frozen_fp8.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.layers.frozen_fp8"
TESTS = "tests.frozen_fp8_test"

FAULTS = {
    "test_results_and_gradient_are_those_of_the_rounded_factors": [
        ("the first weight for every projection", "own = slice(self.first, self.first + self.out_features)", "own = slice(0, self.out_features)"),
        ("gradients in another order than weights", "rounded = quantize_rows(*douts)", "rounded = quantize_rows(*reversed(douts))"),
    ],
    "test_any_of_the_projections_in_any_order": [
        ("all weights whatever the order", "if layer.shared is not shared or layer.first != first:", "if False:"),
    ],
    "test_compact_has_the_same_bits_and_half_the_bytes": [
        ("turned codes are always kept", "        if self.keep_turned:", "        if True:"),
    ],
    "test_a_state_dict_is_all_that_layers_of_other_numbers_need": [
        ("turned codes of the weights before", "        self.register_load_state_dict_post_hook(FrozenFP8Weights.turn)\n", ""),
    ],
    "test_codes_and_scales_stay_what_they_are_in_another_dtype": [
        ("scales as floating-point numbers", 'self.register_buffer("scales", rows.scales.view(torch.int32))', 'self.register_buffer("scales", rows.scales)'),
    ],
}  # fmt: skip
