"""What is published of GPUs: the peaks that runs and predictions are measured against."""

from collections.abc import Iterable
from dataclasses import dataclass

THREADS = 32  # of a warp
LANES, FLOPS_OF_FMA = 128, 2  # fp32 lanes of a multiprocessor: 4 schedulers, each issues to 32


@dataclass(frozen=True)
class Gpu:
    """Published figures; None where nothing here reads them."""

    bf16_tflops: float | None  # dense, of matrix products that add in fp32
    target: str | None = None  # of judging/compile_targets.py
    multiprocessors: int | None = None
    fp32_tflops: float | None = None
    tbs: float | None = None  # TB/s of the memory
    gb: int | None = None  # of memory
    cache_mb: int | None = None  # the last cache before the memory

    @property
    def warps_per_us(self) -> float:
        """Return how many instructions of warps all schedulers issue in a microsecond.

        All lanes together issue half as many instructions of threads as the GPU has FLOPs of fp32.
        """
        return 1e6 * self.fp32_tflops / FLOPS_OF_FMA / THREADS

    @property
    def clock_ghz(self) -> float:
        return self.fp32_tflops / (FLOPS_OF_FMA * LANES * self.multiprocessors) * 1e3


# By a part of the GPU's name; the first match wins.  The vendors' data sheets and guides, but:
# GB300's multiprocessors are by users' reports, its fp32 peak is a GB300 NVL72's, its memory a DGX
# Station's (docs/gb300.md has the sources), its cache a B200's; B200's fp32 peak and RTX PRO 6000's
# bf16 peak are a table's (hmc-tech.com).  MI300X: the Infinity Cache; fp32 in packed instructions.
GPUS = {
    "GB300": Gpu(2500, "sm_103", 152, fp32_tflops=80, tbs=7.1, gb=252, cache_mb=126),
    "B300": Gpu(2500, tbs=8),
    "GB200": Gpu(2500, tbs=8),
    "B200": Gpu(2250, "sm_100", 148, fp32_tflops=75, tbs=8, gb=180, cache_mb=126),
    "H200": Gpu(989, "sm_90", 132, fp32_tflops=67, tbs=4.8, gb=141, cache_mb=50),
    "H100 80GB HBM3": Gpu(989, "sm_90", 132, fp32_tflops=67, tbs=3.35, gb=80, cache_mb=50),
    "GH200": Gpu(989),
    "A100": Gpu(312),
    "MI300X": Gpu(1307.4, "gfx942", 304, fp32_tflops=163.4, tbs=5.3, gb=192, cache_mb=256),
    "RTX PRO 6000": Gpu(503.8, "sm_120", 188, fp32_tflops=125, tbs=1.792, gb=96, cache_mb=128),
    "RTX 5090": Gpu(209.5, "sm_120", 170, fp32_tflops=104.8, tbs=1.792, gb=32, cache_mb=96),
    "RTX 4090": Gpu(None, tbs=1.008),
}
OF_BF16 = {"bf16": 1, "FP8": 2, "MXFP8": 2, "NVFP4": 6}  # dense peak; NVFP4: of Blackwell Ultra


def gpu_named(gpu: str | None) -> Gpu | None:
    """Return the figures of a GPU by its name; None if they are not known."""
    return next((row for name, row in GPUS.items() if gpu and name in gpu), None)


def peak_tflops(gpu: str | None, precision: str = "bf16") -> float | None:
    """Return a GPU's dense peak in "bf16", "FP8, LoRA", ..., TFLOP/s; None if it is not known."""
    row = gpu_named(gpu)
    return row and row.bf16_tflops and row.bf16_tflops * OF_BF16[precision.split(",")[0]]


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
