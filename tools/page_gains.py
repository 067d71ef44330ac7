"""The table of gains at the README's top: the baseline, the strongest opponent and ours."""

from collections.abc import Callable

from harness.benchmark.benchmark_specs import EAGER, HOST_FLOOR, IN_PLACE, OURS
from harness.cli.flags import OPPONENTS
from next_steps.studies import ladder
from tools.page_records import in_words, is_ours, load, markdown, rows_at, times, us_of
from tools.page_step_tables import SHORT_NAMES, Step


def strongest(rows: dict[str, dict], in_place: bool) -> str:
    """The fastest of somebody else, of those that do (or do not) overwrite their inputs."""
    others = [name for name in rows if not is_ours(name) and name not in (EAGER, HOST_FLOOR)]
    others = [name for name in others if name.endswith("in place") == in_place]
    return min(others, key=lambda name: us_of(rows[name]))


def gains_of_kernels() -> list[list[str]]:
    body = []
    for kernel, tokens, label in (
        ("rmsnorm", 65_536, "RMSNorm, 65,536 rows"),
        ("cross_entropy", 8192, "loss, 8,192 rows"),
        ("cross_entropy", 8192, "the same, in place"),
    ):
        rows = rows_at(load(f"benchmark_{kernel}"), tokens)
        place = "in place" in label
        rival, ours = strongest(rows, place), rows[IN_PLACE if place else OURS]

        def cell(row: dict, kernel: str = kernel) -> str:
            memory = f", {row['extra_bytes'] / 1e9:.1f} GB" if kernel == "cross_entropy" else ""
            return f"{us_of(row) / 1e3:.2f} ms{memory}"

        gain = times(us_of(rows[EAGER]) / us_of(ours), 1)
        over_rival = times(us_of(rows[rival]) / us_of(ours))
        other = f"{rival.split(',')[0]}: {cell(rows[rival])}"
        body.append([label, cell(rows[EAGER]), other, cell(ours), gain, over_rival])
    return body


def gain_of_steps(label: str, base: Step, name: str, other: Step, ours: Step) -> list[str]:
    """A row of whole steps.

    name: of the opponent whose step is `other`.
    """
    rival = f"{SHORT_NAMES.get(name, name)}: {other.cell()}"
    return [label, base.cell(), rival, ours.cell(), base.over(ours), other.over(ours)]


# of one run of a GPU each: what the row is called, Hugging Face's, ours, those of others
SETS_OF_RUNS = (
    ("LoRA", "lora_baseline", "lora_all", "lora_compile", "lora_liger", "lora_unsloth"),
    ("FP8", "fp8_baseline", "fp8_all", "fp8_torchao_tensorwise", "fp8_torchao_rowwise"),
)


def gains_of_runs(size: str) -> list[list[str]]:
    """Their rows, of the records NAME_SIZE."""
    body = []
    for label, *names in SETS_OF_RUNS:
        first, last, *others = (load(f"{name}_{size}") for name in names)
        rival = min(others, key=lambda record: record["median_seconds"])
        base, other, ours = map(Step.of_run, (first, rival, last))
        label = f"step {in_words(size)}, {label}"
        body.append(gain_of_steps(label, base, OPPONENTS[rival["opponent"]], other, ours))
    return body


def gains() -> str:
    """The baseline, the strongest opponent and ours, of the kernels and of the whole step."""
    body = gains_of_kernels()
    for size in ("1x512", "4x2048"):
        runs = (load(f"finetune_{which}_{size}") for which in ("baseline", "optimized"))
        base, ours = map(Step.of_run, runs)
        label = f"step {in_words(size)}, two"
        body.append([label, base.cell(), "–", ours.cell(), base.over(ours), "–"])
    for size in ("1x512", "4x2048"):
        record = load(f"ladder_{size}")
        rungs = {rung["name"]: rung for rung in record["rungs"]}
        rival = ladder.strongest(record)
        shown = rungs[ladder.BASELINE], rival, rungs[ladder.CUDA_GRAPH]
        base, other, ours = map(Step.of_rung, shown)
        label = f"step {in_words(size)}, all"
        body.append(gain_of_steps(label, base, rival["name"], other, ours))
    body += gains_of_runs(size)  # the larger one
    rival = ladder.strongest(record, "peak_memory_bytes")  # of that size
    n_bytes = [rung["peak_memory_bytes"] for rung in (shown[0], rival, shown[-1])]
    base, other, ours = [f"{each / 1e9:.1f} GB" for each in n_bytes]
    ratios = [times(each / n_bytes[-1]) for each in n_bytes[:-1]]
    other = f"{SHORT_NAMES.get(rival['name'], rival['name'])}: {other}"
    body.append([f"memory {in_words(size)}", base, other, ours, *ratios])
    headers = ["", "Hugging Face", "strongest other", "ours", "gain", "over it"]
    return markdown(headers, body)


TABLES: dict[str, Callable[..., str]] = {"gains": gains}
