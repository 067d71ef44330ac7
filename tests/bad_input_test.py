"""A damaged or unusual model gets one sentence that names the file and the field, from every script
that loads one.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import finetune_baseline
import finetune_optimized
import profile_baseline
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.workload import Workload
from harness.model import architecture, config_file, loading
from next_steps.memory import memory_estimate
from tests.cli_test import assert_refused, change_config, hub_error, hub_errors, raising

# isort: split
# after the harness, which decides how triton (imported by transformers) will run
from transformers import AutoModelForCausalLM

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
STEPS = ["--seq-len", "8", "--steps", "1"]
SCRIPTS = {  # name: (script, flags after --model DIR)
    "finetune_baseline": (finetune_baseline, STEPS),
    "finetune_optimized": (finetune_optimized, STEPS),
    "finetune_optimized --longest": (finetune_optimized, ["--seq-len", "8", "--longest"]),
    "finetune_optimized --ladder": (finetune_optimized, [*STEPS, "--ladder"]),
    "finetune_optimized --teacher": (finetune_optimized, [*STEPS, "--teacher", "tiny"]),
    "profile_baseline": (profile_baseline, ["--seq-len", "8"]),
    "profile_baseline --memory": (profile_baseline, ["--seq-len", "8", "--memory"]),
    "profile_baseline --estimate": (profile_baseline, ["--seq-len", "8", "--estimate"]),
}
MUTATIONS = {  # name: (what config.json says, what the sentence says of it)
    "unknown activation": ({"hidden_act": "never_heard_of"}, ["hidden_act = 'never_heard_of'"]),
    "no activation": ({"hidden_act": None}, ["hidden_act = None"]),
    "unknown rotary type": (
        {"rope_parameters": ROPE | {"rope_type": "spiral"}},
        ["rope_parameters = ", "'spiral'"],
    ),
    "rotary type without its factors": (
        {"rope_parameters": ROPE | {"rope_type": "llama3"}},
        ["rope_parameters = "],
    ),
    "theta 0": (
        {"rope_parameters": ROPE | {"rope_theta": 0}},
        ["rope_parameters = ", "frequencies"],
    ),
    "negative theta": (
        {"rope_parameters": ROPE | {"rope_theta": -1.0}},
        ["rope_parameters = ", "frequencies"],
    ),
    "theta is a word": ({"rope_parameters": ROPE | {"rope_theta": "many"}}, ["rope_parameters = "]),
    "scaled by 0": (
        {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 0}},
        ["rope_parameters = "],
    ),
    "no layers": ({"num_hidden_layers": 0}, ["num_hidden_layers = 0", "from 1 to"]),
    "negative layers": ({"num_hidden_layers": -2}, ["num_hidden_layers = -2", "from 1 to"]),
    "as many layers as atoms": (
        {"num_hidden_layers": 10**12},
        ["num_hidden_layers = 1000000000000", "from 1 to"],
    ),
    "no heads": ({"num_attention_heads": 0}, ["num_attention_heads = 0", "at least 1"]),
    "negative heads": ({"num_attention_heads": -4}, ["num_attention_heads = -4", "at least 1"]),
    "no key heads": ({"num_key_value_heads": 0}, ["num_key_value_heads = 0", "at least 1"]),
    "key heads that divide no heads": ({"num_key_value_heads": 3}, ["num_key_value_heads = 3"]),
    "odd head": ({"head_dim": 15}, ["head_dim = 15"]),
    "no width": ({"hidden_size": 0}, ["hidden_size = 0", "at least 1"]),
    "negative width": ({"hidden_size": -64}, ["hidden_size = -64", "at least 1"]),
    "width is a fraction": ({"hidden_size": 64.5}, ["hidden_size = 64.5", "whole number"]),
    "no inner width": ({"intermediate_size": 0}, ["intermediate_size = 0", "at least 1"]),
    "no vocabulary": ({"vocab_size": 0}, ["vocab_size = 0", "at least 1"]),
    "no positions": (
        {"max_position_embeddings": -1},
        ["max_position_embeddings = -1", "at least 1"],
    ),
    "negative eps": ({"rms_norm_eps": -1.0}, ["rms_norm_eps = -1.0", "from 0 to 1"]),
    "padding outside the vocabulary": (
        {"pad_token_id": 257},
        ["pad_token_id = 257", "Padding_idx"],
    ),
    "dropout of 2": ({"attention_dropout": 2}, ["attention_dropout = 2", "from 0 to 1"]),
    "negative dropout": ({"attention_dropout": -0.5}, ["attention_dropout = -0.5", "from 0 to 1"]),
    "integers for weights": ({"dtype": "int8"}, ["dtype = 'int8'", "float32"]),
    "a type without a name": ({"torch_dtype": "float7"}, ["torch_dtype = 'float7'", "float32"]),
    "quantized": (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        ["quantization_config = "],
    ),
    "tuples": ({"return_dict": False}, ["return_dict = False"]),
    "flash attention": (
        {"attn_implementation": "flash_attention_2"},
        ["attn_implementation = 'flash_attention_2'"],
    ),
    "flash attention, as saved": (
        {"_attn_implementation": "flash_attention_2"},
        ["attn_implementation = 'flash_at"],
    ),
}

EVERY_DAY = "finetune_baseline"  # the script that a reader's run tries everything with
ALL = "finetune_baseline", "finetune_optimized", "profile_baseline --estimate"  # see every mutation
# are seen by every script
SOME = (
    "unknown activation",
    "negative theta",
    "no layers",
    "dropout of 2",
)


def rarely(is_rare: bool) -> list:
    """Marks of what a reader's run leaves out: all scripts load a model by the same function."""
    return [pytest.mark.exhaustive] * is_rare


def mostly(often: str, scripts: list[str]) -> list:
    """The scripts, of which a reader's run tries one."""
    return [pytest.param(name, marks=rarely(name != often)) for name in scripts]


@pytest.fixture
def run(run_script, checkpoint, monkeypatch):
    """run("profile_baseline --estimate") -> Outcome, of that script on the checkpoint."""
    monkeypatch.setattr(config_file, "HAS_GPU", False)  # where flash attention may be installed

    def run(name: str, *flags: str):
        script, its_flags = SCRIPTS[name]
        return run_script(script, "--model", str(checkpoint), *its_flags, *flags)

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("script", "mutation"),
    [
        pytest.param(script, mutation, marks=rarely(script != EVERY_DAY and mutation != SOME[0]))
        for script in SCRIPTS
        for mutation in MUTATIONS
        if script in ALL or mutation in SOME
    ],
)
def test_a_damaged_config_is_one_sentence_with_file_and_field(run, checkpoint, script, mutation):
    values, words = MUTATIONS[mutation]
    change_config(checkpoint, **values)
    outcome = run(script)
    assert_refused(outcome, f"the config.json of {checkpoint}", *words)
    assert "step 1" not in outcome.out


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "script",
    mostly("finetune_optimized", [name for name in SCRIPTS if name != "finetune_baseline"]),
)
@pytest.mark.parametrize(
    ("values", "kernels", "words"),
    [
        (
            {"hidden_act": "gelu"},
            "swiglu",
            ["hidden_act = 'gelu'", "expected 'silu'", "without swiglu"],
        ),
        ({"hidden_act": "gelu"}, "fused_layer", ["hidden_act = 'gelu'", "expected 'silu'"]),
        (
            {"hidden_size": 32_772, "head_dim": 16},
            "rmsnorm",
            ["hidden_size = 32772", "from 1 to 32,768"],
        ),
        ({"head_dim": 4098}, "rope", ["head_dim = 4098", "from 2 to 4,096"]),
    ],
    ids=["gelu, swiglu", "gelu, fused_layer", "long rows", "long heads"],
)
def test_what_a_kernel_cannot_take_is_said_before_the_weights_are_loaded(
    run, checkpoint, monkeypatch, script, values, kernels, words
):
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("loaded")
    )
    change_config(checkpoint, intermediate_size=8, **values)
    # the ladder runs them all
    flags = [] if script.endswith("--ladder") else ["--kernels", kernels]
    assert_refused(run(script, *flags), f"the config.json of {checkpoint}", *words)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "script",
    mostly(EVERY_DAY, [name for name in SCRIPTS if "--" not in name or "estimate" in name]),
)
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
def test_an_unusual_config_that_can_be_trained_is(run, checkpoint, script, values):
    change_config(checkpoint, **values)
    outcome = run(script, *(["--kernels", "none"] if script != "finetune_baseline" else []))
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


@pytest.mark.parametrize(
    "script", mostly(EVERY_DAY, ["finetune_baseline", "finetune_optimized", "profile_baseline"])
)
@pytest.mark.parametrize(
    ("values", "change", "words"),
    [
        (
            {"num_hidden_layers": 1},
            dict,
            ["9 not part of that model", "model.layers.1.input_layernorm.weight"],
        ),
        ({}, lambda w: w | {BIAS: torch.ones(64)}, [f"1 not part of that model, {BIAS}"]),
        ({"attention_bias": True}, dict, ["8 missing, model.layers.0.self_attn.k_proj.bias"]),
        ({"num_hidden_layers": 3}, dict, ["9 missing, model.layers.2.input_layernorm.weight"]),
        (
            {"intermediate_size": 128},
            dict,
            ["6 of another shape", "model.layers.0.mlp.down_proj.weight"],
        ),
        (
            {},
            lambda w: {f"wrapped.{name}": t for name, t in w.items()},
            ["21 missing", "21 not part"],
        ),
    ],
    ids=[
        "too many layers",
        "a bias too many",
        "no bias",
        "too few layers",
        "another shape",
        "other names",
    ],
)
def test_weights_that_are_not_the_configurations_are_refused(
    run, checkpoint, script, values, change, words
):
    change_config(checkpoint, **values)
    change_weights(checkpoint, change)
    assert_refused(run(script), f"the weights of {checkpoint} do not fit its config.json", *words)


@pytest.mark.parametrize(
    ("values", "change"),
    [
        ({"tie_word_embeddings": True}, dict),
        (
            {"tie_word_embeddings": True},
            lambda w: {name: t for name, t in w.items() if name != "lm_head.weight"},
        ),
        (
            {},
            lambda w: (
                w
                | {
                    f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8)
                    for i in range(2)
                }
            ),
        ),
        ({}, lambda w: w | {"model.rotary_emb.inv_freq": torch.ones(8)}),
    ],
    ids=["tied, with a head", "tied, without one", "old frequencies", "frequencies"],
)
def test_weights_that_are_known_to_be_superfluous_are_not_refused(run, checkpoint, values, change):
    change_config(checkpoint, **values)
    change_weights(checkpoint, change)
    assert run("finetune_baseline").code == 0


# ---------------------------------------------------------------- paths


@contextlib.contextmanager
def ordinary_user() -> Iterator[None]:
    """root may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def public_checkpoint(saved_tiny) -> Iterator[Path]:
    """Where everybody may look; pytest's own folders are for their owner alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        copy = Path(shutil.copytree(saved_tiny, f"{folder}/parent/checkpoint"))
        for path in (copy.parent, copy):
            path.chmod(0o755)
        yield copy


# profile_baseline without a flag asks first whether its trace can be written, which that user may
# not
@pytest.mark.parametrize(
    "script", mostly(EVERY_DAY, [name for name in SCRIPTS if name != "profile_baseline"])
)
@pytest.mark.parametrize("closed", ["checkpoint", "checkpoint/config.json", "."])
def test_a_model_that_may_not_be_read_is_one_sentence(
    run_script, public_checkpoint, script, closed
):
    module, flags = SCRIPTS[script]
    path = public_checkpoint.parent / closed
    path.chmod(0)
    with ordinary_user():
        outcome = run_script(module, "--model", str(public_checkpoint), *flags)
    path.chmod(0o755)
    assert_refused(outcome, f"--model {public_checkpoint} cannot be read: Permission denied")


def test_a_folder_that_may_be_entered_but_not_listed_is_not_taken_to_hold_no_tokenizer(
    run_script, public_checkpoint
):
    """Without its tokenizer, bytes would be the tokens."""
    public_checkpoint.chmod(0o711)
    with ordinary_user():
        outcome = run_script(finetune_baseline, "--model", str(public_checkpoint), *STEPS)
    public_checkpoint.chmod(0o755)
    assert_refused(outcome, "cannot be read: Permission denied")


@pytest.mark.parametrize("script", mostly(EVERY_DAY, list(SCRIPTS)))
@pytest.mark.parametrize(
    ("name", "words"),
    [("m" * 300, "File name too long"), (f"folder/{'m' * 300}", "neither a directory nor")],
    ids=["name", "name in a folder"],
)
def test_a_name_of_300_characters_is_one_sentence(run_script, tmp_path, script, name, words):
    module, flags = SCRIPTS[script]
    runs = module is profile_baseline and "--memory" not in flags and "--estimate" not in flags
    trace = ["--trace", str(tmp_path / "trace.json")] if runs else []
    assert_refused(run_script(module, "--model", name, *flags, *trace), words)


@pytest.mark.parametrize(
    "name", ["./run1", "checkpoints/run1/", "a/b/run1", "/nowhere/run1", "~/run1"]
)
def test_a_directory_that_is_not_there_is_called_that(run_script, monkeypatch, name):
    monkeypatch.setattr(
        config_file, "hf_hub_download", lambda *args: pytest.fail("the network was asked")
    )
    outcome = run_script(finetune_baseline, "--model", name)
    assert_refused(outcome, f"the directory {name} does not exist")


@pytest.mark.parametrize("error", ["LocalEntryNotFoundError", "RepositoryNotFoundError"])
def test_a_name_that_could_be_both_is_said_to_be_neither(run_script, monkeypatch, tmp_path, error):
    errors = {
        "LocalEntryNotFoundError": hub_errors.LocalEntryNotFoundError("not cached"),
        "RepositoryNotFoundError": hub_error("RepositoryNotFoundError", 404),
    }

    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(config_file, "hf_hub_download", raising(errors[error]))
    outcome = run_script(finetune_baseline, "--model", "checkpoints/run1")
    assert_refused(outcome, "there is no directory checkpoints/run1", "Hugging Face")


def test_a_file_for_a_model_is_refused(run_script, checkpoint):
    outcome = run_script(finetune_baseline, "--model", str(checkpoint / "model.safetensors"))
    assert_refused(outcome, "model.safetensors is a file", "directory")


@pytest.mark.exhaustive
@pytest.mark.skipif(HAS_GPU, reason="with a GPU no interpreter is needed")
@pytest.mark.parametrize(
    "flags",
    [
        ["--kernels", "all"],
        pytest.param(["--kernels", "rmsnorm", "--longest"], marks=rarely(True)),
    ],
)
def test_kernels_without_gpu_and_interpreter_are_one_sentence(checkpoint, flags):
    """In a process of its own: what is imported while kernels are compiled stays so."""
    script = Path(finetune_optimized.__file__)
    command = [sys.executable, str(script), "--model", str(checkpoint), "--seq-len", "8", *flags]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(command, capture_output=True, text=True, env=env)
    assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stderr
    assert "TRITON_INTERPRET is '0'" in run.stderr and "unset it" in run.stderr
