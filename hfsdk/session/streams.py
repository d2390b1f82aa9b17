"""``RowStream``: batches of a data set's rows in a fixed, repeatable, endless order; what streams of prompts and examples share.

``StreamPlaces``: how far the streams of a session are.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from hfsdk.core.batch import Batch
from hfsdk.core.checks import Index, checked
from hfsdk.core.table import Array

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
        seed: of the order.
        num_rows: rows of the data.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.num_rows, self.position = num_rows, 0
        self.batch_size, self.seed, self._shuffle = batch_size, seed, shuffle
        self._order = lru_cache(maxsize=4)(self._order_of_pass)

    def __getstate__(self) -> dict[str, Any]:
        """Travel without what is computed again."""
        return {name: value for name, value in vars(self).items() if name != "_order"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._order = lru_cache(maxsize=4)(self._order_of_pass)

    @abstractmethod
    def rows(self, first: int, count: int) -> Batch:
        """Return the batch of ``count`` positions from ``first`` on; does not advance."""

    @abstractmethod
    def _told(self) -> tuple[str, Mapping[str, Sequence[Any]]]:
        """Return what tells the stream from others: its options as a text, and the columns of its data."""

    @cached_property
    def _fingerprint(self) -> str:
        """A hash of the data and the options, under which the position is saved."""
        options, columns = self._told()
        digest = hashlib.sha256(f"{options}|{self.num_rows}|{sorted(columns)}".encode(errors="surrogatepass"))
        for row in range(0, self.num_rows, -(-self.num_rows // FINGERPRINTED_ROWS)):
            for name in sorted(columns):
                told = _ADDRESS.sub("", whole_text_of(columns[name][row]))  # which is another one in another process
                digest.update(told.encode(errors="surrogatepass") + b"\0")
        return digest.hexdigest()[:16]

    @checked
    def __getitem__(self, k: Index) -> Batch:
        """Return batch number ``k``; the same one every time."""
        return self.rows(k * self.batch_size, self.batch_size)

    def __next__(self) -> Batch:
        """Return the next batch and advance."""
        batch = self[self.position]
        self.position += 1
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
    return [prompts, *(held for held in getattr(algorithm, "__dict__", {}).values() if isinstance(held, RowStream))]


class StreamPlaces:
    """How far a session's streams are, also those of a checkpoint that have not been made here yet."""

    def __init__(self) -> None:
        self._latest: dict[str, RowStream] = {}
        """By fingerprint, the latest of those made alike."""
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
        """Know a stream as the latest of those made alike, where it is; from now on its place is the one that is told."""
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
