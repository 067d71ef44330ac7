"""A fine-tuning run around its steps: what is printed and recorded of each, validation, saving.

    run = Run("Baseline", workload, model, record_to=args.json, save_to=args.save)
    for batch in run.batches():                 # the clock starts
        ...                                     # forward, backward, update
        run.end_step(loss)                      # the clock stops
    run.finish()

The scripts that use it differ in what they do to the model and in their step, and in nothing else.

On a GPU the last step trains as the others do, but under PyTorch's profiler, which records the
kernels alone: how long the GPU computes.  Recording slows the host down, so that step does not
count in the run's times.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from harness.cli import processes
from harness.cli.command_line import RunError
from harness.cli.device import DEVICE, HAS_GPU, synchronize
from harness.cli.flags import WARMUP_STEPS
from harness.cli.workload import Workload
from harness.data.dataset import Batch, load_data
from harness.data.loader import Loader
from harness.model.architecture import TORCH_DTYPES, ModelFacts
from harness.profiling.attribution import busy_us, gpu_events
from harness.profiling.ceilings import ceilings_of
from harness.profiling.costs import least_ms
from harness.profiling.profiler import measure_ceilings
from harness.records.run_records import environment, write_record
from harness.records.spread import spread, timed
from harness.steps import parallel
from harness.steps.gpus import peak_tflops
from harness.steps.power import PowerMeter
from harness.steps.timing import peak_memory_bytes, reset_peak_memory
from harness.training.resuming import STEP_LISTS
from harness.training.run_text import opening, result_block, step_line
from harness.training.saving import refuse_what_cannot_be_saved, save_model

NOT_SAVED = "nothing was saved. Try a lower --lr"


class Run:
    """One run of a workload's steps; to make it prints what will run, and validates.

    Args:
        name: heads the result block, as in "Baseline Results".
        more: what else the record says, such as the size of a teacher.
        resumed: what `progress` said after the steps that the model has already taken, if any.
    """

    def __init__(
        self,
        name: str,
        workload: Workload,
        model: torch.nn.Module,
        record_to: str | None = None,
        save_to: str | None = None,
        more: dict | None = None,
        resumed: dict | None = None,
    ):
        self.name, self.workload, self.model = name, workload, model
        self.record_to, self.save_to = record_to, save_to
        self.environment = environment()
        # the day on which the run first began
        self.day = resumed["day"] if resumed else self.environment["date"]
        self.data = load_data(workload, model.config, workload.steps, self.day)
        self.facts = ModelFacts(model.config, workload)
        self.described = workload.as_record() | self.facts.counts() | (more or {})
        # an entry per step; data_seconds: seconds of the step spent waiting for data
        before = resumed or dict.fromkeys(STEP_LISTS, ())
        columns = (list(before[column]) for column in STEP_LISTS)
        self.losses, self.seconds, self.tokens, self.peaks, self.data_seconds = columns
        self.steps_before = len(self.losses)
        left = workload.steps - self.steps_before
        # steps that another process took are not timed either
        self.warmup_steps = self.steps_before + (WARMUP_STEPS if left > WARMUP_STEPS else 0)
        # the last step, if that leaves some to be timed
        self.profiled_steps = int(HAS_GPU and left > WARMUP_STEPS + 1)
        self.busy_ms = None
        if save_to:
            refuse_what_cannot_be_saved(save_to, model, workload, self.described)
        print(opening({"environment": self.environment, **self.described}, self.data.source))
        dtype = TORCH_DTYPES[workload.dtype]
        self.ceilings = measure_ceilings(dtype, workload.fp8) if HAS_GPU else None
        if resumed:
            self.described["resumed_from"] = self.steps_before
            self.validation_before = resumed["validation_loss_before"]
        else:
            self.validation_before = validation_loss(model, self.data.validation)

    def batches(self) -> Iterator[Batch]:
        """Yield each step's batch, where a step takes one batch: see `steps`."""
        for (batch,) in self.steps():
            yield batch

    def steps(self) -> Iterator[list[Batch]]:
        """Yield each step's micro-batches, on the device; to yield them starts the clock."""
        reset_peak_memory()
        last_timed = self.workload.steps - self.profiled_steps
        self.loader = Loader(self.data.train, self.workload.micro_batches, self.steps_before)
        with PowerMeter() as self.power:
            for step in range(self.steps_before + 1, self.workload.steps + 1):
                batches = self.loader.take()
                self.step_tokens = sum(batch.n_tokens for batch in batches)
                with self.recording() if step > last_timed else contextlib.nullcontext():
                    self.start_clock()
                    if step == self.warmup_steps + 1:
                        self.power.restart()
                    yield batches

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record how long the GPU computes in this context, for one launch or for thousands.

        `busy_ms` stays None if no kernel was recorded, as under another profiler.
        """
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            yield
        kernels = gpu_events(profiler.events())
        self.busy_ms = busy_us(kernels) / 1e3 if kernels else None

    def start_clock(self) -> None:
        """Start the clock once the device is idle; again after work that is no part of a step."""
        synchronize()
        self.started = time.perf_counter()

    def end_step(self, loss: torch.Tensor) -> None:
        """Stop the clock once the device is idle, record the step and print its line.

        Several processes give the mean of their losses, all their tokens and the largest memory.
        While the device is busy, the next step's batches are fetched.
        """
        self.data_seconds.append(self.loader.fetch())
        synchronize()
        self.seconds.append(time.perf_counter() - self.started)
        of_each = parallel.gather(loss.item(), self.step_tokens, peak_memory_bytes())
        losses, tokens, peaks = zip(*of_each)
        self.losses.append(sum(losses) / len(losses))
        step = len(self.losses)
        if not math.isfinite(self.losses[-1]):
            raise RunError(f"the loss became {self.losses[-1]} at step {step}; {NOT_SAVED}")
        self.tokens.append(int(sum(tokens)))
        self.peaks.append(int(max(peaks)))
        print(step_line(step, self.workload.steps, self.progress(), HAS_GPU), flush=True)

    def progress(self) -> dict:
        """Return what a run that goes on after these steps needs to know of them: `resumed`."""
        columns = {column: getattr(self, column) for column in STEP_LISTS}
        return columns | {"validation_loss_before": self.validation_before, "day": self.day}

    def finish(self) -> dict:
        """Validate, print the result block, save the model, write the record and return it."""
        workload = self.workload
        validation_after = validation_loss(self.model, self.data.validation)
        if not math.isfinite(validation_after):  # the last step's loss was from before its update
            after = f"validation loss became {validation_after} after step {workload.steps}"
            raise RunError(f"the {after}; {NOT_SAVED}")

        record = {
            "kind": "finetune",
            "title": self.name,
            "environment": self.environment,
            **self.described,
            "losses": self.losses,
            "peaks": self.peaks,
            **self.times(),
            "padding": self.data.train.padding(),
            "peak_memory_bytes": self.peaks[-1],
            "validation_loss_before": self.validation_before,
            "validation_loss_after": validation_after,
            "held_out": self.data.validation.digest(),
        }
        print("\n" + result_block(record))
        try:
            if self.save_to:
                save_model(self.model, workload, self.save_to)
        finally:  # a full disk must not cost the record too
            write_record(self.record_to, record)
        return record

    def times(self) -> dict:
        """Return what a record says of the timed steps, and of the step that was profiled."""
        steps = {
            "warmup_steps": self.warmup_steps,
            "profiled_steps": self.profiled_steps,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "data_seconds": self.data_seconds,
        }
        seconds, tokens = timed(steps), timed(steps, "tokens")
        low, high = spread(seconds)
        throughput = sum(tokens) / sum(seconds)
        n = processes.world_size()
        flops = self.facts.flops_per_token(self.data.span)
        flops += self.described.get("teacher_flops_per_token", 0)
        # the data sheet's bf16 rate, if it is known
        rate = peak_tflops(self.environment["gpu"]) if self.workload.dtype == "bf16" else None
        n_tokens = statistics.mean(tokens) / n
        rates = self.ceilings and ceilings_of({"ceilings": self.ceilings}).rates
        return {
            **steps,
            "average_seconds": statistics.mean(seconds),
            "median_seconds": statistics.median(seconds),
            "p20_seconds": low,
            "p80_seconds": high,
            "tokens_per_second": throughput,
            **({"tokens_per_second_per_gpu": throughput / n} if n > 1 else {}),
            "model_flops_utilization": rate and flops * throughput / n / (rate * 1e12),
            "busy_ms": self.busy_ms,
            **({"power": self.power.reading()} if HAS_GPU else {}),
            "ceilings": self.ceilings,
            "least_ms": rates and least_ms(self.facts, n_tokens, flops, rates),
        }


@torch.no_grad()
def validation_loss(model: torch.nn.Module, batches: Sequence[Batch]) -> float:
    """Return the mean loss per trained token over the held-out batches, dropout off.

    Several processes share the batches.  Each calls the model equally often, as they gather weights
    together: what a process without a batch computes does not count.
    """
    model.eval()
    total, count = 0.0, 0
    n = processes.world_size()
    for first in range(0, len(batches), n):
        i = first + processes.rank()
        batch = batches[i % len(batches)].to(DEVICE)
        loss = model(**batch.inputs()).loss.item()
        if i < len(batches):
            total += loss * batch.n_targets
            count += batch.n_targets
    model.train()
    totals, counts = zip(*parallel.gather(total, count))
    return sum(totals) / sum(counts)
