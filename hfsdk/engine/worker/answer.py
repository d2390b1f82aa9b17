"""The answer of a rank or a task, and how it reads its columns: references and metadata travel, columns stay in the store."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hfsdk.core.errors import HfsdkError, LostColumnError
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.runtime import Pick, StateGoneError
from hfsdk.core.table import Column, Ragged, Table, concat, kind_of, take
from hfsdk.core.trace import Span
from hfsdk.core.unscored import unscored_or_none
from hfsdk.engine.worker.role_host import ObjectsGoneError, ObjectStore

NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(eq=False)
class Answer:
    """How a rank's share of something ended: ``"ok"``, ``"cancelled"``, ``"peer"`` (another rank failed) or ``"error"``."""

    status: str = "ok"
    rows: Any = field(default_factory=lambda: NO_ROWS)
    """The numbers of the rank's rows in a call's batch."""
    part: Any = None
    """Reference to the written columns, or to the rank's part of a state."""
    num_bytes: int = 0
    """The bytes that ``part`` refers to."""
    columns: Mapping[str, ColumnInfo] | None = None
    result: Any = None
    error: HfsdkError | StateGoneError | None = None
    """The controller answers a ``StateGoneError`` itself; the other kind goes to the user's line."""
    spans: tuple[Span, ...] = ()

    def describe(self, columns: Mapping[str, Column]) -> None:
        """Describe the written columns; equal length arrays are shared, so that they travel once."""
        lengths_so_far: list[np.ndarray[Any, Any]] = []
        self.columns = described = {}
        for name, column in columns.items():
            lengths = None
            if isinstance(column, Ragged):
                lengths = column.lengths.astype(np.int32)
                same = next((k for k in lengths_so_far if np.array_equal(k, lengths)), None)
                lengths = lengths if same is None else same
                lengths_so_far.append(lengths)
            dtype = "text" if isinstance(column, list) else str(column.dtype)
            described[name] = ColumnInfo(kind_of(column), dtype, _num_bytes(column), lengths, unscored_or_none(column))
        self.num_bytes = sum(info.num_bytes for info in described.values())


def _num_bytes(column: Column) -> int:
    return len(pickle.dumps(column)) if isinstance(column, list) else int(column.nbytes)


def read(picks: Sequence[Pick], rows: Any, store: ObjectStore) -> Table:
    """Map the objects that hold ``rows`` and assemble a table; whole, ordered parts are not copied.

    Raises:
        LostColumnError: the worker that wrote some of them ended.
    """
    columns: dict[str, Column] = {}
    for pick in picks:
        try:
            objects = store.get(pick.handles)
        except ObjectsGoneError:
            raise LostColumnError(
                f"columns {', '.join(pick.columns)} are gone: the worker that wrote them in {pick.source} died; run it again"
            ) from None
        for name, stored in pick.columns.items():
            parts = [take(stored_object[stored], local) for stored_object, local in zip(objects, pick.local_rows, strict=True)]
            column = parts[0] if len(parts) == 1 else concat(parts)
            columns[name] = column if pick.order is None else take(column, pick.order)
    return Table(columns, rows)
