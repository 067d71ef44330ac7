"""A folder of checkpoints as files: which of them are complete, undamaged and ours; who may write.

    DIR/.lock                        held by the run that writes here
    DIR/step-400/run.json            the facts: workload, losses so far, data, versions
    DIR/step-400/.metadata, *.distcp the tensors, for next_steps/finetuning/checkpoint.py
    DIR/step-400/checksums.json      size and digest of each of these files; made last

A checkpoint is written under another name and renamed when it is whole.  Only checksums.json and
the files that it lists are ever removed: a user's files stay.

This module imports no PyTorch.  A damaged checkpoint is refused before any of it is unpickled.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.cli.command_line import UserError
from harness.cli.output_files import UNFINISHED
from harness.cli.processes import is_first, rank, world_size

FACTS = "run.json"
CHECKSUMS = "checksums.json"
LOCK = ".lock"
NAMED = "step-"  # how a checkpoint's name begins; the number of steps taken follows
PIECE = 2**24  # bytes that a thread reads and digests at a time
# what reading a JSON file of ours raises if it is missing or damaged
UNREADABLE = OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError


# ---------------------------------------------------------------- which there are


def numbered(folder: str | Path) -> list[Path]:
    """Return the folders step-N in a folder, the highest N last."""
    found = {}
    for path in Path(folder).glob(f"{NAMED}*"):
        number = path.name.removeprefix(NAMED)
        if number.isdecimal() and str(int(number)) == number and path.is_dir():
            found[int(number)] = path
    return [found[step] for step in sorted(found)]


def all_in(folder: str | Path) -> list[Path]:
    """Return the complete checkpoints in a folder, the newest last; none without a folder."""
    return [path for path in numbered(folder) if (path / FACTS).exists()]


def newest(folder: str | Path) -> Path | None:
    """Return the complete checkpoint of most steps; None if there is none."""
    return (all_in(folder) or [None])[-1]


def in_the_way(folder: str | Path) -> list[Path]:
    """Return folders that are no checkpoints but have the names of later checkpoints."""
    there, last = numbered(folder), newest(folder)
    later = there if last is None else there[there.index(last) + 1 :]
    return [path for path in later if any(path.iterdir())]


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Hold a folder for this run's checkpoints, at most until the process ends, and clean it."""
    from harness.steps.parallel import gather  # with PyTorch, which flags are read without

    with contextlib.ExitStack() as stack:
        is_ours = not is_first() or take_lock(folder, stack)
        if not all(ours for (ours,) in gather(is_ours)):
            given = f"another run writes its checkpoints to --checkpoint {folder}"
            raise UserError(f"{given}, expected none: wait for its end, or name another folder")
        yield


def take_lock(folder: str, stack: contextlib.ExitStack) -> bool:
    """Lock a folder until the stack ends, and clean it; return False if another process has it."""
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    try:
        remove_unfinished(folder)
    except OSError as error:
        left = f"cannot remove from {folder} what an interrupted run left"
        raise UserError(f"{left}: {error.strerror or error}") from error
    return True


# ---------------------------------------------------------------- checksums


def digest(file: Path) -> str:
    """Return the SHA-256 of the SHA-256s of a file's pieces, which several threads read."""

    def of_piece(start: int) -> bytes:
        with open(file, "rb", buffering=0) as opened:
            opened.seek(start)
            return hashlib.sha256(opened.read(PIECE)).digest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        pieces = threads.map(of_piece, range(0, file.stat().st_size, PIECE))
        return hashlib.sha256(b"".join(pieces)).hexdigest()


def require_undamaged(path: Path) -> None:
    """Compare all files of a checkpoint with its checksums; several processes share the files."""
    from harness.steps.parallel import gather

    resume_another = "expected what --checkpoint wrote: resume another"
    try:
        listed = listed_files(path)
    except UNREADABLE as error:
        why = f"{path / CHECKSUMS} is missing or damaged ({type(error).__name__}: {error})"
        raise UserError(f"{why}, {resume_another}") from error
    names = sorted(listed)
    own = range(rank(), len(names), world_size())
    wrong = [i for i in own if not intact(path, names[i], listed)]
    first_of_each = gather(wrong[0] if wrong else -1)
    if (found := int(max(first_of_each)[0])) >= 0:
        name = names[found]
        raise UserError(f"{path / name} is damaged: its checksum differs, {resume_another}")


def intact(path: Path, name: str, listed: dict[str, list]) -> bool:
    """Return True if a file has the size and the digest that its checkpoint lists."""
    file = path / name
    try:
        return [file.stat().st_size, digest(file)] == listed[name]
    except OSError:
        return False


def listed_files(path: Path) -> dict[str, list]:
    """Return [size, digest] of each file that a checkpoint's checksums.json lists, by name."""
    listed = json.loads((path / CHECKSUMS).read_text())
    if not {FACTS, ".metadata"} <= listed.keys() or any(Path(n).name != n for n in listed):
        raise ValueError("it does not list the files of a checkpoint")
    return listed


# ---------------------------------------------------------------- written and removed


def complete(unfinished: Path, path: Path, facts: str, keep: int) -> None:
    """Make a folder with a checkpoint's tensors the checkpoint `path`; remove all but the newest.

    All files, their checksums and their names are on the disk before the folder is renamed.
    """
    (unfinished / FACTS).write_text(facts)
    sums = {file.name: [file.stat().st_size, digest(file)] for file in unfinished.iterdir()}
    (unfinished / CHECKSUMS).write_text(json.dumps(sums, indent=1))
    for each in (unfinished / FACTS, unfinished / CHECKSUMS, unfinished):
        sync(each)
    unfinished.rename(path)
    sync(path.parent)
    kept = all_in(path.parent)[-keep:]
    for other in numbered(path.parent):
        if other not in kept:
            try:
                remove(other)
            except OSError as error:
                print(f"{other} cannot be removed: {error.strerror}")


def remove(path: Path) -> None:
    """Remove a checkpoint, also one that is half removed; leave whatever else is in its folder.

    The facts go first: without them the rest is no checkpoint.  The list of our files goes last.
    """
    try:
        listed = listed_files(path)
    except UNREADABLE:
        listed = {}  # a user's folder, or an empty one
    for name in sorted(listed, key=lambda name: name != FACTS):
        (path / name).unlink(missing_ok=True)
    if listed:
        (path / CHECKSUMS).unlink()
    with contextlib.suppress(OSError):  # it holds something else
        path.rmdir()


def remove_unfinished(folder: str | Path) -> None:
    """Remove what an interrupted save left; only the run that holds the folder may call this."""
    for path in Path(folder).glob(f"{UNFINISHED}{NAMED}*"):
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
