"""Steps train, both scripts run the same loop, and what is saved goes on where it stopped."""

import difflib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import finetune_baseline
import finetune_optimized
from harness import (
    architecture,
    dataset,
    loading,
    saving,
    stepping,
    training_run,
)
from harness.checking import DEVICE, relative_error
from harness.kernel_facts import KERNELS
from next_steps import kernel_training
from tests.fixtures import needs_gpu
from tests.small_workloads import (
    TINY,
    jsonl,
    tiny_workload,
)

# isort: split
# after the harness, which decides how triton (imported by these) will run
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

PLAYBOOK = ["rmsnorm", "cross_entropy"]


def run(script, monkeypatch, tmp_path: Path, *flags: str) -> dict:
    """The record of script.main() with these flags."""
    record = tmp_path / f"{script.__name__}.json"
    monkeypatch.setattr("sys.argv", [script.__name__, *TINY, *flags, "--json", str(record)])
    script.main()
    return json.loads(record.read_text())


PAGES = [Path(script.__file__).read_text() for script in (finetune_baseline, finetune_optimized)]


def test_the_difference_of_the_two_scripts_fits_on_a_screen():
    lines = [page.splitlines() for page in PAGES]
    differing = [line for line in difflib.ndiff(*lines) if line[:2] in ("- ", "+ ")]
    assert len(differing) <= 32


def test_both_scripts_show_the_same_loop():
    loops = [page[page.index("    for batch in run.batches():") :] for page in PAGES]
    assert loops[0] == loops[1]
    for step in ("model(input_ids", "loss.backward()", "optimizer.step()", "optimizer.zero_grad("):
        assert loops[0].count(step) == 1


@pytest.mark.exhaustive
def test_the_pages_patch_is_that_of_apply_kernels(monkeypatch, tmp_path):
    """To the bit: the loop of next_steps, which takes any kernels, with the same two."""
    flags = ["--seq-len", "8", "--steps", "2"]
    shown = run(finetune_optimized, monkeypatch, tmp_path, *flags)
    workload = replace(tiny_workload(*flags), kernels=tuple(PLAYBOOK))
    applied = kernel_training.train(workload)
    keys = "losses", "validation_loss_before", "validation_loss_after", "kernels", "title"
    assert {key: shown[key] for key in keys} == {key: applied[key] for key in keys}


def test_both_scripts_run_the_same_loop(monkeypatch, tmp_path):
    flags = ["--seq-len", "24", "--batch-size", "2", "--steps", "4"]
    baseline = run(finetune_baseline, monkeypatch, tmp_path, *flags)
    unpatched = run(finetune_optimized, monkeypatch, tmp_path, *flags, "--kernels", "none")
    assert baseline.keys() == unpatched.keys()
    assert unpatched["losses"] == pytest.approx(baseline["losses"], rel=1e-6)
    differing = {key for key in baseline if baseline[key] != unpatched[key]}
    assert differing <= {
        "title", "seconds", "average_seconds", "median_seconds", "tokens_per_second", "peaks",
        "peak_memory_bytes", "losses", "validation_loss_after",
    }  # fmt: skip


def test_validation_loss_weighs_tokens_not_batches(tmp_path):
    path = jsonl(tmp_path / "data.jsonl", ("", "abcdefghijkl"), ("abcdefgh", "i"))
    model = loading.load_model(tiny_workload())
    examples, _ = dataset.read_jsonl(str(path), lambda text: list(text.encode()), [], seq_len=16)
    batches = dataset.make_batches(examples, batch_size=1)
    # nothing predicts a sequence's first token, which the empty prompt leaves to train on
    sums, counts = (
        [],
        [11, 1],
    )
    for batch in batches:
        logits = model(input_ids=batch.input_ids.to(DEVICE)).logits.detach()[0, :-1].cpu()
        sums.append(
            torch.nn.functional.cross_entropy(logits, batch.labels[0, 1:], reduction="sum").item()
        )
    found = training_run.validation_loss(model, batches)
    assert found == pytest.approx(sum(sums) / sum(counts), rel=1e-5)
    wrong = sum(total / count for total, count in zip(sums, counts)) / 2
    assert found != pytest.approx(wrong, rel=1e-4), "this comparison cannot fail"
    assert model.training


def test_training_step_is_forward_backward_update_and_clean_gradients():
    workload = tiny_workload("--steps", "3")
    model, plain = loading.load_model(workload), loading.load_model(workload)
    optimizer = stepping.make_optimizer(model, 1e-3)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for batch in dataset.load_data(workload, model.config, 3).train:
        batch = batch.to(DEVICE)
        loss = stepping.training_step(model, optimizer, batch)
        plain_loss = plain(input_ids=batch.input_ids, labels=batch.labels).loss
        plain_loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-6) and not loss.requires_grad
        assert all(parameter.grad is None for parameter in model.parameters())
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert relative_error(ours, theirs) < 1e-5


def test_the_steps_are_those_of_the_optimizer_that_is_given(tmp_path):
    workload = tiny_workload("--steps", "2", "--lr", "0.25")
    model = loading.load_model(workload)
    run = training_run.Run("Mine", workload, model, record_to=str(tmp_path / "run.json"))
    record = kernel_training.take_steps(run, torch.optim.SGD(model.parameters(), lr=1e-30))
    assert record["title"] == "Mine" and record["lr"] == 0.25
    unchanged = record["validation_loss_before"]
    assert record["validation_loss_after"] == unchanged, "a step of 1e-30 changes nothing"


def loss_differences(baseline: dict, optimized: dict) -> list[float]:
    first = [
        *baseline["losses"],
        baseline["validation_loss_before"],
        baseline["validation_loss_after"],
    ]
    second = [
        *optimized["losses"],
        optimized["validation_loss_before"],
        optimized["validation_loss_after"],
    ]
    return [abs(a - b) / a for a, b in zip(first, second)]


KERNEL_FLAGS = {
    "default": ([], PLAYBOOK),
    "all": (["--kernels", "all"], KERNELS),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("flags, kernels", KERNEL_FLAGS.values(), ids=KERNEL_FLAGS)
def test_optimized_run_follows_the_baseline_step_by_step(monkeypatch, tmp_path, flags, kernels):
    steps = 5 if "all" in flags else 10  # the interpreter is slow
    workload = ["--seq-len", "8", "--steps", str(steps)]
    baseline = run(finetune_baseline, monkeypatch, tmp_path, *workload)
    optimized = run(finetune_optimized, monkeypatch, tmp_path, *workload, *flags)
    assert optimized["kernels"] == kernels and baseline["kernels"] == []
    assert len(baseline["losses"]) == len(optimized["losses"]) == steps
    assert max(loss_differences(baseline, optimized)) < 1e-5
    assert baseline["validation_loss_after"] < baseline["validation_loss_before"], (
        "nothing was learned"
    )


@needs_gpu
@pytest.mark.parametrize("kernels", ["rmsnorm,cross_entropy", "all"])
def test_optimized_run_follows_the_baseline_in_bf16(monkeypatch, tmp_path, kernels):
    flags = ["--dtype", "bf16", "--seq-len", "256", "--batch-size", "4", "--steps", "20"]
    baseline = run(finetune_baseline, monkeypatch, tmp_path, *flags)
    optimized = run(finetune_optimized, monkeypatch, tmp_path, *flags, "--kernels", kernels)
    assert max(loss_differences(baseline, optimized)) < 1e-2


@pytest.mark.exhaustive
def test_saved_model_loads_and_goes_on_from_where_it_stopped(monkeypatch, tmp_path):
    folder = tmp_path / "saved"
    trained = run(finetune_optimized, monkeypatch, tmp_path, "--steps", "2", "--save", str(folder))
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    saved_config, config = (
        AutoConfig.from_pretrained(folder).to_dict(),
        architecture.tiny_config().to_dict(),
    )
    changed = {key for key in config if saved_config[key] != config[key]}
    assert changed <= {"_name_or_path", "architectures", "dtype", "transformers_version"}
    AutoModelForCausalLM.from_pretrained(folder)

    # over the file it was read from
    again = [
        "--model",
        str(folder),
        "--steps",
        "2",
        "--save",
        str(folder),
    ]
    resumed = run(finetune_baseline, monkeypatch, tmp_path, *again)
    assert resumed["weights"] == "pretrained weights"
    assert resumed["validation_loss_before"] == pytest.approx(
        trained["validation_loss_after"], rel=1e-5
    )
    third = run(finetune_baseline, monkeypatch, tmp_path, *again)
    assert third["validation_loss_before"] == pytest.approx(
        resumed["validation_loss_after"], rel=1e-5
    )


def test_saving_leaves_no_shard_of_an_older_model(tmp_path):
    workload = tiny_workload()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-00001-of-00002.safetensors").write_text("older")
    (tmp_path / "notes.txt").write_text("the user's own")
    model = loading.load_model(workload)
    saving.save_model(model, workload, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "notes.txt",
    ]  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value.cpu()) for name, value in model.state_dict().items())


def test_the_tokenizer_is_saved_with_the_model(monkeypatch, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    AutoModelForCausalLM.from_config(architecture.tiny_config()).save_pretrained(first)
    words = Tokenizer(models.WordLevel({"[unknown]": 0, "import": 7, "def": 8}, "[unknown]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[unknown]").save_pretrained(first)
    run(
        finetune_baseline,
        monkeypatch,
        tmp_path,
        "--model",
        str(first),
        "--steps",
        "1",
        "--save",
        str(second),
    )
    workload = tiny_workload("--model", str(second))
    assert dataset.load_tokenizer(workload)("def f ( ) : import os")["input_ids"] == [
        8,
        0,
        0,
        0,
        0,
        7,
        0,
    ]
    (ids, _), *_ = dataset.pack(
        ["import def"], *dataset.text_encoder(dataset.load_tokenizer(workload), None), 2, 1
    )
    assert ids.tolist() == [7, 8]
