"""Is the RMSNorm kernel right?

    python rmsnorm_test.py      # three checks for each dtype
    pytest rmsnorm_test.py      # the same checks, and those below

A kernel is judged against float64 and allowed twice the error of eager PyTorch.  Why:
harness/benchmark/checking.py.  Without a GPU the kernels run on the CPU, in Triton's interpreter.
The tests that every function of this project has to pass are in tests/contracts_*_test.py, those
of this kernel alone in tests/rmsnorm_more_test.py.
"""

from harness.cli import command_line

if __name__ == "__main__":  # before PyTorch is imported, which takes seconds
    command_line.answer_flags(__doc__)

import pytest
import torch

from harness.benchmark import checking
from harness.cli.device import DEVICE, HAS_GPU
from rmsnorm_kernel import TritonRMSNormFunction, rmsnorm_reference
from tests import printing

EPS = 1e-5
# (B, T, H); LLaMA 3.1 8B has H = 4096
SHAPE = (4, 512, 4096) if HAS_GPU else (2, 16, 256)
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}


def norm(x, weight, eps=EPS):
    return TritonRMSNormFunction.apply(x, weight, eps)


def make_inputs(shape, dtype):
    """Return x with a mean, weights of both signs and far from 1, and a gradient that varies.

    Weights of 1 and a constant gradient would hide half of the mistakes that a kernel can make.
    """
    generator = torch.Generator().manual_seed(0)
    x = 0.5 + 1.5 * torch.randn(shape, generator=generator)
    weight = 0.5 + torch.randn(shape[-1:], generator=generator)
    dy = 0.25 + torch.randn(shape, generator=generator)
    return [t.to(DEVICE, dtype) for t in (x, weight, dy)]


def run(function, x, weight, dy, eps=EPS):
    """(y, dx, dw) of one forward and one backward; the tensors keep their strides."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = function(x, weight, eps)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def check_against_float64(name, x, weight, dy) -> list[checking.Check]:
    """The kernel's y, dx and dw, each against float64 of the same inputs."""
    ours = run(norm, x, weight, dy)
    ref64 = run(rmsnorm_reference, x.double(), weight.double(), dy.double())
    eager = run(rmsnorm_reference, x, weight, dy)
    parts = ("Forward", "Backward (dx)", "Backward (dw)")
    return [
        checking.compare(f"{name} {part}", *abc) for part, *abc in zip(parts, ours, ref64, eager)
    ]


def dtype_checks(dtype) -> list[checking.Check]:
    return check_against_float64(checking.DTYPE_NAME[dtype], *make_inputs(SHAPE, dtype))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_forward_and_backward_match_float64(dtype):
    checking.assert_all_passed(dtype_checks(dtype))


@pytest.mark.parametrize("H", [1000, 1023, 1025])  # the block is a power of two: the rest is masked
def test_masked_lanes_do_not_leak_into_the_row(H):
    checking.assert_all_passed(check_against_float64(f"H={H}", *make_inputs((5, H), torch.float32)))


@pytest.mark.parametrize("which", [0, 2], ids=["x", "dy"])
def test_rows_need_not_lie_one_after_the_other(which):
    inputs = make_inputs((5, 3, 64), torch.float32)
    inputs[which] = inputs[which].transpose(0, 1).contiguous().transpose(0, 1)
    assert not inputs[which].is_contiguous()
    checking.assert_all_passed(check_against_float64("transposed", *inputs))


def test_sum_backward_sends_a_gradient_of_stride_zero():
    """y.sum().backward(): the gradient of y is one number, expanded; whoever walks it as memory
    reads beyond it.
    """
    x, weight, _ = make_inputs((3, 4, 64), torch.float32)
    one = torch.ones((), device=DEVICE).expand(x.shape)
    assert one.stride() == (0, 0, 0)
    checking.assert_all_passed(check_against_float64("sum", x, weight, one))


def wrong_answers(x, weight, dy):
    """Return by name: which of y, dx, dw it poses as, and the right answer but for one mistake."""
    x_hat = rmsnorm_reference(x, torch.ones_like(weight), EPS)
    _, dx, dw = run(rmsnorm_reference, x, weight, dy)
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return {
        "y without the weight": (0, x_hat),
        "dx with the sign flipped": (1, -dx),
        "dx without the c1 term": (1, rstd * weight * dy),
        "dw without its last row": (2, dw - (dy * x_hat)[-1]),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_answers_are_rejected(dtype):
    """A check that cannot fail proves nothing."""
    inputs = make_inputs((32, 256), dtype)
    wide = [t.double() for t in inputs]
    eager, ref64 = run(rmsnorm_reference, *inputs), run(rmsnorm_reference, *wide)
    for part, right in enumerate(ref64):
        assert checking.compare("right", right.to(dtype), right, eager[part]).passed
    for name, (part, answer) in wrong_answers(*wide).items():
        assert not checking.compare(name, answer.to(dtype), ref64[part], eager[part]).passed


def main() -> int:
    printing.title("RMSNorm")
    passed = printing.cases(DTYPES, dtype_checks)
    return printing.verdict("RMSNorm correctness", passed)


if __name__ == "__main__":
    command_line.run_main(main)
