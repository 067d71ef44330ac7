"""What is RMSNorm's alone: its rounding, its programs and partial sums, its module, its operators.

What every function has to do, RMSNorm too, is asked in tests/contracts_*_test.py.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

import rmsnorm_kernel
from harness.benchmark.checking import FLOOR, Check, assert_all_passed, relative_error
from harness.cli.device import DEVICE, HAS_GPU
from rmsnorm_kernel import TritonRMSNorm, rmsnorm_backward, rmsnorm_forward, rmsnorm_reference
from subjects import subject
from subjects.rmsnorm import EPS, RMSNORM, SUBJECTS, make, norm, with_eps
from tests.fixtures import poisoned_outputs

DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}
pytestmark = pytest.mark.usefixtures("poison_new_tensors")


def make_inputs(shape, dtype=torch.float32, weight_dtype=None):
    inputs, douts = make(shape[:-1], shape[-1], dtype, weight_dtype=weight_dtype)
    return *inputs.values(), *douts.values()


def run(x, weight, dy):
    """Return y, dx and dweight."""
    return tuple(subject.run(RMSNORM, norm, {"x": x, "weight": weight}, {"y": dy}).values())


def check_against_float64(x, weight, dy, of=RMSNORM) -> list[Check]:
    """The kernel's y, dx and dw, each against float64."""
    worst = max((x.dtype, weight.dtype), key=FLOOR.get)
    return subject.checks(of, {"x": x, "weight": weight}, {"y": dy}, dtype=worst)


# ---- The numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_reference_is_hugging_faces_formula(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, weight, _ = make_inputs((8, 64), dtype)
    theirs = LlamaRMSNorm(64, EPS).to(DEVICE, dtype)
    theirs.weight.data.copy_(weight)
    assert torch.equal(rmsnorm_reference(x, weight, EPS), theirs(x))


@pytest.mark.parametrize(
    "x_dtype, weight_dtype",
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
def test_mixed_dtypes_are_promoted_as_pytorch_does(x_dtype, weight_dtype):
    x, weight, dy = make_inputs((6, 64), x_dtype, weight_dtype)
    assert_all_passed(check_against_float64(x, weight, dy))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_x_hat_is_rounded_before_the_weight_multiplies_it(dtype):
    # An ulp of difference in rstd moves few entries; the other order of rounding moves a quarter of
    # them.
    x, weight, _ = make_inputs((32, 256), dtype)
    same = norm(x, weight) == rmsnorm_reference(x, weight, EPS)
    assert same.float().mean() > 0.99


def test_row_of_one_column():
    # Small x: where eps does not count, y is the sign of x times w and dx is nothing but rounding
    # errors.
    x, weight, dy = make_inputs((5, 1))
    assert_all_passed(check_against_float64(1e-3 * x, weight, dy))


@pytest.mark.exhaustive
def test_longest_row_that_is_accepted():
    inputs = make_inputs((2, rmsnorm_kernel.MAX_HIDDEN_SIZE))
    assert_all_passed(check_against_float64(*inputs))


@pytest.mark.exhaustive
@pytest.mark.parametrize("n_programs", [1, 3, 100])
def test_any_number_of_programs_gives_the_same_gradients(n_programs, monkeypatch):
    monkeypatch.setattr(rmsnorm_kernel, "MAX_DW_PARTIAL_BYTES", n_programs * 4 * 64)
    assert_all_passed(check_against_float64(*make_inputs((20, 64))))


@pytest.mark.parametrize("n_programs, n_cols", [(1, 64), (63, 70), (64, 32), (150, 70)])
def test_no_partial_sum_is_lost_at_the_end(n_programs, n_cols):
    partial = torch.randn(n_programs, n_cols, device=DEVICE)
    dw = torch.full((n_cols,), math.nan, device=DEVICE)
    grid = (rmsnorm_kernel.triton.cdiv(n_cols, 32),)
    rmsnorm_kernel._rmsnorm_dw_kernel[grid](
        partial, dw, n_programs, n_cols, BLOCK_ROWS=64, BLOCK_COLS=32
    )
    assert relative_error(dw, partial.double().sum(0)) < FLOOR[torch.float32]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dw_error_does_not_grow_with_rows(dtype):
    few, many = (256, 65_536) if HAS_GPU else (8, 384)
    checks = [check_against_float64(*make_inputs((n, 64), dtype))[2] for n in (few, many)]
    assert_all_passed(checks)
    assert checks[1].error <= 2 * checks[0].error + FLOOR[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [-300.0, 1000.0])
def test_large_offset(dtype, offset):
    x, weight, dy = make_inputs((6, 128), dtype)
    assert_all_passed(check_against_float64(x + offset, weight, dy))


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
def test_eps_is_used_where_it_shows(eps):
    x, weight, dy = make_inputs((6, 128))
    assert_all_passed(check_against_float64(1e-3 * x, weight, dy, of=with_eps(eps)))


def test_row_of_zeros_is_finite():
    x, weight, dy = make_inputs((4, 64))
    x[1] = 0.0
    assert_all_passed(check_against_float64(x, weight, dy))


def test_nan_stays_in_its_row():
    x, weight, dy = make_inputs((5, 64), torch.float32)
    clean = run(x, weight, dy)
    x[2, 7] = math.nan
    y, dx, dw = run(x, weight, dy)
    others = [0, 1, 3, 4]
    assert y[2].isnan().all() and dx[2].isnan().all() and dw.isnan().all()
    assert torch.equal(y[others], clean[0][others]) and torch.equal(dx[others], clean[1][others])


# ---- The contract with autograd ------------------------------------------------------------------


@pytest.mark.parametrize("weight", [None, torch.ones(64, device=DEVICE)], ids=["none", "frozen"])
def test_a_weight_that_needs_no_gradient_gets_none_and_no_buffer(weight):
    x, _, dy = make_inputs((9, 64))
    with poisoned_outputs() as shapes:
        norm(x.requires_grad_(), weight).backward(dy)
    assert shapes == [(9, 64), (9,), (9, 64)]  # y, rstd, dx; neither partial sums nor dw
    assert rmsnorm_backward(dy, x, weight, rmsnorm_forward(x, weight, EPS)[1], False)[1] is None


def test_no_buffer_has_the_size_of_x_but_y_and_dx():
    n_rows = 8192 if HAS_GPU else 48  # more than there are programs
    with poisoned_outputs() as shapes:
        run(*make_inputs((n_rows, 64), torch.bfloat16))
    assert [shape for shape in shapes if math.prod(shape) >= n_rows * 64] == 2 * [(n_rows, 64)]


# ---- The module ----------------------------------------------------------------------------------


def with_weight(module):
    """Return the module as a function of x and its weight, if it has one."""
    return lambda x, *weight: functional_call(module, dict(zip(["weight"], weight)), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_module_replaces_llama_rmsnorm_and_shares_its_weight(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, weight, dy = make_inputs((6, 64), dtype)
    theirs = LlamaRMSNorm(64, eps=3e-4).to(DEVICE, dtype).eval()
    theirs.weight.data.copy_(weight)
    ours = TritonRMSNorm.from_llama_rmsnorm(theirs)
    assert ours.weight is theirs.weight and ours.variance_epsilon == 3e-4 and not ours.training
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert ours.extra_repr() == theirs.extra_repr()

    module = replace(with_eps(3e-4), function=with_weight(ours))
    # a small x, so that a wrong eps would show
    assert_all_passed(check_against_float64(1e-2 * x, weight, dy, of=module))


@pytest.mark.parametrize("shape", [(4, 3, 64), (0, 64)])
@pytest.mark.parametrize("affine", [True, False])
def test_module_replaces_torchs_rmsnorm(affine, shape):
    arguments = {"elementwise_affine": affine, "device": DEVICE, "dtype": torch.float32}
    theirs, ours = torch.nn.RMSNorm(64, 1e-2, **arguments), TritonRMSNorm(64, 1e-2, **arguments)
    ours.load_state_dict(theirs.state_dict())
    of = SUBJECTS[0 if affine else 1]
    of = replace(of, function=with_weight(ours), reference=with_weight(theirs))
    assert_all_passed(subject.checks(of, *of.make(shape[:-1], 64, torch.float32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_is_made_where_and_as_told_and_made_anew(dtype):
    module = TritonRMSNorm(48, device="meta", dtype=dtype)
    assert module.weight.device.type == "meta" and module.weight.dtype == dtype
    module = module.to_empty(device=DEVICE)
    module.weight.data.fill_(7.0)  # what memory held
    module.reset_parameters()
    for made in (module, TritonRMSNorm(48, device=DEVICE, dtype=dtype)):
        assert made.weight.dtype == dtype and (made.weight == 1).all()
    assert module.variance_epsilon == 1e-5 and list(module.state_dict()) == ["weight"]


def test_module_without_a_weight_has_no_parameters():
    module = TritonRMSNorm(48, elementwise_affine=False)
    assert module.weight is None and not list(module.parameters()) and not module.state_dict()
    assert repr(module) == "TritonRMSNorm((48,), eps=1e-05, elementwise_affine=False)"
    with pytest.raises(ValueError, match=r"x has shape \(2, 47\), expected \(..., 48\)"):
        module(torch.ones(2, 47, device=DEVICE))
    with pytest.raises(ValueError, match=r"x has shape \(\), expected \(..., 48\)"):
        module(torch.ones((), device=DEVICE))


@pytest.mark.parametrize("shape", [(4, 64), [64]])
def test_module_over_a_shape_is_refused_with_a_sentence(shape):
    with pytest.raises(
        TypeError, match=r"hidden_size is [\[(].*, expected an int: the norm is over the last"
    ):
        TritonRMSNorm(shape)


# ---- Bad input -----------------------------------------------------------------------------------

ONES = torch.ones(4, 64, device=DEVICE)


def test_dy_of_another_shape_is_refused_with_a_sentence():
    rstd = rmsnorm_forward(ONES, ONES[0], EPS)[1]
    with pytest.raises(ValueError, match=r"dy has shape \(3, 64\), expected \(4, 64\)"):
        rmsnorm_backward(ONES[:3], ONES, ONES[0], rstd)


@pytest.mark.parametrize(
    "change", [lambda rstd: rstd[:3], lambda rstd: rstd[:, None], lambda rstd: rstd.half()]
)
def test_rstd_of_another_shape_or_dtype_is_refused_with_a_sentence(change):
    rstd = rmsnorm_forward(ONES, ONES[0], EPS)[1]
    expected = r"rstd has shape .* expected \(4,\)|rstd is .* expected torch.float32"
    with pytest.raises((TypeError, ValueError), match=expected):
        rmsnorm_backward(ONES, ONES, ONES[0], change(rstd))


def test_rstd_may_have_gaps():
    x, weight, dy = make_inputs((5, 64))
    rstd = rmsnorm_forward(x, weight, EPS)[1]
    with_gaps = torch.stack([rstd, 0 * rstd], dim=1)[:, 0]
    results = (rmsnorm_backward(dy, x, weight, r) for r in (rstd, with_gaps))
    assert all(map(torch.equal, *results))
