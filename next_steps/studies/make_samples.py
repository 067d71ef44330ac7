"""A jsonl file of short samples to try packing with, made of Python's standard library.

    python -m next_steps.studies.make_samples runs/samples.jsonl
    python finetune_optimized.py --model tiny --data runs/samples.jsonl --pack

The prompt is how a function or class begins, the completion its doc string.  Each sample has 50 to
600 UTF-8 bytes, which are the tokens of `--model tiny` and of `--random-init`; a tokenizer makes
fewer of them.  One version of Python always makes the same file.
"""

import ast
import json
import re
from collections.abc import Iterator

from harness.cli import command_line
from harness.cli.output_files import require_ours, require_writable, write_output

SHORTEST, LONGEST = 50, 600  # bytes of a prompt and its completion
DOCUMENTED = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef


def examples(text: str) -> Iterator[dict[str, str]]:
    """Yield a sample for each documented function and class that is neither too short nor long."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, DOCUMENTED) or not (doc := ast.get_docstring(node)):
            continue
        node.body, node.decorator_list = [ast.Expr(ast.Constant(...))], []
        prompt = ast.unparse(node).removesuffix("...").rstrip() + "\n"
        if SHORTEST <= len((prompt + doc).encode("utf-8", errors="replace")) <= LONGEST:
            yield {"prompt": prompt, "completion": doc}


def main() -> None:
    parser = command_line.Parser(__doc__)
    parser.add_argument("file", metavar="FILE.jsonl", help="to write")
    args = parser.parse_args()
    if not args.file.endswith(".jsonl"):
        raise command_line.UserError(f"{args.file} must end in .jsonl, for --data to read it")
    require_writable(args.file)
    # after the flags: to import PyTorch takes seconds
    from harness.data.samples import stdlib_texts

    made = [example for text in stdlib_texts() for example in examples(text)]
    lines = "".join(json.dumps(example) + "\n" for example in made)
    require_ours("FILE.jsonl", args.file, "file of samples", re.escape(lines[:SHORTEST]))
    write_output(args.file, lines.encode(), "the samples")
    print(f"{args.file}: {len(made):,} samples of {SHORTEST} to {LONGEST} bytes")


if __name__ == "__main__":
    command_line.run_main(main)
