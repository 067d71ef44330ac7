"""How a script is called, prints and ends: errors in one sentence, exit codes, Ctrl-C.

Every script ends with `command_line.run_main(main)`.  main() reads the flags, with modules that
import no PyTorch, and only then imports what it runs: PyTorch takes seconds, so --help and a
mistyped flag are answered at once.
"""

import argparse
import contextlib
import errno
import io
import logging
import os
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator

from harness.cli.processes import world_size

TERMINAL = 100  # columns: no line that a script prints is wider, unless it is a single word
# How messages of libraries begin that ask nothing of a user.  Warnings:
NOT_FOR_USERS = (
    "TensorFloat32 tensor cores for float32",  # Inductor; products in fp32 are exact on purpose
    r"\s*Online softmax is disabled",  # Inductor
    "Warning: Profiler clears events",  # PyTorch, of a profiler that records a single cycle
    r"Detected call of `lr_scheduler\.step\(\)",  # PyTorch: ours steps in the backward
    "(invalid value|overflow|divide by zero) encountered",  # NumPy, in Triton's interpreter
)
# by logger: lines of a log
NOT_FOR_USERS_LOGGED = {"torch._inductor.utils": "Not enough SMs to use max_autotune_gemm mode"}
PICK_A_GPU = (
    "nvidia-smi -L lists them; begin the command with CUDA_VISIBLE_DEVICES=GPU-..., or start the "
    "container with --gpus '\"device=GPU-...\"' in place of --gpus all"
)


class UserError(Exception):
    """The input is wrong: one sentence, exit code 2."""


class RunError(Exception):
    """Something failed while running: one sentence, exit code 1."""


class HostMemoryError(RunError):
    """The host has no room for what is to wait there."""


class Parser(argparse.ArgumentParser):
    """argparse, which says an error in one sentence in place of the usage text."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        raise UserError(f"{message} (--help lists the flags)")


def flag_name(name: str) -> str:
    """Return a flag as a user types it."""
    return f"--{name.replace('_', '-')}"


def whole_number(text: str, least: int = 0) -> int:
    """argparse type: an integer of at least `least` that fits 31 bits, as sizes and seeds do."""
    with contextlib.suppress(ValueError):
        if least <= (value := int(text)) < 2**31:
            return value
    expected = f"a whole number of at least {least} (below 2**31)"
    raise argparse.ArgumentTypeError(f"must be {expected}, not {text!r}")


def positive_int(text: str) -> int:
    """argparse type: an integer of at least 1."""
    return whole_number(text, least=1)


def positive_float(text: str) -> float:
    """argparse type: a number above 0, and below 1e30, whose products fp32 can hold."""
    with contextlib.suppress(ValueError):
        if 0.0 < (value := float(text)) < 1e30:
            return value
    raise argparse.ArgumentTypeError(f"must be a number above 0 and below 1e30, not {text!r}")


def require_known(what: str, names: Collection[str], known: Collection[str], *words: str) -> None:
    """Refuse names that are not known; `words`: what may be given in place of names.

    Raises:
        argparse.ArgumentTypeError: argparse makes one sentence of it, with the flag.
    """
    if unknown := [name for name in names if name not in known]:
        found, choices = ", ".join(map(repr, unknown)), ", ".join([*known, *words])
        raise argparse.ArgumentTypeError(f"unknown {what} {found}; choose from {choices}")


def require_one_process() -> None:
    """Refuse several processes, in a script that is for one.

    Raises:
        UserError: torchrun started several.
    """
    if (n := world_size()) > 1:
        raise UserError(f"this script is for one process and torchrun started {n}: start it alone")


def ran_out_of_memory(error: Exception) -> bool:
    """Return True for an error of PyTorch's, Triton's, cuBLAS's or the CPU's allocator."""
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    return isinstance(error, MemoryError) or any(w in str(error) for w in words)


def out_of_memory() -> str:
    """Return the sentence for such an error, which says what to do."""
    import torch  # imported long ago, by the code that ran out of memory

    where = "the GPU" if torch.cuda.is_available() else "this machine"
    lower = "Lower, in this order: --batch-size, --seq-len; then use a smaller --model"
    check = "On a GPU, also check with nvidia-smi that no other process holds its memory"
    return f"{where} ran out of memory. {lower}. {check}"


def sees_mixed_gpus(error: Exception) -> bool:
    """Return True for what PyTorch raises if CUDA opens fewer GPUs than the driver lists.

    On a DGX Station with an RTX PRO beside its GB300, a process can open one of the two.
    """
    return "device < num_gpus" in str(error)


def lost_a_process(error: Exception) -> bool:
    """Return True for what one of several processes raises if another's data do not come."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo" in str(error)  # gloo raises a RuntimeError


class Ended(BaseException):
    """A signal ends the process.  Raised as Ctrl-C is, so that `finally` and `with` still run."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Raise Ended in the block where a signal would end the process, so that `finally` runs."""

    def end(number, frame):
        signal.signal(number, signal.SIG_DFL)  # a second signal ends this process at once
        raise Ended(number)

    # nohup ignores SIGHUP, and that stays
    ending = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    try:
        for number in ending:
            signal.signal(number, end)
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def fitted(text: str) -> str:
    """Return a text whose lines are broken at blanks to fit TERMINAL; what follows is indented."""
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())] + "  "
        how = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
        long = len(line) > TERMINAL
        lines += textwrap.wrap(line, TERMINAL, **how) if long else [line]
    return "\n".join(lines)


class FittedOutput:
    """A text stream that gets `fitted` lines."""

    def __init__(self, stream: io.TextIOBase):
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(fitted(text))

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def drop_messages() -> None:
    """Drop messages that are in NOT_FOR_USERS or NOT_FOR_USERS_LOGGED, for the whole process."""
    for message in NOT_FOR_USERS:
        warnings.filterwarnings("ignore", message)
    for name, text in NOT_FOR_USERS_LOGGED.items():
        logging.getLogger(name).addFilter(lambda record, text=text: record.msg != text)


def run_main(main: Callable[[], int | None]) -> None:
    """Run a script's main() and exit; an error of the user gets a sentence and no traceback.

    Lines that are wider than TERMINAL are broken.

    Exit codes: 0; 1: failed while running; 2: bad input; 130: Ctrl-C; 128 + N: signal N ended the
    run, SIGPIPE (141) where the reader of a pipe is gone, as in `| head -1`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if whoever started the script closed it
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no "×" shows "?"
    drop_messages()
    with contextlib.redirect_stdout(sys.stdout and FittedOutput(sys.stdout)):
        # what main() printed last is still in a buffer
        leave(exit_code(main) or exit_code(flush))


def leave(code: int) -> None:
    """End this process.  One of several processes skips what Python does at its end.

    A process that failed does not wait for the others, which may wait for its data; torchrun ends
    them.  In a process that did not fail, threads of torch.distributed may still hold Python's
    objects, and freeing these while Python ends can abort the process.
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
    """Run main() and return its exit code; print what went wrong to stderr."""
    code = 1
    try:
        return main() or 0
    except SystemExit as stop:  # argparse, after --help
        return stop.code
    except BrokenPipeError:  # the reader of a pipe is gone
        drop_output()
        return 128 + signal.SIGPIPE
    except UserError as error:
        words, code = f"error: {error}", 2
    except RunError as error:
        words = f"error: {error}"
    except KeyboardInterrupt:
        words, code = "interrupted", 128 + signal.SIGINT
    except Ended as error:
        words, code = f"ended by {error}", 128 + error.number
    except Exception as error:
        if isinstance(error, (RuntimeError, MemoryError)) and ran_out_of_memory(error):
            words = f"error: {out_of_memory()}"
        elif sees_mixed_gpus(error):
            words = f"error: one process cannot open all of these GPUs: name one. {PICK_A_GPU}"
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
            drop_output()
            words = f"error: cannot write: {error.strerror}"
        elif world_size() == 1:
            raise
        elif lost_a_process(error):
            words = "error: another process of this run ended or does not answer: see what it says"
        else:  # `leave` must end this process, so the error cannot be raised
            words = traceback.format_exc().rstrip("\n")
    print(words, file=sys.stderr)
    return code


def flush() -> None:
    print(end="", flush=True)  # and nothing where standard output is closed


def drop_output() -> None:
    """Drop what standard output does not take: when Python ends, it would try again to write it."""
    try:
        flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def answer_flags(doc: str) -> None:
    """Answer --help and refuse every flag, before PyTorch is imported.

    Called at the top of files of tests.  Ctrl-C during the imports then ends the process quietly.
    """
    if len(sys.argv) > 1:
        run_main(lambda: Parser(doc).parse_args() and None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
