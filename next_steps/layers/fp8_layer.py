"""FP8 in a LLaMA layer: the seven projections multiply numbers of 8 bits, forward and backward.

    q, k, v = (RMSNorm(x) @ w.t() for w in (w_q, w_k, w_v))           NormFP8LinearFunction
    out     = x @ w_o.t()                                             FP8LinearFunction
    out     = (silu(gate) * up) @ w_down.t()                          FP8MLPFunction
              with gate, up = (RMSNorm(x) @ w.t() for w in (w_gate, w_up))

Both factors of a product are rounded to e4m3, with a scale for each row: fp8_kernel.py.  FP8
multiplies at twice the rate of bf16, but the passes that round can cost all that is gained.  So the
question of fused_layer.py returns: where does one autograd Function end and the next begin?

1. The kernel that makes a tensor rounds it.  The norm, SwiGLU and its backward hold whole rows, and
   write codes: fp8_casts.py.  For that the MLP is one Function from its norm to its last product:
   the gradients of gate and up pass from one product to the next in FP8 alone.
2. Projections that share an input are one product.  Their weights' codes lie one below the other,
   (sum of O, I), and their gradients side by side, (N, sum of O).  Then the input's gradient needs
   no sum, and the weights' gradients are the rows of one product.
3. The three products of a projection sum over different sides, and Hopper wants each factor to lie
   along the side that is summed:

       out = x @ w.t()       x (N, I), w (O, I)                as they are rounded
       dx  = dout @ w        dout (N, O) as it is rounded, w turned into (I, O)
       dw  = dout.t() @ x    both turned: (O, N), (I, N)

Only the weights' largest scale is kept in FP8 from forward to backward.  With it
`quantize_transposed` rounds and turns the weights in one pass.  Each norm's and o's x is kept in
bf16, and so are gate and up: what fused_layer.py keeps at the level mlp of recompute.py.

The weights' gradients sum over the tokens.  If these are no multiple of 16, the gradients are made
by products of the bf16 tensors, as without FP8.

`Casts.kept` keeps the weights' codes from one micro-batch to the next: two bytes for each number.

All other parts of the model, its weights, their gradients and the optimizer stay in bf16.

Limits: a bias at q, k and v alone, no adapter, no quantized weight, O and I multiples of 16; no
second derivative.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernel_support import outside_autocast, refuse_second_derivative
from next_steps.layers.lora_linear import as_matrix
from next_steps.lessons.fp8_casts import rmsnorm_fp8, swiglu_fp8, swiglu_fp8_backward
from next_steps.lessons.fp8_kernel import (
    Rows,
    fp8_product,
    quantize_rows,
    quantize_stacked,
    quantize_transposed,
    takes_fp8,
    transpose_rows,
)
from next_steps.lessons.swiglu_kernel import swiglu_backward
from rmsnorm_kernel import rmsnorm_backward, rmsnorm_forward

QKV, O, GATE_UP, DOWN = "qkv", "o", "gate, up", "down"  # projections that share an input


class Casts(NamedTuple):
    """How a layer rounds to FP8."""

    kept: dict[str, Rows] | None = None  # the weights' codes, until a step ends; None: none is kept

    def once(self, name: str, make: Callable[[], Rows]) -> Rows:
        """Return what `make` returns, or what it returned before if that is kept."""
        if self.kept is None:
            return make()
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]


# ---- The products
#
# Projections share x (N, I).  Their weights (O, I) lie one below the other, their results and the
# results' gradients side by side: (N, sum of O).  `scale` () is the largest of the weights' scales.
# `name` is what a layer calls these projections.


def results(x, weights, casts, name):
    """Return x @ w.t() of Rows x (N, I), for all of the weights: (N, sum of O); and scale."""
    rows = casts.once(name, lambda: quantize_stacked(*weights))  # (sum of O, I)
    return fp8_product(x, rows, weights[0].dtype), rows.scales.amax()


def bias_gradients(douts, needed):
    """Return the sum (O,) over the rows of each dout (N, O), or None; not of rounded numbers."""
    return [dout.sum(0) if need else None for dout, need in zip(douts, needed)]


def fp8_input_gradient(dout, weights, scale, casts, name):
    """Return dx (N, I), the sum over all of the weights, of Rows dout (N, sum of O)."""
    turned = casts.once(  # (I, sum of O)
        f"{name}, turned", lambda: quantize_transposed(*weights, scale=scale)
    )
    return fp8_product(dout, turned, weights[0].dtype)


def weight_gradients(dout, x, weights, needed):
    """Return dw (O, I), or None, of each weight; of Rows dout (N, sum of O) and x (N, I).

    If x was not rounded, it is a tensor, and dout is a list of tensors (N, O).
    """
    if not isinstance(x, Rows):
        return [part.t() @ x if need else None for part, need in zip(dout, needed)]
    dout, x = transpose_rows(dout), transpose_rows(x)  # (sum of O, N), (I, N)
    dtype, sizes = weights[0].dtype, [len(weight) for weight in weights]
    if all(needed):
        return list(fp8_product(dout, x, dtype).split(sizes))
    of_each = zip(dout.codes.split(sizes), dout.scales.split(sizes), needed)
    return [
        fp8_product(Rows(codes, scales), x, dtype) if need else None
        for codes, scales, need in of_each
    ]


def norm_gradients(dout, douts, dresidual, ctx, x, norm_weight, rstd, scale, weights, name, needed):
    """Return dx (..., H), dnorm_weight (H,) and dw (O, H) of each weight, or None: see `needed`.

    A norm and projections have made their results of x (..., H).

    Args:
        dout: Rows (N, sum of O), the results' gradients; None if only `douts` are needed.
        douts: each gradient (N, O), not rounded; None: the weights' gradients are made of FP8.
        dresidual: (..., H), the gradient of the residual, or None.
        needed: a bool for each gradient that is returned, in the same order.
    """
    need_x, need_norm_weight, *need_weights = needed
    rows = as_matrix(x)  # (N, H)
    gradients = [None] * len(weights)
    if any(need_weights):
        norm, of_results = (rmsnorm_fp8, dout) if douts is None else (rmsnorm_forward, douts)
        y, _ = norm(rows, norm_weight, ctx.eps)  # again
        gradients = weight_gradients(of_results, y, weights, need_weights)
    if not (need_x or need_norm_weight):
        return [None, None, *gradients]

    dy = fp8_input_gradient(dout, weights, scale, ctx.casts, name)  # (N, H)
    dx, dnorm_weight = rmsnorm_backward(dy.view(x.shape), x, norm_weight, rstd, need_norm_weight)
    if dresidual is not None:
        dx.add_(dresidual)
    return [dx, dnorm_weight, *gradients]


class NormFP8LinearFunction(torch.autograd.Function):
    """`.apply(x, norm_weight, eps, casts, *tensors)`: x, and RMSNorm(x) @ w.t() + bias for each w.

    x (..., H), norm_weight (H,).  The tensors are w (O, H) and bias (O,), or None, of one
    projection after the other; all have a bias or none has.  The results are (..., H) and (..., O).
    The latter are columns of one matrix.
    """

    @staticmethod
    def forward(ctx, x, norm_weight, eps, casts, *tensors):
        weights, biases = tensors[::2], tensors[1::2]
        y, rstd = rmsnorm_fp8(as_matrix(x), norm_weight, eps)  # (N, H), (N,) fp32
        out, scale = results(y, weights, casts, QKV)
        if biases[0] is not None:
            out += torch.cat(biases)
        out = out.view(*x.shape[:-1], -1)
        ctx.eps, ctx.casts = eps, casts
        ctx.set_materialize_grads(False)  # None, not zeros, for a result that nobody used
        ctx.save_for_backward(x, norm_weight, rstd, scale, *weights)
        return x.view_as(x), *out.split([len(weight) for weight in weights], dim=-1)

    @staticmethod
    @outside_autocast
    def backward(ctx, dresidual, *douts):
        refuse_second_derivative("FP8 in the layer")
        x, norm_weight, rstd, scale, *weights = ctx.saved_tensors
        need_x, need_norm_weight, _, _, *needed = ctx.needs_input_grad
        need_weights, need_biases = needed[::2], needed[1::2]
        gradients = [None] * len(needed)
        used = [i for i, dout in enumerate(douts) if dout is not None]
        name = QKV if len(used) == len(douts) else f"{QKV} {used}"
        if not used:
            return dresidual, None, None, None, *gradients

        douts = [as_matrix(douts[i]) for i in used]  # (N, O)
        needed = [need_x, need_norm_weight, *(need_weights[i] for i in used)]
        in_fp8 = takes_fp8(len(douts[0]))
        dout = quantize_rows(*douts) if in_fp8 or any(needed[:2]) else None  # (N, sum of O)
        saved = ctx, x, norm_weight, rstd, scale, [weights[i] for i in used]
        exact = None if in_fp8 else douts
        dx, dnorm_weight, *found = norm_gradients(dout, exact, dresidual, *saved, name, needed)
        of_biases = bias_gradients(douts, (need_biases[i] for i in used))
        for i, *of_one in zip(used, found, of_biases):
            gradients[2 * i : 2 * i + 2] = of_one
        return dx, dnorm_weight, None, None, *gradients


class FP8LinearFunction(torch.autograd.Function):
    """`.apply(x, casts, weight)`: x @ weight.t() of x (..., I), weight (O, I).

    The backward rounds x again.  So x is kept as it is, which takes no memory where x is kept
    anyway.
    """

    @staticmethod
    def forward(ctx, x, casts, weight):
        out, scale = results(quantize_rows(as_matrix(x)), [weight], casts, O)
        ctx.casts, ctx.shape = casts, x.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight, scale)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @outside_autocast
    def backward(ctx, dout):
        refuse_second_derivative("FP8 in the layer")
        x, weight, scale = ctx.saved_tensors
        need_x, _, need_weight = ctx.needs_input_grad
        douts = [as_matrix(dout)]  # (N, O)
        in_fp8 = takes_fp8(len(douts[0]))
        rounded = quantize_rows(*douts) if in_fp8 or need_x else None
        dx = dw = None
        if need_weight:
            x = quantize_rows(as_matrix(x)) if in_fp8 else as_matrix(x)  # again
            (dw,) = weight_gradients(rounded if in_fp8 else douts, x, [weight], [True])
        if need_x:
            dx = fp8_input_gradient(rounded, [weight], scale, ctx.casts, O).view(ctx.shape)
        return dx, None, dw


class FP8MLPFunction(torch.autograd.Function):
    """`.apply(x, norm_weight, eps, casts, w_gate, w_up, w_down)`: x, and the MLP of RMSNorm(x).

    Both results are (..., H).  norm_weight (H,), w_gate and w_up (I, H), w_down (H, I).
    """

    @staticmethod
    def forward(ctx, x, norm_weight, eps, casts, w_gate, w_up, w_down):
        y, rstd = rmsnorm_fp8(as_matrix(x), norm_weight, eps)  # (N, H), (N,) fp32
        both, scale = results(y, [w_gate, w_up], casts, GATE_UP)  # (N, 2 I), ()
        inner = swiglu_fp8(*both.chunk(2, dim=1))
        out, scale_down = results(inner, [w_down], casts, DOWN)
        ctx.eps, ctx.casts = eps, casts
        ctx.set_materialize_grads(False)
        scales = scale, scale_down
        ctx.save_for_backward(x, norm_weight, rstd, both, *scales, w_gate, w_up, w_down)
        return x.view_as(x), out.view(x.shape)

    @staticmethod
    @outside_autocast
    def backward(ctx, dresidual, dout):
        refuse_second_derivative("FP8 in the layer")
        x, norm_weight, rstd, both, scale, scale_down, *weights, w_down = ctx.saved_tensors
        need_x, need_norm_weight, _, _, *need_weights, need_down = ctx.needs_input_grad
        if dout is None:
            return dresidual, *[None] * 6

        dout, (gate, up) = as_matrix(dout), both.chunk(2, dim=1)  # (N, H), (N, I)
        in_fp8 = takes_fp8(len(dout))
        rounded = quantize_rows(dout)
        dinner = fp8_input_gradient(rounded, [w_down], scale_down, ctx.casts, DOWN)  # (N, I)
        dw_down = douts = None
        if in_fp8:
            dboth, inner = swiglu_fp8_backward(dinner, gate, up)  # (N, 2 I), (N, I)
        else:
            dgate, dup, inner = swiglu_backward(dinner, gate, up, need_y=need_down)
            douts, dboth = [dgate, dup], quantize_rows(dgate, dup)
        if need_down:
            of_results = rounded if in_fp8 else [dout]
            (dw_down,) = weight_gradients(of_results, inner, [w_down], [True])
        del dinner, inner, rounded  # memory for what follows
        saved = ctx, x, norm_weight, rstd, scale, weights
        needed = need_x, need_norm_weight, *need_weights
        dx, dnorm_weight, *gradients = norm_gradients(
            dboth, douts, dresidual, *saved, GATE_UP, needed
        )
        return dx, dnorm_weight, None, None, *gradients, dw_down


def qkv_fp8(x, norm, attention, casts):
    """Return x (..., H), and q, k and v of norm(x); norm is a TritonRMSNorm or a LlamaRMSNorm."""
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    tensors = [t for projection in projections for t in (projection.weight, projection.bias)]
    x, q, k, v = NormFP8LinearFunction.apply(x, norm.weight, norm.variance_epsilon, casts, *tensors)
    # Attention keeps v.  If v were columns of one matrix, v would keep q and k alive.  In LLaMA 3.1
    # 8B these are five times as large, and nobody needs them once they are rotated.
    return x, q, k, v.contiguous()


def o_fp8(x, attention, casts):
    """Return attention's output (..., H) of what its heads attended to, x (..., heads * D)."""
    return FP8LinearFunction.apply(x, casts, attention.o_proj.weight)


def mlp_fp8(x, norm, mlp, casts):
    """Return x (..., H), and mlp(norm(x)); the MLP is a TritonLlamaMLP or a LlamaMLP."""
    weights = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    return FP8MLPFunction.apply(x, norm.weight, norm.variance_epsilon, casts, *weights)
