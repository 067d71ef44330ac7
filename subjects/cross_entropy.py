"""Cross-entropy: of the mean and of every row, with a new gradient and one over the logits."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

import cross_entropy_kernel
from cross_entropy_kernel import TritonCrossEntropyLoss, cross_entropy_reference
from harness.cli.device import DEVICE, HAS_GPU
from subjects.subject import (
    PADDED_WIDTHS,
    Subject,
    bad_inputs,
    generator_of,
    normals,
    of_rows,
    refused_tensors,
)


def make(rows, V, dtype, seed=0, ignore_index=-100, offset=0.0):
    """Logits with a mean in each row; every third is sure of its target, every fifth ignored."""
    generator = generator_of(seed, math.prod(rows) * V)
    options = {"generator": generator, "device": generator.device}
    logits = 3 * torch.randn((*rows, V), **options)
    logits += torch.randn((*rows, 1), **options) + offset
    targets = torch.randint(V, rows, **options)
    each, row_targets = logits.view(-1, V), targets.view(-1)
    confident = torch.arange(len(each), device=each.device)[2::3]
    each[confident, row_targets[confident]] += 20
    row_targets[1::5] = ignore_index
    upstream = 0.5 + torch.rand((), **options)
    return {"logits": logits.to(DEVICE, dtype), "targets": targets.to(DEVICE)}, {
        "loss": upstream.to(DEVICE)
    }


def make_plain(rows, V, dtype, seed=0):
    """Return what a benchmark takes: logits of a new model, and targets that all count."""
    logits = normals(seed, dtype, math.prod(rows) * V)(*rows, V)
    targets = torch.randint(V, rows, generator=torch.Generator().manual_seed(seed))
    return {"logits": logits, "targets": targets.to(DEVICE)}, {
        "loss": torch.ones((), device=DEVICE)
    }


make_of_rows = of_rows(make)


def bad_input_of_the_module():
    """Of the module in place, which asks the logits whether they need a gradient before all."""
    mistakes = bad_input()
    del mistakes["logits is a list"]
    return mistakes


def rounded_once(make):
    """With upstream gradients of 1 and -1 in fp16 and bf16.

    In place, any other factor rounds a gradient a second time that has been stored already; what
    that costs is asked in cross_entropy_more_test.
    """

    def with_signs(rows, V, dtype, seed=0):
        inputs, douts = make(rows, V, dtype, seed)
        return inputs, douts if dtype == torch.float32 else {"loss": douts["loss"].sign()}

    return with_signs


def loss(reduction):
    return TritonCrossEntropyLoss(reduction=reduction)


def loss_inplace(reduction):
    """Of results, which may be overwritten."""
    overwriting = TritonCrossEntropyLoss(reduction=reduction, inplace=True)

    def function(logits, targets):
        return overwriting(logits.clone(memory_format=torch.contiguous_format), targets)

    return function


def reference(reduction):
    return lambda logits, targets: cross_entropy_reference(logits, targets, reduction=reduction)


def eager(reduction):
    """As Hugging Face writes it, logits.float() first: the most exact form of eager PyTorch."""
    return lambda x, targets: cross_entropy_reference(x.float(), targets, reduction=reduction)


def target_and_other_entries(inputs):
    """In a norm over both, the target entries (softmax - 1) would hide errors of the others."""
    V = inputs["logits"].shape[-1]
    is_target = inputs["targets"].unsqueeze(-1) == torch.arange(V, device=DEVICE)
    return {"dlogits": {"target entries": is_target, "other entries": ~is_target}}


def wrong_answers(inputs, douts, right):
    logits, targets, g = inputs["logits"], inputs["targets"], right["dlogits"]
    V, valid = logits.shape[-1], targets != -100
    reduction = "none" if douts["loss"].ndim else "mean"

    def gradient_for(other_targets):
        leaf = logits.detach().requires_grad_()
        row_loss = cross_entropy_reference(leaf, other_targets, reduction="none")
        (row_loss * (douts["loss"] / (valid.sum() if reduction == "mean" else 1))).sum().backward()
        return leaf.grad

    wrong = {
        "other entries zeroed": g.where(F.one_hot(targets.clamp(min=0), V) == 1, 0),
        "target not subtracted": g + F.one_hot(targets.clamp(min=0), V) * g.abs().amax(),
        "target off by one": gradient_for(((targets + 1) % V).where(valid, targets)),
        "ignored rows trained": gradient_for(targets.clamp(min=0)),
    }
    if reduction == "mean":
        wrong["mean over all rows"] = g * valid.sum() / len(targets)
    return {mistake: {"dlogits": gradient} for mistake, gradient in wrong.items()}


def bad_input():
    x, t = torch.zeros(2, 5, device=DEVICE), torch.zeros(2, dtype=torch.long, device=DEVICE)
    integers = "expected torch.int64 or torch.int32"
    types = {
        "no targets": (x, None, "targets is a NoneType, expected a tensor"),
        "integer logits": (x.long(), t, "logits is torch.int64, expected torch.float16 or"),
        "class probabilities": (x, x, f"targets is torch.float32, {integers}"),
        "uint8 targets": (x, t.to(torch.uint8), f"targets is torch.uint8, {integers}"),
        "boolean targets": (x, t.bool(), f"targets is torch.bool, {integers}"),
    }
    shapes = {
        "no vocabulary": (x[:, :0], t, r"logits has shape \(2, 0\), expected \(..., V\) with V"),
        "0-D logits": (x[0, 0], t[0], r"logits has shape \(\), expected \(..., V\): reshape it"),
        "too few targets": (x, t[:1], r"targets has shape \(1,\), expected \(2,\): reshape it"),
        "vocabulary second": (x[..., None], t[:, None], r"shape \(2, 1\), expected \(2, 5\)"),
    }
    return refused_tensors({"logits": x, "targets": t}) | bad_inputs(types, shapes)


def bytes_of_statistics(inputs):
    """Of each row three numbers."""
    return 3 * 4 * inputs["targets"].numel()


MEAN = Subject(
    name="cross_entropy",
    kernels=(cross_entropy_kernel,),
    function=loss("mean"),
    reference=reference("mean"),
    eager=eager("mean"),
    make=make,
    make_plain=make_plain,
    differentiable=("logits",),
    split=target_and_other_entries,
    wrong_answers=wrong_answers,
    size=75,
    ragged_sizes=(1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193),
    large_sizes=(777, 5001),
    far=(("logits", 0),),
    saved=("logits", "targets"),
    saved_bytes=lambda inputs: bytes_of_statistics(inputs) + 8,  # the number of valid rows
    exact_compiled=not HAS_GPU,  # there the compiler adds up the rows' losses
    activations=("logits",),
    compiled_first=tuple(((5,), width) for width in (*PADDED_WIDTHS, 50_257 if HAS_GPU else 5001)),
    compiled_next=(((9,), 2048), ((6,), 1100), ((7,), 1290)),
    gpu_size=5001,
    workspace=lambda inputs: 2**20,
    row_inputs=("logits", "targets"),
    bad_input=bad_input,
    bad_when_compiled="too few targets",
    exempt={
        "frozen_inputs_leave_the_others_their_gradients": "the logits alone can have a gradient",
    },
)

ROWS = replace(
    MEAN,
    name="cross_entropy_rows",
    other_settings=True,
    function=loss("none"),
    reference=reference("none"),
    eager=eager("none"),
    make=make_of_rows,
    make_plain=of_rows(make_plain),
    saved_bytes=bytes_of_statistics,
    exact_compiled=True,
    gpu_size=128_256,
)

ONCE = "the gradient lies where the logits lay; a second backward is refused: its own test"
COPIES = "it is called with a copy, which it may overwrite"
OVERWRITES = {
    "second_backward_through_a_retained_graph": ONCE,
    "second_backward_adds_to_the_leaves_own_gradients": ONCE,
    "two_losses_on_one_result": ONCE,
    "saved_tensors_are_what_the_record_says": COPIES,
    "memory_is_bounded": "the copy counts; the table of cross_entropy_test measures without it",
}


def in_place(subject, reduction):
    return replace(
        subject,
        name=subject.name.replace("cross_entropy", "cross_entropy_inplace"),
        function=loss_inplace(reduction),
        entry=TritonCrossEntropyLoss(reduction=reduction, inplace=True),
        make=rounded_once(subject.make),
        bad_input=bad_input_of_the_module,
        saved=("targets",),  # and the logits' memory, which now holds the gradient
        exempt=subject.exempt | OVERWRITES,
    )


SUBJECTS = MEAN, ROWS, in_place(MEAN, "mean"), in_place(ROWS, "none")
