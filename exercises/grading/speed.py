"""How fast a right kernel is on a GPU, beside the lesson's and beside a plain copy."""

from collections.abc import Callable

import torch

from exercises.grading.exercise import Exercise
from harness.cli.tables import formatted, table
from harness.steps import timing


def bytes_per_element(exercise: Exercise) -> int:
    """Return the bytes that must be moved for each element in bf16."""
    return 2 * len((*exercise.reads, *exercise.writes))


def bytes_in_words(exercise: Exercise) -> str:
    writes = f", writes {', '.join(exercise.writes)}" if exercise.writes else ""
    moved = f"{bytes_per_element(exercise)} bytes per element in bf16"
    return f"It moves {moved}: reads {', '.join(exercise.reads)}{writes}."


def times(exercise: Exercise, launch: Callable) -> list[tuple[str, float, float]]:
    """Return for the kernel and for its opponent: the name, microseconds alone, of the copy rate.

    The host's time does not count.
    """
    inputs = exercise.make(*exercise.timed, torch.bfloat16)
    tensors = inputs | exercise.outputs(inputs)
    n_bytes = bytes_per_element(exercise) * inputs[exercise.reads[0]].numel()
    copy_rate = timing.copy_bandwidth()
    calls = {"yours": lambda: launch(**tensors), exercise.opponent: exercise.lesson(inputs)}
    rows = []
    for name, call in calls.items():
        microseconds = timing.graph_time_us(call) or timing.time_us(call).p50
        rows.append((name, microseconds, n_bytes / microseconds / 1e3, copy_rate))
    return rows


def times_table(exercise: Exercise, rows: list) -> str:
    size = exercise.in_words(*exercise.timed)
    cells = [
        [name, formatted(us), formatted(rate, ",.0f"), f"{rate / copy_rate:.0%}"]
        for name, us, rate, copy_rate in rows
    ]
    return table([f"{size}, bf16", "us", "GB/s", "of the copy rate"], cells)
