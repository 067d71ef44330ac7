"""The two losses of a LLaMA by a kernel, called as its forward calls them."""

import pytest
import torch
import torch.nn.functional as F

from harness.benchmark.checking import relative_error
from harness.cli.device import DEVICE
from next_steps.patches.llama_losses import Linear, cross_entropy_loss, linear_cross_entropy_loss

B, T, H, V = 2, 6, 16, 40


def make_inputs(ignore_index: int = -100):
    """Hidden states, the head, and labels of which the first half is ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((B, T, H), generator=generator)
    weight = torch.randn((V, H), generator=generator) / H**0.5
    labels = torch.randint(1, V, (B, T), generator=generator)
    labels[:, : T // 2] = ignore_index
    head = Linear(H, V, bias=False)
    head.weight.data = weight
    return hidden.to(DEVICE), head.to(DEVICE), labels.to(DEVICE)


@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_another_label_may_be_ignored(ignore_index):
    hidden, head, labels = make_inputs(ignore_index)
    logits = head(hidden)
    targets = labels[:, 1:].flatten()
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=ignore_index)
    n_targets = int((targets != ignore_index).sum())
    found = [
        cross_entropy_loss(logits, labels, ignore_index=ignore_index),
        linear_cross_entropy_loss(hidden, head, labels, ignore_index=ignore_index),
        linear_cross_entropy_loss(hidden, head, labels, n_targets, ignore_index=ignore_index),
    ]
    assert all(relative_error(loss, expected) < 1e-5 for loss in found)


def test_too_small_a_number_of_targets_is_noticed():
    hidden, head, labels = make_inputs()
    assert linear_cross_entropy_loss(hidden, head, labels, B * T // 2).isfinite()
    assert linear_cross_entropy_loss(hidden, head, labels, B * T // 2 - 1).isnan()
