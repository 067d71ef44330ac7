"""What the checker knows of an exercise beside its words: `Exercise`, and the cases it runs on."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from exercises.grading.words import section
from harness.benchmark.checking import DTYPE_NAME

Inputs = dict[str, torch.Tensor | float]  # the arguments of `launch` that are given, by name
Parts = dict[str, torch.Tensor]  # what is compared, by name
Mistakes = dict[str, Parts]  # by a sentence: the parts that this mistake changes

BF16 = torch.bfloat16
FORMULA = "Compare each line of the kernel with the docstring's mathematics."
DTYPE = (
    "fp32 was right: is each loaded tensor converted by .to(tl.float32) before it is used, and is "
    "only the result rounded?"
)
ORDER = (
    "A GPU runs the programs in any order: does a program read what another one writes, or count "
    "on being the first?"
)


@dataclass(frozen=True)
class Case:
    """One call of `launch`."""

    rows: tuple[int, ...]
    size: object  # as Exercise.make understands it
    # asked where the answer is wrong, and was right in the cases before; by a part's name, if the
    # parts before that one are right
    question: str | dict[str, str]
    dtype: torch.dtype = torch.float32
    gaps: bool = False  # between the rows of each tensor, a different one for each
    options: dict = field(default_factory=dict)  # of Exercise.make
    note: str = ""  # what is special about the inputs
    order: str = "forward"  # of the programs; or "reverse", "shuffled"


def orders(rows: tuple[int, ...], size: object, **options) -> tuple[Case, ...]:
    """Return the cases in which programs run in another order."""
    note = "the programs in {} order".format
    return (
        Case(rows, size, ORDER, note=note("reverse"), order="reverse", **options),
        Case(rows, size, ORDER, note=note("random"), order="shuffled", **options),
    )


# What a formula may call.
FUNCTIONS = {name: getattr(torch, name) for name in ("exp", "log", "sqrt", "rsqrt", "maximum")}
FUNCTIONS |= {"torch": torch, "inf": math.inf, "mean": lambda t: t.mean(-1, keepdim=True)}


@dataclass(frozen=True)
class Formula:
    """The mathematics of an exercise, and what a learner writes in its place.

    lines: PyTorch, of the inputs by name.
    parts: what the lines compute for the comparison.
    slips: by a sentence, a text of the lines and what it becomes.
    """

    lines: str
    parts: tuple[str, ...]
    slips: dict[str, tuple[str, str]]

    def computed(self, inputs: Inputs, old: str = "", new: str = "") -> Parts:
        names = FUNCTIONS | inputs
        exec(self.lines.replace(old, new) if old else self.lines, names)
        return {part: names[part] for part in self.parts}

    def mistakes(self, inputs: Inputs) -> Mistakes:
        """Return what each slip changes.  One that stops, or gives NaN, is no answer here."""
        right, mistakes = self.computed(inputs), {}
        for sentence, (old, new) in self.slips.items():
            try:
                parts = self.computed(inputs, old, new)
            except (IndexError, RuntimeError):
                continue
            mistakes[sentence] = {
                name: t.expand_as(right[name])
                for name, t in parts.items()
                if not t.equal(right[name])
            }
        return mistakes


def slips(name: str) -> dict[str, tuple[str, str]]:
    """Return a Formula's slips from slips.txt.

    A line has `a text of the formula -> what it becomes :: the sentence`.
    """
    lines = section("slips.txt", name)
    rows = [re.fullmatch(r"(.+?) ->(.*?) :: (.+)", line).groups() for line in lines]
    return {sentence: (old, new.strip()) for old, new, sentence in rows}


def row_and_column(rows: tuple[int, ...], size: int) -> str:
    return f"{rows[0]:,} row{'s' if rows[0] > 1 else ''} of {size:,} column{'s' * (size > 1)}"


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise.  Tensors of `answers` and `parts` are in the outputs' dtypes."""

    # (rows, size, dtype, **options) -> the inputs
    make: Callable[..., Inputs]
    # (inputs) -> empty tensors, as large as what the kernel writes, by name
    outputs: Callable[[Inputs], dict[str, torch.Tensor]] = lambda inputs: {}
    # inputs that the kernel overwrites
    overwritten: tuple[str, ...] = ()
    # (inputs) -> the right parts, by eager PyTorch
    answers: Callable[[Inputs], Parts]
    formula: Formula
    # (inputs) -> what the formula takes
    names: Callable[[Inputs], Inputs] = lambda inputs: inputs
    # (inputs, what was written by name) -> the parts
    parts: Callable[[Inputs, Parts], Parts] = lambda inputs, written: written
    # (inputs) -> {part: {label: which elements are compared by themselves}}
    split: Callable[[Inputs], dict[str, Parts]] = lambda inputs: {}
    cases: tuple[Case, ...]
    blocks: dict[str, int] = field(default_factory=dict)  # of `launch`, so that small tensors fill
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
    opponent: str = "the lesson"
    must_win: bool = False  # is it right only if it is faster?

    def title(self, case: Case) -> str:
        """Return a case in words: 5 rows of 257 columns, fp32, with gaps between the rows."""
        gaps = "with gaps between the rows" if case.gaps else ""
        words = self.in_words(case.rows, case.size), DTYPE_NAME[case.dtype].lower(), gaps, case.note
        return ", ".join(filter(None, words))


def chosen(inputs: Inputs, *names: str) -> Inputs:
    """Return some of the inputs."""
    return {name: inputs[name] for name in names}


def in_float64(inputs: Inputs) -> Inputs:
    return {
        name: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for name, t in inputs.items()
    }
