"""Where an answer is wrong, in words, and which known mistake gives the same answer."""

from collections.abc import Callable, Iterator

import torch

from exercises.grading.exercise import Mistakes, Parts
from harness.benchmark.checking import Check, relative_error

Axes = dict[int, tuple[str, ...]]


def in_pieces(pieces: Parts) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yield functions that keep one piece of a part each, or the whole if it has no pieces."""
    for mask in pieces.values() or [None]:
        yield lambda t, mask=mask: t if mask is None else t.masked_fill(~mask, 0)


def equal_mistake(
    part: str, found: torch.Tensor, mistakes: Mistakes, checks: list[Check], pieces: Parts
) -> str | None:
    """Return the mistake whose answer is nearest to `found`, if each piece is as near as allowed.

    checks: those of the right answer, one for each piece.
    """
    errors = {}
    for sentence, wrong in mistakes.items():
        if part in wrong:
            each = [relative_error(piece(found), piece(wrong[part])) for piece in in_pieces(pieces)]
            if all(error <= check.allowed for error, check in zip(each, checks)):
                errors[sentence] = max(each)
    return min(errors, key=errors.get, default=None)


def wrong_places_in_words(
    found: torch.Tensor, exact: torch.Tensor, allowed: float, axes: Axes
) -> str:
    """Say which elements are wrong, and show the first of them."""
    difference = (found.double() - exact).abs()
    scale = exact.abs() + exact.pow(2).mean().sqrt()
    wrong = ~(difference <= 4 * allowed * scale)  # NaN is wrong
    if not wrong.any():
        error = relative_error(found, exact)
        return (
            f"by a little everywhere: by {error:.1e} of its norm, where {allowed:.1e} is allowed."
        )
    first = tuple(wrong.nonzero()[0].tolist())
    sentence = (
        f"{places_in_words(wrong, axes)}: in {place_in_words(first, axes)} it is "
        f"{found[first].item():.4g}, expected {exact[first].item():.4g}."
    )
    if (found.isnan() & ~exact.isnan()).any():
        sentence += " NaN lies before, behind and between the rows here: did the kernel read it?"
    return sentence


def place_in_words(place: tuple[int, ...], axes: Axes) -> str:
    return ", ".join(f"{name} {i:,}" for name, i in zip(axes[len(place)], place))


def places_in_words(mask: torch.Tensor, axes: Axes) -> str:
    """Say where a mask is true: everywhere, in some rows, from a column on, or in how many places.

    mask: at least one element is true.
    """
    names = axes[mask.ndim]
    along = []  # for each dimension: which of its places have a true element
    box = torch.ones_like(mask)
    for dim in range(mask.ndim):
        others = [d for d in range(mask.ndim) if d != dim]
        there = mask.any(others) if others else mask
        along.append(there)
        box &= there.view([-1 if d == dim else 1 for d in range(mask.ndim)])
    if not mask.equal(box):
        first = place_in_words(tuple(mask.nonzero()[0].tolist()), axes)
        return f"in {int(mask.sum()):,} of {mask.numel():,} places, the first in {first}"
    words = [
        stretch_in_words(name, there.nonzero().flatten().tolist(), len(there))
        for name, there in zip(names, along)
        if not there.all()
    ]
    return ", ".join(words) or "everywhere"


def stretch_in_words(name: str, places: list[int], length: int) -> str:
    first, last = places[0], places[-1]
    if len(places) == 1:
        return f"in {name} {first:,}"
    if len(places) == last - first + 1:
        if last == length - 1:
            return f"from {name} {first:,} on"
        return f"in {name}s {first:,} to {last:,}"
    return f"in {len(places):,} of {length:,} {name}s, the first is {first:,}"
