"""The processes of a run, as torchrun started them: which this one is, and what they may do.

Imports no PyTorch: flags are read with it.  What they do together: parallel.py.
"""

import argparse
import os

from harness.cli.command_line import UserError, flag_name, world_size

FSDP, DDP = PARALLEL = "fsdp", "ddp"
# flags of what nobody has tried with several processes, or cannot be done
ALONE = "cuda_graph", "offload", "teacher", "ladder", "longest", "estimate", "memory"


def rank() -> int:
    """Which of the processes this one is, from 0."""
    return int(os.environ.get("RANK", 0)) if world_size() > 1 else 0


def is_first() -> bool:
    """Is it the one that prints and writes files?"""
    return rank() == 0


def settings(args: argparse.Namespace) -> dict:
    """A workload's `parallel` and `world_size`, where there are several processes.

    Raises:
        UserError: --parallel without several processes, or a flag that is for one alone.
    """
    n, given = world_size(), getattr(args, "parallel", None)
    if n == 1:
        if given:
            expected = "torchrun starts several: torchrun --nproc-per-node 2 SCRIPT"
            raise UserError(f"--parallel {given} needs more than the one process; {expected}")
        return {}
    flags = [flag_name(name) for name in ALONE if getattr(args, name, None)]
    if flags:
        raise UserError(f"{flags[0]} is for one process and torchrun started {n}: leave it out")
    return {"parallel": given or FSDP, "world_size": n}
