"""Batches to learn from that nobody generates: demonstrations (``session.demonstrations``) and pairs (``session.pairs``).

=================================  =====================================================================================
what the data has                  what a batch has
=================================  =====================================================================================
``prompt``, ``completion``         a row per demonstration: prompt, response (the end-of-sequence token behind it)
``text``                           the same; the text's first token is the prompt
``prompt, chosen, rejected``       two rows per pair, the chosen one first: prompt, response, ``chosen`` (1 or 0), ``group``
``chosen, rejected``               the same; the prompt is the text both begin with
``messages``                       the same as ``prompt`` and ``completion``: the last message, the assistant's, is learned
``chosen_x``, ``rejected_x``       each row's own ``x``, e.g. ``sign`` for `CostLoss`
any other                          repeated on both rows, e.g. ``margin`` for `BradleyTerry`; not those of names that hfsdk
                                   writes (``response``, ``group``, ``temperature``, ...): ``left_out`` names them
=================================  =====================================================================================

These are the formats of TRL's data sets; each text may be a conversation too, whose prompt goes into the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from hfsdk.core.batch import Batch
from hfsdk.core.builtin import SEQUENCES
from hfsdk.core.checks import Within, check_fields, is_whole, shown
from hfsdk.core.columns import COLUMNS
from hfsdk.core.errors import ColumnError, OptionError
from hfsdk.core.pending import Client, ColumnRef
from hfsdk.core.prompt_data import as_values, columns_of, foresee, is_conversation
from hfsdk.core.table import Ragged, Table
from hfsdk.session.streams import RowStream, text_of
from hfsdk.session.tokenizer import Tokenizer

Example = tuple[list[int], list[int]]
"""Token ids of prompt and response."""


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


class _Examples(RowStream):
    def __init__(
        self, client: Client, tokenizer: Tokenizer | None, eos: Sequence[int], columns: Mapping[str, Sequence[Any]],
        options: ExampleOptions, context_tokens: int,
    ) -> None:  # fmt: skip
        self._client, self._tokenizer, self._eos = client, tokenizer, list(eos[:1])
        self.left_out = tuple(name for name in columns if self._taken(name, columns))
        self._data = {name: values for name, values in columns.items() if name not in self.left_out}
        self.options, self._context = options, context_tokens
        super().__init__(len(next(iter(columns.values()))), options.batch_size, options.seed, options.shuffle)
        if not self.num_rows:
            raise OptionError("the data has no rows; give at least one")

    @staticmethod
    def _taken(name: str, columns: Mapping[str, Sequence[Any]]) -> bool:
        """Whether hfsdk writes a column of this name itself, so that the data's own cannot be passed on."""
        return name in COLUMNS and not (name == "prompt" and {"completion", "chosen"} & set(columns))

    def _told(self) -> tuple[str, Mapping[str, Sequence[Any]]]:
        return f"{type(self).__name__}|{self.options}", self._data

    def _ids(self, value: Any, what: str) -> list[int]:
        chat = is_conversation(value)
        if not chat and not isinstance(value, str):
            if isinstance(value, (list, tuple, np.ndarray)) and all(is_whole(token) for token in value):
                return [int(token) for token in value]
            raise OptionError(f"{what} is {shown(value)}; examples are texts, token ids or lists of messages")
        if self._tokenizer is None:
            raise OptionError("texts need a tokenizer, which comes with a model; declare one first, e.g. session.actor(...)")
        if chat and len(value) > 1 and value[-1]["role"] == "assistant":
            raise OptionError(
                f"{what} is {shown(value)}; a prompt ends before the assistant's message, and a response is that alone"
            )
        asked = self._asked(value)
        return [] if asked is None else getattr(self._tokenizer, asked[0])(asked[1])

    def _foresee(self, rows: Sequence[int]) -> None:
        """Say which texts of these rows will be encoded: a tokenizer elsewhere is then asked once."""
        if self._tokenizer is not None:
            texts = (value for row in rows for value, _ in self._texts(row))
            foresee(self._tokenizer, (asked for value in texts if (asked := self._asked(value)) is not None))

    @staticmethod
    def _asked(value: Any) -> tuple[str, Any] | None:
        """Return what the tokenizer is asked of a value; nothing of token ids and of an empty text."""
        if not is_conversation(value):
            return ("encode", value) if isinstance(value, str) and value else None
        alone = len(value) == 1 and value[0]["role"] == "assistant"
        return ("encode", value[0]["content"]) if alone else ("encode_chat", [dict(turn) for turn in value])

    def _texts(self, row: int) -> list[tuple[Any, str]]:
        """Return the texts of a row, or their token ids, each with its name."""
        raise NotImplementedError

    def _example(self, prompt: list[int], response: list[int], what: str) -> Example:
        if not prompt:
            raise OptionError(f"{what} has an empty prompt; give it at least one token")
        response = response + [token for token in self._eos if response[-1:] != [token]]
        limit = min(self.options.max_tokens or self._context, self._context)
        if len(prompt) + len(response) > limit:
            if self.options.max_tokens is None or len(prompt) >= limit:
                raise OptionError(
                    f"{what} has {len(prompt)} + {len(response)} tokens; {limit} fit. Leave it out, or pass max_tokens=... to cut "
                    "the ends of responses."
                )
            response = response[: limit - len(prompt)]
        return prompt, response

    def _batch(self, examples: Sequence[Example], columns: dict[str, Any]) -> Batch:
        tokens = {name: Ragged.of([e[k] for e in examples], np.int32) for k, name in enumerate(SEQUENCES)}
        given = {**tokens, **columns}
        lease = self._client.put(Table(given))
        return Batch(self._client, {name: ColumnRef(lease.call_id, name, lease=lease) for name in given}, len(examples))

    def __repr__(self) -> str:
        o = self.options
        what = f"{self.num_rows} rows in batches of {o.batch_size}, seed {o.seed}"
        return f"{type(self).__name__}({what}, next is batch {self.position})"


class Demonstrations(_Examples):
    """Texts to imitate (supervised fine-tuning), for ``actor.update(next(demonstrations), hf.CrossEntropy())``."""

    def __init__(
        self, client: Client, tokenizer: Tokenizer | None, eos: Sequence[int], source: Any, options: ExampleOptions,
        context_tokens: int,
    ) -> None:  # fmt: skip
        columns = columns_of(source, "text")
        if "messages" in columns and not {"text", "completion"} & set(columns):
            columns = _last_message_apart(columns)
        if "text" not in columns and not {"prompt", "completion"} <= set(columns):
            raise ColumnError(
                f"demonstrations have a column text, messages, or prompt and completion; the data has {', '.join(columns)}"
            )
        super().__init__(client, tokenizer, eos, columns, options, context_tokens)

    def rows(self, first: int, count: int) -> Batch:
        """Return the batch of ``count`` positions from ``first`` on; does not advance."""
        rows = [self.row_at(p) for p in range(first, first + count)]
        self._foresee(rows)
        examples = [self._demonstration(row) for row in rows]
        taken = ("prompt", "completion") if "completion" in self._data else ("text",)
        extra = {n: as_values([v[row] for row in rows]) for n, v in self._data.items() if n not in taken}
        return self._batch(examples, extra)

    def _demonstration(self, row: int) -> Example:
        what = f"row {row} of the data"
        ids = [self._ids(value, name) for value, name in self._texts(row)]
        return self._example(ids[0], ids[1], what) if len(ids) == 2 else self._example(ids[0][:1], ids[0][1:], what)

    def _texts(self, row: int) -> list[tuple[Any, str]]:
        what = f"row {row} of the data"
        if "completion" not in self._data:
            return [(self._data["text"][row], what)]
        return [(self._data[name][row], f"the {name} of {what}") for name in ("prompt", "completion")]


class Pairs(_Examples):
    """Preferences: of two responses to one prompt, the chosen and the rejected one.

    For ``reward.update(next(pairs), hf.BradleyTerry())`` and ``hf.DPO().step(session.models, next(pairs))``. A batch of
    ``batch_size`` pairs has twice as many rows.
    """

    def __init__(
        self, client: Client, tokenizer: Tokenizer | None, eos: Sequence[int], source: Any, options: ExampleOptions,
        context_tokens: int,
    ) -> None:  # fmt: skip
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
        super().__init__(client, tokenizer, eos, columns, options, context_tokens)
        for row in range(self.num_rows):
            self._prompt(row)

    @staticmethod
    def _taken(name: str, columns: Mapping[str, Sequence[Any]]) -> bool:
        own = name.removeprefix("chosen_").removeprefix("rejected_")
        if own != name:
            return own != "prompt" and own in (*COLUMNS, "chosen")
        return _Examples._taken(name, columns)

    def rows(self, first: int, count: int) -> Batch:
        """Return the batch of ``count`` pairs from ``first`` on, two rows each; does not advance."""
        rows = [self.row_at(p) for p in range(first, first + count)]
        self._foresee(rows)
        examples = [example for row in rows for example in self._pair(row)]
        columns: dict[str, Any] = {
            "chosen": np.tile(np.array([1.0, 0.0], dtype=np.float32), count), "group": np.repeat(np.arange(count), 2),
        }  # fmt: skip
        own = {name.removeprefix("chosen_") for name in self._data if name.startswith("chosen_")} - {"prompt"}
        for name in sorted(own):
            both = [self._data[f"{side}_{name}"] for side in ("chosen", "rejected")]
            columns[name] = as_values([side[row] for row in rows for side in both])
        shared = [n for n in self._data if n not in ("prompt", "chosen", "rejected") and not n.startswith(("chosen_", "rejected_"))]
        columns |= {name: as_values([self._data[name][row] for row in rows for _ in range(2)]) for name in shared}
        return self._batch(examples, columns)

    def _prompt(self, row: int) -> Any:
        """Return what both responses of a pair answer.

        Raises:
            OptionError: they answer different prompts, or none can be told.
        """
        if "prompt" in self._data:
            return self._data["prompt"][row]
        sides = [self._data[f"{side}{'_prompt' if 'chosen_prompt' in self._data else ''}"][row] for side in ("chosen", "rejected")]
        if "chosen_prompt" in self._data:
            sides = [side.tolist() if isinstance(side, np.ndarray) else side for side in sides]
            if sides[0] != sides[1]:
                raise OptionError(
                    f"pair {row} has different prompts: {_brief(sides[0])} and {_brief(sides[1])}. Two responses can be compared "
                    "where they answer the same one."
                )
            return sides[0]
        for side, text in zip(("chosen", "rejected"), sides, strict=True):
            if not isinstance(text, (str, list, tuple, np.ndarray)):
                raise OptionError(f"the {side} response of pair {row} is {shown(text)}; examples are texts or token ids")
        common = _common_start(*sides)
        if not len(common):
            raise OptionError(
                f"pair {row} has no prompt: its texts begin with {_brief(sides[0])} and {_brief(sides[1])}. Give a column "
                "prompt, or texts that begin with the same one."
            )
        return common

    def _pair(self, row: int) -> list[Example]:
        (prompt, what), *sides = self._texts(row)
        ids = self._ids(prompt, what)
        return [self._example(ids, self._ids(text, what), what) for text, what in sides]

    def _texts(self, row: int) -> list[tuple[Any, str]]:
        prompt = self._prompt(row)
        after = len(prompt) if "prompt" not in self._data and "chosen_prompt" not in self._data else None
        sides = [(self._data[side][row], f"the {side} response of pair {row}") for side in ("chosen", "rejected")]
        return [(prompt, f"the prompt of pair {row}"), *((text[after:] if after else text, what) for text, what in sides)]


def _last_message_apart(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return the column ``messages`` as ``prompt`` and ``completion``.

    Raises:
        OptionError: a row is no conversation that ends with the assistant's message.
    """
    for row, messages in enumerate(columns["messages"]):
        if not is_conversation(messages) or len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise OptionError(
                f"messages of row {row} of the data are {shown(messages)}; to learn from, they are at least two, the last the "
                "assistant's"
            )
    others = {name: values for name, values in columns.items() if name not in ("messages", "prompt")}
    return {
        "prompt": [messages[:-1] for messages in columns["messages"]],
        "completion": [messages[-1:] for messages in columns["messages"]], **others,
    }  # fmt: skip


def _common_start(one: Any, other: Any) -> Any:
    """Return what two texts (whole words of them) or two lists of token ids begin with."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if isinstance(one, str) and same < max(len(one), len(other)):
        same = one.rfind(" ", 0, same) + 1
    return one[:same]


def _brief(value: Any) -> str:
    text = text_of(value)
    return text if len(text) <= 40 else text[:37] + "..."
