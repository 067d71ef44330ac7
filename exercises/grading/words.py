"""What is said of each exercise: its lesson and its hints.  Imports no PyTorch, so that it is fast.

words.txt has them.  A hint names an idea, the next one the function of Triton, the third the line.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple


class Words(NamedTuple):
    """One exercise, in words."""

    teaches: str
    lesson: str  # the solution: its file and function
    beyond: str  # what the lesson does that the exercise leaves out
    hints: tuple[str, str, str]


@functools.cache
def sections_of(file: str) -> dict[str, list[str]]:
    """Return the lines below each [name] of a text file beside this one, in the file's order."""
    found = {}
    for line in (Path(__file__).parent / file).read_text().splitlines():
        if named := re.fullmatch(r"\[(\w+)\]", line):
            found[named[1]] = []
        elif line:
            found[[*found][-1]].append(line)
    return found


def words_in(lines: list[str]) -> Words:
    texts = [line.partition(": ")[2] for line in lines]
    return Words(*texts[:3], tuple(texts[3:]))


# in the order of the lessons
WORDS = {name: words_in(lines) for name, lines in sections_of("words.txt").items()}


def page() -> str:
    """Return the table of docs/exercises.md."""
    rows = [
        f"| {number} | `{name}` | {words.teaches} |"
        for number, (name, words) in enumerate(WORDS.items(), start=1)
    ]
    return "\n".join(["| | exercise | what it teaches |", "|---:|---|---|", *rows])
