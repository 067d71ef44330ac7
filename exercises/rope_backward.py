"""Exercise 10: the backward of the rotary position embedding, on a tensor with four strides.

    y1 = x1 * c1 - x2 * s1                              # the forward
    y2 = x2 * c2 + x1 * s2

x1 and x2 are the first and the second half of a head's D columns.  c1, c2 are the halves of the
token's row of cos, and s1, s2 those of sin.  The two halves of cos, or of sin, need not be equal.

Given dy = dL/dy, find dx = dL/dx.  x1 occurs in y1 and in y2, and so does x2:

    dx1 = dy1 * c1 + dy2 * s2
    dx2 = dy2 * c2 - dy1 * s1

Bytes per bf16 element: read dy 2, write dx 2 = 4.  All heads of a token share cos and sin.

What to write: the body of the kernel.  tl.program_id(0) counts the tokens of all samples, as
sample * T + token, and tl.program_id(1) the heads.  Adjacent are only the D columns of a head.

    python -m exercises.check rope_backward
"""

from kernel_support import tl, triton


@triton.jit
def rope_backward_kernel(
    dy_ptr, dy_sample_stride, dy_head_stride, dy_token_stride,  # (B, heads, T, D)
    cos_ptr, cos_token_stride,  # (T, D)
    sin_ptr, sin_token_stride,  # (T, D)
    dx_ptr, dx_sample_stride, dx_head_stride, dx_token_stride,  # (B, heads, T, D)
    T,
    HALF: tl.constexpr,  # D / 2
    BLOCK_HALF: tl.constexpr,  # the first power of two >= D / 2
):  # fmt: skip
    pass


def launch(dy, cos, sin, dx):
    """Write dx (B, heads, T, D) of dy (B, heads, T, D), by B * T x heads programs."""
    B, n_heads, T, D = dy.shape
    rope_backward_kernel[(B * T, n_heads)](
        dy, *dy.stride()[:3],
        cos, cos.stride(0),
        sin, sin.stride(0),
        dx, *dx.stride()[:3],
        T,
        HALF=D // 2,
        BLOCK_HALF=triton.next_power_of_2(D // 2),
        enable_fp_fusion=True,
    )  # fmt: skip
