"""AdamW in Triton: the whole optimizer step of a parameter in one pass over its memory.

    torch.optim.AdamW(model.parameters(), lr, betas, eps, weight_decay).step()

The maths for one element of p, and of g, m, v, which have p's shape.  t is the number of this step.
Each line is at least one pass in eager PyTorch:

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

In bf16 the next number after 1 is 1.0078, so most steps of a fine-tuning round back to the old
weight.  A weight moves only by a step of at least 0.2 to 0.4 %, and v, which decays by 0.1 %, never
decays.  Stochastic rounding cures both: 1.001 becomes 1.0078 once in 8 times and 1 otherwise, which
is right on average.  It rounds m as well.

New ideas of Triton, after those of rmsnorm_kernel.py and cross_entropy_kernel.py:

1. In place: a program reads its elements, then writes the results over them.  No other program
   reads them.
2. Random numbers: `tl.philox(seed, c0, c1, c2, c3)` mixes a key and four counters into 128 bits.
   Nothing is remembered between calls: with element, tensor, parameter and step as counters, any
   order of programs draws the same numbers.
3. Bits: `x.to(tl.uint32, bitcast=True)` is the same 32 bits as an integer; bf16 is the upper half
   of an fp32.
4. A scalar may come through a pointer.  A CUDA graph repeats the values with which it recorded a
   launch, but reads what a pointer points to anew each time.  So the count of steps lives on the
   GPU, and lr and the betas may live there.  One kernel takes both: Triton knows when it compiles
   whether an argument is a number or a pointer.

The first part of the file rounds at random and takes powers, the second is the step.
adamw_optimizer.py has the class that stands for PyTorch's.

Limits: fp16, bf16, fp32; the gradient in the parameter's dtype; moments fp32 or bf16 (in fp16 v
would underflow); no amsgrad; no DTensors.
"""

import functools
import math
import numbers

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kernel_support import (
    FLOATS,
    FP32,
    SAME,
    check_tensors,
    on_device_of,
    operator,
    takes_negated,
    tl,
    triton,
)

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


# ==== First part: bits and rounding ===========================================================


# ---- The powers of beta
#
# 1 - beta**step.  In fp32, 1 - 0.999**1 would be wrong by up to 3e-5, because it keeps the rounding
# of a number near 1.  With x = step * log(beta), it is
#
#     1 - exp(x) = -x * (1 + x/2 * (1 + x/3 * (1 + ...)))
#
# The series loses nothing near 0.  Far from 0, 1 - exp(x) does not cancel.


@triton.jit
def _one_minus_power(log_beta, step):
    x = log_beta * step
    series = 1.0
    for k in tl.static_range(9, 1, -1):
        series = 1.0 + x * series * (1.0 / k)
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


# ---- Stochastic rounding
#
# An fp32 number lies between two bf16 neighbours.  Its upper 16 bits alone are the neighbour nearer
# to 0.  Its lower 16 bits say how far beyond that neighbour it lies, in 65,536ths of the way.  Add
# a random number below 65,536 and drop the lower bits: the sum carries into the upper bits exactly
# that often.  A representable number and infinity have nothing to carry.  NaN has, and could
# become -0.


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


# Store fp32 x in the tensor's dtype: rounded to nearest, or at random into bf16 if there is a seed.
@triton.jit
def store_rounded(
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


# ==== Second part: the step ===================================================================


# What the settings, numbers or pointers to one, and the count of steps make of all elements.
@triton.jit
def factors_of(step, lr, beta1, beta2, eps, weight_decay):
    log_beta1, rate1 = _scalar(beta1[0]), _scalar(beta1[1])
    log_beta2, rate2 = _scalar(beta2[0]), _scalar(beta2[1])
    lr, eps = _scalar(lr), _scalar(eps)
    decay = 1.0 - lr * _scalar(weight_decay)
    step_size = lr / _one_minus_power(log_beta1, step)
    sqrt_scale = 1.0 / tl.sqrt(_one_minus_power(log_beta2, step))
    return rate1, rate2, decay, step_size, sqrt_scale, eps


# A number, or the number that a pointer points to, in fp32.
@triton.jit
def _scalar(value):
    if isinstance(value, tl.tensor) and value.dtype.is_ptr():
        value = tl.load(value)
    return tl.cast(value, tl.float32)


# The new p, m, v of elements in fp32.
@triton.jit
def step_of(p, g, m, v, factors):
    rate1, rate2, decay, step_size, sqrt_scale, eps = factors
    m = m + (g - m) * rate1
    v = v * (1.0 - rate2) + g * g * rate2
    p = p * decay - step_size * m / (tl.sqrt(v) * sqrt_scale + eps)  # m and v not yet rounded
    return p, m, v


# ---- The kernel: a block of one parameter
#
# A shard's blocks are those of the whole parameter, so an element draws the same bits whoever holds
# the element.  The first block may begin before the shard, and the last one may end behind it.
#
# extent stays specialized: a masked load is of 16 bytes only if Triton knows that 16 divides both
# numbers of extent (if not, 2.4 times the time).  Triton can tell that 16 divides
# `block * 1024 - offset`, but not that 16 divides `offset % 1024`, which says the same.


@triton.jit(do_not_specialize=["seed", "index"])
def _adamw_kernel(
    p_ptr,  # (n,), as are the next three
    g_ptr,
    m_ptr,
    v_ptr,
    steps_done_ptr,  # () fp32
    lr,  # lr, beta1, beta2, eps and weight_decay: numbers, or pointers to one
    beta1,  # (log(beta1), 1 - beta1), because 1 - an fp32 0.999 is wrong by 1e-5
    beta2,  # likewise
    eps,
    weight_decay,
    extent,  # (number of elements, index of the first one in the whole parameter)
    seed,  # of the optimizer; None: round to nearest
    index,  # of the parameter in the optimizer
    MAXIMIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    step = tl.load(steps_done_ptr) + 1.0
    factors = factors_of(step, lr, beta1, beta2, eps, weight_decay)

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
    p, m, v = step_of(p, g, m, v, factors)
    store_rounded(p_ptr, lane, mask, p, seed, block, 0, index, step, BLOCK_SIZE)
    store_rounded(m_ptr, lane, mask, m, seed, block, 1, index, step, BLOCK_SIZE)
    store_rounded(v_ptr, lane, mask, v, seed, block, 2, index, step, BLOCK_SIZE)


# ---- The launcher


@takes_negated("p", "m", "v")
def adamw_step(
    p, grad, m, v, steps_done,
    lr, beta1, beta2, eps, weight_decay,
    seed=None, index=0, maximize=False, offset=0,
):  # fmt: skip
    """Make step number steps_done + 1 of p, m and v, in place.  The host never waits for the GPU.

    Args:
        p, grad, m, v: equal shapes, on one device; p and grad fp16, bf16 or fp32, m and v bf16 or
            fp32.  Any strides by which no two elements of p, m or v share memory.  A tensor that is
            not laid out like p is stepped as a dense copy, and all four where p leaves gaps.
        steps_done: () fp32 on p's device, only read.
        lr, beta1, beta2, eps, weight_decay: numbers, or tensors of one number.  The kernel reads
            the tensors on p's device, the host those on the CPU.
        seed: None rounds bf16 results to nearest.  A number, together with `index` and the step,
            picks the random bits.
        index: of the parameter in its optimizer.
        maximize: go up the gradient instead of down.
        offset: where p is a part of a larger parameter, the place of p's first element in that
            parameter, counted in elements.  The random bits depend on it.

    Raises:
        TypeError, ValueError: an argument is none of these.  Nothing was written then.
    """
    tensors = p, grad, m, v, steps_done
    if torch.compiler.is_compiling():
        scalars = split_scalars(p, (lr, beta1, beta2, eps, weight_decay))
        return _step_of_lists(*tensors, *scalars, seed, index, bool(maximize), offset)
    _check(*tensors)
    scalars = numbers_for(p.device, lr, beta1, beta2, eps, weight_decay)
    if (n := p.numel()) == 0:
        return
    # A copy has p's strides if p's elements fill one stretch of memory, in any order of dimensions.
    copied = p if p.is_contiguous() else torch.empty_like(p, device="meta")
    strides = copied.stride()
    stepped = p_dense, m_dense, v_dense = [_dense(t, strides) for t in (p, m, v)]
    grad = _dense(grad, strides)
    with on_device_of(p):
        _adamw_kernel[((offset % BLOCK_SIZE + n + BLOCK_SIZE - 1) // BLOCK_SIZE,)](
            p_dense, grad, m_dense, v_dense,
            steps_done,
            *scalars,
            (n, offset),
            seed,
            index,
            MAXIMIZE=bool(maximize),
            BLOCK_SIZE=BLOCK_SIZE,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip
    for t, result in zip((p, m, v), stepped):
        if result is not t:
            t.detach().copy_(result)


def _dense(t: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return t, or a copy where t has other strides."""
    if t.stride() == strides:
        return t
    return t.new_empty_strided(t.shape, strides).copy_(t.detach())


def numbers_for(device: torch.device, lr, beta1, beta2, eps, weight_decay) -> tuple:
    """Return what a kernel on this device takes of a step's numbers, in the same order."""
    lr, eps = number_for(device, "lr", lr), number_for(device, "eps", eps)
    beta1, beta2 = number_for(device, "beta1", beta1), number_for(device, "beta2", beta2)
    weight_decay = number_for(device, "weight_decay", weight_decay)
    return lr, _log_and_complement(beta1), _log_and_complement(beta2), eps, weight_decay


def number_for(device: torch.device, name: str, value) -> float | torch.Tensor:
    """Return a number for a kernel on this device: a float, or a tensor that is there already."""
    if type(value) is float:  # and not NumPy's, which is a subclass
        return value
    is_tensor = isinstance(value, torch.Tensor)
    if not is_real_number(value):
        given = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
        expected = "a number or a plain tensor of one"
        raise ValueError(f"{name} is {given}, expected {expected}: choose another.")
    if not is_tensor:
        return float(value)
    if value.device == device:
        return value.resolve_neg()
    if value.device.type not in ("cpu", device.type):
        expected = f"p's {device} or the CPU: move it with .to(p.device)."
        raise ValueError(f"{name} is a tensor on {value.device}, expected {expected}")
    return value.item() if value.device.type == "cpu" else value.to(device, non_blocking=True)


def is_real_number(value) -> bool:
    """Return True for a real number of Python or NumPy, and for a plain tensor of one."""
    if isinstance(value, torch.Tensor):
        plain = value.layout == torch.strided and not is_traceable_wrapper_subclass(value)
        return plain and value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real)


def _log_and_complement(beta: float | torch.Tensor) -> tuple:
    """Return log(beta) and 1 - beta; of a tensor as fp32 tensors on its device."""
    if isinstance(beta, torch.Tensor):
        beta = beta.double()
        return beta.log().float(), (1 - beta).float()
    return _log_and_complement_of_number(beta)


@functools.cache  # the same for all parameters
def _log_and_complement_of_number(beta: float) -> tuple[float, float]:
    return math.log(beta) if beta > 0 else -math.inf, 1 - beta


def _check(p, grad, m, v, steps_done, *_) -> None:
    """Refuse what the kernel cannot compute."""
    shape = ("...",)
    check_tensors(
        ("p", p, FLOATS, shape),
        ("grad", grad, SAME, shape),
        ("m", m, MOMENTS, shape),
        ("v", v, MOMENTS, shape),
        ("steps_done", steps_done, FP32, ()),
    )
    for name, t in (("p", p), ("m", m), ("v", v)):
        if not t.is_contiguous():
            check_overlap(name, t)


def check_overlap(name: str, t: torch.Tensor) -> None:
    """Refuse a tensor whose elements share memory."""
    reach = 0  # of all smaller strides, which the next one must pass
    for stride, length in sorted(zip(t.stride(), t.shape)):
        if length > 1 and stride <= reach:
            given = f"{name} of shape {tuple(t.shape)} has strides {t.stride()}"
            expected = "by which elements share memory, expected a place for each"
            raise ValueError(f"{given}, {expected}: clone() it.")
        reach += stride * (length - 1)


# ---- What torch.compile sees in place of the kernel
#
# An operator's list holds tensors or numbers, not both.  Where `tensors` has a tensor, the number
# in the same place of `floats` does not count.


@operator(
    "tutorial::adamw_step",
    "(Tensor(a!) p, Tensor grad, Tensor(b!) m, Tensor(c!) v, Tensor steps_done,"
    " Tensor?[] tensors, float[] floats, int? seed, int index, bool maximize, int offset)"
    " -> ()",
    results=_check,
    mutates=("p", "m", "v"),
)
def _step_of_lists(p, grad, m, v, steps_done, tensors, floats, *options) -> None:
    adamw_step(p, grad, m, v, steps_done, *join_scalars(tensors, floats), *options)


def split_scalars(p: torch.Tensor, scalars: tuple) -> tuple[list, list[float]]:
    """Return an operator's `tensors` and `floats` for lr, beta1, beta2, eps and weight_decay."""
    names = "lr", "beta1", "beta2", "eps", "weight_decay"
    are_tensors = [isinstance(value, torch.Tensor) for value in scalars]
    tensors = [value if is_tensor else None for value, is_tensor in zip(scalars, are_tensors)]
    floats = [
        0.0 if is_tensor else number_for(p.device, name, value)
        for name, value, is_tensor in zip(names, scalars, are_tensors)
    ]
    return tensors, floats


def join_scalars(tensors: list, floats: list[float]) -> list:
    """Return what `split_scalars` was given."""
    return [number if t is None else t for t, number in zip(tensors, floats)]
