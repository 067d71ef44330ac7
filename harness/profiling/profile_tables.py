"""What is printed of a profile: its tables, and its diagnosis.

The tables show operations, categories and phases, each with its share.  The diagnosis shows each
part beside its ceilings, what it could gain and what to do (diagnose.py).
"""

from harness.cli import tables
from harness.cli.tables import Column, Table
from harness.profiling import diagnose
from harness.profiling.ceilings import ceilings_of
from harness.profiling.kernel_facts import (
    ADAPTERS,
    COMMUNICATION,
    DEQUANTIZATION,
    FP8_CASTS,
    UNATTRIBUTED,
)
from harness.records.spread import spread
from harness.steps.power import power_in_words

MOST_ROWS = 20
OF_A_GRAPH = (
    "Each step is one CUDA graph's replay, whose kernels know no operation: the tables are of a\n"
    "step just before the recording, which ran the same kernels; times, idle share and trace are\n"
    "the replay's."
)
# parts that most runs lack: they have a row only where there is something in them
HIDDEN_CATEGORIES = ADAPTERS, DEQUANTIZATION, FP8_CASTS, COMMUNICATION, UNATTRIBUTED, "other"


def sum_table(headers: list[str], rows: list[tuple[str, float, int]]) -> str:
    """Return rows of (name, microseconds, count) with the share of each, and their sum."""
    total = sum(us for _, us, _ in rows)
    rows = [*rows, ("Total", total, sum(count for _, _, count in rows))]
    cells = [
        [name, f"{us / 1e3:,.3f}ms", f"{100 * us / total:.1f}%", f"{count:,}"]
        for name, us, count in rows
    ]
    return tables.table(headers, cells)


def operations_table(record: dict) -> str:
    """Return the playbook's table.  One row has all the other operations, so the rows add up."""
    rows = [(row["name"][:60], row["us"], row["calls"]) for row in record["operations"]]
    rows, rest = rows[:MOST_ROWS], rows[MOST_ROWS:]
    if rest:
        name = f"({len(rest)} other operations)"
        rows.append((name, sum(us for _, us, _ in rest), sum(calls for _, _, calls in rest)))
    device = record["device"]
    return sum_table(["Name", f"Self {device}", f"Self {device} %", "# Calls"], rows)


def breakdown_table(header: str, parts: dict, device: str) -> str:
    """Return the table of categories or phases."""
    rows = [(name, part["us"], part["launches"]) for name, part in parts.items()]
    rows = [row for row in rows if row[2] or row[0] not in HIDDEN_CATEGORIES]
    counted = "Launches" if device == "CUDA" else "Operation calls"
    return sum_table([header, f"{device} time", "Share", counted], rows)


def totals(record: dict) -> str:
    """Return the lines that say how busy the GPU is and how much memory the step takes."""
    busy_ms, median_ms = record["busy_us"] / 1e3, record["median_step_ms"]
    idle = max(0.0, 1 - busy_ms / median_ms)
    resting = tables.formatted(
        record["resting_memory_bytes"] and record["resting_memory_bytes"] / 1e9
    )
    profiled_ms = record["profiled_step_ms"]
    profiled = [("Step under the profiler:", f"{profiled_ms:,.1f} ms")]
    if record["timeline"]:
        shapes = "Shapes too, no graph:" if record.get("cuda_graph") else "Shapes too:"
        slower = ("Kernels recorded:", record["timeline"]["step_ms"]), (shapes, profiled_ms)
        profiled = [
            (name, f"{ms:,.1f} ms ({100 * (ms / median_ms - 1):+.1f} %)") for name, ms in slower
        ]
    low, high = spread(record["step_ms"])
    n = len(record["step_ms"])
    steps = f"median of {n}, 20th to 80th percentile: {low:,.1f} to {high:,.1f}"
    lines = [
        ("GPU busy:", f"{busy_ms:,.1f} ms"),
        ("Step without the profiler:", f"{median_ms:,.1f} ms ({steps})"),
        *profiled,
        ("GPU idle share:", f"{100 * idle:.1f} %"),
        ("Memory before the step:", f"{resting} GB (weights and optimizer state)"),
        ("Peak GPU memory:", f"{record['peak_memory_bytes'] / 1e9:.1f} GB"),
        (tables.TIMES_OF_KERNELS, ""),
        (tables.OF_STEPS, ""),
    ]
    return "\n".join(f"{label:<28}{value}".rstrip() for label, value in lines)


# ---------------------------------------------------------------- the diagnosis


def short(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 or value == 0 else f"{value:.1g}"


def flop_rate(tflops: float) -> str:
    return f"{tflops:,.1f} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:,.1f} GFLOP/s"


def achieved(finding: diagnose.Finding) -> str:
    """Return the rate in the unit of the ceiling that applies."""
    if finding.flops_us > finding.bytes_us:
        tflops = finding.flops / finding.us / 1e6
        return f"{tflops:,.0f} TFLOP/s" if tflops >= 100 else flop_rate(tflops)
    gbs = finding.n_bytes / finding.us / 1e3
    return f"{gbs:,.0f} GB/s" if gbs >= 100 else f"{gbs:,.1f} GB/s"


def shortened(name: str) -> str:
    """Return an operation's name, without its middle if it is long: the end tells two apart."""
    return name if len(name) <= 28 else f"{name[:12]}..{name[-14:]}"


def ceiling_share(finding: diagnose.Finding) -> str:
    """Return the share of the ceiling; "cache" if the memory is not what it was read from."""
    return "cache" if finding.share is None else f"{100 * finding.share:.0f} %"


def findings_table(header: str, findings: list[diagnose.Finding]) -> str:
    unit, size = tables.decimal_unit([f.n_bytes for f in findings], "GB", "MB", 1e9)
    columns = [
        Column(header, lambda f: shortened(f.name)),
        Column("Time, ms", lambda f: f.us / 1e3, ",.3f"),
        Column(f"{unit} moved", lambda f: short(f.n_bytes / size)),
        Column("FLOP/byte", lambda f: short(f.flops / f.n_bytes)),
        Column("Achieved", achieved),
        Column("Ceiling", ceiling_share),
        Column("Verdict", lambda f: f.verdict, align="left"),
    ]
    return Table.of(columns, findings).text()


def predicted_gains_table(record: dict, findings: list[diagnose.Finding]) -> str:
    """Return what each part would take at TARGET of its ceiling, and what the step would gain."""
    unit, size = tables.decimal_unit([f.needed for f in findings], "GB", "MB", 1e9)
    columns = [
        Column("Recoverable", lambda f: f.name),
        Column("Now, ms", lambda f: f.us / 1e3, ",.3f"),
        Column(f"Necessary, {unit}", lambda f: short(f.needed / size)),
        Column(f"At {100 * diagnose.TARGET:.0f} %, ms", lambda f: f.target_us / 1e3, ",.3f"),
        Column("Gain, ms", lambda f: f.gain_us / 1e3, ",.3f"),
        Column("Step", lambda f: percent_of_step(f, record)),
        Column("What to do", lambda f: f.advice, align="left"),
    ]
    return Table.of(columns, findings).text()


def percent_of_step(finding: diagnose.Finding, record: dict) -> str:
    return f"{-finding.gain_us / diagnose.parts_ms(record) / 10:.1f} %"


def decision(record: dict, findings: list[diagnose.Finding]) -> list[str]:
    """Return three lines: the largest recoverable cost, what to do, what that should gain."""
    if not findings:
        shorter = f"{100 * diagnose.LEAST_SHARE:.1f} % shorter"
        return [f"Nothing is left to recover: no part of it could make the step {shorter}."]
    first = findings[0]
    now_ms, target_ms = first.us / 1e3, first.target_us / 1e3
    cost = f"{first.name}, {now_ms:,.1f} of {diagnose.parts_ms(record):,.1f} ms, {first.verdict}"
    if first.necessary is not None:
        unit, size = tables.decimal_unit([first.n_bytes], "GB", "MB", 1e9)
        moved, necessary = first.n_bytes / size, first.necessary / size
        cost += f": it moves {moved:,.1f} {unit}, {necessary:,.1f} are necessary"
    roof = "matmul" if first.flops_us / diagnose.TARGET == first.target_us else "copy"
    where = f"at {100 * diagnose.TARGET:.0f} % of the {roof} rate " if first.target_us else ""
    gain = f"{where}{target_ms:,.1f} ms instead of {now_ms:,.1f}"
    return [
        f"Largest recoverable cost:  {cost}",
        f"What to do about it:       {first.advice}",
        f"What it should gain:       {gain}: step {percent_of_step(first, record)} (Amdahl)",
    ]


def ceilings_line(record: dict) -> str:
    """Return the best rates of a run, and what reached them."""
    rates, by = ceilings_of(record)
    copy, matmul = rates["copy_gbs"], rates["matmul_tflops"]
    ways = {"matmul_tflops": f"{record['dtype']} matmul", "fp8_tflops": "FP8 matmul"}
    words = [f"copy {copy:,.0f} GB/s ({by['copy_gbs']})"]
    words += [f"{ways[key]} {flop_rate(rates[key])} ({by[key]})" for key in ways if key in rates]
    meet = f"they meet at {1e3 * matmul / copy:,.0f} FLOP/byte"
    return f"Ceilings: {', '.join(words)}; {meet}"


def host_line(record: dict) -> str:
    """Return the line about the host's part in the times."""
    us = diagnose.host_us(record)
    slow = f"it takes about {us:,.1f} us from one launch to the next" if us else "it never does"
    return f"Where the GPU waits for the host: {slow}"


def communication_lines(record: dict) -> list[str]:
    """Return what the communication should take, what it took, and how much other kernels hide.

    One process has no such lines.
    """
    lines = []
    if "communication" in record:
        expected = record["communication"]
        unit, size = tables.decimal_unit([*expected["bytes"].values()], "GB", "MB", 1e9)
        parts = [
            f"{n_bytes / size:,.1f} {unit} by {name} at {expected['gbs'][name]:,.1f} GB/s"
            for name, n_bytes in expected["bytes"].items()
        ]
        lines.append(f"Communication, predicted: {expected['ms']:,.1f} ms, {', '.join(parts)}")
    if total_us := (record.get("timeline") or {}).get("communication_us", 0.0):
        exposed = diagnose.exposed_us(record)
        hidden, share = total_us - exposed, exposed / record["median_step_ms"] / 10
        lines.append(
            f"Communication: {total_us / 1e3:,.1f} ms, of which other kernels hide "
            f"{hidden / 1e3:,.1f}; exposed: {exposed / 1e3:,.1f}, {share:.1f} % of a step"
        )
    return lines


def waiting_lines(record: dict) -> list[str]:
    """Return the three measurements of data and step, and the two questions that they answer."""
    if "loading" not in record:  # an older record
        return []
    loading = record["loading"]
    return [
        "",
        f"Loader alone:        {loading['alone_ms']:,.1f} ms per batch",
        f"One resident batch:  {loading['resident_ms']:,.1f} ms per step",
        f"Both together:       {loading['together_ms']:,.1f} ms per step, "
        f"{loading['waited_ms']:,.1f} of them waiting for the batch",
        f"1. Does the step wait for its batch?  {loading_verdict(record)}",
        f"2. {synchronization_line(record)}",
    ]


def loading_verdict(record: dict) -> str:
    if not diagnose.waits_for_data(record):
        return "No: both together take no longer than the resident batch, it is not the loader."
    if diagnose.loads_too_slowly(record):
        return "Yes: both together and the loader alone take longer than the step: loader-bound."
    first = "Yes: both together take longer than the step, the loader alone does not: "
    return first + "loader-bound, for it does not work ahead."


def synchronization_line(record: dict) -> str:
    """Return the question if the host waits for the GPU in a step, with the answer."""
    operations, question = (
        diagnose.waits_in_words(record),
        "Does the host wait for the GPU in the step?",
    )
    if not operations:
        return f"{question}  No: no operation does."
    if record["timeline"] is None:
        return f"{question}  It would, on a GPU: host-synchronization at {operations}."
    if diagnose.waits(record) and record["timeline"]["synchronization_us"]:
        waits = "Yes, and then the GPU for the host: host-synchronization"
        return f"{question}  {waits} at {operations}."
    return f"{question}  Yes, while the GPU had enough to do: {operations}."


def diagnosis_by_bytes(record: dict) -> str:
    """Return what a profile on a CPU says of a GPU: bytes, which follow from the shapes."""
    findings = sorted(
        diagnose.judge_categories(record).values(), key=lambda f: f.needed - f.n_bytes
    )
    unit, size = tables.decimal_unit([f.n_bytes for f in findings], "GB", "MB", 1e9)
    columns = [
        Column("Category", lambda f: f.name),
        Column(f"{unit} moved", lambda f: short(f.n_bytes / size)),
        Column("Necessary", lambda f: short(f.needed / size)),
        Column("FLOP/byte", lambda f: short(f.flops / f.n_bytes)),
        Column("What to do", lambda f: f.advice, align="left"),
    ]
    interpreted = "Categories that interpreted kernels took over are left out: no shapes are known."
    lines = [
        tables.title("Diagnosis"),
        tables.not_shown("ceilings, verdicts and gains are"),
        *([interpreted] if record["kernels"] else []),
        synchronization_line(record),
    ]
    return "\n\n".join(["\n".join(lines), Table.of(columns, findings).text()])


def diagnosis(record: dict) -> str:
    """Return the diagnosis of a profile, from its record."""
    if record["device"] == "CPU":
        return diagnosis_by_bytes(record)
    findings = diagnose.ranking(record)
    lines = [tables.title("Diagnosis"), ceilings_line(record)]
    if "power" in record:  # not in older records
        lines.append(f"Power and clock during the steps: {power_in_words(record['power'])}")
    lines += [host_line(record), *communication_lines(record), *waiting_lines(record)]
    lines.append(tables.TIMES_OF_KERNELS)
    blocks = [
        "\n".join(lines),
        findings_table("Category", list(diagnose.judge_categories(record).values())),
        findings_table("Operation", diagnose.judge_operations(record)),
        *([predicted_gains_table(record, findings)] if findings else []),
        "\n".join(decision(record, findings)),
    ]
    return "\n\n".join(blocks)
