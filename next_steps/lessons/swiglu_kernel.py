"""SwiGLU in Triton: LLaMA's activation, elementwise, recomputed where it is needed again, in place.

    y = F.silu(gate) * up           # silu(gate) = gate * sigmoid(gate); all of one shape (..., I)

The maths for one element; no element needs another:

    sigmoid = 1 / (1 + exp(-gate))                              forward
    silu    = gate * sigmoid
    y       = silu * up

    dgate   = dy * up * sigmoid * (1 + gate * (1 - sigmoid))    backward; derived above its kernel
    dup     = dy * silu

Bytes moved per bf16 element, and bytes held at the backward's peak beyond gate, up and dy:

                eager                                    fused                          ratio
    forward     silu 4, * up 6                     10    gate, up, y                6     1.7
    backward    dup 6, dsilu 6, dgate 6            18    dy, gate, up, dgate, dup  10     1.8
    both                                           28                              16     1.75
    held        silu, y, dup, dsilu                 8    y, dgate, dup              6     1.3
                                                         in place: y                2     4.0

The prediction: 1.75 times as fast, because moving bytes is all that takes time.

New ideas of Triton and PyTorch, after those of rmsnorm_kernel.py and cross_entropy_kernel.py:

1. An *elementwise* kernel needs no rows.  Contiguous tensors are one line of numbers.  Program i
   takes the i-th BLOCK_SIZE of these numbers, whatever the shape.  Rows return where there is a gap
   between them: gate, up = gate_up.chunk(2, -1) have such gaps, and need not be copied.
2. *Recompute* instead of saving.  The backward reads gate anyway.  silu costs an exponential and a
   division more, and a kernel that waits for memory has time for both.  The kernel also makes y
   again, which the weight gradient of the next projection needs (llama_mlp.py).
3. *In place*: one program reads an element and then writes it, and no other program reads it.  So
   the gradients can lie where gate and up lay.  The kernel is the same: the launcher passes one
   pointer twice.

Limits: fp16, bf16, fp32; gate and up of one dtype and shape, no broadcasting; no second derivative;
fastest where 16 divides I.  inplace=True leaves gate and up alone under retain_graph=True, and
under torch.compile, where the compiler decides which memory is used again.  The launchers refuse
tensors that a kernel cannot take, or cannot overwrite, with a TypeError or a ValueError.
"""

import itertools

import torch
import torch.nn.functional as F

import kernel_support as support
from kernel_support import FLOATS, SAME, tl, triton

# 16 elements a thread, from each tensor: 100 % of the copy rate on an H200.
BLOCK_SIZE, NUM_WARPS = 2048, 4
LOG2E = tl.constexpr(1.4426950408889634)


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return eager SwiGLU (..., I), computed as Hugging Face's LlamaMLP computes it."""
    return F.silu(gate) * up  # (..., I)


# ---- The forward -----------------------------------------------------------------------------
#
# n_rows changes from batch to batch.  do_not_specialize: Triton does not compile anew for it.


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_fwd_kernel(
    gate_ptr, gate_row_stride,  # (n_rows, n_cols)
    up_ptr, up_row_stride,  # (n_rows, n_cols)
    y_ptr,  # (n_rows, n_cols), contiguous
    n_rows,
    n_cols,
    LINE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row, cols, mask = _my_block(n_rows, n_cols, LINE, BLOCK_SIZE)
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + cols, mask=mask).to(tl.float32)
    y = swiglu_of(gate, sigmoid_of(gate), up, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


# exp(-gate) = 2**(-gate * LOG2E), and 2**t is what a GPU computes.  Below gate = -88 the power
# overflows to inf, harmlessly: 1 / inf = 0.  At gate = -inf, silu is -inf * 0 = NaN, as in PyTorch.
@triton.jit
def sigmoid_of(gate):
    return 1.0 / (1.0 + tl.exp2(gate * -LOG2E))


# The reference's rounding order: silu is rounded to the dtype before up multiplies it.
@triton.jit
def swiglu_of(gate, sigmoid, up, dtype: tl.constexpr):
    return (gate * sigmoid).to(dtype).to(tl.float32) * up


# Which elements this program takes.  LINE: gate, up (and dy) are contiguous, so they count as one
# row.  Otherwise no block crosses the end of a row.  The results are always contiguous.
@triton.jit
def _my_block(n_rows, n_cols, LINE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    program = tl.program_id(0)
    if LINE:
        row = tl.cast(0, tl.int64)
        # int64: at I = 14,336 the elements outgrow 32 bits in row 149,796.
        first = program.to(tl.int64) * BLOCK_SIZE
        # A multiple of 16 where n_cols is: then a thread loads 16 bytes at once.
        length = tl.cast(n_rows, tl.int64) * n_cols
    else:
        blocks_per_row = tl.cdiv(n_cols, BLOCK_SIZE)
        row = (program // blocks_per_row).to(tl.int64)
        first = program % blocks_per_row * BLOCK_SIZE
        length = n_cols
    cols = first + tl.arange(0, BLOCK_SIZE)
    return row, cols, cols < length


# ---- The backward ----------------------------------------------------------------------------
#
# Given dy = dL/dy, find dgate = dL/dgate and dup = dL/dup.  With s = sigmoid(gate):
#
#   y = silu * up    so    dup   = dy * silu
#                          dsilu = dy * up
#
#   ds/dgate    = exp(-gate) / (1 + exp(-gate))^2 = s * (1 - s)
#   dsilu/dgate = s + gate * ds/dgate                            silu = gate * s
#               = s * (1 + gate * (1 - s))
#   dgate       = dy * up * s * (1 + gate * (1 - s))
#
# The rounding of silu counts as the identity, as in autograd: silu in dup is the unrounded one.
# Eager rounds dsilu, because it stores dsilu.  Here only the results are rounded.  y, where it is
# asked for, has the forward's bits.
#
# dgate may lie over gate, dup over up and y over dy.  All loads come before the first store.  All
# blocks have one length and dtype, so Triton gives element i of each to one thread (or adds a
# barrier, if an address forbids that).


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_bwd_kernel(
    dy_ptr, dy_row_stride,  # (n_rows, n_cols)
    gate_ptr, gate_row_stride,  # (n_rows, n_cols)
    up_ptr, up_row_stride,  # (n_rows, n_cols)
    dgate_ptr,  # (n_rows, n_cols), contiguous
    dup_ptr,  # (n_rows, n_cols), contiguous
    y_ptr,  # (n_rows, n_cols), contiguous; None: not needed
    n_rows,
    n_cols,
    LINE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row, cols, mask = _my_block(n_rows, n_cols, LINE, BLOCK_SIZE)
    dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + cols, mask=mask).to(tl.float32)

    dtype = dgate_ptr.dtype.element_ty
    sigmoid = sigmoid_of(gate)
    dgate, dup = swiglu_gradients(dy, gate, sigmoid, up)
    tl.store(dgate_ptr + row * n_cols + cols, dgate.to(dtype), mask=mask)
    tl.store(dup_ptr + row * n_cols + cols, dup.to(dtype), mask=mask)
    if y_ptr is not None:
        y = swiglu_of(gate, sigmoid, up, dtype)
        tl.store(y_ptr + row * n_cols + cols, y.to(dtype), mask=mask)


@triton.jit
def swiglu_gradients(dy, gate, sigmoid, up):
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = dy * (gate * sigmoid)
    return dgate, dup


# ---- Launchers -------------------------------------------------------------------------------


def _check(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor | None = None) -> None:
    """Refuse what the kernels cannot compute."""
    support.check_tensors(
        ("gate", gate, FLOATS, ("...",)),
        ("up", up, SAME, ("...",)),
        ("dy?", dy, SAME, ("...",)),
    )


def _launch(kernel: triton.JITFunction, sources: tuple, results: tuple) -> None:
    """Launch with (..., I) sources of any strides, and then contiguous results."""
    gate = sources[-2]
    rows = [support.as_rows(t) for t in sources]
    line = all(t.is_contiguous() for t, _ in rows)
    n_cols = gate.shape[-1] if gate.ndim > 0 else 1
    n_rows = gate.numel() // max(n_cols, 1)
    n_programs = n_rows * -(-n_cols // BLOCK_SIZE)  # a quotient that is rounded up
    if line:
        n_programs = -(-n_rows * n_cols // BLOCK_SIZE)
    if n_programs > 0:
        with support.on_device_of(gate):
            support.recordable(kernel)[(n_programs,)](
                *itertools.chain(*rows),  # each followed by its stride
                *results,
                n_rows,
                n_cols,
                LINE=line,
                BLOCK_SIZE=BLOCK_SIZE,
                num_warps=NUM_WARPS,
                enable_fp_fusion=True,
            )


def new_like(t: torch.Tensor) -> torch.Tensor:
    """Return new memory, contiguous, for a result of t's shape and dtype."""
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _forward_results(gate, up):
    """Return the forward's result, not yet written."""
    _check(gate, up)
    return new_like(gate)  # (..., I)


@support.operator(
    "tutorial::swiglu_forward",
    "(Tensor gate, Tensor up) -> Tensor",
    _forward_results,
    launches_are_recordable=True,
)
def swiglu_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return y (..., I) of gate and up (..., I), in their dtype."""
    y = _forward_results(gate, up)
    _launch(_swiglu_fwd_kernel, (gate, up), (y,))
    return y


def _backward_results(dy, gate, up, need_y):
    """Return the backward's results, not yet written."""
    _check(gate, up, dy)
    return new_like(gate), new_like(up), new_like(dy) if need_y else None  # each (..., I)


@support.operator(
    "tutorial::swiglu_backward",
    "(Tensor dy, Tensor gate, Tensor up, bool need_y) -> Tensor[]",
    _backward_results,
    present=lambda dy, gate, up, need_y: (True, True, need_y),
    launches_are_recordable=True,
)
def _backward_into_new_memory(dy, gate, up, need_y):
    results = _backward_results(dy, gate, up, need_y)
    _launch(_swiglu_bwd_kernel, (dy, gate, up), results)
    return results


@support.takes_negated()
def swiglu_backward(dy, gate, up, inplace=False, need_y=False):
    """Return dgate and dup (..., I), and y (..., I) or None where it is not needed.

    inplace=True writes dgate over gate, dup over up, and y over dy.
    """
    if not inplace:
        return _backward_into_new_memory(dy, gate, up, need_y)
    _check(gate, up, dy)
    sources = {"gate": gate, "up": up} | ({"dy": dy} if need_y else {})
    support.refuse_to_overwrite(**sources)
    if torch.compiler.is_compiling():  # the compiler may or may not make these copies
        dgate, dup, y = _backward_into_new_memory(dy, gate, up, need_y)
        return gate.copy_(dgate), up.copy_(dup), dy.copy_(y) if need_y else None
    results = gate.detach(), up.detach(), dy.detach() if need_y else None
    _launch(_swiglu_bwd_kernel, (dy, gate, up), results)
    for t in sources.values():
        # Autograd cannot see what a kernel writes.  Told, it refuses other uses of the old values.
        torch.autograd.graph.increment_version(t)
    return results


# ---- For autograd, and as a module -----------------------------------------------------------


def may_overwrite_saved() -> bool:
    """Return True if a backward may write over what was saved: not under retain_graph=True."""
    if torch.compiler.is_compiling():  # a compiler plans memory itself
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


class TritonSwiGLUFunction(torch.autograd.Function):
    """`TritonSwiGLUFunction.apply(gate, up, inplace)`: both launchers, connected to autograd."""

    @staticmethod
    def forward(ctx, gate, up, inplace):
        ctx.inplace = inplace and all(ctx.needs_input_grad[:2])
        ctx.inplace = ctx.inplace and not torch.compiler.is_compiling()
        y = swiglu_forward(gate, up)
        if ctx.inplace:  # now: in the backward it would be too late to refuse
            support.refuse_to_overwrite(gate=gate, up=up)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx, dy):
        support.refuse_second_derivative("SwiGLU in Triton")
        inplace = ctx.inplace and may_overwrite_saved()
        dgate, dup, _ = swiglu_backward(dy, *ctx.saved_tensors, inplace=inplace)
        return dgate, dup, None


class TritonSwiGLU(torch.nn.Module):
    """`act(gate, up)`.  inplace=True lets the backward overwrite gate and up with their gradients.

    Any other use of gate or up in a later backward then raises.  Inside torch.utils.checkpoint it
    does not raise, because checkpoint does not look.  Under torch.compile inplace changes nothing.
    """

    def __init__(self, inplace: bool = False):
        super().__init__()
        self.inplace = inplace

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return TritonSwiGLUFunction.apply(gate, up, self.inplace and torch.is_grad_enabled())
