"""Linear + cross-entropy: from hidden states to loss and gradients, without the logits in memory.

    loss = F.cross_entropy(hidden @ weight.T, targets)   # (..., H), (V, H), (...)

The maths: three matrix products, between them the loss of cross_entropy_kernel.py.  For n tokens:

    logits  = hidden @ weight.T                      (n, V)
    dlogits = (softmax(logits) - one_hot) / n_valid  (n, V)     a mean's; over the logits, in place
    dhidden = dlogits @ weight                       (n, H)
    dweight = dlogits.T @ hidden                     (V, H)

What the products cost, 2 H FLOP per logit each, and what the loss adds to them.  By its data sheet
an H200 computes 206 bf16 FLOP (989 TFLOP/s) in the time in which it moves one byte (4.8 TB/s), so
both can be counted in bytes:

    per logit, H = 4096              eager, logits.float()   eager, bf16 logits   here
    products, 6 H = 24,576 FLOP      119                     119                  119
    the loss, forward and backward    44                      12                    4
    together                         163                     131                  123
    memory beside both gradients      12                       6                    2, of one chunk
    8,192 tokens, V = 128,256         12.6 GB                  6.3 GB               0.5 GB, of 2,048

The prediction: at best 1.33 times as fast as logits.float() and 1.07 times as bf16 logits, whose
memory is 12 times ours.  Most ideas concern the host, and the one new kernel mostly does nothing:

1. Know when NOT to write a kernel.  The products are 119 of 123, and cuBLAS runs them at the GPU's
   ceiling.  A kernel that multiplies and takes the loss tile by tile stores no logit, but its
   backward needs them again: a fourth product, which takes the time of 40 bytes, to save 10.  So
   library calls multiply, and our own kernels run between them.
2. Chunks.  A token's loss needs no other token, so the logits exist for 2,048 to 8,192 tokens at a
   time, in one buffer that every chunk overwrites; `out=` and `beta` make the products write where
   the result belongs.
3. The gradients in the forward.  The next chunk overwrites a chunk's logits, so the forward also
   computes the chunk's share of dhidden and dweight.  Only the backward knows grad_output, so the
   shares are for a grad_output of 1.
4. A kernel that returns at once.  grad_output nearly always is 1, but the host must not wait for
   the GPU to tell.  So the host always launches `_scale_kernel`, and the GPU finds that there is
   nothing to do.  (`loss / 4`, for example, does cost a pass over both gradients.)
5. Rows without a target cost nothing.  A prompt's tokens have a loss and gradients of 0, so the
   products leave these rows out: of N rows with n targets the products take n / N of the time.
   Only the GPU knows where the targets are, and the host must not wait to learn their number.  But
   the caller, who made the batch, can count them (`max_targets`).  So the GPU moves the rows with a
   target to the front, and the host takes that many.  If max_targets is too small, all results are
   NaN.  No gradient ever lacks some of its rows.

Eager bf16 also rounds logits, dlogits and results to bf16.  Here more digits are lost: dweight is a
sum over chunks.  In weight's dtype it is rounded once per chunk, which is the default for up to 4
chunks (V * H values of 2 bytes).  More chunks are summed in fp32 (4 bytes, 6 while the sum is
rounded at the end), so that the error does not grow.  A grad_output that is no power of two rounds
the gradients once more.

Limits: those of cross_entropy_kernel.py; hidden and weight of one dtype; no bias.  In two cases the
backward computes the gradients, from logits computed anew (a fourth product): with
reduction="none", because dweight needs each row's grad_output inside the product; and in fp16,
because a mean's gradient may vanish unless the loss scale comes first.  A second call of the
backward does the same.  To sum a 16-bit dweight in fp32 on a GPU takes PyTorch 2.11 (2.8 cannot).
"""

import torch

import cross_entropy_kernel
import kernel_support as support
from cross_entropy_kernel import (
    count_valid,
    launch_backward,
    launch_forward,
    launch_inplace,
    launch_scale,
    reduced,
)
from kernel_support import FLOATS, INTEGERS, SAME, tl, triton

# Rows of a chunk, by default.  8,192 rows of LLaMA 3.1 8B on an H200, ms by chunk size: 1,024:
# 44.8, 2,048: 39.9, 4,096: 39.7, 8,192: 38.4.  The products alone: 37.6.
MIN_CHUNK = 2048
MAX_CHUNK = 8192
MAX_ROUNDINGS = 4  # of dweight in its own dtype; with more chunks it is summed in fp32
FEW = 15 / 16  # if fewer of the rows can have a target, the other rows are left out; not tuned
MAX_PROGRAMS = 1024  # of the scale kernel: few, so that all run at once; not tuned


def linear_cross_entropy_reference(hidden, weight, targets, ignore_index=-100, reduction="mean"):
    """Return the eager loss of hidden (..., H), weight (V, H) and targets (...), in their dtype."""
    logits = torch.nn.functional.linear(hidden, weight)  # (..., V)
    return cross_entropy_kernel.cross_entropy_reference(logits, targets, ignore_index, reduction)


# ---- The one kernel --------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_rows"])  # changes with every batch, and must not compile anew
def _scale_kernel(
    t_ptr,  # (n_rows, n_cols), contiguous: multiplied in place
    factor_ptr,  # ()
    n_rows,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:  # only the GPU knows: the host launches this without looking
        for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
            row_ptr = t_ptr + tl.cast(row, tl.int64) * n_cols
            for first in range(0, n_cols, BLOCK_SIZE):
                cols = first + tl.arange(0, BLOCK_SIZE)
                scaled = tl.load(row_ptr + cols, mask=cols < n_cols).to(tl.float32) * factor
                tl.store(row_ptr + cols, scaled, mask=cols < n_cols)


def scale_gradient(t, factor):
    """Multiply t (n_rows, H), contiguous, by factor () in place; nothing is checked."""
    n_rows, n_cols = t.shape
    factor = factor.resolve_neg()
    if t.numel() > 0:
        n_programs = min(n_rows, MAX_PROGRAMS)
        block_size = min(4096, triton.next_power_of_2(n_cols))
        with support.on_device_of(t):
            _scale_kernel[(n_programs,)](
                t, factor, n_rows, n_cols, block_size, num_warps=4, enable_fp_fusion=True
            )


# ---- Without autograd ------------------------------------------------------------------------


def _check(hidden, weight, targets, reduction, chunk_size, max_targets):
    """Refuse what the launcher cannot compute."""
    lengths = support.check_tensors(
        ("hidden", hidden, FLOATS, ("...", "H")),
        ("weight", weight, SAME, ("V", "H")),
        ("targets", targets, INTEGERS, ("...",)),
    )
    if lengths["V"] == 0 or lengths["H"] == 0:
        expected = "(V, H) with V and H >= 1: reshape it."
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected {expected}")
    cross_entropy_kernel.check_reduction(reduction)
    if chunk_size is not None and chunk_size < 1:
        expected = "a number of rows, at least 1, or None"
        raise ValueError(f"chunk_size is {chunk_size}, expected {expected}: raise it.")
    if max_targets is not None:
        n_rows = lengths["n_rows"]
        is_number = type(max_targets) in (int, torch.SymInt)  # the compiler's are SymInts
        if not is_number or not 0 <= max_targets <= n_rows:
            expected = f"a number of rows from 0 to {n_rows}, or None"
            advice = "count the targets that are not ignored."
            raise ValueError(f"max_targets is {max_targets!r}, expected {expected}: {advice}")


# The loop over chunks is one operator.  torch.compile would unroll a loop, anew for each number of
# chunks, and would itself decide how many chunks' logits are in memory at a time.


def _results(
    hidden, weight, targets,
    ignore_index=-100, reduction="mean",
    need_dhidden=True, need_dweight=True,
    chunk_size=None, grad_output=None, max_targets=None,
):  # fmt: skip
    """Return the results, not yet written."""
    _check(hidden, weight, targets, reduction, chunk_size, max_targets)
    shape = targets.shape if reduction == "none" else ()
    loss = hidden.new_empty(shape, dtype=torch.float32)
    dhidden = hidden.new_empty(hidden.shape) if need_dhidden else None
    return loss, dhidden, weight.new_empty(weight.shape) if need_dweight else None


def _present(hidden, weight, targets, ignore_index=-100, reduction="mean", *others, **named):
    """Return whether there are a loss, dhidden and dweight."""
    needs = dict(zip(("need_dhidden", "need_dweight"), others)) | named
    return True, needs.get("need_dhidden", True), needs.get("need_dweight", True)


@support.operator(
    "tutorial::linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor targets, int ignore_index=-100, str reduction='mean', "
    "bool need_dhidden=True, bool need_dweight=True, int? chunk_size=None, "
    "Tensor? grad_output=None, SymInt? max_targets=None) -> Tensor[]",
    _results,
    present=_present,
)
@torch.no_grad()
def linear_cross_entropy_forward(
    hidden, weight, targets,
    ignore_index=-100, reduction="mean",
    need_dhidden=True, need_dweight=True,
    chunk_size=None, grad_output=None, max_targets=None,
):  # fmt: skip
    """Return loss, dhidden and dweight; None in place of a gradient that is not needed.

    Args:
        hidden: (..., H), fp16, bf16 or fp32, with any strides.
        weight: (V, H), of the same dtype, with any strides.
        targets: (...), int64 or int32.
        chunk_size: rows of logits in memory at a time; None: 2,048 to 8,192.
        grad_output: () or (...) fp32, the gradient of the loss; None: 1.
        max_targets: at most so many targets are not ignore_index; None: unknown.

    Returns:
        loss: () fp32, or (...) with reduction "none".
        dhidden, dweight: in their tensors' shapes and dtypes.
        All results are NaN if there are more than max_targets, unless that is nearly all rows.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """
    _check(hidden, weight, targets, reduction, chunk_size, max_targets)
    if max_targets is not None and max_targets < FEW * targets.numel():
        options = reduction, need_dhidden, need_dweight, chunk_size
        return _of_rows_with_target(
            max_targets, hidden, weight, targets, grad_output, ignore_index, *options
        )
    rows = hidden.reshape(-1, hidden.shape[-1])  # (n_rows, H)
    row_targets = targets.reshape(-1).contiguous()
    n_rows, V = len(rows), len(weight)
    chunk_rows = _chunk_rows(n_rows, chunk_size)
    fp32_dweight = -(-n_rows // chunk_rows) > MAX_ROUNDINGS
    n_valid = count_valid(row_targets, ignore_index, reduction)  # of all chunks
    row_loss = hidden.new_empty(n_rows, dtype=torch.float32)

    row_grads = None
    dhidden = hidden.new_empty(hidden.shape) if need_dhidden else None
    if need_dweight:
        dweight = weight.new_empty(weight.shape, dtype=torch.float32 if fp32_dweight else None)
    overwrite = grad_output is None and (need_dhidden or need_dweight)
    if need_dhidden or need_dweight:
        grad_of_loss = hidden.new_ones((), dtype=torch.float32) if overwrite else grad_output
        grad_of_loss = grad_of_loss.resolve_neg()
        row_grads = grad_of_loss.expand(targets.shape).reshape(-1)  # a scalar: a view of stride 0
    # The products want each row to begin at a multiple of 16 bytes: not so where V is 50,257.
    buffer = hidden.new_empty((min(chunk_rows, n_rows), V + -V % 8))

    for first_row in range(0, max(n_rows, 1), chunk_rows):  # of no rows there is a chunk, too
        size = min(chunk_rows, n_rows - first_row)  # the last chunk may be shorter
        chunk = 0, first_row, size  # for narrow: of the rows, from which on, how many
        x = rows.narrow(*chunk)  # (size, H)
        logits = buffer.narrow(0, 0, size).narrow(1, 0, V)
        torch.mm(x, weight.t(), out=logits)
        chunk_grads = None if row_grads is None else row_grads.narrow(*chunk)
        of_chunk = row_targets.narrow(*chunk), row_loss.narrow(*chunk), chunk_grads
        _loss_and_dlogits(logits, *of_chunk, n_valid, ignore_index, overwrite)
        dlogits = logits
        if need_dhidden:
            torch.mm(dlogits, weight, out=dhidden.view(rows.shape).narrow(*chunk))
        if need_dweight:
            _add_product(dweight, dlogits.t(), x, beta=0 if first_row == 0 else 1)

    del buffer, logits, dlogits  # their memory may become the rounded dweight's
    dweight = dweight.to(weight.dtype) if need_dweight else None
    return reduced(row_loss.view(targets.shape), reduction), dhidden, dweight


def _of_rows_with_target(
    max_targets, hidden, weight, targets, grad_output, ignore_index, reduction, *options
):
    """Return the same, computed of max_targets rows, among which are all that have a target."""
    rows, row_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    ignored = row_targets == ignore_index  # (n_rows,)
    # First the rows with a target, then the others, each in their order.  At least one is taken: if
    # max_targets is 0 and a row has a target, that row makes the results NaN.
    taken = torch.argsort(ignored, stable=True)[: max(max_targets, 1)]
    too_many = (~ignored).sum() > max_targets  # (), on the GPU: the host would have to wait for it
    outside = -1 if ignore_index != -1 else -2  # such a target makes loss and gradients NaN
    if grad_output is not None and grad_output.ndim > 0:
        grad_output = grad_output.reshape(-1)[taken]
    row_targets = row_targets[taken].masked_fill(too_many, outside)
    inputs = rows[taken], weight, row_targets, ignore_index, reduction
    loss, dhidden, dweight = linear_cross_entropy_forward(*inputs, *options, grad_output)
    if reduction == "none":
        loss = loss.new_zeros(len(rows)).index_copy(0, taken, loss).view(targets.shape)
    if dhidden is not None:
        zeros = torch.zeros_like(rows, memory_format=torch.contiguous_format)
        dhidden = zeros.index_copy_(0, taken, dhidden).view(hidden.shape)
    return loss, dhidden, dweight


def _chunk_rows(n_rows, chunk_size=None):
    """Return the rows of each chunk but the last: few chunks, of about equal size."""
    if chunk_size is None:
        chunk_size = min(max(MIN_CHUNK, -(-n_rows // (MAX_ROUNDINGS * 128)) * 128), MAX_CHUNK)
    n_rows = max(n_rows, 1)
    n_chunks = -(-n_rows // chunk_size)  # rounded up
    # 128: a product's tiles have as many rows
    return min(chunk_size, -(-n_rows // (n_chunks * 128)) * 128)


def _loss_and_dlogits(logits, targets, row_loss, row_grads, n_valid, ignore_index, overwrite):
    """Write the rows' losses to row_loss and, if there are row_grads, dlogits over the logits."""
    rows = logits, logits.stride(0)
    row_grads = None if row_grads is None else (row_grads, row_grads.stride(0))
    if overwrite:
        launch_inplace(rows, targets, row_loss, n_valid, ignore_index)
        launch_scale(row_grads, rows, targets, ignore_index)  # by 1: only zeroes ignored rows
        return
    stats = logits.new_empty((len(logits), 3), dtype=torch.float32)
    launch_forward(rows, targets, row_loss, stats, n_valid, ignore_index)
    if row_grads is not None:
        launch_backward(row_grads, rows, targets, stats, n_valid, rows, ignore_index)


def _add_product(total, a, b, beta):
    """Set total to beta * total + a @ b, rounded once; a beta of 0 does not read the old total."""
    if total.dtype != a.dtype and a.device.type != "cpu":
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:  # a CPU has no product of two bf16 matrices with an fp32 result
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


# ---- Autograd --------------------------------------------------------------------------------


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss, connected to autograd: `.apply` takes the arguments of `forward` after ctx."""

    @staticmethod
    def forward(
        ctx, hidden, weight, targets,
        ignore_index, reduction, chunk_size, max_targets, grad_enabled,
    ):  # fmt: skip
        ctx.options, ctx.rows = (ignore_index, reduction), (chunk_size, max_targets)
        now = grad_enabled and reduction != "none" and hidden.dtype != torch.float16
        needed = [now and need for need in ctx.needs_input_grad[:2]]
        inputs = hidden, weight, targets, *ctx.options, *needed, chunk_size
        loss, *gradients = linear_cross_entropy_forward(*inputs, None, max_targets)
        ctx.gradients = gradients if now else None
        ctx.save_for_backward(hidden, weight, targets)
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        support.refuse_second_derivative("TritonLinearCrossEntropyLoss")
        hidden, weight, targets = ctx.saved_tensors  # raises if one of them has been changed since
        # ctx lets go of the gradients: a gradient that only autograd holds becomes the parameter's
        # .grad without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            chunk_size, max_targets = ctx.rows
            inputs = hidden, weight, targets, *ctx.options, *ctx.needs_input_grad[:2], chunk_size
            _, *gradients = linear_cross_entropy_forward(*inputs, grad_output, max_targets)
        elif torch.compiler.is_compiling():  # the compiler writes this over the gradients
            gradients = [
                None if dx is None else (dx.float() * grad_output).to(dx.dtype) for dx in gradients
            ]
        else:
            for gradient in gradients:
                if gradient is not None:
                    scale_gradient(gradient.view(-1, gradient.shape[-1]), grad_output)
        return *gradients, *[None] * 6


class TritonLinearCrossEntropyLoss(torch.nn.Module):
    """`loss(hidden, weight, targets)` of hidden (..., H), weight (V, H), targets (...).

    The loss is () fp32, or (...) with reduction "none".  Rows whose target is ignore_index have
    loss and gradient 0 and do not count in the mean.  linear_cross_entropy_forward says what
    chunk_size and max_targets are.  max_targets leaves the other rows out of the
    products if these are at least a sixteenth.  Under autocast the products are in autocast's
    dtype.  Where gradients are needed, the loss holds them until the backward.

    Raises:
        TypeError, ValueError: as linear_cross_entropy_forward.
    """

    def __init__(self, ignore_index=-100, reduction="mean", chunk_size=None):
        super().__init__()
        ignore_index = support.number("ignore_index", ignore_index, int)
        if chunk_size is not None:
            chunk_size = support.number("chunk_size", chunk_size, int)
        self.args = ignore_index, reduction, chunk_size

    def forward(self, hidden, weight, targets, max_targets=None) -> torch.Tensor:
        # as F.linear does
        if not hidden.is_meta and torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        options = *self.args, max_targets, torch.is_grad_enabled()  # in the Function it never is
        return LinearCrossEntropyFunction.apply(hidden, weight, targets, *options)
