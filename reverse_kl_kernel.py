"""Reverse KL in Triton: distillation from a teacher's logits, both read once, the gradient written on the way.

    log_p, log_q = (F.log_softmax(logits.float() / T, -1) for logits in (student_logits, teacher_logits))  # (..., V)
    loss = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")                 # KL(student || teacher)

For one row, that is, one token's V columns j, with s = student / T, t = teacher / T and their maxima m_s, m_t:

    w[j] = exp(s[j] - m_s)     d_s = sum w[j]                 p[j] = w[j] / d_s is the student's probability
    x[j] = (s[j] - m_s) - (t[j] - m_t)                        log p - log q, but for a constant
    a    = sum w[j] * x[j]     d_t = sum exp(t[j] - m_t)      a / d_s is the mean of x under p
    KL   = sum p[j] * (log p[j] - log q[j])  =  a / d_s + log(d_t / d_s)

Online softmax (README, step 4) finds all five in one pass.  Where a chunk raises the maxima, by r_s and r_t:
    a = (a + d_s * (r_t - r_s)) * exp(-r_s)      d_s = d_s * exp(-r_s)      d_t = d_t * exp(-r_t)

With tiles of 32,768 columns each of 512 threads holds 64 student and 64 teacher logits, two blocks fit on a
multiprocessor, and too little is computed while they wait for memory.  Two remedies:
1. Smaller tiles, and each row read twice, for the sums and for the gradient: the second time from the GPU's cache, if
   few rows are in flight.  It is the gradient for a grad_output of 1; for any other, the backward computes it anew.
2. The forward saves the five numbers of each row (20 bytes), and the backward reads the row again.
The kernel does both: the first for bf16 and fp32; the second for fp16 (whose loss scale is a grad_output other than
1), reduction "none", a second backward, and a vocabulary split over GPUs.
Bytes moved per bf16 logit of the student, if every kernel reads its inputs once and writes its result once:
                eager, as above                                             remedy 1    remedy 2
    forward     to fp32 12, log_softmax 16, exp 8, - 12, * 12, sum 4 = 64          6           4
    backward    * 16, exp 12, add 12, log_softmax 12, to bf16 6      = 58          0           6
    memory      log_p, log_q, exp, difference: fp32                  = 16          2           2
New in Triton: `tl.reshape` makes a dimension of the 8 columns that a thread loads at once.  Reduced over it, maxima and
sums are one per thread, and rescaling costs 2 exponentials per thread, not per column.
Limits: |logits / T| below 1e38, or -inf; fp32 loss; no T**2 multiplies it; differentiable once, for the student.  If
its probability is 0 a column counts 0, even if the teacher's is too (a padded vocabulary; F.kl_div: NaN); if only the
teacher's is 0, the row's loss is inf and its gradient not finite, as in PyTorch.
"""

import contextlib
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # no GPU: run on the CPU; must precede `import triton`

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret  # is the kernel below run on the CPU, by the interpreter?
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
LOWEST = tl.constexpr(-1e38)  # finite: in a column of -inf, -inf - -inf would be NaN
# exp(x) = 2**(x / LN2), and 2**x is what a GPU computes: the kernel's m_s, m_t, x and a are kept divided by LN2.
LN2 = tl.constexpr(0.6931471805599453)


def reverse_kl_reference(student, teacher, mask=None, temperature=1.0, reduction="batchmean", ignore_index=-100):
    """Eager loss of two (..., V) in their own dtype; mask (...) is True for rows that count, or holds their targets."""
    counted = torch.ones_like(student[..., 0], dtype=torch.bool) if mask is None else mask
    counted = counted if counted.dtype == torch.bool else counted != ignore_index
    log_p, log_q = ((x.where(counted[..., None], 0) / temperature).log_softmax(-1) for x in (student, teacher))
    row_loss = (log_p.exp() * (log_p - log_q).masked_fill(log_p == -float("inf"), 0)).sum(-1)  # (...)
    return row_loss if reduction == "none" else row_loss.sum() / (counted.sum() if reduction == "batchmean" else 1)


# A thread loads 8 adjacent 16-bit logits at once, but only from a multiple of 16 bytes.  So a row is cut: its body goes
# from its first multiple of 8 to its last, up to 7 columns before and 7 after are its edge.  `// 8 * 8` tells Triton.
@triton.jit
def _cut_row(row, row_stride, n_cols):
    n_before = tl.minimum(-(tl.cast(row, tl.int64) * row_stride) & 7, n_cols).to(tl.int32)
    n_body = (n_cols - n_before) // 8 * 8
    lane = tl.arange(0, 16)
    edge = tl.where(lane < 8, lane, n_cols - 16 + lane)
    return n_before, n_body, edge, tl.where(lane < 8, lane < n_before, edge >= n_before + n_body)


@triton.jit
def _row_and_body(ptr, row, row_stride, n_before, ALIKE: tl.constexpr):  # ALIKE: cut like the row that n_before is of
    start = tl.cast(row, tl.int64) * row_stride  # int64: at V = 131,072 it outgrows 32 bits from row 16,384 on
    return ptr + start, ptr + ((start + 7) // 8 * 8 if ALIKE else start + n_before)


@triton.jit
def _load(ptr, cols, mask):
    return tl.load(ptr + cols, mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def _w_x_v(s, t, unit, m_s, m_t):  # unit = 1 / (T * LN2)
    u, v = tl.fma(s, unit, -m_s), tl.fma(t, unit, -m_t)
    return tl.exp2(u), tl.where(tl.exp2(u) > 0, u - v, 0.0), v  # without `where`, NaN if both logits are -inf


@triton.jit
def _rescale(a, d_s, rise_s, rise_t):
    factor = tl.exp2(-rise_s)
    return tl.where(factor > 0, (a + d_s * (rise_t - rise_s)) * factor, 0.0), d_s * factor  # `where`: inf * 0 is NaN


# The backward.  Given scale = dL/dloss of a row (grad_output, over n_counted for a mean), find dL/dstudent.
#
#   KL = sum p[i] * (log p[i] - log q[i]), and ds[j] changes p[i] by p[i] * ([i == j] - p[j]).  So
#   dKL/ds[j]   = p[j] * ((log p[j] - log q[j]) - KL)             the changes of log p have the mean 0
#               = p[j] * (x[j] - a / d_s)                         the constants in log p - log q and in KL cancel
#   dstudent[j] = w[j] * (x[j] - a / d_s) * (scale / T / d_s)     neither a logarithm nor d_t is needed
@triton.jit
def _dstudent(student_ptr, teacher_ptr, cols, mask, unit, m_s, m_t, mean, factor):
    w, x, _ = _w_x_v(_load(student_ptr, cols, mask), _load(teacher_ptr, cols, mask), unit, m_s, m_t)
    return (w * (x - mean) * factor).to(student_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["n_rows"])  # it changes from batch to batch, and must not compile a kernel each time
def _reverse_kl_kernel(
    student_ptr, student_row_stride, teacher_ptr, teacher_row_stride,  # (n_rows, n_cols) each
    mask_ptr, not_counted, n_counted_ptr,  # (n_rows,), and its value in rows that do not count; (); None: see launchers
    row_loss_ptr, stats_ptr,  # (n_rows,), None: the other is known; (n_rows, 5) fp32: m_s, m_t, d_s, d_t, a
    grad_output_ptr, grad_output_stride,  # (n_rows,), with stride 0 where all rows share one; None: 1
    dstudent_ptr, dstudent_row_stride,  # (n_rows, n_cols), its rows cut as the student's; None: only loss and stats
    n_rows, n_cols, unit, GIVEN: tl.constexpr, ALIKE: tl.constexpr, TILE_ROWS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    if GIVEN:  # dstudent holds the gradient for a grad_output of 1; whether it is 1, only the GPU knows
        n_rows = tl.where(tl.load(grad_output_ptr) == 1.0, 0, n_rows)
    TILE_SIZE: tl.constexpr = TILE_ROWS * THREADS * 8
    tile = tl.arange(0, TILE_ROWS)[:, None] * (THREADS * 8) + tl.arange(0, THREADS * 8)[None, :]
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        n_before, n_body, edge, in_edge = _cut_row(row, student_row_stride, n_cols)
        s_row_ptr, s_ptr = _row_and_body(student_ptr, row, student_row_stride, n_before, True)
        t_row_ptr, t_ptr = _row_and_body(teacher_ptr, row, teacher_row_stride, n_before, ALIKE)
        counts = row < n_rows if mask_ptr is None else tl.load(mask_ptr + row) != not_counted  # if not, nothing is read
        n_read, read_edge = tl.where(counts, n_body, 0), in_edge & counts
        if row_loss_ptr is not None:
            zero = tl.zeros((THREADS,), dtype=tl.float32)
            m_s, m_t, d_s, d_t, a = zero + LOWEST, zero + LOWEST, zero, zero, zero
            for first in range(0, n_read, TILE_SIZE):
                s = tl.reshape(_load(s_ptr, first + tile, first + tile < n_read), TILE_ROWS, THREADS, 8)
                t = tl.reshape(_load(t_ptr, first + tile, first + tile < n_read), TILE_ROWS, THREADS, 8)
                m_s_new = tl.maximum(m_s, tl.max(tl.max(s, axis=2), axis=0) * unit)
                m_t_new = tl.maximum(m_t, tl.max(tl.max(t, axis=2), axis=0) * unit)
                w, x, v = _w_x_v(s, t, unit, m_s_new[None, :, None], m_t_new[None, :, None])
                a, d_s = _rescale(a, d_s, m_s_new - m_s, m_t_new - m_t)
                a += tl.sum(tl.sum(w * x, axis=2), axis=0)
                d_s += tl.sum(tl.sum(w, axis=2), axis=0)
                d_t = d_t * tl.exp2(m_t - m_t_new) + tl.sum(tl.sum(tl.exp2(v), axis=2), axis=0)
                m_s, m_t = m_s_new, m_t_new
            # The threads meet: every sum is rescaled to the row's maxima.
            edge_s, edge_t = _load(s_row_ptr, edge, read_edge), _load(t_row_ptr, edge, read_edge)
            m_s_row = tl.maximum(tl.max(m_s), tl.max(edge_s) * unit)
            m_t_row = tl.maximum(tl.max(m_t), tl.max(edge_t) * unit)
            edge_w, edge_x, edge_v = _w_x_v(edge_s, edge_t, unit, m_s_row, m_t_row)
            a, d_s = _rescale(a, d_s, m_s_row - m_s, m_t_row - m_t)
            a_row, d_s_row = tl.sum(a) + tl.sum(edge_w * edge_x), tl.sum(d_s) + tl.sum(edge_w)
            d_t_row = tl.sum(d_t * tl.exp2(m_t - m_t_row)) + tl.sum(tl.exp2(edge_v))
            kl = a_row / d_s_row * LN2 + tl.log(d_t_row / d_s_row)
            tl.store(row_loss_ptr + row, tl.where(counts, kl, 0.0))
            stats = m_s_row, m_t_row, d_s_row, d_t_row, a_row
            for i in tl.static_range(5):
                tl.store(stats_ptr + 5 * row + i, stats[i])
        else:
            m_s_row, m_t_row = tl.load(stats_ptr + 5 * row), tl.load(stats_ptr + 5 * row + 1)
            d_s_row, a_row = tl.load(stats_ptr + 5 * row + 2), tl.load(stats_ptr + 5 * row + 4)
        if dstudent_ptr is not None:
            out_row_ptr, out_ptr = _row_and_body(dstudent_ptr, row, dstudent_row_stride, n_before, True)
            scale = 1.0 if n_counted_ptr is None else 1.0 / tl.load(n_counted_ptr)
            if grad_output_ptr is not None:
                scale *= tl.load(grad_output_ptr + tl.cast(row, tl.int64) * grad_output_stride).to(tl.float32)
            mean = tl.where(counts, a_row / d_s_row, 0.0)
            factor = tl.where(counts, scale * unit * (LN2 * LN2) / d_s_row, 0.0)  # an LN2 for unit, and one for x
            at_edge = _dstudent(s_row_ptr, t_row_ptr, edge, read_edge, unit, m_s_row, m_t_row, mean, factor)
            tl.store(out_row_ptr + edge, at_edge, mask=in_edge)
            # Last tile first: it was read last, and is still in the cache.  ".cs" stores without taking room there.
            for done in range(0, n_body, TILE_SIZE):
                cols = (n_body - 1) // TILE_SIZE * TILE_SIZE - done + tile
                out = _dstudent(s_ptr, t_ptr, cols, cols < n_read, unit, m_s_row, m_t_row, mean, factor)
                tl.store(out_ptr + cols, out, mask=cols < n_body, cache_modifier=".cs")


def _rows(student, teacher, mask, ignore_index, temperature, reduction="sum"):
    """Refuse what the kernel cannot compute; return (n_rows, V) twice, (n_rows,) or None, and what does not count."""
    named = {"student_logits": student, "teacher_logits": teacher} | ({} if mask is None else {"mask": mask})
    for name, x in named.items():
        dtypes = (torch.bool, torch.int64, torch.int32) if name == "mask" else FLOATS
        given = x.dtype if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
        if given not in dtypes:
            raise TypeError(f"{name} is {given}, expected a tensor of {' or '.join(map(str, dtypes))}: convert it.")
    right = [student.shape, student.shape, student.shape[:-1]][: len(named)]
    shapes = 0 not in (student.ndim, *student.shape[-1:]) and [x.shape for x in named.values()] == right
    if not shapes or any(x.device != student.device for x in named.values()) or not (student.is_cuda or INTERPRETED):
        given = ", ".join([f"{name} has shape {tuple(x.shape)} on {x.device}" for name, x in named.items()])
        expected = "one GPU: move them, or set TRITON_INTERPRET=1 first"
        expected = expected if shapes else "(..., V) twice, V >= 1, and (...) for a mask: reshape or cut them"
        raise ValueError(f"{given}; expected {expected}.")
    if reduction not in ("batchmean", "sum", "none") or not 0 < temperature < float("inf"):
        given = f"reduction is {reduction!r}, temperature {temperature}"
        raise ValueError(f"{given}; expected 'batchmean', 'sum' or 'none', and a positive number: change it.")
    rows = [x.reshape(-1, x.shape[-1]) for x in (student, teacher)]
    mask, ignore_index = (mask.byte(), 0) if mask is not None and mask.dtype == torch.bool else (mask, ignore_index)
    rows = [x if x.stride(1) == 1 else x.contiguous() for x in rows]
    return *rows, None if mask is None else mask.reshape(-1).contiguous(), ignore_index


def _options(student, fused):
    """Number of programs, and options.  Remedy 1 has few, so that the cache holds their rows.  Not tuned."""
    (n_rows, n_cols), long = student.shape, student.shape[1] * student.element_size() > 65_536
    programs = torch.cuda.get_device_properties(student.device).multi_processor_count if student.is_cuda else 3
    warps = 4 if not fused else 16 if long else 8
    tile_rows = 1 if n_cols <= 256 * warps else 2 if n_cols <= 512 * warps else 8 // student.element_size()
    programs = min(n_rows, programs if long else 2 * programs) if fused else n_rows
    return programs, {"TILE_ROWS": tile_rows, "THREADS": 32 * warps, "num_warps": warps}


def _launch(student, teacher, mask, not_counted, T, n_counted, row_loss, stats, row_grads, need_gradient, dstudent):
    (n_rows, V), given = student.shape, dstudent is not None
    row_stride = V + (student.stride(0) - V) % 8  # its rows begin as far from a multiple of 8 as the student's
    dstudent = student.new_empty_strided((n_rows, V), (row_stride, 1)) if need_gradient and not given else dstudent
    if n_rows > 0:
        programs, options = _options(student, fused=need_gradient and row_grads is None)
        with torch.cuda.device(student.device) if student.is_cuda else contextlib.nullcontext():
            _reverse_kl_kernel[(programs,)](
                student, student.stride(0), teacher, teacher.stride(0), mask, not_counted, n_counted, row_loss, stats,
                row_grads, 0 if row_grads is None else row_grads.stride(0), dstudent, row_stride, n_rows, V,
                1 / (LN2.value * T), given, (teacher.stride(0) - student.stride(0)) % 8 == 0, **options,
            )  # fmt: skip
    return dstudent


def combine_statistics(stats, group):
    """The (n_rows, 5) of whole rows, from those of the columns that each process of the group has."""
    parts = [torch.empty_like(stats) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, stats, group)
    m_s, m_t, d_s, d_t, a = torch.stack(parts).unbind(-1)  # (n_processes, n_rows) each
    rise_s, rise_t = m_s.amax(0) - m_s, m_t.amax(0) - m_t
    a = torch.where(torch.exp2(-rise_s) > 0, (a + d_s * (rise_t - rise_s)) * torch.exp2(-rise_s), 0.0)
    sums = (x.sum(0) for x in (d_s * torch.exp2(-rise_s), d_t * torch.exp2(-rise_t), a))
    return torch.stack([m_s.amax(0), m_t.amax(0), *sums], dim=1)


def reverse_kl_forward(
    student_logits, teacher_logits, mask=None, temperature=1.0, ignore_index=-100, reduction="batchmean",
    need_gradient=False, group=None,
):  # fmt: skip
    """Return loss () or (...) fp32, stats (n_rows, 5) fp32, n_counted () or None, and, if needed and there is no group,
    dstudent (..., V) for a grad_output of 1.  The logits are this process's columns of the group's."""
    rows = _rows(student_logits, teacher_logits, mask, ignore_index, temperature, reduction)
    n_rows = rows[0].shape[0]
    counted = rows[0].new_ones(n_rows, dtype=torch.bool) if mask is None else rows[2] != rows[3]
    n_counted = counted.sum() if reduction == "batchmean" else None
    row_loss, stats = (rows[0].new_empty(shape, dtype=torch.float32) for shape in ((n_rows,), (n_rows, 5)))
    dstudent = _launch(*rows, temperature, n_counted, row_loss, stats, None, need_gradient and group is None, None)
    if group is not None:
        stats = combine_statistics(stats, group)
        _, _, d_s, d_t, a = stats.unbind(1)
        row_loss = (a / d_s * LN2.value + torch.log(d_t / d_s)).where(counted, 0)
    loss = row_loss.view(student_logits.shape[:-1]) if reduction == "none" else row_loss.sum()
    loss = loss if n_counted is None else loss / n_counted  # 0 / 0 = NaN where no row counts, as in PyTorch
    return loss, stats, n_counted, None if dstudent is None else dstudent.view(student_logits.shape)


def reverse_kl_backward(
    grad_output, student_logits, teacher_logits, stats, n_counted, mask=None, temperature=1.0, ignore_index=-100,
    dstudent=None,
):  # fmt: skip
    """Return dstudent (..., V), from a forward's stats and n_counted; a given one is kept if grad_output () is 1."""
    rows = _rows(student_logits, teacher_logits, mask, ignore_index, temperature)
    row_grads = grad_output.expand(student_logits.shape[:-1]).reshape(-1)  # of a scalar it is a view with stride 0
    return _launch(*rows, temperature, n_counted, None, stats, row_grads, True, dstudent).view(student_logits.shape)


class TritonReverseKLFunction(torch.autograd.Function):
    """`.apply(student_logits, teacher_logits, mask, temperature, ignore_index, reduction, group, grad_enabled)`."""

    @staticmethod
    def forward(ctx, student_logits, teacher_logits, mask, temperature, ignore_index, reduction, group, grad_enabled):
        if grad_enabled and ctx.needs_input_grad[1]:
            raise ValueError("teacher_logits requires a gradient, expected a constant: pass teacher_logits.detach().")
        ctx.options = temperature, ignore_index
        now = reduction != "none" and student_logits.dtype != torch.float16 and grad_enabled and ctx.needs_input_grad[0]
        inputs = student_logits, teacher_logits, mask, temperature, ignore_index
        loss, stats, n_counted, ctx.dstudent = reverse_kl_forward(*inputs, reduction, now, group)
        ctx.save_for_backward(student_logits, teacher_logits, stats, n_counted, mask)
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        if torch.is_grad_enabled():  # create_graph=True; `once_differentiable` would let the derivative vanish silently
            raise RuntimeError("The fused loss has no second derivative, which create_graph=True asks for.")
        dstudent, ctx.dstudent = ctx.dstudent, None  # handed out once: autograd may add to it
        dstudent = reverse_kl_backward(grad_output, *ctx.saved_tensors, *ctx.options, dstudent)
        return dstudent, None, None, None, None, None, None, None


class TritonReverseKLLoss(torch.nn.Module):
    """`loss(student_logits, teacher_logits, mask)` of logits (..., V): KL(student || teacher), at a temperature.

    mask (...): True for rows that count, or their targets, of which ignore_index does not count; None: all count.  The
    others have loss and gradient 0.  reduction: "batchmean" (over rows that count), "sum", "none".  group: processes
    that each pass some of the columns, and get the whole loss and the gradient of their columns.
    """

    def __init__(self, temperature: float = 1.0, ignore_index: int = -100, reduction: str = "batchmean", group=None):
        super().__init__()
        self.args = temperature, ignore_index, reduction, group

    def forward(self, student_logits, teacher_logits, mask=None) -> torch.Tensor:
        return TritonReverseKLFunction.apply(student_logits, teacher_logits, mask, *self.args, torch.is_grad_enabled())
