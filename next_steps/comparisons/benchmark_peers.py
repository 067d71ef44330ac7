"""Who else is timed: other libraries.

Each function imports its library and returns the library's implementations of one kernel.
"""

import functools
import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F

from harness.benchmark.benchmarking import Implementation
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.tables import describe
from next_steps.comparisons.benchmark_contenders import norm_then_rope
from next_steps.comparisons.benchmark_problems import ADAMW
from next_steps.lessons.nf4_kernel import BLOCK, GROUP
from subjects.qk_norm_rope import EPS as QWEN3_EPS
from subjects.rmsnorm import EPS

LIGER = "Liger-Kernel"
LIGER_IN_PLACE = f"{LIGER}, in place"  # where it has no mode that keeps its inputs
CUTE = f"{LIGER}, CuTe DSL"
CUTE_IN_PLACE = f"{CUTE}, in place"
# The functions that LIGER_KERNEL_IMPL takes; with cutedsl there none falls back to Triton.
TRITON_OPS, CUTE_OPS = "liger_kernel.ops", "liger_kernel.ops.cutedsl.ops"


def in_triton(function: Callable) -> Callable:
    """Return a function of Liger-Kernel that takes kernels in Triton, in each call.

    Liger-Kernel chooses by itself, for some kernels CuTe DSL where CUTLASS is installed.
    """
    from liger_kernel.backends import set_impl

    def call(*inputs):
        set_impl("nvidia-triton")
        return function(*inputs)

    return call


def liger_rmsnorm(
    name: str = LIGER, ops: str = TRITON_OPS, in_place: bool = False
) -> list[Implementation]:
    # In place, its default, it writes dx over dy, which the timing loop uses again.
    settings = EPS, 0.0, "llama", in_place
    norm = importlib.import_module(ops).LigerRMSNormFunction
    name += ", in place" * in_place
    return [Implementation(name, lambda x, w=None: norm.apply(x, w, *settings))]


def liger_cross_entropy() -> list[Implementation]:
    from liger_kernel.transformers import LigerCrossEntropyLoss

    # The host reads the number of valid targets.
    return [Implementation(LIGER_IN_PLACE, in_triton(LigerCrossEntropyLoss()), waits=True)]


def liger_swiglu(name: str = LIGER_IN_PLACE, ops: str = TRITON_OPS) -> list[Implementation]:
    return [Implementation(name, importlib.import_module(ops).LigerSiLUMulFunction.apply)]


def liger_rope() -> list[Implementation]:
    from liger_kernel.transformers import liger_rotary_pos_emb

    # It overwrites q, k and the gradients of its outputs.
    return [Implementation(LIGER_IN_PLACE, in_triton(liger_rotary_pos_emb))]


def liger_qk_norm_rope() -> list[Implementation]:
    from liger_kernel.ops import LigerRMSNormFunction
    from liger_kernel.transformers import liger_rotary_pos_emb

    def norm(x, weight):
        return LigerRMSNormFunction.apply(x, weight, QWEN3_EPS, 0.0, "llama", False)

    # Its RoPE overwrites the results of its norm, and the gradients that come in.
    return [Implementation(LIGER_IN_PLACE, norm_then_rope(norm, in_triton(liger_rotary_pos_emb)))]


def liger_linear_cross_entropy(reduction: str = "mean") -> list[Implementation]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction=reduction)  # in Triton, whatever is set
    # The host reads that number here too.
    return [Implementation(LIGER, lambda hidden, w, targets: loss(w, hidden, targets), waits=True)]


def sm90_linear_cross_entropy() -> list[Implementation]:
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as sm90

    # All rows at once. It refuses what is no Hopper GPU and what is not bf16.
    return [Implementation(f"{CUTE}, sm_90", sm90.liger_fused_linear_cross_entropy_sm90)]


def liger_reverse_kl() -> list[Implementation]:
    from liger_kernel.transformers import LigerJSD

    # The generalized JSD of log-probabilities. PyTorch computes these. With beta 1 it is
    # KL(student || teacher).
    jsd = in_triton(LigerJSD(beta=1.0))

    def reverse_kl(student, teacher, mask=None):
        logs = [F.log_softmax(each, -1, dtype=torch.float32) for each in (student, teacher)]
        return jsd(*logs, mask if mask is None else torch.where(mask, 0, -100))

    # It waits for grad_output.
    return [Implementation("Liger-Kernel, JSD of log_softmax", reverse_kl, waits=True)]


def cute_cross_entropy(
    name: str = CUTE_IN_PLACE, ops: str = CUTE_OPS, reduction: str = "mean"
) -> list[Implementation]:
    function = importlib.import_module(ops).LigerCrossEntropyFunction
    settings = None, -100, 0.0, 0.0, reduction

    def loss(logits, targets):
        return function.apply(logits, targets, *settings)[0]

    return [Implementation(name, loss, waits=True)]


def cute_rope(name: str = CUTE_IN_PLACE, ops: str = CUTE_OPS) -> list[Implementation]:
    return [Implementation(name, importlib.import_module(ops).LigerRopeFunction.apply)]


def trl_linear_cross_entropy() -> list[Implementation]:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as columns

    def loss(hidden, weight, targets):
        # SFTTrainer also asks for what its log shows: entropy, and whether the target is likeliest
        settings = 1.0, columns, None, 1.0, ()
        log_probs, *_ = ChunkedLogProbFunction.apply(hidden, weight, None, targets, *settings)
        return -log_probs.mean()

    return [Implementation("TRL", loss)]


def bitsandbytes_nf4() -> list[Implementation]:
    from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

    table = get_4bit_type("nf4", device=DEVICE)

    def nf4(codes, absmax_codes, absmax_scales, absmax_mean, tables, weight):
        of_absmax = {"code": tables[len(table) :], "blocksize": GROUP, "dtype": torch.float32}
        state = QuantState(
            absmax_codes,
            shape=weight.shape,
            dtype=weight.dtype,
            blocksize=BLOCK,
            code=table,
            quant_type="nf4",
            offset=absmax_mean[0],
            state2=QuantState(absmax_scales, **of_absmax),
        )
        return dequantize_4bit(codes[:, None], state, quant_type="nf4")

    return [Implementation("bitsandbytes", nf4)]


def optimizer_filled_by(make: Callable, fill: Callable) -> Callable:
    """Return what makes an optimizer whose load_state_dict is fill(its own state, the given one).

    These optimizers load no floats into codes.  A step makes their state, and is then undone.
    """

    def optimizer_of(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        (p,) = params
        before, optimizer = p.clone(), make(params)
        optimizer.step()
        p.detach().copy_(before)
        optimizer.load_state_dict = lambda given: fill(optimizer.state[p], given["state"][0])
        return optimizer

    return optimizer_of


def torchao_adamw8() -> list[Implementation]:
    from torchao.optim import AdamW8bit

    def fill(state, given):
        for key, t in given.items():
            state[key].copy_(t)

    # torch.compile makes its kernel; lr and the count of steps are on the CPU.
    make = optimizer_filled_by(functools.partial(AdamW8bit, **ADAMW), fill)
    return [Implementation("torchao, AdamW8bit", make, waits=True)]


def bitsandbytes_adamw8() -> list[Implementation]:
    from bitsandbytes.functional import quantize_blockwise
    from bitsandbytes.optim import AdamW8bit

    def fill(state, given):
        state["step"] = int(given["step"])
        for number, key in (1, "exp_avg"), (2, "exp_avg_sq"):
            code, absmax, out = (state[f"{name}{number}"] for name in ("qmap", "absmax", "state"))
            block = -(-out.numel() // absmax.numel())
            quantize_blockwise(given[key].float(), code, absmax, out, blocksize=block)

    make = optimizer_filled_by(functools.partial(AdamW8bit, **ADAMW), fill)
    return [Implementation("bitsandbytes, AdamW8bit", make, waits=True)]  # after each parameter


def flashoptim_adamw8() -> list[Implementation]:
    from flashoptim import FlashAdamW

    def fill(state, given):
        state["step"].fill_(given["step"])
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].set_data(given[key])
        if "error_bits" in state:  # the weights are as they came
            state["error_bits"].zero_()

    def make(params, bits):
        # it steps nothing else
        return FlashAdamW([p.requires_grad_() for p in params], **ADAMW, master_weight_bits=bits)

    def row(weights: str, bits: int | None) -> Implementation:
        of_bits = functools.partial(make, bits=bits)
        return Implementation(f"FlashOptim, {weights}", optimizer_filled_by(of_bits, fill))

    # 10.25 bytes, and 12.25: 8 further bits of a weight are read and written
    return [row("bf16 weights", None), row("24-bit weights", 24)]


def quack_rmsnorm() -> list[Implementation]:
    import quack

    return [Implementation("QuACK", lambda x, weight: quack.rmsnorm(x, weight, eps=EPS))]


def quack_cross_entropy() -> list[Implementation]:
    import quack

    in_place = functools.partial(quack.cross_entropy, inplace_backward=True)
    return [
        Implementation("QuACK", quack.cross_entropy),
        Implementation("QuACK, in place", in_place, backward_again=False),
    ]


def quack_linear_cross_entropy() -> list[Implementation]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    # Its chunks of 4,096 rows fail where the hidden size is 4,096 too ("m == n makes row/col
    # inference ambiguous").  Its backward multiplies what the forward kept.
    loss = functools.partial(chunked_linear_cross_entropy, chunk_size=8192)
    return [Implementation("QuACK", loss, backward_again=False)]


LIBRARIES = {  # library: (its name for pip, the module, {kernel: what makes its implementations})
    LIGER: (
        "liger-kernel",
        "liger_kernel",
        {
            "rmsnorm": liger_rmsnorm,
            "cross_entropy": liger_cross_entropy,
            "swiglu": liger_swiglu,
            "rope": liger_rope,
            "qk_norm_rope": liger_qk_norm_rope,
            "linear_cross_entropy": liger_linear_cross_entropy,
            "reverse_kl": liger_reverse_kl,
        },
    ),
    CUTE: (
        "liger-kernel[cutedsl]",
        "liger_kernel",
        {
            "rmsnorm": lambda: liger_rmsnorm(CUTE, CUTE_OPS),
            "cross_entropy": cute_cross_entropy,
            "swiglu": lambda: liger_swiglu(CUTE_IN_PLACE, CUTE_OPS),
            "rope": cute_rope,
            "linear_cross_entropy": sm90_linear_cross_entropy,
        },
    ),
    "TRL": ("trl", "trl", {"linear_cross_entropy": trl_linear_cross_entropy}),
    "QuACK": (
        "quack-kernels",
        "quack",
        {
            "rmsnorm": quack_rmsnorm,
            "cross_entropy": quack_cross_entropy,
            "linear_cross_entropy": quack_linear_cross_entropy,
        },
    ),
    "bitsandbytes": (
        "bitsandbytes",
        "bitsandbytes",
        {"nf4": bitsandbytes_nf4, "adamw8": bitsandbytes_adamw8},
    ),
    "torchao": ("torchao", "torchao", {"adamw8": torchao_adamw8}),
    "FlashOptim": ("flashoptim", "flashoptim", {"adamw8": flashoptim_adamw8}),
}


def why_absent(error: Exception, module: str, package: str) -> str:
    """Return in words why a library cannot be asked: it is not installed, or what its import
    raises.
    """
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        return f"not installed (pip install {package} to add it)"
    return f"cannot be imported ({describe(error)})"


def find_peers(kernel: str) -> tuple[list[Implementation], list[str]]:
    """Return the other libraries' implementations, and a sentence for each absent library."""
    found, absent = [], []
    for name, (package, module, makers) in LIBRARIES.items():
        if kernel not in makers:
            continue
        try:
            implementations = makers[kernel]()
        except Exception as error:  # whatever its import raises, ours can still be measured
            absent.append(f"{name}: {why_absent(error, module, package)}")
            continue
        if HAS_GPU:
            found += implementations
        else:
            absent.append(f"{name}: needs a CUDA GPU")
    if kernel == "linear_cross_entropy" and not hasattr(F, "linear_cross_entropy"):
        absent.append("F.linear_cross_entropy: this PyTorch has none (2.13 has)")
    return found, absent
