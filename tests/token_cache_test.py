"""Tokens are made once, and a file that is not of this data and tokenizer is never used."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from harness.data import dataset, samples, token_cache
from harness.model import architecture
from tests.small_workloads import jsonl, tiny_workload

FOLDER = token_cache.folder  # before a fixture replaces it
CONFIG = architecture.tiny_config()

pytestmark = pytest.mark.usefixtures("own_cache")


def tokenizer_of(words: str, **more) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["[unknown]", *words.split()])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[unknown]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[unknown]", **more)


@pytest.fixture
def tokenizer(monkeypatch) -> PreTrainedTokenizerFast:
    """The tokenizer that stands for the model's."""
    return give(monkeypatch, tokenizer_of("a b c d e"))


def give(monkeypatch, tokenizer):
    monkeypatch.setattr(dataset, "load_tokenizer", lambda workload: tokenizer)
    return tokenizer


@pytest.fixture
def file(tmp_path) -> Path:
    return jsonl(tmp_path / "data.jsonl", ("a b", "c d e"), ("a", "b"), ("c c", "e e"))


@pytest.fixture
def n_encoded(monkeypatch) -> list[str]:
    """The texts that are tokenized from now on."""
    seen, encode = [], samples.Encoder.__call__

    def counted(self, text):
        seen.append(text)
        return encode(self, text)

    monkeypatch.setattr(samples.Encoder, "__call__", counted)
    return seen


def load(file, *flags) -> list[list]:
    workload = tiny_workload("--data", str(file), *flags)
    data = dataset.load_data(workload, CONFIG, 2)
    return [batch.input_ids.tolist() for batch in [*data.train, *data.validation]]


@pytest.mark.parametrize("data", ["jsonl", "text", "stdlib"])
def test_what_was_tokenized_once_is_read_again(tokenizer, tmp_path, file, n_encoded, data):
    if data != "jsonl":
        file = tmp_path / "text.txt"
        file.write_text("a b c d e " * 100)
    file = "stdlib" if data == "stdlib" else file
    first = load(file)
    assert n_encoded
    n_encoded.clear()
    assert load(file) == first and not n_encoded
    load(file, "--seq-len", "8")  # whole samples are kept, so another length needs nothing new
    assert not n_encoded


def test_bytes_are_not_kept(file):
    load(file)
    assert not list(token_cache.folder().glob("*"))


@pytest.mark.parametrize("changed", ["tokenizer", "data"])
def test_another_tokenizer_and_other_data_tokenize_again_and_say_so(
    tokenizer, file, monkeypatch, n_encoded, capsys, changed
):
    before = load(file)
    if changed == "data":
        jsonl(file, ("a b", "e d c"), ("a", "b"), ("c c", "e e"))
    else:
        give(monkeypatch, tokenizer_of("e d c b a"))
    n_encoded.clear()
    assert load(file) != before and n_encoded
    assert "is of other texts or another tokenizer: tokenizing again" in capsys.readouterr().out
    assert len(list(token_cache.folder().glob("*"))) == 1, "the old one is replaced"


def test_all_that_changes_the_tokens_is_another_tokenizer():
    """A template may write any special token; the post-processor puts one before a text."""
    begun = tokenizer_of("a b c")
    begun.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="a $A", special_tokens=[("a", 1)]
    )
    changes = [
        *({"chat_template": "{{ 1 }}"}, {"eos_token": "a"}, {"bos_token": "a"}, {"bos_token": "b"}),
        *({"cls_token": "a"}, {"extra_special_tokens": ["a"]}, {"split_special_tokens": True}),
        {"extra_special_tokens": {"image_token": "a"}},
    ]
    tokenizers = [
        tokenizer_of("a b c"),
        begun,
        *(tokenizer_of("a b c", **more) for more in changes),
    ]
    encoders = [samples.Encoder.of(tokenizer, CONFIG) for tokenizer in tokenizers]
    sums = {token_cache.text_digest(*token_cache.described(encode)) for encode in encoders}
    assert len(sums) == len(tokenizers)


@pytest.mark.parametrize("writes_it", [True, False])
def test_another_day_counts_where_the_template_writes_it(file, monkeypatch, capsys, writes_it):
    talk = [{"role": role, "content": "a b"} for role in ("user", "assistant")]
    file.write_text("\n".join([json.dumps({"messages": talk})] * 3))
    begin = "{{ strftime_now('%d') }} " if writes_it else "01 "
    template = begin + "{% for m in messages %}{{ m.content }} {% endfor %}"
    give(monkeypatch, tokenizer_of("01 02 a b", chat_template=template))
    for day in ("2026-01-01", "2026-01-01", "2026-01-02"):
        dataset.load_data(tiny_workload("--data", str(file)), CONFIG, 2, day)
    assert capsys.readouterr().out.count("tokenizing again") == writes_it


def test_a_damaged_file_is_made_again_and_said(tokenizer, file, capsys):
    """Wherever it is damaged: no error, and no other tokens."""
    before = load(file)
    (cache,) = token_cache.folder().glob("*.npz")
    whole, draw = cache.read_bytes(), random.Random(0)
    damaged = [b"", b"no zip", whole[: len(whole) // 2]]
    for _ in range(60):
        i = draw.randrange(len(whole))
        damaged.append(whole[:i] + bytes([whole[i] ^ 1 << draw.randrange(8)]) + whole[i + 1 :])
    for content in damaged:
        cache.write_bytes(content)
        assert load(file) == before
    assert capsys.readouterr().out.count(f"{cache} cannot be read: damaged: tokenizing again") > 20
    assert cache.read_bytes() == whole or load(file) == before
    assert [path.name for path in token_cache.folder().iterdir()] == [cache.name]


@pytest.mark.parametrize("read", [False, True])
def test_a_place_where_nothing_can_be_kept_is_not_called_damaged(
    tokenizer, file, tmp_path, monkeypatch, capsys, read
):
    """/dev/null for a folder, and a folder for the file."""
    before = load(file)
    (cache,) = token_cache.folder().glob("*.npz")
    if read:
        cache.unlink()
        cache.mkdir()
        reason = "cannot be read: Is a directory: tokenizing again"
    else:
        monkeypatch.setattr(token_cache, "folder", lambda: Path("/dev/null/.cache"))
        reason = "the tokens could not be written to /dev/null/.cache"
    capsys.readouterr()
    assert load(file) == before
    said = capsys.readouterr().out
    assert "damaged" not in said and reason in said


def test_a_file_with_python_objects_is_not_opened(tokenizer, file):
    """Loading one could run anything."""
    load(file)
    (cache,) = token_cache.folder().glob("*.npz")
    with np.load(cache) as stored:
        arrays = dict(stored)
    arrays["tokens"] = np.array([object()], dtype=object)
    np.savez(cache, **arrays)
    before = load(file)
    assert before == load(file)


def test_the_cache_is_where_caches_belong(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert FOLDER() == tmp_path / "kernel-dev-ft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert FOLDER() == tmp_path / "home" / ".cache" / "kernel-dev-ft"
