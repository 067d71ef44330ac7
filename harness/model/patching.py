"""Put other code into a Hugging Face model: in place of its modules, and of its loss."""

import inspect
from collections.abc import Callable

import torch

from harness.model.architecture import IGNORE_INDEX


def called_function(function: Callable) -> Callable:
    """Return the function that a call of `function` runs.

    Hugging Face's package `kernels` makes a module of a function, whose forward calls the function
    from its closure; `kernelize` gives the module another forward.
    """
    if not isinstance(function, torch.nn.Module):
        return function
    closure = inspect.getclosurevars(function.forward).nonlocals
    return next(filter(inspect.isfunction, closure.values()), function.forward)


def replace_modules(model: torch.nn.Module, cls: type, make: Callable) -> int:
    """Replace every submodule that is exactly of class `cls` by make(old); return how many."""
    # a complete list first: whoever changes a tree while walking it skips some branches
    found = [(name, module) for name, module in model.named_modules() if type(module) is cls]
    n_replaced = 0
    for name, module in found:
        parent_name, _, attribute = name.rpartition(".")
        replacement = make(module)
        setattr(model.get_submodule(parent_name), attribute, replacement)
        n_replaced += replacement is not module
    return n_replaced


def causal_lm_loss(cross_entropy: Callable) -> Callable:
    """Return a drop-in for a Hugging Face model's `loss_function`, around cross_entropy.

    Token t predicts token t + 1.  The labels are shifted, not the logits: a shift of the logits
    needs a copy as large as the logits.  The result has ForCausalLMLoss's arguments in the same
    order.  `shift_labels` replace the labels and are not shifted.  `num_items_in_batch` divides the
    sum of the losses in place of their number.

    Args:
        cross_entropy: cross_entropy(logits, targets, ignore_index) is the mean loss over the
            targets that are not ignore_index, from logits (B, T, V) and targets (B, T) int64.
    """

    def loss_function(
        logits,
        labels,
        vocab_size=None,
        num_items_in_batch=None,
        ignore_index=IGNORE_INDEX,
        shift_labels=None,
        **kwargs,
    ) -> torch.Tensor:
        if vocab_size is not None and logits.shape[-1] != vocab_size:
            raise ValueError(
                f"vocab_size is {vocab_size}, expected {logits.shape[-1]}, the logits' last size: "
                f"give the model's configuration that of its head."
            )
        if shift_labels is None:
            pad = torch.nn.functional.pad
            shift_labels = pad(labels[..., 1:], (0, 1), value=ignore_index)  # (B, T)
        shift_labels = shift_labels.to(logits.device)
        loss = cross_entropy(logits, shift_labels, ignore_index)
        if num_items_in_batch is not None:  # gradient accumulation: a mean over all micro-batches
            if isinstance(num_items_in_batch, torch.Tensor) and num_items_in_batch.ndim > 0:
                # a single number may stay where it is
                num_items_in_batch = num_items_in_batch.to(loss.device)
            n_valid = (shift_labels != ignore_index).sum()
            # The quotient comes first: with one micro-batch it is exactly 1, and a fused loss need
            # not scale its gradients.  Without any target in the whole step it is NaN.
            share = n_valid.float() / num_items_in_batch
            # The mean over no target is NaN.  Such a micro-batch must add nothing to the others.
            loss = torch.where(n_valid > 0, loss * share.nan_to_num(), share)
        return loss

    return loss_function
