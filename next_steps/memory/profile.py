"""What fills the memory during a training step, and at its peak?  Measured on a real step.

    python -m next_steps.memory.profile --plot memory.png

How a step is observed: memory_profile.py.
"""

import argparse

from harness.cli import command_line
from harness.cli.flags import OF_KERNELS, OF_PROFILER, OF_TRAINING, Parser, row, without
from harness.cli.output_files import check_outputs
from harness.cli.workload import Workload
from harness.profiling.kernel_facts import KERNELS

FLAGS = without(OF_TRAINING, "--cuda-graph", "--parallel") | OF_KERNELS
FLAGS |= {flag: OF_PROFILER[flag] for flag in ("--first-layers", "--warmup")}
FLAGS |= {
    "--plot": row("the parts over the step as a picture", metavar="FILE.png"),
    "--memory-snapshot": row("a step for https://pytorch.org/memory_viz", metavar="FILE.pickle"),
}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, FLAGS)
    parser.add_kernels(KERNELS, default="none")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    check_outputs(args)
    from harness.cli.device import HAS_GPU  # after the flags: to import PyTorch takes seconds
    from next_steps.memory import memory_profile

    workload = Workload.from_flags(args, HAS_GPU)
    memory_profile.report(workload, args.json, args.plot, args.memory_snapshot)


if __name__ == "__main__":
    command_line.run_main(main)
