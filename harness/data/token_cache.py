"""Tokens are made once and kept: in $XDG_CACHE_HOME/kernel-dev-ft, or ~/.cache/kernel-dev-ft.

There is one file for each data and tokenizer name.  What it says that it was made of decides
whether it still serves: a sum over the texts, and one over the tokenizer with its special tokens,
its chat template, and the day, if the template writes that.  The length of sequences is not part of
it: whole samples are kept.  UTF-8 bytes are not kept, they
are read as fast.

The file is NumPy's .npz, a zip of arrays with a checksum each; loading it runs nothing.
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
from harness.data.samples import Encoder, Samples

FORMAT = 3  # to be counted up where samples are made in another way


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kernel-dev-ft"


def cached(
    data: str, texts: list[str], encode: Encoder, tokenize: Callable[[], Samples]
) -> Samples:
    """What tokenize() returns, from the file if that is of these texts and this tokenizer.

    Why a file that is there is not used, or cannot be written, is printed in a line.
    """
    if encode.tokenizer is None:
        return tokenize()
    source = data if data == "stdlib" else os.path.realpath(data)
    name = digest(source, encode.tokenizer.name_or_path)[:16]
    file = folder() / f"{Path(data).stem}-{name}.npz"
    made_of = {
        "data": digest(*texts),
        "tokenizer": digest(*described(encode)),
        "day": day_written(encode),
        "format": FORMAT,
    }
    if (samples := load(file, made_of)) is not None:
        return samples
    samples = tokenize()
    content = io.BytesIO()
    np.savez(content, made_of=json.dumps(made_of), **asdict(samples))
    try:
        write_whole(str(file), content.getvalue())
    except OSError as error:
        print(f"The tokens are not kept: cannot write {file}: {error.strerror}")
    return samples


def load(file: Path, made_of: dict) -> Samples | None:
    """None where there is no such file, it is damaged or made of something else."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            said = dict(json.loads(str(stored["made_of"])))
            samples = Samples(**{each.name: stored[each.name] for each in fields(Samples)})
        if not fit(samples):
            raise ValueError("the arrays do not fit each other")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        print(f"{file} cannot be read: {error.strerror}: tokenizing again")
        return None
    except Exception:  # whatever zip and NumPy make of damaged bytes
        print(f"{file} is damaged: tokenizing again")
        return None
    differing = [key for key, value in made_of.items() if said.get(key) != value]
    if differing:
        what = {"data": "other data", "format": "another version"}
        which = what.get(differing[0], f"another {differing[0]}")
        print(f"{file} is of {which}: tokenizing again")
        return None
    return samples


def fit(samples: Samples) -> bool:
    """Return True if there is a sample and each lies within the tokens."""
    by_token = samples.tokens, samples.trained
    by_sample = samples.starts, samples.ends, samples.lines
    return (
        [each.dtype.kind for each in (*by_token, *by_sample)] == list("ibiii")
        and all(each.shape == (samples.tokens.size,) for each in by_token)
        and all(each.shape == (samples.ends.size,) for each in by_sample)
        and samples.ends.size > 0
        and bool((samples.starts >= 0).all() and (samples.starts <= samples.ends).all())
        and bool((samples.ends <= samples.tokens.size).all())
        and bool((samples.tokens >= 0).all())
    )


def digest(*texts: str) -> str:
    """SHA-256 of the texts and where they end."""
    total = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", errors="surrogatepass")
        total.update(f"{len(content)}:".encode() + content)
    return total.hexdigest()


def described(encode: Encoder) -> list[str]:
    """All that decides which tokens a text becomes, but for the day."""
    tokenizer = encode.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)  # slow ones have none
    vocabulary = backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))
    special = tokenizer.special_tokens_map, tokenizer.split_special_tokens
    more = map(str, (tokenizer.chat_template, special, encode.begin, encode.end))
    return [type(tokenizer).__name__, vocabulary, *more]


def day_written(encode: Encoder) -> str | None:
    """The day that the tokenizer's chat template writes into a conversation, if it writes one."""
    return str(encode.day) if "strftime_now" in str(encode.tokenizer.chat_template) else None
