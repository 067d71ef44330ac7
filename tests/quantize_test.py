"""A model whose projections are in NF4, whether loaded, adapted, recomputed or sharded."""

import copy
from dataclasses import replace

import peft
import pytest
import torch

from harness.benchmark.checking import DEVICE, HAS_GPU
from harness.cli.command_line import UserError
from harness.cli.flags import RECOMPUTE
from harness.cli.workload import Frozen
from harness.model import architecture, loading
from harness.model.adapters import merged_weights
from harness.model.patching import replace_modules
from harness.profiling.kernel_facts import MODEL_KERNELS
from next_steps.patches import patched_model
from next_steps.patches.apply_kernels import apply_kernels
from next_steps.patches.patched_model import draw_quantized, load_quantized
from next_steps.patches.projections import NF4Linear, quantize_model
from next_steps.patches.recompute import set_recompute
from tests.fixtures import needs_gpu
from tests.small_workloads import (
    largest_error,
    loss_and_gradients,
    tiny_batch,
    tiny_workload,
    uneven_norms,
    with_adapters,
)
from tests.two_processes import in_two_processes, one_gpu_is_too_few

NF4 = "--lora-rank", "4", "--quantize", "nf4"
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def assert_same_step(model: torch.nn.Module, expected: dict, allowed: float) -> None:
    error, name = largest_error(loss_and_gradients(model), expected)
    assert error < allowed, name


def make_linear(dtype=torch.float32, out_features=24, in_features=64) -> torch.nn.Linear:
    linear = torch.nn.Linear(in_features, out_features, bias=False, dtype=dtype, device=DEVICE)
    return linear.requires_grad_(False)


def make_model(kept_as: Frozen = Frozen.NF4, **settings) -> torch.nn.Module:
    """tiny, quantized."""
    config = architecture.tiny_config()
    config.update(settings)
    torch.manual_seed(0)
    # a GPU writes FP8's products in bf16
    dtype = torch.bfloat16 if HAS_GPU and kept_as is not Frozen.NF4 else torch.float32
    model = architecture.build_model(config, dtype, DEVICE)
    return quantize_model(uneven_norms(model), kept_as)


def assert_same_state(one: torch.nn.Module, other: torch.nn.Module) -> None:
    states = one.state_dict(), other.state_dict()
    assert list(states[0]) == list(states[1])
    assert [name for name, t in states[0].items() if not torch.equal(t, states[1][name])] == []


# ---- One layer ---------------------------------------------------------------------------------


def test_the_product_is_that_of_a_linear_layer_with_the_dequantized_weight():
    linear = make_linear()
    quantized = NF4Linear(linear)
    x = torch.randn(2, 3, 64, device=DEVICE, requires_grad=True)
    dense = torch.nn.functional.linear(x, quantized.dequantized())
    assert torch.equal(quantized(x), dense)
    assert quantized.dequantized().dtype == linear.weight.dtype
    error = (quantized.dequantized() - linear.weight).norm() / linear.weight.norm()
    assert 0.01 < error < 0.2
    assert quantized.weight is None and quantized.bias is None and not list(quantized.parameters())


CASTS = {
    "bf16": (torch.bfloat16, lambda layer: layer.to(torch.bfloat16)),
    "bfloat16()": (torch.bfloat16, lambda layer: layer.bfloat16()),
    "half()": (torch.float16, lambda layer: layer.half()),
    "there and back": (torch.float32, lambda layer: layer.half().float()),
    "in a model": (torch.float16, lambda layer: torch.nn.Sequential(layer).half()[0]),
}


@pytest.mark.parametrize("cast", CASTS)
def test_codes_and_scales_stay_what_they_are_in_another_dtype(cast):
    dtype, change = CASTS[cast]
    layer = NF4Linear(make_linear())
    weight, before = layer.dequantized(), copy.deepcopy(layer.state_dict())
    layer = change(layer)
    assert torch.equal(layer.dequantized(), weight.to(dtype))
    assert layer.dequantized().dtype == layer.compute_dtype == dtype
    for name, t in layer.state_dict().items():
        assert t.dtype == before[name].dtype and torch.equal(t, before[name])


def test_a_state_dict_is_all_that_a_layer_of_other_numbers_needs():
    one, other = (NF4Linear(make_linear()) for _ in range(2))
    assert not torch.equal(one.dequantized(), other.dequantized())
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.dequantized(), other.dequantized())
    assert torch.equal(copy.deepcopy(one).dequantized(), one.dequantized())


def test_a_layer_may_move_and_be_without_memory():
    layer = NF4Linear(make_linear())
    there = copy.deepcopy(layer).to("meta")
    assert all(t.is_meta for t in there.buffers())
    assert NF4Linear(make_linear().to("meta")).codes.is_meta
    assert torch.equal(layer.to("cpu").to(DEVICE).dequantized(), layer.dequantized())


def test_one_graph_under_torch_compile():
    layer = NF4Linear(make_linear())
    x = torch.randn(5, 64, device=DEVICE, requires_grad=True)
    dy = torch.randn(5, 24, device=DEVICE)
    compiled = torch.compile(lambda x: layer(2 * x), fullgraph=True, backend="aot_eager")
    found, expected = (
        (y.detach(), *torch.autograd.grad(y, x, dy)) for y in (compiled(x), layer(2 * x))
    )
    torch.testing.assert_close(found, expected)


# ---- A model -----------------------------------------------------------------------------------


def test_projections_are_quantized_and_nothing_else():
    plain = loading.load_model(tiny_workload())
    model = quantize_model(copy.deepcopy(plain), Frozen.NF4)
    kinds = {name: type(module) for name, module in model.named_modules()}
    quantized = [name for name, kind in kinds.items() if kind is NF4Linear]
    assert len(quantized) == 7 * 2
    assert {name.rpartition(".")[2] for name in quantized} == PROJECTIONS
    assert kinds["lm_head"] is torch.nn.Linear
    for name, weight in model.named_parameters():
        assert torch.equal(weight, plain.get_parameter(name))
    of_plain, of_model = (
        {name.rpartition(".")[0] for name, _ in each.named_parameters()} for each in (plain, model)
    )
    assert of_plain - set(quantized) == of_model


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("pretrained", [False, True], ids=["drawn", "pretrained"])
def test_weights_are_those_of_load_model(pretrained, dtype, tmp_path):
    workload = tiny_workload("--dtype", dtype, "--seed", "3", *NF4)
    if pretrained:
        loading.load_model(tiny_workload("--seed", "4")).save_pretrained(tmp_path)
        workload = replace(workload, model=str(tmp_path))
    model = load_quantized(workload)
    assert_same_state(model, quantize_model(loading.load_model(workload), Frozen.NF4))
    buffers = dict(loading.load_model(workload).named_buffers())
    found = dict(model.named_buffers())
    assert all(torch.equal(found[name], t) for name, t in buffers.items())
    assert model.training and not model.config.use_cache


def test_drawn_weights_of_a_head_that_is_the_embedding():
    config = architecture.tiny_config()
    config.tie_word_embeddings = True
    torch.manual_seed(5)
    plain = architecture.build_model(copy.deepcopy(config), torch.float32, DEVICE)
    torch.manual_seed(5)
    model = draw_quantized(config, torch.float32, Frozen.NF4)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_state(model, quantize_model(plain, Frozen.NF4))


@pytest.mark.parametrize("pretrained", [False, True])
def test_never_more_than_one_layer_is_on_the_gpu_in_its_own_dtype(
    pretrained, tmp_path, monkeypatch
):
    """The meta device stands for the GPU, or for the host's memory where weights are drawn."""
    workload = tiny_workload(*NF4)
    if pretrained:
        loading.load_model(workload).save_pretrained(tmp_path)
        workload = tiny_workload("--model", str(tmp_path), *NF4)
        monkeypatch.setattr(patched_model, "DEVICE", "meta")
    counts, models = [], []
    quantize_layer = patched_model.quantize_layer
    for name in ("build_model", "load_weights"):
        make = getattr(patched_model, name)
        remember = lambda *args, make=make: models.append(make(*args)) or models[-1]  # noqa: E731
        monkeypatch.setattr(patched_model, name, remember)

    def on_gpu(layer: torch.nn.Module) -> bool:
        return any(p.is_meta == pretrained and p.ndim > 1 for p in layer.parameters())

    def count(layer: torch.nn.Module, kept_as: Frozen) -> None:
        counts.append([on_gpu(each) for each in models[0].model.layers].count(True))
        quantize_layer(layer, kept_as)

    monkeypatch.setattr(patched_model, "quantize_layer", count)
    load_quantized(workload)
    assert counts == [1, 1]


@needs_gpu
def test_the_peak_of_loading_is_that_of_one_layer():
    config = architecture.llama_3_1_8b_config()
    config.update({"num_hidden_layers": 4, "vocab_size": 1000})
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = draw_quantized(config, torch.bfloat16, Frozen.NF4)
    kept = torch.cuda.memory_allocated() - before
    numbers = architecture.ModelFacts(config).layer_weights
    assert kept < 0.52 * 4 * numbers + 2 * 3 * 1000 * 4096
    # one layer, and of its largest weight what quantizing takes: fp32, quotients, int32 codes
    largest = config.hidden_size * config.intermediate_size
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < kept + 2 * numbers + 16 * largest
    del model


def test_what_cannot_be_quantized_is_refused_with_a_sentence():
    with pytest.raises(UserError, match=r"gate_proj, .* shape \(161, 30\), 4,830 numbers"):
        config = {"hidden_size": 30, "intermediate_size": 161, "head_dim": 32}
        make_model(**config, num_attention_heads=2)
    model = loading.load_model(tiny_workload())
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("inf")
    with pytest.raises(UserError, match=r"up_proj .* infinite or NaN .*: leave --quantize out"):
        quantize_model(model, Frozen.NF4)


# ---- With adapters -----------------------------------------------------------------------------


@pytest.mark.parametrize("kept_as", Frozen)
def test_a_model_whose_projections_are_no_longer_plain_is_refused(kept_as):
    """The adapters were quantized too, or nothing was, without a word."""
    adapted, twice = (loading.load_model(tiny_workload()) for _ in range(2))
    for model in (with_adapters(adapted), quantize_model(twice, kept_as)):
        with pytest.raises(UserError, match=r"a layer's plain matrices are .*quantize once, bef"):
            quantize_model(model, kept_as)


def test_peft_takes_it_for_a_linear_layer():
    model = with_adapters(make_model())
    adapted = model.model.layers[0].self_attn.k_proj
    assert type(adapted) is peft.tuners.lora.Linear and type(adapted.base_layer) is NF4Linear
    assert adapted.lora_A["default"].weight.shape == (4, 64)
    assert adapted.lora_B["default"].weight.shape == (32, 4)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)
    assert adapted.lora_A["default"].weight.device == adapted.base_layer.codes.device


def test_adapters_train_as_around_the_dense_weight():
    model = with_adapters(make_model())
    expected = loss_and_gradients(model)

    def dense(linear: NF4Linear) -> torch.nn.Linear:
        weight = linear.dequantized()
        made = torch.nn.Linear(*weight.T.shape, bias=False, device="meta")
        made.weight = torch.nn.Parameter(weight, requires_grad=False)
        return made

    assert replace_modules(model, NF4Linear, dense) == 2 * len(PROJECTIONS)
    assert_same_step(model, expected, 1e-6)


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], [*PROJECTIONS]], ids=len)
def test_merged_it_is_an_ordinary_model(targets):
    model = with_adapters(make_model(), target_modules=targets)
    expected = loss_and_gradients(model)["loss"]
    plain = architecture.build_model(model.config, torch.float32, DEVICE)
    plain.load_state_dict(merged_weights(model, model.state_dict()))
    batch = tiny_batch()
    loss = plain(input_ids=batch.input_ids, labels=batch.labels).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kept_as", Frozen)
@pytest.mark.usefixtures("fp8_references")
def test_kernels_and_recomputing_change_no_number(kept_as):
    """The fused layer takes projections whose weight is quantized, too."""
    batch = tiny_batch(2, 6)
    expected = loss_and_gradients(with_adapters(make_model(kept_as)), batch)
    model = apply_kernels(with_adapters(make_model(kept_as)), MODEL_KERNELS)
    assert "TritonRMSNorm" in {type(module).__name__ for module in model.modules()}
    found = loss_and_gradients(model, batch)
    # a number that is rounded to FP8's next code is 2^-4 away
    error, name = largest_error(found, expected)
    assert error < (1e-5 if kept_as is Frozen.NF4 else 0.1 if HAS_GPU else 2e-2), name
    for level in RECOMPUTE:
        again = loss_and_gradients(set_recompute(model, level), batch)
        error, name = largest_error(again, found)
        assert error < 1e-6, (level, name)


# ---- In two processes --------------------------------------------------------------------------


def train_sharded(rank, device) -> dict[str, torch.Tensor]:
    """Gradients where fully_shard has divided the parameters; and where each code is."""
    from torch.distributed.fsdp import fully_shard

    model = with_adapters(make_model()).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    codes = model.model.layers[0].mlp.up_proj.base_layer.codes
    assert type(codes) is torch.Tensor and codes.numel() == 160 * 64 // 2
    found = loss_and_gradients(model)
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}


@pytest.mark.exhaustive
@one_gpu_is_too_few
def test_parameters_are_sharded_and_codes_are_whole(tmp_path):
    results = in_two_processes(train_sharded, tmp_path)
    expected = loss_and_gradients(with_adapters(make_model()))
    for found in results:
        found = {name: t.to(DEVICE) for name, t in found.items()}
        error, name = largest_error(found, expected)
        assert error < 1e-5, name
