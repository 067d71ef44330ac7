"""How a script is called and how it ends: flags, errors in one sentence, exit codes, Ctrl-C.

Every script has the same form, so that --help and a mistyped flag are answered at once:

    from harness.cli import command_line    # light: imports no PyTorch, which takes seconds

    def main() -> None:
        args = parse_args()             # flags, from light modules alone
        import torch                    # what the script runs, after its flags
        ...

    if __name__ == "__main__":
        command_line.run_main(main)

Defaults that depend on the GPU are None until then; `Workload.from_flags` fills them in.
"""

import argparse
import contextlib
import io
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from harness.cli.processes import world_size


class UserError(Exception):
    """The input is at fault: one sentence, exit code 2."""


class RunError(Exception):
    """Something failed while running: one sentence, exit code 1."""


class Parser(argparse.ArgumentParser):
    """argparse, with errors as one sentence in place of the usage text."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        raise UserError(f"{message} (--help lists the flags)")


def flag_name(name: str) -> str:
    """As it is typed."""
    return f"--{name.replace('_', '-')}"


def whole_number(text: str, least: int = 0) -> int:
    """argparse type: an integer of at least `least` that fits 31 bits, as sizes and seeds do."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < 2**31:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least {least} (below 2**31), not {text!r}"
        )
    return value


def positive_int(text: str) -> int:
    """argparse type: an integer of at least 1."""
    return whole_number(text, least=1)


def positive_float(text: str) -> float:
    """argparse type: a number above 0, and below 1e30 so that fp32 holds what comes of it."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e30:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and below 1e30, not {text!r}")
    return value


# ---------------------------------------------------------------- how a run ends


def ran_out_of_memory(error: Exception) -> bool:
    """PyTorch's allocator, Triton, cuBLAS and the CPU's allocator say it in words."""
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    return isinstance(error, MemoryError) or any(w in str(error) for w in words)


def out_of_memory() -> str:
    """What to do about it."""
    import torch  # what ran out of memory has imported it

    where = "the GPU" if torch.cuda.is_available() else "this machine"
    return (
        f"{where} ran out of memory. Lower, in this order: --batch-size, --seq-len; "
        "then use a smaller --model. On a GPU, also check with nvidia-smi that no other process "
        "holds its memory"
    )


LOST_A_PROCESS = "another process of this run ended or does not answer: see what it says"


def lost_a_process(error: Exception) -> bool:
    """Did one of several processes not get the data of another?  Gloo says it in words."""
    if world_size() == 1:
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo" in str(error)


class OutputError(Exception):
    """Standard output takes nothing more; its cause is the OSError."""


class StandardOutput:
    """sys.stdout, with an OutputError for its OSError, which could be that of any other file."""

    def __init__(self, stream: io.TextIOBase):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self._checked(self.stream.write, text)

    def flush(self) -> None:
        self._checked(self.stream.flush)

    def _checked(self, method: Callable, *arguments):
        try:
            return method(*arguments)
        except OSError as error:
            raise OutputError(error.strerror) from error


class Ended(BaseException):
    """A signal ends the process; as Ctrl-C does it, so that whoever has something to end can."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_child(command: list[str]) -> subprocess.CompletedProcess:
    """Run a command to its end and catch what it prints.

    It ends with this process, whatever ends that.
    """

    def end(number, frame):
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
        raise Ended(number)

    # under nohup SIGHUP is ignored, and is to be
    ending = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    try:
        for number in ending:
            signal.signal(number, end)
        return subprocess.run(command, capture_output=True, text=True)
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def run_main(main: Callable[[], int | None]) -> None:
    """Run a script's main(), without a traceback for what is no fault of the script.

    Exit code 0; 1: it failed while running; 2: bad input; 128 + N: signal N ended it, Ctrl-C for
    one (130), or a pipe whose reader is gone, as in `| head -1` (141).
    """
    if sys.stdout is None:  # closed by whoever started the script
        leave(exit_code(main))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no "×" shows "?"
    output = StandardOutput(sys.stdout)
    with contextlib.redirect_stdout(output):
        code = exit_code(main)
        try:
            output.flush()
        except OutputError as error:  # main() printed less than a buffer, or has not been told yet
            code = code or output_failed(error)
    leave(code)


def leave(code: int) -> None:
    """End this process; of several, each ends at once, without what Python does at its end.

    One that failed does not wait for the others, which may wait for its data: torchrun ends them.
    In those that did not, threads of torch.distributed may still hold Python's objects, and to let
    go of them while Python ends can abort the process.
    """
    if world_size() == 1:
        sys.exit(code)
    if not code:
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    sys.stderr.flush()
    os._exit(code)


def exit_code(main: Callable[[], int | None]) -> int:
    """What main() ends with; what went wrong is a sentence on stderr."""
    try:
        return main() or 0
    except SystemExit as stop:  # argparse, after --help
        return stop.code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OutputError as error:
        return output_failed(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Ended as error:
        print(f"ended by {error}", file=sys.stderr)
        return 128 + error.number
    except Exception as error:
        if isinstance(error, (RuntimeError, MemoryError)) and ran_out_of_memory(error):
            print(f"error: {out_of_memory()}", file=sys.stderr)
        elif lost_a_process(error):
            print(f"error: {LOST_A_PROCESS}", file=sys.stderr)
        elif world_size() > 1:  # its end must not wait for the others: see `leave`
            traceback.print_exc()
        else:
            raise
        return 1


def output_failed(error: OutputError) -> int:
    """The exit code where stdout takes nothing more; a sentence, unless its reader is gone."""
    # when the interpreter ends, it tries to write what is left
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error.__cause__, BrokenPipeError):
        return 128 + signal.SIGPIPE
    print(f"error: cannot write to standard output: {error}", file=sys.stderr)
    return 1


def answer_flags(doc: str) -> None:
    """For a script without flags that must import PyTorch at its top, as a file of tests must.

    Called before these imports: answers --help, refuses every other word, and makes Ctrl-C during
    the imports print one word and no traceback.
    """
    if len(sys.argv) > 1:
        run_main(lambda: Parser(doc).parse_args() and None)
    sys.excepthook = show_interrupt


def show_interrupt(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """In the place of sys.excepthook; the exit code stays that of a process which SIGINT ended."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)
