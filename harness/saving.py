"""Saving a model: whenever that is interrupted, the whole old or the whole new one is there."""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError

from harness.command_line import RunError
from harness.dataset import load_tokenizer
from harness.output_files import UNFINISHED
from harness.parallel import whole_weights
from harness.processes import is_first
from harness.workload import Workload

# transformers' names
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def save_model(model: torch.nn.Module, workload: Workload, folder: str) -> None:
    """Write weights, configuration and tokenizer as an ordinary transformers directory.

    Whenever this is interrupted, `from_pretrained` loads the whole old or the whole new model; that
    is decided by config.json alone (`put_in_place`).  The one exception are the tokenizer's files,
    which are replaced one by one.  Of the files that were there only those of the old model are
    removed.  What an interrupted save left behind the next one removes.  Saves of several runs to
    one directory wait for each other; the last one's model stays.  Of the processes of one run the
    first writes; it needs all of them to get the weights together.

    Raises:
        RunError: the files cannot be written.
    """
    weights = whole_weights(model)
    if not is_first():
        return
    tokenizer = load_tokenizer(workload)
    model.config.use_cache = True  # load_model switched it off for training only
    target = Path(os.path.realpath(folder))
    try:
        target.mkdir(parents=True, exist_ok=True)
        with alone_in(target):
            remove_unfinished(target)
            unfinished = target / f"{UNFINISHED}{secrets.token_hex(8)}"
            unfinished.mkdir()
            try:
                model.save_pretrained(unfinished, state_dict=weights)
                if tokenizer is not None:
                    tokenizer.save_pretrained(unfinished)
                put_in_place(unfinished, target)
            finally:
                remove_unfinished(target)
    except (
        OSError,
        ValueError,
        SafetensorError,
    ) as error:  # ValueError: what transformers finds wrong
        raise RunError(f"the model could not be saved to {folder}: {error}") from error
    print(f"Model saved to {folder}")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait for other processes that save to this folder; the end of a process ends its claim."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remove_unfinished(target: Path) -> None:
    """Remove what interrupted saves left in a folder, but for weights that config.json names."""
    config = target / CONFIG
    loaded = config.read_text(errors="replace") if config.exists() else ""
    for folder in target.glob(f"{UNFINISHED}*"):
        if folder.is_dir() and folder.name not in loaded:
            shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, target: Path) -> None:
    """Make the whole model in `folder`, which lies in `target`, the model of `target`.

    Several files cannot be renamed at once, but transformers takes the weights from where
    config.json says (`transformers_weights`).  So a first rename puts a config.json there with
    which the new model is loaded from `folder`; nothing reads the old one any more, and its weights
    are removed.  The new files get their names in `target` besides those in `folder`, and a second
    rename puts the ordinary config.json there.

    At each moment the shards in `target` that are of no use are named by the index there, so that
    the next save finds them: the old index goes after the old shards, and the new one comes before
    the new shards.
    """
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    weights = WEIGHTS
    if INDEX in names:
        weights = f"loaded-here.{INDEX}"
        index = json.loads((folder / INDEX).read_text())
        here = {tensor: f"{folder.name}/{shard}" for tensor, shard in index["weight_map"].items()}
        (folder / weights).write_text(json.dumps(index | {"weight_map": here}))
    config = json.loads((folder / CONFIG).read_text())
    loaded_here = folder / f"loaded-here.{CONFIG}"
    place = {"transformers_weights": f"{folder.name}/{weights}"}
    loaded_here.write_text(json.dumps(config | place))

    loaded_here.replace(target / CONFIG)
    for name in (*sorted(shards_of(target / INDEX)), WEIGHTS, INDEX):
        if name not in names:
            (target / name).unlink(missing_ok=True)
    for name in sorted(names - {CONFIG}, key=lambda name: name != INDEX):  # the index first
        (target / name).parent.mkdir(exist_ok=True)
        add_name(folder / name, folder / "second-name")
        (folder / "second-name").replace(target / name)
    (folder / CONFIG).replace(target / CONFIG)


def shards_of(index: Path) -> set[str]:
    """Names of the shards beside an index of weights; none if it is missing or is no such index."""
    try:
        shards = json.loads(index.read_text())["weight_map"].values()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()
    return {
        name for name in shards if Path(str(name)).name == name and name.endswith(".safetensors")
    }


def add_name(file: Path, name: Path) -> None:
    """A second name of a file; a copy where the file system knows no such thing."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)
