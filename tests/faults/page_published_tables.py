"""Faults in page_published_tables.py, as tests/mutation_test.py plants them."""

SOURCE = "tools.page_published_tables"
TESTS = "tests.page_published_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_the_formula_by_hand": [
        ("attention not counted", 'flops_per_token(row["seq_len"])', "flops_per_token(0)"),
    ],
    "test_a_run_without_record_has_no_row": [
        ("FP8 taken for bf16", '"FP8" if run.get("fp8") else "bf16"', '"bf16"'),
    ],
}  # fmt: skip
