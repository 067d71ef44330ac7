"""Lesson 11, the result: compare recorded fine-tuning runs.

    python finetune_baseline.py  --json baseline.json
    python finetune_optimized.py --json optimized.json
    python compare_runs.py baseline.json optimized.json --plot comparison.png

The others are compared with the first run.  With --repeats 4 the first four records are runs of
one command, whose --seed may differ, and so are the next four: their spread says what differs.
The exit code is 1 if the losses of two runs of the same workload drift apart.  A kernel that is
faster and trains something else is wrong.
"""

import math
import os
import statistics
from collections.abc import Callable
from dataclasses import replace

from harness.cli import command_line, output_files, tables, workload
from harness.cli.command_line import UserError, positive_int
from harness.cli.tables import Column, Table
from harness.cli.workload import Workload, size_in_words
from harness.records import run_records
from harness.records.spread import Range, spread, timed, unless_same, waited

# the largest relative difference of a step's loss that rounding explains, over tens of steps
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
STEPS_SHOWN = 20
REPEATS = "each side has so many records, one after the other (default: 1)"
Side = list[dict]  # the records of one command's runs


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


def sides_of(paths: list[str], records: list[dict], n_repeats: int) -> list[Side]:
    """Return each side's records: so many of a side stand one after the other."""
    if len(records) % n_repeats or len(records) == n_repeats:
        raise UserError(f"give {n_repeats} records of each side, and at least two sides")
    sides = [records[i : i + n_repeats] for i in range(0, len(records), n_repeats)]
    for path, side in zip(paths[::n_repeats], sides):
        settings = [replace(Workload.from_record(run), seed=0).as_record() for run in side]
        if any(each != settings[0] for each in settings):
            raise UserError(f"{path} and the next {n_repeats - 1} differ in more than the seed")
    return sides


def render(sides: list[Side]) -> str:
    """Return the whole report."""
    records = [side[0] for side in sides]
    names = run_names(records)
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
    parts.append(runs_table(names, sides))
    if is_on_cpu(first):
        parts.append(tables.not_shown("speeds and memory are"))
    else:
        ranges = "20th to 80th percentile; no difference: these ranges overlap."
        parts.append(f"{tables.OF_STEPS}\nStep: the median; p20 to p80: {ranges}")
        if (n_repeats := len(sides[0])) > 1:
            lowest = "from the lowest 20th to the highest 80th percentile of a run"
            parts.append(f"Of {n_repeats} runs each: the median of each column; {lowest}.")
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
    parts += [verdict(name, first, record) for name, record in comparable]
    return "\n\n".join([*parts, *verdicts_of_repeats(names, sides)])


def verdicts_of_repeats(names: list[str], sides: list[Side]) -> list[str]:
    """Return a verdict of each further run of a side beside the first side's, if they compare."""
    return [
        verdict(f"{name}, run {i}", first, run)
        for name, side in zip(names[1:], sides[1:])
        for i, (first, run) in enumerate(zip(sides[0], side), 1)
        if i > 1 and not workload_differences(first, run)
    ]


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


def is_on_cpu(record: dict) -> bool:
    return record["environment"]["gpu"] is None


def median_of(key: str) -> Callable[[Side], float]:
    return lambda side: statistics.median(run[key] for run in side)


def range_of(side: Side, column: Callable[[dict], list[float]]) -> Range:
    """Return the lowest 20th and the highest 80th percentile of the runs."""
    lows, highs = zip(*(spread(column(run)) for run in side))
    return min(lows), max(highs)


def runs_table(names: list[str], sides: list[Side]) -> str:
    """Return each side's times, throughput and memory, and the ratios to the first side."""
    first, named = sides[0], dict(zip(names, sides))
    step, throughput = median_of("median_seconds"), median_of("tokens_per_second")
    peak = median_of("peak_memory_bytes")

    def column(title: str, value: Callable, spec: str = "") -> Column:
        return Column(title, lambda name: value(named[name]), spec)

    def ratio(side: Side, value: float, steps: Callable) -> str:
        words = f"{value:.2f}x"
        both = range_of(first, steps), range_of(side, steps)
        return words if side is first else unless_same(words, *both)

    columns = [
        Column("Run", str),
        column("Step (s)", step, ".4f"),
        column("p20 to p80", lambda side: "{:.4f} to {:.4f}".format(*range_of(side, timed))),
        column("Tokens/sec", throughput, ",.0f"),
        column("Peak (GB)", lambda side: peak(side) / 1e9, ".1f"),
        column("Speedup", lambda side: ratio(side, step(first) / step(side), timed)),
        column("Throughput", lambda side: ratio(side, throughput(side) / throughput(first), rates)),
        column("Memory", lambda side: f"{peak(side) / peak(first):.2f}x"),
        column("Val. loss", median_of("validation_loss_after"), ".4f"),
    ]
    if is_on_cpu(first[0]):  # its time and memory say nothing of a GPU's
        columns = [columns[0], columns[-1]]
    return Table.of(columns, names).text()


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


def plot(sides: list[Side], path: str) -> None:
    """Draw loss curves, and on a GPU tokens per second and peak memory, as one PNG."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    plt, firsts = tables.pyplot(), [side[0] for side in sides]
    names = run_names(firsts)
    bars = []
    if not is_on_cpu(firsts[0]):
        peaks = list(map(median_of("peak_memory_bytes"), sides))
        unit, size = tables.decimal_unit(peaks, "GB", "MB", 1e9)
        tokens = list(map(median_of("tokens_per_second"), sides))
        bars = [
            ("Tokens per second", tokens, ",.0f", "wall clock, host included"),
            (f"Peak memory ({unit})", [peak / size for peak in peaks], ",.1f", ""),
        ]
    widths = [2, *[1] * len(bars)]
    figure, axes = plt.subplots(1, len(widths), figsize=(12, 4), width_ratios=widths, squeeze=False)
    losses, *others = axes[0]
    for name, record in zip(names, firsts):
        style = "-" if record is firsts[0] else "--"
        losses.plot(range(1, len(record["losses"]) + 1), record["losses"], style, label=name)
    losses.set(xlabel="step", ylabel="training loss", title="Loss")
    losses.xaxis.set_major_locator(MaxNLocator(integer=True))
    losses.legend()
    colors = [f"C{i}" for i in range(len(names))]
    for axis, (title, values, spec, what) in zip(others, bars):
        drawn = axis.bar(names, values, color=colors)
        axis.bar_label(drawn, [format(v, spec) for v in values], padding=2)
        axis.set(title=title, ylim=(0, 1.15 * max(values)), xlabel=what)
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if len(names) > 2:  # side by side they would touch
            axis.tick_params(axis="x", rotation=30)
    env = firsts[0]["environment"]
    figure.suptitle(
        f"{firsts[0]['model']}, {size_in_words(firsts[0])}, {env['gpu'] or 'CPU'}, {env['date']}"
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
    parser.add_argument("--repeats", type=positive_int, default=1, metavar="N", help=REPEATS)
    parser.add_argument("--plot", metavar="FILE.png", help="loss curves and bars as a picture")
    args = parser.parse_args()
    if len(args.records) < 2:
        raise UserError("give at least two records to compare")
    output_files.check_outputs(args)
    sides = sides_of(args.records, list(map(read_run, args.records)), args.repeats)
    print(render(sides))
    if args.plot:
        plot(sides, args.plot)
    first, *others = sides
    verdicts = [is_same_training(*pair) for side in others for pair in zip(first, side)]
    return int(any(each is False for each in verdicts))


if __name__ == "__main__":
    command_line.run_main(main)
