"""The model as Unsloth loads and patches it: `finetune_optimized.py --opponent unsloth`.

Unsloth takes a model from a folder or the hub, and only together with a tokenizer.  So random
weights are drawn as for every other run and written to a temporary folder: 16 GB for the 8B.
Importing Unsloth changes transformers in the whole process.
"""

import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from harness.cli.adapter_config import TARGETS
from harness.cli.command_line import UserError
from harness.cli.device import HAS_GPU, free_memory
from harness.cli.workload import Workload, draws_weights
from harness.data.dataset import load_tokenizer
from harness.model.adapters import read_adapters, use_saved
from harness.model.architecture import TORCH_DTYPES
from harness.model.config_file import reading
from harness.model.loading import begin, make_model


def load(workload: Workload) -> torch.nn.Module:
    """Return a LlamaForCausalLM with Unsloth's kernels, each layer compiled, in training mode.

    With LoRA it has Unsloth's own adapters, in fp32 as Unsloth makes them, and with `quantize`
    bitsandbytes' 4-bit weights.  Without LoRA all weights are trained.
    """
    if not HAS_GPU:
        raise UserError("--opponent unsloth needs a CUDA GPU and none was found")
    config = begin(workload)
    try:
        from unsloth import FastLanguageModel
    except ImportError as error:
        raise UserError("Unsloth is not installed: pip install unsloth") from error

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
        target_modules=list(TARGETS[workload.lora_targets]),
        lora_dropout=0.0,
        bias="none",
        use_gradient_checkpointing=False,
        random_state=workload.seed,
    ).get_base_model()
    if saved is not None:
        use_saved(model, workload, saved)
    return model


def model_folder(workload: Workload, config: LlamaConfig, empty: str) -> str:
    """Return the folder of weights and tokenizer: the model's own, or `empty`, filled here."""
    tokenizer = load_tokenizer(workload)
    if tokenizer is not None and not draws_weights(workload.model, workload):
        return workload.model
    make_model(workload, config).save_pretrained(empty)
    free_memory()
    (tokenizer or placeholder(config)).save_pretrained(empty)
    return empty


def placeholder(config: LlamaConfig) -> PreTrainedTokenizerFast:
    """Make a tokenizer for Unsloth where bytes are the tokens: no text passes through it."""
    ids = {"<unknown>": 0, "<padding>": 1, "<end>": config.vocab_size - 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(ids, unk_token="<unknown>")),
        unk_token="<unknown>",
        pad_token="<padding>",
        eos_token="<end>",
    )
