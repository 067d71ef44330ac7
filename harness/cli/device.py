"""The device that everything runs on: a CUDA GPU, or without one the CPU by Triton's interpreter.

Importing it imports PyTorch and Triton, which takes seconds: scripts read their flags before.
"""

import gc
import os
from typing import NamedTuple

import torch

from harness.cli import interpreter
from harness.cli.command_line import UserError
from harness.cli.flags import TINY_MODEL
from kernel_support import INTERPRETED

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# PyTorch's profiler shall not announce its start and stop on stderr.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
if INTERPRETED:
    interpreter.make_faster()


class VisibleGpu(NamedTuple):
    name: str
    uuid: str  # as `nvidia-smi -L` and CUDA_VISIBLE_DEVICES write it


def list_gpus() -> list[VisibleGpu]:
    """Return the GPUs that this process sees, in PyTorch's order.  Scripts run on the first."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [VisibleGpu(each.name, f"GPU-{each.uuid}") for each in found]


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def free_memory() -> None:
    """Return unused memory to the GPU, for example that of a model that was deleted."""
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()


def begin_process(model: str, deterministic: bool = False) -> None:
    """Set what holds for the whole process; call this before the first matrix product.

    The tiny model gets one thread of a CPU, unless OMP_NUM_THREADS is set.  Several threads wait
    for each other up to a hundred times as long as they work.

    With `deterministic` PyTorch takes only algorithms that give the same bits in each run, and an
    operation that has none raises a RuntimeError.  Attention is then FlashAttention, whose backward
    adds in a fixed order, and never cuDNN's.
    """
    if model == TINY_MODEL and not HAS_GPU and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if deterministic:
        # cuBLAS adds in one order with such a workspace.  PyTorch reads the variable only once.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # new tensors would be filled with NaN, which takes time and changes no result
        torch.utils.deterministic.fill_uninitialized_memory = False


def require_interpreter() -> None:
    """Refuse to run kernels without a GPU if the environment forbids Triton's interpreter.

    Raises:
        UserError: TRITON_INTERPRET is set to 0.
    """
    if not HAS_GPU and not INTERPRETED:
        given = f"TRITON_INTERPRET is {os.environ.get('TRITON_INTERPRET')!r} and no CUDA GPU was"
        advice = "unset it, and Triton's interpreter runs them on the CPU"
        raise UserError(f"{given} found, so no kernel can run; {advice}")
