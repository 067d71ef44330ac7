"""The contracts of refusals, asked of every function; and those that need what only tests have."""

import pytest
import torch

import kernel_support
from judging import refusals
from subjects.subject import as_tuple
from tests.contracts import contract, contracts_of

globals().update(contracts_of(refusals))


@contract("name", lambda subject: list(subject.make((1,), subject.size, torch.float32)[0]))
def test_dtensor_is_refused_with_a_sentence(subject, name, as_dtensor):
    inputs, _ = subject.make((2, 3), subject.size, torch.float32)
    inputs[name] = as_dtensor(inputs[name])
    refused = (
        TypeError,
        r"is a DTensor, expected a plain tensor: pass its to_local\(\) or full_tensor",
    )
    if name in subject.multiplied:
        refused = (RuntimeError, "got mixed torch.Tensor and DTensor")
    for function in {subject.function, subject.entry or subject.function}:
        with pytest.raises(refused[0], match=refused[1]):
            function(*inputs.values())


@contract()
def test_cpu_tensors_without_the_interpreter_are_refused_with_a_sentence(subject, monkeypatch):
    inputs, _ = subject.make((2, 3), subject.size, torch.float32)
    monkeypatch.setattr(kernel_support, "INTERPRETED", False)
    first = subject.refused_on_cpu or next(iter(inputs))
    sentence = f"{first} is on cpu, expected a GPU: move it, or export TRITON_INTERPRET=1"
    with pytest.raises(ValueError, match=sentence):
        as_tuple(subject.function(*(t.cpu() for t in inputs.values())))
