"""Are the libraries that the judge is pointed at called as they want to be, and judged fairly?"""

import sys
from types import SimpleNamespace

import pytest
import torch.nn.functional as F

from harness.cli.device import HAS_GPU
from judging.contracts import CONTRACTS, verdict_of
from judging.optimizers import OPTIMIZER_CONTRACTS
from next_steps.comparisons import judged
from subjects import SUBJECTS
from tools.page_records import load_record

NUMBERS = CONTRACTS["outputs_and_gradients_match_float64"]
STEPS = OPTIMIZER_CONTRACTS["steps_match_float64"]
# libraries in PyTorch's operations, whose calls have the real ones' names and order of arguments
STAND_INS = {
    "quack": SimpleNamespace(
        rmsnorm=lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
        cross_entropy=lambda x, target, reduction, inplace_backward=False: F.cross_entropy(
            x.float(), target, reduction=reduction
        ),
    ),
    "liger_kernel.transformers": SimpleNamespace(
        LigerFusedLinearCrossEntropyLoss=lambda reduction: (
            lambda weight, x, target: F.cross_entropy(
                (x @ weight.mT).float(), target, reduction=reduction
            )
        )
    ),
    "unsloth.kernels.rms_layernorm": SimpleNamespace(
        fast_rms_layernorm=lambda norm, x: F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
    ),
    "unsloth.kernels.cross_entropy_loss": SimpleNamespace(
        fast_cross_entropy_loss=lambda x, labels: F.cross_entropy(x.mT.float(), labels),
        Fast_CrossEntropyLoss=SimpleNamespace(
            apply=lambda x, labels: F.cross_entropy(x.float(), labels, reduction="none")
        ),
    ),
}


def outcomes(name, library):
    asked, found = STEPS if name in judged.OPTIMIZERS else NUMBERS, {}
    for label, function in judged.find_judged(name, library)[0].items():
        found[label] = verdict_of(judged.asked_as(name, label, function), asked)
    return {(label, verdict.outcome, verdict.words) for label, verdict in found.items()}


@pytest.mark.parametrize(
    "name, library, labels",
    [
        ("rmsnorm", "pytorch", {"F.rms_norm"}),
        ("rmsnorm", "torch.compile", {"torch.compile"}),
        ("cross_entropy", "pytorch", {"F.cross_entropy"}),
        ("cross_entropy_rows", "pytorch", {"F.cross_entropy"}),
        ("adamw", "pytorch", {"torch.optim.AdamW, foreach", "torch.optim.AdamW, fused"}),
        ("adamw8", "ours", {"ours"}),
        ("rope", "ours", {"ours"}),
    ],
)
def test_pytorch_and_ours_hold(name, library, labels):
    assert outcomes(name, library) == {(label, "holds", "") for label in labels}


@pytest.mark.parametrize("library", ["quack", "unsloth"])
def test_others_get_the_arguments_that_they_take(library, monkeypatch):
    monkeypatch.setattr(judged, "HAS_GPU", True)
    for module, stand_in in STAND_INS.items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    for name in ("rmsnorm", "cross_entropy", "cross_entropy_rows"):
        found = outcomes(name, library)
        assert found and {outcome for _, outcome, _ in found} == {"holds"}, found


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_cross_entropy_rows"])
def test_ligers_loss_of_hidden_states_is_judged_in_triton_alone(name, monkeypatch):
    """A second row of the same kernel would be counted as another function."""
    monkeypatch.setattr(judged, "HAS_GPU", True)
    for module, stand_in in STAND_INS.items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    assert outcomes(name, "liger") == {("Liger-Kernel", "holds", "")}
    labels = [key for key in load_record("judged")["judged"] if key.startswith(f"{name}: Liger")]
    assert labels == [f"{name}: Liger-Kernel"]


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_what_is_absent_is_told_in_a_sentence(monkeypatch):
    assert judged.find_judged("rmsnorm", "liger") == ({}, ["liger: needs a CUDA GPU"])
    monkeypatch.setattr(judged, "HAS_GPU", True)
    for module in ("quack", "flashoptim"):
        monkeypatch.setitem(sys.modules, module, None)
    found, (sentence,) = judged.find_judged("rmsnorm", "quack")
    assert found == {} and sentence.startswith("quack: ")
    assert judged.find_judged("rmsnorm", "flashoptim") == ({}, [])  # it has none


def test_limits_are_of_contracts_and_subjects_that_exist():
    assert set(judged.WRITTEN_OVER) <= CONTRACTS.keys()
    for beginning, name in judged.DOCUMENTED:
        assert any(subject.startswith(name) for subject in SUBJECTS)
        assert judged.limit(f"{beginning}, and more", name, judged.WRITTEN_OVER[0])
    assert not judged.limit("Liger-Kernel", "rmsnorm", judged.WRITTEN_OVER[0]), "not in place"
