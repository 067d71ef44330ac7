"""One training step, of one micro-batch or several: plain, timed, and as a CUDA graph."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from harness.cli import processes
from harness.cli.command_line import RunError, UserError, ran_out_of_memory
from harness.cli.device import synchronize
from harness.cli.tables import describe
from harness.data.dataset import Batch
from harness.model.architecture import unpacked_sequences
from harness.steps import parallel


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def make_optimizer(model: torch.nn.Module, lr: float, **options) -> torch.optim.Optimizer:
    """Return PyTorch's AdamW, by default without further options."""
    return torch.optim.AdamW(trained(model), lr=lr, **options)


def in_steps(batches: list[Batch], micro_batches: int) -> list[list[Batch]]:
    """Split the micro-batches of all steps into those of each step."""
    return [batches[i : i + micro_batches] for i in range(0, len(batches), micro_batches)]


def inputs_of(batch: Batch, model: Callable) -> dict:
    """Return a model's arguments; with `takes_max_targets` the number of targets is one."""
    inner = getattr(model, "module", model)  # of DistributedDataParallel
    counted = {"max_targets": batch.n_targets} if getattr(inner, "takes_max_targets", False) else {}
    return batch.inputs() | counted


def count_targets(batches: list[Batch]) -> torch.Tensor:
    """Return the number of targets of a step, () int64; of several processes their mean number."""
    count = sum(batch.n_targets for batch in batches)
    # filled on the device: a copy from the host would wait for the device
    on_device = torch.full((), count, dtype=torch.int64, device=batches[0].input_ids.device)
    return parallel.mean_over_processes(on_device)


def training_step(
    model: Callable,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    n_targets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Take one optimizer step; return the loss as a scalar on the device, without waiting for it.

    With several micro-batches the gradients add up, and the loss is the mean over the targets of
    all: each adds its sum of losses, divided by the number of all targets.  With several processes
    the targets of all processes count, and the loss is the mean of what the processes return.  The
    ranges give the profiler its phases.

    Args:
        optimizer: one that steps during the backward has a context `accumulating()`, in which it
            does not step.  The context is around all micro-batches but the last.
        n_targets: the result of `count_targets`, if it is already on the device.
    """
    *earlier, last = batches
    shared = {}
    if earlier or processes.world_size() > 1:
        shared["num_items_in_batch"] = count_targets(batches) if n_targets is None else n_targets

    def add_gradients(batch: Batch) -> torch.Tensor:
        with torch.profiler.record_function("forward"):
            loss = model(**inputs_of(batch, model), **shared).loss
        with torch.profiler.record_function("backward"):
            loss.backward()
        return loss.detach()

    accumulating = getattr(optimizer, "accumulating", contextlib.nullcontext)
    inner = getattr(model, "module", model)  # of DDP
    keeping = getattr(inner, "between_micro_batches", None) if earlier else None
    with keeping() if keeping else contextlib.nullcontext():
        with accumulating(), parallel.unreduced(model):
            # added one by one: a compiled model writes over the loss that it returned before
            loss_before = sum(add_gradients(batch) for batch in earlier)
        loss = add_gradients(last)
    with torch.profiler.record_function("optimizer"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss_before + loss if earlier else loss


def timed_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    take_step: Callable = training_step,
) -> tuple[torch.Tensor, float]:
    """Take one step; return the loss and the seconds from an idle device to an idle device."""
    with torch.profiler.record_function("step"):
        synchronize()
        start = time.perf_counter()
        loss = take_step(model, optimizer, batches)
        synchronize()
        return loss, time.perf_counter() - start


def captured_step(
    model: Callable,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    stream: torch.cuda.Stream,
) -> Callable:
    """Record `training_step` as one CUDA graph; return a function that replays it, called like it.

    A graph repeats kernels with the recorded addresses and numbers.  So each micro-batch is copied
    to where the recorded one was, all steps must have the recorded shapes, and the number of
    targets and the optimizer's count of steps lie on the GPU. Take steps before, on the same
    stream: kernels are compiled and optimizer states are made outside of a graph.
    """
    clones = [batch.with_tensors(torch.clone) for batch in batches]
    # later batches may have more targets: each token may be one
    recorded = [replace(clone, n_targets=clone.labels.numel()) for clone in clones]
    n_targets = count_targets(batches) if len(batches) > 1 else None
    # a graph has memory of its own and cannot use what earlier steps left
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    try:
        with unpacked_sequences(), torch.cuda.graph(graph, stream=stream):
            loss = training_step(model, optimizer, recorded, n_targets)
    except RuntimeError as error:
        first = error.__context__ or error  # what fails in a recording makes its end fail too
        if not isinstance(first, RuntimeError) or ran_out_of_memory(first):
            raise first from None
        raise RunError(
            f"this step cannot be recorded as a CUDA graph ({describe(first)}): "
            "leave --cuda-graph out"
        ) from error

    def replay(model, optimizer, batches):
        for batch, clone in zip(batches, clones):
            tensors = clone.tensors()
            for name, tensor in batch.tensors().items():
                if tensor.shape != tensors[name].shape:
                    raise UserError(
                        f"a batch has the shape {tuple(tensor.shape)}, but the CUDA graph was "
                        f"recorded with {tuple(tensors[name].shape)}; --cuda-graph needs batches "
                        "of one shape"
                    )
                tensors[name].copy_(tensor)
        if n_targets is not None:
            n_targets.fill_(sum(batch.n_targets for batch in batches))
        graph.replay()
        return loss

    return replay
