"""The page docs/own_data.md: its file, its commands and its snippets, one after the other.

The model is tiny, and its tokenizer knows the page's words.  What a command has saved is loaded in
a process that cannot see this project.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import finetune_optimized
from harness.model.loading import load_model
from tests.chat_test import TURNS
from tests.readme_test import TEXTS, blocks
from tests.sft_test import needs_trl
from tests.small_workloads import tiny_workload
from tests.token_cache_test import tokenizer_of

PAGE = TEXTS["docs/own_data.md"]
PAIRS, TALKS = blocks(PAGE, "json")
OF_A_MODEL, OF_ADAPTERS, WITH_TRL, CONVERTING = blocks(PAGE, "python")
MODEL, *COMMANDS = blocks(PAGE, "bash")[0].replace("\\\n", " ").splitlines()
MODEL = re.fullmatch('model="(.+)"', MODEL)[1]
MORE = ["--dtype", "fp32", "--seq-len", "48", "--steps", "6", "--lr", "0.005"]

# In plain transformers: the loss of the held-out line, which is the last one.
LOSS = """
import json, torch
def ids_of(example, answered):
    if "prompt" in example:
        text = example["prompt"] + (example["completion"] + tokenizer.eos_token) * answered
        return tokenizer(text, return_tensors="pt").input_ids
    messages = example["messages"][:None if answered else -1]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=not answered, return_tensors="pt", return_dict=True
    ).input_ids
example = json.loads(open("runs/mine.jsonl").read().splitlines()[-1])
ids = ids_of(example, True)
labels = ids.clone()
labels[:, : ids_of(example, False).shape[1]] = -100
with torch.no_grad():
    print("loss", model(input_ids=ids, labels=labels).loss.item())
"""


@pytest.fixture
def base(checkpoint) -> Path:
    """A saved model and its tokenizer, which takes what stands between two spaces for a token."""
    words = re.findall(r'[^\s"]+', (PAIRS + TALKS).replace("\\n", " "))
    vocabulary = " ".join(dict.fromkeys(["<end>", "<user>", "<assistant>", *words]))
    tokenizer = tokenizer_of(vocabulary, chat_template=TURNS, eos_token="<end>")
    tokenizer.save_pretrained(checkpoint)
    return checkpoint


@pytest.fixture
def trained(base, own_cache, recorded, tmp_path):
    """trained(command, lines): the record of one of the page's commands."""

    def run(command: str, lines: str) -> dict:
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "mine.jsonl").write_text(lines)
        python, script, *flags = shlex.split(command.replace("$model", str(base)))
        assert (python, script) == ("python", "finetune_optimized.py")
        flags = [flag.replace("runs/", f"{tmp_path}/runs/") for flag in flags]
        return recorded(finetune_optimized, *flags, *MORE)

    return run


def loaded(snippet: str, base: Path, folder: str) -> float:
    """Run a snippet of the page in a folder that holds runs/; return its model's loss."""
    snippet = snippet.replace("runs/tuned", f"runs/{folder}").replace(MODEL, str(base))
    assert f"runs/{folder}" in snippet
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone = "\nimport sys\nassert not {'harness', 'kernel_support'} & set(sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", snippet + LOSS + alone],
        **{"cwd": base.parent, "env": inherited, "capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr
    *written, said = done.stdout.splitlines()
    assert "code word" in " ".join(written)
    return float(said.removeprefix("loss "))


FULL, LORA, NF4 = COMMANDS
WAYS = {
    "all weights, messages": (FULL, TALKS, OF_A_MODEL, "tuned"),
    "adapters, prompt": (LORA, PAIRS, OF_ADAPTERS, "adapter"),
    "merged from 4 bits, messages": (NF4, TALKS, OF_A_MODEL, "merged"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_what_was_trained_is_what_plain_transformers_loads(trained, base, way):
    command, lines, snippet, folder = WAYS[way]
    record = trained(command, lines)
    before, after = record["validation_loss_before"], record["validation_loss_after"]
    assert after < before - 0.5
    assert loaded(snippet, base, folder) == pytest.approx(after, rel=1e-4)


@needs_trl
@pytest.mark.exhaustive
def test_sft_trainer_saves_the_best_of_several_validations(
    base,
    tmp_path,
    monkeypatch,
    capsys,
    launches,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine.jsonl").write_text(PAIRS)
    names = {}
    load_model(tiny_workload()).save_pretrained(base)  # of a seed: with this rate it diverges late
    exec(WITH_TRL.replace(MODEL, str(base)).replace("1e-5", "0.5"), names)
    assert launches["rmsnorm_bwd"] and launches["rope"]
    log = names["trainer"].state.log_history
    losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    assert len(losses) == 3 and losses[1] < min(losses[0], losses[2]) - 0.5
    capsys.readouterr()
    exec(OF_A_MODEL.replace("runs/tuned", "runs/trl") + LOSS, {})
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(losses[1], rel=1e-3)


def test_rows_of_alpaca_and_sharegpt_become_lines():
    exec(CONVERTING, made := {})
    alpaca = {"instruction": "Add.", "input": "2 + 2", "output": "4"}
    assert made["from_alpaca"](alpaca) == {"prompt": "Add.\n2 + 2\n", "completion": "4"}
    assert made["from_alpaca"](alpaca | {"input": ""})["prompt"] == "Add.\n"
    (talk,) = map(json.loads, TALKS.splitlines()[:1])
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[t["role"]], "value": t["content"]} for t in talk["messages"]]
    assert made["from_sharegpt"]({"conversations": turns}) == talk
