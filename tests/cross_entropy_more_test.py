"""What is cross-entropy's alone: logits of any magnitude, targets, tiles, the gradient over the
logits, Hugging Face.

What every function has to do, cross-entropy too, is asked in tests/contracts_*_test.py.
"""

import pytest
import torch
import torch.nn.functional as F

from cross_entropy_inplace_kernel import cross_entropy_inplace, cross_entropy_scale
from cross_entropy_kernel import (
    TritonCrossEntropyLoss,
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_reference,
)
from cross_entropy_test import compare_both, loss_and_gradient, reference_and_eager, run_checks
from harness.benchmark.checking import DEVICE, HAS_GPU, assert_all_passed, compare
from tests import tiles
from tests.fixtures import COMPILED_DTYPE, needs_gpu, pads_rows, waiting_forbidden
from tests.subjects.cross_entropy import bad_input, make

N_ROWS, V = (
    (512, 128_256) if HAS_GPU else (24, 1_000)
)  # the table's shape; most tests need only a small one
SMALL_ROWS, SMALL_V = 5, 150
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
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
    """logits and targets: see the subject's record."""
    *rows, vocab = shape
    inputs, _ = make(tuple(rows), vocab, dtype, **options)
    return tuple(inputs.values())


# ---- the comparator can fail ---------------------------------------------------------------------


@pytest.mark.parametrize("rescale", [True, False])
def test_comparator_rejects_denominator_that_is_not_rescaled(rescale):
    logits, targets = make_inputs()
    logits += torch.linspace(
        0, 10, SMALL_V, device=DEVICE
    )  # each chunk has a larger maximum than the last

    def online_softmax(x, t):
        m, d = torch.full_like(x[:, 0], -INF), torch.zeros_like(x[:, 0])
        for chunk in x.split(64, dim=-1):
            m_new = torch.maximum(m, chunk.amax(-1))
            d = (d * (m - m_new).exp() if rescale else d) + (chunk - m_new[:, None]).exp().sum(-1)
            m = m_new
        row_loss = m + d.log() - x.gather(-1, t.clamp(min=0)[:, None])[:, 0]
        return row_loss[t != -100].mean()

    checks = run_checks(logits, targets, loss_fn=online_softmax)
    assert all(check.passed for check in checks) == rescale


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [(1, 16), (2, 32), (4, 16), (16, 64)])
def test_one_tile_and_many_give_the_reference(dtype, tile, monkeypatch):
    tiles.cross_entropy_tiles(monkeypatch, *tile)
    assert_all_passed(run_checks(*make_inputs(dtype=dtype)))


def test_worked_example_of_the_readme(monkeypatch):
    tiles.cross_entropy_tiles(monkeypatch, 1, 4)
    logits = torch.tensor([[2.0, 5.0, 1.0, 3.0, 4.0, 7.0, 2.0, 6.0]], device=DEVICE)
    loss, stats, n_valid = cross_entropy_forward(logits, torch.tensor([5], device=DEVICE))
    m, d, unit = stats[0].tolist()
    assert (round(loss.item(), 3), round(m / unit, 3), round(d, 3), n_valid.item()) == (
        0.462,
        7.0,
        1.587,
        1,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [80.0, -1e4])
def test_large_offset_does_not_cost_digits(dtype, offset):
    assert_all_passed(run_checks(*make_inputs(dtype=dtype, offset=offset)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("height", [5.0, 10.0, 15.0])
def test_gradient_of_confident_rows(height):
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn((48, SMALL_V), generator=generator, device=DEVICE)
    targets = torch.randint(SMALL_V, (48,), generator=generator, device=DEVICE)
    logits.scatter_(-1, targets[:, None], height)  # 1 - softmax(target) is about 0.6, 0.01 and 1e-4
    assert_all_passed(run_checks(logits, targets, torch.ones(48, device=DEVICE), reduction="none"))


def test_overflow_of_exp_without_the_maximum():
    logits, targets = make_inputs()
    assert_all_passed(run_checks(logits * 100, targets))


# ---- logits of any magnitude ---------------------------------------------------------------------

# From 2**31 / log2(e) = 1.5e9 on, exp2 would see nothing but the rounding of m * log2(e).
MAGNITUDES = [
    *(
        (torch.float32, magnitude)
        for magnitude in (1e4, 1.4e9, 1.6e9, 1e10, 1e30, torch.finfo(torch.float32).max)
    ),
    (torch.bfloat16, 1e10),
    (torch.bfloat16, torch.finfo(torch.bfloat16).max),
    (torch.float16, torch.finfo(torch.float16).max),
]


def rows_of_magnitude(magnitude, dtype, infinities=True):
    """Logits (n, SMALL_V) and targets (n,): each kind of row with a target in it that is large, and
    one that is not.
    """
    normal = torch.randn(SMALL_V, generator=torch.Generator().manual_seed(0))
    columns = torch.arange(SMALL_V)
    third, late = columns % 3 == 1, columns == 100  # the latter is in the second tile
    kinds = [
        torch.zeros(SMALL_V).masked_fill(late, magnitude),
        torch.zeros(SMALL_V).masked_fill(late, -magnitude),
        torch.full((SMALL_V,), magnitude),
        torch.full((SMALL_V,), -magnitude),
        torch.full((SMALL_V,), -magnitude).masked_fill(third, magnitude),
        normal.masked_fill(third, -magnitude),
        normal.masked_fill(~late, -magnitude),
        normal.masked_fill(columns < 128, -magnitude),  # columns of the tile have nothing else
        normal.masked_fill(columns >= 64, magnitude),
    ]
    if infinities:
        kinds += [
            torch.full((SMALL_V,), sign * magnitude).masked_fill(columns % 3 == 0, -INF)
            for sign in (1, -1)
        ]
    logits = torch.stack(kinds).repeat_interleave(2, 0).to(DEVICE, dtype)
    return logits, torch.tensor([100, 71], device=DEVICE).repeat(len(kinds))


def check_every_row(name, ours, ref64, eager):
    """A (loss, gradient), row by row: in a norm over all rows, the largest would hide the
    others.
    """
    for row in range(len(ours[0])):
        checks = [
            compare(f"{name}, row {row}", *(t[row] for t in part))
            for part in zip(ours, ref64, eager)
        ]
        assert_all_passed(checks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype, magnitude", MAGNITUDES)
@pytest.mark.parametrize("inplace", [False, True])
def test_logits_of_any_magnitude(dtype, magnitude, inplace):
    logits, targets = rows_of_magnitude(magnitude, dtype)
    grad_output = torch.ones(len(logits), device=DEVICE)
    way = overwritten if inplace and dtype != torch.float16 else rows_alone
    ours = way(logits, targets, grad_output, reduction="none")
    check_every_row(
        "large", ours, *reference_and_eager(logits, targets, grad_output, reduction="none")
    )


def test_loss_of_a_target_far_below_is_finite_as_long_as_pytorchs():
    for far in (1e4, 1e10, 3e38):  # times log2(e), 3e38 would be more than fp32 holds
        logits = torch.tensor([[0.0, -far, 1.0]], device=DEVICE)
        loss = TritonCrossEntropyLoss()(logits, torch.tensor([1], device=DEVICE))
        assert loss == F.cross_entropy(logits, torch.tensor([1], device=DEVICE)) and loss.isfinite()
    ends = torch.tensor(
        [[torch.finfo(torch.float32).max, torch.finfo(torch.float32).min]], device=DEVICE
    )
    assert TritonCrossEntropyLoss()(ends, torch.tensor([1], device=DEVICE)) == INF, (
        "as PyTorch's: 6.8e38"
    )


# ---- -inf, inf and NaN logits --------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mask", ["first chunk", "middle chunk", "all but one", "scattered", "lowest float"]
)
def test_masked_vocabulary_is_not_nan(mask):
    logits, targets = make_inputs()
    keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(
        -1, targets.clamp(min=0)[:, None], True
    )
    if mask == "first chunk":
        keep[:, 64:] = True
    elif mask == "middle chunk":
        keep[:, :64] = keep[:, 128:] = True
    elif mask != "all but one":
        keep |= torch.rand(logits.shape, device=DEVICE) < 0.5
    logits[~keep] = torch.finfo(torch.float32).min if mask == "lowest float" else -INF
    assert_all_passed(run_checks(logits, targets))
    _, gradient = loss_and_gradient(TritonCrossEntropyLoss(), logits, targets)
    assert (gradient[~keep] == 0).all()


def rows_alone(logits, targets, grad_output=None, reduction="none", **options):
    """Loss and gradient of every row, none divided by anything."""
    grad_output = (
        torch.ones_like(targets, dtype=torch.float32) if grad_output is None else grad_output
    )
    return loss_and_gradient(
        TritonCrossEntropyLoss(reduction=reduction, **options), logits, targets, grad_output
    )


def assert_only_row_3_differs(loss_and_gradient_a, loss_and_gradient_b):
    others = torch.arange(SMALL_ROWS, device=DEVICE) != 3
    for a, b in zip(loss_and_gradient_a, loss_and_gradient_b):
        assert torch.equal(a[others], b[others])
        assert not torch.equal(a[3], b[3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ["all -inf", "target -inf", "one inf", "one NaN"])
def test_unusual_row_is_as_in_pytorch_and_leaves_the_other_rows_alone(row):
    logits, targets = make_inputs()
    before = rows_alone(logits, targets)
    columns = {"target": targets[3], "all": slice(None), "one": 100}[row.split()[0]]
    logits[3, columns] = float(row.split()[1])
    after = rows_alone(logits, targets)
    assert_only_row_3_differs(before, after)
    grad_output = torch.ones(SMALL_ROWS, device=DEVICE)
    ref64, _ = reference_and_eager(logits, targets, grad_output, reduction="none")
    for ours, ref in zip(after, ref64):
        torch.testing.assert_close(ours[3], ref[3].float(), equal_nan=True)


def test_nan_logits_of_an_ignored_row_stay_out():
    logits, targets = make_inputs()
    plain = loss_and_gradient(TritonCrossEntropyLoss(), logits, targets)
    logits[targets == -100] = NAN
    loss, gradient = loss_and_gradient(TritonCrossEntropyLoss(), logits, targets)
    assert torch.equal(loss, plain[0])
    assert torch.equal(gradient, plain[1])


# ---- targets -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 1, 16, SMALL_V + 5, 2**40])
def test_ignored_rows_are_neither_counted_nor_trained(ignore_index):
    logits, targets = make_inputs(ignore_index=ignore_index)
    assert (targets == ignore_index).any()
    assert_all_passed(run_checks(logits, targets, ignore_index=ignore_index))
    loss, gradient = rows_alone(logits, targets, ignore_index=ignore_index)
    assert (loss[targets == ignore_index] == 0).all()
    assert (gradient[targets == ignore_index] == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("n_rows", [0, 3])
def test_no_valid_row_is_as_in_pytorch(n_rows, reduction):
    logits = torch.randn(n_rows, SMALL_V, device=DEVICE)
    targets = torch.full((n_rows,), -100, device=DEVICE)
    grad_output = torch.ones((n_rows,) if reduction == "none" else ())
    loss, gradient = loss_and_gradient(
        TritonCrossEntropyLoss(reduction=reduction), logits, targets, grad_output.to(DEVICE)
    )
    expected = cross_entropy_reference(logits, targets, reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert torch.equal(gradient, torch.zeros_like(logits))


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", [SMALL_V, SMALL_V + 10, -1, -99, 2**31, 2**40, -(2**40)])
def test_target_outside_the_vocabulary_gives_nan_for_its_row_only(target):
    logits, targets = make_inputs()
    before = rows_alone(logits, targets)
    targets[3] = target
    after = rows_alone(logits, targets)
    assert_only_row_3_differs(before, after)
    assert after[0][3].isnan() and after[1][3].isnan().all()
    assert TritonCrossEntropyLoss()(logits, targets).isnan()


@pytest.mark.exhaustive
@pytest.mark.parametrize("ignore_index", [-100, 2**40])
def test_int32_targets(ignore_index):
    logits, targets = make_inputs()
    options = {"ignore_index": ignore_index}
    targets.clamp_(min=0 if ignore_index > 0 else -100)
    ours = loss_and_gradient(TritonCrossEntropyLoss(**options), logits, targets.int())
    as_int64 = loss_and_gradient(TritonCrossEntropyLoss(**options), logits, targets)
    assert torch.equal(ours[0], as_int64[0]) and torch.equal(ours[1], as_int64[1])


# ---- layouts -------------------------------------------------------------------------------------

LAYOUTS = {
    "1-D, scalar target": lambda: make_inputs((SMALL_V,)),
    "3-D": lambda: make_inputs((2, 3, SMALL_V)),
    "4-D": lambda: make_inputs((2, 1, 3, SMALL_V)),
    "transposed": lambda: with_logits(make_inputs(), lambda x: x.t().contiguous().t()),
    "batch transposed": lambda: with_logits(
        make_inputs((2, 3, SMALL_V)), lambda x: x.mT.contiguous().mT
    ),
    "every other column": lambda: with_logits(
        make_inputs(), lambda x: x.repeat_interleave(2, -1)[:, ::2]
    ),
    "padded vocabulary": lambda: with_logits(make_inputs(), lambda x: F.pad(x, (0, 10))[:, :-10]),
    "odd row stride": lambda: with_logits(make_inputs(), lambda x: F.pad(x, (1, 2))[:, 1:-2]),
    "last token dropped": lambda: with_logits(
        make_inputs((2, 3, SMALL_V)), lambda x: F.pad(x, (0, 0, 0, 1))[:, :-1]
    ),
    "expanded": lambda: with_logits(make_inputs(), lambda x: x[:1].expand(SMALL_ROWS, -1)),
    "one column": lambda: with_logits(make_inputs((4, 1)), lambda x: F.pad(x, (0, 6))[:, :1]),
    "targets with a stride": lambda: with_targets(
        make_inputs(), lambda t: torch.stack([t, t - 1], -1)[:, 0]
    ),
    "targets transposed": lambda: with_targets(
        make_inputs((3, 2, SMALL_V)), lambda t: t.mT.contiguous().mT
    ),
    "targets expanded": lambda: with_targets(make_inputs(), lambda t: t[:1].expand(SMALL_ROWS)),
}


def with_logits(inputs, change):
    return change(inputs[0]), inputs[1]


def with_targets(inputs, change):
    return inputs[0], change(inputs[1])


# ---- upstream gradients --------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_arbitrary_grad_output(reduction):
    logits, targets = make_inputs((2, 3, SMALL_V))
    grad_output = torch.randn((2, 3) if reduction == "none" else (), device=DEVICE)
    assert_all_passed(run_checks(logits, targets, grad_output, reduction=reduction))


def test_sum_of_row_losses_gives_the_gradient_of_sum():
    logits, targets = make_inputs()
    by_rows = loss_and_gradient(
        lambda x, t: TritonCrossEntropyLoss(reduction="none")(x, t).sum(), logits, targets
    )
    by_sum = loss_and_gradient(TritonCrossEntropyLoss(reduction="sum"), logits, targets)
    assert torch.equal(by_rows[1], by_sum[1])


def test_zero_grad_output_gives_zero_not_nan():
    logits, targets = make_inputs()
    logits[:, :70] = -INF
    _, gradient = loss_and_gradient(
        TritonCrossEntropyLoss(), logits, targets, torch.zeros((), device=DEVICE)
    )
    assert (gradient[targets >= 70] == 0).all()


# ---- autograd's contract -------------------------------------------------------------------------


def test_loss_is_fp32_and_gradient_has_the_logits_dtype():
    logits, targets = make_inputs(dtype=torch.bfloat16)
    loss, gradient = loss_and_gradient(TritonCrossEntropyLoss(), logits, targets)
    assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)


def test_gradients_accumulate_over_micro_batches():
    logits, targets = make_inputs((6, SMALL_V))

    def micro_batches(loss_fn):
        return lambda x, t: sum(loss_fn(x[rows], t[rows]) for rows in (slice(0, 2), slice(2, 6)))

    # not bit for bit: a row that begins elsewhere is cut elsewhere, and its sum is taken in another
    # order
    assert_all_passed(
        run_checks(
            logits,
            targets,
            loss_fn=micro_batches(TritonCrossEntropyLoss(reduction="sum")),
            reduction="sum",
        )
    )


def test_no_grad_and_frozen_logits_build_no_graph():
    logits, targets = make_inputs()
    frozen = TritonCrossEntropyLoss(inplace=True)(logits, targets)
    with torch.no_grad():
        unrecorded = TritonCrossEntropyLoss()(logits.requires_grad_(), targets)
    assert frozen.grad_fn is None and unrecorded.grad_fn is None
    assert torch.equal(frozen, unrecorded)


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_launchers_work_without_autograd(reduction):
    logits, targets = make_inputs(dtype=torch.bfloat16)
    grad_output = torch.randn((SMALL_ROWS,) if reduction == "none" else (), device=DEVICE)
    expected = loss_and_gradient(
        TritonCrossEntropyLoss(reduction=reduction), logits, targets, grad_output
    )
    loss, stats, n_valid = cross_entropy_forward(logits, targets, reduction=reduction)
    new = cross_entropy_backward(grad_output, logits, targets, stats, n_valid)
    assert new.data_ptr() != logits.data_ptr()
    assert torch.equal(loss, expected[0]) and torch.equal(new, expected[1])
    loss = cross_entropy_inplace(logits, targets, reduction=reduction)
    cross_entropy_scale(grad_output, logits, targets)
    assert torch.equal(loss, expected[0])
    torch.testing.assert_close(logits, new, rtol=2**-6, atol=0)  # rounded twice


# ---- inplace=True --------------------------------------------------------------------------------


def overwritten(values, targets, grad_output=None, **options):
    """(loss, gradient) of inplace=True; the gradient lies where the logits were."""
    leaf = values.clone().requires_grad_()
    logits = leaf * 1.0
    gradients = []
    logits.register_hook(gradients.append)
    loss = TritonCrossEntropyLoss(inplace=True, **options)(logits, targets)
    loss.backward(None if grad_output is None else grad_output.to(loss.dtype))
    assert gradients[0].data_ptr() == logits.data_ptr()
    assert torch.equal(leaf, values)
    return loss.detach(), leaf.grad


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(SMALL_ROWS, SMALL_V), (2, 3, SMALL_V), (SMALL_V,), (9, 1), (7, 64)]
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_inplace_writes_the_gradient_over_the_logits(shape, dtype, reduction):
    values, targets = make_inputs(shape, dtype)
    ours = overwritten(values, targets, reduction=reduction)
    assert_all_passed(
        compare_both(
            "in place", ours, *reference_and_eager(values, targets, reduction=reduction), targets
        )
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_inplace_gradient_is_multiplied_by_any_grad_output(dtype, reduction):
    values, targets = make_inputs((2, 3, SMALL_V), dtype)
    grad_output = torch.randn((2, 3) if reduction == "none" else (), device=DEVICE)
    ours = overwritten(values, targets, grad_output, reduction=reduction)
    references = reference_and_eager(values, targets, grad_output, reduction=reduction)
    assert_all_passed(compare_both("in place", ours, *references, targets))


def test_inplace_ignored_row_gets_zeros_even_where_its_logits_are_nan():
    values, targets = make_inputs()
    expected = overwritten(values, targets)
    values[targets == -100] = NAN
    leaf = values.requires_grad_()
    loss = TritonCrossEntropyLoss(inplace=True)(leaf * 1.0, targets)
    loss.backward()
    assert torch.equal(loss, expected[0]) and torch.equal(leaf.grad, expected[1])
    assert (leaf.grad[targets == -100] == 0).all()


@pytest.mark.exhaustive
def test_inplace_table_shape_with_the_shipped_tiles(monkeypatch):
    tiles.shipped_tiles(monkeypatch)
    for vocab in (V, 777):
        values, targets = make_inputs((N_ROWS, vocab), torch.bfloat16)
        ours = overwritten(values, targets)
        assert_all_passed(
            compare_both("in place", ours, *reference_and_eager(values, targets), targets)
        )


def test_inplace_without_a_gradient_to_compute_leaves_the_logits_alone():
    values, targets = make_inputs()
    logits = values.clone().requires_grad_() * 1.0
    with torch.no_grad():
        TritonCrossEntropyLoss(inplace=True)(logits, targets)
    assert torch.equal(logits, values)


def test_inplace_in_fp16_waits_for_the_loss_scale():
    values, targets = make_inputs(dtype=torch.float16)
    leaf = values.clone().requires_grad_()
    logits = leaf * 1.0
    loss = TritonCrossEntropyLoss(inplace=True)(logits, targets)
    assert torch.equal(logits, values), (
        "divided by n_valid before it is scaled, fp16's gradient could become 0"
    )
    scale = torch.tensor(1024.0, device=DEVICE)
    loss.backward(scale)
    references = reference_and_eager(values, targets, scale)
    assert_all_passed(compare_both("fp16", (loss.detach(), leaf.grad), *references, targets))


def test_inplace_second_backward_raises():
    values, targets = make_inputs()
    logits = values.requires_grad_().clone()
    loss = TritonCrossEntropyLoss(inplace=True)(logits, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_second_loss_on_the_same_logits_raises():
    values, targets = make_inputs()
    logits = values.requires_grad_().clone()
    loss_fn = TritonCrossEntropyLoss(inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss_fn(logits, targets) + loss_fn(logits, targets.flip(0))).backward()


def test_inplace_other_saved_use_of_the_logits_raises():
    values, targets = make_inputs()
    logits = values.requires_grad_().tanh()  # like a soft cap: its backward reads its output
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        TritonCrossEntropyLoss(inplace=True)(logits, targets).backward()


def test_inplace_use_saved_before_raises_even_if_the_loss_is_never_trained_on():
    values, targets = make_inputs()
    logits = values.requires_grad_() * 1.0
    penalty = logits.square().sum()  # its backward reads the logits
    TritonCrossEntropyLoss(inplace=True)(logits, targets)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_inplace_leaf_is_refused_because_its_grad_would_be_its_own_memory():
    logits, targets = make_inputs()
    before = logits.clone()
    logits.requires_grad_()
    for leaf in (logits, logits.view(SMALL_ROWS, SMALL_V)):
        with pytest.raises(ValueError, match=r"is a leaf: True, .*; expected a contiguous result"):
            TritonCrossEntropyLoss(inplace=True)(leaf, targets)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "layout",
    ["transposed", "every other column", "padded vocabulary", "last token dropped", "expanded"],
)
def test_inplace_refuses_memory_that_cannot_hold_the_gradient(layout):
    logits, targets = LAYOUTS[layout]()
    before = logits.clone()
    with pytest.raises(ValueError, match="expected a contiguous result of its own to overwrite"):
        cross_entropy_inplace(logits, targets)
    assert torch.equal(logits, before)


# ---- Hugging Face --------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_items_in_batch", [None, 11])
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_hugging_face_on_shifted_labels(dtype, num_items_in_batch):
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    logits, labels = make_inputs((2, 5, SMALL_V), dtype)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]

    def hugging_face(x, _):
        return loss_utils.ForCausalLMLoss(x, labels, SMALL_V, num_items_in_batch=num_items_in_batch)

    def ours(x, t):
        if num_items_in_batch is None:
            return TritonCrossEntropyLoss()(x, t)
        return TritonCrossEntropyLoss(reduction="sum")(x, t) / num_items_in_batch

    def ref64(x, t):
        total = cross_entropy_reference(x, t, reduction="sum")
        return total / (num_items_in_batch or (t != -100).sum())

    assert_all_passed(
        compare_both(
            "Hugging Face",
            loss_and_gradient(ours, logits, shifted),
            loss_and_gradient(ref64, logits.double(), shifted),
            loss_and_gradient(hugging_face, logits, shifted),
            shifted,
        )
    )


# ---- bad input -----------------------------------------------------------------------------------

X, T, STATS = torch.zeros(2, 5), torch.zeros(2, dtype=torch.long), torch.ones(2, 3)


@pytest.mark.parametrize("mistake", bad_input())
def test_launcher_of_the_backward_refuses_with_the_same_sentence(mistake):
    bad = bad_input()[mistake]
    with pytest.raises(bad.error, match=bad.sentence):
        cross_entropy_backward(torch.ones((), device=DEVICE), *bad.inputs, STATS.to(DEVICE), None)


def test_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction is 'avg', expected 'mean', 'sum' or 'none'"):
        TritonCrossEntropyLoss(reduction="avg")(X.to(DEVICE), T.to(DEVICE))
    with pytest.raises(ValueError, match="reduction is 'avg', expected 'mean', 'sum' or 'none'"):
        cross_entropy_forward(X.to(DEVICE), T.to(DEVICE), reduction="avg")


@pytest.mark.parametrize("which", ["logits", "targets", "grad_output", "stats"])
def test_launcher_of_the_backward_refuses_a_dtensor(as_dtensor, which):
    tensors = {"grad_output": torch.ones(()), "logits": X, "targets": T, "stats": STATS}
    tensors = {name: t.to(DEVICE) for name, t in tensors.items()}
    tensors[which] = as_dtensor(tensors[which])
    advice = r"pass its to_local\(\) or full_tensor\(\)\."
    with pytest.raises(TypeError, match=f"{which} is a DTensor, expected a plain tensor: {advice}"):
        cross_entropy_backward(*tensors.values(), None)


@pytest.mark.parametrize(
    "name, given",
    [("grad_output", torch.ones(3)), ("stats", torch.ones(2, 2)), ("stats", torch.ones(3, 3))],
)
def test_launcher_of_the_backward_refuses_what_is_no_result_of_a_forward(name, given):
    tensors = {"grad_output": torch.ones(()), "logits": X, "targets": T, "stats": STATS}
    tensors = {name: t.to(DEVICE) for name, t in (tensors | {name: given}).items()}
    with pytest.raises(ValueError, match=rf"{name} has shape .*, expected \(2"):
        cross_entropy_backward(*tensors.values(), None)


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.fixture
def nothing_poisoned(monkeypatch):
    """What compiled code allocates is filled nowhere; and rows of 5,001 want the shipped tiles."""
    torch.use_deterministic_algorithms(False)
    tiles.shipped_tiles(monkeypatch)


def between_products(loss_fn):
    """The logits are neither input nor result of the graph, and so lie as the compiler likes."""

    def graph(x, w, v, targets):
        loss = loss_fn(x @ w, targets)
        return loss @ v if loss.ndim else loss * v.sum()

    return graph


def graph_inputs(n_rows, vocab, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x, w = (torch.randn(s, generator=generator, device=DEVICE) for s in ((n_rows, 32), (32, vocab)))
    v = torch.rand(n_rows, generator=generator, device=DEVICE)
    targets = torch.randint(vocab, (n_rows,), generator=generator, device=DEVICE)
    targets[1::3] = -100
    return *(t.to(COMPILED_DTYPE) for t in (x, w / 2)), v, targets


def run_graph(graph, x, w, v, targets):
    """The graph's result, and the gradients of x and w."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    result = graph(x, w, v, targets)
    result.backward()
    return result.detach(), x.grad, w.grad


@pads_rows
@pytest.mark.parametrize(
    "layout",
    ["padded vocabulary", "every other column", "last token dropped", "1-D, scalar target"],
)
def test_torch_compile_of_any_layout(layout, nothing_poisoned):
    logits, targets = LAYOUTS[layout]()
    loss_fn = TritonCrossEntropyLoss(reduction="none")
    grad_output = torch.randn(targets.shape, device=DEVICE)
    ours = loss_and_gradient(torch.compile(loss_fn, fullgraph=True), logits, targets, grad_output)
    expected = loss_and_gradient(loss_fn, logits, targets, grad_output)
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])


@pads_rows
def test_torch_compile_in_place_gives_ignored_rows_zeros_even_where_their_logits_are_nan(
    nothing_poisoned,
):
    x, w, v, targets = graph_inputs(6, 1289)
    x[targets == -100] = NAN
    compiled = torch.compile(between_products(TritonCrossEntropyLoss(inplace=True)), fullgraph=True)
    _, dx, _ = run_graph(compiled, x, w, v, targets)
    assert (dx[targets == -100] == 0).all() and dx.isfinite().all()


@pads_rows
def test_torch_compile_refuses_to_overwrite_a_leaf_with_the_same_sentence(nothing_poisoned):
    logits, targets = make_inputs()
    before = logits.clone()
    compiled = torch.compile(
        TritonCrossEntropyLoss(inplace=True), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(
        Exception, match=r"is a leaf: True, .*; expected a contiguous result of its own"
    ):
        compiled(logits.requires_grad_(), targets)
    assert torch.equal(logits, before)


@pads_rows
@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("use", ["tanh", "penalty"])
def test_torch_compile_in_place_refuses_other_uses_before_the_loss(use, nothing_poisoned):
    loss_fn = TritonCrossEntropyLoss(inplace=True)

    def graph(x, w, v, targets):
        logits = (x @ w).tanh() if use == "tanh" else x @ w * 1.0
        penalty = (
            0 if use == "tanh" else logits.square().sum()
        )  # the backwards of both read the logits
        return loss_fn(logits, targets) + penalty

    compiled = torch.compile(graph, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="modified by an inplace operation"):
        run_graph(compiled, *graph_inputs(5, SMALL_V))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout", ["contiguous", "padded vocabulary", "transposed", "1-D, scalar target"]
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_operators_promise_torch_compile_what_they_return(layout, reduction):
    logits, targets = make_inputs() if layout == "contiguous" else LAYOUTS[layout]()
    loss, stats, n_valid = cross_entropy_forward(logits, targets, reduction=reduction)
    grad_output = torch.ones_like(loss)
    ops = torch.library.opcheck
    tests = {"test_utils": ["test_schema", "test_faketensor"]}  # they have no autograd of their own
    ops(cross_entropy_forward.operator, (logits, targets, -100, reduction), **tests)
    inputs = grad_output, logits, targets, stats, n_valid, -100
    ops(cross_entropy_backward.operator, inputs, **tests)
    if logits.is_contiguous():
        ops(cross_entropy_inplace.operator, (logits.clone(), targets, -100, reduction), **tests)


# ---- on a GPU only -------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("inplace", [False, True])
def test_host_never_waits_for_the_gpu(reduction, inplace):
    loss_fn = TritonCrossEntropyLoss(reduction=reduction, inplace=inplace)
    values, targets = make_inputs()
    targets[0] = SMALL_V  # nor does it look for bad targets
    leaf = values.requires_grad_()
    loss_fn(leaf * 1.0, targets).sum().backward()  # compiles
    with waiting_forbidden():
        loss_fn(leaf * 1.0, targets).sum().backward()
