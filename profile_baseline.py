"""Lessons 3, 7 and 10: where does the GPU time and memory of one training step go?

    python profile_baseline.py                                       # lesson 3: PyTorch as it ships
    python profile_baseline.py --use-custom-rmsnorm                  # lesson 7: one kernel replaced
    python profile_baseline.py --use-custom-rmsnorm --use-custom-ce  # lesson 10: both
    python profile_baseline.py --random-init                  # without access to the weights
    python profile_baseline.py --random-init --first-layers 1 # a trace that is quickly read
    python profile_baseline.py --json a.json --plot a.png     # what each part could gain
    python profile_baseline.py --cuda-graph                   # the step as a single launch

The profiler records two streams of events: operations that the CPU calls (aten::mm), and kernels
that the GPU runs.  A kernel knows the operation that launched it, but `aten::mul` may be a norm,
the loss or AdamW.  To tell these apart, the script opens named ranges around parts of the model,
and finds the range that each kernel was launched for (harness/profiling/attribution.py).

Without a GPU the CPU time of each operation takes the kernels' place, and the diagnosis has bytes
alone.  What the numbers mean: harness/profiling/diagnose.py.
"""

import argparse
import itertools
import statistics
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from harness.cli import command_line
from harness.cli.flags import OF_PROFILER, OF_TRAINING, FlagParser, of_kernels
from harness.cli.output_files import check_outputs
from harness.cli.tables import NO_GPU_NOTE, not_shown, title
from harness.cli.workload import Workload, workload_line
from harness.profiling import profile_tables
from harness.profiling.kernel_facts import KERNELS
from harness.records.run_records import environment, environment_line, write_record

FLAGS = OF_TRAINING | of_kernels(KERNELS, default="none") | OF_PROFILER
TIMED_STEPS = 3
PROFILED_STEPS = 4  # two recordings, each of two steps


def profile_training(workload: Workload, trace_file: str, stacks: bool) -> dict:
    """Train a few steps, profile one, write its trace; return the record."""
    import torch

    from harness.cli.device import begin_process
    from harness.model.architecture import TORCH_DTYPES, ModelFacts
    from harness.profiling import attribution, costs, profiler
    from harness.steps import communication
    from next_steps.patches import projections

    begin_process(workload.model, workload.deterministic)
    ceilings = profiler.measure_ceilings(TORCH_DTYPES[workload.dtype], workload.fp8)
    training = load(workload)
    model, facts = training.model, ModelFacts(training.model.config, workload)
    expected = communication.expected(model, workload) if workload.parallel else None
    stream = torch.cuda.Stream() if workload.cuda_graph else None  # None: as it is
    with torch.cuda.stream(stream):
        profile, trace, found = take_steps(training, workload, stream, trace_file, stacks)
    sizes = costs.sizes_of(facts)
    moved = costs.costs_of_trace(trace, sizes, training.span, workload.kernels)
    return {
        "kind": "profile",
        "environment": environment(),
        **workload.as_record(),
        **facts.counts(),
        **projections.layers_in_fp8(model, workload),
        "warmup_steps": workload.warmup,
        **attribution.attribute(profile.events(), moved, sizes, workload.lora_rank),
        "ceilings": ceilings,
        "sizes": asdict(sizes),
        # a replay calls no operation
        "host_waits": [] if workload.cuda_graph else attribution.host_waits(profile.events()),
        **({"communication": expected} if expected else {}),
        **found,
        "trace": trace_file,
    }


def load(workload: Workload) -> SimpleNamespace:
    """Return the model, what takes a step of it, the loader, batches of all steps, their span."""
    from harness.data.dataset import load_data
    from harness.data.loader import Loader
    from harness.profiling import profiler
    from harness.steps import parallel
    from next_steps.memory import memory_estimate
    from next_steps.patches import apply_kernels, patched_model

    config = memory_estimate.try_kernels(workload)
    n_steps = workload.warmup + TIMED_STEPS + PROFILED_STEPS
    data = load_data(workload, config, n_steps + profiler.NEEDED)
    model = patched_model.load_patched(workload)
    called = parallel.wrap(model, workload)
    optimizer = apply_kernels.make_kernel_optimizer(
        model, 1e-5, workload.kernels, moments=workload.moments, capturable=workload.cuda_graph
    )
    loader = Loader(data.train, workload.micro_batches)
    steps = list(itertools.islice(loader, n_steps))
    return SimpleNamespace(
        model=model, of_step=(called, optimizer), loader=loader, steps=steps, span=data.span
    )


def take_steps(training, workload: Workload, stream, trace_file: str, stacks: bool) -> tuple:
    """Return the profile of a step, its trace, and what was measured of others, for the record.

    Time and peak memory come from steps without the profiler.  With a CUDA graph the replays are
    measured; operations and ranges come from a step before the recording.
    """
    import torch

    from harness.cli.device import HAS_GPU
    from harness.profiling import profiler
    from harness.steps import measured, power, stepping, timing

    of_step, graph = training.of_step, workload.cuda_graph
    warmup, steps = training.steps[: workload.warmup], training.steps[workload.warmup :]
    timed, profiled = steps[:TIMED_STEPS], steps[TIMED_STEPS:]

    def profile_operations() -> tuple[torch.profiler.profile, float]:
        with profiler.category_ranges(training.model):
            return profiler.profiled_step(*of_step, profiled[2:], stacks)

    for batches in warmup:
        stepping.timed_step(*of_step, batches)
    resting_memory = torch.cuda.memory_allocated() if HAS_GPU else None
    if graph:
        profile, profiled_ms = profile_operations()
        trace = profiler.read_trace(profile)
    timing.reset_peak_memory()
    take_step, idle = stepping.training_step, None
    if graph:
        take_step = stepping.captured_step(*of_step, timed[0], stream)
    with power.PowerMeter() as meter:
        step_ms, peak_memory = measured.time_steps(*of_step, timed, take_step)
    median_ms = statistics.median(step_ms)
    if HAS_GPU:
        replayed, idle = profiler.timeline(*of_step, profiled[:2], take_step)
    if graph:
        _, trace_bytes = profiler.write_trace(replayed, trace_file)
    else:
        profile, profiled_ms = profile_operations()
        trace, trace_bytes = profiler.write_trace(profile, trace_file)
    loading = profiler.measure_loading(
        training.loader, lambda step: take_step(*of_step, step), median_ms
    )
    found = {
        **({"busy_us": idle["busy_us"]} if graph else {}),
        **({"power": meter.reading()} if HAS_GPU else {}),
        "timeline": idle,
        "loading": loading,
        "step_ms": step_ms,
        "median_step_ms": median_ms,
        "profiled_step_ms": profiled_ms,
        "resting_memory_bytes": resting_memory,
        "peak_memory_bytes": peak_memory,
        "trace_bytes": trace_bytes,
    }
    return profile, trace, found


def render(record: dict) -> str:
    """Return everything that the script prints about a run."""
    device = record["device"]
    on_gpu = device == "CUDA"
    heading = [environment_line(record["environment"]), workload_line(record)]
    if record.get("cuda_graph"):
        heading.append(profile_tables.OF_A_GRAPH)
    blocks = ["\n".join(heading)]
    if on_gpu or not record["kernels"]:
        by_time = f"{device} Operations by Total {'GPU' if on_gpu else 'CPU'} Time"
        blocks += [
            f"{title(f'Top {profile_tables.MOST_ROWS} {by_time}')}\n"
            f"{profile_tables.operations_table(record)}",
            profile_tables.breakdown_table("Category", record["categories"], device),
            profile_tables.breakdown_table("Phase", record["phases"], device),
        ]
    else:
        blocks.append(not_shown("operations' times are"))
    blocks += [
        *([profile_tables.totals(record)] if on_gpu else []),
        profile_tables.diagnosis(record),
        f"Chrome trace: {record['trace']} ({record['trace_bytes'] / 1e6:.1f} MB); "
        "open it in https://ui.perfetto.dev",
    ]
    return "\n\n".join(blocks)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    args = FlagParser(__doc__, FLAGS).parse_args(arguments)
    wanted = {"rmsnorm": args.use_custom_rmsnorm, "cross_entropy": args.use_custom_ce}
    args.kernels = [name for name in KERNELS if name in args.kernels or wanted.get(name)]
    return args


def default_trace(workload: Workload) -> str:
    name = [
        Path(workload.model).resolve().name,
        workload.first_layers and f"{workload.first_layers}-layers",
        f"{workload.batch_size}x{workload.seq_len}",
        "+".join(workload.kernels) or "baseline",
        workload.lora_rank and f"lora{workload.lora_rank}-{workload.lora_targets}",
        workload.quantize,
        workload.moments and f"{workload.moments}-moments",
        workload.fp8 and f"fp8-{workload.fp8}",
        workload.accumulate and f"accumulate{workload.accumulate}",
        workload.recompute,
        workload.offload and "offload",
        workload.cuda_graph and "cuda_graph",
        workload.deterministic and "deterministic",
        workload.parallel and f"{workload.parallel}-{workload.world_size}",
    ]
    return f"traces/{'-'.join(filter(None, name))}.json"


def main() -> None:
    args = parse_args()
    from harness.cli.device import HAS_GPU

    workload = Workload.from_flags(args, HAS_GPU)
    if args.trace is None:
        args.trace = default_trace(workload)
    check_outputs(args)
    if workload.fp8:
        from next_steps.patches.projections import require_fp8

        require_fp8()
    from harness.steps import parallel

    parallel.start(workload)
    if not HAS_GPU:
        print(NO_GPU_NOTE + "\n")
    record = profile_training(workload, args.trace, args.stacks)
    print(render(record))
    write_record(args.json, record)
    if args.plot:
        from harness.profiling.roofline import plot

        plot([record], args.plot)


if __name__ == "__main__":
    command_line.run_main(main)
