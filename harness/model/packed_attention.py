"""Causal attention within each sample of a packed row, and none between samples.

transformers finds the function by a name in the model's configuration.  It hands over what the
model is called with beyond its own arguments: `Batch.inputs()`.  transformers makes no mask for a
name that it does not know.  So there is no mask of (T, T), and nobody looks at the positions, for
which the host would wait for the GPU.
"""

import inspect

import torch

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # PyTorch 2.9
    varlen_attn = None

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "packed_samples"
HALVES = torch.bfloat16, torch.float16
VARLEN_PARAMETERS = inspect.signature(varlen_attn).parameters if varlen_attn else {}
HAS_KERNEL = "window_size" in VARLEN_PARAMETERS  # since 2.11
# 2.11 does not ask whether heads share keys: its kernel sees it by the shapes
GROUPS = {"enable_gqa": True} if "enable_gqa" in VARLEN_PARAMETERS else {}


def use_packed_attention(model: torch.nn.Module) -> None:
    """Let the model attend within samples; from now on call it with packed batches only."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
    model.config._attn_implementation = ATTENTION_NAME


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    sample_lengths: tuple[int, ...],
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers calls it; return (1, T, heads, D) and None.

    Args:
        query: (1, heads, T, D); key and value are (1, KV heads, T, D).
        cu_seq_lens_q: (n + 1,) int32 on the device: 0, and where each sample ends.
        sample_lengths: of all samples, on the host; their sum is T.
    """
    if HAS_KERNEL and query.is_cuda and query.dtype in HALVES and not dropout:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
        ends, longest = cu_seq_lens_q, max_length_q
        causal = -1, 0  # all keys before a query, none after it
        attended = varlen_attn(
            q, k, v, ends, ends, longest, longest, scale=scaling, window_size=causal, **GROUPS
        )
        return attended[None], None
    parts = (x.split(sample_lengths, dim=2) for x in (query, key, value))
    attended = [
        torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=True
        )
        for q, k, v in zip(*parts)
    ]
    return torch.cat(attended, dim=2).transpose(1, 2), None
