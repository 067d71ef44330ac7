"""Exercise 5: the gradient of RMSNorm for its weight, by partial sums.

    dweight[j] = sum over all rows of dy[row, j] * x[row, j] * rstd[row]

No program sees all rows.  If each program wrote its dy * x * rstd, to be summed later, it would
write more bytes than it read.  So there are few programs.  Each program adds up many rows in
registers, and stores one row of sums at its end.  Who calls `launch` adds up these few rows:
dweight = partial.sum(0).

Bytes per bf16 element: read dy 2, read x 2 = 4.  partial has a row for each program, not for each
row of x.

What to write: the body of the kernel.  Program i takes the rows i, i + P, i + 2 P, ... below
n_rows, where P = tl.num_programs(0), adds them up in fp32, and stores row i of partial.  A program
that has no row stores zeros.

    python -m exercises.check rmsnorm_dw
"""

from kernel_support import tl, triton


@triton.jit
def rmsnorm_dw_kernel(
    dy_ptr, dy_row_stride,  # (n_rows, n_cols)
    x_ptr, x_row_stride,  # (n_rows, n_cols)
    rstd_ptr,  # (n_rows,) fp32
    partial_ptr, partial_row_stride,  # (number of programs, n_cols) fp32
    n_rows,
    n_cols,
    BLOCK_SIZE: tl.constexpr,  # the first power of two >= n_cols
):  # fmt: skip
    pass


def launch(dy, x, rstd, partial):
    """Write the sums partial (P, n_cols) of dy and x (n_rows, n_cols), by P programs."""
    n_rows, n_cols = x.shape
    rmsnorm_dw_kernel[(partial.shape[0],)](
        dy, dy.stride(0),
        x, x.stride(0),
        rstd,
        partial, partial.stride(0),
        n_rows,
        n_cols,
        BLOCK_SIZE=triton.next_power_of_2(n_cols),
        enable_fp_fusion=True,
    )  # fmt: skip
