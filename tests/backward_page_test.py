"""The page docs/backward.md: the faults of its table, and what it says of PyTorch and Triton.

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
from torch.autograd.gradcheck import GradcheckError

from harness.benchmark.checking import DEVICE
from kernel_support import INTERPRETED, tl, triton
from tests.readme_test import TEXTS, blocks

PAGE = TEXTS["docs/backward.md"]
KERNEL, OPERATORS, CHECK = blocks(PAGE, "python")
FAULTS = re.findall(r"^\| `(.+)` \| `(.+)` \| (\w+) \| (\w+) \|$", PAGE, re.MULTILINE)
MODIFIED = "modified by an inplace operation"
only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="of Triton's interpreter")


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


def test_the_table_has_faults_that_only_the_strong_inputs_catch():
    assert len(FAULTS) == 5
    assert [said for *_, said in FAULTS] == ["caught"] * 5
    assert [said for *_, said, _ in FAULTS].count("missed") == 4


# ---- What autograd sends, and what it notices ----------------------------------------------------


class Saved(torch.autograd.Function):
    """The square of x, kept as autograd has it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * x * dy


class Attribute(torch.autograd.Function):
    """The square of x, kept as an attribute."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * ctx.x * dy


class Overwriting(Saved):
    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        write_unseen(x.detach(), 2 * x * dy)
        return x.detach()


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, BLOCK_SIZE: tl.constexpr):
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n
    tl.store(y_ptr + cols, tl.load(x_ptr + cols, mask=mask), mask=mask)


def write_unseen(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write over a contiguous target by a kernel, of which autograd knows nothing."""
    _copy_kernel[(1,)](values.contiguous(), target, target.numel(), BLOCK_SIZE=64)


def result(value: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a leaf, and a result that is equal to the leaf."""
    leaf = torch.full((2, 3), value, device=DEVICE, requires_grad=True)
    return leaf, leaf * 1


def test_sum_sends_a_gradient_of_strides_zero_and_two_losses_send_one_gradient(page, monkeypatch):
    seen = []
    backward = page.bias_gelu_backward
    monkeypatch.setattr(page, "bias_gelu_backward", lambda *a: seen.append(a) or backward(*a))
    x, bias = leaves()
    y = page.BiasGELUFunction.apply(x, bias)
    y.sum().backward(retain_graph=True)
    assert [dy.stride() for dy, *_ in seen] == [(0, 0)]
    (y.sum() + (3 * y).sum()).backward()
    assert len(seen) == 2 and torch.equal(seen[1][0], torch.full_like(y, 4.0))


def test_the_gradient_of_a_frozen_bias_is_not_computed(page):
    x, bias = leaves()
    _, dbias = page.bias_gelu_backward(torch.ones_like(x), x, bias, need_dbias=False)
    y = page.BiasGELUFunction.apply(x, bias.detach())
    y.sum().backward()
    assert dbias is None and x.grad is not None


def test_a_changed_input_is_noticed_where_it_was_saved_and_not_where_it_is_an_attribute():
    leaf, x = result()
    y = Attribute.apply(x)
    x.mul_(5)
    y.sum().backward()
    assert (leaf.grad == 30).all()  # and 6 is right
    leaf, x = result()
    y = Saved.apply(x)
    x.mul_(5)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()


@pytest.mark.parametrize("function, kept", [(Saved, False), (Attribute, True)])
def test_what_is_saved_is_freed_by_the_backward(function, kept):
    _, x = result()
    y = function.apply(x)
    memory = x.untyped_storage()._weak_ref()
    del x
    y.sum().backward()
    assert torch.UntypedStorage._expired(memory) is not kept


def test_a_backward_that_overwrites_gives_nonsense_when_it_runs_again():
    leaf, x = result()
    y = Overwriting.apply(x)
    first, second = (torch.autograd.grad(y.sum(), leaf, retain_graph=True)[0] for _ in range(2))
    assert (first == 6).all() and not (second == 6).all()


def test_autograd_does_not_see_what_a_kernel_writes_unless_it_is_told():
    leaf, x = result()
    y = Saved.apply(x)
    write_unseen(x, -x.detach())
    assert x._version == 0
    y.sum().backward(retain_graph=True)
    assert (leaf.grad == -6).all()
    torch.autograd.graph.increment_version(x)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()


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


# ---- What torch.compile sees ---------------------------------------------------------------------


def compiled(function, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@only_interpreted
@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")
def test_torch_compile_cannot_trace_into_the_interpreter(page):
    with pytest.raises(Exception, match=r"Dynamo|torch\.compile") as refused:
        compiled(page.BiasGELUFunction.apply)(*leaves())
    assert "_launch" in str(refused.value)


def test_eager_code_goes_around_the_operator(load, monkeypatch):
    module = load(KERNEL, OPERATORS)
    x, bias = leaves()
    expected = module.bias_gelu_forward.operator(x, bias)
    calls = []
    monkeypatch.setattr(module.bias_gelu_forward.operator, "_opoverload", calls.append)
    assert torch.equal(module.bias_gelu_forward(x, bias), expected) and not calls


def operator(name, function, fake=None, **options):
    made = torch.library.custom_op(f"backward_page::{name}", function, **options)
    if fake is not None:
        made.register_fake(fake)
    return made


def test_an_operator_without_a_fake_is_refused():
    made = operator("no_fake", torch.neg, mutates_args=(), schema="(Tensor x) -> Tensor")
    with pytest.raises(Exception, match="no fake impl"):
        compiled(lambda x: made(x))(torch.ones(3))


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_compiled_code_leaves_out_what_does_not_say_that_it_writes(backend):
    found = {}
    for mutates in ((), ("x",)):
        name = f"negate_{len(mutates)}_{backend}"
        schema = f"(Tensor{'(a!)' if mutates else ''} x) -> ()"
        write = lambda x: write_unseen(x, -x)  # noqa: E731
        made = operator(name, write, lambda x: None, mutates_args=mutates, schema=schema)

        def negate(x, made=made):
            x = x * 1
            made(x)
            return x

        x = torch.ones(3, device=DEVICE)
        found[mutates] = [function(x).tolist() for function in (negate, compiled(negate, backend))]
    assert found == {(): [[-1.0] * 3, [1.0] * 3], ("x",): [[-1.0] * 3] * 2}


def test_custom_op_refuses_an_argument_as_result_and_an_annotation_of_none():
    same = operator("same", lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor")
    with pytest.raises(RuntimeError, match="may not alias any inputs"):
        same(torch.ones(3))

    def nothing(x: torch.Tensor) -> torch.Tensor | None:
        return None

    with pytest.raises(ValueError, match="unsupported type"):
        operator("nothing", nothing, mutates_args=())


@only_interpreted
def test_a_triton_op_runs_in_the_interpreter_and_cannot_be_compiled():
    @torch.library.triton_op("backward_page::copy", mutates_args=())
    def copy(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        torch.library.wrap_triton(_copy_kernel)[(1,)](x, y, x.numel(), BLOCK_SIZE=64)
        return y

    x = torch.randn(3)
    assert torch.equal(copy(x), x)
    with pytest.raises(Exception, match=r"Cannot access data pointer"):
        compiled(lambda x: copy(x))(x)


# ---- What gradcheck can check --------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Input .* requires gradient:UserWarning")
def test_gradcheck_cannot_check_the_kernel(page):
    apply, gradcheck = page.BiasGELUFunction.apply, torch.autograd.gradcheck
    with pytest.raises(TypeError, match=r"x is torch.float64, expected"):
        gradcheck(apply, leaves(torch.float64))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(GradcheckError, match="Jacobian mismatch"):
            gradcheck(apply, leaves(dtype))
    x, bias = leaves(torch.bfloat16)
    x = 1 + x.abs()
    assert torch.equal(apply(x + 1e-6, bias), apply(x, bias))


@pytest.mark.parametrize("sign", [1, -1])
def test_gradcheck_checks_the_formulas_in_float64(sign):
    class Formulas(Saved):
        @staticmethod
        def forward(ctx, x, bias):
            ctx.save_for_backward(x, bias)
            return torch.nn.functional.gelu(x + bias)

        @staticmethod
        def backward(ctx, dy):
            h = sum(ctx.saved_tensors)
            normal = torch.distributions.Normal(0.0, 1.0)
            dh = dy * (normal.cdf(h) + sign * h * normal.log_prob(h).exp())
            return dh, dh.sum(0)

    inputs = leaves(torch.float64)
    assert torch.autograd.gradcheck(Formulas.apply, inputs, raise_exception=False) == (sign == 1)
