"""SwiGLU, in memory of its own and over its inputs."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from harness.cli.device import DEVICE
from next_steps.lessons import swiglu_kernel
from next_steps.lessons.swiglu_kernel import TritonSwiGLU, TritonSwiGLUFunction, swiglu_reference
from subjects.subject import Subject, bad_call, normals, refused_tensors


def make(rows, width, dtype, seed=0):
    """Gates of both signs, up and the gradient for y with a mean."""
    normal = normals(seed, dtype, math.prod(rows) * width)
    gate, up = normal(*rows, width, mean=0.3, scale=2.0), normal(*rows, width, mean=0.5)
    return {"gate": gate, "up": up}, {"y": normal(*rows, width, mean=0.25)}


def swiglu(gate, up):
    return TritonSwiGLUFunction.apply(gate, up, False)


def swiglu_inplace(gate, up):
    """Of results, which may be overwritten."""
    gate, up = (t.clone(memory_format=torch.contiguous_format) for t in (gate, up))
    return TritonSwiGLUFunction.apply(gate, up, True)


def wrong_answers(inputs, douts, right):
    gate, up, dy = inputs["gate"], inputs["up"], douts["y"]
    s = gate.sigmoid()
    y, dgate, dup = right["y"], right["dgate"], right["dup"]
    end = torch.arange(y.numel(), device=y.device).view(y.shape) >= y.numel() - 16
    return {
        "y without gate": {"y": s * up},
        "y with gate and up swapped": {"y": gate * up * up.sigmoid()},
        "y of GELU": {"y": F.gelu(gate) * up},
        "y with its end unwritten": {"y": y.masked_fill(end, 0)},
        "dgate with sigmoid held constant": {"dgate": dy * up * s},
        "dgate without up": {"dgate": dgate / up},
        "dgate with s for 1 - s": {"dgate": dy * up * s * (1 + gate * s)},
        "dgate with silu for s": {"dgate": dy * up * s * gate * (1 + gate * (1 - s))},
        "dup of gate, not silu": {"dup": dy * gate},
        "dup of y": {"dup": dy * y},
        "dup and dgate swapped": {"dup": dgate, "dgate": dup},
        "dup off by one": {"dup": dup.roll(1)},
    }


def bad_input():
    ones = torch.ones(4, 64, device=DEVICE)
    inputs = {"gate": ones, "up": ones}
    dtype = "up is torch.float16, expected torch.float32"
    shape = r"up has shape \(1, 64\), expected \(4, 64\)"
    return refused_tensors(inputs) | {
        "two dtypes": bad_call(inputs, TypeError, dtype, up=ones.half()),
        "two shapes": bad_call(inputs, ValueError, shape, up=ones[:1]),
    }


SWIGLU = Subject(
    name="swiglu",
    kernels=(swiglu_kernel,),
    function=swiglu,
    reference=swiglu_reference,
    make=make,
    differentiable=("gate", "up"),
    wrong_answers=wrong_answers,
    size=64,
    ragged_sizes=(1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 1000),
    large_sizes=(5000,),
    far=(("gate", 0), ("up", 0), ("dy", 0)),
    saved=("gate", "up"),
    activations=("gate", "up"),
    gpu_size=14_336,
    workspace=lambda inputs: 2**20,
    row_inputs=("gate", "up"),
    bad_input=bad_input,
    bad_when_compiled="two shapes",
)

SUBJECTS = (
    SWIGLU,
    replace(
        SWIGLU,
        name="swiglu_inplace",
        other_settings=True,
        function=swiglu_inplace,
        entry=TritonSwiGLU(inplace=True),
        saved=(),
        exempt={
            "saved_tensors_are_what_the_record_says": "it is called with copies to overwrite",
            "memory_is_bounded": "the copies count; its own test measures it without them",
        },
    ),
)
