"""A training step under PyTorch's profiler: named parts of the model, two recordings, the trace."""

import contextlib
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from harness.cli.command_line import RunError
from harness.cli.device import HAS_GPU, synchronize
from harness.cli.output_files import write_output
from harness.data import dataset
from harness.data.loader import Loader
from harness.model.adapters import has_adapter
from harness.model.families import FAMILIES, family_of
from harness.profiling import attribution
from harness.profiling.kernel_facts import ADAPTERS, KERNEL_ROWS
from harness.records.run_records import environment
from harness.steps import stepping, timing

# Batches of `measure_loading`.  The first may have been waiting, where a loader works ahead.
ALONE, TOGETHER = 7, 3
NEEDED = ALONE + TOGETHER
OF_THIS_MACHINE = "host_name", "traceName"  # of a trace; the second is a temporary file
# the training step opens "forward", "backward" and "optimizer"
RANGE_OF_PART = {
    "RMSNorm": "normalization",
    "MLP": "mlp",
    "Attention": "attention",
    "RotaryEmbedding": "rotary",
}
RANGE_OF_CLASS = {
    "Embedding": "embedding",
    **{
        ours: RANGE_OF_PART[theirs]
        for ours, theirs in (row.module for row in KERNEL_ROWS if row.module)
    },
    **{f.prefix + part: name for f in FAMILIES.values() for part, name in RANGE_OF_PART.items()},
}


# ---------------------------------------------------------------- ranges


@contextlib.contextmanager
def category_ranges(model: torch.nn.Module) -> Iterator[None]:
    """Open ranges around the parts of a model with or without kernels, until the context ends.

    Rotary embedding and loss are functions, not modules.  Attention's forward looks
    `apply_rotary_pos_emb` up in its Python module each time, so it can be replaced there.
    A module with `calls_no_parts` gets none: a range around a part would make it call its parts.
    """
    # another loss_function would take the place of the model's kernel
    loss = "cross_entropy_loss" if hasattr(model, "cross_entropy_loss") else "loss_function"
    modeling = family_of(model).modeling
    ranged = [(model, loss, "loss"), (modeling, "apply_rotary_pos_emb", "rotary")]
    whole = [each for each in model.modules() if getattr(each, "calls_no_parts", False)]
    fused = {part for each in whole for part in each.modules()}
    for module in model.modules():
        if module in fused:
            continue
        if name := RANGE_OF_CLASS.get(type(module).__name__.removeprefix("FSDP")):
            ranged.append((module, "forward", name))
        if has_adapter(module):
            ranged.append((module, "forward", ADAPTERS))
            ranged.append((module.base_layer, "forward", attribution.PROJECTION))
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in ranged:
            function = getattr(owner, attribute)
            if attribute == "forward" and attribute not in vars(owner):  # it is its class's
                stack.callback(delattr, owner, attribute)
            else:
                stack.callback(setattr, owner, attribute, function)
            setattr(owner, attribute, record_function(name)(function))
        yield


# ---------------------------------------------------------------- steps


def recorded_step(
    model,
    optimizer,
    steps: list[list[dataset.Batch]],
    take_step: Callable = stepping.training_step,
    **options,
) -> tuple[profile, float]:
    """Take a step that attaches the profiler; return a profile of the next and its milliseconds."""
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(schedule=schedule, **options) as profiler:
        for batches in steps:
            _, seconds = stepping.timed_step(model, optimizer, batches, take_step)
            profiler.step()
    if HAS_GPU and not attribution.gpu_events(profiler.events()):
        raise RunError(
            "no GPU kernel was recorded; do not run this under another profiler (nsys, ncu)"
        )
    return profiler, 1e3 * seconds


def profiled_step(
    model, optimizer, steps: list[list[dataset.Batch]], stacks: bool
) -> tuple[profile, float]:
    """Return a profile with all operations and their shapes, and the milliseconds of the step."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if HAS_GPU else [])
    options = {"activities": activities, "record_shapes": True, "with_stack": stacks}
    return recorded_step(model, optimizer, steps, **options)


def timeline(
    model, optimizer, steps: list[list[dataset.Batch]], take_step: Callable = stepping.training_step
) -> tuple[profile, dict]:
    """Return a profile of kernels and CUDA calls alone, and the times by their kinds and when idle.

    Recording operations too would slow the host down, by up to a quarter where the GPU waits for
    the host.  Kernels take the same time, but the time between them would be the profiler's.
    """
    activities = [ProfilerActivity.CUDA]
    profiler, ms = recorded_step(model, optimizer, steps, take_step, activities=activities)
    events = profiler.events()
    times = {**attribution.idle_times(events), **attribution.times_by_kind(events)}
    return profiler, {"step_ms": ms, "busy_us": attribution.busy_us(events), **times}


def measure_ceilings(dtype: torch.dtype, fp8: str | None = None) -> dict:
    """Measure how fast this GPU copies and multiplies: the "ceilings" of a record (ceilings.py).

    Needs twice 2 GiB: call it before training.
    """
    rates = {"copy_gbs": timing.copy_bandwidth(), **timing.matmul_rates(dtype)}
    if fp8 and HAS_GPU:
        rates |= timing.fp8_rates()
    if HAS_GPU:
        torch.cuda.empty_cache()
    return rates


# ---------------------------------------------------------------- does a step wait for its data?


def measure_loading(loader: Loader, take_step: Callable, resident_ms: float) -> dict:
    """Tell the loader's time from the step's, by three measurements; medians in milliseconds.

        alone       the next batch, and no step
        resident    a step whose batch is on the device already: `resident_ms`
        together    a step and, once its work is launched, the next one's batch

    A sum of two times cannot be told from one of them, so each is measured without the other.
    `waited_ms` is how long the device waited for a batch.  What the numbers mean: diagnose.py.

    Args:
        loader: has NEEDED steps' batches left to fetch.
        take_step: takes a step on such batches and does not wait for it.
    """
    alone, together, waited = [], [], []
    for _ in range(ALONE):
        start = from_idle()
        loader.fetch()
        alone.append(1e3 * (from_idle() - start))
    for _ in range(TOGETHER):
        batches = loader.take()
        start = from_idle()
        take_step(batches)
        waited_at_most = 1e3 * loader.fetch()
        together.append(1e3 * (from_idle() - start))
        waited.append(min(waited_at_most, max(0.0, together[-1] - resident_ms)))
    return {
        "alone_ms": statistics.median(alone),
        "resident_ms": resident_ms,
        "together_ms": statistics.median(together),
        "waited_ms": statistics.median(waited),
    }


def from_idle() -> float:
    """Return the time in seconds once the device has nothing left to do."""
    synchronize()
    return time.perf_counter()


# ---------------------------------------------------------------- the trace


def read_trace(profiler: profile) -> dict:
    """Return a profile as a Chrome trace.

    The profiler would replace a link or a device, and hides failures: it gets a file of our own.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        try:
            return json.loads(file.read_bytes())
        except (FileNotFoundError, ValueError) as error:  # nothing was written, or a part
            raise RunError(
                f"the profiler could not write its trace in {tempfile.gettempdir()}: "
                "make room there, or set TMPDIR to a folder with room"
            ) from error


def write_trace(profiler: profile, path: str) -> tuple[dict, int]:
    """Write a Chrome trace, compressed if `path` ends in .gz; return its content and its bytes.

    The file also says where it was made, as a record does, but no names of this machine.
    """
    trace = read_trace(profiler)
    kept = {key: value for key, value in trace.items() if key not in OF_THIS_MACHINE}
    content = json.dumps(kept | {"environment": environment()}).encode()
    if path.endswith(".gz"):
        content = gzip.compress(content)
    write_output(path, content, "the trace")
    return trace, len(content)
