"""Several processes that train one model, each on its own GPU and with its own sequences.

    start(workload)                  # the processes find one another
    called = wrap(model, workload)   # call this in the model's place
    gather(number)                   # return that number of each process

`ddp` keeps the whole model in each process, `fsdp` and `fsdp-kept` a share of every parameter.  All
average gradients over the processes (docs/several_gpus.md).  In one process nothing here happens.
"""

import contextlib
import datetime
import itertools
import os
import sys
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness.cli.command_line import PICK_A_GPU, UserError
from harness.cli.device import DEVICE, HAS_GPU, list_gpus
from harness.cli.processes import DDP, KEPT, is_first, world_size
from harness.cli.workload import Workload

# a process that waits longer for the others gives up; loading a large model may take minutes
TIMEOUT = datetime.timedelta(minutes=10)


def start(workload: Workload) -> None:
    """Find the other processes, take this one's GPU, and let only the first process print."""
    if workload.parallel is None:
        return
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if HAS_GPU:
        here, n_gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if here >= n_gpus:
            given = f"torchrun started more processes than this machine has GPUs, {n_gpus}"
            raise UserError(f"{given}: --nproc-per-node {n_gpus}")
        n_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
        kinds = dict.fromkeys(gpu.name for gpu in list_gpus()[:n_here])
        if len(kinds) > 1:
            given = f"the processes would run on GPUs of different kinds ({', '.join(kinds)})"
            raise UserError(f"{given}, and wait for the slowest: show them one kind. {PICK_A_GPU}")
        torch.cuda.set_device(here)
    if torch.distributed.is_initialized():
        return
    if can_copy():
        os.environ.setdefault("NCCL_CTA_POLICY", "2")  # zero multiprocessors
    try:
        torch.distributed.init_process_group("nccl" if HAS_GPU else "gloo", timeout=TIMEOUT)
    except ValueError as error:  # a variable is missing
        given = f"WORLD_SIZE is {world_size()} and the processes cannot find one another ({error})"
        raise UserError(f"{given}: start the script with torchrun, or unset it") from error


def wrap(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
    """Return what is called in the model's place: it averages the gradients over the processes.

    FSDP2 makes the model's parameters DTensors, of which each process holds a share.  So apply all
    patches before, make the optimizer afterwards, and before the model is called: a validation
    leaves some parameters gathered.
    """
    if workload.parallel == DDP:
        # A gradient lies in the bucket that is sent, and nowhere else.  Buffers, among them
        # quantized weights, are the same in all processes and need not be sent in each forward.
        options = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
        settle(model := DistributedDataParallel(model, **options))
    elif workload.parallel is not None:
        shard(model, keep=workload.parallel == KEPT)
    return model


def shard(model: torch.nn.Module, keep: bool = False) -> None:
    """Shard a model by FSDP2: each unit is gathered when it is about to run.

    A unit is a decoder layer; with `keep` it stays gathered until its backward.  So does one more,
    norm and head, whose backward follows at once.  The rest, the embedding, belongs to the root.
    """
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=not keep, **options)
    # a head that is also the embedding can be in one unit only, the root
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    for module in model.modules() if can_copy() else ():
        getattr(module, "set_symm_mem_for_comm", bool)()  # of a unit


def can_copy() -> bool:
    """Return True if NCCL and PyTorch (2.13) can gather by this host's copy engines alone."""
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    gpus = itertools.permutations(range(world_size()), 2)
    reach = itertools.starmap(torch.cuda.can_device_access_peer, gpus)
    return alone and HAS_GPU and hasattr(FSDPModule, "set_symm_mem_for_comm") and all(reach)


def settle(model: DistributedDataParallel) -> None:
    """Let DDP group its gradients as after a first step, by a backward that counts for nothing.

    In the first step DDP sends all gradients together, later in buckets, by when they are ready.
    Where a gradient lies decides how its parts are added, and a run that goes on has a later step's
    bits.  NCCL may hold the first bucket when the others are made: here there are no moments yet.
    """
    ids = torch.zeros((1, 16), dtype=torch.int64, device=DEVICE)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()


@contextlib.contextmanager
def unreduced(model: torch.nn.Module) -> Iterator[None]:
    """Let backwards add gradients up in each process; the next backward outside averages them."""
    if hasattr(model, "no_sync"):  # DDP
        with model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        yield


def mean_over_processes(count: torch.Tensor) -> torch.Tensor:
    """Return the mean of a count () int64 over the processes, () float32; in one process itself.

    If each process divides its sum of losses by this mean number of targets, then the mean of the
    quotients is the mean loss over the targets of all processes.  The same holds for the gradients.
    """
    if world_size() == 1:
        return count
    torch.distributed.all_reduce(count)
    return count / world_size()


def gather(*numbers: float) -> list[tuple[float, ...]]:
    """Return these numbers of every process, in the order of the ranks."""
    if world_size() == 1:
        return [numbers]
    own = torch.tensor(numbers, dtype=torch.float64, device=DEVICE)
    all_of_them = [torch.empty_like(own) for _ in range(world_size())]
    torch.distributed.all_gather(all_of_them, own)
    return [tuple(each.tolist()) for each in all_of_them]


def whole_weights(model: torch.nn.Module, trained_alone: bool = False) -> dict | None:
    """Return a sharded model's whole state_dict in the first process's memory; None if not sharded.

    All processes must call it.  A parameter with two names is there once, under the first.
    """
    if world_size() == 1 or not isinstance(model, FSDPModule):
        return None
    # takes a second to import
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_alone
    )
    weights = get_model_state_dict(model, options=options)
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    # each gathered on its own, head and embedding would no longer be known as one parameter
    again = named - {name for name, _ in model.named_parameters()}
    return {name: weight for name, weight in weights.items() if name not in again}
