"""Launches of Triton kernels, seen by others than the GPU."""

import contextlib
from collections.abc import Callable, Iterator

from triton.runtime.jit import KernelInterface


@contextlib.contextmanager
def replaced(owner: object, **values) -> Iterator[None]:
    """Give a module, a class or an object these attributes meanwhile."""
    own = {name: value for name, value in vars(owner).items() if name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            setattr(owner, name, own[name]) if name in own else delattr(owner, name)


@contextlib.contextmanager
def intercepted(launch: Callable) -> Iterator[None]:
    """Call `launch(run, kernel, grid, arguments, options)` for each `kernel[grid](...)`.

    `run(kernel, grid)(*arguments, **options)` makes a launch and returns what Triton does.
    """
    run = KernelInterface.__getitem__

    def subscript(kernel, grid) -> Callable:
        return lambda *arguments, **options: launch(run, kernel, grid, arguments, options)

    with replaced(KernelInterface, __getitem__=subscript):
        yield
