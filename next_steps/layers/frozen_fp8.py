"""LoRA beside frozen weights in FP8: both of a projection's large products multiply codes.

    out = x @ w.t() + s * (x @ a.t()) @ b.t()      w (O, I) frozen, in FP8; a, b: lora_linear.py
    dx  = dout @ w  + dh @ a                       and no dw

fp8_layer.py rounds a weight twice in every step, because the optimizer changes it.  A frozen weight
is rounded once, when the model is loaded, and its bf16 numbers are given up.  The two products sum
over different sides, and Hopper wants each factor to lie along the side that is summed.  So codes
are kept twice, as they are and turned: as many bytes as bf16 has.

    all        both are kept
    compact    a backward turns the codes: half the memory, two bytes to move per number and step

Both compute with the same numbers: `transpose_rows` moves codes to one scale, and says where that
is exact.

The adapters stay in the model's dtype, and so does what they read: x is rounded beside it.
"""

from collections.abc import Sequence

import torch

from next_steps.layers.lora_linear import LoRALinearFunction, QuantizedLinear
from next_steps.lessons.fp8_kernel import (
    FP8,
    Rows,
    dequantize,
    fp8_product,
    quantize_rows,
    quantize_stacked,
    transpose_rows,
)


class FrozenFP8Weights(torch.nn.Module):
    """The weights (O, I) of projections that share an input, one below the other, in FP8.

    Buffers are integers of the same bits, which `half()` and `to(dtype)` leave alone.
    """

    def __init__(self, weights: Sequence[torch.Tensor], keep_turned: bool):
        super().__init__()
        self.keep_turned = keep_turned
        rows = quantize_stacked(*weights)  # (sum of O, I)
        self.register_buffer("codes", rows.codes.view(torch.uint8))
        self.register_buffer("scales", rows.scales.view(torch.int32))
        self.turn()
        self.register_load_state_dict_post_hook(FrozenFP8Weights.turn)

    def turn(self, _=None) -> None:
        """Make what is kept of the codes beside the codes."""
        codes = scales = None
        if self.keep_turned:
            codes, scales = transpose_rows(self.rows)
            codes, scales = codes.view(torch.uint8), scales.view(torch.int32)
        self.register_buffer("turned_codes", codes, persistent=False)
        self.register_buffer("turned_scales", scales, persistent=False)

    @property
    def rows(self) -> Rows:
        """All weights: Rows (sum of O, I)."""
        return Rows(self.codes.view(FP8), self.scales.view(torch.float32))

    @property
    def turned(self) -> Rows:
        """All weights, turned: Rows (I, sum of O)."""
        if self.turned_codes is None:
            return transpose_rows(self.rows)
        return Rows(self.turned_codes.view(FP8), self.turned_scales.view(torch.float32))


class FrozenFP8Linear(QuantizedLinear):
    """Multiplies in FP8.  in_features and out_features are multiples of 16."""

    def __init__(self, linear: torch.nn.Linear, shared: FrozenFP8Weights, first: int):
        super().__init__(linear)
        self.shared, self.first = shared, first  # its weight's first row among them

    @property
    def qweight(self) -> torch.Tensor:
        return self.shared.codes

    @property
    def rows(self) -> Rows:
        """This layer's weight: Rows (out_features, in_features)."""
        own = slice(self.first, self.first + self.out_features)
        return Rows(*(t[own] for t in self.shared.rows))

    def dequantized(self) -> torch.Tensor:
        """The weight (out_features, in_features) that the products multiply."""
        return dequantize(self.rows, self.compute_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (out,) = LoRALinearFunction.apply(x, (None,), (self,), None, None, None, self.bias)
        return out

    @staticmethod
    def results(x: torch.Tensor, layers: Sequence["FrozenFP8Linear"]) -> list[torch.Tensor]:
        """Return x @ w.t() (N, O) of x (N, I), for each of the layers; x is rounded once."""
        rounded = quantize_rows(x)
        return [fp8_product(rounded, layer.rows, x.dtype) for layer in layers]

    @staticmethod
    def input_gradient(
        douts: Sequence[torch.Tensor], layers: Sequence["FrozenFP8Linear"]
    ) -> torch.Tensor:
        """Return dx (N, I), the sum over the layers, of douts (N, O) of all of them."""
        rounded = quantize_rows(*douts)  # (N, sum of O)
        return fp8_product(rounded, turned(layers), douts[0].dtype)


def turned(layers: Sequence[FrozenFP8Linear]) -> Rows:
    """Return the layers' weights, one below the other and turned: Rows (I, sum of O)."""
    shared, first = layers[0].shared, 0
    for layer in layers:
        if layer.shared is not shared or layer.first != first:
            break
        first += layer.out_features
    else:
        if first == len(shared.codes):
            return shared.turned
    codes, scales = (torch.cat(parts) for parts in zip(*(layer.rows for layer in layers)))
    return transpose_rows(Rows(codes, scales))


def frozen_fp8(linears: Sequence[torch.nn.Linear], keep_turned: bool) -> list[FrozenFP8Linear]:
    """Return what replaces linear layers that share an input.  Rows of all: 32,768 numbers at most.

    keep_turned: for `compact` False.
    """
    shared = FrozenFP8Weights([linear.weight for linear in linears], keep_turned)
    made, first = [], 0
    for linear in linears:
        made.append(FrozenFP8Linear(linear, shared, first))
        first += linear.out_features
    return made
