"""What the AdamW kernel has beside the contracts, and what it shares with that of 8-bit moments.

adamw8_test.py tests 8-bit moments.  adamw_optimizer_test.py tests the optimizer around the kernels.
"""

import math

import pytest
import torch

from harness.benchmark.checking import assert_all_passed, compare
from harness.cli.device import DEVICE, HAS_GPU
from kernel_support import tl, triton
from next_steps.lessons import adamw8, adamw_kernel
from next_steps.lessons.adamw8 import adamw8_step, dequantize_moments, new_moments, quantize_moments
from next_steps.lessons.adamw_kernel import (
    _one_minus_power,
    adamw_reference,
    adamw_step,
    store_rounded,
)
from next_steps.lessons.adamw_optimizer import new_state
from tests.fixtures import needs_gpu

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAN, INF = math.nan, math.inf
SHAPE = (4096, 4096) if HAS_GPU else (5, 1001)  # on the CPU: three blocks, the last one ragged
# lr and weight_decay so large that each term of the formula shows in bf16 too
SETTINGS = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}
CODES = torch.uint8  # the dtype of moments that stands for codes of 8 bits
NUMBERS = 0.05, 0.8, 0.95, 1e-3, 0.3  # the same
MOMENTS = "exp_avg", "exp_avg_sq"
for_both_kernels = pytest.mark.parametrize("moments", [None, CODES], ids=["plain", "8 bits"])

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def randn(*shape, dtype=FP32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def gradients(p, steps, seed=100):
    return [(0.3 + randn(*p.shape, seed=seed + t)).to(p) for t in range(steps)]


def counted(steps):
    return torch.tensor(float(steps), device=DEVICE)


def step_with(moments_dtype):
    return adamw8_step if moments_dtype == CODES else adamw_step


def moments_of(p, dtype):
    """Return the moments of a parameter that has made no step."""
    _, *moments = new_state(p, dtype).values()
    return moments


def random_moments(like, dtype):
    m, v = randn(*like.shape, seed=2), randn(*like.shape, seed=3).abs()
    return list(quantize_moments(m, v)) if dtype == CODES else [m.to(like.dtype), v.to(like.dtype)]


def kernel_steps(
    start,
    grads,
    lr=1e-3,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=1e-2,
    moments_dtype=None,
    **options,
):
    """Return (the change of a parameter, its moments) after steps with the kernel."""
    p, step = start.clone(), step_with(moments_dtype)
    moments = moments_of(p, moments_dtype)
    for done, g in enumerate(grads):
        step(p, g, *moments, counted(done), lr, *betas, eps, weight_decay, **options)
    return p.double() - start.double(), *moments


def train(optimizer, grads_of_steps):
    """Take steps with the given gradients, one list a step; None: a parameter without gradient."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for grads in grads_of_steps:
        for p, g in zip(params, grads):
            p.grad = None if g is None else g.clone()
        optimizer.step()


def all_equal(a, b):
    return all(map(torch.equal, a, b))


# ---- The numbers -------------------------------------------------------------------------------


def test_reference_is_torchs_formula():
    start = randn(50, dtype=torch.float64)
    p, grads = torch.nn.Parameter(start.clone()), gradients(start, 3)
    optimizer = torch.optim.AdamW([p], foreach=False, **SETTINGS)
    train(optimizer, [[g] for g in grads])
    found, m, v = start, torch.zeros_like(start), torch.zeros_like(start)
    for step, g in enumerate(grads, start=1):
        found, m, v = adamw_reference(found, g, m, v, step, *NUMBERS)
    assert all_equal((found, m, v), (p, *(optimizer.state[p][key] for key in MOMENTS)))


@triton.jit
def one_minus_power_kernel(log_beta, steps_ptr, out_ptr):
    i = tl.program_id(0)
    tl.store(out_ptr + i, _one_minus_power(tl.cast(log_beta, tl.float32), tl.load(steps_ptr + i)))


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.999999])
def test_bias_correction_does_not_cancel_in_the_first_steps_nor_drift_in_late_ones(beta):
    steps = torch.tensor([1, 2, 3, 5, 10, 100, 499, 500, 693, 1000, 10_000, 1_000_000.0])
    out = torch.full((len(steps),), NAN, device=DEVICE)
    one_minus_power_kernel[(len(steps),)](math.log(beta), steps.to(DEVICE), out)
    exact = -torch.expm1(steps.double() * math.log(beta))
    # 1 - exp(...) in fp32: 5e-5 for beta 0.999
    assert ((out.cpu().double() - exact) / exact).abs().max() < 5e-7


@pytest.mark.parametrize("done", [0, 1, 9, 99_999])
@for_both_kernels
def test_step_continues_from_the_count_it_is_given(moments, done):
    (start, g), settings = (randn(600, seed=i) for i in range(2)), (1e-2, 0.9, 0.999, 1e-8, 0.0)
    given = random_moments(start, moments)
    m, v = dequantize_moments(adamw8.Moments(*given), FP32) if moments == CODES else given
    ref64, *_ = adamw_reference(*(t.double() for t in (start, g, m, v)), done + 1, *settings)
    eager, *_ = adamw_reference(start, g, m, v, done + 1, *settings)
    p, counter = start.clone(), counted(done)
    step_with(moments)(p, g, *given, counter, *settings)
    changes = (t.double() - start.double() for t in (p, ref64, eager))
    assert_all_passed([compare("weights", *changes, dtype=FP32)])
    assert counter == done, "the launcher must leave the count to its caller"


@for_both_kernels
def test_zero_gradient_only_decays_the_weights(moments):
    start, zero = randn(600), torch.zeros(600, device=DEVICE)
    options = {"lr": 0.5, "weight_decay": 0.5, "moments_dtype": moments}
    change, *after = kernel_steps(start, [zero], **options)
    torch.testing.assert_close(change, -0.25 * start.double(), rtol=1e-6, atol=1e-6)
    assert not any(t.any() for t in after)


def test_tensors_on_the_cpu_are_read_by_the_host_and_those_of_the_gpu_are_left_there():
    gpu, number = torch.device("cuda", 0), torch.tensor(0.25)
    read = adamw_kernel.number_for(gpu, "lr", number)
    assert type(read) is float and read == 0.25
    assert adamw_kernel.number_for(number.device, "lr", number) is number


# ---- Stochastic rounding -----------------------------------------------------------------------

N = 2**14


@triton.jit
def round_kernel(x_ptr, out_ptr, seed, index, step, TENSOR: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    block = tl.program_id(0)
    lane = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x, step = tl.load(x_ptr + lane), tl.cast(step, tl.float32)
    store_rounded(out_ptr, lane, lane >= 0, x, seed, block, TENSOR, index, step, BLOCK_SIZE)


def rounded(x, seed=0, index=0, step=1, tensor=0):
    """Return fp32 x (N,) stochastically rounded to bf16 by the kernel's own function."""
    out = torch.full((N,), NAN, dtype=BF16, device=DEVICE)
    options = {"TENSOR": tensor, "BLOCK_SIZE": 2048}
    round_kernel[(N // 2048,)](x, out, seed, index, step, **options)
    return out


def bits(t):
    return t.view(torch.int32 if t.dtype == FP32 else torch.int16)


def fp32_of_bits(*patterns):
    values = torch.tensor([b - 2**32 if b >= 2**31 else b for b in patterns], dtype=torch.int64)
    return values.to(torch.int32).view(FP32).to(DEVICE)


def test_rounding_goes_to_one_of_the_two_neighbours_only():
    x = randn(N) * torch.exp2(20 * randn(N, seed=1))
    # the neighbour nearer to 0, or the next one
    beyond = bits(rounded(x).float()) - (bits(x) & -65536)
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
    assert 0.7 < out.isinf().double().mean() < 0.8
    assert (out[~out.isinf()] == torch.finfo(BF16).max).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("fraction", [1, 655, 21_845, 32_768, 60_000, 65_535])  # of 65,536
def test_rounding_is_right_on_average(fraction):
    for sign in (0, 0x80000000):
        x = fp32_of_bits(sign + 0x3F800000 + fraction).expand(N).contiguous()
        nearer_to_zero = rounded(fp32_of_bits(sign + 0x3F800000).expand(N).contiguous())
        up = sum((rounded(x, step=step) != nearer_to_zero).sum().item() for step in (1, 2))
        chance = fraction / 65_536
        assert abs(up - 2 * N * chance) <= 5 * math.sqrt(2 * N * chance * (1 - chance)) + 1


def coins(**key):
    """Return N tosses: 1 where a number in the middle of two was rounded up, -1 where down."""
    return 2.0 * (rounded(fp32_of_bits(0x3F808000).expand(N).contiguous(), **key) > 1).double() - 1


KEYS = [
    *({}, {"seed": 1}, {"seed": 2**40}, {"index": 1}, {"index": 2}, {"step": 2}, {"step": 3}),
    *({"tensor": 1}, {"tensor": 2}, {"index": 1, "step": 2}, {"seed": 1, "index": 1}),
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


def test_a_seed_gives_bits_of_its_own_in_bf16_and_changes_nothing_in_fp32():
    for dtype in (BF16, FP32):
        start = randn(3000, dtype=dtype)
        grads = gradients(start, 2)
        plain, one, other = (kernel_steps(start, grads, seed=seed) for seed in (None, 5, 6))
        for pairs in (zip(plain, one), zip(one, other)):
            assert all(torch.equal(a, b) == (dtype == FP32) for a, b in pairs)


@pytest.mark.exhaustive
def test_block_size_of_a_launch_does_not_show_in_the_results(monkeypatch):
    start = randn(5001, dtype=BF16)
    grads, results = gradients(start, 2), []
    for size in (256, 2048):
        monkeypatch.setattr(adamw_kernel, "BLOCK_SIZE", size)
        results.append(kernel_steps(start, grads, seed=0))
    assert all_equal(*results)


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
        assert all_equal(part, [t[first:last] for t in expected]), (first, last)
    far = [t[:50].clone() for t in tensors], [t[:50].clone() for t in tensors]
    for part, offset in zip(far, (2**33, 2**33 + 1024)):
        adamw_step(*part, *settings, offset=offset)
    assert not torch.equal(far[0][0], far[1][0])


@pytest.mark.exhaustive
def test_second_moment_decays_by_a_tenth_of_a_percent_a_step():
    steps, v = 30, {}
    for seed in (None, 0):
        p, zero = (make(4000, dtype=BF16, device=DEVICE) for make in (torch.ones, torch.zeros))
        m, v[seed] = torch.zeros_like(p), torch.ones_like(p)
        for done in range(1, 1 + steps):
            adamw_step(p, zero, m, v[seed], counted(done), 0.0, 0.9, 0.999, 1e-8, 0.0, seed)
    assert (v[None] == 1).all(), "rounded to nearest, v does not decay: that is the fault to show"
    assert abs(v[0].double().mean() / 0.999**steps - 1) < 0.002


# ---- Shapes and layouts ------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 255, 256, 257, 1023, 1024, 1025, 2305])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@for_both_kernels
def test_neighbours_in_memory_stay_untouched(moments, dtype, n):
    start, (g,) = randn(n, dtype=dtype), gradients(randn(n, dtype=dtype), 1)
    given = start, g, *moments_of(start, moments)
    memory = [torch.full((t.numel() + 2 * 64,), 7, dtype=t.dtype, device=DEVICE) for t in given]
    p, grad, *after = (m[64:-64].view(t.shape).copy_(t) for m, t in zip(memory, given))
    step_with(moments)(p, grad, *after, counted(0), *NUMBERS, seed=0)
    assert all((t[:64] == 7).all() and (t[-64:] == 7).all() for t in memory)
    assert torch.equal(grad, g), "the gradient must not change"
    expected = kernel_steps(start, [g], **SETTINGS, moments_dtype=moments, seed=0)
    assert all_equal((p.double() - start.double(), *after), expected)


def test_moments_of_other_strides_than_the_parameter():
    p, g, m, v = (randn(6, 5, seed=seed) for seed in range(4))
    other, plain = [p.t().contiguous().t(), m, v.abs()], [p.clone(), m.clone(), v.abs()]
    for t, *moments in (other, plain):
        adamw_step(t, g, *moments, counted(3), *NUMBERS)
    assert all_equal(other, plain) and other[0].stride() != m.stride()
    assert not torch.equal(m, randn(6, 5, seed=2)), "the moments must change in their own memory"


# ---- Bad input ---------------------------------------------------------------------------------

ONES = torch.ones(4, 6, device=DEVICE)
EXPANDED = torch.ones(6, device=DEVICE).expand(4, 6)
SLIDING = torch.ones(9, device=DEVICE).as_strided((4, 6), (1, 1))
META = torch.ones(4, 6, device="meta")


CODED = new_moments(ONES)
TENSORS = {  # of a launch, by dtype of the moments
    None: dict.fromkeys(("p", "grad", "m", "v"), ONES) | {"steps_done": counted(0)},
    CODES: {"p": ONES, "grad": ONES, **CODED._asdict(), "steps_done": counted(0)},
}


def launch(moments, **given):
    scalars = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    step_with(moments)(**(TENSORS[moments] | scalars | given))


SHARED_MEMORY = r"of shape \(4, 6\) has strides \(., 1\), by which elements share memory"
BAD_FOR_BOTH = [  # arguments, exception, what its sentence says
    ({"p": ONES.double()}, TypeError, "p is torch.float64, expected torch.float16 or"),
    ({"p": EXPANDED}, ValueError, f"p {SHARED_MEMORY}"),
    ({"p": SLIDING}, ValueError, f"p {SHARED_MEMORY}"),
    ({"p": torch._neg_view(ONES)}, TypeError, r"p holds its numbers negated .* its resolve_neg"),
    ({"grad": ONES.bfloat16()}, TypeError, "grad is torch.bfloat16, expected torch.float32"),
    ({"grad": ONES[:3]}, ValueError, r"grad has shape \(3, 6\), expected \(4, 6\)"),
    ({"grad": META}, ValueError, f"grad is on meta, expected p's {DEVICE}"),
    ({"steps_done": ONES[:, 0]}, ValueError, r"steps_done has shape \(4,\), expected \(\)"),
    ({"steps_done": ONES.sum().long()}, TypeError, "steps_done is torch.int64, expected"),
    ({"lr": ONES[0, :2]}, ValueError, r"lr is a tensor of shape \(2,\), expected a number"),
    ({"lr": META.sum()}, ValueError, "lr is a tensor on meta, expected p's"),
    ({"beta1": ONES[0, 0].to_sparse()}, ValueError, r"beta1 is a tensor of shape \(\), expected"),
    ({"weight_decay": 1j}, ValueError, "weight_decay is 1j, expected a number or a plain tensor"),
    ({"eps": "1e-8"}, ValueError, "eps is '1e-8', expected a number"),
]
BAD_INPUT = [
    *((moments, *row) for moments in TENSORS for row in BAD_FOR_BOTH),
    *(
        (None, {name: t}, ValueError, f"{name} {SHARED_MEMORY}")
        for name in ("m", "v")
        for t in (EXPANDED, SLIDING)
    ),
    (None, {"v": ONES.half()}, TypeError, "v is torch.float16, expected torch.bfloat16 or"),
    (CODES, {"m": CODED.v}, TypeError, "m is torch.uint8, expected torch.int8: convert it"),
    (CODES, {"m": CODED.m.t().contiguous().t()}, ValueError, r"m of shape \(4, 6\) has strides"),
    (CODES, {"v": CODED.m}, TypeError, "v is torch.int8, expected torch.uint8: convert it"),
    (CODES, {"v": CODED.v[:2]}, ValueError, r"v has shape \(2, 6\), expected \(4, 6\)"),
    (CODES, {"scales": ONES[:2, :2]}, ValueError, r"scales has shape \(2, 2\), expected \(2, 1\)"),
    (CODES, {"scales": CODED.scales.half()}, TypeError, "scales is torch.float16, expected"),
]


@pytest.mark.parametrize("moments, arguments, error, sentence", BAD_INPUT)
def test_bad_input_is_refused_with_a_sentence(moments, arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        launch(moments, **arguments)


@for_both_kernels
def test_dtensors_are_refused_before_any_pointer_is_taken(moments, as_dtensor, monkeypatch):
    for module, kernel in ((adamw_kernel, "_adamw_kernel"), (adamw8, "_adamw8_kernel")):
        monkeypatch.setattr(module, kernel, None)  # a launch all the same harms nothing
    for name, t in TENSORS[moments].items():
        with pytest.raises(TypeError, match=f"{name} is a DTensor, expected a plain tensor: pass"):
            launch(moments, **{name: as_dtensor(t)})
    with pytest.raises(ValueError, match=r"lr is a tensor of shape \(1,\), expected a number"):
        launch(moments, lr=as_dtensor(ONES[0, :1]))


# ---- torch.compile -----------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kind", ["floats", "ones", "lr in a tensor", "tensors", "maximize"])
@for_both_kernels
def test_torch_compile_gives_the_same_numbers_in_one_graph(moments, kind, seed):
    torch._dynamo.reset()
    numbers = torch.tensor([0.05, 0.8, 0.95], device=DEVICE)
    lr = {"floats": 0.05, "ones": 1, "maximize": 0.05}.get(kind, numbers[0])
    betas = numbers[1:] if kind == "tensors" else (0.8, 0.95)

    def step(*tensors):
        options = {"maximize": kind == "maximize"}
        step_with(moments)(*tensors, lr, *betas, 1e-3, 0.3, seed, **options)

    compiled = torch.compile(step, fullgraph=True)
    for n in (4096, 5000):
        p, g = (randn(n, dtype=BF16, seed=i) for i in range(2))
        inputs = [p, g, *random_moments(p, moments)]
        ours, theirs = ([t.clone() for t in inputs] for _ in range(2))
        step(*ours, counted(2))
        compiled(*theirs, counted(2))
        assert all_equal(ours, theirs) and not torch.equal(ours[0], p)


# ---- What only a GPU can show ------------------------------------------------------------------


@needs_gpu
@for_both_kernels
def test_offsets_beyond_int32(moments, gpu_memory):
    n, tail = 2**31 + 8 * adamw8.BLOCK, 6 * adamw8.BLOCK
    gpu_memory(24)
    large = [torch.zeros(n, dtype=BF16, device=DEVICE) for _ in range(2)]
    for seed, t in enumerate(large):
        t[-tail:] = randn(tail, dtype=BF16, seed=seed)
    small = [t[-tail:].clone() for t in large]
    for tensors in (large, small):
        tensors += moments_of(tensors[0], moments)
        step_with(moments)(*tensors, counted(0), *NUMBERS)
    for of_all, of_last in zip(large, small):  # of scales: those of the last blocks
        length = of_last.shape[-1]
        assert torch.equal(of_all[..., -length:], of_last) and not of_all[..., :-length].any()


@needs_gpu
@for_both_kernels
def test_sizes_compile_once_for_those_that_16_divides_and_once_for_the_others(
    moments, compiled_kernels
):
    for kernel in (adamw_kernel._adamw_kernel, adamw8._adamw8_kernel):
        kernel.device_caches.clear()
    for n, kernels in ((64, 1), (4096, 1), (48, 1), (50, 2), (51, 2), (1_000_003, 2)):
        for index in range(2):
            start = randn(n, dtype=BF16)
            options = {"lr": n * 1e-6, "moments_dtype": moments, "seed": n, "index": index}
            kernel_steps(start, gradients(start, 2), **options)
        assert len(compiled_kernels) == kernels
