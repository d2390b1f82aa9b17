"""Batches to learn from that nobody generates: demonstrations (``session.demonstrations``) and pairs (``session.pairs``).

=================================  =====================================================================================
what the data has                  what a batch has
=================================  =====================================================================================
``prompt``, ``completion``         a row per demonstration: prompt, response
``text``                           the same; the text's first token is the prompt
``prompt, chosen, rejected``       two rows per pair, the chosen one first: prompt, response, ``chosen`` (1 or 0), ``group``
``chosen, rejected``               the same; the prompt is what both begin with
``messages``, ``conversations``    the same as ``prompt`` and ``completion``: the last message, the assistant's, is learned
``tools``                          beside conversations: what the chat template is told of functions
``chat_template_kwargs``           beside conversations: options of the chat template, e.g. ``enable_thinking``
``chosen_x``, ``rejected_x``       each row's own ``x``, e.g. ``sign`` for `CostLoss`
any other                          repeated on both rows, e.g. ``margin`` for `BradleyTerry`; not those of names that hfsdk
                                   writes (``response``, ``group``, ``temperature``, ...): ``left_out`` names them
=================================  =====================================================================================

These are the formats of TRL's data sets; each text may be a conversation too. What tokens they become, with which end, is
:class:`hfsdk.core.texts.Texts`' to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeGuard, cast

import numpy as np

from hfsdk.core.batch import Batch
from hfsdk.core.builtin import SEQUENCES
from hfsdk.core.checks import Within, check_fields, is_whole, shown
from hfsdk.core.columns import COLUMNS
from hfsdk.core.conversations import (
    ASSISTANT,
    OPTIONS,
    SYSTEM,
    TOOLS,
    Chat,
    Message,
    check_answer,
    check_prompt,
    check_system,
    is_conversation,
    is_message,
    read_chat,
    read_messages,
)
from hfsdk.core.errors import ColumnError, OptionError
from hfsdk.core.pending import Client, ColumnRef
from hfsdk.core.prompt_data import QUESTIONS, as_values, check_no_question, columns_of, foresee, naming
from hfsdk.core.table import Ragged, Table
from hfsdk.core.texts import Encoded, Example, common_beginning, shared_beginning
from hfsdk.session.streams import RowStream, text_of
from hfsdk.session.tokenizer import Tokenizer

CONVERSATIONS = ("messages", "conversations")
"""Columns of whole conversations."""

Side = str | list[int] | list[Message]
"""A prompt or a response as it is given: a text, token ids, or messages."""


@dataclass(frozen=True, kw_only=True)
class ExampleOptions:
    """How a source becomes batches."""

    batch_size: Annotated[int, Within(1, 1_000_000)]
    seed: Annotated[int, Within(0, 2**63 - 1)] = 0
    max_tokens: Annotated[int, Within(2, 10**9)] | None = None
    """Longer examples lose the end of their response; ``None``: they are an error where they are longer than the context."""
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Asked:
    """One example before it is tokens."""

    what: str
    """Names it in a refusal."""
    prompt: str | list[int] | Chat | None
    """``None``: a text that is learned from its first token on."""
    response: str | list[int] | Message
    cut_back: bool = False
    """Whether nobody wrote the prompt, so that it may end before the token that its end and the response share."""

    def question(self) -> tuple[str, Any] | None:
        """Return what a tokenizer is asked, as (what, value); nothing of token ids."""
        prompt = self.prompt
        if isinstance(self.response, list):
            return ("encode", prompt) if isinstance(prompt, str) else ("encode_chat", prompt) if isinstance(prompt, dict) else None
        if prompt is None:
            return ("encode_example", Example(prompt=None, response=self.response, begins=True)) if self.response else None
        written = None if isinstance(prompt, list) else prompt
        return "encode_example", Example(prompt=written, response=self.response, cut_back=self.cut_back)

    def encoded(self, answer: Any) -> Encoded:
        """Return the token ids of prompt and response, given the tokenizer's answer."""
        if isinstance(self.response, list):
            whole = self.prompt is None
            start = self.response[:1] if whole else self.prompt if isinstance(self.prompt, list) else answer
            return start, self.response[1:] if whole else self.response
        start, response = answer if answer is not None else ([], [])
        if self.prompt is None:
            return response[:1], response[1:]
        return self.prompt if isinstance(self.prompt, list) else start, response

    @property
    def is_chat(self) -> bool:
        """Whether it goes into the chat template."""
        return isinstance(self.prompt, dict)


class _Examples(RowStream):
    def __init__(
        self, client: Client, tokenizer: Tokenizer | None, columns: Mapping[str, Sequence[Any]], options: ExampleOptions,
        context_tokens: int,
    ) -> None:  # fmt: skip
        self._client, self._tokenizer = client, tokenizer
        self.left_out = tuple(name for name in columns if self._taken(name, columns))
        self._data = {name: values for name, values in columns.items() if name not in self.left_out}
        self.options, self._context = options, context_tokens
        super().__init__(len(next(iter(columns.values()))), options.batch_size, options.seed, options.shuffle)
        if not self.num_rows:
            raise OptionError("the data has no rows; give at least one")
        for row in range(self.num_rows):
            self._asked(row)
        self.has_chats = self._first_chat()

    @staticmethod
    def _taken(name: str, columns: Mapping[str, Sequence[Any]]) -> bool:
        """Whether hfsdk writes a column of this name itself, so that the data's own cannot be passed on."""
        return name in COLUMNS and not (name == "prompt" and {"completion", "chosen"} & set(columns))

    def _told(self) -> tuple[str, Mapping[str, Sequence[Any]]]:
        return f"{type(self).__name__}|{self.options}", self._data

    def _asked(self, row: int) -> list[Asked]:
        """Return the examples of a row of the data.

        Raises:
            OptionError: it has none; names the row, and says what to do.
        """
        raise NotImplementedError

    def _of(self, row: int, name: str) -> Any:
        """Return what a column has in a row; ``None`` without such a column."""
        return self._data[name][row] if name in self._data else None

    def _one(self, prompt: Side, answer: Side, row: int, what: str, of: str) -> Asked:
        """Put a prompt and an answer together, of which either may be a text, token ids, or messages.

        Args:
            prompt: as it was read.
            answer: the same; messages may be the whole conversation.
            row: of the data.
            what: names the answer.
            of: names what both are of.
        """
        if _is_messages(answer):
            check_answer(answer[-1], what)
            prompt = _before(prompt, answer, what)
        check_system(self._of(row, SYSTEM), prompt if _is_messages(prompt) else [], of)
        response = answer[-1] if _is_messages(answer) else cast("str | list[int]", answer)
        if not _is_messages(prompt):
            return Asked(of, cast("str | list[int]", prompt), response)
        check_prompt(prompt, f"the prompt of {of}")
        return Asked(of, read_chat(prompt, f"the prompt of {of}", self._of(row, TOOLS), self._of(row, OPTIONS)), response)

    def _encoded(self, rows: Sequence[int]) -> list[list[Encoded]]:
        """Return the token ids of all examples of some rows."""
        examples = [self._asked(row) for row in rows]
        questions = [(one, one.question()) for of_row in examples for one in of_row]
        if self._tokenizer is not None:
            foresee(self._tokenizer, (question for _, question in questions if question is not None))
        answers = iter([self._answered(one, question) for one, question in questions])
        return [self._in_common(of_row, [next(answers) for _ in of_row]) for of_row in examples]

    def _answered(self, one: Asked, question: tuple[str, Any] | None) -> Encoded:
        if question is None:
            return self._ended(one, *one.encoded(None))
        if self._tokenizer is None:
            raise OptionError("texts need a tokenizer, which comes with a model; declare one first, e.g. session.actor(...)")
        with naming(one.what):
            return self._ended(one, *one.encoded(getattr(self._tokenizer, question[0])(question[1])))

    def _ended(self, one: Asked, prompt: list[int], response: list[int]) -> Encoded:
        """Put the end of a text behind token ids that have none; other responses have theirs."""
        if self._tokenizer is None or not isinstance(one.response, list):
            return prompt, response
        if self._tokenizer.turn_ends(chats=False).behind(response) == response:
            return prompt, response
        return prompt, self._tokenizer.turn_ends(chats=True).behind(response)  # asks the template too, which is slow

    @staticmethod
    def _in_common(asked: Sequence[Asked], found: list[Encoded]) -> list[Encoded]:
        """Give examples whose prompt was cut out of them the same one."""
        if not asked[0].cut_back:
            return found
        same = min(common_beginning(found[0][0], prompt) for prompt, _ in found)
        return [(prompt[:same], prompt[same:] + response) for prompt, response in found]

    def _checked(self, prompt: list[int], response: list[int], what: str) -> Encoded:
        if not prompt:
            raise OptionError(f"{what} has an empty prompt; give it at least one token")
        limit = min(self.options.max_tokens or self._context, self._context)
        if len(prompt) + len(response) > limit:
            tokens = f"{what} has {len(prompt)} + {len(response)} tokens; {limit} fit."
            if len(prompt) >= limit:
                more = f", or pass max_tokens of more than {len(prompt)}" if len(prompt) < self._context else ""
                raise OptionError(f"{tokens} Nothing of the response would be left to learn from: leave the row out{more}.")
            if self.options.max_tokens is None:
                raise OptionError(f"{tokens} Leave it out, or pass max_tokens=... to cut the ends of responses.")
            response = response[: limit - len(prompt)]
        return prompt, response

    def _batch(self, rows: Sequence[int], columns: dict[str, Any]) -> Batch:
        names = [[one.what for one in self._asked(row)] for row in rows]
        encoded = zip(names, self._encoded(rows), strict=True)
        examples = [self._checked(*ids, what) for whats, found in encoded for what, ids in zip(whats, found, strict=True)]
        tokens = {name: Ragged.of([e[k] for e in examples], np.int32) for k, name in enumerate(SEQUENCES)}
        given = {**tokens, **columns}
        lease = self._client.put(Table(given))
        return Batch(self._client, {name: ColumnRef(lease.call_id, name, lease=lease) for name in given}, len(examples))

    def _first_chat(self) -> bool:
        """Look at the first conversation, which asks the chat template: what it does not take is told where the data is given.

        Returns:
            Whether there is one.

        Raises:
            OptionError: the template does not take it.
        """
        row = next((row for row in range(self.num_rows) if any(one.is_chat for one in self._asked(row))), None)
        if row is not None and self._tokenizer is not None:
            self._encoded([row])
        return row is not None

    def __repr__(self) -> str:
        o = self.options
        what = f"{self.num_rows} rows in batches of {o.batch_size}, seed {o.seed}"
        return f"{type(self).__name__}({what}, next is batch {self.position})"


class Demonstrations(_Examples):
    """Texts to imitate (supervised fine-tuning), for ``actor.update(next(demonstrations), hf.CrossEntropy())``."""

    def __init__(
        self, client: Client, tokenizer: Tokenizer | None, source: Any, options: ExampleOptions, context_tokens: int
    ) -> None:
        columns = columns_of(source, "text")
        whole = next((name for name in CONVERSATIONS if name in columns), None)
        if whole is not None and not {"text", "completion"} & set(columns):
            columns = {
                "text": columns[whole],
                **{name: column for name, column in columns.items() if name not in (whole, "prompt")},
            }
        if "text" not in columns and not {"prompt", "completion"} <= set(columns):
            raise ColumnError(
                f"demonstrations have a column text, messages, or prompt and completion; the data has {', '.join(columns)}"
            )
        self._learned = ("prompt", "completion") if "completion" in columns else ("text",)
        super().__init__(client, tokenizer, columns, options, context_tokens)

    def rows(self, first: int, count: int) -> Batch:
        """Return the batch of ``count`` positions from ``first`` on; does not advance."""
        rows = [self.row_at(p) for p in range(first, first + count)]
        extra = {n: as_values([v[row] for row in rows]) for n, v in self._data.items() if n not in self._learned}
        return self._batch(rows, extra)

    def _asked(self, row: int) -> list[Asked]:
        of = f"row {row} of the data"
        if self._learned != ("text",):
            prompt, answer = (_side(self._data[name][row], f"the {name} of {of}") for name in self._learned)
            return [self._one(prompt, answer, row, f"the completion of {of}", of)]
        whole = _side(self._data["text"][row], of)
        if not _is_messages(whole):
            return [Asked(of, None, cast("str | list[int]", whole))]
        if len(whole) < 2 or whole[-1]["role"] != ASSISTANT:
            raise OptionError(
                f"messages of {of} are {shown(whole)}; to learn from, they are at least two, the last the assistant's"
            )
        return [self._one(whole[:-1], whole, row, f"the last message of {of}", of)]


class Pairs(_Examples):
    """Preferences: of two responses to one prompt, the chosen and the rejected one.

    For ``reward.update(next(pairs), hf.BradleyTerry())`` and ``hf.DPO().step(session.models, next(pairs))``. A batch of
    ``batch_size`` pairs has twice as many rows.
    """

    def __init__(
        self, client: Client, tokenizer: Tokenizer | None, source: Any, options: ExampleOptions, context_tokens: int
    ) -> None:
        columns = columns_of(source, "chosen")
        missing = [name for name in ("chosen", "rejected") if name not in columns]
        if missing:
            raise ColumnError(f"pairs have the columns chosen and rejected (and prompt); the data has {', '.join(columns)}")
        for one, other in (("chosen_", "rejected_"), ("rejected_", "chosen_")):
            alone = [n for n in columns if n.startswith(one) and other + n.removeprefix(one) not in columns]
            if alone:
                raise ColumnError(f"the data has a column {alone[0]} and no {other}{alone[0].removeprefix(one)}; give both")
        others = columns.keys() - {*COLUMNS, "prompt", "chosen", "rejected"}
        for name in sorted(others):
            if f"chosen_{name}" in columns:
                raise ColumnError(
                    f"the data has the columns chosen_{name} and {name}, which would be one in a batch; rename or leave out one of "
                    "them"
                )
        super().__init__(client, tokenizer, columns, options, context_tokens)

    @staticmethod
    def _taken(name: str, columns: Mapping[str, Sequence[Any]]) -> bool:
        own = name.removeprefix("chosen_").removeprefix("rejected_")
        if own != name:
            return own != "prompt" and own in (*COLUMNS, "chosen")
        return _Examples._taken(name, columns)

    def rows(self, first: int, count: int) -> Batch:
        """Return the batch of ``count`` pairs from ``first`` on, two rows each; does not advance."""
        rows = [self.row_at(p) for p in range(first, first + count)]
        columns: dict[str, Any] = {
            "chosen": np.tile(np.array([1.0, 0.0], dtype=np.float32), count), "group": np.repeat(np.arange(count), 2),
        }  # fmt: skip
        own = {name.removeprefix("chosen_") for name in self._data if name.startswith("chosen_")} - {"prompt"}
        for name in sorted(own):
            both = [self._data[f"{side}_{name}"] for side in ("chosen", "rejected")]
            columns[name] = as_values([side[row] for row in rows for side in both])
        shared = [n for n in self._data if n not in ("prompt", "chosen", "rejected") and not n.startswith(("chosen_", "rejected_"))]
        columns |= {name: as_values([self._data[name][row] for row in rows for _ in range(2)]) for name in shared}
        return self._batch(rows, columns)

    def _asked(self, row: int) -> list[Asked]:
        of = f"pair {row}"
        names = [f"the {side} response of {of}" for side in ("chosen", "rejected")]
        sides = [_side(self._data[side][row], what) for side, what in zip(("chosen", "rejected"), names, strict=True)]
        prompt = self._prompt(row, of)
        if prompt is not None and not (isinstance(prompt, str) and all(_is_messages(side) and len(side) > 1 for side in sides)):
            return [self._one(prompt, side, row, what, of) for side, what in zip(sides, names, strict=True)]
        if not all(_is_messages(side) and len(side) > 1 for side in sides):
            check_no_question({name: self._of(row, name) for name in QUESTIONS}, of)
        if all(_is_messages(side) for side in sides):
            for side, what in zip(sides, names, strict=True):
                check_answer(cast("Message", side[-1]), what)
            if sides[0][:-1] != sides[1][:-1] or not sides[0][:-1]:
                raise OptionError(self._no_prompt(of, [side[:-1] for side in sides] if sides[0][:-1] else sides))
            return [
                self._one(cast("list[Message]", side[:-1]), side, row, what, of) for side, what in zip(sides, names, strict=True)
            ]
        if type(sides[0]) is not type(sides[1]) or any(map(_is_messages, sides)):
            raise OptionError(
                f"{of} has responses of two kinds, {_brief(sides[0])} and {_brief(sides[1])}; give both as texts, or both as "
                "messages"
            )
        common = shared_beginning(*sides)
        if not common:
            raise OptionError(self._no_prompt(of, sides))
        rest = [cast("str | list[int]", side[len(common) :]) for side in sides]
        return [Asked(of, common, one, cut_back=isinstance(common, str)) for one in rest]

    def _prompt(self, row: int, of: str) -> Side | None:
        """Return the prompt that the data has for a pair; ``None`` where both responses begin with it.

        Raises:
            OptionError: they answer different ones.
        """
        if "prompt" in self._data:
            return _side(self._data["prompt"][row], f"the prompt of {of}")
        if "chosen_prompt" not in self._data:
            return None
        both = [
            _side(self._data[f"{side}_prompt"][row], f"the prompt of the {side} response of {of}")
            for side in ("chosen", "rejected")
        ]
        if both[0] != both[1]:
            raise OptionError(
                f"{of} has different prompts: {_brief(both[0])} and {_brief(both[1])}. Two responses can be compared where they "
                "answer the same one."
            )
        return both[0]

    @staticmethod
    def _no_prompt(of: str, sides: Sequence[Any]) -> str:
        return (
            f"{of} has no prompt: its texts begin with {_brief(sides[0])} and {_brief(sides[1])}. Give a column prompt, or texts "
            "that begin with the same one."
        )


def _side(value: Any, what: str) -> Side:
    """Return a text, token ids or messages as they are read.

    Raises:
        OptionError: it is something else.
    """
    if isinstance(value, Mapping) and is_message(value):
        value = [value]
    if is_conversation(value):
        return read_messages(value, what)
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple, np.ndarray)) and all(is_whole(token) for token in value):
        return [int(token) for token in value]
    raise OptionError(f"{what} is {shown(value)}; examples are texts or token ids, or lists of messages")


def _is_messages(side: Any) -> TypeGuard[list[Message]]:
    return isinstance(side, list) and len(side) > 0 and isinstance(side[0], dict)


def _before(prompt: Side, answer: list[Message], what: str) -> list[Message]:
    """Return what an answer in messages answers: its prompt, or what the conversation has before it.

    Raises:
        OptionError: both say something else, or neither says anything.
    """
    earlier = answer[:-1]
    if _is_messages(prompt) and earlier and earlier != prompt:
        raise OptionError(
            f"{what} has {len(answer)} messages beside a prompt; one answer is learned. Put the earlier ones into the prompt, or "
            "leave the column prompt out where they begin with it"
        )
    if not _is_messages(prompt) and not earlier:
        raise OptionError(
            f"{what} is a message, and its prompt is {_brief(prompt)}; give both as messages, "
            "[{'role': 'user', 'content': ...}], or both as texts"
        )
    return earlier or cast("list[Message]", prompt)


def _brief(value: Any) -> str:
    text = text_of(value)
    return text if len(text) <= 40 else text[:37] + "..."
