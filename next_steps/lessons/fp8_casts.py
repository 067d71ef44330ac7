"""RMSNorm and SwiGLU that write FP8: the cast costs one byte a number, and no pass of its own.

    y          = rmsnorm(x)                 quantize_rows(y)               rmsnorm_fp8
    y          = silu(gate) * up            quantize_rows(y)               swiglu_fp8
    dgate, dup = its gradients, and y       quantize_rows(dgate, dup), quantize_rows(y)
                                                                           swiglu_fp8_backward

A matrix product in FP8 takes codes and a scale for each row as its input (fp8_kernel.py).  A kernel
that only makes codes costs a pass over bf16 that another kernel wrote.  But the kernel that
computes a row has the row in registers, and the row's largest number is a reduction away.
Bytes moved per number of a row:

                     separate                                   fused
    RMSNorm          x, y 4; y, codes 3                    7    x, codes                       3
    SwiGLU           gate, up, y 6; y, codes 3             9    gate, up, codes                5
      its backward   dy, gate, up, dgate, dup, y 12;            dy, gate, up, 3 of codes
                     and 3 times 3                        21                                   9

The prediction: where moving bytes is all that takes time, 2.3, 1.8 and 2.3 times as fast.

A program takes one row, also of SwiGLU, because the numbers of a row share a scale.  The two
gradients lie side by side in one matrix (N, 2 I), with one scale a row.  So the gradient of gate
and up's common input is one product, and the gradient of their weights is one product.

The inputs' dtype is kept where the bf16 kernels keep it (x_hat, silu), because the weights were
trained with that rounding.  The last product is rounded once, to e4m3, and not to bf16 before.

Limits: those of fp8_kernel.py, and matrices of two dimensions; no autograd: fp8_layer.py has that.
"""

import torch
import torch.nn.functional as F

from kernel_support import FLOATS, check_tensors, on_device_of, operator, tl, triton
from next_steps.lessons.fp8_kernel import (
    Rows,
    adjacent_columns,
    check_matrices,
    empty_rows,
    magnitude_bits,
    quantize_rows_reference,
    scale_and_inverse,
    store_codes,
    warps_of_row,
)
from next_steps.lessons.swiglu_kernel import sigmoid_of, swiglu_gradients, swiglu_of

# SwiGLU, the best of 20 on an H200: the numbers of a row that a program of the backward holds at a
# time; the numbers of a thread in the backward, and in the forward.
CHUNK, NUMBERS_PER_THREAD, FORWARD_NUMBERS_PER_THREAD = 2048, 4, 16


# ---- In eager PyTorch --------------------------------------------------------------------------


def rmsnorm_fp8_reference(x, weight, eps):
    """Return RMSNorm of x (N, H) with weight (H,), as Rows; and rstd (N,) fp32."""
    x_wide = x.float()  # (N, H)
    rstd = torch.rsqrt(x_wide.pow(2).mean(1) + eps)  # (N,)
    x_hat = (x_wide * rstd[:, None]).to(x.dtype)
    return quantize_rows_reference(x_hat.float() * weight.float()), rstd


def swiglu_fp8_reference(gate, up):
    """Return silu(gate) * up of gate, up (N, I), as Rows."""
    return quantize_rows_reference(F.silu(gate).float() * up.float())


def swiglu_fp8_backward_reference(dy, gate, up):
    """Return [dgate | dup] (N, 2 I) of dy, gate, up (N, I), and silu(gate) * up, as Rows."""
    dy, wide, up_wide = dy.float(), gate.float(), up.float()  # (N, I)
    sigmoid = torch.sigmoid(wide)
    dgate = dy * up_wide * sigmoid * (1 + wide * (1 - sigmoid))
    dup = dy * (wide * sigmoid)
    return quantize_rows_reference(dgate, dup), swiglu_fp8_reference(gate, up)


# ---- RMSNorm: the kernel of rmsnorm_kernel.py up to the store ----------------------------------


@triton.jit
def _rmsnorm_fp8_kernel(
    x_ptr, x_row_stride,  # (n_rows, n_cols)
    w_ptr,  # (n_cols,)
    codes_ptr,  # (n_rows, n_cols), contiguous
    scales_ptr,  # (n_rows,) fp32
    rstd_ptr,  # (n_rows,) fp32
    n_cols,
    eps,
    BLOCK_SIZE: tl.constexpr,  # the first power of two >= n_cols
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride outgrows 32 bits
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)

    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    tl.store(rstd_ptr + row, rstd)
    x_hat = (x * rstd).to(x_ptr.dtype.element_ty).to(tl.float32)
    y = x_hat * w
    scale, inverse = scale_and_inverse(tl.max(magnitude_bits(y), axis=0))
    tl.store(scales_ptr + row, scale)
    store_codes(codes_ptr + row * n_cols, y * inverse, n_cols, BLOCK_SIZE)


# ---- SwiGLU: a program for each row, which holds it --------------------------------------------


@triton.jit
def _swiglu_fp8_fwd_kernel(
    gate_ptr, gate_row_stride,  # (n_rows, n_cols)
    up_ptr, up_row_stride,  # (n_rows, n_cols)
    codes_ptr,  # (n_rows, n_cols), contiguous
    scales_ptr,  # (n_rows,) fp32
    n_cols,
    BLOCK_SIZE: tl.constexpr,  # the first power of two >= n_cols
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    # a masked lane's silu(0) * 0 is 0, which is no maximum
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    y = swiglu_of(gate, sigmoid_of(gate), up, gate_ptr.dtype.element_ty)
    scale, inverse = scale_and_inverse(tl.max(magnitude_bits(y), axis=0))
    tl.store(scales_ptr + row, scale)
    store_codes(codes_ptr + row * n_cols, y * inverse, n_cols, BLOCK_SIZE)


# ---- SwiGLU's backward: two passes over a row, the second from the cache -----------------------
#
# Three inputs of 14,336 numbers take 84 KiB of registers as bf16, and three results 168 KiB as
# fp32.  A multiprocessor's 256 KiB hold one row, and no load runs while the results are stored.  So
# a program goes through its row in chunks, once for the maxima and once more for the codes.  The
# second pass reads 84 KiB that the first has just read.  The cache beside the registers still holds
# two such rows, and the GPU's cache more.


@triton.jit
def _swiglu_fp8_bwd_kernel(
    dy_ptr, dy_row_stride,  # (n_rows, n_cols)
    gate_ptr, gate_row_stride,  # (n_rows, n_cols)
    up_ptr, up_row_stride,  # (n_rows, n_cols)
    d_codes_ptr,  # (n_rows, 2 * n_cols), contiguous: [dgate | dup]
    d_scales_ptr,  # (n_rows,) fp32
    y_codes_ptr,  # (n_rows, n_cols), contiguous
    y_scales_ptr,  # (n_rows,) fp32
    n_cols,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_row_stride
    gate_ptr += row * gate_row_stride
    up_ptr += row * up_row_stride

    # 1. The largest of each place in a chunk; then of all places.
    d_amax = tl.zeros((CHUNK,), dtype=tl.int32)
    y_amax = tl.zeros((CHUNK,), dtype=tl.int32)
    for start in tl.range(0, n_cols, CHUNK):
        dgate, dup, y = _chunk(dy_ptr, gate_ptr, up_ptr, start, n_cols, "evict_last", CHUNK)
        d_amax = tl.maximum(d_amax, tl.maximum(magnitude_bits(dgate), magnitude_bits(dup)))
        y_amax = tl.maximum(y_amax, magnitude_bits(y))
    d_scale, d_inverse = scale_and_inverse(tl.max(d_amax, axis=0))
    y_scale, y_inverse = scale_and_inverse(tl.max(y_amax, axis=0))
    tl.store(d_scales_ptr + row, d_scale)
    tl.store(y_scales_ptr + row, y_scale)

    # 2. The same numbers again, and their codes.
    dgate_ptr = d_codes_ptr + row * 2 * n_cols
    dup_ptr = dgate_ptr + n_cols
    y_ptr = y_codes_ptr + row * n_cols
    for start in tl.range(0, n_cols, CHUNK):
        dgate, dup, y = _chunk(dy_ptr, gate_ptr, up_ptr, start, n_cols, "evict_first", CHUNK)
        left = n_cols - start
        store_codes(dgate_ptr + start, dgate * d_inverse, left, CHUNK)
        store_codes(dup_ptr + start, dup * d_inverse, left, CHUNK)
        store_codes(y_ptr + start, y * y_inverse, left, CHUNK)


@triton.jit
def _chunk(
    dy_ptr,
    gate_ptr,
    up_ptr,
    start,
    n_cols,
    hint: tl.constexpr,  # to the cache: is it needed again?
    CHUNK: tl.constexpr,
):
    cols = start + tl.arange(0, CHUNK)
    mask = cols < n_cols
    dy = tl.load(dy_ptr + cols, mask=mask, other=0.0, eviction_policy=hint).to(tl.float32)
    gate = tl.load(gate_ptr + cols, mask=mask, other=0.0, eviction_policy=hint).to(tl.float32)
    up = tl.load(up_ptr + cols, mask=mask, other=0.0, eviction_policy=hint).to(tl.float32)
    sigmoid = sigmoid_of(gate)
    dgate, dup = swiglu_gradients(dy, gate, sigmoid, up)
    return dgate, dup, swiglu_of(gate, sigmoid, up, gate_ptr.dtype.element_ty)


# ---- Launchers ---------------------------------------------------------------------------------


def rmsnorm_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[Rows, torch.Tensor]:
    """Return RMSNorm of x (N, H) with weight (H,), as Rows; and rstd (N,) fp32."""
    codes, scales, rstd = _launch_rmsnorm(x, weight, eps)
    return Rows(codes, scales), rstd


def _rmsnorm_results(x, weight, eps):
    """Return the results, not yet written."""
    check_matrices(("x", x, ("N", "H")))
    check_tensors(("x", x, FLOATS, ("N", "H")), ("weight", weight, FLOATS, ("H",)))
    rows = empty_rows(x, *x.shape)
    return *rows, torch.empty_like(rows.scales)  # rstd (N,) fp32


@operator(
    "tutorial::rmsnorm_fp8",
    "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    _rmsnorm_results,
)
def _launch_rmsnorm(x, weight, eps):
    codes, scales, rstd = _rmsnorm_results(x, weight, eps)
    n_rows, n_cols = x.shape
    x = adjacent_columns(x)
    block = triton.next_power_of_2(n_cols)
    if n_rows > 0:
        with on_device_of(x):
            _rmsnorm_fp8_kernel[(n_rows,)](
                x, x.stride(0),
                weight.contiguous(),
                codes,
                scales,
                rstd,
                n_cols,
                eps,
                BLOCK_SIZE=block,
                num_warps=warps_of_row(block),
                enable_fp_fusion=True,
            )  # fmt: skip
    return codes, scales, rstd


def swiglu_fp8(gate: torch.Tensor, up: torch.Tensor) -> Rows:
    """Return silu(gate) * up of gate, up (N, I), as Rows; they may be columns of a wider matrix."""
    return Rows(*_launch_forward(gate, up))


def _forward_results(gate, up):
    check_matrices(("gate", gate, ("N", "I")), ("up", up, ("N", "I")))
    return empty_rows(gate, *gate.shape)


@operator(
    "tutorial::swiglu_fp8_forward", "(Tensor gate, Tensor up) -> (Tensor, Tensor)", _forward_results
)
def _launch_forward(gate, up):
    rows = _forward_results(gate, up)
    n_rows, n_cols = gate.shape
    gate, up = adjacent_columns(gate), adjacent_columns(up)
    block = triton.next_power_of_2(n_cols)
    if n_rows > 0:
        with on_device_of(gate):
            _swiglu_fp8_fwd_kernel[(n_rows,)](
                gate, gate.stride(0),
                up, up.stride(0),
                rows.codes,
                rows.scales,
                n_cols,
                BLOCK_SIZE=block,
                num_warps=warps_of_row(block, FORWARD_NUMBERS_PER_THREAD),
                enable_fp_fusion=True,
            )  # fmt: skip
    return tuple(rows)


def swiglu_fp8_backward(dy, gate, up) -> tuple[Rows, Rows]:
    """Return [dgate | dup] (N, 2 I) of dy, gate, up (N, I), and silu(gate) * up (N, I), as Rows."""
    d_codes, d_scales, y_codes, y_scales = _launch_backward(dy, gate, up)
    return Rows(d_codes, d_scales), Rows(y_codes, y_scales)


def _backward_results(dy, gate, up):
    shape = "N", "I"
    check_matrices(("gate", gate, shape), ("up", up, shape), ("dy", dy, shape))
    n_rows, n_cols = gate.shape
    return *empty_rows(gate, n_rows, 2 * n_cols), *empty_rows(gate, n_rows, n_cols)


@operator(
    "tutorial::swiglu_fp8_backward",
    "(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_results,
)
def _launch_backward(dy, gate, up):
    results = _backward_results(dy, gate, up)
    n_rows, n_cols = gate.shape
    dy, gate, up = map(adjacent_columns, (dy, gate, up))
    chunk = min(triton.next_power_of_2(n_cols), CHUNK)
    if n_rows > 0:
        with on_device_of(gate):
            _swiglu_fp8_bwd_kernel[(n_rows,)](
                dy, dy.stride(0),
                gate, gate.stride(0),
                up, up.stride(0),
                *results,
                n_cols,
                CHUNK=chunk,
                num_warps=warps_of_row(chunk, NUMBERS_PER_THREAD),
                enable_fp_fusion=True,
            )  # fmt: skip
    return results
