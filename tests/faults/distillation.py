"""Faults in distillation.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.finetuning.distillation"
TESTS = "tests.distill_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_loss_and_gradients_are_pytorchs[eager-2.5]": [
        ("forward KL", "reverse_kl(logits, teacher_logits, targets", "reverse_kl(teacher_logits, logits, targets"),
        ("temperature ignored by PyTorch", "counts, temperature, red", "counts, 1.0, red"),
    ],
    "test_loss_and_gradients_are_pytorchs[loss-2.5]": [
        ("temperature ignored by the kernel", "TritonReverseKLLoss(temperature)", "TritonReverseKLLoss()"),
        ("every position counts", "reverse_kl(logits, teacher_logits, targets != ignore_index)", "reverse_kl(logits, teacher_logits)"),
        ("labels not shifted", "loss_function(logits, labels, num", "loss_function(logits, None, shift_labels=labels, num"),
    ],
    "test_the_validation_loss_is_that_of_the_labels": [
        ("validation by the teacher", "if not self.training:", "if False:"),
    ],
    "test_the_teacher_stays_as_it_is_and_outside_of_the_student": [
        ("teacher is a part of the student", "    student.forward =", "    student.teacher = teacher\n    student.forward ="),
    ],
    "test_the_teacher_runs_once_per_step_and_keeps_nothing_for_a_backward": [
        ("teacher keeps a graph", "with torch.no_grad():", "with torch.enable_grad():"),
    ],
    "test_the_kernels_named_run_in_both_models": [
        ("kernel never used", "if fused else eager", "if False else eager"),
        ("kernel always used", "if fused else eager", "if True else eager"),
    ],
    "test_the_teachers_own_model_by_another_path_is_halved_too[linked]": [
        ("paths compared as strings", "if same_place(model, teacher)", "if model == teacher"),
    ],
    "test_tokenizers_may_differ_in_tokens_that_were_added_to_one": [
        ("added tokens must be in both", "differing - may_be_missing", "differing"),
        ("added tokens are not compared", " - (ours.keys() & theirs)", ""),
    ],
}  # fmt: skip
