"""The exercises: what each is given, the cases it runs in, the bytes it moves, and its lesson."""

import math
from functools import partial

import torch

from cross_entropy_kernel import (
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_inplace,
)
from exercises.grading.exercise import (
    BF16,
    CHUNK,
    DTYPE,
    FORMULA,
    Case,
    Exercise,
    Formula,
    Inputs,
    Parts,
    converted,
    orders,
)
from harness.benchmark.benchmark_specs import (
    HEAD_DIM,
    LLAMA_HIDDEN,
    LLAMA_INTERMEDIATE,
    LLAMA_VOCAB,
    Q_HEADS,
)
from harness.cli.device import DEVICE
from next_steps.lessons.adamw_kernel import adamw_step
from next_steps.lessons.rope_kernel import rope_backward
from next_steps.lessons.swiglu_kernel import swiglu_backward
from rmsnorm_kernel import rmsnorm_backward, rmsnorm_forward
from subjects import rope, swiglu
from subjects.cross_entropy import ROWS, target_and_other_entries
from subjects.rmsnorm import EPS, RMSNORM
from subjects.subject import normals

STRIDES = (
    "The next row begins later than the last one ends: does row r of each tensor begin at r * the "
    "stride of that tensor?"
)
ONE_ROW = "Is a single row, or a single column, something else to the kernel?"
MANY_ROWS = "Fewer rows were right: does each of many rows have a program, or a turn of a loop?"


def chosen(inputs: Inputs, *names: str) -> Inputs:
    """Return some of the inputs."""
    return {name: inputs[name] for name in names}


# ---- A line of numbers

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

# ---- The forward of RMSNorm

TIMED_ROWS = (16_384,), LLAMA_HIDDEN
MASK = (
    "The block is longer than the row: is there a mask on each load and each store, do the lanes "
    "beyond the row load 0 (other=0.0), and does n_cols stand where the row's length is meant?"
)
SMALL = "x is small here: does eps stand where the docstring has it, and is it the argument eps?"


def cases_of_rows(question: str, note: str, **of_small_x) -> tuple[Case, ...]:
    """Return the cases of a kernel of rows.

    of_small_x: options of the exercise's `make`, for which the question is asked.
    """
    return (
        Case((8,), 64, FORMULA),
        Case((8,), 64, STRIDES, gaps=True),
        Case((5,), 257, MASK, gaps=True),
        Case((5,), 33, MASK, gaps=True),
        Case((1,), 5000, MASK),
        Case((1,), 2, ONE_ROW),
        Case((3,), 1, ONE_ROW, options=of_small_x),
        Case((53,), 16, MANY_ROWS),
        *orders((8,), 64),
        Case((5,), 257, question, note=note, options=of_small_x),
        Case((5,), 257, DTYPE, dtype=BF16, gaps=True),
    )


def make_forward(rows, size, dtype, eps=EPS, scale=1.0) -> Inputs:
    inputs, _ = RMSNORM.make(rows, size, dtype)
    return {"x": inputs["x"] * scale, "weight": inputs["weight"], "eps": eps}


FORWARD = Exercise(
    name="rmsnorm_forward",
    make=make_forward,
    sections=("plain", "norm"),
    cases=cases_of_rows(SMALL, "eps 0.01", eps=1e-2, scale=0.05),
    reads=("x",),
    writes=("y",),
    timed=TIMED_ROWS,
    lesson=lambda inputs: partial(rmsnorm_forward, **inputs),
)

# ---- The backward


def make_backward(rows, size, dtype, scale=1.0) -> Inputs:
    inputs, douts = RMSNORM.make(rows, size, dtype)
    x = inputs["x"] * scale
    return {"dy": douts["y"], "x": x, "weight": inputs["weight"], "rstd": rstd_of(x)}


def rstd_of(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / sqrt(mean(x * x) + eps) of each row, at least in fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.rsqrt(wide.pow(2).mean(-1) + EPS)


DX = Exercise(
    name="rmsnorm_dx",
    make=make_backward,
    cases=cases_of_rows(FORMULA, "small x", scale=0.003),
    reads=("dy", "x"),
    writes=("dx",),
    timed=TIMED_ROWS,
    lesson=lambda inputs: partial(rmsnorm_backward, **inputs, need_dweight=False),
)

# ---- The weight's gradient

ODD_ROWS = 43
PROGRAMS = {ODD_ROWS: 5, TIMED_ROWS[0][0]: 256}  # by the number of rows


def make_dw(rows, size, dtype) -> Inputs:
    return chosen(make_backward(rows, size, dtype), "dy", "x", "rstd")


def make_partial(inputs: Inputs) -> Parts:
    n_rows, n_cols = inputs["x"].shape
    sums = torch.empty((PROGRAMS.get(n_rows, 4), n_cols), device=DEVICE, dtype=torch.float32)
    return {"partial": sums}


LOOP = "Does each program's loop go on, in steps of tl.num_programs(0), until n_rows?"
DW = Exercise(
    name="rmsnorm_dw",
    make=make_dw,
    others=make_partial,
    parts=lambda inputs, written: {"dweight": written["partial"].sum(0).to(inputs["x"].dtype)},
    cases=(
        Case((16,), 64, FORMULA),
        Case((16,), 64, STRIDES, gaps=True),
        Case((18,), 64, LOOP),
        Case((3,), 64, "Does a program without a row store zeros?"),
        Case((9,), 257, MASK, gaps=True),
        Case((9,), 1, ONE_ROW),
        *orders((18,), 64),
        Case((ODD_ROWS,), 64, LOOP, note="five programs"),
        Case((40,), 1000, LOOP),
        Case((400,), 16, LOOP),
        Case((40,), 257, DTYPE, dtype=BF16, gaps=True),
        Case((800,), 64, "Are the rows added up in fp32, as tl.zeros makes them?", dtype=BF16),
    ),
    axes={1: ("column",), 2: ("row", "column")},
    reads=("dy", "x"),
    timed=TIMED_ROWS,
    # with a weight of 1, on which the weight's gradient does not depend
    lesson=lambda inputs: partial(
        rmsnorm_backward, weight=torch.ones_like(inputs["x"][0]), **inputs
    ),
)

# ---- Rows in chunks

CHUNKS = (
    "The row has several chunks here, and the last one is shorter: does the loop reach n_cols, "
    "does each lane beyond n_cols load -inf, and is each store masked?"
)
LOSS = (
    "Is the loss m - logits[target] + log(d), with this row's own target, and with m and d of the "
    "whole row?"
)
GRADIENT = "The loss is right, so m and d are: compare the gradient with the docstring's."
MAXIMUM = "Is m the largest logit of all chunks, and does it begin below every logit?"


def of_d(question: str) -> dict[str, str]:
    """Return a question that is asked where m is right and d is not; others for other parts."""
    of_others = {"loss": LOSS, "dlogits": GRADIENT, "logits": GRADIENT}
    return {"m": MAXIMUM, "d": question, "y": question} | of_others


RESCALED = of_d("Is the sum so far rescaled when a later chunk brings a larger maximum?")
LARGE = of_d("Is m subtracted before each exponential?")
FIRST = of_d(FORMULA)


def cases_of_chunks(*more: Case) -> tuple[Case, ...]:
    """Return the cases of a kernel of long rows."""
    sides = "logits near -1,000 and near 1,000"
    return (
        Case((6,), CHUNK, FIRST),
        Case((6,), CHUNK, STRIDES, gaps=True),
        Case((6,), 4 * CHUNK, RESCALED, gaps=True),
        Case((6,), 193, CHUNKS, gaps=True),
        Case((5,), 31, CHUNKS, gaps=True),
        Case((1,), 1, ONE_ROW),
        Case((20,), 593, CHUNKS, gaps=True, options={"edges": True}),
        Case((2,), 40 * CHUNK + 1, CHUNKS),
        Case((53,), 75, MANY_ROWS),
        *orders((8,), 75),
        Case((6,), 193, LARGE, note=sides, options={"sides": True}),
        *more,
        Case((5,), 193, DTYPE, dtype=BF16, gaps=True),
    )


OF_LOGITS = {
    "reads": ("logits",),
    "blocks": {"block_size": CHUNK},
    "timed": ((4096,), LLAMA_VOCAB),
}


def drawn(rows, V, dtype, sides=False, edges=False, **options) -> Inputs:
    """Return logits, targets and each row's dloss.

    sides: the rows lie near -1,000 and near 1,000, in turns.
    edges: the targets are each chunk's first and last column, in turns.
    """
    inputs, douts = ROWS.make(rows, V, dtype, **options)
    if sides:
        inputs["logits"][::2] -= 1000
        inputs["logits"][1::2] += 1000
    if edges:
        columns = [c for first in range(0, V, CHUNK) for c in (first, min(first + CHUNK, V) - 1)]
        in_turns = torch.tensor(columns, device=DEVICE, dtype=torch.int64).repeat(rows[0])
        inputs["targets"] = in_turns[: rows[0]]
    return inputs | {"dloss": douts["loss"]}


# ---- Maximum and denominator


def make_logits(rows, V, dtype, forbidden=0, **options) -> Inputs:
    """Return logits, whose first `forbidden` columns are -inf in every second row."""
    logits = drawn(rows, V, dtype, **options)["logits"]
    logits[::2, :forbidden] = -math.inf
    return {"logits": logits}


def first_columns(inputs: Inputs) -> torch.Tensor:
    return torch.zeros(len(inputs["logits"]), device=DEVICE, dtype=torch.int64)


def numbers_of_rows(inputs: Inputs, *names: str) -> Parts:
    """Return an empty fp32 number a row, by name."""
    n_rows = len(inputs["logits"])
    return {name: torch.empty(n_rows, device=DEVICE, dtype=torch.float32) for name in names}


FINITE = "With m = -inf before the loop, m - m_new is -inf - -inf = NaN: does m begin finite?"
HIDDEN = "a first chunk of -inf in every second row"
ONLINE_SOFTMAX = Exercise(
    name="online_softmax",
    make=make_logits,
    others=lambda inputs: numbers_of_rows(inputs, "m", "d"),
    sections=("loop", "softmax", "maximum"),
    cases=cases_of_chunks(Case((6,), 193, FINITE, note=HIDDEN, options={"forbidden": CHUNK})),
    lesson=lambda inputs: partial(cross_entropy_forward, **inputs, targets=first_columns(inputs)),
    **OF_LOGITS,
)

# ---- The loss and its gradient


def make_loss(rows, V, dtype, **options) -> Inputs:
    """Return logits and targets, none of them ignored, and a gradient for each row's loss."""
    inputs = drawn(rows, V, dtype, **options)
    return inputs | {"targets": inputs["targets"].clamp(min=0)}


def forward_and_backward(dloss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> None:
    _, *saved = cross_entropy_forward(logits, targets, reduction="none")
    cross_entropy_backward(dloss, logits, targets, *saved)


CROSS_ENTROPY = Exercise(
    name="cross_entropy",
    make=make_loss,
    others=lambda inputs: numbers_of_rows(inputs, "m", "d", "loss"),
    writes=("dlogits",),
    sections=("loop", "maximum", "loss", "gradient"),
    split=target_and_other_entries,
    cases=cases_of_chunks(),
    lesson=lambda inputs: partial(forward_and_backward, **inputs),
    **OF_LOGITS | {"reads": ("logits", "logits")},
)

# ---- In place


def make_inplace(rows, V, dtype, ignore_index=-100, **options) -> Inputs:
    inputs = drawn(rows, V, dtype, ignore_index=ignore_index, **options)
    n_valid = (inputs["targets"] != ignore_index).sum().item()
    numbers = {"scale": 1 / max(n_valid, 1), "ignore_index": ignore_index}
    return chosen(inputs, "logits", "targets") | numbers


IGNORED = "ignore_index is another one here: is the target compared with that argument?"
CROSS_ENTROPY_INPLACE = Exercise(
    name="cross_entropy_inplace",
    make=make_inplace,
    others=lambda inputs: numbers_of_rows(inputs, "loss"),
    writes=("logits",),
    sections=("valid", "loop", "loss", "inplace"),
    split=lambda inputs: {"logits": target_and_other_entries(inputs)["dlogits"]},
    cases=cases_of_chunks(
        Case((6,), 75, IGNORED, note="ignore_index -1", options={"ignore_index": -1}),
        Case((6,), 75, IGNORED, note="ignore_index 3", options={"ignore_index": 3}),
    ),
    lesson=lambda inputs: lambda: cross_entropy_inplace(inputs["logits"], inputs["targets"]),
    **OF_LOGITS,
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

# ---- The norm of a sum


def make_residual(rows, size, dtype, **options) -> Inputs:
    inputs = make_forward(rows, size, dtype, **options)
    residual = RMSNORM.make(rows, size, dtype, seed=1)[0]["x"] * options.get("scale", 1.0)
    return {"x": inputs["x"], "residual": residual, **chosen(inputs, "weight", "eps")}


RESIDUAL = Exercise(
    name="residual_norm",
    make=make_residual,
    sections=("residual", "norm"),
    cases=FORWARD.cases,
    reads=("x", "residual"),
    writes=("h", "y"),
    timed=TIMED_ROWS,
    lesson=lambda inputs: (
        lambda: rmsnorm_forward(inputs["x"] + inputs["residual"], inputs["weight"], inputs["eps"])
    ),
)

# ---- The softmax itself, fast


SOFTMAX_FAST = Exercise(
    name="softmax_fast",
    make=make_logits,
    writes=("y",),
    sections=("loop", "softmax", "softmax_fast"),
    cases=cases_of_chunks(),
    # torch.compile's softmax computes in fp32
    lesson=lambda inputs: partial(
        torch.compile(lambda logits: torch.softmax(logits, -1), dynamic=False), **inputs
    ),
    opponent="torch.compile",
    to_beat=True,
    **OF_LOGITS,
)

EXERCISES = {each.name: each for each in [*globals().values()] if isinstance(each, Exercise)}
