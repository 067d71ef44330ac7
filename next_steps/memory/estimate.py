"""How much memory will a training step need on a GPU?  Told in seconds, on any machine.

    python -m next_steps.memory.estimate --random-init --kernels all

How the estimate is made: memory_estimate.py.
"""

import argparse

from harness.cli import command_line
from harness.cli.flags import OF_KERNELS, OF_PROFILER, OF_TRAINING, Parser, without
from harness.cli.output_files import check_outputs
from harness.cli.workload import Workload
from harness.profiling.kernel_facts import KERNELS

FLAGS = without(OF_TRAINING, "--data", "--seed", "--pack", "--cuda-graph", "--parallel")
FLAGS |= OF_KERNELS | {"--first-layers": OF_PROFILER["--first-layers"]}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, FLAGS)
    parser.add_kernels(KERNELS, default="none")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    check_outputs(args)
    from next_steps.memory import memory_estimate

    memory_estimate.report(Workload.from_flags(args, on_gpu=True), args.json)


if __name__ == "__main__":
    command_line.run_main(main)
