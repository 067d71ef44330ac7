"""watching.py sees each kind of fault in a wrong kernel, and none in a right one."""

import re
from dataclasses import replace

import pytest
import torch

from harness.cli.device import DEVICE, HAS_GPU
from judging import addresses
from judging.contract import Wrong
from judging.watching import watched
from kernel_support import tl, triton
from subjects import SUBJECTS
from tests.contracts import contracts_of

# 0 / 0 and inf - inf are the right answers of some lanes; the interpreter's NumPy comments on them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("small_tiles"),
]
in_interpreter = pytest.mark.skipif(HAS_GPU, reason="a GPU's addresses are not seen")
BLOCK = 64


@triton.jit
def _copy_kernel(x_ptr, y_ptr, x_stride, n_cols, BLOCK: tl.constexpr, HOW: tl.constexpr):
    """HOW: which mistake is made in copying rows."""
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    y_ptrs = y_ptr + tl.program_id(0) * n_cols + cols
    if HOW == "no mask":
        x = tl.load(x_ptr + tl.program_id(0) * x_stride + cols)
        tl.store(y_ptrs, x)
    elif HOW == "no other":
        x = tl.load(x_ptr + tl.program_id(0) * x_stride + cols, mask=mask)
        tl.store(y_ptr + tl.program_id(0), tl.sum(x.to(tl.float32)))
    elif HOW == "before":
        x = tl.load(x_ptr + tl.program_id(0) * x_stride + cols - 1, mask=mask, other=0.0)
        tl.store(y_ptrs, x, mask=mask)
    else:
        x = tl.load(x_ptr + tl.program_id(0) * x_stride + cols, mask=mask, other=0.0)
        tl.store(y_ptrs, x, mask=mask)


def copy(x, how, order="forward"):
    y = torch.full(x.shape, -1.0, dtype=x.dtype, device=DEVICE)
    n_rows, n_cols = x.shape
    with watched({"x": x}, order) as watch:
        grid = (n_rows, triton.cdiv(n_cols, BLOCK))
        _copy_kernel[grid](x, y, x.stride(0), n_cols, BLOCK, how)
    return y, watch


def rows(n_rows=2, n_cols=96, dtype=torch.float32):
    return torch.arange(n_rows * n_cols, device=DEVICE).reshape(n_rows, n_cols).to(dtype)


def test_launches_are_seen():
    _y, watch = copy(rows(), "")
    assert watch.kernels == [("_copy_kernel", __file__)] and watch.sees_addresses != HAS_GPU


@in_interpreter
@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_a_right_copy_has_no_findings_in_any_order(order):
    x = rows()
    gaps = torch.zeros(2, 100, device=DEVICE)[:, :96].copy_(x)
    for given in (x, gaps, x.t().contiguous().t()[:, :1], x[:1].expand(2, 96)):
        y, watch = copy(given, "", order)
        assert watch.findings == [] and torch.equal(y, given)


@in_interpreter
def test_an_access_outside_is_found_and_not_made():
    memory = torch.full((200,), 5.0, device=DEVICE)
    x = memory[:192].view(2, 96).copy_(rows())
    _y, watch = copy(x, "no mask")
    load, store = watch.of("outside")
    assert (
        "A load without a mask reaches outside of x (line " in load and "watching_test.py" in load
    )
    assert "lane 32 of program (1, 1, 0) reads 1 behind the last element; 32 times in all." in load
    assert "A store without a mask reaches outside of y" in store
    with watched({"p": x}) as watch:  # in place
        _copy_kernel[(2, 2)](x, x, 96, 96, BLOCK, "no mask")
    assert "outside of p" in watch.findings[0] and (memory[192:] == 5).all()


@in_interpreter
def test_an_element_before_the_first_and_a_gap():
    _y, watch = copy(rows(), "before")
    assert "lane 0 of program (0, 0, 0) reads 1 before the first element." in watch.findings[0]
    gaps = torch.zeros(2, 100, device=DEVICE)[:, :96]
    _y, watch = copy(gaps, "no mask")
    assert "lane 32 of program (0, 1, 0) reads a gap between the elements" in watch.findings[0]
    _y, watch = copy(gaps, "before")  # of the second row, too, the element before is a gap
    assert "2 times in all" in watch.findings[0]


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_a_masked_lane_without_other_gives_no_zero(dtype):
    y, watch = copy(rows(1, 60, dtype), "no other")
    assert watch.findings == []
    wrong = y[0, 0].isnan() if dtype.is_floating_point else y[0, 0] != 60 * 59 // 2
    assert wrong


@triton.jit
def _sum_kernel(x_ptr, sum_ptr, n, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    """Add each program's part to one number."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + i, mask=i < n, other=0.0))
    if ATOMIC:
        tl.atomic_add(sum_ptr, part)
    else:
        tl.store(sum_ptr, tl.load(sum_ptr) + part)


@in_interpreter
def test_programs_that_share_an_element_need_an_atomic():
    for atomic in (True, False):
        total = torch.zeros(1, device=DEVICE)
        with watched({"total": total}) as watch:
            _sum_kernel[(2,)](torch.ones(100, device=DEVICE), total, 100, atomic, BLOCK)
        assert total == 100 and bool(watch.findings) != atomic
    sentence = watch.of("programs")[0]
    assert "Program (1, 0, 0) writes element (0,) of total" in sentence
    assert "which program (0, 0, 0) writes" in sentence and "programs run in any order" in sentence


@triton.jit
def _shift_kernel(x_ptr, n, BLOCK: tl.constexpr):
    """Each program but the first writes what the one before it reads."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i + 1, mask=i < n - 1, other=0.0)
    tl.debug_barrier()
    tl.store(x_ptr + i, x, mask=i < n)


@in_interpreter
def test_the_order_of_programs_shows_in_the_numbers():
    found = []
    for order in ("forward", "reverse"):
        x = torch.arange(128.0, device=DEVICE)
        with watched({"x": x}, order) as watch:
            _shift_kernel[(2,)](x, 128, BLOCK)
        assert "element (64,) of x" in watch.of("programs")[0] and watch.of("threads") == []
        found.append(x)
    assert not torch.equal(*found)


@triton.jit
def _target_kernel(x_ptr, target, n_cols, BLOCK: tl.constexpr, HOW: tl.constexpr):
    """Subtract the target's element from a row, in place."""
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    if HOW == "early":
        t = tl.load(x_ptr + target)
    x = tl.load(x_ptr + cols, mask=mask, other=0.0)
    x = x + 0.0 * tl.sum(x)
    if HOW != "early":
        t = tl.load(x_ptr + target)
    if HOW == "barrier":
        tl.debug_barrier()
    if HOW == "half":  # a block of another shape has other threads
        tl.store(x_ptr + tl.arange(0, BLOCK // 2), tl.zeros((BLOCK // 2,), dtype=tl.float32))
    tl.store(x_ptr + cols, x - t, mask=mask)


@in_interpreter
@pytest.mark.parametrize("how", ["early", "barrier", "late", "half"])
def test_threads_wait_for_each_other(how):
    x = torch.arange(40.0, device=DEVICE)
    with watched({"x": x}) as watch:
        _target_kernel[(1,)](x, 7, 40, BLOCK, how)
    if how in ("early", "barrier"):
        assert watch.findings == []
    else:
        sentence = watch.findings[0]
        element = "(7,)" if how == "late" else "(0,)"
        assert f"Program (0, 0, 0) writes element {element} of x" in sentence
        assert "which another of its threads" in sentence and "a barrier is missing" in sentence


@in_interpreter
def test_a_row_copied_in_place_by_one_block_needs_no_barrier():
    x = rows()
    with watched({"x": x}) as watch:
        _copy_kernel[(2, 2)](x, x, 96, 96, BLOCK, "")
    assert watch.findings == []


# ---- The contracts -------------------------------------------------------------------------------

CONTRACTS = (
    addresses.every_address_is_inside_a_tensor,
    addresses.programs_run_in_any_order,
    addresses.threads_wait_for_each_other,
)


globals().update(contracts_of(addresses))


def total_of(values, atomic=True):
    total = torch.zeros(1, device=DEVICE)
    _sum_kernel[(len(values) // BLOCK,)](values, total, len(values), atomic, BLOCK)
    return total


def thirds():
    """Three parts whose sum depends on their order."""
    values = torch.zeros(3 * BLOCK, device=DEVICE)
    values[::BLOCK] = torch.tensor([1e8, 1.0, -1e8], dtype=torch.float32, device=DEVICE)
    return values


FAULTS = {
    "outside of x": lambda: _copy_kernel[(2, 2)](rows(), rows(), 96, 96, BLOCK, "no mask"),
    "which program": lambda: total_of(thirds(), atomic=False),
    "the same bits": lambda: total_of(thirds()),
    "a barrier is missing": lambda: _target_kernel[(1,)](rows()[0], 7, 40, BLOCK, "late"),
}


@in_interpreter
@pytest.mark.parametrize("sentence", FAULTS)
def test_a_fault_breaks_one_contract(sentence):
    right = SUBJECTS["swiglu"]

    def function(*inputs):
        found = FAULTS[sentence]()
        return right.function(*inputs) * (1 if found is None else 1 + found)

    said = []
    for ask in CONTRACTS:
        try:
            ask.ask(replace(right, function=function), right.size)
        except Wrong as wrong:
            said.append(str(wrong))
    assert len(said) == 1 + (sentence == "outside of x") and re.search(sentence, said[0])
