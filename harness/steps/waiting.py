"""Does a training step wait for its data?  Three measurements that tell the loader from the step.

    loader alone          the next batch, and no step
    one resident batch    a step whose batch is on the device already
    both together         a step and, once its work is launched, the next one's batch

A sum of two times cannot be told from one of them, so each is measured without the other.  What the
three mean is `harness.profiling.diagnose`'s.
"""

import statistics
import time
from collections.abc import Callable

from harness.cli.device import synchronize
from harness.data.loader import Loader

# Batches of each measurement.  The first ones may have been waiting, where a loader works ahead.
ALONE, TOGETHER = 7, 3
NEEDED = ALONE + TOGETHER


def measure_loading(loader: Loader, take_step: Callable, resident_ms: float) -> dict:
    """The three, in milliseconds, and how long the device waited for a batch: medians.

    Args:
        loader: has NEEDED steps' batches left to fetch.
        take_step: takes a step on such batches, without waiting for it.
        resident_ms: what a step takes on batches that are there.
    """
    alone, together, waited = [], [], []
    for _ in range(ALONE):
        start = from_idle()
        loader.fetch()
        alone.append(1e3 * (from_idle() - start))
    for _ in range(TOGETHER):
        batches = loader.take()
        start = from_idle()
        take_step(batches)
        waited_at_most = 1e3 * loader.fetch()
        together.append(1e3 * (from_idle() - start))
        waited.append(min(waited_at_most, max(0.0, together[-1] - resident_ms)))
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
