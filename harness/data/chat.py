"""Conversations to train on: {"messages": [{"role": ..., "content": ...}, ...]} as tokens.

The tokenizer's chat template turns messages into text.  If the template marks the assistant's turns
with {% generation %}, all of them are trained on.  Few templates do.  Else the last turn is trained
on: what the template adds to the prompt before that turn, which is rendered with the heading of the
turn to come (add_generation_prompt).  "tools" and "chat_template_kwargs" beside "messages" reach
the template.

Prompt and answer are tokenized together.  The answer alone would become other tokens: SentencePiece
puts a space before each text.
"""

import contextlib
import json
import re
from datetime import date

import numpy as np

from harness.cli.command_line import UserError
from harness.cli.tables import describe

ROLES = "system", "user", "assistant", "tool"
MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")
TODAY = re.compile(r"""strftime_now\(\s*(["'])([^"']*)\1\s*\)""")


def of_parts(prompt: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (token ids, which of them are trained on) of `whole`, a prompt and its answer.

    The first tokens are not trained on, as far as the prompt alone has the same ones.  A token
    across the border belongs to the answer.
    """
    n = min(len(prompt), len(whole))
    differing = np.flatnonzero(prompt[:n] != whole[:n])
    return whole, np.arange(len(whole)) >= (differing[0] if len(differing) else n)


def encode_messages(where: str, example: dict, encode) -> tuple[np.ndarray, np.ndarray]:
    """Return (token ids, which of them are trained on) of one conversation.

    What comes after the last of the assistant's turns is left out.  `encode` is an Encoder, and
    `where` names the file and the line.

    Raises:
        UserError: the tokenizer has no template, or its template cannot render the messages.
    """
    tokenizer = encode.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        has = "UTF-8 bytes for tokens" if tokenizer is None else "a tokenizer without chat template"
        given = f'{where}: "messages" need a chat template and this model has {has}'
        raise UserError(f'{given}: take an instruct model, or give "prompt" and "completion"')
    messages = example["messages"][: last_answer(where, example["messages"]) + 1]
    tools, more = template_arguments(where, example)
    try:
        template = dated(tokenizer.get_chat_template(tools=tools), encode.day)

        def apply(messages: list[dict], **options):
            return tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, **options, **more
            )

        if MARKS_TURNS.search(template):
            encoded = apply(messages, return_dict=True, return_assistant_tokens_mask=True)
            return np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"], dtype=bool)
        prompt = apply(messages[:-1], tokenize=False, add_generation_prompt=True)
        whole = apply(messages, tokenize=False, add_generation_prompt=False)
    except Exception as error:  # a template is a program of its author
        raise UserError(f"{where}: the chat template refuses it ({describe(error)})") from error
    if not whole.startswith(prompt):
        given = f"{where}: with its last answer the chat template writes another beginning than"
        reason = "without, so where that answer begins is unknown"
        raise UserError(f'{given} {reason}: give "prompt" and "completion"')
    return of_parts(encode(prompt), encode(whole))


def dated(template: str, day: date) -> str:
    """Return the template with this day in place of today's, so that a run can be repeated."""
    return TODAY.sub(lambda call: json.dumps(day.strftime(call[2])), template)


def template_arguments(where: str, example: dict) -> tuple[list[dict] | None, dict]:
    """Return what an example has for the template beside messages: (tools, keyword arguments).

    As in TRL, tools may also be JSON in a string.

    Raises:
        UserError: the tools are no list of objects, or the arguments are no object.
    """
    tools, more = example.get("tools"), example.get("chat_template_kwargs") or {}
    if isinstance(tools, str):  # JSON, as TRL takes it too
        with contextlib.suppress(ValueError):
            tools = json.loads(tools)
    are_objects = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and not are_objects:
        raise UserError(f'{where}: "tools" is no list of JSON objects, expected one')
    if not isinstance(more, dict):
        raise UserError(f'{where}: "chat_template_kwargs" is no JSON object, expected one')
    return tools, more


def last_answer(where: str, messages: object) -> int:
    """Return the index of the last of the assistant's turns.

    Raises:
        UserError: the messages are malformed, or none of them is an answer.
    """
    if not isinstance(messages, list):
        raise UserError(f'{where}: "messages" is no list, expected one of roles and contents')
    last = 0
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            given = f"role {role!r}" if isinstance(message, dict) else "no JSON object"
            raise UserError(f"{where}: message {i + 1} has {given}, expected {', '.join(ROLES)}")
        is_call = message.get("content") is None and message.get("tool_calls")
        if not (isinstance(message.get("content"), str) or is_call):
            raise UserError(f'{where}: message {i + 1} has no text as "content"')
        if role == "assistant":
            last = i
    if last == 0:
        raise UserError(f"{where}: no answer of the assistant to a message, so nothing to train on")
    return last
