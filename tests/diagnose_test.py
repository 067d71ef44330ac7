"""What an operation moves, what limits it, what could be gained: counted by hand, and from real and recorded steps."""

import argparse
import copy
import importlib
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity, profile

import profile_baseline
from harness import architecture, command_line, dataset, diagnose, loading, run_records, stepping, tables
from harness.device import DEVICE
from harness.diagnose import NOTHING, OTHER, RUNG_OF_CATEGORY, RUNGS, Cost, Sizes
from harness.workload import finetune_parser
from tests.fixtures import needs_gpu

RESULTS = Path(__file__).parents[1] / "results"
SIZES = Sizes(weights=1000, stream=100, heads=60, inner=300, logits=400, layers=2, width=2)
BF16, FP32 = torch.bfloat16, torch.float32


def sizes_8b(batch_size: int, seq_len: int) -> Sizes:
    shape = argparse.Namespace(dtype="bf16", batch_size=batch_size, seq_len=seq_len)
    return diagnose.sizes_of(architecture.llama_3_1_8b_config(), shape)


# ---------------------------------------------------------------- bytes and FLOPs of an operation


def counted(tmp_path: Path, function) -> dict[str, Cost]:
    """Name -> cost of the operations that function() calls, through the profiler and its trace."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    costs = diagnose.costs_of_trace(trace, SIZES, seq_len=8)
    return {event.name: costs[event.id] for event in profiler.events() if event.id in costs}


def randn(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


MATRIX, OTHER_MATRIX, COLUMN = randn(6, 4), randn(4, 5), randn(6, 1)
NARROW, LIST = randn(6, 4, dtype=BF16), [randn(3, 2, dtype=BF16), randn(4, dtype=BF16)]
INDEX = torch.tensor([0, 2, 2])
OPERATIONS = {  # how it is called: the operation, bytes read + written by hand, FLOPs
    "mm": (lambda: MATRIX @ OTHER_MATRIX, "aten::mm", 4 * (24 + 20 + 30), 2 * 6 * 4 * 5),
    "mm into": (lambda: torch.mm(MATRIX, OTHER_MATRIX, out=torch.empty(6, 5)), "aten::mm", 4 * 74, 240),
    "addmm in place": (lambda: randn(6, 5).addmm_(MATRIX, OTHER_MATRIX), "aten::addmm_", 4 * 104, 240),
    "bmm": (lambda: randn(2, 6, 4).bmm(randn(2, 4, 5)), "aten::bmm", 2 * 4 * 74, 480),
    "same shapes": (lambda: MATRIX * MATRIX.clone(), "aten::mul", 4 * 3 * 24, 24),
    "a number": (lambda: MATRIX * 2.0, "aten::mul", 4 * (2 * 24) + 8, 24),
    "broadcast": (lambda: MATRIX + COLUMN, "aten::add", 4 * (24 + 6 + 24), 24),
    "a view that repeats": (lambda: MATRIX * COLUMN.expand(6, 4), "aten::mul", 4 * (24 + 6 + 24), 24),
    "two dtypes": (lambda: NARROW * MATRIX, "aten::mul", 24 * (2 + 4 + 4), 24),
    "in place": (lambda: randn(6, 4).add_(MATRIX), "aten::add_", 4 * 3 * 24, 24),
    "to another dtype": (lambda: MATRIX.to(BF16), "aten::copy_", 24 * (4 + 2), 0),
    "copy of a view that repeats": (lambda: COLUMN.expand(6, 4).contiguous(), "aten::copy_", 4 * (24 + 6), 0),
    "fill": (lambda: torch.full((6, 4), 1.0), "aten::fill_", 4 * 24, 0),
    "cat": (lambda: torch.cat(LIST[:1] * 2), "aten::cat", 2 * 2 * 12, 0),
    "sum over rows": (lambda: MATRIX.sum(0), "aten::sum", 4 * (24 + 4), 24),
    "sum of everything": (lambda: MATRIX.sum(), "aten::sum", 4 * (24 + 1), 24),
    "sum over the last": (lambda: MATRIX.sum(-1, keepdim=True), "aten::sum", 4 * (24 + 6), 24),
    "log_softmax": (lambda: MATRIX.log_softmax(-1), "aten::_log_softmax", 4 * 48, 24),
    "rows by their number": (
        lambda: torch.nn.functional.embedding(INDEX, MATRIX), "aten::index_select", 3 * 8 + 2 * 4 * 12, 0,
    ),
    "picked numbers": (
        lambda: torch.nn.functional.nll_loss(randn(3, 4), INDEX), "aten::nll_loss_forward", 3 * 8 + 2 * 4 * 3, 0,
    ),
    "list in place": (lambda: torch._foreach_mul_(list(LIST), 2.0), "aten::_foreach_mul_", 2 * 2 * 10, 10),
    "list": (lambda: torch._foreach_sqrt([t.abs() for t in LIST]), "aten::_foreach_sqrt", 2 * 2 * 10, 10),
    "two lists": (lambda: torch._foreach_lerp_(list(LIST), LIST, 0.1), "aten::_foreach_lerp_", 3 * 2 * 10, 10),
    "squares of a gradient": (
        lambda: torch._foreach_addcmul_(list(LIST), LIST, LIST, 0.1), "aten::_foreach_addcmul_", 3 * 2 * 10, 10,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_bytes_and_flops_of_an_operation(name, tmp_path):
    call, operation, n_bytes, flops = OPERATIONS[name]
    assert counted(tmp_path, call)[operation] == (n_bytes, flops)


def test_a_list_too_long_for_the_profiler_is_all_parameters(tmp_path):
    """PyTorch records no shapes of more than 30 tensors; LLaMA 3.1 8B's AdamW has lists of 291."""
    costs = counted(tmp_path, lambda: torch._foreach_mul_([randn(5, dtype=BF16) for _ in range(31)], 2.0))
    assert costs["aten::_foreach_mul_"] == (2 * SIZES.weights, SIZES.weights / SIZES.width)


def test_attention_counts_the_causal_half_and_five_products_backward(tmp_path):
    q, k, v = (randn(2, heads, 8, 16).requires_grad_() for heads in (4, 2, 2))

    def attend():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.backward(torch.randn_like(out))

    costs = counted(tmp_path, attend)
    forward, backward = (cost for name, cost in sorted(costs.items()) if diagnose.ATTENTION.match(name))
    product = 2 * (2 * 4) * 8 * 8 * 16 / 2  # of T x T scores with D columns, for every head of every sequence; half
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    large, small, per_row = 4 * q.numel(), 4 * k.numel(), 4 * 2 * 4 * 8
    assert forward.n_bytes == 2 * large + 2 * small  # q, k, v in, the result out
    assert backward.n_bytes == 3 * large + 2 * small + per_row + large + 2 * small  # and its gradients


@pytest.mark.parametrize("name", ["aten::view", "aten::empty", "aten::item", "aten::linear", "MulBackward0", "mul"])
def test_what_does_no_work_itself_costs_nothing(name):
    inputs = {"Input Dims": [[6, 4]], "Input Strides": [[4, 1]], "Input type": ["float"], "Concrete Inputs": [""]}
    assert diagnose.cost_of_call(name, inputs, SIZES, 8) == NOTHING
    assert diagnose.cost_of_call("aten::neg", inputs, SIZES, 8) == (2 * 96, 24)


def test_every_operation_that_takes_time_in_a_recorded_step_is_counted():
    counted = (
        diagnose.ELEMENTWISE | diagnose.REDUCTIONS | diagnose.FILLS | diagnose.PICKS | diagnose.ROW_PICKS
        | {"copy", "cat", *diagnose.MATMULS}
    )  # fmt: skip
    for path in sorted(RESULTS.glob("profile_*.json")):
        rows = [row for row in json.loads(path.read_text())["operations"] if row["name"].startswith("aten::")]
        total = sum(row["us"] for row in rows)
        unknown = [
            row["name"] for row in rows
            if row["us"] > 1e-4 * total and not diagnose.ATTENTION.match(row["name"])
            and row["name"].removeprefix("aten::").removeprefix("_foreach_").removesuffix("_") not in counted
        ]  # fmt: skip
        assert not unknown, path.name


# ---------------------------------------------------------------- bytes of our kernels


def test_every_kernel_of_ours_is_counted_or_moves_next_to_nothing():
    small = {"_rmsnorm_dw_kernel", "_scale_kernel", "_cross_entropy_scale_kernel"}  # by 1
    lessons = "linear_cross_entropy", "swiglu", "rope", "adamw"
    modules = "rmsnorm", "cross_entropy", *(f"next_steps.{lesson}" for lesson in lessons)
    names = {n for m in modules for n in vars(importlib.import_module(f"{m}_kernel")) if n.endswith("_kernel")}
    assert {name for name in names if diagnose.cost_of_kernel(name, 1, SIZES) is None} == small
    assert diagnose.cost_of_kernel("vectorized_elementwise_kernel", 1, SIZES) is None


LAUNCHES = {  # of a step with all kernels but the fused layer, whose norms compute their output once more
    "_rmsnorm_fwd_kernel": 2 * SIZES.layers, "_rmsnorm_bwd_kernel": 2 * SIZES.layers, "_rope_kernel": 2 * SIZES.layers,
    "_swiglu_fwd_kernel": SIZES.layers, "_swiglu_bwd_kernel": SIZES.layers, "_adamw_kernel": 17,
    "_cross_entropy_inplace_kernel": 3,
}  # fmt: skip


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung.category], ids=lambda rung: rung.name)
def test_what_our_kernels_move_is_what_is_necessary(rung):
    """The two counts have one source of truth: the passes of a category's kernels add up to its floor."""
    moved = sum(
        launches * diagnose.cost_of_kernel(name, launches, SIZES).n_bytes
        for name, launches in LAUNCHES.items()
        if profile_baseline.category_of_triton_kernel(name) == rung.category
    )
    assert moved == pytest.approx(rung.floor_bytes(SIZES))


# ---------------------------------------------------------------- a whole step


def test_bytes_and_flops_of_a_real_step(tmp_path, monkeypatch):
    """In bf16: the products as the model has them, 116 bytes a number and norm, 20 passes of AdamW.

    rmsnorm_kernel.py counts 128 bytes; 12 of them add gradients where two paths meet, which no layer owns.
    """
    config = architecture.tiny_config()
    config.hidden_size = 512  # so that what there is one of per row does not count
    monkeypatch.setattr(architecture, "tiny_config", lambda: config)
    monkeypatch.setattr(profile_baseline, "TIMED_STEPS", 1)
    flags = ["--model", "tiny", "--dtype", "bf16", "--seq-len", "32", "--warmup", "1"]
    args = profile_baseline.parse_args([*flags, "--trace", str(tmp_path / "trace.json")])
    record = profile_baseline.profile_training(args)
    parts, sizes = record["categories"], Sizes(**record["sizes"])
    products = architecture.flops_per_token(config, 32) - 6 * config.num_hidden_layers * 4 * config.head_dim * 32
    assert parts["matmul"]["flops"] == pytest.approx(32 * products, rel=1e-3)  # and the angles' small product
    numbers = 5 * 32 * 512
    assert parts["normalization"]["bytes"] == pytest.approx(116 * numbers, rel=0.03)
    assert parts["optimizer"]["bytes"] == pytest.approx(20 * sizes.weights, rel=0.01)
    assert parts["activation"]["bytes"] == pytest.approx(28 * 2 * 32 * 160, rel=0.01)  # swiglu_kernel.py
    heads = 2 * 4 * config.head_dim * 32 * 32  # the scores' columns, over both layers
    assert parts["attention"]["flops"] == pytest.approx(7 * heads, rel=1e-3)
    assert all(record["categories"][name]["bytes"] > 0 for name in ("rotary", "loss", OTHER))
    rows = record["operations"]
    for key in ("bytes", "flops"):
        assert sum(row[key] for row in rows) == pytest.approx(sum(part[key] for part in parts.values()))


# ---------------------------------------------------------------- hand-made records


def part(us: float, n_bytes: float = 0.0, flops: float = 0.0, launches: int = 1) -> dict:
    return {"us": us, "launches": launches, "bytes": n_bytes, "flops": flops}


def made_up(**categories: dict) -> dict:
    """A record on a GPU that copies 1,000 bytes and does 100,000 FLOPs in a microsecond, with steps of 1 ms."""
    env = {"gpu": "Made Up", "torch": "0", "triton": "0", "transformers": "0", "date": "-", "commit": "-"}
    rows = [{"name": f"aten::{name}", "calls": 1, **each} for name, each in categories.items()]
    return {
        "kind": "profile", "environment": env, "kernels": [], "model": "tiny", "parameters": 1, "dtype": "bf16",
        "weights": "random weights", "data": "stdlib", "batch_size": 1, "seq_len": 2, "device": "CUDA",
        "operations": rows, "categories": categories, "phases": {"other": {"us": 1.0, "launches": 1}},
        "busy_us": 900.0, "ceilings": {"copy_gbs": 1.0, "matmul_tflops": 0.1}, "sizes": asdict(SIZES),
        "timeline": {"step_ms": 1.01, "idle_us": 0.0, "synchronization_us": 0.0, "host_us": 0.0},
        "step_ms": [1.0], "median_step_ms": 1.0, "profiled_step_ms": 1.5, "resting_memory_bytes": 1e9,
        "peak_memory_bytes": 2e9, "trace": "x.json", "trace_bytes": 1_000_000,
    }  # fmt: skip


def waiting(record: dict, idle_us: float, synchronization_us: float = 0.0, host_us: float = 10.0) -> dict:
    idle = {"idle_us": idle_us, "synchronization_us": synchronization_us, "host_us": host_us}
    return record | {"timeline": {"step_ms": 1.01, **idle}}


def test_the_verdict_is_the_ceiling_that_takes_longer():
    record = made_up(
        matmul=part(100.0, n_bytes=20e3, flops=8e6), attention=part(100.0, n_bytes=60e3, flops=5e6),
        loss=part(100.0, n_bytes=50e3, flops=1e5),
    )  # fmt: skip
    matmul, attention, loss = diagnose.judge_categories(record).values()
    assert (matmul.verdict, attention.verdict, loss.verdict) == ("compute-bound", "bandwidth-bound", "bandwidth-bound")
    assert [f.share for f in (matmul, attention, loss)] == pytest.approx([0.8, 0.6, 0.5])
    assert diagnose.achieved(matmul) == "80.0 GFLOP/s" and diagnose.achieved(attention) == "0.6 GB/s"


@pytest.mark.parametrize(
    ("idle_us", "launches", "verdict"),
    [(100.0, 20, "launch-bound"), (100.0, 5, "bandwidth-bound"), (10.0, 20, "bandwidth-bound")],
    ids=["short kernels, the GPU waits", "long kernels", "the GPU does not wait"],
)
def test_short_kernels_are_launch_bound_where_the_gpu_waits(idle_us, launches, verdict):
    record = waiting(made_up(loss=part(100.0, n_bytes=50e3, launches=launches)), idle_us)
    assert diagnose.judge_categories(record)["loss"].verdict == verdict


def test_a_gain_is_the_time_beyond_what_is_necessary_at_90_percent():
    record = made_up(optimizer=part(100.0, n_bytes=80e3), matmul=part(100.0, n_bytes=1e3, flops=4.5e6))
    optimizer, matmul = diagnose.ranking(record)
    assert optimizer.necessary == 7 * 1000 and optimizer.target_us == pytest.approx(7 / 0.9)
    assert optimizer.gain_us == pytest.approx(100 - 7 / 0.9)
    assert matmul.necessary is None and matmul.gain_us == pytest.approx(100 - 45 / 0.9)
    text = diagnose.render(record)
    assert "Largest recoverable cost:  optimizer, 0.1 of 1.0 ms, bandwidth-bound: it moves 0.1 MB, 0.0 are" in text
    assert "What to do about it:       --kernels adamw" in text
    assert re.search(r"What it should gain: +at 90 % of the copy rate 0.0 ms instead of 0.1: step -9.2 % \(Amd", text)


def test_a_part_at_its_ceiling_has_nothing_to_gain():
    record = made_up(matmul=part(100.0, n_bytes=1e3, flops=9.5e6))
    assert diagnose.ranking(record) == []
    assert diagnose.render(record).endswith("no part of it could make the step 0.1 % shorter.")


def test_a_kernel_that_is_on_is_not_advised_again():
    record = made_up(optimizer=part(100.0, n_bytes=8e3)) | {"kernels": ["adamw"]}
    assert diagnose.ranking(record)[0].advice == "its kernel is on; benchmark_kernels.py --kernel adamw"


def test_idle_time_is_a_cost_of_its_own():
    record = waiting(made_up(optimizer=part(100.0, n_bytes=8e3)), 300.0, synchronization_us=120.0)
    record["busy_us"] = 700.0
    launches, synchronization, optimizer = diagnose.ranking(record)
    assert (launches.verdict, launches.gain_us) == ("launch-bound", 180.0)
    assert (synchronization.verdict, synchronization.gain_us) == ("host-synchronization", 120.0)
    assert optimizer.name == "optimizer"
    text = diagnose.render(record)
    assert "finetune_optimized.py --kernels all --cuda-graph" in diagnose.decision(record, [launches])[1]
    assert "0.0 ms instead of 0.2: step -18.0 %" in text and "about 9.9 us from one launch to the next" in text


def test_waiting_that_the_recording_adds_is_not_counted():
    record = waiting(made_up(optimizer=part(100.0, n_bytes=8e3)), 300.0, synchronization_us=120.0)
    record["timeline"]["step_ms"] = 1.25  # 1.00 unrecorded, in 0.90 of which the GPU is busy
    launches, synchronization = diagnose.judge_idle(record).values()
    assert (launches.us, synchronization.us) == pytest.approx((60.0, 40.0))
    assert diagnose.host_us(record) == pytest.approx(8.0)
    assert diagnose.idle_us(waiting(record, 30.0)) == 30.0  # gaps between kernels that were queued are the GPU's own


def test_every_kernel_is_known_to_replace_something():
    replaced = diagnose.replaced_by(profile_baseline.KERNELS)
    assert replaced == set(RUNG_OF_CATEGORY) <= set(profile_baseline.CATEGORIES)
    assert diagnose.replaced_by([]) == set()


def test_every_advised_flag_exists():
    known = {rung.name for rung in RUNGS}
    assert known <= set(profile_baseline.KERNELS)
    assert finetune_parser("").parse_args([]).steps
    for category, rung in RUNG_OF_CATEGORY.items():
        advice = diagnose.advice_for(category, {"kernels": []})
        assert advice == f"--kernels {rung.name}"
        assert profile_baseline.parse_args(advice.split()).kernels == [rung.name]


# ---------------------------------------------------------------- when the GPU waits


def event(name: str, start: float, end: float, number: int, on_gpu: bool = False) -> FunctionEvent:
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return FunctionEvent(number, name, 0, start, end, device_type=device, use_device="cuda")


def idle_of(*launches: tuple[float, float, float], waits: tuple[tuple[float, float], ...] = ()) -> dict:
    """idle_times of kernels, each (when its launch begins, when it begins, when it ends), a launch taking 2 us."""
    events = [event("cudaDeviceSynchronize", *times, 99) for times in waits]
    for number, (launched, start, end) in enumerate(launches, 1):
        events += [event("cudaLaunchKernel", launched, launched + 2, number), event("mul", start, end, number, True)]
    found = profile_baseline.idle_times(EventList(events, use_device="cuda"))
    return {key: found[key] for key in ("idle_us", "synchronization_us", "host_us")}


def test_a_queued_kernel_makes_nobody_wait():
    """The 1 us between two kernels is the GPU's own."""
    assert idle_of((0, 5, 20), (4, 21, 40), (8, 41, 50)) == {"idle_us": 0, "synchronization_us": 0, "host_us": 0}


def test_a_late_launch_is_idle_time_and_tells_the_hosts_pace():
    idle = idle_of((0, 5, 10), (12, 17, 20), (30, 35, 40), (33, 41, 60))
    assert idle == {"idle_us": 7 + 15, "synchronization_us": 0, "host_us": 15}  # 12 and 18 us


def test_idle_time_after_the_host_waited_is_synchronizations():
    """As .item() does: wait for the kernel, come back at 12, launch the next at 14."""
    idle = idle_of((0, 5, 10), (14, 19, 30), (34, 40, 50), waits=((3, 12), (52, 60)))
    assert idle == {"idle_us": 9 + 10, "synchronization_us": 9, "host_us": 20}


def test_the_wait_that_ends_the_timing_is_no_idle_time():
    assert idle_of((0, 5, 10), (3, 11, 30), waits=((0, 0), (6, 31)))["idle_us"] == 0


def test_kernels_that_overlap_leave_no_gap():
    assert idle_of((0, 5, 100), (50, 60, 70), (90, 95, 120))["idle_us"] == 0


# ---------------------------------------------------------------- recorded steps


def recorded(size: str, suffix: str = "") -> dict:
    """A recorded profile; one from before the diagnosis gets ceilings, and bytes at which matmuls and the like have
    nothing to gain, so that what the model's configuration says decides."""
    record = json.loads((RESULTS / f"profile_{size}{suffix}.json").read_text())
    if "ceilings" not in record:
        copy_gbs = json.loads((RESULTS / "benchmark_rmsnorm.json").read_text())["copy_gbs"]
        for row in record["categories"].values():
            row |= {"bytes": 1e3 * copy_gbs * row["us"], "flops": 0.0}
        record["ceilings"] = {"copy_gbs": copy_gbs, "matmul_tflops": 1e3}
        record["sizes"] = asdict(sizes_8b(record["batch_size"], record["seq_len"]))
        record["timeline"] = None
    return record


def test_the_8b_baseline_at_1_x_512_names_the_optimizer_first():
    record = recorded("1x512")
    findings = diagnose.ranking(record)
    assert findings[0].name == "optimizer"
    assert diagnose.decision(record, findings)[1].endswith("--kernels adamw")


def test_the_prediction_was_right_where_it_could_be_checked():
    """RMSNorm and cross-entropy at 4 x 2048, against the recorded re-profile."""
    before, after = recorded("4x2048"), recorded("4x2048", "_both")
    predicted = diagnose.predicted_gains(before, after)
    assert set(predicted) == {"normalization", "loss"}
    for name, gain_us in predicted.items():
        measured_us = before["categories"][name]["us"] - after["categories"][name]["us"]
        assert gain_us == pytest.approx(measured_us, rel=0.1), name


def test_the_ranking_at_4_x_2048_is_the_ladders():
    path = RESULTS / "ladder_4x2048.json"
    if not path.exists():
        pytest.skip("the ladder has not been recorded yet")
    ladder = json.loads(path.read_text())
    steps = {rung["name"]: rung["step_ms"] for rung in ladder["rungs"]}
    names = ["baseline", *(rung.name for rung in RUNGS)]
    measured = {
        rung.category: steps[before] - steps[rung.name] for before, rung in zip(names, RUNGS) if rung.category
    }  # fmt: skip
    record = recorded("4x2048")
    record["ceilings"]["copy_gbs"] = ladder["copy_gbs"]
    for name, ms in ladder["categories_ms"].items():
        record["categories"][name]["us"] = 1e3 * ms
    predicted = [f.name for f in diagnose.ranking(record) if f.name in measured]
    assert predicted == sorted(measured, key=measured.get, reverse=True)


def test_recording_kernels_alone_costs_a_recorded_step_less_than_a_tenth():
    """Where the GPU waits for the host it costs more, as much as the host is slow, and the record says how much."""
    for path in sorted(RESULTS.glob("profile_*.json")):
        record = json.loads(path.read_text())
        if record.get("timeline") and not diagnose.waits(record):
            assert record["timeline"]["step_ms"] < 1.1 * record["median_step_ms"], path.name


# ---------------------------------------------------------------- what is printed


def test_old_records_are_printed_without_a_diagnosis():
    old = json.loads((RESULTS / "profile_1x512.json").read_text())
    for key in ("ceilings", "sizes", "timeline"):
        old.pop(key, None)
    text = profile_baseline.render(old)
    assert "Diagnosis" not in text and "Step under the profiler:" in text


def test_the_profilers_own_cost_is_printed():
    text = profile_baseline.render(made_up(loss=part(900.0, n_bytes=5e5)))
    assert re.search(r"^Step without the profiler: +1.0 ms \(median of 1\)$", text, re.M)
    assert re.search(r"^Kernels recorded: +1.0 ms \(\+1.0 %\)$", text, re.M)
    assert re.search(r"^Shapes too: +1.5 ms \(\+50.0 %\)$", text, re.M)
    assert "GPU idle share:             10.0 %" in text and "Diagnosis\n" in text


def before_and_after() -> tuple[dict, dict]:
    before = made_up(optimizer=part(400.0, n_bytes=2e5), loss=part(100.0, n_bytes=5e4), matmul=part(300.0, 1e3, 2.9e7))
    after = copy.deepcopy(before) | {"kernels": ["adamw"], "median_step_ms": 0.65}
    after["categories"]["optimizer"] = part(10.0, n_bytes=7e3)
    after["operations"][0] = {"name": "_adamw_kernel", "calls": 1, **part(10.0, n_bytes=7e3)}
    return before, after


def cells(text: str, name: str) -> list[str]:
    """The columns of the row called `name`."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return re.split(r"  +", line.strip())


def test_a_comparison_has_the_prediction_beside_what_was_measured():
    text = diagnose.render_comparison(*before_and_after())
    assert cells(text, "optimizer")[:5] == ["optimizer", "0.400", "0.010", "0.390", "0.392"]  # 400 - 7 / 0.9
    assert cells(text, "loss")[:4] == ["loss", "0.100", "0.100", "0.000"] and "0.044" not in text
    assert cells(text, "Step") == ["Step", "1.000", "0.650", "0.350", "0.392"]
    assert "Went away: aten::optimizer 0.400 ms" in text
    assert "Came:      _adamw_kernel 0.010 ms" in text
    assert "custom kernels: adamw" in text


def test_old_profiles_are_compared_without_a_prediction():
    before, after = (json.loads((RESULTS / f"profile_4x2048{s}.json").read_text()) for s in ("", "_both"))
    for record in (before, after):
        record.pop("ceilings", None)
    text = diagnose.render_comparison(before, after)
    assert cells(text, "normalization")[-2:] == ["n/a", "n/a"] and len(cells(text, "normalization")) == 8
    assert "Went away: aten::div" in text and "TritonRMSNormFunction" in text.splitlines()[-1]


@pytest.mark.parametrize(("key", "value"), [("seq_len", 4), ("model", "other"), ("dtype", "fp32"), ("device", "CPU")])
def test_profiles_of_different_workloads_are_not_compared(key, value):
    before, after = before_and_after()
    with pytest.raises(command_line.UserError, match=f"not of one workload: {key} {value}"):
        diagnose.render_comparison(before, after | {key: value})


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_both_profiles_are_drawn_in_one_picture(run_script, tmp_path):
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, record in zip(paths, before_and_after()):
        record["categories"]["optimizer"]["flops"] = 1e4
        record["categories"]["loss"]["flops"] = 0.0  # copies alone have no place under the roof
        path.write_text(json.dumps(record))
    picture = tmp_path / "roofline.png"
    outcome = run_script(profile_baseline, "--compare", *map(str, paths), "--plot", str(picture))
    assert (outcome.code, outcome.err) == (0, "")
    assert "What the kernels changed" in outcome.out and f"Plot written to {picture}" in outcome.out
    assert is_picture(picture)


def test_a_category_that_the_interpreter_ran_is_drawn_as_it_was_before(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    before, after = (record | {"device": "CPU", "timeline": None} for record in before_and_after())
    before["categories"]["optimizer"]["flops"] = 1e4
    diagnose.plot([before, after], str(tmp_path / "roofline.png"))
    (axis,) = pyplot.gcf().axes
    (said,) = (text.get_text() for text in axis.texts if text.get_text().startswith("optimizer"))
    assert said.endswith("% of its ceiling → interpreted"), "the bytes of the kernel that took its place are unknown"
    monkeypatch.undo()
    pyplot.close("all")


def test_a_profile_without_bytes_is_not_drawn(run_script, tmp_path):
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, record in zip(paths, before_and_after()):
        del record["ceilings"]
        path.write_text(json.dumps(record))
    outcome = run_script(profile_baseline, "--compare", *map(str, paths), "--plot", str(tmp_path / "x.png"))
    assert outcome.code == 2 and re.search(r"before.json is too old to be drawn: .*; profile again\n$", outcome.err)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--compare", "nowhere.json", "nowhere.json"], "cannot read nowhere.json"),
        (["--compare", str(RESULTS / "finetune_baseline_1x512.json")] * 1 + ["x"], "is not a 'profile' record"),
        (["--compare", "one.json"], "--compare: expected 2 arguments"),
        (["--plot", "roofline.gif"], "--plot roofline.gif must end in .png"),
        (["--plot", "x.png", "--estimate"], "--plot draws the operations of a step"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_sentence(run_script, flags, words):
    outcome = run_script(profile_baseline, *flags)
    assert outcome.code == 2 and words in outcome.err and outcome.err.count("\n") == 1


# ---------------------------------------------------------------- real runs


def test_on_the_cpu_it_is_said_that_times_mean_nothing(run_script, tmp_path, monkeypatch):
    monkeypatch.setattr(profile_baseline, "TIMED_STEPS", 1)
    outputs = [f"--{name}={tmp_path / name}{end}" for name, end in (("json", ""), ("trace", ""), ("plot", ".png"))]
    small = ["--model", "tiny", "--seq-len", "8", "--warmup", "1"]
    outcome = run_script(profile_baseline, *small, "--kernels", "rmsnorm", *outputs)
    assert outcome.code == 0, outcome.err
    record = run_records.read_record(str(tmp_path / "json"), "profile")
    assert diagnose.render(record) in outcome.out and is_picture(tmp_path / "plot.png")
    if record["device"] == "CPU":
        assert f"Diagnosis{tables.NOT_MEANINGFUL}" in outcome.out
        assert "kernels of ours are interpreted, and not counted" in outcome.out
        assert "normalization" not in diagnose.judge_categories(record)
    assert len(diagnose.judge_categories(record)) >= 7
    assert outcome.out.count("\nLargest recoverable cost:  ") == 1


@needs_gpu
@pytest.mark.alone
def test_on_a_gpu_recording_kernels_costs_little_and_finds_what_waits(tmp_path, monkeypatch):
    """A model large enough for the GPU to be the slower one; then a step with .item() in it."""
    config = architecture.tiny_config()
    config.hidden_size, config.intermediate_size, config.head_dim, config.num_hidden_layers = 2048, 8192, 64, 8
    config.num_attention_heads, config.num_key_value_heads, config.max_position_embeddings = 32, 8, 2048
    monkeypatch.setattr(architecture, "tiny_config", lambda: config)
    flags = ["--model", "tiny", "--batch-size", "16", "--seq-len", "2048", "--trace", str(tmp_path / "trace.json")]
    args = profile_baseline.parse_args(flags)
    record = profile_baseline.profile_training(args)
    assert record["timeline"]["step_ms"] < 1.1 * record["median_step_ms"]
    assert diagnose.idle_us(record) < 0.2 * 1e3 * record["median_step_ms"]
    findings = diagnose.judge_categories(record)
    for name in ("matmul", "normalization", "activation", "optimizer"):  # whose tensors no cache holds
        assert 0.4 < findings[name].share < 1.2, name
    assert findings["matmul"].verdict == "compute-bound" and findings["optimizer"].verdict == "bandwidth-bound"

    real = stepping.training_step

    def with_item(model, optimizer, batch):
        for _ in range(20):
            batch.input_ids.sum().item()
        return real(model, optimizer, batch)

    model = loading.load_model(profile_baseline.parse_args(["--model", "tiny", "--random-init"]))
    batches = [batch.to(DEVICE) for batch in dataset.load_data(args, config, 2).train]
    monkeypatch.setattr(stepping.timed_step, "__defaults__", (with_item,))
    waited = profile_baseline.timeline(model, stepping.make_optimizer(model, 1e-3), batches)
    assert waited["synchronization_us"] > 20 * 2
    assert waited["idle_us"] >= waited["synchronization_us"] and waited["host_us"] > 0
