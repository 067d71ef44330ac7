"""The models that others offer for the same training, as opponents.py trains them.

RECIPES says how each opponent's model is made.  Their optimizer is PyTorch's fused AdamW, but for
`flash_adamw`.  All of them have the loop of our own runs.
"""

import importlib
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from harness.cli.adapter_config import projections
from harness.cli.command_line import UserError
from harness.cli.device import HAS_GPU, free_memory
from harness.cli.flags import OPPONENTS
from harness.cli.workload import Workload, draws_weights
from harness.data.dataset import load_tokenizer, look_at_data
from harness.model.adapters import read_adapters, use_saved
from harness.model.architecture import TORCH_DTYPES, unpacked_sequences
from harness.model.config_file import load_config, reading
from harness.model.families import family_of
from harness.model.loading import begin, make_model
from harness.model.patching import replace_modules
from harness.steps import parallel, stepping
from harness.training.training_run import Run
from next_steps.finetuning.kernel_training import take_all_steps
from next_steps.lessons.fp8_kernel import fp8_support
from next_steps.patches import patched_model


def opponent_module(module: str, title: str, package: str) -> ModuleType:
    """Return an opponent's module, or raise the UserError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{title} is not installed: pip install {package}") from error


def require_gpu(workload: Workload) -> None:
    """Refuse an opponent that needs a GPU where there is none."""
    if not HAS_GPU:
        raise UserError(f"--opponent {workload.opponent} needs a CUDA GPU and none was found")


def with_rms_norm(workload: Workload) -> torch.nn.Module:
    """Return the model with torch.nn.functional.rms_norm in place of transformers' formula."""

    def rms_norm(norm: torch.nn.Module) -> torch.nn.RMSNorm:
        (hidden_size,) = norm.weight.shape
        made = torch.nn.RMSNorm(hidden_size, eps=norm.variance_epsilon, device="meta")
        made.weight = norm.weight
        return made

    model = patched_model.load_with_adapters(workload)
    replace_modules(model, family_of(model).part("RMSNorm"), rms_norm)
    return model


def with_liger(workload: Workload) -> torch.nn.Module:
    """Return the model with Liger-Kernel's patch for the model's family."""
    monkey_patch = opponent_module(
        "liger_kernel.transformers.monkey_patch", "Liger-Kernel", "liger-kernel"
    )
    kind = load_config(workload).model_type
    getattr(monkey_patch, f"apply_liger_kernel_to_{kind}")()
    return patched_model.load_with_adapters(workload)


def with_flash_adamw(workload: Workload) -> torch.nn.Module:
    """Return the model with the workload's kernels, if it has any, for `flash_adamw`."""
    require_gpu(workload)
    opponent_module("flashoptim", "FlashOptim", "flashoptim")
    return patched_model.load_patched(workload)


def flash_adamw(model: torch.nn.Module, workload: Workload) -> torch.optim.Optimizer:
    """Return FlashOptim's AdamW: moments in 8 bits, and 8 further bits for each bf16 weight.

    It steps in the backward as ours does, but cannot if gradients are added up or averaged before.
    """
    from flashoptim import FlashAdamW, enable_gradient_release

    params = stepping.trained(model)
    in_fp32 = all(p.dtype == torch.float32 for p in params)  # there it refuses to add bits
    optimizer = FlashAdamW(params, lr=workload.lr, master_weight_bits=None if in_fp32 else 24)
    if workload.micro_batches == 1 and workload.world_size is None:
        enable_gradient_release(model, optimizer)
        # step() and zero_grad() of our loop do nothing then, and would say so
        warnings.filterwarnings("ignore", ".*is a no-op while enable_gradient_release")
    return optimizer


def with_float8(workload: Workload) -> torch.nn.Module:
    """Return the model with torchao's float8 in the layers' projections, each layer compiled alone.

    Without torch.compile the model would be slower than without FP8.  With LoRA the frozen
    projections are in float8, and the adapters beside them stay as they are.
    """
    float8 = opponent_module("torchao.float8", "torchao", "torchao")
    if reason := fp8_support():
        raise UserError(f"--opponent {workload.opponent}: {reason}")
    model = patched_model.load_with_adapters(workload)
    config = float8.Float8LinearConfig.from_recipe_name(workload.opponent.removeprefix("torchao-"))
    no_adapter = {"module_filter_fn": lambda module, name: "lora_" not in name}
    for layer in model.model.layers:
        float8.convert_to_float8_training(layer, config=config, **no_adapter)
        layer.compile()
    return model


def with_unsloth(workload: Workload) -> torch.nn.Module:
    """Return the model with Unsloth's kernels, each layer compiled, in training mode.

    Importing Unsloth changes transformers in the whole process.  With LoRA the model has Unsloth's
    own adapters, in fp32 as Unsloth makes them, and with `quantize` bitsandbytes' 4-bit weights.
    Without LoRA all weights are trained.  As unsloth-fp8 torchao quantizes the frozen weights; the
    forward multiplies in FP8, the backward in bf16.  Unsloth leaves a copy of these weights in the
    directory for temporary files.
    """
    require_gpu(workload)
    config = begin(workload)
    FastLanguageModel = opponent_module("unsloth", "Unsloth", "unsloth").FastLanguageModel

    is_lora, saved = workload.lora_rank is not None, None
    if workload.adapter is not None:
        saved = read_adapters(workload, config)  # a wrong one is refused before minutes of loading
    with tempfile.TemporaryDirectory() as folder, reading(f"{workload.model}, by Unsloth,"):
        source = model_folder(workload, config, folder)
        model, _ = FastLanguageModel.from_pretrained(
            source,
            max_seq_length=workload.seq_len,
            dtype=TORCH_DTYPES[workload.dtype],
            load_in_4bit=workload.quantize is not None,
            load_in_fp8=workload.opponent == "unsloth-fp8",
            full_finetuning=not is_lora,
            use_gradient_checkpointing=False,
            use_exact_model_name=True,  # else it may take a copy of its own from the hub
            local_files_only=Path(source).is_dir(),
        )
    if not is_lora:
        return model
    model = FastLanguageModel.get_peft_model(
        model,
        r=workload.lora_rank,
        lora_alpha=workload.lora_alpha,
        target_modules=list(projections(workload.lora_targets)),
        lora_dropout=0.0,
        bias="none",
        use_gradient_checkpointing=False,
        random_state=workload.seed,
    ).get_base_model()
    if saved is not None:
        use_saved(model, workload, saved)
    return model


def model_folder(workload: Workload, config: PreTrainedConfig, empty: str) -> str:
    """Return the folder of weights and tokenizer: the model's own, or `empty`, filled here.

    Unsloth takes a model from a folder or the hub, and only together with a tokenizer.  So random
    weights are drawn as for every other run and written: 16 GB for the 8B.
    """
    tokenizer = load_tokenizer(workload)
    if tokenizer is not None and not draws_weights(workload.model, workload):
        return workload.model
    make_model(workload, config).save_pretrained(empty)
    free_memory()
    (tokenizer or placeholder(config)).save_pretrained(empty)
    return empty


def placeholder(config: PreTrainedConfig) -> PreTrainedTokenizerFast:
    """Make a tokenizer for Unsloth where bytes are the tokens: no text passes through it."""
    ids = {"<unknown>": 0, "<padding>": 1, "<end>": config.vocab_size - 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(ids, unk_token="<unknown>")),
        unk_token="<unknown>",
        pad_token="<padding>",
        eos_token="<end>",
    )


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
    "fused-adamw": patched_model.load_with_adapters,
    "flashoptim": with_flash_adamw,
    "rms-norm": with_rms_norm,
    "compile": patched_model.load_with_adapters,
    "compile-reduce-overhead": patched_model.load_with_adapters,
    "liger": with_liger,
    "unsloth": with_unsloth,
    "unsloth-fp8": with_unsloth,
    "torchao-tensorwise": with_float8,
    "torchao-rowwise": with_float8,
}
# of torch.compile, which takes these models whole
COMPILE_MODES = {"compile": "default", "compile-reduce-overhead": "reduce-overhead"}


def prepare_opponent(workload: Workload) -> tuple[torch.nn.Module, Callable, torch.optim.Optimizer]:
    """Return (model, what is called in its place, optimizer) of the workload's opponent."""
    name, graph = workload.opponent, workload.cuda_graph
    model = RECIPES[name](workload)
    called = parallel.wrap(model, workload)
    if name in COMPILE_MODES:
        called = compiled(model, COMPILE_MODES[name])
    if name == "flashoptim":
        return model, called, flash_adamw(model, workload)
    optimizer = stepping.make_optimizer(model, workload.lr, fused=True, capturable=graph)
    return model, called, optimizer


def train_opponent(
    workload: Workload, record_to: str | None = None, save_to: str | None = None
) -> dict:
    """Fine-tune as the workload's opponent does it; return the record."""
    workload = replace(workload, kernels=())
    parallel.start(workload)
    look_at_data(workload)
    model, called, optimizer = prepare_opponent(workload)
    run = Run(OPPONENTS[workload.opponent], workload, model, record_to, save_to)
    return take_all_steps(run, optimizer, called)
