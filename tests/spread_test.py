"""The spread of steps, compared with hand-made steps and PyTorch's quantiles."""

import pytest
import torch

from harness.records.spread import NO_DIFFERENCE, overlap, spread, timed, unless_same


def test_percentiles_are_pytorchs():
    for n in (1, 2, 3, 4, 18, 19, 97):
        values = torch.rand(n, dtype=torch.float64)
        expected = torch.quantile(values, torch.tensor([0.2, 0.8], dtype=torch.float64))
        assert spread(values.tolist()) == pytest.approx(expected.tolist(), rel=1e-12)


def test_first_and_profiled_steps_are_not_timed():
    record = {"warmup_steps": 2, "seconds": [9.0, 8.0, 1.0, 2.0, 7.0], "tokens": [1, 2, 3, 4, 5]}
    assert timed(record) == [1.0, 2.0, 7.0]  # an old record, of which no step was profiled
    record["profiled_steps"] = 1
    assert timed(record) == [1.0, 2.0] and timed(record, "tokens") == [3, 4]


@pytest.mark.parametrize(
    ("other", "same"),
    [((1.5, 3.0), True), ((0.0, 1.0), True), ((1.2, 1.3), True), ((2.1, 3.0), False)],
)
def test_ranges_that_touch_are_no_difference(other, same):
    first = (1.0, 2.0)
    assert overlap(first, other) == overlap(other, first) == same
    assert unless_same("1.10x", first, other) == (NO_DIFFERENCE if same else "1.10x")
