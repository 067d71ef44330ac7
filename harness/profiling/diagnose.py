"""What limits each part of a profiled step, what to do about it, and what that should gain.

There are two ceilings, the copy rate and the matmul rate (ceilings.py).  The verdict on a part of
the step is one of six: bandwidth-, compute-, launch-, loader- or communication-bound, or
host-synchronization.  docs/diagnosis.md explains ceilings and verdicts.

There are two counts of bytes.  The bytes *moved*, from the shapes that the profiler recorded, tell
how fast a part runs.  The *necessary* bytes, which one fused kernel would still move (its floor in
kernel_facts.py), tell what could be gained.  A good kernel reaches TARGET of a ceiling, so

    gain = time - time of the necessary work at TARGET of its ceiling

and the step gains no more than its part does (Amdahl's law).
"""

from dataclasses import dataclass, fields

from harness.cli import flags
from harness.cli.workload import Workload
from harness.profiling import kernel_facts
from harness.profiling.ceilings import ceilings_of, flops_at_ceilings_us
from harness.profiling.kernel_facts import (
    ADAPTERS,
    DEQUANTIZATION,
    FP8_CASTS,
    KERNEL_ROWS,
    RUNGS,
    Sizes,
)
from harness.records.spread import spread, timed

TARGET = 0.9  # of a ceiling
# share of the step: with less idle time short kernels wait in the GPU's queue, not for the host
IDLE_SHARE = 0.02
LEAST_SHARE = 0.001  # of the step: a smaller gain gets no line
MOST_VERDICTS = 12
CUDA_GRAPH = "finetune_optimized.py --kernels all --cuda-graph"
MORE_TOKENS = "more tokens a step (--batch-size, --seq-len)"
GRAPH_SHARE = 0.05  # of the step: if the GPU waits less in a training run, no graph is advised
EXPOSED_SHARE = 0.05  # of the step: less exposed communication gets no verdict
MORE_TO_HIDE_IN = f"{MORE_TOKENS}, larger shards"
RUNG_OF_CATEGORY = {rung.category: rung for rung in RUNGS if rung.category}
ADVICE = {  # for categories without a kernel of ours
    "matmul": "larger products (--batch-size, --seq-len); no kernel of ours",
    "attention": "no kernel of ours; PyTorch chooses cuDNN's or flash attention",
    ADAPTERS: "thin products: more tokens a step, or fewer --lora-targets",
    DEQUANTIZATION: "as long for any number of tokens: more in a step (--batch-size, --seq-len)",
    FP8_CASTS: "those of weights take as long for any number of tokens: more in a step",
}


@dataclass(frozen=True)
class Finding:
    """A part of the step and its ceilings, or a loss; times in microseconds.

    In a loss, such as the GPU's idle time, nothing is moved or computed: all of it could go.
    """

    name: str
    us: float
    verdict: str
    advice: str
    n_bytes: float = 0.0  # moved
    flops: float = 0.0
    bytes_us: float = 0.0  # at the copy rate
    flops_us: float = 0.0  # at the matmul rate
    necessary: float | None = None  # bytes; None if no kernel of ours could take its place
    target_us: float = 0.0  # time of the necessary work, at TARGET of the ceiling

    @property
    def share(self) -> float | None:
        """Share of the ceiling that the part reaches; None if its bytes come from the cache.

        Then they come faster than any that came from the memory.
        """
        return None if self.bytes_us > self.us else max(self.bytes_us, self.flops_us) / self.us

    @property
    def needed(self) -> float:
        """Necessary bytes, as far as they are known."""
        return self.n_bytes if self.necessary is None else self.necessary

    @property
    def gain_us(self) -> float:
        return max(0.0, self.us - self.target_us)


def advice_for(category: str, record: dict) -> str:
    """Return what to do about a category: a flag of this project, if there is one."""
    rung = RUNG_OF_CATEGORY.get(category)
    if rung is None:
        others = [row for row in KERNEL_ROWS if row.name not in record["kernels"]]
        eased = (row.advice[category] for row in others if category in row.advice)
        return next(eased, ADVICE.get(category, "look them up in the trace"))
    if rung.name not in record["kernels"]:
        return f"--kernels {rung.name}"
    return f"its kernel is on; benchmark_kernels.py --kernel {rung.name}"


def idle_us(record: dict) -> float:
    """Return how long the GPU waits for the host; without the waiting that recording adds."""
    room = max(0.0, 1e3 * record["median_step_ms"] - record["busy_us"])
    return min(record["timeline"]["idle_us"], room)


def host_us(record: dict) -> float:
    """Return the host's time from launch to launch where the GPU waits, without the recording."""
    timeline = record["timeline"]
    return timeline["host_us"] * min(1.0, record["median_step_ms"] / timeline["step_ms"])


def waits(record: dict) -> bool:
    """Return True if the GPU waits for the host longer than IDLE_SHARE of the step."""
    recorded = record["timeline"] is not None
    return recorded and idle_us(record) > IDLE_SHARE * 1e3 * record["median_step_ms"]


def can_be_a_graph(record: dict) -> bool:
    """Return True if the rules of flags.py let the run have --cuda-graph, and it does not yet."""
    settings = {each.name: record.get(each.name) for each in fields(Workload)}
    return flags.can_add("--cuda-graph", settings)


def saved_by_a_graph_ms(record: dict) -> float:
    """Return how many ms --cuda-graph would save of a training run's median step at most.

    The GPU does not compute then.  0 if the time is unknown, or small beside step or spread.
    """
    if record.get("busy_ms") is None or not can_be_a_graph(record):
        return 0.0
    low, high = spread(timed(record))
    saved_ms = 1e3 * record["median_seconds"] - record["busy_ms"]
    least_ms = 1e3 * max(GRAPH_SHARE * record["median_seconds"], high - low)
    return saved_ms if saved_ms > least_ms else 0.0


def step_ms(record: dict) -> float:
    """Return a step's time, with the waiting for its batch if that was measured."""
    return record["median_step_ms"] + record.get("loading", {}).get("waited_ms", 0.0)


def parts_ms(record: dict) -> float:
    """Return the time of the step that the profile's parts add up to, waiting for its batch too."""
    ran_ms = max(record["median_step_ms"], record["busy_us"] / 1e3)
    return ran_ms + step_ms(record) - record["median_step_ms"]


def waits_for_data(record: dict) -> bool:
    """Return True if the step waits for its batch for a large enough share of the step."""
    waited_ms = record.get("loading", {}).get("waited_ms", 0.0)
    return waited_ms > IDLE_SHARE * step_ms(record)


def loads_too_slowly(record: dict) -> bool:
    """Return True if the loader is slower than the step, so that working ahead is not enough."""
    return record["loading"]["alone_ms"] > record["median_step_ms"]


def waits_in_words(record: dict) -> str:
    """Return the operations in which the host waits for the GPU: "2 x aten::item (forward)"."""
    found = record.get("host_waits", [])
    return ", ".join(f"{each['calls']:,} x {each['name']} ({each['phase']})" for each in found)


def judge(
    name: str, part: dict, record: dict, rates: dict[str, float], category: str | None = None
) -> Finding:
    """Return the verdict on a row of the profile, by the ceilings' rates.

    category: the row's name if it is a category.
    """
    us, per_us = part["us"], 1e3 * rates["copy_gbs"]  # bytes
    bytes_us, in_fp8 = part["bytes"] / per_us, part.get("fp8_flops", 0.0)  # not in older records
    flops_us = flops_at_ceilings_us(part["flops"], in_fp8, rates)
    rung = RUNG_OF_CATEGORY.get(category)
    necessary = rung.floor_bytes(Sizes(**record["sizes"])) if rung else None
    needed_us = bytes_us if necessary is None else necessary / per_us
    verdict = "compute-bound" if flops_us > bytes_us else "bandwidth-bound"
    if waits(record) and us / part["launches"] < host_us(record):
        verdict = "launch-bound"
    return Finding(
        name,
        us,
        verdict,
        advice=advice_for(category, record) if category else "",
        n_bytes=part["bytes"],
        flops=part["flops"],
        bytes_us=bytes_us,
        flops_us=flops_us,
        necessary=necessary,
        target_us=max(needed_us, flops_us) / TARGET,
    )


def replaced_by(kernels: list[str]) -> set[str]:
    """Return the categories that these kernels take over."""
    return set().union(*(kernel_facts.FACTS_BY_NAME[name].replaces for name in kernels))


def counted(record: dict) -> dict[str, dict]:
    """Return the categories whose bytes are known.

    The bytes of kernels that Triton's interpreter ran are not.  Communication has another ceiling.
    """
    interpreted = replaced_by(record["kernels"]) | {FP8_CASTS}
    unknown = {kernel_facts.COMMUNICATION} | (interpreted if record["device"] == "CPU" else set())
    parts = record["categories"].items()
    return {name: part for name, part in parts if part["bytes"] and name not in unknown}


def judge_categories(record: dict, *others: dict) -> dict[str, Finding]:
    """Return verdicts on the categories; `others`: profiles whose ceilings these share."""
    rates = ceilings_of(record, *others).rates
    return {name: judge(name, part, record, rates, name) for name, part in counted(record).items()}


def judge_operations(record: dict) -> list[Finding]:
    """Return verdicts on the MOST_VERDICTS operations with known bytes, the longest first."""
    known, rates = [row for row in record["operations"] if row["bytes"]], ceilings_of(record).rates
    return [judge(row["name"], row, record, rates) for row in known[:MOST_VERDICTS]]


def exposed_us(record: dict) -> float:
    """Return the communication that no other kernel hides; 0 in one process and older records."""
    return (record["timeline"] or {}).get("exposed_us", 0.0)


def losses(record: dict) -> list[Finding]:
    """Return the time in which the GPU waits for the host, for a batch or for other processes."""
    found = []
    timeline = record["timeline"]
    if timeline and timeline["idle_us"]:
        waited_us = idle_us(record) * timeline["synchronization_us"] / timeline["idle_us"]
        names, nothing = waits_in_words(record), "no .item() or .cpu() in the step"
        later = f"after the step, not in it: {names}" if names else nothing
        fewer = CUDA_GRAPH if can_be_a_graph(record) else MORE_TOKENS
        found.append(
            Finding("GPU idle: launches", idle_us(record) - waited_us, "launch-bound", fewer)
        )
        found.append(Finding("GPU idle: synchronization", waited_us, "host-synchronization", later))
    if waits_for_data(record):
        ahead = "let a worker build the next batch during the step"
        faster = "a faster loader: tokenize once, more workers"
        waited_us = 1e3 * record["loading"]["waited_ms"]
        advice = faster if loads_too_slowly(record) else ahead
        found.append(Finding("Waiting for data", waited_us, "loader-bound", advice))
    if exposed_us(record) > EXPOSED_SHARE * 1e3 * record["median_step_ms"]:
        name, verdict = "Communication, exposed", "communication-bound"
        found.append(Finding(name, exposed_us(record), verdict, MORE_TO_HIDE_IN))
    return found


def ranking(record: dict) -> list[Finding]:
    """Return the findings with something to gain, the largest gain first."""
    findings = [*judge_categories(record).values(), *losses(record)]
    least_us = LEAST_SHARE * 1e3 * parts_ms(record)
    return sorted((f for f in findings if f.gain_us > least_us), key=lambda f: -f.gain_us)
