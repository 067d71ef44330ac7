"""What is printed of a profile: operations, categories and phases, each with its share; totals."""

from harness.cli.tables import OF_KERNELS, OF_STEPS, number, table
from harness.profiling.kernel_facts import ADAPTERS, COMMUNICATION, DEQUANTIZATION, UNATTRIBUTED
from harness.records.spread import spread

TOP = 20
OF_A_GRAPH = (
    "Each step is one CUDA graph's replay, whose kernels know no operation: the tables are of a\n"
    "step just before the recording, which ran the same kernels; times, idle share and trace are\n"
    "the replay's."
)


def sum_table(headers: list[str], rows: list[tuple[str, float, int]]) -> str:
    """Rows of (name, microseconds, count) with each one's share, and their sum."""
    total = sum(us for _, us, _ in rows)
    rows = [*rows, ("Total", total, sum(count for _, _, count in rows))]
    cells = [
        [name, f"{us / 1e3:,.3f}ms", f"{100 * us / total:.1f}%", f"{count:,}"]
        for name, us, count in rows
    ]
    return table(headers, cells)


def operations_table(record: dict) -> str:
    """The playbook's table, with one row for all the other operations, so that it adds up."""
    rows = [(row["name"][:60], row["us"], row["calls"]) for row in record["operations"]]
    rows, rest = rows[:TOP], rows[TOP:]
    if rest:
        name = f"({len(rest)} other operations)"
        rows.append((name, sum(us for _, us, _ in rest), sum(calls for _, _, calls in rest)))
    device = record["device"]
    return sum_table(["Name", f"Self {device}", f"Self {device} %", "# Calls"], rows)


def parts_table(header: str, parts: dict, device: str) -> str:
    """Categories or phases; catch-alls, and what few runs have, only where something is in them."""
    rows = [(name, part["us"], part["launches"]) for name, part in parts.items()]
    hidden = ADAPTERS, DEQUANTIZATION, COMMUNICATION, UNATTRIBUTED, "other"
    rows = [row for row in rows if row[2] or row[0] not in hidden]
    counted = "Launches" if device == "CUDA" else "Operation calls"
    return sum_table([header, f"{device} time", "Share", counted], rows)


def totals(record: dict) -> str:
    """Is the GPU kept busy, and how much memory does the step take?"""
    on_gpu = record["device"] == "CUDA"
    busy_ms, step_ms = record["busy_us"] / 1e3, record["median_step_ms"]
    idle = max(0.0, 1 - busy_ms / step_ms)
    resting = number(record["resting_memory_bytes"] and record["resting_memory_bytes"] / 1e9)
    profiled = [("Step under the profiler:", f"{record['profiled_step_ms']:,.1f} ms")]
    if record.get("timeline"):
        slower = [
            ("Kernels recorded:", record["timeline"]["step_ms"]),
            (
                "Shapes too, no graph:" if record.get("cuda_graph") else "Shapes too:",
                record["profiled_step_ms"],
            ),
        ]
        profiled = [
            (name, f"{ms:,.1f} ms ({100 * (ms / step_ms - 1):+.1f} %)") for name, ms in slower
        ]
    low, high = spread(record["step_ms"])
    steps = (
        f"median of {len(record['step_ms'])}, 20th to 80th percentile: {low:,.1f} to {high:,.1f}"
    )
    lines = [
        ("GPU busy:" if on_gpu else "In operations:", f"{busy_ms:,.1f} ms"),
        ("Step without the profiler:", f"{step_ms:,.1f} ms ({steps})"),
        *profiled,
        ("GPU idle share:" if on_gpu else "Outside operations:", f"{100 * idle:.1f} %"),
        (
            "Memory before the step:",
            f"{resting} GB (weights and optimizer state)" if on_gpu else resting,
        ),
        (
            f"Peak {'GPU' if on_gpu else 'process'} memory:",
            f"{record['peak_memory_bytes'] / 1e9:.1f} GB",
        ),
    ]
    clocks = [OF_KERNELS, OF_STEPS] if on_gpu else []
    return "\n".join([*(f"{label:<28}{value}" for label, value in lines), *clocks])
