"""Where an answer is wrong, in words, and which known mistake gives the same answer."""

import torch

from exercises.grading.exercise import Mistakes, Parts
from harness.benchmark.checking import Check, relative_error

Axes = dict[int, tuple[str, ...]]
Piece = tuple[str, str]  # of a part: the part's name, and the label of the elements
# What outputs hold before the launch.  No kernel computes it by chance; bf16 holds it exactly.
UNWRITTEN = -12_288.0


def in_pieces(parts: Parts, split: dict[str, Parts]) -> dict[Piece, torch.Tensor]:
    """Return each piece that is compared by itself: of most parts the whole.

    split: {part: {label: the elements of a piece}}, of the parts that are compared in pieces.
    """
    return {
        (part, label): t if mask is None else t.masked_fill(~mask, 0)
        for part, t in parts.items()
        for label, mask in split.get(part, {"": None}).items()
    }


def difference_in_words(
    found: torch.Tensor, exact: torch.Tensor, allowed: float, axes: Axes
) -> str:
    """Say which elements are wrong, and show the first of them."""
    scale = exact.abs() + exact.pow(2).mean().sqrt()
    wrong = ~((found.double() - exact).abs() <= 4 * allowed * scale)  # NaN is wrong
    if not wrong.any():
        error = relative_error(found, exact)
        return f"by a little: by {error:.1e} of its norm, where {allowed:.1e} is allowed."
    first = tuple(wrong.nonzero()[0].tolist())
    place = ", ".join(f"{name} {i:,}" for name, i in zip(axes[len(first)], first))
    given, expected = found[first].item(), exact[first].item()
    digits = (f".{n}g" for n in range(4, 18))
    spec = next((d for d in digits if format(given, d) != format(expected, d)), ".17g")
    where = f"{places_in_words(wrong, axes)}. The first: {place}"
    return f"{where} is {given:{spec}}, expected {expected:{spec}}."


def known_mistakes(
    found: Parts, split: dict[str, Parts], checks: dict[Piece, Check], mistakes: Mistakes
) -> list[str]:
    """Return the mistakes that give what was found, those first that explain the most parts.

    A mistake counts only if all parts that it changes are as it says.
    """
    alike = {}  # mistake: (how many wrong parts it explains, how near it is)
    wrong = {part for (part, _), check in checks.items() if not check.passed}
    pieces = in_pieces(found, split)
    for sentence, parts in mistakes.items():
        distances = [
            relative_error(pieces[piece], t) / checks[piece].allowed
            for piece, t in in_pieces(parts, split).items()
        ]
        if parts.keys() & wrong and all(distance <= 1 for distance in distances):
            alike[sentence] = len(parts.keys() & wrong), -max(distances)
    named = []
    for sentence in sorted(alike, key=alike.get, reverse=True):
        if mistakes[sentence].keys() & wrong:
            named.append(sentence)
            wrong -= mistakes[sentence].keys()
    return named


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
        return f"in {int(mask.sum()):,} of {mask.numel():,} places"
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
    return f"in {len(places):,} of {length:,} {name}s"
