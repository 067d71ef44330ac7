"""Samples to train on: read from files, tokenized, and laid end to end."""

import hashlib
import json
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from harness.cli.command_line import UserError
from harness.cli.workload import read_file
from harness.data import chat
from harness.model.architecture import BYTE_VOCABULARY, IGNORE_INDEX


@dataclass(frozen=True)
class Samples:
    """Token ids of n samples in one array, and which of them are trained on."""

    tokens: np.ndarray  # (N,) int32
    trained: np.ndarray  # (N,) bool
    starts: np.ndarray  # (n,) int64, where in `tokens` each sample begins
    ends: np.ndarray  # (n,) int64, where in `tokens` each sample ends
    lines: np.ndarray  # (n,) int64, each sample's line in its file, from 1, or its text

    @classmethod
    def of(cls, encoded: Iterable[tuple[int, np.ndarray, np.ndarray]]) -> "Samples":
        """Make samples of (line, token ids, which of them are trained on); at least one."""
        lines, ids, trained = zip(*encoded)
        lengths = np.array([len(each) for each in ids], dtype=np.int64)
        ends = np.cumsum(lengths)
        return cls(
            tokens=np.concatenate(ids).astype(np.int32),
            trained=np.concatenate(trained).astype(bool),
            starts=ends - lengths,
            ends=ends,
            lines=np.array(lines, dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (input_ids, labels), int64; the labels are not shifted."""
        part = slice(self.starts[i], self.ends[i])
        ids = torch.from_numpy(self.tokens[part].astype(np.int64))
        return ids, ids.masked_fill(torch.from_numpy(~self.trained[part]), IGNORE_INDEX)

    def digest(self) -> str:
        """Return a digest that is the same for equal samples alone; their lines do not count."""
        found = hashlib.blake2b(digest_size=16)
        for array in (self.tokens, self.trained, self.starts, self.ends):
            found.update(np.ascontiguousarray(array))
        return found.hexdigest()

    @property
    def lengths(self) -> np.ndarray:
        return self.ends - self.starts

    def select(self, which: np.ndarray | slice) -> "Samples":
        kept = {name: getattr(self, name)[which] for name in ("starts", "ends", "lines")}
        return replace(self, **kept)

    def split(self, n: int) -> tuple["Samples", "Samples"]:
        """Return the first n samples and the others."""
        return self.select(slice(n)), self.select(slice(n, None))

    def n_targets(self) -> np.ndarray:
        """Return (n,): how many of each sample's tokens after the first are trained on."""
        before = np.concatenate([[0], np.cumsum(self.trained)])
        return before[self.ends] - before[np.minimum(self.starts + 1, self.ends)]

    def alone(self) -> "Samples":
        """Return the same samples, with their own tokens and no others."""
        return Samples.of(
            (line, self.tokens[start:end], self.trained[start:end])
            for line, start, end in zip(self.lines, self.starts, self.ends)
        )

    def in_pieces(self, length: int) -> "Samples":
        """Return pieces of at most so many tokens; a piece of a single token is left out."""
        pieces = [
            (start, min(start + length, end), line)
            for first, end, line in zip(self.starts, self.ends, self.lines)
            for start in range(first, end - 1, length)
        ]
        starts, ends, lines = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
        return replace(self, starts=starts, ends=ends, lines=lines)


# ---------------------------------------------------------------- files


def stdlib_texts() -> list[str]:
    """Return the source of Python's standard library, a text per file that is in no package."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [path.read_text(encoding="utf-8", errors="replace") for path in files]


def read_texts(data: str) -> tuple[list[str], list[str]]:
    """Return (training texts, held-out texts): the second is a tenth of the files or the text."""
    if data == "stdlib":
        texts = stdlib_texts()
        return [t for i, t in enumerate(texts) if i % 10], texts[::10]
    text = read_file(data)
    cut = len(text) * 9 // 10
    return [text[:cut]], [text[cut:]]


# ---------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Encoder:
    """Text -> token ids (n,) int32, without special tokens."""

    tokenizer: PreTrainedTokenizerBase | None  # None: UTF-8 bytes are the tokens
    end: list[int]  # the ids that end a text
    begin: tuple[int, ...] = ()  # what the tokenizer itself puts before a text
    day: date = date.min  # what a chat template takes for today

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase | None,
        config: PreTrainedConfig,
        day: date = date.min,
    ) -> "Encoder":
        if tokenizer is None:
            return cls(None, [256] if config.vocab_size == BYTE_VOCABULARY else [])
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer("a")["input_ids"]
        begin = (whole[:i] for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return cls(tokenizer, end, tuple(next(begin, ())), day)

    def __call__(self, text: str) -> np.ndarray:
        if self.tokenizer is None:
            return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(ids, dtype=np.int32)

    def in_words(self) -> str:
        if self.tokenizer is None:
            return "UTF-8 bytes"
        name, begin = type(self.tokenizer).__name__, self.tokenizer.decode(self.begin)
        return f"{name}, each text or prompt begins with {begin}" if begin else name

    def with_begin(self, text: str) -> np.ndarray:
        """Return a text's ids after `begin`, which the text may hold itself."""
        ids, begin = self(text), np.array(self.begin, dtype=np.int32)
        return ids if np.array_equal(ids[: len(begin)], begin) else np.append(begin, ids)

    def whole(self, text: str) -> np.ndarray:
        """Return a text's ids between `begin` and `end`, which the text may hold itself."""
        ids, end = self.with_begin(text), np.array(self.end, dtype=np.int32)
        n_own = len(ids) - len(self.begin)  # `begin` and `end` may be the same token
        has_end = 0 < len(end) <= n_own and np.array_equal(ids[-len(end) :], end)
        return ids if has_end else np.append(ids, end)


def tokenize_texts(texts: list[str], encode: Encoder) -> Samples:
    """Return each text with its begin and end, all trained on; `lines` says which text it is."""
    encoded = map(encode.whole, texts)
    return Samples.of((i, ids, ids >= 0) for i, ids in enumerate(encoded))


def tokenize_jsonl(path: str, text: str, encode: Encoder) -> Samples:
    """Return the examples of a jsonl file, whose prompts are not trained on.

    A line is {"prompt": ..., "completion": ...} or {"messages": [...]}: see `chat`.

    Raises:
        UserError: a line is malformed.
    """
    return Samples.of(
        (number, *encode_line(f"{path}, line {number}", line, encode))
        # not splitlines(): it also cuts at characters that a JSON string may hold, such as U+2028
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    )


def encode_line(where: str, line: str, encode: Encoder) -> tuple[np.ndarray, np.ndarray]:
    """Return (token ids, which of them are trained on) of one example."""
    try:
        example = json.loads(line)
        # JSON can spell half of a surrogate pair, which is no text
        json.dumps(example, ensure_ascii=False).encode("utf-8")
        is_chat = isinstance(example, dict) and "messages" in example
        if not is_chat:
            prompt, completion = example["prompt"], example["completion"]
            if not (isinstance(prompt, str) and isinstance(completion, str)):
                raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):  # the last: thousands of brackets
        expected = 'expected a JSON object with strings "prompt" and "completion", or "messages"'
        raise UserError(f"{where}: {expected}") from None
    if example.get("images"):
        raise UserError(f'{where}: "images" are given, and only text is trained on: leave them out')
    if is_chat:
        return chat.encode_messages(where, example, encode)
    return chat.of_parts(encode.with_begin(prompt), encode.whole(prompt + completion))


def of_examples(path: str, samples: Samples, seq_len: int) -> tuple[Samples, str]:
    """Return a jsonl file's examples of at most seq_len tokens, and how many were skipped and why.

    A longer example is cut at its end.  An example without a trained token before the cut is
    skipped.

    Raises:
        UserError: none is left.
    """
    # the first token of a sequence is never predicted, so it alone teaches nothing
    empty = samples.n_targets() == 0
    samples = replace(samples, ends=np.minimum(samples.ends, samples.starts + seq_len))
    teaches = samples.n_targets() > 0
    reasons = {
        "no completion token: it is empty, or the chat template marks none": empty,
        f"no completion token within --seq-len {seq_len}": ~empty & ~teaches,
    }
    counts = {reason: int(skipped.sum()) for reason, skipped in reasons.items()}
    note = "".join(f", {n:,} skipped: {reason}" for reason, n in counts.items() if n)
    skipped, left = samples.lines[~teaches], samples.select(teaches)
    if len(skipped) and not len(left):
        given = f"{path}, line {skipped[0]}: no completion token is left to train on"
        raise UserError(f"{given}, nor is one in another line{note}")
    return left, note


def of_text(samples: Samples, seq_len: int) -> Samples:
    """Return sequences of seq_len tokens, cut from the texts laid end to end.

    Raises:
        UserError: there are fewer tokens.
    """
    starts = np.arange(0, len(samples.tokens) - seq_len + 1, seq_len)
    if not len(starts):
        given = f"the data has a part of only {len(samples.tokens)} tokens, too short for"
        given += f" one sequence of --seq-len {seq_len} (a tenth of a text file is held out)"
        raise UserError(f"{given}; give more text or a smaller --seq-len")
    return replace(samples, starts=starts, ends=starts + seq_len, lines=starts)
