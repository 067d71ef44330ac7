"""A Python file that is judged: its function, and where its code stopped, in words."""

import ast
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.util import decode_source
from pathlib import Path
from types import ModuleType

from triton.compiler.errors import CompilationError

MODULE = "judged_file"  # the name under which the file's code runs
TAKE_OUT = "take out what ends the process, as sys.exit"


class Stopped(Exception):
    """The judged code ended, or its time was over.  The words say how."""


class TimeOver(BaseException):
    """Raised in the judged code when its time is over: TimeOver(seconds)."""


def load_function(file: str, name: str) -> Callable:
    """Return what a Python file calls `name`; no compiled form of the file is read or written.

    Raises:
        Stopped: the file cannot be read, is no Python, or has no such function.
        BaseException: whatever the file's own code raises.
    """
    path = Path(file)
    try:
        source = decode_source(path.read_bytes())
    except OSError as error:
        raise Stopped(f"{file} cannot be read ({error.strerror}): check its name") from error
    except (SyntaxError, UnicodeDecodeError):
        source = "\0"
    if "\0" in source:
        raise Stopped(f"{file} is not UTF-8 text, but UTF-16 or a binary: save it as UTF-8")
    try:
        code = compile(source, str(path.resolve()), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise Stopped(f"line {error.lineno} of {path.name} is no Python: {error.msg}") from error
    module = sys.modules[MODULE] = ModuleType(MODULE)
    module.__file__ = str(path.resolve())
    sys.modules.setdefault(path.stem, None)  # a file that imports its own name has no such module
    sys.path.append(str(path.resolve().parent))
    exec(code, vars(module))
    if not callable(getattr(module, name, None)):
        raise Stopped(f"{file} has no function `{name}`: check the names of both")
    return getattr(module, name)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause's cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def place_of(error: BaseException, file: str = "", line: int = 0) -> tuple[str, int]:
    """Return the file and the line of the judged code at which it stopped.

    Where no judged code took part, return those of the code that raised the error.
    file, line: of a kernel that Triton refused; the line is used where Triton names none.
    """
    frames = [
        (frame.f_globals.get("__name__") == MODULE, frame.f_code.co_filename, at)
        for each in causes(error)
        for frame, at in traceback.walk_tb(each.__traceback__)
    ]
    if not file and frames:
        _, file, line = ([frame for frame in frames if frame[0]] or frames)[-1]
    source = "".join(linecache.getlines(file))
    for each in causes(error):
        # Its lines are counted from the kernel's first one.  Triton's own functions, which a
        # kernel calls, are not in the file.
        if isinstance(each, CompilationError) and each.src and each.src.rstrip() in source:
            before, *_ = source.partition(each.src.rstrip())
            line = before.count("\n") + getattr(each.node, "lineno", 1)
    return file, line


def reason_of(error: BaseException) -> str:
    """Return the first cause in the words of Python or Triton: its type, and one line."""
    *_, last = causes(error)
    if isinstance(last, CompilationError) and last.error_message:
        words = last.error_message
        # Triton gives some as Python code: AssertionError('the sentence').
        if as_code := re.fullmatch(r"\w+\((['\"].*['\"])\)", words.strip(), re.DOTALL):
            words = ast.literal_eval(as_code[1])
    else:  # also of an error that raises another one when asked for its words
        words = f"{type(last).__name__}: {traceback.TracebackException.from_exception(last)}"
    return " ".join(words.split())


def in_one_sentence(error: BaseException) -> str:
    """Return where the judged code stopped, and why."""
    if isinstance(error, Stopped):
        return str(error)
    file, line = place_of(error)
    where = f"in line {line} of {Path(file).name}" if file else ""
    if isinstance(error, TimeOver):
        return too_long(*error.args, where)
    advice = f": {TAKE_OUT}" if isinstance(error, SystemExit) else ""
    return f"The code stops {where} with {reason_of(error)}{advice}"


def too_long(seconds: float, where: str = "") -> str:
    """Return that the judged code used up its time, and where it was then."""
    last = f", at last {where}" if where else ""
    question = "is there a loop that never ends, as `while True` or a range whose step is 0?"
    return f"The code ran longer than {seconds:g} s{last}: {question}"
