"""The page that places our step among published figures: one formula, and rows only of records."""

import json

import pytest

from harness.steps.gpus import peak_tflops
from tools import page_records
from tools.page_published_tables import (
    IN_BOTH,
    PLACED,
    published,
    published_ours,
    tflops,
    utilization,
)
from tools.page_records import load_record
from tools.page_step_tables import run_label

STATION = {
    "model": "meta-llama/Llama-3.1-8B", "gpu": "GB300", "precision": "bf16", "batch_size": 4,
    "seq_len": 4096, "accumulate": 16, "tokens_per_second_per_gpu": 28_966,
}  # fmt: skip


def test_the_formula_by_hand():
    """6 x 7,504,658,432 weights + 6 x 32 layers x 4,096 x 4,096 = 48.249 GFLOP a token."""
    assert 6 * 7_504_658_432 + 6 * 32 * 4096 * 4096 == 48_249_176_064
    assert tflops(STATION) == pytest.approx(1397.6, abs=0.05)  # 28,966 x 0.048249; no head: 1,306
    assert utilization(STATION) == pytest.approx(0.559, abs=5e-4)  # of 2,500
    assert utilization(STATION | {"precision": "FP8, LoRA"}) == utilization(STATION) / 2
    assert peak_tflops("NVIDIA GB300", "FP8, LoRA") == 5000
    assert utilization(STATION | {"gpu": "H100 96GB HBM2e"}) is None
    assert [column.cell(STATION) for column in IN_BOTH][2] == "4 × 4,096 × 16"


def test_the_formula_gives_what_a_source_computes_itself():
    rows = [row for row in load_record("published")["rows"] if row["source"] == "Megatron-Bridge"]
    assert [round(tflops(row)) for row in rows] == [744, 1576, 1933]


def test_every_published_row_has_a_source_and_says_what_differs():
    record = load_record("published")
    assert {row["source"] for row in record["rows"]} == record["sources"].keys()
    assert all(row["differs"] for row in record["rows"])
    headers, _, *body = cells(published())
    assert len(body) == len(record["rows"]) and headers[-1] == "not like for like"


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(page_records, "RESULTS", tmp_path)

    def write(name: str, **more) -> None:
        made = {"environment": {"gpu": "NVIDIA H200"}, "kernels": [], "tokens_per_second": 8192.0}
        (tmp_path / f"{name}.json").write_text(json.dumps(STATION | made | more))

    return write


@pytest.mark.parametrize(
    "more, label",
    [
        ({"lora_rank": 16}, "Hugging Face, peft"),
        ({"lora_rank": 16, "quantize": "nf4"}, "Hugging Face, peft, `--quantize nf4`"),
        ({"opponent": "torchao-rowwise"}, "torchao, rows"),
        ({"opponent": "flashoptim"}, "FlashOptim"),
        ({"opponent": "fused-adamw"}, "fused AdamW"),
        ({"kernels": ["rope"], "fp8": "inputs"}, "`--kernels all --fp8 inputs`"),
    ],
)
def test_a_run_is_called_by_its_flags(more, label):
    assert run_label({"kernels": []} | more) == label


def test_a_run_without_record_has_no_row(recorded):
    assert len(cells(published_ours())) == 2
    recorded(PLACED[-1], power={"watts": 655.36}, fp8="all", kernels=["rmsnorm"], lora_rank=16)
    recorded(PLACED[0], power=None)
    _, _, unread, read = cells(published_ours())
    assert unread[:3] == ["Hugging Face", "H200", "bf16"] and unread[-2:] == ["–", "–"]
    assert read[:3] == ["`--kernels all --fp8`", "H200", "FP8, LoRA"]
    assert read[-2:] == ["655", "80.0"]  # 655.36 W / 8,192 tokens/s
