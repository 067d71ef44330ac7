"""Follow the profile to the floor: `finetune_optimized.py --ladder`.

Each rung adds one kernel, the largest cost of the profile first.  Before it is measured it is
predicted, from the baseline's profile: what a category takes there, minus the time in which its
bytes can pass through memory at the measured copy rate (Amdahl: only that part of the step can go
away).  Each run has a process of its own.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from harness import command_line, pictures, run_records, tables
from harness.command_line import RunError
from harness.config_file import load_config
from harness.costs import sizes_of
from harness.device import HAS_GPU
from harness.kernel_facts import KERNELS, RUNGS
from harness.workload import WARMUP_STEPS, Workload, model_line
from next_steps.memory_estimate import step_tryer

HERE = Path(__file__).parents[1]  # the project's folder
CUDA_GRAPH = "cuda_graph"
OPPONENT = "Liger-Kernel, fused AdamW"
RUNG_COLOUR, BASELINE_COLOUR = "#D55E00", "#999999"  # ours; PyTorch and Liger-Kernel


def run_script(script: str, workload: Workload, *flags: str) -> dict:
    """The record that a script of this folder writes, run on a workload in a process of its own.

    Raises:
        RunError: it failed; its own message is in the sentence.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        command = [sys.executable, HERE / script, *workload.as_flags(), *flags, "--json", path]
        run = command_line.run_child([str(part) for part in command])
        if run.returncode != 0:
            said = (run.stderr.strip() or run.stdout.strip()).splitlines()
            reason = said[-1] if said else f"exit code {run.returncode}"
            raise RunError(f"{' '.join([script, *how(workload), *flags])} failed: {reason}")
        return json.loads(path.read_text())


def how(workload: Workload) -> list[str]:
    """Its flags without those that all runs of a ladder share."""
    return workload.as_flags()[len(without_kernels(workload).as_flags()) :]


def without_kernels(workload: Workload) -> Workload:
    return replace(workload, kernels=(), cuda_graph=False, opponent=None)


def climb(workload: Workload, record_to: str | None = None, plot_to: str | None = None) -> None:
    """Run the baseline, its profile and every rung; print the table, write record and picture."""
    workload = without_kernels(workload)
    config = load_config(workload, step_tryer(KERNELS))
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    record = {
        "kind": "ladder",
        "environment": run_records.environment(),
        "rungs": [],
        "absent": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        profiled = replace(workload, steps=None, lr=None)  # the profiler has no such flags
        trace = f"{folder}/trace.json"
        profile = run_script("profile_baseline.py", profiled, "--trace", trace)
    record["copy_gbs"] = profile["ceilings"]["copy_gbs"]
    categories = profile["categories"].items()
    record["categories_ms"] = {name: part["us"] / 1e3 for name, part in categories}
    record["busy_ms"] = profile["busy_us"] / 1e3

    def add(name: str, predicted_ms: float | None, run: dict) -> None:
        keys = (
            "losses",
            "tokens_per_second",
            "peak_memory_bytes",
            "kernels",
            "validation_loss_after",
        )
        step_ms = 1e3 * run["median_seconds"]
        rung = {"name": name, "predicted_ms": predicted_ms, "step_ms": step_ms}
        record["rungs"].append(rung | {key: run[key] for key in keys})
        print(f"{name}: {step_ms:,.1f} ms per step", flush=True)

    baseline = run_script("finetune_baseline.py", workload)
    record |= Workload.from_record(baseline).as_record()
    record |= {key: baseline[key] for key in ("parameters", "warmup_steps")}
    add("baseline", None, baseline)
    sizes, names, busy_ms = sizes_of(config, workload), (), record["busy_ms"]
    for rung in RUNGS:
        names = (*names, rung.name)
        floor_ms = rung.floor_bytes(sizes) / record["copy_gbs"] / 1e6
        saved_ms = (record["categories_ms"][rung.category] if rung.category else 0.0) - floor_ms
        busy_ms -= saved_ms
        predicted_ms = record["rungs"][-1]["step_ms"] - saved_ms
        run = run_script("finetune_optimized.py", replace(workload, kernels=names))
        add(rung.name, predicted_ms, run)
    if HAS_GPU and workload.steps > WARMUP_STEPS:
        # what is left of the step is the GPU's own time
        predicted_ms = min(busy_ms, record["rungs"][-1]["step_ms"])
        graph = replace(workload, kernels=tuple(KERNELS), cuda_graph=True)
        add(CUDA_GRAPH, predicted_ms, run_script("finetune_optimized.py", graph))
    try:
        opponent = replace(workload, opponent="liger")
        add(OPPONENT, None, run_script("finetune_optimized.py", opponent))
    except RunError as error:
        record["absent"].append(str(error))
    print("\n" + render(record))
    if plot_to:
        plot([record], plot_to)
    run_records.write_record(record_to, record)


def render(record: dict) -> str:
    """The ladder's table, from its record."""
    on_gpu = record["environment"]["gpu"] is not None
    baseline = record["rungs"][0]
    rows, before = [], None
    for rung in record["rungs"]:
        saved = (
            None
            if before is None or rung["predicted_ms"] is None
            else before["step_ms"] - rung["step_ms"]
        )
        predicted = None if saved is None else before["step_ms"] - rung["predicted_ms"]
        difference = max(run_records.relative_differences(baseline, rung))
        row = [rung["name"] if predicted is None else f"+ {rung['name']}"]
        row += [tables.number(ms) for ms in (predicted, saved, rung["step_ms"])]
        for key, scale, spec in (
            ("tokens_per_second", 1, ",.0f"),
            ("peak_memory_bytes", 1e9, ".1f"),
        ):
            row += [format(rung[key] / scale, spec), f"{rung[key] / baseline[key]:.2f}"]
        rows.append([*row, f"{difference:.1e}"])
        before = rung
    headers = [
        "Rung",
        "Predicted gain, ms",
        "Measured gain, ms",
        "Step, ms",
        "Tokens/sec",
        "x baseline",
        "Peak, GB",
        "x baseline",
        "Largest loss difference",
    ]
    size = f"{record['batch_size']} x {record['seq_len']} tokens"
    workload = f"{size}, {record['steps']} steps, data {record['data']}"
    lines = [
        run_records.environment_line(record["environment"]),
        f"{model_line(record)}; {workload}",
        f"Copy rate measured in this run: {record['copy_gbs']:,.0f} GB/s; the baseline keeps the "
        f"{'GPU' if on_gpu else 'CPU'} busy for {record['busy_ms']:,.1f} ms of a step",
        "",
        tables.title(f"The ladder{'' if on_gpu else tables.NOT_MEANINGFUL}"),
        tables.table(headers, rows),
        *(f"Not measured: {sentence}" for sentence in record["absent"]),
    ]
    return "\n".join(lines)


def plot(records: list[dict], path: str) -> None:
    """A step's time and peak memory, rung by rung, as one PNG: two panels for each record."""
    plt = pictures.pyplot()
    size = 12, 0.6 + 3.6 * len(records)
    figure, axes = plt.subplots(len(records), 2, figsize=size, squeeze=False, layout="constrained")
    for record, (times, memory) in zip(records, axes):
        rungs = record["rungs"][::-1]
        names = [
            rung["name"] if rung["predicted_ms"] is None else f"+ {rung['name']}" for rung in rungs
        ]
        colours = [
            BASELINE_COLOUR if rung["predicted_ms"] is None else RUNG_COLOUR for rung in rungs
        ]
        for panel, unit, values in (
            (times, "ms", [rung["step_ms"] for rung in rungs]),
            (memory, "GB", [rung["peak_memory_bytes"] / 1e9 for rung in rungs]),
        ):
            panel.barh(names, values, color=colours)
            for place, value in enumerate(values):
                panel.text(
                    0.01 * max(values),
                    place,
                    f"{value:,.1f}",
                    color="white",
                    va="center",
                    weight="bold",
                )
            panel.spines[["top", "right"]].set_visible(False)
            panel.set_xlabel(
                f"{'time of a step' if unit == 'ms' else 'peak memory'}, {unit}, lower is better"
            )
        predicted = [
            (rung["predicted_ms"], i)
            for i, rung in enumerate(rungs)
            if rung["predicted_ms"] is not None
        ]
        times.plot(*zip(*predicted), "|", color="black", markersize=14, markeredgewidth=2)
        memory.set_yticks([])
        times.set_title(f"{record['batch_size']} x {record['seq_len']} tokens", loc="left")
    first = records[0]
    device = first["environment"]["gpu"] or f"CPU{tables.NOT_MEANINGFUL}"
    figure.suptitle(
        f"{first['model']}, {first['dtype']}, {device}, {first['environment']['date']}\n"
        "bars: measured; black marks: what the baseline's profile predicted for the rung"
    )
    pictures.save_plot(figure, path)
