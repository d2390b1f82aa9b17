"""The user's own functions and primitives on a rank, and what they may return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfsdk.core.arguments import OnRanks, OwnPrimitive
from hfsdk.core.errors import CallError
from hfsdk.core.functions import Shipped
from hfsdk.core.table import Column, Table, as_column
from hfsdk.engine.process.tasks import USER_ERRORS, as_it_travels, user_traceback
from hfsdk.engine.worker.rank_view import RankView


def on_rank(asked: OnRanks, view: RankView) -> Any:
    """Return what a function of ``handle.run`` returned, as it travels."""
    return as_it_travels(_run(asked.shipped, view, *asked.values), asked.shipped.name)


def primitive(asked: OwnPrimitive, view: RankView, table: Table) -> tuple[Mapping[str, Column] | None, Any]:
    """Return the columns that a primitive wrote, or else its value.

    Raises:
        CallError: they are not those it declares, or not of the rank's rows.
    """
    value, writes = _run(asked.shipped, view, table, **asked.keywords), asked.writes
    if not writes:
        return None, as_it_travels(value, asked.shipped.name)
    if not isinstance(value, Mapping) or set(value) != set(writes):
        got = sorted(value) if isinstance(value, Mapping) else type(value).__name__
        raise CallError(f"the primitive must return a dict with exactly the columns {sorted(writes)}; it returned {got}")
    for name, column in value.items():
        if len(column) != table.num_rows:
            num_rows = table.num_rows
            raise CallError(
                f"the primitive returned {len(column)} entries for column {name!r}; this rank has {num_rows} rows (rows.num_rows)"
            )
    copied = as_it_travels(dict(value), asked.shipped.name)
    return {name: as_column(column) for name, column in copied.items()}, None


def _run(shipped: Shipped, *args: Any, **more: Any) -> Any:
    function = shipped.load()
    try:
        return function(*args, **more)
    except USER_ERRORS as error:  # whatever the user's function raises is reported at the user's line
        raise CallError(f"{shipped.name} raised {error!r}", details=user_traceback(error)) from None
