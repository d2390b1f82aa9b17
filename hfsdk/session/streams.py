"""``RowStream``: batches of a data set's rows in a fixed, repeatable, endless order; what streams of prompts and examples share.

``StreamPlaces``: how far the streams of a session are.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, TypeGuard, cast

import numpy as np

from hfsdk.core.batch import Batch
from hfsdk.core.builtin import SEQUENCES
from hfsdk.core.checks import Count, Index, Within, check_fields, checked, is_whole, shown
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
from hfsdk.core.prompt_data import (
    NO_UTF_8,
    QUESTIONS,
    as_values,
    check_no_question,
    columns_of,
    foresee,
    naming,
    question_of,
    read_source,
    size_of,
)
from hfsdk.core.table import Array, Ragged, Table
from hfsdk.core.texts import Encoded, Example, common_beginning, shared_beginning
from hfsdk.session.tokenizer import Tokenizer

FINGERPRINTED_ROWS = 100_000
"""Rows of the data, evenly spaced, that a stream's fingerprint is made of; of smaller data all."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def text_of(value: object) -> str:
    """Return the ``repr`` of a value of the user's data, or its class's name where that raises."""
    try:
        return repr(value)
    except Exception:  # the user's own object
        return type(value).__name__


def whole_text_of(value: object) -> str:
    """Return the same of all that an array holds, whose ``repr`` leaves numbers out."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.tolist()}"
    return text_of(value)


class RowStream(ABC):
    """Position p belongs to pass ``p // num_rows``; each pass has an order of its own, which depends on the seed alone.

    Attributes:
        position: number of the batch that ``next`` gives.
        batch_size: rows of the data per batch.
        seed: the seed of the order.
        num_rows: rows of the data.
    """

    _listener: Callable[[Batch], object] | None = None
    """Is given every batch that ``next`` gives; ``None``: nobody is."""

    def __init__(self, num_rows: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.num_rows, self.position = num_rows, 0
        self.batch_size, self.seed, self._shuffle = batch_size, seed, shuffle
        self._order = lru_cache(maxsize=4)(self._order_of_pass)

    def __getstate__(self) -> dict[str, Any]:
        """Travel without what is computed again."""
        return {name: value for name, value in vars(self).items() if name not in ("_order", "_listener")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._order = lru_cache(maxsize=4)(self._order_of_pass)

    @abstractmethod
    def rows(self, first: int, count: int) -> Batch:
        """Return the batch of ``count`` positions from ``first`` on; does not advance."""

    @abstractmethod
    def _identity(self) -> tuple[str, Mapping[str, Sequence[Any]]]:
        """Return the stream's identity: its options as a text, and the columns of its data."""

    @cached_property
    def _fingerprint(self) -> str:
        """A hash of the data and the options, under which the position is saved."""
        options, columns = self._identity()
        digest = hashlib.sha256(f"{options}|{self.num_rows}|{sorted(columns)}".encode(errors="surrogatepass"))
        for row in range(0, self.num_rows, -(-self.num_rows // FINGERPRINTED_ROWS)):
            for name in sorted(columns):
                text = _ADDRESS.sub("", whole_text_of(columns[name][row]))  # which is another one in another process
                digest.update(text.encode(errors="surrogatepass") + b"\0")
        return digest.hexdigest()[:16]

    @checked
    def __getitem__(self, k: Index) -> Batch:
        """Return batch number ``k``; the same one every time."""
        return self.rows(k * self.batch_size, self.batch_size)

    def __next__(self) -> Batch:
        """Return the next batch and advance."""
        batch = self[self.position]
        self.position += 1
        if self._listener is not None:
            self._listener(batch)
        return batch

    def __iter__(self) -> Iterator[Batch]:
        """Give ``len(stream)`` batches, one pass over the data, from the stream's place on; advances like ``next``."""
        return (next(self) for _ in range(len(self)))

    def __len__(self) -> int:
        """Return the number of batches in one pass over the data (the last one runs into the next pass)."""
        return -(-self.num_rows // self.batch_size)

    def row_at(self, position: int) -> int:
        """Return the row of the data at a position of the stream."""
        turn, place = divmod(position, self.num_rows)
        return int(self._order(turn)[place])

    def _order_of_pass(self, turn: int) -> Array:
        if not self._shuffle:
            return np.arange(self.num_rows)
        prefix = f"{self.seed}|{turn}|".encode()
        keys = [hashlib.blake2b(prefix + str(row).encode(), digest_size=8).digest() for row in range(self.num_rows)]
        return np.array(sorted(range(self.num_rows), key=keys.__getitem__), dtype=np.int64)


def streams_of(algorithm: Any, prompts: RowStream) -> list[RowStream]:
    """Return the streams that a step takes from: its prompts', and those that the algorithm holds, e.g. ``SafeRLHF.ptx``."""
    return [prompts, *(stream for stream in getattr(algorithm, "__dict__", {}).values() if isinstance(stream, RowStream))]


class StreamPlaces:
    """How far a session's streams are, also those of a checkpoint that have not been made here yet."""

    def __init__(self) -> None:
        self._latest: dict[str, RowStream] = {}
        """The latest stream of each fingerprint: streams that were made alike share one."""
        self._all: weakref.WeakSet[RowStream] = weakref.WeakSet()
        self._waiting: dict[str, int] = {}
        """Places, by fingerprint, of streams that are not made yet."""
        self._loaded: frozenset[str] = frozenset()
        """Fingerprints of those that the last checkpoint had."""

    def add(self, stream: RowStream) -> None:
        """Put a new stream where a checkpoint had one like it, and keep its place from now on."""
        stream.position = self._waiting.pop(stream._fingerprint, 0)
        self._latest[stream._fingerprint] = stream
        self._all.add(stream)

    def adopt(self, stream: RowStream) -> None:
        """Take a stream as the latest of those made alike, where it is; from now on its place is the one that is shared."""
        self._latest[stream._fingerprint] = stream
        self._all.add(stream)

    def move(self, positions: Mapping[str, int]) -> None:
        """Put streams where another process has taken them."""
        for key, place in positions.items():
            if key in self._latest:
                self._latest[key].position = place
            else:
                self._waiting[key] = place

    def put(self, stream: RowStream, positions: Mapping[str, int]) -> None:
        """Put a stream where the ``positions`` have one like it."""
        stream.position = positions.get(stream._fingerprint, stream.position)

    def positions(self) -> dict[str, int]:
        """Return the places by fingerprint."""
        return {**self._waiting, **{key: stream.position for key, stream in self._latest.items()}}

    def of_each(self) -> weakref.WeakKeyDictionary[RowStream, int]:
        """Return every stream's own place: those made alike have one fingerprint, and each a place."""
        return weakref.WeakKeyDictionary({stream: stream.position for stream in self._all})

    def take(self, positions: Mapping[str, int]) -> None:
        """Put the streams where a checkpoint has them."""
        self._waiting, self._loaded = dict(positions), frozenset(positions)
        for key, stream in self._latest.items():
            stream.position = self._waiting.pop(key, stream.position)

    def passed_over(self, stream: RowStream) -> int | None:
        """Return how far another stream was in the last checkpoint, one that nobody has made since, where it had none like this."""
        return None if stream._fingerprint in self._loaded else max(self._waiting.values(), default=0) or None

    def go_back(self, positions: Mapping[str, int], of_each: Mapping[RowStream, int]) -> None:
        """Put the streams where they were, by fingerprint and each; one that was made since begins there too."""
        self._waiting = {key: place for key, place in positions.items() if key not in self._latest}
        for stream in self._all:
            stream.position = of_each.get(stream, positions.get(stream._fingerprint, 0))


# -- batches to learn from that nobody generates: demonstrations (``session.demonstrations``) and pairs (``session.pairs``)

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
class UnencodedExample:
    """One example before it is tokens."""

    what: str
    """Names it in a refusal."""
    prompt: str | list[int] | Chat | None
    """The prompt; ``None`` for a text that is learned from its first token on."""
    response: str | list[int] | Message
    cut_back: bool = False
    """Whether nobody wrote the prompt, so that it may end before the token that its end and the response share."""

    def question(self) -> tuple[str, Any] | None:
        """Return the question to a tokenizer, as (what, value); ``None`` for token ids."""
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
    """Batches to learn from that nobody generates: what they have follows from the columns of the data.

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

    These are the formats of TRL's data sets; each text may be a conversation too. :class:`hfsdk.core.texts.Texts` says what
    tokens they become, and with which end.
    """

    def __init__(
        self, client: Client, tokenizer: Tokenizer | None, columns: Mapping[str, Sequence[Any]], options: ExampleOptions,
        context_tokens: int,
    ) -> None:  # fmt: skip
        self._client, self._tokenizer = client, tokenizer
        self.left_out = tuple(name for name in columns if self._is_reserved(name, columns))
        self._data = {name: values for name, values in columns.items() if name not in self.left_out}
        self.options, self._context = options, context_tokens
        super().__init__(len(next(iter(columns.values()))), options.batch_size, options.seed, options.shuffle)
        if not self.num_rows:
            raise OptionError("the data has no rows; give at least one")
        for row in range(self.num_rows):
            self._unencoded(row)
        self.has_chats = self._first_chat()

    @staticmethod
    def _is_reserved(name: str, columns: Mapping[str, Sequence[Any]]) -> bool:
        """Whether hfsdk writes a column of this name itself, so that the data's own cannot be passed on."""
        return name in COLUMNS and not (name == "prompt" and {"completion", "chosen"} & set(columns))

    def _identity(self) -> tuple[str, Mapping[str, Sequence[Any]]]:
        return f"{type(self).__name__}|{self.options}", self._data

    def _unencoded(self, row: int) -> list[UnencodedExample]:
        """Return the examples of a row of the data.

        Raises:
            OptionError: it has none; names the row, and says what to do.
        """
        raise NotImplementedError

    def _of(self, row: int, name: str) -> Any:
        """Return a column's value in a row; ``None`` without such a column."""
        return self._data[name][row] if name in self._data else None

    def _unencoded_of(self, prompt: Side, answer: Side, row: int, what: str, of: str) -> UnencodedExample:
        """Put a prompt and an answer together, of which either may be a text, token ids, or messages.

        Args:
            prompt: the prompt as it was read.
            answer: the same; messages may be the whole conversation.
            row: the row's number in the data.
            what: names the answer.
            of: names what both are of.
        """
        if _is_messages(answer):
            check_answer(answer[-1], what)
            prompt = _before(prompt, answer, what)
        check_system(self._of(row, SYSTEM), prompt if _is_messages(prompt) else [], of)
        response = answer[-1] if _is_messages(answer) else cast("str | list[int]", answer)
        if not _is_messages(prompt):
            return UnencodedExample(of, cast("str | list[int]", prompt), response)
        check_prompt(prompt, f"the prompt of {of}")
        return UnencodedExample(
            of, read_chat(prompt, f"the prompt of {of}", self._of(row, TOOLS), self._of(row, OPTIONS)), response
        )

    def _encoded(self, rows: Sequence[int]) -> list[list[Encoded]]:
        """Return the token ids of all examples of some rows."""
        examples = [self._unencoded(row) for row in rows]
        questions = [(example, example.question()) for of_row in examples for example in of_row]
        if self._tokenizer is not None:
            foresee(self._tokenizer, (question for _, question in questions if question is not None))
        answers = iter([self._answered(example, question) for example, question in questions])
        return [self._in_common(of_row, [next(answers) for _ in of_row]) for of_row in examples]

    def _answered(self, example: UnencodedExample, question: tuple[str, Any] | None) -> Encoded:
        if question is None:
            return self._ended(example, *example.encoded(None))
        if self._tokenizer is None:
            raise OptionError("texts need a tokenizer, which comes with a model; declare one first, e.g. session.actor(...)")
        with naming(example.what):
            return self._ended(example, *example.encoded(getattr(self._tokenizer, question[0])(question[1])))

    def _ended(self, example: UnencodedExample, prompt: list[int], response: list[int]) -> Encoded:
        """Put the end of a text behind token ids that have none; other responses have theirs."""
        if self._tokenizer is None or not isinstance(example.response, list):
            return prompt, response
        if self._tokenizer.turn_ends(chats=False).behind(response) == response:
            return prompt, response
        return prompt, self._tokenizer.turn_ends(chats=True).behind(response)  # asks the template too, which is slow

    @staticmethod
    def _in_common(examples: Sequence[UnencodedExample], encoded: list[Encoded]) -> list[Encoded]:
        """Give examples whose prompt was cut out of them the same one."""
        if not examples[0].cut_back:
            return encoded
        same = min(common_beginning(encoded[0][0], prompt) for prompt, _ in encoded)
        return [(prompt[:same], prompt[same:] + response) for prompt, response in encoded]

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
        names = [[example.what for example in self._unencoded(row)] for row in rows]
        encoded = zip(names, self._encoded(rows), strict=True)
        examples = [self._checked(*ids, what) for whats, token_ids in encoded for what, ids in zip(whats, token_ids, strict=True)]
        tokens = {name: Ragged.of([e[k] for e in examples], np.int32) for k, name in enumerate(SEQUENCES)}
        all_columns = {**tokens, **columns}
        lease = self._client.put(Table(all_columns))
        return Batch(self._client, {name: ColumnRef(lease.call_id, name, lease=lease) for name in all_columns}, len(examples))

    def _first_chat(self) -> bool:
        """Encode the first conversation: what the chat template refuses is raised where the data is given.

        Returns:
            Whether there is one.

        Raises:
            OptionError: the template does not take it.
        """
        row = next((row for row in range(self.num_rows) if any(example.is_chat for example in self._unencoded(row))), None)
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

    def _unencoded(self, row: int) -> list[UnencodedExample]:
        of = f"row {row} of the data"
        if self._learned != ("text",):
            prompt, answer = (_side(self._data[name][row], f"the {name} of {of}") for name in self._learned)
            return [self._unencoded_of(prompt, answer, row, f"the completion of {of}", of)]
        whole = _side(self._data["text"][row], of)
        if not _is_messages(whole):
            return [UnencodedExample(of, None, cast("str | list[int]", whole))]
        if len(whole) < 2 or whole[-1]["role"] != ASSISTANT:
            raise OptionError(
                f"messages of {of} are {shown(whole)}; to learn from, they are at least two, the last the assistant's"
            )
        return [self._unencoded_of(whole[:-1], whole, row, f"the last message of {of}", of)]


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
        for side, other in (("chosen_", "rejected_"), ("rejected_", "chosen_")):
            alone = [n for n in columns if n.startswith(side) and other + n.removeprefix(side) not in columns]
            if alone:
                raise ColumnError(f"the data has a column {alone[0]} and no {other}{alone[0].removeprefix(side)}; give both")
        others = columns.keys() - {*COLUMNS, "prompt", "chosen", "rejected"}
        for name in sorted(others):
            if f"chosen_{name}" in columns:
                raise ColumnError(
                    f"the data has the columns chosen_{name} and {name}, which would be one in a batch; rename or leave out one of "
                    "them"
                )
        super().__init__(client, tokenizer, columns, options, context_tokens)

    @staticmethod
    def _is_reserved(name: str, columns: Mapping[str, Sequence[Any]]) -> bool:
        own = name.removeprefix("chosen_").removeprefix("rejected_")
        if own != name:
            return own != "prompt" and own in (*COLUMNS, "chosen")
        return _Examples._is_reserved(name, columns)

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

    def _unencoded(self, row: int) -> list[UnencodedExample]:
        of = f"pair {row}"
        names = [f"the {side} response of {of}" for side in ("chosen", "rejected")]
        sides = [_side(self._data[side][row], what) for side, what in zip(("chosen", "rejected"), names, strict=True)]
        prompt = self._prompt(row, of)
        if prompt is not None and not (isinstance(prompt, str) and all(_is_messages(side) and len(side) > 1 for side in sides)):
            return [self._unencoded_of(prompt, side, row, what, of) for side, what in zip(sides, names, strict=True)]
        if not all(_is_messages(side) and len(side) > 1 for side in sides):
            check_no_question({name: self._of(row, name) for name in QUESTIONS}, of)
        if all(_is_messages(side) for side in sides):
            for side, what in zip(sides, names, strict=True):
                check_answer(cast("Message", side[-1]), what)
            if sides[0][:-1] != sides[1][:-1] or not sides[0][:-1]:
                raise OptionError(self._no_prompt(of, [side[:-1] for side in sides] if sides[0][:-1] else sides))
            return [
                self._unencoded_of(cast("list[Message]", side[:-1]), side, row, what, of)
                for side, what in zip(sides, names, strict=True)
            ]
        if type(sides[0]) is not type(sides[1]) or any(map(_is_messages, sides)):
            raise OptionError(
                f"{of} has responses of two kinds, {_brief(sides[0])} and {_brief(sides[1])}; give both as texts, or both as "
                "messages"
            )
        # nobody wrote the prompt: it is what both texts, or lists of token ids, begin with
        common = shared_beginning(*sides)
        if not common:
            raise OptionError(self._no_prompt(of, sides))
        rest = [cast("str | list[int]", side[len(common) :]) for side in sides]
        return [UnencodedExample(of, common, response, cut_back=isinstance(common, str)) for response in rest]

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
    """Return the messages that an answer answers: its prompt, or the conversation before it.

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


# -- batches of prompts in a fixed, repeatable order

CHAT_OVERHEAD_BYTES = 512
"""Allowance for a chat template when a prompt is pre-checked by its number of bytes."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How a source becomes prompts."""

    column: str = "text"
    batch_size: Annotated[int, Within(1, 1_000_000)]
    seed: Annotated[int, Within(0, 2**63 - 1)] = 0
    max_prompt_tokens: Count | None = None
    """Longer prompts keep their end; ``None``: they are an error."""
    chat: bool = False
    """Put each text into the model's chat template, as the user's turn; conversations go there in any case."""
    system: str | None = None
    """The system message of those that have none of their own."""
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.system is not None and not self.chat:
            raise OptionError("a system message needs the chat template; pass chat=True")


class PromptStream(RowStream):
    """Prompts in batches, in a fixed, repeatable order. Made by ``session.prompts(...)``.

    The stream is endless: position p is prompt ``p % num_prompts`` of epoch ``p // num_prompts``, each epoch in an order of its
    own that depends on the seed alone. ``prompts[k]`` are positions k * batch_size to (k + 1) * batch_size, whenever it is
    asked; ``next(prompts)`` gives them one after the other, and its place is saved with the session. ``for batch in prompts``
    gives ``len(prompts)`` of them from that place on: one pass over the data.

    A batch has the columns prompt (token ids), position (its place in the stream, part of each sample's seed), and the data's
    other columns, which are passed on to reward functions.

    Attributes:
        position: number of the batch that ``next`` gives.
        left_out: columns of the data that are not passed on, because hfsdk writes columns of these names.
        has_chats: whether there are conversations among the prompts.
    """

    def __init__(
        self, client: Client, tokenizer: Tokenizer | None, source: Any, options: PromptOptions, context_tokens: int
    ) -> None:
        self._client, self._tokenizer, self.options, self._context = client, tokenizer, options, context_tokens
        prompts, extra = read_source(source, options.column)
        self._prompts = prompts
        self._extra = {name: values for name, values in extra.items() if name not in COLUMNS}
        self.left_out = tuple(name for name in extra if name in COLUMNS)
        super().__init__(len(prompts), options.batch_size, options.seed, options.shuffle)
        self._ids: dict[int, list[int]] = {}
        self._check_rows()
        self.has_chats = self._first_chat()

    # -- batches

    @property
    def num_prompts(self) -> int:
        """Number of prompts in the data."""
        return self.num_rows

    def rows(self, first: int, count: int) -> Batch:
        """Return the batch of ``count`` positions from ``first`` on; does not advance."""
        positions = np.arange(first, first + count, dtype=np.int64)
        rows = [self.row_at(int(p)) for p in positions]
        self._foresee([row for row in rows if row not in self._ids])
        columns: dict[str, Any] = {
            "prompt": Ragged.of([self.token_ids(row) for row in rows], np.int32), "position": positions,
        }  # fmt: skip
        columns |= {name: as_values([values[row] for row in rows]) for name, values in self._extra.items()}
        lease = self._client.put(Table(columns))  # as it is: from_columns would make lists of numbers ragged
        return Batch(self._client, {name: ColumnRef(lease.call_id, name, lease=lease) for name in columns}, count)

    def token_ids(self, row: int) -> list[int]:
        """Return the token ids of a row's prompt, truncated on the left where the options say so.

        Raises:
            OptionError: the prompt is empty, or as long as the context.
        """
        if row not in self._ids:
            self._ids[row] = self._encode(row)
        return self._ids[row]

    def _identity(self) -> tuple[str, Mapping[str, Sequence[Any]]]:
        return str(self.options), {"prompt": self._prompts, **self._extra}

    def __repr__(self) -> str:
        o = self.options
        what = f"{self.num_prompts} prompts in batches of {o.batch_size}, seed {o.seed}"
        return f"PromptStream({what}, next is batch {self.position})"

    # -- inside

    def _foresee(self, rows: Sequence[int]) -> None:
        """Announce the prompts that will be encoded, so that a tokenizer elsewhere answers for all at once."""
        if self._tokenizer is not None:
            foresee(self._tokenizer, (question for row in rows if (question := self._question(row)) is not None))

    def _question(self, row: int) -> tuple[str, Any] | None:
        return question_of(
            self._prompts[row], f"prompt {row} of the data", row=row, columns=self._extra, chat=self.options.chat,
            system=self.options.system,
        )  # fmt: skip

    def _encode(self, row: int) -> list[int]:
        prompt, options = self._prompts[row], self.options
        question = self._question(row)
        if question is None:
            wrong = [t for t in prompt if not is_whole(t)]
            if wrong:
                raise OptionError(f"prompt {row} of the data has {shown(wrong[0])} among its token ids; they are whole numbers")
            ids = [int(t) for t in prompt]
        elif self._tokenizer is None:
            raise OptionError("texts need a tokenizer, which comes with the actor's model; call session.actor(...) first")
        else:
            with naming(f"prompt {row} of the data"):
                ids = getattr(self._tokenizer, question[0])(question[1])
        if not ids:
            raise OptionError(f"prompt {row} of the data is empty; leave such rows out")
        if options.max_prompt_tokens is not None:
            ids = ids[-options.max_prompt_tokens :]
        if len(ids) >= self._context:
            raise OptionError(
                f"prompt {row} of the data has {len(ids)} tokens; the actor's context is {self._context}, prompt and response "
                "together. Leave it out, or pass max_prompt_tokens=... to keep each prompt's last tokens."
            )
        return ids

    def _is_chat(self, row: int) -> bool:
        prompt = self._prompts[row]
        return is_conversation(prompt) or (isinstance(prompt, str) and self.options.chat)

    def _first_chat(self) -> bool:
        """Encode the first conversation: what the chat template refuses is raised where the data is given.

        Returns:
            Whether there is one.

        Raises:
            OptionError: the template does not take it.
        """
        row = next((row for row in range(len(self._prompts)) if self._is_chat(row)), None)
        if row is not None and self._tokenizer is not None:
            self._encode(row)
        return row is not None

    def _check_rows(self) -> None:
        """Find empty prompts, and encode those that could be too long: a token is at least one byte."""
        if not self._prompts:
            raise OptionError("the data has no prompts; give at least one")
        long: list[int] = []
        for row, prompt in enumerate(self._prompts):
            if len(prompt) == 0 or (isinstance(prompt, str) and not prompt.strip()):
                raise OptionError(f"prompt {row} of the data is empty ({shown(prompt)}); leave such rows out")
            # fewer bytes than this cannot be too many tokens, so that most prompts are encoded when their batch is asked for
            limit = self._context - (CHAT_OVERHEAD_BYTES if self._is_chat(row) else 2)
            try:
                size = size_of(prompt)
            except UnicodeEncodeError as error:
                raise OptionError(f"prompt {row} of the data {NO_UTF_8}") from error
            if size >= limit and self._tokenizer is not None and self.options.max_prompt_tokens is None:
                long.append(row)
        # a tokenizer near the cluster answers for all of them in one message
        self._foresee(long)
        for row in long:
            self._encode(row)
        most = self.options.max_prompt_tokens
        if most is not None and most >= self._context:
            raise OptionError(f"max_prompt_tokens={most} leaves no room in the actor's context of {self._context}")
