"""How results are printed: titles, tables, numbers."""

from tabulate import tabulate

RULE = "=" * 70
NO_GPU_NOTE = (
    "No CUDA GPU found: everything runs on the CPU, Triton kernels through its interpreter,\n"
    "with small shapes. Timings printed below are NOT meaningful."
)
NOT_MEANINGFUL = " (CPU: timings not meaningful)"  # ends the title of a table of such times
# which clock a table's times are by
OF_STEPS = "Times of steps: wall clock, from an idle GPU to an idle GPU; the host is in them."
OF_KERNELS = "Times of kernels: on the GPU; the host is not in them."


def title(text: str) -> str:
    return f"{RULE}\n{text}\n{RULE}"


def table(headers: list[str], rows: list[list], align: list[str] | None = None) -> str:
    """A plain table: the first column left-aligned, the others right-aligned unless told."""
    align = align or ["left"] + ["right"] * (len(headers) - 1)
    return tabulate(rows, headers=headers, tablefmt="simple", colalign=align, disable_numparse=True)


def number(value: float | None, spec: str = ",.1f", missing: str = "n/a") -> str:
    return missing if value is None else format(value, spec)


def decimal_unit(values: list[float], large: str, small: str, size: float) -> tuple[str, float]:
    """(name, size) of a column's unit: the large one if a value reaches it, else its thousandth."""
    return (large, size) if max(values, default=0.0) >= size else (small, size / 1e3)


def describe(error: Exception) -> str:
    """Its type and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
