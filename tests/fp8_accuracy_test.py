"""What is made of the curves; and a small run of all seeds and modes."""

import importlib.util
import os
from dataclasses import replace

import pytest

from harness.cli.device import HAS_GPU
from next_steps.patches import patched_model
from next_steps.studies import fp8_accuracy
from next_steps.studies.fp8_accuracy import more_steps, table_row
from tests.small_workloads import small_workload, tiny_workload
from tests.warm_processes import forks

CURVE = [5.0, 4.0, 3.0, 2.5]  # at steps 0, 10, 20, 30


@pytest.mark.parametrize(
    "last, expected",
    [
        (4.0, (20.0, "")),
        (3.25, (12.5, "")),
        (2.5, (0.0, "")),
        (5.0, (30.0, "")),
        (2.4, (0.0, "<=")),
        (5.1, (30.0, ">=")),
    ],
)
def test_more_steps_are_those_that_the_reference_was_earlier(last, expected):
    assert more_steps(CURVE, [5.0, 4.0, 3.0, last], 10) == expected
    assert more_steps([5.0, 3.0, 4.0, 2.0], [3.5], 10) == (22.5, ""), "a curve that rises again"


def test_a_row_has_means_and_extremes_of_pairs_of_the_same_seed():
    def run(last, seconds=0.1):
        return {"curve": [5.0, 4.0, 3.0, last], "median_seconds": seconds}

    first, second = [run(2.5), run(2.0)], [run(2.75, 0.05), run(1.9, 0.05)]
    row = table_row("fp8 all", second, first, 10)
    assert row[:5] == ["fp8 all", "2.3250", "+0.0750", "-0.1000", "+0.2500"]
    assert row[5:] == ["2.5", "<= 0.0", "5.0", "50.0"]
    assert table_row("bf16", first, first, 10) == ["bf16", "2.2500", *[""] * 6, "100.0"]
    untimed = [run | {"median_seconds": None} for run in second]
    assert table_row("fp8 all", untimed, first, 10) == [*row[:-1], "n/a"]


def test_what_validating_as_it_trains_adds_is_said_for_each_way():
    first = [{"curve": [5.0, 2.5]}, {"curve": [5.0, 2.0]}]
    second = [{"curve_as_trained": [5.5, 2.75]}, {"curve_as_trained": [5.5, 2.35]}]
    line = fp8_accuracy.line_as_trained("fp8 all", second, first, "in FP8")
    assert line.startswith("fp8 all") and "+0.5000 before" in line and "+0.3000 after" in line


@pytest.fixture
def run_study(recorded, small_model, own_cache, little_validation):
    """run_study(name, "--flag", ...): the record of a small run, and what it printed."""
    size = "--model", "tiny", "--batch-size", "2", "--seq-len", "8"
    return lambda name, *flags: recorded(fp8_accuracy, name, *size, *flags)


@pytest.mark.exhaustive
def test_every_seed_trains_in_every_way(run_study, fp8_references):
    record = run_study("accuracy", "--steps", "2", "--seeds", "2")
    assert [(run["seed"], run["way"]) for run in record["runs"]] == [
        (seed, way) for seed in (0, 1) for way in fp8_accuracy.STUDIES["accuracy"].ways
    ]
    assert all(len(run["curve"]) == 3 and len(run["losses"]) == 2 for run in record["runs"])
    first, other = record["runs"][:2]
    assert first["curve_as_trained"] == []
    # before the first step: the same weights
    assert first["curve"][0] == other["curve"][0] != other["curve_as_trained"][0]
    assert first["curve"][-1] != other["curve"][-1] != other["curve_as_trained"][-1]
    assert len(other["curve_as_trained"]) == 3
    assert first["losses"] != record["runs"][2]["losses"]
    assert "fp8, validated with FP8's products" in record["printed"]
    assert "Accuracy of FP8, 2 seeds" in record["printed"]
    assert "step 1/2" not in record["printed"]


@pytest.mark.exhaustive
def test_every_seed_trains_with_both_kinds_of_moments(run_study, monkeypatch):
    monkeypatch.setattr(fp8_accuracy, "KERNELS", ["adamw"])  # the interpreter is slow
    record = run_study("moments", "--steps", "3", "--seeds", "1", "--dtype", "bf16")
    runs = {run["way"]: run for run in record["runs"]}
    with_flashoptim = "8bit, 24-bit weights"
    left_out = not (HAS_GPU and importlib.util.find_spec("flashoptim"))
    assert (f"{with_flashoptim}: left out" in record["printed"]) is left_out
    expected = [*fp8_accuracy.STUDIES["moments"].ways]
    assert [*runs] == [way for way in expected if not (left_out and way == with_flashoptim)]
    wide, coded = (runs[way]["losses"] for way in ("bf16", "8bit"))
    # the first step is the same to the bit, and the loss after it
    assert wide[:2] == coded[:2] and wide[2] != coded[2]
    assert len({run["curve"][-1] for run in record["runs"]}) == len(runs)
    # before the first step: the same weights, rounded to bf16 for the curve alone
    fp32 = runs["fp32, fp32 weights"]
    assert fp32["curve"][0] != fp32["curve_as_trained"][0]
    assert all(run["curve"][0] == fp32["curve"][0] != run["curve"][-1] for run in record["runs"])
    assert [way for way in runs if runs[way]["curve_as_trained"]] == ["fp32, fp32 weights"]
    assert "fp32, fp32 weights, validated in fp32" in record["printed"]
    assert "Accuracy of 8-bit moments, 1 seeds" in record["printed"]
    assert fp8_accuracy.render(record) in record["printed"]


@pytest.mark.exhaustive
def test_flashoptim_stands_for_adamw_alone(
    monkeypatch, small_model, own_cache, little_validation, flashoptim
):
    patched = []
    load = patched_model.patch
    monkeypatch.setattr(
        patched_model, "patch", lambda m, w: patched.append(w.kernels) or load(m, w)
    )
    workload = replace(small_workload("--dtype", "bf16"), kernels=("rmsnorm", "adamw"), steps=2)
    run = fp8_accuracy.loss_curve(replace(workload, opponent="flashoptim"), 1, "bf16")
    assert flashoptim == [24, "released"] and patched == [("rmsnorm", "adamw")]
    assert len(run["curve"]) == 3 and run["curve"][0] != run["curve"][-1]


@pytest.mark.exhaustive
def test_adapters_are_validated_beside_the_original_weights_too(run_study, fp8_references):
    record = run_study("lora", "--steps", "2", "--seeds", "1")
    plain, fp8, nf4 = record["runs"]
    assert (plain["way"], fp8["way"], nf4["way"]) == ("bf16", "fp8", "nf4")
    assert plain["curve_as_trained"] == []
    for run in (fp8, nf4):
        # adapters that do nothing yet, beside the original weights, are the model that came
        assert run["curve"][0] == plain["curve"][0] != run["curve_as_trained"][0]
        # afterwards the adapters differ, and so does what they stand beside
        assert run["curve"][-1] not in (plain["curve"][-1], run["curve_as_trained"][-1])
    assert "beside the original weights" in record["printed"]


def trained_elsewhere(workload, every, dtype):
    return {"seed": workload.seed, "process": os.getpid(), "median_seconds": 0.1}


def test_jobs_give_records_in_order_and_without_times(monkeypatch):
    monkeypatch.setattr(fp8_accuracy, "loss_curve", trained_elsewhere)
    monkeypatch.setattr(fp8_accuracy.multiprocessing, "get_context", {"spawn": forks()}.get)
    workloads = [replace(tiny_workload(), seed=seed) for seed in range(3)]
    alone, beside = (list(fp8_accuracy.train_all(workloads, 1, jobs)) for jobs in (1, 2))
    assert [run["seed"] for run in alone] == [run["seed"] for run in beside] == [0, 1, 2]
    assert all(run["median_seconds"] == 0.1 and run["process"] == os.getpid() for run in alone)
    assert all(run["median_seconds"] is None and run["process"] != os.getpid() for run in beside)
