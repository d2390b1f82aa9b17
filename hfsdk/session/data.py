"""``Sources``: the user's data as batches: prompts, texts to imitate, preference pairs, own columns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from hfsdk.core.batch import Batch
from hfsdk.core.checks import Count, Within, checked
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
        self._told: set[tuple[str, str]] = set()

    @checked
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
        """Return prompts in batches: ``prompts[k]`` repeats, ``next(prompts)`` advances.

        Args:
            source: a ``datasets.Dataset``, a DataFrame, a Series, a dict of columns, or a list of texts, of token ids, of
                conversations or of dicts. A conversation is a list of ``{"role", "content"}`` messages, as TRL's, and goes into
                the model's chat template.
            column: where the prompts are, by default ``prompt``, or else ``text`` or ``messages``; the other columns (e.g. TRL's
                ``completion``) are passed on to reward functions.
            batch_size: prompts per batch; 32 where it is not given.
            seed: of the order; by default the session's.
            max_prompt_tokens: keep at most the last so many tokens of each prompt; ``None`` cuts nothing.
            chat: put each text into the model's chat template as the user's turn.
            system: the system message of that chat, and with ``chat`` of conversations that have none.
            shuffle: whether each pass over the data has an order of its own.

        Raises:
            ColumnError: there is no such column.
            OptionError: a prompt is empty or as long as the context (names its row), or an option is out of range.
        """
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
        """Return what ``train`` and ``compare`` take from: a stream as it is, other data in batches of `BATCH_SIZE`.

        The same data given again goes on where it was.

        Args:
            source: as in :meth:`prompts` or, with ``pairs``, as in :meth:`pairs`.
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

    @checked
    def demonstrations(
        self,
        source: Any,
        *,
        batch_size: BatchSize = BATCH_SIZE,
        seed: int | None = None,
        max_tokens: Count | None = None,
        shuffle: bool = True,
    ) -> Demonstrations:
        """Return texts to imitate in batches, for ``actor.update(next(demonstrations), hf.CrossEntropy())``.

        Args:
            source: as in :meth:`prompts`, with a column ``text``, ``messages`` (the last one, the assistant's, is learned), or
                ``prompt`` and ``completion``; or a list of texts. Each ends with a token of the model's that ends a turn.
            batch_size: examples per batch; 32 where it is not given.
            seed: of the order; by default the session's.
            max_tokens: longest prompt plus response; what is longer loses its end. ``None`` cuts nothing.
            shuffle: whether each pass over the data has an order of its own.

        Raises:
            ColumnError: the data has neither.
            OptionError: an example is empty or too long (names its row), the chat template does not take or would leave out
                something of it, or an option is out of range.
        """
        return self._examples(Demonstrations, source, batch_size, seed, max_tokens, shuffle)

    @checked
    def pairs(
        self,
        source: Any,
        *,
        batch_size: BatchSize = BATCH_SIZE,
        seed: int | None = None,
        max_tokens: Count | None = None,
        shuffle: bool = True,
    ) -> Pairs:
        """Return preference pairs in batches, for ``reward.update(next(pairs), hf.BradleyTerry())`` and `DPO`.

        Args:
            source: as in :meth:`prompts`, with columns ``prompt``, ``chosen`` and ``rejected`` (without ``prompt``: what both
                texts begin with), e.g. ``hf.data.review_pairs()``. ``margin`` and others are passed on, ``chosen_x`` and
                ``rejected_x`` as each row's ``x``.
            batch_size: pairs per batch, 32 where it is not given; it has twice as many rows, the chosen one first.
            seed: of the order; by default the session's.
            max_tokens: as in :meth:`demonstrations`.
            shuffle: as in :meth:`demonstrations`.

        Raises:
            ColumnError: a column is missing.
            OptionError: a pair has two different prompts or is too long (names its row), or an option is out of range.
        """
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
        """Say what is left out of the data, and once what was chosen where the model's files and its template leave a choice."""
        if stream.left_out:
            self._context.notice(left_out(stream.left_out))
        tokenizer = self._client.tokenizer
        if tokenizer is None or not (stream.has_chats or isinstance(stream, (Demonstrations, Pairs))):
            return
        model = Path(self._client.tokenizer_folder).name
        for note in tokenizer.notes() if stream.has_chats else tokenizer.turn_ends(chats=False).notes:
            if (model, note) not in self._told:
                self._told.add((model, note))
                self._context.notice(f"{model}: {note}")

    @checked
    def batch(self, /, **columns: Any) -> Batch:
        """Return own data as a batch: lists of sequences become variable-length columns, numbers one value per sample.

        Raises:
            ColumnError: the columns differ in length or are empty.
        """
        return Batch.from_columns(self._client, columns)
