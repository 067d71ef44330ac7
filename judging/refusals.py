"""Every function refuses what it cannot take, with a sentence that says what was given and what was
expected.
"""

import torch

from harness.benchmark.checking import compare
from judging.comparing import expect_error, in_words
from judging.contracts import Wrong, contract
from subjects.subject import Parts, Subject, as_tuple, in_float64


def pytorchs_outputs(subject: Subject, given: Parts) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each output in float64, and of eager PyTorch; none where PyTorch refuses too."""
    try:
        wide = as_tuple(subject.reference(*in_float64(given).values()))
        eager = as_tuple((subject.eager or subject.reference)(*given.values()))
    except Exception:
        return []
    return [(a.to_dense(), b.to_dense().clone()) for a, b in zip(wide, eager)]


def is_pytorchs(out: object, wide: torch.Tensor, eager: torch.Tensor) -> bool:
    if not isinstance(out, torch.Tensor) or out.shape != eager.shape:
        return False
    if out.is_meta or eager.is_meta:  # there are no numbers
        return out.is_meta and eager.is_meta
    return compare("", out.to_dense().to(eager.dtype), wide, eager, torch.float32).passed


@contract("bad input:", lambda subject: subject.bad_input())
def bad_input_is_refused_with_a_sentence(subject, mistake):
    """Others have sentences of their own, and may take what PyTorch takes, with its numbers."""
    bad = subject.bad_input()[mistake]
    names = subject.make((1,), subject.size, torch.float32)[0]
    given = dict(zip(names, bad.inputs))
    if subject.recorded:
        function = subject.entry or subject.function
        expect_error(bad.error, bad.sentence, lambda: function(*bad.inputs), in_words(given))
        return
    expected = pytorchs_outputs(subject, given)
    try:
        outputs = as_tuple(subject.function(*bad.inputs))
    except Exception:
        return
    if not expected or not all(is_pytorchs(out, *of_one) for out, of_one in zip(outputs, expected)):
        right = "an error, or PyTorch's numbers" if expected else "an error, as of PyTorch"
        raise Wrong(f"took {in_words(given)} and returned numbers, expected {right}")
