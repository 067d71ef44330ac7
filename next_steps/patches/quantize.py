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
from collections.abc import Sequence

import torch

from harness.cli.adapter_config import SHARING, TARGETS
from harness.cli.command_line import UserError
from harness.cli.flags import FP8_ALL, FP8_COMPACT, QUANTIZED
from next_steps.layers.frozen_fp8 import frozen_fp8
from next_steps.layers.lora_linear import QuantizedLinear
from next_steps.lessons.fp8_kernel import MAX_COLUMNS, MULTIPLE, takes_fp8
from next_steps.lessons.nf4_kernel import NF4, NF4LinearFunction, nf4_dequantize, nf4_quantize


class NF4Linear(QuantizedLinear):
    """The weight is kept in NF4, and written out to be multiplied.

    Codes and scales are buffers with the names of NF4's fields.  fp32 buffers are kept as int32
    numbers of the same bits, which `half()` and `to(dtype)` leave alone.
    """

    def __init__(self, linear: torch.nn.Linear):
        super().__init__(linear)
        for name, t in nf4_quantize(linear.weight)._asdict().items():
            self.register_buffer(name, t.view(torch.int32) if t.dtype == torch.float32 else t)

    @property
    def qweight(self) -> torch.Tensor:
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
            flag = "--quantize" if kept_as in QUANTIZED else "--fp8"
            raise UserError(f"{given}: leave {flag} out") from error
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


# what `Workload.frozen_as` returns: what makes the layers
KINDS = {
    "nf4": in_nf4,
    f"fp8 {FP8_ALL}": functools.partial(in_fp8, keep_turned=True),
    f"fp8 {FP8_COMPACT}": functools.partial(in_fp8, keep_turned=False),
}
