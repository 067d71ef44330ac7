"""Every function gives float64's outputs and gradients, whatever the size, the dtype and the place
in memory.
"""

from unittest import mock

import pytest
import torch

from harness.benchmark.checking import FLOOR, assert_all_passed, relative_error
from harness.cli.device import DEVICE, HAS_GPU
from rmsnorm_kernel import triton
from subjects.subject import (
    as_tuple,
    checks,
    compare_parts,
    in_float64,
    leaves_of,
    references,
    run,
    same_bits,
)
from tests import tiles
from tests.contracts import contract
from tests.fixtures import OTHER_DEFAULTS, default_dtype
from tests.layouts import Layout, layouts_of

# 0 / 0 and inf - inf are the right answers for no rows; the interpreter's NumPy comments on them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("poison_new_tensors", "small_tiles"),
]
ROWS = (2, 3)


def test_new_tensors_are_poisoned():
    t = torch.empty(4, device=DEVICE)
    assert t.isnan().all() and torch.empty_like(t).isnan().all() and t.new_empty(2).isnan().all()


# ---- The numbers ---------------------------------------------------------------------------------


@contract("dtype", lambda subject: subject.dtypes)
def test_outputs_and_gradients_match_float64(subject, dtype):
    assert_all_passed(checks(subject, *subject.make((5, 3), subject.size, dtype)))


@contract()
def test_the_default_dtype_changes_nothing(subject):
    inputs, douts = subject.make((5,), subject.size, subject.dtypes[0])
    expected = run(subject, subject.function, inputs, douts)
    for dtype in OTHER_DEFAULTS:
        with default_dtype(dtype):
            found = run(subject, subject.function, inputs, douts)
        for part, right in expected.items():
            assert found[part].dtype == right.dtype, (dtype, part)
        assert same_bits(found, expected), dtype


@contract(
    "size",
    lambda subject: subject.ragged_sizes,
    exhaustive=lambda subject, size: size not in subject.ragged_sizes[::3],
)
def test_ragged_sizes(subject, size):
    assert_all_passed(checks(subject, *subject.make((5,), size, torch.float32)))


def with_gaps(tensors):
    """Five unused elements between the rows."""
    placed = {}
    for name, t in tensors.items():
        dims = tuple(range(t.ndim))
        placed[name] = Layout(dims, (1,) * t.ndim, gap=5).place(t) if dims else t
    return placed


@contract("size", lambda subject: subject.ragged_sizes[-3:])
def test_ragged_rows_with_gaps_between_them(subject, size):
    inputs, douts = subject.make((5,), size, torch.float32)
    assert_all_passed(checks(subject, with_gaps(inputs), with_gaps(douts)))


@contract(
    "case",
    lambda subject: [(size, dtype) for size in subject.large_sizes for dtype in subject.dtypes],
    exhaustive=lambda subject, case: case[1] != torch.float32,
)
def test_large_sizes_with_the_shipped_tiles(subject, case, monkeypatch):
    tiles.shipped_tiles(monkeypatch)
    assert_all_passed(checks(subject, *subject.make((3,), *case)))


# on the CPU there are at most 8 programs
@contract(
    "n_rows",
    lambda subject: (1, 2, 7, 8, 9, 17, 40),
    exhaustive=lambda subject, n_rows: n_rows not in (1, 9),
)
def test_no_row_is_lost_between_programs(subject, n_rows):
    assert_all_passed(checks(subject, *subject.make((n_rows,), subject.size, torch.float32)))


@contract("rows", lambda subject: ((), (5,), (2, 3), (2, 1, 3)))
def test_one_to_four_dimensions(subject, rows):
    inputs, douts = subject.make(rows, subject.size, torch.float32)
    assert_all_passed(checks(subject, inputs, douts))


@contract("rows", lambda subject: ((0,), (2, 0), (0, 3)))
def test_no_rows_are_as_in_pytorch(subject, rows):
    inputs, douts = subject.make(rows, subject.size, torch.bfloat16)
    found = run(subject, subject.function, inputs, douts)
    expected = run(subject, subject.eager or subject.reference, inputs, douts)
    for part, right in expected.items():
        torch.testing.assert_close(found[part], right, equal_nan=True, rtol=0, atol=0)


# ---- The comparison can fail ---------------------------------------------------------------------


@contract("dtype", lambda subject: (torch.float32, torch.bfloat16))
def test_comparator_rejects_wrong_answers(subject, dtype):
    inputs, douts = subject.make((11,), subject.size, dtype)
    ref64, eagers = references(subject, inputs, douts)
    dtypes = {part: t.dtype for part, t in eagers[0].items()}

    def accepted(parts):
        answer = {part: parts.get(part, ref64[part]).to(dtype) for part, dtype in dtypes.items()}
        found = compare_parts(subject, answer, inputs, ref64, eagers)
        return all(check.passed for check in found)

    assert accepted({}), "the right answer"
    wrong = {f"{part} zero": {part: 0 * ref64[part]} for part in ref64}
    wrong |= {f"{part} sign flipped": {part: -ref64[part]} for part in ref64}
    wrong |= subject.wrong_answers(in_float64(inputs), in_float64(douts), ref64)
    assert [mistake for mistake, parts in wrong.items() if accepted(parts)] == []


@contract()
def test_comparator_rejects_what_no_kernel_wrote(subject):
    inputs, douts = subject.make(ROWS, subject.size, torch.float32)
    run(subject, subject.function, inputs, douts)  # now nothing else is wanting
    runners = [triton.runtime.JITFunction]
    if not HAS_GPU:
        from triton.runtime.interpreter import InterpretedFunction

        runners.append(InterpretedFunction)
    with mock.patch.multiple(runners[-1], run=lambda *args, **options: None):
        found = checks(subject, inputs, douts)
    passed = {check.name.split()[1] for check in found if check.passed}
    assert passed <= set(subject.made_by_pytorch)


# ---- Where the tensors lie -----------------------------------------------------------------------


def strided_cases(subject):
    """(input or "d" + output, the name of a layout)."""
    inputs, douts = subject.make(ROWS, subject.size, torch.float32)
    tensors = inputs | {f"d{name}": t for name, t in douts.items()}
    for name, t in tensors.items():
        for layout in (*layouts_of(t.ndim), *subject.more_layouts.get(name, {})):
            yield name, layout


CORE = (
    "gaps and an odd offset",
    "every second column",
    "columns outermost",
    "dimension 0 repeated (stride 0)",
    "all repeated (strides 0)",
)


@contract(
    "case",
    strided_cases,
    exhaustive=lambda subject, case: case[1] not in CORE,
)
def test_any_strides(subject, case):
    name, layout = case
    inputs, douts = subject.make(ROWS, subject.size, torch.float32)
    tensors, key = (inputs, name) if name in inputs else (douts, name.removeprefix("d"))
    more, values = subject.more_layouts.get(name, {}), tensors[key]
    place = more[layout] if layout in more else layouts_of(values.ndim)[layout].place
    tensors[key] = place(values)
    assert_all_passed(checks(subject, inputs, douts))


@contract()
def test_sum_backward_sends_a_gradient_of_stride_zero(subject):
    inputs, douts = subject.make(ROWS, subject.size, torch.float32)
    leaves = leaves_of(subject, inputs)
    sum(out.sum() for out in as_tuple(subject.function(*leaves.values()))).backward()
    douts = {name: torch.ones_like(dout) for name, dout in douts.items()}
    found = dict(zip(douts, as_tuple(subject.function(*inputs.values()))))
    found |= {f"d{name}": leaves[name].grad for name in subject.differentiable}
    assert_all_passed(compare_parts(subject, found, inputs, *references(subject, inputs, douts)))


@contract("name", lambda subject: subject.differentiable)
def test_gradient_reaches_the_tensor_behind_a_view(subject, name):
    inputs, douts = subject.make(ROWS, subject.size, torch.float32)
    expected = run(subject, subject.function, inputs, douts)[f"d{name}"]
    leaves = leaves_of(subject, inputs)
    order = list(reversed(range(inputs[name].ndim)))
    behind = inputs[name].detach().permute(order).contiguous().requires_grad_()
    leaves[name] = behind.permute(order)
    torch.autograd.backward(as_tuple(subject.function(*leaves.values())), list(douts.values()))
    assert relative_error(behind.grad.permute(order), expected) < FLOOR[torch.float32]


@contract("case", lambda subject: subject.far)
def test_rows_beyond_int32(subject, case, far_apart):
    name, dim = case
    if HAS_GPU and name in subject.multiplied:
        pytest.skip("cuBLAS reads it, and ends the process at such strides")
    inputs, douts = subject.make(subject.far_rows, subject.far_size or subject.size, torch.bfloat16)
    expected = run(subject, subject.function, inputs, douts)
    tensors = inputs if name in inputs else douts
    name = name if name in inputs else name.removeprefix("d")
    tensors[name] = far_apart(tensors[name], dim)
    found = run(subject, subject.function, inputs, douts)
    if subject.made_by_kernels_alone or not HAS_GPU:
        assert same_bits(found, expected)
    else:  # cuBLAS may choose another order of sums for such strides
        for part, t in found.items():
            assert relative_error(t, expected[part]) <= FLOOR[torch.bfloat16], part


# ---- The same numbers every time -----------------------------------------------------------------


@contract("dtype", lambda subject: (torch.float32, torch.bfloat16))
def test_every_run_gives_the_same_bits(subject, dtype):
    rows = (17, 300) if HAS_GPU else (5,)
    inputs, douts = subject.make(rows, subject.size, dtype)
    first, second, third = (run(subject, subject.function, inputs, douts) for _ in range(3))
    assert same_bits(first, second) and same_bits(first, third)
