"""``PromptStream``: batches of prompts in a fixed, repeatable order.

The stream is endless: position p is prompt ``p % num_prompts`` of epoch ``p // num_prompts``, each epoch in an order of its own
that depends on the seed alone. ``prompts[k]`` are positions k * batch_size to (k + 1) * batch_size, whenever it is asked;
``next(prompts)`` gives them one after the other, and its place is saved with the session. ``for batch in prompts`` gives
``len(prompts)`` of them from that place on: one pass over the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from hfsdk.core.batch import Batch
from hfsdk.core.checks import Count, Within, check_fields, is_whole, shown
from hfsdk.core.columns import COLUMNS
from hfsdk.core.conversations import is_conversation
from hfsdk.core.errors import OptionError
from hfsdk.core.pending import Client, ColumnRef
from hfsdk.core.prompt_data import NO_UTF_8, as_values, foresee, naming, question_of, read_source, size_of
from hfsdk.core.table import Ragged, Table
from hfsdk.session.streams import RowStream
from hfsdk.session.tokenizer import Tokenizer

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
    """Prompts in batches; see the module's text. Made by ``session.prompts(...)``.

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
        """Return the token ids of a row's prompt, truncated on the left where that was asked for.

        Raises:
            OptionError: the prompt is empty, or as long as the context.
        """
        if row not in self._ids:
            self._ids[row] = self._encode(row)
        return self._ids[row]

    def _told(self) -> tuple[str, Mapping[str, Sequence[Any]]]:
        return str(self.options), {"prompt": self._prompts, **self._extra}

    def __repr__(self) -> str:
        o = self.options
        what = f"{self.num_prompts} prompts in batches of {o.batch_size}, seed {o.seed}"
        return f"PromptStream({what}, next is batch {self.position})"

    # -- inside

    def _foresee(self, rows: Sequence[int]) -> None:
        """Say which prompts will be encoded: a tokenizer elsewhere is then asked once."""
        if self._tokenizer is not None:
            foresee(self._tokenizer, (asked for row in rows if (asked := self._asked(row)) is not None))

    def _asked(self, row: int) -> tuple[str, Any] | None:
        return question_of(
            self._prompts[row], f"prompt {row} of the data", row=row, columns=self._extra, chat=self.options.chat,
            system=self.options.system,
        )  # fmt: skip

    def _encode(self, row: int) -> list[int]:
        prompt, options = self._prompts[row], self.options
        asked = self._asked(row)
        if asked is None:
            wrong = [t for t in prompt if not is_whole(t)]
            if wrong:
                raise OptionError(f"prompt {row} of the data has {shown(wrong[0])} among its token ids; they are whole numbers")
            ids = [int(t) for t in prompt]
        elif self._tokenizer is None:
            raise OptionError("texts need a tokenizer, which comes with the actor's model; call session.actor(...) first")
        else:
            with naming(f"prompt {row} of the data"):
                ids = getattr(self._tokenizer, asked[0])(asked[1])
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
        """Look at the first conversation, which asks the chat template: what it does not take is told where the data is given.

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
            limit = self._context - (CHAT_OVERHEAD_BYTES if self._is_chat(row) else 2)
            try:
                size = size_of(prompt)
            except UnicodeEncodeError as error:
                raise OptionError(f"prompt {row} of the data {NO_UTF_8}") from error
            if size >= limit and self._tokenizer is not None and self.options.max_prompt_tokens is None:
                long.append(row)
        self._foresee(long)
        for row in long:
            self._encode(row)
        most = self.options.max_prompt_tokens
        if most is not None and most >= self._context:
            raise OptionError(f"max_prompt_tokens={most} leaves no room in the actor's context of {self._context}")
