"""Which adapters a run trains: what the flags say, or a saved adapter's own adapter_config.json.

    --lora-rank 16 --lora-alpha 16 --lora-targets all    new adapters
    --adapter DIR                                        adapters that were saved, trained further

Imports neither PyTorch nor peft: a wrong flag is answered at once.  What trains: adapters.py.
"""

import importlib.util
import json
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

from harness.cli.command_line import UserError, flag_name, positive_float, positive_int

ATTENTION_PROJECTIONS = "q_proj", "k_proj", "v_proj", "o_proj"
MLP_PROJECTIONS = "gate_proj", "up_proj", "down_proj"
# by the words of --lora-targets, which also takes names: the projections that get adapters
LORA_TARGETS = {
    "all": (*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS),
    "attention": ATTENTION_PROJECTIONS,
    "mlp": MLP_PROJECTIONS,
}
ALL = LORA_TARGETS["all"]
SHARING = (
    ATTENTION_PROJECTIONS[:3],
    ATTENTION_PROJECTIONS[3:],
    MLP_PROJECTIONS[:2],
    MLP_PROJECTIONS[2:],
)  # projections of one input
SETTINGS = "lora_rank", "lora_alpha", "lora_targets"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's names
MODEL_CONFIG = "config.json"  # transformers' name
# In peft's words, what an adapter may have besides A and B.  These scripts train no such adapter.
VARIANTS = (
    *("use_dora", "use_rslora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "exclude_modules", "fan_in_fan_out", "trainable_token_indices"),
    *("target_parameters", "layer_replication", "alora_invocation_tokens", "use_qalora"),
    *("use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config"),
)
PLAIN_STARTS = True, False, "gaussian"  # values of init_lora_weights that leave W as it is


def projections(targets: str) -> tuple[str, ...]:
    """Return the projections that a value of --lora-targets names."""
    return LORA_TARGETS.get(targets) or tuple(targets.split(","))


def lora_targets(text: str) -> str:
    """argparse type: a word of TARGETS or projections' names; equal sets become equal texts."""
    names = projections(text)
    if unknown := [name for name in names if name not in ALL]:
        found, words = ", ".join(map(repr, unknown)), ", ".join(LORA_TARGETS)
        raise ArgumentTypeError(f"{found}: expected {words}, or names of {','.join(ALL)}")
    chosen = tuple(name for name in ALL if name in names)
    return next((word for word in LORA_TARGETS if LORA_TARGETS[word] == chosen), ",".join(chosen))


def settings(args: Namespace) -> dict:
    """Return a workload's SETTINGS; {} without LoRA.

    Args:
        args: may lack any of the flags.

    Raises:
        UserError: peft is missing; a flag contradicts the adapter; the adapter cannot be read, or
            is more than two matrices beside some of ALL; or the folder of --save
            holds what would be mixed up with what this run saves.
    """
    given = {name: getattr(args, name, None) for name in SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    adapter = getattr(args, "adapter", None)
    is_lora = "lora_rank" in given or adapter is not None
    if save := getattr(args, "save", None):
        what, other, name = "a model", "an adapter", CONFIG
        if is_lora and not args.merge:
            what, other, name = "an adapter", "a model", MODEL_CONFIG
        if (Path(save) / name).exists():  # from_pretrained would load the two as one
            found = f"--save {save} holds {other} ({name})"
            raise UserError(f"{found}, and {what} would be loaded with it: name another folder")
    if not is_lora:
        return {}
    if importlib.util.find_spec("peft") is None:
        flag = "--adapter" if adapter else "--lora-rank"
        raise UserError(f"{flag} needs peft, which is not installed: pip install peft")
    if adapter is None:
        return {"lora_alpha": float(given["lora_rank"]), "lora_targets": "all"} | given
    found = read_config(adapter)
    for name, value in given.items():
        if value != found[name]:
            given = f"{flag_name(name)} is {value}"
            raise UserError(f"{given}, but in --adapter {adapter} {found[name]}: drop it")
    return found


def read_config(folder: str) -> dict:
    """Return the SETTINGS of an adapter in peft's format.

    The adapter's dropout is not read: these scripts train without dropout.

    Raises:
        UserError: the folder holds no adapter, a damaged one, or one of another kind.
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
    except (ValueError, LookupError, TypeError, RecursionError, ArgumentTypeError) as error:
        given = f"{path} is damaged ({type(error).__name__}: {error})"
        raise UserError(f"{given}, expected what --save or peft wrote: name another") from error
    named = {*ALL} if named == {"all-linear"} else named
    if not named or named - {*ALL}:
        given = f"--adapter {folder} adapts {', '.join(sorted(map(str, named))) or 'nothing'}"
        raise UserError(f"{given}, expected some of these projections: {', '.join(ALL)}")
    odd = {name: said[name] for name in VARIANTS if said.get(name)}
    odd |= {"peft_type": said.get("peft_type")} if said.get("peft_type") != "LORA" else {}
    odd |= {"bias": said["bias"]} if said.get("bias", "none") != "none" else {}
    start = said.get("init_lora_weights", True)
    odd |= {"init_lora_weights": start} if start not in PLAIN_STARTS else {}
    for name, value in odd.items():
        given = f"{path} has {name} = {json.dumps(value)[:60]}"
        expected = "expected plain LoRA, two matrices beside each projection"
        raise UserError(f"{given}, {expected}: train such an adapter with peft itself")
    return dict(zip(SETTINGS, (rank, alpha, lora_targets(",".join(named)))))
