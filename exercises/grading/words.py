"""What is said of each exercise: its lesson and its hints.  Imports no PyTorch, so that it is fast.

words.txt has them.  A hint names an idea, the next one the function of Triton, the third the line.
"""

from pathlib import Path
from typing import NamedTuple


class Words(NamedTuple):
    """One exercise, in words."""

    teaches: str
    lesson: str  # the solution: its file and function
    beyond: str  # what the lesson does that the exercise leaves out
    hints: tuple[str, str, str]


def section(file: str, name: str) -> list[str]:
    """Return the lines below [name] of a text file beside this one, up to an empty line."""
    text = (Path(__file__).parent / file).read_text()
    return text.partition(f"[{name}]\n")[2].partition("\n\n")[0].splitlines()


def words_of(name: str) -> Words:
    texts = [line.partition(": ")[2] for line in section("words.txt", name)]
    return Words(*texts[:3], tuple(texts[3:]))


# in the order of the lessons
NAMES = (
    *("add", "tile", "rmsnorm_forward", "rmsnorm_dx", "rmsnorm_dw", "online_softmax"),
    *("cross_entropy", "cross_entropy_inplace", "swiglu_backward", "rope_backward", "adamw"),
    *("residual_norm", "softmax_fast"),
)
WORDS = {name: words_of(name) for name in NAMES}


def page() -> str:
    """Return the table of docs/exercises.md."""
    rows = [
        f"| {number} | `{name}` | {words.teaches} |"
        for number, (name, words) in enumerate(WORDS.items(), start=1)
    ]
    return "\n".join(["| | exercise | what it teaches |", "|---:|---|---|", *rows])
