"""LoRA beside frozen weights in FP8: one projection, several of one input, a model, a run."""

import copy
import json
import statistics
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

import finetune_optimized
from harness.benchmark.checking import relative_error
from harness.cli.command_line import UserError
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.workload import Frozen
from harness.model import adapters, architecture, loading
from judging.circumstances import saved_tensors
from next_steps.layers import frozen_fp8 as lesson
from next_steps.layers.frozen_fp8 import FrozenFP8Linear, frozen_fp8
from next_steps.layers.lora_linear import LoRALinearFunction
from next_steps.lessons.fp8_kernel import (
    quantize_rows_reference,
    transpose_rows_reference,
)
from next_steps.patches import patched_model
from next_steps.patches.projections import quantize_model
from tests.fp8_flags_test import workload_of
from tests.fp8_layer_test import DTYPE, rounded, wide
from tests.small_workloads import (
    TINY,
    loss_and_gradients,
    uneven_norms,
    with_adapters,
)

pytestmark = pytest.mark.usefixtures("fp8_references")
I, WIDTHS = 48, (64, 16, 32)
N = 6
ALLOWED = 1e-2 if HAS_GPU else 2e-6
KEPT = pytest.mark.parametrize("keep_turned", [True, False], ids=["all", "compact"])


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, DTYPE)


def make_linears(bias: bool = False) -> list[torch.nn.Linear]:
    """Of uneven rows, so that a scale of another row is another number."""
    made = []
    for seed, width in enumerate(WIDTHS):
        linear = torch.nn.Linear(I, width, bias=bias, device=DEVICE, dtype=DTYPE)
        linear.weight.data = drawn(width, I, seed=seed) * (1 + torch.arange(width)[:, None]).to(
            linear.weight
        )
        made.append(linear.requires_grad_(False))
    return made


def called(x: torch.Tensor, *layers: FrozenFP8Linear) -> tuple[torch.Tensor, ...]:
    none = (None,) * len(layers)
    tensors = [t for layer in layers for t in (None, None, None, layer.bias)]
    return LoRALinearFunction.apply(x, none, layers, *tensors)


# ---- The products -------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@KEPT
def test_results_and_gradient_are_those_of_the_rounded_factors(keep_turned, bias):
    linears = make_linears(bias)
    layers = frozen_fp8(linears, keep_turned)
    x = drawn(2, N // 2, I, seed=9).requires_grad_()
    outs = called(x, *layers)
    douts = [drawn(*out.shape, seed=3 + i) for i, out in enumerate(outs)]
    (dx,) = torch.autograd.grad(outs, x, douts)
    of_x = rounded(x.detach().view(N, I))
    for out, linear, layer in zip(outs, linears, layers):
        expected = of_x @ rounded(linear.weight).t()
        expected = expected + linear.bias if bias else expected
        assert out.shape == (2, N // 2, layer.out_features) and out.is_contiguous()
        assert relative_error(out.view(N, -1), expected) < ALLOWED
    rows = quantize_rows_reference(torch.cat([linear.weight for linear in linears]))
    weights = wide(transpose_rows_reference(rows)).t()  # (sum of O, I), all of one scale
    expected = rounded(*(dout.view(N, -1) for dout in douts)) @ weights
    assert relative_error(dx.view(N, I), expected) < ALLOWED


@pytest.mark.parametrize("chosen", [(0,), (1,), (2, 0), (0, 1), (1, 2), (0, 2, 1)], ids=str)
@KEPT
def test_any_of_the_projections_in_any_order(keep_turned, chosen):
    layers = frozen_fp8(make_linears(), keep_turned)
    x = drawn(N, I, seed=9).requires_grad_()
    outs = called(x, *(layers[i] for i in chosen))
    douts = [drawn(*out.shape, seed=3 + i) for i, out in enumerate(outs)]
    (dx,) = torch.autograd.grad(outs, x, douts)
    expected = rounded(*douts) @ torch.cat([layers[i].dequantized().double() for i in chosen])
    # turned codes have one scale, so that small numbers are rounded once more
    assert relative_error(dx, expected) < max(ALLOWED, 2e-3)


def test_a_result_that_nobody_used_adds_nothing():
    layers = frozen_fp8(make_linears(), keep_turned=True)
    x = drawn(N, I, seed=9).requires_grad_()
    dout = drawn(N, WIDTHS[1], seed=4)
    (dx,) = torch.autograd.grad(called(x, *layers)[1], x, dout)
    (alone,) = torch.autograd.grad(called(x, layers[1]), x, [dout])
    assert torch.equal(dx, alone)


def test_compact_has_the_same_bits_and_half_the_bytes():
    found, n_bytes = [], []
    for keep_turned in (True, False):
        layers = frozen_fp8(make_linears(), keep_turned)
        x = drawn(N, I, seed=9).requires_grad_()
        outs = called(x, *layers)
        (dx,) = torch.autograd.grad(outs, x, [torch.ones_like(out) for out in outs])
        found.append([dx, *outs])
        buffers = dict(torch.nn.ModuleList(layers).named_buffers()).values()
        n_bytes.append(sum(t.nbytes for t in buffers if t.dtype == torch.uint8))
    assert all(torch.equal(*pair) for pair in zip(*found))
    assert n_bytes == [2 * sum(WIDTHS) * I, sum(WIDTHS) * I]


def test_nothing_is_kept_for_the_backward_but_what_adapters_need():
    layers = frozen_fp8(make_linears(), keep_turned=False)
    x = drawn(N, I, seed=9).requires_grad_()
    with saved_tensors() as saved:
        called(x, *layers)
    assert not saved


@pytest.mark.parametrize("keep_turned, turns", [(True, [1, 0]), (False, [0, 1])])
def test_when_codes_are_turned(keep_turned, turns, monkeypatch):
    calls, transpose = Counter(), lesson.transpose_rows
    monkeypatch.setattr(lesson, "transpose_rows", lambda rows: calls.update("t") or transpose(rows))
    layers = frozen_fp8(make_linears(), keep_turned)
    made, x = calls["t"], drawn(N, I, seed=9).requires_grad_()
    outs = called(x, *layers)
    assert calls["t"] == made
    torch.autograd.grad(outs, x, [torch.ones_like(out) for out in outs])
    assert [made, calls["t"] - made] == turns


# ---- The layer ----------------------------------------------------------------------------------


def test_a_call_is_the_same_product():
    for bias in (False, True):
        layer = frozen_fp8(make_linears(bias), keep_turned=True)[1]
        x = drawn(2, N // 2, I, seed=9)
        assert torch.equal(layer(x), called(x, layer)[0])
        assert layer.weight is None and not any(p.requires_grad for p in layer.parameters())
        assert layer.dequantized().shape == (WIDTHS[1], I) and layer.dequantized().dtype == DTYPE


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float"])
def test_codes_and_scales_stay_what_they_are_in_another_dtype(cast):
    layers = frozen_fp8(make_linears(), keep_turned=True)
    before = {name: t.clone() for name, t in torch.nn.ModuleList(layers).named_buffers()}
    after = dict(getattr(torch.nn.ModuleList(layers), cast)().named_buffers())
    assert after.keys() == before.keys() and len(before) == 4
    assert all(t.dtype == before[name].dtype for name, t in after.items())
    assert all(torch.equal(t, before[name]) for name, t in after.items())


def test_a_state_dict_is_all_that_layers_of_other_numbers_need():
    one, other = (torch.nn.ModuleList(frozen_fp8(make_linears(), True)) for _ in range(2))
    for t in other.buffers():
        t.zero_()
    other.load_state_dict(one.state_dict())
    for mine, theirs in zip(one, other):
        assert torch.equal(mine.dequantized(), theirs.dequantized())
    pairs = zip(one[0].shared.turned, other[0].shared.turned)
    assert all(
        torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)) for mine, theirs in pairs
    )
    moved = copy.deepcopy(one)
    assert moved[0].shared is moved[2].shared is not one[0].shared


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"intermediate_size": 40}, r"shape \(40, 64\), expected multiples of 16"),
        ({"intermediate_size": 16_400}, r"rows of 32,800 numbers, expected at most 32,768"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_a_sentence(settings, words):
    config = architecture.tiny_config()
    config.update(settings)
    model = architecture.build_model(config, DTYPE, DEVICE)
    with pytest.raises(UserError, match=rf"gate_proj, up_proj .* {words}: leave --fp8 out"):
        quantize_model(model, Frozen.FP8)


# ---- A model ------------------------------------------------------------------------------------


def make_model(kept_as: Frozen = Frozen.FP8):
    torch.manual_seed(0)
    model = architecture.build_model(architecture.tiny_config(), DTYPE, DEVICE)
    return with_adapters(quantize_model(uneven_norms(model), kept_as))


def test_gradients_are_near_those_beside_plain_weights(small_model):
    """So near as FP8 is: a fault in a product makes another number."""
    torch.manual_seed(0)
    plain = architecture.build_model(architecture.tiny_config(), DTYPE, DEVICE)
    expected = loss_and_gradients(with_adapters(uneven_norms(plain)))
    found = loss_and_gradients(make_model())
    assert abs(found["loss"] - expected["loss"]) < 0.01 * expected["loss"]
    errors = {name: relative_error(t, expected[name]) for name, t in found.items()}
    assert statistics.mean(errors.values()) < 0.12 and errors["loss"] > 0


# ---- A run --------------------------------------------------------------------------------------

DTYPE_FLAG = ["--dtype", "bf16"] if HAS_GPU else []
RUN = [*TINY, *DTYPE_FLAG, "--seq-len", "8", "--steps", "3", "--kernels", "all"]
LORA = [*RUN, "--lora-rank", "2"]


@pytest.mark.parametrize("mode", ["all", pytest.param("compact", marks=pytest.mark.exhaustive)])
def test_a_run_merges_into_the_weights_that_it_started_from(
    run_script, tmp_path, small_model, mode
):
    adapter, merged, path = tmp_path / "adapter", tmp_path / "merged", tmp_path / "run.json"
    flags = ["--fp8", mode, "--json", str(path)]
    outcome = run_script(finetune_optimized, *LORA, *flags, "--save", str(adapter))
    assert outcome.code == 0, outcome.err
    record = json.loads(path.read_text())
    assert record["fp8"] == mode and record["fp8_layers"] == [1, 1]
    flags = ["--adapter", str(adapter), "--lr", "1e-30", "--fp8", mode, "--save", str(merged)]
    outcome = run_script(finetune_optimized, *RUN, *flags, "--merge")
    assert outcome.code == 0, outcome.err
    assert "nothing tells whether" not in outcome.out  # the digests agree
    trained, weights = (
        load_file(adapter / "adapter_model.safetensors"),
        load_file(merged / "model.safetensors"),
    )
    before = loading.load_model(workload_of(*LORA)).state_dict()
    name = "model.layers.0.self_attn.k_proj"
    a, b = (trained[f"base_model.model.{name}.lora_{x}.weight"].float() for x in "AB")
    expected = before[f"{name}.weight"].cpu().float() + b @ a
    assert b.abs().max() > 0
    torch.testing.assert_close(weights[f"{name}.weight"].float(), expected, atol=1e-6, rtol=1e-2)
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(weights[norm], before[norm].cpu())


def test_one_digest_for_both_ways_and_another_beside_plain_weights(small_model):
    digests, kinds = [], []
    for flags in (["--fp8"], ["--fp8", "compact"], []):
        workload = workload_of(*LORA, *flags)
        digests.append(adapters.frozen_digest(patched_model.load_with_adapters(workload)))
        kinds.append(adapters.kept_as(workload))
    assert digests[0] == digests[1] != digests[2]
    assert kinds[0] == kinds[1] != kinds[2]
