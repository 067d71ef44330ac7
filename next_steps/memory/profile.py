"""What fills the memory during a training step, and at its peak?  Measured on a real step.

    python -m next_steps.memory.profile --plot memory.png

How a step is observed: memory_profile.py.
"""

from harness.cli import command_line
from harness.cli.flags import OF_PROFILER, OF_TRAINING, of_kernels, row, without
from harness.cli.workload import Workload
from harness.profiling.kernel_facts import KERNELS

FLAGS = without(OF_TRAINING, "--cuda-graph", "--parallel") | of_kernels(KERNELS, default="none")
FLAGS |= {flag: OF_PROFILER[flag] for flag in ("--first-layers", "--warmup")}
FLAGS |= {
    "--plot": row("the parts over the step as a picture", metavar="FILE.png"),
    "--memory-snapshot": row("a step for https://pytorch.org/memory_viz", metavar="FILE.pickle"),
}


def main() -> None:
    args, workload = Workload.read(__doc__, FLAGS)
    from next_steps.memory import memory_profile

    memory_profile.report_memory(workload, args.json, args.plot, args.memory_snapshot)


if __name__ == "__main__":
    command_line.run_main(main)
