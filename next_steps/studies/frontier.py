"""Memory against time: what does each way of keeping less cost, and how long may a sequence be?

    python -m next_steps.studies.frontier --random-init \\
        --json runs/frontier.json --plot runs/frontier.png
    python -m next_steps.studies.frontier --longest --random-init --kernels all --seq-len 24576

Three sizes of a step run without and with all kernels, at each level of recompute.py, and at the
last level with offloading.  Estimates stand beside the measurements: the memory by
memory_estimate.py, the time by step_time.py.  If another row of the same step has less memory and
less time, nobody needs the row, and the row names the other.

With --longest one way takes steps on one random sequence.  The length doubles until the memory is
full or the model has no more positions.  Then it is halfway between what fitted and what did not.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace

from harness.cli import command_line, flags, tables
from harness.cli.command_line import UserError, flag_name
from harness.cli.flags import OF_OPTIMIZED, OF_TRAINING, RECOMPUTE
from harness.cli.output_files import check_outputs
from harness.cli.workload import Workload, kernels_in_words, model_line
from harness.profiling.kernel_facts import KERNELS
from harness.records import run_records

LEVELS = [*((level, False) for level in RECOMPUTE), (RECOMPUTE[-1], True)]
GPU, CPU = True, False
# (sequences, tokens in each, micro-batches); on a CPU for Triton's interpreter
FRONTIER_SIZES = {
    GPU: ((1, 8192, 1), (4, 2048, 1), (1, 8192, 8)),
    CPU: ((1, 8, 1), (2, 4, 1), (1, 4, 2)),
}
TIMED = 3  # steps after one to warm up; with several micro-batches one step is timed
HEADERS = ["Step", "Kernels", "Recompute", "GB, estimated", "GB", "ms, estimated", "ms"]
HEADERS += ["Better in both"]
NAMING = 4  # columns that are told without a GPU too: how a row is named, and its estimate
KERNEL_COLOURS = {"baseline": "#777777", "all kernels": "#D55E00"}
MARKERS = "osD^v"

LENGTH_STEP = {GPU: 1024, CPU: 16}  # tokens: all lengths of --longest are multiples of it
CPU_LENGTHS = 3  # no more on a CPU: a machine whose memory is full does not answer
POSITIONS = "the model's positions"

# ---------------------------------------------------------------- memory against time


def labels(w: Workload) -> dict[str, str]:
    """Return the keys of a row that name it."""
    tokens = f"{w.batch_size} x {w.seq_len:,}"
    return {
        "size": tokens if w.micro_batches == 1 else f"{w.micro_batches} x ({tokens})",
        "kernels": "all kernels" if w.kernels else "baseline",
        "recompute": w.recompute + " + offload" * w.offload,
    }


def measured_ways(workload: Workload) -> Iterator[tuple[Workload, dict]]:
    """Yield each way of a set of kernels with its peak bytes and milliseconds, or a `failure`."""
    from harness.cli.device import DEVICE, HAS_GPU
    from harness.data.dataset import random_batch
    from harness.steps.measured import measure
    from next_steps.finetuning import kernel_training
    from next_steps.patches.recompute import set_recompute

    model, _, optimizer = kernel_training.prepare_kernels(workload)
    for (*shape, n), (level, offload) in itertools.product(FRONTIER_SIZES[HAS_GPU], LEVELS):
        set_recompute(model, level, offload and HAS_GPU)
        batches = [random_batch(shape, model.config.vocab_size, DEVICE) for _ in range(n)]
        row = measure(model, optimizer, [batches[:2]], [batches] * (TIMED if n == 1 else 1))
        if "step_ms" in row:
            row["step_ms"] = statistics.median(row["step_ms"])
        size = {"batch_size": shape[0], "seq_len": shape[1], "accumulate": n if n > 1 else None}
        yield replace(workload, **size, recompute=level, offload=offload), row


def measure_frontier(workload: Workload, record_to: str | None, plot_to: str | None) -> None:
    """Predict and measure every row, print the table, write record and picture."""
    from harness.cli.device import HAS_GPU, free_memory
    from harness.model.architecture import TORCH_DTYPES, ModelFacts
    from harness.model.config_file import load_config
    from harness.profiling import profiler
    from next_steps.memory import memory_estimate, step_time

    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")
    config = load_config(workload)
    rates = profiler.measure_ceilings(TORCH_DTYPES[workload.dtype])
    rates["link_gbs"] = step_time.link_rate()
    record = {
        "kind": "frontier",
        "environment": run_records.environment(),
        **workload.as_record(),
        **ModelFacts(config, workload).counts(),
        "rates": rates,
        "rows": [],
    }
    attention = {}  # its rates by a sequence's shape
    for kernels in ((), tuple(KERNELS)):
        for w, row in measured_ways(replace(workload, kernels=kernels)):
            shape = w.batch_size, w.seq_len
            if shape not in attention:
                attention[shape] = step_time.attention_rates(config, w)
            n_bytes = memory_estimate.estimate(config, w)["peak_memory_bytes"]
            work = step_time.count_work(config, w)
            rates_here = rates | {"attention_tflops": attention[shape]}
            ms = step_time.predict_ms(work, rates_here, w.micro_batches)
            row = labels(w) | {"estimated_bytes": n_bytes, "estimated_ms": ms} | row
            record["rows"].append(row)
            cells = setup_cells(row, record["rows"])
            print("  ".join(cells if HAS_GPU else cells[: NAMING - 1]), flush=True)
        free_memory()  # of this model
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


def setup_cells(row: dict, rows: list[dict]) -> list[str]:
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
    on_gpu = record["environment"]["gpu"] is not None
    whole = tables.Table(HEADERS, [setup_cells(row, rows) for row in rows])
    return "\n".join(
        [
            run_records.environment_line(record["environment"]),
            model_line(record),
            "",
            tables.title("Memory against time"),
            *([] if on_gpu else [tables.not_shown("measured times and memory are"), ""]),
            (whole if on_gpu else whole.columns(range(NAMING))).text(),
        ]
    )


def plot(record: dict, path: str) -> None:
    """Draw GB against ms per step, a panel for each size; estimates are hollow; on a GPU."""
    env = record["environment"]
    if env["gpu"] is None:
        print(tables.not_shown("a picture of times is"))
        return
    sizes = list(dict.fromkeys(row["size"] for row in record["rows"]))
    levels = list(dict.fromkeys(row["recompute"] for row in record["rows"]))
    figure, axes = tables.pyplot().subplots(
        1, len(sizes), figsize=(5 * len(sizes), 5), layout="constrained", squeeze=False
    )
    for axis, size in zip(axes[0], sizes):
        for kernels, colour in KERNEL_COLOURS.items():
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
    figure.suptitle(f"{record['model']}, {record['dtype']}, {env['gpu']}")
    tables.save_plot(figure, path)


# ---------------------------------------------------------------- the longest sequence


def find_longest(workload: Workload, record_to: str | None) -> None:
    """Find the longest sequence that fits and time a step of it; print and record both."""
    from harness.cli.device import DEVICE, HAS_GPU
    from harness.data.dataset import random_batch
    from harness.model.architecture import ModelFacts
    from harness.steps.measured import measure
    from next_steps.finetuning import kernel_training
    from next_steps.patches.projections import layers_in_fp8

    model, _, optimizer = kernel_training.prepare_kernels(workload)
    if not HAS_GPU:
        print(tables.NO_GPU_NOTE + "\n")

    def take_step(length: int) -> dict:
        batch = random_batch((1, length), model.config.vocab_size, DEVICE)
        return measure(model, optimizer, [], [[batch] * workload.micro_batches])

    step = LENGTH_STEP[HAS_GPU]
    take_step(step)  # makes the optimizer's state, which then exists for every length
    first = length = -(-workload.seq_len // step) * step
    too_long = model.config.max_position_embeddings // step * step + step
    fitting, stopped_by = {}, POSITIONS
    while length is not None and length < too_long:
        row = take_step(length)
        if "failure" in row:
            too_long, stopped_by = length, row["failure"]
            found = f"more than {stopped_by}"
        else:
            fitting[length] = row
            seconds, gb = row["step_ms"][0] / 1e3, row["peak_memory_bytes"] / 1e9
            found = f"{seconds:6.2f} s, peak {gb:.1f} GB" if HAS_GPU else "fits"
        print(f"{length:>7,} tokens: {found}", flush=True)
        length = next_length(max(fitting, default=None), too_long, stopped_by != POSITIONS, step)
        if not HAS_GPU and len(fitting) == CPU_LENGTHS and length is not None:
            stopped_by = f"the {CPU_LENGTHS} lengths that are tried without a GPU"
            break
    lengths = sorted(fitting)
    record = {
        "kind": "longest",
        "environment": run_records.environment(),
        **workload.as_record(),
        **ModelFacts(model.config, workload).counts(),
        **layers_in_fp8(model, workload),
        "first_length": first,
        "length_step": step,
        "stopped_by": stopped_by,
        "lengths": lengths,
        "peaks": [fitting[length]["peak_memory_bytes"] for length in lengths],
    }
    if lengths:
        again = fitting[lengths[-1]] | take_step(lengths[-1])  # the first step of a length compiles
        record["seconds"] = again["step_ms"][0] / 1e3
        record["attention_share"] = attention_share(model.config, workload, lengths[-1])
    print("\n" + render_longest(record))
    run_records.write_record(record_to, record)


def next_length(longest: int | None, too_long: int, bisect: bool, step: int) -> int | None:
    """Return the next length to try, a multiple of `step`; None: no more."""
    if longest is None or too_long - longest <= step:
        return None
    if bisect:
        return (longest + too_long) // (2 * step) * step
    return min(2 * longest, too_long - step)


def attention_share(config, workload: Workload, length: int) -> float:
    """Return attention's share of a step's FLOPs, with nothing computed twice."""
    from harness.model.architecture import ModelFacts

    without, whole = map(ModelFacts(config, workload).flops_per_token, (0, length))
    return 1 - without / whole


def render_longest(record: dict) -> str:
    """Return what --longest prints at the end."""
    lengths = record["lengths"]
    longest = f"{lengths[-1]:,}" if lengths else f"less than {record['first_length']:,}"
    steps = f", {record['accumulate']} micro-batches a step" if "accumulate" in record else ""
    limit = f"in steps of {record['length_step']:,}; stopped by {record['stopped_by']}"
    lines = [
        run_records.environment_line(record["environment"]),
        f"{model_line(record)}; custom kernels: {kernels_in_words(record)}",
        f"Longest sequence that fits, batch 1{steps}: {longest} tokens ({limit})",
    ]
    if "seconds" in record:  # older records have none
        seconds, share = record["seconds"], record["attention_share"]
        tokens = lengths[-1] * record.get("accumulate", 1)
        limiter = "attention" if share > 0.5 else "matrix products with weights"
        on_gpu = record["environment"]["gpu"] is not None
        speed = f"{seconds:.2f} s, {tokens / seconds:,.0f} tokens/s, " if on_gpu else ""
        has = f"attention has {share:.0%} of the FLOPs"
        lines.append(f"A step of it: {speed}limited by {limiter}: {has}")
    return "\n".join(lines)


# ---------------------------------------------------------------- command line


def parse_args() -> argparse.Namespace:
    not_here = "--data", "--batch-size", "--pack", "--cuda-graph", "--parallel", "--deterministic"
    of_training = flags.without(OF_TRAINING, *not_here)
    own = {
        "--plot": flags.row("GB against ms per step as a picture", metavar="FILE.png"),
        "--longest": flags.switch("from --seq-len on, the longest sequence that fits, batch 1"),
    }
    of_kernels = flags.of_kernels(KERNELS, default="none") | OF_OPTIMIZED
    args = flags.FlagParser(__doc__, own | of_training | of_kernels).parse_args()
    if args.longest and args.plot:
        raise UserError("--plot draws memory against time: leave --plot or --longest out")
    if not args.longest and (rest := args.given - {"model", "random_init", "json", "plot"}):
        raise UserError(f"{flag_name(min(rest))} is for --longest: add it, or leave the flag out")
    check_outputs(args)
    return args


def main() -> None:
    args = parse_args()
    from harness.cli.device import HAS_GPU

    workload = replace(Workload.from_flags(args, HAS_GPU), data="synthetic", lr=1e-5)
    if args.longest:
        return find_longest(workload, args.json)
    largest = max(seq_len for _, seq_len, _ in FRONTIER_SIZES[HAS_GPU])
    measure_frontier(replace(workload, seq_len=largest), args.json, args.plot)


if __name__ == "__main__":
    command_line.run_main(main)
