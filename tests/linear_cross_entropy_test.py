"""What is linear + cross-entropy's alone: its chunks, the sum of dweight over them, the scaling of
both gradients.

What every function has to do, this one too, is asked in tests/contracts_*_test.py.
"""

import functools
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from cross_entropy_test import reference_and_eager as row_reference_and_eager
from harness.benchmark.checking import FLOOR, Check, assert_all_passed, relative_error
from harness.cli.device import DEVICE, HAS_GPU
from harness.steps import timing
from next_steps.lessons import linear_cross_entropy_kernel
from next_steps.lessons.linear_cross_entropy_kernel import (
    TritonLinearCrossEntropyLoss,
    linear_cross_entropy_forward,
    linear_cross_entropy_reference,
    scale_gradient,
)
from subjects.linear_cross_entropy import FORWARD, eager_loss, make
from subjects.subject import Subject, checks, references, run
from tests import tiles
from tests.calls import Calls
from tests.cross_entropy_more_test import (  # noqa: F401  pytestmark is pytest's
    MAGNITUDES,
    check_every_row,
    pytestmark,
    rows_of_magnitude,
)
from tests.fixtures import COMPILED_DTYPE, needs_gpu, pads_rows

N_ROWS, H, V = (512, 4096, 128_256) if HAS_GPU else (16, 64, 300)  # a large shape
SMALL_ROWS, SMALL_H, SMALL_V = 11, 16, 70
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")


@pytest.fixture
def small_tiles(monkeypatch):
    """Let small vocabularies take several tiles too."""
    if not HAS_GPU:
        tiles.small_tiles(monkeypatch)


def make_inputs(
    shape=(SMALL_ROWS,), hidden_size=SMALL_H, vocab=SMALL_V, dtype=torch.float32, **options
):
    """hidden, weight and targets: see the subject's record."""
    inputs, _ = make(shape, (hidden_size, vocab), dtype, **options)
    return tuple(inputs.values())


def subject_of(loss_fn=None, kernel_options=None, **options) -> Subject:
    """The loss with these options, or `loss_fn` in its place."""
    return replace(
        FORWARD,
        function=loss_fn or TritonLinearCrossEntropyLoss(**options, **(kernel_options or {})),
        reference=lambda *inputs: linear_cross_entropy_reference(*inputs, **options),
        eager=lambda *inputs: eager_loss(*inputs, **options),
    )


def named(hidden, weight, targets, grad_output=None):
    """Return the inputs and the upstream gradient, 1 unless given, as a subject has them."""
    inputs = {"hidden": hidden, "weight": weight, "targets": targets}
    return inputs, {"Loss": torch.ones((), device=DEVICE) if grad_output is None else grad_output}


def loss_and_gradients(loss_fn, *tensors, needed=("hidden", "weight")):
    """Return the loss, and dhidden and dweight if needed; the tensors keep their strides."""
    return tuple(run(FORWARD, loss_fn, *named(*tensors), needed).values())


def run_checks(*tensors, **options) -> list[Check]:
    """The checks of the kernels, or of `loss_fn` in their place."""
    return checks(subject_of(**options), *named(*tensors))


def told(max_targets, **options):
    loss_fn = TritonLinearCrossEntropyLoss(**options)
    return lambda *inputs: loss_fn(*inputs, max_targets=max_targets)


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [1, 4, 11, None])
def test_one_chunk_and_many_give_the_reference(chunk_size, dtype):
    options = {"chunk_size": chunk_size}
    assert_all_passed(run_checks(*make_inputs(dtype=dtype), kernel_options=options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_shape(dtype, gpu_memory):
    gpu_memory(32)
    assert_all_passed(run_checks(*make_inputs((N_ROWS,), H, V, dtype)))


def test_chunks_are_few_equal_and_of_whole_tiles():
    rows = linear_cross_entropy_kernel._chunk_rows
    assert [rows(n) for n in (0, 1, 128, 512, 2048)] == [128, 128, 128, 512, 2048], "one chunk"
    sizes = {2049: 1152, 4097: 1408, 8192: 2048, 8193: 2176, 16_384: 4096, 32_768: 8192}
    assert {n: rows(n) for n in sizes} == sizes
    # five chunks of at most 8,192, not four and one row
    assert rows(65_536) == 8192 and rows(32_769) == 6656
    assert [rows(n, 1000) for n in (100, 1000, 1001, 2050)] == [128, 1000, 512, 768]
    assert [rows(n, 5) for n in (3, 23)] == [5, 5]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype, magnitude", [(d, m) for d, m in MAGNITUDES if d != torch.float16])
@pytest.mark.parametrize("reduction", ["sum", "none"])  # gradients in the forward, or backward
def test_logits_of_any_magnitude(dtype, magnitude, reduction):
    # without -inf: -inf * 0 is NaN, also in PyTorch
    logits, targets = rows_of_magnitude(magnitude, dtype, infinities=False)
    one = torch.eye(logits.shape[1], dtype=dtype, device=DEVICE)  # the hidden states are the logits
    grad_output = torch.ones((len(logits),) if reduction == "none" else (), device=DEVICE)
    loss_fn = TritonLinearCrossEntropyLoss(reduction=reduction, chunk_size=7)
    loss, dhidden, _ = loss_and_gradients(loss_fn, logits, one, targets, grad_output)
    row_loss = linear_cross_entropy_forward(logits, one, targets, reduction="none")[0]
    ones = torch.ones(len(logits), device=DEVICE)
    references = row_reference_and_eager(logits, targets, ones, reduction="none")
    check_every_row("large", (row_loss, dhidden), *references)
    assert torch.equal(loss, row_loss if reduction == "none" else row_loss.sum())


# ---- the error of dweight over the chunks --------------------------------------------------------


def dweight_errors(dtype, *n_chunks):
    """Relative errors of dweight against float64, one for each number of chunks, and eager's."""
    n_rows, hidden_size, vocab = (4096, 1024, 8192) if HAS_GPU else (16, 32, 64)
    hidden, weight, targets = make_inputs((n_rows,), hidden_size, vocab)
    # Close hidden states and few words: every chunk adds as much to the same rows of dweight.
    hidden, weight, targets = (1 + hidden).to(dtype), (0.1 * weight).to(dtype), targets % 4
    found, (eager,) = references(subject_of(), *named(hidden, weight, targets))
    exact = found["dweight"]
    sizes = [{"chunk_size": n_rows // n} for n in n_chunks]
    found = [linear_cross_entropy_forward(hidden, weight, targets, **size)[2] for size in sizes]
    return [relative_error(dweight, exact) for dweight in (*found, eager["dweight"])]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_error_of_dweight_does_not_grow_with_the_number_of_chunks(dtype, monkeypatch):
    one, four, sixteen, eager = dweight_errors(dtype, 1, 4, 16)
    assert four <= 2 * eager + FLOOR[dtype] and sixteen <= 1.05 * one
    if dtype == torch.bfloat16:  # fp16's roundings are small beside the rest
        monkeypatch.setattr(linear_cross_entropy_kernel, "MAX_ROUNDINGS", 1000)
        sixteen, _ = dweight_errors(dtype, 16)
        assert sixteen > 1.3 * one, "cannot fail: the error does not grow if every chunk rounds it"


# ---- scaling and targets -------------------------------------------------------------------------


@pytest.mark.skipif(HAS_GPU, reason="looks into the interpreter")
def test_gradient_is_not_touched_if_grad_output_is_one():
    from triton.runtime.interpreter import InterpreterBuilder

    gradient = torch.randn(3, 40)
    spy = {"autospec": True, "side_effect": InterpreterBuilder.create_masked_store}
    with mock.patch.object(InterpreterBuilder, "create_masked_store", **spy) as store:
        scale_gradient(gradient, torch.ones(()))
        assert not store.called
        scale_gradient(gradient, torch.full((), 2.0))
        assert store.called


@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (1100, 5), (2, 5000), (0, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, -0.5, 0.0, NAN])
def test_scale_gradient_in_place(shape, dtype, factor):
    shape = (shape[0] if HAS_GPU else min(shape[0], 20), shape[1])
    gradient = torch.randn(shape, device=DEVICE).to(dtype)
    expected = gradient * factor
    scale_gradient(gradient, torch.tensor(factor, device=DEVICE))
    assert torch.equal(gradient.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


def test_every_program_of_scale_gradient_loops_over_its_rows(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy_kernel, "MAX_PROGRAMS", 3)
    gradient = torch.randn(8, 5, device=DEVICE)
    expected = gradient * 2
    scale_gradient(gradient, torch.tensor(2.0, device=DEVICE))
    assert torch.equal(gradient, expected)


def test_fp16_gradient_waits_for_the_loss_scale():
    hidden, weight, targets = make_inputs((3,))
    valid = targets != -100
    # softmax is near exp(-12), where fp16 has lost digits, but for the target's, whose logit is 12
    weight *= 0.05
    weight[targets[valid]] = 12 * hidden[valid] / hidden[valid].square().sum(-1, keepdim=True)
    scale = torch.tensor(2.0**10, device=DEVICE)
    # the loss, about exp(-12), is the luck of how a product rounds three logits
    _, *gradients = run_checks(hidden.half(), weight.half(), targets, scale)
    assert_all_passed(gradients)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ignore_index", [-100, 0, SMALL_V + 5, 2**40])
def test_ignored_rows_are_neither_counted_nor_trained(ignore_index):
    inputs = make_inputs(ignore_index=ignore_index)
    assert (inputs[2] == ignore_index).any()
    loss_fn = TritonLinearCrossEntropyLoss(ignore_index=ignore_index, chunk_size=4)
    assert_all_passed(run_checks(*inputs, ignore_index=ignore_index, loss_fn=loss_fn))
    assert (loss_and_gradients(loss_fn, *inputs)[1][inputs[2] == ignore_index] == 0).all()


@pytest.mark.exhaustive
def test_nan_hidden_state_of_an_ignored_row_stays_out_of_loss_and_dhidden():
    hidden, weight, targets = make_inputs()
    loss_fn = TritonLinearCrossEntropyLoss(chunk_size=4)
    plain = loss_and_gradients(loss_fn, hidden, weight, targets)
    hidden[targets == -100] = NAN
    loss, dhidden, _ = loss_and_gradients(loss_fn, hidden, weight, targets)
    assert torch.equal(loss, plain[0]) and torch.equal(dhidden, plain[1])


def test_chunk_without_a_valid_row_adds_nothing():
    hidden, weight, targets = make_inputs()
    targets[4:8] = -100
    assert_all_passed(run_checks(hidden, weight, targets, kernel_options={"chunk_size": 4}))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "shape, max_targets", [((0,), None), ((3,), None), ((2, 0), None), ((4,), 0), ((4,), 2)]
)
def test_no_valid_row_is_as_in_pytorch(shape, max_targets, reduction):
    hidden, weight, targets = make_inputs(shape)
    targets.fill_(-100)
    grad_output = torch.ones(shape if reduction == "none" else (), device=DEVICE)
    loss_fn = told(max_targets, reduction=reduction)
    loss, dhidden, dweight = loss_and_gradients(loss_fn, hidden, weight, targets, grad_output)
    expected = linear_cross_entropy_reference(hidden, weight, targets, reduction=reduction)
    torch.testing.assert_close(loss, expected.detach(), equal_nan=True)
    assert not dhidden.any() and not dweight.any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", [SMALL_V, -1, 2**40])
def test_target_outside_the_vocabulary_gives_nan(target):
    hidden, weight, targets = make_inputs()
    before = linear_cross_entropy_forward(hidden, weight, targets, reduction="none", chunk_size=4)
    targets[3] = target
    after = linear_cross_entropy_forward(hidden, weight, targets, reduction="none", chunk_size=4)
    others = torch.arange(SMALL_ROWS, device=DEVICE) != 3
    for a, b in zip(before[:2], after[:2]):
        assert torch.equal(a[others], b[others]) and b[3].isnan().all()
    assert after[2].isnan().all()
    assert TritonLinearCrossEntropyLoss()(hidden, weight, targets).isnan()


def test_int32_targets():
    hidden, weight, targets = make_inputs()
    loss_fn = TritonLinearCrossEntropyLoss(chunk_size=4)
    as_int32 = loss_and_gradients(loss_fn, hidden, weight, targets.int())
    as_int64 = loss_and_gradients(loss_fn, hidden, weight, targets)
    assert all(torch.equal(a, b) for a, b in zip(as_int32, as_int64))


# ---- rows without a target -----------------------------------------------------------------------


def half_ignored(shape=(20,), dtype=torch.float32):
    """hidden, weight, targets of which every second is ignored, and how many are not."""
    hidden, weight, targets = make_inputs(shape, dtype=dtype)
    targets.clamp_(min=0).view(-1)[::2] = -100
    return hidden, weight, targets, int((targets != -100).sum())


@pytest.mark.parametrize("dtype, more", [*zip(DTYPES, (0, 3, 3))], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows_that_are_left_out_have_loss_and_gradient_of_zero(reduction, more, dtype):
    hidden, weight, targets, n_targets = half_ignored((2, 10), dtype)
    grad_output = torch.randn((2, 10) if reduction == "none" else (), device=DEVICE)
    loss_fn = told(n_targets + more, reduction=reduction, chunk_size=4)
    inputs = hidden.transpose(0, 1).contiguous().transpose(0, 1), weight, targets
    assert_all_passed(run_checks(*inputs, grad_output, loss_fn=loss_fn, reduction=reduction))
    loss, dhidden, _ = loss_and_gradients(loss_fn, *inputs, grad_output)
    assert (dhidden[targets == -100] == 0).all()
    assert reduction != "none" or (loss[targets == -100] == 0).all()


def test_rows_without_a_target_are_not_multiplied():
    hidden, weight, targets, n_targets = half_ignored()
    with Log() as log:
        loss_and_gradients(told(n_targets, chunk_size=5), hidden, weight, targets)
    assert log.products == 3 * 2, "three products of each of two chunks, not of four"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("missing", [1, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # in the forward, or backward
def test_too_small_a_number_of_targets_gives_nan_not_a_wrong_gradient(dtype, missing, reduction):
    hidden, weight, targets, n_targets = half_ignored(dtype=dtype)
    grad_output = torch.ones((20,) if reduction == "none" else (), device=DEVICE)
    loss_fn = told(n_targets - missing, reduction=reduction)
    loss, dhidden, dweight = loss_and_gradients(loss_fn, hidden, weight, targets, grad_output)
    assert loss.isnan().any() and dhidden.isnan().any() and dweight.isnan().all()


@pytest.mark.parametrize("ignore_index", [-1, -2, SMALL_V])
def test_too_many_targets_are_noticed_whatever_is_ignored(ignore_index):
    hidden, weight, targets, n_targets = half_ignored()
    targets[targets == -100] = ignore_index
    options = {"ignore_index": ignore_index, "reduction": "sum"}  # a mean of no row is NaN, too
    assert told(n_targets - 1, **options)(hidden, weight, targets).isnan()
    assert told(n_targets, **options)(hidden, weight, targets).isfinite()


@pytest.mark.parametrize("max_targets", [10, 11])
def test_where_nearly_all_rows_have_a_target_the_bits_are_those_without_a_number(max_targets):
    hidden, weight, targets = make_inputs()
    targets[targets == -100] = 0
    targets[max_targets:] = -100
    loss_fn = TritonLinearCrossEntropyLoss(chunk_size=4)
    with Log() as log:
        found = loss_and_gradients(told(max_targets, chunk_size=4), hidden, weight, targets)
    expected = loss_and_gradients(loss_fn, hidden, weight, targets)
    if max_targets == SMALL_ROWS:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert ("argsort" in log.counts or "sort" in log.counts) == (max_targets < SMALL_ROWS)


@pytest.mark.parametrize("max_targets", [-1, 21, True, 2.0, "2"])
def test_number_of_targets_that_cannot_be_is_refused(max_targets):
    hidden, weight, targets, _ = half_ignored()
    sentence = f"max_targets is {max_targets!r}, expected a number of rows from 0 to 20, or None: "
    with pytest.raises(ValueError, match=re.escape(sentence + "count the targets")):
        told(max_targets)(hidden, weight, targets)


# ---- autograd's contract -------------------------------------------------------------------------


class Log(Calls):
    """Keeps the shapes of new memory too."""

    def __init__(self):
        super().__init__()
        self.new = set()

    def __torch_dispatch__(self, operation, *call):
        result = super().__torch_dispatch__(operation, *call)
        name = operation.overloadpacket.__name__
        if name in ("empty", "new_empty", "zeros_like", "clone", "_to_copy"):
            self.new.add(tuple(result.shape))
        return result


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("needed", ["hidden", "weight"])
def test_frozen_head_or_hidden_states_take_no_product_and_no_buffer(needed, reduction):
    loss_fn = TritonLinearCrossEntropyLoss(reduction=reduction, chunk_size=4)
    grad_output = torch.ones((SMALL_ROWS,) if reduction == "none" else (), device=DEVICE)
    inputs = make_inputs()
    with Log() as log:
        loss_and_gradients(loss_fn, *inputs, grad_output, needed=[needed])
    assert log.products == (2 if reduction == "mean" else 3) * 3
    if needed == "hidden":
        assert "addmm_" not in log.counts and (SMALL_V, SMALL_H) not in log.new


def test_no_grad_and_frozen_inputs_compute_the_loss_only():
    hidden, weight, targets = make_inputs()
    loss_fn = TritonLinearCrossEntropyLoss(chunk_size=4)
    with Log() as log:
        loss_fn(hidden, weight, targets)
        with torch.no_grad():
            loss_fn(hidden.requires_grad_(), weight.requires_grad_(), targets)
    assert log.products == 2 * 3, "one product for each of the three chunks"


def test_logits_never_exist_as_a_whole():
    with Log() as log:
        loss_and_gradients(TritonLinearCrossEntropyLoss(chunk_size=4), *make_inputs())
    assert (4, 72) in log.new, "a chunk, its rows as long as the next multiple of 8"
    assert not any(shape[-1] >= SMALL_V for shape in log.new - {(4, 72)} if shape)


def test_gradients_become_the_leaves_grad_without_a_copy(monkeypatch):
    scaled = []
    original = linear_cross_entropy_kernel.scale_gradient
    monkeypatch.setattr(
        linear_cross_entropy_kernel,
        "scale_gradient",
        lambda t, factor: (scaled.append(t.data_ptr()), original(t, factor)),
    )
    hidden, weight, targets = make_inputs()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    TritonLinearCrossEntropyLoss()(*leaves, targets).backward()
    assert [leaf.grad.data_ptr() for leaf in leaves] == scaled


@pytest.mark.exhaustive
def test_autocast_multiplies_in_its_dtype_and_returns_the_leaves_dtype():
    inputs = make_inputs()
    halves = [t.bfloat16() if t.is_floating_point() else t for t in inputs]
    expected = loss_and_gradients(TritonLinearCrossEntropyLoss(chunk_size=2), *halves)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = loss_and_gradients(TritonLinearCrossEntropyLoss(chunk_size=2), *inputs)
    assert ours[1].dtype == ours[2].dtype == torch.float32
    assert all(torch.equal(a, b.float()) for a, b in zip(ours, expected))


# ---- bad input -----------------------------------------------------------------------------------


def test_unknown_reduction_and_empty_chunks_are_refused():
    inputs = make_inputs()
    with pytest.raises(ValueError, match="reduction is 'avg', expected 'mean', 'sum' or 'none'"):
        TritonLinearCrossEntropyLoss(reduction="avg")(*inputs)
    with pytest.raises(ValueError, match="chunk_size is 0, expected a number of rows"):
        TritonLinearCrossEntropyLoss(chunk_size=0)(*inputs)


# ---- torch.compile -------------------------------------------------------------------------------


@pads_rows
def test_torch_compile_takes_any_number_of_targets():
    torch.use_deterministic_algorithms(False)
    counter = CompileCounterWithBackend("aot_eager")
    loss_fn = TritonLinearCrossEntropyLoss(chunk_size=4)
    compiled = torch.compile(loss_fn, backend=counter, fullgraph=True)
    hidden, weight, targets = make_inputs((2, 6), dtype=COMPILED_DTYPE)
    for n_targets in (5, 7, 3, 8):
        targets.fill_(3).view(-1)[n_targets:] = -100
        ours = functools.partial(compiled, max_targets=n_targets)
        assert_all_passed(run_checks(hidden, weight, targets, loss_fn=ours))
    assert counter.frame_count <= 2, "one number, and then any other"


# ---- on a GPU only -------------------------------------------------------------------------------


@needs_gpu
def test_offsets_of_a_large_gradient_do_not_wrap_at_32_bits(gpu_memory):
    n_rows, n_cols = 530_000, 4096  # 2**31 elements end in row 524,287
    gpu_memory(6)
    torch.use_deterministic_algorithms(False)  # no need to fill so much memory with NaN
    gradient = torch.ones((n_rows, n_cols), dtype=torch.bfloat16, device=DEVICE)
    scale_gradient(gradient, torch.tensor(2.0, device=DEVICE))
    assert gradient.amin() == 2 and gradient.amax() == 2


@needs_gpu
@pytest.mark.parametrize("chunk_size", [None, 1024])
def test_memory_is_both_gradients_and_one_chunk_of_logits(chunk_size):
    """A chunk of 2,048 rows; of more than four chunks, an fp32 dweight instead."""
    torch.use_deterministic_algorithms(False)
    n_rows = 8192
    hidden = torch.randn((n_rows, H), dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    weight = torch.randn((V, H), dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    targets = torch.randint(V, (n_rows,), device=DEVICE)

    def forward_and_backward():
        loss_fn = TritonLinearCrossEntropyLoss(chunk_size=chunk_size)
        loss_fn(hidden, weight, targets).backward()
        hidden.grad = weight.grad = None  # the next run allocates them again

    gradients = 2 * H * (V + n_rows) + 4 * 2**20  # and some slack
    allowed = gradients + (4 * H * V if chunk_size else 2 * 2048 * V)
    assert timing.peak_extra_bytes(forward_and_backward) <= allowed
