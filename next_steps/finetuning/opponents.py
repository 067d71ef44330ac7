"""What others offer for the same training: `finetune_optimized.py --opponent NAME`.

RECIPES says how each opponent's model is made.  All of them have PyTorch's fused AdamW and the loop
of our own runs.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from harness.cli.command_line import UserError
from harness.cli.flags import OPPONENTS
from harness.cli.workload import Workload
from harness.model.architecture import unpacked_sequences
from harness.model.patching import replace_modules
from harness.steps import parallel, stepping
from harness.training.training_run import Run
from next_steps.finetuning import unsloth_model
from next_steps.finetuning.kernel_training import take_steps
from next_steps.lessons.fp8_kernel import fp8_support
from next_steps.patches import patched_model


def with_rms_norm(workload: Workload) -> torch.nn.Module:
    """Return the model with torch.nn.functional.rms_norm in place of LlamaRMSNorm's formula."""

    def rms_norm(norm: LlamaRMSNorm) -> torch.nn.RMSNorm:
        (hidden_size,) = norm.weight.shape
        made = torch.nn.RMSNorm(hidden_size, eps=norm.variance_epsilon, device="meta")
        made.weight = norm.weight
        return made

    model = patched_model.load(workload)
    replace_modules(model, LlamaRMSNorm, rms_norm)
    return model


def with_liger(workload: Workload) -> torch.nn.Module:
    """Return the model with Liger-Kernel's patch for LLaMA."""
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError as error:
        raise UserError("Liger-Kernel is not installed: pip install liger-kernel") from error
    apply_liger_kernel_to_llama()
    return patched_model.load(workload)


def with_float8(recipe: str, workload: Workload) -> torch.nn.Module:
    """Return the model with torchao's float8 in the layers' projections, each layer compiled alone.

    Without torch.compile the model would be slower than without FP8.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError("torchao is not installed: pip install torchao") from error
    if reason := fp8_support():
        raise UserError(f"--opponent {workload.opponent}: {reason}")
    model = patched_model.load(workload)
    config = Float8LinearConfig.from_recipe_name(recipe)
    for layer in model.model.layers:
        convert_to_float8_training(layer, config=config)
        layer.compile()
    return model


def compiled(model: torch.nn.Module, mode: str) -> Callable:
    """Return the model's call under torch.compile; the first call compiles for a minute.

    Without `unpacked_sequences` transformers makes a mask in the compiled code, which is slower.
    """
    call = torch.compile(model, mode=mode)

    def begin_step(**inputs):
        # what the last step's CUDA graphs returned may be overwritten from here on
        torch.compiler.cudagraph_mark_step_begin()
        with unpacked_sequences():
            return call(**inputs)

    return begin_step


RECIPES = {  # by the words of --opponent: what makes the model
    "fused-adamw": patched_model.load,
    "rms-norm": with_rms_norm,
    "compile": patched_model.load,
    "compile-reduce-overhead": patched_model.load,
    "liger": with_liger,
    "unsloth": unsloth_model.load,
    "torchao-tensorwise": functools.partial(with_float8, "tensorwise"),
    "torchao-rowwise": functools.partial(with_float8, "rowwise"),
}
# of torch.compile, which takes these models whole
COMPILE_MODES = {"compile": "default", "compile-reduce-overhead": "reduce-overhead"}


def prepare(workload: Workload) -> tuple[torch.nn.Module, Callable, torch.optim.Optimizer]:
    """Return (model, what is called in its place, optimizer) of the workload's opponent."""
    name, graph = workload.opponent, workload.cuda_graph
    model = RECIPES[name](workload)
    called = parallel.wrap(model, workload)
    if name in COMPILE_MODES:
        called = compiled(model, COMPILE_MODES[name])
    optimizer = stepping.make_optimizer(model, workload.lr, fused=True, capturable=graph)
    return model, called, optimizer


def train(workload: Workload, record_to: str | None = None, save_to: str | None = None) -> dict:
    """Fine-tune as the workload's opponent does it; return the record."""
    workload = replace(workload, kernels=())
    parallel.start(workload)
    model, called, optimizer = prepare(workload)
    run = Run(OPPONENTS[workload.opponent], workload, model, record_to, save_to)
    return take_steps(run, optimizer, called)
