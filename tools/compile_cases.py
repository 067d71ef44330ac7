"""What is compiled: for each kernel the ways to launch it, through the functions that users call.

The shapes are LLaMA 3.1 8B's.  So block sizes, number of warps and specialization are those of a
real run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from cross_entropy_kernel import (
    FusedCrossEntropyFunction,
    InplaceCrossEntropyFunction,
    PlainCrossEntropyFunction,
)
from next_steps.layers.fused_layer import SwiGLULinearFunction
from next_steps.layers.llama_mlp import SwiGLUMLPFunction
from next_steps.lessons.adamw_optimizer import TritonAdamW
from next_steps.lessons.fp8_casts import rmsnorm_fp8, swiglu_fp8, swiglu_fp8_backward
from next_steps.lessons.fp8_kernel import quantize_rows, quantize_transposed, transpose_rows
from next_steps.lessons.linear_cross_entropy_kernel import LinearCrossEntropyFunction
from next_steps.lessons.nf4_kernel import BLOCK, GROUP, N_VALUES, NF4LinearFunction
from next_steps.lessons.qk_norm_rope_kernel import TritonQKNormRoPEFunction
from next_steps.lessons.reverse_kl_kernel import TritonReverseKLFunction
from next_steps.lessons.rope_kernel import TritonRoPEFunction
from next_steps.lessons.swiglu_kernel import TritonSwiGLUFunction
from rmsnorm_kernel import TritonRMSNormFunction
from tools.compile_targets import UNALIGNED

B, T, H, V, INTERMEDIATE = 2, 2048, 4096, 128_256, 14_336
Make = Callable[..., torch.Tensor]  # a maker of tensors of a shape, in the dtype under test
Arguments = Callable[[Make], tuple]


@dataclass(frozen=True)
class Case:
    """One way to call a Function, or any other callable that launches kernels."""

    name: str
    function: type[torch.autograd.Function] | Callable
    arguments: Arguments
    frozen: tuple[int, ...] = ()  # positions of arguments that need no gradient
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    targets: str = ""  # a prefix of the targets' names


BF16 = {"dtypes": ("bf16",)}
NVIDIA = {"targets": "sm_"}


# ---------------------------------------------------------------- arguments


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def targets() -> torch.Tensor:
    return empty(B, T, dtype=torch.int64)


def rmsnorm_arguments(hidden: int, affine: bool = True) -> Arguments:
    return lambda t: (t(B, T, hidden), t(hidden) if affine else None, 1e-5)


def cross_entropy_arguments(reduction: str, vocab: int = V) -> Arguments:
    return lambda t: (t(B, T, vocab), targets(), -100, reduction)


def linear_cross_entropy_arguments(reduction: str, vocab: int = V) -> Arguments:
    rest = -100, reduction, None, None, None, True
    return lambda t: (t(B, T, H), t(vocab, H), targets(), *rest)


def adamw_arguments(t: Make, tensors: tuple[str, ...] = (), **options) -> tuple:
    """AdamW's arguments; `tensors` names settings that are tensors."""
    settings = {"lr": empty(()), "betas": (empty(()), empty(()))}
    return t(H, H), t(H, H), options, {name: settings[name] for name in tensors}


def adamw_step(p: torch.Tensor, grad: torch.Tensor, options: dict, tensors: dict) -> None:
    optimizer = TritonAdamW([p], **options)
    optimizer.param_groups[0].update(tensors)  # the constructor would read their numbers
    p.grad = grad
    optimizer.step()


def rope_arguments(t: Make, n: int = 32, n_kv: int = 8, head_dim: int = 128) -> tuple:
    q, k = (t(B, T, n_heads, head_dim).transpose(1, 2) for n_heads in (n, n_kv))
    return q, k, t(1, T, head_dim), t(1, T, head_dim)


def reverse_kl_arguments(reduction: str, vocab: int, masked: bool = False) -> Arguments:
    def arguments(t: Make) -> tuple:
        mask = empty(B, T, dtype=torch.bool) if masked else None
        return t(B, T, vocab), t(B, T, vocab), mask, 1.0, reduction, None, True

    return arguments


def nf4_arguments(t: Make) -> tuple:
    n_blocks = INTERMEDIATE * H // BLOCK
    integers = (empty(n, dtype=torch.uint8) for n in (n_blocks * BLOCK // 2, n_blocks))
    floats = (empty(n) for n in (n_blocks // GROUP, 1, N_VALUES + GROUP))
    return t(B, T, H), (INTERMEDIATE, H), *integers, *floats


def lora_arguments(t: Make, rank: int) -> tuple:
    gate, up = t(B, T, INTERMEDIATE), t(B, T, INTERMEDIATE)
    h, b_gate, b_up = t(B * T, 2 * rank), t(INTERMEDIATE, rank), t(INTERMEDIATE, rank)
    of_down = t(H, INTERMEDIATE), t(rank, INTERMEDIATE), t(H, rank)
    return gate, up, h, False, (1.0, 1.0, 1.0), None, b_gate, b_up, *of_down, None


def fp8_arguments(*widths: int) -> Arguments:
    return lambda t: tuple(t(B * T, width) for width in widths)


def quantize_and_transpose(*parts: torch.Tensor) -> None:
    rows = quantize_rows(*parts)
    transpose_rows(rows)
    quantize_transposed(parts[0], scale=rows.scales.amax())


def swiglu_in_fp8(dy: torch.Tensor, gate_up: torch.Tensor) -> None:
    gate, up = gate_up.chunk(2, 1)
    swiglu_fp8(gate, up)
    swiglu_fp8_backward(dy, gate, up)


# ---------------------------------------------------------------- cases


def rmsnorm_cases() -> Iterator[Case]:
    norm = TritonRMSNormFunction
    yield Case("RMSNorm", norm, rmsnorm_arguments(H))
    yield Case("RMSNorm, frozen weight", norm, rmsnorm_arguments(H), frozen=(1,))
    for h, rest in ((2048, {}), (8192, {}), (16_384, BF16)):
        yield Case(f"RMSNorm, H = {h:,}", norm, rmsnorm_arguments(h), **NVIDIA, **rest)
    for h in (2048, H, 8192, 16_384):
        yield Case(f"RMSNorm without weight, H = {h:,}", norm, rmsnorm_arguments(h, affine=False))


def cross_entropy_cases() -> Iterator[Case]:
    loss, plain = FusedCrossEntropyFunction, PlainCrossEntropyFunction
    for reduction in ("mean", "sum", "none"):
        yield Case(f"cross-entropy, {reduction}", loss, cross_entropy_arguments(reduction))
    for v in (V, 50_257, 32_000):
        name, arguments = f"cross-entropy in place, V = {v:,}", cross_entropy_arguments("mean", v)
        yield Case(name, InplaceCrossEntropyFunction, arguments)
    plain_arguments = lambda t: (t(B * T, V), targets().view(-1))  # noqa: E731
    yield Case("cross-entropy, the plain form", plain, plain_arguments)


def swiglu_cases() -> Iterator[Case]:
    whole = lambda t: (t(B, T, INTERMEDIATE), t(B, T, INTERMEDIATE), False)  # noqa: E731
    halves = lambda t: (*t(B, T, 2 * INTERMEDIATE).chunk(2, -1), False)  # noqa: E731
    yield Case("SwiGLU", TritonSwiGLUFunction, whole)
    yield Case("SwiGLU, halves of one tensor", TritonSwiGLUFunction, halves)
    for rank in (16, 64):
        name, arguments = f"SwiGLU with adapters, R = {rank}", partial(lora_arguments, rank=rank)
        yield Case(name, SwiGLULinearFunction, arguments, **BF16)
    shapes = (B, T, H), (INTERMEDIATE, H), (INTERMEDIATE, H), (H, INTERMEDIATE)
    yield Case("SwiGLU MLP", SwiGLUMLPFunction, lambda t: tuple(t(*shape) for shape in shapes))


def adamw_cases() -> Iterator[Case]:
    yield Case("AdamW", adamw_step, adamw_arguments)
    stochastic = partial(adamw_arguments, stochastic_rounding=True)
    yield Case("AdamW, stochastic", adamw_step, stochastic, **BF16)
    fp32_moments = partial(adamw_arguments, moments_dtype=torch.float32)
    for rounding in (False, True):
        name = f"AdamW, fp32 moments, stochastic: {rounding}"
        arguments = partial(fp32_moments, stochastic_rounding=rounding)
        yield Case(name, adamw_step, arguments, **BF16)
    yield Case("AdamW, maximize", adamw_step, partial(adamw_arguments, maximize=True))
    yield Case("AdamW, lr in a tensor", adamw_step, partial(adamw_arguments, tensors=("lr",)))
    tensors = partial(adamw_arguments, tensors=("lr", "betas"))
    yield Case("AdamW, lr and betas in tensors", adamw_step, tensors)
    unaligned = lambda t: (t(H + 1), t(H + 1), {"stochastic_rounding": True}, {})  # noqa: E731
    yield Case(f"AdamW, {UNALIGNED}", adamw_step, unaligned)


def adamw8_cases() -> Iterator[Case]:
    for rounding, dtypes in ((False, {}), (True, BF16)):
        how = {"moments_dtype": torch.uint8, "stochastic_rounding": rounding}
        name = f"AdamW, 8-bit moments, stochastic: {rounding}"
        yield Case(name, adamw_step, partial(adamw_arguments, **how), **dtypes)
    tensors = partial(adamw_arguments, tensors=("lr", "betas"), moments_dtype=torch.uint8)
    yield Case("AdamW, 8-bit moments, lr and betas in tensors", adamw_step, tensors, **BF16)


def rope_cases() -> Iterator[Case]:
    yield Case("RoPE", TritonRoPEFunction, rope_arguments, frozen=(2, 3))
    for n, n_kv, d in ((32, 32, 128), (128, 8, 128), (32, 32, 80)):
        arguments = partial(rope_arguments, n=n, n_kv=n_kv, head_dim=d)
        name = f"RoPE, {n} and {n_kv} heads of {d}"
        yield Case(name, TritonRoPEFunction, arguments, frozen=(2, 3))


def qk_norm_rope_arguments(t: Make, *heads: int) -> tuple:
    q, k, cos, sin = rope_arguments(t, *heads)
    return q, k, t(q.shape[-1]), t(q.shape[-1]), 1e-6, cos, sin


def qk_norm_rope_cases() -> Iterator[Case]:
    for words, heads, frozen in (
        ("32 and 8 heads, frozen", (32, 8, 128), (2, 3)),
        ("32 and 8 heads", (32, 8, 128), ()),
        ("16 and 8 heads", (16, 8, 128), ()),
        ("5 and 3 heads of 80", (5, 3, 80), ()),
        ("8 and 4 heads of 256", (8, 4, 256), ()),
    ):
        arguments = lambda t, heads=heads: qk_norm_rope_arguments(t, *heads)  # noqa: E731
        name = f"QK norm and RoPE, {words}"
        yield Case(name, TritonQKNormRoPEFunction, arguments, frozen=(*frozen, 5, 6))


def reverse_kl_cases() -> Iterator[Case]:
    for name, *arguments in (
        ("batchmean, V = 131,072", "batchmean", 131_072),
        ("batchmean of a mask, V = 131,072", "batchmean", 131_072, True),
        ("none, V = 131,072", "none", 131_072),
        ("sum, V = 50,257", "sum", 50_257),
        ("none, V = 50,257", "none", 50_257),
    ):
        arguments = reverse_kl_arguments(*arguments)
        yield Case(f"reverse KL, {name}", TritonReverseKLFunction, arguments, frozen=(1,))


def fp8_casts_cases() -> Iterator[Case]:
    for h in (576, H, 8192, 16_384):
        arguments = lambda t, h=h: (t(B * T, h), t(h), 1e-5)  # noqa: E731
        yield Case(f"RMSNorm in FP8, H = {h:,}", rmsnorm_fp8, arguments, **NVIDIA)
    for i in (1536, INTERMEDIATE):
        yield Case(f"SwiGLU in FP8, I = {i:,}", swiglu_in_fp8, fp8_arguments(i, 2 * i), **NVIDIA)


CASES = {  # by the names of kernel_facts.py's rows
    "rmsnorm": [*rmsnorm_cases()],
    "cross_entropy": [*cross_entropy_cases()],
    "linear_cross_entropy": [
        Case(name, LinearCrossEntropyFunction, linear_cross_entropy_arguments(*arguments))
        for name, *arguments in (
            ("linear + cross-entropy, mean", "mean"),
            ("linear + cross-entropy, none", "none"),
            ("linear + CE, V = 50,257", "mean", 50_257),
        )
    ],
    "swiglu": [*swiglu_cases()],
    "adamw": [*adamw_cases()],
    "adamw8": [*adamw8_cases()],
    "rope": [*rope_cases()],
    "qk_norm_rope": [*qk_norm_rope_cases()],
    "reverse_kl": [*reverse_kl_cases()],
    "nf4": [Case("NF4", NF4LinearFunction, nf4_arguments, frozen=(4, 5, 6))],
    "fp8": [  # e4m3 as NVIDIA has it: not gfx942
        Case(f"FP8, {name}", quantize_and_transpose, fp8_arguments(*widths), **NVIDIA)
        for name, *widths in (
            ("H = 576", 576),
            ("H = 4,096", H),
            ("q, k, v", H, H // 4, H // 4),
            ("I = 14,336", INTERMEDIATE),
            ("I = 28,672", 2 * INTERMEDIATE),
        )
    ],
    "fp8_casts": [*fp8_casts_cases()],
}
