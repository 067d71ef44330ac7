"""Figures in the prose of pages are the code's and the records'.

readme_test.py asks the same of tables, outputs and snippets.
"""

import itertools

import pytest
import torch

from harness.benchmark.benchmark_specs import OURS
from harness.benchmark.checking import FLOOR
from harness.data.samples import IGNORE_INDEX
from harness.model import architecture
from harness.steps import timing
from tools.page_kernel_tables import by_size
from tools.page_records import HERE, load_record


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
    rungs = load_record("ladder_4x2048")["rungs"]
    names = ["adamw", "rmsnorm", "rope", "swiglu", "linear_cross_entropy"]
    assert [rung["name"] for rung in rungs[1:6]] == names
    *first, (predicted, gained) = (
        (before["step_ms"] - rung["predicted_ms"], before["step_ms"] - rung["step_ms"])
        for before, rung in itertools.pairwise(rungs[:6])
    )
    assert all("good to a sixth" in text_of(page) for page in ("README", "docs/ladder"))
    assert all(abs(before - after) <= before / 6 for before, after in first)
    said = f"{predicted / gained:.1f} times what was gained"
    assert all(said in text_of(page) for page in ("README", "docs/ladder"))


def test_answers_are_the_records():
    names = "profile_4x2048", "profile_4x2048_both", "ladder_4x2048"
    before, after, ladder = map(load_record, names)
    rungs = {rung["name"]: rung["step_ms"] for rung in ladder["rungs"]}
    first, last = map(load_record, ("finetune_baseline_4x2048", "finetune_optimized_4x2048"))
    alone_us = {rows[OURS].size: rows[OURS].alone for rows in by_size("rmsnorm_sizes", 65_536)}
    gained = rungs["baseline"] - rungs["cuda_graph"]
    for figure in (
        f"has {alone_us['8,192'] / alone_us['4,096']:.2f} times",
        f'row "Step" is {before["timeline"]["step_ms"] / after["timeline"]["step_ms"]:.2f}.',
        f'"Speedup" is {first["median_seconds"] / last["median_seconds"]:.2f}:',
        f"{rungs['baseline']:.1f} - {rungs['cuda_graph']:.1f} = {gained:.1f}",
    ):
        assert figure in text_of("docs/answers")


def test_what_the_8b_model_needs_is_the_ladders_memory():
    needed = []
    for size in ("1x512", "4x2048"):
        rungs = load_record(f"ladder_{size}")["rungs"]
        peaks = {rung["name"]: rung["peak_memory_bytes"] / 1e9 for rung in rungs}
        needed += [peaks["cuda_graph"], peaks["baseline"]]
    least, eager, *large = needed
    assert f"needs {least:.0f} GB with all kernels" in text_of("README")
    assert "just over 80 GB without" in text_of("README") and 80 < eager < 81
    assert "{:.0f} and {:.0f} GB".format(*large) in text_of("README")


def test_which_bytes_of_eagers_rmsnorm_a_profile_counts_elsewhere():
    """The sum of two gradients in fp32 reads 4 + 4 and writes 4 bytes, and is no layer's."""
    record, hidden = load_record("profile_4x2048"), architecture.llama_3_1_8b_config().hidden_size
    numbers = norms_per_forward() * 4 * 2048 * hidden
    counted = record["categories"]["normalization"]["bytes"] / numbers
    assert f"moved {counted:.0f} bytes per element, not lesson 4's 128" in text_of("README")
    assert round(counted) + 12 == 128 and "the 12 bytes of that sum" in text_of("README")
