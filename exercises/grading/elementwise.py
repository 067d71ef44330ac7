"""The exercises without a sum: vectors, tiles, SwiGLU, the rotary embedding and AdamW."""

from functools import partial

import torch

from exercises.grading.exercise import (
    BF16,
    CHUNK,
    DTYPE,
    FORMULA,
    STRIDES,
    Case,
    Exercise,
    Formula,
    Inputs,
    chosen,
    converted,
    orders,
)
from harness.benchmark.benchmark_specs import HEAD_DIM, LLAMA_HIDDEN, LLAMA_INTERMEDIATE, Q_HEADS
from harness.cli.device import DEVICE
from next_steps.lessons.adamw_kernel import adamw_step
from next_steps.lessons.rope_kernel import rope_backward
from next_steps.lessons.swiglu_kernel import swiglu_backward
from subjects import rope, swiglu
from subjects.subject import normals

MANY = "Fewer blocks were right: is there a program for each block?"
BLOCKS = "Does program i begin at i * BLOCK_SIZE?"
END = "The last block is longer than what is left: is the mask `below n` on each load and store?"


def numbers(rows: tuple[int, ...], size: int) -> str:
    return f"{rows[0] * size:,} number{'s' if rows[0] * size > 1 else ''}"


def cases_of_numbers(*more: Case) -> tuple[Case, ...]:
    """Return the cases of a kernel of a line of numbers."""
    return (
        Case((1,), CHUNK, FORMULA),
        Case((4,), CHUNK, BLOCKS),
        Case((5,), 33, END),
        Case((1,), 1, END),
        Case((53,), 16, MANY),
        Case((1,), 20_011, MANY),
        *orders((4,), CHUNK),
        *more,
        Case((3,), 211, DTYPE, dtype=BF16),
    )


OF_NUMBERS = {
    "blocks": {"block_size": CHUNK},
    "in_words": numbers,
    "axes": {1: ("number",)},
    "timed": ((8192,), LLAMA_INTERMEDIATE),
}


# ---- Two vectors


def make_vectors(rows, size, dtype) -> Inputs:
    normal = normals(0, dtype)
    return {"a": normal(rows[0] * size, mean=0.5), "b": normal(rows[0] * size, mean=-0.3)}


ADD = Exercise(
    name="add",
    make=make_vectors,
    cases=cases_of_numbers(),
    reads=("a", "b"),
    writes=("c",),
    lesson=lambda inputs: partial(torch.add, *inputs.values()),
    opponent="PyTorch",
    **OF_NUMBERS,
)

# ---- A tile


def make_tile(rows, size, dtype) -> Inputs:
    normal = normals(0, dtype)
    x = normal(*rows, size, mean=0.5)
    return {"x": x, "scale": normal(*rows, mean=0.5), "bias": normal(size, mean=-0.5)}


GRID = (
    "There are several tiles here: do a tile's rows begin at tl.program_id(0) * BLOCK_ROWS, and "
    "its columns at tl.program_id(1) * BLOCK_COLS?"
)
EDGES = "The last tiles are cut off here: does the mask ask both rows < n_rows and cols < n_cols?"
TILE = Exercise(
    name="tile",
    make=make_tile,
    cases=(
        Case((8,), 8, FORMULA),
        Case((8,), 16, FORMULA),
        Case((8,), 16, STRIDES, gaps=True),
        Case((24,), 64, GRID, gaps=True),
        Case((13,), 37, EDGES, gaps=True),
        Case((1,), 1, EDGES),
        Case((53,), 150, GRID, gaps=True),
        *orders((13,), 37),
        Case((13,), 37, DTYPE, dtype=BF16, gaps=True),
    ),
    blocks={"block_rows": 8, "block_cols": 16},
    reads=("x",),
    writes=("y",),
    timed=((16_384,), LLAMA_HIDDEN),
    lesson=lambda inputs: lambda: inputs["x"] * inputs["scale"][:, None] + inputs["bias"],
    opponent="PyTorch",
)

# ---- SwiGLU


def make_swiglu(rows, size, dtype, extreme=False) -> Inputs:
    """Return dy, gate and up; extreme: every third gate is 100, and every third -100."""
    inputs, douts = swiglu.make(rows, size, dtype)
    parts = {"dy": douts["y"].flatten(), **{name: t.flatten() for name, t in inputs.items()}}
    if extreme:
        parts["gate"][::3], parts["gate"][1::3] = 100.0, -100.0
    return parts


OVERFLOW = "exp of more than 88 is inf in fp32, and inf / inf is NaN: is s 1 / (1 + exp(-gate))?"
SWIGLU_BACKWARD = Exercise(
    name="swiglu_backward",
    make=make_swiglu,
    cases=cases_of_numbers(
        Case((5,), 33, OVERFLOW, note="gates of 100 and -100", options={"extreme": True}),
    ),
    reads=("dy", "gate", "up"),
    writes=("dgate", "dup"),
    lesson=lambda inputs: partial(swiglu_backward, **inputs),
    **OF_NUMBERS,
)

# ---- The rotary embedding


def make_rope(rows, size, dtype) -> Inputs:
    """Return dy (B, heads, T, D), a view of (B, T, heads, D), and cos and sin (T, D)."""
    n_heads, D = size
    inputs, douts = rope.make(rows, (n_heads, 1, D), dtype, shared=True)
    return {"dy": douts["q_rot"], "cos": inputs["cos"][0], "sin": inputs["sin"][0]}


def heads(rows: tuple[int, int], size: tuple[int, int]) -> str:
    (B, T), (n_heads, D) = rows, size
    return f"{B} sample{'s' if B > 1 else ''} of {T} tokens, {n_heads} heads of {D} columns"


HALVES = (
    "HALF is no power of two here: is the mask cols < HALF on each load and store, and does the "
    "second half lie HALF, not BLOCK_HALF, further?"
)
ROPE_BACKWARD = Exercise(
    name="rope_backward",
    make=make_rope,
    parts=lambda inputs, written: dict(zip(("dx1", "dx2"), written["dx"].chunk(2, -1))),
    cases=(
        Case((1, 3), (2, 16), FORMULA),
        Case((2, 3), (4, 16), "Is a program's sample tl.program_id(0) // T, and its token % T?"),
        Case((2, 3), (4, 16), "Has each tensor strides of its own?", gaps=True),
        Case((2, 3), (3, 12), HALVES, gaps=True),
        Case((1, 5), (1, 2), HALVES),
        Case((3, 20), (5, 6), "Fewer tokens and heads were right: is each one's program there?"),
        *orders((2, 3), (4, 16)),
        Case((2, 3), (3, 96), DTYPE, dtype=BF16, gaps=True),
    ),
    in_words=heads,
    reads=("dy",),
    writes=("dx",),
    timed=((4, 2048), (Q_HEADS, HEAD_DIM)),
    lesson=lambda inputs: partial(
        rope_backward, inputs["dy"], inputs["dy"][:, :0], inputs["cos"], inputs["sin"]
    ),
)

# ---- AdamW

STEP = 10
# lr and weight_decay so large, and p so small, that each term of the formula shows in bf16 too
SETTINGS = {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.3}
CANCELS = "a step nearly as large as p"
OTHERS = {"lr": 0.02, "beta1": 0.9, "beta2": 0.99, "eps": 0.1, "weight_decay": 0.1}
ROUNDED = (
    "The new p is small beside the old one here, so a rounding before the store shows: are m, v "
    "and p rounded only where they are stored?"
)


def make_adamw(rows, size, dtype, settings=SETTINGS, cancels=False) -> Inputs:
    """Return tensors and numbers; cancels: the new p is what bf16 cannot hold of the old one."""
    normal, n = normals(0, torch.float32), rows[0] * size
    p, g, m = normal(n, scale=0.1), normal(n, mean=0.3), normal(n, mean=0.1)
    tensors = {"p": p, "g": g, "m": m, "v": 0.5 + normal(n).sigmoid()}
    inputs = {name: t.to(DEVICE, dtype) for name, t in tensors.items()} | settings
    inputs |= {f"correction{i}": 1 - settings[f"beta{i}"] ** STEP for i in (1, 2)}
    if cancels:
        still = converted(inputs | {"p": torch.zeros_like(p)}, torch.float64)
        moved = Formula("adamw").computed(still, "p")["p"]
        inputs["p"] = (-moved / (1 - settings["lr"] * settings["weight_decay"])).to(dtype)
    return inputs


def lesson_of_adamw(inputs: Inputs):
    steps_done = torch.tensor(float(STEP - 1), device=DEVICE, dtype=torch.float32)
    tensors = chosen(inputs, "p", "g", "m", "v").values()
    return lambda: adamw_step(*tensors, steps_done, *SETTINGS.values())


ADAMW = Exercise(
    name="adamw",
    make=make_adamw,
    cases=cases_of_numbers(
        Case((5,), 33, FORMULA, note="other settings", options={"settings": OTHERS}),
        Case((16,), 211, ROUNDED, BF16, note=CANCELS, options={"cancels": True}),
    ),
    reads=("p", "g", "m", "v"),
    writes=("p", "m", "v"),
    lesson=lesson_of_adamw,
    **OF_NUMBERS | {"timed": ((LLAMA_HIDDEN,), LLAMA_INTERMEDIATE)},
)
