"""What the benchmark prints: the playbook's tables, every implementation, all sizes of a kernel."""

from harness.benchmark import benchmark_specs as specs
from harness.benchmark.benchmark_specs import COMPILED, OURS, SPECS, Rate
from harness.cli.tables import Column, Table, formatted, table, title
from harness.records.run_records import ceilings_card, gpu_line
from harness.steps.gpus import best_copy_gbs

FROM_CACHE = "cache"  # in place of a share: faster than anything that came from the memory


def sections_of(record: dict, kernel: str) -> list[dict]:
    return [section for section in record["sections"] if section["kernel"] == kernel]


def clocks(row: dict) -> dict[str, float]:
    """Return microseconds by clock: kernels alone, if they were measured, and host included."""
    found = {"kernels alone": row["kernels_us"], "host included": row["total_us"][1]}
    return {clock: us for clock, us in found.items() if us is not None}


def rate_at(rate: Rate, row: dict, us: float) -> float:
    """Return the GB/s or TFLOP/s of the row's work in `us`; the record has it for the total."""
    return row[rate.key] * row["total_us"][1] / us


def ceiling_of(record: dict, rate: Rate) -> float:
    """Return the best of the measured copy or matmul rate and of the rows' rates by any clock.

    Rows in place are left out: there a kernel reads once more, from the cache, what it has just
    read.
    """
    measured, reached = record[rate.ceiling_key], []
    for section in record["sections"]:
        if SPECS[section["kernel"]].rate is rate:
            rows = (row for row in section["rows"] if row[rate.key] is not None)
            rows = (row for row in rows if not row["implementation"].endswith("in place"))
            reached += [rate_at(rate, row, us) for row in rows for us in clocks(row).values()]
    if rate is specs.COMPUTE:
        return max([measured, *reached])
    return best_copy_gbs(measured, reached, record["environment"]["gpu"])


def share_in_words(reached: float | None, ceiling: float, spec: str) -> str:
    """Return a rate's share of its ceiling, with a format of a share, or FROM_CACHE."""
    if reached is not None and reached > ceiling:
        return FROM_CACHE
    return formatted(reached and reached / ceiling, spec)


def share(record: dict, section: dict, row: dict | None) -> str:
    """Return the row's GB/s or TFLOP/s as a percentage of the ceiling."""
    rate = SPECS[section["kernel"]].rate
    reached = row and row[rate.key]
    return share_in_words(reached, ceiling_of(record, rate), ".0%").removesuffix("%")


def rows_by_tokens(section: dict) -> dict[int, dict[str, dict]]:
    """Return {tokens: {implementation: row}}, in the order of measurement."""
    found: dict[int, dict[str, dict]] = {}
    for row in section["rows"]:
        found.setdefault(row["tokens"], {})[row["implementation"]] = row
    return found


def ratio(above: float | None, below: float | None, spec: str) -> str:
    return "n/a" if above is None or not below else f"{above / below:{spec}}x"


def megabytes(n_bytes: int | None) -> str:
    return formatted(None if n_bytes is None else n_bytes / 1e6, ",.0f")


def microseconds(time: float | None) -> str:
    return formatted(time, ",.1f" if time is not None and time < 1000 else ",.0f")


# The times of a table are by up to three clocks, whose names the pages use too.
ONE_CALL = "Times: one call at a time, wall clock; the host is in them."
CLOCKS = (
    "Total: one call at a time after flushing the cache, which hides part of the host's work",
    "Queued: calls queued back to back; Alone: the kernels in a CUDA graph, without the host",
)
CLOCK_KEYS = {  # what a table's columns are called: a row's key, or a function of the row
    "forward": "forward_us",
    "backward": "backward_us",
    "total": lambda row: row["total_us"][1],
    "queued": "host_us",
    "alone": "kernels_us",
}


def clock(title: str) -> Column:
    """Return the column of a time; its title may begin with a capital letter."""
    return Column(title, CLOCK_KEYS[title.lower()], microseconds)


def error_columns(spec: specs.Spec, title: str) -> list[Column]:
    """Return the columns of the errors against float64."""
    return [
        Column(f"{title} {part}", lambda row, part=part: row["errors"].get(part), ".1e")
        for part in spec.errors
    ]


PLAYBOOK_TABLES = {  # kernel: title, columns
    "rmsnorm": (
        "RMSNorm Benchmark — Custom Triton vs. PyTorch Reference",
        *("Tokens", "Custom (us)", "PyTorch (us)", "Custom (GB/s)", "PyTorch (GB/s)", "Speedup"),
    ),
    "cross_entropy": (
        "Cross-Entropy Benchmark — Custom Triton (online softmax) vs. PyTorch",
        *("Tokens", "Custom (us)", "PyTorch (us)", "Speedup"),
        *("Custom Mem (MB)", "PyTorch Mem (MB)", "Mem Reduction"),
    ),
}


def playbook_table(record: dict, section: dict) -> str:
    """The playbook's: our kernel against PyTorch as Hugging Face calls it, forward + backward."""
    name, *headers = PLAYBOOK_TABLES[section["kernel"]]
    env = record["environment"]
    lines = [title(name), gpu_line(env)]
    size = f"{section['size']:,}"
    if section["kernel"] == "cross_entropy":
        llama = " (LLaMA 3.1)" if section["size"] == specs.LLAMA_VOCAB else ""
        lines.append(f"Vocabulary size: {size}{llama}")
    elif len(sections_of(record, section["kernel"])) > 1:
        lines.append(f"Hidden size: {size}")
    missing = {"total_us": [None] * 3, "gbs": None, "extra_bytes": None}
    body = []
    for tokens, rows in rows_by_tokens(section).items():
        shown = {"Custom": rows[OURS], "PyTorch": rows.get(specs.EAGER, missing)}
        cells = {"Tokens": f"{tokens:,}"}
        for who, row in shown.items():
            cells[f"{who} (us)"] = formatted(row["total_us"][1])
            cells[f"{who} (GB/s)"] = formatted(row["gbs"], ",.0f")
            cells[f"{who} Mem (MB)"] = megabytes(row["extra_bytes"])
        ours, eager = shown.values()
        cells["Speedup"] = ratio(eager["total_us"][1], ours["total_us"][1], ".2f")
        cells["Mem Reduction"] = ratio(eager["extra_bytes"], ours["extra_bytes"], ".1f")
        body.append([cells[header] for header in headers])
    return "\n".join([*lines, ONE_CALL, "", table(headers, body, ["right"] * len(headers))])


def full_table(record: dict, section: dict) -> str:
    """Every implementation at every size; without a GPU its errors alone."""
    spec, sizes = SPECS[section["kernel"]], specs.numbers(section["size"])
    shape = [f"{each.name} {n:,}" for each, n in zip(spec.dimensions, sizes)]
    shape = "; ".join([record["dtype"], *shape, f"{spec.judged} against float64"])
    work = [spec.rows.lower(), *(dimension.name for dimension in spec.dimensions)]
    if spec.beside:
        work = [*work, f"{section['bytes_per_element']:.3f} bytes"]
    elif spec.rate is specs.BANDWIDTH:
        work = [str(spec.work), *work, f"{section['bytes_per_element'] // spec.work} bytes"]
    else:
        work = [f"{spec.work} FLOP", *work]
    compilation = section["first_call_seconds"]
    lines = [
        title(f"{spec.title}: every implementation"),
        f"{shape}; times in us",
        f"{spec.rate.name}: {' x '.join(work)} / total p50",
        *spec.notes,
        *CLOCKS,
        f"First call (compilation): {'n/a' if compilation is None else f'{compilation:.1f} s'}",
    ]
    body = []
    for rows in rows_by_tokens(section).values():
        body += [*([None] if body else []), *rows.values()]
    columns = [
        Column(spec.rows, "tokens", ",", align="right"),
        Column("Implementation", "implementation", align="left"),
        clock("Forward"),
        clock("Backward"),
        Column("Total p20 / p50 / p80", lambda row: " / ".join(map(microseconds, row["total_us"]))),
        clock("Queued"),
        clock("Alone"),
        Column(spec.rate.name, spec.rate.key, spec.rate.format),
        Column(f"% of {spec.rate.ceiling}", lambda row: share(record, section, row)),
        Column("Extra MB", "extra_bytes", megabytes),
        *error_columns(spec, "Error"),
    ]
    if record["environment"]["gpu"] is None:
        lines = [lines[0], shape, *spec.notes]
        columns = [*columns[:2], *columns[-len(spec.errors) :]]
        body = [row for row in body if row is None or row["errors"]]
    return "\n".join([*lines, "", Table.of(columns, body, keys=2).text()])


def summary_table(record: dict, kernel: str) -> str:
    """All sizes of one kernel: ours beside the ceiling and torch.compile."""
    spec, sections = SPECS[kernel], sections_of(record, kernel)
    measured = {row["implementation"] for section in sections for row in section["rows"]}
    shown = [name for name in (OURS, specs.IN_PLACE) if name in measured]
    headers = [*(dimension.name.capitalize() for dimension in spec.dimensions), spec.rows]
    for name in shown:
        headers += [f"{name} (us)", f"% of {spec.rate.ceiling}"]
    headers += [f"{COMPILED} (us)", f"{COMPILED} / {OURS}", "alone"]
    body = []
    for section in sections:
        body += [[]] if body else []
        for tokens, rows in rows_by_tokens(section).items():
            total = {name: row["total_us"][1] for name, row in rows.items()}
            cells = [f"{n:,}" for n in (*specs.numbers(section["size"]), tokens)]
            for name in shown:
                cells += [microseconds(total.get(name)), share(record, section, rows.get(name))]
            alone = [rows.get(name, {}).get("kernels_us") for name in (COMPILED, OURS)]
            cells += [microseconds(total.get(COMPILED))]
            cells += [ratio(total.get(COMPILED), total.get(OURS), ".2f"), ratio(*alone, ".2f")]
            body.append(cells)
    name = f"{spec.title}: all sizes, forward + backward, {record['dtype']}"
    lines = [
        title(name),
        f"{ONE_CALL} Alone: the kernels without the host.",
    ]
    keys = len(spec.dimensions) + 1
    return "\n".join([*lines, table(headers, body, ["right"] * len(headers), keys)])


def render(record: dict) -> str:
    """Return everything that the script prints about its measurements."""
    env = record["environment"]
    rates = [ceiling_of(record, rate) for rate in (specs.BANDWIDTH, specs.COMPUTE)]
    blocks = [ceilings_card(env, *rates)]
    for section in record["sections"]:
        if env["gpu"] and section["kernel"] in PLAYBOOK_TABLES:
            blocks.append(playbook_table(record, section))
        blocks.append(full_table(record, section))
    several = [kernel for kernel in SPECS if len(sections_of(record, kernel)) > 1]
    blocks += [summary_table(record, kernel) for kernel in several if env["gpu"]]
    if record["absent"]:
        blocks.append("; ".join(record["absent"]))
    return "\n\n".join(blocks)
