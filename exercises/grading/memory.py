"""Memory in which a wrong address is noticed: something known lies around a tensor's elements."""

import math

import torch
import torch.nn.functional as F

GUARD = 4096  # elements before and behind a tensor, more than a block of a small case
# What outputs hold before the launch.  No kernel computes it by chance; bf16 holds it exactly.
UNWRITTEN = -12_288.0


class Guarded:
    """A copy of `values`, whose dimensions lie in memory in the same order.

    NaN (or no class) lies around an input, UNWRITTEN around an output.
    """

    def __init__(self, values: torch.Tensor, gap: int, filling: float | None = None):
        if filling is None:
            filling = math.nan if values.is_floating_point() else -12_345
        order = sorted(range(values.ndim), key=lambda dim: -values.stride(dim))
        dense = values.permute(order)
        self.shape = *dense.shape[:-1], dense.shape[-1] + (gap if values.ndim > 1 else 0)
        self.order, self.n_cols = order, dense.shape[-1]
        padded = F.pad(dense, (0, self.shape[-1] - self.n_cols), value=filling)
        self.memory = F.pad(padded.flatten(), (GUARD, GUARD), value=filling)
        self.before = self.memory.clone()
        self.tensor = self.part_of(self.memory)

    def part_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return where the values lie in memory."""
        inner = memory[GUARD:-GUARD].view(self.shape)[..., : self.n_cols]
        return inner.permute([self.order.index(dim) for dim in range(len(self.order))])

    def changed(self) -> torch.Tensor:
        """Return which elements of the memory hold something else than before the launch."""
        same = self.memory == self.before
        return ~(same | (self.memory.isnan() & self.before.isnan()))

    def n_changed_outside(self) -> int:
        """Return how many elements around the values were written."""
        changed = self.changed()
        return int(changed.sum() - self.part_of(changed).sum())
