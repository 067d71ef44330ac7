"""What is not trusted runs in a process of its own, for a limited time.

    with Apart("judging.judged_file:load_function", "mine.py", "double") as apart:
        apart.call(torch.ones(3), seconds=60)    # double(torch.ones(3)); or raises Stopped

The process may crash, end itself, loop for ever or print: the caller gets an answer or a sentence.
Answers are read as plain data and tensors, so none can run code in the caller's process.
"""

import contextlib
import ctypes
import fcntl
import importlib
import io
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from judging.judged_file import TAKE_OUT, Stopped, TimeOver, in_one_sentence, too_long

HERE = Path(__file__).parents[1]  # the project's folder
SERVE = "from judging.processes import serve; serve()"
START, REST = 30.0, 5.0  # seconds that the first call of a process, or another, may take beyond
ENDED = {
    signal.SIGKILL: "was it too large for this machine's memory?",
    signal.SIGABRT: "a library found its memory overwritten, or gave up",
}
OUTSIDE = "the kernel read or wrote far outside of its tensors; look at the addresses"


class Apart(contextlib.AbstractContextManager):
    """A process that runs what is not trusted: it serves calls of one function.

    function: "module:function", a function of this project.  It is called once in the process, with
        `arguments`, and returns the function that is served.
    environment: what differs from this process's own.

    Arguments and answers are plain data (None, numbers, words, dtypes, lists, tuples, dictionaries)
    and tensors.
    """

    def __init__(self, function: str, *arguments, environment: Mapping[str, str] | None = None):
        self.function, self.arguments = function, arguments
        self.environment = os.environ | (environment or {})
        self.process = None

    def __exit__(self, *exception) -> None:
        self.close()

    def start(self) -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(theirs.fileno())],
                cwd=HERE,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def call(self, *arguments, seconds: float):
        """Return the function's answer.

        Raises:
            Stopped: there is none.  The next call starts another process.
        """
        sys.stdout.flush()
        beyond = REST if self.process else START
        if not self.process:
            self.start()
        request = self.function, self.arguments, arguments, seconds
        try:
            send(self.channel, request, seconds + beyond)
            is_answer, value = receive(self.channel, seconds + beyond)
        except TimeoutError:
            is_answer, value = False, too_long(seconds)
        except OSError:  # the process is gone
            is_answer, value = False, ended(self.process.wait())
        except (pickle.UnpicklingError, EOFError, RuntimeError):
            is_answer, value = False, "The process answered with what is no plain data."
        except BaseException:  # as Ctrl-C
            self.close()
            raise
        if not is_answer:
            self.close()
            raise Stopped(value)
        return value

    def close(self) -> None:
        """End the process, and those that it started."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.channel.close()
            self.process = None


def ended(code: int) -> str:
    """Return how a process ended, in words, from its exit code."""
    if code >= 0:
        return f"The process ended with exit code {code} before it had answered: {TAKE_OUT}"
    return f"{signal.Signals(-code).name} ended the process: {ENDED.get(-code, OUTSIDE)}"


def send(channel: socket.socket, value: object, seconds: float | None = None) -> None:
    data = io.BytesIO()
    torch.save(value, data)
    channel.settimeout(seconds)
    channel.sendall(len(data.getvalue()).to_bytes(8, "big") + data.getvalue())


def receive(channel: socket.socket, seconds: float | None = None) -> object:
    """Return what `send` sent; of the data nothing is executed.

    Raises:
        TimeoutError: nothing came for so many seconds.
        OSError: the other process is gone.
    """
    channel.settimeout(seconds)
    with channel.makefile("rb") as stream:
        data = stream.read(int.from_bytes(stream.read(8), "big"))
    if not data:
        raise ConnectionResetError
    return torch.load(io.BytesIO(data), weights_only=True)


# ---- In the process itself ----------------------------------------------------------------------


def serve() -> None:
    """Answer the calls that come through the file descriptor sys.argv[1], until it is closed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the thread that started this process
    # under another number, which no code guesses, and not handed on to other programs
    given = int(sys.argv.pop())
    number = fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, 100 + secrets.randbelow(800))
    os.close(given)
    channel = socket.socket(fileno=number)
    served = None
    with contextlib.suppress(ConnectionResetError):
        while True:
            function, how, arguments, seconds = receive(channel)
            module, _, name = function.partition(":")
            make = getattr(importlib.import_module(module), name)
            try:
                with limited(seconds):
                    served = served or make(*how)
                    answer = True, served(*arguments)
            except BaseException as error:  # whatever the judged code raises
                answer = False, in_one_sentence(error)
            with contextlib.suppress(Exception):  # the judged code may have closed it
                sys.stdout.flush()
            send(channel, answer)


@contextlib.contextmanager
def limited(seconds: float):
    """Raise TimeOver in the code below after so many seconds."""

    def end(number, frame):
        raise TimeOver(seconds)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
