"""Every token is trained on or held out, none twice, and prompts and padding are masked."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.cli.workload import read_file
from harness.data import dataset, samples
from harness.data.dataset import IGNORE_INDEX as IGNORE
from harness.model import architecture, loading
from harness.training import training_run
from tests.small_workloads import jsonl, tiny_workload

END = 256  # the tiny model's end-of-text token
BYTES = samples.Encoder(None, [END])


def load(n_steps: int, *flags: str) -> dataset.Data:
    return dataset.load_data(tiny_workload(*flags), architecture.tiny_config(), n_steps)


def read_jsonl(path: Path, seq_len: int) -> tuple[samples.Samples, str]:
    examples = samples.tokenize_jsonl(str(path), read_file(str(path)), BYTES)
    return samples.of_examples(str(path), examples, seq_len)


def test_sequences_of_a_text_lose_and_repeat_no_token():
    texts = ["first text", "second, longer text", "third"]
    tokens = [token for text in texts for token in [*text.encode(), END]]
    rows = list(samples.of_text(samples.tokenize_texts(texts, BYTES), seq_len=7))
    assert len(rows) == len(tokens) // 7
    assert all(ids.shape == (7,) and torch.equal(ids, labels) for ids, labels in rows)
    assert torch.cat([ids for ids, _ in rows]).tolist() == tokens[: 7 * len(rows)]


def test_no_stdlib_file_is_both_trained_on_and_held_out():
    train, validation = samples.read_texts("stdlib")
    assert len(train) > 50 and len(validation) > 5
    assert not {text for text in train if text} & {text for text in validation if text}


def test_held_out_part_of_a_text_file_is_not_trained_on(tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{i:07d}\n" for i in range(500)))  # every 8 bytes occur once
    data = load(1000, "--data", str(path), "--seq-len", "8")
    train = {tuple(batch.input_ids[0].tolist()) for batch in data.train}
    validation = {tuple(batch.input_ids[0].tolist()) for batch in data.validation}
    assert len(train) == 450 and len(validation) == dataset.VALIDATION_BATCHES
    assert not train & validation


@pytest.mark.parametrize("source", ["stdlib", "synthetic"])
def test_no_batch_is_repeated_within_a_run(source):
    data = load(20, "--data", source, "--batch-size", "2")
    assert len(data.train) == 20 and len(data.validation) == dataset.VALIDATION_BATCHES
    assert all(batch.input_ids.shape == (2, 16) and batch.n_tokens == 32 for batch in data.train)
    batches = [*data.train, *data.validation]
    assert len({tuple(batch.input_ids.flatten().tolist()) for batch in batches}) == 24


def test_data_depends_on_the_seed_and_on_nothing_else():
    def tokens(seed: str) -> list[list]:
        return [batch.input_ids.tolist() for batch in load(8, "--seed", seed).train]

    assert tokens("3") == tokens("3")
    assert tokens("3") != tokens("4")
    assert sorted(tokens("3")) == sorted(tokens("4"))  # only the order is drawn


def test_every_epoch_covers_every_sequence_once():
    order = list(dataset.epochs(n_sequences=7, n_wanted=24, seed=0))
    assert len(order) == 24
    for start in (0, 7, 14):
        assert sorted(order[start : start + 7]) == list(range(7))
    assert len(set(order[21:])) == 3
    assert order[:7] != order[7:14]


def test_prompt_and_padding_are_masked_token_by_token_and_padding_changes_no_loss(tmp_path):
    path = jsonl(tmp_path / "data.jsonl", ("ab", "cd"), ("a", "bcdef"), ("x", "y"))
    data = load(1, "--data", str(path), "--batch-size", "2")
    (batch,) = data.train
    rows = sorted(zip(batch.input_ids.tolist(), batch.labels.tolist()), key=lambda row: row[0][1:])
    assert rows == [
        (list(b"abcdef") + [END], [IGNORE, *b"bcdef", END]),
        (list(b"abcd") + [END, 0, 0], [IGNORE, IGNORE, *b"cd", END, IGNORE, IGNORE]),
    ]
    assert batch.n_tokens == 7 + 5
    (held_out,) = data.validation
    assert held_out.input_ids.tolist() == [[*b"xy", END]]
    assert held_out.labels.tolist() == [[IGNORE, *b"y", END]]
    model = loading.load_model(tiny_workload())
    together, one_by_one = (
        training_run.validation_loss(model, replace(data.train, batch_size=n)) for n in (2, 1)
    )
    assert together == pytest.approx(one_by_one, rel=1e-6)


def test_long_examples_are_cut_and_those_with_nothing_to_train_on_are_skipped(tmp_path):
    empty, cut = ("", ""), ("abcdefgh", "completion cut away")
    path = jsonl(tmp_path / "data.jsonl", ("a", "b"), empty, cut, empty, ("abcdef", "ghi"))
    examples, note = read_jsonl(path, seq_len=8)
    assert [ids.tolist() for ids, _ in examples] == [[*b"ab", END], [*b"abcdefgh"]]
    assert examples[1][1].tolist() == [IGNORE] * 6 + [*b"gh"]
    assert note == (
        ", 2 skipped: no completion token: it is empty, or the chat template marks none"
        ", 1 skipped: no completion token within --seq-len 8"
    )


def test_jsonl_may_hold_line_separators_a_byte_order_mark_and_blank_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(
        '\ufeff{"prompt": "a\u2028b", "completion": "c\u0085d"}\r\n\r\n'
        '{"prompt": "", "completion": "e\\u2029f"}'
    )
    examples, _ = read_jsonl(path, seq_len=64)
    texts = [bytes(ids.tolist()[:-1]).decode() for ids, _ in examples]
    assert texts == ["a\u2028bc\u0085d", "e\u2029f"]


# (processes, sequences in a micro-batch of each, micro-batches): four a step
LAYOUTS = [(1, 4, 1), (1, 1, 4), (1, 2, 2), (2, 2, 1), (2, 1, 2)]


@pytest.fixture(params=["stdlib", "synthetic", "text", "jsonl", "stdlib packed", "jsonl packed"])
def flags_of_data(request, tmp_path) -> list[str]:
    source, *packed = request.param.split()
    if source == "text":
        file = tmp_path / "text.txt"
        file.write_text("".join(f"{i:07d}\n" for i in range(500)))
        source = str(file)
    elif source == "jsonl":
        examples = (("x" * (i % 5), f"{i}" * (1 + i % 4)) for i in range(300))
        source = str(jsonl(tmp_path / "data.jsonl", *examples))
    return ["--data", source, *(["--pack"] if packed else [])]


def rows_of(batches: list[dataset.Batch], seq_len: int) -> list[tuple]:
    """Return (ids, labels) of each sequence, without the padding at its end."""
    rows = []
    for batch in batches:
        ids, labels = batch.input_ids, batch.labels
        if batch.position_ids is not None:
            ids, labels = ids.view(-1, seq_len), labels.view(-1, seq_len)
        for row in zip(ids.tolist(), labels.tolist()):
            while row[0][-1] == 0 and row[1][-1] == IGNORE:
                row = row[0][:-1], row[1][:-1]
            rows.append(tuple(map(tuple, row)))
    return rows


def test_how_a_step_is_laid_out_decides_no_sequence(flags_of_data, monkeypatch):
    """The sequences trained on and those held out stay, and so the loss before the first step."""
    model, found = loading.load_model(tiny_workload(*flags_of_data)), []
    for processes, batch_size, accumulate in LAYOUTS:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        flags = ["--batch-size", str(batch_size), "--accumulate", str(accumulate)]
        data = load(3, *flags_of_data, *flags)
        monkeypatch.delenv("WORLD_SIZE")
        assert max(len(row.input_ids) for row in data.validation) <= batch_size
        trained, held_out = (rows_of(part, 16) for part in (data.train, data.validation))
        loss = training_run.validation_loss(model, data.validation)
        found.append((trained, held_out, data.validation.digest(), loss))
    trained, held_out, digest, loss = found[0]
    assert len(trained) == 3 * 4 and len(held_out) == 4 * dataset.VALIDATION_BATCHES
    for others in found[1:]:
        assert others[:3] == (trained, held_out, digest)
        assert others[3] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("pack", [[], ["--pack"]], ids=["padded", "packed"])
def test_the_line_about_the_data_says_how_many_are_validated_on(tmp_path, pack):
    for n_examples, used in ((40, None), (80, 4)):  # a tenth is held out; each fills a sequence
        file = jsonl(tmp_path / f"{n_examples}.jsonl", *[("a", "b" * 9)] * n_examples)
        data = load(3, "--data", str(file), "--seq-len", "12", *pack)
        words = f"; validated on {used} of those held out"
        assert (words in data.source) == (used is not None), data.source
        assert len(data.validation) == 4


def test_each_held_out_set_has_a_digest_of_its_own(tmp_path):
    examples = [(f"{i}", f"{i}" * 9) for i in range(30)]
    files = [tmp_path / f"{i}.jsonl" for i in range(3)]
    jsonl(files[0], *examples)
    jsonl(files[1], ("another", "one"), *examples[1:])  # one that is trained on
    jsonl(files[2], *examples[:-1], ("another", "one"))

    def digest(*flags: str) -> str:
        return load(3, *flags).validation.digest()

    first, same, other = (digest("--data", str(file)) for file in files)
    assert first == same != other
    stdlib, short = ["--data", "stdlib"], ["--seq-len", "8"]
    more = [["--data", "synthetic"], stdlib, [*stdlib, "--batch-size", "2"], [*stdlib, *short]]
    digests = {first, other, *(digest(*flags) for flags in more)}
    assert len(digests) == 6
