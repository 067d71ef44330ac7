"""How results are shown: titles, tables and numbers as text or Markdown, pictures as PNG files."""

import io
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import tabulate

from harness.cli.command_line import TERMINAL
from harness.cli.output_files import MARK, write_output

tabulate.MIN_PADDING = 0  # of headings: tables fit a terminal of TERMINAL columns
RULE = "=" * 70
NO_GPU_NOTE = (
    "No CUDA GPU found: everything runs on the CPU, Triton kernels through its interpreter,\n"
    "with small shapes. The interpreter's times say nothing of a GPU, so no speeds are shown."
)
# which clock a table's times are by
OF_STEPS = "Times of steps: wall clock, from an idle GPU to an idle GPU; the host is in them."
TIMES_OF_KERNELS = "Times of kernels: on the GPU; the host is not in them."


def title(text: str) -> str:
    return f"{RULE}\n{text}\n{RULE}"


def not_shown(what: str) -> str:
    """Return why something is missing without a GPU; `what` ends with "is" or "are"."""
    return f"The interpreter's times say nothing of a GPU: {what} not shown."


class Column(NamedTuple):
    """A table's column: its title, and what stands in it of a row."""

    title: str
    value: str | Callable  # a key of the row, or a function of the row
    write: str | Callable[..., str] = ""  # a format, or a function of the value
    missing: str = "n/a"  # where there is no such value
    align: str = ""  # "left" or "right"; unless given, left for the first column alone

    def cell(self, row) -> str:
        value = self.value(row) if callable(self.value) else row.get(self.value)
        if value is not None and callable(self.write):
            return self.write(value)
        return formatted(value, self.write, self.missing)


class Table(NamedTuple):
    """Headers and rows of cells, which are printed as text or as Markdown."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]  # missing cells at the end of a row are empty
    align: Sequence[str] | None = None  # as a Column's
    keys: int = 1  # columns that a table in several parts repeats

    @classmethod
    def of(cls, columns: Sequence[Column], rows: Iterable, keys: int = 1) -> "Table":
        """Return the columns of these rows; a row of None is empty."""
        cells = [[] if row is None else [column.cell(row) for column in columns] for row in rows]
        titles, *_, align = zip(*columns)
        return cls(titles, cells, align, keys)

    def columns(self, places: Iterable[int]) -> "Table":
        """Return the table of these columns alone."""
        headers, *rows = (
            [row[i] if i < len(row) else "" for i in places] for row in (self.headers, *self.rows)
        )
        align = self.align or [""] * len(self.headers)
        return Table(headers, rows, [align[i] or ("right" if i else "left") for i in places])

    def text(self) -> str:
        """Return the plain table.

        One that is wider than TERMINAL goes on below, with its first `keys` columns once more.
        """

        def plain(places: list[int]) -> str:
            headers, rows, align, _ = self.columns(places)
            how = {"tablefmt": "simple", "disable_numparse": True}
            return tabulate.tabulate(rows, headers=headers, colalign=align, **how)

        blocks, shown = [], [*range(self.keys)]
        for column in range(self.keys, len(self.headers)):
            wider = plain([*shown, column]).split("\n")
            if len(shown) > self.keys and max(map(len, wider)) > TERMINAL:
                blocks.append(plain(shown))
                shown = [*range(self.keys)]
            shown.append(column)
        return "\n\n".join([*blocks, plain(shown)])

    def markdown(self) -> str:
        """Return the table as a page has it, which reads well as raw text too."""
        headers, rows, *_ = self.columns(range(len(self.headers)))
        shown = []
        for place, column in enumerate(zip(headers, *rows)):
            width = max(map(len, column))
            cells = [f" {cell.rjust(width) if place else cell.ljust(width)} " for cell in column]
            shown.append([cells[0], "-" * (width + 1) + (":" if place else "-"), *cells[1:]])
        return "\n".join(f"|{'|'.join(line)}|" for line in zip(*shown))


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    align: Sequence[str] | None = None,
    keys: int = 1,
) -> str:
    """Return a Table's text."""
    return Table(headers, rows, align, keys).text()


def formatted(value: float | None, spec: str = ",.1f", missing: str = "n/a") -> str:
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
