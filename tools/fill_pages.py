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
    <!-- output: a | Rung .. | without Host; GB/s -->  columns of its tables left out
    <!-- table: NAME WORD ... -->                      TABLES[NAME](WORD, ...) of a module
                                                       page_*_tables.py
    <!-- table: flags -->                              the rules of harness/cli/flags.py
    <!-- table: exercises -->                          the words of exercises/grading/words.py

Below it stands, as a quotation, where its figures come from (page_records.py).
`...` stands for lines and columns that are left out.  Records are named without results/ and .json.
A sentence of a page holds no measured figure: the figure is in a block beside the sentence.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from exercises.grading import words
from harness.cli import command_line, flags, output_files
from harness.records import run_records
from tools.page_records import HERE, LOADED, RESULTS, load

MARKED = re.compile(
    r"^<!-- (?P<kind>output|table): (?P<what>[^\n]+?) -->\n"
    r"(?P<body>```text\n.*?^```$|\|[^\n]*(?:\n\|[^\n]*)*)(?P<source>(?:\n>[^\n]*)*)",
    re.DOTALL | re.MULTILINE,
)


def pages() -> list[Path]:
    return [HERE / "README.md", *sorted((HERE / "docs").glob("*.md"))]


def fill(text: str, page: Path) -> str:
    """Return a page's text with every marked block and table computed from the records."""
    from tools import page_kernel_tables, page_published_tables, page_step_tables
    from tools.page_outputs import output_block
    from tools.page_records import source

    modules = page_kernel_tables, page_published_tables, page_step_tables
    tables = {"flags": flags.page, "exercises": words.page}
    for module in modules:
        tables |= module.TABLES

    def computed(match: re.Match) -> str:
        LOADED.clear()
        if match["kind"] == "output":
            body = output_block(match["what"])
        else:
            name, *arguments = match["what"].split()
            body = tables[name](*arguments)
        lines = f"<!-- {match['kind']}: {match['what']} -->", body, source(LOADED, page)
        return "\n".join(filter(None, lines))

    return MARKED.sub(computed, text)


def pictures() -> Iterator[tuple[str, Callable, list]]:
    """Each picture of results/: its name, the function that draws it, the function's arguments."""
    import compare_runs
    from harness.benchmark import benchmark_picture
    from harness.benchmark.benchmark_specs import SPECS
    from harness.cli.processes import PARALLEL
    from harness.profiling import roofline
    from next_steps.memory import memory_profile
    from next_steps.studies import frontier, ladder, scaling_tables

    single = {f"benchmark_{kernel}": benchmark_picture.plot for kernel in SPECS}
    memory = "memory_baseline_1x512", "memory_baseline_4x2048", "memory_all_4x2048"
    single |= dict.fromkeys(memory, memory_profile.plot)
    single["frontier"] = frontier.plot
    for name, draw in single.items():
        if (RESULTS / f"{name}.json").exists():  # FP8's benchmarks have no record
            yield name, draw, [load(name)]
    for name, before, after in (
        ("roofline_4x2048", "profile_4x2048", "profile_4x2048_both"),
        ("roofline_all_4x2048", "profile_4x2048", "profile_4x2048_all"),
        ("roofline_fp8_4x2048", "profile_full_4x2048", "profile_fp8_4x2048"),
    ):
        yield name, roofline.plot, [[load(before), load(after)]]
    runs = [load(f"finetune_{which}_4x2048") for which in ("baseline", "optimized")]
    yield "comparison_4x2048", compare_runs.plot, [compare_runs.run_names(runs), runs]
    yield "scaling", scaling_tables.plot, [[load(f"scaling_{way}_2") for way in PARALLEL]]
    yield "ladder", ladder.plot, [[load("ladder_1x512"), load("ladder_4x2048")]]


def record_output(path: str, script: str) -> int:
    """Run a script that writes no record, keep its printed lines, return its exit code."""
    output_files.require_writable(path)
    output_files.require_ours("--record", path, *output_files.BEGINNINGS["json"])
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=HERE)
    print(run.stdout, run.stderr, sep="", end="")
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
