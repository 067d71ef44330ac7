"""What to keep for the backward, and what to compute again: a LLaMA layer around the kernels.

    q, k, v  = (RMSNorm(x) @ w.t() for w in (w_q, w_k, w_v))     norm_linear: x (..., H), w (O, H)
    gate, up = (RMSNorm(x) @ w.t() for w in (w_gate, w_up))      norm_linear again
    out      = (silu(gate) * up) @ w_down.t()                    swiglu_linear: gate, up (..., I),
                                                                 w_down (H, I)

No new kernel: the matrix products are PyTorch's, which run at the ceiling already, and the norm and
SwiGLU are those of rmsnorm_kernel.py and swiglu_kernel.py.  What is new is where one autograd
Function ends and the next begins.

A matrix product y @ w.t() needs y again in its backward, for dw = dout.t() @ y, so autograd keeps
y.  But to compute y = RMSNorm(x) again costs one pass over x, and x is kept anyway: it is the
residual.  So with silu(gate) * up.  A Function around norm and products keeps x alone.  Kept per
token and layer, bf16, in LLaMA 3.1 8B (H = 4,096), KiB:

    residual before attention and before the MLP                2 x 8    kept
    norm output, twice                                          2 x 8    computed again
    q, k, v after the rotary embedding;
        attention output                           8 + 2 + 2 + 8 = 20    kept
    gate and up                                                2 x 28    kept (a product each)
    silu(gate) * up                                                28    computed again
                                                            136 -> 92

The prediction for 32 layers and 8,192 tokens: 11.8 GB less, for 2 x 2 + 0 passes more: the backward
of SwiGLU has gate and up in registers when it computes their gradients, and writes silu(gate) * up
on the way.  Where there is memory to spare, keep_norm and keep_product keep the two instead: the
levels of recompute.py.

Two more things that autograd does, and a Function does better:

1. Several products share one input, so its gradient is a sum.  Autograd lets each product write its
   part and adds them up afterwards, at three passes per addition.  `addmm_` adds as the product
   stores its result: no pass of its own.
2. The residual has two users, the norm and the addition after it, so its gradient is a sum too.
   norm_linear returns x as its first result; the gradient of the branch around then arrives in the
   same backward.

Limits: those of the two kernels; no bias, no second derivative.
"""

import torch
from torch.nn.functional import linear

from next_steps.swiglu_kernel import (
    TritonSwiGLUFunction,
    may_overwrite_saved,
    swiglu_backward,
    swiglu_forward,
    swiglu_reference,
)
from rmsnorm_kernel import rmsnorm_backward, rmsnorm_forward, rmsnorm_reference


def norm_linear_reference(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *weights: torch.Tensor,
) -> list[torch.Tensor]:
    """Eager [x, y @ w.t(), ...] with y = RMSNorm(x) of x (..., H) and every w (O, H).

    float64 stays float64.
    """
    y = rmsnorm_reference(x, norm_weight, eps)
    return [x, *(linear(y, w) for w in weights)]


def swiglu_linear_reference(
    gate: torch.Tensor,
    up: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """Eager (silu(gate) * up) @ weight.t() of gate, up (..., I) and weight (O, I)."""
    return linear(swiglu_reference(gate, up), weight)


class NormLinearFunction(torch.autograd.Function):
    """`NormLinearFunction.apply(x, norm_weight, eps, keep, *weights)` -> x, and RMSNorm(x) @ w.t().

    One product for each of the weights.  x (..., H), norm_weight (H,), every w (O, H); the results
    are (..., H) and (..., O).  keep: RMSNorm(x) is kept for the backward, not computed again.
    """

    @staticmethod
    def forward(ctx, x, norm_weight, eps, keep, *weights):
        y, rstd = rmsnorm_forward(x, norm_weight, eps)  # (..., H), (N,) fp32
        ctx.eps = eps
        ctx.set_materialize_grads(False)  # None, not zeros, for a result that nobody used
        ctx.save_for_backward(x, norm_weight, rstd, y if keep else None, *weights)
        return x.view_as(x), *(linear(y, w) for w in weights)

    @staticmethod
    def backward(ctx, dresidual, *douts):
        _refuse_second_derivative()
        x, norm_weight, rstd, y, *weights = ctx.saved_tensors
        need_x, need_norm_weight, _, _, *need_weights = ctx.needs_input_grad
        used = [dout is not None for dout in douts]
        # (N, O)
        douts = [None if dout is None else dout.reshape(-1, dout.shape[-1]) for dout in douts]

        dweights = [None] * len(weights)
        if any(given and need for given, need in zip(used, need_weights)):
            if y is None:
                y = rmsnorm_forward(x, norm_weight, ctx.eps)[0]  # again
            y = y.view(-1, x.shape[-1])  # (N, H)
            # A loop: torch.compile cannot delete what a comprehension has seen.
            for i, need in enumerate(need_weights):
                if used[i] and need:
                    dweights[i] = douts[i].t() @ y
        del y
        if not (need_x or need_norm_weight) or not any(used):
            return dresidual, None, None, None, *dweights

        dy = None  # (N, H)
        for dout, weight in zip(douts, weights):
            if dout is not None:
                dy = dout @ weight if dy is None else dy.addmm_(dout, weight)
        dx, dnorm_weight = rmsnorm_backward(
            dy.view(x.shape),
            x,
            norm_weight,
            rstd,
            need_dweight=need_norm_weight,
        )
        if dresidual is not None:
            dx.add_(dresidual)
        return dx, dnorm_weight, None, None, *dweights


class SwiGLULinearFunction(torch.autograd.Function):
    """`SwiGLULinearFunction.apply(gate, up, weight)`: (silu(gate) * up) @ weight.t().

    gate, up (..., I), weight (O, I).  The backward overwrites gate and up: to be used nowhere
    else.  With retain_graph=True, or where one of them needs no gradient, it does not:
    gradients get memory of their own.
    """

    @staticmethod
    def forward(ctx, gate, up, weight):
        ctx.save_for_backward(gate, up, weight)
        return linear(swiglu_forward(gate, up), weight)

    @staticmethod
    def backward(ctx, dout):
        _refuse_second_derivative()
        gate, up, weight = ctx.saved_tensors
        *need_both, need_weight = ctx.needs_input_grad
        inplace = may_overwrite_saved() and all(need_both)
        dh = dout @ weight  # (..., I)
        dgate, dup, h = swiglu_backward(dh, gate, up, inplace=inplace, need_y=need_weight)
        dweight = None
        if need_weight:
            dweight = dout.reshape(-1, dout.shape[-1]).t() @ h.view(-1, h.shape[-1])
        return dgate, dup, dweight


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # create_graph=True
        asked = "which create_graph=True asks for"
        raise RuntimeError(f"The fused layer has no second derivative, {asked}.")


def norm_linear(
    x: torch.Tensor,
    norm: torch.nn.Module,
    *projections: torch.nn.Linear,
    keep_norm: bool = False,
) -> tuple[torch.Tensor, ...]:
    """x, and projection(norm(x)) for each of the projections.

    x (..., H); norm is a TritonRMSNorm or a LlamaRMSNorm; the projections have no bias.
    keep_norm: norm(x) is kept for the backward, not computed again.
    """
    weights = [projection.weight for projection in projections]
    return NormLinearFunction.apply(x, norm.weight, norm.variance_epsilon, keep_norm, *weights)


def swiglu_linear(
    gate: torch.Tensor,
    up: torch.Tensor,
    projection: torch.nn.Linear,
    keep_product: bool = False,
) -> torch.Tensor:
    """projection(silu(gate) * up) of gate, up (..., I); the projection has no bias.

    keep_product: silu(gate) * up is kept for the backward, by autograd, which needs it for the
    projection's weight.  Gate and up are overwritten in the backward all the same.
    """
    if keep_product:
        return linear(TritonSwiGLUFunction.apply(gate, up, True), projection.weight)
    return SwiGLULinearFunction.apply(gate, up, projection.weight)
