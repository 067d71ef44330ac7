"""Every function gives float64's outputs and gradients, whatever the size, the dtype and the place
in memory.
"""

from dataclasses import replace

import torch

from harness.benchmark.checking import FLOOR
from harness.cli.device import HAS_GPU
from judging.circumstances import OTHER_DEFAULTS, default_dtype
from judging.comparing import (
    copies,
    expect_same,
    gradients_of,
    match_float64,
    outputs_of,
    parts_of,
)
from judging.contract import NotTried, contract
from judging.layouts import FAR_GIB, far_apart, layouts_of, with_gaps
from subjects.subject import Subject, leaves_of, run

ROWS = (2, 3)


# ---- The numbers ---------------------------------------------------------------------------------


@contract("dtype", lambda subject: subject.dtypes)
def outputs_and_gradients_match_float64(subject, dtype):
    match_float64(subject, *subject.make((5, 3), subject.size, dtype))


@contract()
def the_default_dtype_changes_nothing(subject):
    expected = parts_of(subject, *subject.make((5,), subject.size, subject.dtypes[0]))
    for dtype in OTHER_DEFAULTS:
        inputs, douts = subject.make((5,), subject.size, subject.dtypes[0])
        with default_dtype(dtype):
            found = parts_of(subject, inputs, douts)
        expect_same(f"with {dtype} as the default", found, expected, subject.recorded)


@contract(
    "size",
    lambda subject: subject.ragged_sizes,
    exhaustive=lambda subject, size: size not in subject.ragged_sizes[::3],
)
def ragged_sizes(subject, size):
    match_float64(subject, *subject.make((5,), size, torch.float32))


@contract("size", lambda subject: subject.ragged_sizes[-3:])
def ragged_rows_with_gaps_between_them(subject, size):
    inputs, douts = subject.make((5,), size, torch.float32)
    match_float64(subject, with_gaps(inputs), with_gaps(douts))


@contract(
    "size",
    lambda subject: [(size, dtype) for size in subject.large_sizes for dtype in subject.dtypes],
    exhaustive=lambda subject, case: case[1] != torch.float32,
    shipped_tiles=True,
)
def large_sizes_with_the_shipped_tiles(subject, case):
    match_float64(subject, *subject.make((3,), *case))


# on the CPU there are at most 8 programs
@contract(
    "rows",
    lambda subject: (1, 2, 7, 8, 9, 17, 40),
    exhaustive=lambda subject, n_rows: n_rows not in (1, 9),
)
def no_row_is_lost_between_programs(subject, n_rows):
    match_float64(subject, *subject.make((n_rows,), subject.size, torch.float32))


@contract("rows", lambda subject: ((), (5,), (2, 3), (2, 1, 3)))
def one_to_four_dimensions(subject, rows):
    match_float64(subject, *subject.make(rows, subject.size, torch.float32))


MAGNITUDES = {
    "a thousandth": lambda x: x / 1000,  # a norm's eps counts
    "50 times": lambda x: x * 50,  # gates and softmax are steep
    "1,000 more": lambda x: x + 1000,  # exp overflows, where no maximum was subtracted
    "1,000 less": lambda x: x - 1000,
}


@contract("first input", lambda subject: MAGNITUDES)
def small_large_and_shifted_values(subject, how):
    inputs, douts = subject.make((5,), subject.size, torch.float32)
    name, *_ = subject.differentiable
    match_float64(subject, inputs | {name: MAGNITUDES[how](inputs[name])}, douts)


@contract("rows", lambda subject: ((0,), (2, 0), (0, 3)))
def no_rows_are_as_in_pytorch(subject, rows):
    inputs, douts = subject.make(rows, subject.size, torch.bfloat16)
    kept = copies(inputs), copies(douts)
    expected = run(subject, subject.eager or subject.reference, *kept)
    expect_same("of no rows", parts_of(subject, inputs, douts), expected, True)


# ---- Where the tensors lie -----------------------------------------------------------------------


def strided_cases(subject: Subject):
    """Yield (input or "d" + output, the name of a layout)."""
    inputs, douts = subject.make(ROWS, subject.size, torch.float32)
    tensors = inputs | {f"d{name}": t for name, t in douts.items()}
    for name, t in tensors.items():
        for layout in (*layouts_of(t.ndim), *subject.more_layouts.get(name, {})):
            yield name, layout


CORE_LAYOUTS = (
    "gaps and an odd offset",
    "every second column",
    "columns outermost",
    "dimension 0 repeated (stride 0)",
    "all repeated (strides 0)",
)


@contract("in", strided_cases, exhaustive=lambda subject, case: case[1] not in CORE_LAYOUTS)
def any_strides(subject, case):
    name, layout = case
    inputs, douts = subject.make(ROWS, subject.size, torch.float32)
    tensors, key = (inputs, name) if name in inputs else (douts, name.removeprefix("d"))
    more, values = subject.more_layouts.get(name, {}), tensors[key]
    place = more[layout] if layout in more else layouts_of(values.ndim)[layout].place
    tensors[key] = place(values)
    match_float64(subject, inputs, douts)


@contract()
def sum_backward_sends_a_gradient_of_stride_zero(subject):
    inputs, douts = subject.make(ROWS, subject.size, torch.float32)
    ones = {name: torch.ones_like(dout) for name, dout in douts.items()}
    expected = parts_of(subject, copies(inputs), ones)
    leaves = leaves_of(subject, inputs)
    total = sum(out.sum() for out in outputs_of(subject, leaves, douts).values())
    found = gradients_of({"total": total}, leaves, {"total": torch.ones_like(total)})
    expect_same("by sum().backward()", found, expected, False)


@contract("of", lambda subject: subject.differentiable)
def gradient_reaches_the_tensor_behind_a_view(subject, name):
    inputs, douts = subject.make(ROWS, subject.size, torch.float32)
    order, number = list(reversed(range(inputs[name].ndim))), list(inputs).index(name)
    inputs[name] = inputs[name].permute(order).contiguous()

    def of_a_view(function):
        def call(*given):
            return function(*(t.permute(order) if i == number else t for i, t in enumerate(given)))

        return call

    match_float64(replace(subject.called_as(of_a_view), split=None), inputs, douts)


@contract("of", lambda subject: subject.far, gib=FAR_GIB)
def rows_beyond_int32(subject, case):
    name, dim = case
    if HAS_GPU and name in subject.multiplied:
        raise NotTried("cuBLAS reads it, and ends the process at such strides")
    inputs, douts = subject.make(subject.far_rows, subject.far_size or subject.size, torch.bfloat16)
    expected = parts_of(subject, copies(inputs), copies(douts))
    tensors = inputs if name in inputs else douts
    key = name if name in inputs else name.removeprefix("d")
    with far_apart() as place:
        tensors[key] = place(tensors[key], dim)
        found = parts_of(subject, inputs, douts)
    # cuBLAS may choose another order of sums for such strides
    exact = subject.recorded and (subject.made_by_kernels_alone or not HAS_GPU)
    expect_same("beyond int32", found, expected, exact, FLOOR[torch.bfloat16])


# ---- The same numbers every time -----------------------------------------------------------------


@contract("dtype", lambda subject: (torch.float32, torch.bfloat16))
def every_run_gives_the_same_bits(subject, dtype):
    rows = (17, 300) if HAS_GPU else (5,)
    first, *others = (parts_of(subject, *subject.make(rows, subject.size, dtype)) for _ in range(3))
    for other in others:
        expect_same("a later run", other, first, True)
