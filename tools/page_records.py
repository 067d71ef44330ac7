"""The records behind the pages, and the renderer of the pages' tables.

A table is a list of rows and a line of columns. A row is a dict whose keys are the columns' headers
or a tuple of all cells.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from harness.records.spread import Range, spread, timed, unless_same

HERE = Path(__file__).parents[1]  # the project's folder
RESULTS = HERE / "results"
COLUMNS = 120  # of a page
LOADED: dict[str, None] = {}  # in this order since it was last cleared


def load(name: str) -> dict:
    """Return a record, and note its name in LOADED."""
    LOADED[name] = None
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(rows: Iterable[dict | tuple], columns: str) -> str:
    """Return a Markdown table that reads well as raw text; `columns` are headers with "|" between.

    The first column is left-aligned, the others are right-aligned.
    """
    headers = [header.strip() for header in columns.split("|")]
    rows = [[row[each] for each in headers] if isinstance(row, dict) else row for row in rows]
    shown = []
    for place, column in enumerate(zip(headers, *rows)):
        width = max(len(cell) for cell in column)
        cells = [f" {cell.rjust(width) if place else cell.ljust(width)} " for cell in column]
        shown.append([cells[0], "-" * (width + 1) + (":" if place else "-"), *cells[1:]])
    return "\n".join(f"|{'|'.join(line)}|" for line in zip(*shown))


def short_gpu(name: str) -> str:
    return name.removeprefix("NVIDIA ").split()[0]


def times(value: float, digits: int = 2) -> str:
    return f"{value:,.{digits}f}×"


def per_cent(share: float) -> str:
    return f"{100 * share:.0f} %"


def gb(n_bytes: float, digits: int = 1) -> str:
    return f"{n_bytes / 1e9:.{digits}f}"


def in_words(size: str) -> str:
    """1x512 and 4x2048 as the pages write them."""
    return " × ".join(f"{int(n):,}" for n in size.split("x"))


def size_label(record: dict) -> str:
    """A record's size in the same words. Several micro-batches are a third factor."""
    sizes = record["batch_size"], record["seq_len"], record.get("accumulate")
    return in_words("x".join(str(size) for size in sizes if size))


class Step(NamedTuple):
    """How long a run's step takes."""

    ms: float  # median
    range: Range  # 20th to 80th percentile

    @classmethod
    def of(cls, record: dict) -> "Step":
        """Return the step of a fine-tuning run, or of a rung of the ladder."""
        if "step_ms" in record:
            return cls(record["step_ms"], (record["p20_ms"], record["p80_ms"]))
        return cls(1e3 * record["median_seconds"], spread([1e3 * s for s in timed(record)]))

    def between(self, digits: int = 0) -> str:
        return "–".join(f"{end:,.{digits}f}" for end in self.range)

    def over(self, other: "Step", ratio: float | None = None) -> str:
        """Say how many times this step is as long, or another ratio of the two runs."""
        words = times(self.ms / other.ms if ratio is None else ratio)
        return unless_same(words, self.range, other.range)


def step_cells(record: dict) -> dict[str, str]:
    """Return a run's time as the pages' columns."""
    step = Step.of(record)
    cells = {"step, ms": f"{step.ms:,.1f}", "p20–p80": step.between(1)}
    return cells | {"busy, ms": f"{record['busy_ms']:,.1f}"}
