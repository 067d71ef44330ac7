"""What is compiled: for each kernel the ways to launch it, through what users call.

The shapes are LLaMA 3.1 8B's, so that block sizes, number of warps and specialization are those of
a real run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cross_entropy_inplace_kernel import InplaceCrossEntropyFunction
from cross_entropy_kernel import FusedCrossEntropyFunction, PlainCrossEntropyFunction
from next_steps.layers.fused_layer import LoRASwiGLUFunction
from next_steps.layers.llama_mlp import SwiGLUMLPFunction
from next_steps.lessons.adamw_kernel import TritonAdamW
from next_steps.lessons.fp8_casts import rmsnorm_fp8, swiglu_fp8, swiglu_fp8_backward
from next_steps.lessons.fp8_kernel import quantize_rows, quantize_transposed, transpose_rows
from next_steps.lessons.linear_cross_entropy_kernel import LinearCrossEntropyFunction
from next_steps.lessons.nf4_kernel import BLOCK, GROUP, N_VALUES, NF4LinearFunction
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
    """One way to call a Function, or any other callable that launches kernels.

    `arguments` gets a maker of tensors in the dtype under test.
    """

    name: str
    function: type[torch.autograd.Function] | Callable[..., None]
    arguments: Arguments
    frozen: tuple[int, ...] = ()  # positions of arguments that need no gradient
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    targets: str = ""  # a prefix of the targets' names


def rmsnorm_arguments(hidden: int, affine: bool = True) -> Arguments:
    return lambda t: (t(B, T, hidden), t(hidden) if affine else None, 1e-5)


def cross_entropy_arguments(reduction: str, vocab: int = V) -> Arguments:
    def arguments(t: Make) -> tuple:
        targets = torch.empty(B, T, dtype=torch.int64, device="cuda")
        return t(B, T, vocab), targets, -100, reduction

    return arguments


def plain_cross_entropy_arguments(t: Make) -> tuple:
    return t(B * T, V), torch.empty(B * T, dtype=torch.int64, device="cuda")


def linear_cross_entropy_arguments(reduction: str, vocab: int = V) -> Arguments:
    def arguments(t: Make) -> tuple:
        targets = torch.empty(B, T, dtype=torch.int64, device="cuda")
        return t(B, T, H), t(vocab, H), targets, -100, reduction, None, None, None, True

    return arguments


def swiglu_arguments(t: Make) -> tuple:
    return t(B, T, INTERMEDIATE), t(B, T, INTERMEDIATE), False


def swiglu_halves(t: Make) -> tuple:
    return *t(B, T, 2 * INTERMEDIATE).chunk(2, -1), False


def mlp_arguments(t: Make) -> tuple:
    return t(B, T, H), t(INTERMEDIATE, H), t(INTERMEDIATE, H), t(H, INTERMEDIATE)


def adamw_step(p: torch.Tensor, grad: torch.Tensor, options: dict, tensors: dict) -> None:
    optimizer = TritonAdamW([p], **options)
    optimizer.param_groups[0].update(tensors)  # a constructor would look at their numbers
    p.grad = grad
    optimizer.step()


def adamw_arguments(**options) -> Arguments:
    return lambda t: (t(H, H), t(H, H), options, {})


def adamw_with_tensors(*names: str) -> Arguments:
    def arguments(t: Make) -> tuple:
        lr, beta1, beta2 = (torch.empty((), device="cuda") for _ in range(3))
        settings = {"lr": lr, "betas": (beta1, beta2)}
        return t(H, H), t(H, H), {}, {name: settings[name] for name in names}

    return arguments


def rope_arguments(n_heads: int = 32, n_kv_heads: int = 8, head_dim: int = 128) -> Arguments:
    def arguments(t: Make) -> tuple:
        q, k = (t(B, T, n, head_dim).transpose(1, 2) for n in (n_heads, n_kv_heads))
        return q, k, t(1, T, head_dim), t(1, T, head_dim)

    return arguments


def reverse_kl_arguments(reduction: str, vocab: int, masked: bool = False) -> Arguments:
    def arguments(t: Make) -> tuple:
        mask = torch.empty(B, T, dtype=torch.bool, device="cuda") if masked else None
        return t(B, T, vocab), t(B, T, vocab), mask, 1.0, reduction, None, True

    return arguments


def nf4_arguments(t: Make) -> tuple:
    def integers(n: int) -> torch.Tensor:
        return torch.empty(n, dtype=torch.uint8, device="cuda")

    def floats(n: int) -> torch.Tensor:
        return torch.empty(n, dtype=torch.float32, device="cuda")

    n_blocks = INTERMEDIATE * H // BLOCK
    codes, absmax_codes = integers(n_blocks * BLOCK // 2), integers(n_blocks)
    scales, mean, tables = floats(n_blocks // GROUP), floats(1), floats(N_VALUES + GROUP)
    return t(B, T, H), (INTERMEDIATE, H), codes, absmax_codes, scales, mean, tables


def lora_swiglu_arguments(rank: int) -> Arguments:
    def arguments(t: Make) -> tuple:
        gate, up = t(B, T, INTERMEDIATE), t(B, T, INTERMEDIATE)
        h, b_gate, b_up = t(B * T, 2 * rank), t(INTERMEDIATE, rank), t(INTERMEDIATE, rank)
        of_down = t(H, INTERMEDIATE), t(rank, INTERMEDIATE), t(H, rank)
        return gate, up, h, False, (1.0, 1.0, 1.0), None, b_gate, b_up, *of_down

    return arguments


def quantize_and_transpose(*parts: torch.Tensor) -> None:
    rows = quantize_rows(*parts)
    transpose_rows(rows)
    quantize_transposed(parts[0], scale=rows.scales.amax())


def fp8_arguments(*widths: int) -> Arguments:
    return lambda t: tuple(t(B * T, width) for width in widths)


def norm_arguments(hidden: int) -> Arguments:
    return lambda t: (t(B * T, hidden), t(hidden))


def swiglu_in_fp8(dy: torch.Tensor, gate_up: torch.Tensor) -> None:
    gate, up = gate_up.chunk(2, 1)
    swiglu_fp8(gate, up)
    swiglu_fp8_backward(dy, gate, up)


def norm_in_fp8(x: torch.Tensor, weight: torch.Tensor) -> None:
    rmsnorm_fp8(x, weight, 1e-5)


CASES = {  # by the names of kernel_facts.py's rows
    "rmsnorm": [
        Case("RMSNorm", TritonRMSNormFunction, rmsnorm_arguments(H)),
        Case("RMSNorm, frozen weight", TritonRMSNormFunction, rmsnorm_arguments(H), frozen=(1,)),
        *(
            Case(f"RMSNorm, H = {h:,}", TritonRMSNormFunction, rmsnorm_arguments(h), targets="sm_")
            for h in (2048, 8192)
        ),
        Case(
            "RMSNorm, H = 16,384",
            TritonRMSNormFunction,
            rmsnorm_arguments(16_384),
            dtypes=("bf16",),
            targets="sm_",
        ),
        *(
            Case(
                f"RMSNorm without weight, H = {h:,}",
                TritonRMSNormFunction,
                rmsnorm_arguments(h, affine=False),
            )
            for h in (2048, H, 8192, 16_384)
        ),
    ],
    "cross_entropy": [
        *(
            Case(
                f"cross-entropy, {reduction}",
                FusedCrossEntropyFunction,
                cross_entropy_arguments(reduction),
            )
            for reduction in ("mean", "sum", "none")
        ),
        *(
            Case(
                f"cross-entropy in place, V = {v:,}",
                InplaceCrossEntropyFunction,
                cross_entropy_arguments("mean", v),
            )
            for v in (V, 50_257, 32_000)
        ),
        Case(
            "cross-entropy, the plain form",
            PlainCrossEntropyFunction,
            plain_cross_entropy_arguments,
        ),
    ],
    "linear_cross_entropy": [
        Case(name, LinearCrossEntropyFunction, linear_cross_entropy_arguments(*arguments))
        for name, arguments in (
            ("linear + cross-entropy, mean", ("mean",)),
            ("linear + cross-entropy, none", ("none",)),
            ("linear + CE, V = 50,257", ("mean", 50_257)),
        )
    ],
    "swiglu": [
        Case("SwiGLU", TritonSwiGLUFunction, swiglu_arguments),
        Case("SwiGLU, halves of one tensor", TritonSwiGLUFunction, swiglu_halves),
        *(
            Case(
                f"SwiGLU with adapters, R = {rank}",
                LoRASwiGLUFunction,
                lora_swiglu_arguments(rank),
                dtypes=("bf16",),
            )
            for rank in (16, 64)
        ),
        Case("SwiGLU MLP", SwiGLUMLPFunction, mlp_arguments),
    ],
    "adamw": [
        Case("AdamW", adamw_step, adamw_arguments()),
        Case(
            "AdamW, stochastic",
            adamw_step,
            adamw_arguments(stochastic_rounding=True),
            dtypes=("bf16",),
        ),
        *(
            Case(
                f"AdamW, fp32 moments, stochastic: {rounding}",
                adamw_step,
                adamw_arguments(moments_dtype=torch.float32, stochastic_rounding=rounding),
                dtypes=("bf16",),
            )
            for rounding in (False, True)
        ),
        Case("AdamW, maximize", adamw_step, adamw_arguments(maximize=True)),
        Case("AdamW, lr in a tensor", adamw_step, adamw_with_tensors("lr")),
        Case("AdamW, lr and betas in tensors", adamw_step, adamw_with_tensors("lr", "betas")),
        Case(
            f"AdamW, {UNALIGNED}",
            adamw_step,
            lambda t: (t(H + 1), t(H + 1), {"stochastic_rounding": True}, {}),
        ),
    ],
    "rope": [
        Case("RoPE", TritonRoPEFunction, rope_arguments(), frozen=(2, 3)),
        *(
            Case(
                f"RoPE, {n} and {n_kv} heads of {d}",
                TritonRoPEFunction,
                rope_arguments(n, n_kv, d),
                frozen=(2, 3),
            )
            for n, n_kv, d in ((32, 32, 128), (128, 8, 128), (32, 32, 80))
        ),
    ],
    "reverse_kl": [
        Case(f"reverse KL, {name}", TritonReverseKLFunction, arguments, frozen=(1,))
        for name, arguments in (
            ("batchmean, V = 131,072", reverse_kl_arguments("batchmean", 131_072)),
            (
                "batchmean of a mask, V = 131,072",
                reverse_kl_arguments("batchmean", 131_072, masked=True),
            ),
            ("none, V = 131,072", reverse_kl_arguments("none", 131_072)),
            ("sum, V = 50,257", reverse_kl_arguments("sum", 50_257)),
            ("none, V = 50,257", reverse_kl_arguments("none", 50_257)),
        )
    ],
    "nf4": [Case("NF4", NF4LinearFunction, nf4_arguments, frozen=(4, 5, 6))],
    # e4m3 as NVIDIA has it: not gfx942
    "fp8": [
        Case(f"FP8, {name}", quantize_and_transpose, fp8_arguments(*widths), targets="sm_")
        for name, widths in (
            ("H = 576", (576,)),
            ("H = 4,096", (H,)),
            ("q, k, v", (H, H // 4, H // 4)),
            ("I = 14,336", (INTERMEDIATE,)),
            ("I = 28,672", (2 * INTERMEDIATE,)),
        )
    ],
    "fp8_casts": [
        *(
            Case(f"RMSNorm in FP8, H = {h:,}", norm_in_fp8, norm_arguments(h), targets="sm_")
            for h in (576, H, 8192, 16_384)
        ),
        *(
            Case(f"SwiGLU in FP8, I = {i:,}", swiglu_in_fp8, fp8_arguments(i, 2 * i), targets="sm_")
            for i in (1536, INTERMEDIATE)
        ),
    ],
}
