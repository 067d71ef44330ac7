"""What fills the memory during a training step, and at its peak?  Measured on the real step.

    python profile_baseline.py --memory --plot memory.png
    python profile_baseline.py --memory --memory-snapshot step.pickle

The first shows the parts, in numbers and over the step; the second every allocation, as
pytorch.org/memory_viz draws it.

The allocator knows how many bytes it has given away, but not what for.  The ledger of
memory_ledger.py does: it sees each tensor that an operation returns, who asked for it and when it
dies.  Here it looks on while the step really runs, and after each operation the allocator is asked
for the most that it had given away meanwhile.  The parts are the ledger's, the height is the
allocator's, and what lies between them has a row of its own: what operations allocate and free
inside, and blocks larger than what was asked for.  So the rows add up to the measured peak, and
that row says how much of it is not explained.

    parameters, optimizer state, gradients   known by their owner, from their birth on
    activations                              made in the forward and alive at its end
    logits and loss                          made for the loss or by its backward
    temporaries                              every other tensor
    batch, cuBLAS workspaces                 waiting on the GPU; scratch memory of products

Why not from the allocator's own history, of which the snapshot is made?  It misses nothing, but
holds Python stacks and no tensors: the backward has no stack, and whether a block is a gradient,
kept or a temporary would be a guess.  It also needs a GPU.  The ledger works without one; the
living tensors' own bytes, in units of 512, are the measure there.

Looking on costs time but no memory: the step before is measured without, and the record has both
peaks.

What the allocator has reserved, and not given away, is fragmentation: free pieces that did not fit.
nvidia-smi shows what is reserved, and the CUDA context with it.
"""

import gc
import itertools
import pickle
from collections import defaultdict
from dataclasses import dataclass

import torch

from harness.cli import output_files, tables
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.workload import Workload
from harness.data import dataset
from harness.model.adapters import counts
from harness.records import run_records
from harness.steps import stepping
from next_steps.memory.memory_estimate import try_kernels
from next_steps.memory.memory_ledger import (
    BATCH,
    KEPT,
    PARAMETERS,
    PARTS,
    PHASES,
    STATE,
    UNSEEN,
    WORKSPACES,
    Ledger,
    name_of,
)
from next_steps.memory.memory_tables import plot, render
from next_steps.patches.apply_kernels import make_optimizer
from next_steps.patches.fp8_model import layers_in_fp8
from next_steps.patches.patched_model import load_patched

TOP = 6  # groups of tensors
# of the timeline: in all layers of a phase, and in each other stage of the step
LAYERS_POINTS, STAGE_POINTS = (
    128,
    24,
)
STEPS = 3  # after the warm-up: without the ledger, for the snapshot, with the ledger

# ---------------------------------------------------------------- looking on


@dataclass(frozen=True)
class Sample:
    """What the allocator says about the time since the sample before."""

    time: int  # the ledger's, at its end
    stage: tuple[str, int | None]
    operation: str
    allocated: int | None  # bytes, the most; None without a GPU
    reserved: int | None  # bytes, at its end


class Observer(Ledger):
    """A ledger of a real step, with a sample after every operation."""

    def __init__(self, device: str):
        self.samples: list[Sample] = []
        super().__init__(device)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if self.device == "cpu":  # what Triton's interpreter has used stays in reference cycles
            gc.collect()
        results = super().__torch_dispatch__(operation, types, args, kwargs)
        self.sample(name_of(operation))
        return results

    def enter(self, phase: str | None, layer: int | None = None) -> None:
        begins = self.begins_step(phase, layer)
        if phase is not None:
            self.sample()  # a sample is of one stage
        super().enter(phase, layer)
        if begins:  # with nothing but what was there before
            self.samples.clear()
            self.sample()

    def sample(self, operation: str = "none") -> None:
        allocated = reserved = None
        if self.device == "cuda":
            statistics = torch.cuda.memory_stats()
            allocated, reserved = (
                statistics["allocated_bytes.all.peak"],
                statistics["reserved_bytes.all.current"],
            )
            torch.cuda.reset_peak_memory_stats()
        self.samples.append(Sample(self.time, self.stage, operation, allocated, reserved))


def observed_step(model, optimizer, steps: list[list[dataset.Batch]], ledger: Observer) -> None:
    """A training step with the last of the steps' micro-batches, in the ledger's books."""
    ledger.follow(model, optimizer)
    for batch in itertools.chain(*steps):
        ledger.claim(BATCH, *stepping.tensors_of(batch).values())
    gc.collect()
    gc.freeze()  # what is there now is not looked at by the collections to come
    with ledger:
        stepping.training_step(model, optimizer, steps[-1])
    ledger.sample()
    gc.unfreeze()


def write_snapshot(path: str, model, optimizer, batches: list[dataset.Batch]) -> int:
    """A training step in the allocator's own words: each block that it gave away or got back.

    Returns its bytes.
    """
    torch.cuda.memory._record_memory_history(stacks="python")
    stepping.training_step(model, optimizer, batches)
    torch.cuda.synchronize()
    snapshot = pickle.dumps(torch.cuda.memory._snapshot())
    torch.cuda.memory._record_memory_history(enabled=None)
    output_files.write_output(path, snapshot, "the snapshot")
    return len(snapshot)


def cublas_workspaces() -> int:
    """Bytes of scratch memory that cuBLAS has asked PyTorch for; they are given back here."""
    if not HAS_GPU:
        return 0
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def measure_memory(workload: Workload, snapshot_to: str | None = None) -> dict:
    """Train a few steps, look at the memory of the last one; returns the record."""
    kernels, warmup = workload.kernels, workload.warmup
    try_kernels(workload)
    model = load_patched(workload)
    data = dataset.load_data(workload, model.config, warmup + STEPS)
    ledger = Observer(DEVICE)
    ledger.follow_gradients(model)
    optimizer = make_optimizer(model, 1e-5, kernels)
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
    return {
        "kind": "memory",
        "environment": run_records.environment(),
        **workload.as_record(),
        **counts(model, workload),
        **layers_in_fp8(model, workload),
        "layers": model.config.num_hidden_layers,
        "warmup_steps": warmup,
        "unobserved_peak_bytes": unobserved_peak,
        **account(ledger, cublas_workspaces()),
        "snapshot": snapshot_to,
        "snapshot_bytes": snapshot_bytes,
    }


# ---------------------------------------------------------------- what was seen


@dataclass(frozen=True)
class Window:
    """The time of one sample.

    Moments are numbered: 0 is before the step, then one after each birth and death.
    """

    sample: Sample
    first: int
    last: int
    highest: int  # where the ledger's sum is
    seen: int  # that sum, bytes
    height: int  # bytes by the allocator; without a GPU, that sum


def history(ledger: Ledger) -> dict[str, list[int]]:
    """Bytes of each part that the ledger knows, at each moment of its last step."""
    moments = ledger.time - ledger.began + 1
    changes = {part: [0] * moments for part in PARTS}
    for block in ledger.blocks:
        if block.died >= ledger.began:
            change = changes[ledger.part_of(block)]
            change[max(0, block.born - ledger.began + 1)] += block.n_bytes
            if block.died < ledger.time:
                change[block.died - ledger.began + 1] -= block.n_bytes
    return {part: list(itertools.accumulate(change)) for part, change in changes.items()}


def windows(ledger: Observer, seen: list[int]) -> list[Window]:
    """One for each sample; `seen` is the sum of the parts at each moment."""
    found, first = [], 0
    for sample in ledger.samples:
        last = sample.time - ledger.began
        highest = max(range(first, last + 1), key=seen.__getitem__)
        height = seen[highest] if sample.allocated is None else sample.allocated
        found.append(Window(sample, first, last, highest, seen[highest], height))
        first = last
    return found


def largest(ledger: Ledger, moment: int) -> list[dict]:
    """The largest groups of tensors at a moment, by part and maker.

    Without parameters, their state and batches.

    An activation's maker is the part of the model that asked for it, any other tensor's the
    operation.
    """
    groups = defaultdict(list)
    for block in ledger.blocks:
        part = ledger.part_of(block)
        if block.born < ledger.began + moment <= block.died and part not in (
            PARAMETERS,
            STATE,
            BATCH,
        ):
            groups[part, block.kind if part == KEPT and block.kind else block.operation].append(
                block
            )
    rows = []
    for (part, maker), blocks in groups.items():
        example = max(blocks, key=lambda block: block.n_bytes)
        rows.append(
            {
                "part": part,
                "maker": maker,
                "tensors": len(blocks),
                "bytes": sum(block.n_bytes for block in blocks),
                "dtype": str(example.dtype).removeprefix("torch."),
                "shape": list(example.shape),
            }
        )
    return sorted(rows, key=lambda row: -row["bytes"])[:TOP]


def timeline(parts: dict[str, list[int]], found: list[Window], workspaces: int) -> dict:
    """The parts over the step: of each stretch of each of its stages, the highest moment."""
    gaps = {}  # between the ledger's sum and the allocator's
    for window in found:
        gap = window.height - window.seen
        for moment in (window.highest, *range(window.first, window.last + 1)):
            gaps[moment] = max(gap, gaps.get(moment, gap))
    moments = range(len(gaps))
    parts = parts | {
        WORKSPACES: [workspaces for _ in moments],
        UNSEEN: [gaps[m] - workspaces for m in moments],
    }
    heights = [sum(values) for values in zip(*parts.values())]
    layer_points = max(1, LAYERS_POINTS // max(window.sample.stage[1] or 1 for window in found))
    chosen, stages = [], []
    for (phase, layer), group in itertools.groupby(found, key=lambda window: window.sample.stage):
        in_stage = list(group)
        first, length = in_stage[0].first, in_stage[-1].last + 1 - in_stage[0].first
        points = min(length, layer_points if layer else STAGE_POINTS)
        edges = [first + length * i // points for i in range(points + 1)]
        chosen += [
            max(range(*stretch), key=heights.__getitem__) for stretch in itertools.pairwise(edges)
        ]
        stages.append({"phase": phase, "layer": layer, "points": points})
    return {
        "stages": stages,
        "parts": {part: [values[m] for m in chosen] for part, values in parts.items()},
    }


def account(ledger: Observer, workspaces: int) -> dict:
    """The peak and the highest moment of each phase, in bytes and by parts."""
    parts = history(ledger)
    found = windows(ledger, [sum(values) for values in zip(*parts.values())])

    def describe(window: Window) -> dict:
        rest = {WORKSPACES: workspaces, UNSEEN: window.height - window.seen - workspaces}
        reserved = window.sample.reserved
        return {
            "bytes": window.height,
            "parts": {part: parts[part][window.highest] for part in parts} | rest,
            "fragmentation_bytes": None if reserved is None else reserved - window.height,
        }

    peak = max(found, key=lambda window: window.height)
    phases = {
        phase: describe(
            max((w for w in found if w.sample.stage[0] == phase), key=lambda window: window.height)
        )
        for phase in PHASES
    }
    described, (phase, layer) = describe(peak), peak.sample.stage
    return {
        "device": ledger.device,
        "peak_memory_bytes": described.pop("bytes"),
        **described,
        "phase": phase,
        "layer": layer,
        "operation": peak.sample.operation,
        "largest": largest(ledger, peak.highest),
        "phases": phases,
        "timeline": timeline(parts, found, workspaces),
    }


def report(
    workload: Workload,
    record_to: str | None = None,
    plot_to: str | None = None,
    snapshot_to: str | None = None,
) -> None:
    """Measure the memory of a workload's step, print it and write what was asked for."""
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    record = measure_memory(workload, snapshot_to)
    print(render(record))
    run_records.write_record(record_to, record)
    if plot_to:
        plot(record, plot_to)
