"""What benchmark_kernels.py measures: for each kernel its inputs, its opponents, and the least work that it takes."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cross_entropy_kernel import TritonCrossEntropyLoss, cross_entropy_reference
from harness.checking import DEVICE
from harness.device import HAS_GPU
from harness.tables import describe
from next_steps.adamw_kernel import TritonAdamW, adamw_reference
from next_steps.linear_cross_entropy_kernel import TritonLinearCrossEntropyLoss
from next_steps.reverse_kl_kernel import TritonReverseKLLoss, reverse_kl_reference
from next_steps.rope_kernel import rope_reference, triton_apply_rotary_pos_emb
from next_steps.swiglu_kernel import TritonSwiGLU, swiglu_reference
from rmsnorm_kernel import TritonRMSNormFunction, rmsnorm_reference

# after the kernels, which decide how Triton will run
import triton  # isort: skip
import triton.language as tl  # isort: skip

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LLAMA_HIDDEN, LLAMA_INTERMEDIATE, LLAMA_VOCAB = 4096, 14_336, 128_256
# On the CPU: what Triton's interpreter does in seconds.
HIDDEN, VOCAB = (LLAMA_HIDDEN, LLAMA_VOCAB) if HAS_GPU else (256, 1000)
INTERMEDIATE = LLAMA_INTERMEDIATE if HAS_GPU else 1000
PARAMETERS = LLAMA_HIDDEN * LLAMA_INTERMEDIATE if HAS_GPU else 5000  # an MLP's projection: 58.7 million
Q_HEADS, K_HEADS, HEAD_DIM = 32, 8, 128  # of LLaMA 3.1 8B
MAX_SEQUENCE = 2048  # of RoPE's B x T tokens
EPS = 1e-5  # LLaMA 3.1's rms_norm_eps
CHECKED_ROWS = 64  # of each gradient; float64 of all rows would not fit beside the largest inputs
CHECKED_PARAMETERS = 2**18
REFERENCE_CHUNK = 4096  # rows of RMSNorm differentiated in float64 at a time
LOGITS_CHUNK = 512  # rows of logits in float64 at a time: 0.5 GB at V = 128,256
STEPS_DONE = 9.0  # before AdamW's step that is judged, so that the corrections of both moments matter
ADAMW = {"lr": 1e-2, "weight_decay": 0.01}  # such a rate changes bf16 weights visibly, with one step

EAGER = "PyTorch, as Hugging Face writes it"
OURS = "ours"
IN_PLACE = f"{OURS}, in place"
TWO_KERNELS = f"{OURS}, two kernels"
ONE_TILE = "Triton, a row in one tile"
COMPILED = "torch.compile"
HOST_FLOOR = "autograd Function that does nothing"


# ---------------------------------------------------------------- contenders


@dataclass(frozen=True)
class Implementation:
    """`function` is called with a problem's inputs: (x, weight) -> y or (logits, targets) -> loss.

    It may destroy them.  It is then timed on what it left of them, which is as much work.
    For AdamW it makes an optimizer: (list of parameters) -> torch.optim.Optimizer.
    """

    name: str
    function: Callable
    backward_again: bool = True  # may the backward of one forward run more than once?
    waits: bool = False  # does a call wait for the GPU?  A CUDA graph cannot record that, and is not tried.


@dataclass(frozen=True)
class Contenders:
    """Of one kernel: everything but the other libraries."""

    pytorch: list[Implementation]  # the first is what ours is judged by, and what torch.compile compiles
    ours: list[Implementation]
    nothing: Callable | None = None  # the time of the host alone, where it can be longer than the GPU's
    compile_pytorch: bool = True
    compile_ours: bool = False  # the first one of ours
    donate: bool = False  # see compile_function


class Nothing(torch.autograd.Function):
    """Allocates what RMSNorm or SwiGLU return and launches no kernel: the time of Python and autograd alone."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class NothingLoss(torch.autograd.Function):
    """The same for a loss."""

    @staticmethod
    def forward(ctx, logits, targets):
        ctx.save_for_backward(logits)
        return torch.empty((), dtype=torch.float32, device=logits.device)

    @staticmethod
    def backward(ctx, grad_output):
        (logits,) = ctx.saved_tensors
        return torch.empty_like(logits), None


class NothingRotated(torch.autograd.Function):
    """The same for RoPE, which needs neither q nor k in the backward."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return torch.empty_like(q), torch.empty_like(k)

    @staticmethod
    def backward(ctx, dq_rot, dk_rot):
        return torch.empty_like(dq_rot), torch.empty_like(dk_rot), None, None


@triton.jit
def _one_tile_kernel(student_ptr, teacher_ptr, row_loss_ptr, dstudent_ptr, n_rows, V: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * V
    m_s, m_t, d_s, d_t, a = -1e38, -1e38, 0.0, 0.0, 0.0
    for first in tl.static_range(0, V, TILE):  # once, if the row is a tile
        cols = first + tl.arange(0, TILE)
        s = tl.load(student_ptr + start + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        t = tl.load(teacher_ptr + start + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        m_s_new, m_t_new = tl.maximum(m_s, tl.max(s)), tl.maximum(m_t, tl.max(t))
        w = tl.exp(s - m_s_new)
        a = a * tl.exp(m_s - m_s_new) + tl.sum(tl.where(cols < V, w * (s - t), 0.0))
        d_s = d_s * tl.exp(m_s - m_s_new) + tl.sum(w)
        d_t = d_t * tl.exp(m_t - m_t_new) + tl.sum(tl.exp(t - m_t_new))
        m_s, m_t = m_s_new, m_t_new
    kl = a / d_s + (m_t + tl.log(d_t)) - (m_s + tl.log(d_s))
    tl.store(row_loss_ptr + tl.program_id(0), kl / n_rows)
    for first in tl.static_range((V - 1) // TILE * TILE, -1, -TILE):
        cols = first + tl.arange(0, TILE)
        if first != (V - 1) // TILE * TILE:  # the last tile is still there
            s = tl.load(student_ptr + start + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
            t = tl.load(teacher_ptr + start + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        dstudent = tl.exp(s - m_s) / d_s * (s - t - a / d_s) / n_rows
        tl.store(dstudent_ptr + start + cols, dstudent, mask=cols < V)


class OneTile(torch.autograd.Function):
    """The reverse KL that reverse_kl_kernel.py begins with: a tile of up to 32,768 columns, 512 threads for it.

    For timing: contiguous (n_rows, V) without -inf, the gradient for a grad_output of 1.
    """

    @staticmethod
    def forward(ctx, student, teacher):
        n_rows, V = student.shape
        row_loss, ctx.dstudent = student.new_empty(n_rows, dtype=torch.float32), torch.empty_like(student)
        tile = min(triton.next_power_of_2(V), 32_768)
        _one_tile_kernel[(n_rows,)](student, teacher, row_loss, ctx.dstudent, n_rows, V, tile, num_warps=16)
        return row_loss.sum()

    @staticmethod
    def backward(ctx, grad_output):
        return ctx.dstudent, None


def eager_reverse_kl(student: torch.Tensor, teacher: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    log_p, log_q = (F.log_softmax(logits.to(dtype), -1) for logits in (student, teacher))
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def eager_rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rmsnorm_reference(x, weight, EPS)


def eager_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Hugging Face's loss: the logits are converted to fp32 first."""
    return cross_entropy_reference(logits.float(), targets)


def eager_linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return eager_cross_entropy(F.linear(hidden, weight), targets)


def rmsnorm_contenders(dtype: str) -> Contenders:
    return Contenders(
        [
            Implementation(EAGER, eager_rmsnorm),
            Implementation("F.rms_norm", lambda x, w: F.rms_norm(x, w.shape, w, EPS)),
        ],
        [Implementation(OURS, lambda x, w: TritonRMSNormFunction.apply(x, w, EPS))],
        Nothing.apply,
        compile_ours=True,
    )


def cross_entropy_contenders(dtype: str) -> Contenders:
    return Contenders(
        [
            Implementation(EAGER, eager_cross_entropy),
            Implementation(f"F.cross_entropy, {dtype} logits", F.cross_entropy),
        ],
        [
            Implementation(OURS, TritonCrossEntropyLoss()),
            Implementation(IN_PLACE, TritonCrossEntropyLoss(inplace=True), backward_again=False),
        ],
        NothingLoss.apply,
        compile_ours=True,
    )


def swiglu_contenders(dtype: str) -> Contenders:
    return Contenders(
        [Implementation(EAGER, swiglu_reference)],
        [
            Implementation(OURS, TritonSwiGLU()),
            Implementation(IN_PLACE, TritonSwiGLU(inplace=True), backward_again=False),
        ],
        Nothing.apply,
    )


def rope_contenders(dtype: str) -> Contenders:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return Contenders(
        [Implementation(EAGER, apply_rotary_pos_emb)],
        [Implementation(OURS, triton_apply_rotary_pos_emb)],
        NothingRotated.apply,
    )


def adamw_contenders(dtype: str) -> Contenders:
    torch_adamw = functools.partial(torch.optim.AdamW, **ADAMW)
    ours = [Implementation(OURS, functools.partial(TritonAdamW, **ADAMW))]
    if dtype == "bf16":
        rounded = functools.partial(TritonAdamW, **ADAMW, stochastic_rounding=True)
        ours.append(Implementation(f"{OURS}, stochastic rounding", rounded))
    # On a GPU the default is foreach=True.  waits: without capturable=True they refuse to be recorded, even the fused
    # one, which does not wait.
    pytorch = [
        Implementation("torch.optim.AdamW", torch_adamw, waits=True),
        Implementation("torch.optim.AdamW, fused=True", functools.partial(torch_adamw, fused=True), waits=True),
    ]
    return Contenders(pytorch, ours, compile_pytorch=False)


def linear_cross_entropy_contenders(dtype: str) -> Contenders:
    pytorch = [
        Implementation(EAGER, eager_linear_cross_entropy),
        Implementation(
            f"F.linear + F.cross_entropy, {dtype} logits",
            lambda hidden, weight, targets: F.cross_entropy(F.linear(hidden, weight), targets),
        ),
    ]
    if hasattr(F, "linear_cross_entropy"):
        chunked = functools.partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())
        pytorch.append(Implementation("F.linear_cross_entropy, chunked", chunked, backward_again=False))
    # The second backward of one forward would be another one, which computes the logits anew.
    ours = Implementation(OURS, TritonLinearCrossEntropyLoss(), backward_again=False)
    return Contenders(pytorch, [ours], donate=True)


def reverse_kl_contenders(dtype: str) -> Contenders:
    eager = [Implementation("F.kl_div in fp32", eager_reverse_kl)]
    if dtype != "fp32":
        in_dtype = functools.partial(eager_reverse_kl, dtype=DTYPES[dtype])
        eager.append(Implementation(f"F.kl_div in {dtype}", in_dtype))
    two_kernels = TritonReverseKLLoss(reduction="none")  # each row may have a grad_output of its own
    ours = [
        Implementation(OURS, TritonReverseKLLoss(), backward_again=False),  # again, it would compute the gradient anew
        Implementation(TWO_KERNELS, lambda student, teacher: two_kernels(student, teacher).mean()),
    ]
    return Contenders([*eager, Implementation(ONE_TILE, OneTile.apply)], ours, NothingLoss.apply, donate=True)


def implementations(kernel: str, dtype: str, peers: list[Implementation]) -> list[Implementation]:
    """In the order of the table's rows; a new list for each size, so that torch.compile specializes to it."""
    own = KERNELS[kernel].contenders(dtype)
    compiled, ours = [], own.ours
    if HAS_GPU and own.compile_pytorch:
        torch.compiler.reset()  # it gives up after eight shapes; forget those before this one
        function = compile_function(own.pytorch[0].function, own.donate)
        compiled = [Implementation(COMPILED, function, backward_again=not own.donate)]
        if own.compile_ours:
            ours = [*ours, Implementation(f"{OURS} under torch.compile", compile_function(ours[0].function))]
    floor = [Implementation(HOST_FLOOR, own.nothing)] if own.nothing else []
    return [*own.pytorch, *compiled, *peers, *ours, *floor]


def compile_function(function: Callable, donate: bool = False) -> Callable:
    """torch.compile for one shape, all of it or an error."""
    import torch._functorch.config

    # Donation lets a compiled backward reuse the memory of what the forward saved for it.  Without it the backward
    # can run more than once, and so be timed by itself; but where the logits are saved, it would take twice as much.
    torch._functorch.config.donated_buffer = donate
    return torch.compile(function, dynamic=False, fullgraph=True)


def liger(kernel: str) -> list[Implementation]:
    from liger_kernel.ops import LigerRMSNormFunction, LigerSiLUMulFunction
    from liger_kernel.transformers import (
        LigerCrossEntropyLoss,
        LigerFusedLinearCrossEntropyLoss,
        LigerJSD,
        liger_rotary_pos_emb,
    )

    if kernel == "rmsnorm":
        # in_place=False, because in place it writes dx over dy, which the timing loop uses again
        return [Implementation("Liger-Kernel", lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False))]
    if kernel == "linear_cross_entropy":
        loss = LigerFusedLinearCrossEntropyLoss()  # it reads the number of valid targets back to the host, too
        return [Implementation("Liger-Kernel", lambda hidden, w, targets: loss(w, hidden, targets), waits=True)]
    if kernel == "reverse_kl":
        # The generalized JSD of log-probabilities, which are PyTorch's; with beta 1 it is KL(student || teacher).
        jsd = LigerJSD(beta=1.0)

        def reverse_kl(student, teacher):
            return jsd(*(F.log_softmax(logits, -1, dtype=torch.float32) for logits in (student, teacher)))

        return [Implementation("Liger-Kernel, JSD of log_softmax", reverse_kl, waits=True)]  # for grad_output
    # The others have no mode that keeps their inputs.
    functions = {
        "cross_entropy": LigerCrossEntropyLoss(),  # reads the number of valid targets back to the host
        "swiglu": LigerSiLUMulFunction.apply,
        "rope": liger_rotary_pos_emb,  # overwrites q and k, and the gradients that come in
    }
    return [Implementation("Liger-Kernel, in place", functions[kernel], waits=kernel == "cross_entropy")]


def quack(kernel: str) -> list[Implementation]:
    import quack

    if kernel == "rmsnorm":
        return [Implementation("QuACK", lambda x, w: quack.rmsnorm(x, w, eps=EPS))]
    return [
        Implementation("QuACK", quack.cross_entropy),
        Implementation(
            "QuACK, in place",
            lambda logits, targets: quack.cross_entropy(logits, targets, inplace_backward=True),
            backward_again=False,
        ),
    ]


# name: (package, module, implementations, of these kernels)
PEERS = {
    "Liger-Kernel": (
        "liger-kernel", "liger_kernel", liger,
        ("rmsnorm", "cross_entropy", "swiglu", "rope", "linear_cross_entropy", "reverse_kl"),
    ),
    "QuACK": ("quack-kernels", "quack", quack, ("rmsnorm", "cross_entropy")),
}  # fmt: skip


def find_peers(kernel: str) -> tuple[list[Implementation], list[str]]:
    """(the other libraries' implementations, a sentence for each library that is absent)."""
    found, absent = [], []
    for name, (package, module, make, kernels) in PEERS.items():
        if kernel not in kernels:
            continue
        try:
            peers = make(kernel)
        except Exception as error:  # whatever another library's import raises, ours can still be measured
            if isinstance(error, ModuleNotFoundError) and error.name == module:
                absent.append(f"{name}: not installed (pip install {package} to add it)")
            else:
                absent.append(f"{name}: cannot be imported ({describe(error)})")
            continue
        if HAS_GPU:
            found += peers
        else:
            absent.append(f"{name}: needs a CUDA GPU")
    if kernel == "linear_cross_entropy" and not hasattr(F, "linear_cross_entropy"):
        absent.append("F.linear_cross_entropy: this PyTorch has none (2.13 has)")
    return found, absent


# ---------------------------------------------------------------- problems


@dataclass(frozen=True)
class Problem:
    """One kernel at one size: inputs, upstream gradient, and what the results should be."""

    inputs: list[torch.Tensor]
    wrt: int  # gradients are wanted of so many inputs, the first ones; 0: an optimizer's step
    dy: tuple[torch.Tensor, ...] | None  # of each output; None: 1, what loss.backward() starts with
    parts: Callable[..., dict[str, torch.Tensor]]  # (output, gradients) -> what of them is checked
    exact: dict[str, torch.Tensor]  # the same parts in float64


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def rmsnorm_problem(tokens: int, hidden: int, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    x = random(tokens, hidden, dtype=dtype)  # (B*T, H)
    weight = (1 + 0.1 * torch.randn(hidden, device=DEVICE)).to(dtype)  # (H,)
    dy = random(tokens, hidden, dtype=dtype)  # (B*T, H)

    def parts(output: torch.Tensor | None, gradients: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        dx, dw = gradients
        return {"dx": dx[:CHECKED_ROWS], "dW": dw}

    dx, dw = None, 0.0
    for rows, dy_rows in zip(x.split(REFERENCE_CHUNK), dy.split(REFERENCE_CHUNK)):
        inputs = [t.double().requires_grad_() for t in (rows, weight)]
        dx_rows, dw_rows = torch.autograd.grad(eager_rmsnorm(*inputs), inputs, dy_rows.double())
        dx, dw = dx_rows[:CHECKED_ROWS] if dx is None else dx, dw + dw_rows
    return Problem([x, weight], 2, (dy,), parts, parts(None, (dx, dw)))


def cross_entropy_problem(tokens: int, vocab: int, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    logits = torch.randn(tokens, vocab, device=DEVICE, dtype=dtype)  # (B*T, V)
    targets = torch.randint(vocab, (tokens,), device=DEVICE)  # (B*T,)

    def parts(loss: torch.Tensor | None, gradients: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        # Apart, because the targets' entries carry nearly all of the norm and would hide the others' errors.
        rows, columns = gradients[0][:CHECKED_ROWS], targets[:CHECKED_ROWS, None]
        return {"target": rows.gather(1, columns), "other": rows.scatter(1, columns, 0.0)}

    rows = logits[:CHECKED_ROWS].double().requires_grad_()
    total = cross_entropy_reference(rows, targets[:CHECKED_ROWS], reduction="sum")
    exact = torch.autograd.grad(total / tokens, [rows])  # rows are independent but for the mean's 1 / tokens
    return Problem([logits, targets], 1, None, parts, parts(None, exact))


def swiglu_problem(tokens: int, columns: int, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    gate, up, dy = (random(tokens, columns, dtype=dtype) for _ in range(3))  # (B*T, I)

    def parts(y: torch.Tensor, gradients: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        return {name: t[:CHECKED_ROWS] for name, t in zip(("y", "dgate", "dup"), (y, *gradients))}

    inputs = [t[:CHECKED_ROWS].double().requires_grad_() for t in (gate, up)]
    y = swiglu_reference(*inputs)
    gradients = torch.autograd.grad(y, inputs, dy[:CHECKED_ROWS].double())
    return Problem([gate, up], 2, (dy,), parts, parts(y, gradients))


def rope_problem(tokens: int, columns: int, dtype: torch.dtype) -> Problem:
    """q and k of as few sequences as MAX_SEQUENCE allows, in the layout in which Hugging Face's attention has them."""
    torch.manual_seed(0)
    T = next(length for length in range(min(tokens, MAX_SEQUENCE), 0, -1) if tokens % length == 0)
    shapes = [(tokens // T, T, heads, HEAD_DIM) for heads in (Q_HEADS, K_HEADS)]
    q, k, dq, dk = (random(*shape, dtype=dtype).transpose(1, 2) for shape in shapes * 2)  # (B, heads, T, D)
    frequencies = 500_000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
    angles = torch.outer(torch.arange(T, device=DEVICE), frequencies).repeat(1, 2)[None]  # (1, T, D)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def last(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The last tokens' q and k in one: there the angles are largest."""
        return torch.cat([t[-1, :, -CHECKED_ROWS:].flatten() for t in tensors])

    def parts(rotated: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        return {"rotated": last(rotated), "gradient": last(gradients)}

    inputs = [t[-1:, :, -CHECKED_ROWS:].double().requires_grad_() for t in (q, k)]
    rotated = rope_reference(*inputs, *(t[:, -CHECKED_ROWS:].double() for t in (cos, sin)))
    gradients = torch.autograd.grad(rotated, inputs, [t[-1:, :, -CHECKED_ROWS:].double() for t in (dq, dk)])
    return Problem([q, k, cos, sin], 2, (dq, dk), parts, parts(rotated, gradients))


def adamw_problem(parameters: int, size: tuple[()], dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    p, g, m = (0.01 * random(parameters, dtype=dtype) for _ in range(3))
    v = 1e-4 * (0.5 + torch.rand(parameters, device=DEVICE)).to(dtype)
    before, *others = (t[-CHECKED_PARAMETERS:].double() for t in (p, g, m, v))

    def parts(stepped: torch.Tensor, gradients: tuple[()]) -> dict[str, torch.Tensor]:
        # What the step adds: beside the weights themselves, the error of a step that is wrong would be small.
        return {"update": stepped[-CHECKED_PARAMETERS:].double() - before}

    exact, *_ = adamw_reference(
        before, *others, STEPS_DONE + 1, beta1=0.9, beta2=0.999, eps=1e-8, **ADAMW
    )  # torch's default betas and eps, which all contenders share
    return Problem([p, g, m, v], 0, None, parts, parts(exact, ()))


def linear_cross_entropy_problem(tokens: int, size: tuple[int, int], dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    H, V = size
    hidden = random(tokens, H, dtype=dtype)  # (B*T, H)
    weight = (torch.randn(V, H, device=DEVICE) / H**0.5).to(dtype)  # (V, H), so that logits are about as large as 1
    targets = torch.randint(V, (tokens,), device=DEVICE)  # (B*T,)
    wanted = targets[:CHECKED_ROWS]
    unwanted = torch.arange(V, device=DEVICE)[~torch.isin(torch.arange(V, device=DEVICE), targets)][:CHECKED_ROWS]

    def parts(loss: torch.Tensor | None, gradients: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        # Apart, because the rows of words that are targets carry nearly all of dW's norm.
        dhidden, dweight = gradients
        return {"dhidden": dhidden[:CHECKED_ROWS], "dW target": dweight[wanted], "dW other": dweight[unwanted]}

    weight64, dhidden, dweight = weight.double(), None, 0.0
    words = torch.cat([wanted, unwanted])  # dW in float64 is 4 GB: these rows alone
    for rows, row_targets in zip(hidden.double().split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK)):
        logits = (rows @ weight64.t()).requires_grad_()
        total = cross_entropy_reference(logits, row_targets, reduction="sum")
        (dlogits,) = torch.autograd.grad(total / tokens, [logits])
        dhidden = dlogits[:CHECKED_ROWS] @ weight64 if dhidden is None else dhidden
        dweight = dweight + dlogits[:, words].t() @ rows
    exact = {"dhidden": dhidden, "dW target": dweight[: len(wanted)], "dW other": dweight[len(wanted) :]}
    return Problem([hidden, weight, targets], 2, None, parts, exact)


def reverse_kl_problem(tokens: int, vocab: int, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    student = 3 * random(tokens, vocab, dtype=dtype)  # (B*T, V)
    teacher = student + random(tokens, vocab, dtype=dtype)  # (B*T, V), of which the student knows something

    def parts(loss: torch.Tensor | None, gradients: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        # Apart, because the most probable columns' entries are the largest and would hide the others' errors.
        rows, columns = gradients[0][:CHECKED_ROWS], student[:CHECKED_ROWS].argmax(1, keepdim=True)
        return {"probable": rows.gather(1, columns), "other": rows.scatter(1, columns, 0.0)}

    rows = student[:CHECKED_ROWS].double().requires_grad_()
    total = reverse_kl_reference(rows, teacher[:CHECKED_ROWS].double(), reduction="sum")
    exact = torch.autograd.grad(total / tokens, [rows])  # rows are independent but for the mean's 1 / tokens
    return Problem([student, teacher], 1, None, parts, parts(None, exact))


# ---------------------------------------------------------------- kernels


@dataclass(frozen=True)
class Rate:
    """What a kernel's time is turned into, and the ceiling beside which it is printed."""

    name: str
    format: str
    per_us: float  # bytes or FLOP in a microsecond that are one of it
    ceiling: str
    key: str  # in a row of the record
    ceiling_key: str  # in the record
    per_element: str  # in a section of the record: the work for each element of the input


BANDWIDTH = Rate("GB/s", ",.0f", 1e3, "copy", "gbs", "copy_gbs", "bytes_per_element")
COMPUTE = Rate("TFLOP/s", ",.1f", 1e6, "matmul", "tflops", "matmul_tflops", "flop_per_element")


@dataclass(frozen=True)
class Dimension:
    name: str
    default: int | tuple[int, ...]  # or several, each measured
    flag: str | None = None  # of the command line; None: it is what it is

    @property
    def defaults(self) -> tuple[int, ...]:
        return (self.default,) if isinstance(self.default, int) else self.default


@dataclass(frozen=True)
class Kernel:
    title: str
    problem: Callable[..., Problem]
    contenders: Callable[[str], Contenders]
    tokens: list[int]  # unless told
    dimensions: tuple[Dimension, ...]  # of the input, after the tokens
    work: int  # see WORK
    errors: tuple[str, ...]  # a problem's parts
    rate: Rate = BANDWIDTH
    rows: str = "Tokens"  # what the first dimension counts; if anything else, --tokens says nothing of it
    judged: str = "gradients' errors"
    notes: tuple[str, ...] = ()  # above the table


# WORK.  Tensors as large as the input that must be read or written, forward and backward together.  Every
# implementation is given the same count, so that a column of GB/s compares times and nothing else.
#   RMSNorm, 5: the forward reads x and writes y, the backward reads x and dy and writes dx.  The weight and
#   one number per row are less than 0.1 % of that.
#   Cross-entropy, 3: the forward reads the logits; the backward reads them again, since nothing stays on the
#   chip between the two, and writes their gradient.  Who computes the gradient in the forward can have part
#   of the second read from the cache, and so come closer to the copy rate, or pass it.
#   Reverse KL, 3: student and teacher are read, the gradient is written.
#   SwiGLU, 8: the forward reads gate and up and writes y, the backward reads dy, gate and up and writes dgate and dup.
#   RoPE, 4: the forward reads q and k and writes both, the backward does so with their gradients.  cos and sin are
#   as long as one head of 40, if all samples share them.
#   AdamW, 7: reads p, g, m and v, writes p, m and v.
#   Linear + cross-entropy, 6, but FLOP: three products, each of which multiplies and adds per logit and hidden column.
KERNELS = {
    "rmsnorm": Kernel(
        "RMSNorm", rmsnorm_problem, rmsnorm_contenders,
        tokens=[256, 1024, 4096, 16_384, 65_536] if HAS_GPU else [4, 16],
        dimensions=(Dimension("hidden", HIDDEN, "hidden"),),
        work=5, errors=("dx", "dW"),
    ),
    "cross_entropy": Kernel(
        "Cross-Entropy", cross_entropy_problem, cross_entropy_contenders,
        tokens=[128, 256, 512, 1024, 8192] if HAS_GPU else [4, 16],
        dimensions=(Dimension("vocabulary", VOCAB, "vocab"),),
        work=3, errors=("target", "other"),
        notes=("in place: the gradient overwrites the logits, which are lost",),
    ),
    "swiglu": Kernel(
        "SwiGLU", swiglu_problem, swiglu_contenders,
        tokens=[1024, 16_384] if HAS_GPU else [4, 16],
        dimensions=(Dimension("columns", INTERMEDIATE, "hidden"),),
        work=8, errors=("y", "dgate", "dup"), judged="errors of y and the gradients",
        notes=("in place: the gradients overwrite gate and up, which are lost",),
    ),
    "rope": Kernel(
        "RoPE", rope_problem, rope_contenders,
        tokens=[512, 8192, 32_768] if HAS_GPU else [4, 16],
        dimensions=(Dimension("columns", (Q_HEADS + K_HEADS) * HEAD_DIM),),
        work=4, errors=("rotated", "gradient"), judged="errors of the rotated and of the gradients",
        notes=(
            f"columns: of q ({Q_HEADS} heads x {HEAD_DIM}) and k ({K_HEADS} x {HEAD_DIM}), "
            f"transposed views of (B, T, heads, {HEAD_DIM}), T up to {MAX_SEQUENCE:,}",
            "in place: the results overwrite q and k, the gradients those that come in",
        ),
    ),
    "adamw": Kernel(
        "AdamW", adamw_problem, adamw_contenders,
        tokens=[PARAMETERS], dimensions=(), work=7, errors=("update",), rows="Parameters",
        judged="error of what a step adds to the weights",
        notes=("one call is one step, which has no forward and no backward; PyTorch's default on a GPU is foreach",),
    ),
    "linear_cross_entropy": Kernel(
        "Linear + Cross-Entropy", linear_cross_entropy_problem, linear_cross_entropy_contenders,
        tokens=[512, 8192] if HAS_GPU else [4, 16],
        dimensions=(Dimension("hidden", HIDDEN, "hidden"), Dimension("vocabulary", VOCAB, "vocab")),
        work=6, errors=("dhidden", "dW target", "dW other"), rate=COMPUTE,
        notes=("Forward: those that keep no logits compute the gradients in it",),
    ),
    "reverse_kl": Kernel(
        "Reverse KL", reverse_kl_problem, reverse_kl_contenders,
        tokens=[4096] if HAS_GPU else [4, 16],
        dimensions=(Dimension("vocabulary", (32_768, 65_536, 131_072) if HAS_GPU else VOCAB, "vocab"),),
        work=3, errors=("probable", "other"),
        notes=(
            "ours: one pass and the gradient in the forward; two kernels: the backward reads the logits again",
            f"{ONE_TILE}: up to 32,768 columns, both softmaxes and the gradient in one kernel of 512 threads",
        ),
    ),
}  # fmt: skip
