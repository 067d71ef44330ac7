"""Processes that have imported PyTorch and wait for their command.

While one process runs, the next ones import.  So the GPU does not wait for imports.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.cli import command_line

HERE = Path(__file__).parents[2]  # the project's folder
AHEAD = 3  # processes: one runs, the others wait
WAIT = """
import contextlib, importlib, json, runpy, sys
from harness.cli import command_line
import harness.profiling.profiler, next_steps.finetuning.kernel_training
with contextlib.suppress(ImportError):
    import peft
command = sys.stdin.readline()
if command:
    name, *sys.argv[1:] = json.loads(command)
    sys.argv[0] = name
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:  # imported: what it starts in processes of their own has to be found by its name
        command_line.run_main(importlib.import_module(name).main)
"""


class Prepared:
    """A process that waits, by the name of its run.  It prints into FOLDER/NAME.txt."""

    def __init__(self, folder: str | Path, name: str | int):
        self.name, self.output = name, Path(folder, f"{name}.txt")
        command = [sys.executable, "-u", "-c", WAIT]
        with self.output.open("w") as said:
            how = {"stdin": subprocess.PIPE, "stdout": said, "stderr": said, "text": True}
            how["start_new_session"] = True  # a group, so that `end` finds all
            self.process = subprocess.Popen(command, cwd=HERE, **how)

    def run(self, words: list[str], seconds: float = math.inf) -> bool:
        """Run a script or a module with its flags; return True if it succeeds in time."""
        with contextlib.suppress(BrokenPipeError):  # it has failed already
            self.process.stdin.write(json.dumps(words) + "\n")
            self.process.stdin.close()
        try:
            return self.process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            self.end()
            return False

    def lines(self) -> list[str]:
        """Return what was printed."""
        return self.output.read_text(errors="replace").strip().splitlines()

    def end(self) -> None:
        """End the process if it still runs, and what it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)


@contextlib.contextmanager
def prepared(folder: str | Path, names: Sequence[str | int]) -> Iterator[Iterator[Prepared]]:
    """Give a process for each name.

    At the end of the `with` block all are ended that still run or wait, also after a signal.
    """
    started = []

    def processes() -> Iterator[Prepared]:
        for i in range(len(names)):
            started.extend(Prepared(folder, name) for name in names[len(started) : i + AHEAD])
            yield started[i]

    with command_line.signals_raised():
        try:
            yield processes()
        finally:
            for each in started:
                each.end()
