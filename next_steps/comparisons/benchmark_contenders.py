"""Who is timed: PyTorch in several forms, our kernels, and the host alone.

Other libraries: benchmark_peers.py.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import cross_entropy_kernel
from harness.benchmark import benchmark_specs as specs
from harness.benchmark.benchmarking import Implementation
from harness.cli.device import HAS_GPU
from next_steps.comparisons.benchmark_problems import ADAMW, TIMED_TORCH_DTYPES
from next_steps.lessons import fp8_casts, nf4_kernel
from next_steps.lessons.adamw_optimizer import TritonAdamW
from next_steps.lessons.fp8_kernel import Rows, quantize_rows, quantize_rows_reference
from next_steps.lessons.linear_cross_entropy_kernel import MAX_CHUNK, TritonLinearCrossEntropyLoss
from next_steps.lessons.nf4_kernel import NF4
from next_steps.lessons.qk_norm_rope_kernel import triton_qk_norm_rope
from next_steps.lessons.reverse_kl_kernel import ObviousReverseKLFunction, TritonReverseKLLoss
from next_steps.lessons.rope_kernel import triton_apply_rotary_pos_emb
from next_steps.lessons.swiglu_kernel import (
    TritonSwiGLU,
    swiglu_backward,
    swiglu_forward,
    swiglu_reference,
)
from rmsnorm_kernel import TritonRMSNormFunction, rmsnorm_reference
from subjects import cross_entropy, linear_cross_entropy, rmsnorm
from subjects.qk_norm_rope import EPS as QWEN3_EPS
from subjects.rmsnorm import EPS


@dataclass(frozen=True)
class Contenders:
    """One kernel's implementations, without the other libraries."""

    pytorch: list[Implementation]  # the first one judges ours, and torch.compile compiles it
    ours: list[Implementation]
    nothing: Callable | None = None  # the host alone, where its time can exceed the GPU's
    compile_pytorch: bool = True
    compile_ours: bool = False  # the first one of ours
    donate: bool = False  # see compile_function


def nothing(results: Callable, gradients: Callable) -> Callable:
    """Return a function that allocates what ours return, and launches no kernel: the host alone.

    Args:
        results: (inputs) -> empty results, and what is saved for the backward.
        gradients: (saved, gradients of the results) -> empty gradients of the inputs.
    """

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            outputs, saved = results(*inputs)
            ctx.save_for_backward(*saved)
            return outputs

        @staticmethod
        def backward(ctx, *upstream):
            return gradients(ctx.saved_tensors, *upstream)

    return Nothing.apply


def empty_as(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.empty_like, tensors))


def empty_loss(logits: torch.Tensor, other: torch.Tensor) -> tuple:
    return torch.empty((), dtype=torch.float32, device=logits.device), [logits]


NOTHING = nothing(
    lambda *inputs: (*empty_as(inputs[0]), inputs), lambda saved, dy: empty_as(*saved)
)
NO_LOSS = nothing(empty_loss, lambda saved, upstream: (*empty_as(*saved), None))


def rmsnorm_contenders(dtype: str) -> Contenders:
    pytorch = Implementation("F.rms_norm", lambda x, w: F.rms_norm(x, w.shape, w, EPS))
    ours = Implementation(specs.OURS, rmsnorm.norm)
    eager = Implementation(specs.EAGER, rmsnorm.reference)
    return Contenders([eager, pytorch], [ours], NOTHING, compile_ours=True)


def cross_entropy_contenders(dtype: str) -> Contenders:
    loss = cross_entropy_kernel.TritonCrossEntropyLoss
    pytorch = [
        Implementation(specs.EAGER, cross_entropy.eager("mean")),
        Implementation(f"F.cross_entropy, {dtype} logits", F.cross_entropy),
    ]
    ours = [
        Implementation(specs.OURS, loss()),
        Implementation(specs.IN_PLACE, loss(inplace=True), backward_again=False),
        Implementation(specs.PLAIN_FORM, cross_entropy_kernel.PlainCrossEntropyFunction.apply),
    ]
    return Contenders(pytorch, ours, NO_LOSS, compile_ours=True)


def swiglu_contenders(dtype: str) -> Contenders:
    ours = [
        Implementation(specs.OURS, TritonSwiGLU()),
        Implementation(specs.IN_PLACE, TritonSwiGLU(inplace=True), backward_again=False),
    ]
    return Contenders([Implementation(specs.EAGER, swiglu_reference)], ours, NOTHING)


def rope_contenders(dtype: str) -> Contenders:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    eager = Implementation(specs.EAGER, apply_rotary_pos_emb)
    ours = Implementation(specs.OURS, triton_apply_rotary_pos_emb)
    host = nothing(
        lambda q, k, *angles: (empty_as(q, k), angles),
        lambda saved, *upstream: (*empty_as(*upstream), None, None),
    )
    return Contenders([eager], [ours], host)


def norm_then_rope(norm: Callable, rope: Callable) -> Callable:
    """Return Qwen3's order of calls: it normalizes tokens before heads, and rotates the view."""

    def call(q, k, q_weight, k_weight, cos, sin):
        pairs = (q, q_weight), (k, k_weight)
        q, k = (norm(x.transpose(1, 2), weight).transpose(1, 2) for x, weight in pairs)
        return rope(q, k, cos, sin)

    return call


def qk_norm_rope_contenders(dtype: str) -> Contenders:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    def eager_norm(x, weight):
        return rmsnorm_reference(x, weight, QWEN3_EPS)

    def torch_norm(x, weight):
        return F.rms_norm(x, weight.shape, weight, QWEN3_EPS)

    def our_norm(x, weight):
        return TritonRMSNormFunction.apply(x, weight, QWEN3_EPS)

    def fused(q, k, q_weight, k_weight, cos, sin):
        return triton_qk_norm_rope(q, k, q_weight, k_weight, QWEN3_EPS, cos, sin)

    apart = norm_then_rope(our_norm, triton_apply_rotary_pos_emb)
    pytorch = [
        Implementation(specs.EAGER, norm_then_rope(eager_norm, apply_rotary_pos_emb)),
        Implementation("F.rms_norm, RoPE", norm_then_rope(torch_norm, apply_rotary_pos_emb)),
    ]
    ours = [Implementation(specs.OURS, fused), Implementation(specs.NORM_APART, apart)]
    host = nothing(
        lambda q, k, *others: (empty_as(q, k), (q, k, *others)),
        lambda saved, *upstream: (*empty_as(*saved[:-2]), None, None),
    )
    return Contenders(pytorch, ours, host)


def adamw_contenders(dtype: str) -> Contenders:
    torch_adamw = functools.partial(torch.optim.AdamW, **ADAMW)
    ours = [Implementation(specs.OURS, functools.partial(TritonAdamW, **ADAMW))]
    if dtype == "bf16":
        rounded = functools.partial(TritonAdamW, **ADAMW, stochastic_rounding=True)
        ours.append(Implementation(f"{specs.OURS}, stochastic rounding", rounded))
    # On a GPU the default is foreach=True. waits: without capturable=True none of them can be
    # recorded as a CUDA graph, not even the fused one, which does not wait.
    fused = functools.partial(torch_adamw, fused=True)
    pytorch = [
        Implementation("torch.optim.AdamW", torch_adamw, waits=True),
        Implementation("torch.optim.AdamW, fused=True", fused, waits=True),
    ]
    return Contenders(pytorch, ours, compile_pytorch=False)


def adamw8_contenders(dtype: str) -> Contenders:
    ours = functools.partial(TritonAdamW, **ADAMW, moments_dtype=torch.uint8)
    rounded = functools.partial(ours, stochastic_rounding=True)
    fused = functools.partial(torch.optim.AdamW, **ADAMW, fused=True)
    pytorch = [Implementation("torch.optim.AdamW, fused=True", fused, waits=True)]
    found = [
        Implementation(specs.OURS, ours),
        Implementation(f"{specs.OURS}, stochastic rounding", rounded),
        Implementation(specs.WIDE_MOMENTS, functools.partial(TritonAdamW, **ADAMW)),
    ]
    return Contenders(pytorch, found, compile_pytorch=False)


def linear_cross_entropy_contenders(dtype: str) -> Contenders:
    def after_linear(loss: Callable) -> Callable:
        return lambda hidden, weight, targets: loss(F.linear(hidden, weight), targets)

    name = f"F.linear + F.cross_entropy, {dtype} logits"
    pytorch = [
        Implementation(specs.EAGER, linear_cross_entropy.eager_loss),
        Implementation(name, after_linear(F.cross_entropy)),
    ]
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        chunked = functools.partial(F.linear_cross_entropy, options=options)
        name = "F.linear_cross_entropy, chunked"
        pytorch.append(Implementation(name, chunked, backward_again=False))
    # A second backward of one forward would compute the logits again.
    ours = [
        Implementation(name, TritonLinearCrossEntropyLoss(chunk_size=size), backward_again=False)
        for name, size in ((specs.OURS, None), (specs.ONE_CHUNK, MAX_CHUNK))
    ]
    return Contenders(pytorch, ours, donate=True)


def eager_reverse_kl(
    student: torch.Tensor, teacher: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    log_p, log_q = (F.log_softmax(logits.to(dtype), -1) for logits in (student, teacher))
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def reverse_kl_contenders(dtype: str) -> Contenders:
    eager = [Implementation("F.kl_div in fp32", eager_reverse_kl)]
    if dtype != "fp32":
        in_dtype = functools.partial(eager_reverse_kl, dtype=TIMED_TORCH_DTYPES[dtype])
        eager.append(Implementation(f"F.kl_div in {dtype}", in_dtype))
    one_tile = Implementation(specs.ONE_TILE, ObviousReverseKLFunction.apply)
    two_kernels = TritonReverseKLLoss(reduction="none")  # a grad_output for each row
    ours = [
        # A second backward would compute the gradient again.
        Implementation(specs.OURS, TritonReverseKLLoss(), backward_again=False),
        Implementation(specs.TWO_KERNELS, lambda *logits: two_kernels(*logits).mean()),
    ]
    return Contenders([*eager, one_tile], ours, NO_LOSS, donate=True)


def nf4_contenders(dtype: str) -> Contenders:
    def of_tensors(dequantize: Callable) -> Callable:
        """Take the problem's inputs: NF4's tensors, and the weight with its shape and dtype."""
        return lambda *inputs: dequantize(NF4(*inputs[:-1]), inputs[-1].shape, inputs[-1].dtype)

    formula = Implementation(specs.FORMULA, of_tensors(nf4_kernel.nf4_dequantize_reference))
    ours = Implementation(specs.OURS, of_tensors(nf4_kernel.nf4_dequantize))
    return Contenders([formula], [ours])


def fp8_contenders(dtype: str) -> Contenders:
    formula = Implementation(specs.FORMULA, quantize_rows_reference)
    return Contenders([formula], [Implementation(specs.OURS, quantize_rows)])


def fp8_casts_contenders(dtype: str) -> Contenders:
    def both(name: str, forward: Callable, backward: Callable) -> Implementation:
        """Take the problem's inputs: dy, and gate and up in one matrix."""

        def call(dy: torch.Tensor, gate_up: torch.Tensor) -> tuple[Rows, ...]:
            gate, up = gate_up.chunk(2, 1)
            return forward(gate, up), *backward(dy, gate, up)

        return Implementation(name, call)

    def separate_forward(gate: torch.Tensor, up: torch.Tensor) -> Rows:
        return quantize_rows(swiglu_forward(gate, up))

    def separate_backward(
        dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[Rows, ...]:
        dgate, dup, y = swiglu_backward(dy, gate, up, need_y=True)
        return quantize_rows(dgate, dup), quantize_rows(y)

    references = fp8_casts.swiglu_fp8_reference, fp8_casts.swiglu_fp8_backward_reference
    formula = both(specs.FORMULA, *references)
    ours = both(specs.OURS, fp8_casts.swiglu_fp8, fp8_casts.swiglu_fp8_backward)
    separate = both(specs.SEPARATE, separate_forward, separate_backward)
    return Contenders([formula], [ours, separate])


CONTENDERS: dict[str, Callable[[str], Contenders]] = {
    "rmsnorm": rmsnorm_contenders,
    "cross_entropy": cross_entropy_contenders,
    "swiglu": swiglu_contenders,
    "rope": rope_contenders,
    "qk_norm_rope": qk_norm_rope_contenders,
    "adamw": adamw_contenders,
    "adamw8": adamw8_contenders,
    "linear_cross_entropy": linear_cross_entropy_contenders,
    "reverse_kl": reverse_kl_contenders,
    "nf4": nf4_contenders,
    "fp8": fp8_contenders,
    "fp8_casts": fp8_casts_contenders,
}


def implementations(kernel: str, dtype: str, peers: list[Implementation]) -> list[Implementation]:
    """Return the implementations in the order of the table's rows, anew for each size."""
    own = CONTENDERS[kernel](dtype)
    compiled, ours = [], own.ours
    if HAS_GPU and own.compile_pytorch:
        torch.compiler.reset()  # it gives up after eight shapes, so it forgets the earlier ones
        function = compile_function(own.pytorch[0].function, own.donate)
        compiled = [Implementation(specs.COMPILED, function, backward_again=not own.donate)]
        if own.compile_ours:
            function = compile_function(ours[0].function)
            ours = [*ours, Implementation(f"{specs.OURS} under torch.compile", function)]
    floor = [Implementation(specs.HOST_FLOOR, own.nothing)] if own.nothing else []
    return [*own.pytorch, *compiled, *peers, *ours, *floor]


def compile_function(function: Callable, donate: bool = False) -> Callable:
    """Compile the whole function for one shape, or raise."""
    import torch._functorch.config

    # Donation lets a compiled backward reuse the memory of what the forward saved. Without donation
    # the backward can run more than once, so it can be timed alone. But where the logits are saved,
    # it takes twice as much memory.
    torch._functorch.config.donated_buffer = donate
    return torch.compile(function, dynamic=False, fullgraph=True)
