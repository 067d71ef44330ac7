"""Judge one file.  exercises/check.py runs `main` in a process that the file may end."""

import importlib.util
import os
import sys
import textwrap
import warnings
from collections.abc import Callable
from types import FunctionType

from exercises.grading.grading import EXERCISES, grade, stopped
from exercises.grading.speed import bytes_in_words, times_table
from exercises.grading.words import WORDS
from harness.cli.command_line import UserError, exit_code
from harness.cli.device import HAS_GPU, require_interpreter
from harness.cli.tables import TERMINAL


def load(file: str) -> Callable:
    """Return the function `launch` of a Python file, of which no compiled form is read or written.

    Raises:
        UserError: the file is no Python, stops as it is loaded, or has no such function.
    """
    spec = importlib.util.spec_from_file_location("exercise", file)
    module = importlib.util.module_from_spec(spec)
    try:
        exec(spec.loader.source_to_code(spec.loader.get_data(file), file), vars(module))
    except SyntaxError as error:
        place = f"line {error.lineno} of {error.filename}"
        raise UserError(f"{place} is no Python: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{stopped(error, file)}, before it could be judged") from error
    if not isinstance(getattr(module, "launch", None), FunctionType):
        raise UserError(f"{file} has no function `launch`: keep the one of the exercise")
    return module.launch


def report(name: str, launch: Callable) -> tuple[bool, str]:
    """Return whether an answer is right, and what is said of it."""
    exercise, words = EXERCISES[name], WORDS[name]
    verdict, n_cases = grade(exercise, launch), len(exercise.cases)
    if not verdict.right:
        lines = [f"{name}, case {verdict.case} of {n_cases}: {verdict.title}"]
        lines += [f"- {sentence}" for sentence in verdict.sentences]
        lines += [f"A hint: python -m exercises.check {name} --hint"]
        return False, "\n".join(map(broken, lines))
    lines = [f"{name} is right in all {n_cases} cases.", bytes_in_words(exercise)]
    if HAS_GPU:
        lines += times_table(exercise, launch).splitlines()
    else:
        lines += ["Without a GPU nothing is timed."]
    lines += [f"The lesson: {words.lesson}.", f"Beyond this exercise it {words.beyond}."]
    names = list(EXERCISES)
    if following := names[names.index(name) + 1 :]:
        lines += [f"The next exercise: exercises/{following[0]}.py"]
    return True, "\n".join(map(broken, lines))


def broken(line: str) -> str:
    """Break a long sentence."""
    return textwrap.fill(line, TERMINAL, subsequent_indent="  ") if "  " not in line else line


def judged(name: str, file: str) -> int:
    """Print what is said of a file as an answer to an exercise; return 0 if it is right, or 1."""
    require_interpreter()
    # NumPy comments on the arithmetic of a wrong kernel in Triton's interpreter.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    right, said = report(name, load(file))
    print(said, flush=True)
    return int(not right)


def main() -> int:
    """Judge the file sys.argv[2] as the exercise sys.argv[1]; return 0 if it is right.

    The exit code is also written to the file descriptor sys.argv[3], as only this function does.
    """
    name, file, verdict = sys.argv[1:]
    code = exit_code(lambda: judged(name, file))
    os.write(int(verdict), str(code).encode())
    return code
