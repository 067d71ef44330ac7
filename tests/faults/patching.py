"""Faults in patching.py, as tests/mutation_test.py plants them."""

SOURCE = "harness.model.patching"
TESTS = "tests.patching_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_loss_and_gradient_are_hugging_faces[17]": [
        ("labels not shifted", "pad(labels[..., 1:], (0, 1)", "pad(labels, (0, 0)"),
        ("whole numbers divided", "n_valid.float() /", "n_valid /"),
    ],
    "test_another_ignore_index_is_hugging_faces[False-17]": [
        ("ignore_index dropped", "cross_entropy(logits, shift_labels, ignore_index)", "cross_entropy(logits, shift_labels, IGNORE_INDEX)"),
        ("ignored labels counted", "(shift_labels != ignore_index).sum()", "(shift_labels != IGNORE_INDEX).sum()"),
    ],
    "test_a_micro_batch_without_targets_adds_nothing": [
        ("a micro-batch without targets spoils the others", "torch.where(n_valid > 0, loss * share.nan_to_num(), share)", "loss * share"),
    ],
    "test_a_step_without_targets_has_no_loss_and_hands_no_nan_to_the_gradients": [
        ("a loss of 0 of no target", "loss * share.nan_to_num(), share)", "loss * share.nan_to_num(), 0.0)"),
        ("a gradient of NaN", "loss * share.nan_to_num(), share)", "loss * share, share)"),
    ],
    "test_a_subclass_and_what_make_gives_back_stay": [
        ("subclass replaced", "if type(module) is cls]", "if isinstance(module, cls)]"),
    ],
}  # fmt: skip
