"""SwiGLU in Triton: LLaMA's activation, elementwise, recomputed where it is needed again, in place.

    y = F.silu(gate) * up           # silu(gate) = gate * sigmoid(gate); all of one shape (..., I)

The maths for one element; no element needs another:

    sigmoid = 1 / (1 + exp(-gate))                              forward
    silu    = gate * sigmoid
    y       = silu * up

    dgate   = dy * up * sigmoid * (1 + gate * (1 - sigmoid))    backward; derived above its kernel
    dup     = dy * silu

Bytes moved per bf16 element; and held at the backward's peak, beyond gate, up and dy:

                eager                                    fused                          ratio
    forward     silu 4, * up 6                     10    gate, up, y                6     1.7
    backward    dup 6, dsilu 6, dgate 6            18    dy, gate, up, dgate, dup  10     1.8
    both                                           28                              16     1.75
    held        silu, y, dup, dsilu                 8    y, dgate, dup              6     1.3
                                                         in place: y                2     4.0

The prediction: 1.75 times as fast, since all that takes time is moving bytes.

New ideas of Triton and PyTorch, after those of rmsnorm_kernel.py and cross_entropy_kernel.py:

1. An *elementwise* kernel needs no rows.  Contiguous tensors are one line of numbers, and program i
   takes the i-th BLOCK_SIZE of them, whatever their shape.  Rows return where there is a gap
   between them, as between those of gate, up = gate_up.chunk(2, -1), which need not be copied.
2. *Recompute* instead of saving.  The backward reads gate anyway; silu costs it an exponential and
   a division, for which a kernel that waits for memory has time.  So does y, which the weight
   gradient of the projection after it needs (llama_mlp.py).
3. *In place*: an element is read before it is written, by the same program, and nobody else reads
   it.  So the gradients can lie where gate and up lay.  The kernel is the same: it is handed the
   same pointer twice.

Limits: fp16, bf16, fp32, gate and up alike, no broadcasting; no second derivative; fastest where 16
divides I.  inplace=True leaves gate and up alone under retain_graph=True, and under torch.compile,
where the compiler decides which memory is used again.
"""

import contextlib
import os

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# No GPU: run the kernels on the CPU; must precede `import triton`.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

# Beside this file's folder; without it bf16 is truncated on a CPU.
with contextlib.suppress(ModuleNotFoundError):
    import kernel_support  # noqa: F401

INTERPRETED = triton.knobs.runtime.interpret  # on the CPU, by Triton's interpreter?
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# 16 elements a thread, from each tensor: 100 % of the copy rate on an H200.
BLOCK_SIZE, NUM_WARPS = 2048, 4
LOG2E = tl.constexpr(1.4426950408889634)


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Eager SwiGLU, operation for operation Hugging Face's LlamaMLP; float64 stays float64."""
    return F.silu(gate) * up  # (..., I)


# ---- The forward -----------------------------------------------------------------------------
#
# n_rows changes from batch to batch, and must not compile a kernel each time.


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


# exp(-gate) = 2**(-gate * LOG2E), and 2**t is what a GPU computes.  Below gate = -88 it overflows
# to inf, harmlessly: 1 / inf = 0.  At gate = -inf, silu is -inf * 0 = NaN, as in PyTorch.
@triton.jit
def sigmoid_of(gate):
    return 1.0 / (1.0 + tl.exp2(gate * -LOG2E))


# The reference's rounding order: silu is rounded to the dtype before up multiplies it.
@triton.jit
def swiglu_of(gate, sigmoid, up, dtype: tl.constexpr):
    return (gate * sigmoid).to(dtype).to(tl.float32) * up


# Which elements are this program's.  LINE: gate, up (and dy) are contiguous, and so one line, as if
# one row; the results always are.  If not, no block crosses the end of a row.
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
# That silu is rounded counts as the identity, as it does in autograd; silu in dup is the unrounded
# one.  Eager rounds dsilu and stores it; here only what is stored is rounded.  y, where it is asked
# for, has the forward's bits.
#
# dgate may lie over gate, dup over up and y over dy.  All loads come before the first store; and as
# all blocks are of one length and dtype, Triton gives element i of each to one thread (or, if an
# address forbids it, adds a barrier).


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_bwd_kernel(
    dy_ptr, dy_row_stride,  # (n_rows, n_cols)
    gate_ptr, gate_row_stride,  # (n_rows, n_cols)
    up_ptr, up_row_stride,  # (n_rows, n_cols)
    dgate_ptr,  # (n_rows, n_cols), contiguous
    dup_ptr,  # (n_rows, n_cols), contiguous
    y_ptr,  # (n_rows, n_cols), contiguous; None: not wanted
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


def swiglu_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return y (..., I) of gate and up (..., I), in their dtype.

    Raises TypeError or ValueError for what the kernel cannot take.
    """
    launch = _forward_operator if torch.compiler.is_compiling() else _launch_forward
    return launch(gate, up)


def _launch_forward(gate, up):
    check(gate, up)
    y = _new_like(gate)  # (..., I)
    (gate_rows, gate_row_stride), (up_rows, up_row_stride) = _as_rows(gate), _as_rows(up)
    n_rows, n_cols = shape_as_rows(gate)
    n_programs, options = _grid(n_rows, n_cols, gate_rows, up_rows)
    if n_programs > 0:
        with on_device_of(gate):
            _swiglu_fwd_kernel[(n_programs,)](
                gate_rows, gate_row_stride,
                up_rows, up_row_stride,
                y,
                n_rows,
                n_cols,
                **options,
                enable_fp_fusion=True,
            )  # fmt: skip
    return y


def swiglu_backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    inplace: bool = False,
    need_y: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return dgate and dup (..., I), and y (..., I) once more if it is needed.

    inplace: they lie over gate, up and dy.  Raises TypeError or ValueError for what the kernel
    cannot take, or cannot overwrite.
    """
    if not torch.compiler.is_compiling():
        return _launch_backward(dy, gate, up, inplace, need_y)
    results = _backward_operator(dy, gate, up, need_y)
    if inplace:  # as the compiler sees it: a copy, which it may or may not make
        sources = (gate, up, dy)[: len(results)]
        check(gate, up, dy)
        check_overwritten(sources)
        results = [t.copy_(result) for t, result in zip(sources, results)]
    dgate, dup, *y = results
    return dgate, dup, y[0] if need_y else None


def _launch_backward(dy, gate, up, inplace, need_y):
    check(gate, up, dy)
    sources = (gate, up, dy) if need_y else (gate, up)
    if inplace:
        check_overwritten(sources)
    results = [t.detach() if inplace else _new_like(t) for t in sources]
    dgate, dup, y = results if need_y else (*results, None)

    dy_rows, dy_row_stride = _as_rows(dy)
    gate_rows, gate_row_stride = _as_rows(gate)
    up_rows, up_row_stride = _as_rows(up)
    n_rows, n_cols = shape_as_rows(gate)
    n_programs, options = _grid(n_rows, n_cols, dy_rows, gate_rows, up_rows)
    if n_programs > 0:
        with on_device_of(gate):
            _swiglu_bwd_kernel[(n_programs,)](
                dy_rows, dy_row_stride,
                gate_rows, gate_row_stride,
                up_rows, up_row_stride,
                dgate,
                dup,
                y,
                n_rows,
                n_cols,
                **options,
                enable_fp_fusion=True,
            )  # fmt: skip
    if inplace:
        # Autograd cannot see what a kernel writes; told, it refuses other uses of what was there.
        for t in sources:
            torch.autograd.graph.increment_version(t)
    return dgate, dup, y


def _grid(n_rows: int, n_cols: int, *tensors: torch.Tensor) -> tuple[int, dict]:
    """Number of programs for tensors of so many rows and columns, and the launch's options."""
    line = all(t.is_contiguous() for t in tensors)
    options = {"LINE": line, "BLOCK_SIZE": BLOCK_SIZE, "num_warps": NUM_WARPS}
    if line:
        return -(-n_rows * n_cols // BLOCK_SIZE), options  # rounded up
    return n_rows * -(-n_cols // BLOCK_SIZE), options


def _new_like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def shape_as_rows(t: torch.Tensor) -> tuple[int, int]:
    """n_rows and I of t (..., I)."""
    n_cols = t.shape[-1] if t.ndim > 0 else 1
    return t.numel() // max(n_cols, 1), n_cols


def _as_rows(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where t (..., I) lies as rows with adjacent columns, and the stride between rows.

    A contiguous t lies so; any other is viewed as (n_rows, I), copied only if no such view exists.
    """
    n_rows, n_cols = shape_as_rows(t)
    if t.is_contiguous():  # a view would take the host microseconds
        return t, n_cols
    rows = t.reshape(n_rows, n_cols)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def on_device_of(t: torch.Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current GPU, which need not be the one that holds the tensors."""
    elsewhere = t.is_cuda and t.get_device() != torch.cuda.current_device()
    return torch.cuda.device(t.device) if elsewhere else contextlib.nullcontext()


# ---- Checks: what the kernels cannot compute is refused before they are handed any pointer ----


def check(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor | None = None) -> None:
    for name, t in (("gate", gate), ("up", up), ("dy", gate if dy is None else dy)):
        given = t.dtype if isinstance(t, torch.Tensor) else f"a {type(t).__name__}"
        if given not in FLOATS:
            expected = f"a tensor of {' or '.join(map(str, FLOATS))}: convert it."
            raise TypeError(f"{name} is {given}, expected {expected}")
        if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
            refuse_wrapper(name, t)
        if t.layout is not torch.strided:
            raise TypeError(f"{name} is {t.layout}, expected torch.strided: pass its to_dense().")
        for what in ("dtype", "shape", "device"):
            given, expected = getattr(t, what), getattr(gate, what)
            if given != expected:
                given = f"{name} has {what} {given}"
                raise ValueError(f"{given}, expected gate's {expected}: change one of them.")
    if not gate.is_cuda and not (INTERPRETED and gate.is_cpu):
        expected = "a GPU: move it, or export TRITON_INTERPRET=1 for a CPU."
        raise ValueError(f"gate is on {gate.device}, expected {expected}")


def refuse_wrapper(name: str, t: torch.Tensor) -> None:
    """A wrapper such as DTensor has no memory of its own: at its data_ptr() lies nothing."""
    if is_traceable_wrapper_subclass(t):
        advice = "pass its to_local() or full_tensor()" if hasattr(t, "to_local") else "unwrap it"
        raise TypeError(f"{name} is a {type(t).__name__}, expected a plain tensor: {advice}.")


def check_overwritten(tensors: tuple[torch.Tensor, ...]) -> None:
    """Refuse to overwrite gate, up (and dy), unless each is a contiguous result of its own."""
    owners = [t if t._base is None else t._base for t in tensors]  # of the memory
    for i, (t, owner) in enumerate(zip(tensors, owners)):
        leaf = owner.is_leaf and owner.requires_grad
        before = [other for other, its_owner in zip(tensors[:i], owners) if its_owner is owner]
        shared = any(abs(t.storage_offset() - o.storage_offset()) < t.numel() for o in before)
        if leaf or shared or not t.is_contiguous():
            name = ("gate", "up", "dy")[i]
            given = f"{name} has strides {t.stride()}, is a leaf: {leaf}, shares memory: {shared}"
            expected = "expected a contiguous result of its own to overwrite: use inplace=False."
            raise ValueError(f"{given}; {expected}")


# ---- What torch.compile sees in place of the kernels -----------------------------------------
#
# To a kernel it would hand strides as it has traced them, not as it lays tensors out.  The body of
# an operator gets real tensors.  See rmsnorm_kernel.py.

_forward_operator = torch.library.custom_op(
    "tutorial::swiglu_forward",
    _launch_forward,
    mutates_args=(),
    schema="(Tensor gate, Tensor up) -> Tensor",
)


@_forward_operator.register_fake
def _(gate, up):
    check(gate, up)
    return gate.new_empty(gate.shape)


@torch.library.custom_op(
    "tutorial::swiglu_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor gate, Tensor up, bool need_y) -> Tensor[]",
)
def _backward_operator(dy, gate, up, need_y):
    results = _launch_backward(dy, gate, up, inplace=False, need_y=need_y)
    return [t for t in results if t is not None]


@_backward_operator.register_fake
def _(dy, gate, up, need_y):
    check(gate, up, dy)
    return [gate.new_empty(gate.shape) for _ in range(3 if need_y else 2)]


# ---- For autograd, and as a module -----------------------------------------------------------


def may_overwrite_saved() -> bool:
    """In a backward: may it write over what was saved for it?

    Not under retain_graph=True, and a compiler plans memory itself.
    """
    if torch.compiler.is_compiling():
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
            check_overwritten((gate, up))
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx, dy):
        # Under create_graph=True; `once_differentiable` would let the derivative vanish silently.
        if torch.is_grad_enabled():
            asked = "which create_graph=True asks for"
            raise RuntimeError(f"SwiGLU in Triton has no second derivative, {asked}.")
        inplace = ctx.inplace and may_overwrite_saved()
        dgate, dup, _ = swiglu_backward(dy, *ctx.saved_tensors, inplace=inplace)
        return dgate, dup, None


class TritonSwiGLU(torch.nn.Module):
    """`act(gate, up)`.  inplace=True lets the backward overwrite gate and up with their gradients.

    Something else that needs them after that then raises; but not inside torch.utils.checkpoint,
    which does not look.  Under torch.compile it changes nothing.
    """

    def __init__(self, inplace: bool = False):
        super().__init__()
        self.inplace = inplace

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return TritonSwiGLUFunction.apply(gate, up, self.inplace and torch.is_grad_enabled())
