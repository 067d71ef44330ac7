"""The records behind the pages, and how a page writes their numbers."""

import json
from pathlib import Path

from harness.benchmark.benchmark_picture import rate_at
from harness.benchmark.benchmark_specs import OURS, SPECS

HERE = Path(__file__).parents[1]  # the project's folder
RESULTS = HERE / "results"


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_at(record: dict, tokens: int, section: int = 0) -> dict[str, dict]:
    """{implementation: row} of a benchmark at one number of tokens."""
    return {
        r["implementation"]: r for r in record["sections"][section]["rows"] if r["tokens"] == tokens
    }


def us_of(row: dict) -> float:
    """The total's median, host included."""
    return row["total_us"][1]


def per_cent(record: dict, section: dict, row: dict, us: float | None) -> str:
    """Of the ceiling that the kernel is measured by, at this time."""
    rate = SPECS[section["kernel"]].rate
    if us is None or row[rate.key] is None:
        return "n/a"
    return f"{100 * rate_at(rate, row, us) / record[rate.ceiling_key]:.0f} %"


def markdown(headers: list[str], rows: list[list[str]]) -> str:
    """A table that reads well as raw text too: the first column left-aligned, the others
    right-aligned.
    """
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: list[str]) -> str:
        padded = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths))
        ]
        return f"| {' | '.join(padded)} |"

    rule = (
        "|"
        + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths))
        + "|"
    )
    return "\n".join([line(headers), rule, *(line(row) for row in rows)])


def times(value: float, digits: int = 2) -> str:
    return f"{value:,.{digits}f}×"


def in_words(size: str) -> str:
    """1x512 and 4x2048 as the pages write them."""
    return " × ".join(f"{int(n):,}" for n in size.split("x"))


def size_label(record: dict) -> str:
    """A record's size, likewise; with its micro-batches, if there are several."""
    sizes = record["batch_size"], record["seq_len"], record.get("accumulate")
    return in_words("x".join(str(size) for size in sizes if size))


def is_ours(name: str) -> bool:
    return name.startswith(OURS)
