"""make gb300: what it runs, what it says, and the file that it leaves, without a GPU."""

import os
import re
import tarfile
import time

import pytest

from next_steps.studies import prepared
from tests.conftest import assert_refused
from tools import make_records, my_gpu, run_tests

# each prints; the first one leaves a record of an H200, the last one starts a process and hangs
SCRIPTS = {
    "good": """
import pathlib, sys
print("step 20/20\\nMedian time per step:     0.1 s\\nThe end")
record = pathlib.Path("results/benchmark_adamw8.json").read_text().replace("NVIDIA H100", "H200")
pathlib.Path(sys.argv[-1]).write_text(record)
""",
    "bad": "raise SystemExit('error: the GPU ran out of memory')",
    "hangs": """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"])
print("children:", os.getpid(), child.pid, flush=True)
time.sleep(600)
""",
    "last": "print('7 passed')",
}
WAIT = "import json, runpy, sys; sys.argv = json.loads(sys.stdin.readline() or '[0]')\n"
WAIT += "sys.argv[0] and runpy.run_path(sys.argv[0])"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(prepared, "WAIT", WAIT)
    monkeypatch.setattr(make_records, "RECORD_COMMANDS", {n: f"{tmp_path}/{n}.py" for n in SCRIPTS})
    monkeypatch.setattr(my_gpu, "ORDER", [*SCRIPTS])
    monkeypatch.setattr(my_gpu, "FOLDER", tmp_path / "my_gpu")
    monkeypatch.setattr(run_tests, "visible_gpus", lambda: ["0"])
    return tmp_path / "my_gpu"


def test_the_list_goes_on_and_the_last_line_is_the_file(folder, run_script, monkeypatch):
    make = my_gpu.make_records

    def in_short(commands, into, _, aside) -> int:
        return make(commands, into, lambda name: 4.0 if name == "hangs" else 60.0, aside)

    monkeypatch.setattr(my_gpu, "make_records", in_short)
    folder.mkdir()
    (folder / "bad.json").write_text('{"kind": "of an earlier call"}')
    outcome = run_script(my_gpu)
    assert outcome.code == 1, outcome.err
    good, bad, hangs, last, _, *rest, _, path = outcome.out.splitlines()
    assert re.fullmatch(r"1 of 4: good: \d+ s, adamw8 58,720,256: 21\d\.\d us alone", good), good
    assert bad.startswith("2 of 4: bad: ") and "s, failed: error: the GPU ran out of m" in bad
    assert hangs.startswith("3 of 4: hangs: ") and "s, time is over: children: " in hangs
    assert last.startswith("4 of 4: last: ") and last.endswith("s, 7 passed")
    for process in hangs.split()[-2:]:
        assert ended(int(process))
    assert rest[1].startswith("H200, predicted from H100")
    measured = [line for line in rest if line.startswith("adamw8")]
    assert measured and not any("not measured" in line for line in measured)
    with tarfile.open(path) as file:
        names = {name.removeprefix("my_gpu/") for name in file.getnames()}
        log = file.extractfile("my_gpu/log.txt").read().decode()
    said = {f"{name}.txt" for name in (*SCRIPTS, "log", "scoreboard")}
    assert names == {"my_gpu", "good.json", "predicted.json", *said}
    assert log.splitlines() == [good, bad, hangs, last]


def ended(process: int) -> bool:
    """Return True if a process is over, or is within some seconds; nobody may wait for it."""
    for _ in range(50):
        try:
            os.kill(process, 0)
            with open(f"/proc/{process}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


def test_what_succeeds_ends_with_0_and_an_unknown_gpu_gets_a_sentence(folder, run_script):
    (folder.parent / "good.py").write_text("print('no record')")
    outcome = run_script(my_gpu, "last", "good")
    assert outcome.code == 0 and "No scoreboard: predictions are for GB300, " in outcome.out
    assert [line.split(":")[1] for line in outcome.out.splitlines()[:2]] == [" last", " good"]


def test_ctrl_c_ends_the_list_and_packs_what_is_there(folder, run_script, monkeypatch):
    def stop(commands, folder, seconds_of, aside):
        assert [seconds_of(name) for name in ("tests", "benchmark_rope")] == [900, 240]
        folder.mkdir()
        (folder / "log.txt").write_text("1 of 4")
        raise KeyboardInterrupt

    monkeypatch.setattr(my_gpu, "make_records", stop)
    outcome = run_script(my_gpu)
    assert outcome.code == 1
    with tarfile.open(outcome.out.splitlines()[-1]) as file:
        assert "my_gpu/log.txt" in file.getnames()


def test_without_a_gpu_it_says_so(run_script, monkeypatch):
    monkeypatch.setattr(run_tests, "visible_gpus", list)
    monkeypatch.setattr(my_gpu, "make_records", lambda *args: pytest.fail("a run began"))
    assert_refused(run_script(my_gpu), "no GPU", "check_toolchain.py")


def test_what_is_listed_exists_and_is_in_the_order_of_its_value():
    commands = make_records.commands_of(my_gpu.ORDER)
    assert [*commands][:2] == ["check_toolchain", "tests"] and [*commands][-1] == "ladder_4x2048"
    assert commands.keys() > make_records.RUNS["kernels"].keys() | {*my_gpu.LONGER}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("check_toolchain", "These kernels run here: yes"),
        ("benchmark_rmsnorm", "rmsnorm 65,536 x 4,096: 653.7 us alone"),
        ("benchmark_cross_entropy", "cross_entropy 8,192 x 128,256, in place: "),
        ("profile_1x512", "Largest recoverable cost: optimizer, 99.8 of 172.2 ms, bandwidth-bound"),
        ("lora_all_1x512", "Median time per step: 0.034 s"),
        ("ladder_1x512", "+ cuda_graph 29.8 27.5 68.0 (67.6 to 69.8)"),
        ("no_record", "the last line"),
    ],
)
def test_what_matters_is_found_in_what_scripts_print(name, said):
    from tools import fill_pages
    from tools.page_records import RESULTS

    path = RESULTS / f"{name}.json"
    printed = fill_pages.render([name]).splitlines() if path.exists() else ["a line", said]
    assert " ".join(make_records.what_matters(printed, path).split()).startswith(said)
