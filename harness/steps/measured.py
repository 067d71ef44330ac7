"""Steps that are measured: time and peak memory, or which memory they do not fit into."""

import statistics
from collections.abc import Callable, Iterable

import torch

from harness.cli.command_line import HostMemoryError, ran_out_of_memory
from harness.cli.device import HAS_GPU, free_memory
from harness.data.dataset import Batch
from harness.steps import parallel, power, stepping, timing

Steps = Iterable[list[Batch]]  # the micro-batches of each step


def measure(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, warmup: Steps, timed: Steps
) -> dict:
    """Return `step_ms` of each timed step and the `peak_memory_bytes` of all, or a `failure`.

    The step that does not fit is the last one, and leaves no gradients.  Of several processes the
    slowest one counts, and the one with the most memory.  `power` is of a mean GPU.
    """
    timing.reset_peak_memory()
    try:
        with power.PowerMeter() as meter:
            for batches in warmup:
                stepping.timed_step(model, optimizer, batches)
            meter.restart()
            step_ms, peak = time_steps(model, optimizer, timed)
    except (RuntimeError, HostMemoryError) as error:
        return failure_of(error)
    finally:
        model.zero_grad(set_to_none=True)
        free_memory()  # blocks of this size do not fit another
    slowest_ms = [max(of_each) for of_each in zip(*parallel.gather(*step_ms))]
    found = {"step_ms": slowest_ms, "peak_memory_bytes": peak}
    if HAS_GPU:
        found["power"] = mean_power(meter.reading(), sum(slowest_ms) / 1e3)
    return found


def mean_power(reading: dict | None, seconds: float) -> dict | None:
    """Return a reading with the watts of a mean GPU; None if not all tell, or the time is short."""
    watts = [own for (own,) in parallel.gather(reading["watts"] if reading else 0.0)]
    known = all(watts) and seconds >= power.MEAN_OF_S
    return reading | {"watts": statistics.mean(watts)} if known else None


def time_steps(
    model: Callable,
    optimizer: torch.optim.Optimizer,
    steps: Steps,
    take_step: Callable = stepping.training_step,
) -> tuple[list[float], int]:
    """Return the milliseconds of each step and the peak memory, of all processes the largest."""
    timed = (stepping.timed_step(model, optimizer, batches, take_step) for batches in steps)
    step_ms = [1e3 * seconds for _, seconds in timed]
    return step_ms, int(max(parallel.gather(timing.peak_memory_bytes()))[0])


def failure_of(error: Exception) -> dict:
    """Return the row of what does not fit: the memory that is too small.

    Raises:
        the error itself, where it says nothing of memory.
    """
    if isinstance(error, HostMemoryError):
        return {"failure": "the host's memory"}
    if ran_out_of_memory(error):
        return {"failure": "the GPU's memory"}
    raise error
