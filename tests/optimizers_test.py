"""TritonAdamW keeps the contracts of an optimizer, and each contract finds a wrong optimizer."""

import random
from functools import partial

import pytest
import torch
from torch.optim import AdamW

from judging import optimizers
from judging.contract import Wrong
from judging.optimizers import OPTIMIZER_CONTRACTS, OPTIMIZERS, OptimizerSubject
from next_steps.lessons.adamw_optimizer import TritonAdamW
from tests.contracts import contracts_of

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROUNDED = {"stochastic_rounding": True}
OURS = OPTIMIZERS["adamw"]
SUBJECTS = (
    OURS,
    OPTIMIZERS["adamw8"],
    OptimizerSubject("rounded", partial(TritonAdamW, **ROUNDED), (BF16,), rounds_at_random=True),
    OptimizerSubject("fp32_moments", partial(TritonAdamW, moments_dtype=FP32), (BF16, FP16)),
    # whose moments are rounded to 8 bits of a significand
    OptimizerSubject("bf16_moments", partial(TritonAdamW, moments_dtype=BF16), (FP32,), 2**-8),
)


globals().update(contracts_of(optimizers, SUBJECTS))


class ForgetsItsState(AdamW):
    def load_state_dict(self, state):
        super().load_state_dict(state | {"state": {}})


class LosesTheLoss(AdamW):
    def step(self, closure=None):
        super().step(closure)


class HidesItsSteps(AdamW):
    def step(self, closure=None):
        with torch.autograd._unsafe_preserve_version_counter(*self.param_groups[0]["params"]):
            return super().step(closure)


def doing_before(change):
    """Return AdamW that does this to each parameter before a step."""

    class Changed(AdamW):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                change(p)
            return super().step(closure)

    return Changed


@doing_before
def makes_dense(p):
    """As bitsandbytes does: what else looks at the memory sees no step."""
    p.data = p.data.contiguous()


@doing_before
def takes_what_it_can_of_gradients(p):
    p.grad = torch.zeros_like(p) if p.grad is None or p.grad.is_sparse else p.grad


@doing_before
def spreads_nan(p):
    p.grad = p.grad + 0 * p.grad.sum()


@doing_before
def clips(p):
    p.grad.clamp_(-1, 1)


@doing_before
def adds_noise(p):
    p.grad = p.grad + 1e-2 * random.random()


WRONG = (  # contract, its case, an optimizer that breaks it
    (
        "steps_match_float64",
        BF16,
        lambda params, **how: AdamW(params, **how | {"weight_decay": 0.0}),
    ),
    ("ragged_sizes_and_no_elements", (9,), clips),
    ("settings_are_pytorchs", "far", lambda params, **how: AdamW(params, **how | {"lr": 1.0})),
    ("parameters_without_a_gradient_are_skipped", None, takes_what_it_can_of_gradients),
    ("what_is_not_finite_stays_in_its_element", "nan", spreads_nan),
    ("rounding_at_random_is_right_on_average", BF16, AdamW),
    ("views_are_stepped_in_their_memory_alone", "columns", makes_dense),
    ("gradients_of_any_layout", "transposed", clips),
    ("a_saved_run_continues_with_the_same_bits", FP32, ForgetsItsState),
    ("every_run_steps_to_the_same_bits", FP32, adds_noise),
    ("a_closure_is_evaluated_and_its_loss_returned", None, LosesTheLoss),
    ("autograd_notices_that_a_parameter_was_changed", None, HidesItsSteps),
    ("the_unusual_is_refused_or_right", "a sparse gradient", takes_what_it_can_of_gradients),
)


@pytest.mark.parametrize("name, case, make", WRONG, ids=[name for name, *_ in WRONG])
def test_a_wrong_optimizer_is_found_and_pytorchs_is_none(name, case, make):
    asked = OPTIMIZER_CONTRACTS[name]
    with pytest.raises(Wrong):
        asked(OptimizerSubject("wrong", make), case)
    if make is not AdamW:
        asked(OptimizerSubject("torch.optim.AdamW", AdamW), case)


def test_each_contract_has_a_wrong_optimizer():
    assert {name for name, *_ in WRONG} == OPTIMIZER_CONTRACTS.keys()
