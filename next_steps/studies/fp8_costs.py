"""What FP8 costs in a layer: times of its casts, fused and apart, and of its products.

fp8_study.py prints them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from harness.benchmark.benchmark_specs import HEAD_DIM, K_HEADS, LLAMA_HIDDEN, LLAMA_INTERMEDIATE
from harness.benchmark.checking import relative_error
from harness.cli.command_line import RunError
from harness.cli.device import DEVICE, HAS_GPU
from harness.records.run_records import environment
from harness.steps import timing
from next_steps.lessons import fp8_kernel
from next_steps.lessons.fp8_casts import rmsnorm_fp8, swiglu_fp8, swiglu_fp8_backward
from next_steps.lessons.fp8_kernel import Rows, quantize_rows
from next_steps.lessons.swiglu_kernel import swiglu_backward, swiglu_forward
from rmsnorm_kernel import rmsnorm_forward

EPS = 1e-5
LARGEST_ERROR = 2**-4  # of the fused kernel's codes beside those of the separate kernels
# H, I, and the columns of k or v; without a GPU for Triton's interpreter
WIDTHS = (LLAMA_HIDDEN, LLAMA_INTERMEDIATE, K_HEADS * HEAD_DIM) if HAS_GPU else (64, 96, 16)


@dataclass(frozen=True)
class Cast:
    """One place of a layer where numbers become FP8.  Each function returns a tuple of Rows."""

    name: str
    n_bytes: int  # that `fused` reads and writes
    fused: Callable[[], tuple[Rows, ...]]
    alone: Callable[[], object] | None = None  # what a bf16 layer does there
    separate: Callable[[], tuple[Rows, ...]] | None = None  # that, and quantize_rows


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(torch.bfloat16)


def separate_swiglu(gate: torch.Tensor, up: torch.Tensor) -> Rows:
    """Do swiglu_fp8's work with SwiGLU's bf16 kernel and a cast after it."""
    return quantize_rows(swiglu_forward(gate, up))


def separate_swiglu_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[Rows, Rows]:
    """Do swiglu_fp8_backward's work in the same way."""
    dgate, dup, y = swiglu_backward(dy, gate, up, need_y=True)
    return quantize_rows(dgate, dup), quantize_rows(y)


def casts(tokens: int) -> Iterator[Cast]:
    """Yield the casts of a layer's activations and gradients at so many tokens."""
    H, I, KV = WIDTHS
    x, weight = random(tokens, H), random(H)
    yield Cast(
        "RMSNorm",
        3 * x.numel(),
        lambda: (rmsnorm_fp8(x, weight, EPS)[0],),
        lambda: rmsnorm_forward(x, weight, EPS),
        lambda: (quantize_rows(rmsnorm_forward(x, weight, EPS)[0]),),
    )
    gate_up, dy = random(tokens, 2 * I), random(tokens, I)
    gate, up = gate_up.chunk(2, 1)
    yield Cast(
        "SwiGLU",
        5 * gate.numel(),
        lambda: (swiglu_fp8(gate, up),),
        lambda: swiglu_forward(gate, up),
        lambda: (separate_swiglu(gate, up),),
    )
    yield Cast(
        "SwiGLU, backward",
        9 * gate.numel(),
        lambda: swiglu_fp8_backward(dy, gate, up),
        lambda: swiglu_backward(dy, gate, up, need_y=True),
        lambda: separate_swiglu_backward(dy, gate, up),
    )
    yield Cast("x of o", 3 * x.numel(), lambda: (quantize_rows(x),))
    dq, dk, dv = random(tokens, H), random(tokens, KV), random(tokens, KV)
    n_numbers = dq.numel() + 2 * dk.numel()
    yield Cast("dq, dk, dv side by side", 3 * n_numbers, lambda: (quantize_rows(dq, dk, dv),))
    for name, matrix in (("x of q, k, v", x), ("gradient of gate and up", gate_up)):
        codes = quantize_rows(matrix)
        transposed = lambda codes=codes: (fp8_kernel.transpose_rows(codes),)  # noqa: E731
        yield Cast(f"{name}, transposed", 2 * matrix.numel(), transposed)


def weight_casts() -> Iterator[Cast]:
    """Yield the casts of a layer's largest weights. The number of tokens does not matter."""
    H, I, _ = WIDTHS
    gate, up = random(I, H), random(I, H)
    n_bytes = 3 * 2 * gate.numel()
    yield Cast("weights of gate and up", n_bytes, lambda: (fp8_kernel.quantize_stacked(gate, up),))
    scale = fp8_kernel.quantize_stacked(gate, up).scales.amax()
    transposed = lambda: (fp8_kernel.quantize_transposed(gate, up, scale=scale),)  # noqa: E731
    yield Cast("the same, transposed", n_bytes, transposed)


def product_rows(tokens: int) -> list[dict]:
    """Time the forward's four products, and gate and up's two of the backward."""
    H, I, KV = WIDTHS
    rows = []
    for name, (M, N, K) in {
        "q, k, v": (tokens, H + 2 * KV, H),
        "o": (tokens, H, H),
        "gate, up": (tokens, 2 * I, H),
        "down": (tokens, H, I),
        "gate, up: gradient of x": (tokens, H, 2 * I),
        "gate, up: gradient of w": (2 * I, H, tokens),
    }.items():
        a, b = random(M, K), random(N, K)
        codes = quantize_rows(a), quantize_rows(b)
        row = {"name": name, "tokens": tokens, "shape": [M, N, K]}
        row["bf16_us"] = measured(lambda: a @ b.t())  # noqa: B023  called at once
        for way, fast in (("fast", True), ("accurate", False)):
            product = functools.partial(fp8_kernel.fp8_product, *codes, torch.bfloat16, fast)
            row[f"{way}_us"] = measured(product)
        rows.append(row)
    return rows


def measured(fn: Callable | None) -> float | None:
    """Return the GPU's time in us; without a GPU the host's, which means nothing."""
    if fn is None:
        return None
    return timing.graph_time_us(fn) if HAS_GPU else timing.time_us(fn).p50


def check(cast: Cast) -> None:
    """Refuse to time a kernel that is wrong."""
    for ours, apart in zip(cast.fused(), cast.separate()):
        found, expected = (fp8_kernel.dequantize(rows, torch.float32) for rows in (ours, apart))
        error = relative_error(found, expected.double())
        if not error <= LARGEST_ERROR:
            raise RunError(
                f"{cast.name}: fused and separate differ by {error:.1e}, but only "
                f"{LARGEST_ERROR:.1e} is allowed; a wrong kernel is not timed"
            )


def cast_row(cast: Cast, tokens: int | None) -> dict:
    if cast.separate is not None:
        check(cast)
    us = {f"{way}_us": measured(getattr(cast, way)) for way in ("alone", "separate", "fused")}
    return {"name": cast.name, "tokens": tokens, "bytes": cast.n_bytes, **us}


def measure(tokens: Sequence[int]) -> dict:
    """Return the record."""
    if (reason := fp8_kernel.fp8_support()) is not None:
        raise RunError(reason)
    record = {"kind": "fp8_costs", "environment": environment()}
    record["copy_gbs"] = timing.copy_bandwidth()
    record["casts"] = [cast_row(cast, None) for cast in weight_casts()]
    record["products"] = []
    for n in tokens:
        record["casts"] += [cast_row(cast, n) for cast in casts(n)]
        record["products"] += product_rows(n)
    return record
