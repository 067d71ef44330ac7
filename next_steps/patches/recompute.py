"""What to keep for the backward, and what to compute again: four levels, for a whole model.

    none    keep everything that autograd wants
    norm    keep a norm's input, not its output: the norm runs twice
    mlp     norm, and silu(gate) * up is computed again.  No matrix product runs twice
    layer   keep the layer's input alone: everything in the layer runs twice

docs/recompute.md counts what each level keeps and computes.  In the fused layer the first three
levels are arguments of its Functions.  In other layers autograd is asked to keep something else:

    y = norm(x)                 made by `Recomputed`, which keeps x and forgets y
    linear(y)                   autograd keeps y: the hook `pack` recognizes y and returns a
                                placeholder that names its producer
    backward of linear          `unpack` calls the placeholder, which computes y again, once for q,
                                k and v
    backward of `Recomputed`    uses the graph that was made with y, and forgets both

A tensor is recognized by a weak reference to its storage: another tensor may soon have the same
address.  `layer` is torch.utils.checkpoint around the whole layer.

Limits: no torch.compile, no second derivative of what is computed again.
"""

import copy
import functools
from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from harness.cli.flags import RECOMPUTE
from harness.model.architecture import ModelFacts
from harness.model.exact_modules import is_unchanged
from harness.model.families import family_of
from harness.model.known_texts import CACHE, is_known_text
from next_steps.patches import apply_kernels
from next_steps.patches.offload import Offloader

NONE, NORM, MLP, LAYER = RECOMPUTE


class ReplacedForward(functools.partial):
    """A forward that this file put into a module, in the place of the class's."""


def set_recompute(
    model: torch.nn.Module, level: str | None, offload: bool = False
) -> torch.nn.Module:
    """Let the layers of a model keep what this level says; return the model.

    Call it after `apply_kernels`.  None: as the model was before any such call.
    """
    if level not in (None, *RECOMPUTE):
        raise ValueError(f"level is {level!r}, expected None or one of {', '.join(RECOMPUTE)}.")
    offloader = Offloader(model) if offload else None
    plain_mlp = family_of(model).part("MLP")
    for number, layer in enumerate(model.model.layers):
        norms = layer.input_layernorm, layer.post_attention_layernorm
        for module in (layer, layer.mlp, *norms):
            if isinstance(vars(module).get("forward"), ReplacedForward):
                del module.forward
        hooks, has_hooks = LayerHooks(number, offloader), offload
        if isinstance(layer, apply_kernels.DecoderLayer):
            # a layer that runs twice keeps, the second time, what would run a third time
            layer.keep_norm = level in (NONE, LAYER)
            layer.keep_product = level in (NONE, NORM, LAYER)
        elif level in (NORM, MLP):
            has_hooks = True
            for norm in norms:
                norm.forward = ReplacedForward(hooks.recomputed, norm, norm.forward)
            is_plain = type(layer.mlp) is plain_mlp and is_unchanged(layer.mlp)
            if level == MLP and is_plain and is_known_text(plain_mlp.forward):
                layer.mlp.forward = ReplacedForward(forgetful_mlp, layer.mlp, hooks)
        if level == LAYER:
            layer.forward = ReplacedForward(checkpointed, model.config, layer, layer.forward)
        if has_hooks:
            layer.forward = ReplacedForward(hooks.around, layer.forward)
    return model


class Recomputed(torch.autograd.Function):
    """`Recomputed.apply(function, n, *tensors)`: function of the first n, which alone are kept."""

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
    """Return the inputs of a `Recomputed` and its result with a graph, made at the first call."""
    if ctx.made is None:
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            ctx.made = inputs, ctx.function(*inputs)
    return ctx.made


def result_of(maker, *geometry) -> torch.Tensor:
    """Return the result of a `Recomputed`, or a view of it, from its node in the graph."""
    return again(maker)[1].detach().as_strided(*geometry)


class LayerHooks:
    """A layer's hooks: in place of a `Recomputed`'s result autograd keeps who made it.

    Everything else stays, or with an offloader goes to the host's memory.
    """

    def __init__(self, number: int, offloader: Offloader | None):
        self.number, self.offloader = number, offloader
        self.makers = {}  # by the storage of the result: its version, and its node in the graph

    def recomputed(self, module, function, *inputs):
        """Return function(*inputs); the module's own parameters are the ones that it takes."""
        parameters = module.parameters(recurse=False)  # now: FSDP has gathered a sharded weight
        result = Recomputed.apply(function, len(inputs), *inputs, *parameters)
        if result.grad_fn is not None:
            storage = StorageWeakRef(result.untyped_storage())
            self.makers[storage] = result._version, result.grad_fn
        return result

    def pack(self, t: torch.Tensor) -> torch.Tensor | Callable:
        version, maker = self.makers.get(StorageWeakRef(t.untyped_storage()), (None, None))
        if version == t._version:
            return functools.partial(result_of, maker, t.size(), t.stride(), t.storage_offset())
        return self.offloader.layer.pack(t) if self.offloader else t

    def around(self, forward, hidden_states, *args, **kwargs):
        """Run the layer's forward with these hooks."""

        def unpack(packed):
            return packed if isinstance(packed, torch.Tensor) else packed()

        if self.offloader:
            self.offloader.begin(self.number, [args, kwargs])
        with saved_tensors_hooks(self.pack, unpack):
            result = forward(hidden_states, *args, **kwargs)
        self.makers.clear()
        if self.offloader:
            self.offloader.end(self.number)
        return result


def forgetful_mlp(mlp: torch.nn.Module, hooks: LayerHooks, x: torch.Tensor) -> torch.Tensor:
    """Do what transformers' MLP does; the product is computed again; x and result (B, T, H)."""

    def product(gate, up):
        return mlp.act_fn(gate) * up

    return mlp.down_proj(hooks.recomputed(mlp, product, mlp.gate_proj(x), mlp.up_proj(x)))


def attention_pays(config: PreTrainedConfig, seq_len: int) -> bool:
    """Return True if a number of attention's output saves more FLOPs than one that mlp keeps.

    Per token, attention's forward takes 2 T H FLOPs and its output is H numbers, so each that is
    kept saves 2 T.  All that mlp keeps beyond the layer's input saves the 2 P FLOPs of the products
    with a layer's P weights.  In LLaMA 3.1 8B attention pays from T = 5,072 on.
    """
    facts = ModelFacts(config)
    # mlp keeps q, k, v, the second residual, gate and up, and attention's output
    *kept, _ = (rows for rows, _ in facts.shapes.values())
    return seq_len > facts.layer_weights / (sum(kept) + facts.shapes["o_proj"][1])


def keep_attention(context, operation, *args, **kwargs) -> CheckpointPolicy:
    """Let attention, by whichever of PyTorch's kernels, run once under selective checkpointing."""
    is_attention = "attention" in operation.name() or "attn" in operation.name()
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


class EarlierTokens:
    """Stands for a cache when a layer runs again: it holds what the cache held before the layer."""

    def __init__(self, cache: Cache, index: int):
        self.of_layer = copy.copy((cache.layers[index : index + 1] or [DynamicLayer()])[0])

    def update(self, k, v, index: int, *args, **kwargs):
        return copy.copy(self.of_layer).update(k, v, *args, **kwargs)


def fills_once(forward: Callable, cache: Cache, index: int) -> Callable:
    """Return the layer's forward, which gets the cache the first time and then what it held."""
    first, earlier = [cache], EarlierTokens(cache, index)

    def run(*args, **kwargs):
        # popped, because the cache's tensors have a graph that would hold the cache
        return forward(*args, **kwargs, **{CACHE: first.pop() if first else earlier})

    return run


def checkpointed(config, layer, forward, hidden_states, *args, **kwargs):
    """Run a layer's forward, which runs again in the backward; hidden_states (B, T, H)."""
    if kwargs.get(CACHE) is not None:
        forward = fills_once(forward, kwargs.pop(CACHE), layer.self_attn.layer_idx)
    in_attention = config.attention_dropout > 0
    contexts = checkpoint.noop_context_fn
    # attention that is kept draws nothing again, and modules after it would draw other masks
    if not in_attention and attention_pays(config, hidden_states.shape[1]):
        contexts = functools.partial(
            checkpoint.create_selective_checkpoint_contexts, keep_attention
        )
    recorded = hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()
    kind = torch.nn.modules.dropout._DropoutNd  # as peft's adapters may have
    has_dropout = any(isinstance(module, kind) and module.p > 0 for module in layer.modules())
    return checkpoint.checkpoint(
        forward,
        hidden_states,
        *args,
        use_reentrant=False,
        context_fn=contexts,
        # Both runs must draw the same, and modules may draw without a Dropout.  A CUDA graph does
        # not allow reading the random state: PyTorch raises where a Dropout needs it.
        preserve_rng_state=not recorded or in_attention or has_dropout,
        **kwargs,
    )
