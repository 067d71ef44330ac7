"""How long will the kernels and the steps take on a GPU that is not here?

    python -m next_steps.studies.predict --gpu GB300
    python -m next_steps.studies.predict --gpu GB300 --ceilings measured --score runs  # on a GB300
    python -m next_steps.studies.predict --gpu H200 --from runs/h100 --score results

Records of another GPU, the source, say how long a part took, and what it moved and computed.  Its
share of a limit: the time of this work at the source's ceiling, over the time of the part.  The
largest share tells the part's own limit, and the part keeps this share on the other GPU.  A limit
whose whole ceiling gives a longer time comes first.  docs/gb300.md has the limits and the range.
next_steps/memory/step_time.py predicts a step on the GPU that is here, without records.
"""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from harness.benchmark.benchmark_specs import IN_PLACE, OURS, SPECS, numbers
from harness.cli import command_line, output_files, tables
from harness.cli.command_line import UserError
from harness.cli.flags import IN_FP8
from harness.cli.tables import Column, Table
from harness.profiling.ceilings import ceilings_of, flops_at_ceilings_us
from harness.profiling.diagnose import GRAPH_SHARE, replaced_by
from harness.profiling.kernel_facts import KERNELS, RUNGS
from harness.records import run_records
from harness.steps.gpus import GPUS, Gpu, gpu_named
from next_steps.studies import ladder

KEPT = Path(__file__).parents[2] / "results"
MEMORY, PRODUCTS, INSTRUCTIONS, CACHE = "memory", "products", "instructions", "cache"
ISSUED = 0.7  # of a rate of issue: the most that a kernel reached, on an H100 and on an H200
PEAKS = {"copy_gbs": "tbs", "matmul_tflops": "bf16_tflops"}  # a record's rate: the figure of Gpu
PREDICTED = {name.partition(" 80GB")[0]: name for name, gpu in GPUS.items() if gpu.cache_mb}
HOW_TRAINED = {"lora_rank": "LoRA {}", "quantize": "{}", "fp8": "fp8 {}", "moments": "{} moments"}
OTHER_STEPS = "opponent", "teacher", "recompute", "offload", "pack", "world_size", "first_layers"
WORK = "us", "bytes", "flops", "fp8_flops"  # of a part; also "launches"


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
        return not self.record.get("cuda_graph") and self.busy_us < (1 - GRAPH_SHARE) * self.us


def program_of(record: dict) -> tuple[tuple, tuple, frozenset[str]]:
    """Return what a step trains, its size, and its kernels: one loss takes the other's place."""
    size = record["batch_size"], record["seq_len"], record.get("accumulate")
    names = frozenset(record["kernels"]) & {*KERNELS}
    names -= {"cross_entropy"} if "linear_cross_entropy" in names else set()
    return tuple(record.get(key) for key in ("model", *HOW_TRAINED)), size, names


def name_of(record: dict) -> str:
    (model, *_), (batch, length, times), kernels = program_of(record)
    words = " + ".join(name for name in KERNELS if name in kernels) or "none"
    if len(kernels) > 1 and kernels == {rung.name for rung in RUNGS[: len(kernels)]}:
        words = "all" if len(kernels) == len(RUNGS) else f"up to {RUNGS[len(kernels) - 1].name}"
    size = f"{times} x " * bool(times) + f"{batch} x {length:,}"
    said = HOW_TRAINED | {"cuda_graph": "graph"}
    more = [text.format(record[key]) for key, text in said.items() if record.get(key)]
    return ", ".join([size, model.removeprefix("meta-llama/Llama-3.1-"), words, *more])


def measured_in(record: dict) -> Iterator[Measured]:
    """Yield what a record measured of our kernels, and of steps with them or with none."""
    if record["kind"] == "benchmark" and record["dtype"] == "bf16":
        for section in record["sections"]:
            yield from kernels_in(section)
    elif any(record.get(key) for key in OTHER_STEPS):
        return
    elif record["kind"] == "profile":
        parts = {n: {"fp8_flops": 0.0} | p for n, p in record["categories"].items() if p["us"]}
        us = 1e3 * record["median_step_ms"], sum(part["us"] for part in parts.values())
        yield Measured("profile", name_of(record), *us, parts, record)
        for name, part in parts.items():
            us = part["us"], part["us"]
            yield Measured("category", f"{name_of(record)}: {name}", *us, {name: part}, {})
    elif record["kind"] == "finetune" and record.get("busy_ms"):
        us = 1e6 * record["median_seconds"], 1e3 * record["busy_ms"]
        yield Measured("step", name_of(record), *us, {}, record)
    for rung in record["rungs"] if record["kind"] == "ladder" else ():
        plain = rung["name"].startswith(ladder.BASELINE)
        if plain or (ladder.is_ours(rung) and not rung["name"].startswith(IN_FP8)):
            graph = rung["name"].endswith((ladder.CUDA_GRAPH, ladder.IN_A_GRAPH))
            step = record | rung | {"cuda_graph": graph}
            us = 1e3 * rung["step_ms"], 1e3 * rung["busy_ms"]
            yield Measured("step", name_of(step), *us, {}, step)


def kernels_in(section: dict) -> Iterator[Measured]:
    """Yield our kernels in a benchmark's section: alone if that was measured, and a call."""
    spec = SPECS[section["kernel"]]
    for row in section["rows"]:
        who, total_us = row["implementation"], row["total_us"][1]
        if who in (OURS, IN_PLACE):
            us = row["kernels_us"] or total_us
            work = row[spec.rate.key] * spec.rate.per_us * total_us
            part = dict.fromkeys(WORK, 0.0) | {"flops" if spec.flops else "bytes": work}
            shape = " x ".join(f"{n:,}" for n in (row["tokens"], *numbers(section["size"])))
            name = f"{section['kernel']} {shape}{who.removeprefix(OURS)}"
            parts = {name: part | {"us": us, "launches": 1}}
            yield Measured("kernel", name, us, us, parts, {}, spec.launches)
            yield Measured("call", name, total_us, us, parts, {}, spec.launches)


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
        self.reserve = {  # how much shorter a time is at the best rate than at the usual one
            MEMORY: self.usual["copy_gbs"] / self.gpu.tbs / 1e3,
            PRODUCTS: self.usual["matmul_tflops"] / self.best["matmul_tflops"],
        }
        self.rows = [row for record in records for row in measured_in(record)]

    def ceilings(self, target: Gpu) -> dict[str, float]:
        """Return the rates of a target that reaches the source's shares of its published peaks."""
        ratios = {key: getattr(target, p) / getattr(self.gpu, p) for key, p in PEAKS.items()}
        return {key: rate * ratios[key] for key, rate in self.usual.items()}

    def instructions(self, row: Measured, gpu: Gpu) -> float:
        """Return those of a warp for each byte, as compiled for a GPU; 0 where none are counted."""
        found = {}
        for count in self.counts:
            if count["target"] == gpu.target and count["kernel"].startswith(row.kernels):
                found.setdefault(count["kernel"], count)  # the plain case comes first
        n_bytes = sum(count["n_bytes"] for count in found.values())
        return sum(count["instructions"] for count in found.values()) / (n_bytes or 1)

    def predict_part(self, row: Measured, part: dict, target: Gpu, there: dict) -> tuple:
        """Return microseconds, their range, and the first limit of a part at the rates `there`."""
        us, issue = part["us"], self.gpu.warps_per_us / target.warps_per_us
        here, compiled = (self.instructions(row, gpu) for gpu in (self.gpu, target))
        ratios = {  # of times
            MEMORY: self.usual["copy_gbs"] / there["copy_gbs"],
            PRODUCTS: self.usual["matmul_tflops"] / there["matmul_tflops"],
            INSTRUCTIONS: issue * (compiled / here if here and compiled else 1.0),
            CACHE: issue,
        }
        shares = {
            MEMORY: part["bytes"] / self.best["copy_gbs"] / 1e3 / us,
            PRODUCTS: flops_at_ceilings_us(part["flops"], part["fp8_flops"], self.best) / us,
            INSTRUCTIONS: part["bytes"] * here / (ISSUED * self.gpu.warps_per_us) / us,
        }
        if shares[PRODUCTS] < 0.5 and part["bytes"] / part["launches"] <= 1e6 * self.gpu.cache_mb:
            shares = {CACHE: 0.0}  # it is not known
        own = max(shares, key=shares.get)
        times = {limit: min(1.0, share) * ratios[limit] for limit, share in shares.items()}
        explained, left = times[own], max(0.0, 1.0 - shares[own])
        times[own] = ratios[own]
        limit = max(times, key=times.get)
        others = [1.0, ratios[own], ratios[MEMORY], ratios[INSTRUCTIONS]]
        low = min(times[limit], explained * self.reserve.get(own, 1.0) + left * min(others))
        reached = 1.0 if limit == own else 1.0 - left
        high = max(times[limit] / reached, explained + left * max(others))
        return us * times[limit], us * low, us * high, limit

    def predict(self, row: Measured, target: Gpu, there: dict) -> tuple | None:
        """Return the same of a row; None: no profile tells its parts."""
        if not (parts := self.parts_of(row)):
            return None
        found = {name: self.predict_part(row, parts[name], target, there) for name in parts}
        us, low, high = (sum(ends) for ends in [*zip(*found.values())][:3])
        limit = max(found.values())[-1]
        if row.waits:  # not in the optimizer, whose kernels are long
            gained = sum(parts[n]["us"] - found[n][0] for n in parts if n == "optimizer")
            us, limit = max((us, limit), (row.us - gained, "host"))
        return us, low, max(high, us), limit

    def parts_of(self, row: Measured) -> dict[str, dict]:
        """Return parts that add up to the row's time, or to the GPU's where the GPU waits."""
        busy_us, parts = row.busy_us if row.waits else row.us, row.parts
        if not parts:  # the profile of the same training with the most of the run's kernels
            training, size, kernels = program_of(row.record)
            profiles = []
            for each in (each for each in self.rows if each.kind == "profile"):
                other, its_size, has = program_of(each.record)
                if other == training and (has == kernels or (its_size == size and has < kernels)):
                    profiles.append((its_size == size, len(has), its_size[:2], has, each.parts))
            if not profiles:
                return {}
            *_, has, found = max(profiles, key=lambda each: each[:3])
            gone = replaced_by([*(kernels - has)])
            parts = {name: part for name, part in found.items() if name not in gone}
            left = busy_us - sum(part["us"] for part in parts.values())
            if gone and left > 0:  # what the profile does not explain waits for memory
                work = {"us": left, "bytes": 1e3 * self.best["copy_gbs"] * left, "launches": 1}
                parts["replaced"] = dict.fromkeys(WORK, 0.0) | work
        scale = busy_us / sum(part["us"] for part in parts.values())
        return {
            name: part | {key: scale * part[key] for key in WORK} for name, part in parts.items()
        }


def read_records(path: Path) -> list[dict]:
    """Return the records of a file, or of a folder and those in it, but for predictions."""
    try:
        files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        records = [json.loads(file.read_text()) for file in files]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as records: {error}") from error
    return [record for record in records if record.get("kind", "prediction") != "prediction"]


def of_gpu(records: list[dict], name: str) -> list[dict]:
    """Return the records that a GPU of this name in GPUS made."""
    gpus = (gpu_named(record.get("environment", {}).get("gpu")) for record in records)
    return [record for record, gpu in zip(records, gpus) if gpu is GPUS[name]]


def peak_of(record: dict, estimates: list[dict]) -> int:
    """Return the peak of a step by the estimator's records, else by its own record."""
    for made in estimates:
        for each in made["estimates"]:
            if program_of(made | each) == program_of(record):
                return each["peak_memory_bytes"]
    return record["peak_memory_bytes"]


def predict_all(
    sources: list[Source], gpu: str, estimates: list[dict], measured: dict | None = None
) -> dict:
    """Return the rows of a GPU, by its name in GPUS, with its published or measured ceilings."""
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
    """Add what these records measured of the predicted GPU, and the ratios; None: not measured."""
    found = {}
    for each in (row for one in of_gpu(records, record["gpu"]) for row in measured_in(one)):
        found.setdefault((each.kind, each.name), []).append(each)
    for row in record["rows"]:
        same = found.get((row["kind"], row["name"]), [])
        row["measured_us"] = statistics.mean(each.us for each in same) if same else None
        row["ratio"] = row["us"] / row["measured_us"] if same else None
        peaks = [each.record["peak_memory_bytes"] for each in same if each.record]
        row["peak_ratio"] = row["peak"] / max(peaks) if peaks else None


def milliseconds(us: float) -> str:
    return f"{us / 1e3:,.{1 if us >= 1e4 else 4}f}"


def render(record: dict) -> str:
    gpu, rates = GPUS[record["gpu"]], record["ceilings"]
    rows = [row for row in record["rows"] if row.get("ratio", True)]
    source = Column("source, ms", "source_us", milliseconds)
    predicted = Column("predicted", "us", milliseconds)
    more = [
        Column("range", lambda row: " to ".join(milliseconds(row[key]) for key in ("low", "high"))),
        Column("first", "limit", align="left"),
    ]
    shown, memory = [source, predicted, *more], [Column("GB", lambda row: row["peak"] / 1e9, ".1f")]
    if any("ratio" in row for row in rows):  # first what belongs together: a wide table is cut
        measured = Column("measured", "measured_us", milliseconds)
        shown = [predicted, measured, Column("ratio", "ratio", ".3f"), *more, source]
        memory.append(Column("ratio", "peak_ratio", ".4f"))
    lines = [
        tables.title(f"{record['gpu']}, predicted from {' and '.join(record['sources'])}"),
        f"Ceilings: copy {rates['copy_gbs']:,.0f} GB/s of {1e3 * gpu.tbs:,.0f}, products "
        f"{rates['matmul_tflops']:,.0f} TFLOP/s of {gpu.bf16_tflops:,.0f}; memory {gpu.gb} GB",
    ]
    for kinds in ["kernel"], ["call"], ["profile", "category"], ["step"]:
        body = [row for row in rows if row["kind"] in kinds]
        columns = [Column(kinds[0].capitalize(), "name"), *shown, *memory * ("step" in kinds)]
        lines += ["", Table.of(columns, body).text()] if body else []
    lines += [f"Not predicted, without a profile: {name}" for name in record["absent"]]
    if unmeasured := len(record["rows"]) - len(rows):
        lines.append(f"Not measured: {unmeasured} of {len(record['rows'])} predictions")
    return "\n".join(lines)


def prediction_of(gpu: str, source: Path = KEPT, measured: dict | None = None) -> dict:
    """Return the record of a GPU, by its name in GPUS, from the records in `source`.

    By default those are the project's, without that GPU's own.
    """
    kept = read_records(KEPT)
    records = kept if source == KEPT else read_records(source)
    counts = [count for each in kept if each["kind"] == "instructions" for count in each["counts"]]
    names = [name for name in PREDICTED.values() if source != KEPT or name != gpu]
    sources = [Source(name, found, counts) for name in names if (found := of_gpu(records, name))]
    if not sources:
        raise UserError(f"no records of another GPU in {source}")
    estimates = [each for each in kept if each["kind"] == "estimate"]
    record = {"kind": "prediction", "environment": run_records.environment()}
    return record | predict_all(sources, gpu, estimates, measured)


def main() -> None:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--gpu", required=True, choices=PREDICTED, help="which GPU's times are predicted")
    add("--from", dest="source", type=Path, default=KEPT, metavar="DIR", help="the source")
    add("--ceilings", choices=["published", "measured"], default="published", help="of --gpu")
    add("--score", type=Path, metavar="FILE|DIR", help="records of --gpu, to compare with")
    add("--json", metavar="FILE", help="write the prediction as a JSON record")
    args = parser.parse_args()
    output_files.check_outputs(args)
    gpu, measured = PREDICTED[args.gpu], None
    if args.ceilings == "measured":
        if gpu_named(run_records.environment()["gpu"]) is not GPUS[gpu]:
            raise UserError(f"--ceilings measured runs on a {gpu} alone")
        from harness.model.architecture import TORCH_DTYPES
        from harness.profiling.profiler import measure_ceilings

        measured = measure_ceilings(TORCH_DTYPES["bf16"])
    record = prediction_of(gpu, args.source, measured)
    if args.score:
        add_score(record, read_records(args.score))
    print(render(record))
    run_records.write_record(args.json, record)


if __name__ == "__main__":
    command_line.run_main(main)
