"""Follow the profile to the floor: what is behind `finetune_optimized.py --ladder`, `--longest` and `--opponent`.

Each rung adds one kernel, the largest cost of the profile first.  Before it is measured it is predicted, from the
baseline's profile: what a category takes there, minus the time in which its bytes can pass through memory at the
measured copy rate (Amdahl: only that part of the step can go away).  Each run has a process of its own.
"""

import argparse
import functools
import gc
import json
import sys
import tempfile
from pathlib import Path

import torch

import compare_runs
from harness import (
    command_line,
    config_file,
    dataset,
    loading,
    pictures,
    run_records,
    stepping,
    tables,
    timing,
    training_run,
)
from harness.command_line import RunError, UserError
from harness.device import DEVICE, HAS_GPU
from harness.diagnose import RUNGS, sizes_of
from harness.workload import model_line
from next_steps.apply_kernels import KERNELS, apply_kernels, make_optimizer, model_kernels
from next_steps.memory_estimate import step_tryer

HERE = Path(__file__).parents[1]  # the project's folder
LONGEST_STEP = 1024 if HAS_GPU else 16  # tokens between two lengths that are tried
CPU_LENGTHS = 4  # on a CPU no more are tried: its memory ends where the machine stops to answer
CUDA_GRAPH = "cuda_graph"
IGNORED = {  # by each of the flags below
    "ladder": ["opponent", "longest", "kernels", "stochastic_rounding", "cuda_graph", "save"],
    "opponent": ["longest", "kernels", "stochastic_rounding", "cuda_graph"],
    "longest": ["data", "batch_size", "steps", "lr", "cuda_graph", "save"],
}
RUNG_COLOUR, BASELINE_COLOUR = "#D55E00", "#999999"  # ours; PyTorch and Liger-Kernel


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Of what finetune_optimized.py can do in place of one training run."""
    add = parser.add_argument
    # fmt: off
    add("--opponent", choices=["liger"], help="Liger-Kernel's patch and PyTorch's fused AdamW in place of our kernels")
    add("--ladder", action="store_true", help="baseline and every rung up to all kernels, in one table")
    add("--longest", action="store_true", help="from --seq-len on, the longest sequence that fits, batch 1")
    add("--plot", metavar="FILE.png", help="with --ladder: the step's time and memory, rung by rung, as a picture")
    # fmt: on


def takes_over(args: argparse.Namespace) -> bool:
    """Do what one of the flags asks for; False if there is none.

    Raises:
        UserError: a picture is asked for, but no ladder.
    """
    if args.plot and not args.ladder:
        raise UserError(f"--plot {args.plot} draws the ladder: add --ladder, or leave --plot out")
    run = climb if args.ladder else train_opponent if args.opponent else find_longest if args.longest else None
    if run is not None:
        run(args)
    return run is not None


def run_script(script: str, args: argparse.Namespace, *flags: str, steps: bool = True) -> dict:
    """The record that a script of this folder writes, run on args' workload in a process of its own.

    Raises:
        RunError: it failed; its own message is in the sentence.
    """
    workload = ["--model", args.model, "--data", args.data, "--batch-size", args.batch_size, "--seq-len", args.seq_len]
    workload += ["--seed", args.seed, "--dtype", args.dtype, *(["--random-init"] if args.random_init else [])]
    if steps:
        workload += ["--steps", args.steps, *(["--lr", args.lr] if args.lr is not None else [])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        command = [sys.executable, HERE / script, *workload, *flags, "--json", path]
        run = command_line.run_child([str(part) for part in command])
        if run.returncode != 0:
            said = (run.stderr.strip() or run.stdout.strip()).splitlines() or [f"exit code {run.returncode}"]
            raise RunError(f"{' '.join([script, *flags])} failed: {said[-1]}")
        return json.loads(path.read_text())


def climb(args: argparse.Namespace) -> None:
    """Run the baseline, its profile and every rung; print the table, write the record."""
    config = config_file.load_config(args, step_tryer(KERNELS))
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    record = {"kind": "ladder", "environment": run_records.environment(), "rungs": [], "absent": []}
    with tempfile.TemporaryDirectory() as folder:
        profile = run_script("profile_baseline.py", args, "--trace", f"{folder}/trace.json", steps=False)
    record["copy_gbs"] = profile["ceilings"]["copy_gbs"]
    record["categories_ms"] = {name: part["us"] / 1e3 for name, part in profile["categories"].items()}
    record["busy_ms"] = profile["busy_us"] / 1e3

    def add(name: str, predicted_ms: float | None, run: dict) -> None:
        keys = "losses", "tokens_per_second", "peak_memory_bytes", "kernels", "validation_loss_after"
        step = {"name": name, "predicted_ms": predicted_ms, "step_ms": 1e3 * run["median_seconds"]}
        record["rungs"].append(step | {key: run[key] for key in keys})
        print(f"{name}: {step['step_ms']:,.1f} ms per step", flush=True)

    baseline = run_script("finetune_baseline.py", args)
    record |= {key: baseline[key] for key in (*compare_runs.WORKLOAD, "parameters", "warmup_steps")}
    add("baseline", None, baseline)
    sizes, names, busy_ms = sizes_of(config, args), [], record["busy_ms"]
    for rung in RUNGS:
        names.append(rung.name)
        floor_ms = rung.floor_bytes(sizes) / record["copy_gbs"] / 1e6
        saved_ms = (record["categories_ms"][rung.category] if rung.category else 0.0) - floor_ms
        busy_ms -= saved_ms
        predicted_ms = record["rungs"][-1]["step_ms"] - saved_ms
        add(rung.name, predicted_ms, run_script("finetune_optimized.py", args, "--kernels", ",".join(names)))
    if HAS_GPU and args.steps > training_run.WARMUP_STEPS:  # what is left of the step is the GPU's own time
        predicted_ms = min(busy_ms, record["rungs"][-1]["step_ms"])
        add(CUDA_GRAPH, predicted_ms, run_script("finetune_optimized.py", args, "--kernels", "all", "--cuda-graph"))
    try:
        add("Liger-Kernel, fused AdamW", None, run_script("finetune_optimized.py", args, "--opponent", "liger"))
    except RunError as error:
        record["absent"].append(str(error))
    print("\n" + render(record))
    if args.plot:
        plot([record], args.plot)
    run_records.write_record(args.json, record)


def render(record: dict) -> str:
    """The ladder's table, from its record."""
    on_gpu = record["environment"]["gpu"] is not None
    baseline = record["rungs"][0]
    rows, before = [], None
    for rung in record["rungs"]:
        saved = None if before is None or rung["predicted_ms"] is None else before["step_ms"] - rung["step_ms"]
        predicted = None if saved is None else before["step_ms"] - rung["predicted_ms"]
        difference = max(compare_runs.relative_differences(baseline, rung))
        row = [rung["name"] if predicted is None else f"+ {rung['name']}"]
        row += [tables.number(ms) for ms in (predicted, saved, rung["step_ms"])]
        for key, scale, spec in (("tokens_per_second", 1, ",.0f"), ("peak_memory_bytes", 1e9, ".1f")):
            row += [format(rung[key] / scale, spec), f"{rung[key] / baseline[key]:.2f}"]
        rows.append([*row, f"{difference:.1e}"])
        before = rung
    headers = [
        "Rung", "Predicted gain, ms", "Measured gain, ms", "Step, ms", "Tokens/sec", "x baseline", "Peak, GB",
        "x baseline", "Largest loss difference",
    ]  # fmt: skip
    workload = f"{record['batch_size']} x {record['seq_len']} tokens, {record['steps']} steps, data {record['data']}"
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
    """A step's time and peak memory, rung by rung, a row of two panels for each record, as one PNG."""
    plt = pictures.pyplot()
    size = 12, 0.6 + 3.6 * len(records)
    figure, axes = plt.subplots(len(records), 2, figsize=size, squeeze=False, layout="constrained")
    for record, (times, memory) in zip(records, axes):
        rungs = record["rungs"][::-1]
        names = [rung["name"] if rung["predicted_ms"] is None else f"+ {rung['name']}" for rung in rungs]
        colours = [BASELINE_COLOUR if rung["predicted_ms"] is None else RUNG_COLOUR for rung in rungs]
        for panel, unit, values in (
            (times, "ms", [rung["step_ms"] for rung in rungs]),
            (memory, "GB", [rung["peak_memory_bytes"] / 1e9 for rung in rungs]),
        ):
            panel.barh(names, values, color=colours)
            for place, value in enumerate(values):
                panel.text(0.01 * max(values), place, f"{value:,.1f}", color="white", va="center", weight="bold")
            panel.spines[["top", "right"]].set_visible(False)
            panel.set_xlabel(f"{'time of a step' if unit == 'ms' else 'peak memory'}, {unit}, lower is better")
        predicted = [(rung["predicted_ms"], i) for i, rung in enumerate(rungs) if rung["predicted_ms"] is not None]
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


def train_opponent(args: argparse.Namespace) -> None:
    """The same fine-tuning with Liger-Kernel's patch for LLaMA and PyTorch's fused AdamW."""
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError as error:
        raise UserError("Liger-Kernel is not installed: pip install liger-kernel") from error
    apply_liger_kernel_to_llama()
    fused_adamw = functools.partial(stepping.make_optimizer, fused=True)
    model = loading.load_model(args)
    llama.finetune(model, args, title="Liger-Kernel", kernels=["Liger-Kernel"], make_optimizer=fused_adamw)


def find_longest(args: argparse.Namespace) -> None:
    """Train on random sequences, from --seq-len on LONGEST_STEP tokens longer each time, until the memory is full."""
    model = loading.load_model(args, step_tryer(args.kernels))
    apply_kernels(model, model_kernels(args.kernels))
    optimizer = make_optimizer(model, 1e-5, args.kernels, args.stochastic_rounding)
    vocabulary, limit = model.config.vocab_size, model.config.max_position_embeddings
    first = -(-args.seq_len // LONGEST_STEP) * LONGEST_STEP  # --seq-len or the next multiple
    record = {
        "kind": "longest", "environment": run_records.environment(), "kernels": args.kernels,
        **llama.describe_workload(model, args), "first_length": first, "length_step": LONGEST_STEP,
        "lengths": [], "peaks": [], "stopped_by": "the model's positions",
    }  # fmt: skip
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    lengths = range(first, limit + 1, LONGEST_STEP)
    if not HAS_GPU and len(lengths) > CPU_LENGTHS:
        lengths = lengths[:CPU_LENGTHS]
        record["stopped_by"] = f"the {CPU_LENGTHS} lengths that are tried without a GPU"
    for length in lengths:
        ids = torch.randint(vocabulary, (1, length), device=DEVICE)
        try:
            if HAS_GPU:
                torch.cuda.reset_peak_memory_stats()
            loss, seconds = stepping.timed_step(model, optimizer, dataset.Batch(ids, ids, length))
        except RuntimeError as error:
            if not command_line.ran_out_of_memory(error):
                raise
            record["stopped_by"] = "the GPU's memory"
            break
        record["lengths"].append(length)
        record["peaks"].append(timing.peak_memory_bytes())
        print(f"{length:>7,} tokens: {seconds:6.2f} s, peak {record['peaks'][-1] / 1e9:.1f} GB", flush=True)
        del loss
        if HAS_GPU:
            gc.collect()
            torch.cuda.empty_cache()  # blocks of the last length do not fit the next
    print("\n" + render_longest(record))
    run_records.write_record(args.json, record)


def render_longest(record: dict) -> str:
    """What --longest found, from its record."""
    lengths = record["lengths"]
    longest = f"{lengths[-1]:,}" if lengths else f"less than {record['first_length']:,}"
    limit = f"in steps of {record['length_step']:,}; stopped by {record['stopped_by']}"
    return "\n".join(
        [
            run_records.environment_line(record["environment"]),
            f"{model_line(record)}; custom kernels: {', '.join(record['kernels']) or 'none'}",
            f"Longest sequence that fits, batch 1: {longest} tokens ({limit})",
        ]
    )
