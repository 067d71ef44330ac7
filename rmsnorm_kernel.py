"""RMSNorm in Triton: read each row once, do everything else in registers.

    y = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))  # x (..., H), weight (H,)

The maths for one row; mean() runs over its H columns:

    rstd  = 1 / sqrt(mean(x * x) + eps)     forward; the one number per row that the backward needs
    x_hat = x * rstd
    y     = x_hat * w

    c1    = mean(w * dy * x_hat)            backward; derived above its kernel
    dx    = rstd * (w * dy - x_hat * c1)
    dw    = dy * x_hat, summed over all rows

That is a handful of multiplications per element, so a GPU spends the time moving bytes, not
computing.  Eager PyTorch runs it as 8 kernels forward and 16 backward; each reads its inputs from
memory and writes its result back.  Bytes read and written per element of a bf16 x (in between, the
eager formula works in fp32, 4 bytes):

                eager                                              fused              ratio
    forward     to fp32 6, pow 8, mean 4, * rstd 8, to bf16 6,
                * weight 4                                    36   x, y       2+2     4    9.0
    backward    weight, dw 12, to fp32 6, * rstd 24,
                mean and pow 32, add both paths 12, to bf16 6 92   dy, x, dx  2+2+2   6   15.3
    both                                                     128                     10   12.8

The prediction: on tensors much larger than the GPU's cache, forward + backward is about 12.8 times
as fast.

Four ideas of Triton, in the order in which the kernels need them:

1. A kernel is written as one *program*.  `kernel[(n_rows,)](...)` starts n_rows copies of it, in
   parallel and in no particular order; `tl.program_id(0)` tells a copy which one it is, and so
   which row is its own.
2. A program works on *blocks*.  `tl.arange(0, BLOCK_SIZE)` is BLOCK_SIZE numbers at once, so
   `tl.load` of a pointer plus that block is a whole row in one statement.  The values then stay in
   registers, the fastest memory there is, until `tl.store`.  Nothing in between touches memory:
   that is all "fused" means.
3. The length of a block is a power of two and a `tl.constexpr`: known when the kernel is compiled,
   once for each value.  Where H is no power of two the block is longer than the row, and a *mask*
   switches the surplus lanes off: they load `other` (0, which adds nothing to a sum) and store
   nothing.
4. A *persistent* grid has only as many programs as the GPU runs at once; each takes row after row
   in a loop.  What outlives a row (in the backward the weight, and the sum that becomes dw) stays
   in registers meanwhile.

Without a weight (elementwise_affine=False) y is x_hat, and there is no dw.

Limits: fp16, bf16, fp32; no second derivative; H up to 32,768, because one program holds a whole
row in its registers.  Above H = 16,384 (8,192 in fp32) the backward runs out of them and spills:
correct, but slower.  The launchers refuse other tensors with a TypeError or a ValueError.
"""

import torch

import kernel_support as support
from kernel_support import FLOATS, FP32, tl, triton

MAX_HIDDEN_SIZE = 32_768
MAX_DW_PARTIAL_BYTES = 8 * 2**20  # the backward's scratch buffer, however many rows there are


def rmsnorm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Eager RMSNorm, operation for operation Hugging Face's LlamaRMSNorm; float64 stays float64."""
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))  # (..., H) fp32
    variance = x_wide.pow(2).mean(-1, keepdim=True)  # (..., 1) fp32
    x_hat = x_wide * torch.rsqrt(variance + eps)  # (..., H) fp32
    x_hat = x_hat.to(x.dtype)
    return x_hat if weight is None else weight * x_hat  # (..., H)


# ---- The forward: a program for each row -----------------------------------------------------


@triton.jit
def _rmsnorm_fwd_kernel(
    x_ptr, x_row_stride,  # (n_rows, n_cols)
    w_ptr,  # (n_cols,); None: no weight
    y_ptr, y_row_stride,  # (n_rows, n_cols)
    rstd_ptr,  # (n_rows,) fp32
    n_cols,
    eps,
    BLOCK_SIZE: tl.constexpr,  # the first power of two >= n_cols
):  # fmt: skip
    # int64, because row * stride outgrows 32 bits, at H = 4096 from row 524,288 on.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    w = _load_weight(w_ptr, cols, mask)

    eps = tl.cast(eps, tl.float32)  # torch.compile passes it in fp64
    # Divide by n_cols, not BLOCK_SIZE: the masked lanes added 0 to the sum and must not count.
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    tl.store(rstd_ptr + row, rstd)

    # The reference's rounding order: x_hat is rounded to x's dtype before the weight multiplies it.
    # The product is formed in fp32 and rounded once, as PyTorch does with two bf16 factors.
    x_hat = (x * rstd).to(x_ptr.dtype.element_ty).to(tl.float32)
    y = x_hat * w
    tl.store(y_ptr + row * y_row_stride + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_weight(w_ptr, cols, mask):
    # A pointer may be None.  Triton knows when it compiles, and leaves out what a weight needs.
    return 1.0 if w_ptr is None else tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)


# ---- The backward: as many programs as run at once, each in a loop over rows -----------------
#
# Given dy = dL/dy, find dx = dL/dx and dw = dL/dw.  For column j of a row:
#
#   y_j = x_hat_j * w_j    so     wdy_j = dL/dx_hat_j = w_j * dy_j
#                          and    dw_j  = dy_j * x_hat_j, summed over the rows
#
#   x_hat_j = x_j * rstd depends on x_i twice: directly if i = j, and through rstd for every i:
#
#       d rstd / d x_i = -1/2 * (mean(x * x) + eps)^(-3/2) * 2 * x_i / H = -rstd^3 * x_i / H
#
#   dx_i = sum_j wdy_j * (d x_hat_j / d x_i)
#        = wdy_i * rstd - sum_j wdy_j * x_j * rstd^3 * x_i / H       now x * rstd = x_hat, twice
#        = rstd * (wdy_i - x_hat_i * c1)                             c1 = sum_j wdy_j * x_hat_j / H
#
# The forward rounds x_hat to x's dtype.  Here that counts as the identity, as it does in autograd,
# where `.to(dtype)` passes the gradient straight through: x_hat below is the unrounded one.
#
# dw needs every row, but a program sees one row at a time.  Writing dy * x_hat out to sum it later
# would cost more bytes than dx itself.  Instead each program adds up its rows in registers and
# writes one row of partial sums at its end; a second kernel adds those.  Which rows a program adds,
# and in which order, is fixed: a GPU gives the same bits every time.
#
# n_rows changes from batch to batch.  Triton compiles anew when an integer argument becomes 1, or
# becomes or stops being a multiple of 16, except for arguments named in do_not_specialize.


@triton.jit(do_not_specialize=["n_rows"])
def _rmsnorm_bwd_kernel(
    dy_ptr, dy_row_stride,  # (n_rows, n_cols)
    x_ptr, x_row_stride,  # (n_rows, n_cols)
    w_ptr,  # (n_cols,); None: no weight
    rstd_ptr,  # (n_rows,) fp32
    dx_ptr, dx_row_stride,  # (n_rows, n_cols)
    dw_partial_ptr,  # (n_programs, n_cols) fp32; None if there is no weight, or it is frozen
    n_rows,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    held = _load_weight(w_ptr, cols, mask)
    dw = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)

    # num_stages: while one row is computed, the loads of the next ones are already on their way.
    for row_number in tl.range(program, n_rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(row_number, tl.int64)
        dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)

        w = _held_or_loaded(held, w_ptr, cols, mask, "", BLOCK_SIZE)
        c1 = tl.sum(w * dy * x, axis=0) * rstd / n_cols
        x_hat = x * rstd
        if dw_partial_ptr is not None:  # nor is the next line compiled for a frozen weight
            dw += dy * x_hat
        # The hint also tells Triton that this is not the load above.
        w = _held_or_loaded(held, w_ptr, cols, mask, "evict_last", BLOCK_SIZE)
        dx = rstd * (w * dy - x_hat * c1)
        tl.store(dx_ptr + row * dx_row_stride + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)

    if dw_partial_ptr is not None:
        tl.store(dw_partial_ptr + program * n_cols + cols, dw, mask=mask)


# Beside a long row's dw there are no registers for w: it is loaded again, from the cache, wherever
# it is needed.  H = 16,384, 16,384 rows on an H200: 415 us, with w held 587.  Shorter rows are up
# to 6 % faster with w held.
@triton.jit
def _held_or_loaded(held, w_ptr, cols, mask, hint: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    w = held
    if w_ptr is not None and BLOCK_SIZE > 8192:
        w = tl.load(w_ptr + cols, mask=mask, other=0.0, eviction_policy=hint).to(tl.float32)
    return w


# Columns in parallel, partial sums in a loop: a fixed order, unlike atomics.
@triton.jit(do_not_specialize=["n_programs"])
def _rmsnorm_dw_kernel(
    dw_partial_ptr,  # (n_programs, n_cols) fp32
    dw_ptr,  # (n_cols,)
    n_programs,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
    for start in tl.range(0, n_programs, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        tile = dw_partial_ptr + rows[:, None] * n_cols + cols[None, :]
        mask = (rows < n_programs)[:, None] & (cols < n_cols)[None, :]
        sums += tl.load(tile, mask=mask, other=0.0)
    dw = tl.sum(sums, axis=0)
    tl.store(dw_ptr + cols, dw.to(dw_ptr.dtype.element_ty), mask=cols < n_cols)


# ---- Launchers -------------------------------------------------------------------------------


def _check(x: torch.Tensor, weight: torch.Tensor | None, dy=None, rstd=None) -> int:
    """Refuse what the kernels cannot compute; return the number of rows."""
    lengths = support.check_tensors(
        ("x", x, FLOATS, ("...", "H")),
        ("weight?", weight, FLOATS, ("H",)),
        ("dy?", dy, FLOATS, ("...", "H")),
        ("rstd?", rstd, FP32, ("n_rows",)),
    )
    if not 1 <= lengths["H"] <= MAX_HIDDEN_SIZE:
        allowed = f"(..., H) with H from 1 to {MAX_HIDDEN_SIZE:,}: use rmsnorm_reference."
        raise ValueError(f"x has shape {tuple(x.shape)}, expected {allowed}")
    return lengths["n_rows"]


def _forward_results(x, weight, eps):
    """The forward's results, not yet written."""
    n_rows = _check(x, weight)
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)  # (..., H)
    rstd = x.new_empty(n_rows, dtype=torch.float32)  # (n_rows,) fp32
    return y, rstd


@support.operator(
    "tutorial::rmsnorm_forward",
    "(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)",
    _forward_results,
    launches_are_recordable=True,
)
def rmsnorm_forward(x, weight, eps):
    """Return y (..., H), in the dtype that PyTorch gives weight * x, and rstd (n_rows,) fp32.

    x is (..., H).  weight is (H,) or None.
    """
    y, rstd = _forward_results(x, weight, eps)
    rows, row_stride = support.as_rows(x)
    n_rows, H = rstd.numel(), x.shape[-1]
    if n_rows > 0:
        with support.on_device_of(x):
            support.recordable(_rmsnorm_fwd_kernel)[(n_rows,)](
                rows, row_stride,
                None if weight is None else weight.contiguous(),
                y, H,
                rstd,
                H,
                eps,
                **_options(H),
                # One instruction for a * b + c.  From Triton 3.10 on a launch has to ask for it.
                enable_fp_fusion=True,
            )  # fmt: skip
    return y, rstd


def _backward_results(dy, x, weight, rstd, need_dweight=True):
    """The backward's results, not yet written."""
    _check(x, weight, dy, rstd)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)  # (..., H)
    return dx, torch.empty_like(weight) if need_dweight and weight is not None else None


@support.operator(
    "tutorial::rmsnorm_backward",
    "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, bool need_dweight=True) -> Tensor[]",
    _backward_results,
    present=lambda dy, x, weight, rstd, need=True: (True, need and weight is not None),
    launches_are_recordable=True,
)
def rmsnorm_backward(dy, x, weight, rstd, need_dweight=True):
    """Return dx (..., H) in x's dtype and dweight (H,) in weight's, or None where it is not needed.

    dy is (..., H).  x and weight are the forward's arguments, rstd is its result.
    """
    dx, dweight = _backward_results(dy, x, weight, rstd, need_dweight)
    n_rows, H = rstd.numel(), x.shape[-1]
    if n_rows == 0:
        return dx, None if dweight is None else dweight.zero_()
    dy_rows, dy_row_stride = support.as_rows(dy)
    x_rows, x_row_stride = support.as_rows(x)
    n_programs, stages = _backward_options(H, H * (dy.element_size() + x.element_size()), x.device)
    n_programs = min(n_rows, n_programs)
    options = _options(H)
    if weight is None and H > 2048:  # with fewer warps sm_103 spills 2 to 6 registers; not tuned
        options["num_warps"] = 8 if H <= 4096 else 16
    dw_partial = None  # (n_programs, H) fp32
    if dweight is not None:
        dw_partial = x.new_empty((n_programs, H), dtype=torch.float32)
    with support.on_device_of(x):
        support.recordable(_rmsnorm_bwd_kernel)[(n_programs,)](
            dy_rows, dy_row_stride,
            x_rows, x_row_stride,
            None if weight is None else weight.contiguous(),
            rstd.contiguous(),
            dx, H,
            dw_partial,
            n_rows,
            H,
            STAGES=stages,
            **options,
            enable_fp_fusion=True,
        )  # fmt: skip
        if dweight is not None:
            # On an H200 at H = 4096: 7.4 us; with 64 x 32: 11.6 us.
            block = {"BLOCK_ROWS": 64, "BLOCK_COLS": 16}
            support.recordable(_rmsnorm_dw_kernel)[((H + 15) // 16,)](
                dw_partial, dweight, n_programs, H, **block, enable_fp_fusion=True
            )
    return dx, dweight


def _options(H: int) -> dict[str, int]:
    """Of both kernels.  A warp is 32 threads: from H = 4,096 on each has 32 values of a row."""
    num_warps = 4 if H <= 4096 else 8 if H <= 8192 else 16
    return {"BLOCK_SIZE": 1 << (H - 1).bit_length(), "num_warps": num_warps}


def _backward_options(H: int, row_bytes: int, device: torch.device) -> tuple[int, int]:
    """Number of programs, and of stages: how many rows of a program, up to 3, are on their way.

    All together, 64 KiB of rows are on their way to a multiprocessor.
    """
    if device.type != "cuda":
        return 4, 1  # few enough to make the programs loop on a CPU too
    per_processor = 4 if H <= 2048 else 2 if H <= 4096 else 1
    n_programs = per_processor * support.n_multiprocessors(device)
    row_share = per_processor * row_bytes / 2**16
    stages = 1 if H > 8192 else 4 if 3 * row_share <= 1 else 3 if 2 * row_share <= 1 else 2
    return min(n_programs, MAX_DW_PARTIAL_BYTES // (4 * H)), stages


# ---- For autograd, and as a module -----------------------------------------------------------


class TritonRMSNormFunction(torch.autograd.Function):
    """`TritonRMSNormFunction.apply(x, weight, eps)`: the two launchers, connected to autograd."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        y, rstd = rmsnorm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        support.refuse_second_derivative("TritonRMSNorm")
        x, weight, rstd = ctx.saved_tensors
        need_dweight = ctx.needs_input_grad[1]
        dx, dweight = rmsnorm_backward(dy, x, weight, rstd, need_dweight)
        return dx, dweight, None


class TritonRMSNorm(torch.nn.Module):
    """Drop-in replacement for LlamaRMSNorm: same parameter, same `state_dict` keys, same numbers.

    And for torch.nn.RMSNorm over the last dimension, whose further arguments it has:
    elementwise_affine=False for no weight, device and dtype of the weight.  eps is a number;
    PyTorch's own default depends on the dtype.
    """

    def __init__(self, hidden_size, eps=1e-5, elementwise_affine=True, device=None, dtype=None):
        super().__init__()
        if isinstance(hidden_size, (tuple, list)):
            given = f"hidden_size is {hidden_size!r}"
            raise TypeError(f"{given}, expected an int: the norm is over the last dimension alone.")
        weight = None
        if elementwise_affine:
            weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("weight", weight)
        self.hidden_size = hidden_size
        self.variance_epsilon = support.number("eps", eps, float)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1, as PyTorch asks after `to_empty`."""
        if self.weight is not None:
            torch.nn.init.ones_(self.weight)

    @classmethod
    def from_llama_rmsnorm(cls, module: torch.nn.Module) -> "TritonRMSNorm":
        """Take over a LlamaRMSNorm.  The weight is shared, so an optimizer may already hold it."""
        norm = cls(module.weight.shape[0], module.variance_epsilon)
        norm.weight = module.weight
        return norm.train(module.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is None and x.shape[-1:] != (self.hidden_size,):
            expected = f"(..., {self.hidden_size}): fit the norm's hidden_size."
            raise ValueError(f"x has shape {tuple(x.shape)}, expected {expected}")
        if x.dtype == torch.float64:  # of a model that was cast, which runs without kernels
            return rmsnorm_reference(x, self.weight, self.variance_epsilon)
        return TritonRMSNormFunction.apply(x, self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        affine = "" if self.weight is not None else ", elementwise_affine=False"
        return f"({self.hidden_size},), eps={self.variance_epsilon}{affine}"
