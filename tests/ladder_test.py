"""The ladder predicts, runs and prints what it says."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace

import pytest

import finetune_baseline
import finetune_optimized
import profile_baseline
from harness.cli import tables
from harness.cli.command_line import RunError
from harness.cli.device import HAS_GPU
from harness.cli.flags import OPPONENTS, FlagParser
from harness.cli.workload import Workload
from harness.profiling.kernel_facts import CATEGORIES, KERNELS
from harness.records import run_records
from next_steps import finetune_options
from next_steps.finetuning import opponent_models, opponents
from next_steps.patches import projections
from next_steps.studies import ladder, prepared
from tests.small_workloads import MADE_UP, SMALL, TINY, small_workload

SCRIPTS = {f"{s.__name__}.py": s for s in (finetune_baseline, finetune_optimized, profile_baseline)}
SCRIPTS |= {opponents.__name__: opponents}
OPTIMIZED, OPPONENT = "finetune_optimized.py", opponents.__name__
FLAGS = {OPTIMIZED: finetune_options.OPTIMIZED, OPPONENT: opponents.FLAGS}
WITHOUT_LORA = [name for name in OPPONENTS if name != "unsloth-fp8"]  # which freezes the weights


def made_up_rung(name, predicted_ms, step_ms, loss=2.0) -> dict:
    kernels = ["Liger-Kernel"] if "Liger" in name else []  # as records say it that are older
    return {
        "name": name, "predicted_ms": predicted_ms, "step_ms": step_ms, "losses": [2.0, loss],
        "tokens_per_second": 8e3 / step_ms, "peak_memory_bytes": 1e8 * step_ms,
        "kernels": [name] if predicted_ms else kernels, "validation_loss_after": 2.0,
        "p20_ms": step_ms - 0.5, "p80_ms": step_ms + 1e3, "busy_ms": None,
    }  # fmt: skip


def made_up_record(gpu: str | None) -> dict:
    rungs = [
        made_up_rung("baseline", None, 100.0),
        made_up_rung("adamw", 70.0, 80.0),
        made_up_rung("rmsnorm", 75.0, 60.0),
        made_up_rung("Liger-Kernel, fused AdamW", None, 90.0, loss=2.02),
        made_up_rung("baseline, CUDA graph", None, 95.0) | {"busy_ms": 91.23},
    ]
    workload = Workload(model="tiny", batch_size=4, seq_len=2, steps=2, lr=1e-5)
    return workload.as_record() | {
        "environment": MADE_UP | {"gpu": gpu}, "parameters": 1234,
        "copy_gbs": 4321.0, "busy_ms": 95.5,
        "rungs": rungs, "absent": ["somebody failed: a sentence"],
    }  # fmt: skip


# ---------------------------------------------------------------- what is printed


def printed_lines(gpu: str | None) -> list[str]:
    return [" ".join(line.split()) for line in ladder.render(made_up_record(gpu)).splitlines()]


def test_the_table_from_a_record(monkeypatch):
    monkeypatch.setattr(tables, "TERMINAL", 200)  # a table in one piece
    lines = printed_lines("Made Up")
    assert "Model: tiny, 1,234 parameters, random weights, bf16; 4 x 2 tokens, 2 steps" in lines[1]
    busy = "4,321 GB/s; the baseline keeps the GPU busy for 95.5 ms of a step"
    assert lines[2] == f"Copy rate measured in this run: {busy}"
    for row in (
        "baseline n/a n/a 100.0 (99.5 to 1,100.0) n/a 80 1.00 10.0 1.00 0.0e+00",
        "+ adamw 30.0 20.0 80.0 (79.5 to 1,080.0) n/a 100 1.25 8.0 0.80 0.0e+00",
        "+ rmsnorm 5.0 20.0 60.0 (59.5 to 1,060.0) n/a 133 1.67 6.0 0.60 0.0e+00",
        "Liger-Kernel, fused AdamW 90.0 (89.5 to 1,090.0) n/a 89 1.11 9.0 0.90 1.0e-02",
        "baseline, CUDA graph 95.0 (94.5 to 1,095.0) 91.2 84 1.05 9.5 0.95 0.0e+00",
    ):
        assert row in lines
    assert lines[-1] == "Not measured: somebody failed: a sentence"


def test_without_a_gpu_the_ladder_tells_losses_alone(tmp_path, capsys):
    lines = printed_lines(None)
    assert tables.not_shown("times and gains are") in lines
    assert {"+ adamw 0.0e+00", "Liger-Kernel, fused AdamW 1.0e-02"} < {*lines}
    assert not any(word in line for line in lines for word in (" ms", "GB", "okens/s", "100.0"))
    assert lines[-1] == "Not measured: somebody failed: a sentence"
    ladder.plot([made_up_record(None)], str(tmp_path / "ladder.png"))
    assert "not shown" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_the_picture_has_every_rung_and_what_was_predicted(tmp_path, pyplot):
    to_hex = pytest.importorskip("matplotlib.colors").to_hex
    record, path = made_up_record("Made Up"), tmp_path / "ladder.png"
    ladder.plot([record, record | {"seq_len": 3}], str(path))
    times, memory, second, _ = pyplot.gcf().axes
    assert path.read_bytes().startswith(b"\x89PNG")
    names = [label.get_text() for label in times.get_yticklabels()]
    others = ["baseline, CUDA graph", "Liger-Kernel, fused AdamW"]
    assert names == [*others, "+ rmsnorm", "+ adamw", "baseline"]
    assert [text.get_text() for text in times.texts] == ["95.0", "90.0", "60.0", "80.0", "100.0"]
    assert [text.get_text() for text in memory.texts] == ["9.5", "9.0", "6.0", "8.0", "10.0"]
    colours = [to_hex(bar.get_facecolor()).upper() for bar in times.patches]
    grey, blue, orange = ladder.BASELINE_COLOUR, ladder.OPPONENT_COLOUR, ladder.OUR_COLOUR
    assert colours == [grey, blue, orange, orange, grey]
    assert list(times.lines[-1].get_xdata()) == [None, None, 75.0, 70.0, None]
    assert (times.get_title("left"), second.get_title("left")) == ("4 x 2 tokens", "4 x 3 tokens")


def test_the_strongest_other_is_the_fastest_without_a_kernel_of_ours():
    record = made_up_record("Made Up")
    assert ladder.strongest(record)["name"] == "Liger-Kernel, fused AdamW"
    two = made_up_rung("rmsnorm + cross_entropy", None, 1.0) | {"kernels": ["rmsnorm"]}
    record["rungs"] += [two, made_up_rung("torch.compile, fused AdamW", None, 89.0)]
    record["rungs"] += [made_up_rung(name, None, 2.0) for name in ladder.FLOAT8]
    assert ladder.strongest(record)["name"] == "torch.compile, fused AdamW"


# ---------------------------------------------------------------- the prediction


def ladder_of_a_made_up_gpu(
    monkeypatch, step_ms: Iterable[float], has_gpu: bool, liger: bool, tmp_path, *flags: str
) -> tuple:
    """(record, calls of run_script): a run takes the next of these times, then 50 ms."""
    calls, times = [], iter(step_ms)
    categories = {name: {"us": 1e3 * i, "launches": 1} for i, name in enumerate(CATEGORIES)}

    def run_script(process, script, workload, *flags):
        calls.append((script, *ladder.own_flags(workload), *flags))
        if script == "profile_baseline.py":
            return {"categories": categories, "busy_us": 80e3, "ceilings": {"copy_gbs": 0.5}}
        if workload.opponent == "liger" and not liger:
            raise RunError("one opponent failed")
        seconds = next(times, 50.0) / 1e3
        return workload.as_record() | {
            "parameters": 7, "warmup_steps": 1, "steps": 7, "lr": 1e-3, "losses": [2.0, 1.5],
            "p20_seconds": 2.0, "p80_seconds": 5.0, "busy_ms": 40.0,
            "median_seconds": seconds, "tokens_per_second": 8 / seconds,
            "peak_memory_bytes": 10**9, "validation_loss_after": 1.0,
        }  # fmt: skip

    monkeypatch.setattr(prepared, "WAIT", "")
    monkeypatch.setattr(ladder, "run_script", run_script)
    monkeypatch.setattr("harness.cli.device.HAS_GPU", has_gpu)
    monkeypatch.setattr(run_records, "environment", lambda: MADE_UP)
    path = tmp_path / "ladder.json"
    ladder.run_ladder(small_workload(*flags), str(path), None)
    return run_records.read_record(str(path), "ladder"), calls


@pytest.mark.parametrize("last_ms", [81.0, 5.0])
def test_a_gain_is_predicted_from_the_profile_and_the_copy_rate(monkeypatch, tmp_path, last_ms):
    """A category's time, less what its remaining bytes take at 0.5 GB/s (500,000 bytes/ms)."""
    times = [100.0, 90.0, 85.0, 84.0, 83.0, 82.0, last_ms, 60.0]
    record, _ = ladder_of_a_made_up_gpu(monkeypatch, times, True, True, tmp_path)
    tokens, width = 8, 4
    stream, heads = 2 * tokens * 64 * width, 2 * tokens * (4 + 2) * 16 * width
    inner, logits, weights = 2 * tokens * 160 * width, tokens * 257 * width, 119_232 * width
    taken = {name: float(i) for i, name in enumerate(CATEGORIES)}
    gains = [
        taken["optimizer"] - 7 * weights / 5e5,
        taken["normalization"] - 10 * stream / 5e5,
        taken["rotary"] - 4 * heads / 5e5,
        taken["activation"] - 9 * inner / 5e5,
        taken["loss"] - 2 * logits / 5e5,
        2 * stream / 5e5,
    ]
    assert [rung["step_ms"] for rung in record["rungs"]][:8] == pytest.approx(times)
    predicted = [rung["predicted_ms"] for rung in record["rungs"]]
    assert predicted[0] is None and set(predicted[8:]) == {None}
    assert predicted[1:7] == pytest.approx([before - gain for before, gain in zip(times, gains)])
    # a graph leaves the time in which the GPU is busy, and is not predicted to be slower
    assert predicted[7] == pytest.approx(min(80.0 - sum(gains), last_ms))
    assert record["busy_ms"] == 80.0 and record["categories_ms"] == taken


@pytest.mark.parametrize("has_gpu", [True, False])
def test_each_rung_adds_one_kernel_and_then_come_the_others(monkeypatch, tmp_path, has_gpu, capsys):
    world = [], has_gpu, False, tmp_path, "--dtype", "bf16"
    record, calls = ladder_of_a_made_up_gpu(monkeypatch, *world)
    names = [rung.name for rung in ladder.RUNGS]
    assert [script for script, *_ in calls[:2]] == ["profile_baseline.py", "finetune_baseline.py"]
    ours, two = OPTIMIZED, ("--kernels", "rmsnorm,cross_entropy")
    every = ours, "--kernels", ",".join(KERNELS)
    expected = [
        *((ours, "--kernels", ",".join(names[: n + 1])) for n in range(len(names))),
        (*every, "--cuda-graph"),
        ("finetune_baseline.py", "--cuda-graph"),
        (ours, *two),
        (ours, *two, "--cuda-graph"),
        *((OPPONENT, "--opponent", name) for name in WITHOUT_LORA),
        (OPPONENT, "--cuda-graph", "--opponent", "liger"),
        *([(*every, "--fp8", "all")] if has_gpu else []),
        (*every, "--fp8", "all", "--cuda-graph"),
    ]
    assert calls[2:] == [call for call in expected if has_gpu or "--cuda-graph" not in call]
    for script, *flags in calls[2:]:
        if script in FLAGS:  # and takes what it is given
            FlagParser("", FLAGS[script]).parse_args([*TINY, "--dtype", "bf16", *flags])
    printed = capsys.readouterr().out
    assert f"The ladder is {len(calls)} runs, each in a process of its own" in printed
    assert f"minutes in all:\n1 of {len(calls)}: profile" in printed or has_gpu
    announced = re.findall(rf"^(\d+) of {len(calls)}: ", printed, flags=re.MULTILINE)
    assert [*map(int, announced)] == [*range(1, len(calls) + 1)]
    assert record["absent"] == ["one opponent failed"] * (1 + has_gpu)
    assert printed.count("Not measured: one opponent failed") == 1 + has_gpu
    assert ladder.render(record) in printed
    assert printed.startswith(tables.NO_GPU_NOTE) == (not has_gpu)
    titles = [OPPONENTS[name] for name in WITHOUT_LORA if name != "liger"]
    ours = "rmsnorm + cross_entropy"
    fp8 = ["all kernels, fp8", "all kernels, fp8, CUDA graph"]
    with_graphs = ["baseline, CUDA graph", ours, f"{ours}, CUDA graph", *titles, *fp8]
    _, after = ladder.blocks(record)
    assert [each["name"] for each in after] == (with_graphs if has_gpu else [ours, *titles])
    of_runs = {
        tuple(rung[key] for key in ("p20_ms", "p80_ms", "busy_ms")) for rung in record["rungs"]
    }
    assert of_runs == {(2000.0, 5000.0, 40.0)}


def test_a_ladder_that_is_ended_leaves_the_runs_that_it_made(monkeypatch, tmp_path):
    def then_ctrl_c():
        yield from (100.0, 90.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ladder_of_a_made_up_gpu(monkeypatch, then_ctrl_c(), True, True, tmp_path)
    record = run_records.read_record(str(tmp_path / "ladder.json"), "ladder")
    assert [rung["name"] for rung in record["rungs"]] == ["baseline", ladder.RUNGS[0].name]


TOO_OLD = "A100 is of sm_80, and GPUs multiply FP8 from sm_89 on: leave FP8 out."


@pytest.mark.parametrize(
    ("flags", "support", "said"),
    [
        ([], None, "--fp8 stands for products of bf16, and --dtype is fp32"),
        (["--dtype", "bf16"], TOO_OLD, f"--fp8: {TOO_OLD}"),
    ],
    ids=["fp32", "an older GPU"],
)
def test_fp8_is_left_out_with_a_reason_where_it_is_refused(
    monkeypatch, tmp_path, capsys, flags, support, said
):
    monkeypatch.setattr(projections, "fp8_support", lambda: support)
    record, calls = ladder_of_a_made_up_gpu(monkeypatch, [], True, True, tmp_path, *flags)
    assert not any("--fp8" in call for call in calls)
    (absent,) = record["absent"]
    assert absent.startswith(f"all kernels, fp8: {said}")
    printed = capsys.readouterr().out
    assert f"Not measured: {absent}" in printed and f"is {len(calls)} runs" in printed


# ---------------------------------------------------------------- real runs


def absent_opponent(workload, *files):
    raise RunError("not run here")


@pytest.mark.exhaustive
def test_a_real_ladder(monkeypatch, tmp_path, capsys, small_model, little_validation):
    """All scripts run in this process: nine processes would import PyTorch for most of a minute."""

    def run_script(process, script, workload, *flags):
        path = tmp_path / "record.json"
        flags = [*workload.as_flags(), *flags, "--json", str(path)]
        monkeypatch.setattr("sys.argv", [script, *map(str, flags)])
        SCRIPTS[script].main()
        return json.loads(path.read_text())

    monkeypatch.setattr(prepared, "WAIT", "")
    monkeypatch.setattr(ladder, "run_script", run_script)
    # Liger-Kernel would stay patched into transformers for later tests, and compiling takes a
    # minute: kernel_training_test.py has the opponents
    monkeypatch.setattr(opponent_models, "train_opponent", absent_opponent)
    path = tmp_path / "ladder.json"
    monkeypatch.setattr("sys.argv", ["ladder.py", *SMALL, "--json", str(path)])
    ladder.main()
    record = run_records.read_record(str(path), "ladder")
    assert ladder.render(record) in capsys.readouterr().out
    names = ["baseline", *(rung.name for rung in ladder.RUNGS)]
    assert [rung["name"] for rung in record["rungs"]][: len(names)] == names
    assert set(record["rungs"][len(ladder.RUNGS)]["kernels"]) == set(names[1:])
    not_run = [sentence for sentence in record["absent"] if "all kernels, fp8" not in sentence]
    assert not_run == ["not run here"] * (len(WITHOUT_LORA) + HAS_GPU)
    losses = [rung["losses"] for rung in record["rungs"]]
    assert len(losses[0]) == 3
    assert all(other == pytest.approx(losses[0], rel=1e-4) for other in losses)
    assert record["categories_ms"]["normalization"] > 0 and record["busy_ms"] > 0


@pytest.mark.exhaustive
def test_a_script_is_run_in_a_process_of_its_own_with_the_same_workload(tmp_path):
    workload = small_workload("--data", "synthetic", "--seed", "3", "--lr", "0.5")
    with prepared.prepared(tmp_path, ["a run"]) as processes:
        record = ladder.run_script(next(processes), "finetune_baseline.py", workload)
    assert record["kind"] == "finetune" and Workload.from_record(record) == workload


CUDA_SAYS_MORE = (
    "print('a warning\\nerror: the sentence\\n[W] a graph was not recorded to its end')"
)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (f"{CUDA_SAYS_MORE}; raise SystemExit(1)", "error: the sentence"),
        ("print('before'); raise KeyError('what was raised')", "KeyError: 'what was raised'"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
    ],
    ids=["CUDA says more", "raised", "no word"],
)
def test_a_script_that_fails_or_dies_is_one_sentence(monkeypatch, tmp_path, program, reason):
    monkeypatch.setattr(prepared, "WAIT", program)
    workload = replace(small_workload(), kernels=("rmsnorm",))
    with prepared.prepared(tmp_path, [1]) as (process,), pytest.raises(RunError) as caught:
        ladder.run_script(process, "finetune_optimized.py", workload)
    assert str(caught.value) == f"finetune_optimized.py --kernels rmsnorm failed: {reason}"
