"""Files that a script writes: refused before the work, or written whole or not at all."""

import argparse
import contextlib
import errno
import fnmatch
import gzip
import os
import re
import secrets
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from harness.cli.command_line import RunError, UserError, flag_name
from harness.cli.processes import is_first

OUTPUT_FOLDERS = "save", "checkpoint"
MODEL_FILES = (  # names that give a folder with a model another meaning
    *("config.json", "generation_config.json", "model*.safetensors*", "tokenizer*.json"),
    *("adapter_config.json", "adapter_model.safetensors"),
)
MARK = "kernel-dev-ft"  # is in each picture, so that the next one may replace it
# flags of files that a script writes: what they are in words, and a pattern of how they begin
BEGINNINGS = {
    "json": ("record", r'\{\n +"kind": "[a-z0-9_]+"'),
    "plot": ("picture", rf"\x89PNG.{{,400}}{MARK}"),
    "trace": ("trace", r'\s*\{\s*"schemaVersion": \d+,\s*"deviceProperties"'),  # of PyTorch
    "memory_snapshot": ("memory snapshot", r"\x80.{,40}segments"),  # a pickle of PyTorch
}
UNFINISHED = ".unfinished-"  # how names begin that exist only while something is written


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse outputs that cannot be written, before minutes of work are spent; changes nothing."""
    for name in (*BEGINNINGS, *OUTPUT_FOLDERS):
        path, flag = getattr(args, name, None), flag_name(name)
        if path is None:
            continue
        if not path:
            raise UserError(f"{flag} '' names nothing: give a path or leave the flag out")
        if name == "plot" and not path.endswith(".png"):
            raise UserError(f"--plot {path} must end in .png")
        require_writable(path, is_folder=name in OUTPUT_FOLDERS)
        if name in BEGINNINGS:
            if written_straight(path):
                continue
            if any(fnmatch.fnmatch(os.path.basename(path), each) for each in MODEL_FILES):
                raise UserError(f"{flag} {path} has the name of a model's file: name another")
            require_ours(flag, path, *BEGINNINGS[name])
        for what, other in others(args, name):
            if overlaps(path, other):
                raise UserError(f"{flag} {path} collides with {what}: name another")


def others(args: argparse.Namespace, output: str) -> Iterator[tuple[str, str]]:
    """Yield (in words, path) of every file and folder that the flag `output` must not replace.

    Of what is read only a model could be replaced: no other file begins as an output does.
    """
    if output in BEGINNINGS:
        yield from ((f"standard {name}", f"/dev/std{name[:3]}") for name in ("output", "error"))
        names = *BEGINNINGS, *OUTPUT_FOLDERS
    else:
        names = ("model", "teacher") if output == "save" else ()
    for name in names:
        path = getattr(args, name, None)
        if path and name != output and (output in BEGINNINGS or os.path.exists(path)):
            yield f"{flag_name(name)} {path}", path


def overlaps(file: str, other: str) -> bool:
    """Return True if `other` is the same file, by whichever name, or would lie inside of it."""
    if os.path.exists(file) and os.path.exists(other):
        return os.path.samefile(file, other)
    file, other = os.path.realpath(file), os.path.realpath(other)
    return other == file or other.startswith(file + os.sep)


def require_writable(path: str, is_folder: bool = False) -> None:
    """Refuse a file or a folder that could not be written, be it there or not."""
    target = os.path.realpath(path)
    try:
        straight = written_straight(path)  # raises for a name that is too long
        if not is_folder:
            if path.endswith(os.sep) or os.path.isdir(path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            require_unprotected(path)
            if straight:
                return
            target = os.path.dirname(target)
        with tempfile.TemporaryFile(dir=existing(target)):  # it never has a name, and is gone again
            pass
    except OSError as error:
        place = f"to {path}" if is_folder else path
        raise UserError(f"cannot write {place}: {error.strerror}") from error


def existing(path: str) -> str:
    """Return the path, or the nearest folder above it that is there."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def require_room(flag: str, folder: str, n: int, n_bytes: int, advice: str) -> None:
    """Refuse a disk without room for `n` times so many bytes; changes nothing."""
    free = shutil.disk_usage(existing(os.path.realpath(folder))).free
    if n * n_bytes > free:
        given = f"{flag} {folder} has {free / 1e9:,.3g} GB of room"
        raise UserError(f"{given}, expected {n} x {n_bytes / 1e9:,.3g}: free some, {advice}")


def require_ours(flag: str, path: str, what: str, beginning: str) -> None:
    """Refuse to replace a file that is not empty and does not begin as the scripts' own do."""
    if not os.path.exists(path) or written_straight(path):
        return
    try:
        start = first_bytes(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}, which {flag} replaces") from error
    if start and not re.match(beginning.encode("latin-1"), start, re.DOTALL):
        given = f"{flag} {path} would replace a file that is no {what} of these scripts"
        raise UserError(f"{given}: name another file, or remove that one")


def first_bytes(path: str) -> bytes:
    """Return how a file begins, decompressed if it is a gzip file and is whole so far."""
    with contextlib.suppress(gzip.BadGzipFile, EOFError, zlib.error), gzip.open(path) as file:
        return file.read(1000)
    with open(path, "rb") as file:
        return file.read(1000)


def require_unprotected(path: str) -> None:
    """Raise PermissionError if a file may not be written; to replace it the folder's would do."""
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def written_straight(path: str) -> bool:
    """Return True for a device or a pipe, which nothing replaces.

    Raises:
        OSError: the path cannot be followed, for another reason than that there is no such file.
    """
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def write_output(path: str, content: bytes, what: str) -> None:
    """Write a file, in the first of several processes; `what` names it in the error.

    Whenever this is interrupted, the file is the old one or the whole new one: the content is
    written beside it and renamed.  Links are followed, permissions stay, folders are made.
    """
    if not is_first():
        return
    target = os.path.realpath(path)
    unfinished = Path(target).with_name(UNFINISHED + secrets.token_hex(8))
    try:
        require_unprotected(target)
        if written_straight(path):
            print(end="", flush=True)  # what was printed before comes first
            with open(path, "ab") as file:
                file.write(content)
            return
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(unfinished, "xb") as file:
                if os.path.exists(target):
                    shutil.copymode(target, unfinished)
                file.write(content)
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{what} could not be written to {path}: {error.strerror}") from error
