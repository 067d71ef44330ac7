"""Rotary position embedding (RoPE) in Triton: q and k in one launch, in whatever layout they come.

    q * cos + rotate_half(q) * sin     and the same for k; rotate_half(x) = torch.cat((-x[..., D/2:], x[..., :D/2]), -1)

q (B, n_q_heads, T, D) and k (B, n_k_heads, T, D), with fewer heads in k (grouped-query attention); cos, sin (B, T, D),
or (1, T, D) or (T, D) where all samples count their positions alike.  The maths for one token and
head, with x1, x2 the two halves of x, c1, c2 those of cos and s1, s2 those of sin:

    y1 = x1 * c1 - x2 * s1          (x1[j], x2[j]) is a point in a plane.  LLaMA has c1 = c2 = cos(a), s1 = s2 = sin(a),
    y2 = x2 * c2 + x1 * s2          so y is x turned by the angle a[j] = position * frequency[j].

Four multiplications for two elements: again a GPU only moves bytes.  Bytes read and written per bf16 element of q and
k, if each kernel reads its inputs once (cos and sin serve all heads, and do not count):

                eager                                                              fused      ratio
    forward     x * cos 4, -x2 2, cat 4, * sin 4, add 6                       20   x, y   2+2   4     5.0
    backward    * cos 4, * sin 4, neg 2, pad both halves with zeros 8,
                add the three paths 12                                        30   dy, dx 2+2   4     7.5
    both        28 kernels                                                    50   2 kernels    8     6.25

The prediction: on tensors much larger than the GPU's cache, forward + backward is 6 times as fast.  (In a model eager
moves 4 bytes more: its dq has lost the layout of q, and is copied before the projection's backward.)

New ideas of Triton, after those of rmsnorm_kernel.py and cross_entropy_kernel.py:

1. A grid may have two (or three) dimensions: program_id(0) tells a program its token, program_id(1) its share of the
   heads.  The first counts to 2**31 - 1, the others to 65,535, so what grows with the data comes first.
2. One launch may serve several tensors.  A token's q and k are turned by the same angles: their program loads cos and
   sin once, and on short sequences, where launching takes longer than computing, there is one launch instead of two.
3. A kernel that gets the stride of every dimension needs no .contiguous().  Hugging Face's q is a transposed view of
   (B, T, heads, D) memory: what looks like (B, heads, T, D) is only another order of the strides.  Only the last
   dimension has to be adjacent, so that a thread can load 16 bytes at once.

Limits: fp16, bf16, fp32; q_rot and k_rot have the dtypes of q and k (eager makes them fp32 where cos
is fp32 and q is not); even D up to 4,096; all columns are turned, and x[j] with x[j + D/2], not with
its neighbour as in GPT-J; no gradient for cos and sin; no second derivative.  A last dimension that is
not adjacent is copied.  The halves of cos and sin may differ: with 40 heads, reading both adds 1.3 %
of bytes, fewer from a cache.  In place, q and k must not share elements.  Eager rounds both products
and their sum to bf16; here the sum is rounded once, closer to float64.
"""

import contextlib
import os

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # no GPU: run on the CPU; must precede `import triton`

import triton
import triton.language as tl

with contextlib.suppress(ModuleNotFoundError):  # beside this file; without it bf16 is truncated on a CPU
    import harness.interpreter_rounding  # noqa: F401

INTERPRETED = triton.knobs.runtime.interpret  # are the kernels below run on the CPU, by the interpreter?
MAX_HEAD_DIM = 4096


def rope_reference(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple:
    """Eager RoPE, operation for operation what Hugging Face's apply_rotary_pos_emb does; float64 stays float64."""
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # (B or 1, 1, T, D): the same for all heads

    def rotate_half(x):
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


# The backward.  Given dy = dL/dy, find dx = dL/dx.  x1 is in y1 = x1 * c1 - x2 * s1 and in y2 = x2 * c2 + x1 * s2:
#
#   dx1 = dy1 * c1 + dy2 * s2           that is   y1 = x1 * c1 - x2 * s1    with dy for x, -s2 for s1
#   dx2 = dy2 * c2 - dy1 * s1                     y2 = x2 * c2 + x1 * s2    with dy for x, -s1 for s2
#
# So the forward's kernel is the backward's too, with the halves of sin exchanged and negated.  Where they are equal
# that is sin(-a) for sin(a): a rotation is undone, and its gradient turned back, by rotating the other way.
#
# T changes from batch to batch, and must not compile a kernel each time.
@triton.jit(do_not_specialize=["T"])
def _rope_kernel(
    q_ptr, q_batch_stride, q_head_stride, q_token_stride,  # (B, n_q_heads, T, D); the columns are adjacent
    k_ptr, k_batch_stride, k_head_stride, k_token_stride,  # (B, n_k_heads, T, D)
    cos_ptr, cos_batch_stride, cos_token_stride,  # (B, T, D); batch stride 0: one table for all samples
    sin_ptr, sin_batch_stride, sin_token_stride,
    q_out_ptr, q_out_batch_stride, q_out_head_stride, q_out_token_stride,  # as q, or q itself
    k_out_ptr, k_out_batch_stride, k_out_head_stride, k_out_token_stride,
    T, n_q_heads, n_k_heads,
    BACKWARD: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # int64: a sample, a token or a head may begin beyond 2**31 elements.
    batch, token = (tl.program_id(0) // T).to(tl.int64), (tl.program_id(0) % T).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK_HALF)
    in_half = cols < HALF
    q_heads, k_heads = group * BLOCK_Q + tl.arange(0, BLOCK_Q), group * BLOCK_K + tl.arange(0, BLOCK_K)
    q_mask = (q_heads < n_q_heads)[:, None] & in_half[None, :]
    k_mask = (k_heads < n_k_heads)[:, None] & in_half[None, :]

    # All loads before the first store, which may be to the same memory: the program waits for memory only once.
    q_ptr += batch * q_batch_stride + token * q_token_stride
    q_tile = q_heads[:, None] * q_head_stride + cols[None, :]
    q1, q2 = tl.load(q_ptr + q_tile, mask=q_mask), tl.load(q_ptr + q_tile + HALF, mask=q_mask)
    k_ptr += batch * k_batch_stride + token * k_token_stride
    k_tile = k_heads[:, None] * k_head_stride + cols[None, :]
    k1, k2 = tl.load(k_ptr + k_tile, mask=k_mask), tl.load(k_ptr + k_tile + HALF, mask=k_mask)
    cos_ptr += batch * cos_batch_stride + token * cos_token_stride + cols
    c1, c2 = tl.load(cos_ptr, mask=in_half).to(tl.float32), tl.load(cos_ptr + HALF, mask=in_half).to(tl.float32)
    sin_ptr += batch * sin_batch_stride + token * sin_token_stride + cols
    s1, s2 = tl.load(sin_ptr, mask=in_half).to(tl.float32), tl.load(sin_ptr + HALF, mask=in_half).to(tl.float32)
    if BACKWARD:
        s1, s2 = -s2, -s1

    q_out_ptr += batch * q_out_batch_stride + token * q_out_token_stride
    q_tile = q_heads[:, None] * q_out_head_stride + cols[None, :]
    _store_rotated(q_out_ptr + q_tile, q1, q2, c1, c2, s1, s2, q_mask, HALF)
    k_out_ptr += batch * k_out_batch_stride + token * k_out_token_stride
    k_tile = k_heads[:, None] * k_out_head_stride + cols[None, :]
    _store_rotated(k_out_ptr + k_tile, k1, k2, c1, c2, s1, s2, k_mask, HALF)


@triton.jit
def _store_rotated(y_ptr, x1, x2, c1, c2, s1, s2, mask, HALF: tl.constexpr):
    # x1 is (heads, HALF), c1 is (HALF,): [None, :] lets every head have it.
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    y1 = x1 * c1[None, :] - x2 * s1[None, :]
    y2 = x2 * c2[None, :] + x1 * s2[None, :]
    tl.store(y_ptr, y1.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + HALF, y2.to(y_ptr.dtype.element_ty), mask=mask)


def _refuse_wrapper(name: str, t: torch.Tensor) -> None:
    """A wrapper such as DTensor has no memory of its own: at its data_ptr() lies nothing."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}, expected a tensor: wrap it in torch.tensor().")
    if is_traceable_wrapper_subclass(t):
        advice = "pass its to_local() or full_tensor()" if hasattr(t, "to_local") else "unwrap it"
        raise TypeError(f"{name} is a {type(t).__name__}, expected a plain tensor: {advice}.")


def _check(tensors: dict[str, torch.Tensor]) -> None:
    """Refuse what the kernel cannot compute, before any pointer is handed to it; of q, k, cos, sin in this order."""
    (q_name, q), (k_name, k), *angles = tensors.items()
    for name, t in tensors.items():
        if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
            _refuse_wrapper(name, t)
        if t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(f"{name} is {t.dtype}, expected float16, bfloat16 or float32: convert it first.")
        if t.layout is not torch.strided:
            raise TypeError(f"{name} is {t.layout}, expected torch.strided: pass its to_dense().")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}, expected {q_name}'s {q.device}: move it there.")
    if not q.is_cuda and not (INTERPRETED and q.is_cpu):
        expected = "a GPU: move it, or export TRITON_INTERPRET=1 for a CPU."
        raise ValueError(f"{q_name} is on {q.device}, expected {expected}")
    if q.ndim != 4 or q.shape[3] % 2 != 0 or not 2 <= q.shape[3] <= MAX_HEAD_DIM:
        allowed = f"(B, heads, T, D) with an even D from 2 to {MAX_HEAD_DIM:,}: use rope_reference for longer heads."
        raise ValueError(f"{q_name} has shape {tuple(q.shape)}, expected {allowed}")
    B, _, T, D = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[2], k.shape[3]) != (B, T, D):
        raise ValueError(f"{k_name} has shape {tuple(k.shape)}, expected ({B}, heads, {T}, {D}): fit it to {q_name}.")
    for name, t in angles:
        if t.shape not in ((B, T, D), (1, T, D), (T, D)):
            given = f"{name} has shape {tuple(t.shape)}"
            expected = f"({B}, {T}, {D}), (1, {T}, {D}) or ({T}, {D})"
            raise ValueError(f"{given}, expected {expected}: {_advice(name, t, D)}.")


def _advice(name: str, t: torch.Tensor, D: int) -> str:
    """What angles of another shape probably are, and what to do with them."""
    width = t.shape[-1] if t.ndim > 0 else 0
    if 2 * width == D:
        half = "this is one column for two of q; if these are neighbours, as in GPT-J, no kernel is here"
        return f"{half}; if they are q[j] and q[j + {width}], pass torch.cat(({name}, {name}), -1)"
    if 0 < width < D:
        parts = f"q[..., :{width}] and k[..., :{width}], and append the other columns to the results"
        return f"{width} of {D} columns are a partial rotation, for which pass {parts}"
    return "index it with position_ids first"


def _check_inplace(name: str, t: torch.Tensor) -> None:
    """Refuse what cannot be overwritten."""
    if t.stride(3) != 1 or any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape)):
        raise ValueError(f"{name} has strides {t.stride()}, expected to own every element: use inplace=False.")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad, expected none, autograd does not see inplace=True: use .detach().")


def _output_like(x: torch.Tensor) -> torch.Tensor:
    """Where to write: in x's order of the dimensions, if columns are the innermost."""
    out = torch.empty_like(x)
    if out.stride(3) != 1:  # x is not dense, or its columns are not the innermost in memory
        out = x.new_empty(x.shape)
    return out


def _in_and_out(x: torch.Tensor, inplace: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x with adjacent columns, and where to write.  A copy is its own output."""
    out = x if inplace else _output_like(x)
    return x if x.stride(3) == 1 else out.copy_(x.detach()), out


def _on_device_of(t: torch.Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current GPU, which need not be the one that holds the tensors."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


def _next_power_of_2(n: int) -> int:
    """The first power of two >= n, and 1 for no heads at all (triton's gives 0)."""
    return 1 << max(n - 1, 0).bit_length()


def _options(n_q_heads: int, n_k_heads: int, half: int) -> tuple[int, dict[str, int]]:
    """Number of groups of heads, and options of a launch.  A thread has 16 elements of each half of q.

    LLaMA 3.1 8B's heads on an H200: 93 % of the copy rate at 32,768 tokens; nothing else was tried.
    """
    block_half, n_heads = _next_power_of_2(half), _next_power_of_2(max(n_q_heads, n_k_heads))
    share = max(1, n_heads * block_half // 2048)  # a program takes so small a share of the heads
    # -(-a // b) rounds up, as triton.cdiv does, which takes the host 2 us a call.
    block_q, block_k = (_next_power_of_2(-(-n // share)) for n in (n_q_heads, n_k_heads))
    n_groups = max(-(-n_q_heads // block_q), -(-n_k_heads // block_k))
    # At D = 128 that makes 4 warps, more threads than a half has columns: each loads the angles of its own columns.
    # Fewer threads exchange them through shared memory, and wait for each other.
    warps = min(8, max(1, max(block_q, block_k) * block_half // 512))
    return n_groups, {"BLOCK_HALF": block_half, "BLOCK_Q": block_q, "BLOCK_K": block_k, "num_warps": warps}


def _names(backward: bool) -> tuple[str, ...]:
    """What the launcher's caller calls the tensors."""
    return ("dq_rot", "dk_rot", "cos", "sin") if backward else ("q", "k", "cos", "sin")


def _rotate(q, k, cos, sin, backward: bool, inplace: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Both launchers, which differ in the sign of the angle and in what the tensors are called."""
    names = _names(backward)
    _check(dict(zip(names, (q, k, cos, sin))))
    if inplace:
        _check_inplace(names[0], q)
        _check_inplace(names[1], k)
    (B, n_q_heads, T, D), n_k_heads = q.shape, k.shape[1]
    (q, q_out), (k, k_out) = _in_and_out(q, inplace), _in_and_out(k, inplace)
    cos, sin = ((t if t.stride(-1) == 1 else t.contiguous()).expand(B, T, D) for t in (cos, sin))
    n_groups, options = _options(n_q_heads, n_k_heads, D // 2)
    if B * T * n_groups > 0:
        with _on_device_of(q):
            _rope_kernel[(B * T, n_groups)](
                q, *q.stride()[:3], k, *k.stride()[:3], cos, *cos.stride()[:2], sin, *sin.stride()[:2],
                q_out, *q_out.stride()[:3], k_out, *k_out.stride()[:3], T, n_q_heads, n_k_heads,
                BACKWARD=backward, HALF=D // 2, **options,
            )  # fmt: skip
    if inplace:  # autograd cannot see what a kernel writes; told, it refuses uses of the old values
        torch.autograd.graph.increment_version([q, k])
    return q_out, k_out


# What torch.compile sees in place of the kernel, to which it would hand strides as it has traced them,
# not as it lays tensors out: an operator, whose body gets real tensors.  See rmsnorm_kernel.py.  The tag
# makes it lay them out as traced all the same: the order of the results' dimensions depends on them.
_operator = torch.library.custom_op(
    "tutorial::rope", _rotate, mutates_args=(), tags=(torch.Tag.needs_exact_strides,),
    schema="(Tensor q, Tensor k, Tensor cos, Tensor sin, bool backward) -> (Tensor, Tensor)",
)  # fmt: skip


@_operator.register_fake
def _(q, k, cos, sin, backward):
    _check(dict(zip(_names(backward), (q, k, cos, sin))))
    return _output_like(q), _output_like(k)


def _rotate_anywhere(q, k, cos, sin, backward: bool, inplace: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Also where torch.compile traces it."""
    if not torch.compiler.is_compiling():
        return _rotate(q, k, cos, sin, backward, inplace)
    rotated = _operator(q, k, cos, sin, backward)
    if not inplace:
        return rotated
    for name, t, result in zip(_names(backward), (q, k), rotated):
        _check_inplace(name, t)
        t.copy_(result)  # as the compiler sees it: a copy, which it may or may not make
    return q, k


def rope_forward(q, k, cos, sin, inplace: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q_rot and k_rot, laid out in memory as q (B, n_q_heads, T, D) and k are.

    inplace: q and k themselves, overwritten.  Raises TypeError or ValueError for what the kernel
    cannot take, or cannot overwrite.
    """
    return _rotate_anywhere(q, k, cos, sin, backward=False, inplace=inplace)


def rope_backward(dq_rot, dk_rot, cos, sin, inplace: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dq and dk, laid out in memory as dq_rot and dk_rot are.

    inplace: dq_rot and dk_rot themselves, overwritten.  Raises TypeError or ValueError for what the kernel
    cannot take, or cannot overwrite.
    """
    return _rotate_anywhere(dq_rot, dk_rot, cos, sin, backward=True, inplace=inplace)


class TritonRoPEFunction(torch.autograd.Function):
    """`TritonRoPEFunction.apply(q, k, cos, sin)`: the two launchers, connected to autograd."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            raise ValueError("cos or sin requires grad, expected constants: RoPE has no gradient for them, .detach().")
        ctx.save_for_backward(cos, sin)  # neither q nor k: a rotation's gradient does not depend on what it turns
        return rope_forward(q, k, cos, sin)

    @staticmethod
    def backward(ctx, dq_rot, dk_rot):
        if torch.is_grad_enabled():  # create_graph=True; `once_differentiable` would let the derivative vanish silently
            raise RuntimeError("The fused RoPE has no second derivative, which create_graph=True asks for.")
        dq, dk = rope_backward(dq_rot, dk_rot, *ctx.saved_tensors)  # never in place: others may hold dq_rot and dk_rot
        return dq, dk, None, None


def triton_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """Drop-in replacement for transformers' apply_rotary_pos_emb: q, k are (B, heads, T, D), or, with unsqueeze_dim=2,
    (B, T, heads, D); cos and sin are (B, T, D), (1, T, D) or (T, D)."""
    if unsqueeze_dim == 1:
        return TritonRoPEFunction.apply(q, k, cos, sin)
    if unsqueeze_dim == 2:
        q_rot, k_rot = TritonRoPEFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q_rot.transpose(1, 2), k_rot.transpose(1, 2)
    raise ValueError(f"unsqueeze_dim is {unsqueeze_dim}, expected 1 for (B, heads, T, D) or 2 for (B, T, heads, D).")
