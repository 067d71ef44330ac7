"""The steps that scaling.py takes, in one process or in each of several."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from harness.cli import command_line, processes, tables
from harness.cli.command_line import UserError
from harness.cli.device import DEVICE, HAS_GPU, free_memory
from harness.cli.workload import Workload
from harness.data.dataset import random_batch
from harness.model.architecture import TORCH_DTYPES
from harness.profiling import profiler
from harness.profiling.kernel_facts import KERNELS
from harness.records import run_records
from harness.records.spread import spread
from harness.steps import communication, parallel, stepping, timing
from next_steps.finetuning import kernel_training, opponents

GPU, CPU = True, False
# (sequences in each process, tokens in each), from the smallest to the largest
SIZES = {GPU: ((1, 512), (1, 1024), (1, 2048), (2, 2048), (4, 2048)), CPU: ((1, 4), (1, 8))}
STEPS = {GPU: (2, 5), CPU: (1, 2)}  # (steps to warm up, timed steps)


def ways_of(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield what is compared.  Liger comes last, as its patch stays in the process."""
    yield "baseline", workload
    yield "all kernels", replace(workload, kernels=tuple(KERNELS))
    yield "Liger", replace(workload, opponent="liger")


def measure(called: Callable, optimizer, shape: tuple[int, int], vocabulary: int) -> dict:
    """Return a row's numbers, equal in all processes, or a `failure` if the step does not fit.

    `shape` is (B, T) of a batch in each process. step_ms has the time of the slowest process for
    each step. communication_us and exposed_us are of the process that waits least.
    """

    def step() -> list:
        return [random_batch(shape, vocabulary, DEVICE)]

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
        return {"failure": "the GPU's memory"}
    step_ms = [1e3 * max(each) for each in zip(*parallel.gather(*seconds))]
    median, (p20, p80) = statistics.median(step_ms), spread(step_ms)
    return {
        "step_ms": step_ms,
        "median_ms": median,
        "p20_ms": p20,
        "p80_ms": p80,
        "tokens_per_second_per_gpu": 1e3 * shape[0] * shape[1] / median,
        "peak_memory_bytes": int(max(parallel.gather(peak))[0]),
        **sent,
    }


def rows_of(way: str, workload: Workload, record: dict) -> Iterator[dict]:
    """Yield the rows of one way, from the smallest size to the first that does not fit."""
    prepare = opponents.prepare if workload.opponent else kernel_training.prepare
    model, called, optimizer = prepare(workload)
    record["parameters"] = sum(p.numel() for p in model.parameters())
    if workload.parallel and "communication" not in record:  # the same for all ways and sizes
        record["communication"] = communication.expected(model, workload)
    # all processes have the same model, and each its own tokens
    torch.manual_seed(workload.seed + processes.rank())
    for batch_size, seq_len in SIZES[HAS_GPU]:
        row = {"way": way, "batch_size": batch_size, "seq_len": seq_len}
        row |= measure(called, optimizer, (batch_size, seq_len), model.config.vocab_size)
        free_memory()
        yield row
        if "failure" in row:
            return


def row_in_words(row: dict) -> str:
    """Return the line that is printed as soon as the row has been measured."""
    name = f"{row['way']}, {row['batch_size']} x {row['seq_len']:,}"
    if "failure" in row:
        return f"{name}: more than {row['failure']}"
    speed = f"{row['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU"
    return f"{name}: {row['median_ms']:,.1f} ms, {speed}, {row['peak_memory_bytes'] / 1e9:.1f} GB"


def walk(workload: Workload, record_to: str | None) -> None:
    """Measure every row in this process group, and write the record after each."""
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
    for way, how in ways_of(workload):
        try:
            for row in rows_of(way, how, record):
                record["rows"].append(row)
                print(row_in_words(row), flush=True)
                if record_to:
                    run_records.keep_record(record_to, record)
        except UserError as error:
            if not how.opponent:
                raise
            record["absent"].append(f"{way} is left out: {error}")
            print(record["absent"][-1], flush=True)
        free_memory()
    run_records.write_record(record_to, record)
