"""The line below a block or table of a page: where its figures come from.

> [H200, torch 2.11.0, triton 3.6.0, commit](record) and N others: `command that makes them again`
"""

import textwrap
from collections.abc import Iterable
from pathlib import Path

from tools.make_records import COMMANDS, RUNS
from tools.page_records import COLUMNS, load, short_gpu

# Their programs have left: results/log.md names the commit that holds each.
ANSWERED = "fp8_costs", "fp8_inputs_4x2048", "trace_fsdp_4x2048", "weight_values"
ANSWERED += ("weight_values_fp8",)
SINGLY = 2  # more records are made again by the names of their groups


def machine(environment: dict) -> str:
    """Return the GPU and the versions of a record, in short."""
    gpu = short_gpu(environment["gpu"]) if environment["gpu"] else "CPU"
    versions = (f"{name} {environment[name].partition('+')[0]}" for name in ("torch", "triton"))
    return ", ".join([gpu, *versions])


def short_commit(environment: dict) -> str:
    """Return the commit of a record, with "+" if files differed from it."""
    commit = environment["commit"]
    return commit[:7] + "+" * commit.endswith("+")


def command(names: list[str]) -> str:
    """Return what makes these records again, and others of their groups where they are many."""
    groups = [group for group, runs in RUNS.items() if runs.keys() & {*names}]
    return " ".join(["python -m tools.make_records", *(groups if len(names) > SINGLY else names)])


def source(names: Iterable[str], page: Path) -> str:
    """Return the line for what was computed from these records; "" if there is none to give.

    There is none without records, and for records that neither `tools.make_records` nor ANSWERED
    knows.
    """
    names = list(names)
    if not names or not COMMANDS.keys() | {*ANSWERED} >= {*names}:
        return ""
    made = [load(name)["environment"] for name in names]
    facts = "; ".join(dict.fromkeys(map(machine, made))), *dict.fromkeys(map(short_commit, made))
    place = "results" if page.name == "README.md" else "../results"
    others = f" and {len(names) - 1} more" if names[1:] else ""
    words = f"[{', '.join(facts)}]({place}/{names[0]}.json){others}:"
    runs = [name for name in names if name not in ANSWERED]
    again = f"`{command(runs)}`" if runs else f"[the log]({place}/log.md) has the program's commit"
    *lines, last = textwrap.wrap(words, COLUMNS - 2)
    fits = len(f"> {last} {again}") <= COLUMNS
    lines += [f"{last} {again}"] if fits else [last, again]
    return "\n".join(f"> {line}" for line in lines)
