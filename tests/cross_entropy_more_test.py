"""What is cross-entropy's alone: logits of any magnitude, targets, tiles, the gradient over the
logits.

What every function has to do, cross-entropy too, is asked in tests/contracts_*_test.py.
"""

import pytest
import torch
import torch.nn.functional as F

from cross_entropy_kernel import (
    TritonCrossEntropyLoss,
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_inplace,
    cross_entropy_reference,
)
from cross_entropy_test import compare_both, loss_and_gradient, reference_and_eager, run_checks
from harness.benchmark.checking import assert_all_passed, compare
from harness.cli.device import DEVICE
from judging.layouts import layouts_of
from subjects.cross_entropy import SUBJECTS, bad_input, make
from subjects.subject import run
from tests import tiles
from tests.contracts_compile_test import compiled, in_a_larger_graph
from tests.fixtures import COMPILED_DTYPE, pads_rows

SMALL_ROWS, SMALL_V = 5, 150
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN, INF = float("nan"), float("inf")

# 0 / 0 and inf - inf are the right answers in some tests; the interpreter's NumPy comments on them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("poison_new_tensors", "small_tiles"),
]


def make_inputs(shape=(SMALL_ROWS, SMALL_V), dtype=torch.float32, **options):
    """logits and targets: see the subject's record."""
    *rows, vocab = shape
    inputs, _ = make(tuple(rows), vocab, dtype, **options)
    return tuple(inputs.values())


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
    found = [round(number, 3) for number in (loss.item(), m / unit, d, n_valid.item())]
    assert found == [0.462, 7.0, 1.587, 1]


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
    """Logits (n, SMALL_V), targets (n,): each kind of row, with a large target and another one."""
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
    """Compare row by row: in a norm over all rows, the largest would hide the others."""
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
    references = reference_and_eager(logits, targets, grad_output, reduction="none")
    check_every_row("large", ours, *references)


def test_loss_of_a_target_far_below_is_finite_as_long_as_pytorchs():
    for far in (1e4, 1e10, 3e38):  # times log2(e), 3e38 would be more than fp32 holds
        logits = torch.tensor([[0.0, -far, 1.0]], device=DEVICE)
        loss = TritonCrossEntropyLoss()(logits, torch.tensor([1], device=DEVICE))
        assert loss == F.cross_entropy(logits, torch.tensor([1], device=DEVICE)) and loss.isfinite()
    largest = torch.finfo(torch.float32).max
    ends = torch.tensor([[largest, -largest]], device=DEVICE)
    loss = TritonCrossEntropyLoss()(ends, torch.tensor([1], device=DEVICE))
    assert loss == INF, "as PyTorch's: 6.8e38"


# ---- -inf, inf and NaN logits --------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mask", ["first chunk", "middle chunk", "all but one", "scattered", "lowest float"]
)
def test_masked_vocabulary_is_not_nan(mask):
    logits, targets = make_inputs()
    keep = F.one_hot(targets.clamp(min=0), SMALL_V).bool()
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
    loss_fn = TritonCrossEntropyLoss(reduction=reduction, **options)
    return loss_and_gradient(loss_fn, logits, targets, grad_output)


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
    loss, gradient = loss_and_gradient(TritonCrossEntropyLoss(reduction=reduction), logits, targets)
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


# ---- upstream gradients --------------------------------------------------------------------------


def test_zero_grad_output_gives_zero_not_nan():
    logits, targets = make_inputs()
    logits[:, :70] = -INF
    zero = torch.zeros((), device=DEVICE)
    _, gradient = loss_and_gradient(TritonCrossEntropyLoss(), logits, targets, zero)
    assert (gradient[targets >= 70] == 0).all()


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
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("given", [torch.ones, torch.randn])
def test_inplace_writes_the_gradient_over_the_logits(given, reduction, dtype):
    """And the same in new memory."""
    values, targets = make_inputs((2, 3, SMALL_V), dtype)
    grad_output = given((2, 3) if reduction == "none" else (), device=DEVICE)
    references = reference_and_eager(values, targets, grad_output, reduction=reduction)
    for way in (overwritten, rows_alone):
        ours = way(values, targets, grad_output, reduction=reduction)
        assert_all_passed(compare_both(way.__name__, ours, *references, targets))


@pytest.mark.parametrize("inplace", [False, True])
def test_ignored_row_gets_zeros_even_where_its_logits_are_nan(inplace):
    values, targets = make_inputs()
    loss_fn = TritonCrossEntropyLoss(inplace=inplace)

    def of_a_result(x, t):
        return loss_fn(x * 1.0, t)

    plain = loss_and_gradient(of_a_result, values, targets)
    values[targets == -100] = NAN
    loss, gradient = loss_and_gradient(of_a_result, values, targets)
    assert torch.equal(loss, plain[0]) and torch.equal(gradient, plain[1])
    assert (gradient[targets == -100] == 0).all()


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
    # divided by n_valid before it is scaled, fp16's gradient could become 0
    assert torch.equal(logits, values)
    scale = torch.tensor(1024.0, device=DEVICE)
    loss.backward(scale)
    references = reference_and_eager(values, targets, scale)
    assert_all_passed(compare_both("fp16", (loss.detach(), leaf.grad), *references, targets))


def backward_twice(x, targets, loss_fn):
    loss = loss_fn(x.clone(), targets)
    loss.backward(retain_graph=True)
    return loss


def two_losses(x, targets, loss_fn):
    logits = x.clone()
    return loss_fn(logits, targets) + loss_fn(logits, targets.flip(0))


def soft_cap(x, targets, loss_fn):
    return loss_fn(x.tanh(), targets)  # tanh's backward reads its output


def penalty_alone(x, targets, loss_fn):
    logits = x * 1.0
    penalty = logits.square().sum()  # its backward reads the logits
    loss_fn(logits, targets)
    return penalty


def penalty_and_loss(x, targets, loss_fn):
    logits = x * 1.0
    penalty = logits.square().sum()
    return loss_fn(logits, targets) + penalty


@pytest.mark.parametrize(
    "use", [backward_twice, two_losses, soft_cap, penalty_alone, penalty_and_loss]
)
def test_inplace_any_other_use_of_the_logits_raises(use):
    values, targets = make_inputs()
    result = use(values.requires_grad_(), targets, TritonCrossEntropyLoss(inplace=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


COMPILED = pytest.param("compiled", marks=pytest.mark.exhaustive)


@pytest.mark.usefixtures("compiler_pads_rows")
@pytest.mark.parametrize("way", ["leaf", "view", COMPILED])
def test_inplace_leaf_is_refused_because_its_grad_would_be_its_own_memory(way):
    logits, targets = make_inputs()
    before = logits.clone()
    logits.requires_grad_()
    loss_fn = TritonCrossEntropyLoss(inplace=True)
    if way == "compiled":
        loss_fn = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    leaf = logits.view(SMALL_ROWS, SMALL_V) if way == "view" else logits
    error = Exception if way == "compiled" else ValueError
    with pytest.raises(error, match=r"is a leaf: True, .*; expected a contiguous result"):
        loss_fn(leaf, targets)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("layout", layouts_of(3))
def test_inplace_refuses_memory_that_cannot_hold_the_gradient(layout):
    logits, targets = make_inputs((2, 3, SMALL_V))
    logits = layouts_of(3)[layout].place(logits)
    before = logits.clone()
    with pytest.raises(ValueError, match="expected a contiguous result of its own to overwrite"):
        cross_entropy_inplace(logits, targets)
    assert torch.equal(logits, before)


# ---- bad input -----------------------------------------------------------------------------------

X, STATS = torch.zeros(2, 5, device=DEVICE), torch.ones(2, 3, device=DEVICE)
T, ONE = torch.zeros(2, dtype=torch.long, device=DEVICE), torch.ones((), device=DEVICE)


@pytest.mark.parametrize("mistake", bad_input())
def test_launcher_of_the_backward_refuses_with_the_same_sentence(mistake):
    bad = bad_input()[mistake]
    with pytest.raises(bad.error, match=bad.sentence):
        cross_entropy_backward(ONE, *bad.inputs, STATS, None)


def test_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction is 'avg', expected 'mean', 'sum' or 'none'"):
        TritonCrossEntropyLoss(reduction="avg")(X, T)
    with pytest.raises(ValueError, match="reduction is 'avg', expected 'mean', 'sum' or 'none'"):
        cross_entropy_forward(X, T, reduction="avg")


@pytest.mark.parametrize("which", ["grad_output", "stats"])
def test_launcher_of_the_backward_refuses_what_is_no_result_of_a_forward(as_dtensor, which):
    tensors = {"grad_output": ONE, "logits": X, "targets": T, "stats": STATS}
    for shape in {"grad_output": [(3,)], "stats": [(2, 2), (3, 3)]}[which]:
        given = tensors | {which: torch.ones(shape, device=DEVICE)}
        with pytest.raises(ValueError, match=rf"{which} has shape .*, expected \(2"):
            cross_entropy_backward(*given.values(), None)
    tensors[which] = as_dtensor(tensors[which])
    with pytest.raises(TypeError, match=f"{which} is a DTensor, expected a plain tensor"):
        cross_entropy_backward(*tensors.values(), None)


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.fixture
def nothing_poisoned(monkeypatch):
    """What compiled code allocates is filled nowhere; and rows of 5,001 want the shipped tiles."""
    torch.use_deterministic_algorithms(False)
    tiles.shipped_tiles(monkeypatch)


@pads_rows
def test_torch_compile_in_place_gives_ignored_rows_zeros_even_where_their_logits_are_nan(
    nothing_poisoned,
):
    _, _, in_place, _ = SUBJECTS
    graph = in_a_larger_graph(in_place)
    inputs, douts = graph.make((6,), 1289, COMPILED_DTYPE)
    ignored = inputs["targets"] == -100
    inputs["left"][ignored] = NAN
    dleft = run(graph, compiled(graph), inputs, douts)["dleft"]
    assert (dleft[ignored] == 0).all() and dleft.isfinite().all()


@pads_rows
@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("use", [soft_cap, penalty_and_loss])
def test_torch_compile_in_place_refuses_other_uses_before_the_loss(use, nothing_poisoned):
    graph = torch.compile(use, fullgraph=True, backend="aot_eager")
    values, targets = make_inputs()
    with pytest.raises(Exception, match="modified by an inplace operation"):
        graph(values.requires_grad_(), targets, TritonCrossEntropyLoss(inplace=True)).backward()
