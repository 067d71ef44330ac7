"""What is the fused norm's and RoPE's alone: eps, sums over many tokens, heads of any number and
length.

rope_test.py asks what it has in common with RoPE, tests/contracts_*_test.py what every function has
to do, this one too.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from harness.benchmark.checking import FLOOR, Check, assert_all_passed, relative_error
from harness.cli.device import DEVICE, HAS_GPU
from next_steps.lessons import qk_norm_rope_kernel
from next_steps.lessons.qk_norm_rope_kernel import (
    qk_norm_rope_backward,
)
from subjects import SUBJECTS, subject
from subjects.qk_norm_rope import EPS, make, reference
from subjects.qk_norm_rope import function as norm_and_rope
from tests.fixtures import poisoned_outputs

QK_NORM_ROPE = SUBJECTS["qk_norm_rope"]
pytestmark = pytest.mark.usefixtures("poison_new_tensors")
ROWS, SIZE = (2, 3), (4, 2, 16)  # (B, T), (query heads, key heads, D)
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}
Inputs = dict[str, torch.Tensor]


def with_eps(eps: float) -> subject.Subject:
    functions = {"function": norm_and_rope, "reference": reference, "eager": reference}
    return replace(
        QK_NORM_ROPE, **{name: partial(function, eps=eps) for name, function in functions.items()}
    )


def check_against_float64(inputs: Inputs, douts: Inputs, of=QK_NORM_ROPE) -> list[Check]:
    """q_rot, k_rot and the four gradients, each against float64."""
    worst = max((t.dtype for t in (*inputs.values(), *douts.values())), key=FLOOR.get)
    return subject.checks(of, inputs, douts, dtype=worst)


def run(inputs: Inputs, douts: Inputs) -> Inputs:
    return subject.run(QK_NORM_ROPE, QK_NORM_ROPE.function, inputs, douts)


# ---- The numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_reference_is_qwen3s_attention_up_to_its_rotated_heads(dtype):
    from transformers.models.qwen3 import modeling_qwen3

    inputs, _ = make(ROWS, SIZE, dtype)
    norms = []
    for weight in (inputs["q_weight"], inputs["k_weight"]):
        norms.append(modeling_qwen3.Qwen3RMSNorm(SIZE[-1], EPS).to(DEVICE, dtype))
        norms[-1].weight.data.copy_(weight)
    # tokens before heads, as its projections give them
    q, k = (
        norm(x.transpose(1, 2)).transpose(1, 2)
        for norm, x in zip(norms, (inputs["q"], inputs["k"]))
    )
    theirs = modeling_qwen3.apply_rotary_pos_emb(q, k, inputs["cos"], inputs["sin"])
    assert all(map(torch.equal, reference(*inputs.values()), theirs))


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
def test_eps_is_used_where_it_shows(eps):
    inputs, douts = make(ROWS, SIZE, torch.float32)
    inputs |= {"q": 1e-3 * inputs["q"], "k": 1e-3 * inputs["k"]}
    assert_all_passed(check_against_float64(inputs, douts, of=with_eps(eps)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_eps_of_zero_leaves_no_nan_from_heads_that_are_none():
    inputs, douts = make(ROWS, (5, 3, 12), torch.float32)
    assert_all_passed(check_against_float64(inputs, douts, of=with_eps(0.0)))


def test_nan_stays_in_its_head_and_in_its_weights_gradient():
    inputs, douts = make(ROWS, SIZE, torch.float32)
    clean = run(inputs, douts)
    inputs["q"][1, 2, 0, 3] = math.nan
    found = run(inputs, douts)
    hit = torch.zeros_like(clean["q_rot"], dtype=torch.bool)
    hit[1, 2, 0] = True
    for part in ("q_rot", "dq"):
        assert found[part][hit].isnan().all()
        assert torch.equal(found[part][~hit], clean[part][~hit])
    assert found["dq_weight"].isnan().all()
    for part in ("k_rot", "dk", "dk_weight"):
        assert torch.equal(found[part], clean[part])


# ---- The weights' gradients ----------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dw_error_does_not_grow_with_tokens(dtype):
    few, many = ((4, 64), (4, 16_384)) if HAS_GPU else ((1, 8), (2, 192))
    found = [check_against_float64(*make(rows, SIZE, dtype))[-2:] for rows in (few, many)]
    for of_few, of_many in zip(*found):
        assert_all_passed([of_few, of_many])
        assert of_many.error <= 2 * of_few.error + FLOOR[dtype]


@pytest.mark.exhaustive
@pytest.mark.parametrize("n_programs", [1, 8, 100])
def test_any_number_of_programs_gives_the_same_gradients(n_programs, monkeypatch):
    """Also where q has one block of heads and k has three: 1, 2 or 20 programs for each."""
    monkeypatch.setattr(qk_norm_rope_kernel, "_programs", lambda device, num_warps: n_programs)
    assert_all_passed(check_against_float64(*make((2, 10), (2, 5, 512), torch.float32)))


@pytest.mark.parametrize("n_programs, D", [(1, 16), (127, 80), (64, 16), (150, 20)])
def test_no_partial_sum_is_lost_at_the_end(n_programs, D):
    parts = [torch.randn(n_programs, n_blocks, D, device=DEVICE) for n_blocks in (2, 1)]
    dw = torch.full((2, D), math.nan, device=DEVICE)
    block = qk_norm_rope_kernel.DW_BLOCK
    qk_norm_rope_kernel._qk_norm_rope_dw_kernel[(-(-D // block["BLOCK_COLS"]), 2)](
        (parts[0], dw[0], 2), (parts[1], dw[1], 1), n_programs, D, **block
    )
    for found, part in zip(dw, parts):
        assert relative_error(found, part.double().sum((0, 1))) < FLOOR[torch.float32]


def test_frozen_weights_get_no_gradient_and_no_buffer():
    inputs, douts = make(ROWS, SIZE, torch.float32)
    leaves = subject.leaves_of(QK_NORM_ROPE, inputs, ("q", "k"))
    with poisoned_outputs() as shapes:
        outputs = norm_and_rope(*leaves.values())
        torch.autograd.backward(outputs, list(douts.values()))
    q_and_k = [tuple(leaves[name].shape) for name in ("q", "k")]
    assert shapes == 2 * q_and_k  # the rotated, their gradients; neither rstd nor sums nor dw
    q, k, q_weight, k_weight, cos, sin = inputs.values()
    arguments = *douts.values(), q, k, q_weight, k_weight, EPS, cos, sin
    *gradients, dq_weight, dk_weight = qk_norm_rope_backward(*arguments, need_weights=False)
    assert dq_weight is None and dk_weight is None
    with_weights = qk_norm_rope_backward(*arguments)
    assert all(map(torch.equal, gradients, with_weights))
