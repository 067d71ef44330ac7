"""Is a LLaMA with the kernels still the same LLaMA, whatever is done with it?

Everything is compared with the unpatched model: loss and gradients in training, logits in
evaluation, the files that it saves, what Hugging Face's Trainer makes of it.  Equal numbers prove
nothing about a kernel that does not run, so launches are counted too.
"""

import copy
import functools
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import accelerate
import peft
import pytest
import torch
import transformers
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, default_data_collator
from transformers.models.llama import modeling_llama

from harness.benchmark.checking import Check, assert_all_passed, compare, relative_error
from harness.cli import adapter_config
from harness.cli.device import DEVICE, HAS_GPU
from harness.data import dataset
from harness.model.families import FAMILIES
from harness.model.patching import called_function
from harness.profiling.kernel_facts import LOSS_KERNELS, MODEL_KERNELS
from harness.steps import stepping
from next_steps.finetuning import opponent_models
from next_steps.lessons import rope_kernel
from next_steps.lessons.adamw_optimizer import TritonAdamW
from next_steps.patches import apply_kernels as patches
from next_steps.patches import llama_losses
from next_steps.patches.apply_kernels import apply_kernels, triton_adamw
from tests import small_workloads
from tests.fixtures import needs_gpu
from tests.small_workloads import as_kernels_module, assert_a_step_does_not_wait, imported_anew

IGNORE = dataset.IGNORE_INDEX
LAYERS, VOCABULARY = 2, 67
HERE = Path(__file__).parents[1]  # the project's folder
B, T = 2, 4


def rarely(*values) -> list:
    """Values, such as sets of kernels, that a reader's run leaves out: others have them in them."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


EACH = [[name] for name in MODEL_KERNELS]
ALONE_AND_TOGETHER = pytest.mark.parametrize("names", [*EACH, MODEL_KERNELS], ids="+".join)
TOGETHER_AND_ALONE = pytest.mark.parametrize("names", [*rarely(*EACH), MODEL_KERNELS], ids="+".join)
LOSS_SETS = [*rarely(["cross_entropy"], ["linear_cross_entropy"]), MODEL_KERNELS]
LOSSES = pytest.mark.parametrize("names", LOSS_SETS, ids="+".join)
IN_TRAINING_AND_EVALUATION = pytest.mark.parametrize("training", [True, False])


# sizes that Triton's interpreter gets through quickly
SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


def small_config(kind: str = "llama", **values):
    """The configuration of the family's example at those sizes."""
    family = FAMILIES[kind]
    fields = family.fields | SIZES | {"vocab_size": VOCABULARY}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0}
    if "no_rope_layer_interval" in fields:
        fields |= {"no_rope_layer_interval": 2}  # the second layer rotates nothing
    return family.part("Config")(**fields | values)


def make_model(names=(), dtype=torch.float32, kind="llama", **values) -> torch.nn.Module:
    """The same random weights each time; those of norms are not 1, and biases are not 0."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(kind, **values)).to(DEVICE, dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(std=0.3)
            elif "layers" in name:
                weight.mul_(5)  # so that the layers count beside the embedding
    return apply_kernels(model.train(), names)


def without_and_with(names=MODEL_KERNELS, **values) -> list[torch.nn.Module]:
    return [make_model(each, **values) for each in ((), names)]


N_TARGETS = B * (T - 2) - 1


def make_batch(**more) -> dict:
    """Two sequences; the first third of the labels is ignored, as a prompt is."""
    ids = torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :2], labels[1, -1] = IGNORE, IGNORE
    return {"input_ids": ids.to(DEVICE), "labels": labels.to(DEVICE), **more}


def counted_batch() -> dataset.Batch:
    return dataset.Batch(**make_batch(), n_tokens=B * T, n_targets=N_TARGETS)


def padding_mask() -> torch.Tensor:
    """The first sequence begins with a token of padding, the second ends with one."""
    mask = torch.ones(B, T, dtype=torch.int64)
    mask[0, :1], mask[1, -1] = 0, 0
    return mask.to(DEVICE)


def packed_positions() -> dict[str, torch.Tensor]:
    """Two sequences of two tokens in each row."""
    return {"position_ids": (torch.arange(T) % 2).expand(B, T).to(DEVICE)}


def own_positions() -> torch.Tensor:
    """Only differences count; they need a mask, for without one a gap is a sequence's end."""
    return torch.stack([torch.arange(T), 3 * torch.arange(T)]).to(DEVICE)


def gradients_of(model) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def loss_and_gradients(model, batch=None) -> dict[str, torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss = model(**(batch or make_batch())).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def assert_equal(found: dict, expected: dict, allowed: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    missing = [name for name in expected if (found[name] is None) != (expected[name] is None)]
    assert not missing, f"a gradient is there or missing for {missing}"
    errors = {name: relative_error(found[name], e) for name, e in expected.items() if e is not None}
    wrong = {name: error for name, error in errors.items() if not error < allowed}
    assert errors and not wrong, wrong


def assert_same_step(found, expected, batch=None) -> None:
    """Two models, or what `loss_and_gradients` said of one, have equal losses and gradients."""
    said = expected if isinstance(expected, dict) else loss_and_gradients(expected, batch)
    assert_equal(loss_and_gradients(found, batch), said)


def checks_against(ref64: dict, found: dict, eager: dict, dtype=torch.bfloat16) -> list[Check]:
    """Check the loss, and all gradients as one: in so small a model one may be off by chance."""
    # Hugging Face takes the loss in fp32
    ref64 = {name: value.double() for name, value in ref64.items()}
    assert all(found[name] is not None for name in ref64)
    names = [name for name in ref64 if name != "loss"]

    def together(values):
        return torch.cat([values[n].double().flatten() / ref64[n].norm() for n in names])

    losses = found["loss"].float(), ref64["loss"], eager["loss"].float()
    return [
        compare("loss", *losses, dtype),
        compare("gradients", *map(together, (found, ref64, eager)), dtype),
    ]


N_NORMS = 2 * LAYERS + 1
FUSED = {
    # each layer's two norms once more in the backward, for the gradients of the products
    "rmsnorm_fwd": 4 * LAYERS,
    "rmsnorm_bwd": 2 * LAYERS,
    "swiglu_fwd": LAYERS,
    "swiglu_bwd": LAYERS,
    "rope": 2 * LAYERS,
}
LAUNCHES = {  # of one forward and backward
    "rmsnorm": {"rmsnorm_fwd": N_NORMS, "rmsnorm_bwd": N_NORMS},
    "cross_entropy": {"cross_entropy_inplace": 1},
    "swiglu": {"swiglu_fwd": LAYERS, "swiglu_bwd": LAYERS},
    "rope": {"rope": 2 * LAYERS},
    "linear_cross_entropy": {"cross_entropy_inplace": 1, "scale": 2},
    "fused_layer": FUSED,
}
ALL_LAUNCHES = FUSED | {
    "rmsnorm_fwd": 4 * LAYERS + 1,
    "rmsnorm_bwd": 2 * LAYERS + 1,
    "cross_entropy_inplace": 1,
    "scale": 2,
}


def expected_launches(names) -> dict:
    return LAUNCHES[names[0]] if len(names) == 1 else ALL_LAUNCHES


# ---------------------------------------------------------------- training


@pytest.mark.exhaustive
@ALONE_AND_TOGETHER
def test_patched_model_has_the_unpatched_loss_and_gradients(names, launches):
    expected = loss_and_gradients(make_model())
    assert not launches
    assert_same_step(make_model(names), expected)
    assert launches == expected_launches(names)


INPUTS = {
    "packed sequences": packed_positions,
    "items in a tensor": lambda: {"num_items_in_batch": torch.tensor(11, device=DEVICE)},
    "padding, own positions and a number of items": lambda: {
        "attention_mask": padding_mask(),
        "position_ids": own_positions(),
        "num_items_in_batch": 5,
    },
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [MODEL_KERNELS, *rarely(["rope"])], ids="+".join)
@pytest.mark.parametrize("inputs", INPUTS)
def test_inputs_beside_tokens_and_labels_are_honoured(names, inputs):
    batch = make_batch(**INPUTS[inputs]())
    expected, plain = loss_and_gradients(make_model(), batch), loss_and_gradients(make_model())
    assert relative_error(expected["loss"], plain["loss"]) > 1e-4, "cannot fail"
    assert_same_step(make_model(names), expected, batch)


@pytest.mark.exhaustive
def test_embeddings_may_be_given_and_labels_may_come_shifted():
    model, patched = without_and_with()
    batch = make_batch()
    batch["shift_labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
    batch["inputs_embeds"] = model.model.embed_tokens(batch.pop("input_ids")).detach()
    assert_same_step(patched, model, batch)


@pytest.mark.exhaustive
@LOSSES
def test_in_training_there_are_no_logits_and_a_tuple_is_refused(names):
    model, batch = make_model(names), make_batch()
    assert model(**batch).logits is None and model(**batch, return_dict=True).loss is not None
    with pytest.raises(ValueError, match="return_dict is False, expected True"):
        model(**batch, return_dict=False)
    model.config.return_dict = False
    with pytest.raises(ValueError, match="return_dict is False, expected True"):
        model(**batch)
    assert model(**batch, return_dict=True).loss is not None
    model.config.return_dict = True
    without_labels = model(batch["input_ids"])
    assert without_labels.loss is None and without_labels.logits.shape == (B, T, VOCABULARY)


def test_the_gradient_takes_the_logits_memory_in_training_only(monkeypatch):
    allowed = []

    class Watched(llama_losses.TritonCrossEntropyLoss):
        def forward(self, logits, targets):
            allowed.append(self.inplace)
            return super().forward(logits, targets)

    monkeypatch.setattr(llama_losses, "TritonCrossEntropyLoss", Watched)
    model = make_model(["cross_entropy"])
    model(**make_batch())
    model.eval()(**make_batch())
    assert allowed == [True, False]


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [*rarely(["cross_entropy"]), MODEL_KERNELS], ids="+".join)
def test_logits_that_somebody_else_holds_are_not_overwritten(names):
    held, models = [], without_and_with(names)
    for model in models:
        model.lm_head.register_forward_hook(lambda module, inputs, output: held.append(output))
    assert_same_step(models[1], models[0])
    assert relative_error(held[1], held[0]) < 1e-5
    given = models[1](**make_batch()).logits
    assert given is held[-1], "they are right, and need not be kept back"


@pytest.mark.exhaustive
@pytest.mark.parametrize("keep", [2, torch.tensor([1, 3])])
@LOSSES
def test_logits_to_keep_are_kept(names, keep):
    batch = make_batch(logits_to_keep=keep)
    batch["shift_labels"] = batch["input_ids"][:, :2].contiguous()
    model, patched = without_and_with(names)
    assert_same_step(patched, model, batch)
    assert relative_error(patched(**batch).logits, model(**batch).logits) < 1e-5


@LOSSES
def test_head_of_another_size_than_the_configuration_is_refused(names):
    said = r"vocab_size is 68, expected 67|shape '\[-1, 68\]'"
    for training in (True, False):
        model = make_model(names).train(training)
        model.config.vocab_size += 1
        with pytest.raises((ValueError, RuntimeError), match=said):
            model(**make_batch())


@pytest.mark.exhaustive
def test_head_of_another_size_that_comes_later_has_the_kernel_too(launches):
    models = without_and_with(["linear_cross_entropy"])
    for model in models:
        model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
        with torch.no_grad():  # what was added is random
            model.lm_head.weight[VOCABULARY:], model.model.embed_tokens.weight[VOCABULARY:] = 0, 0
    assert_same_step(models[1], models[0])
    assert launches["cross_entropy_inplace"] == 1 and models[1](**make_batch()).logits is None


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "values", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=str
)
def test_tied_embeddings_and_biases_are_not_forgotten(values):
    """A tied head's gradient and the embedding's are added up in one tensor."""
    model, patched = without_and_with(**values)
    assert_same_step(patched, model)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("names", [MODEL_KERNELS, *rarely(["swiglu", "rope"])], ids="+".join)
def test_gradient_checkpointing(names, reentrant, launches):
    expected, model = loss_and_gradients(make_model()), make_model(names)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_step(model, expected)
    assert launches["swiglu_fwd"] == 2 * LAYERS, "no layer was computed again: nothing is saved"
    assert launches["rope"] == 3 * LAYERS and launches["swiglu_bwd"] == LAYERS
    model.gradient_checkpointing_disable()
    launches.clear()
    assert_same_step(model, expected)
    assert launches["swiglu_fwd"] == LAYERS


TRAINED = {
    "norms": ["norm"],
    "one projection of the last layer": ["layers.1.mlp.down_proj"],
    "middle of the first layer": ["layers.0.self_attn.k_proj", "layers.0.mlp.up_proj"],
    "head": ["lm_head"],
    "embedding": ["embed_tokens"],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("trained", TRAINED)
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(trained):
    models = without_and_with()
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in TRAINED[trained]))
    expected, found = map(loss_and_gradients, models)
    assert sum(gradient is None for gradient in expected.values()) > len(expected) / 2
    assert_equal(found, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "names", [MODEL_KERNELS, ["fused_layer", "rmsnorm"], ["swiglu"]], ids="+".join
)
def test_autocast_is_as_wrong_as_without_the_kernels(names):
    """Judged against float64: bf16 products round, with and without kernels."""
    ref64 = loss_and_gradients(make_model(dtype=torch.float64))
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        eager, found = map(loss_and_gradients, without_and_with(names))
    assert_all_passed(checks_against(ref64, found, eager))


def with_wide_head(model):
    model.bfloat16().model.norm.float()
    model.lm_head.float()
    return model


def with_wide_weights_in_norms(model):
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.bfloat16()
    return model


class Doubled(torch.Tensor):
    """A weight with a product of its own, as quantized weights of torchao have it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs)
        return out.as_subclass(torch.Tensor) * 2 if function is torch.nn.functional.linear else out


def with_weights_of_a_subclass(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.detach().as_subclass(Doubled))
    return model


CASTS = {  # and what the gradients may differ by
    torch.nn.Module.double: 1e-5,
    with_wide_head: 2e-2,
    with_wide_weights_in_norms: 1e-3,  # of which one number may be rounded to its bf16 neighbour
    with_weights_of_a_subclass: 1e-5,
}


@TOGETHER_AND_ALONE
@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.__name__)
def test_a_model_that_is_cast_later_runs_as_without_the_kernels(cast, names):
    """In float64 the kernels refused it, and a subclass's product was not asked for."""
    models = [cast(each) for each in without_and_with(names)]
    expected, found = map(loss_and_gradients, models)
    assert_equal(found, expected, allowed=CASTS[cast])
    logits = [model.eval()(make_batch()["input_ids"]).logits for model in models]
    assert logits[0].dtype == logits[1].dtype
    of = [{name: value.dtype for name, value in values.items()} for values in (expected, found)]
    assert of[0] == of[1]


def test_a_step_tells_the_model_how_many_targets_its_batch_has():
    batch, (plain, model) = counted_batch(), without_and_with(["linear_cross_entropy"])
    assert stepping.inputs_of(batch, plain) == batch.inputs()
    with mock.patch.object(torch, "mm", wraps=torch.mm) as mm:
        found = loss_and_gradients(model, stepping.inputs_of(batch, model))
    products = [call.args for call in mm.call_args_list]
    assert [len(a) for a, b in products if VOCABULARY in b.shape] == [N_TARGETS, N_TARGETS]
    assert_equal(found, loss_and_gradients(plain, batch.inputs()))


@pytest.mark.parametrize("names", [["cross_entropy"], MODEL_KERNELS], ids="+".join)
def test_the_number_of_targets_changes_nothing_where_no_row_is_left_out(names):
    """Another kernel takes the loss, or in evaluation PyTorch does."""
    model, batch = make_model(names), make_batch()
    model.train("linear_cross_entropy" not in names)
    told, untold = (model(**batch, **more).loss for more in ({"max_targets": N_TARGETS}, {}))
    assert torch.equal(told, untold)


# ---------------------------------------------------------------- evaluation


@TOGETHER_AND_ALONE
def test_logits_and_loss_in_evaluation(names, launches):
    """Also where a tuple is asked for: the loss and the logits."""
    batch = make_batch(attention_mask=padding_mask(), use_cache=False)
    for return_dict in (True, False):
        with torch.no_grad():
            expected, found = (
                each.eval()(**batch, return_dict=return_dict) for each in without_and_with(names)
            )
        assert len(found) == len(expected) == 2 and type(found) is type(expected)
        assert all(relative_error(found[i], expected[i]) < 1e-5 for i in range(2))
    assert launches or names == ["linear_cross_entropy"]  # which is for training


def z_loss_and_gradients(model, batch) -> dict[str, torch.Tensor | None]:
    """Of the loss and, added to it, the mean square of the logits' log-sum-exp."""
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    loss = output.loss + 0.1 * output.logits.logsumexp(dim=-1).square().mean()
    loss.backward()
    return {"loss": loss.detach(), "logits": output.logits.detach(), **gradients_of(model)}


@pytest.mark.exhaustive
@LOSSES
def test_in_evaluation_the_logits_are_untouched_where_gradients_are_wanted(names):
    models = without_and_with(names)
    expected, found = (z_loss_and_gradients(each.eval(), make_batch()) for each in models)
    assert_equal(found, expected)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_is_taken_by_each_of_its_names(name):
    """transformers renamed the argument in 5.24."""
    model, ids = make_model(MODEL_KERNELS).eval(), make_batch()["input_ids"]
    layer, states = model.model.layers[0], torch.randn(B, T, 32, device=DEVICE)
    turned = model.model.rotary_emb(states, torch.arange(T, device=DEVICE)[None])
    for module, given in (
        (model, {"input_ids": ids}),
        (layer, {"hidden_states": states, "position_embeddings": turned}),
        (layer.self_attn, {"hidden_states": states, "position_embeddings": turned}),
    ):
        cache = transformers.DynamicCache()
        module(**given, **{name: cache})
        assert cache.get_seq_length() == T


@pytest.mark.exhaustive
@IN_TRAINING_AND_EVALUATION
def test_hidden_states_and_attentions_are_returned_on_request(training, launches):
    """The recorders that transformers leaves behind for them do not keep the fused layer away."""
    models = [each.train(training) for each in without_and_with(_attn_implementation="eager")]
    for attentions in (False, True):
        request = {"output_hidden_states": True}
        request |= {"output_attentions": True} if attentions else {}
        expected, found = (each(**make_batch(), **request) for each in models)
        assert relative_error(found.loss, expected.loss) < 1e-5
        assert len(found.hidden_states) == LAYERS + 1
        pairs = list(zip(found.hidden_states, expected.hidden_states))
        if attentions:
            assert len(found.attentions) == LAYERS
            pairs += zip(found.attentions, expected.attentions)
        assert all(relative_error(f, e) < 1e-5 for f, e in pairs)
    launches.clear()
    assert_same_step(models[1], models[0])
    assert launches["rmsnorm_fwd"] == 4 * LAYERS + 1


# ---------------------------------------------------------------- it is still a Hugging Face model


@TOGETHER_AND_ALONE
def test_parameters_and_keys_are_the_same(names):
    model = make_model()
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    assert apply_kernels(model, iter(names)) is model and isinstance(model, LlamaForCausalLM)
    assert all(patches.has_kernel(model, name) for name in names)
    assert (type(model) is LlamaForCausalLM) == (not set(LOSS_KERNELS) & set(names))
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert list(model.state_dict()) == keys
    # by these names transformers and FSDP know them
    for part, name in (
        ("", "LlamaForCausalLM"),
        ("model.layers.0", "LlamaDecoderLayer"),
        ("model.layers.0.self_attn", "LlamaAttention"),
    ):
        assert type(model.get_submodule(part)).__name__ == name


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sets",
    [[MODEL_KERNELS, MODEL_KERNELS], EACH, [MODEL_KERNELS, *EACH]],
    ids=["twice", "in turn", "together and in turn"],
)
def test_applied_twice_or_one_after_the_other_is_applied_once(sets, launches):
    model = make_model()
    for names in sets:
        apply_kernels(model, names)
    loss_and_gradients(model)
    assert launches == ALL_LAUNCHES


def zero(model) -> None:
    """So that a copy which shares weights would be noticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "through", [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy]
)
@TOGETHER_AND_ALONE
def test_pickled_or_copied_it_is_patched_and_on_its_own(names, through, launches):
    original = make_model(names)
    loaded = through(original)
    assert list(map(type, loaded.modules())) == list(map(type, original.modules()))
    zero(original)
    assert not launches
    assert_same_step(loaded, make_model())
    assert launches == expected_launches(names)
    assert all(parameter.grad is None for parameter in original.parameters())


LOAD = """
import sys
import torch

model, batch = torch.load(sys.argv[1], weights_only=False)
output = model(**batch)
print(output.logits is None, repr(output.loss.item()))
"""


@pytest.mark.exhaustive
def test_pickled_model_is_loaded_by_another_process(tmp_path):
    torch.save((make_model(MODEL_KERNELS), make_batch()), tmp_path / "model.pt")
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-c", LOAD, str(tmp_path / "model.pt")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    without_logits, loss = run.stdout.split()
    assert without_logits == "True"
    assert float(loss) == pytest.approx(make_model()(**make_batch()).loss.item(), rel=1e-5)


@pytest.mark.exhaustive
def test_saved_and_loaded(tmp_path):
    expected, patched = loss_and_gradients(make_model()), make_model(MODEL_KERNELS)
    patched.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["architectures"] == ["LlamaForCausalLM"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).to(DEVICE).train()
    assert_same_step(plain, expected)
    assert_same_step(apply_kernels(plain), expected)
    changed = {name: 0.5 * value for name, value in patched.state_dict().items()}
    patched.load_state_dict(changed)
    assert torch.equal(patched.state_dict()["model.norm.weight"], changed["model.norm.weight"])


def replica(
    module: torch.nn.Module, weights: dict[str, torch.Tensor], name: str = ""
) -> torch.nn.Module:
    """A copy with other weights and shared attributes, as torch.nn.DataParallel makes for a GPU."""
    twin = module._replicate_for_data_parallel()
    for key, parameter in module._parameters.items():
        setattr(twin, key, None if parameter is None else weights[name + key])
    for key, child in module.named_children():
        setattr(twin, key, replica(child, weights, f"{name}{key}."))
    return twin


@pytest.mark.exhaustive
@TOGETHER_AND_ALONE
def test_replica_for_another_gpu_computes_with_its_own_weights(names, launches):
    other, model = without_and_with(names)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.25)
    expected = loss_and_gradients(other)
    assert not launches
    twin = replica(model, dict(other.named_parameters()))
    other.zero_grad()
    loss = twin(**make_batch()).loss
    loss.backward()
    assert_equal({"loss": loss.detach(), **gradients_of(other)}, expected)
    assert launches and all(weight.grad is None for weight in model.parameters())


def test_another_model_in_the_same_process_is_not_affected(launches):
    def functions():
        forwards = modeling_llama.LlamaAttention.forward, LlamaForCausalLM.forward
        return (*forwards, modeling_llama.apply_rotary_pos_emb)

    before, earlier = functions(), make_model()
    make_model(MODEL_KERNELS)
    for model in (earlier, make_model()):
        loss_and_gradients(model)
    assert not launches and functions() == before


# ---------------------------------------------------------------- where a kernel must step back


class Wrapped(torch.nn.Module):
    """Somebody's module around a linear layer, whose weight it shows as the layer does."""

    def __init__(self, base: torch.nn.Linear):
        super().__init__()
        self.base, self.bias = base, None

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        out = self.base(x)
        return out + torch.tanh(out)


def wrap(model, name, wrapper):
    parent, _, attribute = name.rpartition(".")
    parent = model.get_submodule(parent)
    setattr(parent, attribute, wrapper(getattr(parent, attribute)))
    return model


def changed_model(change: Callable, first: bool, names=MODEL_KERNELS) -> LlamaForCausalLM:
    """A model with kernels and a change, which comes before the kernels or after them."""
    return apply_kernels(change(make_model()), names) if first else change(make_model(names))


TARGETS = adapter_config.LORA_TARGETS | {"some": ("k_proj", "o_proj", "gate_proj")}


def add_adapters(model, targets="all", trained=False, **options):
    """peft's, the same random numbers each time; `trained`: everything else is trained too."""
    options = {"r": 3, "lora_alpha": 2, "target_modules": list(TARGETS[targets])} | options
    model = small_workloads.with_adapters(model, **options).to(model.dtype)
    for parameter in model.parameters() if trained else ():
        parameter.requires_grad_(True)
    return model


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("targets", ["all", *rarely("attention", "mlp", "some")])
@pytest.mark.parametrize("trained", [False, *rarely(True)])
def test_adapters_have_the_same_loss_and_gradients_in_the_fused_layer(
    targets, trained, first, launches
):
    model = changed_model(lambda model: add_adapters(model, targets, trained), first)
    assert_not_bypassed(add_adapters(make_model(), targets, trained), model)
    # a norm runs again where something in the layer needs its result: a weight, or an A of its own
    needed = 2 if trained or targets in ("all", "some") else 1
    assert launches["rmsnorm_fwd"] == N_NORMS + needed * LAYERS, "a layer is not fused"


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"lora_dropout": 0.3}, {"rank_pattern": {"q_proj": 5}}])
def test_adapters_of_another_kind(options, launches):
    """Whether a projection is a product is asked in lora_linear_test.py."""
    models = [add_adapters(each, **options) for each in without_and_with(["fused_layer"])]
    losses = []
    for model in models:
        torch.manual_seed(4)  # what dropout draws
        losses.append(loss_and_gradients(model))
    assert_equal(losses[1], losses[0])
    assert bool(launches) == ("rank_pattern" in options)


@pytest.mark.exhaustive
def test_a_peft_model_is_given_unwrapped(launches):
    config = peft.LoraConfig(r=3, target_modules=TARGETS["all"], init_lora_weights=False)
    torch.manual_seed(2)
    model = peft.get_peft_model(make_model(), config)
    with pytest.raises(TypeError, match="unwrap it first"):
        apply_kernels(model)
    expected = loss_and_gradients(model)
    apply_kernels(model.get_base_model())
    assert_same_step(model, expected)
    assert launches["rmsnorm_fwd"] == N_NORMS + 2 * LAYERS


PARTS = [
    *("model", "model.embed_tokens", "model.norm", "lm_head", "model.layers.0"),
    *("model.layers.0.self_attn", "model.layers.0.self_attn.k_proj"),
    *("model.layers.0.self_attn.o_proj", "model.layers.0.input_layernorm"),
    *("model.layers.1.post_attention_layernorm", "model.layers.1.mlp"),
    *("model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"),
]
REGISTER = "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"


# around the embedding's neighbours
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("register", REGISTER)
def test_hooks_on_parts_are_called(register):
    expected, model, called = make_model(), make_model(MODEL_KERNELS), Counter()
    model(**make_batch())  # in each call a layer is asked what it has
    parts = PARTS[2:] if "backward" in register else PARTS  # tokens have no gradient
    for name in parts:
        part = model.get_submodule(name)
        getattr(part, register)(lambda *_, name=name: called.update([name]))
    for each in (model, expected) if register == "register_forward_hook" else ():
        each.model.layers[0].mlp.up_proj.register_forward_hook(lambda *given: 2 * given[-1])
    assert_same_step(model, expected)
    assert called == dict.fromkeys(parts, 1)


def test_hooks_on_every_module_are_called():
    counts = []
    for model in without_and_with():
        called = Counter()
        with register_module_forward_hook(
            lambda module, *_, called=called: called.update([type(module).__name__])
        ):
            model(**make_batch())
        counts.append(called)
    assert counts[0]["Linear"] == counts[1]["Linear"] == 7 * LAYERS + 1
    assert counts[1]["TritonRMSNorm"] == N_NORMS and counts[1]["TritonLlamaMLP"] == LAYERS


def by_a_hook(part, called):
    part.register_forward_hook(lambda *_: called.append(1))


def in_its_forward(part, called):
    theirs = part.forward
    part.forward = lambda *args, **kwargs: (called.append(1), theirs(*args, **kwargs))[1]


HOOKED = ["input_layernorm", "post_attention_layernorm", "self_attn", "self_attn.v_proj"]
HOOKED += ["mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.act_fn"]
BEFORE_AND_AFTER = list(itertools.product(HOOKED, [True, False]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [by_a_hook, in_its_forward])
@pytest.mark.parametrize("name, first", BEFORE_AND_AFTER)
def test_what_counts_the_calls_of_a_part_is_called(name, count, first, launches):
    called = []

    def counted(model):
        count(model.model.layers[0].get_submodule(name), called)
        return model

    assert_same_step(changed_model(counted, first), make_model())
    n_norms = N_NORMS - (first and name.endswith("layernorm"))
    assert called == [1] and launches["rmsnorm_fwd"] == n_norms + 2 * (LAYERS - 1)


# ---------------------------------------------------------------- others' code


def doubled(cls):
    """A forward in the place of cls's, which gives twice its result; of the model, of the loss."""
    theirs = cls.forward

    def forward(self, *args, **kwargs):
        output = theirs(self, *args, **kwargs)
        if isinstance(output, torch.Tensor):
            return 2 * output
        if isinstance(output, tuple):
            return 2 * output[0], *output[1:]
        output.loss = 2 * output.loss
        return output

    return forward


def subclass(cls, name=None):
    """Somebody's subclass, with a forward of its own; it may have the name of its base."""
    return type(name or f"Their{cls.__name__}", (cls,), {"forward": doubled(cls)})


CLASSES = {
    "model.layers.0.input_layernorm": modeling_llama.LlamaRMSNorm,
    "model.layers.1.post_attention_layernorm": modeling_llama.LlamaRMSNorm,
    "model.norm": modeling_llama.LlamaRMSNorm,
    "model.layers.0.mlp": modeling_llama.LlamaMLP,
    "model.layers.1.self_attn": modeling_llama.LlamaAttention,
    "model.layers.0": modeling_llama.LlamaDecoderLayer,
}


def of_class(model, name, cls):
    """The model, a part of which becomes one of cls."""
    model.get_submodule(name).__class__ = cls
    return model


def assert_not_bypassed(expected, found):
    """Two models with somebody's code, without kernels and with them; the code counts."""
    expected, plain = loss_and_gradients(expected), loss_and_gradients(make_model())
    assert relative_error(expected["loss"], plain["loss"]) > 1e-4, "this comparison cannot fail"
    assert_same_step(found, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("named_alike", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_subclass_of_a_part_keeps_its_forward(name, named_alike, launches):
    cls = subclass(CLASSES[name], CLASSES[name].__name__ if named_alike else None)

    def theirs():
        return of_class(make_model(), name, cls)

    after = wrap(make_model(MODEL_KERNELS), name, lambda _: theirs().get_submodule(name))
    for model in (apply_kernels(theirs()), after):
        assert_not_bypassed(theirs(), model)
    assert launches["rmsnorm_fwd"] and launches["rope"] and launches["swiglu_fwd"], "in other parts"


@pytest.mark.exhaustive
@IN_TRAINING_AND_EVALUATION
def test_subclass_of_the_model_keeps_its_forward(training, launches):
    cls = subclass(LlamaForCausalLM)
    models = [of_class(make_model().train(training), "", cls) for _ in range(2)]
    apply_kernels(models[1])
    assert type(models[1]) is cls
    assert_not_bypassed(*models)
    assert not launches["cross_entropy_fwd"]
    assert launches["rope"], "the parts inside have their kernels"


class GemmaNorm(torch.nn.Module):
    """Another formula behind the same names: (1 + weight) * x_hat."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], 1 + self.weight, self.variance_epsilon)


def ln_tuning(norm):
    """PEFT's, which trains a copy of a norm beside the frozen original."""
    config = peft.LNTuningConfig(task_type="CAUSAL_LM")
    layer = peft.tuners.ln_tuning.layer.LNTuningLayer(norm, "default", config)
    with torch.no_grad():
        layer.ln_tuning_layers["default"].weight.mul_(1.5)
    return layer


def adaption_prompt(attention):
    """PEFT's, which adds attention to learned tokens to that of the module inside."""
    torch.manual_seed(5)
    layer = peft.tuners.adaption_prompt.layer.AdaptedAttention("llama", 3, attention)
    torch.nn.init.constant_(layer.adaption_gate, 0.7)
    return layer


WRAPPERS = {
    "norm of another class": ("model.layers.0.input_layernorm", GemmaNorm),
    "last norm of another class": ("model.norm", GemmaNorm),
    "LN tuning": ("model.layers.1.post_attention_layernorm", ln_tuning),
    "adaption prompt": ("model.layers.0.self_attn", adaption_prompt),
    "projection of attention": ("model.layers.0.self_attn.q_proj", Wrapped),
    "projection of the MLP": ("model.layers.1.mlp.gate_proj", Wrapped),
    "head": ("lm_head", Wrapped),
    "head whose backward needs the logits": (
        "lm_head",
        lambda head: torch.nn.Sequential(head, torch.nn.Tanh()),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning:peft")
@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapper_around_a_part_is_called(wrapper, wrapped_first, launches):
    name, make = WRAPPERS[wrapper]
    model = changed_model(lambda model: wrap(model, name, make), wrapped_first)
    assert_not_bypassed(wrap(make_model(), name, make), model)
    assert launches["rope"] == 2 * LAYERS, "also in the attention inside a wrapper"
    if make is Wrapped:
        n_fused = LAYERS if name == "lm_head" else LAYERS - 1
        assert launches["rmsnorm_fwd"] == N_NORMS + 2 * n_fused, "the other layers are fused"
        assert launches["scale"] == (0 if name == "lm_head" else 2)
    else:
        assert launches["swiglu_fwd"] == LAYERS


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "cls", dict.fromkeys([*CLASSES.values(), LlamaForCausalLM]), ids=lambda cls: cls.__name__
)
@pytest.mark.parametrize("before_import", [False, True])
def test_forward_that_was_put_into_a_class_before_is_called(cls, before_import, monkeypatch):
    expected = loss_and_gradients(make_model())
    monkeypatch.setattr(cls, "forward", doubled(cls))
    ours = imported_anew(patches) if before_import else patches
    theirs = loss_and_gradients(make_model())
    assert relative_error(theirs["loss"], expected["loss"]) > 1e-4, "this comparison cannot fail"
    assert_same_step(ours.apply_kernels(make_model()), theirs)


def turned_back(q, k, cos, sin):
    """Somebody's rotary function."""
    return rope_kernel.rope_reference(q, k, cos, -sin)


@pytest.mark.parametrize("before_import", [False, True])
def test_rotary_function_that_was_replaced_before_is_called(before_import, monkeypatch, launches):
    expected = loss_and_gradients(make_model())
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", turned_back)
    ours = imported_anew(patches) if before_import else patches
    theirs = loss_and_gradients(make_model())
    assert max(relative_error(theirs[name], expected[name]) for name in theirs) > 1e-4
    assert_same_step(ours.apply_kernels(make_model()), theirs)
    assert not launches["rope"] and launches["swiglu_fwd"] == LAYERS


@pytest.mark.parametrize("kernelized", [False, True])
def test_rotary_function_in_a_module_of_kernels(kernelized, monkeypatch, launches):
    """The kernel stands for the function alone: `kernelize` puts another there after our import."""
    module = as_kernels_module(called_function(modeling_llama.apply_rotary_pos_emb))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", module)
    ours = imported_anew(patches)
    if kernelized:
        module.forward = as_kernels_module(turned_back).forward
    assert_same_step(ours.apply_kernels(make_model()), make_model())
    assert bool(launches["rope"]) is not kernelized and launches["swiglu_fwd"] == LAYERS


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [MODEL_KERNELS, ["swiglu"], ["fused_layer"]], ids="+".join)
@pytest.mark.parametrize("before", [True, False])
def test_another_activation_in_one_mlp_is_called(before, names):
    def with_gelu(model):
        model.model.layers[0].mlp.act_fn = torch.nn.GELU()
        return model

    assert_not_bypassed(with_gelu(make_model()), changed_model(with_gelu, before, names))


def users_own(model):
    model.loss_function = lambda logits, **_: logits.logsumexp(dim=-1).mean()


def another_of_transformers(model):
    model.loss_type = "ForMaskedLM"  # which does not shift the labels


@pytest.mark.exhaustive
@IN_TRAINING_AND_EVALUATION
@pytest.mark.parametrize("set_first", [True, False])
@pytest.mark.parametrize("set_loss", [users_own, another_of_transformers])
@LOSSES
def test_another_loss_function_wins(names, set_loss, set_first, training, launches):
    models = without_and_with(() if set_first else names)
    for model in models:
        set_loss(model.train(training))
    apply_kernels(models[1], names)
    assert_not_bypassed(*models)
    assert not launches["cross_entropy_fwd"]
    logits = [model(**make_batch()).logits for model in models]
    assert relative_error(logits[1], logits[0]) < 1e-5


# ---------------------------------------------------------------- errors


def test_something_else_than_a_known_model_is_refused():
    model = make_model()
    stands = "expected a causal language model of llama, .*: the kernels stand for their code"
    for other, advice in (
        (torch.nn.Sequential(model), "unwrap it first"),
        (model.model, stands),
        (torch.nn.Linear(2, 2), stands),
        (None, stands),
    ):
        with pytest.raises(TypeError, match=f"model is a {type(other).__name__}, .*{advice}"):
            apply_kernels(other)


def hook_all(model, cls):
    for module in model.modules():
        if type(module) is cls:
            module.register_forward_hook(lambda *args: None)


def replace_rotary(model, patch):
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", None)


IDLE = {  # kernel: what somebody did, after which it finds nothing
    "rmsnorm": lambda model, _: hook_all(model, modeling_llama.LlamaRMSNorm),
    "swiglu": lambda model, _: hook_all(model, modeling_llama.LlamaMLP),
    "rope": replace_rotary,
    "fused_layer": replace_rotary,
    "fused_layer, hooks": lambda model, _: hook_all(model, modeling_llama.LlamaMLP),
    "cross_entropy": lambda model, _: of_class(model, "", subclass(LlamaForCausalLM)),
    "linear_cross_entropy": lambda model, _: of_class(model, "lm_head", subclass(torch.nn.Linear)),
}


@pytest.mark.parametrize("case", IDLE)
def test_a_kernel_that_finds_nothing_to_replace_is_refused(case, monkeypatch):
    model, name = make_model(), case.partition(",")[0]
    IDLE[case](model, monkeypatch)
    classes = [type(module) for module in model.modules()]
    other = "rope" if name == "rmsnorm" else "rmsnorm"
    with pytest.raises(ValueError, match=f"{name} finds nothing in the model to replace, expected"):
        apply_kernels(model, [other, name])
    assert [type(module) for module in model.modules()] == classes, f"{other} was put in"
    apply_kernels(model)  # of all kernels, those that find something are put in


def test_a_model_with_nothing_to_replace_is_refused_with_all_kernels(monkeypatch):
    model = make_model()
    for change in IDLE.values():
        change(model, monkeypatch)
    with pytest.raises(ValueError, match=r"rmsnorm, .* find nothing in the model to replace"):
        apply_kernels(model)


@pytest.mark.parametrize("names", [["flash"], ["rmsnorm", "adamw"], ["RMSNorm"]])
def test_unknown_name_is_refused_and_nothing_is_replaced(names, launches):
    model = make_model()
    said = f"unknown kernel '{names[-1]}', expected some of rmsnorm, cross_entropy"
    with pytest.raises(ValueError, match=said):
        apply_kernels(model, names)
    model(**make_batch())
    assert not launches


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [MODEL_KERNELS, ["swiglu"], ["fused_layer"]], ids="+".join)
def test_another_activation_is_refused(names, launches):
    model = make_model(hidden_act="gelu")
    said = "hidden_act is 'gelu', expected 'silu': name the kernels without swiglu"
    with pytest.raises(ValueError, match=said):
        apply_kernels(model, names)
    others = [name for name in MODEL_KERNELS if name not in ("swiglu", "fused_layer")]
    expected = loss_and_gradients(model)
    assert not launches
    assert_same_step(apply_kernels(model, others), expected)


def test_model_whose_parts_accelerate_moves_is_refused():
    model = make_model()
    accelerate.hooks.add_hook_to_module(model.model.layers[1], accelerate.hooks.ModelHook())
    said = "accelerate has spread the model over devices, expected one"
    with pytest.raises(ValueError, match=said):
        apply_kernels(model)


# ---------------------------------------------------------------- transformers.Trainer


# Trainer spreads each batch over all GPUs that it sees
N_REPLICAS = max(torch.cuda.device_count(), 1)


def examples(n: int) -> list[dict]:
    """Of different numbers of labels, so that micro-batches weigh differently."""
    ids = torch.randint(VOCABULARY, (n, T), generator=torch.Generator().manual_seed(4))
    labels = ids.clone()
    for i, row in enumerate(labels):
        row[: 1 + i % 3] = IGNORE
    return [{"input_ids": i, "labels": l} for i, l in zip(ids, labels)]


def trained(folder, names, accumulate=1, optimizer=None, **options) -> tuple[Trainer, list[float]]:
    """A Trainer after three steps, and the loss of each."""
    model = make_model(names)
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulate,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not HAS_GPU,
        **options,
    )
    trainer = Trainer(
        model,
        args,
        default_data_collator,
        examples(6 * accumulate * N_REPLICAS),
        examples(3),
        optimizers=((optimizer(model) if optimizer else None), None),
    )
    trainer.train()
    return trainer, [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize(
    "names, accumulate",
    [
        (MODEL_KERNELS, 2),
        pytest.param(["linear_cross_entropy"], 1, marks=pytest.mark.exhaustive),
        pytest.param(["rmsnorm", "cross_entropy"], 2, marks=pytest.mark.exhaustive),
    ],
)
def test_trainer_makes_the_same_training_of_it(tmp_path, names, accumulate, launches):
    baseline, expected = trained(tmp_path, (), accumulate)
    assert not launches and len(expected) == 3
    moved = relative_error(baseline.model.lm_head.weight, make_model().lm_head.weight)
    assert moved > 1e-2, "nothing was learned: this comparison cannot fail"
    trainer, losses = trained(tmp_path, names, accumulate)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert launches["cross_entropy_inplace"] == 3 * accumulate * N_REPLICAS
    evaluations = [t.evaluate()["eval_loss"] for t in (baseline, trainer)]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)
    predictions = [torch.tensor(t.predict(examples(3)).predictions) for t in (baseline, trainer)]
    assert predictions[1].shape == (3, T, VOCABULARY)
    assert relative_error(predictions[1], predictions[0]) < 1e-4


@pytest.mark.parametrize("max_norm", [1.0, 0.0])
@pytest.mark.parametrize("in_backward", [False, True])
def test_trainer_clips_as_it_is_told_to_or_not_at_all(tmp_path, max_norm, in_backward):
    """With its default, 1.0, it trained on as if nothing were to be clipped, and logged 0."""

    def ours(model):
        return triton_adamw(model, 3e-3) if in_backward else TritonAdamW(model.parameters(), 3e-3)

    def run(optimizer):
        """Return the trained weights, and the gradients' norm at each step."""
        clipping = {} if max_norm else {"max_grad_norm": max_norm}
        trainer, _ = trained(tmp_path, (), optimizer=optimizer, **clipping)
        norms = [log["grad_norm"] for log in trainer.state.log_history if "loss" in log]
        return {name: p.detach() for name, p in trainer.model.named_parameters()}, norms

    if in_backward and max_norm:
        with pytest.raises(RuntimeError, match=r"to be clipped.*max_grad_norm=0"):
            run(ours)
        return
    weights, norms = run(lambda model: torch.optim.AdamW(model.parameters(), 3e-3))
    assert min(norms) > 1, "nothing is clipped: this comparison cannot fail"
    found, found_norms = run(ours)
    assert_equal(found, weights)
    expected = [math.nan] * 3 if in_backward else norms
    assert found_norms == pytest.approx(expected, rel=1e-4, nan_ok=True)


# ---------------------------------------------------------------- what only a GPU can show


BACKEND = {} if HAS_GPU else {"backend": "aot_eager"}  # C++'s compiler takes half a minute


def compile_layers(model):
    for layer in model.model.layers:
        layer.compile(**BACKEND)
    return model


def compile_unpacked(model):
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, **BACKEND)):
        return opponent_models.compiled(model, "default" if HAS_GPU else None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("compiled", [compile_layers, compile_unpacked])
def test_a_compiled_model_makes_the_same_step(compiled, adapted, monkeypatch):
    """In the two ways that docs/own_code.md names, in which attention gets no mask.

    (Nor does it in others from a transformers between 5.17 and 5.23 on.)
    """
    model = make_model(MODEL_KERNELS)
    if adapted:
        add_adapters(model)
    expected = loss_and_gradients(model)
    masks = []
    attend = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def sdpa(module, q, k, v, attention_mask, **options):
        masks.append(attention_mask)
        return attend(module, q, k, v, attention_mask, **options)

    monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS, "sdpa", sdpa)
    model.zero_grad(set_to_none=True)
    torch.compiler.reset()
    loss = compiled(model)(**make_batch()).loss
    loss.backward()
    assert_equal({"loss": loss.detach(), **gradients_of(model)}, expected)
    assert len(masks) >= 1 and set(masks) == {None}


@needs_gpu
def test_training_step_does_not_wait_for_the_gpu():
    model = make_model(MODEL_KERNELS, torch.bfloat16)
    assert_a_step_does_not_wait(model, triton_adamw(model, 1e-5), [counted_batch()])
