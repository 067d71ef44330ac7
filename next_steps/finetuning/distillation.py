"""The student's loss and the teacher behind it, as distill.py trains (docs/reverse_kl.md).

With the student's probabilities p and the teacher's q, at the positions whose label counts,

    loss = KL(student || teacher) = sum p * (log p - log q)

This is the mean reverse KL of reverse_kl_kernel.py.  Labels only mark positions.  The validation
loss stays the usual loss on labels.  The teacher computes no gradient and keeps no activations.
"""

import types
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from harness.cli.command_line import UserError
from harness.cli.workload import Workload, same_place
from harness.data.dataset import load_tokenizer, look_at_data
from harness.model.architecture import ModelFacts, keep_layers
from harness.model.loading import load_model
from harness.model.patching import causal_lm_loss
from harness.profiling.kernel_facts import LOSS_KERNELS
from harness.training.training_run import Run
from next_steps.finetuning.kernel_training import optimizer_for, take_all_steps
from next_steps.lessons.reverse_kl_kernel import TritonReverseKLLoss, reverse_kl_reference
from next_steps.memory.memory_estimate import try_kernels
from next_steps.patches.apply_kernels import apply_kernels, model_kernels

REVERSE_KL = "reverse_kl"


def replace_loss(kernels: Sequence[str]) -> list[str]:
    """Return `kernels` with reverse_kl in place of those for a loss on labels, if there is one."""
    others = [name for name in kernels if name not in LOSS_KERNELS]
    return others + [REVERSE_KL] * (len(others) < len(kernels))


def layers_to_keep(
    workload: Workload, config: PreTrainedConfig, teacher_config: PreTrainedConfig
) -> int:
    """Return how many layers of the model with `config` the student has."""
    model, teacher, asked = workload.model, workload.teacher, workload.student_layers
    if config.vocab_size != teacher_config.vocab_size:
        raise UserError(
            f"{model} has a vocabulary of {config.vocab_size} tokens and the teacher {teacher} one "
            f"of {teacher_config.vocab_size}; name two models with the same"
        )
    n_layers = config.num_hidden_layers
    if asked is not None and asked >= n_layers:
        raise UserError(f"--student-layers {asked} is not fewer than the {n_layers} of {model}")
    by_default = n_layers // 2 if same_place(model, teacher) else n_layers
    n_kept = by_default if asked is None else asked
    if n_kept == 0:
        alone = f"{teacher} has a single layer, which cannot be halved"
        raise UserError(f"{alone}; name a smaller --model")
    return n_kept


def refuse_other_tokenizer(workload: Workload, taught: Workload) -> None:
    """Refuse a teacher whose tokenizer differs from the student's."""
    one, other = (load_tokenizer(each) for each in (workload, taught))
    if (one is None) != (other is None):
        given = f"of {workload.model} and the teacher {taught.model} only one has a tokenizer"
        raise UserError(f"{given}; name two models with the same")
    if one is not None and (tokens := differing_tokens(one, other)):
        raise UserError(
            f"the tokenizers of {workload.model} and the teacher {taught.model} differ in "
            f"{len(tokens):,} tokens, {tokens[0]!r} among them; name two models with the same"
        )


def differing_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens whose ids differ; a token that was added may be missing in one of them."""
    ours, theirs = one.get_vocab(), other.get_vocab()
    may_be_missing = {*one.get_added_vocab(), *other.get_added_vocab()} - (ours.keys() & theirs)
    differing = {token for token, _ in ours.items() ^ theirs.items()}
    return sorted(differing - may_be_missing)


def learn_from(
    student: torch.nn.Module, teacher: torch.nn.Module, temperature: float = 1.0, fused: bool = True
) -> torch.nn.Module:
    """Make the reverse KL to the teacher the student's loss in training; return the student.

    Only the student's `forward` changes.  The teacher is no part of the student's state_dict.

    Args:
        teacher: another one in evaluation mode, with the same vocabulary.
        temperature: divides the logits of both.
        fused: take the loss from the kernel, not from PyTorch's operations in fp32.
    """

    def eager(logits, teacher_logits, counts):
        logits, n = (logits.float(), teacher_logits.float()), counts.sum()
        total = reverse_kl_reference(*logits, counts, temperature, reduction="none").sum()
        # NaN where nothing counts, with gradients of zero, as the kernel's are
        return torch.where(n > 0, total / n.clamp(min=1), torch.nan)

    reverse_kl = TritonReverseKLLoss(temperature) if fused else eager

    def forward(self, input_ids, labels, num_items_in_batch=None, **packing):
        if not self.training:  # the validation loss is the loss on labels
            return type(self).forward(self, input_ids=input_ids, labels=labels, **packing)
        with torch.no_grad():
            teacher_logits = teacher(input_ids=input_ids, **packing).logits  # (B, T, V)
        logits = type(self).forward(self, input_ids=input_ids, **packing).logits  # (B, T, V)

        def of_targets(logits, targets, ignore_index):
            return reverse_kl(logits, teacher_logits, targets != ignore_index)

        loss_function = causal_lm_loss(of_targets)
        loss = loss_function(logits, labels, num_items_in_batch=num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    student.forward = types.MethodType(forward, student)
    student.takes_max_targets = False  # the forward above does not
    return student


def load_student(workload: Workload) -> tuple[torch.nn.Module, Workload, dict]:
    """Return the student with its teacher behind its loss, the whole workload, and more facts."""
    kernels = tuple(replace_loss(workload.kernels))
    in_models = tuple(model_kernels(kernels))
    taught = replace(workload, model=workload.teacher, kernels=in_models)
    config = try_kernels(replace(workload, kernels=in_models))
    n_layers = layers_to_keep(workload, config, try_kernels(taught))
    refuse_other_tokenizer(workload, taught)
    look_at_data(workload)
    temperature = workload.temperature or 1.0
    workload = replace(workload, student_layers=n_layers, temperature=temperature, kernels=kernels)
    teacher = load_model(taught).eval().requires_grad_(False)
    student = load_model(workload)
    student.model.layers = student.model.layers[:n_layers]
    keep_layers(student.config, n_layers)
    weights, theirs = student.state_dict(), teacher.state_dict()
    if weights.keys() == theirs.keys() and all(torch.equal(weights[n], theirs[n]) for n in weights):
        given = f"{workload.model} has the weights of its teacher {taught.model}"
        raise UserError(f"{given}, so there is nothing to learn; --student-layers N takes fewer")
    for model in (teacher, student):
        apply_kernels(model, in_models)
    learn_from(student, teacher, temperature, fused=REVERSE_KL in kernels)
    more = {
        "teacher_parameters": sum(p.numel() for p in teacher.parameters()),
        # the forward is a third of a step's
        "teacher_flops_per_token": ModelFacts(teacher.config).flops_per_token(workload.seq_len) / 3,
    }
    return student, workload, more


def distil(workload: Workload, record_to: str | None = None, save_to: str | None = None) -> dict:
    """Distil the workload's teacher into its model; return the record."""
    student, workload, more = load_student(workload)
    run = Run("Distillation", workload, student, record_to, save_to, more)
    return take_all_steps(run, optimizer_for(student, workload))
