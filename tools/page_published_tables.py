"""The tables of docs/how_good.md: published figures and our own runs, by one formula."""

import math
import operator
import statistics

from harness.cli.tables import Column, Table
from harness.model.architecture import ModelFacts
from harness.model.families import EXAMPLES
from harness.records.spread import spread
from harness.steps.gpus import OF_BF16, peak_tflops
from harness.steps.power import joules_per_token
from tools import page_records
from tools.make_records import RUNS
from tools.page_records import load_record, page_table, per_cent, short_gpu, size_label
from tools.page_step_tables import run_label

PLACED = "full_baseline_4x2048", "full_all_4x2048", "fp8_all_4x2048", "lora_all_4x2048"
PLACED += "lora_fp8_bf16_2x4096_times_16", "lora_fp8_all_2x4096_times_16", *RUNS["published"]


def tflops(row: dict) -> float:
    """Return the TFLOP/s of a row of published.json, or of ours, by the page's one formula."""
    config = EXAMPLES[row["model"]].example_config()
    flops = ModelFacts(config).flops_per_token(row["seq_len"])
    return row["tokens_per_second_per_gpu"] * flops / 1e12


def utilization(row: dict) -> float | None:
    peak = peak_tflops(row["gpu"], row["precision"])
    return peak and tflops(row) / peak


IN_BOTH = [
    Column("GPU", lambda row: f"{row.get('gpus', '')} {short_gpu(row['gpu'])}".strip()),
    Column("precision", "precision"),
    Column("shape", size_label),
    Column("tokens/s", "tokens_per_second_per_gpu", ",.0f"),
    Column("TFLOP/s", tflops, ",.0f"),
    Column("MFU", utilization, per_cent, missing="–"),
]


def published(gpu: str = "") -> str:
    """What others published, each row in tokens/s, TFLOP/s and MFU of one GPU.

    With a GPU: its rows alone, and what is predicted of our step in the shapes of bf16.
    """
    rows = [row for row in load_record("published")["rows"] if gpu in row["gpu"]]
    if gpu:
        us = {row["name"]: row["us"] for row in load_record(f"predicted_{gpu.lower()}")["rows"]}
        for row in [row for row in rows if row["precision"] == "bf16"]:
            shape = row["accumulate"], row["batch_size"], row["seq_len"]
            speed = 1e6 * math.prod(shape) / us["{} x {} x {:,}, 8B, all".format(*shape)]
            ours = {"source": "ours, predicted", "tokens_per_second_per_gpu": speed}
            rows.append(row | ours | {"differs": ""})
    columns = [Column("source", "source"), *IN_BOTH, Column("not like for like", "differs")]
    return Table.of(columns, rows).markdown()


def published_sources() -> str:
    """Where each published figure stands."""
    return page_table(load_record("published")["sources"].items(), "source | address")


def published_peaks() -> str:
    """The dense peaks that MFU is a share of, of each GPU whose peak is known."""
    found = {}
    for row in load_record("published")["rows"]:
        for precision in ("bf16", row["precision"].split(",")[0]):
            if peak := peak_tflops(row["gpu"], precision):
                found.setdefault(short_gpu(row["gpu"]), {})[precision] = peak
    body = [
        (gpu, *(f"{peaks[p]:,.0f}" if p in peaks else "" for p in OF_BF16))
        for gpu, peaks in found.items()
    ]
    return page_table(body, " | ".join(["dense peak, TFLOP/s", *OF_BF16]))


def published_ours() -> str:
    """Our own runs in the same columns, and their energy; a run without record has no row."""
    rows = []
    for run in (
        load_record(name) for name in PLACED if (page_records.RESULTS / f"{name}.json").exists()
    ):
        precision = ("FP8" if run.get("fp8") else "bf16") + ", LoRA" * ("lora_rank" in run)
        row = run | {"precision": precision, "gpu": run["environment"]["gpu"]}
        rows.append(row | {"tokens_per_second_per_gpu": run["tokens_per_second"]})
    columns = [
        Column("ours", run_label),
        *IN_BOTH,
        Column("W", lambda run: run.get("power") and run["power"]["watts"], ",.0f", "–"),
        Column("mJ a token", joules_per_token, lambda joules: f"{1e3 * joules:.1f}", "–"),
    ]
    return Table.of(columns, rows).markdown()


def weight_values() -> str:
    """Steps with random weights and with a trained model's spread; a round has one of each."""
    body = []
    for precision, name in (("bf16", "weight_values"), ("FP8", "weight_values_fp8")):
        medians = {}
        for way in ("random", "trained"):
            rounds = [each for each in load_record(name)["rounds"] if each["way"] == way]
            medians[way] = [statistics.median(each["seconds"]) for each in rounds]
            ms = [1e3 * seconds for each in rounds for seconds in each["seconds"]]
            over = sorted(map(operator.truediv, medians[way], medians["random"]))
            ratio = f"{statistics.median(over):.4f} ({over[0]:.4f}–{over[-1]:.4f})"
            cells = f"{statistics.median(ms):,.1f}", "–".join(f"{end:,.1f}" for end in spread(ms))
            power = [(r["power"]["watts"], r["power"]["mhz"]) for r in rounds]
            cells += tuple(f"{statistics.median(each):,.0f}" for each in zip(*power))
            loss = f"{statistics.median(r['loss'] for r in rounds):.2f}"
            body.append((f"{precision}, {way}", *cells, loss, ratio if way == "trained" else ""))
    return page_table(
        body, "weights | step, ms | p20–p80 | W | MHz | loss | over random, by rounds"
    )
