"""Reverse KL in Triton: distillation from a teacher's logits, without a softmax tensor in memory.

    log_p = F.log_softmax(student_logits.float() / T, -1)                               # (..., V)
    log_q = F.log_softmax(teacher_logits.float() / T, -1)                               # (..., V)
    loss = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")  # KL(student || teacher)

The maths, for one row, that is, one token's V columns j, with s = student / T, t = teacher / T and
their maxima m_s and m_t:

    w[j] = exp(s[j] - m_s)     d_s = sum w[j]      w[j] / d_s is the student's probability p[j]
    z[j] = exp(t[j] - m_t)     d_t = sum z[j]      z[j] / d_t is the teacher's, q[j]
    x[j] = (s[j] - m_s) - (t[j] - m_t)             log p[j] - log q[j] but for log(d_t / d_s),
                                                   alike for all j
    a    = sum w[j] * x[j]                         a / d_s is the mean of x under p
    KL   = sum p[j] * (log p[j] - log q[j])  =  a / d_s + log(d_t / d_s)

Online softmax (cross_entropy_kernel.py) finds all five in one pass.  Where a tile raises the
maxima, by rise_s and rise_t, each x so far grows by rise_t - rise_s, each w shrinks by
exp(-rise_s), and each z by exp(-rise_t).

The obvious kernel, first below, takes a row of 32,768 as one tile.  The logits of its 512 threads
fill all registers of a multiprocessor (sm_90).  So one block fits, 16 of 64 possible warps.  These
warps load together and wait together, and while they compute, nothing is loaded.  This occupancy
decides, and not arithmetic: a column's 3 exponentials, at 16 per clock and multiprocessor, take an
H200 0.6 of the time of its 6 bytes.  Two remedies, of which docs/reverse_kl.md has the times:

1. Smaller tiles, 16 columns per thread, each with its own maxima and sums.  Warps meet once per
   row, and two blocks fit.  The gradient reads the row again, last tile first, from the GPU's cache
   as far as the row has room there.
2. Two kernels.  The forward saves the five numbers, 20 bytes, and the backward reads the row again,
   from memory.  Its warps never meet, and need so few registers, 56 per thread or less, that 36 of
   64 warps fit or more.

The first gives the gradient for a grad_output of 1, and begins anew for another.  The second serves
fp16 (for its loss scale), reduction "none" and a vocabulary split over GPUs.  Bytes per bf16 logit
of the student, if all is read once:

                eager, as above                                             remedy 1    remedy 2
    forward     to fp32 12, log_softmax 16, exp 8, - 12, * 12, sum 4 = 64          6           4
    backward    * 16, exp 12, add 12, log_softmax 12, to bf16 6      = 58          0           6
    memory      log_p, log_q, exp, difference: fp32                  = 16          2           2

New in Triton: `tl.reshape` makes a dimension of the 8 columns that a thread loads at once.
`tl.static_range` is a loop that Triton unrolls when it compiles.  A load says what the cache is to
keep.

Limits: fp16, bf16 and fp32 logits of any finite value, or -inf; temperatures from 1e-30 on; the
loss is fp32, not times T**2; no second derivative, no gradient for the teacher; rows with gaps that
8 does not divide are copied.  A column counts 0 if the student's probability is 0 (F.kl_div: NaN if
the teacher's is 0 too).  If only the teacher's is 0, loss and gradient are not finite, as in
PyTorch.

This lesson is carried away as three files: itself, cross_entropy_kernel.py, two of whose functions
its kernels call, and kernel_support.py.
"""

import torch

import kernel_support as support
from cross_entropy_kernel import LN2, cut_row, row_gradients, tile_of
from kernel_support import FLOATS, FP32, tl, triton

# See below, "Any magnitude".
SHRINK = tl.constexpr(2.0**-24)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min * 2.0**-24)


def reverse_kl_reference(
    student, teacher, mask=None, temperature=1.0, reduction="batchmean", ignore_index=-100
):
    """Return the eager loss of two (..., V) in their dtype.

    mask (...) is True for rows that count, or holds the rows' targets.
    """
    counted = torch.ones_like(student[..., 0], dtype=torch.bool) if mask is None else mask
    counted = counted if counted.dtype == torch.bool else counted != ignore_index  # (...)

    def log_softmax(logits):
        return (logits.where(counted[..., None], 0) / temperature).log_softmax(-1)

    log_p, log_q = log_softmax(student), log_softmax(teacher)  # (..., V)
    log_ratio = (log_p - log_q).masked_fill(log_p == -float("inf"), 0)
    row_loss = (log_p.exp() * log_ratio).sum(-1)  # (...)
    if reduction == "none":
        return row_loss
    return row_loss.sum() / (counted.sum() if reduction == "batchmean" else 1)


# ---- The obvious kernel ----------------------------------------------------------------------

# One program per row, the row as one tile, each logit read once, loss and gradient in one kernel.
# A row of more than 32,768 columns takes several tiles, and all tiles but the last are read again.
# The gradient is derived below.  This one is for a grad_output of 1.


@triton.jit
def _obvious_kernel(
    student_ptr,  # (n_rows, V), contiguous
    teacher_ptr,  # (n_rows, V), contiguous
    row_loss_ptr,  # (n_rows,) fp32
    dstudent_ptr,  # (n_rows, V), contiguous
    n_rows,
    V: tl.constexpr,
    TILE: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * V
    LAST: tl.constexpr = (V - 1) // TILE * TILE
    m_s, m_t, d_s, d_t, a = -1e38, -1e38, 0.0, 0.0, 0.0
    for first in tl.static_range(0, V, TILE):  # once, if the row is a tile
        cols = first + tl.arange(0, TILE)
        mask = cols < V
        s = tl.load(student_ptr + start + cols, mask=mask, other=-float("inf")).to(tl.float32)
        t = tl.load(teacher_ptr + start + cols, mask=mask, other=-float("inf")).to(tl.float32)
        m_s_new = tl.maximum(m_s, tl.max(s))
        m_t_new = tl.maximum(m_t, tl.max(t))
        w = tl.exp(s - m_s_new)
        a = a * tl.exp(m_s - m_s_new) + tl.sum(tl.where(mask, w * (s - t), 0.0))
        d_s = d_s * tl.exp(m_s - m_s_new) + tl.sum(w)
        d_t = d_t * tl.exp(m_t - m_t_new) + tl.sum(tl.exp(t - m_t_new))
        m_s, m_t = m_s_new, m_t_new
    kl = a / d_s + (m_t + tl.log(d_t)) - (m_s + tl.log(d_s))
    tl.store(row_loss_ptr + tl.program_id(0), kl / n_rows)
    for first in tl.static_range(LAST, -1, -TILE):
        cols = first + tl.arange(0, TILE)
        mask = cols < V
        if first != LAST:  # the last tile is still there
            s = tl.load(student_ptr + start + cols, mask=mask, other=-float("inf")).to(tl.float32)
            t = tl.load(teacher_ptr + start + cols, mask=mask, other=-float("inf")).to(tl.float32)
        dstudent = tl.exp(s - m_s) / d_s * (s - t - a / d_s) / n_rows
        tl.store(dstudent_ptr + start + cols, dstudent, mask=mask)


# ---- What the others are made of -------------------------------------------------------------

# Alignment.  cut_row tells a row's body, whose addresses are multiples of 16 bytes, from its edge
# (cross_entropy_kernel.py says why).


@triton.jit
def _load(s_ptr, t_ptr, cols, mask, POLICY: tl.constexpr):
    """The student's and the teacher's logits; POLICY: what leaves the GPU's cache first."""
    s = tl.load(s_ptr + cols, mask=mask, other=-float("inf"), eviction_policy=POLICY)
    t = tl.load(t_ptr + cols, mask=mask, other=-float("inf"), eviction_policy=POLICY)
    return s.to(tl.float32), t.to(tl.float32)


# Any magnitude.  The maths' m_s, m_t, x and a are kept in the logits' own unit, not yet divided by
# T, and times SHRINK.  A maximum is subtracted before anything is rounded.  So the difference is
# exact near the maximum, and 0 in a row of 1e10 everywhere.  A factor that is a power of 2 rounds
# nothing.  With SHRINK neither the difference of the two ends of fp32 overflows nor the sum of 4
# million such differences.  The first maximum is LOWEST, a finite number: in a column of -inf (a
# masked vocabulary) -inf - -inf would be NaN.


def _unit(temperature):
    """Return unit, so that exp(difference / T) = 2**(shrunk difference * unit)."""
    return 1 / (LN2.value * SHRINK.value * temperature)


@triton.jit
def _w_x_z(logits, unit, m_s, m_t):
    """The maths' w, x and z, of (student's, teacher's) logits and shrunk maxima."""
    below_s = tl.fma(logits[0], SHRINK, -m_s)
    below_t = tl.fma(logits[1], SHRINK, -m_t)
    w = tl.exp2(below_s * unit)
    x = tl.where(w > 0, below_s - below_t, 0.0)  # without `where`, NaN if both logits are -inf
    return w, x, tl.exp2(below_t * unit)


@triton.jit
def _rescale(a, d_s, d_t, rise_s, rise_t, unit):
    """The sums so far, for maxima that have risen."""
    decay_s = tl.exp2(-rise_s * unit)
    a = tl.where(decay_s > 0, (a + d_s * (rise_t - rise_s)) * decay_s, 0.0)  # inf * 0 is NaN
    return a, d_s * decay_s, d_t * tl.exp2(-rise_t * unit)


# Warps that do not wait.  A thread keeps maxima and sums of its own 8 columns of each tile row.
# The threads meet once, at the row's end.


@triton.jit
def _join_threads(m_s, m_t, d_s, d_t, a, s, t, unit):
    """A row's five numbers, of its threads' (THREADS,) and its edge's logits s and t."""
    m_s_row = tl.maximum(tl.max(m_s), tl.max(s) * SHRINK)
    m_t_row = tl.maximum(tl.max(m_t), tl.max(t) * SHRINK)
    w, x, z = _w_x_z((s, t), unit, m_s_row, m_t_row)
    a, d_s, d_t = _rescale(a, d_s, d_t, m_s_row - m_s, m_t_row - m_t, unit)
    a_row = tl.sum(a) + tl.sum(w * x)
    d_s_row = tl.sum(d_s) + tl.sum(w)
    d_t_row = tl.sum(d_t) + tl.sum(z)
    return m_s_row, m_t_row, d_s_row, d_t_row, a_row


# The gradient, for scale = dL/dloss of a row (grad_output, over n_counted for a mean).  ds[j]
# changes p[i] by p[i] * ([i == j] - p[j]), so
#
#   dKL/ds[j]   = p[j] * ((log p[j] - log q[j]) - KL)         the changes of log p have the mean 0
#               = p[j] * (x[j] - a / d_s)                     log(d_t / d_s) is in both: it cancels
#   dstudent[j] = w[j] * (scale / T / d_s) * (x[j] - a / d_s) neither a logarithm nor d_t is needed
#
# In this order: the factor also undoes the shrinking of x, and a small w times a shrunk x alone
# would fall out of the range of fp32.


@triton.jit
def _store_dstudent(
    student_ptr, student_row_stride,
    teacher_ptr, teacher_row_stride,
    counted_ptr, n_counted_ptr, MEAN: tl.constexpr,
    stats_ptr,
    scale,  # a mean's, before it is divided
    dstudent_ptr,
    n_cols,
    unit,
    TILE_ROWS: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of this program's row; the arguments are those of the kernels below."""
    row = tl.program_id(0)
    TILE_SIZE: tl.constexpr = TILE_ROWS * THREADS * 8
    tile = tile_of(TILE_ROWS, THREADS * 8)
    s_row_ptr, s_ptr, _, _, _ = cut_row(student_ptr, row, student_row_stride, n_cols)
    t_row_ptr, t_ptr, _, _, _ = cut_row(teacher_ptr, row, teacher_row_stride, n_cols)
    out_row_ptr, out_ptr, n_body, edge, in_edge = cut_row(dstudent_ptr, row, n_cols, n_cols)
    counted = True if counted_ptr is None else tl.load(counted_ptr + row)
    n_read, read_edge = tl.where(counted, n_body, 0), in_edge & counted
    m_s, m_t = tl.load(stats_ptr + 5 * row), tl.load(stats_ptr + 5 * row + 1)
    d_s, a = tl.load(stats_ptr + 5 * row + 2), tl.load(stats_ptr + 5 * row + 4)
    if MEAN:
        scale /= tl.num_programs(0) if n_counted_ptr is None else tl.load(n_counted_ptr)
    mean_x = tl.where(counted, a / d_s, 0.0)
    inverse_t = unit * LN2 * SHRINK
    # 1 / T is in it twice, once for x, whose shrinking ends here
    factor = tl.where(counted, scale * inverse_t / d_s * (unit * LN2), 0.0)
    # Last tile first: it was read last, and is still in the cache.  ".cs" stores without taking
    # room there.
    for done in range(0, n_body, TILE_SIZE):
        cols = (n_body - 1) // TILE_SIZE * TILE_SIZE - done + tile
        logits = _load(s_ptr, t_ptr, cols, cols < n_read, "evict_first")
        w, x, _z = _w_x_z(logits, unit, m_s, m_t)
        dstudent = w * factor * (x - mean_x)
        tl.store(out_ptr + cols, dstudent, mask=cols < n_body, cache_modifier=".cs")
    logits = _load(s_row_ptr, t_row_ptr, edge, read_edge, "evict_first")
    w, x, _z = _w_x_z(logits, unit, m_s, m_t)
    tl.store(out_row_ptr + edge, w * factor * (x - mean_x), mask=in_edge)


# ---- The kernels that are used: the forward is remedy 2, and with dstudent_ptr remedy 1 ------


@triton.jit
def _reverse_kl_fwd_kernel(
    student_ptr, student_row_stride,  # (n_rows, n_cols)
    teacher_ptr, teacher_row_stride,  # (n_rows, n_cols), its rows cut like the student's
    counted_ptr,  # (n_rows,) bool; None: all rows count
    n_counted_ptr,  # (), the number of rows that count; None: all do, or no mean
    MEAN: tl.constexpr,
    stats_ptr,  # (n_rows, 5) fp32: m_s, m_t, d_s, d_t, a
    row_loss_ptr,  # (n_rows,) fp32
    dstudent_ptr,  # (n_rows, n_cols), contiguous: the gradient for a grad_output of 1; None: none
    n_cols,
    n_kept,  # columns at the row's end that the cache is to keep for the gradient
    unit,
    TILE_ROWS: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    TILE_SIZE: tl.constexpr = TILE_ROWS * THREADS * 8
    tile = tile_of(TILE_ROWS, THREADS * 8)
    cut = cut_row(student_ptr, row, student_row_stride, n_cols)
    s_row_ptr, s_ptr, n_body, edge, in_edge = cut
    t_row_ptr, t_ptr, _, _, _ = cut_row(teacher_ptr, row, teacher_row_stride, n_cols)
    counted = True if counted_ptr is None else tl.load(counted_ptr + row)
    # a row that does not count is not read
    n_read, read_edge = tl.where(counted, n_body, 0), in_edge & counted

    zero = tl.zeros((THREADS,), dtype=tl.float32)
    m_s, m_t, d_s, d_t, a = zero + LOWEST, zero + LOWEST, zero, zero, zero  # one for each thread
    first_kept = tl.cdiv(tl.maximum(n_read - n_kept, 0), TILE_SIZE) * TILE_SIZE
    for kept in tl.static_range(2):  # first what the cache may lose, then what it is to keep
        for first in range(first_kept if kept else 0, n_read if kept else first_kept, TILE_SIZE):
            cols = first + tile
            s, t = _load(s_ptr, t_ptr, cols, cols < n_read, "evict_last" if kept else "evict_first")
            s, t = tl.reshape(s, TILE_ROWS, THREADS, 8), tl.reshape(t, TILE_ROWS, THREADS, 8)
            m_s_new = tl.maximum(m_s, tl.max(tl.max(s, axis=2), axis=0) * SHRINK)
            m_t_new = tl.maximum(m_t, tl.max(tl.max(t, axis=2), axis=0) * SHRINK)
            w, x, z = _w_x_z((s, t), unit, m_s_new[None, :, None], m_t_new[None, :, None])
            a, d_s, d_t = _rescale(a, d_s, d_t, m_s_new - m_s, m_t_new - m_t, unit)
            a += tl.sum(tl.sum(w * x, axis=2), axis=0)
            d_s += tl.sum(tl.sum(w, axis=2), axis=0)
            d_t += tl.sum(tl.sum(z, axis=2), axis=0)
            m_s, m_t = m_s_new, m_t_new
    s, t = _load(s_row_ptr, t_row_ptr, edge, read_edge, "evict_first")
    stats = _join_threads(m_s, m_t, d_s, d_t, a, s, t, unit)

    _m_s_row, _m_t_row, d_s_row, d_t_row, a_row = stats
    # unit * LN2 = 1 / (T * SHRINK): undoes the shrinking, and divides by T.  div_rn: 1 / 1 is
    # exactly 1.
    kl = a_row / d_s_row * (unit * LN2) + tl.log(tl.div_rn(d_t_row, d_s_row))
    tl.store(row_loss_ptr + row, tl.where(counted, kl, 0.0))
    for i in tl.static_range(5):
        tl.store(stats_ptr + 5 * row + i, stats[i])
    if dstudent_ptr is not None:
        tl.debug_barrier()  # one thread stores the statistics, all load them
        _store_dstudent(
            student_ptr, student_row_stride,
            teacher_ptr, teacher_row_stride,
            counted_ptr, n_counted_ptr, MEAN,
            stats_ptr,
            1.0,
            dstudent_ptr,
            n_cols,
            unit,
            TILE_ROWS,
            THREADS,
        )  # fmt: skip


# The backward of both remedies.
@triton.jit
def _reverse_kl_bwd_kernel(
    student_ptr, student_row_stride,  # (n_rows, n_cols)
    teacher_ptr, teacher_row_stride,  # (n_rows, n_cols), its rows cut like the student's
    counted_ptr,  # (n_rows,) bool; None: all rows count
    n_counted_ptr,  # (), the number of rows that count; None: all do, or no mean
    MEAN: tl.constexpr,
    stats_ptr,  # (n_rows, 5) fp32
    grad_output_ptr,  # (n_rows,)
    grad_output_stride,  # 0: all rows share one; None: so they do, and for 1 dstudent is there
    dstudent_ptr,  # (n_rows, n_cols), contiguous
    n_cols,
    unit,
    TILE_ROWS: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    if grad_output_stride is None:
        scale = tl.load(grad_output_ptr)
    else:
        scale = tl.load(grad_output_ptr + tl.cast(tl.program_id(0), tl.int64) * grad_output_stride)
    # Only the GPU knows whether grad_output is 1: the host launches without looking.
    if grad_output_stride is not None or scale != 1.0:
        _store_dstudent(
            student_ptr, student_row_stride,
            teacher_ptr, teacher_row_stride,
            counted_ptr, n_counted_ptr, MEAN,
            stats_ptr,
            scale,
            dstudent_ptr,
            n_cols,
            unit,
            TILE_ROWS,
            THREADS,
        )  # fmt: skip


# ---- Launches --------------------------------------------------------------------------------


def _options(student, warps):
    """Return the options of a launch, in bf16 on an H200 within 2 % of the best of both kernels."""
    tile_rows = (8 if warps == 4 else 4) // student.element_size()
    return {"TILE_ROWS": tile_rows, "THREADS": 32 * warps, "num_warps": warps}


def _columns_kept(student):
    """Return how many of a row's columns the cache is to keep: 5 to 10 % less time on an H200."""
    if not student.is_cuda:
        return student.shape[-1] // 2
    gpu = torch.cuda.get_device_properties(student.device)
    return gpu.L2_cache_size // (4 * gpu.multi_processor_count * student.element_size())


def _check(student, teacher, mask, temperature, reduction, *others) -> int:
    """Refuse what the kernels cannot compute; return the number of rows.

    others: further arguments of check_tensors.
    """
    lengths = support.check_tensors(
        ("student_logits", student, FLOATS, ("...", "V")),
        ("teacher_logits", teacher, FLOATS, ("...", "V")),
        ("mask?", mask, (torch.bool,), ("...",)),
        *others,
    )
    if lengths["V"] == 0:
        given = f"student_logits has shape {tuple(student.shape)}"
        raise ValueError(f"{given}, expected (..., V) with V >= 1: reshape it.")
    if reduction not in ("batchmean", "sum", "none") or not 0 < temperature < float("inf"):
        given = f"reduction is {reduction!r}, temperature {temperature}"
        expected = "'batchmean', 'sum' or 'none', and a positive number"
        raise ValueError(f"{given}; expected {expected}: change it.")
    return lengths["n_rows"]


def _rows_cut_alike(logits):
    """Return logits as rows that are cut like those of a contiguous tensor, and their stride."""
    rows, row_stride = support.as_rows(logits)
    if (row_stride - logits.shape[-1]) % 8:
        return rows.contiguous(), logits.shape[-1]
    return rows, row_stride


def _common_arguments(student, teacher, mask, n_counted, reduction):
    """Return the first arguments of both kernels."""
    mask = None if mask is None else mask.contiguous()
    rows = *_rows_cut_alike(student), *_rows_cut_alike(teacher)
    return *rows, mask, n_counted, reduction == "batchmean"


def _reduced(row_loss, n_counted, reduction):
    if reduction != "batchmean":
        return row_loss if reduction == "none" else row_loss.sum()
    if n_counted is None:
        return row_loss.mean()
    return row_loss.sum() / n_counted  # 0 / 0 = NaN where no row counts, as in PyTorch


def _forward(
    student, teacher, mask=None, temperature=1.0, reduction="batchmean", gradient=False,
    launches=False,
):  # fmt: skip
    """Return the forward's results; not yet written without `launches`."""
    n_rows = _check(student, teacher, mask, temperature, reduction)
    n_counted = mask.sum() if reduction == "batchmean" and mask is not None else None
    row_loss = student.new_empty(student.shape[:-1], dtype=torch.float32)  # (...) fp32
    stats = row_loss.new_empty((n_rows, 5))  # (n_rows, 5) fp32
    dstudent = student.new_empty(student.shape) if gradient else None  # (..., V)
    if launches and n_rows > 0:
        with support.on_device_of(student):
            _reverse_kl_fwd_kernel[(row_loss.numel(),)](
                *_common_arguments(student, teacher, mask, n_counted, reduction),
                stats,
                row_loss,
                dstudent,
                student.shape[-1],
                _columns_kept(student) if gradient else 0,
                _unit(temperature),
                **_options(student, 16 if gradient else 4),
                enable_fp_fusion=True,
            )
    return _reduced(row_loss, n_counted, reduction), stats, n_counted, dstudent


@support.operator(
    "tutorial::reverse_kl_forward",
    "(Tensor student, Tensor teacher, Tensor? mask=None, float temperature=1.0, "
    "str reduction='batchmean', bool gradient=False) -> Tensor[]",
    _forward,
    present=lambda student, teacher, mask=None, T=1.0, reduction="batchmean", gradient=False: (
        [True, True, reduction == "batchmean" and mask is not None, gradient]
    ),
)
def reverse_kl_forward(
    student, teacher, mask=None, temperature=1.0, reduction="batchmean", gradient=False
):
    """Return loss, stats, n_counted and dstudent of student and teacher (..., V), of any strides.

    mask (...) is True for rows that count; None: all rows count.  loss is () fp32, or (...) with
    reduction "none".  stats (n_rows, 5) fp32 holds m_s, m_t, d_s, d_t and a for the backward.
    n_counted () int64 is the number of rows that count; None unless a mean over a mask needs it.
    dstudent (..., V) is the gradient for a grad_output of 1; None unless `gradient` asks for it.
    """
    return _forward(student, teacher, mask, temperature, reduction, gradient, launches=True)


@support.operator(
    "tutorial::reverse_kl_backward",
    "(Tensor grad_output, Tensor student, Tensor teacher, Tensor? mask, Tensor stats, "
    "Tensor? n_counted, float temperature, str reduction) -> Tensor",
    lambda grad_output, student, *others: student.new_empty(student.shape),
)
def reverse_kl_backward(
    grad_output, student, teacher, mask, stats, n_counted, temperature, reduction, dstudent=None
):
    """Return dstudent (..., V) in student's dtype, from what a forward was given and returned.

    grad_output is () or (...) fp32; with a dstudent it is ().  dstudent: the forward's.  It is kept
    where grad_output is 1, and otherwise written anew.
    """
    shape = ("...",) if grad_output.ndim and dstudent is None else ()
    others = ("grad_output", grad_output, FLOATS, shape), ("stats", stats, FP32, ("n_rows", 5))
    n_rows = _check(student, teacher, mask, temperature, reduction, *others)
    row_grads = row_gradients(grad_output)
    if dstudent is not None:
        row_grads = grad_output, None  # the kernel writes dstudent only if grad_output is not 1
    else:
        dstudent = student.new_empty(student.shape)  # (..., V)
    if n_rows > 0:
        with support.on_device_of(student):
            _reverse_kl_bwd_kernel[(n_rows,)](
                *_common_arguments(student, teacher, mask, n_counted, reduction),
                stats,
                *row_grads,
                dstudent,
                student.shape[-1],
                _unit(temperature),
                **_options(student, 4),
                enable_fp_fusion=True,
            )
    return dstudent


# ---- A vocabulary split over processes -------------------------------------------------------


def combine_statistics(stats, temperature, group):
    """Return stats (n_rows, 5) of whole rows, from those of each process's columns."""
    parts = [torch.empty_like(stats) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, stats, group)
    m_s, m_t, d_s, d_t, a = torch.stack(parts).unbind(-1)  # (n_processes, n_rows) each
    rise_s, rise_t = m_s.amax(0) - m_s, m_t.amax(0) - m_t
    decay_s = torch.exp2(-rise_s * _unit(temperature))
    a = torch.where(decay_s > 0, (a + d_s * (rise_t - rise_s)) * decay_s, 0.0)
    d_s, d_t = d_s * decay_s, d_t * torch.exp2(-rise_t * _unit(temperature))
    return torch.stack([m_s.amax(0), m_t.amax(0), d_s.sum(0), d_t.sum(0), a.sum(0)], dim=1)


def loss_of_statistics(stats, mask, n_counted, temperature, reduction, shape):
    """Return the loss from the statistics (n_rows, 5) of whole rows, which have the shape (...)."""
    _, _, d_s, d_t, a = stats.unbind(1)
    row_loss = (a / d_s * (LN2.value * _unit(temperature)) + torch.log(d_t / d_s)).view(shape)
    return _reduced(row_loss if mask is None else row_loss.where(mask, 0), n_counted, reduction)


# ---- Autograd --------------------------------------------------------------------------------


class ObviousReverseKLFunction(torch.autograd.Function):
    """`.apply(student, teacher)`: the mean of contiguous rows, whose grad_output must be 1."""

    @staticmethod
    def forward(ctx, student, teacher):
        n_rows, V = student.shape
        row_loss = student.new_empty(n_rows, dtype=torch.float32)
        ctx.dstudent = torch.empty_like(student)
        tile = min(triton.next_power_of_2(V), 32_768)
        args = student, teacher, row_loss, ctx.dstudent, n_rows, V, tile
        _obvious_kernel[(n_rows,)](*args, num_warps=16, enable_fp_fusion=True)
        return row_loss.sum()

    @staticmethod
    def backward(ctx, grad_output):
        return ctx.dstudent, None


class TritonReverseKLFunction(torch.autograd.Function):
    """The loss, connected to autograd: `.apply` takes the arguments of `forward` after ctx."""

    @staticmethod
    def forward(ctx, student, teacher, mask, temperature, reduction, group, grad_enabled):
        if grad_enabled and ctx.needs_input_grad[1]:
            given = "teacher_logits requires a gradient, expected a constant"
            raise ValueError(f"{given}: pass teacher_logits.detach().")
        now = grad_enabled and ctx.needs_input_grad[0]
        now = now and reduction != "none" and student.dtype != torch.float16
        # a split vocabulary's statistics must be combined before a gradient can be computed
        now = now and group is None
        ctx.options = options = temperature, reduction
        results = reverse_kl_forward(student, teacher, mask, *options, now)
        loss, stats, n_counted, ctx.dstudent = results
        if group is not None:
            stats = combine_statistics(stats, temperature, group)
            loss = loss_of_statistics(stats, mask, n_counted, *options, student.shape[:-1])
        ctx.save_for_backward(student, teacher, mask, stats, n_counted)
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        support.refuse_second_derivative("TritonReverseKLLoss")
        # ctx lets go of dstudent, so that dstudent becomes .grad without a copy
        dstudent, ctx.dstudent = ctx.dstudent, None
        if dstudent is None:
            dstudent = reverse_kl_backward(grad_output, *ctx.saved_tensors, *ctx.options)
        elif torch.compiler.is_compiling():  # the compiler writes this over dstudent
            dstudent = (dstudent.float() * grad_output).to(dstudent.dtype)
        else:
            reverse_kl_backward(grad_output, *ctx.saved_tensors, *ctx.options, dstudent)
        return dstudent, *[None] * 6


class TritonReverseKLLoss(torch.nn.Module):
    """`loss(student_logits, teacher_logits, mask)` of logits (..., V): KL(student || teacher).

    The loss is () fp32, or (...) with reduction "none".

    mask (...): True for rows that count, or the rows' targets; other rows, and rows whose target is
        ignore_index, have loss and gradient 0.
    temperature: divides both logits.
    reduction: "batchmean" (over rows that count), "sum", "none".
    group: processes, each of which passes some of the columns.

    Raises:
        TypeError, ValueError: the kernels cannot take a tensor, the temperature or the reduction is
            wrong, or the teacher's logits require a gradient.
    """

    def __init__(self, temperature=1.0, ignore_index=-100, reduction="batchmean", group=None):
        super().__init__()
        self.ignore_index = support.number("ignore_index", ignore_index, int)
        self.args = support.number("temperature", temperature, float), reduction, group

    def forward(self, student_logits, teacher_logits, mask=None) -> torch.Tensor:
        if getattr(mask, "dtype", None) in (torch.int64, torch.int32):
            mask = mask != self.ignore_index
        options = *self.args, torch.is_grad_enabled()
        return TritonReverseKLFunction.apply(student_logits, teacher_logits, mask, *options)
