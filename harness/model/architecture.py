"""A model built from its configuration, its size, and the work of a token."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, masking_utils

from harness.cli.adapter_config import ATTENTION, MLP
from harness.cli.workload import changes
from harness.model.families import FAMILIES

IGNORE_INDEX = -100  # the label of a token that is not to be learned
BYTE_VOCABULARY = 257  # the 256 byte values and an end-of-text token
# fields of a config.json on which a step depends, besides the weights
COMPUTING = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("rope_parameters", "max_position_embeddings", "attention_bias", "mlp_bias"),
    *("tie_word_embeddings", "pad_token_id", "no_rope_layers"),
)
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # by the words of --dtype


def llama_3_1_8b_config() -> PreTrainedConfig:
    """Return LLaMA 3.1 8B's configuration."""
    return FAMILIES["llama"].example_config()


def tiny_config() -> PreTrainedConfig:
    """Return a small LLaMA's configuration, which a CPU trains in seconds; its tokens are bytes."""
    return LlamaConfig(
        vocab_size=BYTE_VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,  # a position for each token of the studies' longest step
        rms_norm_eps=1e-5,
        bos_token_id=256,
        eos_token_id=256,
        tie_word_embeddings=False,
    )


def with_one_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration with one layer: layers are alike, and one is quickly built."""
    config = copy.deepcopy(config)
    keep_layers(config, 1)
    return config


def keep_layers(config: PreTrainedConfig, n: int) -> None:
    """Let a configuration have its first n layers."""
    config.num_hidden_layers = n
    for of_layers in ("layer_types", "no_rope_layers"):
        if kinds := getattr(config, of_layers, None):
            setattr(config, of_layers, kinds[:n])


def computing_fields(config: PreTrainedConfig) -> dict:
    """Return a configuration's values of COMPUTING's fields that it has, for a JSON file."""
    said = {name: getattr(config, name) for name in COMPUTING if hasattr(config, name)}
    rope = said.pop("rope_parameters")
    return said | {f"rope_parameters.{name}": value for name, value in rope.items()}


def computing_differences(saved: dict, config: PreTrainedConfig) -> list[str]:
    """Return a phrase for each field in which a configuration is not the one that was saved."""
    return changes(saved, computing_fields(config))


def build_model(config: PreTrainedConfig, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """Return a model with random weights, ready for training."""
    with torch.device(device):
        return for_training(AutoModelForCausalLM.from_config(config, dtype=dtype))


def for_training(model: torch.nn.Module) -> torch.nn.Module:
    model.config.use_cache = False  # a cache of keys and values serves generation, not training
    rotary = model.model.rotary_emb
    if "dynamic" in rotary.rope_type:
        # Beyond the model's positions its frequencies would change.  No sequence is that long, and
        # to check it the host would wait for the GPU: neither meta tensors nor a CUDA graph do.
        rotary.rope_type = "default"
    return model.train()


def parameter_count(config: PreTrainedConfig) -> int:
    """Count a model's parameters from its configuration, on a model without memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def head_size(config: PreTrainedConfig) -> int:
    """Return D, the columns of one of attention's heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def projection_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, int]]:
    """Return (O, I) of each of a layer's projections, by name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * head_size(config)
    kv_heads = config.num_key_value_heads * head_size(config)
    shapes = [(heads, hidden), (kv_heads, hidden), (kv_heads, hidden), (hidden, heads)]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    return dict(zip((*ATTENTION, *MLP), shapes, strict=True))


def projection_weights(config: PreTrainedConfig) -> int:
    """Count the parameters of one layer's projections, which are all but its norms'."""
    return sum(rows * columns for rows, columns in projection_shapes(config).values())


def matrix_weights(config: PreTrainedConfig) -> int:
    """Count the parameters that tokens are multiplied with: all but the input embedding's."""
    in_layers = config.num_hidden_layers * projection_weights(config)
    return in_layers + config.vocab_size * config.hidden_size


def flops_per_token(config: PreTrainedConfig, seq_len: float) -> float:
    """Return a trained token's FLOPs, forward + backward: 6 per matrix weight + causal attention.

    The input embedding is a look-up (Kaplan et al. 2020).  Attention multiplies QK^T and PV over
    half of T keys on average (PaLM's 12, halved by causality).
    """
    attention_size = config.num_attention_heads * head_size(config)
    in_attention = 6.0 * config.num_hidden_layers * attention_size * seq_len
    return 6.0 * matrix_weights(config) + in_attention


# replaces masking_utils'; one object each, so that torch.compile finds its result again
UNPACKED = {
    "find_packed_sequence_indices": lambda position_ids: None,
    "is_tracing": lambda tensor=None: False,
}


@contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Tell transformers that no row of a batch holds several sequences.

    In a capture, or under torch.compile, it cannot read the positions, and gives attention a mask
    of (T, T), which the kernels for causal attention do not take.
    """
    before = {name: getattr(masking_utils, name) for name in UNPACKED}
    try:
        vars(masking_utils).update(UNPACKED)
        yield
    finally:
        vars(masking_utils).update(before)
