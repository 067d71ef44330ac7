"""Where the elements of a tensor may lie in memory: what PyTorch allows, a kernel must read."""

import contextlib
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.cli.device import DEVICE, HAS_GPU
from judging.contract import NotTried

FAR_GIB = 10  # of a GPU's memory, for one tensor far apart


@dataclass(frozen=True)
class Layout:
    """An order of the dimensions in memory, and what lies between the elements."""

    order: tuple[int, ...]  # the dimensions, from the outermost in memory to the innermost
    # per dimension: 1 takes every element, 2 every other one, 0 repeats the first
    steps: tuple[int, ...]
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

    def stepped(dim: int, step: int) -> Layout:
        return Layout(dims, (*ones[:dim], step, *ones[dim + 1 :]))

    layouts = {
        "gaps and an odd offset": Layout(dims, ones, gap=5, offset=3),
        "gaps of 16": Layout(dims, ones, gap=16),
        "every second column": stepped(last, 2),
        "all repeated (strides 0)": Layout(dims, (0,) * ndim),
    }
    if ndim > 2:
        layouts["one row repeated (stride 0)"] = Layout(dims, (*(0,) * last, 1))
    for dim in dims[:-1]:
        layouts[f"every second of dimension {dim}"] = stepped(dim, 2)
    if ndim > 1:
        for dim in dims:
            layouts[f"dimension {dim} repeated (stride 0)"] = stepped(dim, 0)
        layouts["columns outermost"] = Layout((last, *dims[:-1]), ones)
    for a, b in itertools.combinations(dims[:-1], 2):
        order = list(dims)
        order[a], order[b] = b, a
        layouts[f"dimensions {a} and {b} exchanged"] = Layout(tuple(order), ones)
    return layouts


def with_gaps(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with five unused elements between the rows."""
    layouts = {n: Layout(tuple(range(t.ndim)), (1,) * t.ndim, gap=5) for n, t in tensors.items()}
    return {name: layout.place(tensors[name]) for name, layout in layouts.items()}


@contextlib.contextmanager
def far_apart() -> Iterator[Callable]:
    """Yield place(values, dim=0): a bf16 view of them, 2**30 elements apart in that dimension, the
    third beyond int32.

    Without a GPU the memory is a file of 8 GB, nearly all of it a hole that takes no space.  The
    view begins in its middle, so that an offset that wraps to -2**31 reads the zeros at the
    beginning, where else it would end the process.
    """
    elements = 2**32 + 2**12

    def place(values: torch.Tensor, dim: int = 0) -> torch.Tensor:
        strides = [
            2**30 if i == dim else stride for i, stride in enumerate(values.contiguous().stride())
        ]
        if HAS_GPU:
            memory = torch.zeros(elements, dtype=torch.bfloat16, device=DEVICE)
        else:
            memory = torch.from_file(str(hole), True, elements, dtype=torch.bfloat16)
        return memory.as_strided(values.shape, strides, 2**31).copy_(values)

    with tempfile.TemporaryDirectory() as folder:
        hole = Path(folder, "hole")
        with open(hole, "wb") as empty:
            empty.truncate(2 * elements)
        if hole.stat().st_blocks * 512 > 2**20:
            raise NotTried("this file system cannot leave a hole in a file")
        yield place
