"""What the benchmark prints: the playbook's tables, every implementation, all sizes of a kernel."""

from harness.benchmark.benchmark_specs import (
    BANDWIDTH,
    COMPILED,
    EAGER,
    IN_PLACE,
    LLAMA_VOCAB,
    OURS,
    SPECS,
    numbers,
)
from harness.cli.tables import NO_GPU_NOTE, NOT_MEANINGFUL, number, table, title
from harness.profiling.kernel_facts import PLAYBOOK_KERNELS
from harness.records.run_records import ceilings_card


def gpu_line(env: dict) -> str:
    return f"GPU: {env['gpu'] or 'none (CPU ' + env['cpu'] + ')'}"


def sections_of(record: dict, kernel: str) -> list[dict]:
    return [section for section in record["sections"] if section["kernel"] == kernel]


def share(record: dict, section: dict, row: dict | None) -> str:
    """The row's GB/s or TFLOP/s as a percentage of the measured copy or matmul rate."""
    rate = SPECS[section["kernel"]].rate
    reached = None if row is None else row[rate.key]
    return number(None if reached is None else 100 * reached / record[rate.ceiling_key], ".0f")


def rows_by_tokens(section: dict) -> dict[int, dict[str, dict]]:
    """{tokens: {implementation: row}}, in the order measured."""
    found: dict[int, dict[str, dict]] = {}
    for row in section["rows"]:
        found.setdefault(row["tokens"], {})[row["implementation"]] = row
    return found


def ratio(above: float | None, below: float | None, spec: str) -> str:
    return "n/a" if above is None or not below else f"{above / below:{spec}}x"


def megabytes(n_bytes: int | None) -> str:
    return number(None if n_bytes is None else n_bytes / 1e6, ",.0f")


def microseconds(time: float | None) -> str:
    return number(time, ",.1f" if time is not None and time < 1000 else ",.0f")


ONE_CALL = "Times: one call at a time, wall clock; the host is in them."


def playbook_table(record: dict, section: dict) -> str:
    """The playbook's: our kernel against PyTorch as Hugging Face calls it, forward + backward."""
    env = record["environment"]
    mark = "" if env["gpu"] else NOT_MEANINGFUL
    if section["kernel"] == "rmsnorm":
        heading = [
            title(f"RMSNorm Benchmark — Custom Triton vs. PyTorch Reference{mark}"),
            gpu_line(env),
        ]
        if len(sections_of(record, "rmsnorm")) > 1:
            heading.append(f"Hidden size: {section['size']:,}")
        headers = ["Tokens", "Custom (us)", "PyTorch (us)"]
        headers += ["Custom (GB/s)", "PyTorch (GB/s)", "Speedup"]
    else:
        name = " (LLaMA 3.1)" if section["size"] == LLAMA_VOCAB else ""
        heading = [
            title(f"Cross-Entropy Benchmark — Custom Triton (online softmax) vs. PyTorch{mark}"),
            gpu_line(env),
            f"Vocabulary size: {section['size']:,}{name}",
        ]
        headers = ["Tokens", "Custom (us)", "PyTorch (us)", "Speedup"]
        headers += ["Custom Mem (MB)", "PyTorch Mem (MB)", "Mem Reduction"]
    heading.append(ONE_CALL)
    missing = {"total_us": [None] * 3, "gbs": None, "extra_bytes": None}
    body = []
    for tokens, rows in rows_by_tokens(section).items():
        ours, eager = rows[OURS], rows.get(EAGER, missing)
        us, eager_us = ours["total_us"][1], eager["total_us"][1]
        times = [f"{tokens:,}", number(us), number(eager_us)]
        speedup = ratio(eager_us, us, ".2f")
        if section["kernel"] == "rmsnorm":
            rates = [number(row["gbs"], ",.0f") for row in (ours, eager)]
            body.append([*times, *rates, speedup])
        else:
            extra, eager_extra = ours["extra_bytes"], eager["extra_bytes"]
            memory = [megabytes(extra), megabytes(eager_extra), ratio(eager_extra, extra, ".1f")]
            body.append([*times, speedup, *memory])
    return "\n".join([*heading, "", table(headers, body, ["right"] * len(headers))])


def full_table(record: dict, section: dict) -> str:
    """Every implementation at every size."""
    mark = "" if record["environment"]["gpu"] else NOT_MEANINGFUL
    spec, sizes = SPECS[section["kernel"]], numbers(section["size"])
    shape = [f"{each.name} {n:,}" for each, n in zip(spec.dimensions, sizes)]
    work = [spec.rows.lower(), *(dimension.name for dimension in spec.dimensions)]
    if spec.beside:
        work = [*work, f"{section['bytes_per_element']:.3f} bytes"]
    elif spec.rate is BANDWIDTH:
        work = [str(spec.work), *work, f"{section['bytes_per_element'] // spec.work} bytes"]
    else:
        work = [f"{spec.work} FLOP", *work]
    compilation = section.get("first_call_seconds")  # a record may be older than a measurement
    heading = [
        title(f"{spec.title}: every implementation{mark}"),
        "; ".join([record["dtype"], *shape, f"times in us; {spec.judged} against float64"]),
        f"{spec.rate.name}: {' x '.join(work)} / total p50",
        *spec.notes,
        "Total: one call at a time after flushing the cache, which hides part of the host's work; "
        "Host: calls queued back to back",
        f"First call (compilation): {'n/a' if compilation is None else f'{compilation:.1f} s'}",
    ]
    headers = [spec.rows, "Implementation", "Forward", "Backward", "Total p20 / p50 / p80"]
    headers += ["Host", "Kernels only", spec.rate.name, f"% of {spec.rate.ceiling}", "Extra MB"]
    headers += [f"Error {part}" for part in spec.errors]
    body = []
    for tokens, rows in rows_by_tokens(section).items():
        if body:
            body.append([""] * len(headers))
        for row in rows.values():
            total = " / ".join(microseconds(us) for us in row["total_us"])
            times = [microseconds(row[key]) for key in ("forward_us", "backward_us")]
            times += [total, microseconds(row.get("host_us")), microseconds(row["kernels_us"])]
            rate = number(row[spec.rate.key], spec.rate.format)
            errors = [number(row["errors"].get(part), ".1e") for part in spec.errors]
            found = [rate, share(record, section, row), megabytes(row["extra_bytes"]), *errors]
            body.append([f"{tokens:,}", row["implementation"], *times, *found])
    align = ["right", "left"] + ["right"] * (len(headers) - 2)
    return "\n".join([*heading, "", table(headers, body, align)])


def summary_table(record: dict, kernel: str) -> str:
    """All sizes of one kernel: ours beside the ceiling and torch.compile."""
    mark = "" if record["environment"]["gpu"] else NOT_MEANINGFUL
    spec, sections = SPECS[kernel], sections_of(record, kernel)
    measured = {row["implementation"] for section in sections for row in section["rows"]}
    shown = [name for name in (OURS, IN_PLACE) if name in measured]
    headers = [*(dimension.name.capitalize() for dimension in spec.dimensions), spec.rows]
    for name in shown:
        headers += [f"{name} (us)", f"% of {spec.rate.ceiling}"]
    headers += [f"{COMPILED} (us)", f"{COMPILED} / {OURS}", "of kernels only"]
    body = []
    for section in sections:
        if body:
            body.append([""] * len(headers))
        for tokens, rows in rows_by_tokens(section).items():
            us = dict.fromkeys((*shown, COMPILED))
            us |= {name: rows[name]["total_us"][1] for name in us if name in rows}
            cells = [f"{n:,}" for n in (*numbers(section["size"]), tokens)]
            for name in shown:
                cells += [microseconds(us[name]), share(record, section, rows.get(name))]
            compiled, ours = (rows.get(name, {}).get("kernels_us") for name in (COMPILED, OURS))
            cells += [microseconds(us[COMPILED]), ratio(us[COMPILED], us[OURS], ".2f")]
            body.append([*cells, ratio(compiled, ours, ".2f")])
    heading = title(f"{spec.title}: all sizes, forward + backward, {record['dtype']}{mark}")
    clocks = f"{ONE_CALL} Kernels only: it is not."
    return "\n".join([heading, clocks, table(headers, body, ["right"] * len(headers))])


def render(record: dict) -> str:
    """Everything the script prints about its measurements, from their record."""
    env = record["environment"]
    blocks = [] if env["gpu"] else [NO_GPU_NOTE]
    blocks.append(ceilings_card(env, record["copy_gbs"], record["matmul_tflops"]))
    for section in record["sections"]:
        if section["kernel"] in PLAYBOOK_KERNELS:
            blocks.append(playbook_table(record, section))
        blocks.append(full_table(record, section))
    several = [kernel for kernel in SPECS if len(sections_of(record, kernel)) > 1]
    blocks += [summary_table(record, kernel) for kernel in several]
    if record["absent"]:
        blocks.append("; ".join(record["absent"]))
    return "\n\n".join(blocks)
