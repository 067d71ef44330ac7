"""Makes Triton's interpreter, which runs the kernels where there is no GPU, round as a GPU does.

    import harness.interpreter_rounding  # that is all; without the interpreter it changes nothing

Three of the interpreter's operations (Triton 3.6 and 3.7) give other numbers than the hardware:

- fp32 -> bf16 drops the lower 16 bits, where hardware rounds to nearest, ties to even.  Always
  towards zero: weights in bf16 lose norm in every step of an optimizer.  Besides, some NaN become
  infinity, what exceeds bf16's range does not, subnormal numbers come out wrong in both
  directions, and integers and fp64 are not converted at all.
- fp32 -> fp8 (e4m3) adds the first bit that is dropped, and may lose the carry: 1.99 becomes 1.
  Ties do not go to even, subnormal numbers are truncated, NaN becomes a number, and what is too
  large any.  Hardware rounds to nearest, ties to even, and stops at 448.
- `tl.fma(x, y, z)` rounds x * y, and then the sum; hardware rounds once.  For a logit of 10,000
  the first rounding is already 5e-4, and exp turns it into a relative error.

Besides, with NumPy 2.4 the interpreter of Triton 3.5 and 3.6 runs no loop whose bound is a number
of the kernel: it converts an array of one number to int, which NumPy now refuses.

`device` and every kernel file import this, so scripts, tests and whoever uses a kernel of this
folder have it.  Not covered:

- a kernel file that was carried away without this one: on a CPU it runs with the interpreter's
  own rounding, and with Triton 3.5 or 3.6 it needs a NumPy before 2.4;
- `tl.fma` of fp64, and fp64 -> bf16, which is rounded to fp32 first (no kernel here uses fp64);
- arithmetic on bf16 values: for +, -, *, <, `tl.dot` the interpreter takes their bits for
  integers.  Convert to fp32 first, as all kernels here do;
- fp8 of other formats than e4m3 (`tl.float8e4nv`), or to and from anything but fp32; and casts
  with `fp_downcast_rounding=`.
"""

import os

import numpy as np
import torch

if not torch.cuda.is_available():  # as in the kernel files, whichever is imported first
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """The bits (uint16) of fp32 x rounded to nearest even in bf16.

    What is beyond its range becomes infinity; NaN stays NaN.
    """
    bits = x.view(np.uint32)
    # Carries into the upper bits from the middle on; at a tie, from odd ones.
    halfway = 0x7FFF + ((bits >> 16) & 1)
    quiet_nan = bits | 0x400000  # its upper bits are not all 0
    rounded = np.where(np.isnan(x), quiet_nan, bits + halfway)
    return (rounded >> 16).astype(np.uint16)


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    """The fp32 numbers whose upper halves are the given bits (uint16) of bf16 numbers: exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_to_e4m3(x: np.ndarray) -> np.ndarray:
    """The codes (uint8) of fp32 x rounded to nearest even in e4m3.

    What is beyond its largest number, 448, becomes that; NaN stays NaN.
    """
    limited = torch.from_numpy(np.array(x, np.float32)).clamp(
        -448, 448
    )  # PyTorch 2.11 has NaN there
    return limited.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def widen_e4m3(codes: np.ndarray) -> np.ndarray:
    """The fp32 numbers that codes (uint8) of e4m3 stand for: exact."""
    return torch.from_numpy(np.array(codes)).view(torch.float8_e4m3fn).float().numpy()


def fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of fp32 or fp16 arrays, rounded once.

    In float64 the product is exact.  The sum may not be, and the nearest float64 could be a tie of
    two fp32 numbers that the sum itself is not.  So an inexact sum becomes the one of its two
    neighbours in float64 whose last bit is 1: never a tie, and on the right side of every one
    (rounding to odd: Boldo and Melquiond, 2008).
    """
    with np.errstate(all="ignore"):  # infinities and NaN come out as they should
        product, z64 = x.astype(np.float64) * y, z.astype(np.float64)
        total = product + z64
        z_part = total - product
        # product + z64 - total, exactly (Knuth's two-sum)
        lost = (product - (total - z_part)) + (z64 - z_part)
        even = total.view(np.int64) & 1 == 0
        other = np.nextafter(total, np.copysign(np.inf, lost))
        return np.where(even & (np.abs(lost) > 0), other, total).astype(z.dtype)


if triton.knobs.runtime.interpret:
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    patch_lang_tensor = interpreter._patch_lang_tensor  # called at every launch
    numpy_cast = InterpreterBuilder.cast_impl
    convert = InterpreterBuilder.create_fp_to_fp

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16 and target == tl.float32:
            return TensorHandle(widen_bf16(src.data), target)
        if source != tl.bfloat16 and target == tl.bfloat16:
            with np.errstate(over="ignore"):
                return TensorHandle(round_to_bf16(src.data.astype(np.float32)), target)
        return numpy_cast(self, src, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.float32 and target == tl.float8e4nv:
            return TensorHandle(round_to_e4m3(src.data), target)
        if source == tl.float8e4nv and target == tl.float32:
            return TensorHandle(widen_e4m3(src.data), target)
        return convert(self, src, dst_type, rounding_mode)

    def create_fma(self, x, y, z):
        return TensorHandle(fused_multiply_add(x.data, y.data, z.data), z.dtype.scalar)

    def patch_tensor(tensor, *scope):
        patch_lang_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_fma = create_fma
