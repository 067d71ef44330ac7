"""The contracts of numbers, asked of every function; and the comparison itself, which can fail."""

from unittest import mock

import pytest
import torch

from harness.cli.device import DEVICE, HAS_GPU
from judging import numbers
from judging.circumstances import poisoned_memory
from judging.numbers import ROWS
from rmsnorm_kernel import triton
from subjects.subject import checks, compare_parts, in_float64, references, run
from tests.contracts import contract, contracts_of

pytestmark = pytest.mark.usefixtures("small_tiles")
globals().update(contracts_of(numbers))


def test_new_tensors_are_poisoned():
    with poisoned_memory():
        t = torch.empty(4, device=DEVICE)
        news = t, torch.empty_like(t), t.new_empty(2)
    assert all(new.isnan().all() for new in news)
    assert not torch.are_deterministic_algorithms_enabled()


@contract("dtype", lambda subject: (torch.float32, torch.bfloat16))
def test_comparator_rejects_wrong_answers(subject, dtype):
    inputs, douts = subject.make((11,), subject.size, dtype)
    ref64, eagers = references(subject, inputs, douts)
    dtypes = {part: t.dtype for part, t in eagers[0].items()}

    def accepted(parts):
        answer = {part: parts.get(part, ref64[part]).to(dtype) for part, dtype in dtypes.items()}
        found = compare_parts(subject, answer, inputs, ref64, eagers)
        return all(check.passed for check in found)

    assert accepted({}), "the right answer"
    wrong = {f"{part} zero": {part: 0 * ref64[part]} for part in ref64}
    wrong |= {f"{part} sign flipped": {part: -ref64[part]} for part in ref64}
    wrong |= subject.wrong_answers(in_float64(inputs), in_float64(douts), ref64)
    assert [mistake for mistake, parts in wrong.items() if accepted(parts)] == []


@contract()
def test_comparator_rejects_what_no_kernel_wrote(subject, poison_new_tensors):
    inputs, douts = subject.make(ROWS, subject.size, torch.float32)
    run(subject, subject.function, inputs, douts)  # now nothing else is wanting
    runners = [triton.runtime.JITFunction]
    if not HAS_GPU:
        from triton.runtime.interpreter import InterpretedFunction

        runners.append(InterpretedFunction)
    with mock.patch.multiple(runners[-1], run=lambda *args, **options: None):
        found = checks(subject, inputs, douts)
    passed = {check.name.split()[1] for check in found if check.passed}
    assert passed <= set(subject.made_by_pytorch)
