"""--deterministic: what it sets, when, and that two runs then have the same bits."""

import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

import finetune_baseline
import finetune_optimized
import profile_baseline
from harness.cli import device
from harness.cli.device import HAS_GPU
from harness.cli.workload import Workload
from harness.profiling import profiler
from harness.profiling.kernel_facts import KERNELS
from next_steps.finetuning import kernel_training
from tests.conftest import HERE
from tests.fixtures import needs_gpu
from tests.small_workloads import SMALL, TINY

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
TWICE = "from tests.deterministic_test import train_twice; train_twice({})"


@pytest.fixture
def process():
    """The settings of this process are as PyTorch ships them, and again after the test."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    with mock.patch.dict(os.environ):
        os.environ.pop(VARIABLE, None)
        yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def settings() -> tuple:
    """Return (only deterministic algorithms?  does another one only warn?  cuBLAS's workspace)."""
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), only_warns, os.environ.get(VARIABLE)


def test_it_sets_what_it_promises_and_nothing_without_it(process):
    device.begin_process("tiny")
    assert settings() == (False, False, None)
    device.begin_process("tiny", deterministic=True)
    # with warnings in place of errors PyTorch would keep the attention that adds in any order
    assert settings() == (True, False, ":4096:8")
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_a_workspace_that_the_user_chose_stays(process, monkeypatch):
    monkeypatch.setenv(VARIABLE, ":16:8")
    device.begin_process("tiny", deterministic=True)
    assert settings() == (True, False, ":16:8")


on_cpu = pytest.mark.skipif(HAS_GPU, reason="tests before it have multiplied with other settings")


@on_cpu
@pytest.mark.parametrize("script", [finetune_baseline, finetune_optimized])
def test_two_runs_have_the_same_bits_and_say_how(
    run_script, process, little_validation, small_model, own_cache, tmp_path, script
):
    records, folder = [], tmp_path / "model"
    for name in ("first", "second"):
        out = [f"--json={tmp_path / name}.json", f"--save={folder / name}"]
        outcome = run_script(script, *SMALL, "--deterministic", *out)
        assert outcome.code == 0 and "deterministic" in outcome.out, outcome.err
        assert settings() == (True, False, ":4096:8")
        records.append(json.loads((tmp_path / f"{name}.json").read_text()))
    assert records[0]["losses"] == records[1]["losses"] and records[0]["deterministic"] is True
    weights = ((folder / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert len(set(weights)) == 1


@on_cpu
def test_a_profile_sets_it_before_the_first_product(run_script, process, monkeypatch, tmp_path):
    """PyTorch reads cuBLAS's variable at the first one: the ceilings are measured by products."""
    measure, before = profiler.measure_ceilings, []
    monkeypatch.setattr(
        profiler, "measure_ceilings", lambda *given: before.append(settings()) or measure(*given)
    )
    flags = [*TINY, "--deterministic", "--trace", str(tmp_path / "trace.json")]
    assert run_script(profile_baseline, *flags).code == 0
    assert before == [(True, False, ":4096:8")]


def train_twice(kernels: tuple[str, ...]) -> None:
    """Fine-tune two layers of LLaMA 3.1 8B twice; fail where losses or weights differ in a bit."""
    workload = Workload(
        **{"random_init": True, "first_layers": 2, "batch_size": 4, "seq_len": 2048},
        **{"steps": 3, "lr": 1e-5, "kernels": kernels, "deterministic": True},
    )
    losses, weights = [], []
    for _ in range(2):
        model, called, optimizer = kernel_training.prepare_kernels(workload)
        run = kernel_training.Run("Twice", workload, model)
        losses.append(kernel_training.take_all_steps(run, optimizer, called)["losses"])
        weights.append({name: p.detach().cpu() for name, p in model.named_parameters()})
        del model, called, optimizer, run
        device.free_memory()
    differing = [name for name, p in weights[0].items() if not torch.equal(p, weights[1][name])]
    assert losses[0] == losses[1] and not differing, (losses, differing)


@needs_gpu
@pytest.mark.parametrize("kernels", [(), tuple(KERNELS)], ids=["none", "all"])
def test_two_runs_of_real_size_have_the_same_bits(gpu_memory, kernels):
    """In a process that has multiplied nothing before.  Attention has many blocks to add here."""
    gpu_memory(48)
    child = [sys.executable, "-c", TWICE.format(kernels)]
    ended = subprocess.run(child, cwd=HERE, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
