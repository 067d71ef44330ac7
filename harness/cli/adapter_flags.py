"""LoRA's flags: what they say, what an adapter's own config.json says, and what does not go.

    --lora-rank 16 --lora-alpha 16 --lora-targets all    adapters from anew
    --adapter DIR                                        those that were saved, trained further
    --quantize nf4                                       beside frozen weights of 4 bits
    --save DIR                                           writes the adapters; with --merge a model

Imports neither PyTorch nor peft: a wrong flag is answered at once.  What they do: adapters.py.
"""

import argparse
import importlib.util
import json
from pathlib import Path

from harness.cli.command_line import UserError, flag_name, positive_float, positive_int
from harness.cli.processes import FSDP

ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
MLP = "gate_proj", "up_proj", "down_proj"
# by the words of --lora-targets: the projections that get adapters
TARGETS = {"all": (*ATTENTION, *MLP), "attention": ATTENTION, "mlp": MLP}
QUANTIZED = ("nf4",)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's names
MODEL_CONFIG = "config.json"  # transformers' name
# What an adapter may be besides A and B, in peft's words, and is none of ours.
VARIANTS = (
    *("use_dora", "use_rslora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "exclude_modules", "fan_in_fan_out", "trainable_token_indices"),
    *("target_parameters", "layer_replication", "alora_invocation_tokens", "use_qalora"),
    *("use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config"),
)
DAMAGED = ValueError, LookupError, TypeError, RecursionError  # what reading such a file may raise
PLAIN_STARTS = True, False, "gaussian"  # of init_lora_weights: those that leave W alone


def add_adapter_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that the profiler and both fine-tuning scripts have."""
    add = parser.add_argument
    add(
        "--lora-rank",
        type=positive_int,
        metavar="R",
        help="LoRA: freeze the weights and train two thin matrices beside each projection",
    )
    add(
        "--lora-alpha",
        type=positive_float,
        metavar="X",
        help="with it: the adapters' results count X / R times (default: R)",
    )
    add(
        "--lora-targets",
        choices=TARGETS,
        help="with it: which projections get adapters (default: all)",
    )
    add("--adapter", metavar="DIR", help="train the adapters further that --save wrote to DIR")
    add(
        "--quantize",
        choices=QUANTIZED,
        help="with --lora-rank or --adapter: the layers' frozen weights in 4 bits",
    )


def settings(args: argparse.Namespace, parallel: str | None = None) -> dict:
    """A workload's `lora_rank`, `lora_alpha` and `lora_targets`; nothing without LoRA.

    Args:
        args: may lack any of the flags.
        parallel: how several processes share the model, if there are several.

    Raises:
        UserError: a flag needs another one or contradicts the adapter; the adapter cannot be read,
            or is more than two matrices beside each of TARGETS' projections; peft is missing; or
            the folder of --save holds what would be mixed up with it.
    """
    given = {
        name: value
        for name in ("lora_rank", "lora_alpha", "lora_targets")
        if (value := getattr(args, name, None)) is not None
    }
    adapter = getattr(args, "adapter", None)
    is_lora = "lora_rank" in given or adapter is not None
    for name in ("lora_alpha", "lora_targets", "quantize", "merge"):
        if getattr(args, name, None) and not is_lora:
            wanted = f"{flag_name(name)} is for LoRA"
            raise UserError(f"{wanted}: add --lora-rank R or --adapter DIR, or leave it out")
    save, merge = getattr(args, "save", None), getattr(args, "merge", False)
    if merge and not save:
        raise UserError("--merge is what --save writes: add --save DIR, or leave --merge out")
    if save:
        refuse_mixing(save, saves_adapter=is_lora and not merge)
    if not is_lora:
        return {}
    if importlib.util.find_spec("peft") is None:
        flag = "--adapter" if adapter else "--lora-rank"
        raise UserError(f"{flag} needs peft, which is not installed: pip install peft")
    if getattr(args, "quantize", None) and parallel == FSDP:
        what = "--quantize keeps the frozen weights whole in each process, which fsdp does not"
        raise UserError(f"{what}: add --parallel ddp")
    if adapter is None:
        return {"lora_alpha": float(given["lora_rank"]), "lora_targets": "all"} | given
    found = read_config(adapter)
    for name, value in given.items():
        if value != found[name]:
            given = f"{flag_name(name)} is {value}"
            raise UserError(f"{given}, but in --adapter {adapter} {found[name]}: drop it")
    return found


def refuse_mixing(folder: str, saves_adapter: bool) -> None:
    """Refuse an adapter beside a model and the other way: from_pretrained would load both as one.

    Raises:
        UserError: the folder holds the other one.
    """
    what, other, name = ("an adapter", "a model", MODEL_CONFIG)
    if not saves_adapter:
        what, other, name = ("a model", "an adapter", CONFIG)
    if (Path(folder) / name).exists():
        given = f"--save {folder} holds {other} ({name})"
        raise UserError(f"{given}, and {what} would be loaded with it: name another folder")


def read_config(folder: str) -> dict:
    """`lora_rank`, `lora_alpha` and `lora_targets` of an adapter in peft's format.

    Its dropout, if it had any, is not read: here no adapter has one.

    Raises:
        UserError: there is none, it is damaged, or it is of another kind than these scripts train.
    """
    path = Path(folder) / CONFIG
    try:
        said = json.loads(path.read_text())
        if not isinstance(said, dict):
            raise ValueError("it is no JSON object")
        rank, alpha = positive_int(str(said["r"])), positive_float(str(said["lora_alpha"]))
        named = said["target_modules"]
        named = {named} if isinstance(named, str) else set(named)
    except OSError as error:
        given = f"--adapter {folder} cannot be read ({error.strerror})"
        raise UserError(f"{given}, expected a folder with {CONFIG}, as --save writes it") from error
    except (*DAMAGED, argparse.ArgumentTypeError) as error:
        given = f"{path} is damaged ({type(error).__name__}: {error})"
        raise UserError(f"{given}, expected what --save or peft wrote: name another") from error
    targets = next((name for name, modules in TARGETS.items() if named == set(modules)), None)
    if named == {"all-linear"}:
        targets = "all"
    if targets is None:
        given = f"--adapter {folder} adapts {', '.join(sorted(map(str, named))) or 'nothing'}"
        sets = "; ".join(f"{name}: {', '.join(modules)}" for name, modules in TARGETS.items())
        raise UserError(f"{given}, expected one of these sets of projections: {sets}")
    refuse_variants(path, said)
    return {"lora_rank": rank, "lora_alpha": alpha, "lora_targets": targets}


def refuse_variants(path: Path, said: dict) -> None:
    """Refuse an adapter that is more than two matrices beside each projection.

    Raises:
        UserError: it is, or is no LoRA at all.
    """
    odd = {name: said[name] for name in VARIANTS if said.get(name)}
    odd |= {"peft_type": said.get("peft_type")} if said.get("peft_type") != "LORA" else {}
    odd |= {"bias": said["bias"]} if said.get("bias", "none") != "none" else {}
    start = said.get("init_lora_weights", True)
    odd |= {"init_lora_weights": start} if start not in PLAIN_STARTS else {}
    if odd:
        name, value = next(iter(odd.items()))
        given = f"{path} has {name} = {json.dumps(value)[:60]}"
        expected = "expected plain LoRA, two matrices beside each projection"
        raise UserError(f"{given}, {expected}: train such an adapter with peft itself")


# ---------------------------------------------------------------- in words


def lora_in_words(record: dict) -> str:
    """What a record says of LoRA; nothing where it says nothing."""
    if "lora_rank" not in record:
        return ""
    words = f"LoRA of rank {record['lora_rank']}, alpha {record['lora_alpha']:g}"
    words += f", {record['lora_targets']} projections"
    if "trained_parameters" in record:
        words += f", {record['trained_parameters']:,} trained parameters"
    if "quantize" in record:
        words += f", frozen layers in {record['quantize']}"
    if "adapter" in record:
        words += f", from {record['adapter']}"
    return words
