"""What others offer for the same training, in the loop of our own runs (docs/ladder.md).

python -m next_steps.finetuning.opponents --opponent liger
"""

from harness.cli import command_line
from harness.cli.flags import OF_FINETUNING, OF_TRAINING, OPPONENTS, row, without
from harness.cli.workload import Workload

FLAGS = without(OF_TRAINING, "--recompute", "--offload") | OF_FINETUNING
FLAGS["--opponent"] = row(
    "what others offer in place of our kernels: FlashOptim's AdamW, or PyTorch's fused AdamW alone "
    "or with F.rms_norm, torch.compile, Liger-Kernel's patch, Unsloth or torchao's float8",
    required=True,
    choices=OPPONENTS,
)


def main() -> None:
    args, workload = Workload.read(__doc__, FLAGS)
    from next_steps.finetuning import opponent_models

    opponent_models.train_opponent(workload, args.json, args.save)


if __name__ == "__main__":
    command_line.run_main(main)
