"""Ctrl-C while a script still imports PyTorch, which takes seconds, prints one word and no traceback.

Every script imports this file before anything else; later `command_line.run_main` does the same.
"""

import sys
from types import TracebackType


def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """In the place of sys.excepthook; the exit code stays that of a process which SIGINT ended."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = show
