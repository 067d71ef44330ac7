"""What fills the memory during a training step, and at its peak?  Measured on the real step.

The allocator knows how many bytes it has given away, but not what for.  The ledger
(memory_ledger.py) knows.  After each operation `Observer` asks the allocator for the most bytes it
had given away meanwhile.  The parts come from the ledger, the height from the allocator, and what
lies between has a row of its own.  So the rows add up to the measured peak.

The allocator's own history, of which the snapshot is made, would not do: it holds Python stacks and
no tensors, and the backward has no stack.
"""

import gc
import itertools
import pickle

import torch

from harness.cli import output_files, tables
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.workload import Workload
from harness.data import dataset
from harness.model.adapters import counts
from harness.records import run_records
from harness.steps import stepping
from next_steps.memory.memory_estimate import try_kernels
from next_steps.memory.memory_ledger import BATCH, Observer
from next_steps.memory.memory_tables import plot, render
from next_steps.memory.peak_attribution import account
from next_steps.patches.apply_kernels import make_optimizer
from next_steps.patches.fp8_model import layers_in_fp8
from next_steps.patches.patched_model import load_patched

STEPS = 3  # after the warm-up: without the ledger, for the snapshot, with the ledger


def observed_step(model, optimizer, steps: list[list[dataset.Batch]], ledger: Observer) -> None:
    """Take a training step with the last of the steps' micro-batches and write the ledger."""
    ledger.follow(model, optimizer)
    for batch in itertools.chain(*steps):
        ledger.claim(BATCH, *batch.tensors().values())
    gc.collect()
    gc.freeze()  # later collections skip what exists now
    with ledger:
        stepping.training_step(model, optimizer, steps[-1])
    ledger.sample()
    gc.unfreeze()


def write_snapshot(path: str, model, optimizer, batches: list[dataset.Batch]) -> int:
    """Take a training step and write each allocation of the allocator; return the file's bytes."""
    torch.cuda.memory._record_memory_history(stacks="python")
    stepping.training_step(model, optimizer, batches)
    torch.cuda.synchronize()
    snapshot = pickle.dumps(torch.cuda.memory._snapshot())
    torch.cuda.memory._record_memory_history(enabled=None)
    output_files.write_output(path, snapshot, "the snapshot")
    return len(snapshot)


def cublas_workspaces() -> int:
    """Free the scratch memory that cuBLAS has asked PyTorch for; return its bytes."""
    if not HAS_GPU:
        return 0
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def report(
    workload: Workload,
    record_to: str | None = None,
    plot_to: str | None = None,
    snapshot_to: str | None = None,
) -> None:
    """Train a few steps, observe the memory of the last one, print it, write what was asked for."""
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    warmup = workload.warmup
    try_kernels(workload)
    model = load_patched(workload)
    data = dataset.load_data(workload, model.config, warmup + STEPS)
    ledger = Observer(DEVICE)
    ledger.follow_gradients(model)
    optimizer = make_optimizer(model, 1e-5, workload.kernels)
    batches = [batch.to(DEVICE) for batch in data.train]
    steps = stepping.in_steps(batches, workload.micro_batches)
    for batches in steps[:warmup]:
        stepping.training_step(model, optimizer, batches)
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    stepping.training_step(model, optimizer, steps[warmup])
    unobserved_peak = torch.cuda.max_memory_allocated() if HAS_GPU else None
    snapshot_bytes = None
    if snapshot_to:
        snapshot_bytes = write_snapshot(snapshot_to, model, optimizer, steps[warmup + 1])
    observed_step(model, optimizer, steps, ledger)
    record = {
        "kind": "memory",
        "environment": run_records.environment(),
        **workload.as_record(),
        **counts(model.config, workload),
        **layers_in_fp8(model, workload),
        "layers": model.config.num_hidden_layers,
        "warmup_steps": warmup,
        "unobserved_peak_bytes": unobserved_peak,
        **account(ledger, cublas_workspaces()),
        "snapshot": snapshot_to,
        "snapshot_bytes": snapshot_bytes,
    }
    print(render(record))
    run_records.write_record(record_to, record)
    if plot_to:
        plot(record, plot_to)
