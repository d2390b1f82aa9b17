"""What a simulated call writes: columns with lengths and bytes, without values; and what stands for a number nobody has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from hfsdk.core.call_flow import Call
from hfsdk.core.columns import dtype_of, is_per_token, writes_per_token
from hfsdk.core.errors import ColumnError, SimulatedValueError
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.runtime import Order, Part, Pick, Stored
from hfsdk.core.table import Array, Column, Table
from hfsdk.engine.simulation.simulated_spans import Timeline


@dataclass(frozen=True, eq=False)
class SimulatedPart:
    """The handle of one stored object: which call's end made it ready, and the shape of its columns."""

    writer: str
    line: Timeline | None
    """The call that wrote it; ``None`` for the user's own data, which is ready at the start of time."""
    lengths: Mapping[str, Array | None]
    """Column -> length of every row here, ``None`` for columns with one value per sample."""
    table: Table | None = None
    """The user's own data; ``None`` for what was simulated."""


class SimulatedRow(dict[str, Any]):
    """What a simulated call reports. Looking for a number that needs values raises ``SimulatedValueError``."""

    def __missing__(self, name: str) -> NoReturn:
        raise SimulatedValueError(
            f"{name!r} was asked of a simulated run, which has shapes and times only: {', '.join(self) or 'nothing'}. "
            "Run the same cells on a real session to see it."
        )


class SimulatedValue(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands for a number that no simulated run has: printing it is fine, using it raises ``SimulatedValueError``."""

    __hash__ = object.__hash__

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<no value: {self.name} was simulated>"

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise SimulatedValueError(
            f"the value of {self.name} was asked, but the run is simulated and has shapes and times only. "
            "Run the same cells on a real session to see it."
        )

    __float__ = __int__ = __index__ = __bool__ = __len__ = __iter__ = __getitem__ = __array__ = __array_ufunc__ = _refuse


def _arrange(pick: Pick, pieces: list[Array]) -> Array:
    joined = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
    return joined if pick.order is None else joined[pick.order]


def lengths_of(order: Order) -> dict[str, Array]:
    """Return the length of every row of each variable-length column an order reads."""
    by_column: dict[str, Array] = {}
    for pick in order.picks:
        for name, stored in pick.columns.items():
            pieces = []
            for handle, rows in zip(pick.handles, pick.local_rows, strict=True):
                lengths = handle.lengths[stored]
                if lengths is not None:
                    pieces.append(lengths[rows])
            if pieces:
                by_column[name] = _arrange(pick, pieces)
    return by_column


def values_of(order: Order, name: str) -> Array | None:
    """Return a scalar column of the user's own data as an order reads it, ``None`` where there is none."""
    for pick in order.picks:
        stored = pick.columns.get(name)
        if stored is not None and pick.handles and all(h.table is not None for h in pick.handles):
            pieces = zip(pick.handles, pick.local_rows, strict=True)
            return _arrange(pick, [np.asarray(h.table[stored])[rows] for h, rows in pieces])
    return None


def response_lengths(lengths: Mapping[str, Array]) -> Array | None:
    """Return the response lengths: of ``response`` itself, else of the first per-token column."""
    if "response" in lengths:
        return lengths["response"]
    return next((found for name, found in lengths.items() if is_per_token(name)), None)


def store(call: Call, kept: Sequence[tuple[int | None, Order, Array | None]], line: Timeline) -> Stored | None:
    """Describe what a call writes: one part per rank that is gathered."""
    if not call.writes:
        return None
    name = str(call)
    dtypes = {column: np.dtype(dtype_of(column)) for column in call.writes}
    whole: dict[str, Array] = {}
    parts = []
    for rank, order, responses in kept:
        lengths: dict[str, Array | None] = {}
        num_bytes = 0
        for column in call.writes:
            ragged = responses is not None and writes_per_token(call.method, column)
            lengths[column] = responses if ragged else None
            if ragged:
                whole.setdefault(column, np.zeros(call.num_rows, dtype=np.int64))[order.rows] = responses
            count = int(responses.sum()) if ragged and responses is not None else len(order.rows)
            num_bytes += count * dtypes[column].itemsize
        parts.append(Part(order.rows, SimulatedPart(name, line, lengths), num_bytes, rank))
    columns = {}
    for column, dtype in dtypes.items():
        found = whole.get(column)
        count = call.num_rows if found is None else int(found.sum())
        columns[column] = ColumnInfo("scalar" if found is None else "ragged", str(dtype), count * dtype.itemsize, found)
    return Stored(name, call.num_rows, tuple(parts), columns)


def real_column(handle: SimulatedPart, name: str) -> Column:
    """Return a column of the user's own data.

    Raises:
        SimulatedValueError: it was simulated.
    """
    if handle.table is not None:
        return handle.table[name]
    if name not in handle.lengths:
        raise ColumnError(f"{handle.writer} wrote no column {name!r}; it wrote {', '.join(handle.lengths)}")
    raise SimulatedValueError(
        f"the values of column {name!r} were asked, but {handle.writer} was simulated and wrote shapes only. "
        "Its lengths and bytes are readable: batch.column_states(). To see values, run the same cells on a real session."
    )
