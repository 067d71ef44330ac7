"""Cross-entropy in Triton: the loss and its gradient, without a softmax tensor in memory.

    loss = F.cross_entropy(logits.float().view(-1, V), targets.view(-1), ignore_index=-100)  # logits (..., V)

The maths, for one row, that is, one token's V logits (max and sum run over its columns j):

    m    = max logits[j]                       a reference point, so that no exponential overflows
    d    = sum exp(logits[j] - m)              the softmax's denominator
    loss = m - logits[target] + log(d)         = -log softmax(logits)[target]

Read literally that is one pass for m and another for d.  Online softmax (Milakov & Gimelshein, 2018) needs
one: it walks the row in chunks, and when a chunk brings a larger maximum, it rescales the sum so far to it.

    m_new = max(m, max(chunk))
    d     = d * exp(m - m_new) + sum exp(chunk[j] - m_new)
    m     = m_new

By hand, with 8 logits in two chunks of 4, and column 5 (the logit 7) as the target:

    chunk 1   [2, 5, 1, 3]    m = 5    d = 0.050 + 1.000 + 0.018 + 0.135                         = 1.203
    chunk 2   [4, 7, 2, 6]    m = 7    d = 1.203 * exp(5 - 7) + 0.050 + 1.000 + 0.007 + 0.368    = 1.587
    loss = 7 - 7 + log(1.587) = 0.462

Bytes moved per bf16 logit, if each kernel reads its inputs once and writes its result once:

                eager, as Hugging Face writes it                          fused                 ratio
    forward     to fp32 6, log_softmax 8                           = 14   logits          =  2    7.0
    backward    nll_loss (zeros) 4, log_softmax 12, to bf16 6      = 22   logits, dlogits =  4    5.5
    both                                                             36                      6    6.0
    memory      log-softmax, its gradient, the logits', all fp32   = 12   dlogits         =  2    6.0

The prediction: a sixth of the memory beyond the logits (none in place), and at least 6 times as fast; at
least, because a row of 128,256 fp32 values outgrows a multiprocessor, so log_softmax reads it repeatedly.
(F.cross_entropy straight on bf16 logits: 12 bytes moved, 6 held, but each log-probability rounded to bf16.)

New ideas of Triton, after those of rmsnorm_kernel.py:

1. A loop can carry state: m and d are ordinary variables, and from chunk to chunk they stay in registers.
2. `tl.load(..., other=-inf)`: lanes beyond the row's end get a value that changes no maximum and adds exp 0.
3. Scalars beside blocks: m is one number and d is BLOCK_SIZE numbers; arithmetic between them broadcasts.
4. A pointer may be None: Triton compiles a kernel without it.  A stride may be 0: all rows read one element.

Limits: fp16, bf16, fp32; the vocabulary is the LAST dimension (F.cross_entropy wants it second); no class
weights, no label smoothing; the loss is fp32; differentiable once.  Logits without a (n_rows, V) view, such
as logits[:, :-1] of several sequences, are copied: to predict the next token, shift the labels instead.
"""

import contextlib
import os

import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # no GPU: run on the CPU; must precede `import triton`

import triton
import triton.language as tl

# Logits per chunk and warps (of 32 threads) per row.  Best of 2,048 to 32,768 logits and 4 to 32 warps on an
# H200, 8,192 rows of 128,256 bf16 logits: 531 us forward and 1,045 us backward (8,192 and 8: 563 and 1,072).
FORWARD_BLOCK_SIZE, FORWARD_WARPS = 4096, 4
BACKWARD_BLOCK_SIZE, BACKWARD_WARPS = 16_384, 16
REDUCTIONS = ("mean", "sum", "none")
INTERPRETED = triton.knobs.runtime.interpret  # are the kernels below run on the CPU, by the interpreter?

# exp(t) = 2**(t * log2(e)), and 2**t is what the GPU's exponential unit computes: tl.exp multiplies as well,
# and then tests and rescales every element to keep results below 2**-126, nothing in a sum of 1 or more.
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def cross_entropy_reference(logits, targets, ignore_index=-100, reduction="mean"):
    """Eager loss of logits (..., V) and targets (...), in the logits' own dtype; float64 stays float64."""
    rows, row_targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long()
    loss = F.cross_entropy(rows, row_targets, ignore_index=ignore_index, reduction=reduction)
    return loss.view(targets.shape) if reduction == "none" else loss


@triton.jit
def _cross_entropy_fwd_kernel(
    logits_ptr, logits_row_stride,  # (n_rows, n_cols)
    targets_ptr, row_loss_ptr, m_ptr, d_ptr,  # (n_rows,); the last three fp32
    n_cols, ignore_index, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    # One program per row.  int64, because at V = 128,256 row * stride outgrows 32 bits from row 16,744 on.
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(row_loss_ptr + row, 0.0)
        return  # before any of the row's logits is read

    logits_ptr += row * logits_row_stride
    m = -float("inf")
    d = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)  # one sum per lane: the lanes meet once, after the loop
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        logits = tl.load(logits_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        # LOWEST keeps m_new finite in a chunk of -inf (a masked vocabulary), where -inf - -inf would be NaN.
        m_new = tl.maximum(tl.maximum(m, tl.max(logits)), LOWEST)
        d = d * tl.exp2((m - m_new) * LOG2E) + tl.exp2((logits - m_new) * LOG2E)
        m = m_new
    d = tl.sum(d)

    # A target outside the row is not read.  It makes the row's loss NaN, and the host need not wait for it.
    in_row = (target >= 0) & (target < n_cols)
    target_logit = tl.load(logits_ptr + target, mask=in_row, other=float("nan")).to(tl.float32)
    # The difference first: log(d) is small, and added to a large m it would lose its digits.
    tl.store(row_loss_ptr + row, (m - target_logit) + tl.log(d))
    tl.store(m_ptr + row, m)
    tl.store(d_ptr + row, d)


# n_rows changes from batch to batch, and must not compile a new kernel each time.
@triton.jit(do_not_specialize=["n_rows"])
def _cross_entropy_reduce_kernel(
    row_loss_ptr, targets_ptr,  # (n_rows,)
    loss_ptr, n_valid_ptr,  # () fp32 and () int32, or None for a sum instead of a mean
    n_rows, ignore_index, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    # One program in place of PyTorch's four kernels; it always adds in the same order, so to the same bits.
    loss = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
    n_valid = tl.zeros((BLOCK_SIZE,), dtype=tl.int32)
    for start in range(0, n_rows, BLOCK_SIZE):
        rows = start + tl.arange(0, BLOCK_SIZE)
        mask = rows < n_rows
        loss += tl.load(row_loss_ptr + rows, mask=mask, other=0.0)
        targets = tl.load(targets_ptr + rows, mask=mask, other=0)
        n_valid += (mask & (targets != ignore_index)).to(tl.int32)
    loss = tl.sum(loss)
    if n_valid_ptr is not None:
        n_valid = tl.sum(n_valid)
        tl.store(n_valid_ptr, n_valid)
        loss = loss / n_valid  # 0 / 0 = NaN where no row is valid, as in PyTorch
    tl.store(loss_ptr, loss)


# The backward.  Given scale = dL/dloss of a row (grad_output, over n_valid for a mean), find dL/dlogits.
#
#   loss = m - logits[target] + log(d), where m is only a reference point: any m gives the same loss.  So
#
#   dloss/dlogits[j] = exp(logits[j] - m) / d  -  [j == target]               softmax minus one-hot
#   dlogits[j]       = (exp(logits[j] - m) - d * [j == target]) * (scale / d)
#
# Subtracting before dividing spares a confident prediction (softmax near 1) one rounding of a number near 1.
# Saving m and d, not their sum lse = m + log(d), costs 4 bytes per row: near 10,000 fp32 numbers are 0.001
# apart, and rounding lse to one of them would make each probability wrong by up to 0.05 %.
@triton.jit
def _cross_entropy_bwd_kernel(
    grad_output_ptr, grad_output_stride,  # (n_rows,), with stride 0 where all rows share one gradient
    logits_ptr, logits_row_stride,  # (n_rows, n_cols)
    targets_ptr, m_ptr, d_ptr,  # (n_rows,)
    n_valid_ptr,  # (), or None unless the loss was a mean
    dlogits_ptr, dlogits_row_stride,  # (n_rows, n_cols); in place, the same memory as logits
    n_cols, ignore_index, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_row_stride
    dlogits_ptr += row * dlogits_row_stride
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        # Stored, not multiplied in: 0 * NaN would let a NaN logit of this row through.
        for start in range(0, n_cols, BLOCK_SIZE):
            cols = start + tl.arange(0, BLOCK_SIZE)
            tl.store(dlogits_ptr + cols, 0.0, mask=cols < n_cols)
        return

    scale = tl.load(grad_output_ptr + row * grad_output_stride).to(tl.float32)
    if n_valid_ptr is not None:
        scale = scale / tl.load(n_valid_ptr)
    in_row = (target >= 0) & (target < n_cols)
    m = tl.load(m_ptr + row)
    d = tl.load(d_ptr + row)
    scale_over_d = tl.where(in_row, scale, float("nan")) / d
    target = target.to(tl.int32)  # as cols are, which is quicker to compare; what does not fit is NaN by now
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        mask = cols < n_cols
        logits = tl.load(logits_ptr + cols, mask=mask, other=-float("inf")).to(tl.float32)
        dlogits = (tl.exp2((logits - m) * LOG2E) - tl.where(cols == target, d, 0.0)) * scale_over_d
        # In place this overwrites the chunk just read, which no other chunk and no other program needs.
        tl.store(dlogits_ptr + cols, dlogits.to(dlogits_ptr.dtype.element_ty), mask=mask)


def _check(logits, targets, reduction="mean", inplace=False):
    """Refuse what the kernels cannot compute, before any pointer is handed to them; reads no element."""
    if not (isinstance(logits, torch.Tensor) and isinstance(targets, torch.Tensor)):
        raise TypeError(f"logits is a {type(logits).__name__}, targets a {type(targets).__name__}: expected tensors.")
    if logits.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"logits is {logits.dtype}, expected float16, bfloat16 or float32: convert it.")
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets is {targets.dtype}, expected class indices in int64 or int32: convert it.")
    if logits.ndim == 0 or logits.shape[-1] == 0 or logits.shape[:-1] != targets.shape:
        given = f"logits has shape {tuple(logits.shape)} and targets {tuple(targets.shape)}"
        raise ValueError(f"{given}, expected (..., V) with V >= 1 and (...): reshape one of them.")
    if logits.device != targets.device:
        raise ValueError(f"logits is on {logits.device}, targets on {targets.device}: move one of them.")
    if not logits.is_cuda and not INTERPRETED:
        raise ValueError(f"logits is on {logits.device}, expected a GPU: move it, or set TRITON_INTERPRET=1 first.")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {REDUCTIONS}: choose one.")
    if inplace:
        owner = logits if logits._base is None else logits._base  # of the memory
        if owner.is_leaf and owner.requires_grad:
            raise ValueError("logits is a leaf, expected a result to overwrite: use inplace=False.")
        if not logits.is_contiguous():
            given = f"logits has shape {tuple(logits.shape)} and strides {logits.stride()}"
            raise ValueError(f"{given}, expected contiguous ones to overwrite: use inplace=False.")


def _as_rows(logits):
    """View (..., V) as (n_rows, V) with adjacent columns; copies only where no such view exists."""
    rows = logits.reshape(-1, logits.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _on_device_of(t):
    """Triton launches on the current GPU, which need not be the one the tensors are on."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


def cross_entropy_forward(logits, targets, ignore_index=-100, reduction="mean"):
    """Return loss () or (...) fp32 and, for the backward, m and d (n_rows,) fp32 and n_valid () or None."""
    _check(logits, targets, reduction)
    rows, row_targets = _as_rows(logits), targets.reshape(-1).contiguous()
    n_rows, V = rows.shape
    row_loss, m, d = (torch.empty(n_rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    loss, n_valid = row_loss.view(targets.shape), None
    with _on_device_of(logits):
        if n_rows > 0:
            _cross_entropy_fwd_kernel[(n_rows,)](
                rows, rows.stride(0), row_targets, row_loss, m, d, V, ignore_index,
                BLOCK_SIZE=min(FORWARD_BLOCK_SIZE, triton.next_power_of_2(V)), num_warps=FORWARD_WARPS,
            )  # fmt: skip
        if reduction != "none":
            loss = torch.empty((), dtype=torch.float32, device=logits.device)
            n_valid = torch.empty_like(loss, dtype=torch.int32) if reduction == "mean" else None
            _cross_entropy_reduce_kernel[(1,)](
                row_loss, row_targets, loss, n_valid, n_rows, ignore_index, BLOCK_SIZE=1024,
            )  # fmt: skip
    return loss, m, d, n_valid


def cross_entropy_backward(grad_output, logits, targets, m, d, n_valid, ignore_index=-100, inplace=False):
    """Return dlogits (..., V) in logits' dtype: new and contiguous or, in place, the logits' own memory."""
    _check(logits, targets, inplace=inplace)
    rows, row_targets = _as_rows(logits), targets.reshape(-1).contiguous()
    n_rows, V = rows.shape
    row_grads = grad_output.expand(targets.shape).reshape(-1)  # of a scalar it is a view with stride 0
    drows = rows.detach() if inplace else torch.empty((n_rows, V), dtype=logits.dtype, device=logits.device)
    if n_rows > 0:
        with _on_device_of(logits):
            _cross_entropy_bwd_kernel[(n_rows,)](
                row_grads, row_grads.stride(0), rows, rows.stride(0), row_targets, m, d, n_valid,
                drows, drows.stride(0), V, ignore_index,
                BLOCK_SIZE=min(BACKWARD_BLOCK_SIZE, triton.next_power_of_2(V)), num_warps=BACKWARD_WARPS,
            )  # fmt: skip
    return drows.view(logits.shape)


class FusedCrossEntropyFunction(torch.autograd.Function):
    """`FusedCrossEntropyFunction.apply(logits, targets, ignore_index, reduction, inplace)`: for autograd."""

    @staticmethod
    def forward(ctx, logits, targets, ignore_index, reduction, inplace):
        if inplace:
            _check(logits, targets, reduction, inplace)  # here, and not as late as in the backward
        loss, m, d, n_valid = cross_entropy_forward(logits, targets, ignore_index, reduction)
        ctx.save_for_backward(logits, targets, m, d, n_valid)
        ctx.ignore_index, ctx.inplace = ignore_index, inplace
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        # True only under create_graph=True; `once_differentiable` would let the derivative vanish silently
        if torch.is_grad_enabled():
            raise RuntimeError("The fused loss has no second derivative, which create_graph=True asks for.")
        logits, *saved = ctx.saved_tensors
        dlogits = cross_entropy_backward(grad_output, logits, *saved, ctx.ignore_index, ctx.inplace)
        if ctx.inplace:  # autograd cannot see what a kernel writes; told, it refuses later uses of the logits
            torch.autograd.graph.increment_version(logits)
        return dlogits, None, None, None, None


class TritonCrossEntropyLoss(torch.nn.Module):
    """`loss(logits, targets)` of logits (..., V), targets (...): a scalar, or (...) with reduction "none".

    Rows whose target is ignore_index have loss and gradient 0 and do not count in the mean.  inplace=True
    writes the gradient over the logits; later uses of them, such as a second backward, then raise.
    """

    def __init__(self, ignore_index: int = -100, reduction: str = "mean", inplace: bool = False):
        super().__init__()
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction is {reduction!r}, expected one of {REDUCTIONS}: choose one.")
        self.ignore_index, self.reduction, self.inplace = ignore_index, reduction, inplace

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        args = (self.ignore_index, self.reduction, self.inplace)
        return FusedCrossEntropyFunction.apply(logits, targets, *args)
