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


def times_table(exercise: Exercise, launch: Callable) -> str:
    """Time both kernels alone, without the host, and return a table."""
    inputs = exercise.make(*exercise.timed, torch.bfloat16)
    tensors = inputs | exercise.outputs(inputs)
    n_bytes = bytes_per_element(exercise) * inputs[exercise.reads[0]].numel()
    copy_rate = timing.copy_bandwidth()
    calls = {"yours": lambda: launch(**tensors), "the lesson": exercise.lesson(inputs)}
    rows = []
    for name, call in calls.items():
        microseconds = timing.graph_time_us(call) or timing.time_us(call).p50
        rate = n_bytes / microseconds / 1e3
        rows.append(
            [name, formatted(microseconds), formatted(rate, ",.0f"), f"{rate / copy_rate:.0%}"]
        )
    size = exercise.in_words(*exercise.timed)
    return table([f"{size}, bf16", "us", "GB/s", "of the copy rate"], rows)
