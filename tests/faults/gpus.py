"""Faults in gpus.py, as tests/mutation_test.py plants them."""

SOURCE = "harness.steps.gpus"
TESTS = "tests.page_published_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_the_formula_by_hand": [
        ("FP8 against bf16's peak", '"FP8": 2, "MXFP8"', '"FP8": 1, "MXFP8"'),
    ],
}  # fmt: skip
