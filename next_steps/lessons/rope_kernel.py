"""Rotary position embedding (RoPE) in Triton: q and k in one launch, in whatever layout they come.

    q * cos + rotate_half(q) * sin          and the same for k, where
    rotate_half(x) = torch.cat((-x[..., D/2:], x[..., :D/2]), -1)

q (B, n_q_heads, T, D) and k (B, n_k_heads, T, D), with fewer heads in k (grouped-query attention);
cos, sin (B, T, D), or (1, T, D) or (T, D) where all samples count their positions alike.  The maths
for one token and head, with x1, x2 the two halves of x, c1, c2 those of cos, s1, s2 those of sin:

    y1 = x1 * c1 - x2 * s1      (x1[j], x2[j]) is a point in a plane.  LLaMA has c1 = c2 = cos(a)
    y2 = x2 * c2 + x1 * s2      and s1 = s2 = sin(a), so y is x turned by the angle
                                a[j] = position * frequency[j].

Four multiplications for two elements: again a GPU only moves bytes.  Bytes read and written per
bf16 element of q and k, if each kernel reads its inputs once (cos and sin serve all heads, so they
do not count):

                eager                                                  fused          ratio
    forward     x * cos 4, -x2 2, cat 4, * sin 4, add 6          20    x, y   2+2   4     5.0
    backward    * cos 4, * sin 4, neg 2, pad both halves with
                zeros 8, add the three paths 12                  30    dy, dx 2+2   4     7.5
    both        28 kernels                                       50    2 kernels    8    6.25

The prediction: on tensors much larger than the GPU's cache, forward + backward is 6 times as fast.
(In a model eager moves 4 bytes more: its dq has lost the layout of q, and is copied before the
projection's backward.)

New ideas of Triton, after those of rmsnorm_kernel.py and cross_entropy_kernel.py:

1. A grid may have two (or three) dimensions: program_id(0) tells a program its token, program_id(1)
   its share of the heads.  The first counts to 2**31 - 1, the others to 65,535, so what grows with
   the data comes first.
2. One launch may serve several tensors.  A token's q and k are turned by the same angles: their
   program loads cos and sin once, and on short sequences, where launching takes longer than
   computing, there is one launch instead of two.
3. A kernel that gets the stride of every dimension needs no .contiguous().  Hugging Face's q is a
   transposed view of (B, T, heads, D) memory: what looks like (B, heads, T, D) is only another
   order of the strides.  Only the last dimension has to be adjacent, so that a thread can load 16
   bytes at once.
4. An argument may be a *tuple*.  Six tensors with their strides would be 22 arguments; as one tuple
   each, (pointer, strides...), they are six.  Triton takes a tuple apart when it compiles, so the
   GPU does not know of it.

Limits: fp16, bf16, fp32; q_rot and k_rot have the dtypes of q and k (eager makes them fp32 where
cos is fp32 and q is not); even D up to 4,096; all columns are turned, and x[j] with x[j + D/2], not
with its neighbour as in GPT-J; no gradient for cos and sin; no second derivative.  A last dimension
that is not adjacent is copied.  The halves of cos and sin may differ: with 40 heads, reading both
adds 1.3 % of bytes, fewer from a cache.  Eager rounds both products and their sum to bf16; here the
sum is rounded once, closer to float64.  The launchers refuse other tensors with a TypeError or a
ValueError.
"""

import functools
import itertools

import torch

import kernel_support as support
from kernel_support import FLOATS, tl, triton

MAX_HEAD_DIM = 4096


def rope_reference(q, k, cos, sin):
    """Eager RoPE, each operation as in Hugging Face's apply_rotary_pos_emb; also in float64."""
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # (B or 1, 1, T, D): the same for all heads

    def rotate_half(x):
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


# ---- The kernel: some heads of one token's q and k -------------------------------------------
#
# The forward is y1 = x1 * c1 - x2 * s1 and y2 = x2 * c2 + x1 * s2.  The backward: given dy = dL/dy,
# find dx = dL/dx.  x1 is in y1 and in y2, and so is x2:
#
#   dx1 = dy1 * c1 + dy2 * s2         that is   y1 = x1 * c1 - x2 * s1    with dy for x, -s2 for s1
#   dx2 = dy2 * c2 - dy1 * s1                   y2 = x2 * c2 + x1 * s2    with dy for x, -s1 for s2
#
# So the forward's kernel is the backward's too, with the halves of sin exchanged and negated.
# Where they are equal that is sin(-a) for sin(a): a rotation is undone, and its gradient turned
# back, by rotating the other way.
#
# T changes from batch to batch, and must not compile a kernel each time.


@triton.jit(do_not_specialize=["T"])
def _rope_kernel(
    q,  # (B, n_q_heads, T, D): its pointer, and the strides of samples, heads and tokens
    k,  # (B, n_k_heads, T, D), likewise
    cos,  # (B, T, D): its pointer, and the strides of samples and tokens
    sin,  # (B, T, D), likewise
    q_rot,  # as q
    k_rot,  # as k
    T,
    n_q_heads,
    n_k_heads,
    BACKWARD: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    BLOCK_HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # heads of q in a program
    BLOCK_K: tl.constexpr,
):
    # int64: a sample, a token or a head may begin beyond 2**31 elements.
    batch = (tl.program_id(0) // T).to(tl.int64)
    token = (tl.program_id(0) % T).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK_HALF)
    in_half = cols < HALF
    q_heads = group * BLOCK_Q + tl.arange(0, BLOCK_Q)
    k_heads = group * BLOCK_K + tl.arange(0, BLOCK_K)
    q_mask = (q_heads < n_q_heads)[:, None] & in_half[None, :]
    k_mask = (k_heads < n_k_heads)[:, None] & in_half[None, :]

    # All loads before the first store: the program waits for memory only once.
    q1, q2 = _load_halves(heads_of(q, batch, token, q_heads, cols), q_mask, HALF)
    k1, k2 = _load_halves(heads_of(k, batch, token, k_heads, cols), k_mask, HALF)
    c1, c2 = _load_halves(row_of(cos, batch, token, cols), in_half, HALF)
    s1, s2 = _load_halves(row_of(sin, batch, token, cols), in_half, HALF)
    c1, c2 = c1.to(tl.float32), c2.to(tl.float32)
    s1, s2 = s1.to(tl.float32), s2.to(tl.float32)
    if BACKWARD:
        s1, s2 = -s2, -s1

    q_ptrs = heads_of(q_rot, batch, token, q_heads, cols)
    _store_rotated(q_ptrs, q1, q2, c1, c2, s1, s2, q_mask, HALF)
    k_ptrs = heads_of(k_rot, batch, token, k_heads, cols)
    _store_rotated(k_ptrs, k1, k2, c1, c2, s1, s2, k_mask, HALF)


@triton.jit
def _store_rotated(y_ptrs, x1, x2, c1, c2, s1, s2, mask, HALF: tl.constexpr):
    # Converted here and not where they are loaded: bf16 takes 72 registers a thread then, not 80
    # (compiled for sm_90).
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    # x1 is (heads, HALF), c1 is (HALF,): [None, :] lets every head have it.
    y1 = x1 * c1[None, :] - x2 * s1[None, :]
    y2 = x2 * c2[None, :] + x1 * s2[None, :]
    tl.store(y_ptrs, y1.to(y_ptrs.dtype.element_ty), mask=mask)
    tl.store(y_ptrs + HALF, y2.to(y_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _load_halves(ptrs, mask, HALF: tl.constexpr):
    return tl.load(ptrs, mask=mask), tl.load(ptrs + HALF, mask=mask)


# The same program for torch.compile, which records numbers and tensors but no tuples.
@triton.jit(do_not_specialize=["T"])
def _rope_kernel_without_tuples(
    q_ptr, q_batch_stride, q_head_stride, q_token_stride,
    k_ptr, k_batch_stride, k_head_stride, k_token_stride,
    cos_ptr, cos_batch_stride, cos_token_stride,
    sin_ptr, sin_batch_stride, sin_token_stride,
    q_rot_ptr, q_rot_batch_stride, q_rot_head_stride, q_rot_token_stride,
    k_rot_ptr, k_rot_batch_stride, k_rot_head_stride, k_rot_token_stride,
    T,
    n_q_heads,
    n_k_heads,
    BACKWARD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    _rope_kernel(
        (q_ptr, q_batch_stride, q_head_stride, q_token_stride),
        (k_ptr, k_batch_stride, k_head_stride, k_token_stride),
        (cos_ptr, cos_batch_stride, cos_token_stride),
        (sin_ptr, sin_batch_stride, sin_token_stride),
        (q_rot_ptr, q_rot_batch_stride, q_rot_head_stride, q_rot_token_stride),
        (k_rot_ptr, k_rot_batch_stride, k_rot_head_stride, k_rot_token_stride),
        *(T, n_q_heads, n_k_heads, BACKWARD, HALF, BLOCK_HALF, BLOCK_Q, BLOCK_K),
    )


# Pointers (heads, BLOCK_HALF) to the first halves of a token's heads in q or k.
@triton.jit
def heads_of(tensor, batch, token, heads, cols):
    ptr, batch_stride, head_stride, token_stride = tensor
    ptr += batch * batch_stride + token * token_stride
    return ptr + heads[:, None] * head_stride + cols[None, :]


# Pointers (BLOCK_HALF,) to the first half of a token's row in cos or sin.
@triton.jit
def row_of(tensor, batch, token, cols):
    ptr, batch_stride, token_stride = tensor
    return ptr + batch * batch_stride + token * token_stride + cols


# ---- Launchers -------------------------------------------------------------------------------


def rope_forward(q, k, cos, sin):
    """Return q_rot and k_rot, laid out in memory as q (B, n_q_heads, T, D) and k are."""
    return _launch(q, k, cos, sin, False)


def rope_backward(dq_rot, dk_rot, cos, sin):
    """Return dq and dk, laid out in memory as dq_rot and dk_rot are."""
    return _launch(dq_rot, dk_rot, cos, sin, True)


def _results(q, k, cos, sin, backward):
    """The results, not yet written."""
    _check(q, k, cos, sin, backward)
    return support.output_like(q), support.output_like(k)


@support.operator(
    "tutorial::rope",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, bool backward) -> (Tensor, Tensor)",
    _results,
    # The order of the results' dimensions depends on the strides: they must be as traced.
    tags=(torch.Tag.needs_exact_strides,),
    launches_are_recordable=True,
)
def _launch(q, k, cos, sin, backward):
    q_rot, k_rot = _results(q, k, cos, sin, backward)
    (B, n_q_heads, T, D), n_k_heads = q.shape, k.shape[1]
    q, k = _adjacent(q, q_rot), _adjacent(k, k_rot)
    n_groups, options = _options(n_q_heads, n_k_heads, D // 2)
    tensors = (
        (q, *q.stride()[:3]),
        (k, *k.stride()[:3]),
        angles_of(cos),
        angles_of(sin),
        (q_rot, *q_rot.stride()[:3]),
        (k_rot, *k_rot.stride()[:3]),
    )
    kernel = _rope_kernel
    if support.recording.get():
        kernel, tensors = _rope_kernel_without_tuples, itertools.chain(*tensors)
    if B * T * n_groups > 0:
        with support.on_device_of(q):
            support.recordable(kernel)[(B * T, n_groups)](
                *tensors,
                T,
                n_q_heads,
                n_k_heads,
                BACKWARD=backward,
                HALF=D // 2,
                **options,
                enable_fp_fusion=True,
            )
    return q_rot, k_rot


def _adjacent(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return x with adjacent columns: x itself, or a copy in `out`, which the result overwrites."""
    return x if x.stride(3) == 1 else out.copy_(x.detach())


def angles_of(t: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Return cos or sin with adjacent columns, and the strides of samples and of tokens."""
    t = t if t.stride(-1) == 1 else t.contiguous()
    shared = t.ndim == 2 or t.shape[0] == 1  # all samples read one table
    return t, 0 if shared else t.stride(0), t.stride(-2)


@functools.cache  # what it computes takes the host as long as a launch
def _options(n_q_heads: int, n_k_heads: int, half: int) -> tuple[int, dict[str, int]]:
    """Return the number of groups of heads, and the options of a launch.

    A thread has 16 elements of each half of q.  LLaMA 3.1 8B's heads on an H200: 93 % of the copy
    rate at 32,768 tokens; nothing else was tried.
    """
    block_half = _next_power_of_2(half)
    n_heads = _next_power_of_2(max(n_q_heads, n_k_heads))
    share = max(1, n_heads * block_half // 2048)  # a program takes so small a share of the heads
    # -(-a // b) rounds up, as triton.cdiv does, which takes the host 2 us a call.
    block_q, block_k = (_next_power_of_2(-(-n // share)) for n in (n_q_heads, n_k_heads))
    n_groups = max(-(-n_q_heads // block_q), -(-n_k_heads // block_k))
    # At D = 128 that makes 4 warps, more threads than a half has columns: each loads the angles of
    # its own columns.  Fewer threads exchange them through shared memory, and wait for each other.
    warps = min(8, max(1, max(block_q, block_k) * block_half // 512))
    blocks = {"BLOCK_HALF": block_half, "BLOCK_Q": block_q, "BLOCK_K": block_k}
    return n_groups, {**blocks, "num_warps": warps}


def _next_power_of_2(n: int) -> int:
    """The first power of two >= n, and 1 for no heads at all (triton's gives 0)."""
    return 1 << max(n - 1, 0).bit_length()


def _check(q, k, cos, sin, backward: bool) -> None:
    """Refuse what the kernel cannot compute."""
    q_name, k_name = ("dq_rot", "dk_rot") if backward else ("q", "k")
    lengths = support.check_tensors(
        (q_name, q, FLOATS, ("B", "heads", "T", "D")),
        (k_name, k, FLOATS, ("B", "k_heads", "T", "D")),
        ("cos", cos, FLOATS, None),
        ("sin", sin, FLOATS, None),
    )
    B, T, D = lengths["B"], lengths["T"], lengths["D"]
    if D % 2 != 0 or not 2 <= D <= MAX_HEAD_DIM:
        given = f"{q_name} has shape {tuple(q.shape)}"
        allowed = f"(B, heads, T, D) with an even D from 2 to {MAX_HEAD_DIM:,}"
        raise ValueError(f"{given}, expected {allowed}: use rope_reference for longer heads.")
    for name, t in (("cos", cos), ("sin", sin)):
        if t.shape not in ((B, T, D), (1, T, D), (T, D)):
            given = f"{name} has shape {tuple(t.shape)}"
            expected = f"({B}, {T}, {D}), (1, {T}, {D}) or ({T}, {D})"
            raise ValueError(f"{given}, expected {expected}: {_advice(name, t, D)}.")


def _advice(name: str, t: torch.Tensor, D: int) -> str:
    """Say what angles of another shape probably are, and what to do with them."""
    width = t.shape[-1] if t.ndim > 0 else 0
    if 2 * width == D:
        half = "this is one column for two of q"
        neighbours = "if these are neighbours, as in GPT-J, no kernel is here"
        advice = f"pass torch.cat(({name}, {name}), -1)"
        return f"{half}; {neighbours}; if they are q[j] and q[j + {width}], {advice}"
    if 0 < width < D:
        parts = f"q[..., :{width}] and k[..., :{width}]"
        others = "and append the other columns to the results"
        return f"{width} of {D} columns are a partial rotation, for which pass {parts}, {others}"
    return "index it with position_ids first"


# ---- For autograd, and as a function ---------------------------------------------------------


class TritonRoPEFunction(torch.autograd.Function):
    """`TritonRoPEFunction.apply(q, k, cos, sin)`: the two launchers, connected to autograd."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            expected = "expected constants: RoPE has no gradient for them, .detach()."
            raise ValueError(f"cos or sin requires grad, {expected}")
        # Neither q nor k: a rotation's gradient does not depend on what it turns.
        ctx.save_for_backward(cos, sin)
        return rope_forward(q, k, cos, sin)

    @staticmethod
    def backward(ctx, dq_rot, dk_rot):
        support.refuse_second_derivative("The fused RoPE")
        dq, dk = rope_backward(dq_rot, dk_rot, *ctx.saved_tensors)
        return dq, dk, None, None


def triton_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """Drop-in replacement for transformers' apply_rotary_pos_emb.

    q, k are (B, heads, T, D), or, with unsqueeze_dim=2, (B, T, heads, D); cos and sin are
    (B, T, D), (1, T, D) or (T, D).
    """
    if unsqueeze_dim == 1:
        return TritonRoPEFunction.apply(q, k, cos, sin)
    if unsqueeze_dim == 2:
        rotated = TritonRoPEFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return tuple(x.transpose(1, 2) for x in rotated)
    expected = "expected 1 for (B, heads, T, D) or 2 for (B, T, heads, D)"
    raise ValueError(f"unsqueeze_dim is {unsqueeze_dim}, {expected}.")
