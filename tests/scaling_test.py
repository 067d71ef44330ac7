"""The scaling table: what its numbers are from made-up records, what it refuses, and a real run."""

import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.cli import processes, tables
from harness.cli.device import HAS_GPU
from harness.cli.flags import IN_FP8
from harness.cli.workload import Workload
from harness.steps import parallel
from next_steps.finetuning import kernel_training
from next_steps.patches import projections
from next_steps.studies import scaling, scaling_tables
from next_steps.studies.scaling_tables import StepSize
from tests.conftest import assert_refused
from tests.small_workloads import MADE_UP
from tests.two_processes import one_gpu_is_too_few
from tests.warm_processes import torchrun


def row(way, batch_size, seq_len, ms, exposed_ms=None, gb=50, accumulate=1) -> dict:
    """A step's time varies by a tenth; twice what is exposed is sent."""
    found = {"way": way, **StepSize(batch_size, seq_len, accumulate).as_record()}
    found |= {"median_ms": ms, "p20_ms": 0.95 * ms, "p80_ms": 1.05 * ms, "step_ms": [ms]}
    found["tokens_per_second_per_gpu"] = 1e3 * batch_size * seq_len * accumulate / ms
    found["peak_memory_bytes"] = gb * 1e9
    if exposed_ms is not None:
        found |= {"exposed_us": 1e3 * exposed_ms, "communication_us": 2e3 * exposed_ms}
    return found


def record(rows, world_size=1, **values) -> dict:
    several = "fsdp" if world_size > 1 else None
    return {
        "kind": "scaling", "environment": MADE_UP, "model": "tiny", "weights": "random weights",
        "dtype": "bf16", "kernels": [], "parameters": 1, "world_size": world_size,
        "parallel": several, "absent": [], "rows": rows, **values,
    }  # fmt: skip


ONE = record([row("baseline", 1, 512, 100, gb=90), row("all kernels", 1, 512, 80)])
TWO = record(
    [
        row("baseline", 1, 512, 125, 25, gb=60),
        row("baseline", 1, 1024, 200, 10),
        row("baseline", 1, 2048, 400, 16),
        row("all kernels", 1, 512, 100, 50),
        {"way": "all kernels", "batch_size": 1, "seq_len": 1024, "failure": "the GPU's memory"},
        row("Liger", 1, 512, 150, 3),
        row("Liger", 1, 1024, 202, 40),
    ],
    2,
)


def written(folder, *records) -> list[str]:
    for i, each in enumerate(records):
        (folder / f"{i}.json").write_text(json.dumps(each))
    return [str(folder / f"{i}.json") for i in range(len(records))]


def test_a_row_beside_that_of_one_process_and_of_liger():
    table = {cells[0]: cells[1:] for cells in scaling_tables.body(ONE, TWO)}
    n_a = scaling_tables.NOT_MEASURED
    # 95 / 131.25 and 105 / 118.75 are the ends of the spread
    first = ["4,096", "5,120", "80 % (72–88)", "60.0", "90.0", "50.0", "25.0, 20%", "1.20×"]
    assert table["baseline 1 × 512"] == first
    assert table["all kernels 1 × 512"][-2:] == ["50.0, 50%", "1.50×"]
    # not measured by one; Liger's step is as long as makes no difference
    assert table["baseline 1 × 1,024"][1:3] == [n_a, n_a]
    assert table["baseline 1 × 1,024"][-1] == "same"
    assert table["all kernels 1 × 1,024"][0] == "too large"
    assert table["Liger 1 × 512"][-1] == "–"


def test_the_crossover_is_where_the_exposed_part_stays_small():
    # 20 %, 5 %, which is not below it, and 4 %
    assert scaling_tables.crossover(TWO, "baseline") == "2,048"
    assert scaling_tables.crossover(TWO, "all kernels") == "more than 512"
    # 2 % and then 20 %: small at first is not small from there on
    assert scaling_tables.crossover(TWO, "Liger") == "more than 1,024"
    assert scaling_tables.crossover(ONE, "baseline") == scaling_tables.NOT_MEASURED


def test_a_step_of_several_micro_batches_is_a_row_of_its_own():
    """It is beside one process's step of as many, and says nothing of where the crossover is."""
    four = {"exposed_ms": 300, "accumulate": 4}
    one = record([*ONE["rows"], row("baseline", 1, 512, 800, accumulate=4)])
    two = record([*TWO["rows"], row("baseline", 1, 512, 1000, **four)], 2)
    table = {cells[0]: cells[1:] for cells in scaling_tables.body(one, two)}
    assert table["baseline 1 × 512 × 4"][:2] == ["2,048", "2,560"]
    assert table["baseline 1 × 512"][:2] == ["4,096", "5,120"]
    assert scaling_tables.crossover(two, "baseline") == scaling_tables.crossover(TWO, "baseline")


def profiled(row: dict, products, copies, exposed, busy, watts=None) -> dict:
    us = zip(scaling_tables.IN_PROFILE, (2 * exposed, exposed, products, copies, busy))
    found = row | {key: 1e3 * ms for key, ms in us}
    return found | ({"power": {"watts": watts}} if watts else {})


# 512 and 4 x 512 tokens; of a step's ms 60 products, 5 copies, 0 exposed, 25 others, 10 gaps
ALONE = [
    profiled(row("baseline", 1, 512, 100), 60, 5, 0, 90, watts=512),
    profiled(row("baseline", 1, 512, 320, accumulate=4), 260, 20, 0, 320),
    row("Liger", 1, 512, 90),
]
SHARED = [
    profiled(row("baseline", 1, 512, 130), 70, 15, 8, 113, watts=256),
    profiled(row("baseline", 1, 512, 310, accumulate=4), 265, 22, 3, 305),
    profiled(row("Liger", 1, 512, 120), 60, 5, 1, 100),
    {"way": "Liger", "batch_size": 2, "seq_len": 512, "failure": "the GPU's memory"},
]
MORE = [
    profiled(row("baseline", 1, 512, 95), 62, 5, 1, 90),
    row("baseline", 1, 512, 350, 3, accumulate=4),
]


def lost_rows(*records) -> dict[tuple[str, str], list[str]]:
    found = scaling_tables.lost_table(record(ALONE), *records)
    assert found.headers[2:] == ["lost", "products", "copies", "exposed", "others", "gaps",
        "mJ a token"]  # fmt: skip
    return {(name, gpus): cells for name, gpus, *cells in found.rows}


def test_causes_add_up_to_what_is_lost_also_where_several_are_faster_than_one():
    """By hand: of the first 113 busy 20 are others, and 130 - 113 are gaps."""
    found = lost_rows(record(SHARED, 2), record(MORE, 4, parallel="ddp"))
    n_a = scaling_tables.NOT_MEASURED
    # 100 mJ a token alone: 512 W x 0.1 s / 512
    by_hand = ["30.0", "10.0", "10.0", "8.0", "-5.0", "7.0", "65.0 (100.0)"]
    assert found["baseline 1 × 512", "2, fsdp"] == by_hand
    slower_products = ["-10.0", "5.0", "2.0", "3.0", "-25.0", "5.0", f"{n_a} ({n_a})"]
    assert found["baseline 1 × 512 × 4", "2, fsdp"] == slower_products
    faster = ["-5.0", "2.0", "0.0", "1.0", "-3.0", "-5.0", f"{n_a} (100.0)"]
    assert found["baseline 1 × 512", "4, ddp"] == faster
    for lost, *causes, _ in (by_hand, slower_products, faster):
        assert float(lost) == sum(map(float, causes))


def test_what_was_not_measured_of_a_loss_is_said_and_each_record_has_its_row():
    found = lost_rows(record(SHARED, 2), record(MORE, 4, parallel="ddp"))
    n_a = scaling_tables.NOT_MEASURED
    # without a profile the whole loss is known
    assert found["Liger 1 × 512", "2, fsdp"] == ["30.0", *[n_a] * 5, f"{n_a} ({n_a})"]
    assert found["baseline 1 × 512 × 4", "4, ddp"][:2] == ["30.0", n_a]
    assert found["Liger 2 × 512", "2, fsdp"] == [*[n_a] * 6, f"{n_a} ({n_a})"]
    ways = ["baseline 1 × 512", "baseline 1 × 512 × 4", "Liger 1 × 512", "Liger 2 × 512"]
    both = [(way, gpus) for way in ways[:2] for gpus in ("2, fsdp", "4, ddp")]
    assert [*found] == [*both, *((way, "2, fsdp") for way in ways[2:])]


def test_compare_prints_tables_and_draws_what_was_measured(run_script, tmp_path):
    paths, picture = written(tmp_path, ONE, record(ONE["rows"], 2)), tmp_path / "scaling.png"
    outcome = run_script(scaling, "--compare", *paths, "--plot", str(picture))
    assert_refused(outcome, "no record says what is exposed")
    paths = written(tmp_path, ONE, TWO, TWO | {"parallel": "ddp"})
    outcome = run_script(scaling, "--compare", *paths, "--plot", str(picture))
    assert outcome.code == 0, outcome.err
    assert "2 processes, fsdp" in outcome.out and "2 processes, ddp" in outcome.out
    assert outcome.out.count("so many tokens a GPU on: 2,048") == 2
    assert outcome.out.count("What several lose") == 1
    assert picture.stat().st_size > 0


@pytest.mark.parametrize(
    "records, words",
    [
        ([ONE], "0.json alone is no comparison"),
        ([TWO, TWO], "0.json is of 2 processes: name a record of one first"),
        ([ONE, ONE], "1.json is of 1 processes: name"),
        ([ONE, TWO | {"dtype": "fp32"}], "dtype fp32 in"),
        ([ONE, TWO | {"model": "other"}], "model other in"),
        ([ONE, TWO | {"environment": MADE_UP | {"gpu": "Other"}}], "gpu Other in"),
    ],
)
def test_what_cannot_be_compared_is_refused(run_script, tmp_path, records, words):
    assert_refused(run_script(scaling, "--compare", *written(tmp_path, *records)), words)


@pytest.mark.parametrize("damage", ["removed", None, "x", [{}]], ids=str)
def test_a_record_of_which_a_part_is_missing_is_one_sentence(run_script, tmp_path, damage):
    for key in TWO.keys() - {"kind"}:
        damaged = {name: value for name, value in TWO.items() if name != key}
        damaged |= {} if damage == "removed" else {key: damage}
        outcome = run_script(scaling, "--compare", *written(tmp_path, ONE, damaged))
        if outcome.code:
            assert_refused(outcome, key)
        assert outcome.code or key not in ("rows", "world_size", "environment")


@pytest.mark.parametrize("damage", [{"busy_us": "x"}, {"power": "x"}, {"power": None}], ids=str)
def test_a_profile_or_a_power_without_numbers_is_one_sentence(run_script, tmp_path, damage):
    two = record([SHARED[0] | damage], 2)
    outcome = run_script(scaling, "--compare", *written(tmp_path, ONE, two))
    if damage == {"power": None}:  # nothing was read
        assert outcome.code == 0
    else:
        assert_refused(outcome, "rows")


def test_flags_without_effect_are_refused(run_script, tmp_path):
    (one,) = written(tmp_path, ONE)
    for flags, words in (
        (["--compare", one, "--json", str(tmp_path / "new")], "--json does nothing with --compare"),
        (["--plot", str(tmp_path / "new.png")], "add --compare"),
        (["--compare", one, "--ways", "fp8"], "--ways does nothing with --compare"),
        (["--parallel", "ddp"], "needs more than the one process"),
        (["--ways", "fp8,bf16"], "unknown way 'bf16'; choose from baseline, kernels, fp8, liger"),
        (["--sizes", "1x8,2048"], "expected sizes such as 4x2048 or 4x2048x4, not '1x8,2048'"),
    ):
        assert_refused(run_script(scaling, *flags), words)


def measured_as(monkeypatch, outcomes) -> list:
    """`measure_size` of made-up outcomes; the models that it was called with, weakly."""
    seen = []

    def measure(called, *rest):
        seen.append(weakref.ref(called))
        return outcomes(len(seen))

    monkeypatch.setattr(scaling, "measure_size", measure)
    monkeypatch.setattr("harness.profiling.profiler.measure_ceilings", lambda dtype: {})
    return seen


SIZES = StepSize(1, 4), StepSize(1, 8)


def tiny() -> Workload:
    return Workload(model="tiny", dtype="fp32", seq_len=8, lr=1e-5, data="synthetic")


def test_a_record_is_kept_after_each_row(monkeypatch, small_model, tmp_path):
    path = tmp_path / "record.json"

    def stop_at_the_second(number):
        if number == 2:
            raise KeyboardInterrupt
        return row("", 1, 1, 5)

    measured_as(monkeypatch, stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        scaling.measure_ways(tiny(), str(path), ["baseline"], SIZES)
    assert len(json.loads(path.read_text())["rows"]) == 1


def test_larger_sizes_are_left_out_and_a_models_memory_is_free_for_the_next(
    monkeypatch, small_model, tmp_path, capsys
):
    path, alive = tmp_path / "record.json", []
    seen = measured_as(monkeypatch, lambda number: {"failure": "the GPU's memory"})
    prepare = kernel_training.prepare_kernels

    def count(workload):
        alive.append(sum(each() is not None for each in seen))
        return prepare(workload)

    monkeypatch.setattr(kernel_training, "prepare_kernels", count)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    scaling.measure_ways(tiny(), str(path), ["baseline", "kernels", "liger"], SIZES)
    found = json.loads(path.read_text())
    assert [each["way"] for each in found["rows"]] == ["baseline", "all kernels"]
    assert alive == [0, 0]
    (absent,) = found["absent"]
    assert "Liger-Kernel is not installed" in absent and absent in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_too_large_and_a_gpu_without_fp8_leaves_it_out(
    monkeypatch, small_model, tmp_path
):
    prepare, out = kernel_training.prepare_kernels, torch.OutOfMemoryError("CUDA out of memory.")

    def fill_memory(workload):
        if not workload.fp8:
            raise out
        return prepare(workload)

    measured_as(monkeypatch, None)
    monkeypatch.setattr(kernel_training, "prepare_kernels", fill_memory)
    monkeypatch.setattr(projections, "fp8_support", lambda: "Old GPU is of sm_80: leave FP8 out.")
    scaling.measure_ways(tiny(), str(tmp_path / "record.json"), ["kernels", "fp8"], SIZES)
    found = json.loads((tmp_path / "record.json").read_text())
    too_large = {"batch_size": 1, "seq_len": 4, "failure": "the GPU's memory"}
    assert found["rows"] == [{"way": "all kernels", **too_large}]
    said = "--fp8: Old GPU is of sm_80: leave FP8 out."
    assert found["absent"] == [f"all kernels, fp8 is left out: {said}"]


def test_each_size_finds_out_anew_whether_codes_fit(monkeypatch, small_model):
    """The largest room was that of the smallest step."""
    begun, begin = [], projections.KeptCodes.begin
    counted = lambda self: begun.append(self) or begin(self)  # noqa: E731
    monkeypatch.setattr(projections.KeptCodes, "begin", counted)
    monkeypatch.setattr(scaling, "measure_size", lambda *args: {"begun": len(begun)})
    rows = scaling.rows_of(replace(tiny(), **scaling.HOW["fp8"]), SIZES, {})
    assert [each["begun"] for each in rows] == [2, 3]


GIVEN = StepSize(1, 4), StepSize(1, 4, 2), StepSize(1, 8)
TAKEN = [(way, size) for way in ("baseline", "all kernels", IN_FP8) for size in GIVEN]


def measure_by(n: int, path: Path, *flags: str) -> str:
    command = ["-m", "tests.several_processes", "small", "next_steps/studies/scaling.py"]
    command += ["--model", "tiny", "--json", str(path)]
    command += ["--sizes", ",".join("x".join(map(str, size)) for size in reversed(GIVEN))]
    outcome = torchrun(n, *command, *flags)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    assert outcome.stdout.count("Record written") == 1
    return str(path)


@pytest.fixture(scope="module")
def by_one(tmp_path_factory) -> str:
    return measure_by(1, tmp_path_factory.mktemp("one") / "one.json")


@pytest.mark.exhaustive
@one_gpu_is_too_few
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_one_process_and_two_are_measured_and_compared(run_script, tmp_path, by_one, way):
    one, two = by_one, measure_by(2, tmp_path / "two.json", "--parallel", way)
    records = scaling_tables.read_scaling([one, two])
    assert [each["world_size"] for each in records] == [1, 2]
    assert records[1]["parallel"] == way
    for each in records:
        rows = [r for r in each["rows"] if r["way"] != "Liger"]
        assert [(r["way"], StepSize.of(r)) for r in rows] == TAKEN
        for r in rows:
            assert len(r["step_ms"]) == scaling.STEPS_BY_DEVICE[HAS_GPU][1]
            assert r["p20_ms"] <= r["median_ms"] <= r["p80_ms"]
            assert not HAS_GPU or r.keys() >= {*scaling_tables.IN_PROFILE, "power"}
    outcome = run_script(scaling, "--compare", one, two)
    said = f"2 processes, {way}" if HAS_GPU else tables.not_shown("what scales is")
    assert outcome.code == 0 and said in outcome.out


def test_the_slowest_process_counts(monkeypatch, small_model):
    """Two processes by name; the other one's numbers are made up."""
    model, called, optimizer = kernel_training.prepare_kernels(tiny())
    monkeypatch.setattr(parallel, "gather", lambda *own: [own, tuple(1e5 + each for each in own)])
    found = scaling.measure_size(called, optimizer, StepSize(1, 4), model.config.vocab_size)
    assert all(1e5 < ms < 2e5 for ms in found["step_ms"])


def test_a_profile_is_of_the_process_that_waits_least(monkeypatch):
    own, other = (dict.fromkeys(scaling_tables.IN_PROFILE, us) for us in (9.0, 5.0))
    monkeypatch.setattr("harness.cli.device.HAS_GPU", True)
    monkeypatch.setattr("harness.steps.measured.measure", lambda *args: row("", 1, 4, 100))
    monkeypatch.setattr("harness.profiling.profiler.timeline", lambda *args: (None, own))
    one = scaling.measure_size(None, None, StepSize(1, 4), 10)
    monkeypatch.setattr(parallel, "gather", lambda *us: [us, tuple(other.values())])
    two = scaling.measure_size(None, None, StepSize(1, 4), 10)
    assert own.items() <= one.items() and other.items() <= two.items()


def test_processes_take_different_sequences_of_one_model(monkeypatch, small_model):
    drawn, weights = [], []

    def measure(called, *rest):
        drawn.append(torch.randint(1000, (8,)).tolist())
        weights.append(called.model.embed_tokens.weight.sum().item())
        return {"failure": "the GPU's memory"}

    monkeypatch.setattr(scaling, "measure_size", measure)
    for rank in (0, 1):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        list(scaling.rows_of(tiny(), SIZES, {}))
    assert drawn[0] != drawn[1] and weights[0] == weights[1]
