"""How fast a right kernel is on a GPU, beside the lesson's and beside a plain copy."""

from collections.abc import Callable

import torch

from exercises.grading.exercise import Exercise, Inputs
from harness.cli.tables import number, table
from harness.steps import timing


def necessary_bytes(exercise: Exercise, inputs: Inputs) -> tuple[int, float]:
    """Return the bytes that must be moved, and how many that is for each element."""
    tensors = inputs | exercise.outputs(inputs)
    moved = [tensors[name] for name in (*exercise.reads, *exercise.writes)]
    n_bytes = sum(t.numel() * t.element_size() for t in moved)
    return n_bytes, n_bytes / tensors[exercise.reads[0]].numel()


def bytes_in_words(exercise: Exercise) -> str:
    """Say how many bytes a kernel must move for each element in bf16."""
    case = exercise.cases[-1]
    inputs = exercise.make(case.rows, case.size, torch.bfloat16)
    _, per_element = necessary_bytes(exercise, inputs)
    writes = f", writes {', '.join(exercise.writes)}" if exercise.writes else ""
    reads = ", ".join(exercise.reads)
    return f"It moves {per_element:.0f} bytes per element in bf16: reads {reads}{writes}."


def times_table(exercise: Exercise, launch: Callable) -> str:
    """Time both kernels alone, without the host, and return a table."""
    inputs = exercise.make(*exercise.timed, torch.bfloat16)
    tensors = inputs | exercise.outputs(inputs)
    n_bytes, _ = necessary_bytes(exercise, inputs)
    copy_rate = timing.copy_bandwidth()
    calls = {"yours": lambda: launch(**tensors), "the lesson": exercise.lesson(inputs)}
    rows = []
    for name, call in calls.items():
        microseconds = timing.graph_time_us(call) or timing.time_us(call).p50
        rate = n_bytes / microseconds / 1e3
        rows.append([name, number(microseconds), number(rate, ",.0f"), f"{rate / copy_rate:.0%}"])
    size = exercise.in_words(*exercise.timed)
    return table([f"{size}, bf16", "us", "GB/s", "of the copy rate"], rows)
