"""The exercises around RMSNorm, from the subject that the contracts know."""

from functools import partial

import torch

from exercises.grading.exercise import (
    BF16,
    DTYPE,
    FORMULA,
    MANY_ROWS,
    ONE_ROW,
    STRIDES,
    Case,
    Exercise,
    Formula,
    Inputs,
    Parts,
    chosen,
    orders,
)
from harness.benchmark.benchmark_specs import LLAMA_HIDDEN
from harness.cli.device import DEVICE
from rmsnorm_kernel import rmsnorm_backward, rmsnorm_forward
from subjects.rmsnorm import EPS, RMSNORM

TIMED = (16_384,), LLAMA_HIDDEN
MASK = (
    "The block is longer than the row: is there a mask on each load and each store, do the lanes "
    "beyond the row load 0 (other=0.0), and does n_cols stand where the row's length is meant?"
)
SMALL = "x is small here: does eps stand where the docstring has it, and is it the argument eps?"


def cases(question: str, note: str, **of_small_x) -> tuple[Case, ...]:
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


# ---- The forward


def make_forward(rows, size, dtype, eps=EPS, scale=1.0) -> Inputs:
    inputs, _ = RMSNORM.make(rows, size, dtype)
    return {"x": inputs["x"] * scale, "weight": inputs["weight"], "eps": eps}


FORWARD = Exercise(
    name="rmsnorm_forward",
    make=make_forward,
    formula=Formula("plain", "norm", parts=("y",)),
    cases=cases(SMALL, "eps 0.01", eps=1e-2, scale=0.05),
    reads=("x",),
    writes=("y",),
    timed=TIMED,
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
    formula=Formula("dx", parts=("dx",)),
    cases=cases(FORMULA, "small x", scale=0.003),
    reads=("dy", "x"),
    writes=("dx",),
    timed=TIMED,
    lesson=lambda inputs: partial(rmsnorm_backward, **inputs, need_dweight=False),
)

# ---- The weight's gradient

ODD_ROWS = 43
PROGRAMS = {ODD_ROWS: 5, TIMED[0][0]: 256}  # by the number of rows; two for each GPU's processor


def make_dw(rows, size, dtype) -> Inputs:
    return chosen(make_backward(rows, size, dtype), "dy", "x", "rstd")


def make_partial(inputs: Inputs) -> Parts:
    n_rows, n_cols = inputs["x"].shape
    sums = torch.empty((PROGRAMS.get(n_rows, 4), n_cols), device=DEVICE, dtype=torch.float32)
    return {"partial": sums}


def lesson_dw(inputs: Inputs):
    """Return the lesson with a weight of 1, on which the weight's gradient does not depend."""
    return partial(rmsnorm_backward, weight=torch.ones_like(inputs["x"][0]), **inputs)


LOOP = "Does each program's loop go on, in steps of tl.num_programs(0), until n_rows?"
DW = Exercise(
    name="rmsnorm_dw",
    make=make_dw,
    others=make_partial,
    formula=Formula("dw", parts=("dweight",)),
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
    timed=TIMED,
    lesson=lesson_dw,
)

# ---- The norm of a sum


def make_residual(rows, size, dtype, **options) -> Inputs:
    inputs = make_forward(rows, size, dtype, **options)
    residual = RMSNORM.make(rows, size, dtype, seed=1)[0]["x"] * options.get("scale", 1.0)
    return {"x": inputs["x"], "residual": residual, **chosen(inputs, "weight", "eps")}


RESIDUAL = Exercise(
    name="residual_norm",
    make=make_residual,
    formula=Formula("residual", "norm", parts=("h", "y")),
    cases=FORWARD.cases,
    reads=("x", "residual"),
    writes=("h", "y"),
    timed=TIMED,
    lesson=lambda inputs: (
        lambda: rmsnorm_forward(inputs["x"] + inputs["residual"], inputs["weight"], inputs["eps"])
    ),
)
