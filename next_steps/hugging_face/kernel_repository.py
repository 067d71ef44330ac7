"""Make a repository for Hugging Face's package `kernels` from the lessons' own files.

    python -m next_steps.hugging_face.kernel_repository FOLDER

FOLDER then holds README.md, which is the model card, and a folder for each backend:

    build/torch-cuda/__init__.py        `layers`, where `kernels` looks for them
                     kernel_layers.py   the layers, and beside it each file that it needs
                     metadata.json      name, version, id, and a digest of each file

A file is the tutorial's, with two changes.  Imports of the tutorial's modules become relative.  An
operator that torch.compile sees has a name that is used once in a process: its namespace becomes
the id.  The id has a digest of all files, so two versions and the tutorial itself can be loaded
beside each other.  The same sources make the same folder.
"""

import ast
import base64
import hashlib
import json
import re
from pathlib import Path

from harness.cli import command_line
from harness.cli.command_line import UserError, positive_int
from harness.cli.output_files import require_writable

HERE = Path(__file__).parents[2]  # the tutorial's folder
REPOSITORY_NAME = "finetuning-kernels"
LAYERS = "next_steps.hugging_face.kernel_layers"
BACKENDS = "cpu", "cuda", "rocm"  # on a CPU Triton's interpreter runs the kernels
NAMESPACE = "tutorial::"  # of the tutorial's operators
INIT = '''"""{title}"""

from . import kernel_layers as layers

__all__ = ["layers"]
'''
TITLE = "RMSNorm, SwiGLU, rotary embedding and cross-entropy in Triton, for training."
CARD = """---
library_name: kernels
license: {license}
---

# {name}

{title}

```python
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping

repository = {{"repo_id": "OWNER/{name}", "version": {version}, "trust_remote_code": True}}
mapping = {{
    name: {{"cuda": LayerRepository(layer_name=name, **repository)}}
    for name in ("RMSNorm", "rotary_pos_emb")
}}
with use_kernel_mapping(mapping, inherit_mapping=False):
    kernelize(model, mode=Mode.TRAINING)  # or Mode.TRAINING | Mode.TORCH_COMPILE, or Mode.INFERENCE
```

The layers are {layers}.
Each has a backward, works inside of torch.compile, and takes fp16, bf16 and fp32.
`RMSNorm` is y = weight * x / rms(x): do not use it for a norm that multiplies by 1 + weight.
"""


def path_of(module: str) -> Path:
    return HERE.joinpath(*module.split(".")).with_suffix(".py")


def imported(tree: ast.AST) -> set[str]:
    """Return the tutorial's modules that a file imports, also inside of functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {module for module in found if path_of(module).is_file()}


def needed_modules() -> list[str]:
    """Return the layers' module and all of the tutorial's modules that it needs."""
    found, new = set(), {LAYERS}
    while new:
        found |= new
        trees = (ast.parse(path_of(module).read_text()) for module in new)
        new = set().union(*map(imported, trees)) - found
    return sorted(found)


def with_relative_imports(text: str, modules: list[str]) -> str:
    """Return a file's text, in which the modules are imported from the folder of the file.

    Raises:
        ValueError: an import of a module of the tutorial is left.
    """
    for module in modules:
        parent, _, name = module.rpartition(".")
        changes = [(f"import {module}", f"from . import {name}")]
        changes += [(f"from {module} import", f"from .{name} import")]
        changes += [(f"from {parent} import {name}", f"from . import {name}")] * bool(parent)
        for old, new in changes:
            text = re.sub(rf"^( *){re.escape(old)}\b", rf"\1{new}", text, flags=re.MULTILINE)
    if left := imported(ast.parse(text)):
        raise ValueError(f"{', '.join(sorted(left))}: expected one import a line, write it so.")
    return text


def package_files(backend: str, version: int, license_id: str) -> dict[str, str]:
    """Return the text of each file of a backend's folder, by its name."""
    modules, files = needed_modules(), {}
    for module in modules:
        text = path_of(module).read_text()
        files[path_of(module).name] = with_relative_imports(text, modules)
    if len(files) != len(modules):
        raise ValueError("two modules have one file name, expected a name each: rename one.")
    files["__init__.py"] = INIT.format(title=TITLE)
    sources = json.dumps([version, backend, sorted(files.items())])
    identity = f"_{REPOSITORY_NAME.replace('-', '_')}_{backend}_{sha256(sources).hex()[:12]}"
    files = {name: text.replace(f'"{NAMESPACE}', f'"{identity}::') for name, text in files.items()}
    digests = {name: base64.b64encode(sha256(files[name])).decode() for name in sorted(files)}
    metadata = {
        "name": REPOSITORY_NAME,
        "id": identity,
        "version": version,
        "license": license_id,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return files | {"metadata.json": json.dumps(metadata, indent=2) + "\n"}


def sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def layer_names() -> list[str]:
    """Return the names of the layers, without importing PyTorch."""
    assigned = (n for n in ast.parse(path_of(LAYERS).read_text()).body if isinstance(n, ast.Assign))
    return next(ast.literal_eval(n.value) for n in assigned if n.targets[0].id == "__all__")


def make_repository(folder: Path, version: int = 1, license_id: str = "unknown") -> None:
    """Write the repository into an empty or new folder.

    Raises:
        UserError: the folder holds something, or the license would be more than a field's value.
    """
    if not re.fullmatch(r"[\w.+-]+", license_id):
        raise UserError(f"--license {license_id!r} is no identifier, expected one as apache-2.0")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty: name a new folder")
    for backend in BACKENDS:
        variant = folder.resolve() / "build" / f"torch-{backend}"
        variant.mkdir(parents=True)
        for name, text in package_files(backend, version, license_id).items():
            (variant / name).write_text(text)
    names = ", ".join(f"`{name}`" for name in layer_names())
    words = {"name": REPOSITORY_NAME, "title": TITLE, "version": version, "license": license_id}
    (folder / "README.md").write_text(CARD.format(**words, layers=names))


def main() -> None:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="an empty or new folder")
    add("--version", type=positive_int, default=1, help="of what the layers promise")
    add("--license", default="unknown", help="an identifier of Hugging Face's list")
    args = parser.parse_args()
    require_writable(str(args.folder), is_folder=True)
    make_repository(args.folder, args.version, args.license)
    print(f"{args.folder}: {REPOSITORY_NAME}, version {args.version}, for {', '.join(BACKENDS)}")


if __name__ == "__main__":
    command_line.run_main(main)
