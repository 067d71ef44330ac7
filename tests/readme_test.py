"""The pages quote records, and their commands and snippets are what a reader types: all of it must
be true.
"""

import re
import runpy
import shlex
from pathlib import Path

import pytest

import benchmark_kernels
import check_toolchain
import compare_runs
import finetune_baseline
import finetune_optimized
import profile_baseline
from next_steps.comparisons import sweep_kernels
from next_steps.studies import fp8_accuracy, fp8_costs, frontier, make_samples, scaling
from tools import compile_check, fill_pages, make_records, page_outputs, trace_picture
from tools.fill_pages import MARKED
from tools.page_outputs import COLUMNS, LEFT_OUT
from tools.page_records import HERE, RESULTS, load
from tools.page_step_tables import Step

PAGES = fill_pages.pages()
TEXTS = {page: page.read_text() for page in PAGES}
FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)")

# Figures that are counted, set or quoted, not measured; each is derived where it stands.
NOT_MEASURED = re.compile(
    r"64\.2 GB|64 GB|96 GB|16 GB"  # weights, gradients and moments
    r"|150 GB|150\.1 GB|11\.8 GB"  # disk; of the H200
    r"|24 GB|48 GB|80 GB|24 and 48|48 or 24 GB"  # GPUs
    r"|2\.1 GB|12\.8 times|6 times"  # the logits; byte counts
    r"|1\.33 times|1\.07 times|1\.75 times|2\.9 times|28 / 16|206"  # predictions
    r"|6× less|4× faster|11 %|80-90 %"  # NVIDIA's claims
    r"|within 0\.1 %|to 0\.1 %|At 90 %|at 90 %|pass 100|by 2 % or more"  # tolerances and rules
    r"|64 KiB|8 × \d|1 × \d|4 × \d|\d × \d"
)
UNIT = re.compile(
    r"\d+(?:[.,]\d+)*\s?(?:ms\b|us\b|µs|GB\b|MB\b|GB/s|TB/s|TFLOP/s|tokens/sec|×(?! \d)|%)"
)
MODULES = {
    "check_toolchain.py": check_toolchain,
    "profile_baseline.py": profile_baseline,
    "benchmark_kernels.py": benchmark_kernels,
    "finetune_baseline.py": finetune_baseline,
    "finetune_optimized.py": finetune_optimized,
    "compare_runs.py": compare_runs,
    "next_steps.studies.fp8_accuracy": fp8_accuracy,
    "next_steps.studies.fp8_costs": fp8_costs,
    "next_steps.studies.frontier": frontier,
    "next_steps.studies.make_samples": make_samples,
    "next_steps.studies.scaling": scaling,
    "tools.compile_check": compile_check,
    "next_steps.comparisons.sweep_kernels": sweep_kernels,
    "tools.fill_pages": fill_pages,
    "tools.make_records": make_records,
    "tools.trace_picture": trace_picture,
}


def blocks(page: Path, language: str) -> list[str]:
    return [
        match["code"] for match in FENCED.finditer(TEXTS[page]) if match["language"] == language
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(HERE))


def with_pages(function):
    return pytest.mark.parametrize("page", PAGES, ids=name_of)(function)


@with_pages
def test_outputs_and_tables_equal_the_records(page):
    assert fill_pages.fill(TEXTS[page]) == TEXTS[page], "run: python -m tools.fill_pages"


@with_pages
def test_every_comment_marks_the_block_below_it(page):
    text = TEXTS[page]
    assert text.count("<!--") == len(list(MARKED.finditer(text))), (
        "a marker with no block below, or another comment"
    )


@with_pages
def test_no_measured_figure_is_typed_by_hand(page):
    prose = FENCED.sub("", MARKED.sub("", TEXTS[page]))
    typed = [line for line in prose.splitlines() if UNIT.search(NOT_MEASURED.sub("", line))]
    assert not typed


@with_pages
def test_every_record_that_a_page_quotes_says_where_it_was_made(page):
    for match in MARKED.finditer(TEXTS[page]):
        for name in match["what"].split("|")[0].split() if match["kind"] == "output" else []:
            record = load(name)
            assert record["environment"]["date"] and record["environment"]["commit"] != "unknown"
            assert record["environment"]["gpu"] or record["kind"] == "estimate"


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@with_pages
def test_every_link_leads_somewhere(page):
    for link in LINK.findall(TEXTS[page]):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(path.read_text()), f"{link}: no such heading"


@with_pages
def test_no_heading_occurs_twice(page):
    headings = re.findall(r"^#+ .+$", FENCED.sub("", TEXTS[page]), flags=re.MULTILINE)
    assert len(set(headings)) == len(headings)


@with_pages
def test_lines_fit_on_a_screen(page):
    wide = [
        line for line in TEXTS[page].splitlines() if len(line) > COLUMNS or line != line.rstrip()
    ]
    assert not wide


@with_pages
def test_pages_are_short(page):
    assert len(TEXTS[page].splitlines()) <= (600 if page.name == "README.md" else 200)


@pytest.mark.exhaustive
@with_pages
def test_snippets_run_as_printed(page, tmp_path):
    """One after the other, as one file: what a snippet names, an earlier one of the page has
    made.
    """
    code = "\n".join(blocks(page, "python"))
    if code:
        file = tmp_path / "snippets.py"
        file.write_text(code)
        runpy.run_path(str(file))


def test_the_snippets_print_what_they_say(tmp_path, capsys):
    file = tmp_path / "snippets.py"
    file.write_text("\n".join(blocks(HERE / "README.md", "python")))
    runpy.run_path(str(file))
    chunks, result = ["m = 5   d = 1.203", "m = 7   d = 1.587"], ["loss = 0.462", "True"]
    assert capsys.readouterr().out.splitlines()[:4] == chunks + result


def commands(page: Path) -> list[list[str]]:
    """Each command of the page's bash blocks, in words, with the values of its variables."""
    found = []
    for block in blocks(page, "bash"):
        variables = {}
        for line in block.replace("\\\n", " ").splitlines():
            if assignment := re.fullmatch(r'(\w+)="(.*)"', line):
                variables[f"${assignment[1]}"] = assignment[2]
                continue
            for variable, value in variables.items():
                line = line.replace(variable, value)
            found.append(shlex.split(line, comments=True))
    return [words for words in found if words]


@pytest.fixture(scope="module")
def helps():
    """What --help of each script that a page runs has said."""
    return {}


@with_pages
def test_commands_name_scripts_and_flags_that_exist(page, run_script, helps):
    for words in commands(page):
        if words[0] == "pytest":
            assert (HERE / words[1]).is_file()
        if words[0] != "python":
            continue
        script = words[2] if words[1] == "-m" else words[1]
        if script.endswith(("_test.py", "_test")):
            assert (
                HERE / f"{script.removesuffix('.py').replace('.', '/')}.py"
            ).is_file() and words[-1] == script
            continue
        if script not in helps:
            helps[script] = run_script(MODULES[script], "--help").out
        flags = [word for word in words if word.startswith("--")]
        assert all(re.search(rf"{flag}\b", helps[script]) for flag in flags), words


@with_pages
def test_commands_write_nothing_that_git_knows(page):
    for words in commands(page):
        for flag, value in zip(words, [*words[1:], ""]):
            if flag in ("--json", "--plot", "--save", "--memory-snapshot"):
                assert value.startswith("runs/"), f"{flag} {value}: readers' files go to runs/"
    assert "runs/" in (HERE / ".gitignore").read_text().split()


def test_a_changed_figure_is_noticed():
    text = TEXTS[HERE / "README.md"]
    for match in (
        next(m for m in MARKED.finditer(text) if m["kind"] == kind) for kind in ("output", "table")
    ):
        digit = re.search(r"\d", match["body"]).start() + match.start("body")
        changed = text[:digit] + ("7" if text[digit] != "7" else "8") + text[digit + 1 :]
        assert fill_pages.fill(changed) == text != changed


def test_a_ratio_of_steps_below_their_spread_is_not_printed():
    run = {"warmup_steps": 1, "seconds": [9.0, 0.18, 0.20, 0.22], "median_seconds": 0.2}
    first = Step.of_run(run)
    assert first.cell() == "200 ms (188–212)" and first.between(1) == "188.0–212.0"
    near, far = (
        Step.of_rung({"step_ms": ms, "p20_ms": ms - 5, "p80_ms": ms + 5}) for ms in (190, 250)
    )
    assert (first.over(near), first.over(far)) == ("no difference", "0.80×")
    old = Step.of_rung({"step_ms": 190})  # of a record that does not say
    assert (old.cell(), first.over(old)) == ("190 ms", "1.05×")


LINES = """\
title
Name    Host    Total
----  ------  -------
a        1.0      2.0
b        3.0      4.0

end""".splitlines()


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        (["Name .. a"], [LEFT_OUT, *LINES[1:4], LEFT_OUT]),
        (["title .. b"], [*LINES[:5], LEFT_OUT]),
        (["title", "b .."], ["title", LEFT_OUT, *LINES[4:]]),
        (["title .. b", "end"], LINES),
    ],
)
def test_an_output_is_cut_and_says_so(parts, shown):
    assert page_outputs.cut(LINES, parts) == shown


def test_a_part_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="begins with 'nowhere'"):
        page_outputs.cut(LINES, ["nowhere"])


def test_columns_are_left_out_and_the_heading_says_so():
    shown = page_outputs.without_columns(LINES, ["Host"])
    assert (
        shown[1:4] == ["Name    Total  ...", "----  -------", "a         2.0"]
        and shown[-1] == "end"
    )
    assert page_outputs.without_columns(LINES, ["Nothing"]) == LINES


def test_every_picture_is_drawn_from_its_records():
    drawn = {f"{name}.png" for name, _, _ in fill_pages.pictures()}
    assert drawn == {path.name for path in RESULTS.glob("*.png")}
    shown = {
        Path(link).name
        for text in TEXTS.values()
        for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    }
    assert shown <= drawn
