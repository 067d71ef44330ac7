"""Power and clock of the GPU while it works: matrix products are limited by power before all else.

    with PowerMeter() as meter:
        ...                     # warm-up
        meter.restart()
        ...                     # what counts
    meter.reading()             # {"watts": ..., "mhz": ..., "readings": ...}, or None

nvidia-smi says both every tenth of a second, in a process of its own; its watts are the mean of the
last second.  Without it, without a GPU, and for work that is over too soon there is no reading.
Imports no PyTorch before it reads.
"""

import shutil
import statistics
import subprocess
import threading

EVERY_MS = 100
COLUMNS = "power.draw,clocks.sm"  # watts, MHz of the multiprocessors


def command() -> list[str]:
    """nvidia-smi's, for this process's GPU."""
    import torch

    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    which = ["-i", f"GPU-{uuid}", f"--query-gpu={COLUMNS}", "--format=csv,noheader,nounits"]
    return ["nvidia-smi", *which, "-lms", str(EVERY_MS)]


class PowerMeter:
    """Reads while its block runs."""

    def __init__(self):
        self.lines: list[str] = []
        self.process = None

    def __enter__(self) -> "PowerMeter":
        from harness.cli.device import HAS_GPU

        if HAS_GPU and shutil.which("nvidia-smi"):
            self.process = subprocess.Popen(
                command(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        if self.process:
            self.process.terminate()
            self.process.wait()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)

    def restart(self) -> None:
        """Forget what has been read so far."""
        self.lines.clear()

    def reading(self) -> dict | None:
        """Medians since the last restart; None if there is nothing, or the GPU does not say."""
        pairs = []
        for line in self.lines.copy():
            try:
                watts, mhz = map(float, line.split(","))
            except ValueError:  # "[N/A]", or half a line at the end
                continue
            pairs.append((watts, mhz))
        if not pairs:
            return None
        watts, mhz = (statistics.median(column) for column in zip(*pairs))
        return {"watts": watts, "mhz": mhz, "readings": len(pairs)}


def power_in_words(reading: dict | None) -> str:
    """A reading of a record; n/a where there was none."""
    if reading is None:
        return "n/a"
    of_many = f"medians of {reading['readings']} readings by nvidia-smi"
    return f"{reading['watts']:,.0f} W at {reading['mhz']:,.0f} MHz ({of_many})"
