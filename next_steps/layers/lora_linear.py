"""A projection with its LoRA adapter as one autograd Function, or several that share an input.

    out = x @ w.t() + s * (x @ a.t()) @ b.t()       x (..., I), w (O, I), a (R, I), b (O, R)

A projection may also have a bias (O,), which is added.  No new kernel: all of it is matrix
products, and the question is what happens between them.  peft calls w, a and b one after the other,
scales what comes out and adds it: beside the product with w, which plain fine-tuning has too, six
passes over a tensor as large as the result, and four more in the backward.  A product can do two of
these jobs by itself: as it stores its result, it scales it, and adds it to what is there.  PyTorch
calls that out.addmm_(h, b.t(), alpha=s).

    h    = x @ a.t()                  (N, R), R of a few dozen: it is kept
    out  = x @ w.t()
    out += s * h @ b.t()              the thin product reads out and writes it, nobody else does

and with dout of the result, of N rows:

    dh   = s * dout @ b               (N, R)
    db   = s * dout.t() @ h
    da   = dh.t() @ x                 the only reason to keep x, where w is frozen
    dx   = dout @ w
    dx  += dh @ a
    dw   = dout.t() @ x               only if w is trained too; a bias gets the sum of dout's rows

q, k and v share x, as do gate and up.  So their a, one below the other, are one matrix: x is read
once for all of their h, and dh @ a is one addition for all of them.  The matrix costs a copy of
3 x 16 x 4,096 numbers, 0.4 MB.  Reading x once more, at 8,192 tokens, costs 67 MB.

Beyond the products with w, with adapters on all seven projections of LLaMA 3.1 8B, peft moves
700,416 numbers per token and layer, and these products 290,816, of which lora_swiglu.py saves
86,016.  docs/lora.md counts them, and predicts times.

A sum is also rounded less often: once, as it is stored.  peft rounds the thin product, its multiple
and the sum.

A base layer that is a QuantizedLinear has a method `dequantized`, which makes the weight.  Forward
and backward each call it, so that the weight is not kept.  Layers that multiply their codes have
`results` and `input_gradient` besides, for all layers that share an input: frozen_fp8.py.

Limits: no dropout, one adapter for each projection, all of one dtype; no second
derivative.  Other modules run peft's own code: see `is_adapted`.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import linear

from harness.model.exact_modules import has_global_hooks, is_linear, is_unchanged
from kernel_support import outside_autocast, refuse_second_derivative

PEFT = "peft.tuners.lora.layer", "Linear"  # a name, so that nobody must install peft


def lora_linear_reference(x, weight, a=None, b=None, bias=None, scale=None):
    """Return eager x @ weight.t() + bias + scale * (x @ a.t()) @ b.t(), as peft computes it.

    x (..., I), weight (O, I), a (R, I), b (O, R), bias (O,).  Without a and b the adapter is left
    out.
    """
    out = linear(x, weight, bias)  # (..., O)
    return out if a is None else out + linear(linear(x, a), b) * scale


# ---- The products
#
# n projections share one x and take three sequences.  `scales` has n numbers, None where there is
# no adapter.  `bases` has n layers that make their weight when it is needed, None where the weight
# is among the tensors.  `tensors` has w (O, I), a (R, I), b (O, R) and bias (O,) of each
# projection; each of the four may be None.
#
# `h` and `dh` (N, sum of R) hold the projections' parts side by side.  `stacked` (sum of R, I)
# holds every a, one below the other.  All three are None if there is no adapter.  `douts` has a
# result's gradient (N, O), or None, for each projection.  `needed` has a bool for each tensor.


def products(x, scales, bases, tensors, add=True):
    """Return a list of results (..., O), one for each projection of x (..., I); h; and stacked.

    Without `add` the results are those of w alone, and the caller adds scale * h @ b.t().
    """
    weights, b, biases = tensors[::4], tensors[2::4], tensors[3::4]
    a = [t for t in tensors[1::4] if t is not None]
    h = stacked = None
    if a:
        stacked = a[0] if len(a) == 1 else torch.cat(a)
        h = as_matrix(x) @ stacked.t()
    outs = base_results(x, weights, biases, bases)
    for out, h_one, b_one, scale in zip(outs, parts(h, b), b, scales):
        if add and b_one is not None:
            as_matrix(out).addmm_(h_one, b_one.t(), alpha=scale)
    return outs, h, stacked


def base_results(x, weights, biases, bases):
    """Return a list of x @ w.t() + bias (..., O), each in memory of its own."""
    if multiply_codes(bases):
        outs = bases[0].results(as_matrix(x), bases)  # (N, O)
        outs = [out if bias is None else out.add_(bias) for out, bias in zip(outs, biases)]
        return [unflattened(out, x) for out in outs]
    weights = (w if base is None else base.dequantized() for w, base in zip(weights, bases))
    return [
        linear(x, weight) if bias is None else biased(x, weight, bias)
        for weight, bias in zip(weights, biases)
    ]


def biased(x, weight, bias):
    """Return linear(x, weight, bias), which its user may change in place.

    PyTorch's own is a view of a matrix, and autograd forbids to change a view that a Function made.
    """
    return unflattened(torch.addmm(bias, as_matrix(x), weight.t()), x)


def unflattened(out, x):
    """Return out (N, O) as (..., O), with x's other dimensions; autograd takes it for no view."""
    return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], out.shape[1]))  # as in x @ w.t()


def thin_gradient(douts, h, scales, b):
    """Return dh (N, sum of R): every scale * dout @ b, side by side."""
    if h is None:
        return None
    dh = torch.empty_like(h, memory_format=torch.contiguous_format)
    for dout, dh_one, b_one, scale in zip(douts, parts(dh, b), b, scales):
        if b_one is not None and dout is None:
            dh_one.zero_()
        elif b_one is not None:
            dh_one.addmm_(dout, b_one, beta=0, alpha=scale)
    return dh


def parameter_gradients(x, douts, h, dh, scales, b, needed):
    """Return dw, da, db and dbias of each projection, as `tensors` has them; None: not needed.

    Only dw and da need x (N, I).
    """
    need_w, need_a, need_b, need_bias = (needed[i::4] for i in range(4))
    da = [None] * len(b)
    if any(need and dout is not None for need, dout in zip(need_a, douts)):
        da = (dh.t() @ x).split(ranks(b))
    gradients = []
    for i, (dout, h_one, b_one) in enumerate(zip(douts, parts(h, b), b)):
        used = dout is not None
        db = None
        if used and need_b[i]:
            db = torch.empty_like(b_one, memory_format=torch.contiguous_format)
            db.addmm_(dout.t(), h_one, beta=0, alpha=scales[i])
        gradients += [
            dout.t() @ x if used and need_w[i] else None,
            da[i] if used and need_a[i] else None,
            db,
            dout.sum(0) if used and need_bias[i] else None,
        ]
    return gradients


def input_gradient(douts, dh, stacked, bases, weights):
    """Return dx (N, I), the sum over all projections.  At least one of douts is there."""
    there = [each for each in zip(douts, bases, weights) if each[0] is not None]
    dx = None
    if multiply_codes(bases):
        douts, bases, _ = zip(*there)
        dx = bases[0].input_gradient(douts, bases)
    else:
        for dout, base, weight in there:
            weight = weight if base is None else base.dequantized()
            dx = dout @ weight if dx is None else dx.addmm_(dout, weight)
    return dx if dh is None else dx.addmm_(dh, stacked)


def as_matrix(t: torch.Tensor) -> torch.Tensor:
    """Return t (..., I) as (N, I): a view where one exists.  One exists of a product's result."""
    return t.reshape(-1, t.shape[-1])


def ranks(b):
    """Return R of each b (O, R); 0 where there is no adapter."""
    return [0 if t is None else t.shape[1] for t in b]


def parts(h, b):
    """Return the columns of h (N, sum of R) that belong to each projection, as views (N, R)."""
    return [None] * len(b) if h is None else h.split(ranks(b), dim=1)


def needs_input(douts, needed) -> bool:
    """Return True if a gradient of the parameters takes the projections' input."""
    both = zip(douts, needed[::4], needed[1::4])
    return any(dout is not None and (need_w or need_a) for dout, need_w, need_a in both)


class QuantizedLinear(torch.nn.Linear):
    """x (..., in_features) times the transposed weight, which is codes and gets no gradient.

    It replaces a nn.Linear, and peft treats it as one.  `weight` is None, and a bias stays as it
    is, frozen.  A class that derives from this has the codes, in buffers, and two methods:

        dequantized()    the weight (out_features, in_features) of compute_dtype
        qweight          a property: the codes, where peft looks for the device of such a layer
    """

    def __init__(self, linear: torch.nn.Linear):
        torch.nn.Module.__init__(self)  # nn.Linear's own would make a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("weight", None)
        self.register_parameter("bias", linear.bias)
        self.requires_grad_(False)
        # of the weight where it is multiplied; peft too looks for this name
        self.compute_dtype = linear.weight.dtype

    def _apply(self, fn: Callable, recurse: bool = True) -> torch.nn.Module:
        """Apply .to(), .half() and their like to compute_dtype too, which is no tensor's dtype."""
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return super()._apply(fn, recurse)


class LoRALinearFunction(torch.autograd.Function):
    """`LoRALinearFunction.apply(x, scales, bases, *tensors)`: `products`, connected to autograd.

    x (..., I); the results are (..., O), one for each projection.
    """

    @staticmethod
    def forward(ctx, x, scales, bases, *tensors):
        outs, h, stacked = products(x, scales, bases, tensors)
        ctx.scales, ctx.bases, ctx.shape = scales, bases, x.shape
        ctx.set_materialize_grads(False)  # None, not zeros, for a result that nobody used
        keep_x = needs_input(outs, ctx.needs_input_grad[3:])
        weights, b = tensors[::4], tensors[2::4]
        ctx.save_for_backward(x if keep_x else None, h, stacked, *weights, *b)
        return tuple(outs)

    @staticmethod
    @outside_autocast
    def backward(ctx, *douts):
        refuse_second_derivative("A projection with LoRA")
        x, h, stacked, *others = ctx.saved_tensors
        weights, b = others[: len(douts)], others[len(douts) :]
        need_x, _, _, *needed = ctx.needs_input_grad
        douts = [None if dout is None else as_matrix(dout) for dout in douts]
        if all(dout is None for dout in douts):
            return None, None, None, *[None] * len(needed)

        dh = None
        if need_x or any(needed[1::4]):
            dh = thin_gradient(douts, h, ctx.scales, b)
        x = None if x is None else as_matrix(x)
        gradients = parameter_gradients(x, douts, h, dh, ctx.scales, b, needed)
        dx = None
        if need_x:
            dx = input_gradient(douts, dh, stacked, ctx.bases, weights).view(ctx.shape)
        return dx, None, None, *gradients


def lora_linear(x: torch.Tensor, *projections: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Return projection(x) (..., O) of x (..., I), for each of the projections.

    All modules are called as they are if one of them is not `is_adapted`, under autocast, and if
    hooks watch all modules.
    """
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    fits = all(is_adapted(projection, x.dtype) for projection in projections)
    if has_global_hooks() or autocast or not fits:
        return tuple(projection(x) for projection in projections)
    scales, bases, tensors = arguments(projections)
    return LoRALinearFunction.apply(x, scales, bases, *tensors)


def arguments(projections: Sequence[torch.nn.Module]) -> tuple[tuple, tuple, list]:
    """Return scales, bases and tensors of projections for which `is_product` is True."""
    scales, bases, tensors = [], [], []
    for projection in projections:
        base, a, b, scale = projection, None, None, None
        if is_peft(projection):
            base, (name,) = projection.base_layer, projection.active_adapters
            a, b = projection.lora_A[name].weight, projection.lora_B[name].weight
            scale = projection.scaling[name]
        scales.append(scale)
        bases.append(base if is_quantized(base) else None)
        tensors += [None if is_quantized(base) else base.weight, a, b, base.bias]
    return tuple(scales), tuple(bases), tensors


# ---- Which modules the products stand for


def is_product(module: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Return True if `products` can stand for a linear layer whose input has this dtype.

    The layer may be quantized.  It may have an adapter, which must have the input's dtype.
    """
    return is_base(module) or is_adapted(module, dtype)


def is_base(layer: torch.nn.Module) -> bool:
    """Return True if a layer, quantized or not, computes x @ weight.t(), perhaps with a bias."""
    return is_linear(layer) or (is_quantized(layer) and is_unchanged(layer))


def is_quantized(layer: torch.nn.Module) -> bool:
    """Return True if a layer's class has a method that makes the weight anew each time."""
    return hasattr(type(layer), "dequantized")


def multiply_codes(bases: Sequence[torch.nn.Module | None]) -> bool:
    """Return True if all of these layers multiply what their weights are kept as."""
    # torch.compile traces this, and it asks no type(None) for an attribute
    return all(base is not None and hasattr(type(base), "input_gradient") for base in bases)


def is_adapted(module: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Return True if peft's LoRA computes x @ w.t() + bias + s * (x @ a.t()) @ b.t(), no more.

    Each call asks anew, because adapters may have been merged, disabled or exchanged.  `dtype` is
    x's.  lora_variant: DoRA and the like.
    """
    if not is_peft(module) or module.disable_adapters or module.merged:
        return False
    if len(module.active_adapters) != 1:
        return False
    (name,) = module.active_adapters
    if name not in module.lora_A or name in module.lora_variant:
        return False
    base, a, b = module.base_layer, module.lora_A[name], module.lora_B[name]
    without_dropout = type(module.lora_dropout[name]) is torch.nn.Identity
    linears = type(a) is type(b) is torch.nn.Linear and a.bias is None and b.bias is None
    if not (without_dropout and linears and is_base(base)):
        return False
    layers = module, a, b, module.lora_dropout[name]
    # a quantized layer has no weight, and most layers have no bias
    weights = [t for t in (a.weight, b.weight, base.weight, base.bias) if t is not None]
    of_dtype = all(weight.dtype == dtype for weight in weights)
    plain_scale = isinstance(module.scaling[name], (int, float))  # not NumPy's fp32, not a tensor
    return of_dtype and plain_scale and all(map(is_unchanged, layers))


def is_peft(module: torch.nn.Module) -> bool:
    """Return True for peft's module around a linear layer, in whatever state."""
    return (type(module).__module__, type(module).__name__) == PEFT
