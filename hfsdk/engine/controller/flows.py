"""What a planned call reads of whom, counted from its orders: rows and bytes by rank and object, without a look at values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hfsdk.core.call_flow import Holder, Piece, Share, Transfer
from hfsdk.core.dataflow import MOST_RANKS
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.runtime import Bundle, Order, Stored
from hfsdk.core.table import Array
from hfsdk.engine.calls.dispatch import one_array_each
from hfsdk.engine.calls.messages import Submit

MOST_RUNS = 8
"""Row numbers are told in at most so many runs."""


def transfers_of(
    request: Submit, orders: Sequence[Order], stored: Mapping[int, Stored], *, task: bool = False
) -> tuple[Transfer, ...]:
    """Return what the ranks of a call (or a CPU task's process) read, by the call that wrote it.

    Ranks with the same rows have the same picks, and are counted once.
    """
    return Reads(request, orders, stored, task=task).transfers


@dataclass(frozen=True, eq=False)
class _Group:
    """Ranks with the same rows, and what they pick: (columns, numbers of the parts, rows in each)."""

    ranks: tuple[int | None, ...]
    picks: tuple[tuple[Mapping[str, str], tuple[int, ...], tuple[Array, ...]], ...]


class Reads:
    """What a planned call reads, counted when somebody looks: most calls' is never looked at.

    It holds row numbers and lengths, no handle: the objects that are read may be freed meanwhile.
    """

    def __init__(self, request: Submit, orders: Sequence[Order], stored: Mapping[int, Stored], *, task: bool = False) -> None:
        self._sources = {name: ref.call_id for name, ref in request.inputs.items()}
        numbers: dict[int, int] = {}
        for one in stored.values():
            numbers.update(one.numbers)
        ranks: dict[int, list[int | None]] = {}
        first: dict[int, Order] = {}
        for rank, (rows, order) in enumerate(zip(one_array_each([order.rows for order in orders]), orders, strict=True)):
            ranks.setdefault(id(rows), []).append(None if task else rank)
            first.setdefault(id(rows), order)
        self._groups = [
            _Group(tuple(ranks[key]), tuple(
                (pick.columns, tuple(numbers[id(handle)] for handle in pick.handles), pick.local_rows) for pick in order.picks
            ))
            for key, order in first.items()
        ]  # fmt: skip
        read = {self._sources[next(iter(columns))] for group in self._groups for columns, _, _ in group.picks}
        self._stored = {call_id: one.without_handles for call_id, one in stored.items() if call_id in read}
        self._more: tuple[Transfer, ...] = ()

    def add(self, transfer: Transfer) -> None:
        """Note something that was counted otherwise."""
        self._more += (transfer,)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """One for every call that is read from."""
        return self._counted + self._more

    @cached_property
    def _counted(self) -> tuple[Transfer, ...]:
        readings: dict[int, _Reading] = {}
        for group in self._groups:
            shares: dict[int, dict[int, Piece]] = {}
            for columns, numbers, local_rows in group.picks:
                source = self._sources[next(iter(columns))]
                if source not in readings:
                    readings[source] = _Reading(source, self._stored[source], tell_rows=len(self._groups) <= MOST_RANKS)
                readings[source].add(columns, numbers, local_rows, shares.setdefault(source, {}))
            for source, pieces in shares.items():
                readings[source].shares.append(Share(group.ranks, tuple(pieces.values())))
        return tuple(reading.transfer() for reading in readings.values())


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
        self._sets: dict[tuple[tuple[str, str], ...], tuple[Array, Array]] = {}
        """Columns that are read together -> bytes of every row, and which rows are read."""

    def add(
        self, columns: Mapping[str, str], numbers: Sequence[int], local_rows: Sequence[Array], pieces: dict[int, Piece]
    ) -> None:
        """Count one pick of a group of ranks."""
        key = tuple(columns.items())
        if key not in self._sets:
            size = sum((self._row_bytes(stored) for _, stored in key), np.zeros(self.stored.num_rows))
            self._sets[key] = size, np.zeros(self.stored.num_rows, dtype=bool)
        size, wanted = self._sets[key]
        for number, local in zip(numbers, local_rows, strict=True):
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
    ordered = np.sort(rows)
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 2) != 1)
    ends = np.append(starts[1:], len(ordered)) - 1
    runs = list(zip(ordered[starts[:MOST_RUNS]].tolist(), ordered[ends[:MOST_RUNS]].tolist(), strict=True))
    return _ranges(runs) + "…" * (len(starts) > MOST_RUNS)


def _ranges(runs: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)
