"""What AdamW with 8-bit moments has alone; adamw_test.py tests what both kernels have.

Moments are compared with what they are before the step codes them: near the middle between two
codes either is right.
"""

import pytest
import torch

from harness.benchmark.checking import assert_all_passed, compare
from harness.cli.device import DEVICE, HAS_GPU
from next_steps.lessons.adamw8 import (
    BLOCK,
    Moments,
    adamw8_reference,
    adamw8_step,
    dequantize_moments,
    new_moments,
    quantize_moments,
)
from next_steps.lessons.adamw_kernel import adamw_reference
from tests.adamw_test import BF16, CODES, FP16, FP32, NUMBERS, SETTINGS, counted, gradients, randn
from tests.adamw_test import kernel_steps as steps_with

SHAPE = (4096, 4096) if HAS_GPU else (5, 501)  # on the CPU: three programs, ten blocks
KINDS = {"FP32": (FP32, None), "BF16": (BF16, None), "FP16": (FP16, None), "stochastic": (BF16, 0)}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def uneven(p, steps):
    """Return gradients whose elements differ in size: most by up to e**2, a few by 100 more."""
    sizes = torch.exp(randn(*p.shape, seed=7))
    sizes = torch.where(randn(*p.shape, seed=8) > 2.3, 100.0, 1.0) * sizes
    return [(g.float() * sizes).to(p) for g in gradients(p, steps)]


def kernel_steps(start, grads, **options):
    """Return (the change of a parameter, its Moments) after steps with the kernel."""
    change, *moments = steps_with(start, grads, moments_dtype=CODES, **options)
    return change, Moments(*moments)


# ---- The numbers -------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_steps_match_the_reference(kind):
    """What one step adds to the weights, and m and v."""
    dtype, seed = KINDS[kind]
    start = randn(*SHAPE, dtype=dtype)
    g, m = uneven(start, 2)
    before = quantize_moments(m.float(), 1.5 * m.float().square())
    p, ours = start.clone(), Moments(*(t.clone() for t in before))
    adamw8_step(p, g, *ours, counted(3), *NUMBERS, seed=seed)
    wide = start.double(), g.double(), *dequantize_moments(before, torch.float64)
    p64, *exact = adamw_reference(*wide, 4, *NUMBERS)
    eager, theirs = adamw8_reference(start.float(), g.float(), before, 4, *NUMBERS)
    changes = (each.double() - start.double() for each in (p, p64, eager.to(dtype)))
    found = [compare("weights", *changes, dtype=dtype)]
    ours, theirs = (dequantize_moments(each, torch.float64) for each in (ours, theirs))
    for name, *abc in zip(("m", "v"), ours, exact, theirs):
        found.append(compare(name, *abc, dtype=FP32))
    assert_all_passed(found)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_codes_are_the_references(dtype):
    start = randn(*SHAPE, dtype=dtype)
    grads = uneven(start, 3)
    _, ours = kernel_steps(start, grads)
    p, theirs = start, new_moments(start)
    for step, g in enumerate(grads, start=1):
        scalars = step, 1e-3, 0.9, 0.999, 1e-8, 1e-2
        new, theirs = adamw8_reference(p.float(), g.float(), theirs, *scalars)
        p = new.to(dtype)
    for a, b in zip(ours[:2], theirs[:2]):
        apart = (a.int() - b.int()).abs()
        # a GPU divides and takes roots in its own way, which may tip what lies in the middle
        assert apart.double().mean() < 1e-3 and (apart > 1).double().mean() < 1e-4
        assert len(a.unique()) > 100, "the comparison must see many codes"
    # where a code has tipped, the next step's largest may differ by what a code is apart: 4 / 127
    apart = (ours.scales / theirs.scales - 1).abs()
    assert (apart > 1e-6).double().mean() < 1e-4 and apart.max() < 4 / 127


@pytest.mark.parametrize("seed", [None, 0])
def test_first_step_is_that_of_fp32_moments_to_the_bit(seed):
    """Codes are what a step leaves, not what it computes with; the random bits are the same."""
    start = randn(2500, dtype=BF16)
    grads = uneven(start, 1)
    plain, _, _ = steps_with(start, grads, **SETTINGS, seed=seed, moments_dtype=FP32)
    assert torch.equal(kernel_steps(start, grads, **SETTINGS, seed=seed)[0], plain)


# ---- What 8 bits can hold ------------------------------------------------------------------------


def test_a_code_is_the_nearest_one_and_v_has_none_for_0():
    ratios = 10.0 ** (-12 * torch.rand(64, BLOCK, generator=torch.Generator().manual_seed(0)))
    ratios[:, 5] = 1.0  # to the largest of the block
    x, sign = ratios.to(DEVICE).double(), randn(64, BLOCK).sign()
    m, v = dequantize_moments(quantize_moments(3e-5 * x * sign, (7e4 * x) ** 2), torch.float64)
    m_code, v_code = 127 * (m * sign / 3e-5) ** 0.25, 256 * (v.sqrt() / 7e4) ** 0.25
    m_exact, v_exact = 127 * x**0.25, 256 * x**0.25
    assert (m_code - m_exact).abs().max() < 0.5001 and (m == 0).any()
    assert (v_code - v_exact)[v_exact > 0.5].abs().max() < 0.5001
    assert (v_exact < 0.5).any() and (v_code[v_exact < 0.5] > 0.999).all(), "rounded up"


def test_an_outlier_costs_precision_in_its_own_block_alone():
    m = 0.01 * randn(4 * BLOCK).double()
    clean, _ = dequantize_moments(quantize_moments(m, m.square()), torch.float64)
    m[BLOCK + 5] = 1e4
    hit, _ = dequantize_moments(quantize_moments(m, m.square()), torch.float64)
    same = (hit == clean).view(4, BLOCK).all(1)
    assert same.tolist() == [True, False, True, True]


@pytest.mark.parametrize("small", [1e-3, 1e-7, 1e-12])
def test_no_step_explodes_where_one_element_of_a_block_is_large(small):
    """If v had a code for 0, eps alone would divide m, whose block has another scale."""
    start, zero = torch.zeros(2, BLOCK, device=DEVICE)
    m = torch.full((BLOCK,), 1e8 * small, device=DEVICE)
    v = m.square()
    v[3] = 1e16  # of a gradient that has become small since
    moments, p = quantize_moments(m, v), start.clone()
    settings = (1.0, 0.9, 0.999, 1e-8, 0.0)
    wide = (t.double() for t in (start, zero, m, v))
    exact, _, _ = adamw_reference(*wide, 10, *settings)
    adamw8_step(p, zero, *moments, counted(9), *settings)
    others = torch.arange(BLOCK, device=DEVICE) != 3
    assert 0 < p[others].abs().max() <= 1.5 * exact[others].abs().max()
    assert (moments.m[others] > 0).all()


def test_second_moment_decays_by_a_tenth_of_a_percent_a_step():
    """In bf16 it never does; here a block's scale does, which is fp32."""
    p, zero = randn(BLOCK), torch.zeros(BLOCK, device=DEVICE)
    moments = quantize_moments(zero, randn(BLOCK, seed=1).abs())
    _, before = dequantize_moments(moments, FP32)
    for done in range(100):
        adamw8_step(p, zero, *moments, counted(done), 0.0, 0.9, 0.999, 1e-8, 0.0)
    _, after = dequantize_moments(moments, FP32)
    torch.testing.assert_close(after, before * 0.999**100, rtol=1e-3, atol=0.0)


# ---- Numbers that are none -----------------------------------------------------------------------


def test_square_beyond_fp32_is_forgotten_with_its_gradient():
    start = randn(600)
    grads = gradients(start, 2)
    grads[0][7] = 1e30
    change, moments = kernel_steps(start, grads)
    m, v = dequantize_moments(moments, FP32)
    assert change.isfinite().all() and m.isfinite().all() and v.isfinite().all()
    assert change.abs().max() < 0.1
