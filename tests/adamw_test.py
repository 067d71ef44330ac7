"""Is the fused AdamW right?

`python -m tests.adamw_test` prints three checks for each dtype and what stochastic rounding does;
`pytest tests/adamw_test.py` runs the same checks and many more.  Without a GPU the kernel runs on
the CPU, in Triton's interpreter.

Everything is judged against float64 and allowed twice the error of torch.optim.AdamW (see
checking.py).  Of a weight it is the change that is compared: a step is so small beside the weight
that a wrong one would hide behind it.
"""

import copy
import gc
import io
import math
import pickle
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    init_device_mesh,
)
from torch.optim import lr_scheduler

from harness.benchmark.checking import (
    DEVICE,
    HAS_GPU,
    Check,
    assert_all_passed,
    compare,
    print_tests,
    print_title,
    print_verdict,
)
from harness.cli import command_line
from next_steps.lessons import adamw_kernel
from next_steps.lessons.adamw_kernel import (
    TritonAdamW,
    _one_minus_power,
    _store,
    adamw_reference,
    adamw_step,
)
from tests.fixtures import captured, is_freed, needs_gpu, needs_two_gpus, waiting_forbidden

triton, tl = adamw_kernel.triton, adamw_kernel.tl
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAN, INF = math.nan, math.inf
SHAPE = (4096, 4096) if HAS_GPU else (5, 1001)  # on the CPU: three blocks, the last one ragged
# lr and weight_decay so large that each term of the formula shows in bf16 too
SETTINGS = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}
KINDS = {  # dtype of the parameter, of the moments, stochastic rounding
    "FP32": (FP32, FP32, False),
    "BF16": (BF16, BF16, False),
    "FP16": (FP16, FP32, False),
    "BF16, FP32 moments": (BF16, FP32, False),
    "FP32, BF16 moments": (FP32, BF16, False),
    "BF16, stochastic": (BF16, BF16, True),
    "BF16, FP32 moments, stochastic": (BF16, FP32, True),
}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def randn(*shape, dtype=FP32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_params(*shapes, dtype=FP32):
    return [
        torch.nn.Parameter(randn(*shape, dtype=dtype, seed=i)) for i, shape in enumerate(shapes)
    ]


def gradients(p, steps, seed=100):
    return [(0.3 + randn(*p.shape, seed=seed + t)).to(p) for t in range(steps)]


def train(optimizer, grads_of_steps):
    """Steps with the given gradients, one list a step; a None leaves its parameter without one."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for grads in grads_of_steps:
        for p, g in zip(params, grads):
            p.grad = None if g is None else g.clone()
        optimizer.step()


def eager_steps(p, grads, lr, betas, eps, weight_decay, moments_dtype=FP32):
    """(p, m, v) after eager steps in fp32, or in fp64 for an fp64 p.

    Each is rounded to its own dtype after each step.
    """
    wide = torch.promote_types(p.dtype, FP32)
    p_dtype, moments_dtype = (
        p.dtype,
        torch.promote_types(moments_dtype, wide) if wide != FP32 else moments_dtype,
    )
    m = v = torch.zeros_like(p, dtype=moments_dtype)
    for step, g in enumerate(grads, start=1):
        new = adamw_reference(
            p.to(wide), g.to(wide), m.to(wide), v.to(wide), step, lr, *betas, eps, weight_decay
        )
        p, m, v = (t.to(dtype) for t, dtype in zip(new, (p_dtype, moments_dtype, moments_dtype)))
    return p, m, v


def steps_and_change(optimizer_class, start, grads, **options):
    """(the change of a parameter, m, v) after steps with an optimizer."""
    p = torch.nn.Parameter(start.clone())
    optimizer = optimizer_class([p], **options)
    train(optimizer, [[g] for g in grads])
    state = optimizer.state[p]
    return p.detach().double() - start.double(), state["exp_avg"], state["exp_avg_sq"]


def check_against_float64(
    name, start, grads, moments_dtype, stochastic=False, **settings
) -> list[Check]:
    """The weights' change, m and v after some steps, each against float64."""
    settings = {**SETTINGS, **settings}
    options = {"moments_dtype": moments_dtype, "stochastic_rounding": stochastic}
    ours = steps_and_change(TritonAdamW, start, grads, **settings, **options)
    p64, m64, v64 = eager_steps(start.double(), [g.double() for g in grads], **settings)
    if moments_dtype == start.dtype:
        eager = steps_and_change(torch.optim.AdamW, start, grads, **settings)
    else:  # which torch.optim.AdamW does not offer
        p, m, v = eager_steps(start, grads, **settings, moments_dtype=moments_dtype)
        eager = p.double() - start.double(), m, v
    dtypes = (start.dtype, moments_dtype, moments_dtype)
    parts = zip(("weights", "m", "v"), ours, (p64 - start.double(), m64, v64), eager, dtypes)
    return [compare(f"{name} {part}", *abc, dtype=dtype) for part, *abc, dtype in parts]


def kind_checks(kind) -> list[Check]:
    dtype, moments_dtype, stochastic = KINDS[kind]
    start = randn(*SHAPE, dtype=dtype)
    return check_against_float64(kind, start, gradients(start, 4), moments_dtype, stochastic)


# ---- The numbers -------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_steps_match_float64(kind):
    assert_all_passed(kind_checks(kind))


def test_reference_is_torchs_formula():
    start = randn(50, dtype=torch.float64)
    grads = gradients(start, 3)
    p = torch.nn.Parameter(start.clone())
    theirs = torch.optim.AdamW([p], foreach=False, **SETTINGS)
    train(theirs, [[g] for g in grads])
    ours = eager_steps(start, grads, **SETTINGS)
    assert all(
        torch.equal(a, b)
        for a, b in zip(ours, (p, theirs.state[p]["exp_avg"], theirs.state[p]["exp_avg_sq"]))
    )


@triton.jit
def one_minus_power_kernel(log_beta, steps_ptr, out_ptr):
    i = tl.program_id(0)
    tl.store(out_ptr + i, _one_minus_power(tl.cast(log_beta, tl.float32), tl.load(steps_ptr + i)))


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.999999])
def test_bias_correction_does_not_cancel_in_the_first_steps_nor_drift_in_late_ones(beta):
    steps = [1, 2, 3, 5, 10, 100, 499, 500, 693, 1000, 10_000, 1_000_000]
    out = torch.full((len(steps),), NAN, device=DEVICE)
    one_minus_power_kernel[(len(steps),)](
        math.log(beta), torch.tensor(steps, dtype=FP32, device=DEVICE), out
    )
    exact = torch.tensor(
        [-math.expm1(step * math.log(beta)) for step in steps], dtype=torch.float64
    )
    assert (
        (out.cpu().double() - exact) / exact
    ).abs().max() < 5e-7  # 1 - exp(...) in fp32: 5e-5 for beta 0.999


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0), (0.9, 0.95), (0.0, 0.999)])
def test_first_step_is_corrected_for_moments_that_began_at_zero(betas):
    # m / (1 - beta1) is g and v / (1 - beta2) its square, so each weight moves by lr, up to eps.
    p, grads = randn(64), gradients(randn(64), 1)
    change, _, _ = steps_and_change(
        TritonAdamW, p, grads, lr=0.25, betas=betas, eps=0.0, weight_decay=0.0
    )
    torch.testing.assert_close(change, -0.25 * grads[0].double().sign(), rtol=5e-6, atol=0.0)


@pytest.mark.parametrize("done", [0, 1, 9, 99_999])
def test_step_continues_from_the_count_it_is_given(done):
    p, g, m, v = (randn(64, seed=i) for i in range(4))
    v = v.abs()
    settings = (1e-2, 0.9, 0.999, 1e-8, 0.0)
    ref64 = adamw_reference(*(t.double() for t in (p, g, m, v)), done + 1, *settings)[0]
    eager = adamw_reference(p, g, m, v, done + 1, *settings)[0]
    start, counter = p.double(), torch.tensor(float(done), device=DEVICE)
    adamw_step(p, g, m, v, counter, *settings)
    assert_all_passed(
        [compare("weights", p.double() - start, ref64 - start, eager.double() - start, dtype=FP32)]
    )
    assert counter == done, "the launcher must leave the count to its caller"


@pytest.mark.parametrize("eps", [1e-8, 1e-5, 1e-3])
def test_eps_is_used_where_it_shows(eps):
    start = randn(100)
    grads = [1e-5 * g for g in gradients(start, 3)]
    assert_all_passed(
        check_against_float64("small gradients", start, grads, FP32, eps=eps, weight_decay=0.0)
    )


def test_zero_gradient_only_decays_the_weights():
    start, zero = randn(100), torch.zeros(100, device=DEVICE)
    change, m, v = steps_and_change(TritonAdamW, start, [zero], lr=0.5, weight_decay=0.5)
    torch.testing.assert_close(change, -0.25 * start.double(), rtol=1e-6, atol=1e-6)
    assert not m.any() and not v.any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_gradient_that_is_not_finite_does_what_it_does_in_torch_and_stays_in_its_element(
    value, stochastic, dtype
):
    start = randn(100, dtype=dtype)
    grads = gradients(start, 2)
    clean = steps_and_change(TritonAdamW, start, grads, stochastic_rounding=stochastic)
    grads[0][7] = value
    ours = steps_and_change(TritonAdamW, start, grads, stochastic_rounding=stochastic)
    theirs = steps_and_change(torch.optim.AdamW, start, grads)
    others = torch.arange(100, device=DEVICE) != 7
    for a, b, c in zip(ours, theirs, clean):
        assert torch.equal(a[7], b[7]) or (a[7].isnan() and b[7].isnan())
        assert torch.equal(a[others], c[others])


# ---- The checks can fail -----------------------------------------------------------------------


def wrong_steps(p, grads, lr, betas, eps, weight_decay, mistake):
    """The weights after steps in float64, with one mistake."""
    beta1, beta2 = betas
    m = v = torch.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        t += {"counts from 0": -1, "counts from 2": 1}.get(mistake, 0)
        if mistake == "weight decay in the gradient":
            g = g + weight_decay * p
        elif mistake != "no weight decay":
            p = p * (
                1 - (weight_decay if mistake == "weight decay without lr" else lr * weight_decay)
            )
        m = m + (g - m) * (beta1 if mistake == "beta1 for 1 - beta1" else 1 - beta1)
        v = v * beta2 + (g if mistake == "g not squared" else g * g) * (1 - beta2)
        bias1 = 1 if mistake == "m not corrected" else max(1 - beta1**t, 0.1)
        bias2 = 1 if mistake == "v not corrected" else max(1 - beta2**t, 0.01)
        root = v.abs() if mistake == "no square root" else v.abs().sqrt()
        denom = root / (bias2 if mistake == "correction outside the root" else bias2**0.5) + eps
        if mistake == "eps squared":
            denom = denom - eps + eps**2
        sign = 1 if mistake == "uphill" else -1
        p = p + sign * lr / bias1 * (g if mistake == "g for m" else m) / denom
    return p


MISTAKES = [
    "counts from 0",
    "counts from 2",
    "weight decay in the gradient",
    "no weight decay",
    "beta1 for 1 - beta1",
    "weight decay without lr",
    "g not squared",
    "m not corrected",
    "v not corrected",
    "no square root",
    "correction outside the root",
    "uphill",
    "g for m",
]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_comparator_rejects_known_wrong_answers(dtype):
    start = randn(1000, dtype=dtype)
    grads = gradients(start, 4)
    theirs = steps_and_change(torch.optim.AdamW, start, grads, **SETTINGS)[0]
    wide, wide_grads = start.double(), [g.double() for g in grads]
    ref64 = eager_steps(wide, wide_grads, **SETTINGS)[0] - wide
    for mistake in ["right", *MISTAKES, *(["eps squared"] if dtype == FP32 else [])]:
        answer = (
            wrong_steps(wide, wide_grads, **SETTINGS, mistake=mistake).to(dtype).double() - wide
        )
        check = compare(mistake, answer, ref64, theirs, dtype=dtype)
        assert check.passed == (mistake == "right"), str(check)
    assert not compare("no step", 0 * ref64, ref64, theirs, dtype=dtype).passed


# ---- Stochastic rounding -----------------------------------------------------------------------


@triton.jit
def round_kernel(x_ptr, out_ptr, seed, index, step, TENSOR: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    block = tl.program_id(0)
    lane = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + lane)
    _store(
        out_ptr,
        lane,
        lane >= 0,
        x,
        seed,
        block,
        TENSOR,
        index,
        tl.cast(step, tl.float32),
        BLOCK_SIZE,
    )


N = 2**14


def rounded(x, seed=0, index=0, step=1, tensor=0, block_size=2048):
    """fp32 x (N,) stochastically rounded to bf16 by the kernel's own function."""
    out = torch.full((N,), NAN, dtype=BF16, device=DEVICE)
    round_kernel[(N // block_size,)](
        x, out, seed, index, step, TENSOR=tensor, BLOCK_SIZE=block_size
    )
    return out


def bits(t):
    return t.view(torch.int32 if t.dtype == FP32 else torch.int16)


def fp32_of_bits(*patterns):
    values = torch.tensor([b - 2**32 if b >= 2**31 else b for b in patterns], dtype=torch.int64)
    return values.to(torch.int32).view(FP32).to(DEVICE)


def test_rounding_goes_to_one_of_the_two_neighbours_only():
    x = randn(N) * torch.exp2(20 * randn(N, seed=1))
    beyond = bits(rounded(x).float()) - (
        bits(x) & -65536
    )  # the neighbour nearer to 0, or the next one
    assert ((beyond == 0) | (beyond == 65536)).all() and 0.4 < (beyond > 0).double().mean() < 0.6


def test_representable_numbers_infinities_and_nan_stay_what_they_are():
    nans = fp32_of_bits(0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7FC0FFFF, 0x7FFF8000)
    exact = torch.cat([
        torch.tensor([0.0, -0.0, 1.0, -1.5, INF, -INF, 2.0**-133, -(2.0**-133)], device=DEVICE),
        fp32_of_bits(0x7F7F0000, 0x80010000, 0xFF7F0000),
    ])  # fmt: skip
    for values, same in (
        (nans, lambda out, x: out.isnan()),
        (exact, lambda out, x: bits(out.float()) == bits(x)),
    ):
        x = values.repeat(N // len(values) + 1)[:N].contiguous()
        assert same(rounded(x), x).all()


def test_beyond_the_largest_bf16_is_infinity_as_in_rounding_to_nearest():
    x = fp32_of_bits(0x7F7FC000).expand(N).contiguous()  # three quarters of the way
    out = rounded(x)
    assert (
        0.7 < out.isinf().double().mean() < 0.8
        and (out[~out.isinf()] == torch.finfo(BF16).max).all()
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("fraction", [1, 655, 21_845, 32_768, 60_000, 65_535])  # of 65,536
def test_rounding_is_right_on_average(fraction):
    for sign in (0, 0x80000000):
        x = fp32_of_bits(sign + 0x3F800000 + fraction).expand(N).contiguous()
        nearer_to_zero = rounded(fp32_of_bits(sign + 0x3F800000).expand(N).contiguous())
        up = sum((rounded(x, step=step) != nearer_to_zero).sum().item() for step in (1, 2))
        chance = fraction / 65_536
        assert abs(up - 2 * N * chance) <= 5 * math.sqrt(2 * N * chance * (1 - chance)) + 1


@pytest.mark.exhaustive
def test_rounding_does_not_depend_on_the_block_size():
    x = randn(N)
    assert torch.equal(rounded(x, block_size=256), rounded(x, block_size=4096))
    assert torch.equal(rounded(x), rounded(x))


def coins(**key):
    """N tosses: 1 where a number halfway between its neighbours was rounded up, -1 where down."""
    return 2.0 * (rounded(fp32_of_bits(0x3F808000).expand(N).contiguous(), **key) > 1).double() - 1


KEYS = [
    {},
    {"seed": 1},
    {"seed": 2**40},
    {"index": 1},
    {"step": 2},
    {"step": 3},
    {"tensor": 1},
    {"tensor": 2},
    {"index": 1, "step": 2},
    {"index": 2},
    {"seed": 1, "index": 1},
]


@pytest.mark.exhaustive
def test_draws_of_other_seeds_parameters_steps_and_tensors_are_not_correlated():
    tosses = torch.stack([coins(**key) for key in KEYS])
    correlation = tosses @ tosses.T / N - torch.eye(len(KEYS), dtype=torch.float64, device=DEVICE)
    assert correlation.abs().max() < 5 / math.sqrt(N)


def test_draws_of_neighbouring_elements_are_not_correlated():
    tosses = coins()
    for lag in [*range(1, 17), 256, 2048]:  # 8 elements share a draw, a block begins every 2,048
        assert abs((tosses[lag:] * tosses[:-lag]).mean()) < 5 / math.sqrt(N - lag), lag


def test_every_run_gives_the_same_bits_and_another_seed_other_ones():
    start = randn(3000, dtype=BF16)
    grads = gradients(start, 2)
    runs = [
        steps_and_change(TritonAdamW, start, grads, stochastic_rounding=True, seed=seed)
        for seed in (5, 5, 6)
    ]
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1]))
    assert not any(torch.equal(a, b) for a, b in zip(runs[0], runs[2]))


@pytest.mark.exhaustive
def test_block_size_of_a_launch_does_not_show_in_the_results(monkeypatch):
    start = randn(5001, dtype=BF16)
    grads = gradients(start, 2)
    results = []
    for size in (256, 2048):
        monkeypatch.setattr(adamw_kernel, "BLOCK_SIZE", size)
        results.append(steps_and_change(TritonAdamW, start, grads, stochastic_rounding=True))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_equal_parameters_are_rounded_differently_and_alike_in_any_order():
    start, fixed = randn(1000, dtype=BF16), gradients(randn(1000, dtype=BF16), 1)[0]
    a, b = (torch.nn.Parameter(start.clone()) for _ in range(2))
    train(TritonAdamW([a, b], stochastic_rounding=True), [[fixed, fixed]])
    assert not torch.equal(a, b)
    alone = torch.nn.Parameter(start.clone())
    train(TritonAdamW([a, alone], stochastic_rounding=True), [[None, fixed]])
    assert torch.equal(alone, b)


def test_a_shards_draws_are_those_of_its_place_in_the_whole():
    n = 3000
    p, g, m, v = (randn(n, dtype=BF16, seed=seed) for seed in range(4))
    tensors = p, g, m, v.abs()
    settings = (torch.zeros((), device=DEVICE), 0.05, 0.8, 0.95, 1e-3, 0.3, 7, 2)
    expected = [t.clone() for t in tensors]
    adamw_step(*expected, *settings)
    for first, last in ((0, 1), (1, 2), (5, 1500), (1016, 1040), (1024, 2048), (2047, n)):
        part = [t[first:last].clone() for t in tensors]
        adamw_step(*part, *settings, offset=first)
        assert all(torch.equal(a, b[first:last]) for a, b in zip(part, expected)), (first, last)
    far = [t[:50].clone() for t in tensors], [t[:50].clone() for t in tensors]
    for part, offset in zip(far, (2**33, 2**33 + 1024)):
        adamw_step(*part, *settings, offset=offset)
    assert not torch.equal(far[0][0], far[1][0])


# ---- What stochastic rounding is good for ------------------------------------------------------


def moved_weights(n=20_000, lr=1e-5, steps=5) -> dict[str, tuple[float, float]]:
    """name: what one step does to weights like a language model's.

    (fraction of them that it moves, mean movement in units of fp32's)
    """
    start, sign = 0.02 * randn(n), randn(n, seed=1).sign()
    results = {}
    for name, optimizer_class, dtype, options in (
        ("fp32", TritonAdamW, FP32, {}),
        ("bf16, torch.optim.AdamW", torch.optim.AdamW, BF16, {}),
        ("bf16, stochastic", TritonAdamW, BF16, {"stochastic_rounding": True}),
    ):
        p = torch.nn.Parameter(start.to(dtype, copy=True))
        before = p.detach().clone()
        optimizer = optimizer_class([p], lr=lr, weight_decay=0.0, **options)
        train(optimizer, [[sign.to(dtype)]])
        moved = (p != before).double().mean().item()
        train(optimizer, [[sign.to(dtype)]] * (steps - 1))
        results[name] = moved, (-sign * (p - before)).double().mean().item() / (steps * lr)
    return results


@pytest.mark.exhaustive
def test_small_steps_are_kept_on_average():
    results = moved_weights()
    assert (
        results["bf16, torch.optim.AdamW"][0] < 0.25 and results["bf16, torch.optim.AdamW"][1] < 0.4
    )
    assert abs(results["fp32"][1] - 1) < 0.01
    assert abs(results["bf16, stochastic"][1] - 1) < 0.03


@pytest.mark.exhaustive
def test_second_moment_decays_by_a_tenth_of_a_percent_a_step():
    steps, n = 30, 4000
    v = {}
    for stochastic in (False, True):
        p = torch.nn.Parameter(torch.ones(n, dtype=BF16, device=DEVICE))
        optimizer = TritonAdamW([p], lr=0.0, stochastic_rounding=stochastic)
        train(optimizer, [[torch.ones_like(p)]])
        v[stochastic] = optimizer.state[p]["exp_avg_sq"]
        v[stochastic].fill_(1.0)
        train(optimizer, [[torch.zeros_like(p)]] * steps)
    assert (v[False] == 1).all(), (
        "rounded to nearest, v does not decay at all: that is the fault to show"
    )
    assert abs(v[True].double().mean() / 0.999**steps - 1) < 0.002


def small_model_losses(steps=40) -> dict[str, float]:
    """name: loss of a small network after training, in fp32 on all data."""
    x = randn(512, 16, seed=1)
    y = torch.tanh(2 * x @ randn(16, 8, seed=2) / 4).sum(-1, keepdim=True)
    start = [randn(16, 32, seed=3) / 4, randn(32, 1, seed=4) / 32**0.5]

    def loss_of(weights, rows=slice(None)):
        return (
            (torch.relu(x[rows] @ weights[0].float()) @ weights[1].float() - y[rows])
            .square()
            .mean()
        )

    losses = {}
    for name, optimizer_class, dtype, options in (
        ("fp32", TritonAdamW, FP32, {}),
        ("bf16, torch.optim.AdamW", torch.optim.AdamW, BF16, {}),
        ("bf16, stochastic", TritonAdamW, BF16, {"stochastic_rounding": True}),
    ):
        weights = [torch.nn.Parameter(w.to(dtype, copy=True)) for w in start]
        optimizer = optimizer_class(weights, lr=1e-3, **options)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(weights, slice(64 * (step % 8), 64 * (step % 8) + 64)).backward()
            optimizer.step()
        losses[name] = loss_of(weights).item()
    return losses


@pytest.mark.exhaustive
def test_small_model_trains_as_in_fp32():
    losses = small_model_losses()
    lag = {name: abs(loss - losses["fp32"]) for name, loss in losses.items()}
    assert lag["bf16, stochastic"] < 0.2 * lag["bf16, torch.optim.AdamW"], losses


# ---- Shapes and layouts ------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 2047, 2048, 2049, 4095, 4097])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_neighbours_in_memory_stay_untouched(n, dtype):
    start, (g,) = randn(n, dtype=dtype), gradients(randn(n, dtype=dtype), 1)
    memory = [torch.full((n + 2 * 64,), 7.0, dtype=dtype, device=DEVICE) for _ in range(4)]
    p, grad, m, v = (t[64 : 64 + n] for t in memory)
    p.copy_(start), grad.copy_(g), m.zero_(), v.zero_()
    adamw_step(p, grad, m, v, torch.zeros((), device=DEVICE), 0.05, 0.8, 0.95, 1e-3, 0.3, seed=0)
    assert all((t[:64] == 7).all() and (t[64 + n :] == 7).all() for t in memory)
    assert torch.equal(grad, g), "the gradient must not change"
    change, *moments = steps_and_change(
        TritonAdamW, start, [g], **SETTINGS, stochastic_rounding=True
    )
    assert torch.equal(p.double() - start.double(), change)
    assert torch.equal(m, moments[0]) and torch.equal(v, moments[1])


LAYOUTS = {  # shape of the memory, the parameter's view of it
    "0-D": ((), lambda t: t),
    "transposed": ((30, 50), lambda t: t.t()),
    "permuted 3-D": ((5, 7, 11), lambda t: t.permute(2, 0, 1)),
    "channels last": ((2, 3, 4, 5), lambda t: t.contiguous(memory_format=torch.channels_last)),
    "a length of one": ((50, 1, 4), lambda t: t.transpose(0, 1)),
    "part of a larger memory": ((10, 50), lambda t: t[3:7]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_dense_layout(layout):
    shape, view = LAYOUTS[layout]
    start = view(randn(*shape))
    assert_all_passed(check_against_float64(layout, start, gradients(start, 3), FP32))
    p = torch.nn.Parameter(start.clone())
    optimizer = TritonAdamW([p])
    train(optimizer, [gradients(start, 1)])
    assert p.stride() == start.clone().stride() == optimizer.state[p]["exp_avg"].stride()


@pytest.mark.parametrize("layout", ["transposed", "permuted 3-D", "channels last"])
def test_gradient_with_other_strides(layout):
    shape, view = LAYOUTS[layout]
    start = view(randn(*shape))
    other = gradients(start, 2)
    grads = [torch.empty_like(start).copy_(g) for g in other]
    assert grads[0].stride() == start.stride() != other[0].stride()
    p, q = (torch.nn.Parameter(start.clone()) for _ in range(2))
    for param, gs in ((p, grads), (q, other)):
        optimizer = TritonAdamW([param])
        for g in gs:
            param.grad = g
            optimizer.step()
    assert torch.equal(p, q)


WITH_GAPS = {  # shape of the memory, a view of it with gaps between its elements
    "columns": ((30, 50), lambda t: t[:, :5]),
    "every second": ((30, 50), lambda t: t[:, ::2]),
    "transposed columns": ((30, 50), lambda t: t[:, 3:9].t()),
    "of a vector": ((2050,), lambda t: t[::2]),
    "3-D": ((6, 7, 8), lambda t: t[1:5, :, 2:3]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("gaps", WITH_GAPS)
@pytest.mark.parametrize("in_backward", [False, True])
def test_parameters_with_gaps_between_their_elements(gaps, in_backward):
    shape, view = WITH_GAPS[gaps]
    memory, outside = randn(*shape, dtype=BF16), torch.ones(shape, dtype=torch.bool, device=DEVICE)
    before = memory.clone()
    view(outside).fill_(False)
    p, q = torch.nn.Parameter(view(memory)), torch.nn.Parameter(view(memory).clone())
    weights = gradients(q.detach(), 3)
    assert p.stride() != q.stride() and p.data_ptr() == view(memory).data_ptr()
    options = {**SETTINGS, "stochastic_rounding": True, "step_in_backward": in_backward}
    for param in (p, q):
        optimizer = TritonAdamW([param], **options)
        for w in weights:
            (param * w).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(p, q) and not torch.equal(p, view(before))
    assert torch.equal(memory[outside], before[outside]), "the gaps are not the parameter's"


def test_parameter_whose_strides_change_keeps_its_moments():
    p, q = (torch.nn.Parameter(randn(6, 5)) for _ in range(2))
    ours, plain = TritonAdamW([p], **SETTINGS), TritonAdamW([q], **SETTINGS)
    grads = [[g] for g in gradients(q.detach(), 4)]
    for optimizer in (ours, plain):
        train(optimizer, grads[:2])
    p.data = p.data.t().contiguous().t()
    for optimizer in (ours, plain):
        train(optimizer, grads[2:])
    assert torch.equal(p, q) and p.stride() != q.stride()
    assert all(torch.equal(ours.state[p][key], plain.state[q][key]) for key in ours.state[p])


def test_gradient_that_autograd_leaves_negated():
    """Through a complex number it may hold its values negated, and a bit that says so."""
    p, q = (torch.nn.Parameter(torch.tensor(0.5, device=DEVICE)) for _ in range(2))
    for param in (p, q):
        (torch.complex(torch.ones_like(param), param).conj() * (1 + 2j)).real.backward()
    assert p.grad.is_neg()
    q.grad = p.grad.resolve_neg()
    for param in (p, q):
        TritonAdamW([param]).step()
    assert torch.equal(p, q) and p < 0.5


def test_gradient_of_one_number_repeated():
    p = torch.nn.Parameter(randn(6, 5))
    start = p.detach().clone()
    optimizer = TritonAdamW([p], lr=0.5, weight_decay=0.0)
    p.grad = torch.ones(1, 1, device=DEVICE).expand(6, 5)
    optimizer.step()
    torch.testing.assert_close(start - p, torch.full_like(p, 0.5))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_empty_parameter_counts_its_steps(shape):
    p = torch.nn.Parameter(torch.empty(shape, device=DEVICE))
    optimizer = TritonAdamW([p])
    train(optimizer, [[torch.empty_like(p)]] * 2)
    assert optimizer.state[p]["step"] == 2


# ---- The contract of an optimizer --------------------------------------------------------------

SHAPES = ((13, 9), (40,), (), (6, 5))


def both(params_like=SHAPES, dtype=FP32, **options):
    """Ours and torch's over equal parameters."""
    ours, theirs = make_params(*params_like, dtype=dtype), make_params(*params_like, dtype=dtype)
    return TritonAdamW(ours, **options), torch.optim.AdamW(theirs, **options)


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def random_grads(optimizer, steps, seed=100):
    """A list of gradients for each step."""
    return list(
        zip(
            *(
                gradients(p.detach(), steps, seed + 50 * i)
                for i, p in enumerate(params_of(optimizer))
            )
        )
    )


def assert_close(ours, theirs):
    for p, q in zip(params_of(ours), params_of(theirs)):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def assert_same_run(a, b):
    for p, q in zip(params_of(a), params_of(b)):
        assert torch.equal(p, q) and a.state[p].keys() == b.state[q].keys()
        assert all(torch.equal(a.state[p][key], b.state[q][key]) for key in a.state[p])


def test_state_has_torchs_keys_shapes_and_dtypes():
    for dtype in (FP32, BF16):
        ours, theirs = both(dtype=dtype)
        for optimizer in (ours, theirs):
            train(optimizer, random_grads(optimizer, 2))
        a, b = ours.state_dict(), theirs.state_dict()
        assert a["state"].keys() == b["state"].keys()
        for i in a["state"]:
            assert a["state"][i].keys() == b["state"][i].keys() == {"step", "exp_avg", "exp_avg_sq"}
            for key, tensor in a["state"][i].items():
                other = b["state"][i][key]
                assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
            assert a["state"][i]["step"] == 2


def test_parameters_without_a_gradient_are_skipped_and_count_their_own_steps():
    ours, theirs = both()
    for optimizer in (ours, theirs):
        grads = random_grads(optimizer, 3)
        grads[0], grads[1] = (None, *grads[0][1:]), (grads[1][0], None, *grads[1][2:])
        grads = [(*g[:3], None) for g in grads]
        train(optimizer, grads)
    assert_close(ours, theirs)
    p = params_of(ours)
    assert [ours.state[q]["step"].item() for q in p[:3]] == [2, 2, 3] and p[3] not in ours.state


def test_groups_have_their_own_settings():
    def groups():
        a, b, c, d = make_params(*SHAPES)
        options = {"lr": 0.1, "weight_decay": 0.0}, {}, {"betas": (0.5, 0.6)}
        return [{"params": params, **option} for params, option in zip(([a, b], [c], [d]), options)]

    ours, theirs = TritonAdamW(groups(), **SETTINGS), torch.optim.AdamW(groups(), **SETTINGS)
    for optimizer in (ours, theirs):
        train(optimizer, random_grads(optimizer, 3))
    assert_close(ours, theirs)
    ours.add_param_group({"params": [torch.nn.Parameter(randn(4))]})
    assert ours.param_groups[3]["lr"] == SETTINGS["lr"]
    train(ours, random_grads(ours, 1))


NUMBERS = {  # the same settings, given as PyTorch takes them; betas that are the same in fp32
    "floats": {},
    "NumPy": {
        "lr": np.float64(0.05),
        "betas": [np.float32(0.75), np.float32(0.9375)],
        "eps": np.float32(2**-10),
    },
    "tensors": {
        "lr": torch.tensor(0.05),
        "betas": (torch.tensor(0.75), torch.tensor(0.9375)),
        "capturable": True,
    },
    "fp64 tensors": {
        "lr": torch.tensor(0.05, dtype=torch.float64),
        "weight_decay": torch.tensor([0.25]),
    },
    "one of one": {
        "lr": torch.tensor([0.05]),
        "betas": (torch.tensor([0.75]), 0.9375),
        "eps": torch.tensor(2**-10),
    },
    "PyTorch's defaults": {
        "foreach": None,
        "fused": False,
        "capturable": False,
        "differentiable": False,
    },
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", sorted({"cpu", DEVICE}))
@pytest.mark.parametrize("given", NUMBERS)
def test_numbers_and_tensors_give_the_same_bits(given, device):
    def moved(value):
        if isinstance(value, (tuple, list)):
            return tuple(map(moved, value))
        return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value

    plain = {"lr": 0.05, "betas": (0.75, 0.9375), "eps": 2**-10, "weight_decay": 0.25}
    options = {**plain, **NUMBERS[given]}
    options = {key: moved(value) for key, value in options.items()}
    runs = TritonAdamW(make_params(*SHAPES), **options), TritonAdamW(make_params(*SHAPES), **plain)
    for optimizer in runs:
        train(optimizer, random_grads(optimizer, 3))
    assert_same_run(*runs)
    group = runs[0].param_groups[0]
    own, given = ([s["lr"], s["eps"], s["weight_decay"], *s["betas"]] for s in (group, options))
    assert all(a is b for a, b in zip(own, given) if isinstance(b, torch.Tensor))


def test_a_beta_of_zero_in_a_tensor():
    start, grads = randn(50), gradients(randn(50), 2)
    zeros = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
    tensors, numbers = (
        steps_and_change(TritonAdamW, start, grads, betas=betas)
        for betas in (zeros, (0.0, 0.0))
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(tensors, numbers))


def test_numbers_that_are_put_into_a_group_later():
    a, b = (TritonAdamW(make_params(*SHAPES)) for _ in range(2))
    betas = np.float64(0.5), 0.75
    a.param_groups[0].update(lr=np.float32(0.25), betas=betas, eps=1, weight_decay=np.int64(1))
    b.param_groups[0].update(lr=0.25, betas=(0.5, 0.75), eps=1.0, weight_decay=1.0)
    for optimizer in (a, b):
        train(optimizer, random_grads(optimizer, 2))
    assert_same_run(a, b)


def test_tensors_on_the_cpu_are_read_by_the_host_and_those_of_the_gpu_are_left_there():
    gpu, number = torch.device("cuda", 0), torch.tensor(0.25)
    read = adamw_kernel._number_for(gpu, "lr", number)
    assert type(read) is float and read == 0.25
    assert adamw_kernel._number_for(number.device, "lr", number) is number


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_maximize_goes_up_the_gradient(dtype):
    ours, theirs = both(dtype=dtype, **SETTINGS, maximize=True)
    down = TritonAdamW(make_params(*SHAPES, dtype=dtype), **SETTINGS)
    grads = random_grads(ours, 3)
    train(ours, grads)
    train(down, [[-g for g in step] for step in grads])
    assert_same_run(ours, down)
    if dtype == FP32:
        train(theirs, grads)
        assert_close(ours, theirs)


def sequential(optimizer):
    first, second = (
        lr_scheduler.ConstantLR(optimizer, 0.1, 2),
        lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    return lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[2])


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    )


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "CyclicLR of momentum": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 6, cycle_momentum=False),
    "OneCycleLR of momentum": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=3),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["floats", "lr in a tensor", "lr and betas in tensors"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_pytorch_gives_its_steps(name, kind):
    """Ours with numbers, or tensors where the parameters are, beside PyTorch's with numbers."""

    def tensor(number):
        return torch.tensor(number, device=DEVICE)

    ours, theirs = both(lr=0.1)
    tensors = {"lr": tensor(0.1)} if kind != "floats" else {}
    if kind == "lr and betas in tensors":
        tensors["betas"] = tensor(0.9), tensor(0.999)
    ours = TritonAdamW(params_of(ours), **{"lr": 0.1, **tensors})
    lr, rates = ours.param_groups[0]["lr"], set()
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (ours, theirs)]
    for grads in random_grads(ours, 5):
        for optimizer, scheduler in zip((ours, theirs), schedulers):
            train(optimizer, [grads])
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        rates.add((float(ours.param_groups[0]["lr"]), *map(float, ours.param_groups[0]["betas"])))
    for p, q in zip(params_of(ours), params_of(theirs)):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert len(rates) > 1, "this scheduler changed nothing"
    assert kind == "floats" or ours.param_groups[0]["lr"] is lr, "a CUDA graph reads this tensor"


def test_closure_is_evaluated_with_gradients_and_its_loss_returned():
    p = torch.nn.Parameter(randn(5))
    optimizer = TritonAdamW([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    before = p.detach().clone()
    assert optimizer.step(closure).item() == before.square().sum().item() and not torch.equal(
        p, before
    )
    assert optimizer.step() is None


def test_autograd_notices_that_a_weight_was_changed():
    p = torch.nn.Parameter(randn(5))
    loss = p.square().sum()
    loss.backward(retain_graph=True)
    TritonAdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_accumulate_before_a_step():
    p, q = (torch.nn.Parameter(randn(5)) for _ in range(2))
    (2 * p.square().sum()).backward()
    for _ in range(2):
        q.square().sum().backward()
    for param in (p, q):
        TritonAdamW([param]).step()
    assert torch.equal(p, q)


# ---- Saving and loading ------------------------------------------------------------------------

SAVED = {
    "fp32": (FP32, {}),
    "bf16, stochastic": (BF16, {"stochastic_rounding": True, "seed": 7}),
    "bf16, fp32 moments": (BF16, {"stochastic_rounding": True, "moments_dtype": FP32}),
    "tensors": (
        FP32,
        {
            "lr": torch.tensor(0.05),
            "betas": (torch.tensor(0.8), torch.tensor(0.95)),
            "maximize": True,
        },
    ),
    "fp16": (FP16, {}),
}


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["load_state_dict", "deepcopy", "pickle"])
@pytest.mark.parametrize("kind", SAVED)
def test_run_continues_with_the_same_bits(kind, way):
    dtype, options = SAVED[kind]
    options = copy.deepcopy({**SETTINGS, **options})
    optimizer = TritonAdamW(make_params(*SHAPES, dtype=dtype), **options)
    grads = random_grads(optimizer, 4)
    train(optimizer, grads[:2])
    if way == "deepcopy":
        resumed = copy.deepcopy(optimizer)
    elif way == "pickle":
        resumed = pickle.loads(pickle.dumps(optimizer))
    else:
        saved = through_a_file(optimizer.state_dict())
        params = [torch.nn.Parameter(p.detach().clone()) for p in params_of(optimizer)]
        resumed = TritonAdamW(params, moments_dtype=options.get("moments_dtype"))
        resumed.load_state_dict(saved)
    for run in (optimizer, resumed):
        train(run, grads[2:])
    assert_same_run(optimizer, resumed)
    assert not any(p is q for p, q in zip(params_of(optimizer), params_of(resumed)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("to_torch", [False, True])
def test_state_is_exchanged_with_torch(to_torch, dtype):
    ours, theirs = both(dtype=dtype, **SETTINGS)
    source, target = (ours, theirs) if to_torch else (theirs, ours)
    grads = random_grads(source, 4)
    train(source, grads[:2])
    target.load_state_dict(through_a_file(source.state_dict()))
    for p, q in zip(params_of(source), params_of(target)):
        q.data.copy_(p.data)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(source.state[p][key].to(DEVICE), target.state[q][key].to(DEVICE))
    for optimizer in (source, target):
        train(optimizer, grads[2:])
    for p, q in zip(params_of(ours), params_of(theirs)):
        assert ours.state[p]["step"] == theirs.state[q]["step"] == 4
        torch.testing.assert_close(
            p, q, rtol=1e-5 if dtype == FP32 else 2e-2, atol=1e-6 if dtype == FP32 else 2e-2
        )


def test_loading_fills_the_tensors_a_cuda_graph_may_know_and_shares_none():
    optimizer = TritonAdamW(make_params(*SHAPES), lr=torch.tensor(0.1, device=DEVICE))
    train(optimizer, random_grads(optimizer, 1))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"].fill_(0.3)
    train(optimizer, random_grads(optimizer, 1))
    known = [
        optimizer.param_groups[0]["lr"],
        *(t for state in optimizer.state.values() for t in state.values()),
    ]
    optimizer.load_state_dict(saved)
    now = [
        optimizer.param_groups[0]["lr"],
        *(t for state in optimizer.state.values() for t in state.values()),
    ]
    assert all(a is b for a, b in zip(known, now)) and now[0] == torch.tensor(0.1)
    assert all(state["step"] == 1 for state in optimizer.state.values())
    train(optimizer, random_grads(optimizer, 1))
    assert all(state["step"] == 1 for state in saved["state"].values())


def test_loading_keeps_the_dtype_of_the_moments_that_was_asked_for():
    source = TritonAdamW(make_params(*SHAPES, dtype=BF16))
    train(source, random_grads(source, 1))
    target = TritonAdamW(make_params(*SHAPES, dtype=BF16), moments_dtype=FP32)
    target.load_state_dict(source.state_dict())
    assert all(
        state["exp_avg"].dtype == state["exp_avg_sq"].dtype == FP32
        for state in target.state.values()
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("own", ["numbers", "tensors"])
@pytest.mark.parametrize("saved", ["numbers", "tensors"])
def test_settings_are_loaded_into_what_the_optimizer_has(own, saved):
    def make(kind, *numbers, **options):
        if kind == "tensors":
            numbers = [torch.tensor(number, device=DEVICE) for number in numbers]
        return TritonAdamW(make_params(*SHAPES), lr=numbers[0], betas=numbers[1:], **options)

    def settings(optimizer):
        group = optimizer.param_groups[0]
        return [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]

    source = make(saved, 0.25, 0.5, 0.75, eps=0.125, weight_decay=0.0)
    target = make(own, 0.1, 0.2, 0.3)
    before = settings(target)
    target.load_state_dict(through_a_file(source.state_dict()))
    after = settings(target)
    assert after == [0.25, 0.5, 0.75, 0.125, 0.0]
    assert list(map(type, after)) == list(map(type, before))
    assert own == "numbers" or all(a is b for a, b in zip(after[:3], before[:3]))
    for optimizer in (source, target):
        train(optimizer, random_grads(optimizer, 2))
    assert_same_run(source, target)


def test_maximize_is_loaded_and_how_to_compute_stays():
    ours, theirs = (
        TritonAdamW(make_params(*SHAPES)),
        torch.optim.AdamW(make_params(*SHAPES), foreach=True, maximize=True),
    )
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["maximize"] and ours.param_groups[0]["foreach"] is None


def everything(optimizer):
    """What an optimizer remembers, copied."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return copy.deepcopy(
        (
            groups,
            [dict(optimizer.state.get(p, {})) for p in params_of(optimizer)],
            len(optimizer.state),
        )
    )


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


UNFIT = {  # name: (what makes a state unfit, exception, what its sentence says)
    "moment that could be broadcast": (
        lambda groups, state: state[3].update(exp_avg_sq=torch.ones(1)),
        ValueError,
        r"exp_avg_sq of parameter 3 has shape \(1,\), expected \(6, 5\)",
    ),
    "moment of another shape": (
        lambda groups, state: state[0].update(exp_avg=torch.ones(9, 13)),
        ValueError,
        r"exp_avg of parameter 0 has shape \(9, 13\), expected \(13, 9\)",
    ),
    "steps of each element": (
        lambda groups, state: state[1].update(step=torch.ones(40)),
        ValueError,
        r"step of parameter 1 has shape \(40,\), expected \(\)",
    ),
    "no moment": (
        lambda groups, state: state[3].pop("exp_avg"),
        ValueError,
        "exp_avg of parameter 3 is missing",
    ),
    "sparse moment": (
        lambda groups, state: state[3].update(exp_avg=torch.ones(6, 5).to_sparse()),
        TypeError,
        r"exp_avg of parameter 3 is torch\.float32, torch\.sparse_coo",
    ),
    "negative lr": (
        lambda groups, state: groups[1].update(lr=-0.1),
        ValueError,
        r"lr is -0\.1, expected a number",
    ),
    "negative lr in a tensor": (
        lambda groups, state: groups[1].update(lr=torch.tensor(-0.5)),
        ValueError,
        r"lr is -0\.5, expected a number",
    ),
    "beta of one": (
        lambda groups, state: groups[1].update(betas=(0.9, 1.0)),
        ValueError,
        r"betas is \(0\.9, 1\.0\)",
    ),
    "amsgrad": (
        lambda groups, state: groups[1].update(amsgrad=True),
        ValueError,
        "amsgrad is True, which TritonAdamW",
    ),
    "two numbers for one tensor": (
        lambda groups, state: groups[1].update(lr=0.75),
        ValueError,
        r"one tensor is to be filled with 0\.5 and with 0\.75, expected one number",
    ),
    "parameters missing": (
        lambda groups, state: groups[1]["params"].pop(),
        ValueError,
        r"the state is of groups of \[2, 1\] parameters, expected \[2, 2\]",
    ),
    "a group missing": (
        lambda groups, state: groups.pop(),
        ValueError,
        r"of groups of \[2\] parameters, expected \[2, 2\]",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("spoil, error, sentence", UNFIT.values(), ids=UNFIT)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(spoil, error, sentence, started):
    def make(lr):
        params = make_params(*SHAPES)
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        return TritonAdamW(groups, lr=torch.tensor(lr, device=DEVICE))

    source, target = make(0.5), make(0.25)
    train(source, random_grads(source, 2))
    if started:
        train(target, random_grads(target, 1, seed=7))
    saved = copy.deepcopy(source.state_dict())
    spoil(saved["param_groups"], saved["state"])
    before, groups = everything(target), target.param_groups
    with pytest.raises(error, match=sentence):
        target.load_state_dict(saved)
    assert equal(everything(target), before) and target.param_groups is groups
    target.load_state_dict(source.state_dict())
    assert equal(everything(target), everything(source))


def test_hooks_around_loading_see_and_change_what_is_loaded():
    source, target = (TritonAdamW(make_params((3,))) for _ in range(2))
    train(source, random_grads(source, 2))
    seen = []

    def renumbered(state_dict, by):
        group = state_dict["param_groups"][0]
        numbers = [number + by for number in group["params"]]
        state = {number + by: entry for number, entry in state_dict["state"].items()}
        return {
            "state": state,
            "param_groups": [{**group, "params": numbers, "lr": group["lr"] * 2**by}],
        }

    target.register_load_state_dict_pre_hook(lambda optimizer, saved: renumbered(saved, -7))
    target.register_load_state_dict_post_hook(lambda optimizer: seen.append(len(optimizer.state)))
    target.load_state_dict(renumbered(source.state_dict(), 7))
    assert seen == [1] and equal(everything(target), everything(source))


def test_names_of_parameters_are_saved_and_loaded():
    named = [("w", make_params((3,))[0])]
    source, target = TritonAdamW(named), TritonAdamW([("old", make_params((3,))[0])])
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["param_names"] == ["w"]
    target.load_state_dict(TritonAdamW(make_params((3,))).state_dict())
    assert target.param_groups[0]["param_names"] == ["w"]


# ---- Stepping inside the backward --------------------------------------------------------------


class Model(torch.nn.Module):
    """Three weights, the first one used twice (tied)."""

    def __init__(self, dtype=FP32):
        super().__init__()
        self.embedding, self.hidden, self.bias = make_params((12, 8), (8, 8), (8,), dtype=dtype)

    def forward(self, tokens):
        x = F.embedding(tokens, self.embedding)
        return torch.tanh(x @ self.hidden + self.bias) @ self.embedding.t()

    def loss(self, seed=0):
        tokens = torch.randint(12, (6,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        return self(tokens).float().square().mean()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype, stochastic", [(FP32, False), (BF16, True)])
def test_steps_inside_the_backward_are_the_same_steps(dtype, stochastic):
    optimizers = []
    for in_backward in (False, True):
        model = Model(dtype)
        options = {"stochastic_rounding": stochastic, "step_in_backward": in_backward}
        groups = [
            {"params": [model.embedding]},
            {"params": [model.hidden, model.bias], "weight_decay": 0.3},
        ]
        optimizer = TritonAdamW(groups, lr=0.05, **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for seed in range(3):
            model.loss(seed).backward()
            assert in_backward == all(map(is_freed, model.parameters()))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    assert_same_run(*optimizers)
    assert all(state["step"] == 3 for state in optimizers[1].state.values())


def test_gradients_never_exist_all_at_once(monkeypatch):
    model = Model()
    alive = []
    step = adamw_kernel.adamw_step

    def counting_step(*args, **options):
        alive.append(sum(not is_freed(p) for p in model.parameters()))
        return step(*args, **options)

    monkeypatch.setattr(adamw_kernel, "adamw_step", counting_step)
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    model.loss().backward()
    assert alive == [
        0,
        0,
        0,
    ]  # three steps, a tied weight's too; its own gradient is held by the hook alone
    optimizer.step()
    assert alive == [0, 0, 0]


CLIPPINGS = {
    "by norm": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1e9),
    "by norm, in lists": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 1.0, foreach=True),
    "by value": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 1.0),
    "by hand": lambda ps: [p.grad.mul_(0.5) for p in ps if p.grad is not None],
    "noise": lambda ps: [p.grad.add_(0.5) for p in ps if p.grad is not None],
}


@pytest.mark.parametrize("clip", CLIPPINGS.values(), ids=CLIPPINGS)
def test_clipping_what_the_backward_has_used_is_refused_and_a_step_recovers(clip):
    """clip_grad_norm_ found no gradients, returned 0, and nothing was clipped: of all parameters,
    and of some.
    """
    model = Model()
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    for _ in range(2):
        model.loss().backward()
        weights = [p.detach().clone() for p in model.parameters()]
        for parameters in (list(model.parameters()), *([p] for p in model.parameters())):
            with pytest.raises(RuntimeError, match="step_in_backward=True has used"):
                clip(parameters)
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
        assert all(map(torch.equal, model.parameters(), weights))
    optimizer.close()
    model.loss().backward()
    CLIPPINGS["by norm"](model.parameters())


def test_a_norm_without_clipping_is_unknown_and_leaves_other_gradients_alone():
    """transformers.Trainer asks for it, by clipping to infinity, for its log."""
    model, other = Model(), torch.nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    (model.loss() + other.sum()).backward()
    parameters = [*model.parameters(), other]
    norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf)
    torch._foreach_mul_([other.grad], math.inf / (norm + 1e-6))  # which it does on a GPU
    assert math.isnan(norm.item()) and torch.equal(other.grad, torch.ones_like(other))
    optimizer.step()


def test_gradient_accumulation_is_refused_and_a_step_recovers():
    model = Model()
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    model.loss().backward()
    weights = [p.detach().clone() for p in model.parameters()]
    refused = {"match": r"a second gradient reached a parameter before step\(\)"}
    for loss in (model.loss(1), *(p.sum() for p in model.parameters())):  # of all, of each
        with pytest.raises(RuntimeError, **refused):
            loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, **refused):
            loss.backward(create_graph=True)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights))
    optimizer.step()
    model.loss(1).backward()
    optimizer.step()
    assert all(state["step"] == 2 for state in optimizer.state.values())


@pytest.mark.parametrize("in_backward", [False, True])
def test_backwards_in_accumulating_add_up_and_the_next_one_steps(in_backward):
    models, losses = (Model(), Model()), ([3, 4], [0, 1, 2])
    ours = TritonAdamW(models[0].parameters(), step_in_backward=in_backward)
    theirs = torch.optim.AdamW(models[1].parameters())
    for seeds in losses:
        before = [p.detach().clone() for p in models[0].parameters()]
        with ours.accumulating():
            for seed in seeds[:-1]:
                models[0].loss(seed).backward()
        assert all(map(torch.equal, models[0].parameters(), before))
        assert all(p.grad is not None for p in models[0].parameters())
        models[0].loss(seeds[-1]).backward()
        assert all(is_freed(p) == in_backward for p in models[0].parameters())
        for seed in seeds:
            models[1].loss(seed).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for p, expected in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)


def test_accumulating_ends_with_an_error_and_does_not_hide_one():
    model = Model()
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    with pytest.raises(KeyError), optimizer.accumulating():
        model.loss().backward()
        raise KeyError
    model.loss().backward()
    assert all(map(is_freed, model.parameters()))
    with (
        optimizer.accumulating(),
        pytest.raises(RuntimeError, match="or accumulate in accumulating"),
    ):
        model.loss().backward()


def test_gradients_that_the_last_backward_does_not_reach_are_stepped_in_step():
    models = Model(), Model()
    ours = TritonAdamW(models[0].parameters(), step_in_backward=True)
    theirs = TritonAdamW(models[1].parameters())
    for model, optimizer in zip(models, (ours, theirs)):
        with optimizer.accumulating():
            model.loss().backward()
        model.embedding.square().sum().backward()  # reaches one of three
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.accumulating():  # and then none
            model.loss().backward()
        optimizer.step()
    assert_same_run(ours, theirs)


def test_step_without_a_backward_is_refused():
    model = Model()
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    with pytest.raises(
        RuntimeError, match=r"no backward has stepped a parameter since the last step\(\)"
    ):
        optimizer.step()
    model.loss().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="no backward has stepped"):
        optimizer.step()


def test_gradients_of_before_are_refused():
    model = Model()
    model.loss().backward()
    with pytest.raises(
        ValueError, match="a parameter has a gradient, and step_in_backward=True would add to it"
    ):
        TritonAdamW(model.parameters(), step_in_backward=True)
    model.zero_grad()
    model.bias.requires_grad_(False)
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    model.bias.requires_grad_(True)  # too late for a hook, so that step() takes it
    model.loss().backward()
    optimizer.step()
    assert all(state["step"] == 1 for state in optimizer.state.values())
    assert model.bias in optimizer.state


def test_a_gradient_beside_the_one_that_the_backward_has_stepped_is_refused():
    model = Model()
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    model.loss().backward()
    model.bias.grad = torch.ones_like(model.bias)
    before = model.bias.detach().clone()
    with pytest.raises(RuntimeError, match="a gradient is there of a parameter that the backward"):
        optimizer.step()
    assert torch.equal(model.bias, before)


def test_two_losses_of_different_parameters_make_one_step():
    a, b = make_params((4,), (5,))
    optimizer = TritonAdamW([a, b], step_in_backward=True)
    a.square().sum().backward()
    b.square().sum().backward()
    optimizer.step()
    assert optimizer.state[a]["step"] == optimizer.state[b]["step"] == 1


def test_frozen_parameters_stay_as_they_are_in_the_backward_too():
    model = Model()
    model.hidden.requires_grad_(False)
    before = model.hidden.detach().clone()
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    model.loss().backward()
    optimizer.step()
    assert torch.equal(model.hidden, before) and model.hidden not in optimizer.state


def test_loaded_settings_reach_the_hooks():
    model = Model()
    optimizer = TritonAdamW(model.parameters(), lr=0.1, step_in_backward=True)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = saved["param_groups"][0]["weight_decay"] = 0.0
    optimizer.load_state_dict(saved)
    before = [p.detach().clone() for p in model.parameters()]
    model.loss().backward()
    optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before))


def test_state_loaded_after_a_backward_replaces_what_that_stepped():
    model = Model()
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    model.loss().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    model.loss(1).backward()
    optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="no backward has stepped"):
        optimizer.step()
    model.loss(2).backward()
    optimizer.step()
    assert all(state["step"] == 2 for state in optimizer.state.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["cpu", "gpu", "maximize"])
def test_steps_inside_the_backward_take_the_same_options(kind):
    def make(in_backward):
        model = Model()
        lr, *betas = torch.tensor([0.05, 0.75, 0.9375], device=DEVICE if kind == "gpu" else "cpu")
        options = {"maximize": True} if kind == "maximize" else {"lr": lr, "betas": betas}
        return model, TritonAdamW(model.parameters(), **options, step_in_backward=in_backward)

    optimizers = []
    for in_backward in (False, True):
        model, optimizer = make(in_backward)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        for seed in range(3):
            model.loss(seed).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    assert_same_run(*optimizers)


@pytest.mark.parametrize(
    "way",
    [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_steps_in_step_alone(way):
    model = Model()
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    model.loss().backward()
    optimizer.step()
    twin, twins_optimizer = way((model, optimizer))
    for m, o in ((model, optimizer), (twin, twins_optimizer)):
        m.loss(1).backward()
        assert all(is_freed(p) == (m is model) for p in m.parameters())
        o.step()
    assert_same_run(optimizer, twins_optimizer)


def hooks_of(params):
    return [hook for p in params for hook in (p._post_accumulate_grad_hooks or {}).values()]


def test_a_refused_constructor_leaves_no_hooks():
    a, b = make_params((4,), (5,))
    with pytest.raises(ValueError, match="lr is -1") as raised:
        TritonAdamW([{"params": [a]}, {"params": [b], "lr": -1.0}], step_in_backward=True)
    assert raised.tb is not None and hooks_of([a, b]) == []  # which the traceback keeps alive
    b.grad = torch.ones_like(b)
    with pytest.raises(ValueError, match="a parameter has a gradient") as raised:
        TritonAdamW([{"params": [a]}, {"params": [b]}], step_in_backward=True)
    assert raised.tb is not None and hooks_of([a, b]) == []


@pytest.mark.parametrize("refused", [{"lr": -1.0}, {"betas": (0.5,)}, {"fused": True}, {}], ids=str)
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_refused_group_leaves_the_optimizer_as_it_was(refused, in_backward):
    first, second, third = make_params((4,), (5,), (6,))
    optimizer = TritonAdamW([first], step_in_backward=in_backward)
    if not refused:
        third = torch.nn.Parameter(third.double())
    with pytest.raises((ValueError, TypeError)):
        optimizer.add_param_group({"params": [second, third], **refused})
    assert params_of(optimizer) == [first] and len(optimizer.param_groups) == 1
    assert len(hooks_of([first])) == in_backward and hooks_of([second, third]) == []
    optimizer.add_param_group({"params": [second]})
    (first.sum() + second.sum()).backward()
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in (first, second)] == [
        1,
        1,
    ] and third not in optimizer.state


def test_a_group_with_gradients_is_refused_before_any_hook():
    first, second, third = make_params((4,), (5,), (6,))
    optimizer = TritonAdamW([first], step_in_backward=True)
    third.grad = torch.ones_like(third)
    with pytest.raises(ValueError, match="a parameter has a gradient"):
        optimizer.add_param_group({"params": [second, third]})
    assert params_of(optimizer) == [first] and hooks_of([second, third]) == []


def test_closure_works_with_steps_in_the_backward():
    model = Model()
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    optimizer.step(lambda: model.loss().backward())
    assert all(state["step"] == 1 for state in optimizer.state.values())


def test_close_removes_the_hooks_and_step_uses_gradients_again():
    model = Model()
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    model.loss().backward()
    optimizer.step()
    optimizer.close()
    model.loss(1).backward()
    assert not any(map(is_freed, model.parameters()))
    model.loss(2).backward()
    optimizer.step()
    assert all(state["step"] == 2 for state in optimizer.state.values())


def test_a_dropped_optimizer_frees_its_states_and_lets_go_of_the_parameters():
    """A hook that held it would keep it and all parameters for ever.

    That is the memory of a model that is no longer there.
    """
    model = Model()
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    model.loss().backward()
    optimizer.step()
    state = weakref.ref(optimizer.state[next(model.parameters())]["exp_avg"])
    del optimizer
    gc.collect()
    assert state() is None and not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model.loss(1).backward()
    assert all(p.grad is not None for p in model.parameters())  # as without an optimizer
    parameter = weakref.ref(next(model.parameters()))
    del model
    gc.collect()
    assert parameter() is None


# ---- Bad input ---------------------------------------------------------------------------------


def launch(
    p=None,
    grad=None,
    m=None,
    v=None,
    steps_done=None,
    lr=1e-3,
    beta1=0.9,
    eps=1e-8,
    weight_decay=0.0,
):
    tensors = [torch.ones(4, 6, device=DEVICE) if t is None else t for t in (p, grad, m, v)]
    steps_done = torch.zeros((), device=DEVICE) if steps_done is None else steps_done
    adamw_step(*tensors, steps_done, lr, beta1, 0.999, eps, weight_decay)


ONES = torch.ones(4, 6, device=DEVICE)
EXPANDED, SLIDING = (
    torch.ones(6, device=DEVICE).expand(4, 6),
    torch.ones(9, device=DEVICE).as_strided((4, 6), (1, 1)),
)
BAD_INPUT = {  # name: (arguments, exception, what its sentence says)
    "float64": (
        {"p": ONES.double()},
        TypeError,
        "p is torch.float64, torch.strided, expected torch.float16 or",
    ),
    "complex": ({"p": ONES.to(torch.complex64)}, TypeError, "p is torch.complex64"),
    "sparse gradient": (
        {"grad": ONES.to_sparse()},
        TypeError,
        "grad is torch.float32, torch.sparse_coo, expected",
    ),
    "bf16 gradient": (
        {"grad": ONES.bfloat16()},
        TypeError,
        "grad is torch.bfloat16, .*expected torch.float32",
    ),
    "fp16 moments": (
        {"v": ONES.half()},
        TypeError,
        "v is torch.float16, .*expected torch.bfloat16 or torch.float32",
    ),
    "shorter gradient": (
        {"grad": ONES[:3]},
        ValueError,
        r"grad has shape \(3, 6\) on .*expected \(4, 6\)",
    ),
    "gradient elsewhere": (
        {"grad": ONES.to("meta")},
        ValueError,
        f"grad has .* on meta, expected .* {DEVICE}",
    ),
    "moment elsewhere": (
        {"m": ONES.to("meta")},
        ValueError,
        f"m has .* on meta, expected .* on p's {DEVICE}",
    ),
    "steps elsewhere": (
        {"steps_done": ONES.sum().to("meta")},
        ValueError,
        r"steps_done .* on meta",
    ),
    "steps of each row": (
        {"steps_done": ONES[:, 0]},
        ValueError,
        r"steps_done has shape \(4,\) on",
    ),
    "whole steps": ({"steps_done": ONES.sum().long()}, TypeError, "steps_done is torch.int64"),
    "two learning rates": (
        {"lr": ONES[0, :2]},
        ValueError,
        r"lr is a tensor of shape \(2,\), expected",
    ),
    "learning rate elsewhere": (
        {"lr": ONES.sum().to("meta")},
        ValueError,
        "lr is a tensor on meta, expected p's",
    ),
    "sparse beta": (
        {"beta1": ONES[0, 0].to_sparse()},
        ValueError,
        r"beta1 is a tensor of shape \(\), expected a number",
    ),
    "complex weight decay": (
        {"weight_decay": 1j},
        ValueError,
        "weight_decay is 1j, expected a number or a plain tensor",
    ),
    "text": ({"eps": "1e-8"}, ValueError, "eps is '1e-8', expected a number"),
    "overlap": (
        {"p": EXPANDED},
        ValueError,
        r"p of shape \(4, 6\) has strides \(0, 1\), by which elements share memory",
    ),
    "overlapping moment": (
        {"v": EXPANDED},
        ValueError,
        r"v of shape \(4, 6\) has strides \(0, 1\), by which elements",
    ),
    "windows": (
        {"p": SLIDING},
        ValueError,
        r"p of shape \(4, 6\) has strides \(1, 1\), by which elements share",
    ),
}


@pytest.mark.parametrize("arguments, error, sentence", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_refused_with_a_sentence(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        launch(**arguments)


def test_cpu_tensor_without_the_interpreter_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr(adamw_kernel, "INTERPRETED", False)
    ones = ONES.cpu()
    with pytest.raises(
        ValueError, match="p is on cpu, expected a GPU: move it, or export TRITON_INTERPRET=1"
    ):
        launch(ones, ones, ones, ones, torch.zeros(()))


AT_LEAST_0, UNSUPPORTED = (
    "expected a number of at least 0",
    "which TritonAdamW does not support, expected False",
)
BAD_OPTIONS = [
    ("lr", -1e-3, f"lr is -0.001, {AT_LEAST_0}"),
    ("lr", NAN, f"lr is nan, {AT_LEAST_0}"),
    ("lr", INF, f"lr is inf, {AT_LEAST_0}"),
    ("lr", "0.1", f"lr is 0.1, {AT_LEAST_0}"),
    ("lr", torch.tensor(-0.5), f"lr is -0.5, {AT_LEAST_0}"),
    ("lr", torch.tensor(-0.5, device=DEVICE), f"lr is -0.5, {AT_LEAST_0}"),
    ("lr", torch.tensor(NAN), f"lr is nan, {AT_LEAST_0}"),
    ("lr", torch.ones(2), rf"lr is tensor\(\[1., 1.\]\), {AT_LEAST_0}"),
    ("lr", torch.tensor(1j), f"lr is 1j, {AT_LEAST_0}"),
    ("eps", NAN, f"eps is nan, {AT_LEAST_0}"),
    ("eps", torch.tensor(-1.0), f"eps is -1.0, {AT_LEAST_0}"),
    ("weight_decay", -0.1, f"weight_decay is -0.1, {AT_LEAST_0}"),
    ("weight_decay", None, f"weight_decay is None, {AT_LEAST_0}"),
    ("betas", (0.9, 1.0), r"betas is \(0.9, 1.0\), expected two numbers from 0 to below 1"),
    ("betas", (0.9,), r"betas is \(0.9,\), expected two numbers"),
    ("betas", 0.9, "betas is 0.9, expected two numbers"),
    (
        "betas",
        (torch.tensor(1.5), torch.tensor(0.5)),
        r"betas is \(tensor\(1.5000\), .*, expected two numbers",
    ),
    ("moments_dtype", FP16, "moments_dtype is torch.float16, expected float32, bfloat16 or None"),
    ("seed", -1, "seed is -1, expected a whole number from 0"),
    ("seed", 1.5, "seed is 1.5, expected a whole number from 0"),
    ("seed", True, "seed is True, expected a whole number from 0"),
    ("amsgrad", True, f"amsgrad is True, {UNSUPPORTED}: leave it out"),
    ("foreach", True, f"foreach is True, {UNSUPPORTED}: leave it out"),
    ("fused", True, f"fused is True, {UNSUPPORTED}: leave it out"),
    ("differentiable", True, f"differentiable is True, {UNSUPPORTED}: leave it out"),
]


@pytest.mark.parametrize("option, value, sentence", BAD_OPTIONS)
def test_bad_options_are_refused_with_a_sentence(option, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        TritonAdamW(make_params((3,)), **{option: value})
    with pytest.raises(ValueError, match=sentence):
        TritonAdamW([{"params": make_params((3,)), option: value}])


BAD_PARAMETERS = {  # name: (parameter, exception, what its sentence says)
    "float64": (
        ONES.double(),
        TypeError,
        "a parameter is torch.float64, torch.strided, expected torch.float16 or",
    ),
    "sparse": (
        ONES.to_sparse(),
        TypeError,
        "a parameter is torch.float32, torch.sparse_coo, expected torch.float16 or",
    ),
    "overlap": (
        EXPANDED,
        ValueError,
        r"a parameter of shape \(4, 6\) has strides \(0, 1\), by which elements share",
    ),
}


@pytest.mark.parametrize("data, error, sentence", BAD_PARAMETERS.values(), ids=BAD_PARAMETERS)
def test_parameters_that_no_step_can_take_are_refused_before_a_backward(data, error, sentence):
    with pytest.raises(error, match=sentence):
        TritonAdamW([torch.nn.Parameter(data)])
    optimizer = TritonAdamW(make_params((3,)))
    with pytest.raises(error, match=sentence):
        optimizer.add_param_group({"params": [*make_params((3,)), torch.nn.Parameter(data)]})
    assert len(optimizer.param_groups) == 1
    TritonAdamW([torch.nn.Parameter(data, requires_grad=False)])  # what is frozen may be anything


@pytest.fixture
def mesh(tmp_path):
    """A mesh of this one process."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


def as_dtensor(t, mesh, placement):
    """t as a DTensor whose only part it is, so that nothing is sent."""
    return DTensor.from_local(t.to(DEVICE), mesh, [placement], run_check=False)


WRAPPED = "is a DTensor, which holds no memory of its own, expected a plain tensor: pass the one"


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_dtensors_are_refused_before_any_pointer_is_taken(mesh, placement, monkeypatch):
    monkeypatch.setattr(adamw_kernel, "_adamw_kernel", None)  # a launch all the same harms nothing
    wrapped = as_dtensor(torch.ones(4, 6), mesh, placement)
    for name in ("p", "grad", "m", "v"):
        with pytest.raises(TypeError, match=f"{name} {WRAPPED}"):
            launch(**{name: wrapped})
    with pytest.raises(TypeError, match=f"steps_done {WRAPPED}"):
        launch(steps_done=as_dtensor(torch.zeros(()), mesh, Replicate()))
    with pytest.raises(ValueError, match=r"lr is a tensor of shape \(1,\), expected a number"):
        launch(lr=as_dtensor(torch.ones(1), mesh, placement))


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_dtensors_of_one_process_take_the_steps_of_what_they_hold(mesh, placement, in_backward):
    plain = make_params((4, 6), (5,), dtype=BF16)
    wrapped = [torch.nn.Parameter(as_dtensor(p.detach().clone(), mesh, placement)) for p in plain]
    options = {"stochastic_rounding": True, "step_in_backward": in_backward}
    runs = [TritonAdamW(params, **options) for params in (plain, wrapped)]
    for optimizer in runs:
        for _ in range(2):
            sum((p * p).sum() for p in params_of(optimizer)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(plain, wrapped):
        assert torch.equal(p, q.to_local()) and q.grad is None
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(runs[0].state[p][key], runs[1].state[q][key].to_local())
            assert runs[1].state[q][key].placements == (placement,)


UNFIT_PLACEMENTS = {  # name: (placements of a parameter, what the sentence says)
    "sum to be made": (Partial(), r"the placements \(Partial\(.*, expected no Partial"),
    "columns": (Shard(1), r"the placements \(Shard\(dim=1\),\) .* for stochastic_rounding"),
}


@pytest.mark.parametrize("placement, sentence", UNFIT_PLACEMENTS.values(), ids=UNFIT_PLACEMENTS)
@pytest.mark.parametrize("in_backward", [False, True])
def test_dtensors_that_no_step_can_take_are_refused_at_construction_and_with_a_new_group(
    mesh, placement, sentence, in_backward
):
    local = torch.ones(4, 6, dtype=BF16)
    wrapped = torch.nn.Parameter(as_dtensor(local, mesh, placement))
    options = {"step_in_backward": in_backward, "stochastic_rounding": True}
    with pytest.raises(ValueError, match=f"a parameter has {sentence}"):
        TritonAdamW([wrapped], **options)
    optimizer = TritonAdamW(make_params((3,)), **options)
    with pytest.raises(ValueError, match=f"a parameter has {sentence}"):
        optimizer.add_param_group({"params": [wrapped]})
    assert len(optimizer.param_groups) == 1 and hooks_of([wrapped]) == []


def test_dtensors_of_doubles_are_refused(mesh):
    wrapped = as_dtensor(torch.ones(4, 6, dtype=torch.float64), mesh, Shard(0))
    with pytest.raises(TypeError, match=r"a parameter is torch\.float64"):
        TritonAdamW([torch.nn.Parameter(wrapped)])


def test_gradient_that_other_processes_may_have_to_be_averaged_with_is_left_for_step(
    mesh, monkeypatch
):
    runs = []
    for in_backward in (True, False):
        model = Model()
        optimizer = TritonAdamW(model.parameters(), step_in_backward=in_backward)
        with monkeypatch.context() as several:
            several.setattr(dist, "get_world_size", lambda: 2)
            model.loss().backward()
        assert not any(map(is_freed, model.parameters()))
        optimizer.step()
        runs.append(optimizer)
    assert_same_run(*runs)


def test_a_state_placed_otherwise_is_refused(mesh):
    plain, wrapped = make_params((4, 6)), make_params((4, 6))
    wrapped = [torch.nn.Parameter(as_dtensor(p, mesh, Shard(0))) for p in wrapped]
    a, b = TritonAdamW(plain), TritonAdamW(wrapped)
    for optimizer in (a, b):
        params_of(optimizer)[0].sum().backward()
        optimizer.step()
    before = everything(a)
    with pytest.raises(TypeError, match=r"exp_avg of parameter 0 has placements \(Shard.* None"):
        a.load_state_dict(b.state_dict())
    with pytest.raises(TypeError, match=r"exp_avg of .* placements None, expected \(Shard"):
        b.load_state_dict(a.state_dict())
    assert equal(everything(a), before)


def test_stochastic_rounding_of_fp16_is_refused_and_of_fp32_does_nothing():
    with pytest.raises(ValueError, match="stochastic_rounding is True, expected False for float16"):
        TritonAdamW(make_params((3,), dtype=FP16), stochastic_rounding=True)
    start, (g,) = randn(100), gradients(randn(100), 1)
    runs = [
        steps_and_change(TritonAdamW, start, [g], stochastic_rounding=stochastic)
        for stochastic in (False, True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_sparse_gradient_of_an_embedding_is_refused():
    embedding = torch.nn.Embedding(10, 4, sparse=True, device=DEVICE)
    embedding(torch.tensor([1, 2], device=DEVICE)).sum().backward()
    with pytest.raises(TypeError, match=r"torch\.sparse_coo, expected"):
        TritonAdamW(embedding.parameters()).step()


# ---- What only a GPU can show ------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("in_backward", [False, True])
def test_replays_of_a_cuda_graph_are_the_steps_of_a_run_without_one(in_backward):
    def make():
        model = Model(BF16)
        settings = torch.tensor([0.05, 0.9, 0.95], device=DEVICE)
        options = {"stochastic_rounding": True, "step_in_backward": in_backward}
        optimizer = TritonAdamW(model.parameters(), settings[0], tuple(settings[1:]), **options)
        return model, settings, optimizer

    def one_step(model, optimizer, tokens):
        model(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    tokens = torch.arange(6, device=DEVICE)
    plain_model, plain_settings, plain = make()
    model, settings, optimizer = make()
    graph, _ = captured(lambda: one_step(model, optimizer, tokens))
    for step in range(4):
        one_step(plain_model, plain, tokens)
        if step > 0:  # the first one was made before the capture, which makes none
            graph.replay()
        plain_settings.mul_(0.5), settings.mul_(0.5)
    assert all(state["step"] == 4 for state in optimizer.state.values())
    assert_same_run(optimizer, plain)


@needs_gpu
def test_a_scheduler_reaches_the_replays_of_a_cuda_graph():
    def make():
        model = Model()
        optimizer = TritonAdamW(model.parameters(), lr=torch.tensor(0.05, device=DEVICE))
        return model, optimizer, lr_scheduler.OneCycleLR(optimizer, 0.1, 8, cycle_momentum=False)

    def one_step(model, optimizer):
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    tokens = torch.arange(6, device=DEVICE)
    plain_model, plain, plain_scheduler = make()
    model, optimizer, scheduler = make()
    graph, _ = captured(lambda: one_step(model, optimizer))
    for step in range(5):
        one_step(plain_model, plain)
        if step > 0:
            graph.replay()
        plain_scheduler.step(), scheduler.step()
    assert_same_run(optimizer, plain)


@needs_gpu
def test_capture_without_a_step_before_is_refused():
    p = torch.nn.Parameter(randn(64))
    p.grad = torch.ones_like(p)
    optimizer = TritonAdamW([p])
    with (
        pytest.raises(RuntimeError, match="without state is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


@needs_gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_waits_for_the_gpu(device):
    lr, *betas = torch.tensor([0.1, 0.9, 0.999], device=device)
    optimizer = TritonAdamW(make_params(*SHAPES), lr=lr, betas=betas)
    grads = random_grads(optimizer, 2)
    train(optimizer, grads[:1])  # compiling may wait
    with waiting_forbidden():
        train(optimizer, grads[1:])


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kind", ["floats", "ones", "lr in a tensor", "tensors", "maximize"])
def test_torch_compile_gives_the_same_numbers_in_one_graph(seed, kind):
    torch._dynamo.reset()
    numbers = torch.tensor([0.05, 0.8, 0.95], device=DEVICE)
    lr = {"floats": 0.05, "ones": 1, "maximize": 0.05}.get(kind, numbers[0])
    betas = numbers[1:] if kind == "tensors" else (0.8, 0.95)

    def step(p, g, m, v, steps_done):
        adamw_step(p, g, m, v, steps_done, lr, *betas, 1e-3, 0.3, seed, maximize=kind == "maximize")

    compiled = torch.compile(step, fullgraph=True)
    for n in (4096, 5000):
        inputs = [randn(n, dtype=BF16, seed=i).abs() for i in range(4)]
        ours, theirs = ([t.clone() for t in inputs] for _ in range(2))
        steps_done = torch.tensor(2.0, device=DEVICE)
        step(*ours, steps_done)
        compiled(*theirs, steps_done)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_whole_step_under_torch_compile(tensor_lr):
    torch._dynamo.reset()
    runs = []
    for compile_step in (False, True):
        lr = torch.tensor(0.05, device=DEVICE) if tensor_lr else 0.05
        optimizer = TritonAdamW(make_params(*SHAPES), lr=lr)
        train(optimizer, random_grads(optimizer, 1))
        step = torch.compile(optimizer.step) if compile_step else optimizer.step
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        for grads in random_grads(optimizer, 3):
            for p, g in zip(params_of(optimizer), grads):
                p.grad = g.clone()
            step()
            scheduler.step()
        runs.append(optimizer)
    assert_same_run(*runs)


@needs_gpu
def test_offsets_beyond_int32(gpu_memory):
    n, tail = 2**31 + 4096, 3000
    gpu_memory(24)
    p, g, m, v = (torch.zeros(n, dtype=BF16, device=DEVICE) for _ in range(4))
    p[-tail:], g[-tail:] = randn(tail, dtype=BF16), randn(tail, dtype=BF16, seed=1)
    small = [t[-tail:].clone() for t in (p, g, m, v)]
    settings = (0.05, 0.8, 0.95, 1e-3, 0.3)
    adamw_step(p, g, m, v, torch.zeros((), device=DEVICE), *settings)
    adamw_step(*small, torch.zeros((), device=DEVICE), *settings)
    assert all(torch.equal(t[-tail:], s) for t, s in zip((p, g, m, v), small))
    assert not any(t[:-tail].any() for t in (p, g, m, v))


@needs_gpu
@pytest.mark.parametrize("in_backward", [False, True])
def test_step_allocates_nothing_and_the_backward_frees_gradients(in_backward):
    weights = [torch.nn.Parameter(randn(1024, 1024)) for _ in range(8)]
    optimizer = TritonAdamW(weights, step_in_backward=in_backward)
    one = weights[0].numel() * 4
    for _ in range(2):
        x = torch.ones(4, 1024, device=DEVICE)
        for w in weights:
            x = x @ w / 32
        loss = x.sum()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss.backward()
        optimizer.step()
        extra = torch.cuda.max_memory_allocated() - before
        optimizer.zero_grad()
    assert extra < (3 * one if in_backward else 9 * one), f"{extra / one} gradients"


@needs_gpu
def test_sizes_compile_at_most_once_for_those_that_16_divides_and_once_for_the_others(monkeypatch):
    compiled = []
    runtime = triton.knobs.runtime
    monkeypatch.setattr(
        runtime, "jit_post_compile_hook", lambda **info: compiled.append(info["repr"])
    )
    adamw_kernel._adamw_kernel.device_caches.clear()
    for n, kernels in ((64, 1), (4096, 1), (48, 1), (50, 2), (51, 2), (1_000_003, 2)):
        optimizer = TritonAdamW(
            make_params((n,), (n,), dtype=BF16), lr=n * 1e-6, seed=n, stochastic_rounding=True
        )
        train(optimizer, random_grads(optimizer, 2))
        assert len(compiled) == kernels


@needs_two_gpus
def test_parameters_on_a_gpu_that_is_not_the_current_one():
    start, g = randn(3000, dtype=BF16), gradients(randn(3000, dtype=BF16), 1)
    here = steps_and_change(TritonAdamW, start, g, stochastic_rounding=True)
    with torch.cuda.device(0):
        there = steps_and_change(
            TritonAdamW, start.to("cuda:1"), [t.to("cuda:1") for t in g], stochastic_rounding=True
        )
    assert all(torch.equal(a, b.to(a.device)) for a, b in zip(here, there))
    for lr in (0.1, torch.tensor(0.1), torch.tensor(0.1, device="cuda:0")):
        params = [torch.nn.Parameter(t) for t in (start.clone(), start.to("cuda:1"))]
        mixed = TritonAdamW(params, lr=lr)
        grads = [[t, t.to("cuda:1")] for t in g]
        train(mixed, grads)
        assert torch.equal(params_of(mixed)[0], params_of(mixed)[1].to("cuda:0"))


# ---- The table ---------------------------------------------------------------------------------


def main() -> int:
    command_line.Parser(__doc__).parse_args()
    print_title("AdamW")
    passed = print_tests({kind: kind for kind in KINDS}, kind_checks)
    print("\nWeights of a language model (standard deviation 0.02), lr 1e-5")
    print("  moved by one step, and how far all go in 5 steps, in units of lr:")
    for name, (moved, distance) in moved_weights().items():
        print(f"  {name:<26} {moved:7.1%} {distance:8.3f}")
    print("\nLoss of a small network after 40 steps")
    for name, loss in small_model_losses().items():
        print(f"  {name:<26} {loss:.4f}")
    return print_verdict("AdamW correctness", passed)


if __name__ == "__main__":
    command_line.run_main(main)
