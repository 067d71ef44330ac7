"""What does each kernel gain in a whole step, and was the gain predicted?

    python -m next_steps.studies.ladder --random-init --json runs/ladder.json --plot runs/ladder.png

Each rung adds one kernel; the largest cost of the baseline's profile comes first.  The profile
predicts what a rung gains before the rung is measured: the time of the kernel's category, minus the
time in which the necessary bytes pass through memory at the measured copy rate.  After the rungs
come the runs to compare them with: baseline and the playbook's two kernels as CUDA graphs, and what
others offer.  Each run has a process of its own.
"""

import itertools
import json
import os
import tempfile
from dataclasses import asdict, replace

from harness.cli import command_line, flags, tables
from harness.cli.command_line import RunError, UserError
from harness.cli.flags import (
    FP8_ALL,
    FP8_OPPONENTS,
    IN_FP8,
    OF_FINETUNING,
    OF_TRAINING,
    OPPONENTS,
    WARMUP_STEPS,
)
from harness.cli.workload import Workload, model_line, size_in_words
from harness.profiling.kernel_facts import KERNELS, PLAYBOOK_KERNELS, RUNGS
from harness.records import run_records
from next_steps.studies.prepared import Prepared, prepared

BASELINE, CUDA_GRAPH = "baseline", "cuda_graph"  # the first rung and the last
CPU_MINUTES = "five to ten"
FLOAT8 = [OPPONENTS[name] for name in FP8_OPPONENTS]
IN_A_GRAPH = ", CUDA graph"  # ends the name of such a run after the rungs
OUR_COLOUR, BASELINE_COLOUR, OPPONENT_COLOUR = "#D55E00", "#777777", "#0072B2"
OF_SOME_RUNS = "--pack", "--recompute", "--offload", "--cuda-graph", "--parallel"
FLAGS = flags.without(OF_TRAINING, *OF_SOME_RUNS)
FLAGS |= flags.without(OF_FINETUNING, "--save", "--merge")
FLAGS["--plot"] = flags.row("time and memory of each run, as a picture", metavar="FILE.png")
PLAIN_RUN = {"kernels": (), "fp8": None, "cuda_graph": False, "opponent": None}


def run_script(process: Prepared, script: str, workload: Workload, *flags: str) -> dict:
    """Run a script on a workload in a process, and return the script's record."""
    record = process.output.with_suffix(".json")
    if not process.run([script, *workload.as_flags(), *flags, "--json", str(record)]):
        # CUDA may print more after the sentence
        said = process.lines()
        sentences = [line for line in said if line.startswith("error: ")]
        reason = [f"exit code {process.process.returncode}", *said[-1:], *sentences][-1]
        raise RunError(f"{' '.join([script, *own_flags(workload), *flags])} failed: {reason}")
    return json.loads(record.read_text())


def own_flags(workload: Workload) -> list[str]:
    """Return a run's flags without those that all runs of a ladder share, which come first."""
    shared = replace(workload, **PLAIN_RUN).as_flags()
    return workload.as_flags()[len(shared) :]


def script_of(workload: Workload) -> str:
    """Return what takes a workload's steps."""
    if workload.opponent:
        return "next_steps.finetuning.opponents"
    return "finetune_optimized.py" if workload.kernels else "finetune_baseline.py"


def other_runs(workload: Workload, graphs: bool) -> tuple[list[tuple[str, Workload]], list[str]]:
    """Return the names and workloads of the runs after the rungs, and why FP8 is left out."""
    from harness.cli.device import HAS_GPU
    from next_steps.patches.projections import require_fp8

    two, with_two = " + ".join(PLAYBOOK_KERNELS), {"kernels": PLAYBOOK_KERNELS}
    in_fp8, graph = {"kernels": tuple(KERNELS), "fp8": FP8_ALL}, {"cuda_graph": True}
    ways = [
        (BASELINE, graph),
        (two, with_two),
        (two, with_two | graph),
        *((title, {"opponent": opponent}) for opponent, title in OPPONENTS.items()),
        (OPPONENTS["liger"], {"opponent": "liger"} | graph),
        (IN_FP8, in_fp8),
        (IN_FP8, in_fp8 | graph),
    ]
    runs, absent = [], []
    for name, values in ways:
        run = replace(workload, **values)
        if not graphs and (run.cuda_graph or run.fp8):
            continue
        try:
            flags.refuse(asdict(run) | {"kernels": run.kernels or None}, on_gpu=HAS_GPU)
            if run.fp8:
                require_fp8()
        except UserError as error:  # some opponents are for LoRA alone
            if run.fp8 and not absent:
                absent.append(f"{name}: {error}")
            continue
        runs.append((name + IN_A_GRAPH * run.cuda_graph, run))
    return runs, absent


def profile_of(process: Prepared, workload: Workload) -> dict:
    """Return what the ladder's record takes from the baseline's profile."""
    profiled = replace(workload, steps=None, lr=None)  # the profiler has no such flags
    profile = run_script(process, "profile_baseline.py", profiled, "--trace", os.devnull)
    categories_ms = {name: part["us"] / 1e3 for name, part in profile["categories"].items()}
    ms = {"categories_ms": categories_ms, "busy_ms": profile["busy_us"] / 1e3}
    return {"copy_gbs": profile["ceilings"]["copy_gbs"], **ms}


def run_ladder(workload: Workload, record_to: str | None, plot_to: str | None) -> None:
    """Run the baseline, its profile, every rung and the others; print, draw and record them."""
    from harness.cli.device import HAS_GPU
    from harness.model.architecture import ModelFacts
    from harness.profiling.costs import sizes_of
    from next_steps.memory.memory_estimate import try_kernels

    config = try_kernels(replace(workload, kernels=tuple(KERNELS)))
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    graphs = HAS_GPU and workload.steps > WARMUP_STEPS
    others, absent = other_runs(workload, graphs)
    n_runs = 2 + len(RUNGS) + graphs + len(others)
    long = "" if HAS_GPU else f", with --model {flags.TINY_MODEL} {CPU_MINUTES} minutes in all"
    print(f"The ladder is {n_runs} runs, each in a process of its own{long}:")
    numbers = range(1, n_runs + 1)
    with tempfile.TemporaryDirectory() as folder, prepared(folder, numbers) as processes:

        def next_process(name: str) -> Prepared:
            """Say which run begins, and return its process."""
            process = next(processes)
            print(f"{process.name} of {n_runs}: {name} ...", flush=True)
            return process

        profiled = next_process(f"profile of the {BASELINE}")
        record = {"kind": "ladder", "environment": run_records.environment()}
        record |= workload.as_record() | {"rungs": [], "absent": absent}
        record |= profile_of(profiled, workload)

        def add_run(name: str, predicted_ms: float | None, run_of: Workload) -> dict:
            """Run a workload and add what was measured; return the run's record."""
            run = run_script(next_process(name), script_of(run_of), run_of)
            step_ms = 1e3 * run["median_seconds"]
            row = {"name": name, "predicted_ms": predicted_ms, "step_ms": step_ms}
            row |= {f"{p}_ms": 1e3 * run[f"{p}_seconds"] for p in ("p20", "p80")}
            keys = "losses", "tokens_per_second", "peak_memory_bytes", "kernels"
            row |= {key: run[key] for key in (*keys, "validation_loss_after", "busy_ms")}
            record["rungs"].append(row)
            run_records.write_record(record_to, record, is_whole=False)  # it may be ended
            if HAS_GPU:
                print(f"    {step_ms:,.1f} ms per step", flush=True)
            return run

        baseline = add_run(BASELINE, None, workload)
        record |= {key: baseline[key] for key in ("parameters", "warmup_steps")}
        sizes, kernels, busy_ms = sizes_of(ModelFacts(config, workload)), (), record["busy_ms"]
        for rung in RUNGS:
            kernels = (*kernels, rung.name)
            floor_ms = rung.floor_bytes(sizes) / record["copy_gbs"] / 1e6
            saved_ms = (record["categories_ms"][rung.category] if rung.category else 0.0) - floor_ms
            busy_ms -= saved_ms
            predicted_ms = record["rungs"][-1]["step_ms"] - saved_ms
            add_run(rung.name, predicted_ms, replace(workload, kernels=kernels))
        if graphs:
            # what is left of the step is the GPU's own time
            predicted_ms = min(busy_ms, record["rungs"][-1]["step_ms"])
            in_graph = replace(workload, kernels=tuple(KERNELS), cuda_graph=True)
            add_run(CUDA_GRAPH, predicted_ms, in_graph)
        for name, other in others:
            try:
                add_run(name, None, other)
            except RunError as error:
                record["absent"].append(str(error))
    print("\n" + render(record))
    if plot_to:
        plot([record], plot_to)
    run_records.write_record(record_to, record)


def blocks(record: dict) -> tuple[list[dict], list[dict]]:
    """Return the rungs, which are the baseline and what was predicted, and all other runs."""
    first, *rest = record["rungs"]
    rungs = [rung for rung in rest if rung["predicted_ms"] is not None]
    return [first, *rungs], [rung for rung in rest if rung["predicted_ms"] is None]


def gains(rungs: list[dict]) -> list[tuple[str, float | None, float | None]]:
    """Return each rung's name, and what it was predicted to gain over the last and did gain, ms."""
    found = [(rungs[0]["name"], None, None)]
    for before, rung in itertools.pairwise(rungs):
        ms = (before["step_ms"] - rung[key] for key in ("predicted_ms", "step_ms"))
        found.append((f"+ {rung['name']}", *ms))
    return found


def is_ours(rung: dict) -> bool:
    """Return True if a run has any of our kernels."""
    return not set(KERNELS).isdisjoint(rung["kernels"])


def strongest(record: dict, of: str = "step_ms") -> dict:
    """Return the run without our kernels that takes the least time, or the least of another key."""
    others = (rung for rung in record["rungs"] if not is_ours(rung) and rung["name"] not in FLOAT8)
    return min(others, key=lambda rung: rung[of])


def measured_cells(rung: dict, baseline: dict) -> list[str]:
    """Return the columns of both tables: step time, busy GPU, tokens/s, peak, loss difference."""
    step = f"{rung['step_ms']:,.1f} ({rung['p20_ms']:,.1f} to {rung['p80_ms']:,.1f})"
    cells = [step, tables.formatted(rung["busy_ms"])]
    for key, scale, spec in (("tokens_per_second", 1, ",.0f"), ("peak_memory_bytes", 1e9, ".1f")):
        cells += [format(rung[key] / scale, spec), f"{rung[key] / baseline[key]:.2f}"]
    return [*cells, f"{max(run_records.relative_differences(baseline, rung)):.1e}"]


def render(record: dict) -> str:
    """Return everything that the ladder prints at the end, from its record.

    Without a GPU that is the losses: every run trains the same.
    """
    on_gpu = record["environment"]["gpu"] is not None
    rungs, after = blocks(record)
    rows = [
        [name, *map(tables.formatted, ms), *measured_cells(rung, rungs[0])]
        for rung, (name, *ms) in zip(rungs, gains(rungs))
    ]
    other_rows = [[each["name"], *measured_cells(each, rungs[0])] for each in after]
    columns = ["Step, ms (p20 to p80)", "GPU busy, ms", "Tokens/sec", "x tokens/s"]
    columns += ["Peak, GB", "x peak", "Loss difference"]
    workload = f"{size_in_words(record)}, {record['steps']} steps, data {record['data']}"
    ladder = tables.Table(["Rung", "Predicted gain, ms", "Measured gain, ms", *columns], rows)
    others = tables.Table(["Others", *columns], other_rows)
    busy = (
        f"Copy rate measured in this run: {record['copy_gbs']:,.0f} GB/s; the baseline keeps the "
        f"GPU busy for {record['busy_ms']:,.1f} ms of a step"
    )
    if not on_gpu:
        busy = tables.not_shown("times and gains are")
        ladder, others = (each.columns([0, len(each.headers) - 1]) for each in (ladder, others))
    lines = [
        run_records.environment_line(record["environment"]),
        f"{model_line(record)}; {workload}",
        busy,
        "",
        tables.title("The ladder"),
        ladder.text(),
        *(["", others.text()] if other_rows else []),
        *(f"Not measured: {sentence}" for sentence in record["absent"]),
    ]
    return "\n".join(lines)


def colour(rung: dict) -> str:
    if is_ours(rung):
        return OUR_COLOUR
    return BASELINE_COLOUR if rung["name"].startswith(BASELINE) else OPPONENT_COLOUR


def plot(records: list[dict], path: str) -> None:
    """Draw the step's time and the peak memory of every run as one PNG, a row for each record.

    Without a GPU nothing is drawn.
    """
    if records[0]["environment"]["gpu"] is None:
        print(tables.not_shown("a picture of times is"))
        return
    rows = [len(record["rungs"]) for record in records]
    figure, axes = tables.pyplot().subplots(
        len(records),
        2,
        figsize=(12, 0.6 + sum(0.9 + 0.3 * n for n in rows)),
        height_ratios=[3 + n for n in rows],
        squeeze=False,
        layout="constrained",
    )
    for record, (times, memory) in zip(records, axes):
        ladder, after = blocks(record)
        runs = [*ladder, *after][::-1]
        names = ["+ " * (run["predicted_ms"] is not None) + run["name"] for run in runs]
        for panel, what, key, unit in (
            (times, "time of a step, host included, ms", "step_ms", 1),
            (memory, "peak memory, GB", "peak_memory_bytes", 1e9),
        ):
            values = [run[key] / unit for run in runs]
            bars = panel.barh(names, values, color=[colour(run) for run in runs])
            panel.bar_label(bars, fmt="{:,.1f}", label_type="center", color="white", weight="bold")
            panel.axhline(len(after) - 0.5, color="black", linewidth=0.6)
            panel.margins(y=0.01)
            panel.spines[["top", "right"]].set_visible(False)
            panel.set_xlabel(f"{what}, lower is better")
        style = {"color": "black", "markersize": 14, "markeredgewidth": 2}
        times.plot([run["predicted_ms"] for run in runs], range(len(runs)), "|", **style)
        memory.set_yticks([])
        times.set_title(size_in_words(record), loc="left")
    first = records[0]
    dates = " and ".join(sorted({record["environment"]["date"] for record in records}))
    figure.suptitle(
        f"{first['model']}, {first['dtype']}, {first['environment']['gpu']}, {dates}\n"
        "orange: with our kernels, grey: the baseline, blue: others; "
        "black marks: what the baseline's profile predicted for the rung"
    )
    tables.save_plot(figure, path)


def main() -> None:
    args, workload = Workload.read(__doc__, FLAGS)
    run_ladder(workload, args.json, args.plot)


if __name__ == "__main__":
    command_line.run_main(main)
