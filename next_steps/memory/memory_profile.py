"""What fills the memory during a training step, and at its peak?  Measured on the real step.

The allocator knows how many bytes it has given away, but not what for.  The ledger
(memory_ledger.py) knows.  The parts come from the ledger, the height from the allocator, and what
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
from harness.cli.workload import Workload, size_in_words, workload_line
from harness.data import dataset
from harness.model.architecture import ModelFacts
from harness.profiling.kernel_facts import KERNELS, PHASES, ROWS
from harness.records import run_records
from harness.steps import stepping
from next_steps.memory import memory_ledger as books
from next_steps.memory.memory_estimate import try_kernels
from next_steps.memory.memory_ledger import BATCH, EMBEDDING, Ledger
from next_steps.memory.peak_attribution import KEPT, MEASURED_PARTS, TEMPORARY, account
from next_steps.patches.apply_kernels import make_optimizer
from next_steps.patches.patched_model import load_patched
from next_steps.patches.projections import layers_in_fp8

TOP = 6  # groups of tensors in the table
STEPS = 3  # after the warm-up: without the ledger, for the snapshot, with the ledger


def observed_step(model, optimizer, steps: list[list[dataset.Batch]], ledger: Ledger) -> None:
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
    data = dataset.load_data(workload, try_kernels(workload), warmup + STEPS)
    model = load_patched(workload)
    ledger = Ledger(DEVICE)
    ledger.follow_gradients(model)
    optimizer = make_optimizer(model, 1e-5, workload.kernels, moments=workload.moments)
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
    found = account(ledger, cublas_workspaces())
    record = {
        "kind": "memory",
        "environment": run_records.environment(),
        **workload.as_record(),
        **ModelFacts(model.config, workload).counts(),
        **layers_in_fp8(model, workload),
        "layers": model.config.num_hidden_layers,
        "warmup_steps": warmup,
        "unobserved_peak_bytes": unobserved_peak,
        **found,
        "largest": found["largest"][:TOP],
        "snapshot": snapshot_to,
        "snapshot_bytes": snapshot_bytes,
    }
    print(render(record))
    run_records.write_record(record_to, record)
    if plot_to:
        plot(record, plot_to)


# ---------------------------------------------------------------- tables and picture

FRAGMENTATION = "reserved, not allocated"
LARGE = 0.05  # of the peak: smaller parts get no advice
# The picture's widths, as shares of the width of all layers in the forward.  Not by time: the loss
# would be too narrow to see.
LOSS_WIDTH, OPTIMIZER_WIDTH, EMBEDDING_WIDTH = 0.15, 0.4, 0.03

# What makes a part, or a part in one phase, smaller: a kernel, and how.
ADVICE = {
    books.PARAMETERS: (None, "every weight once, in --dtype"),
    books.STATE: (None, "AdamW's two moments of every weight, in --dtype or --moments"),
    **{part: (row.name, how) for row in ROWS for part, how in row.memory.items()},
}
OF_SUMS = {
    books.GRADIENTS: (None, "sums over micro-batches: there from the first one's backward on")
}
COLORS = {
    books.PARAMETERS: "#4c6a92",
    books.STATE: "#8fa9c9",
    books.GRADIENTS: "#e8923a",
    KEPT: "#5aa469",
    books.LOSS: "#c8443c",
    TEMPORARY: "#9467bd",
    "other": "#b5b5b5",
}


def advice(record: dict) -> list[list[str]]:
    """Return, for each large part: its name, the flag that makes it smaller, and how."""
    rows = []
    known = ADVICE | (OF_SUMS if "accumulate" in record else {})
    for part, n_bytes in record["parts"].items():
        if n_bytes > LARGE * record["peak_memory_bytes"] and part in known:
            kernel, how = known.get((part, record["phase"]), known[part])
            flag = f"--kernels {kernel}" if kernel else "-"
            rows.append([part, f"in use: {kernel}" if kernel in record["kernels"] else flag, how])
    return rows


def render(record: dict) -> str:
    """Return everything that the script prints about a step's memory."""
    on_gpu, peak = record["device"] == "cuda", record["peak_memory_bytes"]
    unit_name, unit = tables.decimal_unit([peak], "GB", "MB", 1e9)
    moments = [record, *(record["phases"][phase] for phase in PHASES)]  # the peak, then the phases
    shown = [part for part in MEASURED_PARTS if any(each["parts"][part] for each in moments)]

    def row(label: str, *values: int | None) -> list[str]:
        return [label, *(tables.number(v if v is None else v / unit, ",.2f") for v in values)]

    rows = [(part, [each["parts"][part] for each in moments]) for part in shown]
    rows.append(("Total", [peak, *(each["bytes"] for each in moments[1:])]))
    if on_gpu:
        rows.append((FRAGMENTATION, [each["fragmentation_bytes"] for each in moments]))
    peak_rows = [[*row(label, of[0]), f"{100 * of[0] / peak:.1f}%"] for label, of in rows]
    group_rows = []
    for group in record["largest"]:
        example = f"{group['dtype']} ({', '.join(map(str, group['shape']))})"
        numbers = f"{group['tensors']:,}", f"{group['bytes'] / 1e6:,.1f}"
        group_rows.append([group["part"], group["maker"], *numbers, example])
    where_counted = "" if on_gpu else " (CPU: the tensors' own bytes)"
    where = books.stage_in_words(record["phase"], record["layer"], record["layers"])
    largest = ["Largest at the peak", "Made by", "Tensors", "MB", "The largest of them"]
    phase_rows = [row(label, *of[1:]) for label, of in rows]
    lines = [
        run_records.environment_line(record["environment"]),
        workload_line(record),
        "",
        tables.title(f"Memory of a training step{where_counted}"),
        f"The peak is in the {where}, at the operation {record['operation']}.",
        "",
        tables.table([f"At the peak, {unit_name}", "", "Share"], peak_rows),
        "",
        tables.table([f"Highest in each phase, {unit_name}", *PHASES], phase_rows),
        "",
        tables.table(largest, group_rows, ["left", "left", "right", "right", "left"]),
    ]
    if advised := advice(record):
        lines += ["", tables.table(["Large part", "Smaller with", "Which"], advised, ["left"] * 3)]
    if on_gpu:
        label = "Peak of the step before, without the ledger:"
        lines += ["", " ".join([*row(label, record["unobserved_peak_bytes"]), unit_name])]
    if record["snapshot"]:
        lines.append(
            f"Snapshot: {record['snapshot']} ({record['snapshot_bytes'] / 1e6:.1f} MB); "
            "drop it on https://pytorch.org/memory_viz"
        )
    return "\n".join(lines)


def width(stage: dict, n_layers: int) -> float:
    """Return the width of a stage of the step in the picture; a layer's is 1."""
    if stage["layer"]:
        return 1.0
    if stage["layer"] == EMBEDDING or stage["phase"] == "forward":
        return EMBEDDING_WIDTH * n_layers
    return n_layers * (OPTIMIZER_WIDTH if stage["phase"] == "optimizer" else LOSS_WIDTH)


def plot(record: dict, path: str) -> None:
    """Draw the parts over the step as stacked areas, with the phases and the peak, as one PNG."""
    line = record["timeline"]
    unit_name, unit = tables.decimal_unit([record["peak_memory_bytes"]], "GB", "MB", 1e9)
    areas = dict.fromkeys(COLORS, 0.0)
    for part, values in line["parts"].items():
        areas[part if part in COLORS else "other"] += (
            torch.tensor(values, dtype=torch.float64) / unit
        )
    heights = sum(areas.values())
    top = heights.max().item()
    figure, axis = tables.pyplot().subplots(figsize=(11, 5.5))
    at, end, named = [], 0.0, set()  # at: the place of each point
    # each phase of every micro-batch
    for phase, stages in itertools.groupby(line["stages"], key=lambda stage: stage["phase"]):
        start = end
        for stage in stages:
            wide = width(stage, record["layers"])
            at += [end + wide * (i + 0.5) / stage["points"] for i in range(stage["points"])]
            end += wide
        axis.axvline(start, color="black", linestyle=":", linewidth=1)
        if phase not in named:
            axis.text((start + end) / 2, 1.22 * top, phase, ha="center", va="top")
        named.add(phase)
    axis.stackplot(at, *areas.values(), labels=areas, colors=COLORS.values(), linewidth=0)
    peak_at = at[heights.argmax()]
    axis.plot(peak_at, top, "v", color="black")
    beside, side = (6, "left") if peak_at < end / 2 else (-6, "right")
    axis.annotate(
        f"peak {top:,.1f} {unit_name}",
        (peak_at, top),
        (beside, 4),
        textcoords="offset points",
        ha=side,
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    axis.set(xlim=(0, end), ylim=(0, 1.25 * top), xticks=[], ylabel=f"memory, {unit_name}")
    axis.set_xlabel("the step, in order and not to scale: every layer is as wide as any other")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)
    axis.spines[["top", "right"]].set_visible(False)
    env, kernels = record["environment"], ", ".join(record["kernels"]) or "none"
    axis.set_title(
        f"{record['model']}, {size_in_words(record)}, {record['dtype']}, "
        f"custom kernels: {'all' if record['kernels'] == KERNELS else kernels}\n"
        f"{env['gpu'] or 'CPU (the tensors alone)'}, {env['date']}"
    )
    figure.tight_layout()
    tables.save_plot(figure, path, dpi=130)
