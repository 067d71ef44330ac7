"""Which models the project trains, what their layers are made of, and where transformers has them.

All families have LLaMA's layer:

    x = x + o_proj(attention(norm(x)))          norm: RMSNorm, which multiplies by its weight
    x = x + down_proj(silu(gate) * up)          gate and up: projections of norm(x)

FAMILIES has a row for each family, with what the family has beyond that.  All code that stands for
a class of transformers reads these rows: the kernels' patch, the profiler's ranges, the tables of
memory.  So a further family of the same parts is a row.  `part_outside` names what no row has.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType

import torch
from transformers import PreTrainedConfig
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.smollm3 import modeling_smollm3


@dataclass(frozen=True)
class Family:
    """What a family's layers have beyond the layer above, and where transformers has its code."""

    model_type: str  # of a config.json
    prefix: str  # of the names of transformers' classes
    modeling: ModuleType  # transformers' code
    example: str  # a model on the Hub ...
    fields: dict = field(repr=False)  # ... and what its config.json says
    bias: tuple[str, ...] = ()  # projections with a bias, whatever config.json says
    head_norms: bool = False  # q_norm and k_norm: RMSNorm over each head, before the rotation
    rotates: str | None = None  # attention's attribute: are its q and k rotated?  None: they are

    def part(self, name: str) -> type:
        """Return transformers' class for "RMSNorm", "MLP", "Attention", "ForCausalLM", ..."""
        return getattr(self.modeling, self.prefix + name)

    def example_config(self) -> PreTrainedConfig:
        """Return the example's configuration, without a download."""
        return self.part("Config")(**self.fields)


LLAMA_3_1_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "tie_word_embeddings": False,
}
MISTRAL_7B_V0_3 = {
    "vocab_size": 32_768,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
QWEN2_5_7B = {
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "use_sliding_window": False,
    "bos_token_id": 151_643,
    "eos_token_id": 151_643,
    "tie_word_embeddings": False,
}
QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "use_sliding_window": False,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "tie_word_embeddings": False,
}
SMOLLM3_3B = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 11_008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
    "no_rope_layer_interval": 4,
    "use_sliding_window": False,
    "bos_token_id": 128_000,
    "eos_token_id": 128_012,
    "pad_token_id": 128_004,
    "tie_word_embeddings": True,
}
ALL_FAMILIES = [
    Family("llama", "Llama", modeling_llama, "meta-llama/Llama-3.1-8B", LLAMA_3_1_8B),
    Family("mistral", "Mistral", modeling_mistral, "mistralai/Mistral-7B-v0.3", MISTRAL_7B_V0_3),
    Family(
        *("qwen2", "Qwen2", modeling_qwen2, "Qwen/Qwen2.5-7B", QWEN2_5_7B),
        bias=("q_proj", "k_proj", "v_proj"),
    ),
    Family("qwen3", "Qwen3", modeling_qwen3, "Qwen/Qwen3-8B", QWEN3_8B, head_norms=True),
    Family(
        *("smollm3", "SmolLM3", modeling_smollm3, "HuggingFaceTB/SmolLM3-3B", SMOLLM3_3B),
        rotates="use_rope",
    ),
]
FAMILIES = {row.model_type: row for row in ALL_FAMILIES}
EXAMPLES = {row.example: row for row in ALL_FAMILIES}


def family_of(model: torch.nn.Module) -> Family:
    """Return the row of a model that has one, from a config.json of a known model_type."""
    return FAMILIES[model.config.model_type]


# ---------------------------------------------------------------- what is outside

# names of modules
PACKED = "qkv_proj", "gate_up_proj", "query_key_value", "c_attn", "Wqkv"
EXPERTS = "experts", "router"


def window_of(config: PreTrainedConfig) -> int | None:
    """Return how many tokens attention sees back where that is limited; None: it sees them all."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    return getattr(config, "sliding_window", None)


def source_of(function: Callable) -> str:
    """Return a function's source; "" where Python does not find it."""
    with suppress(OSError, TypeError):
        return inspect.getsource(function)
    return ""


def part_outside(model: torch.nn.Module) -> str | None:
    """Return in words a part of a causal language model that no family here has; None: no part.

    The model may be on the meta device.
    """
    config, names = model.config, {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if names.intersection(EXPERTS):
        return "a mixture of experts"
    if packed := [name for name in PACKED if name in names]:
        return f"packed projections ({packed[0]})"
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            return f"a soft cap ({name} = {getattr(config, name)})"
    norms = {type(m).forward for m in model.modules() if type(m).__name__.endswith("RMSNorm")}
    if any("+ self.weight" in source_of(forward) for forward in norms):
        return "norms that multiply by 1 + weight"
    if (window := window_of(config)) is not None:
        return f"a sliding window of {window:,} tokens in attention"
    return None
