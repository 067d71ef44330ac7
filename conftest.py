"""What the tests share: scripts run as from the command line, and an interpreter that rounds as a GPU does."""

from dataclasses import dataclass

import numpy as np
import pytest

import measure

pytest_plugins = ["checking"]  # its fixtures

if measure.triton.knobs.runtime.interpret:
    from triton.runtime import interpreter

    def fused_multiply_add(self, x, y, z):
        """x * y + z rounded once, as hardware does it; the interpreter rounds the product too."""
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fused_multiply_add


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def run_script(monkeypatch, capsys):
    """run_script(module, "--flag", ...) -> Outcome, through sys.argv, main() and exit code."""

    def run(script, *flags: str) -> Outcome:
        monkeypatch.setattr("sys.argv", [f"{script.__name__}.py", *flags])
        with pytest.raises(SystemExit) as stop:
            measure.run_main(script.main)
        return Outcome(stop.value.code, *capsys.readouterr())

    return run
