"""What to keep for the backward, and what to compute again: four levels, for a whole model.

    python finetune_baseline.py --recompute mlp
    python finetune_optimized.py --kernels all --recompute layer

    none    everything that autograd wants
    norm    a norm's input, not its output: the norm runs twice
    mlp     that; and silu(gate) * up is computed again.  No matrix product runs twice
    layer   the layer's input alone: everything in it runs twice

No flag is the model as it was: mlp where the fused layer is, none anywhere else.  With the fused
layer the first three are arguments of its Functions.  With Hugging Face's modules, and with kernels
that keep to their borders, there is no such argument: the Linear after the norm asks autograd to
keep its input, whoever made it.  So autograd is asked to keep something else,

    y = norm(x)                 made by `Recomputed`, which keeps x and forgets y
    linear(y)                   autograd keeps y: the hook `pack` sees that it is one of those,
                                and hands back a note: whose result it is
    backward of linear          `unpack` reads the note and computes y again, once for q, k and v
    backward of `Recomputed`    uses the graph that was made with y, and forgets both

which is torch.autograd.graph.saved_tensors_hooks, and needs no copy of Hugging Face's layer.  A
tensor is known by its storage, to which a weak reference is kept: the same address may soon be
another tensor's.

`layer` is torch.utils.checkpoint around the whole layer.  It keeps the layer's input alone, and for
long sequences one thing more, attention's output.  Is that worth its memory?  Per token,
attention's forward takes 2 T H FLOPs, and its output is H numbers: each that is kept saves 2 T
FLOPs.  All that mlp keeps beyond the layer's input saves the 2 P FLOPs of the products with a
layer's P weights: in LLaMA 3.1 8B 43,008 numbers save 436 MFLOP, 10,142 each.  So from T = 5,072 on
a number of attention's output saves more than one of those, and it is kept: `attention_pays`.

What a layer keeps can also wait in the host's memory, at any of the levels: offload.py.

Dropout in a layer draws the same masks both times; with it no CUDA graph can be made of `layer`.

Limits: no torch.compile, no second derivative of what is computed again.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from harness.cli.flags import RECOMPUTE
from next_steps.patches import apply_kernels
from next_steps.patches.offload import Offloader

# after the kernels, which decide how triton (imported by transformers) will run
from transformers import LlamaConfig  # isort: skip
from transformers.models.llama import modeling_llama  # isort: skip

NONE, NORM, MLP, LAYER = RECOMPUTE


class Instead(functools.partial):
    """A forward that this file has put into a module, in the place of the class's."""


def set_recompute(
    model: torch.nn.Module, level: str | None, offload: bool = False
) -> torch.nn.Module:
    """Let the layers of a LlamaForCausalLM keep what this level says; returns the model.

    Args:
        model: after `apply_kernels`, if that is called.
        level: of RECOMPUTE; None: as the model was before any such call.
        offload: what they keep waits in the host's memory.

    Raises:
        ValueError: there is no such level.
    """
    if level not in (None, *RECOMPUTE):
        raise ValueError(f"level is {level!r}, expected None or one of {', '.join(RECOMPUTE)}.")
    offloader = Offloader(model) if offload else None
    for number, layer in enumerate(model.model.layers):
        norms = layer.input_layernorm, layer.post_attention_layernorm
        for module in (layer, layer.mlp, *norms):
            if isinstance(vars(module).get("forward"), Instead):
                del module.forward
        notes, noted = Notes(number, offloader), offload
        if isinstance(layer, apply_kernels.LlamaDecoderLayer):
            # a layer that runs twice keeps, the second time, what would run a third time
            layer.keep_norm = level in (NONE, LAYER)
            layer.keep_product = level in (NONE, NORM, LAYER)
        elif level in (NORM, MLP):
            forget(layer, norms, level == MLP, notes)
            noted = True
        if level == LAYER:
            layer.forward = Instead(checkpointed, model.config, layer, layer.forward)
        if noted:
            layer.forward = Instead(notes.around, layer.forward)
    return model


# ---------------------------------------------------------------- norm and mlp


class Recomputed(torch.autograd.Function):
    """`Recomputed.apply(function, n, *tensors)`: function of the first n, which alone are kept.

    The others are the parameters that the function uses by itself.
    """

    @staticmethod
    def forward(ctx, function, n, *tensors):
        ctx.function, ctx.parameters, ctx.made = function, tensors[n:], None
        ctx.save_for_backward(*tensors[:n])
        return function(*tensors[:n])

    @staticmethod
    @once_differentiable
    def backward(ctx, dresult):
        inputs, result = again(ctx)
        ctx.made = None
        needed = ctx.needs_input_grad[2:]
        wanted = [t for t, need in zip((*inputs, *ctx.parameters), needed) if need]
        found = iter(torch.autograd.grad(result, wanted, dresult))
        return None, None, *(next(found) if need else None for need in needed)


def again(ctx) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The inputs of a `Recomputed`, and its result with a graph; made when first asked for."""
    if ctx.made is None:
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            ctx.made = inputs, ctx.function(*inputs)
    return ctx.made


@dataclass(frozen=True)
class Result:
    """What autograd holds in the place of a `Recomputed`'s result, or of a view of it."""

    maker: object  # its node in the graph
    geometry: tuple  # size, stride, storage_offset

    def unpack(self) -> torch.Tensor:
        return again(self.maker)[1].detach().as_strided(*self.geometry)


def unpack(packed) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else packed.unpack()


class Notes:
    """A layer's hooks: of a `Recomputed`'s result autograd keeps a note whose result it is.

    All else stays, or with an offloader goes to the host's memory.
    """

    def __init__(self, number: int, offloader: Offloader | None):
        self.number, self.offloader = number, offloader
        self.makers = {}  # by the storage of the result: its version, and its node in the graph

    def recomputed(
        self,
        function: Callable,
        parameters: Sequence[torch.nn.Parameter],
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        result = Recomputed.apply(function, len(inputs), *inputs, *parameters)
        if result.grad_fn is not None:
            storage = StorageWeakRef(result.untyped_storage())
            self.makers[storage] = result._version, result.grad_fn
        return result

    def pack(self, t: torch.Tensor):
        version, maker = self.makers.get(StorageWeakRef(t.untyped_storage()), (None, None))
        if version == t._version:
            return Result(maker, (t.size(), t.stride(), t.storage_offset()))
        return self.offloader.layer.pack(t) if self.offloader else t

    def around(
        self, forward: Callable, hidden_states: torch.Tensor, *args, **kwargs
    ) -> torch.Tensor:
        """The layer's forward, with these hooks."""
        if self.offloader:
            self.offloader.begin(self.number, [args, kwargs])
        with saved_tensors_hooks(self.pack, unpack):
            result = forward(hidden_states, *args, **kwargs)
        self.makers.clear()
        if self.offloader:
            self.offloader.end(self.number)
        return result


def forget(
    layer: torch.nn.Module, norms: Sequence[torch.nn.Module], with_mlp: bool, notes: Notes
) -> None:
    """Let a layer forget its norms' results, and the MLP's product where no kernel does that."""
    for norm in norms:
        norm.forward = Instead(forgetful_norm, norm, norm.forward, notes)
    if with_mlp and type(layer.mlp) is modeling_llama.LlamaMLP:
        layer.mlp.forward = Instead(forgetful_mlp, layer.mlp, notes)


def forgetful_norm(
    norm: torch.nn.Module, forward: Callable, notes: Notes, x: torch.Tensor
) -> torch.Tensor:
    """A norm's forward, which is computed again; its weight is FSDP's gathered one, if sharded."""
    return notes.recomputed(forward, [norm.weight], x)


def forgetful_mlp(mlp: torch.nn.Module, notes: Notes, x: torch.Tensor) -> torch.Tensor:
    """LlamaMLP.forward, whose product is computed again; x and the result are (B, T, H)."""

    def product(gate, up):
        return mlp.act_fn(gate) * up

    return mlp.down_proj(notes.recomputed(product, [], mlp.gate_proj(x), mlp.up_proj(x)))


# ---------------------------------------------------------------- layer


def attention_pays(config: LlamaConfig, seq_len: int) -> bool:
    """Does a number of attention's output save more FLOPs than one that the level mlp keeps?"""
    heads = config.num_attention_heads * config.head_dim
    projected = heads + 2 * config.num_key_value_heads * config.head_dim  # q, k, v
    weights = config.hidden_size * (projected + heads + 3 * config.intermediate_size)
    # mlp keeps q, k, v, attention's output, the second residual, gate and up
    kept = projected + heads + config.hidden_size + 2 * config.intermediate_size
    return seq_len > weights / kept


def keep_attention(context, operation, *args, **kwargs) -> CheckpointPolicy:
    """For PyTorch's selective checkpointing: attention, by whichever of its kernels, runs once."""
    is_attention = "attention" in operation.name() or "attn" in operation.name()
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def has_dropout(layer: torch.nn.Module) -> bool:
    """Has any module in it a dropout of its own, as peft's adapters may?"""
    kind = torch.nn.modules.dropout._DropoutNd
    return any(isinstance(module, kind) and module.p > 0 for module in layer.modules())


def checkpointed(
    config: LlamaConfig,
    layer: torch.nn.Module,
    forward: Callable,
    hidden_states: torch.Tensor,
    *args,
    **kwargs,
) -> torch.Tensor:
    """A layer's forward, which runs again in the backward; hidden_states (B, T, H)."""
    in_attention = config.attention_dropout > 0
    contexts = noop_context_fn
    # attention that is kept draws nothing again, and modules behind it would draw other masks
    if not in_attention and attention_pays(config, hidden_states.shape[1]):
        contexts = functools.partial(create_selective_checkpoint_contexts, keep_attention)
    recorded = hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()
    return checkpoint(
        forward,
        hidden_states,
        *args,
        use_reentrant=False,
        context_fn=contexts,
        # What is drawn again must be the same, and modules may draw without a Dropout.  A CUDA
        # graph does not allow the state to be read: PyTorch raises where a Dropout needs it.
        preserve_rng_state=not recorded or in_attention or has_dropout(layer),
        **kwargs,
    )
