"""Tests of the sweep: a wrong setting must not win, a failed one must be listed, and the advice."""

import contextlib
import copy
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from operator import eq
from unittest import mock

import pytest
import torch
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import KernelInterface

import rmsnorm_kernel
from harness.cli import command_line, tables
from harness.cli.device import HAS_GPU
from harness.records import run_records
from harness.steps import timing
from next_steps.comparisons import sweep_kernels, sweep_tables
from next_steps.comparisons.sweep_kernels import (
    SweptLaunch,
    carried,
    carrying,
    settings_to_try,
    sweep,
    try_setting,
)
from tests.benchmark_kernels_test import columns

SMALL = {"rmsnorm": (5, 96), "cross_entropy": (5, 100)}
NAMES = {"rmsnorm": ["RMSNorm forward", "RMSNorm backward"]}
NAMES["cross_entropy"] = [
    f"Cross-entropy {part}" for part in ("forward", "backward", "in place, loss and gradient")
]
EVERY_LAUNCH = [(kernel, i) for kernel, names in NAMES.items() for i in range(len(names))]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def make_launch(
    kernel: str, i: int, dtype: torch.dtype = torch.float32
) -> sweep_kernels.SweptLaunch:
    return sweep_kernels.LAUNCHES[kernel](*SMALL[kernel], dtype)[i]


def carried_launch(kernel: str, i: int) -> tuple[SweptLaunch, dict, dict]:
    """A launch, the setting that its file carries, and its results with that."""
    launch = make_launch(kernel, i)
    return launch, *carried(launch)


@pytest.fixture
def stubbed_timer(monkeypatch):
    """Each call of time_us takes 10 us longer. Returns the functions that were timed."""
    timed = []

    def time_us(fn):
        timed.append(fn)
        return timing.Timing(0.0, 10.0 * len(timed), 0.0)

    monkeypatch.setattr(timing, "time_us", time_us)
    return timed


# ---------------------------------------------------------------- settings


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel, i", EVERY_LAUNCH)
def test_every_setting_is_launched_as_asked_and_right(kernel, i, stubbed_timer):
    launch = make_launch(kernel, i)
    assert launch.name == NAMES[kernel][i]
    shipped, expected = carried(launch)
    settings = [shipped, *launch.others(shipped)]
    faults = [try_setting(launch, setting, expected)["fault"] for setting in settings]
    assert 5 < len(faults) < 36
    # On a GPU a setting may need more than there is. It may never be wrong.
    assert all(fault is None or (HAS_GPU and fault.startswith("out of ")) for fault in faults)
    assert len(stubbed_timer) == faults.count(None)


def test_what_the_file_carries_is_observed(monkeypatch):
    monkeypatch.setattr(rmsnorm_kernel, "_options", lambda H: {"BLOCK_SIZE": 128, "num_warps": 2})
    assert carried(make_launch("rmsnorm", 0))[0] == {"num_warps": 2}
    monkeypatch.setattr(rmsnorm_kernel, "_backward_options", lambda *args: (3, 2))
    assert carried(make_launch("rmsnorm", 1))[0] == {"num_warps": 2, "STAGES": 2, "n_programs": 3}


def test_patches_are_gone_afterwards():
    def changed():
        return KernelInterface.__getitem__, rmsnorm_kernel._backward_options

    before = changed()
    with carrying(make_launch("rmsnorm", 1), {"num_warps": 8, "STAGES": 3, "n_programs": 2}):
        assert not any(map(eq, changed(), before))
    assert changed() == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_backward_makes_room_for_as_many_programs_as_it_launches(stubbed_timer):
    """A grid alone, without its partial sums, would write beyond them."""
    launch, shipped, expected = carried_launch("rmsnorm", 1)
    for n_programs in (1, 3, 5):
        row = try_setting(launch, shipped | {"n_programs": n_programs}, expected)
        assert row["fault"] is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_gpu", [True, False])
def test_files_own_setting_comes_first_and_none_twice(has_gpu, monkeypatch):
    monkeypatch.setattr(sweep_kernels, "HAS_GPU", has_gpu)
    monkeypatch.setattr(sweep_kernels, "processors", lambda: 2)
    for kernel, i in EVERY_LAUNCH:
        launch, shipped, _ = carried_launch(kernel, i)
        found = settings_to_try(launch, shipped)
        assert found[0] == shipped
        assert all(a != b for a, b in itertools.combinations(found, 2))
        assert len(found) <= (36 if has_gpu else 1 + sweep_kernels.HANDFUL)


# ---------------------------------------------------------------- faults


def test_wrong_setting_does_not_win(monkeypatch):
    """It leaves out half of each row, and so would be the fastest."""

    def launches(*arguments):
        launch = sweep_kernels.rmsnorm_launches(*arguments)[0]
        return [replace(launch, knobs=("BLOCK_SIZE",), others=lambda _: [{"BLOCK_SIZE": 64}])]

    monkeypatch.setitem(sweep_kernels.LAUNCHES, "rmsnorm", launches)
    monkeypatch.setattr(timing, "time_us", lambda fn: timing.Timing(0.0, 50.0, 0.0))
    sections = sweep("rmsnorm", 5, 96, "fp32")
    shipped, wrong = sections[0]["tried"]
    assert shipped["us"] == 50.0 and shipped["fault"] is None
    assert wrong["us"] is None and wrong["fault"].startswith("WRONG") and "y " in wrong["fault"]
    assert sweep_tables.advice(sections[0]).endswith(": keep.")


def test_wrong_gradient_off_the_targets_is_seen():
    """Over the whole tensor it would be nearly right: the targets' entries carry the norm."""
    launch, _, expected = carried_launch("cross_entropy", 2)
    expected["other"] = expected["other"] * 1.001
    fault = try_setting(launch, {"num_warps": 8}, expected)["fault"]
    assert fault.startswith("WRONG") and "other" in fault and "target" not in fault


def behave(monkeypatch, launch: SweptLaunch, **behaviour) -> None:
    """Let the launch's kernel behave so, as mock.Mock takes it."""
    run = KernelInterface.__getitem__

    def subscript(kernel, grid):
        return mock.Mock(**behaviour) if kernel.__name__ == launch.kernel else run(kernel, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", subscript)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel, i", EVERY_LAUNCH)
def test_kernel_that_writes_nothing_is_wrong(kernel, i, monkeypatch):
    """New memory may be that of the result before, and hold it still."""
    launch, shipped, expected = carried_launch(kernel, i)
    behave(monkeypatch, launch)
    fault = try_setting(launch, shipped, expected)["fault"]
    assert fault.startswith("WRONG") and " nan" in fault


@pytest.mark.parametrize(
    "error, said",
    [
        (
            OutOfResources(262_168, 232_448, "shared memory"),
            "out of shared memory: needs 262,168, this GPU has 232,448",
        ),
        (RuntimeError("it failed\nmuch more"), "does not compile: RuntimeError: it failed"),
        (TritonError("no such layout"), "does not compile: TritonError: no such layout"),
    ],
)
def test_setting_that_fails_is_listed(error, said, monkeypatch):
    launch, _, expected = carried_launch("rmsnorm", 0)
    behave(monkeypatch, launch, side_effect=error)
    row = try_setting(launch, {"num_warps": 32}, expected)
    assert row["us"] is None and row["fault"] == said
    setting = example()["shipped"] | {"num_warps": 32}
    section = example() | {"tried": [*example()["tried"], row | {"setting": setting}]}
    assert columns(sweep_tables.section_table(RECORD, section).splitlines()[-3])[-1] == said


def test_gpu_out_of_memory_is_no_result(monkeypatch):
    launch, _, expected = carried_launch("rmsnorm", 0)
    behave(monkeypatch, launch, side_effect=torch.OutOfMemoryError("CUDA"))
    with pytest.raises(torch.OutOfMemoryError):
        try_setting(launch, {"num_warps": 32}, expected)


def test_launcher_that_ignores_a_setting_is_an_error(monkeypatch):
    """Otherwise the file's own setting would be timed under another's name."""
    launch, shipped, expected = carried_launch("rmsnorm", 1)
    monkeypatch.setattr(sweep_kernels, "replaced", lambda *_, **told: contextlib.nullcontext())
    with pytest.raises(command_line.RunError, match=r"asked for.*n_programs = 1.*launched with"):
        try_setting(launch, shipped | {"n_programs": 1}, expected)


def test_setting_of_the_file_that_differs_from_itself_is_an_error(monkeypatch):
    monkeypatch.setattr(sweep_kernels, "difference", lambda found, shipped: float("nan"))
    with pytest.raises(command_line.RunError, match=r"RMSNorm forward.*second time.*WRONG.*nan"):
        sweep("rmsnorm", 5, 96, "fp32")


@pytest.mark.exhaustive
def test_in_place_is_compared_from_fresh_logits_and_timed_on_overwritten_ones(stubbed_timer):
    launch, shipped, expected = carried_launch("cross_entropy", 2)
    row = try_setting(launch, shipped, expected)
    assert row["fault"] is None
    stubbed_timer[0]()  # what was timed: once more over the gradient
    again = launch.outputs()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


# ---------------------------------------------------------------- advice and output


RECORD = {
    "kind": "sweep",
    "environment": run_records.environment() | {"gpu": "NVIDIA Test"},
    "dtype": "bf16",
    "copy_gbs": 4000.0,
    "matmul_tflops": 600.0,
    "sections": [],
    "absent": [],
}


def tried(setting: dict, us: float | None, **others) -> dict:
    return {"setting": setting, "us": us, "registers": 64, "spills": 0, "fault": None} | others


FAILED = {"fault": "out of shared memory", "registers": None, "spills": None}


def example(shipped_us: float = 100.0, best_us: float = 100.0) -> dict:
    """A section: the file's setting, a faster or equal one, and one that fails."""
    shipped = {"num_warps": 4, "STAGES": 4, "n_programs": 264}
    return {
        "launch": "RMSNorm backward",
        "file": "rmsnorm_kernel.py",
        "rows": 16_384,
        "size": 4096,
        "processors": 132,
        "bytes": 300_000_000,
        "shipped": shipped,
        "tried": [
            tried(shipped, shipped_us),
            tried(shipped | {"STAGES": 6}, None, **FAILED),
            tried({"num_warps": 8, "STAGES": 4, "n_programs": 132}, best_us, spills=12),
        ],
    }


@pytest.mark.parametrize(
    "us, advice",
    [  # within two percent of the best is kept; otherwise what differs is to be set
        (102.0, "keep."),
        (
            102.1,
            "set `num_warps = 8`, `n_programs = 132` in rmsnorm_kernel.py for this GPU and size.",
        ),
    ],
)
def test_setting_is_kept_or_what_differs_from_the_best_is_to_be_set(us, advice):
    assert sweep_tables.advice(example(us, 100.0)) == (
        f"The file carries num_warps = 4, STAGES = 4, n_programs = 264 ({us} us), "
        f"the fastest here is num_warps = 8, STAGES = 4, n_programs = 132 (100.0 us): {advice}"
    )


def test_table_is_sorted_by_time_and_ends_with_what_has_none():
    lines = sweep_tables.section_table(RECORD, example(100.0, 90.0)).splitlines()
    assert lines[1] == "Sweep: RMSNorm backward, 16,384 x 4,096, bf16"
    headers = next(i for i, line in enumerate(lines) if line.split()[0:1] == ["num_warps"])
    measured = ["us", "% of copy", "Registers", "Spilled"]
    assert columns(lines[headers]) == [*example()["shipped"], *measured]
    fast, shipped, failed = (columns(line) for line in lines[headers + 2 : headers + 5])
    assert fast == ["8", "4", "132 (1 x 132)", "90.0", "83", "64", "12"]
    assert shipped == ["4", "4", "264 (2 x 132)", "100.0", "75", "64", "0", "<- in file"]
    assert failed == ["4", "6", "264 (2 x 132)", "n/a", "n/a", "n/a", "n/a", "out of shared memory"]


def test_a_launch_faster_than_the_gpus_memory_is_no_share_of_a_copy():
    """An H200's memory has 4,800 GB/s: 300 MB in 70 us come from there, in 50 us from the cache."""
    record = RECORD | {"environment": RECORD["environment"] | {"gpu": "NVIDIA H200"}}
    record["sections"] = [section := example(70.0, 50.0)]
    lines = sweep_tables.section_table(record, section).splitlines()
    rows = {cells[3]: cells[4] for line in lines if len(cells := columns(line)) >= 7}
    assert rows["50.0"] == "cache" and rows["70.0"] == "100"
    assert "4,286 GB/s" in sweep_tables.render_sweep(record)


def test_number_of_programs_says_where_it_comes_from():
    found = [sweep_tables.programs(n, example()) for n in (16_384, 264, 512)]
    assert found == ["16,384 (rows)", "264 (2 x 132)", "512"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(stdout, record) of a sweep of everything, as a user runs it."""
    path = tmp_path_factory.mktemp("sweep") / "run.json"
    flags = ["--tokens", "2", "--hidden", "32,64", "--vocab", "50", "--json", str(path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "next_steps.comparisons.sweep", *flags]
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads(path.read_text())


@pytest.mark.exhaustive
def test_sweep_has_a_table_for_every_launch_and_size(finished):
    stdout, record = finished
    assert record["kind"] == "sweep"
    expected = [(name, size) for size in (32, 64) for name in NAMES["rmsnorm"]]
    expected += [(name, 50) for name in NAMES["cross_entropy"]]
    assert [(section["launch"], section["size"]) for section in record["sections"]] == expected
    for name, size in expected:
        assert f"\nSweep: {name}, 2 x {size}, bf16" in stdout
    assert stdout.count("<- in file") == len(expected)


def test_printed_text_is_the_rendered_record_and_rendering_changes_nothing(finished):
    stdout, record = finished
    before = copy.deepcopy(record)
    for _ in range(2):
        assert stdout.startswith(
            command_line.fitted(sweep_tables.render_sweep(record)) + "\nRecord written to"
        )
    assert record == before


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_nothing_is_advised_from_times_of_the_interpreter(finished):
    stdout, _ = finished
    assert stdout.startswith(tables.NO_GPU_NOTE)
    for times in ("The file carries", "% of copy", "Ceilings", "n/a"):
        assert times not in stdout
