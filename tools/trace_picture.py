"""Draw what a GPU's streams do during about two decoder layers, from a trace under FSDP2.

    torchrun --nproc-per-node 2 profile_baseline.py --trace runs/trace.json
    python -m tools.trace_picture runs/trace.json runs/trace.png --json runs/trace_picture.json

One panel begins with an all-gather of the forward, the other with a reduce-scatter of the backward.
NCCL's kernels have a lane of their own.  The time in which nothing else runs is shaded.  The record
has what is drawn.  It is far smaller than the trace.
"""

import gzip
import itertools
import json
import re
import zlib

from harness.cli import command_line, tables
from harness.cli.command_line import UserError
from harness.cli.output_files import check_outputs
from harness.records.run_records import write_record

GPU_WORK = "kernel", "gpu_memcpy", "gpu_memset"  # categories of a Chrome trace
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
SENT = {
    ALL_GATHER: re.compile("^nccl.*AllGather"),
    REDUCE_SCATTER: re.compile("^nccl.*ReduceScatter"),
    ALL_REDUCE: re.compile("^nccl.*AllReduce"),
}
OPTIMIZER = re.compile("multi_tensor_apply", re.IGNORECASE)  # PyTorch's; ours are known by name
NCCL = "NCCL"
COLOURS = {
    "matmul": "#0072B2",
    "attention": "#009E73",
    "optimizer": "#CC79A7",
    "other": "#999999",
    ALL_GATHER: "#E69F00",
    REDUCE_SCATTER: "#D55E00",
    ALL_REDUCE: "#F0E442",
}
SHADE = "#FFC0CB"


def read(path: str) -> dict:
    """Read a Chrome trace, which is compressed if its name ends in .gz."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            trace = json.loads(file.read())
        return trace | {"traceEvents": list(trace["traceEvents"])}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is no Chrome trace: take what --trace wrote") from error


def kind_of(name: str) -> str:
    """Return the key of COLOURS for a kernel's name."""
    from harness.profiling.attribution import category_by_name, category_of_kernel

    for kind, pattern in {**SENT, "optimizer": OPTIMIZER}.items():
        if pattern.search(name):
            return kind
    category = category_by_name(name) or category_of_kernel(name)
    return category if category in COLOURS else "other"


def gpu_work(trace: dict) -> list[dict]:
    """Return lane, kind, start and end in microseconds of all work of a GPU, sorted by start."""
    work = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in GPU_WORK:
            kind, start = kind_of(event["name"]), float(event["ts"])
            lane = NCCL if kind in SENT else f"stream {event['args']['stream']}"
            work.append({"lane": lane, "kind": kind, "start": start, "end": start + event["dur"]})
    return sorted(work, key=lambda each: each["start"])


def window(work: list[dict], kind: str, part: float, layers: int) -> tuple[float, float]:
    """Return the starts of two kernels of a kind, `layers` apart; `part` places the first."""
    starts = [each["start"] for each in work if each["kind"] == kind]
    first = int(part * len(starts))
    if first + layers >= len(starts):
        given = f"the trace has {len(starts)} kernels of NCCL's for {kind}, too few"
        raise UserError(f"{given} for --layers {layers}: it must be of fsdp on several GPUs")
    return starts[first], starts[first + layers]


def cut(work: list[dict], start: float, end: float) -> list[dict]:
    """Return what runs in a window, in milliseconds from the window's start."""
    inside = [each for each in work if each["start"] < end and each["end"] > start]

    def ms(time: float) -> float:
        return (min(max(time, start), end) - start) / 1e3

    return [each | {"start": ms(each["start"]), "end": ms(each["end"])} for each in inside]


def exposed(work: list[dict]) -> list[tuple[float, float]]:
    """Return the times from when to when something is sent and nothing else runs."""
    edges = sorted({edge for each in work for edge in (each["start"], each["end"])})
    found = []
    for start, end in itertools.pairwise(edges):
        running = [each for each in work if each["start"] <= start and each["end"] >= end]
        if running and all(each["kind"] in SENT for each in running):
            found.append((start, end))
    return found


def picture_of(trace: dict, layers: int) -> dict:
    """Return the record that is drawn."""
    work = gpu_work(trace)
    # Each layer is gathered in the forward and again in the backward.
    windows = {
        "forward": window(work, ALL_GATHER, 1 / 4, layers),
        "backward": window(work, REDUCE_SCATTER, 1 / 2, layers),
    }
    panels = {
        name: {"ms": (end - start) / 1e3, "work": cut(work, start, end)}
        for name, (start, end) in windows.items()
    }
    gpu = next((each["name"] for each in trace.get("deviceProperties", [])), None)
    return {"kind": "trace_picture", "gpu": gpu, "layers": layers, "panels": panels}


def plot(record: dict, path: str) -> None:
    """Draw a lane for each stream, over time."""
    from matplotlib.patches import Patch

    panels = record["panels"]
    figure, axes = tables.pyplot().subplots(len(panels), 1, figsize=(12, 5), layout="constrained")
    kinds = set()
    for axis, (name, panel) in zip(axes, panels.items()):
        streams = sorted({each["lane"] for each in panel["work"]} - {NCCL})
        axis.barh([NCCL, *streams], 0)  # the lanes, in this order
        for start, end in exposed(panel["work"]):
            axis.axvspan(start, end, color=SHADE, linewidth=0)
        for each in panel["work"]:
            kinds.add(each["kind"])
            bar = {"color": COLOURS[each["kind"]], "edgecolor": "white", "linewidth": 0.2}
            axis.barh(each["lane"], each["end"] - each["start"], left=each["start"], **bar)
        axis.set_xlim(0, panel["ms"])
        axis.set_title(name, loc="left")
    axes[-1].set_xlabel("ms")
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in COLOURS if kind in kinds]
    handles.append(Patch(color=SHADE, label="exposed: nothing else runs"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    layers = f"about {record['layers']} decoder layers in each panel"
    figure.suptitle(f"One GPU of several under FSDP2, {layers}; {record['gpu'] or 'unknown GPU'}")
    tables.save_plot(figure, path)


def main() -> None:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("records", metavar="TRACE", help="a Chrome trace, .json or .json.gz, of several processes")
    add("plot", metavar="PICTURE.png", help="what is drawn")
    add("--layers", type=command_line.positive_int, default=2, help="in a panel (default: 2)")
    add("--json", metavar="FILE", help="write what is drawn as a JSON record")
    args = parser.parse_args()
    check_outputs(args)
    record = picture_of(read(args.records), args.layers)
    plot(record, args.plot)
    write_record(args.json, record)


if __name__ == "__main__":
    command_line.run_main(main)
