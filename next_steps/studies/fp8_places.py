"""What the study of FP8's costs times: a layer's casts, fused and apart, and its products."""

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
        transposed = lambda codes=codes: (transpose_rows(codes),)  # noqa: E731
        yield Cast(f"{name}, transposed", 2 * matrix.numel(), transposed)


def weight_casts() -> Iterator[Cast]:
    """Yield the casts of a layer's largest weights. The number of tokens does not matter."""
    H, I, _ = WIDTHS
    gate, up = random(I, H), random(I, H)
    n_bytes = 3 * 2 * gate.numel()
    yield Cast("weights of gate and up", n_bytes, lambda: (quantize_stacked(gate, up),))
    scale = quantize_stacked(gate, up).scales.amax()
    transposed = lambda: (quantize_transposed(gate, up, scale=scale),)  # noqa: E731
    yield Cast("the same, transposed", n_bytes, transposed)


def products(tokens: int) -> Iterator[Product]:
    """Yield the forward's four products, and gate and up's two of the backward.

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
