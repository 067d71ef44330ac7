"""A loss and modules put into a model give the unpatched model's loss and gradients."""

import math

import pytest
import torch

from harness.benchmark.checking import DEVICE, relative_error
from harness.data import dataset
from harness.data.dataset import IGNORE_INDEX as IGNORE
from harness.model import architecture, loading, patching
from next_steps.patches.apply_kernels import apply_kernels
from rmsnorm_kernel import TritonRMSNorm
from tests.small_workloads import (
    largest_error,
    loss_and_gradients,
    tiny_batch,
    tiny_workload,
    uneven_norms,
)

# isort: split
# after the harness, which decides how triton (imported by these) will run
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama.modeling_llama import LlamaRMSNorm

PLAYBOOK = ["rmsnorm", "cross_entropy"]

# ---------------------------------------------------------------- loss


def shifted_cross_entropy(logits, targets, ignore_index):
    rows, targets = logits.flatten(0, -2), targets.flatten()
    return torch.nn.functional.cross_entropy(rows, targets, ignore_index=ignore_index)


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 9, 50, generator=generator) + 1
    labels = torch.randint(50, (3, 9), generator=generator)
    # prompt, padding, a whole row
    labels[0, :4], labels[1, -2:], labels[2] = (
        IGNORE,
        IGNORE,
        IGNORE,
    )
    return logits.to(DEVICE), labels.to(DEVICE)


@pytest.mark.parametrize("items", [None, 17, torch.tensor(17)])
def test_loss_and_gradient_are_hugging_faces(items):
    logits, labels = logits_and_labels()
    results = []
    for loss_function in (ForCausalLMLoss, patching.causal_lm_loss(shifted_cross_entropy)):
        leaf = logits.clone().requires_grad_()
        loss = loss_function(logits=leaf, labels=labels, vocab_size=50, num_items_in_batch=items)
        loss.backward()
        results.append({"loss": loss.detach(), "gradient": leaf.grad})
    assert largest_error(results[1], results[0])[0] < 1e-6
    off_by_one = patching.causal_lm_loss(shifted_cross_entropy)(logits, None, shift_labels=labels)
    assert relative_error(off_by_one, results[0]["loss"]) > 1e-3, "this comparison cannot fail"


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
    labels = torch.full((1, 4), dataset.IGNORE_INDEX)
    loss_function = patching.causal_lm_loss(shifted_cross_entropy)
    loss = loss_function(logits, labels, num_items_in_batch=torch.tensor(7))
    loss.backward()
    assert loss == 0 and not logits.grad.any()


@pytest.mark.parametrize("items", [0, torch.tensor(0)])
def test_a_step_without_targets_has_no_loss_and_hands_no_nan_to_the_gradients(items):
    """As one large batch; a fused loss multiplies gradients of zero by what it is handed."""
    mean_of_none = torch.tensor(math.nan, requires_grad=True)
    loss_function = patching.causal_lm_loss(lambda *_: mean_of_none)
    labels = torch.full((1, 4), dataset.IGNORE_INDEX)
    loss = loss_function(torch.zeros(1, 4, 50), labels, num_items_in_batch=items)
    loss.backward()
    assert loss.isnan() and mean_of_none.grad == 0


@pytest.mark.parametrize("items", [None, 17, torch.tensor([17])])
@pytest.mark.parametrize("shifted", [False, True])
def test_another_ignore_index_is_hugging_faces(items, shifted):
    logits, labels = logits_and_labels()
    options = {"vocab_size": 50, "num_items_in_batch": items, "ignore_index": 0}
    labels = labels.clamp_min(0)
    if shifted:
        options["shift_labels"] = labels.flip(1)
    results = []
    for loss_function in (ForCausalLMLoss, patching.causal_lm_loss(shifted_cross_entropy)):
        leaf = logits.clone().requires_grad_()
        loss = loss_function(leaf, labels, **options)
        loss.sum().backward()
        results.append({"loss": loss.detach(), "gradient": leaf.grad})
    assert results[0]["loss"].shape == results[1]["loss"].shape
    assert largest_error(results[1], results[0])[0] < 1e-6
    everything_counts = ForCausalLMLoss(logits, labels, **options | {"ignore_index": IGNORE})
    assert relative_error(everything_counts, results[0]["loss"]) > 1e-3, (
        "this comparison cannot fail"
    )


def test_arguments_come_in_hugging_faces_order():
    logits, labels = logits_and_labels()
    labels = labels.clamp_min(0)
    arguments = logits, labels, 50, 17, 0, labels.flip(1)
    found = patching.causal_lm_loss(shifted_cross_entropy)(*arguments)
    assert relative_error(found, ForCausalLMLoss(*arguments)) < 1e-6


def test_another_vocabulary_than_the_logits_is_refused():
    logits, labels = logits_and_labels()
    for vocab_size in (49, 100):
        with pytest.raises(
            ValueError, match=f"vocab_size is {vocab_size}, expected 50, the logits' last size"
        ):
            patching.causal_lm_loss(shifted_cross_entropy)(logits, labels, vocab_size)


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
    loss_function = patching.causal_lm_loss(shifted_cross_entropy)
    assert torch.equal(
        loss_function(logits, labels), loss_function(logits, None, shift_labels=shifted)
    )


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


# ---------------------------------------------------------------- modules


def test_every_norm_is_replaced_and_no_weight_copied():
    model = uneven_norms(loading.load_model(tiny_workload()))
    before, config = dict(model.named_parameters()), model.config
    values = {name: weight.clone() for name, weight in before.items()}
    n_replaced = patching.replace_modules(model, LlamaRMSNorm, TritonRMSNorm.from_llama_rmsnorm)
    norms = [module for module in model.modules() if type(module) is TritonRMSNorm]
    assert n_replaced == len(norms) == 2 * config.num_hidden_layers + 1
    assert not any(type(module) is LlamaRMSNorm for module in model.modules())
    assert all(norm.variance_epsilon == config.rms_norm_eps and norm.training for norm in norms)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(
        after[name] is before[name] and torch.equal(after[name], values[name]) for name in before
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "names", [[], ["rmsnorm"], ["cross_entropy"], ["rmsnorm", "cross_entropy"]]
)
def test_each_named_kernel_is_patched_in_and_no_other(names):
    """Equal numbers prove nothing about a kernel that does not run."""
    batch = tiny_batch(batch_size=1, seq_len=6)
    model = uneven_norms(loading.load_model(tiny_workload()))
    expected = loss_and_gradients(model, batch)
    apply_kernels(model, names)
    n_norms = sum(type(module) is TritonRMSNorm for module in model.modules())
    assert n_norms == (5 if "rmsnorm" in names else 0)
    loss = model(input_ids=batch.input_ids, labels=batch.labels).loss
    ours = loss.grad_fn.name().endswith("CrossEntropyFunctionBackward")
    assert ours == ("cross_entropy" in names)
    assert largest_error(loss_and_gradients(model, batch), expected)[0] < 1e-5


@pytest.mark.exhaustive
def test_patched_model_has_the_unpatched_loss_and_gradients():
    batch = tiny_batch()
    model = uneven_norms(loading.load_model(tiny_workload()))
    expected = loss_and_gradients(model, batch)
    apply_kernels(model, PLAYBOOK)
    error, name = largest_error(loss_and_gradients(model, batch), expected)
    assert error < 1e-5, f"{name} is off by {error:.1e}"


@pytest.mark.exhaustive
def test_a_wrong_kernel_changes_loss_or_gradients():
    def wrong_eps(module):
        norm = TritonRMSNorm.from_llama_rmsnorm(module)
        norm.variance_epsilon = 1e-6
        return norm

    def only_the_target_entries(model):
        def cross_entropy(logits, targets, ignore_index):
            keep = torch.nn.functional.one_hot(targets.clamp_min(0), logits.shape[-1])
            logits.register_hook(lambda gradient: gradient * keep)
            return shifted_cross_entropy(logits, targets, ignore_index)

        model.loss_function = patching.causal_lm_loss(cross_entropy)

    batch = tiny_batch()
    for spoil in (
        lambda model: patching.replace_modules(model, LlamaRMSNorm, wrong_eps),
        lambda model: patching.replace_modules(
            model, LlamaRMSNorm, lambda m: TritonRMSNorm(64).to(DEVICE)
        ),
        only_the_target_entries,
    ):
        model = uneven_norms(loading.load_model(tiny_workload()))
        expected = loss_and_gradients(model, batch)
        spoil(model)
        norms = [m for m in model.modules() if type(m) is TritonRMSNorm]
        found = loss_and_gradients(model, batch)
        assert largest_error(found, expected)[0] > 1e-4, (
            f"not noticed: {norms[:1] or 'masked gradient'}"
        )


@pytest.mark.exhaustive
def test_gradient_accumulation_adds_up_to_one_large_batch():
    model = uneven_norms(loading.load_model(tiny_workload()))
    batch = tiny_batch(batch_size=2)
    batch.labels[1, :9] = IGNORE  # so that the two halves weigh differently
    expected = loss_and_gradients(model, batch)
    n_targets = int((batch.labels[:, 1:] != IGNORE).sum())

    apply_kernels(model, PLAYBOOK)
    model.zero_grad(set_to_none=True)
    loss = torch.zeros((), device=DEVICE)
    for row in range(2):
        ids, labels = batch.input_ids[row : row + 1], batch.labels[row : row + 1]
        part = model(input_ids=ids, labels=labels, num_items_in_batch=n_targets).loss
        part.backward()
        loss += part.detach()
    found = {"loss": loss, **{name: p.grad for name, p in model.named_parameters()}}
    error, name = largest_error(found, expected)
    assert error < 1e-5, f"{name} is off by {error:.1e}"
