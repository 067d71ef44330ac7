"""The page docs/backward.md: the faults of its table, and what a backward can do about a second
derivative.

tests/readme_test.py runs the page's blocks as one file, tests/add_a_kernel_page_test.py every
contract on the kernel that its first two blocks make.
"""

import importlib.util
import itertools
import re
import sys

import pytest
import torch
from torch.autograd.function import once_differentiable

from harness.cli.device import DEVICE
from tests.readme_test import TEXTS, blocks

PAGE = TEXTS["docs/backward.md"]
KERNEL, OPERATORS, CHECK = blocks(PAGE, "python")
FAULTS = re.findall(r"^\| `(.+)` \| `(.+)` \| (\w+) \| (\w+) \|$", PAGE, re.MULTILINE)
assert FAULTS, "the page's table has another form"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """load(*blocks): these blocks as a module.  Triton reads a kernel's source from a file."""
    numbers = itertools.count()

    def load_module(*parts: str):
        file = tmp_path / f"page_{next(numbers)}.py"
        file.write_text("\n".join(parts).replace('"tutorial::', f'"{file.stem}::'))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, file.stem, module)  # torch.compile looks there
        spec.loader.exec_module(module)
        return module

    return load_module


@pytest.fixture
def page(load):
    return load(KERNEL)


def leaves(dtype=torch.float32) -> list[torch.Tensor]:
    """Return x (4, 5) and bias (5,)."""
    values = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((4, 5), (5,)))
    return [t.requires_grad_() for t in values]


# ---- The table of faults -------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_caught_or_missed_as_the_table_says(load, fault):
    code, replacement, *said = fault
    assert KERNEL.count(code) == 1
    module = load(KERNEL.replace(code, replacement), CHECK.partition("compiled =")[0])
    found = [module.is_right(*inputs) for inputs in (module.weak, module.strong)]
    assert ["missed" if right else "caught" for right in found] == said


# ---- A second derivative, and an operator --------------------------------------------------------


def penalty(function, x, bias) -> torch.Tensor:
    """Return the gradient of a loss that has a gradient in it."""
    y = function(x, bias)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return torch.autograd.grad(dx.square().sum() + y.sum(), x)[0]


def with_backward(page, backward):
    functions = {
        "forward": staticmethod(page.BiasGELUFunction.forward),
        "backward": staticmethod(backward),
    }
    return type("Function", (torch.autograd.Function,), functions).apply


def test_a_gradient_penalty_vanishes_unless_it_is_refused_or_supported(page):
    x, bias = leaves()
    right = penalty(page.bias_gelu_reference, x, bias)
    (without,) = torch.autograd.grad(page.bias_gelu_reference(x, bias).sum(), x)

    def launch(ctx, dy):
        return page.bias_gelu_backward(dy, *ctx.saved_tensors, ctx.needs_input_grad[1])

    def supported(ctx, dy):
        if not torch.is_grad_enabled():
            return launch(ctx, dy)
        y = page.bias_gelu_reference(*ctx.saved_tensors)
        return torch.autograd.grad(y, ctx.saved_tensors, dy, create_graph=True)

    for backward in (launch, once_differentiable(launch)):
        torch.testing.assert_close(penalty(with_backward(page, backward), x, bias), without)
    torch.testing.assert_close(penalty(with_backward(page, supported), x, bias), right)
    assert not torch.allclose(right, without)
    with pytest.raises(RuntimeError, match="no second derivative"):
        penalty(page.BiasGELUFunction.apply, x, bias)


def test_eager_code_goes_around_the_operator(load, monkeypatch):
    module = load(KERNEL, OPERATORS)
    x, bias = leaves()
    expected = module.bias_gelu_forward.operator(x, bias)
    calls = []
    monkeypatch.setattr(module.bias_gelu_forward.operator, "_opoverload", calls.append)
    assert torch.equal(module.bias_gelu_forward(x, bias), expected) and not calls
