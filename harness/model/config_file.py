"""A model's config.json: found, read, and refused in one sentence if it gives no model to train."""

import copy
import json
import os
import textwrap
from collections.abc import Callable, Iterator
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
from harness.model.architecture import keep_layers, parameter_count, with_one_layer
from harness.model.families import EXAMPLES, FAMILIES, Family, part_outside, window_of

UNGATED_MODEL = "HuggingFaceTB/SmolLM2-135M"
CPU_PARAMETER_LIMIT = 1_000_000_000
MAX_LAYERS = 10_000  # the most that a config.json may ask for


def load_config(
    workload: Workload, try_step: Callable | None = None, for_gpu: bool = False
) -> PreTrainedConfig:
    """Return the model's configuration, or raise a UserError that says what to do.

    Args:
        try_step: called with the configuration of a single such layer; what it raises makes the
            config.json unusable. Scripts with kernels hand in `memory_estimate.step_tryer`.
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
        fields = FIELDS if on_gpu else FIELDS | FIELDS_WITHOUT_GPU
        config = usable_config(model, read_config_file(model), fields, try_step)
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
    if not on_gpu and parameter_count(config) > CPU_PARAMETER_LIMIT:
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
        given = f"--model {shortened(model, 200)}"
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
        given = repr(shortened(model, 200))
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
        message = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise UserError(f"{what} could not be loaded: {message}") from error


def shortened(text: str, length: int = 60) -> str:
    """Return text from outside, cut to so many characters."""
    return text if len(text) <= length else f"{text[: length - 4]} ..."


FLOAT_TYPES = "bfloat16", "float16", "float32", "float64"
SIZE = lambda n: isinstance(n, int) and 1 <= n < 2**31, "a whole number of at least 1"
LAYERS = (
    lambda n: isinstance(n, int) and 1 <= n <= MAX_LAYERS,
    f"a whole number from 1 to {MAX_LAYERS:,}",
)
FRACTION = lambda x: isinstance(x, (int, float)) and 0 <= x <= 1, "a number from 0 to 1"  # no NaN
WEIGHTS = (
    lambda dtype: str(dtype).removeprefix("torch.") in FLOAT_TYPES,
    f"one of {', '.join(FLOAT_TYPES)}",
)
ATTENTION = (
    lambda name: name in ("eager", "sdpa"),
    "'eager' or 'sdpa' on a machine without a CUDA GPU",
)
# What transformers checks too late or never: field of a config.json -> (does its value fit?, the
# values that do).  What transformers itself refuses, `fields_at_fault` traces to its field.
FIELDS = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "head_dim"), SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), SIZE),
    "max_position_embeddings": SIZE,
    "num_hidden_layers": LAYERS,
    **dict.fromkeys(("rms_norm_eps", "attention_dropout"), FRACTION),
    **dict.fromkeys(("dtype", "torch_dtype"), WEIGHTS),
    "quantization_config": (lambda method: False, "none: quantized weights cannot be trained"),
}
FIELDS_WITHOUT_GPU = {"attn_implementation": ATTENTION, "_attn_implementation": ATTENTION}


def usable_config(
    model: str, values: dict, fields: dict = FIELDS, try_step: Callable | None = None
) -> PreTrainedConfig:
    """Return the configuration with these values, if a model of it can take a step."""
    for field, (fits, expected) in fields.items():
        value = values.get(field)
        if value is not None and not fits(value):
            given = f"the config.json of {model} has {field} = {shortened(repr(value))}"
            raise UserError(f"{given}, expected {expected}")

    def attempt(values: dict) -> PreTrainedConfig:
        config = FAMILIES[values["model_type"]].part("Config").from_dict(copy.deepcopy(values))
        try_forward(config)
        if try_step is not None and window_of(config) is None:  # a window is refused below
            try_step(with_one_layer(config))
        return config

    try:
        config = attempt(values)
    except Exception as error:  # transformers and PyTorch raise of every kind
        if ran_out_of_memory(error):
            raise
        faulty = fields_at_fault(values, attempt)
        cause = " or ".join(f"{field} = {shortened(repr(values[field]))}" for field in faulty)
        given = f"the config.json of {model} cannot be used, because of {cause or 'several fields'}"
        message = f"{type(error).__name__}: {error}"
        reason = textwrap.shorten(message, 200, placeholder=" ...")
        raise UserError(f"{given}: {reason}") from error
    if (window := window_of(config)) is not None:
        given = (
            f"the config.json of {model} limits attention to a sliding window of {window:,} tokens"
        )
        raise UserError(f"{given}, expected none: nothing here computes one")
    return config


def fields_at_fault(values: dict, attempt: Callable[[dict], object]) -> list[str]:
    """Return the fields of which each alone, at its default, would let attempt(values) pass."""
    found = []
    for field in values:
        with suppress(Exception):  # this field is not what is wrong, or not alone
            attempt({name: value for name, value in values.items() if name != field})
            found.append(field)
    return found


def try_forward(config: PreTrainedConfig) -> None:
    """Raise what a forward with this configuration would raise, on meta tensors."""
    rotary = FAMILIES[config.model_type].part("RotaryEmbedding")
    frequencies = rotary(config).inv_freq  # (D / 2,) fp32
    if not (frequencies.isfinite() & (frequencies > 0)).all():
        raise ValueError("its rotary frequencies are not all finite and above 0")
    model = architecture.build_model(with_one_layer(config), torch.float32, "meta")
    model.config._attn_implementation = "eager"  # the others look at the device
    ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")  # (B, T)
    with architecture.unpacked_sequences():
        assert model(input_ids=ids, labels=ids).loss.shape == ()
