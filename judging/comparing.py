"""What a contract compares, and the sentence that says what was found and what is right."""

import re
from collections.abc import Callable

import torch

from harness.benchmark.checking import DTYPE_NAME, FLOOR, relative_error
from judging.contract import Wrong
from subjects.subject import (
    Parts,
    Subject,
    as_tuple,
    compare_parts,
    gradients,
    leaves_of,
    references,
    same_bits,
)


def kind_in_words(t: object) -> str:
    if not isinstance(t, torch.Tensor):
        return repr(t)
    return f"{tuple(t.shape)} {DTYPE_NAME.get(t.dtype, str(t.dtype)).lower()}"


def in_words(tensors: Parts) -> str:
    """Return the tensors in words, as in "x (2, 64) bf16"."""
    return ", ".join(f"{name} {kind_in_words(t)}" for name, t in tensors.items())


def copies(tensors: Parts) -> Parts:
    """Return tensors that no function can change that gets the others."""
    return {name: t.detach().clone() for name, t in tensors.items()}


def where_they_differ(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return in words the element that differs most; NaN differs most of all."""
    distance = (found.double() - expected.double()).abs()
    place = []
    if distance.ndim:
        place = [int(i) for i in torch.unravel_index(distance.argmax(), distance.shape)]
    values = (t[tuple(place)].item() for t in (found, expected))
    return "{} is {:.7g}, expected {:.7g}".format(place or "", *values)


def outputs_of(subject: Subject, leaves: Parts, douts: Parts) -> Parts:
    """Call the function, and return its outputs by the names of `douts`.

    Raises Wrong unless it returns as many tensors as the subject has.
    """
    outputs = as_tuple(subject.function(*leaves.values()))
    kinds = ["a tensor" if isinstance(t, torch.Tensor) else repr(t) for t in outputs]
    if kinds != ["a tensor"] * len(douts):
        raise Wrong(f"returned {', '.join(kinds)}, expected a tensor for each of {list(douts)}")
    return dict(zip(douts, outputs))


def gradients_of(outputs: Parts, leaves: Parts, douts: Parts, **options) -> Parts:
    """Return the gradients of the leaves; raise Wrong where there is none."""
    if not any(t.requires_grad for t in outputs.values()):
        raise Wrong("no output has a graph, expected one, because an input needs a gradient")
    found = gradients(tuple(outputs.values()), leaves, douts, allow_unused=True, **options)
    for name, t in found.items():
        if t is None:
            raise Wrong(f"{name} is None, expected a gradient {tuple(leaves[name[1:]].shape)}")
    return found


def parts_of(subject: Subject, inputs: Parts, douts: Parts) -> Parts:
    """Return copies of what one forward and one backward give."""
    leaves = leaves_of(subject, inputs)
    outputs = outputs_of(subject, leaves, douts)
    return copies(outputs) | copies(gradients_of(outputs, leaves, douts))


def expect_kind(label: str, found: torch.Tensor, right: torch.Tensor) -> None:
    """Raise Wrong unless shape and dtype are right."""
    if (found.shape, found.dtype) != (right.shape, right.dtype):
        raise Wrong(f"{label} {kind_in_words(found)}, expected {kind_in_words(right)}")


def off_by(
    label: str, found: torch.Tensor, right: torch.Tensor, errors: tuple[float, float], given: Parts
) -> Wrong:
    """Return what to raise where a relative error, the first of `errors`, is above the second."""
    error, allowed = (f"{each:.1e}" for each in errors)
    words = f"relative error {error}, allowed {allowed}; given {in_words(given)}"
    return Wrong(f"{label}{where_they_differ(found, right)}; {words}")


def match_float64(subject: Subject, inputs: Parts, douts: Parts) -> None:
    """Raise Wrong unless a call gives float64's outputs and gradients, as the comparator asks.

    These are computed before the call, and from copies: a function may change what it is given.
    """
    kept = copies(inputs)
    ref64, eagers = references(subject, kept, copies(douts))
    found = parts_of(subject, inputs, douts)
    for name, right in eagers[0].items():
        expect_kind(name, found[name], right)
    for check in compare_parts(subject, found, kept, ref64, eagers):
        label = check.name.removeprefix(f"{subject} ")
        part = label.partition(" ")[0]
        if not check.passed:
            raise off_by(label, found[part], ref64[part], (check.error, check.allowed), kept)


def expect_same(
    what: str, found: Parts, expected: Parts, exact: bool, floor: float | None = None
) -> None:
    """Raise Wrong unless the numbers are the same: all bits, or within the comparator's floor."""
    for name, t in found.items():
        right = expected[name]
        expect_kind(f"{what}: {name}", t, right)
        near = not exact and relative_error(t, right) <= (floor or FLOOR[t.dtype])
        if not near and not same_bits({name: t}, {name: right}):
            bits = "the same bits" if exact else "the same within rounding"
            raise Wrong(f"{what}: {name}{where_they_differ(t, right)} ({bits})")


def expect_error(given: str, call: Callable, error: type[Exception], sentence: str) -> None:
    """Raise Wrong unless the call raises this error with this sentence, a regular expression."""
    try:
        call()
    except Exception as raised:
        if isinstance(raised, error) and re.search(sentence, str(raised)):
            return
        raise Wrong(f"{given}: {raised!r}, expected {error.__name__}: {sentence}") from raised
    raise Wrong(f"{given}: raised nothing, expected {error.__name__}: {sentence}")
