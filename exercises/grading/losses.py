"""The exercises around cross-entropy, from the subject that the contracts know."""

import math

import torch
import torch.nn.functional as F

from cross_entropy_kernel import (
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_inplace,
)
from exercises.grading.exercise import Case, Exercise, Inputs, Mistakes, Parts, chosen
from exercises.grading.norms import BF16, DTYPE, FORMULA, ONE_ROW
from harness.benchmark.benchmark_specs import LLAMA_VOCAB
from harness.cli.device import DEVICE
from subjects import cross_entropy
from subjects.cross_entropy import ROWS
from subjects.subject import run

CHUNK = 64  # columns, in a small case
IGNORED = -100
TIMED_ROWS = 4096
STRIDES = "Does row r of each tensor begin at r * the stride of that tensor?"
CHUNKS = (
    "The row has several chunks here, and the last one is shorter: does the loop reach n_cols, "
    "does each lane beyond n_cols load -inf, and is each store masked?"
)
RESCALED = "Is the sum so far rescaled when a later chunk brings a larger maximum?"
LARGE = "Is m subtracted before each exponential?"


def cases(*more: Case) -> tuple[Case, ...]:
    return (
        Case((6,), CHUNK, FORMULA),
        Case((6,), CHUNK, STRIDES, gaps=True),
        Case((6,), 4 * CHUNK, RESCALED, gaps=True),
        Case((6,), 193, CHUNKS, gaps=True),
        Case((5,), 31, CHUNKS, gaps=True),
        Case((1,), 1, ONE_ROW),
        Case((5,), 75, LARGE, options={"offset": 1000.0}, note="logits near 1,000"),
        *more,
        Case((5,), 193, DTYPE, dtype=BF16, gaps=True),
    )


# ---- Maximum and denominator


def make_logits(rows, V, dtype, forbidden=0, **options) -> Inputs:
    """Return logits, whose first `forbidden` columns are -inf in every second row."""
    logits = ROWS.make(rows, V, dtype, **options)[0]["logits"]
    logits[::2, :forbidden] = -math.inf
    return {"logits": logits}


def exponentials(logits: torch.Tensor) -> torch.Tensor:
    """Return exp(logits - the row's maximum), at least in fp32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide - wide.amax(-1, keepdim=True)).exp()


def softmax_answers(inputs: Inputs) -> Parts:
    logits = inputs["logits"]
    e = exponentials(logits)
    return {"m": logits.amax(-1).to(e.dtype), "d": e.sum(-1)}


def softmax_mistakes(inputs: Inputs, right: Parts) -> Mistakes:
    logits, (m, d) = inputs["logits"], right.values()
    chunks = logits.split(CHUNK, -1)
    maxima = torch.stack([chunk.amax(-1) for chunk in chunks])  # (chunks, n_rows)
    sums = torch.stack([exponentials(chunk).sum(-1) for chunk in chunks])
    so_far = maxima.cummax(0).values
    # what each chunk adds, with the maximum so far: right if it is rescaled later
    added = sums * (maxima - so_far).exp().nan_to_num()
    n_lanes = -logits.shape[-1] % CHUNK
    padded = F.pad(logits, (0, n_lanes))
    m_padded = padded.amax(-1)
    last = {"m": maxima[-1], "d": sums[-1]}
    return {
        "the sum so far is not rescaled when a chunk brings a larger maximum": {"d": added.sum(0)},
        "m and d are those of the last chunk alone: the loop keeps nothing": last,
        "m is that of the last chunk alone: tl.maximum with the m so far is missing": {
            "m": maxima[-1]
        },
        "m and d are those of the first chunk alone: there is no loop": {
            "m": maxima[0],
            "d": sums[0],
        },
        "each chunk's sum replaces the sum so far, where it is added": {"d": added[-1]},
        "lanes beyond the row load 0, where -inf is meant": {
            "m": m_padded,
            "d": (padded - m_padded[:, None]).exp().sum(-1),
        },
        "m is not subtracted before the exponential": {"d": logits.exp().sum(-1)},
        "d is the logarithm of the sum": {"d": d.log()},
        "d is 1 / the sum": {"d": 1 / d},
        "m is the mean, where the maximum is meant": {"m": logits.mean(-1)},
        "m and d are exchanged": {"m": d, "d": m},
    }


def of_rows(inputs: Inputs, *names: str) -> Parts:
    """Return an empty fp32 number a row, by name."""
    n_rows = len(inputs["logits"])
    return {name: torch.empty(n_rows, device=DEVICE, dtype=torch.float32) for name in names}


ONLINE_SOFTMAX = Exercise(
    make=make_logits,
    outputs=lambda inputs: of_rows(inputs, "m", "d"),
    answers=softmax_answers,
    mistakes=softmax_mistakes,
    cases=cases(
        Case(
            (6,),
            193,
            "With m = -inf before the loop, m - m_new is -inf - -inf = NaN: does m begin finite?",
            options={"forbidden": CHUNK},
            note="a first chunk of -inf in every second row",
        )
    ),
    block_size=CHUNK,
    reads=("logits",),
    writes=(),
    timed=((TIMED_ROWS,), LLAMA_VOCAB),
    lesson=lambda inputs: lesson_forward(inputs["logits"]),
)


def lesson_forward(logits: torch.Tensor):
    targets = torch.zeros(len(logits), dtype=torch.long, device=DEVICE)
    return lambda: cross_entropy_forward(logits, targets)


# ---- The loss and its gradient


def make_loss(rows, V, dtype, **options) -> Inputs:
    """Return logits and targets, none of them ignored, and a gradient for each row's loss."""
    inputs, douts = ROWS.make(rows, V, dtype, **options)
    return {
        "dloss": douts["loss"],
        "logits": inputs["logits"],
        "targets": inputs["targets"].clamp(min=0),
    }


def loss_answers(inputs: Inputs) -> Parts:
    exact = inputs["logits"].dtype == torch.float64
    eager = ROWS.reference if exact else ROWS.eager  # which converts logits to fp32
    return run(ROWS, eager, chosen(inputs, "logits", "targets"), {"loss": inputs["dloss"]})


def loss_formulas(logits: torch.Tensor, targets: torch.Tensor) -> Mistakes:
    """Return known mistakes of the loss alone."""
    target_logit = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    m, d = softmax_answers({"logits": logits}).values()
    first = logits[:, 0]
    losses = {
        "log(d) is missing from the loss": m - target_logit,
        "m is missing from the loss": d.log() - target_logit,
        "the target's logit is missing from the loss": m + d.log(),
        "the loss has the wrong sign": target_logit - m - d.log(),
        "d stands where log(d) is meant": m - target_logit + d,
        "the loss takes the logit of column 0, not of the target": m - first + d.log(),
        "the loss takes the target of row 0 in every row": m - logits[:, targets[0]] + d.log(),
    }
    statistics = {"m": m, "d": d}
    for sentence, parts in softmax_mistakes({"logits": logits}, statistics).items():
        if "chunk" in sentence or "lanes" in sentence:
            wrong = statistics | parts
            losses[sentence] = wrong["m"] - target_logit + wrong["d"].log()
    return {sentence: {"loss": loss} for sentence, loss in losses.items()}


def gradient_formulas(inputs: Inputs, scale: torch.Tensor | float, part: str) -> Mistakes:
    """Return known mistakes of the gradient alone, which is called `part`."""
    logits, targets = inputs["logits"], inputs["targets"]
    softmax = logits.softmax(-1)
    valid = (targets != IGNORED)[:, None]
    one_hot = F.one_hot(targets.clamp(min=0), logits.shape[-1])
    columns = torch.arange(logits.shape[-1], device=DEVICE, dtype=torch.int64)
    in_chunk = (columns % CHUNK == targets[:, None]).to(logits.dtype)
    e = exponentials(logits)
    gradients = {
        "the one-hot row is missing: the target's column lacks its - 1": softmax * scale,
        "the one-hot row is added, where it is subtracted": (softmax + one_hot) * scale,
        "exp(logits - m) is not divided by d": (e - one_hot) * scale,
        "the gradient is one_hot - softmax: the wrong sign": (one_hot - softmax) * scale,
        "the gradient is not multiplied by dloss, or scale": softmax - one_hot,
        "only exp(logits - m) / d is multiplied, not the one-hot row": softmax * scale - one_hot,
        "the target is compared with a column's place in its chunk, without `first`": (
            (softmax - in_chunk) * scale
        ),
        "every column but the target's is zero": -one_hot * (1 - softmax) * scale,
    }
    return {sentence: {part: t.where(valid, 0)} for sentence, t in gradients.items()}


def loss_mistakes(inputs: Inputs, right: Parts) -> Mistakes:
    scale = inputs["dloss"][:, None]
    known = cross_entropy.wrong_answers(
        chosen(inputs, "logits", "targets"), {"loss": inputs["dloss"]}, right
    )
    return {
        **loss_formulas(inputs["logits"], inputs["targets"]),
        **gradient_formulas(inputs, scale, "dlogits"),
        "every row takes dloss of row 0": {"dlogits": right["dlogits"] / scale * scale[:1]},
        **{sentence: parts for sentence, parts in known.items() if "ignored" not in sentence},
    }


CROSS_ENTROPY = Exercise(
    make=make_loss,
    outputs=lambda inputs: (
        of_rows(inputs, "loss", "m", "d") | {"dlogits": torch.empty_like(inputs["logits"])}
    ),
    answers=loss_answers,
    mistakes=loss_mistakes,
    parts=lambda inputs, written: chosen(written, "loss", "dlogits"),
    split=cross_entropy.target_and_other_entries,
    cases=cases(),
    block_size=CHUNK,
    reads=("logits", "logits"),
    writes=("dlogits",),
    timed=((TIMED_ROWS,), LLAMA_VOCAB),
    lesson=lambda inputs: lesson_of_both(**inputs),
)


def lesson_of_both(dloss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor):
    """Return the lesson's forward and backward as one call."""

    def both():
        _, *saved = cross_entropy_forward(logits, targets, reduction="none")
        cross_entropy_backward(dloss, logits, targets, *saved)

    return both


# ---- In place


def make_inplace(rows, V, dtype, **options) -> Inputs:
    inputs, _ = ROWS.make(rows, V, dtype, **options)
    targets = inputs["targets"]
    n_valid = (targets != IGNORED).sum().item()
    return {**inputs, "scale": 1 / max(n_valid, 1), "ignore_index": IGNORED}


def inplace_answers(inputs: Inputs) -> Parts:
    douts = torch.full_like(inputs["targets"], inputs["scale"], dtype=torch.float32)
    both = {**chosen(inputs, "logits", "targets"), "dloss": douts}
    answers = loss_answers(both)
    return {"loss": answers["loss"], "logits": answers["dlogits"]}


def inplace_mistakes(inputs: Inputs, right: Parts) -> Mistakes:
    logits, targets, scale = inputs["logits"], inputs["targets"], inputs["scale"]
    valid = targets != IGNORED
    gradient = right["logits"]
    m, d = softmax_answers(inputs).values()
    late = gradient.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    wrong = loss_formulas(logits, targets)
    wrong = {s: {"loss": parts["loss"].where(valid, 0)} for s, parts in wrong.items()}
    return {
        **wrong,
        **gradient_formulas(inputs, scale, "logits"),
        "the target's logit is loaded after the gradient has overwritten it": {
            "loss": (m - late + d.log()).where(valid, 0)
        },
        "the target is not compared with ignore_index": {
            "logits": gradient.where(valid[:, None], logits.softmax(-1) * scale)
        },
        "ignored rows keep their logits, where zeros are meant": {
            "logits": gradient.where(valid[:, None], logits)
        },
        "scale is multiplied twice": {"logits": gradient * scale},
        "the loss is multiplied by scale, which only the gradient is": {
            "loss": right["loss"] * scale
        },
    }


def target_and_other_entries(inputs: Inputs) -> dict[str, Parts]:
    return {"logits": cross_entropy.target_and_other_entries(inputs)["dlogits"]}


CROSS_ENTROPY_INPLACE = Exercise(
    make=make_inplace,
    outputs=lambda inputs: of_rows(inputs, "loss"),
    overwritten=("logits",),
    answers=inplace_answers,
    mistakes=inplace_mistakes,
    split=target_and_other_entries,
    cases=cases(),
    block_size=CHUNK,
    reads=("logits",),
    writes=("logits",),
    timed=((TIMED_ROWS,), LLAMA_VOCAB),
    lesson=lambda inputs: lambda: cross_entropy_inplace(inputs["logits"], inputs["targets"]),
)
