"""The list of runs whose records the pages show, and that what is listed runs."""

import json
import shlex

import pytest

import profile_baseline
from harness.cli.flags import FlagParser
from harness.cli.workload import Workload
from next_steps import finetune_options
from next_steps.comparisons.benchmark_problems import PROBLEMS
from next_steps.finetuning import opponents
from next_steps.memory import estimate
from next_steps.studies import fp8_accuracy, ladder, scaling
from next_steps.studies.scaling_tables import WAYS
from tests.conftest import tracked
from tools import make_records
from tools.make_records import (
    BASELINE,
    CHECKS,
    ESTIMATE,
    LADDER,
    OPPONENT,
    OPTIMIZED,
    PROFILE,
    RUNS,
)
from tools.page_records import RESULTS

FLAGS = {
    BASELINE: finetune_options.FLAGS["Baseline"],
    OPTIMIZED: finetune_options.OPTIMIZED,
    ESTIMATE: estimate.FLAGS,
    LADDER: ladder.FLAGS,
    OPPONENT: opponents.FLAGS,
}
COMMANDS = {name: shlex.split(command) for name, command in make_records.RECORD_COMMANDS.items()}
TINY = "--model tiny --dtype fp32 --seq-len 8 --steps 3"


def workload_of(script: str, flags: list[str]) -> Workload:
    """As the script reads it on a GPU."""
    profiled = script == PROFILE
    parse = profile_baseline.parse_args if profiled else FlagParser("", FLAGS[script]).parse_args
    return Workload.from_flags(parse(flags), on_gpu=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_takes_what_is_listed(name, monkeypatch):
    script, *flags = COMMANDS[name]
    if script in (PROFILE, *FLAGS):
        workload_of(script, flags)
    elif name == "tests":
        assert script == "tools.run_tests" and flags == ["--gpu"]
    elif name in CHECKS:
        assert script == f"{name}.py" and not flags
    elif script == "benchmark_kernels.py":
        assert flags[0] == "--kernel" and flags[1] in PROBLEMS and len(flags) == 2
    elif "next_steps.studies.scaling" in (script, *flags):
        several = script == "torch.distributed.run"
        n = flags[1] if several else "1"
        assert not several or flags[::2][:2] == ["--nproc-per-node", "-m"]
        monkeypatch.setenv("WORLD_SIZE", n)
        asked = []
        monkeypatch.setattr(scaling, "measure_ways", lambda *args: asked.append(args))
        monkeypatch.setattr("sys.argv", [script, *flags[4 if several else 0 :]])
        scaling.main()
        ((workload, _, ways, sizes),) = asked
        which = f"{workload.parallel}_{n}" if several else "1"
        assert name == f"scaling_lost_{which}"
        assert ways == [*WAYS] and sizes == [(4, 2048, 1)]
    elif name.startswith("predicted_"):
        assert name.removeprefix("predicted_") == flags[1].lower()
    else:
        assert script == "next_steps.studies.fp8_accuracy"
        monkeypatch.setattr("sys.argv", [script, *flags])
        assert fp8_accuracy.parse_args().study in name


def test_the_list_has_every_kernels_benchmark():
    assert {f"benchmark_{kernel}" for kernel in PROBLEMS} == RUNS["kernels"].keys()


def test_every_estimate_of_the_pages_is_listed():
    assert RUNS["estimates"].keys() == {path.stem for path in tracked("results/estimate_*.json")}


@pytest.mark.parametrize("name", [*RUNS["steps"], *RUNS["estimates"]])
def test_the_records_of_the_steps_were_made_so(name):
    record = json.loads((RESULTS / f"{name}.json").read_text())
    script, *flags = COMMANDS[name]
    listed = workload_of(script, flags)
    made = Workload.from_record(record)
    assert made.differences(listed) == []
    assert made.opponent == listed.opponent
    assert made.kernels == listed.kernels
    assert record.get("steps") == listed.steps


# ---------------------------------------------------------------- runs


GOOD = {"good": f"{BASELINE} {TINY}"}
BAD = {"bad": f"{BASELINE} {TINY} --lora-rank 0"}
CHECKED = {"rmsnorm_test": "rmsnorm_test.py"}  # it writes no record itself
PROFILED = {"profile": f"{PROFILE} --model tiny --dtype fp32 --seq-len 8 --warmup 1"}


@pytest.mark.exhaustive
def test_each_run_leaves_its_record_and_what_failed_is_said(tmp_path, capsys):
    folder, asked = tmp_path / "records", GOOD | BAD | PROFILED | CHECKED
    assert make_records.make_records(asked, folder, lambda name: 600.0, tmp_path) == 1
    assert sorted(path.name for path in folder.iterdir()) == [
        "good.json",
        "profile.json",
        "rmsnorm_test.json",
    ]
    good, bad, profile, _ = capsys.readouterr().out.splitlines()
    assert good.startswith("1 of 4: good: ") and "failed" not in good
    assert "s, failed: " in bad and "--lora-rank" in bad
    assert "failed" not in profile


@pytest.mark.exhaustive
def test_what_is_not_over_in_time_is_ended_and_the_others_too(tmp_path, capsys):
    folder, left = tmp_path / "records", {"good": 0.2, "profile": -0.1}
    assert make_records.make_records(GOOD | PROFILED, folder, left.get, tmp_path) == 2
    assert not list(folder.iterdir())
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("1 of 2: good: ") and "s, time is over: " in first
    assert second.startswith("2 of 2: profile: ") and "s, time is over: " in second


def test_without_names_all_are_listed(run_script):
    outcome = run_script(make_records)
    assert outcome.code == 0 and all(name in outcome.out for name in COMMANDS)


def test_a_name_that_is_not_listed_is_refused(run_script, monkeypatch):
    monkeypatch.setattr(make_records, "make_records", lambda *args: pytest.fail("a run began"))
    outcome = run_script(make_records, "lora", "loar")
    assert outcome.code == 2 and "there is no loar" in outcome.err


def test_groups_and_records_are_made_once_each(run_script, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(make_records, "make_records", lambda *args: asked.append(args) or 0)
    outcome = run_script(
        make_records, "ladder_1x512", "steps", "--into", str(tmp_path), "--seconds", "600"
    )
    assert outcome.code == 0
    rest = [name for name in RUNS["steps"] if name != "ladder_1x512"]
    ((commands, into, seconds_of, _),) = asked
    assert list(commands) == ["ladder_1x512", *rest] and into == tmp_path
    assert 599 < seconds_of("ladder_1x512") <= 600
    assert commands == RUNS["steps"]
