"""NF4 in Triton: a frozen weight in 4 bits a number, written out again whenever it is multiplied.

    w = table[code] * absmax                     # (O, I): one of 16 values, times one of its block
    y = F.linear(x, w)                           # and dx = dy @ w, with w written out once more

QLoRA trains adapters beside weights that never change.  What never changes can be stored coarsely.
Block by block of 64 numbers:

    absmax = max |w|                             one for each block
    code   = the nearest of table to w / absmax  4 bits; two codes in a byte, the first in its upper

The table holds 16 quantiles of a normal distribution, scaled to [-1, 1], 0 among them: weights are
about normal, so all codes are about as frequent.  An fp32 absmax would be half a bit a number
more.  So absmax is quantized too, in groups of 256 and to 8 bits, after the mean of them all is
subtracted, because none is negative:

    scale       = max |absmax - mean|            one for each group
    absmax_code = the nearest of absmax_map to (absmax - mean) / scale

Bytes per number:

    codes 1/2, absmax codes 1/64, scales 4 / (64 * 256)      0.516   kept, in the place of bf16's 2
    the kernel reads these and writes bf16                   2.516   moved

The prediction: the layers of LLaMA 3.1 8B have 6.98e9 numbers, 17.6 GB to move; at 4.2 TB/s that is
4.2 ms, and a step needs it twice, for the forward's products and for the backward's.  PyTorch's
formula writes each half of a byte, an int64 index, a looked-up number and a product, and reads them
again: 39 bytes a number, 15 times as many.

New ideas of Triton, after those of rmsnorm_kernel.py, cross_entropy_kernel.py and swiglu_kernel.py:

1. A *table* of 16 values has no place in registers that a lane could index.  It stays in memory,
   and `tl.load(table + code)` finds it in the cache next to the cores: 64 bytes, which all of the
   threads of a warp read at once.
2. *Two numbers from a byte*: `tl.interleave(high, low)` is the tile twice as wide whose columns are
   the two tiles' in turn.  Both are in the same thread, so it moves nothing.
3. What is as good as any other: a masked lane's code is whatever was in the register, and each
   byte is two valid places of the table.  So nothing is read beyond it, and nothing is written.

Limits: fp16, bf16, fp32; a multiple of 64 numbers; finite weights, which never get a gradient; no
second derivative.
"""

import math
from typing import NamedTuple

import torch
from torch.nn.functional import linear, pad

import kernel_support as support
from kernel_support import FLOATS, FP32, tl, triton

BYTES = (torch.uint8,)
BLOCK, GROUP = 64, 256  # numbers that share an absmax, absmaxes that share a scale
# 16 bytes of codes a thread: 32 numbers.  85 % of the copy rate on an H200; with a quarter of that
# 63 %, because the next load waits for the table.
TILE_BLOCKS, NUM_WARPS = 32, 2
TINY = 1e-38  # in the place of an absmax or scale of 0, all of whose numbers are 0

# Dettmers et al. 2023, appendix E: with 8 quantiles below 0 and 9 above, one of them shared.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
N_VALUES = len(NF4_VALUES)


class NF4(NamedTuple):
    """A weight in 4 bits a number.  Its shape is not part of it."""

    codes: torch.Tensor  # (n / 2,) uint8: the first of two numbers in the upper half
    absmax_codes: torch.Tensor  # (n / 64,) uint8
    absmax_scales: torch.Tensor  # (n / 64 / 256, rounded up) fp32
    absmax_mean: torch.Tensor  # (1,) fp32
    tables: torch.Tensor  # (16 + 256,) fp32: the values of a code, then those of an absmax code


# ---- To NF4: once for a weight, so PyTorch will do ---------------------------------------------


def nf4_quantize(weight: torch.Tensor) -> NF4:
    """Return the weight (any shape) in 4 bits a number, on its device.  The host waits for a check.

    Raises:
        TypeError: it is no tensor of fp16, bf16 or fp32.
        ValueError: not a multiple of 64 numbers, or one of them is infinite or NaN.
    """
    support.check_memory("weight", weight, FLOATS)
    if weight.numel() % BLOCK:
        given = f"weight has shape {tuple(weight.shape)}, {weight.numel():,} numbers"
        raise ValueError(f"{given}, expected a multiple of {BLOCK}")
    if not weight.is_meta and not weight.isfinite().all():
        reason = "one would spoil the mean of absmax and with it every number"
        raise ValueError(f"weight has infinite or NaN numbers, expected none: {reason}")
    tables = nf4_tables(weight.device)
    table, absmax_map = tables.split([N_VALUES, GROUP])
    blocks = weight.detach().reshape(-1, BLOCK).float()  # (n / 64, 64)
    absmax = blocks.abs().amax(1)  # (n / 64,)
    codes = _nearest(table, blocks * (1 / absmax.clamp(min=TINY))[:, None])  # (n / 64, 64)
    absmax_mean = absmax.mean()
    absmax_codes, absmax_scales = _quantize_absmax(absmax - absmax_mean, absmax_map)
    return NF4(
        codes=(codes[:, ::2] << 4 | codes[:, 1::2]).view(-1),
        absmax_codes=absmax_codes,
        absmax_scales=absmax_scales,
        absmax_mean=absmax_mean.view(1),
        tables=tables,
    )


def nf4_tables(device: torch.device) -> torch.Tensor:
    """Return NF4's values, and the 256 of an absmax code: (16 + 256,) fp32.

    Those of an absmax code are relatively as fine near 0 as near 1.  Of each sign there are 1 value
    between 1e-7 and 1e-6, 2 up to 1e-5, ... 64 between 0.1 and 1, in equal steps; and 0, and 1.
    """
    magnitudes = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32, device="cpu")
        magnitudes.append(10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2))
    magnitudes = torch.cat(magnitudes)
    options = {"dtype": torch.float32, "device": "cpu"}
    ends = torch.tensor([0.0, 1.0], **options)
    absmax_map = torch.cat([magnitudes, -magnitudes, ends]).sort().values
    return torch.cat([torch.tensor(NF4_VALUES, **options), absmax_map]).to(device)


def _nearest(table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return where in the sorted table each number's nearest value is; of two, the smaller."""
    between = (table[:-1] + table[1:]) / 2
    return torch.bucketize(numbers, between, out_int32=True).to(torch.uint8)


def _quantize_absmax(deviations, absmax_map):
    """Return codes (N,) uint8 and scales (N / 256, rounded up) of deviations (N,) from the mean."""
    n_blocks = len(deviations)
    groups = pad(deviations, (0, -n_blocks % GROUP)).view(-1, GROUP)
    scales = groups.abs().amax(1)
    codes = _nearest(absmax_map, groups * (1 / scales.clamp(min=TINY))[:, None])
    return codes.view(-1)[:n_blocks].contiguous(), scales


# ---- And back ----------------------------------------------------------------------------------


def nf4_dequantize_reference(nf4: NF4, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of this shape, by PyTorch; in float64 if the scales are float64."""
    codes, absmax_codes, absmax_scales, absmax_mean, tables = nf4
    table, absmax_map = tables.split([N_VALUES, GROUP])
    scales = absmax_scales.repeat_interleave(GROUP)[: len(absmax_codes)]  # (n / 64,)
    absmax = absmax_map[absmax_codes.long()] * scales + absmax_mean  # (n / 64,)
    both = torch.stack([codes >> 4, codes & 15], 1)  # (n / 2, 2)
    numbers = table[both.long()].view(-1, BLOCK) * absmax[:, None]  # (n / 64, 64)
    return numbers.to(dtype).view(shape)


# A program writes TILE_BLOCKS blocks.  They are the rows of a tile, and each row has one absmax.
# So an absmax is looked up once a block, not once a number.


@triton.jit(do_not_specialize=["n_blocks"])
def _nf4_dequantize_kernel(
    codes_ptr,  # (n_blocks, 32) uint8
    absmax_codes_ptr,  # (n_blocks,) uint8
    absmax_scales_ptr,  # (n_blocks / 256, rounded up) fp32
    absmax_mean_ptr,  # (1,) fp32
    tables_ptr,  # (16 + 256,) fp32
    w_ptr,  # (n_blocks, 64), contiguous
    n_blocks,
    TILE_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    N_VALUES: tl.constexpr,
):
    # int64: the numbers of a weight outgrow 32 bits at 128,256 x 16,745
    blocks = tl.program_id(0).to(tl.int64) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    mask = blocks < n_blocks
    bytes_of_block = tl.arange(0, BLOCK // 2)[None, :]
    codes_at = codes_ptr + blocks[:, None] * (BLOCK // 2) + bytes_of_block
    codes = tl.load(codes_at, mask=mask[:, None])  # (TILE_BLOCKS, 32)

    absmax_codes = tl.load(absmax_codes_ptr + blocks, mask=mask).to(tl.int32)
    absmax = tl.load(tables_ptr + N_VALUES + absmax_codes)
    absmax *= tl.load(absmax_scales_ptr + blocks // GROUP, mask=mask)
    absmax += tl.load(absmax_mean_ptr)

    high = tl.load(tables_ptr + (codes >> 4).to(tl.int32)) * absmax[:, None]
    low = tl.load(tables_ptr + (codes & 15).to(tl.int32)) * absmax[:, None]
    w = tl.interleave(high, low)  # (TILE_BLOCKS, 64)
    numbers_of_block = tl.arange(0, BLOCK)[None, :]
    w_at = w_ptr + blocks[:, None] * BLOCK + numbers_of_block
    tl.store(w_at, w.to(w_ptr.dtype.element_ty), mask=mask[:, None])


# ---- The launcher ------------------------------------------------------------------------------


def nf4_dequantize(nf4: NF4, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of this shape in this dtype, the bits of `nf4_dequantize_reference`."""
    return _launch(*nf4, shape, dtype)


def _result(codes, absmax_codes, absmax_scales, absmax_mean, tables, shape, dtype):
    """The weight, not yet written."""
    if dtype not in FLOATS:
        expected = f"{' or '.join(map(str, FLOATS))}: convert x."
        raise TypeError(f"the weight is wanted in {dtype}, expected {expected}")
    support.check_memory("codes", codes)
    n_numbers = 2 * codes.numel()
    n_blocks = n_numbers // BLOCK
    support.check_tensors(
        ("codes", codes, BYTES, (n_blocks * BLOCK // 2,)),
        ("absmax_codes", absmax_codes, BYTES, (n_blocks,)),
        ("absmax_scales", absmax_scales, FP32, (-(-n_blocks // GROUP),)),
        ("absmax_mean", absmax_mean, FP32, (1,)),
        ("tables", tables, FP32, (N_VALUES + GROUP,)),
    )
    if math.prod(shape) != n_numbers:
        given = f"shape is {tuple(shape)} and codes holds {n_numbers:,} numbers"
        raise ValueError(f"{given}, expected as many: pass the shape that was quantized.")
    return codes.new_empty(shape, dtype=dtype)


@support.operator(
    "tutorial::nf4_dequantize",
    "(Tensor codes, Tensor absmax_codes, Tensor absmax_scales, Tensor absmax_mean, "
    "Tensor tables, SymInt[] shape, ScalarType dtype) -> Tensor",
    _result,
)
def _launch(codes, absmax_codes, absmax_scales, absmax_mean, tables, shape, dtype):
    nf4 = NF4(codes, absmax_codes, absmax_scales, absmax_mean, tables)
    w = _result(*nf4, shape, dtype)
    n_blocks = len(absmax_codes)
    n_programs = -(-n_blocks // TILE_BLOCKS)  # rounded up
    if n_programs > 0:
        with support.on_device_of(codes):
            _nf4_dequantize_kernel[(n_programs,)](
                *(t.contiguous() for t in nf4),
                w,
                n_blocks,
                TILE_BLOCKS=TILE_BLOCKS,
                BLOCK=BLOCK,
                GROUP=GROUP,
                N_VALUES=N_VALUES,
                num_warps=NUM_WARPS,
                # absmax is rounded after the product and after the sum, as PyTorch does
                enable_fp_fusion=False,
            )
    return w


# ---- For autograd ------------------------------------------------------------------------------
#
#   y  = x @ W.t()         W (O, I) is written out, multiplied, and freed
#   dx = dy @ W            it is written out again: between the two, half a byte a number is kept
#
# W is a constant, so there is no dW: of the three products of a trained linear layer, two are left.


def nf4_linear_reference(x: torch.Tensor, shape: tuple[int, int], *nf4: torch.Tensor):
    """Eager x @ W.t() of x (..., I) and W of shape (O, I), in x's dtype; float64 stays float64."""
    return linear(x, nf4_dequantize_reference(NF4(*nf4), shape, x.dtype))


class NF4LinearFunction(torch.autograd.Function):
    """`.apply(x, shape, *nf4)`: x (..., I) times W.t(), W of shape (O, I), gives (..., O)."""

    @staticmethod
    def forward(ctx, x, shape, *nf4):
        ctx.shape = shape
        ctx.save_for_backward(*nf4)
        return linear(x, nf4_dequantize(NF4(*nf4), shape, x.dtype))

    @staticmethod
    @support.outside_autocast
    def backward(ctx, dy):
        support.refuse_second_derivative("NF4's product")
        weight = nf4_dequantize(NF4(*ctx.saved_tensors), ctx.shape, dy.dtype)  # again
        return dy @ weight, None, *(None for _ in NF4._fields)
