"""FP8 in the head: the gradients of hidden states and weight are products of 8-bit numbers.

    loss = F.cross_entropy(hidden @ weight.t(), targets)     FP8HeadLinearCrossEntropyFunction

    logits  = hidden @ weight.t()         (n, V)     in bf16
    dhidden = dlogits @ weight            (n, H)     dlogits rounded by rows, weight turned
    dweight = dlogits.t() @ hidden        (V, H)     both turned, moved to one scale: fp8_layer.py

Why are the logits in bf16?  A logit is the sum that remains of large parts, and its error is that
of the parts.  On the real weights of a small model, FP8's logits raise the loss and put the
gradients off several times as far as both products above do: results/log.md.

The order is that of linear_cross_entropy_kernel.py, and so are the kernels between the products:
the forward computes the gradients for a grad_output of 1.

1. A row of dlogits has V numbers, more than one program holds.  So the vocabulary is cut into
   slices, each with its own scales.  In a row all numbers but the target's may be tiny.  The slices
   without the target keep them: their scale follows their own largest.  Slices also keep the sums
   of dhidden short, and a fast product adds few numbers of unlike size.
2. The kernel leaves softmax minus one-hot in dlogits: -1 to 1.  The mean's 1 / n_valid is a factor
   of the scales of weight and hidden, which products take out of the sum.  It costs no pass.
3. A chunk has up to 8,192 rows, because a product in FP8 cannot add to dweight as it stores.  So
   the logits take up to 2 V * 8,192 bytes.
4. The GPU wants multiples of 16.  Rows of zeros without a target fill up the tokens, and columns
   of -inf the vocabulary.

What is lost: dweight sums over tokens, and moves all rows of a slice to their largest scale.  There
a probability below 2^-18 becomes 0, where a token of the chunk has its target in the slice.  In
dhidden this is so only within the target's slice.

Limits: hidden and weight of one dtype; H a multiple of 16 up to 32,768; not fp16; no bias; a
mean; no second derivative.
"""

import torch

from cross_entropy_inplace_kernel import cross_entropy_inplace, cross_entropy_scale
from kernel_support import refuse_second_derivative
from next_steps.lessons.fp8_kernel import (
    MAX_COLUMNS,
    MULTIPLE,
    Rows,
    fp8_product,
    quantize_rows,
    quantize_transposed,
    transpose_rows,
)
from next_steps.lessons.linear_cross_entropy_kernel import (
    FEW,
    MAX_CHUNK,
    MAX_ROUNDINGS,
    TritonLinearCrossEntropyLoss,
    of_rows_with_target,
    scale_gradient,
)


def slices(n_columns: int) -> list[slice]:
    """Cut columns into parts of about equal size, multiples of 16, that a cast takes."""
    n_parts = -(-n_columns // MAX_COLUMNS)
    width = -(-n_columns // (n_parts * MULTIPLE)) * MULTIPLE
    return [slice(first, min(first + width, n_columns)) for first in range(0, n_columns, width)]


def filled(t: torch.Tensor, value: float = 0.0) -> torch.Tensor:
    """Return t (N, ...), with rows of this value up to a multiple of 16."""
    more = -len(t) % MULTIPLE
    return torch.cat([t, t.new_full((more, *t.shape[1:]), value)]) if more else t


def times(rows: Rows, factor: torch.Tensor) -> Rows:
    """Return Rows times factor (), for a product: its scales are no powers of two any more."""
    return Rows(rows.codes, rows.scales * factor)


def store_or_add(total: torch.Tensor, product: torch.Tensor, is_first: bool) -> None:
    """Write the first product into the total, and add each further one."""
    total.copy_(product) if is_first else total.add_(product)


def largest_scale(weight: torch.Tensor) -> torch.Tensor:
    """Return the scale () of the largest number of weight, as `quantize_rows` finds it."""
    amax = torch.linalg.vector_norm(weight, torch.inf)
    return quantize_rows(amax.view(1, 1)).scales[0]


@torch.no_grad()
def head_forward(hidden, weight, targets, ignore_index, need_dhidden, need_dweight, max_targets):
    """Return the mean loss () fp32, dhidden and dweight; None for a gradient that is not needed.

    hidden (..., H), weight (V, H), targets (...) int64 or int32.  max_targets: at most so many
    targets are not ignore_index, or all results are NaN; None: unknown.
    """
    needed = need_dhidden, need_dweight
    if max_targets is not None and max_targets < FEW * targets.numel():

        def of_rows(rows, row_targets, _grad_output):
            return head_forward(rows, weight, row_targets, ignore_index, *needed, None)

        return of_rows_with_target(of_rows, max_targets, hidden, targets, ignore_index)

    n_rows, n_columns = targets.numel(), len(weight)
    rows, weight = filled(hidden.reshape(n_rows, -1)), filled(weight)  # (n, H), (V, H)
    row_targets = filled(targets.reshape(-1), ignore_index)  # (n,)
    n_valid = (row_targets != ignore_index).sum().float()
    total, one, share = n_valid.new_zeros(()), n_valid.new_ones(()), 1 / n_valid.clamp(min=1)
    dhidden = torch.empty_like(rows) if need_dhidden else None
    # of more chunks it is summed in fp32
    dtype = weight.dtype if len(rows) <= MAX_ROUNDINGS * MAX_CHUNK else torch.float32
    dweight = weight.new_empty(weight.shape, dtype=dtype) if need_dweight else None

    for first in range(0, max(len(rows), 1), MAX_CHUNK):  # of no rows there is a chunk, too
        chunk = slice(first, first + MAX_CHUNK)
        x_turned = None
        if need_dweight:
            x_turned = times(transpose_rows(quantize_rows(rows[chunk])), share)  # (H, n)
        logits = rows[chunk] @ weight.t()  # (n, V)
        logits[:, n_columns:] = -torch.inf
        total += cross_entropy_inplace(logits, row_targets[chunk], ignore_index, "sum")
        cross_entropy_scale(one, logits, row_targets[chunk], ignore_index)
        for part in slices(len(weight)) if any(needed) else ():
            dlogits = quantize_rows(logits[:, part])  # (n, width)
            if need_dhidden:
                turned = quantize_transposed(weight[part], scale=largest_scale(weight[part]))
                product = fp8_product(dlogits, times(turned, share), rows.dtype, fast=True)
                store_or_add(dhidden[chunk], product, part.start == 0)
            if need_dweight:
                product = fp8_product(transpose_rows(dlogits), x_turned, weight.dtype, fast=True)
                store_or_add(dweight[part], product, first == 0)
        del logits  # its memory may become the next chunk's

    dhidden = dhidden[:n_rows].view(hidden.shape) if need_dhidden else None
    dweight = dweight[:n_columns].to(weight.dtype) if need_dweight else None
    return total / n_valid, dhidden, dweight


class FP8HeadLinearCrossEntropyFunction(torch.autograd.Function):
    """The loss, connected to autograd: `.apply` takes the arguments of `forward` after ctx."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, ignore_index, max_targets, grad_enabled):
        ctx.options = ignore_index, *ctx.needs_input_grad[:2], max_targets
        needed = [grad_enabled and need for need in ctx.needs_input_grad[:2]]
        loss, *ctx.gradients = head_forward(
            hidden, weight, targets, ignore_index, *needed, max_targets
        )
        ctx.save_for_backward(hidden, weight, targets)
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivative("FP8 in the head")
        saved = ctx.saved_tensors  # raises if one of them has been changed since
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # the second call of the backward
            _, *gradients = head_forward(*saved, *ctx.options)
        for gradient in gradients:
            if gradient is not None:
                scale_gradient(gradient.view(-1, gradient.shape[-1]), grad_output)
        return *gradients, *[None] * 4


class FP8HeadLoss(TritonLinearCrossEntropyLoss):
    """`loss(hidden, weight, targets)`, a mean, whose gradients are products of FP8."""

    def forward(self, hidden, weight, targets, max_targets=None) -> torch.Tensor:
        ignore_index, *_ = self.args
        options = ignore_index, max_targets, torch.is_grad_enabled()
        return FP8HeadLinearCrossEntropyFunction.apply(hidden, weight, targets, *options)
