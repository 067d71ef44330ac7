"""The attribution of kernels' time, on events made by hand.

The events are PyTorch's own FunctionEvents, nested by PyTorch's own code.  So the tests need no GPU
to check what a GPU would record.
"""

import contextlib
import itertools
import random

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from harness.profiling.attribution import (
    PROJECTION,
    attribute,
    busy_us,
    counted_once,
    host_waits,
    idle_times,
    times_by_kind,
)
from harness.profiling.costs import Cost
from harness.profiling.kernel_facts import (
    ADAPTERS,
    COMMUNICATION,
    KERNEL_ROWS,
    OTHER,
    UNATTRIBUTED,
    Sizes,
)
from tests.kernel_facts_test import launched_kernels

MAIN, AUTOGRAD = 1, 2  # threads
EVALUATE = "autograd::engine::evaluate_function: "


def event(name: str, start: float, end: float, number: int, on_gpu: bool, **more) -> FunctionEvent:
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return FunctionEvent(number, name, 0, start, end, device_type=device, use_device="cuda", **more)


def tree(events: list[FunctionEvent]) -> EventList:
    """The events as PyTorch nests them."""
    nested = EventList(events, use_device="cuda")
    nested._build_tree()
    return nested


class Timeline:
    """Profiler events of one step on a GPU, written as nested `with` blocks."""

    def __init__(self):
        self.events, self.open, self.thread = [], [], MAIN
        self.clock, self.gpu_clock, self.ids = itertools.count(), 1000.0, itertools.count(1)

    @contextlib.contextmanager
    def op(self, name: str, **fields):
        """An operation: autograd numbers it by `seq=`, and `scope=1` is a backward node's."""
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
        """A backward node: on autograd's thread, in its wrapper, with its forward's number."""
        self.thread = AUTOGRAD
        with (
            self.op(EVALUATE + name, seq=seq, fwd_thread=MAIN),
            self.op(name, seq=seq, fwd_thread=MAIN, scope=1),
        ):
            yield
        self.thread = MAIN

    def launch(self, kernel: str, us: float, linked=True, called=True, at: float | None = None):
        """Add a kernel, the CUDA call that launches it, and the operation's note of it."""
        correlation = next(self.ids)
        start = self.gpu_clock if at is None else at
        self.gpu_clock = start + us
        gpu = event(kernel, start, start + us, correlation, on_gpu=True)
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
        return attribute(tree(self.events), *costs)


@pytest.fixture
def t() -> Timeline:
    return Timeline()


def operations(profile: dict) -> list[dict]:
    """The rows of the playbook's table, without what the diagnosis adds."""
    return [{key: row[key] for key in ("name", "us", "calls")} for row in profile["operations"]]


def found(profile: dict) -> dict[str, float]:
    """Category -> microseconds, empty ones left out."""
    return {name: part["us"] for name, part in profile["categories"].items() if part["launches"]}


def phases(profile: dict) -> dict[str, float]:
    return {name: part["us"] for name, part in profile["phases"].items() if part["us"]}


# ---------------------------------------------------------------- attribution


def test_a_forward_operation_belongs_to_the_innermost_range(t):
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
        OTHER: 3.0,
        "rotary": 4.0,
        "normalization": 8.0,
        "loss": 16.0,
        "activation": 32.0,
        "optimizer": 64.0,
    }


def test_the_profilers_own_overhead_launches_nothing(t):
    """CUPTI also notes on the CPU that its buffer was full, inside the operation that waited."""
    with t.range("optimizer"), t.op("aten::_foreach_mul_") as operation:
        with t.op("Command Buffer Full", id=operation.id):  # numbered like something else
            t.launch("multi_tensor_apply", 2.0, linked=False)
        t.launch("multi_tensor_apply", 4.0)
    cost = Cost(800.0, 100.0)
    profile = t.attribute({operation.id: cost})
    assert operations(profile) == [{"name": "aten::_foreach_mul_", "us": 6.0, "calls": 1}]
    assert profile["categories"]["optimizer"]["bytes"] == cost.n_bytes  # once


def test_an_adapters_products_are_its_own_and_the_projections_are_not(t):
    """Forward and backward; and an addition of gradients, which meet at the input, is nobody's."""
    with t.range("forward"), t.range("mlp"), t.range(ADAPTERS):
        with t.range(PROJECTION), t.op("aten::linear"):
            t.call("aten::mm", "gemm", 1.0, seq=1)
        with t.op("aten::linear"):
            t.call("aten::mm", "gemm", 2.0, seq=2)
        t.call("aten::mul", "mul", 4.0, seq=3)
        t.call("aten::add", "add", 8.0, seq=4)
    with t.range("backward"):
        with t.backward("MulBackward0", seq=3):
            t.call("aten::mul", "mul", 16.0)
        with t.backward("MmBackward0", seq=2):
            t.call("aten::mm", "gemm", 32.0)
        with t.backward("MmBackward0", seq=1):
            t.call("aten::mm", "gemm", 64.0)
        with t.op(EVALUATE + "MmBackward0", seq=1, fwd_thread=MAIN):
            t.call("aten::add", "add", 128.0)
        # a layer that runs again has its adapters again
        with t.backward("CheckpointBackward", seq=9), t.range(ADAPTERS):
            with t.range(PROJECTION):
                t.call("aten::mm", "gemm", 256.0)
            t.call("aten::mm", "gemm", 512.0)
    assert found(t.attribute()) == {"matmul": 321.0, ADAPTERS: 574.0, OTHER: 128.0}


def test_of_operations_of_one_thread_with_one_number_the_last_created_the_node(t):
    """An operation without a gradient has the number of the next node: `arange` that of `pow`."""
    with t.range("rotary"):
        t.call("aten::arange", "arange", 1.0, seq=7)
    with t.range("normalization"):
        t.call("aten::pow", "pow", 2.0, seq=7)
    t.thread = 5
    with t.range("loss"), t.op("aten::exp", seq=7), t.op("aten::exp", seq=8):
        pass
    for number in (7, 8):
        with t.backward("PowBackward0", seq=number):
            t.call("aten::mul", "mul", 4.0)
    assert found(t.attribute()) == {"rotary": 1.0, "normalization": 6.0, OTHER: 4.0}


def test_matmul_and_fused_attention_are_known_by_name_in_both_directions(t):
    with t.range("mlp"), t.op("aten::linear", seq=3), t.op("aten::matmul"):
        t.call("aten::mm", "nvjet_hsh", 1.0, seq=4)
    with t.range("attention"), t.op("aten::scaled_dot_product_attention", seq=5):
        t.call("aten::_cudnn_attention_forward", "cudnn_sdpa", 2.0)
        t.call("aten::bmm", "nvjet_hsh", 32.0)  # of attention that is written out
    with t.range("loss"), t.op("FusedLinearCrossEntropyFunction", seq=6):
        t.call("aten::mm", "nvjet_hsh", 4.0)
    with t.backward("ScaledDotProductCudnnAttentionBackward0", seq=5):
        t.call("aten::_scaled_dot_product_cudnn_attention_backward", "cudnn_sdpa_bwd", 8.0)
    with t.backward("MmBackward0", seq=4):
        t.call("aten::mm", "nvjet_hsh", 16.0)
    assert found(t.attribute()) == {"matmul": 21.0, "attention": 42.0}


def test_own_functions_are_known_by_name_outside_any_range_and_without_a_forward_event(t):
    """Matrix products inside them are matrix products."""
    t.call("FusedCrossEntropyFunction", "_cross_entropy_fwd_kernel", 1.0, seq=2)
    with t.backward("FusedCrossEntropyFunctionBackward", seq=2):
        t.launch("_cross_entropy_bwd_kernel", 2.0)
    with t.range("forward"), t.op("SwiGLULinearFunction", seq=1):
        t.launch("_swiglu_fwd_kernel", 4.0)
        t.call("aten::mm", "nvjet_hsh", 8.0)
    with t.backward("SwiGLULinearFunctionBackward", seq=1):
        t.call("aten::mm", "nvjet_hsh", 16.0)
        t.launch("_swiglu_bwd_kernel", 32.0)
    with t.backward("NormLinearFunctionBackward", seq=99):
        t.call("aten::addmm_", "nvjet_hsh", 64.0)
        t.launch("_rmsnorm_bwd_kernel", 128.0)
        t.call("aten::add_", "vectorized_elementwise", 256.0)  # the residual's gradient
        t.call("aten::sum", "reduce", 512.0)
    profile = t.attribute()
    assert found(profile) == {
        "loss": 3.0, "activation": 36.0, "matmul": 88.0, "normalization": 128.0 + 256 + 512
    }  # fmt: skip
    assert operations(profile)[0] == {"name": "aten::sum", "us": 512.0, "calls": 1}
    assert {"name": "NormLinearFunctionBackward", "us": 128.0, "calls": 1} in operations(profile)


LESSONS = {row.lesson: row.category for row in KERNEL_ROWS}
LESSONS |= {"next_steps.layers.lora_swiglu": "activation"}
OUR_KERNELS = {  # a new kernel cannot be forgotten: the names are those in the lessons' sources
    name: category for lesson, category in LESSONS.items() for name in launched_kernels(lesson)
}


GATHER, REDUCE = "ncclDevKernel_AllGather_RING_LL(...)", "ncclDevKernel_ReduceScatter_Sum_bf16_..."
KNOWN = OUR_KERNELS | {GATHER: COMMUNICATION, REDUCE: COMMUNICATION}


@pytest.mark.parametrize("kernel", sorted(KNOWN))
def test_a_kernel_of_ours_or_nccls_is_known_by_its_name_wherever_it_is_launched(t, kernel):
    """AdamW's run in the backward, SwiGLU's inside a Function that is mostly matrix products."""
    with t.range("forward"), t.op("aten::something_else"):
        t.launch(kernel, 1.0)
    with t.backward("torch::autograd::AccumulateGrad", seq=-1):
        t.launch(kernel, 2.0, linked=False)
    t.launch(kernel, 4.0, linked=False, called=False)
    profile = t.attribute()
    assert found(profile) == {KNOWN[kernel]: 7.0}
    assert phases(profile) == {"forward": 1.0, "backward": 2.0, "other": 4.0}


def test_reducing_a_broadcast_gradient_is_the_norms_and_adding_two_paths_is_nobodys(t):
    """Both follow the node in autograd's wrapper: dW = sum over rows; dx += the residual's."""
    with t.range("normalization"):
        t.call("aten::mul", "mul", 1.0, seq=7)
    with t.op(EVALUATE + "MulBackward0", seq=7, fwd_thread=MAIN, thread=AUTOGRAD):
        with t.op("MulBackward0", seq=7, fwd_thread=MAIN, thread=AUTOGRAD, scope=1):
            t.call("aten::mul", "mul", 2.0, thread=AUTOGRAD)
        t.call("aten::sum", "reduce", 4.0, thread=AUTOGRAD)
        t.call("aten::add_", "add", 8.0, thread=AUTOGRAD)
    assert found(t.attribute()) == {"normalization": 7.0, OTHER: 8.0}


def test_a_kernel_launched_straight_from_a_range_is_found_through_its_cuda_call(t):
    with t.range("optimizer"):
        t.launch("_adamw_kernel", 3.0, linked=False)
    profile = t.attribute()
    assert found(profile) == {"optimizer": 3.0}
    assert profile["phases"]["optimizer"] == {"us": 3.0, "launches": 1}
    assert operations(profile) == [{"name": "_adamw_kernel", "us": 3.0, "calls": 1}]


def test_a_kernel_of_unknown_origin_is_counted_by_its_name_or_as_unattributed(t):
    names = ["sm90_xmma_gemm_bf16", "nvjet_tst", "flash_fwd_kernel", "vectorized_elementwise"]
    for power, name in enumerate(names):
        t.launch(name, 2.0**power, linked=False, called=False)
    profile = t.attribute()
    assert found(profile) == {"matmul": 3.0, "attention": 4.0, UNATTRIBUTED: 8.0}
    assert profile["phases"]["other"] == {"us": 15.0, "launches": 4}


@pytest.mark.parametrize(("name", "is_range"), [("loss", True), ("Command Buffer Full", False)])
def test_ranges_and_overheads_on_the_gpus_timeline_are_not_counted(t, name, is_range):
    """On a long step CUPTI reports its full buffer as an event on the GPU's timeline."""
    with t.range("loss"):
        t.call("aten::mul", "mul", 5.0)
    t.events.append(event(name, 1000, 1005, 0, on_gpu=True, is_user_annotation=is_range))
    profile = t.attribute()
    assert found(profile) == {"loss": 5.0} and profile["busy_us"] == 5.0
    assert [row["name"] for row in profile["operations"]] == ["aten::mul"]


def test_equal_kernels_of_different_operations_are_shared_out_between_them(t):
    """Operations and CUDA calls are numbered separately; PyTorch may note a kernel at both."""
    with t.range("optimizer"), t.op("cudaEventRecord") as call:
        call.append_kernel("mul", 0, 5.0)
    for name in ["normalization", "loss", "loss"]:
        with t.range(name):
            t.call("aten::mul", "mul", 5.0)
    profile = t.attribute()
    assert found(profile) == {"normalization": 5.0, "loss": 10.0}
    assert operations(profile) == [{"name": "aten::mul", "us": 15.0, "calls": 3}]


def test_what_an_operation_moves_counts_once_and_where_its_kernels_time_does(t):
    """An operation may launch several kernels, and call others that launch their own."""
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
    sizes = Sizes(weights=0, stream=300, heads=0, inner=0, logits=0, layers=3, width=2)
    costs = {total.id: Cost(100.0, 10.0), fill.id: Cost(7.0, 0.0), unlaunched.id: Cost(9, 9)}
    profile = t.attribute(costs, sizes)
    found = {
        name: (p["us"], p["bytes"], p["flops"])
        for name, p in profile["categories"].items()
        if p["launches"]
    }
    assert found == {"loss": (7.0, 107.0, 10.0), "normalization": (16.0, 2 * 2 * 100, 2 * 4 * 50)}
    rows = {row["name"]: (row["launches"], row["bytes"]) for row in profile["operations"]}
    assert rows == {
        "aten::sum": (2, 100.0),
        "aten::fill_": (1, 7.0),
        "TritonRMSNormFunction": (2, 400.0),
    }


def test_without_a_gpu_an_operation_or_what_it_calls_is_counted(t):
    """aten::mean sums and divides: the larger of the two counts wins."""
    with t.op("aten::mean") as mean:
        with t.op("aten::sum") as total, t.op("aten::fill_") as fill:
            pass
        with t.op("aten::div_") as div:
            pass
    costs = {mean.id: 50.0, total.id: 50.0, fill.id: 2.0, div.id: 4.0}
    costs = {number: Cost(n_bytes, 0.0) for number, n_bytes in costs.items()}
    assert set(counted_once(tree(t.events), costs)) == {total.id, div.id}


def test_overlapping_kernels_keep_the_gpu_busy_once(t):
    with t.range("forward"), t.op("aten::mul"):
        t.launch("a", 10.0, at=100.0)
        t.launch("b", 4.0, at=103.0)
        t.launch("c", 10.0, at=105.0)
        t.launch("d", 5.0, at=200.0)
    profile = t.attribute()
    assert profile["busy_us"] == 20.0 and found(profile) == {OTHER: 29.0}


def test_phases_tell_the_loss_from_the_forward_pass_it_lies_in(t):
    with t.range("forward"):
        t.call("aten::mm", "gemm", 1.0, seq=1)
        with t.range("loss"):
            t.call("aten::_log_softmax", "softmax", 2.0, seq=2)
    with t.range("backward"):
        t.call("aten::ones_like", "fill", 4.0)
        with t.backward("LogSoftmaxBackward0", seq=2):
            t.call("aten::_log_softmax_backward_data", "softmax_bwd", 8.0)
        with t.backward("torch::autograd::AccumulateGrad", seq=-1):  # no forward operation
            t.call("aten::add_", "add", 16.0)
    with t.range("optimizer"):
        t.call("aten::_foreach_add_", "add", 32.0)
    t.call("optimizer", "mul", 64.0)  # an operation named like a range is no range
    profile = t.attribute()
    assert found(profile) == {"matmul": 1.0, "loss": 10.0, "optimizer": 32.0, OTHER: 84.0}
    assert phases(profile) == {
        "forward": 1.0, "loss": 2.0, "backward": 28.0, "optimizer": 32.0, "other": 64.0
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
                t.launch(
                    draw.choice("abc"), us, linked=draw.random() < 0.8, called=draw.random() < 0.8
                )
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


# ---------------------------------------------------------------- when the GPU waits


def idle_of(*launches: tuple[float, float, float], waits=()) -> dict:
    """idle_times of kernels: (launch begins, kernel begins, kernel ends); a launch takes 2 us."""
    events = [event("cudaDeviceSynchronize", *times, 99, False) for times in waits]
    for number, (launched, start, end) in enumerate(launches, 1):
        events.append(event("cudaLaunchKernel", launched, launched + 2, number, False))
        events.append(event("mul", start, end, number, True))
    return idle_times(EventList(events, use_device="cuda"))


IDLE = {  # kernels, the host's waits; GPU idle, of it for a synchronization, from launch to launch
    "the 1 us between queued kernels is the GPU's own": (
        ([(0, 5, 20), (4, 21, 40), (8, 41, 50)], []),
        (0, 0, 0),
    ),
    "late launches tell the host's pace, of 12 and 18 us": (
        ([(0, 5, 10), (12, 17, 20), (30, 35, 40), (33, 41, 60)], []),
        (7 + 15, 0, 15),
    ),
    "as .item(): wait for the kernel, come back at 12, launch the next at 14": (
        ([(0, 5, 10), (14, 19, 30), (34, 40, 50)], [(3, 12), (52, 60)]),
        (9 + 10, 9, 20),
    ),
    "the wait that ends the timing": (([(0, 5, 10), (3, 11, 30)], [(0, 0), (6, 31)]), (0, 0, 0)),
    "kernels that overlap": (([(0, 5, 100), (50, 60, 70), (90, 95, 120)], []), (0, 0, 0)),
}


@pytest.mark.parametrize("case", IDLE)
def test_idle_time_is_the_hosts_or_a_synchronizations(case):
    (launches, waits), expected = IDLE[case]
    assert tuple(idle_of(*launches, waits=waits).values()) == expected


def exposed_of(*kernels: tuple[str, float, float]) -> tuple[float, float]:
    """(all of the communication, what nothing hides) of kernels, each (name, begin, end)."""
    events = [event(name, *times, number, True) for number, (name, *times) in enumerate(kernels)]
    found = times_by_kind(EventList(events, use_device="cuda"))
    return found["communication_us"], found["exposed_us"]


def test_communication_is_exposed_once_where_no_other_kernel_hides_it():
    assert exposed_of((GATHER, 10, 20), ("gemm", 0, 30)) == (10, 0)
    assert exposed_of((GATHER, 10, 20), ("gemm", 0, 12), ("mul", 11, 15)) == (10, 5)
    assert exposed_of((GATHER, 10, 20), ("gemm", 0, 10), ("mul", 20, 25)) == (10, 10)
    assert exposed_of((GATHER, 10, 20), (REDUCE, 15, 30), ("gemm", 18, 22)) == (20, 16)
    assert exposed_of(("gemm", 0, 10), ("Memcpy HtoD", 5, 20)) == (0, 0)


MUL = "void at::native::vectorized_elementwise_kernel<4, at::native::{}<float, float, float, {}> >"
MUL_FUNCTOR = "at::native::binary_internal::MulFunctor<float>"
TIMED_BY_NAME = [  # (name, its microseconds of products, of copies)
    ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 1, 0),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2>", 1, 0),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>", 1, 0),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_traits<128, cutlass::bfloat16_t> >", 0, 0),
    ("void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>", 0, 1),
    ("void at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel", 0, 1),
    ("void multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<c10::BFloat16>>", 0, 1),
    ("Memcpy DtoD (Device -> Device)", 0, 1),
    (MUL.format("AUnaryFunctor", MUL_FUNCTOR), 0, 1),  # DDP's, into a bucket
    (MUL.format("BinaryFunctor", MUL_FUNCTOR), 0, 0),  # of two tensors
    ("_swiglu_bwd_kernel", 0, 0),
    (GATHER, 0, 0),
]


@pytest.mark.parametrize("name, products, copies", TIMED_BY_NAME)
def test_a_name_tells_products_and_copies(name, products, copies):
    found = times_by_kind(EventList([event(name, 3, 4, 1, True)], use_device="cuda"))
    assert (found["products_us"], found["copies_us"]) == (products, copies)


def test_a_copy_counts_where_no_product_runs_and_nothing_counts_twice():
    names = [("gemm", 0, 10), ("Memcpy", 8, 15), ("mul", 12, 20), (GATHER, 5, 22), ("gemm", 30, 34)]
    events = [event(name, *span, number, True) for number, (name, *span) in enumerate(names)]
    found = times_by_kind(EventList(events, use_device="cuda"))
    expected = {"communication_us": 17, "exposed_us": 2, "products_us": 14, "copies_us": 5}
    assert found == expected and busy_us(events) == 26


def waits_of(timeline: Timeline) -> dict[tuple[str, str], int]:
    waits = host_waits(tree(timeline.events))
    return {(row["name"], row["phase"]): row["calls"] for row in waits}


def test_a_wait_has_the_name_of_what_the_model_called(t):
    with t.range("step"):
        with t.op("cudaDeviceSynchronize"):  # begins the timing
            pass
        with t.range("forward"):
            t.call("aten::mul", "mul", 1.0)
            for _ in range(2):
                with t.op("aten::item"), t.op("aten::_local_scalar_dense"):
                    t.launch("copy", 1.0)
                    with t.op("cudaStreamSynchronize"):
                        pass
            with t.op("cudaDeviceSynchronize"):  # somebody's own
                pass
        with t.backward("IndexBackward0", seq=3), t.op("aten::nonzero"), t.op("cudaMemcpy"):
            pass
        with t.range("optimizer"), t.op("aten::item"), t.op("aten::_local_scalar_dense"):
            pass  # of a number in the host's memory
    assert waits_of(t) == {
        ("aten::item", "forward"): 2,
        ("cudaDeviceSynchronize", "forward"): 1,
        ("aten::nonzero", "backward"): 1,
    }


def test_without_a_gpu_what_would_wait_is_named_but_in_the_optimizer(t):
    for phase in ("forward", "optimizer"):
        with t.range(phase), t.op("aten::item"), t.op("aten::_local_scalar_dense"):
            pass
    assert waits_of(t) == {("aten::item", "forward"): 1}
