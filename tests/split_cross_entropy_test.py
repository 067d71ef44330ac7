"""Cross-entropy of a split vocabulary is that of the whole one, besides contracts_*_test.py."""

from dataclasses import replace

import pytest
import torch

from harness.benchmark.checking import assert_all_passed
from harness.cli.device import DEVICE
from next_steps.layers.split_cross_entropy import TritonSplitCrossEntropyLoss
from subjects.cross_entropy import MEAN, eager, make_of_rows, reference
from subjects.subject import compare_parts, references, run
from tests.two_processes import in_two_processes, one_gpu_is_too_few

INF = float("inf")
V, N = 150, 12
CUTS = [(37, 113), (1, 64, 85)]  # columns of each slice; one of all is contracts_*_test.py's


def make(dtype=torch.float32):
    """Logits (N, V) and targets, of which three are ignored and four lie at slices' ends."""
    inputs, douts = make_of_rows((N,), V, dtype)
    logits, targets = inputs["logits"], inputs["targets"]
    targets[[2, 3, 4, 7]] = torch.tensor([0, 36, 37, V - 1], device=DEVICE)
    return logits, targets, douts["loss"]


def upstream(row_grads, reduction):
    return row_grads if reduction == "none" else row_grads[0].abs()


def loss_and_gradient(loss_function, logits, targets, dout):
    inputs = {"logits": logits, "targets": targets}
    return list(run(MEAN, loss_function, inputs, {"loss": dout}).values())


@pytest.fixture
def split(monkeypatch):
    """split(cuts, ...): what every slice's process finds, one after another in this one.

    First each hands over what it gathers, then, with everything of all of them, it is run again.
    """

    def run_all(cuts, logits, targets, dout, reduction, ignore_index=-100):
        parts = {}

        def gather(every, mine, group):
            parts[group] = mine.clone()
            if len(parts) == len(cuts):
                every.copy_(torch.cat([parts[rank] for rank in range(len(cuts))]))
            else:
                every.zero_()

        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: len(cuts))
        monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
        for _ in range(2):
            found, first = [], 0
            for rank, size in enumerate(cuts):
                options = first, rank, ignore_index, reduction
                loss_function = TritonSplitCrossEntropyLoss(*options)
                columns = logits[:, first : first + size]
                found.append(loss_and_gradient(loss_function, columns, targets, dout))
                first += size
        return found

    return run_all


def assert_right(found, logits, targets, dout, reduction):
    """Every process has the same bits of the loss; loss and gradients are those of the whole."""
    losses, gradients = zip(*found)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    subject = replace(MEAN, reference=reference(reduction), eager=eager(reduction))
    inputs, douts = {"logits": logits, "targets": targets}, {"loss": dout}
    whole = {"loss": losses[0], "dlogits": torch.cat(gradients, -1)}
    right = references(subject, inputs, douts)
    assert_all_passed(compare_parts(subject, whole, inputs, *right))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "reduction", ["mean", pytest.param("sum", marks=pytest.mark.exhaustive), "none"]
)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_slices_give_the_loss_and_the_gradients_of_the_whole(cuts, reduction, dtype, split):
    logits, targets, row_grads = make(dtype)
    dout = upstream(row_grads, reduction)
    found = split(cuts, logits, targets, dout, reduction)
    assert_right(found, logits, targets, dout, reduction)


def test_label_that_is_ignored_may_be_a_column(split):
    """Of the second slice another column has its number, which is not ignored for that."""
    logits, targets, row_grads = make()
    targets[targets < 0] = 5
    targets[2] = 37 + 5
    found = split((37, 113), logits, targets, row_grads, "none", ignore_index=5)
    targets[targets == 5] = -100
    assert_right(found, logits, targets, row_grads, "none")


@pytest.mark.parametrize(
    "rising",
    [(0.0, 30.0), (30.0, 0.0), (0.0, 1e4), (1e4, 0.0), (1e4, 1e4), (1.4e9, 1.6e9), (1.6e9, 1.4e9)],
    ids=str,
)
def test_maxima_that_lie_far_apart(rising, split):
    """From 1.5e9 on a slice's maximum has another unit, in which 1.6e9 is less than 1.4e9."""
    logits, targets, row_grads = make()
    logits[:, :37] += rising[0]
    logits[:, 37:] += rising[1]
    found = split((37, 113), logits, targets, row_grads, "none")
    assert_right(found, logits, targets, row_grads, "none")


@pytest.mark.parametrize("value", [-INF, -3e38, -1e10, 1e10, 3e38])
@pytest.mark.parametrize("where", [slice(0, 37), slice(37, 38), slice(40, 42)], ids=str)
def test_slices_at_an_end_of_the_range(value, where, split):
    """A slice of -inf, and logits whose maximum has another unit than the other slice's."""
    logits, targets, row_grads = make()
    logits[:, where] = value
    found = split((37, 113), logits, targets, row_grads, "none")
    expected = loss_and_gradient(reference("none"), logits.double(), targets, row_grads.double())
    (loss, left), (_, right) = found
    torch.testing.assert_close(loss, expected[0].float(), rtol=1e-5, atol=1e-5)
    gradient = torch.cat([left, right], -1)
    torch.testing.assert_close(gradient, expected[1].float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", ["nan", "nan below a huge one", "inf", "-1", "V"])
def test_what_is_wrong_in_a_row_stays_there_and_reaches_every_slice(bad, split):
    logits, targets, row_grads = make()
    if "huge" in bad:
        logits[4, 3] = 1e10  # its slice's unit is another one
    if bad[:3] in ("nan", "inf"):
        logits[4, 100] = float(bad[:3])
        logits[1, 3] = float(bad[:3])  # of a row that is ignored
    else:
        targets[4] = -1 if bad == "-1" else V
    assert targets[1] == -100
    for loss, gradient in split((37, 113), logits, targets, row_grads, "none"):
        assert loss.isnan().nonzero().flatten().tolist() == [4]
        assert gradient[4].isnan().all() and not gradient[[*range(4), *range(5, N)]].isnan().any()
        assert not gradient[1].any()


def test_no_target_at_all(split):
    logits, targets, _ = make()
    targets[:] = -100
    for loss, gradient in split((37, 113), logits, targets, torch.tensor(1.0), "mean"):
        assert loss.isnan() and not gradient.any()


# ---------------------------------------------------------------- two processes


def run_slice(rank, device, cut, cases) -> list:
    torch.manual_seed(0)
    found = []
    for logits, targets, dout, reduction in cases:
        group = torch.distributed.group.WORLD
        loss_function = TritonSplitCrossEntropyLoss(rank * cut, group, reduction=reduction)
        columns = (logits[:, :cut], logits[:, cut:])[rank].to(device)
        found.append(loss_and_gradient(loss_function, columns, targets.to(device), dout.to(device)))
    return found


@one_gpu_is_too_few
@pytest.mark.exhaustive
def test_vocabulary_split_over_two_processes(tmp_path):
    logits, targets, row_grads = (t.cpu() for t in make())
    logits[5, :37] = -INF  # one process has nothing of this row
    targets[5] = 99
    cases = [
        (logits, targets, upstream(row_grads, reduction), reduction)
        for reduction in ("mean", "sum", "none")
    ]
    for case, *found in zip(cases, *in_two_processes(run_slice, tmp_path, 37, cases)):
        inputs = [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in case]
        assert_right([[t.to(DEVICE) for t in half] for half in found], *inputs)
