"""The exercises around RMSNorm, from the subject that the contracts know."""

from functools import partial

import torch

from exercises.grading.exercise import (
    BF16,
    DTYPE,
    FORMULA,
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

TIMED_ROWS = 16_384
PROGRAMS = 4  # of dweight, in a small case; 5 where there are ODD_ROWS
ODD_ROWS = 43
STRIDES = (
    "A row has 64 columns here, but the next row begins later: does row r of each tensor begin at "
    "r * the stride of that tensor?"
)
MASK = (
    "The block is longer than the row: is there a mask on each load and each store, do the lanes "
    "beyond the row load 0 (other=0.0), and does n_cols stand where the row's length is meant?"
)
ONE_ROW = "Is a single row, or a single column, something else to the kernel?"
MANY_ROWS = "Fewer rows were right: does each of many rows have a program, or a turn of a loop?"
SMALL = "x is small here: does eps stand where the docstring has it, and is it the argument eps?"


def cases(small: Case, columns: int = 257) -> tuple[Case, ...]:
    """Return the cases of a kernel of rows."""
    return (
        Case((8,), 64, FORMULA),
        Case((8,), 64, STRIDES, gaps=True),
        Case((5,), columns, MASK, gaps=True),
        Case((5,), 33, MASK, gaps=True),
        Case((1,), 5000, MASK),
        Case((1,), 2, ONE_ROW),
        Case((3,), 1, ONE_ROW, options=small.options),
        Case((53,), 16, MANY_ROWS),
        *orders((8,), 64),
        small,
        Case((5,), columns, DTYPE, dtype=BF16, gaps=True),
    )


def rstd_of(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / sqrt(mean(x * x) + eps) of each row, at least in fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.rsqrt(wide.pow(2).mean(-1) + EPS)


# ---- The forward


def make_forward(rows, size, dtype, eps=EPS, scale=1.0) -> Inputs:
    inputs, _ = RMSNORM.make(rows, size, dtype)
    return {"x": inputs["x"] * scale, "weight": inputs["weight"], "eps": eps}


FORWARD = Exercise(
    make=make_forward,
    outputs=lambda inputs: {"y": torch.empty_like(inputs["x"])},
    formula=Formula("plain", "norm", parts=("y",)),
    cases=cases(Case((5,), 257, SMALL, options={"eps": 1e-2, "scale": 0.05}, note="eps 0.01")),
    reads=("x",),
    writes=("y",),
    timed=((TIMED_ROWS,), LLAMA_HIDDEN),
    lesson=lambda inputs: partial(rmsnorm_forward, **inputs),
)

# ---- The backward


def make_backward(rows, size, dtype, scale=1.0) -> Inputs:
    inputs, douts = RMSNORM.make(rows, size, dtype)
    x = inputs["x"] * scale
    return {"dy": douts["y"], "x": x, "weight": inputs["weight"], "rstd": rstd_of(x)}


DX = Exercise(
    make=make_backward,
    outputs=lambda inputs: {"dx": torch.empty_like(inputs["x"])},
    formula=Formula("dx", parts=("dx",)),
    cases=cases(Case((5,), 257, FORMULA, options={"scale": 0.003}, note="small x")),
    reads=("dy", "x"),
    writes=("dx",),
    timed=((TIMED_ROWS,), LLAMA_HIDDEN),
    lesson=lambda inputs: partial(rmsnorm_backward, **inputs, need_dweight=False),
)

# ---- The weight's gradient


def make_dw(rows, size, dtype) -> Inputs:
    return chosen(make_backward(rows, size, dtype), "dy", "x", "rstd")


def with_weight(inputs: Inputs) -> Inputs:
    """Return the inputs with a weight of 1, on which its own gradient does not depend."""
    return inputs | {"weight": torch.ones_like(inputs["x"][0])}


def make_partial(inputs: Inputs) -> Parts:
    x = inputs["x"]
    # two for each of a GPU's processors
    n_programs = {ODD_ROWS: 5, TIMED_ROWS: 256}.get(len(x), PROGRAMS)
    return {"partial": torch.empty((n_programs, x.shape[-1]), device=DEVICE, dtype=torch.float32)}


LOOP = "Does each program's loop go on, in steps of tl.num_programs(0), until n_rows?"
DW = Exercise(
    make=make_dw,
    outputs=make_partial,
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
    writes=(),
    timed=((TIMED_ROWS,), LLAMA_HIDDEN),
    lesson=lambda inputs: partial(rmsnorm_backward, **with_weight(inputs)),
)

# ---- The norm of a sum


def make_residual(rows, size, dtype, **options) -> Inputs:
    inputs = make_forward(rows, size, dtype, **options)
    residual = RMSNORM.make(rows, size, dtype, seed=1)[0]["x"] * options.get("scale", 1.0)
    return {"x": inputs["x"], "residual": residual, **chosen(inputs, "weight", "eps")}


RESIDUAL = Exercise(
    make=make_residual,
    outputs=lambda inputs: {name: torch.empty_like(inputs["x"]) for name in ("h", "y")},
    formula=Formula("residual", "norm", parts=("h", "y")),
    cases=FORWARD.cases,
    reads=("x", "residual"),
    writes=("h", "y"),
    timed=((TIMED_ROWS,), LLAMA_HIDDEN),
    lesson=lambda inputs: (
        lambda: rmsnorm_forward(inputs["x"] + inputs["residual"], inputs["weight"], inputs["eps"])
    ),
)
