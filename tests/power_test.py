"""What is made of nvidia-smi's lines, and that it ends with the block; a stand-in says them."""

import stat
import time

import pytest

from harness.cli import device
from harness.steps import power
from harness.steps.power import PowerMeter, power_in_words


@pytest.fixture
def said(monkeypatch, tmp_path):
    """said("line", "line") -> from now on nvidia-smi says these lines, and then nothing more."""

    def say(*lines: str) -> None:
        script = tmp_path / "nvidia-smi"
        text = "\n".join(lines)
        script.write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\nexec sleep 60\n")
        script.chmod(script.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setattr(device, "HAS_GPU", True)
        monkeypatch.setattr(power.shutil, "which", lambda name: str(script))
        monkeypatch.setattr(power, "command", lambda: [str(script)])

    return say


def lines_read(meter: PowerMeter, n: int) -> None:
    end = time.monotonic() + 20
    while len(meter.lines) < n and time.monotonic() < end:
        time.sleep(0.01)
    assert len(meter.lines) == n


def test_the_medians_of_what_is_said_meanwhile(said):
    said("100.5, 1200", "690.25, 1600", "700.0, 1500", "[N/A], [N/A]", "31")
    with PowerMeter() as meter:
        lines_read(meter, 5)
        reading = meter.reading()
    assert reading == {"watts": 690.25, "mhz": 1500.0, "readings": 3}
    assert meter.process.returncode is not None, "nvidia-smi still runs"
    assert power_in_words(reading) == "690 W at 1,500 MHz (medians of 3 readings by nvidia-smi)"


def test_what_was_said_before_the_restart_does_not_count(said):
    said("100, 1200")
    with PowerMeter() as meter:
        lines_read(meter, 1)
        meter.restart()
        assert meter.reading() is None


def test_a_failing_block_ends_it_too(said):
    said("100, 1200")
    with pytest.raises(ValueError), PowerMeter() as meter:
        raise ValueError
    assert meter.process.returncode is not None


@pytest.mark.parametrize("without", ["GPU", "nvidia-smi"])
def test_without_gpu_or_nvidia_smi_there_is_no_reading(said, monkeypatch, without):
    said("100, 1200")
    if without == "GPU":
        monkeypatch.setattr(device, "HAS_GPU", False)
    else:
        monkeypatch.setattr(power.shutil, "which", lambda name: None)
    with PowerMeter() as meter:
        assert meter.process is None
    assert meter.reading() is None and power_in_words(None) == "n/a"
