"""Reverse KL in Triton: distillation from a teacher's logits, without a softmax tensor in memory.

    log_p, log_q = (F.log_softmax(logits.float() / T, -1) for logits in (student_logits, teacher_logits))  # (..., V)
    loss = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")                 # KL(student || teacher)

The maths, for one row, that is, one token's V columns j, with s = student / T, t = teacher / T, maxima m_s and m_t:

    w[j] = exp(s[j] - m_s)     d_s = sum w[j]           w[j] / d_s is the student's probability p[j]
    z[j] = exp(t[j] - m_t)     d_t = sum z[j]           z[j] / d_t is the teacher's, q[j]
    x[j] = (s[j] - m_s) - (t[j] - m_t)                  log p[j] - log q[j] but for log(d_t / d_s), alike for all j
    a    = sum w[j] * x[j]                              a / d_s is the mean of x under p
    KL   = sum p[j] * (log p[j] - log q[j])  =  a / d_s + log(d_t / d_s)

Online softmax (cross_entropy_kernel.py) finds all five in one pass.  Where a tile raises the maxima, by rise_s and
rise_t, each x so far grows by rise_t - rise_s, each w shrinks by exp(-rise_s), and each z by exp(-rise_t).

The obvious kernel takes a row of 32,768 as one tile.  The logits of its 512 threads fill all registers of a
multiprocessor (sm_90): one block fits, 16 of 64 possible warps, which load together and wait together, and while they
compute, nothing is loaded.  This, occupancy, decides, not arithmetic: a column's 3 exponentials, at 16 per clock and
multiprocessor, take an H200 0.6 of the time of its 6 bytes.  Two remedies, of which README has the times:

1. Smaller tiles, 16 columns per thread, each with its own maxima and sums: warps meet once per row, two blocks fit.
   The gradient reads the row again, last tile first, from the GPU's cache, or as much of it as has room there.
2. Two kernels: the forward saves the five numbers, 20 bytes, and the backward reads the row again, from memory.  Its
   warps never meet, and need so few registers, 56 per thread or less, that 36 of 64 fit or more.

The first gives the gradient for a grad_output of 1, and begins anew for another.  The second serves fp16 (for its loss
scale), reduction "none" and a vocabulary split over GPUs.  Bytes per bf16 logit of the student, if all is read once:

                eager, as above                                             remedy 1    remedy 2
    forward     to fp32 12, log_softmax 16, exp 8, - 12, * 12, sum 4 = 64          6           4
    backward    * 16, exp 12, add 12, log_softmax 12, to bf16 6      = 58          0           6
    memory      log_p, log_q, exp, difference: fp32                  = 16          2           2

New in Triton: `tl.reshape` makes a dimension of the 8 columns that a thread loads at once; a kernel calls another.
Limits: |logits / T| below 1e38, or -inf; fp32 loss, not times T**2; no second derivative, none for the teacher; rows
with gaps that 8 does not divide are copied.  A column of student's probability 0 counts 0 (F.kl_div: NaN, if it is the
teacher's too); where only the teacher's is 0, loss and gradient are not finite, as in PyTorch.
"""

import contextlib
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # no GPU: run on the CPU; must precede `import triton`

import triton
import triton.language as tl

with contextlib.suppress(ModuleNotFoundError):  # beside this file; without it bf16 is truncated on a CPU
    import interpreter_rounding  # noqa: F401

INTERPRETED = triton.knobs.runtime.interpret  # are the kernels below run on the CPU, by the interpreter?
LOWEST = tl.constexpr(-1e38)  # finite: in a column of -inf, -inf - -inf would be NaN
# exp(x) = 2**(x / LN2), and 2**x is what a GPU computes: the kernels' m_s, m_t, x and a are kept divided by LN2.
LN2 = tl.constexpr(0.6931471805599453)


def reverse_kl_reference(student, teacher, mask=None, temperature=1.0, reduction="batchmean", ignore_index=-100):
    """Eager loss of two (..., V) in their own dtype; mask (...) is True for rows that count, or holds their targets."""
    counted = torch.ones_like(student[..., 0], dtype=torch.bool) if mask is None else mask
    counted = counted if counted.dtype == torch.bool else counted != ignore_index
    log_p, log_q = ((x.where(counted[..., None], 0) / temperature).log_softmax(-1) for x in (student, teacher))
    row_loss = (log_p.exp() * (log_p - log_q).masked_fill(log_p == -float("inf"), 0)).sum(-1)  # (...)
    return row_loss if reduction == "none" else row_loss.sum() / (counted.sum() if reduction == "batchmean" else 1)


# A row's body goes from its first multiple of 8 columns (16 bytes) to its last; up to 7 before and after are its edge.
@triton.jit
def _cut_row(ptr, row, row_stride, n_cols):
    start = tl.cast(row, tl.int64) * row_stride  # int64: at V = 131,072 it outgrows 32 bits from row 16,384 on
    n_before = tl.minimum(-start & 7, n_cols).to(tl.int32)
    n_body = (n_cols - n_before) // 8 * 8
    lane = tl.arange(0, 16)
    edge = tl.where(lane < 8, lane, n_cols - 16 + lane)
    in_edge = tl.where(lane < 8, lane < n_before, edge >= n_before + n_body)
    return ptr + start, ptr + (start + 7) // 8 * 8, n_body, edge, in_edge


@triton.jit
def _load(s_ptr, t_ptr, cols, mask, POLICY: tl.constexpr):  # POLICY: what leaves the GPU's cache first
    s = tl.load(s_ptr + cols, mask=mask, other=-float("inf"), eviction_policy=POLICY)
    t = tl.load(t_ptr + cols, mask=mask, other=-float("inf"), eviction_policy=POLICY)
    return s.to(tl.float32), t.to(tl.float32)


@triton.jit
def _w_x_z(logits, unit, m_s, m_t):  # of raw student and teacher logits; unit = 1 / (T * LN2)
    u, v = tl.fma(logits[0], unit, -m_s), tl.fma(logits[1], unit, -m_t)
    w = tl.exp2(u)
    return w, tl.where(w > 0, u - v, 0.0), tl.exp2(v)  # without `where`, NaN if both logits are -inf


@triton.jit
def _rescale(a, d_s, d_t, rise_s, rise_t):
    factor = tl.exp2(-rise_s)
    a = tl.where(factor > 0, (a + d_s * (rise_t - rise_s)) * factor, 0.0)  # `where`: inf * 0 is NaN
    return a, d_s * factor, d_t * tl.exp2(-rise_t)


@triton.jit
def _reverse_kl_fwd_kernel(
    student_ptr, student_row_stride, teacher_ptr, teacher_row_stride,  # (n_rows, n_cols) each, their rows cut alike
    counted_ptr, n_counted_ptr, MEAN: tl.constexpr,  # (n_rows,) bool; (), their number for a mean; None: all count
    stats_ptr, row_loss_ptr,  # (n_rows, 5) fp32: m_s, m_t, d_s, d_t, a; (n_rows,)
    dstudent_ptr,  # (n_rows, n_cols), contiguous: remedy 1, the gradient for a grad_output of 1; None: remedy 2
    n_cols, n_kept, unit, TILE_ROWS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    TILE_SIZE: tl.constexpr = TILE_ROWS * THREADS * 8
    unit = tl.cast(unit, tl.float32)  # from fp64, as which torch.compile passes a Python float
    tile = tl.arange(0, TILE_ROWS)[:, None] * (THREADS * 8) + tl.arange(0, THREADS * 8)[None, :]
    s_row_ptr, s_ptr, n_body, edge, in_edge = _cut_row(student_ptr, row, student_row_stride, n_cols)
    t_row_ptr, t_ptr, _, _, _ = _cut_row(teacher_ptr, row, teacher_row_stride, n_cols)
    counted = True if counted_ptr is None else tl.load(counted_ptr + row)
    n_read, read_edge = tl.where(counted, n_body, 0), in_edge & counted  # a row that does not count is not read
    zero = tl.zeros((THREADS,), dtype=tl.float32)
    m_s, m_t, d_s, d_t, a = zero + LOWEST, zero + LOWEST, zero, zero, zero  # one for each thread
    first_kept = tl.cdiv(tl.maximum(n_read - n_kept, 0), TILE_SIZE) * TILE_SIZE
    for kept in tl.static_range(2):
        for first in range(first_kept if kept else 0, n_read if kept else first_kept, TILE_SIZE):
            cols = first + tile
            s, t = _load(s_ptr, t_ptr, cols, cols < n_read, "evict_last" if kept else "evict_first")
            s, t = tl.reshape(s, TILE_ROWS, THREADS, 8), tl.reshape(t, TILE_ROWS, THREADS, 8)
            m_s_new = tl.maximum(m_s, tl.max(tl.max(s, axis=2), axis=0) * unit)
            m_t_new = tl.maximum(m_t, tl.max(tl.max(t, axis=2), axis=0) * unit)
            w, x, z = _w_x_z((s, t), unit, m_s_new[None, :, None], m_t_new[None, :, None])
            a, d_s, d_t = _rescale(a, d_s, d_t, m_s_new - m_s, m_t_new - m_t)
            a += tl.sum(tl.sum(w * x, axis=2), axis=0)
            d_s += tl.sum(tl.sum(w, axis=2), axis=0)
            d_t += tl.sum(tl.sum(z, axis=2), axis=0)
            m_s, m_t = m_s_new, m_t_new
    # The threads meet: every sum is rescaled to the row's maxima, and the edge is added.
    s, t = _load(s_row_ptr, t_row_ptr, edge, read_edge, "evict_first")
    m_s_row = tl.maximum(tl.max(m_s), tl.max(s) * unit)
    m_t_row = tl.maximum(tl.max(m_t), tl.max(t) * unit)
    w, x, z = _w_x_z((s, t), unit, m_s_row, m_t_row)
    a, d_s, d_t = _rescale(a, d_s, d_t, m_s_row - m_s, m_t_row - m_t)
    a_row, d_s_row, d_t_row = tl.sum(a) + tl.sum(w * x), tl.sum(d_s) + tl.sum(w), tl.sum(d_t) + tl.sum(z)
    kl = a_row / d_s_row * LN2 + tl.log(tl.div_rn(d_t_row, d_s_row))  # div_rn: exactly 1 if they are equal
    tl.store(row_loss_ptr + row, tl.where(counted, kl, 0.0))
    stats = m_s_row, m_t_row, d_s_row, d_t_row, a_row
    for i in tl.static_range(5):
        tl.store(stats_ptr + 5 * row + i, stats[i])
    if dstudent_ptr is not None:
        tl.debug_barrier()  # one thread stores the statistics, all load them
        _reverse_kl_bwd_kernel(
            student_ptr, student_row_stride, teacher_ptr, teacher_row_stride, counted_ptr, n_counted_ptr, MEAN,
            stats_ptr, None, 0, dstudent_ptr, n_cols, unit, False, TILE_ROWS, THREADS,
        )  # fmt: skip


# The backward, for scale = dL/dloss of a row (grad_output, over n_counted for a mean).  ds[j] changes p[i] by
# p[i] * ([i == j] - p[j]), so
#   dKL/ds[j]   = p[j] * ((log p[j] - log q[j]) - KL)             the changes of log p have the mean 0
#               = p[j] * (x[j] - a / d_s)                         log(d_t / d_s) is in both, and cancels
#   dstudent[j] = w[j] * (x[j] - a / d_s) * (scale / T / d_s)     neither a logarithm nor d_t is needed
@triton.jit
def _reverse_kl_bwd_kernel(
    student_ptr, student_row_stride, teacher_ptr, teacher_row_stride, counted_ptr, n_counted_ptr, MEAN: tl.constexpr,
    stats_ptr, grad_output_ptr, grad_output_stride,  # (n_rows,), with stride 0 where all rows share one; None: 1
    dstudent_ptr, n_cols, unit, GIVEN: tl.constexpr, TILE_ROWS: tl.constexpr, THREADS: tl.constexpr,  # GIVEN: for 1
):  # fmt: skip
    row = tl.program_id(0)
    TILE_SIZE: tl.constexpr = TILE_ROWS * THREADS * 8
    unit = tl.cast(unit, tl.float32)
    scale = 1.0 if grad_output_ptr is None else tl.load(grad_output_ptr + tl.cast(row, tl.int64) * grad_output_stride)
    if not GIVEN or scale != 1.0:  # only the GPU knows whether it is 1: the host launches this without looking
        tile = tl.arange(0, TILE_ROWS)[:, None] * (THREADS * 8) + tl.arange(0, THREADS * 8)[None, :]
        s_row_ptr, s_ptr, _, _, _ = _cut_row(student_ptr, row, student_row_stride, n_cols)
        t_row_ptr, t_ptr, _, _, _ = _cut_row(teacher_ptr, row, teacher_row_stride, n_cols)
        # torch.compile takes every tensor for written that a stored address depends on: here it is dstudent alone
        out_row_ptr, out_ptr, n_body, edge, in_edge = _cut_row(dstudent_ptr, row, n_cols, n_cols)
        counted = True if counted_ptr is None else tl.load(counted_ptr + row)
        n_read, read_edge = tl.where(counted, n_body, 0), in_edge & counted
        m_s, m_t = tl.load(stats_ptr + 5 * row), tl.load(stats_ptr + 5 * row + 1)
        d_s, a = tl.load(stats_ptr + 5 * row + 2), tl.load(stats_ptr + 5 * row + 4)
        scale /= 1 if not MEAN else tl.num_programs(0) if n_counted_ptr is None else tl.load(n_counted_ptr)
        mean = tl.where(counted, a / d_s, 0.0)
        factor = tl.where(counted, scale * unit * (LN2 * LN2) / d_s, 0.0)  # an LN2 for unit, and one for x
        # Last tile first: it was read last, and is still in the cache.  ".cs" stores without taking room there.
        for done in range(0, n_body, TILE_SIZE):
            cols = (n_body - 1) // TILE_SIZE * TILE_SIZE - done + tile
            w, x, _z = _w_x_z(_load(s_ptr, t_ptr, cols, cols < n_read, "evict_first"), unit, m_s, m_t)
            tl.store(out_ptr + cols, w * (x - mean) * factor, mask=cols < n_body, cache_modifier=".cs")
        w, x, _z = _w_x_z(_load(s_row_ptr, t_row_ptr, edge, read_edge, "evict_first"), unit, m_s, m_t)
        tl.store(out_row_ptr + edge, w * (x - mean) * factor, mask=in_edge)


def _rows(student, teacher, mask, temperature, reduction):
    """Refuse what the kernels cannot compute; return both as (n_rows, V), with row strides, and mask (n_rows,)."""
    named = {"student_logits": student, "teacher_logits": teacher} | ({} if mask is None else {"mask": mask})
    for name, tensor in named.items():
        dtypes = (torch.bool,) if name == "mask" else (torch.float16, torch.bfloat16, torch.float32)
        given = tensor.dtype if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        if given not in dtypes:
            raise TypeError(f"{name} is {given}, expected a tensor of {' or '.join(map(str, dtypes))}: convert it.")
    right = [student.shape, student.shape, student.shape[:-1]][: len(named)]
    shapes = student.ndim > 0 and student.shape[-1] > 0 and [x.shape for x in named.values()] == right
    if not shapes or any(x.device != student.device for x in named.values()) or not (student.is_cuda or INTERPRETED):
        given = ", ".join([f"{name} has shape {tuple(x.shape)} on {x.device}" for name, x in named.items()])
        expected = "one GPU: move them, or set TRITON_INTERPRET=1 first"
        expected = expected if shapes else "(..., V) twice, V >= 1, and (...) for a mask: reshape or cut them"
        raise ValueError(f"{given}; expected {expected}.")
    if reduction not in ("batchmean", "sum", "none") or not 0 < temperature < float("inf"):
        given = f"reduction is {reduction!r}, temperature {temperature}"
        raise ValueError(f"{given}; expected 'batchmean', 'sum' or 'none', and a positive number: change it.")
    rows = [logits.reshape(-1, logits.shape[-1]) for logits in (student, teacher)]
    s, t = (x if x.stride(1) == 1 and (x.stride(0) - x.shape[1]) % 8 == 0 else x.contiguous() for x in rows)
    return s, s.stride(0), t, t.stride(0), None if mask is None else mask.reshape(-1).contiguous()


def _launch(kernel, warps, student, *args):
    """A program per row, 8 columns per thread and tile row.  In bf16 on an H200 within 2 % of the best of both."""
    tile = {"TILE_ROWS": (8 if warps == 4 else 4) // student.element_size(), "THREADS": 32 * warps}
    if len(student) > 0:
        with torch.cuda.device(student.device) if student.is_cuda else contextlib.nullcontext():
            kernel[(len(student),)](student, *args, **tile, num_warps=warps)


def combine_statistics(stats, group):
    """The (n_rows, 5) of whole rows, from those of the columns that each process of the group has."""
    parts = [torch.empty_like(stats) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, stats, group)
    m_s, m_t, d_s, d_t, a = torch.stack(parts).unbind(-1)  # (n_processes, n_rows) each
    rise_s, rise_t = m_s.amax(0) - m_s, m_t.amax(0) - m_t
    factor = torch.exp2(-rise_s)
    a = torch.where(factor > 0, (a + d_s * (rise_t - rise_s)) * factor, 0.0)
    sums = (d_s * factor).sum(0), (d_t * torch.exp2(-rise_t)).sum(0), a.sum(0)
    return torch.stack([m_s.amax(0), m_t.amax(0), *sums], dim=1)


def reverse_kl_forward(student, teacher, mask=None, temperature=1.0, reduction="batchmean", gradient=False, group=None):
    """Return loss () or (...) fp32, stats (n_rows, 5) fp32, n_counted () or None, and, if needed and there is no group,
    dstudent (..., V) for a grad_output of 1.  The logits are this process's columns of the group's."""
    rows = _rows(student, teacher, mask, temperature, reduction)
    V, mean = student.shape[-1], reduction == "batchmean"
    n_counted = mask.sum() if mean and mask is not None else None
    row_loss = student.new_empty(student.shape[:-1], dtype=torch.float32)
    stats = row_loss.new_empty((row_loss.numel(), 5))
    dstudent = student.new_empty(student.shape) if gradient and group is None else None
    gpu = torch.cuda.get_device_properties(student.device) if student.is_cuda else None
    n_kept = gpu.L2_cache_size // (4 * gpu.multi_processor_count * student.element_size()) if gpu else V // 2
    more = V, 0 if dstudent is None else n_kept, 1 / (LN2.value * temperature)  # n_kept: the cache's share of each row
    warps = 4 if dstudent is None else 16
    _launch(_reverse_kl_fwd_kernel, warps, *rows, n_counted, mean, stats, row_loss, dstudent, *more)
    if group is not None:
        stats = combine_statistics(stats, group)
        _, _, d_s, d_t, a = stats.unbind(1)
        row_loss = (a / d_s * LN2.value + torch.log(d_t / d_s)).view(row_loss.shape)
        row_loss = row_loss if mask is None else row_loss.where(mask, 0)
    loss = row_loss if reduction == "none" else row_loss.mean() if mean and mask is None else row_loss.sum()
    return loss if n_counted is None else loss / n_counted, stats, n_counted, dstudent  # 0 / 0 = NaN, as in PyTorch


def reverse_kl_backward(grad_output, student, teacher, mask, stats, n_counted, temperature, reduction, dstudent=None):
    """Return dstudent (..., V), from what a forward was given and returned; its own is kept if grad_output () is 1."""
    rows = *_rows(student, teacher, mask, temperature, reduction), n_counted, reduction == "batchmean"
    row_grads = grad_output.expand(student.shape[:-1]).reshape(-1)  # of a scalar it is a view with stride 0
    out = student.new_empty(student.shape) if dstudent is None else dstudent
    options = student.shape[-1], 1 / (LN2.value * temperature), dstudent is not None
    _launch(_reverse_kl_bwd_kernel, 4, *rows, stats, row_grads, row_grads.stride(0), out, *options)
    return out


class TritonReverseKLFunction(torch.autograd.Function):
    """`.apply(student_logits, teacher_logits, mask, temperature, reduction, group, grad_enabled)`, with a bool mask."""

    @staticmethod
    def forward(ctx, student, teacher, mask, temperature, reduction, group, grad_enabled):
        if grad_enabled and ctx.needs_input_grad[1]:
            raise ValueError("teacher_logits requires a gradient, expected a constant: pass teacher_logits.detach().")
        now = grad_enabled and ctx.needs_input_grad[0] and reduction != "none" and student.dtype != torch.float16
        loss, *saved, ctx.dstudent = reverse_kl_forward(student, teacher, mask, temperature, reduction, now, group)
        ctx.save_for_backward(student, teacher, mask, *saved)
        ctx.options = temperature, reduction
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        if torch.is_grad_enabled():  # create_graph=True; `once_differentiable` would let the derivative vanish silently
            raise RuntimeError("The fused loss has no second derivative, which create_graph=True asks for.")
        dstudent, ctx.dstudent = ctx.dstudent, None  # held by nobody else, it becomes .grad without a copy
        return reverse_kl_backward(grad_output, *ctx.saved_tensors, *ctx.options, dstudent), *[None] * 6


class TritonReverseKLLoss(torch.nn.Module):
    """`loss(student_logits, teacher_logits, mask)` of logits (..., V): KL(student || teacher), at a temperature.

    mask (...): True for rows that count, or their targets, of which ignore_index does not; others: loss, gradient 0.
    reduction: "batchmean" (over rows that count), "sum", "none".  group: processes that each pass some of the columns.
    """

    def __init__(self, temperature: float = 1.0, ignore_index: int = -100, reduction: str = "batchmean", group=None):
        super().__init__()
        self.ignore_index, self.args = ignore_index, (temperature, reduction, group)

    def forward(self, student_logits, teacher_logits, mask=None) -> torch.Tensor:
        if getattr(mask, "dtype", None) in (torch.int64, torch.int32):
            mask = mask != self.ignore_index
        return TritonReverseKLFunction.apply(student_logits, teacher_logits, mask, *self.args, torch.is_grad_enabled())
