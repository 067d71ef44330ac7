"""Faults in checkpoint_files.py, as tests/mutation_test.py plants them."""

SOURCE = "harness.training.checkpoint_files"
TESTS = "tests.checkpoint_files_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_a_flipped_bit_is_found_in_every_file": [
        ("sizes alone are compared", "return [file.stat().st_size, file_digest(file)] == listed[name]", "return file.stat().st_size == listed[name][0]"),
        ("the first file alone is read", "range(rank(), len(names), world_size())", "range(1)"),
    ],
    "test_a_large_file_is_digested_in_pieces_and_in_their_order": [
        ("the first piece alone is read", "range(0, file.stat().st_size, PIECE)", "range(0, min(file.stat().st_size, PIECE), PIECE)"),
    ],
    "test_what_a_checkpoint_lists_cannot_be_a_file_elsewhere": [
        ("a list names files elsewhere", " or any(Path(n).name != n for n in listed)", ""),
    ],
}  # fmt: skip
