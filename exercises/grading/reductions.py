"""The exercises with sums and maxima of rows: RMSNorm and cross-entropy."""

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
    STRIDES,
    Case,
    Exercise,
    Inputs,
    Parts,
    chosen,
    orders,
)
from harness.benchmark.benchmark_specs import LLAMA_HIDDEN, LLAMA_VOCAB
from harness.cli.device import DEVICE
from rmsnorm_kernel import rmsnorm_backward, rmsnorm_forward
from subjects.cross_entropy import ROWS, target_and_other_entries
from subjects.rmsnorm import EPS, RMSNORM

ONE_ROW = "Is a single row, or a single column, something else to the kernel?"
MANY_ROWS = "Fewer rows were right: does each of many rows have a program, or a turn of a loop?"

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
