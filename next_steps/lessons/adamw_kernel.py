"""AdamW in Triton: the whole optimizer step of a parameter in one pass over its memory.

    torch.optim.AdamW(model.parameters(), lr, betas, eps, weight_decay).step()

The maths for one element of p and of g, m, v, which have p's shape; t is the number of this step,
and each line is at least one pass in eager PyTorch:

    p     = p * (1 - lr * weight_decay)             weight decay               read 1, write 1
    m     = m + (g - m) * (1 - beta1)               a running mean of g        read 2, write 1
    v     = v * beta2 + g * g * (1 - beta2)         a running mean of g * g    read 3, write 2
    denom = sqrt(v) / sqrt(1 - beta2**t) + eps                                 read 3, write 3
    p     = p - lr / (1 - beta1**t) * m / denom                                read 3, write 1

torch.optim.AdamW does that by default, each operation on all tensors ("foreach").  Bytes per bf16
parameter:

                eager                                    fused                             ratio
    moved       20 passes: 12 reads, 8 writes    = 40    7: read p g m v, write p m v = 14   2.9
    memory      denom, for all parameters        =  2    nothing                      =  0

The prediction: 2.9 times as fast, and for 8 billion parameters 16 GB less memory at the peak.
step_in_backward=True saves another 16 GB: it updates a parameter as soon as its gradient is
complete, and frees that gradient.  Where gradients of several backwards are added up, that is in
the last one, and they are all there before it.

In bf16 the next number after 1 is 1.0078, so most steps of a fine-tuning round back to where they
came from: the weight needs a step of 0.2 to 0.4 % to move at all, and v, which decays by 0.1 %,
never decays.  Stochastic rounding cures both: 1.001 becomes 1.0078 once in 8 times and 1
otherwise, which is right on average.  It covers m as well.

New ideas of Triton, after those of rmsnorm_kernel.py and cross_entropy_kernel.py:

1. In place: a program reads its elements, then writes the results over them.  No other program
   looks at them.
2. Random numbers: `tl.philox(seed, c0, c1, c2, c3)` mixes a key and four counters into 128 bits.
   Nothing is remembered between calls: with element, tensor, parameter and step as counters, any
   order of programs draws the same numbers.
3. Bits: `x.to(tl.uint32, bitcast=True)` is the same 32 bits as an integer; bf16 is the upper half
   of an fp32.
4. A scalar may come through a pointer: a CUDA graph repeats the values with which it recorded a
   launch, but reads what a pointer points to anew each time.  So the count of steps lives on the
   GPU, and lr and the betas may.  One kernel takes either: whether an argument is a number or a
   pointer is known when the kernel is compiled.

Two lessons follow: how an fp32 number is rounded at random, and a power taken, without losing what
matters; and the optimizer: kernel, launcher, and the class that stands for PyTorch's.

Limits: fp16, bf16, fp32, the gradient in the parameter's dtype; moments fp32 or bf16 (in fp16 v
would underflow, so fp16 parameters get fp32 moments); no amsgrad; of DTensors the optimizer takes
the local shards, the launcher none.  Before a CUDA graph captures a step, one must have been made,
which creates the state.  In a graph an lr or a beta that is to change must be a tensor on the GPU,
filled in place, as PyTorch's schedulers fill lr; those that also cycle the momentum put a new
number in the first beta's place, which no graph sees.
"""

import collections
import contextlib
import copy
import functools
import math
import numbers
import os
import weakref

import torch
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
MOMENTS = (torch.bfloat16, torch.float32)
# 58.7 million bf16 weights on an H200: 195 us; with blocks of 2,048: 198; of 4,096: 203.
BLOCK_SIZE, NUM_WARPS = 1024, 4
# Philox passes the hardest tests of randomness from 7 rounds on (Salmon et al., 2011); tl.philox's
# default is 10.
ROUNDS = tl.constexpr(7)


def adamw_reference(p, g, m, v, step, lr, beta1, beta2, eps, weight_decay):
    """One eager step, the formula of torch.optim.AdamW: new p, m, v; float64 stays float64.

    p, g, m, v: tensors of one shape.  step: a number, counted from 1.
    """
    p = p * (1 - lr * weight_decay)
    m = m.lerp(g, 1 - beta1)  # m + (g - m) * (1 - beta1)
    v = (v * beta2).addcmul(g, g, value=1 - beta2)  # + g * g * (1 - beta2)
    denom = v.sqrt() / (1 - beta2**step) ** 0.5 + eps
    p = p.addcdiv(m, denom, value=-lr / (1 - beta1**step))  # p - lr / (1 - beta1**step) * m / denom
    return p, m, v


# ==== First lesson: bits and rounding =========================================================


# ---- The powers of beta
#
# 1 - beta**step.  In fp32, 1 - 0.999**1 would be wrong by up to 3e-5, because it keeps the rounding
# of a number near 1.  With x = step * log(beta), it is
#
#     1 - exp(x) = -x * (1 + x/2 * (1 + x/3 * (1 + ...)))
#
# which loses nothing near 0; far from 0, exp(x) does not cancel.


@triton.jit
def _one_minus_power(log_beta, step):
    x = log_beta * step
    series = 1.0
    for k in tl.static_range(9, 1, -1):
        series = 1.0 + x * series * (1.0 / k)
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


# ---- Stochastic rounding
#
# An fp32 number lies between two bf16 neighbours: its upper 16 bits alone are the one nearer to 0,
# and its lower 16 bits say how far beyond that one it is, in 65,536ths of the way.  Add a random
# number below 65,536 and drop the lower bits: it carries into the upper ones exactly that often.  A
# representable number has nothing to carry, infinity neither; NaN has, and could become -0.


@triton.jit
def _round_to_bf16(x, random):
    bits = x.to(tl.uint32, bitcast=True) + tl.where(x == x, random, 0)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


# 16 random bits for each element of a block.  One draw of philox is 4 x 32 bits, enough for 8.
@triton.jit
def _draw(seed, block, tensor: tl.constexpr, index, step, BLOCK_SIZE: tl.constexpr):
    eight = block * (BLOCK_SIZE // 8) + tl.arange(0, BLOCK_SIZE // 8)
    a, b, c, d = tl.philox(seed, eight, tensor, index, step.to(tl.int32), ROUNDS)
    words = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK_SIZE,))


# Store fp32 x where the tensor has its dtype: rounded to nearest; at random into bf16 if there is a
# seed.
@triton.jit
def _store(
    ptr,
    lane,
    mask,
    x,
    seed,  # None: to nearest
    block,  # these four: what is drawn
    tensor: tl.constexpr,
    index,
    step,
    BLOCK_SIZE: tl.constexpr,
):
    if seed is not None and ptr.dtype.element_ty == tl.bfloat16:
        x = _round_to_bf16(x, _draw(seed, block, tensor, index, step, BLOCK_SIZE))
    tl.store(ptr + lane, x.to(ptr.dtype.element_ty), mask=mask)


# ==== Second lesson: the optimizer ============================================================


# ---- The kernel: a block of one parameter
#
# Of a shard, the blocks are those of the whole parameter, so that an element draws the same bits
# whoever holds it; the first one may begin before the shard, as the last one may end behind it.
#
# extent stays specialized: a masked load is of 16 bytes only if Triton knows that 16 divides both
# of its numbers (if not, 2.4 times the time).  It can tell that 16 divides `block * 1024 - offset`,
# but not that it divides `offset % 1024`, which says the same.


@triton.jit(do_not_specialize=["seed", "index"])
def _adamw_kernel(
    p_ptr,  # (n,), as are the next three
    g_ptr,
    m_ptr,
    v_ptr,
    steps_done_ptr,  # () fp32
    lr,  # this and the next four: numbers, or pointers to one
    beta1,  # (log(beta1), 1 - beta1), because 1 - an fp32 0.999 is wrong by 1e-5
    beta2,  # likewise
    eps,
    weight_decay,
    extent,  # (number of elements, index of the first one in the whole parameter)
    seed,  # of the optimizer; None: round to nearest
    index,  # of the parameter in it
    MAXIMIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    step = tl.load(steps_done_ptr) + 1.0
    log_beta1, rate1 = _scalar(beta1[0]), _scalar(beta1[1])
    log_beta2, rate2 = _scalar(beta2[0]), _scalar(beta2[1])
    lr, eps = _scalar(lr), _scalar(eps)
    decay = 1.0 - lr * _scalar(weight_decay)
    step_size = lr / _one_minus_power(log_beta1, step)
    sqrt_scale = 1.0 / tl.sqrt(_one_minus_power(log_beta2, step))

    n, offset = extent[0], extent[1]
    block = tl.program_id(0) + offset // BLOCK_SIZE
    start = block.to(tl.int64) * BLOCK_SIZE - offset  # there may be more than 2**31
    block = tl.cast(block, tl.int32)
    p_ptr, g_ptr, m_ptr, v_ptr = p_ptr + start, g_ptr + start, m_ptr + start, v_ptr + start
    lane = tl.arange(0, BLOCK_SIZE)
    mask = (lane < n - start) & (lane >= -start)
    p = tl.load(p_ptr + lane, mask=mask).to(tl.float32)
    g = tl.load(g_ptr + lane, mask=mask).to(tl.float32)
    m = tl.load(m_ptr + lane, mask=mask).to(tl.float32)
    v = tl.load(v_ptr + lane, mask=mask).to(tl.float32)
    if MAXIMIZE:
        g = -g

    m = m + (g - m) * rate1
    v = v * (1.0 - rate2) + g * g * rate2
    p = p * decay - step_size * m / (tl.sqrt(v) * sqrt_scale + eps)  # m and v not yet rounded

    _store(p_ptr, lane, mask, p, seed, block, 0, index, step, BLOCK_SIZE)
    _store(m_ptr, lane, mask, m, seed, block, 1, index, step, BLOCK_SIZE)
    _store(v_ptr, lane, mask, v, seed, block, 2, index, step, BLOCK_SIZE)


# A number or what a pointer points to, in fp32.
@triton.jit
def _scalar(value):
    if isinstance(value, tl.tensor) and value.dtype.is_ptr():
        value = tl.load(value)
    return tl.cast(value, tl.float32)


# ---- The launcher


def adamw_step(
    p: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    steps_done: torch.Tensor,
    lr: float | torch.Tensor,
    beta1: float | torch.Tensor,
    beta2: float | torch.Tensor,
    eps: float | torch.Tensor,
    weight_decay: float | torch.Tensor,
    seed: int | None = None,
    index: int = 0,
    maximize: bool = False,
    offset: int = 0,
) -> None:
    """Make step number steps_done + 1 of p, m and v, in place; the host never waits for the GPU.

    p, grad, m, v: equal shapes, on one device; p and grad fp16, bf16 or fp32, m and v bf16 or fp32.
        Any strides by which no two elements of p, m or v share memory; but what is not laid out
        like p, and all four where p leaves gaps, is stepped as a dense copy.
    steps_done: () fp32 on p's device, only read.
    lr, beta1, beta2, eps, weight_decay: numbers, or tensors of one number.  The kernel reads those
        on p's device, the host those on the CPU.
    seed: None rounds bf16 results to nearest; a number, together with `index` and the step, picks
        the random bits.
    maximize: go up the gradient instead of down.
    offset: where these are a part of a larger parameter, the place of their first element in it,
        counted in elements, which the random bits depend on too.

    Raises TypeError or ValueError, before anything is written, for anything else.
    """
    scalars = lr, beta1, beta2, eps, weight_decay
    launch = _launch_compiled if torch.compiler.is_compiling() else _launch
    launch(p, grad, m, v, steps_done, scalars, seed, index, maximize, offset)


def _launch(p, grad, m, v, steps_done, scalars: tuple, seed, index, maximize, offset: int) -> None:
    _check(p, grad, m, v, steps_done)
    device = p.device
    lr, beta1, beta2, eps, weight_decay = scalars
    lr, eps = _number_for(device, "lr", lr), _number_for(device, "eps", eps)
    beta1, beta2 = _number_for(device, "beta1", beta1), _number_for(device, "beta2", beta2)
    weight_decay = _number_for(device, "weight_decay", weight_decay)
    if (n := p.numel()) == 0:
        return
    # A copy has p's strides if p's elements fill one stretch of memory, in any order of dimensions.
    copied = p if p.is_contiguous() else torch.empty_like(p, device="meta")
    strides = copied.stride()
    stepped = [_dense(t, strides) for t in (p, m, v)]
    # A gradient through complex numbers may hold its values negated, and a bit that says so.
    grad = _dense(grad.resolve_neg() if grad.is_neg() else grad, strides)
    with _on_device_of(p):
        _adamw_kernel[((offset % BLOCK_SIZE + n + BLOCK_SIZE - 1) // BLOCK_SIZE,)](
            stepped[0],
            grad,
            stepped[1],
            stepped[2],
            steps_done,
            lr,
            _log_and_complement(beta1),
            _log_and_complement(beta2),
            eps,
            weight_decay,
            (n, offset),
            seed,
            index,
            MAXIMIZE=bool(maximize),
            BLOCK_SIZE=BLOCK_SIZE,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    for t, result in zip((p, m, v), stepped):
        if result is not t:
            t.detach().copy_(result)


def _dense(t: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """t, or a copy where it has other strides."""
    if t.stride() == strides:
        return t
    return t.new_empty_strided(t.shape, strides).copy_(t.detach())


def _number_for(device: torch.device, name: str, value) -> float | torch.Tensor:
    """A number for a kernel on this device: a float, or a tensor there, unread by the host."""
    if type(value) is float:  # and not NumPy's, which is a subclass
        return value
    is_tensor = isinstance(value, torch.Tensor)
    if not _is_number(value):
        given = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
        expected = "a number or a plain tensor of one"
        raise ValueError(f"{name} is {given}, expected {expected}: choose another.")
    if not is_tensor:
        return float(value)
    if value.device == device:
        return value
    if value.device.type not in ("cpu", device.type):
        given = f"{name} is a tensor on {value.device}"
        advice = "move it with .to(p.device)"
        raise ValueError(f"{given}, expected p's {device} or the CPU: {advice}.")
    return value.item() if value.device.type == "cpu" else value.to(device, non_blocking=True)


def _log_and_complement(beta: float | torch.Tensor) -> tuple:
    """log(beta) and 1 - beta, of a tensor as fp32 tensors beside it."""
    if isinstance(beta, torch.Tensor):
        beta = beta.double()
        return beta.log().float(), (1 - beta).float()
    return _log_and_complement_of_number(beta)


@functools.cache  # the same for all parameters
def _log_and_complement_of_number(beta: float) -> tuple[float, float]:
    return math.log(beta) if beta > 0 else -math.inf, 1 - beta


def _on_device_of(t: torch.Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current GPU, which need not be the one that holds the tensors."""
    elsewhere = t.is_cuda and t.get_device() != torch.cuda.current_device()
    return torch.cuda.device(t.device) if elsewhere else contextlib.nullcontext()


# ---- Checks: what the kernel cannot compute is refused before it is handed any pointer


def _is_plain(t: torch.Tensor) -> bool:
    return type(t) is torch.Tensor or type(t) is torch.nn.Parameter


def _check_memory(name: str, t: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse a tensor without memory of its own that holds its elements, or of another dtype."""
    if not _is_plain(t) and is_traceable_wrapper_subclass(t):
        given = f"{name} is a {type(t).__name__}, which holds no memory of its own"
        advice = "pass the one inside, such as a DTensor's .to_local()"
        raise TypeError(f"{given}, expected a plain tensor: {advice}.")
    if t.layout != torch.strided or t.dtype not in dtypes:
        expected = f"{' or '.join(map(str, dtypes))}, {torch.strided}"
        raise TypeError(f"{name} is {t.dtype}, {t.layout}, expected {expected}: convert it first.")


def _check_overlap(name: str, t: torch.Tensor) -> None:
    """Refuse elements that share memory: a stride must pass all that smaller ones reach."""
    reach = 0
    for stride, length in sorted(zip(t.stride(), t.shape)):
        if length > 1 and stride <= reach:
            given = f"{name} of shape {tuple(t.shape)} has strides {t.stride()}"
            expected = "by which elements share memory, expected a place for each"
            raise ValueError(f"{given}, {expected}: clone() it.")
        reach += stride * (length - 1)


def _check(p, grad, m, v, steps_done) -> None:
    """Refuse what the kernel cannot compute, before any pointer is handed to it."""
    shape, device = p.shape, p.device
    for name, t, dtypes, expected in (
        ("p", p, FLOATS, shape),
        ("grad", grad, (p.dtype,), shape),
        ("m", m, MOMENTS, shape),
        ("v", v, MOMENTS, shape),
        ("steps_done", steps_done, MOMENTS[1:], ()),
    ):
        _check_memory(name, t, dtypes)
        if t.shape != expected or t.device != device:
            given = f"{name} has shape {tuple(t.shape)} on {t.device}"
            wanted = f"expected {tuple(expected)} on p's {device}"
            raise ValueError(f"{given}, {wanted}: reshape or move it.")
        if t is not grad and not t.is_contiguous():
            _check_overlap(name, t)
    if not p.is_cuda and not INTERPRETED:
        advice = "move it, or export TRITON_INTERPRET=1"
        raise ValueError(f"p is on {device}, expected a GPU: {advice}.")


def _is_number(value) -> bool:
    """Python's and NumPy's real numbers, and tensors that hold one."""
    if isinstance(value, torch.Tensor):
        plain = value.layout == torch.strided and not is_traceable_wrapper_subclass(value)
        return plain and value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real)


# ---- What torch.compile sees in place of the kernel
#
# It takes no kernel whose arguments are tuples, and would hand over strides as it has traced them.
# The body of an operator gets real tensors.  See rmsnorm_kernel.py.  An operator's list holds
# tensors or numbers, not both: where there is a tensor, the number in its place does not count.


@torch.library.custom_op(
    "tutorial::adamw_step",
    mutates_args=("p", "m", "v"),
    schema="(Tensor(a!) p, Tensor grad, Tensor(b!) m, Tensor(c!) v, Tensor steps_done,"
    " Tensor?[] tensors, float[] floats, int? seed, int index, bool maximize, int offset)"
    " -> ()",
)
def _operator(p, grad, m, v, steps_done, tensors, floats, seed, index, maximize, offset):
    scalars = tuple(number if t is None else t for t, number in zip(tensors, floats))
    _launch(p, grad, m, v, steps_done, scalars, seed, index, maximize, offset)


@_operator.register_fake
def _(p, grad, m, v, steps_done, tensors, floats, seed, index, maximize, offset):
    _check(p, grad, m, v, steps_done)


def _launch_compiled(p, grad, m, v, steps_done, scalars, seed, index, maximize, offset) -> None:
    tensors, floats = [], []
    for name, value in zip(("lr", "beta1", "beta2", "eps", "weight_decay"), scalars):
        is_tensor = isinstance(value, torch.Tensor)
        tensors.append(value if is_tensor else None)
        floats.append(0.0 if is_tensor else _number_for(p.device, name, value))
    _operator(p, grad, m, v, steps_done, tensors, floats, seed, index, bool(maximize), offset)


# ---- A gradient that is no more
#
# clip_grad_norm_ passes over parameters without a gradient.  After a backward that has used them
# all, it would clip nothing and return 0.  So in each parameter's .grad lies what refuses that.


SECOND_GRADIENT = (
    "a second gradient reached a parameter before step(), and step_in_backward=True has used the"
    " first: call step() after each backward, or accumulate in accumulating(), or use"
    " TritonAdamW without it."
)
CLIPPED = (
    "a gradient is to be clipped, changed or read, and step_in_backward=True has used it: use"
    " TritonAdamW without it, or clip nothing (transformers.Trainer: max_grad_norm=0)."
)


class UsedGradient(torch.Tensor):
    """Stands for a gradient that the backward has used, and for a norm of such; holds no memory.

    A norm may be asked for, by clipping to infinity, as transformers.Trainer does for its log: it
    is unknown, NaN.  All else is refused.
    """

    @staticmethod
    @functools.cache  # parameters of one shape share it: to make one takes longer than to step
    def __new__(cls, dtype: torch.dtype, device: torch.device, shape: torch.Size):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __rtruediv__(self, max_norm):
        """Return clip_grad_norm_'s factor, 1 for an infinite max_norm."""
        return self if max_norm == math.inf else super().__rtruediv__(max_norm)

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if name in ("add", "add_") and isinstance(args[1], torch.Tensor):  # autograd does
            raise RuntimeError(SECOND_GRADIENT)
        if name in ("linalg_vector_norm", "stack", "add", "clamp", "_to_copy"):  # of the norm
            like = args[0][0] if name == "stack" else args[0]
            return cls(like.dtype, like.device, torch.Size())
        if name == "_local_scalar_dense":  # .item()
            return math.nan
        if name in ("mul_", "_foreach_mul_") and isinstance(args[1], cls):  # by the factor 1
            return args[0] if name == "mul_" else None
        raise RuntimeError(CLIPPED)


# ---- The optimizer


# Settings of how to compute, not what: they are an optimizer's own, whatever state it loads.
MODES = ("foreach", "capturable", "differentiable", "fused", "moments_dtype")


class TritonAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW in one kernel per parameter, with its `state_dict` keys.

    A step never waits for the GPU.

    lr, betas, eps, weight_decay: numbers, or tensors of one number.  What lies on the CPU, a step
        reads when it is called; what lies on the parameters' GPU, it reads there, and a captured
        CUDA graph anew each time.
    maximize: go up the gradient instead of down.
    capturable: True and False are the same, since every step can be captured.
    amsgrad, foreach, differentiable, fused: taken for PyTorch's sake, refused where True.
    moments_dtype: float32 or bfloat16; None: the parameter's, but float32 for float16.
    stochastic_rounding: whether bfloat16 weights and moments are rounded up or down at random.
    step_in_backward: update each parameter during the backward and free its gradient at once;
        step() then only counts.  To accumulate gradients, put every backward but the last into
        `with optimizer.accumulating():` (without it, a second backward before step() raises).  A
        gradient that is left after it, step() uses: of a parameter that the last backward did not
        reach, and of every one that is whole on each of several processes, because DDP averages
        gradients only after autograd has made them.  Not for gradients that are to be clipped or
        unscaled: between the backward and step() a stepped parameter's .grad is a UsedGradient,
        which refuses that.  A copy of the optimizer (copy.deepcopy, pickle) steps in step() alone.
    seed: of the random bits.  They also depend on the step, on the parameter's place among all
        parameters and on the element's in it, but not on how many processes share it.

    A parameter may be a DTensor, as fully_shard (FSDP2) makes them: each process steps its local
    shard, and the moments are DTensors of the same placements.  FSDP2 runs the hooks of
    step_in_backward itself, once a gradient is reduced.

    Raises TypeError or ValueError, and changes nothing, for an option out of range and for a
    parameter that requires a gradient but has no fp16, bf16 or fp32 memory of its own (or shard in
    it), with a place for each element (a wrapper, sparse, expanded).
    """

    _accumulating = False

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        *,
        maximize=False,
        foreach=None,
        capturable=False,
        differentiable=False,
        fused=None,
        moments_dtype=None,
        stochastic_rounding=False,
        step_in_backward=False,
        seed=0,
    ):
        self._step_in_backward, self._hooks, self._stepped = False, [], {}
        weakref.finalize(self, lambda hooks: [hook.remove() for hook in hooks], self._hooks)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "moments_dtype": moments_dtype,
            "seed": seed,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, defaults)
        if step_in_backward:  # no parameter gets a hook before all groups are accepted
            for group in self.param_groups:
                self._refuse_gradients(group)
            self._step_in_backward = True
            for number in range(len(self.param_groups)):
                self._register_hooks(number)

    def add_param_group(self, param_group: dict) -> None:
        """Like torch's; a group that is refused is not added."""
        super().add_param_group(param_group)
        group = self.param_groups.pop()  # back in its place as soon as nothing can refuse it
        _check_group(group)
        if self._step_in_backward:
            self._refuse_gradients(group)
        self.param_groups.append(group)
        if self._step_in_backward:
            self._register_hooks(len(self.param_groups) - 1)

    def _refuse_gradients(self, group: dict) -> None:
        if any(p.grad is not None for p in group["params"]):
            given = "a parameter has a gradient, and step_in_backward=True would add to it"
            raise ValueError(f"{given}: free it.")

    def _register_hooks(self, group_number: int) -> None:
        before = sum(len(group["params"]) for group in self.param_groups[:group_number])
        for index, p in enumerate(self.param_groups[group_number]["params"], start=before):
            if p.requires_grad:
                # A proxy: Python's collector does not see what a hook holds, so self would live on,
                # and all of p.
                step = functools.partial(type(self)._step_parameter_now, weakref.proxy(self))
                hook = functools.partial(step, group_number, index)
                self._hooks.append(p.register_post_accumulate_grad_hook(hook))

    def _step_parameter(self, group: dict, index: int, p: torch.Tensor, grad: torch.Tensor) -> None:
        state = self.state[p]
        if not state:
            state.update(_new_state(p, group["moments_dtype"]))
        rounding = group["stochastic_rounding"]
        adamw_step(
            _local(p),
            _local(_placed_like(p, grad)),
            _local(state["exp_avg"]),
            _local(state["exp_avg_sq"]),
            state["step"],
            group["lr"],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["seed"] if rounding else None,
            index,
            group["maximize"],
            offset_of(p) if rounding else 0,
        )
        torch.autograd.graph.increment_version(p)  # autograd cannot see what a kernel writes
        self._stepped[p] = state["step"]

    def _step_parameter_now(self, group_number: int, index: int, p: torch.Tensor) -> None:
        if (self._accumulating and p not in self._stepped) or _averaged_later(p):
            return  # the next backward adds to it, or DDP has yet to average it
        grad, p.grad = p.grad, UsedGradient(p.dtype, p.device, p.shape)
        group = self.param_groups[group_number]  # now: load_state_dict makes new groups
        self._step_parameter(group, index, p, grad)

    @contextlib.contextmanager
    def accumulating(self):
        """Backwards in here only add up gradients; the one after them steps with the sums.

        Does nothing without step_in_backward, where every backward is like that.
        """
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _forget_used(self) -> None:
        for p in self._stepped:
            if isinstance(p.grad, UsedGradient):
                p.grad = None

    @torch.no_grad()
    def step(self, closure=None):
        """Like torch's: returns what the closure does, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._forget_used()
        params = [(group, p) for group in self.param_groups for p in group["params"]]
        left = [(i, group, p) for i, (group, p) in enumerate(params) if p.grad is not None]
        if any(p in self._stepped for _, _, p in left):
            given = "a gradient is there of a parameter that the backward has stepped"
            raise RuntimeError(f"{given}: leave .grad alone.")
        if self._step_in_backward and not self._stepped and not left:
            given = "no backward has stepped a parameter since the last step()"
            raise RuntimeError(f"{given}: call loss.backward() first.")
        for index, group, p in left:
            self._step_parameter(group, index, p, p.grad)
        if self._stepped:
            # On the GPU, so that a graph's replays count too.
            torch._foreach_add_(list(self._stepped.values()), 1)
            self._stepped.clear()
        return loss

    def close(self) -> None:
        """End step_in_backward: gradients stay from now on, and step() uses them."""
        for hook in self._hooks:
            hook.remove()
        self._step_in_backward, self._hooks = False, []

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for_a_new_copy = {"_step_in_backward": False, "_hooks": [], "_stepped": {}}
        self.__dict__ = {**for_a_new_copy, **self.__dict__}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Like torch's, but this optimizer's MODES stay, and so do its tensors, which a CUDA graph
        may know: they are filled.

        A state that does not fit raises TypeError or ValueError, and then nothing has changed.
        """
        state_dict = self._before_loading(state_dict)
        saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group["params"]) for group in saved_groups]
        if saved_sizes != sizes:
            given = f"the state is of groups of {saved_sizes} parameters"
            raise ValueError(f"{given}, expected {sizes}: load the state of an equal model.")
        groups, loaded, filled = [], {}, {}
        for own, saved in zip(self.param_groups, saved_groups):
            groups.append(self._loaded_group(own, saved, filled))
            for p, number in zip(own["params"], saved["params"]):
                if saved_state.get(number):
                    loaded[p] = _loaded_state(number, p, saved_state[number])
        moments_dtype = {p: group["moments_dtype"] for group in groups for p in group["params"]}
        state = {p: self.state.get(p) or _new_state(p, moments_dtype[p]) for p in loaded}

        for p in loaded:  # from here on, nothing is refused
            for key, tensor in loaded[p].items():
                _local(state[p][key]).copy_(_local(tensor))
        for tensor, number in filled.items():
            tensor.fill_(number)
        self._forget_used()
        self._stepped.clear()
        self.__setstate__({"state": collections.defaultdict(dict, state), "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _before_loading(self, state_dict: dict) -> dict:
        """What the hooks that come before make of it."""
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = pre_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        return state_dict

    def _loaded_group(self, own: dict, saved: dict, filled: dict[torch.Tensor, float]) -> dict:
        """The saved settings for a group, with its own parameters, MODES and tensors.

        filled: gains what these tensors are to be filled with.  Raises as _check_group does.
        """
        settings = {key: value for key, value in saved.items() if key != "params"}
        group = {**self.defaults, **copy.deepcopy(settings)}
        group.update({key: own[key] for key in ("params", *MODES)})
        if "param_names" in own:
            group.setdefault("param_names", own["param_names"])
        _check_group(group)
        for name in ("lr", "eps", "weight_decay"):
            group[name] = _kept(own[name], group[name], filled)
        pairs = zip(own["betas"], group["betas"])
        group["betas"] = tuple(_kept(*pair, filled) for pair in pairs)
        return group


# ---- Parameters that several processes share


def _is_dtensor(t: torch.Tensor) -> bool:
    if _is_plain(t) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # takes a second, but whoever has one has had it

    return isinstance(t, DTensor)


def _local(t: torch.Tensor) -> torch.Tensor:
    """What this process holds of it."""
    with torch.no_grad():
        return t.to_local() if _is_dtensor(t) else t


def _placed_like(p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient as p is placed; of tensor parallelism it may still be a sum to be made."""
    if not _is_dtensor(p) or grad.placements == p.placements:
        return grad
    return grad.redistribute(p.device_mesh, p.placements)


def offset_of(p: torch.Tensor) -> int:
    """The place of this process's first element in the whole parameter."""
    if not _is_dtensor(p) or not _local(p).numel():
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, first = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return first[0] * math.prod(p.shape[1:]) if first else 0


def _averaged_later(p: torch.Tensor) -> bool:
    """Whether the gradient that is there may be of this process's part of a batch alone.

    So it is under DDP, of which a parameter knows nothing; a DTensor's is of all in its mesh.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    processes = p.device_mesh.size() if _is_dtensor(p) else 1
    return torch.distributed.get_world_size() > processes


# ---- An optimizer's groups and states


def _new_state(p: torch.Tensor, moments_dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    if p.is_cuda and torch.cuda.is_current_stream_capturing():
        given = "a parameter without state is captured, and each replay would reset it"
        raise RuntimeError(f"{given}: make a step before.")
    dtype = moments_dtype or (torch.float32 if p.dtype == torch.float16 else p.dtype)
    return {
        "step": torch.zeros((), dtype=torch.float32, device=p.device),
        "exp_avg": torch.zeros_like(p, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(p, dtype=dtype),
    }


def _check_group(group: dict) -> None:
    """Refuse a group that no step can take; make its numbers Python's, but leave its tensors."""
    for p in group["params"]:
        if p.requires_grad:  # what is frozen may be anything
            _check_memory("a parameter", _local(p), FLOATS)
            _check_overlap("a parameter", _local(p))
            if _is_dtensor(p):
                _check_placements(p, group["stochastic_rounding"])

    def within(value, below: float = math.inf) -> bool:
        return _is_number(value) and 0.0 <= value < below

    def plain(value) -> float | torch.Tensor:
        return value if isinstance(value, torch.Tensor) else float(value)

    for name in ("amsgrad", "foreach", "fused", "differentiable"):
        if group[name]:
            given = f"{name} is {group[name]}, which TritonAdamW does not support"
            raise ValueError(f"{given}, expected False: leave it out.")
    betas, seed, rounding = group["betas"], group["seed"], group["stochastic_rounding"]
    two = isinstance(betas, (tuple, list)) and len(betas) == 2
    whole = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    float16 = any(p.dtype == torch.float16 for p in group["params"])
    two_rates = two and all(within(beta, 1.0) for beta in betas)
    moments = group["moments_dtype"] in (None, *MOMENTS)
    for name, valid, expected in (
        ("lr", within(group["lr"]), "a number of at least 0"),
        ("betas", two_rates, "two numbers from 0 to below 1"),
        ("eps", within(group["eps"]), "a number of at least 0"),
        ("weight_decay", within(group["weight_decay"]), "a number of at least 0"),
        ("moments_dtype", moments, "float32, bfloat16 or None"),
        ("stochastic_rounding", not (rounding and float16), "False for float16 parameters"),
        ("seed", whole and 0 <= seed < 2**63, "a whole number from 0 to below 2**63"),
    ):
        if not valid:
            raise ValueError(f"{name} is {group[name]}, expected {expected}: choose another.")
    group.update({name: plain(group[name]) for name in ("lr", "eps", "weight_decay")})
    group.update(betas=tuple(map(plain, betas)), seed=int(seed))


def _check_placements(p: torch.Tensor, rounding: bool) -> None:
    """Refuse a sum yet to be made and, if bits are to be drawn, a shard that is not whole rows."""
    from torch.distributed.tensor import Replicate, Shard

    given = f"a parameter has the placements {p.placements}"
    if any(placement.is_partial() for placement in p.placements):
        raise ValueError(f"{given}, expected no Partial: redistribute() it.")
    kinds = [(type(place), getattr(place, "dim", None)) for place in p.placements]
    rows = set(kinds) <= {(Replicate, None), (Shard, 0)}
    if rounding and not (rows and _local(p).is_contiguous()):
        expected = "expected contiguous Shard(0) for stochastic_rounding"
        raise ValueError(f"{given} and strides {p.stride()}, {expected}: leave that out.")


def _loaded_state(number: int, p: torch.Tensor, saved: dict) -> dict[str, torch.Tensor]:
    """What a state_dict holds for a parameter, refused unless it fits."""
    loaded = {}
    for key, like in (("step", torch.zeros(())), ("exp_avg", p), ("exp_avg_sq", p)):
        name = f"{key} of parameter {number}"
        if key not in saved:
            raise ValueError(f"{name} is missing in the state, expected an AdamW's: load another.")
        tensor = torch.as_tensor(saved[key], dtype=torch.float32 if key == "step" else None)
        if _is_dtensor(like) or _is_dtensor(tensor):
            given, expected = (getattr(t, "placements", None) for t in (tensor, like))
            if given != expected:
                advice = "load it with torch.distributed.checkpoint.state_dict"
                raise TypeError(f"{name} has placements {given}, expected {expected}: {advice}.")
        _check_memory(name, _local(tensor), (*FLOATS, torch.float64))
        if (tensor.shape, _local(tensor).shape) != (like.shape, _local(like).shape):
            given = f"{name} has shape {tuple(tensor.shape)}"
            expected = tuple(like.shape)
            raise ValueError(f"{given}, expected {expected}: load the state of an equal model.")
        loaded[key] = tensor
    return loaded


def _kept(own, saved, filled: dict[torch.Tensor, float]) -> float | torch.Tensor:
    """An optimizer's own tensor, which is to be filled; the saved number if it has none."""
    number = float(saved)
    if not isinstance(own, torch.Tensor):
        return number
    if filled.setdefault(own, number) != number:
        given = f"one tensor is to be filled with {filled[own]} and with {number}"
        advice = "give each group a tensor of its own"
        raise ValueError(f"{given}, expected one number: {advice}.")
    return own
