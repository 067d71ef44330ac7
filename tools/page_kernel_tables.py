"""The pages' tables of the kernels, from records of benchmark_kernels.py."""

from collections import Counter

from harness.benchmark import benchmark_specs as specs
from harness.benchmark.benchmark_tables import (
    CLOCK_KEYS,
    ceiling_of,
    clock,
    error_columns,
    megabytes,
    rate_at,
    share_in_words,
)
from harness.cli.tables import Column, Table, formatted
from harness.steps.gpus import GPUS
from judge import OUTCOMES
from judging.compile_targets import COMPILE_TARGETS
from next_steps.lessons.fp8_kernel import FIRST_CAPABILITY
from tools.page_records import RESULTS, load_record, page_table, per_cent, short_gpu, times

IN_BF16 = "F.cross_entropy, bf16 logits"
# what a short table shows
PLAYBOOK_ROWS = {specs.EAGER, "F.rms_norm", IN_BF16, specs.OURS, specs.IN_PLACE}


class RecordedRow(dict):
    """A row of a benchmark's record, which knows its section and its record."""

    def __init__(self, row: dict, section: dict, record: dict):
        super().__init__(row)
        self.section, self.record = section, record

    @property
    def total(self) -> float:
        """Median of one call at a time in us. The host's work is included."""
        return self["total_us"][1]

    @property
    def alone(self) -> float | None:
        """The kernels' time in us, without the host."""
        return self["kernels_us"]

    @property
    def mb(self) -> float:
        return (self["extra_bytes"] or 0) / 1e6

    @property
    def size(self) -> str:
        return f"{self.section['size']:,}"

    def share(self, us: float | None) -> str:
        """The share of the ceiling that `us` microseconds reach."""
        rate = specs.SPECS[self.section["kernel"]].rate
        reached = None if us is None or self[rate.key] is None else rate_at(rate, self, us)
        return share_in_words(reached, ceiling_of(self.record, rate), ".0%").replace("%", " %")


def recorded_rows(name: str, tokens: str = "all") -> tuple[specs.Spec, list[RecordedRow]]:
    """The rows of a benchmark's record at some numbers of tokens, with commas between."""
    record = load_record(f"benchmark_{name}")
    sections = record["sections"]
    rows = [RecordedRow(row, section, record) for section in sections for row in section["rows"]]
    wanted = [row for row in rows if tokens == "all" or str(row["tokens"]) in tokens.split(",")]
    return specs.SPECS[sections[0]["kernel"]], wanted


def by_size(name: str, tokens: int) -> list[dict[str, RecordedRow]]:
    """{implementation: row} at so many tokens, of each section of the record."""
    found = {}
    for row in recorded_rows(name, str(tokens))[1]:
        found.setdefault(id(row.section), {})[row["implementation"]] = row
    return list(found.values())


def benchmark_table(name: str, tokens: str = "all", which: str = "every") -> str:
    """Times by the three clocks, and the shares of the ceiling; `which`: "short" or "every"."""
    spec, rows = recorded_rows(name, tokens)
    several_sizes = len(rows[0].record["sections"]) > 1  # at one number of tokens
    if several_sizes:
        size = Column(spec.dimensions[0].name, lambda row: row.size)
    else:
        size = Column(spec.rows.lower(), "tokens", ",")
    shares = [
        Column("total %", lambda row: row.share(row.total)),
        Column("alone %", lambda row: row.share(row.alone)),
    ]
    clocks = [clock(title) for title in CLOCK_KEYS]
    if which == "short":
        rows = [row for row in rows if row["implementation"] in PLAYBOOK_ROWS]
        clocks = clocks[2:]  # without forward and backward
        shares += [Column("MB", "extra_bytes", megabytes)] if name == "cross_entropy" else []
    columns = [Column("µs, forward + backward", "implementation"), size, *clocks, *shares]
    return Table.of(columns, rows).markdown()


def errors(name: str, tokens: str) -> str:
    """Memory beyond the inputs and the errors against float64."""
    spec, rows = recorded_rows(name, tokens)
    columns = [
        Column("implementation", "implementation"),
        Column(spec.rows.lower(), "tokens", ","),
        Column("extra MB", "extra_bytes", megabytes),
        *error_columns(spec, "error"),
    ]
    judged = [row for row in rows if row["implementation"] != specs.HOST_FLOOR]
    return Table.of(columns, judged).markdown()


def sizes_table(kernel: str) -> str:
    """One of the playbook's kernels at other row lengths."""
    body, others = [], ("QuACK", specs.COMPILED, "Liger-Kernel")
    for rows in by_size(f"{kernel}_sizes", 65_536 if kernel == "rmsnorm" else 8192):
        ours = rows[specs.OURS]
        if kernel == "rmsnorm":
            cells = [rows[name].share(rows[name].total) for name in (specs.OURS, *others)]
        else:
            once = ours.section["bytes_per_element"] / 3 * ours["tokens"] * ours.section["size"]
            once_us = once / ours.record["copy_gbs"] / 1e3
            in_place = times(rows[specs.IN_PLACE].alone / (2 * once_us))
            ratios = (rows[name].alone / ours.alone for name in (IN_BF16, specs.COMPILED))
            cells = [per_cent(3 * once_us / ours.alone), in_place, *(times(r, 1) for r in ratios)]
        body.append([ours.size, *cells])
    if kernel == "rmsnorm":
        return page_table(body, " | ".join(["H, % of the copy rate", specs.OURS, *others]))
    floor = "ours, of the copy rate | in place, × its floor"
    return page_table(body, f"V | {floor} | F.cross_entropy | torch.compile")


def dtypes() -> str:
    """RMSNorm in each dtype, at 65,536 rows."""
    body = []
    for dtype, name in (("bf16", "rmsnorm"), ("fp16", "rmsnorm_fp16"), ("fp32", "rmsnorm_fp32")):
        ours = by_size(name, 65_536)[0][specs.OURS]
        body.append((dtype, f"{ours.total:,.0f}", ours.share(ours.total)))
    return page_table(body, "dtype | µs | of the copy rate")


LESSONS = (  # label, record, tokens, which of ours, which of PyTorch's
    ("SwiGLU, in place", "swiglu", 16_384, specs.IN_PLACE, specs.EAGER),
    ("RoPE", "rope", 32_768, specs.OURS, specs.EAGER),
    ("AdamW, one MLP weight", "adamw", 58_720_256, specs.OURS, "torch.optim.AdamW"),
    ("linear + cross-entropy", "linear_cross_entropy", 8192, specs.OURS, f"F.linear + {IN_BF16}"),
    ("linear + cross-entropy", "linear_cross_entropy", 512, specs.OURS, f"F.linear + {IN_BF16}"),
    ("reverse KL, V = 131,072", "reverse_kl", 4096, specs.OURS, "F.kl_div in fp32"),
)


def kernels() -> str:
    """The lessons after lesson 12, each at a recorded size: others' time over ours."""
    body = []
    for label, kernel, tokens, mine, pytorch in LESSONS:
        rows = by_size(kernel, tokens)[-1]
        # RoPE is so short that the host's time hides the kernels.
        us = {name: row.alone if kernel == "rope" else row.total for name, row in rows.items()}
        no_rival = specs.EAGER, specs.HOST_FLOOR, specs.ONE_TILE, pytorch
        others = [n for n in rows if not n.startswith(specs.OURS) and n not in no_rival and us[n]]
        rival = min(others, key=us.get)
        short = rival.removeprefix("torch.optim.").removesuffix(", in place")
        ratios = times(us[pytorch] / us[mine]), f"{short}: {times(us[rival] / us[mine])}"
        extra = [f"{rows[name].mb:,.0f}" for name in (mine, pytorch)]
        measured_us = f"{us[mine]:,.0f}", rows[mine].share(us[mine])
        body.append((label, f"{tokens:,}", *measured_us, *ratios, *extra))
    return page_table(
        body, " | tokens | ours, µs | of limit | PyTorch | strongest other | MB | PyTorch's"
    )


def prediction() -> str:
    """Bytes counted per element, the time that a copy of them takes, and the measured time."""
    body = []
    for label, kernel, tokens, counted in (
        ("RMSNorm, 65,536 × 4,096", "rmsnorm", 65_536, {specs.EAGER: 128, specs.OURS: 10}),
        ("cross-entropy, 8,192 × 128,256", "cross_entropy", 8192, {specs.EAGER: 36, specs.OURS: 6}),
    ):
        rows = by_size(kernel, tokens)[0]
        ours = rows[specs.OURS]  # below: one byte of each element
        byte_us = tokens * ours.section["size"] / ours.record["copy_gbs"] / 1e3
        found = [(n, n * byte_us, rows[name].total) for name, n in counted.items()]
        for who, (n_bytes, floor, us) in zip(("eager", "ours"), found):
            rates = f"{floor:,.0f}", f"{us:,.0f}", per_cent(floor / us)
            body.append((f"{label}, {who}", str(n_bytes), *rates))
        body.append(("quotient", *(times(eager / ours, 1) for eager, ours in zip(*found)), ""))
    measured_us = "at the copy rate, µs | measured, µs | of the copy rate"
    return page_table(body, f" | bytes per element | {measured_us}")


def reverse_kl_table() -> str:
    """The ways to compute the reverse KL, kernels alone."""
    body = []
    for rows in by_size("reverse_kl", 4096):
        ours, compiled = rows[specs.OURS], rows[specs.COMPILED]
        names = specs.ONE_TILE, specs.OURS, specs.TWO_KERNELS, specs.COMPILED
        us = [f"{rows[name].alone:,.0f}" for name in names]
        gain = times(compiled.alone / ours.alone, 1), ours.share(ours.alone)
        extra = [f"{each.mb:,.0f}" for each in (ours, compiled)]
        body.append((ours.size, *us, *gain, *extra))
    ways = "one tile | remedy 1 | remedy 2 | torch.compile"
    return page_table(body, f"V | {ways} | gain | of its floor | remedy 1, MB | torch.compile, MB")


def ceilings() -> str:
    """What the GPU of the records can do, as one run measured it."""
    record = load_record("benchmark_rmsnorm")
    copy, matmul = record["copy_gbs"], record["matmul_tflops"]
    quotient = f"{1e3 * matmul / copy:.0f} FLOP/byte"
    body = [
        ("copy rate", f"{copy / 1e3:.2f} TB/s", "read + written, of a copy of 2 GiB"),
        ("matmul rate", f"{matmul:.0f} TFLOP/s", "bf16, 8,192 × 8,192 × 8,192"),
        ("quotient", quotient, "left of it bytes decide, right of it FLOPs"),
    ]
    return page_table(body, f"{record['environment']['gpu']} | measured | how")


def targets() -> str:
    """What every kernel is compiled for, and how many of the records each of them has made."""
    made = Counter()
    for path in sorted(RESULTS.glob("*.json")):
        environment = load_record(path.stem).get("environment", {})
        if capability := environment.get("compute_capability"):
            made[capability, short_gpu(environment["gpu"])] += 1
    body = []
    for name, target in COMPILE_TARGETS.items():
        capability = divmod(target.arch, 10) if target.backend == "cuda" else ()
        own = [
            f"{gpu}: {n}"
            for (of, gpu), n in made.most_common()
            if of == ".".join(map(str, capability))
        ]
        fp8 = "yes" if capability >= FIRST_CAPABILITY else "no"
        shared = f"{target.max_shared >> 10} KiB"
        body.append((f"`{name}`", target.gpus, shared, fp8, ", ".join(own) or "none"))
    return page_table(body, "target | GPUs | shared memory of a program | FP8 | records")


def memory_rates() -> str:
    """The rate of each GPU's memory by its data sheet, and beside that of an H200."""
    labels = {"H100 80GB HBM3": "H100 (SXM)", "GB300": "GB300 of a DGX Station"}
    known = sorted((gpu.tbs, labels.get(name, name)) for name, gpu in GPUS.items() if gpu.tbs)
    of_h200 = GPUS["H200"].tbs
    body = [(name, f"{tbs:.3g} TB/s", f"{tbs / of_h200:.2f}") for tbs, name in known]
    return page_table(body, "GPU | rate of its memory | beside an H200")


def fp8_casts() -> str:
    """A layer's casts: the bf16 layer's kernel, the same and a cast after it, the fused kernel."""
    record, body = load_record("fp8_costs"), []
    for row in record["casts"]:
        floor = row["bytes"] / record["copy_gbs"] / 1e3  # us
        alone, separate, fused = (row[f"{way}_us"] for way in ("alone", "separate", "fused"))
        us = alone, separate, fused, separate and separate - fused, floor
        cells = (
            formatted(row["tokens"], ",", missing="any"),
            *(formatted(t, missing="") for t in us),
        )
        body.append((row["name"], *cells, per_cent(floor / fused)))
    times_us = "bf16 alone | and cast | fused | saved | floor | of copy"
    return page_table(body, f"cast, µs | tokens | {times_us}")


def fp8_products() -> str:
    """A layer's products in bf16, in FP8 with fast addition, and in FP8 without."""
    body = []
    for row in load_record("fp8_costs")["products"]:
        bf16, fast, slow = us = [row[f"{way}_us"] for way in ("bf16", "fast", "accurate")]
        cells = (formatted(each) for each in (*us, bf16 - fast, bf16 - slow))
        shape = " × ".join(f"{n:,}" for n in row["shape"])
        body.append((row["name"], f"{row['tokens']:,}", shape, *cells))
    times_us = "bf16 | FP8, fast | FP8 | gain, fast | gain"
    return page_table(body, f"product, µs | tokens | M × N × K | {times_us}")


# ---------------------------------------------------------------- the judge


def judged_table() -> str:
    """Count each function's verdicts, but for the losses that are not averaged."""
    *counted, _not_tried = OUTCOMES
    rows = []
    for name, verdicts in load_record("judged")["judged"].items():
        subject, label = name.split(": ")
        n = Counter(verdict["outcome"] for verdict in verdicts)
        if not subject.endswith("_rows"):
            rows.append([f"`{subject}`", label, *(str(n[outcome] or "") for outcome in counted)])
    return page_table(rows, "subject | whose | holds | wrong | refused | limit")
