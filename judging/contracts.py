"""The register of contracts.  A contract is a function that asks one thing of a subject:

    @contract("dtype", lambda subject: subject.dtypes)
    def outputs_and_gradients_match_float64(subject, dtype):
        match_float64(subject, *subject.make((5, 3), subject.size, dtype))

It returns if the subject keeps it.  Else it raises Wrong, which says what was given and what was
expected.  A subject's record gives a reason in `exempt` where a contract cannot apply.

`verdicts` asks all of a subject: of one of this project, or of what somebody else's function has in
common with it (`of_callable`).  The tests ask the same of each subject of this project, case by
case (tests/contracts.py).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from harness.benchmark.checking import DTYPE_NAME
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
    gib: float = 0  # of a GPU's memory

    @property
    def name(self) -> str:
        return self.ask.__name__

    def __call__(self, subject: Subject, case: object) -> None:
        """Ask one case; raise Wrong, NotTried, or what the function raises."""
        if HAS_GPU and torch.cuda.mem_get_info()[0] < self.gib * 2**30:
            raise NotTried(f"needs {self.gib:.0f} GiB of free GPU memory")
        with poisoned_memory():
            self.ask(subject, *([case] if self.argument else []))


CONTRACTS: dict[str, Contract] = {}  # in the order in which they are asked


def contract(*arguments, **options) -> Callable[[Callable], Callable]:
    """Register a function as a contract; see Contract for the arguments behind the first."""

    def register(ask: Callable) -> Callable:
        CONTRACTS[ask.__name__] = Contract(ask, *arguments, **options)
        return ask

    return register


@dataclass(frozen=True)
class Verdict:
    """What was found of one contract."""

    contract: str
    outcome: str  # "holds", "wrong", "refused", "not tried"
    n_cases: int = 0  # that were asked
    case: str = ""  # the first that does not hold, in words
    words: str = ""  # what was given and expected; the refusal; why it was not tried


def case_name(case: object, between: str = "-") -> str:
    """Return a case in words: a dtype, a size, a name, or several of them."""
    if isinstance(case, tuple):
        return between.join(case_name(each, between) for each in case)
    return DTYPE_NAME[case].lower() if isinstance(case, torch.dtype) else str(case)


def of_callable(subject: Subject, function: Callable) -> Subject:
    """Return the subject of somebody else's function, which takes what the subject's own takes.

    Nothing is known of what the function keeps for its backward, of its sentences, and of the order
    of its sums.
    """
    known = {"recorded": False, "exact_again": False, "saved": (), "fixed_outputs": {}}
    return replace(subject, function=function, entry=None, kernels=(), **known)


def verdict_of(subject: Subject, asked: Contract) -> Verdict:
    """Ask a contract up to its first case that does not hold."""
    if asked.name in subject.exempt:
        return Verdict(asked.name, "not tried", words=subject.exempt[asked.name])
    n_cases, reason = 0, "there is no case"
    for case in asked.cases(subject):
        try:
            asked(subject, case)
        except NotTried as why:
            reason = str(why)
            continue
        except Wrong as broken:
            outcome, words = "wrong", str(broken)
        except Exception as error:
            first_line, *_ = *str(error).strip().splitlines(), ""
            outcome, words = "refused", f"{type(error).__name__}: {first_line}"
        else:
            n_cases += 1
            continue
        where = f"{asked.argument} {case_name(case, ', ')}" if asked.argument else ""
        return Verdict(asked.name, outcome, n_cases + 1, where, words)
    if n_cases == 0:
        return Verdict(asked.name, "not tried", words=reason)
    return Verdict(asked.name, "holds", n_cases)


def verdicts(subject: Subject, names: Iterable[str] = ()) -> Iterator[Verdict]:
    """Yield the verdict of each contract, or of the named ones, up to its first broken case."""
    names = set(names)
    for name, asked in CONTRACTS.items():
        if (name in names or not names) and (subject.recorded or not asked.of_record):
            yield verdict_of(subject, asked)
