"""Exercise 9: the backward of SwiGLU, element by element.

    y = gate * sigmoid(gate) * up                       # the forward

Given dy = dL/dy, find the gradients of gate and up.  With s = sigmoid(gate) = 1 / (1 + exp(-gate)):

    dgate = dy * up * s * (1 + gate * (1 - s))
    dup   = dy * gate * s

Bytes per bf16 element: read dy, gate, up 6, write dgate, dup 4 = 10.  s is computed again: that
costs less than to read it.

What to write: the body of the kernel.  No element needs another one, so there are no rows.  The
tensors are lines of n numbers, and program i takes the numbers from i * BLOCK_SIZE on.

    python -m exercises.check swiglu_backward
"""

from kernel_support import tl, triton


@triton.jit
def swiglu_backward_kernel(
    dy_ptr,  # (n,), as are all others
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    n,
    BLOCK_SIZE: tl.constexpr,
):
    pass


def launch(dy, gate, up, dgate, dup, block_size=1024):
    """Write dgate and dup of dy, gate and up, all contiguous and of one shape."""
    n = gate.numel()
    swiglu_backward_kernel[(triton.cdiv(n, block_size),)](
        dy, gate, up, dgate, dup, n, BLOCK_SIZE=block_size, enable_fp_fusion=True
    )
