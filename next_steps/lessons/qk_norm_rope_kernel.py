"""RMSNorm of each head of q and k, then RoPE, in one kernel: what Qwen3 does before attention.

    rope(rmsnorm(q, q_weight), rmsnorm(k, k_weight), cos, sin)      # each head is a row of its norm

q (B, n_q_heads, T, D) and k (B, n_k_heads, T, D) with fewer heads; q_weight and k_weight (D,): one
for all heads of q, one for all of k; cos, sin (B, T, D), or (1, T, D) or (T, D) where all samples
count their positions alike.  The maths for one token and head, with x1, x2 the two halves of x, and
likewise of the others; mean() runs over all D columns, which are both halves:

    rstd  = 1 / sqrt(mean(x * x) + eps)
    x_hat = x * rstd
    y1    = w1 * x_hat1 * c1 - w2 * x_hat2 * s1     c, s: cos and sin of the token's angles
    y2    = w2 * x_hat2 * c2 + w1 * x_hat1 * s2

    u1    = dy1 * c1 + dy2 * s2                     backward; derived above its kernel
    u2    = dy2 * c2 - dy1 * s1
    dx    = rstd * (u * w - x_hat * mean(u * w * x_hat))
    dw    = u * x_hat, summed over all tokens and heads

Bytes read and written per bf16 element of q and k, if each kernel reads its inputs once (cos, sin,
weights and one number per head do not count).  rmsnorm_kernel.py and rope_kernel.py have the
operations one by one:

                eager                        two kernels             fused              ratio
    forward     norm 36, rope 20      56     norm 4, rope 4    8     x, y       2+2     4    14.0
    backward    rope 30, norm 92     122     rope 4, norm 6   10     dy, x, dx  2+2+2   6    20.3
    both        76 kernels           178     8 kernels        18     3 kernels         10    17.8

The prediction: on tensors much larger than the GPU's cache, forward + backward is 17.8 times as
fast as eager, and 1.8 times as fast as the kernels of the two lessons one after the other.

New ideas of Triton, after those of rmsnorm_kernel.py and rope_kernel.py:

1. *One reduction over two tiles.*  The rotation needs the halves of a head apart, the norm's mean
   needs both.  The squares of two tiles (heads, D/2) are added element by element, in registers.
   Only then `tl.sum(..., axis=1)` adds the columns of each head, which lie in several threads.
2. *Two reductions at once.*  mean(u * w * x_hat) is rstd * mean(u * w * x).  In this form the
   backward's second sum over columns does not wait for rstd.
3. *Nothing is saved.*  The backward needs x anyway, and a whole head is in its registers.  So it
   computes rstd again, instead of writing one number per head in the forward and reading it back.
4. *The sum over heads comes last.*  dw adds up over tokens and heads.  Each thread adds to its own
   elements of a tile (heads, D/2), token after token.  A sum over heads crosses threads, so each
   program takes it once, at its end.  Frozen weights need no sum: then a program has one token.
5. *A program is for q or for k.*  All of its threads take the same branch.  All that belongs to q
   is one argument, a tuple that holds tuples, and so is all of k.
6. *A cap on registers.*  `maxnreg` limits the registers of a thread, so that a multiprocessor runs
   12 programs of the backward at once.  More loads are then on their way.

Limits: fp16, bf16, fp32; q_rot and k_rot have the dtypes of q and k (eager makes them fp32 where a
weight or cos is fp32); even D up to 4,096; all columns are turned, and x[j] with x[j + D/2]; no
gradient for cos and sin; no second derivative.  The gradients of both weights are computed if one
of them is needed.  A last dimension that is not adjacent is copied.  Eager rounds to bf16 after the
norm, the weight, both products and their sum; here each result is rounded once, closer to float64.
The launchers refuse other tensors with a TypeError or a ValueError.
"""

import functools

import torch

import kernel_support as support
from kernel_support import FLOATS, tl, triton
from next_steps.lessons.rope_kernel import MAX_HEAD_DIM, angles_of, heads_of, row_of


def qk_norm_rope_reference(q, k, q_weight, k_weight, eps, cos, sin):
    """Eager norm and RoPE, each operation as in Hugging Face's Qwen3Attention; also in float64."""
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # (B or 1, 1, T, D): the same for all heads

    def norm(x, weight):  # (B, heads, T, D), (D,)
        x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
        x_hat = x_wide * torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * x_hat.to(x.dtype)

    def rotate(x):
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * cos + torch.cat((-x2, x1), dim=-1) * sin

    return rotate(norm(q, q_weight)), rotate(norm(k, k_weight))


# ---- The forward: some heads of one token's q or k -------------------------------------------
#
# A program's share is BLOCK_HEADS heads.  The first n_q_blocks programs of a token have q's, the
# others k's.  T changes from batch to batch, and must not compile a kernel each time.


@triton.jit(do_not_specialize=["T"])
def _qk_norm_rope_fwd_kernel(
    q,  # (x, weight, y, n_heads): x and y each as heads_of takes them
    k,  # likewise
    cos,  # (B, T, D): its pointer, and the strides of samples and tokens
    sin,  # (B, T, D), likewise
    T,
    eps,
    n_q_blocks,
    HALF: tl.constexpr,  # D / 2
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    block = tl.program_id(1)
    if block < n_q_blocks:
        _forward(q, cos, sin, T, eps, block, HALF, BLOCK_HALF, BLOCK_HEADS)
    else:
        _forward(k, cos, sin, T, eps, block - n_q_blocks, HALF, BLOCK_HALF, BLOCK_HEADS)


@triton.jit
def _forward(
    tensors, cos, sin, T, eps, block, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    x, weight, y, n_heads = tensors
    batch, token = _place_of(tl.program_id(0), T)
    cols = tl.arange(0, BLOCK_HALF)
    heads, mask = _my_heads(block, n_heads, cols, HALF, BLOCK_HEADS)
    x1, x2 = _load_halves(heads_of(x, batch, token, heads, cols), mask, HALF)
    c1, c2 = _load_row(row_of(cos, batch, token, cols), cols, HALF)
    s1, s2 = _load_row(row_of(sin, batch, token, cols), cols, HALF)
    w1, w2 = _load_row(weight + cols, cols, HALF)

    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    rstd = tl.rsqrt(_sum_of_squares(x1, x2) / (2 * HALF) + eps)[:, None]
    n1, n2 = x1 * rstd * _for_heads(w1), x2 * rstd * _for_heads(w2)
    y1 = n1 * _for_heads(c1) - n2 * _for_heads(s1)
    y2 = n2 * _for_heads(c2) + n1 * _for_heads(s2)
    _store_halves(heads_of(y, batch, token, heads, cols), y1, y2, mask, HALF)


# (heads,).  The columns beyond HALF are 0 and add nothing.
@triton.jit
def _sum_of_squares(x1, x2):
    return tl.sum(x1 * x1 + x2 * x2, axis=1)


# ---- Where things lie ------------------------------------------------------------------------


# int64: a sample, a token or a head may begin beyond 2**31 elements.
@triton.jit
def _place_of(number, T):
    return (number // T).to(tl.int64), (number % T).to(tl.int64)


@triton.jit
def _my_heads(block, n_heads, cols, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    heads = block.to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    return heads, (heads < n_heads)[:, None] & (cols < HALF)[None, :]


# Lanes beyond a half hold 0, since a sum over columns reads them too.
@triton.jit
def _load_halves(ptrs, mask, HALF: tl.constexpr):
    return tl.load(ptrs, mask=mask, other=0.0), tl.load(ptrs + HALF, mask=mask, other=0.0)


@triton.jit
def _load_row(ptrs, cols, HALF: tl.constexpr):
    return _load_halves(ptrs, cols < HALF, HALF)


# As fp32 (1, HALF), which every head gets.  Until here, where it is used, bf16 takes half as many
# registers.
@triton.jit
def _for_heads(row):
    return row.to(tl.float32)[None, :]


@triton.jit
def _store_halves(ptrs, y1, y2, mask, HALF: tl.constexpr):
    tl.store(ptrs, y1.to(ptrs.dtype.element_ty), mask=mask)
    tl.store(ptrs + HALF, y2.to(ptrs.dtype.element_ty), mask=mask)


# ---- The backward: programs in a loop over tokens --------------------------------------------
#
# Given dy = dL/dy, find dx = dL/dx and dw = dL/dw.  Let n = w * x_hat, and u = dL/dn.  n1 is in y1
# and in y2, and so is n2:
#
#   y1 = n1 * c1 - n2 * s1    so    u1 = dy1 * c1 + dy2 * s2
#   y2 = n2 * c2 + n1 * s2          u2 = dy2 * c2 - dy1 * s1     the gradient is turned back
#
# What is left is RMSNorm's backward (rmsnorm_kernel.py derives it), of each head, with u for dy:
#
#   dw = u * x_hat, summed over tokens and heads
#   dx = rstd * (u * w - x_hat * mean(u * w * x_hat))       mean(u * w * x_hat)
#                                                                = rstd * mean(u * w * x)
#
# In the last form the mean does not wait for rstd: both sums over columns run at the same time.
#
# Which tokens a program adds up in dw, and in which order, is fixed.  So is the order in which the
# last kernel adds the programs' sums: a GPU gives the same bits every time.


@triton.jit(do_not_specialize=["n_tokens", "T"])
def _qk_norm_rope_bwd_kernel(
    q,  # (dy, x, weight, dx, n_heads, dw_partial_ptr): dy, x and dx each as heads_of takes them;
    k,  # likewise; dw_partial_ptr (n_programs, blocks, D) fp32, or None: not needed
    cos,  # (B, T, D): its pointer, and the strides of samples and tokens
    sin,  # (B, T, D), likewise
    n_tokens,  # B * T
    T,
    eps,
    n_q_blocks,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    block = tl.program_id(1)
    n_k_blocks = tl.num_programs(1) - n_q_blocks
    if block < n_q_blocks:
        _backward(q, cos, sin, n_tokens, T, eps, block, n_q_blocks, HALF, BLOCK_HALF, BLOCK_HEADS)
    else:
        block -= n_q_blocks
        _backward(k, cos, sin, n_tokens, T, eps, block, n_k_blocks, HALF, BLOCK_HALF, BLOCK_HEADS)


@triton.jit
def _backward(
    tensors, cos, sin, n_tokens, T, eps, block, n_blocks, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    dy, x, weight, dx, n_heads, dw_partial_ptr = tensors
    cols = tl.arange(0, BLOCK_HALF)
    heads, mask = _my_heads(block, n_heads, cols, HALF, BLOCK_HEADS)
    w1, w2 = _load_row(weight + cols, cols, HALF)
    dw1 = tl.zeros((BLOCK_HEADS, BLOCK_HALF), dtype=tl.float32)
    dw2 = tl.zeros((BLOCK_HEADS, BLOCK_HALF), dtype=tl.float32)
    for number in tl.range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        batch, token = _place_of(number, T)
        x1, x2 = _load_halves(heads_of(x, batch, token, heads, cols), mask, HALF)
        dy1, dy2 = _load_halves(heads_of(dy, batch, token, heads, cols), mask, HALF)
        c1, c2 = _load_row(row_of(cos, batch, token, cols), cols, HALF)
        s1, s2 = _load_row(row_of(sin, batch, token, cols), cols, HALF)

        x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
        dy1, dy2 = dy1.to(tl.float32), dy2.to(tl.float32)
        u1 = dy1 * _for_heads(c1) + dy2 * _for_heads(s2)
        u2 = dy2 * _for_heads(c2) - dy1 * _for_heads(s1)
        uw1, uw2 = u1 * _for_heads(w1), u2 * _for_heads(w2)
        rstd = tl.rsqrt(_sum_of_squares(x1, x2) / (2 * HALF) + eps)[:, None]
        mean = rstd * (tl.sum(uw1 * x1 + uw2 * x2, axis=1) / (2 * HALF))[:, None]
        x1, x2 = x1 * rstd, x2 * rstd  # x_hat from here on
        dx1, dx2 = rstd * (uw1 - x1 * mean), rstd * (uw2 - x2 * mean)
        _store_halves(heads_of(dx, batch, token, heads, cols), dx1, dx2, mask, HALF)
        if dw_partial_ptr is not None:  # nor are these lines compiled for frozen weights
            dw1 += u1 * x1
            dw2 += u2 * x2

    if dw_partial_ptr is not None:
        # Where eps is 0, lanes beyond the last head hold NaN: their x is 0, and so is their mean.
        dw1 = tl.sum(tl.where(mask, dw1, 0.0), axis=0)
        dw2 = tl.sum(tl.where(mask, dw2, 0.0), axis=0)
        row = tl.program_id(0) * n_blocks + block
        _store_halves(dw_partial_ptr + row * (2 * HALF) + cols, dw1, dw2, cols < HALF, HALF)


# Columns and the two weights in parallel, partial sums in a loop: a fixed order, unlike atomics.
@triton.jit(do_not_specialize=["n_programs"])
def _qk_norm_rope_dw_kernel(
    q,  # (dw_partial_ptr, dweight_ptr, blocks): (n_programs, blocks, n_cols) fp32, and (n_cols,)
    k,  # likewise
    n_programs,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _sum_partials(q, n_programs, n_cols, BLOCK_ROWS, BLOCK_COLS)
    else:
        _sum_partials(k, n_programs, n_cols, BLOCK_ROWS, BLOCK_COLS)


@triton.jit
def _sum_partials(tensors, n_programs, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    dw_partial_ptr, dweight_ptr, n_blocks = tensors
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
    for start in tl.range(0, n_programs * n_blocks, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n_programs * n_blocks)[:, None] & (cols < n_cols)[None, :]
        sums += tl.load(dw_partial_ptr + rows[:, None] * n_cols + cols[None, :], mask, other=0.0)
    dw = tl.sum(sums, axis=0)
    tl.store(dweight_ptr + cols, dw.to(dweight_ptr.dtype.element_ty), mask=cols < n_cols)


# ---- Launchers -------------------------------------------------------------------------------


def _forward_results(q, k, q_weight, k_weight, eps, cos, sin):
    """The forward's results, not yet written."""
    _check(q, k, q_weight, k_weight, cos, sin)
    return support.output_like(q), support.output_like(k)


@support.operator(
    "tutorial::qk_norm_rope_forward",
    "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, Tensor cos, Tensor sin)"
    " -> (Tensor, Tensor)",
    _forward_results,
    # The order of the results' dimensions depends on the strides: they must be as traced.
    tags=(torch.Tag.needs_exact_strides,),
)
def qk_norm_rope_forward(q, k, q_weight, k_weight, eps, cos, sin):
    """Return q_rot and k_rot, laid out in memory as q (B, n_q_heads, T, D) and k are.

    q_weight and k_weight are (D,); cos and sin (B, T, D), (1, T, D) or (T, D).
    """
    q_rot, k_rot = _forward_results(q, k, q_weight, k_weight, eps, cos, sin)
    (B, n_q_heads, T, D), n_k_heads = q.shape, k.shape[1]
    (n_q_blocks, n_k_blocks), options = _options(n_q_heads, n_k_heads, D // 2, capped=False)
    if B * T * (n_q_blocks + n_k_blocks) > 0:
        with support.on_device_of(q):
            _qk_norm_rope_fwd_kernel[(B * T, n_q_blocks + n_k_blocks)](
                (_strided(q), q_weight.contiguous(), _strided(q_rot), n_q_heads),
                (_strided(k), k_weight.contiguous(), _strided(k_rot), n_k_heads),
                angles_of(cos),
                angles_of(sin),
                T,
                eps,
                n_q_blocks,
                HALF=D // 2,
                **options,
                enable_fp_fusion=True,
            )
    return q_rot, k_rot


def _backward_results(dq_rot, dk_rot, q, k, q_weight, k_weight, eps, cos, sin, need_weights=True):
    """The backward's results, not yet written."""
    _check(q, k, q_weight, k_weight, cos, sin, dq_rot, dk_rot)
    dweights = [torch.empty_like(w) if need_weights else None for w in (q_weight, k_weight)]
    return support.output_like(q), support.output_like(k), *dweights


@support.operator(
    "tutorial::qk_norm_rope_backward",
    "(Tensor dq_rot, Tensor dk_rot, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, "
    "float eps, Tensor cos, Tensor sin, bool need_weights=True) -> Tensor[]",
    _backward_results,
    present=lambda dq_rot, dk_rot, q, k, q_weight, k_weight, eps, cos, sin, need_weights=True: (
        *(True, True),
        *(need_weights, need_weights),
    ),
    tags=(torch.Tag.needs_exact_strides,),
)
def qk_norm_rope_backward(
    dq_rot, dk_rot, q, k, q_weight, k_weight, eps, cos, sin, need_weights=True
):
    """Return dq, dk, dq_weight and dk_weight; the last two are None where they are not needed.

    dq and dk are laid out in memory as q (B, n_q_heads, T, D) and k are.  The weights' gradients
    are (D,), in the weights' dtypes.
    """
    dq, dk, dq_weight, dk_weight = _backward_results(
        dq_rot, dk_rot, q, k, q_weight, k_weight, eps, cos, sin, need_weights
    )
    (B, n_q_heads, T, D), n_k_heads = q.shape, k.shape[1]
    # fp32 would not fit into so few registers
    blocks, options = _options(n_q_heads, n_k_heads, D // 2, capped=q.element_size() == 2)
    n_blocks = sum(blocks)
    if B * T * n_blocks == 0:
        zeros = (None if t is None else t.zero_() for t in (dq_weight, dk_weight))
        return dq, dk, *zeros
    # Without dw nothing is added up, and a program has one token: then a GPU shares them best.
    n_programs, parts = B * T, [None, None]
    if need_weights:
        n_programs = min(B * T, max(1, _programs(q.device, options["num_warps"]) // n_blocks))
        sizes = ((n_programs, n, D) for n in blocks)
        parts = [q.new_empty(size, dtype=torch.float32) for size in sizes]
    q_weight, k_weight = q_weight.contiguous(), k_weight.contiguous()
    with support.on_device_of(q):
        _qk_norm_rope_bwd_kernel[(n_programs, n_blocks)](
            (_strided(dq_rot), _strided(q), q_weight, _strided(dq), n_q_heads, parts[0]),
            (_strided(dk_rot), _strided(k), k_weight, _strided(dk), n_k_heads, parts[1]),
            angles_of(cos),
            angles_of(sin),
            B * T,
            T,
            eps,
            blocks[0],
            HALF=D // 2,
            **options,
            enable_fp_fusion=True,
        )
        if need_weights:
            _qk_norm_rope_dw_kernel[(-(-D // DW_BLOCK["BLOCK_COLS"]), 2)](
                (parts[0], dq_weight, blocks[0]),
                (parts[1], dk_weight, blocks[1]),
                n_programs,
                D,
                **DW_BLOCK,
                enable_fp_fusion=True,
            )
    return dq, dk, dq_weight, dk_weight


def _strided(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return x with adjacent columns, and the strides of samples, heads and tokens."""
    strides = [stride if size > 1 else 0 for size, stride in zip(x.shape[:3], x.stride())]
    if x.stride(3) == 1 and 1 not in strides:  # Triton 3.6 forgets a 1 in a tuple of tuples
        return x, *strides
    x = x.detach().contiguous()
    return x, *x.stride()[:3]


DW_BLOCK = {"BLOCK_ROWS": 128, "BLOCK_COLS": 16, "num_warps": 8}  # not tuned


@functools.cache  # what it computes takes the host as long as a launch
def _options(n_q_heads: int, n_k_heads: int, half: int, capped: bool) -> tuple[tuple, dict]:
    """Return the numbers of blocks of heads in q and in k, and the options of a launch.

    A warp takes 512 elements of each half: 8 heads of Qwen3.  Measured on an H200 for Qwen3-8B's
    heads and 4 x 2,048 tokens, in % of the copy rate: forward 91, backward 88, with frozen weights
    95.  With two warps for the same heads: 85, 84, 87.
    """
    block_half = triton.next_power_of_2(half)
    n_heads = triton.next_power_of_2(max(n_q_heads, n_k_heads, 1))
    block_heads = max(1, min(n_heads, 512 // block_half))
    blocks = triton.cdiv(n_q_heads, block_heads), triton.cdiv(n_k_heads, block_heads)
    options = {"BLOCK_HALF": block_half, "BLOCK_HEADS": block_heads}
    options["num_warps"] = max(1, block_heads * block_half // 512)
    if capped and torch.version.hip is None:
        # So few registers a thread that PROGRAMS run at once.  Left alone, the compiler takes more,
        # and the backward has 80 % of the copy rate.
        options["maxnreg"] = 168
    return blocks, options


PROGRAMS = 12  # of a backward with dw, for each multiprocessor, if a program has one warp


def _programs(device: torch.device, num_warps: int) -> int:
    """Return the number of programs of a backward with dw, all blocks together."""
    if device.type != "cuda":
        return 4  # few enough to make the programs loop on a CPU too
    return PROGRAMS * support.n_multiprocessors(device) // num_warps


def _check(q, k, q_weight, k_weight, cos, sin, dq_rot=None, dk_rot=None) -> None:
    """Refuse what the kernels cannot compute."""
    lengths = support.check_tensors(
        ("q", q, FLOATS, ("B", "heads", "T", "D")),
        ("k", k, FLOATS, ("B", "k_heads", "T", "D")),
        ("q_weight", q_weight, FLOATS, ("D",)),
        ("k_weight", k_weight, FLOATS, ("D",)),
        ("cos", cos, FLOATS, None),
        ("sin", sin, FLOATS, None),
        ("dq_rot?", dq_rot, FLOATS, ("B", "heads", "T", "D")),
        ("dk_rot?", dk_rot, FLOATS, ("B", "k_heads", "T", "D")),
    )
    B, T, D = lengths["B"], lengths["T"], lengths["D"]
    if D % 2 != 0 or not 2 <= D <= MAX_HEAD_DIM:
        given = f"q has shape {tuple(q.shape)}"
        allowed = f"(B, heads, T, D) with an even D from 2 to {MAX_HEAD_DIM:,}"
        raise ValueError(f"{given}, expected {allowed}: use qk_norm_rope_reference.")
    for name, t in (("cos", cos), ("sin", sin)):
        if t.shape not in ((B, T, D), (1, T, D), (T, D)):
            given = f"{name} has shape {tuple(t.shape)}"
            expected = f"({B}, {T}, {D}), (1, {T}, {D}) or ({T}, {D})"
            raise ValueError(f"{given}, expected {expected}: index it with position_ids first.")


# ---- For autograd, and as a function ---------------------------------------------------------


class TritonQKNormRoPEFunction(torch.autograd.Function):
    """`TritonQKNormRoPEFunction.apply(q, k, q_weight, k_weight, eps, cos, sin)`: both launchers."""

    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, eps, cos, sin):
        if ctx.needs_input_grad[5] or ctx.needs_input_grad[6]:
            expected = "expected constants: RoPE has no gradient for them, .detach()."
            raise ValueError(f"cos or sin requires grad, {expected}")
        ctx.eps = eps
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        return qk_norm_rope_forward(q, k, q_weight, k_weight, eps, cos, sin)

    @staticmethod
    def backward(ctx, dq_rot, dk_rot):
        support.refuse_second_derivative("The fused norm and RoPE")
        *inputs, cos, sin = ctx.saved_tensors
        need_weights = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        dq, dk, dq_weight, dk_weight = qk_norm_rope_backward(
            dq_rot, dk_rot, *inputs, ctx.eps, cos, sin, need_weights
        )
        return dq, dk, dq_weight, dk_weight, None, None, None


def triton_qk_norm_rope(q, k, q_weight, k_weight, eps, cos, sin, unsqueeze_dim=1):
    """Return q and k, each head normalized and then turned, in place of Qwen3's three calls.

    q, k are (B, heads, T, D), or, with unsqueeze_dim=2, (B, T, heads, D); q_weight, k_weight are
    (D,); cos and sin are (B, T, D), (1, T, D) or (T, D).  The results are laid out as q and k are.

    Raises:
        TypeError: a tensor has another dtype or layout, or is no plain tensor.
        ValueError: a tensor has another shape or device, cos or sin requires a gradient, or
            unsqueeze_dim is neither 1 nor 2.
    """
    if unsqueeze_dim not in (1, 2):
        expected = "expected 1 for (B, heads, T, D) or 2 for (B, T, heads, D)"
        raise ValueError(f"unsqueeze_dim is {unsqueeze_dim}, {expected}.")
    if unsqueeze_dim == 1:
        return TritonQKNormRoPEFunction.apply(q, k, q_weight, k_weight, eps, cos, sin)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    rotated = TritonQKNormRoPEFunction.apply(q, k, q_weight, k_weight, eps, cos, sin)
    return tuple(x.transpose(1, 2) for x in rotated)
