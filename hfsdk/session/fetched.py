"""``Fetched``: copies of the columns that came to this process, for whoever looks at a batch after ``session.close()``.

The columns of a batch live with the workers and end with them. What was brought here, or was the user's own, is kept as long as
some batch refers to it; beyond :data:`MOST_BYTES` the oldest go. Copies, because what a fetch returns may be memory of a worker's
node that would outlive it, and is the user's to change.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hfsdk.core.pending import ColumnRef
from hfsdk.core.table import Array, Column, Ragged, Table, take

MOST_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of a column, or (``rows`` is ``None``) all of them."""

    rows: Array | None
    values: Column
    num_bytes: int

    def position(self, wanted: Array | None) -> Array | None:
        """Return where the wanted rows of the column are in this piece; ``None`` where it lacks one."""
        if self.rows is None:
            return np.arange(len(self.values)) if wanted is None else wanted
        if wanted is None:
            return None
        order = np.argsort(self.rows, kind="stable")
        at = np.searchsorted(self.rows, wanted, sorter=order)
        places = order[np.minimum(at, len(order) - 1)]
        return places if np.array_equal(self.rows[places], wanted) else None


class Fetched:
    """See the module's text. May be used from any thread; whoever runs inside a finalizer must not (there is a lock)."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._pieces: dict[tuple[int, str], list[Piece]] = {}
        """By (call, column), the one that was brought last at the end."""
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""
        return self._num_bytes

    def keep(self, columns: Mapping[str, ColumnRef], table: Table) -> None:
        """Keep a copy of what was fetched, or stored, under these references."""
        for name, ref in columns.items():
            if self.has(ref):
                continue
            num_bytes = _size(table[name])
            if num_bytes > self._most_bytes:
                continue
            piece = Piece(ref.rows, _copy(table[name]), num_bytes)
            key = (ref.call_id, ref.name)
            with self._lock:
                before = self._pieces.pop(key, [])
                kept = [] if ref.rows is None else before  # all rows: no need for some of them
                self._num_bytes += num_bytes - sum(one.num_bytes for one in before if one not in kept)
                self._pieces[key] = [*kept, piece]
                while self._num_bytes > self._most_bytes:
                    self._drop_oldest()

    def _drop_oldest(self) -> None:
        key = next(iter(self._pieces))
        self._num_bytes -= self._pieces[key].pop(0).num_bytes
        if not self._pieces[key]:
            del self._pieces[key]

    def find(self, ref: ColumnRef) -> Column | None:
        """Return a copy of a column's rows; ``None`` where one of them was never brought, or is not kept any more."""
        with self._lock:
            pieces = list(self._pieces.get((ref.call_id, ref.name), ()))
        for piece in reversed(pieces):
            at = piece.position(ref.rows)
            if at is not None:
                return _copy(take(piece.values, at))
        return None

    def has(self, ref: ColumnRef) -> bool:
        """Whether a column's rows are kept."""
        with self._lock:
            pieces = list(self._pieces.get((ref.call_id, ref.name), ()))
        return any(piece.position(ref.rows) is not None for piece in pieces)

    def names(self, call_id: int) -> list[str]:
        """Return the columns of a call of which something is kept."""
        with self._lock:
            return sorted(name for number, name in self._pieces if number == call_id)

    def let_go(self, call_id: int) -> None:
        """Drop the columns of a call: no batch refers to them any more."""
        with self._lock:
            for key in [key for key in self._pieces if key[0] == call_id]:
                self._num_bytes -= sum(piece.num_bytes for piece in self._pieces.pop(key))


def _size(column: Column) -> int:
    return sum(map(sys.getsizeof, column)) if isinstance(column, list) else int(column.nbytes)


def _copy(column: Column) -> Column:
    if isinstance(column, Ragged):
        return Ragged(column.flat.copy(), column.offsets.copy())
    return list(column) if isinstance(column, list) else column.copy()
