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
from harness.steps.power import joules_per_token

NOT_MEASURED = "n/a"
# what --ways calls them: their names; Liger comes last, as its patch stays in the process
WAYS = {"baseline": "baseline", "kernels": "all kernels", "fp8": IN_FP8, "liger": "Liger"}
WAY_COLOURS = dict(zip(WAYS.values(), ("#777777", "#D55E00", "#009E73", "#0072B2")))
STYLES = "-", "--", ":", "-."  # of the lines of a record
# what a row has of a profiled step, in microseconds; older records have the first two or none
IN_PROFILE = "communication_us", "exposed_us", "products_us", "copies_us", "busy_us"
CAUSES = "products", "copies", "exposed", "others", "gaps"


class StepSize(NamedTuple):
    """What a process takes in a step."""

    batch_size: int  # sequences of a micro-batch
    seq_len: int  # tokens of a sequence
    accumulate: int = 1  # micro-batches

    @classmethod
    def of(cls, row: dict) -> "StepSize":
        return cls(row["batch_size"], row["seq_len"], row.get("accumulate", 1))

    def as_record(self) -> dict:
        """Return what a row says of its size."""
        several = {"accumulate": self.accumulate} if self.accumulate > 1 else {}
        return {"batch_size": self.batch_size, "seq_len": self.seq_len, **several}

    @property
    def tokens(self) -> int:
        """Return the tokens of a step in each process."""
        return self.batch_size * self.seq_len * self.accumulate

    def __str__(self) -> str:
        several = f" × {self.accumulate}" if self.accumulate > 1 else ""
        return f"{self.batch_size} × {self.seq_len:,}{several}"


def row_in_words(row: dict, on_gpu: bool) -> str:
    """Return the line that is printed as soon as a row has been measured."""
    name = f"{row['way']}, {StepSize.of(row)}"
    if "failure" in row:
        return f"{name}: more than {row['failure']}"
    if not on_gpu:
        return f"{name}: fits"
    speed = f"{row['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU"
    return f"{name}: {row['median_ms']:,.1f} ms, {speed}, {row['peak_memory_bytes'] / 1e9:.1f} GB"


def read_scaling(paths: list[str]) -> list[dict]:
    """Read a record of one process and then records of several, of one model on one kind of GPU."""
    records = [run_records.read_record(path, "scaling") for path in paths]
    if len(records) < 2:
        raise UserError(f"{paths[0]} alone is no comparison: add a record of several processes")
    first = records[0]
    for path, record in zip(paths, records):
        if (record["world_size"] > 1) == (record is first):
            given = f"{path} is of {record['world_size']} processes"
            raise UserError(f"{given}: name a record of one first, and then those of several")
        for key in ("gpu", "model", "dtype"):
            ours, theirs = (r["environment"].get(key, r.get(key)) for r in (first, record))
            if ours != theirs:
                given = f"{key} {theirs} in {path}, not {ours} as in {paths[0]}"
                raise UserError(f"{given}: compare records that differ in their processes alone")
    return records


def fitting_rows(record: dict) -> dict[tuple[str, StepSize], dict]:
    """Return the rows that fitted, by way and size."""
    return {(row["way"], StepSize.of(row)): row for row in record["rows"] if "failure" not in row}


def of_one_micro_batch(record: dict, way: str) -> list[dict]:
    """Return the rows of a way that fitted; several micro-batches send their gradients once."""
    rows = fitting_rows(record).items()
    return [row for (name, size), row in rows if name == way and size.accumulate == 1]


def ways_in(record: dict) -> list[str]:
    return list(dict.fromkeys(row["way"] for row in record["rows"]))


def processes_of(record: dict) -> str:
    return f"{record['world_size']} processes, {record['parallel']}"


def exposed_share(row: dict) -> float | None:
    """Return the share of a step in exposed communication; None if it was not measured."""
    return row["exposed_us"] / 1e3 / row["median_ms"] if "exposed_us" in row else None


def crossover(record: dict, way: str) -> str:
    """Return the fewest tokens a step from which on no size exceeds EXPOSED_SHARE."""
    shares = [
        (StepSize.of(row).tokens, exposed_share(row)) for row in of_one_micro_batch(record, way)
    ]
    if not shares or None in [share for _, share in shares]:
        return NOT_MEASURED
    above = [tokens for tokens, share in shares if share >= EXPOSED_SHARE]
    below = [tokens for tokens, _ in shares if tokens > max(above, default=0)]
    return f"{min(below):,}" if below else f"more than {max(above):,}"


# ---------------------------------------------------------------- tables


def compared_way(record: dict) -> str:
    """Return the way that the others are compared with: Liger where it was measured."""
    found = ways_in(record)
    return WAYS["liger"] if WAYS["liger"] in found else found[0]


def headings(record: dict) -> list[str]:
    """Return the headings of the record's table."""
    over = "Liger" if compared_way(record) == WAYS["liger"] else "first"
    headers = ["way, tokens", "tokens/s", "of one", "efficiency", "GB", "of one", "sent"]
    return [*headers, "exposed", f"over {over}"]


def efficiency(one: dict | None, row: dict) -> str:
    """Return a GPU's speed among several as a share of its speed alone, with both spreads."""
    if one is None:
        return NOT_MEASURED
    low, high = one["p20_ms"] / row["p80_ms"], one["p80_ms"] / row["p20_ms"]
    return f"{100 * one['median_ms'] / row['median_ms']:.0f} % ({100 * low:.0f}–{100 * high:.0f})"


def cells(row: dict, one: dict | None, other: dict | None) -> list[str]:
    """Return a row of the table.

    Args:
        one: the row of one process that has the same way and size, if it fitted.
        other: the row of the way that the last column divides by this row's, if it fitted.
    """

    def pair(key: str, unit: float, spec: str) -> list[str]:
        of_both = (each[key] / unit if each and key in each else None for each in (row, one))
        return [tables.formatted(value, spec, NOT_MEASURED) for value in of_both]

    name = f"{row['way']} {StepSize.of(row)}"
    speeds = pair("tokens_per_second_per_gpu", 1, ",.0f")
    memory = pair("peak_memory_bytes", 1e9, ".1f")
    if "failure" in row:
        return [name, "too large", speeds[1], NOT_MEASURED, *memory, *[NOT_MEASURED] * 3]
    share = exposed_share(row)
    exposed = NOT_MEASURED if share is None else f"{row['exposed_us'] / 1e3:,.1f}, {share:.0%}"
    over = "–" if other is row else NOT_MEASURED
    if other and other is not row:
        spreads = ((each["p20_ms"], each["p80_ms"]) for each in (row, other))
        ratio = f"{other['median_ms'] / row['median_ms']:.2f}×"
        over = "same" if overlap(*spreads) else ratio
    sent, _ = pair("communication_us", 1e3, ",.1f")
    return [name, *speeds, efficiency(one, row), *memory, sent, exposed, over]


def body(one: dict, record: dict) -> list[list[str]]:
    """Return the rows of a record of several processes, beside the record of one."""
    alone, several, beside = fitting_rows(one), fitting_rows(record), compared_way(record)
    keys = [(row["way"], StepSize.of(row)) for row in record["rows"]]
    return [
        cells(row, alone.get((way, size)), several.get((beside, size)))
        for row, (way, size) in zip(record["rows"], keys)
    ]


def step_parts(row: dict) -> list[float | None]:
    """Return a step's median and its parts, by CAUSES, in ms; None for what was not measured."""
    if not row.keys() >= {*IN_PROFILE}:
        return [row.get("median_ms"), *[None] * len(CAUSES)]
    _, exposed, products, copies, busy = (row[key] / 1e3 for key in IN_PROFILE)
    others = busy - products - copies - exposed
    return [row["median_ms"], products, copies, exposed, others, row["median_ms"] - busy]


def lost_table(one: dict, *several: dict) -> tables.Table:
    """Return how many ms longer a step of several processes takes than that of one, and by cause.

    A row's causes add up to what is lost.  Rows of one way and size stand together.
    """
    alone, body = fitting_rows(one), {}
    for record, row in ((each, row) for each in several for row in each["rows"]):
        way, size = key = row["way"], StepSize.of(row)
        both = row, alone.get(key, {})
        lost = [None if None in ms else ms[0] - ms[1] for ms in zip(*map(step_parts, both))]
        mj = [joules and 1e3 * joules for joules in map(joules_per_token, both)]
        cells = f"{way} {size}", f"{record['world_size']}, {record['parallel']}"
        cells += *map(tables.formatted, lost), "{} ({})".format(*map(tables.formatted, mj))
        body.setdefault(key, []).append(cells)
    headers = ["way, tokens", "GPUs", "lost", *CAUSES, "mJ a token"]
    return tables.Table(headers, [*itertools.chain(*body.values())], keys=2)


def render(one: dict, *others: dict) -> str:
    """Return everything that --compare prints."""
    lines = [run_records.environment_line(one["environment"]), model_line(one)]
    if one["environment"]["gpu"] is None:
        return "\n".join([*lines, tables.not_shown("what scales is")])
    lines += [f"Of one process: {sentence}" for sentence in one["absent"]]
    for record in others:
        title = f"Each GPU of {processes_of(record)}, and one alone"
        lines += [
            "",
            tables.title(title),
            tables.table(headings(record), body(one, record)),
            *communication_lines(record),
            *record["absent"],
            *(
                f"{way}: exposed below {EXPOSED_SHARE:.0%} of a step from so many tokens a GPU on: "
                f"{crossover(record, way)}"
                for way in ways_in(record)
            ),
        ]
    lines += ["", tables.title("What several lose against one in a step, by cause, in ms")]
    return "\n".join([*lines, lost_table(one, *others).text()])


# ---------------------------------------------------------------- picture


def plot(records: list[dict], path: str) -> None:
    """Draw the exposed share of a step against its tokens, a line for each way of each record."""
    if not any("exposed_us" in row for record in records for row in record["rows"]):
        raise UserError("no record says what is exposed: measure them on several GPUs")
    figure, axis = tables.pyplot().subplots(figsize=(8, 5), layout="constrained")
    sizes = set()
    for record, style in zip(records, itertools.cycle(STYLES)):
        for way in ways_in(record):
            rows = [row for row in of_one_micro_batch(record, way) if "exposed_us" in row]
            points = sorted((StepSize.of(row).tokens, 100 * exposed_share(row)) for row in rows)
            sizes |= {tokens for tokens, _ in points}
            label = f"{way}, {processes_of(record)}"
            style_of_line = {"color": WAY_COLOURS[way], "linestyle": style, "marker": "o"}
            axis.plot(*zip(*points) if points else ([], []), label=label, **style_of_line)
    axis.axhline(100 * EXPOSED_SHARE, color="black", linestyle="--", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(sizes), [f"{tokens:,}" for tokens in sorted(sizes)])
    axis.set(xlabel="tokens of a step on each GPU", ylabel="communication that nothing hides, %")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
    first = records[0]
    figure.suptitle(f"{first['model']}, {first['dtype']}, {first['environment']['gpu']}")
    tables.save_plot(figure, path)
