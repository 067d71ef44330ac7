"""The workload: a LLaMA, text to train on, and the training loop that every script shares.

Nothing here knows a custom kernel.  A script loads a model, may patch kernels
in with `replace_modules` and `causal_lm_loss`, and hands it to `finetune`, so
the baseline and the optimized run differ in what is patched and nothing else.
"""

import argparse
import copy
import fcntl
import json
import math
import os
import random
import secrets
import shutil
import statistics
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from harness import measure
from harness.measure import DEVICE, HAS_GPU, RunError, UserError, positive_int, whole_number

# read on import: one error sentence must not drown in a library's warnings (progress bars stay)
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")

# after `measure`, which decides how triton (imported by transformers) will run
from huggingface_hub import errors as hub_errors  # isort: skip
from huggingface_hub import hf_hub_download  # isort: skip
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, masking_utils  # isort: skip
from transformers.models.llama import modeling_llama  # isort: skip

DEFAULT_MODEL = "meta-llama/Llama-3.1-8B"
UNGATED_MODEL = "HuggingFaceTB/SmolLM2-135M"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
IGNORE_INDEX = -100
BYTE_VOCABULARY = 257  # the 256 byte values and an end-of-text token
WARMUP_STEPS = 2  # not averaged: the first steps compile kernels and fill the allocator's cache
VALIDATION_BATCHES = 4
NOT_SAVED = "nothing was saved. Try a lower --lr"
CPU_PARAMETER_LIMIT = 1_000_000_000
MAX_LAYERS = 10_000  # the most that a config.json may ask for
SEQ_LEN = 512 if HAS_GPU else 64  # tokens per sequence unless told; the interpreter is slow


# ---------------------------------------------------------------- flags


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that mean the same thing in every script."""
    add = parser.add_argument
    # fmt: off
    add("--model", default=DEFAULT_MODEL, metavar="ID|DIR|tiny",
        help="Hugging Face id, local directory, or 'tiny': a small random LLaMA, no download "
        "(default: %(default)s)")
    add("--random-init", action="store_true",
        help="the model's real architecture with random weights; nothing is downloaded for the default model")
    add("--data", default="stdlib", metavar="stdlib|synthetic|FILE.txt|FILE.jsonl",
        help="stdlib: the source of Python's standard library; synthetic: random tokens; a text file; "
        "or jsonl with 'prompt' and 'completion' (default: %(default)s)")
    add("--batch-size", type=positive_int, default=1, help="sequences per step (default: %(default)s)")
    add("--seq-len", type=positive_int, default=SEQ_LEN, help="tokens per sequence (default here: %(default)s)")
    add("--seed", type=whole_number, default=0, help="of weights and data order (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="bf16" if HAS_GPU else "fp32",
        help="of weights, activations and optimizer state (default here: %(default)s)")
    add("--json", metavar="FILE", help="write the run as a JSON record")
    # fmt: on


def add_kernels_flag(parser: argparse.ArgumentParser, known: list[str], default: str) -> None:
    """--kernels a,b|all|none, refused where a name is not one of `known`."""

    def parse(text: str) -> list[str]:
        names = {"all": known, "none": []}.get(text, text.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown kernel {', '.join(map(repr, unknown))}; choose from {', '.join(known)}, all, none"
            )
        return [name for name in known if name in names]

    parser.add_argument(
        "--kernels", type=parse, default=default, metavar="NAME,NAME|all|none",
        help=f"custom kernels to use, of {', '.join(known)} (default: %(default)s)",
    )  # fmt: skip


def finetune_parser(doc: str) -> argparse.ArgumentParser:
    """The flags of both fine-tuning scripts."""
    parser = measure.Parser(doc)
    add_workload_flags(parser)
    add = parser.add_argument
    add("--steps", type=positive_int, default=20, help="optimizer steps (default: %(default)s)")
    add("--lr", type=measure.positive_float, help="learning rate (default: 1e-5; 1e-3 for tiny)")
    add("--save", metavar="DIR", help="write the trained model; from_pretrained(DIR) loads it")
    return parser


# ---------------------------------------------------------------- model


def llama_3_1_8b_config() -> LlamaConfig:
    """LLaMA 3.1 8B's architecture, so that --random-init needs no download."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        bos_token_id=128_000,
        eos_token_id=128_001,
        tie_word_embeddings=False,
    )


def tiny_config() -> LlamaConfig:
    """The same shape of network at a size that a CPU trains in seconds; bytes as tokens."""
    return LlamaConfig(
        vocab_size=BYTE_VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        bos_token_id=256,
        eos_token_id=256,
        tie_word_embeddings=False,
    )


def load_config(args: argparse.Namespace, try_step: Callable | None = None) -> LlamaConfig:
    """The model's configuration, or a UserError that says what to do.

    Refused: a model that cannot be reached, one that is not a LLaMA, a config.json that gives no
    model which can be trained, a sequence longer than the model allows, a model too large for a
    machine without a GPU.

    Args:
        args: from `add_workload_flags`.
        try_step: called with the configuration of a single such layer; what it raises makes the
            config.json unusable.  Scripts with kernels hand in `memory_estimate.step_tryer`.
    """
    if args.model == "tiny":
        config = tiny_config()
    elif args.random_init and args.model == DEFAULT_MODEL:
        config = llama_3_1_8b_config()
    else:
        if args.model == DEFAULT_MODEL and not HAS_GPU:
            raise UserError(no_gpu_message(args.model))
        config = usable_config(args.model, read_config_file(args.model), try_step)
    if args.seq_len < 2:
        raise UserError(f"--seq-len {args.seq_len} leaves no next token to predict; at least 2 are needed")
    if args.seq_len > config.max_position_embeddings:
        raise UserError(
            f"--seq-len {args.seq_len} is longer than the {config.max_position_embeddings} positions of {args.model}"
        )
    if not HAS_GPU and parameter_count(config) > CPU_PARAMETER_LIMIT:
        raise UserError(no_gpu_message(args.model))
    return config


def no_gpu_message(model: str) -> str:
    return f"{model} needs a CUDA GPU and none was found; use --model tiny (or a model under 1 billion parameters)"


def read_config_file(model: str) -> dict:
    """What the config.json of a local directory or a Hugging Face id says; loads nothing else."""
    try:
        if Path(model).is_dir():
            if "config.json" not in os.listdir(Path(model)):
                raise UserError(f"the directory {model} holds no config.json, so it is not a saved model")
            path = Path(model) / "config.json"
        elif Path(model).exists():
            raise UserError(f"--model {model} is a file; give the directory that holds it")
        else:
            path = download_config(model)
        content = Path(path).read_bytes()
    except OSError as error:  # a folder that may not be looked into, a name that is too long
        raise UserError(f"--model {shortened(model, 200)} cannot be read: {error.strerror}") from error
    with loading(f"the configuration of {model}"):
        values = json.loads(content)
        if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
            raise ValueError("config.json is no JSON object with a model_type")
    if values["model_type"] != "llama":
        raise UserError(f"{model} is a {values['model_type']!r} model; these scripts train LLaMA models")
    return values


def download_config(model: str) -> str:
    """Where the config.json of a Hugging Face id lies, after a download if it is not in the cache."""
    if model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1:
        raise UserError(f"the directory {model} does not exist")
    try:
        return hf_hub_download(model, "config.json")
    except hub_errors.GatedRepoError as error:
        raise UserError(refused_message(model)) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise UserError(
            f"there is no directory {model} and Hugging Face knows no model {model!r} "
            "(or your HF_TOKEN is missing or invalid: check with `hf auth whoami`)"
        ) from error
    except hub_errors.HFValidationError as error:
        raise UserError(f"{shortened(model, 200)!r} is neither a directory nor a Hugging Face model id") from error
    except (hub_errors.EntryNotFoundError, hub_errors.HTTPError, OSError) as error:
        # LocalEntryNotFoundError: not cached, and the hub (its answer is the cause) does not send it
        answer = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
        status = None if answer is None else answer.status_code
        if status in (401, 403):
            raise UserError(refused_message(model)) from error
        if status == 404:
            raise UserError(f"{model} has no config.json, so it is not a transformers model") from error
        raise UserError(unreachable_message(model)) from error


def is_number(value: object, low: float, high: float) -> bool:
    """Is it a number from low to high?  No NaN is."""
    return isinstance(value, (int, float)) and low <= value <= high


FLOAT_TYPES = {"bfloat16", "float16", "float32", "float64"}
SIZE = (
    lambda size: isinstance(size, int) and 1 <= size < 2**31,
    "a whole number of at least 1",
)
LAYERS = (
    lambda n: isinstance(n, int) and 1 <= n <= MAX_LAYERS,
    f"a whole number from 1 to {MAX_LAYERS:,}",
)
WEIGHTS = (
    lambda dtype: str(dtype).removeprefix("torch.") in FLOAT_TYPES,
    f"one of {', '.join(sorted(FLOAT_TYPES))}",
)
ATTENTION = (
    lambda name: HAS_GPU or name in ("eager", "sdpa"),
    "'eager' or 'sdpa' on a machine without a CUDA GPU",
)
# What transformers does not look at before it fails, or never: field of a config.json -> (does its
# value fit?, the values that do).  What transformers refuses is traced to its field by `fields_at_fault`.
FIELDS = {
    "vocab_size": SIZE, "hidden_size": SIZE, "intermediate_size": SIZE, "head_dim": SIZE,
    "num_attention_heads": SIZE, "num_key_value_heads": SIZE, "max_position_embeddings": SIZE,
    "num_hidden_layers": LAYERS,
    "rms_norm_eps": (lambda eps: is_number(eps, 0, 1), "a number from 0 to 1"),
    "attention_dropout": (lambda p: is_number(p, 0, 1), "a probability from 0 to 1"),
    "dtype": WEIGHTS, "torch_dtype": WEIGHTS,
    "quantization_config": (lambda method: False, "none: quantized weights cannot be trained"),
    "attn_implementation": ATTENTION, "_attn_implementation": ATTENTION,
}  # fmt: skip


def usable_config(model: str, values: dict, try_step: Callable | None = None) -> LlamaConfig:
    """The configuration with these values, if a model can be built from it and take a step.

    Args:
        model: whose config.json it is, for the message.
        values: what that file says.
        try_step: see `load_config`.

    Raises:
        UserError: it cannot; the sentence names the file and the field, or those of which one is.
    """
    for field, (fits, expected) in FIELDS.items():
        value = values.get(field)
        if value is not None and not fits(value):
            given = f"the config.json of {model} has {field} = {shortened(repr(value))}"
            raise UserError(f"{given}, expected {expected}")

    def attempt(values: dict) -> LlamaConfig:
        config = LlamaConfig.from_dict(copy.deepcopy(values))
        try_forward(config)
        if try_step is not None:
            try_step(with_one_layer(config))
        return config

    try:
        return attempt(values)
    except Exception as error:  # transformers and PyTorch raise of every kind
        if measure.ran_out_of_memory(error):
            raise
        fields = fields_at_fault(values, attempt)
        cause = " or ".join(f"{field} = {shortened(repr(values[field]))}" for field in fields)
        given = f"the config.json of {model} cannot be used, because of {cause or 'several fields'}"
        message = " ".join(str(error).split())
        reason = textwrap.shorten(f"{type(error).__name__}: {message}", 200, placeholder=" ...")
        raise UserError(f"{given}: {reason}") from error


def fields_at_fault(values: dict, attempt: Callable[[dict], object]) -> list[str]:
    """The fields of which each alone, at its default, would let attempt(values) pass."""
    found = []
    for field in values:
        try:
            attempt({name: value for name, value in values.items() if name != field})
        except Exception:  # whatever: this field is not what is wrong, or not alone
            continue
        found.append(field)
    return found


def shortened(text: str, length: int = 60) -> str:
    """What comes from outside, in at most so many characters."""
    return text if len(text) <= length else f"{text[: length - 4]} ..."


def with_one_layer(config: LlamaConfig) -> LlamaConfig:
    """The configuration of a model of one such layer: they are all alike, and one is quickly built."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    return config


def try_forward(config: LlamaConfig) -> None:
    """Raise what a forward with this configuration would, on meta tensors, which takes no memory.

    Raises:
        ValueError: its rotary frequencies are not numbers that an angle can be computed from.
        Exception: of every kind, from transformers and PyTorch.
    """
    frequencies = modeling_llama.LlamaRotaryEmbedding(config).inv_freq  # (D / 2,) fp32
    if not (frequencies.isfinite() & (frequencies > 0)).all():
        raise ValueError("its rotary frequencies are not all finite and above 0")
    model = build_model(with_one_layer(config), torch.float32, "meta")
    model.config._attn_implementation = "eager"  # the others look at the device
    ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")  # (B, T)
    with unpacked_sequences():
        assert model(input_ids=ids, labels=ids).loss.shape == ()


def refused_message(model: str) -> str:
    return (
        f"access to {model} was refused. Accept the license at https://huggingface.co/{model}, then "
        "export HF_TOKEN=hf_... with a valid token of that account. Without access: --random-init runs the "
        f"default model's architecture, and --model {UNGATED_MODEL} is open to everyone"
    )


def unreachable_message(model: str) -> str:
    return (
        f"there is no directory {model}, no model of that name is in the local cache, and "
        "Hugging Face could not be reached. Check the path or the network, or run without a "
        "download: --model tiny, a local directory, or --random-init with the default model"
    )


def parameter_count(config: LlamaConfig) -> int:
    """Parameters of a LLaMA, counted from its configuration."""
    return sum(p.numel() for p in build_model(config, torch.float32, "meta").parameters())


def build_model(config: LlamaConfig, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """A model with random weights, ready for training."""
    with torch.device(device):
        return for_training(AutoModelForCausalLM.from_config(config, dtype=dtype))


def for_training(model: torch.nn.Module) -> torch.nn.Module:
    model.config.use_cache = False  # a cache of keys and values serves generation, not training
    rotary = model.model.rotary_emb
    if "dynamic" in rotary.rope_type:
        # Beyond the model's positions its frequencies would change.  No sequence is that long, and
        # to look makes the host wait for the GPU, which neither meta tensors nor a CUDA graph allow.
        rotary.rope_type = "default"
    return model.train()


def has_random_weights(args: argparse.Namespace) -> bool:
    return args.model == "tiny" or args.random_init


def weights_in_words(args: argparse.Namespace) -> str:
    return f"{'random' if has_random_weights(args) else 'pretrained'} weights"


def load_model(args: argparse.Namespace, try_step: Callable | None = None) -> torch.nn.Module:
    """The model in training mode, on the GPU if there is one, in --dtype.

    Random weights are drawn on the device itself from --seed, so that two runs
    start from the same point and 8B parameters take seconds.  try_step: see `load_config`.

    Raises:
        UserError: what `load_config` refuses; weights that are damaged, or not those of the
            configuration: every weight of the model is in the file and every one of the file in
            the model, but for what transformers knows to be superfluous.
    """
    config = load_config(args, try_step)
    if getattr(args, "kernels", None):
        measure.require_interpreter()
    if args.data not in ("stdlib", "synthetic"):
        read_file(args.data)  # a wrong path is refused here, not after the weights took minutes to load
    dtype = DTYPES[args.dtype]
    torch.manual_seed(args.seed)
    if has_random_weights(args):
        return build_model(config, dtype, DEVICE)
    with loading(f"the weights of {args.model}"):
        model, report = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=dtype, device_map={"": DEVICE},
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    # transformers fills what is missing with random numbers and drops what it has no place for;
    # that would train, from the wrong start
    misfits = {
        "missing": sorted(report["missing_keys"]),
        "of another shape": sorted(name for name, *_ in report["mismatched_keys"]),
        "not part of that model": sorted(report["unexpected_keys"]),
    }
    said = [f"{len(names)} {what}, {names[0]} among them" for what, names in misfits.items() if names]
    if said:
        raise UserError(f"the weights of {args.model} do not fit its config.json: {'; '.join(said)}")
    return for_training(model)


@contextmanager
def loading(what: str) -> Iterator[None]:
    """One sentence for whatever is raised while `what` is read.

    Every Exception, because transformers, tokenizers, safetensors and
    huggingface_hub have no base class in common for "this file is damaged".
    """
    try:
        yield
    except Exception as error:
        if measure.ran_out_of_memory(error):
            raise
        message = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise UserError(f"{what} could not be loaded: {message}") from error


def load_tokenizer(args: argparse.Namespace):
    """The model's tokenizer; None where it has none, and then UTF-8 bytes are the tokens."""
    if args.model == "tiny" or (args.random_init and args.model == DEFAULT_MODEL):
        return None
    if Path(args.model).is_dir() and not any(Path(args.model).glob("token*")):
        return None
    with loading(f"the tokenizer of {args.model}"):
        return AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)


# ---------------------------------------------------------------- patching


def replace_modules(model: torch.nn.Module, cls: type, make: Callable) -> int:
    """Replace every submodule that is exactly of class `cls` by make(old); returns how many.

    A subclass is somebody's own code and stays, as does a module that make gives back.  The list is
    complete before anything is replaced: changing a tree while walking it skips some of its branches.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module) is cls]
    n_replaced = 0
    for name, module in found:
        parent_name, _, attribute = name.rpartition(".")
        replacement = make(module)
        setattr(model.get_submodule(parent_name), attribute, replacement)
        n_replaced += replacement is not module
    return n_replaced


def causal_lm_loss(cross_entropy: Callable) -> Callable:
    """A drop-in for a Hugging Face model's `loss_function`, around cross_entropy.

    Token t predicts token t + 1.  The labels are shifted, not the logits: a
    shift of the logits cuts a row out of every sequence, and the copy that this
    takes is as large as the logits themselves.

    Args:
        cross_entropy: cross_entropy(logits, targets, ignore_index) is the mean loss over the
            targets that are not ignore_index, from logits (B, T, V) and targets (B, T) int64.

    Returns:
        A function of what Hugging Face's ForCausalLMLoss takes, in the same order:
        logits (B, T, V); labels (B, T) int64; vocab_size, which must be V; num_items_in_batch, a
        number or a tensor, by which the sum of the losses is divided, instead of their number;
        ignore_index, the label that does not count; shift_labels (B, T), which count in place of the
        labels and are not shifted again.  Others are ignored, as there.
    """

    def loss_function(
        logits,
        labels,
        vocab_size=None,
        num_items_in_batch=None,
        ignore_index=IGNORE_INDEX,
        shift_labels=None,
        **kwargs,
    ) -> torch.Tensor:
        if vocab_size is not None and logits.shape[-1] != vocab_size:
            raise ValueError(
                f"vocab_size is {vocab_size}, expected {logits.shape[-1]}, the logits' last size: "
                f"give the model's configuration that of its head."
            )
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)  # (B, T)
        shift_labels = shift_labels.to(logits.device)
        loss = cross_entropy(logits, shift_labels, ignore_index)
        if num_items_in_batch is not None:  # gradient accumulation: mean over all its micro-batches
            if isinstance(num_items_in_batch, torch.Tensor) and num_items_in_batch.ndim > 0:
                num_items_in_batch = num_items_in_batch.to(loss.device)  # a single number may stay where it is
            n_valid = (shift_labels != ignore_index).sum()
            # The mean over no target at all is NaN, and such a micro-batch must add nothing to the others.  The
            # quotient first: of a single micro-batch it is exactly 1, which spares a fused loss scaling its gradients.
            loss = torch.where(n_valid > 0, loss * (n_valid / num_items_in_batch), 0.0)
        return loss

    return loss_function


# ---------------------------------------------------------------- data


@dataclass(frozen=True)
class Batch:
    """One step's input; labels equal input_ids with IGNORE_INDEX where nothing is to be learned."""

    input_ids: torch.Tensor  # (B, T) int64
    labels: torch.Tensor  # (B, T) int64, not shifted
    n_tokens: int  # without padding

    def to(self, device: str) -> "Batch":
        return Batch(self.input_ids.to(device), self.labels.to(device), self.n_tokens)


@dataclass(frozen=True)
class Data:
    train: list[Batch]
    validation: list[Batch]
    source: str  # one line about where it comes from


def load_data(args: argparse.Namespace, config: LlamaConfig, steps: int) -> Data:
    """`steps` training batches and VALIDATION_BATCHES held-out ones, the same for the same flags.

    Raises:
        UserError: the file cannot be read or is too short, a jsonl line is
            malformed, or the tokenizer's ids do not fit the model.
    """
    n_train, n_validation = steps * args.batch_size, VALIDATION_BATCHES * args.batch_size
    if args.data == "synthetic":
        generator = torch.Generator().manual_seed(args.seed)
        tokens = torch.randint(config.vocab_size, (n_train + n_validation, args.seq_len), generator=generator)
        sequences = [(row, row) for row in tokens]
        train, validation = sequences[:n_train], sequences[n_train:]
        source = f"synthetic: uniform random tokens of {config.vocab_size:,}"
    else:
        tokenizer = load_tokenizer(args)
        encode, end = text_encoder(tokenizer, config)
        if args.data.endswith(".jsonl"):
            examples, n_skipped = read_jsonl(args.data, encode, end, args.seq_len)
            n_held_out = max(1, len(examples) // 10)
            train, validation = examples[:-n_held_out], examples[-n_held_out:][:n_validation]
            source = f"{args.data}: {len(train):,} examples to train on, {n_held_out:,} held out"
            if n_skipped:
                source += f", {n_skipped:,} skipped: no completion token within --seq-len {args.seq_len}"
        else:
            train_texts, validation_texts = read_texts(args.data)
            train = pack(train_texts, encode, end, args.seq_len, n_train)
            validation = pack(validation_texts, encode, end, args.seq_len, n_validation)
            source = f"{args.data}: {len(train):,} sequences to train on, {len(validation):,} held out"
        source += f", tokens: {'UTF-8 bytes' if tokenizer is None else type(tokenizer).__name__}"
        if len(train) < n_train:
            source += f" (each seen about {n_train / len(train):.1f} times)"
    largest = max(int(ids.max()) for ids, _ in train + validation)
    if largest >= config.vocab_size:
        raise UserError(
            f"the data holds token id {largest}, outside the model's vocabulary of {config.vocab_size}; "
            "the tokenizer does not belong to this model"
        )
    order = list(epochs(len(train), n_train, args.seed))
    return Data(
        train=make_batches([train[i] for i in order], args.batch_size),
        validation=make_batches(validation, args.batch_size),
        source=source,
    )


def epochs(n_sequences: int, n_wanted: int, seed: int) -> Iterator[int]:
    """n_wanted indices: every sequence once in random order, then all again in another order."""
    shuffle = random.Random(seed)
    while n_wanted > 0:
        order = list(range(n_sequences))
        shuffle.shuffle(order)
        yield from order[:n_wanted]
        n_wanted -= n_sequences


def text_encoder(tokenizer, config: LlamaConfig) -> tuple[Callable[[str], list[int]], list[int]]:
    """(text -> token ids without special tokens, the ids that end a text)."""
    if tokenizer is None:
        end = [256] if config.vocab_size == BYTE_VOCABULARY else []
        return (lambda text: list(text.encode("utf-8"))), end
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return (lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]), end


def read_texts(data: str) -> tuple[list[str], list[str]]:
    """(training texts, held-out texts): every tenth stdlib file, or the last tenth of a text file."""
    if data == "stdlib":
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
        return [t for i, t in enumerate(texts) if i % 10], texts[::10]
    text = read_file(data)
    cut = len(text) * 9 // 10
    return [text[:cut]], [text[cut:]]


def read_file(path: str) -> str:
    if not path.endswith((".txt", ".jsonl")):
        raise UserError(f"--data {path}: expected stdlib, synthetic, a .txt file or a .jsonl file")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # without the mark that Windows editors put first
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise UserError(f"{path} is empty")
    return text


def pack(texts: list[str], encode: Callable, end: list[int], seq_len: int, n_wanted: int) -> list[tuple]:
    """Up to n_wanted (input_ids, labels) of exactly seq_len tokens, cut from the texts laid end to end."""
    tokens: list[int] = []
    for text in texts:
        tokens += encode(text) + end
        if len(tokens) >= seq_len * n_wanted:
            break
    n_sequences = min(n_wanted, len(tokens) // seq_len)
    if n_sequences == 0:
        raise UserError(
            f"the data has a part of only {len(tokens)} tokens, too short for one sequence of "
            f"--seq-len {seq_len} (a tenth of a text file is held out); give more text or a smaller --seq-len"
        )
    rows = torch.tensor(tokens[: n_sequences * seq_len]).view(n_sequences, seq_len)
    return [(row, row) for row in rows]


def read_jsonl(path: str, encode: Callable, end: list[int], seq_len: int) -> tuple[list[tuple], int]:
    """(input_ids, labels) of each line {"prompt": ..., "completion": ...}; how many were skipped.

    Prompt tokens are not trained on.  An example longer than seq_len is cut at its end; one of
    which no completion token is left then is skipped.

    Raises:
        UserError: a line is malformed, or fewer than two examples are left.
    """
    examples, skipped = [], []  # skipped: their line numbers
    # not splitlines(): it also cuts at characters that may stand inside a JSON string, such as U+2028
    for line_number, line in enumerate(read_file(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            prompt, completion = example["prompt"], example["completion"]
            if not (isinstance(prompt, str) and isinstance(completion, str)):
                raise TypeError
            (prompt + completion).encode("utf-8")  # JSON can spell half of a surrogate pair, which is no text
        except (ValueError, KeyError, TypeError, RecursionError):  # the last: thousands of brackets
            raise UserError(
                f'{path}, line {line_number}: expected a JSON object with strings "prompt" and "completion"'
            ) from None
        prompt_ids, completion_ids = encode(prompt), encode(completion) + end
        ids = torch.tensor((prompt_ids + completion_ids)[:seq_len], dtype=torch.int64)
        labels = ids.clone()
        labels[: len(prompt_ids)] = IGNORE_INDEX
        # the first token of a sequence is never predicted, so it alone teaches nothing
        if (labels[1:] != IGNORE_INDEX).any():
            examples.append((ids, labels))
        else:
            skipped.append(line_number)
    if skipped and not examples:
        raise UserError(
            f"{path}, line {skipped[0]}: no completion token is left to train on within "
            f"--seq-len {seq_len}, nor in any other line"
        )
    if len(examples) < 2:
        left = f" within --seq-len {seq_len} ({len(skipped)} skipped)" if skipped else ""
        raise UserError(f"{path} holds {len(examples)} example{left}; at least 2 are needed (one is held out)")
    return examples, len(skipped)


def make_batches(sequences: list[tuple], batch_size: int) -> list[Batch]:
    """Batches of up to batch_size, padded at the right to the longest; padding has no label.

    Padding after the end needs no attention mask: with causal attention no
    real token ever looks at it.
    """
    batches = []
    for start in range(0, len(sequences), batch_size):
        ids, labels = zip(*sequences[start : start + batch_size])
        pad = torch.nn.utils.rnn.pad_sequence
        batches.append(
            Batch(
                pad(list(ids), batch_first=True, padding_value=0),
                pad(list(labels), batch_first=True, padding_value=IGNORE_INDEX),
                n_tokens=sum(len(row) for row in ids),
            )
        )
    return batches


# ---------------------------------------------------------------- training


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def make_optimizer(model: torch.nn.Module, lr: float, **options) -> torch.optim.Optimizer:
    """AdamW as PyTorch gives it, by default without further options."""
    return torch.optim.AdamW(trained(model), lr=lr, **options)


def training_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    """One optimizer step; returns the loss as a scalar on the device, without waiting for it.

    The ranges give the profiler its four phases; outside a profile they cost nothing worth measuring.
    """
    with torch.profiler.record_function("forward"):
        loss = model(input_ids=batch.input_ids, labels=batch.labels).loss
    with torch.profiler.record_function("backward"):
        loss.backward()
    with torch.profiler.record_function("optimizer"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def timed_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, take_step: Callable = training_step
) -> tuple[torch.Tensor, float]:
    """(loss, seconds) of one training step, from an idle device to an idle device."""
    measure.synchronize()
    start = time.perf_counter()
    loss = take_step(model, optimizer, batch)
    measure.synchronize()
    return loss, time.perf_counter() - start


@contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Tell transformers that no row of a batch holds several sequences, for which it looks at the positions.

    In a capture it cannot look, and to be safe gives attention a mask of (T, T), with which the kernels for causal
    attention are out of the question.
    """
    known = {"find_packed_sequence_indices": lambda position_ids: None, "is_tracing": lambda tensor=None: False}
    before = {name: getattr(masking_utils, name) for name in known}
    try:
        vars(masking_utils).update(known)
        yield
    finally:
        vars(masking_utils).update(before)


def captured_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, stream: torch.cuda.Stream
) -> Callable:
    """`training_step` recorded as one CUDA graph; what is returned replays it: thousands of launches become one.

    A graph repeats kernels with the addresses and numbers that it has seen.  So each batch is copied to where the
    recorded one was, all batches must have its shape, and the optimizer must count its steps on the GPU.  Steps must
    have been taken before, on the same stream: kernels are compiled and optimizer states made outside of a graph.

    Raises:
        UserError: a batch has another shape than the recorded one.
    """
    ids, labels = batch.input_ids.clone(), batch.labels.clone()
    torch.cuda.empty_cache()  # a graph has memory of its own and cannot use what the steps before it left
    graph = torch.cuda.CUDAGraph()
    with unpacked_sequences(), torch.cuda.graph(graph, stream=stream):
        loss = training_step(model, optimizer, Batch(ids, labels, batch.n_tokens))

    def replay(model, optimizer, batch):
        if batch.input_ids.shape != ids.shape:
            raise UserError(
                f"a batch has the shape {tuple(batch.input_ids.shape)}, but the CUDA graph was recorded with "
                f"{tuple(ids.shape)}; --cuda-graph needs batches of one shape"
            )
        ids.copy_(batch.input_ids)
        labels.copy_(batch.labels)
        graph.replay()
        return loss

    return replay


@torch.no_grad()
def validation_loss(model: torch.nn.Module, batches: list[Batch]) -> float:
    """Mean loss per trained token over the held-out batches, dropout off."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        batch = batch.to(DEVICE)
        n_targets = int((batch.labels[:, 1:] != IGNORE_INDEX).sum())
        total += model(input_ids=batch.input_ids, labels=batch.labels).loss.item() * n_targets
        count += n_targets
    model.train()
    return total / count


def flops_per_token(config: LlamaConfig, seq_len: int) -> float:
    """Model FLOPs per trained token, forward + backward: 6 per matrix weight + causal attention.

    Matrix weights are all but the input embedding, which is a look-up (Kaplan
    et al. 2020).  Attention multiplies QK^T and PV over half of T keys on
    average: 6 * layers * heads * head_dim * T (PaLM's 12, halved by causality).
    """
    attention_size = config.num_attention_heads * config.head_dim
    attention = config.hidden_size * 2 * (attention_size + config.num_key_value_heads * config.head_dim)
    mlp = 3 * config.hidden_size * config.intermediate_size
    matrix_weights = config.num_hidden_layers * (attention + mlp) + config.vocab_size * config.hidden_size
    return 6.0 * matrix_weights + 6.0 * config.num_hidden_layers * attention_size * seq_len


def describe_workload(model: torch.nn.Module, args: argparse.Namespace) -> dict:
    """The part of a record that says what was run, from the flags of `add_workload_flags`."""
    return {
        "model": args.model, "weights": weights_in_words(args),
        "parameters": sum(p.numel() for p in model.parameters()), "dtype": args.dtype,
        "data": args.data, "batch_size": args.batch_size, "seq_len": args.seq_len, "seed": args.seed,
    }  # fmt: skip


def model_line(record: dict) -> str:
    return f"Model: {record['model']}, {record['parameters']:,} parameters, {record['weights']}, {record['dtype']}"


def workload_line(record: dict) -> str:
    """The model, the size of a step and the kernels."""
    kernels = ", ".join(record["kernels"]) or "none"
    return f"{model_line(record)}; {record['batch_size']} x {record['seq_len']} tokens; custom kernels: {kernels}"


def teacher_line(record: dict) -> str:
    return (
        f"Distilled from: {record['teacher']}, {record['teacher_parameters']:,} parameters, "
        f"{record['teacher_weights']}; the student's layers: {record['student_layers']}; "
        f"loss: reverse KL at temperature {record['temperature']:g}, in place of cross-entropy"
    )


def finetune(
    model: torch.nn.Module, args: argparse.Namespace, title: str, kernels: list[str],
    make_optimizer: Callable = make_optimizer, cuda_graph: bool = False, distillation: dict | None = None,
) -> dict:  # fmt: skip
    """Fine-tune with AdamW, print every step and the result block, return (and write) the record.

    Args:
        model: from `load_model`, patched or not.
        args: from `finetune_parser`.
        title: heads the result block, as in "Baseline Results".
        kernels: names of what was patched in, for the record.
        make_optimizer: (model, learning rate) -> an AdamW.
        cuda_graph: replay the steps after the first WARMUP_STEPS as one CUDA graph.
        distillation: the record's part about the model's teacher, if it has one.

    Raises:
        RunError: the loss is not finite; nothing is saved then.
    """
    config = model.config
    data = load_data(args, config, args.steps)
    lr = args.lr if args.lr is not None else (1e-3 if args.model == "tiny" else 1e-5)
    env = measure.environment()
    if args.save:
        load_tokenizer(args)  # saved with the model: if it cannot be had, say so before training
    if not HAS_GPU:
        print(measure.NO_GPU_NOTE + "\n")
    print(measure.environment_line(env))
    workload = describe_workload(model, args) | (distillation or {})
    print(model_line(workload))
    if distillation:
        print(teacher_line(workload))
    print(f"Data: {data.source}")
    print(f"Custom kernels: {', '.join(kernels) or 'none'}; AdamW, learning rate {lr:g}\n")

    validation_before = validation_loss(model, data.validation)
    optimizer = make_optimizer(model, lr)
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    losses, seconds, tokens, peaks = [], [], [], []  # one of each per step
    take_step, stream = training_step, torch.cuda.Stream() if cuda_graph else None
    for step, batch in enumerate(data.train, start=1):
        with torch.cuda.stream(stream):
            batch = batch.to(DEVICE)
            if cuda_graph and step == WARMUP_STEPS + 1:
                take_step = captured_step(model, optimizer, batch, stream)
            loss, elapsed = timed_step(model, optimizer, batch, take_step)
        seconds.append(elapsed)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise RunError(f"the loss became {losses[-1]} at step {step}; {NOT_SAVED}")
        tokens.append(batch.n_tokens)
        peaks.append(measure.peak_memory_bytes())
        print(step_line(step, args.steps, losses, seconds, tokens, peaks), flush=True)
    validation_after = validation_loss(model, data.validation)
    if not math.isfinite(validation_after):  # the last step's loss was computed before its update
        raise RunError(f"the validation loss became {validation_after} after step {args.steps}; {NOT_SAVED}")

    skip = WARMUP_STEPS if args.steps > WARMUP_STEPS else 0
    timed = seconds[skip:]
    throughput = sum(tokens[skip:]) / sum(timed)
    peak_tflops = measure.datasheet_tflops(env["gpu"]) if args.dtype == "bf16" else None
    flops = (flops_per_token(config, args.seq_len) + workload.get("teacher_flops_per_token", 0)) * throughput
    record = {
        "kind": "finetune", "title": title, "environment": env, "kernels": kernels,
        **workload, "steps": args.steps, "lr": lr, "warmup_steps": skip,
        "losses": losses, "seconds": seconds, "tokens": tokens, "peaks": peaks,
        "average_seconds": statistics.mean(timed), "median_seconds": statistics.median(timed),
        "tokens_per_second": throughput, "peak_memory_bytes": peaks[-1],
        "model_flops_utilization": flops / (peak_tflops * 1e12) if peak_tflops else None,
        "validation_loss_before": validation_before, "validation_loss_after": validation_after,
    }  # fmt: skip
    print("\n" + result_block(record))
    try:
        if args.save:
            save_model(model, args)
    finally:  # a full disk must not cost the record too
        measure.write_record(args.json, record)
    return record


def step_line(
    step: int, n_steps: int, losses: list[float], seconds: list[float], tokens: list[int], peaks: list[int]
) -> str:
    """What is printed after a step, counted from 1; the lists hold at least that many steps."""
    i = step - 1
    left = statistics.median(seconds[:step]) * (n_steps - step)
    return (
        f"step {step:>{len(str(n_steps))}}/{n_steps}  loss {losses[i]:8.4f}  {seconds[i]:7.3f} s  "
        f"{tokens[i] / seconds[i]:>9,.0f} tokens/sec  peak {peaks[i] / 1e9:6.1f} GB  ETA {left:4.0f} s"
    )


def result_block(record: dict) -> str:
    """The playbook's result block, from a record."""
    mfu = record["model_flops_utilization"]
    memory = "Peak GPU memory:" if record["environment"]["gpu"] else "Peak process memory:"
    first = record["warmup_steps"] + 1
    lines = [
        measure.title(f"{record['title']} Results"),
        f"{'Average time per step:':<25} {record['average_seconds']:.3f} s (steps {first} to {record['steps']})",
        f"{'Median time per step:':<25} {record['median_seconds']:.3f} s",
        f"{'Average throughput:':<25} {record['tokens_per_second']:,.0f} tokens/sec",
        f"{memory:<25} {record['peak_memory_bytes'] / 1e9:.1f} GB",
        f"{'Model FLOPs utilization:':<25} "
        + ("n/a" if mfu is None else f"{100 * mfu:.1f} % of the data sheet's dense bf16 rate"),
        f"{'Validation loss:':<25} {record['validation_loss_before']:.4f} before, "
        f"{record['validation_loss_after']:.4f} after",
    ]
    if "teacher" in record:
        first, last = record["losses"][0], record["losses"][-1]
        lines.append(f"{'Distillation loss:':<25} {first:.4f} in step 1, {last:.4f} in step {record['steps']}")
        lines.append(teacher_line(record))
    return "\n".join(lines)


# ---------------------------------------------------------------- saving

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"  # transformers' names


def save_model(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Write weights, configuration and tokenizer as an ordinary transformers directory.

    Whenever this is interrupted, `from_pretrained` loads the whole old or the whole new model; that is decided by
    config.json alone (`put_in_place`).  The one exception are the tokenizer's files, which are replaced one by one.
    Of the files that were there only those of the old model are removed.  What an interrupted save left behind the
    next one removes.  Saves of several processes to one directory wait for each other; the last one's model stays.

    Raises:
        RunError: the files cannot be written.
    """
    tokenizer = load_tokenizer(args)
    model.config.use_cache = True  # load_model switched it off for training only
    target = Path(os.path.realpath(args.save))
    try:
        target.mkdir(parents=True, exist_ok=True)
        with alone_in(target):
            remove_unfinished(target)
            folder = target / f"{measure.UNFINISHED}{secrets.token_hex(8)}"
            folder.mkdir()
            try:
                model.save_pretrained(folder)
                if tokenizer is not None:
                    tokenizer.save_pretrained(folder)
                put_in_place(folder, target)
            finally:
                remove_unfinished(target)
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: what transformers finds wrong
        raise RunError(f"the model could not be saved to {args.save}: {error}") from error
    print(f"Model saved to {args.save}")


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
    """Remove what interrupted saves left in a model's folder, but for one whose weights config.json names."""
    config = target / CONFIG
    loaded = config.read_text(errors="replace") if config.exists() else ""
    for folder in target.glob(f"{measure.UNFINISHED}*"):
        if folder.is_dir() and folder.name not in loaded:
            shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, target: Path) -> None:
    """Make the whole model in `folder`, which lies in `target`, the model of `target`.

    Several files cannot be renamed at once, but transformers takes the weights from where config.json says
    (`transformers_weights`).  So a first rename puts a config.json there with which the new model is loaded from
    `folder`; nothing reads the old one any more, and its weights are removed.  The new files get their names in
    `target` besides those in `folder`, and a second rename puts the ordinary config.json there.

    At each moment the shards in `target` that are of no use are named by the index there, so that the next save
    finds them: the old index goes after the old shards, and the new one comes before the new shards.
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
    loaded_here.write_text(json.dumps(config | {"transformers_weights": f"{folder.name}/{weights}"}))

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
    return {name for name in shards if Path(str(name)).name == name and name.endswith(".safetensors")}


def add_name(file: Path, name: Path) -> None:
    """A second name of a file; a copy where the file system knows no such thing."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)
