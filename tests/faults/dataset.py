"""Faults in dataset.py, as tests/mutation_test.py plants them."""

SOURCE = "harness.data.dataset"
TESTS = "tests.dataset_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_how_a_step_is_laid_out_decides_no_sequence[synthetic]": [
        ("a micro-batch decides what is held out", "BATCHES * workload.micro_batches * workload", "BATCHES * workload"),
        ("a process decides what is held out", "BATCHES * workload.micro_batches * workload.sequences", "BATCHES * workload.micro_batches * workload.batch_size"),
    ],
    "test_each_held_out_set_has_a_digest_of_its_own": [
        ("samples that are trained on count", ".select(which).alone()", ".select(which)"),
    ],
}  # fmt: skip
