"""The smallest model and what tests of the training do with it: a batch, its loss and gradients."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from harness.benchmark.checking import DEVICE, relative_error
from harness.cli.device import HAS_GPU
from harness.cli.flags import finetune_parser
from harness.cli.workload import Workload
from harness.data.dataset import IGNORE_INDEX, Batch
from harness.model import architecture

# isort: split
# after the harness, which decides how triton (imported by transformers) will run
from transformers import LlamaConfig

# of a record that no machine made
MADE_UP = {"gpu": "Made Up", "cpu": "x86_64", "date": "-", "commit": "-"}
MADE_UP |= dict.fromkeys(("torch", "triton", "transformers"), "0")
# A few hundred rows are all that Triton's interpreter gets through in a second.
TINY = ["--model", "tiny", "--dtype", "fp32", "--seq-len", "16", "--batch-size", "1"]


def tiny_workload(*flags: str) -> Workload:
    """The scripts' own parsing; a later flag wins over TINY's."""
    return Workload.from_flags(finetune_parser("").parse_args([*TINY, *flags]), HAS_GPU)


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


def loss_and_gradients(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=batch.input_ids, labels=batch.labels).loss
    loss.backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    missing = [name for name, grad in named.items() if grad is None]
    assert not missing, f"no gradient for {missing}"
    return {"loss": loss.detach(), **named}


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
