"""Conversations become the tokens that the template makes of them, and answers are trained on."""

import itertools
import json
from datetime import date

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import finetune_baseline
from harness.cli.command_line import UserError
from harness.data import chat, samples
from harness.model import architecture
from tests.conftest import assert_refused
from tests.small_workloads import TINY
from tests.token_cache_test import tokenizer_of

WORDS = "<user> <system> <assistant> <end> hello there how are you fine thanks bye"
TURNS = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }} <end>{% endgeneration %}{% else %}{{ m.content }} <end>{% endif %} "
    "{% endfor %}"
)
TALK = [
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine thanks"},
    {"role": "user", "content": "bye"},
]


def trained(template: str | None, messages: object, **more) -> tuple[str, str]:
    """Return (the whole text, the part that is trained on), as the tokenizer's words."""
    tokenizer = tokenizer_of(WORDS, chat_template=template)
    encode = samples.Encoder.of(tokenizer, architecture.tiny_config())
    line = json.dumps({"messages": messages, **more})
    made = samples.tokenize_jsonl("talk.jsonl", line, encode)
    words = tokenizer.convert_ids_to_tokens(made.tokens.tolist())
    return " ".join(words), " ".join(word for word, is_ in zip(words, made.trained) if is_)


WHOLE = (
    "<user> hello there <end> <assistant> hello <end> <user> how are you <end> "
    "<assistant> fine thanks <end>"
)


def test_the_last_answer_is_trained_on_or_every_one_that_the_template_marks():
    """What follows the last answer is left out."""
    assert trained(TURNS, TALK) == (WHOLE, "fine thanks <end>")
    assert trained(MARKED, TALK) == (WHOLE, "hello <end> fine thanks <end>")


NO_TEXT = {"role": "assistant", "content": None}
REFUSED = [  # a template, what a line says besides TALK, words of the sentence
    (None, {}, ['"messages"', "chat template", "instruct"]),
    *((TURNS, {"messages": each}, ["no list"]) for each in ("hello", None)),
    (TURNS, {"messages": ["hello"]}, ["message 1", "no JSON object", "user"]),
    (TURNS, {"messages": [{"role": "human", "content": "a"}]}, ["message 1", "'human'", "system"]),
    (TURNS, {"messages": [{"role": "user"}]}, ["message 1", '"content"']),
    (TURNS, {"messages": [TALK[0], NO_TEXT]}, ["message 2", '"content"']),
    *((TURNS, {"messages": each}, ["no answer"]) for each in (TALK[:1], TALK[1:2], [])),
    ("{{ raise_exception('roles must alternate') }}", {}, ["roles must alternate"]),
    ("{{ 1 +", {}, ["the chat template refuses it"]),
    ("{{ messages|length }}" + TURNS, {}, ["another beginning"]),
    *((TURNS, {"tools": each}, ['"tools"', "list"]) for each in ({}, ["hello"], "{")),
    (TURNS, {"chat_template_kwargs": ["mood"]}, ['"chat_template_kwargs"', "object"]),
    *(
        (TURNS, {"chat_template_kwargs": {name: True}}, ["the chat template refuses it", name])
        for name in ("tokenize", "chat_template")
    ),
    (TURNS, {"images": ["a.png"]}, ['"images" are given']),
]


@pytest.mark.parametrize("template, line, words", REFUSED)
def test_a_line_that_no_template_can_render_is_one_sentence(template, line, words):
    with pytest.raises(UserError) as caught:
        trained(template, **({"messages": TALK} | line))
    said = str(caught.value)
    assert all(word in said for word in ["line 1", *words]) and "\n" not in said, said


def test_a_model_of_bytes_has_no_template(run_script, tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": TALK}))
    outcome = run_script(finetune_baseline, *TINY, "--data", str(path))
    assert_refused(outcome, "line 1", "chat template", '"prompt"')


# ---------------------------------------------------------------- whole, as in generation

SPECIAL = ["<unk>", "<s>", "</s>", "<user>", "<assistant>"]
TRAINER = trainers.BpeTrainer(vocab_size=90, special_tokens=SPECIAL)
METASPACE, BYTES = pre_tokenizers.Metaspace, pre_tokenizers.ByteLevel
TOKENIZERS = {
    "LLaMA 2": METASPACE(prepend_scheme="first", split=False),
    "first": METASPACE(prepend_scheme="first"),
    "always": METASPACE(prepend_scheme="always"),
    "unigram": METASPACE(prepend_scheme="always"),
    "bytes": BYTES(add_prefix_space=False),
    "bytes with a space before": BYTES(add_prefix_space=True),
}
SPACED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
CLOSE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
UNMARKED = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request) -> PreTrainedTokenizerFast:
    """A tokenizer that puts <s> before a text, as LLaMA's does."""
    words = WORDS.split()[4:]
    texts = [" ".join(words[:i] + words[i + 1 :]) for i in range(8)] + ["[INST] hello [/INST]\n"]
    if request.param == "unigram":
        letters = [(letter, -9.0) for letter in sorted({"▁", *"".join(texts)} - {" "})]
        pieces = [*((piece, 0.0) for piece in SPECIAL), *letters, *((f"▁{w}", -9.0) for w in words)]
        made = Tokenizer(models.Unigram(pieces, unk_id=0))
        made.add_special_tokens(SPECIAL)
    else:
        made = Tokenizer(models.BPE())
    made.pre_tokenizer = TOKENIZERS[request.param]
    if request.param != "unigram":
        made.train_from_iterator(texts * 9, TRAINER)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def encoded(tokenizer, line: dict, **more) -> tuple[list[int], list[int]]:
    """Return (ids, those in front that are not trained on)."""
    encode = samples.Encoder.of(tokenizer, architecture.tiny_config(), **more)
    made = samples.tokenize_jsonl("talk.jsonl", json.dumps(line), encode)
    n = int((~made.trained).sum())
    assert made.trained[n:].all() and not made.trained[:n].any()
    return made.tokens.tolist(), made.tokens[:n].tolist()


@pytest.mark.parametrize("template", [SPACED, CLOSE, UNMARKED], ids=["spaced", "close", "lines"])
def test_a_conversation_is_tokenized_whole_as_in_generation(tokenizer, template):
    tokenizer.chat_template = template
    ids, prompt = encoded(tokenizer, {"messages": TALK})
    assert ids == tokenizer.apply_chat_template(TALK[:4])["input_ids"]
    asked = tokenizer.apply_chat_template(TALK[:3], add_generation_prompt=True)["input_ids"]
    assert prompt == asked


def test_a_prompt_and_its_completion_are_tokenized_whole(tokenizer):
    """After what the tokenizer puts before a text; completions begin with a space, or do not."""
    for prompt, completion in [("hello", " there"), ("how are you ", ""), ("", "fine"), ("(", "a")]:
        line = {"prompt": prompt, "completion": completion}
        ids, masked = encoded(tokenizer, line)
        assert ids == tokenizer(prompt + completion)["input_ids"] + [tokenizer.eos_token_id]
        assert masked == tokenizer(prompt)["input_ids"][: len(masked)]
        assert len(masked) == len(tokenizer(prompt)["input_ids"]) or masked == ids[: len(masked)]


def test_a_token_across_the_border_is_trained_on(tokenizer):
    prompt, completion = "fine tha", "nks"
    ids, masked = encoded(tokenizer, {"prompt": prompt, "completion": completion})
    assert ids == tokenizer(prompt + completion)["input_ids"] + [tokenizer.eos_token_id]
    asked = tokenizer(prompt)["input_ids"]
    assert masked == asked[: len(masked)] and masked != asked, "no token lies across"
    assert ids[len(masked)] != asked[len(masked)]


def test_a_text_that_begins_with_the_special_token_has_it_once(tokenizer):
    ids, _ = encoded(tokenizer, {"prompt": "<s>hello", "completion": " there"})
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


def test_a_completion_that_ends_with_the_special_token_has_it_once(tokenizer):
    """Also where one token begins and ends a text, as GPT-2's does."""
    line = {"prompt": "hello", "completion": " there</s>"}
    ids, masked = encoded(tokenizer, line)
    assert ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == tokenizer.eos_token_id
    assert len(masked) < len(ids) - 1
    same = samples.Encoder(tokenizer, [1], (1,))
    assert [len(same.whole(text)) - len(same(text)) for text in ("", "hello")] == [2, 2]


def test_each_text_begins_as_the_tokenizer_begins_it(tokenizer):
    encode = samples.Encoder.of(tokenizer, architecture.tiny_config())
    texts = ["hello there", "", "fine"]
    made = samples.tokenize_texts(texts, encode)
    whole = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    assert made.tokens.tolist() == [*itertools.chain(*whole)]
    assert made.lengths.tolist() == [*map(len, whole)]
    assert "each text or prompt begins with <s>" in encode.in_words()


# ---------------------------------------------------------------- what else a line says

TOOLS = [{"type": "function", "function": {"name": "hello", "parameters": {}}}]
SAID = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{{ mood }} " + TURNS
)


@pytest.mark.parametrize("template", [SAID, "{{ mood }} " + MARKED], ids=["last", "marked"])
def test_tools_and_arguments_of_the_template_are_passed_on(template):
    tokenizer = tokenizer_of(WORDS, chat_template=template)
    more = {"tools": TOOLS, "chat_template_kwargs": {"mood": "fine"}}
    for tools in (TOOLS, json.dumps(TOOLS), None):
        ids, _ = encoded(tokenizer, {"messages": TALK[:2], **more, "tools": tools})
        words = tokenizer.convert_ids_to_tokens(ids)
        assert words[:2] == (
            ["hello", "fine"] if tools and template == SAID else ["fine", "<user>"]
        )
        options = {"tools": TOOLS if tools else None, "mood": "fine"}
        assert ids == tokenizer.apply_chat_template(TALK[:2], **options)["input_ids"]


def test_a_call_of_a_tool_needs_no_text():
    tokenizer = tokenizer_of(WORDS, chat_template=TURNS.replace("m.content", "m.content or 'bye'"))
    call = {"role": "assistant", "content": None, "tool_calls": [TOOLS[0]]}
    ids, _ = encoded(tokenizer, {"messages": [TALK[0], call]})
    assert tokenizer.decode(ids).endswith("<assistant> bye <end>")


# ---------------------------------------------------------------- the day, which templates write

DATED = "{% if not day %}{% set day = strftime_now('%A') %}{% endif %}{{ day }} " + TURNS


@pytest.mark.parametrize("quote", "'\"")
def test_a_template_with_the_date_writes_that_of_the_run(quote):
    """A run that is resumed on a later day keeps its first day."""
    days = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
    tokenizer = tokenizer_of(f"{WORDS} {days}", chat_template=DATED.replace("'", quote))
    for i, day in enumerate(days.split()):
        ids, _ = encoded(tokenizer, {"messages": TALK[:2]}, day=date(2026, 2, 2 + i))
        assert tokenizer.decode(ids).startswith(f"{day} <user>")
    with_two_strings = DATED.replace("strftime_now('%A')", "strftime_now('%' ~ 'A')")
    assert chat.dated(with_two_strings, date(2026, 2, 2)) == with_two_strings
    given = {"messages": TALK[:2], "chat_template_kwargs": {"day": "Friday"}}
    ids, _ = encoded(tokenizer, given, day=date(2026, 2, 2))
    assert tokenizer.decode(ids).startswith("Friday <user>")
