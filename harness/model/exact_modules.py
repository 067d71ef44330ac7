"""Is a module exactly what a kernel stands for?  Whoever computes in a module's place asks here.

fully_shard gives a module a class of its own and hooks that gather its weights in a call.  Such a
module is unchanged, because whoever calls it gets its result.  It is no matrix, because its weight
is whole only during the call.
"""

from collections.abc import Callable

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
PARAMETER_TYPES = torch.nn.Parameter, type(None), torch.Tensor, DTensor  # of a parameter
HARMLESS_HOOKS = (
    "transformers.utils.output_capturing",  # they stay after output_attentions=True, and do nothing
    "torch.distributed.fsdp",  # they gather a module's weights while it is called
)


def class_of(module: torch.nn.Module) -> type:
    """Return the module's class; where fully_shard has derived one, the class it started from."""
    cls = type(module)
    return cls.__bases__[1] if cls.__bases__[0] is FSDPModule else cls


def has_hooks(module: torch.nn.Module) -> bool:
    """Return True if the module has hooks that may see or change what goes in or out."""
    hooks = [hook for name in HOOKS for hook in getattr(module, name).values()]
    return not all(
        str(getattr(hook, "__module__", None)).startswith(HARMLESS_HOOKS) for hook in hooks
    )


def has_global_hooks() -> bool:
    """Return True if somebody has hooks on all modules."""
    return torch.nn.modules.module._has_any_global_hook()


def is_from_package_of(cls: type, function: Callable) -> bool:
    """Return True if the function comes from the package that the class comes from."""
    names = getattr(function, "__globals__", {}).get("__name__", ""), cls.__module__
    package, of_class = (name.partition(".")[0] for name in names)
    return package == of_class


def is_as_written(cls: type) -> bool:
    """Return True if the class has a forward of its own package: nobody else has replaced it."""
    return is_from_package_of(cls, cls.forward)


def has_plain_parameters(module: torch.nn.Module) -> bool:
    """Return True if products with the module's own parameters are PyTorch's.

    A subclass of a tensor, such as a quantized weight of torchao, may have products of its own.
    """
    for p in module._parameters.values():  # noqa: SIM110  each call asks, all() takes longer
        if type(p) not in PARAMETER_TYPES:
            return False
    return True


def is_unchanged(module: torch.nn.Module) -> bool:
    """Return True if a call runs the forward that the class was written with, and no hooks.

    Its parameters are plain tensors, too.
    """
    as_written = is_as_written(class_of(module)) and "forward" not in vars(module)
    return as_written and has_plain_parameters(module) and not has_hooks(module)


def is_untouched(module: torch.nn.Module) -> bool:
    """Return True if the module is unchanged and nobody has hooks on all modules."""
    return is_unchanged(module) and not has_global_hooks()


def is_linear(module: torch.nn.Module) -> bool:
    """Return True if the module is x @ weight.t() + bias: both may be used without a call."""
    return type(module) is torch.nn.Linear and is_unchanged(module)


def is_matrix(module: torch.nn.Module) -> bool:
    """Return True if the module is x @ weight.t(), without a bias."""
    return is_linear(module) and module.bias is None
