"""Fine-tuning with any of the kernels or none, its step taken in other ways than the pages'.

    python finetune_optimized.py --kernels all --cuda-graph    # as one CUDA graph
    python finetune_baseline.py --accumulate 4                 # of several micro-batches
    torchrun --nproc-per-node 2 finetune_baseline.py           # by several processes

The loop of finetune_baseline.py with `apply_kernels` in the place of a page's patch, AdamW as a
kernel if it is among them, and the step of harness/steps/stepping.py.
"""

from collections.abc import Callable

import torch

from harness.cli.flags import WARMUP_STEPS
from harness.cli.workload import Workload
from harness.steps import parallel, stepping
from harness.training import resuming
from harness.training.resuming import Checkpoints
from harness.training.training_run import Run
from next_steps.finetuning import checkpoint
from next_steps.memory.memory_estimate import step_tryer
from next_steps.patches import lora
from next_steps.patches.apply_kernels import make_optimizer
from next_steps.patches.fp8_model import layers_in_fp8
from next_steps.patches.patch import patch

NO_CHECKPOINTS = Checkpoints()


def train(
    workload: Workload,
    record_to: str | None = None,
    save_to: str | None = None,
    name: str = "Optimized",
    checkpoints: Checkpoints = NO_CHECKPOINTS,
) -> dict:
    """Fine-tune with the workload's kernels; returns the record, in which the run has this name."""
    parallel.start(workload)
    with checkpoints.claimed():
        path = before = None
        if checkpoints.resume is not None:
            path, before = resuming.read(checkpoints.resume, workload)
        model, called, optimizer = prepare(workload)
        if checkpoints.is_asked:
            checkpoint.refuse_random_numbers(model)
        if before:
            checkpoint.load(model, optimizer, path, before)
        more = layers_in_fp8(model, workload)
        run = Run(name, workload, model, record_to, save_to, more, resumed=before)
        if before:
            checkpoint.check_data(run, before)
        return take_steps(run, optimizer, called, checkpoints)


def prepare(
    workload: Workload,
) -> tuple[torch.nn.Module, Callable, torch.optim.Optimizer]:
    """(model, what is called in its place, optimizer) with the workload's kernels."""
    model = patch(lora.load(workload, step_tryer(workload.kernels)), workload)
    called = parallel.wrap(model, workload)
    # before the run validates, which leaves units of FSDP gathered: their parameters are others
    return model, called, optimizer_for(model, workload)


def optimizer_for(model: torch.nn.Module, workload: Workload) -> torch.optim.Optimizer:
    """The workload's AdamW, which counts its steps on the GPU if they are to be a CUDA graph."""
    rounding, graph = workload.stochastic_rounding, workload.cuda_graph
    return make_optimizer(model, workload.lr, workload.kernels, rounding, capturable=graph)


def take_steps(
    run: Run,
    optimizer: torch.optim.Optimizer,
    model: Callable | None = None,
    checkpoints: Checkpoints = NO_CHECKPOINTS,
) -> dict:
    """All steps of a run; with cuda_graph those after the first WARMUP_STEPS as one launch each.

    Args:
        model: what is called in the place of the run's model: its compiled form, or what
            `parallel.wrap` made of it.
        checkpoints: to be written meanwhile.
    """
    model = run.model if model is None else model
    graph, take_step = run.workload.cuda_graph, stepping.training_step
    stream = torch.cuda.Stream() if graph else None  # None: as it is
    with checkpoint.Keeper(run, optimizer, checkpoints) as keeper:
        with torch.cuda.stream(stream):
            for step, batches in enumerate(run.steps(), start=1):
                if graph and step == WARMUP_STEPS + 1:
                    take_step = stepping.captured_step(model, optimizer, batches, stream)
                    run.start_clock()
                run.end_step(take_step(model, optimizer, batches))
                keeper.end_step()
        return run.finish()
