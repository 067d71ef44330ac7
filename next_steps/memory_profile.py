"""What fills the memory during a training step, and at its peak?  Measured on the real step.

    python profile_baseline.py --memory --plot memory.png               # the parts, in numbers and over the step
    python profile_baseline.py --memory --memory-snapshot step.pickle   # every allocation, for pytorch.org/memory_viz

The allocator knows how many bytes it has given away, but not what for.  The ledger of memory_estimate.py does: it sees
each tensor that an operation returns, who asked for it and when it dies.  Here it looks on while the step really runs,
and after each operation the allocator is asked for the most that it had given away meanwhile.  The parts are the
ledger's, the height is the allocator's, and what lies between them has a row of its own: what operations allocate and
free inside, and blocks larger than what was asked for.  So the rows add up to the measured peak, and that row says how
much of it is not explained.

    parameters, optimizer state, gradients   known by their owner, from their birth on
    activations                              made in the forward and alive at its end: the backward needs them
    logits and loss                          made for the loss or by its backward, and the last norm's backward with it
    temporaries                              every other tensor
    batch, cuBLAS workspaces                 the batches that wait on the GPU; scratch memory of the matrix products

Why not from the allocator's own history, of which the snapshot is made?  It misses nothing, but holds Python stacks and
no tensors: the backward has no stack, and whether a block is a gradient, kept or a temporary would be a guess.  It also
needs a GPU.  The ledger works without one; the living tensors' own bytes, in units of 512, are the measure there.

Looking on costs time but no memory: the step before is measured without, and the record has both peaks.

What the allocator has reserved, and not given away, is fragmentation: free pieces that did not fit.  nvidia-smi shows
what is reserved, and the CUDA context with it.
"""

import gc
import itertools
import pickle
from collections import defaultdict
from dataclasses import dataclass

import torch

from harness import dataset, output_files, pictures, run_records, stepping, tables
from harness.command_line import UserError
from harness.device import DEVICE, HAS_GPU
from harness.kernel_facts import KERNELS, ROWS
from harness.loading import load_model
from harness.workload import Workload, workload_line
from next_steps import memory_estimate
from next_steps.apply_kernels import apply_kernels, make_optimizer, model_kernels
from next_steps.memory_estimate import (
    BATCH,
    GRADIENTS,
    KEPT,
    LOSS,
    PARAMETERS,
    PHASES,
    STATE,
    TEMPORARY,
    WORKSPACES,
    Ledger,
)

UNSEEN = "inside operations, rounding"
FRAGMENTATION = "reserved, not allocated"
PARTS = [*memory_estimate.PARTS, UNSEEN]
LARGE = 0.05  # of the peak: a part of which there is something to say
TOP = 6  # groups of tensors
LAYERS_POINTS, STAGE_POINTS = 128, 24  # of the timeline: in all layers of a phase, and in each other stage of the step
# The picture's widths, as shares of all layers' in the forward.  Not by time: nobody would see the loss.
LOSS_WIDTH, OPTIMIZER_WIDTH, EMBEDDING_WIDTH = 0.15, 0.4, 0.03
STEPS = 3  # after the warm-up: without the ledger, for the snapshot, with the ledger

# What makes a part (in one phase: part, phase) smaller: a kernel, and how.
ADVICE = {
    PARAMETERS: (None, "every weight once, in --dtype"),
    STATE: (None, "AdamW's two moments of every weight, in --dtype"),
    **{part: (row.name, how) for row in ROWS for part, how in row.memory.items()},
}
COLORS = {
    PARAMETERS: "#4c6a92", STATE: "#8fa9c9", GRADIENTS: "#e8923a", KEPT: "#5aa469", LOSS: "#c8443c",
    TEMPORARY: "#9467bd", "other": "#b5b5b5",
}  # fmt: skip


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
        self.sample(memory_estimate.name_of(operation))
        return results

    def enter(self, phase: str | None, layer: int | None = None) -> None:
        if phase is not None:
            self.sample()  # a sample is of one stage
        super().enter(phase, layer)
        if (phase, layer) == ("forward", None):  # the step begins, with nothing but what was there before
            self.samples.clear()
            self.sample()

    def sample(self, operation: str = "none") -> None:
        allocated = reserved = None
        if self.device == "cuda":
            statistics = torch.cuda.memory_stats()
            allocated, reserved = statistics["allocated_bytes.all.peak"], statistics["reserved_bytes.all.current"]
            torch.cuda.reset_peak_memory_stats()
        self.samples.append(Sample(self.time, self.stage, operation, allocated, reserved))


def observed_step(model, optimizer, batches: list[dataset.Batch], ledger: Observer) -> None:
    """A training step with the last of the batches, in the ledger's books."""
    ledger.follow(model, optimizer)
    ledger.claim(BATCH, *(t for batch in batches for t in (batch.input_ids, batch.labels)))
    gc.collect()
    gc.freeze()  # what is there now is not looked at by the collections to come
    with ledger:
        stepping.training_step(model, optimizer, batches[-1])
    ledger.sample()
    gc.unfreeze()


def write_snapshot(path: str, model, optimizer, batch: dataset.Batch) -> int:
    """A training step in the allocator's own words: what it held before, and each block it gave away or got back.

    Returns its bytes.
    """
    torch.cuda.memory._record_memory_history(stacks="python")
    stepping.training_step(model, optimizer, batch)
    torch.cuda.synchronize()
    snapshot = pickle.dumps(torch.cuda.memory._snapshot())
    torch.cuda.memory._record_memory_history(enabled=None)
    output_files.write_output(path, snapshot, "the snapshot")
    return len(snapshot)


def cublas_workspaces() -> int:
    """Bytes of the scratch memory that cuBLAS has asked PyTorch for and never gives back; it is given back here."""
    if not HAS_GPU:
        return 0
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def measure_memory(workload: Workload, snapshot_to: str | None = None) -> dict:
    """Train a few steps, look at the memory of the last one; returns the record."""
    kernels, warmup = workload.kernels, workload.warmup
    model = load_model(workload, memory_estimate.step_tryer(kernels))
    apply_kernels(model, model_kernels(kernels))
    data = dataset.load_data(workload, model.config, warmup + STEPS)
    ledger = Observer(DEVICE)
    ledger.follow_gradients(model)
    optimizer = make_optimizer(model, 1e-5, kernels)
    batches = [batch.to(DEVICE) for batch in data.train]
    for batch in batches[:warmup]:
        stepping.training_step(model, optimizer, batch)
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    stepping.training_step(model, optimizer, batches[warmup])
    unobserved_peak = torch.cuda.max_memory_allocated() if HAS_GPU else None
    snapshot_bytes = None
    if snapshot_to:
        snapshot_bytes = write_snapshot(snapshot_to, model, optimizer, batches[warmup + 1])
    observed_step(model, optimizer, batches, ledger)
    return {
        "kind": "memory",
        "environment": run_records.environment(),
        **workload.as_record(),
        "parameters": sum(p.numel() for p in model.parameters()),
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
    """The time of one sample.  Moments are numbered: 0 is before the step, then one after each birth and death."""

    sample: Sample
    first: int
    last: int
    highest: int  # where the ledger's sum is
    seen: int  # that sum, bytes
    height: int  # bytes by the allocator; without a GPU, that sum


def history(ledger: Ledger) -> dict[str, list[int]]:
    """Bytes of each part that the ledger knows, at each moment of its last step."""
    moments = ledger.time - ledger.began + 1
    changes = {part: [0] * moments for part in memory_estimate.PARTS}
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
    """The largest groups of tensors at a moment, by part and maker; parameters, their state and batches apart.

    An activation's maker is the part of the model that asked for it, any other tensor's the operation.
    """
    groups = defaultdict(list)
    for block in ledger.blocks:
        part = ledger.part_of(block)
        if block.born < ledger.began + moment <= block.died and part not in (PARAMETERS, STATE, BATCH):
            groups[part, block.kind if part == KEPT and block.kind else block.operation].append(block)
    rows = []
    for (part, maker), blocks in groups.items():
        example = max(blocks, key=lambda block: block.n_bytes)
        rows.append({
            "part": part, "maker": maker, "tensors": len(blocks), "bytes": sum(block.n_bytes for block in blocks),
            "dtype": str(example.dtype).removeprefix("torch."), "shape": list(example.shape),
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["bytes"])[:TOP]


def timeline(parts: dict[str, list[int]], found: list[Window], workspaces: int) -> dict:
    """The parts over the step: each of its stages is cut into stretches, and of each the highest moment is there."""
    gaps = {}  # between the ledger's sum and the allocator's
    for window in found:
        gap = window.height - window.seen
        for moment in (window.highest, *range(window.first, window.last + 1)):
            gaps[moment] = max(gap, gaps.get(moment, gap))
    moments = range(len(gaps))
    parts = parts | {WORKSPACES: [workspaces for _ in moments], UNSEEN: [gaps[m] - workspaces for m in moments]}
    heights = [sum(values) for values in zip(*parts.values())]
    layer_points = max(1, LAYERS_POINTS // max(window.sample.stage[1] or 1 for window in found))
    chosen, stages = [], []
    for (phase, layer), group in itertools.groupby(found, key=lambda window: window.sample.stage):
        in_stage = list(group)
        first, length = in_stage[0].first, in_stage[-1].last + 1 - in_stage[0].first
        points = min(length, layer_points if layer else STAGE_POINTS)
        edges = [first + length * i // points for i in range(points + 1)]
        chosen += [max(range(*stretch), key=heights.__getitem__) for stretch in itertools.pairwise(edges)]
        stages.append({"phase": phase, "layer": layer, "points": points})
    return {"stages": stages, "parts": {part: [values[m] for m in chosen] for part, values in parts.items()}}


def account(ledger: Observer, workspaces: int) -> dict:
    """The peak and the highest moment of each phase, in bytes and by parts."""
    parts = history(ledger)
    found = windows(ledger, [sum(values) for values in zip(*parts.values())])

    def describe(window: Window) -> dict:
        rest = {WORKSPACES: workspaces, UNSEEN: window.height - window.seen - workspaces}
        reserved = window.sample.reserved
        return {
            "bytes": window.height, "parts": {part: parts[part][window.highest] for part in parts} | rest,
            "fragmentation_bytes": None if reserved is None else reserved - window.height,
        }  # fmt: skip

    peak = max(found, key=lambda window: window.height)
    phases = {
        phase: describe(max((w for w in found if w.sample.stage[0] == phase), key=lambda window: window.height))
        for phase in PHASES
    }
    described, (phase, layer) = describe(peak), peak.sample.stage
    return {
        "device": ledger.device, "peak_memory_bytes": described.pop("bytes"), **described,
        "phase": phase, "layer": layer, "operation": peak.sample.operation, "largest": largest(ledger, peak.highest),
        "phases": phases, "timeline": timeline(parts, found, workspaces),
    }  # fmt: skip


# ---------------------------------------------------------------- output


def advice(record: dict) -> list[list[str]]:
    """For each large part: its name, the flag that makes it smaller, and how."""
    rows = []
    for part, n_bytes in record["parts"].items():
        if n_bytes > LARGE * record["peak_memory_bytes"] and part in ADVICE:
            kernel, how = ADVICE.get((part, record["phase"]), ADVICE[part])
            flag = f"--kernels {kernel}" if kernel else "-"
            rows.append([part, f"in use: {kernel}" if kernel in record["kernels"] else flag, how])
    return rows


def render(record: dict) -> str:
    """Everything that the script prints about a step's memory, from its record."""
    on_gpu, peak = record["device"] == "cuda", record["peak_memory_bytes"]
    unit_name, unit = tables.decimal_unit([peak], "GB", "MB", 1e9)
    phases = [record["phases"][phase] for phase in PHASES]
    shown = [part for part in PARTS if record["parts"][part] or any(phase["parts"][part] for phase in phases)]

    def size(n_bytes: int | None) -> str:
        return tables.number(None if n_bytes is None else n_bytes / unit, ",.2f")

    def row(label: str, *values: int | None) -> list[str]:
        return [label, *map(size, values)]

    peak_rows = [[*row(part, record["parts"][part]), f"{100 * record['parts'][part] / peak:.1f}%"] for part in shown]
    peak_rows.append([*row("Total", peak), "100.0%"])
    phase_rows = [row(part, *(phase["parts"][part] for phase in phases)) for part in shown]
    phase_rows.append(row("Total", *(phase["bytes"] for phase in phases)))
    if on_gpu:
        fragmentation = record["fragmentation_bytes"]
        peak_rows.append([*row(FRAGMENTATION, fragmentation), f"{100 * fragmentation / peak:.1f}%"])
        phase_rows.append(row(FRAGMENTATION, *(phase["fragmentation_bytes"] for phase in phases)))
    group_rows = [
        [
            group["part"], group["maker"], f"{group['tensors']:,}", f"{group['bytes'] / 1e6:,.1f}",
            f"{group['dtype']} ({', '.join(map(str, group['shape']))})",
        ]
        for group in record["largest"]
    ]  # fmt: skip
    where = memory_estimate.stage_in_words(record["phase"], record["layer"], record["layers"])
    lines = [
        run_records.environment_line(record["environment"]),
        workload_line(record),
        "",
        tables.title("Memory of a training step" + ("" if on_gpu else " (CPU: the tensors' own bytes)")),
        f"The peak is in the {where}, at the operation {record['operation']}.",
        "",
        tables.table([f"At the peak, {unit_name}", "", "Share"], peak_rows),
        "",
        tables.table([f"Highest in each phase, {unit_name}", *PHASES], phase_rows),
        "",
        tables.table(["Largest at the peak", "Made by", "Tensors", "MB", "The largest of them"], group_rows,
                      ["left", "left", "right", "right", "left"]),
    ]  # fmt: skip
    if advised := advice(record):
        lines += ["", tables.table(["Large part", "Smaller with", "Which"], advised, ["left"] * 3)]
    if on_gpu:
        lines += [
            "",
            f"Peak of the step before, without the ledger: {size(record['unobserved_peak_bytes'])} {unit_name}",
        ]
    if record["snapshot"]:
        lines.append(
            f"Snapshot: {record['snapshot']} ({record['snapshot_bytes'] / 1e6:.1f} MB); "
            "drop it on https://pytorch.org/memory_viz"
        )
    return "\n".join(lines)


def width(stage: dict, n_layers: int) -> float:
    """Of a stage of the step in the picture; a layer's is 1."""
    if stage["layer"]:
        return 1.0
    if stage["layer"] == memory_estimate.EMBEDDING or stage["phase"] == "forward":
        return EMBEDDING_WIDTH * n_layers
    return n_layers * (OPTIMIZER_WIDTH if stage["phase"] == "optimizer" else LOSS_WIDTH)


def plot(record: dict, path: str) -> None:
    """The parts over the step as stacked areas, the phases and the peak marked, as one PNG."""
    plt = pictures.pyplot()
    line, (unit_name, unit) = record["timeline"], tables.decimal_unit([record["peak_memory_bytes"]], "GB", "MB", 1e9)
    others = zip(*(values for part, values in line["parts"].items() if part not in COLORS))
    areas = {part: values for part, values in line["parts"].items() if part in COLORS} | {"other": map(sum, others)}
    areas = {part: [n_bytes / unit for n_bytes in values] for part, values in areas.items()}
    heights = [sum(values) for values in zip(*areas.values())]
    at, end, phases = [], 0.0, {}  # each point's place, and each phase's beginning and end
    for stage in line["stages"]:
        wide = width(stage, record["layers"])
        at += [end + wide * (i + 0.5) / stage["points"] for i in range(stage["points"])]
        phases[stage["phase"]] = phases.get(stage["phase"], (end, end))[0], end + wide
        end += wide

    figure, axis = plt.subplots(figsize=(11, 5.5))
    axis.stackplot(at, *areas.values(), labels=areas, colors=[COLORS[part] for part in areas], linewidth=0)
    top = max(heights)
    for phase, (start, stop) in phases.items():
        axis.axvline(start, color="black", linestyle=":", linewidth=1)
        axis.text((start + stop) / 2, 1.22 * top, phase, ha="center", va="top")
    peak_at = at[heights.index(top)]
    axis.plot(peak_at, top, "v", color="black")
    towards_middle = {"ha": "left", "xytext": (6, 4)} if peak_at < end / 2 else {"ha": "right", "xytext": (-6, 4)}
    axis.annotate(
        f"peak {top:,.1f} {unit_name}", (peak_at, top), textcoords="offset points", weight="bold", **towards_middle,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )  # fmt: skip
    axis.set(xlim=(0, end), ylim=(0, 1.25 * top), xticks=[], ylabel=f"memory, {unit_name}")
    axis.set_xlabel("the step, in order and not to scale: every layer is as wide as any other")
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    env, kernels = record["environment"], ", ".join(record["kernels"]) or "none"
    axis.set_title(
        f"{record['model']}, {record['batch_size']} x {record['seq_len']} tokens, {record['dtype']}, "
        f"custom kernels: {'all' if record['kernels'] == KERNELS else kernels}\n"
        f"{env['gpu'] or 'CPU (the tensors alone)'}, {env['date']}"
    )
    figure.tight_layout()
    pictures.save_plot(figure, path, dpi=130)


def report(
    workload: Workload,
    record_to: str | None = None,
    plot_to: str | None = None,
    snapshot_to: str | None = None,
) -> None:
    """Measure the memory of a workload's step, print it and write what was asked for."""
    if snapshot_to and not HAS_GPU:
        raise UserError(
            "--memory-snapshot is a record of the CUDA allocator, and no CUDA GPU was found; "
            "--memory --plot FILE.png works without one"
        )
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    record = measure_memory(workload, snapshot_to)
    print(render(record))
    run_records.write_record(record_to, record)
    if plot_to:
        plot(record, plot_to)
