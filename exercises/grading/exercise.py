"""What the checker knows of an exercise beside its words: `Exercise`, and the cases it runs on."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from harness.benchmark.checking import DTYPE_NAME

Inputs = dict[str, torch.Tensor | float]  # the arguments of `launch` that are given, by name
Parts = dict[str, torch.Tensor]  # what is compared, by name
Mistakes = dict[str, Parts]  # by a sentence: the parts that this mistake changes


@dataclass(frozen=True)
class Case:
    """One call of `launch`."""

    rows: tuple[int, ...]
    size: object  # as Exercise.make understands it
    question: str  # asked where the answer is wrong, and was right in the cases before
    dtype: torch.dtype = torch.float32
    gaps: bool = False  # between the rows of each tensor, a different one for each
    options: dict = field(default_factory=dict)  # of Exercise.make
    note: str = ""  # what is special about the inputs


def row_and_column(rows: tuple[int, ...], size: int) -> str:
    return f"{rows[0]:,} row{'s' if rows[0] > 1 else ''} of {size:,} columns"


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise.  Tensors of `answers`, `mistakes` and `parts` are in the inputs' dtype."""

    # (rows, size, dtype, **options) -> the inputs
    make: Callable[..., Inputs]
    # (inputs) -> empty tensors, as large as what the kernel writes, by name
    outputs: Callable[[Inputs], dict[str, torch.Tensor]] = lambda inputs: {}
    # inputs that the kernel overwrites
    overwritten: tuple[str, ...] = ()
    # (inputs) -> the right parts, by eager PyTorch
    answers: Callable[[Inputs], Parts]
    # (inputs, right parts), all in float64 -> known mistakes
    mistakes: Callable[[Inputs, Parts], Mistakes]
    # (inputs, what was written by name) -> the parts
    parts: Callable[[Inputs, Parts], Parts] = lambda inputs, written: written
    # (inputs) -> {part: {label: which elements are compared by themselves}}
    split: Callable[[Inputs], dict[str, Parts]] = lambda inputs: {}
    cases: tuple[Case, ...]
    block_size: int | None = None  # given to `launch`, if small tensors shall fill several blocks
    in_words: Callable[[tuple[int, ...], object], str] = row_and_column
    # of an element's place, by the number of a tensor's dimensions
    axes: dict[int, tuple[str, ...]] = field(
        default_factory=lambda: {1: ("row",), 2: ("row", "column")}
    )
    # what must be moved, as names of inputs and outputs
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    # of a GPU, in bf16: the rows and the size that are timed, and the lesson on the same inputs
    timed: tuple[tuple[int, ...], object]
    lesson: Callable[[Inputs], Callable[[], object]]

    def title(self, case: Case) -> str:
        """Return a case in words: 5 rows of 257 columns, fp32, with gaps between the rows."""
        gaps = "with gaps between the rows" if case.gaps else ""
        words = self.in_words(case.rows, case.size), DTYPE_NAME[case.dtype].lower(), gaps, case.note
        return ", ".join(filter(None, words))


def chosen(inputs: Inputs, *names: str) -> Inputs:
    """Return some of the inputs."""
    return {name: inputs[name] for name in names}
