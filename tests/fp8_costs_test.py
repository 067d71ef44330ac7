"""The table of FP8's casts and products: its rows, its arithmetic, and what it refuses."""

import json

import pytest
import torch

from harness.cli.command_line import RunError
from next_steps.lessons import fp8_kernel
from next_steps.lessons.fp8_kernel import quantize_rows
from next_steps.studies import fp8_costs, fp8_study


@pytest.mark.exhaustive
def test_the_whole_table_on_any_machine(run_script, tmp_path):
    path = tmp_path / "costs.json"
    outcome = run_script(fp8_study, "costs", "--tokens", "16", "--json", str(path))
    assert outcome.code == 0, outcome.err
    record = json.loads(path.read_text())
    names = [row["name"] for row in record["casts"]]
    assert len(names) == len(set(names)) == 9
    fused = [row["name"] for row in record["casts"] if row["separate_us"] is not None]
    assert fused == ["RMSNorm", "SwiGLU", "SwiGLU, backward"]
    assert all(row["fused_us"] > 0 and row["bytes"] > 0 for row in record["casts"])
    assert len(record["products"]) == 6
    for name in [*names, "gate, up: gradient of w"]:
        assert f"\n{name} " in outcome.out


def test_bytes_are_those_of_what_is_read_and_written():
    """Inputs in bf16, or codes, and codes; scales and a norm's weight are next to nothing."""
    H, I, KV = fp8_costs.WIDTHS
    found = {cast.name: cast for cast in fp8_costs.casts(16)}
    reads = {
        "RMSNorm": 2 * H,
        "SwiGLU": 4 * I,
        "SwiGLU, backward": 6 * I,
        "x of o": 2 * H,
        "dq, dk, dv side by side": 2 * (H + 2 * KV),
        "x of q, k, v, transposed": H,
        "gradient of gate and up, transposed": 2 * I,
    }
    assert set(found) == set(reads)
    for name, cast in found.items():
        written = sum(rows.codes.nbytes for rows in cast.fused())
        assert cast.n_bytes == 16 * reads[name] + written, name
    for cast, read in zip(fp8_costs.weight_casts(), (4 * I * H, 4 * I * H), strict=True):
        assert cast.n_bytes == read + sum(rows.codes.nbytes for rows in cast.fused())


def test_floor_share_and_gain():
    record = {
        "environment": dict.fromkeys(("gpu", "cpu", "torch", "triton", "transformers", "date")),
        "copy_gbs": 1000.0,
        "casts": [
            {"name": "some", "tokens": 16, "bytes": 2_000_000,
             "alone_us": 3.0, "separate_us": 7.0, "fused_us": 4.0},
        ],
        "products": [
            {"name": "one", "tokens": 16, "shape": [1, 2, 3],
             "bf16_us": 10.0, "fast_us": 4.0, "accurate_us": 7.0},
        ],
    }  # fmt: skip
    record["environment"]["commit"] = ""
    lines = fp8_study.render_costs(record).splitlines()
    cast, product = (next(li for li in lines if li.startswith(n)).split() for n in ("some", "one"))
    assert cast[1:] == ["16", "3.0", "7.0", "4.0", "3.0", "2.0", "50"]
    assert product[-5:] == ["10.0", "4.0", "7.0", "6.0", "3.0"]


def test_a_wrong_kernel_is_not_timed():
    x = torch.randn(16, 32, device=fp8_costs.DEVICE)
    cast = fp8_costs.Cast(
        "some", 1, lambda: (quantize_rows(x),), separate=lambda: (quantize_rows(1.2 * x),)
    )
    with pytest.raises(RunError, match="some: fused and separate differ by"):
        fp8_costs.check(cast)


def test_a_gpu_without_fp8_is_refused(monkeypatch):
    monkeypatch.setattr(fp8_kernel, "fp8_support", lambda: "leave FP8 out.")
    with pytest.raises(RunError, match="leave FP8 out"):
        fp8_costs.measure([16])


@pytest.mark.parametrize("tokens", ["17", "16,100", "65536", "0", "many"])
def test_sizes_that_fp8_does_not_take(run_script, tokens):
    outcome = run_script(fp8_study, "costs", "--tokens", tokens)
    assert outcome.code == 2 and "--tokens" in outcome.err
