"""``RowStream``: batches of a data set's rows in a fixed, repeatable, endless order; what streams of prompts and examples share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from hfsdk.core.batch import Batch
from hfsdk.core.checks import Index, checked
from hfsdk.core.table import Array


def text_of(value: object) -> str:
    """Return the ``repr`` of a value of the user's data, or its class's name where that raises."""
    try:
        return repr(value)
    except Exception:  # the user's own object
        return type(value).__name__


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

    @abstractmethod
    def rows(self, first: int, count: int) -> Batch:
        """Return the batch of ``count`` positions from ``first`` on; does not advance."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the data and the options, under which the position is saved."""

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
