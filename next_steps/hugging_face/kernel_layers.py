"""The layers that Hugging Face's package `kernels` puts into models of several families.

`kernelize` gives a module the forward of one of these classes.  The module keeps its parameters and
its other attributes, so a class has a forward and nothing else.  It is named as transformers names
the place that the layer is for: `RMSNorm` and `rotary_pos_emb` stand beside the code of a model,
`SwiGLUMLP` and `ForCausalLMLoss` are names that a user gives to an MLP and to a loss.

A model in float64 is computed without the kernels.
"""

import torch

from cross_entropy_kernel import TritonCrossEntropyLoss
from next_steps.layers.llama_mlp import swiglu_mlp
from next_steps.lessons.rope_kernel import rope_reference, triton_apply_rotary_pos_emb
from rmsnorm_kernel import TritonRMSNorm

__all__ = ["ForCausalLMLoss", "RMSNorm", "SwiGLUMLP", "rotary_pos_emb"]


class RMSNorm(torch.nn.Module):
    """In place of LlamaRMSNorm and its like: y = weight * x / rms(x).  Not Gemma's 1 + weight."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return y (..., H) of hidden_states (..., H); the module has weight (H,) and its eps."""
        y = TritonRMSNorm.forward(self, hidden_states)
        if y.dtype == hidden_states.dtype:
            return y
        # a wider weight: most norms return its dtype, OLMo 2's and others' round to x's
        no_rows = hidden_states.new_empty(0, hidden_states.shape[-1])
        return y.to(type(self).forward(self, no_rows).dtype)


class SwiGLUMLP(torch.nn.Module):
    """In place of LlamaMLP and its like, whose activation it calls where that is not SiLU."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP (..., H) of x (..., H)."""
        return swiglu_mlp(self, x)


class rotary_pos_emb(torch.nn.Module):
    """In place of the function apply_rotary_pos_emb, of which `kernels` makes a module."""

    has_backward = True
    can_torch_compile = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        """Return q and k turned; q, k are (B, heads, T, D), or (B, T, heads, D) if told by 2."""
        if q.dtype == torch.float64 and unsqueeze_dim == 1:
            return rope_reference(q, k, cos, sin)
        return triton_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


class ForCausalLMLoss(torch.nn.Module):
    """In place of transformers' function ForCausalLMLoss: token t predicts token t + 1."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        logits,
        labels,
        vocab_size,
        num_items_in_batch=None,
        ignore_index=-100,
        shift_labels=None,
        **kwargs,
    ):
        """Return the loss () fp32 of logits (B, T, V) and labels (B, T) int64."""
        if shift_labels is None:  # the labels are shifted: a shift of the logits would copy them
            shift_labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
        logits = logits.view(*shift_labels.shape, vocab_size)
        if logits.dtype == torch.float64:
            logits = logits.float()  # as transformers does
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = TritonCrossEntropyLoss(ignore_index, reduction)(
            logits, shift_labels.to(logits.device)
        )
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch
