"""Steps 7 and 10: how fast are the kernels, what memory do they take, and how far are they from the limit?

    python benchmark_kernels.py                          # all kernels, LLaMA 3.1 8B's sizes, bf16
    python benchmark_kernels.py --kernel rmsnorm --hidden 2048,4096,8192
    python benchmark_kernels.py --json run.json --plot run.png
    python benchmark_kernels.py --sweep                  # why two files carry their settings: other ones, timed

Against PyTorch as Hugging Face calls it, PyTorch's own operator, torch.compile, and Liger-Kernel and QuACK
where they are installed.  All get the same inputs in the same dtype in the same run and are timed in the same
way, and every result is compared with float64 before anything is timed.  benchmark_problems.py says which
implementations and inputs those are, and from what work each kernel's limit follows.
"""

# first: importing PyTorch takes seconds
from harness import quiet_interrupt  # noqa: F401  # isort: skip

import argparse
import contextlib
import gc
import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from harness import command_line, output_files, pictures, run_records, tables, timing
from harness.checking import DEVICE, FLOOR, relative_error
from harness.command_line import RunError, UserError, positive_int
from harness.device import HAS_GPU, synchronize
from harness.tables import NOT_MEANINGFUL, describe, number
from next_steps.benchmark_problems import (
    BANDWIDTH,
    COMPILED,
    DTYPES,
    EAGER,
    HOST_FLOOR,
    IN_PLACE,
    KERNELS,
    LLAMA_VOCAB,
    ONE_TILE,
    OURS,
    STEPS_DONE,
    TWO_KERNELS,
    Implementation,
    Problem,
    Rate,
    find_peers,
    implementations,
)
from rmsnorm_kernel import MAX_HIDDEN_SIZE
from tools import sweep_kernels

Size = int | tuple[int, ...]  # of a kernel's dimensions: a number if it has one


# ---------------------------------------------------------------- calling


class Activations(torch.autograd.Function):
    """Turns tensors into activations: computed from something (`anchor`) that requires grad.

    A leaf will not do, because implementations that work in place refuse to destroy one.
    """

    @staticmethod
    def forward(ctx, anchor, *tensors):
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        raise AssertionError("only gradients of the activations are asked for")


class Call:
    """An implementation on its own copy of a problem's inputs, which it may destroy."""

    def __init__(self, problem: Problem, implementation: Implementation):
        free_memory()
        self.problem, self.function = problem, implementation.function
        self.copies = [t.clone() for t in problem.inputs]
        self.dy = problem.dy and tuple(t.clone() for t in problem.dy)
        self.anchor = torch.zeros((), device=DEVICE, requires_grad=True)
        self.activate()

    def activate(self) -> None:
        """Begin a new graph: a CUDA graph can capture a backward only from where the capture began."""
        self.wrt = Activations.apply(self.anchor, *self.copies[: self.problem.wrt])
        self.inputs = [*self.wrt, *self.copies[self.problem.wrt :]]

    def forward(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.function(*self.inputs)

    def backward(self, output, retain_graph: bool = False) -> tuple[torch.Tensor, ...]:
        # autograd.grad hands gradients out; .backward() would add them to .grad
        return torch.autograd.grad(output, self.wrt, self.dy, retain_graph=retain_graph)

    def both(self) -> tuple[torch.Tensor, ...]:
        return self.backward(self.forward())

    def from_new_graph(self) -> tuple[torch.Tensor, ...]:
        self.activate()
        return self.both()

    def results(self) -> tuple:
        """(output, gradients) of the first call."""
        output = self.forward()
        return output, self.backward(output)


class Step:
    """The same of an optimizer, on its own parameter: a call is one step."""

    def __init__(self, problem: Problem, implementation: Implementation):
        free_memory()
        self.p, gradient, m, v = (t.clone() for t in problem.inputs)
        self.p.grad = gradient
        self.optimizer = implementation.function([self.p])
        state = {"step": torch.tensor(STEPS_DONE), "exp_avg": m, "exp_avg_sq": v}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": {0: state}})

    def both(self) -> tuple[()]:
        self.optimizer.step()
        return ()

    from_new_graph = both  # there is none

    def results(self) -> tuple:
        return self.p, self.both()


def free_memory() -> None:
    """Let go of what the implementation before this one held; on the CPU that is little."""
    if HAS_GPU:
        gc.collect()
        torch.cuda.empty_cache()


def prepare(problem: Problem, implementation: Implementation) -> Call | Step:
    return (Call if problem.wrt else Step)(problem, implementation)


# ---------------------------------------------------------------- measuring


def gradient_errors(problem: Problem, implementation: Implementation) -> dict[str, float]:
    """Relative error of each part of the results against float64."""
    found = problem.parts(*prepare(problem, implementation).results())
    return {name: relative_error(found[name], exact) for name, exact in problem.exact.items()}


def check_ours(errors: dict[str, dict[str, float]], dtype: torch.dtype, tokens: int, judge: str = EAGER) -> None:
    """Ours may be twice as wrong as eager PyTorch (`judge`) in the same dtype, plus a floor.

    Raises:
        RunError: it is worse, or there is no eager result to judge it by.
    """
    if judge not in errors:
        raise RunError(
            f"PyTorch itself fails at {tokens:,} tokens, so nothing is there to compare with; lower --tokens"
        )
    for name in (name for name in errors if name.startswith(OURS)):
        for part, error in errors[name].items():
            allowed = 2 * errors[judge][part] + FLOOR[dtype]
            if not error <= allowed:  # NaN fails too
                raise RunError(
                    f"{name}: {part!r} at {tokens:,} tokens has an error of {error:.1e}, but only "
                    f"{allowed:.1e} is allowed; a wrong kernel is not timed"
                )


def measure_times(problem: Problem, implementation: Implementation) -> dict:
    call = prepare(problem, implementation)
    launches = implementation.name != HOST_FLOOR
    capturable = launches and not implementation.waits
    extra = timing.peak_extra_bytes(call.both) if launches else None
    total = timing.time_us(call.both)
    forward = backward = None
    if isinstance(call, Call):
        forward = timing.time_us(call.forward).p50
    if isinstance(call, Call) and implementation.backward_again:
        output = call.forward()
        backward = timing.time_us(lambda: call.backward(output, retain_graph=True)).p50
        del output
    return {
        "forward_us": forward,
        "backward_us": backward,
        "total_us": [total.p20, total.p50, total.p80],
        # The host matters where calls are short; of long ones a batch would take seconds.
        "host_us": timing.queued_time_us(call.both, calls=max(2, min(20, int(3e5 / total.p50)))),
        "kernels_us": timing.graph_time_us(call.from_new_graph) if capturable else None,
        "extra_bytes": extra,
    }


def first_call(kernel: str, size: Size, dtype_name: str) -> float:
    """Seconds from our first call, of forward + backward, to its result.  Of use in a new process only."""
    problem = KERNELS[kernel].problem(KERNELS[kernel].tokens[0], size, DTYPES[dtype_name])
    ours = next(each for each in implementations(kernel, dtype_name, []) if each.name == OURS)
    call = prepare(problem, ours)
    synchronize()  # the problem is made: PyTorch, autograd and the GPU are awake
    start = time.perf_counter()
    call.both()
    synchronize()
    return time.perf_counter() - start


def first_call_seconds(kernel: str, size: Size, dtype_name: str, absent: list[str]) -> float | None:
    """The same in a process of its own, where Triton has compiled nothing yet; None, and a sentence, if it fails."""
    code = f"import benchmark_kernels; print(benchmark_kernels.first_call({kernel!r}, {size}, {dtype_name!r}))"
    with tempfile.TemporaryDirectory() as empty:
        env = {**os.environ, "TRITON_CACHE_DIR": empty}
        here = Path(__file__).parent
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=here)
    if child.returncode:
        reason = child.stderr.strip() or f"exit code {child.returncode}"
        absent.append(f"first call: its process failed ({reason.splitlines()[-1]})")
        return None
    return float(child.stdout.split()[-1])


@contextlib.contextmanager
def others_may_fail(implementation: Implementation, shape: str, absent: list[str]) -> Iterator[None]:
    """Another's failure (out of memory, a GPU it does not know) is a result; ours is an error."""
    try:
        yield
    except Exception as error:
        if implementation.name.startswith(OURS):
            raise
        absent.append(f"{implementation.name}: failed at {shape} ({describe(error)})")


def benchmark(kernel: str, tokens: list[int], size: Size, dtype_name: str) -> tuple[dict, list[str]]:
    """(the kernel's section of the record, sentences about what is absent from it)."""
    spec, dtype = KERNELS[kernel], DTYPES[dtype_name]
    key, rate = spec.rate.per_element, spec.rate.key
    per_element = spec.work * (dtype.itemsize if spec.rate is BANDWIDTH else 1)
    peers, absent = find_peers(kernel)
    compilation = first_call_seconds(kernel, size, dtype_name, absent) if HAS_GPU else None
    rows = []
    for n_tokens in tokens:
        shape = " x ".join(f"{n:,}" for n in (n_tokens, *numbers(size)))
        if HAS_GPU:
            print(f"measuring {kernel}, {shape}", file=sys.stderr)
        problem = spec.problem(n_tokens, size, dtype)
        contenders = implementations(kernel, dtype_name, peers)
        errors: dict[str, dict[str, float]] = {HOST_FLOOR: {}}
        for contender in contenders:
            if contender.name != HOST_FLOOR:
                with others_may_fail(contender, shape, absent):
                    errors[contender.name] = gradient_errors(problem, contender)
        check_ours(errors, dtype, n_tokens, judge=contenders[0].name)
        for contender in contenders:
            if contender.name in errors:
                with others_may_fail(contender, shape, absent):
                    row = {"tokens": n_tokens, "implementation": contender.name}
                    row |= measure_times(problem, contender) | {"errors": errors[contender.name]}
                    work = per_element * n_tokens * math.prod(numbers(size))
                    per_us = work / row["total_us"][1]
                    row[rate] = per_us / spec.rate.per_us if contender.name != HOST_FLOOR else None
                    rows.append(row)
    section = {"kernel": kernel, "size": size, key: per_element, "rows": rows}
    return section | {"first_call_seconds": compilation}, absent


# ---------------------------------------------------------------- output


def gpu_line(env: dict) -> str:
    return f"GPU: {env['gpu'] or 'none (CPU ' + env['cpu'] + ')'}"


def sections_of(record: dict, kernel: str) -> list[dict]:
    return [section for section in record["sections"] if section["kernel"] == kernel]


def numbers(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)


def share(record: dict, section: dict, row: dict | None) -> str:
    """The row's GB/s or TFLOP/s as a percentage of the measured copy or matmul rate."""
    rate = KERNELS[section["kernel"]].rate
    reached = None if row is None else row[rate.key]
    return number(None if reached is None else 100 * reached / record[rate.ceiling_key], ".0f")


def rows_by_tokens(section: dict) -> dict[int, dict[str, dict]]:
    """{tokens: {implementation: row}}, in the order measured."""
    found: dict[int, dict[str, dict]] = {}
    for row in section["rows"]:
        found.setdefault(row["tokens"], {})[row["implementation"]] = row
    return found


def ratio(above: float | None, below: float | None, spec: str) -> str:
    return "n/a" if above is None or not below else f"{above / below:{spec}}x"


def megabytes(n_bytes: int | None) -> str:
    return number(None if n_bytes is None else n_bytes / 1e6, ",.0f")


def microseconds(time: float | None) -> str:
    return number(time, ",.1f" if time is not None and time < 1000 else ",.0f")


PLAYBOOK = ("rmsnorm", "cross_entropy")  # the kernels that it has


def playbook_table(record: dict, section: dict) -> str:
    """The playbook's table: our kernel against PyTorch as Hugging Face calls it, forward + backward."""
    env = record["environment"]
    mark = "" if env["gpu"] else NOT_MEANINGFUL
    if section["kernel"] == "rmsnorm":
        heading = [
            tables.title(f"RMSNorm Benchmark — Custom Triton vs. PyTorch Reference{mark}"),
            gpu_line(env),
        ]
        if len(sections_of(record, "rmsnorm")) > 1:
            heading.append(f"Hidden size: {section['size']:,}")
        headers = ["Tokens", "Custom (us)", "PyTorch (us)", "Custom (GB/s)", "PyTorch (GB/s)", "Speedup"]
    else:
        name = " (LLaMA 3.1)" if section["size"] == LLAMA_VOCAB else ""
        heading = [
            tables.title(f"Cross-Entropy Benchmark — Custom Triton (online softmax) vs. PyTorch{mark}"),
            gpu_line(env),
            f"Vocabulary size: {section['size']:,}{name}",
        ]
        headers = ["Tokens", "Custom (us)", "PyTorch (us)", "Speedup"]
        headers += ["Custom Mem (MB)", "PyTorch Mem (MB)", "Mem Reduction"]
    missing = {"total_us": [None] * 3, "gbs": None, "extra_bytes": None}
    body = []
    for tokens, rows in rows_by_tokens(section).items():
        ours, eager = rows[OURS], rows.get(EAGER, missing)
        us, eager_us = ours["total_us"][1], eager["total_us"][1]
        times = [f"{tokens:,}", number(us), number(eager_us)]
        speedup = ratio(eager_us, us, ".2f")
        if section["kernel"] == "rmsnorm":
            body.append([*times, number(ours["gbs"], ",.0f"), number(eager["gbs"], ",.0f"), speedup])
        else:
            extra, eager_extra = ours["extra_bytes"], eager["extra_bytes"]
            memory = [megabytes(extra), megabytes(eager_extra), ratio(eager_extra, extra, ".1f")]
            body.append([*times, speedup, *memory])
    return "\n".join([*heading, "", tables.table(headers, body, ["right"] * len(headers))])


def full_table(record: dict, section: dict) -> str:
    """Every implementation at every size."""
    mark = "" if record["environment"]["gpu"] else NOT_MEANINGFUL
    spec, sizes = KERNELS[section["kernel"]], numbers(section["size"])
    shape = [f"{each.name} {n:,}" for each, n in zip(spec.dimensions, sizes)]
    work = [spec.rows.lower(), *(dimension.name for dimension in spec.dimensions)]
    if spec.rate is BANDWIDTH:
        work = [str(spec.work), *work, f"{section['bytes_per_element'] // spec.work} bytes"]
    else:
        work = [f"{spec.work} FLOP", *work]
    compilation = section.get("first_call_seconds")  # a record may be older than a measurement
    heading = [
        tables.title(f"{spec.title}: every implementation{mark}"),
        "; ".join([record["dtype"], *shape, f"times in us; {spec.judged} against float64"]),
        f"{spec.rate.name}: {' x '.join(work)} / total p50",
        *spec.notes,
        "Total: one call at a time after flushing the cache, which hides part of the host's work; "
        "Host: calls queued back to back",
        f"First call (compilation): {'n/a' if compilation is None else f'{compilation:.1f} s'}",
    ]
    headers = [spec.rows, "Implementation", "Forward", "Backward", "Total p20 / p50 / p80", "Host", "Kernels only"]
    headers += [spec.rate.name, f"% of {spec.rate.ceiling}", "Extra MB", *(f"Error {part}" for part in spec.errors)]
    body = []
    for tokens, rows in rows_by_tokens(section).items():
        if body:
            body.append([""] * len(headers))
        for row in rows.values():
            times = [row["forward_us"], row["backward_us"], *row["total_us"], row.get("host_us"), row["kernels_us"]]
            forward, backward, *total, host, kernels = (microseconds(t) for t in times)
            errors = [number(row["errors"].get(part), ".1e") for part in spec.errors]
            rate = number(row[spec.rate.key], spec.rate.format)
            body.append(
                [f"{tokens:,}", row["implementation"], forward, backward, " / ".join(total), host, kernels]
                + [rate, share(record, section, row), megabytes(row["extra_bytes"]), *errors]
            )
    align = ["right", "left"] + ["right"] * (len(headers) - 2)
    return "\n".join([*heading, "", tables.table(headers, body, align)])


def summary_table(record: dict, kernel: str) -> str:
    """All sizes of one kernel: ours beside the ceiling and torch.compile."""
    mark = "" if record["environment"]["gpu"] else NOT_MEANINGFUL
    spec, sections = KERNELS[kernel], sections_of(record, kernel)
    measured = {row["implementation"] for section in sections for row in section["rows"]}
    shown = [name for name in (OURS, IN_PLACE) if name in measured]
    headers = [*(dimension.name.capitalize() for dimension in spec.dimensions), spec.rows]
    for name in shown:
        headers += [f"{name} (us)", f"% of {spec.rate.ceiling}"]
    headers += [f"{COMPILED} (us)", f"{COMPILED} / {OURS}", "of kernels only"]
    body = []
    for section in sections:
        if body:
            body.append([""] * len(headers))
        for tokens, rows in rows_by_tokens(section).items():
            us = {name: rows[name]["total_us"][1] if name in rows else None for name in (*shown, COMPILED)}
            cells = [f"{n:,}" for n in (*numbers(section["size"]), tokens)]
            for name in shown:
                cells += [microseconds(us[name]), share(record, section, rows.get(name))]
            alone = (rows.get(name, {}).get("kernels_us") for name in (COMPILED, OURS))
            cells += [microseconds(us[COMPILED]), ratio(us[COMPILED], us[OURS], ".2f"), ratio(*alone, ".2f")]
            body.append(cells)
    heading = tables.title(f"{spec.title}: all sizes, forward + backward, {record['dtype']}{mark}")
    return "\n".join([heading, tables.table(headers, body, ["right"] * len(headers))])


def render(record: dict) -> str:
    """Everything the script prints about its measurements, from their record."""
    env = record["environment"]
    blocks = [] if env["gpu"] else [tables.NO_GPU_NOTE]
    blocks.append(timing.ceilings_card(env, record["copy_gbs"], record["matmul_tflops"]))
    for section in record["sections"]:
        if section["kernel"] in PLAYBOOK:
            blocks.append(playbook_table(record, section))
        blocks.append(full_table(record, section))
    blocks += [summary_table(record, kernel) for kernel in KERNELS if len(sections_of(record, kernel)) > 1]
    if record["absent"]:
        blocks.append("; ".join(record["absent"]))
    return "\n\n".join(blocks)


# One colour per library, dashed where in place; apart for colour-blind readers too (Okabe and Ito, 2008).
COLOURS = {
    OURS: "#D55E00", EAGER: "#999999", "F.linear_": "#F0E442", "F.kl_div in fp32": "#999999", "F.": "#56B4E9",
    ONE_TILE: "#E69F00", COMPILED: "#0072B2",
    "torch.optim.AdamW,": "#56B4E9", "torch.optim": "#999999",
    "Liger": "#CC79A7", "QuACK": "#009E73", HOST_FLOOR: "#000000",
}  # fmt: skip


def line_style(name: str) -> dict:
    """A variant of an implementation (in place, ...) has its colour and a marker of its own."""
    colour = next(colour for prefix, colour in COLOURS.items() if name.startswith(prefix))
    variants = f"{OURS} under {COMPILED}", f"{OURS}, stochastic rounding", TWO_KERNELS
    return {
        "color": colour,
        "marker": "^" if name in variants else "s" if name.endswith("in place") else "o",
        "markersize": 6,
        "linewidth": 2.5 if name.startswith(OURS) else 1.5,
    }


def panels(record: dict) -> Iterator[tuple[str, str, str, list[tuple[int, dict]]]]:
    """The rows of the picture: kernel, what its title adds, what is along x, and each measurement with its place there.

    A row for each size over the tokens; of a kernel measured at one number of tokens, one over the sizes.
    """
    for kernel in dict.fromkeys(section["kernel"] for section in record["sections"]):
        spec, sections = KERNELS[kernel], sections_of(record, kernel)
        tokens = {row["tokens"] for section in sections for row in section["rows"]}
        if len(tokens) == 1 and len(sections) > 1 and len(spec.dimensions) == 1:
            points = [(section["size"], row) for section in sections for row in section["rows"]]
            yield kernel, f", {tokens.pop():,} {spec.rows.lower()}: ", spec.dimensions[0].name, points
            continue
        for section in sections:
            sizes = numbers(section["size"])
            title = "".join(f", {each.name} {n:,}" for each, n in zip(spec.dimensions, sizes))
            title += ":\n" if len(sizes) > 1 else ": "
            yield kernel, title, spec.rows.lower(), [(row["tokens"], row) for row in section["rows"]]


FEW = 2  # places along x: so many are drawn as bars, because a line needs more points to say anything
HOST_STYLE = {"linestyle": "--", "linewidth": 1.2, "markersize": 3, "alpha": 0.7}


def clocks(row: dict) -> dict[str, float]:
    """Microseconds by clock: the kernels alone, where that could be measured, and one call with the host's work."""
    found = {"kernels alone": row["kernels_us"], "host included": row["total_us"][1]}
    return {clock: us for clock, us in found.items() if us is not None}


def rate_at(rate: Rate, row: dict, us: float) -> float:
    """GB/s or TFLOP/s if the row's work took `us`; the record has it for the call with the host."""
    return row[rate.key] * row["total_us"][1] / us


def draw_ceiling(panel, ceiling: float, rate: Rate, vertical: bool) -> None:
    """A line at the measured ceiling, and its name in the room that is left beyond it."""
    (panel.axvline if vertical else panel.axhline)(ceiling, color="black", linewidth=1)
    where, axes = ((ceiling, 1), ("data", "axes fraction")) if vertical else ((0, ceiling), ("axes fraction", "data"))
    panel.annotate(
        f"measured {rate.ceiling} rate", where, (14, -5) if vertical else (5, 3), xycoords=axes,
        textcoords="offset points", va="top" if vertical else "bottom", rotation=90 if vertical else 0,
    )  # fmt: skip


def draw_bars(panel, rate: Rate, rows: list[dict], ceiling: float) -> None:
    """The rates at one size: kernels alone as full bars, host included as frames."""
    rows = [row for row in reversed(rows) if row[rate.key] is not None]
    for place, row in enumerate(rows):
        times, colour = clocks(row), line_style(row["implementation"])["color"]
        for clock, us in times.items():
            filled = clock == "kernels alone"
            height = place + (0 if len(times) == 1 else 0.19 if filled else -0.19)
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


def draw_lines(latency, bandwidth, rate: Rate, points: list[tuple[int, dict]], ceiling: float) -> None:
    """Times and rates over the size: kernels alone solid, host included dashed."""
    highest = ceiling
    for implementation in dict.fromkeys(row["implementation"] for _, row in points):
        style = line_style(implementation)
        rows = [(x, row) for x, row in points if row["implementation"] == implementation]
        for clock in ("host included", "kernels alone"):
            measured = [(x, row, clocks(row)[clock]) for x, row in rows if clock in clocks(row)]
            if not measured:
                continue
            places, times = [x for x, _, _ in measured], [us for _, _, us in measured]
            drawn = style | (HOST_STYLE if clock == "host included" else {})
            latency.plot(places, times, **drawn)
            if implementation != HOST_FLOOR:
                rates = [rate_at(rate, row, us) for _, row, us in measured]
                bandwidth.plot(places, rates, **drawn)
                highest = max(highest, *rates)
    draw_ceiling(bandwidth, ceiling, rate, vertical=False)
    bandwidth.set(ylim=(0, 1.1 * highest))


def plot(record: dict, path: str) -> None:
    """Per kernel, by both clocks: time over tokens or sizes, and GB/s or TFLOP/s beside the measured ceiling."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    plt, digits = pictures.pyplot(), FuncFormatter(lambda value, _: f"{value:,.10g}")
    parts = list(panels(record))
    columns = 2 if any(len({x for x, _ in points}) > 1 for *_, points in parts) else 1
    size = 7 * columns + 2 * (columns == 1), 5 * len(parts)
    figure, axes = plt.subplots(len(parts), columns, figsize=size, squeeze=False, layout="constrained")
    for (kernel, added, along, points), pair in zip(parts, axes):
        spec = KERNELS[kernel]
        rate, ceiling, name = spec.rate, record[spec.rate.ceiling_key], spec.title + added
        places = sorted({x for x, _ in points})
        if len(places) <= FEW:
            for panel, x in zip(pair, places):
                draw_bars(panel, rate, [row for place, row in points if place == x], ceiling)
                panel.xaxis.set_major_formatter(digits)
                panel.set_title(f"{name}{x:,} {along}", fontsize="medium")
            for panel in pair[len(places) :]:
                panel.remove()
            continue
        latency, bandwidth = pair
        draw_lines(latency, bandwidth, rate, points, ceiling)
        latency.set(yscale="log", ylabel="forward + backward, median (us)", title=f"{name}time, lower is better")
        bandwidth.set(
            ylabel=f"{rate.name} (minimum {'traffic' if rate is BANDWIDTH else 'work'} / median)",
            title=f"{name}{'bandwidth' if rate is BANDWIDTH else 'rate'}, higher is better",
        )
        latency.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        latency.yaxis.set_minor_formatter(NullFormatter())
        for panel in pair:
            panel.set_xscale("log", base=2)
            panel.set_xticks(places)
            panel.xaxis.set_minor_locator(NullLocator())
            panel.xaxis.set_major_formatter(digits)
            panel.yaxis.set_major_formatter(digits)
            panel.set_xlabel(along)
            panel.grid(alpha=0.3)
        names = dict.fromkeys(row["implementation"] for _, row in points)
        handles = [Line2D([], [], **line_style(each), label=each) for each in names]
        handles.append(Line2D([], [], color="black", label="solid: the kernels alone"))
        handles.append(Line2D([], [], color="black", **HOST_STYLE, label="dashed: one call, host included"))
        bandwidth.legend(handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5))
    env = record["environment"]
    mark = "" if env["gpu"] else NOT_MEANINGFUL
    bars = any(len({x for x, _ in points}) <= FEW for *_, points in parts)
    figure.suptitle(
        f"{gpu_line(env)}, {record['dtype']}, PyTorch {env['torch']}, Triton {env['triton']}{mark}"
        + ("\nfull bars: the kernels alone; frames: one call, host included" if bars else "")
    )
    pictures.save_plot(figure, path)


# ---------------------------------------------------------------- command line


def number_list(text: str) -> list[int]:
    """argparse type: positive numbers, separated by commas; sorted, and each one once."""
    return sorted({positive_int(part) for part in text.split(",")})


def sizes_of(kernel: str, args: argparse.Namespace) -> list[Size]:
    """Every combination of its dimensions, as the flags or the defaults have them."""
    choices = [(each.flag and getattr(args, each.flag)) or each.defaults for each in KERNELS[kernel].dimensions]
    return [size[0] if len(size) == 1 else size for size in itertools.product(*choices)]


def refusal(kernel: str, args: argparse.Namespace) -> str | None:
    """Why these flags cannot be followed for this kernel, if they cannot."""
    spec = KERNELS[kernel]
    flags = {each.flag for each in spec.dimensions} | ({"tokens"} if spec.rows == "Tokens" else set())
    unused = [flag for flag in ("tokens", "hidden", "vocab") if getattr(args, flag) and flag not in flags]
    if args.sweep and kernel not in sweep_kernels.LAUNCHES:
        return f"--sweep knows the settings of {' and '.join(sweep_kernels.LAUNCHES)} alone, not of {kernel}"
    if args.dtype == "fp16" and kernel == "adamw":
        return "adamw is not measured in fp16: PyTorch's moments would be fp16 and ours fp32"
    if unused and args.kernel == kernel:  # of all kernels, each takes what concerns it
        return f"--{unused[0]} changes nothing for --kernel {kernel}: leave it out"
    return None


def parse_arguments() -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    specs = KERNELS.items()
    sizes = "; ".join(f"{name} {','.join(map(str, spec.tokens))}" for name, spec in specs if spec.rows == "Tokens")
    add("--kernel", choices=[*KERNELS, "all"], default="all", help="what to measure (default: %(default)s)")
    add("--tokens", type=number_list, metavar="N,N,...", help=f"rows of the input (default here: {sizes})")
    for flag in ("hidden", "vocab"):
        defaults = [
            f"{name} {','.join(map(str, each.defaults))}"
            for name, spec in specs for each in spec.dimensions if each.flag == flag
        ]  # fmt: skip
        add(f"--{flag}", type=number_list, metavar="N,N,...", help=f"columns (default here: {'; '.join(defaults)})")
    add("--dtype", choices=DTYPES, default="bf16", help="of inputs and gradients (default: %(default)s)")
    add("--sweep", action="store_true", help="time our kernels alone, with other settings than their files carry")
    add("--json", metavar="FILE", help="write the measurements as a JSON record")
    add("--plot", metavar="FILE.png", help="write latency and bandwidth over tokens as a picture")
    args = parser.parse_args()
    if args.kernel != "all" and (reason := refusal(args.kernel, args)):
        raise UserError(reason)
    if args.kernel in ("rmsnorm", "all") and args.hidden and max(args.hidden) > MAX_HIDDEN_SIZE:
        allowed = f"the {MAX_HIDDEN_SIZE:,} columns that the kernel allows"
        raise UserError(f"--hidden {max(args.hidden)} is more than {allowed}")
    if args.sweep and args.plot:
        raise UserError("--plot draws the benchmark; --sweep prints tables alone, so give one of the two")
    if args.sweep and args.tokens and len(args.tokens) > 1:
        raise UserError(f"--sweep takes one number of --tokens, not {len(args.tokens)}")
    output_files.check_outputs(args)
    return args


def main() -> None:
    args = parse_arguments()
    record = {
        "kind": "sweep" if args.sweep else "benchmark", "environment": run_records.environment(), "dtype": args.dtype,
        "copy_gbs": timing.copy_bandwidth(), "matmul_tflops": timing.matmul_rate(),
        "sections": [], "absent": [],
    }  # fmt: skip
    every = sweep_kernels.LAUNCHES if args.sweep else KERNELS
    kernels = {name: refusal(name, args) for name in (every if args.kernel == "all" else [args.kernel])}
    record["absent"] += [reason for reason in kernels.values() if reason]
    asked = [(name, size) for name, reason in kernels.items() if not reason for size in sizes_of(name, args)]
    try:
        for kernel, size in asked:
            if args.sweep:
                tokens = args.tokens or [sweep_kernels.TOKENS[kernel]]
                record["sections"] += sweep_kernels.sweep(kernel, tokens[0], size, DTYPES[args.dtype])
                continue
            spec = KERNELS[kernel]
            tokens = args.tokens if spec.rows == "Tokens" else None
            section, absent = benchmark(kernel, tokens or spec.tokens, size, args.dtype)
            record["sections"].append(section)
            record["absent"] += [sentence for sentence in absent if sentence not in record["absent"]]
    except torch.OutOfMemoryError as error:
        raise RunError("the GPU ran out of memory; lower --tokens, or --hidden and --vocab") from error
    print(sweep_kernels.render_sweep(record) if args.sweep else render(record))
    run_records.write_record(args.json, record)
    if args.plot:
        plot(record, args.plot)


if __name__ == "__main__":
    command_line.run_main(main)
