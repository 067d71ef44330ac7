"""What is reverse KL's alone: logits of any magnitude and -inf, masks, temperatures, a vocabulary
over processes.

What every function has to do, reverse KL too, is asked in tests/contracts_*_test.py.  The subject's
record says in which two parts a gradient is compared.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from harness.benchmark.checking import Check, assert_all_passed, compare
from harness.cli.device import DEVICE, HAS_GPU
from next_steps.lessons import reverse_kl_kernel
from next_steps.lessons.reverse_kl_kernel import (
    SHRINK,
    TritonReverseKLLoss,
    combine_statistics,
    reverse_kl_backward,
    reverse_kl_forward,
    reverse_kl_reference,
)
from subjects.reverse_kl import MEAN, bad_input, make, many_times, reference
from subjects.subject import Subject, checks, compare_parts, references, run
from tests import tiles
from tests.cross_entropy_more_test import (  # noqa: F401  pytestmark is pytest's
    assert_only_row_3_differs,
    pytestmark,
)
from tests.two_processes import in_two_processes

SMALL_ROWS, SMALL_V = 5, 150
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["batchmean", "sum", "none"]
NAN, INF = float("nan"), float("inf")


def make_inputs(shape=(SMALL_ROWS, SMALL_V), dtype=torch.float32, **options):
    """student, teacher and mask: see the subject's record."""
    *rows, vocab = shape
    inputs, _ = make(tuple(rows), vocab, dtype, **options)
    return tuple(inputs.values())


def subject_of(loss_fn=None, **options) -> Subject:
    """Reverse KL with these options, or `loss_fn` in its place."""
    return replace(
        MEAN,
        function=loss_fn or TritonReverseKLLoss(**options),
        reference=reference(**options),
        eagers=many_times(n_orders=4, **options),
    )


def named(student, teacher, mask=None, grad_output=None):
    """Return the inputs and the upstream gradient, 1 unless given, as a subject has them."""
    inputs = {"student_logits": student, "teacher_logits": teacher}
    inputs |= {} if mask is None else {"mask": mask}
    return inputs, {"loss": torch.ones((), device=DEVICE) if grad_output is None else grad_output}


def loss_and_gradient(loss_fn, *tensors):
    """Return the loss and d loss / d student; the logits are used with their strides."""
    return tuple(run(MEAN, loss_fn, *named(*tensors)).values())


def run_checks(*tensors, loss_fn=None, **options) -> list[Check]:
    """Compare the kernel, or `loss_fn` in its place: loss, most probable columns, others."""
    return checks(subject_of(loss_fn, **options), *named(*tensors))


# ---- the reference and the comparator ------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reference_is_pytorchs_kl_div(reduction):
    student, teacher, _ = (x.double() for x in make_inputs())

    def kl_div(s, t):
        log_p, log_q = (F.log_softmax(x / 0.7, -1) for x in (s, t))
        rows = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
        by_pytorch = F.kl_div(log_q, log_p, log_target=True, reduction=reduction)
        return rows if reduction == "none" else by_pytorch

    ours = reference(temperature=0.7, reduction=reduction)
    grad_output = torch.rand(SMALL_ROWS if reduction == "none" else (), device=DEVICE)
    tensors = student, teacher, None, grad_output
    torch.testing.assert_close(
        loss_and_gradient(ours, *tensors), loss_and_gradient(kl_div, *tensors)
    )


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [(1, 4), (4, 2), (4, 16)])
def test_one_tile_and_many_give_the_reference(dtype, tile, monkeypatch):
    tiles.reverse_kl_tiles(monkeypatch, *tile)
    assert_all_passed(run_checks(*make_inputs(dtype=dtype)))


def test_one_column_has_loss_and_gradient_of_zero():
    loss, gradient = loss_and_gradient(TritonReverseKLLoss(), *make_inputs((4, 1)))
    assert loss.abs() < 1e-6 and (gradient.abs() < 1e-6).all()


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
    assert_all_passed(run_checks(student, student + (teacher - student) * 1e-2, mask))


@pytest.mark.exhaustive
def test_logits_of_two_dtypes():
    student, teacher, mask = make_inputs(dtype=torch.bfloat16)
    assert_all_passed(run_checks(student, teacher.float() + 1e-3, mask))
    assert_all_passed(run_checks(student.float() + 1e-3, teacher, mask))


# ---- logits of any magnitude ---------------------------------------------------------------------

# the difference of two of these is one that PyTorch can hold
HALF = torch.finfo(torch.float32).max / 2
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
    # else the KL is infinite
    pairs = [(s, t) for s in kinds for t in kinds if t[1] > -INF or s[1] == -INF]
    return (torch.stack(side).to(DEVICE, dtype) for side in zip(*pairs))


def check_every_row(student, teacher, loss, gradient, temperature=1.0):
    """Row by row: in a norm over all rows, the largest would hide the others.

    The gradient is p * (log-ratio - KL) / T.  Where both are 1e10, what remains of their digits is
    luck.  So p * KL / T is added again, in float64, and what is compared is p * log-ratio / T,
    which is not luck.
    """
    subject = subject_of(temperature=temperature, reduction="none")
    ones = torch.ones(len(student), device=DEVICE)
    ref64, eagers = references(subject, *named(student, teacher, None, ones))
    p = (student.double() / temperature).softmax(-1)
    ours = {"loss": loss, "dstudent_logits": gradient}

    def compared(parts):
        """The losses and p * log-ratio / T."""
        subtracted = p * ref64["loss"][:, None] / temperature
        return parts["loss"], parts["dstudent_logits"] + subtracted

    ours, ref64, *eagers = map(compared, (ours, ref64, *eagers))
    for number, dtype in enumerate((torch.float32, student.dtype)):
        for row in range(len(student)):
            name = f"{('loss', 'p * log-ratio')[number]} of row {row}"
            pair = ours[number][row], ref64[number][row]
            found = [compare(name, *pair, eager[number][row], dtype) for eager in eagers]
            assert_all_passed([max(found, key=lambda check: check.allowed)])


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
        _, gradient = loss_and_gradient(TritonReverseKLLoss(), student, teacher, mask)
        assert (gradient[:, gone] == 0).all()


def rows_alone(student, teacher, mask=None):
    """Loss and gradient of every row, none divided by anything."""
    ones = torch.ones(student.shape[:-1], device=DEVICE)
    return loss_and_gradient(TritonReverseKLLoss(reduction="none"), student, teacher, mask, ones)


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [[100], [0], [149], [1, 70, 140]])
def test_mass_where_the_teacher_has_none_is_inf_as_in_pytorch(columns):
    student, teacher, _ = make_inputs()
    before = rows_alone(student, teacher)
    teacher[3, columns] = -INF
    after = rows_alone(student, teacher)
    assert_only_row_3_differs(before, after)
    ones = torch.ones(SMALL_ROWS, device=DEVICE)
    wide = reference(reduction="none"), student.double(), teacher.double(), None, ones
    loss, gradient = (part[3].float() for part in loss_and_gradient(*wide))
    assert after[0][3] == INF == loss
    # -inf in the other columns
    torch.testing.assert_close(after[1][3], gradient, rtol=0, atol=0, equal_nan=True)


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
@pytest.mark.parametrize("factor", [1.0, 0.0])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("masked", [True, False])
def test_reductions_with_and_without_a_mask(reduction, masked, factor):
    student, teacher, mask = make_inputs((2, 3, SMALL_V))
    grad_output = factor * torch.randn((2, 3) if reduction == "none" else (), device=DEVICE)
    mask = mask if masked else None
    assert_all_passed(run_checks(student, teacher, mask, grad_output, reduction=reduction))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "ignore_index, dtype", [(-100, torch.int64), (0, torch.int64), (1, torch.int32)]
)
def test_targets_as_a_mask(ignore_index, dtype):
    student, teacher, mask = make_inputs()
    targets = torch.where(mask, torch.arange(20, 25, device=DEVICE), ignore_index).to(dtype)
    by_mask = loss_and_gradient(TritonReverseKLLoss(), student, teacher, mask)
    loss_fn = TritonReverseKLLoss(ignore_index=ignore_index)
    by_targets = loss_and_gradient(loss_fn, student, teacher, targets)
    assert all(torch.equal(a, b) for a, b in zip(by_mask, by_targets))
    assert_all_passed(run_checks(student, teacher, targets, ignore_index=ignore_index))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("n_rows", [0, 3])
def test_no_row_that_counts_is_as_in_pytorch(n_rows, reduction):
    student, teacher = torch.randn(2, n_rows, SMALL_V, device=DEVICE)
    mask = torch.zeros(n_rows, dtype=torch.bool, device=DEVICE)
    grad_output = torch.ones((n_rows,) if reduction == "none" else (), device=DEVICE)
    loss_fn = TritonReverseKLLoss(reduction=reduction)
    loss, gradient = loss_and_gradient(loss_fn, student, teacher, mask, grad_output)
    expected = reverse_kl_reference(student, teacher, mask, reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert torch.equal(gradient, torch.zeros_like(student))


# ---- autograd ------------------------------------------------------------------------------------


def test_gradient_of_the_forward_becomes_the_leafs_without_a_copy(monkeypatch):
    """And it is computed only where somebody needs it."""
    results, forward = [], reverse_kl_kernel.reverse_kl_forward

    def kept(*args):
        results.append(forward(*args))
        return results[-1]

    monkeypatch.setattr(reverse_kl_kernel, "reverse_kl_forward", kept)
    leaf, teacher, mask = make_inputs()
    TritonReverseKLLoss()(leaf, teacher, mask)
    leaf.requires_grad_()
    with torch.no_grad():
        TritonReverseKLLoss()(leaf, teacher, mask)
    loss = TritonReverseKLLoss()(leaf, teacher, mask)
    *unneeded, dstudent = (results.pop(0)[3] for _ in range(3))
    assert unneeded == [None, None] and dstudent is not None
    where = dstudent.data_ptr()
    del dstudent  # autograd copies what somebody else holds
    loss.backward()
    assert leaf.grad.data_ptr() == where


def test_teacher_that_needs_a_gradient_is_refused():
    student, teacher, mask = make_inputs()
    teacher.requires_grad_()
    sentence = "teacher_logits requires a gradient, expected a constant: pass"
    with pytest.raises(ValueError, match=sentence):
        TritonReverseKLLoss()(student, teacher, mask)
    with torch.no_grad():
        TritonReverseKLLoss()(student, teacher, mask)


# ---- vocabulary split over processes -------------------------------------------------------------


def shard(tensor, rank):
    return tensor[..., :50] if rank == 0 else tensor[..., 50:]  # 50 and 100 columns


# reduction: grad_output
SPLIT = {"batchmean": torch.tensor(0.5), "none": torch.arange(1.0, SMALL_ROWS + 1)}


def run_shard(rank, device, inputs):
    """Return, for each reduction, the loss and the gradient of this process's columns."""
    student, teacher, mask = inputs
    group = torch.distributed.group.WORLD
    return {
        reduction: loss_and_gradient(
            TritonReverseKLLoss(0.7, reduction=reduction, group=group),
            *(shard(student, rank), shard(teacher, rank), mask, grad_output),
        )
        for reduction, grad_output in SPLIT.items()
    }


@pytest.mark.exhaustive
@pytest.mark.skipif(HAS_GPU, reason="two processes on the CPU")
def test_vocabulary_split_over_two_processes(tmp_path):
    inputs = student, teacher, _ = make_inputs()
    student[0, :50] = teacher[0, :50] = -INF  # one process has nothing of this row
    one, two = in_two_processes(run_shard, tmp_path, inputs)
    for reduction, grad_output in SPLIT.items():
        (loss, left), (same_loss, right) = one[reduction], two[reduction]
        assert torch.equal(loss, same_loss)
        subject = subject_of(temperature=0.7, reduction=reduction)
        tensors = named(*inputs, grad_output)
        whole = {"loss": loss, "dstudent_logits": torch.cat([left, right], -1)}
        found = compare_parts(subject, whole, tensors[0], *references(subject, *tensors))
        assert_all_passed(found)


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

X, STATS = torch.zeros(2, 5, device=DEVICE), torch.ones(2, 5, device=DEVICE)
M, ONE = torch.ones(2, dtype=torch.bool, device=DEVICE), torch.ones((), device=DEVICE)


@pytest.mark.parametrize("mistake", bad_input())
def test_launcher_of_the_backward_refuses_with_the_same_sentence(mistake):
    bad = bad_input()[mistake]
    with pytest.raises(bad.error, match=bad.sentence):
        reverse_kl_backward(ONE, *bad.inputs, STATS, None, 1.0, "batchmean")


def test_launchers_refuse_targets_for_a_mask():
    with pytest.raises(TypeError, match=r"mask is torch\.int64, expected torch\.bool: convert it"):
        reverse_kl_forward(X, X, M.long())


def test_unknown_reduction_and_temperature_are_refused():
    expected = "expected 'batchmean', 'sum' or 'none', and a positive number"
    with pytest.raises(ValueError, match=f"reduction is 'mean', temperature 1.0; {expected}"):
        TritonReverseKLLoss(1, reduction="mean")(X, X)
    for temperature in (0.0, -1.0, INF, NAN):
        with pytest.raises(ValueError, match=f"temperature {temperature}; {expected}"):
            TritonReverseKLLoss(temperature)(X, X)


def test_launcher_of_the_backward_refuses_a_dtensor(as_dtensor):
    with pytest.raises(TypeError, match=r"grad_output is a DTensor, expected a plain tensor"):
        reverse_kl_backward(as_dtensor(ONE), X, X, M, STATS, None, 1.0, "sum")
