"""The pages' tables of whole steps: gains, fine-tuning, profiles, memory, distillation.

A time of a step stands beside the range of the steps. Two steps whose ranges overlap have no ratio.
"""

import gzip
import json

from harness.benchmark.benchmark_specs import EAGER, HOST_FLOOR, IN_PLACE, OURS
from harness.cli.flags import FP8_ALL, OPPONENTS
from harness.cli.processes import DDP, FSDP
from harness.cli.tables import Column, Table
from harness.model.architecture import ModelFacts
from harness.model.families import FAMILIES
from harness.profiling.kernel_facts import PLAYBOOK_KERNELS
from harness.records.run_records import relative_differences
from next_steps.comparisons import compare_profiles
from next_steps.comparisons.benchmark_peers import CUTE
from next_steps.studies import frontier, ladder, scaling_tables
from tools import page_records
from tools.make_records import STEP_SIZES
from tools.page_kernel_tables import by_size
from tools.page_records import (
    StepTime,
    gb,
    load_record,
    page_table,
    short_commit,
    short_gpu,
    size_label,
    step_columns,
    step_in_words,
    times,
)

GPU_WORK = "kernel", "gpu_memcpy", "gpu_memset"  # categories of a Chrome trace
SHOWN_FROM_MS = 0.05  # a category that takes less in every profile has no row
SHORT_NAMES = {  # for a column that must not be wide
    OPPONENTS["fused-adamw"]: "fused AdamW",
    OPPONENTS["flashoptim"]: "FlashOptim",
    OPPONENTS["rms-norm"]: "F.rms_norm",
    OPPONENTS["liger"]: "Liger",
    OPPONENTS["unsloth"]: "Unsloth",
    OPPONENTS["unsloth-fp8"]: "Unsloth, FP8",
    OPPONENTS["compile"]: "compile",
    OPPONENTS["compile-reduce-overhead"]: "compile+graph",
    OPPONENTS["torchao-tensorwise"]: "torchao",
    OPPONENTS["torchao-rowwise"]: "torchao, rows",
    CUTE: "Liger, CuTe",
}


BUSY = Column("busy, ms", "busy_ms", ",.1f")
SPEED = Column("tokens/s", "tokens_per_second", ",.0f")
PEAK = Column("peak, GB", "peak_memory_bytes", gb)


def labelled(names: dict[str, str]) -> list[dict]:
    """Return the records of {label: name}, each with its label."""
    return [load_record(name) | {"label": label} for label, name in names.items()]


def gain_over(first: dict) -> Column:
    return Column(
        "gain", lambda run: "" if run is first else StepTime.of(first).over(StepTime.of(run))
    )


def loss_at(title: str, place: int, write: str) -> Column:
    """Return the column of a step's loss."""
    return Column(title, lambda run: run["losses"][place], write)


# ---------------------------------------------------------------- the table of gains


def gain_of_kernel(label: str, kernel: str, tokens: int, mine: str) -> tuple[str, ...]:
    """A row of gains. The strongest other overwrites its inputs exactly if ours does."""
    rows, ending = by_size(kernel, tokens)[0], ", in place"
    alike = [n for n in rows if n.endswith(ending) == mine.endswith(ending)]
    others = [n for n in alike if not n.startswith(OURS) and n not in (EAGER, HOST_FLOOR)]
    rival = min(others, key=lambda name: rows[name].total)
    shown = [rows[name] for name in (EAGER, rival, mine)]
    cells = [f"{row.total / 1e3:.2f} ms" for row in shown]
    if kernel == "cross_entropy":
        cells = [f"{cell}, {row.mb / 1e3:.1f} GB" for cell, row in zip(cells, shown)]
    name = rival.removesuffix(ending)
    cells[1] = f"{SHORT_NAMES.get(name, name)}: {cells[1]}"
    eager, other, ours = (row.total for row in shown)
    return label, *cells, times(eager / ours, 1), times(other / ours)


def run_in_words(run: dict) -> str:
    name = run["name"] if "name" in run else OPPONENTS[run["opponent"]]
    return SHORT_NAMES.get(name, name)


def gain_of_step(label: str, base: dict, ours: dict, other: dict | None = None) -> tuple[str, ...]:
    """A row of gains. `other` is the record of the strongest opponent."""
    steps = [StepTime.of(run) for run in (base, ours, other or ours)]
    before, after, others = (f"{step.ms:,.0f} ms ({step.between()})" for step in steps)
    gain, _, over = (step.over(steps[1]) for step in steps)
    rival, over = (f"{run_in_words(other)}: {others}", over) if other else ("–", "–")
    return f"step {label}", before, rival, after, gain, over


# runs of a GPU, one after the other: Hugging Face's, ours, those of others
SETS_OF_RUNS = {
    "LoRA": ("lora_baseline", "lora_all", "lora_compile", "lora_liger", "lora_unsloth"),
    "Qwen": ("qwen3_baseline", "qwen3_all", "qwen3_compile", "qwen3_liger"),
    "FP8": ("fp8_baseline", "fp8_all", "fp8_torchao_tensorwise", "fp8_torchao_rowwise"),
}


def gain_of_all(size: str) -> tuple[str, ...]:
    """The row of all kernels, in a CUDA graph."""
    base, ours, rival = base_ours_and_strongest(size)
    return gain_of_step(f"{step_in_words(size)}, all", base, ours, rival)


def base_ours_and_strongest(size: str, key: str = "step_ms") -> list[dict]:
    record = load_record(f"ladder_{size}")
    rungs = {rung["name"]: rung for rung in record["rungs"]}
    return [rungs[ladder.BASELINE], rungs[ladder.CUDA_GRAPH], ladder.strongest(record, key)]


def gain_in_memory(size: str) -> tuple[str, ...]:
    base, ours, rival = runs = base_ours_and_strongest(size, "peak_memory_bytes")
    base_gb, ours_gb, rival_gb = (f"{gb(run['peak_memory_bytes'])} GB" for run in runs)
    ratios = [times(run["peak_memory_bytes"] / ours["peak_memory_bytes"]) for run in (base, rival)]
    rival_gb = f"{run_in_words(rival)}: {rival_gb}"
    return f"memory {step_in_words(size)}", base_gb, rival_gb, ours_gb, *ratios


def gains_table(which: str = "all") -> str:
    """The baseline, the strongest opponent and ours, of the kernels and of the whole step.

    "short": one row each of RMSNorm, the loss, the step and its memory.
    """
    sizes = small, size = "1x512", "4x2048"
    body = [
        gain_of_kernel("RMSNorm, 65,536 rows", "rmsnorm", 65_536, OURS),
        gain_of_kernel("loss, 8,192 rows", "cross_entropy", 8192, OURS),
    ]
    if which == "all":
        body.append(gain_of_kernel("the same, in place", "cross_entropy", 8192, IN_PLACE))
        for each in sizes:
            runs = (load_record(f"finetune_{name}_{each}") for name in ("baseline", "optimized"))
            body.append(gain_of_step(f"{step_in_words(each)}, two", *runs))
        body.append(gain_of_all(small))
    body.append(gain_of_all(size))
    for label, names in SETS_OF_RUNS.items() if which == "all" else ():
        first, last, *others = (load_record(f"{name}_{size}") for name in names)
        rival = min(others, key=lambda run: run["median_seconds"])
        body.append(gain_of_step(f"{step_in_words(size)}, {label}", first, last, rival))
    body.append(gain_in_memory(size))
    return page_table(body, " | Hugging Face | strongest other | ours | gain | over it")


# ---------------------------------------------------------------- the ladder


def beside_the_baseline(base: dict) -> list[Column]:
    def speed(rung: dict) -> str:
        ratio = rung["tokens_per_second"] / base["tokens_per_second"]
        is_base = rung["name"] == base["name"]
        return times(ratio) if is_base else StepTime.of(base).over(StepTime.of(rung), ratio)

    return [
        *step_columns(),
        BUSY._replace(title="busy"),
        Column("tokens/s", speed),
        PEAK._replace(title="GB"),
        Column("loss diff.", lambda rung: max(relative_differences(base, rung)), ".1e"),
    ]


def ladder_table(size: str) -> str:
    """The rungs, in the columns that a page has room for."""
    rungs, _ = ladder.blocks(load_record(f"ladder_{size}"))
    named = (dict(zip(("rung", "predicted", "gained"), each)) for each in ladder.gains(rungs))
    columns = [Column(f"{key}, ms", key, ",.1f", missing="") for key in ("predicted", "gained")]
    columns = [Column("rung", "rung"), *columns, *beside_the_baseline(rungs[0])]
    return Table.of(columns, [rung | more for rung, more in zip(rungs, named)]).markdown()


def others_table(size: str) -> str:
    """The runs beside the rungs."""
    (base, *_), runs = ladder.blocks(load_record(f"ladder_{size}"))
    name = Column("others", lambda run: run["name"].replace("compiled layers", "compiled"))
    return Table.of([name, *beside_the_baseline(base)], runs).markdown()


def graphs(size: str) -> str:
    """The baseline, two kernels and all of them, each launched by the host and in a CUDA graph."""
    record = load_record(f"ladder_{size}")
    runs = {rung["name"]: rung for rung in record["rungs"]}
    (*_, all_kernels, _), _ = ladder.blocks(record)
    two, body = " + ".join(PLAYBOOK_KERNELS), []
    for label, *names in (
        ("baseline", ladder.BASELINE, ladder.BASELINE + ladder.IN_A_GRAPH),
        ("the two kernels", two, two + ladder.IN_A_GRAPH),
        ("all kernels", all_kernels["name"], ladder.CUDA_GRAPH),
    ):
        body.append([label])
        for run in (runs[name] for name in names):
            ms, between = (column.cell(run) for column in step_columns())
            body[-1] += [f"{ms} ({between})", BUSY.cell(run)]
    eager, graph = (f"{way}, ms (p20–p80) | GPU busy, ms" for way in ("eager", "CUDA graph"))
    return page_table(body, f"step {step_in_words(size)} | {eager} | {graph}")


# ---------------------------------------------------------------- runs and profiles


def run_label(record: dict) -> str:
    """The name of a run without its size: an opponent's name or the flags."""
    flags = [f"--quantize {record['quantize']}"] if record.get("quantize") else []
    if not record["kernels"]:
        name = "Hugging Face" + (", peft" if record.get("lora_rank") else "")
        if record.get("opponent"):
            name = SHORT_NAMES[OPPONENTS[record["opponent"]]]
        return name + "".join(f", `{flag}`" for flag in flags)
    if mode := record.get("fp8"):
        flags.append("--fp8" if mode == FP8_ALL else f"--fp8 {mode}")
    flags += [f"--moments {record['moments']}"] if record.get("moments") else []
    flags += ["--cuda-graph"] if record.get("cuda_graph") else []
    return f"`{' '.join(['--kernels all', *flags])}`"


def runs(size: str, *names: str) -> str:
    """Fine-tuning runs, as rows, of the records NAME_SIZE.

    gain: the first row's step over this step. "over it": this step over the last row's.
    """
    records = [load_record(f"{name}_{size}") for name in names]
    first, last = records[0], records[-1]

    def over_last(run: dict) -> str:
        return "" if run is last else StepTime.of(run).over(StepTime.of(last))

    columns = [Column(size_label(first), run_label), *step_columns(), BUSY, SPEED, gain_over(first)]
    columns += [Column("over it", over_last)] if len(records) > 2 else []
    columns += [Column("GB", lambda run: gb(run["peak_memory_bytes"], 2))]
    return Table.of(columns, records).markdown()


def lora_fp8() -> str:
    """LoRA beside weights in FP8, after what others do at that size."""
    names = "baseline", "compile", "unsloth", "torchao", "bf16", "compact", "all"
    return runs("4x2048", *(f"lora_fp8_{name}" for name in names))


def parts_table(*names: str) -> str:
    """Profiles as columns, category by category, in ms of the GPU."""
    records, body = [load_record(name) for name in names], []
    for category in records[0]["categories"]:
        ms = [record["categories"][category]["us"] / 1e3 for record in records]
        if max(ms) >= SHOWN_FROM_MS:
            body.append((category, *(f"{each:,.1f}" if each else "" for each in ms)))
    body.append(("busy", *(f"{record['busy_us'] / 1e3:,.1f}" for record in records)))
    body.append(("step", *(f"{record['median_step_ms']:,.1f}" for record in records)))
    launches = (sum(each["launches"] for each in r["categories"].values()) for r in records)
    body.append(("launches", *(f"{n:,}" for n in launches)))
    # What is the same for all of them stands over the first column.
    sizes, labels = ([label(each) for each in records] for label in (size_label, run_label))
    common, columns = (sizes[0], labels) if len(set(sizes)) == 1 else (labels[0], sizes)
    return page_table(body, " | ".join([f"{common}, ms", *columns]))


def compare_table(before_name: str, after_name: str, rows: str = "") -> str:
    """Two profiles in few columns; `rows`: the last words of the rows shown, all unless given."""
    found = compare_profiles.categories(load_record(before_name), load_record(after_name))
    few = found.columns([*range(5), *range(7, len(found.headers))])
    body = [[cell.replace(" to ", "–") for cell in row] for row in few.rows]
    body = [row for row in body if not rows or row[0].split()[-1] in rows.split(",")]
    return few._replace(rows=body).markdown()


# ---------------------------------------------------------------- memory and several GPUs


MODELS = "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B"
CARDS = 12, 16, 24, 48, 80  # GB
TRAINED = {"": "full", "_lora": "LoRA", "_qlora": "NF4"}


def estimated(model: str, size: str, trained: str = "") -> list[int]:
    """Return the bytes at the peak that the estimator finds, without and with all kernels."""
    estimates = load_record(f"estimate_{model}_{size}{trained}")["estimates"]
    return [estimate["peak_memory_bytes"] for estimate in estimates]


def fits(n_bytes: int, memory: int) -> bool:
    """Return True if a GPU of so many GB has room for a step, and a little to spare."""
    return n_bytes < 0.95e9 * memory


def gpus() -> str:
    """Which model trains on which GPU, by the estimator, in GB. Brackets: it does not fit."""
    body = []
    for memory, model in zip((24, 48, 80), MODELS):
        peaks = [peak for size in STEP_SIZES for peak in estimated(model, size)]
        cells = [gb(peak) if fits(peak, memory) else f"({gb(peak)})" for peak in peaks]
        body.append((f"{memory} GB", f"`meta-llama/{model}`", *cells))
    sizes = "1 × 512, none | --kernels all | 4 × 2,048, none | --kernels all"
    return page_table(body, f"GPU | --model | {sizes}")


def families() -> str:
    """What the layers of each family have beyond LLaMA's."""
    body = []
    for family in FAMILIES.values():
        norms = "q, k" if family.head_norms else ""
        biases = ", ".join(name.removesuffix("_proj") for name in family.bias)
        rotation = "not in every layer" if family.rotates else "in every layer"
        billions = ModelFacts(family.example_config()).parameters / 1e9
        name = f"`{family.example}`", f"{billions:.1f} · 10⁹"
        body.append((f"`{family.model_type}`", *name, norms, biases, rotation))
    return page_table(body, "family | example | parameters | norms over heads | biases | rotation")


def cards() -> str:
    """The largest model that trains on each card with all kernels, and its peak in GB."""
    columns = [(size, trained) for trained in TRAINED for size in STEP_SIZES]
    body = []
    for memory in CARDS:
        body.append([f"{memory} GB"])
        for size, trained in columns:
            peaks = {model: estimated(model, size, trained)[-1] for model in MODELS}
            fitting = [model for model in MODELS if fits(peaks[model], memory)]
            words = [f"{model.rpartition('-')[2]}: {gb(peaks[model])}" for model in fitting]
            body[-1].append(words[-1] if words else "–")
    headers = [f"{TRAINED[trained]}, {step_in_words(size)}" for size, trained in columns]
    return page_table(body, " | ".join(["card", *headers]))


def peaks(*names: str) -> str:
    """What the memory is made of at the peak, of several memory profiles."""
    records, body = [load_record(name) for name in names], []
    for part in records[0]["parts"]:
        n_bytes = [record["parts"].get(part, 0) for record in records]
        if max(n_bytes) > 0.05e9:
            body.append((part, *(gb(each, 2) for each in n_bytes)))
    body.append(("total", *(gb(record["peak_memory_bytes"], 2) for record in records)))
    headers = [f"{size_label(r)}, {'all' if r['kernels'] else 'none'}" for r in records]
    return page_table(body, " | ".join(["GB at the peak, tokens, --kernels", *headers]))


def frontier_table() -> str:
    """Memory against time."""
    rows = load_record("frontier")["rows"]
    return Table(frontier.HEADERS, [frontier.setup_cells(row, rows) for row in rows]).markdown()


def longest() -> str:
    """The longest sequences that fit."""
    body = []
    for name in ("baseline", "all", "layer", "layer_offload"):
        record = load_record(f"longest_{name}")
        flags = f"--kernels {'all' if record['kernels'] else 'none'}"
        flags += f" --recompute {record['recompute']}" if "recompute" in record else ""
        flags += " --offload" if "offload" in record else ""
        body.append((f"`{flags}`", f"{record['lengths'][-1]:,}", gb(record["peaks"][-1])))
    return page_table(body, " | longest sequence, tokens | peak, GB")


def scaling_table(parallel: str, study: str = "scaling") -> str:
    """Each of two GPUs beside one alone."""
    records = load_record(f"{study}_1"), load_record(f"{study}_{parallel}_2")
    return Table(scaling_tables.headings(records[1]), scaling_tables.body(*records)).markdown()


def lost(*names: str) -> str:
    """What a step on several GPUs loses, by cause; the first record is of one."""
    return scaling_tables.lost_table(*map(load_record, names)).markdown()


def crossovers() -> str:
    """From how many tokens on communication is hidden."""
    body = []
    for record in (load_record(f"scaling_{parallel}_2") for parallel in (FSDP, DDP)):
        for way in scaling_tables.ways_in(record):
            name = f"{way}, {record['parallel']}"
            body.append((name, scaling_tables.crossover(record, way)))
    return page_table(body, " | tokens in a step of each GPU")


# ---------------------------------------------------------------- others

PLAYBOOK_STEPS = {  # by command: its step, and what was added on the GPU and on a CPU
    "profile_baseline.py": ("3", " --random-init", " --model tiny"),
    "rmsnorm_test.py": ("6", "", ""),
    "benchmark_kernels.py --kernel rmsnorm": ("7", "", ""),
    "cross_entropy_test.py": ("9", "", ""),
    "benchmark_kernels.py --kernel cross_entropy": ("10", "", ""),
    "finetune_baseline.py": ("11", " --random-init", " --model tiny --seq-len 64"),
    "finetune_optimized.py": ("11", " --random-init", " --model tiny --seq-len 64"),
}


def durations() -> str:
    """How long the playbook's commands take, from start to end."""
    records, body = [load_record(f"durations_{where}")["seconds"] for where in ("gpu", "cpu")], []
    for command, (lesson, *flags) in PLAYBOOK_STEPS.items():
        seconds = (record[command + added] for record, added in zip(records, flags))
        words = (f"{s:.0f} s" if s < 100 else f"{s / 60:.0f} min" for s in seconds)
        body.append((f"`{command}`", lesson, *words))
    return page_table(body, "command | lesson | on an H200, random weights | on a CPU core")


def quality() -> str:
    """What stochastic rounding is worth."""
    records = (load_record(f"quality_{name}") for name in ("fp32", "bf16", "stochastic"))
    fp32, bf16, rounded = (record["validation_loss_after"] for record in records)
    closed = f"{100 * (bf16 - rounded) / (bf16 - fp32):.0f} %"
    body = [
        ("fp32, `torch.optim.AdamW`", f"{fp32:.4f}", ""),
        ("bf16, `torch.optim.AdamW`", f"{bf16:.4f}", "0 %"),
        ("bf16, our kernel, stochastic rounding", f"{rounded:.4f}", closed),
    ]
    return page_table(body, "after 400 steps | validation loss | of the gap to fp32 closed")


def distillation() -> str:
    """The small students, on a CPU."""
    teacher = load_record("distill_teacher_tiny")["validation_loss_after"]
    students = {
        "its first layer": "distill_tiny_first_layer",
        "a layer with random weights": "distill_tiny",
    }
    columns = [
        Column("", "label"),
        loss_at("reverse KL in step 1", 0, ".2f"),
        loss_at("in step 20", -1, ".2f"),
        Column("validation loss before", "validation_loss_before", ".2f"),
        Column("after", "validation_loss_after", ".2f"),
    ]
    found = Table.of(columns, labelled(students))
    rows = [["the teacher", "", "", "", f"{teacher:.2f}"], *found.rows]
    return found._replace(rows=rows).markdown()


def distillation_8b() -> str:
    """The large student, with and without the kernels."""
    runs = labelled({"`--kernels all`": "distill_8b", "`--kernels none`": "distill_8b_none"})
    losses = [loss_at("reverse KL in step 1", 0, ".3f"), loss_at("in step 20", -1, ".3f")]
    return Table.of([Column("", "label"), *step_columns(0), PEAK, *losses], runs).markdown()


def trainer() -> str:
    """TRL's SFTTrainer by whose layers and whose loss; gain: over the first row."""
    runs = labelled({
        "`--kernels none`": "sft_none",
        "`--opponent liger`": "sft_liger",
        "the layers' kernels": "sft_layers",
        "`--kernels all`": "sft_all",
    })  # fmt: skip
    columns = [Column(f"{size_label(runs[0])}, LoRA", "label"), *step_columns(), SPEED]
    columns += [gain_over(runs[0]), PEAK]
    columns += [loss_at("loss, step 1", 0, ".4f"), loss_at("step 8", -1, ".4f")]
    return Table.of(columns, runs).markdown()


def traces() -> str:
    """The traces that are kept."""
    body = []
    for path in sorted(page_records.RESULTS.glob("trace_*.json.gz")):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        made, events = trace["environment"], trace["traceEvents"]
        of_gpu = [each for each in events if each["ph"] == "X" and each.get("cat") in GPU_WORK]
        step_us = next(each["dur"] for each in events if each["name"] == "step")
        body.append(
            (f"[{'after' if 'kernels' in path.name else 'before'}](../results/{path.name})",)
            + (short_gpu(made["gpu"]), short_commit(made))
            + (f"{len(of_gpu):,}", f"{step_us / 1e3:,.1f}")
            + (f"{path.stat().st_size / 1e3:,.0f}",)
        )
    return page_table(body, "trace | on | commit | kernels, copies | step, ms | kB")
