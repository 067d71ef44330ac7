"""What limits each part of a profiled step, what to do about it, and what that should gain.

A GPU does two things, and has a ceiling for each.  Both are measured in the run, not taken from a
data sheet:

    copy rate       bytes that it moves between its memory and its multiprocessors, per second
    matmul rate     FLOPs, additions and multiplications, per second, in a large matrix product;
                    with --fp8 one more, of a product of FP8

Where the two meet, at matmul rate / copy rate FLOPs per byte, the roof of the *roofline* has its
edge.  An operation that does fewer FLOPs per byte (its *intensity*) cannot be faster than its bytes
allow, one that does more not faster than its FLOPs.  So the verdict on a part of the step is one of
six:

    bandwidth-bound        its bytes take longer than its FLOPs, both at their ceilings
    compute-bound          its FLOPs take longer
    launch-bound           its kernels are shorter than the time in which the host gets the next one
                           ready
    host-synchronization   the host waited for the GPU, so nothing was queued, and then the GPU
                           waited for the host
    loader-bound           the batch was not there, and both waited for it
    communication-bound    several GPUs exchanged weights or gradients, and meanwhile computed
                           nothing

Two counts of bytes:

    moved        what the operations read and write as they are, from the shapes that the profiler
                 recorded
    necessary    what one fused kernel would still have to read and write (its floor in
                 kernel_facts.py), from the model's configuration

How fast a part runs is told by what it moved.  What could be gained is told by what was necessary:
an operation at 100 % of the copy rate that need not exist is a cost all the same.  A good kernel
reaches TARGET of a ceiling, so

    gain = time - time of the necessary work at TARGET of its ceiling

and a step of which a part becomes faster gains no more than that part (Amdahl's law).
"""

from dataclasses import dataclass

from harness.profiling.kernel_facts import (
    ADAPTERS,
    COMMUNICATION,
    DEQUANTIZATION,
    FACTS,
    FP8_CASTS,
    ROWS,
    RUNGS,
    Sizes,
)

TARGET = 0.9  # of a ceiling
# of the step: below it, short kernels wait in the GPU's queue, not for the host; and no batch was
# waited for
IDLE_SHARE = 0.02
CPU_LOADING_SHARE = 0.25  # the same of a batch without a GPU, where none is fetched during a step
LEAST_SHARE = 0.001  # of the step: a smaller gain is not worth a line
TOP = 12
CUDA_GRAPH = "finetune_optimized.py --kernels all --cuda-graph"
LAUNCHES, SYNCHRONIZATION = "GPU idle: launches", "GPU idle: synchronization"
LOADING = "Waiting for data"
EXPOSED_SHARE = 0.05  # of the step: less communication that nothing hides is no verdict
EXPOSED = "Communication, exposed"
MORE_TO_HIDE_IN = (
    "more tokens a step (--batch-size, --seq-len), accumulation without synchronisation, "
    "or larger shards"
)
RUNG_OF_CATEGORY = {rung.category: rung for rung in RUNGS if rung.category}
ADVICE = {  # where there is no kernel of ours
    "matmul": "larger products (--batch-size, --seq-len); the kernels are cuBLAS's",
    "attention": "no kernel of ours; PyTorch chooses cuDNN's or flash attention",
    ADAPTERS: "thin products: more tokens each (--batch-size, --seq-len), fewer --lora-targets",
    DEQUANTIZATION: "as long for any number of tokens: more in a step (--batch-size, --seq-len)",
    FP8_CASTS: "those of weights take as long for any number of tokens: more in a step",
}


@dataclass(frozen=True)
class Finding:
    """One part of the step, or the GPU's idle time, and its ceilings; times in microseconds."""

    name: str
    us: float
    n_bytes: float  # moved
    flops: float
    bytes_us: float  # at the copy rate
    flops_us: float  # at the matmul rate
    necessary: float | None  # bytes, where a kernel of ours could take its place
    target_us: float  # what is necessary, at TARGET of the ceiling
    verdict: str
    advice: str = ""

    @property
    def share(self) -> float:
        """Of its ceiling."""
        return max(self.bytes_us, self.flops_us) / self.us

    @property
    def needed(self) -> float:
        """Bytes."""
        return self.n_bytes if self.necessary is None else self.necessary

    @property
    def gain_us(self) -> float:
        return max(0.0, self.us - self.target_us)


def advice_for(category: str, record: dict) -> str:
    """What to do about a category: a flag of this project, where there is one."""
    rung = RUNG_OF_CATEGORY.get(category)
    if rung is None:
        others = [row for row in ROWS if row.name not in record["kernels"]]
        eased = (row.advice[category] for row in others if category in row.advice)
        return next(eased, ADVICE.get(category, "look them up in the trace"))
    if rung.name not in record["kernels"]:
        return f"--kernels {rung.name}"
    return f"its kernel is on; benchmark_kernels.py --kernel {rung.name}"


def idle_us(record: dict) -> float:
    """How long the GPU waits for the host: what was recorded, as far as the step has room for it.

    Where the GPU waits, recording makes the host slower and the waiting longer.
    """
    room = max(0.0, 1e3 * record["median_step_ms"] - record["busy_us"])
    return min(record["timeline"]["idle_us"], room)


def host_us(record: dict) -> float:
    """The host's time from launch to launch where the GPU waits, in a step that nothing records."""
    timeline = record["timeline"]
    return timeline["host_us"] * min(1.0, record["median_step_ms"] / timeline["step_ms"])


def waits(record: dict) -> bool:
    """Does the GPU wait for the host for a share of the step that is worth a word?"""
    if record["timeline"] is None:
        return False
    return idle_us(record) > IDLE_SHARE * 1e3 * record["median_step_ms"]


def step_ms(record: dict) -> float:
    """Of a step, with the waiting for its batch where that has been measured."""
    return record["median_step_ms"] + record.get("loading", {}).get("waited_ms", 0.0)


def waits_for_data(record: dict) -> bool:
    """Does the step wait for its batch for a share of it that is worth a word?"""
    waited_ms = record.get("loading", {}).get("waited_ms", 0.0)
    share = IDLE_SHARE if record["device"] == "CUDA" else CPU_LOADING_SHARE
    return waited_ms > share * step_ms(record)


def loads_too_slowly(record: dict) -> bool:
    """Is the loader slower than the step, so that working ahead would not be enough?"""
    return record["loading"]["alone_ms"] > record["median_step_ms"]


def waits_in_words(record: dict) -> str:
    """In which operations the host waits for the GPU: "2 x aten::item (forward)"."""
    found = record.get("host_waits", [])
    return ", ".join(f"{each['calls']:,} x {each['name']} ({each['phase']})" for each in found)


def flops_at_ceilings_us(flops: float, fp8_flops: float, ceilings: dict) -> float:
    """What FLOPs take at the matmul rate; those of FP8 among them at FP8's, if it was measured."""
    matmul = ceilings["matmul_tflops"]
    fp8 = ceilings.get("fp8_tflops", matmul)
    return (flops - fp8_flops) / (1e6 * matmul) + fp8_flops / (1e6 * fp8)


def judge(name: str, part: dict, record: dict, category: str | None = None) -> Finding:
    """The verdict on a row of the profile; `category` where that is what the row is.

    Args:
        part: the row's us, launches, bytes and flops.
    """
    ceilings, us = record["ceilings"], part["us"]
    per_us = 1e3 * ceilings["copy_gbs"]  # bytes
    bytes_us, in_fp8 = part["bytes"] / per_us, part.get("fp8_flops", 0.0)  # older records: none
    flops_us = flops_at_ceilings_us(part["flops"], in_fp8, ceilings)
    rung = RUNG_OF_CATEGORY.get(category)
    necessary = rung.floor_bytes(Sizes(**record["sizes"])) if rung else None
    needed_us = bytes_us if necessary is None else necessary / per_us
    verdict = "compute-bound" if flops_us > bytes_us else "bandwidth-bound"
    if waits(record) and us / part["launches"] < host_us(record):
        verdict = "launch-bound"
    return Finding(
        name,
        us,
        n_bytes=part["bytes"],
        flops=part["flops"],
        bytes_us=bytes_us,
        flops_us=flops_us,
        necessary=necessary,
        target_us=max(needed_us, flops_us) / TARGET,
        verdict=verdict,
        advice=advice_for(category, record) if category else "",
    )


def replaced_by(kernels: list[str]) -> set[str]:
    """The categories that these kernels take over."""
    return set().union(*(FACTS[name].replaces for name in kernels))


def counted(record: dict) -> dict[str, dict]:
    """The categories whose bytes are known: not those of kernels that Triton's interpreter ran.

    Nor the communication's, which has another ceiling.
    """
    interpreted = replaced_by(record["kernels"]) | {FP8_CASTS}
    unknown = interpreted if record["device"] == "CPU" else set()
    unknown |= {COMMUNICATION}
    parts = record["categories"].items()
    return {name: part for name, part in parts if part["bytes"] and name not in unknown}


def judge_categories(record: dict) -> dict[str, Finding]:
    return {name: judge(name, part, record, name) for name, part in counted(record).items()}


def judge_operations(record: dict) -> list[Finding]:
    """The TOP operations of which the bytes are known, longest first."""
    known = [row for row in record["operations"] if row["bytes"]]
    return [judge(row["name"], row, record) for row in known[:TOP]]


def judge_idle(record: dict) -> dict[str, Finding]:
    """The two ways in which the GPU waits for the host; all of it could go."""
    timeline = record["timeline"]
    if timeline is None or not timeline["idle_us"]:
        return {}
    waited_us = idle_us(record) * timeline["synchronization_us"] / timeline["idle_us"]
    causes = [
        (LAUNCHES, "launch-bound", idle_us(record) - waited_us, CUDA_GRAPH),
        (SYNCHRONIZATION, "host-synchronization", waited_us, without_waits(record)),
    ]
    return {name: pure_loss(name, *cause) for name, *cause in causes if cause[1] > 0}


def without_waits(record: dict) -> str:
    waits = waits_in_words(record)
    return f"after the step, not in it: {waits}" if waits else "no .item() or .cpu() in the step"


def judge_loading(record: dict) -> dict[str, Finding]:
    """The time in which host and device wait for the next batch; all of it could go."""
    if not waits_for_data(record):
        return {}
    ahead = "let a worker build the next batch during the step"
    advice = "a faster loader: tokenize once, more workers" if loads_too_slowly(record) else ahead
    waited_us = 1e3 * record["loading"]["waited_ms"]
    return {LOADING: pure_loss(LOADING, "loader-bound", waited_us, advice)}


def exposed_us(record: dict) -> float:
    """Communication that no other kernel hides; 0 of one process, and in older records."""
    return (record["timeline"] or {}).get("exposed_us", 0.0)


def judge_communication(record: dict) -> dict[str, Finding]:
    """The communication that nothing hides, where that is a share of the step worth a word."""
    if exposed_us(record) <= EXPOSED_SHARE * 1e3 * record["median_step_ms"]:
        return {}
    loss = pure_loss(EXPOSED, "communication-bound", exposed_us(record), MORE_TO_HIDE_IN)
    return {EXPOSED: loss}


def pure_loss(name: str, verdict: str, us: float, advice: str) -> Finding:
    """Time in which nothing is moved or computed."""
    return Finding(name, us, 0.0, 0.0, 0.0, 0.0, None, 0.0, verdict, advice)


def ranking(record: dict) -> list[Finding]:
    """What could be gained, the most first."""
    findings = [*judge_categories(record).values(), *judge_idle(record).values()]
    findings += [*judge_loading(record).values(), *judge_communication(record).values()]
    least_us = LEAST_SHARE * 1e3 * step_ms(record)
    return sorted((f for f in findings if f.gain_us > least_us), key=lambda f: -f.gain_us)
