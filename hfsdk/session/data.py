"""``Sources``: the user's data as batches: prompts, texts to imitate, preference pairs, own columns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from hfsdk.core.batch import Batch
from hfsdk.core.checks import Count, Within
from hfsdk.core.prompt_data import columns_of, left_out, prompt_column
from hfsdk.models import ActorModel
from hfsdk.session.context import Context
from hfsdk.session.role_book import RoleBook
from hfsdk.session.streams import Demonstrations, ExampleOptions, Pairs, PromptOptions, PromptStream, RowStream, StreamPlaces

E = TypeVar("E", Demonstrations, Pairs)

BatchSize = Annotated[int, Within(1, 1_000_000)]

BATCH_SIZE = 32
"""Rows of the data in a batch, where nobody says."""

UNLIMITED_TOKENS = 2**31
"""Context of a prompt stream made before there is an actor."""


class Sources:
    """Makes the streams and batches of a session."""

    def __init__(self, context: Context, book: RoleBook, places: StreamPlaces) -> None:
        self._context, self._client, self._book, self._places = context, context.client, book, places
        self._noted: set[tuple[str, str]] = set()

    def prompts(
        self,
        source: Any,
        *,
        column: str | None = None,
        batch_size: BatchSize = BATCH_SIZE,
        seed: int | None = None,
        max_prompt_tokens: Count | None = None,
        chat: bool = False,
        system: str | None = None,
        shuffle: bool = True,
    ) -> PromptStream:
        """Carry out ``session.prompts``; its text says what the arguments are."""
        self._client.check_open()
        stream = self._prompts(
            source, column, batch_size=batch_size, seed=self._context.seed if seed is None else seed,
            max_prompt_tokens=max_prompt_tokens, chat=chat, system=system, shuffle=shuffle,
        )  # fmt: skip
        self._places.add(stream)
        return stream

    def _prompts(self, source: Any, column: str | None = None, **options: Any) -> PromptStream:
        columns = columns_of(source, column or "text")
        chosen = PromptOptions(column=prompt_column(columns) if column is None else column, **options)
        actors = [h for h in self._book if isinstance(h, ActorModel)]
        context = actors[0].context_tokens if actors else UNLIMITED_TOKENS
        stream = PromptStream(self._client, self._client.tokenizer, columns, chosen, context)
        self._tell(stream)
        return stream

    def stream_of(self, source: Any, *, pairs: bool = False) -> RowStream:
        """Return the stream for ``train`` and ``compare``: a stream as it is, other data in batches of `BATCH_SIZE`.

        The same data given again goes on where it was.

        Args:
            source: the same as in :meth:`prompts` or, with ``pairs``, as in :meth:`pairs`.
            pairs: whether to make preference pairs of it.

        Raises: as :meth:`prompts` and :meth:`pairs`.
        """
        if isinstance(source, RowStream):
            return source
        here = self._places.positions()
        stream = self.pairs(source) if pairs else self.prompts(source)
        self._places.put(stream, here)
        return stream

    def in_order(self, source: Any) -> PromptStream:
        """Return prompts in the order of the data, to look at: their place is not kept.

        Raises: as :meth:`prompts`.
        """
        self._client.check_open()
        return self._prompts(source, batch_size=BATCH_SIZE, seed=self._context.seed, shuffle=False)

    def demonstrations(
        self,
        source: Any,
        *,
        batch_size: BatchSize = BATCH_SIZE,
        seed: int | None = None,
        max_tokens: Count | None = None,
        shuffle: bool = True,
    ) -> Demonstrations:
        """Carry out ``session.demonstrations``; its text says what the arguments are."""
        return self._examples(Demonstrations, source, batch_size, seed, max_tokens, shuffle)

    def pairs(
        self,
        source: Any,
        *,
        batch_size: BatchSize = BATCH_SIZE,
        seed: int | None = None,
        max_tokens: Count | None = None,
        shuffle: bool = True,
    ) -> Pairs:
        """Carry out ``session.pairs``; its text says what the arguments are."""
        return self._examples(Pairs, source, batch_size, seed, max_tokens, shuffle)

    def _examples(self, cls: type[E], source: Any, batch_size: int, seed: int | None, max_tokens: int | None, shuffle: bool) -> E:
        self._client.check_open()
        options = ExampleOptions(
            batch_size=batch_size, seed=self._context.seed if seed is None else seed, max_tokens=max_tokens, shuffle=shuffle
        )
        models = [h for h in self._book.models if h.spec is not None]
        context = min((h.spec.max_positions for h in models if h.spec), default=UNLIMITED_TOKENS)
        stream = cls(self._client, self._client.tokenizer, source, options, context)
        self._tell(stream)
        self._places.add(stream)
        return stream

    def _tell(self, stream: PromptStream | Demonstrations | Pairs) -> None:
        """Name the columns that are left out, and once the choices that the model's files and its template leave open."""
        if stream.left_out:
            self._context.notice(left_out(stream.left_out))
        tokenizer = self._client.tokenizer
        if tokenizer is None or not (stream.has_chats or isinstance(stream, (Demonstrations, Pairs))):
            return
        model = Path(self._client.tokenizer_folder).name
        for note in tokenizer.notes() if stream.has_chats else tokenizer.turn_ends(chats=False).notes:
            if (model, note) not in self._noted:
                self._noted.add((model, note))
                self._context.notice(f"{model}: {note}")

    def batch(self, /, **columns: Any) -> Batch:
        """Carry out ``session.batch``; its text says what the arguments are."""
        return Batch.from_columns(self._client, columns)
