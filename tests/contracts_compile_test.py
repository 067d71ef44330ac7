"""Every function inside of torch.compile: in one graph, in memory that the compiler lays out,
without new compilations.

Without a GPU Inductor compiles the larger graph alone, and calls C++'s compiler for it.  The other
contracts ask what is traced, in which "aot_eager" is like Inductor and costs a tenth.

A Function with other settings is traced once for each contract.  How sizes and dimensions become
symbols is asked of the Function's first subject.

The first size of each graph has rows that the compiler pads.  It leaves gaps only between long rows
whose length it knows.  So a compiled graph shows strides that eager PyTorch never does.
"""

import contextlib
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from harness.benchmark.checking import FLOOR, assert_all_passed, relative_error
from harness.cli.device import DEVICE, HAS_GPU
from judging.layouts import layouts_of
from subjects.subject import (
    Subject,
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
from tests.fixtures import COMPILED_DTYPE, compiled_once

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("compiler_pads_rows"),
]


def compiled(subject: Subject, backend="inductor" if HAS_GPU else "aot_eager", **options):
    return torch.compile(subject.function, fullgraph=True, backend=backend, **options)


def always(subject, case=None):
    return True


def in_a_larger_graph(subject: Subject, activations: tuple[str, ...] | None = None) -> Subject:
    """The subject between matrix products: a function of what its inputs are products of, and of
    the others.

    activations: the inputs that are products, and so neither inputs nor results of the graph; the
    subject's own unless told.
    """
    activations = subject.activations if activations is None else activations
    K = 61  # no other size, and more than rows: the compiler compares them

    def make(rows, size, dtype, seed=0):
        inputs, douts = subject.make(rows, size, dtype, seed)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator).to(DEVICE, dtype)

        given = {"left": normal(*rows, K)} if activations else {}
        for name, t in inputs.items():
            if name in activations:
                given[f"to_{name}"] = normal(K, t.shape[-1]) / K**0.5
            else:
                given[name] = t
        gradients = {}
        for name, dout in douts.items():
            if dout.ndim > len(rows):  # else a loss, of each row or of all
                given[f"from_{name}"] = normal(dout.shape[-1], 8) / dout.shape[-1] ** 0.5
                dout = normal(*dout.shape[:-1], 8)
            gradients[name] = dout
        return given, gradients

    names = list(subject.make((1,), subject.size, torch.float32)[0])
    outputs = list(subject.make((1,), subject.size, torch.float32)[1])

    def graph(function):
        def call(*tensors):
            given = dict(zip(places, tensors))
            inputs = []
            for name in names:
                if name in activations:
                    t = given["left"] @ given[f"to_{name}"]
                    inputs.append(t if name in subject.differentiable else t.detach())
                else:
                    inputs.append(given[name] * 1.0 if name in subject.results else given[name])
            results = zip(outputs, as_tuple(function(*inputs)))
            return tuple(
                out @ given[f"from_{name}"] if f"from_{name}" in given else out * 0.5
                for name, out in results
            )

        return call

    places = list(make((1,), subject.size, torch.float32)[0])
    constants = [name for name in names if name not in subject.differentiable]
    leaves = tuple(
        place
        for place in places
        if place not in constants and place.removeprefix("to_") not in constants
    )
    return replace(subject.called_as(graph), make=make, differentiable=leaves, split=None)


def graph_of(subject: Subject) -> Subject:
    return (subject.in_a_graph or in_a_larger_graph)(subject)


def orders_of_sizes(subject):
    """(dynamic, the number of the size that is compiled first: without a GPU the padded one)."""
    if subject.other_settings:
        return [(True, 0)]
    return itertools.product((True, None), range(len(subject.compiled_first) if HAS_GPU else 1))


def sizes_of(subject, first=0):
    """(rows, size) of one graph after another."""
    rows, size = subject.compiled_first[first]
    return [(rows, size), *((rows, other or size) for rows, other in subject.compiled_next)]


@contract(
    "case",
    orders_of_sizes,
    exhaustive=lambda subject, case: case != (True, 0),
)
def test_larger_graph(subject, case):
    dynamic, first = case
    graph = graph_of(subject)
    function = compiled(graph, "inductor", dynamic=dynamic)
    # without a word about dynamic sizes, the second size makes them dynamic; without a GPU that is
    # asked of what is traced alone, in the next contract
    n_sizes = None if dynamic else 2 if HAS_GPU else 1
    sizes = sizes_of(subject, first)[:n_sizes]
    for number, (rows, size) in enumerate(sizes):
        # what was compiled for any size must do for the others
        with compiled_once() if dynamic and number > 0 else contextlib.nullcontext():
            found = checks(graph, *graph.make(rows, size, COMPILED_DTYPE), ours=function)
        assert_all_passed(found)


@contract(exhaustive=always)
def test_other_numbers_of_rows_compile_at_most_once_more(subject):
    """Without a word about dynamic sizes."""
    graph = graph_of(subject)
    function = compiled(graph)
    (first, *rest), size = sizes_of(subject)[0]
    # at least 8: some versions of PyTorch compile apart for the few rows below
    for number, n_rows in enumerate((first + 8, first + 9, first + 15)):
        with compiled_once() if number > 1 else contextlib.nullcontext():
            found = checks(graph, *graph.make((n_rows, *rest), size, COMPILED_DTYPE), ours=function)
        assert_all_passed(found)


@contract(exhaustive=always)
def test_inputs_of_the_graph_before_a_product(subject):
    """Eager in-place functions refuse to overwrite such leaves.  Inductor decides for itself."""
    backend = ["inductor"] if subject.entry else []
    graph = in_a_larger_graph(subject, activations=())
    rows, size = sizes_of(subject)[0]
    inputs, douts = graph.make(rows, size, COMPILED_DTYPE)
    before = {name: t.clone() for name, t in inputs.items()}
    assert_all_passed(checks(graph, inputs, douts, ours=compiled(graph, *backend)))
    assert same_bits(inputs, before)


@contract(exhaustive=always)
def test_forward_alone(subject):
    graph = graph_of(subject)
    rows, size = sizes_of(subject)[0]
    inputs, douts = graph.make(rows, size, COMPILED_DTYPE)

    def outputs(function, tensors):
        with torch.no_grad():
            return dict(zip(douts, as_tuple(function(*tensors.values()))))

    found, wide = outputs(compiled(graph), inputs), outputs(graph.reference, in_float64(inputs))
    eager = outputs(graph.eager or graph.reference, inputs)
    assert_all_passed(compare_parts(graph, found, inputs, wide, [eager]))


def assert_like_eager(subject, ours, inputs, douts, needed=None):
    """To the bit; within one rounding for a subject that compiled code computes otherwise."""
    found, expected = (run(subject, f, inputs, douts, needed) for f in (ours, subject.function))
    if same_bits(found, expected):
        return
    assert not subject.exact_compiled
    for part, t in found.items():
        error = relative_error(t, expected[part])
        assert error <= max(FLOOR[t.dtype], torch.finfo(t.dtype).eps), f"{part}: {error:.1e}"


@contract(exhaustive=always)
def test_eagers_bits(subject, monkeypatch):
    """The function alone: all its inputs are leaves, some of them frozen.

    Sizes that are no symbols are the next contract's.
    """
    tiles.small_tiles(monkeypatch)
    ours = compiled(subject, dynamic=True)
    inputs, douts = subject.make((2, 5), subject.size, torch.bfloat16)
    for needed in (subject.differentiable, subject.differentiable[:1]):
        assert_like_eager(subject, ours, inputs, douts, needed)
    assert_like_eager(subject, ours, *subject.make((2, 3), subject.size, torch.bfloat16))


@contract(
    "rows",
    lambda subject: ((2, 1, 3),) if subject.other_settings else ((0,), (), (2, 1, 3)),
    exhaustive=always,
)
def test_any_number_of_dimensions(subject, rows, monkeypatch):
    tiles.small_tiles(monkeypatch)
    inputs, douts = subject.make(rows, subject.size, torch.float32)
    if len(rows) > 2:
        inputs = {
            name: t.transpose(0, 1).contiguous().transpose(0, 1) if t.ndim > 1 else t
            for name, t in inputs.items()
        }
    assert_like_eager(subject, compiled(subject), inputs, douts)


@contract(exhaustive=always)
def test_sum_sends_a_gradient_of_stride_zero(subject):
    def total_of(function):
        return lambda *inputs: sum(t.sum() for t in as_tuple(function(*inputs)))

    inputs, douts = subject.make((3, 4), subject.size, torch.float32)
    douts = {name: torch.ones_like(dout) for name, dout in douts.items()}
    leaves = leaves_of(subject, inputs)
    compiled(subject.called_as(total_of))(*leaves.values()).backward()
    found = dict(zip(douts, as_tuple(subject.function(*inputs.values()))))
    found |= {f"d{name}": leaves[name].grad for name in subject.differentiable}
    assert_all_passed(compare_parts(subject, found, inputs, *references(subject, inputs, douts)))


@contract()
def test_bad_input_is_refused_with_the_same_sentence(subject):
    bad = subject.bad_input()[subject.bad_when_compiled]
    names = subject.make((1,), subject.size, torch.float32)[0]
    leaves = leaves_of(subject, dict(zip(names, bad.inputs)))
    with pytest.raises(Exception, match=bad.sentence):
        compiled(subject, "aot_eager")(*leaves.values())


@contract()
def test_forward_mode_is_refused(subject):
    inputs, _ = subject.make((2,), subject.size, torch.float32)
    name = subject.differentiable[0]

    def jvp(x):
        def function(x):
            return subject.function(*(inputs | {name: x}).values())

        return torch.func.jvp(function, (x,), (x,))[1]

    with pytest.raises(Exception, match="no forward-mode derivative"):
        torch.compile(jvp, fullgraph=True, backend="eager")(inputs[name])


class OperatorCalls(TorchDispatchMode):
    """Keeps the calls of the kernels' operators: the project's, or those of a planted fault."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace in ("tutorial", "mutant"):
            detached = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}))
            self.calls.append((operator, *detached))
        return operator(*args, **(kwargs or {}))


def rows_and_layouts(subject):
    layouts = "contiguous", "gaps and an odd offset", "every second column", "columns outermost"
    if subject.other_settings:
        return [((2, 3), layout) for layout in layouts[:2]]
    layouts += "dimensions 0 and 1 exchanged", "dimension 0 repeated (stride 0)"
    return [((), "contiguous"), ((0,), "contiguous"), *(((2, 3), layout) for layout in layouts)]


@contract("case", rows_and_layouts, exhaustive=always)
def test_operators_promise_what_they_return(subject, case, monkeypatch):
    """All tensors are laid out so.  Compiled code calls operators, and believes what they say."""
    tiles.small_tiles(monkeypatch)
    rows, layout = case
    tensors = [
        {n: layouts_of(t.ndim)[layout].place(t) if layout in layouts_of(t.ndim) else t
         for n, t in named.items()}
        for named in subject.make(rows, subject.size, torch.bfloat16)
    ]  # fmt: skip
    compiling = mock.patch.object(torch.compiler, "is_compiling", return_value=True)
    with compiling, OperatorCalls() as found:
        for needed in {subject.differentiable, subject.differentiable[:1]}:
            run(subject, subject.function, *tensors, needed)
    assert found.calls or not subject.made_by_kernels_alone
    promises = "test_schema", "test_faketensor"  # the others trace, as other contracts do
    for operator, args, kwargs in found.calls:
        kept = torch.library.opcheck(
            operator, args, kwargs, test_utils=promises, raise_exception=False
        )
        assert kept == dict.fromkeys(promises, "SUCCESS"), (operator, kept)
