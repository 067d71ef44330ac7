"""Exercise 6: maximum and denominator of a softmax in one pass over a row that fits no register.

    m = logits.max(-1);  d = (logits - m).exp().sum(-1)

A row of 128,256 logits is read in chunks of BLOCK_SIZE.  m and d are those of the chunks so far.
When a chunk brings a larger maximum, the sum so far is rescaled to it (README, lesson 4):

    m_new = max(m, max(chunk))
    d     = d * exp(m - m_new) + sum(exp(chunk - m_new))
    m     = m_new

Bytes per bf16 logit: read 2 = 2.  A second pass over the row would read them again.

What to write: the body of the kernel.  A program walks one row in a loop, and stores m and d.  The
last chunk may be shorter.  Some logits are -inf (words that are forbidden), sometimes those of a
whole chunk, never of a whole row.  exp(-inf - -inf) is NaN.

    python -m exercises.check online_softmax
"""

from kernel_support import tl, triton


@triton.jit
def online_softmax_kernel(
    logits_ptr, logits_row_stride,  # (n_rows, n_cols)
    m_ptr,  # (n_rows,) fp32
    d_ptr,  # (n_rows,) fp32
    n_cols,
    BLOCK_SIZE: tl.constexpr,  # columns of a chunk; n_cols may be larger or smaller
):  # fmt: skip
    pass


def launch(logits, m, d, block_size=4096):
    """Write m and d (n_rows,) of logits (n_rows, n_cols), by n_rows programs."""
    n_rows, n_cols = logits.shape
    online_softmax_kernel[(n_rows,)](
        logits, logits.stride(0),
        m,
        d,
        n_cols,
        BLOCK_SIZE=block_size,
        enable_fp_fusion=True,
    )  # fmt: skip
