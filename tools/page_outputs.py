"""What a page shows of a script's output: rendered again from its record, cut, columns left out."""

import re
import textwrap

import compare_runs
import profile_baseline
from harness.benchmark import benchmark_tables
from harness.profiling import profile_comparison
from harness.training import training_run
from next_steps.comparisons import sweep_tables
from next_steps.memory import memory_estimate, memory_tables
from next_steps.studies import fp8_accuracy, fp8_costs, frontier, ladder, longest, scaling_tables
from tools.page_records import load

COLUMNS = 120
LEFT_OUT = "..."


def render(names: list[str]) -> str:
    """What the script that wrote these records printed."""
    records = [load(name) for name in names]
    if len(records) > 1 and records[0]["kind"] == "profile":
        return profile_comparison.render_comparison(*records)
    if len(records) > 1 and records[0]["kind"] == "scaling":
        return scaling_tables.render(*records)
    if len(records) > 1:
        return compare_runs.render(compare_runs.run_names(records), records)
    (record,) = records
    renderers = {
        "finetune": finetune_output,
        "profile": profile_baseline.render,
        "memory": memory_tables.render,
        "estimate": memory_estimate.render,
        "benchmark": benchmark_tables.render,
        "sweep": sweep_tables.render_sweep,
        "ladder": ladder.render,
        "frontier": frontier.render,
        "longest": longest.render,
        "fp8_accuracy": fp8_accuracy.render,
        "fp8_costs": fp8_costs.render,
        "text": lambda record: "\n".join(record["lines"]),
    }
    return renderers[record["kind"]](record)


def finetune_output(record: dict) -> str:
    """Every step and the result block."""
    columns = [record[key] for key in ("losses", "seconds", "tokens", "peaks")]
    n_steps = record["steps"]
    steps = [training_run.step_line(i, n_steps, *columns) for i in range(1, n_steps + 1)]
    return "\n".join([*steps, "", training_run.result_block(record)])


def position(lines: list[str], beginning: str, start: int) -> int:
    """Of the first line from `start` on that begins so.

    Raises:
        ValueError: there is none.
    """
    for i in range(start, len(lines)):
        if lines[i].strip().startswith(beginning):
            return i
    raise ValueError(
        f"no line from line {start + 1} on begins with {beginning!r}: look at the record's output"
    )


def cut(lines: list[str], parts: list[str]) -> list[str]:
    """The lines that the parts name, in their order; LEFT_OUT where some are missing between."""
    shown, end = [], 0
    for part in parts:
        first, dots, last = (text.strip() for text in part.partition(".."))
        start = position(lines, first, end)
        stop = position(lines, last, start) + 1 if last else len(lines) if dots else start + 1
        if any(line.strip() for line in lines[end:start]):
            shown.append(LEFT_OUT)
        elif start > end:
            shown.append("")
        shown += lines[start:stop]
        end = stop
    return shown + ([LEFT_OUT] if any(line.strip() for line in lines[end:]) else [])


def column_spans(rule: str) -> list[tuple[int, int]]:
    """Where the columns of a printed table begin and end, from the rule below its heading."""
    return [match.span() for match in re.finditer(r"-+(?:  |$)", rule)]


def without_columns(lines: list[str], names: list[str]) -> list[str]:
    """The same without the columns of these names; LEFT_OUT ends a heading that had them."""
    spans, result = [], []
    for heading, line in zip(lines, [*lines[1:], ""]):
        if re.fullmatch(r"-+(  +-+)+", line.strip()):
            columns = column_spans(line)
            spans = [(a, b) for a, b in columns if heading[a:b].strip() not in names]
            left_out = len(spans) < len(columns)
            spans = spans if left_out else []
            ending = f"  {LEFT_OUT}" if left_out else ""
        elif not heading.strip():
            spans = []
        if spans:
            kept = "".join(heading[a:b].ljust(b - a) for a, b in spans)
            heading = kept.rstrip() + ending
        result.append(heading)
        ending = ""
    return result


def wrapped(line: str) -> list[str]:
    """A sentence too long for a page, as a terminal breaks it; a table's row is left as it is."""
    is_row = "  " in line.strip()
    if len(line) <= COLUMNS or is_row:
        return [line]
    return textwrap.wrap(line, COLUMNS - 4, subsequent_indent="    ")


def output_block(what: str) -> str:
    """A fenced block with what was recorded, cut as the marker says."""
    names, *parts = (part.strip() for part in what.split("|"))
    lines = [line.rstrip() for line in render(names.split()).splitlines()]
    if parts and parts[-1].startswith("without "):
        columns = parts.pop().removeprefix("without ")
        lines = without_columns(lines, [name.strip() for name in columns.split(";")])
    lines = cut(lines, parts) if parts else lines
    pieces = (piece for line in lines for piece in wrapped(line.rstrip()))
    return "\n".join(["```text", *pieces, "```"])
