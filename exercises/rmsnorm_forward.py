"""Exercise 3: the forward of RMSNorm, one program for each row.

    y = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

For one row of n_cols numbers:

    rstd = 1 / sqrt(mean(x * x) + eps)
    y    = x * rstd * weight

Bytes per bf16 element: read x 2, write y 2 = 4.  The weight is read once and stays in the cache.

What to write: the body of the kernel, in place of `pass`.  A program finds its row, loads it,
computes in fp32 and stores y.  A row may be shorter than BLOCK_SIZE, and between two rows there may
be a gap: row r of x begins at x_ptr + r * x_row_stride.

    python -m exercises.check rmsnorm_forward
"""

from kernel_support import tl, triton


@triton.jit
def rmsnorm_forward_kernel(
    x_ptr, x_row_stride,  # (n_rows, n_cols)
    weight_ptr,  # (n_cols,)
    y_ptr, y_row_stride,  # (n_rows, n_cols)
    n_cols,
    eps,
    BLOCK_SIZE: tl.constexpr,  # the first power of two >= n_cols
):  # fmt: skip
    pass


def launch(x, weight, eps, y):
    """Write y (n_rows, n_cols) of x (n_rows, n_cols) and weight (n_cols,), by n_rows programs."""
    n_rows, n_cols = x.shape
    rmsnorm_forward_kernel[(n_rows,)](
        x, x.stride(0),
        weight,
        y, y.stride(0),
        n_cols,
        eps,
        BLOCK_SIZE=triton.next_power_of_2(n_cols),
        enable_fp_fusion=True,
    )  # fmt: skip
