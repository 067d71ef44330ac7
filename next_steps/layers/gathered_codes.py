"""FP8 codes of sharded weights travel in the place of bf16 numbers: half the bytes.

FSDP2 gathers a weight (O, I) for the forward and again for the backward.  fp8_layer.py multiplies
codes, and each pass multiplies other ones:

    forward     a scale for each row.  A process has whole rows, and rounds them
    backward    one scale, the largest of all projections that share an input, and turned: (I, O).
                The forward has brought all scales.  So a process can round and turn its rows

So rows are rounded before they travel, to the bits that each process would make of whole weights.
FSDP2 makes a parameter of what it gathers: here a tensor of the weight's shape and dtype without
memory.  Autograd needs it for the gradient, and reading it is an error.  Limit: a layer that runs
again in the backward would need both codes there, which are as many bytes as bf16 has.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from next_steps.lessons.fp8_kernel import FP8, Rows, quantize_rows, quantize_transposed


class GatheredCodes:
    """The weights (O_i, I) of projections that share an input, after `fully_shard`."""

    def __init__(self, weights: Sequence[DTensor]):
        self.n, self.shapes = weights[0].device_mesh.size(), [weight.shape for weight in weights]
        self.shards, self.gathered = [], [None] * len(weights)  # FSDP2 frees what it gathered
        self.are_turned, self.unread = False, []
        for i, weight in enumerate(weights):
            # FSDP2 asks this object for both functions before the first forward.  As methods of a
            # subclass of Tensor they would reach the optimizer, too, and checkpoints.
            shard = weight._local_tensor
            shard.fsdp_pre_all_gather = partial(self.send, i)
            shard.fsdp_post_all_gather = partial(self.receive, i)
            shard.gathered_bytes = weight.numel() + 4 * len(weight)  # of all: communication.py
            # the rows of the first process; where others have fewer, FSDP2 has appended zeros
            whole = -(-len(weight) // self.n), weight.shape[1]
            self.shards.append(shard.detach().as_strided(whole, (whole[1], 1), 0))
        self.largest = shard.new_zeros(len(weights), dtype=torch.float32)  # of the scales

    def send(self, i: int, mesh) -> tuple[tuple[torch.Tensor, torch.Tensor], bool]:
        """Return a shard's codes and scales, and whether the codes are turned."""
        shard, turns = self.shards[i], torch._C._current_graph_task_id() != -1  # in a backward
        if turns:
            codes, _ = quantize_transposed(shard, scale=self.largest.amax())  # (I, O_i here)
            scales = self.largest.new_zeros(len(shard))  # FSDP2 wants equal sizes in all gathers
        else:
            codes, scales = quantize_rows(shard)  # (O_i here, I)
        return (codes.view(torch.uint8), scales), turns

    def receive(self, i: int, gathered, turned: bool, dtype: torch.dtype, *, out=None):
        """Keep what all processes sent; in the first call return what becomes the parameter."""
        self.gathered[i], self.are_turned = gathered, turned
        if not turned:
            # here, because a later gather, on another stream, waits for what is launched here
            torch.amax(gathered[1], 0, out=self.largest[i])
        if out is None:
            self.unread.append(self.shards[i].new_full(self.shapes[i], torch.nan))
            return self.unread[-1], ()

    def stacked(self) -> Rows:
        """Return the weights, one below the other: Rows (sum of O, I)."""
        self.expect(turned=False)
        while self.unread:
            self.unread.pop().untyped_storage().resize_(0)
        each = [[t[:n_rows] for t in both] for both, (n_rows, _) in zip(self.gathered, self.shapes)]
        codes, scales = (joined(parts, 0) for parts in zip(*each))
        return Rows(codes.view(FP8), scales)

    def turned(self) -> Rows:
        """Return the same weights, turned, with their largest scale: Rows (I, sum of O)."""
        self.expect(turned=True)
        parts = [
            part[:, : max(n_rows - first * part.shape[1], 0)]  # (I, O_i of one process)
            for (codes, _), (n_rows, _) in zip(self.gathered, self.shapes)
            for first, part in enumerate(codes.chunk(self.n))
        ]
        return Rows(joined(parts, 1).view(FP8), self.largest.amax().repeat(self.shapes[0][1]))

    def expect(self, turned: bool) -> None:
        """Raise a RuntimeError if what was gathered is for the other pass."""
        if turned != self.are_turned:
            given = f"the gathered codes are turned: {self.are_turned}, expected {turned}"
            raise RuntimeError(f"{given}: call fully_shard after what lets layers run again")


def joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return `torch.cat` of the parts, which is faster where it copies eight bytes at once."""
    if len(parts) == 1:
        return parts[0]
    odd = any(n % 8 for part in parts for n in (part.shape[-1], part.stride(0)))
    words = parts if odd else [part.view(torch.int64) for part in parts]
    return torch.cat(words, dim).view(parts[0].dtype)
