"""A model's config.json: found, read, and refused in one sentence if it gives no model to train."""

import json
import os
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import hf_hub_download
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from harness.cli.command_line import UserError, ran_out_of_memory
from harness.cli.device import HAS_GPU
from harness.cli.flags import DEFAULT_MODEL, TINY
from harness.cli.workload import Workload
from harness.model import architecture
from harness.model.architecture import ModelFacts, keep_layers, with_one_layer
from harness.model.families import EXAMPLES, FAMILIES, Family, part_outside, window_of

UNGATED_MODEL = "HuggingFaceTB/SmolLM2-135M"
CPU_PARAMETER_LIMIT = 1_000_000_000
MAX_LAYERS = 10_000  # the most that a config.json may ask for
# fields of a config.json where transformers refuses a 0 without naming the field, or not at all
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads"),
)


def load_config(workload: Workload, for_gpu: bool = False) -> PreTrainedConfig:
    """Return the model's configuration, or raise a UserError that says what to do.

    for_gpu: judge as on a machine with a GPU, whatever this one has.
    """
    model, seq_len, on_gpu = workload.model, workload.seq_len, HAS_GPU or for_gpu
    use = "use --model tiny (or a model under 1 billion parameters)"
    no_gpu = f"{model} needs a CUDA GPU and none was found; {use}"
    if model == TINY:
        config = architecture.tiny_config()
    elif family := drawn_example(workload):
        config = family.example_config()
    else:
        if model == DEFAULT_MODEL and not on_gpu:
            raise UserError(no_gpu)
        config = usable_config(model, read_config_file(model))
    if (n := workload.first_layers) is not None:
        if n > config.num_hidden_layers:
            given = f"--first-layers {n} is more than the {config.num_hidden_layers} of {model}"
            raise UserError(f"{given}: name fewer, or leave --first-layers out")
        keep_layers(config, n)
    if seq_len < 2:
        given = f"--seq-len {seq_len} leaves no next token to predict"
        raise UserError(f"{given}; at least 2 are needed")
    if seq_len > config.max_position_embeddings:
        positions = f"the {config.max_position_embeddings} positions of {model}"
        raise UserError(f"--seq-len {seq_len} is longer than {positions}")
    if not on_gpu and ModelFacts(config).parameters > CPU_PARAMETER_LIMIT:
        raise UserError(no_gpu)
    return config


def drawn_example(workload: Workload) -> Family | None:
    """Return the family whose example gets random weights, so that nothing is downloaded."""
    if not workload.random_init or Path(workload.model).is_dir():
        return None
    return EXAMPLES.get(workload.model)


def read_config_file(model: str) -> dict:
    """Return what the config.json of a local directory or a Hugging Face id says."""
    try:
        path = Path(model)
        if path.is_dir():
            path /= "config.json"
            if path.name not in os.listdir(path.parent):
                given = f"the directory {model} holds no config.json"
                raise UserError(f"{given}, so it is not a saved model")
        elif path.exists():
            raise UserError(f"--model {model} is a file; give the directory that holds it")
        else:
            path = Path(download_config(model))
        content = path.read_bytes()
    except OSError as error:  # a folder without permission, a name that is too long
        given = f"--model {shortened(model)}"
        raise UserError(f"{given} cannot be read: {error.strerror}") from error
    with reading(f"the configuration of {model}"):
        values = json.loads(content)
        if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
            raise ValueError("config.json is no JSON object with a model_type")
    if values["model_type"] not in FAMILIES:
        raise UserError(outside_in_words(model, values))
    return values


def outside_in_words(model: str, values: dict) -> str:
    """Return the sentence for a config.json of a family that has no row in families.py."""
    kind, part = values["model_type"], None
    with suppress(Exception):  # transformers does not know this kind either, or a field is wrong
        config = with_one_layer(AutoConfig.for_model(**values))
        with torch.device("meta"):
            part = part_outside(AutoModelForCausalLM.from_config(config))
    said = f"{model} is a {kind!r} model" + (f" with {part}" if part else "")
    return f"{said}; these scripts train models of {', '.join(FAMILIES)}"


def download_config(model: str) -> str:
    """Return the path of a Hugging Face id's config.json, downloaded if it is not in the cache."""
    if model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1:
        raise UserError(f"the directory {model} does not exist")
    try:
        return hf_hub_download(model, "config.json")
    except hub_errors.HFValidationError as error:
        given = repr(shortened(model))
        raise UserError(f"{given} is neither a directory nor a Hugging Face model id") from error
    except (hub_errors.EntryNotFoundError, hub_errors.HTTPError, OSError) as error:
        # LocalEntryNotFoundError: the file is not cached; the hub's answer is in the cause
        answers = (getattr(each, "response", None) for each in (error, error.__cause__))
        status = next((answer.status_code for answer in answers if answer is not None), None)
        is_gated = isinstance(error, hub_errors.GatedRepoError)
        if isinstance(error, hub_errors.RepositoryNotFoundError) and not is_gated:
            message = f"there is no directory {model} and Hugging Face knows no model {model!r}"
            message += " (or your HF_TOKEN is missing or invalid: check with `hf auth whoami`)"
        elif status in (401, 403):
            message = (
                f"access to {model} was refused. Accept the license at "
                f"https://huggingface.co/{model}, then export HF_TOKEN=hf_... with a valid token "
                "of that account. Without access: --random-init runs the default model's "
                f"architecture, and --model {UNGATED_MODEL} is open to everyone"
            )
        elif status == 404:
            message = f"{model} has no config.json, so it is not a transformers model"
        else:
            message = (
                f"there is no directory {model}, no model of that name is in the local cache, and "
                "Hugging Face could not be reached. Check the path or the network, or run without "
                "a download: --model tiny, a local directory, or --random-init with the default "
                "model"
            )
        raise UserError(message) from error


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise one sentence, a UserError, for whatever is raised while `what` is read.

    Every Exception: the libraries have no base class in common for "this file is damaged".
    """
    try:
        yield
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        # str() of a KeyError is the key alone
        said = repr(error) if isinstance(error, LookupError) else str(error)
        message = textwrap.shorten(said, 300, placeholder=" ...")
        raise UserError(f"{what} could not be loaded: {message}") from error


def misfits_in_words(missing: Iterable, unexpected: Iterable, misshapen: Iterable) -> str:
    """Return how the names of saved tensors differ from a model's; "" if they do not."""
    kinds = "missing", "not part of that model", "of another shape"
    said = zip(kinds, map(sorted, (missing, unexpected, misshapen)))
    return "; ".join(f"{len(names)} {kind}, {names[0]} among them" for kind, names in said if names)


def shortened(text: str) -> str:
    """Return text from outside, cut to 200 characters."""
    return text if len(text) <= 200 else f"{text[:196]} ..."


def usable_config(model: str, values: dict) -> PreTrainedConfig:
    """Return the configuration with these values, if a model of it computes a loss."""
    named = f"the config.json of {model}"
    for field in SIZES:
        most = MAX_LAYERS if field == "num_hidden_layers" else 2**31 - 1
        if isinstance(value := values.get(field), int) and not 1 <= value <= most:
            raise UserError(f"{named} has {field} = {value}, expected 1 to {most:,}")
    if values.get("quantization_config") is not None:
        raise UserError(f"{named} has a quantization_config: quantized weights cannot be trained")
    with reading(named):
        config = FAMILIES[values["model_type"]].part("Config").from_dict(values)
        try_forward(config)
    if (window := window_of(config)) is not None:
        given = f"{named} limits attention to a sliding window of {window:,} tokens"
        raise UserError(f"{given}, expected none: nothing here computes one")
    return config


def try_forward(config: PreTrainedConfig) -> None:
    """Raise what a forward with this configuration would raise, on meta tensors."""
    model = architecture.build_model(with_one_layer(config), torch.float32, "meta")
    model.config._attn_implementation = "eager"  # the others look at the device
    ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")  # (B, T)
    with architecture.unpacked_sequences():
        assert model(input_ids=ids, labels=ids).loss.shape == ()
