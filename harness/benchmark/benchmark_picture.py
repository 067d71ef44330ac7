"""The benchmark as a picture: time and rate over the size, by both clocks."""

from collections.abc import Iterator

from harness.benchmark import benchmark_specs as specs
from harness.benchmark.benchmark_specs import COMPILED, OURS, SPECS, Rate
from harness.benchmark.benchmark_tables import ceiling_of, clocks, rate_at, sections_of
from harness.cli.tables import not_shown, pyplot, save_plot
from harness.records.run_records import gpu_line

MOST_BARS = 2  # places along x are drawn as bars: a line needs more points to say anything
HOST_STYLE = {"linestyle": "--", "linewidth": 1.2, "markersize": 3, "alpha": 0.7}
# One colour per library; apart for colour-blind readers too (Okabe and Ito, 2008).
COLOURS = {
    OURS: "#D55E00",
    specs.EAGER: "#999999",
    specs.FORMULA: "#999999",
    "F.linear_": "#F0E442",
    "F.kl_div in fp32": "#999999",
    "F.": "#56B4E9",
    specs.ONE_TILE: "#E69F00",
    COMPILED: "#0072B2",
    "torch.optim.AdamW,": "#56B4E9",
    "torch.optim": "#999999",
    "Liger-Kernel, CuTe": "#882255",
    "Liger": "#CC79A7",
    "TRL": "#E69F00",
    "QuACK": "#009E73",
    "bitsandbytes": "#009E73",
    "FlashOptim, bf16": "#56B4E9",
    "FlashOptim": "#0072B2",
    "torchao": "#E69F00",
    specs.HOST_FLOOR: "#000000",
}


def line_style(name: str) -> dict:
    """Return the style: a library's colour, and a marker for the variant (in place, ...)."""
    colour = next(colour for prefix, colour in COLOURS.items() if name.startswith(prefix))
    markers = {
        f"{OURS} under {COMPILED}": "^",
        f"{OURS}, stochastic rounding": "^",
        specs.TWO_KERNELS: "^",
        specs.SEPARATE: "^",
        specs.ONE_CHUNK: "^",
        specs.NORM_APART: "^",
        specs.WIDE_MOMENTS: "v",
        specs.PLAIN_FORM: "v",
    }
    marker = markers.get(name, "s" if name.endswith("in place") else "o")
    width = 2.5 if name.startswith(OURS) else 1.5
    return {"color": colour, "marker": marker, "markersize": 6, "linewidth": width}


def panels(record: dict) -> Iterator[tuple[str, str, str, list[tuple[int, dict]]]]:
    """Yield the picture's rows: kernel, end of the title, what is along x, (x, measurement)s.

    A row shows one size over the tokens. If there is one number of tokens, it shows the sizes.
    """
    for kernel in dict.fromkeys(section["kernel"] for section in record["sections"]):
        spec, sections = SPECS[kernel], sections_of(record, kernel)
        tokens = {row["tokens"] for section in sections for row in section["rows"]}
        if len(tokens) == 1 and len(sections) > 1 and len(spec.dimensions) == 1:
            points = [(section["size"], row) for section in sections for row in section["rows"]]
            title = f", {tokens.pop():,} {spec.rows.lower()}: "
            yield kernel, title, spec.dimensions[0].name, points
            continue
        for section in sections:
            sizes = specs.numbers(section["size"])
            title = "".join(f", {each.name} {n:,}" for each, n in zip(spec.dimensions, sizes))
            title += ":\n" if len(sizes) > 1 else ": "
            points = [(row["tokens"], row) for row in section["rows"]]
            yield kernel, title, spec.rows.lower(), points


def draw_ceiling(panel, ceiling: float, rate: Rate, vertical: bool) -> None:
    """Draw a line at the ceiling, and its name beyond the line."""
    (panel.axvline if vertical else panel.axhline)(ceiling, color="black", linewidth=1)
    if vertical:
        place = {"xy": (ceiling, 1), "xycoords": ("data", "axes fraction"), "xytext": (14, -5)}
        place |= {"va": "top", "rotation": 90}
    else:
        place = {"xy": (0, ceiling), "xycoords": ("axes fraction", "data"), "xytext": (5, 3)}
        place |= {"va": "bottom"}
    words = f"best {rate.ceiling} rate"
    words += "; beyond it: from the cache" if rate is specs.BANDWIDTH else ""
    panel.annotate(words, textcoords="offset points", **place)


def draw_bars(panels, name: str, along: str, rate: Rate, points: list, ceiling: float) -> None:
    """Draw the rates at each of a few places along x, a panel for each; remove the other panels."""
    places = sorted({x for x, _ in points})
    for panel, x in zip(panels, places):
        rows = [row for place, row in reversed(points) if place == x and row[rate.key] is not None]
        for number, row in enumerate(rows):
            times, colour = clocks(row), line_style(row["implementation"])["color"]
            for clock, us in times.items():
                filled = clock == "kernels alone"
                height = number + (0 if len(times) == 1 else 0.19 if filled else -0.19)
                face = {"facecolor": colour} if filled else {"facecolor": "none", "linestyle": "--"}
                panel.barh(height, rate_at(rate, row, us), 0.36, edgecolor=colour, **face)
                panel.annotate(
                    f"{us:,.0f} us", (0.015 * ceiling, height), va="center", fontsize="small",
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
                )  # fmt: skip
        panel.set_yticks(range(len(rows)), [row["implementation"] for row in rows])
        panel.set(xlim=(0, 1.12 * ceiling), xlabel=f"{rate.name}, higher is better")
        draw_ceiling(panel, ceiling, rate, vertical=True)
        panel.grid(axis="x", alpha=0.3)
        panel.xaxis.set_major_formatter("{x:,.10g}")
        panel.set_title(f"{name}{x:,} {along}", fontsize="medium")
    for panel in panels[len(places) :]:
        panel.remove()


def draw_lines(pair, name: str, along: str, rate: Rate, points: list, ceiling: float) -> None:
    """Draw time in one panel and the rate in the other, over the places along x."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    latency, bandwidth = pair
    work, speed = ("traffic", "bandwidth") if rate is specs.BANDWIDTH else ("work", "rate")
    names, highest = dict.fromkeys(row["implementation"] for _, row in points), ceiling
    dashed = {"host included": HOST_STYLE, "kernels alone": {}}
    for implementation in names:
        rows = [(x, row) for x, row in points if row["implementation"] == implementation]
        for clock, more in dashed.items():
            style = line_style(implementation) | more
            measured = [(x, row, clocks(row)[clock]) for x, row in rows if clock in clocks(row)]
            places = [x for x, *_ in measured]
            latency.plot(places, [us for *_, us in measured], **style)
            if implementation != specs.HOST_FLOOR:
                rates = [rate_at(rate, row, us) for _, row, us in measured]
                bandwidth.plot(places, rates, **style)
                highest = max(highest, *rates, 0)
    draw_ceiling(bandwidth, ceiling, rate, vertical=False)
    latency.set(yscale="log", ylabel="forward + backward, median (us)")
    latency.set_title(f"{name}time, lower is better")
    bandwidth.set(ylim=(0, 1.1 * highest), ylabel=f"{rate.name} (minimum {work} / median)")
    bandwidth.set_title(f"{name}{speed}, higher is better")
    latency.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    latency.yaxis.set_minor_formatter(NullFormatter())
    for panel in pair:
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted({x for x, _ in points}))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter("{x:,.10g}")
        panel.yaxis.set_major_formatter("{x:,.10g}")
        panel.set_xlabel(along)
        panel.grid(alpha=0.3)
    handles = [Line2D([], [], **line_style(each), label=each) for each in names]
    ways = [("solid: the kernels alone", {}), ("dashed: one call, host included", HOST_STYLE)]
    handles += [Line2D([], [], color="black", **style, label=label) for label, style in ways]
    bandwidth.legend(handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5))


def plot(record: dict, path: str) -> None:
    """Draw for each kernel, by both clocks, times over tokens or sizes, and rates; on a GPU."""
    if record["environment"]["gpu"] is None:
        print(not_shown("a picture of times and rates is"))
        return
    parts = list(panels(record))
    few = [len({x for x, _ in points}) <= MOST_BARS for *_, points in parts]
    columns = 2 if any(len({x for x, _ in points}) > 1 for *_, points in parts) else 1
    size = 7 * columns + 2 * (columns == 1), 5 * len(parts)
    how = {"figsize": size, "squeeze": False, "layout": "constrained"}
    figure, axes = pyplot().subplots(len(parts), columns, **how)
    for (kernel, added, along, points), pair, bars in zip(parts, axes, few):
        spec = SPECS[kernel]
        ceiling, name = ceiling_of(record, spec.rate), spec.title + added
        (draw_bars if bars else draw_lines)(pair, name, along, spec.rate, points, ceiling)
    env = record["environment"]
    figure.suptitle(
        f"{gpu_line(env)}, {record['dtype']}, PyTorch {env['torch']}, Triton {env['triton']}"
        + ("\nfull bars: the kernels alone; frames: one call, host included" if any(few) else "")
    )
    save_plot(figure, path)
