"""The smallest model and what tests of the training do with it: a batch, its loss and gradients."""

import contextlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import peft
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from harness.benchmark.checking import relative_error
from harness.cli.adapter_config import LORA_TARGETS
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.flags import OF_BASELINE, FlagParser
from harness.cli.workload import Workload
from harness.data.dataset import IGNORE_INDEX, Batch
from harness.model import architecture, patching
from harness.steps import stepping
from judging.circumstances import waiting_forbidden

# of a record that no machine made
MADE_UP = {"gpu": "Made Up", "cpu": "x86_64", "date": "-", "commit": "-"}
MADE_UP |= dict.fromkeys(("torch", "triton", "transformers"), "0")
# A few hundred rows are all that Triton's interpreter gets through in a second.
TINY = ["--model", "tiny", "--dtype", "fp32", "--seq-len", "16", "--batch-size", "1"]


# The third step may be a CUDA graph.
SMALL = [*TINY, "--seq-len", "8", "--steps", "3"]


def tiny_workload(*flags: str) -> Workload:
    """The scripts' own parsing; a later flag wins over TINY's."""
    return Workload.from_flags(FlagParser("", OF_BASELINE).parse_args([*TINY, *flags]), HAS_GPU)


def small_workload(*flags: str) -> Workload:
    return tiny_workload(*SMALL, *flags)


def imported_anew(module: ModuleType) -> ModuleType:
    """A second import of the module, which meets what a test has put into other modules."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_anew", module.__file__)
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    return anew


def as_kernels_module(function: Callable) -> torch.nn.Module:
    """What Hugging Face's package `kernels` makes of a function of transformers."""

    class Func(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    return Func()


def jsonl(path: Path, *examples: tuple[str, str]) -> Path:
    lines = [
        json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in examples
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny_batch(batch_size: int = 2, seq_len: int = 12) -> Batch:
    """Random tokens, the first third of the labels masked as a prompt is."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(architecture.BYTE_VOCABULARY, (batch_size, seq_len), generator=generator)
    labels = ids.clone()
    labels[:, : seq_len // 3] = IGNORE_INDEX
    return Batch(ids, labels, ids.numel(), n_targets=batch_size * (seq_len - seq_len // 3)).to(
        DEVICE
    )


def uneven_norms(model: torch.nn.Module) -> torch.nn.Module:
    """Norm weights away from their initial 1, where a kernel that forgets them would pass."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
    return model


def in_float64(model: torch.nn.Module, norm_class: type = LlamaRMSNorm) -> torch.nn.Module:
    """Hugging Face's norm and loss compute in fp32 whatever they are given; these do not."""

    def norm(module):
        replacement = torch.nn.RMSNorm(module.weight.shape[0], module.variance_epsilon)
        replacement.weight = module.weight
        return replacement

    model = model.double()
    patching.replace_modules(model, norm_class, norm)
    model.loss_function = patching.causal_lm_loss(
        lambda logits, targets, ignore_index: torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index
        )
    )
    return model


def loss_and_gradients(
    model: torch.nn.Module, batch: Batch | None = None
) -> dict[str, torch.Tensor]:
    """The loss, and the gradient of each parameter that is trained; no other has one."""
    batch = batch or tiny_batch()
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=batch.input_ids, labels=batch.labels).loss
    loss.backward()
    wrong = [n for n, p in model.named_parameters() if (p.grad is None) == p.requires_grad]
    assert not wrong, f"a gradient is there or missing for {wrong}"
    named = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach(), **named}


def with_adapters(model: torch.nn.Module, **options) -> torch.nn.Module:
    """peft's adapters, of all projections unless told; B is not 0, and nothing else is trained."""
    options = {"r": 4, "target_modules": list(LORA_TARGETS["all"])} | options
    torch.manual_seed(2)
    config = peft.LoraConfig(init_lora_weights=False, **options)
    return peft.inject_adapter_in_model(config, model).train()


def assert_a_step_does_not_wait(model: torch.nn.Module, optimizer, batches: list[Batch]) -> None:
    """Hold that the host does not wait for the GPU in a training step."""
    for _ in range(2):  # compiling may wait
        stepping.training_step(model, optimizer, batches)
    torch.cuda.synchronize()
    packed = batches[0].position_ids is not None
    # transformers waits for the ends of sequences, which packed batches bring with them
    unpacked = contextlib.nullcontext() if packed else architecture.unpacked_sequences()
    with waiting_forbidden(), unpacked:
        stepping.training_step(model, optimizer, batches)


def change_json(file: Path, **values) -> None:
    """Replace values of a JSON object in a file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def largest_error(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """The largest relative error of any entry, and whose it is."""
    assert found.keys() == expected.keys()
    return max((relative_error(found[name], expected[name]), name) for name in expected)


REAL_TINY_CONFIG = architecture.tiny_config


def smaller_config() -> LlamaConfig:
    """tiny, but smaller, and of 12 positions."""
    config = REAL_TINY_CONFIG()
    config.hidden_size, config.intermediate_size, config.head_dim = 32, 48, 8
    config.num_hidden_layers, config.max_position_embeddings = 1, 12
    return config
