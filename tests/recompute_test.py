"""What is computed again is what was there; only what a level says is; and memory falls by that."""

import peft
import pytest
import torch
from transformers import DynamicCache

from harness.cli.device import HAS_GPU
from harness.cli.flags import RECOMPUTE
from harness.cli.workload import Workload
from harness.data.dataset import Batch
from harness.model import architecture
from harness.model.known_texts import CACHE
from harness.model.loading import load_model
from harness.profiling.kernel_facts import MODEL_KERNELS, PLAYBOOK_KERNELS
from next_steps.memory import meta_step
from next_steps.memory.peak_attribution import kept_blocks
from next_steps.patches import recompute
from next_steps.patches.apply_kernels import apply_kernels
from next_steps.patches.recompute import set_recompute
from tests.calls import Calls
from tests.small_workloads import (
    largest_error,
    loss_and_gradients,
    tiny_batch,
    tiny_workload,
    uneven_norms,
    with_adapters,
)

KERNELS = [
    [],
    pytest.param([*PLAYBOOK_KERNELS, "swiglu", "rope"], marks=pytest.mark.exhaustive),
    MODEL_KERNELS,
]
SETS = pytest.mark.parametrize("kernels", KERNELS, ids=lambda names: "+".join(names) or "none")
LEVELS = pytest.mark.parametrize("level", RECOMPUTE)
# Eager norms in fp32: three gradients of one tensor are added up in another order
ALLOWED = {"bf16": 0.0, "fp32": 1e-6}
LAYERS = 2  # of the tiny model


def make_model(kernels, dtype="fp32") -> torch.nn.Module:
    return uneven_norms(apply_kernels(load_model(tiny_workload("--dtype", dtype)), kernels))


def few_tokens() -> Batch:
    """Of each row Triton's interpreter makes a program."""
    return tiny_batch(2, 4)


def assert_close(found: dict, expected: dict, allowed: float, what: str = "") -> None:
    error, name = largest_error(found, expected)
    assert error <= allowed, f"{what}: {name} is off by {error:.1e}"


def assert_two_backwards_give_twice_the_gradients(model) -> None:
    batch = few_tokens()
    once = loss_and_gradients(model, batch)
    model.zero_grad()
    loss = model(**batch.inputs()).loss
    loss.backward(retain_graph=True)
    loss.backward()
    twice = {name: p.grad / 2 for name, p in model.named_parameters()}
    assert_close(twice | {"loss": loss.detach()}, once, 1e-6)


def calls_of_a_step(model) -> Calls:
    with Calls() as calls:
        loss_and_gradients(model, few_tokens())
    return calls


# ---------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("dtype", ALLOWED)
@SETS
def test_every_level_has_the_loss_and_gradients_of_none(kernels, dtype):
    model, batch = make_model(kernels, dtype), few_tokens()
    expected = loss_and_gradients(model, batch)
    for level in RECOMPUTE:
        found = loss_and_gradients(set_recompute(model, level), batch)
        assert_close(found, expected, ALLOWED[dtype], level)


def drawn(model, seed: int) -> dict[str, torch.Tensor]:
    """The loss and gradients with this seed of the dropouts."""
    torch.manual_seed(seed)
    return loss_and_gradients(model, few_tokens())


@pytest.mark.exhaustive
@SETS
def test_every_level_has_the_loss_and_the_adapters_gradients_of_none(kernels):
    model = with_adapters(make_model(kernels))
    expected = loss_and_gradients(model, few_tokens())
    assert len(expected) == 1 + 2 * 7 * LAYERS
    for level in RECOMPUTE:
        # six, not three, gradients of one tensor where the products are peft's
        allowed = 2 * ALLOWED["fp32"]
        found = loss_and_gradients(set_recompute(model, level), few_tokens())
        assert_close(found, expected, allowed, level)


@pytest.mark.parametrize("attention_pays", [False, True])
@pytest.mark.parametrize("attention", [0.0, 0.5])
@pytest.mark.parametrize(
    "kernels",
    [[], pytest.param(MODEL_KERNELS, marks=pytest.mark.exhaustive)],
    ids=["none", "all"],
)
def test_what_runs_twice_drops_the_same_both_times(kernels, attention, attention_pays, monkeypatch):
    """LoRA's dropout drew its masks anew: gradients were wrong by up to twice their size."""
    monkeypatch.setattr(recompute, "attention_pays", lambda *_: attention_pays)
    model = with_adapters(make_model(kernels), lora_dropout=0.5)
    model.config.attention_dropout = attention
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = attention

    expected, again = drawn(model, 5), loss_and_gradients(model, few_tokens())
    assert largest_error(again, expected)[0] > 0.1, "nothing is dropped: cannot fail"
    for level in RECOMPUTE:
        found = drawn(set_recompute(model, level), 5)
        assert_close(found, expected, 2 * ALLOWED["fp32"], level)


@pytest.mark.parametrize("attention_pays", [False, True])
@pytest.mark.parametrize("kind", [peft.LoHaConfig, peft.LoKrConfig])
def test_what_draws_without_a_dropout_draws_the_same_both_times(kind, attention_pays, monkeypatch):
    """peft's other dropouts are no modules of torch's: gradients were wrong by up to 260 %."""
    monkeypatch.setattr(recompute, "attention_pays", lambda *_: attention_pays)
    config = kind(r=4, target_modules=["q_proj", "up_proj"], rank_dropout=0.5, init_weights=False)
    model = peft.inject_adapter_in_model(config, make_model([])).train()
    expected = drawn(model, 5)
    others = [drawn(model, seed) for seed in range(4)]
    assert max(largest_error(other, expected)[0] for other in others) > 0.1, "cannot fail"
    found = drawn(set_recompute(model, "layer"), 5)
    assert_close(found, expected, 2 * ALLOWED["fp32"])


@pytest.mark.parametrize("attention_pays", [False, True])
@pytest.mark.parametrize("kernels", [[], MODEL_KERNELS], ids=["none", "all"])
def test_a_cache_is_filled_once_by_layers_that_run_twice(kernels, attention_pays, monkeypatch):
    """It got every token twice, in the forward and in the backward, and gradients or an error."""
    monkeypatch.setattr(recompute, "attention_pays", lambda *_: attention_pays)
    model, ids, found = make_model(kernels), few_tokens().input_ids, []
    for level in ("none", "layer"):
        set_recompute(model, level).zero_grad()
        cache = DynamicCache()
        for part in (slice(2), slice(2, None)):
            loss = model(ids[:, part], labels=ids[:, part], use_cache=True, **{CACHE: cache}).loss
        loss.backward()
        filled = {f"keys of {i}": layer.keys.detach() for i, layer in enumerate(cache.layers)}
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append({"loss": loss.detach(), **filled, **gradients})
    assert found[0]["keys of 1"].shape[2] == ids.shape[1]
    assert_close(found[1], found[0], ALLOWED["fp32"])


def test_a_result_computed_from_something_else_would_be_noticed(monkeypatch):
    model, batch = make_model([]), few_tokens()
    expected = loss_and_gradients(model, batch)
    right = recompute.again

    def wrong(ctx):
        inputs, result = right(ctx)
        with torch.enable_grad():
            return inputs, 1.01 * result

    monkeypatch.setattr(recompute, "again", wrong)
    found = loss_and_gradients(set_recompute(model, "norm"), batch)
    assert largest_error(found, expected)[0] > 1e-3


@LEVELS
def test_two_backwards_through_one_graph(level):
    assert_two_backwards_give_twice_the_gradients(set_recompute(make_model([]), level))


@LEVELS
def test_frozen_parameters(level):
    model, batch = make_model([]), few_tokens()
    expected = loss_and_gradients(model, batch)
    frozen = [model.model.embed_tokens.weight, model.model.layers[0].input_layernorm.weight]
    for parameter in frozen:
        parameter.requires_grad_(False)
    found = loss_and_gradients(set_recompute(model, level), batch)
    assert len(found) == len(expected) - 2
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="level is 'layers', expected None or one of none, norm"):
        set_recompute(make_model([]), "layers")


@SETS
def test_no_level_is_the_model_as_it_was(kernels):
    model = make_model(kernels)
    before = calls_of_a_step(model).counts
    for level in RECOMPUTE:
        set_recompute(model, level)
    assert calls_of_a_step(set_recompute(model, None)).counts == before


def test_evaluation_keeps_nothing_and_computes_nothing_twice():
    model, batch = make_model([]).eval(), few_tokens()
    with torch.no_grad():
        expected = model(**batch.inputs()).loss
        for level in RECOMPUTE:
            assert torch.equal(set_recompute(model, level)(**batch.inputs()).loss, expected)


# ---------------------------------------------------------------- what runs twice


@SETS
@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_no_product_runs_twice_but_a_layers(kernels, adapted):
    model = with_adapters(make_model(kernels)) if adapted else make_model(kernels)
    products = {level: calls_of_a_step(set_recompute(model, level)).products for level in RECOMPUTE}
    assert products["norm"] == products["mlp"] == products["none"] < products["layer"]
    in_mlp = 3 if "swiglu" in kernels and "fused_layer" not in kernels else 2
    # the last product's result is nobody's input, unless it is made within a Function
    assert adapted or products["layer"] == products["none"] + LAYERS * (4 + in_mlp)


def test_gradient_checkpointing_computes_what_the_level_layer_does():
    model = make_model(MODEL_KERNELS)
    expected = calls_of_a_step(set_recompute(model, "layer"))
    set_recompute(model, None).gradient_checkpointing_enable({"use_reentrant": False})
    found = calls_of_a_step(model)
    assert (found.counts, found.products) == (expected.counts, expected.products)


def test_a_norm_runs_twice_and_an_activation_in_mlp_alone():
    model = make_model([])
    counts = {level: calls_of_a_step(set_recompute(model, level)).counts for level in RECOMPUTE}
    norms = 2 * LAYERS
    rsqrt = [counts[level]["rsqrt"] for level in RECOMPUTE]
    # a layer's recomputation ends before the last product; its norms are before that
    assert rsqrt == [norms + 1, 2 * norms + 1, 2 * norms + 1, 2 * norms + 1]
    silu = [counts[level]["silu"] for level in RECOMPUTE]
    assert silu == [LAYERS, LAYERS, 2 * LAYERS, 2 * LAYERS]


def test_attention_runs_twice_only_where_it_does_not_pay_to_keep_it(monkeypatch):
    # in fp32 a GPU has no kernel for attention whose heads share keys
    model = set_recompute(make_model([], "bf16" if HAS_GPU else "fp32"), "layer")
    for pays, times in ((False, 2), (True, 1)):
        monkeypatch.setattr(recompute, "attention_pays", lambda config, seq_len, pays=pays: pays)
        found = [n for name, n in calls_of_a_step(model).counts.items() if "attention" in name]
        assert found and found[0] == times * LAYERS


def test_attention_is_kept_for_long_sequences():
    config = architecture.llama_3_1_8b_config()
    assert not recompute.attention_pays(config, 5071)
    assert recompute.attention_pays(config, 5072)


# ---------------------------------------------------------------- what is kept


def kept_by_arithmetic(level: str, fused: bool, config) -> float:
    """bf16 numbers that a layer keeps per token, by the table in docs/recompute.md."""
    h, i = config.hidden_size, config.intermediate_size
    q, k = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    if level == "layer":
        return h  # no attention: the sequence is short
    numbers = 2 * h + q + 2 * k + q + 2 * i  # both residuals; q, k, v, attention; gate and up
    if level in ("none", "norm"):
        numbers += i if fused else 2 * i  # the product; and silu(gate)
    if level == "none":
        numbers += 2 * h if fused else 6 * h  # the norms' outputs; twice fp32, once bf16, - x
    return numbers


@pytest.mark.parametrize("kernels", [[], MODEL_KERNELS], ids=["none", "all"])
@LEVELS
def test_a_layer_keeps_what_the_arithmetic_says(level, kernels):
    config = architecture.llama_3_1_8b_config()
    config.num_hidden_layers, config.vocab_size = 3, 512
    workload = Workload(batch_size=2, seq_len=1024, kernels=tuple(kernels), recompute=level)
    n_tokens = 2 * 1024
    kept = {}
    for n_layers in (1, 3):  # what is kept outside of the layers is in both
        config.num_hidden_layers = n_layers
        ledger = meta_step.run_step(config, workload)
        kept[n_layers] = sum(block.n_bytes for block in kept_blocks(ledger))
    numbers = (kept[3] - kept[1]) / 2 / n_tokens / 2
    expected = kept_by_arithmetic(level, bool(kernels), config)
    assert numbers == pytest.approx(expected, rel=3e-3)  # rstd and lse of each row
