"""The loss of a Hugging Face LLaMA by a kernel: from its logits, or from its hidden states."""

import torch

from cross_entropy_kernel import TritonCrossEntropyLoss
from harness.model.architecture import IGNORE_INDEX
from harness.model.patching import causal_lm_loss
from next_steps.lessons.linear_cross_entropy_kernel import TritonLinearCrossEntropyLoss


def cross_entropy_loss(logits, labels, inplace=False, **kwargs):
    """Compute ForCausalLMLoss by the kernel, of logits (B, T, V) and labels (B, T) int64.

    `inplace` leaves the gradient in the logits' memory.
    """

    def cross_entropy(logits, targets, ignore_index):
        return TritonCrossEntropyLoss(ignore_index, inplace=inplace)(logits, targets)

    return causal_lm_loss(cross_entropy)(logits, labels, **kwargs)


class Linear(torch.nn.Linear):
    """A head that returns logits or, given the targets, their loss by a kernel, without logits.

    Its hooks run in both cases: fully_shard's gather the weight and reduce its gradient.
    """

    def forward(self, input, targets=None, ignore_index=IGNORE_INDEX, max_targets=None):
        """Logits (..., V) of input (..., H); with targets (...) int64 their mean loss, () fp32."""
        if targets is None:
            return super().forward(input)
        return TritonLinearCrossEntropyLoss(ignore_index)(input, self.weight, targets, max_targets)


def linear_cross_entropy_loss(hidden_states, head, labels, max_targets=None, **kwargs):
    """Compute the same loss from hidden states (B, T, H) and a head without a bias."""

    def cross_entropy(hidden_states, targets, ignore_index):
        return head(hidden_states, targets, ignore_index, max_targets)

    return causal_lm_loss(cross_entropy)(hidden_states, labels, **kwargs)
