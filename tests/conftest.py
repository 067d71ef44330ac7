"""What the tests share: scripts run as from the command line, and the fixtures of
tests/fixtures.py.
"""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

if "ONE_GPU_OF" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    # make test-gpu: a worker, gw3, sees one of several GPUs; CUDA reads the variable once, later
    gpus = os.environ.pop("ONE_GPU_OF").split(",")
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]

import pytest
import torch

import kernel_support  # noqa: F401  decides how Triton runs, before any test imports it
from harness.cli import command_line, device  # noqa: F401  makes the interpreter faster
from tests.fixtures import (  # noqa: F401
    as_dtensor,
    checkpoint,
    compiled_kernels,
    compiler_pads_rows,
    far_apart,
    flashoptim,
    fp8_references,
    gpu_memory,
    launches,
    own_cache,
    poison_new_tensors,
    pyplot,
    same_random_numbers,
    saved_tiny,
    small_disk,
    small_model,
    small_tiles,
    unused_memory_returned,
)

HERE = Path(__file__).parents[1]  # the project's folder


def tracked(pattern: str, folder: Path = HERE) -> list[Path]:
    """Return the files of the folder that git knows: not those that a reader saves beside them.

    A link to a folder is none.  Another user may own the folder, as in a container.
    """
    command = ["git", "-c", "safe.directory=*", "ls-files", pattern]
    listed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.splitlines() if (path := folder / name).is_file()]


def pytest_runtest_setup(item):
    """Skip a test marked several_gpus(n) where fewer are visible; or_none: a CPU will do."""
    for mark in item.iter_markers("several_gpus"):
        (needed,), found = mark.args, torch.cuda.device_count()
        or_none = mark.kwargs.get("or_none", False)
        if found < needed and not (or_none and found == 0):
            pytest.skip(f"needs {needed} CUDA GPUs" + (", or none" if or_none else ""))


@dataclass
class Outcome:
    code: int
    out: str
    err: str


def assert_refused(outcome: Outcome, *words: str, code: int = 2) -> None:
    """Hold that the user reads one short sentence with all words, beside progress bars alone."""
    lines = [line for line in re.split("[\r\n]+", outcome.err) if line and "it/s]" not in line]
    assert outcome.code == code, outcome.err
    assert len(lines) == 1 and lines[0].startswith("error: "), outcome.err
    assert len(lines[0]) < 500 and "Results" not in outcome.out
    for word in words:
        assert word in lines[0]


@pytest.fixture
def little_validation(monkeypatch):
    """One batch of it, not four: Triton's interpreter is slow."""
    monkeypatch.setattr("harness.data.dataset.VALIDATION_BATCHES", 1)


@pytest.fixture
def run_script(monkeypatch, capsys):
    """run_script(module, "--flag", ...) -> Outcome, through sys.argv, main() and exit code.

    `out` has its lines as they were before they were broken to fit a terminal.
    """
    fitted, whole = command_line.fitted, []

    def keep(text: str) -> str:
        whole.append(text)
        return fitted(text)

    def run(script, *flags: str) -> Outcome:
        whole.clear()
        monkeypatch.setattr(command_line, "fitted", keep)
        monkeypatch.setattr("sys.argv", [f"{script.__name__}.py", *flags])
        with pytest.raises(SystemExit) as stop:
            command_line.run_main(script.main)
        printed, err = capsys.readouterr()
        wide = [line for line in printed.splitlines() if len(line) > command_line.TERMINAL]
        assert not [line for line in wide if " " in line.strip()]  # a long path stays whole
        return Outcome(stop.value.code, "".join(whole), err)

    return run


@pytest.fixture
def recorded(run_script, tmp_path):
    """recorded(module, "--flag", ...): the record of a run, and under `printed` what it printed."""

    def run(script, *flags: str) -> dict:
        path = tmp_path / "recorded.json"
        outcome = run_script(script, *flags, "--json", str(path))
        assert outcome.code == 0, outcome.err
        return json.loads(path.read_text()) | {"printed": outcome.out}

    return run
