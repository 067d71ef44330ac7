"""FP8 codes of sharded weights travel in the place of bf16 numbers: half the bytes.

FSDP2 gathers a weight (O, I) for the forward and again for the backward.  fp8_layer.py multiplies
codes, and each pass multiplies other ones:

    forward     a scale for each row.  A process has whole rows, and rounds them
    backward    one scale, the largest of all projections that share an input, and turned: (I, O).
                The forward has brought all scales.  So a process can round and turn its rows

So a process rounds its own rows before they travel.  The codes have the bits that each process
would make of the whole bf16 weight.

FSDP2 makes a parameter of what it gathers.  Here the parameter is a tensor of the weight's shape
and dtype that has no memory: autograd needs it for the gradient, and reading it is an error.

Limit: a layer that runs again in the backward would need both codes there, as many bytes as bf16.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from harness.steps import parallel
from next_steps.lessons.fp8_kernel import FP8, Rows, quantize_rows, quantize_transposed


class GatheredCodes:
    """The weights (O_i, I) of projections that share an input, after `fully_shard`."""

    def __init__(self, weights: Sequence[DTensor]):
        n, n_weights, self.n_cols = weights[0].device_mesh.size(), len(weights), weights[0].shape[1]
        self.shards = [weight.to_local().detach() for weight in weights]  # (O_i here, I)
        self.n_rows = [shares_of(len(weight), n) for weight in weights]  # in each process
        self.codes, self.scales = [None] * n_weights, [None] * n_weights  # FSDP2 frees the memory
        self.largest = self.shards[0].new_zeros(n_weights, dtype=torch.float32)  # of the scales
        self.are_turned, self.unread = False, []
        for i, weight in enumerate(weights):
            n_bytes = weight.numel() + 4 * len(weight)
            parallel.gather_as(weight, partial(self.send, i), partial(self.receive, i), n_bytes)

    def send(self, i: int, mesh: DeviceMesh) -> tuple[list[torch.Tensor], bool]:
        """Return a shard's codes and scales, flat, and whether the codes are turned."""
        turns, n_rows = parallel.in_backward(), self.n_rows[i][0]  # the first has most rows
        if turns:
            largest = self.largest.amax()
            codes, _ = quantize_transposed(self.shards[i], scale=largest)  # (I, O_i here)
            scales = largest.repeat(n_rows)  # FSDP2 expects as many bytes in each gather
        else:
            codes, scales = quantize_rows(self.shards[i])  # (O_i here, I)
        wanted = (codes.view(torch.uint8).flatten(), n_rows * self.n_cols), (scales, n_rows)
        return [t if len(t) == size else pad(t, (0, size - len(t))) for t, size in wanted], turns

    def receive(self, i: int, gathered, turned: bool, dtype: torch.dtype, *, out=None):
        """Keep what all processes sent; in the first call return what becomes the parameter."""
        self.codes[i], self.scales[i] = gathered
        self.are_turned = turned
        if not turned:
            # here, because a later gather, on another stream, waits for what is launched here
            torch.amax(self.scales[i], 0, out=self.largest[i])
        if out is None:
            weight = self.shards[i].new_full((sum(self.n_rows[i]), self.n_cols), torch.nan)
            self.unread.append(weight)
            return weight, ()

    def stacked(self) -> Rows:
        """Return the weights, one below the other: Rows (sum of O, I)."""
        self.expect(turned=False)
        while self.unread:
            self.unread.pop().untyped_storage().resize_(0)
        sizes = list(map(sum, self.n_rows))
        codes = [t[: size * self.n_cols] for t, size in zip(self.codes, sizes)]
        scales = [t[:size] for t, size in zip(self.scales, sizes)]
        return Rows(joined(codes).view(FP8).view(-1, self.n_cols), joined(scales))

    def turned(self, scale: torch.Tensor) -> Rows:
        """Return the same weights, turned, of one scale (), the largest: Rows (I, sum of O)."""
        self.expect(turned=True)
        parts = [
            part[: n_rows * self.n_cols].view(self.n_cols, n_rows)  # of one process
            for codes, shares in zip(self.codes, self.n_rows)
            for part, n_rows in zip(codes.chunk(len(shares)), shares)
        ]
        return Rows(joined(parts, dim=1).view(FP8), scale.repeat(self.n_cols))

    def expect(self, turned: bool) -> None:
        """Raise a RuntimeError if the codes were gathered for the other pass."""
        if self.are_turned != turned:
            given, expected = ("forward", "backward")[:: -1 if self.are_turned else 1]
            raise RuntimeError(
                f"FP8 codes were gathered for a {given}, expected a {expected}: "
                "set what runs again in the backward before fully_shard"
            )


def shares_of(n_rows: int, n: int) -> list[int]:
    """Return how many rows FSDP2 gives each of n processes."""
    most = -(-n_rows // n)
    return [len(range(n_rows)[i * most : (i + 1) * most]) for i in range(n)]


def joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return the parts as one tensor; bytes are copied by eights where that is possible."""
    if len(parts) == 1:
        return parts[0]
    if any(part.shape[-1] % 8 for part in parts):
        return torch.cat(parts, dim)
    return torch.cat([part.view(torch.int64) for part in parts], dim).view(parts[0].dtype)
