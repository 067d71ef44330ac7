"""Frozen weights in fewer bits: a model whose layers' projections are in NF4 or FP8.

    model = quantize_model(model, "nf4")      then adapters, kernels, training

    nf4                        4 bits, written out in bf16 to be multiplied: QLoRA
    fp8 all, fp8 compact       8 bits, multiplied as they are: frozen_fp8.py

Norms, embedding and head stay as they are: norms are small, a step reads a few rows of the
embedding, and an error of the head is an error of the logits.  patched_model.py quantizes a model
while it loads.

Under fully_shard each process has the whole quantized weight, which is no parameter.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from harness.cli.adapter_config import SHARING, TARGETS
from harness.cli.command_line import UserError
from harness.cli.flags import FP8_ALL, FP8_COMPACT
from next_steps.layers.frozen_fp8 import frozen_fp8
from next_steps.lessons.fp8_kernel import MAX_COLUMNS, MULTIPLE, takes_fp8
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


def quantize_model(model: torch.nn.Module, kept_as: str) -> torch.nn.Module:
    """Replace a model's projections, before adapters and kernels; return the model.

    kept_as: what `Workload.frozen_as` returns.
    """
    for layer in model.model.layers:
        quantize_layer(layer, kept_as)
    return model


def quantize_layer(layer: torch.nn.Module, kept_as: str) -> None:
    """Do the same in one decoder layer."""
    found = [path for path, module in layer.named_modules() if type(module) is torch.nn.Linear]
    paths = {path.rpartition(".")[2]: path for path in found}
    if paths.keys() != set(TARGETS["all"]):
        given = f"a layer's plain matrices are {', '.join(sorted(paths)) or 'none'}"
        expected = f"expected {', '.join(TARGETS['all'])}"
        raise UserError(f"{given}, {expected}: quantize once, before adapters")
    for names in SHARING:
        try:
            made = KINDS[kept_as]([layer.get_submodule(paths[name]) for name in names])
        except ValueError as error:
            given = f"a layer's {', '.join(names)} cannot be kept as {kept_as}, because its {error}"
            raise UserError(f"{given}: leave {FLAGS[kept_as]} out") from error
        for name, module in zip(names, made):
            layer.set_submodule(paths[name], module)


def in_nf4(linears: Sequence[torch.nn.Linear]) -> list[torch.nn.Module]:
    return [NF4Linear(linear) for linear in linears]


def in_fp8(linears: Sequence[torch.nn.Linear], keep_turned: bool) -> list[torch.nn.Module]:
    """Raises ValueError: a size is no multiple of 16, or the results of one input are too wide."""
    for linear in linears:
        if not takes_fp8(*linear.weight.shape):
            given = f"weight has shape {tuple(linear.weight.shape)}"
            raise ValueError(f"{given}, expected multiples of {MULTIPLE}")
    width = sum(linear.out_features for linear in linears)
    if width > MAX_COLUMNS:
        expected = f"expected at most {MAX_COLUMNS:,}"
        raise ValueError(f"result has rows of {width:,} numbers, {expected}")
    return frozen_fp8(linears, keep_turned)


# what `Workload.frozen_as` returns: what makes the layers, and the flag that asks for them
KINDS = {
    "nf4": in_nf4,
    f"fp8 {FP8_ALL}": functools.partial(in_fp8, keep_turned=True),
    f"fp8 {FP8_COMPACT}": functools.partial(in_fp8, keep_turned=False),
}
FLAGS = {kind: "--quantize" if kind == "nf4" else "--fp8" for kind in KINDS}
