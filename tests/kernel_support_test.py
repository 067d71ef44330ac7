"""What every lesson takes from kernel_support.py: checks, rows, refusals, operators."""

from functools import partial

import numpy as np
import pytest
import torch

import kernel_support
from cross_entropy_kernel import TritonCrossEntropyLoss
from harness.cli.device import DEVICE
from kernel_support import (
    FLOATS,
    FP32,
    as_rows,
    check_tensors,
    operator,
    output_like,
    refuse_second_derivative,
    refuse_to_overwrite,
)
from next_steps.layers.split_cross_entropy import TritonSplitCrossEntropyLoss
from next_steps.lessons.linear_cross_entropy_kernel import TritonLinearCrossEntropyLoss
from next_steps.lessons.reverse_kl_kernel import TritonReverseKLLoss
from rmsnorm_kernel import TritonRMSNorm

X = torch.ones(2, 3, 8, device=DEVICE)
ROW = torch.ones(8, device=DEVICE)


def check(x=X, weight=ROW, stats=None):
    return check_tensors(
        ("x", x, FLOATS, ("...", "H")),
        ("weight?", weight, FLOATS, ("H",)),
        ("stats?", stats, FP32, ("n_rows", 2)),
    )


def test_words_of_the_shapes_get_their_lengths():
    assert check() == {"...": (2, 3), "n_rows": 6, "H": 8}
    assert check(ROW, None) == {"...": (), "n_rows": 1, "H": 8}
    assert check(stats=X.new_ones(6, 2))["n_rows"] == 6
    assert check(X[:, :0], None)["n_rows"] == 0


REFUSED = {
    "x is None": ((None,), TypeError, "x is a NoneType, expected a tensor: wrap it"),
    "weight is a list": ((X, [1.0]), TypeError, "weight is a list, expected a tensor"),
    "an integer": ((X.long(),), TypeError, "x is torch.int64, expected torch.float16 or"),
    "another dtype than asked": (
        (X, ROW, X.new_ones(6, 2).double()),
        TypeError,
        "stats is torch.float64, expected torch.float32: convert it",
    ),
    "sparse": ((X.to_sparse(),), TypeError, "x is torch.sparse_coo, expected torch.strided"),
    "negated": ((X, torch._neg_view(ROW)), TypeError, "weight holds its numbers negated"),
    "no memory": ((X.to("meta"),), ValueError, "x is on meta, expected a GPU: move it"),
    "elsewhere": (
        (X, ROW.to("meta")),
        ValueError,
        f"weight is on meta, expected x's {DEVICE}",
    ),
    "another length": (
        (X, ROW[:7]),
        ValueError,
        r"weight has shape \(7,\), expected \(8,\): reshape it",
    ),
    "more dimensions": ((X, X), ValueError, r"weight has shape \(2, 3, 8\), expected \(8,\)"),
    "too few dimensions": ((X[0, 0, 0],), ValueError, r"x has shape \(\), expected \(..., H\)"),
    "another number of rows": (
        (X, ROW, X.new_ones(5, 2)),
        ValueError,
        r"stats has shape \(5, 2\), expected \(6, 2\)",
    ),
    "another number": (
        (X, ROW, X.new_ones(6, 3)),
        ValueError,
        r"stats has shape \(6, 3\), expected \(6, 2\)",
    ),
}


@pytest.mark.parametrize("given, error, sentence", REFUSED.values(), ids=list(REFUSED))
def test_tensors_that_a_kernel_cannot_take_are_refused(given, error, sentence):
    with pytest.raises(error, match=sentence):
        check(*given)


def test_other_shapes_are_refused_after_right_ones_of_the_same_call():
    """Lengths are kept from call to call: they must not be those of another call."""
    check()
    with pytest.raises(ValueError, match=r"weight has shape \(7,\), expected \(8,\)"):
        check(X, ROW[:7])
    assert check(X[..., :7], ROW[:7])["H"] == 7


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(kernel_support, "INTERPRETED", False)
    with pytest.raises(ValueError, match="x is on cpu, expected a GPU: move it, or export"):
        check(X.cpu(), ROW.cpu())


def test_a_wrapper_is_refused(as_dtensor):
    with pytest.raises(TypeError, match=r"weight is a DTensor.*: pass its to_local\(\)"):
        check(X, as_dtensor(ROW))


LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 3, 8),
    "gaps between rows": lambda: torch.randn(2, 3, 10)[..., :8],
    "every second column": lambda: torch.randn(2, 3, 16)[..., ::2],
    "no view as rows": lambda: torch.randn(3, 2, 8).transpose(0, 1),
    "transposed": lambda: torch.randn(8, 6).t(),
    "one row": lambda: torch.randn(8),
    "no row": lambda: torch.randn(0, 8),
    "no column": lambda: torch.randn(3, 0),
    "a number": lambda: torch.randn(()),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=list(LAYOUTS))
def test_rows_have_adjacent_columns(make):
    t = make()
    rows, stride = as_rows(t)
    n_cols = t.shape[-1] if t.ndim else 1
    n_rows = t.numel() // max(n_cols, 1)
    found = rows.as_strided((n_rows, n_cols), (stride, 1))
    assert torch.equal(found, t.reshape(n_rows, n_cols))
    assert rows is t or rows.data_ptr() == t.data_ptr() or not t.is_contiguous()


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "a number"])
def test_an_output_has_adjacent_columns_and_its_inputs_order_of_dimensions(name):
    t = LAYOUTS[name]()
    out = output_like(t)
    assert out.shape == t.shape and out.dtype == t.dtype
    assert out.stride(-1) == 1
    in_order = torch.empty_like(t).stride()
    assert out.stride() == (in_order if in_order[-1] == 1 else torch.empty(t.shape).stride())


def test_only_contiguous_results_with_memory_of_their_own_are_overwritten():
    leaf = torch.ones(4, 4, requires_grad=True)
    result = leaf * 2
    refuse_to_overwrite(a=result, b=leaf * 3, c=torch.ones(4, 4))
    refuse_to_overwrite(a=result[:2], b=result[2:])
    for refused in (
        {"a": leaf},
        {"a": leaf.view(16)},
        {"a": result.t()},
        {"a": result, "b": result},
        {"a": result[:3], "b": result[2:]},
    ):
        with pytest.raises(ValueError, match="expected a contiguous result of its own"):
            refuse_to_overwrite(**refused)


def test_a_second_derivative_is_refused_only_where_one_is_asked_for():
    with torch.no_grad():
        refuse_second_derivative("RMSNorm")
    with pytest.raises(RuntimeError, match="RMSNorm has no second derivative, which create_graph"):
        refuse_second_derivative("RMSNorm")


def results(x, need=True):
    return x.new_empty(x.shape), x.new_empty(()) if need else None


@operator(
    "support_test::double",
    "(Tensor x, bool need=True) -> Tensor[]",
    results,
    present=lambda x, need=True: (True, need),
)
def double(x, need=True):
    return x * 2, x.sum() if need else None


@pytest.mark.parametrize("need", [(), (False,)])
def test_an_operator_gives_the_launchers_results_also_when_compiled(need):
    x = torch.arange(6.0).view(2, 3)
    compiled = torch.compile(lambda x: double(x + 1, *need), backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(x), double(x + 1, *need), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)


@operator(
    "support_test::power",
    "(Tensor x, float factor, int n=1) -> Tensor",
    lambda x, factor, n=1: torch.empty_like(x),
)
def power(x, factor, n=1):
    assert (type(factor), type(n)) == (float, int)
    return factor * x**n


@pytest.mark.parametrize("whole", [np.int32, np.int64, torch.tensor])
@pytest.mark.parametrize("real", [np.float32, np.float64, torch.tensor])
def test_an_operator_takes_numbers_of_numpy_and_tensors(real, whole):
    for result in (power(X, real(3.0), whole(2)), power(X, factor=real(3.0), n=whole(2))):
        assert (result == 3).all()
    for bad in (2.5, np.float32(2), True, None, "2"):
        with pytest.raises(TypeError, match=r"n is .*, expected a whole number: convert"):
            power(X, 3, n=bad)


ROWS, TARGETS = (X[0],), torch.tensor([1, 3, 2], device=DEVICE)
MODULES = {
    TritonRMSNorm: ({"eps": 3}, ROWS),
    TritonCrossEntropyLoss: ({"ignore_index": 3}, (*ROWS, TARGETS)),
    TritonSplitCrossEntropyLoss: ({"first_column": 0, "ignore_index": 3}, (*ROWS, TARGETS)),
    TritonLinearCrossEntropyLoss: ({"ignore_index": 3, "chunk_size": 2}, (*X, TARGETS)),
    TritonReverseKLLoss: ({"temperature": 3, "ignore_index": 3}, (X[0], X[0].cumsum(-1), TARGETS)),
}


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_modules_take_them_also_when_compiled(module, kind):
    numbers, inputs = MODULES[module]
    make = partial(module, 8, device=DEVICE) if module is TritonRMSNorm else module
    expected = make(**numbers)(*inputs)
    given = make(**{name: kind(value) for name, value in numbers.items()})
    for call in (given, torch.compile(given, backend="aot_eager", fullgraph=True)):
        assert torch.equal(call(*inputs), expected)


def test_an_operator_is_one_operation_of_the_graph():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    torch.compile(lambda x: double(x), backend=backend, fullgraph=True)(torch.ones(3))
    assert graphs[0].count("support_test.double") == 1 and " * 2" not in graphs[0]
