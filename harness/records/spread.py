"""How far the steps of a run lie apart, and when two runs do not differ.

A step takes a little longer or shorter each time, the host most of all.  Beside each time stands
the range from the 20th to the 80th percentile of the steps, in which three steps of five lie.  Of
two runs whose ranges overlap nobody can say which is faster: their ratio is not printed.

Imports no PyTorch: records are compared without it.
"""

import statistics
from collections.abc import Sequence

NO_DIFFERENCE = "no difference"
Range = tuple[float, float]


def timed(record: dict, key: str = "seconds") -> list:
    """A column of a training run's record, of the steps that count.

    Not the first ones, nor the last where that was profiled (in older records it never was).
    """
    end = len(record[key]) - record.get("profiled_steps", 0)
    return record[key][record["warmup_steps"] : end]


def waited(record: dict) -> float:
    """At most this share of the steps' time went by waiting for data; 0 in older records."""
    if "data_seconds" not in record:
        return 0.0
    return sum(timed(record, "data_seconds")) / sum(timed(record))


def spread(values: Sequence[float]) -> Range:
    """20th and 80th percentile of at least one number, linear between neighbours."""
    if len(values) == 1:
        return values[0], values[0]
    low, *_, high = statistics.quantiles(values, n=5, method="inclusive")
    return low, high


def overlap(first: Range, other: Range) -> bool:
    return first[0] <= other[1] and other[0] <= first[1]


def unless_same(ratio: str, first: Range, other: Range) -> str:
    """The ratio of two runs as it is printed: not at all where their ranges overlap."""
    return NO_DIFFERENCE if overlap(first, other) else ratio
