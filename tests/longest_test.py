"""The longest sequence is where the memory or the model ends, and nothing else is called that."""

import pytest
import torch

from harness.cli.device import HAS_GPU
from harness.cli.workload import Workload
from harness.model import architecture
from harness.records import run_records
from harness.steps import stepping
from next_steps.studies import frontier
from tests.small_workloads import MADE_UP

# a dozen rows are all that Triton's interpreter gets through in a tenth of a second
TINY = ["--model", "tiny", "--dtype", "fp32"]
LONGEST = [*TINY, "--longest", "--kernels"]


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
    monkeypatch, tmp_path, run_script, small_model
):
    monkeypatch.setitem(frontier.LENGTH_STEP, HAS_GPU, 4)
    path = tmp_path / "longest.json"
    flags = "rmsnorm,adamw", "--seq-len", "6", "--json", str(path)
    outcome = run_script(frontier, *LONGEST, *flags)
    assert outcome.code == 0, outcome.err
    record = run_records.read_record(str(path), "longest")
    # from the next multiple of 4 on
    assert record["lengths"] == [8, 12] and len(record["peaks"]) == 2
    assert record["kernels"] == ["rmsnorm", "adamw"]
    assert record["stopped_by"] == "the model's positions"
    assert "12 tokens (in steps of 4; stopped by the model's positions)" in outcome.out
    assert frontier.render_longest(record) in outcome.out


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB."),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


def longest_until(error: Exception, fails_at: int, monkeypatch, run_script, *flags):
    monkeypatch.setitem(frontier.LENGTH_STEP, HAS_GPU, 4)
    real = stepping.timed_step

    def timed_step(model, optimizer, batches, *how):
        if batches[0].input_ids.shape[1] == fails_at:
            raise error
        return real(model, optimizer, batches, *how)

    monkeypatch.setattr(stepping, "timed_step", timed_step)
    return run_script(frontier, *LONGEST, "none", "--seq-len", "4", *flags)


@pytest.mark.parametrize("error", OUT_OF_MEMORY[1:], ids=["Triton", "cuBLAS"])
def test_the_longest_sequence_is_limited_by_memory(
    error, monkeypatch, tmp_path, run_script, small_model
):
    path = tmp_path / "longest.json"
    outcome = longest_until(error, 12, monkeypatch, run_script, "--json", str(path))
    assert outcome.code == 0
    assert "8 tokens (in steps of 4; stopped by the GPU's memory)" in outcome.out
    assert run_records.read_record(str(path), "longest")["lengths"] == [4, 8]


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


def test_the_step_of_the_longest_sequence_is_told(run_script, small_model, monkeypatch):
    monkeypatch.setitem(frontier.LENGTH_STEP, HAS_GPU, 4)
    flags = "none", "--seq-len", "6", "--recompute", "layer"
    outcome = run_script(frontier, *LONGEST, *flags)
    assert outcome.code == 0, outcome.err
    assert "custom kernels: recompute layer" in outcome.out
    assert "tokens/s, limited by matrix products with weights: attention has" in outcome.out


def test_attention_limits_the_models_whole_context():
    config = architecture.llama_3_1_8b_config()
    # 6 x 32 x 4,096 x T of that and 6 x 7.5e9
    assert frontier.attention_share(config, Workload(), 131_072) == pytest.approx(0.696, abs=1e-3)


def test_not_even_the_shortest_sequence_fits(monkeypatch, run_script, small_model):
    outcome = longest_until(OUT_OF_MEMORY[0], 4, monkeypatch, run_script)
    assert outcome.code == 0 and "less than 4 tokens" in outcome.out


def test_another_failure_is_not_called_a_lack_of_memory(monkeypatch, run_script, small_model):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        longest_until(RuntimeError("shapes cannot be multiplied"), 8, monkeypatch, run_script)
