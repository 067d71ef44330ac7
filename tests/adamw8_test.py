"""Is AdamW with 8-bit moments right?

`python -m tests.adamw8_test` prints three checks for each dtype, and how far the weights go beside
those of AdamW with fp32 moments; `pytest tests/adamw8_test.py` runs the same checks and many more.
adamw_test.py tests what both kernels share, adamw_optimizer_test.py the optimizer around them.

The checks compare with the lesson's reference in float64, and allow twice the error of the
reference in fp32.  Moments are compared with what they are before the step codes them: near the
middle between two codes either is right.
"""

import pytest
import torch

from harness.benchmark.checking import DEVICE, HAS_GPU, Check, assert_all_passed, compare
from harness.cli import command_line
from next_steps.lessons import adamw8
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
from tests import printing
from tests.adamw_test import (
    BF16,
    FP16,
    FP32,
    INF,
    LAYOUTS,
    NAN,
    SETTINGS,
    WITH_GAPS,
    all_equal,
    assert_sizes_compile_twice,
    counted,
    gradients,
    randn,
)
from tests.adamw_test import kernel_steps as plain_steps
from tests.fixtures import needs_gpu

SHAPE = (4096, 4096) if HAS_GPU else (5, 501)  # on the CPU: three programs, ten blocks
KINDS = {"FP32": (FP32, None), "BF16": (BF16, None), "FP16": (FP16, None), "stochastic": (BF16, 0)}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def uneven(p, steps):
    """Return gradients whose elements differ in size: most by up to e**2, a few by 100 more."""
    sizes = torch.exp(randn(*p.shape, seed=7))
    sizes = torch.where(randn(*p.shape, seed=8) > 2.3, 100.0, 1.0) * sizes
    return [(g.float() * sizes).to(p) for g in gradients(p, steps)]


def kernel_steps(start, grads, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, **options):
    """Return (the change of a parameter, its Moments) after steps with the kernel."""
    p, moments = start.clone(), new_moments(start)
    for done, g in enumerate(grads):
        adamw8_step(p, g, *moments, counted(done), lr, *betas, eps, weight_decay, **options)
    return p.double() - start.double(), moments


def reference_steps(start, grads, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
    """Return the same of the reference: in float64 for a float64 start, else in fp32."""
    p, moments = start, new_moments(start)
    wide = torch.promote_types(p.dtype, FP32)
    for step, g in enumerate(grads, start=1):
        scalars = step, lr, *betas, eps, weight_decay
        new, moments = adamw8_reference(p.to(wide), g.to(wide), moments, *scalars)
        p = new.to(p.dtype)
    return p.double() - start.double(), moments


def same_bits(a, b):
    """Return True if two results of `kernel_steps` are equal."""
    return all_equal((a[0], *a[1]), (b[0], *b[1]))


def kind_checks(kind) -> list[Check]:
    """Check what one step adds to the weights, and m and v, each against float64."""
    dtype, seed = KINDS[kind]
    start = randn(*SHAPE, dtype=dtype)
    g, m = uneven(start, 2)
    before = quantize_moments(m.float(), 1.5 * m.float().square())
    settings = 4, SETTINGS["lr"], *SETTINGS["betas"], SETTINGS["eps"], SETTINGS["weight_decay"]
    p, ours = start.clone(), Moments(*(t.clone() for t in before))
    adamw8_step(p, g, *ours, counted(3), *settings[1:], seed=seed)
    wide = start.double(), g.double(), *dequantize_moments(before, torch.float64)
    p64, *exact = adamw_reference(*wide, *settings)
    eager, theirs = adamw8_reference(start.float(), g.float(), before, *settings)
    changes = (each.double() - start.double() for each in (p, p64, eager.to(dtype)))
    found = [compare(f"{kind} weights", *changes, dtype=dtype)]
    ours, theirs = (dequantize_moments(each, torch.float64) for each in (ours, theirs))
    for name, *abc in zip(("m", "v"), ours, exact, theirs):
        found.append(compare(f"{kind} {name}", *abc, dtype=FP32))
    return found


# ---- The numbers -------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_steps_match_the_reference(kind):
    assert_all_passed(kind_checks(kind))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_codes_are_the_references(dtype):
    start = randn(*SHAPE, dtype=dtype)
    grads = uneven(start, 3)
    (_, ours), (_, theirs) = kernel_steps(start, grads), reference_steps(start, grads)
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
    plain, _, _ = plain_steps(start, grads, **SETTINGS, seed=seed, moments_dtype=FP32)
    assert torch.equal(kernel_steps(start, grads, **SETTINGS, seed=seed)[0], plain)


@pytest.mark.parametrize("done", [0, 1, 9, 99_999])
def test_step_continues_from_the_count_it_is_given(done):
    start, g, m, v = (randn(600, seed=i) for i in range(4))
    moments, p, counter = quantize_moments(m, v.abs()), start.clone(), counted(done)
    settings = (1e-2, 0.9, 0.999, 1e-8, 0.0)
    m, v = dequantize_moments(moments, torch.float64)
    expected, _, _ = adamw_reference(start.double(), g.double(), m, v, done + 1, *settings)
    adamw8_step(p, g, *moments, counter, *settings)
    torch.testing.assert_close(p.double(), expected, rtol=1e-5, atol=1e-6)
    assert counter == done, "the launcher must leave the count to its caller"


def test_zero_gradient_only_decays_the_weights():
    start, zero = randn(600), torch.zeros(600, device=DEVICE)
    change, moments = kernel_steps(start, [zero], lr=0.5, weight_decay=0.5)
    torch.testing.assert_close(change, -0.25 * start.double(), rtol=1e-6, atol=1e-6)
    assert not any(t.any() for t in moments)


def test_maximize_goes_up_the_gradient():
    start = randn(600)
    grads = gradients(start, 2)
    up = kernel_steps(start, grads, **SETTINGS, maximize=True)
    assert same_bits(up, kernel_steps(start, [-g for g in grads], **SETTINGS))


@pytest.mark.parametrize("betas", [(0.75, 0.9375), (0.0, 0.0)])  # the same numbers in fp32
def test_numbers_and_tensors_give_the_same_bits(betas):
    start, grads = randn(600), gradients(randn(600), 3)
    numbers = {"lr": 0.05, "betas": betas, "eps": 2**-10, "weight_decay": 0.25}
    tensors = {key: torch.tensor(value, device=DEVICE) for key, value in numbers.items()}
    expected = kernel_steps(start, grads, **numbers)
    assert same_bits(kernel_steps(start, grads, **tensors), expected)


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


def distance_from_fp32(steps=30):
    """Return how far the weights are from those of fp32 moments, in parts of their change."""
    start = randn(4 * BLOCK)
    grads, settings = uneven(start, steps), {"lr": 1e-2, "weight_decay": 0.0}
    ours, _ = kernel_steps(start, grads, **settings)
    fp32, _, _ = plain_steps(start, grads, **settings, moments_dtype=FP32)
    return ((ours - fp32).norm() / fp32.norm()).item()


def test_weights_go_where_those_of_fp32_moments_go():
    """A code is off by 1 to 5 % at the sizes that most elements have, and that is the bound."""
    assert 1e-4 < distance_from_fp32() < 0.05


# ---- Numbers that are none -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_gradient_that_is_not_finite_makes_its_weight_nan_and_leaves_its_block_alone(value, dtype):
    start = randn(600, dtype=dtype)
    grads = gradients(start, 3)
    grads[1][7] = 0.0
    grads[0][7] = 0.0
    clean, expected = kernel_steps(start, grads)
    grads[0][7] = value
    change, moments = kernel_steps(start, grads)
    others = torch.arange(600, device=DEVICE) != 7
    assert change[7].isnan() and torch.equal(change[others], clean[others])
    assert all_equal(moments, expected)


def test_square_beyond_fp32_is_forgotten_with_its_gradient():
    start = randn(600)
    grads = gradients(start, 2)
    grads[0][7] = 1e30
    change, moments = kernel_steps(start, grads)
    m, v = dequantize_moments(moments, FP32)
    assert change.isfinite().all() and m.isfinite().all() and v.isfinite().all()
    assert change.abs().max() < 0.1


# ---- Shapes and layouts --------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", [1, 2, 8, 255, 256, 257, 1023, 1024, 1025, 2305])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_neighbours_in_memory_stay_untouched(n, dtype):
    start, (g,) = randn(n, dtype=dtype), gradients(randn(n, dtype=dtype), 1)
    n_blocks = -(-n // BLOCK)
    sizes = [(n, dtype), (n, dtype), (n, torch.int8), (n, torch.uint8), (2 * n_blocks, FP32)]
    memory = [torch.full((size + 2 * 64,), 7, dtype=t, device=DEVICE) for size, t in sizes]
    p, grad, m, v, scales = (t[64 : 64 + size] for t, (size, _) in zip(memory, sizes))
    p.copy_(start), grad.copy_(g), m.zero_(), v.zero_(), scales.zero_()
    scales = scales.view(2, n_blocks)
    adamw8_step(p, grad, m, v, scales, counted(0), 0.05, 0.8, 0.95, 1e-3, 0.3, seed=0)
    for t, (size, _) in zip(memory, sizes):
        assert (t[:64] == 7).all() and (t[64 + size :] == 7).all()
    assert torch.equal(grad, g), "the gradient must not change"
    found = p.double() - start.double(), Moments(m, v, scales)
    assert same_bits(found, kernel_steps(start, [g], **SETTINGS, seed=0))


@pytest.mark.parametrize("layout", LAYOUTS | WITH_GAPS)
def test_any_layout_is_stepped_as_a_contiguous_copy_would_be(layout):
    shape, view = (LAYOUTS | WITH_GAPS)[layout]
    memory, outside = randn(*shape, dtype=BF16), torch.ones(shape, dtype=torch.bool, device=DEVICE)
    before = memory.clone()
    view(outside).fill_(False)
    p, q = view(memory), view(memory).clone(memory_format=torch.contiguous_format)
    states = [(t, *new_moments(q)) for t in (p, q)]
    for done, g in enumerate(gradients(q, 3)):
        for state in states:
            adamw8_step(state[0], g, *state[1:], counted(done), 0.05, 0.8, 0.95, 1e-3, 0.3, seed=0)
    assert all_equal(*states) and not torch.equal(p, view(before))
    assert torch.equal(memory[outside], before[outside]), "the gaps are not the parameter's"


def test_gradient_of_another_layout():
    start, grad = randn(30, 50), randn(50, 30, seed=1).t()
    assert same_bits(kernel_steps(start, [grad]), kernel_steps(start, [grad.contiguous()]))


def test_no_elements_are_no_step():
    p = torch.empty(0, 5, device=DEVICE)
    assert new_moments(p).scales.shape == (2, 0)
    adamw8_step(p, p.clone(), *new_moments(p), counted(0), 0.05, 0.8, 0.95, 1e-3, 0.3)
    assert all(t.numel() == 0 for t in quantize_moments(p, p))


# ---- Bad input -----------------------------------------------------------------------------------

ONES = torch.ones(4, 6, device=DEVICE)
MOMENTS = new_moments(ONES)


def launch(**given):
    tensors = {"p": ONES.clone(), "grad": ONES, **MOMENTS._asdict(), "steps_done": counted(0)}
    scalars = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    adamw8_step(**{**tensors, **scalars, **given})


BAD_INPUT = [  # arguments, exception, what its sentence says
    ({"p": ONES.double()}, TypeError, "p is torch.float64, expected torch.float16 or"),
    ({"grad": ONES.bfloat16()}, TypeError, "grad is torch.bfloat16, expected torch.float32"),
    ({"grad": ONES[:3]}, ValueError, r"grad has shape \(3, 6\), expected \(4, 6\)"),
    ({"m": MOMENTS.v}, TypeError, "m is torch.uint8, expected torch.int8: convert it"),
    ({"v": MOMENTS.m}, TypeError, "v is torch.int8, expected torch.uint8: convert it"),
    ({"v": MOMENTS.v[:2]}, ValueError, r"v has shape \(2, 6\), expected \(4, 6\)"),
    ({"scales": ONES[:2, :2]}, ValueError, r"scales has shape \(2, 2\), expected \(2, 1\)"),
    ({"scales": MOMENTS.scales.half()}, TypeError, "scales is torch.float16, expected torch.float"),
    ({"m": MOMENTS.m.t().contiguous().t()}, ValueError, r"m of shape \(4, 6\) has strides"),
    ({"steps_done": ONES[:, 0]}, ValueError, r"steps_done has shape \(4,\), expected \(\)"),
    ({"lr": ONES[0, :2]}, ValueError, r"lr is a tensor of shape \(2,\), expected a number"),
    ({"p": ONES[0].expand(4, 6)}, ValueError, r"p of shape \(4, 6\) has strides \(0, 1\), by"),
]


@pytest.mark.parametrize("arguments, error, sentence", BAD_INPUT)
def test_bad_input_is_refused_with_a_sentence(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        launch(**arguments)


def test_dtensors_are_refused_before_any_pointer_is_taken(as_dtensor, monkeypatch):
    monkeypatch.setattr(adamw8, "_adamw8_kernel", None)  # a launch all the same harms nothing
    tensors = {"p": ONES, "grad": ONES, **MOMENTS._asdict(), "steps_done": counted(0)}
    for name, t in tensors.items():
        with pytest.raises(TypeError, match=f"{name} is a DTensor, expected a plain tensor: pass"):
            launch(**{name: as_dtensor(t)})


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kind", ["floats", "tensors", "maximize"])
def test_torch_compile_gives_the_same_numbers_in_one_graph(seed, kind):
    torch._dynamo.reset()
    numbers = torch.tensor([0.05, 0.8, 0.95], device=DEVICE)
    lr, *betas = numbers if kind == "tensors" else (0.05, 0.8, 0.95)

    def step(p, g, m, v, scales, steps_done):
        options = {"maximize": kind == "maximize"}
        adamw8_step(p, g, m, v, scales, steps_done, lr, *betas, 1e-3, 0.3, seed, **options)

    compiled = torch.compile(step, fullgraph=True)
    for n in (2048, 2500):
        p, g = (randn(n, dtype=BF16, seed=i) for i in range(2))
        inputs = [p, g, *quantize_moments(randn(n, seed=2), randn(n, seed=3).abs())]
        ours, theirs = ([t.clone() for t in inputs] for _ in range(2))
        step(*ours, counted(2))
        compiled(*theirs, counted(2))
        assert all_equal(ours, theirs) and not torch.equal(ours[0], p)


# ---- What only a GPU can show --------------------------------------------------------------------


@needs_gpu
def test_offsets_beyond_int32(gpu_memory):
    n, tail = 2**31 + 8 * BLOCK, 6 * BLOCK
    gpu_memory(16)
    p, g = (torch.zeros(n, dtype=BF16, device=DEVICE) for _ in range(2))
    moments = new_moments(p)
    p[-tail:], g[-tail:] = randn(tail, dtype=BF16), randn(tail, dtype=BF16, seed=1)
    small, grad = p[-tail:].clone(), g[-tail:].clone()
    small_moments = new_moments(small)
    settings = (counted(0), 0.05, 0.8, 0.95, 1e-3, 0.3)
    adamw8_step(p, g, *moments, *settings)
    adamw8_step(small, grad, *small_moments, *settings)
    assert torch.equal(p[-tail:], small) and not p[:-tail].any()
    assert torch.equal(moments.m[-tail:], small_moments.m)
    assert torch.equal(moments.v[-tail:], small_moments.v)
    assert torch.equal(moments.scales[:, -6:], small_moments.scales)


@needs_gpu
def test_sizes_compile_once_for_those_that_16_divides_and_once_for_the_others(compiled_kernels):
    assert_sizes_compile_twice(adamw8._adamw8_kernel, kernel_steps, compiled_kernels)


# ---- The table -----------------------------------------------------------------------------------


def main() -> int:
    command_line.Parser(__doc__).parse_args()
    printing.title("AdamW, 8-bit moments")
    passed = printing.cases({kind: kind for kind in KINDS}, kind_checks)
    print(f"\nAfter 30 steps: {distance_from_fp32():.2%} of their way from where fp32 moments lead")
    return printing.verdict("AdamW with 8-bit moments, correctness", passed)


if __name__ == "__main__":
    command_line.run_main(main)
