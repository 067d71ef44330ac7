"""The code of transformers that the kernels were written against, by digest.

Who computes in the place of a forward or a function of transformers asks `is_known_text` first.
The digest is of the syntax tree without docstrings: another layout of the same code has the same.
When a new version has another text: read what changed, follow it where a kernel stands for it, then
add its digest here.
"""

import ast
import functools
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable

import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

from harness.model.families import source_of

# what transformers calls the keys and values of earlier tokens: "cache" since 5.24
CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"

# How the name of a function, or of a forward's class, ends: the digests in 5.17.0 to 5.24.0.
TEXTS = {
    "RMSNorm": ["7739c173"],
    "MLP": ["36e5d77f"],
    "SiLUActivation": ["e773a66a"],
    "LlamaAttention": ["b8543ba7", "1bfee5d0"],  # where there are two, the second is 5.24's
    "MistralAttention": ["b8c9f233", "a7176c50"],
    "Qwen2Attention": ["440eca55", "9d77b796"],
    "Qwen3Attention": ["618ef8f7", "62bb5c1e"],
    "SmolLM3Attention": ["0a375bf3", "716243cc"],
    "apply_rotary_pos_emb": ["3e5ce2af"],
    "rotate_half": ["20c8050f"],
    "DecoderLayer": ["e044e2a5", "ad01e594"],
    "ForCausalLM": ["db9f141a", "1a4e12da", "d3b145f8", "6f8f6e4a"],  # since 5.17, 21, 23, 24
    "ForCausalLMLoss": ["353d6866"],
    "fixed_cross_entropy": ["391f434a"],
}


def source_digest(function: Callable) -> str:
    """Return eight hexadecimal digits of what the function's source says, decorators included."""
    tree = ast.parse(textwrap.dedent(source_of(inspect.unwrap(function))))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            del node.body[0]
    # Python 3.13 leaves out empty lists
    text = re.sub(r"\w+=\[\]|, ", "", ast.dump(tree))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@functools.cache
def is_known_text(function: Callable) -> bool:
    """Return False, and say so once, if transformers' code is none that the kernels know.

    Other packages' code is not judged: exact_modules.py finds what somebody replaced.
    """
    if not function.__module__.startswith("transformers."):
        return True
    name = function.__qualname__.removesuffix(".forward")
    known = [text for end, texts in TEXTS.items() if name.endswith(end) for text in texts]
    if source_digest(function) in known:
        return True
    version = f"transformers {transformers.__version__}"
    print(f"{version} has a {name} that the kernels were not written for: it keeps its own code.")
    return False
