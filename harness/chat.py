"""Conversations to train on: {"messages": [{"role": ..., "content": ...}, ...]} as tokens.

The tokenizer's chat template turns messages into text.  Trained on are the assistant's turns, if
the template marks them with {% generation %}.  Few do; else it is the last of them: what the
template adds to the prompt before it, which is rendered with the heading of the turn to come
(add_generation_prompt).
"""

import re

import numpy as np

from harness.command_line import UserError
from harness.tables import describe

ROLES = "system", "user", "assistant", "tool"
MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def of_parts(prompt: np.ndarray, completion: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, which of them are trained on): the completion's."""
    return np.append(prompt, completion), np.arange(len(prompt) + len(completion)) >= len(prompt)


def encode_messages(where: str, messages: object, encode) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, which of them are trained on) of one conversation.

    What comes after the last of the assistant's turns is left out.

    Args:
        where: the file and line, in words.
        encode: the samples' Encoder.

    Raises:
        UserError: the tokenizer has no template, or the messages are none that it can render.
    """
    tokenizer = encode.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        has = "UTF-8 bytes for tokens" if tokenizer is None else "a tokenizer without chat template"
        raise UserError(
            f'{where}: "messages" need a chat template and this model has {has}: take an instruct '
            'model, or give "prompt" and "completion"'
        )
    last = last_answer(where, messages)
    messages = messages[: last + 1]
    try:
        template = tokenizer.get_chat_template()
        if MARKS_TURNS.search(template):
            encoded = tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            return np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"], dtype=bool)
        prompt, whole = (
            tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=heading)
            for part, heading in ((messages[:-1], True), (messages, False))
        )
    except Exception as error:  # a template is a program of its author
        raise UserError(f"{where}: the chat template refuses it ({describe(error)})") from error
    if not whole.startswith(prompt):
        raise UserError(
            f"{where}: with its last answer the chat template writes another beginning than without"
            ', so where that answer begins is unknown: give "prompt" and "completion"'
        )
    return of_parts(encode(prompt), encode(whole[len(prompt) :]))


def last_answer(where: str, messages: object) -> int:
    """The index of the last of the assistant's turns, in messages that are well-formed."""
    if not isinstance(messages, list):
        raise UserError(f'{where}: "messages" is no list, expected one of roles and contents')
    answers = []
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            given = f"role {role!r}" if isinstance(message, dict) else "no JSON object"
            raise UserError(f"{where}: message {i + 1} has {given}, expected {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise UserError(f'{where}: message {i + 1} has no text as "content"')
        if role == "assistant":
            answers.append(i)
    if not answers or answers[-1] == 0:
        raise UserError(f"{where}: no answer of the assistant to a message, so nothing to train on")
    return answers[-1]
