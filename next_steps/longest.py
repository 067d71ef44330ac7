"""How long may a sequence be?  `finetune_optimized.py --kernels all --longest`.

Training steps on ever longer random sequences, one at a time, until the memory is full.
"""

import gc

import torch

from harness import run_records, stepping, tables, timing
from harness.command_line import ran_out_of_memory
from harness.dataset import random_batch
from harness.device import DEVICE, HAS_GPU
from harness.loading import load_model
from harness.workload import Workload, kernels_in_words, model_line
from next_steps.apply_kernels import apply_kernels, make_optimizer, model_kernels
from next_steps.memory_estimate import step_tryer
from next_steps.recompute import set_recompute

LENGTH_STEP = 1024 if HAS_GPU else 16  # tokens between two lengths that are tried
CPU_LENGTHS = 4  # on a CPU no more are tried: its memory ends where the machine stops to answer


def find(workload: Workload, record_to: str | None = None) -> None:
    """Try the workload's length or the next multiple of LENGTH_STEP, and on until one fails."""
    kernels = workload.kernels
    model = load_model(workload, step_tryer(kernels))
    apply_kernels(model, model_kernels(kernels))
    set_recompute(model, workload.recompute, workload.offload)
    optimizer = make_optimizer(model, 1e-5, kernels, workload.stochastic_rounding)
    vocabulary, limit = model.config.vocab_size, model.config.max_position_embeddings
    first = -(-workload.seq_len // LENGTH_STEP) * LENGTH_STEP
    record = {
        "kind": "longest",
        "environment": run_records.environment(),
        **workload.as_record(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_length": first,
        "length_step": LENGTH_STEP,
        "lengths": [],
        "peaks": [],
        "stopped_by": "the model's positions",
    }
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    lengths = range(first, limit + 1, LENGTH_STEP)
    if not HAS_GPU and len(lengths) > CPU_LENGTHS:
        lengths = lengths[:CPU_LENGTHS]
        record["stopped_by"] = f"the {CPU_LENGTHS} lengths that are tried without a GPU"
    for length in lengths:
        batch = random_batch((1, length), vocabulary, DEVICE)
        try:
            if HAS_GPU:
                torch.cuda.reset_peak_memory_stats()
            loss, seconds = stepping.timed_step(model, optimizer, batch)
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            record["stopped_by"] = "the GPU's memory"
            break
        peak = timing.peak_memory_bytes()
        record["lengths"].append(length)
        record["peaks"].append(peak)
        print(f"{length:>7,} tokens: {seconds:6.2f} s, peak {peak / 1e9:.1f} GB", flush=True)
        del loss
        if HAS_GPU:
            gc.collect()
            torch.cuda.empty_cache()  # blocks of the last length do not fit the next
    print("\n" + render(record))
    run_records.write_record(record_to, record)


def render(record: dict) -> str:
    """What --longest found, from its record."""
    lengths = record["lengths"]
    longest = f"{lengths[-1]:,}" if lengths else f"less than {record['first_length']:,}"
    limit = f"in steps of {record['length_step']:,}; stopped by {record['stopped_by']}"
    return "\n".join(
        [
            run_records.environment_line(record["environment"]),
            f"{model_line(record)}; custom kernels: {kernels_in_words(record)}",
            f"Longest sequence that fits, batch 1: {longest} tokens ({limit})",
        ]
    )
