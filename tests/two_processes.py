"""Run a function in two processes that talk over gloo, or over NCCL if there are GPUs.

A process that waits for another forever fails the test, and does not hold it up.
"""

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from harness.cli.device import HAS_GPU
from tests.fixtures import shared_folder
from tests.warm_processes import forks

LONGEST = 500  # seconds, on a busy machine
LONGEST_WAIT = datetime.timedelta(seconds=60)  # of one process for the other: a hang ends here

one_gpu_is_too_few = pytest.mark.several_gpus(2, or_none=True)


def by(n: int, *values):
    """Values of a parametrized test that so many processes run, each on a GPU or all on the CPU."""
    return pytest.param(n, *values, marks=pytest.mark.several_gpus(n, or_none=True))


def made_once(make: Callable, tmp_path_factory) -> Path:
    """Return a folder that make(folder) has filled, once for all workers of pytest-xdist."""
    folder = shared_folder(tmp_path_factory) / f"{make.__module__}.{make.__name__}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            make(folder)
    return folder


def in_two_processes(function: Callable, folder: Path, *args) -> list:
    """Return [function(0, device, *args), function(1, device, *args)] of two processes.

    The function can be pickled, and its results saved; each process's device is its own GPU, or the
    CPU.  The folder is an empty one.

    Raises:
        torch.multiprocessing.ProcessRaisedException: one of them has raised; its text is in it.
        TimeoutError: they have not ended in time, and are stopped.
    """
    forks()
    how = {"nprocs": 2, "join": False, "start_method": "forkserver"}
    arguments = function, str(folder), args, dict(os.environ)
    context = torch.multiprocessing.start_processes(_run, arguments, **how)
    end = time.monotonic() + LONGEST
    while not context.join(timeout=1, grace_period=5):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"two processes have not ended in {LONGEST} s")
    return results_of_two(folder)


def results_of_two(folder: Path) -> list:
    """Return what `in_two_processes` returned for this folder."""
    return [torch.load(folder / str(rank), map_location="cpu") for rank in (0, 1)]


def _run(rank: int, function: Callable, folder: str, args: tuple, environment: dict) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if HAS_GPU else torch.device("cpu")
    if HAS_GPU:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if HAS_GPU else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=LONGEST_WAIT,
    )
    torch.save(function(rank, device, *args), f"{folder}/{rank}")
    torch.distributed.destroy_process_group()
