"""A training step on PyTorch's *meta* tensors: everything of a step except memory and computing.

Meta tensors have shapes, dtypes, storages of so many bytes and an autograd graph.  An operation on
them computes nothing but the shapes of its results, so 8 billion parameters take a second.  A
ledger (memory_ledger.py) looks on.

Where a GPU is not like meta tensors: attention is one fused operation (`meta_attention`), kernels
are launched (`counted_launches`), and PyTorch's AdamW works on lists of tensors.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv, use_gqa_in_sdpa
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kernel_support
from harness.cli.workload import Workload
from harness.data import dataset
from harness.model import architecture
from harness.model.adapters import add_adapters
from harness.model.architecture import TORCH_DTYPES
from harness.steps import stepping
from harness.steps.launches import intercepted, replaced
from next_steps.memory.memory_ledger import BATCH, Ledger
from next_steps.patches import apply_kernels, patched_model, projections

MICRO_BATCHES = 3  # the first finds no gradients, the last may free them
ATTENTION = "as_on_a_gpu"  # the name of `meta_attention` in transformers


def meta_attention(module, query, key, value, mask, *, scaling, dropout=0.0, **kwargs):
    """Run causal attention by the operation that PyTorch's own function picks on a GPU.

    In bf16 a GPU has cuDNN's or flash attention: both keep q, k, v, the output and one fp32 number
    per row.  In fp32 a GPU has the memory-efficient one.  That one knows no grouped queries: with
    them all T x T weights are kept.

    query is (B, heads, T, D); key and value are (B, KV heads, T, D); mask is None.  Returns
    (B, T, heads, D), None.
    """
    groups = module.num_key_value_groups
    grouped = groups > 1 and use_gqa_in_sdpa(mask, key, value)
    if groups > 1 and not grouped:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    causal = query.shape[2] > 1
    aten, how = torch.ops.aten, {"scale": scaling}
    if query.dtype != torch.float32:
        attend, options = aten._scaled_dot_product_cudnn_attention, (True, dropout, causal, False)
    elif not grouped:
        attend, options = aten._scaled_dot_product_efficient_attention, (True, dropout, causal)
    else:
        attend, options = aten._scaled_dot_product_attention_math, (dropout, causal, None)
        how["enable_gqa"] = True
    attended, *_ = attend(query, key, value, mask, *options, **how)
    return attended.transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def counted_launches(launches: Counter) -> Iterator[None]:
    """Count Triton's launches instead of making them, by the names of the kernels.

    Kernels write where their launchers allocated, so no tensor is missing.  A launcher takes meta
    tensors if they seem to be on a CPU and kernels to be interpreted.
    """

    with (
        intercepted(lambda run, kernel, *_: launches.update([kernel.fn.__name__])),
        replaced(torch.Tensor, is_cpu=True),
        replaced(kernel_support, INTERPRETED=True),
    ):
        yield


def run_step(config: PreTrainedConfig, workload: Workload, ledger: Ledger | None = None) -> Ledger:
    """Return the ledger of two training steps.  It keeps the stages of the second.

    The first step makes the optimizer's state.  Of a step's micro-batches MICRO_BATCHES are run:
    all others are like the last but one.
    """
    ledger = ledger or Ledger()
    # transformers looks at positions; here they have no values
    with architecture.unpacked_sequences(), counted_launches(ledger.launches), ledger:
        model = architecture.build_model(config, TORCH_DTYPES[workload.dtype], "meta")
        if workload.frozen_as:
            projections.quantize_model(model, workload.frozen_as)
        add_adapters(model, workload)
        if model.config._attn_implementation != "eager":
            ALL_ATTENTION_FUNCTIONS.register(ATTENTION, meta_attention)
            model.config._attn_implementation = ATTENTION
        shape = workload.batch_size, workload.seq_len
        batches = [dataset.random_batch(shape, 1, "meta") for _ in range(workload.micro_batches)]
        patched_model.patch(model, workload)
        ledger.follow_gradients(model)
        # foreach: what PyTorch's AdamW chooses for tensors on a GPU
        optimizer = apply_kernels.make_optimizer(
            model, 1e-5, workload.kernels, moments=workload.moments, foreach=True
        )
        ledger.follow(model, optimizer)
        for batch in batches:
            ledger.claim(BATCH, *batch.tensors().values())
        stepping.training_step(model, optimizer, batches[:MICRO_BATCHES])
        ledger.claim_state(optimizer)  # which the first step made
        stepping.training_step(model, optimizer, batches[:MICRO_BATCHES])
    ledger.sample()
    return ledger
