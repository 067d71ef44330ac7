"""The matrix of contracts and subjects: a contract is a test that runs for every subject that is
not exempt, case by case.

    globals().update(contracts_of(numbers))    # those that `judging` has

    @contract("dtype", lambda subject: subject.dtypes)    # one that needs what only tests have
    def test_comparator_rejects_wrong_answers(subject, dtype): ...

tests/contracts_test.py asserts that there is no hole: that every pair either runs or has a reason.
"""

from collections.abc import Callable, Iterable
from types import ModuleType

import pytest

from judging.contract import Contract, NotTried
from judging.contracts import case_name
from subjects import SUBJECTS
from tests import tiles

FUNCTIONS = SUBJECTS.values()
RUNS: dict[str, set[str]] = {}  # contract: the functions for which it runs
PLAYBOOK = "rmsnorm", "cross_entropy"  # a reader runs the contracts of these two


def of_all_subjects(
    asked: Contract, names: list[str], subjects: Iterable = FUNCTIONS
) -> pytest.MarkDecorator:
    """Run a test, which has these arguments, for every subject and for every case of it.

    All cases of subjects that are not the playbook's are left to the runs that leave nothing out.
    """
    name = asked.name.removeprefix("test_")
    rows = []
    for subject in subjects:
        if name in subject.exempt:
            continue
        for case in asked.cases(subject):
            left = subject.name not in PLAYBOOK or asked.exhaustive(subject, case)
            marks = [pytest.mark.exhaustive] if left else []
            case_id = [case_name(case)] if asked.argument else []
            values = [subject, case][: len(names)]
            rows.append(pytest.param(*values, id="-".join([subject.name, *case_id]), marks=marks))
    if subjects is FUNCTIONS:
        RUNS[name] = {row.values[0].name for row in rows}
    return pytest.mark.parametrize(names, rows)


def contract(*arguments, **options) -> Callable[[Callable], Callable]:
    """Run a test as a contract; see Contract for the arguments behind the first."""

    def decorate(test: Callable) -> Callable:
        asked = Contract(test, *arguments, **options)
        names = ["subject", asked.argument] if asked.argument else ["subject"]
        return of_all_subjects(asked, names)(test)

    return decorate


def as_test(asked: Contract, subjects: Iterable) -> Callable:
    @of_all_subjects(asked, ["subject", "case"], subjects)
    def test(subject, case, gpu_memory, monkeypatch):
        if asked.gib:
            gpu_memory(asked.gib)
        if asked.shipped_tiles:
            tiles.shipped_tiles(monkeypatch)
        try:
            asked(subject, case)
        except NotTried as why:
            pytest.skip(str(why))

    return test


def contracts_of(module: ModuleType, subjects: Iterable = FUNCTIONS) -> dict[str, Callable]:
    """Return the contracts of a module of `judging` as tests, by their names."""
    found = [each for each in vars(module).values() if isinstance(each, Contract)]
    return {f"test_{each.name}": as_test(each, subjects) for each in found}
