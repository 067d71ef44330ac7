"""Figures in the prose of pages are the code's and the records'.

readme_test.py asks the same of tables, outputs and snippets.
"""

import itertools
import json

import pytest
import torch

from harness.benchmark.checking import FLOOR
from harness.data.samples import IGNORE_INDEX
from harness.model import architecture
from harness.steps import timing
from tools.page_records import HERE, RESULTS


def norms_per_forward() -> int:
    return 2 * architecture.llama_3_1_8b_config().num_hidden_layers + 1


OF_THE_CODE = {  # pages, a figure, and whether the code has it
    "2e-6 in fp32, 2e-4 in fp16, 1e-3 in bf16": (
        ("README", "docs/glossary"),
        lambda: {torch.float32: 2e-6, torch.float16: 2e-4, torch.bfloat16: 1e-3} == FLOOR,
    ),
    "a plain copy of 2 GiB": (
        ("README", "docs/glossary"),
        lambda: timing.COPIED_BYTES == 2 * 2**30,
    ),
    "-100, of tokens that are not trained on": (("docs/glossary",), lambda: IGNORE_INDEX == -100),
    "65 norms per forward": (("docs/glossary",), lambda: norms_per_forward() == 65),
    "eps is 1e-5 for LLaMA 3.1": (
        ("docs/troubleshooting",),
        lambda: architecture.llama_3_1_8b_config().rms_norm_eps == 1e-5,
    ),
}


def text_of(page: str) -> str:
    return " ".join((HERE / f"{page}.md").read_text().split())


@pytest.mark.parametrize("figure", OF_THE_CODE)
def test_a_figure_is_the_codes(figure):
    pages, holds = OF_THE_CODE[figure]
    assert all(figure in text_of(page) for page in pages) and holds()


def test_how_good_the_ladders_predictions_are_is_its_records():
    """At 4 x 2,048, of what each rung gained."""
    rungs = json.loads((RESULTS / "ladder_4x2048.json").read_text())["rungs"]
    names = ["adamw", "rmsnorm", "rope", "swiglu", "linear_cross_entropy"]
    assert [rung["name"] for rung in rungs[1:6]] == names
    *first, (predicted, gained) = (
        (before["step_ms"] - rung["predicted_ms"], before["step_ms"] - rung["step_ms"])
        for before, rung in itertools.pairwise(rungs[:6])
    )
    assert all("good to a sixth" in text_of(page) for page in ("README", "docs/ladder"))
    assert all(abs(before - after) <= before / 6 for before, after in first)
    assert all("half as large again as" in text_of(page) for page in ("README", "docs/ladder"))
    assert 1.4 < predicted / gained < 1.6
