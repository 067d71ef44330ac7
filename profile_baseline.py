"""Steps 3, 7 and 10: where does the GPU time and memory of one training step go?

    python profile_baseline.py                                       # step 3: PyTorch as it ships
    python profile_baseline.py --use-custom-rmsnorm                  # step 7: one kernel replaced
    python profile_baseline.py --use-custom-rmsnorm --use-custom-ce  # step 10: both
    python profile_baseline.py --random-init                         # without access to the weights
    python profile_baseline.py --memory --plot memory.png            # what fills the memory, at the peak and before it
    python profile_baseline.py --estimate                            # the memory alone, before a run, on any machine
    python profile_baseline.py --json a.json --plot a.png            # what each part could gain, as a picture too
    python profile_baseline.py --compare a.json b.json               # what a kernel changed, beside what was predicted

The profiler records two streams of events: operations that the CPU calls
(aten::mm) and kernels that they make the GPU run.  A kernel knows the operation
that launched it, but `aten::mul` may be a norm, the loss or AdamW.  To tell them
apart the script opens named ranges around parts of the model, and finds for each
kernel the range that it was launched for (`category_of`).

Without a GPU the CPU time of each operation takes the kernels' place.  What the numbers mean, diagnose.py tells.
"""

# first: importing PyTorch takes seconds
from harness import quiet_interrupt  # noqa: F401  # isort: skip

import argparse
import contextlib
import gzip
import itertools
import json
import re
import statistics
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from harness import (
    architecture,
    command_line,
    dataset,
    diagnose,
    loading,
    output_files,
    run_records,
    stepping,
    tables,
    timing,
)
from harness.command_line import RunError, UserError
from harness.device import DEVICE, HAS_GPU
from harness.diagnose import NOTHING, OTHER, Cost, Sizes
from harness.workload import add_workload_flags, workload_line
from next_steps import memory_estimate, memory_profile
from next_steps.apply_kernels import KERNELS, apply_kernels, make_optimizer, model_kernels
from next_steps.apply_kernels import LlamaDecoderLayer as FusedDecoderLayer
from next_steps.apply_kernels import LlamaForCausalLM as LlamaWithLossKernels

# after `measure`, which decides how triton (imported by transformers) will run
from transformers.models.llama import modeling_llama  # isort: skip

TIMED_STEPS = 3
RECORD_SECOND = schedule(wait=0, warmup=1, active=1, repeat=1)
TOP = 20
UNATTRIBUTED = "unattributed"
IGNORED = {"estimate": ["data", "seed", "warmup", "trace", "stacks"], "memory": ["trace", "stacks"]}  # flags, by others
CATEGORIES = [
    "matmul", "attention", "normalization", "loss", "activation", "rotary", OTHER, "optimizer", UNATTRIBUTED,
]  # fmt: skip
PHASES = ["forward", "loss", "backward", "optimizer", "other"]

# "forward", "backward" and "optimizer" are opened by stepping.training_step, the others here
RANGE_OF_CLASS = {
    "LlamaRMSNorm": "normalization", "TritonRMSNorm": "normalization", "LlamaMLP": "mlp", "TritonLlamaMLP": "mlp",
    "LlamaAttention": "attention", "LlamaRotaryEmbedding": "rotary", "Embedding": "embedding",
}  # fmt: skip
CATEGORY_OF_RANGE = {
    "normalization": "normalization", "loss": "loss", "rotary": "rotary", "optimizer": "optimizer",
    "mlp": "activation", "attention": OTHER, "embedding": OTHER,  # what is not a matmul or SDPA there
}  # fmt: skip

MATMUL_OPERATION = re.compile(r"aten::(_scaled_|add|b|badd)?mm_?$|aten::(matmul|linear)$")
ATTENTION_OPERATION = re.compile(r"scaled_dot_product|_(flash|efficient|cudnn)_attention")
# our autograd.Functions; a norm_linear is a norm and matrix products, and these are told apart before
CATEGORY_OF_FUNCTION = {
    "RMSNorm": "normalization", "NormLinear": "normalization", "CrossEntropy": "loss", "SwiGLU": "activation",
    "RoPE": "rotary",
}  # fmt: skip
# our Triton kernels, wherever they are launched from: AdamW's may run during the backward
CATEGORY_OF_TRITON_KERNEL = {
    "_rmsnorm": "normalization", "_cross_entropy": "loss", "_scale": "loss", "_swiglu": "activation", "_rope": "rotary",
    "_adamw": "optimizer",
}  # fmt: skip
CATEGORY_OF_KERNEL = {"matmul": re.compile("gemm|cutlass|nvjet"), "attention": re.compile("flash|fmha|sdpa")}
RUNTIME_CALL = re.compile(r"cu(da)?[A-Z]")  # cudaLaunchKernel, cuLaunchKernelEx, cudaMemcpyAsync, ...
LAUNCH_CALL = re.compile(r"cu(da)?(Launch|Mem(cpy|set).*Async)")
WAITING_CALL = re.compile(r"cu(da)?\w*Synchronize|cudaMemcpy$")  # the host waits until the GPU is done
PROFILER_OVERHEADS = {  # CUPTI's names for what the profiler and the driver do to the run
    "Command Buffer Full", "Buffer Flush", "Instrumentation", "Resource", "Activity Buffer Request", "Driver Compiler",
    "Lazy Function Loading", "Runtime Triggered Module Loading", "UVM Activity Init", "Unknown",
}  # fmt: skip
EVALUATE = "autograd::engine::evaluate_function: "  # opened by autograd around each backward node
BACKWARD_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION: the backward node itself


# ---------------------------------------------------------------- ranges


def in_range(name: str, function: Callable) -> Callable:
    """`function`, run inside a profiler range."""

    def ranged(*args, **kwargs):
        with record_function(name):
            return function(*args, **kwargs)

    return ranged


def range_hooks(module: torch.nn.Module, name: str) -> list:
    """Forward hooks that open and close a profiler range around `module`; returns their handles."""
    opened = []

    def open_range(module, inputs):
        opened.append(record_function(name))
        opened[-1].__enter__()

    def close_range(module, inputs, output):
        opened.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(open_range), module.register_forward_hook(close_range)]


@contextlib.contextmanager
def category_ranges(model: torch.nn.Module) -> Iterator[None]:
    """Name the parts of the model for the profiler; everything is as before afterwards.

    Rotary embedding and loss are functions, not modules.  LlamaAttention.forward
    looks `apply_rotary_pos_emb` up in its module each time, so it can be replaced there.
    """
    # a fused layer does not call its parts, and where they are hooked it would, to honour the hooks
    layers = [module for module in model.modules() if isinstance(module, FusedDecoderLayer)]
    fused = {part for layer in layers for part in layer.modules()}
    handles = [
        handle
        for module in model.modules()
        if type(module).__name__ in RANGE_OF_CLASS and module not in fused
        for handle in range_hooks(module, RANGE_OF_CLASS[type(module).__name__])
    ]
    # a loss_function of our own would take the place of the model's kernel
    loss = "cross_entropy_loss" if isinstance(model, LlamaWithLossKernels) else "loss_function"
    loss_function, rotary = getattr(model, loss), modeling_llama.apply_rotary_pos_emb
    setattr(model, loss, in_range("loss", loss_function))
    modeling_llama.apply_rotary_pos_emb = in_range("rotary", rotary)
    try:
        yield
    finally:
        setattr(model, loss, loss_function)
        modeling_llama.apply_rotary_pos_emb = rotary
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------- attribution: whose time is this?


@dataclass(frozen=True, eq=False)
class Work:
    """One piece of time to explain: a GPU kernel, copy or fill, and the CPU event that launched it.

    Without a GPU: an operation and the CPU time that it spent itself.
    """

    name: str
    us: float
    launcher: FunctionEvent | None  # None: the profiler recorded no launch for this kernel


def is_operation(event: FunctionEvent) -> bool:
    """An operator or autograd node on the CPU: no range, CUDA call, overhead, or Python frame (their id is 0)."""
    return (
        event.device_type == DeviceType.CPU
        and not event.is_user_annotation
        and event.id != 0
        and not RUNTIME_CALL.match(event.name)
        and event.name not in PROFILER_OVERHEADS
    )


def is_evaluation(event: FunctionEvent | None) -> bool:
    """Autograd's wrapper around a backward node, in which it also adds and reduces gradients."""
    return event is not None and event.name.startswith(EVALUATE)


def gpu_events(events: list[FunctionEvent]) -> list[FunctionEvent]:
    """Kernels, copies and fills.

    Not the other two that appear on the GPU's timeline: ranges, which would
    count twice, and the profiler's own overheads, in which the GPU does nothing.
    """
    on_gpu = (e for e in events if e.device_type == DeviceType.CUDA)
    return [e for e in on_gpu if not e.is_user_annotation and e.name not in PROFILER_OVERHEADS]


def work_of(events: list[FunctionEvent]) -> list[Work]:
    """Everything that took time, each kernel exactly once; without a GPU, every operation.

    The profiler copies each kernel's name and duration to the operation that
    launched it.  A kernel launched straight from Python inside a range has no
    such operation; then the CUDA call that carries the kernel's id leads to the range.
    """
    kernels = gpu_events(events)
    if not kernels:
        return [Work(e.name, e.self_cpu_time_total, e) for e in events if is_operation(e)]
    launchers = defaultdict(deque)
    for operation in filter(is_operation, events):
        for kernel in operation.kernels:
            launchers[kernel.name, kernel.duration].append(operation)
    calls = {e.id: e for e in events if e.device_type == DeviceType.CPU and RUNTIME_CALL.match(e.name)}
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
    """The event, what called it, and so on outwards."""
    while event is not None:
        yield event
        event = event.cpu_parent


def forward_operations(events: list[FunctionEvent]) -> dict[tuple[int, int], FunctionEvent]:
    """(thread, sequence number) -> the forward operation that created the backward node of that number.

    An operation carries the number that the next backward node will get, so of
    several with one number the last to start is the one that created the node.
    """
    forward = [
        e
        for e in events
        if is_operation(e) and e.sequence_nr >= 0 and e.scope != BACKWARD_SCOPE and not is_evaluation(e)
    ]
    forward.sort(key=lambda e: e.time_range.start)
    return {(e.thread, e.sequence_nr): e for e in forward}


def category_of(launcher: FunctionEvent, forward: dict[tuple[int, int], FunctionEvent]) -> str:
    """Whose time is a kernel that `launcher` launched?  The heart of this script.

    1. Fused attention or a matrix product among the launcher and its callers decides.
    2. Where two paths of the network meet (a residual; q, k and v of one input)
       autograd adds their gradients, outside of any backward node.  No layer owns that add.
    3. Otherwise walk outwards to the first thing that tells: a range, one of our
       autograd.Functions by its name, or a backward node.  The backward pass runs
       on a thread of its own, outside of all ranges, but its nodes carry the number
       of the forward operation that created them, and what was true of that is true here.
    """
    callers = list(ancestors(launcher))
    if any(ATTENTION_OPERATION.search(event.name) for event in callers):
        return "attention"
    if any(MATMUL_OPERATION.match(event.name) for event in callers):
        return "matmul"
    if launcher.name in ("aten::add", "aten::add_") and is_evaluation(launcher.cpu_parent):
        return OTHER
    for event in callers:
        if event.is_user_annotation and event.name in CATEGORY_OF_RANGE:
            return CATEGORY_OF_RANGE[event.name]
        for name, category in CATEGORY_OF_FUNCTION.items():
            if name in event.name:
                return category
        if event.scope == BACKWARD_SCOPE or is_evaluation(event):
            origin = forward.get((event.fwd_thread, event.sequence_nr))
            return category_of(origin, forward) if origin is not None else OTHER
    return OTHER


def phase_of(launcher: FunctionEvent) -> str:
    """forward, loss, backward or optimizer; the loss lies inside forward, so the innermost range decides."""
    for event in ancestors(launcher):
        if is_evaluation(event):
            return "backward"
        if event.is_user_annotation and event.name in PHASES:
            return event.name
    return "other"


def category_of_triton_kernel(name: str) -> str | None:
    """The category of one of our own kernels, by its name."""
    return next((category for start, category in CATEGORY_OF_TRITON_KERNEL.items() if name.startswith(start)), None)


def category_of_kernel(name: str) -> str:
    """What a kernel's name gives away when its launch was not recorded."""
    return next((c for c, pattern in CATEGORY_OF_KERNEL.items() if pattern.search(name)), UNATTRIBUTED)


def busy_us(events: list[FunctionEvent]) -> float:
    """Time in which at least one kernel ran (without a GPU: one operation)."""
    timed = gpu_events(events) or [e for e in events if is_operation(e)]
    total, busy_until = 0.0, float("-inf")
    for start, end in sorted((e.time_range.start, e.time_range.end) for e in timed):
        total += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    return total


def counted_once(events: list[FunctionEvent], costs: dict[int, Cost]) -> dict[int, Cost]:
    """The costs without a GPU, where an operation that calls others is work too: its own or theirs, whichever is more.

    On a GPU the operation that launched a kernel did the work.
    """

    def visit(event: FunctionEvent) -> dict[int, Cost]:
        inside = {number: cost for child in event.cpu_children for number, cost in visit(child).items()}
        own = costs.get(event.id, NOTHING)
        return {event.id: own} if own.n_bytes > sum(cost.n_bytes for cost in inside.values()) else inside

    return {number: cost for e in events if e.cpu_parent is None for number, cost in visit(e).items()}


def attribute(events: list[FunctionEvent], costs: dict[int, Cost] | None = None, sizes: Sizes | None = None) -> dict:
    """The profile in numbers: operations, categories and phases, each of which adds up to the same total.

    Args:
        costs: what each operation moves and computes, by its number; 0 unless given.
        sizes: of the model, for the same of our kernels; 0 unless given.
    """
    on_gpu = bool(gpu_events(events))
    costs = (costs if on_gpu else counted_once(events, costs)) if costs else {}
    forward = forward_operations(events)
    operations = defaultdict(lambda: {"us": 0.0, "launchers": set(), "launches": 0, "bytes": 0.0, "flops": 0.0})
    categories = {name: {"us": 0.0, "launches": 0, "bytes": 0.0, "flops": 0.0} for name in CATEGORIES}
    phases = {name: {"us": 0.0, "launches": 0} for name in PHASES}
    pieces = work_of(events)
    launches = Counter(work.name for work in pieces)
    for work in pieces:
        # the operation nearest to the kernel; a kernel launched straight from a range stands for itself
        operation = next(filter(is_operation, ancestors(work.launcher)), None)
        row = operations[operation.name if operation else work.name]
        cost = diagnose.cost_of_kernel(work.name, launches[work.name], sizes) if sizes else None
        if cost is None:  # that of its operation, once
            counts = operation is not None and operation not in row["launchers"]
            cost = costs.get(operation.id, NOTHING) if counts else NOTHING
        row["launchers"].add(operation or work)
        category, phase = category_of_kernel(work.name), "other"
        if work.launcher is not None:
            category, phase = category_of(work.launcher, forward), phase_of(work.launcher)
        category = category_of_triton_kernel(work.name) or category
        for part in (row, categories[category], phases[phase]):
            part["us"] += work.us
            part["launches"] += 1
        for part in (row, categories[category]):
            part["bytes"] += cost.n_bytes
            part["flops"] += cost.flops
    rows = [{"name": name, "calls": len(row.pop("launchers")), **row} for name, row in operations.items()]
    return {
        "device": "CUDA" if on_gpu else "CPU",
        "operations": sorted(rows, key=lambda row: -row["us"]),
        "categories": categories,
        "phases": phases,
        "busy_us": busy_us(events),
    }


def idle_times(events: list[FunctionEvent]) -> dict:
    """Where did the GPU have nothing to do between its first kernel and its last, and why?  Microseconds.

    Where a kernel had been launched before the one ahead of it ended, the time between the two is the GPU's own.  Else
    it waited for the host.  If the host came back from waiting for the GPU in that gap, that is why nothing had been
    queued; if not, it was too slow: `host_us` is its median time from the launch before to such a launch.
    """
    on_host = sorted((e for e in events if e.device_type == DeviceType.CPU), key=lambda e: e.time_range.start)
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
    return {"idle_us": idle, "synchronization_us": waited, "host_us": statistics.median(paces or [0.0])}


# ---------------------------------------------------------------- the run


def timed_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dataset.Batch) -> float:
    """One training step, milliseconds."""
    with record_function("step"):
        _, seconds = stepping.timed_step(model, optimizer, batch)
    return 1e3 * seconds


def last_of(profiler: profile, model, optimizer, batches: list[dataset.Batch]) -> tuple[profile, float]:
    """A step on each of two batches; the second one's profile and milliseconds.

    The first is thrown away: it pays for attaching the profiler to the GPU.
    """
    with profiler:
        for batch in batches:
            step_ms = timed_step(model, optimizer, batch)
            profiler.step()
    if HAS_GPU and not gpu_events(profiler.events()):
        raise RunError("no GPU kernel was recorded; do not run this under another profiler (nsys, ncu)")
    return profiler, step_ms


def profiled_step(model, optimizer, batches: list[dataset.Batch], stacks: bool) -> tuple[profile, float]:
    """Which kernel was launched for what, with the shapes of all operations, at the host's expense: see `timeline`."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if HAS_GPU else [])
    profiler = profile(activities=activities, schedule=RECORD_SECOND, record_shapes=True, with_stack=stacks)
    with category_ranges(model):
        return last_of(profiler, model, optimizer, batches)


def timeline(model, optimizer, batches: list[dataset.Batch]) -> dict:
    """When the GPU is idle, from a step in which kernels and CUDA calls alone are recorded.

    Recording operations slows the host down, up to a quarter where it is what the GPU waits for; a kernel takes as long
    as ever, but the time between kernels would be the profiler's.
    """
    profiler, step_ms = last_of(
        profile(activities=[ProfilerActivity.CUDA], schedule=RECORD_SECOND), model, optimizer, batches
    )
    return {"step_ms": step_ms, **idle_times(profiler.events())}


def measure_ceilings(dtype: torch.dtype) -> dict:
    """What this GPU can do at most; before the model is built, which needs the memory."""
    ceilings = {"copy_gbs": timing.copy_bandwidth(), "matmul_tflops": timing.matmul_rate(dtype=dtype)}
    if HAS_GPU:
        torch.cuda.empty_cache()
    return ceilings


def write_trace(profiler: profile, path: str) -> tuple[dict, int]:
    """Write a profile as a Chrome trace, compressed if `path` ends in .gz; returns its content and the file's bytes.

    The profiler replaces what it is pointed at, be it a link or a device, and does not say where it fails.  So it gets
    a file of our own.

    Raises:
        RunError: there is no room for that file, or `path` cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        try:
            content = file.read_bytes()
            trace = json.loads(content)
        except (FileNotFoundError, ValueError) as error:  # nothing was written, or a part
            raise RunError(
                f"the profiler could not write its trace in {tempfile.gettempdir()}: make room there, "
                "or set TMPDIR to a folder with room"
            ) from error
    if path.endswith(".gz"):
        content = gzip.compress(content)
    output_files.write_output(path, content, "the trace")
    return trace, len(content)


def profile_training(args: argparse.Namespace) -> dict:
    """Train a few steps, profile one, write its trace; returns the record.

    Time and peak memory come from steps without the profiler, which slows the CPU down.
    """
    ceilings = measure_ceilings(architecture.TORCH_DTYPES[args.dtype])
    model = loading.load_model(args, memory_estimate.step_tryer(args.kernels))
    apply_kernels(model, model_kernels(args.kernels))
    sizes = diagnose.sizes_of(model.config, args)
    data = dataset.load_data(args, model.config, args.warmup + TIMED_STEPS + 4)
    optimizer = make_optimizer(model, 1e-5, args.kernels)
    batches = [batch.to(DEVICE) for batch in data.train]
    warmup, timed, profiled = batches[: args.warmup], batches[args.warmup : -4], batches[-4:]

    for batch in warmup:
        timed_step(model, optimizer, batch)
    resting_memory = torch.cuda.memory_allocated() if HAS_GPU else None
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    step_ms = [timed_step(model, optimizer, batch) for batch in timed]
    peak_memory = timing.peak_memory_bytes()
    idle = timeline(model, optimizer, profiled[:2]) if HAS_GPU else None
    profiler, profiled_ms = profiled_step(model, optimizer, profiled[2:], args.stacks)
    trace, trace_bytes = write_trace(profiler, args.trace)
    costs = diagnose.costs_of_trace(trace, sizes, args.seq_len, args.kernels)
    parts = attribute(profiler.events(), costs, sizes)
    return {
        "kind": "profile", "environment": run_records.environment(), "kernels": args.kernels,
        **llama.describe_workload(model, args), "warmup_steps": args.warmup,
        **parts, "ceilings": ceilings, "sizes": asdict(sizes), "timeline": idle,
        "step_ms": step_ms, "median_step_ms": statistics.median(step_ms), "profiled_step_ms": profiled_ms,
        "resting_memory_bytes": resting_memory, "peak_memory_bytes": peak_memory,
        "trace": args.trace, "trace_bytes": trace_bytes,
    }  # fmt: skip


# ---------------------------------------------------------------- output


def sum_table(headers: list[str], rows: list[tuple[str, float, int]]) -> str:
    """Rows of (name, microseconds, count) with each one's share, and their sum."""
    total = sum(us for _, us, _ in rows)
    rows = rows + [("Total", total, sum(count for _, _, count in rows))]
    return tables.table(
        headers,
        [[name, f"{us / 1e3:,.3f}ms", f"{100 * us / total:.1f}%", f"{count:,}"] for name, us, count in rows],
    )


def operations_table(record: dict) -> str:
    """The playbook's table, with one row for all the other operations, so that it adds up."""
    rows = [(row["name"][:60], row["us"], row["calls"]) for row in record["operations"]]
    rest = rows[TOP:]
    if rest:
        others = (f"({len(rest)} other operations)", sum(us for _, us, _ in rest), sum(n for _, _, n in rest))
        rows = [*rows[:TOP], others]
    return sum_table(["Name", f"Self {record['device']}", f"Self {record['device']} %", "# Calls"], rows)


def parts_table(header: str, parts: dict, device: str) -> str:
    """Categories or phases; the catch-all rows only where something fell into them."""
    rows = [(name, part["us"], part["launches"]) for name, part in parts.items()]
    rows = [row for row in rows if row[2] or row[0] not in (UNATTRIBUTED, "other")]
    return sum_table([header, f"{device} time", "Share", "Launches" if device == "CUDA" else "Operation calls"], rows)


def totals(record: dict) -> str:
    """Is the GPU kept busy, and how much memory does the step take?"""
    on_gpu = record["device"] == "CUDA"
    busy_ms, step_ms = record["busy_us"] / 1e3, record["median_step_ms"]
    idle = max(0.0, 1 - busy_ms / step_ms)
    resting = tables.number(record["resting_memory_bytes"] and record["resting_memory_bytes"] / 1e9)
    profiled = [("Step under the profiler:", f"{record['profiled_step_ms']:,.1f} ms")]
    if record.get("timeline"):
        slower = ("Kernels recorded:", record["timeline"]["step_ms"]), ("Shapes too:", record["profiled_step_ms"])
        profiled = [(name, f"{ms:,.1f} ms ({100 * (ms / step_ms - 1):+.1f} %)") for name, ms in slower]
    lines = [
        ("GPU busy:" if on_gpu else "In operations:", f"{busy_ms:,.1f} ms"),
        ("Step without the profiler:", f"{step_ms:,.1f} ms (median of {len(record['step_ms'])})"),
        *profiled,
        ("GPU idle share:" if on_gpu else "Outside operations:", f"{100 * idle:.1f} %"),
        ("Memory before the step:", f"{resting} GB (weights and optimizer state)" if on_gpu else resting),
        (f"Peak {'GPU' if on_gpu else 'process'} memory:", f"{record['peak_memory_bytes'] / 1e9:.1f} GB"),
    ]
    return "\n".join(f"{label:<28}{value}" for label, value in lines)


def render(record: dict) -> str:
    """Everything that the script prints about a run, from its record."""
    device = record["device"]
    kind = "GPU" if device == "CUDA" else "CPU"
    return "\n".join(
        [
            run_records.environment_line(record["environment"]),
            workload_line(record),
            "",
            tables.title(f"Top {TOP} {device} Operations by Total {kind} Time"),
            operations_table(record),
            "",
            parts_table("Category", record["categories"], device),
            "",
            parts_table("Phase", record["phases"], device),
            "",
            totals(record),
            "",
            *([diagnose.render(record), ""] if "ceilings" in record else []),  # older records have none
            f"Chrome trace: {record['trace']} ({record['trace_bytes'] / 1e6:.1f} MB); "
            "open it in https://ui.perfetto.dev",
        ]
    )


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add_workload_flags(parser)
    command_line.add_kernels_flag(parser, KERNELS, default="none")
    add = parser.add_argument
    add("--use-custom-rmsnorm", action="store_true", help="the same as --kernels rmsnorm")
    add("--use-custom-ce", action="store_true", help="the same as --kernels cross_entropy")
    add("--warmup", type=command_line.positive_int, default=3, metavar="N", help="unmeasured steps (default: 3)")
    add("--trace", metavar="FILE[.gz]", help="Chrome trace to write (default: traces/MODEL-SIZE-KERNELS.json)")
    add("--stacks", action="store_true", help="Python stacks in the trace, which makes it larger")
    add_mode = parser.add_mutually_exclusive_group().add_argument
    add_mode("--estimate", action="store_true", help="how much memory a step will need on a GPU; runs none")
    add_mode("--memory", action="store_true", help="what the memory of a step is made of; runs it")
    add_mode("--compare", nargs=2, metavar=("BEFORE.json", "AFTER.json"), help="two records of --json; runs nothing")
    add("--plot", metavar="FILE.png", help="the roofline as a picture; with --memory: the parts over the step")
    add("--memory-snapshot", metavar="FILE.pickle", help="with --memory: a step for https://pytorch.org/memory_viz")
    args = parser.parse_args(arguments)
    if args.memory_snapshot and not args.memory:
        raise UserError("--memory-snapshot shows the memory of a step: add --memory")
    ignored = IGNORED | {"compare": sorted(vars(args).keys() - {"compare", "plot"})}
    command_line.refuse_ignored(args, ignored)
    if args.plot and args.estimate:
        raise UserError("--plot draws the operations of a step, and --estimate runs none; give one of the two")
    if args.estimate and not HAS_GPU:  # it is of a run with one
        parser.set_defaults(seq_len=512, dtype="bf16")
        args = parser.parse_args(arguments)
    wanted = {"rmsnorm": args.use_custom_rmsnorm, "cross_entropy": args.use_custom_ce}
    args.kernels = [name for name in KERNELS if name in args.kernels or wanted.get(name)]
    if args.trace is None and not (args.estimate or args.memory or args.compare):
        kernels = "+".join(args.kernels) or "baseline"
        args.trace = f"traces/{Path(args.model).resolve().name}-{args.batch_size}x{args.seq_len}-{kernels}.json"
    return args


def main() -> None:
    args = parse_args()
    output_files.check_outputs(args)
    if args.compare:
        return diagnose.compare(*args.compare, args.plot)
    if args.estimate:
        return memory_estimate.report(args)
    if args.memory:
        return memory_profile.report(args)
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    record = profile_training(args)
    print(render(record))
    run_records.write_record(args.json, record)
    if args.plot:
        diagnose.plot([record], args.plot)


if __name__ == "__main__":
    command_line.run_main(main)
