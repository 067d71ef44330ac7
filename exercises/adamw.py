"""Exercise 11: a step of AdamW in one pass, in place.

    torch.optim.AdamW(...).step()                       # of one parameter

For each element, with g the gradient:

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = p * (1 - lr * weight_decay) - lr * (m / correction1) / (sqrt(v / correction2) + eps)

p's line takes the new m and v.  correction1 is 1 - beta1**step, and correction2 is 1 - beta2**step.

Bytes per bf16 parameter: read p, g, m, v 8, write p, m, v 6 = 14.

What to write: the body of the kernel.  Load the four, convert each to fp32, compute, and round each
result once, in its store.  In bf16 every rounding in between would lose a part of a small step.

    python -m exercises.check adamw
"""

from kernel_support import tl, triton


@triton.jit
def adamw_kernel(
    p_ptr,  # (n,), as are the next three; p, m and v are overwritten
    g_ptr,
    m_ptr,
    v_ptr,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    correction1,
    correction2,
    n,
    BLOCK_SIZE: tl.constexpr,
):
    pass


def launch(
    p, g, m, v, lr, beta1, beta2, eps, weight_decay, correction1, correction2, block_size=1024
):
    """Step p, m and v by the gradient g, all contiguous and of one shape."""
    n = p.numel()
    adamw_kernel[(triton.cdiv(n, block_size),)](
        p, g, m, v,
        lr, beta1, beta2, eps, weight_decay, correction1, correction2,
        n,
        BLOCK_SIZE=block_size,
        enable_fp_fusion=True,
    )  # fmt: skip
