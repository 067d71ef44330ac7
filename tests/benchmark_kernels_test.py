"""Tests of the benchmark: what it prints, what it records, and what it refuses to time."""

import ast
import copy
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import benchmark_kernels as bench
from cross_entropy_kernel import TritonCrossEntropyLoss
from harness.benchmark import benchmark_picture, benchmark_specs, benchmark_tables, benchmarking
from harness.benchmark.benchmark_specs import (
    COMPILED,
    EAGER,
    HOST_FLOOR,
    IN_PLACE,
    ONE_TILE,
    OURS,
    PLAIN_FORM,
    SPECS,
    TWO_KERNELS,
)
from harness.benchmark.benchmark_tables import render, sections_of
from harness.benchmark.benchmarking import (
    Implementation,
    check_ours,
    gradient_errors,
    measure_times,
)
from harness.cli import command_line, tables
from harness.cli.device import DEVICE, HAS_GPU
from harness.profiling.kernel_facts import PLAYBOOK_KERNELS
from harness.steps import timing
from next_steps.comparisons import benchmark_contenders as contenders
from next_steps.comparisons import benchmark_peers as peers
from next_steps.comparisons import benchmark_problems as problems
from next_steps.comparisons import sweep
from next_steps.comparisons.benchmark_contenders import CONTENDERS, implementations
from next_steps.comparisons.benchmark_problems import PROBLEMS
from next_steps.comparisons.benchmark_runs import benchmark_sizes, number_list
from next_steps.lessons.fp8_casts import swiglu_fp8_backward_reference, swiglu_fp8_reference
from next_steps.lessons.fp8_kernel import quantize_rows_reference
from next_steps.lessons.rope_kernel import rope_backward, rope_forward
from next_steps.lessons.swiglu_kernel import TritonSwiGLU
from tests.conftest import assert_refused
from tests.two_processes import made_once
from tests.warm_processes import torchrun

SCRIPT = Path(bench.__file__)
TIMES = ["Tokens", "Custom (us)", "PyTorch (us)"]
PLAYBOOK_RMSNORM = [*TIMES, "Custom (GB/s)", "PyTorch (GB/s)", "Speedup"]
PLAYBOOK_CROSS_ENTROPY = [*TIMES, "Speedup", "Custom Mem (MB)", "PyTorch Mem (MB)"]
PLAYBOOK_CROSS_ENTROPY += ["Mem Reduction"]
EVERY = ["Tokens", "Implementation", "Forward", "Backward", "Total p20 / p50 / p80"]
EVERY += ["Queued", "Alone", "GB/s", "% of copy", "Extra MB"]
OF_COMPUTE = [*EVERY[:7], "TFLOP/s", "% of matmul", "Extra MB"]


def run(*flags: str) -> subprocess.CompletedProcess:
    """The script as a user runs it; one thread, because the other tests run beside it."""
    return torchrun(1, str(SCRIPT), *flags)


SMALL = {"--tokens": "2,4", "--hidden": "64", "--vocab": "100"}


def run_small(folder: Path) -> None:
    """A small run of each kernel, some side by side: a GPU's compilers take minutes for all."""

    def run_one(kernel: str) -> None:
        spec = SPECS[kernel]
        takes = {f"--{each.flag}" for each in spec.dimensions}
        takes |= {"--tokens"} if spec.rows == "Tokens" else set()
        sizes = {flag: size for flag, size in SMALL.items() if flag in takes}
        files = {"--json": f"{folder}/{kernel}.json"}
        files |= {"--plot": f"{folder}/{kernel}.png"} if kernel == "rmsnorm" else {}
        result = run("--kernel", kernel, *chain(*(sizes | files).items()))
        assert result.returncode == 0, result.stderr
        (folder / f"{kernel}.txt").write_text(result.stdout)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run_one, SPECS))


def record_of(folder: Path, kernel: str) -> dict:
    return json.loads((folder / f"{kernel}.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(what is printed on a GPU of the small runs, a record of all that they measured, the folder
    of these and of what they printed here).
    """
    folder = made_once(run_small, tmp_path_factory)
    records = [record_of(folder, kernel) for kernel in SPECS]
    sections = [section for record in records for section in record["sections"]]
    absent = [sentence for record in records for sentence in record["absent"]]
    record = records[0] | {"sections": sections, "absent": absent}
    return render(as_on_a_gpu(record)), record, folder


def as_on_a_gpu(record: dict) -> dict:
    return record | {"environment": record["environment"] | {"gpu": "NVIDIA Test"}}


def columns(line: str) -> list[str]:
    """The headers of a table, which are at least two spaces apart."""
    return [part.strip() for part in line.split("  ") if part.strip()]


@pytest.mark.exhaustive
@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_errors_are_printed_and_no_times(finished, tmp_path, capsys):
    for kernel, spec in SPECS.items():
        printed = (finished[2] / f"{kernel}.txt").read_text()
        assert printed.startswith(tables.NO_GPU_NOTE)
        assert f"{spec.title}: every implementation" in printed and f"  {OURS}  " in printed
        assert all(f"Error {part}" in printed for part in spec.errors)
        assert not re.search(r"GB/s|FLOP/s|\(us\)|Total|Speedup|% of|Ceilings|n/a", printed)
    benchmark_picture.plot(finished[1], str(tmp_path / "x.png"))
    assert "not shown" in capsys.readouterr().out and not list(tmp_path.iterdir())


ONLINE_SOFTMAX = "Cross-Entropy Benchmark — Custom Triton (online softmax) vs. PyTorch"


@pytest.mark.parametrize(
    "title, lines_before_headers, headers",
    [
        ("RMSNorm Benchmark — Custom Triton vs. PyTorch Reference", 3, PLAYBOOK_RMSNORM),
        (ONLINE_SOFTMAX, 4, PLAYBOOK_CROSS_ENTROPY),
        *(
            (f"{title}: every implementation", n, [*headers, *(f"Error {part}" for part in parts)])
            for title, n, headers, *parts in (
                ("RMSNorm", 6, EVERY, "dx", "dW"),
                ("Cross-Entropy", 7, EVERY, "target", "other"),
                ("SwiGLU", 7, EVERY, "y", "dgate", "dup"),
                ("RoPE", 8, EVERY, "rotated", "gradient"),
                ("Linear + Cross-Entropy", 7, OF_COMPUTE, "dhidden", "dW target", "dW other"),
                ("Reverse KL", 8, EVERY, "probable", "other"),
            )
        ),
    ],
)
def test_table_has_its_title_and_columns_and_both_sizes(
    finished, title, lines_before_headers, headers
):
    lines = finished[0].splitlines()
    at = lines.index(title)
    assert lines[at - 1] == lines[at + 1] == tables.RULE
    first = at + 2 + lines_before_headers
    body = lines[first:]
    body = body[: next((i for i, line in enumerate(body) if line == tables.RULE), len(body))]
    found = [columns(line) for line, below in itertools.pairwise(body) if below.startswith("---")]
    key, further = found[0], found[1:]  # a wide table goes on below, with its first columns
    assert key + [header for each in further for header in each[2:]] == headers
    assert {line.split()[0] for line in body if line[:8].strip().isdigit()} == {"2", "4"}


def test_vocabulary_is_called_llamas_only_if_it_is(finished):
    assert "Vocabulary size: 100\n" in finished[0]
    record = json.loads(json.dumps(finished[1]))
    record["sections"][1]["size"] = 128_256
    assert "Vocabulary size: 128,256 (LLaMA 3.1)\n" in render(as_on_a_gpu(record))


def test_printed_text_is_the_rendered_record_and_rendering_changes_nothing(finished):
    folder = finished[2]
    for kernel in SPECS:
        printed, record = (folder / f"{kernel}.txt").read_text(), record_of(folder, kernel)
        for _ in range(2):
            assert printed.startswith(command_line.fitted(render(record)) + "\nRecord written to")
        assert record == record_of(folder, kernel)


def test_host_time_is_measured_for_every_implementation(finished):
    stdout, record, _ = finished
    rows = [row for section in record["sections"] for row in section["rows"]]
    assert {HOST_FLOOR, OURS, IN_PLACE} <= {row["implementation"] for row in rows}
    assert all(row["host_us"] > 0 for row in rows)
    said = stdout.count("Queued: calls queued back to back; Alone: the kernels in a CUDA graph")
    assert said == len(record["sections"]) == len(SPECS)


def row_of(text: str, implementation: str) -> list[str]:
    """The cells of its first row in a printed table."""
    return columns(next(line for line in text.splitlines() if f"  {implementation}  " in line))


def test_queued_calls_are_timed_together_and_divided(monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(timing, "HAS_GPU", True)
    monkeypatch.setattr(timing, "synchronize", lambda: clock.__setitem__(0, clock[0] + 100e-6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call():
        calls.append(1)
        clock[0] += 7e-6

    # 20 calls of 7 us; of the two waits of 100 us, only the one at the end counts
    assert timing.queued_time_us(call) == pytest.approx(7 + 100 / 20)
    assert len(calls) == 1 + 5 * 20


# ---------------------------------------------------------------- the first call


@pytest.mark.exhaustive
def test_first_call_is_timed_in_a_new_process_with_an_empty_cache(monkeypatch):
    caches, run_process = [], subprocess.run

    def recorded(*args, **kwargs):
        folder = Path(kwargs["env"]["TRITON_CACHE_DIR"])
        caches.append((folder, list(folder.iterdir())))
        return run_process(*args, **kwargs)

    monkeypatch.setattr(bench.subprocess, "run", recorded)
    absent = []
    seconds = bench.first_call_seconds("rmsnorm", 64, "bf16", absent)
    assert 0 < seconds < 60 and not absent
    ((folder, contents),) = caches
    assert contents == [] and not folder.exists()


@pytest.mark.parametrize(
    "code, stderr, said",
    [
        (1, "Traceback\nRuntimeError: all GPUs are busy\n", "RuntimeError: all GPUs are busy"),
        (-9, "", "exit code -9"),
    ],
)
def test_failed_process_costs_a_sentence_not_the_benchmark(code, stderr, said, monkeypatch):
    stopped = subprocess.CompletedProcess([], code, "", stderr)
    monkeypatch.setattr(bench.subprocess, "run", lambda *args, **kwargs: stopped)
    absent = []
    assert bench.first_call_seconds("rmsnorm", 64, "bf16", absent) is None
    assert absent == [f"first call: its process failed ({said})"]


def test_first_call_is_printed_in_seconds(finished):
    record = copy.deepcopy(finished[1])
    record["sections"][0]["first_call_seconds"] = 1.94
    assert "\nFirst call (compilation): 1.9 s\n" in render(as_on_a_gpu(record))


# ---------------------------------------------------------------- several sizes


def with_sizes(record: dict, kernel: str, *sizes: int) -> dict:
    """The record, as of a GPU, with these sizes of the kernel and with torch.compile."""
    record = copy.deepcopy(record)
    record["environment"]["gpu"], record["copy_gbs"] = "NVIDIA Test", 4000.0
    (section,) = sections_of(record, kernel)
    ours = [row for row in section["rows"] if row["implementation"] in (OURS, IN_PLACE)]
    compiled = [row | {"implementation": COMPILED} for row in ours if row["implementation"] == OURS]
    for row in ours:
        row |= {"total_us": [10.0, 100.0, 200.0], "kernels_us": 80.0}
        row["gbs"] = 3000.0 if row["implementation"] == OURS else 3600.0
    for row in compiled:
        row |= {"total_us": [10.0, 123.0, 200.0], "kernels_us": 120.0}
    section["rows"] = ours + compiled
    record["sections"] = [section | {"size": size} for size in sizes]
    return record


def test_several_sizes_end_in_one_summary(finished):
    summary = render(with_sizes(finished[1], "rmsnorm", 64, 4096)).split(tables.RULE)[-1]
    lines = [columns(line) for line in summary.splitlines()]
    compiled = "torch.compile (us)", "torch.compile / ours", "alone"
    assert ["Hidden", "Tokens", "ours (us)", "% of copy", *compiled] in lines
    for cells in (["64", "2"], ["64", "4"], ["4,096", "2"], ["4,096", "4"]):
        assert [*cells, "100.0", "75", "123.0", "1.23x", "1.50x"] in lines


def test_summary_of_cross_entropy_has_in_place_too(finished):
    summary = render(with_sizes(finished[1], "cross_entropy", 100, 128_256)).split(tables.RULE)[-1]
    lines = [columns(line) for line in summary.splitlines()]
    assert ["128,256", "4", "100.0", "75", "100.0", "90", "123.0"] in lines
    assert ["128,256", "4", "1.23x", "1.50x"] in lines


def test_one_size_has_no_summary_and_several_name_theirs(finished):
    one, two = (render(with_sizes(finished[1], "rmsnorm", *sizes)) for sizes in ([64], [64, 128]))
    assert "all sizes" not in one and "Hidden size" not in one
    assert "Hidden size: 64\n" in two and "Hidden size: 128\n" in two


@pytest.mark.exhaustive
def test_plot_has_room_for_every_size(finished, tmp_path):
    benchmark_picture.plot(as_on_a_gpu(finished[1]), str(tmp_path / "of all kernels.png"))
    record, heights = with_sizes(finished[1], "rmsnorm", 64, 128), []
    for n_sizes in (1, 2):
        path = tmp_path / f"{n_sizes}.png"
        benchmark_picture.plot(record | {"sections": record["sections"][:n_sizes]}, str(path))
        heights.append(int.from_bytes(path.read_bytes()[20:24], "big"))
    assert heights[1] == 2 * heights[0]


def test_sizes_measured_at_one_number_of_tokens_are_one_row_of_the_plot(finished):
    record = with_sizes(finished[1], "reverse_kl", 32_768, 65_536)
    for section in record["sections"]:
        section["rows"] = [row | {"tokens": 4096} for row in section["rows"][:1]]
    ((kernel, title, along, points),) = benchmark_picture.panels(record)
    assert (kernel, title, along, [x for x, _ in points]) == (
        "reverse_kl", ", 4,096 tokens: ", "vocabulary", [32_768, 65_536],
    )  # fmt: skip
    record["sections"][0]["rows"][0]["tokens"] = 2
    panels = benchmark_picture.panels(record)
    shown = [(along, [x for x, _ in points]) for _, _, along, points in panels]
    assert shown == [("tokens", [2]), ("tokens", [4096])]


def test_plot_shows_both_clocks_in_the_same_unit():
    row = {"gbs": 100.0, "total_us": [9.0, 10.0, 11.0], "kernels_us": 4.0}
    clocks = benchmark_picture.clocks(row)
    assert clocks == {"kernels alone": 4.0, "host included": 10.0}
    rate = benchmark_specs.BANDWIDTH
    rates = [benchmark_picture.rate_at(rate, row, us) for us in clocks.values()]
    assert rates == [250.0, 100.0]
    not_captured = row | {"kernels_us": None}
    assert benchmark_picture.clocks(not_captured) == {"host included": 10.0}


@pytest.mark.parametrize(
    "text, numbers", [("4096", [4096]), ("8192,2048", [2048, 8192]), ("64,64", [64])]
)
def test_list_of_sizes_is_sorted_and_without_repetition(text, numbers):
    assert number_list(text) == numbers


@pytest.fixture
def rates(monkeypatch):
    """The GPU's rates take no time to measure."""
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1.0)
    monkeypatch.setattr(timing, "matmul_rates", lambda: {"matmul_tflops": 1.0})


@pytest.mark.usefixtures("rates")
def test_each_kernel_is_measured_at_each_of_its_sizes(finished, run_script, monkeypatch, tmp_path):
    asked = []

    def measured(kernel, tokens, size, dtype_name):
        asked.append((kernel, tokens, size, dtype_name))
        (section,) = sections_of(finished[1], kernel)
        return section | {"size": size}, ["QuACK: not installed"]

    monkeypatch.setattr(bench, "benchmark", measured)
    flags = ["--hidden", "4096,64", "--vocab", "100,8", "--tokens", "4,2", "--dtype", "fp32"]
    outcome = run_script(bench, *flags, "--json", str(tmp_path / "run.json"))
    assert outcome.code == 0, outcome.err
    hidden, vocabularies = (64, 4096), (8, 100)
    of_kernel = {kernel: hidden for kernel in SPECS if kernel != "adamw8"}
    of_kernel |= {"cross_entropy": vocabularies, "reverse_kl": vocabularies, "nf4": ((),)}
    of_kernel |= {"rope": (40 * 128,), "qk_norm_rope": (40 * 128,), "adamw": ((),)}
    of_kernel["linear_cross_entropy"] = tuple(itertools.product(hidden, vocabularies))
    sizes = [(kernel, size) for kernel, each in of_kernel.items() for size in each]
    tokens = {name: SPECS[name].tokens(HAS_GPU) for name in ("adamw", "nf4")}
    assert asked == [(kernel, tokens.get(kernel, [2, 4]), size, "fp32") for kernel, size in sizes]
    record = json.loads((tmp_path / "run.json").read_text())
    found = [[s["kernel"], s["size"]] for s in record["sections"]]
    assert found == json.loads(json.dumps(sizes))
    refused = "adamw8 is measured in bf16, not in fp32: PyTorch has no 8-bit moments"
    assert record["absent"] == [refused, "QuACK: not installed"]
    several = [each for each in of_kernel.values() if len(each) > 1]
    assert benchmark_tables.render(as_on_a_gpu(record)).count("all sizes") == len(several)


def test_kernel_may_have_several_sizes_unless_told(monkeypatch):
    dimension = benchmark_specs.Dimension("v", (30, 60), (5,), "vocab")
    monkeypatch.setitem(SPECS, "two", SimpleNamespace(dimensions=(dimension,)))
    assert benchmark_sizes("two", SimpleNamespace(vocab=None), on_gpu=True) == [30, 60]
    assert benchmark_sizes("two", SimpleNamespace(vocab=None), on_gpu=False) == [5]
    assert benchmark_sizes("two", SimpleNamespace(vocab=[7]), on_gpu=True) == [7]
    assert benchmark_sizes("cross_entropy", SimpleNamespace(vocab=None), on_gpu=True) == [128_256]


@pytest.mark.usefixtures("rates")
def test_all_kernels_leave_out_what_the_dtype_forbids_and_say_so(run_script, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "benchmark", lambda kernel, *_: (asked.append(kernel) or {}, []))
    monkeypatch.setattr(bench, "render", lambda record: "; ".join(record["absent"]))
    outcome = run_script(bench, "--dtype", "fp16")
    assert outcome.code == 0 and "adamw is not measured in fp16" in outcome.out
    assert "adamw8 is measured in bf16, not in fp16" in outcome.out
    kernels = [kernel for kernel in SPECS if not kernel.startswith("adamw")]
    assert list(dict.fromkeys(asked)) == kernels  # each at some sizes


# ---------------------------------------------------------------- what is printed besides


def test_plot_is_a_picture(finished, tmp_path):
    benchmark_picture.plot(as_on_a_gpu(record_of(finished[2], "rmsnorm")), str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_absent_opponents_are_named(finished):
    for name, (_, module, *_) in peers.LIBRARIES.items():
        if not HAS_GPU or importlib.util.find_spec(module) is None:
            assert f"{name}: " in finished[0]


def test_an_optimizer_that_loads_no_floats_begins_with_the_problems_state():
    filled = []

    def fill(state, given):
        filled.append((state["step"].item(), given["step"]))
        state["exp_avg"].copy_(given["exp_avg"])

    p = torch.ones(3)
    p.grad = torch.ones(3)
    optimizer = peers.optimizer_filled_by(torch.optim.AdamW, fill)([p])
    assert torch.equal(p, torch.ones(3)), "the step that makes the state is undone"
    optimizer.load_state_dict({"state": {0: {"step": 9, "exp_avg": torch.full((3,), 7.0)}}})
    assert filled == [(1.0, 9)] and (optimizer.state[p]["exp_avg"] == 7).all()


def test_flashoptims_rows_begin_with_the_problems_state(monkeypatch):
    package = pytest.importorskip("flashoptim")
    plain = {"quantize": False, "fused": False, "master_weight_bits": None}  # without a GPU
    adamw = package.FlashAdamW
    monkeypatch.setattr(package, "FlashAdamW", lambda params, **said: adamw(params, **said | plain))
    problem = problems.adamw_problem(512, (), torch.float32)
    for row in peers.flashoptim_adamw8():
        assert gradient_errors(problem, row)["update"] < 1e-4
        p, gradient, *moments = (t.clone() for t in problem.inputs)
        p.grad = gradient
        optimizer = row.function([p])
        assert torch.equal(p, problem.inputs[0])
        state = optimizer.state[p]
        state["error_bits"] = torch.ones_like(p)
        given = dict(zip(("step", "exp_avg", "exp_avg_sq"), (torch.tensor(9.0), *moments)))
        optimizer.load_state_dict({"state": {0: given}})
        assert not state["error_bits"].any() and state["step"] == 9


def test_trls_loss_of_hidden_states_is_the_loss():
    pytest.importorskip("trl")
    (theirs,) = peers.trl_linear_cross_entropy()
    inputs = [torch.randn(shape) for shape in ((6, 8), (20, 8))]
    targets = torch.randint(20, (6,))
    results = []
    for loss in (theirs.function, lambda x, w, t: F.cross_entropy(x @ w.t(), t)):
        leaves = [t.to(DEVICE).requires_grad_() for t in inputs]
        value = loss(*leaves, targets.to(DEVICE))
        results.append([value.detach(), *torch.autograd.grad(value, leaves)])
    torch.testing.assert_close(*results)


def test_each_call_of_a_row_in_triton_is_in_triton(monkeypatch):
    """All rows are timed in one process, where Liger-Kernel has one setting."""
    setting = []
    backends = SimpleNamespace(set_impl=lambda name: setting.append(name))
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.backends", backends)
    row = peers.in_triton(lambda x: setting[-1])
    for _ in range(2):
        assert row(0) == "nvidia-triton"
        setting.append("nvidia-cutedsl")


@pytest.mark.parametrize(
    "make, module, inside",
    [
        (peers.quack_linear_cross_entropy, "quack.linear_cross_entropy", ()),
        (
            peers.sm90_linear_cross_entropy,
            "liger_kernel.ops.cutedsl.ops",
            ("fused_linear_cross_entropy_sm90",),
        ),
    ],
)
def test_losses_of_hidden_states_get_the_arguments_that_they_take(
    make, module, inside, monkeypatch
):
    """The stand-ins have the order of arguments and the defaults of the libraries' functions."""

    def loss(x, weight, target, ignore_index=-100, reduction="mean", chunk_size=4096):
        return F.cross_entropy(x @ weight.mT, target, None, None, ignore_index, reduction=reduction)

    names = ("chunked_linear_cross_entropy", "liger_fused_linear_cross_entropy_sm90")
    stand_in = SimpleNamespace(**dict.fromkeys(names, loss))
    for name in inside:
        stand_in = SimpleNamespace(**{name: stand_in})
    monkeypatch.setitem(sys.modules, module, stand_in)
    (row,) = make()
    hidden, weight, targets = torch.randn(6, 8), torch.randn(20, 8), torch.randint(20, (6,))
    expected = F.cross_entropy(hidden @ weight.t(), targets)
    assert torch.equal(row.function(hidden, weight, targets), expected)
    assert not row.waits, "a CUDA graph can record it"


WORK = {  # bytes that must be moved for a row of the input, or FLOP
    "rmsnorm": 5 * 64 * 2,
    "cross_entropy": 3 * 100 * 2,
    "swiglu": 8 * 64 * 2,
    "rope": 2 * 2 * (32 + 8) * 128 * 2,
    "qk_norm_rope": 5 * (32 + 8) * 128 * 2,
    "adamw": 14,
    "adamw8": 10 + 2 * 2 * 4 / 256,
    "linear_cross_entropy": 3 * 2 * 64 * 100,
    "reverse_kl": 3 * 100 * 2,
    "nf4": 2 + 1 / 2 + 1 / 64 + 1 / 4096,
    "fp8": 3 * 64,
    "fp8_casts": (5 * 2 + 4) * 64,
}


def test_work_is_counted_by_one_formula_for_all(finished):
    assert [section["kernel"] for section in finished[1]["sections"]] == list(WORK)
    for section in finished[1]["sections"]:
        of_compute = section["kernel"] == "linear_cross_entropy"
        rate, per_us = ("tflops", 1e6) if of_compute else ("gbs", 1e3)
        for row in section["rows"]:
            work = WORK[section["kernel"]] * row["tokens"]
            expected = pytest.approx(work / row["total_us"][1] / per_us)
            assert row[rate] == (None if row["implementation"] == HOST_FLOOR else expected)


def test_products_are_judged_by_the_matmul_rate_and_bytes_by_the_copy_rate(finished):
    # Above what any row of the real run reaches: the best of all counts as the ceiling.
    record = finished[1] | {"copy_gbs": 40000.0, "matmul_tflops": 7000.0}
    sections = {section["kernel"]: section for section in record["sections"]}
    for kernel, row, share in (
        ("swiglu", {"gbs": 10000.0}, "25"),
        ("linear_cross_entropy", {"tflops": 6300.0}, "90"),
    ):
        assert benchmark_tables.share(record, sections[kernel], row) == share


def test_formula_of_each_rate_is_printed(finished):
    for formula in (
        "GB/s: 8 x tokens x columns x 2 bytes / total p50",
        "GB/s: 4 x tokens x columns x 2 bytes / total p50",
        "GB/s: 7 x parameters x 2 bytes / total p50",
        "GB/s: numbers x 2.516 bytes / total p50",
        "TFLOP/s: 6 FLOP x tokens x hidden x vocabulary / total p50",
    ):
        assert f"\n{formula}\n" in finished[0]


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--kernel", "softmax"], "softmax"),
        (["--tokens", "4,zero"], "zero"),
        (["--plot", "run.gif"], ".png"),
        (["--hidden", "40000"], "32,768"),
        (["--hidden", "64,40000"], "40000"),
        (["--hidden", "64,"], "--hidden"),
        (["--vocab", "100,none"], "--vocab"),
        (["--vocab", "0"], "--vocab"),
        (["--kernel", "adamw", "--tokens", "4"], "--tokens changes nothing for --kernel adamw"),
        (["--kernel", "rope", "--hidden", "64"], "--hidden changes nothing for --kernel rope"),
        (["--kernel", "swiglu", "--vocab", "64"], "--vocab changes nothing for --kernel swiglu"),
        (["--kernel", "adamw", "--dtype", "fp16"], "fp16"),
    ],
)
def test_bad_flag_is_one_sentence_and_exit_code_2(flags, said, run_script):
    assert_refused(run_script(bench, *flags), said)


@pytest.mark.parametrize("flags", [["--tokens", "2,4"], ["--kernel", "swiglu"]])
def test_a_sweep_takes_one_number_of_tokens_and_kernels_with_settings(flags, run_script):
    assert_refused(run_script(sweep, *flags), flags[1])


@pytest.mark.parametrize("error", [0.1, math.nan, math.inf])
def test_wrong_kernel_is_not_timed_and_an_accurate_one_is(error):
    errors = {EAGER: {"dx": 1e-3}, OURS: {"dx": error}}
    with pytest.raises(command_line.RunError, match=r"^ours.*dx"):
        check_ours(errors, torch.bfloat16, tokens=8)
    check_ours(errors | {OURS: {"dx": 1.5e-3}}, torch.bfloat16, tokens=8)


def test_opponents_failure_is_reported_and_ours_is_raised():
    absent = []
    with benchmarking.others_may_fail(Implementation("Liger-Kernel", torch.relu), "8 x 64", absent):
        raise torch.OutOfMemoryError("out of memory\ndetails")
    assert absent == ["Liger-Kernel: failed at 8 x 64 (OutOfMemoryError: out of memory)"]
    ours = Implementation(IN_PLACE, torch.relu)
    with pytest.raises(ValueError), benchmarking.others_may_fail(ours, "8 x 64", absent):
        raise ValueError


def on_a_gpu(kernel: str, monkeypatch, dtype: str = "bf16") -> tuple[dict, list]:
    """({name: implementation}, arguments of each compilation), as they would be on a GPU."""
    compiled = []

    def compile_function(*arguments):
        compiled.append(arguments)
        return arguments[0]

    monkeypatch.setattr(contenders, "HAS_GPU", True)
    monkeypatch.setattr(contenders, "compile_function", compile_function)
    return {each.name: each for each in implementations(kernel, dtype, [])}, compiled


@pytest.mark.parametrize("kernel", [*PLAYBOOK_KERNELS, "swiglu", "rope", "linear_cross_entropy"])
def test_on_a_gpu_pytorch_is_also_measured_compiled_and_the_playbooks_kernels(kernel, monkeypatch):
    found, compiled = on_a_gpu(kernel, monkeypatch)
    names = [EAGER, OURS] if kernel in PLAYBOOK_KERNELS else [EAGER]
    assert [function for function, *_ in compiled] == [found[name].function for name in names]
    assert found[COMPILED].function == found[EAGER].function
    if kernel in PLAYBOOK_KERNELS:
        assert list(found)[-2:] == ["ours under torch.compile", HOST_FLOOR]


@pytest.mark.parametrize("dtype, in_dtype", [("bf16", ["F.kl_div in bf16"]), ("fp32", [])])
def test_reverse_kl_is_measured_beside_its_remedies_and_what_they_mend(
    dtype, in_dtype, monkeypatch
):
    found, compiled = on_a_gpu("reverse_kl", monkeypatch, dtype)
    rows = ["F.kl_div in fp32", *in_dtype, ONE_TILE, COMPILED, OURS, TWO_KERNELS]
    assert [*found] == [*rows, HOST_FLOOR]
    # it may reuse memory, as it does for a user
    assert compiled == [(contenders.eager_reverse_kl, True)]
    again = {name: each.backward_again for name, each in found.items()}
    assert not again[COMPILED] and not again[OURS] and again[TWO_KERNELS]


@pytest.mark.parametrize("kernel", SPECS)
def test_every_implementation_has_a_line_in_the_plot(kernel, monkeypatch):
    found, _ = on_a_gpu(kernel, monkeypatch)
    libraries = [name for name, (_, _, makers) in peers.LIBRARIES.items() if kernel in makers]
    names = dict.fromkeys((*found, *libraries))
    styles = [benchmark_picture.line_style(name) for name in names]
    assert len({(style["color"], style["marker"]) for style in styles}) == len(styles)


SIZES = dict.fromkeys(("swiglu", "fp8", "fp8_casts"), 64)
SIZES |= {"cross_entropy": 50, "reverse_kl": 50, "linear_cross_entropy": (16, 50)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kernel", [k for k in SPECS if k not in ("rmsnorm", "cross_entropy", "adamw", "adamw8")]
)
def test_functions_that_are_compiled_are_one_graph(kernel):
    problem = PROBLEMS[kernel](64, SIZES.get(kernel, ()), torch.float32)
    eager = CONTENDERS[kernel]("fp32").pytorch[0]
    compiled = torch.compile(eager.function, fullgraph=True, dynamic=False, backend="aot_eager")
    errors = gradient_errors(problem, Implementation(COMPILED, compiled))
    assert max(errors.values()) < (2**-4 if kernel.startswith("fp8") else 1e-6)  # e4m3's step


def test_compiled_function_is_one_graph_or_an_error():
    def broken(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        contenders.compile_function(broken)(torch.ones(1))


# ---------------------------------------------------------------- what is judged


def targets_only(logits, targets):
    """A gradient of 0 off the targets, whose entries would hide that in one norm over both."""
    at_targets = F.one_hot(targets, logits.shape[-1]).bool()
    return F.cross_entropy(torch.where(at_targets, logits, logits.detach()), targets)


WRONG = {
    "cross_entropy": ("other", targets_only),
    "swiglu": ("dgate", lambda gate, up: torch.sigmoid(gate).detach() * gate * up),
    "rope": ("rotated", lambda q, k, cos, sin: (q, k)),
    "qk_norm_rope": ("dW", lambda q, k, q_weight, k_weight, *angles: (q * q_weight, k * k_weight)),
    "linear_cross_entropy": ("dW other", lambda h, w, t: -(h * w[t]).sum() / len(t)),
    "reverse_kl": (
        "other",
        lambda s, t: F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    ),
    "nf4": ("weight", lambda codes, *others: others[-1].flip(0)),
    "fp8": ("rows", lambda x: quantize_rows_reference(x.flip(1))),
    "fp8_casts": (
        "gradients",
        lambda dy, gate_up: (
            swiglu_fp8_reference(*gate_up.chunk(2, 1)),
            *swiglu_fp8_backward_reference(dy, *gate_up.flip(1).chunk(2, 1)),
        ),
    ),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("kernel", WRONG)
def test_wrong_result_is_found(kernel):
    rows = SPECS[kernel].cpu_tokens[0] if kernel == "nf4" else 6
    problem = PROBLEMS[kernel](rows, SIZES.get(kernel, ()), torch.float32)
    assert tuple(problem.exact) == SPECS[kernel].errors
    part, wrong = WRONG[kernel]
    assert gradient_errors(problem, Implementation("wrong", wrong))[part] > 0.1


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize(
    "kernel, name, vocab",
    [
        *(("cross_entropy", PLAIN_FORM, vocab) for vocab in (50, 9000)),  # a block, and two
        *(("reverse_kl", ONE_TILE, vocab) for vocab in (50, 33_000)),  # a tile, and two
    ],
)
def test_a_lessons_first_form_is_right_though_slow(kernel, name, vocab):
    problem = PROBLEMS[kernel](2, vocab, torch.float32)
    contenders = CONTENDERS[kernel]("fp32")
    found = {each.name: each for each in (*contenders.pytorch, *contenders.ours)}
    assert max(gradient_errors(problem, found[name]).values()) < 1e-5
    losses = [found[each].function(*problem.inputs) for each in (name, OURS)]
    torch.testing.assert_close(*losses)


@pytest.mark.exhaustive
def test_row_in_one_tile_takes_all_registers_and_more_and_the_remedies_do_not(tmp_path):
    """What its lesson and page say of a multiprocessor's 65,536 registers."""
    code = """
from tools.compile_cases import CASES, Case
from judging.pretended_gpu import compile_all
from next_steps.lessons.reverse_kl_kernel import ObviousReverseKLFunction
names = ["reverse KL, batchmean, V = 131,072", "reverse KL, none, V = 131,072"]
remedies = [
    Case(c.name, c.function, c.arguments, 1, ("bf16",)) for c in CASES["reverse_kl"] if c.name in
    names
]
arguments = lambda t: (t(8, 32_768), t(8, 32_768))
one_tile = Case("one tile", ObviousReverseKLFunction, arguments, 1, ("bf16",))
rows = compile_all([one_tile, *remedies], "sm_90")
print([(row.kernel, row.registers, row.spills) for row in rows])
"""
    env = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    how = {"env": env | {"TRITON_CACHE_DIR": str(tmp_path)}, "cwd": SCRIPT.parent}
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, capture_output=True, text=True, **how)
    assert child.returncode == 0, child.stderr
    (name, registers, spills), *remedies = ast.literal_eval(child.stdout.splitlines()[-1])
    assert name == "_obvious_kernel" and registers == 65_536 // 512 and spills > 0
    names = {f"_reverse_kl_{part}_kernel" for part in ("fwd", "bwd")}
    assert {kernel for kernel, *_ in remedies} == names
    for kernel, registers, spills in remedies:
        assert spills == 0 and registers <= (56 if "bwd" in kernel else 104), kernel


def test_step_without_bias_correction_is_found():
    """It changes the weights by a few percent of the step. Beside the weights that is little."""
    problem = PROBLEMS["adamw"](1000, (), torch.bfloat16)

    class Uncorrected(torch.optim.AdamW):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.state[self.param_groups[0]["params"][0]]["step"].fill_(1e6)

    wrong = Implementation("wrong", lambda p: Uncorrected(p, **problems.ADAMW))
    errors = gradient_errors(problem, wrong)
    right = gradient_errors(problem, implementations("adamw", "bf16", [])[0])
    assert errors["update"] > 0.1 > 2 * right["update"] + 5e-3


@pytest.mark.parametrize("kernel, size", [("linear_cross_entropy", (16, 50)), ("rmsnorm", 16)])
def test_exact_results_are_the_same_in_chunks(kernel, size):
    whole = PROBLEMS[kernel](7, size, torch.float32).exact
    in_chunks = PROBLEMS[kernel](7, size, torch.float32, chunk=3).exact
    for name, expected in whole.items():
        torch.testing.assert_close(in_chunks[name], expected[: len(in_chunks[name])])


@pytest.mark.parametrize("tokens, shape", [(8192, (4, 2048)), (6, (1, 6)), (3000, (2, 1500))])
def test_tokens_of_rope_are_as_few_sequences_as_possible(tokens, shape, monkeypatch):
    monkeypatch.setattr(problems, "Q_HEADS", 2)
    monkeypatch.setattr(problems, "K_HEADS", 1)
    q, k, cos, _ = PROBLEMS["rope"](tokens, 3 * 128, torch.bfloat16).inputs
    (B, T) = shape
    assert q.shape == (B, 2, T, 128) and k.shape == (B, 1, T, 128) and cos.shape == (1, T, 128)
    assert q.transpose(1, 2).is_contiguous() and k.transpose(1, 2).is_contiguous()


# ---------------------------------------------------------------- implementations that destroy
# their inputs


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("waits", [False, True], ids=["ours", "another"])
def test_overwritten_inputs_are_timed_as_they_are_and_judged_when_fresh(waits, monkeypatch):
    problem = PROBLEMS["cross_entropy"](4, 100, torch.float32)
    how = {"backward_again": False, "waits": waits}
    destroyer = Implementation(IN_PLACE, TritonCrossEntropyLoss(inplace=True), **how)
    before = problem.inputs[0].clone()
    errors = gradient_errors(problem, destroyer)
    assert max(errors.values()) < 1e-5
    measured = []

    def extra_bytes(fn):
        # A call finds the logits as the call before left them, so no refill is counted.
        measured.append([fn()[0].clone() for _ in range(2)])

    monkeypatch.setattr(timing, "peak_extra_bytes", extra_bytes)
    times = measure_times(problem, destroyer)
    ((first, second),) = measured
    assert not torch.equal(first, second)
    assert times["total_us"][1] > 0 and times["host_us"] > 0 and times["backward_us"] is None
    assert gradient_errors(problem, destroyer) == errors
    assert torch.equal(problem.inputs[0], before)


def rotates_in_place(q, k, cos, sin):
    """As Liger-Kernel: q and k are overwritten, and the gradients that come in."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k):
            return tuple(t.copy_(y) for t, y in zip((q, k), rope_forward(q, k, cos, sin)))

        @staticmethod
        def backward(ctx, dq, dk):
            return tuple(t.copy_(x) for t, x in zip((dq, dk), rope_backward(dq, dk, cos, sin)))

    return InPlace.apply(q, k)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize(
    "kernel, function", [("swiglu", TritonSwiGLU(inplace=True)), ("rope", rotates_in_place)]
)
def test_what_is_overwritten_is_a_copy_of_the_problem(kernel, function):
    """Also the upstream gradient: the implementations after it must be given the same one."""
    problem = PROBLEMS[kernel](3, SIZES.get(kernel, ()), torch.float32)
    tensors = [*problem.inputs, *problem.dy]
    before = [t.clone() for t in tensors]
    in_place = Implementation("another, in place", function, backward_again=False)
    assert max(gradient_errors(problem, in_place).values()) < 1e-5
    call = benchmarking.Call(problem, in_place)
    call.both()
    assert not any(map(torch.equal, call.copies[:2], problem.inputs[:2]))
    assert all(map(torch.equal, tensors, before))


def test_each_optimizer_begins_with_the_same_state(monkeypatch):
    problem = PROBLEMS["adamw"](1000, (), torch.float32)
    before = [t.clone() for t in problem.inputs]
    for implementation in implementations("adamw", "fp32", []):
        assert gradient_errors(problem, implementation)["update"] < 1e-4
        (state,) = benchmarking.OptimizerStep(problem, implementation).optimizer.state.values()
        assert float(state["step"]) == benchmarking.STEPS_DONE
    assert all(map(torch.equal, problem.inputs, before))
