"""Run the tests: first those that time a GPU, alone, then the others, several at a time.

    python -m tools.run_tests           # what a reader runs: minutes on two cores
    python -m tools.run_tests --all     # also what is marked exhaustive

Two calls of pytest, of which the first runs nothing where there is no GPU.  The last line counts
the tests of both: "N passed, N failed, N skipped".  Exit code 1 if any failed, if a call broke off,
or if none ran at all.
"""

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

CALLS = (["-m", "alone"], ["-m", "not alone", "-n", "4"])
SHORT = "not exhaustive"  # a mark: see pyproject.toml
NOTHING_SELECTED = 5  # pytest's exit code: here one of the two calls may have nothing to do


@dataclass(frozen=True)
class Count:
    """Of tests; what failed includes errors before, after and in place of a test."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: "Count") -> "Count":
        passed, failed = self.passed + other.passed, self.failed + other.failed
        return Count(passed, failed, self.skipped + other.skipped)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def read_count(report: Path) -> Count:
    """Of a report that pytest wrote (JUnit's XML); zeros if it wrote none."""
    count = Count()
    for test in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        outcomes = {child.tag for child in test}
        failed = bool(outcomes & {"failure", "error"})
        skipped = not failed and "skipped" in outcomes
        count += Count(passed=not (failed or skipped), failed=failed, skipped=skipped)
    return count


def calls(everything: bool) -> list[list[str]]:
    """The flags of each call of pytest."""
    if everything:
        return [*CALLS]
    return [["-m", f"{selected} and {SHORT}", *others] for _, selected, *others in CALLS]


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--all", action="store_true", help="also the tests marked exhaustive")
    everything = parser.parse_args().all
    total, broken = Count(), False
    with tempfile.TemporaryDirectory() as folder:
        for number, flags in enumerate(calls(everything)):
            report = Path(folder) / f"{number}.xml"
            command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *flags]
            code = subprocess.run(command, cwd=Path(__file__).parents[1]).returncode
            total += read_count(report)
            broken |= code not in (0, NOTHING_SELECTED)
    print(total, flush=True)
    return 1 if broken or total.passed + total.skipped == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
