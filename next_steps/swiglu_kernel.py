"""SwiGLU in Triton: LLaMA's activation, and an MLP that saves half as much for its backward.

    y = F.silu(gate) * up                           # silu(gate) = gate * sigmoid(gate); all of one shape (..., I)
    out = down_proj(y)                              # gate = gate_proj(x), up = up_proj(x): all of LlamaMLP

The maths for one element; no element needs another:

    sigmoid = 1 / (1 + exp(-gate))                  forward
    silu    = gate * sigmoid
    y       = silu * up
    dgate   = dy * up * sigmoid * (1 + gate * (1 - sigmoid))       backward; derived above its kernel
    dup     = dy * silu

Bytes moved per bf16 element; held at the backward's peak, beyond gate, up and dy; and saved by a whole MLP for it:

                eager                                                       fused                          ratio
    forward     silu 4, * up 6                                        10    gate, up, y                6     1.7
    backward    dup 6, dsilu 6, dgate 6                               18    dy, gate, up, dgate, dup  10     1.8
    held        silu, y, dup, dsilu                                    8    y, dgate, dup              6     1.3
                                                                            in place: y                2     4.0
    saved       gate, up, silu, y                                      8    gate, up                   4     2.0

The prediction: 28 / 16 = 1.75 times as fast, since all that takes time is moving bytes.  And in one of LLaMA 3.1 8B's
32 layers (I = 14,336), 8,192 tokens save 470 MB and not 940 MB.

New ideas of Triton and PyTorch, after those of rmsnorm_kernel.py and cross_entropy_kernel.py:

1. An *elementwise* kernel needs no rows.  Contiguous tensors are one line of numbers, and program i takes the i-th
   BLOCK_SIZE of them, whatever their shape.  Rows return where there is a gap between them, as between those of
   gate, up = gate_up.chunk(2, -1), which need not be copied.
2. *Recompute* instead of saving.  The backward reads gate anyway; silu costs it an exponential and a division, for
   which a kernel that waits for memory has time.  So does y, which down_proj's weight gradient needs.
3. *In place*: an element is read before it is written, by the same program, and nobody else reads it.  So the
   gradients can lie where gate and up lay.  The kernel is the same: it is handed the same pointer twice.

Limits: fp16, bf16, fp32, gate and up alike, no broadcasting; no second derivative; fastest where 16
divides I.  inplace=True leaves gate and up alone under retain_graph=True, and under torch.compile, where
the compiler decides which memory is used again.
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
BLOCK_SIZE, NUM_WARPS = 2048, 4  # 16 elements a thread, from each tensor: 100 % of the copy rate on an H200
LOG2E = tl.constexpr(1.4426950408889634)


def swiglu_reference(gate, up):
    """Eager SwiGLU, operation for operation what Hugging Face's LlamaMLP does; float64 stays float64."""
    return F.silu(gate) * up  # (..., I)


# LINE: all tensors are contiguous, and so one line.  If not, no block crosses the end of a row.
@triton.jit
def _my_block(n_rows, n_cols, LINE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(0)
    if LINE:
        row = tl.cast(0, tl.int64)
        first = pid.to(tl.int64) * BLOCK_SIZE  # int64: at I = 14,336 they outgrow 32 bits in row 149,796
        length = tl.cast(n_rows, tl.int64) * n_cols  # a multiple of 16 where n_cols is: a thread loads 16 bytes at once
    else:
        blocks_per_row = tl.cdiv(n_cols, BLOCK_SIZE)
        row = (pid // blocks_per_row).to(tl.int64)
        first = pid % blocks_per_row * BLOCK_SIZE
        length = n_cols
    cols = first + tl.arange(0, BLOCK_SIZE)
    return row, cols, cols < length


# exp(-gate) = 2**(-gate * LOG2E), and 2**t is what a GPU computes.  Below gate = -88 it overflows to inf, harmlessly:
# 1 / inf = 0.  At gate = -inf, silu is -inf * 0 = NaN, as in PyTorch.
@triton.jit
def _sigmoid(gate):
    return 1.0 / (1.0 + tl.exp2(gate * -LOG2E))


@triton.jit
def _swiglu(gate, sigmoid, up, dtype: tl.constexpr):
    # The reference's rounding order: silu is rounded to the dtype before up multiplies it.
    return (gate * sigmoid).to(dtype).to(tl.float32) * up


@triton.jit(do_not_specialize=["n_rows"])  # it changes from batch to batch, and must not compile a kernel each time
def _swiglu_fwd_kernel(
    gate_ptr, gate_row_stride, up_ptr, up_row_stride, y_ptr, y_row_stride,  # (n_rows, n_cols)
    n_rows, n_cols, LINE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row, cols, mask = _my_block(n_rows, n_cols, LINE, BLOCK_SIZE)
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + cols, mask=mask).to(tl.float32)
    y = _swiglu(gate, _sigmoid(gate), up, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * y_row_stride + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


# The backward.  Given dy = dL/dy, find dgate = dL/dgate and dup = dL/dup.  With s = sigmoid(gate):
#
#   y = silu * up    so    dup   = dy * silu
#                          dsilu = dy * up
#
#   ds/dgate    = exp(-gate) / (1 + exp(-gate))^2 = s * (1 - s)
#   dsilu/dgate = s + gate * ds/dgate                            silu = gate * s
#               = s * (1 + gate * (1 - s))
#   dgate       = dy * up * s * (1 + gate * (1 - s))
#
# That silu is rounded counts as the identity, as it does in autograd; silu in dup is the unrounded one.  Eager rounds
# dsilu and stores it; here only what is stored is rounded.  y, where it is asked for, has the forward's bits.
#
# dgate may lie over gate, dup over up and y over dy.  All loads come before the first store; and as all blocks are of
# one length and dtype, Triton gives element i of each to one thread (or, if an address forbids it, adds a barrier).
@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_bwd_kernel(
    dy_ptr, dy_row_stride, gate_ptr, gate_row_stride, up_ptr, up_row_stride,  # (n_rows, n_cols)
    dgate_ptr, dgate_row_stride, dup_ptr, dup_row_stride,  # (n_rows, n_cols)
    y_ptr, y_row_stride,  # (n_rows, n_cols), or None: not wanted
    n_rows, n_cols, LINE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row, cols, mask = _my_block(n_rows, n_cols, LINE, BLOCK_SIZE)
    dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + cols, mask=mask).to(tl.float32)
    dtype = dgate_ptr.dtype.element_ty
    sigmoid = _sigmoid(gate)
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = dy * (gate * sigmoid)
    tl.store(dgate_ptr + row * dgate_row_stride + cols, dgate.to(dtype), mask=mask)
    tl.store(dup_ptr + row * dup_row_stride + cols, dup.to(dtype), mask=mask)
    if y_ptr is not None:
        y = _swiglu(gate, sigmoid, up, dtype)
        tl.store(y_ptr + row * y_row_stride + cols, y.to(dtype), mask=mask)


def _refuse_wrapper(name, t):
    """A wrapper such as DTensor has no memory of its own: at its data_ptr() lies nothing."""
    if is_traceable_wrapper_subclass(t):
        advice = "pass its to_local() or full_tensor()" if hasattr(t, "to_local") else "unwrap it"
        raise TypeError(f"{name} is a {type(t).__name__}, expected a plain tensor: {advice}.")


def _check(gate, up, dy=None, overwrite=()):
    """Refuse what the kernels cannot compute, before any pointer is handed to them."""
    for name, t in (("gate", gate), ("up", up), ("dy", gate if dy is None else dy)):
        given = t.dtype if isinstance(t, torch.Tensor) else f"a {type(t).__name__}"
        if given not in FLOATS:
            raise TypeError(f"{name} is {given}, expected a tensor of {' or '.join(map(str, FLOATS))}: convert it.")
        if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
            _refuse_wrapper(name, t)
        if t.layout is not torch.strided:
            raise TypeError(f"{name} is {t.layout}, expected torch.strided: pass its to_dense().")
        for what in ("dtype", "shape", "device"):
            given, expected = getattr(t, what), getattr(gate, what)
            if given != expected:
                raise ValueError(f"{name} has {what} {given}, expected gate's {expected}: change one of them.")
    if not gate.is_cuda and not (INTERPRETED and gate.is_cpu):
        expected = "a GPU: move it, or export TRITON_INTERPRET=1 for a CPU."
        raise ValueError(f"gate is on {gate.device}, expected {expected}")
    owners = [t if t._base is None else t._base for t in overwrite]  # of the memory
    for i, (t, owner) in enumerate(zip(overwrite, owners)):
        leaf = owner.is_leaf and owner.requires_grad
        before = [o for o, its_owner in zip(overwrite[:i], owners) if its_owner is owner]
        shared = any(abs(t.storage_offset() - o.storage_offset()) < t.numel() for o in before)
        if leaf or shared or not t.is_contiguous():
            given = f"{('gate', 'up', 'dy')[i]} has strides {t.stride()}, is a leaf: {leaf}, shares memory: {shared}"
            raise ValueError(f"{given}; expected a contiguous result of its own to overwrite: use inplace=False.")


def _as_rows(t):
    """View t (..., I) as (n_rows, I) with adjacent columns; copy only where no such view exists."""
    n_cols = t.shape[-1] if t.ndim > 0 else 1
    rows = t.reshape(t.numel() // max(n_cols, 1), n_cols)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(kernel, *tensors):
    """Run a kernel on tensors of one shape, each given to it as a pointer and its rows' stride."""
    rows = [None if t is None else _as_rows(t) for t in tensors]
    n_rows, n_cols = rows[0].shape
    line = all(t is None or t.is_contiguous() for t in rows)
    n_programs = -(-n_rows * n_cols // BLOCK_SIZE) if line else n_rows * -(-n_cols // BLOCK_SIZE)  # rounded up
    arguments = [a for t in rows for a in ((None, 0) if t is None else (t, t.stride(0)))]
    if n_programs > 0:  # on the tensors' GPU, which need not be the current one
        with torch.cuda.device(tensors[0].device) if tensors[0].is_cuda else contextlib.nullcontext():
            kernel[(n_programs,)](*arguments, n_rows, n_cols, LINE=line, BLOCK_SIZE=BLOCK_SIZE, num_warps=NUM_WARPS)


def _swiglu_forward(gate, up):
    _check(gate, up)
    y = gate.new_empty(gate.shape)
    _launch(_swiglu_fwd_kernel, gate, up, y)
    return y


def _swiglu_backward(dy, gate, up, inplace, need_y):
    sources = (gate, up, dy) if need_y else (gate, up)
    _check(gate, up, dy, overwrite=sources if inplace else ())
    outputs = [t.detach() if inplace else t.new_empty(t.shape) for t in sources]
    dgate, dup, y = outputs if need_y else (*outputs, None)
    _launch(_swiglu_bwd_kernel, dy, gate, up, dgate, dup, y)
    if inplace:  # autograd cannot see what a kernel writes; told, it refuses other uses of what was there
        for t in sources:
            torch.autograd.graph.increment_version(t)
    return dgate, dup, y


# What torch.compile sees in place of the kernels, to which it would hand strides as it has traced them,
# not as it lays tensors out: operators, whose bodies get real tensors.  See rmsnorm_kernel.py.
_forward_operator = torch.library.custom_op(
    "tutorial::swiglu_forward", _swiglu_forward, mutates_args=(),
    schema="(Tensor gate, Tensor up) -> Tensor",
)  # fmt: skip


@_forward_operator.register_fake
def _(gate, up):
    _check(gate, up)
    return gate.new_empty(gate.shape)


@torch.library.custom_op(
    "tutorial::swiglu_backward", mutates_args=(),
    schema="(Tensor dy, Tensor gate, Tensor up, bool need_y) -> Tensor[]",
)  # fmt: skip
def _backward_operator(dy, gate, up, need_y):
    results = _swiglu_backward(dy, gate, up, inplace=False, need_y=need_y)
    return [t for t in results if t is not None]


@_backward_operator.register_fake
def _(dy, gate, up, need_y):
    _check(gate, up, dy)
    return [gate.new_empty(gate.shape) for _ in range(3 if need_y else 2)]


def swiglu_forward(gate, up):
    """Return y (..., I) of gate and up (..., I), in their dtype.

    Raises TypeError or ValueError for what the kernel cannot take.
    """
    forward = _forward_operator if torch.compiler.is_compiling() else _swiglu_forward
    return forward(gate, up)


def swiglu_backward(dy, gate, up, inplace=False, need_y=False):
    """Return dgate and dup (..., I), and y (..., I) once more if it is needed.

    inplace: they lie over gate, up and dy.  Raises TypeError or ValueError for what the kernel cannot
    take, or cannot overwrite.
    """
    if not torch.compiler.is_compiling():
        return _swiglu_backward(dy, gate, up, inplace, need_y)
    results = _backward_operator(dy, gate, up, need_y)
    if inplace:  # as the compiler sees it: a copy, which it may or may not make
        sources = (gate, up, dy)[: len(results)]
        _check(gate, up, dy, overwrite=sources)
        results = [t.copy_(result) for t, result in zip(sources, results)]
    dgate, dup, *y = results
    return dgate, dup, y[0] if need_y else None


def _begin_backward():
    """May it overwrite what was saved?  Not under retain_graph=True; a compiler plans memory itself."""
    if torch.is_grad_enabled():  # create_graph=True; `once_differentiable` would let the derivative vanish silently
        raise RuntimeError("SwiGLU in Triton has no second derivative, which create_graph=True asks for.")
    if torch.compiler.is_compiling():
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


class TritonSwiGLUFunction(torch.autograd.Function):
    """`TritonSwiGLUFunction.apply(gate, up, inplace)`: the two launchers, connected to autograd."""

    @staticmethod
    def forward(ctx, gate, up, inplace):
        ctx.inplace = inplace and all(ctx.needs_input_grad[:2])
        ctx.inplace = ctx.inplace and not torch.compiler.is_compiling()
        _check(gate, up, overwrite=(gate, up) if ctx.inplace else ())  # now: in the backward it would be too late
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    def backward(ctx, dy):
        dgate, dup, _ = swiglu_backward(dy, *ctx.saved_tensors, inplace=_begin_backward() and ctx.inplace)
        return dgate, dup, None


class TritonSwiGLU(torch.nn.Module):
    """`act(gate, up)`.  inplace=True lets the backward overwrite gate and up with their gradients.

    Something else that needs them after that then raises; but not inside torch.utils.checkpoint, which does not look.
    Under torch.compile it changes nothing.
    """

    def __init__(self, inplace: bool = False):
        super().__init__()
        self.inplace = inplace

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return TritonSwiGLUFunction.apply(gate, up, self.inplace and torch.is_grad_enabled())


class SwiGLUMLPFunction(torch.autograd.Function):
    """`SwiGLUMLPFunction.apply(x, w_gate, w_up, w_down)`: the whole MLP, which saves neither silu nor y."""

    @staticmethod
    def forward(ctx, x, w_gate, w_up, w_down):
        rows = x.reshape(-1, x.shape[-1])  # (N, H)
        gate, up = rows @ w_gate.t(), rows @ w_up.t()  # (N, I)
        ctx.save_for_backward(x, gate, up, w_gate, w_up, w_down)
        out = swiglu_forward(gate, up) @ w_down.t()  # (N, H)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx, dout):
        inplace = _begin_backward()  # nobody else holds gate, up and dy
        x, gate, up, w_gate, w_up, w_down = ctx.saved_tensors
        need_x, need_w_gate, need_w_up, need_w_down = ctx.needs_input_grad
        dout, rows = dout.reshape(-1, dout.shape[-1]), x.reshape(-1, x.shape[-1])
        dy = dout @ w_down  # (N, I)
        dgate, dup, y = swiglu_backward(dy, gate, up, inplace=inplace, need_y=need_w_down)
        dw_down = dout.t() @ y if need_w_down else None
        del dy, y  # the same memory, which the matmuls below may use
        dw_gate = dgate.t() @ rows if need_w_gate else None
        dw_up = dup.t() @ rows if need_w_up else None
        # The second matmul adds to the first one's result as it stores its own: a kernel and a rounding less.
        dx = (dgate @ w_gate).addmm_(dup, w_up).view(x.shape) if need_x else None
        return dx, dw_gate, dw_up, dw_down


def _is_plain(module):
    """Is it no more than x @ weight.t(), with nobody who wants to be called before or after it?"""
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    plain = type(module) is torch.nn.Linear and module.bias is None and "forward" not in vars(module)
    return plain and not any(getattr(module, h) for h in hooks)


class TritonLlamaMLP(torch.nn.Module):
    """Drop-in replacement for LlamaMLP: same submodules, same `state_dict` keys, same numbers.

    Where a projection is more than a plain nn.Linear (LoRA, quantized, with a bias, hooked), or under autocast, all are
    called, with act_fn between them.  `act_fn.inplace = True` saves memory there, if nobody else keeps gate or up.
    """

    def __init__(self, gate_proj: torch.nn.Module, up_proj: torch.nn.Module, down_proj: torch.nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = gate_proj, up_proj, down_proj, TritonSwiGLU()

    @classmethod
    def from_llama_mlp(cls, module: torch.nn.Module) -> "TritonLlamaMLP":
        """Take over a LlamaMLP; its projections are shared, not copied, so an optimizer may already hold them."""
        given = module.config.hidden_act
        if given not in ("silu", "swish"):  # two names of one function
            raise ValueError(f"hidden_act is {given!r}, expected 'silu': leave this module as it is.")
        return cls(module.gate_proj, module.up_proj, module.down_proj).train(module.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projections = self.gate_proj, self.up_proj, self.down_proj
        hooked_or_cast = torch.nn.modules.module._has_any_global_hook() or torch.is_autocast_enabled(x.device.type)
        if all(map(_is_plain, projections)) and not hooked_or_cast:
            return SwiGLUMLPFunction.apply(x, *(p.weight for p in projections))
        return self.down_proj(self.act_fn(self.gate_proj(x), self.up_proj(x)))
