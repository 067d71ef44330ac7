"""--fp8: what reaches the model and the record, and what a run says of it."""

import json

import pytest

import finetune_optimized
import profile_baseline
from harness.benchmark.checking import HAS_GPU
from harness.cli.flags import finetune_parser
from harness.cli.workload import Workload
from harness.model import architecture, loading
from harness.training import resuming
from next_steps import finetune_options
from next_steps.finetuning import kernel_training
from next_steps.layers import fp8_layer
from next_steps.patches import fp8_model
from tests.fp8_layer_test import REFERENCES
from tests.small_workloads import TINY, smaller_config

DTYPE = ["--dtype", "bf16"] if HAS_GPU else []  # which a GPU asks for
SMALL = [*TINY, *DTYPE, "--seq-len", "8", "--steps", "3"]
FP8 = ["--kernels", "all", "--fp8"]


def workload_of(*flags: str, on_gpu: bool = HAS_GPU) -> Workload:
    parser = finetune_parser("")
    finetune_options.add_flags(parser)
    return Workload.from_flags(parser.parse_args([*flags]), on_gpu)


@pytest.fixture
def small_model(monkeypatch):
    monkeypatch.setattr(architecture, "tiny_config", smaller_config)
    if not HAS_GPU:  # Triton's interpreter is slow: see fp8_layer_test.py
        for name, reference in REFERENCES.items():
            monkeypatch.setattr(fp8_layer, name, reference)


@pytest.mark.parametrize("script", [finetune_optimized, profile_baseline])
def test_a_gpu_without_fp8_is_refused_before_a_model_is_loaded(run_script, monkeypatch, script):
    monkeypatch.setattr(fp8_model, "fp8_support", lambda: "Old GPU is of sm_80: leave FP8 out.")
    monkeypatch.setattr(loading, "load_model", lambda *args: pytest.fail("a model was loaded"))
    outcome = run_script(script, *TINY, *DTYPE, "--kernels", "all", "--fp8")
    assert (
        outcome.code == 2 and outcome.err == "error: --fp8: Old GPU is of sm_80: leave FP8 out.\n"
    )


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize(
    "flags",
    [["--fp8"], pytest.param(["--fp8", "inputs"], marks=pytest.mark.exhaustive)],
    ids=" ".join,
)
def test_a_run_says_how_many_layers_compute_so_and_records_it(
    run_script, tmp_path, small_model, flags
):
    path = tmp_path / "run.json"
    command = [*SMALL, "--kernels", "all", *flags, "--json", str(path)]
    outcome = run_script(finetune_optimized, *command)
    assert outcome.code == 0, outcome.err
    record = json.loads(path.read_text())
    assert record["fp8"] == (["all"] + flags)[-1].replace("--fp8", "all")
    assert record["fp8_layers"] == [1, 1]
    name = "fp8" if record["fp8"] == "all" else "fp8 inputs"
    assert f"adamw, {name} in 1 of 1 layers; AdamW" in outcome.out
    assert Workload.from_record(record).fp8 == record["fp8"]


def test_other_runs_say_nothing_of_it(run_script, tmp_path, small_model):
    path = tmp_path / "run.json"
    outcome = run_script(finetune_optimized, *SMALL, "--kernels", "all", "--json", str(path))
    assert outcome.code == 0 and "fp8" not in outcome.out + path.read_text()


def test_the_mode_reaches_the_layers(small_model):
    for mode in ("all", "inputs"):
        model, *_ = kernel_training.prepare(workload_of(*SMALL, *FP8, mode))
        assert [layer.casts.mode for layer in model.model.layers] == [mode]


def test_a_run_is_not_resumed_with_other_products():
    plain, every, inputs = (
        workload_of(*SMALL, "--kernels", "all", *flags)
        for flags in ([], ["--fp8"], ["--fp8", "inputs"])
    )
    assert resuming.refused_differences(every, every) == []
    assert resuming.refused_differences(plain, every) == ["fp8 all (not None)"]
    assert resuming.refused_differences(every, inputs) == ["fp8 inputs (not all)"]
    assert every.differences(inputs) == []  # their losses may be compared
