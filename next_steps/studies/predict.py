"""How long will the kernels and the steps take on a GPU that is not here?

    python -m next_steps.studies.predict --gpu GB300
    python -m next_steps.studies.predict --gpu GB300 --ceilings measured --score runs  # on a GB300
    python -m next_steps.studies.predict --gpu H200 --from runs/h100 --score results

Records of another GPU, the source, say how long a part took, and what it moved and computed.  Its
share of a limit: the time of this work at the source's ceiling, over the time of the part.  The
largest share tells the part's own limit, and the part keeps this share on the other GPU:

    memory          bytes; a copy reaches the same share of the data sheet's rate as on the source
    products        FLOPs; so do products that go on, which are limited by power
    instructions    of warps, as compiled (tools/instruction_count.py), at the data sheet's rate
    cache           a launch's bytes fit into the source's cache: follows the instructions' rate
    host            the source's GPU waits for it, and it is the same beside every GPU

A limit whose whole ceiling gives a longer time comes first.  docs/gb300.md tells the range, and
what is not known.  next_steps/memory/step_time.py predicts a step on the GPU that is here.
"""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from harness.benchmark.benchmark_specs import IN_PLACE, OURS, SPECS, numbers
from harness.cli import command_line, output_files, tables
from harness.cli.command_line import UserError
from harness.cli.tables import Column, Table
from harness.profiling.ceilings import ceilings_of, flops_at_ceilings_us
from harness.profiling.diagnose import GRAPH_SHARE, replaced_by
from harness.profiling.kernel_facts import KERNELS, RUNGS
from harness.records import run_records
from harness.steps.gpus import GPUS, Gpu, gpu_named
from next_steps.studies import ladder

RESULTS = Path(__file__).parents[2] / "results"
MEMORY, PRODUCTS, INSTRUCTIONS, CACHE = "memory", "products", "instructions", "cache"
PEAKS = {"copy_gbs": "tbs", "matmul_tflops": "bf16_tflops"}  # a record's rate: the figure of Gpu
PREDICTED = {name.partition(" 80GB")[0]: name for name, gpu in GPUS.items() if gpu.cache_mb}
OF_TRAINING = {"lora_rank": "LoRA {}", "quantize": "{}", "fp8": "fp8 {}", "moments": "{} moments"}
OTHER_STEPS = "opponent", "teacher", "recompute", "offload", "pack", "world_size", "first_layers"
GOALS = {"kernel": ("us", 0.10), "step": ("us", 0.05), "peak of a step": ("peak", 0.002)}
Estimate = tuple[float, float, float, str]  # microseconds, their range, what comes first


class Measured(NamedTuple):
    """What is predicted of other GPUs, and what a score compares with."""

    kind: str  # "kernel", "call", "category", "profile" or "step"
    name: str
    us: float
    busy_us: float  # of the GPU
    parts: dict[str, dict]  # as a profile's categories; a run has none of its own
    record: dict  # of a step; else empty
    kernels: tuple[str, ...] = ()  # ours: how their names begin

    @property
    def waits(self) -> bool:
        """Return True if the GPU waits for the host."""
        waited_us = self.us - self.busy_us
        return not self.record.get("cuda_graph") and waited_us > GRAPH_SHARE * self.us


# ---------------------------------------------------------------- what records say


def program_of(record: dict) -> tuple[tuple, tuple, frozenset[str]]:
    """Return what a step trains, its size, and its kernels: one loss takes the other's place."""
    size = record["batch_size"], record["seq_len"], record.get("accumulate")
    names = frozenset(record["kernels"]) & {*KERNELS}
    gone = {"cross_entropy"} if "linear_cross_entropy" in names else set()
    return tuple(record.get(key) for key in ("model", *OF_TRAINING)), size, names - gone


def name_of(record: dict) -> str:
    (model, *_), (batch, length, times), kernels = program_of(record)
    rungs = [rung.name for rung in RUNGS]
    words = " + ".join(name for name in KERNELS if name in kernels) or "none"
    if kernels and kernels == {*rungs[: len(kernels)]}:
        words = "all" if len(kernels) == len(rungs) else f"up to {rungs[len(kernels) - 1]}"
    size = f"{times} x " * bool(times) + f"{batch} x {length:,}"
    more = [text.format(record[key]) for key, text in OF_TRAINING.items() if record.get(key)]
    more += ["graph"] if record.get("cuda_graph") else []
    return ", ".join([size, model.removeprefix("meta-llama/Llama-3.1-"), words, *more])


def rows_of(record: dict) -> Iterator[Measured]:
    """Yield what a record measured of our kernels, and of steps with them or with none."""
    if record["kind"] == "benchmark" and record["dtype"] == "bf16":
        yield from kernels_measured(record)
    elif any(record.get(key) for key in OTHER_STEPS):
        return
    elif record["kind"] == "profile":
        parts = {name: part for name, part in record["categories"].items() if part["us"]}
        busy_us, name = sum(part["us"] for part in parts.values()), name_of(record)
        us = 1e3 * record["median_step_ms"]
        yield Measured("profile", name, us, busy_us, parts, record)
        for category, part in parts.items():
            us = part["us"]
            yield Measured("category", f"{name}: {category}", us, us, {category: part}, {})
    elif record["kind"] == "finetune" and record.get("busy_ms"):
        us = 1e6 * record["median_seconds"], 1e3 * record["busy_ms"]
        yield Measured("step", name_of(record), *us, {}, record)
    for rung in record["rungs"] if record["kind"] == "ladder" else ():
        plain = rung["name"].startswith(ladder.BASELINE)
        if (plain or ladder.is_ours(rung)) and "FP8" not in rung["name"]:
            graph = rung["name"].endswith((ladder.CUDA_GRAPH, ladder.IN_A_GRAPH))
            step = record | rung | {"cuda_graph": graph}
            us = 1e3 * rung["step_ms"], 1e3 * rung["busy_ms"]
            yield Measured("step", name_of(step), *us, {}, step)


def kernels_measured(record: dict) -> Iterator[Measured]:
    """Yield our kernels alone, and a call that the host makes."""
    for section in record["sections"]:
        spec = SPECS[section["kernel"]]
        for row in section["rows"]:
            who, total_us = row["implementation"], row["total_us"][1]
            if who in (OURS, IN_PLACE):
                us = row["kernels_us"] or total_us
                work = {"flops" if spec.flops else "bytes": row[spec.rate.key] * spec.rate.per_us}
                part = {"us": us, "launches": 1, "bytes": 0.0, "flops": 0.0}
                part |= {key: total_us * rate for key, rate in work.items()}
                shape = " x ".join(f"{n:,}" for n in (row["tokens"], *numbers(section["size"])))
                name = f"{section['kernel']} {shape}{who.removeprefix(OURS)}"
                for kind, wall_us in (("kernel", us), ("call", total_us)):
                    yield Measured(kind, name, wall_us, us, {name: part}, {}, spec.launches)


# ---------------------------------------------------------------- a GPU that was measured


class Source:
    """All records of one GPU, and what they say of another one."""

    def __init__(self, name: str, records: list[dict], counts: list[dict]):
        """Take the records of the GPU of this name in GPUS, and the counts of compiled kernels."""
        self.name, self.gpu, self.counts = name, GPUS[name], counts
        with_ceilings = [record for record in records if "ceilings" in record]
        rates = [r.get("ceilings", r) for r in records if {"ceilings", "matmul_tflops"} & r.keys()]
        if not rates:
            raise UserError(f"no benchmark, profile or run of {name} tells its ceilings")
        self.usual = {key: statistics.median(each[key] for each in rates) for key in PEAKS}
        self.best = self.usual | (ceilings_of(*with_ceilings).rates if with_ceilings else {})
        self.rows = [row for record in records for row in rows_of(record)]

    def ceilings(self, target: Gpu) -> dict[str, float]:
        """Return the rates of a target that reaches the source's shares of its published peaks."""
        ratios = {key: getattr(target, p) / getattr(self.gpu, p) for key, p in PEAKS.items()}
        return {key: rate * ratios[key] for key, rate in self.usual.items()}

    def instructions(self, row: Measured, gpu: Gpu) -> float:
        """Return those of a warp for each byte, as compiled for a GPU; 0 where none are counted."""
        of_gpu = [count for count in self.counts if count["target"] == gpu.target]
        found = [count for count in of_gpu if count["kernel"].startswith(row.kernels)]
        n_bytes = sum(count["n_bytes"] for count in found)
        return sum(count["instructions"] for count in found) / (n_bytes or 1)

    def predict_part(self, row: Measured, part: dict, target: Gpu, there: dict) -> Estimate:
        """Return the time of a row's part on a target with the rates `there`."""
        us, issue = part["us"], self.gpu.warps_per_us / target.warps_per_us
        here, compiled = (self.instructions(row, gpu) for gpu in (self.gpu, target))
        in_products = flops_at_ceilings_us(part["flops"], part.get("fp8_flops", 0.0), self.best)
        shares = {
            MEMORY: part["bytes"] / (1e3 * self.best["copy_gbs"] * us),
            PRODUCTS: in_products / us,
            INSTRUCTIONS: part["bytes"] * here / self.gpu.warps_per_us / us,
        }
        shares = {limit: min(1.0, share) for limit, share in shares.items()}
        if fits(part, self.gpu) and shares[PRODUCTS] < 0.5:
            shares = {CACHE: 0.0}  # not known
        ratios = {  # of times
            MEMORY: self.usual["copy_gbs"] / there["copy_gbs"],
            PRODUCTS: self.usual["matmul_tflops"] / there["matmul_tflops"],
            INSTRUCTIONS: issue * (compiled / here if here and compiled else 1.0),
            CACHE: issue,
        }
        own = max(shares, key=shares.get)
        times = {each: share * ratios[each] for each, share in shares.items()} | {own: ratios[own]}
        limit = max(times, key=times.get)
        reserve = {
            MEMORY: self.usual["copy_gbs"] / self.gpu.tbs / 1e3,
            PRODUCTS: self.usual["matmul_tflops"] / self.best["matmul_tflops"],
        }
        explained, left = shares[own] * ratios[own], 1.0 - shares[own]
        others = [1.0, ratios[own], ratios[MEMORY], ratios[INSTRUCTIONS]]
        low = min(times[limit], explained * reserve.get(own, 1.0) + left * min(others))
        high = max(times[limit], explained + left * max(others))
        if limit == MEMORY and row.kernels and fits(part, target):
            return us * times[limit], us * low, us * high, f"{MEMORY} or {CACHE}"
        return us * times[limit], us * low, us * high, limit

    def predict(self, row: Measured, target: Gpu, there: dict) -> Estimate | None:
        """Return the time of a row on the target; None: no profile tells its parts."""
        parts = self.parts_of(row)
        found = {name: self.predict_part(row, parts[name], target, there) for name in parts}
        if not found:
            return None
        us, low, high = (sum(ends) for ends in [*zip(*found.values())][:3])
        limit = max(found.values())[-1]
        if row.waits:  # not in the optimizer, whose kernels are long
            with_host = row.us
            if "optimizer" in parts:
                with_host += found["optimizer"][0] - parts["optimizer"]["us"]
            us, limit = max((us, limit), (with_host, "host"))
        return us, low, max(high, us), limit

    def parts_of(self, row: Measured) -> dict[str, dict]:
        """Return parts that add up to the row's time, or to the GPU's where the GPU waits.

        Those of a run are from the profile of the same training with the most of its kernels, and
        what these do not explain waits for memory; of another size only with the same kernels.
        """
        busy_us, parts = row.busy_us if row.waits else row.us, row.parts
        if not parts:
            training, size, kernels = program_of(row.record)
            found = [(*program_of(p.record), p) for p in self.rows if p.kind == "profile"]
            same = [each for each in found if each[0] == training]
            near = [each for each in same if each[1] == size and each[2] <= kernels]
            near = near or [each for each in same if each[2] == kernels]
            if not near:
                return {}
            *_, has, base = max(near, key=lambda each: (len(each[2]), each[1][0] * each[1][1]))
            gone = replaced_by([*(kernels - has)])
            parts = {name: part for name, part in base.parts.items() if name not in gone}
            left = busy_us - sum(part["us"] for part in parts.values())
            if gone and left > 0:
                n_bytes = 1e3 * self.best["copy_gbs"] * left
                parts["replaced"] = {"us": left, "launches": 1, "bytes": n_bytes, "flops": 0.0}
        scale = busy_us / sum(part["us"] for part in parts.values())
        return {
            name: {key: n * (1 if key == "launches" else scale) for key, n in part.items()}
            for name, part in parts.items()
        }


def fits(part: dict, gpu: Gpu) -> bool:
    """Return True if the bytes of a launch fit into the GPU's cache."""
    return part["bytes"] / part["launches"] <= 1e6 * gpu.cache_mb


# ---------------------------------------------------------------- all rows


def read_records(path: Path) -> list[dict]:
    """Return the records of a file or a folder."""
    try:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        return [record for record in (json.loads(f.read_text()) for f in files) if "kind" in record]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as records: {error}") from error


def of_gpu(records: list[dict], name: str) -> list[dict]:
    """Return the records that a GPU of this name in GPUS made."""
    gpus = (gpu_named(record.get("environment", {}).get("gpu")) for record in records)
    return [record for record, gpu in zip(records, gpus) if gpu is GPUS[name]]


def peak_of(record: dict, estimates: list[dict]) -> int:
    """Return the peak of a step by the estimator's records, else by its own record."""
    for made in estimates:
        for each in made["estimates"]:
            if program_of(made | {"fp8": record.get("fp8")} | each) == program_of(record):
                return each["peak_memory_bytes"]
    return record["peak_memory_bytes"]


def predict_all(
    sources: list[Source], gpu: str, estimates: list[dict], measured: dict | None = None
) -> dict:
    """Return what a record says of a GPU, by its name in GPUS.

    measured: its copy_gbs and matmul_tflops; None: by the sources' shares of the published peaks.
    """
    found, absent, rows = {}, {}, []
    rates = [measured or source.ceilings(GPUS[gpu]) for source in sources]
    for source, there in zip(sources, rates):
        for row in source.rows:
            estimate = source.predict(row, GPUS[gpu], there)
            of_row = (absent if estimate is None else found).setdefault((row.kind, row.name), [])
            of_row.append((source.name, row, estimate))
    for (kind, name), each in found.items():
        names, here, estimated = zip(*each)
        us, low, high, limits = zip(*estimated)
        row = {"kind": kind, "name": name, "from": sorted({*names}), "limit": limits[0]}
        row |= {"us": statistics.mean(us), "low": min(low), "high": max(high)}
        row["source_us"] = statistics.mean(one.us for one in here)
        rows.append(row | ({"peak": peak_of(here[0].record, estimates)} if here[0].record else {}))
    return {
        **{"gpu": gpu, "sources": [source.name for source in sources], "rows": rows},
        "ceilings": {key: statistics.mean(each[key] for each in rates) for key in PEAKS},
        "absent": [name for kind, name in absent if (kind, name) not in found],
    }


def add_score(record: dict, records: list[dict]) -> None:
    """Add to the rows what these records measured of the predicted GPU; None: not measured."""
    found = {}
    for each in (row for one in of_gpu(records, record["gpu"]) for row in rows_of(one)):
        found.setdefault((each.kind, each.name), []).append(each)
    for row in record["rows"]:
        same = found.get((row["kind"], row["name"]), [])
        row["measured_us"] = statistics.mean(each.us for each in same) if same else None
        peaks = [each.record["peak_memory_bytes"] for each in same if each.record]
        row["measured_peak"] = max(peaks, default=None)


# ---------------------------------------------------------------- what is printed


def time_in_words(us: float) -> str:
    return f"{us:,.1f} us" if us < 1e4 else f"{us / 1e3:,.1f} ms"


def within_goal(rows: list[dict], what: str) -> str:
    """Return how many times of a kind, or peaks, are near enough to the measured ones."""
    key, goal = GOALS[what]
    pairs = [(row[key], row[f"measured_{key}"]) for row in rows if what.endswith(row["kind"])]
    off = [abs(predicted / measured - 1) for predicted, measured in pairs if measured]
    near, missing = sum(each <= goal for each in off), len(pairs) - len(off)
    return f"{what}: {near} of {len(off)} within {goal:.1%}; not measured: {missing}"


def render(record: dict) -> str:
    gpu, rows, rates = GPUS[record["gpu"]], record["rows"], record["ceilings"]
    calls = {row["name"]: time_in_words(row["us"]) for row in rows if row["kind"] == "call"}

    def peak(row: dict) -> str:
        return f"{row['peak'] / 1e9:.1f}" if row["peak"] <= 1e9 * gpu.gb else "does not fit"

    shown = [
        Column("source", "source_us", time_in_words),
        Column("predicted", "us", time_in_words),
        Column("range", lambda row: " to ".join(time_in_words(row[k]) for k in ("low", "high"))),
        Column("first", "limit", align="left"),
    ]
    if scored := any("measured_us" in row for row in rows):
        shown.append(Column("measured", "measured_us", time_in_words, "not measured"))
    lines = [
        tables.title(f"{record['gpu']}, predicted from {' and '.join(record['sources'])}"),
        f"Ceilings: copy {rates['copy_gbs']:,.0f} GB/s of {1e3 * gpu.tbs:,.0f}, "
        f"products {rates['matmul_tflops']:,.0f} TFLOP/s of {gpu.bf16_tflops:,.0f}",
    ]
    for kinds, more in (
        (["kernel"], [Column("a call", lambda row: calls[row["name"]])]),
        (["profile", "category"], []),
        (["step"], [Column("peak, GB", peak)]),
    ):
        body = [row for row in rows if row["kind"] in kinds]
        columns = [Column(kinds[0].capitalize(), "name"), *shown, *more]
        lines += ["", Table.of(columns, body).text()] if body else []
    lines += [f"Not predicted, without a profile: {name}" for name in record["absent"]]
    lines += ["", *(within_goal(rows, what) for what in GOALS)] if scored else []
    return "\n".join(lines)


def main() -> None:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--gpu", required=True, choices=PREDICTED, help="which GPU's times are predicted")
    of_source = "records of other GPUs (default: results/, but those of --gpu)"
    add("--from", dest="source", type=Path, metavar="DIR", help=of_source)
    add("--ceilings", choices=["published", "measured"], default="published", help="of --gpu")
    add("--score", type=Path, metavar="FILE|DIR", help="records of --gpu, to compare with")
    add("--json", metavar="FILE", help="write the prediction as a JSON record")
    args = parser.parse_args()
    output_files.check_outputs(args)
    gpu, kept, measured = PREDICTED[args.gpu], read_records(RESULTS), None
    counts = [count for each in kept if each["kind"] == "instructions" for count in each["counts"]]
    records = read_records(args.source or RESULTS)
    names = [name for name in PREDICTED.values() if args.source or name != gpu]
    sources = [Source(name, found, counts) for name in names if (found := of_gpu(records, name))]
    if not sources:
        raise UserError(f"no records of another GPU in {args.source or RESULTS}")
    record = {"kind": "prediction", "environment": run_records.environment()}
    if args.ceilings == "measured":
        if not of_gpu([record], gpu):
            raise UserError(
                f"--ceilings measured needs a {gpu}: {run_records.gpu_line(record['environment'])}"
            )
        import torch

        from harness.profiling.profiler import measure_ceilings

        measured = measure_ceilings(torch.bfloat16)
    estimates = [each for each in kept if each["kind"] == "estimate"]
    record |= predict_all(sources, gpu, estimates, measured)
    if args.score:
        add_score(record, read_records(args.score))
    print(render(record))
    run_records.write_record(args.json, record)


if __name__ == "__main__":
    command_line.run_main(main)
