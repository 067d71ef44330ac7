"""Exercise 8: cross-entropy whose gradient replaces the logits, in one kernel.

    loss    = m - logits[target] + log(d)                        0 in an ignored row
    logits := (exp(logits - m) / d - one_hot(target)) * scale    zeros in an ignored row

The gradient of a mean is known in the forward, but for a factor that nearly always is 1.  So the
kernel reads a row once for m and d, and a second time, from the GPU's cache, to write the gradient
over the logits.  No tensor of their size is allocated.  A row is ignored if its target is
ignore_index (a prompt, padding).

Bytes per bf16 logit: read 2, write 2 = 4.  The second read finds the row in the cache.

What to write: the body of the kernel.  Each element is read before it is overwritten, also by other
threads of the program: mind the order of what you load and store (docs/exercises.md, Barriers).

    python -m exercises.check cross_entropy_inplace
"""

from kernel_support import tl, triton


@triton.jit
def cross_entropy_inplace_kernel(
    logits_ptr, logits_row_stride,  # (n_rows, n_cols): logits in, their gradient out
    targets_ptr,  # (n_rows,) int64
    loss_ptr,  # (n_rows,) fp32
    scale,  # 1 / number of rows that are not ignored
    ignore_index,
    n_cols,
    BLOCK_SIZE: tl.constexpr,  # columns of a chunk
):  # fmt: skip
    pass


def launch(logits, targets, scale, ignore_index, loss, block_size=4096):
    """Write loss (n_rows,), and over logits (n_rows, n_cols) their gradient, by n_rows programs."""
    n_rows, n_cols = logits.shape
    cross_entropy_inplace_kernel[(n_rows,)](
        logits, logits.stride(0),
        targets,
        loss,
        scale,
        ignore_index,
        n_cols,
        BLOCK_SIZE=block_size,
        enable_fp_fusion=True,
    )  # fmt: skip
