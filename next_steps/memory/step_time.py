"""How long will a training step take?  Its work, counted before a run, over what this GPU can do.

The step runs on meta tensors (meta_step.py), and each operation's work is written down.  What is
computed twice counts twice, because it runs twice.  There are four sums, each with a rate that is
measured in the same run:

    FLOPs of matrix products                  the rate of a large one
    FLOPs of attention                        attention's at this length, forward and backward
    bytes that all other operations move      90 % of a copy's rate: what a good kernel reaches
    bytes that are offloaded                  the rate of the host's link, at the same time

The host's time is not counted; a GPU waits for the host where a step has few tokens.  Eager norms
and PyTorch's AdamW do not reach 90 % of a copy's rate, so the baseline takes somewhat longer.
"""

from dataclasses import replace

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.workload import Workload
from harness.model.architecture import TORCH_DTYPES, ModelFacts
from harness.profiling import costs
from harness.profiling.diagnose import TARGET
from harness.steps import timing
from next_steps.memory.memory_ledger import Ledger, is_transfer
from next_steps.memory.meta_step import run_step
from next_steps.patches import offload

LINK_BYTES = 2**28 if HAS_GPU else 2**20


class Work(Ledger):
    """A ledger that also counts what the operations of the last step do."""

    def __init__(self, sizes: costs.Sizes):
        self.sizes = sizes
        super().__init__()

    def begin_step(self) -> None:
        super().begin_step()
        self.product_flops = 0.0
        self.attention_flops = {"forward": 0.0, "backward": 0.0}
        self.moved = {"optimizer": 0.0, "other": 0.0}  # bytes
        self.link_bytes = 0  # between the GPU and the host
        self.launches.clear()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = super().__torch_dispatch__(operation, types, args, kwargs)
        name = operation.overloadpacket.__name__
        kind = name.removesuffix("_")
        if kind in costs.MATMULS:
            first = args[costs.MATMULS[kind]]
            self.product_flops += 2.0 * results.numel() * first.shape[-1]
        elif "attention" in name:
            way = "backward" if "backward" in name else "forward"
            query, key = args[:2] if way == "forward" else args[1:3]  # after the gradient
            products = costs.ATTENTION_PRODUCTS[way]
            self.attention_flops[way] += products * 2.0 * query.numel() * key.shape[-2] / 2
        elif is_transfer(operation, args):
            self.link_bytes += results.numel() * results.element_size()
        else:
            part = "optimizer" if self.stage[0] == "optimizer" else "other"
            self.moved[part] += bytes_moved(operation, args, kwargs or {}, results)
        return results

    def bytes_of_kernels(self) -> dict[str, float]:
        """Return the bytes that our kernels move, by kernel_facts.py."""
        moved = {"optimizer": 0.0, "other": 0.0}
        for name, launches in self.launches.items():
            cost = costs.cost_of_kernel(name, launches, self.sizes)
            if cost is not None:
                moved["optimizer" if "adamw" in name else "other"] += launches * cost.n_bytes
        return moved


def bytes_moved(operation, args, kwargs, results) -> int:
    """Return what an operation reads and writes if it is no product; nothing for a view."""
    name = operation.overloadpacket.__name__
    if name.startswith(("empty", "new_empty")) or name in ("detach", "set_"):
        return 0
    given, made = tensors_in((args, kwargs)), tensors_in(results)
    if name.endswith(("_", "out")):  # in place: a list's results are not returned
        made = made or tensors_in(args[:1])
    elif {t.untyped_storage()._cdata for t in made} & {t.untyped_storage()._cdata for t in given}:
        return 0
    if name == "embedding":
        given = made  # the rows that are looked up
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in (*given, *made))


def tensors_in(tree) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def count_work(config: PreTrainedConfig, workload: Workload) -> Work:
    """Return the work of one step of one micro-batch."""
    one = replace(workload, accumulate=None)
    return run_step(config, one, Work(costs.sizes_of(ModelFacts(config, one))))


def link_rate() -> float:
    """Return GB/s from pinned memory to the GPU."""
    host = offload.pinned(LINK_BYTES)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=DEVICE)
    return LINK_BYTES / timing.time_us(lambda: offload.transfer(there, host)).p50 / 1e3


def attention_rates(config: PreTrainedConfig, workload: Workload) -> dict[str, float]:
    """Return TFLOP/s of causal attention at the workload's size, forward and backward."""
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    shapes = [
        (workload.batch_size, n, workload.seq_len, ModelFacts(config).head_size) for n in heads
    ]
    options = {"dtype": TORCH_DTYPES[workload.dtype], "device": DEVICE, "requires_grad": True}
    q, k, v = (torch.randn(shape, **options) for shape in shapes)

    calls = {
        "forward": lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        "backward": lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True),
    }
    out = calls["forward"]()
    gradient, rates = torch.randn_like(out), {}
    for name, call in calls.items():
        flops = costs.ATTENTION_PRODUCTS[name] * q.numel() * workload.seq_len
        rates[name] = flops / timing.time_us(call).p50 / 1e6
    return rates


def predict_ms(work: Work, rates: dict, micro_batches: int = 1) -> float:
    """Return the milliseconds of a step, from one micro-batch's work.

    The rates are matmul_tflops, copy_gbs, link_gbs, and attention_tflops, forward and backward.
    """
    ours, copy = work.bytes_of_kernels(), TARGET * rates["copy_gbs"] * 1e6  # bytes per ms
    ms = work.product_flops / rates["matmul_tflops"] / 1e9
    for way, flops in work.attention_flops.items():
        ms += flops / rates["attention_tflops"][way] / 1e9
    ms += (work.moved["other"] + ours["other"]) / copy
    if work.link_bytes:
        ms = max(ms, work.link_bytes / rates["link_gbs"] / 1e6)
    added = 3 * work.sizes.weights / copy  # the gradients so far, and a micro-batch's
    optimizer = (work.moved["optimizer"] + ours["optimizer"]) / copy
    return micro_batches * ms + (micro_batches - 1) * added + optimizer
