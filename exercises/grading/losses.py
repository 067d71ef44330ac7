"""The exercises around cross-entropy, from the subject that the contracts know."""

import math

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
from harness.benchmark.benchmark_specs import LLAMA_VOCAB
from harness.cli.device import DEVICE
from subjects import cross_entropy
from subjects.cross_entropy import ROWS

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


def cases(*more: Case) -> tuple[Case, ...]:
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


def numbers_of_rows(inputs: Inputs, *names: str) -> Parts:
    """Return an empty fp32 number a row, by name."""
    n_rows = len(inputs["logits"])
    return {name: torch.empty(n_rows, device=DEVICE, dtype=torch.float32) for name in names}


def lesson_forward(logits: torch.Tensor):
    targets = torch.zeros(len(logits), dtype=torch.long, device=DEVICE)
    return lambda: cross_entropy_forward(logits, targets)


FINITE = "With m = -inf before the loop, m - m_new is -inf - -inf = NaN: does m begin finite?"
HIDDEN = {"note": "a first chunk of -inf in every second row", "options": {"forbidden": CHUNK}}
ONLINE_SOFTMAX = Exercise(
    name="online_softmax",
    make=make_logits,
    others=lambda inputs: numbers_of_rows(inputs, "m", "d"),
    formula=Formula("loop", "softmax", "maximum", parts=("m", "d")),
    cases=cases(Case((6,), 193, FINITE, **HIDDEN)),
    lesson=lambda inputs: lesson_forward(inputs["logits"]),
    **OF_LOGITS,
)

# ---- The loss and its gradient


def make_loss(rows, V, dtype, **options) -> Inputs:
    """Return logits and targets, none of them ignored, and a gradient for each row's loss."""
    inputs = drawn(rows, V, dtype, **options)
    return inputs | {"targets": inputs["targets"].clamp(min=0)}


def lesson_of_both(dloss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor):
    """Return the lesson's forward and backward as one call."""

    def both():
        _, *saved = cross_entropy_forward(logits, targets, reduction="none")
        cross_entropy_backward(dloss, logits, targets, *saved)

    return both


CROSS_ENTROPY = Exercise(
    name="cross_entropy",
    make=make_loss,
    others=lambda inputs: numbers_of_rows(inputs, "m", "d", "loss"),
    writes=("dlogits",),
    formula=Formula("loop", "maximum", "loss", "gradient", parts=("m", "d", "loss", "dlogits")),
    split=cross_entropy.target_and_other_entries,
    cases=cases(),
    lesson=lambda inputs: lesson_of_both(**inputs),
    **OF_LOGITS | {"reads": ("logits", "logits")},
)

# ---- In place


def make_inplace(rows, V, dtype, ignore_index=-100, **options) -> Inputs:
    inputs = drawn(rows, V, dtype, ignore_index=ignore_index, **options)
    n_valid = (inputs["targets"] != ignore_index).sum().item()
    numbers = {"scale": 1 / max(n_valid, 1), "ignore_index": ignore_index}
    return chosen(inputs, "logits", "targets") | numbers


def target_and_other_entries(inputs: Inputs) -> dict[str, Parts]:
    return {"logits": cross_entropy.target_and_other_entries(inputs)["dlogits"]}


IGNORED = "ignore_index is another one here: is the target compared with that argument?"
CROSS_ENTROPY_INPLACE = Exercise(
    name="cross_entropy_inplace",
    make=make_inplace,
    others=lambda inputs: numbers_of_rows(inputs, "loss"),
    overwritten=("logits",),
    writes=("logits",),
    formula=Formula("valid", "loop", "loss", "inplace", parts=("loss", "logits")),
    split=target_and_other_entries,
    cases=cases(
        Case((6,), 75, IGNORED, note="ignore_index -1", options={"ignore_index": -1}),
        Case((6,), 75, IGNORED, note="ignore_index 3", options={"ignore_index": 3}),
    ),
    lesson=lambda inputs: lambda: cross_entropy_inplace(inputs["logits"], inputs["targets"]),
    **OF_LOGITS,
)

# ---- The softmax itself, fast


def softmax_compiled(logits: torch.Tensor):
    """Return torch.compile's softmax, which computes in fp32, as a call."""
    compiled = torch.compile(lambda t: torch.softmax(t, -1), dynamic=False)
    return lambda: compiled(logits)


SOFTMAX_FAST = Exercise(
    name="softmax_fast",
    make=make_logits,
    writes=("y",),
    formula=Formula("loop", "softmax", "softmax_fast", parts=("y",)),
    cases=cases(),
    lesson=lambda inputs: softmax_compiled(inputs["logits"]),
    opponent="torch.compile",
    to_beat=True,
    **OF_LOGITS,
)
