"""Does a training step wait for its data?  Three measurements that tell the loader from the step.

    loader alone          the next batch, and no step
    one resident batch    a step whose batch is on the device already
    both together         as in a run: the next batch, then a step on it

A sum of two times cannot be told from one of them, so each is measured without the other.  What the
three mean is `harness.diagnose`'s.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator

from harness.device import synchronize

# Batches of each measurement.  The first ones may have been waiting, where a loader works ahead.
ALONE, TOGETHER = 7, 3


def measure_loading(loader: Iterator, take_step: Callable, resident_ms: float) -> dict:
    """The three, in milliseconds, and how long both together were in the loader: medians.

    Args:
        loader: its next() is the batch of a step, on the device; it has ALONE + TOGETHER of them.
        take_step: takes a step on such a batch, without waiting for it.
        resident_ms: what a step takes on a batch that is there.
    """
    alone = [timed_ms(loader.__next__)[1] for _ in range(ALONE)]
    waited, together = [], []
    for _ in range(TOGETHER):
        batch, loading_ms = timed_ms(loader.__next__)
        _, step_ms = timed_ms(functools.partial(take_step, batch))
        waited.append(loading_ms)
        together.append(loading_ms + step_ms)
    return {
        "alone_ms": statistics.median(alone),
        "resident_ms": resident_ms,
        "together_ms": statistics.median(together),
        "waited_ms": statistics.median(waited),
    }


def timed_ms(work: Callable) -> tuple:
    """(what the work returns, its milliseconds from an idle device to an idle device)."""
    synchronize()
    start = time.perf_counter()
    result = work()
    synchronize()
    return result, 1e3 * (time.perf_counter() - start)
