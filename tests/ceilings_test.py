"""The ceilings of a GPU: nothing is above them, and it is said what reached them."""

import random
import re

import pytest

from harness.benchmark import benchmark_specs as specs
from harness.benchmark import benchmark_tables
from harness.profiling import diagnose, profile_tables, roofline
from harness.profiling.ceilings import ceilings_of
from tests.conftest import tracked
from tests.diagnose_test import made_up, part
from tools.page_records import load_record

PROFILES = sorted(path.stem for path in tracked("results/profile_*.json"))
BENCHMARKS = sorted(path.stem for path in tracked("results/benchmark_*.json"))
H200 = {"environment": {"gpu": "NVIDIA H200"}}


def shares(record: dict) -> list[float | None]:
    judged = [*diagnose.judge_categories(record).values(), *diagnose.judge_operations(record)]
    return [finding.share for finding in judged]


def random_part(rng: random.Random) -> dict:
    flops = rng.choice([0.0, 10 ** rng.uniform(2, 8)])
    fp8 = rng.choice([0.0, flops, rng.random() * flops])
    return part(10 ** rng.uniform(0, 3), 10 ** rng.uniform(2, 6), flops) | {"fp8_flops": fp8}


@pytest.mark.parametrize("seed", range(50))
def test_no_part_of_a_step_is_above_its_ceiling_whatever_was_measured(seed):
    rng = random.Random(seed)
    names = "matmul", "loss", "optimizer", "attention"
    record = made_up(**{name: random_part(rng) for name in names})
    record["ceilings"] |= rng.choice([{}, {"fp8_tflops": 0.2}, {"matmul_burst_tflops": 0.3}])
    found = [share for share in shares(record) if share is not None]
    assert all(share <= 1 + 1e-9 for share in found)
    printed = re.findall(r"(\d+) %  ", profile_tables.diagnosis(record))
    assert printed and all(int(per_cent) <= 100 for per_cent in printed)


@pytest.mark.parametrize("name", PROFILES)
def test_no_recorded_part_is_above_its_ceiling(name):
    record = load_record(name)
    found = shares(record)
    assert all(share is None or share <= 1 + 1e-9 for share in found)
    assert found.count(None) < len(found) / 2
    rates, _ = ceilings_of(record)
    measured = record["ceilings"]
    assert all(measured[key] <= rate <= 1.15 * measured[key] for key, rate in rates.items())


def test_a_ceiling_is_the_best_of_what_was_measured_and_it_is_said_which():
    record = made_up(matmul=part(100.0, n_bytes=1e3, flops=11e6), loss=part(100.0, n_bytes=5e4))
    rates, by = ceilings_of(record)
    assert rates == {"copy_gbs": 1.0, "matmul_tflops": pytest.approx(0.11)}
    assert by == {"copy_gbs": "read + write", "matmul_tflops": "the step's matmul"}
    line = profile_tables.ceilings_line(record)
    assert "copy 1 GB/s (read + write)" in line
    assert "matmul 110.0 GFLOP/s (the step's matmul)" in line
    record["ceilings"]["matmul_burst_tflops"] = 0.12
    rates, by = ceilings_of(record)
    assert (rates["matmul_tflops"], by["matmul_tflops"]) == (0.12, "a burst")
    # of two profiles, whose parts stand beside each other, the best of both
    slower = made_up(matmul=part(100.0, n_bytes=1e3, flops=9e6))
    assert ceilings_of(slower, record).rates == rates


def test_a_rate_of_fp8_raises_fp8s_ceiling_alone():
    fp8 = part(100.0, n_bytes=1e3, flops=22e6) | {"fp8_flops": 22e6}
    record = made_up(matmul=fp8)
    record["ceilings"]["fp8_tflops"] = 0.2
    rates, _ = ceilings_of(record)
    assert rates["matmul_tflops"] == 0.1 and rates["fp8_tflops"] == pytest.approx(0.22)


def test_bytes_from_the_cache_are_no_share_of_the_memory():
    """An H200's memory has 4,800 GB/s: a faster part reads from the cache."""
    parts = {"optimizer": part(1.0, n_bytes=4.5e6), "loss": part(1.0, n_bytes=6e6)}
    record = made_up(**parts) | H200
    record["ceilings"]["copy_gbs"] = 4270.0
    assert ceilings_of(record).rates["copy_gbs"] == pytest.approx(4500.0)
    optimizer, loss = diagnose.judge_categories(record).values()
    assert optimizer.share == pytest.approx(1.0) and loss.share is None
    assert "  cache  " in profile_tables.diagnosis(record)
    unknown = record | {"environment": {"gpu": "Some GPU"}}  # whose memory may be slower
    assert ceilings_of(unknown).rates["copy_gbs"] == 4270.0


@pytest.mark.parametrize("after", ["profile_4x2048_both", "profile_4x2048_all"])
def test_no_dot_is_above_the_roof(after, tmp_path, pyplot):
    roofline.plot([load_record("profile_4x2048"), load_record(after)], str(tmp_path / "x.png"))
    (axis,) = pyplot.gcf().axes
    (roof, *_), dots = axis.lines, axis.collections
    (_, edge, _), (_, top, _) = roof.get_data()
    assert len(dots) >= 10
    for dot in dots:
        ((intensity, tflops),) = dot.get_offsets()
        assert tflops <= top * min(1.0, intensity / edge) * (1 + 1e-9)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_no_recorded_kernel_is_above_100_percent(name):
    record, found = load_record(name), []
    for section in record["sections"]:
        rate = specs.SPECS[section["kernel"]].rate
        ceiling = benchmark_tables.ceiling_of(record, rate)
        for row in section["rows"]:
            if row[rate.key] is not None:
                for us in benchmark_tables.clocks(row).values():
                    reached = benchmark_tables.rate_at(rate, row, us)
                    share = benchmark_tables.share_in_words(reached, ceiling, ".3f")
                    found.append((row["implementation"], share))
    assert all(share == "cache" or float(share) <= 1 for _, share in found)
    assert {who for who, share in found if share == "cache"} <= {specs.IN_PLACE}
