"""Cross-entropy in Triton: the loss and its gradient, without a softmax tensor in memory.

    loss = F.cross_entropy(logits.float().view(-1, V), targets.view(-1), ignore_index=-100)

logits are (..., V), targets (...).

The maths, for one row, that is, one token's V logits (max and sum run over its columns j):

    m    = max logits[j]                       a reference point, so that no exponential overflows
    d    = sum exp(logits[j] - m)              the softmax's denominator
    loss = m - logits[target] + log(d)         = -log softmax(logits)[target]

Read literally that is one pass for m and another for d.  Online softmax (Milakov & Gimelshein,
2018) needs one: it walks the row in chunks, and when a chunk brings a larger maximum, it rescales
the sum so far to it (README, step 4):

    m_new = max(m, max(chunk))
    d     = d * exp(m - m_new) + sum exp(chunk[j] - m_new)
    m     = m_new

Bytes moved per bf16 logit, if each kernel reads its inputs once and writes its result once:

                eager, as Hugging Face writes it                   fused   ratio   in place
    forward     to fp32 6, log_softmax 8                      = 14     2     7.0          4
    backward    nll_loss (zeros) 4, log_softmax 12, to bf16 6 = 22     4     5.5          0
    memory      log-softmax, its gradient, the logits', fp32  = 12     2     6.0          0

The prediction: a sixth of the memory beyond the logits, and at least 6 times as fast; at least,
because a row of 128,256 fp32 values outgrows a multiprocessor, so log_softmax reads it repeatedly.
(F.cross_entropy straight on bf16 logits: 12 bytes moved, 6 held, but each log-probability rounded
to bf16.)  In place, the forward knows m and d, reads the logits again, now from the GPU's cache,
and writes the gradient over them.

The file goes from the maths to the hardware, twice: for the forward, and for the backward.  Each
time the plain kernel comes first.  It is right, and the benchmark measures it ("ours, the plain
form").  Then comes what the hardware asks for beyond it, one small function for each thing, and
then the kernel that is used.  The gradient in place, last, is made of the same functions.

New ideas of Triton, after those of rmsnorm_kernel.py:

1. A loop can carry state: m and d are ordinary variables, and from one chunk to the next they stay
   in registers.
2. `tl.load(..., other=-inf)`: lanes beyond the row's end get a value that changes no maximum and
   adds exp 0.
3. A block may have two dimensions, and `tl.max(block, axis=0)` is one maximum for each column.
4. A pointer may be None: Triton compiles a kernel without it.  A stride may be 0: all rows read one
   element.

Limits: fp16, bf16 and fp32 logits of any finite value, or -inf; the vocabulary is the LAST
dimension (F.cross_entropy wants it second); no class weights, no label smoothing; the loss is fp32
(inf, as PyTorch's, where a target is more than 3.4e38 below the maximum); differentiable once.
Logits without a (n_rows, V) view, such as logits[:, :-1] of several sequences, are copied: to
predict the next token, shift the labels instead.
"""

import contextlib
import os

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if not torch.cuda.is_available():  # no GPU: run on the CPU; must precede `import triton`
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

with contextlib.suppress(ModuleNotFoundError):  # beside this file; else a CPU truncates bf16
    import kernel_support  # noqa: F401

INTERPRETED = triton.knobs.runtime.interpret  # are the kernels run on the CPU, by the interpreter?
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HUGE = tl.constexpr(2.0**31)  # of a maximum times LOG2E, see _softmax_of_row


def cross_entropy_reference(logits, targets, ignore_index=-100, reduction="mean"):
    """Eager loss of logits (..., V), targets (...), in the logits' dtype; float64 stays float64."""
    rows = logits.reshape(-1, logits.shape[-1])  # (n_rows, V)
    row_targets = targets.reshape(-1).long()  # (n_rows,)
    loss = F.cross_entropy(rows, row_targets, ignore_index=ignore_index, reduction=reduction)
    return loss.view(targets.shape) if reduction == "none" else loss


# ---------------------------------------------------------------- the forward, in its plain form


# One program per row: it reads the row once, chunk by chunk, and stores three numbers.
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


# ---------------------------------------------------------------- what the hardware asks for beyond

# 1. Alignment.  A thread loads 8 adjacent 16-bit logits at once, but only from a multiple of 16
# bytes, and where 8 does not divide V, rows begin anywhere.  So a row is cut: from its first
# multiple of 8 to its last is its body, up to 7 columns before and 7 after are its edge
# (V = 50,257: 96 % of the copy rate, 66 % without).  `// 8 * 8` shows Triton what divides.


@triton.jit
def _cut_row(ptr, row, row_stride, n_cols):
    """Pointers to the row and to its body, the body's length, the edge's columns and their mask."""
    start = tl.cast(row, tl.int64) * row_stride  # 32 bits end in row 16,744 of V = 128,256
    n_before = tl.minimum(-start & 7, n_cols).to(tl.int32)
    n_body = (n_cols - n_before) // 8 * 8
    lane = tl.arange(0, 16)
    edge = tl.where(lane < 8, lane, n_cols - 16 + lane)
    in_edge = tl.where(lane < 8, lane < n_before, edge >= n_before + n_body)
    return ptr + start, ptr + (start + 7) // 8 * 8, n_body, edge, in_edge


# 2. Any target.  One outside the row is not read.  It makes the row NaN, and the host need not wait
# for the GPU to see it.


@triton.jit
def _load_target_logit(row_ptr, target, n_cols):
    """The target's logit, and whether the target is in the row."""
    in_row = (target >= 0) & (target < n_cols)
    return tl.load(row_ptr + target, mask=in_row, other=float("nan")).to(tl.float32), in_row


# 3. Fewer instructions.  exp(x - m) = 2**(x * LOG2E - m * LOG2E), and 2**t is what a GPU computes.
# So m is kept times LOG2E, its *unit*, and each exponential costs one multiply-add.  That does not
# round its product, so 10,000 + x keeps the digits of x.  m itself is rounded, by up to half of the
# distance between two fp32 numbers; but any m gives the same softmax, as long as 2**(rounding) is
# far from overflow: for |m| < 2**31 it is at most 2**64.  (Subtracting first, as in
# exp2((x - m) * LOG2E), would do for every m.  It is one instruction more for each logit, and in
# place, where instructions are the limit, takes 15 % longer on an H200.)


@triton.jit
def _exp(x, unit, m):
    """exp(x - m / unit), without a division."""
    return tl.exp2(tl.fma(x, unit, -m))


# 4. Threads that do not wait.  For the maximum of a chunk all threads of a program must meet.  So
# here a chunk is a tile of, say, 8 x 1,024 logits, with an m and a d for each of its columns.  A
# thread owns whole columns, and in the loop none waits for another; they meet once, at the row's
# end (one H200: 475 us; with one m per chunk 531).  A column's sum so far is rescaled once per
# tile, of 8 rows: 1 + 1/8 exponentials per logit.


@triton.jit
def _tile_of(TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr):
    """The numbers from 0 on as a block (TILE_ROWS, TILE_COLS)."""
    return tl.arange(0, TILE_ROWS)[:, None] * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]


@triton.jit
def _online_softmax(
    body_ptr,
    n_body,
    edge_logits,  # loaded already
    tile,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    """A row's m, times LOG2E, and d."""
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
    """A row's maximum, and how often it occurs."""
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
    """1 or 0; NaN where x is NaN, or inf as m is."""
    return tl.where(x < m, 0.0, 1.0 + (x - m))


@triton.jit
def _softmax_of_row(
    body_ptr,
    n_body,
    edge_logits,
    tile,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    """A row's m, d and m's unit."""
    m, d = _online_softmax(body_ptr, n_body, edge_logits, tile, TILE_ROWS, TILE_COLS)
    unit = tl.full((), LOG2E, dtype=tl.float32)
    if tl.abs(m) >= HUGE:
        unit = tl.full((), 1.0, dtype=tl.float32)
        # a quarter of the columns: this rare loop must not be the one that runs out of registers
        m, d = _count_maxima(body_ptr, n_body, edge_logits, TILE_COLS // 4)
    return m, d, unit


@triton.jit
def _loss_of_row(target_logit, m, d, unit):
    """-log(exp(x - m / unit) / d) of the target's x, exactly 0 if the exponential is d."""
    t = tl.fma(target_logit, unit, -m)
    near = tl.log(d / tl.exp2(t))
    to_log = tl.where(unit == 1.0, 1.0, LN2)  # from the unit to natural logarithms
    far = tl.log(d) - t * to_log  # where 2**t may fall out of fp32
    farther = m * to_log - target_logit + tl.log(d)  # where even target_logit * LOG2E does
    return tl.where(t > -100.0, near, tl.where(t == -float("inf"), farther, far))


# ---------------------------------------------------------------- the forward that is used


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
    tile = _tile_of(TILE_ROWS, TILE_COLS)
    cut = _cut_row(logits_ptr, row, logits_row_stride, n_cols)
    row_ptr, body_ptr, n_body, edge, in_edge = cut
    target = tl.load(targets_ptr + row)
    scale = 1.0 if n_valid_ptr is None else 1.0 / tl.load(n_valid_ptr)
    if target == ignore_index:  # not one of the row's logits is read
        tl.store(row_loss_ptr + row, 0.0 * scale)  # 0 * inf = NaN if no row counts, as in PyTorch
    else:
        target_logit, _in_row = _load_target_logit(row_ptr, target, n_cols)
        edge_logits = tl.load(row_ptr + edge, mask=in_edge, other=-float("inf")).to(tl.float32)
        m, d, unit = _softmax_of_row(body_ptr, n_body, edge_logits, tile, TILE_ROWS, TILE_COLS)
        tl.store(row_loss_ptr + row, _loss_of_row(target_logit, m, d, unit) * scale)
        tl.store(stats_ptr + 3 * row, m)
        tl.store(stats_ptr + 3 * row + 1, d)
        tl.store(stats_ptr + 3 * row + 2, unit)


# ---------------------------------------------------------------- the backward, in its plain form

# Given scale = dL/dloss of a row (grad_output, over n_valid for a mean), find dL/dlogits.
#
#   loss = m - logits[target] + log(d), where m is only a reference point: any m gives the same
#   loss, so it counts as a constant, and exp(logits[j] - m) is the derivative of d.  So
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


# ---------------------------------------------------------------- what the hardware asks for beyond

# 6. Digits.  Subtracting before dividing spares a confident prediction (softmax near 1) one
# rounding of a number near 1:
#
#   dlogits[j] = (exp(logits[j] - m) - d * [j == target]) * (scale / d)
#
# Both m and d are saved (and m's unit), not their sum lse = m + log(d): rounded, near 10,000, it
# would make the softmax 0.05 % wrong.
#
# 7. One comparison less for each logit: comparing every column with the target costs 15 % in place.
# So the target's own entry is stored last, and apart.
#
# 8. The cache.  Last tile first: it was read last, and is still there.  ".cs" stores without taking
# room there (-11 %).


@triton.jit
def _store_dlogits(
    out_body_ptr,  # in place it is body_ptr
    body_ptr,
    n_body,
    m,
    unit,
    factor,  # scale / d
    tile,
    TILE_SIZE: tl.constexpr,
):
    """Store exp(x - m / unit) * factor for the logits x of a row's body."""
    for done in range(0, n_body, TILE_SIZE):
        cols = (n_body - 1) // TILE_SIZE * TILE_SIZE - done + tile
        logits = tl.load(body_ptr + cols, mask=cols < n_body, other=-float("inf")).to(tl.float32)
        dlogits = _exp(logits, unit, m) * factor
        tl.store(out_body_ptr + cols, dlogits, mask=cols < n_body, cache_modifier=".cs")


@triton.jit
def _store_target_dlogit(target_ptr, in_row, target_logit, m, d, unit, factor):
    """Store the target's own entry over what _store_dlogits has left there."""
    tl.debug_barrier()  # all threads have stored
    target_dlogit = (_exp(target_logit, unit, m) - d) * factor
    tl.store(target_ptr, target_dlogit, mask=in_row)


@triton.jit
def _store_zeros(row_ptr, body_ptr, n_body, edge, in_edge, tile, TILE_SIZE: tl.constexpr):
    """An ignored row's gradient.  Not a product with 0: that would let a NaN of the row through."""
    tl.store(row_ptr + edge, 0.0, mask=in_edge)
    for first in range(0, n_body, TILE_SIZE):
        tl.store(body_ptr + first + tile, 0.0, mask=first + tile < n_body)


# ---------------------------------------------------------------- the backward that is used


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
    tile = _tile_of(TILE_ROWS, TILE_COLS)
    cut = _cut_row(logits_ptr, row, logits_row_stride, n_cols)
    row_ptr, body_ptr, n_body, edge, in_edge = cut
    out_row_ptr, out_body_ptr, _, _, _ = _cut_row(dlogits_ptr, row, dlogits_row_stride, n_cols)
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        _store_zeros(out_row_ptr, out_body_ptr, n_body, edge, in_edge, tile, TILE_SIZE)
    else:
        target_logit, in_row = _load_target_logit(row_ptr, target, n_cols)
        edge_logits = tl.load(row_ptr + edge, mask=in_edge, other=-float("inf")).to(tl.float32)
        grad_output = tl.load(grad_output_ptr + row.to(tl.int64) * grad_output_stride)
        scale = grad_output.to(tl.float32)
        if n_valid_ptr is not None:
            scale = scale / tl.load(n_valid_ptr)
        m = tl.load(stats_ptr + 3 * row)
        d = tl.load(stats_ptr + 3 * row + 1)
        unit = tl.load(stats_ptr + 3 * row + 2)
        target_ptr = out_row_ptr + target
        factor = tl.where(in_row, scale, float("nan")) / d
        tl.store(out_row_ptr + edge, _exp(edge_logits, unit, m) * factor, mask=in_edge)
        _store_dlogits(out_body_ptr, body_ptr, n_body, m, unit, factor, tile, TILE_SIZE)
        _store_target_dlogit(target_ptr, in_row, target_logit, m, d, unit, factor)


# ---------------------------------------------------------------- the gradient in place

# The forward computes the loss, and then the gradient, for a grad_output of 1, over the logits.  A
# program takes several rows, one after another: few programs, so that the cache still holds what
# each of them has just read.


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
    tile = _tile_of(TILE_ROWS, TILE_COLS)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        cut = _cut_row(logits_ptr, row, logits_row_stride, n_cols)
        row_ptr, body_ptr, n_body, edge, in_edge = cut
        target = tl.load(targets_ptr + row)
        scale = 1.0 if n_valid_ptr is None else 1.0 / tl.load(n_valid_ptr)
        if target == ignore_index:
            tl.store(row_loss_ptr + row, 0.0 * scale)
        else:
            target_logit, in_row = _load_target_logit(row_ptr, target, n_cols)
            edge_logits = tl.load(row_ptr + edge, mask=in_edge, other=-float("inf")).to(tl.float32)
            m, d, unit = _softmax_of_row(body_ptr, n_body, edge_logits, tile, TILE_ROWS, TILE_COLS)
            tl.store(row_loss_ptr + row, _loss_of_row(target_logit, m, d, unit) * scale)
            target_ptr = row_ptr + target
            factor = tl.where(in_row, scale, float("nan")) / d
            tl.store(row_ptr + edge, _exp(edge_logits, unit, m) * factor, mask=in_edge)
            _store_dlogits(body_ptr, body_ptr, n_body, m, unit, factor, tile, TILE_SIZE)
            _store_target_dlogit(target_ptr, in_row, target_logit, m, d, unit, factor)


# The backward: the logits are their gradient already, but for grad_output and the ignored rows.


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
    tile = _tile_of(TILE_ROWS, TILE_COLS)
    cut = _cut_row(dlogits_ptr, row, dlogits_row_stride, n_cols)
    row_ptr, body_ptr, n_body, edge, in_edge = cut
    target = tl.load(targets_ptr + row)
    grad_output = tl.load(grad_output_ptr + row.to(tl.int64) * grad_output_stride)
    scale = grad_output.to(tl.float32)
    if target == ignore_index:
        _store_zeros(row_ptr, body_ptr, n_body, edge, in_edge, tile, TILE_SIZE)
    elif scale != 1.0:  # only the GPU knows whether it is 1: the host launches without looking
        edge_dlogits = tl.load(row_ptr + edge, mask=in_edge).to(tl.float32)
        tl.store(row_ptr + edge, edge_dlogits * scale, mask=in_edge)
        for first in range(0, n_body, TILE_SIZE):
            cols = first + tile
            dlogits = tl.load(body_ptr + cols, mask=cols < n_body).to(tl.float32)
            tl.store(body_ptr + cols, dlogits * scale, mask=cols < n_body)


# ---------------------------------------------------------------- launches

# For whoever has the logits as rows, and has checked them, as cross_entropy_forward does below; of
# what their docstrings ask for, nothing is looked at.  Of all of them:
#
#   rows: (n_rows, V), fp16, bf16 or fp32, adjacent columns, any row stride; n_rows may be 0.
#   targets: (n_rows,), int64 or int32, contiguous, on the rows' device, as everything else.
#   n_valid: () int64, the rows that count in the mean, in these rows and elsewhere; None: no mean.
#   ignore_index: an int; a row with this target has loss and gradient 0.
#
# They do not wait for the GPU, and raise nothing but what Triton does.


def launch_forward(rows, targets, row_loss, stats, n_valid, ignore_index):
    """Compute the rows' losses.

    Args:
        row_loss: (n_rows,) fp32, written.
        stats: (n_rows, 3) fp32, contiguous, written: m, d and m's unit, for launch_backward.
    """
    n_rows, V = rows.shape
    if n_rows > 0:
        with on_device_of(rows):
            _cross_entropy_fwd_kernel[(n_rows,)](
                rows,
                rows.stride(0),
                targets,
                row_loss,
                stats,
                n_valid,
                V,
                ignore_index,
                **_options(rows, 4),
                enable_fp_fusion=True,
            )


def launch_backward(row_grads, rows, targets, stats, n_valid, drows, ignore_index):
    """Compute the rows' gradients.

    Args:
        row_grads: (n_rows,) fp32, dL/dloss of each row, before the mean; any stride, also 0.
        stats: what launch_forward has written.
        drows: (n_rows, V), written: in rows' dtype, with adjacent columns and a row stride equal to
            that of rows modulo 8; or rows itself.
    """
    n_rows, V = rows.shape
    if n_rows > 0:
        with on_device_of(rows):
            _cross_entropy_bwd_kernel[(n_rows,)](
                row_grads,
                row_grads.stride(0),
                rows,
                rows.stride(0),
                targets,
                stats,
                n_valid,
                drows,
                drows.stride(0),
                V,
                ignore_index,
                **_options(rows, 16, 4),
                enable_fp_fusion=True,
            )


def launch_inplace(rows, targets, row_loss, n_valid, ignore_index):
    """Compute the rows' losses and, over the rows, their gradients for row_grads of 1.

    Ignored rows keep their logits: launch_scale zeroes them.

    Args:
        rows: written.
        row_loss: (n_rows,) fp32, written.
    """
    n_rows, V = rows.shape
    if n_rows > 0:
        n_programs, options = _inplace_options(rows)
        with on_device_of(rows):
            _cross_entropy_inplace_kernel[(min(n_rows, n_programs),)](
                rows,
                rows.stride(0),
                targets,
                row_loss,
                n_valid,
                n_rows,
                V,
                ignore_index,
                **options,
                enable_fp_fusion=True,
            )


def launch_scale(row_grads, drows, targets, ignore_index):
    """Multiply what launch_inplace has left by row_grads, and store zeros in ignored rows.

    Args:
        row_grads: (n_rows,) fp32, dL/dloss of each row; any stride, also 0.
        drows: the rows that launch_inplace was given; written, where there is something to do.
    """
    n_rows, V = drows.shape
    if n_rows > 0:
        with on_device_of(drows):
            _cross_entropy_scale_kernel[(n_rows,)](
                row_grads,
                row_grads.stride(0),
                drows,
                drows.stride(0),
                targets,
                V,
                ignore_index,
                **_options(drows, 4, 4),
                enable_fp_fusion=True,
            )


def on_device_of(tensor):
    """A context: Triton launches on the current GPU, which need not be the tensor's."""
    elsewhere = tensor.is_cuda and tensor.get_device() != torch.cuda.current_device()
    return torch.cuda.device(tensor.device) if elsewhere else contextlib.nullcontext()


def _options(logits, warps, tile_rows=None):
    """Of a launch: a thread has 8 columns of the tile.

    Best of 4 to 32 warps and 4 to 16 rows on an H200.
    """
    tile_cols = 256 * warps
    n_tile_rows = -(-logits.shape[-1] // tile_cols)  # of a tile that holds the whole row
    enough = n_tile_rows if n_tile_rows <= 2 else 4 if n_tile_rows <= 4 else 16
    tile_rows = min(tile_rows or 16 // logits.element_size(), enough)
    return {"TILE_ROWS": tile_rows, "TILE_COLS": tile_cols, "num_warps": warps}


def _inplace_options(logits):
    """Number of programs and options.

    Few programs, so that the cache holds their rows until they are overwritten.
    """
    if not logits.is_cuda:
        return 3, _options(logits, 4)
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
    return n_programs, _options(logits, 16 if is_long else 8, tile_rows)


# ---------------------------------------------------------------- without autograd


def cross_entropy_forward(
    logits, targets, ignore_index=-100, reduction="mean", overwrite=False
):  # fmt: skip
    """Return loss, stats and n_valid of logits (..., V) and targets (...).

    Args:
        logits: fp16, bf16 or fp32, with any strides.
        targets: int64 or int32.
        overwrite: write the gradient for a grad_output of 1 over the logits, for the backward to
            scale.

    Returns:
        loss: () fp32, or (...) with reduction "none".
        stats: m, d and m's unit of each row for the backward, (n_rows, 3) fp32; None after
            overwriting.
        n_valid: the number of rows that count, () int64; None unless the loss is a mean.

    Raises:
        TypeError, ValueError: a tensor's type, dtype, shape or device, or the reduction, is wrong;
            or the logits cannot be overwritten: a leaf that requires a gradient, or not contiguous.
    """
    rows, row_targets = checked_rows(logits, targets, reduction)
    n_valid = (targets.long() != ignore_index).sum() if reduction == "mean" else None
    row_loss = logits.new_empty(targets.shape, dtype=torch.float32)
    if overwrite:
        _refuse_to_overwrite(logits, logits if logits._base is None else logits._base)
        stats = None
        launch_inplace(rows, row_targets, row_loss, n_valid, ignore_index)
    else:
        stats = logits.new_empty((len(rows), 3), dtype=torch.float32)
        launch_forward(rows, row_targets, row_loss, stats, n_valid, ignore_index)
    return _reduced(row_loss, reduction), stats, n_valid


def cross_entropy_backward(grad_output, logits, targets, stats, n_valid, ignore_index=-100):
    """Return dlogits (..., V) in logits' dtype, from what a forward was given and returned.

    It is new, or, where stats is None because the forward has overwritten the logits, in their
    memory.

    Args:
        grad_output: fp32, () or (...).

    Raises:
        TypeError, ValueError: as the forward.
    """
    rows, row_targets = checked_rows(logits, targets)
    refuse_foreign_memory("grad_output", grad_output)
    if grad_output.ndim == 0:
        row_grads = grad_output.expand(len(rows))  # a view with stride 0
    else:
        row_grads = grad_output.expand(targets.shape).reshape(-1)
    if stats is None:
        launch_scale(row_grads, rows, row_targets, ignore_index)
        return rows.detach().view(logits.shape)
    drows = _new_drows(rows)
    launch_backward(row_grads, rows, row_targets, stats, n_valid, drows, ignore_index)
    return drows.view(logits.shape)


def _new_drows(rows):
    """Memory for the gradient of rows (n_rows, V), cut alike: strides are equal modulo 8."""
    n_rows, V = rows.shape
    return rows.new_empty_strided((n_rows, V), (V + (rows.stride(0) - V) % 8, 1))


def _reduced(row_loss, reduction):
    if reduction == "none":
        return row_loss
    if reduction == "mean" and row_loss.numel() == 0:
        return row_loss.mean()  # NaN, as in PyTorch
    return row_loss.sum()  # for a mean the kernels have divided already


# ---------------------------------------------------------------- checks


def refuse_foreign_memory(name, tensor):
    """A kernel is handed an address: refuse a tensor without one, or with its elements elsewhere.

    A wrapper such as DTensor has no memory of its own; its data_ptr() is where nothing lies.

    Raises:
        TypeError: the tensor is such a wrapper, or sparse.
    """
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if not plain and is_traceable_wrapper_subclass(tensor):
        advice = "unwrap it"
        if hasattr(tensor, "to_local"):
            advice = "pass its to_local() or full_tensor()"
        raise TypeError(f"{name} is a {type(tensor).__name__}, expected a plain tensor: {advice}.")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is {tensor.layout}, expected torch.strided: pass its to_dense().")


def checked_rows(logits, targets, reduction="mean"):
    """Refuse what the kernels cannot compute.

    Return logits as (n_rows, V) with adjacent columns, and targets as (n_rows,).
    """
    integers = (torch.int64, torch.int32)
    for name, tensor, dtypes in (("logits", logits, FLOATS), ("targets", targets, integers)):
        given = tensor.dtype if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        if given not in dtypes:
            expected = " or ".join(map(str, dtypes))
            raise TypeError(f"{name} is {given}, expected a tensor of {expected}: convert it.")
        refuse_foreign_memory(name, tensor)
    if logits.ndim == 0 or logits.shape[-1] == 0 or logits.shape[:-1] != targets.shape:
        given = f"logits has shape {tuple(logits.shape)} and targets {tuple(targets.shape)}"
        raise ValueError(f"{given}, expected (..., V) with V >= 1 and (...): reshape one of them.")
    on_gpu = logits.is_cuda or (INTERPRETED and logits.is_cpu)
    if logits.device != targets.device or not on_gpu:
        given = f"logits is on {logits.device}, targets on {targets.device}"
        advice = "move them, or set TRITON_INTERPRET=1 first."
        raise ValueError(f"{given}, expected one GPU: {advice}")
    if reduction not in ("mean", "sum", "none"):
        given = f"reduction is {reduction!r}"
        raise ValueError(f"{given}, expected 'mean', 'sum' or 'none': choose one.")
    # a view takes the host microseconds, and so what is in shape already gets none
    rows = logits if logits.ndim == 2 else logits.reshape(-1, logits.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    row_targets = targets if targets.ndim == 1 else targets.reshape(-1)
    return rows, row_targets.contiguous()


def _refuse_to_overwrite(logits, owner):
    """Take only an operation's result, in one piece.

    A leaf's .grad would lie in the leaf's own memory.
    """
    if not logits.is_contiguous() or (owner.is_leaf and owner.requires_grad):
        given = f"logits has strides {logits.stride()}, and that it is a leaf is {owner.is_leaf}"
        expected = "expected a contiguous result to overwrite: use inplace=False."
        raise ValueError(f"{given}; {expected}")


# ---------------------------------------------------------------- operators for torch.compile

# torch.compile looks into a Triton kernel that it meets in a graph, guesses what the kernel writes,
# and takes down its arguments' strides when it traces; but when it compiles, it may lay out a
# matrix product's result with gaps between its rows.  Into an operator it does not look.  It is
# told what is written, and the launchers run as they stand above, on the tensors that there really
# are.  (Eager code calls them directly: an operator takes host time.)


def _forward_results(logits, targets, ignore_index, reduction):
    results = cross_entropy_forward(logits, targets, ignore_index, reduction)
    return [result for result in results if result is not None]


def _overwrite(logits, targets, ignore_index, reduction):
    loss, _, _ = cross_entropy_forward(logits, targets, ignore_index, reduction, overwrite=True)
    return loss


_forward_operator = torch.library.custom_op(
    "tutorial::cross_entropy_forward",
    _forward_results,
    mutates_args=(),
    schema="(Tensor logits, Tensor targets, int ignore_index, str reduction) -> Tensor[]",
)
_inplace_operator = torch.library.custom_op(
    "tutorial::cross_entropy_inplace",
    _overwrite,
    mutates_args=("logits",),
    schema="(Tensor(a!) logits, Tensor targets, int ignore_index, str reduction) -> Tensor",
)
_backward_operator = torch.library.custom_op(
    "tutorial::cross_entropy_backward",
    cross_entropy_backward,
    mutates_args=(),
    schema="(Tensor grad_output, Tensor logits, Tensor targets, Tensor stats, Tensor? n_valid, "
    "int ignore_index) -> Tensor",
)


@_inplace_operator.register_fake
def _loss_shape(logits, targets, ignore_index, reduction):
    checked_rows(logits, targets, reduction)
    shape = targets.shape if reduction == "none" else ()
    return logits.new_empty(shape, dtype=torch.float32)


@_forward_operator.register_fake
def _forward_shapes(logits, targets, ignore_index, reduction):
    loss = _loss_shape(logits, targets, ignore_index, reduction)
    stats = logits.new_empty((targets.numel(), 3), dtype=torch.float32)
    n_valid = [targets.new_empty((), dtype=torch.int64)] if reduction == "mean" else []
    return [loss, stats, *n_valid]


@_backward_operator.register_fake
def _backward_shape(grad_output, logits, targets, stats, n_valid, ignore_index):
    rows, _ = checked_rows(logits, targets)
    return _new_drows(rows).view(logits.shape)


def compiled_forward(logits, targets, ignore_index, reduction, overwrite):
    """cross_entropy_forward for torch.compile."""
    if overwrite:
        _refuse_to_overwrite(logits, logits)  # the compiler does not know whose view a tensor is
        return _inplace_operator(logits, targets, ignore_index, reduction), None, None
    loss, stats, *n_valid = _forward_operator(logits, targets, ignore_index, reduction)
    return loss, stats, n_valid[0] if n_valid else None


def compiled_backward(grad_output, logits, targets, stats, n_valid, ignore_index):
    """cross_entropy_backward for torch.compile."""
    if stats is not None:
        return _backward_operator(grad_output, logits, targets, stats, n_valid, ignore_index)
    # In place it needs no operator: the compiler writes this over the logits, which nobody needs.
    row_grads = grad_output.expand(targets.shape).unsqueeze(-1)
    ignored = (targets == ignore_index).unsqueeze(-1)
    return (logits.float() * row_grads).masked_fill(ignored, 0).to(logits.dtype)


# ---------------------------------------------------------------- autograd


class PlainCrossEntropyFunction(torch.autograd.Function):
    """`.apply(logits, targets)`: the mean loss by the plain kernels, to be measured.

    logits (n_rows, V) are contiguous and without -inf, targets (n_rows,) in [0, V), and nothing is
    checked.  Blocks and warps are those of the kernels that are used.
    """

    @staticmethod
    def forward(ctx, logits, targets):
        n_rows, V = logits.shape
        row_loss = logits.new_empty(n_rows, dtype=torch.float32)
        stats = logits.new_empty((n_rows, 2), dtype=torch.float32)
        options = _block_options(_options(logits, 4))
        _plain_fwd_kernel[(n_rows,)](
            logits, targets, row_loss, stats, V, **options, enable_fp_fusion=True
        )
        ctx.save_for_backward(logits, targets, stats)
        return row_loss.mean()

    @staticmethod
    def backward(ctx, grad_output):
        logits, targets, stats = ctx.saved_tensors
        n_rows, V = logits.shape
        dlogits = torch.empty_like(logits)
        scale = grad_output / n_rows  # ()
        options = _block_options(_options(logits, 16, 4))
        _plain_bwd_kernel[(n_rows,)](
            scale, logits, targets, stats, dlogits, V, **options, enable_fp_fusion=True
        )
        return dlogits, None


def _block_options(options):
    block_size = options["TILE_ROWS"] * options["TILE_COLS"]
    return {"BLOCK_SIZE": block_size, "num_warps": options["num_warps"]}


class FusedCrossEntropyFunction(torch.autograd.Function):
    """`.apply(logits, targets, ignore_index, reduction, inplace)`: the loss, for autograd."""

    @staticmethod
    def forward(ctx, logits, targets, ignore_index, reduction, inplace):
        ctx.ignore_index = ignore_index
        ctx.inplace = inplace
        compiling = torch.compiler.is_compiling()
        forward = compiled_forward if compiling else cross_entropy_forward
        loss, *saved = forward(logits, targets, ignore_index, reduction, inplace)
        if inplace and not compiling:
            # Autograd cannot see what a kernel writes; told, it refuses other uses of the old
            # logits.
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits, targets, *saved)
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        # create_graph=True; `once_differentiable` would let the derivative vanish silently
        if torch.is_grad_enabled():
            asked = "which create_graph=True asks for."
            raise RuntimeError(f"The fused loss has no second derivative, {asked}")
        compiling = torch.compiler.is_compiling()
        backward = compiled_backward if compiling else cross_entropy_backward
        dlogits = backward(grad_output, *ctx.saved_tensors, ctx.ignore_index)
        if ctx.inplace and not compiling:
            torch.autograd.graph.increment_version(dlogits)
        return dlogits, None, None, None, None


class TritonCrossEntropyLoss(torch.nn.Module):
    """`loss(logits, targets)` of logits (..., V), targets (...): () fp32, or (...) with "none".

    logits are fp16, bf16 or fp32, targets int64 or int32.  Rows whose target is ignore_index have
    loss and gradient 0 and do not count in the mean; any other target outside [0, V) makes its row
    NaN.  reduction: "mean", "sum" or "none".

    inplace=True saves the memory of a gradient: where the logits require one, the loss writes it
    over them.  AFTER THE LOSS THE LOGITS ARE THEIR GRADIENT, in the rest of the forward too:
    `logits.argmax()` or an accuracy computed then is nonsense, and no error tells.  Compute such
    things before the loss, or pass the loss logits.clone(), or leave inplace at False.  (fp16
    logits stay as they are: their gradient may be too small for fp16 before the loss scale
    multiplies it.)

    What autograd can notice does raise: a use of the old logits whose backward needs them, a second
    loss on them, a second backward.  torch.compile notices only uses before the loss.

    Raises:
        TypeError, ValueError: a tensor's type, dtype, shape or device, or the reduction, is wrong;
            or with inplace=True the logits are a leaf that requires a gradient, or not contiguous.
    """

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", inplace: bool = False
    ):  # fmt: skip
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.inplace = inplace

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inplace = self.inplace and torch.is_grad_enabled() and logits.requires_grad
        options = self.ignore_index, self.reduction, inplace and logits.dtype != torch.float16
        return FusedCrossEntropyFunction.apply(logits, targets, *options)
