"""RMSNorm and SwiGLU that write FP8: against formulas in float64, and against the separate kernels.

These functions have no gradient; what of the contracts holds without one is asked here.
"""

import math
from functools import partial

import pytest
import torch

from harness.benchmark.checking import relative_error
from harness.cli.device import DEVICE, HAS_GPU
from next_steps.lessons import fp8_casts
from next_steps.lessons.fp8_casts import (
    rmsnorm_fp8,
    rmsnorm_fp8_reference,
    swiglu_fp8,
    swiglu_fp8_backward,
    swiglu_fp8_backward_reference,
    swiglu_fp8_reference,
)
from next_steps.lessons.fp8_kernel import Rows, quantize_rows, quantize_rows_reference
from next_steps.lessons.swiglu_kernel import swiglu_backward, swiglu_forward, swiglu_reference
from rmsnorm_kernel import rmsnorm_forward, rmsnorm_reference
from tests.fixtures import needs_gpu, pads_rows
from tests.fp8_kernel_test import all_equal, assert_repeats_without_waiting, matrix, same
from tests.fp8_kernel_test import make as make_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5
pytestmark = pytest.mark.usefixtures("poison_new_tensors")


make = partial(make_rows, mean=0.2, exponents=(-2, 2))


def make_weight(n, dtype=torch.float32, seed=5):
    """Of both signs and far from 1."""
    generator = torch.Generator().manual_seed(seed)
    return (0.5 + torch.randn(n, generator=generator)).to(DEVICE, dtype)


def norm_inputs(rows=7, n=96, dtype=torch.float32):
    return make(rows, n, dtype=dtype), make_weight(n, dtype)


def swiglu_inputs(rows=7, n=96, dtype=torch.float32):
    """dy, gate, up; gate is about as large as 1."""
    gate = make(1, n * rows, dtype=dtype, seed=1).view(rows, n)
    return make(rows, n, dtype=dtype), gate, make(rows, n, dtype=dtype, seed=2)


def nearly_same(found: Rows, expected: Rows) -> bool:
    """Where one operation is rounded otherwise, a number beside a middle falls to the other side;
    compiled code may do so, the interpreter does not.
    """
    if not HAS_GPU:
        return same(found, expected)
    differs = matrix(found) != matrix(expected)
    close = (matrix(found) - matrix(expected)).abs() <= step(matrix(expected), expected)
    return differs.float().mean() < 1e-2 and bool(close.all())


def step(numbers: torch.Tensor, rows: Rows) -> torch.Tensor:
    """From a number of e4m3 to the next, at most."""
    return torch.maximum(numbers.abs() * 2**-3, rows.scales.double()[:, None] * 2**-9)


def within_e4m3(found: Rows, exact: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
    """Is each number as near to the exact one as rounding to e4m3 allows, beside twice the largest
    error of eager PyTorch in the inputs' dtype?
    """
    bound = step(exact, found) / 2 * 1.01 + 2 * (eager.double() - exact).abs().amax(1)[:, None]
    return (matrix(found) - exact).abs() <= bound + 1e-6 * exact.abs()


# ---- RMSNorm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 31, 96, 1000])
def test_norm_is_the_quantized_unrounded_product(n, dtype):
    """To the bit, given its own rstd, which the order of a sum decides."""
    x, weight = norm_inputs(n=n, dtype=dtype)
    rows, rstd = rmsnorm_fp8(x, weight, EPS)
    x_hat = (x.float() * rstd[:, None]).to(dtype).float()
    assert same(rows, quantize_rows_reference(x_hat * weight.float()))
    expected, rstd_expected = rmsnorm_fp8_reference(x, weight, EPS)
    for other in (rstd_expected, rmsnorm_forward(x, weight, EPS)[1]):
        torch.testing.assert_close(rstd, other, rtol=1e-6, atol=0)
    assert torch.equal(rows.scales, expected.scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_as_near_to_float64_as_e4m3_allows(dtype):
    x, weight = norm_inputs(40, 200, dtype)
    rows, rstd = rmsnorm_fp8(x, weight, EPS)
    exact = rmsnorm_reference(x.double(), weight.double(), EPS)
    eager = rmsnorm_reference(x, weight, EPS)
    assert within_e4m3(rows, exact, eager).all()
    wide = torch.rsqrt(x.double().pow(2).mean(1) + EPS)
    assert relative_error(rstd, wide) < 1e-6
    wrong_eps = rmsnorm_fp8(x, weight, 0.5)[0]
    no_weight = rmsnorm_fp8(x, weight**0, EPS)[0]
    next_row = Rows(rows.codes.view(torch.uint8).roll(1, 0).view(rows.codes.dtype), rows.scales)
    for wrong in (wrong_eps, no_weight, next_row):
        assert not within_e4m3(wrong, exact, eager).all()


def test_norm_of_a_weight_of_another_dtype():
    x, weight = norm_inputs(dtype=torch.bfloat16)
    found, expected = (rmsnorm_fp8(x, w, EPS)[0] for w in (weight, weight.float()))
    assert same(found, expected)


# ---- SwiGLU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 31, 96, 1000])
def test_swiglu_is_that_of_the_separate_kernels(n):
    """Of fp32, whose results are unrounded: to the bit."""
    dy, gate, up = swiglu_inputs(n=n)
    expected = quantize_rows(swiglu_forward(gate, up))
    assert nearly_same(swiglu_fp8(gate, up), expected)
    d, y = swiglu_fp8_backward(dy, gate, up)
    dgate, dup, _ = swiglu_backward(dy, gate, up)
    assert nearly_same(d, quantize_rows(dgate, dup)) and nearly_same(y, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_is_as_near_to_float64_as_e4m3_allows(dtype):
    dy, gate, up = swiglu_inputs(40, 200, dtype)
    wide = [t.double().requires_grad_() for t in (gate, up)]
    exact = swiglu_reference(*wide)
    eager = swiglu_reference(gate, up)
    narrow = [t.detach().clone().requires_grad_() for t in (gate, up)]
    d_exact = torch.cat(torch.autograd.grad(exact, wide, dy.double()), 1)
    d_eager = torch.cat(torch.autograd.grad(swiglu_reference(*narrow), narrow, dy), 1)
    exact = exact.detach()

    d, y = swiglu_fp8_backward(dy, gate, up)
    forward = swiglu_fp8(gate, up)
    assert d.codes.shape == (40, 400) and nearly_same(y, forward)
    assert within_e4m3(forward, exact, eager).all()
    assert within_e4m3(y, exact, eager).all()
    assert within_e4m3(d, d_exact, d_eager).all()

    exchanged, y_exchanged = swiglu_fp8_backward(dy, up, gate)
    zeros, y_of_zeros = swiglu_fp8_backward(0 * dy, gate, up)
    for wrong in (exchanged, zeros, Rows(d.codes, d.scales.roll(1))):
        assert not within_e4m3(wrong, d_exact, d_eager).all()
    assert not within_e4m3(y_exchanged, exact, eager).all()
    assert same(y_of_zeros, y) and (matrix(zeros) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_references_differ_by_a_step_at_most(dtype):
    """An exponential of another library moves a number over the middle of two."""
    dy, gate, up = swiglu_inputs(20, 300, dtype)
    found = swiglu_fp8(gate, up), *swiglu_fp8_backward(dy, gate, up)
    expected = swiglu_fp8_reference(gate, up), *swiglu_fp8_backward_reference(dy, gate, up)
    for ours, eager in zip(found, expected):
        assert torch.equal(ours.scales, eager.scales)
        difference = (matrix(ours) - matrix(eager)).abs()
        assert (difference <= step(matrix(eager), eager)).all()
        assert (difference > 0).float().mean() < 0.02


def test_silu_is_rounded_before_up_multiplies_it():
    _, gate, up = swiglu_inputs(60, 200, torch.bfloat16)
    silu = gate.float() * torch.sigmoid(gate.float())
    unrounded = quantize_rows_reference(silu * up.float())
    twice = quantize_rows_reference((silu.bfloat16().float() * up.float()).bfloat16())
    once = quantize_rows_reference(silu.bfloat16().float() * up.float())

    def differing(rows):
        return (matrix(swiglu_fp8(gate, up)) != matrix(rows)).float().mean()

    assert differing(once) < 1e-3 and differing(unrounded) > 2e-3 and differing(twice) > 2e-3


@pytest.mark.parametrize("chunk", [16, 32, 64, 256])
@pytest.mark.parametrize("n", [16, 31, 65, 130])
def test_chunks_of_any_size(n, chunk, monkeypatch):
    inputs = swiglu_inputs(n=n)
    inputs[1][0, -1] = 50  # the largest is in the last chunk
    expected = swiglu_fp8_backward(*inputs)
    monkeypatch.setattr(fp8_casts, "CHUNK", chunk)
    assert all(map(same, swiglu_fp8_backward(*inputs), expected))


def test_one_scale_for_both_gradients():
    """The larger of them is dup in some rows, dgate in others."""
    dy, gate, up = swiglu_inputs(40)
    up[::2] /= 16
    d, _ = swiglu_fp8_backward(dy, gate, up)
    dgate, dup = (t.abs().amax(1) for t in matrix(d).chunk(2, 1))
    assert (dgate > 2 * dup).any() and (dup > 2 * dgate).any()
    assert torch.equal(d.scales, swiglu_fp8_backward_reference(dy, gate, up)[0].scales)


# ---- Layouts, edges ------------------------------------------------------------------------------


def layouts(n_rows, n, seed):
    wide = make(2 * n_rows, 3 * n, dtype=torch.bfloat16, seed=seed)
    yield wide[:n_rows, n : 2 * n]  # a third of one matrix
    yield wide[:n_rows, : 2 * n : 2]
    yield wide[::2, :n]
    yield wide[:1, :n].expand(n_rows, n)
    yield make(n, n_rows, dtype=torch.bfloat16, seed=seed).t()


def test_any_strides_of_inputs_that_stay_as_they_were():
    contiguous = swiglu_inputs(6, 40, torch.bfloat16)
    before = [t.clone() for t in contiguous]
    weight = make_weight(80, torch.bfloat16)[::2]
    for which in range(3):
        for view in layouts(6, 40, seed=which):
            strided = [*contiguous[:which], view, *contiguous[which + 1 :]]
            copies = [t.contiguous() for t in strided]
            assert all(map(same, swiglu_fp8_backward(*strided), swiglu_fp8_backward(*copies)))
            assert same(swiglu_fp8(*strided[1:]), swiglu_fp8(*copies[1:]))
            found = rmsnorm_fp8(view, weight, EPS)
            expected = rmsnorm_fp8(view.contiguous(), weight.contiguous(), EPS)
            assert same(found[0], expected[0]) and torch.equal(found[1], expected[1])
            assert all(map(torch.equal, strided, copies))
    assert all(map(torch.equal, contiguous, before))


def test_rows_beyond_int32(far_apart):
    dy, gate, up = swiglu_inputs(3, 33, torch.bfloat16)
    weight = make_weight(33, torch.bfloat16)
    far = far_apart(gate)
    assert same(rmsnorm_fp8(far, weight, EPS)[0], rmsnorm_fp8(gate, weight, EPS)[0])
    assert same(swiglu_fp8(far, up), swiglu_fp8(gate, up))
    assert same(swiglu_fp8(up, far), swiglu_fp8(up, gate))
    for which in range(3):
        inputs = [dy, gate, up]
        inputs[which] = gate
        expected = swiglu_fp8_backward(*inputs)
        inputs[which] = far
        assert all(map(same, swiglu_fp8_backward(*inputs), expected))


@needs_gpu
def test_more_than_2_to_the_31_numbers(gpu_memory):
    """Results too: the last rows are those of a few."""
    gpu_memory(20)
    n = 2**14
    wide = torch.zeros(2**17 + 3, n, dtype=torch.bfloat16, device=DEVICE)
    wide[-3:] = make(3, n, dtype=torch.bfloat16)
    weight = make_weight(n, torch.bfloat16)
    found = rmsnorm_fp8(wide, weight, EPS)[0], swiglu_fp8(wide, wide)
    found += swiglu_fp8_backward(wide, wide, wide)
    few = wide[-3:].clone()
    expected = rmsnorm_fp8(few, weight, EPS)[0], swiglu_fp8(few, few)
    expected += swiglu_fp8_backward(few, few, few)
    for rows, of_few in zip(found, expected):
        assert same(Rows(rows.codes[-3:], rows.scales[-3:]), of_few)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_row_that_is_not_finite_stays_alone(which, bad):
    inputs = [t.clone() for t in swiglu_inputs(4, 20)]
    expected = swiglu_fp8(*inputs[1:]), *swiglu_fp8_backward(*inputs)
    inputs[which][2, 3] = bad
    found = swiglu_fp8(*inputs[1:]), *swiglu_fp8_backward(*inputs)
    for rows, before in zip(found, expected):
        others = [0, 1, 3]
        assert same(*(Rows(r.codes[others], r.scales[others]) for r in (rows, before)))
    _, d, y = found
    assert d.codes[2].float().isnan().all()
    assert y.codes[2].float().isnan().all() == (which > 0)
    x, weight = norm_inputs()
    x[2, 3] = bad
    rows, rstd = rmsnorm_fp8(x, weight, EPS)
    assert rows.codes[2].float().isnan().all()
    assert not rows.codes[[0, 1, 3]].float().isnan().any() and rstd[[0, 1, 3]].isfinite().all()


def test_rows_of_zeros():
    dy, gate, up = (t.clone() for t in swiglu_inputs(4, 20))
    dy[1], up[1] = 0, 0
    d, y = swiglu_fp8_backward(dy, gate, up)
    assert (matrix(d)[1] == 0).all() and (matrix(y)[1] == 0).all()
    assert d.scales[1] == y.scales[1] == 2.0**-126
    x, weight = norm_inputs()
    x[0] = 0
    assert (matrix(rmsnorm_fp8(x, weight, EPS)[0])[0] == 0).all()


def test_steep_gates_are_as_in_pytorch():
    gate = torch.tensor([[-1e4, -100.0, -88.5, 88.5, 100.0, 400.0]], device=DEVICE)
    up, dy = torch.full_like(gate, 0.5), torch.full_like(gate, 2.0)
    assert same(swiglu_fp8(gate, up), swiglu_fp8_reference(gate, up))
    found = swiglu_fp8_backward(dy, gate, up)
    assert all(map(same, found, swiglu_fp8_backward_reference(dy, gate, up)))


def test_no_rows():
    x = torch.empty(0, 32, device=DEVICE)
    rows, rstd = rmsnorm_fp8(x, make_weight(32), EPS)
    d, y = swiglu_fp8_backward(x, x, x)
    assert rows.codes.shape == y.codes.shape == swiglu_fp8(x, x).codes.shape == (0, 32)
    assert rstd.shape == d.scales.shape == (0,) and d.codes.shape == (0, 64)


# ---- What of the contracts holds without a gradient ----------------------------------------------


def chain(x, weight, dy):
    """What a layer does with them."""
    rows, rstd = rmsnorm_fp8(x, weight, EPS)
    gate, up = x.chunk(2, 1)
    d, y = swiglu_fp8_backward(dy, gate, up)
    return *rows, rstd, *swiglu_fp8(gate, up), *d, *y


@pytest.mark.exhaustive
@pads_rows
def test_compiled_in_one_graph_it_gives_the_same_bits():
    compiled = torch.compile(lambda x, *others: chain(x * 2, *others), fullgraph=True, dynamic=True)
    for n_rows in (5, 7):
        x, weight, dy = make(n_rows, 138), make_weight(138), make(n_rows, 69, seed=1)
        assert all_equal(compiled(x, weight, dy), chain(x * 2, weight, dy))


@needs_gpu
def test_the_host_waits_for_nothing_and_a_graph_repeats_it():
    inputs = make(64, 1024), make_weight(1024), make(64, 512, seed=1)
    assert_repeats_without_waiting(chain, *inputs)


# ---- What is refused -----------------------------------------------------------------------------

X = torch.ones(4, 32, device=DEVICE)


REFUSED = {
    r"x has shape \(32,\), expected": lambda: rmsnorm_fp8(X[0], X[0], EPS),
    r"weight has shape \(8,\), expected \(32,\)": lambda: rmsnorm_fp8(X, X[0, :8], EPS),
    "weight is torch.float64": lambda: rmsnorm_fp8(X, X[0].double(), EPS),
    "up is torch.float16, expected torch.float32": lambda: swiglu_fp8(X, X.half()),
    r"up has shape \(2, 32\), expected \(4, 32\)": lambda: swiglu_fp8(X, X[:2]),
    r"dy has shape \(4, 8\)": lambda: swiglu_fp8_backward(X[:, :8], X, X),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_bad_input_is_refused(sentence):
    with pytest.raises(ValueError if "shape" in sentence else TypeError, match=sentence):
        REFUSED[sentence]()
