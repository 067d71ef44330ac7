"""What is compiled: for each kernel the ways to launch it, through the functions that users call.

The inputs are the subjects', in the shapes of LLaMA 3.1 8B.  So block sizes, number of warps and
specialization are those of a real run.
"""

from collections.abc import Callable
from functools import partial

import torch

from cross_entropy_kernel import (
    InplaceCrossEntropyFunction,
    PlainCrossEntropyFunction,
    TritonCrossEntropyLoss,
)
from harness.benchmark import benchmark_specs as specs
from judging.compile_targets import UNALIGNED
from judging.pretended_gpu import Case, Make, on_pretended_gpu
from next_steps.layers.llama_mlp import SwiGLUMLPFunction
from next_steps.lessons.adamw_optimizer import TritonAdamW
from next_steps.lessons.fp8_casts import rmsnorm_fp8, swiglu_fp8, swiglu_fp8_backward
from next_steps.lessons.fp8_kernel import quantize_rows, quantize_transposed, transpose_rows
from next_steps.lessons.linear_cross_entropy_kernel import TritonLinearCrossEntropyLoss
from next_steps.lessons.nf4_kernel import BLOCK, GROUP, N_VALUES, NF4LinearFunction
from next_steps.lessons.reverse_kl_kernel import TritonReverseKLLoss
from next_steps.lessons.rope_kernel import TritonRoPEFunction
from subjects import SUBJECTS
from subjects.lora_linear import lora_swiglu_inplace, make_both

B, T, H = 2, 2048, specs.LLAMA_HIDDEN
V, INTERMEDIATE = specs.LLAMA_VOCAB, specs.LLAMA_INTERMEDIATE


BF16 = {"dtypes": ("bf16",)}
NVIDIA = {"targets": "sm_"}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def case(name: str, subject: str, size: object, function=None, make=None, **options) -> Case:
    """Return the case of a subject's function, or of another one on the subject's inputs."""
    of, options = SUBJECTS[subject], {"needed": len(SUBJECTS[subject].differentiable)} | options

    def arguments(t: Make) -> tuple:
        inputs, _ = (make or of.make_plain or of.make)((B, T), size, t(0).dtype)
        return tuple(map(on_pretended_gpu, inputs.values()))

    return Case(name, function or of.function, arguments, **options)


def loss_in_place(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return InplaceCrossEntropyFunction.apply(logits, targets, -100, "mean")


def linear_loss(name: str, reduction: str, vocab: int = V) -> Case:
    loss = TritonLinearCrossEntropyLoss(reduction=reduction)
    return case(name, "linear_cross_entropy", (H, vocab), loss)


def adapted(rank: int) -> Case:
    make = partial(make_both, ranks=(rank, rank), rank_of_down=rank)
    how = (H, INTERMEDIATE), lora_swiglu_inplace, make
    return case(f"SwiGLU with adapters, R = {rank}", "lora_swiglu", *how, **BF16)


def adamw(name: str, *in_tensors: str, shape=(H, H), dtypes=Case.dtypes, **options) -> Case:
    """Return the case of a step; `in_tensors` names settings that are tensors."""

    def step(p: torch.Tensor, grad: torch.Tensor) -> None:
        tensors = {"lr": empty(()), "betas": (empty(()), empty(()))}
        optimizer = TritonAdamW([p], **options)
        # the constructor would read their numbers
        optimizer.param_groups[0].update({name: tensors[name] for name in in_tensors})
        p.grad = grad
        optimizer.step()

    return Case(f"AdamW{name}", step, lambda t: (t(*shape), t(*shape)), 0, dtypes)


def reverse_kl(name: str, reduction: str, vocab: int, make=None) -> Case:
    loss = TritonReverseKLLoss(reduction=reduction)
    return case(f"reverse KL, {name}, V = {vocab:,}", "reverse_kl", vocab, loss, make)


def nf4_arguments(t: Make) -> tuple:
    n_blocks = INTERMEDIATE * H // BLOCK
    integers = (empty(n, dtype=torch.uint8) for n in (n_blocks * BLOCK // 2, n_blocks))
    floats = (empty(n) for n in (n_blocks // GROUP, 1, N_VALUES + GROUP))
    return t(B, T, H), (INTERMEDIATE, H), *integers, *floats


def fp8(name: str, function: Callable, *widths: int) -> Case:
    return Case(name, function, lambda t: tuple(t(B * T, width) for width in widths), 0, **NVIDIA)


def quantize_and_transpose(*parts: torch.Tensor) -> None:
    rows = quantize_rows(*parts)
    transpose_rows(rows)
    quantize_transposed(parts[0], scale=rows.scales.amax())


def norm_in_fp8(x: torch.Tensor) -> None:
    rmsnorm_fp8(x, x.new_empty(x.shape[-1]), 1e-5)


def swiglu_in_fp8(dy: torch.Tensor, gate_up: torch.Tensor) -> None:
    gate, up = gate_up.chunk(2, 1)
    swiglu_fp8(gate, up)
    swiglu_fp8_backward(dy, gate, up)


CASE_SIZES = 2048, H, 8192, 16_384
LLAMA_HEADS = specs.Q_HEADS, specs.K_HEADS, specs.HEAD_DIM
BYTE_MOMENTS = {"moments_dtype": torch.uint8}
FP32_MOMENTS = BF16 | {"moments_dtype": torch.float32}
ROUNDED = {"stochastic_rounding": True}
CASES = {  # by the names of kernel_facts.py's rows
    "rmsnorm": [
        case("RMSNorm", "rmsnorm", H),
        case("RMSNorm, frozen weight", "rmsnorm", H, needed=1),
        case("RMSNorm, H = 2,048", "rmsnorm", 2048, **NVIDIA),
        case("RMSNorm, H = 8,192", "rmsnorm", 8192, **NVIDIA),
        case("RMSNorm, H = 16,384", "rmsnorm", 16_384, **NVIDIA, **BF16),
        *[
            case(f"RMSNorm without weight, H = {h:,}", "rmsnorm_without_weight", h)
            for h in CASE_SIZES
        ],
    ],
    "cross_entropy": [
        case("cross-entropy, mean", "cross_entropy", V),
        case("cross-entropy, sum", "cross_entropy", V, TritonCrossEntropyLoss(reduction="sum")),
        case("cross-entropy, none", "cross_entropy_rows", V),
        case("cross-entropy in place, V = 128,256", "cross_entropy", V, loss_in_place),
        case("cross-entropy in place, V = 50,257", "cross_entropy", 50_257, loss_in_place),
        case("cross-entropy in place, V = 32,000", "cross_entropy", 32_000, loss_in_place),
        Case(
            "cross-entropy, the plain form",
            PlainCrossEntropyFunction,
            lambda t: (t(B * T, V), empty(B * T, dtype=torch.int64)),
        ),
    ],
    "linear_cross_entropy": [
        linear_loss("linear + cross-entropy, mean", "mean"),
        linear_loss("linear + cross-entropy, none", "none"),
        linear_loss("linear + CE, V = 50,257", "mean", 50_257),
    ],
    "swiglu": [
        case("SwiGLU", "swiglu", INTERMEDIATE),
        Case(
            "SwiGLU, halves of one tensor",
            SUBJECTS["swiglu"].function,
            lambda t: t(B, T, 2 * INTERMEDIATE).chunk(2, -1),
        ),
        adapted(16),
        adapted(64),
        case("SwiGLU MLP", "swiglu_mlp", (H, INTERMEDIATE), SwiGLUMLPFunction),
    ],
    "adamw": [
        adamw(""),
        adamw(", stochastic", **ROUNDED, **BF16),
        adamw(", fp32 moments, stochastic: False", **FP32_MOMENTS),
        adamw(", fp32 moments, stochastic: True", **FP32_MOMENTS, **ROUNDED),
        adamw(", maximize", maximize=True),
        adamw(", lr in a tensor", "lr"),
        adamw(", lr and betas in tensors", "lr", "betas"),
        adamw(f", {UNALIGNED}", shape=(H + 1,), **ROUNDED),
    ],
    "adamw8": [
        adamw(", 8-bit moments, stochastic: False", **BYTE_MOMENTS),
        adamw(", 8-bit moments, stochastic: True", **BYTE_MOMENTS, **ROUNDED, **BF16),
        adamw(", 8-bit moments, lr and betas in tensors", "lr", "betas", **BYTE_MOMENTS, **BF16),
    ],
    "rope": [
        case("RoPE", "rope", LLAMA_HEADS, TritonRoPEFunction),
        case("RoPE, 32 and 32 heads of 128", "rope", (32, 32, 128), TritonRoPEFunction),
        case("RoPE, 128 and 8 heads of 128", "rope", (128, 8, 128), TritonRoPEFunction),
        case("RoPE, 32 and 32 heads of 80", "rope", (32, 32, 80), TritonRoPEFunction),
    ],
    "qk_norm_rope": [
        case("QK norm and RoPE, 32 and 8 heads, frozen", "qk_norm_rope", LLAMA_HEADS, needed=2),
        case("QK norm and RoPE, 32 and 8 heads", "qk_norm_rope", LLAMA_HEADS),
        case("QK norm and RoPE, 16 and 8 heads", "qk_norm_rope", (16, 8, 128)),
        case("QK norm and RoPE, 5 and 3 heads of 80", "qk_norm_rope", (5, 3, 80)),
        case("QK norm and RoPE, 8 and 4 heads of 256", "qk_norm_rope", (8, 4, 256)),
    ],
    "reverse_kl": [
        reverse_kl("batchmean", "batchmean", 131_072),
        reverse_kl("batchmean of a mask", "batchmean", 131_072, SUBJECTS["reverse_kl"].make),
        reverse_kl("none", "none", 131_072),
        reverse_kl("sum", "sum", 50_257),
        reverse_kl("none", "none", 50_257),
    ],
    "nf4": [Case("NF4", NF4LinearFunction, nf4_arguments, needed=1)],
    "fp8": [  # e4m3 as NVIDIA has it: not gfx942
        fp8("FP8, H = 576", quantize_and_transpose, 576),
        fp8("FP8, H = 4,096", quantize_and_transpose, H),
        fp8("FP8, q, k, v", quantize_and_transpose, H, H // 4, H // 4),
        fp8("FP8, I = 14,336", quantize_and_transpose, INTERMEDIATE),
        fp8("FP8, I = 28,672", quantize_and_transpose, 2 * INTERMEDIATE),
    ],
    "fp8_casts": [
        *[fp8(f"RMSNorm in FP8, H = {h:,}", norm_in_fp8, h) for h in (576, H, 8192, 16_384)],
        fp8("SwiGLU in FP8, I = 1,536", swiglu_in_fp8, 1536, 2 * 1536),
        fp8("SwiGLU in FP8, I = 14,336", swiglu_in_fp8, INTERMEDIATE, 2 * INTERMEDIATE),
    ],
}
