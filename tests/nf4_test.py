"""What is NF4's alone: its codes, which are QLoRA's, and how far a weight may be from them.

What every function has to do, the product with a weight in NF4 too, is asked in
tests/contracts_*_test.py.  bitsandbytes, where it is installed, has to give the same bits.
"""

import importlib.util

import pytest
import torch

from harness.cli.device import DEVICE, HAS_GPU
from judging.circumstances import OTHER_DEFAULTS, default_dtype
from next_steps.lessons import nf4_kernel
from next_steps.lessons.nf4_kernel import (
    BLOCK,
    GROUP,
    N_VALUES,
    NF4,
    NF4_VALUES,
    nf4_dequantize,
    nf4_dequantize_reference,
    nf4_quantize,
)
from tests import tiles
from tests.fixtures import needs_gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs the package bitsandbytes"
)
pytestmark = pytest.mark.usefixtures("poison_new_tensors")


def make_weight(*shape, dtype=torch.float32, seed=0):
    """Normal numbers, whose rows are of several magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return (weight * 0.1 * torch.rand((shape[0], 1), generator=generator)).to(DEVICE, dtype)


# ---- The codes -----------------------------------------------------------------------------------

# What bitsandbytes 0.50.2 makes of `recorded_weight` on a CPU.
CODES = (
    "7eb7008ae9e9a00c6fdf3e23f1ffe0fbcf09e61bff57020d0860f418e500c4ff"
    "f0feed2140c0740f84d8d35f0ad343da0f52d9d37f0691a0631eecf1fef78002"
    "f401f0bc190512bffe0cfe0f64e2fdf6b008bd5cd3002e716f1111f414f1111f"
    "415f1111e829e3005ce8e8b11e3fff1f9bf0ae61bff57010e0530f72cc911e1e"
)
ABSMAX_CODES = [0, 47, 207, 255]
EVERY_37TH = [
    0.0,
    -0.011444571428000927,
    0.11007968336343765,
    -0.249778151512146,
    0.3744475841522217,
    -0.10650838911533356,
    -0.3479922115802765,
]


def recorded_weight() -> torch.Tensor:
    i = torch.arange(256, dtype=torch.float64)
    return (torch.sin(i * i * 0.7) * (1 + i // 64) / 8).float().view(2, 128).to(DEVICE)


def test_recorded_codes_and_numbers():
    nf4 = nf4_quantize(recorded_weight())
    assert bytes(nf4.codes.tolist()).hex() == CODES
    assert nf4.absmax_codes.tolist() == ABSMAX_CODES
    weight = nf4_dequantize(nf4, (2, 128), torch.float32)
    assert weight.view(-1)[::37].tolist() == EVERY_37TH
    for dtype in OTHER_DEFAULTS:
        with default_dtype(dtype):
            assert all(map(torch.equal, nf4_quantize(recorded_weight()), nf4))


def test_the_map_of_absmax_is_dynamic():
    """1 value between 1e-7 and 1e-6, 2 up to 1e-5, ... 64 up to 1; of both signs; 0 and 1."""
    values = nf4_kernel.nf4_tables("cpu")[N_VALUES:].double()
    assert len(values) == GROUP and (values.diff() > 0).all()
    assert values[127] == 0 and values[255] == 1
    torch.testing.assert_close(values[:127].flip(0), -values[128:255], rtol=0, atol=0)
    for exponent in range(7):
        low = 10.0 ** (exponent - 7)
        decade = values[(values > low) & (values < 10 * low)]
        n = 2**exponent
        middles = low + (torch.arange(n).double() + 0.5) * 9 * low / n
        torch.testing.assert_close(decade, middles, rtol=1e-6, atol=0)


def test_each_code_is_the_nearest_by_the_formula_in_float64():
    nf4 = nf4_quantize(make_weight(257, BLOCK))
    blocks = make_weight(257, BLOCK).double().cpu()
    absmax = blocks.abs().amax(1)
    table = torch.tensor(NF4_VALUES, dtype=torch.float64)
    distances = (blocks / absmax[:, None]).view(-1, 1).sub(table).abs()
    codes = torch.stack([nf4.codes >> 4, nf4.codes & 15], 1).view(-1).long()
    assert torch.equal(codes.cpu(), distances.argmin(1))

    mean = absmax.mean()
    torch.testing.assert_close(nf4.absmax_mean.double().cpu(), mean[None])
    groups = (absmax - mean).split(GROUP)  # 256 blocks and 1
    scales = torch.stack([group.abs().max() for group in groups])
    torch.testing.assert_close(nf4.absmax_scales.double().cpu(), scales)
    relative = torch.cat([group / scale for group, scale in zip(groups, scales)])
    values = nf4.tables[N_VALUES:].double().cpu()
    distances = relative[:, None].sub(values).abs()
    chosen = distances.gather(1, nf4.absmax_codes.long().cpu()[:, None])[:, 0]
    assert (chosen <= distances.amin(1) + 1e-6).all()  # the fp32 of a deviation


def error_and_bound(weight: torch.Tensor, nf4: NF4) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest error of each block in float64, and what two nearest values allow."""
    found = nf4_dequantize(nf4, weight.shape, torch.float32).double().view(-1, BLOCK)
    blocks = weight.double().view(-1, BLOCK)
    tables = nf4.tables.double()
    coarsest, coarsest_absmax = (t.diff().max() / 2 for t in tables.split([N_VALUES, GROUP]))
    scales = nf4.absmax_scales.double().repeat_interleave(GROUP)[: len(blocks)]
    bound = coarsest * blocks.abs().amax(1) + coarsest_absmax * scales
    return (found - blocks).abs().amax(1), 1.0001 * bound  # roundings to fp32


def test_round_trip_is_as_near_as_the_tables_allow():
    weight = make_weight(300, BLOCK)
    nf4 = nf4_quantize(weight)
    error, bound = error_and_bound(weight, nf4)
    assert (error <= bound).all() and (error > 0.5 * bound).any()
    exchanged = nf4._replace(codes=nf4.codes << 4 | nf4.codes >> 4)
    next_block = nf4._replace(absmax_codes=nf4.absmax_codes.roll(1))
    for wrong in (exchanged, next_block):
        error, bound = error_and_bound(weight, wrong)
        assert (error > bound).sum() > 100


def test_what_has_been_quantized_keeps_its_codes():
    nf4 = nf4_quantize(make_weight(40, BLOCK))
    weight = nf4_dequantize(nf4, (40, BLOCK), torch.float32)
    assert torch.equal(nf4_quantize(weight).codes, nf4.codes)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_a_constant_weight_has_absmaxes_without_deviation(value):
    """Their scale is 0, by which nothing may be divided."""
    weight = torch.full((3, BLOCK), value, device=DEVICE)
    nf4 = nf4_quantize(weight)
    assert torch.equal(nf4_dequantize(nf4, weight.shape, torch.float32), weight)


def test_a_block_of_zeros_among_others():
    weight = make_weight(5, BLOCK)
    weight[2] = 0
    nf4 = nf4_quantize(weight)
    assert (nf4_dequantize(nf4, weight.shape, torch.float32)[2] == 0).all()


def test_any_strides_of_the_weight_which_is_not_changed():
    weight = make_weight(BLOCK, 96)
    before = weight.clone()
    for view in (weight.t(), weight[:, ::2], weight[:1].expand(4, 96)):
        found, expected = nf4_quantize(view), nf4_quantize(view.contiguous())
        assert all(map(torch.equal, found, expected))
    assert torch.equal(weight, before)


def test_half_a_byte_a_number():
    nf4 = nf4_quantize(make_weight(512, 4096, dtype=torch.bfloat16))
    n_bytes = sum(t.nbytes for t in nf4) - nf4.tables.nbytes
    assert n_bytes == 512 * 4096 * (1 / 2 + 1 / BLOCK + 4 / BLOCK / GROUP) + 4


# ---- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weight, error, sentence",
    [
        (torch.ones(3, 21), ValueError, r"shape \(3, 21\), 63 numbers, expected a multiple of 64"),
        (torch.ones(64).double(), TypeError, "weight is torch.float64, expected torch.float16 or"),
        (torch.ones(64).long(), TypeError, "weight is torch.int64, expected"),
        ([0.0] * 64, TypeError, "weight is a list, expected a tensor"),
        (torch.ones(64).to_sparse(), TypeError, "weight is torch.sparse_coo, expected"),
        (torch.full((64,), float("nan")), ValueError, "infinite or NaN numbers, expected none"),
        (torch.full((64,), -float("inf")), ValueError, "infinite or NaN numbers, expected none"),
    ],
    ids=["63 numbers", "float64", "int64", "a list", "sparse", "NaN", "infinite"],
)
def test_weights_that_are_refused(weight, error, sentence):
    with pytest.raises(error, match=sentence):
        nf4_quantize(weight)


def test_no_numbers():
    nf4 = nf4_quantize(torch.empty(0, BLOCK, device=DEVICE))
    assert nf4_dequantize(nf4, (0, BLOCK), torch.bfloat16).shape == (0, BLOCK)


def test_shapes_alone():
    """As in the estimate of memory, where tensors have no numbers."""
    nf4 = nf4_quantize(torch.empty(300, BLOCK, device="meta"))
    assert [tuple(t.shape) for t in nf4] == [(9600,), (300,), (2,), (1,), (272,)]


# ---- The kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [None, 1, 2, 64])
@pytest.mark.parametrize("n_blocks", [1, 15, 16, 17, 260])
def test_the_references_bits(n_blocks, tile, dtype, monkeypatch):
    if tile is not None:
        tiles.nf4_tiles(monkeypatch, tile)
    nf4 = nf4_quantize(make_weight(n_blocks, BLOCK))
    shape = 2, n_blocks * BLOCK // 2
    found = nf4_dequantize(nf4, shape, dtype)
    assert torch.equal(found, nf4_dequantize_reference(nf4, shape, dtype))


def test_every_code_and_every_absmax_code():
    """All 256 bytes, each with all 256 absmax codes of two groups."""
    codes = torch.arange(2 * 256 * 32, dtype=torch.int64, device=DEVICE)
    codes = (codes * 37 % 256).to(torch.uint8)
    nf4 = NF4(
        codes=codes,
        absmax_codes=torch.arange(256, device=DEVICE).repeat(2).to(torch.uint8),
        absmax_scales=torch.tensor([0.3, 0.7], device=DEVICE),
        absmax_mean=torch.tensor([1.1], device=DEVICE),
        tables=nf4_kernel.nf4_tables(DEVICE),
    )
    found = nf4_dequantize(nf4, (512, BLOCK), torch.float32)
    assert torch.equal(found, nf4_dequantize_reference(nf4, (512, BLOCK), torch.float32))


@needs_gpu
def test_a_weight_of_more_than_2_to_the_31_numbers(gpu_memory):
    """Its last blocks lie beyond int32; all others are of one byte."""
    gpu_memory(8)
    tail = nf4_quantize(make_weight(GROUP, BLOCK))
    n_blocks = 2**31 // BLOCK + GROUP
    nf4 = NF4(
        codes=torch.zeros(n_blocks * BLOCK // 2, dtype=torch.uint8, device=DEVICE),
        absmax_codes=torch.zeros(n_blocks, dtype=torch.uint8, device=DEVICE),
        absmax_scales=torch.zeros(n_blocks // GROUP, device=DEVICE),
        absmax_mean=tail.absmax_mean,
        tables=tail.tables,
    )
    for whole, end in zip(nf4[:3], tail[:3]):
        whole[-len(end) :] = end
    found = nf4_dequantize(nf4, (n_blocks, BLOCK), torch.bfloat16)
    expected = nf4_dequantize_reference(tail, (GROUP, BLOCK), torch.bfloat16)
    assert torch.equal(found[-GROUP:], expected)


# ---- bitsandbytes ------------------------------------------------------------------------------


def bitsandbytes_quantize(weight: torch.Tensor):
    """(codes, state) of bitsandbytes, in whose state the absmaxes are quantized too."""
    from bitsandbytes.functional import quantize_4bit

    return quantize_4bit(weight, quant_type="nf4", compress_statistics=True)


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (160, 960), (257, 128)])
def test_bitsandbytes_gives_the_same_codes_scales_and_mean(shape, dtype):
    """On a GPU it divides faster than PyTorch, and sums in another order."""
    weight = make_weight(*shape, dtype=dtype)
    codes, state = bitsandbytes_quantize(weight)
    nf4 = nf4_quantize(weight)
    if HAS_GPU:
        assert (codes.view(-1) == nf4.codes).float().mean() > 0.999
        torch.testing.assert_close(nf4.absmax_mean, state.offset.view(1))
        torch.testing.assert_close(nf4.absmax_scales, state.state2.absmax)
    else:
        assert torch.equal(codes.view(-1), nf4.codes)
        assert torch.equal(nf4.absmax_mean, state.offset.view(1))
        assert torch.equal(nf4.absmax_scales, state.state2.absmax)
    assert torch.equal(nf4.tables[N_VALUES:], state.state2.code.to(DEVICE))


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitsandbytes_gives_the_same_absmax_codes_but_next_to_a_tie(dtype):
    """On a CPU it looks a number's code up by its upper 16 bits, so that it may take the value
    that is the farther one by 2**-15 at most.  Ours is the nearest.
    """
    weight = make_weight(2000, 128, dtype=dtype)
    _, state = bitsandbytes_quantize(weight)
    nf4 = nf4_quantize(weight)
    values = nf4.tables[N_VALUES:].double()
    absmax = weight.double().view(-1, BLOCK).abs().amax(1)
    scales = nf4.absmax_scales.double().repeat_interleave(GROUP)[: len(absmax)]
    relative = (absmax - nf4.absmax_mean.double()) / scales
    ours, theirs = (
        (values[codes.long()] - relative).abs() for codes in (nf4.absmax_codes, state.absmax)
    )
    assert (ours <= theirs + 1e-6).all() and (theirs <= ours + 2**-15).all()
    assert (nf4.absmax_codes == state.absmax).float().mean() > 0.99


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitsandbytes_codes_give_its_own_bits(dtype):
    from bitsandbytes.functional import dequantize_4bit

    weight = make_weight(257, 128, dtype=dtype)
    codes, state = bitsandbytes_quantize(weight)
    theirs = NF4(
        codes=codes.view(-1),
        absmax_codes=state.absmax,
        absmax_scales=state.state2.absmax,
        absmax_mean=state.offset.view(1),
        tables=nf4_kernel.nf4_tables(DEVICE),
    )
    found = nf4_dequantize(theirs, weight.shape, dtype)
    assert torch.equal(found, dequantize_4bit(codes, state, quant_type="nf4"))
