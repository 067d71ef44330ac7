"""A loss and modules put into a model give the unpatched model's loss and gradients."""

import math

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from harness.benchmark.checking import relative_error
from harness.cli.device import DEVICE
from harness.data.dataset import IGNORE_INDEX as IGNORE
from harness.model import architecture, loading, patching
from judging.circumstances import OTHER_DEFAULTS, default_dtype
from tests.small_workloads import (
    largest_error,
    tiny_batch,
    tiny_workload,
)

# ---------------------------------------------------------------- loss


def shifted_cross_entropy(logits, targets, ignore_index):
    rows, targets = logits.flatten(0, -2), targets.flatten()
    return torch.nn.functional.cross_entropy(rows, targets, ignore_index=ignore_index)


OURS = patching.causal_lm_loss(shifted_cross_entropy)


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 9, 50, generator=generator) + 1
    labels = torch.randint(50, (3, 9), generator=generator)
    for ignored in (labels[0, :4], labels[1, -2:], labels[2]):  # prompt, padding, a whole row
        ignored.fill_(IGNORE)
    return logits.to(DEVICE), labels.to(DEVICE)


def assert_hugging_faces(logits, labels, **options) -> torch.Tensor:
    """Loss and gradient are those of ForCausalLMLoss; returns its loss."""
    results = []
    for loss_function in (ForCausalLMLoss, OURS):
        leaf = logits.clone().requires_grad_()
        loss = loss_function(logits=leaf, labels=labels, vocab_size=50, **options)
        loss.sum().backward()
        results.append({"loss": loss.detach(), "gradient": leaf.grad})
    assert results[0]["loss"].shape == results[1]["loss"].shape
    assert largest_error(results[1], results[0])[0] < 1e-6
    return results[0]["loss"]


@pytest.mark.parametrize("items", [None, 17, torch.tensor(17)])
def test_loss_and_gradient_are_hugging_faces(items):
    logits, labels = logits_and_labels()
    theirs = assert_hugging_faces(logits, labels, num_items_in_batch=items)
    for dtype in OTHER_DEFAULTS:
        with default_dtype(dtype):
            assert_hugging_faces(logits, labels, num_items_in_batch=items)
    off_by_one = OURS(logits, None, shift_labels=labels)
    assert relative_error(off_by_one, theirs) > 1e-3, "this comparison cannot fail"


@pytest.mark.parametrize("n_targets", [1, 3, 7, 41, 49])
def test_a_single_micro_batch_is_scaled_by_exactly_one(n_targets):
    """n / n is 1, but loss * n / n is not always the loss; a fused loss scales its gradients by
    anything but 1.
    """
    loss, scales = torch.tensor(0.1, requires_grad=True), []
    loss.register_hook(lambda gradient: scales.append(gradient.item()))
    labels = torch.full((1, 60), IGNORE)
    labels[0, 1 : 1 + n_targets] = 5
    loss_function, logits = patching.causal_lm_loss(lambda *_: loss.clone()), torch.zeros(1, 60, 7)
    for items in (n_targets, torch.tensor(n_targets)):
        scaled = loss_function(logits, labels, num_items_in_batch=items)
        scaled.backward()
        assert torch.equal(scaled, loss)
    assert scales == [1.0, 1.0]
    assert loss_function(logits, labels, num_items_in_batch=2 * n_targets) == loss / 2


def test_a_micro_batch_without_targets_adds_nothing():
    logits = torch.randn(1, 4, 50, requires_grad=True)
    labels = torch.full((1, 4), IGNORE)
    loss = OURS(logits, labels, num_items_in_batch=torch.tensor(7))
    loss.backward()
    assert loss == 0 and not logits.grad.any()


@pytest.mark.parametrize("items", [0, torch.tensor(0)])
def test_a_step_without_targets_has_no_loss_and_hands_no_nan_to_the_gradients(items):
    """As one large batch; a fused loss multiplies gradients of zero by what it is handed."""
    mean_of_none = torch.tensor(math.nan, requires_grad=True)
    loss_function = patching.causal_lm_loss(lambda *_: mean_of_none)
    labels = torch.full((1, 4), IGNORE)
    loss = loss_function(torch.zeros(1, 4, 50), labels, num_items_in_batch=items)
    loss.backward()
    assert loss.isnan() and mean_of_none.grad == 0


@pytest.mark.parametrize("items", [None, 17, torch.tensor([17])])
@pytest.mark.parametrize("shifted", [False, True])
def test_another_ignore_index_is_hugging_faces(items, shifted):
    logits, labels = logits_and_labels()
    labels = labels.clamp_min(0)
    options = {"num_items_in_batch": items}
    if shifted:
        options["shift_labels"] = labels.flip(1)
    theirs = assert_hugging_faces(logits, labels, ignore_index=0, **options)
    everything_counts = ForCausalLMLoss(logits, labels, 50, **options)
    assert relative_error(everything_counts, theirs) > 1e-3, "this comparison cannot fail"


def test_arguments_come_in_hugging_faces_order():
    logits, labels = logits_and_labels()
    labels = labels.clamp_min(0)
    arguments = logits, labels, 50, 17, 0, labels.flip(1)
    assert relative_error(OURS(*arguments), ForCausalLMLoss(*arguments)) < 1e-6


@pytest.mark.parametrize("vocab_size", [49, 100])
def test_another_vocabulary_than_the_logits_is_refused(vocab_size):
    said = f"vocab_size is {vocab_size}, expected 50, the logits' last size"
    with pytest.raises(ValueError, match=said):
        OURS(*logits_and_labels(), vocab_size)


def test_a_subclass_and_what_make_gives_back_stay():
    class TheirNorm(LlamaRMSNorm):
        pass

    model = loading.load_model(tiny_workload())
    theirs, final = TheirNorm(128).to(DEVICE), model.model.norm
    model.model.layers[0].input_layernorm = theirs

    def make(norm):
        return norm if norm is final else torch.nn.Identity()

    n_replaced = patching.replace_modules(model, LlamaRMSNorm, make)
    assert n_replaced == 2 * model.config.num_hidden_layers - 1
    assert model.model.norm is final and model.model.layers[0].input_layernorm is theirs


def test_labels_that_come_shifted_are_not_shifted_again():
    logits, labels = logits_and_labels()
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
    assert torch.equal(OURS(logits, labels), OURS(logits, None, shift_labels=shifted))


def test_the_shift_copies_no_logits():
    model = loading.load_model(tiny_workload())
    produced, received = [], []
    model.lm_head.register_forward_hook(lambda module, inputs, output: produced.append(output))

    def cross_entropy(logits, targets, ignore_index):
        received.append(logits)
        return shifted_cross_entropy(logits, targets, ignore_index)

    model.loss_function = patching.causal_lm_loss(cross_entropy)
    batch = tiny_batch()
    model(input_ids=batch.input_ids, labels=batch.labels)
    assert received[0].shape == produced[0].shape == (2, 12, architecture.BYTE_VOCABULARY)
    assert received[0].data_ptr() == produced[0].data_ptr()
