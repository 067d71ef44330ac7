"""Nothing of the user's is lost: every file is written whole or not at all, and what cannot be
written is refused.
"""

import argparse
import copy
import functools
import gzip
import itertools
import json
import os
import pickle
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import benchmark_kernels
import compare_runs
import finetune_baseline
import finetune_optimized
import profile_baseline
from harness.cli import command_line, output_files, pictures
from harness.cli.device import HAS_GPU
from harness.cli.flags import OPPONENTS, finetune_parser
from harness.cli.workload import Workload
from harness.data import dataset, samples
from harness.model import config_file, loading
from harness.profiling.kernel_facts import KERNELS
from harness.profiling.profiler import read_trace, write_trace
from harness.records import run_records
from harness.training import saving
from next_steps import finetune_options
from next_steps.studies import ladder, make_samples
from tests import make_samples_test
from tests.compare_runs_test import run as made_up_run
from tests.token_cache_test import tokenizer_of
from tools import fill_pages
from tools.page_records import HERE, RESULTS

TINY = ["--model", "tiny", "--dtype", "fp32", "--seq-len", "8"]
NOBODY = 65534  # a user without rights
CHANGES = (
    "os.rename",
    "os.link",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.chmod",
    "os.chown",
    "shutil.copyfile",
)


# ---------------------------------------------------------------- places to write to, and accidents


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for 64 KB."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no small disk can be made here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def device(tmp_path) -> Path:
    """A device that is what /dev/null is; the real one is not put at risk."""
    path = tmp_path / "device"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        path.write_text("a container may allow the node and forbid its use")
    except PermissionError as error:
        pytest.skip(f"no device can be made here: {error}")
    return path


@pytest.fixture
def open_folder():
    """A folder that every user of the machine can look into."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def in_child(function, before=lambda: None) -> str:
    """Run function() in a process of its own; how that ended: 'done', 'killed', or what was raised,
    in words.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            before()
            function()
            os.write(writing, b"done")
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said or "killed"


def started(function, *arguments) -> int:
    """A process that calls function(*arguments); it ends with 0 if that raises nothing."""
    child = os.fork()
    if child == 0:
        failed = True
        try:
            function(*arguments)
            failed = False
        finally:
            os._exit(failed)
    return child


def without_rights(function) -> str:
    """As `in_child`, but not as root, whom no permission stops."""
    return in_child(function, lambda: os.setuid(NOBODY) if os.getuid() == 0 else None)


def killed_before_change(number: int, function) -> str:
    """As `in_child`, with SIGKILL before the process changes something in a file system for the
    n-th time.
    """
    count = itertools.count(1)

    def watch(event, arguments):
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (writes or event in CHANGES) and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return in_child(function, lambda: sys.addaudithook(watch))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def assert_one_sentence(outcome, *words: str, code: int = 2) -> None:
    assert outcome.code == code, outcome.err
    assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1, outcome.err
    for word in words:
        assert word in outcome.err


# ---------------------------------------------------------------- whole or not at all


def test_a_full_disk_leaves_the_record_that_was_there(small_disk):
    path = small_disk / "run.json"
    run_records.write_record(str(path), {"kind": "finetune", "losses": [1.0]})
    before = contents(small_disk)
    with pytest.raises(
        command_line.RunError,
        match=r"^the record could not be written to .*run\.json: No space left",
    ):
        run_records.write_record(str(path), {"kind": "finetune", "losses": [0.123456789] * 10_000})
    assert contents(small_disk) == before


def test_a_write_that_stops_half_way_leaves_the_old_record_and_nothing_beside(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("old")
    written = in_child(
        lambda: output_files.write_output(str(path), bytes(5000), "the record"),
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY)),
    )
    assert written == f"RunError: the record could not be written to {path}: File too large"
    assert contents(tmp_path) == {"run.json": b"old"}


def test_a_full_disk_leaves_the_picture_that_was_there(small_disk, tmp_path, run_script):
    picture = small_disk / "plot.png"
    old = (RESULTS / "trace_fsdp_4x2048.png").read_bytes()[:1000]
    picture.write_bytes(old)
    (small_disk / "other").write_bytes(bytes(60_000))
    for name in "ab":
        (tmp_path / name).write_text(json.dumps(made_up_run()))
    outcome = run_script(
        compare_runs, str(tmp_path / "a"), str(tmp_path / "b"), "--plot", str(picture)
    )
    assert_one_sentence(
        outcome, f"the picture could not be written to {picture}", "No space left", code=1
    )
    assert picture.read_bytes() == old and len(contents(small_disk)) == 2


@pytest.mark.parametrize("exists", [True, False])
def test_a_process_killed_at_any_moment_leaves_the_old_record_or_the_new_one(tmp_path, exists):
    path = tmp_path / "run.json"
    old, new = b"old" * 1000, b"new" * 2000
    for number in range(1, 100):
        path.unlink(missing_ok=True)
        if exists:
            path.write_bytes(old)
        ended = killed_before_change(number, lambda: output_files.write_whole(str(path), new))
        if ended == "done":
            break
        assert ended == "killed"
        assert (path.read_bytes() if path.exists() else None) == (old if exists else None)
    assert number > 2 and path.read_bytes() == new


def test_an_interrupted_write_leaves_nothing_beside(tmp_path, monkeypatch):
    def interrupt(*names):
        raise KeyboardInterrupt

    (tmp_path / "run.json").write_text("old")
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_records.write_record(str(tmp_path / "run.json"), {})
    assert contents(tmp_path) == {"run.json": b"old"}


def test_of_two_processes_on_one_path_the_last_one_wins_whole(tmp_path):
    path, wholes = tmp_path / "run.json", [bytes([65 + i]) * 300_000 for i in range(3)]
    path.write_bytes(wholes[0])

    def write_often(whole):
        for _ in range(100):
            output_files.write_whole(str(path), whole)

    children = [started(write_often, whole) for whole in wholes]
    running, seen = set(children), set()
    while running:
        running -= {
            child
            for child in running
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        }
        seen.add(path.read_bytes())
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert seen <= set(wholes) and len(list(tmp_path.iterdir())) == 1


def test_permissions_stay_and_a_new_file_has_the_usual_ones(tmp_path):
    private, new, plain = (tmp_path / name for name in ("private", "new", "plain"))
    private.write_text("old")
    private.chmod(0o640)
    plain.touch()
    for path in (private, new):
        output_files.write_whole(str(path), b"content")
    assert stat.S_IMODE(private.stat().st_mode) == 0o640 and private.read_bytes() == b"content"
    assert new.stat().st_mode == plain.stat().st_mode


def test_what_root_writes_anew_stays_its_owners(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root may give a file away")
    path = tmp_path / "run.json"
    path.touch()
    os.chown(path, NOBODY, NOBODY)
    run_records.write_record(str(path), {})
    assert (path.stat().st_uid, path.stat().st_gid) == (NOBODY, NOBODY)


# ---------------------------------------------------------------- links, devices, pipes


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "run.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    output_files.write_output(str(link), b"new", "the record")
    assert link.is_symlink() and target.read_text() == "new"
    assert os.listdir(tmp_path / "far") == ["run.json"]


def test_a_dangling_link_creates_what_it_points_at(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to("new/run.json")
    output_files.require_writable(str(link))
    assert sorted(os.listdir(tmp_path)) == ["link.json"]
    run_records.write_record(str(link), {})
    assert link.is_symlink() and (tmp_path / "new" / "run.json").read_text() == "{}\n"


def test_a_link_to_itself_is_refused(tmp_path, run_script):
    (tmp_path / "loop").symlink_to("loop")
    outcome = run_script(finetune_baseline, *TINY, "--json", str(tmp_path / "loop"))
    assert_one_sentence(outcome, f"cannot write {tmp_path / 'loop'}: Too many levels")
    assert (tmp_path / "loop").is_symlink()


def test_a_device_is_written_into_and_stays(device):
    node = device.stat()
    output_files.require_writable(str(device))
    run_records.write_record(str(device), {})
    assert stat.S_ISCHR(device.stat().st_mode) and device.stat().st_ino == node.st_ino
    assert os.listdir(device.parent) == ["device"]


def test_a_device_behind_a_link_is_written_into_and_stays(device, tmp_path):
    (tmp_path / "link").symlink_to(device)
    run_records.write_record(str(tmp_path / "link"), {})
    assert stat.S_ISCHR(device.stat().st_mode) and (tmp_path / "link").is_symlink()


def test_a_full_device_is_one_sentence():
    output_files.require_writable("/dev/full")
    with pytest.raises(
        command_line.RunError, match=r"^the record could not be written to /dev/full: No space left"
    ):
        run_records.write_record("/dev/full", {})
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_pipe_gets_the_record(tmp_path):
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    output_files.require_writable(str(path))  # without a reader, for which opening it would wait
    reader.start()
    output_files.write_output(str(path), b"new", "the record")
    reader.join(5)
    assert path.is_fifo() and read == [b"new"]


def test_a_file_that_stdout_goes_to_keeps_what_was_printed(tmp_path):
    path = tmp_path / "printed"

    def print_and_write():
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 1)
        sys.stdout = os.fdopen(1, "w")
        print("before")
        output_files.write_output("/dev/stdout", b"the record\n", "the record")
        os.lseek(1, 0, os.SEEK_END)
        print("after", flush=True)

    assert in_child(print_and_write) == "done"
    assert path.read_text() == "before\nthe record\nafter\n"


# ---------------------------------------------------------------- refused before the work, and
# nothing is changed


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["json", "trace", "save"])
def test_a_refused_run_leaves_nothing_behind(run_script, tmp_path, name):
    script = profile_baseline if name == "trace" else finetune_baseline
    (tmp_path / "link").symlink_to("nowhere")
    for place in ("new/deeper/run", "link"):
        outcome = run_script(script, *TINY, f"--{name}={tmp_path / place}", "--data", "nowhere.txt")
        assert_one_sentence(outcome, "nowhere.txt")
        assert os.listdir(tmp_path) == ["link"] and (tmp_path / "link").is_symlink()


def test_the_default_traces_folder_is_not_made_by_a_refused_run(run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_one_sentence(run_script(profile_baseline, *TINY, "--data", "nowhere.txt"), "nowhere.txt")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("flag", ["--json", "--trace", "--plot", "--save"])
def test_an_output_without_a_name_is_refused(run_script, flag):
    script = finetune_baseline if flag == "--save" else profile_baseline
    assert_one_sentence(run_script(script, *TINY, f"{flag}="), f"{flag} ''", "names nothing")


@pytest.mark.parametrize("flag", ["--json", "--trace"])
@pytest.mark.parametrize("name", ["folder", "folder/", "new/"])
def test_a_folder_is_no_file_to_write(run_script, tmp_path, monkeypatch, flag, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert_one_sentence(
        run_script(profile_baseline, *TINY, flag, name), f"cannot write {name}", "directory"
    )
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize("place", ["run.json", "new/run.json"])
def test_a_folder_without_permission_is_refused(open_folder, place):
    path = open_folder / place
    sentence = f"UserError: cannot write {path}: Permission denied"
    assert without_rights(lambda: output_files.require_writable(str(path))) == sentence
    sentence = f"UserError: cannot write to {path}: Permission denied"
    assert without_rights(lambda: output_files.require_folder(str(path))) == sentence
    assert not os.listdir(open_folder)


def test_a_file_without_permission_is_neither_accepted_nor_replaced(open_folder):
    """Its folder's permission would be enough to replace it."""
    open_folder.chmod(0o777)
    path = open_folder / "run.json"
    path.write_text("kept")
    path.chmod(0o444)
    refused = without_rights(lambda: output_files.require_writable(str(path)))
    assert refused == f"UserError: cannot write {path}: Permission denied"
    failed = without_rights(lambda: run_records.write_record(str(path), {}))
    assert failed == f"RunError: the record could not be written to {path}: Permission denied"
    assert contents(open_folder) == {"run.json": b"kept"}


@pytest.mark.parametrize("name", ["x.xyz", "out", "png"])
def test_a_picture_of_another_kind_is_refused(run_script, tmp_path, name):
    outcome = run_script(compare_runs, "a.json", "b.json", "--plot", str(tmp_path / name))
    assert_one_sentence(outcome, f"--plot {tmp_path / name} must end in .png")


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        (profile_baseline, ["--trace", "x", "--json", "x"], ["--json x collides with --trace x"]),
        (profile_baseline, ["--trace", "x", "--json", "./sub/../x"], ["--json", "--trace x"]),
        (profile_baseline, ["--trace", "link", "--json", "file"], ["--json file", "--trace link"]),
        (profile_baseline, ["--trace", "hard", "--json", "file"], ["--json file", "--trace hard"]),
        (
            profile_baseline,
            ["--trace", "new", "--json", "dangling"],
            ["--json dangling", "--trace new"],
        ),
        (
            profile_baseline,
            ["--trace", "a.png", "--plot", "a.png"],
            ["--plot a.png", "--trace a.png"],
        ),
        (profile_baseline, ["--json", "a", "--plot", "a/b.png"], ["--json a", "--plot a/b.png"]),
        (
            profile_baseline,
            ["--json", "traces/tiny-1x8-baseline.json"],
            ["--json", "--trace traces/tiny"],
        ),
        (finetune_baseline, ["--json", "out", "--save", "out"], ["--json out", "--save out"]),
        (
            finetune_baseline,
            ["--json", "out", "--save", "out/model"],
            ["--json out", "--save out/model"],
        ),
        (
            finetune_baseline,
            ["--json", "out/config.json", "--save", "out"],
            ["a file of the model", "--save out"],
        ),
        (
            finetune_baseline,
            ["--model", "sub", "--json", "sub/model.safetensors"],
            ["model", "--model sub"],
        ),
        (
            finetune_baseline,
            ["--data", "text.txt", "--json", "text.txt"],
            ["--json text.txt", "which is read"],
        ),
        (
            finetune_baseline,
            ["--data", "text.txt", "--json", "text-link"],
            ["--json text-link", "which is read"],
        ),
        (
            compare_runs,
            ["r.png", "file", "--plot", "r.png"],
            ["--plot r.png", "r.png, which is read"],
        ),
        (
            benchmark_kernels,
            ["--json", "a.png", "--plot", "a.png"],
            ["--json a.png", "--plot a.png"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.__name__,
)
def test_an_output_that_would_overwrite_something_is_refused(
    run_script, tmp_path, monkeypatch, script, flags, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("file", "text.txt", "r.png"):
        (tmp_path / name).write_text("the user's own")
    os.link("file", "hard")
    for link, target in (("link", "file"), ("dangling", "new"), ("text-link", "text.txt")):
        os.symlink(target, link)
    before = contents(tmp_path)
    sizes = ["--kernel", "rmsnorm", "--tokens", "2", "--hidden", "8"]
    workload = {compare_runs: [], benchmark_kernels: sizes}.get(script, TINY)
    assert_one_sentence(run_script(script, *workload, *flags), "collides with", *words)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "outputs",
    [{"json": "/dev/null", "trace": "/dev/null"}, {"json": "a/run.json", "save": "a"}],
    ids=str,
)
def test_outputs_that_do_not_collide_are_accepted(tmp_path, monkeypatch, outputs):
    monkeypatch.chdir(tmp_path)
    output_files.check_outputs(argparse.Namespace(**outputs))
    assert not os.listdir(tmp_path)


# ---------------------------------------------------------------- files of somebody else


OTHERS = {
    "json": b'{"kind": "Pod", "spec": {}}',
    "trace": b'{"traceEvents": []}',
    "plot": b"\x89PNG\r\n\x1a\n" + bytes(40) + b"tEXtSoftware\0Matplotlib version3.11.2",
    "memory_snapshot": b"\x80\x04}\x94\x8c\x05model\x94",
}


@pytest.mark.parametrize("content", ["another program's", "text", "damaged gzip"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_no_script_here_wrote_is_not_replaced(tmp_path, name, content):
    texts = {"another program's": OTHERS[name], "text": b"notes", "damaged gzip": b"\x1f\x8b\x08"}
    path = tmp_path / "mine.png"
    path.write_bytes(texts[content])
    with pytest.raises(command_line.UserError, match=rf"{path} would replace .*name another file"):
        output_files.check_outputs(argparse.Namespace(**{name: str(path)}))


def test_every_script_leaves_files_of_others_alone(run_script, tmp_path, monkeypatch):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "my own", "completion": "sample"}\n')
    monkeypatch.setattr(samples, "stdlib_texts", lambda: [make_samples_test.MODULE])
    for outcome in (
        run_script(finetune_baseline, *TINY, "--json", str(path)),
        run_script(benchmark_kernels, "--kernel", "rmsnorm", "--json", str(path)),
        run_script(fill_pages, "--record", str(path), "rmsnorm_test.py"),
        run_script(make_samples, str(path)),
    ):
        assert_one_sentence(outcome, f"{path} would replace a file", "name another file")
    assert path.read_text().startswith('{"prompt": "my own"')


def test_the_facts_of_a_checkpoint_are_no_record_to_replace(run_script, tmp_path):
    folder = tmp_path / "checkpoints"
    facts = folder / "step-3" / "run.json"
    facts.parent.mkdir(parents=True)
    facts.write_text(json.dumps({"step": 3, "environment": {}}))
    flags = ["--resume", str(folder), "--json", str(facts)]
    outcome = run_script(finetune_baseline, *TINY, *flags)
    assert_one_sentence(outcome, f"--json {facts} would replace a file")
    assert json.loads(facts.read_text())["step"] == 3


def test_what_the_scripts_wrote_and_an_empty_file_are_replaced(profiler, tmp_path):
    """Of a memory snapshot the beginning: to take one needs a GPU."""
    for name, kind in {"json": ".json", "plot": ".png"}.items():
        found = sorted(RESULTS.glob(f"*{kind}"))
        assert len(found) > 10
        for path in found:
            output_files.check_outputs(argparse.Namespace(**{name: str(path)}))
    figure = pictures.pyplot().figure(figsize=(1, 1))
    drawn, trace, snapshot, empty = (
        str(tmp_path / name) for name in ("drawn.png", "trace.json", "step.pickle", "empty.png")
    )
    pictures.save_plot(figure, drawn)
    _, content = read_trace(profiler)
    Path(trace).write_bytes(content)
    Path(f"{trace}.gz").write_bytes(gzip.compress(content))
    for file in (trace, f"{trace}.gz"):
        output_files.check_outputs(argparse.Namespace(trace=file))
    Path(snapshot).write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    output_files.check_outputs(argparse.Namespace(plot=drawn, memory_snapshot=snapshot))
    Path(empty).touch()
    for name in output_files.OUTPUT_FILES:
        output_files.check_outputs(argparse.Namespace(**{name: empty}))


def test_every_kind_of_record_is_known_as_ours():
    sources = [*HERE.glob("*.py"), *(HERE / "harness").glob("*.py")]
    sources += [*(HERE / "next_steps").glob("*.py"), *(HERE / "tools").glob("*.py")]
    written = {
        kind for path in sources for kind in re.findall(r'"kind": "(\w+)"', path.read_text())
    }
    assert len(written) > 10 and written <= set(output_files.KINDS)


def test_make_clean_leaves_what_a_reader_made(tmp_path):
    shutil.copy(HERE / "Makefile", tmp_path)
    kept = ["runs/llama/step-400/run.json", "runs/adapter/adapter_model.safetensors"]
    for name in [*kept, "demo/before.json", "traces/tiny.json", ".venv/installed"]:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("there")
    subprocess.run(["make", "-C", tmp_path, "clean"], check=True, capture_output=True)
    assert sorted(contents(tmp_path)) == sorted(["Makefile", *kept])


# ---------------------------------------------------------------- flags that would be ignored


@pytest.mark.parametrize(
    ("flags", "ignored", "by"),
    [
        (["--ladder", "--longest"], "--longest", "--ladder"),
        (["--ladder", "--kernels", "rmsnorm"], "--kernels", "--ladder"),
        # the default, but said
        (
            ["--ladder", "--kernels", "rmsnorm,cross_entropy"],
            "--kernels",
            "--ladder",
        ),
        (["--ladder", "--save", "x"], "--save", "--ladder"),
        (["--ladder", "--resume", "x"], "--resume", "--ladder"),
        (["--opponent", "liger", "--checkpoint", "x"], "--checkpoint", "--opponent"),
        (["--teacher", "tiny", "--resume", "x"], "--resume", "--teacher"),
        (["--longest", "--checkpoint", "x"], "--checkpoint", "--longest"),
        (["--ladder", "--opponent", "liger"], "--opponent", "--ladder"),
        (["--ladder", "--stochastic-rounding"], "--stochastic-rounding", "--ladder"),
        (["--ladder", "--cuda-graph"], "--cuda-graph", "--ladder"),
        (["--opponent", "liger", "--kernels", "all"], "--kernels", "--opponent"),
        (["--opponent", "liger", "--longest"], "--longest", "--opponent"),
        (["--longest", "--save", "x"], "--save", "--longest"),
        (["--longest", "--data", "stdlib"], "--data", "--longest"),
        (["--longest", "--batch-size", "2"], "--batch-size", "--longest"),
        (["--longest", "--steps", "3"], "--steps", "--longest"),
        (["--longest", "--lr", "1e-3"], "--lr", "--longest"),
        (["--longest", "--kernels", "all", "--cuda-graph"], "--cuda-graph", "--longest"),
        (["--compare", "a", "b", "--json", "x"], "--json", "--compare"),
        (["--compare", "a", "b", "--model", "tiny"], "--model", "--compare"),
        (["--compare", "a", "b", "--use-custom-ce"], "--use-custom-ce", "--compare"),
        (["--compare", "a", "b", "--cuda-graph"], "--cuda-graph", "--compare"),
        (["--estimate", "--cuda-graph"], "--cuda-graph", "--estimate"),
        (["--memory", "--cuda-graph"], "--cuda-graph", "--memory"),
        (["--estimate", "--trace", "x"], "--trace", "--estimate"),
        (["--estimate", "--data", "synthetic"], "--data", "--estimate"),
        (["--estimate", "--warmup", "2"], "--warmup", "--estimate"),
        (["--memory", "--trace", "x"], "--trace", "--memory"),
        (["--memory", "--stacks"], "--stacks", "--memory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_flag_that_would_be_ignored_is_refused(run_script, monkeypatch, flags, ignored, by):
    monkeypatch.setattr(config_file, "load_config", lambda args: pytest.fail("started"))
    script = (
        profile_baseline
        if flags[0] in ("--compare", "--estimate", "--memory")
        else finetune_optimized
    )
    outcome = run_script(script, *flags)
    assert_one_sentence(outcome, f"{ignored} does nothing with {by}: leave one of the two out")


def test_stochastic_rounding_without_bf16_is_refused(run_script):
    outcome = run_script(finetune_optimized, *TINY, "--kernels", "adamw", "--stochastic-rounding")
    assert_one_sentence(outcome, "--stochastic-rounding", "does nothing in fp32", "--dtype bf16")


@pytest.mark.parametrize("script", [finetune_baseline, finetune_optimized])
def test_a_graph_that_no_step_would_use_is_refused(run_script, script):
    outcome = run_script(script, *TINY, "--cuda-graph", "--steps", "2")
    assert_one_sentence(outcome, "--cuda-graph starts after 2 steps", "--steps 2")


def test_what_the_scripts_say_of_each_other_is_not_refused(monkeypatch):
    """The flags with which --ladder starts finetune_optimized.py."""
    commands = []

    def run(command, **options):
        commands.append(command[2:])
        Path(command[-1]).write_text("{}")
        return argparse.Namespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    args = finetune_parser("").parse_args([*TINY, "--lr", "0.25", "--dtype", "bf16"])
    workload = Workload.from_flags(args, HAS_GPU)
    graph = replace(workload, kernels=tuple(KERNELS), cuda_graph=True)
    runs, _ = ladder.others(workload, graphs=True)
    for _, script, each in runs:
        if script == "finetune_optimized.py":
            ladder.run_script(script, each)
    ladder.run_script("finetune_optimized.py", graph)
    assert len(commands) == 2 + len(OPPONENTS) + 2 + 2
    for command in commands:
        monkeypatch.setattr("sys.argv", ["finetune_optimized.py", *command])
        assert finetune_options.parse_args("").lr == 0.25


# ---------------------------------------------------------------- the trace


@pytest.fixture(scope="module")
def profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.randn(4, 4) @ torch.randn(4, 4)
    return profiler


@pytest.fixture
def profiled(profiler):
    """It can be exported once."""
    again = copy.copy(profiler)
    trace = {"traceEvents": [{"name": event.name} for event in profiler.events()] * 100}
    again.export_chrome_trace = lambda path: Path(path).write_text(json.dumps(trace))
    return again, trace


@pytest.mark.exhaustive
def test_a_trace_goes_through_a_device_that_stays(run_script, device, tmp_path, monkeypatch):
    monkeypatch.setattr(profile_baseline, "TIMED_STEPS", 1)
    record = tmp_path / "run.json"
    outcome = run_script(
        profile_baseline, *TINY, "--warmup", "1", "--trace", str(device), "--json", str(record)
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert stat.S_ISCHR(device.stat().st_mode)
    made = run_records.read_record(str(record), "profile")
    assert made["categories"]["matmul"]["flops"] > 0 and made["trace_bytes"] > 1000


@pytest.mark.exhaustive
def test_a_trace_goes_through_a_link_that_stays(run_script, tmp_path, monkeypatch):
    monkeypatch.setattr(profile_baseline, "TIMED_STEPS", 1)
    (tmp_path / "link").symlink_to(tmp_path / "trace.json")
    outcome = run_script(
        profile_baseline, *TINY, "--warmup", "1", "--trace", str(tmp_path / "link")
    )
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_trace_that_has_no_room_is_one_sentence_and_no_old_one_is_read(profiled, small_disk):
    path = small_disk / "trace.json"
    path.write_text('{"traceEvents": []}')
    before = contents(small_disk)
    profiler, trace = profiled
    trace["more"] = "x" * 70_000
    with pytest.raises(
        command_line.RunError, match=r"^the trace could not be written to .*: No space left"
    ):
        write_trace(profiler, str(path))
    assert contents(small_disk) == before


def test_a_profiler_that_cannot_write_is_one_sentence(small_disk, tmp_path, monkeypatch):
    """It says nothing itself."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(500):
            torch.randn(4, 4) @ torch.randn(4, 4)
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    with pytest.raises(
        command_line.RunError,
        match=rf"^the profiler could not write its trace in {small_disk}: .*TMPDIR",
    ):
        write_trace(profiler, str(path))
    assert path.read_text() == '{"traceEvents": []}' and not os.listdir(small_disk)


def test_a_trace_is_compressed_if_its_name_says_so(profiled, tmp_path):
    profiler, trace = profiled
    path = tmp_path / "trace.json.gz"
    found, n_bytes = write_trace(profiler, str(path))
    assert found == trace and n_bytes == path.stat().st_size
    assert json.loads(gzip.decompress(path.read_bytes())) == trace


# ---------------------------------------------------------------- saved models


def make_model(n_layers: int, seed: int, shard_size: str | None) -> torch.nn.Module:
    """A small LLaMA on the CPU that is saved in shards of up to `shard_size`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=n_layers,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    if shard_size:
        model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size=shard_size)
    return model


def save(model: torch.nn.Module, folder: Path) -> None:
    saving.save_model(model, Workload(model="tiny"), str(folder))


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model that fits its configuration."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.state_dict()


def same(weights: dict, others: dict) -> bool:
    return weights.keys() == others.keys() and all(
        torch.equal(weights[name], others[name]) for name in weights
    )


SHARD = "10KB"  # a model of one layer is two of them
USERS_FILES = {
    "model.safetensors.bak",
    "model_best.safetensors",
    "model-00001-of-00009.safetensors",
    "notes.txt",
}
MODELS = {  # old and new: layers and size of a shard
    "one file, the same shape": ((1, None), (1, None)),
    "one file, another shape": ((1, None), (2, None)),
    "shards of the same names": ((1, SHARD), (1, SHARD)),
    "other shards": ((2, SHARD), (1, SHARD)),
    "one file becomes shards": ((1, None), (2, SHARD)),
    "shards become one file": ((2, SHARD), (1, None)),
}


OFTEN = "one file, the same shape", "shards become one file"  # a reader's run tries these


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(shapes, id=name, marks=[pytest.mark.exhaustive] * (name not in OFTEN))
        for name, shapes in MODELS.items()
    ],
)
def test_a_save_killed_at_any_moment_leaves_the_whole_old_or_the_whole_new_model(shapes, tmp_path):
    old, new = (make_model(n_layers, seed, size) for seed, (n_layers, size) in enumerate(shapes))
    start, alone, folder = (tmp_path / name for name in ("start", "alone", "folder"))
    save(old, start)
    save(new, alone)
    for name in USERS_FILES:
        (start / name).write_text(name)
    expected = {str(path.name) for path in alone.iterdir()} | USERS_FILES
    found = []
    for number in range(1, 1000):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        ended = killed_before_change(number, lambda: save(new, folder))
        weights = loaded(folder)
        found.append("new" if same(weights, new.state_dict()) else "old")
        assert found[-1] == "new" or same(weights, old.state_dict()), (
            f"neither, before change {number}"
        )
        if ended == "done":
            break
        assert ended == "killed", ended
        save(new, folder)  # and the next one leaves nothing of it
        assert {path.name for path in folder.iterdir()} == expected, f"after change {number}"
        assert same(loaded(folder), new.state_dict())
    assert {path.name for path in folder.iterdir()} == expected
    assert found == sorted(found, reverse=True) and {*found} == {"old", "new"} and len(found) > 10
    assert all((folder / name).read_text() == name for name in USERS_FILES)
    assert "transformers_weights" not in json.loads((folder / "config.json").read_text())


@pytest.fixture
def with_tokenizer(tmp_path, monkeypatch) -> Path:
    """A saved model with a tokenizer, a template of chats, and a file that is no tokenizer's."""
    folder = tmp_path / "model"
    tokenizer = tokenizer_of("a b c", chat_template="{{ messages }}")
    with monkeypatch.context() as patch:
        patch.setattr(saving, "load_tokenizer", lambda workload: tokenizer)
        save(make_model(1, 0, None), folder)
    for name in ("tokenizer.model", "vocabulary.txt"):
        (folder / name).write_text("there")
    assert {"tokenizer.json", "chat_template.jinja"} <= {path.name for path in folder.iterdir()}
    return folder


def test_a_model_without_a_tokenizer_does_not_get_that_of_the_model_before_it(with_tokenizer):
    """Killed at any moment: the next save removes what is left of it."""
    start, folder = with_tokenizer, with_tokenizer.parent / "again"
    new = make_model(1, 1, None)
    for number in range(1, 1000):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        ended = killed_before_change(number, lambda: save(new, folder))
        assert (folder / "tokenizer.json").exists() or same(loaded(folder), new.state_dict())
        if ended == "done":
            break
        save(new, folder)
        assert dataset.load_tokenizer(Workload(model=str(folder))) is None
    names = {"config.json", "generation_config.json", "model.safetensors", "vocabulary.txt"}
    assert {path.name for path in folder.iterdir()} == names


def test_a_tokenizer_without_a_template_does_not_get_that_of_the_one_before_it(
    with_tokenizer, monkeypatch
):
    tokenizer = tokenizer_of("c b a")
    monkeypatch.setattr(saving, "load_tokenizer", lambda workload: tokenizer)
    save(make_model(1, 0, None), with_tokenizer)
    again = dataset.load_tokenizer(Workload(model=str(with_tokenizer)))
    assert again.chat_template is None and again.get_vocab() == tokenizer.get_vocab()
    assert (with_tokenizer / "tokenizer.model").exists(), "other programs read it"


def test_a_failed_save_leaves_the_old_model_and_nothing_beside(tmp_path):
    save(make_model(1, 0, None), tmp_path)
    before = contents(tmp_path)
    new = make_model(1, 1, None)
    real = new.save_pretrained

    def disk_full(folder, **options):
        real(folder, **options)
        raise OSError(28, "No space left on device")

    new.save_pretrained = disk_full
    with pytest.raises(
        command_line.RunError, match=r"the model could not be saved to .*No space left"
    ):
        save(new, tmp_path)
    assert contents(tmp_path) == before and not list(tmp_path.glob(".*"))


def test_a_save_that_fails_late_leaves_a_model_from_which_training_goes_on(tmp_path, monkeypatch):
    """The new one, not yet in its place."""
    folder, new = tmp_path / "model", make_model(2, 1, SHARD)
    save(make_model(1, 0, None), folder)

    def fail(*names):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(saving, "add_name", fail)
        with pytest.raises(
            command_line.RunError, match=r"the model could not be saved to .*Input/output error"
        ):
            save(new, folder)
    assert same(loaded(folder), new.state_dict()) and list(folder.glob(".unfinished-*"))
    flags = ["--model", str(folder), "--dtype", "fp32", "--seq-len", "8", "--steps", "1"]
    args = finetune_parser("").parse_args(flags)
    again = loading.load_model(Workload.from_flags(args, HAS_GPU)).cpu()
    save(again, folder)
    names = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    assert "transformers_weights" not in json.loads((folder / "config.json").read_text())
    assert same(loaded(folder), new.state_dict())


def test_what_an_earlier_crash_left_is_removed_and_files_of_that_name_are_not(tmp_path):
    (tmp_path / ".unfinished-abc").mkdir()
    (tmp_path / ".unfinished-abc" / "model.safetensors").write_text("half")
    (tmp_path / ".unfinished-record").write_text("another process is writing it")
    save(make_model(1, 0, None), tmp_path)
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}
    assert left == {".unfinished-record"}


def test_an_old_index_cannot_name_files_of_the_user(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    names = [
        "../outside.safetensors",
        "notes.txt",
        ".",
        7,
        str(tmp_path / "outside.safetensors"),
        "a.safetensors",
    ]
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(enumerate(names))})
    )
    for path in (tmp_path / "outside.safetensors", folder / "notes.txt", folder / "a.safetensors"):
        path.write_text("there")
    save(make_model(1, 0, None), folder)
    assert (tmp_path / "outside.safetensors").exists() and (folder / "notes.txt").exists()
    assert (
        not (folder / "a.safetensors").exists()
        and not (folder / "model.safetensors.index.json").exists()
    )


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": []}', '{"metadata": {}}', "\ufeff"])
def test_a_damaged_old_index_does_not_stop_a_save(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    new = make_model(1, 0, None)
    save(new, tmp_path)
    assert same(loaded(tmp_path), new.state_dict())


def test_a_link_to_the_folder_is_followed_and_links_in_it_are_not_written_through(tmp_path):
    """In Hugging Face's cache they lead to files that other folders share."""
    cache, folder, link = tmp_path / "cache", tmp_path / "folder", tmp_path / "link"
    cache.mkdir()
    folder.mkdir()
    link.symlink_to(folder)
    for name in ("config.json", "model.safetensors"):
        (cache / name).write_text("shared")
        (folder / name).symlink_to(cache / name)
    new = make_model(1, 0, None)
    save(new, link)
    assert link.is_symlink() and same(loaded(folder), new.state_dict())
    assert set(contents(cache).values()) == {b"shared"}


def test_a_file_system_without_hard_links_gets_copies(tmp_path, monkeypatch):
    def refuse(*names):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    new = make_model(2, 0, SHARD)
    save(new, tmp_path)
    assert same(loaded(tmp_path), new.state_dict()) and not list(tmp_path.glob(".*"))


def test_saves_of_two_processes_leave_one_whole_model(tmp_path):
    models = [make_model(1, 0, SHARD), make_model(2, 1, None), make_model(2, 2, SHARD)]

    def save_often(model):
        for _ in range(5):
            save(model, tmp_path)

    children = [started(save_often, model) for model in models]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    weights = loaded(tmp_path)
    assert sum(same(weights, model.state_dict()) for model in models) == 1
    assert not list(tmp_path.glob(".*"))


def test_a_model_that_cannot_be_saved_does_not_cost_the_record(run_script, small_disk, tmp_path):
    record = tmp_path / "run.json"
    flags = ["--steps", "1", "--save", str(small_disk / "model"), "--json", str(record)]
    outcome = run_script(finetune_baseline, *TINY, *flags)
    assert outcome.code == 1 and "error: the model could not be saved" in outcome.err
    assert (
        "Traceback" not in outcome.err
        and run_records.read_record(str(record), "finetune")["steps"] == 1
    )
    assert not list((small_disk / "model").iterdir())
