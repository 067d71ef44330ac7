"""What a page shows of a script's output: rendered again from its record, cut, columns left out."""

import re
import textwrap

import compare_runs
import profile_baseline
from harness.benchmark import benchmark_tables
from harness.training import run_text
from next_steps.comparisons import compare_profiles, sweep_tables
from next_steps.memory import memory_estimate, memory_profile
from next_steps.studies import fp8_accuracy, frontier, ladder, scaling_tables
from tools import instruction_count
from tools.page_records import COLUMNS, load

LEFT_OUT = "..."


def render(names: list[str]) -> str:
    """Return what the script that wrote these records printed."""
    records = [load(name) for name in names]
    kind = records[0]["kind"] + ", several" * (len(records) > 1)
    renderers = {
        "finetune, several": lambda *runs: compare_runs.render(compare_runs.run_names(runs), runs),
        "profile, several": compare_profiles.render_comparison,
        "scaling, several": scaling_tables.render,
        "finetune": finetune_output,
        "profile": profile_baseline.render,
        "memory": memory_profile.render,
        "estimate": memory_estimate.render,
        "benchmark": benchmark_tables.render,
        "sweep": sweep_tables.render_sweep,
        "ladder": ladder.render,
        "frontier": frontier.render,
        "longest": frontier.render_longest,
        "fp8_accuracy": fp8_accuracy.render,
        "instructions": instruction_count.render,
        "text": lambda record: "\n".join(record["lines"]),
    }
    return renderers[kind](*records)


def finetune_output(record: dict) -> str:
    """Return every step's line and the result block."""
    n_steps = record["steps"]
    steps = [run_text.step_line(i, n_steps, record) for i in range(1, n_steps + 1)]
    return "\n".join([*steps, "", run_text.result_block(record)])


def position(lines: list[str], beginning: str, start: int) -> int:
    """Return the place of the first line, from `start` on, that begins with these words."""
    for i in range(start, len(lines)):
        if " ".join(lines[i].split()).startswith(" ".join(beginning.split())):
            return i
    raise ValueError(
        f"no line from line {start + 1} on begins with {beginning!r}: look at the record's output"
    )


def cut(lines: list[str], parts: list[str]) -> list[str]:
    """Return the lines that the parts name; LEFT_OUT stands where lines are missing between."""
    shown, end = [], 0
    for part in parts:
        first, dots, last = (text.strip() for text in part.partition(".."))
        start = position(lines, first, end)
        stop = position(lines, last, start) + 1 if last else len(lines) if dots else start + 1
        if start > end:
            shown.append(LEFT_OUT if any(lines[end:start]) else "")
        shown += lines[start:stop]
        end = stop
    return shown + ([LEFT_OUT] if any(lines[end:]) else [])


def without_columns(lines: list[str], names: list[str]) -> list[str]:
    """Leave out the columns of these names; LEFT_OUT ends a heading that had them."""
    columns, spans, result = [], [], []
    for line, below in zip(lines, [*lines[1:], ""]):
        ending = ""
        if re.fullmatch(r"-+(  +-+)+", below.strip()):  # this line is a heading
            columns = [match.span() for match in re.finditer(r"-+(?:  |$)", below)]
            spans = [(a, b) for a, b in columns if line[a:b].strip() not in names]
            if len(spans) == len(columns):
                spans = []
            else:
                ending = f"  {LEFT_OUT}"
        elif not line or any(line[b - 2 : b].strip() for _, b in columns[:-1]):  # not a row
            spans = []
        if spans:
            line = "".join(line[a:b].ljust(b - a) for a, b in spans).rstrip() + ending
        result.append(line)
    return result


def output_block(what: str) -> str:
    """Return a fenced block with what was recorded, cut as the marker says.

    A sentence too long for a page is broken as a terminal breaks it. A table's row stays whole.
    """
    names, *parts = (part.strip() for part in what.split("|"))
    lines = [line.rstrip() for line in render(names.split()).splitlines()]
    if parts and parts[-1].startswith("without "):
        columns = parts.pop().removeprefix("without ")
        lines = without_columns(lines, [name.strip() for name in columns.split(";")])
    lines = cut(lines, parts) if parts else lines
    for i, line in enumerate(lines):
        if len(line) > COLUMNS and "  " not in line.strip():
            lines[i] = textwrap.fill(line, COLUMNS - 4, subsequent_indent="    ")
    return "\n".join(["```text", *lines, "```"])
