"""The page that adds a kernel, followed in a copy of the project: what it changes, what it runs.

Each command runs in a copy of its own, in which all that the page says before it has been done.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.cli.device import HAS_GPU
from tests.conftest import HERE, tracked
from tests.readme_test import ADD_A_KERNEL, FENCED, TEXTS

pytestmark = pytest.mark.skipif(HAS_GPU, reason="the pages show what is printed without a GPU")
NEW_FILE = re.compile(r"`([\w/]+\.py)` is new:\s*\Z")
NUMBER = re.compile(r"n/a|\d[\d.,:]*(?:e[+-]\d+)?")


@dataclass(frozen=True)
class Step:
    """A block of a page: a file, changes of files, or commands and what they print."""

    kind: str  # the language of the block
    text: str
    file: str = ""  # of a block that is a new file
    printed: str = ""  # the next block, if it is what these commands print


def steps() -> list[Step]:
    found, page = [], TEXTS[ADD_A_KERNEL]
    matches = list(FENCED.finditer(page))
    for match, after in zip(matches, [*matches[1:], None]):
        kind = match["language"]
        if kind == "text":
            continue
        name = NEW_FILE.search(page[: match.start()])
        printed = after["code"] if after and after["language"] == "text" else ""
        found.append(Step(kind, match["code"], name[1] if name else "", printed))
    return found


def change(folder: Path, diff: str) -> None:
    """Add the lines of a diff whose hunks have no line numbers: each fits at one place."""
    file = hunk = None
    for line in [*diff.splitlines(), "@@"]:
        if hunk and line[:3] in ("---", "@@"):
            before = "".join(f"{each[1:]}\n" for each in hunk if each[0] != "+")
            after = "".join(f"{each[1:]}\n" for each in hunk)
            text = file.read_text()
            assert text.count(before) == 1, f"{file.name} has no such place, or several:\n{before}"
            file.write_text(text.replace(before, after))
            hunk = []
        if line.startswith("--- "):
            file, hunk = folder / line.removeprefix("--- "), []
        elif line != "@@":
            hunk.append(line)


def run(folder: Path, commands: str) -> subprocess.CompletedProcess:
    """Run a block of commands in the copy, by this Python, as from a shell of a reader's."""
    variables = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    variables.pop("PYTHONPATH", None)
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
    return subprocess.run(
        commands, shell=True, cwd=folder, env=variables, capture_output=True, text=True
    )


def is_quick(step: Step) -> bool:
    """Return True for commands that make a file, and so belong to what the pages change."""
    return step.kind == "bash" and "python " not in step.text


@pytest.fixture
def followed(tmp_path):
    """followed(step): a copy of the project in which everything before the step is done."""

    def follow(last: Step | None) -> Path:
        for file in tracked("*"):
            if file.relative_to(HERE).parts[0] != "results":
                copy = tmp_path / file.relative_to(HERE)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)
        subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
        for step in steps():
            if step == last:
                break
            if step.kind == "diff":
                change(tmp_path, step.text)
            elif step.file:
                assert not (tmp_path / step.file).exists()
                (tmp_path / step.file).write_text(step.text)
            elif is_quick(step):
                done = run(tmp_path, step.text)
                assert done.returncode == 0, done.stderr
        subprocess.run(["git", "add", "--all"], cwd=tmp_path, check=True)
        return tmp_path

    return follow


def in_words(text: str) -> list[str]:
    """Return the lines without numbers, and without the number of spaces and dashes."""
    lines = [NUMBER.sub("#", line) for line in text.splitlines()]
    return [re.sub(r"\s+", " ", re.sub(r"-{2,}", "--", line)).strip() for line in lines]


def assert_printed(printed: str, output: str) -> None:
    """Each line of the page begins a line of the output, in this order."""
    rest = iter(in_words(output))
    for line in in_words(printed):
        if line != "...":
            assert any(each.startswith(line) for each in rest), f"not printed: {line}\n{output}"


COMMANDS = [step for step in steps() if step.kind == "bash" and not is_quick(step)]
FAST = "tests.numbers", "benchmark_kernels.py"


def command_of(step: Step) -> str:
    return next(line for line in step.text.splitlines() if line.startswith("python "))


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(
            step,
            id=command_of(step),
            marks=[] if any(name in step.text for name in FAST) else [pytest.mark.exhaustive],
        )
        for step in COMMANDS
    ],
)
def test_a_command_prints_what_the_page_says(step, followed):
    done = run(followed(step), step.text)
    assert step.printed
    assert_printed(step.printed, done.stdout)
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    assert failed == re.findall(r"^FAILED (\S+)", step.printed, re.MULTILINE)
    assert done.returncode == (1 if failed else 0), done.stdout + done.stderr


@pytest.mark.exhaustive
def test_what_was_added_is_as_tidy_as_the_rest(followed):
    pytest.importorskip("ruff")
    folder = followed(None)
    done = run(folder, "python -m ruff check . && python -m ruff format --check .")
    assert done.returncode == 0, done.stdout


def test_a_change_that_does_not_fit_is_noticed(tmp_path):
    file = tmp_path / "some.py"
    file.write_text("a\nb\na\n")
    for place in ("a", "c"):
        with pytest.raises(AssertionError, match="no such place, or several"):
            change(tmp_path, f"--- some.py\n {place}\n+d\n")
    change(tmp_path, "--- some.py\n b\n+d\n@@\n+c\n b\n")
    assert file.read_text() == "a\nc\nb\nd\na\n"


@pytest.mark.parametrize("output", ["2 failed", "1 passed\nother: 2"])
def test_output_that_is_not_the_pages_is_noticed(output):
    assert_printed("1 passed\n...\nname: 1", "x\n12 passed in 1.2s\n\nname: 3")
    with pytest.raises(AssertionError, match="not printed"):
        assert_printed("1 passed\n...\nname: 1", output)
