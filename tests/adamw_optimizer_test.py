"""What TritonAdamW has beside the contracts of an optimizer: states, hooks and DTensors.

adamw_test.py tests the kernel.  adamw_shards_test.py tests several processes.
"""

import copy
import functools
import gc
import io
import math
import pickle
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Shard
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_flatten

from harness.cli.device import DEVICE
from judging.circumstances import captured, waiting_forbidden
from next_steps.lessons import adamw_optimizer
from next_steps.lessons.adamw8 import dequantize_moments, quantize_moments
from next_steps.lessons.adamw_optimizer import CODED_STATE, TritonAdamW
from tests.adamw_test import (
    BF16,
    EXPANDED,
    FP16,
    FP32,
    INF,
    NAN,
    ONES,
    SETTINGS,
    for_both_kernels,
    gradients,
    randn,
    train,
)
from tests.fixtures import is_freed, needs_gpu, needs_two_gpus

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
SHAPES = ((13, 9), (40,), (), (6, 5))
STATE = "step", "exp_avg", "exp_avg_sq"


def make_params(*shapes, dtype=FP32):
    values = [randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    return [torch.nn.Parameter(value) for value in values]


def both(dtype=FP32, **options):
    """Return ours and torch's over equal parameters."""
    ours, theirs = make_params(*SHAPES, dtype=dtype), make_params(*SHAPES, dtype=dtype)
    return TritonAdamW(ours, **options), torch.optim.AdamW(theirs, **options)


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def random_grads(optimizer, steps, seed=100):
    """Return a list of gradients for each step."""
    params = [p.detach() for p in params_of(optimizer)]
    return list(zip(*(gradients(p, steps, seed + 50 * i) for i, p in enumerate(params))))


def train_all(*optimizers, steps):
    for optimizer in optimizers:
        train(optimizer, random_grads(optimizer, steps))


def assert_close(ours, theirs):
    for p, q in zip(params_of(ours), params_of(theirs)):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def assert_same_run(a, b):
    for p, q in zip(params_of(a), params_of(b), strict=True):
        assert torch.equal(p, q) and a.state[p].keys() == b.state[q].keys()
        assert all(torch.equal(a.state[p][key], b.state[q][key]) for key in a.state[p])


def steps_of(optimizer):
    """Return how many steps each parameter has made."""
    return [next(iter(state.values())) for state in optimizer.state.values()]


# ---- The contract of an optimizer --------------------------------------------------------------


def test_equal_parameters_are_rounded_differently_and_alike_in_any_order():
    start, fixed = randn(1000, dtype=BF16), gradients(randn(1000, dtype=BF16), 1)[0]
    a, b = (torch.nn.Parameter(start.clone()) for _ in range(2))
    train(TritonAdamW([a, b], stochastic_rounding=True), [[fixed, fixed]])
    assert not torch.equal(a, b)
    alone = torch.nn.Parameter(start.clone())
    train(TritonAdamW([a, alone], stochastic_rounding=True), [[None, fixed]])
    assert torch.equal(alone, b)


NUMBERS = {  # settings as PyTorch takes them too; each number is the same in fp32
    "NumPy": lambda tensor: {"lr": np.float64(0.05), "betas": [np.float32(0.75), np.float32(0.5)]},
    "tensors": lambda tensor: {"lr": tensor(0.05), "betas": (tensor(0.75), tensor(0.9375))},
    "betas of 0": lambda tensor: {"betas": (tensor(0.0), tensor(0.0))},
    "one of one": lambda tensor: {
        "betas": (tensor([0.75]), 0.9375),
        "eps": tensor(2**-10),
        "weight_decay": tensor([0.25]),
    },
    "held negated": lambda tensor: {"lr": torch._neg_view(tensor([-0.05], dtype=torch.float64))},
    "PyTorch's": lambda tensor: dict.fromkeys(("foreach", "fused", "differentiable"), False),
    "capturable": lambda tensor: {"capturable": True},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", sorted({"cpu", DEVICE}))
@for_both_kernels
@pytest.mark.parametrize("given", NUMBERS)
def test_numbers_and_tensors_give_the_same_bits(given, moments, device):
    given = NUMBERS[given](functools.partial(torch.tensor, device=device))
    betas = tuple(map(float, given.get("betas", (0.75, 0.9375))))
    plain = {"lr": 0.05, "betas": betas, "eps": 2**-10, "weight_decay": 0.25}
    plain["moments_dtype"] = moments
    options = plain | given
    runs = TritonAdamW(make_params(*SHAPES), **options), TritonAdamW(make_params(*SHAPES), **plain)
    train_all(*runs, steps=3)
    assert_same_run(*runs)
    group = runs[0].param_groups[0]
    own, given = ([s["lr"], s["eps"], s["weight_decay"], *s["betas"]] for s in (group, options))
    assert all(a is b for a, b in zip(own, given) if isinstance(b, torch.Tensor))


def test_numbers_that_are_put_into_a_group_later():
    a, b = (TritonAdamW(make_params(*SHAPES)) for _ in range(2))
    betas = np.float64(0.5), 0.75
    a.param_groups[0].update(lr=np.float32(0.25), betas=betas, eps=1, weight_decay=np.int64(1))
    b.param_groups[0].update(lr=0.25, betas=(0.5, 0.75), eps=1.0, weight_decay=1.0)
    train_all(a, b, steps=2)
    assert_same_run(a, b)


def exponential(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def sequential(optimizer):
    first, second = lr_scheduler.ConstantLR(optimizer, 0.1, 2), exponential(optimizer)
    return lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[2])


SCHEDULERS = {  # the others write lr by the step() that ExponentialLR has
    "ExponentialLR": exponential,
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),  # and of beta1
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=3),
    "SequentialLR": sequential,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("betas_too", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_pytorch_give_their_steps_in_tensors(name, betas_too):
    """Ours has tensors where the parameters are.  PyTorch's has numbers."""
    lr, *betas = torch.tensor([0.1, 0.9, 0.999], device=DEVICE)
    options = {"lr": lr} | ({"betas": tuple(betas)} if betas_too else {})
    ours, theirs = TritonAdamW(make_params(*SHAPES), **options), both(lr=0.1)[1]
    group, rates = ours.param_groups[0], set()
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (ours, theirs)]
    for grads in random_grads(ours, 5):
        for optimizer, scheduler in zip((ours, theirs), schedulers):
            train(optimizer, [grads])
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        rates.add((float(group["lr"]), *map(float, group["betas"])))
    assert_close(ours, theirs)
    assert len(rates) > 1, "this scheduler changed nothing"
    assert group["lr"] is lr, "a CUDA graph reads this tensor"


# ---- Saving and loading ------------------------------------------------------------------------


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("to_torch", [False, True])
def test_state_is_exchanged_with_torch(to_torch, dtype):
    ours, theirs = both(dtype=dtype, **SETTINGS)
    for optimizer in (ours, theirs):
        optimizer.add_param_group({"params": [torch.nn.Parameter(randn(5, 7, dtype=dtype).t())]})
    source, target = (ours, theirs) if to_torch else (theirs, ours)
    grads = random_grads(source, 4)
    train(source, grads[:2])
    target.load_state_dict(through_a_file(source.state_dict()))
    for p, q in zip(params_of(source), params_of(target)):
        q.data.copy_(p.data)
        saved, loaded = source.state[p], target.state[q]
        assert saved.keys() == loaded.keys() == set(STATE)
        for a, b in ((saved[key], loaded[key]) for key in STATE):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
            assert torch.equal(a.to(DEVICE), b.to(DEVICE))
    for optimizer in (source, target):
        train(optimizer, grads[2:])
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == FP32 else {"rtol": 2e-2, "atol": 2e-2}
    for p, q in zip(params_of(ours), params_of(theirs)):
        assert ours.state[p]["step"] == theirs.state[q]["step"] == 4
        torch.testing.assert_close(p, q, **close)


def test_loading_fills_the_tensors_a_cuda_graph_may_know_and_shares_none():
    optimizer = TritonAdamW(make_params(*SHAPES))
    train(optimizer, random_grads(optimizer, 1))
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, random_grads(optimizer, 1))
    known = [dict(state) for state in optimizer.state.values()]
    optimizer.load_state_dict(saved)
    for before, now in zip(known, optimizer.state.values(), strict=True):
        assert all(now[key] is t for key, t in before.items())
    assert steps_of(optimizer) == [1] * len(SHAPES)
    train(optimizer, random_grads(optimizer, 1))
    assert all(state["step"] == 1 for state in saved["state"].values())


def test_codes_are_made_of_loaded_moments_and_moments_of_loaded_codes():
    """Each optimizer keeps the dtype that it was asked for; PyTorch's AdamW loads no codes."""
    params = [make_params((30, 40), (7,), dtype=BF16) for _ in range(3)]
    torchs = torch.optim.AdamW(params[0])
    coded, wide = (TritonAdamW(p, moments_dtype=t) for p, t in zip(params[1:], (torch.uint8, FP32)))
    train(torchs, random_grads(torchs, 2))
    coded.load_state_dict(torchs.state_dict())
    wide.load_state_dict(through_a_file(coded.state_dict()))
    with pytest.raises(KeyError, match="step"):
        torch.optim.AdamW(params[0]).load_state_dict(coded.state_dict())
    for p, q, r in zip(*params):
        given, codes, found = torchs.state[p], coded.state[q], wide.state[r]
        expected = quantize_moments(*(given[key].float() for key in STATE[1:]))
        assert all(torch.equal(codes[key], t) for key, t in zip(CODED_STATE[1:], expected))
        assert found.keys() == set(STATE) and codes[CODED_STATE[0]] == found["step"] == 2
        for key, t in zip(STATE[1:], dequantize_moments(expected, FP32)):
            assert torch.equal(found[key], t) and t.any()
    train_all(coded, wide, steps=1)


def test_codes_of_another_size_or_type_are_refused():
    saved = []
    for shape in ((257,), (256,)):
        optimizer = TritonAdamW(make_params(shape), moments_dtype=torch.uint8)
        train(optimizer, random_grads(optimizer, 1))
        saved.append(copy.deepcopy(optimizer.state_dict()))
    before, codes = everything(optimizer), saved[1]["state"][0]
    floats, scales = codes["exp_avg_codes"].float(), saved[0]["state"][0]["scales"]
    for error, wrong, sentence in (
        (ValueError, {"scales": scales}, r"scales of .* 0 has shape \(2, 2\), expected \(2, 1\)"),
        (TypeError, {"exp_avg_codes": floats}, r"is torch\.float32, expected torch\.int8"),
    ):
        with pytest.raises(error, match=sentence):
            optimizer.load_state_dict({**saved[1], "state": {0: {**codes, **wrong}}})
    assert equal(everything(optimizer), before)


@pytest.mark.exhaustive
@pytest.mark.parametrize("own", ["numbers", "tensors"])
@pytest.mark.parametrize("saved", ["numbers", "tensors"])
def test_settings_are_loaded_into_what_the_optimizer_has(own, saved):
    def make(kind, *numbers, **options):
        if kind == "tensors":
            numbers = [torch.tensor(number, device=DEVICE) for number in numbers]
        return TritonAdamW(make_params(*SHAPES), lr=numbers[0], betas=numbers[1:], **options)

    def settings(optimizer):
        group = optimizer.param_groups[0]
        return [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]

    source = make(saved, 0.25, 0.5, 0.75, eps=0.125, weight_decay=0.0)
    target = make(own, 0.1, 0.2, 0.3)
    before = settings(target)
    target.load_state_dict(through_a_file(source.state_dict()))
    after = settings(target)
    assert after == [0.25, 0.5, 0.75, 0.125, 0.0]
    assert list(map(type, after)) == list(map(type, before))
    assert own == "numbers" or all(a is b for a, b in zip(after[:3], before[:3]))
    train_all(source, target, steps=2)
    assert_same_run(source, target)


def test_maximize_is_loaded_and_how_to_compute_stays():
    ours, _ = both()
    theirs = torch.optim.AdamW(make_params(*SHAPES), foreach=True, maximize=True)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["maximize"] and ours.param_groups[0]["foreach"] is None


def everything(optimizer):
    """Return (copies of what an optimizer remembers, how they are nested)."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    states = [dict(optimizer.state.get(p, {})) for p in params_of(optimizer)]
    return tree_flatten(copy.deepcopy((groups, states, len(optimizer.state))))


def equal(a, b):
    (values, nested), (others, nested_too) = a, b
    return nested == nested_too and all(
        type(x) is type(y) and (torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y)
        for x, y in zip(values, others)
    )


UNFIT = [  # what makes a state unfit: of which parameter (None: the second group), what, sentence
    (3, {"exp_avg_sq": torch.ones(1)}, r"exp_avg_sq of .* 3 has shape \(1,\), expected \(6, 5\)"),
    (0, {"exp_avg": torch.ones(9, 13)}, r"exp_avg of .* 0 has shape \(9, 13\), expected \(13, 9\)"),
    (1, {"step": torch.ones(40)}, r"step of .* 1 has shape \(40,\), expected \(\)"),
    (3, {"exp_avg": None}, "exp_avg of parameter 3 is missing"),
    (3, {"exp_avg": torch.ones(6, 5).to_sparse()}, r"exp_avg of parameter 3 is torch\.sparse_coo"),
    (None, {"lr": -0.1}, r"lr is -0\.1, expected a number"),
    (None, {"lr": 0.75}, r"one tensor is to be filled with 0\.5 and with 0\.75, expected"),
    (None, {"params": [2]}, r"the state is of groups of \[2, 1\] parameters, expected \[2, 2\]"),
    (None, {}, r"the state is of groups of \[2\] parameters, expected \[2, 2\]"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("where, change, sentence", UNFIT)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(where, change, sentence, started):
    def make(lr):
        params = make_params(*SHAPES)
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        return TritonAdamW(groups, lr=torch.tensor(lr, device=DEVICE))

    source, target = make(0.5), make(0.25)
    train(source, random_grads(source, 2))
    if started:
        train(target, random_grads(target, 1, seed=7))
    saved = copy.deepcopy(source.state_dict())
    spoiled = saved["param_groups"][1] if where is None else saved["state"][where]
    spoiled.update(change)
    if not change:
        saved["param_groups"].pop()
    for key in [key for key, value in change.items() if value is None]:
        del spoiled[key]
    before, groups = everything(target), target.param_groups
    with pytest.raises(TypeError if "sparse" in sentence else ValueError, match=sentence):
        target.load_state_dict(saved)
    assert equal(everything(target), before) and target.param_groups is groups
    target.load_state_dict(source.state_dict())
    assert equal(everything(target), everything(source))


def test_hooks_around_loading_see_and_change_what_is_loaded():
    source, target = (TritonAdamW(make_params((3,))) for _ in range(2))
    train(source, random_grads(source, 2))
    seen = []

    def renumbered(state_dict, by):
        group = state_dict["param_groups"][0]
        numbers = [number + by for number in group["params"]]
        state = {number + by: entry for number, entry in state_dict["state"].items()}
        group = {**group, "params": numbers, "lr": group["lr"] * 2**by}
        return {"state": state, "param_groups": [group]}

    target.register_load_state_dict_pre_hook(lambda optimizer, saved: renumbered(saved, -7))
    target.register_load_state_dict_post_hook(lambda optimizer: seen.append(len(optimizer.state)))
    target.load_state_dict(renumbered(source.state_dict(), 7))
    assert seen == [1] and equal(everything(target), everything(source))


def test_names_of_parameters_are_saved_and_loaded():
    named = [("w", make_params((3,))[0])]
    source, target = TritonAdamW(named), TritonAdamW([("old", make_params((3,))[0])])
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["param_names"] == ["w"]
    target.load_state_dict(TritonAdamW(make_params((3,))).state_dict())
    assert target.param_groups[0]["param_names"] == ["w"]


# ---- Stepping inside the backward --------------------------------------------------------------


class Model(torch.nn.Module):
    """Three weights, the first one used twice (tied)."""

    def __init__(self, dtype=FP32):
        super().__init__()
        self.embedding, self.hidden, self.bias = make_params((12, 8), (8, 8), (8,), dtype=dtype)

    def forward(self, tokens):
        x = F.embedding(tokens, self.embedding)
        return torch.tanh(x @ self.hidden + self.bias) @ self.embedding.t()

    def loss(self, seed=0):
        tokens = torch.randint(12, (6,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        return self(tokens).float().square().mean()


@pytest.fixture
def stepping():
    """A model, and an optimizer that steps in the model's backward."""
    model = Model()
    return model, TritonAdamW(model.parameters(), step_in_backward=True)


def backward_and_step(model, optimizer, seed=0):
    model.loss(seed).backward()
    assert optimizer.step() is None


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def same_weights(model, weights):
    return all(map(torch.equal, model.parameters(), weights))


def tensors_on(device):
    lr, *betas = torch.tensor([0.05, 0.8, 0.95], device=device)
    return {"lr": lr, "betas": tuple(betas)}


IN_BACKWARD = {  # dtype, options
    "fp32": (FP32, {"lr": 0.05}),
    "bf16, stochastic": (BF16, {"lr": 0.05, "stochastic_rounding": True}),
    "8-bit moments": (BF16, {"lr": 0.05, "moments_dtype": torch.uint8}),
    "tensors on the CPU": (FP32, tensors_on("cpu")),
    "tensors on the GPU": (FP32, tensors_on(DEVICE)),
    "maximize": (FP32, {"maximize": True}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", IN_BACKWARD)
def test_steps_inside_the_backward_are_the_same_steps(kind):
    optimizers = []
    for in_backward in (False, True):
        dtype, options = IN_BACKWARD[kind]
        model = Model(dtype)
        groups = [
            {"params": [model.embedding]},
            {"params": [model.hidden, model.bias], "weight_decay": 0.3},
        ]
        options = copy.deepcopy(options)  # its tensors are filled
        optimizer = TritonAdamW(groups, step_in_backward=in_backward, **options)
        scheduler = exponential(optimizer)
        for seed in range(3):
            model.loss(seed).backward()
            assert in_backward == all(map(is_freed, model.parameters()))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    assert_same_run(*optimizers)
    assert steps_of(optimizers[1]) == [3, 3, 3]


def test_gradients_never_exist_all_at_once(monkeypatch, stepping):
    (model, optimizer), alive, step = stepping, [], adamw_optimizer.adamw_step

    def counting_step(*args, **options):
        alive.append(sum(not is_freed(p) for p in model.parameters()))
        return step(*args, **options)

    monkeypatch.setattr(adamw_optimizer, "adamw_step", counting_step)
    model.loss().backward()
    # Three steps, also one of a tied weight.  The hook alone holds the gradient of its parameter.
    assert alive == [0, 0, 0]
    optimizer.step()
    assert alive == [0, 0, 0]


CLIPPINGS = {
    "by norm": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1e9),
    "by norm, in lists": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 1.0, foreach=True),
    "by value": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 1.0),
    "by hand": lambda ps: [p.grad.mul_(0.5) for p in ps if p.grad is not None],
    "noise": lambda ps: [p.grad.add_(0.5) for p in ps if p.grad is not None],
}


@pytest.mark.parametrize("clip", CLIPPINGS.values(), ids=CLIPPINGS)
def test_clipping_what_the_backward_has_used_is_refused_and_a_step_recovers(clip, stepping):
    """clip_grad_norm_ found no gradients, of all parameters or of some: it returned 0."""
    model, optimizer = stepping
    for _ in range(2):
        model.loss().backward()
        weights = weights_of(model)
        for parameters in (list(model.parameters()), *([p] for p in model.parameters())):
            with pytest.raises(RuntimeError, match="step_in_backward=True has used"):
                clip(parameters)
        optimizer.step()
        assert all(p.grad is None for p in model.parameters()) and same_weights(model, weights)
    optimizer.close()
    model.loss().backward()
    CLIPPINGS["by norm"](model.parameters())


def test_a_norm_without_clipping_is_unknown_and_leaves_other_gradients_alone(stepping):
    """transformers.Trainer asks for the norm for its log, by clipping to infinity."""
    (model, optimizer), other = stepping, torch.nn.Parameter(torch.ones(3, device=DEVICE))
    (model.loss() + other.sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_([*model.parameters(), other], math.inf)
    torch._foreach_mul_([other.grad], math.inf / (norm + 1e-6))  # which it does on a GPU
    assert math.isnan(norm.item()) and torch.equal(other.grad, torch.ones_like(other))
    optimizer.step()


def test_gradient_accumulation_is_refused_and_a_step_recovers(stepping):
    model, optimizer = stepping
    model.loss().backward()
    weights = weights_of(model)
    refused = {"match": r"a second gradient reached a parameter before step\(\)"}
    for loss in (model.loss(1), *(p.sum() for p in model.parameters())):  # of all, of each
        with pytest.raises(RuntimeError, **refused):
            loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, **refused):
            loss.backward(create_graph=True)
    assert same_weights(model, weights)
    optimizer.step()
    backward_and_step(model, optimizer, 1)
    assert steps_of(optimizer) == [2, 2, 2]


@pytest.mark.parametrize("in_backward", [False, True])
def test_backwards_in_accumulating_add_up_and_the_next_one_steps(in_backward):
    models, losses = (Model(), Model()), ([3, 4], [0, 1, 2])
    ours = TritonAdamW(models[0].parameters(), step_in_backward=in_backward)
    theirs = torch.optim.AdamW(models[1].parameters())
    for seeds in losses:
        before = weights_of(models[0])
        with ours.accumulating():
            for seed in seeds[:-1]:
                models[0].loss(seed).backward()
        assert same_weights(models[0], before)
        assert all(p.grad is not None for p in models[0].parameters())
        models[0].loss(seeds[-1]).backward()
        assert all(is_freed(p) == in_backward for p in models[0].parameters())
        for seed in seeds:
            models[1].loss(seed).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(ours, theirs)


def test_accumulating_ends_with_an_error_and_does_not_hide_one(stepping):
    model, optimizer = stepping
    with pytest.raises(KeyError), optimizer.accumulating():
        model.loss().backward()
        raise KeyError
    model.loss().backward()
    assert all(map(is_freed, model.parameters()))
    refused = pytest.raises(RuntimeError, match="or accumulate in accumulating")
    with optimizer.accumulating(), refused:
        model.loss().backward()


def test_gradients_that_the_last_backward_does_not_reach_are_stepped_in_step():
    models = Model(), Model()
    ours = TritonAdamW(models[0].parameters(), step_in_backward=True)
    theirs = TritonAdamW(models[1].parameters())
    for model, optimizer in zip(models, (ours, theirs)):
        with optimizer.accumulating():
            model.loss().backward()
        model.embedding.square().sum().backward()  # reaches one of three
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.accumulating():  # and then none
            backward_and_step(model, optimizer)
    assert_same_run(ours, theirs)


def test_step_without_a_backward_is_refused(stepping):
    model, optimizer = stepping
    refused = {"match": r"no backward has stepped a parameter since the last step\(\)"}
    with pytest.raises(RuntimeError, **refused):
        optimizer.step()
    backward_and_step(model, optimizer)
    with pytest.raises(RuntimeError, **refused):
        optimizer.step()


def test_what_is_frozen_stays():
    model = Model()
    model.bias.requires_grad_(False)
    optimizer, before = TritonAdamW(model.parameters(), step_in_backward=True), weights_of(model)
    backward_and_step(model, optimizer)
    assert torch.equal(model.bias, before[2]) and model.bias not in optimizer.state
    model.bias.requires_grad_(True)  # too late for a hook, so that step() takes it
    backward_and_step(model, optimizer)
    assert steps_of(optimizer) == [2, 2, 1] and model.bias in optimizer.state


def test_a_gradient_beside_the_one_that_the_backward_has_stepped_is_refused(stepping):
    model, optimizer = stepping
    model.loss().backward()
    model.bias.grad = torch.ones_like(model.bias)
    before = weights_of(model)
    with pytest.raises(RuntimeError, match="a gradient is there of a parameter that the backward"):
        optimizer.step()
    assert same_weights(model, before)


def test_a_closure_makes_one_step_in_its_backward(stepping):
    model, optimizer = stepping

    def closure():
        loss = model.loss()
        loss.backward()
        return loss

    before = model.loss().item()
    assert optimizer.step(closure).item() == before > model.loss().item()
    assert steps_of(optimizer) == [1, 1, 1]


def test_two_losses_of_different_parameters_make_one_step():
    a, b = make_params((4,), (5,))
    optimizer = TritonAdamW([a, b], step_in_backward=True)
    for p in (a, b):
        p.square().sum().backward()
    optimizer.step()
    assert steps_of(optimizer) == [1, 1]


def test_what_is_loaded_after_a_backward_replaces_what_that_stepped_and_reaches_the_hooks(stepping):
    model, optimizer = stepping
    backward_and_step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(lr=0.0, weight_decay=0.0)
    model.loss(1).backward()
    optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="no backward has stepped"):
        optimizer.step()
    before = weights_of(model)
    backward_and_step(model, optimizer, 2)
    assert same_weights(model, before) and steps_of(optimizer) == [2, 2, 2]


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda both: pickle.loads(pickle.dumps(both))}


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_a_copy_steps_in_step_alone(way, stepping):
    model, optimizer = stepping
    backward_and_step(model, optimizer)
    twin, twins_optimizer = way((model, optimizer))
    for m, o in ((model, optimizer), (twin, twins_optimizer)):
        m.loss(1).backward()
        assert all(is_freed(p) == (m is model) for p in m.parameters())
        o.step()
    assert_same_run(optimizer, twins_optimizer)


def hooks_of(params):
    return [hook for p in params for hook in (p._post_accumulate_grad_hooks or {}).values()]


@pytest.mark.parametrize("refused", [{"lr": -1.0}, {"fused": True}, {}], ids=str)
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_refused_group_leaves_no_hooks_and_the_optimizer_as_it_was(refused, in_backward):
    first, second, third = make_params((4,), (5,), (6,))
    if in_backward and not refused:
        third.grad = torch.ones_like(third)
    elif not refused:
        third = torch.nn.Parameter(third.double())
    group, says = {"params": [second, third], **refused}, r"lr is -1\.0|fused is True|a parameter"
    with pytest.raises((ValueError, TypeError), match=says) as raised:
        TritonAdamW([{"params": [first]}, {**group}], step_in_backward=in_backward)
    assert raised.tb is not None and hooks_of([first]) == []  # which the traceback keeps alive
    optimizer = TritonAdamW([first], step_in_backward=in_backward)
    with pytest.raises((ValueError, TypeError), match=says):
        optimizer.add_param_group({**group})
    assert params_of(optimizer) == [first] and len(optimizer.param_groups) == 1
    assert len(hooks_of([first])) == in_backward and hooks_of([second, third]) == []
    optimizer.add_param_group({"params": [second]})
    (first.sum() + second.sum()).backward()
    optimizer.step()
    assert steps_of(optimizer) == [1, 1] and third not in optimizer.state


def test_close_removes_the_hooks_and_step_uses_gradients_again(stepping):
    model, optimizer = stepping
    backward_and_step(model, optimizer)
    optimizer.close()
    model.loss(1).backward()
    assert not any(map(is_freed, model.parameters()))
    backward_and_step(model, optimizer, 2)
    assert steps_of(optimizer) == [2, 2, 2]


def test_a_dropped_optimizer_frees_its_states_and_lets_go_of_the_parameters():
    """A hook that held the optimizer would keep it and all parameters for ever."""
    model = Model()
    optimizer = TritonAdamW(model.parameters(), step_in_backward=True)
    backward_and_step(model, optimizer)
    state = weakref.ref(optimizer.state[next(model.parameters())]["exp_avg"])
    del optimizer
    gc.collect()
    assert state() is None and not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model.loss(1).backward()
    assert all(p.grad is not None for p in model.parameters())  # as without an optimizer
    parameter = weakref.ref(next(model.parameters()))
    del model
    gc.collect()
    assert parameter() is None


# ---- Bad input ---------------------------------------------------------------------------------

AT_LEAST_0 = "expected a number of at least 0"
UNSUPPORTED = "which TritonAdamW does not support, expected False"
BAD_OPTIONS = [
    ("lr", -1e-3, f"lr is -0.001, {AT_LEAST_0}"),
    ("lr", NAN, f"lr is nan, {AT_LEAST_0}"),
    ("lr", INF, f"lr is inf, {AT_LEAST_0}"),
    ("lr", "0.1", f"lr is 0.1, {AT_LEAST_0}"),
    ("lr", torch.tensor(-0.5), f"lr is -0.5, {AT_LEAST_0}"),
    ("lr", torch.tensor(-0.5, device=DEVICE), f"lr is -0.5, {AT_LEAST_0}"),
    ("lr", torch.tensor(NAN), f"lr is nan, {AT_LEAST_0}"),
    ("lr", torch.ones(2), rf"lr is tensor\(\[1., 1.\]\), {AT_LEAST_0}"),
    ("lr", torch.tensor(1j), f"lr is 1j, {AT_LEAST_0}"),
    ("eps", NAN, f"eps is nan, {AT_LEAST_0}"),
    ("weight_decay", None, f"weight_decay is None, {AT_LEAST_0}"),
    ("betas", (0.9, 1.0), r"betas is \(0.9, 1.0\), expected two numbers from 0 to below 1"),
    ("betas", (0.9,), r"betas is \(0.9,\), expected two numbers"),
    ("betas", 0.9, "betas is 0.9, expected two numbers"),
    ("betas", (torch.tensor(1.5), torch.tensor(0.5)), r"betas is \(tensor\(1.5000\), .*, expected"),
    ("moments_dtype", FP16, "moments_dtype is torch.float16, expected float32, bfloat16, uint8"),
    ("seed", -1, "seed is -1, expected a whole number from 0"),
    ("seed", 1.5, "seed is 1.5, expected a whole number from 0"),
    ("seed", True, "seed is True, expected a whole number from 0"),
    ("amsgrad", True, f"amsgrad is True, {UNSUPPORTED}: leave it out"),
    ("foreach", True, f"foreach is True, {UNSUPPORTED}: leave it out"),
    ("fused", True, f"fused is True, {UNSUPPORTED}: leave it out"),
    ("differentiable", True, f"differentiable is True, {UNSUPPORTED}: leave it out"),
]


@pytest.mark.parametrize("option, value, sentence", BAD_OPTIONS)
def test_bad_options_are_refused_with_a_sentence(option, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        TritonAdamW(make_params((3,)), **{option: value})
    with pytest.raises(ValueError, match=sentence):
        TritonAdamW([{"params": make_params((3,)), option: value}])


ROUNDED = {"stochastic_rounding": True}
UNFIT_PARAMETERS = {  # data, a DTensor's placement, options, what the sentence says
    "float64": (ONES.double(), None, {}, "is torch.float64, expected torch.float16 or"),
    "sparse": (ONES.to_sparse(), None, {}, "is torch.sparse_coo, expected torch.strided"),
    "overlap": (EXPANDED, None, {}, r"of shape \(4, 6\) has strides \(0, 1\), by which"),
    "a sum": (ONES, Partial(), {}, r"has the placements \(Partial\(.*, expected no Partial"),
    "columns": (ONES, Shard(1), ROUNDED, r"has .* \(Shard\(dim=1\),\) .* stochastic_rounding"),
    "a float64 shard": (ONES.double(), Shard(0), {}, "is torch.float64, expected"),
    "a shard's codes": (
        ONES,
        Shard(0),
        {"moments_dtype": torch.uint8},
        "is a DTensor, whose shards may end inside of blocks, and mom",
    ),
}


@pytest.mark.parametrize("kind", UNFIT_PARAMETERS)
@pytest.mark.parametrize("in_backward", [False, True])
def test_parameters_that_no_step_can_take_are_refused_at_construction_and_with_a_new_group(
    as_dtensor, kind, in_backward
):
    data, placement, options, sentence = UNFIT_PARAMETERS[kind]
    data = as_dtensor(data, placement) if placement else data
    unfit, options = torch.nn.Parameter(data), {"step_in_backward": in_backward, **options}
    refused = {"match": f"a parameter {sentence}"}
    with pytest.raises((ValueError, TypeError), **refused):
        TritonAdamW([unfit], **options)
    optimizer = TritonAdamW(make_params((3,)), **options)
    with pytest.raises((ValueError, TypeError), **refused):
        optimizer.add_param_group({"params": [*make_params((3,)), unfit]})
    assert len(optimizer.param_groups) == 1 and hooks_of([unfit]) == []
    TritonAdamW([torch.nn.Parameter(data, requires_grad=False)], **options)  # may be anything


@pytest.mark.usefixtures("as_dtensor")  # of which the test needs the group of processes
def test_gradient_that_ddp_averages_is_left_for_step():
    """DDP of one process averages, too; it raised with advice about clipping."""
    runs, x = [], torch.ones(3, 5, device=DEVICE)
    for in_backward in (True, False):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 4, device=DEVICE))
        optimizer = TritonAdamW(model.parameters(), step_in_backward=in_backward)
        for forward in (model.module, model):
            optimizer.zero_grad()
            forward(x).square().sum().backward()
            assert not any(map(is_freed, model.parameters()))
            optimizer.step()
        runs.append(optimizer)
    assert_same_run(*runs)


def test_a_state_placed_otherwise_is_refused(as_dtensor):
    plain, wrapped = make_params((4, 6)), make_params((4, 6))
    wrapped = [torch.nn.Parameter(as_dtensor(p, Shard(0))) for p in wrapped]
    a, b = TritonAdamW(plain), TritonAdamW(wrapped)
    for optimizer in (a, b):
        params_of(optimizer)[0].sum().backward()
        optimizer.step()
    before = everything(a)
    with pytest.raises(TypeError, match=r"exp_avg of parameter 0 has placements \(Shard.* None"):
        a.load_state_dict(b.state_dict())
    with pytest.raises(TypeError, match=r"exp_avg of .* placements None, expected \(Shard"):
        b.load_state_dict(a.state_dict())
    assert equal(everything(a), before)


def test_stochastic_rounding_of_fp16_is_refused():
    with pytest.raises(ValueError, match="stochastic_rounding is True, expected False for float16"):
        TritonAdamW(make_params((3,), dtype=FP16), stochastic_rounding=True)


# ---- torch.compile -----------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_whole_step_under_torch_compile(tensor_lr):
    torch._dynamo.reset()
    runs = []
    for compile_step in (False, True):
        lr = torch.tensor(0.05, device=DEVICE) if tensor_lr else 0.05
        optimizer = TritonAdamW(make_params(*SHAPES), lr=lr)
        train(optimizer, random_grads(optimizer, 1))
        step = torch.compile(optimizer.step) if compile_step else optimizer.step
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        for grads in random_grads(optimizer, 3):
            for p, g in zip(params_of(optimizer), grads):
                p.grad = g.clone()
            step()
            scheduler.step()
        runs.append(optimizer)
    assert_same_run(*runs)


# ---- What only a GPU can show ------------------------------------------------------------------


def one_step(model, optimizer, tokens):
    model(tokens).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def halving(optimizer):
    (group,) = optimizer.param_groups
    return lambda: [t.mul_(0.5) for t in (group["lr"], *group["betas"])]


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, 8, cycle_momentum=False).step


@needs_gpu
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("changing", [halving, one_cycle], ids=["by hand", "by a scheduler"])
@pytest.mark.parametrize("moments", [None, torch.uint8], ids=["bf16", "8 bits"])
def test_replays_of_a_cuda_graph_are_the_steps_of_a_run_without_one(changing, in_backward, moments):
    def make():
        model = Model(BF16)
        lr, *betas = torch.tensor([0.05, 0.9, 0.95], device=DEVICE)
        options = {"stochastic_rounding": True, "step_in_backward": in_backward}
        options["moments_dtype"] = moments
        optimizer = TritonAdamW(model.parameters(), lr, tuple(betas), **options)
        return model, optimizer, changing(optimizer)

    tokens = torch.arange(6, device=DEVICE)
    plain_model, plain, change_plain = make()
    model, optimizer, change = make()
    graph, _ = captured(lambda: one_step(model, optimizer, tokens))
    for step in range(5):
        one_step(plain_model, plain, tokens)
        if step > 0:  # the first one was made before the capture, which makes none
            graph.replay()
        change_plain(), change()
    assert steps_of(optimizer) == [5, 5, 5]
    assert_same_run(optimizer, plain)


@needs_gpu
def test_capture_without_a_step_before_is_refused():
    p = torch.nn.Parameter(randn(64))
    p.grad = torch.ones_like(p)
    optimizer = TritonAdamW([p])
    refused = pytest.raises(RuntimeError, match="without state is captured")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@needs_gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_waits_for_the_gpu(device):
    lr, *betas = torch.tensor([0.1, 0.9, 0.999], device=device)
    optimizer = TritonAdamW(make_params(*SHAPES), lr=lr, betas=betas)
    grads = random_grads(optimizer, 2)
    train(optimizer, grads[:1])  # compiling may wait
    with waiting_forbidden():
        train(optimizer, grads[1:])


@needs_gpu
@pytest.mark.parametrize("in_backward", [False, True])
def test_step_allocates_nothing_and_the_backward_frees_gradients(in_backward):
    weights = [torch.nn.Parameter(randn(1024, 1024)) for _ in range(8)]
    optimizer = TritonAdamW(weights, step_in_backward=in_backward)
    one = weights[0].numel() * 4
    for _ in range(2):
        x = torch.ones(4, 1024, device=DEVICE)
        for w in weights:
            x = x @ w / 32
        loss = x.sum()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss.backward()
        optimizer.step()
        extra = torch.cuda.max_memory_allocated() - before
        optimizer.zero_grad()
    assert extra < (3 * one if in_backward else 9 * one), f"{extra / one} gradients"


@needs_two_gpus
@pytest.mark.parametrize("place", [None, "cpu", "cuda:0"])
def test_parameters_on_two_gpus(place):
    start = randn(3000, dtype=BF16)
    lr = 0.1 if place is None else torch.tensor(0.1, device=place)
    a, b = params = [torch.nn.Parameter(t) for t in (start.clone(), start.to("cuda:1"))]
    grads = gradients(start, 1)
    train(TritonAdamW(params, lr=lr), [[g, g.to("cuda:1")] for g in grads])
    assert torch.equal(a, b.to("cuda:0"))
