"""The judge finds what is wrong with a callable, and says what was given and what is right."""

import pytest
import torch

from harness.cli.device import HAS_GPU
from judging import addresses
from judging.contract import Contract, NotTried
from judging.contracts import CONTRACTS, Verdict, of_callable, verdict_of
from subjects import SUBJECTS
from subjects.rmsnorm import RMSNORM, reference
from subjects.subject import same_bits

OF_A_GPU = [name for name, one in CONTRACTS.items() if one.gpu]
MATCH = "outputs_and_gradients_match_float64"


class Careless(torch.autograd.Function):
    """RMSNorm that keeps its inputs where autograd does not see them, and overwrites dy."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = x, weight
        return reference(x, weight)

    @staticmethod
    def backward(ctx, dy):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.kept]
            found = torch.autograd.grad(reference(*leaves), leaves, dy.detach())
        dy.zero_()
        return found


def forgets_strides(x, weight):
    return reference(x.as_strided(x.shape, torch.empty_like(x).contiguous().stride()), weight)


def changes_its_input(x, weight):
    y = reference(x.clone(), weight)
    x.data.zero_()
    return y


def leaves_the_last_row_unwritten(x, weight):
    y = torch.empty_like(x)
    y[:-1] = reference(x, weight)[:-1]
    return y


def refuses_fp16(x, weight):
    if x.dtype == torch.float16:
        raise NotImplementedError("x is fp16, expected fp32 or bf16\nas in line 3")
    return reference(x, weight)


# what is asked, of what, and parts of what is said
WRONG = {
    "LayerNorm": (MATCH, lambda x, w: reference(x - x.mean(-1, True), w), "y[", "x (5, 3, 64)"),
    "no eps": ("small_large_and_shifted_values", lambda x, w: reference(x, w, 0.0), "error"),
    "fp32": (MATCH, lambda x, w: reference(x.float(), w.float()), "y (5, 3, 64) fp32, expected (5"),
    "strides": ("any_strides", forgets_strides, "y[", "x (2, 3, 64)"),
    "input": ("inputs_and_upstream_gradients_are_never_changed", changes_its_input, "x[", "is 0,"),
    "dy": ("inputs_and_upstream_gradients_are_never_changed", Careless.apply, "dy[", "is 0,"),
    "no gradient": (MATCH, lambda x, w: reference(x, w.detach()), "dweight is None", "(64,)"),
    "no graph": (MATCH, lambda x, w: reference(x, w).detach(), "no output has a graph"),
    "no tensor": (MATCH, lambda x, w: None, "returned None, expected a tensor for each of ['y']"),
    "unwritten": (MATCH, leaves_the_last_row_unwritten, "y[4", "is nan"),
    "a later change": (
        "input_changed_before_the_backward_is_noticed_or_does_not_count",
        Careless.apply,
        "x changed between forward and backward: dx[",
    ),
    "silence": ("second_derivative_is_refused_not_silently_zero", Careless.apply, "dx["),
    "luck": (
        "every_run_gives_the_same_bits",
        lambda x, w: reference(x, w) * (1 + 1e-3 * torch.rand(())),
        "a later run: y[",
    ),
    "bad input": (
        "bad_input_is_refused_with_a_sentence",
        lambda x, w: reference(x, w.flatten()[: x.shape[-1]]),
        "took x (4, 63) fp32, weight (64,) fp32 and returned numbers, expected an error",
    ),
}


def verdicts(subject, names=()) -> list[Verdict]:
    """Of the named contracts, or of all that can be asked of it."""
    return [
        verdict_of(subject, one)
        for name, one in CONTRACTS.items()
        if (name in names or not names) and (subject.recorded or not one.of_record)
    ]


def asked(function, *names) -> list[Verdict]:
    return verdicts(of_callable(RMSNORM, function), names)


@pytest.mark.parametrize("mistake", WRONG)
def test_what_is_wrong_is_found_and_said(mistake):
    name, function, *words = WRONG[mistake]
    (found,) = asked(function, name)
    assert found.outcome == "wrong" and found.contract == name
    assert all(part in found.words for part in words), found.words


def test_what_is_raised_is_a_refusal_in_its_first_line():
    (found,) = asked(refuses_fp16, MATCH)
    said = "NotImplementedError: x is fp16, expected fp32 or bf16"
    assert found == Verdict(MATCH, "refused", 3, "dtype fp16", said)


@pytest.mark.parametrize("name", ["rmsnorm", "cross_entropy", "rope", "norm_linear"])
def test_eager_pytorch_keeps_all_that_is_asked_of_others(name):
    subject = SUBJECTS[name]
    others = of_callable(subject, subject.eager or subject.reference)
    names = CONTRACTS.keys() - OF_A_GPU
    broken = [one for one in verdicts(others, names) if one.outcome in ("wrong", "refused")]
    assert not broken


def test_ours_is_asked_everything_and_keeps_it():
    found = {one.contract: one for one in verdicts(RMSNORM)}
    assert list(found) == list(CONTRACTS)
    of_addresses = [asked.name for asked in vars(addresses).values() if isinstance(asked, Contract)]
    not_tried = of_addresses if HAS_GPU else OF_A_GPU
    assert [name for name, one in found.items() if one.outcome != "holds"] == not_tried
    assert found[MATCH].n_cases == len(RMSNORM.dtypes)
    assert found.keys() - {one.contract for one in asked(reference)} == {
        "saved_tensors_are_what_the_record_says",
        "backward_under_autocast_has_the_forwards_dtypes",
    }


def test_what_cannot_be_tried_says_why_and_the_other_cases_are_asked():
    def only_the_second(subject, case):
        if case == 0:
            raise NotTried("the first is too large")

    both, one = (Contract(only_the_second, "case", lambda subject, n=n: range(n)) for n in (2, 1))
    assert verdict_of(RMSNORM, both) == Verdict("only_the_second", "holds", 1)
    said = "the first is too large"
    assert verdict_of(RMSNORM, one) == Verdict("only_the_second", "not tried", words=said)
    (found,) = verdicts(SUBJECTS["rope"], ["one_to_four_dimensions"])
    assert found.outcome == "not tried" and "q and k have four" in found.words


def test_nothing_leaks_from_a_function_that_raises():
    asked(refuses_fp16)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("one, other", [("nan", 7.0), ("inf", 3.4028235e38), ("inf", "-inf")])
def test_what_is_not_finite_is_the_same_as_itself_alone(one, other):
    first, second = ({"y": torch.tensor([float(value)])} for value in (one, other))
    assert same_bits(first, first) and not same_bits(first, second)
    assert not same_bits(first, {"y": first["y"][None]})
