"""Does each family of models train and answer with the kernels as with transformers' own code?

What is the same in all families is asked of LLaMA, in apply_kernels_test.py.  Asked here is what a
row of families.py says: norms over heads, biases, layers without a rotation.
"""

import copy

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import finetune_baseline
import finetune_optimized
from harness.benchmark.checking import assert_all_passed, relative_error
from harness.cli.device import DEVICE
from harness.cli.flags import RECOMPUTE
from harness.cli.workload import Frozen
from harness.data import dataset
from harness.model import architecture, packed_attention
from harness.model.families import EXAMPLES, FAMILIES, part_outside
from harness.profiling.kernel_facts import MODEL_KERNELS
from judging.circumstances import OTHER_DEFAULTS, default_dtype
from next_steps.finetuning import distill
from next_steps.memory import estimate
from next_steps.memory.memory_ledger import KINDS
from next_steps.patches.apply_kernels import apply_kernels
from next_steps.patches.projections import fp8_layers, quantize_model
from next_steps.patches.recompute import set_recompute
from tests.apply_kernels_test import (
    LAYERS,
    SIZES,
    VOCABULARY,
    T,
    assert_same_step,
    checks_against,
    loss_and_gradients,
    make_batch,
    make_model,
    packed_positions,
    padding_mask,
    small_config,
    without_and_with,
)
from tests.conftest import assert_refused
from tests.small_workloads import in_float64, tiny_workload, with_adapters

EACH = pytest.mark.parametrize("kind", FAMILIES)
NOT_LLAMA = [kind for kind in FAMILIES if kind != "llama"]
OTHERS = pytest.mark.parametrize("kind", NOT_LLAMA)


def slow(kinds):
    """What takes long: always of LLaMA and of one with norms over heads."""
    rarely = pytest.mark.exhaustive
    often = "llama", "qwen3"
    params = [pytest.param(kind, marks=() if kind in often else rarely) for kind in kinds]
    return pytest.mark.parametrize("kind", params)


def exact(kind: str, **values) -> torch.nn.Module:
    """The model without kernels, in float64 from end to end."""
    return in_float64(make_model(kind=kind, **values), FAMILIES[kind].part("RMSNorm"))


# ---------------------------------------------------------------- the table


@EACH
def test_a_row_says_what_transformers_builds(kind):
    family, model = FAMILIES[kind], make_model(kind=kind)
    attention = [layer.self_attn for layer in model.model.layers]
    biased = {n.split(".")[-2] for n, _ in model.named_parameters() if n.endswith("bias")}
    assert biased == set(family.bias)
    assert all(hasattr(each, "q_norm") == family.head_norms for each in attention)
    rotated = [bool(getattr(each, "use_rope", True)) for each in attention]
    assert rotated == ([True, False] if family.rotates else [True, True])
    for part in ("RMSNorm", "MLP", "Attention", "DecoderLayer", "ForCausalLM"):
        assert any(type(module) is family.part(part) for module in model.modules())
    assert part_outside(model) is None


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_default_dtype_changes_no_step(kind):
    model, batch = make_model(MODEL_KERNELS, kind=kind), make_batch(num_items_in_batch=7)
    expected = loss_and_gradients(model, batch)
    for dtype in OTHER_DEFAULTS:
        with default_dtype(dtype):
            found = loss_and_gradients(model, batch)
        assert found["loss"].dtype == torch.float32
        assert all(torch.equal(found[name], t) for name, t in expected.items()), dtype


BILLIONS = {"llama": 8.03, "mistral": 7.25, "qwen2": 7.62, "qwen3": 8.19, "smollm3": 3.08}


@EACH
def test_an_example_has_the_parameters_that_its_page_on_the_hub_says(kind):
    config = FAMILIES[kind].example_config()
    assert round(architecture.ModelFacts(config).parameters / 1e9, 2) == BILLIONS[kind]
    projections = config.num_hidden_layers * architecture.ModelFacts(config).layer_weights
    others = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    rest = architecture.ModelFacts(config).parameters - projections - others
    assert 0 < rest < 1e6, "norms and biases"


OUTSIDE = {
    "gemma": ({}, "norms that multiply by 1 + weight"),
    "gemma2": ({}, "a soft cap (attn_logit_softcapping = 50.0)"),
    "phi3": ({"pad_token_id": None}, "packed projections (qkv_proj)"),
    "mixtral": ({"num_local_experts": 2}, "a mixture of experts"),
    "mistral": ({"sliding_window": 8}, "a sliding window of 8 tokens in attention"),
    "qwen2": (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "a sliding window of 8 tokens in attention",
    ),
    "olmo2": ({}, None),
}


def model_outside(kind: str) -> torch.nn.Module:
    fields = SIZES | OUTSIDE[kind][0] | {"vocab_size": VOCABULARY}
    return AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **fields))


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_no_row_has_is_named(kind):
    assert part_outside(model_outside(kind)) == OUTSIDE[kind][1]


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_no_row_has_is_refused_by_its_name(kind, tmp_path, run_script):
    model, part = model_outside(kind), OUTSIDE[kind][1]
    with pytest.raises(TypeError) as refusal:
        apply_kernels(model)
    said = f"model is a {type(model).__name__}" + (f" with {part}, " if part else ", ")
    assert str(refusal.value).startswith(said + "expected a causal language model of llama, ")
    model.config.save_pretrained(tmp_path)
    expected = part or f"these scripts train models of {', '.join(FAMILIES)}"
    for script in (finetune_baseline, finetune_optimized):
        outcome = run_script(script, "--model", str(tmp_path), "--random-init")
        assert_refused(outcome, expected.removesuffix(" in attention"))


# ---------------------------------------------------------------- training

INPUTS = {
    "nothing else": dict,
    "padding on both sides": lambda: {"attention_mask": padding_mask()},
    "packed sequences": packed_positions,
}


@OTHERS
@pytest.mark.parametrize("inputs", INPUTS)
def test_training_has_the_unpatched_loss_and_gradients(kind, inputs):
    batch = make_batch(**INPUTS[inputs]())
    ref64 = loss_and_gradients(exact(kind), batch)
    eager, found = (loss_and_gradients(model, batch) for model in without_and_with(kind=kind))
    assert_all_passed(checks_against(ref64, found, eager, torch.float32))


@pytest.mark.exhaustive
@OTHERS
@pytest.mark.parametrize("name", MODEL_KERNELS)
def test_each_kernel_alone_has_the_unpatched_loss_and_gradients(kind, name):
    model, patched = without_and_with([name], kind=kind)
    assert_same_step(patched, model)


@pytest.mark.parametrize("names", [MODEL_KERNELS, ["rope"]], ids=["all", "rope"])
def test_norms_over_heads_are_in_the_kernel_of_the_rotation(names, launches):
    """Equal numbers prove nothing about a kernel that does not run."""
    loss_and_gradients(make_model(names, kind="qwen3"))
    assert launches["qk_norm_rope_fwd"] == launches["qk_norm_rope_bwd"] == LAYERS
    assert not launches["rope"]
    launches.clear()
    loss_and_gradients(make_model(names, kind="smollm3"))
    assert launches["rope"] == LAYERS, "of two layers one, forward and backward"
    assert not launches["qk_norm_rope_fwd"]


def hooked(attention):
    attention.q_norm.register_forward_hook(lambda module, inputs, output: 2 * output)


def replaced(attention):
    attention.k_norm = torch.nn.Identity()


def with_another_eps(attention):
    attention.q_norm.variance_epsilon = 0.5


@pytest.mark.parametrize("change", [hooked, replaced, with_another_eps], ids=lambda c: c.__name__)
def test_a_head_norm_that_somebody_changed_is_called(change):
    models, plain = without_and_with(kind="qwen3"), loss_and_gradients(make_model(kind="qwen3"))
    for model in models:
        change(model.model.layers[0].self_attn)
    expected = loss_and_gradients(models[0])
    assert relative_error(expected["loss"], plain["loss"]) > 1e-5, "this comparison cannot fail"
    assert_same_step(models[1], expected)


@EACH
def test_bf16_is_at_most_twice_as_wrong_as_without_the_kernels(kind):
    ref64 = loss_and_gradients(exact(kind, dtype=torch.bfloat16))
    eager, found = (
        loss_and_gradients(m) for m in without_and_with(kind=kind, dtype=torch.bfloat16)
    )
    assert_all_passed(checks_against(ref64, found, eager))


@pytest.mark.parametrize("level", RECOMPUTE)
@slow(NOT_LLAMA)
def test_every_level_of_recomputation_has_the_same_gradients(kind, level):
    expected = loss_and_gradients(make_model(kind=kind))
    for names in ((), MODEL_KERNELS):
        assert_same_step(set_recompute(make_model(names, kind=kind), level), expected)


@OTHERS
def test_packed_samples_attend_within_themselves(kind):
    ids = make_batch()["input_ids"].view(1, -1)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]], device=DEVICE)
    packed = {"position_ids": positions, "cu_seq_lens_q": ends, "max_length_q": 5}
    batch = {"input_ids": ids, "labels": ids, **packed, "sample_lengths": (3, 5)}
    models = without_and_with(kind=kind)
    together = loss_and_gradients(models[0], {"input_ids": ids, "labels": ids})
    for model in models:
        packed_attention.use_packed_attention(model)
    expected = loss_and_gradients(models[0], batch)
    assert relative_error(expected["loss"], together["loss"]) > 1e-5, "this comparison cannot fail"
    assert_same_step(models[1], expected, batch)


# ---------------------------------------------------------------- with adapters, 4 bits, FP8


@slow(NOT_LLAMA)
@pytest.mark.parametrize("quantized", [False, True])
def test_adapters_have_the_unpatched_gradients(kind, quantized):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # NF4 takes blocks of 64
    models = []
    for names in ((), MODEL_KERNELS):
        model = make_model(kind=kind, **sizes)
        model = with_adapters(quantize_model(model, Frozen.NF4) if quantized else model)
        models.append(apply_kernels(model, names))
    expected = loss_and_gradients(models[0])
    assert_same_step(models[1], expected)
    trained = {name for name, gradient in expected.items() if gradient is not None}
    assert all("lora" in name for name in trained - {"loss"})


@slow(NOT_LLAMA)
def test_fp8_takes_all_layers_and_stays_near(kind):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    plain = make_model(MODEL_KERNELS, kind=kind, **sizes)
    model = fp8_layers(copy.deepcopy(plain))
    expected, found = map(loss_and_gradients, (plain, model))
    # e4m3 has 3 bits after the point; the gradients of two layers are that far off together
    errors = {name: relative_error(found[name], value) for name, value in expected.items()}
    assert 0 < errors["loss"] < 0.05
    biases = [error for name, error in errors.items() if name.endswith("bias")]
    assert len(biases) == 2 * len(FAMILIES[kind].bias) and all(0 < e < 0.5 for e in biases)


# ---------------------------------------------------------------- evaluation


@slow(FAMILIES)
@pytest.mark.parametrize("cache", [True, False])
def test_generation_from_padded_prompts(kind, cache, launches):
    ids, mask = make_batch()["input_ids"], torch.ones(2, T, dtype=torch.int64, device=DEVICE)
    mask[0, :2] = 0  # on the left
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True, "use_cache": cache}
    model, patched = (each.eval() for each in without_and_with(kind=kind))
    expected, found = (m.generate(ids, attention_mask=mask, **options) for m in (model, patched))
    assert torch.equal(found.sequences, expected.sequences)
    assert relative_error(*map(torch.cat, (found.logits, expected.logits))) < 1e-5
    assert launches["swiglu_fwd"] > LAYERS, "in the prompt alone"
    batch = make_batch(attention_mask=mask)
    mine, theirs = patched(**batch), model(**batch)
    assert relative_error(mine.logits, theirs.logits) < 1e-5
    assert relative_error(mine.loss, theirs.loss) < 1e-5


# ---------------------------------------------------------------- scripts


@pytest.fixture
def saved(tmp_path):
    """The folder of a family's small config.json, whose tokens are bytes."""

    def save(kind: str) -> str:
        sizes = {"vocab_size": architecture.BYTE_VOCABULARY, "num_hidden_layers": 2}
        small_config(kind, **sizes).save_pretrained(tmp_path / kind)
        return str(tmp_path / kind)

    return save


RUN = "--random-init", "--dtype", "fp32", "--batch-size", "1", "--seq-len", "4", "--steps", "2"


@slow(NOT_LLAMA)
def test_scripts_train_it_with_and_without_the_kernels(kind, saved, recorded, little_validation):
    flags = "--model", saved(kind), *RUN
    runs = [
        recorded(finetune_baseline, *flags),
        recorded(finetune_optimized, *flags),
        recorded(finetune_optimized, *flags, "--kernels", "all"),
    ]
    losses = [torch.tensor(run["losses"], dtype=torch.float64) for run in runs]
    assert losses[0][0] != losses[0][1]
    # PyTorch's AdamW divides by the root of a moment: a gradient near 0 may change its sign
    assert all(relative_error(each, losses[0]) < 1e-4 for each in losses[1:])


@slow(NOT_LLAMA)
def test_a_student_with_half_of_the_layers_is_saved(kind, saved, run_script, tmp_path):
    """The lists of what each layer is are cut too: transformers refuses longer ones."""
    folder = str(tmp_path / "student")
    outcome = run_script(
        distill, "--teacher", saved(kind), *RUN, "--kernels", "rope", "--save", folder
    )
    assert outcome.code == 0, outcome.err
    (layer,) = AutoModelForCausalLM.from_pretrained(folder).model.layers
    assert getattr(layer.self_attn, "use_rope", True)


@pytest.mark.exhaustive
@OTHERS
def test_the_estimate_names_what_its_tensors_are_for(kind, saved, recorded):
    flags = "--batch-size", "1", "--seq-len", "8", "--random-init", "--kernels", "all"
    record = recorded(estimate, "--model", saved(kind), *flags)
    for estimated in record["estimates"]:
        assert set(estimated["kept_in_layers"]) <= set(KINDS)


def test_an_example_with_random_weights_asks_for_no_tokenizer(monkeypatch):
    monkeypatch.setattr(dataset.AutoTokenizer, "from_pretrained", None)
    for name in EXAMPLES:
        assert dataset.load_tokenizer(tiny_workload("--model", name, "--random-init")) is None


@pytest.mark.exhaustive
def test_an_example_needs_no_download(run_script):
    flags = "--random-init", "--first-layers", "1", "--seq-len", "512"
    for name in EXAMPLES:
        outcome = run_script(estimate, "--model", name, *flags)
        assert outcome.code == 0, outcome.err
