"""The pages' tables of the kernels, from records of benchmark_kernels.py."""

from collections.abc import Callable

from harness.benchmark.benchmark_specs import (
    COMPILED,
    EAGER,
    HOST_FLOOR,
    IN_PLACE,
    ONE_TILE,
    OURS,
    SPECS,
    TWO_KERNELS,
)
from harness.benchmark.benchmark_tables import megabytes, microseconds
from harness.cli.tables import number
from tools.page_records import is_ours, load, markdown, per_cent, rows_at, times, us_of


def chosen(rows: list[dict], tokens: str) -> list[dict]:
    """Those at some numbers of tokens, with commas between, or at all."""
    if tokens == "all":
        return rows
    wanted = {int(n) for n in tokens.split(",")}
    return [row for row in rows if row["tokens"] in wanted]


SHORT = {  # the three implementations of the playbook
    "rmsnorm": (EAGER, "F.rms_norm", OURS),
    "cross_entropy": (EAGER, "F.cross_entropy, bf16 logits", OURS, IN_PLACE),
}


def benchmark(name: str, tokens: str = "all", which: str = "every") -> str:
    """Times in us, the kernels alone and one call with the host, and the rate.

    Args:
        which: "short" for the playbook's rows.
    """
    record, body = load(f"benchmark_{name}"), []
    several = len(record["sections"]) > 1  # sizes, then at one number of tokens
    for section in record["sections"]:
        size = f"{section['size']:,}" if several else None
        for row in chosen(section["rows"], tokens):
            if which == "short" and row["implementation"] not in SHORT[section["kernel"]]:
                continue
            alone, total = row["kernels_us"], us_of(row)
            cells = [row["implementation"], size or f"{row['tokens']:,}"]
            if which != "short":
                cells += [microseconds(row[key]) for key in ("forward_us", "backward_us")]
            cells += [microseconds(us) for us in (total, row["host_us"], alone)]
            cells += [per_cent(record, section, row, us) for us in (total, alone)]
            if which == "short" and section["kernel"] == "cross_entropy":
                cells.append(megabytes(row["extra_bytes"]))
            body.append(cells)
    spec = SPECS[record["sections"][0]["kernel"]]
    headers = ["µs, forward + backward", spec.dimensions[0].name if several else spec.rows.lower()]
    if which != "short":
        headers += ["forward", "backward"]
    headers += ["total", "queued", "alone", "total %", "alone %"]
    if which == "short" and spec.title == "Cross-Entropy":
        headers.append("MB")
    return markdown(headers, body)


def errors(name: str, tokens: str) -> str:
    """Memory beyond the inputs and the errors against float64."""
    record = load(f"benchmark_{name}")
    section = record["sections"][0]
    spec, body = SPECS[section["kernel"]], []
    for row in chosen(section["rows"], tokens):
        if row["implementation"] != HOST_FLOOR:
            found = [number(row["errors"].get(part), ".1e") for part in spec.errors]
            size = [f"{row['tokens']:,}", megabytes(row["extra_bytes"])]
            body.append([row["implementation"], *size, *found])
    headers = ["implementation", spec.rows.lower(), "extra MB"]
    return markdown(headers + [f"error {part}" for part in spec.errors], body)


def sizes(kernel: str) -> str:
    """One of the playbook's kernels at other row lengths."""
    record = load(f"benchmark_{kernel}_sizes")
    return (rmsnorm_sizes if kernel == "rmsnorm" else cross_entropy_sizes)(record)


def rmsnorm_sizes(record: dict) -> str:
    names, body = [OURS, "QuACK", COMPILED, "Liger-Kernel"], []
    for i, section in enumerate(record["sections"]):
        rows = rows_at(record, max(row["tokens"] for row in section["rows"]), i)
        shares = [per_cent(record, section, rows[name], us_of(rows[name])) for name in names]
        body.append([f"{section['size']:,}", *shares])
    return markdown(["H, % of the copy rate", *names], body)


def cross_entropy_sizes(record: dict) -> str:
    body = []
    for i, section in enumerate(record["sections"]):
        tokens = max(row["tokens"] for row in section["rows"])
        alone = {name: row["kernels_us"] for name, row in rows_at(record, tokens, i).items()}
        one_pass = section["bytes_per_element"] / 3 * tokens * section["size"]
        once_us = one_pass / record["copy_gbs"] / 1e3
        share = f"{100 * 3 * once_us / alone[OURS]:.0f} %"
        in_place = times(alone[IN_PLACE] / (2 * once_us))
        others = "F.cross_entropy, bf16 logits", COMPILED
        ratios = [times(alone[name] / alone[OURS], 1) for name in others]
        body.append([f"{section['size']:,}", share, in_place, *ratios])
    headers = ["V", "ours, of the copy rate", "in place, × its floor"]
    return markdown([*headers, "F.cross_entropy", "torch.compile"], body)


def dtypes() -> str:
    """RMSNorm in the other dtypes, at 65,536 rows."""
    body = []
    for dtype in ("bf16", "fp16", "fp32"):
        record = load("benchmark_rmsnorm" + ("" if dtype == "bf16" else f"_{dtype}"))
        row = rows_at(record, 65_536)[OURS]
        share = per_cent(record, record["sections"][0], row, us_of(row))
        body.append([dtype, f"{us_of(row):,.0f}", share])
    return markdown(["dtype", "µs", "of the copy rate"], body)


def kernels() -> str:
    """The lessons after step 12, each at a recorded size: others' time over ours."""
    on_bf16, body = "F.linear + F.cross_entropy, bf16 logits", []
    for label, kernel, tokens, mine, pytorch in (
        ("SwiGLU, in place", "swiglu", 16_384, IN_PLACE, EAGER),
        ("RoPE", "rope", 32_768, OURS, EAGER),
        ("AdamW, one MLP weight", "adamw", 58_720_256, OURS, "torch.optim.AdamW"),
        ("linear + cross-entropy", "linear_cross_entropy", 8192, OURS, on_bf16),
        ("linear + cross-entropy", "linear_cross_entropy", 512, OURS, on_bf16),
        ("reverse KL, V = 131,072", "reverse_kl", 4096, OURS, "F.kl_div in fp32"),
    ):
        record = load(f"benchmark_{kernel}")
        section, rows = record["sections"][-1], rows_at(record, tokens, -1)
        # RoPE is so short that the host's time hides the kernels.
        clock = (lambda row: row["kernels_us"]) if kernel == "rope" else us_of
        us = {name: clock(row) for name, row in rows.items()}
        no_rival = EAGER, HOST_FLOOR, ONE_TILE, pytorch
        others = [n for n in rows if not is_ours(n) and n not in no_rival and us[n]]
        rival = min(others, key=us.get)
        short = rival.removeprefix("torch.optim.").removesuffix(", in place")
        extra = [f"{(rows[name]['extra_bytes'] or 0) / 1e6:,.0f}" for name in (mine, pytorch)]
        share = per_cent(record, section, rows[mine], us[mine])
        ratios = [times(us[pytorch] / us[mine]), f"{short}: {times(us[rival] / us[mine])}"]
        body.append([label, f"{tokens:,}", f"{us[mine]:,.0f}", share, *ratios, *extra])
    headers = ["", "tokens", "ours, µs", "of limit", "PyTorch", "strongest other", "MB"]
    return markdown([*headers, "PyTorch's"], body)


def prediction() -> str:
    """Bytes counted per element, what they would take at the copy rate, and what was measured."""
    body = []
    for label, kernel, tokens, counted in (
        ("RMSNorm, 65,536 × 4,096", "rmsnorm", 65_536, {EAGER: 128, OURS: 10}),
        ("cross-entropy, 8,192 × 128,256", "cross_entropy", 8192, {EAGER: 36, OURS: 6}),
    ):
        record = load(f"benchmark_{kernel}")
        rows, size = rows_at(record, tokens), record["sections"][0]["size"]
        byte_us = tokens * size / record["copy_gbs"] / 1e3  # one byte of each element
        floor = {name: n_bytes * byte_us for name, n_bytes in counted.items()}
        measured = {name: us_of(rows[name]) for name in counted}
        for name, n_bytes in counted.items():
            share = f"{100 * floor[name] / measured[name]:.0f} %"
            who = f"{label}, {'eager' if name == EAGER else 'ours'}"
            body.append([who, str(n_bytes), f"{floor[name]:,.0f}", f"{measured[name]:,.0f}", share])
        ratios = [times(each[EAGER] / each[OURS], 1) for each in (counted, floor, measured)]
        body.append(["quotient", *ratios, ""])
    headers = ["", "bytes per element", "at the copy rate, µs", "measured, µs"]
    return markdown([*headers, "of the copy rate"], body)


def reverse_kl() -> str:
    """The ways to compute the reverse KL, kernels alone."""
    record, body = load("benchmark_reverse_kl"), []
    for i, section in enumerate(record["sections"]):
        rows = rows_at(record, 4096, i)
        alone = {name: row["kernels_us"] for name, row in rows.items()}
        cells = [f"{alone[name]:,.0f}" for name in (ONE_TILE, OURS, TWO_KERNELS, COMPILED)]
        extra = [f"{rows[name]['extra_bytes'] / 1e6:,.0f}" for name in (OURS, COMPILED)]
        share = per_cent(record, section, rows[OURS], alone[OURS])
        gain = times(alone[COMPILED] / alone[OURS], 1)
        body.append([f"{section['size']:,}", *cells, gain, share, *extra])
    headers = ["V", "one tile", "remedy 1", "remedy 2", "torch.compile", "gain", "of its floor"]
    return markdown([*headers, "remedy 1, MB", "torch.compile, MB"], body)


def ceilings() -> str:
    """What the GPU of the records can do, as one run measured it."""
    record = load("benchmark_rmsnorm")
    copy, matmul = record["copy_gbs"], record["matmul_tflops"]
    quotient = f"{1e3 * matmul / copy:.0f} FLOP/byte"
    body = [
        ["copy rate", f"{copy / 1e3:.2f} TB/s", "read + written, of a copy of 2 GiB"],
        ["matmul rate", f"{matmul:.0f} TFLOP/s", "bf16, 8,192 × 8,192 × 8,192"],
        ["quotient", quotient, "left of it bytes decide, right of it FLOPs"],
    ]
    return markdown([record["environment"]["gpu"], "measured", "how"], body)


TABLES: dict[str, Callable[..., str]] = {
    "benchmark": benchmark,
    "errors": errors,
    "sizes": sizes,
    "dtypes": dtypes,
    "kernels": kernels,
    "prediction": prediction,
    "reverse_kl": reverse_kl,
    "ceilings": ceilings,
}
