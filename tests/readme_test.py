"""The pages quote records, and their commands and snippets are what a reader types: all of it must
be true.
"""

import importlib.util
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from transformers.utils import is_kernels_available

import benchmark_kernels
import check_toolchain
import compare_runs
import finetune_baseline
import finetune_optimized
import judge
import profile_baseline
from exercises import check
from next_steps.comparisons import compare_profiles, sweep
from next_steps.finetuning import distill, opponents
from next_steps.hugging_face import kernel_repository, sft
from next_steps.memory import estimate, profile
from next_steps.studies import fp8_accuracy, frontier, ladder, predict, scaling
from tests import packaged_model
from tests.conftest import tracked
from tools import (
    compile_check,
    fill_pages,
    instruction_count,
    make_records,
    my_gpu,
    page_records,
)
from tools.fill_pages import LEFT_OUT, MARKED
from tools.page_records import HERE, PAGE_WIDTH, load_record

PAGES = fill_pages.pages()
TEXTS = {str(page.relative_to(HERE)): page.read_text() for page in PAGES}
FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)")

# Figures that are counted, set or quoted, not measured; each is derived where it stands.
NOT_MEASURED = re.compile(
    r"64\.2 GB|64 GB|96 GB|16 GB"  # weights, gradients and moments
    r"|321\.2 GB|112\.4 GB|788\.0 MB|524\.3 and 0 MB|1\.2 %"  # answers, worked out there
    r"|about 2 GB|51 GB|75 and 114 GB"  # a download; estimates, rounded
    r"|150 GB|150\.1 GB|11\.8 GB"  # disk; of the H200
    r"|24 GB|48 GB|80 GB|24 and 48|48 or 24 GB"  # GPUs
    r"|2\.1 GB|12\.8 times|6 times"  # the logits; byte counts
    r"|1\.33 times|1\.07 times|1\.75 times|2\.9 times|28 / 16|206"  # predictions
    r"|6× less|4× faster|11 %|80-90 %|295 TFLOP/s"  # claims of NVIDIA, and of others
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
    "judge.py": judge,
    "exercises.check": check,
    "next_steps.studies.fp8_accuracy": fp8_accuracy,
    "next_steps.studies.frontier": frontier,
    "next_steps.studies.ladder": ladder,
    "next_steps.studies.predict": predict,
    "next_steps.hugging_face.kernel_repository": kernel_repository,
    "next_steps.hugging_face.sft": sft,
    "tests.packaged_model": packaged_model,
    "next_steps.studies.scaling": scaling,
    "tools.compile_check": compile_check,
    "next_steps.comparisons.compare_profiles": compare_profiles,
    "next_steps.comparisons.sweep": sweep,
    "next_steps.finetuning.distill": distill,
    "next_steps.finetuning.opponents": opponents,
    "next_steps.memory.estimate": estimate,
    "next_steps.memory.profile": profile,
    "tools.fill_pages": fill_pages,
    "tools.instruction_count": instruction_count,
    "tools.make_records": make_records,
    "tools.my_gpu": my_gpu,
}


def blocks(text: str, language: str) -> list[str]:
    return [match["code"] for match in FENCED.finditer(text) if match["language"] == language]


def test_outputs_and_tables_equal_the_records():
    changed = [p.name for p, text in zip(PAGES, TEXTS.values()) if fill_pages.fill(text, p) != text]
    assert not changed, "run: python -m tools.fill_pages"


def test_every_comment_marks_the_block_below_it():
    for name, text in TEXTS.items():
        n_marked = len(list(MARKED.finditer(text)))
        assert text.count("<!--") == n_marked, f"{name}: a marker without block, or a comment"


def test_each_question_has_its_answer():
    """In brackets behind it, or on the page of answers."""
    answers, without = TEXTS["docs/answers.md"], []
    for name, text in TEXTS.items():
        asked = re.search(r"^\*\*Try it:\*\*(.*?)(?:\n\n|\n*\Z)", text, re.DOTALL | re.MULTILINE)
        page = name.rpartition("/")[2]
        if asked and page not in ("README.md", "answers.md") and f"({page}).**" not in answers:
            without += [name] if "(" not in re.sub(r"\[.*?\]\(.*?\)|`.*?`", "", asked[1]) else []
    assert not without
    lessons = re.findall(r"^- \*\*Lesson (\d+)\.\*\*", answers, re.MULTILINE)
    asked = re.findall(r"^## Lesson (\d+)|(\*\*Try\s+it)", TEXTS["README.md"], re.MULTILINE)
    assert lessons == [before[0] for before, after in itertools.pairwise(asked) if after[1]]


def test_no_measured_figure_is_typed_by_hand():
    for name, text in TEXTS.items():
        prose = FENCED.sub("", MARKED.sub("", text))
        typed = [line for line in prose.splitlines() if UNIT.search(NOT_MEASURED.sub("", line))]
        assert not typed, name


WITHOUT_GPU = "estimate", "instructions", "prediction"  # kinds of records


def test_every_record_that_a_page_quotes_says_where_it_was_made():
    markers = (match for text in TEXTS.values() for match in MARKED.finditer(text))
    quoted = {m["what"].split("|")[0].strip() for m in markers if m["kind"] == "output"}
    for name in " ".join(quoted).split():
        record = load_record(name)
        assert record["environment"]["date"] and record["environment"]["commit"] != "unknown", name
        assert record["environment"]["gpu"] or record["kind"] in WITHOUT_GPU, name


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", FENCED.sub("", text), flags=re.MULTILINE)


def anchors(text: str) -> set[str]:
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings(text)}


def test_every_link_leads_somewhere():
    for page, text in zip(PAGES, TEXTS.values()):
        for link in LINK.findall(text):
            target, _, anchor = link.partition("#")
            path = (page.parent / target).resolve() if target else page
            assert path.exists(), f"{page}: {link}: no such file"
            assert not anchor or anchor in anchors(path.read_text()), f"{page}: {link}: no heading"


def without_source(block: re.Match) -> str:
    return block[0].removesuffix(block["source"])


def test_lines_fit_on_a_screen():
    """But for sources: what makes a record again is a command, and stays in one line."""
    texts = ((name, MARKED.sub(without_source, text)) for name, text in TEXTS.items())
    lines = [(name, line) for name, text in texts for line in text.splitlines()]
    assert not [each for each in lines if len(each[1]) > PAGE_WIDTH or each[1] != each[1].rstrip()]


def test_readme_is_short_and_no_heading_of_a_page_occurs_twice():
    assert len(TEXTS["README.md"].splitlines()) <= 450
    for name, text in TEXTS.items():
        assert len(set(headings(text))) == len(headings(text)), name


# add_a_kernel_page_test.py applies these to a copy of the project, and runs their commands there
ADD_A_KERNEL = "docs/add_a_kernel.md"
# own_data_test.py runs the snippets of that page after its commands; judged.md's are of other
# libraries, on a GPU
NOT_RUN_HERE = ADD_A_KERNEL, "docs/own_data.md", "docs/judged.md"
WITH_SNIPPETS = [
    name for name in TEXTS if blocks(TEXTS[name], "python") and name not in NOT_RUN_HERE
]
PRINTED = {
    "README.md": ["m = 5   d = 1.203", "m = 7   d = 1.587", "loss = 0.462", "True", "True"],
    "docs/backward.md": ["True True True"],
    "docs/cross_entropy.md": ["[0, 7, 6, 5] [1, 2, 3, 4]", "True", "True", "0.0"],
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.exhaustive] * (n not in PRINTED)) for n in WITH_SNIPPETS],
)
def test_snippets_run_as_printed_and_print_what_they_say(name, tmp_path, monkeypatch, capsys):
    """The snippets run one after the other, as one file. A snippet uses names of earlier ones."""
    if name == "docs/hub_kernels.md" and not is_kernels_available():
        pytest.skip("transformers finds no package `kernels` that it takes")
    if name == "docs/trainer.md" and importlib.util.find_spec("trl") is None:
        pytest.skip("needs the package trl (pip install trl)")
    monkeypatch.chdir(tmp_path)  # a snippet may write into runs/
    file = tmp_path / "snippets.py"
    file.write_text("\n".join(blocks(TEXTS[name], "python")))
    runpy.run_path(str(file))
    said = PRINTED.get(name, [])
    assert capsys.readouterr().out.splitlines()[: len(said)] == said


@pytest.mark.exhaustive
def test_own_code_runs_from_another_folder_with_the_printed_line(tmp_path):
    (line,), (snippet, *_) = (
        blocks(TEXTS["docs/own_code.md"], each) for each in ("bash", "python")
    )
    (tmp_path / "own.py").write_text(snippet)
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(before: str) -> subprocess.CompletedProcess:
        said = {"cwd": tmp_path, "env": inherited, "capture_output": True, "text": True}
        return subprocess.run(f"{before}{shlex.quote(sys.executable)} own.py", shell=True, **said)

    assert "No module named 'next_steps'" in run("").stderr
    found = run(line.replace("/path/to/this/folder", shlex.quote(str(HERE))))
    assert found.stdout.split("\n")[:2] == ["None", "torch.Size([1, 8, 64])"], found.stderr


def commands() -> list[list[str]]:
    """Each command of the pages' bash blocks, in words, with the values of its variables."""
    found = []
    texts = [text for name, text in TEXTS.items() if name != ADD_A_KERNEL]
    for block in (block for text in texts for block in blocks(text, "bash")):
        variables = {}
        for line in block.replace("\\\n", " ").splitlines():
            if assignment := re.fullmatch(r'(\w+)="(.*)"', line):
                variables[f"${assignment[1]}"] = assignment[2]
                continue
            for variable, value in variables.items():
                line = line.replace(variable, value)
            found.append(shlex.split(line, comments=True))
    return [words for words in found if words]


def test_commands_name_scripts_and_flags_that_exist(run_script):
    helps = {}
    for words in commands():
        if words[0] == "pytest":
            assert (HERE / words[1]).is_file()
        if words[0] != "python":
            continue
        script = words[2] if words[1] == "-m" else words[1]
        if script.endswith(("_test.py", "_test")):
            path = HERE / f"{script.removesuffix('.py').replace('.', '/')}.py"
            assert path.is_file() and words[-1] == script
            continue
        if script not in helps:
            helps[script] = run_script(MODULES[script], "--help").out
        flags = [word for word in words if word.startswith("--")]
        assert all(re.search(rf"{flag}\b", helps[script]) for flag in flags), words


def test_commands_write_nothing_that_git_knows():
    for words in commands():
        for flag, value in zip(words, [*words[1:], ""]):
            if flag in ("--json", "--plot", "--save", "--memory-snapshot"):
                assert value.startswith("runs/"), f"{flag} {value}: readers' files go to runs/"
    assert "runs/" in (HERE / ".gitignore").read_text().split()


def test_readme_says_below_each_filled_block_where_its_figures_come_from():
    assert all(block["source"] for block in MARKED.finditer(TEXTS["README.md"]))


@pytest.mark.parametrize("kind", ["output", "table"])
def test_a_changed_figure_and_a_changed_source_are_noticed_and_filled_in_again(kind):
    page, text = PAGES[0], TEXTS["README.md"]
    block = next(match for match in MARKED.finditer(text) if match["kind"] == kind)
    digit = re.search(r"\d", block["body"]).start() + block.start("body")
    other = "7" if text[digit] != "7" else "8"
    start, end = block.span("source")
    for changed in (
        text[:digit] + other + text[digit + 1 :],
        text[:start] + text[end:],
        text[:start] + "\n> by hand" + text[end:],
    ):
        assert fill_pages.fill(changed, page) == text != changed


def test_a_source_says_all_commits_and_machines_of_its_records(tmp_path, monkeypatch):
    monkeypatch.setattr(page_records, "RESULTS", tmp_path)
    machines = {"profile_1x512": ("NVIDIA H200", "a" * 40 + "+"), "ladder_1x512": (None, "b" * 40)}
    for name, (gpu, commit) in machines.items():
        versions = {"torch": "2.9.1+cpu", "triton": "3.5.0"}
        environment = {"gpu": gpu, "commit": commit, **versions}
        (tmp_path / f"{name}.json").write_text(json.dumps({"environment": environment}))
    said = page_records.source(machines, HERE / "docs" / "memory.md")
    assert said == (
        "> [H200, torch 2.9.1, triton 3.5.0; CPU, torch 2.9.1, triton 3.5.0, aaaaaaa+, bbbbbbb]"
        "(../results/profile_1x512.json) and 1 more: "
        "`python -m tools.make_records profile_1x512 ladder_1x512`"
    )
    assert not page_records.source(["published"], PAGES[0])


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
        (["Name .. a"], LINES[1:4]),
        (["title", "a .. b"], ["title", LEFT_OUT, *LINES[3:5]]),
        (["title", "b .."], ["title", LEFT_OUT, *LINES[4:]]),
        (["title .. b", "end"], LINES),
    ],
)
def test_an_output_is_cut_and_says_what_is_missing_between(parts, shown):
    assert fill_pages.cut(LINES, parts) == shown


def test_a_part_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="begins with 'nowhere'"):
        fill_pages.cut(LINES, ["nowhere"])


def test_the_last_column_is_left_out_and_the_heading_says_so():
    lines = [*LINES[:5], "a sentence that is longer than the table"]
    shown = fill_pages.without_last_column(lines, "Total")
    assert shown[1:] == [
        "Name    Host  ...",
        "----  ------",
        "a        1.0",
        "b        3.0",
        lines[-1],
    ]
    assert fill_pages.without_last_column(lines, "Host") == lines


def test_every_picture_is_drawn_from_its_records():
    drawn = {f"{name}.png" for name, _, _ in fill_pages.pictures()}
    left = {f"{name}.png" for name in page_records.ANSWERED}
    found = {path.name for path in tracked("results/*.png")}
    assert drawn == found - left
    links = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", "".join(TEXTS.values()))
    assert {link.rpartition("/")[2] for link in links} <= found
