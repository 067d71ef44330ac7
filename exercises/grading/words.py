"""What is said of each exercise: its lesson and its hints.  Imports no PyTorch, so that it is fast.

A hint names an idea, the next one the function of Triton, the third one the line.
"""

from typing import NamedTuple


class Words(NamedTuple):
    """One exercise, in words."""

    teaches: str
    lesson: str  # the solution: its file and function
    beyond: str  # what the lesson does that the exercise leaves out
    hints: tuple[str, str, str]


WORDS = {
    "rmsnorm_forward": Words(
        teaches="program, block, mask; a row's stride; fp32 inside, bf16 outside",
        lesson="rmsnorm_kernel.py, _rmsnorm_fwd_kernel",
        beyond=(
            "stores rstd for the backward, counts rows in int64, rounds x * rstd as PyTorch does"
        ),
        hints=(
            "A program is one row: tl.program_id(0). The row's columns are one block: "
            "tl.arange(0, BLOCK_SIZE). The mask says which of them exist: cols < n_cols.",
            "Load with tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0), and "
            "convert with .to(tl.float32). tl.sum(x * x, axis=0) is the sum over the row. The "
            "masked lanes added 0 to it, so the mean is the sum over n_cols.",
            "rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps), then tl.store(y_ptr + row * "
            "y_row_stride + cols, x * rstd * weight, mask=mask). The store rounds to y's dtype.",
        ),
    ),
    "rmsnorm_dx": Words(
        teaches="a gradient that needs a sum over the row (c1) beside what is elementwise",
        lesson="rmsnorm_kernel.py, _rmsnorm_bwd_kernel",
        beyond="computes dweight in the same pass, and each program loads its next rows early",
        hints=(
            "First load what belongs to the row: dy, x, weight and the one number rstd. Then c1, "
            "which is a mean over the row's n_cols columns. Then dx.",
            "rstd = tl.load(rstd_ptr + row) is one number. x_hat = x * rstd. c1 is tl.sum(...) / "
            "n_cols of weight * dy * x_hat. The masked lanes must add 0: other=0.0.",
            "c1 = tl.sum(weight * dy * x_hat, axis=0) / n_cols, then dx = rstd * (weight * dy - "
            "x_hat * c1), stored with dx's own stride and the mask.",
        ),
    ),
    "rmsnorm_dw": Words(
        teaches="a sum over rows: few programs, each in a loop, and partial sums in registers",
        lesson="rmsnorm_kernel.py, _rmsnorm_bwd_kernel and _rmsnorm_dw_kernel",
        beyond="computes dx in the same pass, and adds up the partial sums by a second kernel",
        hints=(
            "Begin with a block of zeros in fp32, add one row's dy * x * rstd in each turn of a "
            "loop, and store after the loop.",
            "total = tl.zeros((BLOCK_SIZE,), dtype=tl.float32). The loop is for row in "
            "range(tl.program_id(0), n_rows, tl.num_programs(0)).",
            "In the loop: total += dy * x * rstd, all three converted to fp32. After the loop: "
            "tl.store(partial_ptr + tl.program_id(0) * partial_row_stride + cols, total, "
            "mask=mask).",
        ),
    ),
    "online_softmax": Words(
        teaches="a loop that carries numbers from chunk to chunk; padding that changes no maximum",
        lesson="cross_entropy_kernel.py, _plain_fwd_kernel; for -inf _online_softmax",
        beyond="keeps m and d for each column of a tile, so that threads do not wait in the loop",
        hints=(
            "m and d are two ordinary variables before the loop. A chunk first makes the new m. "
            "Then the old d is rescaled to it, and the chunk's exponentials are added.",
            "Lanes beyond the row load other=-float('inf'): they change no maximum and add exp 0. "
            "But m itself must begin finite, or a first chunk of -inf gives -inf - -inf = NaN.",
            "m = -3.4e38 and d = 0.0 before the loop. In the loop: m_new = tl.maximum(m, "
            "tl.max(chunk)), then d = d * tl.exp(m - m_new) + tl.sum(tl.exp(chunk - m_new)), then "
            "m = m_new.",
        ),
    ),
    "cross_entropy": Words(
        teaches="a loss and its gradient from two numbers a row; reading again instead of keeping",
        lesson="cross_entropy_kernel.py, _plain_fwd_kernel and _plain_bwd_kernel",
        beyond="ignores rows, cuts rows at multiples of 16 bytes, and spares exponentials",
        hints=(
            "The forward is exercise 4, and at its end one more load: the logit of the target. "
            "The backward loops over the same chunks, with m and d loaded once before the loop.",
            "target = tl.load(targets_ptr + row) is a column, so the logit lies at logits_ptr + "
            "row * logits_row_stride + target. In the backward cols == target is the one-hot row.",
            "tl.where(cols == target, softmax - 1.0, softmax) * dloss with softmax = "
            "tl.exp(logits - m) / d, stored with dlogits' own stride.",
        ),
    ),
    "cross_entropy_inplace": Words(
        teaches="writing over what was read; the order of loads and stores; rows that do not count",
        lesson="cross_entropy_kernel.py, _cross_entropy_inplace_kernel",
        beyond=(
            "multiplies by a gradient other than 1 later, and has few programs so that the cache "
            "still holds the row"
        ),
        hints=(
            "Two loops: one for m and d, one that writes. What the loss needs of the logits must "
            "be loaded before the second loop, because after it the logits are gone.",
            "An ignored row does neither loop's work: it stores a loss of 0 and zeros over its "
            "logits. `if target == ignore_index:` is allowed, because target is one number.",
            "Load the target's logit before the second loop. There, load a chunk, then store "
            "tl.where(cols == target, softmax - 1.0, softmax) * scale at the same addresses, with "
            "the mask.",
        ),
    ),
    "swiglu_backward": Words(
        teaches="an elementwise kernel: no rows; computing again what the forward threw away",
        lesson="next_steps/lessons/swiglu_kernel.py, _swiglu_bwd_kernel",
        beyond=(
            "takes rows with gaps, writes over its inputs on request, and makes y again on the way"
        ),
        hints=(
            "A program's numbers are tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE). "
            "The mask is: below n.",
            "s = 1.0 / (1.0 + tl.exp(-gate)). tl.exp wants fp32: convert what you load. Then two "
            "lines and two stores.",
            "dgate = dy * up * s * (1.0 + gate * (1.0 - s)) and dup = dy * gate * s.",
        ),
    ),
    "rope_backward": Words(
        teaches="a grid of two dimensions; addresses made of several strides; no copy of a view",
        lesson="next_steps/lessons/rope_kernel.py, _rope_kernel",
        beyond=(
            "turns q and k in one launch, several heads a program, so that cos and sin load once"
        ),
        hints=(
            "sample = tl.program_id(0) // T and token = tl.program_id(0) % T. The head's first "
            "column lies at dy_ptr + sample * its stride + head * its stride + token * its "
            "stride.",
            "The first half is cols = tl.arange(0, BLOCK_HALF) with the mask cols < HALF, the "
            "second half lies HALF further. cos and sin depend on the token alone: token * "
            "cos_token_stride.",
            "dx1 = dy1 * c1 + dy2 * s2 is stored at cols, dx2 = dy2 * c2 - dy1 * s1 at cols + "
            "HALF, both with dx's own strides.",
        ),
    ),
    "adamw": Words(
        teaches="one pass for a whole formula, in place, rounded once",
        lesson="next_steps/lessons/adamw_kernel.py, _adamw_kernel and step_of",
        beyond="rounds at random on request, and reads lr and the count of steps on the GPU",
        hints=(
            "The addresses are those of exercise 7. All four loads come first. A result is stored "
            "to the address it came from.",
            "Convert all four with .to(tl.float32), and use the new m and v for p before they are "
            "rounded. The weight decay multiplies p, it is not added to the gradient.",
            "p = p * (1.0 - lr * weight_decay) - lr * (m / correction1) / (tl.sqrt(v / "
            "correction2) + eps). eps stands outside of the root.",
        ),
    ),
    "residual_norm": Words(
        teaches="fusing across two operations, and which rounding the backward sees",
        lesson="rmsnorm_kernel.py, _rmsnorm_fwd_kernel, after PyTorch's addition",
        beyond="is not fused with the addition: results/log.md says what that would gain in a step",
        hints=(
            "Exercise 1 with two loads in place of one, and two stores in place of one.",
            "Add in fp32, round the sum to h's dtype, and go on with the rounded number in fp32.",
            "h = (x + residual).to(h_ptr.dtype.element_ty).to(tl.float32), and from there on h "
            "stands where x stood in exercise 1.",
        ),
    ),
}


def page() -> str:
    """Return the table of docs/exercises.md."""
    rows = [
        f"| {number} | `{name}` | {words.teaches} |"
        for number, (name, words) in enumerate(WORDS.items(), start=1)
    ]
    return "\n".join(["| | exercise | what it teaches |", "|---:|---|---|", *rows])
