"""Linear + cross-entropy: gradients in the forward (mean), or in the backward (rows' losses)."""

from dataclasses import replace

import torch
import torch.nn.functional as F

import cross_entropy_kernel
from cross_entropy_kernel import cross_entropy_reference
from harness.cli.device import DEVICE
from next_steps.lessons import linear_cross_entropy_kernel
from next_steps.lessons.linear_cross_entropy_kernel import (
    TritonLinearCrossEntropyLoss,
    linear_cross_entropy_forward,
    linear_cross_entropy_reference,
)
from subjects.subject import Subject, bad_inputs, generator_of, normals, of_rows, refused_tensors

CHUNK_ROWS = 4  # rows: most tests have several chunks


def make(rows, size, dtype, seed=0, ignore_index=-100):
    """hidden, weight, targets; every third token is sure of its target, every fourth is ignored.

    size: (H, V).
    """
    H, V = size
    generator = generator_of(seed, V * H)
    options = {"generator": generator, "device": generator.device}
    hidden = 0.2 + torch.randn((*rows, H), **options)
    weight = 3 * torch.randn((V, H), **options) / H**0.5
    targets = torch.randint(V, rows, **options)
    each, row_targets = hidden.view(-1, H), targets.view(-1)
    each[2::3] += 2 * weight[row_targets[2::3]]
    row_targets[1::4] = ignore_index
    upstream = 0.5 + torch.rand((), **options)
    inputs = {
        "hidden": hidden.to(DEVICE, dtype),
        "weight": weight.to(DEVICE, dtype),
        "targets": targets.to(DEVICE),
    }
    return inputs, {"loss": upstream.to(DEVICE)}


def make_plain(rows, size, dtype, seed=0):
    """Return what a benchmark takes: logits would be near 1, and all targets count."""
    H, V = size
    normal = normals(seed, dtype, V * H)
    weight = normal(V, H, scale=H**-0.5)
    targets = torch.randint(V, rows, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    inputs = {"hidden": normal(*rows, H), "weight": weight, "targets": targets}
    return inputs, {"loss": torch.ones((), device=DEVICE)}


def reference(reduction):
    return lambda *inputs: linear_cross_entropy_reference(*inputs, reduction=reduction)


def eager_loss(hidden, weight, targets, **options):
    """As Hugging Face writes it, logits.float() first: the most exact form of eager PyTorch."""
    return cross_entropy_reference(F.linear(hidden, weight).float(), targets, **options)


def eager(reduction):
    return lambda *inputs: eager_loss(*inputs, reduction=reduction)


def of_rows_with_target(reduction):
    """The function, which knows without a look how many targets `make` ignores."""
    loss_fn = TritonLinearCrossEntropyLoss(reduction=reduction, chunk_size=CHUNK_ROWS)

    def function(hidden, weight, targets):
        n_rows = targets.numel()
        repeated = 0 in targets.stride()  # then others are ignored than `make` did
        max_targets = n_rows if repeated else n_rows - (n_rows + 2) // 4
        return loss_fn(hidden, weight, targets, max_targets=max_targets)

    return function


def rows_of_targets_and_others(inputs):
    """In a norm over all of dweight, the targets' rows would hide errors of the others."""
    words = torch.arange(len(inputs["weight"]), device=DEVICE)
    is_target = torch.isin(words, inputs["targets"].flatten())[:, None]
    return {"dweight": {"targets' rows": is_target, "other rows": ~is_target}}


def wrong_answers(inputs, douts, right):
    """Mistakes that chunks invite."""
    x, w, t = inputs.values()
    upstream, valid = douts["loss"], inputs["targets"] != -100
    dx, dw = right["dhidden"], right["dweight"]
    per_row = upstream if upstream.ndim else (upstream / valid.sum()).expand(t.shape)

    def gradients(rows, targets, row_upstream):
        leaves = [tensor.detach().requires_grad_() for tensor in (x[rows], w)]
        row_loss = linear_cross_entropy_reference(*leaves, targets, reduction="none")
        return torch.autograd.grad((row_loss * row_upstream).sum(), leaves)

    everything = slice(None)
    of_others = torch.isin(torch.arange(len(w)).to(t), t)[:, None]
    trained = gradients(everything, t.clamp(min=0), per_row)
    wrong = {
        "dweight of the last chunk only": (dx, gradients(slice(8, None), t[8:], per_row[8:])[1]),
        "other words' rows zeroed": (dx, dw * of_others),
        "mean over all rows": (dx * 8 / 11, dw * 8 / 11),
        "ignored rows trained": trained,
    }
    if not upstream.ndim:
        parts = [
            gradients(slice(i, i + 4), t[i : i + 4], upstream / valid[i : i + 4].sum())
            for i in (0, 4, 8)
        ]
        wrong["mean of each chunk"] = (
            torch.cat([p[0] for p in parts]) / 3,
            sum(p[1] for p in parts) / 3,
        )
    return {mistake: {"dhidden": dx, "dweight": dw} for mistake, (dx, dw) in wrong.items()}


def bad_input():
    x, w = torch.zeros(2, 4, device=DEVICE), torch.zeros(5, 4, device=DEVICE)
    t = torch.zeros(2, dtype=torch.long, device=DEVICE)
    types = {
        "no weight": (x, None, t, "weight is a NoneType, expected a tensor"),
        "float targets": (x, w, x[:, 0], "targets is torch.float32, expected torch.int64 or"),
        "two dtypes": (x, w.half(), t, "weight is torch.float16, expected torch.float32"),
    }
    shapes = {
        "weight transposed": (x, w.t(), t, r"weight has shape \(4, 5\), expected \(4, 4\)"),
        "weight 1-D": (x, w[0], t, r"weight has shape \(4,\), expected \(V, 4\): reshape it"),
        "no vocabulary": (x, w[:0], t, r"weight has shape \(0, 4\), expected \(V, H\) with V"),
        "0-D hidden": (x[0, 0], w, t[0], r"hidden has shape \(\), expected \(..., H\)"),
        "too few targets": (x, w, t[:1], r"targets has shape \(1,\), expected \(2,\)"),
    }
    tensors = {"hidden": x, "weight": w, "targets": t}
    return refused_tensors(tensors) | bad_inputs(types, shapes)


FORWARD = Subject(
    name="linear_cross_entropy",
    # the first may have nothing to launch; the loss of each chunk is the second's
    kernels=(linear_cross_entropy_kernel, cross_entropy_kernel),
    function=TritonLinearCrossEntropyLoss(chunk_size=CHUNK_ROWS),
    entry=linear_cross_entropy_forward,
    reference=reference("mean"),
    eager=eager("mean"),
    make=make,
    make_plain=make_plain,
    differentiable=("hidden", "weight"),
    split=rows_of_targets_and_others,
    wrong_answers=wrong_answers,
    made_by_kernels_alone=False,
    size=(16, 70),
    ragged_sizes=tuple((H, V) for H in (1, 17) for V in (1, 7, 8, 9, 65)),
    large_sizes=((64, 300),),
    far=(("hidden", 0),),
    saved=("hidden", "weight", "targets"),
    # the first backward scales the forward's gradient, a second computes it anew
    exact_again=False,
    activations=("hidden",),
    results=("weight",),
    compiled_first=(((11,), (1289, 70)),),
    compiled_next=(((23,), (1289, 70)), ((30,), (1100, 77))),
    gpu_rows=(600,),
    gpu_size=(128, 1000),
    row_inputs=("hidden", "targets"),
    bad_input=bad_input,
    bad_when_compiled="too few targets",
    exempt={
        "rows_beyond_int32_in_memory": "no chunk is so large; its own test scales large gradients",
        "memory_is_bounded": "its own test measures it, with LLaMA's vocabulary",
    },
)

ROWS = replace(
    FORWARD,
    name="linear_cross_entropy_rows",
    other_settings=True,
    function=TritonLinearCrossEntropyLoss(reduction="none", chunk_size=CHUNK_ROWS),
    reference=reference("none"),
    eager=eager("none"),
    make=of_rows(make),
    make_plain=of_rows(make_plain),
    fixed_outputs={"loss": "is a view and is being modified inplace"},
    exact_again=True,
)

SUBJECTS = (
    FORWARD,
    ROWS,
    replace(
        FORWARD,
        name="linear_cross_entropy_targets",
        function=of_rows_with_target("mean"),
    ),
    replace(
        ROWS,
        name="linear_cross_entropy_targets_rows",
        function=of_rows_with_target("none"),
    ),
)
