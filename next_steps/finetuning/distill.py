"""Distillation: a smaller model learns a larger one's answers (docs/reverse_kl.md).

    python -m next_steps.finetuning.distill --teacher MODEL --student-layers 8

The loop is finetune_optimized.py's, the loss is the reverse KL to the teacher.
"""

from harness.cli import command_line, flags
from harness.cli.command_line import positive_float, positive_int
from harness.cli.flags import OF_FINETUNING, OF_LORA, OF_OPTIMIZED, OF_TRAINING, row, without
from harness.cli.workload import Workload
from harness.profiling.kernel_facts import KERNELS, PLAYBOOK_KERNELS

MODEL_METAVAR = "ID|DIR|tiny"
FLAGS = without(OF_TRAINING, "--recompute", "--offload", "--parallel", *OF_LORA)
FLAGS |= without(OF_FINETUNING, "--merge") | OF_OPTIMIZED
FLAGS |= without(flags.of_kernels(KERNELS, default=",".join(PLAYBOOK_KERNELS)), "--fp8")
FLAGS |= {
    "--teacher": row(
        "the model that is distilled into --model; the loss is the reverse KL, and its kernel "
        "replaces cross_entropy and linear_cross_entropy",
        required=True,
        metavar=MODEL_METAVAR,
    ),
    "--model": row("the student (default: the teacher's model)", metavar=MODEL_METAVAR),
    "--student-layers": row(
        "train the first N layers of --model (default: all; half if it is the teacher's model)",
        type=positive_int,
        metavar="N",
    ),
    "--temperature": row("divides the logits of both models (default: 1)", type=positive_float),
}


def main() -> None:
    args, workload = Workload.read(__doc__, FLAGS)
    from next_steps.finetuning import distillation

    distillation.distil(workload, args.json, args.save)


if __name__ == "__main__":
    command_line.run_main(main)
