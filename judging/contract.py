"""What a contract is: a function that asks one thing of a subject.

    @contract("dtype", lambda subject: subject.dtypes)
    def outputs_and_gradients_match_float64(subject, dtype):
        match_float64(subject, *subject.make((5, 3), subject.size, dtype))

It returns if the subject keeps it.  Else it raises Wrong, which says what was given and what was
expected.  A subject's record gives a reason in `exempt` where a contract cannot apply.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from harness.cli.device import HAS_GPU
from judging.circumstances import poisoned_memory
from subjects.subject import Subject


class Wrong(AssertionError):
    """A contract is broken.  The words say what was given, and what was expected."""


class NotTried(Exception):
    """A contract cannot be asked here.  The words say why."""


@dataclass(frozen=True)
class Contract:
    """One question, and the cases in which a subject is asked."""

    ask: Callable  # (subject), or (subject, case)
    argument: str = ""  # the name of the case; "": there is one case only
    cases: Callable[[Subject], Iterable] = lambda subject: [None]  # from the smallest on
    # (subject, case) -> is it left to the runs of the tests that leave nothing out?
    exhaustive: Callable[..., bool] = lambda subject, case: False
    of_record: bool = False  # asks what only a record knows, so no other function is asked
    shipped_tiles: bool = False  # asked at real sizes, so the tests must not shrink tiles
    gpu: bool = False  # a CPU cannot show it
    gib: float = 0  # of a GPU's memory

    @property
    def name(self) -> str:
        return self.ask.__name__

    def __call__(self, subject: Subject, case: object) -> None:
        """Ask one case; raise Wrong, NotTried, or what the function raises."""
        if self.gpu and not HAS_GPU:
            raise NotTried("needs a CUDA GPU")
        if HAS_GPU and torch.cuda.mem_get_info()[0] < self.gib * 2**30:
            raise NotTried(f"needs {self.gib:.0f} GiB of free GPU memory")
        try:
            with poisoned_memory():
                self.ask(subject, *([case] if self.argument else []))
        finally:
            if HAS_GPU:
                torch.cuda.synchronize()  # so that a kernel's error is this case's


def contract(*arguments, **options) -> Callable[[Callable], Contract]:
    """Make a contract of a function; see Contract for the arguments behind the first."""
    return lambda ask: Contract(ask, *arguments, **options)
