"""What the operations and kernels of a training step move and compute.

Bytes and FLOPs of PyTorch's operations follow from the shapes that the profiler recorded.  The
profiler records no shapes for our own kernels: theirs follow from the passes in kernel_facts.py.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from harness.cli.adapter_config import SHARING
from harness.cli.flags import FP8_COMPACT
from harness.model.architecture import TORCH_DTYPES, ModelFacts
from harness.model.families import FAMILIES
from harness.profiling.ceilings import flops_at_ceilings_us
from harness.profiling.kernel_facts import RUNGS, Sizes, launch_of


class Cost(NamedTuple):
    """Bytes read and written, and floating-point operations."""

    n_bytes: float
    flops: float
    fp8_flops: float = 0.0  # those among them that multiply numbers of FP8


NO_COST = Cost(0.0, 0.0)
# bytes of a number, by the names under which the profiler writes dtypes
WIDTHS = {
    **{"c10::BFloat16": 2, "c10::Half": 2, "c10::Float8_e4m3fn": 1, "float": 4, "double": 8},
    **{"long int": 8, "long": 8, "int": 4, "bool": 1},
}
INTEGER_NAMES = {"long int", "long", "int"}
# position of the first factor
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_scaled_mm": 0}
# q @ k.t() and p @ v; the backward computes the first again, and four gradients
ATTENTION_PRODUCTS = {"forward": 2, "backward": 5}
ATTENTION_PATTERN = re.compile(r"aten::_\w+_attention(_forward|_for_cpu)?(_backward)?$")
ELEMENTWISE = {
    *("add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "sin", "cos", "eq", "ne"),
    *("silu", "silu_backward", "_log_softmax", "_log_softmax_backward_data", "cumsum"),
    *("lerp", "addcmul", "addcdiv"),
}
REDUCTIONS = {"sum", "mean", "all", "amax"}
FILLS = {"fill", "zero"}
ROW_PICKS = {"embedding_dense_backward", "index_select"}  # whole rows by their numbers
PICKS = {"gather", "nll_loss_forward", "nll_loss_backward"}  # single numbers


def sizes_of(facts: ModelFacts, n_tokens: int | None = None) -> Sizes:
    """Return the sizes of all micro-batches of a step, or of one micro-batch of n_tokens."""
    config, workload = facts.config, facts.workload
    n_layers, micro_batches = config.num_hidden_layers, 1 if n_tokens else workload.micro_batches
    n_tokens = n_tokens or micro_batches * workload.batch_size * workload.seq_len
    width = torch.finfo(TORCH_DTYPES[workload.dtype]).bits // 8
    per_layer = width * n_tokens * n_layers  # bytes of one number for each token in each layer
    copies = width * micro_batches * n_layers  # bytes of one for each layer and micro-batch
    n_heads = config.num_attention_heads + config.num_key_value_heads
    heads = per_layer * n_heads * facts.head_size
    turned = getattr(config, "no_rope_layers", None) or [1]  # SmolLM3: of each layer, 1 or 0
    return Sizes(
        weights=width * facts.trained,
        stream=per_layer * config.hidden_size,
        heads=heads,
        inner=per_layer * config.intermediate_size,
        logits=width * n_tokens * config.vocab_size,
        layers=n_layers,
        width=width,
        micro_batches=micro_batches,
        projection=copies * facts.layer_weights // len(facts.shapes),
        unrotated=heads * turned.count(0) // len(turned),
        head_norms=heads if FAMILIES[config.model_type].head_norms else 0,
        # a code is a byte, and each 256 have an fp32 scale
        coded=round((width - 1 - 4 / 256) * facts.trained) if workload.moments else 0,
        **fp8_sizes(facts, per_layer, copies),
    )


def fp8_sizes(facts: ModelFacts, per_layer: int, copies: int) -> dict[str, int]:
    """Return `quantized` and `transposed` of Sizes; nothing without FP8.

    So fp8_layer.py does it, and with LoRA frozen_fp8.py.  Weights that fp8_layer.py transposes come
    in as bf16: three bytes, not two.
    """
    workload = facts.workload
    if workload.fp8 is None:
        return {}
    rows, columns = (dict(zip(facts.shapes, side)) for side in zip(*facts.shapes.values()))
    weights = copies * facts.layer_weights
    qkv, _, gate_up, _ = (sum(rows[p] for p in which) for which in SHARING)
    results = qkv + rows["o_proj"] + rows["down_proj"]  # their gradients come in bf16
    inputs = 2 * columns["q_proj"] + columns["o_proj"] + columns["down_proj"]
    if workload.frozen_as:
        first = sum(rows[name] for name in facts.without_gradient)
        unused = per_layer // facts.config.num_hidden_layers * first  # no gradients arrive there
        return {
            "quantized": per_layer * (inputs + results + gate_up) - unused,
            "transposed": weights if workload.fp8 == FP8_COMPACT else 0,
        }
    return {
        "quantized": weights + per_layer * (2 * columns["o_proj"] + results),
        "transposed": weights * 3 // 2 + per_layer * (results + gate_up + inputs),
    }


def least_ms(facts: ModelFacts, n_tokens: float, flops_per_token: float, ceilings: dict) -> float:
    """Return the speed of light of a training step: the milliseconds of its necessary work.

    All FLOPs (a teacher's too) pass at the matmul rate, and then, at the copy rate, the bytes that
    fully fused kernels still move (the floors in kernel_facts.py).  Not counted: the bytes of
    matrix products and attention, which can pass while these compute; the embedding, the additions
    of residuals, what a teacher moves, and the host.

    n_tokens: of all micro-batches together, without padding.
    """
    sizes = sizes_of(facts, round(n_tokens))
    n_bytes = sum(rung.floor_bytes(sizes) for rung in RUNGS)
    flops = n_tokens * flops_per_token, n_tokens * fp8_flops_per_token(facts)
    return flops_at_ceilings_us(*flops, ceilings) / 1e3 + n_bytes / ceilings["copy_gbs"] / 1e6


def fp8_flops_per_token(facts: ModelFacts) -> float:
    """Return the FLOPs of a token that --fp8 takes over: 2 for each weight in each product."""
    if facts.workload.fp8 is None:
        return 0.0
    n_weights = facts.config.num_hidden_layers * facts.layer_weights
    if facts.workload.frozen_as:  # outputs and inputs' gradients, but where none is needed
        unneeded = sum(math.prod(facts.shapes[name]) for name in facts.without_gradient)
        return 4.0 * n_weights - 2.0 * unneeded
    return 6.0 * n_weights


class Operand(NamedTuple):
    """A tensor, or a list of tensors, among an operation's inputs."""

    shape: tuple[int, ...] | None  # None: a list
    numel: int
    n_bytes: int  # of memory: numbers that a view repeats (stride 0) count once
    dtype: str


def operands_of(inputs: dict, sizes: Sizes) -> list[Operand]:
    """Return the tensors among an operation's inputs, from the profiler's trace.

    The trace has no dtype of a list, and nothing at all of more than 30 tensors: those are AdamW's.
    """
    operands = []
    columns = (inputs[f"Input {name}"] for name in ("Dims", "Strides", "type"))
    for dims, strides, dtype in zip(*columns):
        if dtype == "TensorList":
            numel = sum(map(math.prod, dims)) if dims else sizes.weights // sizes.width
            operands.append(Operand(None, numel, sizes.width * numel, dtype))
        elif dtype in WIDTHS:
            there = math.prod(size for size, stride in zip(dims, strides) if stride != 0)
            operands.append(Operand(tuple(dims), math.prod(dims), WIDTHS[dtype] * there, dtype))
    return operands


def result_of(operands: list[Operand]) -> tuple[int, int]:
    """Return (numel, bytes) of an elementwise result: shapes broadcast, in the widest dtype.

    A tensor without dimensions is a number and does not widen the others.
    """
    if operands[0].shape is None:
        return operands[0].numel, operands[0].n_bytes
    numel = math.prod(torch.broadcast_shapes(*(o.shape for o in operands if o.shape is not None)))
    return numel, numel * max(WIDTHS[o.dtype] for o in operands if o.shape or numel == 1)


def cost_of_call(name: str, inputs: dict, sizes: Sizes, seq_len: float) -> Cost:
    """Return what a call of a PyTorch operation moves and computes.

    NOTHING stands for operations in which a step spends no time.  Elementwise work is one FLOP per
    number of the result (for a reduction: of the input); a copy does none.

    Args:
        inputs: the call's "Input Dims", "Input type" and so on in a Chrome trace.
        seq_len: keys of an attention; causal, so a query sees half of them.
    """
    operands = operands_of(inputs, sizes)
    kind = name.removeprefix("aten::").removeprefix("_foreach_").removesuffix("_")
    in_place = name.endswith("_")
    nothing_or_numbers = all(operand.shape == () for operand in operands)
    if not name.startswith("aten::") or nothing_or_numbers:
        return NO_COST
    first, read = operands[0], sum(operand.n_bytes for operand in operands)
    if kind in MATMULS:
        a, b = operands[MATMULS[kind] : MATMULS[kind] + 2]
        result = math.prod(a.shape[:-1]) * b.shape[-1]
        added = first.n_bytes if MATMULS[kind] else 0
        in_fp8 = kind == "_scaled_mm"
        width = sizes.width if in_fp8 else WIDTHS[first.dtype]
        moved = added + a.n_bytes + b.n_bytes + result * width
        flops = 2.0 * result * a.shape[-1]
        return Cost(moved, flops, flops if in_fp8 else 0.0)
    if ATTENTION_PATTERN.match(name):
        way = "backward" if name.endswith("_backward") else "forward"
        results = operands[:1] if way == "forward" else operands[1:4]
        flops = ATTENTION_PRODUCTS[way] * 2.0 * first.numel * seq_len / 2
        return Cost(read + sum(o.numel * WIDTHS[o.dtype] for o in results), flops)
    if kind in ELEMENTWISE:
        if kind == "addcmul":  # AdamW's: the gradient times itself
            read -= operands[2].n_bytes
        numel, written = (first.numel, first.n_bytes) if in_place else result_of(operands)
        return Cost(read + written, float(numel))
    if kind in REDUCTIONS:
        named = re.findall(r"-?\d+", "".join(inputs["Concrete Inputs"][1:2]))
        dims = map(int, named or range(len(first.shape)))
        left = first.numel // math.prod(first.shape[dim] for dim in dims)
        return Cost(first.n_bytes + left * WIDTHS[first.dtype], float(first.numel))
    if kind in FILLS:
        return Cost(first.n_bytes, 0.0)
    if kind in ("copy", "cat"):
        return Cost(read * (1.0 if kind == "copy" else 2.0), 0.0)
    if kind in ROW_PICKS | PICKS:
        (index,) = (o for o in operands if o.dtype in INTEGER_NAMES and o.shape)
        source = next(o for o in operands if o.dtype not in INTEGER_NAMES and o.shape)
        picked = index.numel * (source.shape[-1] if kind in ROW_PICKS else 1)
        return Cost(index.n_bytes + 2.0 * picked * WIDTHS[source.dtype], 0.0)
    return NO_COST


def costs_of_trace(
    trace: dict, sizes: Sizes, seq_len: float, kernels: Sequence[str] = ()
) -> dict[int, Cost]:
    """Return what each operation in a Chrome trace costs, by the profiler's number of it.

    With the adamw kernel a list holds no parameters but their counts of steps, one number each.
    """
    costs = {}
    for event in trace["traceEvents"]:
        step_counts = "adamw" in kernels and event["name"].startswith("aten::_foreach_")
        if event.get("cat") == "cpu_op" and "Input Dims" in event["args"] and not step_counts:
            cost = cost_of_call(event["name"], event["args"], sizes, seq_len)
            if cost != NO_COST:
                costs[event["args"]["External id"]] = cost
    return costs


def cost_of_kernel(name: str, launches: int, sizes: Sizes) -> Cost | None:
    """Return the cost of one of a step's launches; None: not ours, or it moves next to nothing."""
    _, launch = launch_of(name) or (None, None)
    if launch is None or launch.tensor is None:
        return None
    shares = sizes.layers * sizes.micro_batches if launch.every_launch else launches
    numbers = getattr(sizes, launch.tensor) / sizes.width / shares
    return Cost(launch.bytes_per_number(sizes.width) * numbers, launch.flops * numbers)
