"""Saving a model or its adapters: whenever that is interrupted, the old or the new one is whole."""

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
from safetensors.torch import save_file

from harness.cli import adapter_config
from harness.cli.command_line import RunError
from harness.cli.output_files import UNFINISHED
from harness.cli.processes import is_first
from harness.cli.workload import Workload
from harness.data.dataset import load_tokenizer
from harness.model.adapters import adapter_weights, facts_of_base, merged_weights, peft_config
from harness.steps.parallel import whole_weights
from harness.training.checkpoint_files import numbered

# transformers' names
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER = (
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json"),
)


def save_model(model: torch.nn.Module, workload: Workload, folder: str) -> None:
    """Write weights, configuration and tokenizer as an ordinary transformers directory.

    Whenever this is interrupted, `from_pretrained` loads the whole old or the whole new model; that
    is decided by config.json alone (`put_in_place`).  The one exception are the tokenizer's files,
    which are replaced, or removed, one by one.  Of the files that were there only those of the old
    model are removed.  What an interrupted save left behind the next one removes.  Saves of several
    runs to one directory wait for each other; the last one's model stays.  Of the processes of one
    run the first writes; it needs all of them to get the weights together.

    With LoRA it is the adapters alone that are written, as peft's own directory, or with `merge`
    the model of which they have become part.

    Raises:
        RunError: the files cannot be written.
    """
    is_lora = workload.lora_rank is not None
    adapters_alone = is_lora and not workload.merge
    weights = whole_weights(model, trained_alone=adapters_alone)
    base = facts_of_base(model, workload) if adapters_alone else {}
    if not is_first():
        return
    if is_lora:
        weights = model.state_dict() if weights is None else weights
        weights = (adapter_weights if adapters_alone else merged_weights)(model, weights)
    try:
        with unfinished_folder(folder) as (unfinished, target):
            if adapters_alone:
                write_adapters(unfinished, workload, weights, base)
                put_adapters_in_place(unfinished, target)
            else:
                write_model(unfinished, model, workload, weights)
                put_in_place(unfinished, target)
    except (
        OSError,
        ValueError,
        SafetensorError,
    ) as error:  # ValueError: what transformers finds wrong
        raise RunError(f"the model could not be saved to {folder}: {error}") from error
    print(f"{'Adapters' if adapters_alone else 'Model'} saved to {folder}")


@contextmanager
def unfinished_folder(folder: str) -> Iterator[tuple[Path, Path]]:
    """(a new folder, the given one, in which it lies); the new one is removed in the end."""
    target = Path(os.path.realpath(folder))
    target.mkdir(parents=True, exist_ok=True)
    with alone_in(target):
        remove_unfinished(target)
        unfinished = target / f"{UNFINISHED}{secrets.token_hex(8)}"
        unfinished.mkdir()
        try:
            yield unfinished, target
        finally:
            remove_unfinished(target)


def write_model(
    folder: Path, model: torch.nn.Module, workload: Workload, weights: dict | None
) -> None:
    """Write an ordinary model with these weights; None: its own."""
    tokenizer = load_tokenizer(workload)
    model.config.use_cache = True  # load_model switched it off for training only
    model.save_pretrained(folder, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def write_adapters(
    folder: Path, workload: Workload, weights: dict[str, torch.Tensor], base: dict[str, str]
) -> None:
    """Write adapters in peft's format, for `PeftModel.from_pretrained`.

    Args:
        base: from `facts_of_base`.
    """
    peft_config(workload).save_pretrained(folder)
    file = folder / adapter_config.CONFIG
    said = json.loads(file.read_text())
    said["target_modules"] = sorted(said["target_modules"])  # peft writes a set as it comes
    file.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
    save_file(weights, folder / adapter_config.WEIGHTS, metadata={"format": "pt"} | base)


def put_adapters_in_place(folder: Path, target: Path) -> None:
    """Make the adapters in `folder`, which lies in `target`, those of `target`.

    Of the same settings one rename is all.  Other settings and their weights cannot be renamed at
    once: the old settings go first, and until the new ones are there nothing loads.
    """
    old, new = (place / adapter_config.CONFIG for place in (target, folder))
    if not (old.exists() and old.read_bytes() == new.read_bytes()):
        old.unlink(missing_ok=True)
    (folder / adapter_config.WEIGHTS).replace(target / adapter_config.WEIGHTS)
    new.replace(old)


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
    checkpoints = numbered(target, before=UNFINISHED)  # another run may be writing them
    for folder in target.glob(f"{UNFINISHED}*"):
        if folder.is_dir() and folder.name not in loaded and folder not in checkpoints:
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
    # else a model without a tokenizer is loaded with the old one, and a tokenizer with its template
    old_tokenizer = () if TOKENIZER[0] in names else TOKENIZER
    old_weights = *sorted(shards_of(target / INDEX)), WEIGHTS, INDEX
    for name in (*old_weights, *old_tokenizer, CHAT_TEMPLATE):
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
