"""FP8: scales, codes and transposition against formulas in float64, and products of them.

These functions have no gradient, so the contracts (tests/contracts_*_test.py) do not ask for them;
what of the contracts holds without one is asked here.
"""

import math

import pytest
import torch

from harness.benchmark.checking import relative_error
from harness.cli.device import DEVICE, HAS_GPU
from judging.circumstances import captured, waiting_forbidden
from next_steps.lessons.fp8_kernel import (
    FP8,
    Rows,
    dequantize,
    fp8_product,
    fp8_support,
    quantize_rows,
    quantize_rows_reference,
    quantize_stacked,
    quantize_transposed,
    quantize_transposed_reference,
    takes_fp8,
    transpose_rows,
    transpose_rows_reference,
)
from tests import tiles
from tests.fixtures import compiled_once, needs_gpu, pads_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALLEST = 2.0**-126  # fp32's smallest normal number
NAN = math.nan
needs_fp8 = pytest.mark.skipif(
    HAS_GPU and fp8_support() is not None, reason="needs a GPU that multiplies FP8"
)
pytestmark = pytest.mark.usefixtures("poison_new_tensors")

# e4m3 by its definition: the numbers of the codes 0 to 126.
SUBNORMAL = [mantissa * 2.0**-9 for mantissa in range(8)]
NORMAL = [(1 + mantissa / 8) * 2.0**e for e in range(-6, 9) for mantissa in range(8)]
E4M3 = torch.tensor([*SUBNORMAL, *NORMAL][:127], dtype=torch.float64, device=DEVICE)


def make(*shape, dtype=torch.float32, seed=0, mean=0.1, exponents=(-8, 4)):
    """Normal numbers with a mean, whose rows are of several magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = mean + torch.randn(shape, generator=generator)
    low, high = exponents
    magnitudes = 2.0 ** (low + (high - low) * torch.rand((shape[0], 1), generator=generator))
    return (x * magnitudes).to(DEVICE, dtype)


def matrix(rows: Rows) -> torch.Tensor:
    """In float64."""
    return dequantize(rows, torch.float64)


def same(found: Rows, expected: Rows) -> bool:
    """To the bit; but one NaN is as good as another."""
    codes = [rows.codes.view(torch.uint8) for rows in (found, expected)]
    nan = [rows.codes.float().isnan() for rows in (found, expected)]
    return (
        torch.equal(found.scales, expected.scales)
        and torch.equal(*nan)
        and torch.equal(*(c.masked_fill(n, 0) for c, n in zip(codes, nan)))
    )


# ---- Scales and codes ----------------------------------------------------------------------------


def test_a_scale_is_the_smallest_power_of_two_that_holds_the_row():
    """Of fp32's whole range, at, below and above 448 times a power of two."""
    exponents = [-126, *range(-125, 119, 7), 119]
    largest = torch.tensor([448.0 * 2.0**e for e in exponents], device=DEVICE)
    for amax, expected in (
        (largest, largest / 448),
        (largest.nextafter(torch.zeros_like(largest)), largest / 448),
        (largest.nextafter(2 * largest), largest / 224),
    ):
        x = torch.stack([-amax, amax / 3], 1)
        assert torch.equal(quantize_rows(x).scales, expected)
        assert torch.equal(quantize_rows_reference(x).scales, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_code_is_the_nearest_by_the_definition(dtype):
    x = make(40, 300, dtype=dtype)
    codes, scales = quantize_rows(x)
    scaled = x.double() / scales.double()[:, None]
    distances = (scaled.abs()[..., None] - E4M3).abs()
    found = codes.view(torch.uint8).long()
    assert torch.equal(found >> 7 == 1, scaled.signbit())
    chosen = distances.gather(2, (found & 127)[..., None])[..., 0]
    assert torch.equal(chosen, distances.amin(2))
    tie = (distances == chosen[..., None]).sum(2) == 2
    assert (found[tie] % 2 == 0).all() and (scaled.abs() <= 448).all()
    assert dtype == torch.float32 or tie.any()


# ---- The kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_cols", [1, 2, 31, 64, 127, 1000, 1025])
def test_the_references_bits(n_cols, dtype):
    x = make(5, n_cols, dtype=dtype)
    assert same(quantize_rows(x), quantize_rows_reference(x))


@pytest.mark.parametrize("widths", [(64, 16, 16), (17, 300), (1, 1, 1), (3, 128, 65)])
def test_parts_lie_side_by_side_under_one_scale(widths):
    """And the largest number may be in any of them."""
    for first in range(len(widths)):
        parts = [make(6, n, dtype=torch.bfloat16, seed=n) for n in widths]
        parts[first] *= 8
        found = quantize_rows(*parts)
        assert same(found, quantize_rows_reference(*parts))
        assert same(found, quantize_rows_reference(torch.cat(parts, 1)))


def test_weights_lie_one_below_the_other():
    weights = [make(n, 48, dtype=torch.bfloat16, seed=n) for n in (32, 1, 7)]
    found = quantize_stacked(*weights, weights[0].t()[:32, :1].expand(32, 48))
    assert found.codes.shape == (72, 48)
    expected = quantize_rows_reference(torch.cat(weights))
    assert same(Rows(found.codes[:40], found.scales[:40]), expected)
    assert same(quantize_stacked(weights[0]), quantize_rows_reference(weights[0]))


@pytest.mark.parametrize("part", [0, 1])
def test_any_strides(part):
    x = make(40, 40, dtype=torch.bfloat16)
    for view in (x.t(), x[::3], x[:, ::2], x[:, 5:20], x[:1].expand(7, 40), x[2]):
        view = view[None] if view.ndim == 1 else view
        parts = [make(len(view), 24, dtype=torch.bfloat16, seed=1) for _ in range(2)]
        parts[part] = view
        assert same(quantize_rows(*parts), quantize_rows_reference(*(p.clone() for p in parts)))


def test_inputs_are_not_changed():
    parts = make(6, 50), make(6, 20)
    before = [part.clone() for part in parts]
    rows = quantize_rows(*parts)
    codes = rows.codes.clone()
    transpose_rows(rows)
    assert all(map(torch.equal, parts, before))
    assert same(Rows(codes, rows.scales), quantize_rows_reference(*before))


def test_rows_beyond_int32(far_apart):
    values = make(3, 33, dtype=torch.bfloat16)
    assert same(quantize_rows(far_apart(values)), quantize_rows_reference(values))


@needs_gpu
def test_more_than_2_to_the_31_numbers(gpu_memory):
    """Also of codes."""
    gpu_memory(16)
    n_cols = 2**14
    x = torch.zeros(2**17 + 3, n_cols, dtype=torch.bfloat16, device=DEVICE)
    x[-3:] = make(3, n_cols, dtype=torch.bfloat16)
    rows = quantize_rows(x)
    tail = Rows(rows.codes[-3:], rows.scales[-3:])
    assert same(tail, quantize_rows_reference(x[-3:]))
    del x
    transposed = transpose_rows(rows)
    assert torch.equal(
        transposed.codes[:, -3:].float(), transpose_rows_reference(tail).codes.float()
    )


# ---- Rows of another kind ------------------------------------------------------------------------


def test_a_row_of_zeros_has_zero_codes_and_raises_no_other_scale():
    x = make(4, 20) * 2.0**-40
    x[1] = 0
    x[1, 3] = -0.0
    rows = quantize_rows(x)
    assert rows.scales[1] == SMALLEST and (matrix(rows)[1] == 0).all()
    assert same(rows, quantize_rows_reference(x))
    assert transpose_rows(rows).scales[0] < 2.0**-30


@pytest.mark.parametrize("bad", [NAN, -NAN, math.inf, -math.inf, "what a GPU computes for NaN"])
@pytest.mark.parametrize("part", [0, 1])
def test_a_row_that_is_not_finite_is_nan_and_stays_alone(bad, part):
    parts = make(4, 20), make(4, 9)
    if isinstance(bad, str):
        parts[part].view(torch.int32)[2, 5] = 0x7FFFFFFF
    else:
        parts[part][2, 5] = bad
    rows = quantize_rows(*parts)
    assert same(rows, quantize_rows_reference(*parts))
    assert rows.codes[2].float().isnan().all()
    others = [0, 1, 3]
    expected = quantize_rows(*(p[others] for p in parts))
    assert same(Rows(rows.codes[others], rows.scales[others]), expected)
    # in a sum over the rows it is in every number
    transposed = matrix(transpose_rows(rows))
    assert transposed[:, 2].isnan().all() and not transposed[:, others].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_denormal_rows(dtype):
    """Below fp32's normal range the scale is the smallest; the codes hold what it can."""
    x = torch.tensor([[1.0, -3.0, 64.0]], device=DEVICE)
    x = torch.cat([x * 2.0**e for e in (-120, -127, -133)]).to(dtype)
    rows = quantize_rows(x)
    assert same(rows, quantize_rows_reference(x)) and (rows.scales >= SMALLEST).all()
    assert torch.equal(matrix(rows), x.double())


def test_a_row_of_one_huge_value():
    x = make(3, 16)
    x[1, 4] = 3e38
    rows = quantize_rows(x)
    assert same(rows, quantize_rows_reference(x))
    assert abs(matrix(rows)[1, 4] / 3e38 - 1) <= 2**-4 and (matrix(rows)[1, 5:] == 0).all()
    x[1] = 1e-30
    x[1, 4] = 1.0  # the others are lost, to 0
    assert quantize_rows(x).codes[1].float().count_nonzero() == 1


@pytest.mark.parametrize("shape", [(0, 16), (1, 16)])
def test_few_rows(shape):
    rows = quantize_rows(make(*shape) if shape[0] else torch.empty(shape, device=DEVICE))
    assert rows.codes.shape == shape and rows.scales.shape == shape[:1]
    transposed = transpose_rows(rows)
    assert transposed.codes.shape == shape[::-1] and transposed.scales.shape == (16,)
    assert same(transposed, transpose_rows_reference(rows))


# ---- Transposed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "small, shape",
    [(True, (16, 16)), (True, (1, 200)), (True, (200, 1)), (True, (15, 33)), (True, (17, 31)),
     (True, (64, 80)), (False, (129, 130)), (False, (256, 128))],
)  # fmt: skip
def test_transposed_bits_are_the_references(small, shape, monkeypatch):
    """Next to the rows and columns of tiles: 16 and 32, or the shipped ones."""
    if small:
        tiles.fp8_tiles(monkeypatch)
    rows = quantize_rows(make(*shape))
    assert same(transpose_rows(rows), transpose_rows_reference(rows))


def test_transposing_is_exact_but_for_subnormal_numbers():
    rows = quantize_rows(make(70, 90))
    transposed = transpose_rows(rows)
    largest = rows.scales.max().double()
    assert (transposed.scales == largest).all() and len(rows.scales.unique()) > 4
    expected = matrix(rows).t()
    normal = expected.abs() >= largest * 2**-6
    error = (matrix(transposed) - expected).abs()
    assert normal.float().mean() > 0.2 and (error[normal] == 0).all()
    assert (error <= largest * 2**-10).all() and (error[~normal] > 0).any()
    assert (error <= expected.abs().max() * 2**-17).all()


def test_columns_of_a_wider_matrix_are_transposed():
    """As those of the gradients that lie side by side."""
    rows = quantize_rows(make(20, 100))
    some = Rows(rows.codes[:, 16:48], rows.scales)
    every_other = Rows(rows.codes[:, ::2], rows.scales)
    for part in (some, every_other, Rows(rows.codes[::3], rows.scales[::3])):
        assert same(transpose_rows(part), transpose_rows_reference(part))


@pytest.mark.parametrize("lengths", [(20,), (129, 3, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_rounded_on_the_way(lengths, dtype):
    weights = [make(n, 130, dtype=dtype, seed=n) for n in lengths]
    scale = quantize_stacked(*weights).scales.amax()
    found = quantize_transposed(*weights, scale=scale)
    assert same(found, quantize_transposed_reference(*weights, scale=scale))
    assert found.codes.shape == (130, sum(lengths)) and (found.scales == scale).all()
    twice = matrix(transpose_rows(quantize_stacked(*weights)))  # rounded a second time if subnormal
    error = (matrix(found) - twice).abs()
    assert (error[twice.abs() > scale.double() * 2**-6] == 0).all()
    assert (error <= scale.double() * 2**-9).all()


def test_weights_that_are_not_finite_stay_so_on_the_way():
    weight = make(20, 40)
    weight[2, 3], weight[4, 5], weight[6, 7] = torch.inf, -torch.inf, torch.nan
    found = matrix(quantize_transposed(weight, scale=torch.ones((), device=DEVICE)))
    assert torch.equal(found.isnan(), ~weight.t().isfinite())


# ---- Products ------------------------------------------------------------------------------------


def sizes_of_product():
    return (40, 64, 96) if HAS_GPU else (5, 7, 96)


@needs_fp8
@pytest.mark.parametrize("dtype", DTYPES)
def test_product_is_that_of_the_rounded_numbers(dtype):
    M, N, K = sizes_of_product()
    a, b = quantize_rows(make(M, K)), quantize_rows(make(N, K, seed=1))
    found = fp8_product(a, b, dtype)
    assert found.shape == (M, N) and found.dtype == dtype
    exact = matrix(a) @ matrix(b).t()
    magnitudes = matrix(a).abs() @ matrix(b).abs().t()
    # of the sum: on a GPU Hopper's partial sums; of the result: half of its last bit
    of_sum = 2**-9 if HAS_GPU else 2**-20
    of_result = torch.finfo(torch.bfloat16 if HAS_GPU else dtype).eps
    bound = of_sum * magnitudes + of_result * exact.abs()

    def right(product):
        return ((product.double() - exact).abs() <= bound).all()

    assert right(found)
    assert relative_error(found, exact) <= (1e-2 if HAS_GPU else 2 * of_result)
    assert not right(fp8_product(a, Rows(b.codes, b.scales.roll(1)), dtype))
    assert not right(fp8_product(Rows(a.codes, a.scales.roll(1)), b, dtype))
    assert not right(fp8_product(a, Rows(b.codes.view(torch.uint8).roll(1, 1).view(FP8), b.scales),
                                 dtype))  # fmt: skip


@needs_fp8
def test_a_row_that_is_not_finite_is_so_in_the_product():
    M, N, K = sizes_of_product()
    x, w = make(M, K), make(N, K, seed=1)
    x[2, 3] = math.inf
    found = fp8_product(quantize_rows(x), quantize_rows(w), torch.float32)
    assert found[2].isnan().all() and found[[0, 1, 3, 4]].isfinite().all()


def test_products_without_numbers():
    a = quantize_rows(torch.empty(0, 16, device=DEVICE))
    b = quantize_rows(make(32, 16))
    assert fp8_product(a, b, torch.bfloat16).shape == (0, 32)
    assert fp8_product(b, a, torch.bfloat16).shape == (32, 0)
    nothing = transpose_rows(a)  # (16, 0): as the gradient of no tokens
    assert (fp8_product(nothing, nothing, torch.float32) == torch.zeros(16, 16).to(DEVICE)).all()


def test_sizes_that_a_product_takes():
    assert takes_fp8(16) and takes_fp8(4096, 14_336, 48)
    assert not any(takes_fp8(*sizes) for sizes in ((8,), (4096, 100), (17, 16), (0,)))


def test_a_gpu_without_fp8_is_told_in_a_sentence(monkeypatch):
    assert HAS_GPU or fp8_support() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, supported in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        assert (fp8_support() is None) == supported
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "NVIDIA A100 is of sm_80, and GPUs multiply FP8 from sm_89 on" in fp8_support()
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert "another e4m3" in fp8_support()


# ---- What of the contracts holds without a gradient ----------------------------------------------


def all_equal(found, expected) -> bool:
    return all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected))


def assert_repeats_without_waiting(function, *inputs) -> None:
    """Hold that the host does not wait for the GPU, and that a CUDA graph gives the same bits."""
    expected = function(*inputs)
    with waiting_forbidden():
        function(*inputs)
    graph, found = captured(lambda: function(*inputs))
    graph.replay()
    assert all_equal(found, expected)


def chain(x, w):
    """What a layer does with them."""
    rows = quantize_rows(x, x[:, :16])
    stacked = quantize_stacked(w, w[:16])
    product = fp8_product(rows, stacked, torch.float32)
    transposed = transpose_rows(rows)
    weights = quantize_transposed(w, w[:16], scale=stacked.scales.amax())
    return product, *rows, *stacked, *transposed, *weights


@needs_fp8
@pytest.mark.exhaustive
@pads_rows
def test_compiled_in_one_graph_it_gives_the_same_bits():
    compiled = torch.compile(chain, fullgraph=True, dynamic=True)
    for n_tokens in (48, 64, 80):
        x, w = make(n_tokens, 144), make(64, 160, seed=1)
        found, expected = compiled(x * 2, w), chain(x * 2, w)
        assert all_equal(found[1:], expected[1:])
        assert relative_error(found[0], expected[0].double()) < 1e-6
        with compiled_once():
            compiled(make(96, 144), w)


@needs_gpu
@needs_fp8
def test_the_host_waits_for_nothing_and_a_graph_repeats_it():
    assert_repeats_without_waiting(chain, make(64, 144), make(64, 160, seed=1))


# ---- What is refused -----------------------------------------------------------------------------

X = torch.ones(4, 32, device=DEVICE)
ROWS = quantize_rows_reference(X)


ONE, LONG = torch.ones((), device=DEVICE), torch.ones(1, 40_000, device=DEVICE)
OF_FLOATS = Rows(X, ROWS.scales)
WRONG_TYPES = {
    "part 0 is torch.float64, expected torch.float16 or": lambda: quantize_rows(X.double()),
    "part 1 is torch.bfloat16, expected torch.float32": lambda: quantize_rows(X, X.bfloat16()),
    "scale is torch.bfloat16, expected": lambda: quantize_transposed(X, scale=ONE.bfloat16()),
    "rows.codes is torch.float32, expected torch.float8_e4m3": lambda: transpose_rows(OF_FLOATS),
    "rows.scales is torch.float16, expected": lambda: transpose_rows(
        Rows(ROWS.codes, X[:, 0].half())
    ),
    "wanted in torch.float64, expected torch.float16 or": lambda: product(dtype=torch.float64),
    "b.codes is torch.float32, expected": lambda: product(b=OF_FLOATS),
}
WRONG_SHAPES = {
    "there are 0 parts, expected 1 to 3": quantize_rows,
    "there are 4 parts, expected 1 to 3": lambda: quantize_rows(X, X, X, X),
    r"part 1 has shape \(2, 32\), expected \(4, ": lambda: quantize_rows(X, X[:2]),
    r"part 0 has shape \(32,\), expected \(N, K0\)": lambda: quantize_rows(X[0]),
    r"part 0 has shape \(4, 0\), expected \(N, K\)": lambda: quantize_rows(X[:, :0]),
    r"shape \(1, 40000\), expected .* 1 to 32,768": lambda: quantize_rows(LONG),
    "have 40,000 numbers, expected 32,768 at most": lambda: quantize_rows(*LONG.chunk(2, 1)),
    "there is no weight": quantize_stacked,
    r"weight 1 has shape \(4, 16\), expected \(4, 32\)": lambda: quantize_stacked(X, X[:, :16]),
    r"scale has shape \(4,\), expected \(\)": lambda: quantize_transposed(X, scale=X[:, 0]),
    r"rows.scales has shape \(3,\), expected \(4,\)": lambda: transpose_rows(
        Rows(ROWS.codes, ROWS.scales[:3])
    ),
    r"b.codes has shape \(32, 4\), expected \(32, 32\)": lambda: product(b=transpose_rows(ROWS)),
}
REFUSED = [(ValueError, *row) for row in WRONG_SHAPES.items()]
REFUSED += [(TypeError, *row) for row in WRONG_TYPES.items()]


def product(b=ROWS, dtype=torch.float32):
    return fp8_product(ROWS, b, dtype)


@pytest.mark.parametrize("error, sentence, call", REFUSED, ids=[row[1] for row in REFUSED])
def test_what_does_not_fit_is_refused(error, sentence, call):
    with pytest.raises(error, match=sentence):
        call()


@needs_gpu
def test_a_product_that_a_gpu_does_not_take_is_refused():
    with pytest.raises(ValueError, match=r"b is \(4, 32\), expected multiples of 16"):
        fp8_product(ROWS, ROWS, torch.bfloat16)
