"""The register of contracts.  A contract is a function that asks one thing of a subject:

    @contract("dtype", lambda subject: subject.dtypes)
    def outputs_and_gradients_match_float64(subject, dtype):
        passed(checks(subject, *subject.make((5, 3), subject.size, dtype)))

It returns if the subject keeps it.  Else it raises Wrong, which says what was given and what was
expected.  A subject's record gives a reason in `exempt` where a contract cannot apply.

`verdicts` asks all of a subject.  The tests ask the same of each subject of
this project, case by case (tests/contracts.py).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from subjects.subject import Subject


class Wrong(AssertionError):
    """A contract is broken.  The words say what was given, and what was expected."""


class NotTried(Exception):
    """A contract cannot be asked here.  The words say why."""


@dataclass(frozen=True)
class Contract:
    """One question, and the cases in which a subject is asked."""

    ask: Callable  # (subject), or (subject, case)
    argument: str  # the name of the case; "": there is one case only
    cases: Callable[[Subject], Iterable]  # from the smallest on
    # (subject, case) -> is it left to the runs of the tests that leave nothing out?
    exhaustive: Callable[..., bool]
    of_record: bool  # asks what only a record of this project knows, so no other function is asked

    @property
    def name(self) -> str:
        return self.ask.__name__


CONTRACTS: dict[str, Contract] = {}


def contract(
    argument: str = "",
    cases: Callable[[Subject], Iterable] = lambda subject: [None],
    exhaustive: Callable[..., bool] = lambda subject, case: False,
    of_record: bool = False,
) -> Callable:
    """Register a function as a contract; see Contract for the arguments."""

    def register(ask: Callable) -> Callable:
        CONTRACTS[ask.__name__] = Contract(ask, argument, cases, exhaustive, of_record)
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


def verdicts(subject: Subject, names: Iterable[str] = ()) -> Iterator[Verdict]:
    """Yield the verdict of each contract, or of the named ones, up to its first broken case."""
    raise NotImplementedError
