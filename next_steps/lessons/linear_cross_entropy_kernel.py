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
memory is 12 times ours.  The ideas this time are mostly the host's, and the one new kernel does
nothing as often as it can:

1. Know when NOT to write a kernel.  The products are 119 of 123, and cuBLAS runs them at the GPU's
   ceiling.  A kernel that multiplies and takes the loss tile by tile never stores a logit, but its
   backward needs them again: a fourth product, which takes the time of 40 bytes, to save 10.  So:
   library calls, and our own kernels between them.
2. Chunks.  A token's loss needs no other token, so the logits exist for 2,048 to 8,192 tokens at a
   time, in one buffer that every chunk overwrites; `out=` and `beta` make the products write where
   the result belongs.
3. The gradients in the forward.  A chunk's logits are gone once the next chunk comes, so its share
   of dhidden and dweight is computed at once, as if grad_output, which only the backward knows,
   were 1.
4. A kernel that returns at once.  grad_output nearly always is 1, but the host must not wait for
   the GPU to tell.  It launches `_scale_kernel` regardless, and the GPU finds that there is nothing
   to do.  (`loss / 4`, for example, does cost a pass over both gradients.)
5. Rows without a target cost nothing.  A prompt's tokens have loss and gradients of 0, and their
   logits are computed for that.  Leave them out: of N rows with n targets the products take n / N
   of the time, half for half.  Where the targets are, only the GPU knows; to learn their number
   from it the host would have to wait, and it need not: who made the batch has counted them
   (`max_targets`).  So the GPU moves the rows with a target to the front, and the host takes that
   many.  If it was told too few, all results are NaN, never a gradient without some of its rows.

Where digits are lost, beyond what eager bf16 loses too (logits, dlogits and results are rounded to
bf16): dweight is a sum over chunks.  In weight's dtype it is rounded once per chunk; the default
does that for up to 4 chunks (V * H values of 2 bytes), and sums more of them in fp32 (4 bytes, 6
while it is rounded at the end), so that the error does not grow.  A grad_output that is no power of
two rounds the gradients once more.

Limits: those of cross_entropy_kernel.py; hidden and weight of one dtype; no bias.  With
reduction="none" dweight needs each row's grad_output inside the product, and a mean's gradient in
fp16 may vanish unless the loss scale comes first: there the backward computes the gradients, from
logits computed anew (a fourth product); so it does when called a second time.  To sum a 16-bit
dweight in fp32 on a GPU takes PyTorch 2.11 (2.8 cannot).
"""

import torch

from cross_entropy_inplace_kernel import launch_inplace, launch_scale
from cross_entropy_kernel import (
    check_reduction,
    count_valid,
    cross_entropy_reference,
    launch_backward,
    launch_forward,
    reduced,
)
from kernel_support import (
    FLOATS,
    INTEGERS,
    check_tensors,
    on_device_of,
    operator,
    refuse_second_derivative,
    tl,
    triton,
)

# Rows, unless told.  8,192 rows of LLaMA 3.1 8B on an H200, by chunk size: 512: 46 ms, 1,024: 41.7,
# 2,048: 40.5, 4,096: 40.2, 8,192: 40.2 (torch 43.1).
MIN_CHUNK = 2048
MAX_CHUNK = 8192
MAX_ROUNDINGS = 4  # of dweight in its own dtype; with more chunks it is summed in fp32
FEW = 15 / 16  # of the rows: if no more can have a target, the others are left out; not tuned
# of the scale kernel: so few that they all run at once, enough to keep a GPU busy; not tuned
MAX_PROGRAMS = 1024


def linear_cross_entropy_reference(hidden, weight, targets, ignore_index=-100, reduction="mean"):
    """Eager loss of hidden (..., H), weight (V, H) and targets (...).

    It is computed in their own dtype; float64 stays float64.
    """
    logits = torch.nn.functional.linear(hidden, weight)  # (..., V)
    return cross_entropy_reference(logits, targets, ignore_index, reduction)


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
    """Multiply t (n_rows, H), contiguous, by factor () in place; a factor of 1 costs a launch.

    t is fp16, bf16 or fp32, factor of any dtype, and both are on one device; nothing is checked.
    """
    n_rows, n_cols = t.shape
    if t.numel() > 0:
        n_programs = min(n_rows, MAX_PROGRAMS)
        block_size = min(4096, triton.next_power_of_2(n_cols))
        with on_device_of(t):
            _scale_kernel[(n_programs,)](
                t, factor, n_rows, n_cols, block_size, num_warps=4, enable_fp_fusion=True
            )


# ---- Without autograd ------------------------------------------------------------------------


def _check(hidden, weight, targets, reduction, chunk_size, max_targets):
    """Refuse what cannot be computed, before any pointer is handed to a kernel."""
    lengths = check_tensors(
        ("hidden", hidden, FLOATS, ("...", "H")),
        ("weight", weight, FLOATS, ("V", "H")),
        ("targets", targets, INTEGERS, ("...",)),
    )
    if hidden.dtype != weight.dtype:
        given = f"hidden is {hidden.dtype} and weight {weight.dtype}"
        raise TypeError(f"{given}, expected one dtype: convert one of them.")
    if lengths["V"] == 0 or lengths["H"] == 0:
        given = f"weight has shape {tuple(weight.shape)}"
        raise ValueError(f"{given}, expected (V, H) with V and H >= 1: reshape it.")
    check_reduction(reduction)
    if chunk_size is not None and chunk_size < 1:
        expected = "a number of rows, at least 1, or None"
        raise ValueError(f"chunk_size is {chunk_size}, expected {expected}: raise it.")
    if max_targets is not None:
        n_rows = lengths["n_rows"]
        # the compiler's numbers are SymInts
        is_number = isinstance(max_targets, int | torch.SymInt)
        if isinstance(max_targets, bool) or not is_number or not 0 <= max_targets <= n_rows:
            expected = f"a number of rows from 0 to {n_rows}, or None"
            advice = "count the targets that are not ignored."
            raise ValueError(f"max_targets is {max_targets!r}, expected {expected}: {advice}")


# The loop over chunks is one operator.  Compiled itself it would be unrolled, and unrolled anew for
# every other number of chunks; and the compiler, not `out=`, would decide how many chunks' logits
# there are at a time.


def _results(
    hidden,
    weight,
    targets,
    ignore_index=-100,
    reduction="mean",
    need_dhidden=True,
    need_dweight=True,
    chunk_size=None,
    fp32_dweight=None,
    grad_output=None,
    max_targets=None,
):
    """The results, not yet written."""
    _check(hidden, weight, targets, reduction, chunk_size, max_targets)
    shape = targets.shape if reduction == "none" else ()
    loss = hidden.new_empty(shape, dtype=torch.float32)
    dhidden = hidden.new_empty(hidden.shape) if need_dhidden else None
    return loss, dhidden, weight.new_empty(weight.shape) if need_dweight else None


def _present(hidden, weight, targets, ignore_index=-100, reduction="mean", *others, **named):
    """Whether there are a loss, dhidden and dweight."""
    needs = dict(zip(("need_dhidden", "need_dweight"), others)) | named
    return True, needs.get("need_dhidden", True), needs.get("need_dweight", True)


@operator(
    "tutorial::linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor targets, int ignore_index=-100, str reduction='mean', "
    "bool need_dhidden=True, bool need_dweight=True, int? chunk_size=None, "
    "bool? fp32_dweight=None, Tensor? grad_output=None, SymInt? max_targets=None) -> Tensor[]",
    _results,
    present=_present,
)
@torch.no_grad()
def linear_cross_entropy_forward(
    hidden,
    weight,
    targets,
    ignore_index=-100,
    reduction="mean",
    need_dhidden=True,
    need_dweight=True,
    chunk_size=None,
    fp32_dweight=None,
    grad_output=None,
    max_targets=None,
):
    """Return loss, dhidden and dweight; in place of a gradient that is not needed None.

    Args:
        hidden: (..., H), fp16, bf16 or fp32, with any strides.
        weight: (V, H), of the same dtype, with any strides.
        targets: (...), int64 or int32.
        chunk_size: rows of logits in memory at a time; None: 2,048 to 8,192.
        fp32_dweight: sum dweight in fp32 (True), in its own dtype (False), or (None) the former
            beyond 4 chunks.
        grad_output: () or (...) fp32, for which the gradients are; None: for 1.
        max_targets: no more targets than that are not ignore_index; None: nobody has counted.

    Returns:
        loss: () fp32, or (...) with reduction "none".
        dhidden, dweight: in their tensors' shapes and dtypes.
        All of them hold NaN if there are more than max_targets, unless that is nearly all rows.

    Raises:
        TypeError, ValueError: a tensor's type, dtype, shape or device, the reduction, the
            chunk_size or max_targets is wrong.
    """
    _check(hidden, weight, targets, reduction, chunk_size, max_targets)
    if max_targets is not None and max_targets < FEW * targets.numel():
        return _of_rows_with_target(
            max_targets,
            hidden,
            weight,
            targets,
            grad_output,
            ignore_index=ignore_index,
            reduction=reduction,
            need_dhidden=need_dhidden,
            need_dweight=need_dweight,
            chunk_size=chunk_size,
            fp32_dweight=fp32_dweight,
        )
    rows = hidden.reshape(-1, hidden.shape[-1])  # (n_rows, H)
    row_targets = targets.reshape(-1).contiguous()
    n_rows, V = len(rows), len(weight)
    chunk_rows = _chunk_rows(n_rows, chunk_size)
    if fp32_dweight is None:
        fp32_dweight = -(-n_rows // chunk_rows) > MAX_ROUNDINGS
    n_valid = count_valid(row_targets, ignore_index, reduction)  # of all chunks
    row_loss = hidden.new_empty(n_rows, dtype=torch.float32)

    dhidden, dweight, row_grads = None, None, None
    if need_dhidden:
        dhidden = hidden.new_empty(hidden.shape)
    if need_dweight:
        dweight = weight.new_empty(weight.shape, dtype=torch.float32 if fp32_dweight else None)
    overwrite = grad_output is None and (need_dhidden or need_dweight)
    if need_dhidden or need_dweight:
        grad_of_loss = hidden.new_ones((), dtype=torch.float32) if overwrite else grad_output
        row_grads = grad_of_loss.expand(targets.shape).reshape(-1)  # a scalar: a view of stride 0
    # For the products every row should begin at a multiple of 16 bytes, which it does not where V
    # is 50,257.
    buffer = hidden.new_empty((min(chunk_rows, n_rows), V + -V % 8))

    for first_row in range(0, max(n_rows, 1), chunk_rows):  # of no rows there is a chunk, too
        size = min(chunk_rows, n_rows - first_row)  # the last chunk may be shorter
        chunk = 0, first_row, size  # for narrow: of the rows, from which on, how many
        x = rows.narrow(*chunk)  # (size, H)
        logits = buffer.narrow(0, 0, size).narrow(1, 0, V)
        torch.mm(x, weight.t(), out=logits)
        chunk_grads = None if row_grads is None else row_grads.narrow(*chunk)
        _loss_and_dlogits(
            logits,
            row_targets.narrow(*chunk),
            row_loss.narrow(*chunk),
            chunk_grads,
            n_valid,
            ignore_index,
            overwrite,
        )
        dlogits = logits
        if need_dhidden:
            torch.mm(dlogits, weight, out=dhidden.view(rows.shape).narrow(*chunk))
        if need_dweight:
            _add_product(dweight, dlogits.t(), x, beta=0 if first_row == 0 else 1)

    del buffer, logits, dlogits  # their memory may become the rounded dweight's
    if need_dweight:
        dweight = dweight.to(weight.dtype)
    return reduced(row_loss.view(targets.shape), reduction), dhidden, dweight


def _of_rows_with_target(
    max_targets, hidden, weight, targets, grad_output, *, ignore_index, **options
):  # fmt: skip
    """The same, computed for max_targets rows, among which are all that have a target."""
    rows, row_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    ignored = row_targets == ignore_index  # (n_rows,)
    # First the rows with a target, then the others, each in their order.  At least one is taken:
    # the one that tells if there should be none.
    taken = torch.argsort(ignored, stable=True)[: max(max_targets, 1)]
    too_many = (~ignored).sum() > max_targets  # (), on the GPU: to look at it would be to wait
    outside = -1 if ignore_index != -1 else -2  # such a target makes loss and gradients NaN
    if grad_output is not None and grad_output.ndim > 0:
        grad_output = grad_output.reshape(-1)[taken]
    loss, dhidden, dweight = linear_cross_entropy_forward(
        rows[taken],
        weight,
        row_targets[taken].masked_fill(too_many, outside),
        ignore_index,
        grad_output=grad_output,
        **options,
    )
    if options["reduction"] == "none":
        loss = loss.new_zeros(len(rows)).index_copy(0, taken, loss).view(targets.shape)
    if dhidden is not None:
        zeros = torch.zeros_like(rows, memory_format=torch.contiguous_format)
        dhidden = zeros.index_copy_(0, taken, dhidden).view(hidden.shape)
    return loss, dhidden, dweight


def _chunk_rows(n_rows, chunk_size=None):
    """Rows of all chunks but the last: as few chunks as chunk_size allows, about equally large."""
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
        launch_inplace(*rows, targets, row_loss, n_valid, ignore_index)
        launch_scale(*row_grads, *rows, targets, ignore_index)  # by 1: only zeroes ignored rows
        return
    stats = logits.new_empty((len(logits), 3), dtype=torch.float32)
    launch_forward(*rows, targets, row_loss, stats, n_valid, ignore_index)
    if row_grads is not None:
        launch_backward(*row_grads, *rows, targets, stats, n_valid, *rows, ignore_index)


def _add_product(total, a, b, beta):
    """total = beta * total + a @ b, rounded once; with a beta of 0 the old total is not read."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.device.type != "cpu":
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:  # a CPU has no product of two bf16 matrices with an fp32 result
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


# ---- Autograd --------------------------------------------------------------------------------


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss, for autograd: `.apply` takes what `forward` does after ctx."""

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        targets,
        ignore_index,
        reduction,
        chunk_size,
        fp32_dweight,
        max_targets,
        grad_enabled,
    ):
        ctx.options = ignore_index, reduction
        ctx.chunks, ctx.max_targets = (chunk_size, fp32_dweight), max_targets
        now = grad_enabled and reduction != "none" and hidden.dtype != torch.float16
        needed = [now and need for need in ctx.needs_input_grad[:2]]
        inputs = hidden, weight, targets, *ctx.options, *needed, *ctx.chunks
        loss, *gradients = linear_cross_entropy_forward(*inputs, None, max_targets)
        ctx.gradients = gradients if now else None
        ctx.save_for_backward(hidden, weight, targets)
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivative("TritonLinearCrossEntropyLoss")
        hidden, weight, targets = ctx.saved_tensors  # raises if one of them has been changed since
        # Handed out once: autograd makes of a gradient that nobody else holds the parameter's
        # .grad, without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            inputs = hidden, weight, targets, *ctx.options, *ctx.needs_input_grad[:2], *ctx.chunks
            results = linear_cross_entropy_forward(*inputs, grad_output, ctx.max_targets)
            gradients = results[1:]
        elif torch.compiler.is_compiling():  # the compiler writes this over the gradients
            gradients = [
                None if dx is None else (dx.float() * grad_output).to(dx.dtype) for dx in gradients
            ]
        else:
            for gradient in gradients:
                if gradient is not None:
                    scale_gradient(gradient.view(-1, gradient.shape[-1]), grad_output)
        return *gradients, *[None] * 7


class TritonLinearCrossEntropyLoss(torch.nn.Module):
    """`loss(hidden, weight, targets)` of hidden (..., H), weight (V, H), targets (...).

    It is () fp32, or (...) with reduction "none".  Rows whose target is ignore_index have loss and
    gradient 0 and do not count in the mean.  chunk_size: rows of logits in memory at a time, by
    default 2,048 to 8,192; fp32_dweight: sum the weight's gradient in fp32 (True), in its own dtype
    (False), or the former beyond 4 chunks.  Under autocast the products are in autocast's dtype.
    Where gradients are needed, the loss holds them until the backward.

    max_targets: no more targets than that are not ignore_index; the other rows are left out of the
    products, if these are at least a sixteenth.  With more targets loss and gradients are NaN.

    Raises:
        TypeError, ValueError: as linear_cross_entropy_forward.
    """

    def __init__(self, ignore_index=-100, reduction="mean", chunk_size=None, fp32_dweight=None):
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.chunk_size = chunk_size
        self.fp32_dweight = fp32_dweight

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        max_targets: int | None = None,
    ) -> torch.Tensor:
        # as F.linear does
        if not hidden.is_meta and torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        options = self.ignore_index, self.reduction, self.chunk_size, self.fp32_dweight
        options = *options, max_targets, torch.is_grad_enabled()  # in the Function it never is
        return LinearCrossEntropyFunction.apply(hidden, weight, targets, *options)
