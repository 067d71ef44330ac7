"""How many bytes a process receives from the others in a step, and how long that takes.

The prediction needs no profile.  The bytes follow from the model's size, and the rate of each
operation is measured in this run.

    all-gather        a unit's weights become whole; each process held a share of them
    reduce-scatter    each process gets the mean of its own share of a unit's gradients
    all-reduce        gradients that each process holds whole become their mean: both in a row

Bytes are what a process receives: all of the whole result but its own share.
"""

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist

from harness.cli.device import DEVICE
from harness.cli.processes import DDP, KEPT
from harness.cli.workload import Workload
from harness.steps.stepping import trained
from harness.steps.timing import queued_time_us

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = OPERATIONS = "all-gather", "reduce-scatter", "all-reduce"
REDUCED = torch.float32  # FSDP2 adds gradients up in it, whatever the weights' dtype


def expected(model: torch.nn.Module, workload: Workload) -> dict:
    """Return `bytes` and `gbs` (GB/s) of each operation, and `ms` for all of them in a row.

    All processes must call it before training: it needs the memory of two layers in fp32.
    """
    received, rates = bytes_received(model, workload), measure_rates(model, workload)
    ms = sum(n_bytes / rates[name] / 1e6 for name, n_bytes in received.items())
    return {"bytes": received, "gbs": rates, "ms": ms}


def bytes_received(model: torch.nn.Module, workload: Workload) -> dict[str, int]:
    """Return the bytes that a process receives in a step, by operation.

    A decoder layer's weights are gathered for the forward and, if not kept, for the backward, all
    other weights once.  Each micro-batch gathers again.  The last one reduces the gradients.
    """
    n = workload.world_size
    if workload.parallel == DDP:
        received = {ALL_REDUCE: 2 * bytes_of(trained(model))}
    else:
        gradients = sum(p.numel() for p in trained(model)) * REDUCED.itemsize
        again = [] if workload.parallel == KEPT else model.model.layers.parameters()
        gathered = (bytes_of(model.parameters()) + bytes_of(again)) * workload.micro_batches
        received = {ALL_GATHER: gathered, REDUCE_SCATTER: gradients}
    return {name: n_bytes * (n - 1) // n for name, n_bytes in received.items()}


def bytes_of(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return the parameters' bytes; of shards, all processes' together."""
    return sum(p.nbytes for p in parameters)


def measure_rates(model: torch.nn.Module, workload: Workload) -> dict[str, float]:
    """Measure the GB/s at which a process receives pieces of a decoder layer's size."""
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
        received = rounds * whole.nbytes * (n - 1) / n
        rates[name] = received / queued_time_us(partial(operation, *tensors), calls=10) / 1e3
    return rates
