"""The two pictures that explain: from a program's number to addresses, and a GPU's memories."""

from typing import NamedTuple

from harness.cli.tables import pyplot, save_plot
from harness.steps.gpus import FLOPS_OF_FMA, GPUS
from tools.page_records import load_record

# ---------------------------------------------------------------- addresses and mask

N_COLS, BLOCK_SIZE = 6, 8
ROW_COLORS = "#bcd9f2", "#f7d7a8", "#c9e6c2"
MASKED_COLOR = "#c0392b"
LINES = {  # of lesson 5's kernel, and what each has in a lane of the program of a row
    "row = tl.program_id(0)": lambda row, col: row,
    "cols = tl.arange(0, BLOCK_SIZE)": lambda row, col: col,
    "row * n_cols + cols": lambda row, col: row * N_COLS + col,
    "mask = cols < n_cols": lambda row, col: int(col < N_COLS),
}


def plot_addresses(path: str) -> None:
    """Draw the lanes of three programs above the three rows of six numbers that they load."""
    figure, axes = pyplot().subplots(figsize=(10, 4))
    top, memory = 9.5, 1.6  # the heights of the first line and of the memory
    mask_line = top - 1.4 * (len(LINES) - 1)
    lanes = [(row, col) for row in range(len(ROW_COLORS)) for col in range(BLOCK_SIZE)]

    def box(x: float, y: float, words: object, color: str) -> None:
        axes.add_patch(pyplot().Rectangle((x, y), 1, 1, facecolor=color, edgecolor="black"))
        axes.text(x + 0.5, y + 0.5, words, ha="center", va="center", fontsize=8)

    def arrow(start: tuple, end: tuple, **style) -> None:
        axes.annotate("", end, start, arrowprops={"shrinkA": 0, "shrinkB": 0, **style})

    for place, (line, value) in enumerate(LINES.items()):
        y = top - 1.4 * place
        axes.text(-0.6, y + 0.5, line, ha="right", va="center", family="monospace", fontsize=8)
        for x, (row, col) in enumerate(lanes):
            box(x, y, value(row, col), ROW_COLORS[row] if col < N_COLS else "white")
    for x, (row, col) in enumerate(lanes):
        masked = {"color": MASKED_COLOR, "linestyle": ":"} if col >= N_COLS else {}
        start, end = (x + 0.5, mask_line - 0.1), (row * N_COLS + col + 0.5, memory + 1.1)
        arrow(start, end, arrowstyle="->", **masked)
    for row, color in enumerate(ROW_COLORS):
        first = row * N_COLS
        for col in range(N_COLS):
            box(first + col, memory, first + col, color)
        arrow((first, memory - 0.35), (first + N_COLS, memory - 0.35), arrowstyle="<->")
        words = f"row {row}: n_cols = {N_COLS}"
        axes.text(first + N_COLS / 2, memory - 0.95, words, ha="center", va="center", fontsize=8)
    axes.text(-0.6, memory + 0.5, "memory from x_ptr on", ha="right", va="center", fontsize=8)
    axes.text(-0.6, memory - 0.35, "the row's stride", ha="right", va="center", fontsize=8)
    outside = (
        "Dotted: lanes that the mask switches\noff. They would load numbers of the\n"
        "next row, or what is not x's."
    )
    where = len(ROW_COLORS) * N_COLS + 0.4, memory - 0.1
    axes.text(*where, outside, color=MASKED_COLOR, va="center", fontsize=8)
    axes.set(xlim=(-9.5, len(lanes) + 0.6), ylim=(0.3, top + 1.2))
    axes.axis("off")
    figure.tight_layout()
    save_plot(figure, path)


# ---------------------------------------------------------------- the memories of a GPU

MEMORY_GPU = "H200"
MEMORY_COLORS = "#5b97cc", "#8dbbe2", "#bcd9f2", "#f7d7a8", "#dddddd"


class MemoryLevel(NamedTuple):
    """One of a GPU's memories."""

    name: str
    whose: str
    n_bytes: float | None  # None: as much as the machine has
    tbs: float  # TB/s, of all multiprocessors together
    source: str  # of the rate


def memories() -> list[MemoryLevel]:
    """Return the memories of an H200, the nearest to its arithmetic first.

    docs/glossary.md says where the figures are from.
    """
    gpu, kib_of_each = GPUS[MEMORY_GPU], 256
    near = gpu.multiprocessors * kib_of_each * 2**10
    # an FMA reads three numbers of 4 bytes; shared memory gives 128 bytes a cycle
    registers = gpu.fp32_tflops / FLOPS_OF_FMA * 3 * 4
    shared = gpu.multiprocessors * 128 * gpu.clock_ghz / 1e3
    link = load_record("frontier")["rates"]["link_gbs"] / 1e3
    return [
        MemoryLevel("registers", "each thread has its own", near, registers, "computed"),
        MemoryLevel(
            "shared memory, L1", "each multiprocessor has its own", near, shared, "computed"
        ),
        MemoryLevel("L2 cache", "for all programs", 50e6, 9.8, "measured by others"),
        MemoryLevel("memory of the GPU", "tensors lie here", 141e9, gpu.tbs, "data sheet"),
        MemoryLevel("memory of the host", "behind the PCIe bus", None, link, "measured here"),
    ]


def size(n_bytes: float | None) -> str:
    if n_bytes is None:
        return "any"
    return f"{n_bytes / 1e9:.0f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def rate(tbs: float) -> str:
    return f"{tbs:.3g} TB/s" if tbs >= 1 else f"{tbs * 1e3:.0f} GB/s"


def plot_memories(path: str) -> None:
    """Draw each memory of an H200 as a bar as long as its rate, on a logarithmic scale."""
    figure, axes = pyplot().subplots(figsize=(8, 3.7))
    found, size_at, name_at = memories(), 0.014, 0.0022
    axes.text(name_at, 0.75, f"{MEMORY_GPU}, as a whole", ha="right", weight="bold")
    axes.text(size_at, 0.75, "size", ha="right", weight="bold")
    axes.text(0.02, 0.75, "rate, on a logarithmic scale", weight="bold")
    for place, (memory, color) in enumerate(zip(found, MEMORY_COLORS)):
        axes.barh(-place, memory.tbs - 0.02, left=0.02, height=0.62, color=color, edgecolor="black")
        words = f"{rate(memory.tbs)}, {memory.source}"
        axes.text(memory.tbs * 1.15, -place, words, va="center")
        axes.text(name_at, -place + 0.02, memory.name, ha="right", va="bottom")
        axes.text(name_at, -place - 0.02, memory.whose, ha="right", va="top", fontsize=8.5)
        axes.text(size_at, -place, size(memory.n_bytes), ha="right", va="center")
    axes.set(xscale="log", xlim=(1e-4, 1.6e4), ylim=(-4.5, 1.2))
    axes.axis("off")
    figure.tight_layout()
    save_plot(figure, path, dpi=100)
