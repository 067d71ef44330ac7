"""Saving a model or its adapters: whenever that is interrupted, the old or the new one is whole."""

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from harness.cli import adapter_config
from harness.cli.command_line import RunError, UserError
from harness.cli.output_files import UNFINISHED, require_room
from harness.cli.processes import is_first
from harness.cli.workload import Workload
from harness.data.dataset import load_tokenizer
from harness.model.adapters import adapter_weights, facts_of_base, merged_weights, peft_config
from harness.model.architecture import TORCH_DTYPES, computing_differences, computing_fields
from harness.model.loading import original_weights
from harness.steps.parallel import whole_weights

# transformers' names
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER = (
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json"),
)


def saves_adapters(workload: Workload) -> bool:
    """Return True if the adapters are saved alone, without the model that they belong to."""
    return workload.lora_rank is not None and not workload.merge


def refuse_another_model(folder: str, model: torch.nn.Module, workload: Workload) -> None:
    """Refuse a folder with another model than an older state of the one to be saved.

    Models of one configuration differ in their weights alone, and those are one file.
    """
    config = Path(folder) / CONFIG
    if saves_adapters(workload) or not config.exists():
        return
    try:
        said = json.loads(config.read_text())
        there = type(model.config).from_dict(said)
        different = computing_differences(computing_fields(model.config), there)
        if said.get("model_type") != model.config.model_type:
            different.insert(0, f"model_type {said.get('model_type')}")
        if (Path(folder) / INDEX).exists() or "transformers_weights" in said:
            different.append("weights in several files")
    except Exception as error:  # transformers raises of every kind
        different = [f"its config.json cannot be read ({type(error).__name__})"]
    if different:
        given = f"--save {folder} holds another model: {'; '.join(different)}"
        raise UserError(f"{given}; expected this model or none: name another folder")


def refuse_what_cannot_be_saved(
    folder: str, model: torch.nn.Module, workload: Workload, counts: dict
) -> None:
    """Refuse, before training, what would fail after it; `counts` are those of adapters.py."""
    alone = saves_adapters(workload)
    n = counts["trained_parameters" if alone else "parameters"]
    n_bytes = n * TORCH_DTYPES[workload.dtype].itemsize
    require_room("--save", folder, 1, n_bytes, "or name another folder")
    if alone:
        return
    refuse_another_model(folder, model, workload)
    with tempfile.TemporaryDirectory() as empty:
        try:
            for part in (model.config, model.generation_config, load_tokenizer(workload)):
                if part is not None:
                    part.save_pretrained(empty)
        except ValueError as error:  # transformers finds values that contradict each other
            given = f"transformers would not save this model again: {' '.join(str(error).split())}"
            raise UserError(f"{given} Mend that in {workload.model}") from error


def save_model(model: torch.nn.Module, workload: Workload, folder: str) -> None:
    """Write an ordinary transformers directory, or with LoRA and without `merge` peft's own.

    All files are written into a folder in `folder` and then renamed, one by one.  All processes
    must call this function: the first, which writes, gets the weights from all of them.
    """
    adapters_alone = saves_adapters(workload)
    weights = whole_weights(model, trained_alone=adapters_alone)
    base = facts_of_base(model, workload) if adapters_alone else {}
    if not is_first():
        return
    if workload.lora_rank is not None:
        weights = model.state_dict() if weights is None else weights
        if adapters_alone:
            weights = adapter_weights(model, weights)
        else:  # FP8 is a way to compute, and nobody asked for rounded weights
            originals = original_weights(workload) if workload.fp8 else None
            weights = merged_weights(model, weights, originals)
    try:
        with unfinished_folder(folder) as (unfinished, target):
            if adapters_alone:
                write_adapters(unfinished, workload, weights, base)
                remove_other_settings(unfinished, target)
                put_in_place(unfinished, target, adapter_config.WEIGHTS, adapter_config.CONFIG)
            else:
                refuse_another_model(folder, model, workload)
                write_model(unfinished, model, workload, weights)
                written = put_in_place(unfinished, target, WEIGHTS, CONFIG)
                remove_old_tokenizer(target, written)
    except (OSError, ValueError, SafetensorError, UserError) as error:
        # ValueError: what transformers finds wrong
        raise RunError(f"the model could not be saved to {folder}: {error}") from error
    print(f"{'Adapters' if adapters_alone else 'Model'} saved to {folder}")


@contextmanager
def unfinished_folder(folder: str) -> Iterator[tuple[Path, Path]]:
    """Yield a new folder and the given one, in which the new one lies until it is removed.

    Runs that save to one folder wait for each other; the last one's model stays.
    """
    target = Path(os.path.realpath(folder))
    target.mkdir(parents=True, exist_ok=True)
    unfinished = target / f"{UNFINISHED}model"
    with ExitStack() as stack:
        descriptor = os.open(target, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        stack.callback(shutil.rmtree, unfinished, ignore_errors=True)
        shutil.rmtree(unfinished, ignore_errors=True)  # an interrupted save left it
        unfinished.mkdir()
        yield unfinished, target


def write_model(
    folder: Path, model: torch.nn.Module, workload: Workload, weights: dict | None
) -> None:
    """Write an ordinary model with these weights; None: its own."""
    tokenizer = load_tokenizer(workload)
    model.config.use_cache = True  # load_model switched it off for training only
    # one file of weights, however large: one rename replaces it
    model.save_pretrained(folder, state_dict=weights, max_shard_size=sys.maxsize)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def write_adapters(
    folder: Path, workload: Workload, weights: dict[str, torch.Tensor], base: dict[str, str]
) -> None:
    """Write adapters in peft's format; `base` is from `facts_of_base`."""
    peft_config(workload).save_pretrained(folder)
    file = folder / adapter_config.CONFIG
    said = json.loads(file.read_text())
    said["target_modules"] = sorted(said["target_modules"])  # peft writes a set as it comes
    file.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
    save_file(weights, folder / adapter_config.WEIGHTS, metadata={"format": "pt"} | base)


def remove_other_settings(folder: Path, target: Path) -> None:
    """Remove adapters' settings from `target` unless `folder` has the same: no others fit them."""
    old, new = (place / adapter_config.CONFIG for place in (target, folder))
    if old.exists() and old.read_bytes() != new.read_bytes():
        old.unlink()


def put_in_place(folder: Path, target: Path, weights: str, config: str) -> set[str]:
    """Move all files of `folder`, which lies in `target`, to `target`; return their names.

    The weights come first: what is there has the same configuration or none.  The configuration
    comes last: without it nothing loads.
    """
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    if missing := {config, weights} - names:
        raise ValueError(f"transformers wrote no {' and no '.join(sorted(missing))}")
    for name in sorted(names, key=lambda name: (name == config) - (name == weights)):
        (target / name).parent.mkdir(exist_ok=True)
        (folder / name).replace(target / name)
    return names


def remove_old_tokenizer(folder: Path, written: set[str]) -> None:
    """Remove what would be loaded of an older tokenizer beside the files that were written."""
    old_tokenizer = () if TOKENIZER[0] in written else TOKENIZER
    for name in {*old_tokenizer, CHAT_TEMPLATE} - written:
        (folder / name).unlink(missing_ok=True)
