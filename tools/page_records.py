"""The records behind the pages: how a page names them, writes their figures and says their source.

The source is the line below a block or table:

> [H200, torch 2.11.0, triton 3.6.0, commit](record) and N others: `command that makes them again`
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.cli.tables import Column, Table
from harness.records.spread import Range, spread, timed, unless_same
from tools.make_records import HERE, RECORD_COMMANDS, RUNS

RESULTS = HERE / "results"
PAGE_WIDTH = 120  # of a page
LOADED: dict[str, None] = {}  # in this order since it was last cleared


def load_record(name: str) -> dict:
    """Return a record, and note its name in LOADED."""
    LOADED[name] = None
    return json.loads((RESULTS / f"{name}.json").read_text())


def page_table(rows: Iterable[Sequence[str]], headers: str) -> str:
    """Return a page's table of rows of cells; `headers` have "|" between."""
    return Table([header.strip() for header in headers.split("|")], [*rows]).markdown()


def short_gpu(name: str) -> str:
    return name.removeprefix("NVIDIA ").split()[0]


def times(value: float, digits: int = 2) -> str:
    return f"{value:,.{digits}f}×"


def per_cent(share: float) -> str:
    return f"{100 * share:.0f} %"


def gb(n_bytes: float, digits: int = 1) -> str:
    return f"{n_bytes / 1e9:.{digits}f}"


def step_in_words(size: str) -> str:
    """1x512 and 4x2048 as the pages write them."""
    return " × ".join(f"{int(n):,}" for n in size.split("x"))


def size_label(record: dict) -> str:
    """A record's size in the same words. Several micro-batches are a third factor."""
    sizes = record["batch_size"], record["seq_len"], record.get("accumulate")
    return step_in_words("x".join(str(size) for size in sizes if size))


class StepTime(NamedTuple):
    """How long a run's step takes."""

    ms: float  # median
    range: Range  # 20th to 80th percentile

    @classmethod
    def of(cls, record: dict) -> "StepTime":
        """Return the step of a fine-tuning run, or of a rung of the ladder."""
        if "step_ms" in record:
            return cls(record["step_ms"], (record["p20_ms"], record["p80_ms"]))
        return cls(1e3 * record["median_seconds"], spread([1e3 * s for s in timed(record)]))

    def between(self, digits: int = 0) -> str:
        return "–".join(f"{end:,.{digits}f}" for end in self.range)

    def over(self, other: "StepTime", ratio: float | None = None) -> str:
        """Say how many times this step is as long, or another ratio of the two runs."""
        words = times(self.ms / other.ms if ratio is None else ratio)
        return unless_same(words, self.range, other.range)


def step_columns(digits: int = 1) -> list[Column]:
    """Return the columns of a run's time."""
    return [
        Column("step, ms", lambda run: f"{StepTime.of(run).ms:,.{digits}f}"),
        Column("p20–p80", lambda run: StepTime.of(run).between(digits)),
    ]


# ---------------------------------------------------------------- where figures come from

# Their programs have left: results/log.md names the commit that holds each.
ANSWERED = "fp8_costs", "fp8_inputs_4x2048", "trace_fsdp_4x2048", "weight_values"
ANSWERED += ("weight_values_fp8",)
SINGLY = 2  # more records are made again by the names of their groups; and more commits counted


def machine(environment: dict) -> str:
    """Return the GPU and the versions of a record, in short."""
    gpu = short_gpu(environment["gpu"]) if environment["gpu"] else "CPU"
    versions = (f"{name} {environment[name].partition('+')[0]}" for name in ("torch", "triton"))
    return ", ".join([gpu, *versions])


def short_commit(environment: dict) -> str:
    """Return the commit of a record, with "+" if files differed from it."""
    commit = environment["commit"]
    return commit[:7] + "+" * commit.endswith("+")


def command(names: list[str]) -> str:
    """Return what makes these records again, and others of their groups where they are many."""
    groups = [group for group, runs in RUNS.items() if runs.keys() & {*names}]
    return " ".join(["python -m tools.make_records", *(groups if len(names) > SINGLY else names)])


def source(names: Iterable[str], page: Path) -> str:
    """Return the line, of any width, for what these records gave; "" if there is none to give.

    There is none without records, and for records that neither `tools.make_records` nor ANSWERED
    knows.
    """
    names = list(names)
    if not names or not RECORD_COMMANDS.keys() | {*ANSWERED} >= {*names}:
        return ""
    made = [load_record(name)["environment"] for name in names]
    commits = list(dict.fromkeys(map(short_commit, made)))
    if len(commits) > SINGLY:
        commits = [commits[0], f"{len(commits) - 1} more commits"]
    facts = "; ".join(dict.fromkeys(map(machine, made))), *commits
    place = "results" if page.name == "README.md" else "../results"
    others = f" and {len(names) - 1} more" if names[1:] else ""
    words = f"[{', '.join(facts)}]({place}/{names[0]}.json){others}"
    runs = [name for name in names if name not in ANSWERED]
    again = f"`{command(runs)}`" if runs else f"[the log]({place}/log.md) has the program's commit"
    return f"> {words}: {again}"
