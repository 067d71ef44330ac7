"""A workload's model, ready to be trained: loaded, quantized if wanted, with adapters and kernels.

A card that holds the quantized model need not hold the other one.  So `load_quantized` lets the GPU
have one layer at a time in the model's own dtype, and quantizes it before the next one comes:

    pretrained    the host's memory reads all weights
    drawn         each layer is drawn where it stays, with the numbers that `load_model` draws
"""

import torch
from transformers import PreTrainedConfig

from harness.cli.device import DEVICE
from harness.cli.workload import Frozen, Workload, draws_weights
from harness.model import loading
from harness.model.adapters import add_adapters, read_adapters
from harness.model.architecture import TORCH_DTYPES, build_model, for_training
from harness.model.config_file import load_config
from harness.model.loading import load_weights
from harness.model.packed_attention import use_packed_attention
from next_steps.patches.apply_kernels import apply_kernels, model_kernels
from next_steps.patches.projections import fp8_layers, quantize_layer, require_fp8
from next_steps.patches.recompute import set_recompute


def load_patched(workload: Workload) -> torch.nn.Module:
    """Return the workload's model, or raise the UserError of `load`, `patch` or `require_fp8`."""
    if workload.fp8:
        require_fp8()
    return patch(load(workload), workload)


def load(workload: Workload) -> torch.nn.Module:
    """Return `load_model`'s model; with LoRA frozen, with adapters, quantized if wanted."""
    if workload.adapter is not None:
        # a wrong one is refused here, not after minutes of loading
        read_adapters(workload, load_config(workload))
    load_base = load_quantized if workload.frozen_as else loading.load_model
    return add_adapters(load_base(workload), workload)


def patch(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
    """Put the workload's kernels and FP8 into a model from `load`; return the model."""
    apply_kernels(model, model_kernels(workload.kernels))
    if workload.fp8 and not workload.frozen_as:
        fp8_layers(model)
    return set_recompute(model, workload.recompute, workload.offload)


def load_quantized(workload: Workload) -> torch.nn.Module:
    """Return `load_model`'s model, quantized; the GPU has at most one layer that is not."""
    config = loading.begin(workload)
    if draws_weights(workload.model, workload):
        model = draw_quantized(config, TORCH_DTYPES[workload.dtype], workload.frozen_as)
    else:
        model = for_training(load_weights(workload, "cpu"))
        for layer in model.model.layers:
            quantize_layer(layer.to(DEVICE), workload.frozen_as)
        model = model.to(DEVICE)
    if workload.pack:
        use_packed_attention(model)
    return model


def draw_quantized(
    config: PreTrainedConfig, dtype: torch.dtype, kept_as: Frozen
) -> torch.nn.Module:
    """Draw the weights that `build_model` draws, each part on the device and in the same order.

    In `build_model` a module draws when it is made, and transformers draws again when all are made.
    The model without its head comes first, then the head.
    """
    model = build_model(config, dtype, "meta")
    base = model.model
    for parts in ((base.embed_tokens, *base.layers, base.norm), (model.lm_head,)):
        for part in parts:
            part.to_empty(device=DEVICE)
            for module in part.modules():
                if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                    module.reset_parameters()
            part.to("meta")
        for part in parts:
            part.to_empty(device=DEVICE)
            part.apply(model._init_weights)
            if part in base.layers:
                quantize_layer(part, kept_as)
    model.tie_weights()
    with torch.device(DEVICE):
        base.rotary_emb = type(base.rotary_emb)(config)  # its buffers are computed
    return for_training(model)
