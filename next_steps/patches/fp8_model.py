"""FP8 in a Hugging Face LLaMA: `fp8_layers(apply_kernels(model), "all")`.

Each decoder layer that the fused layer stands for gets a class that derives from its own, and
computes with the Functions of fp8_layer.py.  In each call it asks whether these still fit.
"""

import contextlib
import warnings
from collections.abc import Iterator

import torch

from harness.cli.command_line import UserError
from harness.cli.flags import FP8_ALL, FP8_MODES
from harness.cli.workload import Workload
from next_steps.layers.fp8_layer import FP8LinearFunction, mlp_fp8, qkv_fp8
from next_steps.layers.lora_linear import is_base
from next_steps.lessons.fp8_kernel import MULTIPLE, fp8_support, takes_fp8
from next_steps.patches import apply_kernels


class LlamaDecoderLayer(apply_kernels.LlamaDecoderLayer):
    """With the Functions above; where they do not fit, with the fused layer's in bf16.

    In evaluation and generation too: the same products, without a backward.
    """

    fp8 = FP8_ALL  # of flags.FP8_MODES; `fp8_layers` sets it

    def forward(
        self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None,
        use_cache=False, position_embeddings=None, **kwargs,
    ):  # fmt: skip
        """hidden_states and the result are (B, T, H)."""
        kwargs |= {"position_ids": position_ids, "use_cache": use_cache}
        fits = self.fits(hidden_states, kwargs.get("output_attentions"))
        if not (fits and takes_layer(self, hidden_states.dtype)):
            kwargs |= {
                "past_key_values": past_key_values,
                "position_embeddings": position_embeddings,
            }
            return super().forward(hidden_states, attention_mask, **kwargs)

        attention = self.self_attn
        residual, *projected = qkv_fp8(
            hidden_states, self.input_layernorm, attention, mode=self.fp8
        )
        attended, _ = apply_kernels.attend(
            attention, *projected, position_embeddings, attention_mask, past_key_values, **kwargs
        )
        residual = residual + FP8LinearFunction.apply(attended, self.fp8, attention.o_proj.weight)
        residual, out = mlp_fp8(residual, self.post_attention_layernorm, self.mlp, mode=self.fp8)
        return residual + out


def takes_layer(layer: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Are all of a decoder layer's projections plain weights of this dtype that FP8 can take?"""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (
        attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        mlp.gate_proj, mlp.up_proj, mlp.down_proj,
    )  # fmt: skip
    return all(
        type(each) is torch.nn.Linear
        and is_base(each)
        and each.weight.dtype == dtype
        and takes_fp8(*each.weight.shape)
        for each in projections
    )


def fp8_layers(model: torch.nn.Module, mode: str) -> torch.nn.Module:
    """Let the layers of a model with the fused layer compute in FP8; returns the model.

    A layer stays as it is if FP8 does not take its shapes or projections, or if the fused layer
    does not stand for it; a warning counts those.  To be called after `apply_kernels`, before
    `fully_shard`.

    Args:
        model: a LlamaForCausalLM.
        mode: of flags.FP8_MODES.

    Raises:
        UserError: this GPU has no FP8, or it takes none of the layers.
        ValueError: there is no such mode.
    """
    if mode not in FP8_MODES:
        raise ValueError(f"mode is {mode!r}, expected one of {', '.join(FP8_MODES)}.")
    require_fp8()
    layers, n_fp8 = model.model.layers, 0
    for layer in layers:
        if isinstance(layer, apply_kernels.LlamaDecoderLayer):
            like = next(layer.parameters())  # of the dtype and device that a call's input has
            if layer.fits(like, output_attentions=False) and takes_layer(layer, like.dtype):
                layer.__class__, layer.fp8 = LlamaDecoderLayer, mode
                n_fp8 += 1
    given = f"FP8 takes {n_fp8 or 'none'} of the model's {len(layers)} layers"
    expected = f"fused layers with plain projections whose sizes {MULTIPLE} divides"
    expected += ", without hooks or gradient checkpointing"
    if not n_fp8:
        raise UserError(f"--fp8: {given}, expected {expected}: leave FP8 out")
    if n_fp8 < len(layers):
        warnings.warn(f"{given}, those that are {expected}.", stacklevel=2)
    return model


@contextlib.contextmanager
def without_fp8(model: torch.nn.Module) -> Iterator[None]:
    """Meanwhile its layers compute in its own dtype, as those of a saved model do."""
    layers = [layer for layer in model.model.layers if isinstance(layer, LlamaDecoderLayer)]
    for layer in layers:
        layer.__class__ = apply_kernels.LlamaDecoderLayer
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = LlamaDecoderLayer


def require_fp8() -> None:
    """Refuse a GPU that cannot multiply FP8.

    Raises:
        UserError: it is one.
    """
    if reason := fp8_support():
        raise UserError(f"--fp8: {reason}")


def layers_in_fp8(model: torch.nn.Module, workload: Workload) -> dict:
    """For a record, if the workload asks for FP8: how many layers compute so, of how many."""
    if workload.fp8 is None:
        return {}
    layers = model.model.layers
    n_fp8 = sum(isinstance(layer, LlamaDecoderLayer) for layer in layers)
    return {"fp8_layers": [n_fp8, len(layers)]}
