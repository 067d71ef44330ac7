"""SwiGLU that adds the adapters of its neighbours while it has their numbers in registers.

    gate = gate + s_gate * h_gate @ b_gate.t()      h (N, R), b (I, R): LoRA's part of gate_proj
    up   = up + s_up * h_up @ b_up.t()              and of up_proj
    y    = silu(gate) * up                          (N, I)

    dy   = dy + dh @ a                              backward: dh (N, R), a (R, I) of down_proj

lora_linear.py lets a thin product add to what is there: the product reads out and writes it, two
passes.  Where out is 14,336 wide, these are the longest passes that an adapter has left.  They are
slow, too: cuBLAS's tiles are made for long sums, and a sum of 16 is over before the tile's result
is on its way.  But SwiGLU follows, and reads gate and up anyway.  A tile of h @ b.t() needs a few
numbers of h and b, and a matrix product in the middle of an elementwise kernel:

    thin = tl.dot(h, b)                             (BLOCK_ROWS, BLOCK_COLS), in fp32

So gate and up stay in memory as the frozen weights made them, and the sum exists in registers
alone.  The backward reads gate and up again, and makes the sum again.  Numbers moved per token and
layer in LLaMA 3.1 8B, I = 14,336:

                                          products that add      here
    gate += thin, up += thin                   4 x 14,336           0
    dy += thin                                 2 x 14,336           0

The prediction for 32 layers and 8,192 tokens in bf16: 45 GB less, which is 11 ms at 4.0 TB/s.

New ideas of Triton, after those of swiglu_kernel.py:

1. `tl.dot` wants three sides that are powers of two, and a summed side of at least 16.  Zeros fill
   up a rank that is none of these.  They add nothing.
2. *Stages*.  The result of tl.dot lies in registers as the matrix unit leaves it, the loaded tile
   as memory wants it.  Triton exchanges them through shared memory, so each tile waits three times.
   A program has eight tiles, one after the other, and `tl.range(..., num_stages=3)` has the next
   two on their way from memory while the program works on one.
3. A *tuple* as a kernel's argument: the pointer and the scale of one adapter are one argument.

Limits: those of swiglu_kernel.py; ranks up to 64; no second derivative.  The launchers refuse
tensors that a kernel cannot take, or cannot overwrite, with a TypeError or a ValueError.
"""

import torch

import kernel_support as support
from kernel_support import FLOATS, INTERPRETED, SAME, tl, triton
from next_steps.lessons.swiglu_kernel import new_like, sigmoid_of, swiglu_gradients, swiglu_of

LARGEST_RANK = 64  # more needs more shared memory than a small GPU has
# 95 and 96 % of what swiglu_kernel.py reaches without adapters on an H200; without stages: 60 %.
BLOCK_ROWS, BLOCK_COLS, STEPS = 16, 128, 8
NUM_WARPS, STAGES = 4, tl.constexpr(3)
WIDENS = tl.constexpr(INTERPRETED)  # the interpreter cannot multiply bf16


def lora_swiglu_reference(gate, up, h, scales, b_gate, b_up):
    """Return eager silu(gate + thin) * (up + thin): gate, up (..., I), h (N, both R), b (I, R)."""
    h_gate, h_up = h.split([b_gate.shape[1], b_up.shape[1]], dim=1)
    gate = gate + scales[0] * (h_gate @ b_gate.t()).view_as(gate)
    up = up + scales[1] * (h_up @ b_up.t()).view_as(up)
    return torch.nn.functional.silu(gate) * up


# ---- The kernels -----------------------------------------------------------------------------
#
# A program takes a strip of BLOCK_COLS of the I columns, STEPS * BLOCK_ROWS tokens long, and goes
# down the strip tile by tile.  It reads b and a of its columns once.  The next program takes the
# next columns.
#
# n_rows changes from batch to batch.  do_not_specialize: Triton does not compile anew for it.


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_lora_fwd_kernel(
    gate_ptr,  # (n_rows, n_cols), contiguous, as are all the others
    up_ptr,  # (n_rows, n_cols)
    h_ptr,  # (n_rows, R_GATE + R_UP)
    gate_adapter,  # (b_ptr, scale), b (n_cols, R_GATE)
    up_adapter,  # (b_ptr, scale), b (n_cols, R_UP)
    y_ptr,  # (n_rows, n_cols)
    n_rows,
    n_cols,
    RANKS: tl.constexpr,  # (R_GATE, R_UP)
    TILE: tl.constexpr,  # (BLOCK_ROWS, BLOCK_COLS)
    STEPS: tl.constexpr,
):
    BLOCK_ROWS: tl.constexpr = TILE[0]
    BLOCK_COLS: tl.constexpr = TILE[1]
    BLOCK_R: tl.constexpr = _filled_up(RANKS)
    first_row, cols = _my_strip(n_cols, BLOCK_ROWS * STEPS, BLOCK_COLS)
    b_gate = _transposed(gate_adapter[0], RANKS[0], cols, n_cols, BLOCK_R)
    b_up = _transposed(up_adapter[0], RANKS[1], cols, n_cols, BLOCK_R)
    dtype = y_ptr.dtype.element_ty
    for step in tl.range(0, STEPS, num_stages=STAGES):
        rows = first_row + (step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
        at, mask = rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)
        gate = tl.load(gate_ptr + at, mask=mask).to(tl.float32)
        up = tl.load(up_ptr + at, mask=mask).to(tl.float32)
        h = _columns(h_ptr, RANKS[0] + RANKS[1], rows, n_rows, RANKS[0], BLOCK_R)
        gate = _add(gate, gate_adapter[1], _dot(h, b_gate), dtype)
        h = _columns(h_ptr + RANKS[0], RANKS[0] + RANKS[1], rows, n_rows, RANKS[1], BLOCK_R)
        up = _add(up, up_adapter[1], _dot(h, b_up), dtype)
        y = swiglu_of(gate, sigmoid_of(gate), up, dtype)
        tl.store(y_ptr + at, y.to(dtype), mask=mask)


# Each result may lie over a tensor that it is computed from: dgate over dy, dup over gate, y over
# up.  A thread may store over a number that another thread loads.  The threads exchange loaded
# numbers before the store, so that load is over.


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_lora_bwd_kernel(
    dy_ptr,  # (n_rows, n_cols), contiguous, as are all the others
    gate_ptr,  # (n_rows, n_cols)
    up_ptr,  # (n_rows, n_cols)
    h_ptr,  # (n_rows, R_GATE + R_UP)
    gate_adapter,  # (b_ptr, scale), b (n_cols, R_GATE)
    up_adapter,  # (b_ptr, scale), b (n_cols, R_UP)
    down_adapter,  # (dh_ptr, a_ptr), dh (n_rows, R_DOWN), a (R_DOWN, n_cols)
    dgate_ptr,  # (n_rows, n_cols)
    dup_ptr,  # (n_rows, n_cols)
    y_ptr,  # (n_rows, n_cols); None: not needed
    n_rows,
    n_cols,
    RANKS: tl.constexpr,  # (R_GATE, R_UP, R_DOWN)
    TILE: tl.constexpr,  # (BLOCK_ROWS, BLOCK_COLS)
    STEPS: tl.constexpr,
):
    BLOCK_ROWS: tl.constexpr = TILE[0]
    BLOCK_COLS: tl.constexpr = TILE[1]
    BLOCK_R: tl.constexpr = _filled_up(RANKS)
    first_row, cols = _my_strip(n_cols, BLOCK_ROWS * STEPS, BLOCK_COLS)
    b_gate = _transposed(gate_adapter[0], RANKS[0], cols, n_cols, BLOCK_R)
    b_up = _transposed(up_adapter[0], RANKS[1], cols, n_cols, BLOCK_R)
    ranks = tl.arange(0, BLOCK_R)[:, None]
    a_mask = (ranks < RANKS[2]) & (cols < n_cols)
    a = tl.load(down_adapter[1] + ranks * n_cols + cols, mask=a_mask, other=0.0)
    dtype = dgate_ptr.dtype.element_ty
    for step in tl.range(0, STEPS, num_stages=STAGES):
        rows = first_row + (step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
        at, mask = rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)
        dy = tl.load(dy_ptr + at, mask=mask).to(tl.float32)
        gate = tl.load(gate_ptr + at, mask=mask).to(tl.float32)
        up = tl.load(up_ptr + at, mask=mask).to(tl.float32)
        h = _columns(h_ptr, RANKS[0] + RANKS[1], rows, n_rows, RANKS[0], BLOCK_R)
        gate = _add(gate, gate_adapter[1], _dot(h, b_gate), dtype)
        h = _columns(h_ptr + RANKS[0], RANKS[0] + RANKS[1], rows, n_rows, RANKS[1], BLOCK_R)
        up = _add(up, up_adapter[1], _dot(h, b_up), dtype)
        dh = _columns(down_adapter[0], RANKS[2], rows, n_rows, RANKS[2], BLOCK_R)
        dy = _add(dy, 1.0, _dot(dh, a), dtype)

        sigmoid = sigmoid_of(gate)
        dgate, dup = swiglu_gradients(dy, gate, sigmoid, up)
        tl.store(dgate_ptr + at, dgate.to(dtype), mask=mask)
        tl.store(dup_ptr + at, dup.to(dtype), mask=mask)
        if y_ptr is not None:
            y = swiglu_of(gate, sigmoid, up, dtype)
            tl.store(y_ptr + at, y.to(dtype), mask=mask)


# The side that tl.dot sums over.
@triton.constexpr_function
def _filled_up(ranks):
    return triton.next_power_of_2(max(16, *ranks))


# Which numbers this program takes: its first row, and its columns (1, BLOCK_COLS).
@triton.jit
def _my_strip(n_cols, LENGTH: tl.constexpr, BLOCK_COLS: tl.constexpr):
    strips = tl.cdiv(n_cols, BLOCK_COLS)
    program = tl.program_id(0)
    # int64: at I = 14,336 the elements outgrow 32 bits in row 149,796.
    first_row = (program // strips).to(tl.int64) * LENGTH
    return first_row, (program % strips * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]


# R columns of the tile's rows of h, filled up with zeros: (BLOCK_ROWS, BLOCK_R).
@triton.jit
def _columns(h_ptr, row_stride, rows, n_rows, R: tl.constexpr, BLOCK_R: tl.constexpr):
    ranks = tl.arange(0, BLOCK_R)[None, :]
    mask = (rows < n_rows) & (ranks < R)
    return tl.load(h_ptr + rows * row_stride + ranks, mask=mask, other=0.0)


# b.t() of the tile's columns, filled up with zeros: (BLOCK_R, BLOCK_COLS).
@triton.jit
def _transposed(b_ptr, R: tl.constexpr, cols, n_cols, BLOCK_R: tl.constexpr):
    ranks = tl.arange(0, BLOCK_R)[:, None]
    return tl.load(b_ptr + cols * R + ranks, mask=(ranks < R) & (cols < n_cols), other=0.0)


@triton.jit
def _dot(a, b):
    if WIDENS or a.dtype == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


# Rounded as if the sum were stored: the numbers are those of a product that adds.
@triton.jit
def _add(base, scale, thin, dtype: tl.constexpr):
    return (base + scale * thin).to(dtype).to(tl.float32)


# ---- Launchers -------------------------------------------------------------------------------


def _check(gate, up, h, b_gate, b_up, dy=None, dh=None, a=None) -> None:
    """Refuse what the kernels cannot compute."""
    ranks = support.check_tensors(
        ("gate", gate, FLOATS, ("...", "I")),
        ("up", up, SAME, ("...", "I")),
        ("b_gate", b_gate, SAME, ("I", "R_GATE")),
        ("b_up", b_up, SAME, ("I", "R_UP")),
        ("h", h, SAME, ("n_rows", b_gate.shape[-1] + b_up.shape[-1])),
        ("dy?", dy, SAME, ("...", "I")),
        ("a?", a, SAME, ("R_DOWN", "I")),
        ("dh?", dh, SAME, ("n_rows", "R_DOWN")),
    )
    ranks = {name: ranks[name] for name in ("R_GATE", "R_UP", "R_DOWN") if name in ranks}
    if max(ranks.values()) > LARGEST_RANK:
        expected = f"expected at most {LARGEST_RANK}: use lora_linear.py."
        raise ValueError(f"the ranks are {ranks}, {expected}")


def _launch(kernel: triton.JITFunction, *tensors, ranks: tuple[int, ...]) -> None:
    """Launch with contiguous tensors, of which the first is (..., I)."""
    n_cols = tensors[0].shape[-1]
    n_rows = tensors[0].numel() // max(n_cols, 1)
    # Both quotients are rounded up.
    n_programs = -(-n_rows // (BLOCK_ROWS * STEPS)) * -(-n_cols // BLOCK_COLS)
    if n_programs > 0:
        with support.on_device_of(tensors[0]):
            kernel[(n_programs,)](
                *tensors,
                n_rows,
                n_cols,
                RANKS=ranks,
                TILE=(BLOCK_ROWS, BLOCK_COLS),
                STEPS=STEPS,
                num_warps=NUM_WARPS,
                enable_fp_fusion=True,
            )


def _forward_results(gate, up, h, scales, b_gate, b_up):
    """Return the forward's result, not yet written."""
    _check(gate, up, h, b_gate, b_up)
    return new_like(gate)  # (..., I)


@support.operator(
    "tutorial::lora_swiglu_forward",
    "(Tensor gate, Tensor up, Tensor h, float[] scales, Tensor b_gate, Tensor b_up) -> Tensor",
    _forward_results,
)
def lora_swiglu_forward(gate, up, h, scales, b_gate, b_up):
    """Return y (..., I) of gate and up (..., I), h (N, both R) and b (I, R), in their one dtype."""
    y = _forward_results(gate, up, h, scales, b_gate, b_up)
    gate, up, h, b_gate, b_up = (t.contiguous() for t in (gate, up, h, b_gate, b_up))
    ranks = b_gate.shape[1], b_up.shape[1]
    adapters = (b_gate, scales[0]), (b_up, scales[1])
    _launch(_swiglu_lora_fwd_kernel, gate, up, h, *adapters, y, ranks=ranks)
    return y


def _backward_results(dy, gate, up, h, scales, b_gate, b_up, dh, a, need_y):
    """Return the backward's results, not yet written."""
    _check(gate, up, h, b_gate, b_up, dy, dh, a)
    return new_like(dy), new_like(gate), new_like(up) if need_y else None  # each (..., I)


@support.operator(
    "tutorial::lora_swiglu_backward",
    "(Tensor dy, Tensor gate, Tensor up, Tensor h, float[] scales, Tensor b_gate, Tensor b_up,"
    " Tensor dh, Tensor a, bool need_y) -> Tensor[]",
    _backward_results,
    present=lambda *arguments: (True, True, arguments[-1]),
)
def _backward_into_new_memory(*arguments):
    results = _backward_results(*arguments)
    _launch_backward(*arguments[:-1], results)
    return results


def _launch_backward(dy, gate, up, h, scales, b_gate, b_up, dh, a, results):
    ranks = b_gate.shape[1], b_up.shape[1], a.shape[0]
    dy, gate, up, h, b_gate, b_up, dh, a = (
        t.contiguous() for t in (dy, gate, up, h, b_gate, b_up, dh, a)
    )
    adapters = (b_gate, scales[0]), (b_up, scales[1]), (dh, a)
    _launch(_swiglu_lora_bwd_kernel, dy, gate, up, h, *adapters, *results, ranks=ranks)


@support.takes_negated()
def lora_swiglu_backward(dy, gate, up, h, scales, b_gate, b_up, dh, a, inplace=False, need_y=True):
    """Return dgate and dup (..., I), and y (..., I) or None where it is not needed.

    Args:
        dy: (..., I); dh (N, R) @ a (R, I) is added to it.
        gate, up, h, scales, b_gate, b_up: the forward's arguments.
        inplace: write dgate over dy, dup over gate, and y over up.  Under torch.compile it changes
            nothing.
    """
    tensors = dy, gate, up, h, scales, b_gate, b_up, dh, a
    if not inplace or torch.compiler.is_compiling():
        return _backward_into_new_memory(*tensors, need_y)
    _check(gate, up, h, b_gate, b_up, dy, dh, a)
    support.refuse_to_overwrite(gate=gate, up=up, dy=dy)
    results = dy.detach(), gate.detach(), up.detach() if need_y else None
    _launch_backward(*tensors, results)
    for t in (dy, gate, up) if need_y else (dy, gate):
        # Autograd cannot see what a kernel writes.  Told, it refuses other uses of the old values.
        torch.autograd.graph.increment_version(t)
    return results
