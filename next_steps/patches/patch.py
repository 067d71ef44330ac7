"""A loaded model as its workload wants it: with kernels, in FP8, keeping what it is told to."""

import torch

from harness.cli.workload import Workload
from next_steps.patches.apply_kernels import apply_kernels, model_kernels
from next_steps.patches.fp8_model import fp8_layers
from next_steps.patches.recompute import set_recompute


def patch(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
    """Change a LlamaForCausalLM, fresh from `lora.load`; returns it.

    Raises:
        UserError: FP8 is wanted, and this GPU has none.
    """
    apply_kernels(model, model_kernels(workload.kernels))
    if workload.fp8:
        fp8_layers(model, workload.fp8)
    return set_recompute(model, workload.recompute, workload.offload)
