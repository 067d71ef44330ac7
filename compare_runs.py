"""Step 11, the result: compare recorded fine-tuning runs.

    python finetune_baseline.py  --json baseline.json
    python finetune_optimized.py --json optimized.json
    python compare_runs.py baseline.json optimized.json --plot comparison.png

The others are compared with the first run.  The exit code is 1 if the losses of
two runs of the same workload drift apart.  A kernel that is faster and trains
something else is wrong.
"""

import math
import os
from collections.abc import Callable

from harness.cli import command_line, output_files, tables, workload
from harness.cli.command_line import UserError
from harness.cli.tables import Column, Table
from harness.cli.workload import Workload, size_in_words
from harness.records import run_records
from harness.records.spread import spread, timed, unless_same, waited

# the largest relative difference of a step's loss that rounding explains, over tens of steps
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
STEPS_SHOWN = 20


def read_run(path: str) -> dict:
    """Read the record of a fine-tuning run."""
    record = run_records.read_record(path, "finetune")
    columns = {column: len(record[column]) for column in ("losses", "seconds", "tokens")}
    steps = record["steps"]
    found = [f"{n} {column} of {steps} steps" for column, n in columns.items() if n != steps]
    found += [] if timed(record) else ["no step of it counts"]
    if found:
        raise UserError(f"{path} is a damaged record: {found[0]}; run its script again")
    return record


def workload_differences(first: dict, other: dict) -> list[str]:
    """Return a sentence for each setting in which two runs' workloads differ."""
    return Workload.from_record(first).differences(Workload.from_record(other))


def validated_alike(first: dict, other: dict) -> bool:
    """Return True if two runs were validated on the same sequences, by what their records say.

    Older records lack the digest.  Their runs validated on as many sequences as a micro-batch has.
    Without both digests the settings tell that choose the sequences.
    """
    if "held_out" in first and "held_out" in other:
        return first["held_out"] == other["held_out"]
    choices = []
    for record in (first, other):
        run = Workload.from_record(record)
        n_sequences = run.sequences * (run.micro_batches if "held_out" in record else 1)
        choices.append([os.path.realpath(run.data), run.seq_len, run.pack, n_sequences])
    return choices[0] == choices[1]


def is_same_training(first: dict, other: dict) -> bool | None:
    """Return True if rounding explains the differences of all losses.

    None: nobody can say.  The workloads differ, or one run alone multiplies in FP8, the coarsest.
    """
    if workload_differences(first, other) or first.get("fp8") != other.get("fp8"):
        return None
    return max(run_records.relative_differences(first, other)) <= LOSS_TOLERANCE[first["dtype"]]


def render(names: list[str], records: list[dict]) -> str:
    """Return the whole report."""
    first, others = records[0], list(zip(names[1:], records[1:]))
    parts = [tables.title("Comparison of fine-tuning runs")]
    for name, record in zip(names, records):
        where = run_records.environment_line(record["environment"])
        parts.append(f"{name}: {where}\n  {how_in_words(record, first)}")
    parts.append(
        f"Workload of the first: {first['model']} ({first['weights']}, {first['dtype']}), "
        f"data {first['data']}, {size_in_words(first)}, "
        f"{first['steps']} steps, seed {first['seed']}"
        + (f", teacher {first['teacher']}" if "teacher" in first else "")
        + (f", {workload.lora_in_words(first)}" if "lora_rank" in first else "")
    )
    if on_cpu := first["environment"]["gpu"] is None:
        where = "Measured on a CPU through Triton's interpreter"
        parts.append(f"{where}: times and ratios are NOT meaningful.")
    parts.append(runs_table(names, records))
    if not on_cpu:
        ranges = "20th to 80th percentile; no difference: these ranges overlap."
        parts.append(f"{tables.OF_STEPS}\nStep: the median; p20 to p80: {ranges}")
    for name, record in others:
        if not validated_alike(first, record):
            where = f"{name}: validated on other sequences than {names[0]}"
            parts.append(f"{where}, so their validation losses cannot be compared")
    comparable = []
    for name, record in others:
        if differences := workload_differences(first, record):
            why = f"not the same workload, so losses are not compared: {'; '.join(differences)}"
            parts.append(f"{name}: {why}")
        else:
            comparable.append((name, record))
    if comparable:
        parts.append(loss_table(names[0], first, comparable))
    return "\n\n".join([*parts, *(verdict(name, first, record) for name, record in comparable)])


def verdict(name: str, first: dict, record: dict) -> str:
    """Say how far the losses of a run are from the first run's, and what follows."""
    largest = max(run_records.relative_differences(first, record))
    apart = f"largest relative loss difference over {first['steps']} steps {largest:.1e}"
    if (is_same := is_same_training(first, record)) is None:
        how = f"fp8 {record.get('fp8')}, not {first.get('fp8')}"
        return f"{name}: {apart} ({how}: numbers are rounded otherwise, so no verdict)"
    allowed = f"allowed in {first['dtype']}: {LOSS_TOLERANCE[first['dtype']]:.0e}"
    same = "the same training" if is_same else "NOT the same training"
    return f"{name}: {apart} ({allowed}): {same}"


def how_in_words(record: dict, first: dict) -> str:
    """Say what a run was made with, and what the table does not show of its steps."""
    words = [f"custom kernels: {workload.kernels_in_words(record)}"]
    if (size := size_in_words(record)) != size_in_words(first):
        words.append(size)
    shares = {"padding": record.get("padding", 0.0), "waiting for data": waited(record)}
    words += [f"{what}: {100 * share:.1f} %" for what, share in shares.items() if share >= 1e-2]
    return "; ".join(words)


def rates(record: dict) -> list[float]:
    """Return the tokens per second of each timed step."""
    return [n / seconds for n, seconds in zip(timed(record, "tokens"), timed(record))]


def runs_table(names: list[str], records: list[dict]) -> str:
    """Return each run's times, throughput and memory, and the ratios to the first run."""
    rows = [record | {"name": name} for name, record in zip(names, records)]
    first, peak = rows[0], rows[0]["peak_memory_bytes"]

    def ratio(run: dict, over: float, under: float, column: Callable) -> str:
        both = (spread(column(each)) for each in (first, run))
        words = f"{over / under:.2f}x"
        return words if run is first else unless_same(words, *both)

    def speedup(run: dict) -> str:
        return ratio(run, first["median_seconds"], run["median_seconds"], timed)

    def throughput(run: dict) -> str:
        return ratio(run, run["tokens_per_second"], first["tokens_per_second"], rates)

    columns = [
        Column("Run", "name"),
        Column("Step (s)", "median_seconds", ".4f"),
        Column("p20 to p80", lambda run: "{:.4f} to {:.4f}".format(*spread(timed(run)))),
        Column("Tokens/sec", "tokens_per_second", ",.0f"),
        Column("Peak (GB)", lambda run: run["peak_memory_bytes"] / 1e9, ".1f"),
        Column("Speedup", speedup),
        Column("Throughput", throughput),
        Column("Memory", lambda run: f"{run['peak_memory_bytes'] / peak:.2f}x"),
        Column("Val. loss", "validation_loss_after", ".4f"),
    ]
    return Table.of(columns, rows).text()


def loss_table(first_name: str, first: dict, comparable: list[tuple[str, dict]]) -> str:
    """Return the losses step by step. A long run shows STEPS_SHOWN steps, spread evenly."""
    last = len(first["losses"]) - 1
    stride = math.ceil((last + 1) / STEPS_SHOWN)

    def losses(name: str, record: dict) -> Column:
        return Column(f"Loss {name}", lambda step: record["losses"][step], ".5f")

    columns = [Column("Step", lambda step: step + 1), losses(first_name, first)]
    for name, record in comparable:
        differences = run_records.relative_differences(first, record)
        columns += [
            losses(name, record),
            Column("Relative difference", differences.__getitem__, ".1e"),
        ]
    return Table.of(columns, sorted({*range(0, last, stride), last})).text()


def plot(names: list[str], records: list[dict], path: str) -> None:
    """Draw loss curves, tokens per second and peak memory, as one PNG."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    plt = tables.pyplot()
    figure, (losses, throughput, memory) = plt.subplots(
        1, 3, figsize=(12, 4), width_ratios=[2, 1, 1]
    )
    for name, record in zip(names, records):
        style = "-" if record is records[0] else "--"
        losses.plot(range(1, len(record["losses"]) + 1), record["losses"], style, label=name)
    losses.set(xlabel="step", ylabel="training loss", title="Loss")
    losses.xaxis.set_major_locator(MaxNLocator(integer=True))
    losses.legend()
    colors = [f"C{i}" for i in range(len(records))]
    peaks = [record["peak_memory_bytes"] for record in records]
    # The peak of a run on a CPU may be below 1 GB.
    unit, size = tables.decimal_unit(peaks, "GB", "MB", 1e9)
    for axis, title, values, spec in [
        (throughput, "Tokens per second", [r["tokens_per_second"] for r in records], ",.0f"),
        (memory, f"Peak memory ({unit})", [peak / size for peak in peaks], ",.1f"),
    ]:
        bars = axis.bar(names, values, color=colors)
        axis.bar_label(bars, [format(v, spec) for v in values], padding=2)
        axis.set(title=title, ylim=(0, 1.15 * max(values)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if len(names) > 2:  # side by side they would touch
            axis.tick_params(axis="x", rotation=30)
    throughput.set_xlabel("wall clock, host included")
    env = records[0]["environment"]
    figure.suptitle(
        f"{records[0]['model']}, {size_in_words(records[0])}, "
        f"{env['gpu'] or 'CPU (times not meaningful)'}, {env['date']}"
    )
    figure.tight_layout()
    tables.save_plot(figure, path, dpi=130)


def run_names(records: list[dict]) -> list[str]:
    """Return short, distinct names: the titles; if they repeat, with the dtype or a number."""
    titles = [record["title"] for record in records]
    for endings in ([record["dtype"] for record in records], range(1, len(records) + 1)):
        pairs = zip(titles, endings)
        names = [t if titles.count(t) == 1 else f"{t} {ending}" for t, ending in pairs]
        if len(set(names)) == len(names):
            break
    return names


def main() -> int:
    parser = command_line.Parser(__doc__)
    several = {"nargs": "+", "metavar": "RUN.json"}
    parser.add_argument("records", **several, help="two or more records of fine-tuning scripts")
    parser.add_argument("--plot", metavar="FILE.png", help="loss curves and bars as a picture")
    args = parser.parse_args()
    if len(args.records) < 2:
        raise UserError("give at least two records to compare")
    output_files.check_outputs(args)
    records = [read_run(path) for path in args.records]
    names = run_names(records)
    print(render(names, records))
    if args.plot:
        plot(names, records, args.plot)
    first, *others = records
    return int(any(is_same_training(first, other) is False for other in others))


if __name__ == "__main__":
    command_line.run_main(main)
