"""Cross-entropy of logits whose vocabulary is split over processes: three numbers a row travel.

    loss = F.cross_entropy(torch.cat(slices, -1).float(), targets)    # each slice in a process

The logits are the largest tensor of a step.  A head that is split by rows of its weight, as in
tensor parallelism, computes them slice by slice.  Each process has the columns from first_column
on, and no process ever needs all of them.

The maths: a row's softmax needs the m and d of all columns, and those of slices combine as those of
an online softmax's chunks do (cross_entropy_kernel.py):

    m = max m[r],    d = sum d[r] * exp(m[r] - m),    loss = m - logits[target] + log(d)

Then each process has what the backward needs, and the gradient of a slice stays with the slice:

    dlogits[j] = exp(logits[j] - m) / d - [j == target]

Four fp32 numbers travel per row: m, its unit, d, and the target's logit, which one process knows.
That is 16 bytes once, in place of 2 V.  There is no new kernel: cross_entropy_kernel's forward
computes the statistics of a slice, and its backward takes the combined ones.  But for a target
outside of the slice that kernel gives NaN, as it must.  So a row whose target lies in another slice
names the slice's first column as its target, and that column's gradient is then written again.

Limits: those of cross_entropy_kernel.py; the gradient is always new memory.  The gradient of the
hidden states is a sum over the slices, which the caller who split the head must take.
"""

import torch

from cross_entropy_kernel import LN2, check_logits, cross_entropy_backward, cross_entropy_forward
from kernel_support import refuse_second_derivative, takes_negated

IGNORED = -100  # for the kernel; any ignore_index of a user's may be a column of a slice


def combine(stats, target_logit, group):
    """Return stats and target_logit of whole rows, from those of each process's slice.

    Args:
        stats: (n_rows, 3) fp32 of a slice: m, d and m's unit, as cross_entropy_forward returns it.
        target_logit: (n_rows,) fp32; NaN where the target lies in another slice.  Where no slice
            has the target, the returned logit and d are NaN.
        group: torch.distributed's; None: the slice is the whole.
    """
    mine = torch.cat([stats, target_logit.unsqueeze(1)], 1)  # (n_rows, 4)
    n_slices = 1 if group is None else torch.distributed.get_world_size(group)
    every = mine
    if group is not None:
        every = mine.new_empty((n_slices * len(mine), 4))
        torch.distributed.all_gather_into_tensor(every, mine, group=group)
    m, d, unit, target_logit = every.view(n_slices, len(mine), 4).unbind(2)  # (n_slices, n_rows)
    # Two slices have different units only where the lower slice adds nothing to the sum.
    top = (m / unit).argmax(0, keepdim=True)
    whole_unit = unit.gather(0, top)
    same = unit == whole_unit
    whole_m = m.masked_fill(~same, -float("inf")).amax(0, keepdim=True)
    decay = torch.where(same, torch.exp2(m - whole_m), 0.0)
    d = (d * decay).sum(0)  # a product, so that a NaN in any slice stays NaN
    is_here = ~target_logit.isnan()
    target_logit = target_logit.masked_fill(~is_here, 0.0).sum(0)
    nowhere = ~is_here.any(0)
    d, target_logit = (t.masked_fill(nowhere, float("nan")) for t in (d, target_logit))
    return torch.stack([whole_m[0], d, whole_unit[0]], 1), target_logit


def loss_of_rows(stats, target_logit):
    """Return the rows' losses (n_rows,) fp32 from the results of `combine`.

    They are computed in float64, which rounds no product, and exactly 0 if the target's exponential
    is d, as in the kernel.
    """
    m, d, unit = stats.double().unbind(1)
    # from the unit to natural logarithms
    to_log = torch.ones_like(unit, dtype=torch.float32).masked_fill(unit != 1.0, LN2.value)
    t = target_logit * unit - m
    is_all = torch.exp2(t).float() == stats[:, 1]
    return (d.log() - t * to_log).clamp(min=0).masked_fill(is_all, 0.0).float()


class SplitCrossEntropyFunction(torch.autograd.Function):
    """`.apply(logits, targets, first_column, group, ignore_index, reduction)`, for autograd."""

    @staticmethod
    @takes_negated()
    def forward(ctx, logits, targets, first_column, group, ignore_index, reduction):
        if not torch.compiler.is_compiling():  # when compiling, the operator checks the tensors
            check_logits(logits, targets, reduction)
        column = targets.long() - first_column  # (...), as all below
        counts = targets != ignore_index
        is_elsewhere = counts & ((column < 0) | (column >= logits.shape[-1]))
        column = column.masked_fill(is_elsewhere, 0).masked_fill(~counts, IGNORED)
        _, stats, _ = cross_entropy_forward(logits, column, IGNORED, "none")
        target_logit = logits.gather(-1, column.clamp(min=0).unsqueeze(-1)).squeeze(-1).float()
        target_logit = target_logit.masked_fill(is_elsewhere, float("nan")).reshape(-1)
        stats, target_logit = combine(stats, target_logit, group)
        n_valid = counts.sum() if reduction == "mean" else None
        row_loss = loss_of_rows(stats, target_logit).view(targets.shape).masked_fill(~counts, 0.0)
        ctx.save_for_backward(logits, column, is_elsewhere, stats, n_valid)
        if reduction == "none":
            return row_loss
        return row_loss.sum() if n_valid is None else row_loss.sum() / n_valid

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivative("TritonSplitCrossEntropyLoss")
        logits, column, is_elsewhere, stats, n_valid = ctx.saved_tensors
        grads = grad_output if n_valid is None else grad_output / n_valid
        dlogits = cross_entropy_backward(grads, logits, column, stats, None, IGNORED)
        m, d, unit = (t.view(column.shape) for t in stats.double().unbind(1))
        first = torch.exp2(logits[..., 0] * unit - m) / d * grads
        dlogits[..., 0] = torch.where(is_elsewhere, first.to(dlogits.dtype), dlogits[..., 0])
        return dlogits, None, None, None, None, None


class TritonSplitCrossEntropyLoss(torch.nn.Module):
    """`loss(logits, targets)` of this process's columns (..., V_slice), and all targets (...).

    The loss is () fp32, or (...) with reduction "none".  Each process of the group has the same
    bits.  Targets number the columns of the whole vocabulary, and are the same in each process.
    Rows whose target is ignore_index have loss and gradient 0 and do not count in the mean.  A row
    whose target is in no slice is NaN.

    first_column: the column of the vocabulary at which this process's slice begins.  Slices may
        have any sizes but 0, and do not overlap.
    group: the processes, as torch.distributed's group; None: there is one slice.
    reduction: "mean", "sum" or "none".

    Raises:
        TypeError, ValueError: a tensor's type, dtype, shape or device, or the reduction, is wrong.
    """

    def __init__(
        self, first_column: int = 0, group=None, ignore_index: int = -100, reduction: str = "mean"
    ):
        super().__init__()
        self.args = first_column, group, ignore_index, reduction

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return SplitCrossEntropyFunction.apply(logits, targets, *self.args)
