"""A damaged or unusual model gets one sentence that names the file, from every script."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import finetune_baseline
import finetune_optimized
import profile_baseline
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.workload import Workload
from harness.model import architecture, config_file, loading
from next_steps.finetuning import distill
from next_steps.memory import estimate, memory_estimate, profile
from next_steps.studies import frontier, ladder
from tests.cli_test import change_config, hub_error, hub_errors, raising
from tests.conftest import assert_refused

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
STEPS = ["--seq-len", "8", "--steps", "1"]
SCRIPTS = {  # name: (script, flags after --model DIR)
    "finetune_baseline": (finetune_baseline, STEPS),
    "finetune_optimized": (finetune_optimized, STEPS),
    "longest": (frontier, ["--seq-len", "8", "--longest", "--kernels", "rmsnorm,cross_entropy"]),
    "ladder": (ladder, STEPS),
    "distill": (distill, [*STEPS, "--teacher", "tiny"]),
    "profile_baseline": (profile_baseline, ["--seq-len", "8"]),
    "memory.profile": (profile, ["--seq-len", "8"]),
    "estimate": (estimate, ["--seq-len", "8"]),
}
FEW = [  # of config.json: a field, its value, what is said of it
    ("hidden_act", "never_heard_of", "never_heard_of"),
    ("attention_dropout", 2, "between 0 and 1"),
    ("num_hidden_layers", 0, "num_hidden_layers = 0, expected 1 to 10,000"),
]
MUTATIONS = [
    *FEW,
    *(("num_hidden_layers", value, "1 to 10,000") for value in (-2, 10**12)),
    *(("num_attention_heads", value, f"num_attention_heads = {value}") for value in (0, -4)),
    *(("num_key_value_heads", *value) for value in ((0, "num_key_value_heads = 0"), (3, "(3)"))),
    *(("hidden_size", value, "hidden_size") for value in (0, -64, 64.5)),
    ("hidden_act", None, "hidden_act"),
    ("head_dim", 15, "15"),  # transformers 5.17 names no field
    ("intermediate_size", 0, "intermediate_size = 0"),
    ("vocab_size", 0, "vocab_size = 0"),
    ("pad_token_id", 257, "Padding_idx"),  # outside the vocabulary
    ("dtype", "float7", "float7"),
    ("quantization_config", {"quant_method": "bitsandbytes"}, "quantization_config"),
    ("return_dict", False, "tuple"),
    ("rope_parameters", ROPE | {"rope_type": "spiral"}, "spiral"),
    ("rope_parameters", ROPE | {"rope_type": "llama3"}, "factor"),
    ("rope_parameters", ROPE | {"rope_theta": "many"}, "str"),
]
LOADS = "finetune_baseline"  # all scripts load a model by the same function


@pytest.fixture
def run(run_script, checkpoint):
    """run("estimate") -> Outcome, of that script on the checkpoint."""

    def run(name: str, *flags: str):
        script, its_flags = SCRIPTS[name]
        return run_script(script, "--model", str(checkpoint), *its_flags, *flags)

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_damaged_config_is_one_sentence_with_the_file(run, checkpoint, script):
    whole = (checkpoint / "config.json").read_text()
    for field, value, words in MUTATIONS if script == LOADS else FEW:
        (checkpoint / "config.json").write_text(whole)
        change_config(checkpoint, **{field: value})
        outcome = run(script)
        assert_refused(outcome, f"the config.json of {checkpoint}", words)
        assert "step 1" not in outcome.out


GELU, LONG = {"hidden_act": "gelu"}, {"hidden_size": 32_772, "head_dim": 16}
OF_KERNELS = {  # kernel: what it cannot take, and words of the sentence
    "swiglu": (GELU, ["hidden_act is 'gelu', expected 'silu'", "without swiglu"]),
    "fused_layer": (GELU, ["hidden_act is 'gelu', expected 'silu'"]),
    "rmsnorm": (LONG, ["from 1 to 32,768"]),
    "rope": ({"head_dim": 4098}, ["from 2 to 4,096"]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "script, kernel",
    [
        *(("finetune_optimized", kernel) for kernel in OF_KERNELS),
        ("ladder", "swiglu"),
        ("profile_baseline", "swiglu"),
    ],
)
def test_what_a_kernel_cannot_take_is_said_before_the_weights_are_loaded(
    run, checkpoint, monkeypatch, script, kernel
):
    values, words = OF_KERNELS[kernel]
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("loaded")
    )
    change_config(checkpoint, intermediate_size=8, **values)
    # the ladder runs them all
    flags = [] if script == "ladder" else ["--kernels", kernel]
    assert_refused(run(script, *flags), f"the config.json of {checkpoint}", *words)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "values",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}},
        {"attn_implementation": "eager"},
        {"attention_dropout": 0.1},
        {"pad_token_id": 256},
        {"rms_norm_eps": 0.0},
        {"torch_dtype": "float16"},
        {"rope_parameters": None, "rope_theta": 500_000.0},
        {"something_new": 1},
    ],
    ids=str,
)
def test_an_unusual_config_that_can_be_trained_is(run, checkpoint, little_validation, values):
    change_config(checkpoint, **values)
    outcome = run(LOADS)
    assert outcome.code == 0, outcome.err


def test_dynamic_rotary_scaling_changes_nothing_within_the_models_positions(checkpoint):
    """Which is why nobody looks at the positions, and a CUDA graph and meta tensors need not."""
    ids = torch.randint(257, (1, 64), generator=torch.Generator().manual_seed(0))
    losses = []
    for name in ("default", "dynamic"):
        change_config(checkpoint, rope_parameters=ROPE | {"rope_type": name, "factor": 2.0})
        workload = Workload(model=str(checkpoint), dtype="fp32", seq_len=64)
        model = loading.load_model(workload)
        ids = ids.to(DEVICE)
        losses.append(model(input_ids=ids, labels=ids).loss)
        assert model.config.rope_parameters["rope_type"] == name, "what is saved says so"
    assert torch.equal(*losses)


@pytest.mark.exhaustive
def test_the_estimate_of_flash_attention_is_that_of_the_fused_one():
    config = architecture.tiny_config()
    workload = Workload(seq_len=64)
    expected = memory_estimate.estimate(config, workload)["peak_memory_bytes"]
    config._attn_implementation = "flex_attention"
    assert memory_estimate.estimate(config, workload)["peak_memory_bytes"] == expected
    config._attn_implementation = "eager"
    assert memory_estimate.estimate(config, workload)["peak_memory_bytes"] > expected


# ---------------------------------------------------------------- weights


def change_weights(checkpoint: Path, change) -> None:
    """Write the weights that change(weights by name) returns."""
    path = checkpoint / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


BIAS = "model.layers.0.self_attn.q_proj.bias"
FREQUENCIES = "rotary_emb.inv_freq"
LAYERS = "num_hidden_layers"
MISFITS = [  # values of config.json, what becomes of the weights, words of the sentence
    ({LAYERS: 1}, dict, ["9 not part", "model.layers.1.input_layernorm.weight"]),
    ({}, lambda w: w | {BIAS: torch.ones(64)}, [f"1 not part of that model, {BIAS}"]),
    ({"attention_bias": True}, dict, ["8 missing, model.layers.0.self_attn.k_proj.bias"]),
    ({"intermediate_size": 128}, dict, ["6 of another shape", "0.mlp.down_proj.weight"]),
    ({}, lambda w: {n: t[: min(len(t), 256)] for n, t in w.items()}, ["2 of another shape"]),
]


@pytest.mark.parametrize("values, change, words", MISFITS)
def test_weights_that_are_not_the_configurations_are_refused(
    run, checkpoint, values, change, words
):
    change_config(checkpoint, **values)
    change_weights(checkpoint, change)
    assert_refused(run(LOADS), f"the weights of {checkpoint} do not fit its config.json", *words)


SUPERFLUOUS = {  # what becomes of the weights
    "a head that is tied": dict,
    "no head": lambda w: {name: t for name, t in w.items() if name != "lm_head.weight"},
    "old frequencies": lambda w: w | {f"model.layers.1.self_attn.{FREQUENCIES}": torch.ones(8)},
    "frequencies": lambda w: w | {f"model.{FREQUENCIES}": torch.ones(8)},
}


@pytest.mark.parametrize("weights", SUPERFLUOUS)
def test_weights_that_are_known_to_be_superfluous_are_not_refused(run, checkpoint, weights):
    change_config(checkpoint, tie_word_embeddings="head" in weights)
    change_weights(checkpoint, SUPERFLUOUS[weights])
    assert run(LOADS).code == 0


# ---------------------------------------------------------------- paths


CLOSED = [("checkpoint", 0), ("checkpoint/config.json", 0), (".", 0)]
# may be entered but not listed: it may hold a tokenizer, without which bytes would be the tokens
CLOSED += [("checkpoint", 0o711)]


@pytest.mark.parametrize("closed, mode", CLOSED)
def test_a_model_that_may_not_be_read_is_one_sentence(run_script, saved_tiny, closed, mode):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are for their owner alone
        parent = Path(folder, "parent")
        model = Path(shutil.copytree(saved_tiny, parent / "checkpoint"))
        for path in (parent.parent, parent, model):
            path.chmod(0o755)
        path, user = parent / closed, os.geteuid()
        path.chmod(mode)
        os.seteuid(user or 65_534)  # root may read everything
        try:
            outcome = run_script(finetune_baseline, "--model", str(model), *STEPS)
        finally:
            os.seteuid(user)
            path.chmod(0o755)
    assert_refused(outcome, f"--model {model} cannot be read: Permission denied")


NO_NETWORK = AssertionError("the network was asked")
NAMES = [  # of no model, what the hub answers, words of the sentence
    ("m" * 300, NO_NETWORK, ["File name too long"]),
    (f"folder/{'m' * 300}", None, ["neither a directory nor"]),
    *((n, NO_NETWORK, [f"directory {n} does not exist"]) for n in ("./run1", "run1/", "a/b/run1")),
    *(
        ("checkpoints/run1", answer, ["there is no directory checkpoints/run1", "Hugging Face"])
        for answer in (
            hub_errors.LocalEntryNotFoundError("not cached"),
            hub_error("RepositoryNotFoundError", 404),
        )
    ),
    ("checkpoints/model.safetensors", NO_NETWORK, ["model.safetensors is a file", "directory"]),
]


@pytest.mark.parametrize("name, answer, words", NAMES)
def test_a_name_of_no_model_is_one_sentence(run_script, monkeypatch, tmp_path, name, answer, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "model.safetensors").touch()
    if answer:
        monkeypatch.setattr(config_file, "hf_hub_download", raising(answer))
    assert_refused(run_script(finetune_baseline, "--model", name, *STEPS), *words)


@pytest.mark.exhaustive
@pytest.mark.skipif(HAS_GPU, reason="with a GPU no interpreter is needed")
def test_kernels_without_gpu_and_interpreter_are_one_sentence(checkpoint):
    """In a process of its own: what is imported while kernels are compiled stays so."""
    script = Path(finetune_optimized.__file__)
    command = [sys.executable, str(script), "--model", str(checkpoint), "--seq-len", "8"]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(command, capture_output=True, text=True, env=env)
    assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stderr
    assert "TRITON_INTERPRET is '0'" in run.stderr and "unset it" in run.stderr
