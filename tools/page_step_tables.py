"""The pages' tables of whole steps: gains, fine-tuning, profiles, memory, distillation.

A time of a step stands beside the range of the steps. Two steps whose ranges overlap have no ratio.
"""

import gzip
import json

from harness.benchmark.benchmark_specs import EAGER, HOST_FLOOR, IN_PLACE, OURS
from harness.cli.flags import FP8_ALL, OPPONENTS
from harness.cli.processes import PARALLEL
from harness.cli.tables import number
from harness.model.architecture import parameter_count
from harness.model.families import FAMILIES
from harness.profiling.kernel_facts import PLAYBOOK_KERNELS
from harness.records.run_records import relative_differences
from next_steps.comparisons import compare_profiles
from next_steps.studies import frontier, ladder, scaling_tables
from tools import page_records
from tools.page_kernel_tables import by_size
from tools.page_records import (
    Step,
    gb,
    in_words,
    load,
    short_gpu,
    size_label,
    step_cells,
    table,
    times,
)
from tools.page_sources import short_commit

GPU_WORK = "kernel", "gpu_memcpy", "gpu_memset"  # categories of a Chrome trace
SHOWN_FROM_MS = 0.05  # a category that takes less in every profile has no row
SHORT_NAMES = {  # for a column that must not be wide
    OPPONENTS["rms-norm"]: "F.rms_norm",
    OPPONENTS["liger"]: "Liger",
    OPPONENTS["unsloth"]: "Unsloth",
    OPPONENTS["unsloth-fp8"]: "Unsloth, FP8",
    OPPONENTS["compile"]: "compile",
    OPPONENTS["compile-reduce-overhead"]: "compile+graph",
    OPPONENTS["torchao-tensorwise"]: "torchao",
    OPPONENTS["torchao-rowwise"]: "torchao, rows",
}


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
    cells[1] = f"{rival.removesuffix(ending)}: {cells[1]}"
    eager, other, ours = (row.total for row in shown)
    return label, *cells, times(eager / ours, 1), times(other / ours)


def short(run: dict) -> str:
    name = run["name"] if "name" in run else OPPONENTS[run["opponent"]]
    return SHORT_NAMES.get(name, name)


def gain_of_step(label: str, base: dict, ours: dict, other: dict | None = None) -> tuple[str, ...]:
    """A row of gains. `other` is the record of the strongest opponent."""
    steps = [Step.of(run) for run in (base, ours, other or ours)]
    before, after, others = (f"{step.ms:,.0f} ms ({step.between()})" for step in steps)
    gain, _, over = (step.over(steps[1]) for step in steps)
    rival, over = (f"{short(other)}: {others}", over) if other else ("–", "–")
    return f"step {label}", before, rival, after, gain, over


# runs of a GPU, one after the other: Hugging Face's, ours, those of others
SETS_OF_RUNS = {
    "LoRA": ("lora_baseline", "lora_all", "lora_compile", "lora_liger", "lora_unsloth"),
    "Qwen": ("qwen3_baseline", "qwen3_all", "qwen3_compile", "qwen3_liger"),
    "FP8": ("fp8_baseline", "fp8_all", "fp8_torchao_tensorwise", "fp8_torchao_rowwise"),
}


def gains() -> str:
    """The baseline, the strongest opponent and ours, of the kernels and of the whole step."""
    body = [
        gain_of_kernel("RMSNorm, 65,536 rows", "rmsnorm", 65_536, OURS),
        gain_of_kernel("loss, 8,192 rows", "cross_entropy", 8192, OURS),
        gain_of_kernel("the same, in place", "cross_entropy", 8192, IN_PLACE),
    ]
    sizes = {"1 × 512": "1x512", "4 × 2,048": "4x2048"}
    for words, size in sizes.items():
        runs = (load(f"finetune_{which}_{size}") for which in ("baseline", "optimized"))
        body.append(gain_of_step(f"{words}, two", *runs))
    for words, size in sizes.items():
        record = load(f"ladder_{size}")
        rungs = {rung["name"]: rung for rung in record["rungs"]}
        base, ours = rungs[ladder.BASELINE], rungs[ladder.CUDA_GRAPH]
        body.append(gain_of_step(f"{words}, all", base, ours, ladder.strongest(record)))
    for label, names in SETS_OF_RUNS.items():  # of the larger size
        first, last, *others = (load(f"{name}_{size}") for name in names)
        rival = min(others, key=lambda run: run["median_seconds"])
        body.append(gain_of_step(f"{words}, {label}", first, last, rival))
    rival = ladder.strongest(record, "peak_memory_bytes")
    n_bytes = [each["peak_memory_bytes"] for each in (base, rival, ours)]
    base, other, ours = (f"{gb(each)} GB" for each in n_bytes)
    ratios = [times(each / n_bytes[-1]) for each in n_bytes[:-1]]
    body.append((f"memory {words}", base, f"{short(rival)}: {other}", ours, *ratios))
    return table(body, " | Hugging Face | strongest other | ours | gain | over it")


# ---------------------------------------------------------------- the ladder

BESIDE_THE_BASELINE = "step, ms | p20–p80 | busy | tokens/s | GB | loss diff."


def beside_the_baseline(rung: dict, base: dict) -> dict[str, str]:
    cells = step_cells(rung)
    speed = rung["tokens_per_second"] / base["tokens_per_second"]
    return cells | {
        "busy": cells["busy, ms"],
        "tokens/s": times(speed) if rung is base else Step.of(base).over(Step.of(rung), speed),
        "GB": gb(rung["peak_memory_bytes"]),
        "loss diff.": f"{max(relative_differences(base, rung)):.1e}",
    }


def ladder_table(size: str) -> str:
    """The rungs, in the columns that a page has room for."""
    rungs, _ = ladder.blocks(load(f"ladder_{size}"))
    body = [
        {"rung": name, "predicted, ms": number(predicted, missing="")}
        | {"gained, ms": number(gained, missing="")}
        | beside_the_baseline(rung, rungs[0])
        for rung, (name, predicted, gained) in zip(rungs, ladder.gains(rungs))
    ]
    return table(body, f"rung | predicted, ms | gained, ms | {BESIDE_THE_BASELINE}")


def others(size: str) -> str:
    """The runs beside the rungs."""
    (base, *_), runs = ladder.blocks(load(f"ladder_{size}"))
    body = [{"others": run["name"]} | beside_the_baseline(run, base) for run in runs]
    return table(body, f"others | {BESIDE_THE_BASELINE}")


def graphs(size: str) -> str:
    """The baseline, two kernels and all of them, each launched by the host and in a CUDA graph."""
    record = load(f"ladder_{size}")
    runs = {rung["name"]: step_cells(rung) for rung in record["rungs"]}
    (*_, all_kernels, _), _ = ladder.blocks(record)
    two, body = " + ".join(PLAYBOOK_KERNELS), []
    for label, *names in (
        ("baseline", ladder.BASELINE, ladder.BASELINE + ladder.IN_A_GRAPH),
        ("the two kernels", two, two + ladder.IN_A_GRAPH),
        ("all kernels", all_kernels["name"], ladder.CUDA_GRAPH),
    ):
        body.append([label])
        for ms, between, busy in (runs[name].values() for name in names):
            body[-1] += [f"{ms} ({between})", busy]
    eager, graph = (f"{way}, ms (p20–p80) | GPU busy, ms" for way in ("eager", "CUDA graph"))
    return table(body, f"step {in_words(size)} | {eager} | {graph}")


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
    records = [load(f"{name}_{size}") for name in names]
    first, last = records[0], records[-1]
    body = [
        step_cells(run)
        | {
            size_label(first): run_label(run),
            "tokens/s": f"{run['tokens_per_second']:,.0f}",
            "gain": "" if run is first else Step.of(first).over(Step.of(run)),
            "over it": "" if run is last else Step.of(run).over(Step.of(last)),
            "GB": gb(run["peak_memory_bytes"], 2),
        }
        for run in records
    ]
    gains = "gain | over it" if len(records) > 2 else "gain"
    columns = f"step, ms | p20–p80 | busy, ms | tokens/s | {gains} | GB"
    return table(body, f"{size_label(first)} | {columns}")


def lora_fp8() -> str:
    """LoRA beside weights in FP8, after what others do at that size."""
    names = "baseline", "compile", "unsloth", "torchao", "bf16", "compact", "all"
    return runs("4x2048", *(f"lora_fp8_{name}" for name in names))


def parts(*names: str) -> str:
    """Profiles as columns, category by category, in ms of the GPU."""
    records, body = [load(name) for name in names], []
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
    return table(body, " | ".join([f"{common}, ms", *columns]))


def compare(before_name: str, after_name: str, rows: str = "") -> str:
    """Two profiles in few columns; `rows`: the last words of the rows shown, all unless given."""
    found = compare_profiles.categories(load(before_name), load(after_name))
    headers, *body = ([*row[:5], *row[7:]] for row in found)
    body = [tuple(cell.replace(" to ", "–") for cell in row) for row in body]
    body = [row for row in body if not rows or row[0].split()[-1] in rows.split(",")]
    return table(body, " | ".join(headers))


# ---------------------------------------------------------------- memory and several GPUs


MODELS = "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B"
SIZES = "1x512", "4x2048"
CARDS = 12, 16, 24, 48, 80  # GB
TRAINED = {"": "full", "_lora": "LoRA", "_qlora": "NF4"}


def estimated(model: str, size: str, trained: str = "") -> list[int]:
    """Return the bytes at the peak that the estimator finds, without and with all kernels."""
    estimates = load(f"estimate_{model}_{size}{trained}")["estimates"]
    return [estimate["peak_memory_bytes"] for estimate in estimates]


def fits(n_bytes: int, memory: int) -> bool:
    """Return True if a GPU of so many GB has room for a step, and a little to spare."""
    return n_bytes < 0.95e9 * memory


def gpus() -> str:
    """Which model trains on which GPU, by the estimator, in GB. Brackets: it does not fit."""
    body = []
    for memory, model in zip((24, 48, 80), MODELS):
        peaks = [peak for size in SIZES for peak in estimated(model, size)]
        cells = [gb(peak) if fits(peak, memory) else f"({gb(peak)})" for peak in peaks]
        body.append((f"{memory} GB", f"`meta-llama/{model}`", *cells))
    sizes = "1 × 512, none | --kernels all | 4 × 2,048, none | --kernels all"
    return table(body, f"GPU | --model | {sizes}")


def families() -> str:
    """What the layers of each family have beyond LLaMA's."""
    body = []
    for family in FAMILIES.values():
        norms = "q, k" if family.head_norms else ""
        biases = ", ".join(name.removesuffix("_proj") for name in family.bias)
        rotation = "not in every layer" if family.rotates else "in every layer"
        billions = parameter_count(family.example_config()) / 1e9
        name = f"`{family.example}`", f"{billions:.1f} · 10⁹"
        body.append((f"`{family.model_type}`", *name, norms, biases, rotation))
    return table(body, "family | example | parameters | norms over heads | biases | rotation")


def cards() -> str:
    """The largest model that trains on each card with all kernels, and its peak in GB."""
    columns = [(size, trained) for trained in TRAINED for size in SIZES]
    body = []
    for memory in CARDS:
        body.append([f"{memory} GB"])
        for size, trained in columns:
            peaks = {model: estimated(model, size, trained)[-1] for model in MODELS}
            fitting = [model for model in MODELS if fits(peaks[model], memory)]
            words = [f"{model.rpartition('-')[2]}: {gb(peaks[model])}" for model in fitting]
            body[-1].append(words[-1] if words else "–")
    headers = [f"{TRAINED[trained]}, {in_words(size)}" for size, trained in columns]
    return table(body, " | ".join(["card", *headers]))


def peaks(*names: str) -> str:
    """What the memory is made of at the peak, of several memory profiles."""
    records, body = [load(name) for name in names], []
    for part in records[0]["parts"]:
        n_bytes = [record["parts"].get(part, 0) for record in records]
        if max(n_bytes) > 0.05e9:
            body.append((part, *(gb(each, 2) for each in n_bytes)))
    body.append(("total", *(gb(record["peak_memory_bytes"], 2) for record in records)))
    headers = [f"{size_label(r)}, {'all' if r['kernels'] else 'none'}" for r in records]
    return table(body, " | ".join(["GB at the peak, tokens, --kernels", *headers]))


def frontier_table() -> str:
    """Memory against time."""
    rows = load("frontier")["rows"]
    return table([frontier.cells(row, rows) for row in rows], " | ".join(frontier.HEADERS))


def longest() -> str:
    """The longest sequences that fit."""
    body = []
    for name in ("baseline", "all", "layer", "layer_offload"):
        record = load(f"longest_{name}")
        flags = f"--kernels {'all' if record['kernels'] else 'none'}"
        flags += f" --recompute {record['recompute']}" if "recompute" in record else ""
        flags += " --offload" if "offload" in record else ""
        body.append((f"`{flags}`", f"{record['lengths'][-1]:,}", gb(record["peaks"][-1])))
    return table(body, " | longest sequence, tokens | peak, GB")


def scaling_table(parallel: str, study: str = "scaling") -> str:
    """Each of two GPUs beside one alone."""
    records = load(f"{study}_1"), load(f"{study}_{parallel}_2")
    return table(scaling_tables.body(*records), " | ".join(scaling_tables.columns(records[1])))


def crossovers() -> str:
    """From how many tokens on communication is hidden."""
    body = []
    for record in (load(f"scaling_{parallel}_2") for parallel in PARALLEL):
        for way in scaling_tables.ways_in(record):
            name = f"{way}, {record['parallel']}"
            body.append((name, scaling_tables.crossover(record, way)))
    return table(body, " | tokens in a step of each GPU")


# ---------------------------------------------------------------- others

STEPS = {  # the playbook's commands: their step, and what was added on the GPU and on a CPU
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
    records, body = [load(f"durations_{where}")["seconds"] for where in ("gpu", "cpu")], []
    for command, (step, *flags) in STEPS.items():
        seconds = (record[command + added] for record, added in zip(records, flags))
        words = (f"{s:.0f} s" if s < 100 else f"{s / 60:.0f} min" for s in seconds)
        body.append((f"`{command}`", step, *words))
    return table(body, "command | step | on an H200, random weights | on a CPU core")


def quality() -> str:
    """What stochastic rounding is worth."""
    records = (load(f"quality_{name}") for name in ("fp32", "bf16", "stochastic"))
    fp32, bf16, rounded = (record["validation_loss_after"] for record in records)
    closed = f"{100 * (bf16 - rounded) / (bf16 - fp32):.0f} %"
    body = [
        ("fp32, `torch.optim.AdamW`", f"{fp32:.4f}", ""),
        ("bf16, `torch.optim.AdamW`", f"{bf16:.4f}", "0 %"),
        ("bf16, our kernel, stochastic rounding", f"{rounded:.4f}", closed),
    ]
    return table(body, "after 400 steps | validation loss | of the gap to fp32 closed")


def distillation() -> str:
    """The small students, on a CPU."""
    teacher = load("distill_teacher_tiny")["validation_loss_after"]
    body = [("the teacher", "", "", "", f"{teacher:.2f}")]
    names = {
        "its first layer": "distill_tiny_first_layer",
        "a layer with random weights": "distill_tiny",
    }
    for label, name in names.items():
        run = load(name)
        validated = [run[f"validation_loss_{when}"] for when in ("before", "after")]
        losses = run["losses"][0], run["losses"][-1], *validated
        body.append((label, *(f"{loss:.2f}" for loss in losses)))
    return table(body, " | reverse KL in step 1 | in step 20 | validation loss before | after")


def distillation_8b() -> str:
    """The large student, with and without the kernels."""
    body = []
    for kernels, name in (("all", "distill_8b"), ("none", "distill_8b_none")):
        run = load(name)
        step, losses = Step.of(run), (f"{run['losses'][i]:.3f}" for i in (0, -1))
        times = f"{step.ms:.0f}", step.between(), gb(run["peak_memory_bytes"])
        body.append((f"`--kernels {kernels}`", *times, *losses))
    return table(body, " | step, ms | p20–p80 | peak, GB | reverse KL in step 1 | in step 20")


def trainer() -> str:
    """TRL's SFTTrainer by whose layers and whose loss; gain: over the first row."""
    rows = {
        "`--kernels none`": "sft_none",
        "`--opponent liger`": "sft_liger",
        "the layers' kernels": "sft_layers",
        "`--kernels all`": "sft_all",
    }
    records, body = [load(name) for name in rows.values()], []
    for label, run in zip(rows, records):
        step, losses = Step.of(run), (f"{run['losses'][i]:.4f}" for i in (0, -1))
        cells = f"{step.ms:.1f}", step.between(1), f"{run['tokens_per_second']:,.0f}"
        gain = "" if run is records[0] else Step.of(records[0]).over(step)
        body.append((label, *cells, gain, gb(run["peak_memory_bytes"]), *losses))
    columns = "step, ms | p20–p80 | tokens/s | gain | peak, GB | loss, step 1 | step 8"
    return table(body, f"{size_label(records[0])}, LoRA | {columns}")


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
    return table(body, "trace | on | commit | kernels, copies | step, ms | kB")


FUNCTIONS = gains, others, graphs, runs, parts, compare, gpus, cards, peaks, longest, crossovers
FUNCTIONS += lora_fp8, traces, trainer, families, durations, quality, distillation, distillation_8b
TABLES = {"ladder": ladder_table, "frontier": frontier_table, "scaling": scaling_table}
TABLES |= {function.__name__: function for function in FUNCTIONS}
