"""Batches on the device before they are needed, so that no step waits for its data.

While the GPU computes a step, whose launches the host has made, the host builds the next step's
batches and starts their copy: from pinned memory, which the GPU reads by itself, on a stream of its
own.  The step's clock runs meanwhile, until both the step and the copy are done.

There is no worker process: all tokens are in memory, and to lay out a batch takes less time than
to receive it from another process.  A `num_workers` of the DataLoader would be for data that take
long to read.
"""

import itertools
import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

from harness.cli import processes
from harness.cli.device import DEVICE, HAS_GPU
from harness.data.dataset import Batch, Batches


class Loader:
    """The micro-batches of one step after the other.

    loader = Loader(batches, per_step=1)   # builds and copies those of the first step to take
    loader.take()                          # a step's, on the device once that is idle
    loader.fetch()                         # to be called when the step's work is launched

    Of N processes each gets every Nth batch, and the first ones begin the step.
    """

    def __init__(self, batches: Batches, per_step: int, steps_done: int = 0):
        # with a generator of its own it draws nothing from PyTorch's; what is not in `sampler`,
        # as the batches of steps done, is never built
        options = {"pin_memory": HAS_GPU, "generator": torch.Generator()}
        done = steps_done * per_step * processes.world_size()
        options["sampler"] = range(done + processes.rank(), len(batches), processes.world_size())
        self.batches = iter(DataLoader(batches, batch_size=None, **options))
        self.per_step = per_step
        self.stream = torch.cuda.Stream() if HAS_GPU else None
        self.taken: list[Batch] = []
        self.fetch()

    def __iter__(self) -> Iterator[list[Batch]]:
        """What `take` returns, step after step; to ask for the next one is to fetch it."""
        while self.next:
            yield self.take()
            self.fetch()

    def fetch(self) -> float:
        """Build the next step's batches and start their copy.

        Returns:
            The seconds that the device waited for it, at most: 0 if it still computes afterwards.
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
        """What was fetched; what is launched from here on has its turn after the copy.

        The batches taken before are kept until now: their memory is another stream's, which would
        give it to the next copy while the step still reads it.  So the device must have been idle
        since that step.
        """
        if HAS_GPU:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.taken = self.next
        return self.taken
