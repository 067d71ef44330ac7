"""--fp8: what reaches the model and the record, and what a run says of it."""

import json

import pytest

import finetune_optimized
import profile_baseline
from harness.benchmark.checking import HAS_GPU
from harness.cli.flags import Parser
from harness.cli.workload import Workload
from harness.model import loading
from harness.training import resuming
from next_steps import finetune_options
from next_steps.patches import projections
from tests.small_workloads import TINY

pytestmark = pytest.mark.usefixtures("fp8_references")
DTYPE = ["--dtype", "bf16"] if HAS_GPU else []  # which a GPU asks for
SMALL = [*TINY, *DTYPE, "--seq-len", "8", "--steps", "3"]
FP8 = ["--kernels", "all", "--fp8"]


def workload_of(*flags: str, on_gpu: bool = HAS_GPU) -> Workload:
    args = Parser("", finetune_options.OPTIMIZED).parse_args([*flags])
    return Workload.from_flags(args, on_gpu)


@pytest.mark.parametrize("script", [finetune_optimized, profile_baseline])
def test_a_gpu_without_fp8_is_refused_before_a_model_is_loaded(run_script, monkeypatch, script):
    monkeypatch.setattr(projections, "fp8_support", lambda: "Old GPU is of sm_80: leave FP8 out.")
    monkeypatch.setattr(loading, "load_model", lambda *args: pytest.fail("a model was loaded"))
    outcome = run_script(script, *TINY, *DTYPE, "--kernels", "all", "--fp8")
    assert (
        outcome.code == 2 and outcome.err == "error: --fp8: Old GPU is of sm_80: leave FP8 out.\n"
    )


# ---------------------------------------------------------------- runs


def test_a_run_says_how_many_layers_compute_so_and_records_it(run_script, tmp_path, small_model):
    path = tmp_path / "run.json"
    outcome = run_script(finetune_optimized, *SMALL, *FP8, "--json", str(path))
    assert outcome.code == 0, outcome.err
    record = json.loads(path.read_text())
    assert record["fp8"] == "all" and record["fp8_layers"] == [1, 1]
    assert "adamw, fp8 in 1 of 1 layers; AdamW" in outcome.out
    assert Workload.from_record(record).fp8 == record["fp8"]
    outcome = run_script(finetune_optimized, *SMALL, "--kernels", "all", "--json", str(path))
    assert outcome.code == 0 and "fp8" not in outcome.out + path.read_text(), "others say nothing"


def test_a_run_is_not_resumed_with_other_products():
    plain, every = (workload_of(*SMALL, "--kernels", "all", *f) for f in ([], ["--fp8"]))
    assert resuming.refused_differences(every, every) == []
    assert resuming.refused_differences(plain, every) == ["fp8 all (not None)"]
    assert plain.differences(every) == []  # their losses may be compared
