"""What a step's memory is made of, from its record: tables, advice and a picture."""

import itertools

from harness.cli import tables
from harness.cli.workload import size_in_words, workload_line
from harness.profiling.kernel_facts import KERNELS, ROWS
from harness.records import run_records
from next_steps.memory.memory_ledger import (
    EMBEDDING,
    GRADIENTS,
    LOSS,
    PARAMETERS,
    PHASES,
    STATE,
    stage_in_words,
)
from next_steps.memory.peak_attribution import KEPT, MEASURED_PARTS, TEMPORARY

FRAGMENTATION = "reserved, not allocated"
LARGE = 0.05  # of the peak: a part of which there is something to say
# The picture's widths, as shares of all layers' in the forward.  Not by time: nobody would see the
# loss.
LOSS_WIDTH, OPTIMIZER_WIDTH, EMBEDDING_WIDTH = 0.15, 0.4, 0.03

# What makes a part (in one phase: part, phase) smaller: a kernel, and how.
ADVICE = {
    PARAMETERS: (None, "every weight once, in --dtype"),
    STATE: (None, "AdamW's two moments of every weight, in --dtype"),
    **{part: (row.name, how) for row in ROWS for part, how in row.memory.items()},
}
OF_SUMS = {GRADIENTS: (None, "sums over micro-batches: there from the first one's backward on")}
COLORS = {
    PARAMETERS: "#4c6a92",
    STATE: "#8fa9c9",
    GRADIENTS: "#e8923a",
    KEPT: "#5aa469",
    LOSS: "#c8443c",
    TEMPORARY: "#9467bd",
    "other": "#b5b5b5",
}


def advice(record: dict) -> list[list[str]]:
    """For each large part: its name, the flag that makes it smaller, and how."""
    rows = []
    known = ADVICE | (OF_SUMS if "accumulate" in record else {})
    for part, n_bytes in record["parts"].items():
        if n_bytes > LARGE * record["peak_memory_bytes"] and part in known:
            kernel, how = known.get((part, record["phase"]), known[part])
            flag = f"--kernels {kernel}" if kernel else "-"
            rows.append([part, f"in use: {kernel}" if kernel in record["kernels"] else flag, how])
    return rows


def render(record: dict) -> str:
    """Everything that the script prints about a step's memory, from its record."""
    on_gpu, peak = record["device"] == "cuda", record["peak_memory_bytes"]
    unit_name, unit = tables.decimal_unit([peak], "GB", "MB", 1e9)
    phases = [record["phases"][phase] for phase in PHASES]
    shown = [
        part
        for part in MEASURED_PARTS
        if record["parts"][part] or any(phase["parts"][part] for phase in phases)
    ]

    def size(n_bytes: int | None) -> str:
        return tables.number(None if n_bytes is None else n_bytes / unit, ",.2f")

    def row(label: str, *values: int | None) -> list[str]:
        return [label, *map(size, values)]

    peak_rows = [
        [*row(part, record["parts"][part]), f"{100 * record['parts'][part] / peak:.1f}%"]
        for part in shown
    ]
    peak_rows.append([*row("Total", peak), "100.0%"])
    phase_rows = [row(part, *(phase["parts"][part] for phase in phases)) for part in shown]
    phase_rows.append(row("Total", *(phase["bytes"] for phase in phases)))
    if on_gpu:
        fragmentation = record["fragmentation_bytes"]
        peak_rows.append([*row(FRAGMENTATION, fragmentation), f"{100 * fragmentation / peak:.1f}%"])
        phase_rows.append(row(FRAGMENTATION, *(phase["fragmentation_bytes"] for phase in phases)))
    group_rows = [
        [
            group["part"],
            group["maker"],
            f"{group['tensors']:,}",
            f"{group['bytes'] / 1e6:,.1f}",
            f"{group['dtype']} ({', '.join(map(str, group['shape']))})",
        ]
        for group in record["largest"]
    ]
    where_counted = "" if on_gpu else " (CPU: the tensors' own bytes)"
    where = stage_in_words(record["phase"], record["layer"], record["layers"])
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
        tables.table(
            ["Largest at the peak", "Made by", "Tensors", "MB", "The largest of them"],
            group_rows,
            ["left", "left", "right", "right", "left"],
        ),
    ]
    if advised := advice(record):
        lines += ["", tables.table(["Large part", "Smaller with", "Which"], advised, ["left"] * 3)]
    if on_gpu:
        unobserved = size(record["unobserved_peak_bytes"])
        lines += [
            "",
            f"Peak of the step before, without the ledger: {unobserved} {unit_name}",
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
    if stage["layer"] == EMBEDDING or stage["phase"] == "forward":
        return EMBEDDING_WIDTH * n_layers
    return n_layers * (OPTIMIZER_WIDTH if stage["phase"] == "optimizer" else LOSS_WIDTH)


def plot(record: dict, path: str) -> None:
    """The parts over the step as stacked areas, the phases and the peak marked, as one PNG."""
    plt = tables.pyplot()
    line, (unit_name, unit) = (
        record["timeline"],
        tables.decimal_unit([record["peak_memory_bytes"]], "GB", "MB", 1e9),
    )
    others = zip(*(values for part, values in line["parts"].items() if part not in COLORS))
    areas = {part: values for part, values in line["parts"].items() if part in COLORS} | {
        "other": map(sum, others)
    }
    areas = {part: [n_bytes / unit for n_bytes in values] for part, values in areas.items()}
    heights = [sum(values) for values in zip(*areas.values())]
    # each point's place; each phase, its beginning and end, of every micro-batch
    at, end, phases = [], 0.0, []
    for phase, stages in itertools.groupby(line["stages"], key=lambda stage: stage["phase"]):
        start = end
        for stage in stages:
            wide = width(stage, record["layers"])
            at += [end + wide * (i + 0.5) / stage["points"] for i in range(stage["points"])]
            end += wide
        phases.append((phase, start, end))

    figure, axis = plt.subplots(figsize=(11, 5.5))
    axis.stackplot(
        at, *areas.values(), labels=areas, colors=[COLORS[part] for part in areas], linewidth=0
    )
    top = max(heights)
    named = set()
    for phase, start, stop in phases:
        axis.axvline(start, color="black", linestyle=":", linewidth=1)
        if phase not in named:
            axis.text((start + stop) / 2, 1.22 * top, phase, ha="center", va="top")
        named.add(phase)
    peak_at = at[heights.index(top)]
    axis.plot(peak_at, top, "v", color="black")
    towards_middle = (
        {"ha": "left", "xytext": (6, 4)}
        if peak_at < end / 2
        else {"ha": "right", "xytext": (-6, 4)}
    )
    axis.annotate(
        f"peak {top:,.1f} {unit_name}",
        (peak_at, top),
        textcoords="offset points",
        weight="bold",
        **towards_middle,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    axis.set(xlim=(0, end), ylim=(0, 1.25 * top), xticks=[], ylabel=f"memory, {unit_name}")
    axis.set_xlabel("the step, in order and not to scale: every layer is as wide as any other")
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False
    )
    axis.spines[["top", "right"]].set_visible(False)
    env, kernels = record["environment"], ", ".join(record["kernels"]) or "none"
    axis.set_title(
        f"{record['model']}, {size_in_words(record)}, "
        f"{record['dtype']}, "
        f"custom kernels: {'all' if record['kernels'] == KERNELS else kernels}\n"
        f"{env['gpu'] or 'CPU (the tensors alone)'}, {env['date']}"
    )
    figure.tight_layout()
    tables.save_plot(figure, path, dpi=130)
