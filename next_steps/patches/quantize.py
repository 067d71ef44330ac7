"""QLoRA's base: a LLaMA whose layers' projections are in NF4.

    model = quantize_model(model)       then adapters, kernels, training

Norms, embedding and head stay as they are: norms are small, a step reads a few rows of the
embedding, and an error of the head is an error of the logits.  patched_model.py quantizes a model
while it loads.

Under fully_shard each process has the whole quantized weight, which is no parameter.
"""

from collections.abc import Callable

import torch

from harness.cli.adapter_config import TARGETS
from harness.cli.command_line import UserError
from next_steps.lessons.nf4_kernel import NF4, NF4LinearFunction, nf4_dequantize, nf4_quantize


class NF4Linear(torch.nn.Linear):
    """x (..., in_features) times the transposed weight, which is kept in NF4 and gets no gradient.

    It replaces a nn.Linear, and peft treats it as one.  `weight` is None, and a bias stays as
    it is, frozen.  Codes and scales are buffers with the names of NF4's fields.  fp32 buffers
    are kept as int32 numbers of the same bits, which `half()` and `to(dtype)` leave alone.
    """

    def __init__(self, linear: torch.nn.Linear):
        torch.nn.Module.__init__(self)  # nn.Linear's own would make a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("weight", None)
        self.register_parameter("bias", linear.bias)
        self.requires_grad_(False)
        # of the weight where it is multiplied; peft too looks for this name
        self.compute_dtype = linear.weight.dtype
        for name, t in nf4_quantize(linear.weight)._asdict().items():
            self.register_buffer(name, t.view(torch.int32) if t.dtype == torch.float32 else t)

    @property
    def qweight(self) -> torch.Tensor:
        """The codes, where peft looks for the device of a layer that has no weight."""
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
        out = NF4LinearFunction.apply(x, (self.out_features, self.in_features), *self.nf4)
        return out if self.bias is None else out + self.bias

    def _apply(self, fn: Callable, recurse: bool = True) -> torch.nn.Module:
        """Apply .to(), .half() and their like to compute_dtype too, which is no tensor's dtype."""
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return super()._apply(fn, recurse)


def quantize_model(model: torch.nn.Module) -> torch.nn.Module:
    """Put NF4Linear in the place of a LLaMA's projections, before adapters and kernels."""
    for layer in model.model.layers:
        quantize_layer(layer)
    return model


def quantize_layer(layer: torch.nn.Module) -> None:
    """Do the same in one decoder layer."""
    found = [path for path, module in layer.named_modules() if type(module) is torch.nn.Linear]
    names = {path.rpartition(".")[2] for path in found}
    if names != set(TARGETS["all"]):
        given = f"a layer's plain matrices are {', '.join(sorted(names)) or 'none'}"
        expected = f"expected {', '.join(TARGETS['all'])}"
        raise UserError(f"{given}, {expected}: quantize once, before adapters")
    for path in found:
        try:
            layer.set_submodule(path, NF4Linear(layer.get_submodule(path)))
        except ValueError as error:
            given = f"a layer's {path.rpartition('.')[2]} cannot be quantized to NF4"
            raise UserError(f"{given}, because its {error}: leave --quantize out") from error
