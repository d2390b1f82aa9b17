"""Dynamic sampling (DAPO, arXiv 2503.14476) without sampling again: leave out what teaches nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfsdk.core.errors import SimulatedValueError
from hfsdk.core.unscored import scored_rows

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Table


def informative_rows(table: Table) -> list[int]:
    """Return the rows whose group has scores that differ: all the others have advantage 0, or were not scored."""
    from hfsdk.algorithms import groups, tensors

    scored = scored_rows(table, table.num_rows)
    of_scored = table.take(scored)
    identical_N = groups.identical_in_group(tensors.finite(of_scored, "scores"), tensors.groups(of_scored))
    rows: list[int] = scored[~identical_N.numpy()].tolist()
    return rows


def informative(batch: Batch) -> Batch | None:
    """Return the rows that have something to teach, or ``None``; all in a simulated session, where there are no scores."""
    try:
        rows = list(batch.reduce(informative_rows, reads=["scores", "group"]).value)
    except SimulatedValueError:
        return batch
    return batch.take(rows) if rows else None
