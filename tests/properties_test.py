"""Do the kernels keep their promises on inputs that nobody chose?

Hypothesis draws them: shapes, memory layouts, dtypes, magnitudes, targets, upstream gradients.
Where a property fails, it searches for the smallest input that still fails and prints it as the
plain numbers from which the tensors are made.  The draws are the same on every run.

The first properties compare with float64, as all other tests do.  The others need no reference:
they say how two results of one kernel belong together, most of them to the bit.

One kind of draw is set aside: where the right answer is nearly all cancellation, eager PyTorch,
which sets the allowance, is exact or 10 % wrong by luck.  It is recognised by its condition number,
never by the kernel's error.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cross_entropy_kernel import TritonCrossEntropyLoss
from cross_entropy_test import compare_both, loss_and_gradient, reference_and_eager, small_tiles  # noqa: F401  a fixture that acts in this file too
from harness.checking import (
    DEVICE,
    FLOOR,
    assert_all_passed,
)
from rmsnorm_test import check_against_float64, norm
from rmsnorm_test import run as run_norm

SINGLE, HALVES = torch.float32, [torch.float16, torch.bfloat16]
DTYPES = st.sampled_from([SINGLE, *HALVES])
NAN, INF = float("nan"), float("inf")

# inf - inf and 0 * inf are the right answers to some draws; the interpreter's NumPy comments on
# them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("poison_new_tensors"),
]


def examples(number):
    # as many on a GPU: there nearly every one of them compiles a kernel
    return settings(max_examples=number, derandomize=True, deadline=None)


# ---------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor lie in memory."""

    order: tuple[int, ...]  # the dimensions, from the outermost in memory to the innermost
    steps: tuple[
        int, ...
    ]  # per dimension: 1 takes every element, 2 every other one, 0 repeats the first
    gap: int = 0  # unused elements behind each run of the innermost dimension
    offset: int = 0  # unused elements before the first one

    def first_of_repeated(self, values):
        return values[tuple(slice(None if step > 0 else 1) for step in self.steps)]

    def place(self, values):
        """The values, laid out so.  What lies between them is NaN, or no class: nothing may read
        it.
        """
        strides, size = [0] * values.ndim, 1
        for dim in reversed(self.order):
            if self.steps[dim] > 0:
                strides[dim] = size * self.steps[dim]
                size = strides[dim] * values.shape[dim] + (self.gap if dim == self.order[-1] else 0)
        memory = values.new_full(
            (self.offset + size,), NAN if values.is_floating_point() else -12_345
        )
        once = self.first_of_repeated(values)
        memory.as_strided(once.shape, strides, self.offset).copy_(once)
        return memory.as_strided(values.shape, strides, self.offset)


def layouts(ndim):
    gaps, in_order = st.integers(0, 9), tuple(range(ndim))
    rows = {"order": st.just(in_order), "steps": st.just((1,) * ndim)}
    anything = {
        "order": st.permutations(in_order).map(tuple),
        "steps": st.tuples(*[st.sampled_from([1, 2, 0])] * ndim),
    }
    return st.one_of(st.builds(Layout, **kind, gap=gaps, offset=gaps) for kind in (rows, anything))


# No row, one, more than the CPU has programs; columns next to powers of two, few of them multiples
# of 8.
BATCHES = st.sampled_from([(3,), (), (1,), (2,), (9,), (2, 3), (3, 2), (2, 1, 2), (0,), (2, 0)])
COLUMNS = st.sampled_from(
    [5, 1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129]
) | st.integers(1, 150)
SHAPES = st.tuples(BATCHES, COLUMNS).map(lambda shape: (*shape[0], shape[1]))
MATRICES = st.tuples(st.integers(2, 6), COLUMNS)
SCALES = st.sampled_from(["1", "0", "tiny", "huge"])


def scale_of(word, *dtypes):
    """Of an upstream gradient: as far from 1 as the dtypes of what is computed from it allow."""
    exponent = 8.0 if torch.float16 in dtypes else 60.0
    return {"1": 1.0, "0": 0.0, "tiny": 2.0**-exponent, "huge": 2.0**exponent}[word]


def cases(shapes, choices, fixed):
    """Namespaces of a shape, of what `fixed` says, and of one draw for each other name in
    `choices`.
    """

    def of_shape(shape):
        decided = {name: st.just(value) for name, value in {"shape": shape, **fixed}.items()}
        return st.builds(SimpleNamespace, **{**choices(shape), **decided})

    return shapes.flatmap(of_shape)


def norm_cases(shapes=SHAPES, **fixed):
    def choices(shape):
        return {
            "dtype": DTYPES,
            "weight_dtype": DTYPES,
            "x": layouts(len(shape)),
            "weight": layouts(1),
            "dy": layouts(len(shape)),
            "x_mean": st.sampled_from([0.5, 0.0, -20.0]),
            "x_scale": st.sampled_from([1.0, 2.0**-10, 2.0**9]),
            "dy_scale": SCALES,
            "eps": st.sampled_from([1e-5, 1e-6, 1e-2, 0.0]),
            "seed": st.integers(0, 2**16),
        }

    return cases(shapes, choices, fixed)


def norm_inputs(case):
    generator = torch.Generator().manual_seed(case.seed)
    x = (case.x_mean + torch.randn(case.shape, generator=generator)) * case.x_scale
    weight = 0.5 + torch.randn(case.shape[-1:], generator=generator)
    dy = 0.25 + torch.randn(case.shape, generator=generator)
    dy *= scale_of(case.dy_scale, case.dtype, case.weight_dtype)
    return (
        case.x.place(x.to(DEVICE, case.dtype)),
        case.weight.place(weight.to(DEVICE, case.weight_dtype)),
        case.dy.place(dy.to(DEVICE, torch.promote_types(case.dtype, case.weight_dtype))),
    )


def loss_cases(shapes=SHAPES, **fixed):
    def choices(shape):
        return {
            "dtype": DTYPES,
            "logits": layouts(len(shape)),
            "targets": layouts(len(shape) - 1),
            "upstream": layouts(len(shape) - 1),
            "target_dtype": st.sampled_from([torch.int64, torch.int32]),
            "ignore_index": st.sampled_from([-100, -1, 0, shape[-1] // 2, shape[-1], 2**31 - 1]),
            "ignored": st.sampled_from([0.3, 0.0, 1.0]),  # the share of rows
            "masked": st.sampled_from([0.0, 0.5, 1.0]),  # the share of logits that are -inf
            "mean": st.sampled_from([0.0, 80.0, -1000.0]),
            "scale": st.sampled_from([3.0, 0.1, 30.0]),
            "confident": st.booleans(),  # is every other row sure of its target?
            "reduction": st.sampled_from(["mean", "sum", "none"]),
            "upstream_scale": SCALES,
            "inplace": st.booleans(),
            "seed": st.integers(0, 2**16),
        }

    return cases(shapes, choices, fixed)


def loss_inputs(case):
    """Logits, targets and grad_output."""
    generator = torch.Generator().manual_seed(case.seed)
    *batch, vocab = case.shape
    logits = case.mean + case.scale * torch.randn(case.shape, generator=generator)
    targets = torch.randint(vocab, batch, generator=generator)
    targets[torch.rand(batch, generator=generator) < case.ignored] = case.ignore_index
    targets = case.targets.first_of_repeated(targets).expand(batch)
    # An ignored row too keeps a column that is not masked: without any, PyTorch's own gradient of
    # it is NaN.
    is_target = targets.clamp(0, vocab - 1).unsqueeze(-1) == torch.arange(vocab)
    if case.confident:
        logits.view(-1, vocab)[::2] += 10 * is_target.view(-1, vocab)[::2]
    if (
        0 not in case.logits.steps
    ):  # else the repeated logit would be -inf where it is the target's, too
        logits[(torch.rand(case.shape, generator=generator) < case.masked) & ~is_target] = -INF
    upstream = torch.randn(batch, generator=generator) * scale_of(case.upstream_scale, case.dtype)
    return (
        case.logits.place(logits.to(DEVICE, case.dtype)),
        case.targets.place(targets.to(DEVICE, case.target_dtype)),
        case.upstream.place(upstream.to(DEVICE))
        if case.reduction == "none"
        else upstream.to(DEVICE).sum(),
    )


def options(case):
    return {"ignore_index": case.ignore_index, "reduction": case.reduction}


def run_loss(case, logits, targets, upstream):
    def kernel(logits, targets):
        if case.inplace:
            logits = logits.clone(
                memory_format=torch.contiguous_format
            )  # a result, which may be overwritten
        return TritonCrossEntropyLoss(**options(case), inplace=case.inplace)(logits, targets)

    return loss_and_gradient(kernel, logits, targets, upstream)


def random_order(case):
    return torch.randperm(case.shape[0], generator=torch.Generator().manual_seed(case.seed)).to(
        DEVICE
    )


def place_rows_alike(tensor):
    """Contiguous but for a gap, so that all rows begin alike: how a row is summed may depend on
    where it begins.
    """
    return Layout((0, 1), (1, 1), gap=-tensor.shape[1] % 64).place(tensor)


# ---------------------------------------------------------------------------- compared with float64


def norm_is_well_conditioned(x, weight, dy, eps):
    """dx and dw are no less than a quarter of the terms they are made of, and fp16, where it is
    used, holds them.
    """
    limit = 2.0**14 if torch.float16 in (x.dtype, weight.dtype) else INF
    x, dy, weight = (t.double().reshape(-1, t.shape[-1]) for t in (x, dy, weight))
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x_hat, wdy = x * rstd, weight * dy
    dx = rstd * (wdy - x_hat * (wdy * x_hat).mean(-1, keepdim=True))
    dw, dw_terms = (dy * x_hat).sum(0), (dy * x_hat).abs().sum(0)
    in_range = all((t.abs() < limit).all() for t in (dx, dw, x_hat * weight))
    return in_range and (rstd * wdy).norm() <= 4 * dx.norm() and dw_terms.norm() <= 4 * dw.norm()


@examples(100)
@given(norm_cases())
def test_norm_is_as_exact_as_eager(case):
    inputs = norm_inputs(case)
    assume(norm_is_well_conditioned(*inputs, case.eps))
    assert_all_passed(check_against_float64("norm", *inputs, case.eps))


def loss_is_well_conditioned(ref64, targets, upstream, case):
    """No loss near 0, no softmax within 1/8 of one-hot, none of less than 2**-20 in all that is not
    the target.
    """
    valid = targets != case.ignore_index
    row_upstream = (upstream.double() * valid).norm() / (
        valid.sum() if case.reduction == "mean" else 1
    )
    is_target = targets.unsqueeze(-1) == torch.arange(case.shape[-1], device=DEVICE)
    loss, target, other = (
        t.norm() for t in (ref64[0], ref64[1] * is_target, ref64[1] * ~is_target)
    )
    least = ((loss, 0.1), (target, row_upstream / 8), (other, row_upstream * 2**-20))
    return all(size == 0 or size >= limit for size, limit in least)


@examples(120)
@given(loss_cases())
def test_loss_is_as_exact_as_eager(case):
    logits, targets, upstream = loss_inputs(case)
    if case.inplace and case.dtype != SINGLE:
        upstream = (
            upstream.sign()
        )  # another gradient than 1 or -1 rounds the one already stored a second time
    ours = run_loss(case, logits, targets, upstream)
    if case.reduction == "mean" and (targets == case.ignore_index).all():
        assert ours[0].isnan() and (ours[1] == 0).all()
        return
    ref64, eager = reference_and_eager(logits, targets, upstream, **options(case))
    assume(loss_is_well_conditioned(ref64, targets, upstream, case))
    assert_all_passed(compare_both("loss", ours, ref64, eager, targets))


@examples(25)
@given(loss_cases(dtype=SINGLE, mean=0.0, ignored=0.3))
def test_number_added_to_a_rows_logits_changes_nothing(case):
    logits, targets, upstream = loss_inputs(case)
    assume((targets != case.ignore_index).any())
    logits = (logits * 2**8).round() / 2**8  # so that the sums below are exact
    shift = torch.randint(
        -1000, 1000, (*case.shape[:-1], 1), generator=torch.Generator().manual_seed(case.seed)
    )
    shifted = case.logits.place(logits + shift.to(DEVICE))
    ref64, _ = reference_and_eager(case.logits.place(logits), targets, upstream, **options(case))
    _, eager = reference_and_eager(shifted, targets, upstream, **options(case))
    assume(loss_is_well_conditioned(ref64, targets, upstream, case))
    assert_all_passed(
        compare_both("shifted", run_loss(case, shifted, targets, upstream), ref64, eager, targets)
    )


@examples(25)
@given(loss_cases(dtype=SINGLE, reduction="none"))
def test_gradient_of_a_row_sums_to_zero(case):
    logits, targets, upstream = loss_inputs(case)
    _, gradient = run_loss(case, logits, targets, upstream)
    assert (gradient.double().sum(-1).abs() <= FLOOR[SINGLE] * upstream.abs()).all()


# ---------------------------------------------------------------------------- fp16 and bf16 round,
# and only that


def assert_rounded_once(half, single):
    """Within half an ulp of the fp32 result."""
    limits = torch.finfo(half.dtype)
    ulp = torch.ldexp(torch.full_like(single, limits.eps / 2), torch.frexp(single).exponent)
    allowed = ulp.clamp(min=limits.tiny * limits.eps) / 2
    allowed += (
        FLOOR[SINGLE] * single.abs().amax()
    )  # two fp32 sums, which a GPU may take in another order
    assert ((half.float() - single).abs() <= allowed).all()


@examples(25)
@given(norm_cases(MATRICES, dtype=torch.float16, x_scale=1.0, eps=1e-5), st.sampled_from(HALVES))
def test_half_precision_only_rounds_the_norm(case, dtype):
    x, weight, dy = (t.to(dtype) for t in norm_inputs(case))
    weight = (
        torch.exp2(weight.round()) * weight.sign()
    )  # powers of two, so that y too is rounded once: as x_hat
    halves = run_norm(norm, x, weight, dy, case.eps)
    singles = run_norm(norm, x.float(), weight.float(), dy.float(), case.eps)
    for half, single in zip(halves, singles):
        assert_rounded_once(half, single)


@examples(25)
@given(
    loss_cases(MATRICES, dtype=torch.float16, ignored=0.3, inplace=False), st.sampled_from(HALVES)
)
def test_half_precision_only_rounds_the_gradient(case, dtype):
    logits, targets, upstream = loss_inputs(case)
    assume((targets != case.ignore_index).any())
    loss, gradient = run_loss(case, logits.to(dtype), targets, upstream)
    single_loss, single_gradient = run_loss(case, logits.to(dtype).float(), targets, upstream)
    assert ((loss - single_loss).abs() <= FLOOR[SINGLE] * single_loss.abs()).all()
    assert_rounded_once(gradient, single_gradient)


# ---------------------------------------------------------------------------- rows do not know of
# each other

GARBAGE = st.sampled_from([0.0, 1e4, INF, -INF, NAN])


@examples(20)
@given(norm_cases(MATRICES), GARBAGE)
def test_norm_of_a_row_does_not_depend_on_the_others(case, garbage):
    assume(0 not in (case.x.steps[0], case.dy.steps[0]))  # else the rows are one row
    x, weight, dy = norm_inputs(case)
    kept = torch.arange(len(x), device=DEVICE) == case.seed % len(x)
    other_x, other_dy = (t.where(kept[:, None], garbage) for t in (x, dy))
    before = run_norm(norm, x, weight, dy, case.eps)
    after = run_norm(norm, case.x.place(other_x), weight, case.dy.place(other_dy), case.eps)
    assert all(torch.equal(a[kept], b[kept]) for a, b in zip(before[:2], after[:2]))


@examples(20)
@given(norm_cases(MATRICES))
def test_permuted_rows_permute_the_norm(case):
    x, weight, dy = norm_inputs(case)
    order = random_order(case)
    y, dx, _ = run_norm(norm, place_rows_alike(x), weight, place_rows_alike(dy), case.eps)
    permuted = run_norm(
        norm, place_rows_alike(x[order]), weight, place_rows_alike(dy[order]), case.eps
    )
    assert torch.equal(permuted[0], y[order]) and torch.equal(permuted[1], dx[order])


@examples(20)
@given(loss_cases(MATRICES, reduction="none"), GARBAGE, st.sampled_from([0, -100, 10**6]))
def test_loss_of_a_row_does_not_depend_on_the_others(case, garbage, garbage_target):
    assume(0 not in (case.logits.steps[0], case.targets.steps[0]))
    logits, targets, upstream = loss_inputs(case)
    kept = torch.arange(len(logits), device=DEVICE) == case.seed % len(logits)
    other_logits = case.logits.place(logits.where(kept[:, None], garbage))
    other_targets = case.targets.place(targets.where(kept, garbage_target))
    before = run_loss(case, logits, targets, upstream)
    after = run_loss(case, other_logits, other_targets, upstream)
    assert all(torch.equal(a[kept], b[kept]) for a, b in zip(before, after))


@examples(20)
@given(
    loss_cases(MATRICES, reduction="none", inplace=False)
)  # in place rows are contiguous, and begin anywhere
def test_permuted_rows_permute_the_loss(case):
    logits, targets, upstream = loss_inputs(case)
    order = random_order(case)
    loss, gradient = run_loss(case, place_rows_alike(logits), targets, upstream)
    permuted = run_loss(case, place_rows_alike(logits[order]), targets[order], upstream[order])
    assert torch.equal(permuted[0], loss[order]) and torch.equal(permuted[1], gradient[order])


# ---------------------------------------------------------------------------- powers of two pass
# through unrounded


@examples(20)
@given(norm_cases(dtype=SINGLE, weight_dtype=SINGLE, eps=0.0), st.integers(-20, 20))
def test_norm_does_not_see_the_scale_of_x(case, exponent):
    x, weight, dy = norm_inputs(case)
    y, dx, dw = run_norm(norm, x, weight, dy, 0.0)
    scaled = run_norm(norm, case.x.place(x * 2.0**exponent), weight, dy, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(scaled, (y, dx * 2.0**-exponent, dw)))


@examples(20)
@given(norm_cases(dtype=SINGLE, weight_dtype=SINGLE), st.integers(-10, 10), st.integers(-10, 10))
def test_norm_is_linear_in_weight_and_upstream_gradient(case, weight_exponent, dy_exponent):
    x, weight, dy = norm_inputs(case)
    by_weight, by_dy = 2.0**weight_exponent, 2.0**dy_exponent
    y, dx, dw = run_norm(norm, x, weight, dy, case.eps)
    scaled = run_norm(
        norm, x, case.weight.place(weight * by_weight), case.dy.place(dy * by_dy), case.eps
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(scaled, (y * by_weight, dx * by_weight * by_dy, dw * by_dy))
    )


@examples(
    20
)  # with a scale of 30 there are subnormal probabilities, which are rounded to fewer digits
@given(loss_cases(dtype=SINGLE, scale=3.0, upstream_scale="1"), st.integers(-60, 60))
def test_gradient_is_linear_in_the_upstream_gradient(case, exponent):
    logits, targets, upstream = loss_inputs(case)
    _, gradient = run_loss(case, logits, targets, upstream)
    _, scaled = run_loss(case, logits, targets, upstream * 2.0**exponent)
    assert torch.equal(scaled, gradient * 2.0**exponent)


# ---------------------------------------------------------------------------- offsets beyond 32
# bits, without a GPU


@pytest.mark.parametrize("far", ["x", "dy"])
def test_norm_of_rows_beyond_int32(far_apart, far):
    x, weight, dy = (
        torch.randn(3, 64).bfloat16(),
        torch.randn(64).bfloat16(),
        torch.randn(3, 64).bfloat16(),
    )
    expected = run_norm(norm, x, weight, dy)
    results = run_norm(
        norm, far_apart(x) if far == "x" else x, weight, far_apart(dy) if far == "dy" else dy
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, results))


def test_loss_of_rows_beyond_int32(far_apart):
    logits, targets = torch.randn(3, 64).bfloat16(), torch.tensor([1, 63, 0])
    expected = loss_and_gradient(TritonCrossEntropyLoss(), logits, targets)
    results = loss_and_gradient(TritonCrossEntropyLoss(), far_apart(logits), targets)
    assert all(torch.equal(a, b) for a, b in zip(expected, results))
