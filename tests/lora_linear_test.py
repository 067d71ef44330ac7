"""What is LoRA's alone: what stands for peft's modules and what does not, what is kept, and which
operations run.

What every function has to do is asked in tests/contracts_*_test.py, of lora_linear, and of
norm_lora and swiglu_lora, which are the fused layer's.  In a model: tests/apply_kernels_test.py.
"""

import itertools
from collections import Counter

import peft
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from harness.benchmark.checking import relative_error
from harness.cli.device import DEVICE
from judging.circumstances import saved_tensors
from next_steps.layers import lora_linear as lesson
from next_steps.layers.fused_layer import norm_linear, swiglu_linear
from next_steps.layers.lora_linear import (
    LoRALinearFunction,
    is_adapted,
    is_product,
    lora_linear,
    lora_linear_reference,
)
from rmsnorm_kernel import TritonRMSNorm
from subjects.lora_linear import make_lora
from tests.calls import PRODUCTS, Calls

H, WIDTHS = 24, {"q": 40, "k": 16, "v": 16}
N = 6
OURS = "LoRALinearFunctionBackward"


class Projections(torch.nn.Module):
    """Three that share an input."""

    def __init__(self, bias=False):
        super().__init__()
        for name, width in WIDTHS.items():
            setattr(self, name, torch.nn.Linear(H, width, bias=bias))

    def forward(self, x):
        return [getattr(self, name)(x) for name in WIDTHS]


def adapted(dtype=torch.float32, bias=False, targets=tuple(WIDTHS), **options) -> Projections:
    """peft's adapters on all three, with another scale than 1 and B that is not zero."""
    torch.manual_seed(0)
    options = {"r": 4, "lora_alpha": 6, "init_lora_weights": False} | options
    config = peft.LoraConfig(target_modules=list(targets), **options)
    return peft.inject_adapter_in_model(config, Projections(bias)).to(DEVICE, dtype)


def fits(layer: torch.nn.Module) -> bool:
    return is_adapted(layer, torch.float32)


def add_adapter(model: Projections, name: str) -> None:
    config = peft.LoraConfig(r=2, target_modules=list(WIDTHS), init_lora_weights=False)
    peft.inject_adapter_in_model(config, model, adapter_name=name)


def layers(model: Projections) -> list[torch.nn.Module]:
    return [getattr(model, name) for name in WIDTHS]


def make_x(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(2, N // 2, H, device=DEVICE).to(dtype).requires_grad_()


def run(function, x, model) -> dict[str, torch.Tensor]:
    """Results, and the gradients of x and of what is trained, for some gradient of the results."""
    outs = function(x)
    generator = torch.Generator().manual_seed(1)
    douts = [torch.randn(out.shape, generator=generator).to(out) for out in outs]
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(outs, [x, *trained.values()], douts)
    outs = {f"out {i}": out.detach() for i, out in enumerate(outs)}
    return outs | dict(zip(["x", *trained], gradients))


def as_ours(model: Projections):
    return lambda x: lora_linear(x, *layers(model))


def is_ours(outs) -> bool:
    return type(outs[0].grad_fn).__name__ == OURS


# ---- The numbers ---------------------------------------------------------------------------------


def test_reference_is_pefts_formula():
    model, x = adapted(), make_x()
    q = model.q
    of_one = q.base_layer.weight, q.lora_A["default"].weight, q.lora_B["default"].weight
    assert q.scaling["default"] == 1.5
    assert torch.equal(lora_linear_reference(x, *of_one, scale=1.5), q(x))


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("names", [("q",), ("k", "q"), ("v", "k", "q")], ids="+".join)
def test_any_number_of_projections(names, trained):
    model, x = adapted(rank_pattern={"v": 7}), make_x()
    chosen = [getattr(model, name) for name in names]
    for layer in chosen:
        layer.base_layer.requires_grad_(trained)
    assert is_ours(lora_linear(x, *chosen))
    only = torch.nn.ModuleList(chosen)
    expected = run(lambda x: [layer(x) for layer in chosen], x, only)
    found = run(lambda x: lora_linear(x, *chosen), x, only)
    assert all(relative_error(found[name], expected[name]) < 2e-6 for name in expected)


def test_a_sum_is_rounded_once():
    """In bf16, the forward is nearer to float64 than peft's, which rounds it three times."""
    model, x = adapted(torch.bfloat16), make_x(torch.bfloat16)
    wide = adapted().double()
    wide.load_state_dict(model.state_dict())
    ref64 = wide(x.double())
    outs = lora_linear(x, *layers(model))
    assert is_ours(outs)
    for ours, theirs, ref in zip(outs, model(x), ref64):
        assert relative_error(ours, ref) < relative_error(theirs, ref)


def test_gradients_of_unused_results_are_none():
    model, x = adapted(), make_x()
    lora_linear(x, *layers(model))[1].sum().backward()
    right, right_x = adapted(), x.detach().requires_grad_()
    right.k(right_x).sum().backward()
    assert relative_error(x.grad, right_x.grad) < 2e-6
    for (name, p), expected in zip(model.named_parameters(), right.parameters()):
        assert (p.grad is None) == (expected.grad is None), name
        assert p.grad is None or relative_error(p.grad, expected.grad) < 2e-6
    assert model.k.lora_A["default"].weight.grad is not None


# ---- A weight in another form --------------------------------------------------------------------


class Halved(torch.nn.Linear):
    """Keeps half its weight, and makes the whole of it when asked."""

    def __init__(self, base: torch.nn.Linear):
        super().__init__(base.in_features, base.out_features, bias=False, device=DEVICE)
        self.weight.requires_grad_(False).copy_(base.weight.detach() / 2)
        self.made = 0

    def dequantized(self):
        self.made += 1
        return 2 * self.weight

    def forward(self, x):
        return torch.nn.functional.linear(x, self.dequantized())


def test_quantized_weight_is_made_in_the_forward_and_in_the_backward_and_not_kept():
    model, x = adapted(), make_x()
    expected = run(model, x, model)
    for layer in layers(model):
        layer.base_layer = Halved(layer.base_layer)
    assert all(map(fits, layers(model)))
    with saved_tensors() as kept:
        outs = lora_linear(x, *layers(model))
    assert is_ours(outs) and [layer.base_layer.made for layer in layers(model)] == [1, 1, 1]
    assert not [t for t in kept if t.shape in [(width, H) for width in WIDTHS.values()]]
    found = run(as_ours(model), x, model)
    assert [layer.base_layer.made for layer in layers(model)] == [3, 3, 3]
    assert all(relative_error(found[name], expected[name]) < 2e-6 for name in expected)


def test_quantized_weight_without_an_adapter_is_taken_by_the_fused_layer():
    torch.manual_seed(0)
    norm = TritonRMSNorm(H, eps=1e-5).to(DEVICE)
    gate, up = (torch.nn.Linear(H, 40, bias=False, device=DEVICE) for _ in range(2))
    down = torch.nn.Linear(40, H, bias=False, device=DEVICE)
    x = make_x()

    def mlp(gate, up, down):
        residual, *both = norm_linear(x, norm, gate, up)
        out = residual + swiglu_linear(*both, down)
        return out, *torch.autograd.grad(out.square().sum(), [x, norm.weight])

    for layer in (gate, up, down):
        layer.requires_grad_(False)
    quantized = [Halved(layer) for layer in (gate, up, down)]
    assert all(is_product(layer, torch.float32) for layer in quantized)
    for found, expected in zip(mlp(*quantized), mlp(gate, up, down)):
        assert relative_error(found, expected) < 2e-6


# ---- What it does not stand for ------------------------------------------------------------------


class Doubled(peft.tuners.lora.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


MADE_SO = {
    "dropout": lambda: adapted(lora_dropout=0.5),
    "a bias in the adapter": lambda: adapted(lora_bias=True),
    "DoRA": lambda: adapted(use_dora=True),
    "an adapter on one of them alone": lambda: adapted(targets=["q"]),
}
CHANGED = {
    "merged": lambda model: [layer.merge() for layer in layers(model)],
    "disabled": lambda model: [layer.enable_adapters(False) for layer in layers(model)],
    "two adapters": lambda model: (
        add_adapter(model, "other"),
        [layer.set_adapter(["default", "other"]) for layer in layers(model)],
    ),
    "an adapter that others have": lambda model: (
        add_adapter(model, "other"),
        [layer.set_adapter(["other"]) for layer in layers(model)],
        model.q.delete_adapter("other"),
        model.q.set_adapter(["other"]),
    ),
    "a scale in a tensor": lambda model: model.q.scaling.update(default=torch.tensor(1.5)),
    "an adapter in another dtype": lambda model: model.q.lora_A.to(torch.bfloat16),
    "a subclass": lambda model: setattr(model.q, "__class__", Doubled),
    "a hook on the projection": lambda model: model.q.register_forward_hook(lambda *_: None),
    "a hook on A": lambda model: model.k.lora_A["default"].register_forward_hook(lambda *_: None),
    "a hook on the base layer": lambda model: model.v.base_layer.register_forward_pre_hook(
        lambda *_: None
    ),
}


def assert_steps_aside(model) -> None:
    x = make_x()
    assert not all(map(fits, layers(model)))
    torch.manual_seed(2)  # for a dropout
    found = lora_linear(x, *layers(model))
    torch.manual_seed(2)
    expected = model(x)
    assert all(map(torch.equal, found, expected)) and not is_ours(found)


@pytest.mark.parametrize("made", MADE_SO)
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_what_peft_makes_otherwise_runs_pefts_code(made):
    assert_steps_aside(MADE_SO[made]())


@pytest.mark.parametrize("change", CHANGED)
@pytest.mark.filterwarnings("ignore:Already:UserWarning")
def test_what_is_changed_later_runs_pefts_code(change):
    model = adapted()
    if change == "an adapter in another dtype":
        model.q.cast_input_dtype_enabled = True
        model.q.lora_B.to(torch.bfloat16)
    else:
        assert is_ours(lora_linear(make_x(), *layers(model)))
    CHANGED[change](model)
    assert_steps_aside(model)


def test_adapters_of_one_dtype_and_an_input_of_another_are_pefts():
    """A base layer that makes its weight in the dtype of its input would take both."""
    model = adapted()
    for layer in layers(model):
        layer.base_layer = Halved(layer.base_layer)
    assert is_product(model.q, torch.float32) and not is_product(model.q, torch.bfloat16)


def test_autocast_and_hooks_on_all_modules_are_pefts():
    model, x, called = adapted(), make_x(), []
    with torch.autocast(DEVICE, torch.bfloat16):
        found, expected = lora_linear(x, *layers(model)), model(x)
    assert all(map(torch.equal, found, expected)) and not is_ours(found)
    handle = register_module_forward_hook(lambda *_: called.append(1))
    try:
        assert not is_ours(lora_linear(x, *layers(model))) and called
    finally:
        handle.remove()
    assert is_ours(lora_linear(x, *layers(model)))


def test_merged_disabled_and_exchanged_adapters_come_back():
    model, x = adapted(), make_x()
    expected = lora_linear(x, *layers(model))

    def again():
        outs = lora_linear(x, *layers(model))
        assert is_ours(outs)
        return outs

    for layer in layers(model):
        layer.merge()
    assert not any(map(fits, layers(model)))
    for layer in layers(model):
        layer.unmerge()
    assert all(relative_error(*pair) < 1e-6 for pair in zip(again(), expected))
    add_adapter(model, "other")
    for layer in layers(model):
        layer.set_adapter("other")
    assert all(relative_error(*pair) > 1e-3 for pair in zip(again(), expected))
    assert all(relative_error(*pair) < 1e-6 for pair in zip(again(), model(x)))
    for layer in layers(model):
        layer.set_adapter("default")
        layer.enable_adapters(False)
    assert not any(map(fits, layers(model)))
    for layer in layers(model):
        layer.enable_adapters(True)
    assert all(relative_error(*pair) < 1e-6 for pair in zip(again(), expected))


# ---- What is kept, and what runs -----------------------------------------------------------------


FREE = {"t", "view", "_unsafe_view", "detach", "split", "empty_like", "new_empty", "empty"}
FREE |= {"alias", "split_with_sizes", "transpose", "ones_like", "expand"}


def of_a_step(function, x) -> Counter:
    """Operations that launch something, in a forward and a backward."""
    with Calls() as calls:
        outs = function(x)
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    return Counter({name: n for name, n in calls.counts.items() if name not in FREE})


def test_there_is_nothing_between_the_products():
    """But for laying the a's one below the other; peft scales and adds."""
    ours, theirs = (of_a_step(way(adapted()), make_x()) for way in (as_ours, lambda model: model))
    assert set(ours) == {*PRODUCTS, "cat"} - {"addmm"} and ours["cat"] == 1
    # forward: 3 with w, h, 3 with b; backward: 3 of dh, 3 of db, da, 3 with w, 1 of dx
    assert sum(ours[name] for name in PRODUCTS) == 7 + 11
    # scaled and added, forward and backward; and five sums of x's six gradients
    assert theirs["mul"] == 6 and theirs["add"] + theirs["add_"] == 3 + 5
    assert sum(theirs[name] for name in PRODUCTS) == 9 + 15


NEEDED = [choice for choice in itertools.product([True, False], repeat=4) if any(choice)]


@pytest.mark.parametrize("needed", NEEDED, ids=lambda c: "".join("01"[need] for need in c))
def test_no_product_whose_result_nobody_asked_for(needed):
    x, w, a, b, *_ = (t.detach() for t in make_lora((N,), (H, 40), torch.float32)[0].values())
    need_x, need_w, need_a, need_b = needed
    leaves = [t.requires_grad_(need) for t, need in zip((x, w, a, b), needed)]
    calls = of_a_step(lambda x: LoRALinearFunction.apply(x, (2.0,), (None,), *leaves[1:], None), x)
    # dx is two products; dh is needed for it and for da
    expected = 3 + 2 * need_x + need_w + need_a + need_b + (need_x or need_a)
    assert sum(calls[name] for name in PRODUCTS) == expected
    assert [leaf.grad is not None for leaf in leaves] == list(needed)


@pytest.mark.parametrize("needs", ["w", "a", "neither"])
def test_x_is_kept_for_the_gradients_of_w_and_a_alone(needs):
    model, x = adapted(), make_x()
    for layer in layers(model):
        layer.base_layer.requires_grad_(needs == "w")
        layer.lora_A.requires_grad_(needs == "a")
    with saved_tensors() as kept:
        outs = lora_linear(x, *layers(model))
    assert is_ours(outs)
    assert any(t is x for t in kept) == (needs != "neither")


def test_what_is_known_by_its_name_is_named_so():
    from harness.profiling.attribution import CATEGORY_OF_FUNCTION

    assert any(name in LoRALinearFunction.__name__ for name in CATEGORY_OF_FUNCTION)
    theirs = peft.tuners.lora.Linear
    assert (theirs.__module__, theirs.__name__) == lesson.PEFT
