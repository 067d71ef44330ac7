"""What everything runs on: a CUDA GPU, or without one the CPU through Triton's interpreter.

This module imports PyTorch and Triton, which takes seconds.  Scripts import it after their flags.
"""

import gc
import os

import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
if not HAS_GPU:  # triton reads this at its first import, and then runs kernels on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")
# otherwise PyTorch's profiler announces its start and stop on stderr
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import triton  # noqa: E402

from harness import interpreter_rounding  # noqa: E402, F401  on the CPU kernels round as on a GPU
from harness.cli.command_line import UserError  # noqa: E402


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def free_memory() -> None:
    """Give memory back that nobody holds any more, such as a whole model's."""
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()


def require_interpreter() -> None:
    """Refuse to run kernels without a GPU if the environment forbids Triton's interpreter.

    Raises:
        UserError: TRITON_INTERPRET is set to 0.
    """
    if not HAS_GPU and not triton.knobs.runtime.interpret:
        raise UserError(
            f"TRITON_INTERPRET is {os.environ.get('TRITON_INTERPRET')!r} and no CUDA GPU was "
            "found, so no kernel can run; unset it, and Triton's interpreter runs them on the CPU"
        )
