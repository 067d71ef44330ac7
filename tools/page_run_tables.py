"""The pages' tables of several runs beside each other: fine-tuning, and profiles by category.

The records of a table are of one run of a GPU, one after the other.
"""

from collections.abc import Callable

from harness.cli.flags import FP8_ALL, OPPONENTS
from tools.page_records import load, markdown, size_label
from tools.page_step_tables import SHORT_NAMES, Step

SHOWN_FROM_MS = 0.05  # a category that takes less in every profile has no row


def run_label(record: dict) -> str:
    """What was asked for, but the size: an opponent's name or the flags."""
    flags = [f"--quantize {record['quantize']}"] if record.get("quantize") else []
    if not record["kernels"]:
        name = "Hugging Face" + (", peft" if record.get("lora_rank") else "")
        if record.get("opponent"):
            name = SHORT_NAMES[OPPONENTS[record["opponent"]]]
        return name + "".join(f", `{flag}`" for flag in flags)
    if mode := record.get("fp8"):
        flags.append("--fp8" if mode == FP8_ALL else f"--fp8 {mode}")
    flags += ["--cuda-graph"] if record.get("cuda_graph") else []
    return f"`{' '.join(['--kernels all', *flags])}`"


def runs(size: str, *names: str) -> str:
    """Fine-tuning runs, as rows, of the records NAME_SIZE.

    gain: how many times as fast as the first row's a step is; "over it": the last row's over this.
    """
    records = [load(f"{name}_{size}") for name in names]
    first, last = records[0], records[-1]
    body = []
    for record in records:
        step = Step.of_run(record)
        row = [run_label(record), f"{step.ms:,.1f}", step.between(1), f"{record['busy_ms']:,.1f}"]
        row += [f"{record['tokens_per_second']:,.0f}", gain(record, first), gain(last, record)]
        body.append([*row, f"{record['peak_memory_bytes'] / 1e9:.2f}"])
    headers = [size_label(first), "step, ms", "p20–p80", "busy, ms", "tokens/s", "gain"]
    rows = [[*headers, "over it", "GB"], *body]
    if len(records) < 3:  # the last over the first is its gain
        rows = [[*row[:6], *row[7:]] for row in rows]
    return markdown(rows[0], rows[1:])


def gain(run: dict, other: dict) -> str:
    """How many times as fast its step is, or that the two are not told apart."""
    return "" if run is other else Step.of_run(other).over(Step.of_run(run))


def parts(*names: str) -> str:
    """Profiles as columns, category by category, in ms of the GPU."""
    records = [load(name) for name in names]
    body = []
    for category in records[0]["categories"]:
        ms = [record["categories"][category]["us"] / 1e3 for record in records]
        if max(ms) >= SHOWN_FROM_MS:
            body.append([category, *(f"{each:,.1f}" if each else "" for each in ms)])
    body.append(["busy", *(f"{record['busy_us'] / 1e3:,.1f}" for record in records)])
    body.append(["step", *(f"{record['median_step_ms']:,.1f}" for record in records)])
    launches = [sum(each["launches"] for each in r["categories"].values()) for r in records]
    body.append(["launches", *(f"{n:,}" for n in launches)])
    # What is the same for all of them stands over the first column.
    sizes, labels = ([label(each) for each in records] for label in (size_label, run_label))
    common, columns = (sizes[0], labels) if len(set(sizes)) == 1 else (labels[0], sizes)
    return markdown([f"{common}, ms", *columns], body)


TABLES: dict[str, Callable[..., str]] = {"runs": runs, "parts": parts}
