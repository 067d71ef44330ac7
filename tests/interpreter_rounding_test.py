"""Does the interpreter round as a GPU does, and is that so wherever a kernel file is used?

What a user's own program gets is run in a process of its own, which imports no test code.
"""

import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.cli import interpreter
from harness.cli.device import DEVICE, HAS_GPU
from kernel_support import tl, triton
from tests import fp8_kernel_test
from tests.fp8_kernel_test import needs_fp8

HERE = Path(__file__).parents[1]  # the project's folder
INF, NAN = math.inf, math.nan
TINY = 2.0**-149  # the smallest fp32 number above 0


@triton.jit
def _cast_kernel(x_ptr, out_ptr, BLOCK_SIZE: tl.constexpr):
    lane = tl.arange(0, BLOCK_SIZE)
    tl.store(out_ptr + lane, tl.load(x_ptr + lane).to(out_ptr.dtype.element_ty))


@triton.jit
def _fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, BLOCK_SIZE: tl.constexpr):
    lane = tl.arange(0, BLOCK_SIZE)
    x, y, z = tl.load(x_ptr + lane), tl.load(y_ptr + lane), tl.load(z_ptr + lane)
    tl.store(out_ptr + lane, tl.fma(x, y, z))


@triton.jit
def _copy_if_kernel(flag_ptr, x_ptr, out_ptr, N, BLOCK_SIZE: tl.constexpr):
    lane = tl.arange(0, BLOCK_SIZE)
    mask = (lane < N) & tl.load(flag_ptr)
    tl.store(out_ptr + lane, tl.load(x_ptr + lane, mask=mask, other=7.0))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x (n,), n a power of two, converted by a kernel."""
    out = torch.empty_like(x, dtype=dtype)
    _cast_kernel[(1,)](x, out, BLOCK_SIZE=x.numel())
    return out


def fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(z)
    _fma_kernel[(1,)](x, y, z, out, BLOCK_SIZE=z.numel())
    return out


def from_bits(bits: list[int]) -> torch.Tensor:
    """fp32 numbers (n,) with the given bit patterns."""
    return torch.tensor(np.array(bits, dtype=np.uint32).view(np.float32), device=DEVICE)


def from_numpy(numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=DEVICE)


def same(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Where two tensors are equal, zeros' signs included; one NaN is as good as another."""
    return (out.isnan() & expected.isnan()) | (
        (out == expected) & (out.signbit() == expected.signbit())
    )


# ---------------------------------------------------------------------------- fp32 -> bf16


@pytest.mark.parametrize("lower", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_bf16_number_and_what_lies_around_the_middle_to_the_next(lower):
    """All upper halves: zeros, subnormal numbers, the last finite ones, infinities, every NaN."""
    x = from_bits([(upper << 16) + lower for upper in range(2**16)])
    assert same(cast(x, torch.bfloat16), x.bfloat16()).all()


# ---------------------------------------------------------------------------- fp32 -> e4m3

E4M3 = fp8_kernel_test.E4M3.cpu().numpy()  # by its definition: the numbers of the codes 0 to 126


def nearest_e4m3(x: torch.Tensor) -> torch.Tensor:
    """In float64: the nearest, of two the one whose code is even; 448 for what is larger."""
    magnitude = np.minimum(np.abs(x.double().cpu().numpy()), 448)
    below = np.searchsorted(E4M3, magnitude, side="right") - 1
    below = np.where(np.isnan(magnitude), 0, below)
    above = np.minimum(below + 1, 126)
    to_below, to_above = magnitude - E4M3[below], E4M3[above] - magnitude
    code = np.where(to_above < to_below, above, below)
    code = np.where((to_above == to_below) & (above % 2 == 0), above, code)
    number = np.where(np.isnan(magnitude), np.nan, E4M3[code])
    return torch.from_numpy(np.copysign(number, x.double().cpu().numpy())).to(x)


@needs_fp8
def test_any_fp32_number_becomes_the_nearest_of_e4m3():
    bits = torch.randint(2**32, (2**16,), generator=torch.Generator().manual_seed(0)).tolist()
    x = from_bits(bits)
    near = torch.randn(2**16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for numbers in (x, near, near * 100, near * 2.0**-7):
        assert same(cast(numbers, torch.float8_e4m3fn).float(), nearest_e4m3(numbers)).all()


@needs_fp8
def test_what_lies_around_the_middle_of_two_numbers_of_e4m3():
    """Every middle, where the even code is taken, and its neighbours in fp32; both signs."""
    middles = from_numpy((E4M3[:-1] + E4M3[1:]) / 2)
    ends = from_numpy([448, 464, 480, 1e30, INF, NAN, 0, TINY])
    x = torch.cat([middles, ends])
    x = torch.cat([x, x.nextafter(torch.zeros_like(x)), x.nextafter(torch.full_like(x, 500))])
    x = torch.cat([x, -x])
    x = torch.nn.functional.pad(x, (0, 1024 - len(x)))
    assert same(cast(x, torch.float8_e4m3fn).float(), nearest_e4m3(x)).all()


@needs_fp8
def test_every_e4m3_number_becomes_itself_in_fp32():
    codes = torch.arange(256, device=DEVICE).to(torch.uint8).view(torch.float8_e4m3fn)
    found = cast(codes, torch.float32)
    magnitudes = from_numpy([*E4M3, NAN])
    assert same(found, torch.cat([magnitudes, -magnitudes])).all()


# ---------------------------------------------------------------------------- other casts


def test_every_bf16_number_becomes_itself_in_fp32():
    x = torch.arange(2**16, dtype=torch.int32, device=DEVICE).to(torch.int16).view(torch.bfloat16)
    assert same(cast(x, torch.float32), x.float()).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_integers_are_converted_to_bf16_not_taken_for_its_bits(dtype):
    first, step = (-256, 8) if dtype.is_signed else (0, 6)
    x = torch.arange(first, 768, step, device=DEVICE).to(dtype)
    assert torch.equal(cast(x, torch.bfloat16), x.bfloat16())


def test_any_fp32_number_becomes_the_fp16_that_pytorch_makes_of_it():
    bits = torch.randint(2**32, (2**16,), generator=torch.Generator().manual_seed(1)).tolist()
    x = from_bits(bits)
    assert same(cast(x, torch.float16), x.half()).all()


# ---------------------------------------------------------------------------- multiply-add


def nearest(exact: Fraction, dtype: type) -> float:
    """The number of a NumPy dtype nearest to `exact`, of two the one whose last bit is 0."""
    guess = dtype(float(exact))
    around = guess, np.nextafter(guess, dtype(-INF)), np.nextafter(guess, dtype(INF))
    bits = np.uint16 if dtype == np.float16 else np.uint32
    finite = [number for number in around if np.isfinite(number)]
    return float(min(finite, key=lambda n: (abs(Fraction(float(n)) - exact), n.view(bits) & 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["any size", "products cancelled by z", "z near a tie"])
def test_multiply_add_rounds_once(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    x, y, z = torch.randn(3, 1024, generator=generator).to(dtype)
    if kind == "products cancelled by z":
        z = -x * y
    if kind == "z near a tie":  # the product is half of z's last bit, or next to it
        z = torch.rand(1024, generator=generator).to(dtype) + 1
        y = torch.full_like(x, torch.finfo(dtype).eps / 2) * (1 + torch.finfo(dtype).eps)
        x = 1 + torch.randint(-2, 3, (1024,), generator=generator) * torch.finfo(dtype).eps
        x = x.to(dtype)
    out = fma(x.to(DEVICE), y.to(DEVICE), z.to(DEVICE))
    numpy_type = np.float16 if dtype == torch.float16 else np.float32
    for a, b, c, ours in zip(*(t.tolist() for t in (x, y, z, out))):
        assert ours == nearest(Fraction(a) * Fraction(b) + Fraction(c), numpy_type), (a, b, c)


@pytest.mark.parametrize(
    "x, y, z, expected",
    [
        # x * y + z is 2**-70 below the tie of 1 + 2**-23 and 1 + 2**-22, which float64 makes of it
        (2.0**-24 * (1 + 2.0**-23), 1 - 2.0**-23, 1 + 2.0**-23, 1 + 2.0**-23),
        (2.0**-24 * (1 + 2.0**-23), 2.0**-23 - 1, -1 - 2.0**-23, -1 - 2.0**-23),
        (2.0**-75, 2.0**-76, TINY, TINY),  # a product that float64 holds, and fp32 does not
        (TINY, 0.5, TINY, 2 * TINY),
        (3e38, 2.0, -3e38, float(np.float32(3e38))),  # a product beyond fp32
        (3e38, 2.0, 0.0, INF),
        (INF, 0.0, 1.0, NAN),
        (INF, 1.0, -INF, NAN),
        (INF, 1.0, -1.0, INF),
        (1.0, 1.0, NAN, NAN),
        (-1.0, 0.0, 0.0, 0.0),
    ],
)
@pytest.mark.filterwarnings("error")  # of NumPy's, such as "invalid value encountered"
def test_multiply_add_at_the_edges(x, y, z, expected):
    out = fma(*(torch.tensor([value] * 2, device=DEVICE) for value in (x, y, z)))
    assert same(out, torch.tensor([expected] * 2, device=DEVICE)).all()


@pytest.mark.skipif(HAS_GPU, reason="only the interpreter makes types anew")
@pytest.mark.parametrize("shape", [[4], [2, 8], [tl.constexpr(4)]])
@pytest.mark.parametrize("element", [tl.float32, tl.int1, tl.pointer_type(tl.bfloat16)])
def test_types_that_are_kept_are_tritons_own(element, shape):
    kept = tl.core.tensor("handle", tl.block_type(element, shape))
    own = object.__new__(tl.block_type), object.__new__(tl.core.tensor)
    interpreter._block_type(own[0], element, shape)
    interpreter._tensor(own[1], "handle", own[0])
    assert repr(vars(kept.type)) == repr(vars(own[0]))
    assert {name: str(value) for name, value in vars(kept).items()} == {
        name: str(value) for name, value in vars(own[1]).items()
    }


@pytest.mark.parametrize("flag", [False, True])
def test_one_flag_masks_all_lanes(flag):
    """Triton 3.9's interpreter refuses a mask that is made so."""
    x, out = torch.arange(4.0, device=DEVICE), torch.empty(4, device=DEVICE)
    _copy_if_kernel[(1,)](torch.tensor([flag], device=DEVICE), x, out, 3, BLOCK_SIZE=4)
    assert out.tolist() == ([0.0, 1.0, 2.0, 7.0] if flag else [7.0] * 4)


# ---------------------------------------------------------------------------- where a user has it


def run(code: str, **env: str) -> list[float]:
    """Return the numbers that a program prints, which is run on the CPU."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env = {**inherited, "CUDA_VISIBLE_DEVICES": "", **env}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=env)
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


COMPILES = "torch._inductor.runtime.triton_helpers"  # what torch.compile imports


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "first",
    ["kernel_support", "harness.cli.device", "triton", COMPILES, "transformers, triton", "peft"],
)
def test_import_order_does_not_matter(first):
    code = f"""
import {first}, sys
early = "triton" in sys.modules
import torch, rmsnorm_kernel
import kernel_support
from triton.runtime.interpreter import InterpreterBuilder
patched = InterpreterBuilder.cast_impl is kernel_support.cast_impl
patched &= InterpreterBuilder.create_fma is kernel_support.create_fma
# tl.sum and others were compiled where triton came first
languages = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
for holder in [*languages, kernel_support.tl.tensor]:
    patched &= kernel_support.JITFunction not in map(type, vars(holder).values())
norm, x = rmsnorm_kernel.TritonRMSNorm(4, 1e-5), torch.arange(8.0).view(2, 4).requires_grad_()
y, dy = norm(x), torch.randn(2, 4)
expected = rmsnorm_kernel.rmsnorm_reference(x, norm.weight, 1e-5)
dx, expected_dx = (torch.autograd.grad(each, x, dy)[0] for each in (y, expected))
right = torch.allclose(y, expected) and torch.allclose(dx, expected_dx, atol=1e-6)
print(int(early), int(kernel_support.INTERPRETED), int(patched), int(right))
"""
    early, *others = run(code)
    assert others == [1, 1, 1]
    assert early or first == "accelerate", "this order tests nothing"


@pytest.mark.exhaustive
def test_nothing_is_changed_where_kernels_are_compiled():
    code = "import sys, harness.cli.device, rmsnorm_kernel; "
    code += "print(int('triton.runtime.interpreter' in sys.modules))"
    assert run(code, TRITON_INTERPRET="0") == [0]
