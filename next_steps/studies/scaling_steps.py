"""The steps that scaling.py takes, in one process or in each of several."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from harness.cli import command_line, processes, tables
from harness.cli.command_line import UserError
from harness.cli.device import DEVICE, HAS_GPU, free_memory
from harness.cli.flags import FP8_ALL
from harness.cli.workload import Workload
from harness.data.dataset import random_batch
from harness.model.architecture import TORCH_DTYPES
from harness.profiling import profiler
from harness.profiling.kernel_facts import KERNELS
from harness.records import run_records
from harness.records.spread import spread
from harness.steps import communication, parallel, stepping, timing
from next_steps.finetuning import kernel_training, opponent_models
from next_steps.studies.scaling_tables import WAYS, Size

GPU, CPU = True, False
# from the smallest to the largest
SIZES = {
    GPU: (Size(1, 512), Size(1, 1024), Size(1, 2048), Size(2, 2048), Size(4, 2048)),
    CPU: (Size(1, 4), Size(1, 8)),
}
STEPS = {GPU: (2, 5), CPU: (1, 2)}  # (steps to warm up, timed steps)


HOW = {  # the settings of each of WAYS
    "baseline": {},
    "kernels": {"kernels": tuple(KERNELS)},
    "fp8": {"kernels": tuple(KERNELS), "fp8": FP8_ALL},
    "liger": {"opponent": "liger"},
}
TOO_LARGE = {"failure": "the GPU's memory"}


def measure(called: Callable, optimizer, size: Size, vocabulary: int) -> dict:
    """Return a row's numbers, equal in all processes, or a `failure` if the step does not fit.

    step_ms has the time of the slowest process for each step. communication_us and exposed_us are
    of the process that waits least.
    """

    def step() -> list:
        shape = size.batch_size, size.seq_len
        return [random_batch(shape, vocabulary, DEVICE) for _ in range(size.accumulate)]

    n_warmup, n_timed = STEPS[HAS_GPU]
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(n_warmup):
            stepping.timed_step(called, optimizer, step())
        seconds = [stepping.timed_step(called, optimizer, step())[1] for _ in range(n_timed)]
        peak = timing.peak_memory_bytes()
        sent = {}
        if HAS_GPU and processes.world_size() > 1:
            _, times = profiler.timeline(called, optimizer, [step(), step()])
            numbers = parallel.gather(times["communication_us"], times["exposed_us"])
            sent = dict(zip(("communication_us", "exposed_us"), min(numbers)))
    except RuntimeError as error:
        if not command_line.ran_out_of_memory(error):
            raise
        return TOO_LARGE
    step_ms = [1e3 * max(each) for each in zip(*parallel.gather(*seconds))]
    median, (p20, p80) = statistics.median(step_ms), spread(step_ms)
    return {
        "step_ms": step_ms,
        "median_ms": median,
        "p20_ms": p20,
        "p80_ms": p80,
        "tokens_per_second_per_gpu": 1e3 * size.tokens / median,
        "peak_memory_bytes": int(max(parallel.gather(peak))[0]),
        **sent,
    }


def rows_of(workload: Workload, sizes: Sequence[Size], record: dict) -> Iterator[dict]:
    """Yield the rows of one way, without its name, up to the first size that does not fit."""
    prepare = opponent_models.prepare if workload.opponent else kernel_training.prepare
    try:
        model, called, optimizer = prepare(workload)
    except RuntimeError as error:
        if not command_line.ran_out_of_memory(error):
            raise
        yield in_record(sizes[0]) | TOO_LARGE
        return
    record["parameters"] = sum(p.numel() for p in model.parameters())
    if workload.parallel and "communication" not in record:  # the same for all ways and sizes
        record["communication"] = communication.expected(model, workload)
    # all processes have the same model, and each its own tokens
    torch.manual_seed(workload.seed + processes.rank())
    for size in sizes:
        if workload.fp8:
            model.between_micro_batches.begin()  # other sizes leave other room
        row = in_record(size) | measure(called, optimizer, size, model.config.vocab_size)
        free_memory()
        yield row
        if "failure" in row:
            return


def in_record(size: Size) -> dict:
    """Return what a row says of its size; `Size.of` reads it."""
    several = {"accumulate": size.accumulate} if size.accumulate > 1 else {}
    return {"batch_size": size.batch_size, "seq_len": size.seq_len, **several}


def row_in_words(row: dict) -> str:
    """Return the line that is printed as soon as the row has been measured."""
    name = f"{row['way']}, {Size.of(row)}"
    if "failure" in row:
        return f"{name}: more than {row['failure']}"
    speed = f"{row['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU"
    return f"{name}: {row['median_ms']:,.1f} ms, {speed}, {row['peak_memory_bytes'] / 1e9:.1f} GB"


def walk(
    workload: Workload, record_to: str | None, ways: Sequence[str], sizes: Sequence[Size]
) -> None:
    """Measure every row in this process group, and write the record after each.

    `ways` are some of WAYS, in its order; `sizes` come with the smallest first.
    """
    parallel.start(workload)
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    record = {
        "kind": "scaling",
        "environment": run_records.environment(),
        **workload.as_record(),
        "world_size": processes.world_size(),
        "parallel": workload.parallel,
        "ceilings": profiler.measure_ceilings(TORCH_DTYPES[workload.dtype]),
        "absent": [],
        "rows": [],
    }
    for way in ways:
        how = replace(workload, **HOW[way])
        try:
            for row in rows_of(how, sizes, record):
                record["rows"].append({"way": WAYS[way], **row})
                print(row_in_words(record["rows"][-1]), flush=True)
                run_records.write_record(record_to, record, is_whole=False)
        except UserError as error:
            if not (how.opponent or how.fp8):
                raise
            record["absent"].append(f"{WAYS[way]} is left out: {error}")
            print(record["absent"][-1], flush=True)
        free_memory()
    run_records.write_record(record_to, record)
