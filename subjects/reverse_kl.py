"""Reverse KL: the gradient in the forward (batchmean), or in the backward (rows' losses)."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from harness.cli.device import DEVICE
from next_steps.lessons import reverse_kl_kernel
from next_steps.lessons.reverse_kl_kernel import TritonReverseKLLoss, reverse_kl_reference
from subjects.subject import PADDED_WIDTHS, Subject, bad_inputs, normals, of_rows, refused_tensors

INF = float("inf")
TEMPERATURE = 0.7


def make(rows, V, dtype, seed=0, offset=0.0):
    """Student's logits with row means and confident rows, a related teacher's, and a mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(size, generator=generator)

    student = 3 * normal(*rows, V) + normal(*rows, 1) + offset
    teacher = student + normal(*rows, V) - 2 * offset * normal(*rows, 1).sign()
    each = student.view(-1, V)
    confident = torch.arange(len(each))[2::3]
    each[confident, torch.randint(V, (len(confident),), generator=generator)] += 20
    mask = torch.ones(rows, dtype=torch.bool)
    mask.view(-1)[1::5] = False
    upstream = 0.5 + torch.rand((), generator=generator)
    inputs = {
        "student_logits": student.to(DEVICE, dtype),
        "teacher_logits": teacher.to(DEVICE, dtype),
    }
    return inputs | {"mask": mask.to(DEVICE)}, {"loss": upstream.to(DEVICE)}


def make_plain(rows, V, dtype, seed=0):
    """Return what a benchmark takes: no mask, and a student that knows something."""
    normal = normals(seed, dtype, math.prod(rows) * V)
    student = normal(*rows, V, scale=3.0)
    inputs = {"student_logits": student, "teacher_logits": student + normal(*rows, V)}
    return inputs, {"loss": torch.ones((), device=DEVICE)}


def reference(**options):
    return lambda s, t, mask=None: reverse_kl_reference(s, t, mask, **options)


def eager(**options):
    return lambda s, t, mask=None: reverse_kl_reference(s.float(), t.float(), mask, **options)


def closed_form(
    student, teacher, mask, grad_output, temperature=1.0, reduction="batchmean", ignore_index=-100
):
    """The gradient as p * (log p - log q - KL)."""
    counted = torch.ones_like(student[..., 0], dtype=torch.bool) if mask is None else mask
    counted = counted if counted.dtype == torch.bool else counted != ignore_index
    log_p, log_q = ((x.float() / temperature).log_softmax(-1) for x in (student, teacher))
    ratio = (log_p - log_q).masked_fill(log_p == -INF, 0)
    kl = (log_p.exp() * ratio).sum(-1, keepdim=True)
    scale = counted / (temperature * (counted.sum() if reduction == "batchmean" else 1))
    scale = scale if grad_output is None else scale * grad_output
    gradient = (log_p.exp() * (ratio - kl) * scale.unsqueeze(-1)).to(student.dtype)
    return gradient.masked_fill(~counted.unsqueeze(-1), 0)


def eager_in_orders(student, teacher, mask, grad_output, n_orders, **options):
    """Yield (loss, gradient) of eager PyTorch in two formulas, with the columns in many orders.

    At the most probable column two nearly equal numbers are subtracted, and what is left of their
    digits is luck, eager's too.  So its worst error counts.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(n_orders):
        order = torch.randperm(student.shape[-1], generator=generator).to(student.device)
        s, t = student[..., order], teacher[..., order]
        leaf = s.detach().requires_grad_()
        loss = eager(**options)(leaf, t, mask)
        loss.backward(grad_output)
        for gradient in (leaf.grad, closed_form(s, t, mask, grad_output, **options)):
            yield loss.detach(), gradient[..., order.argsort()]


def many_times(n_orders=16, **options):
    """A subject's eager results."""

    def eagers(inputs, douts):
        student, teacher, *mask = inputs.values()
        mask = mask[0] if mask else None
        pairs = eager_in_orders(student, teacher, mask, douts["loss"], n_orders, **options)
        return [{"loss": loss, "dstudent_logits": gradient} for loss, gradient in pairs]

    return eagers


def most_probable_and_others(inputs):
    student = inputs["student_logits"]
    columns = torch.arange(student.shape[-1], device=student.device)
    best = student.argmax(-1, keepdim=True) == columns
    return {"dstudent_logits": {"most probable columns": best, "other columns": ~best}}


def wrong_answers_at(**options):
    def wrong_answers(inputs, douts, right):
        student, teacher, mask = inputs.values()
        upstream, g = douts["loss"], right["dstudent_logits"]
        T = options.get("temperature", 1.0)
        p, q = ((x / T).softmax(-1) for x in (student, teacher))
        of_row = (upstream / (1 if upstream.ndim else mask.sum())) * mask

        def gradient_for(mask, **changed):
            leaf = student.detach().requires_grad_()
            loss = reverse_kl_reference(leaf, teacher, mask, **(options | changed))
            loss.backward(upstream)
            return leaf.grad

        wrong = {
            "others zeroed": g.where(F.one_hot(student.argmax(-1), student.shape[-1]) == 1, 0),
            "the KL not subtracted": g + p * of_row[:, None],
            "forward KL": (p - q) / T * of_row[:, None],
            "another temperature": gradient_for(mask, temperature=1.01 * T),
            "other rows trained": gradient_for(None)
            * (1 if upstream.ndim else len(mask) / mask.sum()),
        }
        if not upstream.ndim:
            wrong["mean over all rows"] = g * mask.sum() / len(mask)
        return {mistake: {"dstudent_logits": gradient} for mistake, gradient in wrong.items()}

    return wrong_answers


def bad_input():
    x, m = torch.zeros(2, 5, device=DEVICE), torch.ones(2, dtype=torch.bool, device=DEVICE)
    types = {
        "no teacher": (x, None, m, "teacher_logits is a NoneType, expected a tensor"),
        "probabilities as mask": (x, x, x, "mask is torch.float32, expected torch.bool: convert"),
    }
    shapes = {
        "no vocabulary": (x[:, :0], x[:, :0], m, r"\(2, 0\), expected \(..., V\) with V >= 1"),
        "0-D": (x[0, 0], x[0, 0], None, r"student_logits has shape \(\), expected \(..., V\)"),
        "two vocabularies": (x, x[:, :4], m, r"teacher_logits has shape \(2, 4\), .* \(2, 5\)"),
        "too short a mask": (x, x, m[:1], r"mask has shape \(1,\), expected \(2,\): reshape it"),
    }
    tensors = {"student_logits": x, "teacher_logits": x, "mask": m}
    return refused_tensors(tensors) | bad_inputs(types, shapes)


def bytes_of_statistics(inputs):
    """Of each row five numbers."""
    return 5 * 4 * inputs["mask"].numel()


ALONE = {
    "frozen_inputs_leave_the_others_their_gradients": "the student alone can have a gradient",
    "small_large_and_shifted_values": "steep gradients underflow; its own test asks row by row",
}
MEAN = Subject(
    name="reverse_kl",
    kernels=(reverse_kl_kernel,),
    function=TritonReverseKLLoss(),
    reference=reference(),
    eager=eager(),
    eagers=many_times(),
    make=make,
    make_plain=make_plain,
    differentiable=("student_logits",),
    split=most_probable_and_others,
    wrong_answers=wrong_answers_at(),
    size=75,
    ragged_sizes=(2, 7, 8, 9, 127, 128, 129),
    large_sizes=(5001,),
    far=(("student_logits", 0), ("teacher_logits", 0)),
    saved=("student_logits", "teacher_logits", "mask"),
    saved_bytes=lambda inputs: bytes_of_statistics(inputs) + 8,  # the number of rows that count
    # the first backward scales the forward's gradient, a second computes it anew
    exact_again=False,
    # eager PyTorch computes it anew for the upstream gradient, compiled code multiplies
    exact_compiled=False,
    activations=("student_logits", "teacher_logits"),
    compiled_first=tuple(((5,), width) for width in sorted({*PADDED_WIDTHS, 5001})),
    compiled_next=(((9,), 2048), ((6,), 1100), ((7,), 1290)),
    gpu_size=5001,
    workspace=lambda inputs: 2**20,
    row_inputs=("student_logits", "teacher_logits", "mask"),
    bad_input=bad_input,
    bad_when_compiled="two vocabularies",
    exempt=ALONE,
)

HOT = {"temperature": TEMPERATURE, "reduction": "none"}
SUBJECTS = (
    MEAN,
    replace(
        MEAN,
        name="reverse_kl_rows",
        other_settings=True,
        function=TritonReverseKLLoss(**HOT),
        reference=reference(**HOT),
        eager=eager(**HOT),
        eagers=many_times(**HOT),
        make=of_rows(make),
        make_plain=of_rows(make_plain),
        saved_bytes=bytes_of_statistics,
        exact_again=True,
        exact_compiled=True,
        wrong_answers=wrong_answers_at(**HOT),
        gpu_size=131_072,
    ),
)
