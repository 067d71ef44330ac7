"""Unsloth as an opponent: what it is given to load, and what is done with what it makes of it.

It needs a GPU, and changes transformers for the whole process.  So there is a stand-in with its two
calls here, made of transformers and peft; the real one trains in processes of its own.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama

import finetune_baseline
from harness.cli.device import DEVICE, HAS_GPU
from harness.model import architecture, loading
from next_steps.finetuning import opponent_models, opponents
from next_steps.patches import patched_model
from tests.conftest import assert_refused
from tests.fixtures import needs_gpu
from tests.small_workloads import SMALL, small_workload, smaller_config

UNSLOTH = ["--opponent", "unsloth"]
HERE = Path(__file__).parents[1]


class FastLanguageModel:
    """Unsloth's two calls; `calls` is what they were given, and what lay in the folder."""

    calls: ClassVar[list[dict]] = []

    @classmethod
    def from_pretrained(cls, source, **said):
        tokenizer = AutoTokenizer.from_pretrained(source)
        files = sorted(path.name for path in Path(source).iterdir())
        cls.calls.append({"source": source, "files": files, "tokenizer": tokenizer, **said})
        model = AutoModelForCausalLM.from_pretrained(source, dtype=said["dtype"]).to(DEVICE)
        return model.train(), tokenizer

    @classmethod
    def get_peft_model(cls, model, use_gradient_checkpointing, random_state, **config):
        cls.calls.append({"checkpointing": use_gradient_checkpointing, **config})
        torch.manual_seed(random_state)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))


@pytest.fixture
def stand_in(monkeypatch, own_cache, small_model):
    monkeypatch.setattr(opponent_models, "HAS_GPU", True)
    monkeypatch.setattr(FastLanguageModel, "calls", [])
    module = SimpleNamespace(FastLanguageModel=FastLanguageModel)
    monkeypatch.setitem(sys.modules, "unsloth", module)
    return FastLanguageModel


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_it_is_refused(run_script):
    outcome = run_script(opponents, *SMALL, *UNSLOTH)
    assert_refused(outcome, "error: --opponent unsloth needs a CUDA GPU and none was found")


def test_what_it_cannot_load_is_said_in_a_sentence(run_script, monkeypatch, stand_in):
    def fail(source, **said):
        raise RuntimeError("no such architecture")

    monkeypatch.setattr(stand_in, "from_pretrained", fail)
    outcome = run_script(opponents, *SMALL, *UNSLOTH)
    said = "error: tiny, by Unsloth, could not be loaded: no such architecture\n"
    assert outcome.code == 2 and outcome.err.endswith(said)  # after transformers' progress


@pytest.mark.parametrize("flags", [[], ["--lora-rank", "4", "--lora-alpha", "6"]], ids=str)
def test_it_starts_from_the_weights_that_every_run_draws(stand_in, flags):
    workload = small_workload(*flags, "--seed", "3")
    model, plain = (
        opponent_models.with_unsloth(workload),
        loading.load_model(small_workload("--seed", "3")),
    )
    found = {name.replace(".base_layer", ""): w for name, w in model.state_dict().items()}
    assert all(torch.equal(found[name], w) for name, w in plain.state_dict().items())
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n in model.state_dict() if bool(flags) == ("lora_" in n)
    }
    loaded, *adapted = stand_in.calls
    assert not Path(loaded["source"]).exists()
    assert "model.safetensors" in loaded["files"] and "tokenizer.json" in loaded["files"]
    assert loaded["dtype"] == torch.float32 and loaded["max_seq_length"] == 8
    assert loaded["full_finetuning"] is not bool(flags) and loaded["load_in_4bit"] is False
    assert loaded["use_gradient_checkpointing"] is False and loaded["local_files_only"]
    assert max(loaded["tokenizer"].get_vocab().values()) < plain.config.vocab_size
    if flags:
        (adapted,) = adapted
        assert (adapted["r"], adapted["lora_alpha"], adapted["checkpointing"]) == (4, 6, False)
        assert len(adapted["target_modules"]) == 7


@pytest.mark.parametrize(("opponent", "in_fp8"), [("unsloth", False), ("unsloth-fp8", True)])
def test_frozen_weights_are_in_fp8_if_asked_for(stand_in, opponent, in_fp8):
    opponent_models.with_unsloth(replace(small_workload("--lora-rank", "4"), opponent=opponent))
    loaded = stand_in.calls[0]
    assert loaded["load_in_fp8"] is in_fp8 and loaded["load_in_4bit"] is False


def test_a_model_with_a_tokenizer_is_loaded_from_where_it_is(stand_in, tmp_path):
    config, folder = smaller_config(), tmp_path / "model"
    loading.load_model(small_workload()).save_pretrained(folder)
    workload = small_workload("--model", str(folder))
    opponent_models.with_unsloth(workload)
    opponent_models.placeholder(config).save_pretrained(folder)
    opponent_models.with_unsloth(workload)
    without, with_tokenizer = stand_in.calls
    assert without["source"] != str(folder) == with_tokenizer["source"]
    assert "tokenizer.json" in without["files"]


def test_its_run_is_the_baselines_with_fused_adamw(recorded, stand_in):
    baseline = recorded(finetune_baseline, *SMALL)
    opponent = recorded(opponents, *SMALL, *UNSLOTH)
    assert opponent["losses"] == pytest.approx(baseline["losses"], rel=1e-5)
    assert (opponent["title"], opponent["opponent"]) == ("Unsloth, fused AdamW", "unsloth")


def test_what_it_makes_of_transformers_is_not_counted(recorded, monkeypatch, stand_in):
    """Its rotary embedding, for one, lacks what transformers' has."""
    load = stand_in.from_pretrained

    def load_and_change(source, **said):
        loaded = load(source, **said)
        monkeypatch.setattr(modeling_llama, "LlamaRotaryEmbedding", torch.nn.Identity)
        return loaded

    monkeypatch.setattr(stand_in, "from_pretrained", load_and_change)
    record = recorded(opponents, *SMALL, *UNSLOTH, "--lora-rank", "4")
    assert record["parameters"] > 10 * record["trained_parameters"] > 0


def test_its_adapters_are_saved_and_trained_further(recorded, tmp_path, stand_in):
    first, then, merged = (str(tmp_path / name) for name in ("first", "then", "merged"))
    flags = [*SMALL, *UNSLOTH, "--lr", "0.05"]
    for more in (
        ["--lora-rank", "4", "--save", first],
        ["--adapter", first, "--save", then],
        ["--adapter", first, "--save", merged, "--merge"],
    ):
        recorded(opponents, *flags, *more)
    ids = torch.arange(8, device=DEVICE)[None]

    def logits(model):
        return model.to(DEVICE).eval()(input_ids=ids).logits

    plain, saved = (loading.load_model(small_workload()) for _ in range(2))
    before, after = logits(plain), logits(PeftModel.from_pretrained(saved, first))
    assert not torch.allclose(before, after, atol=1e-3)
    ours = patched_model.load_with_adapters(small_workload("--adapter", first))
    theirs = opponent_models.with_unsloth(small_workload("--adapter", first))
    torch.testing.assert_close(logits(ours), after)
    torch.testing.assert_close(logits(theirs), after)
    trained = PeftModel.from_pretrained(loading.load_model(small_workload()), then)
    ordinary = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert not torch.allclose(logits(trained), after, atol=1e-3)
    torch.testing.assert_close(logits(ordinary), logits(trained), atol=1e-5, rtol=1e-4)


def test_an_adapter_of_another_model_is_refused_before_anything_is_loaded(
    run_script, tmp_path, stand_in, monkeypatch
):
    folder = str(tmp_path / "adapter")
    flags = [*SMALL, *UNSLOTH]
    assert run_script(opponents, *flags, "--lora-rank", "4", "--save", folder).code == 0
    stand_in.calls.clear()
    config = smaller_config()
    config.intermediate_size = 64
    monkeypatch.setattr(architecture, "tiny_config", lambda: config)
    outcome = run_script(opponents, *flags, "--adapter", folder)
    assert outcome.code == 2 and "does not fit tiny" in outcome.err and not stand_in.calls


@needs_gpu
@pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="Unsloth is not installed")
@pytest.mark.parametrize("flags", [[], ["--lora-rank", "4"]], ids=["full", "lora"])
def test_the_real_one_trains_as_the_baseline_does(tmp_path, flags):
    """To rounding in bf16: with LoRA the adapters' first numbers are other ones, and B is 0."""
    records = []
    flags = [*flags, "--model", "tiny", "--seq-len", "64", "--steps", "4", "--lr", "1e-3"]
    unsloth = ["-m", "next_steps.finetuning.opponents", *UNSLOTH]
    for i, script in enumerate(([str(HERE / "finetune_baseline.py")], unsloth)):
        path = tmp_path / f"{i}.json"
        command = [sys.executable, *script, *flags, "--json", str(path)]
        environment = os.environ | {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
        subprocess.run(command, check=True, cwd=tmp_path, env=environment)
        records.append(json.loads(path.read_text()))
    baseline, opponent = records
    assert opponent["losses"] == pytest.approx(baseline["losses"], rel=1e-2)
    before = baseline["validation_loss_before"]
    assert opponent["validation_loss_before"] == pytest.approx(before, rel=1e-3)
