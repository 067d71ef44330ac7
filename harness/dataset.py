"""Text to train on: read, tokenized and packed into batches, with a part of it held out."""

import json
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from harness.architecture import BYTE_VOCABULARY
from harness.command_line import UserError
from harness.config_file import reading
from harness.workload import DEFAULT_MODEL, TINY, Workload

# isort: split
# after the harness, which decides how triton (imported by transformers) will run
from transformers import AutoTokenizer, LlamaConfig

IGNORE_INDEX = -100
VALIDATION_BATCHES = 4


@dataclass(frozen=True)
class Batch:
    """One step's input; labels equal input_ids with IGNORE_INDEX where nothing is to be learned."""

    input_ids: torch.Tensor  # (B, T) int64
    labels: torch.Tensor  # (B, T) int64, not shifted
    n_tokens: int  # without padding
    n_targets: int  # tokens that are predicted: with a label, and not the first of a sequence

    def inputs(self) -> dict[str, torch.Tensor]:
        """What a Hugging Face model is called with."""
        return {"input_ids": self.input_ids, "labels": self.labels}

    def to(self, device: str) -> "Batch":
        return replace(self, input_ids=self.input_ids.to(device), labels=self.labels.to(device))


def random_batch(shape: tuple[int, int], vocabulary: int, device: str) -> Batch:
    """Sequences of random tokens, of which all are trained on; shape is (B, T)."""
    ids = torch.randint(vocabulary, shape, device=device)
    return Batch(ids, ids.clone(), n_tokens=ids.numel(), n_targets=shape[0] * (shape[1] - 1))


@dataclass(frozen=True)
class Data:
    train: list[Batch]
    validation: list[Batch]
    source: str  # one line about where it comes from


def load_data(workload: Workload, config: LlamaConfig, steps: int) -> Data:
    """The micro-batches of `steps` steps in a row, and VALIDATION_BATCHES held out.

    Of equal workloads the same.

    Raises:
        UserError: the file cannot be read or is too short, a jsonl line is
            malformed, or the tokenizer's ids do not fit the model.
    """
    name, seq_len, batch_size = workload.data, workload.seq_len, workload.batch_size
    n_train = steps * workload.micro_batches * batch_size
    n_validation = VALIDATION_BATCHES * batch_size
    if name == "synthetic":
        generator = torch.Generator().manual_seed(workload.seed)
        shape = n_train + n_validation, seq_len
        tokens = torch.randint(config.vocab_size, shape, generator=generator)
        sequences = [(row, row) for row in tokens]
        train, validation = sequences[:n_train], sequences[n_train:]
        source = f"synthetic: uniform random tokens of {config.vocab_size:,}"
    else:
        tokenizer = load_tokenizer(workload)
        encode, end = text_encoder(tokenizer, config)
        if name.endswith(".jsonl"):
            examples, n_skipped = read_jsonl(name, encode, end, seq_len)
            n_held_out = max(1, len(examples) // 10)
            train, validation = examples[:-n_held_out], examples[-n_held_out:][:n_validation]
            source = f"{name}: {len(train):,} examples to train on, {n_held_out:,} held out"
            if n_skipped:
                why = f"no completion token within --seq-len {seq_len}"
                source += f", {n_skipped:,} skipped: {why}"
        else:
            train_texts, validation_texts = read_texts(name)
            train = pack(train_texts, encode, end, seq_len, n_train)
            validation = pack(validation_texts, encode, end, seq_len, n_validation)
            held_out = f"{len(validation):,} held out"
            source = f"{name}: {len(train):,} sequences to train on, {held_out}"
        tokens_are = "UTF-8 bytes" if tokenizer is None else type(tokenizer).__name__
        source += f", tokens: {tokens_are}"
        if len(train) < n_train:
            source += f" (each seen about {n_train / len(train):.1f} times)"
    largest = max(int(ids.max()) for ids, _ in train + validation)
    if largest >= config.vocab_size:
        raise UserError(
            f"the data holds token id {largest}, outside the model's vocabulary of "
            f"{config.vocab_size}; "
            "the tokenizer does not belong to this model"
        )
    order = list(epochs(len(train), n_train, workload.seed))
    return Data(
        train=make_batches([train[i] for i in order], batch_size),
        validation=make_batches(validation, batch_size),
        source=source,
    )


def load_tokenizer(workload: Workload):
    """The model's tokenizer; None where it has none, and then UTF-8 bytes are the tokens."""
    model = workload.model
    if model == TINY or (workload.random_init and model == DEFAULT_MODEL):
        return None
    if Path(model).is_dir() and not any(Path(model).glob("token*")):
        return None
    with reading(f"the tokenizer of {model}"):
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


def epochs(n_sequences: int, n_wanted: int, seed: int) -> Iterator[int]:
    """n_wanted indices: every sequence once in random order, then all again in another order."""
    shuffle = random.Random(seed)
    while n_wanted > 0:
        order = list(range(n_sequences))
        shuffle.shuffle(order)
        yield from order[:n_wanted]
        n_wanted -= n_sequences


def text_encoder(tokenizer, config: LlamaConfig) -> tuple[Callable[[str], list[int]], list[int]]:
    """(text -> token ids without special tokens, the ids that end a text)."""
    if tokenizer is None:
        end = [256] if config.vocab_size == BYTE_VOCABULARY else []
        return (lambda text: list(text.encode("utf-8"))), end
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    return encode, end


def read_texts(data: str) -> tuple[list[str], list[str]]:
    """(training texts, held-out texts): every tenth stdlib file, or a text file's last tenth."""
    if data == "stdlib":
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
        return [t for i, t in enumerate(texts) if i % 10], texts[::10]
    text = read_file(data)
    cut = len(text) * 9 // 10
    return [text[:cut]], [text[cut:]]


def read_file(path: str) -> str:
    if not path.endswith((".txt", ".jsonl")):
        expected = "stdlib, synthetic, a .txt file or a .jsonl file"
        raise UserError(f"--data {path}: expected {expected}")
    try:
        # without the mark that Windows editors put first
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise UserError(f"{path} is empty")
    return text


def pack(
    texts: list[str], encode: Callable, end: list[int], seq_len: int, n_wanted: int
) -> list[tuple]:
    """Up to n_wanted (input_ids, labels) of seq_len tokens, cut from the texts laid end to end."""
    tokens: list[int] = []
    for text in texts:
        tokens += encode(text) + end
        if len(tokens) >= seq_len * n_wanted:
            break
    n_sequences = min(n_wanted, len(tokens) // seq_len)
    if n_sequences == 0:
        raise UserError(
            f"the data has a part of only {len(tokens)} tokens, too short for one sequence of "
            f"--seq-len {seq_len} (a tenth of a text file is held out); "
            "give more text or a smaller --seq-len"
        )
    rows = torch.tensor(tokens[: n_sequences * seq_len]).view(n_sequences, seq_len)
    return [(row, row) for row in rows]


def read_jsonl(
    path: str, encode: Callable, end: list[int], seq_len: int
) -> tuple[list[tuple], int]:
    """(input_ids, labels) of each line {"prompt": ..., "completion": ...}; how many were skipped.

    Prompt tokens are not trained on.  An example longer than seq_len is cut at its end; one of
    which no completion token is left then is skipped.

    Raises:
        UserError: a line is malformed, or fewer than two examples are left.
    """
    examples, skipped = [], []  # skipped: their line numbers
    # not splitlines(): it also cuts at characters that a JSON string may hold, such as U+2028
    for line_number, line in enumerate(read_file(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            prompt, completion = example["prompt"], example["completion"]
            if not (isinstance(prompt, str) and isinstance(completion, str)):
                raise TypeError
            # JSON can spell half of a surrogate pair, which is no text
            (prompt + completion).encode("utf-8")
        except (ValueError, KeyError, TypeError, RecursionError):  # the last: thousands of brackets
            expected = 'expected a JSON object with strings "prompt" and "completion"'
            raise UserError(f"{path}, line {line_number}: {expected}") from None
        prompt_ids, completion_ids = encode(prompt), encode(completion) + end
        ids = torch.tensor((prompt_ids + completion_ids)[:seq_len], dtype=torch.int64)
        labels = ids.clone()
        labels[: len(prompt_ids)] = IGNORE_INDEX
        # the first token of a sequence is never predicted, so it alone teaches nothing
        if (labels[1:] != IGNORE_INDEX).any():
            examples.append((ids, labels))
        else:
            skipped.append(line_number)
    if skipped and not examples:
        raise UserError(
            f"{path}, line {skipped[0]}: no completion token is left to train on within "
            f"--seq-len {seq_len}, nor in any other line"
        )
    if len(examples) < 2:
        left = f" within --seq-len {seq_len} ({len(skipped)} skipped)" if skipped else ""
        found = f"{path} holds {len(examples)} example{left}"
        raise UserError(f"{found}; at least 2 are needed (one is held out)")
    return examples, len(skipped)


def make_batches(sequences: list[tuple], batch_size: int) -> list[Batch]:
    """Batches of up to batch_size, padded at the right to the longest; padding has no label.

    Padding after the end needs no attention mask: with causal attention no
    real token ever looks at it.
    """
    batches = []
    for start in range(0, len(sequences), batch_size):
        ids, labels = zip(*sequences[start : start + batch_size])
        targets = [int((row[1:] != IGNORE_INDEX).sum()) for row in labels]
        pad = torch.nn.utils.rnn.pad_sequence
        batches.append(
            Batch(
                pad(list(ids), batch_first=True, padding_value=0),
                pad(list(labels), batch_first=True, padding_value=IGNORE_INDEX),
                n_tokens=sum(len(row) for row in ids),
                n_targets=sum(targets),
            )
        )
    return batches
