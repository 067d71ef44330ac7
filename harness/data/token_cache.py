"""Tokens are made once and kept: in $XDG_CACHE_HOME/kernel-dev-ft, or ~/.cache/kernel-dev-ft.

There is one file for each data and tokenizer name.  The file says what it was made of: a sum over
the texts, the tokenizer with its special tokens and its chat template, and the day, if the template
writes the day.  Where the sum differs, the texts are tokenized again.  Whole samples are kept, so
another length of sequences needs no new file.  UTF-8 bytes are not kept: the texts are read as
fast.

The file is NumPy's .npz, a zip of arrays with their checksums.  To load it runs no code.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from harness.cli.command_line import RunError
from harness.cli.output_files import write_output
from harness.data.samples import Encoder, Samples

FORMAT = 5  # to be counted up where samples are made in another way


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kernel-dev-ft"


def cached(
    data: str, texts: list[str], encode: Encoder, tokenize: Callable[[], Samples]
) -> Samples:
    """Return what tokenize() returns, from the file if that is of these texts and this tokenizer.

    A line says why a file that is there is not used, or why none can be written.
    """
    tokenizer = encode.tokenizer
    if tokenizer is None:
        return tokenize()
    source = data if data == "stdlib" else os.path.realpath(data)
    file = folder() / f"{Path(data).stem}-{text_digest(source, tokenizer.name_or_path)[:16]}.npz"
    made_of = text_digest(str(FORMAT), *texts, *described(encode))
    if (samples := load_cached(file, made_of)) is not None:
        return samples
    samples, content = tokenize(), io.BytesIO()
    np.savez(content, made_of=made_of, **asdict(samples))
    try:
        write_output(str(file), content.getvalue(), "the tokens")
    except RunError as error:
        print(error)
    return samples


def load_cached(file: Path, made_of: str) -> Samples | None:
    """Return the samples in a file; None if it is missing, damaged or made of something else."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            said = str(stored["made_of"])
            arrays = {each.name: stored[each.name] for each in fields(Samples)}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # whatever zip and NumPy make of damaged bytes
        why = getattr(error, "strerror", None) or "damaged"
        print(f"{file} cannot be read: {why}: tokenizing again")
        return None
    if said != made_of:
        print(f"{file} is of other texts or another tokenizer: tokenizing again")
        return None
    return Samples(**arrays)


def text_digest(*texts: str) -> str:
    """Return the SHA-256 of the texts and of their lengths."""
    total = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", errors="surrogatepass")
        total.update(f"{len(content)}:".encode() + content)
    return total.hexdigest()


def described(encode: Encoder) -> list[str]:
    """Return all that decides which tokens a text becomes; the day, if the template writes it."""
    tokenizer = encode.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)  # slow ones have none
    vocabulary = backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))
    special = tokenizer.special_tokens_map, tokenizer.split_special_tokens
    day = encode.day if "strftime_now" in str(tokenizer.chat_template) else None
    more = map(str, (tokenizer.chat_template, special, encode.begin, encode.end, day))
    return [type(tokenizer).__name__, vocabulary, *more]
