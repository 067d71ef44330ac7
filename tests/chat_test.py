"""Conversations become the tokens that the template makes of them, and answers are trained on."""

import json

import pytest

import finetune_baseline
from harness import architecture, samples
from harness.command_line import UserError
from tests.cli_test import assert_refused
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


def trained(template: str | None, messages: object) -> tuple[str, str]:
    """(the whole text, what of it is trained on), as the tokenizer's words."""
    tokenizer = tokenizer_of(WORDS, chat_template=template)
    encode = samples.Encoder.of(tokenizer, architecture.tiny_config())
    line = json.dumps({"messages": messages})
    made = samples.tokenize_jsonl("talk.jsonl", line, encode)
    words = tokenizer.convert_ids_to_tokens(made.tokens.tolist())
    return " ".join(words), " ".join(word for word, is_ in zip(words, made.trained) if is_)


WHOLE = (
    "<user> hello there <end> <assistant> hello <end> <user> how are you <end> "
    "<assistant> fine thanks <end>"
)


def test_the_last_answer_is_trained_on_and_what_follows_it_left_out():
    assert trained(TURNS, TALK) == (WHOLE, "fine thanks <end>")


def test_every_answer_is_trained_on_where_the_template_marks_them():
    assert trained(MARKED, TALK) == (WHOLE, "hello <end> fine thanks <end>")


@pytest.mark.parametrize(
    "template, messages, words",
    [
        (None, TALK, ["line 1", '"messages"', "chat template", "instruct"]),
        (TURNS, "hello", ["line 1", "no list"]),
        (TURNS, ["hello"], ["message 1", "no JSON object", "user"]),
        (TURNS, [{"role": "human", "content": "a"}], ["message 1", "'human'", "assistant"]),
        (TURNS, [{"role": "user"}], ["message 1", '"content"']),
        (TURNS, TALK[:1], ["line 1", "no answer"]),
        (TURNS, TALK[1:2], ["line 1", "no answer"]),
        (TURNS, [], ["line 1", "no answer"]),
        ("{{ raise_exception('roles must alternate') }}", TALK, ["line 1", "roles must alternate"]),
        ("{{ 1 +", TALK, ["line 1", "the chat template refuses it"]),
        ("{{ messages|length }}" + TURNS, TALK, ["line 1", "another beginning"]),
    ],
)
def test_what_no_template_can_render_is_one_sentence(template, messages, words):
    with pytest.raises(UserError) as caught:
        trained(template, messages)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_of_bytes_has_no_template(run_script, tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": TALK}))
    outcome = run_script(finetune_baseline, *TINY, "--data", str(path))
    assert_refused(outcome, "line 1", "chat template", '"prompt"')
