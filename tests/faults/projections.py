"""Faults in projections.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.patches.projections"
TESTS = "tests.fp8_layer_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_a_layer_that_would_compute_in_its_own_dtype_is_not_counted[shapes of all]": [
        ("odd shapes taken", " and takes_fp8(*sizes)", ""),
    ],
    "test_what_is_more_than_a_product_later_is_computed_as_the_fused_layer_does": [
        ("not asked again in each call", "if not takes_layer(self, hidden_states.dtype):", "if False:"),
        ("biases dropped", "all(map(is_matrix, others))", "all(map(is_linear, others))"),
    ],
    "test_evaluation_and_generation_compute_so_too": [
        ("in training alone", "if not takes_layer(self, hidden_states.dtype):", "if not (self.training and takes_layer(self, hidden_states.dtype)):"),
    ],
    "test_gradient_checkpointing_that_comes_later_has_the_same_bits[False]": [
        ("steps aside for it", "if not takes_layer(self, hidden_states.dtype):", "if self.gradient_checkpointing or not takes_layer(self, hidden_states.dtype):"),
    ],
    "test_a_layer_that_would_compute_in_its_own_dtype_is_not_counted[no fused layer]": [
        ("no layer is no error", "    if not n_fp8:\n", "    if False:\n"),
    ],
    "test_a_layer_that_would_compute_in_its_own_dtype_is_not_counted[shapes of one]": [
        ("all layers or none", "and takes_layer(layer, like.dtype):", "and all(takes_layer(each, like.dtype) for each in layers):"),
    ],
    "test_a_layer_that_would_compute_in_its_own_dtype_is_not_counted[a hook on one]": [
        ("counted, whether it fits or not", "layer.fits(like, output_attentions=False) and ", ""),
    ],
    "test_a_gpu_without_fp8_is_refused_in_a_sentence": [
        ("not asked", "    require_fp8()\n", ""),
    ],
}  # fmt: skip
