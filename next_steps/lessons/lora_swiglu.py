"""SwiGLU that adds the adapters of its neighbours while it has their numbers in registers.

    gate = gate + s_gate * h_gate @ b_gate.t()      h (N, R), b (I, R): LoRA's part of gate_proj
    up   = up + s_up * h_up @ b_up.t()              and of up_proj
    y    = silu(gate) * up                          (N, I)

    dy   = dy + dh @ a                              backward: dh (N, R), a (R, I) of down_proj

lora_linear.py lets a thin product add to what is there: it reads out and writes it, two passes.
Where out is 14,336 wide these are the longest passes that an adapter has left, and they are not
even fast: cuBLAS's tiles are made for long sums, and a sum of 16 is over before the tile's result
is on its way.  But SwiGLU follows, and reads gate and up anyway.  A tile of h @ b.t() needs a few
numbers of h and b, and a matrix product in the middle of an elementwise kernel:

    thin = tl.dot(h, b)                             (BLOCK_ROWS, BLOCK_COLS), in fp32

So gate and up stay in memory as the frozen weights made them, the sum exists in registers alone,
and the backward, which reads them again, makes it again.  Numbers moved per token and layer in
LLaMA 3.1 8B, I = 14,336:

                                          products that add      here
    gate += thin, up += thin                   4 x 14,336           0
    dy += thin                                 2 x 14,336           0

The prediction for 32 layers and 8,192 tokens in bf16: 45 GB less, which is 11 ms at 4.0 TB/s.

New ideas of Triton, after those of swiglu_kernel.py: `tl.dot` wants three sides that are powers of
two, the summed one at least 16.  A rank that is none is filled up with zeros, which add nothing.
Its result lies in registers as the matrix unit leaves it, the loaded tile as memory wants it, and
Triton exchanges them through shared memory: each tile waits three times.  So there is a second new
idea, *stages*.  A program has eight tiles, one after the other, and `tl.range(..., num_stages=3)`
has the next two on their way from memory while it works on one.

Limits: those of swiglu_kernel.py; ranks up to 64; no second derivative.
"""

from collections.abc import Sequence

import torch

# first, because it decides how triton will run
from next_steps.lessons.swiglu_kernel import (
    INTERPRETED,
    check,
    check_overwritten,
    on_device_of,
    refuse_wrapper,
    shape_as_rows,
    sigmoid_of,
    swiglu_gradients,
    swiglu_of,
)

import triton  # isort: skip
import triton.language as tl  # isort: skip

LARGEST_RANK = 64  # more needs more shared memory than a small GPU has
# 95 and 96 % of what swiglu_kernel.py reaches without adapters on an H200; without stages: 60 %.
BLOCK_ROWS, BLOCK_COLS, STEPS = 16, 128, 8
NUM_WARPS, STAGES = 4, 3


def lora_swiglu_reference(
    gate: torch.Tensor,
    up: torch.Tensor,
    h: torch.Tensor,
    scales: Sequence[float],
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
) -> torch.Tensor:
    """Eager silu(gate + thin) * (up + thin) of gate, up (..., I), h (N, both R), b (I, R).

    float64 stays float64.
    """
    h_gate, h_up = h.split([b_gate.shape[1], b_up.shape[1]], dim=1)
    gate = gate + scales[0] * (h_gate @ b_gate.t()).view_as(gate)
    up = up + scales[1] * (h_up @ b_up.t()).view_as(up)
    return torch.nn.functional.silu(gate) * up


# ---- The kernels -----------------------------------------------------------------------------
#
# A program has a strip of BLOCK_COLS of the I columns, STEPS times BLOCK_ROWS tokens long, and goes
# down it tile by tile; neighbours have neighbouring columns.  b and a of its columns it reads once.
# n_rows changes from batch to batch, and must not compile a kernel each time.


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_lora_fwd_kernel(
    gate_ptr,  # (n_rows, n_cols), contiguous, as are all the others
    up_ptr,  # (n_rows, n_cols)
    h_ptr,  # (n_rows, R_GATE + R_UP)
    b_gate_ptr,  # (n_cols, R_GATE)
    b_up_ptr,  # (n_cols, R_UP)
    s_gate,
    s_up,
    y_ptr,  # (n_rows, n_cols)
    n_rows,
    n_cols,
    R_GATE: tl.constexpr,
    R_UP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    first_row, cols = _my_strip(n_cols, BLOCK_ROWS * STEPS, BLOCK_COLS)
    b_gate = _transposed(b_gate_ptr, R_GATE, cols, n_cols, BLOCK_R)
    b_up = _transposed(b_up_ptr, R_UP, cols, n_cols, BLOCK_R)
    dtype = y_ptr.dtype.element_ty
    for step in tl.range(0, STEPS, num_stages=STAGES):
        rows = first_row + (step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
        at, mask = rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)
        gate = tl.load(gate_ptr + at, mask=mask).to(tl.float32)
        up = tl.load(up_ptr + at, mask=mask).to(tl.float32)
        h = _columns(h_ptr, R_GATE + R_UP, rows, n_rows, R_GATE, BLOCK_R)
        gate = _add(gate, s_gate, _dot(h, b_gate, EXACT), dtype)
        h = _columns(h_ptr + R_GATE, R_GATE + R_UP, rows, n_rows, R_UP, BLOCK_R)
        up = _add(up, s_up, _dot(h, b_up, EXACT), dtype)
        y = swiglu_of(gate, sigmoid_of(gate), up, dtype)
        tl.store(y_ptr + at, y.to(dtype), mask=mask)


# The results may lie over what is read, each over something that it is computed from: dgate over
# dy, dup over gate, y over up.  A thread may store a number that another one has loaded; it has it
# from that one, so the load is over.


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_lora_bwd_kernel(
    dy_ptr,  # (n_rows, n_cols), contiguous, as are all the others
    gate_ptr,  # (n_rows, n_cols)
    up_ptr,  # (n_rows, n_cols)
    h_ptr,  # (n_rows, R_GATE + R_UP)
    b_gate_ptr,  # (n_cols, R_GATE)
    b_up_ptr,  # (n_cols, R_UP)
    s_gate,
    s_up,
    dh_ptr,  # (n_rows, R_DOWN)
    a_ptr,  # (R_DOWN, n_cols)
    dgate_ptr,  # (n_rows, n_cols)
    dup_ptr,  # (n_rows, n_cols)
    y_ptr,  # (n_rows, n_cols); None: not wanted
    n_rows,
    n_cols,
    R_GATE: tl.constexpr,
    R_UP: tl.constexpr,
    R_DOWN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    first_row, cols = _my_strip(n_cols, BLOCK_ROWS * STEPS, BLOCK_COLS)
    b_gate = _transposed(b_gate_ptr, R_GATE, cols, n_cols, BLOCK_R)
    b_up = _transposed(b_up_ptr, R_UP, cols, n_cols, BLOCK_R)
    ranks = tl.arange(0, BLOCK_R)[:, None]
    a_mask = (ranks < R_DOWN) & (cols < n_cols)
    a = tl.load(a_ptr + ranks * n_cols + cols, mask=a_mask, other=0.0)  # (BLOCK_R, BLOCK_COLS)
    dtype = dgate_ptr.dtype.element_ty
    for step in tl.range(0, STEPS, num_stages=STAGES):
        rows = first_row + (step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
        at, mask = rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)
        dy = tl.load(dy_ptr + at, mask=mask).to(tl.float32)
        gate = tl.load(gate_ptr + at, mask=mask).to(tl.float32)
        up = tl.load(up_ptr + at, mask=mask).to(tl.float32)
        h = _columns(h_ptr, R_GATE + R_UP, rows, n_rows, R_GATE, BLOCK_R)
        gate = _add(gate, s_gate, _dot(h, b_gate, EXACT), dtype)
        h = _columns(h_ptr + R_GATE, R_GATE + R_UP, rows, n_rows, R_UP, BLOCK_R)
        up = _add(up, s_up, _dot(h, b_up, EXACT), dtype)
        dh = _columns(dh_ptr, R_DOWN, rows, n_rows, R_DOWN, BLOCK_R)
        dy = _add(dy, 1.0, _dot(dh, a, EXACT), dtype)

        sigmoid = sigmoid_of(gate)
        dgate, dup = swiglu_gradients(dy, gate, sigmoid, up)
        tl.store(dgate_ptr + at, dgate.to(dtype), mask=mask)
        tl.store(dup_ptr + at, dup.to(dtype), mask=mask)
        if y_ptr is not None:
            y = swiglu_of(gate, sigmoid, up, dtype)
            tl.store(y_ptr + at, y.to(dtype), mask=mask)


# Which numbers are this program's: its first row, and its columns (1, BLOCK_COLS).
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


# EXACT: fp32; and the interpreter, which cannot multiply bf16.
@triton.jit
def _dot(a, b, EXACT: tl.constexpr):
    if EXACT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


# Rounded as if it were stored: the numbers are those of a product that adds.
@triton.jit
def _add(base, scale, thin, dtype: tl.constexpr):
    return (base + scale * thin).to(dtype).to(tl.float32)


# ---- Launchers -------------------------------------------------------------------------------


def lora_swiglu_forward(
    gate: torch.Tensor,
    up: torch.Tensor,
    h: torch.Tensor,
    scales: Sequence[float],
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
) -> torch.Tensor:
    """Return y (..., I) of gate and up (..., I), h (N, both R) and b (I, R), in their one dtype.

    Raises TypeError or ValueError for what the kernel cannot take.
    """
    launch = _forward_operator if torch.compiler.is_compiling() else _launch_forward
    return launch(gate, up, h, *scales, b_gate, b_up)


def _launch_forward(gate, up, h, s_gate, s_up, b_gate, b_up):
    _check_all(gate, up, h, b_gate, b_up)
    gate, up, h, b_gate, b_up = (t.contiguous() for t in (gate, up, h, b_gate, b_up))
    y = torch.empty_like(gate)
    n_programs, options = _grid(gate, b_gate, b_up)
    if n_programs > 0:
        with on_device_of(gate):
            _swiglu_lora_fwd_kernel[(n_programs,)](
                gate, up, h, b_gate, b_up, s_gate, s_up,
                y,
                *shape_as_rows(gate),
                R_GATE=b_gate.shape[1],
                R_UP=b_up.shape[1],
                **options,
                enable_fp_fusion=True,
            )  # fmt: skip
    return y


def lora_swiglu_backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    h: torch.Tensor,
    scales: Sequence[float],
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    dh: torch.Tensor,
    a: torch.Tensor,
    inplace: bool = False,
    need_y: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return dgate and dup (..., I), of dy (..., I) and what the forward had; and y, if needed.

    dh (N, R), a (R, I): what is added to dy.  inplace: the results lie over dy, gate and up.
    Raises TypeError or ValueError for what the kernel cannot take, or cannot overwrite.
    """
    tensors = dy, gate, up, h, *scales, b_gate, b_up, dh, a
    if torch.compiler.is_compiling():
        results = _backward_operator(*tensors, need_y)
    else:
        results = _launch_backward(*tensors, need_y, inplace)
    return *results, *[None] * (3 - len(results))


def _launch_backward(dy, gate, up, h, s_gate, s_up, b_gate, b_up, dh, a, need_y, inplace=False):
    _check_all(gate, up, h, b_gate, b_up, dy, dh, a)
    h, b_gate, b_up, dh, a = (t.contiguous() for t in (h, b_gate, b_up, dh, a))
    sources = (dy, gate, up) if need_y else (dy, gate)
    if inplace:
        check_overwritten((gate, up, dy))
        results = [t.detach() for t in sources]
    dy, gate, up = (t.contiguous() for t in (dy, gate, up))
    if not inplace:
        results = [torch.empty_like(gate) for _ in sources]
    dgate, dup, y = results if need_y else (*results, None)
    n_programs, options = _grid(gate, b_gate, b_up, a.t())
    if n_programs > 0:
        with on_device_of(gate):
            _swiglu_lora_bwd_kernel[(n_programs,)](
                dy, gate, up, h, b_gate, b_up, s_gate, s_up, dh, a,
                dgate, dup, y,
                *shape_as_rows(gate),
                R_GATE=b_gate.shape[1],
                R_UP=b_up.shape[1],
                R_DOWN=a.shape[0],
                **options,
                enable_fp_fusion=True,
            )  # fmt: skip
    if inplace:
        # Autograd cannot see what a kernel writes; told, it refuses other uses of what was there.
        for t in sources:
            torch.autograd.graph.increment_version(t)
    return results


def _grid(gate: torch.Tensor, *thin: torch.Tensor) -> tuple[int, dict]:
    """Number of programs for gate (..., I) and thin (I, R), and the launch's options."""
    n_rows, n_cols = shape_as_rows(gate)
    rank = max(t.shape[1] for t in thin)
    options = {
        "BLOCK_R": max(16, triton.next_power_of_2(rank)),
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_COLS": BLOCK_COLS,
        "STEPS": STEPS,
        "STAGES": STAGES,
        "EXACT": INTERPRETED or gate.dtype == torch.float32,
        "num_warps": NUM_WARPS,
    }
    # both rounded up
    return -(-n_rows // (BLOCK_ROWS * STEPS)) * -(-n_cols // BLOCK_COLS), options


def _check_all(gate, up, h, b_gate, b_up, dy=None, dh=None, a=None) -> None:
    """Refuse what the kernels cannot compute before they are handed any pointer."""
    check(gate, up, dy)
    thin = {"h": h, "b_gate": b_gate, "b_up": b_up, "dh": dh, "a": a}
    thin = {name: t for name, t in thin.items() if t is not None}
    for name, t in thin.items():
        refuse_wrapper(name, t)
    n_rows, n_cols = shape_as_rows(gate)
    r_gate, r_up, r_down = b_gate.shape[-1], b_up.shape[-1], 0 if a is None else a.shape[0]
    shapes = {
        "h": (n_rows, r_gate + r_up),
        "b_gate": (n_cols, r_gate),
        "b_up": (n_cols, r_up),
        "dh": (n_rows, r_down),
        "a": (r_down, n_cols),
    }
    for name, t in thin.items():
        given = tuple(t.shape), t.dtype, t.device
        if given != (shapes[name], gate.dtype, gate.device):
            given = "{} is {} of {} on {}".format(name, *given)
            wanted = f"{shapes[name]} of {gate.dtype} on {gate.device}"
            raise ValueError(f"{given}, expected {wanted}: change one of them.")
    if max(r_gate, r_up, r_down) > LARGEST_RANK:
        given = f"the ranks are {r_gate}, {r_up} and {r_down}"
        raise ValueError(f"{given}, expected at most {LARGEST_RANK}: use lora_linear.py.")


# What torch.compile sees in place of the kernels: see swiglu_kernel.py.

_forward_operator = torch.library.custom_op(
    "tutorial::lora_swiglu_forward",
    _launch_forward,
    mutates_args=(),
    schema="(Tensor gate, Tensor up, Tensor h, float s_gate, float s_up, Tensor b_gate, "
    "Tensor b_up) -> Tensor",
)


@_forward_operator.register_fake
def _(gate, up, h, s_gate, s_up, b_gate, b_up):
    _check_all(gate, up, h, b_gate, b_up)
    return gate.new_empty(gate.shape)


@torch.library.custom_op(
    "tutorial::lora_swiglu_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor gate, Tensor up, Tensor h, float s_gate, float s_up, "
    "Tensor b_gate, Tensor b_up, Tensor dh, Tensor a, bool need_y) -> Tensor[]",
)
def _backward_operator(*arguments):
    return _launch_backward(*arguments)


@_backward_operator.register_fake
def _(dy, gate, up, h, s_gate, s_up, b_gate, b_up, dh, a, need_y):
    _check_all(gate, up, h, b_gate, b_up, dy, dh, a)
    return [gate.new_empty(gate.shape) for _ in range(3 if need_y else 2)]
