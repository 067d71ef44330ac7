"""Whom ours is compared with besides PyTorch: Liger-Kernel, QuACK and bitsandbytes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from harness.benchmark.benchmarking import Implementation
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.tables import describe
from next_steps.comparisons.benchmark_problems import EPS
from next_steps.lessons.nf4_kernel import BLOCK, GROUP

LIGER, LIGER_IN_PLACE = "Liger-Kernel", "Liger-Kernel, in place"  # without a mode that keeps inputs


def liger_rmsnorm() -> list[Implementation]:
    from liger_kernel.ops import LigerRMSNormFunction

    def rmsnorm(x, weight):
        # not in place, where it writes dx over dy, which the timing loop uses again
        return LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)

    return [Implementation(LIGER, rmsnorm)]


def liger_cross_entropy() -> list[Implementation]:
    from liger_kernel.transformers import LigerCrossEntropyLoss

    # it reads the number of valid targets back to the host
    return [Implementation(LIGER_IN_PLACE, LigerCrossEntropyLoss(), waits=True)]


def liger_swiglu() -> list[Implementation]:
    from liger_kernel.ops import LigerSiLUMulFunction

    return [Implementation(LIGER_IN_PLACE, LigerSiLUMulFunction.apply)]


def liger_rope() -> list[Implementation]:
    from liger_kernel.transformers import liger_rotary_pos_emb

    # it overwrites q and k, and the gradients that come in
    return [Implementation(LIGER_IN_PLACE, liger_rotary_pos_emb)]


def liger_linear_cross_entropy() -> list[Implementation]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()  # it reads that number back to the host, too

    def linear_cross_entropy(hidden, weight, targets):
        return loss(weight, hidden, targets)

    return [Implementation(LIGER, linear_cross_entropy, waits=True)]


def liger_reverse_kl() -> list[Implementation]:
    from liger_kernel.transformers import LigerJSD

    # The generalized JSD of log-probabilities, which are PyTorch's; with beta 1 it is
    # KL(student || teacher).
    jsd = LigerJSD(beta=1.0)

    def reverse_kl(student, teacher):
        both = (F.log_softmax(each, -1, dtype=torch.float32) for each in (student, teacher))
        return jsd(*both)

    # it waits for grad_output
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

    def in_place(logits, targets):
        return quack.cross_entropy(logits, targets, inplace_backward=True)

    return [
        Implementation("QuACK", quack.cross_entropy),
        Implementation("QuACK, in place", in_place, backward_again=False),
    ]


@dataclass(frozen=True)
class Peer:
    """A library, and what makes its implementations of a kernel."""

    package: str  # as pip knows it
    module: str
    kernels: dict[str, Callable[[], list[Implementation]]]


PEERS = {
    "Liger-Kernel": Peer(
        "liger-kernel",
        "liger_kernel",
        {
            "rmsnorm": liger_rmsnorm,
            "cross_entropy": liger_cross_entropy,
            "swiglu": liger_swiglu,
            "rope": liger_rope,
            "linear_cross_entropy": liger_linear_cross_entropy,
            "reverse_kl": liger_reverse_kl,
        },
    ),
    "QuACK": Peer(
        "quack-kernels",
        "quack",
        {"rmsnorm": quack_rmsnorm, "cross_entropy": quack_cross_entropy},
    ),
    "bitsandbytes": Peer("bitsandbytes", "bitsandbytes", {"nf4": bitsandbytes_nf4}),
}


def find_peers(kernel: str) -> tuple[list[Implementation], list[str]]:
    """(the other libraries' implementations, a sentence for each library that is absent)."""
    found, absent = [], []
    for name, peer in PEERS.items():
        if kernel not in peer.kernels:
            continue
        try:
            implementations = peer.kernels[kernel]()
        except Exception as error:  # whatever its import raises, ours can still be measured
            if isinstance(error, ModuleNotFoundError) and error.name == peer.module:
                absent.append(f"{name}: not installed (pip install {peer.package} to add it)")
            else:
                absent.append(f"{name}: cannot be imported ({describe(error)})")
            continue
        if HAS_GPU:
            found += implementations
        else:
            absent.append(f"{name}: needs a CUDA GPU")
    if kernel == "linear_cross_entropy" and not hasattr(F, "linear_cross_entropy"):
        absent.append("F.linear_cross_entropy: this PyTorch has none (2.13 has)")
    return found, absent
