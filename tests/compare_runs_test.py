"""Tests of the comparison: what it calls the same training, and what it refuses to compare."""

import json
import re

import pytest

import compare_runs
from harness.cli.workload import Workload
from harness.records import schema
from tests.small_workloads import MADE_UP


def run(title="Baseline", losses=(3.0, 2.0, 1.0), median_seconds=0.2, **changes):
    """A record, as it was written before steps were profiled; its steps lie within 2 %."""
    seconds = [median_seconds * (1 + 0.01 * (i % 3 - 1)) for i in range(len(losses))]
    sizes = {"batch_size": 1, "seq_len": 8, "steps": len(losses)}
    record = Workload(model="tiny", dtype="fp32", lr=1e-3, **sizes).as_record() | {
        "kind": "finetune",
        "title": title,
        "environment": MADE_UP,
        "losses": list(losses),
        "warmup_steps": 0,
        "seconds": seconds,
        "tokens": [8] * len(losses),
        "median_seconds": median_seconds,
        "tokens_per_second": 40.0,
        "peak_memory_bytes": 4e9,
        "validation_loss_after": 1.5,
    }
    return record | changes


@pytest.fixture
def script(tmp_path, run_script):
    """script(record, ..., flags=[...]) -> (exit code, stdout, stderr) for these records."""

    def compare(*records, flags=()):
        paths = [tmp_path / f"{i}.json" for i in range(len(records))]
        for path, record in zip(paths, records):
            path.write_text(record if isinstance(record, str) else json.dumps(record))
        outcome = run_script(compare_runs, *map(str, paths), *flags)
        return outcome.code, outcome.out, outcome.err

    return compare


def test_ratios_are_to_the_first_run(script):
    faster = run("Optimized", median_seconds=0.1, tokens_per_second=100.0, peak_memory_bytes=1e9)
    code, out, _ = script(run(), faster)
    assert code == 0
    cells = ["0.1000", "0.0994 to 0.1006", "100", "1.0", "2.00x", "2.50x", "0.25x", "1.5000"]
    assert row_of(out, "Optimized") == ["Optimized", *cells]


def row_of(out: str, name: str) -> list[str]:
    """The cells of a run in the printed table, which may go on below."""
    rows = [re.split("  +", line) for line in out.splitlines() if line.startswith(f"{name}  ")]
    return [name, *(cell for _, *cells in rows for cell in cells)]


def test_runs_whose_steps_overlap_do_not_differ(script):
    """By the 20th to 80th percentile of the steps that count."""
    first = run(seconds=[9.0, 0.18, 0.20, 0.22], losses=[2.0] * 4, warmup_steps=1, tokens=[8] * 4)
    for seconds, speedup in (
        ([9.0, 0.20, 0.21, 0.23], "no difference"),  # from 0.204 on; the first up to 0.212
        ([0.2, 0.22, 0.23, 0.24], "0.87x"),  # from 0.224 on: the first step does not count
        ([9.0, 0.22, 0.23, 0.24, 0.2], "0.87x"),  # nor does the last, which was profiled
    ):
        n = len(seconds)
        profiled = {"profiled_steps": 1} if n == 5 else {}
        other = run("Optimized", [2.0] * n, seconds=seconds, tokens=[8] * n, warmup_steps=1)
        other |= {"median_seconds": 0.23, **profiled}
        code, out, _ = script(first, other)
        assert code == 0 and row_of(out, "Optimized")[5] == speedup
        assert row_of(out, "Optimized")[6] == ("1.00x" if speedup != "no difference" else speedup)
        assert row_of(out, "Baseline")[5:7] == ["1.00x", "1.00x"]
        assert "the host is in them" in out


def test_throughput_is_compared_by_the_tokens_of_each_step(script):
    """Twice the tokens in twice the time are no difference, though the steps do not overlap."""
    twice = run("Optimized", median_seconds=0.4, tokens=[16] * 3, batch_size=2)
    _, out, _ = script(run(), twice | {"tokens_per_second": 41.0})
    assert row_of(out, "Optimized")[5:7] == ["0.50x", "no difference"]


@pytest.mark.parametrize(
    ("dtype", "loss", "near", "far"),
    [("fp32", 2.0, 2.0001, 2.0004), ("bf16", 2.0, 2.01, 2.04), ("fp32", 0.0, 0.0, 1e-9)],
)
def test_losses_that_drift_apart_are_found(script, dtype, loss, near, far):
    """By more than 1e-4 of the loss in fp32, and a hundredth in bf16."""
    for other, verdict in [(near, "the same training"), (far, "NOT the same training")]:
        runs = (run(losses=(3.0, each, 1.0), dtype=dtype) for each in (loss, other))
        code, out, err = script(*runs)
        assert code == (other == far) and not err and out.rstrip().endswith(f": {verdict}")


def test_runs_of_different_workloads_are_not_called_the_same_training(script):
    code, out, _ = script(run(), run("Optimized", losses=(9.0, 9.0, 9.0), seed=1, batch_size=2))
    assert code == 0 and "the same training" not in out
    assert "losses are not compared: batch_size 2 (not 1); seed 1 (not 0)" in out


def test_what_a_run_did_otherwise_is_said_beside_its_kernels(script):
    two = {"world_size": 2, "parallel": "ddp", "padding": 0.125}
    two["data_seconds"] = [0.0, 0.006, 0.006]
    _, out, _ = script(run(batch_size=2, padding=0.001), run("Optimized", **two))
    lines = [line.strip() for line in out.splitlines() if "custom kernels" in line]
    assert lines == [
        "custom kernels: none",
        "custom kernels: none; 1 x 8 tokens in each of 2 processes (ddp); padding: 12.5 %; "
        "waiting for data: 2.0 %",
    ]
    assert "the same training" in out  # two sequences a step, both


@pytest.mark.parametrize(
    ("first", "other", "comparable"),
    [
        ({"held_out": "ab"}, {"held_out": "ab", "seed": 1, "batch_size": 4}, True),
        ({"held_out": "ab"}, {"held_out": "cd"}, False),
        # older records do not say which sequences these were, only what decided it
        ({}, {"seed": 1, "model": "other"}, True),
        ({}, {"data": "some.txt"}, False),
        ({}, {"seq_len": 16}, False),
        ({}, {"pack": True}, False),
        ({}, {"batch_size": 4}, False),
        ({"batch_size": 2}, {"world_size": 2, "parallel": "ddp"}, True),
        ({"held_out": "ab"}, {}, True),
        ({"accumulate": 4}, {"accumulate": 2}, True),
        ({"held_out": "ab", "accumulate": 4}, {"accumulate": 4}, False),
    ],
)
def test_validation_losses_on_other_sequences_are_said_to_be_so(script, first, other, comparable):
    code, out, _ = script(run(**first), run("Optimized", **other))
    said = "Optimized: validated on other sequences than Baseline" in out
    assert code == 0 and said == (not comparable)


@pytest.mark.parametrize("apart", [1.0, 1.2])
def test_runs_that_round_otherwise_are_laid_side_by_side_without_a_verdict(script, apart):
    code, out, _ = script(run(), run("FP8", losses=(3.0, 2.0, apart), fp8="all"))
    assert code == 0 and "the same training" not in out
    assert "Relative difference" in out and "fp8 all, not None" in out
    code, out, _ = script(run(fp8="all"), run("FP8", losses=(3.0, 2.0, apart), fp8="all"))
    assert code == (apart != 1.0) and "the same training" in out


@pytest.mark.parametrize(
    ("slowest", "speedup"), [(0.21, "2.00x"), (0.12, "2.00x"), (0.095, "no difference")]
)
def test_repeats_say_whether_two_commands_differ(script, slowest, speedup):
    """By the lowest and the highest run: the first side's runs take 0.2 s and so long."""
    first = [run(median_seconds=0.2, seed=0), run(median_seconds=slowest, seed=1), run(seed=2)]
    other = [run("Optimized", median_seconds=0.1, seed=seed) for seed in range(3)]
    code, out, _ = script(*first, *other, flags=["--repeats", "3"])
    assert code == 0 and row_of(out, "Optimized")[5] == speedup
    assert "of a run" in out and "Optimized, run 3" in out


def test_repeats_whose_losses_drift_apart_are_found(script):
    runs = run(), run(seed=1), run("Optimized"), run("Optimized", losses=(3.0, 2.0, 2.0), seed=1)
    code, out, _ = script(*runs, flags=["--repeats", "2"])
    assert code == 1 and "Optimized, run 2: largest relative" in out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [([{}, {}, {}], "give 2 records of each side"), ([{}, {"lr": 1.0}, {}, {}], "than the seed")],
)
def test_what_is_no_repeat_is_refused(script, changes, sentence):
    code, out, err = script(*(run(**each) for each in changes), flags=["--repeats", "2"])
    assert code == 2 and not out and sentence in err


def test_times_of_a_cpu_are_not_compared(script, tmp_path, pyplot):
    on_cpu = [
        run(title, environment=MADE_UP | {"gpu": None}) for title in ("Baseline", "Optimized")
    ]
    code, out, _ = script(*on_cpu, flags=["--plot", str(tmp_path / "plot.png")])
    assert code == 0 and "the same training" in out
    assert row_of(out, "Optimized") == ["Optimized", "1.5000"]
    assert [axis.get_title() for axis in pyplot.gcf().axes] == ["Loss"]


def test_long_runs_show_their_first_and_last_step(script):
    code, out, _ = script(run(losses=range(1, 102)), run("Optimized", losses=range(1, 102)))
    steps = [line.split()[0] for line in out.splitlines() if line[:1].isdigit()]
    assert code == 0 and (steps[0], steps[-1]) == ("1", "101")
    assert len(steps) <= compare_runs.STEPS_SHOWN + 1


def test_three_runs_are_told_apart(script):
    code, out, _ = script(run(), run("Optimized"), run("Optimized", median_seconds=0.4))
    assert code == 0 and "Optimized 2" in out and "Optimized 3" in out


def test_runs_that_differ_in_dtype_are_named_by_it_and_by_their_validation_loss(script):
    bf16 = run(dtype="bf16", validation_loss_after=1.75), run("Optimized", dtype="bf16")
    code, out, _ = script(run(), *bf16)
    last = {"Baseline fp32": "1.5000", "Baseline bf16": "1.7500", "Optimized": "1.5000"}
    assert code == 0 and {name: row_of(out, name)[-1] for name in last} == last


@pytest.mark.exhaustive
def test_plot_is_a_picture(script, tmp_path):
    picture = tmp_path / "plot.png"
    code, _, _ = script(run(), run("Optimized"), flags=["--plot", str(picture)])
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG")


def test_memory_below_a_gigabyte_is_drawn_in_megabytes(tmp_path, pyplot):
    records = [run(peak_memory_bytes=4e8), run("Optimized", peak_memory_bytes=5e8)]
    compare_runs.plot([[record] for record in records], str(tmp_path / "plot.png"))
    _, _, memory = pyplot.gcf().axes
    assert memory.get_title() == "Peak memory (MB)"
    assert [text.get_text() for text in memory.texts] == ["400.0", "500.0"]


LORA = {"lora_rank": 8, "lora_alpha": 8, "lora_targets": "all"}


def without(record: dict, *keys: str) -> dict:
    return {key: value for key, value in record.items() if key not in keys}


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (None, "at least two records"),
        ({"kind": "profile"}, "is not a 'finetune' record (it is 'profile')"),
        ([1], "is not a 'finetune' record (it is 'list')"),
        ("{", "is not a JSON record"),
        pytest.param("[" * 100_000, "is not a JSON record", id="brackets without end"),
        (
            without(run(), "losses", "environment"),
            "1.json is a damaged record, without a usable environment, losses",
        ),
        *(
            (run() | changed, f"1.json is a damaged record, without a usable {key};")
            for key in ("lora_alpha", "lora_targets")
            for changed in (without(LORA, key), LORA | {key: None})
        ),
        (run(losses=(3.0, 2.0), steps=3), "2 losses of 3 steps"),
        (run(seconds=[0.2]), "1 seconds of 3 steps"),
        (run(warmup_steps=3), "no step of it counts"),
    ],
)
def test_a_record_that_cannot_be_compared_is_one_sentence(script, other, sentence):
    code, out, err = script(run(), *([] if other is None else [other]))
    assert code == 2 and not out and err.startswith("error: ")
    assert err.count("\n") == 1 and sentence in err


@pytest.mark.parametrize(
    "damage",
    [
        *({key: None} for key in schema.KINDS["finetune"]),
        {"losses": []},
        {"losses": "3, 2, 1"},
        {"losses": [3.0, None, 1.0]},
        {"losses": [3.0, 2.0, float("nan")]},
        {"losses": 3.0},
        {"dtype": ["fp32"]},
        {"median_seconds": 0.0},
        {"seconds": [0.2, 0.0, 0.2]},
        {"warmup_steps": -1},
        {"tokens_per_second": "40"},
        {"environment": {"gpu": "Some GPU"}},
        {"kernels": "rmsnorm"},
        {"title": 7},
        {"peak_memory_bytes": 10**400},
        {"data_seconds": None},
        {"padding": "x"},
        {"fp8_layers": [2]},
        {"teacher": 7},
        {"trained_parameters": "x"},
    ],
    ids=str,
)
def test_a_damaged_record_is_one_sentence_with_its_keys(script, damage):
    (key,) = damage
    for records in ([run(), run("Optimized") | damage], [run() | damage, run("Optimized")]):
        code, out, err = script(*records)
        assert code == 2 and not out and err.startswith("error: ") and err.count("\n") == 1
        assert "is a damaged record" in err and key in err
