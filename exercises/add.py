"""Exercise 1: add two vectors.

    c = a + b

A kernel is run by many programs at once, and each takes one block of numbers.  Program i takes the
numbers i * BLOCK_SIZE, i * BLOCK_SIZE + 1, ... and so on, BLOCK_SIZE of them.  The last program's
block may end behind the vectors.  A mask switches off the lanes that lie there.

Bytes per bf16 element: read a 2, read b 2, write c 2 = 6.

What to write: the body of the kernel, in place of `pass`.  docs/exercises.md has a picture of the
addresses and the mask.  Convert what you load by .to(tl.float32).  A store rounds by itself.

    python -m exercises.check add            # --hint, --hint 2, --hint 3
"""

from kernel_support import tl, triton


@triton.jit
def add_kernel(
    a_ptr,  # (n,), as are all others
    b_ptr,
    c_ptr,
    n,
    BLOCK_SIZE: tl.constexpr,
):
    pass


def launch(a, b, c, block_size=1024):
    """Write c of a and b, all contiguous and of one shape."""
    n = a.numel()
    add_kernel[(triton.cdiv(n, block_size),)](
        a, b, c, n, BLOCK_SIZE=block_size, enable_fp_fusion=True
    )
