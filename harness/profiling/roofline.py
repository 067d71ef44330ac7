"""The roofline of a profile as a picture: how near each category is to the GPU's ceilings."""

import math

from harness.cli.tables import not_shown, pyplot, save_plot
from harness.cli.workload import kernels_in_words, size_in_words
from harness.profiling.ceilings import ceilings_of
from harness.profiling.diagnose import Finding, judge_categories
from harness.profiling.profile_tables import ceiling_share, flop_rate

FAR = 0.3  # powers of ten between two points that an arrow joins


def point_of(finding: Finding) -> tuple[float, float]:
    """Return (FLOP per byte moved, TFLOP/s)."""
    return finding.flops / finding.n_bytes, finding.flops / finding.us / 1e6


def draw_roof(axis, rates: dict[str, float], dtype: str, left: float, right: float) -> None:
    """Draw the ceilings from one intensity to another; FP8's is dashed."""
    tbs, matmul = rates["copy_gbs"] / 1e3, rates["matmul_tflops"]
    edge = matmul / tbs
    axis.plot([left, edge, right], [tbs * left, matmul, matmul], color="black", linewidth=2)
    middle = math.sqrt(left * edge)
    axis.text(
        middle,
        1.15 * tbs * middle,
        f"copy: {1e3 * tbs:,.0f} GB/s",
        rotation=math.degrees(math.atan(tbs)),
        rotation_mode="anchor",
        transform_rotates_text=True,
        ha="center",
        va="bottom",
    )
    axis.text(edge, 1.15 * matmul, f"{dtype} matmul: {flop_rate(matmul)}", ha="right")
    if fp8 := rates.get("fp8_tflops"):
        axis.plot([edge, fp8 / tbs, right], [matmul, fp8, fp8], "--", color="black", linewidth=2)
        axis.text(fp8 / tbs, 1.15 * fp8, f"FP8 matmul: {flop_rate(fp8)}", ha="right")


def draw_category(
    axis, name: str, colour: str, findings: list[Finding], step_ms: float, place: tuple, end: str
) -> None:
    """Draw a category's points, an arrow if they are far apart, and its name, times and shares.

    Args:
        findings: before and after, or one of the two.  Rings stand for them, the last one filled.
        step_ms: the time that a point's area is a share of.
        place: (side, height) of the text; the line from the text to the last point starts at 0 on
            its left side, at 1 on its right side.
        end: what became of a category that the last profile does not have; else "".
    """
    points = [point_of(finding) for finding in findings]
    for finding, point in zip(findings, points):
        filled = finding is findings[-1] and not end
        axis.scatter(
            *point,
            30 + 3e3 * finding.us / 1e3 / step_ms,
            facecolors=colour if filled else "none",
            edgecolors=colour,
            linewidths=1.5,
            alpha=0.8,
            zorder=3,
        )
    (x_before, y_before), (x_after, y_after) = points[0], points[-1]
    if math.hypot(math.log10(x_after / x_before), math.log10(y_after / y_before)) > FAR:
        arrow = {"arrowstyle": "->", "color": colour}
        axis.annotate("", points[-1], points[0], arrowprops=arrow)
    times = " → ".join(dict.fromkeys(f"{f.us / 1e3:,.1f}" for f in findings))
    shares = " → ".join(dict.fromkeys(map(ceiling_share, findings)))
    side, height = place
    axis.annotate(
        f"{name}: {times} ms, {shares} of its ceiling{end}",
        points[-1],
        (0.42, height),
        color=colour,
        textcoords="axes fraction",
        va="center",
        arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.4, "relpos": (side, 0.5)},
    )


def plot(records: list[dict], path: str) -> None:
    """Draw each category as a point under the ceilings of all records; its area is its time.

    With two records, rings show the first one, and arrows lead to the points of the second.
    Without a GPU nothing is drawn.
    """
    first = records[0]
    env = first["environment"]
    if env["gpu"] is None:
        print(not_shown("the roofline is"))
        return
    rates = ceilings_of(*records).rates
    edge = rates["matmul_tflops"] / (rates["copy_gbs"] / 1e3)
    judged = [judge_categories(record, *records) for record in records]
    names = list(dict.fromkeys(name for each in judged for name, f in each.items() if f.flops))
    found = {name: [each[name] for each in judged if name in each] for name in names}
    xs, ys = zip(*(point_of(f) for findings in found.values() for f in findings))
    left, right = 0.4 * min(xs), max(40 * edge, 3 * max(xs))

    figure, axis = pyplot().subplots(figsize=(12, 7), layout="constrained")
    axis.set(xscale="log", yscale="log", xlim=(left, right))
    axis.set_ylim(
        0.3 * min(ys), 2.5 * max(rates["matmul_tflops"], rates.get("fp8_tflops", 0.0), *ys)
    )
    draw_roof(axis, rates, first["dtype"], left, right)
    highest_first = sorted(names, key=lambda name: -point_of(found[name][-1])[1])
    distance = min(0.055, 0.4 / len(names))  # of two lines of text, in parts of the picture
    for number, name in enumerate(highest_first):
        colour, findings = f"C{names.index(name)}", found[name]
        side = 0 if point_of(findings[-1])[0] < edge else 1
        # what became of a category that the last profile does not have
        end = "" if name in judged[-1] else " → other kernels"
        place = side, 0.5 - distance * number
        draw_category(axis, name, colour, findings, first["median_step_ms"], place, end)
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter("{x:,.10g}")
    axis.set(xlabel="FLOP per byte moved (intensity)", ylabel="TFLOP/s achieved")
    axis.grid(alpha=0.3)
    area = "a point's area: time of its kernels, without the host"
    legend = [area, "ring: before", "disc: after"][: 2 * len(records) - 1]
    axis.text(0.98, 0.03, "; ".join(legend), transform=axis.transAxes, ha="right")
    kernels = " → ".join(kernels_in_words(record) for record in records)
    axis.set_title(
        f"{first['model']}, {size_in_words(first)}, {env['gpu']}, {env['date']}\n"
        f"custom kernels: {kernels}"
    )
    save_plot(figure, path)
