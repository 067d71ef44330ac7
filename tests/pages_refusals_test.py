"""What the pages say is refused, where no test of its subject holds it: page, words, flags, reason.

The words stand on the page, so that a page that says something else fails too.
"""

import sys
from pathlib import Path

import pytest

import finetune_baseline
import finetune_optimized
from harness.cli import command_line
from next_steps.finetune_options import COMPILED

DOCS = Path(__file__).parents[1] / "docs"
ALONE = "those `--opponent`s that compile"
CHECKPOINTS = "not with `--opponent`, `--teacher`,\n  `--ladder`, `--longest`"
BASELINE, OPTIMIZED = finetune_baseline, finetune_optimized
LORA_AND = "They go with every other flag but `--teacher`, `--fp8` and"
CASES = [  # page, its words, processes, script, flags, what the refusal says
    *(
        ("several_gpus", ALONE, 2, OPTIMIZED, ["--opponent", name], "is for one process")
        for name in COMPILED
    ),
    *(
        ("data", ALONE, 1, OPTIMIZED, ["--pack", "--opponent", name], "with --pack samples end")
        for name in COMPILED
    ),
    *(
        ("resume", CHECKPOINTS, 1, OPTIMIZED, [*flags, *other], f"{flags[0]} does nothing with")
        for flags in (["--checkpoint", "x"], ["--resume", "x"])
        for other in (
            ["--opponent", "liger"],
            ["--teacher", "tiny"],
            ["--ladder"],
            ["--longest"],
        )
    ),
    ("lora", LORA_AND, 1, OPTIMIZED, ["--lora-rank", "2", "--teacher", "tiny"], "--lora-rank"),
    (
        *("lora", LORA_AND, 1, OPTIMIZED),
        ["--lora-rank", "2", "--kernels", "all", "--fp8"],
        "--fp8 is for plain weights",
    ),
    ("lora", "several processes need `--parallel ddp`", 2, BASELINE,
     ["--lora-rank", "2", "--quantize", "nf4"], "add --parallel ddp"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("page", "words", "n", "script", "flags", "said"),
    CASES,
    ids=[f"{page}: {n} x {' '.join(flags)}" for page, _, n, _, flags, _ in CASES],
)
def test_what_a_page_says_is_refused_is_refused_in_a_sentence(
    run_script, monkeypatch, tmp_path, page, words, n, script, flags, said
):
    assert words in (DOCS / f"{page}.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", str(n))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(command_line, "leave", sys.exit)  # which would end these tests
    outcome = run_script(script, "--model", "tiny", *flags)
    assert (outcome.code, outcome.out) == (2, "") and outcome.err.startswith("error: ")
    assert said in outcome.err and outcome.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
