"""What limits each part of a profiled step, what to do about it, and what that should gain.

A GPU does two things, and has a ceiling for each.  Both are measured in the run, not taken from a data sheet:

    copy rate       bytes that it moves between its memory and its multiprocessors, per second
    matmul rate     FLOPs, additions and multiplications, per second, in a large matrix product

Where the two meet, at matmul rate / copy rate FLOPs per byte, the roof of the *roofline* has its edge.  An operation
that does fewer FLOPs per byte (its *intensity*) cannot be faster than its bytes allow, one that does more not faster
than its FLOPs.  So the verdict on a part of the step is one of four:

    bandwidth-bound        its bytes take longer than its FLOPs, both at their ceilings
    compute-bound          its FLOPs take longer
    launch-bound           its kernels are shorter than the time in which the host gets the next one ready
    host-synchronization   the host waited for the GPU, so nothing was queued, and then the GPU waited for the host

Two counts of bytes:

    moved        what the operations read and write as they are, from the shapes that the profiler recorded
    necessary    what one fused kernel would still have to read and write (RUNGS), from the model's configuration

How fast a part runs is told by what it moved.  What could be gained is told by what was necessary: an operation at
100 % of the copy rate that need not exist is a cost all the same.  A good kernel reaches TARGET of a ceiling, so

    gain = time - time of the necessary work at TARGET of its ceiling

and a step of which a part becomes faster gains no more than that part (Amdahl's law).
"""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from harness import architecture, pictures, run_records, tables
from harness.command_line import UserError
from harness.workload import model_line

TARGET = 0.9  # of a ceiling
IDLE_SHARE = 0.02  # of the step: below it, short kernels wait in the GPU's queue and not for the host
LEAST_SHARE = 0.001  # of the step: a smaller gain is not worth a line
TOP = 12
NAMED = 6  # operations that came or went
OTHER = "other elementwise and copies"
CUDA_GRAPH = "finetune_optimized.py --kernels all --cuda-graph"
LAUNCHES, SYNCHRONIZATION = "GPU idle: launches", "GPU idle: synchronization"


# ---------------------------------------------------------------- what is necessary


@dataclass(frozen=True)
class Sizes:
    """Bytes of one pass over the tensors of a step, from the model's configuration."""

    weights: int  # all parameters
    stream: int  # (B*T, H), once per layer
    heads: int  # q and k, once per layer
    inner: int  # (B*T, I), once per layer
    logits: int  # (B*T, V)
    layers: int
    width: int  # of one number


def sizes_of(config, args: argparse.Namespace) -> Sizes:
    width = torch.finfo(architecture.TORCH_DTYPES[args.dtype]).bits // 8
    per_layer = width * args.batch_size * args.seq_len * config.num_hidden_layers
    head_columns = (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    return Sizes(
        weights=width * architecture.parameter_count(config),
        stream=per_layer * config.hidden_size,
        heads=per_layer * head_columns,
        inner=per_layer * config.intermediate_size,
        logits=width * args.batch_size * args.seq_len * config.vocab_size,
        layers=config.num_hidden_layers,
        width=width,
    )


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: the kernel that it adds, what that replaces, and the bytes that remain."""

    name: str
    category: str | None  # of profile_baseline.py
    floor_bytes: Callable[[Sizes], float]  # what the kernel still has to read and write


RUNGS = [
    Rung("adamw", "optimizer", lambda s: 7 * s.weights),  # p, g, m, v in; p, m, v out
    Rung("rmsnorm", "normalization", lambda s: 2 * 5 * s.stream),  # two norms: x, y; dy, x, dx
    Rung("rope", "rotary", lambda s: 4 * s.heads),  # q, k in and out; their gradients
    Rung("swiglu", "activation", lambda s: 9 * s.inner),  # gate, up, y; dy, gate, up, dgate, dup, y
    Rung("linear_cross_entropy", "loss", lambda s: 2 * s.logits),  # logits in, their gradient out
    # Two additions of three passes less (q, k, v share an input), two norms of two passes more: for the memory.
    Rung("fused_layer", None, lambda s: (2 * 2 - 2 * 3) * s.stream),
]
RUNG_OF_CATEGORY = {rung.category: rung for rung in RUNGS if rung.category}
CATEGORIES_OF_KERNEL = {rung.name: {rung.category} for rung in RUNGS} | {
    "cross_entropy": {"loss"}, "fused_layer": {"normalization", "activation", "rotary"},
}  # fmt: skip


# ---------------------------------------------------------------- what is moved: PyTorch's operations


class Cost(NamedTuple):
    """Bytes read and written, and floating-point operations."""

    n_bytes: float
    flops: float


NOTHING = Cost(0.0, 0.0)
WIDTHS = {  # bytes of a number, by the names under which the profiler writes dtypes
    "c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "long int": 8, "long": 8, "int": 4, "bool": 1,
}  # fmt: skip
INTEGERS = {"long int", "long", "int"}
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # the position of their first factor
ATTENTION = re.compile(r"aten::_\w+_attention(_forward|_for_cpu)?(_backward)?$")
ELEMENTWISE = {
    "add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "sin", "cos", "silu", "silu_backward", "lerp", "addcmul",
    "addcdiv", "_log_softmax", "_log_softmax_backward_data", "cumsum", "eq", "ne",
}  # fmt: skip
REDUCTIONS = {"sum", "mean", "all"}
FILLS = {"fill", "zero"}
ROW_PICKS = {"embedding_dense_backward", "index_select"}  # whole rows by their numbers; the next ones single numbers
PICKS = {"gather", "nll_loss_forward", "nll_loss_backward"}


class Operand(NamedTuple):
    """A tensor, or a list of tensors, that an operation was called with."""

    shape: tuple[int, ...] | None  # None: a list
    numel: int
    n_bytes: int  # of memory: what a view repeats (stride 0) counts once
    dtype: str


def operands_of(inputs: dict, sizes: Sizes) -> list[Operand]:
    """The tensors among an operation's inputs, as the profiler's trace has them.

    Of a list it does not record the dtype, which is the model's here; and of more than 30 tensors nothing at all:
    such a list is AdamW's, with one tensor for each parameter.
    """
    operands = []
    for dims, strides, dtype in zip(inputs["Input Dims"], inputs["Input Strides"], inputs["Input type"]):
        if dtype == "TensorList":
            numel = sum(math.prod(shape) for shape in dims) if dims else sizes.weights // sizes.width
            operands.append(Operand(None, numel, sizes.width * numel, dtype))
        elif dtype in WIDTHS:
            there = math.prod(size for size, stride in zip(dims, strides) if stride != 0)
            operands.append(Operand(tuple(dims), math.prod(dims), WIDTHS[dtype] * there, dtype))
    return operands


def result_of(operands: list[Operand]) -> tuple[int, int]:
    """(numel, bytes) of an elementwise result: the shapes broadcast, in the widest dtype among the tensors.

    A tensor of no dimensions is a number, and does not widen the others.
    """
    if operands[0].shape is None:
        return operands[0].numel, operands[0].n_bytes
    numel = math.prod(torch.broadcast_shapes(*(o.shape for o in operands if o.shape is not None)))
    return numel, numel * max(WIDTHS[o.dtype] for o in operands if o.shape or numel == 1)


def cost_of_call(name: str, inputs: dict, sizes: Sizes, seq_len: int) -> Cost:
    """What one call of an operation of PyTorch's moves and computes; NOTHING for those that a step spends no time in.

    Args:
        name: as in "aten::mul".
        inputs: the call's "Input Dims", "Input type", "Input Strides" and "Concrete Inputs" in a Chrome trace.
        sizes: of the model, for lists of tensors.
        seq_len: keys of an attention; causal, so a query sees half of them.

    Elementwise work is one FLOP per number of the result (of the input, where it is reduced); a copy does none.
    """
    operands = operands_of(inputs, sizes)
    kind = name.removeprefix("aten::").removeprefix("_foreach_").removesuffix("_")
    in_place = name.endswith("_")
    if not name.startswith("aten::") or all(operand.shape == () for operand in operands):  # nothing, or single numbers
        return NOTHING
    first, read = operands[0], sum(operand.n_bytes for operand in operands)
    if kind in MATMULS:
        a, b = operands[MATMULS[kind] : MATMULS[kind] + 2]
        result = math.prod(a.shape[:-1]) * b.shape[-1]
        added = first.n_bytes if MATMULS[kind] else 0
        return Cost(added + a.n_bytes + b.n_bytes + result * WIDTHS[first.dtype], 2.0 * result * a.shape[-1])
    if ATTENTION.match(name):
        # q @ k.t() and p @ v; the backward computes the first once more, and four gradients
        gradients = name.endswith("_backward")
        products, results = (5, operands[1:4]) if gradients else (2, operands[:1])
        flops = products * 2.0 * first.numel * seq_len / 2
        return Cost(read + sum(o.numel * WIDTHS[o.dtype] for o in results), flops)
    if kind in ELEMENTWISE:
        if kind == "addcmul":  # AdamW's: the gradient times itself
            read -= operands[2].n_bytes
        numel, written = (first.numel, first.n_bytes) if in_place else result_of(operands)
        return Cost(read + written, float(numel))
    if kind in REDUCTIONS:
        dims = re.findall(r"-?\d+", "".join(inputs["Concrete Inputs"][1:2])) or range(len(first.shape))
        left = first.numel // math.prod(first.shape[int(dim)] for dim in dims)
        return Cost(first.n_bytes + left * WIDTHS[first.dtype], float(first.numel))
    if kind in FILLS:
        return Cost(first.n_bytes, 0.0)
    if kind == "copy":
        return Cost(read, 0.0)
    if kind == "cat":
        return Cost(2.0 * read, 0.0)
    if kind in ROW_PICKS | PICKS:
        (index,) = (o for o in operands if o.dtype in INTEGERS and o.shape)
        source = next(o for o in operands if o.dtype not in INTEGERS and o.shape)
        picked = index.numel * (source.shape[-1] if kind in ROW_PICKS else 1)
        return Cost(index.n_bytes + 2.0 * picked * WIDTHS[source.dtype], 0.0)
    return NOTHING


def costs_of_trace(trace: dict, sizes: Sizes, seq_len: int, kernels: Sequence[str] = ()) -> dict[int, Cost]:
    """The profiler's number of each operation that costs something -> what it costs, from an exported Chrome trace.

    With the adamw kernel a list holds no parameters: it is the counts of the steps made, one number for each of them.
    """
    costs = {}
    for event in trace["traceEvents"]:
        step_counts = "adamw" in kernels and event["name"].startswith("aten::_foreach_")
        if event.get("cat") == "cpu_op" and "Input Dims" in event["args"] and not step_counts:
            cost = cost_of_call(event["name"], event["args"], sizes, seq_len)
            if cost != NOTHING:
                costs[event["args"]["External id"]] = cost
    return costs


# ---------------------------------------------------------------- what is moved: our kernels


@dataclass(frozen=True)
class Passes:
    """What a kernel of ours moves and computes; the profiler records neither pointers nor shapes of a Triton launch."""

    tensor: str  # of Sizes
    passes: int  # over it
    flops: int  # per number, counted in the kernel's source; an exponential is one
    every_launch: bool  # one launch is for one layer's tensor; otherwise those of a step share the whole


KERNELS = {  # by how their names begin
    "_rmsnorm_fwd": Passes("stream", 2, 4, True),  # x in, y out
    "_rmsnorm_bwd": Passes("stream", 3, 9, True),  # dy, x in, dx out
    "_swiglu_fwd": Passes("inner", 3, 6, True),  # gate, up in, y out
    "_swiglu_bwd": Passes("inner", 6, 13, True),  # dy, gate, up in; dgate, dup, y out
    "_rope": Passes("heads", 2, 3, True),  # q, k (or their gradients) in and out
    "_adamw": Passes("weights", 7, 14, False),  # p, g, m, v in; p, m, v out
    "_cross_entropy_inplace": Passes("logits", 2, 9, False),  # logits in, their gradient out
    "_cross_entropy_fwd": Passes("logits", 1, 5, False),  # logits in
    "_cross_entropy_bwd": Passes("logits", 2, 4, False),  # logits in, their gradient out
}


def cost_of_kernel(name: str, launches: int, sizes: Sizes) -> Cost | None:
    """One launch of a kernel of ours, of so many in the step; None: it is not ours, or moves next to nothing."""
    kernel = next((kernel for start, kernel in KERNELS.items() if name.startswith(start)), None)
    if kernel is None:
        return None
    tensor = getattr(sizes, kernel.tensor) / (sizes.layers if kernel.every_launch else launches)
    return Cost(kernel.passes * tensor, kernel.flops * tensor / sizes.width)


# ---------------------------------------------------------------- the verdict


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
        in_trace = "look them up in the trace"
        fused = "fused_layer" in record["kernels"]
        elsewhere = {
            "matmul": "larger products (--batch-size, --seq-len); the kernels are cuBLAS's",
            "attention": "no kernel of ours; PyTorch chooses cuDNN's or flash attention",
            OTHER: in_trace if fused else "--kernels all: its fused layer needs fewer of them",
        }
        return elsewhere.get(category, in_trace)
    if rung.name not in record["kernels"]:
        return f"--kernels {rung.name}"
    return f"its kernel is on; benchmark_kernels.py --kernel {rung.name}"


def idle_us(record: dict) -> float:
    """How long the GPU waits for the host: what was recorded, but no more than a step without recording leaves.

    Where the GPU waits, recording makes the host slower and the waiting longer.
    """
    return min(record["timeline"]["idle_us"], max(0.0, 1e3 * record["median_step_ms"] - record["busy_us"]))


def host_us(record: dict) -> float:
    """The host's time from one launch to the next where the GPU waits, as in a step that nothing records."""
    return record["timeline"]["host_us"] * min(1.0, record["median_step_ms"] / record["timeline"]["step_ms"])


def waits(record: dict) -> bool:
    """Does the GPU wait for the host for a share of the step that is worth a word?"""
    return record["timeline"] is not None and idle_us(record) > IDLE_SHARE * 1e3 * record["median_step_ms"]


def judge(name: str, part: dict, record: dict, category: str | None = None) -> Finding:
    """The verdict on a row of the profile (us, launches, bytes, flops); `category` where that is what the row is."""
    ceilings, us = record["ceilings"], part["us"]
    per_us = 1e3 * ceilings["copy_gbs"]  # bytes
    bytes_us, flops_us = part["bytes"] / per_us, part["flops"] / (1e6 * ceilings["matmul_tflops"])
    rung = RUNG_OF_CATEGORY.get(category)
    necessary = rung.floor_bytes(Sizes(**record["sizes"])) if rung else None
    needed_us = bytes_us if necessary is None else necessary / per_us
    verdict = "compute-bound" if flops_us > bytes_us else "bandwidth-bound"
    if waits(record) and us / part["launches"] < host_us(record):
        verdict = "launch-bound"
    return Finding(
        name, us, part["bytes"], part["flops"], bytes_us, flops_us, necessary, max(needed_us, flops_us) / TARGET,
        verdict, advice_for(category, record) if category else "",
    )  # fmt: skip


def replaced_by(kernels: list[str]) -> set[str]:
    """The categories that these kernels take over."""
    return set().union(*(CATEGORIES_OF_KERNEL[name] for name in kernels))


def counted(record: dict) -> dict[str, dict]:
    """The categories whose bytes are known: not those of kernels that Triton's interpreter ran."""
    interpreted = replaced_by(record["kernels"]) if record["device"] == "CPU" else set()
    return {name: part for name, part in record["categories"].items() if part["bytes"] and name not in interpreted}


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
        (SYNCHRONIZATION, "host-synchronization", waited_us, "no .item() or .cpu() in the step"),
    ]
    return {
        name: Finding(name, us, 0.0, 0.0, 0.0, 0.0, None, 0.0, verdict, advice)
        for name, verdict, us, advice in causes if us > 0
    }  # fmt: skip


def ranking(record: dict) -> list[Finding]:
    """What could be gained, the most first."""
    findings = [*judge_categories(record).values(), *judge_idle(record).values()]
    least_us = LEAST_SHARE * 1e3 * record["median_step_ms"]
    return sorted((f for f in findings if f.gain_us > least_us), key=lambda f: -f.gain_us)


# ---------------------------------------------------------------- output


def short(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 or value == 0 else f"{value:.1g}"


def flop_rate(tflops: float) -> str:
    return f"{tflops:,.1f} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:,.1f} GFLOP/s"


def achieved(finding: Finding) -> str:
    """In the unit of the ceiling that applies."""
    if finding.flops_us > finding.bytes_us:
        return flop_rate(finding.flops / finding.us / 1e6)
    gbs = finding.n_bytes / finding.us / 1e3
    return f"{gbs:,.0f} GB/s" if gbs >= 100 else f"{gbs:,.1f} GB/s"


def findings_table(header: str, findings: list[Finding]) -> str:
    bytes_unit, byte = tables.decimal_unit([f.n_bytes for f in findings], "GB", "MB", 1e9)
    flops_unit, flop = tables.decimal_unit([f.flops for f in findings], "TFLOP", "GFLOP", 1e12)
    rows = [
        [
            f.name[:60], f"{f.us / 1e3:,.3f}", short(f.n_bytes / byte), short(f.flops / flop),
            short(f.flops / f.n_bytes), achieved(f), f"{100 * f.share:.0f}", f.verdict,
        ]
        for f in findings
    ]  # fmt: skip
    headers = [
        header, "Time, ms", f"Moved, {bytes_unit}", flops_unit, "FLOP/byte", "Achieved", "% of ceiling", "Verdict",
    ]  # fmt: skip
    return tables.table(headers, rows, ["left", *["right"] * 6, "left"])


def gains_table(record: dict, findings: list[Finding]) -> str:
    """What each part would take at TARGET of its ceiling, and what the step would gain."""
    unit, size = tables.decimal_unit([f.needed for f in findings], "GB", "MB", 1e9)
    rows = [
        [
            f.name, f"{f.us / 1e3:,.3f}", short(f.needed / size), f"{f.target_us / 1e3:,.3f}",
            f"{f.gain_us / 1e3:,.3f}", percent_of_step(f, record), f.advice,
        ]
        for f in findings
    ]  # fmt: skip
    at_target = f"At {100 * TARGET:.0f} %, ms"
    headers = ["Recoverable", "Now, ms", f"Necessary, {unit}", at_target, "Gain, ms", "Step", "What to do"]
    return tables.table(headers, rows, ["left", *["right"] * 5, "left"])


def percent_of_step(finding: Finding, record: dict) -> str:
    return f"{-finding.gain_us / record['median_step_ms'] / 10:.1f} %"


def decision(record: dict, findings: list[Finding]) -> list[str]:
    """Three lines: the largest recoverable cost, what to do about it, what it should gain."""
    if not findings:
        return [f"Nothing is left to recover: no part of it could make the step {100 * LEAST_SHARE:.1f} % shorter."]
    first = findings[0]
    cost = f"{first.name}, {first.us / 1e3:,.1f} of {record['median_step_ms']:,.1f} ms, {first.verdict}"
    if first.necessary is not None:
        unit, size = tables.decimal_unit([first.n_bytes], "GB", "MB", 1e9)
        cost += f": it moves {first.n_bytes / size:,.1f} {unit}, {first.necessary / size:,.1f} are necessary"
    roof = "matmul" if first.flops_us / TARGET == first.target_us else "copy"
    where = f"at {100 * TARGET:.0f} % of the {roof} rate " if first.target_us else ""
    return [
        f"Largest recoverable cost:  {cost}",
        f"What to do about it:       {first.advice}",
        f"What it should gain:       {where}{first.target_us / 1e3:,.1f} ms instead of {first.us / 1e3:,.1f}: "
        f"step {percent_of_step(first, record)} (Amdahl)",
    ]


def ceilings_line(record: dict) -> str:
    copy, matmul = record["ceilings"]["copy_gbs"], record["ceilings"]["matmul_tflops"]
    return (
        f"Ceilings measured in this run: copy {copy:,.0f} GB/s (read + write), {record['dtype']} matmul "
        f"{flop_rate(matmul)}; they meet at {1e3 * matmul / copy:,.0f} FLOP/byte"
    )


def host_line(record: dict) -> str:
    """What the host has to do with it."""
    if record["timeline"] is None:
        interpreted = "; kernels of ours are interpreted, and not counted" if record["kernels"] else ""
        return f"No GPU: the times are the CPU's{interpreted}"
    us = host_us(record)
    slow = f"it takes about {us:,.1f} us from one launch to the next" if us else "it never does"
    return f"Where the GPU waits for the host: {slow}"


def render(record: dict) -> str:
    """The diagnosis of a profile, from its record."""
    findings = ranking(record)
    return "\n".join(
        [
            tables.title(f"Diagnosis{'' if record['device'] == 'CUDA' else tables.NOT_MEANINGFUL}"),
            ceilings_line(record),
            host_line(record),
            "",
            findings_table("Category", list(judge_categories(record).values())),
            "",
            findings_table("Operation", judge_operations(record)),
            "",
            *([gains_table(record, findings), ""] if findings else []),
            *decision(record, findings),
        ]
    )


# ---------------------------------------------------------------- before and after

SAME_WORKLOAD = ["model", "weights", "dtype", "data", "batch_size", "seq_len", "device"]


def predicted_gains(before: dict, after: dict) -> dict[str, float]:
    """Category -> microseconds that the kernels which only `after` has should gain, by the diagnosis of `before`."""
    if "ceilings" not in before:
        return {}
    findings = judge_categories(before)
    replaced = replaced_by([name for name in after["kernels"] if name not in before["kernels"]])
    return {name: finding.gain_us for name, finding in findings.items() if name in replaced}


def render_comparison(before: dict, after: dict) -> str:
    """What went away and what came from one profile to another, from their records.

    Raises:
        UserError: they are not of the same workload.
    """
    differences = [f"{key} {after[key]} (not {before[key]})" for key in SAME_WORKLOAD if before[key] != after[key]]
    if differences:
        raise UserError(f"the profiles are not of one workload: {'; '.join(differences)}; give two that are")
    predicted, rows = predicted_gains(before, after), []
    moved = [counted(record) if "ceilings" in record else {} for record in (before, after)]
    unit, size = tables.decimal_unit([part["bytes"] for parts in moved for part in parts.values()], "GB", "MB", 1e9)
    for name, old in before["categories"].items():
        new = after["categories"][name]
        if old["launches"] or new["launches"]:
            rows.append(comparison_row(name, old["us"], new["us"], predicted.get(name)))
            rows[-1] += [f"{old['launches']:,}", f"{new['launches']:,}"]
            rows[-1] += [short(parts[name]["bytes"] / size) if name in parts else "n/a" for parts in moved]
    if before.get("timeline") and after.get("timeline"):
        rows.append(comparison_row("GPU idle", *map(idle_us, (before, after)), None))
    steps = (1e3 * r["median_step_ms"] for r in (before, after))
    rows.append(comparison_row("Step", *steps, sum(predicted.values()) if predicted else None))
    headers = [
        "Category", "Before, ms", "After, ms", "Gain, ms", "Predicted, ms", "Launches before", "after",
        f"Moved before, {unit}", "after",
    ]  # fmt: skip
    rows = [row + [""] * (len(headers) - len(row)) for row in rows]
    names = [{row["name"]: row for row in record["operations"]} for record in (before, after)]
    lines = [
        *(
            f"{label} {run_records.environment_line(r['environment'])}; custom kernels: {', '.join(r['kernels']) or 'none'}"
            for label, r in (("Before:", before), ("After: ", after))
        ),
        f"{model_line(before)}; {before['batch_size']} x {before['seq_len']} tokens",
        "",
        tables.title(f"What the kernels changed{'' if before['device'] == 'CUDA' else tables.NOT_MEANINGFUL}"),
        tables.table(headers, rows),
        "",
        only_in("Went away:", names[0], names[1]),
        only_in("Came:     ", names[1], names[0]),
    ]
    return "\n".join(lines)


def compare(before_path: str, after_path: str, picture: str | None) -> None:
    """Print the comparison of two recorded profiles, and draw both into one picture.

    Raises:
        UserError: a file is no profile, they are not of one workload, or there is nothing to draw.
    """
    records = [run_records.read_record(path, "profile") for path in (before_path, after_path)]
    print(render_comparison(*records))
    if picture:
        for path, record in zip((before_path, after_path), records):
            if "ceilings" not in record:
                raise UserError(f"{path} is too old to be drawn: it has no bytes and no ceilings; profile again")
        plot(records, picture)


def comparison_row(name: str, before_us: float, after_us: float, predicted_us: float | None) -> list[str]:
    gain = f"{(before_us - after_us) / 1e3:,.3f}"
    predicted = tables.number(predicted_us and predicted_us / 1e3, ",.3f", missing="")
    return [name, f"{before_us / 1e3:,.3f}", f"{after_us / 1e3:,.3f}", gain, predicted]


def only_in(label: str, operations: dict[str, dict], others: dict[str, dict]) -> str:
    """The longest operations that the others do not have."""
    rows = sorted((row for name, row in operations.items() if name not in others), key=lambda row: -row["us"])
    said = [f"{row['name'][:60]} {row['us'] / 1e3:,.3f} ms" for row in rows[:NAMED]]
    said += [f"{len(rows) - NAMED} more"] if len(rows) > NAMED else []
    return f"{label} {', '.join(said) or 'nothing'}"


# ---------------------------------------------------------------- the picture


def plot(records: list[dict], path: str) -> None:
    """The roofline of a profile: each category a point under the measured ceilings, its area the time that it takes.

    Of two records the first one's points are rings, and an arrow leads from them to where the kernels moved them.
    """
    from matplotlib.ticker import FuncFormatter

    plt = pictures.pyplot()
    first = records[0]
    tbs, matmul = first["ceilings"]["copy_gbs"] / 1e3, first["ceilings"]["matmul_tflops"]
    judged = [judge_categories(record) for record in records]
    names = [name for name, f in judged[0].items() if f.flops]
    found = {  # each category's findings: without the last one where the interpreter ran its kernel
        name: [findings[name] for findings in judged if name in findings] for name in names
    }
    points = {name: [(f.flops / f.n_bytes, f.flops / f.us / 1e6) for f in found[name]] for name in names}
    xs, ys = zip(*(point for both in points.values() for point in both))
    left, right = 0.4 * min(xs), max(40 * matmul / tbs, 3 * max(xs))

    figure, axis = plt.subplots(figsize=(12, 7), layout="constrained")
    axis.set(xscale="log", yscale="log", xlim=(left, right), ylim=(0.3 * min(ys), 2.5 * max(matmul, *ys)))
    axis.plot([left, matmul / tbs, right], [tbs * left, matmul, matmul], color="black", linewidth=2)
    middle = math.sqrt(left * matmul / tbs)
    axis.text(
        middle, 1.15 * tbs * middle, f"copy: {1e3 * tbs:,.0f} GB/s", rotation=math.degrees(math.atan(tbs)),
        rotation_mode="anchor", transform_rotates_text=True, ha="center", va="bottom",
    )  # fmt: skip
    axis.text(matmul / tbs, 1.15 * matmul, f"{first['dtype']} matmul: {flop_rate(matmul)}", ha="right")
    height = 0.47
    for name in sorted(names, key=lambda name: -points[name][-1][1]):
        colour, findings = f"C{names.index(name)}", found[name]
        interpreted = len(findings) < len(records)
        for finding, point in zip(findings, points[name]):
            area = 30 + 3e3 * finding.us / 1e3 / first["median_step_ms"]
            face = colour if finding is findings[-1] and not interpreted else "none"
            axis.scatter(*point, area, facecolors=face, edgecolors=colour, linewidths=1.5, alpha=0.8, zorder=3)
        times, shares = (" → ".join(dict.fromkeys(values)) for values in (
            [f"{f.us / 1e3:,.1f}" for f in findings], [f"{100 * f.share:.0f}" for f in findings]
        ))  # fmt: skip
        axis.annotate(
            f"{name}: {times} ms, {shares} % of its ceiling{' → interpreted' if interpreted else ''}",
            points[name][-1], (0.42, height), color=colour,
            textcoords="axes fraction", va="center",
            arrowprops={
                "arrowstyle": "-", "color": colour, "alpha": 0.4,
                "relpos": (0 if points[name][-1][0] < matmul / tbs else 1, 0.5),
            },
        )  # fmt: skip
        if math.dist(*(map(math.log10, point) for point in (points[name][0], points[name][-1]))) > 0.3:
            axis.annotate("", points[name][-1], points[name][0], arrowprops={"arrowstyle": "->", "color": colour})
        height -= 0.055
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set(xlabel="FLOP per byte moved (intensity)", ylabel="TFLOP/s achieved")
    axis.grid(alpha=0.3)
    legend = ["a point's area: its time", "ring: before", "disc: after"][: 2 * len(records) - 1]
    axis.text(0.98, 0.03, "; ".join(legend), transform=axis.transAxes, ha="right")
    kernels = " → ".join(", ".join(record["kernels"]) or "none" for record in records)
    environment = first["environment"]
    axis.set_title(
        f"{first['model']}, {first['batch_size']} x {first['seq_len']} tokens, {environment['gpu'] or 'CPU'}, "
        f"{environment['date']}{'' if environment['gpu'] else tables.NOT_MEANINGFUL}\ncustom kernels: {kernels}"
    )
    pictures.save_plot(figure, path)
