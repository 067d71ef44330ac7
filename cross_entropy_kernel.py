"""Cross-entropy in Triton: the loss and its gradient, without a softmax tensor in memory.

    loss = F.cross_entropy(logits.float().view(-1, V), targets.view(-1), ignore_index=-100)

logits are (..., V), targets (...).

The maths, for one row, that is, one token's V logits (max and sum run over its columns j):

    m    = max logits[j]                       a reference point, so that no exponential overflows
    d    = sum exp(logits[j] - m)              the softmax's denominator
    loss = m - logits[target] + log(d)         = -log softmax(logits)[target]

Read literally that is one pass for m and another for d.  Online softmax (Milakov & Gimelshein,
2018) needs one pass: it walks the row in chunks, and when a chunk brings a larger maximum, it
rescales the sum so far to that maximum (README, lesson 4):

    m_new = max(m, max(chunk))
    d     = d * exp(m - m_new) + sum exp(chunk[j] - m_new)
    m     = m_new

Bytes moved per bf16 logit, if each kernel reads its inputs once and writes its result once:

                eager, as Hugging Face writes it                   fused   ratio
    forward     to fp32 6, log_softmax 8                      = 14     2     7.0
    backward    nll_loss (zeros) 4, log_softmax 12, to bf16 6 = 22     4     5.5
    memory      log-softmax, its gradient, the logits', fp32  = 12     2     6.0

The prediction: a sixth of the memory beyond the logits, and at least 6 times as fast.  At least,
because a row of 128,256 fp32 values outgrows a multiprocessor, so log_softmax reads it repeatedly.
(F.cross_entropy straight on bf16 logits moves 12 bytes and holds 6, but rounds each log-probability
to bf16.)

Part one of the file is the plain form, whole: both kernels and their autograd Function.  It is
right, and the benchmark measures it.  Part two has what the hardware asks for beyond it, one small
function for each thing, and then the kernels that are used.  Part three writes the gradient over
the logits: 4 bytes moved in all, none held.

New ideas of Triton, after those of rmsnorm_kernel.py:

1. A loop can carry state: m and d are ordinary variables, and from one chunk to the next they stay
   in registers.
2. `tl.load(..., other=-inf)`: lanes beyond the row's end get a value that changes no maximum and
   adds exp 0.
3. A block may have two dimensions, and `tl.max(block, axis=0)` is one maximum for each column.
4. A pointer may be None: Triton compiles a kernel without it.  A stride may be 0: all rows read one
   element.
5. A kernel may return at once, in part three.  Only the GPU knows whether grad_output is 1, and the
   host must not wait for the GPU.  So the host always launches the scaling kernel, and each program
   looks at the number first.

Limits: fp16, bf16 and fp32 logits of any finite value, or -inf; the vocabulary is the LAST
dimension (F.cross_entropy wants it second); no class weights, no label smoothing; the loss is fp32
(inf, as PyTorch's, where a target is more than 3.4e38 below the maximum); differentiable once.
Logits without a (n_rows, V) view, such as logits[:, :-1] of several sequences, are copied: to
predict the next token, shift the labels instead.  The launchers refuse other tensors with a
TypeError or a ValueError.
"""

import torch
import torch.nn.functional as F

import kernel_support as support
from kernel_support import FLOATS, FP32, INTEGERS, tl, triton


def cross_entropy_reference(logits, targets, ignore_index=-100, reduction="mean"):
    """Return the eager loss of logits (..., V) and targets (...), in the logits' dtype."""
    rows = logits.reshape(-1, logits.shape[-1])  # (n_rows, V)
    row_targets = targets.reshape(-1).long()  # (n_rows,)
    loss = F.cross_entropy(rows, row_targets, ignore_index=ignore_index, reduction=reduction)
    return loss.view(targets.shape) if reduction == "none" else loss


# ---- Part one, the plain form: the forward ---------------------------------------------------


# One program per row.  It reads the row once, chunk by chunk, and stores three numbers.
@triton.jit
def _plain_fwd_kernel(
    logits_ptr,  # (n_rows, n_cols), contiguous
    targets_ptr,  # (n_rows,)
    row_loss_ptr,  # (n_rows,) fp32
    stats_ptr,  # (n_rows, 2) fp32, for the backward: m, d
    n_cols,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * n_cols  # 32 bits end in row 16,744 of V = 128,256

    m = -float("inf")
    d = 0.0
    for first in range(0, n_cols, BLOCK_SIZE):
        cols = first + tl.arange(0, BLOCK_SIZE)
        logits = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(logits))
        d = d * tl.exp(m - m_new) + tl.sum(tl.exp(logits - m_new))
        m = m_new

    target_logit = tl.load(row_ptr + tl.load(targets_ptr + row)).to(tl.float32)
    tl.store(row_loss_ptr + row, m - target_logit + tl.log(d))
    tl.store(stats_ptr + 2 * row, m)
    tl.store(stats_ptr + 2 * row + 1, d)


# ---- The plain form: the backward ------------------------------------------------------------
#
# Given scale = dL/dloss of a row (grad_output, over n_valid for a mean), find dL/dlogits.
#
#   loss = m - logits[target] + log(d), where m is only a reference point: any m gives the same
#   loss, so m counts as a constant, and exp(logits[j] - m) is the derivative of d.  So
#
#   dloss/dlogits[j] = exp(logits[j] - m) / d  -  [j == target]            softmax minus one-hot
#   dlogits[j]       = (exp(logits[j] - m) / d  -  [j == target]) * scale


@triton.jit
def _plain_bwd_kernel(
    scale_ptr,  # (), of every row
    logits_ptr,  # (n_rows, n_cols), contiguous
    targets_ptr,  # (n_rows,)
    stats_ptr,  # (n_rows, 2) fp32
    dlogits_ptr,  # (n_rows, n_cols), contiguous
    n_cols,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0)
    start = row.to(tl.int64) * n_cols
    target = tl.load(targets_ptr + row)
    m = tl.load(stats_ptr + 2 * row)
    d = tl.load(stats_ptr + 2 * row + 1)
    scale = tl.load(scale_ptr)
    for first in range(0, n_cols, BLOCK_SIZE):
        cols = first + tl.arange(0, BLOCK_SIZE)
        mask = cols < n_cols
        logits = tl.load(logits_ptr + start + cols, mask=mask, other=-float("inf")).to(tl.float32)
        softmax = tl.exp(logits - m) / d
        dlogits = tl.where(cols == target, softmax - 1.0, softmax) * scale
        tl.store(dlogits_ptr + start + cols, dlogits, mask=mask)


class PlainCrossEntropyFunction(torch.autograd.Function):
    """`.apply(logits, targets)`: the mean loss by the plain kernels.

    logits (n_rows, V) are contiguous and without -inf, targets (n_rows,) lie in [0, V).  Nothing is
    checked.  The kernels that are used have the same blocks and warps.
    """

    @staticmethod
    def forward(ctx, logits, targets):
        n_rows, V = logits.shape
        row_loss = logits.new_empty(n_rows, dtype=torch.float32)  # (n_rows,) fp32
        stats = logits.new_empty((n_rows, 2), dtype=torch.float32)  # (n_rows, 2) fp32
        block_size = min(max(triton.next_power_of_2(V), 1024), 16_384 // logits.element_size())
        _plain_fwd_kernel[(n_rows,)](
            logits, targets, row_loss, stats, V, block_size, num_warps=4, enable_fp_fusion=True
        )
        ctx.save_for_backward(logits, targets, stats)
        return row_loss.mean()

    @staticmethod
    def backward(ctx, grad_output):
        logits, targets, stats = ctx.saved_tensors
        n_rows, V = logits.shape
        dlogits = torch.empty_like(logits)  # (n_rows, V)
        scale = grad_output / n_rows  # ()
        block_size = min(max(triton.next_power_of_2(V), 4096), 16_384)
        _plain_bwd_kernel[(n_rows,)](
            *(scale, logits, targets, stats, dlogits, V, block_size),
            num_warps=16,
            enable_fp_fusion=True,
        )
        return dlogits, None


# ---- Part two: what the hardware asks for beyond the plain form ------------------------------

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HUGE = tl.constexpr(2.0**31)  # of a maximum times LOG2E: see 3. and 5.


# 1. Alignment.  A thread loads 8 adjacent 16-bit logits at once, but only from a multiple of 16
# bytes, and where 8 does not divide V, rows begin anywhere.  So a row is cut: its body goes from
# its first multiple of 8 to its last; up to 7 columns before and 7 after are its edge
# (V = 50,257: 96 % of the copy rate, 66 % without).  `// 8 * 8` shows Triton what divides.


@triton.jit
def cut_row(ptr, row, row_stride, n_cols):
    """Return pointers to the row and its body, the body's length, the edge's columns and mask."""
    start = tl.cast(row, tl.int64) * row_stride  # 32 bits end in row 16,744 of V = 128,256
    n_before = tl.minimum(-start & 7, n_cols).to(tl.int32)
    n_body = (n_cols - n_before) // 8 * 8
    lane = tl.arange(0, 16)
    edge = tl.where(lane < 8, lane, n_cols - 16 + lane)
    in_edge = tl.where(lane < 8, lane < n_before, edge >= n_before + n_body)
    return ptr + start, ptr + (start + 7) // 8 * 8, n_body, edge, in_edge


# 2. Any target.  A target outside the row is not read.  It makes the row NaN, and the host need not
# wait for the GPU to see it.


@triton.jit
def load_target_logit(row_ptr, target, n_cols):
    """Return the target's logit, and whether the target is in the row."""
    in_row = (target >= 0) & (target < n_cols)
    return tl.load(row_ptr + target, mask=in_row, other=float("nan")).to(tl.float32), in_row


# 3. Fewer instructions.  exp(x - m) = 2**(x * LOG2E - m * LOG2E), and 2**t is what a GPU computes.
# So m is kept times LOG2E, its *unit*, and each exponential costs one multiply-add.  A multiply-add
# does not round its product, so 10,000 + x keeps the digits of x.  m itself is rounded, by up to
# half of the distance between two fp32 numbers.  But any m gives the same softmax, as long as
# 2**(rounding) is far from overflow: for |m| < 2**31 it is at most 2**64.  (Subtracting first, as
# in exp2((x - m) * LOG2E), would do for every m.  It is one instruction more for each logit, and in
# place, where instructions are the limit, takes 15 % longer on an H200.)


@triton.jit
def _exp(x, unit, m):
    """Return exp(x - m / unit), without a division."""
    return tl.exp2(tl.fma(x, unit, -m))


# 4. Threads that do not wait.  For the maximum of a chunk all threads of a program must meet.  So
# here a chunk is a tile of, say, 8 x 1,024 logits, with an m and a d for each of its columns.  A
# thread owns whole columns, and in the loop none waits for another.  They meet once, at the row's
# end (one H200: 475 us; with one m per chunk 531).  A column's sum so far is rescaled once per
# tile, of 8 rows: 1 + 1/8 exponentials per logit.


@triton.jit
def tile_of(TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr):
    """Return the numbers from 0 on as a block (TILE_ROWS, TILE_COLS)."""
    return tl.arange(0, TILE_ROWS)[:, None] * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]


@triton.jit
def _online_softmax(
    body_ptr, n_body, edge_logits, tile, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr
):
    """Return a row's m, times LOG2E, and d.  The edge's logits are loaded already."""
    # m begins finite: in a column of -inf (a masked vocabulary) -inf - -inf would be NaN.
    m = tl.full((TILE_COLS,), -HUGE, dtype=tl.float32)
    d = tl.zeros((TILE_COLS,), dtype=tl.float32)
    for first in range(0, n_body, TILE_ROWS * TILE_COLS):
        cols = first + tile
        logits = tl.load(body_ptr + cols, mask=cols < n_body, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(logits, axis=0) * LOG2E)
        d = d * tl.exp2(m - m_new) + tl.sum(_exp(logits, LOG2E, m_new[None, :]), axis=0)
        m = m_new
    # The threads meet: every sum is rescaled to the row's maximum, and the edge is added.
    m_row = tl.maximum(tl.max(m), tl.max(edge_logits) * LOG2E)
    d_row = tl.sum(d * tl.exp2(m - m_row)) + tl.sum(_exp(edge_logits, LOG2E, m_row))
    return m_row, d_row


# 5. Any magnitude.  Where the maximum is beyond 2**31 / LOG2E = 1.5e9, or the row is -inf, 3. does
# not hold.  But there neighbouring fp32 numbers are at least 64 apart, so exp(x - m) is 1 at the
# maximum and 0 elsewhere, and d is how often the maximum occurs.  2**(x - m) is 1 and 0 as well:
# the unit is 1, m the maximum, unrounded.


@triton.jit
def _count_maxima(body_ptr, n_body, edge_logits, BLOCK_SIZE: tl.constexpr):
    """Return a row's maximum, and how often it occurs."""
    m = tl.maximum(tl.max(edge_logits), LOWEST)
    for first in range(0, n_body, BLOCK_SIZE):
        cols = first + tl.arange(0, BLOCK_SIZE)
        logits = tl.load(body_ptr + cols, mask=cols < n_body, other=-float("inf")).to(tl.float32)
        m = tl.maximum(m, tl.max(logits))
    d = tl.sum(_is_maximum(edge_logits, m))
    for first in range(0, n_body, BLOCK_SIZE):
        cols = first + tl.arange(0, BLOCK_SIZE)
        logits = tl.load(body_ptr + cols, mask=cols < n_body, other=-float("inf")).to(tl.float32)
        d += tl.sum(_is_maximum(logits, m))
    return m, d


@triton.jit
def _is_maximum(x, m):
    """Return 1 or 0; NaN where x is NaN, or where x and m are inf."""
    return tl.where(x < m, 0.0, 1.0 + (x - m))


@triton.jit
def softmax_of_row(
    body_ptr, n_body, edge_logits, tile, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr
):
    """Return a row's m, d and m's unit."""
    m, d = _online_softmax(body_ptr, n_body, edge_logits, tile, TILE_ROWS, TILE_COLS)
    unit = tl.full((), LOG2E, dtype=tl.float32)
    if tl.abs(m) >= HUGE:
        unit = tl.full((), 1.0, dtype=tl.float32)
        # a quarter of the columns: this rare loop must not be the one that runs out of registers
        m, d = _count_maxima(body_ptr, n_body, edge_logits, TILE_COLS // 4)
    return m, d, unit


@triton.jit
def loss_of_row(target_logit, stats):
    """Return -log(exp(x - m / unit) / d) of the target's x, exactly 0 if the exponential is d."""
    m, d, unit = stats
    t = tl.fma(target_logit, unit, -m)
    near = tl.log(d / tl.exp2(t))
    to_log = tl.where(unit == 1.0, 1.0, LN2)  # from the unit to natural logarithms
    far = tl.log(d) - t * to_log  # where 2**t may fall out of fp32
    farther = m * to_log - target_logit + tl.log(d)  # where even target_logit * LOG2E does
    return tl.where(t > -100.0, near, tl.where(t == -float("inf"), farther, far))


# 6. Digits.  Subtracting before dividing spares a confident prediction (softmax near 1) one
# rounding of a number near 1:
#
#   dlogits[j] = (exp(logits[j] - m) - d * [j == target]) * (scale / d)
#
# Both m and d are saved (and m's unit), not their sum lse = m + log(d).  Rounded, near 10,000, lse
# would make the softmax 0.05 % wrong.
#
# 7. One comparison less for each logit: comparing every column with the target costs 15 % in place.
# So the target's own entry is stored last, and apart.
#
# 8. The cache.  Last tile first: it was read last, and is still there.  ".cs" stores without taking
# room there (-11 %).


@triton.jit
def store_dlogits(
    cut,  # what cut_row returns for the logits' row
    out_cut,  # and for the gradient's; in place the same
    edge_logits,
    target,
    target_logit,
    in_row,
    stats,  # m, d and m's unit
    scale,
    tile,
    TILE_SIZE: tl.constexpr,
):
    """Store a row's gradient."""
    m, d, unit = stats
    _row_ptr, body_ptr, _n_body, _edge, _in_edge = cut
    # What both cuts have is taken from the gradient's: torch.compile takes all that an address of
    # a store was computed from for written.
    out_row_ptr, out_body_ptr, n_body, edge, in_edge = out_cut
    target_ptr = out_row_ptr + target
    factor = tl.where(in_row, scale, float("nan")) / d
    tl.store(out_row_ptr + edge, _exp(edge_logits, unit, m) * factor, mask=in_edge)
    for done in range(0, n_body, TILE_SIZE):
        cols = (n_body - 1) // TILE_SIZE * TILE_SIZE - done + tile
        logits = tl.load(body_ptr + cols, mask=cols < n_body, other=-float("inf")).to(tl.float32)
        dlogits = _exp(logits, unit, m) * factor
        tl.store(out_body_ptr + cols, dlogits, mask=cols < n_body, cache_modifier=".cs")
    tl.debug_barrier()  # all threads have stored: now the target's entry goes over theirs
    tl.store(target_ptr, (_exp(target_logit, unit, m) - d) * factor, mask=in_row)


@triton.jit
def store_zeros(cut, tile, TILE_SIZE: tl.constexpr):
    """Store an ignored row's gradient.  A product with 0 would let a NaN of the row through."""
    row_ptr, body_ptr, n_body, edge, in_edge = cut
    tl.store(row_ptr + edge, 0.0, mask=in_edge)
    for first in range(0, n_body, TILE_SIZE):
        tl.store(body_ptr + first + tile, 0.0, mask=first + tile < n_body)


# ---- The kernels that are used ---------------------------------------------------------------


@triton.jit
def _cross_entropy_fwd_kernel(
    logits_ptr, logits_row_stride,  # (n_rows, n_cols)
    targets_ptr,  # (n_rows,)
    row_loss_ptr,  # (n_rows,) fp32
    stats_ptr,  # (n_rows, 3) fp32, for the backward: m, d, unit
    n_valid_ptr,  # (), or None unless the loss is a mean
    n_cols,
    ignore_index,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    tile = tile_of(TILE_ROWS, TILE_COLS)
    cut = cut_row(logits_ptr, row, logits_row_stride, n_cols)
    row_ptr, body_ptr, n_body, edge, in_edge = cut
    target = tl.load(targets_ptr + row)
    scale = 1.0 if n_valid_ptr is None else 1.0 / tl.load(n_valid_ptr)
    if target == ignore_index:  # not one of the row's logits is read
        tl.store(row_loss_ptr + row, 0.0 * scale)  # 0 * inf = NaN if no row counts, as in PyTorch
    else:
        target_logit, _in_row = load_target_logit(row_ptr, target, n_cols)
        edge_logits = tl.load(row_ptr + edge, mask=in_edge, other=-float("inf")).to(tl.float32)
        stats = softmax_of_row(body_ptr, n_body, edge_logits, tile, TILE_ROWS, TILE_COLS)
        tl.store(row_loss_ptr + row, loss_of_row(target_logit, stats) * scale)
        for i in tl.static_range(3):
            tl.store(stats_ptr + 3 * row + i, stats[i])


@triton.jit
def _cross_entropy_bwd_kernel(
    grad_output_ptr, grad_output_stride,  # (n_rows,); stride 0: all rows share one gradient
    logits_ptr, logits_row_stride,  # (n_rows, n_cols)
    targets_ptr,  # (n_rows,)
    stats_ptr,  # (n_rows, 3) fp32
    n_valid_ptr,  # (), or None unless the loss is a mean
    dlogits_ptr, dlogits_row_stride,  # row strides equal modulo 8, so that rows are cut alike
    n_cols,
    ignore_index,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    TILE_SIZE: tl.constexpr = TILE_ROWS * TILE_COLS
    tile = tile_of(TILE_ROWS, TILE_COLS)
    cut = cut_row(logits_ptr, row, logits_row_stride, n_cols)
    row_ptr, _body_ptr, _n_body, edge, in_edge = cut
    out_cut = cut_row(dlogits_ptr, row, dlogits_row_stride, n_cols)
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        store_zeros(out_cut, tile, TILE_SIZE)
    else:
        target_logit, in_row = load_target_logit(row_ptr, target, n_cols)
        edge_logits = tl.load(row_ptr + edge, mask=in_edge, other=-float("inf")).to(tl.float32)
        grad_output = tl.load(grad_output_ptr + row.to(tl.int64) * grad_output_stride)
        scale = grad_output.to(tl.float32)
        if n_valid_ptr is not None:
            scale = scale / tl.load(n_valid_ptr)
        m = tl.load(stats_ptr + 3 * row)
        d = tl.load(stats_ptr + 3 * row + 1)
        stats = m, d, tl.load(stats_ptr + 3 * row + 2)
        tl.debug_barrier()  # in place: all threads have the target's logit before one overwrites it
        store_dlogits(
            cut, out_cut, edge_logits, target, target_logit, in_row, stats, scale, tile, TILE_SIZE
        )


# ---- Launches on rows that were checked: nothing is validated here ---------------------------
#
#   rows, out_rows: logits and dlogits, (n_rows, V), or (..., V) contiguous, each with its row
#     stride, which may be any; n_rows may be 0.
#   targets: (n_rows,) int64 or int32, contiguous.
#   row_loss: (n_rows,) fp32, written.  stats: (n_rows, 3) fp32: m, d and m's unit.
#   n_valid: () int64, the rows that count in the mean, in these rows and elsewhere; None: no mean.
#   row_grads: (n_rows,), dL/dloss of each row, before the mean, with its stride; or () with 0.


def launch_forward(rows, targets, row_loss, stats, n_valid, ignore_index):
    """Write the rows' losses and statistics."""
    logits, n_rows = rows[0], targets.numel()
    if n_rows > 0:
        with support.on_device_of(logits):
            support.recordable(_cross_entropy_fwd_kernel)[(n_rows,)](
                *rows,
                targets,
                row_loss,
                stats,
                n_valid,
                logits.shape[-1],
                ignore_index,
                **tile_options(logits, 4),
                enable_fp_fusion=True,
            )


def launch_backward(row_grads, rows, targets, stats, n_valid, out_rows, ignore_index):
    """Write the rows' gradients, from the statistics that launch_forward has written.

    The row strides of rows and out_rows are equal modulo 8.  Both may be the same memory.
    """
    logits, n_rows = rows[0], targets.numel()
    if n_rows > 0:
        with support.on_device_of(logits):
            support.recordable(_cross_entropy_bwd_kernel)[(n_rows,)](
                *row_grads,
                *rows,
                targets,
                stats,
                n_valid,
                *out_rows,
                logits.shape[-1],
                ignore_index,
                **tile_options(logits, 16, 4),
                enable_fp_fusion=True,
            )


def tile_options(logits, warps, tile_rows=None):
    """Return the options of a launch; a thread has 8 columns of the tile.

    Best of 4 to 32 warps and 4 to 16 rows on an H200.
    """
    tile_cols = 256 * warps
    n_tile_rows = -(-logits.shape[-1] // tile_cols)  # of a tile that holds the whole row
    enough = n_tile_rows if n_tile_rows <= 2 else 4 if n_tile_rows <= 4 else 16
    tile_rows = min(tile_rows or 16 // logits.element_size(), enough)
    return {"TILE_ROWS": tile_rows, "TILE_COLS": tile_cols, "num_warps": warps}


# ---- Without autograd ------------------------------------------------------------------------


def check_logits(logits, targets, reduction="mean", *others) -> int:
    """Refuse what the kernels cannot compute; return the number of rows.

    others: further arguments of check_tensors.
    """
    lengths = support.check_tensors(
        ("logits", logits, FLOATS, ("...", "V")), ("targets", targets, INTEGERS, ("...",)), *others
    )
    if lengths["V"] == 0:
        given = f"logits has shape {tuple(logits.shape)}"
        raise ValueError(f"{given}, expected (..., V) with V >= 1: reshape it.")
    check_reduction(reduction)
    return lengths["n_rows"]


def check_reduction(reduction):
    if reduction not in ("mean", "sum", "none"):
        expected = "expected 'mean', 'sum' or 'none': choose one."
        raise ValueError(f"reduction is {reduction!r}, {expected}")


def count_valid(targets, ignore_index, reduction):
    """Return the number of rows that count, () int64; None unless the loss is a mean."""
    return (targets.long() != ignore_index).sum() if reduction == "mean" else None


def reduced(row_loss, reduction):
    """Return the loss from the rows' losses (...), which the kernels have divided for a mean."""
    if reduction == "mean" and row_loss.numel() == 0:
        return row_loss.mean()  # NaN, as in PyTorch
    return row_loss if reduction == "none" else row_loss.sum()


def row_gradients(grad_output):
    """Return grad_output, () or (...), as rows, and the stride between two of them."""
    row_grads = grad_output if grad_output.ndim < 2 else grad_output.reshape(-1)
    return row_grads, row_grads.stride(0) if row_grads.ndim else 0


def _forward(logits, targets, ignore_index=-100, reduction="mean", launch=None):
    """Return the forward's results; not yet written without a `launch`."""
    n_rows = check_logits(logits, targets, reduction)
    row_loss = logits.new_empty(targets.shape, dtype=torch.float32)  # (...) fp32
    stats = logits.new_empty((n_rows, 3), dtype=torch.float32)  # (n_rows, 3) fp32
    n_valid = count_valid(targets, ignore_index, reduction)
    if launch is not None:
        rows = support.as_rows(logits)
        launch(rows, targets.contiguous(), row_loss, stats, n_valid, ignore_index)
    return reduced(row_loss, reduction), stats, n_valid


@support.operator(
    "tutorial::cross_entropy_forward",
    "(Tensor logits, Tensor targets, int ignore_index=-100, str reduction='mean') -> Tensor[]",
    _forward,
    present=lambda x, t, ignored=-100, reduction="mean": (True, True, reduction == "mean"),
    launches_are_recordable=True,
)
def cross_entropy_forward(logits, targets, ignore_index=-100, reduction="mean"):
    """Return loss, stats and n_valid of logits (..., V) and targets (...), of any strides.

    loss is () fp32, or (...) with reduction "none".  stats (n_rows, 3) fp32 holds m, d and m's unit
    of each row for the backward.  n_valid () int64 is the number of rows that count in a mean; None
    unless the loss is a mean.
    """
    return _forward(logits, targets, ignore_index, reduction, launch_forward)


def _new_dlogits(logits, logits_row_stride):
    """Return memory for the gradient (..., V), with rows cut like the logits', and its stride."""
    V = logits.shape[-1]
    row_stride = V + (logits_row_stride - V) % 8
    dlogits = logits.new_empty_strided((logits.numel() // V, V), (row_stride, 1))
    return dlogits.view(logits.shape), row_stride


@support.operator(
    "tutorial::cross_entropy_backward",
    "(Tensor grad_output, Tensor logits, Tensor targets, Tensor stats, Tensor? n_valid, "
    "int ignore_index=-100) -> Tensor",
    lambda grad_output, logits, *others: _new_dlogits(logits, support.as_rows(logits)[1])[0],
    launches_are_recordable=True,
)
def cross_entropy_backward(grad_output, logits, targets, stats, n_valid, ignore_index=-100):
    """Return dlogits (..., V) in logits' dtype, from what a forward was given and returned.

    grad_output is () or (...).
    """
    of_rows = ("...",) if grad_output.ndim else ()
    others = ("grad_output", grad_output, FLOATS, of_rows), ("stats", stats, FP32, ("n_rows", 3))
    check_logits(logits, targets, "mean", *others)
    rows = support.as_rows(logits)
    out_rows = _new_dlogits(logits, rows[1])
    row_grads, saved = row_gradients(grad_output), (targets.contiguous(), stats, n_valid)
    launch_backward(row_grads, rows, *saved, out_rows, ignore_index)
    return out_rows[0]


# ---- For autograd ----------------------------------------------------------------------------


class FusedCrossEntropyFunction(torch.autograd.Function):
    """`.apply(logits, targets, ignore_index, reduction)`: the loss, connected to autograd."""

    @staticmethod
    def forward(ctx, logits, targets, ignore_index, reduction):
        loss, stats, n_valid = cross_entropy_forward(logits, targets, ignore_index, reduction)
        ctx.save_for_backward(logits, targets, stats, n_valid)
        ctx.ignore_index = ignore_index
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        support.refuse_second_derivative("TritonCrossEntropyLoss")
        dlogits = cross_entropy_backward(grad_output, *ctx.saved_tensors, ctx.ignore_index)
        return dlogits, None, None, None


# ---- Part three, in place: the gradient replaces the logits ----------------------------------
#
#   logits.copy_(torch.autograd.grad(loss, logits)[0])            # in the forward, by one kernel
#
# When the forward has read a row, it knows the row's m and d, and so all that the gradient needs
# except grad_output, which nearly always is 1.  So the forward reads the row again, from the GPU's
# cache, and writes the gradient for a grad_output of 1 over the logits.  The backward multiplies by
# grad_output, where it is not 1, and writes the zeros of ignored rows.
#
# Bytes moved per bf16 logit, and held beyond the logits:
#
#                   part two                   in place
#       forward     read 2                = 2  read 2, write 2 = 4
#       backward    read 2, write 2       = 4                    0
#       memory      the gradient          = 2                    0
#
# The prediction: 1.5 times as fast, without memory beyond the logits.
#
# The programs are few, each in a loop over rows: then the cache still holds the row that a program
# has just read.  Autograd does not see what a kernel writes.  `increment_version` tells it.  After
# that autograd refuses every backward that needs the old logits.
#
# Further limits: the logits are contiguous, and no leaf that requires a gradient; the backward runs
# once; not in fp16, where the gradient may vanish before the loss scale multiplies it.  A
# grad_output other than 1 rounds a bf16 gradient a second time.


@triton.jit(do_not_specialize=["n_rows"])  # changes with every batch, and must not compile anew
def _cross_entropy_inplace_kernel(
    logits_ptr, logits_row_stride,  # (n_rows, n_cols): logits in, gradient out, but in ignored rows
    targets_ptr,  # (n_rows,)
    row_loss_ptr,  # (n_rows,) fp32
    n_valid_ptr,  # (), or None unless the loss is a mean
    n_rows,
    n_cols,
    ignore_index,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):  # fmt: skip
    TILE_SIZE: tl.constexpr = TILE_ROWS * TILE_COLS
    tile = tile_of(TILE_ROWS, TILE_COLS)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        cut = cut_row(logits_ptr, row, logits_row_stride, n_cols)
        row_ptr, body_ptr, n_body, edge, in_edge = cut
        target = tl.load(targets_ptr + row)
        scale = 1.0 if n_valid_ptr is None else 1.0 / tl.load(n_valid_ptr)
        if target == ignore_index:
            tl.store(row_loss_ptr + row, 0.0 * scale)
        else:
            target_logit, in_row = load_target_logit(row_ptr, target, n_cols)
            edge_logits = tl.load(row_ptr + edge, mask=in_edge, other=-float("inf")).to(tl.float32)
            stats = softmax_of_row(body_ptr, n_body, edge_logits, tile, TILE_ROWS, TILE_COLS)
            tl.store(row_loss_ptr + row, loss_of_row(target_logit, stats) * scale)
            store_dlogits(
                cut, cut, edge_logits, target, target_logit, in_row, stats, scale, tile, TILE_SIZE
            )


# The backward: times grad_output, and zeros in ignored rows.
@triton.jit
def _cross_entropy_scale_kernel(
    grad_output_ptr, grad_output_stride,  # (n_rows,); stride 0: all rows share one gradient
    dlogits_ptr, dlogits_row_stride,  # (n_rows, n_cols)
    targets_ptr,  # (n_rows,)
    n_cols,
    ignore_index,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    TILE_SIZE: tl.constexpr = TILE_ROWS * TILE_COLS
    tile = tile_of(TILE_ROWS, TILE_COLS)
    cut = cut_row(dlogits_ptr, row, dlogits_row_stride, n_cols)
    row_ptr, body_ptr, n_body, edge, in_edge = cut
    target = tl.load(targets_ptr + row)
    grad_output = tl.load(grad_output_ptr + row.to(tl.int64) * grad_output_stride)
    scale = grad_output.to(tl.float32)
    if target == ignore_index:
        store_zeros(cut, tile, TILE_SIZE)
    elif scale != 1.0:  # only the GPU knows whether it is 1: the host launches without looking
        edge_dlogits = tl.load(row_ptr + edge, mask=in_edge).to(tl.float32)
        tl.store(row_ptr + edge, edge_dlogits * scale, mask=in_edge)
        for first in range(0, n_body, TILE_SIZE):
            cols = first + tile
            dlogits = tl.load(body_ptr + cols, mask=cols < n_body).to(tl.float32)
            tl.store(body_ptr + cols, dlogits * scale, mask=cols < n_body)


def launch_inplace(rows, targets, row_loss, n_valid, ignore_index):
    """Write the rows' losses and, over the logits, their gradients for a grad_output of 1.

    Ignored rows keep their logits: launch_scale zeroes them.
    """
    logits, n_rows = rows[0], targets.numel()
    if n_rows > 0:
        n_programs, options = _inplace_options(logits)
        with support.on_device_of(logits):
            support.recordable(_cross_entropy_inplace_kernel)[(min(n_rows, n_programs),)](
                *rows,
                targets,
                row_loss,
                n_valid,
                n_rows,
                logits.shape[-1],
                ignore_index,
                **options,
                enable_fp_fusion=True,
            )


def launch_scale(row_grads, out_rows, targets, ignore_index):
    """Multiply what launch_inplace has left by grad_output, and store zeros in ignored rows."""
    dlogits, n_rows = out_rows[0], targets.numel()
    if n_rows > 0:
        with support.on_device_of(dlogits):
            _cross_entropy_scale_kernel[(n_rows,)](
                *row_grads,
                *out_rows,
                targets,
                dlogits.shape[-1],
                ignore_index,
                **tile_options(dlogits, 4, 4),
                enable_fp_fusion=True,
            )


def _inplace_options(logits):
    """Return the number of programs, and the options of a launch.

    The programs are few, so that the cache holds their rows until they are overwritten.
    """
    if not logits.is_cuda:
        return 3, tile_options(logits, 4)
    gpu = torch.cuda.get_device_properties(logits.device)
    is_long = logits.shape[-1] > 65_536
    # 16 tile rows are 7 to 11 % faster than 8 on an H200.  On a Blackwell GPU, or in fp32, more
    # than these spill registers.
    tile_rows = 8 if is_long else 4
    if logits.element_size() == 4:
        tile_rows = 8
    elif (gpu.major, gpu.minor) == (9, 0):
        tile_rows = 16
    n_programs = gpu.multi_processor_count * (1 if is_long else 2)
    return n_programs, tile_options(logits, 16 if is_long else 8, tile_rows)


def _inplace_result(logits, targets, ignore_index=-100, reduction="mean"):
    """Return the loss, not yet written."""
    check_logits(logits, targets, reduction)
    shape = targets.shape if reduction == "none" else ()
    return logits.new_empty(shape, dtype=torch.float32)


@support.operator(
    "tutorial::cross_entropy_inplace",
    "(Tensor(a!) logits, Tensor targets, int ignore_index=-100, str reduction='mean') -> Tensor",
    _inplace_result,
    mutates=("logits",),
    launches_are_recordable=True,
)
def cross_entropy_inplace(logits, targets, ignore_index=-100, reduction="mean"):
    """Return the loss of logits (..., V) and targets (...), which overwrites the logits.

    The loss is () fp32, or (...) with reduction "none".  Ignored rows keep their logits until
    cross_entropy_scale zeroes them.  Logits that are a leaf which requires a gradient, or not
    contiguous, are refused.
    """
    check_logits(logits, targets, reduction)
    support.refuse_to_overwrite(logits=logits)
    row_loss = logits.new_empty(targets.shape, dtype=torch.float32)  # (...) fp32
    n_valid = count_valid(targets, ignore_index, reduction)
    rows = logits, logits.shape[-1]
    launch_inplace(rows, targets.contiguous(), row_loss, n_valid, ignore_index)
    return reduced(row_loss, reduction)


@support.takes_negated("dlogits")
def cross_entropy_scale(grad_output, dlogits, targets, ignore_index=-100):
    """Multiply what cross_entropy_inplace has left in the logits by grad_output, () or (...).

    Ignored rows become zeros.
    """
    of_rows = ("...",) if grad_output.ndim else ()
    check_logits(dlogits, targets, "mean", ("grad_output", grad_output, FLOATS, of_rows))
    rows = dlogits, dlogits.shape[-1]
    ignore_index = support.number("ignore_index", ignore_index, int)
    launch_scale(row_gradients(grad_output), rows, targets.contiguous(), ignore_index)


class InplaceCrossEntropyFunction(torch.autograd.Function):
    """`.apply(logits, targets, ignore_index, reduction)`: the loss, which overwrites the logits.

    Autograd raises for a use of the old logits whose backward needs them, a second loss on them,
    and a second backward.  torch.compile notices only uses before the loss.
    """

    @staticmethod
    def forward(ctx, logits, targets, ignore_index, reduction):
        if torch.compiler.is_compiling():
            support.refuse_to_overwrite(logits=logits)  # inside of the operator nothing is a leaf
        loss = cross_entropy_inplace(logits, targets, ignore_index, reduction)
        if not torch.compiler.is_compiling():  # there the operator says what it writes
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits, targets)
        ctx.ignore_index = ignore_index
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        support.refuse_second_derivative("TritonCrossEntropyLoss")
        dlogits, targets = ctx.saved_tensors
        if torch.compiler.is_compiling():  # the compiler writes this over the logits
            row_grads = grad_output.expand(targets.shape).unsqueeze(-1)
            ignored = (targets == ctx.ignore_index).unsqueeze(-1)
            dlogits = (dlogits.float() * row_grads).masked_fill(ignored, 0).to(dlogits.dtype)
            return dlogits, None, None, None
        cross_entropy_scale(grad_output, dlogits, targets, ctx.ignore_index)
        torch.autograd.graph.increment_version(dlogits)
        return dlogits.detach(), None, None, None


# ---- As a module -----------------------------------------------------------------------------


class TritonCrossEntropyLoss(torch.nn.Module):
    """`loss(logits, targets)` of logits (..., V), targets (...): () fp32, or (...) with "none".

    logits are fp16, bf16 or fp32, targets int64 or int32.  Rows whose target is ignore_index have
    loss and gradient 0 and do not count in the mean.  Any other target outside [0, V) makes its row
    NaN.  reduction: "mean", "sum" or "none".

    inplace=True saves the memory of a gradient: where the logits require a gradient, the loss
    writes it over them.  AFTER THE LOSS THE LOGITS ARE THEIR GRADIENT: `logits.argmax()` or an
    accuracy computed then is nonsense, and no error tells.  Compute such things before the loss, or
    pass logits.clone(), or leave inplace at False.  (fp16 logits stay as they are: their gradient
    may be too small for fp16 before the loss scale multiplies it.)

    Raises:
        TypeError, ValueError: the kernels cannot take a tensor, or the reduction is wrong; or with
            inplace=True the logits are a leaf that requires a gradient, or not contiguous.
    """

    def __init__(self, ignore_index: int = -100, reduction: str = "mean", inplace: bool = False):
        super().__init__()
        self.ignore_index = support.number("ignore_index", ignore_index, int)
        self.reduction = reduction
        self.inplace = inplace

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        function = FusedCrossEntropyFunction
        inplace = self.inplace and torch.is_grad_enabled() and logits.requires_grad
        if inplace and logits.dtype != torch.float16:
            function = InplaceCrossEntropyFunction
        return function.apply(logits, targets, self.ignore_index, self.reduction)
