"""Putting other code into a Hugging Face model: in the place of its modules, and of its loss."""

import inspect
from collections.abc import Callable

import torch
from torch.distributed.fsdp import FSDPModule

from harness.model.architecture import IGNORE_INDEX

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
# of transformers: they stay after an output_attentions=True, and do nothing
RECORDERS = "transformers.utils.output_capturing"
# of fully_shard: they gather a module's weights while it is called
GATHERERS = "torch.distributed.fsdp"


def class_of(module: torch.nn.Module) -> type:
    """Its class; if fully_shard has derived one from it, that which it was derived from."""
    cls = type(module)
    return cls.__bases__[1] if cls.__bases__[0] is FSDPModule else cls


def has_hooks(module: torch.nn.Module) -> bool:
    """Has it hooks that may see or change what goes in or out?"""
    hooks = [hook for name in HOOKS for hook in getattr(module, name).values()]
    origins = [str(getattr(hook, "__module__", None)) for hook in hooks]
    return not all(origin.startswith((RECORDERS, GATHERERS)) for origin in origins)


def called_function(function: Callable) -> Callable:
    """Return the function that a call of `function` runs.

    Hugging Face's package `kernels` makes a module of a function of transformers.  The module's
    forward calls the function, which is a variable of the closure.  `kernelize` gives the module
    another forward.
    """
    if not isinstance(function, torch.nn.Module):
        return function
    closure = inspect.getclosurevars(function.forward).nonlocals
    return next(filter(inspect.isfunction, closure.values()), function.forward)


def replace_modules(model: torch.nn.Module, cls: type, make: Callable) -> int:
    """Replace every submodule that is exactly of class `cls` by make(old); returns how many.

    A subclass is somebody's own code and stays, as does a module that make gives back.  The list is
    complete before anything is replaced: to change a tree while walking it skips some branches.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module) is cls]
    n_replaced = 0
    for name, module in found:
        parent_name, _, attribute = name.rpartition(".")
        replacement = make(module)
        setattr(model.get_submodule(parent_name), attribute, replacement)
        n_replaced += replacement is not module
    return n_replaced


def causal_lm_loss(cross_entropy: Callable) -> Callable:
    """A drop-in for a Hugging Face model's `loss_function`, around cross_entropy.

    Token t predicts token t + 1.  The labels are shifted, not the logits: a
    shift of the logits cuts a row out of every sequence, and the copy that this
    takes is as large as the logits themselves.

    Args:
        cross_entropy: cross_entropy(logits, targets, ignore_index) is the mean loss over the
            targets that are not ignore_index, from logits (B, T, V) and targets (B, T) int64.

    Returns:
        A function of what Hugging Face's ForCausalLMLoss takes, in the same order:
        logits (B, T, V); labels (B, T) int64; vocab_size, which must be V; num_items_in_batch, a
        number or a tensor, by which the sum of the losses is divided, instead of their number;
        ignore_index, the label that does not count; shift_labels (B, T), which count in place of
        the labels and are not shifted again.  Others are ignored, as there.
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
        if num_items_in_batch is not None:  # gradient accumulation: mean over all its micro-batches
            if isinstance(num_items_in_batch, torch.Tensor) and num_items_in_batch.ndim > 0:
                # a single number may stay where it is
                num_items_in_batch = num_items_in_batch.to(loss.device)
            n_valid = (shift_labels != ignore_index).sum()
            # The quotient first: of a single micro-batch it is exactly 1, which spares a fused loss
            # scaling its gradients.  It is NaN where no micro-batch has a target.
            share = n_valid / num_items_in_batch
            # The mean over no target is NaN, and such a micro-batch must add nothing to the others.
            loss = torch.where(n_valid > 0, loss * share.nan_to_num(), share)
        return loss

    return loss_function
