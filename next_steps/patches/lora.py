"""The model of a workload with its adapters, before kernels are applied: LoRA and QLoRA.

    model = lora.load(workload)     # load_model, without LoRA

The adapters are those of harness/model/adapters.py, quantized weights those of quantize.py.
What both are for, and what they cost: docs/lora.md.
"""

from collections.abc import Callable

import torch

from harness.cli.workload import Workload
from harness.model import loading
from harness.model.adapters import add_adapters, read_adapters
from harness.model.config_file import load_config


def load(workload: Workload, try_step: Callable | None = None) -> torch.nn.Module:
    """The model as `load_model` gives it; with LoRA frozen, with adapters, quantized if wanted.

    Raises:
        UserError: what `load_model`, `load_quantized` and `add_adapters` refuse.
    """
    if workload.adapter is not None:
        # a wrong one is refused here, not after minutes of loading
        read_adapters(workload, load_config(workload, try_step))
    if workload.quantize is None:
        return add_adapters(loading.load_model(workload, try_step), workload)
    from next_steps.patches.quantize import load_quantized

    return add_adapters(load_quantized(workload, try_step), workload)
