"""Run the tests with pytest in a few calls, then print the failures and the count.

    python -m tools.run_tests           # what a reader runs: minutes on two cores
    python -m tools.run_tests --all     # also the tests marked exhaustive
    python -m tools.run_tests --gpu     # all tests, spread over the GPUs of this machine
    python -m tools.run_tests --gpu tests/rope_test.py    # the tests of these files alone

Tests marked alone time a GPU.  Where there is one, they run first and one at a time.  With --gpu
and more than one GPU each worker of pytest-xdist uses one of them (tests/conftest.py).  Tests
marked several_gpus then run in a call of their own, in which every worker sees all GPUs.  GPUs of
another kind than the first are left out, and a line says so.

The last line counts the tests of all calls: "N passed, N failed, N skipped".  A file that cannot be
imported counts as one failed test, and the other files' tests run.  The exit code is 1 if a test
failed, if a call broke off, or if no test ran.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SHORT = "not exhaustive"  # a mark: see pyproject.toml
NOTHING_SELECTED = 5  # pytest's exit code: one of the calls may have nothing to do
MOST_ON_A_GPU = 15  # workers: 15 shared the 139 GiB of an H200
SEVERAL_AT_A_TIME = 12  # tests of several processes, each of which starts one process a GPU


def read_report(report: Path) -> dict[str, tuple[str, str]]:
    """Read pytest's report (JUnit's XML), if any: of each test how it ended, and with which words.

    An error before, after or in place of a test counts as failed.  In place of the tests of a file
    that cannot be imported stands the file.
    """
    found = {}
    for test in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        outcome = next(iter(test), None)
        how = "passed" if outcome is None else "skipped" if outcome.tag == "skipped" else "failed"
        words = outcome.get("message", "").partition("\n")[0] if how == "failed" else ""
        name = "::".join(filter(None, (test.get("classname"), test.get("name"))))
        found.setdefault(name, (how, words))  # a test that failed may fail once more at its end
    return found


def visible_gpus() -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES may name: each GPU that this process can use."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return given.split(",")[:count] if given else [str(number) for number in range(count)]


def kind_of(gpu: str) -> str:
    """Return a GPU's name, found by a process that sees it alone.

    No process can open both of a DGX Station's kinds (docs/gb300.md).
    """
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    return subprocess.check_output(command, text=True, env=environment).strip()


def of_one_kind(gpus: list[str]) -> list[str]:
    """Return those of the GPUs that are of the first one's kind.  Print which others there are."""
    if len(gpus) == 1:
        return gpus
    with ThreadPoolExecutor() as pool:
        kinds = dict(zip(gpus, pool.map(kind_of, gpus)))
    used = [gpu for gpu in gpus if kinds[gpu] == kinds[gpus[0]]]
    if others := [f"{kind}, {gpu}" for gpu, kind in kinds.items() if gpu not in used]:
        print(f"The tests use {kinds[gpus[0]]}. Not used: {'; '.join(others)}.", flush=True)
    return used


def calls(everything: bool, gpus: list[str], has_gpu: bool) -> list[tuple[str, int]]:
    """Return (the marks that are selected, the number of workers) of each call of pytest."""
    cores = os.cpu_count() or 1
    # without a GPU one more than cores: many tests wait for a process that they have started
    workers = min(cores - 1, MOST_ON_A_GPU * len(gpus)) if gpus else cores + 1
    if len(gpus) > 1:
        several = "several_gpus and not alone", SEVERAL_AT_A_TIME
        return [("alone", 0), ("not alone and not several_gpus", workers), several]
    # without a GPU nothing is timed: a call more would only import all tests once more
    selections = [("alone", 0), ("not alone", workers)] if has_gpu else [("", workers)]
    if everything:
        return selections
    return [(" and ".join(filter(None, (marks, SHORT))), n) for marks, n in selections]


def environment_of(selected: str, gpus: list[str]) -> dict[str, str]:
    """Return the environment of a call, which sees these GPUs alone.

    With it tests/conftest.py gives each worker one of them.
    """
    # as many processes as cores: threads of their own would wait for each other
    one_thread = {"OMP_NUM_THREADS": "1"}
    if not gpus:
        return one_thread | os.environ
    one_thread |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    visible = ",".join(gpus)
    one_gpu = {} if selected.startswith("several_gpus") else {"ONE_GPU_OF": visible}
    return {**os.environ, **one_thread, **one_gpu, "CUDA_VISIBLE_DEVICES": visible}


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--all", action="store_true", help="also the tests marked exhaustive")
    parser.add_argument("--gpu", action="store_true", help="all tests, spread over the GPUs")
    parser.add_argument("files", nargs="*", help="only the tests of these files or folders")
    args = parser.parse_args()
    visible = visible_gpus()
    if args.gpu and not visible:
        parser.error("--gpu needs a CUDA GPU, and PyTorch sees none: leave the flag out")
    gpus = of_one_kind(visible) if args.gpu else []
    outcomes, broken = {}, False
    with tempfile.TemporaryDirectory() as folder:
        for selected, workers in calls(args.all or args.gpu, gpus, bool(visible)):
            report = Path(folder) / f"{selected}.xml"
            command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-m", selected]
            command.append("--continue-on-collection-errors")
            command += ["-n", str(workers), "--dist", "worksteal"] if workers else []
            code = subprocess.run(
                [*command, *args.files],
                cwd=Path(__file__).parents[1],
                env=environment_of(selected, gpus),
            ).returncode
            outcomes |= read_report(report)  # each call tries to import each file
            broken |= code not in (0, NOTHING_SELECTED)
    total = Counter(how for how, _ in outcomes.values())
    failed = [(name, words) for name, (how, words) in outcomes.items() if how == "failed"]
    failures = [f"FAILED {name}: {words}" for name, words in failed]
    counts = ", ".join(f"{total[how]} {how}" for how in ("passed", "failed", "skipped"))
    print("\n".join([*failures, counts]), flush=True)
    return 1 if broken or total["passed"] + total["skipped"] == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
