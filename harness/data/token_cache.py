"""Tokens are made once and kept: in $XDG_CACHE_HOME/kernel-dev-ft, or ~/.cache/kernel-dev-ft.

There is one file for each data and tokenizer name.  The file says what it was made of: a sum over
the texts, a sum over the tokenizer with its special tokens and its chat template, and the day, if
the template writes the day.  Where one differs, the texts are tokenized again.  Whole samples are
kept, so another length of sequences needs no new file.  UTF-8 bytes are not kept: the texts are
read as fast.

The file is NumPy's .npz, a zip of arrays.  To load it runs no code.  The file also says a digest of
its arrays, so a file of other arrays is damaged.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from harness.cli.output_files import write_whole
from harness.data.samples import Encoder, Samples, digest

FORMAT = 4  # to be counted up where samples are made in another way
DIFFERENT = {"data": "other data", "format": "another version"}  # in words


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
    writes_day = "strftime_now" in str(tokenizer.chat_template)
    made_of = {
        "data": text_digest(*texts),
        "tokenizer": text_digest(*described(encode)),
        "day": str(encode.day) if writes_day else None,
        "format": FORMAT,
    }
    if (samples := load(file, made_of)) is not None:
        return samples
    samples, content = tokenize(), io.BytesIO()
    arrays = asdict(samples)
    np.savez(content, made_of=json.dumps(made_of | {"arrays": digest(*arrays.values())}), **arrays)
    try:
        write_whole(str(file), content.getvalue())
    except OSError as error:
        print(f"The tokens are not kept: cannot write {file}: {error.strerror}")
    return samples


def load(file: Path, made_of: dict) -> Samples | None:
    """Return the samples in a file; None if it is missing, damaged or made of something else."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            said = dict(json.loads(str(stored["made_of"])))
            arrays = {each.name: stored[each.name] for each in fields(Samples)}
        if said["format"] == FORMAT and said["arrays"] != digest(*arrays.values()):
            raise ValueError("these are not the arrays that were written")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        print(f"{file} cannot be read: {error.strerror}: tokenizing again")
        return None
    except Exception:  # whatever zip and NumPy make of damaged bytes
        print(f"{file} is damaged: tokenizing again")
        return None
    for key, value in made_of.items():
        if said.get(key) != value:
            print(f"{file} is of {DIFFERENT.get(key, f'another {key}')}: tokenizing again")
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
    """Return all that decides which tokens a text becomes, except the day."""
    tokenizer = encode.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)  # slow ones have none
    vocabulary = backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))
    special = tokenizer.special_tokens_map, tokenizer.split_special_tokens
    more = map(str, (tokenizer.chat_template, special, encode.begin, encode.end))
    return [type(tokenizer).__name__, vocabulary, *more]
