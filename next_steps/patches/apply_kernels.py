"""One call puts the kernels into a Hugging Face model: `apply_kernels(model)`.

    model = AutoModelForCausalLM.from_pretrained(...)
    apply_kernels(model)                       # or apply_kernels(model, ["rmsnorm", "rope"])
    model(input_ids, labels=labels).loss       # as before; also inside transformers.Trainer

Parameters and the keys of the `state_dict` stay.  Norms and MLPs become other modules.  Attention,
decoder layers, lm_head and the model get a class that derives from their own.  Every weight is used
while its layer, its norm or lm_head is called: `fully_shard`, which comes after this, needs that.

The logits of an output are the untouched ones or None.  They are None in training, with labels,
where a kernel computes the loss: linear_cross_entropy never has all of them, and cross_entropy
writes their gradient over them.  Whoever needs them there calls the model without labels, or gives
it a `loss_function`.  In evaluation they are always there, also with labels and with gradients.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.loss import loss_utils
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.model import exact_modules
from harness.model.exact_modules import class_of, is_unchanged, is_untouched
from harness.model.families import FAMILIES, Family, family_of, part_outside
from harness.model.known_texts import CACHE, is_known_text
from harness.model.patching import called_function, replace_modules
from harness.profiling.kernel_facts import LOSS_KERNELS, MODEL_KERNELS
from harness.steps import stepping
from next_steps.layers.fused_layer import norm_linear, norm_mlp
from next_steps.layers.llama_mlp import TritonLlamaMLP, is_silu
from next_steps.layers.lora_linear import is_product, lora_linear
from next_steps.lessons.adamw_optimizer import TritonAdamW
from next_steps.lessons.qk_norm_rope_kernel import triton_qk_norm_rope
from next_steps.lessons.rope_kernel import triton_apply_rotary_pos_emb
from next_steps.patches.llama_losses import Linear, cross_entropy_loss, linear_cross_entropy_loss
from rmsnorm_kernel import TritonRMSNorm

# the rotary kernel stands for these functions and no other, by the family's model_type
ROTARY = {kind: family.modeling.apply_rotary_pos_emb for kind, family in FAMILIES.items()}


def apply_kernels(
    model: torch.nn.Module, names: Sequence[str] = tuple(MODEL_KERNELS)
) -> torch.nn.Module:
    """Replace parts of a model by the kernels named; return the model.

    Args:
        model: a causal language model of transformers, of a family in harness/model/families.py, on
            any device, in any state of training.
        names: of MODEL_KERNELS, by default all.  fused_layer implies the norm, SwiGLU and rotary
            kernels in its layers, linear_cross_entropy the loss in training.  Where a family has
            norms on q and k, rope computes them with the rotation.

    A kernel stands for one class of transformers and the forward that this class was written with.
    Other parts keep their own code, also if they come after this call (exceptions are named):

    - a part of another class: a subclass, or a norm or attention that a library wrapped or wrote;
    - a part with a `forward` of its own; and a class whose forward is not transformers', or an
      `apply_rotary_pos_emb` that is not transformers', if they were replaced before this call;
    - a norm or an MLP with hooks, or with an activation that is not SiLU, before this call; hooks
      that come later are called, and so is an activation that comes later;
    - a part whose text this version of transformers has changed (known_texts.py): a line says so;
    - the forward, and with it the loss, of a subclass of the family's ForCausalLM;
    - the loss of a model whose `loss_function` is not transformers' ForCausalLMLoss;
    - a projection that is more than a matrix product with or without a bias and an adapter, such as
      one with another LoRA than lora_linear's, or a weight of a subclass of torch.Tensor;
    - all of a model in float64, as long as it is in float64: no kernel computes in it.

    Raises:
        TypeError: the model is of another family, or has a part that no family here has.
        ValueError: a name is unknown, the model's activation is not SiLU, accelerate or fully_shard
            has spread the model, or a kernel finds nothing to replace (of all kernels: none does).
    """
    family = require_family(model)
    names = tuple(names)
    if unknown := [name for name in names if name not in MODEL_KERNELS]:
        given = f"unknown kernel {', '.join(map(repr, unknown))}"
        raise ValueError(f"{given}, expected some of {', '.join(MODEL_KERNELS)}.")
    if {"swiglu", "fused_layer"} & set(names) and model.config.hidden_act not in ("silu", "swish"):
        given = f"hidden_act is {model.config.hidden_act!r}, expected 'silu'"
        raise ValueError(f"{given}: name the kernels without swiglu and fused_layer.")
    # accelerate's work is in the modules' forward, which would be replaced
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        given = "accelerate has spread the model over devices"
        raise ValueError(f"{given}, expected one: load it without that device_map.")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        given = "fully_shard has spread the model over processes"
        raise ValueError(f"{given}, expected it whole: apply the kernels first.")
    takes_all = set(names) == set(MODEL_KERNELS)
    names = [name for name in names if all(map(is_known_text, stands_for(family, name)))]
    with unchanged_if_it_raises(model):
        put_in(model, family, names)
        idle = [name for name in names if not has_kernel(model, name)]
        # whoever names all kernels wants those that find something
        if idle and (not takes_all or len(idle) == len(names)):
            given = f"{', '.join(idle)} find{'s' * (len(idle) == 1)} nothing in the model"
            expected = "expected what transformers wrote, unchanged and without hooks"
            raise ValueError(f"{given} to replace, {expected}: leave that kernel out.")
    if isinstance(model, ForCausalLM):
        model.loss_kernels = [k for k in LOSS_KERNELS if k in names or k in model.loss_kernels]
    return model


def stands_for(family: Family, name: str) -> list[Callable]:
    """Return the forwards and functions of transformers in whose place a kernel computes."""
    parts = "RMSNorm", "MLP", "Attention", "DecoderLayer", "ForCausalLM"
    norm, mlp, attention, layer, model = (family.part(part).forward for part in parts)
    rotary = called_function(ROTARY[family.model_type]), family.modeling.rotate_half
    if name in LOSS_KERNELS:
        return [model, ForCausalLMLoss, loss_utils.fixed_cross_entropy]
    functions = {
        "rmsnorm": [norm],
        "swiglu": [mlp, SiLUActivation.forward],
        "rope": [attention, *rotary, *([norm] if family.head_norms else [])],
    }
    return functions.get(name) or [layer, *itertools.chain(*functions.values())]


@contextmanager
def unchanged_if_it_raises(model: torch.nn.Module) -> Iterator[None]:
    """Let the model have the modules and classes that it had, if the body raises."""
    before = [(module, type(module), dict(module._modules)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls, children in before:
            module.__class__ = cls
            module._modules.update(children)
        raise


def put_in(model: torch.nn.Module, family: Family, names: Sequence[str]) -> None:
    """Replace the parts that somebody else has not changed."""
    if "rmsnorm" in names:
        replace_modules(model, family.part("RMSNorm"), norm_with_kernel)
    if "swiglu" in names:
        replace_modules(model, family.part("MLP"), mlp_with_kernel)
    rotary = ROTARY[family.model_type]
    unchanged = family.modeling.apply_rotary_pos_emb is rotary
    own = exact_modules.is_from_package_of(family.part("Attention"), called_function(rotary))
    if unchanged and own:  # the rotary function is transformers'
        if "rope" in names:
            change_class(model, CLASSES[Attention][family.model_type])
        if "fused_layer" in names:
            change_class(model, CLASSES[DecoderLayer][family.model_type])
    if set(LOSS_KERNELS) & set(names):
        change_class(model, CLASSES[ForCausalLM][family.model_type])
        change_class(model.lm_head, Linear)


def require_family(model: torch.nn.Module) -> Family:
    """Return the model's family, or raise the TypeError that `apply_kernels` announces."""

    known = of_families("ForCausalLM")
    part = part_outside(model) if isinstance(model, PreTrainedModel) else None
    if isinstance(model, known) and part is None:
        return family_of(model)
    given = f"model is a {type(model).__name__}" + (f" with {part}" if part else "")
    expected = f"expected a causal language model of {', '.join(FAMILIES)}"
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    inside = any(isinstance(module, known) for module in modules if module is not model)
    advice = "unwrap it first" if inside else "the kernels stand for their code alone"
    raise TypeError(f"{given}, {expected}: {advice}.")


def triton_adamw(
    model: torch.nn.Module,
    lr: float,
    stochastic_rounding: bool = False,
    moments: str | None = None,
) -> TritonAdamW:
    """Return AdamW in one kernel per parameter, which steps during the backward.

    So gradients never all exist at once (but with DDP), and they cannot be clipped.  moments: of
    flags.MOMENTS; None: in the parameters' dtype.
    """
    return TritonAdamW(
        stepping.trained(model),
        lr=lr,
        stochastic_rounding=stochastic_rounding,
        step_in_backward=True,
        moments_dtype=torch.uint8 if moments else None,
    )


def model_kernels(kernels: Sequence[str]) -> list[str]:
    """Return those of KERNELS that `apply_kernels` takes: all but the optimizer."""
    return [name for name in kernels if name in MODEL_KERNELS]


def make_optimizer(
    model: torch.nn.Module,
    lr: float,
    kernels: Sequence[str],
    stochastic: bool = False,
    moments: str | None = None,
    **options,
) -> torch.optim.Optimizer:
    """Return `triton_adamw` if adamw is among the kernels, else PyTorch's AdamW with `options`."""
    if "adamw" in kernels:
        return triton_adamw(model, lr, stochastic, moments)
    return stepping.make_optimizer(model, lr, **options)


def norm_with_kernel(norm: torch.nn.Module) -> torch.nn.Module:
    """Return the kernel's module for an RMSNorm; the norm itself where somebody changed it."""
    return TritonRMSNorm.from_llama_rmsnorm(norm) if is_unchanged(norm) else norm


def mlp_with_kernel(mlp: torch.nn.Module) -> torch.nn.Module:
    """Return the kernel's module for an MLP; the MLP where it or its activation changed."""
    unchanged = is_unchanged(mlp) and is_silu(mlp.act_fn)
    return TritonLlamaMLP.from_llama_mlp(mlp) if unchanged else mlp


def has_kernel(model: torch.nn.Module, name: str) -> bool:
    """Return True if any part of the model has the class that this kernel is in."""
    if name == "linear_cross_entropy" and type(model.lm_head) is not Linear:
        return False
    found = [module for module in model.modules() if isinstance(module, KERNEL_CLASSES[name])]
    if name == "fused_layer":
        return any(layer.has_known_parts() for layer in found)
    return bool(found)


def change_class(model: torch.nn.Module, cls: type) -> None:
    """Give every module that is exactly of `cls`'s last base class the class `cls`.

    Nothing happens if somebody replaced the base class's forward.  A forward among the module's
    attributes would stay bound to that module in the copies of torch.nn.DataParallel.
    """
    base = cls.__bases__[-1]
    if not exact_modules.is_as_written(base):
        return
    for module in model.modules():
        if type(module) is base:
            module.__class__ = cls


# ---------------------------------------------------------------- the classes
#
# What the kernels change is the same for all families: `in_families` derives a class from it and
# from each family's class of that name.


def attend(
    attention, q, k, v, position_embeddings, attention_mask=None, past_key_values=None, cache=None,
    **kwargs,
):  # fmt: skip
    """Do what attention's forward does between its projections, with the rotary kernel.

    q is (B, T, heads * D), k and v are (B, T, KV heads * D).  Returns (B, T, heads * D), weights.
    """
    family = family_of(attention)
    heads = *q.shape[:-1], -1, attention.head_dim
    q, k, v = (t.view(heads) for t in (q, k, v))  # (B, T, heads, D)
    rotates = family.rotates is None or getattr(attention, family.rotates)
    if rotates and family.head_norms and takes_head_norms(attention, q.dtype):
        norms = attention.q_norm, attention.k_norm
        weights = (norm.weight for norm in norms)
        q, k = triton_qk_norm_rope(
            q.transpose(1, 2),
            k.transpose(1, 2),
            *weights,
            norms[0].variance_epsilon,
            *position_embeddings,
        )
    else:
        if family.head_norms:
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)  # (B, heads, T, D)
        if rotates:
            in_fp64 = q.dtype == torch.float64
            rotate = ROTARY[family.model_type] if in_fp64 else triton_apply_rotary_pos_emb
            q, k = rotate(q, k, *position_embeddings)
    v = v.transpose(1, 2)
    if cache is not None:  # its name since 5.24
        k, v = cache.update(k, v, attention.layer_idx, kwargs=kwargs)
    elif past_key_values is not None:
        k, v = past_key_values.update(k, v, attention.layer_idx)
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(
        attention.config._attn_implementation, family.modeling.eager_attention_forward
    )
    dropout = attention.attention_dropout if attention.training else 0.0
    attended, weights = interface(
        attention, q, k, v, attention_mask, dropout=dropout, scaling=attention.scaling, **kwargs
    )
    return attended.reshape(*heads[:-2], -1), weights


def takes_head_norms(attention: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Return True if q's and k's norms can be one kernel with the rotation of q, of this dtype."""
    norms = attention.q_norm, attention.k_norm
    return (
        dtype != torch.float64
        and all(type(norm) in NORM and is_untouched(norm) for norm in norms)
        and norms[0].variance_epsilon == norms[1].variance_epsilon
    )


class Attention(torch.nn.Module):
    """With the rotary kernel, and where q and k have norms, with these in it."""

    def forward(self, hidden_states, *args, **kwargs):
        """Return (output, weights or None); hidden_states and the output are (B, T, H)."""
        projected = [project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj)]
        attended, weights = attend(self, *projected, *args, **kwargs)
        return self.o_proj(attended), weights


class DecoderLayer(torch.nn.Module):
    """With norm_linear and swiglu_linear; where these do not fit, with the forward that it had."""

    keep_norm, keep_product = False, False  # for the backward; recompute.py changes it
    calls_no_parts = True  # for `profiler.category_ranges`

    def of_attention(self) -> tuple[torch.nn.Module, ...]:
        return self.self_attn.q_proj, self.self_attn.k_proj, self.self_attn.v_proj

    def of_mlp(self) -> tuple[torch.nn.Module, ...]:
        return self.mlp.gate_proj, self.mlp.up_proj, self.mlp.down_proj

    def has_known_parts(self) -> bool:
        """Return True if no part but a projection is of another class, changed, or has hooks."""
        attention, mlp = self.self_attn, self.mlp
        norms = self.input_layernorm, self.post_attention_layernorm
        if type(attention) not in ATTENTION or type(mlp) not in MLP:
            return False
        if any(type(norm) not in NORM for norm in norms) or not is_silu(mlp.act_fn):
            return False
        return all(map(is_untouched, (attention, mlp, *norms)))

    def fits(self, hidden_states: torch.Tensor, output_attentions: bool | None) -> bool:
        """Return True if `compute` does all that this call wants."""
        if not self.has_known_parts():
            return False
        if output_attentions is None:
            output_attentions = getattr(self.self_attn.config, "output_attentions", False)
        projections = *self.of_attention(), *self.of_mlp()
        return (
            hidden_states.dtype != torch.float64
            and all(is_product(projection, hidden_states.dtype) for projection in projections)
            and not output_attentions
            and (hidden_states.is_meta or not torch.is_autocast_enabled(hidden_states.device.type))
        )

    def forward(self, hidden_states, *args, **kwargs):
        """hidden_states and the result are (B, T, H).  transformers gives all else by name."""
        if not args and self.fits(hidden_states, kwargs.get("output_attentions")):
            return self.compute(hidden_states, **kwargs)
        return super().forward(hidden_states, *args, **kwargs)

    def compute(self, hidden_states, **kwargs):
        """Do what the layer does, by its Functions; the caller has asked `fits`."""
        twice = self.gradient_checkpointing and self.training  # as at recompute.py's level layer
        keep_norm, keep_product = self.keep_norm or twice, self.keep_product or twice
        residual, *projected = norm_linear(
            hidden_states, self.input_layernorm, *self.of_attention(), keep_norm=keep_norm
        )
        attended, _ = attend(self.self_attn, *projected, **kwargs)
        (attended,) = lora_linear(attended, self.self_attn.o_proj)
        residual, out = norm_mlp(
            residual + attended,
            self.post_attention_layernorm,
            *self.of_mlp(),
            keep_norm=keep_norm,
            keep_product=keep_product,
        )
        return residual + out


class ForCausalLM(torch.nn.Module):
    """With the loss from a kernel, where `loss_function` is what the kernels stand for."""

    loss_kernels: Sequence[str] = ()  # of LOSS_KERNELS, set by apply_kernels
    cross_entropy_loss: Callable = staticmethod(cross_entropy_loss)
    takes_max_targets = True  # for `stepping.inputs_of`

    def set_output_embeddings(self, new_embeddings):
        """Make this the lm_head, with the loss in it; resize_token_embeddings makes a new head."""
        super().set_output_embeddings(new_embeddings)
        change_class(self.lm_head, Linear)

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
        inputs_embeds=None, labels=None, use_cache=None, logits_to_keep=0, max_targets=None,
        cache=None, **kwargs,
    ):  # fmt: skip
        """Return the loss of all tokens from a kernel; in training without logits.

        The logits are handed out if lm_head has hooks or is more than a matrix product: somebody
        else may hold them, or their own gradient may need them.  At most max_targets tokens are
        predicted; None: nobody has counted them.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            CACHE: past_key_values if cache is None else cache,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
        }
        whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
        replaceable = labels is not None and whole and self.loss_function is ForCausalLMLoss
        kernels = self.loss_kernels if replaceable and self.dtype != torch.float64 else ()
        head = self.lm_head
        # a call of it is x @ weight.t(), also as a unit of fully_shard
        plain_head = class_of(head) in HEAD and head.bias is None and is_untouched(head)
        without_logits = self.training and plain_head
        linear = (
            without_logits
            and "linear_cross_entropy" in kernels
            and class_of(head) is Linear
            and head.weight.shape[0] == self.config.vocab_size  # if not, others refuse it
        )
        if not linear and "cross_entropy" not in kernels:
            return super().forward(**inputs, labels=labels, logits_to_keep=logits_to_keep, **kwargs)

        asked = kwargs.pop("return_dict", None)
        return_dict = self.config.return_dict if asked is None else asked
        if without_logits and not return_dict:
            expected = "a tuple has no place for logits that do not exist"
            raise ValueError(f"return_dict is False, expected True: {expected}.")
        outputs = self.model(**inputs, **kwargs, return_dict=True)
        hidden_states = outputs.last_hidden_state  # (B, T, H)
        if linear:
            loss = linear_cross_entropy_loss(hidden_states, head, labels, max_targets, **kwargs)
        else:
            logits = head(hidden_states)  # (B, T, V)
            loss = self.cross_entropy_loss(
                logits, labels, vocab_size=self.config.vocab_size, inplace=without_logits, **kwargs
            )
        output = CausalLMOutputWithPast(
            loss=loss, logits=None if without_logits else logits,
            hidden_states=outputs.hidden_states, attentions=outputs.attentions,
            **{CACHE: getattr(outputs, CACHE)},
        )  # fmt: skip
        return output if return_dict else output.to_tuple()


def in_families(part: type, bases: dict[str, type], module: str) -> dict[str, type]:
    """Return, by model_type, a class derived from `part` and the base of each family.

    The classes carry the names of their bases: transformers writes the model's name into its
    configuration, and FSDP finds the layers by theirs.  `module` is where pickle finds them.
    """
    attributes = {"__module__": module, "__doc__": part.__doc__}
    return {kind: type(base.__name__, (part, base), attributes) for kind, base in bases.items()}


CLASSES = {  # part -> model_type -> the family's class with the kernels
    part: in_families(part, {kind: f.part(part.__name__) for kind, f in FAMILIES.items()}, __name__)
    for part in (Attention, DecoderLayer, ForCausalLM)
}
for of_part in CLASSES.values():
    globals().update({cls.__name__: cls for cls in of_part.values()})


# ---------------------------------------------------------------- what a kernel may stand for


def of_families(part: str, *ours: type) -> tuple[type, ...]:
    """Return transformers' class of this part in each family, and our own."""
    return *(family.part(part) for family in FAMILIES.values()), *ours


ATTENTION = of_families("Attention", *CLASSES[Attention].values())
HEAD = torch.nn.Linear, Linear
MLP = of_families("MLP", TritonLlamaMLP)
NORM = of_families("RMSNorm", TritonRMSNorm)
KERNEL_CLASSES = {
    "rmsnorm": TritonRMSNorm,
    "swiglu": TritonLlamaMLP,
    "rope": Attention,
    "fused_layer": DecoderLayer,
    **dict.fromkeys(LOSS_KERNELS, ForCausalLM),
}
