"""The model that a workload names, with its weights, ready to be trained."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import find_adapter_config_file

from harness.cli.command_line import UserError
from harness.cli.device import DEVICE, begin_process, require_interpreter
from harness.cli.workload import Workload, draws_weights
from harness.model.architecture import TORCH_DTYPES, build_model, for_training
from harness.model.config_file import load_config, misfits_in_words, reading
from harness.model.packed_attention import use_packed_attention


def load_model(workload: Workload) -> torch.nn.Module:
    """Return the model in training mode, on the GPU if there is one, in the workload's dtype.

    Random weights are drawn on the device from the seed: two runs start from the same point.
    """
    config = begin(workload)
    model = make_model(workload, config)
    if workload.pack:
        use_packed_attention(model)
    return model


def begin(workload: Workload) -> PreTrainedConfig:
    """Return the model's configuration, set the seed, refuse what must not wait for loading."""
    begin_process(workload.model, workload.deterministic)
    config = load_config(workload)
    if workload.kernels:
        require_interpreter()
    if not draws_weights(workload.model, workload) and find_adapter_config_file(workload.model):
        given = f"{workload.model} holds an adapter beside the model (adapter_config.json)"
        advice = "move the adapter's files out; --adapter takes them if they are not merged in"
        raise UserError(f"{given}, and transformers would load the two as one: {advice}")
    torch.manual_seed(workload.seed)
    return config


def make_model(workload: Workload, config: PreTrainedConfig) -> torch.nn.Module:
    """Return the model with drawn or with pretrained weights."""
    if draws_weights(workload.model, workload):
        return build_model(config, TORCH_DTYPES[workload.dtype], DEVICE)
    return for_training(load_weights(workload))


def original_weights(workload: Workload) -> dict[str, torch.Tensor]:
    """Return the state_dict of the workload's model before anything of it was quantized.

    Pretrained weights are in the host's memory.  Drawn ones are where they are drawn.
    """
    config = begin(workload)
    if draws_weights(workload.model, workload):
        return make_model(workload, config).state_dict()
    return load_weights(workload, "cpu").state_dict()


def load_weights(workload: Workload, device: str = DEVICE) -> torch.nn.Module:
    """Return the pretrained model on a device."""
    with reading(f"the weights of {workload.model}"):
        model, report = AutoModelForCausalLM.from_pretrained(
            workload.model,
            dtype=TORCH_DTYPES[workload.dtype],
            # a new tensor's device has a number
            device_map={"": torch.empty(0, dtype=torch.int8, device=device).device},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    # transformers fills what is missing with random numbers and drops what it has no place for:
    # training would start from the wrong weights
    misshapen = [name for name, *_ in report["mismatched_keys"]]
    said = misfits_in_words(report["missing_keys"], report["unexpected_keys"], misshapen)
    if said:
        raise UserError(f"the weights of {workload.model} do not fit its config.json: {said}")
    return model
