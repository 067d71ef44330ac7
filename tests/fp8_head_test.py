"""FP8 in the head: gradients against float64 of rounded numbers, within e4m3's step, in a model."""

import math

import pytest
import torch
import torch.nn.functional as F

from cross_entropy_inplace_kernel import cross_entropy_inplace, cross_entropy_scale
from harness.benchmark.checking import DEVICE, HAS_GPU, relative_error
from harness.cli.command_line import UserError
from harness.model import architecture
from harness.model.loading import load_model
from next_steps.layers import fp8_head
from next_steps.layers.fp8_head import FP8HeadLoss
from next_steps.lessons.fp8_kernel import quantize_rows_reference
from next_steps.patches.apply_kernels import apply_kernels
from next_steps.patches.fp8_model import fp8_layers, without_fp8
from tests.fp8_layer_test import (
    DTYPE,
    REFERENCES,
    STEP,
    batch,
    drawn,
    hold,
    in_float64,
    leaves,
    make_model,
    rounded,
    small_model,  # noqa: F401  (a fixture)
    turned,
    turned_weights,
    weights,
    without_interpreter,  # noqa: F401  (a fixture)
)
from tests.small_workloads import loss_and_gradients, tiny_workload

N, H, V = 40, 48, 157  # 8 rows of zeros fill up the tokens, 3 of -inf the vocabulary
CHUNK, WIDTH = 32, 64  # of two chunks and three slices


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(fp8_head, "MAX_CHUNK", CHUNK)
    monkeypatch.setattr(fp8_head, "MAX_COLUMNS", WIDTH)
    for name in REFERENCES.keys() & vars(fp8_head).keys() if not HAS_GPU else ():
        monkeypatch.setattr(fp8_head, name, REFERENCES[name])  # see fp8_layer_test.py


def inputs():
    """Hidden states, weight and targets; an eighth of the targets is ignored."""
    x, (w,) = drawn(N, H, scale=2.0), weights((V, H))
    targets = torch.arange(N, device=DEVICE) * 37 % V
    targets[::8] = -100
    return x, w, targets


def run(x, w, targets, grad_output=1.0, **options):
    x_leaf, w_leaf = leaves(x, w)
    loss = FP8HeadLoss()(x_leaf, w_leaf, targets, **options)
    (grad_output * loss).backward()
    return {"loss": loss.detach(), "dx": x_leaf.grad, "dw": w_leaf.grad}


def of_rounded(x, w, targets):
    """The loss and the gradients in float64, of codes of the logits' gradient that was computed."""
    n_valid, pad, n_columns = (targets != -100).sum(), F.pad, len(w)
    x, w = (pad(t, (0, 0, 0, -len(t) % 16)) for t in (x, w))
    targets = pad(targets, (0, -len(targets) % 16), value=-100)
    losses, dx, dw = [], [], 0
    for rows, ids in zip(x.split(CHUNK), targets.split(CHUNK)):
        logits = rows @ w.t()
        losses.append(F.cross_entropy(logits[:, :n_columns].double(), ids, reduction="sum"))
        logits[:, n_columns:] = -torch.inf
        cross_entropy_inplace(logits, ids, -100, "none")
        cross_entropy_scale(torch.ones((), device=DEVICE), logits, ids)
        parts = list(zip(logits.split(WIDTH, 1), w.split(WIDTH)))
        dx.append(sum(rounded(part) @ turned_weights(of_part) for part, of_part in parts))
        dw = dw + torch.cat([turned(part).t() @ turned(rows) for part, _ in parts])
    found = {"loss": sum(losses), "dx": torch.cat(dx)[:N], "dw": dw[:n_columns]}
    return {name: each / n_valid for name, each in found.items()}


def of_unrounded(x, w, targets):
    x64, w64 = in_float64(x, w)
    loss = F.cross_entropy(x64 @ w64.t(), targets)
    loss.backward()
    return {"loss": loss.detach(), "dx": x64.grad, "dw": w64.grad}


def test_loss_and_gradients_are_those_of_the_rounded_numbers():
    found, expected = run(*inputs()), of_rounded(*inputs())
    hold(found, expected)
    for name in ("dx", "dw"):
        for wrong in (0 * expected[name], -expected[name], 1.02 * expected[name]):
            with pytest.raises(AssertionError, match=name):
                hold(found | {name: wrong}, expected)


def test_they_are_as_near_to_unrounded_ones_as_e4m3_allows():
    """A product rounds two factors, and the loss is of logits that were not rounded."""
    found, plain = run(*inputs()), of_unrounded(*inputs())
    hold(found, plain, allowed=1.5 * math.sqrt(2) * STEP)
    hold({"loss": found["loss"]}, {"loss": plain["loss"]})
    assert min(relative_error(found[name], plain[name]) for name in ("dx", "dw")) > STEP / 2


def test_slices_without_the_target_keep_small_probabilities():
    """Beside the target's gradient, which is 1, they are below e4m3's smallest number."""
    x, (w,) = torch.ones(16, H, device=DEVICE, dtype=DTYPE), weights((V, H))
    w[:] = w[:1]  # all logits are equal
    w[0] -= 20 / H
    w[WIDTH] += 20 / H  # of the next slice, which has nearly the whole probability
    expected = of_unrounded(x, w, torch.zeros(16, dtype=torch.int64, device=DEVICE))["dx"]
    found = run(x, w, torch.zeros(16, dtype=torch.int64, device=DEVICE))["dx"]
    assert relative_error(found, expected) < 2 * STEP
    last = quantize_rows_reference(torch.full((1, 16), 2.0**-27, device=DEVICE))
    assert (last.codes.float() != 0).all()


def test_ignored_rows_count_for_nothing():
    x, w, targets = inputs()
    found = run(x, w, targets)
    assert (found["dx"][targets == -100] == 0).all()
    x[targets == -100] *= 4
    again = run(x, w, targets)
    assert torch.equal(found["loss"], again["loss"])
    none = run(x, w, torch.full_like(targets, -100))
    assert none["loss"].isnan() and not none["dx"].any() and not none["dw"].any()


def test_rows_beyond_the_number_of_targets_are_left_out(monkeypatch):
    x, w, targets = inputs()
    targets[16:] = -100
    sizes, turn = [], fp8_head.transpose_rows
    monkeypatch.setattr(fp8_head, "transpose_rows", lambda t: sizes.append(len(t.codes)) or turn(t))
    whole, few = run(x, w, targets), run(x, w, targets, max_targets=14)
    assert sizes == [32] * 4 + [16] * 4 + [16] * 4  # hidden states and three slices, each chunk
    hold(few, {name: each.double() for name, each in whole.items()})
    assert run(x, w, targets, max_targets=13)["loss"].isnan()


@pytest.mark.parametrize("target", [-1, V, V + 3])
def test_a_target_outside_the_vocabulary_makes_no_finite_loss(target):
    x, w, targets = inputs()
    targets[1] = target
    assert not run(x, w, targets)["loss"].isfinite()


@pytest.mark.parametrize(
    "needed, n_products", [((1, 1), 14), ((1, 0), 8), ((0, 1), 8), ((0, 0), 2)]
)
def test_only_what_needs_a_gradient_is_multiplied(monkeypatch, needed, n_products):
    calls, fp8_product = [], fp8_head.fp8_product
    monkeypatch.setattr(
        fp8_head, "fp8_product", lambda *a, **k: calls.append(a) or fp8_product(*a, **k)
    )
    x, w, targets = inputs()
    FP8HeadLoss()(x.requires_grad_(needed[0] == 1), w.requires_grad_(needed[1] == 1), targets)
    assert len(calls) == 2 * 3 * sum(needed)  # chunks, slices


def test_the_gradient_of_the_loss_multiplies_and_the_backward_can_be_repeated():
    x, w, targets = inputs()
    once, half = run(x, w, targets), run(x, w, targets, grad_output=0.5)
    assert all(torch.equal(half[name], once[name] / 2) for name in ("dx", "dw"))
    x_leaf, w_leaf = leaves(x, w)
    loss = FP8HeadLoss()(x_leaf, w_leaf, targets)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    assert torch.equal(x_leaf.grad, 2 * once["dx"]) and torch.equal(w_leaf.grad, 2 * once["dw"])
    with pytest.raises(RuntimeError, match="no second derivative"):
        loss.backward(create_graph=True)


# ---------------------------------------------------------------- in a model


@pytest.mark.parametrize("tied", [False, True])
def test_a_models_loss_and_gradients_are_near_those_of_the_layers_alone(monkeypatch, tied):
    two_layers = architecture.tiny_config()
    two_layers.tie_word_embeddings = tied
    monkeypatch.setattr(architecture, "tiny_config", lambda: two_layers)
    model = make_model("head")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert {layer.casts.mode for layer in model.model.layers} == {"all"}
    found, expected = (loss_and_gradients(each, batch()) for each in (model, make_model("all")))
    assert relative_error(found["loss"], expected["loss"]) < 1e-6
    name = "model.embed_tokens.weight"
    assert not torch.equal(found[name], expected[name])
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    allowed = {name: 0.24 if "layernorm" in name else 0.12 for name in expected}
    assert {name: error for name, error in errors.items() if not error < allowed[name]} == {}


def test_evaluation_and_without_fp8_have_the_models_own_head():
    model, layers, plain = make_model("head"), make_model("all"), make_model()
    logits = [each.eval()(input_ids=batch().input_ids).logits for each in (model, layers)]
    assert torch.equal(*logits)
    model.train(), plain.train()
    with without_fp8(model):
        found, expected = (loss_and_gradients(each, batch()) for each in (model, plain))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    model.zero_grad()
    layers.train()
    of_layers = loss_and_gradients(layers, batch())["model.norm.weight"]
    assert not torch.equal(loss_and_gradients(model, batch())["model.norm.weight"], of_layers)
    model.zero_grad()
    found = loss_and_gradients(fp8_layers(model, "all"), batch())["model.norm.weight"]
    assert torch.equal(found, of_layers)


def with_bias(model):
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(len(model.lm_head.weight)))


def another(model):
    model.lm_head.__class__ = torch.nn.Linear


@pytest.mark.parametrize("change", [with_bias, another])
def test_a_head_that_fp8_does_not_take_is_refused(change):
    model = apply_kernels(load_model(tiny_workload()))
    change(model)
    said = r"--fp8 head: the head is Linear\(.*\), expected one without a bias, .*: take --fp8 all"
    with pytest.raises(UserError, match=said):
        fp8_layers(model, "head")
