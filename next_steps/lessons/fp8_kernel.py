"""FP8 in Triton: rows of 8-bit numbers, each row with a scale that is a power of two.

    scales = 2 ** ceil(log2(x.abs().amax(1) / 448))     # (N,) of x (N, K); 448: e4m3's largest
    codes  = (x / scales[:, None]).to(torch.float8_e4m3fn)
    x @ w.t()  ~  (codes @ codes_w.t()) * scales[:, None] * scales_w    # a GPU multiplies codes

e4m3 is a floating-point format in a byte: a sign, 4 bits of exponent, 3 of mantissa.

    normal      2^-6 to 448, relative error at most 2^-4: half of the last of the 3 bits
    subnormal   below: multiples of 2^-9, so an error of at most 2^-10
    no infinity; NaN is one code of each sign

Matrix products of such numbers are twice as fast as those of bf16: half the bytes, and twice the
products in each instruction.  But 2^-9 to 448 is a narrow range for what a network computes, so a
scale moves each row's largest number to its upper end.

Why a scale for each row?  The largest number of a whole tensor is known only when all of it has
been read; a scale must be there before.  Others use the last steps' (a history, which is one more
thing to save and to be wrong).  A row is held by one program, which finds the largest, divides, and
writes codes: one pass, no history.  In x @ w.t() a scale of a row of x, or of w, is a factor of
all numbers of a row, or a column, of the result: the product takes it out of the sum.

Why a power of two?  Dividing by one only shifts the exponent: no rounding but e4m3's own.  (The
exact scale, amax / 448, would move the largest number to the very end of the range, but the
relative error is the format's, wherever a number lies.)  What it buys is the next kernel.  The
weight's gradient is a sum over the tokens, dw = dy.t() @ x, and the GPU wants both with the tokens
side by side in memory: transposed.  Then row scales lie *along* the sum, where no product can take
them out.  So all rows move to one scale, the largest:

    codes_t[k, n] = codes[n, k] * 2 ** (e_n - e_largest)

which shifts exponents once more: exact, unless it ends among the subnormals.  That happens to rows
that are small beside the largest, and so count little in the sum.  The error is at most 2^-10 of
the largest scale, and so less than 2^-17 of the largest number.

Bytes moved, per number:
                                                                eager              here
    quantize_rows    to fp32 6, abs 8, amax 4, * 8, to e4m3 5      31    x, codes     3
    transpose_rows   to fp32 5, * 8, to e4m3 5, contiguous 2       20    codes, both  2
    the same from bf16, which column scales would need: their maxima 2, then 3         5

The prediction: at 4.2 TB/s, 8,192 x 4,096 takes 24 us to quantize, and 16 us to transpose.

New ideas of Triton, after those of rmsnorm_kernel.py and swiglu_kernel.py:

1. *Bits as an integer.*  `.to(tl.int32, bitcast=True)` is the same 32 bits.  Without the sign they
   are ordered as the numbers are, with infinity above the finite ones and NaN above infinity: their
   maximum is the row's amax and finds what is not finite (`tl.max` of numbers passes NaN over).
   Its exponent is a shift away, and so is a power of two.
2. A *cast to FP8* rounds to nearest even and stops at 448, four numbers in a few instructions.
3. *Transposing a tile.*  `tl.trans` exchanges a tile's axes, and the store wants other threads to
   hold the numbers than the load did.  Triton sends them through the memory that a program's
   threads share.  So both sides touch whole lines of 128 bytes.

A row that holds an infinity or NaN becomes NaN altogether: e4m3 has no infinity, and under an
infinite scale the others would silently be 0.  A row of zeros gets the smallest scale, never a
division by 0.  Scales are normal fp32 numbers, 2^-126 or more.

Limits: fp16, bf16, fp32; rows of up to 32,768 numbers, in three parts at most; products on a GPU of
sm_89 or later, sizes multiples of 16.  On a CPU a product is that of the codes as fp32.  The
launchers refuse other tensors with a TypeError or a ValueError.
"""

import itertools
from typing import NamedTuple

import torch

from kernel_support import FLOATS, FP32, SAME, check_tensors, on_device_of, operator, tl, triton

FP8 = torch.float8_e4m3fn
MAX_COLUMNS, MAX_PARTS = 32_768, 3
MULTIPLE = 16  # of a product's sizes, for the GPU's library
SMALLEST_SCALE = 2.0**-126  # fp32's smallest normal number
FIRST_CAPABILITY = (8, 9)  # of a GPU that multiplies e4m3
NUMBERS_PER_THREAD = 32  # of a row, for a warp's 32 threads
TILE_ROWS, TILE_COLS, TRANSPOSE_WARPS = 64, 128, 2  # the best of 30 on an H200

# fp32 is a sign, 8 bits of exponent, 23 of mantissa.  amax = m * 2^k, 1 <= m < 2, and 448 is
# 1.75 * 2^8: the scale is 2^(k - 8), or twice as much where m is above 1.75.  Added to the bits of
# amax, ROUND_UP carries into the exponent exactly there.
ROUND_UP = tl.constexpr(0x1FFFFF)  # 0x7FFFFF - 0x600000, the mantissa of 1.75
INFINITY = tl.constexpr(0x7F800000)  # its bits; those of NaN are above


class Rows(NamedTuple):
    """A matrix in FP8: codes * scales[:, None]."""

    codes: torch.Tensor  # (N, K) e4m3
    scales: torch.Tensor  # (N,) fp32, powers of two


# ---- In eager PyTorch --------------------------------------------------------------------------


def quantize_rows_reference(*parts: torch.Tensor) -> Rows:
    """Return parts (N, K_i), side by side, as Rows (N, sum of K_i)."""
    x = torch.cat([part.float() for part in parts], 1)  # (N, K) fp32
    bits = x.abs().amax(1).view(torch.int32).clamp(max=INFINITY.value)  # (N,)
    exponents = (((bits + ROUND_UP.value) >> 23) - 8).clamp(min=1)
    scales = (exponents << 23).view(torch.float32)
    inverses = ((254 - exponents) << 23).view(torch.float32)
    inverses = inverses.masked_fill(bits == INFINITY.value, torch.nan)
    return Rows((x * inverses[:, None]).to(FP8), scales)


def transpose_rows_reference(rows: Rows) -> Rows:
    """Return Rows (K, N) of Rows (N, K), all with the largest scale."""
    codes, scales = rows
    largest = scales.amax() if len(scales) else scales.new_tensor(SMALLEST_SCALE)
    moved = (codes.float() * (scales / largest)[:, None]).to(FP8)  # (N, K)
    return Rows(moved.t().contiguous(), largest.repeat(codes.shape[1]))


def dequantize(rows: Rows, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix (N, K) in this dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return (rows.codes.float().to(wide) * rows.scales[:, None]).to(dtype)


# ---- Rows: a program for each ------------------------------------------------------------------
#
# The row stays in registers between its maximum and its codes.  Its parts (the gradients of q, k
# and v, say) are blocks of their own.


@triton.jit
def _fp8_quantize_kernel(
    a_ptr, a_row_stride,  # (n_rows, a_cols)
    b_ptr, b_row_stride,  # (n_rows, b_cols); None: one part
    c_ptr, c_row_stride,  # (n_rows, c_cols); None: no third
    codes_ptr,  # (n_rows, a_cols + b_cols + c_cols), contiguous
    scales_ptr,  # (n_rows,) fp32
    a_cols,
    b_cols,
    c_cols,
    A_BLOCK: tl.constexpr,  # the first powers of two >= the numbers of columns
    B_BLOCK: tl.constexpr,
    C_BLOCK: tl.constexpr,
):  # fmt: skip
    # int64: at K = 14,336 the numbers outgrow 32 bits in row 149,796.
    row = tl.program_id(0).to(tl.int64)
    a = _load_part(a_ptr + row * a_row_stride, a_cols, A_BLOCK)
    amax = tl.max(magnitude_bits(a), axis=0)
    if b_ptr is not None:
        b = _load_part(b_ptr + row * b_row_stride, b_cols, B_BLOCK)
        amax = tl.maximum(amax, tl.max(magnitude_bits(b), axis=0))
    if c_ptr is not None:
        c = _load_part(c_ptr + row * c_row_stride, c_cols, C_BLOCK)
        amax = tl.maximum(amax, tl.max(magnitude_bits(c), axis=0))

    scale, inverse = scale_and_inverse(amax)
    tl.store(scales_ptr + row, scale)
    codes_ptr += row * (a_cols + b_cols + c_cols)
    store_codes(codes_ptr, a * inverse, a_cols, A_BLOCK)
    if b_ptr is not None:
        store_codes(codes_ptr + a_cols, b * inverse, b_cols, B_BLOCK)
    if c_ptr is not None:
        store_codes(codes_ptr + a_cols + b_cols, c * inverse, c_cols, C_BLOCK)


@triton.jit
def _load_part(x_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    cols = tl.arange(0, BLOCK_SIZE)
    return tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)


# The bits of fp32 numbers without their signs are ordered as the magnitudes are.  Infinity and NaN
# come last.
@triton.jit
def magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


# The scale of the row whose largest magnitude has these bits, and its inverse.  Both are normal
# numbers: exponents 1 to 253 of 254.  In a row that is not finite the inverse is NaN, and so all
# codes are.
@triton.jit
def scale_and_inverse(amax_bits):
    amax_bits = tl.minimum(amax_bits, INFINITY)
    exponent = tl.maximum(((amax_bits + ROUND_UP) >> 23) - 8, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, tl.where(amax_bits < INFINITY, inverse, float("nan"))


@triton.jit
def store_codes(codes_ptr, scaled, n_cols, BLOCK_SIZE: tl.constexpr):
    cols = tl.arange(0, BLOCK_SIZE)
    tl.store(codes_ptr + cols, scaled.to(codes_ptr.dtype.element_ty), mask=cols < n_cols)


# ---- Transposed: a program for each tile -------------------------------------------------------
#
# What comes in are codes, or numbers that are rounded on the way.  Whether 16 divides n_rows is
# compiled in: only then may a thread store 16 bytes at once.


@triton.jit
def _fp8_transpose_kernel(
    x_ptr, x_row_stride,  # (n_rows, n_cols)
    scales_ptr,  # (n_rows,) fp32, of codes; None: of numbers
    largest_ptr,  # the scale of the result
    transposed_ptr, transposed_row_stride,  # (n_cols, n_rows)
    transposed_scales_ptr,  # (n_cols,) fp32
    n_rows,
    n_cols,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    cols = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)
    row_mask, col_mask = rows < n_rows, cols < n_cols
    # int64: row * stride outgrows 32 bits.  A masked lane's code is as good as any other.
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_row_stride + cols[None, :]
    x = tl.load(x_at, mask=row_mask[:, None] & col_mask[None, :]).to(tl.float32)
    largest = tl.load(largest_ptr)
    # `/` is an approximation; this is exact for powers of two, and 0 if it leaves fp32's range.
    if scales_ptr is not None:
        x *= tl.div_rn(tl.load(scales_ptr + rows, mask=row_mask, other=0.0), largest)[:, None]
    else:
        x *= tl.div_rn(tl.full((), 1.0, tl.float32), largest)
        x = tl.where(magnitude_bits(x) < INFINITY, x, float("nan"))  # the cast would make it 448
    moved = x.to(transposed_ptr.dtype.element_ty)

    # A byte each goes through shared memory.
    row_of_cols = cols.to(tl.int64)[:, None] * transposed_row_stride
    transposed_at = transposed_ptr + row_of_cols + rows[None, :]
    tl.store(transposed_at, tl.trans(moved), mask=col_mask[:, None] & row_mask[None, :])
    if tl.program_id(0) == 0:
        tl.store(transposed_scales_ptr + cols, tl.full((TILE_COLS,), largest, tl.float32), col_mask)


# ---- Launchers ---------------------------------------------------------------------------------


def quantize_rows(*parts: torch.Tensor) -> Rows:
    """Return one to three parts (N, K_i) of one dtype, side by side, as Rows (N, sum of K_i)."""
    return Rows(*_quantize(list(parts)))


def _quantize_result(parts):
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"there are {len(parts)} parts, expected 1 to {MAX_PARTS}: join some.")
    n_rows = check_matrices(*((f"part {i}", t, ("N", f"K{i}")) for i, t in enumerate(parts)))["N"]
    n_cols = sum(part.shape[1] for part in parts)
    if n_cols > MAX_COLUMNS:
        expected = f"{MAX_COLUMNS:,} at most: use quantize_rows_reference for longer rows."
        raise ValueError(f"the rows have {n_cols:,} numbers, expected {expected}")
    return empty_rows(parts[0], n_rows, n_cols)


@operator("tutorial::fp8_quantize_rows", "(Tensor[] parts) -> (Tensor, Tensor)", _quantize_result)
def _quantize(parts):
    codes, scales = _quantize_result(parts)
    _write_rows(codes, scales, parts)
    return codes, scales


def quantize_stacked(*weights: torch.Tensor) -> Rows:
    """Return weights (O_i, I), one below the other, as Rows (sum of O_i, I)."""
    return Rows(*_quantize_stacked(list(weights)))


def _stacked_result(weights):
    n_rows, n_cols = _stacked_shape(weights)
    return empty_rows(weights[0], n_rows, n_cols)


@operator(
    "tutorial::fp8_quantize_stacked", "(Tensor[] weights) -> (Tensor, Tensor)", _stacked_result
)
def _quantize_stacked(weights):
    rows = _stacked_result(weights)
    lengths = [len(weight) for weight in weights]
    for codes, scales, weight in zip(*(t.split(lengths) for t in rows), weights):
        _write_rows(codes, scales, [weight])
    return tuple(rows)


def empty_rows(like, n_rows: int, n_cols: int) -> Rows:
    """Return Rows (n_rows, n_cols) on like's device, not yet written."""
    codes = like.new_empty((n_rows, n_cols), dtype=FP8)
    return Rows(codes, like.new_empty(n_rows, dtype=torch.float32))


def _write_rows(codes, scales, parts) -> None:
    """Write parts (N, K_i), one to three, into codes (N, sum of K_i) and scales (N,)."""
    n_rows = len(scales)
    if n_rows == 0:
        return
    n_missing = MAX_PARTS - len(parts)
    rows = [(part, part.stride(0)) for part in map(adjacent_columns, parts)]
    widths = [part.shape[1] for part in parts] + [0] * n_missing
    blocks = [triton.next_power_of_2(width) for width in widths]
    with on_device_of(codes):
        _fp8_quantize_kernel[(n_rows,)](
            *itertools.chain(*rows, (None, 0) * n_missing),
            codes,
            scales,
            *widths,
            *blocks,
            num_warps=warps_of_row(sum(blocks)),
            enable_fp_fusion=True,
        )


def adjacent_columns(t: torch.Tensor) -> torch.Tensor:
    """Return t (N, K), copied where the numbers of a row have gaps between them."""
    return t if t.stride(1) == 1 else t.contiguous()


def warps_of_row(block_size: int, numbers_per_thread: int = NUMBERS_PER_THREAD) -> int:
    """Return the warps, of 32 threads each, of a program that holds a row of so many numbers."""
    return min(max(triton.next_power_of_2(block_size // (32 * numbers_per_thread)), 1), 32)


def transpose_rows(rows: Rows) -> Rows:
    """Return Rows (K, N) of Rows (N, K), all with the largest scale."""
    return Rows(*_transpose(*rows))


def _transpose_result(codes, scales):
    check_tensors(("rows.codes", codes, (FP8,), ("N", "K")), ("rows.scales", scales, FP32, ("N",)))
    return empty_rows(codes, *codes.shape[::-1])


@operator(
    "tutorial::fp8_transpose_rows",
    "(Tensor codes, Tensor scales) -> (Tensor, Tensor)",
    _transpose_result,
)
def _transpose(codes, scales):
    transposed = _transpose_result(codes, scales)
    if len(codes) == 0:
        transposed.scales.fill_(SMALLEST_SCALE)
    else:
        scales = scales.contiguous()
        _write_transposed(*transposed, codes, scales, scales.amax())
    return tuple(transposed)


def quantize_transposed(*weights: torch.Tensor, scale: torch.Tensor) -> Rows:
    """Return weights (O_i, I), stacked and transposed, as Rows (I, sum of O_i) of one scale ().

    With the largest scale of `quantize_stacked(*weights)` it is that one's transpose, in 3 bytes a
    number in place of 5, and rounded once.
    """
    return Rows(*_quantize_transposed(list(weights), scale))


def quantize_transposed_reference(*weights: torch.Tensor, scale: torch.Tensor) -> Rows:
    """Return the same, computed by eager PyTorch."""
    x = torch.cat([weight.float() for weight in weights])  # (sum of O_i, I) fp32
    return Rows((x / scale).to(FP8).t().contiguous(), scale.repeat(x.shape[1]))


def _transposed_result(weights, scale):
    n_rows, n_cols = _stacked_shape(weights)
    check_tensors(("weight 0", weights[0], FLOATS, None), ("scale", scale, FP32, ()))
    return empty_rows(weights[0], n_cols, n_rows)


@operator(
    "tutorial::fp8_quantize_transposed",
    "(Tensor[] weights, Tensor scale) -> (Tensor, Tensor)",
    _transposed_result,
)
def _quantize_transposed(weights, scale):
    transposed = _transposed_result(weights, scale)
    lengths = [len(weight) for weight in weights]
    for codes, weight in zip(transposed.codes.split(lengths, dim=1), weights):
        _write_transposed(codes, transposed.scales, weight, None, scale)
    return tuple(transposed)


def _write_transposed(codes, scales, x, x_scales, largest) -> None:
    """Write x (N, K), transposed, into codes (K, N), of any row stride, and scales (K,)."""
    n_rows, n_cols = x.shape
    if n_rows == 0 or n_cols == 0:
        return
    x = adjacent_columns(x)
    with on_device_of(x):
        # Programs with adjacent numbers take the same columns: what they write is adjacent.
        _fp8_transpose_kernel[(-(-n_rows // TILE_ROWS), -(-n_cols // TILE_COLS))](
            x, x.stride(0),
            x_scales,
            largest,
            codes, codes.stride(0),
            scales,
            n_rows,
            n_cols,
            TILE_ROWS=TILE_ROWS,
            TILE_COLS=TILE_COLS,
            num_warps=TRANSPOSE_WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip


# ---- The product -------------------------------------------------------------------------------


def fp8_product(a: Rows, b: Rows, dtype: torch.dtype) -> torch.Tensor:
    """Return a @ b.t() of Rows (M, K) and (N, K): (M, N) in this dtype.

    On a GPU PyTorch multiplies and writes bf16, which is converted if another dtype is asked for.
    Partial sums stay in the multiplying units, which on Hopper keep 14 bits of them.  On a CPU the
    codes are multiplied in fp32.
    """
    if not torch.compiler.is_compiling():  # the check asks what torch.compile does not trace
        _check_product(a, b, dtype)
    shape = a.codes.shape[0], b.codes.shape[0]
    if 0 in (*shape, a.codes.shape[1]):
        return a.scales.new_zeros(shape, dtype=dtype)
    if a.codes.device.type == "cpu":
        product = a.codes.float() @ b.codes.float().t()
        return (product * a.scales[:, None] * b.scales[None, :]).to(dtype)
    product = torch._scaled_mm(
        a.codes.contiguous(),
        b.codes.contiguous().t(),
        scale_a=a.scales[:, None],
        scale_b=b.scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return product.to(dtype)


def takes_fp8(*sizes: int) -> bool:
    """Return True if a product on a GPU can have these sizes, of columns or of the summed side."""
    return all(size > 0 and size % MULTIPLE == 0 for size in sizes)


def fp8_support() -> str | None:
    """Return None, or a sentence that says why this GPU cannot multiply FP8.  A CPU can."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    if torch.version.hip is not None:
        return f"{name} has another e4m3 than NVIDIA's GPUs: leave FP8 out."
    capability = torch.cuda.get_device_capability()
    if capability < FIRST_CAPABILITY:
        its, first = ("sm_{}{}".format(*numbers) for numbers in (capability, FIRST_CAPABILITY))
        return f"{name} is of {its}, and GPUs multiply FP8 from {first} on: leave FP8 out."
    return None


# ---- Checks -------------------------------------------------------------------------------------


def check_matrices(*matrices: tuple[str, torch.Tensor, tuple]) -> dict[str, int]:
    """Refuse tensors that are no matrices of one dtype, or whose rows do not fit a program.

    matrices: name, tensor and shape.  Returns the lengths of the shapes' words: check_tensors.
    """
    dtypes = FLOATS, *[SAME] * (len(matrices) - 1)
    lengths = check_tensors(*((name, t, d, s) for (name, t, s), d in zip(matrices, dtypes)))
    for name, t, _ in matrices:
        if not 1 <= t.shape[1] <= MAX_COLUMNS:
            expected = f"(N, K) with K from 1 to {MAX_COLUMNS:,}: view it so, or use the reference."
            raise ValueError(f"{name} has shape {tuple(t.shape)}, expected {expected}")
    return lengths


def _stacked_shape(weights) -> tuple[int, int]:
    """Refuse weights that do not lie one below the other; return the shape of all of them."""
    if not weights:
        raise ValueError("there is no weight, expected one at least: pass it.")
    named = ((f"weight {i}", weight, (f"O{i}", "I")) for i, weight in enumerate(weights))
    n_cols = check_matrices(*named)["I"]
    return sum(map(len, weights)), n_cols


def _check_product(a: Rows, b: Rows, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        expected = f"{' or '.join(map(str, FLOATS))}."
        raise TypeError(f"the product is wanted in {dtype}, expected {expected}")
    check_tensors(
        ("a.codes", a.codes, (FP8,), ("M", "K")),
        ("a.scales", a.scales, FP32, ("M",)),
        ("b.codes", b.codes, (FP8,), ("N", "K")),
        ("b.scales", b.scales, FP32, ("N",)),
    )
    sizes = tuple(b.codes.shape)
    if a.codes.is_cuda and 0 not in sizes and not takes_fp8(*sizes):
        expected = f"multiples of {MULTIPLE} on a GPU: multiply in bf16."
        raise ValueError(f"b is {sizes}, expected {expected}")
