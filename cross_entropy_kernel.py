"""Cross-entropy in Triton: the loss and its gradient, without a softmax tensor in memory.

    loss = F.cross_entropy(logits.float().view(-1, V), targets.view(-1), ignore_index=-100)  # logits (..., V)

The maths, for one row, that is, one token's V logits (max and sum run over its columns j):

    m    = max logits[j]                       a reference point, so that no exponential overflows
    d    = sum exp(logits[j] - m)              the softmax's denominator
    loss = m - logits[target] + log(d)         = -log softmax(logits)[target]

Read literally that is one pass for m and another for d.  Online softmax (Milakov & Gimelshein, 2018) needs one:
it walks the row in chunks, and when a chunk brings a larger maximum, it rescales the sum so far to it:

    m_new = max(m, max(chunk))    d = d * exp(m - m_new) + sum exp(chunk[j] - m_new)    m = m_new     (README, step 4)

Bytes moved per bf16 logit, if each kernel reads its inputs once and writes its result once:

                eager, as Hugging Face writes it                        fused     ratio     in place
    forward     to fp32 6, log_softmax 8                           = 14     2       7.0            4
    backward    nll_loss (zeros) 4, log_softmax 12, to bf16 6      = 22     4       5.5            0
    memory      log-softmax, its gradient, the logits', all fp32   = 12     2       6.0            0

The prediction: a sixth of the memory beyond the logits, and at least 6 times as fast; at least, because a row of
128,256 fp32 values outgrows a multiprocessor, so log_softmax reads it repeatedly.  (F.cross_entropy straight on
bf16 logits: 12 bytes moved, 6 held, but each log-probability rounded to bf16.)  In place, the forward knows m and d,
reads the logits again, now from the GPU's cache, and writes the gradient over them.

New ideas of Triton, after those of rmsnorm_kernel.py:

1. A block may have two dimensions: a chunk is a tile of 8 x 1,024 logits with an m and a d for each column.  A thread
   owns whole columns, so in the loop none waits for another (one H200: 475 us; with one m per chunk 531).
2. A loop can carry state: m and d are ordinary variables, and from tile to tile they stay in registers.
3. `tl.load(..., other=-inf)`: lanes beyond the row's end get a value that changes no maximum and adds exp 0.
4. A pointer may be None: Triton compiles a kernel without it.  A stride may be 0: all rows read one element.

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

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # no GPU: run on the CPU; must precede `import triton`

import triton
import triton.language as tl

with contextlib.suppress(ModuleNotFoundError):  # beside this file; without it bf16 is truncated on a CPU
    import harness.interpreter_rounding  # noqa: F401

INTERPRETED = triton.knobs.runtime.interpret  # are the kernels below run on the CPU, by the interpreter?
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
HUGE = tl.constexpr(2.0**31)  # of a maximum times LOG2E, see _online_softmax


def cross_entropy_reference(logits, targets, ignore_index=-100, reduction="mean"):
    """Eager loss of logits (..., V) and targets (...), in the logits' own dtype; float64 stays float64."""
    rows, row_targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long()
    loss = F.cross_entropy(rows, row_targets, ignore_index=ignore_index, reduction=reduction)
    return loss.view(targets.shape) if reduction == "none" else loss


# A thread loads 8 adjacent 16-bit logits at once, but only from a multiple of 16 bytes, and where 8 does not divide V,
# rows begin anywhere.  So a row is cut: from its first multiple of 8 to its last is its body, up to 7 columns before
# and 7 after are its edge (V = 50,257: 96 % of the copy rate, 66 % without).  `// 8 * 8` shows Triton what divides.
@triton.jit
def _cut_row(ptr, row, row_stride, n_cols):
    start = tl.cast(row, tl.int64) * row_stride  # int64: at V = 128,256 it outgrows 32 bits from row 16,744 on
    n_before = tl.minimum(-start & 7, n_cols).to(tl.int32)
    n_body = (n_cols - n_before) // 8 * 8
    lane = tl.arange(0, 16)
    edge = tl.where(lane < 8, lane, n_cols - 16 + lane)
    in_edge = tl.where(lane < 8, lane < n_before, edge >= n_before + n_body)
    return ptr + start, ptr + (start + 7) // 8 * 8, n_body, edge, in_edge


# A row's m and d, by the online softmax.  It reads the row's body; the edge's logits are given.
#
# exp(x - m) = 2**(x * LOG2E - m * LOG2E), and 2**t is what a GPU computes.  So m is kept times LOG2E,
# its *unit*, and each exponential costs one multiply-add.  That does not round its product, so 10,000 +
# x keeps the digits of x.  m itself is rounded, by up to half of the distance between two fp32 numbers;
# but any m gives the same softmax, as long as 2**(rounding) is far from overflow: for |m| < 2**31 it is
# at most 2**64.  (Subtracting first, exp2((x - m) * LOG2E), would do for every m.  It is one instruction
# more for each logit, and in place, where instructions are the limit, takes 15 % longer on an H200.)
@triton.jit
def _online_softmax(
    body_ptr, n_body, edge_logits, tile, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr
):  # fmt: skip
    # m begins finite: in a column of -inf (a masked vocabulary) -inf - -inf would be NaN.
    m = tl.full((TILE_COLS,), -HUGE, dtype=tl.float32)
    d = tl.zeros((TILE_COLS,), dtype=tl.float32)
    for first in range(0, n_body, TILE_ROWS * TILE_COLS):
        cols = first + tile
        logits = tl.load(body_ptr + cols, mask=cols < n_body, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(logits, axis=0) * LOG2E)
        d = d * tl.exp2(m - m_new) + tl.sum(tl.exp2(tl.fma(logits, LOG2E, -m_new[None, :])), axis=0)
        m = m_new
    # The threads meet: every sum is rescaled to the row's maximum.
    m_row = tl.maximum(tl.max(m), tl.max(edge_logits) * LOG2E)
    d_row = tl.sum(d * tl.exp2(m - m_row)) + tl.sum(tl.exp2(tl.fma(edge_logits, LOG2E, -m_row)))
    unit = tl.full((), LOG2E, dtype=tl.float32)
    if tl.abs(m_row) >= HUGE:
        unit = tl.full((), 1.0, dtype=tl.float32)
        # a quarter of the columns: this rare loop must not be the one that runs out of registers
        m_row, d_row = _count_maxima(body_ptr, n_body, edge_logits, TILE_COLS // 4)
    return m_row, d_row, unit


# The same where the maximum is beyond 2**31 / LOG2E = 1.5e9, or the row is -inf.  There neighbouring
# fp32 numbers are at least 64 apart, so exp(x - m) is 1 at the maximum and 0 elsewhere, and d is how
# often the maximum occurs.  2**(x - m) is 1 and 0 as well: the unit is 1, m the maximum, unrounded.
@triton.jit
def _count_maxima(body_ptr, n_body, edge_logits, BLOCK_SIZE: tl.constexpr):
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
def _is_maximum(x, m):  # 1 or 0; NaN where x is NaN, or inf as m is
    return tl.where(x < m, 0.0, 1.0 + (x - m))


# -log(exp(x_target - m) / d), exactly 0 if exp(x_target - m) is d.
@triton.jit
def _loss_of_row(target_logit, m, d, unit):
    t = tl.fma(target_logit, unit, -m)
    near = tl.log(d / tl.exp2(t))
    to_log = tl.where(unit == 1.0, 1.0, LN2)  # from the unit to natural logarithms
    far = tl.log(d) - t * to_log  # where 2**t may fall out of fp32
    farther = m * to_log - target_logit + tl.log(d)  # where even target_logit * LOG2E does
    return tl.where(t > -100.0, near, tl.where(t == -float("inf"), farther, far))


# One program per row: it reads the row once, and stores three numbers.
@triton.jit
def _cross_entropy_fwd_kernel(
    logits_ptr, logits_row_stride,  # (n_rows, n_cols)
    targets_ptr,  # (n_rows,)
    row_loss_ptr,  # (n_rows,)
    stats_ptr,  # (n_rows, 3) fp32, for the backward: m, d, unit
    n_valid_ptr,  # (), or None unless the loss is a mean
    n_cols,
    ignore_index,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    tile = tl.arange(0, TILE_ROWS)[:, None] * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]
    row_ptr, body_ptr, n_body, edge, in_edge = _cut_row(logits_ptr, row, logits_row_stride, n_cols)
    target = tl.load(targets_ptr + row)
    scale = 1.0 if n_valid_ptr is None else 1.0 / tl.load(n_valid_ptr)
    if target == ignore_index:  # not one of the row's logits is read
        tl.store(row_loss_ptr + row, 0.0 * scale)  # 0 * inf = NaN where no row counts, as in PyTorch
    else:
        # A target outside the row is not read.  It makes the row NaN, and the host need not wait to see it.
        in_row = (target >= 0) & (target < n_cols)
        target_logit = tl.load(row_ptr + target, mask=in_row, other=float("nan")).to(tl.float32)
        edge_logits = tl.load(row_ptr + edge, mask=in_edge, other=-float("inf")).to(tl.float32)
        m, d, unit = _online_softmax(body_ptr, n_body, edge_logits, tile, TILE_ROWS, TILE_COLS)
        tl.store(row_loss_ptr + row, _loss_of_row(target_logit, m, d, unit) * scale)
        tl.store(stats_ptr + 3 * row, m)
        tl.store(stats_ptr + 3 * row + 1, d)
        tl.store(stats_ptr + 3 * row + 2, unit)


# The backward.  Given scale = dL/dloss of a row (grad_output, over n_valid for a mean), find dL/dlogits.
#
#   loss = m - logits[target] + log(d), where m is only a reference point: any m gives the same loss.  So
#   dloss/dlogits[j] = exp(logits[j] - m) / d  -  [j == target]               softmax minus one-hot
#   dlogits[j]       = (exp(logits[j] - m) - d * [j == target]) * (scale / d)
#
# Subtracting before dividing spares a confident prediction (softmax near 1) one rounding of a number near 1.  Both m
# and d are saved (and m's unit), not their sum lse = m + log(d): rounded, near 10,000, it would make
# the softmax 0.05 % wrong.
@triton.jit
def _store_dlogits(
    body_ptr, out_row_ptr, out_body_ptr, n_body, edge, in_edge, edge_logits, target, in_row, target_logit,
    m, d, unit, scale, tile, TILE_SIZE: tl.constexpr,
):  # fmt: skip
    dtype = out_row_ptr.dtype.element_ty
    target_ptr = out_row_ptr + target
    factor = tl.where(in_row, scale, float("nan")) / d
    tl.store(out_row_ptr + edge, (tl.exp2(tl.fma(edge_logits, unit, -m)) * factor).to(dtype), mask=in_edge)
    # Last tile first: it was read last, and is still in the cache.  ".cs" stores without taking room there (-11 %).
    for done in range(0, n_body, TILE_SIZE):
        cols = (n_body - 1) // TILE_SIZE * TILE_SIZE - done + tile
        logits = tl.load(body_ptr + cols, mask=cols < n_body, other=-float("inf")).to(tl.float32)
        dlogits = tl.exp2(tl.fma(logits, unit, -m)) * factor
        tl.store(out_body_ptr + cols, dlogits.to(dtype), mask=cols < n_body, cache_modifier=".cs")
    # The target's own entry last, and apart: comparing every column with the target costs 15 % in place.
    tl.debug_barrier()
    target_dlogit = (tl.exp2(tl.fma(target_logit, unit, -m)) - d) * factor
    tl.store(target_ptr, target_dlogit.to(dtype), mask=in_row)


@triton.jit
def _cross_entropy_bwd_kernel(
    grad_output_ptr, grad_output_stride,  # (n_rows,), with stride 0 where all rows share one gradient
    logits_ptr, logits_row_stride,  # (n_rows, n_cols)
    targets_ptr,  # (n_rows,)
    stats_ptr,  # (n_rows, 3) fp32
    n_valid_ptr,  # (), or None unless the loss is a mean
    dlogits_ptr, dlogits_row_stride,  # both row strides are equal modulo 8, so that rows are cut alike
    n_cols,
    ignore_index,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    tile = tl.arange(0, TILE_ROWS)[:, None] * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]
    row_ptr, body_ptr, n_body, edge, in_edge = _cut_row(logits_ptr, row, logits_row_stride, n_cols)
    out_row_ptr, out_body_ptr, _, _, _ = _cut_row(dlogits_ptr, row, dlogits_row_stride, n_cols)
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        _store_zeros(out_row_ptr, out_body_ptr, n_body, edge, in_edge, tile, TILE_ROWS * TILE_COLS)
    else:
        in_row = (target >= 0) & (target < n_cols)
        target_logit = tl.load(row_ptr + target, mask=in_row, other=float("nan")).to(tl.float32)
        edge_logits = tl.load(row_ptr + edge, mask=in_edge, other=-float("inf")).to(tl.float32)
        scale = tl.load(grad_output_ptr + row.to(tl.int64) * grad_output_stride).to(tl.float32)
        if n_valid_ptr is not None:
            scale = scale / tl.load(n_valid_ptr)
        m, d = tl.load(stats_ptr + 3 * row), tl.load(stats_ptr + 3 * row + 1)
        unit = tl.load(stats_ptr + 3 * row + 2)
        _store_dlogits(
            body_ptr, out_row_ptr, out_body_ptr, n_body, edge, in_edge, edge_logits, target, in_row, target_logit,
            m, d, unit, scale, tile, TILE_ROWS * TILE_COLS,
        )  # fmt: skip


@triton.jit
def _store_zeros(row_ptr, body_ptr, n_body, edge, in_edge, tile, TILE_SIZE: tl.constexpr):
    """The gradient of an ignored row.  Stored, not multiplied by 0: that would let a NaN of the row through."""
    tl.store(row_ptr + edge, 0.0, mask=in_edge)
    for first in range(0, n_body, TILE_SIZE):
        tl.store(body_ptr + first + tile, 0.0, mask=first + tile < n_body)


# In place, forward: the loss, and then the gradient, for a grad_output of 1, over the logits.  A program takes several
# rows, one after another: few programs, so that the cache still holds what each of them has just read.
@triton.jit(do_not_specialize=["n_rows"])  # it changes from batch to batch, and must not compile a kernel each time
def _cross_entropy_inplace_kernel(
    logits_ptr, logits_row_stride,  # (n_rows, n_cols): logits in, their gradient out; ignored rows stay as they are
    targets_ptr,  # (n_rows,)
    row_loss_ptr,  # (n_rows,)
    n_valid_ptr,  # (), or None unless the loss is a mean
    n_rows, n_cols,
    ignore_index,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):  # fmt: skip
    tile = tl.arange(0, TILE_ROWS)[:, None] * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row_ptr, body_ptr, n_body, edge, in_edge = _cut_row(logits_ptr, row, logits_row_stride, n_cols)
        target = tl.load(targets_ptr + row)
        scale = 1.0 if n_valid_ptr is None else 1.0 / tl.load(n_valid_ptr)
        if target == ignore_index:
            tl.store(row_loss_ptr + row, 0.0 * scale)
        else:
            in_row = (target >= 0) & (target < n_cols)
            target_logit = tl.load(row_ptr + target, mask=in_row, other=float("nan")).to(tl.float32)
            edge_logits = tl.load(row_ptr + edge, mask=in_edge, other=-float("inf")).to(tl.float32)
            m, d, unit = _online_softmax(body_ptr, n_body, edge_logits, tile, TILE_ROWS, TILE_COLS)
            tl.store(row_loss_ptr + row, _loss_of_row(target_logit, m, d, unit) * scale)
            _store_dlogits(
                body_ptr, row_ptr, body_ptr, n_body, edge, in_edge, edge_logits, target, in_row, target_logit,
                m, d, unit, scale, tile, TILE_ROWS * TILE_COLS,
            )  # fmt: skip


# In place, backward: the logits are their gradient already, but for grad_output and the ignored rows.
@triton.jit
def _cross_entropy_scale_kernel(
    grad_output_ptr, grad_output_stride,  # (n_rows,), with stride 0 where all rows share one gradient
    dlogits_ptr, dlogits_row_stride,  # (n_rows, n_cols)
    targets_ptr,  # (n_rows,)
    n_cols,
    ignore_index,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    dtype = dlogits_ptr.dtype.element_ty
    tile = tl.arange(0, TILE_ROWS)[:, None] * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]
    row_ptr, body_ptr, n_body, edge, in_edge = _cut_row(dlogits_ptr, row, dlogits_row_stride, n_cols)
    target = tl.load(targets_ptr + row)
    scale = tl.load(grad_output_ptr + row.to(tl.int64) * grad_output_stride).to(tl.float32)
    if target == ignore_index:
        _store_zeros(row_ptr, body_ptr, n_body, edge, in_edge, tile, TILE_ROWS * TILE_COLS)
    elif scale != 1.0:  # only the GPU knows whether it is 1: the host launches this without looking
        edge_dlogits = tl.load(row_ptr + edge, mask=in_edge).to(tl.float32) * scale
        tl.store(row_ptr + edge, edge_dlogits.to(dtype), mask=in_edge)
        for first in range(0, n_body, TILE_ROWS * TILE_COLS):
            cols = first + tile
            dlogits = tl.load(body_ptr + cols, mask=cols < n_body).to(tl.float32) * scale
            tl.store(body_ptr + cols, dlogits.to(dtype), mask=cols < n_body)


def refuse_foreign_memory(name, tensor):
    """A kernel is handed an address: refuse a tensor that has none, or whose elements lie elsewhere.

    A wrapper such as DTensor has no memory of its own; its data_ptr() is where nothing lies.
    """
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if not plain and is_traceable_wrapper_subclass(tensor):
        advice = "unwrap it"
        if hasattr(tensor, "to_local"):
            advice = "pass its to_local() or full_tensor()"
        raise TypeError(f"{name} is a {type(tensor).__name__}, expected a plain tensor: {advice}.")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is {tensor.layout}, expected torch.strided: pass its to_dense().")


def _rows(logits, targets, reduction="mean"):
    """Refuse what the kernels cannot compute.

    Return logits as (n_rows, V) with adjacent columns, and targets as (n_rows,).
    """
    for name, tensor, dtypes in (("logits", logits, FLOATS), ("targets", targets, (torch.int64, torch.int32))):
        given = tensor.dtype if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        if given not in dtypes:
            raise TypeError(f"{name} is {given}, expected a tensor of {' or '.join(map(str, dtypes))}: convert it.")
        refuse_foreign_memory(name, tensor)
    if logits.ndim == 0 or logits.shape[-1] == 0 or logits.shape[:-1] != targets.shape:
        given = f"logits has shape {tuple(logits.shape)} and targets {tuple(targets.shape)}"
        raise ValueError(f"{given}, expected (..., V) with V >= 1 and (...): reshape one of them.")
    if logits.device != targets.device or not (logits.is_cuda or (INTERPRETED and logits.is_cpu)):
        given = f"logits is on {logits.device}, targets on {targets.device}"
        raise ValueError(f"{given}, expected one GPU: move them, or set TRITON_INTERPRET=1 first.")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}, expected 'mean', 'sum' or 'none': choose one.")
    rows = logits.reshape(-1, logits.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous(), targets.reshape(-1).contiguous()


def _refuse_to_overwrite(logits, owner):
    """Only an operation's result, in one piece: a leaf's .grad would lie in the leaf's own memory."""
    if not logits.is_contiguous() or (owner.is_leaf and owner.requires_grad):
        given = f"logits has strides {logits.stride()}, and that it is a leaf is {owner.is_leaf}"
        raise ValueError(f"{given}; expected a contiguous result to overwrite: use inplace=False.")


def _options(logits, warps, rows=None):
    """Of a launch: a thread has 8 columns of the tile.  Best of 4 to 32 warps and 4 to 16 rows on an H200."""
    n_cols, cols = logits.shape[-1], 256 * warps
    enough = 1 if n_cols <= cols else 2 if n_cols <= 2 * cols else 4 if n_cols <= 4 * cols else 16  # for a short row
    return {"TILE_ROWS": min(rows or 16 // logits.element_size(), enough), "TILE_COLS": cols, "num_warps": warps}


def _inplace_options(logits):
    """Number of programs and options: few programs, so that the cache holds their rows until they are overwritten."""
    if not logits.is_cuda:
        return 3, _options(logits, 4)
    gpu, long = torch.cuda.get_device_properties(logits.device), logits.shape[-1] > 65_536
    # 16 rows are 7 to 11 % faster than 8 on an H200.  On a Blackwell GPU, or in fp32, more than these spill registers.
    rows = 8 if logits.element_size() == 4 else 16 if (gpu.major, gpu.minor) == (9, 0) else 8 if long else 4
    return gpu.multi_processor_count * (1 if long else 2), _options(logits, 16 if long else 8, rows)


def on_device_of(t):
    """Triton launches on the current GPU, which need not be the one that holds the tensors."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


# The kernels' launches, for whoever has the logits as rows (n_rows, V) with adjacent columns, and has checked them.


def launch_forward(rows, targets, row_loss, stats, n_valid, ignore_index):
    """Write row_loss (n_rows,) fp32 and stats (n_rows, 3) fp32."""
    n_rows, V = rows.shape
    if n_rows > 0:
        with on_device_of(rows):
            _cross_entropy_fwd_kernel[(n_rows,)](
                rows, rows.stride(0), targets, row_loss, stats, n_valid, V, ignore_index, **_options(rows, 4)
            )


def launch_backward(row_grads, rows, targets, stats, n_valid, drows, ignore_index):
    """Write drows (n_rows, V), which may be the rows themselves, for row_grads (n_rows,)."""
    n_rows, V = rows.shape
    if n_rows > 0:
        with on_device_of(rows):
            _cross_entropy_bwd_kernel[(n_rows,)](
                row_grads, row_grads.stride(0), rows, rows.stride(0), targets, stats, n_valid,
                drows, drows.stride(0), V, ignore_index, **_options(rows, 16, 4),
            )  # fmt: skip


def launch_inplace(rows, targets, row_loss, n_valid, ignore_index):
    """Write row_loss, and over the rows their gradients; launch_scale then zeroes the ignored ones."""
    n_rows, V = rows.shape
    if n_rows > 0:
        n_programs, options = _inplace_options(rows)
        with on_device_of(rows):
            _cross_entropy_inplace_kernel[(min(n_rows, n_programs),)](
                rows, rows.stride(0), targets, row_loss, n_valid, n_rows, V, ignore_index, **options
            )


def launch_scale(row_grads, drows, targets, ignore_index):
    """Multiply drows, what launch_inplace has left, by row_grads (n_rows,); store zeros in ignored rows."""
    n_rows, V = drows.shape
    if n_rows > 0:
        with on_device_of(drows):
            _cross_entropy_scale_kernel[(n_rows,)](
                row_grads, row_grads.stride(0), drows, drows.stride(0), targets, V, ignore_index,
                **_options(drows, 4, 4),
            )  # fmt: skip


def _reduced(row_loss, reduction):
    if reduction == "none":
        return row_loss
    if reduction == "mean" and row_loss.numel() == 0:
        return row_loss.mean()  # NaN, as in PyTorch
    return row_loss.sum()  # for a mean the kernels have divided already


def _new_drows(rows):
    """Memory for the gradient of rows (n_rows, V), cut alike: strides are equal modulo 8."""
    n_rows, V = rows.shape
    return rows.new_empty_strided((n_rows, V), (V + (rows.stride(0) - V) % 8, 1))


def cross_entropy_forward(logits, targets, ignore_index=-100, reduction="mean", overwrite=False):
    """Return loss, stats and n_valid of logits (..., V) and targets (...).

    Args:
        logits: fp16, bf16 or fp32, with any strides.
        targets: int64 or int32.
        overwrite: write the gradient for a grad_output of 1 over the logits, for the backward to scale.

    Returns:
        loss: () fp32, or (...) with reduction "none".
        stats: m, d and m's unit of each row for the backward, (n_rows, 3) fp32; None after overwriting.
        n_valid: the number of rows that count, () int64; None unless the loss is a mean.

    Raises:
        TypeError, ValueError: a tensor's type, dtype, shape or device, or the reduction, is wrong;
            or the logits cannot be overwritten: a leaf that requires a gradient, or not contiguous.
    """
    rows, row_targets = _rows(logits, targets, reduction)
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

    It is new, or, where stats is None because the forward has overwritten the logits, in their memory.

    Args:
        grad_output: fp32, () or (...).

    Raises:
        TypeError, ValueError: as the forward.
    """
    rows, row_targets = _rows(logits, targets)
    refuse_foreign_memory("grad_output", grad_output)
    row_grads = grad_output.expand(targets.shape).reshape(-1)  # of a scalar it is a view with stride 0
    if stats is None:
        launch_scale(row_grads, rows, row_targets, ignore_index)
        return rows.detach().view(logits.shape)
    drows = _new_drows(rows)
    launch_backward(row_grads, rows, row_targets, stats, n_valid, drows, ignore_index)
    return drows.view(logits.shape)


# What torch.compile sees of the launchers: operators.  It looks into a Triton kernel that it meets in
# a graph, guesses what the kernel writes, and takes down its arguments' strides when it traces; but
# when it compiles, it may lay out a matrix product's result with gaps between its rows.  Into an
# operator it does not look.  It is told what is written, and the launchers run as they stand above,
# on the tensors that there really are.  (Eager code calls them directly: an operator takes host time.)


def _forward_results(logits, targets, ignore_index, reduction):
    results = cross_entropy_forward(logits, targets, ignore_index, reduction)
    return [result for result in results if result is not None]


def _overwrite(logits, targets, ignore_index, reduction):
    loss, _, _ = cross_entropy_forward(logits, targets, ignore_index, reduction, overwrite=True)
    return loss


_forward_operator = torch.library.custom_op(
    "tutorial::cross_entropy_forward", _forward_results, mutates_args=(),
    schema="(Tensor logits, Tensor targets, int ignore_index, str reduction) -> Tensor[]",
)  # fmt: skip
_inplace_operator = torch.library.custom_op(
    "tutorial::cross_entropy_inplace", _overwrite, mutates_args=("logits",),
    schema="(Tensor(a!) logits, Tensor targets, int ignore_index, str reduction) -> Tensor",
)  # fmt: skip
_backward_operator = torch.library.custom_op(
    "tutorial::cross_entropy_backward", cross_entropy_backward, mutates_args=(),
    schema="(Tensor grad_output, Tensor logits, Tensor targets, Tensor stats, Tensor? n_valid, "
    "int ignore_index) -> Tensor",
)  # fmt: skip


@_inplace_operator.register_fake
def _loss_shape(logits, targets, ignore_index, reduction):
    _rows(logits, targets, reduction)
    return logits.new_empty(targets.shape if reduction == "none" else (), dtype=torch.float32)


@_forward_operator.register_fake
def _forward_shapes(logits, targets, ignore_index, reduction):
    loss = _loss_shape(logits, targets, ignore_index, reduction)
    stats = logits.new_empty((targets.numel(), 3), dtype=torch.float32)
    return [loss, stats, *([targets.new_empty((), dtype=torch.int64)] if reduction == "mean" else [])]


@_backward_operator.register_fake
def _backward_shape(grad_output, logits, targets, stats, n_valid, ignore_index):
    rows, _ = _rows(logits, targets)
    return _new_drows(rows).view(logits.shape)


def _compiled_forward(logits, targets, ignore_index, reduction, overwrite):
    """cross_entropy_forward for torch.compile."""
    if overwrite:
        _refuse_to_overwrite(logits, logits)  # the compiler does not know whose view a tensor is
        return _inplace_operator(logits, targets, ignore_index, reduction), None, None
    loss, stats, *n_valid = _forward_operator(logits, targets, ignore_index, reduction)
    return loss, stats, n_valid[0] if n_valid else None


def _compiled_backward(grad_output, logits, targets, stats, n_valid, ignore_index):
    """cross_entropy_backward for torch.compile."""
    if stats is not None:
        return _backward_operator(grad_output, logits, targets, stats, n_valid, ignore_index)
    # In place it needs no operator: the compiler writes this over the logits, which nobody needs then.
    row_grads = grad_output.expand(targets.shape).unsqueeze(-1)
    ignored = (targets == ignore_index).unsqueeze(-1)
    return (logits.float() * row_grads).masked_fill(ignored, 0).to(logits.dtype)


class FusedCrossEntropyFunction(torch.autograd.Function):
    """`FusedCrossEntropyFunction.apply(logits, targets, ignore_index, reduction, inplace)`: for autograd."""

    @staticmethod
    def forward(ctx, logits, targets, ignore_index, reduction, inplace):
        ctx.ignore_index, ctx.inplace = ignore_index, inplace
        compiling = torch.compiler.is_compiling()
        forward = _compiled_forward if compiling else cross_entropy_forward
        loss, *saved = forward(logits, targets, ignore_index, reduction, inplace)
        if inplace and not compiling:
            # Autograd cannot see what a kernel writes; told, it refuses other uses of the old logits.
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits, targets, *saved)
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        if torch.is_grad_enabled():  # create_graph=True; `once_differentiable` would let the derivative vanish silently
            raise RuntimeError("The fused loss has no second derivative, which create_graph=True asks for.")
        compiling = torch.compiler.is_compiling()
        backward = _compiled_backward if compiling else cross_entropy_backward
        dlogits = backward(grad_output, *ctx.saved_tensors, ctx.ignore_index)
        if ctx.inplace and not compiling:
            torch.autograd.graph.increment_version(dlogits)
        return dlogits, None, None, None, None


class TritonCrossEntropyLoss(torch.nn.Module):
    """`loss(logits, targets)` of logits (..., V), targets (...): fp32, () or, with reduction "none", (...).

    logits are fp16, bf16 or fp32, targets int64 or int32.  Rows whose target is ignore_index have loss
    and gradient 0 and do not count in the mean; any other target outside [0, V) makes its row NaN.

    inplace=True saves the memory of a gradient: where the logits require one, the loss writes it over
    them.  AFTER THE LOSS THE LOGITS ARE THEIR GRADIENT, in the rest of the forward too:
    `logits.argmax()` or an accuracy computed then is nonsense, and no error tells.  Compute such
    things before the loss, or pass the loss logits.clone(), or leave inplace at False.  (fp16 logits
    stay as they are: their gradient may be too small for fp16 before the loss scale multiplies it.)

    What autograd can notice does raise: a use of the old logits whose backward needs them, a second
    loss on them, a second backward.  torch.compile notices only uses before the loss.

    Raises:
        TypeError, ValueError: a tensor's type, dtype, shape or device, or the reduction, is wrong; or
            with inplace=True the logits are a leaf that requires a gradient, or not contiguous.
    """

    def __init__(self, ignore_index: int = -100, reduction: str = "mean", inplace: bool = False):
        super().__init__()
        self.ignore_index, self.reduction, self.inplace = ignore_index, reduction, inplace

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inplace = self.inplace and torch.is_grad_enabled() and logits.requires_grad and logits.dtype != torch.float16
        return FusedCrossEntropyFunction.apply(logits, targets, self.ignore_index, self.reduction, inplace)
