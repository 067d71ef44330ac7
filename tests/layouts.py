"""Where the elements of a tensor may lie in memory: what PyTorch allows, a kernel must read."""

import itertools
import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """An order of the dimensions in memory, and what lies between the elements."""

    order: tuple[int, ...]  # the dimensions, from the outermost in memory to the innermost
    steps: tuple[
        int, ...
    ]  # per dimension: 1 takes every element, 2 every other one, 0 repeats the first
    gap: int = 0  # unused elements behind each run of the innermost dimension
    offset: int = 0  # unused elements before the first one

    def first_of_repeated(self, values: torch.Tensor) -> torch.Tensor:
        return values[tuple(slice(None if step > 0 else 1) for step in self.steps)]

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """The values, laid out so.  What lies between them is NaN, or no class: nothing may read
        it.
        """
        strides, size = [0] * values.ndim, 1
        for dim in reversed(self.order):
            if self.steps[dim] > 0:
                strides[dim] = size * self.steps[dim]
                gap = self.gap if dim == self.order[-1] else 0
                size = strides[dim] * values.shape[dim] + gap
        filling = math.nan
        if not values.is_floating_point():
            filling = -12_345 if values.dtype.is_signed else 1  # a mask's True, or a byte's
        memory = values.new_full((self.offset + size,), filling)
        once = self.first_of_repeated(values)
        memory.as_strided(once.shape, strides, self.offset).copy_(once)
        return memory.as_strided(values.shape, strides, self.offset)


def layouts_of(ndim: int) -> dict[str, Layout]:
    """By name, the layouts in which every tensor of so many dimensions must be taken."""
    dims = tuple(range(ndim))
    ones = (1,) * ndim
    if ndim == 0:
        return {"behind others": Layout((), (), offset=3)}
    last = ndim - 1
    layouts = {
        "gaps and an odd offset": Layout(dims, ones, gap=5, offset=3),
        "gaps of 16": Layout(dims, ones, gap=16),
        "every second column": Layout(dims, (*ones[1:], 2)),
        "all repeated (strides 0)": Layout(dims, (0,) * ndim),
    }
    if ndim > 2:
        layouts["one row repeated (stride 0)"] = Layout(dims, (*(0,) * last, 1))
    for dim in dims[:-1]:
        layouts[f"every second of dimension {dim}"] = Layout(
            dims, tuple(2 if d == dim else 1 for d in dims)
        )
    if ndim > 1:
        for dim in dims:
            layouts[f"dimension {dim} repeated (stride 0)"] = Layout(
                dims, tuple(int(d != dim) for d in dims)
            )
        layouts["columns outermost"] = Layout((last, *dims[:-1]), ones)
    for a, b in itertools.combinations(dims[:-1], 2):
        order = list(dims)
        order[a], order[b] = b, a
        layouts[f"dimensions {a} and {b} exchanged"] = Layout(tuple(order), ones)
    return layouts
