"""The one comparator that every test uses.

A kernel is judged against float64, computed from the same rounded inputs.  It may be at most twice
as wrong as eager PyTorch in the kernel's own dtype:

    error(t)  = ||t - ref64|| / ||ref64||
    allowed   = 2 * error(eager) + floor
    passed    = error(kernel) <= allowed

The floor covers the case where eager is exact by chance.  Nobody chooses an `atol`, so nobody can
loosen one when a kernel is wrong.
"""

import math
from dataclasses import dataclass

import torch

FLOOR = {torch.float32: 2e-6, torch.float16: 2e-4, torch.bfloat16: 1e-3}

DTYPE_NAME = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Return ||out - ref|| / ||ref|| in float64; 0.0 if both are zero, inf if only ref is.

    NaN anywhere gives NaN, which no allowance accepts.  The device of `ref` computes the sums: a
    CPU core takes a minute for the gradient of a whole vocabulary.
    """
    ref = ref.detach().double()
    distance = (out.detach().to(ref.device) - ref).norm().item()
    scale = ref.norm().item()
    if scale == 0.0:
        return 0.0 if distance == 0.0 else math.inf
    return distance / scale


@dataclass(frozen=True)
class Check:
    """One comparison: what was measured, what was allowed, and the verdict."""

    name: str
    error: float  # ||out - ref64|| / ||ref64||
    allowed: float
    max_diff: float  # max |out - ref64|

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # NaN compares false: NaN never passes

    def __str__(self) -> str:
        verdict = "PASSED" if self.passed else "FAILED"
        return (
            f"{self.name} — max diff: {self.max_diff:.2e}  "
            f"error: {self.error:.2e}  allowed: {self.allowed:.2e}  {verdict}"
        )


def compare(
    name: str,
    out: torch.Tensor | None,
    ref64: torch.Tensor,
    eager: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> Check:
    """Compare a kernel's output with float64, allowing twice eager's own error.

    Args:
        ref64: the same quantity computed in float64 from the same inputs.
        eager: the same quantity from eager PyTorch in the kernel's dtype.
        dtype: gives the floor; default: `eager.dtype`.
    """
    assert out is not None, f"{name}: there is no output (None) to compare"
    assert out.shape == eager.shape == ref64.shape, (
        f"{name}: shape {tuple(out.shape)}, eager {tuple(eager.shape)}, ref64 {tuple(ref64.shape)}"
    )
    assert out.dtype == eager.dtype, f"{name}: dtype {out.dtype}, eager gives {eager.dtype}"
    assert ref64.dtype == torch.float64, f"{name}: the reference is {ref64.dtype}, not float64"
    allowed = 2.0 * relative_error(eager, ref64) + FLOOR[dtype or eager.dtype]
    difference = out.detach().to(ref64.device) - ref64.detach()
    max_diff = difference.abs().max().item() if difference.numel() else 0.0
    return Check(name, relative_error(out, ref64), allowed, max_diff)


def assert_all_passed(checks: list[Check]) -> None:
    """Fail with the line of every check that is over its allowance."""
    assert checks, "no comparison was made"
    failed = [str(check) for check in checks if not check.passed]
    assert not failed, "\n" + "\n".join(failed)
