"""What is made of PyTorch's readings of power and clock, and that reading ends with the block."""

import itertools
import time

import pytest
import torch

from harness.steps import measured, parallel
from harness.steps.power import PowerMeter, joules_per_token, power_in_words


@pytest.fixture
def said(monkeypatch):
    """said((watts, mhz), ...) -> from now on the GPU says these, and then fails."""

    def say(*readings: tuple[float, float]) -> None:
        watts, mhz = (iter(column) for column in zip(*readings))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 1e3 * next(watts))
        monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: next(mhz))

    return say


def wait_for(meter: PowerMeter, n: int) -> None:
    end = time.monotonic() + 20
    while len(meter.readings) < n and time.monotonic() < end:
        time.sleep(0.01)
    assert len(meter.readings) >= n


def test_the_medians_of_what_is_said_meanwhile(said):
    said((100.5, 1200), (690.25, 1600), (700.0, 1500))
    with PowerMeter() as meter:
        wait_for(meter, 3)
        reading = meter.reading()
    assert reading == {"watts": 690.25, "mhz": 1500.0, "readings": 3}
    assert power_in_words(reading) == "690 W at 1,500 MHz (medians of 3 readings)"


def test_what_was_said_before_the_restart_does_not_count(said):
    said((100, 1200))
    with PowerMeter() as meter:
        wait_for(meter, 1)
        meter.restart()
        assert meter.reading() is None


def test_a_failing_block_ends_it_too(said):
    said(*itertools.repeat((100, 1200), 10_000))
    with pytest.raises(ValueError), PowerMeter() as meter:
        assert meter.thread.is_alive()
        raise ValueError
    assert not meter.thread.is_alive()


@pytest.mark.parametrize("has_gpu", [True, False], ids=["no nvidia-ml-py", "no GPU"])
def test_power_that_cannot_be_read_is_said_to_be_unknown(said, monkeypatch, has_gpu):
    def refuse(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    said((100, 1200))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "power_draw", refuse)
    with PowerMeter() as meter:
        assert meter.thread is None
    assert meter.reading() is None
    assert power_in_words(None).startswith("not known (pip install nvidia-ml-py")


def test_joules_are_watts_by_tokens_a_second_of_one_gpu():
    record = {"tokens_per_second": 1000.0, "power": {"watts": 650.0}}
    assert joules_per_token(record) == 0.65
    assert joules_per_token(record | {"tokens_per_second_per_gpu": 500.0}) == 1.3
    assert joules_per_token(record | {"power": None}) is None
    assert joules_per_token({"tokens_per_second": 1000.0}) is None
    assert joules_per_token({"tokens_per_second_per_gpu": 500.0, "power": {"watts": 50}}) == 0.1


def test_a_step_of_several_gpus_has_the_mean_power_if_all_tell_it_for_long_enough(monkeypatch):
    own = {"watts": 600.0, "mhz": 1500.0, "readings": 12}
    for other, seconds, expected in (
        (500.0, 1.0, own | {"watts": 550.0}),
        (0.0, 1.0, None),  # that GPU does not say
        (500.0, 0.9, None),
    ):
        monkeypatch.setattr(parallel, "gather", lambda watts, other=other: [(watts,), (other,)])
        assert measured.mean_power(own, seconds) == expected
    assert measured.mean_power(None, 1.0) is None
