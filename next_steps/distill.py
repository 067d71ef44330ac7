"""Distillation, what is behind `finetune_optimized.py --teacher MODEL`: a smaller model learns a larger one's answers.

A label says which token came next.  A teacher says how probable every token of the vocabulary was.  The student learns
to agree: with p its own probabilities and q the teacher's, at the positions whose label counts,

    loss = KL(student || teacher) = sum p * (log p - log q)       the reverse KL of reverse_kl_kernel.py, a mean

It is 0 where both agree.  Labels do no more than mark positions, as in any fine-tuning: token t predicts token t + 1,
and prompts and padding do not count.  The validation loss stays the usual one, of the labels.

The teacher computes no gradient and keeps no activations, so of it the memory holds the weights and, once, the logits
(B, T, V).  The student's logits exist once, beside their gradient.  The kernels go into both models.
"""

import argparse
import types
from collections.abc import Callable, Sequence

import torch

from harness import architecture, config_file, loading, patching
from harness.command_line import UserError, flag_name, positive_float, positive_int
from next_steps.apply_kernels import apply_kernels, model_kernels
from next_steps.memory_estimate import step_tryer
from next_steps.reverse_kl_kernel import TritonReverseKLLoss, reverse_kl_reference

# after the kernels, which decide how triton (imported by transformers) will run
from transformers import LlamaConfig  # isort: skip
from transformers.modeling_outputs import CausalLMOutputWithPast  # isort: skip

LABEL_LOSSES = "cross_entropy", "linear_cross_entropy"  # kernels of a loss that distillation does not have
REVERSE_KL = "reverse_kl"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """--teacher, --student-layers, --temperature."""
    add = parser.add_argument
    # fmt: off
    add("--teacher", metavar="ID|DIR|tiny",
        help="distil this model into --model, which is its own first half of layers unless told; the loss is the "
        "reverse KL, and its kernel replaces cross_entropy and linear_cross_entropy")
    add("--student-layers", type=positive_int, metavar="N",
        help="with --teacher: train the first N layers of --model (default: all; half if it is the teacher's model)")
    add("--temperature", type=positive_float, help="with --teacher: divides the logits of both models (default: 1)")
    # fmt: on


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The parser's arguments, in which --model is --teacher's unless told.

    Raises:
        UserError: a flag needs --teacher, or cannot be used with it.
    """
    args = parser.parse_args()
    if args.teacher is not None and "model" not in args.given:
        args.model = args.teacher
    for flag in ("student_layers", "temperature"):
        if getattr(args, flag) is not None and args.teacher is None:
            raise UserError(f"{flag_name(flag)} needs --teacher, the model to distil")
    for flag in ("ladder", "longest", "opponent"):
        if getattr(args, flag) and args.teacher is not None:
            raise UserError(f"--{flag} trains on labels, --teacher does not: leave one of the two out")
    return args


def takes_over(args: argparse.Namespace, train: Callable) -> bool:
    """Train the student with finetune_optimized.py's `train`, if there is a teacher."""
    if args.teacher is not None:
        kernels = replace_loss(args.kernels)
        student, distillation = load_student(args, kernels)
        train(student, args, "Distillation", kernels, distillation=distillation)
    return args.teacher is not None


def replace_loss(kernels: Sequence[str]) -> list[str]:
    """`kernels` with reverse_kl in place of those for a loss on labels; without one of them, the loss is PyTorch's."""
    others = [name for name in kernels if name not in LABEL_LOSSES]
    return others + [REVERSE_KL] * (len(others) < len(kernels))


def layers_to_keep(args: argparse.Namespace, config: LlamaConfig, teacher_config: LlamaConfig) -> int:
    """How many layers of --model, whose configuration is `config`, the student has.

    Raises:
        UserError: the vocabularies differ, or these layers are not fewer than the model's.
    """
    if config.vocab_size != teacher_config.vocab_size:
        raise UserError(
            f"{args.model} has a vocabulary of {config.vocab_size} tokens and the teacher {args.teacher} one of "
            f"{teacher_config.vocab_size}; name two models with the same"
        )
    n_layers = config.num_hidden_layers
    if args.student_layers is None:
        n_kept = n_layers // 2 if args.model == args.teacher else n_layers
    elif args.student_layers < n_layers:
        n_kept = args.student_layers
    else:
        raise UserError(f"--student-layers {args.student_layers} is not fewer than the {n_layers} of {args.model}")
    if n_kept == 0:
        raise UserError(f"{args.teacher} has a single layer, which cannot be halved; name a smaller --model")
    return n_kept


def learn_from(
    student: torch.nn.Module, teacher: torch.nn.Module, temperature: float = 1.0, fused: bool = True
) -> torch.nn.Module:
    """Make the reverse KL to the teacher the student's loss in training; returns the student.

    Only the student's `forward` changes.  The teacher does not become a part of it, of its parameters or state_dict.

    Args:
        student: a LlamaForCausalLM, with or without kernels.
        teacher: another, in evaluation mode, with the same vocabulary.
        temperature: divides the logits of both.
        fused: take the loss from the kernel; if not, from PyTorch's operations in fp32.
    """

    def eager(logits, teacher_logits, counts):
        return reverse_kl_reference(logits.float(), teacher_logits.float(), counts, temperature)

    reverse_kl = TritonReverseKLLoss(temperature) if fused else eager

    def forward(self, input_ids, labels):
        if not self.training:  # the validation loss is that of the labels
            return type(self).forward(self, input_ids=input_ids, labels=labels)
        with torch.no_grad():
            teacher_logits = teacher(input_ids=input_ids).logits  # (B, T, V)
        logits = type(self).forward(self, input_ids=input_ids).logits  # (B, T, V)
        loss_function = patching.causal_lm_loss(
            lambda logits, targets, ignore_index: reverse_kl(logits, teacher_logits, targets != ignore_index)
        )
        return CausalLMOutputWithPast(loss=loss_function(logits, labels), logits=logits)

    student.forward = types.MethodType(forward, student)
    return student


def load_student(args: argparse.Namespace, kernels: Sequence[str]) -> tuple[torch.nn.Module, dict]:
    """The model to train, with its teacher behind its loss, and what a record says about the teacher.

    Args:
        args: from `parse_args`, with a teacher.
        kernels: from `replace_loss`; those for a model go into both.
    """
    teacher_args = argparse.Namespace(**{**vars(args), "model": args.teacher})
    n_layers = layers_to_keep(args, config_file.load_config(args), config_file.load_config(teacher_args))
    try_step = step_tryer(model_kernels(kernels))
    teacher = loading.load_model(teacher_args, try_step).eval().requires_grad_(False)
    student = loading.load_model(args, try_step)
    student.model.layers = student.model.layers[:n_layers]
    student.config.num_hidden_layers = n_layers
    for model in (teacher, student):
        apply_kernels(model, model_kernels(kernels))
    temperature = args.temperature or 1.0
    described = llama.describe_workload(teacher, teacher_args)
    return learn_from(student, teacher, temperature, fused=REVERSE_KL in kernels), {
        "teacher": args.teacher, "teacher_weights": described["weights"],
        "teacher_parameters": described["parameters"],
        "teacher_flops_per_token": architecture.flops_per_token(teacher.config, args.seq_len) / 3,  # the forward's third
        "student_layers": n_layers, "temperature": temperature,
    }  # fmt: skip
