"""What is reverse KL's alone: logits of any magnitude and -inf, masks, temperatures, a vocabulary
over processes.

    python -m tests.reverse_kl_test     # the loss, its gradient, and what memory is taken

What every function has to do, reverse KL too, is asked in tests/contracts_*_test.py.  A gradient is
compared in two parts, the student's most probable column of each row and all the others; at the
former what is left of eager's digits is luck, and so its worst error of eight counts: see the
subject's record.
"""

from harness.cli import command_line

if __name__ == "__main__":  # before PyTorch is imported, which takes seconds
    command_line.answer_flags(__doc__)

import datetime
import warnings

import pytest
import torch
import torch.nn.functional as F

from harness.benchmark.checking import (
    DEVICE,
    DTYPE_NAME,
    HAS_GPU,
    Check,
    assert_all_passed,
    compare,
    print_checks,
    print_loss,
    print_title,
    print_verdict,
)
from next_steps.lessons import reverse_kl_kernel
from next_steps.lessons.reverse_kl_kernel import (
    SHRINK,
    TritonReverseKLLoss,
    combine_statistics,
    reverse_kl_backward,
    reverse_kl_forward,
    reverse_kl_reference,
)
from tests import tiles
from tests.fixtures import COMPILED_DTYPE, needs_gpu, pads_rows, waiting_forbidden
from tests.subjects.reverse_kl import bad_input, eager_in_orders, make, reference

# the table's shape; most tests need only a small one
N_ROWS, V = (512, 131_072) if HAS_GPU else (12, 1_000)
SMALL_ROWS, SMALL_V = 5, 150
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["batchmean", "sum", "none"]
NAN, INF = float("nan"), float("inf")

# 0 / 0 and inf - inf are the right answers in some tests; the interpreter's NumPy comments on them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("poison_new_tensors"),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Let small vocabularies take several tiles too."""
    tiles.small_tiles(monkeypatch)


def make_inputs(shape=(SMALL_ROWS, SMALL_V), dtype=torch.float32, **options):
    """student, teacher and mask: see the subject's record."""
    *rows, vocab = shape
    inputs, _ = make(tuple(rows), vocab, dtype, **options)
    return tuple(inputs.values())


def loss_and_gradient(loss_fn, student, teacher, mask=None, grad_output=None):
    """The loss and d loss / d student; the student's logits are used as they are, strides
    included.
    """
    leaf = student.detach().requires_grad_()
    loss = loss_fn(leaf, teacher, mask)
    loss.backward(None if grad_output is None else grad_output.to(loss.dtype))
    return loss.detach(), leaf.grad


def most_lenient(name, ours, ref64, eagers) -> Check:
    return max(
        (compare(name, ours, ref64, eager) for eager in eagers), key=lambda check: check.allowed
    )


def compare_both(name, ours, ref64, eagers, student) -> list[Check]:
    """Three checks of a (loss, gradient): the loss, the most probable columns and the others."""
    best = student.argmax(-1, keepdim=True) == torch.arange(
        student.shape[-1], device=student.device
    )
    checks = [most_lenient(f"{name} Loss", ours[0], ref64[0], [loss for loss, _ in eagers])]
    for part, elsewhere in (("most probable", ~best), ("other", best)):
        gradients = [
            None if g is None else g.masked_fill(elsewhere, 0) for _, g in (ours, ref64, *eagers)
        ]
        checks.append(
            most_lenient(f"{name} Gradient ({part} columns)", *gradients[:2], gradients[2:])
        )
    return checks


def reference_and_eager(student, teacher, mask=None, grad_output=None, **options):
    """(loss, gradient) in float64, and those of eager PyTorch in the columns' orders."""
    ref64 = loss_and_gradient(
        reference(**options), student.double(), teacher.double(), mask, grad_output
    )
    inputs = student, teacher, mask, grad_output
    return ref64, list(eager_in_orders(*inputs, n_orders=4, **options))


def run_checks(
    student, teacher, mask=None, grad_output=None, loss_fn=None, **options
) -> list[Check]:
    """The three checks of the kernel, or of `loss_fn` in its place."""
    loss_fn = TritonReverseKLLoss(**options) if loss_fn is None else loss_fn
    ours = loss_and_gradient(loss_fn, student, teacher, mask, grad_output)
    ref64, eagers = reference_and_eager(student, teacher, mask, grad_output, **options)
    return compare_both(DTYPE_NAME[student.dtype], ours, ref64, eagers, student)


# ---- the reference and the comparator ------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reference_is_pytorchs_kl_div(reduction):
    student, teacher, _ = (x.double() for x in make_inputs())

    def kl_div(s, t, _):
        log_p, log_q = (F.log_softmax(x / 0.7, -1) for x in (s, t))
        rows = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
        by_pytorch = F.kl_div(log_q, log_p, log_target=True, reduction=reduction)
        return rows if reduction == "none" else by_pytorch

    ours = reference(temperature=0.7, reduction=reduction)
    grad_output = torch.rand(SMALL_ROWS if reduction == "none" else (), device=DEVICE)
    for a, b in zip(
        *(loss_and_gradient(f, student, teacher, None, grad_output) for f in (kl_div, ours))
    ):
        torch.testing.assert_close(a, b)


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [(1, 4), (4, 2), (4, 16)])
def test_one_tile_and_many_give_the_reference(dtype, tile, monkeypatch):
    tiles.reverse_kl_tiles(monkeypatch, *tile)
    assert_all_passed(run_checks(*make_inputs(dtype=dtype)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["batchmean", "none"])  # the two remedies
def test_table_shape_with_the_shipped_tiles(dtype, reduction, monkeypatch, gpu_memory):
    gpu_memory(12)
    tiles.shipped_tiles(monkeypatch)
    inputs = make_inputs((N_ROWS, V), dtype)
    grad_output = torch.rand(N_ROWS if reduction == "none" else (), device=DEVICE)
    assert_all_passed(run_checks(*inputs, grad_output, reduction=reduction))


@pytest.mark.exhaustive
@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 127, 128, 129])
def test_ragged_vocabulary_next_to_powers_of_two_and_chunk_ends(vocab):
    student, teacher, mask = make_inputs((4, vocab))
    if vocab == 1:  # always 0
        loss, gradient = loss_and_gradient(TritonReverseKLLoss(), student, teacher, mask)
        assert loss.abs() < 1e-6 and (gradient.abs() < 1e-6).all()
    else:
        assert_all_passed(run_checks(student, teacher, mask))


@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [0.05, 2, 10.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_temperature_divides_both_and_no_square_multiplies(temperature, dtype):
    assert_all_passed(run_checks(*make_inputs(dtype=dtype), temperature=temperature))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "dtype, offset", [(dtype, 80.0) for dtype in DTYPES] + [(torch.float32, -1e4)]
)
def test_large_offset_does_not_cost_digits(dtype, offset):
    assert_all_passed(run_checks(*make_inputs(dtype=dtype, offset=offset)))


@pytest.mark.exhaustive
def test_rising_maxima_are_rescaled():
    student, teacher, mask = make_inputs()
    slope = torch.linspace(0, 30, SMALL_V, device=DEVICE)
    assert_all_passed(run_checks(student + slope, teacher + 2 * slope.flip(0), mask))
    assert_all_passed(run_checks(student + slope.flip(0), teacher + 2 * slope, mask))


def test_overflow_of_exp_without_the_maximum():
    """Where p is 1, two log-ratios of some hundred are subtracted; compared is p times the first,
    which is not luck.
    """
    student, teacher, mask = make_inputs()
    student, teacher = student * 100, teacher * 100
    ours = loss_and_gradient(TritonReverseKLLoss(), student, teacher, mask)
    ref64, eagers = reference_and_eager(student, teacher, mask)
    loss, _, other = compare_both("overflow", ours, ref64, eagers, student)
    row_loss = reverse_kl_reference(student.double(), teacher.double(), mask, reduction="none")[
        :, None
    ]
    subtracted = student.double().softmax(-1) * row_loss / mask.sum()
    before = [gradient.double() + subtracted for gradient in (ours[1], ref64[1], eagers[0][1])]
    assert_all_passed([loss, other, compare("p * log-ratio", *before, dtype=torch.float32)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("n_kept", [0, 1, 300, 700, 2**30])
def test_any_part_of_a_row_may_be_kept_in_the_cache(monkeypatch, n_kept):
    monkeypatch.setattr(reverse_kl_kernel, "_columns_kept", lambda student: n_kept)
    for dtype in DTYPES:
        assert_all_passed(run_checks(*make_inputs((SMALL_ROWS, 700), dtype)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_give_exactly_zero(dtype):
    student, _, mask = make_inputs(dtype=dtype)
    loss, gradient = loss_and_gradient(TritonReverseKLLoss(), student, student.clone(), mask)
    assert loss == 0 and (gradient == 0).all()


def test_student_near_its_teacher():
    student, teacher, mask = make_inputs()
    checks = run_checks(student, student + (teacher - student) * 1e-2, mask)
    assert_all_passed(checks)


@pytest.mark.exhaustive
def test_logits_of_two_dtypes():
    student, teacher, mask = make_inputs(dtype=torch.bfloat16)
    assert_all_passed(run_checks(student, teacher.float() + 1e-3, mask))
    assert_all_passed(run_checks(student.float() + 1e-3, teacher, mask))


# ---- logits of any magnitude ---------------------------------------------------------------------

HALF = (
    torch.finfo(torch.float32).max / 2
)  # the difference of two of these is one that PyTorch can hold
MAGNITUDES = [  # dtype, magnitude, temperature
    *((torch.float32, magnitude, 1.0) for magnitude in (1e4, 1.4e9, 1.6e9, 1e10, 1e30, HALF)),
    *((torch.float32, 1e10, temperature) for temperature in (0.6, 7.0)),
    (torch.bfloat16, 1e10, 1.0),
    (torch.float16, torch.finfo(torch.float16).max, 1.0),
]


def rows_of_magnitude(magnitude, dtype):
    """Pairs (student, teacher) of rows, each of the kinds with each."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.arange(SMALL_V)
    normal, other = torch.randn(2, SMALL_V, generator=generator)
    third, late = columns % 3 == 1, columns == 140  # the latter is in the second tile
    kinds = [
        normal,
        torch.zeros(SMALL_V).masked_fill(late, magnitude),
        torch.full((SMALL_V,), -magnitude),
        torch.full((SMALL_V,), -magnitude).masked_fill(third, magnitude),
        other.masked_fill(columns < 128, -magnitude),
        torch.full((SMALL_V,), magnitude).masked_fill(third, -INF),
    ]
    pairs = [
        (s, t) for s in kinds for t in kinds if not (t[1] == -INF and s[1] > -INF)
    ]  # that KL is infinite
    return (torch.stack(side).to(DEVICE, dtype) for side in zip(*pairs))


def check_every_row(student, teacher, loss, gradient, temperature=1.0):
    """Row by row: in a norm over all rows, the largest would hide the others.

    The gradient is p * (log-ratio - KL) / T.  Where both are 1e10, what remains of their digits is
    luck.  So p * KL / T is added again, in float64, and what is compared is p * log-ratio / T,
    which is not luck.
    """
    ones = torch.ones(len(student), device=DEVICE)
    options = {"temperature": temperature, "reduction": "none"}
    ref64, eagers = reference_and_eager(student, teacher, None, ones, **options)
    subtracted = (student.double() / temperature).softmax(-1) * ref64[0][:, None] / temperature
    before = [g.double() + subtracted for g in (gradient, ref64[1], *(g for _, g in eagers))]
    for row in range(len(student)):
        losses = [eager[row] for eager, _ in eagers]
        assert_all_passed([most_lenient(f"loss of row {row}", loss[row], ref64[0][row], losses)])
        checks = [
            compare(
                f"p * log-ratio of row {row}",
                before[0][row],
                before[1][row],
                eager[row],
                student.dtype,
            )
            for eager in before[2:]
        ]
        assert_all_passed([max(checks, key=lambda check: check.allowed)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype, magnitude, temperature", MAGNITUDES)
@pytest.mark.parametrize("now", [True, False])  # the two remedies
def test_logits_of_any_magnitude(dtype, magnitude, temperature, now):
    student, teacher = rows_of_magnitude(magnitude, dtype)
    ones = torch.ones(len(student), device=DEVICE)
    options = {"temperature": temperature, "reduction": "none"}
    loss, stats, _, _ = reverse_kl_forward(student, teacher, **options)
    if now and dtype != torch.float16:
        gradient = reverse_kl_forward(student, teacher, None, temperature, "sum", True)[3]
    else:
        gradient = reverse_kl_backward(ones, student, teacher, None, stats, None, *options.values())
    check_every_row(student, teacher, loss, gradient, temperature)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fill", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -1e9]
)
@pytest.mark.parametrize("who", ["both", "student", "teacher"])
def test_vocabulary_masked_by_a_large_number(fill, who):
    student, teacher, _ = make_inputs()
    columns = torch.arange(SMALL_V, device=DEVICE)
    for tensor in (student, teacher):
        if who in ("both", "student" if tensor is student else "teacher"):
            tensor[:, (columns < 64) | (columns % 3 == 0)] = fill
    loss, gradient = rows_alone(student, teacher)
    assert loss.isfinite().all(), "large, where the teacher alone is masked, as PyTorch's"
    check_every_row(student, teacher, loss, gradient)


@pytest.mark.parametrize("end", [1, -1])
def test_rows_at_an_end_of_the_range(end):
    student = torch.full((1, SMALL_V), end * torch.finfo(torch.float32).max, device=DEVICE)
    loss, gradient = loss_and_gradient(TritonReverseKLLoss(), student, torch.zeros_like(student))
    assert loss == 0 and (gradient == 0).all(), "both are uniform"


# ---- -inf, inf and NaN logits --------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("padded", ["first chunk", "middle chunk", "scattered", "all but one"])
@pytest.mark.parametrize("who", ["both", "student"])
def test_padded_vocabulary_is_not_nan(padded, who):
    student, teacher, mask = make_inputs()
    columns = torch.arange(SMALL_V, device=DEVICE)
    gone = {
        "first chunk": columns < 64,
        "middle chunk": (columns >= 64) & (columns < 128),
        "scattered": columns % 3 == 0,
        "all but one": columns != 70,
    }[padded]
    student[:, gone] = -INF
    if who == "both":
        teacher[:, gone] = -INF
    if padded == "all but one":  # a probability of exactly 1: no gradient
        loss, gradient = loss_and_gradient(TritonReverseKLLoss(), student, teacher, mask)
        assert (loss.abs() < 1e-6) == (who == "both") and (gradient.abs() < 1e-6).all()
    else:
        assert_all_passed(run_checks(student, teacher, mask))
        assert (
            loss_and_gradient(TritonReverseKLLoss(), student, teacher, mask)[1][:, gone] == 0
        ).all()


def rows_alone(student, teacher, mask=None):
    """Loss and gradient of every row, none divided by anything."""
    ones = torch.ones(student.shape[:-1], device=DEVICE)
    return loss_and_gradient(TritonReverseKLLoss(reduction="none"), student, teacher, mask, ones)


def assert_only_row_3_differs(pair_a, pair_b):
    others = torch.arange(SMALL_ROWS, device=DEVICE) != 3
    for a, b in zip(pair_a, pair_b):
        assert torch.equal(a[others], b[others])
        assert not torch.equal(a[3], b[3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [[100], [0], [149], [1, 70, 140]])
def test_mass_where_the_teacher_has_none_is_inf_as_in_pytorch(columns):
    student, teacher, _ = make_inputs()
    before = rows_alone(student, teacher)
    teacher[3, columns] = -INF
    after = rows_alone(student, teacher)
    assert_only_row_3_differs(before, after)
    ref64, _ = reference_and_eager(
        student, teacher, None, torch.ones(SMALL_ROWS, device=DEVICE), reduction="none"
    )
    assert after[0][3] == INF == ref64[0][3]
    assert torch.equal(after[1][3].isnan(), ref64[1][3].isnan())
    assert torch.equal(after[1][3].nan_to_num(), ref64[1][3].float().nan_to_num()), (
        "-inf in the other columns"
    )


def test_mass_that_underflows_where_the_teacher_has_none_is_not_nan():
    student, teacher, mask = make_inputs()
    teacher[:, 0] = -INF
    student[:, 128:] += 400  # in the second tile: until then column 0 has mass
    loss, gradient = loss_and_gradient(TritonReverseKLLoss(), student, teacher, mask)
    assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("who", ["student", "teacher"])
@pytest.mark.parametrize("what", ["all -inf", "one inf", "one nan"])
def test_unusual_row_is_nan_as_in_pytorch_and_leaves_the_other_rows_alone(who, what):
    student, teacher, _ = make_inputs()
    before = rows_alone(student, teacher)
    columns = slice(None) if what == "all -inf" else 100
    (student if who == "student" else teacher)[3, columns] = float(what.split()[1])
    after = rows_alone(student, teacher)
    assert_only_row_3_differs(before, after)
    assert after[0][3].isnan() and after[1][3].isnan().all()


def test_nan_logits_of_rows_that_do_not_count_stay_out():
    student, teacher, mask = make_inputs()
    plain = loss_and_gradient(TritonReverseKLLoss(), student, teacher, mask)
    student[~mask], teacher[~mask] = NAN, INF
    again = loss_and_gradient(TritonReverseKLLoss(), student, teacher, mask)
    assert all(torch.equal(a, b) for a, b in zip(plain, again))
    assert (again[1][~mask] == 0).all()


# ---- mask and reduction --------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("masked", [True, False])
def test_reductions_with_and_without_a_mask(reduction, masked):
    student, teacher, mask = make_inputs((2, 3, SMALL_V))
    grad_output = torch.randn((2, 3) if reduction == "none" else (), device=DEVICE)
    assert_all_passed(
        run_checks(student, teacher, mask if masked else None, grad_output, reduction=reduction)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "ignore_index, dtype", [(-100, torch.int64), (0, torch.int64), (1, torch.int32)]
)
def test_targets_as_a_mask(ignore_index, dtype):
    student, teacher, mask = make_inputs()
    targets = torch.where(mask, torch.arange(20, 25, device=DEVICE), ignore_index).to(dtype)
    by_mask = loss_and_gradient(TritonReverseKLLoss(), student, teacher, mask)
    by_targets = loss_and_gradient(
        TritonReverseKLLoss(ignore_index=ignore_index), student, teacher, targets
    )
    assert all(torch.equal(a, b) for a, b in zip(by_mask, by_targets))
    assert_all_passed(run_checks(student, teacher, targets, ignore_index=ignore_index))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("n_rows", [0, 3])
def test_no_row_that_counts_is_as_in_pytorch(n_rows, reduction):
    student, teacher = torch.randn(2, n_rows, SMALL_V, device=DEVICE)
    mask = torch.zeros(n_rows, dtype=torch.bool, device=DEVICE)
    grad_output = torch.ones((n_rows,) if reduction == "none" else (), device=DEVICE)
    loss, gradient = loss_and_gradient(
        TritonReverseKLLoss(reduction=reduction), student, teacher, mask, grad_output
    )
    expected = reverse_kl_reference(student, teacher, mask, reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert torch.equal(gradient, torch.zeros_like(student))


# ---- layouts -------------------------------------------------------------------------------------

LAYOUTS = {  # what is done to a tensor; it keeps its values' shape
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "every other column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "padded by ten": lambda x: F.pad(x, (0, 10))[..., :-10],
    "padded by sixteen": lambda x: F.pad(x, (0, 16))[
        ..., :-16
    ],  # rows are cut as before: nothing is copied
    "odd row stride": lambda x: F.pad(x, (1, 2))[..., 1:-2],
    "last token dropped": lambda x: F.pad(x, (0, 0, 0, 1))[..., :-1, :],
    "expanded": lambda x: x[..., :1, :].expand(x.shape),
}
PAIRS = [(layout, layout) for layout in LAYOUTS]
PAIRS += [(layout, "odd row stride") for layout in LAYOUTS]
PAIRS += [("contiguous", layout) for layout in LAYOUTS]
PAIRS = list(dict.fromkeys(PAIRS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("student_layout, teacher_layout", PAIRS)
def test_layouts_of_student_and_teacher(student_layout, teacher_layout):
    vocab = (
        48 if "expanded" in (student_layout, teacher_layout) else 45
    )  # not copied if divisible by 8
    student, teacher, mask = make_inputs((3, vocab))
    grad_output = torch.randn(3, device=DEVICE)
    student, teacher = LAYOUTS[student_layout](student), LAYOUTS[teacher_layout](teacher)
    assert_all_passed(run_checks(student, teacher, mask, grad_output, reduction="none"))
    if student_layout == teacher_layout:
        assert_all_passed(run_checks(student, teacher, mask))


# ---- upstream gradients and autograd -------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, -0.3, 0.0])
def test_any_grad_output(factor, dtype):
    grad_output = torch.tensor(factor, device=DEVICE)
    assert_all_passed(run_checks(*make_inputs((7, 40), dtype), grad_output))


def test_loss_is_fp32_and_gradient_has_the_students_dtype():
    student, teacher, mask = make_inputs(dtype=torch.bfloat16)
    loss, gradient = loss_and_gradient(TritonReverseKLLoss(), student, teacher.float(), mask)
    assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.exhaustive
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.5, 3.0)])
@pytest.mark.parametrize("reduction", ["sum", "none"])  # the two remedies
def test_second_backward_through_a_retained_graph(reduction, factors):
    student, teacher, mask = make_inputs()
    ones = torch.ones(SMALL_ROWS if reduction == "none" else (), device=DEVICE)
    once = loss_and_gradient(
        TritonReverseKLLoss(reduction=reduction), student, teacher, mask, ones
    )[1]
    leaf = student.requires_grad_()
    loss = TritonReverseKLLoss(reduction=reduction)(leaf, teacher, mask)
    loss.backward(ones * factors[0], retain_graph=True)
    loss.backward(ones * factors[1])
    torch.testing.assert_close(leaf.grad, sum(factors) * once)


def test_gradient_of_the_forward_becomes_the_leafs_without_a_copy(monkeypatch):
    student, teacher, mask = make_inputs()
    made = []
    forward = reverse_kl_kernel.reverse_kl_forward
    monkeypatch.setattr(
        reverse_kl_kernel, "reverse_kl_forward", lambda *a: made.append(forward(*a)) or made[0]
    )
    leaf = student.requires_grad_()
    loss = TritonReverseKLLoss()(leaf, teacher, mask)
    *_, dstudent = made.pop()
    assert dstudent is not None
    where = dstudent.data_ptr()
    del dstudent  # autograd copies what somebody else holds
    loss.backward()
    assert leaf.grad.data_ptr() == where


def test_gradients_accumulate_over_micro_batches():
    def micro_batches(s, t, m):
        return sum(
            TritonReverseKLLoss(reduction="sum")(s[r], t[r], m[r])
            for r in (slice(0, 2), slice(2, 6))
        )

    assert_all_passed(
        run_checks(*make_inputs((6, SMALL_V)), loss_fn=micro_batches, reduction="sum")
    )


@pytest.mark.exhaustive
def test_no_grad_and_frozen_student_build_no_graph_and_no_gradient(monkeypatch):
    student, teacher, mask = make_inputs()
    asked = []
    forward = reverse_kl_kernel.reverse_kl_forward
    monkeypatch.setattr(
        reverse_kl_kernel, "reverse_kl_forward", lambda *a: asked.append(a[-1]) or forward(*a)
    )
    frozen = TritonReverseKLLoss()(student, teacher, mask)
    with torch.no_grad():
        unrecorded = TritonReverseKLLoss()(student.requires_grad_(), teacher, mask)
    trained = TritonReverseKLLoss()(student, teacher, mask)
    assert frozen.grad_fn is None and unrecorded.grad_fn is None
    assert torch.equal(frozen, unrecorded) and torch.equal(frozen, trained)
    assert asked == [False, False, True]


def test_teacher_that_needs_a_gradient_is_refused():
    student, teacher, mask = make_inputs()
    teacher.requires_grad_()
    with pytest.raises(
        ValueError, match="teacher_logits requires a gradient, expected a constant: pass"
    ):
        TritonReverseKLLoss()(student, teacher, mask)
    with torch.no_grad():
        TritonReverseKLLoss()(student, teacher, mask)


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_launchers_work_without_autograd(reduction):
    student, teacher, mask = make_inputs(dtype=torch.bfloat16)
    ones = torch.ones((SMALL_ROWS,) if reduction == "none" else (), device=DEVICE)
    expected = loss_and_gradient(
        TritonReverseKLLoss(reduction=reduction), student, teacher, mask, ones
    )
    loss, stats, n_counted, dstudent = reverse_kl_forward(
        student, teacher, mask, reduction=reduction, gradient=True
    )
    options = student, teacher, mask, stats, n_counted, 1.0, reduction
    from_stats = reverse_kl_backward(ones, *options)
    kept = reverse_kl_backward(ones[..., 0] if ones.ndim else ones, *options, dstudent=dstudent)
    assert kept.data_ptr() == dstudent.data_ptr()
    assert torch.equal(loss, expected[0])
    assert torch.equal(from_stats, expected[1]) and torch.equal(kept, expected[1])
    assert reverse_kl_forward(student, teacher, mask)[3] is None


# ---- vocabulary split over processes -------------------------------------------------------------


def shard(tensor, rank):
    return tensor[..., :50] if rank == 0 else tensor[..., 50:]  # 50 and 100 columns


SPLIT = {
    "batchmean": torch.tensor(0.5),
    "none": torch.arange(1.0, SMALL_ROWS + 1),
}  # reduction: grad_output


def run_shard(rank, file, inputs, results):
    """In a process of its own: for each reduction the loss, and the gradient of this process's
    columns.
    """
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    student, teacher, mask = inputs
    for reduction, grad_output in SPLIT.items():
        loss_fn = TritonReverseKLLoss(0.7, reduction=reduction, group=torch.distributed.group.WORLD)
        pair = loss_and_gradient(
            loss_fn, shard(student, rank), shard(teacher, rank), mask, grad_output
        )
        results[rank, reduction] = pair
    torch.distributed.destroy_process_group()


@pytest.mark.exhaustive
@pytest.mark.skipif(HAS_GPU, reason="two processes on the CPU")
def test_vocabulary_split_over_two_processes(tmp_path):
    student, teacher, mask = make_inputs()
    student[0, :50] = teacher[0, :50] = -INF  # one process has nothing of this row
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(
            run_shard, (str(tmp_path / "store"), (student, teacher, mask), results), nprocs=2
        )
        results = dict(results)
    for reduction, grad_output in SPLIT.items():
        (loss, left), (same_loss, right) = results[0, reduction], results[1, reduction]
        assert torch.equal(loss, same_loss)
        references = reference_and_eager(
            student, teacher, mask, grad_output, temperature=0.7, reduction=reduction
        )
        whole = loss, torch.cat([left, right], -1)
        assert_all_passed(compare_both(f"two processes, {reduction}", whole, *references, student))


@pytest.mark.exhaustive
@pytest.mark.parametrize("inf", [False, True])
def test_statistics_of_shards_combine_to_those_of_whole_rows(inf, monkeypatch):
    student, teacher, _ = make_inputs(offset=20.0)
    if inf:
        teacher[2, 70] = -INF
    student, teacher = (
        x + torch.linspace(0, end, SMALL_V, device=DEVICE)
        for x, end in ((student, 10), (teacher, -20))
    )
    shards = [reverse_kl_forward(shard(student, r), shard(teacher, r))[1] for r in (0, 1)]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)

    def gather(parts, mine, group):
        for part, of_shard in zip(parts, shards):
            part.copy_(of_shard)

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    whole = reverse_kl_forward(student, teacher)[1]
    grow = 1 / SHRINK.value  # atol would hide what is shrunk
    grow = torch.tensor([grow, grow, 1, 1, grow], device=DEVICE)
    torch.testing.assert_close(combine_statistics(shards[0], 1.0, None) * grow, whole * grow)


# ---- bad input -----------------------------------------------------------------------------------

X, M, STATS = torch.zeros(2, 5), torch.ones(2, dtype=torch.bool), torch.ones(2, 5)


@pytest.mark.parametrize("mistake", bad_input())
def test_launcher_of_the_backward_refuses_with_the_same_sentence(mistake):
    bad = bad_input()[mistake]
    with pytest.raises(bad.error, match=bad.sentence):
        one, stats = torch.ones((), device=DEVICE), STATS.to(DEVICE)
        reverse_kl_backward(one, *bad.inputs, stats, None, 1.0, "batchmean")


def test_launchers_refuse_targets_for_a_mask():
    x, targets = X.to(DEVICE), M.to(DEVICE, torch.int64)
    with pytest.raises(TypeError, match=r"mask is torch\.int64, expected torch\.bool: convert it"):
        reverse_kl_forward(x, x, targets)


def test_unknown_reduction_and_temperature_are_refused():
    x = X.to(DEVICE)
    with pytest.raises(
        ValueError, match="reduction is 'mean', temperature 1; expected 'batchmean', 'sum' or"
    ):
        TritonReverseKLLoss(1, reduction="mean")(x, x)
    for temperature in (0, -1.0, INF, NAN):
        with pytest.raises(
            ValueError, match=f"temperature {temperature}; expected .*, and a positive number"
        ):
            TritonReverseKLLoss(temperature)(x, x)


@pytest.mark.parametrize("which", ["grad_output", "student_logits", "teacher_logits", "mask"])
def test_launcher_of_the_backward_refuses_a_dtensor(as_dtensor, which):
    tensors = {"grad_output": torch.ones(()), "student_logits": X, "teacher_logits": X, "mask": M}
    tensors = {name: t.to(DEVICE) for name, t in tensors.items()}
    tensors[which] = as_dtensor(tensors[which])
    advice = r"pass its to_local\(\) or full_tensor\(\)\."
    with pytest.raises(TypeError, match=f"{which} is a DTensor, expected a plain tensor: {advice}"):
        reverse_kl_backward(*tensors.values(), STATS.to(DEVICE), None, 1.0, "sum")


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.fixture
def nothing_poisoned(monkeypatch):
    """What compiled code allocates is filled nowhere; and rows of 5,001 want the shipped tiles."""
    torch.use_deterministic_algorithms(False)
    tiles.shipped_tiles(monkeypatch)


@pads_rows
@pytest.mark.parametrize("shape", [(4, 1289), (2, 3, 150), (150,)])
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_torch_compile_of_logits_that_are_a_leaf(shape, reduction, nothing_poisoned):
    loss_fn = TritonReverseKLLoss(reduction=reduction)
    inputs = make_inputs(shape, COMPILED_DTYPE)
    grad_output = torch.full(shape[:-1] if reduction == "none" else (), 0.5, device=DEVICE)
    ours = loss_and_gradient(torch.compile(loss_fn, fullgraph=True), *inputs, grad_output)
    expected = loss_and_gradient(loss_fn, *inputs, grad_output)
    assert torch.equal(ours[0], expected[0])
    torch.testing.assert_close(ours[1], expected[1])  # 0.5 is not multiplied at the same place


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout", ["contiguous", "padded by sixteen", "transposed", "odd row stride"]
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("masked", [True, False])
def test_operators_promise_torch_compile_what_they_return(layout, reduction, masked):
    student, teacher, mask = make_inputs((3, 45))
    student, mask = LAYOUTS[layout](student), mask if masked else None
    loss, stats, n_counted, _ = reverse_kl_forward(student, teacher, mask, 1.0, reduction)
    tests = {"test_utils": ["test_schema", "test_faketensor"]}  # they have no autograd of their own
    for gradient in (True, False):
        options = student, teacher, mask, 1.0, reduction, gradient
        torch.library.opcheck(reverse_kl_forward.operator, options, **tests)
    options = torch.ones_like(loss), student, teacher, mask, stats, n_counted, 1.0, reduction
    torch.library.opcheck(reverse_kl_backward.operator, options, **tests)


# ---- on a GPU only -------------------------------------------------------------------------------


@needs_gpu
def test_row_offsets_do_not_wrap_at_32_bits(monkeypatch, gpu_memory):
    n_rows, vocab = 16_500, 131_072  # 2**31 elements end with row 16,383
    gpu_memory(15)
    torch.use_deterministic_algorithms(False)  # no need to fill so much memory with NaN
    tiles.shipped_tiles(monkeypatch)
    student, teacher = (
        torch.empty((n_rows, vocab), dtype=torch.bfloat16, device=DEVICE).normal_(std=3)
        for _ in range(2)
    )
    loss, stats, _, dstudent = reverse_kl_forward(student, teacher, reduction="sum", gradient=True)
    from_stats = reverse_kl_backward(
        loss.new_ones(()), student, teacher, None, stats, None, 1.0, "sum"
    )
    for rows in (slice(0, 4), slice(16_382, 16_386), slice(-4, None)):
        ref64, eagers = reference_and_eager(student[rows], teacher[rows], reduction="sum")
        for gradient in (dstudent, from_stats):
            ours = eagers[0][0], gradient[rows]
            assert_all_passed(
                compare_both(f"rows {rows.start} on", ours, ref64, eagers, student[rows])
            )


@needs_gpu
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_host_never_waits_for_the_gpu(reduction):
    loss_fn = TritonReverseKLLoss(reduction=reduction)
    student, teacher, mask = make_inputs()
    leaf = student.requires_grad_()
    (loss_fn(leaf, teacher, mask).sum() * 0.5).backward()  # compiles
    with waiting_forbidden():
        (loss_fn(leaf, teacher, mask).sum() * 0.5).backward()


def eager_kl_div(student, teacher, _=None):
    log_p, log_q = (F.log_softmax(x.float(), -1) for x in (student, teacher))
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


WAYS = {
    "PyTorch, F.kl_div of two log_softmax in fp32": eager_kl_div,
    "ours": TritonReverseKLLoss(),
    'ours, "none"': lambda s, t: TritonReverseKLLoss(reduction="none")(s, t).mean(),
}


def measure_extra_memory() -> tuple[int, dict[str, int]]:
    """Bytes of the student's logits, and for each way the peak beyond both logits in forward and
    backward.
    """
    student, teacher = (
        torch.randn((N_ROWS, V), dtype=torch.bfloat16, device=DEVICE) for _ in range(2)
    )
    extra = {}
    for way, loss_fn in WAYS.items():
        leaf = student.detach().requires_grad_()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss_fn(leaf, teacher).backward()
        extra[way] = torch.cuda.max_memory_allocated() - before
        del leaf
    return student.nbytes, extra


def memory_is_as_promised(logits_bytes: int, extra: dict[str, int]) -> bool:
    """One gradient as large as the student's logits and nothing else."""
    return all(
        size <= logits_bytes + 2**20 for way, size in extra.items() if way.startswith("ours")
    )


@needs_gpu
def test_memory_beyond_the_logits_is_one_gradient():
    logits_bytes, extra = measure_extra_memory()
    assert memory_is_as_promised(logits_bytes, extra), extra


# ---- the table -----------------------------------------------------------------------------------


def print_memory() -> bool:
    print("\nMemory Comparison\n" + "-" * 60)
    if not HAS_GPU:
        print("  (on a GPU only)")
        return True
    logits_bytes, extra = measure_extra_memory()
    each = f"{logits_bytes / 1e6:.1f} MB each of student and teacher"
    print(f"  Beyond the logits, {each} ({N_ROWS} x {V:,}, bf16):")
    for way, size in extra.items():
        print(f"    {way:<52}{size / 1e6:>8.1f} MB")
    passed = memory_is_as_promised(logits_bytes, extra)
    print(f"  At most one gradient: {'PASSED' if passed else 'FAILED'}")
    return passed


def main() -> int:
    if not HAS_GPU:
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # NumPy's, of the interpreter's inf - inf in masked lanes
    print_title("Reverse-KL")
    print(f"{N_ROWS} rows of {V:,} logits.  error: against float64.", end="  ")
    print("allowed: twice eager's, plus a floor.")
    passed = True
    titles = ["Float32", "BFloat16 (bf16 logits and gradient, fp32 loss)", "Float16 (likewise)"]
    for number, (dtype, title) in enumerate(zip(DTYPES, titles), start=1):
        print(f"\nTest {number}: {title}")
        student, teacher, mask = make_inputs((N_ROWS, V), dtype)
        ours = loss_and_gradient(TritonReverseKLLoss(), student, teacher, mask)
        ref64, eagers = reference_and_eager(student, teacher, mask)
        loss, *gradients = compare_both(DTYPE_NAME[dtype], ours, ref64, eagers, student)
        passed &= print_loss(loss, ref64[0], ours[0])
        passed &= print_checks(gradients)
    passed &= print_memory()
    return print_verdict("reverse-KL", passed)


if __name__ == "__main__":
    command_line.run_main(main)
