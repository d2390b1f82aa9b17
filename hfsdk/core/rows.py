"""``Rows``: a list of dicts of numbers that takes few bytes, for the metrics of every step that a session ever took.

The values of one key lie side by side in an array, floats and whole numbers as eight bytes each::

    rows[0]  {"step": 0, "kl": 0.1}                shape ("step": int, "kl": float)   step  [0, 1]    kl  [0.1, 0.2]
    rows[1]  {"step": 1, "kl": 0.2}        ->
    rows[2]  {"step": 2}                           shape ("step": int)                step  [2]
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from hfsdk.core.checks import checked

Row = dict[str, Any]

CODES = {float: "d", int: "q"}
"""Types of which an array is kept; of others references."""
LARGEST = 2**63
"""Whole numbers from here on do not fit into eight bytes."""

Shape = tuple[tuple[str, type], ...]


class Rows(Sequence[Row]):
    """A list of dicts of numbers that takes few bytes: each dict is made anew when it is read, and copied when it is appended."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._columns: dict[Shape, list[Any]] = {}
        self._shapes: list[Shape] = []
        self._shape_of = array("l")
        self._place_of = array("q")
        self._amended: dict[int, Row] = {}
        for row in rows:
            self.append(row)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        shape = tuple((key, _kind(value)) for key, value in row.items())
        columns = self._columns.get(shape)
        if columns is None:
            columns = self._columns[shape] = [array(CODES[kind]) if kind in CODES else [] for _, kind in shape]
            self._shapes.append(shape)
        place = len(columns[0]) if columns else 0
        for column, value in zip(columns, row.values(), strict=True):
            is_known = type(value) is str and bool(column) and column[-1] == value
            column.append(column[-1] if is_known else value)  # a text that stays the same is kept once
        self._place_of.append(place)
        self._shape_of.append(self._shapes.index(shape))

    def amend(self, numbers: Mapping[str, Any]) -> None:
        """Add numbers to the last row."""
        self._amended[len(self) - 1] = {**self[-1], **numbers}  # in one step: who reads meanwhile sees whole rows

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    @checked
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        amended = self._amended.get(index + len(self) if index < 0 else index)
        if amended is not None:
            return dict(amended)
        shape = self._shapes[self._shape_of[index]]
        place = self._place_of[index]
        return {key: column[place] for (key, _), column in zip(shape, self._columns[shape], strict=True)}

    def __len__(self) -> int:
        return len(self._shape_of)  # what is appended last: who reads meanwhile sees whole rows

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, Rows)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def _kind(value: Any) -> type:
    """Return the type as which a value is kept."""
    kind = type(value)
    return kind if kind is float or (kind is int and -LARGEST <= value < LARGEST) else object
