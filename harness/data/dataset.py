"""Batches to train on: of a file or of Python's standard library, with a part of it held out."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timezone
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedConfig

from harness.cli.command_line import UserError
from harness.cli.flags import TINY_MODEL
from harness.cli.workload import Workload, draws_weights, read_file
from harness.data import packing, samples, token_cache
from harness.data.samples import Samples
from harness.model.architecture import BYTE_VOCABULARY, IGNORE_INDEX
from harness.model.config_file import drawn_example, load_config, read_config_file, reading

VALIDATION_BATCHES = 4  # each of the sequences of a whole step
print_once = functools.cache(print)


@dataclass(frozen=True)
class Batch:
    """One step's input; labels equal input_ids, with IGNORE_INDEX where nothing is to be learned.

    The rows of a packed batch lie end to end in one row, B = 1.  The last three fields tell where
    its samples begin and end.
    """

    input_ids: torch.Tensor  # (B, T) int64
    labels: torch.Tensor  # (B, T) int64, not shifted
    n_tokens: int  # without padding
    n_targets: int  # tokens that are predicted: with a label, and not the first of a sequence
    position_ids: torch.Tensor | None = None  # (1, T) int64, from 0 in each sample
    cu_seq_lens: torch.Tensor | None = None  # (n + 1,) int32: 0, and where each sample ends
    sample_lengths: tuple[int, ...] = ()  # (n,), in sum T

    def inputs(self) -> dict:
        """Return what a Hugging Face model is called with."""
        inputs = {"input_ids": self.input_ids, "labels": self.labels}
        if self.position_ids is not None:  # under the names that transformers' attention has
            inputs |= {
                "position_ids": self.position_ids,
                **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), self.cu_seq_lens),
                **dict.fromkeys(("max_length_q", "max_length_k"), max(self.sample_lengths)),
                "sample_lengths": self.sample_lengths,
            }
        return inputs

    def to(self, device: str, non_blocking: bool = False) -> "Batch":
        return self.with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return a copy in memory that a GPU can read while the host does something else."""
        return self.with_tensors(torch.Tensor.pin_memory)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by the names of their fields."""
        return {name: t for name, t in vars(self).items() if isinstance(t, torch.Tensor)}

    def with_tensors(self, change: Callable) -> "Batch":
        return replace(self, **{name: change(t) for name, t in self.tensors().items()})


def random_batch(shape: tuple[int, int], vocabulary: int, device: str) -> Batch:
    """Return (B, T) random tokens, of which all are trained on."""
    ids = torch.randint(vocabulary, shape, device=device)
    return Batch(ids, ids.clone(), n_tokens=ids.numel(), n_targets=shape[0] * (shape[1] - 1))


@dataclass(frozen=True)
class Batches(Sequence):
    """Batches of up to batch_size sequences; a batch is made when it is asked for."""

    samples: Samples
    sequences: list[list[int]]  # the samples in each sequence
    batch_size: int
    packed_to: int | None = None  # tokens of a packed sequence; None: one sample in each, padded

    def __len__(self) -> int:
        return -(-len(self.sequences) // self.batch_size)

    def of(self, i: int) -> list[list[int]]:
        """Return the i-th batch's sequences."""
        if not 0 <= i < len(self):
            raise IndexError(f"batch {i} of {len(self)}")  # it ends a loop over the batches
        return self.sequences[i * self.batch_size : (i + 1) * self.batch_size]

    def __getitem__(self, i: int) -> Batch:
        sequences, samples = self.of(i), self.samples
        if self.packed_to is None:
            # Padding is at the right, without labels.  It needs no attention mask: with causal
            # attention no token attends to what comes after it.
            ids, labels = zip(*(samples[sample] for (sample,) in sequences))
            pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
            rows = {"input_ids": pad(ids), "labels": pad(labels, padding_value=IGNORE_INDEX)}
        else:
            rows = packing.lay_out(samples, sequences, self.packed_to)
        which = [sample for sequence in sequences for sample in sequence]
        return Batch(
            **rows,
            n_tokens=int((samples.ends[which] - samples.starts[which]).sum()),
            n_targets=int((rows["labels"][:, 1:] != IGNORE_INDEX).sum()),
        )

    def digest(self) -> str:
        """Return a digest that is the same for equal samples in an equal order alone."""
        which = [i for sequence in self.sequences for i in sequence]
        return self.samples.select(which).alone().digest()

    def padding(self) -> float:
        """Return the share of the places in all batches that hold no token of a sample."""
        lengths = self.samples.lengths
        n_tokens = n_places = 0
        for i in range(len(self)):
            filled = [int(lengths[samples].sum()) for samples in self.of(i)]
            n_tokens += sum(filled)
            n_places += len(filled) * (self.packed_to or max(filled))
        return 1 - n_tokens / n_places

    def keys_of_a_token(self) -> float:
        """Return the mean number of tokens in a token's sample; attention's work grows with it."""
        lengths = self.samples.lengths
        of_all = lengths[[i for samples in self.sequences for i in samples]]
        return float((of_all**2).sum() / of_all.sum())


@dataclass(frozen=True)
class Data:
    train: Batches
    validation: Batches
    source: str  # one line about where it comes from
    span: float  # tokens of which a token sees half: seq_len, or its sample's if packed

    def digest(self) -> str:
        """Return a digest that is the same for equal samples alone, to train on and held out."""
        return "-".join(part.samples.digest() for part in (self.train, self.validation))


def load_data(
    workload: Workload, config: PreTrainedConfig, steps: int, day: str | None = None
) -> Data:
    """Return the micro-batches of `steps` steps in a row, and what is held out.

    Equal workloads get equal data.  Which sequences a step trains on, and which are held out, does
    not depend on how a step's sequences are spread over micro-batches and processes.  N processes
    take N batches in a row, of batch_size sequences each, as a micro-batch.

    Args:
        steps: of the whole run, with the steps taken before it was resumed.
        day: the run's first, "2026-01-31", which chat templates may write; None: today.

    Raises:
        UserError: the file cannot be read or is too short, a jsonl line is malformed, or the
            tokenizer's ids do not fit the model.
    """
    n_train = steps * workload.micro_batches * workload.sequences
    n_validation = VALIDATION_BATCHES * workload.micro_batches * workload.sequences
    today = date.fromisoformat(day) if day else datetime.now(timezone.utc).date()
    train, validation, source = load_samples(workload, config, n_train, n_validation, today)
    require_vocabulary(config, train, validation)
    packed_to = workload.seq_len if workload.pack else None
    if packed_to:
        # no sequence holds more samples than tokens
        order = epochs(len(train), n_train * packed_to, workload.seed)
        sequences = packing.first_fit(train.lengths, order, packed_to, n_train)
        order = range(len(validation))
        held_out = packing.first_fit(validation.lengths, order, packed_to, n_validation)
    else:
        sequences = [[i] for i in epochs(len(train), n_train, workload.seed)]
        held_out = [[i] for i in range(min(n_validation, len(validation)))]
    batches = Batches(train, sequences, workload.batch_size, packed_to)
    n_validated = sum(map(len, held_out))
    if n_validated < len(validation):
        source += f"; validated on {n_validated:,} of those held out"
    n_drawn = sum(map(len, sequences))
    if n_drawn > len(train):
        source += f" (each seen about {n_drawn / len(train):.1f} times)"
    if packed_to:
        source += f"; packed: {n_drawn / len(sequences):.1f} samples in a sequence"
    if padding := batches.padding():
        source += f"; padding: {100 * padding:.1f} %"
    validation = Batches(validation, held_out, workload.batch_size, packed_to)
    span = batches.keys_of_a_token() if packed_to else workload.seq_len
    return Data(train=batches, validation=validation, source=source, span=span)


def look_at_data(workload: Workload, day: str | None = None) -> None:
    """Refuse what `load_data` refuses of a file or a tokenizer, before the weights are loaded."""
    config = load_config(workload)
    if workload.data == "stdlib":
        load_tokenizer(workload)
    else:
        load_data(workload, config, workload.steps, day)


def require_vocabulary(config: PreTrainedConfig, *parts: Samples) -> None:
    """Refuse tokens that the model does not have."""
    largest = max(int(part.tokens.max()) for part in parts)
    if largest >= config.vocab_size:
        given = f"the data holds token id {largest}, outside the model's vocabulary of"
        reason = "the tokenizer does not belong to this model"
        raise UserError(f"{given} {config.vocab_size}; {reason}")


def load_examples(workload: Workload, encode: samples.Encoder) -> tuple[Samples, str]:
    """Return a jsonl file's examples of at most seq_len tokens, and a note on skipped ones."""
    name, seq_len = workload.data, workload.seq_len
    text = read_file(name)
    tokenize = functools.partial(samples.tokenize_jsonl, name, text, encode)
    examples = token_cache.cached(name, [text], encode, tokenize)
    return samples.of_examples(name, examples, seq_len)


def load_samples(
    workload: Workload, config: PreTrainedConfig, n_train: int, n_validation: int, today: date
) -> tuple[Samples, Samples, str]:
    """Return (to train on, held out, one line about them); samples have at most seq_len tokens."""
    name, seq_len = workload.data, workload.seq_len
    if name == "synthetic":
        generator = torch.Generator().manual_seed(workload.seed)
        shape = n_train + n_validation, seq_len
        tokens = torch.randint(config.vocab_size, shape, generator=generator).numpy()
        drawn = Samples.of((i, row, row >= 0) for i, row in enumerate(tokens))
        train, validation = drawn.split(n_train)
        return train, validation, f"synthetic: uniform random tokens of {config.vocab_size:,}"
    encode, note = samples.Encoder.of(load_tokenizer(workload), config, today), ""
    if name.endswith(".jsonl"):
        examples, note = load_examples(workload, encode)
        if len(examples) < 2:
            raise UserError(
                f"{name} holds 1 example{note}; at least 2 are needed (one is held out)"
            )
        train, validation = examples.split(len(examples) - max(1, len(examples) // 10))
        what = "examples"
    else:
        to_train_on, held_out = samples.read_texts(name)
        texts = [*to_train_on, *held_out]
        tokenize = functools.partial(samples.tokenize_texts, texts, encode)
        both = token_cache.cached(name, texts, encode, tokenize)
        train, validation = (part.alone() for part in both.split(len(to_train_on)))
        if workload.pack:
            train, validation = train.in_pieces(seq_len), validation.in_pieces(seq_len)
            what = f"pieces of up to {seq_len:,} tokens"
        else:
            train = samples.of_text(train, seq_len).select(slice(n_train))
            validation = samples.of_text(validation, seq_len).select(slice(n_validation))
            what = "sequences"
    source = f"{name}: {len(train):,} {what} to train on, {len(validation):,} held out{note}"
    return train, validation, f"{source}, tokens: {encode.in_words()}"


def load_tokenizer(workload: Workload):
    """Return the model's tokenizer, with config.json's eos_token if it has none of its own.

    None: UTF-8 bytes are the tokens, for random weights and for a vocabulary of bytes alone.
    """
    model = workload.model
    if model == TINY_MODEL or drawn_example(workload):
        return None
    config = read_config_file(model)
    if Path(model).is_dir() and not any(Path(model).glob("token*")):
        if draws_weights(model, workload) or config.get("vocab_size") == BYTE_VOCABULARY:
            return None
        given = f"{model} has pretrained weights and no tokenizer"
        raise UserError(f"{given}: bring its tokenizer.json and tokenizer_config.json there")
    with reading(f"the tokenizer of {model}"):
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        ids = config.get("eos_token_id")
        first = (ids if isinstance(ids, list) else [ids])[:1]
        end = next((token for token, i in tokenizer.get_vocab().items() if [i] == first), None)
        tokenizer.eos_token = end
        how = f"with {end}, as config.json says" if end else "in nothing: the model learns no end"
        print_once(f"Note: {model}: its tokenizer names no eos_token, so texts end {how}")
    return tokenizer


def epochs(n_sequences: int, n_wanted: int, seed: int) -> Iterator[int]:
    """Yield n_wanted indices: each sequence once, in random order, then all in another order."""
    shuffle = random.Random(seed)
    while n_wanted > 0:
        order = list(range(n_sequences))
        shuffle.shuffle(order)
        yield from order[:n_wanted]
        n_wanted -= n_sequences
