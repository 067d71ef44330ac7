"""The user loses nothing: each file is written whole or not at all; a bad place is refused."""

import argparse
import gzip
import itertools
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import benchmark_kernels
import finetune_baseline
import finetune_optimized
import profile_baseline
from harness.cli import command_line, output_files, tables
from harness.cli.workload import Workload
from harness.data import dataset
from harness.profiling.profiler import write_trace
from harness.records import run_records
from harness.training import saving
from tests.conftest import assert_refused, tracked
from tests.small_workloads import change_json, smaller_config
from tests.token_cache_test import tokenizer_of
from tools import fill_pages
from tools.page_records import HERE

TINY = ["--model", "tiny", "--dtype", "fp32", "--seq-len", "8"]
NOBODY = 65534  # a user without rights
CHANGES = {
    f"os.{name}" for name in ("rename", "link", "remove", "rmdir", "mkdir", "chmod", "chown")
}


# ---------------------------------------------------------------- places to write to, and accidents


@pytest.fixture
def open_folder():
    """A folder that every user of the machine may write to."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def in_child(function, before=lambda: None) -> str:
    """Run function() in another process; return 'done', 'killed', or what was raised, in words."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # a fork has no other thread that could help
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


def started(function, *arguments) -> multiprocessing.Process:
    """Start a process that calls function(*arguments); it ends with 0 if that raises nothing."""

    def call():
        torch.set_num_threads(1)
        function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    return process


def without_rights(function) -> str:
    """Run function() as `in_child` does, but not as root, whom no permission stops."""
    return in_child(function, lambda: os.setuid(NOBODY) if os.getuid() == 0 else None)


def killed_before_change(number: int, function) -> str:
    """Run function() as `in_child` does, and kill it before it changes files for the n-th time."""
    count = itertools.count(1)

    def watch(event, arguments):
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (writes or event in CHANGES) and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return in_child(function, lambda: sys.addaudithook(watch))


def killed_at_each_change(start: Path, folder: Path, function) -> Iterator[str]:
    """Run function() on copies of a folder, each time killed one change of files later.

    Yields 'killed' after each, and 'done' after the last, which ends by itself.
    """
    for number in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        ended = killed_before_change(number, function)
        assert ended in ("done", "killed"), ended
        yield ended
        if ended == "done":
            return


def contents(folder: Path) -> dict[str, bytes]:
    """Each file's bytes; of a model their hash, because pytest compares two models for minutes."""
    files = ((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): sha256(found).digest() if len(found) > 9999 else found
        for path, found in files
    }


# ---------------------------------------------------------------- whole or not at all


def write(path: Path | str, content: bytes = b"new") -> None:
    output_files.write_output(str(path), content, "the record")


def test_a_write_that_stops_half_way_leaves_the_old_record_and_nothing_beside(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("old")
    written = in_child(
        lambda: write(path, bytes(5000)),
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY)),
    )
    assert written == f"RunError: the record could not be written to {path}: File too large"
    assert contents(tmp_path) == {"run.json": b"old"}


@pytest.mark.parametrize("old", [b"old" * 1000, None], ids=["there", "not there"])
def test_a_process_killed_at_any_moment_leaves_the_old_record_or_the_new_one(tmp_path, old):
    start, path, new = tmp_path / "start", tmp_path / "folder" / "run.json", b"new" * 2000
    start.mkdir()
    if old is not None:
        (start / "run.json").write_bytes(old)
    saves = killed_at_each_change(start, path.parent, lambda: write(path, new))
    found = [path.read_bytes() if path.exists() else None for _ in saves]
    assert {*found} == {old, new} and found[-1] == new and len(found) > 2


def test_of_two_processes_on_one_path_the_last_one_wins_whole(tmp_path):
    path, wholes = tmp_path / "run.json", [bytes([65 + i]) * 300_000 for i in range(3)]
    path.write_bytes(wholes[0])

    def write_often(whole):
        for _ in range(100):
            write(path, whole)

    processes, seen = [started(write_often, whole) for whole in wholes], set()
    while any(process.is_alive() for process in processes):
        seen.add(path.read_bytes())
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert seen <= set(wholes) and len(list(tmp_path.iterdir())) == 1


def test_permissions_stay_and_a_new_file_has_the_usual_ones(tmp_path):
    private, new, plain = (tmp_path / name for name in ("private", "new", "plain"))
    private.write_text("old")
    private.chmod(0o640)
    plain.touch()
    for path in (private, new):
        write(path)
    assert stat.S_IMODE(private.stat().st_mode) == 0o640 and private.read_bytes() == b"new"
    assert new.stat().st_mode == plain.stat().st_mode


# ---------------------------------------------------------------- links, devices, pipes


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed_and_stays(tmp_path, there):
    target, link = tmp_path / "far" / "run.json", tmp_path / "link.json"
    link.symlink_to(target)
    if there:
        target.parent.mkdir()
        target.write_text("old")
    output_files.require_writable(str(link))
    assert target.exists() == there
    write(link)
    assert link.is_symlink() and target.read_text() == "new"
    assert os.listdir(tmp_path / "far") == ["run.json"]


def test_a_device_is_written_into_and_stays(tmp_path):
    device = tmp_path / "device"  # a second /dev/null; the real one is not put at risk
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_text("a container may allow the node and forbid its use")
    except PermissionError as error:
        pytest.skip(f"no device can be made here: {error}")
    node = device.stat()
    output_files.check_outputs(argparse.Namespace(json=str(device), trace=str(device)))
    write(device)
    assert stat.S_ISCHR(device.stat().st_mode) and device.stat().st_ino == node.st_ino
    assert os.listdir(tmp_path) == ["device"]
    with pytest.raises(command_line.RunError, match=r"written to /dev/full: No space left"):
        write("/dev/full")


def test_a_pipe_gets_the_record(tmp_path):
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    output_files.require_writable(str(path))  # without a reader, for which opening it would wait
    reader.start()
    write(path)
    reader.join(5)
    assert path.is_fifo() and read == [b"new"]


# ---------------------------------------------------------------- refused before the work, and
# nothing is changed


@pytest.mark.parametrize("place", ["run.json", "new/run.json"])
def test_a_folder_without_permission_is_refused(open_folder, place):
    open_folder.chmod(0o755)
    path = open_folder / place
    for is_folder, words in ((False, path), (True, f"to {path}")):
        said = without_rights(lambda i=is_folder: output_files.require_writable(str(path), i))
        assert said == f"UserError: cannot write {words}: Permission denied"
    assert not os.listdir(open_folder)


def test_a_file_without_permission_is_neither_accepted_nor_replaced(open_folder):
    """The permission of its folder would be enough to replace it."""
    path = open_folder / "run.json"
    path.write_text("kept")
    path.chmod(0o444)
    refused = without_rights(lambda: output_files.require_writable(str(path)))
    assert refused == f"UserError: cannot write {path}: Permission denied"
    failed = without_rights(lambda: write(path))
    assert failed == f"RunError: the record could not be written to {path}: Permission denied"
    assert contents(open_folder) == {"run.json": b"kept"}


REFUSED = {  # flags: words of the refusal
    "--trace x --json ./sub/../x": "--json ./sub/../x collides with --trace x",
    "--trace link --json empty": "--json empty collides with --trace link",
    "--trace hard --json empty": "--json empty collides with --trace hard",
    "--trace new --json dangling": "--json dangling collides with --trace new",
    "--json a --plot a/b.png": "--json a collides with --plot a/b.png",
    "--json out --save out/model": "--json out collides with --save out/model",
    "--json out/config.json": "--json out/config.json has the name of a model's file",
    "--model sub --save sublink": "--save sublink collides with --model sub: name another",
    "--teacher sub --save sub": "--save sub collides with --teacher sub",
    "--json=": "--json '' names nothing: give a path",
    "--save=": "--save '' names nothing",
    "--trace sub": "cannot write sub: Is a directory",
    "--trace new/": "cannot write new/: Is a directory",
    "--plot x.xyz": "--plot x.xyz must end in .png",
    "--json loop": "cannot write loop: Too many levels",
    "--json empty/output": "cannot write empty/output: Not a directory",
    "--save empty": "cannot write to empty: Not a directory",
    "--json a/run.json --save a --checkpoint a": "",  # accepted
}
OUTPUTS = *output_files.BEGINNINGS, *output_files.OUTPUT_FOLDERS, "model", "teacher"


def refusal(flags: str) -> str:
    """Return what the user is told of these flags; nothing if they are accepted."""
    parser = argparse.ArgumentParser()
    for name in OUTPUTS:
        parser.add_argument(command_line.flag_name(name))
    try:
        output_files.check_outputs(parser.parse_args(flags.split()))
    except command_line.UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("flags", REFUSED)
def test_an_output_that_cannot_be_or_would_overwrite_something_is_refused(
    tmp_path, monkeypatch, flags
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "empty").touch()
    os.link("empty", "hard")
    links = {"link": "empty", "dangling": "new", "sublink": "sub", "loop": "loop"}
    for link, target in links.items():
        os.symlink(target, link)
    before = contents(tmp_path), sorted(tmp_path.rglob("*"))
    said = refusal(flags)
    assert REFUSED[flags] in said and bool(said) == bool(REFUSED[flags])
    assert (contents(tmp_path), sorted(tmp_path.rglob("*"))) == before


def test_what_is_printed_into_is_not_replaced(tmp_path):
    def print_and_check():
        os.dup2(os.open(tmp_path / "printed", os.O_WRONLY | os.O_CREAT), 1)
        raise AssertionError(refusal(f"--json {tmp_path / 'printed'}"))

    assert "printed collides with standard output" in in_child(print_and_check)


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


def test_every_script_leaves_files_of_others_alone(run_script, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"kind": "mine", "prompt": "my own", "completion": "sample"}\n')
    before = contents(tmp_path)
    for script, *flags in (
        (finetune_baseline, *TINY, "--json", str(path)),
        (finetune_optimized, *TINY, "--json", str(path)),
        (profile_baseline, *TINY, "--trace", str(path)),
        (benchmark_kernels, "--kernel", "rmsnorm", "--json", str(path)),
        (fill_pages, "--record", str(path), "rmsnorm_test.py"),
    ):
        outcome = run_script(script, *flags)
        assert_refused(outcome, f"{path} would replace a file", "name another file")
    assert contents(tmp_path) == before


def profiled(n_products: int = 1) -> torch.profiler.profile:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(n_products):
            torch.randn(4, 4) @ torch.randn(4, 4)
    return profiler


def test_what_the_scripts_wrote_and_an_empty_file_are_replaced(tmp_path):
    """Only the beginning of a memory snapshot is made: to take one needs a GPU."""
    there = {name: tracked(f"results/*.{name}") for name in ("json", "png")}
    assert min(map(len, there.values())) > 10
    names = "drawn.png", "trace.json", "trace.json.gz", "step.pickle", "empty.png"
    drawn, trace, compressed, snapshot, empty = paths = [tmp_path / name for name in names]
    tables.save_plot(tables.pyplot().figure(figsize=(1, 1)), str(drawn))
    write_trace(profiled(), str(trace))
    compressed.write_bytes(gzip.compress(trace.read_bytes()))
    snapshot.write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    empty.touch()
    written = {"json": [*there["json"], empty], "plot": [*there["png"], drawn, empty]}
    written |= {"trace": [trace, compressed, empty], "memory_snapshot": [snapshot, empty]}
    assert written.keys() == output_files.BEGINNINGS.keys() and all(map(Path.exists, paths))
    for name, files in written.items():
        for path in files:
            output_files.check_outputs(argparse.Namespace(**{name: str(path)}))


def test_make_clean_leaves_what_a_reader_made(tmp_path):
    shutil.copy(HERE / "Makefile", tmp_path)
    kept = ["runs/llama/step-400/run.json", "runs/adapter/adapter_model.safetensors"]
    for name in [*kept, "demo/before.json", "traces/tiny.json", ".venv/installed"]:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("there")
    subprocess.run(["make", "-C", tmp_path, "clean"], check=True, capture_output=True)
    assert sorted(contents(tmp_path)) == sorted(["Makefile", *kept])


# ---------------------------------------------------------------- the trace


@pytest.mark.parametrize("full", ["for the profiler", "for the trace"])
def test_a_full_disk_leaves_the_trace_that_was_there(small_disk, tmp_path, monkeypatch, full):
    """The old trace is not read in place of the new one."""
    if full == "for the profiler":
        monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
        path = tmp_path / "trace.json"
        said = f"^the profiler could not write its trace in {small_disk}: .*TMPDIR"
    else:
        path = small_disk / "trace.json"
        said = r"^the trace could not be written to .*trace\.json: No space left"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(command_line.RunError, match=said):
        write_trace(profiled(500), str(path))
    assert path.read_text() == '{"traceEvents": []}'
    assert os.listdir(small_disk) == [path.name] * (path.parent == small_disk)


def test_a_trace_is_compressed_if_its_name_says_so_and_names_no_machine(tmp_path):
    path, trace = tmp_path / "trace.json.gz", {"traceEvents": [{"name": "aten::mm"}] * 100}
    found = trace | {"host_name": "mine", "traceName": "/tmp/x/trace.json"}
    profiler = argparse.Namespace(
        export_chrome_trace=lambda path: Path(path).write_text(json.dumps(found))
    )
    returned, n_bytes = write_trace(profiler, str(path))
    assert returned == found and n_bytes == path.stat().st_size
    written = json.loads(gzip.decompress(path.read_bytes()))
    assert written.pop("environment")["commit"] and written == trace


# ---------------------------------------------------------------- saved models


def make_model(seed: int) -> torch.nn.Module:
    """A small LLaMA on the CPU."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(smaller_config())


def save(model: torch.nn.Module, folder: Path) -> None:
    saving.save_model(model, Workload(model="tiny"), str(folder))


def holds(folder: Path, model: torch.nn.Module) -> bool:
    """Return True if the folder has a whole model with this model's weights."""
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    pairs = zip(loaded.state_dict().items(), model.state_dict().items(), strict=True)
    return all(name == other and torch.equal(t, u) for (name, t), (other, u) in pairs)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def killed_saves(
    start: Path, folder: Path, model: torch.nn.Module, names: set[str]
) -> Iterator[None]:
    """Yield after each save that is killed; the next save leaves these names, and nothing of it."""
    for ended in killed_at_each_change(start, folder, lambda: save(model, folder)):
        yield
        if ended == "killed":
            save(model, folder)
        assert names_in(folder) == names and holds(folder, model)


MODEL_NAMES = {"config.json", "generation_config.json", "model.safetensors"}
USERS_FILES = {
    "model.safetensors.bak",
    "model_best.safetensors",
    "model-00001-of-00009.safetensors",
    "notes.txt",
    ".unfinished-record",  # another process is writing it
}


@pytest.mark.parametrize("exists", [True, False])
def test_a_save_killed_at_any_moment_leaves_the_whole_old_or_the_whole_new_model(exists, tmp_path):
    """And the next one leaves nothing of it, nor of an earlier crash."""
    old, new = make_model(0), make_model(1)
    start, folder = tmp_path / "start", tmp_path / "folder"
    start.mkdir()
    if exists:
        save(old, start)
    for name in USERS_FILES:
        (start / name).write_text(name)
    (start / ".unfinished-model").mkdir()
    (start / ".unfinished-model" / "half.safetensors").write_text("half")
    found = []
    for _ in killed_saves(start, folder, new, MODEL_NAMES | USERS_FILES):
        if (folder / "config.json").exists():
            assert (folder / "model.safetensors").exists()
            found.append("new" if holds(folder, new) else "old")
            assert found[-1] == "new" or holds(folder, old)
        else:
            found.append("old")
            assert not exists
    assert found == sorted(found, reverse=True) and {*found} == {"old", "new"} and len(found) > 7
    assert all((folder / name).read_text() == name for name in USERS_FILES)


INDEX = '{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}'
ANOTHER_MODEL = {  # what a folder has besides a small model, and what the sentence says of it
    "another shape": ({"num_hidden_layers": 2}, "num_hidden_layers 2 (not 1)"),
    "another kind": ({"model_type": "mistral"}, "model_type mistral"),
    "shards": (INDEX, "weights in several files"),
    "weights elsewhere": (
        {"transformers_weights": ".unfinished-a/model.safetensors"},
        "weights in several files",
    ),
    "damaged": ("{", "its config.json cannot be read"),
}


@pytest.mark.parametrize("case", ANOTHER_MODEL)
def test_a_folder_with_another_model_is_refused(case, tmp_path):
    """Before training, and before the save: another run may have put it there meanwhile."""
    change, said = ANOTHER_MODEL[case]
    model = make_model(0)
    save(model, tmp_path)
    if isinstance(change, dict):
        change_json(tmp_path / "config.json", **change)
    else:
        name = "model.safetensors.index.json" if change == INDEX else "config.json"
        (tmp_path / name).write_text(change)
    before, refused = contents(tmp_path), ""
    try:
        saving.refuse_another_model(str(tmp_path), model, Workload())
    except command_line.UserError as error:
        refused = str(error)
    assert said in refused and str(tmp_path) in refused and "\n" not in refused
    with pytest.raises(command_line.RunError, match="the model could not be saved to"):
        save(model, tmp_path)
    assert contents(tmp_path) == before


def test_a_model_without_a_tokenizer_does_not_get_that_of_the_model_before_it(
    tmp_path, monkeypatch
):
    """The save is killed at any moment; the next save removes what is left of the tokenizer.

    Nor does a tokenizer get the template of chats of the one before it.
    """
    start, folder, new = tmp_path / "model", tmp_path / "again", make_model(1)
    plain, with_template = tokenizer_of("c b a"), tokenizer_of("a b c", chat_template="{{ 1 }}")
    start.mkdir()
    for name in ("tokenizer.model", "vocabulary.txt"):  # other programs read them
        (start / name).write_text("there")
    for tokenizer in (with_template, plain, with_template):
        with monkeypatch.context() as patch:
            patch.setattr(saving, "load_tokenizer", lambda workload, given=tokenizer: given)
            save(make_model(0), start)
        again = dataset.load_tokenizer(Workload(model=str(start)))
        assert again.chat_template == tokenizer.chat_template
        assert again.get_vocab() == tokenizer.get_vocab()
    assert {"tokenizer.json", "chat_template.jinja", "tokenizer.model"} <= names_in(start)
    for _ in killed_saves(start, folder, new, MODEL_NAMES | {"vocabulary.txt"}):
        assert (folder / "tokenizer.json").exists() or holds(folder, new)
    assert dataset.load_tokenizer(Workload(model=str(folder))) is None


@pytest.mark.parametrize("fault", ["No space left on device", r"wrote no model\.safetensors"])
def test_a_failed_save_leaves_the_old_model_and_nothing_beside(tmp_path, capsys, fault):
    save(make_model(0), tmp_path)
    before, new = contents(tmp_path), make_model(1)
    real = new.save_pretrained

    def save_pretrained(folder, **options):
        assert options["max_shard_size"] > 10**15, "one file, which one rename replaces"
        if "space" not in fault:
            return new.config.save_pretrained(folder)
        real(folder, **options)
        raise OSError(28, fault)

    new.save_pretrained = save_pretrained
    with pytest.raises(command_line.RunError, match=f"the model could not be saved to .*{fault}"):
        save(new, tmp_path)
    assert contents(tmp_path) == before and not list(tmp_path.glob(".*"))
    assert capsys.readouterr().out.count("saved to") == 1


def test_a_link_to_the_folder_is_followed_and_links_in_it_are_not_written_through(tmp_path):
    """In Hugging Face's cache links lead to files that other folders share."""
    cache, folder, link = tmp_path / "cache", tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    save(make_model(0), cache)
    shared = contents(cache)
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(cache / name)
    new = make_model(1)
    save(new, link)
    assert link.is_symlink() and holds(folder, new) and contents(cache) == shared


def test_saves_of_two_processes_leave_one_whole_model(tmp_path):
    models = [make_model(seed) for seed in range(3)]

    def save_often(model):
        for _ in range(5):
            save(model, tmp_path)

    processes = [started(save_often, model) for model in models]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sum(holds(tmp_path, model) for model in models) == 1
    assert not list(tmp_path.glob(".*"))


# ---------------------------------------------------------------- --save, before and after training


def test_a_folder_that_cannot_take_the_model_is_refused_before_training(
    run_script, monkeypatch, checkpoint, tmp_path
):
    """transformers 5.17 refuses to save a temperature beside do_sample false."""

    def refused(*flags: str) -> str:
        outcome = run_script(finetune_baseline, *TINY, *flags)
        assert_refused(outcome)
        assert "step 1" not in outcome.out
        return outcome.err

    other, new = tmp_path / "other", str(tmp_path / "new" / "model")
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    said = f"--save {other} holds another model: model_type gpt2"
    assert said in refused("--save", str(other))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: argparse.Namespace(free=2**16))
        for more in ([], ["--lora-rank", "32"]):
            said = f"--save {new} has 6.55e-05 GB of room, expected 1 x 0.000"
            assert said in refused("--save", new, *more)

    def strict(self, *args, **options):
        raise ValueError("GenerationConfig is invalid:\n`temperature`")

    monkeypatch.setattr(GenerationConfig, "save_pretrained", strict)
    flags = ["--model", str(checkpoint), "--save", new]
    said = refused(*flags)
    assert "would not save this model again: GenerationConfig is invalid" in said and "Mend" in said
    adapters = [*flags, "--steps", "1", "--lora-rank", "2"]
    assert run_script(finetune_baseline, *TINY, *adapters).code == 0


def test_a_model_that_cannot_be_saved_does_not_cost_the_record(
    run_script, monkeypatch, small_disk, tmp_path
):
    # others fill it meanwhile
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: argparse.Namespace(free=2**40))
    record = tmp_path / "run.json"
    flags = ["--steps", "1", "--save", str(small_disk / "model"), "--json", str(record)]
    outcome = run_script(finetune_baseline, *TINY, *flags)
    assert outcome.code == 1 and "error: the model could not be saved" in outcome.err
    assert "Traceback" not in outcome.err
    assert run_records.read_record(str(record), "finetune")["steps"] == 1
    assert not list((small_disk / "model").iterdir())
