"""Fine-tuning with any of the kernels or none, and with steps that the pages do not show.

    python finetune_optimized.py --kernels all --cuda-graph    # a step is one CUDA graph
    python finetune_baseline.py --accumulate 4                 # a step is several micro-batches
    torchrun --nproc-per-node 2 finetune_baseline.py           # several processes share a step

The loop is finetune_baseline.py's.  `load_patched` stands in the place of a page's patch, AdamW is
a kernel if it is among them, and the step is that of harness/steps/stepping.py.
"""

from collections.abc import Callable

import torch

from harness.cli.flags import WARMUP_STEPS
from harness.cli.workload import Workload
from harness.data.dataset import look_at_data
from harness.steps import parallel, stepping
from harness.training import resuming
from harness.training.resuming import Checkpoints
from harness.training.training_run import Run
from next_steps.finetuning import checkpoint
from next_steps.memory import parallel_choice
from next_steps.memory.memory_estimate import try_kernels
from next_steps.patches.apply_kernels import make_kernel_optimizer
from next_steps.patches.patched_model import load_patched
from next_steps.patches.projections import layers_in_fp8

NO_CHECKPOINTS = Checkpoints()


def train_with_kernels(
    workload: Workload,
    record_to: str | None = None,
    save_to: str | None = None,
    name: str = "Optimized",
    checkpoints: Checkpoints = NO_CHECKPOINTS,
) -> dict:
    """Fine-tune with the workload's kernels; return the record, which gives the run this name."""
    workload = parallel_choice.start_processes(workload)
    with checkpoints.folder_locked():
        resumes = checkpoints.resume is not None
        path, before = (
            resuming.read_checkpoint(checkpoints.resume, workload) if resumes else (None, None)
        )
        look_at_data(workload, before and before["day"])
        model, called, optimizer = prepare_kernels(workload)
        if checkpoints.is_asked:
            checkpoint.refuse_random_numbers(model)
        if before:
            checkpoint.load_checkpoint(model, optimizer, path, before)
        more = layers_in_fp8(model, workload)
        run = Run(name, workload, model, record_to, save_to, more, resumed=before)
        if before:
            checkpoint.check_data(run, before)
        return take_all_steps(run, optimizer, called, checkpoints)


def prepare_kernels(workload: Workload) -> tuple[torch.nn.Module, Callable, torch.optim.Optimizer]:
    """Return (model, what is called in its place, optimizer) with the workload's kernels."""
    try_kernels(workload)
    model = load_patched(workload)
    called = parallel.wrap(model, workload)
    # The run validates later, which leaves units of FSDP gathered: their parameters are others.
    return model, called, optimizer_for(model, workload)


def optimizer_for(model: torch.nn.Module, workload: Workload) -> torch.optim.Optimizer:
    """Return the workload's AdamW; for a CUDA graph it counts its steps on the GPU."""
    how = workload.kernels, workload.stochastic_rounding, workload.moments
    return make_kernel_optimizer(model, workload.lr, *how, capturable=workload.cuda_graph)


def take_all_steps(
    run: Run,
    optimizer: torch.optim.Optimizer,
    model: Callable | None = None,
    checkpoints: Checkpoints = NO_CHECKPOINTS,
) -> dict:
    """Take all steps of a run; with cuda_graph each after the first WARMUP_STEPS is one launch.

    `model` is called in the place of the run's: compiled, or what `parallel.wrap` made of it.
    """
    model = run.model if model is None else model
    graph, take_step = run.workload.cuda_graph, stepping.training_step
    stream = torch.cuda.Stream() if graph else None  # None: the current stream
    with checkpoint.Keeper(run, optimizer, checkpoints) as keeper:
        with torch.cuda.stream(stream):
            for step, batches in enumerate(run.steps(), start=1):
                if graph and step == WARMUP_STEPS + 1:
                    take_step = stepping.captured_step(model, optimizer, batches, stream)
                    run.start_clock()
                run.end_step(take_step(model, optimizer, batches))
                keeper.end_step()
        return run.finish()
