"""What fp8_costs.py times: casts fused and apart, and the products that they are for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from harness.benchmark.benchmark_specs import HEAD_DIM, K_HEADS, LLAMA_HIDDEN, LLAMA_INTERMEDIATE
from harness.cli.device import DEVICE, HAS_GPU
from next_steps.lessons.fp8_casts import rmsnorm_fp8, swiglu_fp8, swiglu_fp8_backward
from next_steps.lessons.fp8_kernel import (
    Rows,
    fp8_product,
    quantize_rows,
    quantize_stacked,
    quantize_transposed,
    transpose_rows,
)
from next_steps.lessons.swiglu_kernel import swiglu_backward, swiglu_forward
from rmsnorm_kernel import rmsnorm_forward

EPS = 1e-5
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


@dataclass(frozen=True)
class Product:
    """One product of a layer, in bf16 and in FP8 with both ways to add."""

    name: str
    shape: tuple[int, int, int]  # M, N, K
    bf16: Callable[[], torch.Tensor]
    fp8: Callable[[bool], torch.Tensor]  # of `fast`


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(torch.bfloat16)


def separate_swiglu(gate: torch.Tensor, up: torch.Tensor) -> Rows:
    """What swiglu_fp8 does, by SwiGLU's bf16 kernel and a cast after it."""
    return quantize_rows(swiglu_forward(gate, up))


def separate_swiglu_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[Rows, Rows]:
    """What swiglu_fp8_backward does, in the same way."""
    dgate, dup, y = swiglu_backward(dy, gate, up, need_y=True)
    return quantize_rows(dgate, dup), quantize_rows(y)


def casts(tokens: int) -> Iterator[Cast]:
    """Of a layer's activations and gradients at so many tokens."""
    H, I, KV = WIDTHS
    x, weight = random(tokens, H), random(H)
    yield Cast(
        "RMSNorm",
        3 * x.numel(),
        fused=lambda: (rmsnorm_fp8(x, weight, EPS)[0],),
        alone=lambda: rmsnorm_forward(x, weight, EPS),
        separate=lambda: (quantize_rows(rmsnorm_forward(x, weight, EPS)[0]),),
    )
    gate, up = random(tokens, 2 * I).chunk(2, 1)
    yield Cast(
        "SwiGLU",
        5 * gate.numel(),
        fused=lambda: (swiglu_fp8(gate, up),),
        alone=lambda: swiglu_forward(gate, up),
        separate=lambda: (separate_swiglu(gate, up),),
    )
    dy = random(tokens, I)

    yield Cast(
        "SwiGLU, backward",
        9 * gate.numel(),
        fused=lambda: swiglu_fp8_backward(dy, gate, up),
        alone=lambda: swiglu_backward(dy, gate, up, need_y=True),
        separate=lambda: separate_swiglu_backward(dy, gate, up),
    )
    dq, dk, dv = random(tokens, H), random(tokens, KV), random(tokens, KV)
    yield Cast("x of o", 3 * x.numel(), fused=lambda: (quantize_rows(x),))
    yield Cast(
        "dq, dk, dv side by side",
        3 * (dq.numel() + 2 * dk.numel()),
        fused=lambda: (quantize_rows(dq, dk, dv),),
    )
    for name, matrix in (("x of q, k, v", x), ("gradient of gate and up", random(tokens, 2 * I))):
        rows = quantize_rows(matrix)
        yield Cast(
            f"{name}, transposed",
            2 * matrix.numel(),
            fused=lambda rows=rows: (transpose_rows(rows),),
        )


def weight_casts() -> Iterator[Cast]:
    """Of a layer's largest weights, whatever the tokens are."""
    H, I, _ = WIDTHS
    gate, up = random(I, H), random(I, H)
    n_numbers = 2 * gate.numel()
    yield Cast("weights of gate and up", 3 * n_numbers, fused=lambda: (quantize_stacked(gate, up),))
    scale = quantize_stacked(gate, up).scales.amax()
    yield Cast(
        "the same, transposed",
        3 * n_numbers,
        fused=lambda: (quantize_transposed(gate, up, scale=scale),),
    )


def products(tokens: int) -> Iterator[Product]:
    """The forward's four, and gate and up's two of the backward; of operands that are there.

    Up to 32,768 tokens: the gradient of w sums over them.
    """
    H, I, KV = WIDTHS
    shapes = {
        "q, k, v": (tokens, H + 2 * KV, H),
        "o": (tokens, H, H),
        "gate, up": (tokens, 2 * I, H),
        "down": (tokens, H, I),
        "gate, up: gradient of x": (tokens, H, 2 * I),
        "gate, up: gradient of w": (2 * I, H, tokens),
    }
    for name, (M, N, K) in shapes.items():
        a, b = random(M, K), random(N, K)
        codes = quantize_rows(a), quantize_rows(b)
        yield Product(
            name,
            (M, N, K),
            bf16=lambda a=a, b=b: a @ b.t(),
            fp8=lambda fast, codes=codes: fp8_product(*codes, torch.bfloat16, fast),
        )
