"""What is the fused layer's alone: what it saves, which products it leaves out, what swiglu_linear
writes over.

What every function has to do is asked in tests/contracts_*_test.py, of norm_linear, swiglu_linear
and both together.
"""

import itertools
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from harness.benchmark.checking import assert_all_passed, relative_error
from harness.cli.device import DEVICE, HAS_GPU
from judging.circumstances import saved_tensors
from next_steps.layers import fused_layer
from next_steps.layers.fused_layer import (
    NormLinearFunction,
    norm_linear,
    norm_linear_reference,
    swiglu_linear,
    swiglu_linear_reference,
)
from subjects import SUBJECTS
from subjects import fused_layer as subjects
from subjects import lora_linear as lora_subjects
from subjects.fused_layer import apply_norm_linear as fused_norm
from subjects.fused_layer import norm_reference as reference_norm
from subjects.fused_layer import swiglu_linear_inplace
from subjects.subject import checks
from tests.calls import Calls
from tests.fixtures import needs_gpu

EPS = 1e-5
SIZES = (64, 256, 896) if HAS_GPU else (6, 24, 40)  # N, H, I
LARGE_SIZES = 8192, 4096, 14_336
NORM = SUBJECTS["norm_linear"]
SWIGLU = replace(SUBJECTS["swiglu_linear"], function=swiglu_linear_inplace)
pytestmark = pytest.mark.usefixtures("poison_new_tensors")

fused_mlp = subjects.layer(fused_norm, swiglu_linear_inplace)
reference_mlp = subjects.layer(reference_norm, swiglu_linear_reference)


def made(make):
    """The record's inputs and gradients of the outputs, as lists."""

    def of_sizes(dtype=torch.float32, sizes=SIZES):
        n_rows, *size = sizes
        return tuple(list(tensors.values()) for tensors in make((n_rows,), size, dtype))

    return of_sizes


make_norm_inputs = made(subjects.make_norm)
make_swiglu_inputs = made(subjects.make_swiglu)
make_mlp_inputs = made(subjects.make_layer)


def gradients(function, inputs, douts, needed=None, used=None):
    """Return the gradients of one forward and one backward.

    needed: which inputs need a gradient, all unless told; None stands for the others' gradient.
    used: which outputs something is computed from, all unless told.
    """
    needed, used = needed or [True] * len(inputs), used or [True] * len(douts)
    leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needed)]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    chosen = [i for i, out in enumerate(outputs) if used[i] and out.requires_grad]
    torch.autograd.backward([outputs[i] for i in chosen], [douts[i] for i in chosen])
    return [leaf.grad for leaf in leaves]


# ---- The numbers ---------------------------------------------------------------------------------


def test_references_are_the_layers_formulas():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    config = LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=2)
    norm, mlp = LlamaRMSNorm(24, EPS).to(DEVICE), LlamaMLP(config).to(DEVICE)
    (x, norm_weight, *_), _ = make_norm_inputs(sizes=(5, 24, 40))
    norm.weight.data.copy_(norm_weight)
    residual, gate, up = norm_linear_reference(
        x, norm.weight, EPS, mlp.gate_proj.weight, mlp.up_proj.weight
    )
    assert residual is x
    assert torch.equal(swiglu_linear_reference(gate, up, mlp.down_proj.weight), mlp(norm(x)))


def test_functions_take_the_layers_modules():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    inputs, _ = make_norm_inputs()
    norm = LlamaRMSNorm(SIZES[1], 1e-2).to(DEVICE)  # an eps that shows
    norm.weight.data.copy_(inputs[1])
    linears = [torch.nn.Linear(*w.shape[::-1], bias=False, device=DEVICE) for w in inputs[2:]]
    for linear, w in zip(linears, inputs[2:]):
        linear.weight.data.copy_(w)
    expected = fused_norm(*inputs, eps=1e-2)
    assert all(map(torch.equal, norm_linear(inputs[0], norm, *linears), expected))
    (gate, up, w_down), _ = make_swiglu_inputs()
    down = torch.nn.Linear(*w_down.shape[::-1], bias=False, device=DEVICE)
    down.weight.data.copy_(w_down)
    assert torch.equal(swiglu_linear(gate, up, down), swiglu_linear_inplace(gate, up, w_down))


def test_norm_without_a_weight():
    (x, _, w_gate, w_up), (dx, dgate, dup) = make_norm_inputs()
    inputs = {"x": x, "w_gate": w_gate, "w_up": w_up}
    without = NORM.called_as(lambda norm: lambda x, *weights: norm(x, None, *weights))
    douts = {"residual": dx, "gate": dgate, "up": dup}
    assert_all_passed(checks(replace(without, differentiable=tuple(inputs)), inputs, douts))


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_eps_is_used_where_it_shows(eps):
    inputs, douts = NORM.make((SIZES[0],), SIZES[1:], torch.float32)
    inputs["x"] *= 1e-3
    assert_all_passed(checks(NORM.called_as(lambda norm: partial(norm, eps=eps)), inputs, douts))


# ---- What is saved for the backward --------------------------------------------------------------


def test_swiglu_linear_saves_gate_and_up_and_its_weight():
    inputs, _ = make_swiglu_inputs()
    leaves = [t.requires_grad_() for t in inputs]
    with saved_tensors() as saved:
        swiglu_linear_inplace(*leaves)
    assert len(saved) == 3 and all(t is leaf for t, leaf in zip(saved, leaves))


# ---- The contract with autograd ------------------------------------------------------------------


def combinations(n):
    return [choice for choice in itertools.product([True, False], repeat=n) if any(choice)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("needed", combinations(4), ids=lambda c: "".join("10"[not n] for n in c))
def test_norm_linear_with_frozen_inputs(needed):
    """There is no matrix product whose result nobody asked for."""
    with Calls() as calls:
        gradients(fused_norm, *make_norm_inputs(), needed)
    assert calls.products == 2 + sum(needed[2:]) + 2 * any(needed[:2])


def counted_norms():
    wrapped = fused_layer.rmsnorm_forward
    return mock.patch.object(fused_layer, "rmsnorm_forward", wraps=wrapped)


def test_frozen_products_need_no_second_norm():
    inputs, douts = make_norm_inputs()
    with counted_norms() as forward:
        gradients(fused_norm, inputs, douts, needed=[True, True, False, False])
        assert forward.call_count == 1
        gradients(fused_norm, inputs, douts, needed=[True, True, False, True])
        assert forward.call_count == 3


UNUSED = [
    (used, needed)
    for used in combinations(3)
    for needed in [(True, True, True, True), (True, False, False, True), (False, True, True, False)]
    if needed[0] or any(used[1:])  # otherwise nothing that needs a gradient is used
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("used, needed", UNUSED, ids=lambda c: "".join("10"[not n] for n in c))
def test_outputs_that_nobody_uses(used, needed):
    """The gradient of such an output is None, and it is not filled up with zeros; that of its
    weight is None too.
    """
    inputs, douts = make_norm_inputs()
    found = gradients(fused_norm, inputs, douts, needed, used)
    expected = gradients(reference_norm, inputs, douts, needed, used)
    assert [grad is None for grad in found] == [grad is None for grad in expected]
    pairs = [pair for pair in zip(found, expected) if pair[0] is not None]
    assert all(relative_error(*pair) < 5e-6 for pair in pairs)


# ---- gate and up are overwritten: another use of them is never silently wrong --------------------


WITH_ADAPTER = lora_subjects.swiglu_lora_inplace, lora_subjects.make_lora_swiglu
WITHOUT = swiglu_linear_inplace, subjects.make_swiglu


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("function, make", [WITHOUT, WITH_ADAPTER], ids=["plain", "adapter"])
def test_backward_writes_over_gate_and_up_unless_the_graph_is_kept(function, make, retain_graph):
    (gate, up, *weights), (dout,) = made(make)()
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    mine = [t.clone() for t in leaves]
    function(*mine, *weights).backward(dout, retain_graph=retain_graph)
    assert all(torch.equal(t, leaf if retain_graph else leaf.grad) for t, leaf in zip(mine, leaves))


@pytest.mark.parametrize("which", [0, 1], ids=["gate", "up"])
def test_other_use_that_saved_gate_or_up_raises(which):
    (gate, up, w_down), (dout,) = make_swiglu_inputs()
    mine = [t.requires_grad_().clone() for t in (gate, up)]
    other = mine[which].square()  # autograd keeps what it is the square of
    out = swiglu_linear_inplace(*mine, w_down)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward([out, other], [dout, torch.ones_like(other)])
        other.sum().backward()


def test_second_use_is_right_if_it_needs_no_old_values():
    def twice(swiglu):
        def function(gate, up, w_down):
            gate, up = gate.clone(), up.clone()
            return swiglu(gate, up, w_down), gate + 2 * up

        return function

    inputs, douts = SWIGLU.make((SIZES[0],), SIZES[1:], torch.float32)
    douts["sum"] = torch.ones_like(inputs["gate"])
    assert_all_passed(checks(SWIGLU.called_as(twice), inputs, douts))


@pytest.mark.parametrize(
    "needed", [(False, False, True), (True, False, True), (False, True, False)], ids=str
)
def test_constants_are_not_overwritten(needed):
    """A gate that needs no gradient may be the caller's own."""
    inputs, douts = make_swiglu_inputs()
    before = [t.clone() for t in inputs]
    gradients(swiglu_linear_inplace, inputs, douts, needed)
    assert all(map(torch.equal, inputs, before))


# ---- Adapters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_frozen_weights_with_adapters_take_no_product_and_the_norm_runs_again(keep):
    inputs, douts = lora_subjects.make_lora_norm((SIZES[0],), SIZES[1:], torch.float32)
    needed = [name not in ("w_gate", "w_up") for name in inputs]
    step = list(inputs.values()), list(douts.values()), needed

    def ours(x, norm_weight, w_gate, a_gate, b_gate, w_up, bias_up):
        tensors = w_gate, a_gate, b_gate, None, w_up, None, None, bias_up
        scales = lora_subjects.SCALES[0], None
        return NormLinearFunction.apply(
            x, norm_weight, EPS, keep, True, scales, (None, None), *tensors
        )

    with Calls() as calls, counted_norms() as forward:
        found = gradients(ours, *step)
    assert forward.call_count == 1 + (not keep)
    # two with w, two thin ones; backward: dh, da, db, two with w and one with a into one gradient
    assert calls.products == 4 + 6
    expected = gradients(lora_subjects.norm_lora_reference, *step)
    for mine, right, need in zip(found, expected, needed):
        assert relative_error(mine, right) < 5e-6 if need else mine is None


def test_swiglu_linear_with_an_adapter_keeps_h_beside_its_inputs():
    inputs, _ = lora_subjects.make_lora_swiglu((5,), (24, 40), torch.float32)
    leaves = [t.requires_grad_() for t in inputs.values()]
    with saved_tensors() as saved:
        lora_subjects.swiglu_lora_inplace(*leaves)
    (h,) = (t for t in saved if all(t.data_ptr() != leaf.data_ptr() for leaf in leaves))
    assert h.shape == (5, lora_subjects.RANKS[0])


# ---- What only a GPU can show --------------------------------------------------------------------


@needs_gpu
def test_memory_after_the_forward_is_the_results_and_rstd():
    """Neither y nor silu(gate) * up is kept, nor is there a copy of the residual."""
    N, H, I = LARGE_SIZES
    inputs, _ = make_mlp_inputs(torch.bfloat16, LARGE_SIZES)
    leaves = [t.requires_grad_() for t in inputs]
    kept = []
    for function in (fused_mlp, reference_mlp):
        function(*leaves)  # workspaces that are allocated once do not count
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = function(*leaves)
        kept.append(torch.cuda.memory_allocated() - before)
        del out
    out, gate_and_up, rstd = 2 * N * H, 2 * 2 * N * I, 4 * N
    assert kept[0] <= out + gate_and_up + rstd + 2**20
    assert kept[1] - kept[0] >= 2 * N * H + 2 * N * I


@needs_gpu
def test_backward_needs_no_more_than_one_gradient_of_the_inner_width():
    """dgate, dup and silu(gate) * up lie where gate, up and their product's gradient lay."""
    N, H, I = LARGE_SIZES
    inputs, (dout,) = make_mlp_inputs(torch.bfloat16, LARGE_SIZES)
    leaves = [t.requires_grad_() for t in inputs]
    fused_mlp(*leaves).backward(dout)
    for leaf in leaves:
        leaf.grad = None
    out = fused_mlp(*leaves)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out.backward(dout)
    torch.cuda.synchronize()
    grads = sum(leaf.grad.numel() * leaf.grad.element_size() for leaf in leaves)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= grads + 2 * N * I + 3 * 2 * N * H + 32 * 2**20
