"""The picture of docs/exercises.md: from a program's number to addresses and a mask."""

from harness.cli.tables import pyplot, save_plot

BLOCK_SIZE, N = 8, 19
PROGRAM_COLORS = "#bcd9f2", "#f7d7a8", "#c9e6c2"
LINES = {  # of the kernel, and what each has for the lane `lane` of the program `program`
    "tl.program_id(0)": lambda program, lane: program,
    "tl.arange(0, BLOCK_SIZE)": lambda program, lane: lane,
    "i = tl.program_id(0) * BLOCK_SIZE\n      + tl.arange(0, BLOCK_SIZE)": (
        lambda program, lane: program * BLOCK_SIZE + lane
    ),
    "mask = i < n": lambda program, lane: "1" if program * BLOCK_SIZE + lane < N else "0",
}


def plot(path: str) -> None:
    """Draw the lanes of three programs above the 19 numbers that they load."""
    figure, axes = pyplot().subplots(figsize=(10, 3.3))
    lanes = [
        (program, lane) for program in range(len(PROGRAM_COLORS)) for lane in range(BLOCK_SIZE)
    ]
    for height, (line, value) in enumerate(LINES.items()):
        y = 2 * len(LINES) - 1.5 * height
        axes.text(-0.6, y + 0.5, line, ha="right", va="center", family="monospace", fontsize=8)
        for i, (program, lane) in enumerate(lanes):
            color = PROGRAM_COLORS[program] if i < N or line != "mask = i < n" else "white"
            axes.add_patch(pyplot().Rectangle((i, y), 1, 1, facecolor=color, edgecolor="black"))
            axes.text(i + 0.5, y + 0.5, value(program, lane), ha="center", va="center", fontsize=8)
    for i, (program, _) in enumerate(lanes[:N]):
        axes.annotate("", (i + 0.5, 1.6), (i + 0.5, 3.4), arrowprops={"arrowstyle": "->"})
        color = PROGRAM_COLORS[program]
        axes.add_patch(pyplot().Rectangle((i, 0.5), 1, 1, facecolor=color, edgecolor="black"))
        axes.text(i + 0.5, 1, f"a[{i}]", ha="center", va="center", fontsize=6.5)
    axes.text(-0.6, 1, "memory from a_ptr on, n = 19", ha="right", va="center", fontsize=8)
    outside = "not a's: these lanes\nload and store nothing"
    axes.text(N + 2.5, 1, outside, ha="center", va="center", fontsize=7.5)
    axes.set(xlim=(-9.5, len(lanes) + 0.2), ylim=(0, 2 * len(LINES) + 1.2))
    axes.axis("off")
    figure.tight_layout()
    save_plot(figure, path)
