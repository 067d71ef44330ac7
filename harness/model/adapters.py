"""LoRA: the weights are frozen, and beside a projection two thin matrices are trained.

    y = x @ W.t() + (x @ A.t() @ B.t()) * scaling      W (O, I), A (R, I), B (O, R)

W gets no gradient, and so no moments: A and B have R (I + O) numbers where W has I O.  scaling is
alpha / R.  B begins as 0, so that the first step starts from the model as it was.

The layers are peft's, so that whoever has peft can load what is saved here, and the other way.
What they cost: docs/lora.md.
"""

import hashlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from harness.cli.adapter_config import ATTENTION, CONFIG, WEIGHTS, projections
from harness.cli.command_line import UserError
from harness.cli.workload import Frozen, Workload, draws_weights, same_place
from harness.model import architecture
from harness.model.architecture import TORCH_DTYPES, ModelFacts
from harness.model.config_file import misfits_in_words, reading

BASE = "base_model"  # in the metadata of adapters' file, which peft does not read
NAME = "default"  # of the adapters in peft's modules: there may be several, and here is one
FILE_PREFIX = "base_model.model."  # in peft's files, before the model's own names
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by an element's bytes
# elements at a time, whose products take 8 bytes each: on a CPU so few that its cache holds them
CHUNK = {"cuda": 2**24, "cpu": 2**15}
FACTOR = 0x1E3779B97F4A7C15  # large and odd: its multiples modulo 2**64 differ in all their bits


def add_adapters(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
    """Freeze a model, give it the workload's adapters, if it has any, and return it.

    Adapters are drawn from the seed alone, in the workload's dtype: every process draws the same
    ones.  With `adapter` they are read from its folder.  On the meta device nothing is drawn or
    read.  A quantized projection derives from nn.Linear and has, in place of a weight,
    `dequantized()` and `qweight`.
    """
    if workload.lora_rank is None:
        return model
    from peft import inject_adapter_in_model

    dtype, on_meta = TORCH_DTYPES[workload.dtype], model.device.type == "meta"
    torch.manual_seed(workload.seed)
    inject_adapter_in_model(peft_config(workload), model, NAME, low_cpu_mem_usage=on_meta)
    for module in filter(has_adapter, model.modules()):
        module.lora_A.to(dtype=dtype)
        module.lora_B.to(dtype=dtype)
    if workload.adapter is not None and not on_meta:
        use_saved(model, workload, read_adapters(workload, model.config))
    return model


def peft_config(workload: Workload):
    """Return the workload's adapters in peft's words: what adapter_config.json says."""
    from peft import LoraConfig

    alpha = workload.lora_alpha
    return LoraConfig(
        r=workload.lora_rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        target_modules=list(projections(workload.lora_targets)),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=workload.model,
    )


def has_adapter(module: torch.nn.Module) -> bool:
    """Return True for one of peft's projections."""
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def read_adapters(workload: Workload, config) -> dict[str, torch.Tensor]:
    """Return the tensors in the workload's adapter folder, by their names there."""
    folder, rank = workload.adapter, workload.lora_rank
    with reading(f"the weights of --adapter {folder}"):
        found, base = load_file(f"{folder}/{WEIGHTS}"), said_of_base(folder)
    shapes = {}
    for name, (rows, columns) in ModelFacts(config).shapes.items():
        part = "self_attn" if name in ATTENTION else "mlp"
        if name in projections(workload.lora_targets):
            for layer in range(config.num_hidden_layers):
                prefix = f"{FILE_PREFIX}model.layers.{layer}.{part}.{name}"
                shapes[f"{prefix}.lora_A.weight"] = rank, columns
                shapes[f"{prefix}.lora_B.weight"] = rows, rank
    misshapen = [n for n, shape in shapes.items() if n in found and found[n].shape != shape]
    said = misfits_in_words(shapes.keys() - found.keys(), found.keys() - shapes.keys(), misshapen)
    if said:
        given = f"--adapter {folder} does not fit {workload.model}: {said}"
        raise UserError(f"{given}: give the --model that it was trained with")
    if base and (different := architecture.computing_differences(base["config"], config)):
        given = f"--adapter {folder} was trained with another config.json of its model"
        raise UserError(f"{given}: {'; '.join(different)}: bring that back, or name another")
    return found


# ---------------------------------------------------------------- beside which weights


def facts_of_base(model: torch.nn.Module, workload: Workload) -> dict[str, str]:
    """Return the metadata that says beside which weights a model's adapters were trained.

    There is none for a model that Unsloth has changed.  All processes call this function.
    """
    if workload.is_unsloths:
        return {}
    facts = {"kept_as": kept_as(workload), "digest": frozen_digest(model)}
    return {BASE: json.dumps(facts | {"config": architecture.computing_fields(model.config)})}


def said_of_base(folder: str) -> dict:
    """Return what `facts_of_base` said of the adapters in a folder; {} if others saved them."""
    with safe_open(f"{folder}/{WEIGHTS}", "pt") as file:
        return json.loads((file.metadata() or {}).get(BASE, "{}"))


def kept_as(workload: Workload) -> str:
    """Return how frozen weights are kept; digests compare only what is kept in one way."""
    forms = {None: "plain", Frozen.NF4: "nf4"}
    return f"{forms.get(workload.frozen_as, 'fp8')} {workload.dtype}"  # FP8 has one digest


def use_saved(model: torch.nn.Module, workload: Workload, saved: dict[str, torch.Tensor]) -> None:
    """Give the model's adapters the numbers that `read_adapters` found for them.

    Adapters that were trained beside other weights are refused.  The adapters' file has a digest of
    the weights.  If the weights are kept in another way now, or others saved the adapters, the path
    of the model must be the same, and its weights must come from files; else a note is printed.
    """
    folder, model_name, base = workload.adapter, workload.model, said_of_base(workload.adapter)
    said = json.loads(Path(folder, CONFIG).read_text())
    if unknown := said.keys() - vars(peft_config(workload)).keys():
        given = f"{folder}/{CONFIG} has {', '.join(sorted(unknown))}"
        print(f"Note: {given}, which this version of peft does not know: ignored, as peft does")
    named = said.get("base_model_name_or_path")
    named = f"{named}, revision {said['revision']}" if said.get("revision") else named
    if base.get("kept_as") == kept_as(workload) and not workload.is_unsloths:
        if base["digest"] != frozen_digest(model):
            given = f"--adapter {folder} was trained beside other weights than {model_name} has"
            advice = "give the --model that it was trained with, and the --seed of random weights"
            raise UserError(f"{given}, those of {named}: {advice}")
    elif draws_weights(model_name, workload) or not same_place(str(named), model_name):
        print(
            f"Note: --adapter {folder} was trained beside the weights of {named}, and nothing "
            f"tells whether {model_name} has the same"
        )
    with torch.no_grad():
        for name, t in adapter_weights(model, dict(model.named_parameters())).items():
            t.copy_(saved[name])


# ---------------------------------------------------------------- which weights are frozen


def frozen_digest(model: torch.nn.Module) -> str | None:
    """Return what tells a model's frozen weights from another's, in a line; None: none is frozen.

    It is of all frozen parameters and saved buffers, 4-bit weights among them.  All processes call
    this function, and all get the same.  So does a model with adapters beside fewer projections.
    Buffers that are not saved are computed, on another machine to another last bit.
    """
    tensors = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    if not tensors:
        return None
    saved = model.state_dict().keys()
    tensors += [(name, t) for name, t in model.named_buffers() if name in saved]
    sums = torch.stack([checksum(t) for _, t in tensors])  # (n,) int64
    parted = [isinstance(t, DTensor) for _, t in tensors]
    parted = torch.tensor(parted, dtype=torch.bool, device=sums.device)
    if parted.any():
        whole = sums.where(parted, 0)
        dist.all_reduce(whole)
        sums = whole.where(parted, sums)
    digest = hashlib.sha256()
    for (name, t), each in zip(tensors, sums.tolist()):
        name = name.replace(".base_layer", "")  # so peft calls a weight that has an adapter
        digest.update(f"{name} {tuple(t.shape)} {t.dtype} {each}\n".encode())
    return digest.hexdigest()


@torch.no_grad()
def checksum(t: torch.Tensor) -> torch.Tensor:
    """Return () int64, a sum over what this process holds of a tensor.

    Each number's bits are multiplied with an odd number that belongs to its place, and added up
    modulo 2**64, so the sum is the same wherever the parts of a tensor are.  A GPU sums 16 GB in
    less than a second, where a cryptographic digest would need them in the host's memory.
    """
    first = 0  # the place of this process's first number
    if isinstance(t, DTensor):
        _, offsets = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
        t, first = t.to_local(), offsets[0] * t.shape[1:].numel()
    bits = t.detach().contiguous().view(-1).view(BITS[t.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for part in bits.split(CHUNK[t.device.type]):
        places = torch.arange(first, first + len(part), device=t.device, dtype=torch.int64)
        total += (part.to(torch.int64) * (2 * places * FACTOR + 1)).sum()
        first += len(part)
    return total


# ---------------------------------------------------------------- what is saved


def adapter_weights(model: torch.nn.Module, weights: dict) -> dict[str, torch.Tensor]:
    """Return the adapters' weights of a state_dict, by the names that peft's files have."""
    names = {
        f"{name}.lora_{matrix}.{NAME}.weight": f"{FILE_PREFIX}{name}.lora_{matrix}.weight"
        for name, module in model.named_modules()
        if has_adapter(module)
        for matrix in "AB"
    }
    return {in_file: weights[name] for name, in_file in names.items()}


def merged_weights(
    model: torch.nn.Module, weights: dict, originals: dict | None = None
) -> dict[str, torch.Tensor]:
    """Return the state_dict of the ordinary model in which the adapters are part of W.

    W + scaling * B @ A is computed in fp32, and rounded once.  The results are in the host's
    memory: a model that was trained with quantized weights need not fit the GPU without them.

    Args:
        weights: the model's state_dict, whole.
        originals: W of quantized projections, by the names of an ordinary model's state_dict; None:
            W is what the codes stand for.
    """
    merged = dict(weights)

    def unquantized(name: str, layer: torch.nn.Module) -> torch.Tensor:
        return layer.dequantized() if originals is None else originals[f"{name}.weight"]

    for name, module in model.named_modules():
        if has_adapter(module):
            base = module.base_layer
            quantized = hasattr(base, "dequantized")
            plain = f"{name}.base_layer.weight"
            w = unquantized(name, base) if quantized else weights[plain]
            a, b = (weights[f"{name}.lora_{matrix}.{NAME}.weight"].float() for matrix in "AB")
            thin = b.to(w.device), a.to(w.device)
            weight = torch.addmm(w.float(), *thin, alpha=module.scaling[NAME]).to(w.dtype)
        elif hasattr(module, "dequantized") and not name.endswith(".base_layer"):
            weight = unquantized(name, module)
        else:
            continue
        of_module = [key for key in merged if key.startswith(f"{name}.")]
        removed = {key.rpartition(".")[2]: merged.pop(key) for key in of_module}
        merged[f"{name}.weight"] = weight.cpu()
        if "bias" in removed:
            merged[f"{name}.bias"] = removed["bias"]
    return merged
