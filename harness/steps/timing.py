"""Clocks and ceilings: how long a call takes, what memory it needs, what this machine can do.

Units: times in microseconds (us) or seconds, bandwidth in GB/s and memory in bytes, all decimal
(1 GB = 1e9 bytes), as the playbook's tables print them.
"""

import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton

from harness.cli.device import DEVICE, HAS_GPU, synchronize

COPIED_BYTES = 2 << 30  # whose copy gives the copy rate of a GPU
REST_S = 2.0  # after which a GPU is cool enough for a burst
PRODUCTS_OF_A_BURST = 3  # products that are queued at a time, five times: some 20 ms


class Timing(NamedTuple):
    """Microseconds: 20th percentile, median, 80th percentile."""

    p20: float
    p50: float
    p80: float


def time_us(fn: Callable[[], object], rep_ms: int = 100) -> Timing:
    """Return the wall time of fn(), launches included.

    triton's do_bench warms up and flushes the L2 cache before every call.
    """
    if HAS_GPU:
        ms = triton.testing.do_bench(fn, warmup=25, rep=rep_ms, quantiles=[0.2, 0.5, 0.8])
        return Timing(*(1e3 * t for t in ms))
    samples = []
    for _ in range(3):
        start = time.perf_counter()
        fn()
        samples.append(1e6 * (time.perf_counter() - start))
    return Timing(*sorted(samples))


def queued_time_us(fn: Callable[[], object], calls: int = 20) -> float:
    """Return the wall time of one fn() among `calls` that are queued back to back.

    This is the host's time or the GPU's, whichever is longer; the median of several batches.
    """
    calls, batches = (calls, 5) if HAS_GPU else (1, 3)
    fn()
    samples = []
    for _ in range(batches):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        synchronize()
        samples.append(1e6 * (time.perf_counter() - start) / calls)
    return statistics.median(samples)


def graph_time_us(fn: Callable[[], object]) -> float | None:
    """Return the kernel time of fn() alone: the median us of its replays from one CUDA graph.

    None without a GPU, or if fn waits for it.  Data that fits in L2 stays there.
    """
    if not HAS_GPU:
        return None
    try:
        return 1e3 * triton.testing.do_bench_cudagraph(fn, rep=50, return_mode="median")
    except RuntimeError:  # "operation not permitted when stream is capturing"
        torch.cuda.synchronize()
        return None


def copy_bandwidth() -> float:
    """Measure the device's copy rate in GB/s, reads plus writes."""
    n_bytes = COPIED_BYTES if HAS_GPU else 64 << 20
    source = torch.empty(n_bytes, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * n_bytes / time_us(lambda: target.copy_(source), rep_ms=200).p50 / 1e3


def rates_of(product: Callable[[], object], n: int, key: str) -> dict[str, float]:
    """Measure products of n x n x n in TFLOP/s: back to back and, on a GPU, in a cool burst."""
    rates, tflop_us = {}, 2 * n**3 / 1e6
    if HAS_GPU:
        product()
        synchronize()
        time.sleep(REST_S)
        rates[f"{key}_burst_tflops"] = tflop_us / queued_time_us(product, PRODUCTS_OF_A_BURST)
    return rates | {f"{key}_tflops": tflop_us / time_us(product, rep_ms=400).p50}


def matmul_rates(dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Measure the matrix rates on random data (n x n x n; 512 on the CPU)."""
    n = 8192 if HAS_GPU else 512
    a, b = (torch.randn(n, n, dtype=dtype, device=DEVICE) for _ in range(2))
    return rates_of(lambda: a @ b, n, "matmul")


def fp8_rates() -> dict[str, float]:
    """Measure the same for e4m3 with a scale for each row and fast accumulation; needs a GPU."""
    n = 8192
    options = {"dtype": torch.float32, "device": DEVICE}
    a, b = (torch.randn(n, n, **options).to(torch.float8_e4m3fn) for _ in range(2))
    scales = torch.ones(n, 1, **options)
    options = {"scale_a": scales, "scale_b": scales.t()}
    options |= {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    product = partial(torch._scaled_mm, a, b.t(), **options)
    return rates_of(product, n, "fp8")


def peak_extra_bytes(fn: Callable[[], object]) -> int | None:
    """Return the peak of what fn() allocates beyond what was allocated before; None on the CPU."""
    if not HAS_GPU:
        return None
    fn()  # workspaces that are allocated once do not count
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def reset_peak_memory() -> None:
    """Let `peak_memory_bytes` begin anew; on the CPU the peak of the whole process stays."""
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()


def peak_memory_bytes() -> int:
    """Return the GPU's peak of allocated memory; on the CPU, the process's peak resident size."""
    if HAS_GPU:
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
