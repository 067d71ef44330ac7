"""The tables and the picture of scaling.py's records."""

import itertools
from typing import NamedTuple

from harness.cli import tables
from harness.cli.command_line import UserError
from harness.cli.flags import IN_FP8
from harness.cli.workload import model_line
from harness.profiling.diagnose import EXPOSED_SHARE
from harness.profiling.profile_tables import communication_lines
from harness.records import run_records
from harness.records.spread import overlap

HEADERS = ["way, tokens", "tokens/s", "of one", "efficiency", "GB", "of one"]
HEADERS += ["sent", "exposed"]
NOT_MEASURED = "n/a"
# what --ways calls them: their names; Liger comes last, as its patch stays in the process
WAYS = {"baseline": "baseline", "kernels": "all kernels", "fp8": IN_FP8, "liger": "Liger"}
COLOURS = dict(zip(WAYS.values(), ("#777777", "#D55E00", "#009E73", "#0072B2")))
STYLES = "-", "--", ":", "-."  # of the lines of a record


class Size(NamedTuple):
    """What a process takes in a step."""

    batch_size: int  # sequences of a micro-batch
    seq_len: int  # tokens of a sequence
    accumulate: int = 1  # micro-batches

    @classmethod
    def of(cls, row: dict) -> "Size":
        return cls(row["batch_size"], row["seq_len"], row.get("accumulate", 1))

    @property
    def tokens(self) -> int:
        """Return the tokens of a step in each process."""
        return self.batch_size * self.seq_len * self.accumulate

    def needs(self) -> tuple[int, int]:
        """Return what orders sizes by their memory: a micro-batch's tokens, then their number."""
        return self.batch_size * self.seq_len, self.accumulate

    def __str__(self) -> str:
        several = f" × {self.accumulate}" if self.accumulate > 1 else ""
        return f"{self.batch_size} × {self.seq_len:,}{several}"


def read(paths: list[str]) -> list[dict]:
    """Read a record of one process and then records of several, of one model on one kind of GPU."""
    records = [run_records.read_record(path, "scaling") for path in paths]
    if len(records) < 2:
        raise UserError(f"{paths[0]} alone is no comparison: add a record of several processes")
    (first, *others), (first_path, *other_paths) = records, paths
    if first["world_size"] > 1:
        given = f"{first_path} is of {first['world_size']} processes and comes first"
        raise UserError(f"{given}: begin with the record of one")
    for path, other in zip(other_paths, others):
        if other["world_size"] == 1:
            given = f"{path} is of one process, as {first_path} is"
            raise UserError(f"{given}: after the first come records of several")
        for key in ("gpu", "model", "dtype"):
            ours, theirs = (each["environment"].get(key, each.get(key)) for each in (first, other))
            if ours != theirs:
                given = f"{key} {theirs} in {path}, not {ours} as in {first_path}"
                raise UserError(f"{given}: compare records that differ in their processes alone")
    return records


def measured(record: dict) -> dict[tuple[str, Size], dict]:
    """Return the rows that fitted, by way and size."""
    fitted = (row for row in record["rows"] if "failure" not in row)
    return {(row["way"], Size.of(row)): row for row in fitted}


def of_one_micro_batch(record: dict, way: str) -> list[dict]:
    """Return the rows of a way that fitted; several micro-batches send their gradients once."""
    rows = measured(record).items()
    return [row for (name, size), row in rows if name == way and size.accumulate == 1]


def exposed_share(row: dict) -> float | None:
    """Return the share of a step in exposed communication; None if it was not measured."""
    return row["exposed_us"] / 1e3 / row["median_ms"] if "exposed_us" in row else None


def efficiency(one: dict, row: dict) -> str:
    """Return a GPU's speed among several as a share of its speed alone, with both spreads."""
    low, high = one["p20_ms"] / row["p80_ms"], one["p80_ms"] / row["p20_ms"]
    return f"{100 * one['median_ms'] / row['median_ms']:.0f} % ({100 * low:.0f}–{100 * high:.0f})"


def ways_in(record: dict) -> list[str]:
    return list(dict.fromkeys(row["way"] for row in record["rows"]))


def crossover(record: dict, way: str) -> str:
    """Return the fewest tokens a step from which on no size exceeds EXPOSED_SHARE."""
    shares = [(Size.of(row).tokens, exposed_share(row)) for row in of_one_micro_batch(record, way)]
    if not shares or None in [share for _, share in shares]:
        return NOT_MEASURED
    above = [tokens for tokens, share in shares if share >= EXPOSED_SHARE]
    below = [tokens for tokens, _ in shares if tokens > max(above, default=0)]
    return f"{min(below):,}" if below else f"more than {max(above):,}"


def processes_of(record: dict) -> str:
    return f"{record['world_size']} processes, {record['parallel']}"


def reference(record: dict) -> str:
    """Return the way that the others are compared with: Liger where it was measured."""
    found = ways_in(record)
    return WAYS["liger"] if WAYS["liger"] in found else found[0]


def cells(row: dict, alone: dict, several: dict, beside: str) -> list[str]:
    """Return a row of the table, from the `measured` rows of one process and of several.

    `beside` names the way whose step the last column divides by this row's.
    """
    way, size = row["way"], Size.of(row)
    name = f"{way} {size}"
    one, other = alone.get((way, size)), several.get((beside, size))

    def pair(key: str, unit: float, spec: str) -> list[str]:
        of_both = (each[key] / unit if each and key in each else None for each in (row, one))
        return [tables.number(value, spec, NOT_MEASURED) for value in of_both]

    speeds = pair("tokens_per_second_per_gpu", 1, ",.0f")
    memory = pair("peak_memory_bytes", 1e9, ".1f")
    if "failure" in row:
        return [name, "too large", speeds[1], NOT_MEASURED, *memory, *[NOT_MEASURED] * 3]
    share, over = exposed_share(row), NOT_MEASURED
    exposed = NOT_MEASURED if share is None else f"{row['exposed_us'] / 1e3:,.1f}, {share:.0%}"
    if other:
        ratio = f"{other['median_ms'] / row['median_ms']:.2f}×"
        spreads = ((each["p20_ms"], each["p80_ms"]) for each in (row, other))
        over = "–" if way == beside else "same" if overlap(*spreads) else ratio
    return [
        name,
        *speeds,
        efficiency(one, row) if one else NOT_MEASURED,
        *memory,
        pair("communication_us", 1e3, ",.1f")[0],
        exposed,
        over,
    ]


def columns(record: dict) -> list[str]:
    """Return the headings of the record's table."""
    liger = WAYS["liger"]
    return [*HEADERS, f"over {liger if reference(record) == liger else 'first'}"]


def body(one: dict, record: dict) -> list[list[str]]:
    """Return the rows of a record of several processes, beside the record of one."""
    alone, several = measured(one), measured(record)
    return [cells(row, alone, several, reference(record)) for row in record["rows"]]


def render(one: dict, *others: dict) -> str:
    """Return everything that --compare prints."""
    on_gpu = one["environment"]["gpu"] is not None
    lines = [run_records.environment_line(one["environment"]), model_line(one)]
    lines += [f"Of one process: {sentence}" for sentence in one["absent"]]
    for record in others:
        title = f"Each GPU of {processes_of(record)}, and one alone"
        lines += [
            "",
            tables.title(title, on_gpu),
            tables.table(columns(record), body(one, record)),
            *communication_lines(record),
            *record["absent"],
            *(
                f"{way}: exposed below {EXPOSED_SHARE:.0%} of a step from so many tokens a GPU on: "
                f"{crossover(record, way)}"
                for way in ways_in(record)
            ),
        ]
    return "\n".join(lines)


def plot(records: list[dict], path: str) -> None:
    """Draw the exposed share of a step against its tokens, a line for each way of each record."""
    if not any("exposed_us" in row for record in records for row in record["rows"]):
        raise UserError("no record says what is exposed: measure them on several GPUs")
    figure, axis = tables.pyplot().subplots(figsize=(8, 5), layout="constrained")
    sizes = set()
    for record, style in zip(records, itertools.cycle(STYLES)):
        for way in ways_in(record):
            rows = [row for row in of_one_micro_batch(record, way) if "exposed_us" in row]
            points = sorted((Size.of(row).tokens, 100 * exposed_share(row)) for row in rows)
            sizes |= {tokens for tokens, _ in points}
            label = f"{way}, {processes_of(record)}"
            style_of_line = {"color": COLOURS[way], "linestyle": style, "marker": "o"}
            axis.plot(*zip(*points) if points else ([], []), label=label, **style_of_line)
    axis.axhline(100 * EXPOSED_SHARE, color="black", linestyle="--", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(sizes), [f"{tokens:,}" for tokens in sorted(sizes)])
    axis.set(xlabel="tokens of a step on each GPU", ylabel="communication that nothing hides, %")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
    first = records[0]
    gpu = first["environment"]["gpu"] or "CPU, not meaningful"
    figure.suptitle(f"{first['model']}, {first['dtype']}, {gpu}")
    tables.save_plot(figure, path)
