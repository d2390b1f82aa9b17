"""The user's data as columns, and prompts out of them, in every form that people bring.

A ``datasets.Dataset``, a DataFrame, a Series, a dict of columns, or a list: of texts, of token ids, of conversations
(messages, in every shape that :mod:`hfsdk.core.conversations` reads), or of dicts with these and other columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np

from hfsdk.core.checks import is_whole, shown
from hfsdk.core.conversations import (
    OPTIONS,
    SYSTEM,
    TOOLS,
    check_prompt,
    check_system,
    is_conversation,
    is_message,
    read_chat,
    read_messages,
)
from hfsdk.core.errors import ColumnError, OptionError

MOST_ROWS = 10_000_000
"""Most rows of a source: more is a typo, and takes gigabytes."""

NO_UTF_8 = (
    "has lone surrogates (U+D800 to U+DFFF), which have no UTF-8 form: text.encode('utf-8', 'replace').decode() puts ? in "
    "their place"
)
"""The reason why no tokenizer takes a text, for messages."""

PROMPT_COLUMNS = ("prompt", "text", "messages", "conversations")
"""Columns in which prompts are looked for, unless one is named."""

QUESTIONS = ("instruction", "input", "question", "query", "context", "history", SYSTEM, "messages", "conversations")
"""Columns in which other programs' data have the prompt of a pair, or some of it (Alpaca, LLaMA-Factory, ms-swift)."""


def read_source(source: Any, column: str | None = None) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return (prompts, the other columns) of the user's data.

    Args:
        source: a ``datasets.Dataset``, a DataFrame, a Series, a dict of columns, or a list. In TRL's rows with ``prompt`` and
            ``completion`` the completion is another column.
        column: the column that has the prompts; by default the one that :func:`prompt_column` finds.

    Raises:
        ColumnError: there is no such column, or the source is something else.
        OptionError: a prompt is neither text, token ids nor a conversation.
    """
    columns = columns_of(source, column or "text")
    column = prompt_column(columns) if column is None else column
    if column not in columns:
        names = list(map(str, columns))
        if not names:
            raise ColumnError(f"the data has no column {shown(column)}, and no other; give rows that have one")
        raise ColumnError(
            f"the data has no column {shown(column)}; it has {', '.join(names)}. Say which has the prompts: "
            f"session.prompts(data, column={names[0]!r})"
        )
    if len(columns[column]) > MOST_ROWS:
        raise OptionError(f"the data has {len(columns[column]):,} rows; at most {MOST_ROWS:,} fit in this process")
    prompts = list(columns[column])
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, list, tuple, np.ndarray)):
            what = f"{type(prompt).__name__} ({shown(prompt)})"
            raise OptionError(f"prompt {row} of the data is {what}; prompts are texts, token ids or lists of messages")
        if is_conversation(prompt):
            what = f"prompt {row} of the data"
            check_prompt(read_messages(prompt, what), what)
    return prompts, {name: list(values) for name, values in columns.items() if name != column}


def prompt_column(columns: Mapping[str, Sequence[Any]]) -> str:
    """Return where the prompts are among the columns, where nobody says: the first of `PROMPT_COLUMNS` that there is."""
    return next((name for name in PROMPT_COLUMNS if name in columns), PROMPT_COLUMNS[0])


def left_out(names: Iterable[str]) -> str:
    """Return the notice of the data's columns that are not passed on."""
    return f"hfsdk writes columns named {', '.join(names)} itself; the data's are left out, rename them to pass them on"


def columns_of(source: Any, column: str) -> Mapping[str, Sequence[Any]]:
    """Return the columns of the user's data; a list or a Series of values is the column ``column``.

    Raises:
        ColumnError: the columns differ in length, or the source is something else.
    """
    # By the package's name, not by ``isinstance``: datasets and pandas need not be installed, and importing them takes seconds.
    package = type(source).__module__.split(".")[0]
    if isinstance(source, Mapping):
        if package == "datasets":
            raise ColumnError(f"this is a DatasetDict with {', '.join(map(str, source))}; give one of them, e.g. data['train']")
        return _of_one_length(source)
    if package == "datasets":
        return _of_dataset(source, column)
    if package == "pandas" and hasattr(source, "columns"):
        return _of_frame(source)
    if (package == "pandas" and hasattr(source, "index")) or (isinstance(source, np.ndarray) and source.ndim == 1):
        return {column: source.tolist()}
    if isinstance(source, np.ndarray) and source.ndim == 2:
        return {column: list(source)}
    if isinstance(source, str) or not isinstance(source, Sequence):
        raise ColumnError(
            "prompts come from a datasets.Dataset, a DataFrame, a Series, or a list of texts, token ids, conversations or dicts; "
            f"got {type(source).__name__}"
        )
    # A list of messages is one conversation, not rows with the columns "role" and "content".
    if is_conversation(source) and all(map(is_message, source)):
        return {column: [source]}
    if source and all(isinstance(item, Mapping) for item in source):
        # Rows of which some lack a key are refused instead of filled up: a made-up value would be trained on.
        names = list(dict.fromkeys(name for item in source for name in item))
        lacking = [(i, n) for i, item in enumerate(source) for n in names if n not in item]
        if lacking:
            raise ColumnError(f"item {lacking[0][0]} of the data lacks {shown(lacking[0][1])}, which others have")
        return {name: [item[name] for item in source] for name in names}
    return {column: source}


def _of_dataset(source: Any, column: str) -> Mapping[str, Sequence[Any]]:
    """Return the columns of a Dataset, or the one that ``data["prompt"]`` is."""
    if isinstance(source, Sequence):
        return {column: list(source)}
    streamed = not isinstance(source, Sized)
    if streamed:
        raise ColumnError("this dataset is streamed; give rows of it, e.g. list(data.take(1000))")
    return {name: source[name] for name in source.column_names}


def _of_frame(frame: Any) -> Mapping[str, Sequence[Any]]:
    if not frame.columns.is_unique:
        raise ColumnError(f"the data has two columns named {shown(str(frame.columns[frame.columns.duplicated()][0]))}")
    return {str(name): frame[name].tolist() for name in frame.columns}


def _of_one_length(columns: Mapping[str, Any]) -> Mapping[str, Sequence[Any]]:
    for name, values in columns.items():
        if isinstance(values, str) or not isinstance(values, Sized):
            raise ColumnError(
                f"the data's column {shown(name)} is {shown(values)}, where a dict of columns has a list. For one row, give "
                "a list of it: [{...}]"
            )
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) > 1:
        raise ColumnError(f"the data's columns differ in length: {sizes}")
    return columns


def question_of(
    prompt: Any, what: str, *, row: int = 0, columns: Mapping[str, Sequence[Any]] = {}, chat: bool = False,
    system: str | None = None,
) -> tuple[str, Any] | None:  # fmt: skip
    """Return the question to a tokenizer about a prompt, as (method, value); ``None`` for token ids.

    Args:
        prompt: a text, token ids, or a conversation.
        what: names it in a refusal.
        row: the row's number.
        columns: the others of the data, among which are tools and options of the chat template.
        chat: whether a text is put into the chat template, as the user's turn.
        system: the system message of a conversation that has none.

    Raises:
        OptionError: a message is none.
    """
    tools, options = (columns[name][row] if name in columns else None for name in (TOOLS, OPTIONS))
    if is_conversation(prompt):
        conversation = read_chat(prompt, what, tools, options)
    elif isinstance(prompt, str):
        if not chat:
            return "encode", prompt
        conversation = read_chat([{"role": "user", "content": prompt}], what, tools, options)
    # Token ids need no tokenizer.
    else:
        return None
    if system is None:
        check_system(columns[SYSTEM][row] if SYSTEM in columns else None, conversation["messages"], what)
    elif conversation["messages"][0]["role"] != SYSTEM:
        conversation["messages"].insert(0, {"role": SYSTEM, "content": system})
    return "encode_chat", conversation


def check_no_question(values: Mapping[str, Any], of: str) -> None:
    """Check that no other column has the prompt of a pair that has none of its own.

    Args:
        values: the row's values in the columns `QUESTIONS`.
        of: the pair's name in messages.

    Raises:
        OptionError: one has it by another name.
    """
    named = [name for name, value in values.items() if isinstance(value, (str, list, tuple, np.ndarray)) and len(value)]
    if named:
        raise OptionError(
            f"{of} has no prompt: its prompt would be what both responses begin with, and {' and '.join(named)} would be left "
            "out. Make a column prompt of them, or rename what is no part of it"
        )


def size_of(prompt: Any) -> int:
    """Return the bytes of a text or a conversation, or the number of token ids: at least as many as it has tokens."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    return sum(size_of(turn["content"] or "") for turn in read_messages(prompt, "")) if is_conversation(prompt) else len(prompt)


def is_token_ids(prompt: Any) -> bool:
    """Return whether a prompt is a list of whole numbers, at most `MOST_ROWS`: a longer range would be counted out."""
    if not isinstance(prompt, (Sequence, np.ndarray)) or isinstance(prompt, str):
        return False
    return len(prompt) <= MOST_ROWS and all(is_whole(token) for token in prompt)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Name the row in an error that a tokenizer or a template raises on it."""
    try:
        yield
    except OptionError as error:
        raise OptionError(f"{what}: {error}") from error


def foresee(tokenizer: Any, requests: Iterable[tuple[str, Any]]) -> None:
    """Tell a tokenizer the questions to come, as (method, value): one in another process gets all with one message."""
    tell = getattr(tokenizer, "foresee", None)
    if tell is not None:
        tell(list(requests))


def as_values(values: list[Any]) -> Any:
    """Keep the data's own values as they are: numbers as an array, everything else as objects."""
    numbers = all(isinstance(v, (bool, int, float, np.number)) for v in values)
    return np.asarray(values) if numbers else values
