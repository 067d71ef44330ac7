"""Is every contract asked of every function?  The matrix has no hole that does not say why."""

import pytest

from subjects import SUBJECTS
from tests import (  # noqa: F401  they make the matrix
    contracts_autograd_test,
    contracts_compile_test,
    contracts_gpu_test,
    contracts_numbers_test,
    contracts_refusals_test,
    watching_test,
)
from tests.contracts import RUNS


@pytest.mark.parametrize("contract", RUNS)
def test_contract_runs_for_every_function_or_its_record_says_why_not(contract):
    exempt = {name for name, subject in SUBJECTS.items() if contract in subject.exempt}
    assert RUNS[contract] == set(SUBJECTS) - exempt


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_every_exemption_is_of_a_contract_and_has_a_reason(subject):
    for contract, reason in subject.exempt.items():
        assert contract in RUNS, f"{subject} is exempt from {contract}, which is no contract"
        assert len(reason.split()) > 3, f"{subject}, {contract}: {reason!r} is no reason"


def test_names_of_subjects_are_their_own():
    assert all(name == subject.name for name, subject in SUBJECTS.items())
