"""Faults in families.py, as tests/mutation_test.py plants them.

The tests named here ask the table itself.  The kernels' patch keeps the table that it imported
before, which has no fault.
"""

SOURCE = "harness.model.families"
TESTS = "tests.families_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_a_row_says_what_transformers_builds": [
        ("head norms forgotten", ", head_norms=True", ""),
        ("a bias forgotten", 'bias=("q_proj", "k_proj", "v_proj")', 'bias=("q_proj", "k_proj")'),
        ("layers without a rotation forgotten", 'rotates="use_rope"', "rotates=None"),
        ("another family's classes", '"Qwen3", modeling_qwen3,', '"Qwen2", modeling_qwen2,'),
    ],
    "test_an_example_has_the_parameters_that_its_page_on_the_hub_says": [
        ("an example with a layer too few", '"num_hidden_layers": 28', '"num_hidden_layers": 27'),
        ("lm_head tied", '151_645,\n    "tie_word_embeddings": False', '151_645,\n    "tie_word_embeddings": True'),
    ],
    "test_what_no_row_has_is_named[mistral]": [
        ("a window not refused", "if (window := window_of(config)) is not None:", "if False:"),
    ],
    "test_what_no_row_has_is_named[qwen2]": [
        ("a window of some layers not refused", 'if layer_types is not None and "sliding_attention" not in layer_types:', "if layer_types is not None:"),
    ],
    "test_what_no_row_has_is_named[gemma]": [
        ("norms of 1 + weight not refused", 'if any("+ self.weight" in', 'if False and any("+ self.weight" in'),
    ],
    "test_what_no_row_has_is_named[gemma2]": [
        ("a soft cap not refused", "if getattr(config, name, None) is not None:", "if False:"),
    ],
    "test_what_no_row_has_is_named[phi3]": [
        ("packed projections not refused", "if name in names]:", "if False]:"),
    ],
    "test_what_no_row_has_is_named[mixtral]": [
        ("experts not refused", "if names.intersection(EXPERTS):", "if False:"),
    ],
}  # fmt: skip
