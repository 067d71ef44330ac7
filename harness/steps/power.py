"""Power and clock of the GPU while it works.  Power limits matrix products before anything else.

    with PowerMeter() as meter:
        ...                     # warm-up
        meter.restart()
        ...                     # what counts
    meter.reading()             # {"watts": ..., "mhz": ..., "readings": ...}, or None

A thread asks PyTorch every tenth of a second.  PyTorch asks NVIDIA's library, for which
nvidia-ml-py must be installed; its watts are the mean of about the last second.  Imports no PyTorch
before it reads.
"""

import statistics
import threading

EVERY_S = 0.1
MEAN_OF_S = 1.0  # before a reading, of which it says the mean


class PowerMeter:
    """Reads while its block runs."""

    def __init__(self):
        self.readings: list[tuple[float, float]] = []  # (watts, MHz of the multiprocessors)
        self.ended = threading.Event()
        self.thread = None

    def __enter__(self) -> "PowerMeter":
        import torch

        if torch.cuda.is_available():
            device = torch.cuda.current_device()
            if self._read(device):
                self.thread = threading.Thread(target=self._read_on, args=[device], daemon=True)
                self.thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.ended.set()
        if self.thread:
            self.thread.join()

    def _read(self, device: int) -> bool:
        """Add a reading; return False if there is none."""
        import torch

        try:
            watts, mhz = torch.cuda.power_draw(device) / 1e3, float(torch.cuda.clock_rate(device))
        except Exception:  # no nvidia-ml-py, no driver, or a GPU that does not say
            return False
        self.readings.append((watts, mhz))
        return True

    def _read_on(self, device: int) -> None:
        while not self.ended.wait(EVERY_S) and self._read(device):
            pass

    def restart(self) -> None:
        """Forget what has been read so far."""
        self.readings.clear()

    def reading(self) -> dict | None:
        """Return the medians since the last restart; None if nothing was read."""
        readings = self.readings.copy()
        if not readings:
            return None
        watts, mhz = (statistics.median(column) for column in zip(*readings))
        return {"watts": watts, "mhz": mhz, "readings": len(readings)}


def power_in_words(reading: dict | None) -> str:
    """Return a record's reading as it is printed."""
    if reading is None:
        return "not known (pip install nvidia-ml-py, and steps of a tenth of a second)"
    medians = f"medians of {reading['readings']} readings"
    return f"{reading['watts']:,.0f} W at {reading['mhz']:,.0f} MHz ({medians})"


def joules_per_token(record: dict) -> float | None:
    """Return a GPU's measured watts divided by its tokens a second; None where none were read."""
    power = record.get("power")
    per_gpu = record.get("tokens_per_second_per_gpu", record.get("tokens_per_second"))
    return power and power["watts"] / per_gpu
