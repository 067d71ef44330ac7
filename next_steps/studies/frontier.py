"""Memory against time: what does each way of keeping less cost?

    python -m next_steps.studies.frontier --random-init \\
        --json runs/frontier.json --plot runs/frontier.png

Three sizes of a step run without and with all kernels, at each level of recompute.py, and at the
last level with offloading.  Estimates stand beside the measurements: the memory by
memory_estimate.py, the time by step_time.py.  If another row of the same step has less memory and
less time, nobody needs the row, and the row names the other.

The model is built once; kernels and levels change around the same weights.
"""

import gc
import statistics
from dataclasses import replace

from harness.cli import command_line, flags, tables
from harness.cli.flags import OF_TRAINING, RECOMPUTE
from harness.cli.output_files import check_outputs
from harness.cli.workload import Workload, model_line
from harness.profiling.kernel_facts import KERNELS
from harness.records import run_records

LEVELS = [*((level, False) for level in RECOMPUTE), (RECOMPUTE[-1], True)]
GPU, CPU = True, False
# (sequences, tokens in each, micro-batches); on a CPU for Triton's interpreter
SIZES = {GPU: ((1, 8192, 1), (4, 2048, 1), (1, 8192, 8)), CPU: ((1, 8, 1), (2, 4, 1), (1, 4, 2))}
TIMED = 3  # steps after one to warm up; with several micro-batches one step is timed
HEADERS = ["Step", "Kernels", "Recompute", "GB, estimated", "GB", "ms, estimated", "ms"]
HEADERS += ["Better in both"]
COLOURS = {"baseline": "#777777", "all kernels": "#D55E00"}
MARKERS = "osD^v"


def labels(w: Workload) -> dict[str, str]:
    """Return the keys of a row that name it."""
    tokens = f"{w.batch_size} x {w.seq_len:,}"
    return {
        "size": tokens if w.micro_batches == 1 else f"{w.micro_batches} x ({tokens})",
        "kernels": "all kernels" if w.kernels else "baseline",
        "recompute": w.recompute + " + offload" * w.offload,
    }


def ways_of(workload: Workload, on_gpu: bool) -> list[Workload]:
    """Return what each row measures, one set of kernels after the other."""
    return [
        replace(
            workload,
            kernels=tuple(kernels),
            batch_size=batch_size,
            seq_len=seq_len,
            accumulate=micro_batches if micro_batches > 1 else None,
            recompute=level,
            offload=offload,
        )
        for kernels in ((), KERNELS)
        for batch_size, seq_len, micro_batches in SIZES[on_gpu]
        for level, offload in LEVELS
    ]


def measure(w: Workload, model, optimizer) -> dict:
    """Return peak bytes and milliseconds of a step, or a `failure` if the step does not fit."""
    import torch

    from harness.cli.device import DEVICE, HAS_GPU, free_memory
    from harness.data.dataset import random_batch
    from harness.steps import stepping, timing
    from next_steps.patches.offload import HostMemoryError
    from next_steps.patches.recompute import set_recompute

    set_recompute(model, w.recompute, w.offload and HAS_GPU)
    shape, vocabulary = (w.batch_size, w.seq_len), model.config.vocab_size
    batches = [random_batch(shape, vocabulary, DEVICE) for _ in range(w.micro_batches)]
    try:
        stepping.timed_step(model, optimizer, batches[:2])
        if HAS_GPU:
            torch.cuda.reset_peak_memory_stats()
        timed = TIMED if w.micro_batches == 1 else 1
        seconds = [stepping.timed_step(model, optimizer, batches)[1] for _ in range(timed)]
    except HostMemoryError:
        return {"failure": "the host's memory"}
    except RuntimeError as error:
        if not command_line.ran_out_of_memory(error):
            raise
        return {"failure": "the GPU's memory"}
    finally:
        model.zero_grad(set_to_none=True)
        free_memory()
    peak = timing.peak_memory_bytes()
    return {"peak_memory_bytes": peak, "step_ms": 1e3 * statistics.median(seconds)}


def walk(workload: Workload, record_to: str | None, plot_to: str | None) -> None:
    """Predict and measure every row, print the table, write record and picture."""
    from harness.cli.device import HAS_GPU
    from harness.model.architecture import TORCH_DTYPES
    from harness.model.loading import load_model
    from harness.profiling import profiler
    from next_steps.memory import memory_estimate, step_time
    from next_steps.patches.apply_kernels import apply_kernels, make_optimizer, model_kernels
    from next_steps.patches.recompute import set_recompute

    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    rates = profiler.measure_ceilings(TORCH_DTYPES[workload.dtype])
    rates["link_gbs"] = step_time.link_rate()
    model = load_model(workload)
    record = {
        "kind": "frontier",
        "environment": run_records.environment(),
        **workload.as_record(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "rates": rates,
        "rows": [],
    }
    optimizer, before, attention = None, None, {}  # attention: its rates by its shape
    for w in ways_of(workload, HAS_GPU):
        if w.kernels != before:
            optimizer, before = None, w.kernels  # free the old optimizer's moments first
            gc.collect()
            apply_kernels(set_recompute(model, None), model_kernels(w.kernels))
            optimizer = make_optimizer(model, 1e-5, w.kernels)
        shape = w.batch_size, w.seq_len
        if shape not in attention:
            attention[shape] = step_time.attention_rates(model.config, w)
        estimate = memory_estimate.estimate(model.config, w)
        row = labels(w) | {"estimated_bytes": estimate["peak_memory_bytes"]}
        work = step_time.count_work(model.config, w)
        rates_here = rates | {"attention_tflops": attention[shape]}
        row["estimated_ms"] = step_time.predict_ms(work, rates_here, w.micro_batches)
        row |= measure(w, model, optimizer)
        record["rows"].append(row)
        print("  ".join(cells(row, record["rows"])), flush=True)
    print("\n" + render(record))
    run_records.write_record(record_to, record)
    if plot_to:
        plot(record, plot_to)


def better_in_both(row: dict, rows: list[dict]) -> str:
    """Return the fastest row of the same step with less memory and less time; empty: none."""
    same_step = (other for other in rows if other["size"] == row["size"] and "step_ms" in other)
    keys = "step_ms", "peak_memory_bytes"
    better = (other for other in same_step if all(other[key] < row[key] for key in keys))
    best = min(better, key=lambda other: other["step_ms"], default=None)
    return f"{best['kernels']}, {best['recompute']}" if best else ""


def cells(row: dict, rows: list[dict]) -> list[str]:
    """Return a row of the table."""
    measured = "step_ms" in row
    return [
        row["size"],
        row["kernels"],
        row["recompute"],
        f"{row['estimated_bytes'] / 1e9:.1f}",
        f"{row['peak_memory_bytes'] / 1e9:.1f}" if measured else "n/a",
        f"{row['estimated_ms']:,.0f}",
        f"{row['step_ms']:,.0f}" if measured else "n/a",
        better_in_both(row, rows) if measured else f"more than {row['failure']}",
    ]


def render(record: dict) -> str:
    """Return everything that is printed at the end."""
    rows = record["rows"]
    return "\n".join(
        [
            run_records.environment_line(record["environment"]),
            model_line(record),
            "",
            tables.title("Memory against time"),
            tables.table(HEADERS, [cells(row, rows) for row in rows]),
        ]
    )


def plot(record: dict, path: str) -> None:
    """Draw GB against ms per step, a panel for each size; estimates are hollow."""
    sizes = list(dict.fromkeys(row["size"] for row in record["rows"]))
    levels = list(dict.fromkeys(row["recompute"] for row in record["rows"]))
    figure, axes = tables.pyplot().subplots(
        1, len(sizes), figsize=(5 * len(sizes), 5), layout="constrained", squeeze=False
    )
    for axis, size in zip(axes[0], sizes):
        for kernels, colour in COLOURS.items():
            rows = [r for r in record["rows"] if (r["size"], r["kernels"]) == (size, kernels)]
            measured = [row for row in rows if "step_ms" in row]
            ms = [row["step_ms"] for row in measured]
            peaks = [row["peak_memory_bytes"] / 1e9 for row in measured]
            axis.plot(ms, peaks, color=colour, label=kernels)
            for row in rows:
                marker = MARKERS[levels.index(row["recompute"])]
                style = {"marker": marker, "color": colour, "linestyle": "none"}
                hollow = {"markerfacecolor": "none", "alpha": 0.6}
                axis.plot(row["estimated_ms"], row["estimated_bytes"] / 1e9, **style, **hollow)
                if "step_ms" in row:
                    axis.plot(row["step_ms"], row["peak_memory_bytes"] / 1e9, **style)
        for level, marker in zip(levels, MARKERS):
            axis.plot([], [], marker=marker, color="black", linestyle="none", label=level)
        axis.set(title=f"{size} tokens", xlabel="ms per step", ylabel="peak, GB")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(title="hollow: estimated")
    gpu = record["environment"]["gpu"] or "CPU, not meaningful"
    figure.suptitle(f"{record['model']}, {record['dtype']}, {gpu}")
    tables.save_plot(figure, path)


def main() -> None:
    shared = {flag: OF_TRAINING[flag] for flag in ("--model", "--random-init", "--json")}
    plot = {"--plot": flags.row("GB against ms per step as a picture", metavar="FILE.png")}
    args = flags.Parser(__doc__, shared, plot).parse_args()
    check_outputs(args)
    from harness.cli.device import HAS_GPU

    workload = Workload.from_flags(args, HAS_GPU)
    largest = max(seq_len for _, seq_len, _ in SIZES[HAS_GPU])
    walk(replace(workload, seq_len=largest, data="synthetic"), args.json, args.plot)


if __name__ == "__main__":
    command_line.run_main(main)
