"""The processes of a run, as torchrun started them: how many there are, and which this one is.

Imports no PyTorch: flags are read with it.  What processes do together: parallel.py.
"""

import os

DDP, KEPT, FSDP = PARALLEL = "ddp", "fsdp-kept", "fsdp"  # what needs most memory first
AUTO = "auto"  # stands for the first that fits


def world_size() -> int:
    """Return how many processes torchrun started for this run; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Return which of the processes this one is, from 0."""
    return int(os.environ.get("RANK", 0)) if world_size() > 1 else 0


def is_first() -> bool:
    """Return True in the process that prints and writes files."""
    return rank() == 0
