"""Fill the pages' recorded outputs and tables from results/*.json, or check that they agree.

    python -m tools.fill_pages            # rewrite README.md and docs/*.md
    python -m tools.fill_pages --check    # exit code 1 where a page and the records differ
    python -m tools.fill_pages --pictures # draw results/*.png again, from the records
    python -m tools.fill_pages --record results/rmsnorm_test.json rmsnorm_test.py
                                          # run a script, keep what it prints

A page marks what comes from a record by one comment in the line above the block or table:

    <!-- output: profile_1x512 -->                     what the script printed, rendered again
    <!-- output: a b -->                               of several records: the comparison of them
    <!-- output: a | Category .. Total | GPU busy -->  parts: from a line that begins with one text
                                                       to one that begins with another; single lines
    <!-- output: a | Rung .. | without Total -->       the last column of its tables left out
    <!-- table: NAME WORD ... -->                      NAME(WORD, ...) or NAME_table(WORD, ...)
                                                       of page_*_table*.py
    <!-- table: flags -->                              the rules of harness/cli/flags.py
    <!-- table: exercises -->                          the words of exercises/grading/words.py

Below it stands, as a quotation, where its figures come from (page_records.py).
`...` stands for lines and columns that are left out.  Records are named without results/ and .json.
A sentence of a page holds no measured figure: the figure is in a block beside the sentence.
"""

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import compare_runs
import profile_baseline
from exercises.grading import words
from harness.benchmark import benchmark_picture, benchmark_tables
from harness.benchmark.benchmark_specs import SPECS
from harness.cli import command_line, flags, output_files
from harness.cli.processes import DDP, FSDP
from harness.profiling import roofline
from harness.records import run_records
from harness.training import run_text
from next_steps.comparisons import compare_profiles, sweep_tables
from next_steps.studies import fp8_accuracy, frontier, ladder, predict, scaling_tables
from tools import explaining_pictures, instruction_count
from tools.page_records import HERE, LOADED, PAGE_WIDTH, RESULTS, load_record, source

LEFT_OUT = "..."
MARKED = re.compile(
    r"^<!-- (?P<kind>output|table): (?P<what>[^\n]+?) -->\n"
    r"(?P<body>```text\n.*?^```$|\|[^\n]*(?:\n\|[^\n]*)*)(?P<source>(?:\n>[^\n]*)*)",
    re.DOTALL | re.MULTILINE,
)


def pages() -> list[Path]:
    return [HERE / "README.md", *sorted((HERE / "docs").glob("*.md"))]


def fill(text: str, page: Path) -> str:
    """Return a page's text with every marked block and table computed from the records."""
    from tools import page_found_table, page_kernel_tables, page_published_tables, page_step_tables

    tables = vars(page_kernel_tables) | vars(page_published_tables) | vars(page_step_tables)
    tables |= vars(page_found_table)
    tables |= {"flags_table": flags.page, "exercises_table": words.page}

    def computed(match: re.Match) -> str:
        LOADED.clear()
        if match["kind"] == "output":
            body = output_block(match["what"])
        else:
            name, *arguments = match["what"].split()
            body = (tables.get(f"{name}_table") or tables[name])(*arguments)
        lines = f"<!-- {match['kind']}: {match['what']} -->", body, source(LOADED, page)
        return "\n".join(filter(None, lines))

    return MARKED.sub(computed, text)


# ---------------------------------------------------------------- outputs


def render(names: list[str]) -> str:
    """Return what the script that wrote these records printed."""
    from next_steps.memory import memory_estimate, memory_profile

    records = [load_record(name) for name in names]
    kind = records[0]["kind"] + ", several" * (len(records) > 1)
    renderers = {
        "finetune, several": lambda *runs: compare_runs.render([[run] for run in runs]),
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
        "prediction": predict.render,
        "text": lambda record: "\n".join(record["lines"]),
    }
    return renderers[kind](*records)


def finetune_output(record: dict) -> str:
    """Return every step's line and the result block."""
    n_steps, on_gpu = record["steps"], record["environment"]["gpu"] is not None
    steps = [run_text.step_line(i, n_steps, record, on_gpu) for i in range(1, n_steps + 1)]
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
    """Return the lines that the parts name; LEFT_OUT stands between where lines are missing."""
    shown, end = [], 0
    for part in parts:
        first, dots, last = (text.strip() for text in part.partition(".."))
        start = position(lines, first, end)
        stop = position(lines, last, start) + 1 if last else len(lines) if dots else start + 1
        if shown and start > end:
            shown.append(LEFT_OUT if any(lines[end:start]) else "")
        shown += lines[start:stop]
        end = stop
    return shown


def without_last_column(lines: list[str], name: str) -> list[str]:
    """Leave out the last column of tables where it has this name; LEFT_OUT ends its heading."""
    start, result = None, []
    for line, below in zip(lines, [*lines[1:], ""]):
        if re.fullmatch(r"-+(  +-+)+", below) and line.endswith(f"  {name}"):  # a heading
            start = below.rindex(" ") + 1
            line = f"{line[:start].rstrip()}  {LEFT_OUT}"
        elif start is not None and line[start - 2 : start].strip():  # a sentence ends the table
            start = None
        elif start is not None:
            line = line[:start].rstrip()
        result.append(line)
    return result


def output_block(what: str) -> str:
    """Return a fenced block with what was recorded, cut as the marker says.

    A sentence too long for a page is broken as a terminal breaks it. A table's row stays whole.
    """
    names, *parts = (part.strip() for part in what.split("|"))
    lines = [line.rstrip() for line in render(names.split()).splitlines()]
    if parts and parts[-1].startswith("without "):
        lines = without_last_column(lines, parts.pop().removeprefix("without "))
    lines = cut(lines, parts) if parts else lines
    for i, line in enumerate(lines):
        if len(line) > PAGE_WIDTH and "  " not in line.strip():
            lines[i] = textwrap.fill(line, PAGE_WIDTH - 4, subsequent_indent="    ")
    return "\n".join(["```text", *lines, "```"])


# ---------------------------------------------------------------- pictures and checks' outputs


def pictures() -> Iterator[tuple[str, Callable, list]]:
    """Each picture of results/: its name, the function that draws it, the function's arguments."""
    from next_steps.memory import memory_profile

    single = {f"benchmark_{kernel}": benchmark_picture.plot for kernel in SPECS}
    memory = "memory_baseline_1x512", "memory_baseline_4x2048", "memory_all_4x2048"
    single |= dict.fromkeys(memory, memory_profile.plot)
    single["frontier"] = frontier.plot
    for name, draw in single.items():
        if (RESULTS / f"{name}.json").exists():  # FP8's benchmarks have no record
            yield name, draw, [load_record(name)]
    for name, before, after in (
        ("roofline_4x2048", "profile_4x2048", "profile_4x2048_both"),
        ("roofline_all_4x2048", "profile_4x2048", "profile_4x2048_all"),
        ("roofline_fp8_4x2048", "profile_full_4x2048", "profile_fp8_4x2048"),
    ):
        yield name, roofline.plot, [[load_record(before), load_record(after)]]
    runs = [[load_record(f"finetune_{which}_4x2048")] for which in ("baseline", "optimized")]
    yield "comparison_4x2048", compare_runs.plot, [runs]
    yield "scaling", scaling_tables.plot, [[load_record(f"scaling_{way}_2") for way in (FSDP, DDP)]]
    yield "addresses", explaining_pictures.plot_addresses, []
    yield "memory_hierarchy", explaining_pictures.plot_memories, []
    yield "ladder", ladder.plot, [[load_record("ladder_1x512"), load_record("ladder_4x2048")]]


def record_output(path: str, script: str) -> int:
    """Run a script that writes no record, keep its printed lines, return its exit code."""
    output_files.require_writable(path)
    output_files.require_ours("--record", path, *output_files.BEGINNINGS["json"])
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=HERE)
    print(run.stderr, run.stdout, sep="", end="")  # the verdict is last
    if run.returncode == 0:
        record = {"kind": "text", "environment": run_records.environment(), "script": script}
        run_records.write_record(path, record | {"lines": run.stdout.splitlines()})
    return run.returncode


def main() -> int:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--check", action="store_true", help="change nothing; exit code 1 where they differ")
    add("--pictures", action="store_true", help="draw the pictures of results/ again")
    add("--record", nargs=2, metavar=("FILE", "SCRIPT"), help="record what SCRIPT prints")
    args = parser.parse_args()
    if args.record:
        return record_output(*args.record)
    if args.pictures:
        for name, draw, arguments in pictures():
            draw(*arguments, str(RESULTS / f"{name}.png"))
        return 0
    changed = []
    for page in pages():
        before = page.read_text()
        after = fill(before, page)
        if before != after:
            changed.append(str(page.relative_to(HERE)))
            if not args.check:
                page.write_text(after)
    if args.check and changed:
        fault = f"{', '.join(changed)}: not what the records say"
        print(f"{fault}; run: python -m tools.fill_pages", file=sys.stderr)
    return int(args.check and bool(changed))


if __name__ == "__main__":
    command_line.run_main(main)
