"""How much memory will a training step need on a GPU?  Told in seconds, on any machine.

    python -m next_steps.memory.estimate --random-init --kernels all

How the estimate is made: memory_estimate.py.
"""

from harness.cli import command_line
from harness.cli.flags import OF_PROFILER, OF_TRAINING, of_kernels, without
from harness.cli.workload import Workload
from harness.profiling.kernel_facts import KERNELS

NO_EFFECT = "--data", "--seed", "--pack", "--cuda-graph", "--parallel", "--deterministic"
FLAGS = without(OF_TRAINING, *NO_EFFECT)
FLAGS |= {"--first-layers": OF_PROFILER["--first-layers"], **of_kernels(KERNELS, default="none")}


def main() -> None:
    args, workload = Workload.read(__doc__, FLAGS, on_gpu=True)
    from next_steps.memory import memory_estimate

    memory_estimate.report_estimate(workload, args.json)


if __name__ == "__main__":
    command_line.run_main(main)
