"""What is published of GPUs: the peaks that runs and predictions are measured against."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Published figures; None where nothing here reads them."""

    bf16_tflops: int | None  # dense, of matrix products
    target: str | None = None  # of judging/compile_targets.py
    multiprocessors: int | None = None
    fp32_tflops: float | None = None
    tbs: float | None = None  # TB/s of the memory


# By a part of the GPU's name; the first match wins.  The vendors' data sheets, but for two figures
# of GB300: its multiprocessors are by users' reports, its fp32 peak is a GB300 NVL72's.  GB300's
# memory is a DGX Station's; in an NVL72 a GB300 has 8 TB/s.  docs/gb300.md has the sources.
GPUS = {
    "GB300": Gpu(2500, "sm_103", multiprocessors=152, fp32_tflops=80, tbs=7.1),
    "B300": Gpu(2500, tbs=8),
    "GB200": Gpu(2500, tbs=8),
    "B200": Gpu(2250, tbs=8),
    "H200": Gpu(989, "sm_90", multiprocessors=132, fp32_tflops=67, tbs=4.8),
    "H100 80GB HBM3": Gpu(989, "sm_90", multiprocessors=132, fp32_tflops=67, tbs=3.35),
    "GH200": Gpu(989),
    "A100": Gpu(312),
    "MI300X": Gpu(None, tbs=5.3),
    "RTX 5090": Gpu(None, tbs=1.792),
    "RTX 4090": Gpu(None, tbs=1.008),
}
OF_BF16 = {"bf16": 1, "FP8": 2, "MXFP8": 2, "NVFP4": 6}  # dense peak; NVFP4: of Blackwell Ultra


def gpu_named(gpu: str | None) -> Gpu | None:
    """Return the figures of a GPU by its name; None if they are not known."""
    return next((row for name, row in GPUS.items() if gpu and name in gpu), None)


def peak_tflops(gpu: str | None, precision: str = "bf16") -> int | None:
    """Return a GPU's dense peak in "bf16", "FP8, LoRA", ..., TFLOP/s; None if it is not known."""
    row = gpu_named(gpu)
    return row and row.bf16_tflops * OF_BF16[precision.split(",")[0]]


def memory_gbs(gpu: str | None) -> float | None:
    """Return the GB/s of a GPU's memory; None if it is not known."""
    row = gpu_named(gpu)
    return row and row.tbs and 1e3 * row.tbs


def best_copy_gbs(measured: float, reached: Iterable[float], gpu: str | None) -> float:
    """Return the best copy rate of a GPU, GB/s: of a copy, or of kernels if that is higher.

    A rate above the data sheet's is the cache's, not the memory's, and does not count.  The same
    holds for a rate above the copy's, if the data sheet is not known.

    Args:
        measured: the rate of a copy, which always counts.
        reached: the rates of kernels.
        gpu: its name; None without a GPU.
    """
    most = max(measured, memory_gbs(gpu) or 0.0)
    return max([measured, *(gbs for gbs in reached if gbs <= most)])
