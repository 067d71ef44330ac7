"""Qwen3's RMSNorm of each head of q and k, and RoPE of what it gives."""

from dataclasses import replace
from functools import partial

import torch

from harness.cli.device import DEVICE
from next_steps.lessons import qk_norm_rope_kernel
from next_steps.lessons.qk_norm_rope_kernel import TritonQKNormRoPEFunction, qk_norm_rope_reference
from subjects import rope
from subjects.subject import Subject, bad_call, normals, refused_tensors

EPS = 1e-6  # Qwen3's rms_norm_eps


def make(rows, size, dtype, seed=0, weight_dtype=None, **options):
    """RoPE's inputs, and weights of both signs and far from 1, one for q and another for k."""
    inputs, douts = rope.make(rows, size, dtype, seed, **options)
    normal = normals(seed + 1, weight_dtype or dtype)
    q, k, cos, sin = inputs.values()
    weights = {"q_weight": normal(size[-1], mean=0.5), "k_weight": normal(size[-1], mean=-1.0)}
    return {"q": q, "k": k, **weights, "cos": cos, "sin": sin}, douts


def function(q, k, q_weight, k_weight, cos, sin, eps=EPS):
    return TritonQKNormRoPEFunction.apply(q, k, q_weight, k_weight, eps, cos, sin)


def reference(q, k, q_weight, k_weight, cos, sin, eps=EPS):
    return qk_norm_rope_reference(q, k, q_weight, k_weight, eps, cos, sin)


def eager(q, k, *others):
    """The reference, in the dtypes of q and k where a weight or cos made it fp32."""
    q_rot, k_rot = reference(q, k, *others)
    return q_rot.to(q.dtype), k_rot.to(k.dtype)


def wrong_answers(inputs, douts, right):
    q, k, q_weight, k_weight, cos, sin = inputs.values()
    rstd = torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + EPS)
    q_hat = q * rstd

    def turned(x, sign=1):
        return x * cos.unsqueeze(1) + sign * rope.rotate_half(x) * sin.unsqueeze(1)

    def turned_back(dy):
        x = torch.zeros_like(dy, requires_grad=True)
        return torch.autograd.grad(turned(x), x, dy)[0]

    def dx_of(u, mean_over=1.0):
        """RMSNorm's backward."""
        c = (u * q_weight * q_hat).mean(-1, keepdim=True) * mean_over
        return rstd * (u * q_weight - q_hat * c)

    u = turned_back(douts["q_rot"])
    dw_rows = u * q_hat
    exchanged = reference(q, k, k_weight, q_weight, cos, sin)
    return {
        "q_rot turned, then normalized": {"q_rot": q_weight * turned(q) * rstd},
        "q_rot with the weight after the rotation": {"q_rot": q_weight * turned(q_hat)},
        "q_rot without the weight": {"q_rot": turned(q_hat)},
        "q_rot with k's weight": {"q_rot": exchanged[0]},
        "k_rot with q's weight": {"k_rot": exchanged[1]},
        "q_rot not turned": {"q_rot": q_weight * q_hat},
        "q_rot turned the other way": {"q_rot": turned(q_weight * q_hat, -1)},
        "q_rot normalized over all heads": {
            "q_rot": turned(q_weight * q / q.pow(2).mean((1, 3), keepdim=True).sqrt())
        },
        "dq of a gradient that was not turned back": {"dq": dx_of(douts["q_rot"])},
        "dq of a gradient turned forward": {"dq": dx_of(turned(douts["q_rot"]))},
        "dq without the mean": {"dq": dx_of(u, 0.0)},
        "dq with the mean over a half": {"dq": dx_of(u, 2.0)},
        "dq_weight of q instead of q_hat": {"dq_weight": (u * q).sum((0, 1, 2))},
        "dq_weight without the last token": {"dq_weight": dw_rows[:, :, :-1].sum((0, 1, 2))},
        "dq_weight without the last head": {"dq_weight": dw_rows[:, :-1].sum((0, 1, 2))},
        "dq_weight with its halves exchanged": {
            "dq_weight": right["dq_weight"].roll(q.shape[-1] // 2)
        },
        "dq_weight and dk_weight exchanged": {
            "dq_weight": right["dk_weight"],
            "dk_weight": right["dq_weight"],
        },
    }


def bad_input():
    """RoPE's, with weights as long as q's heads, and bad weights."""
    x, a = torch.ones(2, 4, 3, 16, device=DEVICE), torch.ones(2, 3, 16, device=DEVICE)
    calls = {}
    for name, call in rope.bad_shapes().items():
        q, k, *angles = call.inputs
        weight = a.new_ones(q.shape[-1])
        calls[name] = replace(call, inputs=(q, k, weight, weight, *angles))
    inputs = {"q": x, "k": x, "q_weight": a[0, 0], "k_weight": a[0, 0], "cos": a, "sin": a}
    of_all_heads = r"q_weight has shape \(4, 16\), expected \(16,\)"
    short = r"k_weight has shape \(8,\), expected \(16,\)"
    return calls | {
        "q_weight of all heads": bad_call(inputs, ValueError, of_all_heads, q_weight=x[0, :, 0]),
        "k_weight of another D": bad_call(inputs, ValueError, short, k_weight=a[0, 0, :8]),
        **refused_tensors(inputs),
    }


QK_NORM_ROPE = Subject(
    name="qk_norm_rope",
    kernels=(qk_norm_rope_kernel,),
    function=function,
    reference=reference,
    eager=eager,
    make=make,
    make_plain=partial(make, shared=True),
    differentiable=("q", "k", "q_weight", "k_weight"),
    wrong_answers=wrong_answers,
    size=rope.SIZE,
    ragged_sizes=tuple((*heads, 12) for heads in rope.HEADS_OF_ANY_NUMBER)
    + tuple((3, 2, D) for D in (2, 4, 6, 32, 64, 80, 96, 126, 130)),
    large_sizes=((32, 8, 128), (17, 5, 256), (3, 9, 1024), (3, 1, 4096)),
    **rope.OF_HEADS,
    saved=("q", "k", "q_weight", "k_weight", "cos", "sin"),
    in_a_graph=partial(rope.of_packed_heads, weights=("q_weight", "k_weight")),
    workspace=lambda inputs: 2**21,  # the partial sums of dw
    bad_input=bad_input,
    exempt={
        "one_to_four_dimensions": "q and k have four; the angles' are qk_norm_rope_test's",
    },
)
SUBJECTS = (QK_NORM_ROPE,)
