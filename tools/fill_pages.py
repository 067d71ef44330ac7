"""Fill the pages' recorded outputs and tables from results/*.json, or check that they agree.

    python -m tools.fill_pages            # rewrite README.md and docs/*.md
    python -m tools.fill_pages --check    # exit code 1 where a page and the records differ
    python -m tools.fill_pages --pictures # draw results/*.png again, from the records
    python -m tools.fill_pages --record results/rmsnorm_test.json rmsnorm_test.py    # run a script, keep what it prints

A page marks what comes from a record by one comment in the line above the block or table:

    <!-- output: profile_1x512 -->                     what the script printed, rendered again
    <!-- output: a b -->                               of several records: the comparison of them
    <!-- output: a | Category .. Total | GPU busy -->  parts: from a line that begins with one text
                                                       to one that begins with another; single lines
    <!-- output: a | Rung .. | without Host; GB/s -->  columns of its tables left out
    <!-- table: NAME WORD ... -->                      TABLES[NAME](WORD, ...) below

`...` stands for lines and columns that are left out.  Records are named without results/ and .json.
Sentences hold no measured figure: what they say is in a block beside them.
"""

# first: importing PyTorch takes seconds
from harness import quiet_interrupt  # noqa: F401  # isort: skip

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import benchmark_kernels
import compare_runs
import profile_baseline
from benchmark_kernels import COMPILED, EAGER, HOST_FLOOR, IN_PLACE, KERNELS, ONE_TILE, OURS, TWO_KERNELS
from harness import command_line, diagnose, run_records, tables, training_run
from next_steps import ladder, memory_estimate, memory_profile
from tools import sweep_kernels

HERE = Path(__file__).parents[1]  # the project's folder
RESULTS = HERE / "results"
COLUMNS = 120
MARKED = re.compile(
    r"^<!-- (?P<kind>output|table): (?P<what>[^\n]+?) -->\n(?P<body>```text\n.*?^```$|(?:^\|[^\n]*$\n?)+)",
    re.DOTALL | re.MULTILINE,
)
LEFT_OUT = "..."


def pages() -> list[Path]:
    return [HERE / "README.md", *sorted((HERE / "docs").glob("*.md"))]


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


# ---------------------------------------------------------------- recorded outputs


def render(names: list[str]) -> str:
    """What the script that wrote these records printed."""
    records = [load(name) for name in names]
    if len(records) > 1 and records[0]["kind"] == "profile":
        return diagnose.render_comparison(*records)
    if len(records) > 1:
        return compare_runs.render(compare_runs.run_names(records), records)
    (record,) = records
    renderers = {
        "finetune": finetune_output,
        "profile": profile_baseline.render,
        "memory": memory_profile.render,
        "estimate": memory_estimate.render,
        "benchmark": benchmark_kernels.render,
        "sweep": sweep_kernels.render_sweep,
        "ladder": ladder.render,
        "longest": ladder.render_longest,
        "text": lambda record: "\n".join(record["lines"]),
    }
    return renderers[record["kind"]](record)


def finetune_output(record: dict) -> str:
    """Every step and the result block."""
    columns = [record[key] for key in ("losses", "seconds", "tokens", "peaks")]
    steps = [training_run.step_line(step, record["steps"], *columns) for step in range(1, record["steps"] + 1)]
    return "\n".join([*steps, "", training_run.result_block(record)])


def position(lines: list[str], beginning: str, start: int) -> int:
    """Of the first line from `start` on that begins so.

    Raises:
        ValueError: there is none.
    """
    for i in range(start, len(lines)):
        if lines[i].strip().startswith(beginning):
            return i
    raise ValueError(f"no line from line {start + 1} on begins with {beginning!r}: look at the record's output")


def cut(lines: list[str], parts: list[str]) -> list[str]:
    """The lines that the parts name, in their order, and LEFT_OUT where some are missing in between."""
    shown, end = [], 0
    for part in parts:
        first, dots, last = (text.strip() for text in part.partition(".."))
        start = position(lines, first, end)
        stop = position(lines, last, start) + 1 if last else len(lines) if dots else start + 1
        if any(line.strip() for line in lines[end:start]):
            shown.append(LEFT_OUT)
        elif start > end:
            shown.append("")
        shown += lines[start:stop]
        end = stop
    return shown + ([LEFT_OUT] if any(line.strip() for line in lines[end:]) else [])


def column_spans(rule: str) -> list[tuple[int, int]]:
    """Where the columns of a printed table begin and end, from the rule below its heading."""
    return [match.span() for match in re.finditer(r"-+(?:  |$)", rule)]


def without_columns(lines: list[str], names: list[str]) -> list[str]:
    """The same without the columns of these names; LEFT_OUT ends the heading of a table that had them."""
    spans, result = [], []
    for heading, line in zip(lines, [*lines[1:], ""]):
        if re.fullmatch(r"-+(  +-+)+", line.strip()):
            columns = column_spans(line)
            spans = [(a, b) for a, b in columns if heading[a:b].strip() not in names]
            left_out = len(spans) < len(columns)
            spans = spans if left_out else []
            ending = f"  {LEFT_OUT}" if left_out else ""
        elif not heading.strip():
            spans = []
        result.append("".join(heading[a:b].ljust(b - a) for a, b in spans).rstrip() + ending if spans else heading)
        ending = ""
    return result


def wrapped(line: str) -> list[str]:
    """A sentence that is too long for a page, as a terminal would break it; a row of a table is left as it is."""
    is_row = "  " in line.strip()
    return [line] if len(line) <= COLUMNS or is_row else textwrap.wrap(line, COLUMNS - 4, subsequent_indent="    ")


def output_block(what: str) -> str:
    """A fenced block with what was recorded, cut as the marker says."""
    names, *parts = (part.strip() for part in what.split("|"))
    lines = [line.rstrip() for line in render(names.split()).splitlines()]
    if parts and parts[-1].startswith("without "):
        columns = parts.pop().removeprefix("without ")
        lines = without_columns(lines, [name.strip() for name in columns.split(";")])
    lines = [piece for line in (cut(lines, parts) if parts else lines) for piece in wrapped(line.rstrip())]
    return "\n".join(["```text", *lines, "```"])


# ---------------------------------------------------------------- tables


def markdown(headers: list[str], rows: list[list[str]]) -> str:
    """A table that reads well as raw text too: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: list[str]) -> str:
        padded = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths))]
        return f"| {' | '.join(padded)} |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line(headers), rule, *(line(row) for row in rows)])


def rows_at(record: dict, tokens: int, section: int = 0) -> dict[str, dict]:
    """{implementation: row} of a benchmark at one number of tokens."""
    return {r["implementation"]: r for r in record["sections"][section]["rows"] if r["tokens"] == tokens}


def us_of(row: dict) -> float:
    """The total's median, host included."""
    return row["total_us"][1]


def times(value: float, digits: int = 2) -> str:
    return f"{value:,.{digits}f}×"


def in_words(size: str) -> str:
    """1x512 and 4x2048 as the pages write them."""
    return " × ".join(f"{int(n):,}" for n in size.split("x"))


def is_ours(name: str) -> bool:
    return name.startswith(OURS)


def strongest(rows: dict[str, dict], in_place: bool) -> str:
    """The fastest implementation of somebody else, of those that do (or do not) overwrite their inputs."""
    others = [n for n in rows if not is_ours(n) and n not in (EAGER, HOST_FLOOR) and n.endswith("in place") == in_place]
    return min(others, key=lambda name: us_of(rows[name]))


def gains() -> str:
    """What it gains: the baseline, the strongest opponent and ours, of the kernels and of the whole step."""
    body = []
    for kernel, tokens, label in (
        ("rmsnorm", 65_536, "RMSNorm, 65,536 × 4,096"),
        ("cross_entropy", 8192, "loss, 8,192 × 128,256"),
        ("cross_entropy", 8192, "the same, in place"),
    ):
        rows = rows_at(load(f"benchmark_{kernel}"), tokens)
        place = "in place" in label
        rival, ours = strongest(rows, place), rows[IN_PLACE if place else OURS]

        def cell(row: dict, kernel: str = kernel) -> str:
            extra = f", {row['extra_bytes'] / 1e9:.1f} GB" if kernel == "cross_entropy" else ""
            return f"{us_of(row) / 1e3:.2f} ms{extra}"

        ratios = [times(us_of(rows[name]) / us_of(ours), digits) for name, digits in ((EAGER, 1), (rival, 2))]
        body.append([label, cell(rows[EAGER]), f"{rival.split(',')[0]}: {cell(rows[rival])}", cell(ours), *ratios])
    for size in ("1x512", "4x2048"):
        base, ours = (load(f"finetune_{which}_{size}") for which in ("baseline", "optimized"))

        def cell(record: dict) -> str:
            return f"{1e3 * record['median_seconds']:.0f} ms, {record['peak_memory_bytes'] / 1e9:.1f} GB"

        gain = times(base["median_seconds"] / ours["median_seconds"])
        label = f"step, {in_words(size)}, these two"
        body.append([label, cell(base), "–", cell(ours), gain, "–"])
    for size in ("1x512", "4x2048"):
        rungs = {rung["name"]: rung for rung in load(f"ladder_{size}")["rungs"]}
        base, graph, liger = rungs["baseline"], rungs[ladder.CUDA_GRAPH], list(rungs.values())[-1]

        def cell(rung: dict) -> str:
            return f"{rung['step_ms']:.0f} ms, {rung['peak_memory_bytes'] / 1e9:.1f} GB"

        ratios = [times(rung["step_ms"] / graph["step_ms"]) for rung in (base, liger)]
        label = f"step, {in_words(size)}, every kernel"
        body.append([label, cell(base), f"Liger: {cell(liger)}", cell(graph), *ratios])
    return markdown(["", "Hugging Face", "strongest other", "ours", "gain", "over other"], body)


def gpus() -> str:
    """Which model trains on which GPU, by the estimator, in GB at 1 x 512 and 4 x 2,048 tokens."""
    body = []
    for memory, model in (
        ("24 GB", "Llama-3.2-1B"),
        ("48 GB", "Llama-3.2-3B"),
        ("80 GB", "Llama-3.1-8B"),
    ):
        records = [load(f"estimate_{model}_{size}") for size in ("1x512", "4x2048")]
        peaks = [f"{e['peak_memory_bytes'] / 1e9:.1f}" for record in records for e in record["estimates"]]
        room = 0.95 * float(memory.removesuffix(" GB"))
        peaks = [peak if float(peak) < room else f"({peak})" for peak in peaks]
        body.append([memory, f"`{records[0]['model']}`", *peaks])
    headers = ["GPU", "--model", "1 × 512, none", "--kernels all", "4 × 2,048, none", "--kernels all"]
    return markdown(headers, body)


DURATIONS = {  # what a page calls it: the arguments of the measurement on a CPU, and the GPU's record and its steps
    "3": ("`profile_baseline.py`", "profile_baseline.py --model tiny", "profile_1x512"),
    "6": ("`rmsnorm_test.py`", "rmsnorm_test.py", None),
    "7": ("`benchmark_kernels.py --kernel rmsnorm`", "benchmark_kernels.py --kernel rmsnorm", None),
    "9": ("`cross_entropy_test.py`", "cross_entropy_test.py", None),
    "10": ("`benchmark_kernels.py --kernel cross_entropy`", "benchmark_kernels.py --kernel cross_entropy", None),
    "11": ("`finetune_optimized.py`", "finetune_optimized.py --model tiny --seq-len 64", "finetune_optimized_1x512"),
    "12": ("`finetune_optimized.py --ladder`", None, "ladder_1x512"),
}


def steps_seconds(record: dict) -> float:
    """The GPU's time in the steps of a recorded run, without its set-up."""
    if record["kind"] == "profile":
        n_steps = record["warmup_steps"] + len(record["step_ms"]) + 4  # four steps with a profiler attached
        return n_steps * record["median_step_ms"] / 1e3
    if record["kind"] == "ladder":
        return sum(record["steps"] * rung["step_ms"] for rung in record["rungs"]) / 1e3
    return sum(record["seconds"])


def durations() -> str:
    """How long the playbook's commands take."""
    on_cpu = load("durations_cpu")["seconds"]
    body = []
    for step, (command, measured, name) in DURATIONS.items():
        on_gpu = "not recorded" if name is None else f"{steps_seconds(load(name)):.0f} s"
        seconds = on_cpu.get(measured)
        cpu = "not measured" if seconds is None else f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        body.append([command, step, on_gpu, cpu])
    return markdown(["command", "step", "steps alone, on the GPU", "all of it, on a CPU core"], body)


def per_cent(record: dict, section: dict, row: dict, us: float | None) -> str:
    """Of the ceiling that the kernel is measured by, at this time."""
    rate = KERNELS[section["kernel"]].rate
    if us is None or row[rate.key] is None:
        return "n/a"
    return f"{100 * benchmark_kernels.rate_at(rate, row, us) / record[rate.ceiling_key]:.0f} %"


def chosen(rows: list[dict], tokens: str) -> list[dict]:
    wanted = {int(n) for n in tokens.split(",")} if tokens != "all" else {row["tokens"] for row in rows}
    return [row for row in rows if row["tokens"] in wanted]


SHORT = {  # the three implementations of the playbook
    "rmsnorm": (EAGER, "F.rms_norm", OURS),
    "cross_entropy": (EAGER, "F.cross_entropy, bf16 logits", OURS, IN_PLACE),
}


def benchmark(name: str, tokens: str = "all", which: str = "every") -> str:
    """Times in us, the kernels alone and one call with the host, and the rate; `short`: the playbook's rows."""
    record, body = load(f"benchmark_{name}"), []
    for section in record["sections"]:
        size = f"{section['size']:,}" if len(record["sections"]) > 1 else None  # then at one number of tokens
        for row in chosen(section["rows"], tokens):
            if which == "short" and row["implementation"] not in SHORT[section["kernel"]]:
                continue
            alone, total = row["kernels_us"], us_of(row)
            cells = [row["implementation"], size or f"{row['tokens']:,}"]
            if which != "short":
                cells += [benchmark_kernels.microseconds(row[key]) for key in ("forward_us", "backward_us")]
            cells += [benchmark_kernels.microseconds(us) for us in (total, row["host_us"], alone)]
            cells += [per_cent(record, section, row, us) for us in (total, alone)]
            if which == "short" and section["kernel"] == "cross_entropy":
                cells.append(benchmark_kernels.megabytes(row["extra_bytes"]))
            body.append(cells)
    spec = KERNELS[record["sections"][0]["kernel"]]
    along = spec.dimensions[0].name if len(record["sections"]) > 1 else spec.rows.lower()
    headers = ["µs, forward + backward", along, *(["forward", "backward"] if which != "short" else [])]
    headers += ["total", "queued", "alone"]
    headers += ["total %", "alone %"]
    if which == "short" and spec.title == "Cross-Entropy":
        headers.append("MB")
    return markdown(headers, body)


def errors(name: str, tokens: str) -> str:
    """Memory beyond the inputs and the errors against float64."""
    record = load(f"benchmark_{name}")
    section = record["sections"][0]
    parts = KERNELS[section["kernel"]].errors
    body = [
        [
            row["implementation"], f"{row['tokens']:,}", benchmark_kernels.megabytes(row["extra_bytes"]),
            *(tables.number(row["errors"].get(part), ".1e") for part in parts),
        ]
        for row in chosen(section["rows"], tokens) if row["implementation"] != HOST_FLOOR
    ]  # fmt: skip
    headers = ["implementation", KERNELS[section["kernel"]].rows.lower(), "extra MB", *(f"error {p}" for p in parts)]
    return markdown(headers, body)


def sizes(kernel: str) -> str:
    """One kernel at other row lengths."""
    record, body = load(f"benchmark_{kernel}_sizes"), []
    for i, section in enumerate(record["sections"]):
        tokens = max(row["tokens"] for row in section["rows"])
        rows = rows_at(record, tokens, i)
        if kernel == "rmsnorm":
            names = [OURS, "QuACK", COMPILED, "Liger-Kernel"]
            body.append([f"{section['size']:,}", *(per_cent(record, section, rows[n], us_of(rows[n])) for n in names)])
            continue
        alone = {name: row["kernels_us"] for name, row in rows.items()}
        once = section["bytes_per_element"] / 3 * tokens * section["size"] / record["copy_gbs"] / 1e3  # us, one pass
        body.append([
            f"{section['size']:,}", f"{100 * 3 * once / alone[OURS]:.0f} %", times(alone[IN_PLACE] / (2 * once)),
            times(alone["F.cross_entropy, bf16 logits"] / alone[OURS], 1), times(alone[COMPILED] / alone[OURS], 1),
        ])  # fmt: skip
    if kernel == "rmsnorm":
        return markdown(["H, % of the copy rate", "ours", "QuACK", "torch.compile", "Liger-Kernel"], body)
    headers = ["V", "ours, of the copy rate", "in place, × its floor", "F.cross_entropy", "torch.compile"]
    return markdown(headers, body)


def dtypes() -> str:
    """RMSNorm in the other dtypes, at 65,536 rows."""
    body = []
    for dtype in ("bf16", "fp16", "fp32"):
        record = load("benchmark_rmsnorm" + ("" if dtype == "bf16" else f"_{dtype}"))
        row = rows_at(record, 65_536)[OURS]
        body.append([dtype, f"{us_of(row):,.0f}", per_cent(record, record["sections"][0], row, us_of(row))])
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
        us = {name: row["kernels_us"] if kernel == "rope" else us_of(row) for name, row in rows.items()}
        others = [n for n in rows if not is_ours(n) and n not in (EAGER, HOST_FLOOR, ONE_TILE, pytorch) and us[n]]
        rival = min(others, key=us.get)
        extra = [f"{(rows[name]['extra_bytes'] or 0) / 1e6:,.0f}" for name in (mine, pytorch)]
        short = rival.removeprefix("torch.optim.").removesuffix(", in place")
        body.append([
            label, f"{tokens:,}", f"{us[mine]:,.0f}", per_cent(record, section, rows[mine], us[mine]),
            times(us[pytorch] / us[mine]), f"{short}: {times(us[rival] / us[mine])}", *extra,
        ])  # fmt: skip
    headers = ["", "tokens", "ours, µs", "of limit", "PyTorch", "strongest other", "MB", "PyTorch's"]
    return markdown(headers, body)


def prediction() -> str:
    """Bytes counted per element, what they would take at the copy rate, and what was measured."""
    body = []
    for label, kernel, tokens, counted in (
        ("RMSNorm, 65,536 × 4,096", "rmsnorm", 65_536, {EAGER: 128, OURS: 10}),
        ("cross-entropy, 8,192 × 128,256", "cross_entropy", 8192, {EAGER: 36, OURS: 6}),
    ):
        record = load(f"benchmark_{kernel}")
        rows, size = rows_at(record, tokens), record["sections"][0]["size"]
        floor = {n: n_bytes * tokens * size / record["copy_gbs"] / 1e3 for n, n_bytes in counted.items()}
        for name, n_bytes in counted.items():
            share = f"{100 * floor[name] / us_of(rows[name]):.0f} %"
            who = "eager" if name == EAGER else "ours"
            body.append([f"{label}, {who}", str(n_bytes), f"{floor[name]:,.0f}", f"{us_of(rows[name]):,.0f}", share])
        ratios = [counted[EAGER] / counted[OURS], floor[EAGER] / floor[OURS], us_of(rows[EAGER]) / us_of(rows[OURS])]
        body.append(["quotient", *(times(value, 1) for value in ratios), ""])
    return markdown(["", "bytes per element", "at the copy rate, µs", "measured, µs", "of the copy rate"], body)


def ladder_table(size: str) -> str:
    """The ladder, in the columns that a page has room for."""
    record, body, before = load(f"ladder_{size}"), [], None
    base = record["rungs"][0]
    for rung in record["rungs"]:
        is_rung = rung["predicted_ms"] is not None
        gain = [f"{before - ms:,.1f}" if is_rung else "" for ms in (rung["predicted_ms"] or 0.0, rung["step_ms"])]
        body.append([
            f"+ {rung['name']}" if is_rung else rung["name"], *gain, f"{rung['step_ms']:,.1f}",
            times(rung["tokens_per_second"] / base["tokens_per_second"]), f"{rung['peak_memory_bytes'] / 1e9:.1f}",
            times(rung["peak_memory_bytes"] / base["peak_memory_bytes"]),
            f"{max(compare_runs.relative_differences(base, rung)):.1e}",
        ])  # fmt: skip
        before = rung["step_ms"]
    headers = ["rung", "predicted, ms", "gained, ms", "step, ms", "tokens/s", "GB", "of baseline", "loss diff."]
    return markdown(headers, body)


def compare(before_name: str, after_name: str, rows: str = "") -> str:
    """Two profiles, in the columns that a page has room for; `rows`: beginnings of the rows shown, all unless given."""
    text = diagnose.render_comparison(load(before_name), load(after_name)).splitlines()
    start = position(text, "Category", 0)
    stop = position(text, "Step", start) + 1
    spans = column_spans(text[start + 1])
    cells = [[line.ljust(200)[a:b].strip() for a, b in spans] for line in [text[start], *text[start + 2 : stop]]]
    keep = [0, 1, 2, 3, 4, 7, 8]
    headers, *body = ([row[i] for i in keep] for row in cells)
    body = [row for row in body if not rows or row[0].split()[-1] in rows.split(",")]
    return markdown(headers, body)


def peaks(*names: str) -> str:
    """What the memory is made of at the peak, of several memory profiles."""
    records = [load(name) for name in names]
    parts = [part for part in records[0]["parts"] if any(r["parts"].get(part, 0) > 5e7 for r in records)]
    body = [[part, *(f"{r['parts'].get(part, 0) / 1e9:.2f}" for r in records)] for part in parts]
    body.append(["total", *(f"{r['peak_memory_bytes'] / 1e9:.2f}" for r in records)])
    headers = [f"{r['batch_size']} × {r['seq_len']:,}, {'all' if r['kernels'] else 'none'}" for r in records]
    return markdown(["GB at the peak, tokens, --kernels", *headers], body)


def longest() -> str:
    """The longest sequences that fit."""
    body = []
    for which in ("baseline", "all"):
        record = load(f"longest_{which}")
        peak = f"{record['peaks'][-1] / 1e9:.1f}"
        body.append([f"`--kernels {'none' if which == 'baseline' else 'all'}`", f"{record['lengths'][-1]:,}", peak])
    return markdown(["", "longest sequence, tokens", "peak, GB"], body)


def quality() -> str:
    """What stochastic rounding is worth."""
    fp32, bf16, rounded = (load(f"quality_{n}")["validation_loss_after"] for n in ("fp32", "bf16", "stochastic"))
    body = [
        ["fp32, `torch.optim.AdamW`", f"{fp32:.4f}", ""],
        ["bf16, `torch.optim.AdamW`", f"{bf16:.4f}", "0 %"],
        ["bf16, our kernel, stochastic rounding", f"{rounded:.4f}", f"{100 * (bf16 - rounded) / (bf16 - fp32):.0f} %"],
    ]
    return markdown(["after 400 steps", "validation loss", "of the gap to fp32 closed"], body)


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


def distillation() -> str:
    """The small students, on a CPU."""
    body = [["the teacher", "", "", "", f"{load('distill_teacher_tiny')['validation_loss_after']:.2f}"]]
    for label, name in (
        ("its first layer", "distill_tiny_first_layer"),
        ("a layer with random weights", "distill_tiny"),
    ):
        record = load(name)
        losses = record["losses"][0], record["losses"][-1]
        found = [*losses, record["validation_loss_before"], record["validation_loss_after"]]
        body.append([label, *(f"{value:.2f}" for value in found)])
    headers = ["", "reverse KL in step 1", "in step 20", "validation loss before", "after"]
    return markdown(headers, body)


def distillation_8b() -> str:
    """The large student, with and without the kernels."""
    body = []
    for label, name in (("`--kernels all`", "distill_8b"), ("`--kernels none`", "distill_8b_none")):
        record = load(name)
        step, memory = 1e3 * record["median_seconds"], record["peak_memory_bytes"] / 1e9
        ends = [f"{record['losses'][i]:.3f}" for i in (0, -1)]
        body.append([label, f"{step:.0f}", f"{memory:.1f}", *ends])
    return markdown(["", "step, ms", "peak, GB", "reverse KL in step 1", "in step 20"], body)


def ceilings() -> str:
    """What the GPU of the records can do, as one run measured it."""
    record = load("benchmark_rmsnorm")
    copy, matmul = record["copy_gbs"], record["matmul_tflops"]
    body = [
        ["copy rate", f"{copy / 1e3:.2f} TB/s", "read + written, of a copy of 2 GiB"],
        ["matmul rate", f"{matmul:.0f} TFLOP/s", "bf16, 8,192 × 8,192 × 8,192"],
        ["quotient", f"{1e3 * matmul / copy:.0f} FLOP/byte", "left of it bytes decide, right of it FLOPs"],
    ]
    return markdown([record["environment"]["gpu"], "measured", "how"], body)


TABLES: dict[str, Callable[..., str]] = {
    "gains": gains, "gpus": gpus, "durations": durations, "benchmark": benchmark, "errors": errors, "sizes": sizes,
    "dtypes": dtypes, "kernels": kernels, "ladder": ladder_table, "compare": compare, "peaks": peaks,
    "longest": longest, "prediction": prediction, "quality": quality, "reverse_kl": reverse_kl,
    "distillation": distillation, "distillation_8b": distillation_8b, "ceilings": ceilings,
}  # fmt: skip


# ---------------------------------------------------------------- pages and pictures


def fill(text: str) -> str:
    """A page's text with every marked block and table computed from the records."""

    def computed(match: re.Match) -> str:
        if match["kind"] == "output":
            body = output_block(match["what"])
        else:
            name, *words = match["what"].split()
            body = TABLES[name](*words)
        end = "\n" if match["body"].endswith("\n") else ""
        return f"<!-- {match['kind']}: {match['what']} -->\n{body}{end}"

    return MARKED.sub(computed, text)


def pictures() -> Iterator[tuple[str, Callable, list]]:
    """Each picture of results/: its name, the function that draws it, and what that is called with."""
    for kernel in ("rmsnorm", "cross_entropy", "linear_cross_entropy", "swiglu", "rope", "adamw", "reverse_kl"):
        yield f"benchmark_{kernel}", benchmark_kernels.plot, [load(f"benchmark_{kernel}")]
    for which in ("baseline_1x512", "baseline_4x2048", "all_4x2048"):
        yield f"memory_{which}", memory_profile.plot, [load(f"memory_{which}")]
    for name, after in (("roofline_4x2048", "both"), ("roofline_all_4x2048", "all")):
        yield name, diagnose.plot, [[load("profile_4x2048"), load(f"profile_4x2048_{after}")]]
    runs = [load(f"finetune_{which}_4x2048") for which in ("baseline", "optimized")]
    yield "comparison_4x2048", compare_runs.plot, [compare_runs.run_names(runs), runs]
    yield "ladder", ladder.plot, [[load("ladder_1x512"), load("ladder_4x2048")]]


def record_output(path: str, script: str) -> int:
    """Run a script that writes no record of its own, keep its printed lines as one; returns its exit code."""
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=HERE)
    print(run.stdout, run.stderr, sep="", end="")
    if run.returncode == 0:
        record = {"kind": "text", "environment": run_records.environment(), "script": script}
        run_records.write_record(path, record | {"lines": run.stdout.splitlines()})
    return run.returncode


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 where they differ")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures of results/ again")
    parser.add_argument("--record", nargs=2, metavar=("FILE", "SCRIPT"), help="record what SCRIPT prints")
    args = parser.parse_args()
    if args.record:
        return record_output(*args.record)
    if args.pictures:
        for name, draw, arguments in pictures():
            draw(*arguments, str(RESULTS / f"{name}.png"))
        return 0
    changed = []
    for page in pages():
        before = page.read_text()
        after = fill(before)
        if before != after:
            changed.append(str(page.relative_to(HERE)))
            if not args.check:
                page.write_text(after)
    if args.check and changed:
        print(f"{', '.join(changed)}: not what the records say; run: python -m tools.fill_pages", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    command_line.run_main(main)
