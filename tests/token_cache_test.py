"""Tokens are made once, and a file that is not of this data and tokenizer is never used."""

import io
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
def give(monkeypatch):
    """give(tokenizer): it stands for the model's from now on."""
    return lambda given: monkeypatch.setattr(dataset, "load_tokenizer", lambda workload: given)


@pytest.fixture
def file(tmp_path, give) -> Path:
    """Examples, and a tokenizer for them."""
    give(tokenizer_of("a b c d e"))
    return jsonl(tmp_path / "data.jsonl", ("a b", "c d e"), ("a", "b"), ("c c", "e e"))


@pytest.fixture
def n_encoded(monkeypatch) -> list[str]:
    """The texts that are tokenized from now on."""
    seen, encode = [], samples.Encoder.__call__
    count = lambda self, text: seen.append(text) or encode(self, text)  # noqa: E731
    monkeypatch.setattr(samples.Encoder, "__call__", count)
    return seen


def load(file, *flags, day: str | None = None) -> list[list]:
    data = dataset.load_data(tiny_workload("--data", str(file), *flags), CONFIG, 2, day)
    return [batch.input_ids.tolist() for batch in [*data.train, *data.validation]]


def kept() -> list[Path]:
    return list(token_cache.folder().glob("*"))


@pytest.mark.parametrize("data", ["jsonl", "text", "stdlib"])
def test_what_was_tokenized_once_is_read_again(tmp_path, file, n_encoded, data):
    if data == "text":
        file = tmp_path / "text.txt"
        file.write_text("a b c d e " * 100)
    file = "stdlib" if data == "stdlib" else file
    first = load(file)
    assert n_encoded
    n_encoded.clear()
    assert load(file) == first
    load(file, "--seq-len", "8")  # whole samples are kept, so another length needs nothing new
    assert not n_encoded and len(kept()) == 1


def test_bytes_are_not_kept(file, give):
    give(None)
    load(file)
    assert not kept()


@pytest.mark.parametrize("changed", ["tokenizer", "data"])
def test_another_tokenizer_and_other_data_tokenize_again_and_say_so(
    file, give, n_encoded, capsys, changed
):
    before = load(file)
    if changed == "data":
        jsonl(file, ("a b", "e d c"), ("a", "b"), ("c c", "e e"))
    else:
        give(tokenizer_of("e d c b a"))
    n_encoded.clear()
    assert load(file) != before and n_encoded
    assert "is of other texts or another tokenizer: tokenizing again" in capsys.readouterr().out
    assert len(kept()) == 1, "the old one is replaced"


def test_all_that_changes_the_tokens_is_another_tokenizer():
    """A template may write any special token; the post-processor puts one before a text."""
    begun = tokenizer_of("a b c")
    begun.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="a $A", special_tokens=[("a", 1)]
    )
    changes = [
        *({}, {"chat_template": "{{ 1 }}"}, {"eos_token": "a"}, {"bos_token": "a"}),
        *({"bos_token": "b"}, {"cls_token": "a"}, {"extra_special_tokens": ["a"]}),
        *({"split_special_tokens": True}, {"extra_special_tokens": {"image_token": "a"}}),
    ]
    tokenizers = [begun, *(tokenizer_of("a b c", **more) for more in changes)]
    encoders = [samples.Encoder.of(tokenizer, CONFIG) for tokenizer in tokenizers]
    sums = {token_cache.text_digest(*token_cache.described(encode)) for encode in encoders}
    assert len(sums) == len(tokenizers)


@pytest.mark.parametrize("writes_it", [True, False])
def test_another_day_counts_where_the_template_writes_it(file, give, capsys, writes_it):
    talk = [{"role": role, "content": "a b"} for role in ("user", "assistant")]
    file.write_text("\n".join([json.dumps({"messages": talk})] * 3))
    begin = "{{ strftime_now('%d') }} " if writes_it else "01 "
    template = begin + "{% for m in messages %}{{ m.content }} {% endfor %}"
    give(tokenizer_of("01 02 a b", chat_template=template))
    for day in ("2026-01-01", "2026-01-01", "2026-01-02"):
        load(file, day=day)
    assert capsys.readouterr().out.count("tokenizing again") == writes_it


def test_a_damaged_file_is_made_again_and_said(file, capsys):
    """Wherever it is damaged: no error, and no other tokens.  No Python object in it is loaded."""
    before = load(file)
    (cache,) = kept()
    whole, draw, objects = cache.read_bytes(), random.Random(0), io.BytesIO()
    with np.load(cache) as stored:
        np.savez(objects, **{**stored, "tokens": np.array([object()], dtype=object)})
    damaged = [b"", b"no zip", whole[: len(whole) // 2], objects.getvalue()]
    for _ in range(60):
        i = draw.randrange(len(whole))
        damaged.append(whole[:i] + bytes([whole[i] ^ 1 << draw.randrange(8)]) + whole[i + 1 :])
    for content in damaged:
        cache.write_bytes(content)
        assert load(file) == before
    assert capsys.readouterr().out.count(f"{cache} cannot be read: damaged: tokenizing again") > 20
    assert cache.read_bytes() == whole or load(file) == before
    assert kept() == [cache]


@pytest.mark.parametrize("read", [False, True])
def test_a_place_where_nothing_can_be_kept_is_not_called_damaged(file, monkeypatch, capsys, read):
    """/dev/null for a folder, and a folder for the file."""
    before = load(file)
    (cache,) = kept()
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


def test_the_cache_is_where_caches_belong(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert FOLDER() == tmp_path / "kernel-dev-ft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert FOLDER() == tmp_path / "home" / ".cache" / "kernel-dev-ft"
