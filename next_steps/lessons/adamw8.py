"""AdamW whose moments are bytes: 10 bytes move per parameter, not 14.

    bitsandbytes.optim.AdamW8bit(model.parameters(), lr, betas, eps, weight_decay).step()

The maths is adamw_kernel.py's, in fp32.  Between two steps each element of m and of v is one byte,
a code.  256 elements that lie side by side, a block, share two fp32 scales (Dettmers et al., 2022).
So one large element costs precision in its block, and not in the whole tensor.

    m       = scale_m * (code / 127)**4 * sign(code)       code from -127 to 127, int8
    sqrt(v) = scale_v * ((code + 1) / 256)**4              code from 0 to 255, uint8

scale_m is the block's largest |m|, scale_v its largest sqrt(v).  Bytes per bf16 parameter:

                bf16 moments                             8-bit moments                     ratio
    moved       read p g m v, write p m v        = 14    the same, m and v of 1 byte = 10   1.4
    memory      m v                              =  4    codes                       =  2   2.0

A block's scales add 16 bytes to the first row and 8 to the second, for 256 elements: less than 2 %.
The prediction: 1.4 times as fast, and for 8 billion parameters 16 GB less memory.

Why fourth powers?  Evenly spaced codes end at 1/127 of a block's largest element, and the elements
of a block differ by more.  An m that is rounded to 0 in every step is no running mean.  Powers put
codes closer together near 0: the nearest code is at most 1.6 % off at the top (v's: 0.8 %), 5 % at
a hundredth of it (2.5 %), 16 % at a ten-thousandth (8 %).  bitsandbytes and torchao find codes in a
table, by a search for each element.  A fourth power is two multiplications, and its inverse two
square roots.

Why sqrt(v)?  A step divides by it, and it spans half as many powers of two as v.

Why has v no code for 0?  If v became 0 while m did not, eps alone would divide m: 1e8 times m
(the zero point problem: Li et al., 2023).  The smallest code stands for more than 0, so a v that is
too small for its block is rounded up.  That step is too short.  m may become 0, which is no step.

New ideas of Triton, after those of adamw_kernel.py:

1. A program is one block and one warp.  A thread holds 8 neighbours and a warp 256 elements, so the
   threads of one warp find the largest with `tl.max` and wait for no other warp.
2. A masked load returns what was never written, unless `other=` says what else.  These values are
   not stored, but the maximum sees them.

Limits: those of adamw_kernel.py.  A parameter that is not contiguous is stepped as a copy.  Codes
are rounded to the nearest one, bf16 weights also at random.  What several processes share is
refused, because shards would end inside of blocks.
"""

from typing import NamedTuple

import torch

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
from next_steps.lessons.adamw_kernel import (
    adamw_reference,
    check_overlap,
    factors_of,
    join_scalars,
    numbers_for,
    split_scalars,
    step_of,
    store_rounded,
)

BLOCK = 256  # elements that share scales; a warp's, 8 in each thread
NUM_WARPS = 1  # one block a program: the best of 12 settings on an H100
SMALLEST = tl.constexpr(2.0**-126)  # the smallest fp32 number that no GPU takes for 0


class Moments(NamedTuple):
    """m and v as codes, in the shape of the parameter, and the scales of their blocks."""

    m: torch.Tensor  # (...,) int8
    v: torch.Tensor  # (...,) uint8
    scales: torch.Tensor  # (2, n_blocks) fp32: the largest |m| of each block, the largest sqrt(v)


def new_moments(p: torch.Tensor) -> Moments:
    """Return the moments of a parameter that has made no step: all are 0."""
    m, v = (torch.zeros(p.shape, dtype=t, device=p.device) for t in (torch.int8, torch.uint8))
    scales = torch.zeros(2, triton.cdiv(p.numel(), BLOCK), device=p.device, dtype=torch.float32)
    return Moments(m, v, scales)


def adamw8_reference(p, g, moments, step, lr, beta1, beta2, eps, weight_decay):
    """One eager step: new p and Moments.  p: fp32 or fp64, which everything is computed in."""
    m, v = dequantize_moments(moments, p.dtype)
    p, m, v = adamw_reference(p, g, m, v, step, lr, beta1, beta2, eps, weight_decay)
    return p, quantize_moments(m, v)


def quantize_moments(m: torch.Tensor, v: torch.Tensor) -> Moments:
    """Return codes and scales of fp32 or fp64 moments; where v is infinite or NaN both become 0."""
    fits = v < float("inf")  # not for NaN
    m, root = (_in_blocks(torch.where(fits, t, 0.0)) for t in (m, v.sqrt()))
    scales = torch.stack([m.abs().amax(1), root.amax(1)])  # (2, n_blocks)
    m_codes = _nearest_code(m.abs(), scales[0], 127).copysign(m)
    v_codes = (_nearest_code(root, scales[1], 256) - 1).clamp_min(0)
    m, v = (codes.view(-1)[: v.numel()].view(v.shape) for codes in (m_codes, v_codes))
    return Moments(m.to(torch.int8), v.to(torch.uint8), scales.float())


def dequantize_moments(moments: Moments, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return m and v (...,) in this dtype."""
    m, v_codes = moments.m.to(dtype), moments.v.to(dtype) + 1
    m_scale, root_scale = (
        scale.repeat_interleave(BLOCK)[: m.numel()].view(m.shape) for scale in moments.scales
    )
    root = v_codes.square().square() * (root_scale * (1 / 256**4))
    return m.square().square().copysign(m) * (m_scale * (1 / 127**4)), root.square()


def _in_blocks(t: torch.Tensor) -> torch.Tensor:
    """Return t's elements as (n_blocks, BLOCK), with 0 behind the last one."""
    return torch.nn.functional.pad(t.reshape(-1), (0, -t.numel() % BLOCK)).view(-1, BLOCK)


def _nearest_code(x: torch.Tensor, scale: torch.Tensor, levels: int) -> torch.Tensor:
    return ((x / scale.clamp_min(SMALLEST.value).unsqueeze(1)).sqrt().sqrt() * levels + 0.5).floor()


# ---- The kernel: one block of one parameter
#
# One warp: 8 elements for each thread, which loads 16 bytes of p and of g, in bf16, and 8
# bytes of codes at once.


# The codes of numbers that are not negative, as fp32; scale is SMALLEST or more.
@triton.jit
def _code_of(x, scale, levels: tl.constexpr):
    return tl.floor(tl.sqrt(tl.sqrt(x / scale)) * levels + 0.5)


# Their fourth powers.
@triton.jit
def _fourth_power(code):
    square = code * code
    return square * square


@triton.jit(do_not_specialize=["seed", "index"])
def _adamw8_kernel(
    p_ptr,  # (n,), as are the next one and the codes
    g_ptr,
    moments,  # pointers: codes of m, codes of v, scales (2, n_blocks)
    steps_done_ptr,  # () fp32
    lr,  # this and the next four: as in _adamw_kernel
    beta1,
    beta2,
    eps,
    weight_decay,
    n,
    seed,  # of the optimizer; None: round the weights to nearest
    index,  # of the parameter in the optimizer
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.load(steps_done_ptr) + 1.0
    factors = factors_of(step, lr, beta1, beta2, eps, weight_decay)

    start = tl.program_id(0).to(tl.int64) * BLOCK  # there may be more than 2**31
    lane = tl.arange(0, BLOCK)
    mask = lane < n - start
    p_ptr, g_ptr = p_ptr + start, g_ptr + start
    m_ptr, v_ptr = moments[0] + start, moments[1] + start
    m_scale_ptr = moments[2] + tl.program_id(0)
    root_scale_ptr = m_scale_ptr + tl.num_programs(0)
    m_scale = tl.load(m_scale_ptr) * (1 / 127**4)
    root_scale = tl.load(root_scale_ptr) * (1 / 256**4)
    p = tl.load(p_ptr + lane, mask=mask).to(tl.float32)
    g = tl.load(g_ptr + lane, mask=mask, other=0.0).to(tl.float32)
    m_code = tl.load(m_ptr + lane, mask=mask, other=0).to(tl.float32)
    v_code = tl.load(v_ptr + lane, mask=mask, other=0).to(tl.float32) + 1.0
    if MAXIMIZE:
        g = -g

    m = _fourth_power(m_code) * m_scale
    m = tl.where(m_code < 0, -m, m)
    root = _fourth_power(v_code) * root_scale
    p, m, v = step_of(p, g, m, root * root, factors)
    store_rounded(p_ptr, lane, mask, p, seed, tl.program_id(0), 0, index, step, BLOCK)

    # An infinity or NaN makes its weight NaN, and would make NaN of its block.  It is forgotten.
    fits = v < float("inf")
    size, root = tl.where(fits, tl.abs(m), 0.0), tl.where(fits, tl.sqrt(v), 0.0)
    m_scale, root_scale = tl.max(size, 0), tl.max(root, 0)
    tl.store(m_scale_ptr, m_scale)
    tl.store(root_scale_ptr, root_scale)
    m_code = _code_of(size, tl.maximum(m_scale, SMALLEST), 127)
    v_code = _code_of(root, tl.maximum(root_scale, SMALLEST), 256) - 1.0
    m_code = tl.where(m < 0, -m_code, m_code)
    tl.store(m_ptr + lane, m_code.to(tl.int8), mask=mask)
    tl.store(v_ptr + lane, tl.maximum(v_code, 0.0).to(tl.uint8), mask=mask)


# ---- The launcher


@takes_negated("p", "m", "v", "scales")
def adamw8_step(
    p, grad, m, v, scales, steps_done,
    lr, beta1, beta2, eps, weight_decay,
    seed=None, index=0, maximize=False,
):  # fmt: skip
    """Make step number steps_done + 1 of p and its Moments, in place; never wait for the GPU.

    Args:
        p, grad: equal shapes, on one device, fp16, bf16 or fp32.  Any strides by which no two
            elements of p share memory.
        m, v, scales: Moments, contiguous.  Blocks are of p's elements in their logical order.
        steps_done, lr, beta1, beta2, eps, weight_decay, maximize: as in `adamw_step`.
        seed, index: as in `adamw_step`, for the weights; codes are always rounded to nearest.

    Raises:
        TypeError, ValueError: an argument is none of these.  Nothing was written then.
    """
    tensors = p, grad, m, v, scales, steps_done
    if torch.compiler.is_compiling():
        scalars = split_scalars(p, (lr, beta1, beta2, eps, weight_decay))
        return _step_of_lists(*tensors, *scalars, seed, index, bool(maximize))
    _check(*tensors)
    scalars = numbers_for(p.device, lr, beta1, beta2, eps, weight_decay)
    if (n := p.numel()) == 0:
        return
    p_dense, grad = p.detach().contiguous(), grad.detach().contiguous()
    with on_device_of(p):
        _adamw8_kernel[(triton.cdiv(n, BLOCK),)](
            p_dense,
            grad,
            (m, v, scales),
            steps_done,
            *scalars,
            n,
            seed,
            index,
            MAXIMIZE=bool(maximize),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    if not p.is_contiguous():
        p.detach().copy_(p_dense)


def _check(p, grad, m, v, scales, steps_done, *_) -> None:
    """Refuse what the kernel cannot compute."""
    shape = ("...",)
    check_tensors(
        ("p", p, FLOATS, shape),
        ("grad", grad, SAME, shape),
        ("m", m, (torch.int8,), shape),
        ("v", v, (torch.uint8,), shape),
        ("scales", scales, FP32, (2, triton.cdiv(p.numel(), BLOCK))),
        ("steps_done", steps_done, FP32, ()),
    )
    for name, t in (("m", m), ("v", v), ("scales", scales)):
        if not t.is_contiguous():
            given = f"{name} of shape {tuple(t.shape)} has strides {t.stride()}"
            raise ValueError(f"{given}, expected contiguous codes: make them with new_moments().")
    if not p.is_contiguous():
        check_overlap("p", p)


# What torch.compile sees in place of the kernel.
@operator(
    "tutorial::adamw8_step",
    "(Tensor(a!) p, Tensor grad, Tensor(b!) m, Tensor(c!) v, Tensor(d!) scales, Tensor steps_done,"
    " Tensor?[] tensors, float[] floats, int? seed, int index, bool maximize) -> ()",
    results=_check,
    mutates=("p", "m", "v", "scales"),
)
def _step_of_lists(p, grad, m, v, scales, steps_done, tensors, floats, *options) -> None:
    scalars = join_scalars(tensors, floats)
    adamw8_step(p, grad, m, v, scales, steps_done, *scalars, *options)
