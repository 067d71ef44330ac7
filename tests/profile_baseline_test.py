"""Whose time is a kernel?  The profiler's attribution, on hand-made events and on real steps.

    python profile_baseline_test.py
    pytest profile_baseline_test.py

The hand-made events are PyTorch's own FunctionEvents, nested by PyTorch's own
code, so that what a GPU would record can be checked without one.
"""

import contextlib
import importlib
import io
import itertools
import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

import profile_baseline
from harness import dataset, diagnose, loading, run_records, stepping, tables
from harness.device import DEVICE, HAS_GPU
from next_steps import apply_kernels
from profile_baseline import OTHER, UNATTRIBUTED, attribute, modeling_llama
from tests.fixtures import needs_gpu

# isort: split
# after the kernels, which decide how triton (imported by transformers) will run
from transformers.loss.loss_utils import ForCausalLMLoss

MAIN, AUTOGRAD = 1, 2  # threads
EVALUATE = "autograd::engine::evaluate_function: "


class Timeline:
    """Profiler events of one step on a GPU, written as nested `with` blocks."""

    def __init__(self):
        self.events, self.open, self.thread = [], [], MAIN
        self.clock, self.gpu_clock, self.ids = itertools.count(), 1000.0, itertools.count(1)

    @contextlib.contextmanager
    def op(self, name: str, **fields):
        """An operation; `seq=` and `fwd_thread=` as autograd numbers it, `scope=1` for a backward node."""
        fields = {"id": next(self.ids), "thread": self.thread, "use_device": "cuda", **fields}
        fields["sequence_nr"] = fields.pop("seq", -1)
        event = FunctionEvent(name=name, start_us=next(self.clock), end_us=None, **fields)
        self.events.append(event)
        self.open.append(event)
        yield event
        self.open.pop()
        event.time_range.end = next(self.clock)

    def range(self, name: str):
        return self.op(name, is_user_annotation=True, scope=7)

    @contextlib.contextmanager
    def backward(self, name: str, seq: int):
        """A backward node: on autograd's thread, in its wrapper, numbered like the forward operation."""
        self.thread = AUTOGRAD
        with (
            self.op(EVALUATE + name, seq=seq, fwd_thread=MAIN),
            self.op(name, seq=seq, fwd_thread=MAIN, scope=1),
        ):
            yield
        self.thread = MAIN

    def launch(self, kernel: str, us: float, linked: bool = True, called: bool = True, at: float | None = None):
        """A kernel, the CUDA call that launches it (`called`), and the operation's note of it (`linked`)."""
        correlation = next(self.ids)
        start = self.gpu_clock if at is None else at
        self.gpu_clock = start + us
        gpu = FunctionEvent(correlation, kernel, 0, start, start + us, device_type=DeviceType.CUDA, use_device="cuda")
        self.events.append(gpu)
        if called:
            with self.op("cudaLaunchKernel", id=correlation):
                pass
        if linked:
            self.open[-1].append_kernel(kernel, 0, gpu.time_range.elapsed_us())

    def call(self, name: str, kernel: str, us: float, **fields):
        """An operation that launches one kernel."""
        with self.op(name, **fields):
            self.launch(kernel, us)

    def attribute(self, *costs) -> dict:
        events = EventList(self.events, use_device="cuda")
        events._build_tree()
        return attribute(events, *costs)


def operations(profile: dict) -> list[dict]:
    """The rows of the playbook's table, without what the diagnosis adds."""
    return [{key: row[key] for key in ("name", "us", "calls")} for row in profile["operations"]]


def found(profile: dict) -> dict[str, float]:
    """Category -> microseconds, empty ones left out."""
    return {name: part["us"] for name, part in profile["categories"].items() if part["launches"]}


# ---------------------------------------------------------------- attribution


def test_a_forward_operation_belongs_to_the_innermost_range():
    t = Timeline()
    with t.range("step"), t.range("forward"):
        t.call("aten::embedding", "gather", 1.0)
        with t.range("attention"):
            t.call("aten::copy_", "copy", 2.0)
            with t.range("rotary"):
                t.call("aten::mul", "mul", 4.0)
        with t.range("normalization"):
            t.call("aten::mul", "mul", 8.0)
        with t.range("loss"):
            t.call("aten::_log_softmax", "softmax", 16.0)
        with t.range("mlp"):
            t.call("aten::silu", "silu", 32.0)
    with t.range("optimizer"):
        t.call("aten::_foreach_addcdiv_", "multi_tensor_apply", 64.0)
    profile = t.attribute()
    assert found(profile) == {
        OTHER: 3.0, "rotary": 4.0, "normalization": 8.0, "loss": 16.0, "activation": 32.0, "optimizer": 64.0
    }  # fmt: skip


def test_the_profilers_own_overhead_launches_nothing():
    """CUPTI notes on the CPU, too, that its buffer was full: inside of the operation that had to wait for it."""
    t = Timeline()
    with t.range("optimizer"), t.op("aten::_foreach_mul_") as operation:
        with t.op("Command Buffer Full", id=operation.id):  # numbered like something else
            t.launch("multi_tensor_apply", 2.0, linked=False)
        t.launch("multi_tensor_apply", 4.0)
    cost = diagnose.Cost(800.0, 100.0)
    profile = t.attribute({operation.id: cost})
    assert operations(profile) == [{"name": "aten::_foreach_mul_", "us": 6.0, "calls": 1}]
    assert profile["categories"]["optimizer"]["bytes"] == cost.n_bytes  # once


def test_a_backward_operation_belongs_where_its_forward_operation_did():
    t = Timeline()
    with t.range("forward"), t.range("normalization"):
        t.call("aten::pow", "pow", 1.0, seq=7)
    with t.range("backward"), t.backward("PowBackward0", seq=7):
        t.call("aten::mul", "mul", 2.0)
    assert found(t.attribute()) == {"normalization": 3.0}


def test_a_number_of_another_thread_is_another_operation():
    t = Timeline()
    t.thread = 5
    with t.range("normalization"), t.op("aten::pow", seq=7):
        pass
    with t.backward("PowBackward0", seq=7):
        t.call("aten::mul", "mul", 2.0)
    assert found(t.attribute()) == {OTHER: 2.0}


def test_of_operations_with_one_number_the_last_created_the_node():
    """Operations that need no gradient carry the number of the next node: `arange` here, that of `pow`."""
    t = Timeline()
    with t.range("rotary"):
        t.call("aten::arange", "arange", 1.0, seq=7)
    with t.range("normalization"):
        t.call("aten::pow", "pow", 2.0, seq=7)
    with t.backward("PowBackward0", seq=7):
        t.call("aten::mul", "mul", 4.0)
    assert found(t.attribute()) == {"rotary": 1.0, "normalization": 6.0}


def test_matmul_and_fused_attention_are_known_by_name_in_both_directions():
    t = Timeline()
    with t.range("mlp"), t.op("aten::linear", seq=3), t.op("aten::matmul"):
        t.call("aten::mm", "nvjet_hsh", 1.0, seq=4)
    with t.range("attention"), t.op("aten::scaled_dot_product_attention", seq=5):
        t.call("aten::_cudnn_attention_forward", "cudnn_sdpa", 2.0)
    with t.range("loss"), t.op("FusedLinearCrossEntropyFunction", seq=6):
        t.call("aten::mm", "nvjet_hsh", 4.0)
    with t.backward("ScaledDotProductCudnnAttentionBackward0", seq=5):
        t.call("aten::_scaled_dot_product_cudnn_attention_backward", "cudnn_sdpa_bwd", 8.0)
    with t.backward("MmBackward0", seq=4):
        t.call("aten::mm", "nvjet_hsh", 16.0)
    assert found(t.attribute()) == {"matmul": 21.0, "attention": 10.0}


def test_the_range_called_attention_does_not_make_everything_in_it_attention():
    t = Timeline()
    with t.range("attention"):
        t.call("aten::clone", "copy", 1.0)
    assert found(t.attribute()) == {OTHER: 1.0}


def test_an_operation_named_like_a_range_is_no_range():
    t = Timeline()
    t.call("optimizer", "mul", 1.0)
    profile = t.attribute()
    assert found(profile) == {OTHER: 1.0} and profile["phases"]["other"]["us"] == 1.0


def test_own_functions_are_known_by_name_outside_any_range_and_without_a_forward_event():
    t = Timeline()
    t.call("TritonRMSNormFunction", "_rmsnorm_fwd_kernel", 1.0, seq=1)
    t.call("FusedCrossEntropyFunction", "_cross_entropy_fwd_kernel", 2.0, seq=2)
    with t.backward("FusedCrossEntropyFunctionBackward", seq=2):
        t.launch("_cross_entropy_bwd_kernel", 4.0)
    with t.backward("TritonRMSNormFunctionBackward", seq=99):
        t.launch("_rmsnorm_bwd_kernel", 8.0)
        t.call("aten::sum", "reduce", 16.0)
    profile = t.attribute()
    assert found(profile) == {"normalization": 25.0, "loss": 6.0}
    assert operations(profile)[0] == {"name": "aten::sum", "us": 16.0, "calls": 1}
    assert {"name": "TritonRMSNormFunctionBackward", "us": 8.0, "calls": 1} in operations(profile)


OUR_KERNELS = {
    "_rmsnorm_fwd_kernel": "normalization", "_rmsnorm_bwd_kernel": "normalization",
    "_rmsnorm_dw_kernel": "normalization",
    "_cross_entropy_fwd_kernel": "loss", "_cross_entropy_bwd_kernel": "loss",
    "_cross_entropy_inplace_kernel": "loss", "_cross_entropy_scale_kernel": "loss", "_scale_kernel": "loss",
    "_swiglu_fwd_kernel": "activation", "_swiglu_bwd_kernel": "activation", "_rope_kernel": "rotary",
    "_adamw_kernel": "optimizer",
}  # fmt: skip


def test_every_kernel_of_ours_has_its_category():
    """By the names in the lessons' sources, so that a new kernel cannot be forgotten."""
    modules = [
        "rmsnorm_kernel", "cross_entropy_kernel", "next_steps.linear_cross_entropy_kernel",
        "next_steps.swiglu_kernel", "next_steps.rope_kernel", "next_steps.adamw_kernel",
    ]  # fmt: skip
    names = {name for module in modules for name in vars(importlib.import_module(module)) if name.endswith("_kernel")}
    assert names == set(OUR_KERNELS)
    assert {name: profile_baseline.category_of_triton_kernel(name) for name in names} == OUR_KERNELS
    assert profile_baseline.category_of_triton_kernel("vectorized_elementwise_kernel") is None


@pytest.mark.parametrize("kernel", OUR_KERNELS)
def test_a_kernel_of_ours_is_known_by_its_name_wherever_it_is_launched(kernel):
    """AdamW's run in the backward, SwiGLU's inside a Function that is mostly matrix products."""
    t = Timeline()
    with t.range("forward"), t.op("aten::something_else"):
        t.launch(kernel, 1.0)
    with t.backward("torch::autograd::AccumulateGrad", seq=-1):
        t.launch(kernel, 2.0, linked=False)
    t.launch(kernel, 4.0, linked=False, called=False)
    profile = t.attribute()
    assert found(profile) == {OUR_KERNELS[kernel]: 7.0}
    assert {name: part["us"] for name, part in profile["phases"].items() if part["us"]} == {
        "forward": 1.0, "backward": 2.0, "other": 4.0
    }  # fmt: skip


def test_matrix_products_inside_our_functions_are_matrix_products():
    t = Timeline()
    with t.range("forward"):
        with t.op("NormLinearFunction", seq=1):
            t.launch("_rmsnorm_fwd_kernel", 1.0)
            t.call("aten::mm", "nvjet_hsh", 2.0)
        with t.op("SwiGLULinearFunction", seq=2):
            t.launch("_swiglu_fwd_kernel", 4.0)
            t.call("aten::mm", "nvjet_hsh", 8.0)
    with t.backward("SwiGLULinearFunctionBackward", seq=2):
        t.call("aten::mm", "nvjet_hsh", 16.0)
        t.launch("_swiglu_bwd_kernel", 32.0)
    with t.backward("NormLinearFunctionBackward", seq=1):
        t.call("aten::addmm_", "nvjet_hsh", 64.0)
        t.launch("_rmsnorm_bwd_kernel", 128.0)
        t.call("aten::add_", "vectorized_elementwise", 256.0)  # the residual's gradient
    assert found(t.attribute()) == {"matmul": 2.0 + 8 + 16 + 64, "normalization": 1.0 + 128 + 256, "activation": 36.0}


def test_reducing_a_broadcast_gradient_is_the_norms_and_adding_two_paths_is_nobodys():
    """Both happen in autograd's wrapper, after the node itself: dW = sum over rows; dx += the residual's."""
    t = Timeline()
    with t.range("normalization"):
        t.call("aten::mul", "mul", 1.0, seq=7)
    with t.op(EVALUATE + "MulBackward0", seq=7, fwd_thread=MAIN, thread=AUTOGRAD):
        with t.op("MulBackward0", seq=7, fwd_thread=MAIN, thread=AUTOGRAD, scope=1):
            t.call("aten::mul", "mul", 2.0, thread=AUTOGRAD)
        t.call("aten::sum", "reduce", 4.0, thread=AUTOGRAD)
        t.call("aten::add_", "add", 8.0, thread=AUTOGRAD)
    assert found(t.attribute()) == {"normalization": 7.0, OTHER: 8.0}


def test_gradient_accumulation_into_a_weight_is_found_though_it_has_no_forward_operation():
    t = Timeline()
    with t.backward("torch::autograd::AccumulateGrad", seq=-1):
        t.call("aten::add_", "add", 1.0)
    profile = t.attribute()
    assert found(profile) == {OTHER: 1.0} and profile["phases"]["backward"]["us"] == 1.0


def test_a_kernel_launched_straight_from_a_range_is_found_through_its_cuda_call():
    t = Timeline()
    with t.range("optimizer"):
        t.launch("_adamw_kernel", 3.0, linked=False)
    profile = t.attribute()
    assert found(profile) == {"optimizer": 3.0}
    assert profile["phases"]["optimizer"] == {"us": 3.0, "launches": 1}
    assert operations(profile) == [{"name": "_adamw_kernel", "us": 3.0, "calls": 1}]


def test_a_kernel_of_unknown_origin_is_counted_by_its_name_or_as_unattributed():
    t = Timeline()
    names = ["sm90_xmma_gemm_bf16", "nvjet_tst", "flash_fwd_kernel", "vectorized_elementwise"]
    for power, name in enumerate(names):
        t.launch(name, 2.0**power, linked=False, called=False)
    profile = t.attribute()
    assert found(profile) == {"matmul": 3.0, "attention": 4.0, UNATTRIBUTED: 8.0}
    assert profile["phases"]["other"] == {"us": 15.0, "launches": 4}


def test_ranges_on_the_gpus_timeline_are_not_counted():
    t = Timeline()
    with t.range("normalization"):
        t.call("aten::mul", "mul", 5.0)
    t.events.append(
        FunctionEvent(0, "normalization", 0, 1000, 1005, device_type=DeviceType.CUDA, is_user_annotation=True)
    )
    profile = t.attribute()
    assert found(profile) == {"normalization": 5.0} and profile["busy_us"] == 5.0
    assert [row["name"] for row in profile["operations"]] == ["aten::mul"]


def test_the_profilers_own_overhead_is_not_gpu_time():
    """On a long GPU step CUPTI reports its full buffer as an event on the GPU's timeline."""
    t = Timeline()
    with t.range("loss"):
        t.call("aten::mul", "mul", 5.0)
    t.events.append(FunctionEvent(0, "Command Buffer Full", 0, 1000, 1005, device_type=DeviceType.CUDA))
    profile = t.attribute()
    assert found(profile) == {"loss": 5.0} and profile["busy_us"] == 5.0


def test_a_cuda_call_that_shares_an_operations_id_does_not_double_its_kernels():
    """Operations and CUDA calls are numbered separately; PyTorch then notes the kernels at both."""
    t = Timeline()
    with t.range("optimizer"), t.op("cudaEventRecord") as call:
        call.append_kernel("mul", 0, 5.0)
    with t.range("loss"):
        t.call("aten::mul", "mul", 5.0)
    assert found(t.attribute()) == {"loss": 5.0}


def test_equal_kernels_of_different_operations_are_shared_out_between_them():
    t = Timeline()
    for name in ["normalization", "loss", "loss"]:
        with t.range(name):
            t.call("aten::mul", "mul", 5.0)
    profile = t.attribute()
    assert found(profile) == {"normalization": 5.0, "loss": 10.0}
    assert operations(profile) == [{"name": "aten::mul", "us": 15.0, "calls": 3}]


def test_calls_count_operations_and_launches_count_kernels():
    t = Timeline()
    with t.range("loss"), t.op("aten::cross_entropy_loss"):
        t.launch("first", 1.0)
        t.launch("second", 2.0)
    profile = t.attribute()
    assert operations(profile) == [{"name": "aten::cross_entropy_loss", "us": 3.0, "calls": 1}]
    assert profile["categories"]["loss"]["launches"] == 2


def test_what_an_operation_moves_counts_once_and_where_its_kernels_time_does():
    """An operation may launch several kernels, and call others that launch their own."""
    t = Timeline()
    with t.range("loss"), t.op("aten::sum") as total:
        with t.op("aten::fill_") as fill:
            t.launch("fill", 1.0)
        t.launch("first", 2.0)
        t.launch("second", 4.0)
    with t.range("normalization"):
        for _ in range(2):
            t.call("TritonRMSNormFunction", "_rmsnorm_fwd_kernel", 8.0)
    with t.range("forward"), t.op("aten::mm") as unlaunched:
        pass
    sizes = diagnose.Sizes(weights=0, stream=300, heads=0, inner=0, logits=0, layers=3, width=2)
    costs = {total.id: diagnose.Cost(100.0, 10.0), fill.id: diagnose.Cost(7.0, 0.0), unlaunched.id: diagnose.Cost(9, 9)}
    profile = t.attribute(costs, sizes)
    found = {name: (p["us"], p["bytes"], p["flops"]) for name, p in profile["categories"].items() if p["launches"]}
    assert found == {"loss": (7.0, 107.0, 10.0), "normalization": (16.0, 2 * 2 * 100, 2 * 4 * 50)}
    rows = {row["name"]: (row["launches"], row["bytes"]) for row in profile["operations"]}
    assert rows == {"aten::sum": (2, 100.0), "aten::fill_": (1, 7.0), "TritonRMSNormFunction": (2, 400.0)}


def test_without_a_gpu_an_operation_or_what_it_calls_is_counted():
    """aten::mean sums and divides, and nll_loss_backward first fills its result: the larger of the two counts."""
    t = Timeline()
    with t.op("aten::mean") as mean:
        with t.op("aten::sum") as total, t.op("aten::fill_") as fill:
            pass
        with t.op("aten::div_") as div:
            pass
    costs = {mean.id: 50.0, total.id: 50.0, fill.id: 2.0, div.id: 4.0}
    events = EventList(t.events, use_device="cuda")
    events._build_tree()
    costs = {number: diagnose.Cost(n_bytes, 0.0) for number, n_bytes in costs.items()}
    assert set(profile_baseline.counted_once(events, costs)) == {total.id, div.id}


def test_overlapping_kernels_keep_the_gpu_busy_once():
    t = Timeline()
    with t.range("forward"), t.op("aten::mul"):
        t.launch("a", 10.0, at=100.0)
        t.launch("b", 4.0, at=103.0)
        t.launch("c", 10.0, at=105.0)
        t.launch("d", 5.0, at=200.0)
    profile = t.attribute()
    assert profile["busy_us"] == 20.0 and found(profile) == {OTHER: 29.0}


def test_phases_tell_the_loss_from_the_forward_pass_it_lies_in():
    t = Timeline()
    with t.range("forward"):
        t.call("aten::mm", "gemm", 1.0, seq=1)
        with t.range("loss"):
            t.call("aten::_log_softmax", "softmax", 2.0, seq=2)
    with t.range("backward"):
        t.call("aten::ones_like", "fill", 4.0)
        with t.backward("LogSoftmaxBackward0", seq=2):
            t.call("aten::_log_softmax_backward_data", "softmax_bwd", 8.0)
    with t.range("optimizer"):
        t.call("aten::_foreach_add_", "add", 16.0)
    phases = t.attribute()["phases"]
    assert {name: part["us"] for name, part in phases.items()} == {
        "forward": 1.0, "loss": 2.0, "backward": 12.0, "optimizer": 16.0, "other": 0.0
    }  # fmt: skip


def random_profile(seed: int) -> tuple[dict, float, int]:
    """A profile of random nesting, and what all its kernels take together."""
    draw = random.Random(seed)
    t, total, count = Timeline(), 0.0, 0
    names = ["forward", "loss", "normalization", "mlp", "optimizer", "something else"]
    operations = [f"aten::op{i}" for i in range(40)] + ["aten::mm", "TritonRMSNormFunction"]
    for _ in range(120):
        with contextlib.ExitStack() as nest:
            for _ in range(draw.randrange(4)):
                nest.enter_context(t.range(draw.choice(names)))
            if draw.random() < 0.3:
                nest.enter_context(t.backward("SomeBackward0", seq=draw.randrange(9)))
            nest.enter_context(t.op(draw.choice(operations), seq=draw.randrange(-1, 9)))
            for _ in range(draw.randrange(3)):
                us = draw.randrange(1, 2000) / 32
                t.launch(draw.choice("abc"), us, linked=draw.random() < 0.8, called=draw.random() < 0.8)
                total, count = total + us, count + 1
    return t.attribute(), total, count


@pytest.mark.parametrize("seed", range(5))
def test_every_kernel_is_counted_exactly_once(seed):
    profile, total, count = random_profile(seed)
    for parts in (profile["categories"], profile["phases"]):
        assert sum(part["us"] for part in parts.values()) == pytest.approx(total)
        assert sum(part["launches"] for part in parts.values()) == count
    assert sum(row["us"] for row in profile["operations"]) == pytest.approx(total)
    assert profile["busy_us"] == pytest.approx(total)


# ---------------------------------------------------------------- what is printed


def made_up_record(profile: dict) -> dict:
    env = {"gpu": "Made Up", "torch": "0", "triton": "0", "transformers": "0", "date": "-", "commit": "-"}
    return {
        "kind": "profile", "environment": env, "kernels": [], "model": "tiny", "parameters": 1,
        "dtype": "bf16", "weights": "random weights", "batch_size": 1, "seq_len": 2, **profile,
        "step_ms": [4.0, 5.0, 6.0], "median_step_ms": 5.0, "profiled_step_ms": 7.0,
        "resting_memory_bytes": 2e9, "peak_memory_bytes": 3e9, "trace": "x.json", "trace_bytes": 1_000_000,
    }  # fmt: skip


def printed_tables(text: str) -> list[list[tuple[str, float, float, int]]]:
    """Every table's rows as (name, milliseconds, percent, count), its Total last."""
    tables, row = [[]], re.compile(r"(.+?)\s+([\d,.]+)ms\s+([\d.]+)%\s+([\d,]+)$")
    for line in text.splitlines():
        if match := row.match(line):
            name, *numbers = match.groups()
            tables[-1].append((name, *(float(n.replace(",", "")) for n in numbers)))
            if name == "Total":
                tables.append([])
    assert tables.pop() == []
    return tables


def assert_tables_add_up(text: str) -> None:
    tables = printed_tables(text)
    assert len(tables) == 3
    for *rows, (_, total_ms, total_share, total_count) in tables:
        assert sum(ms for _, ms, _, _ in rows) == pytest.approx(total_ms, abs=0.0005 * (len(rows) + 1))
        assert sum(share for _, _, share, _ in rows) == pytest.approx(100, abs=0.05 * len(rows))
        assert total_share == 100.0 and sum(count for *_, count in rows) == total_count
    assert len({(table[-1][1]) for table in tables}) == 1, "the tables disagree about the total"


def test_the_printed_rows_add_up_to_the_printed_total():
    profile, _, _ = random_profile(0)
    text = profile_baseline.render(made_up_record(profile))
    assert_tables_add_up(text)
    operations = [name for name, *_ in printed_tables(text)[0]]
    assert len(operations) == 22 and re.fullmatch(r"\(\d+ other operations\)", operations[20])
    times = [ms for _, ms, *_ in printed_tables(text)[0][:20]]
    assert times == sorted(times, reverse=True)


def test_the_playbooks_title_and_columns():
    t = Timeline()
    t.call("aten::mm", "gemm", 1500.0)
    text = profile_baseline.render(made_up_record(t.attribute()))
    rule = "=" * 70
    assert f"{rule}\nTop 20 CUDA Operations by Total GPU Time\n{rule}\nName " in text
    assert re.search(r"^Name +Self CUDA +Self CUDA % +# Calls$", text, re.M)
    assert re.search(r"^aten::mm +1\.500ms +100\.0% +1$", text, re.M)
    assert "unattributed" not in text and "other operations" not in text
    assert re.search(r"^GPU idle share: +70\.0 %$", text, re.M)  # 1.5 ms busy of 5 ms
    assert "https://ui.perfetto.dev" in text.splitlines()[-1]


def test_a_profile_longer_than_the_step_leaves_no_negative_idle_share():
    t = Timeline()
    t.call("aten::mm", "gemm", 7000.0)
    text = profile_baseline.render(made_up_record(t.attribute()))
    assert re.search(r"^GPU idle share: +0\.0 %$", text, re.M)


# ---------------------------------------------------------------- real steps


def run(*flags: str) -> tuple[dict, str]:
    """main() in this process: (record, what it printed)."""
    json_path = flags[flags.index("--json") + 1]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["profile_baseline.py", "--model", "tiny", *flags])
        profile_baseline.main()
    return run_records.read_record(json_path, "profile"), printed.getvalue()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[dict, str]]:
    """The same small training step without and with the custom kernels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("profile")
    flags = {"baseline": [], "custom": ["--use-custom-rmsnorm", "--use-custom-ce"]}
    results = {}
    for name, extra in flags.items():
        outputs = ["--json", str(folder / f"{name}.json"), "--trace", str(folder / f"{name}-trace.json")]
        results[name] = run("--seq-len", "64", "--warmup", "1", *outputs, *extra)
    torch.set_num_threads(threads)
    return results


@pytest.mark.parametrize("name", ["baseline", "custom"])
def test_a_run_leaves_a_trace_and_a_record_that_renders_to_what_was_printed(runs, name):
    record, printed = runs[name]
    assert profile_baseline.render(record) in printed
    assert printed.startswith(tables.NO_GPU_NOTE) == (not HAS_GPU)
    assert_tables_add_up(printed)
    trace = json.loads(Path(record["trace"]).read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"step", "forward", "loss", "backward", "optimizer", "normalization", "mlp", "rotary"} <= names
    assert record["trace_bytes"] == Path(record["trace"]).stat().st_size < 50e6


@pytest.mark.parametrize("name", ["baseline", "custom"])
def test_every_category_of_a_real_step_is_found(runs, name):
    categories = runs[name][0]["categories"]
    empty = [name for name, part in categories.items() if part["us"] == 0 and name != UNATTRIBUTED]
    assert not empty
    phases = runs[name][0]["phases"]
    assert all(phases[name]["us"] > 0 for name in ["forward", "loss", "backward", "optimizer"])


def test_the_custom_kernels_replace_the_eager_operations(runs):
    rows = {n: {row["name"]: row["calls"] for row in runs[n][0]["operations"]} for n in ["baseline", "custom"]}
    eager = ["aten::pow", "aten::mean", "aten::rsqrt", "aten::_log_softmax", "aten::nll_loss_forward"]
    assert all(name in rows["baseline"] for name in eager)
    assert not any(name in rows["custom"] for name in eager)
    assert rows["baseline"]["aten::rsqrt"] == 5  # two layers of two norms, and the last one
    assert rows["custom"]["TritonRMSNormFunction"] == rows["custom"]["TritonRMSNormFunctionBackward"] == 5
    assert rows["custom"]["FusedCrossEntropyFunction"] == 1
    assert runs["baseline"][0]["kernels"] == [] and runs["custom"][0]["kernels"] == [
        "rmsnorm",
        "cross_entropy",
    ]


def test_python_stacks_are_in_the_trace_but_not_in_the_tables(runs, tmp_path):
    outputs = ["--json", str(tmp_path / "record.json"), "--trace", str(tmp_path / "trace.json")]
    record, _ = run("--seq-len", "64", "--warmup", "1", "--stacks", *outputs)
    assert "modeling_llama.py" in (tmp_path / "trace.json").read_text()
    without = {row["name"] for row in runs["baseline"][0]["operations"]}
    assert {row["name"] for row in record["operations"]} <= without


def tiny_model() -> torch.nn.Module:
    return loading.load_model(profile_baseline.parse_args(["--model", "tiny"]))


@pytest.mark.parametrize("fails", [False, True])
def test_no_range_stays_behind(fails):
    model = tiny_model()
    loss_function, rotary = model.loss_function, modeling_llama.apply_rotary_pos_emb
    with contextlib.suppress(ZeroDivisionError), profile_baseline.category_ranges(model):
        assert model.loss_function is not loss_function
        assert modeling_llama.apply_rotary_pos_emb is not rotary
        assert len(model.model.norm._forward_hooks) == len(model.model.norm._forward_pre_hooks) == 1
        if fails:
            raise ZeroDivisionError
    assert model.loss_function is loss_function and modeling_llama.apply_rotary_pos_emb is rotary
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def hooked(model) -> set[str]:
    """Names of the modules around which a range is opened."""
    with profile_baseline.category_ranges(model):
        return {name for name, module in model.named_modules() if module._forward_pre_hooks}


def test_parts_of_a_fused_layer_are_not_hooked_so_that_it_stays_fused():
    model = profile_baseline.apply_kernels(tiny_model(), ["rmsnorm", "swiglu", "rope"])
    parts = {f"model.layers.{i}.{part}" for i in range(2) for part in ("mlp", "self_attn", "input_layernorm")}
    around = {"model.norm", "model.embed_tokens", "model.rotary_emb"}
    assert parts | around < hooked(model)
    profile_baseline.apply_kernels(model, ["fused_layer"])
    assert hooked(model) == around

    calls, fused = [], apply_kernels.norm_linear
    with pytest.MonkeyPatch.context() as patch, profile_baseline.category_ranges(model):
        patch.setattr(apply_kernels, "norm_linear", lambda *args: (calls.append(1), fused(*args))[1])
        ids = torch.zeros(1, 4, dtype=torch.int64, device=DEVICE)
        model(input_ids=ids, labels=ids)
    assert len(calls) == 4, "a layer was not fused under the profiler"


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_the_losss_range_does_not_take_the_place_of_its_kernel(name):
    model = profile_baseline.apply_kernels(tiny_model(), [name])
    ids = torch.zeros(1, 4, dtype=torch.int64, device=DEVICE)
    with profile_baseline.category_ranges(model), torch.profiler.profile() as profiler:
        output = model(input_ids=ids, labels=ids)
    assert output.logits is None
    functions = {"cross_entropy": "FusedCrossEntropyFunction", "linear_cross_entropy": "LinearCrossEntropyFunction"}
    names = {event.name for event in profiler.events()}
    assert functions[name] in names and ("loss" in names) == (name == "cross_entropy")
    assert model.loss_function is ForCausalLMLoss and model(input_ids=ids, labels=ids).loss == output.loss


def test_a_profile_with_all_kernels(tmp_path):
    """Kernels run as operations of their Function here; the optimizer steps inside the backward."""
    outputs = ["--json", str(tmp_path / "record.json"), "--trace", str(tmp_path / "trace.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_baseline, "TIMED_STEPS", 1)
        record, printed = run("--seq-len", "4", "--warmup", "1", "--kernels", "all", *outputs)
    assert record["kernels"] == apply_kernels.KERNELS and profile_baseline.render(record) in printed
    assert_tables_add_up(printed)
    operations = {row["name"] for row in record["operations"]}
    functions = {"NormLinearFunction", "SwiGLULinearFunction", "TritonRoPEFunction", "LinearCrossEntropyFunction"}
    assert functions | {f"{name}Backward" for name in functions} <= operations
    assert not operations & {"aten::silu", "aten::rsqrt", "aten::_log_softmax", "aten::_foreach_addcdiv_"}
    for category in ("matmul", "attention", "normalization", "loss", "activation", "rotary"):
        assert record["categories"][category]["us"] > 0, category


def test_the_playbooks_flags_name_kernels_and_the_trace_says_what_it_shows():
    args = profile_baseline.parse_args(["--use-custom-ce", "--kernels", "rmsnorm", "--seq-len", "512"])
    assert args.kernels == ["rmsnorm", "cross_entropy"]
    assert args.trace == "traces/Llama-3.1-8B-1x512-rmsnorm+cross_entropy.json"
    args = profile_baseline.parse_args(["--model", "tiny", "--batch-size", "4", "--seq-len", "32"])
    assert args.kernels == [] and args.trace == "traces/tiny-4x32-baseline.json"


@needs_gpu
@pytest.mark.parametrize("kernels", ["none", "rmsnorm,cross_entropy", "all"])
def test_on_a_gpu_kernels_are_attributed_and_add_up(kernels, tmp_path):
    args = profile_baseline.parse_args(["--model", "tiny", "--kernels", kernels])
    model = loading.load_model(args)
    profile_baseline.apply_kernels(model, [name for name in apply_kernels.MODEL_KERNELS if name in args.kernels])
    make_optimizer = apply_kernels.triton_adamw if "adamw" in args.kernels else stepping.make_optimizer
    optimizer = make_optimizer(model, lr=1e-3)
    batches = [batch.to(DEVICE) for batch in dataset.load_data(args, model.config, 4).train]
    for batch in batches[:2]:
        profile_baseline.timed_step(model, optimizer, batch)
    profiler, _ = profile_baseline.profiled_step(model, optimizer, batches[2:], stacks=False)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    total = sum(e["dur"] for e in trace if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))

    events = profiler.events()
    profile = attribute(events)
    us = {name: part["us"] for name, part in profile["categories"].items()}
    assert profile["device"] == "CUDA"
    assert sum(us.values()) == pytest.approx(total, rel=1e-3)
    assert us[UNATTRIBUTED] < 0.02 * total
    assert profile["phases"]["other"]["us"] < 0.02 * total
    assert all(us[name] > 0 for name in us if name != UNATTRIBUTED)

    forward = profile_baseline.forward_operations(events)
    expected = {
        "_rmsnorm": "normalization", "_cross_entropy": "loss", "multi_tensor_apply": "optimizer",
        "gemm": "matmul", "nvjet": "matmul", "logsoftmax": "loss", "silu": "activation", "flash": "attention",
    }  # fmt: skip
    for work in profile_baseline.work_of(events):
        for part, category in expected.items():
            if part in work.name.lower() and work.launcher is not None:
                assert profile_baseline.category_of(work.launcher, forward) == category, work.name
    launched = {work.name for work in profile_baseline.work_of(events) if work.name in OUR_KERNELS}
    default_mode = {"_cross_entropy_fwd_kernel", "_cross_entropy_bwd_kernel"}  # training overwrites the logits
    assert launched == set(OUR_KERNELS) - default_mode or kernels != "all"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
