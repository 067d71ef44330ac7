"""Pictures: matplotlib where one is asked for, and PNG files written whole."""

import io

from harness.cli.output_files import MARK, write_output


def pyplot():
    """matplotlib.pyplot, drawing into files: there may be no display.

    Loaded only where a picture is asked for.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save_plot(figure, path: str, dpi: int = 120) -> None:
    """Write a figure of `pyplot()` as a PNG, say so, and free it.

    Raises:
        RunError: the file cannot be written (any more).
    """
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi, metadata={"Source": MARK})
    pyplot().close(figure)
    write_output(path, picture.getvalue(), "the picture")
    print(f"Plot written to {path}")
