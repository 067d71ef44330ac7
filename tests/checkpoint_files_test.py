"""Checkpoints beside the training: who may write them, how damage is found, what is removed."""

import errno
import fcntl
import json
import os
import random
import resource
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import finetune_baseline
from harness.cli.command_line import RunError, UserError
from harness.cli.device import HAS_GPU
from harness.training import checkpoint_files, resuming, training_run
from harness.training.checkpoint_files import CHECKSUMS, FACTS_FILE, LOCK
from harness.training.resuming import Checkpoints
from next_steps.finetuning import checkpoint, kernel_training
from tests.conftest import assert_refused
from tests.files_test import in_child, started
from tests.fixtures import needs_gpu
from tests.resume_shards_test import save_checkpoint, training
from tests.resume_test import SMALL, differing, flags_of, names_in, trained  # noqa: F401
from tests.small_workloads import TINY, tiny_workload
from tests.two_processes import in_two_processes, one_gpu_is_too_few

pytestmark = pytest.mark.usefixtures("small_model", "own_cache")
forks = pytest.mark.skipif(HAS_GPU, reason="a process that has used a GPU cannot be forked")
EVERY_STEP = ["--checkpoint-every", "1"]


@pytest.fixture
def saved(tmp_path) -> Path:
    """The checkpoint of step 2 of a small training."""
    return save_checkpoint(tmp_path / "kept", *training(1), 2)


# ---------------------------------------------------------------- one run writes


def test_two_runs_of_one_command_do_not_remove_each_others_files(run_script, tmp_path):
    """A scheduler has started the command again while the first run is still there."""
    folder = tmp_path / "kept"
    flags = flags_of(folder, *EVERY_STEP)
    with checkpoint_files.locked(str(folder)):
        (folder / ".unfinished-step-2").mkdir()
        outcome = run_script(finetune_baseline, *flags)
        assert_refused(outcome, f"another run writes its checkpoints to --checkpoint {folder}")
        assert outcome.out == "" and names_in(folder) == [".unfinished-step-2"]
    assert run_script(finetune_baseline, *flags).code == 0
    assert names_in(folder) == ["step-5"]


def test_what_the_other_run_wrote_before_it_ended_is_seen(saved):
    """The other run ended after this run had read its flags."""
    folder = str(saved.parent)
    locked = Checkpoints(folder, 1).folder_locked()
    with pytest.raises(UserError, match="holds step-2 of another run"), locked:
        pass
    with Checkpoints(folder, 1, folder).folder_locked():
        pass


def test_a_model_is_saved_beside_the_checkpoints_of_its_run(run_script, tmp_path):
    """Neither waits for the other's lock or removes what the other has not finished."""
    folder = tmp_path / "both"
    flags = flags_of(folder, "--checkpoint-every", "2", "--save", str(folder))
    assert run_script(finetune_baseline, *flags).code == 0
    names = names_in(folder)
    assert "step-4" in names and "model.safetensors" in names
    (folder / ".unfinished-step-7").mkdir()
    save = ["--save", str(folder)]
    assert run_script(finetune_baseline, *TINY, *SMALL, *save).code == 0
    assert names_in(folder) == [".unfinished-step-7", *names]


# ---------------------------------------------------------------- what is removed


def test_a_users_files_stay(tmp_path):
    for name in ("step-1", "step-02", "step-9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    save_checkpoint(tmp_path, *training(1), 2)
    (tmp_path / "step-2" / "notes.txt").write_text("mine too")
    save_checkpoint(tmp_path, *training(1), 3)
    assert names_in(tmp_path) == ["step-02", "step-1", "step-2", "step-3", "step-9"]
    for name in ("step-1", "step-02", "step-2", "step-9"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["notes.txt"]
    assert resuming.newest(tmp_path).name == "step-3"


def test_an_older_checkpoint_that_cannot_be_removed_stays_and_is_said(saved, monkeypatch, capsys):
    """The run once ended, and said that its new checkpoint could not be written."""

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(checkpoint_files, "remove", refuse)
    save_checkpoint(saved.parent, *training(1), 4)
    assert capsys.readouterr().out == f"{saved} cannot be removed: Permission denied\n"
    assert names_in(saved.parent) == ["step-2", "step-4"]


def put_notes(folder: Path) -> None:
    (folder / "step-4").mkdir()
    (folder / "step-4" / "notes.txt").write_text("mine")


REFUSED = [  # what is in the folder {}, the flag that is given, words of the sentence
    (put_notes, "--checkpoint {}", "--checkpoint {} holds step-4, which is no checkpoint"),
    (
        lambda folder: (folder / ".unfinished-step-2").symlink_to(folder),
        "--checkpoint {}",
        "cannot remove from {} what an interrupted run left: ",
    ),
    (
        lambda folder: save_checkpoint(folder, *training(1), 2),
        "--checkpoint {}",
        "--checkpoint {} holds step-2 of another run",
    ),
    (None, "--checkpoint ", "--checkpoint '' names nothing"),
    (None, "--checkpoint /dev/null", "cannot write to /dev/null"),
    (None, "--resume ", "holds no checkpoint"),
    (None, "--resume /nowhere", "--resume '/nowhere' holds no checkpoint"),
]


@pytest.mark.parametrize(("put", "flag", "said"), REFUSED)
def test_a_place_for_no_checkpoint_is_refused_before_the_run(run_script, tmp_path, put, flag, said):
    if put:
        put(tmp_path)
    before = names_in(tmp_path)
    outcome = run_script(finetune_baseline, *TINY, *SMALL, *flag.format(tmp_path).split(" "))
    assert_refused(outcome, said.format(tmp_path))
    assert outcome.out == "" and names_in(tmp_path) == before


def test_what_a_checkpoint_lists_cannot_be_a_file_elsewhere(saved):
    outside = saved.parent / "outside"
    outside.write_text("there")
    listed = json.loads((saved / CHECKSUMS).read_text())
    listed["../../outside"] = [5, checkpoint_files.file_digest(outside)]
    (saved / CHECKSUMS).write_text(json.dumps(listed))
    with pytest.raises(UserError, match="does not list the files of a checkpoint"):
        checkpoint_files.require_undamaged(saved)
    checkpoint_files.remove(saved)
    assert outside.exists()


def test_the_newest_are_kept_and_the_record_says_how_long_training_waited(recorded, tmp_path):
    folder = tmp_path / "kept"
    record = recorded(finetune_baseline, *flags_of(folder, *EVERY_STEP, "--keep", "3"))
    assert names_in(folder) == ["step-3", "step-4", "step-5"]
    for step in range(1, 6):
        assert f"Checkpoint written to {folder / f'step-{step}'}\n" in record["printed"]
    waits = record["checkpoint_seconds"]
    assert len(waits) == 5 and all(seconds > 0 for seconds in waits)
    assert f"Waiting for checkpoints:  {sum(waits):.1f} s in all, for 5\n" in record["printed"]


# ---------------------------------------------------------------- what is damaged


def test_a_flipped_bit_is_found_in_every_file(saved):
    checkpoint_files.require_undamaged(saved)
    choose = random.Random(0)
    for file in saved.iterdir():
        content = file.read_bytes()
        for _ in range(60):
            bit = choose.randrange(8 * len(content))
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            try:
                checkpoint_files.require_undamaged(saved)
            except UserError as refused:
                assert file.name in str(refused) or file.name == CHECKSUMS
            else:  # a line break became another blank, where JSON allows it
                assert file.name == CHECKSUMS and json.loads(flipped) == json.loads(content)
        file.write_bytes(content)
    checkpoint_files.require_undamaged(saved)


def test_a_large_file_is_digested_in_pieces_and_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "PIECE", 4)
    digests = set()
    for content in (b"", b"aaaabbbb", b"bbbbaaaa", b"aaaabbb", b"aaaabbbbc"):
        (tmp_path / "file").write_bytes(content)
        digests.add(checkpoint_files.file_digest(tmp_path / "file"))
    assert len(digests) == 5


def read_in(rank, device, path: Path) -> tuple[str, list[str], dict[str, list[str]]]:
    """Return what this process is told, which files it has read, and what it writes itself."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    digest, read, said = checkpoint_files.file_digest, [], ""
    checkpoint_files.file_digest = lambda file: read.append(file.name) or digest(file)
    try:
        checkpoint_files.require_undamaged(path)
    except UserError as refused:
        said = str(refused)
    share = checkpoint.share_of(checkpoint.tensors_of(*training(1)))
    return said, read, {part: [*named] for part, named in share.items()}


@pytest.mark.exhaustive
@one_gpu_is_too_few
def test_several_processes_share_the_files_and_what_all_have_and_refuse_together(
    saved, tmp_path_factory
):
    """Else eight processes would need eight times the host's memory for their copies."""
    stores = [tmp_path_factory.mktemp(name) for name in ("intact", "damaged")]
    (said, *one), (other_said, *other) = in_two_processes(read_in, stores[0], saved)
    assert said == other_said == ""
    assert sorted(one[0] + other[0]) == sorted(
        {file.name for file in saved.iterdir()} - {CHECKSUMS}
    )
    for part, names in one[1].items():
        assert sorted(names + other[1][part]) == ["0.bias", "0.weight", "1.weight"]
        assert len(names) == 2
    os.truncate(saved / FACTS_FILE, 1)
    (said, *_), (other_said, *_) = in_two_processes(read_in, stores[1], saved)
    assert said == other_said and f"{FACTS_FILE} is damaged" in said


# ---------------------------------------------------------------- beside the training


@pytest.mark.parametrize(
    ("kernels", "graph"),
    [((), False), (("adamw",), False), pytest.param(("adamw",), True, marks=needs_gpu)],
    ids=["PyTorch's", "adamw", "as a graph"],
)
def test_a_step_does_not_wait_for_the_disk_nor_change_what_is_written(
    trained,  # noqa: F811
    tmp_path,
    monkeypatch,
    kernels,
    graph,
):
    """The thread writes through all of the next step, in which a graph is recorded, and the one
    that counts after it.

    Each copy lies in the memory of the first.  To take and pin 48 GB took 20 s on an H200's host.
    """
    workload = replace(tiny_workload(*SMALL), kernels=kernels, cuda_graph=graph)
    straight, folder = trained(workload), tmp_path / "kept"
    steps, end_step, write, copies = [0], training_run.Run.end_step, checkpoint.write, []

    def count(run, loss):
        end_step(run, loss)
        steps[0] = len(run.losses)

    def write_long(folder, tensors, facts, *more):
        copies.append([t.data_ptr() for t in tree_leaves(tensors)])
        end = time.monotonic() + 60
        while steps[0] <= facts["step"]:
            checkpoint.dcp.save(tensors, storage_writer=checkpoint.Writer(tmp_path / "again"))
            if time.monotonic() > end:
                raise RunError("training waited for the disk")
        return write(folder, tensors, facts, *more)

    with monkeypatch.context() as patch:
        patch.setattr(training_run.Run, "end_step", count)
        patch.setattr(checkpoint, "write", write_long)
        trained(workload, Checkpoints(str(folder), 2, keep=2))
    assert names_in(folder) == ["step-2", "step-4"] and copies[0] == copies[1]
    for step in (4, 2):
        assert not differing(trained(workload, Checkpoints(resume=str(folder))), straight), step
        shutil.rmtree(folder / f"step-{step}")


def steps_in(folder: Path) -> int:
    """Return the step of the newest checkpoint; 0 without one."""
    path = resuming.newest(folder)
    return int(path.name.removeprefix("step-")) if path else 0


@forks
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_run_killed_beside_its_writer_goes_on_to_the_bit(trained, tmp_path, seed):  # noqa: F811
    """A dozen times, at any moment of the writing: what is newest is whole, and little else stays.

    Two are kept, one may be half written, and one half removed.
    """
    workload = tiny_workload("--seq-len", "8", "--steps", "200")
    straight = trained(workload)
    choose, folder, taken = random.Random(seed), tmp_path / "kept", [0]
    for more in [0, 1, 2] * 4:  # checkpoints, so that a busy machine gets far enough too
        resume = str(folder) if taken[-1] else None
        asked = Checkpoints(str(folder), 1, resume, keep=2)
        late = choose.uniform(0, 0.1)
        child = started(partial(kernel_training.train_with_kernels, workload, checkpoints=asked))
        while steps_in(folder) < taken[-1] + more or not list(folder.glob(".unfinished-*")):
            assert child.is_alive()
            time.sleep(0.001)
        time.sleep(late)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert len(names_in(folder)) <= 4
        taken.append(steps_in(folder))
        if taken[-1]:
            checkpoint_files.require_undamaged(resuming.newest(folder))
    assert taken == sorted(taken) and taken[-1] > 5
    assert not differing(trained(workload, Checkpoints(resume=str(folder))), straight)


@pytest.mark.parametrize("says", ["nothing left", "pinned"])
def test_where_the_host_has_no_memory_for_a_copy_training_waits(
    run_script, tmp_path, monkeypatch, says
):
    def refuse(*_):
        raise RuntimeError("Registering memory failed with cudaError: 2.\nMore about it")

    if says == "pinned":
        monkeypatch.setattr(checkpoint.StateDictStager, "stage", refuse)
        why = "Registering memory failed with cudaError: 2."
    else:
        monkeypatch.setattr(checkpoint, "host_memory", lambda: 0)
        why = "a copy of what is saved takes 0.000"
    outcome = run_script(finetune_baseline, *flags_of(tmp_path / "kept", *EVERY_STEP))
    assert outcome.code == 0 and names_in(tmp_path / "kept") == ["step-5"]
    assert outcome.out.count(f"Training waits until each checkpoint is written: {why}") == 1
    assert outcome.out.index("step-1\n") < outcome.out.index("step 2/6")


# ---------------------------------------------------------------- a full disk


def test_a_disk_that_is_too_small_is_refused_before_the_run(run_script, small_disk):
    (small_disk / "other").write_bytes(bytes(2**15))
    outcome = run_script(finetune_baseline, *flags_of(small_disk / "kept", *EVERY_STEP))
    said = f"error: --checkpoint {small_disk / 'kept'} has "
    assert_refused(outcome, said, "expected 2 x ", "lower --keep or name another")
    assert "step 1/6" not in outcome.out


@pytest.mark.parametrize("rows", [400, 40_000], ids=["in the middle", "at the beginning"])
def test_a_disk_that_is_full_is_what_the_system_says(small_disk, rows):
    path = save_checkpoint(small_disk, *training(1), 1)
    large = torch.nn.Linear(10, rows)
    optimizer = torch.optim.AdamW(large.parameters())
    large(torch.ones(10)).sum().backward()
    optimizer.step()
    expected = f"{os.strerror(errno.ENOSPC)}; {path} is still there"
    said = f"^no checkpoint could be written to {small_disk}: {expected}$"
    with pytest.raises(RunError, match=said):
        save_checkpoint(small_disk, large, optimizer, 2)
    assert names_in(small_disk) == ["step-1"], "the disk has room for other files again"


@forks
def test_a_thread_that_cannot_write_ends_the_run_with_a_sentence(tmp_path):
    def train():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        kernel_training.train_with_kernels(
            tiny_workload(*SMALL), checkpoints=Checkpoints(str(tmp_path / "kept"), 5)
        )

    expected = os.strerror(errno.EFBIG)
    said = f"RunError: no checkpoint could be written to {tmp_path / 'kept'}: {expected}"
    assert in_child(train) == said
    assert names_in(tmp_path / "kept") == []


def test_a_file_system_without_locks_has_checkpoints_too(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with checkpoint_files.locked(str(tmp_path)):
        assert (tmp_path / LOCK).exists()
