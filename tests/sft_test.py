"""TRL's SFTTrainer trains with the kernels what it trains without; what the script refuses."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.cli.command_line import UserError
from harness.cli.device import HAS_GPU
from harness.cli.workload import Workload
from harness.model.loading import load_model
from next_steps.hugging_face import sft
from next_steps.patches.apply_kernels import apply_kernels
from tests.chat_test import TALK, TURNS, WORDS
from tests.conftest import assert_refused
from tests.small_workloads import jsonl, tiny_workload
from tests.token_cache_test import tokenizer_of

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs the package trl (pip install trl)"
)
pytestmark = pytest.mark.usefixtures("own_cache")
LENGTH, STEPS = 12, 2
# of different lengths, so that micro-batches weigh differently; one is cut
EXAMPLES = (
    *(("ab", "cdefg"), ("a", "b"), ("abcdefgh", "ijklmnop"), ("é", "ü")),
    *(("ab", "c"), ("", "abcd"), ("abcdef", "g"), ("a", "bcdefgh")),
)
FLAGS = ["--model", "tiny", "--dtype", "fp32", "--lr", "1e-2"]
FLAGS += ["--seq-len", str(LENGTH), "--steps", str(STEPS), "--batch-size", "2", "--accumulate", "2"]


@pytest.fixture
def data(tmp_path, small_model) -> Iterator[str]:
    """A file of examples, which `datasets` handles without progress bars."""
    import datasets

    datasets.disable_progress_bars()
    yield str(jsonl(tmp_path / "examples.jsonl", *EXAMPLES))
    datasets.enable_progress_bars()


@needs_trl
@pytest.mark.parametrize("lora", [[], ["--lora-rank", "4"]], ids=["full", "lora"])
def test_kernels_change_no_loss(recorded, data, lora, launches):
    flags = [sft, *FLAGS, "--data", data, *lora]
    baseline = recorded(*flags, "--kernels", "none")
    assert not launches
    first, last = baseline["losses"]
    assert abs(last - first) > 1e-2, "nothing was learned: this comparison cannot fail"
    assert "mean_token_accuracy" in baseline["printed"]
    lengths = [min(len("".join(each).encode()) + 1, LENGTH) for each in EXAMPLES]
    assert sum(baseline["tokens"]) == sum(lengths)  # an epoch, without padding

    n_calls, n_trained = 2 * STEPS, 14 if lora else 12
    for kernels in ("rmsnorm,swiglu,rope,fused_layer", "all"):
        launches.clear()
        record = recorded(*flags, "--kernels", kernels)
        assert record["losses"] == pytest.approx(baseline["losses"], rel=1e-4)
        assert record["tokens"] == baseline["tokens"]
        # the fused layer computes its norms again in the backward
        assert launches["rmsnorm_fwd"] == n_calls * 5 and launches["rope"] == n_calls * 2
        has_all = kernels == "all"
        assert launches["cross_entropy_inplace"] == n_calls * has_all
        assert launches["adamw"] == STEPS * n_trained * has_all
        # TRL's loss also makes these metrics
        assert ("mean_token_accuracy" in record["printed"]) == (not has_all)


@needs_trl
def test_adapters_have_the_models_dtype(data):
    """In peft's default, fp32, the fused layer would leave them to peft."""
    lora = {"lora_rank": 4, "lora_alpha": 4.0, "lora_targets": "all"}
    sizes = {"model": "tiny", "dtype": "bf16", "seq_len": LENGTH, "steps": 1, "lr": 1e-3}
    trainer = sft.train(Workload(data=data, **sizes, **lora))
    dtypes = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    assert dtypes == {torch.bfloat16}
    assert trainer.accelerator.mixed_precision == "no"


PAIRS = [{"prompt": "ab", "chosen": "cdefg", "rejected": "zz"}]
JUDGED = [{"prompt": "ab", "completion": text, "label": text == "cd"} for text in ("cd", "xyz")]
SAMPLING = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 4}
PREFERENCES = {  # a trainer of TRL: its data, its settings
    "DPO": (PAIRS, {}),
    "KTO": (JUDGED, {"per_device_train_batch_size": 2}),
    "GRPO": ([{"prompt": "ab"}], SAMPLING),
    "RLOO": ([{"prompt": "ab"}], SAMPLING),
}


def different_letters(completions: list[str], **_) -> list[float]:
    """A reward that differs between completions."""
    return [float(len({*text})) for text in completions]


@needs_trl
@pytest.mark.parametrize("name", PREFERENCES)
def test_kernels_change_no_step_of_trls_others(tmp_path, small_model, name, launches):
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    load_model(tiny_workload(*FLAGS)).save_pretrained(tmp_path)  # TRL loads the reference itself
    data, settings = PREFERENCES[name]
    online = {"reward_funcs": different_letters} if settings is SAMPLING else {}
    options = {"bf16": False, "gradient_checkpointing": False, "use_cpu": not HAS_GPU}
    options |= {"max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-2}
    options |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    logs = []
    for prepare in (lambda model: model, apply_kernels):
        assert not launches
        trainer = getattr(trl, f"{name}Trainer")(
            prepare(AutoModelForCausalLM.from_pretrained(tmp_path)),
            args=getattr(trl, f"{name}Config")(**options, **settings),
            train_dataset=Dataset.from_list(data),
            processing_class=sft.byte_tokenizer(),
            **online,
        )
        trainer.train()
        logs.append(trainer.state.log_history[:STEPS])
    assert launches["rmsnorm_bwd"] and launches["rope"]
    for plain, ours in zip(*logs):
        assert plain["grad_norm"] > 1e-2, "nothing is learned: this comparison cannot fail"
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(plain[key], rel=1e-4, abs=1e-5), key


def test_bytes_are_the_tokens_of_a_model_without_a_tokenizer():
    tokenizer = sft.byte_tokenizer()
    text = "naïve\n <end"
    assert tokenizer(text)["input_ids"] == [*text.encode()]
    assert tokenizer("a<end>")["input_ids"] == [97, 256]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256


# ---- What is read


def read(file: Path, tokenizer=None) -> list[list[int]]:
    """Return the labels of each example, of a model with 257 tokens."""
    workload = Workload(data=str(file), model="tiny", seq_len=LENGTH)
    return list(sft.read_examples(workload, tokenizer)["labels"])


@needs_trl
def test_the_file_that_is_named_is_read_and_no_other(tmp_path):
    """`datasets` takes a path for a pattern, and what it has made of a file for the file."""
    (tmp_path / "a1.jsonl").write_text("this is another file")
    file = tmp_path / "a[12].jsonl"
    for completion in "bc":
        jsonl(file, ("a", completion))
        os.utime(file, (0, 0))
        assert read(file) == [[-100, ord(completion), 256]]
    for missing in (tmp_path / "*.jsonl", Path(f"file://{file}")):
        with pytest.raises(UserError, match="cannot read"):
            read(missing)


@needs_trl
def test_the_assistants_turns_are_trained_on(tmp_path):
    file, tokenizer = tmp_path / "talk.jsonl", tokenizer_of(WORDS, chat_template=TURNS)
    file.write_text(json.dumps({"messages": TALK[:2]}))
    (labels,) = read(file, tokenizer)
    trained = tokenizer.convert_ids_to_tokens([label for label in labels if label != -100])
    assert trained == ["hello", "<end>"] and len(labels) == 7


@needs_trl
@pytest.mark.parametrize(
    "line, words",
    [
        ('{"question": "a"}', "line 2: expected a JSON object with strings"),
        ('{"messages": []}', "line 2: no answer of the assistant"),
        ('{"prompt": "w0 ", "completion": "w299"}', "outside the model's vocabulary"),
    ],
)
def test_an_example_that_cannot_be_used_is_refused(line, words, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n' + line)
    vocabulary = " ".join(f"w{i}" for i in range(300))
    with pytest.raises(UserError, match=words):
        read(file, tokenizer_of(vocabulary, chat_template=TURNS))


def test_flags_that_do_not_fit_are_refused(run_script, monkeypatch):
    given = ["--data", "a.jsonl"]
    assert_refused(run_script(sft, "--data", "stdlib"), "--data stdlib", "a .jsonl file")
    flags = ["--opponent", "liger", "--kernels", "all"]
    assert_refused(run_script(sft, *given, *flags), "--kernels does nothing with --opponent")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert_refused(run_script(sft, *given), "trl is not installed: pip install trl")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "trl" or None)
    assert_refused(run_script(sft, *given, "--opponent", "liger"), "pip install liger-kernel")
