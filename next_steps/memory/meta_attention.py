"""Attention on meta tensors, by the operation that PyTorch picks on a GPU.

PyTorch's own function looks at the device.  In bf16 a GPU has cuDNN's or flash attention: both keep
q, k, v, the output and one fp32 number per row.  In fp32 a GPU has the memory-efficient one.  That
one knows no grouped queries: with them all T x T weights are kept.
"""

import torch
from transformers.integrations.sdpa_attention import repeat_kv, use_gqa_in_sdpa
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "as_on_a_gpu"


def use_meta_attention(model: torch.nn.Module) -> None:
    """Let a model on meta tensors call `meta_attention`, unless its attention is the eager one."""
    if model.config._attn_implementation != "eager":
        ALL_ATTENTION_FUNCTIONS.register(NAME, meta_attention)
        model.config._attn_implementation = NAME


def meta_attention(module, query, key, value, mask, *, scaling, dropout=0.0, **kwargs):
    """Run causal attention as transformers' sdpa_attention_forward does.

    query is (B, heads, T, D); key and value are (B, KV heads, T, D); mask is None.  Returns
    (B, T, heads, D), None.
    """
    groups = module.num_key_value_groups
    grouped = groups > 1 and use_gqa_in_sdpa(mask, key, value)
    if groups > 1 and not grouped:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    causal = query.shape[2] > 1
    aten, inputs = torch.ops.aten, (query, key, value, mask)
    if query.dtype != torch.float32:
        attended = aten._scaled_dot_product_cudnn_attention(
            *inputs, True, dropout, causal, False, scale=scaling
        )
    elif not grouped:
        attended = aten._scaled_dot_product_efficient_attention(
            *inputs, True, dropout, causal, scale=scaling
        )
    else:
        attended = aten._scaled_dot_product_attention_math(
            *inputs, dropout, causal, None, scale=scaling, enable_gqa=True
        )
    return attended[0].transpose(1, 2).contiguous(), None
