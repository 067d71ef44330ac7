"""QLoRA's base: a LLaMA whose layers' projections are in NF4, and how it gets there.

    model = load_quantized(workload)    in place of `load_model`; then adapters, kernels, training
    model = quantize_model(model)       of a model that is there

What is quantized is what adapters stand beside: q, k, v, o, gate, up and down.  Norms, embedding
and head stay as they are: the norms are small, of the embedding a step reads a few rows, and a
head's error is the logits'.

A card that holds the quantized model need not hold the other.  So `load_quantized` lets the GPU
have one layer at a time in the model's own dtype, and quantizes it before the next one comes:

    pretrained    the weights are read into the host's memory, all of them
    drawn         each layer where it will be, with the numbers that `load_model` draws

Bytes in LLaMA 3.1 8B: 6.98e9 numbers in the layers at 0.516, 3.6 GB; embedding and head 2.1 GB.

Under fully_shard a quantized weight is whole in each process, because it is no parameter: only
parameters are divided.
"""

from collections.abc import Callable, Iterator

import torch

from harness.cli.adapter_config import TARGETS
from harness.cli.command_line import UserError
from harness.cli.device import DEVICE
from harness.cli.workload import Workload, draws_weights
from harness.model.architecture import TORCH_DTYPES, build_model, for_training
from harness.model.loading import load_model, load_weights
from next_steps.lessons.nf4_kernel import NF4, NF4LinearFunction, nf4_dequantize, nf4_quantize

# after the kernels, which decide how triton (imported by transformers) will run
from transformers import LlamaConfig  # isort: skip


PROJECTIONS = TARGETS["all"]


class NF4Linear(torch.nn.Linear):
    """x (..., in_features) times the transposed weight, which is kept in NF4 and gets no gradient.

    In the place of a nn.Linear without a bias, `NF4Linear(linear)`: for peft it is one.  It has no
    parameter, and `weight` is None.  Codes and scales are buffers, and so in the state_dict, under
    the names of NF4's fields; fp32 ones as the int32 numbers of the same bits, which `half()` and
    `to(dtype)` leave alone.

    Raises TypeError or ValueError for a weight that `nf4_quantize` cannot take.
    """

    def __init__(self, linear: torch.nn.Linear):
        torch.nn.Module.__init__(self)  # nn.Linear's own would make a weight
        if linear.bias is not None:
            raise ValueError("bias has numbers, expected none")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        # of the weight where it is multiplied; peft too looks for this name
        self.compute_dtype = linear.weight.dtype
        for name, t in nf4_quantize(linear.weight)._asdict().items():
            self.register_buffer(name, t.view(torch.int32) if t.dtype == torch.float32 else t)

    @property
    def qweight(self) -> torch.Tensor:
        """Where peft looks for the device of a layer that has no weight."""
        return self.codes

    @property
    def nf4(self) -> NF4:
        buffers = (getattr(self, name) for name in NF4._fields)
        return NF4(*(t.view(torch.float32) if t.dtype == torch.int32 else t for t in buffers))

    def dequantized(self) -> torch.Tensor:
        """The weight (out_features, in_features), in memory of its own."""
        shape = self.out_features, self.in_features
        return nf4_dequantize(self.nf4, shape, self.compute_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NF4LinearFunction.apply(x, (self.out_features, self.in_features), *self.nf4)

    def _apply(self, fn: Callable, recurse: bool = True) -> torch.nn.Module:
        """What .to(), .half() and their like do to each tensor: the dtype is no tensor's here."""
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return super()._apply(fn, recurse)


# ---------------------------------------------------------------- a model that is there


def quantize_model(model: torch.nn.Module) -> torch.nn.Module:
    """Put NF4Linear in the place of the layers' projections; returns the model, a LlamaForCausalLM.

    To be called before adapters and kernels.

    Raises:
        UserError: a projection cannot be quantized, or is none any more.
    """
    for layer in model.model.layers:
        quantize_layer(layer)
    return model


def quantize_layer(layer: torch.nn.Module) -> None:
    """The same for one decoder layer."""
    found = list(children_of(layer, torch.nn.Linear))
    names = {name for _, name, _ in found}
    if names != set(PROJECTIONS):
        given = f"a layer's plain matrices are {', '.join(sorted(names)) or 'none'}"
        expected = f"expected {', '.join(PROJECTIONS)}"
        raise UserError(f"{given}, {expected}: quantize once, before adapters")
    for parent, name, linear in found:
        try:
            setattr(parent, name, NF4Linear(linear))
        except ValueError as error:
            given = f"a layer's {name} cannot be quantized to NF4, because its {error}"
            raise UserError(f"{given}: leave --quantize out") from error


def children_of(
    module: torch.nn.Module, kind: type[torch.nn.Module]
) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """(a parent, a name, the child of that name) for each child of just this class."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is kind:
                yield parent, name, child


# ---------------------------------------------------------------- loading


def load_quantized(workload: Workload, try_step: Callable | None = None) -> torch.nn.Module:
    """What `load_model` returns, quantized, with never more than one layer that is not on the GPU.

    Args:
        workload: see `load_model`; its seed draws the same weights.
        try_step: see `load_config`.

    Raises:
        UserError: what `load_model` refuses; a projection that cannot be quantized.
    """
    return load_model(workload, try_step, make_quantized)


def make_quantized(workload: Workload, config: LlamaConfig) -> torch.nn.Module:
    if draws_weights(workload.model, workload):
        return draw_quantized(config, TORCH_DTYPES[workload.dtype])
    model = for_training(load_weights(workload, "cpu"))
    for layer in model.model.layers:
        quantize_layer(layer.to(DEVICE))
    return model.to(DEVICE)


def draw_quantized(config: LlamaConfig, dtype: torch.dtype) -> torch.nn.Module:
    """The weights that `build_model` draws: each part on the device, in its order of them.

    There a module draws when it is made; when all of them are, transformers draws again.  The
    first numbers are forgotten, but they come before the others.  First comes the model without
    its head, then the head.
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
                quantize_layer(part)
    model.tie_weights()
    with torch.device(DEVICE):
        base.rotary_emb = type(base.rotary_emb)(config)  # its buffers are computed
    return for_training(model)
