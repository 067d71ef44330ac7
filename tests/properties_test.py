"""Do the kernels keep their promises on inputs that nobody chose?

Hypothesis draws them: shapes, memory layouts, dtypes, magnitudes, targets, upstream gradients.
Where a property fails, it searches for the smallest input that still fails and prints it as the
plain numbers from which the tensors are made.  The draws are the same on every run.

The first properties are asked of every function, the others of RMSNorm and cross-entropy.  The
first compare with float64, as all other tests do.  The others need no reference: they say how two
results of one kernel belong together, most of them to the bit.

One kind of draw is set aside: where the right answer is nearly all cancellation, eager PyTorch,
which sets the allowance, is exact or 10 % wrong by luck.  It is recognised by its condition number,
never by the kernel's error.
"""

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cross_entropy_kernel import TritonCrossEntropyLoss, cross_entropy_reference
from harness.benchmark.checking import FLOOR, assert_all_passed
from harness.cli.device import DEVICE
from judging.layouts import Layout
from subjects import SUBJECTS
from subjects.rmsnorm import with_eps
from subjects.subject import Subject, checks, compare_parts, references, run

SINGLE, HALVES = torch.float32, [torch.float16, torch.bfloat16]
DTYPES = st.sampled_from([SINGLE, *HALVES])
NAN, INF = float("nan"), float("inf")
FEW = 3  # examples that a reader draws of each property

# inf - inf and 0 * inf are the right answers to some draws; the interpreter's NumPy comments on
# them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("poison_new_tensors", "small_tiles"),
]


def drawn(number, *strategies):
    """A test of a few draws, and an exhaustive one of so many.

    As many on a GPU: there nearly every one of them compiles a kernel.
    """

    def decorate(check):
        def test(examples, **parameters):
            @settings(max_examples=examples, derandomize=True, deadline=None)
            @given(st.tuples(*strategies))
            def of_drawn(draws):
                check(*parameters.values(), *draws)

            of_drawn()

        names = list(inspect.signature(check).parameters)[: -len(strategies)]
        test.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
                for name in ("examples", *names)
            ]
        )
        test.__name__, test.__doc__ = check.__name__, check.__doc__
        many = pytest.param(number, id="many", marks=pytest.mark.exhaustive)
        return pytest.mark.parametrize("examples", [pytest.param(FEW, id="few"), many])(test)

    return decorate


# ---- what is drawn -------------------------------------------------------------------------------


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


def run_norm(case, x, weight, dy):
    """(y, dx, dweight)"""
    subject = with_eps(case.eps)
    return tuple(run(subject, subject.function, {"x": x, "weight": weight}, {"y": dy}).values())


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
    # else the repeated logit would be -inf where it is the target's, too
    if 0 not in case.logits.steps:
        logits[(torch.rand(case.shape, generator=generator) < case.masked) & ~is_target] = -INF
    upstream = torch.randn(batch, generator=generator) * scale_of(case.upstream_scale, case.dtype)
    return (
        case.logits.place(logits.to(DEVICE, case.dtype)),
        case.targets.place(targets.to(DEVICE, case.target_dtype)),
        case.upstream.place(upstream.to(DEVICE))
        if case.reduction == "none"
        else upstream.to(DEVICE).sum(),
    )


def loss_of(case) -> Subject:
    """Cross-entropy with the case's options."""
    options = {"ignore_index": case.ignore_index, "reduction": case.reduction}

    def kernel(logits, targets):
        if case.inplace:  # of a result, which may be overwritten
            logits = logits.clone(memory_format=torch.contiguous_format)
        return TritonCrossEntropyLoss(**options, inplace=case.inplace)(logits, targets)

    return replace(
        SUBJECTS["cross_entropy"],
        function=kernel,
        reference=lambda x, t: cross_entropy_reference(x, t, **options),
        eager=lambda x, t: cross_entropy_reference(x.float(), t, **options),
    )


def loss_parts(case, logits, targets, upstream):
    subject = loss_of(case)
    return run(
        subject, subject.function, {"logits": logits, "targets": targets}, {"loss": upstream}
    )


def run_loss(case, *tensors):
    """(loss, dlogits)"""
    return tuple(loss_parts(case, *tensors).values())


# ---- every function, compared with float64 -------------------------------------------------------


@st.composite
def calls(draw):
    """Of any function: its rows, where each of its tensors lies, which gradients are wanted."""
    rows = draw(st.sampled_from([(3,), (1,), (9,), (2, 3), (3, 2), (2, 1, 2)]))
    seed = draw(st.integers(0, 2**16))
    return SimpleNamespace(
        rows=rows, seed=seed, layouts=draw(st.data()), frozen=draw(st.integers(0, 30))
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
@drawn(12, calls())
def test_function_is_as_exact_as_eager_wherever_its_tensors_lie(subject, case):
    inputs, douts = subject.make(case.rows, subject.size, SINGLE, case.seed)
    for tensors in (inputs, douts):
        for name, t in tensors.items():
            tensors[name] = case.layouts.draw(layouts(t.ndim), label=name).place(t)
    names = subject.differentiable
    needed = [name for i, name in enumerate(names) if not case.frozen >> i & 1] or list(names)
    ref64, eagers = references(subject, inputs, douts, needed)
    # of a repeated number some gradients are 0, but for rounding errors
    assume(all(t.norm() > 1e-3 for t in ref64.values()))
    found = run(subject, subject.function, inputs, douts, needed)
    # each part as a whole: of the few elements of a piece, eager's error is a matter of luck
    whole = replace(subject, split=None)
    assert_all_passed(compare_parts(whole, found, inputs, ref64, eagers))


# ---- RMSNorm and cross-entropy, likewise ---------------------------------------------------------


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


@drawn(50, norm_cases())
def test_norm_is_as_exact_as_eager(case):
    x, weight, dy = norm_inputs(case)
    assume(norm_is_well_conditioned(x, weight, dy, case.eps))
    worst = max((x.dtype, weight.dtype), key=FLOOR.get)
    inputs = {"x": x, "weight": weight}
    assert_all_passed(checks(with_eps(case.eps), inputs, {"y": dy}, dtype=worst))


def loss_is_well_conditioned(ref64, targets, upstream, case):
    """No loss near 0, no softmax within 1/8 of one-hot, none of less than 2**-20 in all that is not
    the target.
    """
    valid = targets != case.ignore_index
    row_upstream = (upstream.double() * valid).norm() / (
        valid.sum() if case.reduction == "mean" else 1
    )
    is_target = targets.unsqueeze(-1) == torch.arange(case.shape[-1], device=DEVICE)
    gradient = ref64["dlogits"]
    parts = ref64["loss"], gradient * is_target, gradient * ~is_target
    loss, target, other = (t.norm() for t in parts)
    least = ((loss, 0.1), (target, row_upstream / 8), (other, row_upstream * 2**-20))
    return all(size == 0 or size >= limit for size, limit in least)


@drawn(60, loss_cases())
def test_loss_is_as_exact_as_eager(case):
    logits, targets, upstream = loss_inputs(case)
    if case.inplace and case.dtype != SINGLE:
        # another gradient than 1 or -1 rounds the one already stored a second time
        upstream = upstream.sign()
    ours = loss_parts(case, logits, targets, upstream)
    if case.reduction == "mean" and (targets == case.ignore_index).all():
        assert ours["loss"].isnan() and (ours["dlogits"] == 0).all()
        return
    inputs = {"logits": logits, "targets": targets}
    ref64, eager = references(loss_of(case), inputs, {"loss": upstream})
    assume(loss_is_well_conditioned(ref64, targets, upstream, case))
    assert_all_passed(compare_parts(loss_of(case), ours, inputs, ref64, eager))


@drawn(25, loss_cases(dtype=SINGLE, reduction="none"))
def test_gradient_of_a_row_sums_to_zero(case):
    logits, targets, upstream = loss_inputs(case)
    _, gradient = run_loss(case, logits, targets, upstream)
    assert (gradient.double().sum(-1).abs() <= FLOOR[SINGLE] * upstream.abs()).all()


# ---- fp16 and bf16 round, and only that ----------------------------------------------------------


def assert_rounded_once(half, single):
    """Within half an ulp of the fp32 result."""
    limits = torch.finfo(half.dtype)
    ulp = torch.ldexp(torch.full_like(single, limits.eps / 2), torch.frexp(single).exponent)
    allowed = ulp.clamp(min=limits.tiny * limits.eps) / 2
    # two fp32 sums, which a GPU may take in another order
    allowed += FLOOR[SINGLE] * single.abs().amax()
    assert ((half.float() - single).abs() <= allowed).all()


@drawn(
    25, norm_cases(MATRICES, dtype=torch.float16, x_scale=1.0, eps=1e-5), st.sampled_from(HALVES)
)
def test_half_precision_only_rounds_the_norm(case, dtype):
    x, weight, dy = (t.to(dtype) for t in norm_inputs(case))
    # powers of two, so that y too is rounded once: as x_hat
    weight = torch.exp2(weight.round()) * weight.sign()
    halves = run_norm(case, x, weight, dy)
    singles = run_norm(case, x.float(), weight.float(), dy.float())
    for half, single in zip(halves, singles):
        assert_rounded_once(half, single)


@pytest.mark.exhaustive
@drawn(
    25,
    loss_cases(MATRICES, dtype=torch.float16, ignored=0.3, inplace=False),
    st.sampled_from(HALVES),
)
def test_half_precision_only_rounds_the_gradient(case, dtype):
    logits, targets, upstream = loss_inputs(case)
    assume((targets != case.ignore_index).any())
    loss, gradient = run_loss(case, logits.to(dtype), targets, upstream)
    single_loss, single_gradient = run_loss(case, logits.to(dtype).float(), targets, upstream)
    assert ((loss - single_loss).abs() <= FLOOR[SINGLE] * single_loss.abs()).all()
    assert_rounded_once(gradient, single_gradient)


# ---- rows do not know of each other --------------------------------------------------------------

GARBAGE = st.sampled_from([0.0, 1e4, INF, -INF, NAN])


@drawn(20, norm_cases(MATRICES), GARBAGE)
def test_norm_of_a_row_does_not_depend_on_the_others(case, garbage):
    assume(0 not in (case.x.steps[0], case.dy.steps[0]))  # else the rows are one row
    x, weight, dy = norm_inputs(case)
    kept = torch.arange(len(x), device=DEVICE) == case.seed % len(x)
    other_x, other_dy = (t.where(kept[:, None], garbage) for t in (x, dy))
    before = run_norm(case, x, weight, dy)
    after = run_norm(case, case.x.place(other_x), weight, case.dy.place(other_dy))
    assert all(torch.equal(a[kept], b[kept]) for a, b in zip(before[:2], after[:2]))


@pytest.mark.exhaustive
@drawn(20, loss_cases(MATRICES, reduction="none"), GARBAGE, st.sampled_from([0, -100, 10**6]))
def test_loss_of_a_row_does_not_depend_on_the_others(case, garbage, garbage_target):
    assume(0 not in (case.logits.steps[0], case.targets.steps[0]))
    logits, targets, upstream = loss_inputs(case)
    kept = torch.arange(len(logits), device=DEVICE) == case.seed % len(logits)
    other_logits = case.logits.place(logits.where(kept[:, None], garbage))
    other_targets = case.targets.place(targets.where(kept, garbage_target))
    before = run_loss(case, logits, targets, upstream)
    after = run_loss(case, other_logits, other_targets, upstream)
    assert all(torch.equal(a[kept], b[kept]) for a, b in zip(before, after))


# ---- powers of two pass through unrounded --------------------------------------------------------


@drawn(20, norm_cases(dtype=SINGLE, weight_dtype=SINGLE, eps=0.0), st.integers(-20, 20))
def test_norm_does_not_see_the_scale_of_x(case, exponent):
    x, weight, dy = norm_inputs(case)
    y, dx, dw = run_norm(case, x, weight, dy)
    scaled = run_norm(case, case.x.place(x * 2.0**exponent), weight, dy)
    assert all(torch.equal(a, b) for a, b in zip(scaled, (y, dx * 2.0**-exponent, dw)))


@drawn(
    20, norm_cases(dtype=SINGLE, weight_dtype=SINGLE), st.integers(-10, 10), st.integers(-10, 10)
)
def test_norm_is_linear_in_weight_and_upstream_gradient(case, weight_exponent, dy_exponent):
    x, weight, dy = norm_inputs(case)
    by_weight, by_dy = 2.0**weight_exponent, 2.0**dy_exponent
    y, dx, dw = run_norm(case, x, weight, dy)
    scaled = run_norm(case, x, case.weight.place(weight * by_weight), case.dy.place(dy * by_dy))
    assert all(
        torch.equal(a, b)
        for a, b in zip(scaled, (y * by_weight, dx * by_weight * by_dy, dw * by_dy))
    )


# with a scale of 30 there are subnormal probabilities, which are rounded to fewer digits
@drawn(20, loss_cases(dtype=SINGLE, scale=3.0, upstream_scale="1"), st.integers(-60, 60))
def test_gradient_is_linear_in_the_upstream_gradient(case, exponent):
    logits, targets, upstream = loss_inputs(case)
    _, gradient = run_loss(case, logits, targets, upstream)
    _, scaled = run_loss(case, logits, targets, upstream * 2.0**exponent)
    assert torch.equal(scaled, gradient * 2.0**exponent)
