"""Projections that multiply other numbers than bf16's: frozen ones in NF4 or FP8, trained in FP8.

    model = quantize_model(model, Frozen.NF4)      then adapters, kernels, training
    model = fp8_layers(apply_kernels(model))       all weights are trained

    Frozen.NF4                 4 bits, written out in bf16 to be multiplied: QLoRA
    Frozen.FP8, FP8_COMPACT    8 bits, multiplied as they are: frozen_fp8.py
    fp8_layers                 bf16, rounded to FP8 in each step: fp8_layer.py

Norms, embedding and head stay as they are: norms are small, a step reads a few rows of the
embedding, and an error of the head is an error of the logits.  patched_model.py quantizes a model
while it loads.  Under fully_shard each process has the whole quantized weight, which is no
parameter.

In a layer that is trained in FP8 all projections fit, or none computes so.  Each decoder layer that
the fused layer stands for gets a class that derives from its own, and in each call it asks whether
fp8_layer.py's Functions still fit.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch

from harness.cli.adapter_config import LORA_TARGETS, SHARING
from harness.cli.command_line import UserError
from harness.cli.workload import Frozen, Workload
from harness.model.exact_modules import is_linear, is_matrix
from harness.model.families import family_of
from harness.steps import parallel
from next_steps.layers.fp8_layer import Casts, mlp_fp8, o_fp8, qkv_fp8
from next_steps.layers.frozen_fp8 import frozen_fp8
from next_steps.layers.lora_linear import QuantizedLinear
from next_steps.lessons.fp8_kernel import MAX_COLUMNS, MULTIPLE, fp8_support, takes_fp8
from next_steps.lessons.nf4_kernel import NF4, NF4LinearFunction, nf4_dequantize, nf4_quantize
from next_steps.patches import apply_kernels

SHARE = 0.95  # of a GPU's memory, that tensors may fill

# ---------------------------------------------------------------- frozen weights


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


def quantize_model(model: torch.nn.Module, kept_as: Frozen) -> torch.nn.Module:
    """Replace a model's projections, before adapters and kernels; return the model."""
    for layer in model.model.layers:
        quantize_layer(layer, kept_as)
    return model


def quantize_layer(layer: torch.nn.Module, kept_as: Frozen) -> None:
    """Do the same in one decoder layer."""
    found = [path for path, module in layer.named_modules() if type(module) is torch.nn.Linear]
    paths = {path.rpartition(".")[2]: path for path in found}
    if paths.keys() != set(LORA_TARGETS["all"]):
        given = f"a layer's plain matrices are {', '.join(sorted(paths)) or 'none'}"
        expected = f"expected {', '.join(LORA_TARGETS['all'])}"
        raise UserError(f"{given}, {expected}: quantize once, before adapters")
    for names in SHARING:
        linears = [layer.get_submodule(paths[name]) for name in names]
        try:
            made = quantized(linears, kept_as)
        except ValueError as error:
            given = f"a layer's {', '.join(names)} cannot be kept as {kept_as.value}"
            flag = "--quantize" if kept_as is Frozen.NF4 else "--fp8"
            raise UserError(f"{given}, because its {error}: leave {flag} out") from error
        for name, module in zip(names, made):
            layer.set_submodule(paths[name], module)


def quantized(linears: Sequence[torch.nn.Linear], kept_as: Frozen) -> list[torch.nn.Module]:
    """Return what replaces projections that share an input.

    Raises:
        ValueError: NF4 or FP8 does not take a weight, or the results of one input are too wide.
    """
    if kept_as is Frozen.NF4:
        return [NF4Linear(linear) for linear in linears]
    for linear in linears:
        if not takes_fp8(*linear.weight.shape):
            given = f"weight has shape {tuple(linear.weight.shape)}"
            raise ValueError(f"{given}, expected multiples of {MULTIPLE}")
    width = sum(linear.out_features for linear in linears)
    if width > MAX_COLUMNS:
        expected = f"expected at most {MAX_COLUMNS:,}"
        raise ValueError(f"result has rows of {width:,} numbers, {expected}")
    return frozen_fp8(linears, keep_turned=kept_as is not Frozen.FP8_COMPACT)


# ---------------------------------------------------------------- trained in FP8


class DecoderLayer(torch.nn.Module):
    """With fp8_layer.py's Functions; where they do not fit, with the fused layer's in bf16."""

    casts = Casts()  # `KeptCodes` sets it while it keeps

    def compute(self, hidden_states, **kwargs):
        """Do what the layer does, in FP8 where all projections fit."""
        if not takes_layer(self, hidden_states.dtype):
            return super().compute(hidden_states, **kwargs)
        attention, casts = self.self_attn, self.casts
        residual, *projected = qkv_fp8(hidden_states, self.input_layernorm, attention, casts)
        attended, _ = apply_kernels.attend(attention, *projected, **kwargs)
        residual = residual + o_fp8(attended, attention, casts)
        residual, out = mlp_fp8(residual, self.post_attention_layernorm, self.mlp, casts)
        return residual + out


FUSED = apply_kernels.CLASSES[apply_kernels.DecoderLayer]
FP8_CLASSES = apply_kernels.in_families(DecoderLayer, FUSED, __name__)
globals().update({cls.__name__: cls for cls in FP8_CLASSES.values()})


def takes_layer(layer: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Return True if FP8 takes all of a layer's projections: plain weights of this dtype.

    q, k and v may have biases, if all three have them.
    """
    qkv, others = layer.of_attention(), (layer.self_attn.o_proj, *layer.of_mlp())
    if not (all(map(is_linear, qkv)) and all(map(is_matrix, others))):
        return False
    biases = {each.bias is not None for each in qkv}
    tensors = [t for each in (*qkv, *others) for t in (each.weight, each.bias) if t is not None]
    sizes = [size for each in (*qkv, *others) for size in each.weight.shape]
    return len(biases) == 1 and takes_fp8(*sizes) and all(t.dtype == dtype for t in tensors)


def fp8_layers(model: torch.nn.Module) -> torch.nn.Module:
    """Let the layers of a model with the fused layer compute in FP8; return the model.

    A layer stays as it is if FP8 does not take its shapes or projections, or if the fused layer
    does not stand for it.  A warning counts those layers.  Call this after `apply_kernels` and
    before `fully_shard`.
    """
    require_fp8()
    layers, n_fp8, in_fp8 = model.model.layers, 0, FP8_CLASSES[family_of(model).model_type]
    for layer in layers:
        if isinstance(layer, apply_kernels.DecoderLayer):
            like = next(layer.parameters())  # of the dtype and device that a call's input has
            if layer.fits(like, output_attentions=False) and takes_layer(layer, like.dtype):
                layer.__class__ = in_fp8
                n_fp8 += 1
    given = f"FP8 takes {n_fp8 or 'none'} of the model's {len(layers)} layers"
    expected = f"fused layers without hooks, with plain projections whose sizes {MULTIPLE} divides"
    if not n_fp8:
        raise UserError(f"--fp8: {given}, expected {expected}: leave FP8 out")
    if n_fp8 < len(layers):
        warnings.warn(f"{given}, those that are {expected}.", stacklevel=2)
    model.between_micro_batches = KeptCodes(layers)
    return model


class KeptCodes:
    """A context around a step of several micro-batches: no weight changes before its end.

    The layers keep the codes of their weights meanwhile, if there is room for them on the GPU.  The
    first steps keep nothing, and show how much room the others will have.  There are two of them:
    AdamW makes its moments at the end of the first.
    """

    def __init__(self, layers: Sequence[torch.nn.Module]):
        self.layers = [layer for layer in layers if isinstance(layer, DecoderLayer)]
        self.begin()

    def begin(self) -> None:
        """Keep nothing in the next two steps, which may be of another size than those before."""
        self.n_steps, self.has_room = 0, False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if self.n_steps == 2:
            self.has_room = self.finds_room()
        self.n_steps += 1
        for layer in self.layers if self.has_room else ():
            layer.casts = Casts(kept={})
        try:
            yield
        finally:
            for layer in self.layers:
                layer.casts = Casts()

    def finds_room(self) -> bool:
        """Return True if the codes fit beside the most that any process has allocated until now.

        All processes must call it.  Under FSDP2 each keeps the codes of whole weights, too.
        """
        if not self.layers[0].mlp.down_proj.weight.is_cuda:
            return True
        matrices = (p for layer in self.layers for p in layer.parameters() if p.ndim == 2)
        n_bytes = 2 * sum(p.numel() for p in matrices)  # as they are, and turned
        _, total = torch.cuda.mem_get_info()
        peak = max(max(each) for each in parallel.gather(torch.cuda.max_memory_allocated()))
        return peak + n_bytes < SHARE * total


@contextlib.contextmanager
def without_fp8(model: torch.nn.Module) -> Iterator[None]:
    """Let the layers compute in the model's own dtype meanwhile, as a saved model's layers do."""
    kind = family_of(model).model_type
    layers = [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]
    for layer in layers:
        layer.__class__ = FUSED[kind]
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = FP8_CLASSES[kind]


def require_fp8() -> None:
    """Raise a UserError if this GPU cannot multiply FP8."""
    if reason := fp8_support():
        raise UserError(f"--fp8: {reason}")


def layers_in_fp8(model: torch.nn.Module, workload: Workload) -> dict:
    """Return what a record says of FP8: how many layers compute so, of how many; {} without FP8."""
    if workload.fp8 is None:
        return {}
    layers = model.model.layers
    if workload.frozen_as:  # every projection multiplies codes, whoever calls it
        return {"fp8_layers": [len(layers), len(layers)]}
    n_fp8 = sum(isinstance(layer, DecoderLayer) for layer in layers)
    return {"fp8_layers": [n_fp8, len(layers)]}
