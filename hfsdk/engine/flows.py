"""What a planned call reads of whom, counted from its orders: rows and bytes by rank and object, without a look at values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hfsdk.dataflow import MOST_RANKS, Holder, Piece, Share, Transfer
from hfsdk.engine.messages import Submit
from hfsdk.pending import ColumnInfo
from hfsdk.runtime import Bundle, Order, Pick, Stored
from hfsdk.table import Array

MOST_RUNS = 8
"""Row numbers are told in at most so many runs."""


def transfers_of(
    request: Submit, orders: Sequence[Order], stored: Mapping[int, Stored], *, task: bool = False
) -> tuple[Transfer, ...]:
    """Return what the ranks of a call (or a CPU task's process) read, by the call that wrote it.

    Ranks with the same rows have the same picks, and are counted once.
    """
    groups: dict[bytes, list[int | None]] = {}
    first: dict[bytes, Order] = {}
    for rank, order in enumerate(orders):
        key = order.rows.tobytes()
        groups.setdefault(key, []).append(None if task else rank)
        first.setdefault(key, order)
    found: dict[int, _Reading] = {}
    for key, ranks in groups.items():
        shares: dict[int, dict[int, Piece]] = {}
        for pick in first[key].picks:
            source = request.inputs[next(iter(pick.columns))].call_id
            if source not in found:
                found[source] = _Reading(source, stored[source], tell_rows=len(groups) <= MOST_RANKS)
            found[source].add(pick, shares.setdefault(source, {}))
        for source, pieces in shares.items():
            found[source].shares.append(Share(tuple(ranks), tuple(pieces.values())))
    return tuple(reading.transfer() for reading in found.values())


def column_bytes(stored: Stored) -> dict[str, int]:
    """Return the bytes of the values of every column."""
    return {name: round(float(_row_bytes(info, stored.num_rows).sum())) for name, info in stored.columns.items()}


def weights_taken(source: int, bundles: Sequence[Bundle]) -> Transfer:
    """Return what a shadow's ranks took over of a trained role's weights: who had which object for whom."""
    ranks = sorted({bundle.source for bundle in bundles})
    holders = tuple(Holder(rank, 0, sum(b.num_bytes for b in bundles if b.source == rank)) for rank in ranks)
    taken: dict[int, dict[int, int]] = {}
    for bundle in bundles:
        for target in bundle.targets:
            mine = taken.setdefault(target, {})
            mine[bundle.source] = mine.get(bundle.source, 0) + bundle.num_bytes
    shares = tuple(
        Share((target,), tuple(Piece(ranks.index(rank), 0, count, "") for rank, count in sorted(mine.items())))
        for target, mine in sorted(taken.items())
    )
    return Transfer(source, ("weights",), (sum(h.num_bytes for h in holders),), holders, shares, "weights")


class _Reading:
    """What is read of one stored call, while it is counted."""

    def __init__(self, source: int, stored: Stored, *, tell_rows: bool) -> None:
        self.source, self.stored, self._tell_rows = source, stored, tell_rows
        self.shares: list[Share] = []
        self._number = {id(part.handle): number for number, part in enumerate(stored.parts)}
        self._sets: dict[tuple[tuple[str, str], ...], tuple[Array, Array]] = {}
        """Columns that are read together -> bytes of every row, and which rows are read."""

    def add(self, pick: Pick, pieces: dict[int, Piece]) -> None:
        """Count one pick of a group of ranks."""
        key = tuple(pick.columns.items())
        if key not in self._sets:
            size = sum((self._row_bytes(stored) for _, stored in key), np.zeros(self.stored.num_rows))
            self._sets[key] = size, np.zeros(self.stored.num_rows, dtype=bool)
        size, wanted = self._sets[key]
        for handle, local in zip(pick.handles, pick.local_rows, strict=True):
            number = self._number[id(handle)]
            rows = self.stored.parts[number].rows[local]
            if not len(rows):
                continue
            wanted[rows] = True
            piece = Piece(number, len(rows), round(float(size[rows].sum())), _runs(rows) if self._tell_rows else "")
            pieces[number] = piece if number not in pieces else _both(pieces[number], piece)

    def _row_bytes(self, name: str) -> Array:
        return _row_bytes(self.stored.columns.get(name), self.stored.num_rows)

    def transfer(self) -> Transfer:
        """Return what was counted."""
        holders = tuple(Holder(part.rank, len(part.rows), part.num_bytes) for part in self.stored.parts)
        sizes = {
            name: round(float(self._row_bytes(stored)[wanted].sum()))
            for columns, (_, wanted) in self._sets.items() for name, stored in columns
        }  # fmt: skip
        return Transfer(self.source, tuple(sizes), tuple(sizes.values()), holders, tuple(self.shares))


def _both(a: Piece, b: Piece) -> Piece:
    """Add up columns that have rows of their own (``batch.take`` of some) and come out of the same object."""
    more = a if a.rows >= b.rows else b
    return Piece(a.holder, more.rows, a.num_bytes + b.num_bytes, more.which)


def _row_bytes(info: ColumnInfo | None, num_rows: int) -> Array:
    """Return the bytes of every row of a column; of a text the mean. A column that was not written has none."""
    if info is None:
        return np.zeros(num_rows)
    if info.dtype == "text":
        return np.full(num_rows, info.num_bytes / max(1, num_rows))
    size = np.dtype(info.dtype).itemsize
    lengths = np.ones(num_rows) if info.lengths is None else info.lengths
    return np.asarray(lengths * float(size))


def _runs(rows: Array) -> str:
    """Return row numbers as text, e.g. ``"0-3, 7"``."""
    runs: list[list[int]] = []
    for row in sorted(rows.tolist()):
        if runs and row == runs[-1][1] + 1:
            runs[-1][1] = row
        elif len(runs) == MOST_RUNS:
            return _told(runs) + "…"
        else:
            runs.append([row, row])
    return _told(runs)


def _told(runs: list[list[int]]) -> str:
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)
