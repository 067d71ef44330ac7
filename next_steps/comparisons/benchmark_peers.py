"""The other libraries that ours is compared with: Liger-Kernel, QuACK and bitsandbytes.

Each function imports its library and returns the library's implementations of one kernel.
"""

import functools

import torch
import torch.nn.functional as F

from harness.benchmark.benchmarking import Implementation
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.tables import describe
from next_steps.comparisons.benchmark_problems import EPS
from next_steps.lessons.nf4_kernel import BLOCK, GROUP

LIGER = "Liger-Kernel"
LIGER_IN_PLACE = f"{LIGER}, in place"  # where it has no mode that keeps its inputs


def liger_rmsnorm() -> list[Implementation]:
    from liger_kernel.ops import LigerRMSNormFunction

    # Not in place. In place it writes dx over dy, which the timing loop uses again.
    settings = EPS, 0.0, "llama", False
    return [Implementation(LIGER, lambda x, w: LigerRMSNormFunction.apply(x, w, *settings))]


def liger_cross_entropy() -> list[Implementation]:
    from liger_kernel.transformers import LigerCrossEntropyLoss

    # The host reads the number of valid targets.
    return [Implementation(LIGER_IN_PLACE, LigerCrossEntropyLoss(), waits=True)]


def liger_swiglu() -> list[Implementation]:
    from liger_kernel.ops import LigerSiLUMulFunction

    return [Implementation(LIGER_IN_PLACE, LigerSiLUMulFunction.apply)]


def liger_rope() -> list[Implementation]:
    from liger_kernel.transformers import liger_rotary_pos_emb

    # It overwrites q, k and the gradients of its outputs.
    return [Implementation(LIGER_IN_PLACE, liger_rotary_pos_emb)]


def liger_linear_cross_entropy() -> list[Implementation]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()  # the host reads that number here too
    return [Implementation(LIGER, lambda hidden, w, targets: loss(w, hidden, targets), waits=True)]


def liger_reverse_kl() -> list[Implementation]:
    from liger_kernel.transformers import LigerJSD

    # The generalized JSD of log-probabilities. PyTorch computes these. With beta 1 it is
    # KL(student || teacher).
    jsd = LigerJSD(beta=1.0)

    def reverse_kl(*logits):
        return jsd(*(F.log_softmax(each, -1, dtype=torch.float32) for each in logits))

    # It waits for grad_output.
    return [Implementation("Liger-Kernel, JSD of log_softmax", reverse_kl, waits=True)]


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


PACKAGES = {  # library: (its name for pip, the module)
    "Liger-Kernel": ("liger-kernel", "liger_kernel"),
    "QuACK": ("quack-kernels", "quack"),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
}
PEERS = {  # kernel: {library: what makes its implementations}
    "rmsnorm": {LIGER: liger_rmsnorm, "QuACK": quack_rmsnorm},
    "cross_entropy": {LIGER: liger_cross_entropy, "QuACK": quack_cross_entropy},
    "swiglu": {LIGER: liger_swiglu},
    "rope": {LIGER: liger_rope},
    "linear_cross_entropy": {LIGER: liger_linear_cross_entropy},
    "reverse_kl": {LIGER: liger_reverse_kl},
    "nf4": {"bitsandbytes": bitsandbytes_nf4},
}


def find_peers(kernel: str) -> tuple[list[Implementation], list[str]]:
    """Return the other libraries' implementations, and a sentence for each absent library."""
    found, absent = [], []
    for name, make in PEERS.get(kernel, {}).items():
        package, module = PACKAGES[name]
        try:
            implementations = make()
        except Exception as error:  # whatever its import raises, ours can still be measured
            reason = f"cannot be imported ({describe(error)})"
            if isinstance(error, ModuleNotFoundError) and error.name == module:
                reason = f"not installed (pip install {package} to add it)"
            absent.append(f"{name}: {reason}")
            continue
        if HAS_GPU:
            found += implementations
        else:
            absent.append(f"{name}: needs a CUDA GPU")
    if kernel == "linear_cross_entropy" and not hasattr(F, "linear_cross_entropy"):
        absent.append("F.linear_cross_entropy: this PyTorch has none (2.13 has)")
    return found, absent
