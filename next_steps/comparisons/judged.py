"""Whom the judge can be pointed at: other libraries' functions and optimizers, PyTorch's, and ours.

A function takes what the subject's own function takes; an optimizer is called as torch.optim.AdamW
is.  What a library documents is a limit, and no fault: `limit` says where it stands.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch._dynamo
import torch.nn.functional as F

from harness.benchmark.benchmarking import Implementation
from harness.cli.device import HAS_GPU
from judging.contracts import of_callable
from judging.optimizers import OPTIMIZERS, OptimizerSubject
from next_steps.comparisons import benchmark_peers as peers
from subjects import SUBJECTS, rope
from subjects.rmsnorm import EPS
from subjects.subject import Subject

LIGERS = {
    peers.LIGER: peers.TRITON_OPS,
    peers.CUTE: peers.CUTE_OPS,
    f"{peers.LIGER}, cuTile": "liger_kernel.ops.cutile.ops",
}
ENDINGS = {"": "mean", "_rows": "none"}  # of a loss: what its subject's name ends with
MANY_SHAPES = torch._dynamo.config.patch(recompile_limit=2**20, accumulated_recompile_limit=2**20)
Makers = Iterator[tuple[str, Callable[[], list[Implementation]]]]  # (subject, imports and makes)


def made(label: str, module: str, name: str, adapt: Callable = partial, **options) -> Callable:
    """Return the maker of one implementation, adapt(what the module calls so, **options)."""

    def make() -> list[Implementation]:
        function = getattr(importlib.import_module(module), name)
        return [Implementation(label, adapt(function, **options))]

    return make


def already(label: str, function: Callable) -> Callable:
    return lambda: [Implementation(label, function)]


def of_flat_rows(make: Callable) -> Callable:
    """Return the maker of losses of any rows, which the library gets as (N, V) and (N,)."""

    def of_any_rows(function: Callable) -> Callable:
        def call(*inputs):
            *matrices, of_rows = inputs  # the last one has a number for each row
            matrices = [t.reshape(-1, t.shape[-1]) for t in matrices]
            loss = function(*matrices, of_rows.reshape(-1))
            return loss.view(of_rows.shape) if loss.ndim else loss

        return call

    return lambda: [replace(each, function=of_any_rows(each.function)) for each in make()]


# ---- The libraries ------------------------------------------------------------------------------


def liger() -> Makers:
    for name, ops in LIGERS.items():
        for in_place in (False, True):
            yield "rmsnorm", partial(peers.liger_rmsnorm, name, ops, in_place)
        yield "swiglu", partial(peers.liger_swiglu, name, ops)
        yield "rope", partial(peers.cute_rope, name, ops)
        for end, reduction in ENDINGS.items():
            loss = partial(peers.cute_cross_entropy, name, ops, reduction)
            yield f"cross_entropy{end}", of_flat_rows(loss)
    for end, reduction in ENDINGS.items():
        loss = partial(peers.liger_linear_cross_entropy, reduction)
        yield f"linear_cross_entropy{end}", of_flat_rows(loss)
    yield "qk_norm_rope", peers.liger_qk_norm_rope
    yield "reverse_kl", of_flat_rows(peers.liger_reverse_kl)


def quack() -> Makers:
    yield "rmsnorm", peers.quack_rmsnorm
    for end, reduction in ENDINGS.items():
        loss = partial(made, module="quack", name="cross_entropy", reduction=reduction)
        yield f"cross_entropy{end}", of_flat_rows(loss("QuACK"))
        yield f"cross_entropy{end}", of_flat_rows(loss("QuACK, in place", inplace_backward=True))


def unsloth() -> Makers:
    def norm(function) -> Callable:
        return lambda x, weight: function(SimpleNamespace(weight=weight, eps=EPS), x)

    def mean(function) -> Callable:
        return lambda logits, targets: function(logits[None], targets[None])

    def rows(function) -> Callable:
        return function.apply

    kernels = partial(made, "Unsloth")
    yield "rmsnorm", kernels("unsloth.kernels.rms_layernorm", "fast_rms_layernorm", norm)
    yield "rope", kernels("unsloth.kernels.rope_embedding", "fast_rope_embedding")
    losses = "unsloth.kernels.cross_entropy_loss"
    yield "cross_entropy", of_flat_rows(kernels(losses, "fast_cross_entropy_loss", mean))
    yield "cross_entropy_rows", of_flat_rows(kernels(losses, "Fast_CrossEntropyLoss", rows))


def trl() -> Makers:
    def loss(function, reduction: str) -> Callable:
        def call(hidden, weight, targets):
            """As SFTTrainer calls it: of the targets that count."""
            counts = targets != -100
            settings = 1.0, 32_768, None, 1.0, ()
            found, *_ = function.apply(hidden[counts], weight, None, targets[counts], *settings)
            if reduction == "none":
                return -found.new_zeros(counts.shape).masked_scatter(counts, found)
            return -found.sum() / counts.sum().clamp(min=1)

        return call

    for end, reduction in ENDINGS.items():
        make = made("TRL", "trl.kernels", "ChunkedLogProbFunction", loss, reduction=reduction)
        yield f"linear_cross_entropy{end}", of_flat_rows(make)


def torchao() -> Makers:
    label, *coded = "torchao, AdamW8bit", "torchao.optim", "AdamW8bit"
    yield "adamw8", made(label, *coded)
    yield "adamw8", made(f"{label}, stochastic rounding", *coded, bf16_stochastic_round=True)


def bitsandbytes() -> Makers:
    yield "adamw", made("bitsandbytes, AdamW", "bitsandbytes.optim", "AdamW")
    yield "adamw8", made("bitsandbytes, AdamW8bit", "bitsandbytes.optim", "AdamW8bit")


def flashoptim() -> Makers:
    def adamw(optimizer_class, **settings) -> Callable:
        def make(params, **options):
            """Weights get its 24 bits, which it refuses where all have 32 already."""
            params = list(params)
            groups = params if isinstance(params[0], dict) else [{"params": params}]
            single = all(p.dtype == torch.float32 for group in groups for p in group["params"])
            bits = {"master_weight_bits": None if single else 24}
            return optimizer_class(params, **bits, **settings, **options)

        return make

    flash = "flashoptim", "FlashAdamW", adamw
    yield "adamw", made("FlashOptim, FlashAdamW, quantize=False", *flash, quantize=False)
    yield "adamw8", made("FlashOptim, FlashAdamW", *flash)


def torch_compile() -> Makers:
    for name, subject in SUBJECTS.items():
        function = torch.compile(subject.eager or subject.reference, fullgraph=True)
        # a contract has more shapes than the compiler thinks reasonable
        yield name, already("torch.compile", MANY_SHAPES(function))


def pytorch() -> Makers:
    def norm(x, weight):
        return F.rms_norm(x, weight.shape, weight, EPS)

    yield "rmsnorm", already("F.rms_norm", norm)
    for end, reduction in ENDINGS.items():
        loss = partial(F.cross_entropy, reduction=reduction)
        yield f"cross_entropy{end}", of_flat_rows(already("F.cross_entropy", loss))
    for way in ("foreach", "fused"):
        adamw = partial(torch.optim.AdamW, **{way: True})
        yield "adamw", already(f"torch.optim.AdamW, {way}", adamw)


def ours() -> Makers:
    for name, subject in SUBJECTS.items():
        yield name, already("ours", subject.function)
    for name, subject in OPTIMIZERS.items():
        yield name, already("ours", subject.make)


LIBRARIES: dict[str, tuple[str, str, Callable[[], Makers]]] = {  # its name for pip, the module
    "liger": ("liger-kernel", "liger_kernel", liger),
    "quack": ("quack-kernels", "quack", quack),
    "unsloth": ("unsloth", "unsloth", unsloth),
    "trl": ("trl", "trl", trl),
    "torchao": ("torchao", "torchao", torchao),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes", bitsandbytes),
    "flashoptim": ("flashoptim", "flashoptim", flashoptim),
    "torch.compile": ("torch", "torch", torch_compile),
    "pytorch": ("torch", "torch", pytorch),
    "ours": ("torch", "torch", ours),
}
ON_A_CPU = "trl", "torchao", "torch.compile", "pytorch", "ours"


def installed(library: str) -> str:
    """Return the version of a library, or "" if it is not installed."""
    try:
        return importlib.metadata.version(LIBRARIES[library][0])
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_judged(subject: str, library: str) -> tuple[dict[str, Callable], list[str]]:
    """Return what the library has of a subject, by label, and a sentence for each that is absent.

    subject: a name of SUBJECTS, or "adamw"; with 8-bit moments: "adamw8".
    """
    package, module, makers = LIBRARIES[library]
    if not HAS_GPU and library not in ON_A_CPU:
        return {}, [f"{library}: needs a CUDA GPU"]
    found, absent = {}, []
    for name, make in makers():
        try:
            if name == subject:
                found |= {each.name: each.function for each in make()}
        except Exception as error:  # whatever an import raises, the others can still be judged
            absent.append(f"{library}: {peers.why_absent(error, module, package)}")
    return found, absent


# ---- What the libraries document ----------------------------------------------------------------

# What fails where a backward reuses the memory of what was saved for it.
SECOND_USE = (
    "second_backward_adds_to_the_leaves_own_gradients",
    "second_backward_through_a_retained_graph",
    "two_losses_on_one_result",
)
# And where the logits, q and k, or the gradients that come in are written over.
WRITTEN_OVER = (
    *SECOND_USE,
    "gradients_accumulate_instead_of_overwriting",
    "inputs_and_upstream_gradients_are_never_changed",
    "input_changed_before_the_backward_is_noticed_or_does_not_count",
    "recomputed_or_offloaded",
    "two_calls_on_the_same_inputs",
)
DOCUMENTED = {  # (what a label begins with, a subject's name): the file and what it says
    (peers.LIGER, "cross_entropy"): "ops/cross_entropy.py: 'store X_ptr gradient in X_ptr'",
    # no more than this is said of the kernel in Triton
    (peers.LIGER, "rope"): "README, Key Features: 'in-place replacement', for RoPE among others",
    (peers.LIGER, "qk_norm_rope"): "README, Key Features: 'in-place replacement', for RoPE",
    (
        peers.LIGER,
        "swiglu",
    ): "ops/cutedsl/ops/swiglu.py: 'in place ... exactly like the Triton kernel'",
    ("QuACK, in place", "cross_entropy"): "cross_entropy.py: 'perform backward pass in-place'",
    ("Unsloth", "rope"): "rope_embedding.py: 'in place where X.transpose(1, 2) is contiguous'",
    ("torch.compile", ""): "torch/_functorch/config.py: donated_buffer",
} | {
    (f"{name}, in place", "rmsnorm"): "ops/rms_norm.py: in_place 'can produce incorrect inputs'"
    for name in LIGERS
}


def limit(label: str, subject: str, contract: str) -> str:
    """Return what a library documents of this contract, and where; "" if it documents nothing."""
    for (beginning, name), documented in DOCUMENTED.items():
        excused = WRITTEN_OVER if name else SECOND_USE
        if label.startswith(beginning) and subject.startswith(name) and contract in excused:
            return documented
    return ""


def asked_as(name: str, label: str, function: Callable) -> Subject | OptimizerSubject:
    """Return the subject whose contracts are asked of what `find_judged` found.

    It has the inputs that the library takes.  Others' RoPE reads one table for all samples, and of
    a row the first half.  Liger-Kernel's and PyTorch's cross-entropy return the logits' dtype.
    Those in CuTe DSL, QuACK's too, want V % 8 == 0.
    """
    if name in OPTIMIZERS:
        rounds = "stochastic rounding" in label
        return replace(OPTIMIZERS[name], make=function, rounds_at_random=rounds)
    subject = of_callable(SUBJECTS[name], function)
    others = label not in ("ours", "torch.compile")
    if others and subject.name.startswith("cross_entropy"):
        if label.startswith((peers.LIGER, "F.")):
            subject = replace(subject, eager=None)
        if label.startswith((peers.CUTE, "QuACK")):
            sizes = {"size": 80, "ragged_sizes": (8, 24, 136), "large_sizes": (776, 5008)}
            sizes |= {"gpu_size": 5008}
            subject = replace(subject, **sizes)
    if not others or "rope" not in subject.name:
        return subject

    def make(rows, size, dtype, seed=0):
        inputs, douts = subject.make(rows, size, dtype, seed)
        angles = (t[:1].to(dtype) for t in rope.rotation(*inputs["cos"].shape))
        return inputs | dict(zip(("cos", "sin"), angles)), douts

    return replace(subject, make=make)
