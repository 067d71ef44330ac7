"""The exercises around RMSNorm, from the subject that the contracts know."""

from functools import partial

import torch

from exercises.grading.exercise import Case, Exercise, Inputs, Mistakes, Parts, chosen
from harness.benchmark.benchmark_specs import LLAMA_HIDDEN
from harness.cli.device import DEVICE
from kernel_support import triton
from rmsnorm_kernel import rmsnorm_backward, rmsnorm_forward, rmsnorm_reference
from subjects import rmsnorm
from subjects.rmsnorm import EPS, RMSNORM
from subjects.subject import run

BF16 = torch.bfloat16
TIMED_ROWS = 16_384
PROGRAMS = 4  # of dweight, in a small case
FORMULA = "Compare each line of the kernel with the docstring's mathematics."
STRIDES = (
    "A row has 64 columns here, but the next row begins later: does row r of each tensor begin at "
    "r * the stride of that tensor?"
)
MASK = (
    "The block is longer than the row: is there a mask on each load and each store, and does "
    "n_cols stand where the number of columns is meant?"
)
ONE_ROW = "Is a single row, or a single column, something else to the kernel?"
DTYPE = (
    "fp32 was right: is each loaded tensor converted by .to(tl.float32) before it is used, and is "
    "only the result rounded?"
)


def cases(*ragged: int) -> tuple[Case, ...]:
    """Return the cases of a kernel of rows."""
    first, *others = ragged
    return (
        Case((8,), 64, FORMULA),
        Case((8,), 64, STRIDES, gaps=True),
        Case((5,), first, MASK, gaps=True),
        *(Case((5,), size, MASK, gaps=True) for size in others),
        Case((1,), RMSNORM.ragged_sizes[0], ONE_ROW),
        Case((5,), first, DTYPE, dtype=BF16, gaps=True),
    )


def block_of(x: torch.Tensor) -> int:
    return triton.next_power_of_2(x.shape[-1])


def rstd_of(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / sqrt(mean(x * x) + eps) of each row, at least in fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.rsqrt(wide.pow(2).mean(-1) + EPS)


def named(wrong: Mistakes, part: str) -> Mistakes:
    """Return the mistakes of the subject's record that concern one part."""
    return {sentence: parts for sentence, parts in wrong.items() if part in parts}


# ---- The forward


def make_forward(rows, size, dtype) -> Inputs:
    inputs, _ = RMSNORM.make(rows, size, dtype)
    return inputs | {"eps": EPS}


def forward_answers(inputs: Inputs) -> Parts:
    return {"y": rmsnorm_reference(**inputs)}


def forward_mistakes(inputs: Inputs, right: Parts) -> Mistakes:
    x, weight = inputs["x"], inputs["weight"]
    mean = x.pow(2).mean(-1, keepdim=True)
    share = x.shape[-1] / block_of(x)
    known = rmsnorm.wrong_answers(inputs, {"y": torch.ones_like(x)}, {"dweight": weight})
    formulas = {
        "the mean divides by BLOCK_SIZE, where n_cols is meant": torch.rsqrt(mean * share + EPS),
        "the sum over the row is not divided by n_cols": torch.rsqrt(mean * x.shape[-1] + EPS),
        "sqrt where 1 / sqrt is meant": torch.sqrt(mean + EPS),
        "neither sqrt nor rsqrt: 1 / (mean + eps)": 1 / (mean + EPS),
        "the mean of x, not of x * x": torch.rsqrt(x.mean(-1, keepdim=True) + EPS),
    }
    mistakes = {sentence: {"y": x * rstd * weight} for sentence, rstd in formulas.items()}
    first = weight[:1]
    return (
        mistakes
        | named(known, "y")
        | {
            "every column is multiplied by the first weight": {"y": right["y"] / weight * first},
            "x and not x * rstd is multiplied by the weight": {"y": x * weight},
        }
    )


FORWARD = Exercise(
    make=make_forward,
    outputs=lambda inputs: {"y": torch.empty_like(inputs["x"])},
    answers=forward_answers,
    mistakes=forward_mistakes,
    cases=cases(257, 33, 5000),
    reads=("x",),
    writes=("y",),
    timed=((TIMED_ROWS,), LLAMA_HIDDEN),
    lesson=lambda inputs: partial(rmsnorm_forward, **inputs),
)

# ---- The backward


def make_backward(rows, size, dtype) -> Inputs:
    inputs, douts = RMSNORM.make(rows, size, dtype)
    return {"dy": douts["y"], **inputs, "rstd": rstd_of(inputs["x"])}


def backward_answers(inputs: Inputs) -> Parts:
    return run(RMSNORM, RMSNORM.reference, chosen(inputs, "x", "weight"), {"y": inputs["dy"]})


def known_mistakes(inputs: Inputs, part: str) -> Mistakes:
    """Return the mistakes of the subject's record that concern dx, or dweight."""
    given, douts = chosen(inputs, "x", "weight"), {"y": inputs["dy"]}
    return named(rmsnorm.wrong_answers(given, douts, backward_answers(inputs)), part)


def c1_of(wdy: torch.Tensor, x_hat: torch.Tensor) -> torch.Tensor:
    return (wdy * x_hat).mean(-1, keepdim=True)


def dx_mistakes(inputs: Inputs, right: Parts) -> Mistakes:
    dy, x, weight = inputs["dy"], inputs["x"], inputs["weight"]
    rstd = rstd_of(x)[:, None]
    x_hat, wdy = x * rstd, weight * dy
    c1 = c1_of(wdy, x_hat)
    n_cols, block = x.shape[-1], block_of(x)
    answers = {
        "c1 divides by BLOCK_SIZE, where n_cols is meant": rstd
        * (wdy - x_hat * c1 * n_cols / block),
        "c1 is the sum over the row, not divided by n_cols": rstd * (wdy - x_hat * c1 * n_cols),
        "the c1 term is added, where it is subtracted": rstd * (wdy + x_hat * c1),
        "x stands where x_hat = x * rstd is meant": rstd * (wdy - x * c1),
        "the last factor rstd is missing": wdy - x_hat * c1,
        "c1 lacks the weight": rstd * (wdy - x_hat * c1_of(dy, x_hat)),
        "c1 is not multiplied by x_hat": rstd * (wdy - c1),
        "every row takes rstd of row 0": rstd[:1] * (wdy - x * rstd[:1] * c1_of(wdy, x * rstd[:1])),
    }
    return known_mistakes(inputs, "dx") | {sentence: {"dx": dx} for sentence, dx in answers.items()}


DX = Exercise(
    make=make_backward,
    outputs=lambda inputs: {"dx": torch.empty_like(inputs["x"])},
    answers=lambda inputs: chosen(backward_answers(inputs), "dx"),
    mistakes=dx_mistakes,
    cases=cases(257, 33, 5000),
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


def dw_answers(inputs: Inputs) -> Parts:
    return chosen(backward_answers(with_weight(inputs)), "dweight")


def dw_mistakes(inputs: Inputs, right: Parts) -> Mistakes:
    dy, x = inputs["dy"], inputs["x"]
    rows = dy * x * rstd_of(x)[:, None]  # what each row adds
    n_rows, n_cols = rows.shape
    whole = n_rows - n_rows % PROGRAMS
    of_last = rows[PROGRAMS - 1 :: PROGRAMS].sum(0)
    answers = {
        "each program stores its last row alone: `=` where `+=` is meant": rows[-PROGRAMS:].sum(0),
        "each program adds its first row alone: there is no loop": rows[:PROGRAMS].sum(0),
        "dweight of the last program is missing": right["dweight"] - of_last,
        "every program adds all rows": PROGRAMS * right["dweight"],
        "the rows that the programs cannot share evenly are left out": rows[:whole].sum(0),
        "rstd is missing": (dy * x).sum(0),
        "dy is missing": (x * rstd_of(x)[:, None]).sum(0),
        "the sum is divided by n_cols": right["dweight"] / n_cols,
        "the sum is divided by n_rows": right["dweight"] / n_rows,
        "every row takes rstd of row 0": (dy * x * rstd_of(x)[0]).sum(0),
    }
    known = known_mistakes(with_weight(inputs), "dweight")
    return known | {sentence: {"dweight": dweight} for sentence, dweight in answers.items()}


def make_partial(inputs: Inputs) -> Parts:
    x = inputs["x"]
    n_programs = PROGRAMS if len(x) < TIMED_ROWS else 256  # two for each of a GPU's processors
    return {"partial": torch.empty((n_programs, x.shape[-1]), device=DEVICE, dtype=torch.float32)}


LOOP = "Does each program go on, by tl.num_programs(0), until n_rows?"
DW = Exercise(
    make=make_dw,
    outputs=make_partial,
    answers=dw_answers,
    mistakes=dw_mistakes,
    parts=lambda inputs, written: {"dweight": written["partial"].sum(0).to(inputs["x"].dtype)},
    cases=(
        Case((16,), 64, FORMULA),
        Case((16,), 64, STRIDES, gaps=True),
        Case((18,), 64, LOOP),
        Case((3,), 64, "Does a program without a row store zeros?"),
        Case((9,), 257, MASK, gaps=True),
        Case((40,), 1000, LOOP),
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


def make_residual(rows, size, dtype) -> Inputs:
    inputs = make_forward(rows, size, dtype)
    residual = RMSNORM.make(rows, size, dtype, seed=1)[0]["x"]
    return {"x": inputs["x"], "residual": residual, "weight": inputs["weight"], "eps": EPS}


def residual_answers(inputs: Inputs) -> Parts:
    h = inputs["x"] + inputs["residual"]
    return {"h": h, "y": rmsnorm_reference(h, inputs["weight"], EPS)}


def residual_mistakes(inputs: Inputs, right: Parts) -> Mistakes:
    x, residual, weight = inputs["x"], inputs["residual"], inputs["weight"]
    h = right["h"]
    of_x, of_residual = (rmsnorm_reference(t, weight, EPS) for t in (x, residual))
    mistakes = {
        "y is the norm of x alone, without the residual": {"y": of_x},
        "y is the norm of the residual alone, without x": {"y": of_residual},
        "the residual is added after the norm, where it is added before": {"y": of_x + residual},
        "rstd is that of x, where that of x + residual is meant": {
            "y": h * rstd_of(x)[:, None] * weight
        },
        "x, not x + residual, is multiplied by rstd": {"y": x * rstd_of(h)[:, None] * weight},
        "h is x, without the residual": {"h": x},
        "h is the residual, without x": {"h": residual},
        "h holds y, the norm, where the sum is meant": {"h": right["y"]},
        "y holds h, the sum, where its norm is meant": {"y": h},
        "x is multiplied by the residual, where they are added": {"h": x * residual},
    }
    of_h = {"x": h, "weight": weight, "eps": EPS}
    for sentence, parts in forward_mistakes(of_h, {"y": right["y"]}).items():
        mistakes.setdefault(sentence, parts)
    return mistakes


RESIDUAL = Exercise(
    make=make_residual,
    outputs=lambda inputs: {name: torch.empty_like(inputs["x"]) for name in ("h", "y")},
    answers=residual_answers,
    mistakes=residual_mistakes,
    cases=cases(257, 33, 5000),
    reads=("x", "residual"),
    writes=("h", "y"),
    timed=((TIMED_ROWS,), LLAMA_HIDDEN),
    lesson=lambda inputs: (
        lambda: rmsnorm_forward(inputs["x"] + inputs["residual"], inputs["weight"], EPS)
    ),
)
