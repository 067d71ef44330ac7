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

from harness.cli.command_line import RunError, UserError, flag_name
from harness.cli.processes import is_first

INPUT_FILES = "data", "records", "compare"  # flags of files that a script reads
OUTPUT_FOLDERS = "save", "checkpoint"
MODEL_FOLDERS = "save", "model", "teacher", "adapter"
MODEL_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors*", "tokenizer*"),
    *("adapter_config.json", "adapter_model.safetensors"),
)
MARK = "kernel-dev-ft"  # is in each picture, so that the next one may replace it
KINDS = (  # a record begins with one of these
    *("benchmark", "durations", "estimate", "finetune", "fp8_accuracy", "fp8_costs", "frontier"),
    *("instructions", "ladder", "longest", "memory", "profile", "published", "scaling", "sft"),
    *("sweep", "text", "trace_picture", "weight_values"),
)
# flags of files that a script writes: what they are in words, and a pattern of how they begin
BEGINNINGS = {
    "json": ("record", rf'\{{\s*"kind": "({"|".join(KINDS)})"'),
    "plot": ("picture", rf"\x89PNG.{{,400}}{MARK}"),
    "trace": ("trace", r'\s*\{\s*"schemaVersion": \d+,\s*"deviceProperties"'),  # of PyTorch
    "memory_snapshot": ("memory snapshot", r"\x80.{,40}segments"),  # a pickle of PyTorch
}
UNFINISHED = ".unfinished-"  # how names begin that exist only while something is written


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse outputs that cannot be written, before minutes of work are spent; changes nothing."""
    outputs = {name: getattr(args, name, None) for name in (*BEGINNINGS, *OUTPUT_FOLDERS)}
    outputs = {name: path for name, path in outputs.items() if path is not None}
    for name, path in outputs.items():
        if not path:
            given = f"{flag_name(name)} '' names nothing"
            raise UserError(f"{given}: give a path or leave the flag out")
        if name == "plot" and not path.endswith(".png"):
            raise UserError(f"--plot {path} must end in .png")
        require_writable(path, is_folder=name in OUTPUT_FOLDERS)
    for name in ("model", "teacher"):
        folder, save = getattr(args, name, None) or "", outputs.get("save", "")
        if os.path.exists(folder) and os.path.exists(save) and os.path.samefile(folder, save):
            given = f"--save {save} would replace the model that --{name} {folder} names"
            raise UserError(f"{given}: name another folder")
    for name, path in outputs.items():
        if name in OUTPUT_FOLDERS or written_straight(path):
            continue
        for what, other in others_files(args, name):
            if in_the_way(path, other):
                given = f"{flag_name(name)} {path} collides with {what}"
                raise UserError(f"{given}: name another file")
        require_ours(flag_name(name), path, *BEGINNINGS[name])


def others_files(args: argparse.Namespace, output: str) -> Iterator[tuple[str, str]]:
    """Yield (in words, path) of every file and folder that the flag `output` must not replace."""
    for name in (*BEGINNINGS, *OUTPUT_FOLDERS):
        if name != output and getattr(args, name, None):
            yield f"{flag_name(name)} {getattr(args, name)}", getattr(args, name)
    for name in INPUT_FILES:
        paths = getattr(args, name, None) or []
        for path in [paths] if isinstance(paths, str) else paths:
            if os.path.isfile(path):
                yield f"{path}, which is read", path
    file = os.path.realpath(getattr(args, output))
    if any(fnmatch.fnmatch(os.path.basename(file), pattern) for pattern in MODEL_FILES):
        for name in MODEL_FOLDERS:
            folder = getattr(args, name, None)
            if folder and os.path.dirname(file) == os.path.realpath(folder):
                yield f"a file of the model in {flag_name(name)} {folder}", file


def in_the_way(file: str, other: str) -> bool:
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


def room_in(folder: str) -> int:
    """Return the bytes that are free where a folder is or would be made."""
    return shutil.disk_usage(existing(os.path.realpath(folder))).free


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
    """Return True for a device, a pipe and what this process prints into: nothing replaces them.

    Raises:
        OSError: the path cannot be followed, for another reason than that there is no such file.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        return True
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            if os.path.samestat(found, os.fstat(stream)):
                return True
    return False


def write_whole(path: str, content: bytes) -> None:
    """Write a file so that, whenever this is interrupted, it is the old one or the whole new one.

    The content is written beside it and renamed: of several processes that write one path the last
    to finish wins.  Links are followed, permissions stay, and missing folders are created.
    """
    if written_straight(path):
        print(end="", flush=True)  # what was printed before comes first
        with open(path, "ab") as file:
            file.write(content)
        return
    target = os.path.realpath(path)
    require_unprotected(target)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    unfinished = os.path.join(os.path.dirname(target), UNFINISHED + secrets.token_hex(8))
    try:
        with open(unfinished, "xb") as file:
            if os.path.exists(target):
                before = os.stat(target)
                with contextlib.suppress(PermissionError):  # only root may give a file away
                    os.chown(unfinished, before.st_uid, before.st_gid)
                os.chmod(unfinished, stat.S_IMODE(before.st_mode))
            file.write(content)
        os.replace(unfinished, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise


def write_output(path: str, content: bytes, what: str) -> None:
    """Write a file whole, in the first of several processes; `what` names it in the error."""
    if not is_first():
        return
    try:
        write_whole(path, content)
    except OSError as error:
        raise RunError(f"{what} could not be written to {path}: {error.strerror}") from error
