"""Conversations in every shape that people bring, as the one that chat templates read.

====================================================  ==================================================================
what a message may be                                 what becomes of it
====================================================  ==================================================================
``{"role", "content"}``                               itself (OpenAI, TRL, transformers)
``{"from", "value"}``                                 itself by its role (ShareGPT): human is user, gpt is assistant
a content in parts of text                            the parts one behind the other, which is what templates make of them
no content, or ``None``, beside ``tool_calls``        ``None``
arguments of ``tool_calls`` as JSON in a text         what the text says: templates write JSON themselves
an entry that is ``None``                             left out: tables have it where other rows have a value; so they have in
                                                      arguments and in ``tools`` what only another function has
====================================================  ==================================================================

Other entries (``reasoning_content``, ``tool_call_id``, ``name``, ...) are the template's to read. Pictures and sounds, a message
without anything in it and a role that is no text are refused, by row and message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, TypeGuard

import numpy as np

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError

Message = dict[str, Any]
"""One turn of a conversation, e.g. ``{"role": "user", "content": "..."}``."""


class Chat(TypedDict):
    """A conversation as chat templates read it."""

    messages: list[Message]
    tools: NotRequired[list[Any]]
    """Descriptions of functions that the model may call (TRL's column ``tools``)."""
    options: NotRequired[dict[str, Any]]
    """Options of the chat template, e.g. ``enable_thinking`` (TRL's column ``chat_template_kwargs``)."""


TOOLS, OPTIONS = "tools", "chat_template_kwargs"
"""Columns of the data that go into the chat template, as in TRL."""

SYSTEM = "system"
"""A role; and a column in which other programs' data have its message (ShareGPT, Alpaca)."""

SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "observation": "tool"}
"""ShareGPT's names of roles, where they are others."""

ASSISTANT = "assistant"


def is_conversation(value: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Return whether a value is a list of messages, of any shape."""
    listed = isinstance(value, (list, tuple, np.ndarray)) and len(value) > 0  # an array: parquet as pandas reads it
    return listed and all(isinstance(turn, Mapping) for turn in value)


def is_message(value: Any) -> bool:
    """Return whether a dict is a message, and no row of other columns."""
    return any(names <= set(value) for names in ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"}))


def read_messages(value: Sequence[Mapping[str, Any]], what: str) -> list[Message]:
    """Return a conversation's messages as templates read them.

    Args:
        value: messages in any shape of the module's table.
        what: names it in a refusal.

    Raises:
        OptionError: says which message is none, and what to do.
    """
    return [_message(turn, f"message {i} of {what}") for i, turn in enumerate(value)]


def read_chat(value: Sequence[Mapping[str, Any]], what: str, tools: Any = None, options: Any = None) -> Chat:
    """Return a conversation with its tools and template options.

    Args:
        value: the conversation's messages.
        what: names it in a refusal.
        tools: the row's tools: a list of descriptions, or the same as JSON; ``None`` or empty for none.
        options: the row's template options: names and values; ``None`` or empty for none.

    Raises:
        OptionError: one of them is something else.
    """
    chat = Chat(messages=read_messages(value, what))
    if tools is not None and len(listed := _parsed(tools) if isinstance(tools, str) else without_nulls(_plain(tools))):
        if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
            raise OptionError(f"the {TOOLS} of {what} are {shown(tools)}; give a list of JSON schemas, or that as one JSON text")
        chat["tools"] = listed
    if options is not None and len(named := _plain(_parsed(options))):
        if not isinstance(named, dict) or named.keys() & {"conversation", "messages", "tokenize", "add_generation_prompt"}:
            raise OptionError(f"the {OPTIONS} of {what} are {shown(options)}; give a dict of options of the chat template")
        chat["options"] = {name: item for name, item in named.items() if item is not None}
    return chat


def check_system(said: Any, messages: Sequence[Message], what: str) -> None:
    """Check that a system message that stands in its own column is in the conversation.

    Args:
        said: the column's value in this row; ``None`` without one.
        messages: the conversation's messages; a text has none.
        what: names it in a refusal.

    Raises:
        OptionError: it is not, and would be left out.
    """
    if isinstance(said, str) and said.strip() and not any(message["role"] == SYSTEM for message in messages):
        raise OptionError(
            f"{what} has the column {SYSTEM}, {shown(said)}, which would be left out of the prompt. Make it the first "
            "message, {'role': 'system', 'content': ...}, or rename the column to pass it on"
        )


def check_prompt(messages: Sequence[Message], what: str) -> None:
    """Check that a conversation can be answered.

    Raises:
        OptionError: its last message is the assistant's.
    """
    if messages[-1]["role"] == ASSISTANT:
        raise OptionError(f"{what} ends with the assistant's message; a prompt ends before it, leave it out")


def check_answer(message: Message, what: str) -> None:
    """Check that a message can be learned.

    Raises:
        OptionError: it is not the assistant's, or is marked as one that is not learned.
    """
    if message["role"] != ASSISTANT:
        raise OptionError(f"{what} is a message of {shown(message['role'])}; what is learned is a message of 'assistant'")
    if message.get("weight") == 0:
        raise OptionError(f"{what} has weight 0, which means that it is not learned; leave such rows out")


def _message(turn: Mapping[str, Any], what: str) -> Message:
    fields = {str(key): _plain(value) for key, value in turn.items() if value is not None}
    if "role" not in fields and isinstance(fields.get("from"), str):
        fields = {**fields, "role": SHAREGPT.get(fields["from"], fields["from"]), "content": fields.get("value")}
        fields = {key: value for key, value in fields.items() if key not in ("from", "value")}
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not role:
        raise OptionError(f"{what} is {shown(dict(turn))}, without a role; role and content are texts: 'role': 'user'")
    if role == "function_call" or fields.get("function_call"):
        raise OptionError(
            f"{what} has a function_call; give it as tool_calls of a message of 'assistant', answered by one of 'tool'"
        )
    # An empty list of calls is left out: a template that only tests for the key would write an empty call.
    calls = fields.pop("tool_calls", None)
    if calls:
        fields["tool_calls"] = [_call(tool_call, what) for tool_call in _listed(calls, what)]
    if isinstance(content, list):
        content = "".join(_part(part, f"part {k} of {what}") for k, part in enumerate(content))
    if content is not None and not isinstance(content, str):
        raise OptionError(
            f"{what} has the content {shown(content)}; role and content are texts. Turn a table or a dict into one: json.dumps(...)"
        )
    if content is None and not calls:
        raise OptionError(f"{what} is {shown(dict(turn))}, without a text; only a message with tool_calls may have none")
    return {"role": role, "content": content, **{key: value for key, value in fields.items() if key not in ("role", "content")}}


def _part(part: Any, what: str) -> str:
    """Return the text of a part of a content."""
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str) or part.get("type", "text") not in ("text", "input_text", "output_text"):
        kind = part.get("type") if isinstance(part, dict) else None
        raise OptionError(f"{what} is {shown(kind or part)}; hfsdk trains on texts alone. Leave such rows out, or say it in words")
    return text


def _call(call: Any, what: str) -> dict[str, Any]:
    """Return a call of a tool, its arguments parsed."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        wanted = "{'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}"
        raise OptionError(f"{what} has the tool call {shown(call)}; a call is {wanted}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise OptionError(f"{what} calls {function['name']} with {shown(arguments)}, which is no JSON: {error}") from None
    else:
        arguments = without_nulls(arguments)
    said = {"arguments": {} if arguments is None else arguments} if "arguments" in function else {}
    function = {**{key: without_nulls(item) for key, item in function.items() if item is not None}, **said}
    if "function" not in call:
        return function
    return {**{key: without_nulls(item) for key, item in call.items() if item is not None}, "function": function}


def _listed(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise OptionError(f"{what} has tool_calls that are {shown(value)}; they are a list of calls")
    return value


def without_nulls(value: Any) -> Any:
    """Return lists and dicts without entries that are ``None``: a column of a table has the fields of all rows in each.

    A JSON text is not passed through here, so that a null in it stays. In a schema that allows null, ``default`` and ``const``
    stay, as pydantic writes them; lists stay as they are (``enum``).
    """
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    always = ("default", "const") if _allows_null(value) else ()
    return {key: without_nulls(item) for key, item in value.items() if item is not None or key in always}


def _allows_null(schema: dict[str, Any]) -> bool:
    """Return whether a JSON schema allows null."""
    kinds = schema.get("type")
    choices = [part for name in ("anyOf", "oneOf") for part in schema.get(name) or [] if isinstance(part, dict)]
    return kinds == "null" or (isinstance(kinds, list) and "null" in kinds) or any(part.get("type") == "null" for part in choices)


def _parsed(value: Any) -> Any:
    """Return a JSON text's value; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) and value.strip() else value
    except ValueError:
        return value


def _plain(value: Any) -> Any:
    """Return a table's value as lists and dicts: arrays and tuples are lists, numbers of numpy are Python's."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
