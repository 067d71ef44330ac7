"""What the checker knows of an exercise beside its words: `Exercise`, and the cases it runs on."""

import contextlib
import functools
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from exercises.grading.words import sections_of
from harness.benchmark.checking import DTYPE_NAME
from harness.cli.device import DEVICE
from kernel_support import triton

Inputs = dict[str, torch.Tensor | float]  # the arguments of `launch` that are given, by name
Parts = dict[str, torch.Tensor]  # what is compared, by name
Mistakes = dict[str, Parts]  # by a sentence: the parts that this mistake changes

BF16 = torch.bfloat16
CHUNK = 64  # numbers of a line, or columns of a row, in a block of a small case
FORMULA = "Compare each line of the kernel with the docstring's mathematics."
DTYPE = (
    "fp32 was right: is each loaded tensor converted by .to(tl.float32) before it is used, and is "
    "only the result rounded?"
)
STRIDES = (
    "The next row begins later than the last one ends: does row r of each tensor begin at r * the "
    "stride of that tensor?"
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


def orders(rows: tuple[int, ...], size: object) -> tuple[Case, ...]:
    """Return the cases in which programs run in another order."""
    return (
        Case(rows, size, ORDER, note="the programs in reverse order", order="reverse"),
        Case(rows, size, ORDER, note="the programs in random order", order="shuffled"),
    )


# ---- Formulas


def exchanged(dy: torch.Tensor) -> torch.Tensor:
    """Return what a kernel reads that exchanges the strides of head and token; NaN outside."""
    sample, head, token, _ = dy.stride()
    memory = F.pad(dy.transpose(1, 2).flatten(), (0, dy[0].numel()), value=torch.nan)
    return memory.as_strided(dy.shape, (sample, token, head, 1))


# What a formula may call.
FUNCTIONS = {name: getattr(torch, name) for name in ("exp", "log", "sqrt", "rsqrt", "maximum")} | {
    "torch": torch,
    "mean": lambda t: t.mean(-1, keepdim=True),
    "halves": lambda t: t.chunk(2, -1),
    "exchanged": exchanged,
    "at_target": lambda t, targets: t.gather(-1, targets[:, None])[:, 0],
    "pad": lambda chunk: F.pad(chunk, (0, CHUNK - chunk.shape[-1])),
    "CHUNK": CHUNK,
}


def names_of(inputs: Inputs) -> dict:
    """Return what a formula may name: inputs, functions, and the sizes of the largest input."""
    tensors = [t for t in inputs.values() if isinstance(t, torch.Tensor)]
    n_rows, *_, n_cols = max(tensors, key=torch.numel).shape * 2
    rows, columns = (torch.arange(n, device=DEVICE, dtype=torch.int64) for n in (n_rows, n_cols))
    sizes = {"n_rows": n_rows, "n_cols": n_cols, "block": triton.next_power_of_2(n_cols)}
    return FUNCTIONS | inputs | sizes | {"rows": rows, "columns": columns}


def code_and_slips(lines: list[str]) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the indented lines, and of each other one: a text of these, another, a sentence.

    Such a line is `text -> other :: sentence`, or with `N = 2 3: ` before it one for each N.
    """
    slips = []
    for line in (each for each in lines if not each.startswith(" ")):
        numbers, one = re.fullmatch(r"(?:N = ([\d ]+): )?(.+)", line).groups()
        for number in (numbers or "N").split():
            named = re.sub(r"\bN\b", number, one)
            slips.append(re.fullmatch(r"(\S.*?) -> ?(.*?) ?:: (.+)", named).groups())
    return "".join(f"{line}\n" for line in lines if line.startswith(" ")), slips


class Formula:
    """The mathematics of an exercise, and what a learner writes in its place: formulas.txt.

    An indented line of a section is PyTorch, of the inputs by name.  Another line is a slip.
    """

    def __init__(self, *sections: str):
        found = sections_of("formulas.txt")
        code, slips = code_and_slips([line for name in sections for line in found[name]])
        self.lines = textwrap.dedent(code)
        self.slips = {sentence: (old, new) for old, new, sentence in slips}

    def computed(self, inputs: Inputs, parts: Iterable[str], old: str = "", new: str = "") -> Parts:
        names = names_of(inputs)
        exec(self.lines.replace(old, new) if old else self.lines, names)
        return {part: names[part] for part in parts}

    def mistakes(self, inputs: Inputs, right: Parts) -> Mistakes:
        """Return what each slip changes.  One that stops, or gives NaN, is no answer here."""
        mistakes = {}
        for sentence, slip in self.slips.items():
            with contextlib.suppress(IndexError, RuntimeError):
                parts = self.computed(inputs, right, *slip).items()
                parts = {name: t.expand_as(right[name]) for name, t in parts}
                mistakes[sentence] = {n: t for n, t in parts.items() if not t.equal(right[n])}
        return mistakes


# ---- An exercise


def row_and_column(rows: tuple[int, ...], size: int) -> str:
    return f"{rows[0]:,} row{'s' if rows[0] > 1 else ''} of {size:,} column{'s' * (size > 1)}"


AXES = {1: ("row",), 2: ("row", "column"), 4: ("sample", "head", "token", "column")}


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise."""

    name: str
    # (rows, size, dtype, **options) -> the inputs
    make: Callable[..., Inputs]
    sections: tuple[str, ...] = ()  # of its formula, if not the one of its name
    # what must be moved, as names of inputs and outputs; an output is as large as the first of them
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    # (inputs) -> empty tensors of other sizes that the kernel writes, by name
    others: Callable[[Inputs], Parts] = lambda inputs: {}
    # (inputs, what was written by name) -> the parts
    parts: Callable[[Inputs, Parts], Parts] = lambda inputs, written: written
    # (inputs) -> {part: {label: which elements are compared by themselves}}
    split: Callable[[Inputs], dict[str, Parts]] = lambda inputs: {}
    cases: tuple[Case, ...]
    blocks: dict[str, int] = field(default_factory=dict)  # of `launch`, so that small tensors fill
    in_words: Callable[[tuple[int, ...], object], str] = row_and_column
    # of an element's place, by the number of a tensor's dimensions
    axes: dict[int, tuple[str, ...]] = field(default_factory=lambda: AXES)
    # of a GPU, in bf16: the rows and the size that are timed, and the lesson on the same inputs
    timed: tuple[tuple[int, ...], object]
    lesson: Callable[[Inputs], Callable[[], object]]
    opponent: str = "the lesson"
    to_beat: bool = False  # is the opponent's time the exercise's goal?

    @functools.cached_property
    def formula(self) -> Formula:
        return Formula(*(self.sections or [self.name]))

    @property
    def overwritten(self) -> list[str]:
        return [name for name in self.writes if name in self.reads]

    def outputs(self, inputs: Inputs) -> Parts:
        """Return empty tensors for what the kernel writes, by name."""
        new = [name for name in self.writes if name not in self.overwritten]
        return self.others(inputs) | {n: torch.empty_like(inputs[self.reads[0]]) for n in new}

    def title(self, case: Case) -> str:
        """Return a case in words: 5 rows of 257 columns, fp32, with gaps between the rows."""
        gaps = "with gaps between the rows" if case.gaps else ""
        words = self.in_words(case.rows, case.size), DTYPE_NAME[case.dtype].lower(), gaps, case.note
        return ", ".join(filter(None, words))


def chosen(inputs: Inputs, *names: str) -> Inputs:
    """Return some of the inputs."""
    return {name: inputs[name] for name in names}


def converted(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Return the inputs with floating-point tensors of another dtype."""
    return {
        name: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for name, t in inputs.items()
    }
