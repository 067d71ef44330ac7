"""Which operation, category and phase does a kernel's time belong to?

profile_baseline.py explains the method.  profiler.py opens named ranges around parts of the model,
and `category_of` finds the range that a kernel was launched for.
"""

import itertools
import re
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from harness.profiling import kernel_facts
from harness.profiling.costs import NO_COST, Cost, cost_of_kernel
from harness.profiling.kernel_facts import ADAPTERS, KERNEL_ROWS, OTHER, PHASES, Sizes

PROJECTION = "projection"  # the range of one alone, inside the range of it and its adapter
CATEGORY_OF_RANGE = {
    **{name: name for name in ("normalization", "loss", "rotary", "optimizer", ADAPTERS)},
    # what is no matmul and no attention in them
    "mlp": "activation",
    **dict.fromkeys(("attention", "embedding", PROJECTION), OTHER),
}
MATMUL_OPERATION = re.compile(r"aten::(_scaled_|add|b|badd)?mm_?$|aten::(matmul|linear)$")
ATTENTION_OPERATION = re.compile(r"scaled_dot_product|_(flash|efficient|cudnn)_attention")
# our autograd.Functions, by a part of their names
CATEGORY_OF_FUNCTION = {name: each for row in KERNEL_ROWS for name, each in row.functions.items()}
CATEGORY_OF_KERNEL = {  # attention's kernels may be made of CUTLASS
    "attention": re.compile("flash|fmha|sdpa"),
    "matmul": re.compile("gemm|cutlass|nvjet|splitK"),
    # copies.  FSDP2's also cat and split; DDP's into a bucket multiply by 1 / processes.
    OTHER: re.compile("[cC]opy|Memcpy|chunk_cat|UnaryFunctor<[^>]*MulFunctor"),
}
NCCL = "nccl"  # how the names of its kernels begin
RUNTIME_CALL = re.compile(r"cu(da)?[A-Z]")  # cudaLaunchKernel, cuLaunchKernelEx and others
LAUNCH_CALL = re.compile(r"cu(da)?(Launch|Mem(cpy|set).*Async)")
WAITING_CALL = re.compile(r"cu(da)?\w*Synchronize|cudaMemcpy$")  # the host waits for the GPU
READING_OPERATION = re.compile(r"aten::_local_scalar_dense$")  # .item() calls it
# CUPTI's names for what the profiler and the driver do to the run
PROFILER_OVERHEADS = {
    *("Command Buffer Full", "Buffer Flush", "Activity Buffer Request", "Instrumentation"),
    *("Driver Compiler", "Lazy Function Loading", "Runtime Triggered Module Loading"),
    *("UVM Activity Init", "Resource", "Unknown"),
}
EVALUATE = "autograd::engine::evaluate_function: "  # opened by autograd around each backward node
BACKWARD_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION: the backward node itself


@dataclass(frozen=True, eq=False)
class Work:
    """A GPU kernel, copy or fill; without a GPU an operation, and its launcher is itself."""

    name: str
    us: float
    launcher: FunctionEvent | None  # None: the profiler recorded no launch of the kernel


def is_operation(event: FunctionEvent) -> bool:
    """Return True for an operator or an autograd node on the CPU."""
    return (
        event.device_type == DeviceType.CPU
        and not event.is_user_annotation
        and event.id != 0  # a Python frame has 0
        and not RUNTIME_CALL.match(event.name)
        and event.name not in PROFILER_OVERHEADS
    )


def is_evaluation(event: FunctionEvent | None) -> bool:
    """Return True for autograd's wrapper around a backward node, which also adds gradients."""
    return event is not None and event.name.startswith(EVALUATE)


def gpu_events(events: list[FunctionEvent]) -> list[FunctionEvent]:
    """Return kernels, copies and fills, without ranges and the profiler's own overheads."""
    on_gpu = (e for e in events if e.device_type == DeviceType.CUDA)
    return [e for e in on_gpu if not e.is_user_annotation and e.name not in PROFILER_OVERHEADS]


def work_of(events: list[FunctionEvent]) -> list[Work]:
    """Return each kernel exactly once; without a GPU, every operation.

    The profiler copies each kernel's name and duration to the operation that launched the kernel.
    A kernel that Python launched inside a range has no such operation.  Then the CUDA call with the
    kernel's id leads to the range.
    """
    kernels = gpu_events(events)
    if not kernels:
        return [Work(e.name, e.self_cpu_time_total, e) for e in events if is_operation(e)]
    launchers = defaultdict(deque)
    for operation in filter(is_operation, events):
        for kernel in operation.kernels:
            launchers[kernel.name, kernel.duration].append(operation)
    on_host = (e for e in events if e.device_type == DeviceType.CPU)
    calls = {e.id: e for e in on_host if RUNTIME_CALL.match(e.name)}
    work = []
    for kernel in kernels:
        us = kernel.time_range.elapsed_us()
        launcher = None
        if launchers[kernel.name, us]:
            launcher = launchers[kernel.name, us].popleft()
        elif kernel.id in calls:
            launcher = calls[kernel.id].cpu_parent
        work.append(Work(kernel.name, us, launcher))
    return work


def ancestors(event: FunctionEvent | None) -> Iterator[FunctionEvent]:
    """Yield the event, its caller, the caller's caller and so on."""
    while event is not None:
        yield event
        event = event.cpu_parent


def forward_operations(events: list[FunctionEvent]) -> dict[tuple[int, int], FunctionEvent]:
    """Return the forward operation that created a backward node, by (thread, sequence number).

    Of several operations with one number, the last to start created the node.
    """
    numbered = (e for e in events if is_operation(e) and e.sequence_nr >= 0)
    forward = [e for e in numbered if e.scope != BACKWARD_SCOPE and not is_evaluation(e)]
    forward.sort(key=lambda e: e.time_range.start)
    return {(e.thread, e.sequence_nr): e for e in forward}


def lineage(
    event: FunctionEvent | None, forward: dict[tuple[int, int], FunctionEvent]
) -> Iterator[FunctionEvent]:
    """Yield the event and its callers; from a backward node on, those of the forward operation.

    The backward runs on a thread of its own, outside of all ranges.  But a backward node carries
    the number of the forward operation that created it.
    """
    while event is not None:
        yield event
        if event.scope == BACKWARD_SCOPE or is_evaluation(event):
            event = forward.get((event.fwd_thread, event.sequence_nr))
        else:
            event = event.cpu_parent


def category_of(
    launcher: FunctionEvent, forward: dict[tuple[int, int], FunctionEvent], rank: int | None = None
) -> str:
    """Return the category of a kernel that `launcher` launched.  The heart of the profile.

    1. Where two paths of the network meet (a residual; q, k and v of one input), autograd adds
       their gradients outside of any backward node.  No layer owns that addition.
    2. Else walk outwards to the first thing that tells: fused attention, a matrix product, a range,
       or one of our autograd.Functions by its name.  A product with an adapter's matrix, whose
       `rank` tells it, belongs to the adapter.
    """
    if launcher.name in ("aten::add", "aten::add_") and is_evaluation(launcher.cpu_parent):
        return OTHER
    for event in lineage(launcher, forward):
        # attention that is written out consists of matrix products
        if any(ATTENTION_OPERATION.search(each.name) for each in ancestors(event)):
            return "attention"
        if MATMUL_OPERATION.match(event.name):
            return ADAPTERS if in_adapter(launcher, forward, rank) else "matmul"
        if event.is_user_annotation and event.name in CATEGORY_OF_RANGE:
            return CATEGORY_OF_RANGE[event.name]
        for name, category in CATEGORY_OF_FUNCTION.items():
            if name in event.name:
                return category
    return OTHER


def in_adapter(
    product: FunctionEvent, forward: dict[tuple[int, int], FunctionEvent], rank: int | None
) -> bool:
    """Return True if a product belongs to an adapter, and not to the projection beside it.

    peft's modules have ranges around them.  Our Functions have none: there a product belongs to an
    adapter if its smallest side is the rank, or two or three ranks that share an input.
    """
    for event in lineage(product, forward):
        if event.is_user_annotation and event.name in (ADAPTERS, PROJECTION):
            return event.name == ADAPTERS
        if rank is not None and any(name in event.name for name in CATEGORY_OF_FUNCTION):
            sides = [side for shape in product.input_shapes for side in shape]
            return bool(sides) and min(sides) in (rank, 2 * rank, 3 * rank)
    return False


def phase_of(launcher: FunctionEvent) -> str:
    """Return the innermost phase around an event; the loss lies inside the forward."""
    for event in ancestors(launcher):
        if is_evaluation(event):
            return "backward"
        if event.is_user_annotation and event.name in PHASES:
            return event.name
    return "other"


def category_by_name(name: str) -> str | None:
    """Return the category of a kernel of NCCL or ours; AdamW's may run in the backward."""
    if name.startswith(NCCL):
        return kernel_facts.COMMUNICATION
    row, _ = kernel_facts.launch_of(name) or (None, None)
    return None if row is None else row.category


def category_of_kernel(name: str) -> str:
    """Return the category that a kernel's name tells if the kernel's launch was not recorded."""
    known = (c for c, pattern in CATEGORY_OF_KERNEL.items() if pattern.search(name))
    return next(known, kernel_facts.UNATTRIBUTED)


def busy_us(events: list[FunctionEvent]) -> float:
    """Return the time in which at least one kernel ran (without a GPU: one operation)."""
    return covered_us(gpu_events(events) or [e for e in events if is_operation(e)])


def covered_us(timed: list[FunctionEvent]) -> float:
    """Return the time in which at least one of these events ran."""
    total, busy_until = 0.0, float("-inf")
    for start, end in sorted((e.time_range.start, e.time_range.end) for e in timed):
        total += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    return total


def counted_once(events: list[FunctionEvent], costs: dict[int, Cost]) -> dict[int, Cost]:
    """Return the costs of a run without a GPU, where calling and called operations both count.

    The larger count wins: the operation's own, or the sum of the operations that it calls.
    """

    def visit(event: FunctionEvent) -> dict[int, Cost]:
        own, inside = costs.get(event.id, NO_COST), visit_all(event.cpu_children)
        larger = own.n_bytes > sum(cost.n_bytes for cost in inside.values())
        return {event.id: own} if larger else inside

    def visit_all(events: list[FunctionEvent]) -> dict[int, Cost]:
        return {number: cost for event in events for number, cost in visit(event).items()}

    return visit_all([event for event in events if event.cpu_parent is None])


def attribute(
    events: list[FunctionEvent],
    costs: dict[int, Cost] | None = None,
    sizes: Sizes | None = None,
    rank: int | None = None,
) -> dict:
    """Return operations, categories and phases in numbers; each of the three has the same sum.

    Args:
        costs: what each operation moves and computes, by the operation's number; 0 unless given.
        sizes: of the model, from which the costs of our kernels follow; 0 unless given.
    """
    on_gpu = bool(gpu_events(events))
    costs = (costs if on_gpu else counted_once(events, costs)) if costs else {}
    forward = forward_operations(events)
    time, work_done = {"us": 0.0, "launches": 0}, {"bytes": 0.0, "flops": 0.0, "fp8_flops": 0.0}
    operations = defaultdict(lambda: {"launchers": set(), **time, **work_done})
    categories = {name: {**time, **work_done} for name in kernel_facts.CATEGORIES}
    phases = {name: {**time} for name in (*PHASES, "other")}
    pieces = work_of(events)
    launches = Counter(work.name for work in pieces)
    for work in pieces:
        # the operation nearest to the kernel; a kernel launched from a range stands for itself
        operation = next(filter(is_operation, ancestors(work.launcher)), None)
        row = operations[operation.name if operation else work.name]
        cost = cost_of_kernel(work.name, launches[work.name], sizes) if sizes else None
        if cost is None:  # the cost of its operation, once
            counts = operation is not None and operation not in row["launchers"]
            cost = costs.get(operation.id, NO_COST) if counts else NO_COST
        row["launchers"].add(operation or work)
        category, phase = category_of_kernel(work.name), "other"
        if work.launcher is not None:
            category = category_of(work.launcher, forward, rank)
            phase = phase_of(work.launcher)
        of_category = categories[category_by_name(work.name) or category]
        for part in (row, of_category, phases[phase]):
            part["us"] += work.us
            part["launches"] += 1
        for part in (row, of_category):
            for key, amount in zip(work_done, cost):
                part[key] += amount
    rows = [
        {"name": name, "calls": len(row.pop("launchers")), **row}
        for name, row in operations.items()
    ]
    return {
        "device": "CUDA" if on_gpu else "CPU",
        "operations": sorted(rows, key=lambda row: -row["us"]),
        "categories": categories,
        "phases": phases,
        "busy_us": busy_us(events),
    }


def host_waits(events: list[FunctionEvent]) -> list[dict]:
    """Return the operations in which the host waits for the GPU, how often and in which phase.

    The waiting that begins and ends the timing of a step does not count.  Without a GPU nobody
    waits; .item() and its callers are listed, because they would.  The optimizer's .item() is left
    out there: the optimizer keeps its counts of steps in the host's memory.
    """
    on_gpu = bool(gpu_events(events))
    waiting = WAITING_CALL if on_gpu else READING_OPERATION
    waits = Counter()
    for event in events:
        if event.device_type == DeviceType.CPU and waiting.match(event.name):
            phase = phase_of(event)
            callers = [e.name for e in ancestors(event) if e.name.startswith("aten::")]
            timing = phase == "other" and not callers
            if not timing and (on_gpu or phase != "optimizer"):
                waits[callers[-1] if callers else event.name, phase] += 1
    return [{"name": name, "phase": phase, "calls": n} for (name, phase), n in waits.most_common()]


def idle_times(events: list[FunctionEvent]) -> dict:
    """Return the microseconds in which the GPU waited for the host, and why.

    A gap between two kernels is the GPU's own if the second kernel was launched before the first
    ended.  In every other gap the GPU waited for the host (`idle_us`).  If the host came back from
    waiting for the GPU in the gap, that is why nothing was queued (`synchronization_us`).  If not,
    the host was too slow: `host_us` is its median time from the launch before to such a launch.
    """
    on_host = [e for e in events if e.device_type == DeviceType.CPU]
    on_host.sort(key=lambda e: e.time_range.start)
    returns = [e.time_range.end for e in on_host if WAITING_CALL.match(e.name)]
    calls = [e for e in on_host if LAUNCH_CALL.match(e.name)]
    launched = {call.id: (call, before) for before, call in itertools.pairwise(calls)}
    first, *others = sorted(gpu_events(events), key=lambda e: e.time_range.start)
    idle, waited, paces, busy_until = 0.0, 0.0, [], first.time_range.end
    for kernel in others:
        start, (call, before) = kernel.time_range.start, launched.get(kernel.id, (None, None))
        if call is not None and start > busy_until and call.time_range.end > busy_until:
            idle += start - busy_until
            if any(busy_until <= returned <= start for returned in returns):
                waited += start - busy_until
            else:
                paces.append(call.time_range.start - before.time_range.start)
        busy_until = max(busy_until, kernel.time_range.end)
    return {
        "idle_us": idle,
        "synchronization_us": waited,
        "host_us": statistics.median(paces or [0.0]),
    }


def times_by_kind(events: list[FunctionEvent]) -> dict:
    """Return the microseconds in which kernels of a kind ran; their names tell the kind.

    communication_us: NCCL's; exposed_us: NCCL's alone.  Both include the waiting for processes that
    come later.  products_us: matrix products; copies_us: copies beside which no product ran.
    """
    named = defaultdict(list)
    for kernel in gpu_events(events):
        named[category_by_name(kernel.name) or category_of_kernel(kernel.name)].append(kernel)
    nccl = named.pop(kernel_facts.COMMUNICATION, [])
    products, copies = named["matmul"], named[OTHER]
    others = [*itertools.chain(*named.values())]
    return {
        "communication_us": covered_us(nccl),
        "exposed_us": covered_us(nccl + others) - covered_us(others),
        "products_us": covered_us(products),
        "copies_us": covered_us(products + copies) - covered_us(products),
    }
