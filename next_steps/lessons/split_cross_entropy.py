"""Cross-entropy of logits whose vocabulary is split over processes: three numbers a row travel.

    loss = F.cross_entropy(torch.cat(slices, -1).float(), targets)    # each slice in a process

The logits are a step's largest tensor.  A head that is split by rows of its weight, as tensor
parallelism does it, computes slice by slice, in each process the columns from first_column on;
and nobody ever has to put them together.

The maths: a row's softmax needs the m and d of all columns, and those of slices combine as those of
an online softmax's chunks do (cross_entropy_kernel.py):

    m = max m[r],    d = sum d[r] * exp(m[r] - m),    loss = m - logits[target] + log(d)

Then each process has what the backward needs, and the gradient of a slice stays with the slice:

    dlogits[j] = exp(logits[j] - m) / d - [j == target]

Bytes that travel per row: m with its unit, d, and the target's logit, known to one process: 16,
once, in place of 2 V.  No new kernel: cross_entropy_kernel's forward takes the statistics of a
slice, its backward the combined ones.  Only, a row's target may lie in another slice, and for a
target outside of what it sees, that kernel gives NaN, as it must.  Such a row is told that its
target is the slice's first column, and that column's gradient is then written once more.

Limits: those of cross_entropy_kernel.py, and the gradient is always new memory.  The hidden states'
gradient is a sum over the slices, which who splits the head must take.
"""

import torch

import cross_entropy_kernel
from cross_entropy_kernel import check_logits, cross_entropy_backward, cross_entropy_forward
from kernel_support import refuse_second_derivative

LN2 = cross_entropy_kernel.LN2.value
IGNORED = -100  # for the kernel; any ignore_index of a user's may be a column of a slice


def combine(
    stats: torch.Tensor, target_logit: torch.Tensor, group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of whole rows, from those of the slices that the processes of a group have.

    Args:
        stats: (n_rows, 3) fp32 of a slice: m, d and m's unit, as cross_entropy_forward returns it.
        target_logit: (n_rows,) fp32; NaN where the target lies in another slice.
        group: torch.distributed's; None: the slice is the whole.

    Returns:
        The same two; where no slice has the target, its logit and d are NaN.
    """
    mine = torch.cat([stats, target_logit.unsqueeze(1)], 1)  # (n_rows, 4)
    n_slices = 1 if group is None else torch.distributed.get_world_size(group)
    every = mine
    if group is not None:
        every = mine.new_empty((n_slices * len(mine), 4))
        torch.distributed.all_gather_into_tensor(every, mine, group=group)
    every = every.view(n_slices, len(mine), 4)
    m, d, unit, target_logit = every.unbind(2)  # (n_slices, n_rows) each
    # Units differ where the maxima of two slices are so far apart that the lower slice adds nothing
    top = (m / unit).argmax(0, keepdim=True)
    whole_unit = unit.gather(0, top)
    same = unit == whole_unit
    whole_m = m.masked_fill(~same, -float("inf")).amax(0, keepdim=True)
    decay = torch.where(same, torch.exp2(m - whole_m), 0.0)
    d = (d * decay).sum(0)  # a product: what is NaN in any slice stays NaN
    is_here = ~target_logit.isnan()
    target_logit = target_logit.masked_fill(~is_here, 0.0).sum(0)
    nowhere = ~is_here.any(0)
    d, target_logit = (t.masked_fill(nowhere, float("nan")) for t in (d, target_logit))
    return torch.stack([whole_m[0], d, whole_unit[0]], 1), target_logit


def loss_of_rows(stats: torch.Tensor, target_logit: torch.Tensor) -> torch.Tensor:
    """(n_rows,) fp32, from what `combine` returns; in float64, which no product rounds.

    Exactly 0 if the target's exponential is d, as the kernel's.
    """
    m, d, unit = stats.double().unbind(1)
    to_log = torch.where(unit == 1.0, 1.0, LN2)  # from the unit to natural logarithms
    t = target_logit * unit - m
    is_all = torch.exp2(t).float() == stats[:, 1]
    return (d.log() - t * to_log).clamp(min=0).masked_fill(is_all, 0.0).float()


class SplitCrossEntropyFunction(torch.autograd.Function):
    """`.apply(logits, targets, first_column, group, ignore_index, reduction)`, for autograd."""

    @staticmethod
    def forward(ctx, logits, targets, first_column, group, ignore_index, reduction):
        if not torch.compiler.is_compiling():  # else the operator checks them
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

    It is () fp32, or (...) with reduction "none", with the same bits in every process of the group;
    so are targets, which number the columns of the whole vocabulary.  Rows whose target is
    ignore_index have loss and gradient 0 and do not count in the mean; one whose target is in no
    slice is NaN.

    first_column: of the vocabulary, where this process's slice begins; slices of any sizes, but
        none empty, that overlap nowhere.
    group: torch.distributed's, of the processes; None: there is one slice.
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
