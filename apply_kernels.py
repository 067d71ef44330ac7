"""One call puts the kernels into a Hugging Face LLaMA: `apply_kernels(model)`.

    model = AutoModelForCausalLM.from_pretrained(...)
    apply_kernels(model)                       # or apply_kernels(model, ["rmsnorm", "rope"])
    model(input_ids, labels=labels).loss       # as before; also inside transformers.Trainer

The model keeps its class, or gets one derived from it, its parameters and the keys of its `state_dict`.  In training,
with labels, the loss comes straight from the hidden states, and `logits` is None: they were never computed.  (With
cross_entropy alone they are there in training, but overwritten with their gradient.)  In evaluation, under
torch.no_grad(), the logits are there.
The optimizer is not part of the model: `triton_adamw(model, lr)`.
"""

import functools
import types
from collections.abc import Callable, Sequence

import torch

import llama
from adamw_kernel import TritonAdamW
from cross_entropy_kernel import TritonCrossEntropyLoss
from fused_layer import norm_linear, swiglu_linear
from linear_cross_entropy_kernel import TritonLinearCrossEntropyLoss
from rmsnorm_kernel import TritonRMSNorm
from rope_kernel import triton_apply_rotary_pos_emb
from swiglu_kernel import TritonLlamaMLP

# after the kernels, which decide how triton (imported by transformers) will run
from transformers.modeling_outputs import CausalLMOutputWithPast  # isort: skip
from transformers.models.llama import modeling_llama  # isort: skip

MODEL_KERNELS = ["rmsnorm", "cross_entropy", "swiglu", "rope", "linear_cross_entropy", "fused_layer"]
KERNELS = [*MODEL_KERNELS, "adamw"]  # what --kernels knows; the last is an optimizer
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
RECORDERS = "transformers.utils.output_capturing"  # its hooks stay after an output_attentions=True, and do nothing


def apply_kernels(model: torch.nn.Module, names: Sequence[str] = tuple(MODEL_KERNELS)) -> torch.nn.Module:
    """Replace parts of a LlamaForCausalLM by the kernels named; returns the model.

    Args:
        model: a transformers LlamaForCausalLM, on any device, in any state of training.
        names: of MODEL_KERNELS; all of them unless told.  fused_layer implies the norm, SwiGLU and rotary kernels in
            its layers, linear_cross_entropy the loss in training.

    Norms and MLPs are replaced by other modules, so whoever hooks into those does it afterwards.

    Raises:
        TypeError: the model is no LlamaForCausalLM.
        ValueError: a name is unknown, the model's activation is not SiLU, or accelerate moves parts of it about.
    """
    if not isinstance(model, modeling_llama.LlamaForCausalLM):
        raise TypeError(f"model is a {type(model).__name__}, expected a LlamaForCausalLM: unwrap it first.")
    unknown = [name for name in names if name not in MODEL_KERNELS]
    if unknown:
        given = f"unknown kernel {', '.join(map(repr, unknown))}"
        raise ValueError(f"{given}, expected some of {', '.join(MODEL_KERNELS)}.")
    if {"swiglu", "fused_layer"} & set(names) and model.config.hidden_act not in ("silu", "swish"):
        given = f"hidden_act is {model.config.hidden_act!r}"
        raise ValueError(f"{given}, expected 'silu': name the kernels without swiglu and fused_layer.")
    if any(hasattr(module, "_hf_hook") for module in model.modules()):  # in their forward, which would be replaced
        raise ValueError("accelerate has spread the model over devices, expected one: load it without that device_map.")
    if "rmsnorm" in names:
        llama.replace_modules(model, "LlamaRMSNorm", TritonRMSNorm.from_llama_rmsnorm)
    if "cross_entropy" in names:
        model.loss_function = llama.causal_lm_loss(inplace_cross_entropy)
    if "swiglu" in names:
        llama.replace_modules(model, "LlamaMLP", TritonLlamaMLP.from_llama_mlp)
    for layer in model.model.layers:
        if "rope" in names:
            replace_forward(layer.self_attn, ATTENTION_FORWARD)
        if "fused_layer" in names:
            replace_forward(layer, fused_layer_forward)
    if "linear_cross_entropy" in names:
        replace_forward(model, fused_loss_forward)
    return model


def inplace_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Nothing reads the logits after the loss, so their gradient may take their memory.

    Not if they are a view: that is what a backward hook on lm_head makes of them, and PyTorch forbids to change it.
    """
    return TritonCrossEntropyLoss(inplace=not logits._is_view())(logits, targets)


def triton_adamw(model: torch.nn.Module, lr: float, stochastic_rounding: bool = False) -> TritonAdamW:
    """AdamW in one kernel per parameter, which steps during the backward, so that gradients never all exist at once."""
    return TritonAdamW(llama.trained(model), lr=lr, stochastic_rounding=stochastic_rounding, step_in_backward=True)


def model_kernels(kernels: Sequence[str]) -> list[str]:
    """Those of KERNELS that `apply_kernels` takes: all but the optimizer."""
    return [name for name in kernels if name in MODEL_KERNELS]


def make_optimizer(
    model: torch.nn.Module, lr: float, kernels: Sequence[str], stochastic_rounding: bool = False
) -> torch.optim.Optimizer:
    """`triton_adamw` if adamw is among the kernels, PyTorch's AdamW if not."""
    return triton_adamw(model, lr, stochastic_rounding) if "adamw" in kernels else llama.make_optimizer(model, lr)


def replace_forward(module: torch.nn.Module, forward: Callable) -> None:
    """Give this module, but no other of its class, another forward; its own becomes `plain_forward`.

    It gets a class of its own.  A forward among its attributes would be bound to it, and so would those of its copies,
    which torch.nn.DataParallel makes, and transformers.Trainer with it where it sees several GPUs.
    """
    if type(module).forward is not forward:
        module.__class__ = class_with_forward(type(module), forward)


@functools.cache
def class_with_forward(cls: type, forward: Callable) -> type:
    """One for all modules, so that torch.compile sees layers of one class; its name is stored with the model."""
    return type(cls.__name__, (cls,), {"forward": forward, "plain_forward": cls.forward, "__module__": cls.__module__})


def with_globals(function: Callable, **replacements) -> Callable:
    """The same function, with other things behind some of the global names that it uses."""
    names = {**function.__globals__, **replacements}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# The rotary embedding is a function that LlamaAttention.forward finds among its module's globals.  Replaced there, it
# would change for every model in the process.
ATTENTION_FORWARD = with_globals(
    modeling_llama.LlamaAttention.forward, apply_rotary_pos_emb=triton_apply_rotary_pos_emb
)


def is_plain(linear: torch.nn.Module) -> bool:
    """Is it no more than x @ weight.t(): no LoRA around it, not quantized, no bias?"""
    return type(linear) is torch.nn.Linear and linear.bias is None and is_untouched(linear)


def is_untouched(module: torch.nn.Module) -> bool:
    """Does calling it run its class's forward, and nobody's hook?"""
    hooks = [hook for name in HOOKS for hook in getattr(module, name).values()]
    unknown = any(getattr(hook, "__module__", None) != RECORDERS for hook in hooks)
    return "forward" not in vars(module) and not unknown and not torch.nn.modules.module._has_any_global_hook()


def fused_layer_forward(
    self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
    position_embeddings=None, **kwargs,
):  # fmt: skip
    """LlamaDecoderLayer.forward with norm_linear and swiglu_linear; where these do not fit, the layer's own forward.

    They do not fit around a projection that is more than a matrix product, a part with hooks, attention weights that
    are asked for, autocast, and gradient checkpointing, which is part of the layer's own forward.
    hidden_states and the result are (B, T, H).
    """
    attention, mlp = self.self_attn, self.mlp
    inner = attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
    parts = attention, mlp, mlp.act_fn, self.input_layernorm, self.post_attention_layernorm
    asked_for_weights = kwargs.get("output_attentions", getattr(attention.config, "output_attentions", False))
    kwargs |= {"position_ids": position_ids, "use_cache": use_cache}
    if (
        not all(map(is_plain, inner))
        or not all(map(is_untouched, parts))
        or asked_for_weights
        or torch.is_autocast_enabled(hidden_states.device.type)
        or (self.gradient_checkpointing and self.training)
    ):
        kwargs |= {"past_key_values": past_key_values, "position_embeddings": position_embeddings}
        return self.plain_forward(hidden_states, attention_mask, **kwargs)

    heads = *hidden_states.shape[:-1], -1, attention.head_dim
    residual, *projected = norm_linear(hidden_states, self.input_layernorm, *inner[:3])
    q, k, v = (t.view(heads).transpose(1, 2) for t in projected)  # (B, heads, T, D)
    q, k = triton_apply_rotary_pos_emb(q, k, *position_embeddings)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, attention.layer_idx)
    attend = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface(
        attention.config._attn_implementation, modeling_llama.eager_attention_forward
    )
    dropout = attention.attention_dropout if self.training else 0.0
    attended, _ = attend(attention, q, k, v, attention_mask, dropout=dropout, scaling=attention.scaling, **kwargs)
    hidden_states = residual + attention.o_proj(attended.reshape(*heads[:-2], -1))

    residual, gate, up = norm_linear(hidden_states, self.post_attention_layernorm, *inner[3:5])
    return residual + swiglu_linear(gate, up, mlp.down_proj)


def fused_loss_forward(
    self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
    labels=None, use_cache=None, logits_to_keep=0, **kwargs,
):  # fmt: skip
    """LlamaForCausalLM.forward, but in training the loss comes from the hidden states, and logits is None."""
    inputs = {
        "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
        "past_key_values": past_key_values, "inputs_embeds": inputs_embeds, "use_cache": use_cache,
    }  # fmt: skip
    if not self.training or labels is None or not is_plain(self.lm_head):
        return self.plain_forward(**inputs, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
    if kwargs.pop("return_dict", True) is False:
        raise ValueError("return_dict is False, expected True: a tuple has no place for logits that do not exist.")
    outputs = self.model(**inputs, **kwargs)
    fused = TritonLinearCrossEntropyLoss()
    loss_function = llama.causal_lm_loss(lambda hidden, targets: fused(hidden, self.lm_head.weight, targets))
    return CausalLMOutputWithPast(
        loss=loss_function(outputs.last_hidden_state, labels, **kwargs), past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states, attentions=outputs.attentions,
    )  # fmt: skip
