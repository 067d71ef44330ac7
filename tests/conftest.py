"""What the tests share: scripts run as from the command line, and the fixtures of
tests/fixtures.py.
"""

from dataclasses import dataclass

import harness.device  # noqa: F401  decides how triton will run, before a test imports it by peft

# isort: split
import pytest

from harness import command_line
from tests.fixtures import (  # noqa: F401
    as_dtensor,
    compiled_kernels,
    compiler_pads_rows,
    far_apart,
    poison_new_tensors,
    same_random_numbers,
    unused_memory_returned,
)


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """Tokens are not kept where those of the user's own runs are."""
    monkeypatch.setattr("harness.token_cache.folder", lambda: tmp_path / "token_cache")


@pytest.fixture
def run_script(monkeypatch, capsys):
    """run_script(module, "--flag", ...) -> Outcome, through sys.argv, main() and exit code."""

    def run(script, *flags: str) -> Outcome:
        monkeypatch.setattr("sys.argv", [f"{script.__name__}.py", *flags])
        with pytest.raises(SystemExit) as stop:
            command_line.run_main(script.main)
        return Outcome(stop.value.code, *capsys.readouterr())

    return run
