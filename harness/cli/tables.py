"""How results are shown: titles, tables and numbers as text, pictures as PNG files."""

import io

import tabulate

from harness.cli.output_files import MARK, write_output

tabulate.MIN_PADDING = 0  # of headings: tables fit a terminal of TERMINAL columns
TERMINAL = 100
RULE = "=" * 70
NO_GPU_NOTE = (
    "No CUDA GPU found: everything runs on the CPU, Triton kernels through its interpreter,\n"
    "with small shapes. Timings printed below are NOT meaningful."
)
NOT_MEANINGFUL = " (CPU: timings not meaningful)"
# which clock a table's times are by
OF_STEPS = "Times of steps: wall clock, from an idle GPU to an idle GPU; the host is in them."
OF_KERNELS = "Times of kernels: on the GPU; the host is not in them."


def title(text: str, on_gpu: bool | str | None = True) -> str:
    """Return a table's title, which says if the table's times are not meaningful."""
    return f"{RULE}\n{text}{'' if on_gpu else NOT_MEANINGFUL}\n{RULE}"


def table(
    headers: list[str], rows: list[list], align: list[str] | None = None, keys: int = 1
) -> str:
    """Return a plain table.  Unless told, only the first column is aligned left.

    A table wider than TERMINAL goes on below, with its first `keys` columns once more.
    """
    align = align or ["left"] + ["right"] * (len(headers) - 1)

    def plain(columns: list[int]) -> str:
        kept = [[row[i] if i < len(row) else "" for i in columns] for row in rows]
        names, sides = ([each[i] for i in columns] for each in (headers, align))
        return tabulate.tabulate(
            kept, headers=names, tablefmt="simple", colalign=sides, disable_numparse=True
        )

    blocks, shown = [], [*range(keys)]
    for column in range(keys, len(headers)):
        wider = plain([*shown, column]).split("\n")
        if len(shown) > keys and max(map(len, wider)) > TERMINAL:
            blocks.append(plain(shown))
            shown = [*range(keys)]
        shown.append(column)
    return "\n\n".join([*blocks, plain(shown)])


def number(value: float | None, spec: str = ",.1f", missing: str = "n/a") -> str:
    return missing if value is None else format(value, spec)


def decimal_unit(values: list[float], large: str, small: str, size: float) -> tuple[str, float]:
    """Return (name, size) of a column's unit: `small`, unless a value reaches the large unit."""
    return (large, size) if max(values, default=0.0) >= size else (small, size / 1e3)


def describe(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]


def pyplot():
    """Return matplotlib.pyplot, loaded at the first picture and drawing into files alone."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no display
    import matplotlib.pyplot

    return matplotlib.pyplot


def save_plot(figure, path: str, dpi: int = 120) -> None:
    """Write a figure of `pyplot()` as a PNG, say so, and free it."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi, metadata={"Source": MARK})
    pyplot().close(figure)
    write_output(path, picture.getvalue(), "the picture")
    print(f"Plot written to {path}")
