"""What processes that train one model receive from one another in a step, and how long that takes.

Predicted from two numbers that are known without a profile: the bytes, which follow from the
model's size, and the rate of each operation, measured in this run.

    all-gather        a unit's weights, of which each process holds a share, become whole
    reduce-scatter    of a unit's gradients each process gets the mean of its own share
    all-reduce        gradients that each process holds whole become their mean: both in a row

Bytes are those that a process receives: of what is whole in the end, all but its own share.
"""

import time

import torch
import torch.distributed as dist

from harness.cli.device import DEVICE, synchronize
from harness.cli.processes import DDP
from harness.cli.workload import Workload

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = OPERATIONS = "all-gather", "reduce-scatter", "all-reduce"
REDUCED = torch.float32  # gradients are added up in it, whatever the weights have; by FSDP2
WARMUP, REPEATS = 3, 10


def expected(model: torch.nn.Module, workload: Workload) -> dict:
    """What a step receives, how fast that comes in this run, and so how long it takes.

    All processes call it, before training: it needs the memory of two layers in fp32.

    Returns:
        bytes and gbs (GB/s), each by operation, and ms, one operation after the other.
    """
    received, rates = bytes_received(model, workload), measure_rates(model, workload)
    ms = sum(n_bytes / rates[name] / 1e6 for name, n_bytes in received.items())
    return {"bytes": received, "gbs": rates, "ms": ms}


def bytes_received(model: torch.nn.Module, workload: Workload) -> dict[str, int]:
    """By a process in a step, by each operation.

    A decoder layer's weights are gathered for its forward and for its backward, the others' once;
    each micro-batch does that again.  Gradients are reduced in the last one.

    Args:
        model: a LlamaForCausalLM, whole or sharded.
    """
    n = workload.world_size
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    in_layers = sum(p.numel() * p.element_size() for p in model.model.layers.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    if workload.parallel == DDP:
        received = {ALL_REDUCE: 2 * sum(p.numel() * p.element_size() for p in trained)}
    else:
        gradients = sum(p.numel() for p in trained) * REDUCED.itemsize
        gathered = (weights + in_layers) * workload.micro_batches
        received = {ALL_GATHER: gathered, REDUCE_SCATTER: gradients}
    return {name: n_bytes * (n - 1) // n for name, n_bytes in received.items()}


def measure_rates(model: torch.nn.Module, workload: Workload) -> dict[str, float]:
    """GB/s at which a process receives pieces of a decoder layer's size, by each operation."""
    n = workload.world_size
    layer = list(model.model.layers[0].parameters())
    size = sum(p.numel() for p in layer) // n * n
    rates = {}
    for name in bytes_received(model, workload):
        dtype = REDUCED if name == REDUCE_SCATTER else layer[0].dtype
        whole = torch.zeros(size, dtype=dtype, device=DEVICE)
        share = torch.zeros(size // n, dtype=dtype, device=DEVICE)
        operation, *tensors = {
            ALL_GATHER: (dist.all_gather_into_tensor, whole, share),
            REDUCE_SCATTER: (dist.reduce_scatter_tensor, share, whole),
            ALL_REDUCE: (dist.all_reduce, whole),
        }[name]
        rounds = 2 if name == ALL_REDUCE else 1
        received = rounds * whole.numel() * whole.element_size() * (n - 1) / n
        rates[name] = received / seconds_of(operation, *tensors) / 1e9
    return rates


def seconds_of(operation, *tensors: torch.Tensor) -> float:
    """The mean of a few, in a row, as a step's are."""
    for _ in range(WARMUP):
        operation(*tensors)
    synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        operation(*tensors)
    synchronize()
    return (time.perf_counter() - start) / REPEATS
