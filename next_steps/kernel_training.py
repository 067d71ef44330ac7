"""Fine-tuning with any of the kernels, its step as one CUDA graph if that is asked for.

    python finetune_optimized.py --kernels all --cuda-graph

The loop of finetune_baseline.py with `apply_kernels` in the place of its page's patch, AdamW as a
kernel, and a step that can be recorded; or with Liger-Kernel's patch, which ours is measured by.
"""

from dataclasses import replace

import torch

from harness import stepping
from harness.command_line import UserError
from harness.loading import load_model
from harness.training_run import Run
from harness.workload import OPPONENTS, WARMUP_STEPS, Workload
from next_steps.apply_kernels import apply_kernels, make_optimizer, model_kernels
from next_steps.memory_estimate import step_tryer


def train(workload: Workload, record_to: str | None = None, save_to: str | None = None) -> dict:
    """Fine-tune with the workload's kernels; returns the record."""
    model = load_model(workload, step_tryer(workload.kernels))
    apply_kernels(model, model_kernels(workload.kernels))
    optimizer = make_optimizer(model, workload.lr, workload.kernels, workload.stochastic_rounding)
    return take_steps(Run("Optimized", workload, model, record_to, save_to), optimizer)


def take_steps(run: Run, optimizer: torch.optim.Optimizer) -> dict:
    """All steps of a run; with cuda_graph those after the first WARMUP_STEPS as one launch each."""
    graph, take_step = run.workload.cuda_graph, stepping.training_step
    stream = torch.cuda.Stream() if graph else None  # None: as it is
    with torch.cuda.stream(stream):
        for step, batch in enumerate(run.batches(), start=1):
            if graph and step == WARMUP_STEPS + 1:
                take_step = stepping.captured_step(run.model, optimizer, batch, stream)
                run.start_clock()
            run.end_step(take_step(run.model, optimizer, batch))
    return run.finish()


def train_opponent(
    workload: Workload, record_to: str | None = None, save_to: str | None = None
) -> dict:
    """The same fine-tuning with Liger-Kernel's patch for LLaMA and PyTorch's fused AdamW."""
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError as error:
        raise UserError("Liger-Kernel is not installed: pip install liger-kernel") from error
    apply_liger_kernel_to_llama()
    workload = replace(workload, kernels=())
    model = load_model(workload)
    optimizer = stepping.make_optimizer(model, workload.lr, fused=True)
    return take_steps(
        Run(OPPONENTS[workload.opponent], workload, model, record_to, save_to), optimizer
    )
