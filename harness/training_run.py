"""A fine-tuning run around its steps: what is printed and recorded of each, validation, saving.

    run = Run("Baseline", workload, model, record_to=args.json, save_to=args.save)
    for batch in run.batches():                 # the clock starts
        ...                                     # forward, backward, update
        run.end_step(loss)                      # the clock stops
    run.finish()

So the scripts differ in what they do to the model and in their step, and in nothing else.
"""

import math
import statistics
import time
from collections.abc import Iterator

import torch

from harness.architecture import flops_per_token
from harness.command_line import RunError
from harness.dataset import IGNORE_INDEX, Batch, load_data, load_tokenizer
from harness.device import DEVICE, HAS_GPU, synchronize
from harness.run_records import environment, environment_line, write_record
from harness.saving import save_model
from harness.tables import NO_GPU_NOTE, number, title
from harness.timing import datasheet_tflops, peak_memory_bytes
from harness.workload import WARMUP_STEPS, Workload, kernels_in_words, model_line, teacher_line

NOT_SAVED = "nothing was saved. Try a lower --lr"


class Run:
    """One run of a workload's steps; once made, it has printed what will run, and validated.

    Args:
        name: heads the result block, as in "Baseline Results".
        workload: with steps and lr.
        model: from `load_model`, patched or not.
        record_to: the file for the record, if there is to be one.
        save_to: the folder for the trained model, if there is to be one.
        more: what else the record is to say, such as the size of a teacher.
    """

    def __init__(
        self,
        name: str,
        workload: Workload,
        model: torch.nn.Module,
        record_to: str | None = None,
        save_to: str | None = None,
        more: dict | None = None,
    ):
        self.name, self.workload, self.model = name, workload, model
        self.record_to, self.save_to = record_to, save_to
        self.data = load_data(workload, model.config, workload.steps)
        self.environment = environment()
        n_parameters = sum(p.numel() for p in model.parameters())
        self.described = workload.as_record() | {"parameters": n_parameters} | (more or {})
        # one of each per step
        self.losses, self.seconds, self.tokens, self.peaks = [], [], [], []
        if save_to:
            # saved with the model: if it cannot be had, say so before training
            load_tokenizer(workload)
        self.print_heading()
        self.validation_before = validation_loss(model, self.data.validation)

    def print_heading(self) -> None:
        if not HAS_GPU:
            print(NO_GPU_NOTE + "\n")
        print(environment_line(self.environment))
        print(model_line(self.described))
        if self.workload.teacher is not None:
            print(teacher_line(self.described))
        print(f"Data: {self.data.source}")
        kernels = kernels_in_words(self.described)
        print(f"Custom kernels: {kernels}; AdamW, learning rate {self.workload.lr:g}\n")

    def batches(self) -> Iterator[Batch]:
        """The batch of each step, on the device; when it is handed out, the clock starts."""
        if HAS_GPU:
            torch.cuda.reset_peak_memory_stats()
        for batch in self.data.train:
            self.batch = batch.to(DEVICE)
            self.start_clock()
            yield self.batch

    def start_clock(self) -> None:
        """From an idle device.  To be called again after work that is no part of a step."""
        synchronize()
        self.started = time.perf_counter()

    def end_step(self, loss: torch.Tensor) -> None:
        """Stop the clock once the device is idle, record the step and print its line.

        Raises:
            RunError: the loss is not finite.
        """
        synchronize()
        self.seconds.append(time.perf_counter() - self.started)
        self.losses.append(loss.item())
        step = len(self.losses)
        if not math.isfinite(self.losses[-1]):
            raise RunError(f"the loss became {self.losses[-1]} at step {step}; {NOT_SAVED}")
        self.tokens.append(self.batch.n_tokens)
        self.peaks.append(peak_memory_bytes())
        columns = self.losses, self.seconds, self.tokens, self.peaks
        print(step_line(step, self.workload.steps, *columns), flush=True)

    def finish(self) -> dict:
        """Validate, print the result block, save the model, write the record and return it.

        Raises:
            RunError: the validation loss is not finite, and nothing is saved then; or a file cannot
                be written.
        """
        workload = self.workload
        validation_after = validation_loss(self.model, self.data.validation)
        if not math.isfinite(validation_after):  # the last step's loss was from before its update
            after = f"validation loss became {validation_after} after step {workload.steps}"
            raise RunError(f"the {after}; {NOT_SAVED}")

        skip = WARMUP_STEPS if workload.steps > WARMUP_STEPS else 0
        timed = self.seconds[skip:]
        throughput = sum(self.tokens[skip:]) / sum(timed)
        record = {
            "kind": "finetune",
            "title": self.name,
            "environment": self.environment,
            **self.described,
            "warmup_steps": skip,
            "losses": self.losses,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "peaks": self.peaks,
            "average_seconds": statistics.mean(timed),
            "median_seconds": statistics.median(timed),
            "tokens_per_second": throughput,
            "peak_memory_bytes": self.peaks[-1],
            "model_flops_utilization": self.utilization(throughput),
            "validation_loss_before": self.validation_before,
            "validation_loss_after": validation_after,
        }
        print("\n" + result_block(record))
        try:
            if self.save_to:
                save_model(self.model, workload, self.save_to)
        finally:  # a full disk must not cost the record too
            write_record(self.record_to, record)
        return record

    def utilization(self, tokens_per_second: float) -> float | None:
        """The share of the data sheet's bf16 rate that the model's FLOPs take; None if unknown."""
        gpu = self.environment["gpu"]
        rate = datasheet_tflops(gpu) if self.workload.dtype == "bf16" else None
        if rate is None:
            return None
        flops = flops_per_token(self.model.config, self.workload.seq_len)
        flops += self.described.get("teacher_flops_per_token", 0)
        return flops * tokens_per_second / (rate * 1e12)


@torch.no_grad()
def validation_loss(model: torch.nn.Module, batches: list[Batch]) -> float:
    """Mean loss per trained token over the held-out batches, dropout off."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        batch = batch.to(DEVICE)
        n_targets = int((batch.labels[:, 1:] != IGNORE_INDEX).sum())
        total += model(input_ids=batch.input_ids, labels=batch.labels).loss.item() * n_targets
        count += n_targets
    model.train()
    return total / count


# ---------------------------------------------------------------- output


def step_line(
    step: int,
    n_steps: int,
    losses: list[float],
    seconds: list[float],
    tokens: list[int],
    peaks: list[int],
) -> str:
    """What is printed after a step, counted from 1; the lists hold at least that many steps."""
    i = step - 1
    left = statistics.median(seconds[:step]) * (n_steps - step)
    rate = f"{tokens[i] / seconds[i]:>9,.0f} tokens/sec"
    return (
        f"step {step:>{len(str(n_steps))}}/{n_steps}  loss {losses[i]:8.4f}  {seconds[i]:7.3f} s  "
        f"{rate}  peak {peaks[i] / 1e9:6.1f} GB  ETA {left:4.0f} s"
    )


def result_block(record: dict) -> str:
    """The playbook's result block, from a record."""
    mfu = record["model_flops_utilization"]
    utilization = number(mfu and 100 * mfu, ".1f")
    if mfu is not None:
        utilization += " % of the data sheet's dense bf16 rate"
    memory = "Peak GPU memory:" if record["environment"]["gpu"] else "Peak process memory:"
    steps = f"(steps {record['warmup_steps'] + 1} to {record['steps']})"
    before, after = record["validation_loss_before"], record["validation_loss_after"]
    rows = [
        ("Average time per step:", f"{record['average_seconds']:.3f} s {steps}"),
        ("Median time per step:", f"{record['median_seconds']:.3f} s"),
        ("Average throughput:", f"{record['tokens_per_second']:,.0f} tokens/sec"),
        (memory, f"{record['peak_memory_bytes'] / 1e9:.1f} GB"),
        ("Model FLOPs utilization:", utilization),
        ("Validation loss:", f"{before:.4f} before, {after:.4f} after"),
    ]
    if "teacher" in record:
        first, last = record["losses"][0], record["losses"][-1]
        change = f"{first:.4f} in step 1, {last:.4f} in step {record['steps']}"
        rows.append(("Distillation loss:", change))
    lines = [title(f"{record['title']} Results"), *(f"{name:<25} {text}" for name, text in rows)]
    if "teacher" in record:
        lines.append(teacher_line(record))
    return "\n".join(lines)
