"""One training step: plain, timed, and as a CUDA graph."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from harness.architecture import unpacked_sequences
from harness.command_line import RunError, UserError, ran_out_of_memory
from harness.dataset import Batch
from harness.device import synchronize
from harness.tables import describe


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def make_optimizer(model: torch.nn.Module, lr: float, **options) -> torch.optim.Optimizer:
    """AdamW as PyTorch gives it, by default without further options."""
    return torch.optim.AdamW(trained(model), lr=lr, **options)


def inputs_of(batch: Batch, model: Callable) -> dict:
    """What the model is called with for a batch; one that asks for it is told the targets' number.

    So it need not wait for the GPU to count them.
    """
    counted = {"max_targets": batch.n_targets} if getattr(model, "takes_max_targets", False) else {}
    return batch.inputs() | counted


def training_step(model: Callable, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    """One optimizer step; returns the loss as a scalar on the device, without waiting for it.

    `model` is a Hugging Face model, or what is called as one.

    The same step as on finetune_baseline.py's page, in ranges that give the profiler its phases;
    outside a profile they cost nothing worth measuring.
    """
    with torch.profiler.record_function("forward"):
        loss = model(**inputs_of(batch, model)).loss
    with torch.profiler.record_function("backward"):
        loss.backward()
    with torch.profiler.record_function("optimizer"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def timed_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    take_step: Callable = training_step,
) -> tuple[torch.Tensor, float]:
    """(loss, seconds) of one step, from an idle device to an idle device.

    Args:
        take_step: `training_step`, or the replay that `captured_step` makes of it.
    """
    synchronize()
    start = time.perf_counter()
    loss = take_step(model, optimizer, batch)
    synchronize()
    return loss, time.perf_counter() - start


def captured_step(
    model: Callable,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    stream: torch.cuda.Stream,
) -> Callable:
    """`training_step` recorded as one CUDA graph, and replayed: thousands of launches become one.

    A graph repeats kernels with the addresses and numbers that it has seen.  So each batch is
    copied to where the recorded one was, all batches must have its shape, and the optimizer must
    count its steps on the GPU.  Steps must have been taken before, on the same stream: kernels are
    compiled and optimizer states made outside of a graph.

    Returns:
        A function to be called as `training_step` is.

    Raises:
        RunError: the step cannot be recorded: something in it waits for the GPU.
        UserError: a batch has another shape than the recorded one.
    """
    ids, labels = batch.input_ids.clone(), batch.labels.clone()
    # the batches to come may have more targets than this one: each token may be one
    recorded = replace(batch, input_ids=ids, labels=labels, n_targets=labels.numel())
    # a graph has memory of its own and cannot use what the steps before it left
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    try:
        with unpacked_sequences(), torch.cuda.graph(graph, stream=stream):
            loss = training_step(model, optimizer, recorded)
    except RuntimeError as error:
        first = error.__context__ or error  # what fails in a recording makes its end fail too
        if not isinstance(first, RuntimeError) or ran_out_of_memory(first):
            raise first from None
        raise RunError(
            f"this step cannot be recorded as a CUDA graph ({describe(first)}): "
            "leave --cuda-graph out"
        ) from error

    def replay(model, optimizer, batch):
        if batch.input_ids.shape != ids.shape:
            raise UserError(
                f"a batch has the shape {tuple(batch.input_ids.shape)}, but the CUDA graph was "
                f"recorded with {tuple(ids.shape)}; --cuda-graph needs batches of one shape"
            )
        ids.copy_(batch.input_ids)
        labels.copy_(batch.labels)
        graph.replay()
        return loss

    return replay
