"""What is timed: for each kernel its inputs, the upstream gradient, and the exact results."""

from collections.abc import Callable

import torch

from cross_entropy_kernel import cross_entropy_reference
from harness.benchmark.benchmark_specs import HEAD_DIM, K_HEADS, MAX_SEQUENCE, Q_HEADS
from harness.benchmark.benchmarking import STEPS_DONE, Problem
from harness.cli.device import DEVICE
from next_steps.lessons.adamw_kernel import adamw_reference
from next_steps.lessons.fp8_kernel import Rows, dequantize
from next_steps.lessons.nf4_kernel import nf4_dequantize_reference, nf4_quantize
from next_steps.lessons.qk_norm_rope_kernel import qk_norm_rope_reference
from next_steps.lessons.reverse_kl_kernel import reverse_kl_reference
from next_steps.lessons.rope_kernel import rope_reference
from next_steps.lessons.swiglu_kernel import swiglu_reference
from rmsnorm_kernel import rmsnorm_reference

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EPS, QWEN3_EPS = 1e-5, 1e-6  # rms_norm_eps of LLaMA 3.1 and of Qwen3
CHECKED_ROWS = 64  # of each gradient; float64 of all rows would not fit beside the largest inputs
CHECKED_PARAMETERS = 2**18
REFERENCE_CHUNK = 4096  # rows of RMSNorm differentiated in float64 at a time
LOGITS_CHUNK = 512  # rows of logits in float64 at a time: 0.5 GB at V = 128,256
Parts = dict[str, torch.Tensor]  # of results, by name
ADAMW = {"lr": 1e-2, "weight_decay": 0.01}  # this rate changes bf16 weights visibly, in one step


def eager_rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rmsnorm_reference(x, weight, EPS)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32, device=DEVICE).to(dtype)


def rmsnorm_problem(tokens: int, hidden: int, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    x = random(tokens, hidden, dtype=dtype)  # (B*T, H)
    weight = (1 + 0.1 * random(hidden)).to(dtype)  # (H,)
    dy = random(tokens, hidden, dtype=dtype)  # (B*T, H)

    def parts(output: torch.Tensor | None, gradients: tuple[torch.Tensor, ...]) -> Parts:
        dx, dw = gradients
        return {"dx": dx[:CHECKED_ROWS], "dW": dw}

    dx, dw = None, 0.0
    for rows, dy_rows in zip(x.split(REFERENCE_CHUNK), dy.split(REFERENCE_CHUNK)):
        inputs = [t.double().requires_grad_() for t in (rows, weight)]
        dx_rows, dw_rows = torch.autograd.grad(eager_rmsnorm(*inputs), inputs, dy_rows.double())
        dx, dw = dx_rows[:CHECKED_ROWS] if dx is None else dx, dw + dw_rows
    return Problem([x, weight], 2, (dy,), parts, parts(None, (dx, dw)))


def loss_problem(
    inputs: list[torch.Tensor], name: str, columns: torch.Tensor, reference: Callable
) -> Problem:
    """A loss of logits (B*T, V), whose gradient is judged at some columns and elsewhere.

    Apart, because the entries of these columns carry nearly all of the norm.

    Args:
        inputs: the logits first.
        name: of the entries in `columns` (B*T, 1).
        reference: (rows of the logits in float64, the same rows of the other input) -> their sum.
    """
    logits, other = inputs

    def parts(loss: torch.Tensor | None, gradients: tuple[torch.Tensor, ...]) -> Parts:
        rows, where = gradients[0][:CHECKED_ROWS], columns[:CHECKED_ROWS]
        return {name: rows.gather(1, where), "other": rows.scatter(1, where, 0.0)}

    rows = logits[:CHECKED_ROWS].double().requires_grad_()
    # Rows are independent, except for the mean's 1 / tokens.
    mean = reference(rows, other[:CHECKED_ROWS]) / len(logits)
    return Problem(inputs, 1, None, parts, parts(None, torch.autograd.grad(mean, [rows])))


def cross_entropy_problem(tokens: int, vocab: int, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    logits = torch.randn(tokens, vocab, device=DEVICE, dtype=dtype)  # (B*T, V)
    targets = torch.randint(vocab, (tokens,), device=DEVICE)  # (B*T,)

    def reference(rows: torch.Tensor, row_targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy_reference(rows, row_targets, reduction="sum")

    return loss_problem([logits, targets], "target", targets[:, None], reference)


def reverse_kl_problem(tokens: int, vocab: int, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    student = 3 * random(tokens, vocab, dtype=dtype)  # (B*T, V)
    teacher = student + random(tokens, vocab, dtype=dtype)  # (B*T, V): the student knows something

    def reference(rows: torch.Tensor, teacher_rows: torch.Tensor) -> torch.Tensor:
        return reverse_kl_reference(rows, teacher_rows.double(), reduction="sum")

    probable = student[:CHECKED_ROWS].argmax(1, keepdim=True)
    return loss_problem([student, teacher], "probable", probable, reference)


def swiglu_problem(tokens: int, columns: int, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    gate, up, dy = (random(tokens, columns, dtype=dtype) for _ in range(3))  # (B*T, I)

    def parts(y: torch.Tensor, gradients: tuple[torch.Tensor, ...]) -> Parts:
        return {name: t[:CHECKED_ROWS] for name, t in zip(("y", "dgate", "dup"), (y, *gradients))}

    inputs = [t[:CHECKED_ROWS].double().requires_grad_() for t in (gate, up)]
    y = swiglu_reference(*inputs)
    gradients = torch.autograd.grad(y, inputs, dy[:CHECKED_ROWS].double())
    return Problem([gate, up], 2, (dy,), parts, parts(y, gradients))


def heads_and_angles(
    tokens: int, dtype: torch.dtype, theta: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return q, k and gradients (B, heads, T, D), and cos and sin (1, T, D).

    Few sequences, of up to MAX_SEQUENCE tokens, in the layout of Hugging Face's attention.
    """
    torch.manual_seed(0)
    T = next(length for length in range(min(tokens, MAX_SEQUENCE), 0, -1) if tokens % length == 0)
    shapes = [(tokens // T, T, heads, HEAD_DIM) for heads in (Q_HEADS, K_HEADS)]
    tensors = [random(*shape, dtype=dtype).transpose(1, 2) for shape in shapes * 2]
    options = {"dtype": torch.float32, "device": DEVICE}
    frequencies = theta ** (-torch.arange(0, HEAD_DIM, 2, **options) / HEAD_DIM)
    angles = torch.outer(torch.arange(T, **options), frequencies).repeat(1, 2)[None]
    return tensors, [angles.cos().to(dtype), angles.sin().to(dtype)]


def last_tokens(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the last tokens' q and k in one: their angles are largest."""
    return torch.cat([t[-1, :, -CHECKED_ROWS:].flatten() for t in tensors])


def rope_problem(tokens: int, columns: int, dtype: torch.dtype) -> Problem:
    (q, k, dq, dk), (cos, sin) = heads_and_angles(tokens, dtype, theta=500_000.0)

    def parts(rotated: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]) -> Parts:
        return {"rotated": last_tokens(rotated), "gradient": last_tokens(gradients)}

    inputs = [t[-1:, :, -CHECKED_ROWS:].double().requires_grad_() for t in (q, k)]
    rotated = rope_reference(*inputs, *(t[:, -CHECKED_ROWS:].double() for t in (cos, sin)))
    upstream = [t[-1:, :, -CHECKED_ROWS:].double() for t in (dq, dk)]
    gradients = torch.autograd.grad(rotated, inputs, upstream)
    return Problem([q, k, cos, sin], 2, (dq, dk), parts, parts(rotated, gradients))


def qk_norm_rope_problem(tokens: int, columns: int, dtype: torch.dtype) -> Problem:
    (q, k, dq, dk), angles = heads_and_angles(tokens, dtype, theta=1_000_000.0)
    weights = [(1 + 0.1 * random(HEAD_DIM)).to(dtype) for _ in range(2)]

    def parts(rotated: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]) -> Parts:
        *heads, dq_weight, dk_weight = gradients
        found = {"rotated": last_tokens(rotated), "gradient": last_tokens(heads)}
        return found | {"dW": torch.cat([dq_weight, dk_weight])}

    dweights = [0.0, 0.0]
    for sample in zip(*(t.split(1) for t in (q, k, dq, dk))):  # float64 of all is too large
        q_rows, k_rows, *upstream = (t.double() for t in sample)
        inputs = [t.double().requires_grad_() for t in (q_rows, k_rows, *weights)]
        rotated = qk_norm_rope_reference(*inputs, QWEN3_EPS, *(t.double() for t in angles))
        *heads, dq_weight, dk_weight = torch.autograd.grad(rotated, inputs, upstream)
        dweights = [dweights[0] + dq_weight, dweights[1] + dk_weight]
    exact = parts(tuple(t.detach() for t in rotated), (*heads, *dweights))
    return Problem([q, k, *weights, *angles], 4, (dq, dk), parts, exact)


def adamw_problem(parameters: int, size: tuple[()], dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    p, g, m = (0.01 * random(parameters, dtype=dtype) for _ in range(3))
    v = 1e-4 * (0.5 + torch.rand(parameters, dtype=torch.float32, device=DEVICE)).to(dtype)
    before, *others = (t[-CHECKED_PARAMETERS:].double() for t in (p, g, m, v))

    def parts(stepped: torch.Tensor, gradients: tuple[()]) -> Parts:
        # Beside the weights themselves, the error of a wrong step would be small.
        return {"update": stepped[-CHECKED_PARAMETERS:].double() - before}

    # torch's default betas and eps, which all contenders share
    settings = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, **ADAMW}
    exact, *_ = adamw_reference(before, *others, STEPS_DONE + 1, **settings)
    return Problem([p, g, m, v], None, None, parts, parts(exact, ()))


def linear_cross_entropy_problem(tokens: int, size: tuple[int, int], dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    H, V = size
    hidden = random(tokens, H, dtype=dtype)  # (B*T, H)
    weight = (random(V, H) / H**0.5).to(dtype)  # (V, H): logits near 1
    targets = torch.randint(V, (tokens,), device=DEVICE)  # (B*T,)
    all_words = torch.arange(V, dtype=torch.int64, device=DEVICE)
    wanted = targets[:CHECKED_ROWS]
    unwanted = all_words[~torch.isin(all_words, targets)][:CHECKED_ROWS]

    def parts(loss: torch.Tensor | None, gradients: tuple[torch.Tensor, ...]) -> Parts:
        # Apart, because the rows of words that are targets carry nearly all of dW's norm.
        dhidden, dweight = gradients
        dhidden = dhidden[:CHECKED_ROWS]
        return {"dhidden": dhidden, "dW target": dweight[wanted], "dW other": dweight[unwanted]}

    weight64, dhidden, dweight = weight.double(), None, 0.0
    words = torch.cat([wanted, unwanted])  # dW in float64 is 4 GB: these rows alone
    for rows, row_targets in zip(hidden.double().split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK)):
        logits = (rows @ weight64.t()).requires_grad_()
        total = cross_entropy_reference(logits, row_targets, reduction="sum")
        (dlogits,) = torch.autograd.grad(total / tokens, [logits])
        dhidden = dlogits[:CHECKED_ROWS] @ weight64 if dhidden is None else dhidden
        dweight = dweight + dlogits[:, words].t() @ rows
    dw_target, dw_other = dweight.split([len(wanted), len(unwanted)])
    exact = {"dhidden": dhidden, "dW target": dw_target, "dW other": dw_other}
    return Problem([hidden, weight, targets], 2, None, parts, exact)


def nf4_problem(numbers: int, size: tuple[()], dtype: torch.dtype) -> Problem:
    """Codes and scales, and their weight, from which only the shape and the dtype are read."""
    torch.manual_seed(0)
    weight = 0.02 * random(numbers, dtype=dtype)
    nf4 = nf4_quantize(weight)

    def parts(dequantized: torch.Tensor, gradients: tuple[()]) -> Parts:
        return {"weight": dequantized.view(-1)[-CHECKED_PARAMETERS:]}

    wide = nf4._replace(absmax_scales=nf4.absmax_scales.double())
    exact = nf4_dequantize_reference(wide, weight.shape, torch.float64)
    return Problem([*nf4, weight], 0, None, parts, parts(exact, ()))


def first_rows(codes: Rows) -> torch.Tensor:
    return dequantize(Rows(*(t[:CHECKED_ROWS] for t in codes)), torch.float32)


def fp8_problem(tokens: int, columns: int, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    x = random(tokens, columns, dtype=dtype)  # (N, K)
    exact = {"rows": x[:CHECKED_ROWS].double()}
    return Problem([x], 0, None, lambda codes, _: {"rows": first_rows(codes)}, exact)


def fp8_casts_problem(tokens: int, columns: int, dtype: torch.dtype) -> Problem:
    """gate and up are halves of one matrix, as where their projections are one product."""
    torch.manual_seed(0)
    gate_up = random(tokens, 2 * columns, dtype=dtype)  # (N, 2 I)
    dy = random(tokens, columns, dtype=dtype)  # (N, I)

    def parts(results: tuple[Rows, ...], gradients: tuple[()]) -> Parts:
        return dict(zip(("y", "gradients", "y again"), map(first_rows, results)))

    inputs = [t[:CHECKED_ROWS].double().requires_grad_() for t in gate_up.chunk(2, 1)]
    y = swiglu_reference(*inputs)
    exact = torch.cat(torch.autograd.grad(y, inputs, dy[:CHECKED_ROWS].double()), 1)
    y = y.detach()
    return Problem([dy, gate_up], 0, None, parts, {"y": y, "gradients": exact, "y again": y})


PROBLEMS: dict[str, Callable[..., Problem]] = {  # (tokens, size, dtype) -> Problem
    "rmsnorm": rmsnorm_problem,
    "cross_entropy": cross_entropy_problem,
    "swiglu": swiglu_problem,
    "rope": rope_problem,
    "qk_norm_rope": qk_norm_rope_problem,
    "adamw": adamw_problem,
    "adamw8": adamw_problem,
    "linear_cross_entropy": linear_cross_entropy_problem,
    "reverse_kl": reverse_kl_problem,
    "nf4": nf4_problem,
    "fp8": fp8_problem,
    "fp8_casts": fp8_casts_problem,
}
