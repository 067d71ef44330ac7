"""The frontier's rows: which are dominated, what does not fit, and that all of them are tried."""

import json

from harness.cli.workload import Workload
from harness.profiling.kernel_facts import KERNELS
from next_steps.studies import frontier
from tests.small_workloads import MADE_UP


def row(level, gb=None, ms=None, kernels="baseline", size="1 x 8,192") -> dict:
    found = {"size": size, "kernels": kernels, "recompute": level}
    found |= {"estimated_bytes": 10e9, "estimated_ms": 100.0}
    if gb is None:
        return found | {"failure": "the GPU's memory"}
    return found | {"peak_memory_bytes": gb * 1e9, "step_ms": ms}


def test_a_row_is_dominated_by_less_memory_and_less_time_of_the_same_step():
    rows = [
        row("none", 90, 100),
        row("mlp", 80, 110),
        row("layer", 70, 105),
        row("layer", 60, 90, size="4 x 2,048"),
    ]
    assert [frontier.better_in_both(each, rows) for each in rows] == ["", "baseline, layer", "", ""]
    rows.append(row("mlp", 50, 80, "all kernels"))
    assert frontier.better_in_both(rows[0], rows) == "all kernels, mlp"


def test_what_does_not_fit_has_its_estimate_alone(tmp_path):
    rows = [row("none"), row("mlp", 80, 110)]
    record = {
        "kind": "frontier", "environment": MADE_UP, "model": "tiny", "weights": "random weights",
        "dtype": "bf16", "kernels": [], "parameters": 1, "rows": rows,
    }  # fmt: skip
    (line,) = (line for line in frontier.render(record).splitlines() if " none " in line)
    assert line.count("n/a") == 2 and "more than the GPU's memory" in line and "10.0" in line
    frontier.plot(json.loads(json.dumps(record)), str(tmp_path / "frontier.png"))
    assert (tmp_path / "frontier.png").stat().st_size > 0


def test_all_rows_are_tried_those_of_a_kernel_set_in_a_row():
    sets = Workload(), Workload(kernels=tuple(KERNELS))
    ways = [way for each in sets for way in frontier.ways_of(each, on_gpu=True)]
    rows = [frontier.labels(way) for way in ways]
    assert len(rows) == 30 and len({tuple(row.values()) for row in rows}) == 30
    assert [row["kernels"] for row in rows] == ["baseline"] * 15 + ["all kernels"] * 15
    assert {row["size"] for row in rows} == {"1 x 8,192", "4 x 2,048", "8 x (1 x 8,192)"}
