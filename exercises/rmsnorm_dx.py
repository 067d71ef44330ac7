"""Exercise 4: the gradient of RMSNorm for its input.

    x_hat = x * rstd;  y = x_hat * weight              # the forward, which kept rstd of each row

Given dy = dL/dy, find dx = dL/dx.  For one row of n_cols numbers:

    wdy = weight * dy                                  dL/dx_hat
    c1  = mean(wdy * x_hat)                            what x does through rstd; mean over n_cols
    dx  = rstd * (wdy - x_hat * c1)

rmsnorm_kernel.py derives these lines above its backward.

Bytes per bf16 element: read dy 2, read x 2, write dx 2 = 6.

What to write: the body of the kernel.  A program takes one row.  rstd[row] is one fp32 number.

    python -m exercises.check rmsnorm_dx
"""

from kernel_support import tl, triton


@triton.jit
def rmsnorm_dx_kernel(
    dy_ptr, dy_row_stride,  # (n_rows, n_cols)
    x_ptr, x_row_stride,  # (n_rows, n_cols)
    weight_ptr,  # (n_cols,)
    rstd_ptr,  # (n_rows,) fp32
    dx_ptr, dx_row_stride,  # (n_rows, n_cols)
    n_cols,
    BLOCK_SIZE: tl.constexpr,  # the first power of two >= n_cols
):  # fmt: skip
    pass


def launch(dy, x, weight, rstd, dx):
    """Write dx (n_rows, n_cols) of dy and x (n_rows, n_cols), by n_rows programs."""
    n_rows, n_cols = x.shape
    rmsnorm_dx_kernel[(n_rows,)](
        dy, dy.stride(0),
        x, x.stride(0),
        weight,
        rstd,
        dx, dx.stride(0),
        n_cols,
        BLOCK_SIZE=triton.next_power_of_2(n_cols),
        enable_fp_fusion=True,
    )  # fmt: skip
