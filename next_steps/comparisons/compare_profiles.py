"""What the kernels changed: two profiles of one workload, and what the first one predicted.

python profile_baseline.py --json before.json
python profile_baseline.py --kernels all --json after.json
python -m next_steps.comparisons.compare_profiles before.json after.json --plot roofline.png
"""

from harness.cli import command_line, tables
from harness.cli.command_line import UserError
from harness.cli.output_files import check_outputs
from harness.cli.workload import changes, kernels_in_words, model_line, size_in_words
from harness.profiling.diagnose import counted, idle_us, judge_categories, replaced_by
from harness.profiling.kernel_facts import FACTS_BY_NAME
from harness.profiling.profile_tables import short
from harness.profiling.roofline import plot
from harness.records import run_records as records
from harness.records.schema import is_list_of
from harness.records.spread import NO_DIFFERENCE, overlap, spread

MOST_NAMED = 6  # operations that came or went
SAME_WORKLOAD = "model", "first_layers", "weights", "dtype", "data", "device"
SAME_WORKLOAD += "batch_size", "seq_len", "accumulate"


def predicted_gains(before: dict, after: dict) -> dict[str, float]:
    """Return the microseconds that each new kernel should gain, as `before` predicts."""
    findings = judge_categories(before)
    replaced = replaced_by([name for name in after["kernels"] if name not in before["kernels"]])
    return {name: finding.gain_us for name, finding in findings.items() if name in replaced}


def categories(before: dict, after: dict) -> tables.Table:
    """Return categories, idle time and step before and after, and gains and predictions.

    Without a GPU only launches and bytes of the categories.
    """
    predicted, rows = predicted_gains(before, after), []
    moved = [counted(record) for record in (before, after)]
    n_bytes = [part["bytes"] for parts in moved for part in parts.values()]
    unit, size = tables.decimal_unit(n_bytes, "GB", "MB", 1e9)
    headers = ["Category", "Before, ms", "After, ms", "Gain, ms", "Predicted, ms"]
    headers += ["Launches before", "after", f"Moved before, {unit}", "after"]
    for name, old in before["categories"].items():
        new = after["categories"].get(name, {"us": 0.0, "launches": 0})  # not in older records
        if not old["launches"] and not new["launches"]:
            continue
        row = comparison_row(name, old["us"], new["us"], predicted.get(name))
        row += [f"{part['launches']:,}" for part in (old, new)]
        for parts in moved:
            row.append(short(parts[name]["bytes"] / size) if name in parts else "n/a")
        rows.append(row)
    if before["device"] == "CPU":
        return tables.Table(headers, rows).columns([0, 5, 6, 7, 8])
    if before["timeline"] and after["timeline"]:
        rows.append(comparison_row("GPU idle", idle_us(before), idle_us(after), None))
    steps = (1e3 * record["median_step_ms"] for record in (before, after))
    rows.append(comparison_row("Step", *steps, sum(predicted.values()) if predicted else None))
    ranges = [spread(record["step_ms"]) for record in (before, after)]
    if overlap(*ranges):
        rows[-1][3] = NO_DIFFERENCE
    rows.append(["p20 to p80 of Step", *(f"{low:,.1f} to {high:,.1f}" for low, high in ranges)])
    return tables.Table(headers, rows)


def comparison_row(
    name: str, before_us: float, after_us: float, predicted_us: float | None
) -> list[str]:
    gain = f"{(before_us - after_us) / 1e3:,.3f}"
    predicted = tables.formatted(predicted_us and predicted_us / 1e3, ",.3f", missing="")
    return [name, f"{before_us / 1e3:,.3f}", f"{after_us / 1e3:,.3f}", gain, predicted]


def only_in(label: str, operations: dict[str, dict], others: dict[str, dict], on_gpu: bool) -> str:
    """Return the longest operations that the other profile does not have; their times, on a GPU."""
    rows = [row for name, row in operations.items() if name not in others]
    rows.sort(key=lambda row: -row["us"])
    times = [f" {row['us'] / 1e3:,.3f} ms" if on_gpu else "" for row in rows[:MOST_NAMED]]
    said = [f"{row['name'][:60]}{time}" for row, time in zip(rows, times)]
    said += [f"{len(rows) - MOST_NAMED} more"] if len(rows) > MOST_NAMED else []
    return f"{label} {', '.join(said) or 'nothing'}"


def run_line(label: str, record: dict) -> str:
    kernels = kernels_in_words(record)
    return f"{label} {records.environment_line(record['environment'])}; custom kernels: {kernels}"


def render_comparison(before: dict, after: dict) -> str:
    """Return what went away and what came from one profile to another."""
    workloads = ({key: record.get(key) for key in SAME_WORKLOAD} for record in (before, after))
    if differences := "; ".join(changes(*workloads)):
        raise UserError(f"the profiles are not of one workload: {differences}; give two that are")
    old, new = ({row["name"]: row for row in each["operations"]} for each in (before, after))
    on_gpu = before["device"] == "CUDA"
    lines = [
        run_line("Before:", before),
        run_line("After: ", after),
        f"{model_line(before)}; {size_in_words(before)}",
        "",
        tables.title("What the kernels changed"),
        *(
            [tables.TIMES_OF_KERNELS, tables.OF_STEPS]
            if on_gpu
            else [tables.not_shown("times are")]
        ),
        "",
        categories(before, after).text(),
        "",
        only_in("Went away:", old, new, on_gpu),
        only_in("Came:     ", new, old, on_gpu),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = command_line.Parser(__doc__)
    for name in ("before", "after"):
        parser.add_argument(name, metavar=f"{name.upper()}.json", help="a record of the profiler")
    parser.add_argument("--plot", metavar="FILE.png", help="both rooflines as a picture")
    args = parser.parse_args()
    check_outputs(args)
    paths = args.before, args.after
    known = is_list_of(lambda name: name in [*FACTS_BY_NAME])
    profiles = [records.read_record(path, "profile", kernels=known) for path in paths]
    print(render_comparison(*profiles))
    if args.plot:
        plot(profiles, args.plot)


if __name__ == "__main__":
    command_line.run_main(main)
