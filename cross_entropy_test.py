"""Is the fused cross-entropy right?

    python cross_entropy_test.py    # the loss, its gradient, and the memory that four ways take
    pytest cross_entropy_test.py    # the same checks, and those below

All is judged against float64 and allowed twice the error of eager PyTorch.  Why:
harness/benchmark/checking.py.  Eager is written here as Hugging Face writes it, logits.float()
first: its most exact form, the hardest to match.  Without a GPU the kernels run on the CPU, in
Triton's interpreter.  The tests that every function of this project has to pass are in
tests/contracts_*_test.py, those of this kernel alone in tests/cross_entropy_more_test.py.

A gradient is compared in two parts, the entry of each row's target and all the others.  In a norm
over both, the target entries (softmax - 1) drown the others, and a gradient that is 0 at the others
would look fine.
"""

from harness.cli import command_line

if __name__ == "__main__":  # before PyTorch is imported, which takes seconds
    command_line.answer_flags(__doc__)

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from cross_entropy_kernel import TritonCrossEntropyLoss, cross_entropy_reference
from harness.benchmark import checking
from harness.cli.device import DEVICE, HAS_GPU
from harness.steps import timing
from tests import printing

N_ROWS, V = (512, 128_256) if HAS_GPU else (24, 1_000)  # LLaMA 3.1's vocabulary
DTYPES = {
    "Float32": torch.float32,
    "BFloat16 (bf16 logits and gradient, fp32 loss)": torch.bfloat16,
    "Float16 (likewise)": torch.float16,
}


def make_inputs(shape, dtype=torch.float32):
    """Logits with a mean in each row; every third is sure of its target, every fifth ignored."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    *batch, vocab = shape
    logits = 3 * torch.randn(shape, generator=generator, device=DEVICE)
    logits += torch.randn((*batch, 1), generator=generator, device=DEVICE)
    targets = torch.randint(vocab, batch, generator=generator, device=DEVICE)
    rows, row_targets = logits.view(-1, vocab), targets.view(-1)
    confident = torch.arange(len(rows), device=DEVICE)[2::3]
    rows[confident, row_targets[confident]] += 20
    row_targets[1::5] = -100
    return logits.to(dtype), targets


def loss_and_gradient(loss_fn, logits, targets, grad_output=None):
    """The loss, and the gradient of the sum of all losses, or that for grad_output.

    `logits` keeps its strides.
    """
    leaf = logits.detach().requires_grad_()
    loss = loss_fn(leaf, targets)
    if grad_output is None:
        loss.sum().backward()
    else:
        loss.backward(grad_output.to(loss.dtype))
    return loss.detach(), leaf.grad


def reference_and_eager(logits, targets, grad_output=None, **options):
    """(loss, gradient) in float64, and in eager PyTorch as Hugging Face writes it."""

    def reference(logits, targets):
        return cross_entropy_reference(logits, targets, **options)

    ref64 = loss_and_gradient(reference, logits.double(), targets, grad_output)
    eager = loss_and_gradient(lambda x, t: reference(x.float(), t), logits, targets, grad_output)
    return ref64, eager


def compare_both(name, ours, ref64, eager, targets) -> list[checking.Check]:
    """Three checks of a (loss, gradient): the loss, the target entries and the other entries."""
    is_target = targets.unsqueeze(-1) == torch.arange(ref64[1].shape[-1], device=targets.device)
    results = ours, ref64, eager
    checks = [checking.compare(f"{name} Loss", *(loss for loss, _ in results))]
    for part, elsewhere in (("target", ~is_target), ("other", is_target)):
        gradients = (g if g is None else g.masked_fill(elsewhere, 0) for _, g in results)
        checks.append(checking.compare(f"{name} Gradient ({part} entries)", *gradients))
    return checks


def run_checks(logits, targets, grad_output=None, loss_fn=None, **options) -> list[checking.Check]:
    """The three checks of the kernels, or of `loss_fn` in their place."""
    loss_fn = loss_fn or TritonCrossEntropyLoss(**options)
    ours = loss_and_gradient(loss_fn, logits, targets, grad_output)
    references = reference_and_eager(logits, targets, grad_output, **options)
    return compare_both(checking.DTYPE_NAME[logits.dtype], ours, *references, targets)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=checking.DTYPE_NAME.get)
def test_loss_and_gradient_match_float64(dtype):
    checking.assert_all_passed(run_checks(*make_inputs((N_ROWS, V), dtype)))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1_023, 1_025])
def test_vocabulary_need_not_be_a_round_number(vocab):
    checking.assert_all_passed(run_checks(*make_inputs((4, vocab))))


@pytest.mark.parametrize(
    "place", [lambda x: x.mT.contiguous().mT, lambda x: F.pad(x, (0, 10))[:, :-10]]
)
def test_logits_need_not_be_contiguous(place):
    logits, targets = make_inputs((5, 150))
    strided = place(logits)
    assert not strided.is_contiguous()
    checking.assert_all_passed(run_checks(strided, targets))


def test_sum_backward_sends_a_gradient_of_stride_zero():
    """Every row's loss has the same gradient: one number, expanded."""
    checking.assert_all_passed(run_checks(*make_inputs((5, 150)), reduction="none"))


@pytest.mark.parametrize("ignore_index", [-100, 0, 7])
def test_ignored_rows_are_neither_counted_nor_trained(ignore_index):
    logits, targets = make_inputs((10, 150))
    ignored = targets == -100
    targets[ignored] = ignore_index
    checking.assert_all_passed(run_checks(logits, targets, ignore_index=ignore_index))
    loss_fn = TritonCrossEntropyLoss(ignore_index=ignore_index)
    _, gradient = loss_and_gradient(loss_fn, logits, targets)
    assert ignored.any() and (gradient[ignored] == 0).all()


def wrong_gradients(gradient, targets):
    """name -> the right gradient but for one mistake."""
    is_target = F.one_hot(targets.clamp(min=0), gradient.shape[-1]) == 1
    n_counted = (targets != -100).sum()
    return {
        "sign flipped": -gradient,
        "0 at the other entries": gradient.where(is_target, 0),
        "mean over all rows, not the counted ones": gradient * n_counted / len(targets),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_gradients_are_rejected(dtype):
    """A check that cannot fail proves nothing."""
    logits, targets = make_inputs((11, 150), dtype)
    ref64, eager = reference_and_eager(logits, targets)
    loss = ref64[0].float()
    checking.assert_all_passed(
        compare_both("right", (loss, ref64[1].to(dtype)), ref64, eager, targets)
    )
    for name, gradient in wrong_gradients(ref64[1], targets).items():
        checks = compare_both(name, (loss, gradient.to(dtype)), ref64, eager, targets)
        assert not all(check.passed for check in checks), name


# ---- Memory: what the fused loss is for ----------------------------------------------------------

WAYS = {
    "PyTorch as Hugging Face writes it (logits.float())": lambda x, t: F.cross_entropy(
        x.float(), t
    ),
    "PyTorch on the bf16 logits": F.cross_entropy,
    "ours": TritonCrossEntropyLoss(),
    "ours, inplace=True": TritonCrossEntropyLoss(inplace=True),
}


def measure_extra_memory() -> tuple[int, dict[str, int]]:
    """Bytes of the logits, and for each way the peak beyond them in forward and backward."""
    values = torch.randn((N_ROWS, V), dtype=torch.bfloat16, device=DEVICE)
    targets = torch.randint(V, (N_ROWS,), device=DEVICE)

    def forward_and_backward(loss_fn):
        # a result, as logits are; the addition keeps nothing for the backward
        logits = values + values.new_zeros((), requires_grad=True)
        loss_fn(logits, targets).backward()

    peaks = {
        way: timing.peak_extra_bytes(partial(forward_and_backward, loss_fn))
        for way, loss_fn in WAYS.items()
    }
    return values.nbytes, {way: peak - values.nbytes for way, peak in peaks.items()}


def memory_is_as_promised(logits_bytes: int, extra: dict[str, int]) -> bool:
    """One gradient as large as the logits and nothing else; in place not even that."""
    slack = 2**20
    return extra["ours"] <= logits_bytes + slack and extra["ours, inplace=True"] <= slack


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")
def test_memory_beyond_the_logits_is_one_gradient_or_none():
    logits_bytes, extra = measure_extra_memory()
    assert memory_is_as_promised(logits_bytes, extra), extra


def print_memory() -> bool:
    print("\nMemory Comparison\n" + "-" * 60)
    if not HAS_GPU:
        print("  (on a GPU only)")
        return True
    logits_bytes, extra = measure_extra_memory()
    standard, fused = (logits_bytes + extra[way] for way in (next(iter(WAYS)), "ours"))
    print(f"  Standard PyTorch CE — peak memory: {standard / 1e6:.1f} MB")
    print(f"  Fused Triton CE — peak memory: {fused / 1e6:.1f} MB")
    print(f"  Memory reduction: {standard / fused:.1f}x")
    logits = f"{logits_bytes / 1e6:.1f} MB of logits themselves ({N_ROWS} x {V:,}, bf16)"
    print(f"\n  Of that, beyond the {logits}:")
    for way, size in extra.items():
        print(f"    {way:<52}{size / 1e6:>8.1f} MB")
    passed = memory_is_as_promised(logits_bytes, extra)
    print(f"  At most one gradient, and none in place: {'PASSED' if passed else 'FAILED'}")
    return passed


def main() -> int:
    printing.title("Cross-Entropy")
    print(f"{N_ROWS} rows of {V:,} logits.  error: against float64.", end="  ")
    print("allowed: twice eager's, plus a floor.")
    passed = True
    for number, (title, dtype) in enumerate(DTYPES.items(), start=1):
        print(f"\nTest {number}: {title}")
        logits, targets = make_inputs((N_ROWS, V), dtype)
        ours = loss_and_gradient(TritonCrossEntropyLoss(), logits, targets)
        ref64, eager = reference_and_eager(logits, targets)
        loss, *gradients = compare_both(checking.DTYPE_NAME[dtype], ours, ref64, eager, targets)
        passed &= printing.loss(loss, ref64[0], ours[0])
        passed &= printing.checks(gradients)
    passed &= print_memory()
    return printing.verdict("cross-entropy", passed)


if __name__ == "__main__":
    command_line.run_main(main)
