"""What a reader without a GPU types and sees: README's commands, its snippets, tables that fit."""

import re
import runpy
import shlex

import pytest

import benchmark_kernels
import compare_runs
import finetune_baseline
import finetune_optimized
import profile_baseline
from harness.cli import tables
from harness.cli.flags import FlagParser
from harness.cli.workload import Workload
from harness.model.config_file import load_config
from next_steps import finetune_options
from next_steps.comparisons import compare_profiles
from next_steps.memory import estimate, profile
from next_steps.studies import ladder
from tests.conftest import assert_refused, tracked
from tests.fixtures import HAS_GPU
from tools import fill_pages
from tools.page_records import HERE, load_record

README = (HERE / "README.md").read_text()
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
LEFT_OUT = "--batch-size", "--seq-len", "--cuda-graph"  # as README says
TRAINING = {
    "profile_baseline.py": profile_baseline.parse_args,
    "finetune_baseline.py": FlagParser("", finetune_options.FLAGS["Baseline"]).parse_args,
    "finetune_optimized.py": FlagParser("", finetune_options.OPTIMIZED).parse_args,
    "next_steps.memory.estimate": FlagParser("", estimate.FLAGS).parse_args,
    "next_steps.studies.ladder": FlagParser("", ladder.FLAGS).parse_args,
}
needs_no_gpu = pytest.mark.skipif(HAS_GPU, reason="there is a GPU")


def on_a_cpu(words: list[str]) -> list[str]:
    """A command of README as README says to type it without a GPU."""
    kept, numbers = [*words, "--model", "tiny"], ("--batch-size", "--seq-len")
    return [
        word
        for word, before in zip(kept, ["", *kept])
        if word not in LEFT_OUT and before not in numbers
    ]


def commands() -> list[list[str]]:
    scripts = "".join(block for language, block in BLOCKS if language == "bash")
    lines = (line for line in scripts.splitlines() if line.startswith("python "))
    words = (shlex.split(line, comments=True)[1:] for line in lines)
    words = (each[1:] if each[0] == "-m" else each for each in words)
    return [each for each in words if each[0] in TRAINING]


@needs_no_gpu
@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_readme_is_accepted_with_what_readme_adds(words):
    """And, more slowly, as printed but for the graph; `load_config` asks if the model fits."""
    as_printed = [*(word for word in words if word != "--cuda-graph"), "--model", "tiny"]
    for script, *flags in (on_a_cpu(words), as_printed):
        load_config(Workload.from_flags(TRAINING[script](flags), on_gpu=False))


def test_the_commands_of_the_lessons_are_found():
    assert {words[0] for words in commands()} == set(TRAINING) and len(commands()) >= 8


@needs_no_gpu
def test_readme_says_what_is_left_out_without_a_gpu():
    (said,) = re.findall(r"Without a GPU, add .*?\. Outputs", " ".join(README.split()))
    assert all(f"`{flag}`" in said for flag in (*LEFT_OUT, "--model tiny"))


@pytest.mark.parametrize(
    "code", [block for language, block in BLOCKS if language == "python"], ids=lambda c: c[:30]
)
def test_each_snippet_of_readme_is_a_file_that_runs_by_itself(code, tmp_path):
    file = tmp_path / "snippet.py"
    file.write_text(code)
    runpy.run_path(str(file))


@needs_no_gpu
def test_a_benchmark_that_would_take_an_hour_says_so_and_is_refused(run_script):
    flags = "--kernel", "cross_entropy", "--vocab", "32000", "--tokens", "8192"
    outcome = run_script(benchmark_kernels, *flags)
    assert_refused(outcome, "some 63 minutes", "8,192 x 32,000", "lower --tokens")


# ---------------------------------------------------------------- tables


def too_wide(text: str) -> list[str]:
    """Rows of tables that a terminal would break."""
    wide, inside = [], False
    lines = text.splitlines()
    for line, below in zip(lines, [*lines[1:], ""]):
        inside = bool(line) and (inside or bool(re.fullmatch(r" *-+(  +-+)+ *", below)))
        if inside and "  " in line.strip() and len(line) > tables.TERMINAL:
            wide.append(line)
    return wide


def renderable() -> list[str]:
    names = [path.stem for path in tracked("results/*.json")]
    kinds = {name: load_record(name).get("kind") for name in names}
    apart = {"durations", "judge", "published", "scaling", "sft"}
    apart |= {"fp8_costs", "trace_picture", "weight_values"}  # whose programs have left
    return [name for name in names if kinds[name] not in apart]


@pytest.mark.parametrize("name", renderable())
def test_the_tables_of_a_record_fit_a_terminal(name):
    assert not too_wide(fill_pages.render([name]))


def test_a_table_that_is_too_wide_is_noticed_and_goes_on_below():
    wide = [["name", *("x" * 30 for _ in range(4))]]
    headers = ["Row", "a", "b", "c", "d"]
    text = tables.table(headers, wide)
    assert not too_wide(text) and text.count("name") == 2 and text.count("x" * 30) == 4
    assert too_wide(text.replace("name", "name" + "y" * 80))


@pytest.mark.exhaustive
def test_what_the_tiny_model_prints_fits_a_terminal(run_script, tmp_path, monkeypatch):
    """The scripts of `make demo`, at a smaller size; without kernels, which only take longer."""
    monkeypatch.setattr(profile_baseline, "TIMED_STEPS", 1)
    tiny, runs = ["--model", "tiny", "--seq-len", "8"], [str(tmp_path / n) for n in "ab"]
    trace = str(tmp_path / "trace")
    for run in runs:
        flags = "--warmup", "1", "--trace", trace, "--json", run
        outcome = run_script(profile_baseline, *tiny, *flags)
        assert outcome.code == 0 and not too_wide(outcome.out), outcome.err
    outcomes = [
        run_script(compare_profiles, *runs),
        run_script(profile, *tiny),
        run_script(estimate, *tiny, "--kernels", "all"),
        *(run_script(finetune_baseline, *tiny, "--steps", "3", "--json", run) for run in runs),
        run_script(compare_runs, *runs),
        run_script(finetune_optimized, *tiny, "--kernels", "adamw", "--steps", "3"),
    ]
    for outcome in outcomes:
        assert outcome.code == 0 and not too_wide(outcome.out), outcome.err + outcome.out
