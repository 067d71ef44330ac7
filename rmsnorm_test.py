"""Is the RMSNorm kernel right?

`python rmsnorm_test.py` prints three checks for each dtype; `pytest rmsnorm_test.py` runs the same checks and
all the others below.  Without a GPU the kernels run on the CPU, in Triton's interpreter, and the tests that
need a GPU are skipped.
"""

from harness import command_line

if __name__ == "__main__":  # before PyTorch is imported, which takes seconds
    command_line.answer_flags(__doc__)

import contextlib
import math
from unittest import mock

import pytest
import torch

import rmsnorm_kernel
from harness import command_line
from harness.checking import (
    DEVICE,
    DTYPE_NAME,
    FLOOR,
    HAS_GPU,
    Check,
    assert_all_passed,
    compare,
    print_checks,
    relative_error,
)
from rmsnorm_kernel import (
    TritonRMSNorm,
    TritonRMSNormFunction,
    rmsnorm_backward,
    rmsnorm_forward,
    rmsnorm_reference,
)
from tests.fixtures import (
    COMPILED_DTYPE,
    captured,
    compiled_once,
    needs_gpu,
    needs_two_gpus,
    pads_rows,
    poisoned_outputs,
    waiting_forbidden,
)

EPS = 1e-5
SHAPE = (4, 512, 4096) if HAS_GPU else (2, 16, 256)  # (B, T, H); LLaMA 3.1 8B has H = 4096
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}


def norm(x, weight, eps=EPS):
    return TritonRMSNormFunction.apply(x, weight, eps)


def make_inputs(shape, dtype, weight_dtype=None, seed=0):
    """x with a mean, weights of both signs and far from 1, and a gradient for y that is not constant."""
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
    return [compare(f"{name} {part}", *abc, dtype=floor_of) for part, *abc in zip(parts, ours, ref64, eager)]


def dtype_checks(dtype) -> list[Check]:
    return check_against_float64(DTYPE_NAME[dtype], *make_inputs(SHAPE, dtype))


def main() -> int:
    if not HAS_GPU:
        print("No GPU found: the kernels run on the CPU, in Triton's interpreter, at smaller shapes.\n")
    print("RMSNorm Correctness Tests")
    print("=" * 60)
    passed = True
    for number, (title, dtype) in enumerate(DTYPES.items(), start=1):
        print(f"\nTest {number}: {title}")
        passed &= print_checks(dtype_checks(dtype))
    print("\n" + "=" * 60)
    print(f"All RMSNorm correctness tests {'PASSED' if passed else 'FAILED'}")
    return 0 if passed else 1


# ---- The numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_forward_and_backward_match_float64(dtype):
    assert_all_passed(dtype_checks(dtype))


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


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(64,), (9, 257), (2, 3, 100), (3, 5000), (2, 16_385)])
def test_without_a_weight(shape, dtype):
    x, _, dy = make_inputs(shape, dtype)
    assert_all_passed(check_against_float64("no weight", x, None, dy))


def test_without_a_weight_nothing_is_computed_for_one():
    x, _, dy = make_inputs((9, 64), torch.float32)
    with poisoned_outputs() as shapes:
        run(norm, x, None, dy)
    assert shapes == [(9, 64), (9,), (9, 64)]  # y, rstd, dx
    _, rstd = rmsnorm_forward(x, None, EPS)
    assert rmsnorm_backward(dy, x, None, rstd)[1] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_x_hat_is_rounded_before_the_weight_multiplies_it(dtype):
    # An ulp of difference in rstd moves few entries; the other order of rounding moves a quarter of them.
    x, weight, _ = make_inputs((32, 256), dtype)
    same = norm(x, weight) == rmsnorm_reference(x, weight, EPS)
    assert same.float().mean() > 0.99


@pytest.mark.parametrize("n_cols", [2, 3, 31, 32, 33, 127, 129, 255, 257, 1000, 1023, 1025])
def test_masked_lanes_do_not_leak_into_the_row(n_cols):
    assert_all_passed(check_against_float64(f"H={n_cols}", *make_inputs((5, n_cols), torch.float32)))


def test_row_of_one_column():
    # Small x: where eps does not count, y is the sign of x times w and dx is nothing but rounding errors.
    x, weight, dy = make_inputs((5, 1), torch.float32)
    assert_all_passed(check_against_float64("H=1", 1e-3 * x, weight, dy))


def test_longest_row_that_is_accepted():
    shape = (2, rmsnorm_kernel.MAX_HIDDEN_SIZE)
    assert_all_passed(check_against_float64("H=32768", *make_inputs(shape, torch.float32)))


@pytest.mark.parametrize("n_rows", [1, 2, 7, 8, 9, 17])  # on the CPU there are at most 8 programs
def test_no_row_is_lost_between_programs(n_rows):
    assert_all_passed(check_against_float64(f"{n_rows} rows", *make_inputs((n_rows, 96), torch.float32)))


@pytest.mark.parametrize("n_programs", [1, 3, 100])
def test_any_number_of_programs_gives_the_same_gradients(n_programs, monkeypatch):
    monkeypatch.setattr(rmsnorm_kernel, "MAX_DW_PARTIAL_BYTES", n_programs * 4 * 64)
    assert_all_passed(check_against_float64("programs", *make_inputs((20, 64), torch.float32)))


@pytest.mark.parametrize("n_programs, n_cols", [(1, 64), (63, 70), (64, 32), (150, 70)])
def test_no_partial_sum_is_lost_at_the_end(n_programs, n_cols):
    partial = torch.randn(n_programs, n_cols, device=DEVICE)
    dw = torch.full((n_cols,), math.nan, device=DEVICE)
    grid = (rmsnorm_kernel.triton.cdiv(n_cols, 32),)
    rmsnorm_kernel._rmsnorm_dw_kernel[grid](partial, dw, n_programs, n_cols, BLOCK_ROWS=64, BLOCK_COLS=32)
    assert relative_error(dw, partial.double().sum(0)) < FLOOR[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dw_error_does_not_grow_with_rows(dtype):
    few, many = (256, 65_536) if HAS_GPU else (8, 384)
    checks = [check_against_float64(f"{n} rows", *make_inputs((n, 64), dtype))[2] for n in (few, many)]
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


# ---- The checks can fail -----------------------------------------------------------------------------------


def wrong_answers(x, weight, dy):
    """name -> (which of y, dx, dw it poses as, a float64 answer with one mistake); "right" has none."""
    x, weight, dy = x.double(), weight.double(), dy.double()
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    x_hat, wdy = x * rstd, weight * dy
    c1 = (wdy * x_hat).mean(-1, keepdim=True)
    y, dx, dw_rows = x_hat * weight, rstd * (wdy - x_hat * c1), dy * x_hat
    dw = dw_rows.sum(0)
    programs = 8
    return {
        "right y": (0, y),
        "right dx": (1, dx),
        "right dw": (2, dw),
        "y zero": (0, 0 * y),
        "y without the weight": (0, x_hat),
        "y of LayerNorm": (0, (x - x.mean(-1, keepdim=True)) * rstd * weight),
        "dx zero": (1, 0 * dx),
        "dx sign flipped": (1, -dx),
        "dx without the c1 term": (1, rstd * wdy),
        "dx with rstd for rstd^3": (1, rstd * (wdy - x * c1 / rstd)),
        "dx without the weight": (1, rstd * (dy - x_hat * (dy * x_hat).mean(-1, keepdim=True))),
        "dx with the mean over a padded block": (1, rstd * (wdy - x_hat * c1 / 2)),
        "dw zero": (2, 0 * dw),
        "dw sign flipped": (2, -dw),
        "dw of x instead of x_hat": (2, (dy * x).sum(0)),
        "dw without its last row": (2, dw_rows[:-1].sum(0)),
        "dw of one program lost": (2, dw - dw_rows[3::programs].sum(0)),
        "dw off by one column": (2, dw.roll(1)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_comparator_rejects_known_wrong_answers(dtype):
    x, weight, dy = make_inputs((32, 256), dtype)
    eager = run(rmsnorm_reference, x, weight, dy)
    ref64 = run(rmsnorm_reference, x.double(), weight.double(), dy.double())
    for name, (part, answer) in wrong_answers(x, weight, dy).items():
        check = compare(name, answer.to(dtype), ref64[part], eager[part])
        assert check.passed == name.startswith("right"), str(check)


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


# ---- Shapes and layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (2, 2, 3, 64)])
def test_one_to_four_dimensions(shape):
    assert_all_passed(check_against_float64(f"{len(shape)}-D", *make_inputs(shape, torch.float32)))


@pytest.mark.parametrize("shape", [(0, 64), (0, 4, 64), (2, 0, 64)])
def test_zero_rows_launch_nothing_and_give_zero_dw(shape):
    x, weight, dy = make_inputs(shape, torch.bfloat16)
    y, dx, dw = run(norm, x, weight, dy)
    assert y.shape == dx.shape == shape and y.dtype == dx.dtype == dw.dtype == torch.bfloat16
    assert torch.equal(dw, torch.zeros_like(weight))


LAYOUTS = {  # name: (shape of the memory, the (..., 64) view of it)
    "transposed rows": ((5, 3, 64), lambda t: t.transpose(0, 1)),
    "transposed columns": ((3, 64, 5), lambda t: t.transpose(1, 2)),
    "permuted 4-D": ((2, 3, 4, 64), lambda t: t.permute(2, 0, 1, 3)),
    "columns from an odd offset": ((7, 131), lambda t: t[:, 3:67]),
    "every second column": ((7, 128), lambda t: t[:, ::2]),
    "every third row": ((20, 64), lambda t: t[1::3]),
    "one row repeated (stride 0)": ((1, 64), lambda t: t.expand(6, 64)),
    "one column repeated (stride 0)": ((6, 1), lambda t: t.expand(6, 64)),
    "one number repeated (strides 0)": ((1, 1), lambda t: t.expand(6, 64)),
}


@pytest.mark.parametrize("shape, view", LAYOUTS.values(), ids=LAYOUTS)
def test_any_strides_of_x(shape, view):
    x = view(make_inputs(shape, torch.float32)[0])
    _, weight, dy = make_inputs(tuple(x.shape), torch.float32, seed=1)
    assert_all_passed(check_against_float64("x", x, weight, dy))


@pytest.mark.parametrize("shape, view", LAYOUTS.values(), ids=LAYOUTS)
def test_any_strides_of_dy(shape, view):
    dy = view(make_inputs(shape, torch.float32)[2])
    x, weight, _ = make_inputs(tuple(dy.shape), torch.float32, seed=1)
    assert_all_passed(check_against_float64("dy", x, weight, dy))


@pytest.mark.parametrize("view", [lambda w: w[::2], lambda w: w[3:67], lambda w: w[:1].expand(64)])
def test_any_stride_of_the_weight(view):
    weight = view(make_inputs((128,), torch.float32)[1])
    x, _, dy = make_inputs((5, 64), torch.float32, seed=1)
    assert_all_passed(check_against_float64("weight", x, weight, dy))


def test_sum_backward_sends_a_gradient_of_stride_zero():
    x, weight, dy = make_inputs((3, 4, 64), torch.float32)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    norm(*leaves).sum().backward()
    _, dx, dw = run(rmsnorm_reference, x.double(), weight.double(), torch.ones_like(dy).double())
    assert relative_error(x.grad, dx) < FLOOR[torch.float32] and relative_error(weight.grad, dw) < 2e-6


def test_gradient_reaches_the_tensor_behind_a_view():
    x, weight, dy = make_inputs((5, 3, 64), torch.float32)
    x.requires_grad_()
    norm(x.transpose(0, 1), weight).backward(dy.transpose(0, 1))
    _, dx, _ = run(rmsnorm_reference, x.double(), weight.double(), dy.double())
    assert relative_error(x.grad, dx) < FLOOR[torch.float32]


# ---- The contract with autograd ----------------------------------------------------------------------------


@pytest.fixture
def leaves():
    x, weight, dy = make_inputs((9, 64), torch.float32)
    _, dx, dw = run(norm, x, weight, dy)
    return x.requires_grad_(), weight.requires_grad_(), dy, dx, dw


def test_gradients_accumulate_instead_of_overwriting(leaves):
    x, weight, dy, dx, dw = leaves
    for _ in range(2):
        norm(x, weight).backward(dy)
    assert torch.equal(x.grad, 2 * dx) and torch.equal(weight.grad, 2 * dw)


def test_second_backward_through_a_retained_graph(leaves):
    x, weight, dy, dx, dw = leaves
    y = norm(x, weight)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    assert torch.equal(x.grad, 2 * dx) and torch.equal(weight.grad, 2 * dw)


def test_two_losses_on_one_tensor(leaves):
    x, weight, dy, dx, dw = leaves
    y = norm(x, weight)
    (y * dy).sum().backward(retain_graph=True)
    (y * -3.0 * dy).sum().backward()
    assert relative_error(x.grad, -2.0 * dx) < 1e-6 and relative_error(weight.grad, -2.0 * dw) < 1e-6


def test_no_grad_gives_the_same_numbers(leaves):
    x, weight, *_ = leaves
    with torch.no_grad():
        y = norm(x, weight)
    assert not y.requires_grad and torch.equal(y, norm(x, weight))


def test_frozen_weight_gets_no_gradient_and_no_buffer(leaves):
    x, weight, dy, dx, _ = leaves
    weight.requires_grad_(False)
    with poisoned_outputs() as shapes:
        norm(x, weight).backward(dy)
    assert shapes == [(9, 64), (9,), (9, 64)]  # y, rstd, dx; neither partial sums nor dw
    assert weight.grad is None and torch.equal(x.grad, dx)
    assert rmsnorm_backward(dy, x, weight, rmsnorm_forward(x, weight, EPS)[1], need_dweight=False)[1] is None


def test_frozen_x_leaves_the_weight_its_gradient(leaves):
    x, weight, dy, _, dw = leaves
    x.requires_grad_(False)
    norm(x, weight).backward(dy)
    assert x.grad is None and torch.equal(weight.grad, dw)


def test_inputs_are_never_changed():
    inputs = make_inputs((9, 64), torch.bfloat16)
    before = [t.clone() for t in inputs]
    run(norm, *inputs)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before))


def test_no_buffer_has_the_size_of_x_but_y_and_dx():
    n_rows = 8192 if HAS_GPU else 48  # more than there are programs
    with poisoned_outputs() as shapes:
        run(norm, *make_inputs((n_rows, 64), torch.bfloat16))
    assert [shape for shape in shapes if math.prod(shape) >= n_rows * 64] == 2 * [(n_rows, 64)]


def test_x_changed_before_the_backward_is_noticed(leaves):
    x, weight, dy, *_ = leaves
    y = norm(x, weight)
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_output_may_be_changed_in_place(leaves):
    x, weight, dy, dx, _ = leaves
    norm(x, weight).mul_(2.0).backward(dy)
    assert torch.equal(x.grad, 2 * dx)


@pytest.mark.parametrize("dy_needs_grad", [True, False])
def test_second_derivative_is_refused_not_silently_zero(leaves, dy_needs_grad):
    x, weight, dy, *_ = leaves
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(norm(x, weight), x, dy.requires_grad_(dy_needs_grad), create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_run_gives_the_same_bits(dtype):
    inputs = make_inputs(SHAPE, dtype)
    first = run(norm, *inputs)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(first, run(norm, *inputs)))


# ---- The module --------------------------------------------------------------------------------------------


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
    with pytest.raises(TypeError, match=r"hidden_size is [\[(].*, expected an int: the norm is over the last"):
        TritonRMSNorm(shape)


def test_module_starts_as_llama_rmsnorm_does():
    module = TritonRMSNorm(48)
    assert torch.equal(module.weight, torch.ones(48)) and module.variance_epsilon == 1e-5
    assert [name for name, _ in module.named_parameters()] == ["weight"]


# ---- Bad input ---------------------------------------------------------------------------------------------

ONES = torch.ones(4, 64, device=DEVICE)
BAD_INPUT = {  # name: (x, weight, exception, what its sentence says)
    "x is a list": ([1.0], ONES[0], TypeError, "x is a list, expected a tensor"),
    "weight is a number": (ONES, 1.0, TypeError, "weight is a float, expected a tensor"),
    "x is int64": (
        ONES.long(),
        ONES[0],
        TypeError,
        "x is torch.int64, expected float16, bfloat16 or float32",
    ),
    "x is float64": (ONES.double(), ONES[0], TypeError, "x is torch.float64, expected float16"),
    "weight is float64": (ONES, ONES[0].double(), TypeError, "weight is torch.float64, expected float16"),
    "weight is elsewhere": (
        ONES,
        ONES[0].to("meta"),
        ValueError,
        f"weight is on meta, expected x's {DEVICE}",
    ),
    "weight is 2-D": (ONES, ONES, ValueError, r"weight has shape \(4, 64\), expected \(H,\)"),
    "weight is 0-D": (ONES, ONES.sum(), ValueError, r"weight has shape \(\), expected \(H,\)"),
    "row too long": (ONES, torch.ones(32_769, device=DEVICE), ValueError, "H from 1 to 32,768"),
    "row empty": (ONES[:, :0], ONES[0, :0], ValueError, "H from 1 to 32,768"),
    "x of another H": (ONES[:, :63], ONES[0], ValueError, r"x has shape \(4, 63\), expected \(..., 64\)"),
    "x is 0-D": (ONES.sum(), ONES[0], ValueError, r"x has shape \(\), expected \(..., 64\)"),
    "x is 0-D, no weight": (ONES.sum(), None, ValueError, r"x has shape \(\), expected \(..., H\) with H from 1"),
    "row empty, no weight": (ONES[:, :0], None, ValueError, "H from 1 to 32,768"),
    "row too long, no weight": (ONES.new_ones(32_769), None, ValueError, "H from 1 to 32,768"),
    "x is None": (None, ONES[0], TypeError, "x is a NoneType, expected a tensor"),
    "x is sparse": (ONES.to_sparse(), ONES[0], TypeError, "x is torch.sparse_coo, expected torch.strided"),
    "weight is sparse": (ONES, ONES[0].to_sparse(), TypeError, "weight is torch.sparse_coo, expected torch.strided"),
    "without memory": (ONES.to("meta"), ONES[0].to("meta"), ValueError, "x is on meta, expected a GPU: move it"),
}


@pytest.mark.parametrize("x, weight, error, sentence", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_refused_with_a_sentence(x, weight, error, sentence):
    with pytest.raises(error, match=sentence):
        norm(x, weight)


def test_dy_of_another_shape_is_refused_with_a_sentence():
    rstd = rmsnorm_forward(ONES, ONES[0], EPS)[1]
    with pytest.raises(ValueError, match=r"dy has shape \(3, 64\), expected x's \(4, 64\)"):
        rmsnorm_backward(ONES[:3], ONES, ONES[0], rstd)


@pytest.mark.parametrize("change", [lambda rstd: rstd[:3], lambda rstd: rstd[:, None], lambda rstd: rstd.half()])
def test_rstd_of_another_shape_or_dtype_is_refused_with_a_sentence(change):
    rstd = rmsnorm_forward(ONES, ONES[0], EPS)[1]
    with pytest.raises(ValueError, match=r"rstd has shape .* expected \(4,\) and torch.float32, on"):
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
    sentence = rf"{name} is a DTensor, expected a plain tensor: pass its to_local\(\) or full_tensor\(\)"
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


def test_subclass_with_memory_of_its_own_is_taken():
    class Named(torch.Tensor):
        pass

    x, weight, _ = make_inputs((5, 64), torch.float32)
    assert torch.equal(norm(x.as_subclass(Named), weight), norm(x, weight))


def test_cpu_tensor_without_the_interpreter_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr(rmsnorm_kernel, "INTERPRETED", False)
    with pytest.raises(ValueError, match="x is on cpu, expected a GPU: move it, or export TRITON_INTERPRET=1"):
        norm(ONES.cpu(), ONES[0].cpu())


# ---- torch.compile -----------------------------------------------------------------------------------------

# The width that is compiled first: the compiler leaves gaps only between rows whose length it knows.
PADDED_WIDTHS = [1289, 5000, 5001] if HAS_GPU else [1289]


def between_products(function):
    """x is neither an input nor a result of the graph: the compiler lays it out; so y, dy and dx."""

    def graph(x, w_in, weight, w_out):
        return function(x @ w_in, weight, EPS) @ w_out

    return graph


def before_a_product(function):
    """x is an input of the graph."""

    def graph(x, weight, w_out):
        return function(x, weight, EPS) @ w_out

    return graph


def run_graph(graph, inputs, dout):
    """The graph's output and a gradient for each of the inputs; None is handed on."""
    inputs = [None if t is None else t.detach().requires_grad_() for t in inputs]
    out = graph(*inputs)
    return out.detach(), *torch.autograd.grad(out, [t for t in inputs if t is not None], dout)


def graph_checks(make_graph, compiled, n_rows, H, affine=True) -> list[Check]:
    x, weight, _ = make_inputs((n_rows, H), COMPILED_DTYPE)
    w_in, w_out = (t.to(DEVICE, COMPILED_DTYPE) for t in (torch.randn(24, H), torch.randn(H, 8)))
    weight = weight if affine else None
    inputs = [x, weight, w_out]
    if make_graph is between_products:
        inputs = [torch.randn(n_rows, 24).to(x), w_in, weight, w_out]
    dout = torch.randn(n_rows, 8).to(x)
    ours = run_graph(compiled, inputs, dout)
    eager = run_graph(make_graph(rmsnorm_reference), inputs, dout)
    wide = [None if t is None else t.double() for t in inputs]
    ref64 = run_graph(make_graph(rmsnorm_reference), wide, dout.double())
    return [compare(f"compiled, {n_rows} x {H}, {i}", *abc) for i, abc in enumerate(zip(ours, ref64, eager))]


@pads_rows
@pytest.mark.parametrize("width", PADDED_WIDTHS)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "make_graph, affine", [(between_products, True), (between_products, False), (before_a_product, True)]
)
def test_torch_compile_of_a_larger_graph(make_graph, affine, dynamic, width):
    compiled = torch.compile(make_graph(norm), fullgraph=True, dynamic=dynamic)
    assert_all_passed(graph_checks(make_graph, compiled, 5, width, affine))
    with compiled_once() if dynamic else contextlib.nullcontext():
        for n_rows, H in ((4, 2048), (16, 48)):
            assert_all_passed(graph_checks(make_graph, compiled, n_rows, H, affine))


@pads_rows
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_torch_compile_gives_eagers_bits(dynamic, frozen):
    compiled = torch.compile(norm, fullgraph=True, dynamic=dynamic)
    for n_rows in (6, 5):
        x, weight, dy = make_inputs((2, n_rows, 256), torch.bfloat16)
        x.requires_grad_()
        weight.requires_grad_(not frozen)
        wanted = (x,) if frozen else (x, weight)
        y, expected_y = compiled(x, weight), norm(x, weight)
        grads, expected = (torch.autograd.grad(out, wanted, dy) for out in (y, expected_y))
        assert all(map(torch.equal, (y, *grads), (expected_y, *expected)))


@pads_rows
@pytest.mark.parametrize("width", PADDED_WIDTHS)
def test_torch_compile_of_a_forward_alone(width):
    x, weight, _ = make_inputs((5, width), COMPILED_DTYPE)
    inputs = torch.randn(5, 24).to(x), torch.randn(24, width).to(x), weight, torch.randn(width, 8).to(x)
    with torch.no_grad():
        out = torch.compile(between_products(norm), fullgraph=True)(*inputs)
        eager = between_products(rmsnorm_reference)(*inputs)
        ref64 = between_products(rmsnorm_reference)(*(t.double() for t in inputs))
    assert_all_passed([compare("no_grad", out, ref64, eager)])


@pads_rows
@pytest.mark.parametrize("shape", [(0, 64), (64,), (2, 3, 4, 64)])
def test_torch_compile_of_any_number_of_dimensions(shape):
    compiled = torch.compile(norm, fullgraph=True)
    x, weight, dy = make_inputs(shape, torch.float32)
    x = x.transpose(0, -2).contiguous().transpose(0, -2) if len(shape) > 2 else x
    assert all(map(torch.equal, run(compiled, x, weight, dy), run(norm, x, weight, dy)))


@pads_rows
def test_torch_compile_of_sum_sends_a_gradient_of_stride_zero():
    x, weight, dy = make_inputs((3, 4, 64), torch.float32)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    torch.compile(lambda x, weight: norm(x, weight).sum(), fullgraph=True)(*leaves).backward()
    _, dx, dw = run(rmsnorm_reference, x.double(), weight.double(), torch.ones_like(dy).double())
    assert relative_error(x.grad, dx) < FLOOR[torch.float32] and relative_error(weight.grad, dw) < 2e-6


@pads_rows
def test_torch_compile_refuses_bad_input_with_the_same_sentence():
    with pytest.raises(Exception, match=r"x has shape \(4, 63\), expected \(..., 64\): fit the weight"):
        torch.compile(norm, fullgraph=True)(ONES[:, :63], ONES[0])


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("need_dweight", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 64), (0, 64)])
def test_operators_promise_torch_compile_what_they_return(shape, affine, need_dweight):
    x, weight, dy = make_inputs(shape, torch.float16, torch.float32)
    weight, dy = (weight, dy) if affine else (None, dy.half())
    x = x.transpose(0, -2).contiguous().transpose(0, -2)
    rstd = rmsnorm_forward(x, weight, EPS)[1]
    torch.library.opcheck(rmsnorm_kernel._forward_operator, (x, weight, EPS))
    torch.library.opcheck(rmsnorm_kernel._backward_operator, (dy, x, weight, rstd, need_dweight))


# ---- What only a GPU can show ------------------------------------------------------------------------------


@needs_gpu
def test_offsets_beyond_int32():
    H, tail = 4096, 4
    n_rows = 2**31 // H + 8  # the last rows start beyond 2**31 elements
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    last = make_inputs((tail, H), torch.bfloat16)
    x, dy = (torch.zeros(n_rows, H, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    x[-tail:], weight, dy[-tail:] = last  # dy is zero elsewhere, so these rows alone make dw
    y, dx, dw = run(norm, x, weight, dy)
    eager = run(rmsnorm_reference, *last)
    ref64 = run(rmsnorm_reference, *(t.double() for t in last))
    assert_all_passed([compare("tail", *abc) for abc in zip((y[-tail:], dx[-tail:], dw), ref64, eager)])
    assert not dx[:-tail].any()


@needs_gpu
def test_forward_and_backward_can_be_captured_in_a_cuda_graph():
    static = make_inputs((64, 1024), torch.bfloat16)
    graph, results = captured(lambda: run(norm, *static))
    for old, new in zip(static, make_inputs((64, 1024), torch.bfloat16, seed=1)):
        old.copy_(new)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, run(norm, *static)))


@needs_gpu
def test_nothing_waits_for_the_gpu():
    inputs = make_inputs((64, 1024), torch.bfloat16)
    run(norm, *inputs)  # compiling may wait
    with waiting_forbidden():
        run(norm, *inputs)


@needs_two_gpus
def test_tensors_on_a_gpu_that_is_not_the_current_one():
    inputs = make_inputs((64, 1024), torch.bfloat16)
    here = run(norm, *inputs)
    with torch.cuda.device(0):
        there = run(norm, *(t.to("cuda:1") for t in inputs))
    assert all(t.device == torch.device("cuda:1") for t in there)
    assert all(torch.equal(a, b.to(a.device)) for a, b in zip(here, there))


@needs_gpu
def test_memory_beyond_the_outputs_is_bounded():
    inputs = make_inputs((8192, 4096), torch.bfloat16)
    run(norm, *inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = run(norm, *inputs)
    extra = torch.cuda.max_memory_allocated() - before
    rstd_bytes = 4 * 8192
    output_bytes = sum(t.numel() * t.element_size() for t in outputs) + rstd_bytes
    assert extra <= output_bytes + 8 * 2**20


@needs_gpu
def test_new_row_counts_do_not_compile_new_kernels(monkeypatch):
    compiled = []
    runtime = rmsnorm_kernel.triton.knobs.runtime
    monkeypatch.setattr(runtime, "jit_post_compile_hook", lambda **info: compiled.append(info["repr"]))
    for name in ("fwd", "bwd", "dw"):
        getattr(rmsnorm_kernel, f"_rmsnorm_{name}_kernel").device_caches.clear()
    run(norm, *make_inputs((48, 320), torch.bfloat16))
    assert len(compiled) == 3, "the hook must see the first compilation, or it proves nothing about the others"
    for n_rows in (1, 2, 15, 16, 17, 1000, 1024):
        run(norm, *make_inputs((n_rows, 320), torch.bfloat16))
    assert compiled[3:] == []


if __name__ == "__main__":
    command_line.run_main(main)
