"""What is RMSNorm's alone: its rounding, its programs and partial sums, its module, its operators.

What every function has to do, RMSNorm too, is asked in tests/contracts_*_test.py.
"""

import math
from unittest import mock

import pytest
import torch

import rmsnorm_kernel
from harness.benchmark.checking import (
    DEVICE,
    FLOOR,
    HAS_GPU,
    Check,
    assert_all_passed,
    compare,
    relative_error,
)
from rmsnorm_kernel import (
    TritonRMSNorm,
    TritonRMSNormFunction,
    rmsnorm_backward,
    rmsnorm_forward,
    rmsnorm_reference,
)
from tests.fixtures import poisoned_outputs

EPS = 1e-5
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}


def norm(x, weight, eps=EPS):
    return TritonRMSNormFunction.apply(x, weight, eps)


def make_inputs(shape, dtype, weight_dtype=None, seed=0):
    """x with a mean, weights of both signs and far from 1, and a gradient for y that is not
    constant.
    """
    generator = torch.Generator().manual_seed(seed)
    weight_dtype = weight_dtype or dtype
    x = 0.5 + 1.5 * torch.randn(shape, generator=generator)
    weight = 0.5 + torch.randn(shape[-1:], generator=generator)
    dy = 0.25 + torch.randn(shape, generator=generator)
    return (
        x.to(DEVICE, dtype),
        weight.to(DEVICE, weight_dtype),
        dy.to(DEVICE, torch.promote_types(dtype, weight_dtype)),
    )


def run(function, x, weight, dy, eps=EPS):
    """(y, dx, dw) of one forward and one backward; x, weight and dy keep their strides.

    No dw without a weight.
    """
    leaves = [t.detach().requires_grad_() for t in (x, weight) if t is not None]
    y = function(leaves[0], None if weight is None else leaves[1], eps)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def check_against_float64(name, x, weight, dy, eps=EPS) -> list[Check]:
    """The kernel's y, dx and dw, each against float64."""
    with poisoned_outputs():
        ours = run(norm, x, weight, dy, eps)
    wide = [None if t is None else t.double() for t in (x, weight, dy)]
    ref64 = run(rmsnorm_reference, *wide, eps)
    eager = run(rmsnorm_reference, x, weight, dy, eps)
    floor_of = max([t.dtype for t in (x, weight) if t is not None], key=FLOOR.get)
    parts = ("Forward", "Backward (dx)", "Backward (dw)")
    return [
        compare(f"{name} {part}", *abc, dtype=floor_of)
        for part, *abc in zip(parts, ours, ref64, eager)
    ]


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
    assert_all_passed(check_against_float64("mixed", x, weight, dy))


def test_without_a_weight_nothing_is_computed_for_one():
    x, _, dy = make_inputs((9, 64), torch.float32)
    with poisoned_outputs() as shapes:
        run(norm, x, None, dy)
    assert shapes == [(9, 64), (9,), (9, 64)]  # y, rstd, dx
    _, rstd = rmsnorm_forward(x, None, EPS)
    assert rmsnorm_backward(dy, x, None, rstd)[1] is None


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
    x, weight, dy = make_inputs((5, 1), torch.float32)
    assert_all_passed(check_against_float64("H=1", 1e-3 * x, weight, dy))


@pytest.mark.exhaustive
def test_longest_row_that_is_accepted():
    shape = (2, rmsnorm_kernel.MAX_HIDDEN_SIZE)
    assert_all_passed(check_against_float64("H=32768", *make_inputs(shape, torch.float32)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("n_programs", [1, 3, 100])
def test_any_number_of_programs_gives_the_same_gradients(n_programs, monkeypatch):
    monkeypatch.setattr(rmsnorm_kernel, "MAX_DW_PARTIAL_BYTES", n_programs * 4 * 64)
    assert_all_passed(check_against_float64("programs", *make_inputs((20, 64), torch.float32)))


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
    checks = [
        check_against_float64(f"{n} rows", *make_inputs((n, 64), dtype))[2] for n in (few, many)
    ]
    assert_all_passed(checks)
    assert checks[1].error <= 2 * checks[0].error + FLOOR[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [-300.0, 1000.0])
def test_large_offset(dtype, offset):
    x, weight, dy = make_inputs((6, 128), dtype)
    assert_all_passed(check_against_float64("offset", x + offset, weight, dy))


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
def test_eps_is_used_where_it_shows(eps):
    x, weight, dy = make_inputs((6, 128), torch.float32)
    assert_all_passed(check_against_float64("small x", 1e-3 * x, weight, dy, eps))


def test_row_of_zeros_is_finite():
    x, weight, dy = make_inputs((4, 64), torch.float32)
    x[1] = 0.0
    assert_all_passed(check_against_float64("zeros", x, weight, dy))


def test_nan_stays_in_its_row():
    x, weight, dy = make_inputs((5, 64), torch.float32)
    clean = run(norm, x, weight, dy)
    x[2, 7] = math.nan
    y, dx, dw = run(norm, x, weight, dy)
    others = [0, 1, 3, 4]
    assert y[2].isnan().all() and dx[2].isnan().all() and dw.isnan().all()
    assert torch.equal(y[others], clean[0][others]) and torch.equal(dx[others], clean[1][others])


# ---- The checks can fail -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_comparator_rejects_the_wrong_eps(dtype):
    x, weight, dy = make_inputs((8, 256), dtype)
    x = 1e-2 * x
    eager = run(rmsnorm_reference, x, weight, dy, 1e-5)
    ref64 = run(rmsnorm_reference, x.double(), weight.double(), dy.double(), 1e-5)
    for ours, *others in zip(run(norm, x, weight, dy, 1e-6), ref64, eager):
        assert not compare("eps 1e-6", ours, *others).passed


def test_comparator_rejects_outputs_that_were_never_written(monkeypatch):
    launches_nothing = mock.MagicMock()
    x, weight, dy = make_inputs((4, 64), torch.float32)
    for kernel, unwritten in (("fwd", [0, 1, 2]), ("bwd", [1, 2]), ("dw", [2])):
        with monkeypatch.context() as patch:
            patch.setattr(rmsnorm_kernel, f"_rmsnorm_{kernel}_kernel", launches_nothing)
            checks = check_against_float64(kernel, x, weight, dy)
        assert [i for i, check in enumerate(checks) if not check.passed] == unwritten


# ---- The contract with autograd ------------------------------------------------------------------


@pytest.fixture
def leaves():
    x, weight, dy = make_inputs((9, 64), torch.float32)
    _, dx, dw = run(norm, x, weight, dy)
    return x.requires_grad_(), weight.requires_grad_(), dy, dx, dw


def test_frozen_weight_gets_no_gradient_and_no_buffer(leaves):
    x, weight, dy, dx, _ = leaves
    weight.requires_grad_(False)
    with poisoned_outputs() as shapes:
        norm(x, weight).backward(dy)
    assert shapes == [(9, 64), (9,), (9, 64)]  # y, rstd, dx; neither partial sums nor dw
    assert weight.grad is None and torch.equal(x.grad, dx)
    assert rmsnorm_backward(dy, x, weight, rmsnorm_forward(x, weight, EPS)[1], False)[1] is None


def test_no_buffer_has_the_size_of_x_but_y_and_dx():
    n_rows = 8192 if HAS_GPU else 48  # more than there are programs
    with poisoned_outputs() as shapes:
        run(norm, *make_inputs((n_rows, 64), torch.bfloat16))
    assert [shape for shape in shapes if math.prod(shape) >= n_rows * 64] == 2 * [(n_rows, 64)]


# ---- The module ----------------------------------------------------------------------------------


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

    leaf = (1e-2 * x).requires_grad_()  # small, so that a wrong eps would show
    y = ours(leaf)
    y.backward(dy)
    ref64 = run(rmsnorm_reference, leaf.double(), weight.double(), dy.double(), 3e-4)
    eager = run(rmsnorm_reference, leaf, weight, dy, 3e-4)
    outs = (y, leaf.grad, theirs.weight.grad)
    assert_all_passed([compare("module", *abc) for abc in zip(outs, ref64, eager)])


@pytest.mark.parametrize("shape", [(4, 3, 64), (0, 64)])
@pytest.mark.parametrize("affine", [True, False])
def test_module_replaces_torchs_rmsnorm(affine, shape):
    x, weight, dy = make_inputs(shape, torch.float32)
    arguments = {"elementwise_affine": affine, "device": DEVICE, "dtype": torch.float32}
    theirs, ours = torch.nn.RMSNorm(64, 1e-2, **arguments), TritonRMSNorm(64, 1e-2, **arguments)
    ours.load_state_dict(theirs.state_dict())
    results = []
    for module in (ours, theirs, theirs):
        module = module.double() if len(results) == 2 else module
        leaf = x.detach().to(x.dtype if len(results) < 2 else torch.float64).requires_grad_()
        if affine:
            module.weight.data.copy_(weight)
        y = module(leaf)
        wanted = [leaf, *module.parameters()]
        results.append((y, *torch.autograd.grad(y, wanted, dy.to(leaf.dtype))))
    ours, eager, ref64 = results
    assert len(ours) == (3 if affine else 2)
    assert_all_passed([compare("module", *abc) for abc in zip(ours, ref64, eager)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_is_made_where_and_as_told(dtype):
    module = TritonRMSNorm(48, device="meta", dtype=dtype)
    assert module.weight.device.type == "meta" and module.weight.dtype == dtype
    assert torch.equal(TritonRMSNorm(48, dtype=dtype).weight, torch.ones(48, dtype=dtype))


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


def test_module_starts_as_llama_rmsnorm_does():
    module = TritonRMSNorm(48)
    assert torch.equal(module.weight, torch.ones(48)) and module.variance_epsilon == 1e-5
    assert [name for name, _ in module.named_parameters()] == ["weight"]


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
    x, weight, dy = make_inputs((5, 64), torch.float32)
    rstd = rmsnorm_forward(x, weight, EPS)[1]
    with_gaps = torch.stack([rstd, 0 * rstd], dim=1)[:, 0]
    results = (rmsnorm_backward(dy, x, weight, r) for r in (rstd, with_gaps))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("which", range(4), ids=["dy", "x", "weight", "rstd"])
def test_dtensor_is_refused_with_a_sentence(as_dtensor, which):
    x, weight, dy = make_inputs((5, 64), torch.float32)
    arguments = [dy, x, weight, rmsnorm_forward(x, weight, EPS)[1]]
    arguments[which] = as_dtensor(arguments[which])
    name = ("dy", "x", "weight", "rstd")[which]
    sentence = (
        rf"{name} is a DTensor, expected a plain tensor: pass its to_local\(\) or full_tensor\(\)"
    )
    with pytest.raises(TypeError, match=sentence):
        rmsnorm_backward(*arguments)
    if name in ("x", "weight"):
        with pytest.raises(TypeError, match=sentence):
            rmsnorm_forward(*arguments[1:3], EPS)


def test_parameter_that_is_a_dtensor_is_refused_with_a_sentence(as_dtensor):
    module = TritonRMSNorm(64).to(DEVICE)
    module.weight = torch.nn.Parameter(as_dtensor(module.weight.detach()))
    with pytest.raises(TypeError, match="weight is a DTensor, expected a plain tensor"):
        module(ONES)


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("need_dweight", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 64), (0, 64)])
def test_operators_promise_torch_compile_what_they_return(shape, affine, need_dweight):
    x, weight, dy = make_inputs(shape, torch.float16, torch.float32)
    weight, dy = (weight, dy) if affine else (None, dy.half())
    x = x.transpose(0, -2).contiguous().transpose(0, -2)
    rstd = rmsnorm_forward(x, weight, EPS)[1]
    torch.library.opcheck(rmsnorm_forward.operator, (x, weight, EPS))
    torch.library.opcheck(rmsnorm_backward.operator, (dy, x, weight, rstd, need_dweight))
