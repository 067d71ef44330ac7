"""Batches on the device before they are needed, so that no step waits for its data.

The host launches a step and then builds the next step's batches, while the GPU computes.  It starts
their copy from pinned memory, which the GPU reads by itself, on a stream of its own.  The step's
clock runs until both the step and the copy are done.

There is no worker process, as PyTorch's DataLoader has: all tokens are in memory, and to lay out a
batch takes less time than to receive it from another process.
"""

import itertools
import time
from collections.abc import Iterator

import torch

from harness.cli import processes
from harness.cli.device import DEVICE, HAS_GPU
from harness.data.dataset import Batch, Batches


class Loader:
    """The micro-batches of one step after the other.

    loader = Loader(batches, per_step=1)   # builds and copies those of the first step
    loader.take()                          # a step's, on the device once that is idle
    loader.fetch()                         # to be called when the step's work is launched

    Of N processes each gets every Nth batch, and the first N batches begin the step.
    """

    def __init__(self, batches: Batches, per_step: int, steps_done: int = 0):
        done = steps_done * per_step * processes.world_size()  # those batches are never built
        own = range(done + processes.rank(), len(batches), processes.world_size())
        self.batches = (batches[i].pin_memory() if HAS_GPU else batches[i] for i in own)
        self.per_step = per_step
        self.stream = torch.cuda.Stream() if HAS_GPU else None
        self.taken: list[Batch] = []
        self.fetch()

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield what `take` returns, step after step, and fetch the next step in between."""
        while self.next:
            yield self.take()
            self.fetch()

    def fetch(self) -> float:
        """Build the next step's batches, start their copy, and return the seconds of waiting.

        That is the most that the device waited: 0 if it still computes afterwards.
        """
        start = time.perf_counter()
        with torch.cuda.stream(self.stream):
            self.next = [
                batch.to(DEVICE, non_blocking=True)
                for batch in itertools.islice(self.batches, self.per_step)
            ]
        seconds = time.perf_counter() - start
        return 0.0 if HAS_GPU and not torch.cuda.current_stream().query() else seconds

    def take(self) -> list[Batch]:
        """Return what was fetched; work that is launched from here on runs after the copy.

        The batches taken before are kept until now.  Their memory belongs to another stream, which
        would give the memory to the next copy while the step still reads it.  So the device must
        have been idle since that step.
        """
        if HAS_GPU:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.taken = self.next
        return self.taken
