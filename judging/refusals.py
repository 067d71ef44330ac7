"""Every function refuses what it cannot take, with a sentence that says what was given and what was
expected.
"""

import torch

from harness.benchmark.checking import FLOOR, relative_error
from judging.comparing import expect_error, in_words
from judging.contract import Wrong, contract
from subjects.subject import as_tuple


def is_as_in_pytorch(out: object, right: torch.Tensor) -> bool:
    if not isinstance(out, torch.Tensor) or out.shape != right.shape:
        return False
    if out.is_meta or right.is_meta:  # there are no numbers
        return out.is_meta and right.is_meta
    return relative_error(out.to_dense(), right.to_dense()) <= FLOOR[torch.float32]


@contract("bad input:", lambda subject: subject.bad_input())
def bad_input_is_refused_with_a_sentence(subject, mistake):
    """Others have sentences of their own, and may take what PyTorch takes, with its numbers."""
    bad = subject.bad_input()[mistake]
    names = subject.make((1,), subject.size, torch.float32)[0]
    given = dict(zip(names, bad.inputs))
    if subject.recorded:
        function = subject.entry or subject.function
        expect_error(in_words(given), lambda: function(*bad.inputs), bad.error, bad.sentence)
        return
    try:
        expected = as_tuple((subject.eager or subject.reference)(*bad.inputs))
    except Exception:
        expected = ()
    try:
        outputs = as_tuple(subject.function(*bad.inputs))
    except Exception:
        return
    if not expected or not all(map(is_as_in_pytorch, outputs, expected)):
        right = "an error, or PyTorch's numbers" if expected else "an error, as of PyTorch"
        raise Wrong(f"took {in_words(given)} and returned numbers, expected {right}")
