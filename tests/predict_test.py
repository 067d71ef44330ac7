"""predict.py: predictions by hand, of the GPU that was measured itself, and beside measurements."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

from harness.cli.command_line import UserError
from harness.cli.device import HAS_GPU
from harness.records.run_records import read_record
from harness.steps.gpus import GPUS, Gpu
from next_steps.studies import predict
from next_steps.studies.predict import Source, add_score, of_gpu, predict_all, read_records, render

HERE_GPU = Gpu(1000, "sm_here", 100, fp32_tflops=64, tbs=4, gb=100, cache_mb=50)  # 1e6 warps / us
COPY, PRODUCTS = 3600.0, 700.0  # 90 % and 70 % of the peaks
MB = 10**6


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    for name, gpu in {
        "Here": HERE_GPU,
        "Memory2": Gpu(1000, "sm_here", 100, fp32_tflops=64, tbs=8, gb=100, cache_mb=50),
        "Memory8": Gpu(1000, "sm_here", 100, fp32_tflops=64, tbs=32, gb=100, cache_mb=50),
        "Products4": Gpu(4000, "sm_here", 100, fp32_tflops=64, tbs=4, gb=100, cache_mb=50),
        "Issue2": Gpu(1000, "sm_here", 100, fp32_tflops=128, tbs=4, gb=100, cache_mb=50),
        "Compiler2": Gpu(1000, "sm_there", 100, fp32_tflops=64, tbs=4, gb=100, cache_mb=50),
        "All2": Gpu(2000, "sm_here", 100, fp32_tflops=128, tbs=8, gb=100, cache_mb=50),
    }.items():
        monkeypatch.setitem(GPUS, name, gpu)


def benchmark(kernel="adamw", us=100.0, call_us=None, gpu="Here", **work):
    call_us = call_us or us
    work = {key: amount / call_us for key, amount in work.items()}
    row = {"implementation": "ours", "tokens": 7, "total_us": [0, call_us, 0], "kernels_us": us}
    section = {"kernel": kernel, "size": [], "rows": [row | work]}
    rates = {"copy_gbs": COPY, "matmul_tflops": PRODUCTS}
    made = {"kind": "benchmark", "dtype": "bf16", "environment": {"gpu": f"NVIDIA {gpu}"}}
    return made | rates | {"sections": [section]}


def step(kind, ms, parts, busy_ms, kernels=(), gpu="Here", **settings):
    """A profile with these parts, {category: (us, bytes, FLOPs)}, or a run."""
    keys = "us", "bytes", "flops"
    record = {
        **{"kind": kind, "environment": {"gpu": gpu}, "kernels": [*kernels], "model": "m"},
        **{"batch_size": 4, "seq_len": 2048, "peak_memory_bytes": 40 * 10**9},
        "ceilings": {"copy_gbs": COPY, "matmul_tflops": PRODUCTS},
        **{"median_step_ms": ms, "median_seconds": ms / 1e3, "busy_ms": busy_ms},
        "categories": {n: dict(zip(keys, part)) | {"launches": 1} for n, part in parts.items()},
    }
    return record | settings


def predicted(records, gpu, counts=(), measured=None, **named):
    return predict_all([Source("Here", records, [*counts])], gpu, [], measured)["rows"]


def row_of(rows, kind):
    (row,) = (row for row in rows if row["kind"] == kind)
    return row


def test_twice_the_bandwidth_takes_half_the_time_of_what_waits_for_memory():
    bytes_at_80 = 0.8 * 100 * COPY * 1e3
    row = row_of(predicted([benchmark(gbs=bytes_at_80 / 1e3)], "Memory2"), "kernel")
    assert (row["us"], row["limit"], row["from"]) == (pytest.approx(50), "memory", ["Here"])
    # at the data sheet's rate the copy is a tenth faster; a fifth of the time is not explained
    assert row["low"] == pytest.approx(100 * (0.8 / 2 * 0.9 + 0.2 / 2))
    assert row["high"] == pytest.approx(100 * (0.8 / 2 + 0.2))
    faster_than_a_copy = row_of(predicted([benchmark(gbs=125 * COPY)], "Memory2"), "kernel")
    assert (faster_than_a_copy["us"], faster_than_a_copy["low"]) == (50, pytest.approx(45))
    for gpu in ("Products4", "Issue2"):
        assert row_of(predicted([benchmark(gbs=bytes_at_80 / 1e3)], gpu), "kernel")["us"] == 100


def test_products_follow_the_peak_and_what_is_measured_replaces_it():
    record = benchmark("linear_cross_entropy", tflops=0.75 * 100 * PRODUCTS)
    row = row_of(predicted([record], "Products4"), "kernel")
    assert (row["us"], row["limit"]) == (pytest.approx(25), "products")
    measured = {"copy_gbs": COPY, "matmul_tflops": 2 * PRODUCTS}
    row = row_of(predicted([record], "Products4", measured=measured), "kernel")
    assert row["us"] == pytest.approx(50)


def counted(share):
    """Counts of a launch of 240 MB whose instructions take a share of 100 us, and half there."""
    count = {"kernel": "_adamw_kernel", "case": "AdamW", "n_bytes": 240 * MB}
    issued = share * predict.ISSUED * MB  # in a microsecond
    targets = {"sm_here": 100 * issued, "sm_there": 50 * issued}
    return [count | {"target": t, "instructions": n} for t, n in targets.items()]


def test_instructions_come_first_where_their_time_is_longer():
    record, counts = benchmark(gbs=240 * MB / 1e3), counted(0.9)  # 240 MB: 67 us of 100 in memory
    for gpu, us in {"Memory8": 100, "Issue2": 50 / 0.75, "Compiler2": 50 / 0.75}.items():
        row = row_of(predicted([record], gpu, counts), "kernel")
        assert row["limit"] == ("instructions" if us == 100 else "memory")
        assert row["us"] == pytest.approx(us)
    slower = row_of(predicted([record], "Memory8", counted(0.5)), "kernel")
    assert (slower["us"], slower["limit"]) == (pytest.approx(50), "instructions")
    assert slower["high"] == pytest.approx(50 / (240 / 360))  # no nearer than to the memory here
    row = row_of(predicted([benchmark(gbs=240 * MB / 1e3)], "Memory8", [], None), "kernel")
    assert (row["us"], row["limit"]) == (pytest.approx(12.5), "memory")


def test_what_fits_into_the_cache_follows_the_rate_of_issue():
    record = benchmark(us=10.0, gbs=50 * MB / 1e3)
    assert row_of(predicted([record], "Memory8"), "kernel")["us"] == 10
    row = row_of(predicted([record], "Issue2"), "kernel")
    assert (row["us"], row["low"], row["high"], row["limit"]) == (5, 5, 10, "cache")


def test_what_waits_for_the_host_stays():
    rows = predicted([benchmark(us=100.0, call_us=300.0, gbs=300 * MB / 1e3)], "All2")
    assert (row_of(rows, "call")["us"], row_of(rows, "call")["limit"]) == (300, "host")
    assert row_of(rows, "kernel")["us"] == 50
    moved = {"optimizer": (20e3, 72 * 10**9, 0), "loss": (30e3, 108 * 10**9, 0)}  # all of a copy
    row = row_of(predicted([step("profile", 100, moved, 50)], "All2"), "profile")
    assert (row["us"], row["limit"]) == (pytest.approx(90e3), "host")  # the optimizer gained 10
    assert row["low"] == pytest.approx(25e3 * 0.9) and row["high"] == row["us"]
    graph = row_of(predicted([step("profile", 60, moved, 50, cuda_graph=True)], "All2"), "profile")
    assert (graph["us"], graph["limit"]) == (pytest.approx(30e3), "memory")


PARTS = {
    "matmul": (600e3, 0, 420e15),
    "normalization": (200e3, 720e9, 0),
    "optimizer": (200e3, 720e9, 0),
}


def test_a_run_has_the_parts_of_the_profile_with_the_most_of_its_kernels():
    profile = step("profile", 1000, PARTS, 1000)
    run = step("finetune", 850, {}, 850, kernels=["adamw"])
    source = Source("Here", [profile, run], [])
    parts = source.parts_of(source.rows[-1])
    times = {name: part["us"] for name, part in parts.items()}
    assert times == pytest.approx({"matmul": 600e3, "normalization": 200e3, "replaced": 50e3})
    row = row_of(predicted([profile, run], "Products4"), "step")
    assert row["us"] == pytest.approx(850e3 - 450e3)
    other_size = step("finetune", 500, {}, 500, seq_len=1024)
    row = row_of(predicted([profile, other_size], "Products4"), "step")
    assert row["us"] == pytest.approx(500e3 * (0.6 / 4 + 0.4))
    alone = predict_all([Source("Here", [run], [])], "Products4", [])
    assert alone["rows"] == [] and alone["absent"] == ["4 x 2,048, m, adamw"]


RESULTS = read_records(predict.KEPT)
COUNTS = [count for r in RESULTS if r["kind"] == "instructions" for count in r["counts"]]
ESTIMATES = [record for record in RESULTS if record["kind"] == "estimate"]


@pytest.mark.parametrize("kind", ["benchmark", "profile", "finetune", "ladder"])
def test_all_that_a_record_measured_has_names_of_its_own(kind):
    """Rows of one name become their mean, as FP8's rungs of a ladder and bf16's would."""
    found = [[*predict.measured_in(record)] for record in RESULTS if record["kind"] == kind]
    assert any(found)
    for rows in found:
        names = [(row.kind, row.name) for row in rows]
        assert len({*names}) == len(names), names


@pytest.mark.parametrize("name", ["H200", "H100 80GB HBM3"])
def test_of_itself_a_gpu_is_predicted_exactly(name):
    record = predict_all([Source(name, of_gpu(RESULTS, name), COUNTS)], name, ESTIMATES)
    add_score(record, RESULTS)
    assert len(record["rows"]) >= 8
    for row in record["rows"]:
        assert row["us"] == pytest.approx(row["source_us"]), row["name"]
        assert row["ratio"] == pytest.approx(1), row["name"]
        assert row["low"] <= row["us"] * (1 + 1e-9) and row["us"] <= row["high"] * (1 + 1e-9)
        assert "peak" not in row or row["peak_ratio"] == pytest.approx(1, abs=0.005), row["name"]


@pytest.mark.parametrize("name", ["H200", "H100 80GB HBM3"])
def test_the_kept_score_is_that_of_the_kept_records(name):
    path = predict.KEPT / f"predicted_{name.split()[0].lower()}.json"
    record = predict.prediction_of(name)
    add_score(record, RESULTS)
    kept = json.loads(path.read_text())["rows"]
    again = "python -m tools.make_records predictions"
    for key in ("us", "measured_us"):
        values = {(row["kind"], row["name"]): row[key] for row in record["rows"]}
        assert {(row["kind"], row["name"]): row[key] for row in kept} == pytest.approx(values), (
            again
        )


def test_what_was_measured_stands_beside_what_was_predicted_on_one_line():
    """Wide tables are cut: a GB300's, as if its records were an H200's."""
    record = predict.prediction_of("GB300")
    gpu = {"environment": {"gpu": "NVIDIA GB300"}}
    add_score(record, [each | gpu for each in of_gpu(RESULTS, "H200")])
    text = render(record)
    for kind in ("Kernel", "Call", "Profile", "Step"):
        header = next(line for line in text.splitlines() if line.startswith(f"{kind}  "))
        assert header.split()[1:4] == ["predicted", "measured", "ratio"], header


def test_the_sealed_prediction_has_the_checksum_that_the_page_says():
    sealed = (predict.KEPT / "predicted_gb300.json").read_bytes()
    assert hashlib.sha256(sealed).hexdigest() in (predict.KEPT.parent / "docs/gb300.md").read_text()


@pytest.mark.parametrize("name", ["H200", "H100 80GB HBM3"])
def test_the_most_that_a_kernel_reached_of_the_rate_of_issue(name):
    source, shares = Source(name, of_gpu(RESULTS, name), COUNTS), {}
    for row in (row for row in source.rows if row.kind == "kernel"):
        (part,) = row.parts.values()
        issue_us = part["bytes"] * source.instructions(row, source.gpu) / source.gpu.warps_per_us
        shares[row.name] = issue_us / part["us"]
    assert max(shares.values()) == pytest.approx(predict.ISSUED, abs=0.02)
    assert max(shares, key=shares.get).startswith("adamw8")


def test_a_score_says_the_ratio_and_what_is_not_measured():
    here = benchmark(gbs=300 * MB / 1e3)
    record = predict_all([Source("Here", [here], [])], "Memory2", [])
    add_score(record, [here, benchmark(us=40.0, gpu="Memory2", gbs=300 * MB / 1e3)])
    assert row_of(record["rows"], "kernel")["ratio"] == pytest.approx(50 / 40)
    assert "1.250" in render(record) and "Not measured" not in render(record)
    add_score(record, [here])
    assert row_of(record["rows"], "kernel")["ratio"] is None
    assert "Not measured: 2 of 2 predictions" in render(record)


def test_several_sources_give_the_mean_and_the_widest_range():
    records = [benchmark(us=us, gbs=300 * MB / 1e3) for us in (90.0, 110.0)]
    row = row_of(predicted(records, "Memory2"), "kernel")
    assert row["us"] == pytest.approx(50)
    assert row["low"] <= 45 * 0.95 and row["high"] >= 55


def test_memory_is_the_estimators():
    profile = step("profile", 1000, PARTS, 1000)
    peak = {"kernels": [], "peak_memory_bytes": 39 * 10**9}
    for size, expected in ((2048, 39), (1024, 40)):
        estimate = {"model": "m", "batch_size": 4, "seq_len": size, "estimates": [peak]}
        record = predict_all([Source("Here", [profile], [])], "Memory2", [estimate])
        assert row_of(record["rows"], "profile")["peak"] == expected * 10**9


def call(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["predict", *map(str, flags)])
    predict.main()


def test_a_prediction_beside_the_records_measured_nothing(tmp_path):
    """make gb300 leaves one in its folder, made on the GPU that the records are of."""
    (tmp_path / "adamw.json").write_text(json.dumps(benchmark(gpu="H200", gbs=300 * MB / 1e3)))
    alone = predict.prediction_of("GB300", tmp_path)
    beside = alone | {
        "environment": {"gpu": "NVIDIA H200"},
        "ceilings": dict.fromkeys(predict.PEAKS, 1.0),
    }
    (tmp_path / "predicted.json").write_text(json.dumps(beside))
    again = predict.prediction_of("GB300", tmp_path)
    assert [again[key] for key in ("rows", "ceilings")] == [alone[k] for k in ("rows", "ceilings")]


def test_the_command_writes_a_record_and_refuses_what_it_cannot_read(monkeypatch, tmp_path, capsys):
    path = tmp_path / "predicted.json"
    call(monkeypatch, "--gpu", "GB300", "--score", tmp_path, "--json", path)
    record = read_record(str(path), "prediction")
    assert record["gpu"] == "GB300" and {row["ratio"] for row in record["rows"]} == {None}
    assert "instructions" in {row["limit"] for row in record["rows"]}
    assert {"4 x 2,048, 8B, up to rope", "4 x 2,048, 8B, all"} <= {
        r["name"] for r in record["rows"]
    }
    printed = capsys.readouterr().out
    assert "GB300, predicted from H200 and H100" in printed and "Not measured: " in printed
    lines = [line for line in printed.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 100
    call(monkeypatch, "--gpu", "H200")  # by default a GPU's own records are no source
    assert "H200, predicted from H100 80GB HBM3\n" in capsys.readouterr().out
    for flags, said in (
        (["--score", tmp_path / "none.json"], "cannot be read"),
        (["--from", Path(__file__).parent], "no records of another GPU"),
        *([] if HAS_GPU else [(["--ceilings", "measured"], "runs on a GB300 alone")]),
    ):
        with pytest.raises(UserError, match=said):
            call(monkeypatch, "--gpu", "GB300", *flags)
    text = tmp_path / "text.json"
    text.write_text(json.dumps({"kind": "text", "environment": {"gpu": "NVIDIA H200"}}))
    with pytest.raises(UserError, match="tells its ceilings"):
        call(monkeypatch, "--gpu", "GB300", "--from", text)
