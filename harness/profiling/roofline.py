"""The roofline of a profile as a picture: how near each category is to the GPU's ceilings."""

import math

from harness.cli.tables import NOT_MEANINGFUL, pyplot, save_plot
from harness.cli.workload import kernels_in_words, size_in_words
from harness.profiling.diagnose import Finding, judge_categories
from harness.profiling.profile_tables import flop_rate

FAR = 0.3  # powers of ten between two points that an arrow joins


def point_of(finding: Finding) -> tuple[float, float]:
    """Return (FLOP per byte moved, TFLOP/s)."""
    return finding.flops / finding.n_bytes, finding.flops / finding.us / 1e6


def draw_roof(axis, record: dict, left: float, right: float) -> None:
    """Draw the ceilings from one intensity to another; FP8's is dashed."""
    tbs, matmul = record["ceilings"]["copy_gbs"] / 1e3, record["ceilings"]["matmul_tflops"]
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
    axis.text(edge, 1.15 * matmul, f"{record['dtype']} matmul: {flop_rate(matmul)}", ha="right")
    if fp8 := record["ceilings"].get("fp8_tflops"):
        axis.plot([edge, fp8 / tbs, right], [matmul, fp8, fp8], "--", color="black", linewidth=2)
        axis.text(fp8 / tbs, 1.15 * fp8, f"FP8 matmul: {flop_rate(fp8)}", ha="right")


def draw_category(axis, colour: str, findings: list[Finding], step_ms: float, ends: bool) -> None:
    """Draw a category's points: rings, the last one filled; an arrow if they are far apart.

    Args:
        findings: before and after, or one of the two.
        step_ms: the time that a point's area is a share of.
        ends: True if the last profile does not have the category.
    """
    points = [point_of(finding) for finding in findings]
    for finding, point in zip(findings, points):
        filled = finding is findings[-1] and not ends
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


def label_category(
    axis, name: str, colour: str, findings: list[Finding], height: float, edge: float, end: str
) -> None:
    """Write a category's name, times and shares, with a line to its last point."""
    times = " → ".join(dict.fromkeys(f"{f.us / 1e3:,.1f}" for f in findings))
    shares = " → ".join(dict.fromkeys(f"{100 * f.share:.0f}" for f in findings))
    point = point_of(findings[-1])
    side = 0 if point[0] < edge else 1
    axis.annotate(
        f"{name}: {times} ms, {shares} % of its ceiling{end}",
        point,
        (0.42, height),
        color=colour,
        textcoords="axes fraction",
        va="center",
        arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.4, "relpos": (side, 0.5)},
    )


def plot(records: list[dict], path: str) -> None:
    """Draw each category as a point under the measured ceilings; a point's area is its time.

    With two records, rings show the first one, and arrows lead to the points of the second.
    """
    plt = pyplot()
    first = records[0]
    matmul = first["ceilings"]["matmul_tflops"]
    edge = matmul / (first["ceilings"]["copy_gbs"] / 1e3)
    judged = [judge_categories(record) for record in records]
    names = list(dict.fromkeys(name for each in judged for name, f in each.items() if f.flops))
    found = {name: [each[name] for each in judged if name in each] for name in names}
    # what became of a category that the last profile does not have
    gone = " → other kernels" if records[-1]["environment"]["gpu"] else " → interpreted"
    xs, ys = zip(*(point_of(f) for findings in found.values() for f in findings))
    left, right = 0.4 * min(xs), max(40 * edge, 3 * max(xs))

    figure, axis = plt.subplots(figsize=(12, 7), layout="constrained")
    axis.set(xscale="log", yscale="log", xlim=(left, right))
    highest = max(matmul, records[-1]["ceilings"].get("fp8_tflops", 0.0), *ys)
    axis.set_ylim(0.3 * min(ys), 2.5 * highest)
    draw_roof(axis, records[-1] if "fp8" in records[-1] else first, left, right)
    highest_first = sorted(names, key=lambda name: -point_of(found[name][-1])[1])
    distance = min(0.055, 0.4 / len(names))  # of two lines of text, in parts of the picture
    for place, name in enumerate(highest_first):
        colour, findings = f"C{names.index(name)}", found[name]
        ends = name not in judged[-1]
        draw_category(axis, colour, findings, first["median_step_ms"], ends)
        height = 0.5 - distance * place
        label_category(axis, name, colour, findings, height, edge, gone if ends else "")
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter("{x:,.10g}")
    axis.set(xlabel="FLOP per byte moved (intensity)", ylabel="TFLOP/s achieved")
    axis.grid(alpha=0.3)
    time = "time of its kernels, without the host" if first["environment"]["gpu"] else "time"
    legend = [f"a point's area: {time}", "ring: before", "disc: after"][: 2 * len(records) - 1]
    axis.text(0.98, 0.03, "; ".join(legend), transform=axis.transAxes, ha="right")
    axis.set_title(headline(records))
    save_plot(figure, path)


def headline(records: list[dict]) -> str:
    first = records[0]
    env = first["environment"]
    size = size_in_words(first)
    mark = "" if env["gpu"] else NOT_MEANINGFUL
    kernels = " → ".join(kernels_in_words(record) for record in records)
    return (
        f"{first['model']}, {size}, {env['gpu'] or 'CPU'}, {env['date']}{mark}\n"
        f"custom kernels: {kernels}"
    )
