"""The loss of a Hugging Face LLaMA by a kernel: from its logits, or from its hidden states."""

import torch

from cross_entropy_kernel import TritonCrossEntropyLoss
from harness.patching import causal_lm_loss
from next_steps.linear_cross_entropy_kernel import TritonLinearCrossEntropyLoss


def cross_entropy_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    inplace: bool = False,
    **kwargs,
) -> torch.Tensor:
    """ForCausalLMLoss by the kernel, which leaves the gradient in the logits' memory if inplace.

    Args:
        logits: (B, T, V).
        labels: (B, T) int64.
        kwargs: those of `causal_lm_loss`.
    """

    def cross_entropy(logits, targets, ignore_index):
        return TritonCrossEntropyLoss(ignore_index, inplace=inplace)(logits, targets)

    return causal_lm_loss(cross_entropy)(logits, labels, **kwargs)


def linear_cross_entropy_loss(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    max_targets: int | None = None,
    **kwargs,
) -> torch.Tensor:
    """The same from the hidden states (B, T, H) and the head's weight (V, H).

    No more than max_targets tokens are predicted, if somebody has counted them.
    """

    def cross_entropy(hidden_states, targets, ignore_index):
        loss_function = TritonLinearCrossEntropyLoss(ignore_index)
        return loss_function(hidden_states, weight, targets, max_targets)

    return causal_lm_loss(cross_entropy)(hidden_states, labels, **kwargs)
