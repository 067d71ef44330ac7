"""Does a training step wait for its data?  Three measurements that tell the loader from the step.

    loader alone          the next batch, and no step
    one resident batch    a step whose batch is on the device already
    both together         a step and, once its work is launched, the next one's batch

A sum of two times cannot be told from one of them, so each is measured without the other.  What the
three mean is `harness.diagnose`'s.
"""

import statistics
import time
from collections.abc import Callable, Iterator

from harness.device import is_idle, synchronize

# Batches of each measurement.  The first ones may have been waiting, where a loader works ahead.
ALONE, TOGETHER = 7, 3
NEEDED = ALONE + 1 + TOGETHER


def measure_loading(loader: Iterator, take_step: Callable, resident_ms: float) -> dict:
    """The three, in milliseconds, and how long the device waited for a batch: medians.

    Args:
        loader: its next() is the batch of a step, on the device; it has NEEDED of them.
        take_step: takes a step on such a batch, without waiting for it.
        resident_ms: what a step takes on a batch that is there.
    """
    alone, together, waited = [], [], []
    for _ in range(ALONE):
        start = from_idle()
        next(loader)
        alone.append(1e3 * (from_idle() - start))
    batch = next(loader)
    for _ in range(TOGETHER):
        start = from_idle()
        take_step(batch)
        launched = time.perf_counter()
        batch = next(loader)
        loaded = time.perf_counter()
        in_time = not is_idle()  # the device computes still
        together.append(1e3 * (from_idle() - start))
        longer = max(0.0, together[-1] - resident_ms)
        waited.append(0.0 if in_time else min(longer, 1e3 * (loaded - launched)))
    return {
        "alone_ms": statistics.median(alone),
        "resident_ms": resident_ms,
        "together_ms": statistics.median(together),
        "waited_ms": statistics.median(waited),
    }


def from_idle() -> float:
    """The time, in seconds, once the device has nothing left to do."""
    synchronize()
    return time.perf_counter()
