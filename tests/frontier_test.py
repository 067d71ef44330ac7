"""Memory against time: which rows nobody needs and what does not fit; and the longest sequence is
where the memory or the model ends, and nothing else is called that.
"""

import json

import pytest
import torch

from harness.cli.command_line import HostMemoryError
from harness.cli.device import HAS_GPU
from harness.cli.workload import Workload
from harness.model import architecture
from harness.steps import stepping
from next_steps.studies import frontier
from tests.small_workloads import MADE_UP
from tests.step_time_test import RATES

# a dozen rows are all that Triton's interpreter gets through in a tenth of a second
TINY = ["--model", "tiny", "--dtype", "fp32"]
LONGEST = [*TINY, "--longest", "--kernels"]

# ---------------------------------------------------------------- memory against time


def row(level, gb=None, ms=None, kernels="baseline", size="1 x 8,192") -> dict:
    found = {"size": size, "kernels": kernels, "recompute": level}
    found |= {"estimated_bytes": 10e9, "estimated_ms": 100.0}
    if gb is None:
        return found | {"failure": "the GPU's memory"}
    return found | {"peak_memory_bytes": gb * 1e9, "step_ms": ms}


def test_a_row_is_dominated_by_less_memory_and_less_time_of_the_same_step():
    rows = [
        row("none", 90, 100),
        row("mlp", 80, 110),
        row("layer", 70, 105),
        row("layer", 60, 90, size="4 x 2,048"),
    ]
    assert [frontier.better_in_both(each, rows) for each in rows] == ["", "baseline, layer", "", ""]
    rows.append(row("mlp", 50, 80, "all kernels"))
    assert frontier.better_in_both(rows[0], rows) == "all kernels, mlp"


def test_what_does_not_fit_has_its_estimate_alone(tmp_path):
    rows = [row("none"), row("mlp", 80, 110)]
    record = Workload(model="tiny").as_record() | {
        "environment": MADE_UP, "parameters": 1, "rows": rows,
    }  # fmt: skip
    (line,) = (line for line in frontier.render(record).splitlines() if " none " in line)
    assert line.count("n/a") == 2 and "more than the GPU's memory" in line and "10.0" in line
    frontier.plot(json.loads(json.dumps(record)), str(tmp_path / "frontier.png"))
    assert (tmp_path / "frontier.png").stat().st_size > 0


def test_all_rows_are_tried_those_of_a_kernel_set_in_a_row(monkeypatch, small_model, recorded):
    """On a CPU all but the two smallest steps are said not to fit: the interpreter is slow."""
    real, calls = stepping.timed_step, []

    def timed_step(model, optimizer, batches, *how):
        calls.append(len(batches))
        if not HAS_GPU and len(calls) > 4:
            raise OUT_OF_MEMORY[0]
        return real(model, optimizer, batches, *how)

    monkeypatch.setattr(stepping, "timed_step", timed_step)
    monkeypatch.setattr("harness.profiling.profiler.measure_ceilings", lambda dtype: {**RATES})
    monkeypatch.setattr(frontier, "FRONTIER_SIZES", {HAS_GPU: ((1, 8, 1), (2, 4, 1), (1, 4, 8))})
    record = recorded(frontier, "--model", "tiny")
    rows = record["rows"]
    names = [tuple(row[key] for key in ("size", "kernels", "recompute")) for row in rows]
    assert len(names) == len({*names}) == 30
    assert [kernels for _, kernels, _ in names] == ["baseline"] * 15 + ["all kernels"] * 15
    assert {size for size, _, _ in names} == {"1 x 8", "2 x 4", "8 x (1 x 4)"}
    assert rows[0]["step_ms"] > 0 and rows[0]["peak_memory_bytes"] > 0
    assert HAS_GPU or [row.get("failure") for row in rows[1:]] == ["the GPU's memory"] * 29
    assert all(row["estimated_bytes"] > 0 and row["estimated_ms"] > 0 for row in rows)
    assert frontier.render(record) in record["printed"]


# ---------------------------------------------------------------- the longest sequence


def test_the_longest_sequence_from_a_record():
    record = Workload(model="tiny", kernels=("rmsnorm", "adamw")).as_record() | {
        "environment": MADE_UP, "parameters": 1234,
        "lengths": [1024, 2048], "peaks": [1, 2],
        "length_step": 1024, "stopped_by": "the GPU's memory",
    }  # fmt: skip
    text = frontier.render_longest(record)
    assert "Longest sequence that fits, batch 1: 2,048 tokens (in steps of 1,024" in text
    assert "stopped by the GPU's memory" in text and "custom kernels: rmsnorm, adamw" in text
    nothing = frontier.render_longest(record | {"lengths": [], "first_length": 4096, "kernels": []})
    assert "less than 4,096 tokens" in nothing and "custom kernels: none" in nothing


@pytest.mark.exhaustive
def test_the_longest_sequence_is_limited_by_the_models_positions(
    monkeypatch, recorded, small_model
):
    """12 of them.  The search begins at the next multiple of 4."""
    monkeypatch.setitem(frontier.LENGTH_STEP, HAS_GPU, 4)
    flags = "rmsnorm,adamw", "--seq-len", "6", "--recompute", "layer"
    record = recorded(frontier, *LONGEST, *flags)
    assert record["lengths"] == [8, 12] and len(record["peaks"]) == 2
    assert record["kernels"] == ["rmsnorm", "adamw"]
    assert record["stopped_by"] == "the model's positions"
    printed = record["printed"]
    assert "12 tokens (in steps of 4; stopped by the model's positions)" in printed
    assert "custom kernels: rmsnorm, adamw, recompute layer" in printed
    speed = "tokens/s, " if HAS_GPU else "A step of it: "
    assert f"{speed}limited by matrix products with weights: attention has" in printed
    assert frontier.render_longest(record) in printed


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB."),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    HostMemoryError("--offload needs 5 GB of the host's memory and more, and may take 4"),
]


@pytest.fixture
def longest_until(monkeypatch, recorded, small_model):
    """longest_until(error, length): the record of a search in which that length fails."""
    real = stepping.timed_step

    def search(error: Exception, fails_at: int) -> dict:
        def timed_step(model, optimizer, batches, *how):
            if batches[0].input_ids.shape[1] == fails_at:
                raise error
            return real(model, optimizer, batches, *how)

        monkeypatch.setitem(frontier.LENGTH_STEP, HAS_GPU, 4)
        monkeypatch.setattr(stepping, "timed_step", timed_step)
        return recorded(frontier, *LONGEST, "none", "--seq-len", "4")

    return search


@pytest.mark.parametrize("error", OUT_OF_MEMORY[1:], ids=["Triton", "cuBLAS", "host"])
def test_the_longest_sequence_is_limited_by_memory(error, longest_until):
    record = longest_until(error, 12)
    whose = "host" if isinstance(error, HostMemoryError) else "GPU"
    assert f"8 tokens (in steps of 4; stopped by the {whose}'s memory)" in record["printed"]
    assert record["lengths"] == [4, 8]


def test_not_even_the_shortest_sequence_fits(longest_until):
    assert "less than 4 tokens" in longest_until(OUT_OF_MEMORY[0], 4)["printed"]


def test_another_failure_is_not_called_a_lack_of_memory(longest_until):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        longest_until(RuntimeError("shapes cannot be multiplied"), 8)


@pytest.mark.parametrize("longest_that_fits", [4, 8, 20, 36, 60, 64])
def test_the_search_ends_at_the_longest_that_fits(longest_that_fits):
    fitting, too_long, bisect, tried = None, 68, False, 0
    length = 4
    while length is not None:
        tried += 1
        assert length % 4 == 0 and (fitting or 0) < length < too_long
        if length <= longest_that_fits:
            fitting = length
        else:
            too_long, bisect = length, True
        length = frontier.next_length(fitting, too_long, bisect, 4)
    assert fitting == longest_that_fits and tried <= 9


def test_attention_limits_the_models_whole_context():
    config = architecture.llama_3_1_8b_config()
    # 6 x 32 x 4,096 x T of that and 6 x 7.5e9
    assert frontier.attention_share(config, Workload(), 131_072) == pytest.approx(0.696, abs=1e-3)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kernels", "all"], "--kernels is for --longest: add it"),
        (["--longest", "--plot", "x.png"], "--plot draws memory against time"),
    ],
)
def test_flags_of_the_other_question_are_refused(run_script, flags, said):
    outcome = run_script(frontier, *flags)
    assert outcome.code == 2 and said in outcome.err
