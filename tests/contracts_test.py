"""Is every contract asked of every function?  The matrix has no hole that does not say why."""

import pytest

from tests import (  # noqa: F401  they make the matrix
    contracts_autograd_test,
    contracts_compile_test,
    contracts_gpu_test,
    contracts_numbers_test,
    contracts_refusals_test,
)
from tests.contracts import RUNS
from tests.subjects import SUBJECTS


@pytest.mark.parametrize("contract", RUNS)
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_every_contract_runs_or_its_subject_says_why_not(subject, contract):
    runs, exempt = subject.name in RUNS[contract], contract in subject.exempt
    assert runs != exempt, f"{contract} for {subject}: runs {runs}, exempt {exempt}"


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_every_exemption_is_of_a_contract_and_has_a_reason(subject):
    for contract, reason in subject.exempt.items():
        assert contract in RUNS, f"{subject} is exempt from {contract}, which is no contract"
        assert len(reason.split()) > 3, f"{subject}, {contract}: {reason!r} is no reason"


def test_names_of_subjects_are_their_own():
    assert all(name == subject.name for name, subject in SUBJECTS.items())
    assert all(s.variant_of is None or s.variant_of in SUBJECTS for s in SUBJECTS.values())
