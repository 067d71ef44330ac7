"""What to keep for the backward, and what to compute again: a LLaMA layer around the kernels.

    q, k, v  = (RMSNorm(x) @ w.t() for w in (w_q, w_k, w_v))     norm_linear: x (..., H), w (O, H)
    gate, up = (RMSNorm(x) @ w.t() for w in (w_gate, w_up))      norm_linear again
    out      = (silu(gate) * up) @ w_down.t()                    swiglu_linear: gate, up (..., I),
                                                                 w_down (H, I)

No new kernel: the matrix products are PyTorch's, which run at the ceiling already, and the norm and
SwiGLU are those of rmsnorm_kernel.py and swiglu_kernel.py.  What is new is where one autograd
Function ends and the next begins.

A matrix product y @ w.t() needs y again in its backward, for dw = dout.t() @ y, so autograd keeps
y.  But computing y = RMSNorm(x) again costs one pass over x, and x is kept anyway as the residual.
The same holds for silu(gate) * up, which the backward of SwiGLU writes on the way.  A Function
around norm and products keeps x alone: per token and layer of LLaMA 3.1 8B 92 KiB in bf16, where
autograd keeps 136.  The prediction for 32 layers and 8,192 tokens: 11.8 GB less, for 2 x 2 + 0
passes more.  docs/fused_layer.md has the count.  Where there is memory to spare, keep_norm and
keep_product keep the two instead: the levels of recompute.py.

Two more things that autograd does, and a Function does better:

1. Several products share one input, so its gradient is a sum.  Autograd adds their parts up
   afterwards, at three passes per addition.  `addmm_` adds as the product stores its result.
2. The residual has two users, the norm and the addition after it, so its gradient is a sum too.
   norm_linear returns x as its first result.  So the gradient of the branch around the norm arrives
   in the same backward.

A projection may have a bias, a LoRA adapter or a quantized weight.  The products are
lora_linear.py's, which are plain products where a projection has none of these.

Limits: those of the two kernels; no second derivative.
"""

import torch
from torch.nn.functional import linear

from kernel_support import outside_autocast, refuse_second_derivative
from next_steps.layers import lora_linear as lora
from next_steps.layers.lora_linear import as_matrix
from next_steps.layers.lora_swiglu import LARGEST_RANK, lora_swiglu_backward, lora_swiglu_forward
from next_steps.lessons import swiglu_kernel as swiglu
from rmsnorm_kernel import rmsnorm_backward, rmsnorm_forward, rmsnorm_reference


def norm_linear_reference(x, norm_weight, eps, *weights):
    """Return eager [x, y @ w.t(), ...] with y = RMSNorm(x) of x (..., H) and every w (O, H)."""
    y = rmsnorm_reference(x, norm_weight, eps)
    return [x, *(linear(y, w) for w in weights)]


def swiglu_linear_reference(gate, up, weight):
    """Return eager (silu(gate) * up) @ weight.t() of gate, up (..., I) and weight (O, I)."""
    return linear(swiglu.swiglu_reference(gate, up), weight)


class NormLinearFunction(torch.autograd.Function):
    """`.apply(x, norm_weight, eps, keep, add, scales, bases, *tensors)`: norm and projections.

    Returns x (..., H), and each projection (..., O) of RMSNorm(x).  norm_weight is (H,), and
    lora_linear.py says what scales, bases and tensors are.  keep: keep RMSNorm(x) for the backward,
    instead of computing it again.  Without `add` the adapters are not added, every projection has
    one, and the last result is h.
    """

    @staticmethod
    def forward(ctx, x, norm_weight, eps, keep, add, scales, bases, *tensors):
        y, rstd = rmsnorm_forward(x, norm_weight, eps)  # (..., H), (N,) fp32
        outs, h, stacked = lora.products(y, scales, bases, tensors, add)
        ctx.eps, ctx.add, ctx.scales, ctx.bases = eps, add, scales, bases
        ctx.set_materialize_grads(False)  # None, not zeros, for a result that nobody used
        weights, b = tensors[::4], tensors[2::4]
        y = y if keep else None
        ctx.save_for_backward(x, norm_weight, rstd, y, h, stacked, *weights, *b)
        return x.view_as(x), *outs, *(() if add else (h,))

    @staticmethod
    @outside_autocast
    def backward(ctx, dresidual, *douts):
        refuse_second_derivative("The fused layer")
        dh = None
        if not ctx.add:
            *douts, dh = douts
        x, norm_weight, rstd, y, h, stacked, *others = ctx.saved_tensors
        weights, b = others[: len(douts)], others[len(douts) :]
        need_x, need_norm_weight, _, _, _, _, _, *needed = ctx.needs_input_grad
        if not ctx.add:  # who adds h @ b.t() has b's gradients
            needed[2::4] = [False] * len(douts)
        if all(dout is None for dout in douts):
            return dresidual, *[None] * (6 + len(needed))

        douts = [None if dout is None else as_matrix(dout) for dout in douts]  # (N, O)
        need_dy = need_x or need_norm_weight
        if ctx.add and (need_dy or any(needed[1::4])):
            dh = lora.thin_gradient(douts, h, ctx.scales, b)
        if lora.needs_input(douts, needed):
            if y is None:
                y = rmsnorm_forward(x, norm_weight, ctx.eps)[0]  # again
            y = as_matrix(y)  # (N, H)
        gradients = lora.parameter_gradients(y, douts, h, dh, ctx.scales, b, needed)
        del y
        if not need_dy:
            return *[None] * 7, *gradients

        dy = lora.input_gradient(douts, dh, stacked, ctx.bases, weights)  # (N, H)
        dy = dy.view(x.shape)
        dx, dnorm_weight = rmsnorm_backward(dy, x, norm_weight, rstd, need_norm_weight)
        if dresidual is not None:
            dx.add_(dresidual)
        return dx, dnorm_weight, None, None, None, None, None, *gradients


class SwiGLULinearFunction(torch.autograd.Function):
    """`.apply(gate, up, h, keep, scales, base, b_gate, b_up, *tensors)`: SwiGLU and a projection.

    Returns (..., O) of gate and up (..., I).  The tensors are w (O, I), a (R, I), b (O, R) and
    bias (O,) of the projection, or None; the projection has base or w.  If gate and up lack their
    adapters, h is (N, both R), and b_gate and b_up are (I, R); these three are None otherwise.
    scales: of gate, up and the projection.
    keep: keep SwiGLU's result for the backward, instead of computing it again.  The backward
    overwrites gate and up: use them nowhere else.  With retain_graph=True, or where one of them
    needs no gradient, gradients get memory of their own.
    """

    @staticmethod
    def forward(ctx, gate, up, h, keep, scales, base, b_gate, b_up, w, a, b, bias):
        if h is None:
            y = swiglu.swiglu_forward(gate, up)
        else:
            y = lora_swiglu_forward(gate, up, h, scales[:2], b_gate, b_up)
        (out,), h_down, _ = lora.products(y, scales[2:], (base,), (w, a, b, bias))
        ctx.scales, ctx.base = scales, base
        y = y if keep else None
        ctx.save_for_backward(gate, up, y, h, b_gate, b_up, h_down, w, a, b)
        return out

    @staticmethod
    @outside_autocast
    def backward(ctx, dout):
        refuse_second_derivative("The fused layer")
        gate, up, y, h, b_gate, b_up, h_down, w, a, b = ctx.saved_tensors
        need_gate, need_up, need_h, _, _, _, need_b_gate, need_b_up, *needed = ctx.needs_input_grad
        scales, last_scale = ctx.scales[:2], ctx.scales[2:]
        dout = [as_matrix(dout)]  # (N, O)
        dh_down = lora.thin_gradient(dout, h_down, last_scale, [b])
        need_y = lora.needs_input(dout, needed)
        options = {
            "inplace": swiglu.may_overwrite_saved() and need_gate and need_up,
            "need_y": need_y and y is None,
        }
        if h is None:
            dy = lora.input_gradient(dout, dh_down, a, [ctx.base], [w])  # (N, I)
            dgate, dup, again = swiglu.swiglu_backward(dy.view(gate.shape), gate, up, **options)
        else:  # the kernel adds the adapter to dy
            dy = lora.input_gradient(dout, None, None, [ctx.base], [w]).view(gate.shape)
            dgate, dup, again = lora_swiglu_backward(
                dy, gate, up, h, scales, b_gate, b_up, dh_down, a, **options
            )
        y = as_matrix(again if y is None else y) if need_y else None
        gradients = lora.parameter_gradients(y, dout, h_down, dh_down, last_scale, [b], needed)

        douts, bs = [as_matrix(dgate), as_matrix(dup)], (b_gate, b_up)
        needed_b = (False, False, need_b_gate, False) + (False, False, need_b_up, False)
        of_b = lora.parameter_gradients(None, douts, h, None, scales, bs, needed_b)[2::4]
        dh = lora.thin_gradient(douts, h, scales, bs) if need_h else None
        return dgate, dup, dh, None, None, None, *of_b, *gradients


def norm_linear(x, norm, *projections, keep_norm=False):
    """Return x (..., H), and projection(norm(x)) for each of the projections.

    norm is a TritonRMSNorm or a LlamaRMSNorm.  `is_product` of lora_linear.py says what the
    projections may be.  keep_norm: keep norm(x) for the backward, instead of computing it again.
    """
    scales, bases, tensors = lora.arguments(projections)
    return NormLinearFunction.apply(
        x, norm.weight, norm.variance_epsilon, keep_norm, True, scales, bases, *tensors
    )


def swiglu_linear(gate, up, projection, keep_product=False):
    """Return projection(silu(gate) * up) of gate, up (..., I); the projection is as in norm_linear.

    keep_product: autograd keeps silu(gate) * up for the gradient of the projection's weight.  The
    backward still overwrites gate and up.
    """
    if keep_product:  # a layer that runs twice stops before the projection
        (out,) = lora.lora_linear(swiglu.TritonSwiGLUFunction.apply(gate, up, True), projection)
        return out
    (scale,), (base,), tensors = lora.arguments([projection])
    scales = None, None, scale
    return SwiGLULinearFunction.apply(gate, up, None, False, scales, base, None, None, *tensors)


def norm_mlp(x, norm, gate_proj, up_proj, down_proj, keep_norm=False, keep_product=False):
    """Return x, and down_proj(silu(gate_proj(y)) * up_proj(y)) with y = norm(x), both (..., H).

    norm_linear and swiglu_linear say what the arguments are.  Where all three projections have
    adapters, the kernels of lora_swiglu.py add them.  In fp32 these kernels are not used, because
    the GPU multiplies fp32 on no matrix unit.
    """
    scales, bases, tensors = lora.arguments([gate_proj, up_proj, down_proj])
    ranks = [LARGEST_RANK + 1 if a is None else a.shape[0] for a in tensors[1::4]]
    if x.dtype == torch.float32 or max(ranks) > LARGEST_RANK:
        residual, gate, up = norm_linear(x, norm, gate_proj, up_proj, keep_norm=keep_norm)
        return residual, swiglu_linear(gate, up, down_proj, keep_product)
    residual, gate, up, h = NormLinearFunction.apply(
        x, norm.weight, norm.variance_epsilon, keep_norm, False, scales[:2], bases[:2], *tensors[:8]
    )
    b_gate, b_up, *of_down = tensors[2], tensors[6], *tensors[8:]
    out = SwiGLULinearFunction.apply(
        gate, up, h, keep_product, scales, bases[2], b_gate, b_up, *of_down
    )
    return residual, out
