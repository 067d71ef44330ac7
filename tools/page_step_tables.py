"""The pages' tables of whole steps: fine-tuning, profiles, memory, distillation.

Beside each time of a step stands how far the steps lie apart; a ratio that is less is not printed.
"""

from collections.abc import Callable
from typing import NamedTuple

from harness.cli.flags import OPPONENTS
from harness.cli.processes import PARALLEL
from harness.profiling import profile_comparison
from harness.profiling.kernel_facts import PLAYBOOK_KERNELS
from harness.records.run_records import relative_differences
from harness.records.spread import Range, spread, timed, unless_same
from next_steps.studies import frontier, ladder, scaling_tables
from tools.page_outputs import column_spans, position
from tools.page_records import RESULTS, in_words, load, markdown, size_label, times

# of whoever may be the strongest other, for a column that must not be wide
SHORT_NAMES = {
    OPPONENTS["rms-norm"]: "F.rms_norm",
    OPPONENTS["liger"]: "Liger",
    OPPONENTS["unsloth"]: "Unsloth",
    OPPONENTS["compile"]: "compile",
    OPPONENTS["compile-reduce-overhead"]: "compile+graph",
    OPPONENTS["torchao-tensorwise"]: "torchao",
    OPPONENTS["torchao-rowwise"]: "torchao, rows",
}


class Step(NamedTuple):
    """How long a run's step takes."""

    ms: float  # median
    range: Range | None  # 20th to 80th percentile; None: its record is too old to say

    @classmethod
    def of_run(cls, record: dict) -> "Step":
        low, high = spread([1e3 * seconds for seconds in timed(record)])
        return cls(1e3 * record["median_seconds"], (low, high))

    @classmethod
    def of_rung(cls, rung: dict) -> "Step":
        known = "p20_ms" in rung
        return cls(rung["step_ms"], (rung["p20_ms"], rung["p80_ms"]) if known else None)

    def between(self, digits: int = 0) -> str:
        if self.range is None:
            return ""
        low, high = self.range
        return f"{low:,.{digits}f}–{high:,.{digits}f}"

    def cell(self) -> str:
        return f"{self.ms:,.0f} ms" + (f" ({self.between()})" if self.range else "")

    def over(self, other: "Step", ratio: float | None = None) -> str:
        """How many times this step is as long, or another ratio of the two runs."""
        ratio = times(self.ms / other.ms if ratio is None else ratio)
        both = self.range and other.range
        return unless_same(ratio, self.range, other.range) if both else ratio


def gpus() -> str:
    """Which model trains on which GPU, by the estimator, in GB at 1 x 512 and 4 x 2,048 tokens."""
    body = []
    for memory, model in (
        ("24 GB", "Llama-3.2-1B"),
        ("48 GB", "Llama-3.2-3B"),
        ("80 GB", "Llama-3.1-8B"),
    ):
        records = [load(f"estimate_{model}_{size}") for size in ("1x512", "4x2048")]
        estimates = [estimate for record in records for estimate in record["estimates"]]
        peaks = [f"{estimate['peak_memory_bytes'] / 1e9:.1f}" for estimate in estimates]
        room = 0.95 * float(memory.removesuffix(" GB"))
        peaks = [peak if float(peak) < room else f"({peak})" for peak in peaks]
        body.append([memory, f"`{records[0]['model']}`", *peaks])
    headers = ["GPU", "--model", "1 × 512, none", "--kernels all"]
    return markdown([*headers, "4 × 2,048, none", "--kernels all"], body)


# step, what a page calls the command, what was added to it on the GPU, and on a CPU
DURATIONS = (
    ("3", "profile_baseline.py", " --random-init", " --model tiny"),
    ("6", "rmsnorm_test.py", "", ""),
    ("7", "benchmark_kernels.py --kernel rmsnorm", "", ""),
    ("9", "cross_entropy_test.py", "", ""),
    ("10", "benchmark_kernels.py --kernel cross_entropy", "", ""),
    ("11", "finetune_baseline.py", " --random-init", " --model tiny --seq-len 64"),
    ("11", "finetune_optimized.py", " --random-init", " --model tiny --seq-len 64"),
)


def seconds_in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def durations() -> str:
    """How long the playbook's commands take, from start to end."""
    on_gpu, on_cpu = (load(f"durations_{where}")["seconds"] for where in ("gpu", "cpu"))
    body = []
    for step, command, gpu_flags, cpu_flags in DURATIONS:
        measured = on_gpu[command + gpu_flags], on_cpu[command + cpu_flags]
        body.append([f"`{command}`", step, *map(seconds_in_words, measured)])
    return markdown(["command", "step", "on an H200, random weights", "on a CPU core"], body)


BESIDE_THE_BASELINE = ["step, ms", "p20–p80", "busy", "tokens/s", "GB", "loss diff."]


def beside_the_baseline(rung: dict, base: dict) -> list[str]:
    step = Step.of_rung(rung)
    speed = rung["tokens_per_second"] / base["tokens_per_second"]
    ratio = times(speed) if rung is base else Step.of_rung(base).over(step, speed)
    gb = f"{rung['peak_memory_bytes'] / 1e9:.1f}"
    difference = f"{max(relative_differences(base, rung)):.1e}"
    busy = f"{rung['busy_ms']:,.1f}" if "busy_ms" in rung else ""  # older records do not say
    return [f"{step.ms:,.1f}", step.between(1), busy, ratio, gb, difference]


def without_empty_columns(headers: list[str], body: list[list[str]]) -> str:
    """What an older record does not say needs no column."""
    said = [i for i, column in enumerate(zip(*body)) if any(column)]
    return markdown([headers[i] for i in said], [[row[i] for i in said] for row in body])


def ladder_table(size: str) -> str:
    """The rungs, in the columns that a page has room for."""
    rungs, _ = ladder.blocks(load(f"ladder_{size}"))
    body = []
    for before, rung in zip([None, *rungs], rungs):
        name, gain = rung["name"], ["", ""]
        if before is not None:
            name = f"+ {name}"
            gain = [f"{before['step_ms'] - rung[key]:,.1f}" for key in ("predicted_ms", "step_ms")]
        body.append([name, *gain, *beside_the_baseline(rung, rungs[0])])
    headers = ["rung", "predicted, ms", "gained, ms"]
    return without_empty_columns([*headers, *BESIDE_THE_BASELINE], body)


def others_table(size: str) -> str:
    """The runs beside the rungs."""
    rungs, others = ladder.blocks(load(f"ladder_{size}"))
    body = [[other["name"], *beside_the_baseline(other, rungs[0])] for other in others]
    return without_empty_columns(["others", *BESIDE_THE_BASELINE], body)


def graphs_table(size: str) -> str:
    """Like with like: the baseline, two kernels and all of them, each with the host and without."""
    record = load(f"ladder_{size}")
    runs = {rung["name"]: rung for rung in record["rungs"]}
    (*_, all_kernels, _), _ = ladder.blocks(record)
    two = " + ".join(PLAYBOOK_KERNELS)
    body = []
    for label, eager, graph in (
        ("baseline", runs[ladder.BASELINE], runs[ladder.BASELINE + ladder.IN_A_GRAPH]),
        ("the two kernels", runs[two], runs[two + ladder.IN_A_GRAPH]),
        ("all kernels", all_kernels, runs[ladder.CUDA_GRAPH]),
    ):
        cells = []
        for run in (eager, graph):
            step = Step.of_rung(run)
            cells += [f"{step.ms:,.1f} ({step.between(1)})", f"{run['busy_ms']:,.1f}"]
        body.append([label, *cells])
    headers = [f"step {in_words(size)}", "eager, ms (p20–p80)", "GPU busy, ms"]
    return markdown([*headers, "CUDA graph, ms (p20–p80)", "GPU busy, ms"], body)


def compare(before_name: str, after_name: str, rows: str = "") -> str:
    """Two profiles, in the columns that a page has room for.

    Args:
        rows: the last words of the rows shown, with commas between; all unless given.
    """
    text = profile_comparison.render_comparison(load(before_name), load(after_name)).splitlines()
    start = position(text, "Category", 0)
    stop = position(text, "p20 to p80", start) + 1
    spans = column_spans(text[start + 1])
    shown = [text[start], *text[start + 2 : stop]]
    cells = [
        [line.ljust(200)[a:b].strip().replace(" to ", "–") for a, b in spans] for line in shown
    ]
    keep = [0, 1, 2, 3, 4, 7, 8]
    headers, *body = ([row[i] for i in keep] for row in cells)
    body = [row for row in body if not rows or row[0].split()[-1] in rows.split(",")]
    return markdown(headers, body)


def peaks(*names: str) -> str:
    """What the memory is made of at the peak, of several memory profiles."""
    records = [load(name) for name in names]
    body = []
    for part in records[0]["parts"]:
        gb = [record["parts"].get(part, 0) / 1e9 for record in records]
        if max(gb) > 0.05:
            body.append([part, *(f"{each:.2f}" for each in gb)])
    body.append(["total", *(f"{record['peak_memory_bytes'] / 1e9:.2f}" for record in records)])
    headers = ["GB at the peak, tokens, --kernels"]
    for record in records:
        kernels = "all" if record["kernels"] else "none"
        headers.append(f"{size_label(record)}, {kernels}")
    return markdown(headers, body)


def frontier_rows() -> str:
    """Memory against time; of no record, a table without rows."""
    if not (RESULTS / "frontier.json").exists():
        return markdown(list(frontier.HEADERS), [])
    rows = load("frontier")["rows"]
    return markdown(list(frontier.HEADERS), [frontier.cells(row, rows) for row in rows])


def longest() -> str:
    """The longest sequences that fit."""
    body = []
    for name in ("baseline", "all", "layer", "layer_offload"):
        if not (RESULTS / f"longest_{name}.json").exists():
            continue  # not measured yet
        record = load(f"longest_{name}")
        flags = [f"--kernels {'all' if record['kernels'] else 'none'}"]
        flags += [f"--recompute {record['recompute']}"] if "recompute" in record else []
        flags += ["--offload"] if "offload" in record else []
        label = f"`{' '.join(flags)}`"
        tokens, peak = record["lengths"][-1], record["peaks"][-1]
        body.append([label, f"{tokens:,}", f"{peak / 1e9:.1f}"])
    return markdown(["", "longest sequence, tokens", "peak, GB"], body)


def scaling_records(*parallel: str) -> list[dict]:
    """Of one process and of two, as far as there are any; none unless there is that of one."""
    names = ["scaling_1", *(f"scaling_{way}_2" for way in parallel)]
    if not (RESULTS / f"{names[0]}.json").exists():
        return []
    return [load(name) for name in names if (RESULTS / f"{name}.json").exists()]


def scaling(parallel: str) -> str:
    """Each of two GPUs beside one alone; of no record, a table without rows."""
    records = scaling_records(parallel)
    rows = scaling_tables.body(*records) if len(records) == 2 else []
    return markdown(list(scaling_tables.HEADERS), rows)


def crossovers() -> str:
    """From how many tokens on communication is hidden; of no record, a table without rows."""
    _, *several = scaling_records(*PARALLEL) or [None]
    body = [
        [f"{way}, {record['parallel']}", scaling_tables.crossover(record, way)]
        for record in several
        for way in scaling_tables.ways_in(record)
    ]
    return markdown(["", "tokens in a step of each GPU"], body)


def quality() -> str:
    """What stochastic rounding is worth."""
    records = (load(f"quality_{name}") for name in ("fp32", "bf16", "stochastic"))
    fp32, bf16, rounded = (record["validation_loss_after"] for record in records)
    closed = f"{100 * (bf16 - rounded) / (bf16 - fp32):.0f} %"
    body = [
        ["fp32, `torch.optim.AdamW`", f"{fp32:.4f}", ""],
        ["bf16, `torch.optim.AdamW`", f"{bf16:.4f}", "0 %"],
        ["bf16, our kernel, stochastic rounding", f"{rounded:.4f}", closed],
    ]
    return markdown(["after 400 steps", "validation loss", "of the gap to fp32 closed"], body)


def distillation() -> str:
    """The small students, on a CPU."""
    teacher = load("distill_teacher_tiny")["validation_loss_after"]
    body = [["the teacher", "", "", "", f"{teacher:.2f}"]]
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
        step, memory = Step.of_run(record), record["peak_memory_bytes"] / 1e9
        ends = [f"{record['losses'][i]:.3f}" for i in (0, -1)]
        body.append([label, f"{step.ms:.0f}", step.between(), f"{memory:.1f}", *ends])
    return markdown(
        ["", "step, ms", "p20–p80", "peak, GB", "reverse KL in step 1", "in step 20"], body
    )


TABLES: dict[str, Callable[..., str]] = {
    "gpus": gpus,
    "durations": durations,
    "ladder": ladder_table,
    "others": others_table,
    "graphs": graphs_table,
    "compare": compare,
    "peaks": peaks,
    "frontier": frontier_rows,
    "longest": longest,
    "scaling": scaling,
    "crossovers": crossovers,
    "quality": quality,
    "distillation": distillation,
    "distillation_8b": distillation_8b,
}
