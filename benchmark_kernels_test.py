"""Tests of the benchmark: what it prints, what it records, and what it refuses to time."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmark_kernels as bench
import measure
from checking import DEVICE, HAS_GPU

SCRIPT = Path(bench.__file__)
PLAYBOOK_RMSNORM = ["Tokens", "Custom (us)", "PyTorch (us)", "Custom (GB/s)", "PyTorch (GB/s)", "Speedup"]
PLAYBOOK_CROSS_ENTROPY = ["Tokens", "Custom (us)", "PyTorch (us)", "Speedup"]
PLAYBOOK_CROSS_ENTROPY += ["Custom Mem (MB)", "PyTorch Mem (MB)", "Mem Reduction"]
EVERY = ["Tokens", "Implementation", "Forward", "Backward", "Total p20 / p50 / p80", "Kernels only"]
EVERY += ["GB/s", "% of copy", "Extra MB"]


def run(*flags: str) -> subprocess.CompletedProcess:
    """The script as a user runs it; one thread, because the other tests run beside it."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, env=env)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(stdout, record, path of the plot) of a small run of everything."""
    folder = tmp_path_factory.mktemp("benchmark")
    sizes = ["--tokens", "2,4", "--hidden", "64", "--vocab", "100"]
    outputs = ["--json", str(folder / "run.json"), "--plot", str(folder / "run.png")]
    result = run(*sizes, *outputs)
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads((folder / "run.json").read_text()), folder / "run.png"


def columns(line: str) -> list[str]:
    """The headers of a table, which are at least two spaces apart."""
    return [part.strip() for part in line.split("  ") if part.strip()]


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_begins_with_the_warning_that_there_is_no_gpu(finished):
    assert finished[0].startswith(measure.NO_GPU_NOTE)


ONLINE_SOFTMAX = "Cross-Entropy Benchmark — Custom Triton (online softmax) vs. PyTorch"


@pytest.mark.parametrize(
    "title, lines_before_headers, headers",
    [
        ("RMSNorm Benchmark — Custom Triton vs. PyTorch Reference", 2, PLAYBOOK_RMSNORM),
        (ONLINE_SOFTMAX, 3, PLAYBOOK_CROSS_ENTROPY),
        ("RMSNorm: every implementation", 3, [*EVERY, "Error dx", "Error dW"]),
        ("Cross-Entropy: every implementation", 4, [*EVERY, "Error target", "Error other"]),
    ],
)
def test_table_has_its_title_and_columns_and_both_sizes(finished, title, lines_before_headers, headers):
    lines = finished[0].splitlines()
    at = lines.index(title + ("" if HAS_GPU else bench.NOT_MEANINGFUL))
    assert lines[at - 1] == lines[at + 1] == measure.RULE
    first = at + 2 + lines_before_headers
    assert columns(lines[first]) == headers
    body = lines[first + 2 :]
    body = body[: next((i for i, line in enumerate(body) if line == measure.RULE), len(body))]
    assert {line.split()[0] for line in body if line[:8].strip().isdigit()} == {"2", "4"}


def test_vocabulary_is_called_llamas_only_if_it_is(finished):
    assert "Vocabulary size: 100\n" in finished[0]
    record = json.loads(json.dumps(finished[1]))
    record["sections"][1]["size"] = 128_256
    assert "Vocabulary size: 128,256 (LLaMA 3.1)\n" in bench.render(record)


def test_printed_text_is_the_rendered_record(finished):
    stdout, record, _ = finished
    assert stdout.startswith(bench.render(record) + "\nRecord written to ")


def test_plot_is_a_picture(finished):
    assert finished[2].read_bytes().startswith(b"\x89PNG")


def test_absent_opponents_are_named(finished):
    for name, (_, module, _) in bench.PEERS.items():
        if not HAS_GPU or importlib.util.find_spec(module) is None:
            assert f"{name}: " in finished[0]


def test_bytes_are_counted_by_one_formula_for_all(finished):
    for section, bytes_per_element in zip(finished[1]["sections"], (5 * 2, 3 * 2)):
        for row in section["rows"]:
            if row["implementation"] == bench.HOST_FLOOR:
                assert row["gbs"] is None
            else:
                n_bytes = bytes_per_element * row["tokens"] * section["size"]
                assert row["gbs"] == pytest.approx(n_bytes / row["total_us"][1] / 1e3)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--kernel", "softmax"], "softmax"),
        (["--tokens", "4,zero"], "zero"),
        (["--plot", "run.gif"], ".png"),
        (["--hidden", "40000"], "32,768"),
        (["--json", "/proc/nowhere/run.json"], "cannot write"),
    ],
)
def test_bad_flag_is_one_sentence_and_exit_code_2(flags, said, run_script):
    outcome = run_script(bench, *flags)
    error = outcome.err
    assert outcome.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error


@pytest.mark.parametrize("error", [0.1, math.nan, math.inf])
def test_wrong_kernel_is_not_timed(error):
    errors = {bench.EAGER: {"dx": 1e-3}, bench.OURS: {"dx": error}}
    with pytest.raises(measure.RunError, match=r"^ours.*dx"):
        bench.check_ours(errors, torch.bfloat16, tokens=8)


def test_accurate_kernel_is_timed():
    bench.check_ours({bench.EAGER: {"dx": 1e-3}, bench.OURS: {"dx": 1.5e-3}}, torch.bfloat16, tokens=8)


def test_gradient_that_is_zero_off_the_targets_is_found():
    """Over the whole tensor it would be nearly right: the targets' entries carry the norm."""
    problem = bench.cross_entropy_problem(4, 100, torch.float32)

    class TargetsOnly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, targets):
            ctx.save_for_backward(logits, targets)
            return torch.nn.functional.cross_entropy(logits, targets)

        @staticmethod
        def backward(ctx, grad_output):
            logits, targets = ctx.saved_tensors
            one_hot = torch.nn.functional.one_hot(targets, logits.shape[-1])
            return one_hot * (torch.softmax(logits, -1) - one_hot) * grad_output / len(targets), None

    errors = bench.gradient_errors(problem, bench.Implementation("wrong", TargetsOnly.apply))
    assert errors["target"] < 1e-6 < 0.9 < errors["other"]


def test_opponents_failure_is_reported_and_ours_is_raised():
    absent = []
    with bench.others_may_fail(bench.Implementation("Liger-Kernel", torch.relu), 8, absent):
        raise torch.OutOfMemoryError("out of memory\ndetails")
    assert absent == ["Liger-Kernel: failed at 8 tokens (OutOfMemoryError: out of memory)"]
    ours = bench.Implementation(f"{bench.OURS}, in place", torch.relu)
    with pytest.raises(ValueError), bench.others_may_fail(ours, 8, absent):
        raise ValueError


def test_in_place_runs_again_and_leaves_the_problem_unchanged():
    """Each implementation must begin from the same inputs, also after one that destroys its own."""
    problem = bench.cross_entropy_problem(4, 100, torch.float32)
    before = problem.inputs[0].clone()
    in_place = bench.Implementation(bench.OURS, bench.TritonCrossEntropyLoss(inplace=True))
    call = bench.Call(problem, in_place)
    (dlogits,) = call.both()
    assert dlogits.data_ptr() == call.copies[0].data_ptr()
    for again in (call.both, call.from_new_graph):
        assert again()[0].isfinite().all()
    assert torch.equal(problem.inputs[0], before)
    assert problem.inputs[0].device.type == DEVICE
