"""The matrix of contracts and subjects: a contract is a test that runs for every subject that is
not exempt.

    @contract("dtype", lambda subject: subject.dtypes)
    def test_outputs_and_gradients_match_float64(subject, dtype): ...

Its name, without "test_", is what a subject's record gives a reason for in `exempt`.
tests/contracts_test.py asserts that there is no hole: that every pair either runs or has a reason.
"""

from collections.abc import Callable, Iterable

import pytest
import torch

from subjects import SUBJECTS
from subjects.subject import Subject

RUNS: dict[str, set[str]] = {}  # contract: the subjects for which it runs
PLAYBOOK = "rmsnorm", "cross_entropy"  # a reader runs the contracts of these two
DTYPE_IDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def contract(
    argument: str = "",
    cases: Callable[[Subject], Iterable] = lambda subject: [None],
    exhaustive: Callable[..., bool] = lambda subject, case: False,
):
    """Run a test for every subject, and for every case of it.

    argument: the name under which the test gets its case; none if there is one case only.
    cases: the cases of a subject.
    exhaustive: (subject, case) -> is this one left to the runs that leave nothing out?  All those
        of subjects that are not the playbook's are.
    """

    def decorate(test):
        name = test.__name__.removeprefix("test_")
        rows = []
        for subject in SUBJECTS.values():
            if name in subject.exempt:
                continue
            for case in cases(subject):
                left = subject.name not in PLAYBOOK or exhaustive(subject, case)
                marks = [pytest.mark.exhaustive] if left else []
                values = [subject, case] if argument else [subject]
                case_id = [case_name(case)] if argument else []
                rows.append(
                    pytest.param(*values, id="-".join([subject.name, *case_id]), marks=marks)
                )
        RUNS[name] = {row.values[0].name for row in rows}
        return pytest.mark.parametrize(["subject", argument] if argument else ["subject"], rows)(
            test
        )

    return decorate


def case_name(case) -> str:
    if isinstance(case, tuple):
        return "-".join(map(case_name, case))
    return DTYPE_IDS.get(case, str(case)) if isinstance(case, torch.dtype) else str(case)
