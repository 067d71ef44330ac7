"""A model built from its configuration, its size, and the work of a token."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, masking_utils

from harness.cli.adapter_config import ATTENTION, MLP, SHARING, projections
from harness.cli.workload import Workload, changes
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
OF_ALL_WEIGHTS = Workload()  # trains them


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


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """How large a model is, and the work of a token in it, told by its configuration.

    With 4-bit weights the model itself does not tell.
    """

    config: PreTrainedConfig
    workload: Workload = OF_ALL_WEIGHTS

    @cached_property
    def parameters(self) -> int:
        """Parameters without adapters, counted on a model without memory."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        return sum(p.numel() for p in model.parameters())

    @property
    def head_size(self) -> int:
        """D, the columns of one of attention's heads."""
        config = self.config
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @cached_property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(O, I) of each of a layer's projections, by name."""
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.num_attention_heads * self.head_size
        kv_heads = config.num_key_value_heads * self.head_size
        shapes = [(heads, hidden), (kv_heads, hidden), (kv_heads, hidden), (hidden, heads)]
        shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
        return dict(zip((*ATTENTION, *MLP), shapes, strict=True))

    @property
    def layer_weights(self) -> int:
        """Parameters of one layer's projections, which are all but its norms'."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def matrix_weights(self) -> int:
        """Parameters that tokens are multiplied with: all but the input embedding's."""
        config = self.config
        in_layers = config.num_hidden_layers * self.layer_weights
        return in_layers + config.vocab_size * config.hidden_size

    @property
    def trained(self) -> int:
        """Parameters that are trained: all, or those of the adapters."""
        if self.workload.lora_rank is None:
            return self.parameters
        of_a_layer = sum(sum(self.shapes[name]) for name in projections(self.workload.lora_targets))
        return self.config.num_hidden_layers * self.workload.lora_rank * of_a_layer

    @property
    def without_gradient(self) -> tuple[str, ...]:
        """The first layer's projections whose inputs need no gradient.

        No adapter comes before them, and the embedding is frozen.
        """
        adapted = {*projections(self.workload.lora_targets)}
        first = next(i for i, names in enumerate(SHARING) if adapted & {*names})
        return sum(SHARING[: first + 1], ())

    def counts(self) -> dict:
        """Return the part of a record that says how large the model is, adapters included."""
        if self.workload.lora_rank is None:
            return {"parameters": self.parameters}
        return {"parameters": self.parameters + self.trained, "trained_parameters": self.trained}

    def flops_per_token(self, seq_len: float) -> float:
        """Return a trained token's FLOPs, forward + backward: 6 per matrix weight + attention.

        The input embedding is a look-up (Kaplan et al. 2020).  Attention multiplies QK^T and PV
        over half of T keys on average (PaLM's 12, halved by causality).

        With LoRA a frozen weight has four of its six FLOPs.  In the first layer the FLOPs go too
        that lead to inputs which no adapter comes before.  The adapters' own six are added.
        """
        config, rank = self.config, self.workload.lora_rank
        in_attention = config.num_attention_heads * self.head_size * seq_len  # of a layer's product
        flops = 6.0 * self.matrix_weights + 6.0 * config.num_hidden_layers * in_attention
        if rank is None:
            return flops
        adapted = projections(self.workload.lora_targets)
        flops += 6.0 * self.trained - 2.0 * self.matrix_weights
        for name in self.without_gradient:
            rows, columns = self.shapes[name]
            flops -= 2.0 * rows * columns
            flops -= 2.0 * rank * columns if name in adapted else 0.0
        # the first layer's attention: a gradient for each of q, k and v that has an adapter before
        # it, and for q and k the scores' gradient too
        q, k, v = (name in adapted for name in SHARING[0])
        return flops - (4 - (q + k + v + (q or k))) * in_attention


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
