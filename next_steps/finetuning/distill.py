"""Distillation: a smaller model learns a larger one's answers (docs/distillation.md).

    python -m next_steps.finetuning.distill --teacher MODEL --student-layers 8

The loop is finetune_optimized.py's, the loss is the reverse KL to the teacher.
"""

import argparse

from harness.cli import command_line
from harness.cli.command_line import positive_float, positive_int
from harness.cli.flags import (
    OF_FINETUNING,
    OF_KERNELS,
    OF_LORA,
    OF_OPTIMIZED,
    OF_TRAINING,
    Parser,
    row,
    without,
)
from harness.cli.output_files import check_outputs
from harness.cli.workload import Workload
from harness.profiling.kernel_facts import KERNELS, PLAYBOOK_KERNELS

FLAGS = without(OF_TRAINING, "--recompute", "--offload", "--parallel", *OF_LORA)
FLAGS |= without(OF_FINETUNING, "--merge") | without(OF_KERNELS, "--fp8") | OF_OPTIMIZED
FLAGS |= {
    "--teacher": row(
        "the model that is distilled into --model; the loss is the reverse KL, and its kernel "
        "replaces cross_entropy and linear_cross_entropy",
        required=True,
        metavar="ID|DIR|tiny",
    ),
    "--student-layers": row(
        "train the first N layers of --model (default: all; half if it is the teacher's model)",
        type=positive_int,
        metavar="N",
    ),
    "--temperature": row("divides the logits of both models (default: 1)", type=positive_float),
}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments; --model is --teacher's unless told."""
    parser = Parser(__doc__, FLAGS)
    parser.add_kernels(KERNELS, default=",".join(PLAYBOOK_KERNELS))
    args = parser.parse_args(arguments)
    if "model" not in args.given:
        args.model = args.teacher
    return args


def main() -> None:
    args = parse_args()
    check_outputs(args)
    from harness.cli.device import HAS_GPU  # after the flags: to import PyTorch takes seconds
    from next_steps.finetuning import distillation

    distillation.train(Workload.from_flags(args, HAS_GPU), args.json, args.save)


if __name__ == "__main__":
    command_line.run_main(main)
