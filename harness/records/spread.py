"""How far the steps of a run lie apart, and when two runs do not differ.

A step takes a little longer or shorter each time, above all on the host.  So each time is printed
with the range from the 20th to the 80th percentile, in which three steps of five lie.  If the
ranges of two runs overlap, nobody can say which run is faster: their ratio is not printed.

Imports no PyTorch: records are compared without it.
"""

import statistics
from collections.abc import Sequence

NO_DIFFERENCE = "no difference"
Range = tuple[float, float]


def timed(record: dict, key: str = "seconds") -> list:
    """Return a column of a training run's record without the steps that do not count.

    Those are the first ones, and the last if it was profiled (in older records it never was).
    """
    end = len(record[key]) - record.get("profiled_steps", 0)
    return record[key][record["warmup_steps"] : end]


def waited(record: dict) -> float:
    """Return the largest share of the steps' time that data can have cost; 0 in older records."""
    if "data_seconds" not in record:
        return 0.0
    return sum(timed(record, "data_seconds")) / sum(timed(record))


def spread(values: Sequence[float]) -> Range:
    """Return the 20th and 80th percentile of at least one number, linear between neighbours."""
    if len(values) == 1:
        return values[0], values[0]
    low, *_, high = statistics.quantiles(values, n=5, method="inclusive")
    return low, high


def overlap(first: Range, other: Range) -> bool:
    return first[0] <= other[1] and other[0] <= first[1]


def unless_same(ratio: str, first: Range, other: Range) -> str:
    """Return the ratio of two runs as it is printed, or NO_DIFFERENCE if their ranges overlap."""
    return NO_DIFFERENCE if overlap(first, other) else ratio
