"""The pages' tables of several runs."""

import gzip
import json

import pytest

from tools import page_records
from tools.page_kernel_tables import fp8_casts, fp8_products
from tools.page_step_tables import parts, run_label, runs, traces

ALL = ["rmsnorm", "adamw"]


def run(seconds: float, **more) -> dict:
    return {
        "kernels": [],
        "batch_size": 4,
        "seq_len": 2048,
        "warmup_steps": 0,
        "profiled_steps": 0,
        "seconds": [0.99 * seconds, seconds, 1.01 * seconds],
        "median_seconds": seconds,
        "tokens_per_second": 8192 / seconds,
        "busy_ms": 900.0 * seconds,
        "peak_memory_bytes": 5e9,
    } | more


def profile(**us) -> dict:
    categories = {name: {"us": time, "launches": 2} for name, time in us.items()}
    times = {"busy_us": sum(us.values()), "median_step_ms": 9.0}
    return {"kernels": [], "batch_size": 1, "seq_len": 512, "categories": categories} | times


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Writes records where the tables look for them."""
    monkeypatch.setattr(page_records, "RESULTS", tmp_path)

    def write(**records: dict) -> list[str]:
        for name, record in records.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(record))
        return list(records)

    return write


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


@pytest.mark.parametrize(
    "more, label",
    [
        ({}, "Hugging Face"),
        ({"lora_rank": 16}, "Hugging Face, peft"),
        ({"lora_rank": 16, "quantize": "nf4"}, "Hugging Face, peft, `--quantize nf4`"),
        ({"opponent": "torchao-rowwise"}, "torchao, rows"),
        ({"kernels": ALL, "fp8": "all"}, "`--kernels all --fp8`"),
        ({"kernels": ALL, "fp8": "inputs"}, "`--kernels all --fp8 inputs`"),
        (
            {"kernels": ALL, "lora_rank": 16, "quantize": "nf4", "cuda_graph": True},
            "`--kernels all --quantize nf4 --cuda-graph`",
        ),
    ],
)
def test_a_run_is_called_by_its_flags(more, label):
    assert run_label(run(1.0, **more)) == label


def test_runs_stand_beside_the_first_and_the_last(recorded):
    recorded(base_1x2=run(1.0), other_1x2=run(0.8), ours_1x2=run(0.5, kernels=ALL))
    headers, _, base, other, ours = cells(runs("1x2", "base", "other", "ours"))
    assert headers[0] == "4 × 2,048" and headers[5:7] == ["gain", "over it"]
    assert base[1:5] == ["1,000.0", "994.0–1,006.0", "900.0", "8,192"]
    assert [row[5:7] for row in (base, other, ours)] == [
        ["", "2.00×"], ["1.25×", "1.60×"], ["2.00×", ""],
    ]  # fmt: skip
    assert base[7:] == ["5.00"]


def test_runs_that_are_not_told_apart_have_no_ratio(recorded):
    recorded(base_a=run(1.0), same_a=run(1.005, accumulate=2))
    headers, _, _, same = cells(runs("a", "base", "same"))
    assert same[5] == "no difference" and "over it" not in headers
    assert cells(runs("a", "same"))[0][0] == "4 × 2,048 × 2"


def test_profiles_stand_beside_each_other_without_what_is_nothing(recorded):
    names = recorded(
        one=profile(matmul=4000.0, adapters=0.0, loss=20.0),
        two=profile(matmul=3000.0, adapters=500.0, loss=20.0) | {"kernels": ALL},
    )
    headers, _, *body = cells(parts(*names))
    assert headers == ["1 × 512, ms", "Hugging Face", "`--kernels all`"]
    assert body == [
        ["matmul", "4.0", "3.0"], ["adapters", "", "0.5"], ["busy", "4.0", "3.5"],
        ["step", "9.0", "9.0"], ["launches", "6", "6"],
    ]  # fmt: skip


def test_profiles_of_several_sizes_are_called_by_them(recorded):
    names = recorded(one=profile(loss=20.0), two=profile(loss=90.0) | {"batch_size": 4})
    assert cells(parts(*names))[0] == ["Hugging Face, ms", "1 × 512", "4 × 512"]


def test_each_kept_trace_has_a_row_that_is_counted_in_it(recorded):
    assert cells(traces())[2:] == []
    kernel = {"ph": "X", "cat": "kernel", "name": "_k", "ts": 5, "dur": 1, "args": {"stream": 7}}
    step = {"ph": "X", "cat": "user_annotation", "name": "step", "ts": 0, "dur": 1234}
    made = {"gpu": "NVIDIA H200", "torch": "2.9.1+cu130", "triton": "3.5.0", "commit": "a" * 40}
    trace = {"environment": made, "traceEvents": [step, kernel, kernel]}
    file = page_records.RESULTS / "trace_kernels.json.gz"
    file.write_bytes(gzip.compress(json.dumps(trace).encode()))
    ((name, *row),) = cells(traces())[2:]
    assert name == "[after](../results/trace_kernels.json.gz)"
    assert row == ["H200", "aaaaaaa", "2", "1.2", "0"]


def test_the_casts_have_floor_share_and_gain(recorded):
    us = {"alone_us": 3.0, "separate_us": 7.0, "fused_us": 4.0}
    alone = {"alone_us": None, "separate_us": None, "fused_us": 2.0}
    casts = [
        {"name": "some", "tokens": 16, "bytes": 2_000_000, **us},
        {"name": "other", "tokens": None, "bytes": 1_000_000, **alone},
    ]
    times = {"bf16_us": 10.0, "fast_us": 4.0, "accurate_us": 7.0}
    products = [{"name": "one", "tokens": 16, "shape": [1, 2, 3], **times}]
    recorded(fp8_costs={"copy_gbs": 1000.0, "casts": casts, "products": products})
    _, _, some, other = cells(fp8_casts())
    assert some == ["some", "16", "3.0", "7.0", "4.0", "3.0", "2.0", "50 %"]
    assert other == ["other", "any", "", "", "2.0", "", "1.0", "50 %"]
    _, _, product = cells(fp8_products())
    assert product == ["one", "16", "1 × 2 × 3", "10.0", "4.0", "7.0", "6.0", "3.0"]
