"""What limits a part of the step and what could be gained: made-up, recorded and real steps."""

import copy
import itertools
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import profile_baseline
from harness.cli.command_line import UserError
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.tables import OF_STEPS, TIMES_OF_KERNELS, not_shown
from harness.cli.workload import Workload
from harness.data import dataset
from harness.model import architecture
from harness.model import loading as loading_module
from harness.profiling import diagnose, profile_tables, profiler, roofline
from harness.profiling.diagnose import RUNG_OF_CATEGORY
from harness.profiling.kernel_facts import CATEGORIES, DEQUANTIZATION, KERNELS, RUNGS
from harness.records.run_records import read_record
from harness.steps import stepping
from next_steps.comparisons import compare_profiles
from tests.conftest import assert_refused, tracked
from tests.costs_test import SIZES
from tests.fixtures import needs_gpu
from tests.small_workloads import MADE_UP
from tools.page_records import RESULTS

# ---------------------------------------------------------------- hand-made records


def part(us: float, n_bytes: float = 0.0, flops: float = 0.0, launches: int = 1) -> dict:
    return {"us": us, "launches": launches, "bytes": n_bytes, "flops": flops}


def made_up(**categories: dict) -> dict:
    """A record of 1 ms steps, on a GPU that copies 1,000 bytes and does 100,000 FLOPs in 1 us."""
    rows = [{"name": f"aten::{name}", "calls": 1, **each} for name, each in categories.items()]
    return Workload(model="tiny", seq_len=2).as_record() | {
        "kind": "profile",
        "environment": MADE_UP,
        "parameters": 1,
        "device": "CUDA",
        "operations": rows,
        "categories": categories,
        "phases": {"other": {"us": 1.0, "launches": 1}},
        "busy_us": 900.0,
        "ceilings": {"copy_gbs": 1.0, "matmul_tflops": 0.1},
        "sizes": asdict(SIZES),
        "timeline": {"step_ms": 1.01, "idle_us": 0.0, "synchronization_us": 0.0, "host_us": 0.0},
        "step_ms": [1.0],
        "median_step_ms": 1.0,
        "profiled_step_ms": 1.5,
        "resting_memory_bytes": 1e9,
        "peak_memory_bytes": 2e9,
        "trace": "x.json",
        "trace_bytes": 1_000_000,
    }


def waiting(
    record: dict, idle_us: float, synchronization_us: float = 0.0, host_us: float = 10.0
) -> dict:
    idle = {"idle_us": idle_us, "synchronization_us": synchronization_us, "host_us": host_us}
    return record | {"timeline": {"step_ms": 1.01, **idle}}


def test_fp8_has_a_ceiling_of_its_own_and_the_power_stands_beside_the_ceilings():
    record = made_up(matmul=part(100.0, n_bytes=20e3, flops=8e6) | {"fp8_flops": 6e6})
    record["ceilings"]["fp8_tflops"] = 0.2
    (matmul,) = diagnose.judge_categories(record).values()
    assert matmul.flops_us == pytest.approx(2e6 / 0.1e6 + 6e6 / 0.2e6)
    line = profile_tables.ceilings_line(record)
    assert "FP8 matmul 200.0 GFLOP/s (back to back); they meet at 100 FLOP/byte" in line
    del record["ceilings"]["fp8_tflops"]  # of a CPU
    (matmul,) = diagnose.judge_categories(record).values()
    assert matmul.flops_us == pytest.approx(8e6 / 0.1e6)
    # the power of the steps stands beside the ceilings
    assert "Power" not in profile_tables.diagnosis(record)
    reading = {"watts": 690.0, "mhz": 1500.0, "readings": 9}
    for power, said in ((reading, "690 W at 1,500 MHz"), (None, "not known (")):
        text = profile_tables.diagnosis(record | {"power": power})
        assert f"Power and clock during the steps: {said}" in text


def test_the_verdict_is_the_ceiling_that_takes_longer():
    record = made_up(
        matmul=part(100.0, n_bytes=20e3, flops=8e6), attention=part(100.0, n_bytes=60e3, flops=5e6),
        loss=part(100.0, n_bytes=50e3, flops=1e5),
    )  # fmt: skip
    matmul, attention, loss = diagnose.judge_categories(record).values()
    assert matmul.verdict == "compute-bound"
    assert attention.verdict == loss.verdict == "bandwidth-bound"
    assert [f.share for f in (matmul, attention, loss)] == pytest.approx([0.8, 0.6, 0.5])
    assert profile_tables.achieved(matmul) == "80.0 GFLOP/s"
    assert profile_tables.achieved(attention) == "0.6 GB/s"


def test_short_kernels_are_launch_bound_where_the_gpu_waits():
    for idle_us, launches, verdict in (
        (100.0, 20, "launch-bound"), (100.0, 5, "bandwidth-bound"), (10.0, 20, "bandwidth-bound"),
    ):  # fmt: skip
        record = waiting(made_up(loss=part(100.0, n_bytes=50e3, launches=launches)), idle_us)
        assert diagnose.judge_categories(record)["loss"].verdict == verdict


def test_a_gain_is_the_time_beyond_what_is_necessary_at_90_percent():
    matmul = part(100.0, n_bytes=1e3, flops=4.5e6)
    record = made_up(optimizer=part(100.0, n_bytes=80e3), matmul=matmul)
    optimizer, matmul = diagnose.ranking(record)
    assert optimizer.necessary == 7 * 1000 and optimizer.target_us == pytest.approx(7 / 0.9)
    assert optimizer.gain_us == pytest.approx(100 - 7 / 0.9)
    assert matmul.necessary is None and matmul.gain_us == pytest.approx(100 - 45 / 0.9)
    text = profile_tables.diagnosis(record)
    largest = "optimizer, 0.1 of 1.0 ms, bandwidth-bound: it moves 0.1 MB, 0.0 are"
    assert f"Largest recoverable cost:  {largest}" in text
    assert "What to do about it:       --kernels adamw" in text
    gain = r"at 90 % of the copy rate 0.0 ms instead of 0.1: step -9.2 % \(Amdahl\)"
    assert re.search(rf"What it should gain: +{gain}", text)
    in_use, *_ = diagnose.ranking(record | {"kernels": ["adamw"]})  # is not advised again
    assert in_use.advice == "its kernel is on; benchmark_kernels.py --kernel adamw"


def test_no_part_gains_more_than_the_step_it_was_measured_in_and_none_at_its_ceiling():
    """A GPU's kernels may run beside each other."""
    record = made_up(optimizer=part(64_000.0, n_bytes=8e3)) | {"busy_us": 64e3}
    assert "step -100.0 % (Amdahl)" in profile_tables.diagnosis(record)
    record = made_up(matmul=part(100.0, n_bytes=1e3, flops=9.5e6))  # at its ceiling
    assert diagnose.ranking(record) == []
    nothing = "no part of it could make the step 0.1 % shorter."
    assert profile_tables.diagnosis(record).endswith(nothing)


def test_idle_time_is_a_cost_of_its_own_without_the_waiting_that_the_recording_adds():
    record = waiting(made_up(optimizer=part(100.0, n_bytes=8e3)), 300.0, synchronization_us=120.0)
    record["busy_us"] = 700.0
    launches, synchronization, optimizer = diagnose.ranking(record)
    assert (launches.verdict, launches.gain_us) == ("launch-bound", 180.0)
    assert (synchronization.verdict, synchronization.gain_us) == ("host-synchronization", 120.0)
    assert optimizer.name == "optimizer"
    text = profile_tables.diagnosis(record)
    what_to_do = profile_tables.decision(record, [launches])[1]
    assert "finetune_optimized.py --kernels all --cuda-graph" in what_to_do
    assert "0.0 ms instead of 0.2: step -18.0 %" in text
    for flag in ("cuda_graph", "pack", "offload"):  # where there can be no graph
        assert diagnose.losses(record | {flag: True})[0].advice == diagnose.MORE_TOKENS
    assert "about 9.9 us from one launch to the next" in text
    record["timeline"]["step_ms"] = 1.25  # 1.00 unrecorded, in 0.90 of which the GPU is busy
    record["busy_us"] = 900.0
    launches, synchronization = diagnose.losses(record)
    assert (launches.us, synchronization.us) == pytest.approx((60.0, 40.0))
    assert diagnose.host_us(record) == pytest.approx(8.0)
    # gaps between kernels that were queued are the GPU's own
    assert diagnose.idle_us(waiting(record, 30.0)) == 30.0


@pytest.mark.parametrize("exposed_us", [0.0, 50.0, 51.0])
def test_exposed_communication_is_a_cost_from_a_twentieth_of_the_step_on(exposed_us):
    record = made_up(optimizer=part(5.0, n_bytes=5e3), communication=part(300.0, n_bytes=1e3))
    record["timeline"] |= {"communication_us": 300.0, "exposed_us": exposed_us}
    assert list(diagnose.judge_categories(record)) == ["optimizer"]
    found = [(f.verdict, f.gain_us) for f in diagnose.ranking(record)]
    assert found == ([("communication-bound", 51.0)] if exposed_us > 50 else [])
    text = profile_tables.diagnosis(record)
    assert ("communication-bound" in text) == ("more tokens a step" in text) == (exposed_us > 50)
    assert "Communication: 0.3 ms, of which other kernels hide" in text
    assert "Communication" not in profile_tables.diagnosis(made_up(loss=part(5.0, n_bytes=5e3)))


def test_every_kernel_is_known_to_replace_something_and_every_advised_flag_exists():
    assert diagnose.replaced_by(KERNELS) == set(RUNG_OF_CATEGORY) <= set(CATEGORIES)
    assert diagnose.replaced_by([]) == set() and {rung.name for rung in RUNGS} <= set(KERNELS)
    for category, rung in RUNG_OF_CATEGORY.items():
        advice = diagnose.advice_for(category, {"kernels": []})
        assert advice == f"--kernels {rung.name}"
        assert profile_baseline.parse_args(advice.split()).kernels == [rung.name]
    assert profile_baseline.parse_args(["--batch-size", "2", "--seq-len", "32"])
    assert "(--batch-size, --seq-len)" in diagnose.advice_for(DEQUANTIZATION, {"kernels": []})


def loading(record: dict, alone_ms: float, waited_ms: float) -> dict:
    measured = {"alone_ms": alone_ms, "resident_ms": 1.0, "together_ms": 1.0 + waited_ms}
    return record | {"loading": measured | {"waited_ms": waited_ms}, "host_waits": []}


@pytest.mark.parametrize(
    ("alone_ms", "waited_ms", "verdict", "advice"),
    [
        (0.5, 0.01, "both together take no longer than the resident batch, it is not", None),
        (3.0, 3.0, "both together and the loader alone take longer than the step: load", "faster"),
        (3.0, 2.0, "both together and the loader alone take longer than the step: load", "faster"),
        (0.5, 0.5, "loader-bound, for it does not work ahead", "let a worker build the next"),
    ],
    ids=["fast", "slow", "slow, though ahead", "not ahead"],
)
def test_three_measurements_tell_the_loader_from_the_step(alone_ms, waited_ms, verdict, advice):
    record = loading(made_up(optimizer=part(100.0, n_bytes=8e3)), alone_ms, waited_ms)
    first, *others = diagnose.ranking(record)
    text = profile_tables.diagnosis(record)
    assert verdict in text and ("loader-bound" in text) == (advice is not None)
    if advice is None:
        assert first.name == "optimizer" and not others
        return
    assert (first.verdict, first.us) == ("loader-bound", 1e3 * waited_ms) and advice in first.advice
    share = f"step {-100 * waited_ms / (1 + waited_ms):.1f} % (Amdahl)"
    assert "Largest recoverable cost:  Waiting for data" in text and share in text


@pytest.mark.parametrize(
    ("idle_us", "found", "verdict"),
    [
        (300.0, 0, "2. Does the host wait for the GPU in the step?  No: no operation does."),
        (300.0, 32, "and then the GPU for the host: host-synchronization at 32 x aten::item (forw"),
        (0.0, 32, "Yes, while the GPU had enough to do: 32 x aten::item (forward)."),
        (None, 32, "It would, on a GPU: host-synchronization at 32 x aten::item (forward)."),
    ],
    ids=["none", "idle", "busy", "no GPU"],
)
def test_the_operation_that_waits_is_named(idle_us, found, verdict):
    record = loading(made_up(optimizer=part(100.0, n_bytes=8e3)), 0.0, 0.0) | {"busy_us": 600.0}
    record["host_waits"] = [{"name": "aten::item", "phase": "forward", "calls": found}][:found]
    if idle_us is None:
        record |= {"timeline": None, "device": "CPU"}
    else:
        record = waiting(record, idle_us, synchronization_us=idle_us)
    assert verdict in profile_tables.diagnosis(record)
    if idle_us and found:
        advice = "after the step, not in it: 32 x aten::item (forward)"
        assert diagnose.ranking(record)[0].advice == advice


# ---------------------------------------------------------------- recorded steps


def recorded(size: str, suffix: str = "") -> dict:
    return json.loads((RESULTS / f"profile_{size}{suffix}.json").read_text())


def test_the_8b_baseline_at_1_x_512_names_the_optimizer_first():
    record = recorded("1x512")
    findings = diagnose.ranking(record)
    assert findings[0].name == "optimizer"
    assert profile_tables.decision(record, findings)[1].endswith("--kernels adamw")


def test_the_prediction_was_right_where_it_could_be_checked():
    """RMSNorm and cross-entropy at 4 x 2048, against the recorded re-profile."""
    before, after = recorded("4x2048"), recorded("4x2048", "_both")
    predicted = compare_profiles.predicted_gains(before, after)
    assert set(predicted) == {"normalization", "loss"}
    for name, gain_us in predicted.items():
        measured_us = before["categories"][name]["us"] - after["categories"][name]["us"]
        assert gain_us == pytest.approx(measured_us, rel=0.1), name


def test_the_ranking_at_4_x_2048_is_the_ladders():
    ladder = json.loads((RESULTS / "ladder_4x2048.json").read_text())
    steps = {rung["name"]: rung for rung in ladder["rungs"]}
    names = ["baseline", *(rung.name for rung in RUNGS)]

    def gain(before: str, after: str) -> tuple[float, float]:
        """At least and at most, by the spread of both steps."""
        before, after = steps[before], steps[after]
        return before["p20_ms"] - after["p80_ms"], before["p80_ms"] - after["p20_ms"]

    pairs = [(before, rung) for before, rung in zip(names, RUNGS) if rung.category]
    measured = {rung.category: gain(before, rung.name) for before, rung in pairs}
    record = recorded("4x2048")
    record["ceilings"]["copy_gbs"] = ladder["copy_gbs"]
    categories_ms = ladder["categories_ms"]
    for name, part in record["categories"].items():
        part["us"] = 1e3 * categories_ms.pop(name)
    assert not any(categories_ms.values())  # what the older profile does not list took no time
    predicted = [f.name for f in diagnose.ranking(record) if f.name in measured]
    assert set(predicted) == set(measured)
    told_apart = 0
    for larger, smaller in itertools.combinations(predicted, 2):
        assert measured[larger][1] > measured[smaller][0], (larger, smaller)
        told_apart += measured[larger][0] > measured[smaller][1]
    assert told_apart >= 7  # of 10: the spread does not excuse everything


def test_recording_kernels_alone_costs_a_recorded_step_less_than_a_tenth():
    """If the GPU waits for the host, recording costs more, and the record says how much."""
    for path in tracked("results/profile_*.json"):
        record = json.loads(path.read_text())
        if record.get("timeline") and not diagnose.waits(record):
            assert record["timeline"]["step_ms"] < 1.1 * record["median_step_ms"], path.name


# ---------------------------------------------------------------- what is printed


def before_and_after() -> tuple[dict, dict]:
    optimizer, loss = part(400.0, n_bytes=2e5), part(100.0, n_bytes=5e4)
    before = made_up(optimizer=optimizer, loss=loss, matmul=part(300.0, 1e3, 2.9e7))
    after = copy.deepcopy(before) | {"kernels": ["adamw"]}
    after |= {"median_step_ms": 0.65, "step_ms": [0.6, 0.65, 0.7]}
    after["categories"]["optimizer"] = part(10.0, n_bytes=7e3)
    after["operations"][0] = {"name": "_adamw_kernel", "calls": 1, **part(10.0, n_bytes=7e3)}
    return before, after


def cells(text: str, name: str) -> list[str]:
    """The columns of the row called `name` of a table, which may go on below."""
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    return [name, *(cell for first, *others in rows if first == name for cell in others)]


def test_a_comparison_has_the_prediction_beside_what_was_measured():
    text = compare_profiles.render_comparison(*before_and_after())
    # 400 - 7 / 0.9
    assert cells(text, "optimizer")[:5] == ["optimizer", "0.400", "0.010", "0.390", "0.392"]
    assert cells(text, "loss")[:4] == ["loss", "0.100", "0.100", "0.000"] and "0.044" not in text
    assert cells(text, "Step") == ["Step", "1.000", "0.650", "0.350", "0.392"]
    assert cells(text, "p20 to p80 of Step")[1:] == ["1.0 to 1.0", "0.6 to 0.7"]
    assert "Went away: aten::optimizer 0.400 ms" in text
    assert "Came:      _adamw_kernel 0.010 ms" in text
    assert "custom kernels: adamw" in text

    before, after = before_and_after()  # a step that gained less than its spread gained nothing
    after["step_ms"] = [0.6, 0.65, 1.2]  # 80th percentile: 0.98
    before["step_ms"] = [0.96, 1.0, 1.1]  # 20th percentile: 0.976
    text = compare_profiles.render_comparison(before, after)
    assert cells(text, "Step")[3:] == ["no difference", "0.392"]
    record = made_up(loss=part(900.0, n_bytes=5e5))
    for said in (profile_baseline.render(record), text):  # which times have the host in them
        assert TIMES_OF_KERNELS in said and OF_STEPS in said
    assert TIMES_OF_KERNELS in profile_tables.diagnosis(record)


@pytest.mark.parametrize(
    ("key", "value"),
    [("seq_len", 4), ("model", "other"), ("dtype", "fp32"), ("device", "CPU"), ("first_layers", 1)],
)
def test_profiles_of_different_workloads_are_not_compared(key, value):
    before, after = before_and_after()
    with pytest.raises(UserError, match=f"not of one workload: {key} {value}"):
        compare_profiles.render_comparison(before, after | {key: value})


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.fixture
def compare(run_script, tmp_path):
    """compare(before, after, *flags): the outcome of comparing before.json with after.json."""
    paths = [tmp_path / "before.json", tmp_path / "after.json"]

    def run(before: dict, after: dict, *flags: str):
        for path, record in zip(paths, (before, after)):
            path.write_text(json.dumps(record))
        return run_script(compare_profiles, *map(str, paths), *flags)

    return run


@pytest.mark.exhaustive
def test_both_profiles_are_drawn_in_one_picture(compare, tmp_path):
    records, picture = before_and_after(), tmp_path / "roofline.png"
    for record in records:
        record["categories"]["optimizer"]["flops"] = 1e4
        record["categories"]["loss"]["flops"] = 0.0  # copies alone have no place under the roof
    outcome = compare(*records, "--plot", str(picture))
    assert (outcome.code, outcome.err) == (0, "")
    assert "What the kernels changed" in outcome.out and f"Plot written to {picture}" in outcome.out
    assert is_picture(picture)


@pytest.fixture
def texts_of_roofline(tmp_path, pyplot):
    """Draws records, and returns what is written in the picture."""

    def draw(records):
        roofline.plot(records, str(tmp_path / "roofline.png"))
        (axis,) = pyplot.gcf().axes
        return [*(text.get_text() for text in axis.texts), axis.get_title()]

    return draw


def test_the_roofline_has_what_only_one_of_two_profiles_has(texts_of_roofline):
    before, after = before_and_after()
    before["categories"]["activation"] = part(100.0, n_bytes=20e3, flops=1e4)
    after["categories"]["fp8 casts"] = part(100.0, n_bytes=20e3, flops=1e4)
    said = texts_of_roofline([before, after | {"fp8": "all", "fp8_layers": [1, 1]}])
    assert any(t.startswith("activation") and t.endswith("→ other kernels") for t in said)
    assert any(t.startswith("fp8 casts: 0.1 ms") for t in said)
    assert any("fp8 in 1 of 1 layers" in t for t in said)


ROW = {"us": 1, "launches": 1, "bytes": 1, "flops": 1}
DAMAGES = "removed", None, "x", [], {}, [{}], {"matmul": {}}


@pytest.mark.parametrize("which", [0, 1])
def test_a_profile_of_which_a_part_is_missing_is_one_sentence(compare, which):
    """Whatever part, and in whichever of the two; those that are not read may be anything."""
    whole = recorded("1x512")
    refused = set()
    for key, damage in itertools.product(whole.keys() - {"kind"}, DAMAGES):
        records = [whole, whole]
        records[which] = {name: value for name, value in whole.items() if name != key}
        records[which] |= {} if damage == "removed" else {key: damage}
        outcome = compare(*records)
        if outcome.code == 2 and "is a damaged record" in outcome.err:
            refused.add(key)
            assert_refused(outcome, key, ("before.json", "after.json")[which])
            assert not outcome.out
        else:
            assert outcome.code == 0 or "not of one workload" in outcome.err
    assert {"operations", "categories", "median_step_ms", "sizes", "timeline"} <= refused


@pytest.mark.parametrize(
    ("key", "within", "value"),
    [
        ("ceilings", "copy_gbs", 0),
        ("ceilings", "matmul_tflops", 0),
        ("ceilings", "fp8_tflops", "x"),
        ("categories", "matmul", ROW | {"fp8_flops": None}),
        ("categories", "matmul", ROW | {"us": 10**400}),
    ],
    ids=str,
)
def test_a_number_that_nothing_can_be_divided_by_is_one_sentence(compare, key, within, value):
    record = recorded("1x512")
    record[key][within] = value
    assert_refused(compare(record, record), f"is a damaged record, without a usable {key}")


# ---------------------------------------------------------------- real runs


@pytest.mark.exhaustive
def test_a_diagnosis_is_printed_and_drawn_on_a_cpu_of_bytes_alone(
    run_script, tmp_path, monkeypatch
):
    monkeypatch.setattr(profile_baseline, "TIMED_STEPS", 1)
    files = {"json": "json", "trace": "trace", "plot": "plot.png"}
    outputs = [f"--{flag}={tmp_path / name}" for flag, name in files.items()]
    small = ["--model", "tiny", "--seq-len", "8", "--warmup", "1"]
    outcome = run_script(profile_baseline, *small, "--kernels", "rmsnorm", *outputs)
    assert outcome.code == 0, outcome.err
    record = read_record(str(tmp_path / "json"), "profile")
    assert profile_tables.diagnosis(record) in outcome.out
    assert len(diagnose.judge_categories(record)) >= 7
    if record["device"] == "CPU":
        says = not_shown("ceilings, verdicts and gains are"), not_shown("the roofline is")
        assert all(sentence in outcome.out for sentence in says)
        assert not (tmp_path / "plot.png").exists()
        assert "normalization" not in diagnose.judge_categories(record)
        assert not re.search(r"\d (ms|us|GB/s|.?FLOP/s|%)|-bound|nothing is left", outcome.out)
    else:
        assert is_picture(tmp_path / "plot.png")
        assert outcome.out.count("\nLargest recoverable cost:  ") == 1


# ---------------------------------------------------------------- planted causes


def profile_tiny(tmp_path) -> tuple[dict, str]:
    """The record of a small profile, and what it says of waiting."""
    workload = Workload(model="tiny", dtype="fp32", seq_len=8, warmup=1)
    record = profile_baseline.profile_training(workload, str(tmp_path / "trace.json"), False)
    return record, "\n".join(profile_tables.waiting_lines(record))


SLEEP_MS = 300.0  # far longer than a step of the tiny model


def test_a_slow_loader_is_named(tmp_path, monkeypatch):
    load_data = dataset.load_data

    class Slow(list):
        def __getitem__(self, number):
            if number >= profile_baseline.TIMED_STEPS + profile_baseline.PROFILED_STEPS + 1:
                time.sleep(SLEEP_MS / 1e3)
            return super().__getitem__(number)

    def slow_data(*arguments):
        data = load_data(*arguments)
        return replace(data, train=Slow(data.train))

    monkeypatch.setattr(dataset, "load_data", slow_data)
    record, text = profile_tiny(tmp_path)
    measured = record["loading"]
    assert measured["resident_ms"] < SLEEP_MS <= measured["alone_ms"]
    assert SLEEP_MS / 2 < measured["waited_ms"] <= measured["together_ms"]
    assert diagnose.ranking(record)[0].verdict == "loader-bound"
    assert "the loader alone take longer than the step: loader-bound." in text


def test_an_item_in_every_layer_is_named(tmp_path, monkeypatch):
    load_model = loading_module.load_model

    def look(module, inputs):
        print(inputs[0].sum().item())
        time.sleep(0.03)  # so that a batch, half a millisecond, is no share of the step to speak of

    def model_that_looks(*arguments):
        model = load_model(*arguments)
        for layer in model.model.layers:
            layer.register_forward_pre_hook(look)
        return model

    monkeypatch.setattr(loading_module, "load_model", model_that_looks)
    _, text = profile_tiny(tmp_path)
    n_layers = architecture.tiny_config().num_hidden_layers
    assert f"host-synchronization at {n_layers} x aten::item (forward)" in text
    if HAS_GPU:  # a CPU takes no time for the step beside which the loader's would be little
        assert "it is not the loader." in text


class SlowLoader:
    """Each batch takes 40 ms: of the host that asks for it, or of a worker since it was asked."""

    def __init__(self, works_ahead: bool):
        self.worker = ThreadPoolExecutor(1) if works_ahead else None
        self.coming = None

    def fetch(self) -> float:
        start = time.perf_counter()
        if self.worker is None:
            time.sleep(0.04)
        else:
            if self.coming is not None:
                self.coming.result()
            self.coming = self.worker.submit(time.sleep, 0.04)
        return time.perf_counter() - start

    def take(self) -> int:
        return 1


def test_the_waiting_is_what_a_loader_that_works_ahead_leaves():
    """A step takes 80 ms: together 80 where a worker loads, else 120."""
    found = [
        profiler.measure_loading(SlowLoader(ahead), lambda batch: time.sleep(0.08), 80.0)
        for ahead in (False, True)
    ]
    assert all(each["alone_ms"] >= 40 for each in found)
    assert found[0]["waited_ms"] >= 40 and found[0]["together_ms"] >= 120
    assert found[1]["waited_ms"] < 20 and 80 <= found[1]["together_ms"] < found[0]["together_ms"]


@needs_gpu
@pytest.mark.alone
def test_on_a_gpu_recording_kernels_costs_little_and_finds_what_waits(tmp_path, monkeypatch):
    """A model large enough for the GPU to be the slower one; then a step with .item() in it."""
    config = architecture.tiny_config()
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 2048, 8192, 8
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 32, 8, 64
    monkeypatch.setattr(architecture, "tiny_config", lambda: config)
    workload = Workload(model="tiny", batch_size=16, seq_len=2048, warmup=3)
    trace = str(tmp_path / "trace.json")
    record = profile_baseline.profile_training(workload, trace, stacks=False)
    assert record["timeline"]["step_ms"] < 1.1 * record["median_step_ms"]
    assert diagnose.idle_us(record) < 0.2 * 1e3 * record["median_step_ms"]
    findings = diagnose.judge_categories(record)
    no_cache_holds = "matmul", "normalization", "activation", "optimizer"
    for name in no_cache_holds:
        assert 0.4 < findings[name].share <= 1, name
    assert findings["matmul"].verdict == "compute-bound"
    assert findings["optimizer"].verdict == "bandwidth-bound"

    def with_item(model, optimizer, batches):
        for _ in range(20):
            batches[0].input_ids.sum().item()
        return stepping.training_step(model, optimizer, batches)

    model = loading_module.load_model(Workload(model="tiny"))
    batches = [batch.to(DEVICE) for batch in dataset.load_data(workload, config, 2).train]
    optimizer = stepping.make_optimizer(model, 1e-3)
    _, waited = profiler.timeline(model, optimizer, stepping.in_steps(batches, 1), with_item)
    assert waited["synchronization_us"] > 20 * 2
    assert waited["idle_us"] >= waited["synchronization_us"] and waited["host_us"] > 0
