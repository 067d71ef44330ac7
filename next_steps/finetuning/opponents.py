"""What others offer for the same training: `finetune_optimized.py --opponent NAME`.

Each opponent is a row of RECIPES: how its model is made, and whether torch.compile takes it whole.
The optimizer is PyTorch's fused AdamW in all of them, the loop that of our own runs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

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
from next_steps.patches import lora

# after the harness, which decides how triton (imported by transformers) will run
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # isort: skip


def with_rms_norm(workload: Workload) -> torch.nn.Module:
    """The model with torch.nn.functional.rms_norm in place of LlamaRMSNorm's formula."""

    def rms_norm(norm: LlamaRMSNorm) -> torch.nn.RMSNorm:
        (hidden_size,) = norm.weight.shape
        made = torch.nn.RMSNorm(hidden_size, eps=norm.variance_epsilon, device="meta")
        made.weight = norm.weight
        return made

    model = lora.load(workload)
    replace_modules(model, LlamaRMSNorm, rms_norm)
    return model


def with_liger(workload: Workload) -> torch.nn.Module:
    """The model with Liger-Kernel's patch for LLaMA.

    Raises:
        UserError: it is not installed.
    """
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError as error:
        raise UserError("Liger-Kernel is not installed: pip install liger-kernel") from error
    apply_liger_kernel_to_llama()
    return lora.load(workload)


def with_float8(recipe: str, workload: Workload) -> torch.nn.Module:
    """The model with torchao's float8 in the layers' projections, each layer compiled by itself.

    Embedding and head stay in bf16, as ours do.  Without torch.compile its casts are operations of
    their own, and it would be slower than without FP8.

    Raises:
        UserError: it is not installed, or this GPU has no FP8.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError("torchao is not installed: pip install torchao") from error
    if reason := fp8_support():
        raise UserError(f"--opponent {workload.opponent}: {reason}")
    model = lora.load(workload)
    config = Float8LinearConfig.from_recipe_name(recipe)
    for layer in model.model.layers:
        convert_to_float8_training(layer, config=config)
        layer.compile()
    return model


def compiled(model: torch.nn.Module, mode: str) -> Callable:
    """What torch.compile makes of the model's call, at the first of them, which takes a minute.

    Attention is told that no row of a batch holds several sequences.  Without that transformers
    makes a mask where it is compiled, and the compiled model would be slower than it can be.
    """
    call = torch.compile(model, mode=mode)

    def begin_step(**inputs):
        # what the last step's CUDA graphs returned may be overwritten from here on
        torch.compiler.cudagraph_mark_step_begin()
        with unpacked_sequences():
            return call(**inputs)

    return begin_step


@dataclass(frozen=True)
class Recipe:
    load: Callable[[Workload], torch.nn.Module] = lora.load
    compile_mode: str | None = None  # of torch.compile; None: it is not compiled


RECIPES = {  # by the words of --opponent
    "fused-adamw": Recipe(),
    "rms-norm": Recipe(load=with_rms_norm),
    "compile": Recipe(compile_mode="default"),
    "compile-reduce-overhead": Recipe(compile_mode="reduce-overhead"),
    "liger": Recipe(load=with_liger),
    "unsloth": Recipe(load=unsloth_model.load),
    "torchao-tensorwise": Recipe(load=functools.partial(with_float8, "tensorwise")),
    "torchao-rowwise": Recipe(load=functools.partial(with_float8, "rowwise")),
}


def prepare(
    workload: Workload,
) -> tuple[torch.nn.Module, Callable, torch.optim.Optimizer]:
    """(model, what is called in its place, optimizer) of the workload's opponent.

    Raises:
        UserError: it is not installed.
    """
    recipe, capturable = RECIPES[workload.opponent], workload.cuda_graph
    model = recipe.load(workload)
    called = parallel.wrap(model, workload)
    if recipe.compile_mode:
        called = compiled(model, recipe.compile_mode)
    optimizer = stepping.make_optimizer(model, workload.lr, fused=True, capturable=capturable)
    return model, called, optimizer


def train(workload: Workload, record_to: str | None = None, save_to: str | None = None) -> dict:
    """Fine-tune as the workload's opponent does it; returns the record."""
    workload = replace(workload, kernels=())
    parallel.start(workload)
    model, called, optimizer = prepare(workload)
    run = Run(OPPONENTS[workload.opponent], workload, model, record_to, save_to)
    return take_steps(run, optimizer, called)
