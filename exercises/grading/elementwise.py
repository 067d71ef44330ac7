"""The exercises without a sum: SwiGLU, the rotary embedding and AdamW."""

from functools import partial

import torch

from exercises.grading.exercise import Case, Exercise, Inputs, Mistakes, Parts, chosen
from exercises.grading.norms import BF16, DTYPE, FORMULA
from harness.benchmark.benchmark_specs import HEAD_DIM, LLAMA_HIDDEN, LLAMA_INTERMEDIATE, Q_HEADS
from harness.cli.device import DEVICE
from next_steps.lessons.adamw_kernel import adamw_reference, adamw_step
from next_steps.lessons.rope_kernel import rope_backward, rope_reference
from next_steps.lessons.swiglu_kernel import swiglu_backward
from subjects import rope, swiglu
from subjects.subject import run

BLOCK = 64  # numbers, in a small case
BLOCKS = "Does program i begin at i * BLOCK_SIZE?"
END = "The last block is longer than what is left: is the mask `below n` on each load and store?"


def numbers(rows: tuple[int, ...], size: int) -> str:
    return f"{rows[0] * size:,} number{'s' if rows[0] * size > 1 else ''}"


def line_cases(*more: Case) -> tuple[Case, ...]:
    """Return the cases of a kernel of a line of numbers."""
    return (
        Case((1,), BLOCK, FORMULA),
        Case((4,), BLOCK, BLOCKS),
        Case((5,), 33, END),
        Case((1,), 1, END),
        *more,
        Case((3,), 211, DTYPE, dtype=BF16),
    )


LINE = {
    "cases": line_cases(),
    "block_size": BLOCK,
    "in_words": numbers,
    "axes": {1: ("number",)},
}

# ---- SwiGLU


def make_swiglu(rows, size, dtype) -> Inputs:
    inputs, douts = swiglu.make(rows, size, dtype)
    return {"dy": douts["y"].flatten(), **{name: t.flatten() for name, t in inputs.items()}}


def swiglu_parts(inputs: Inputs) -> Parts:
    """Return y, dgate and dup."""
    gate_and_up = chosen(inputs, "gate", "up")
    return run(swiglu.SWIGLU, swiglu.SWIGLU.reference, gate_and_up, {"y": inputs["dy"]})


def swiglu_mistakes(inputs: Inputs, right: Parts) -> Mistakes:
    dy, gate, up = inputs.values()
    s, power = gate.sigmoid(), (-gate).exp()
    known = swiglu.wrong_answers(chosen(inputs, "gate", "up"), {"y": dy}, swiglu_parts(inputs))
    answers = {
        "s is 1 / (1 + exp(gate)): the minus sign is missing": swiglu_of(dy, gate, up, 1 - s),
        "s is exp(-gate), where 1 / (1 + exp(-gate)) is meant": swiglu_of(dy, gate, up, power),
        "dy is missing": swiglu_of(torch.ones_like(dy), gate, up, s),
        "every program takes the first block": {name: first_block(t) for name, t in right.items()},
    }
    return (
        {sentence: parts for sentence, parts in known.items() if "y" not in parts}
        | answers
        | {
            "dgate lacks the s before the bracket": {"dgate": dy * up * (1 + gate * (1 - s))},
            "dgate lacks the 1 + in the bracket": {"dgate": dy * up * s * gate * (1 - s)},
            "dgate has 1 - gate * (1 - s), where 1 + is meant": {
                "dgate": dy * up * s * (1 - gate * (1 - s))
            },
            "dup lacks gate: it is dy * s": {"dup": dy * s},
        }
    )


def swiglu_of(dy, gate, up, s) -> Parts:
    return {"dgate": dy * up * s * (1 + gate * (1 - s)), "dup": dy * gate * s}


def first_block(t: torch.Tensor) -> torch.Tensor:
    return t[:BLOCK].repeat(len(t) // BLOCK + 1)[: len(t)]


SWIGLU_BACKWARD = Exercise(
    make=make_swiglu,
    outputs=lambda inputs: {name: torch.empty_like(inputs["gate"]) for name in ("dgate", "dup")},
    answers=lambda inputs: chosen(swiglu_parts(inputs), "dgate", "dup"),
    mistakes=swiglu_mistakes,
    **LINE,
    reads=("dy", "gate", "up"),
    writes=("dgate", "dup"),
    timed=((8192,), LLAMA_INTERMEDIATE),
    lesson=lambda inputs: partial(swiglu_backward, **inputs),
)

# ---- The rotary embedding


def make_rope(rows, size, dtype) -> Inputs:
    """Return dy (B, heads, T, D), a view of (B, T, heads, D), and cos and sin (T, D)."""
    n_heads, D = size
    inputs, douts = rope.make(rows, (n_heads, 1, D), dtype, shared=True)
    return {"dy": douts["q_rot"], "cos": inputs["cos"][0], "sin": inputs["sin"][0]}


def halves(dx: torch.Tensor) -> Parts:
    return dict(zip(("dx1", "dx2"), dx.chunk(2, -1)))


def rope_answers(inputs: Inputs) -> Parts:
    """Return the derivative of the lesson's reference."""
    dy, *angles = inputs.values()
    x = torch.zeros_like(dy, requires_grad=True)
    y, _ = rope_reference(x, x[:, :0], *angles)
    return halves(torch.autograd.grad(y, x, dy)[0])


def rope_mistakes(inputs: Inputs, right: Parts) -> Mistakes:
    dy, cos, sin = inputs.values()
    dy1, dy2 = dy.chunk(2, -1)
    (c1, c2), (s1, s2) = cos.chunk(2, -1), sin.chunk(2, -1)

    def turned(dy=dy, cos=cos, sin=sin) -> Parts:
        return rope_answers({"dy": dy, "cos": cos, "sin": sin})

    def first(t: torch.Tensor, dim: int) -> torch.Tensor:
        return t.narrow(dim, 0, 1).expand_as(t)

    return {
        "it is the forward: dy1 * c1 - dy2 * s1 and dy2 * c2 + dy1 * s2": {
            "dx1": dy1 * c1 - dy2 * s1,
            "dx2": dy2 * c2 + dy1 * s2,
        },
        "both signs are those of the forward": {
            "dx1": dy1 * c1 - dy2 * s2,
            "dx2": dy2 * c2 + dy1 * s1,
        },
        "s1 and s2 are exchanged": {"dx1": dy1 * c1 + dy2 * s1, "dx2": dy2 * c2 - dy1 * s2},
        "c1 and c2 are exchanged": {"dx1": dy1 * c2 + dy2 * s2, "dx2": dy2 * c1 - dy1 * s1},
        "dx1 has - dy2 * s2, where + is meant": {"dx1": dy1 * c1 - dy2 * s2},
        "dx2 has + dy1 * s1, where - is meant": {"dx2": dy2 * c2 + dy1 * s1},
        "dx1 takes s1, where s2 is meant": {"dx1": dy1 * c1 + dy2 * s1},
        "dx2 takes s2, where s1 is meant": {"dx2": dy2 * c2 - dy1 * s2},
        "dx2 takes c1, where c2 is meant": {"dx2": dy2 * c1 - dy1 * s1},
        "dx1 lacks dy2 * s2": {"dx1": dy1 * c1},
        "dx2 lacks dy1 * s1": {"dx2": dy2 * c2},
        "dx1 and dx2 are exchanged": {"dx1": right["dx2"], "dx2": right["dx1"]},
        "cos and sin are exchanged": turned(cos=sin, sin=cos),
        "every token takes row 0 of cos": turned(cos=first(cos, 0)),
        "every token takes row 0 of sin": turned(sin=first(sin, 0)),
        "every token takes row 0 of cos and sin": turned(cos=first(cos, 0), sin=first(sin, 0)),
        "every sample takes sample 0 of dy": turned(first(dy, 0)),
        "every head takes head 0 of dy": turned(first(dy, 1)),
        "every token takes token 0 of dy": turned(first(dy, 2)),
    }


def heads(rows: tuple[int, int], size: tuple[int, int]) -> str:
    (B, T), (n_heads, D) = rows, size
    return f"{B} sample{'s' if B > 1 else ''} of {T} tokens, {n_heads} heads of {D} columns"


HALVES = (
    "HALF is no power of two here: is the mask cols < HALF on each load and store, and does the "
    "second half lie HALF, not BLOCK_HALF, further?"
)
ROPE_BACKWARD = Exercise(
    make=make_rope,
    outputs=lambda inputs: {"dx": torch.empty_like(inputs["dy"])},
    answers=rope_answers,
    mistakes=rope_mistakes,
    parts=lambda inputs, written: halves(written["dx"]),
    cases=(
        Case((1, 3), (2, 16), FORMULA),
        Case((2, 3), (4, 16), "Is a program's sample tl.program_id(0) // T, and its token % T?"),
        Case((2, 3), (4, 16), "Has each tensor strides of its own?", gaps=True),
        Case((2, 3), (3, 12), HALVES, gaps=True),
        Case((1, 5), (1, 2), HALVES),
        Case((2, 3), (3, 96), DTYPE, dtype=BF16, gaps=True),
    ),
    in_words=heads,
    axes={4: ("sample", "head", "token", "column")},
    reads=("dy",),
    writes=("dx",),
    timed=((4, 2048), (Q_HEADS, HEAD_DIM)),
    lesson=lambda inputs: partial(
        rope_backward, inputs["dy"], inputs["dy"][:, :0], inputs["cos"], inputs["sin"]
    ),
)

# ---- AdamW

STEP = 10
# lr and weight_decay so large that each term of the formula shows in bf16 too
SETTINGS = {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.3}


def make_adamw(rows, size, dtype) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    n = rows[0] * size
    options = {"generator": generator, "dtype": torch.float32}
    p, g, m = (torch.randn(n, **options) + mean for mean in (0.0, 0.3, 0.1))
    v = 0.5 + torch.rand(n, **options)
    corrections = {f"correction{i}": 1 - SETTINGS[f"beta{i}"] ** STEP for i in (1, 2)}
    tensors = {"p": p, "g": g, "m": m, "v": v}
    return {name: t.to(DEVICE, dtype) for name, t in tensors.items()} | SETTINGS | corrections


def adamw_answers(inputs: Inputs) -> Parts:
    tensors = chosen(inputs, "p", "g", "m", "v")
    p, m, v = adamw_reference(*tensors.values(), STEP, **SETTINGS)
    return {"the step of p": p - tensors["p"], "m": m, "v": v}


def adamw_parts(inputs: Inputs, written: Parts) -> Parts:
    """Return what the step adds to p: beside p itself, the error of a wrong step is small."""
    return {"the step of p": written["p"] - inputs["p"], "m": written["m"], "v": written["v"]}


def adamw_mistakes(inputs: Inputs, right: Parts) -> Mistakes:
    p, g, old_m, old_v = chosen(inputs, "p", "g", "m", "v").values()
    lr, beta1, beta2, eps, decay = SETTINGS.values()
    c1, c2 = inputs["correction1"], inputs["correction2"]
    _, m, v = right.values()

    def step(m=m, v=v, c1=c1, c2=c2, decay=decay, denominator=None) -> Parts:
        denominator = (v / c2).sqrt() + eps if denominator is None else denominator
        return {"the step of p": -lr * decay * p - lr * (m / c1) / denominator}

    g_l2 = g + decay * p
    m_l2, v_l2 = beta1 * old_m + (1 - beta1) * g_l2, beta2 * old_v + (1 - beta2) * g_l2**2
    return {
        "p takes the old m, before this step": step(m=old_m),
        "p takes the old v, before this step": step(v=old_v),
        "p takes the old m and v, before this step": step(m=old_m, v=old_v),
        "neither m nor v is divided by its correction": step(c1=1, c2=1),
        "m is not divided by correction1": step(c1=1),
        "v is not divided by correction2": step(c2=1),
        "eps stands inside of the root": step(denominator=(v / c2 + eps).sqrt()),
        "the root is missing: v / correction2 + eps": step(denominator=v / c2 + eps),
        "the weight decay is missing": step(decay=0.0),
        "the weight decay lacks lr: p * (1 - weight_decay)": {
            "the step of p": step(decay=0.0)["the step of p"] - decay * p
        },
        "the weight decay is added to the gradient (L2), where it multiplies p": {
            **step(m=m_l2, v=v_l2, decay=0.0),
            "m": m_l2,
            "v": v_l2,
        },
        "the weight decay is added to the gradient (L2), and multiplies p as well": {
            **step(m=m_l2, v=v_l2),
            "m": m_l2,
            "v": v_l2,
        },
        "p is not divided by the root at all: plain momentum": step(denominator=1.0),
        "p moves up the gradient: the wrong sign": {
            "the step of p": -2 * lr * decay * p - right["the step of p"]
        },
        "m: beta1 and 1 - beta1 are exchanged": {"m": (1 - beta1) * old_m + beta1 * g},
        "m: the factor 1 - beta1 is missing": {"m": beta1 * old_m + g},
        "v: beta2 and 1 - beta2 are exchanged": {"v": (1 - beta2) * old_v + beta2 * g**2},
        "v: the factor 1 - beta2 is missing": {"v": beta2 * old_v + g**2},
        "v takes g, where g * g is meant": {"v": beta2 * old_v + (1 - beta2) * g},
        "v takes beta1, where beta2 is meant": {"v": beta1 * old_v + (1 - beta1) * g**2},
        "m is not stored": {"m": old_m},
        "v is not stored": {"v": old_v},
        "p is not stored": {"the step of p": torch.zeros_like(p)},
    }


def lesson_of_adamw(inputs: Inputs):
    steps_done = torch.tensor(float(STEP - 1), device=DEVICE, dtype=torch.float32)
    tensors = chosen(inputs, "p", "g", "m", "v").values()
    return lambda: adamw_step(*tensors, steps_done, *SETTINGS.values())


ADAMW = Exercise(
    make=make_adamw,
    overwritten=("p", "m", "v"),
    answers=adamw_answers,
    mistakes=adamw_mistakes,
    parts=adamw_parts,
    **LINE,
    reads=("p", "g", "m", "v"),
    writes=("p", "m", "v"),
    timed=((LLAMA_HIDDEN,), LLAMA_INTERMEDIATE),
    lesson=lesson_of_adamw,
)
