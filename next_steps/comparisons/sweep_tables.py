"""What the sweep prints: every setting of a launch with its time, and advice for the file."""

from harness.benchmark.benchmark_tables import share_in_words
from harness.cli.tables import Table, formatted, title
from harness.records.run_records import ceilings_card
from harness.steps.gpus import best_copy_gbs

Setting = dict[str, int]  # some of KNOBS
KNOBS = {
    "num_warps": "groups of 32 threads per program",
    "STAGES": "rows in flight per program, one computed and the others being loaded",
    "TILE_ROWS": "a step of the loop takes TILE_ROWS x TILE_COLS logits",
    "TILE_COLS": "a thread has TILE_COLS / (32 x num_warps) of these columns",
    "n_programs": "how many share the rows; given in multiples of the GPU's multiprocessors",
}
WORTH_A_CHANGE = 1.02  # below that it may be noise


def words(setting: Setting) -> str:
    return ", ".join(f"{knob} = {value}" for knob, value in setting.items())


def programs(n_programs: int, section: dict) -> str:
    """Return the number of programs, and its origin in brackets."""
    if n_programs == section["rows"]:
        return f"{n_programs:,} (rows)"
    per_processor, rest = divmod(n_programs, section["processors"])
    multiple = "" if rest else f" ({per_processor} x {section['processors']})"
    return f"{n_programs:,}{multiple}"


def advice(section: dict) -> str:
    """Say what to set in the file, or to keep it."""
    timed = [row for row in section["tried"] if row["us"] is not None]
    shipped = next(row for row in section["tried"] if row["setting"] == section["shipped"])
    best = min(timed, key=lambda row: row["us"])
    said = (
        f"The file carries {words(shipped['setting'])} ({shipped['us']:,.1f} us), "
        f"the fastest here is {words(best['setting'])} ({best['us']:,.1f} us): "
    )
    if shipped["us"] <= WORTH_A_CHANGE * best["us"]:
        return said + "keep."
    other = best["setting"].items() - shipped["setting"].items()
    changes = [f"`{knob} = {v}`" for knob, v in best["setting"].items() if (knob, v) in other]
    return said + f"set {', '.join(changes)} in {section['file']} for this GPU and size."


def gbs_of(section: dict, row: dict) -> float | None:
    """Return the GB/s that a launch reached with a setting; None if it has no time."""
    return row["us"] and section["bytes"] / row["us"] / 1e3


def copy_ceiling(record: dict) -> float:
    """Return the best of the measured copy rate and of the launches' rates, GB/s."""
    reached = [gbs_of(section, row) for section in record["sections"] for row in section["tried"]]
    return best_copy_gbs(record["copy_gbs"], filter(None, reached), record["environment"]["gpu"])


def setting_row(ceiling: float, section: dict, row: dict) -> list[str]:
    share = share_in_words(gbs_of(section, row), ceiling, ".0%").removesuffix("%")
    cells = [
        programs(value, section) if knob == "n_programs" else value
        for knob, value in row["setting"].items()
    ]
    resources = [formatted(row[key], "d") for key in ("registers", "spills")]
    note = row["fault"] or ("<- in file" if row["setting"] == section["shipped"] else "")
    return [*cells, formatted(row["us"]), share, *resources, note]


def section_table(record: dict, section: dict) -> str:
    """Return all settings of one launch, the fastest first, those without a time last.

    Without a GPU the order is that of the trials, and only results that are wrong are told.
    """
    on_gpu = record["environment"]["gpu"] is not None
    size = f"{section['rows']:,} x {section['size']:,}, {record['dtype']}"
    knobs = list(section["shipped"])
    tried = section["tried"]
    fastest_first = sorted(tried, key=lambda row: (row["us"] is None, row["us"]))
    ceiling = copy_ceiling(record)
    body = [setting_row(ceiling, section, row) for row in (fastest_first if on_gpu else tried)]
    headers = [*knobs, "us", "% of copy", "Registers", "Spilled", ""]
    align = ["right"] * (len(headers) - 1) + ["left"]
    whole = Table(headers, body, align, keys=len(knobs))
    lines = [title(f"Sweep: {section['launch']}, {size}")]
    lines += [f"{knob}: {KNOBS[knob]}" for knob in knobs]
    if not on_gpu:
        untimed = Table(*whole.columns([*range(len(knobs)), len(headers) - 1]))
        return "\n".join([*lines, "", untimed.text()])
    clock = "us: median of one launcher's call, host included"
    moved = f"{section['bytes'] / 1e6:,.0f} MB over that time, of the copy rate"
    lines += [f"{clock}; % of copy: {moved}", "", whole.text(), "", advice(section)]
    return "\n".join(lines)


def render_sweep(record: dict) -> str:
    """Return everything that a sweep prints about its measurements."""
    env = record["environment"]
    blocks = [ceilings_card(env, copy_ceiling(record), record["matmul_tflops"])]
    blocks += [section_table(record, section) for section in record["sections"]]
    return "\n\n".join(blocks)
