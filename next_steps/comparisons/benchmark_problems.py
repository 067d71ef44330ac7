"""What is timed: each kernel's inputs, from its subject, and the exact results in groups.

A record has one error of each group.
"""

from collections.abc import Callable
from functools import partial

import torch

from harness.benchmark.benchmark_specs import HEAD_DIM, K_HEADS, MAX_SEQUENCE, Q_HEADS
from harness.benchmark.benchmarking import STEPS_DONE, Problem
from harness.cli.device import DEVICE
from next_steps.lessons.adamw_kernel import adamw_reference
from next_steps.lessons.fp8_kernel import Rows, dequantize
from next_steps.lessons.nf4_kernel import nf4_dequantize_reference, nf4_quantize
from subjects import (
    cross_entropy,
    linear_cross_entropy,
    qk_norm_rope,
    reverse_kl,
    rmsnorm,
    rope,
    swiglu,
)
from subjects.subject import Parts, Subject, as_tuple, in_float64, normals, run

TIMED_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CHECKED_ROWS = 64  # of each gradient; float64 of all rows would not fit beside the largest inputs
CHECKED_PARAMETERS = 2**18
ADAMW = {"lr": 1e-2, "weight_decay": 0.01}  # this rate changes bf16 weights visibly, in one step


def problem(
    subject: Subject,
    groups: dict[str, list[str]],
    rows: int | tuple[int, ...],
    size: object,
    dtype: torch.dtype,
    chunk: int = CHECKED_ROWS,
) -> Problem:
    """Return a subject's problem, whose exact results float64 computes a chunk of rows at a time.

    The first rows' results are compared, and all of what is a sum over rows.

    Args:
        groups: {name in a record: parts, or pieces of parts as `Subject.split` has them}.
    """
    make = subject.make_plain or subject.make
    inputs, douts = make(rows if isinstance(rows, tuple) else (rows,), size, dtype)
    names = [*douts, *(f"d{name}" for name in subject.differentiable)]
    of_rows = {*douts, *(f"d{name}" for name in subject.row_inputs)}
    n_rows, n_checked = len(next(iter(inputs.values()))), min(chunk, CHECKED_ROWS)
    masks = {}
    for part, labelled in (subject.split(inputs) if subject.split else {}).items():
        for label, mask in labelled.items():
            masks[f"{part} ({label})"] = (
                mask[:n_checked] if part in of_rows else mask & (mask.cumsum(0) <= CHECKED_ROWS)
            )

    def grouped(found: Parts) -> Parts:
        def piece(name: str) -> torch.Tensor:
            part = name.partition(" ")[0]
            t = found[part][:n_checked] if part in of_rows else found[part]
            return (t[masks[name].expand_as(t)] if name in masks else t).flatten()

        return {name: torch.cat([piece(each) for each in group]) for name, group in groups.items()}

    exact = {}
    has_sums = not of_rows.issuperset(names)
    for first in range(0, n_rows if has_sums else 1, chunk):
        some = {
            name: t[first : first + chunk] if name in subject.row_inputs and len(t) == n_rows else t
            for name, t in inputs.items()
        }
        share = len(next(iter(some.values()))) / n_rows  # of a mean over rows
        upstream = {n: t[first : first + chunk] if t.ndim else t * share for n, t in douts.items()}
        found = run(subject, subject.reference, in_float64(some), in_float64(upstream))
        for name, t in grouped(found).items():
            if name not in exact:
                exact[name] = t
            elif groups[name][0].partition(" ")[0] not in of_rows:
                exact[name] += t

    def parts(output: object, gradients: tuple[torch.Tensor, ...]) -> Parts:
        return grouped(dict(zip(names, (*as_tuple(output), *gradients))))

    is_loss = "loss" in douts  # whose upstream gradient is 1
    dy = None if is_loss else tuple(douts.values())
    return Problem([*inputs.values()], len(subject.differentiable), dy, parts, exact)


def of_heads(subject: Subject, **groups: list[str]) -> Callable:
    """Return the maker of a problem with heads of q and k: few, long sequences."""

    def of_tokens(tokens: int, columns: int, dtype: torch.dtype) -> Problem:
        lengths = range(min(tokens, MAX_SEQUENCE), 0, -1)
        T = next(length for length in lengths if tokens % length == 0)
        heads = Q_HEADS, K_HEADS, HEAD_DIM
        return problem(subject, turned | groups, (tokens // T, T), heads, dtype, chunk=1)

    turned = {"rotated": ["q_rot", "k_rot"], "gradient": ["dq", "dk"]}
    return of_tokens


def adamw_problem(parameters: int, size: tuple[()], dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    normal = normals(0, dtype, parameters)
    p, g, m = (normal(parameters, scale=0.01) for _ in range(3))
    v = 1e-4 * (0.5 + torch.rand(parameters, dtype=torch.float32, device=DEVICE)).to(dtype)
    before, *others = (t[-CHECKED_PARAMETERS:].double() for t in (p, g, m, v))

    def parts(stepped: torch.Tensor, gradients: tuple[()]) -> Parts:
        # Beside the weights themselves, the error of a wrong step would be small.
        return {"update": stepped[-CHECKED_PARAMETERS:].double() - before}

    # torch's default betas and eps, which all contenders share
    settings = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, **ADAMW}
    exact, *_ = adamw_reference(before, *others, STEPS_DONE + 1, **settings)
    return Problem([p, g, m, v], None, None, parts, parts(exact, ()))


def nf4_problem(numbers: int, size: tuple[()], dtype: torch.dtype) -> Problem:
    """Codes and scales, and their weight, from which only the shape and the dtype are read."""
    weight = normals(0, dtype, numbers)(numbers, scale=0.02)
    nf4 = nf4_quantize(weight)

    def parts(dequantized: torch.Tensor, gradients: tuple[()]) -> Parts:
        return {"weight": dequantized.view(-1)[-CHECKED_PARAMETERS:]}

    wide = nf4._replace(absmax_scales=nf4.absmax_scales.double())
    exact = nf4_dequantize_reference(wide, weight.shape, torch.float64)
    return Problem([*nf4, weight], 0, None, parts, parts(exact, ()))


def first_rows(codes: Rows) -> torch.Tensor:
    return dequantize(Rows(*(t[:CHECKED_ROWS] for t in codes)), torch.float32)


def fp8_problem(tokens: int, columns: int, dtype: torch.dtype) -> Problem:
    x = normals(0, dtype, tokens * columns)(tokens, columns)  # (N, K)
    exact = {"rows": x[:CHECKED_ROWS].double()}
    return Problem([x], 0, None, lambda codes, _: {"rows": first_rows(codes)}, exact)


def fp8_casts_problem(tokens: int, columns: int, dtype: torch.dtype) -> Problem:
    """gate and up are halves of one matrix, as where their projections are one product."""
    normal = normals(0, dtype, tokens * columns)
    gate_up, dy = normal(tokens, 2 * columns), normal(tokens, columns)  # (N, 2 I), (N, I)

    def parts(results: tuple[Rows, ...], gradients: tuple[()]) -> Parts:
        return dict(zip(("y", "gradients", "y again"), map(first_rows, results)))

    *inputs, upstream = (t[:CHECKED_ROWS].double() for t in (*gate_up.chunk(2, 1), dy))
    named = dict(zip(("gate", "up"), inputs)), {"y": upstream}
    y, *gradients = run(swiglu.SWIGLU, swiglu.SWIGLU.reference, *named).values()
    exact = {"y": y, "gradients": torch.cat(gradients, 1), "y again": y}
    return Problem([dy, gate_up], 0, None, parts, exact)


PROBLEMS: dict[str, Callable[..., Problem]] = {  # (tokens, size, dtype) -> Problem
    "rmsnorm": partial(problem, rmsnorm.RMSNORM, {"dx": ["dx"], "dW": ["dweight"]}, chunk=4096),
    "cross_entropy": partial(
        problem,
        cross_entropy.MEAN,
        {"target": ["dlogits (target entries)"], "other": ["dlogits (other entries)"]},
    ),
    "swiglu": partial(problem, swiglu.SWIGLU, {part: [part] for part in ("y", "dgate", "dup")}),
    "rope": of_heads(rope.ROPE),
    "qk_norm_rope": of_heads(qk_norm_rope.QK_NORM_ROPE, dW=["dq_weight", "dk_weight"]),
    "adamw": adamw_problem,
    "adamw8": adamw_problem,
    "linear_cross_entropy": partial(
        problem,
        linear_cross_entropy.FORWARD,
        {
            "dhidden": ["dhidden"],
            "dW target": ["dweight (targets' rows)"],
            "dW other": ["dweight (other rows)"],
        },
        chunk=512,  # 0.5 GB of logits in float64
    ),
    "reverse_kl": partial(
        problem,
        reverse_kl.MEAN,
        {
            "probable": ["dstudent_logits (most probable columns)"],
            "other": ["dstudent_logits (other columns)"],
        },
    ),
    "nf4": nf4_problem,
    "fp8": fp8_problem,
    "fp8_casts": fp8_casts_problem,
}
