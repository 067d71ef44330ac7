"""RMSNorm, with a weight and without."""

import math
from dataclasses import replace
from functools import partial

import torch

import rmsnorm_kernel
from harness.cli.device import DEVICE
from rmsnorm_kernel import TritonRMSNormFunction, rmsnorm_reference
from subjects.subject import BadInput, Subject, normals, refused_tensors

EPS = 1e-5


def make(rows, H, dtype, seed=0, weight_dtype=None):
    """x with a mean, weights of both signs and far from 1, and a gradient for y that is not
    constant.
    """
    weight_dtype = weight_dtype or dtype
    normal = normals(seed, dtype, math.prod(rows) * H)
    x = normal(*rows, H, mean=0.5, scale=1.5)
    weight = normal(H, mean=0.5, dtype=weight_dtype)
    dy = normal(*rows, H, mean=0.25, dtype=torch.promote_types(dtype, weight_dtype))
    return {"x": x, "weight": weight}, {"y": dy}


def make_without_weight(*arguments, **options):
    inputs, douts = make(*arguments, **options)
    return {"x": inputs["x"]}, douts


def norm(x, weight=None, eps=EPS):
    return TritonRMSNormFunction.apply(x, weight, eps)


def reference(x, weight=None, eps=EPS):
    return rmsnorm_reference(x, weight, eps)


def with_eps(eps: float) -> Subject:
    """Return RMSNorm with a weight and this eps."""
    return replace(RMSNORM, function=partial(norm, eps=eps), reference=partial(reference, eps=eps))


def wrong_answers(inputs, douts, right):
    x, weight, dy = inputs["x"], inputs.get("weight", 1.0), douts["y"]
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    x_hat, wdy = x * rstd, weight * dy
    c1 = (wdy * x_hat).mean(-1, keepdim=True)
    wrong = {
        "y of LayerNorm": {"y": (x - x.mean(-1, keepdim=True)) * rstd * weight},
        "dx without the c1 term": {"dx": rstd * wdy},
        "dx with rstd for rstd^3": {"dx": rstd * (wdy - x * c1 / rstd)},
        "dx with the mean over a padded block": {"dx": rstd * (wdy - x_hat * c1 / 2)},
    }
    if "weight" not in inputs:
        return wrong
    dw, dw_rows = right["dweight"], (dy * x_hat).flatten(0, -2)
    return wrong | {
        "y without the weight": {"y": x_hat},
        "dx without the weight": {"dx": rstd * (dy - x_hat * (dy * x_hat).mean(-1, keepdim=True))},
        "dw of x instead of x_hat": {"dweight": (dy * x).flatten(0, -2).sum(0)},
        "dw without its last row": {"dweight": dw_rows[:-1].sum(0)},
        "dw of one program lost": {"dweight": dw - dw_rows[3::8].sum(0)},
        "dw off by one column": {"dweight": dw.roll(1)},
    }


def bad_input():
    ones = torch.ones(4, 64, device=DEVICE)
    w = ones[0]
    rows = {
        "weight is 2-D": (ones, ones, r"weight has shape \(4, 64\), expected \(64,\)"),
        "weight is 0-D": (ones, ones.sum(), r"weight has shape \(\), expected \(64,\)"),
        "row too long": (ones.new_ones(1, 32_769), ones.new_ones(32_769), "H from 1 to 32,768"),
        "row empty": (ones[:, :0], w[:0], "H from 1 to 32,768"),
        "x of another H": (ones[:, :63], w, r"weight has shape \(64,\), expected \(63,\)"),
        "x is 0-D": (ones.sum(), w, r"x has shape \(\), expected \(..., H\)"),
    }
    calls = {mistake: BadInput((x, w), ValueError, said) for mistake, (x, w, said) in rows.items()}
    return calls | refused_tensors({"x": ones, "weight": w})


def bad_input_without_weight():
    calls = bad_input()
    return {
        mistake: replace(calls[mistake], inputs=calls[mistake].inputs[:1])
        for mistake in ("x is 0-D", "row empty", "row too long")
    }


def bytes_of_rstd(inputs):
    return 4 * inputs["x"].shape[:-1].numel()


RMSNORM = Subject(
    name="rmsnorm",
    kernels=(rmsnorm_kernel,),
    function=norm,
    reference=reference,
    make=make,
    differentiable=("x", "weight"),
    wrong_answers=wrong_answers,
    size=64,
    ragged_sizes=(2, 3, 31, 32, 33, 127, 129, 255, 257, 1000, 1023, 1025),
    large_sizes=(5000,),
    far=(("x", 0), ("dy", 0)),
    saved=("x", "weight"),
    saved_bytes=bytes_of_rstd,
    activations=("x",),
    gpu_size=4096,
    workspace=lambda inputs: bytes_of_rstd(inputs) + 8 * 2**20,  # and the partial sums of dw
    row_inputs=("x",),
    bad_input=bad_input,
    bad_when_compiled="x of another H",
)

SUBJECTS = (
    RMSNORM,
    replace(
        RMSNORM,
        name="rmsnorm_without_weight",
        other_settings=True,
        make=make_without_weight,
        large_sizes=(5000, 16_385),
        differentiable=("x",),
        saved=("x",),
        bad_input=bad_input_without_weight,
        bad_when_compiled="row empty",
        exempt={"frozen_inputs_leave_the_others_their_gradients": "x alone can have a gradient"},
    ),
)
