"""Exercise 2: scale each row and shift each column, in tiles of two dimensions.

    y = x * scale[:, None] + bias[None, :]

A program takes a tile of BLOCK_ROWS rows and BLOCK_COLS columns.  tl.program_id(0) counts the tiles
from top to bottom, tl.program_id(1) from left to right.  rows[:, None] and cols[None, :] make a
block of two dimensions of two of one dimension, as in PyTorch.

Bytes per bf16 element: read x 2, write y 2 = 4.  scale and bias are small.

What to write: the body of the kernel.  A tile may end below the last row and right of the last
column, and between two rows there may be a gap: row r of x begins at x_ptr + r * x_row_stride.

    python -m exercises.check tile
"""

from kernel_support import tl, triton


@triton.jit
def tile_kernel(
    x_ptr, x_row_stride,  # (n_rows, n_cols)
    scale_ptr,  # (n_rows,)
    bias_ptr,  # (n_cols,)
    y_ptr, y_row_stride,  # (n_rows, n_cols)
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    pass


def launch(x, scale, bias, y, block_rows=16, block_cols=128):
    """Write y (n_rows, n_cols) of x (n_rows, n_cols), scale (n_rows,) and bias (n_cols,)."""
    n_rows, n_cols = x.shape
    tile_kernel[(triton.cdiv(n_rows, block_rows), triton.cdiv(n_cols, block_cols))](
        x, x.stride(0),
        scale,
        bias,
        y, y.stride(0),
        n_rows,
        n_cols,
        BLOCK_ROWS=block_rows,
        BLOCK_COLS=block_cols,
        enable_fp_fusion=True,
    )  # fmt: skip
