"""Dynamic sampling (DAPO, arXiv 2503.14476): leave out groups that teach nothing, and draw others in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hfsdk.core.errors import SimulatedValueError
from hfsdk.core.unscored import is_unscored, scored_rows, unscored_rows

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table


def informative_rows(table: Table) -> list[int]:
    """Return the rows whose group has scores that differ: all the others have advantage 0, or were not scored."""
    from hfsdk.algorithms import groups, tensors

    scored = scored_rows(table, table.num_rows)
    of_scored = table.take(scored)
    identical_N = groups.identical_in_group(tensors.finite(of_scored, "scores"), tensors.groups(of_scored))
    rows: list[int] = scored[~identical_N.numpy()].tolist()
    return rows


def informative_rows_of_draw(table: Table) -> list[int]:
    """Return the same of some of a step's groups: none where none of them is scored, as others may be."""
    if len(unscored_rows(table["scores"])) == table.num_rows:
        return []
    return informative_rows(table)


def rows_with_advantages(table: Table) -> list[int]:
    """Return the rows whose group has an advantage other than 0 on any token; those that were not scored have none.

    It is the law behind equal scores, and holds for every quantity that a group is compared by: rewards of steps may have equal
    sums and differ.
    """
    advantages = table.ragged("advantages")
    teaches = (advantages.flat != 0) & ~is_unscored(advantages.flat)
    of_row = np.repeat(np.arange(table.num_rows), advantages.lengths)[teaches]
    group = np.asarray(table["group"])
    unscored = np.isin(np.arange(table.num_rows), unscored_rows(advantages))
    rows: list[int] = np.flatnonzero(np.isin(group, group[of_row]) & ~unscored).tolist()
    return rows


def informative(batch: Batch) -> Batch | None:
    """Return the rows that have something to teach, or ``None``; all in a simulated session, where there are no scores.

    Args:
        batch: rows with advantages and group.
    """
    rows = taught_by(batch, rows_with_advantages, "advantages")
    if len(rows) == len(batch):
        return batch
    return batch.take(rows) if rows else None


def taught_by(batch: Batch, rows: Callable[[Table], list[int]] = informative_rows, column: str = "scores") -> list[int]:
    """Return the numbers of these rows, by a column and the groups; waits for the column."""
    try:
        return list(batch.reduce(rows, reads=[column, "group"]).value)
    except SimulatedValueError:
        return list(range(len(batch)))


def drawn_until(wanted: int, prompts: Batch, n: int, scored: Callable[[Batch], Batch]) -> tuple[Batch, list[int]]:
    """Generate for prompts of a batch, first to last, until so many groups have something to teach or no prompt is left.

    Args:
        wanted: groups; so many prompts are drawn at first, then each time as many as groups are lacking.
        prompts: the prompts that may be drawn.
        n: responses per prompt.
        scored: generates and scores, for some of the prompts.

    Returns:
        Everything that was generated, and the numbers of the rows of the first ``wanted`` groups that teach something.
    """
    batch = scored(prompts.take(np.arange(min(wanted, len(prompts)))))
    rows = taught_by(batch, informative_rows_of_draw)
    drawn = len(batch) // n
    # Only as many prompts as groups are lacking: where most groups teach, nearly nothing is generated in vain.
    while (groups := len({row // n for row in rows})) < wanted and drawn < len(prompts):
        more = np.arange(drawn, min(drawn + wanted - groups, len(prompts)))
        new = scored(prompts.take(more))
        rows += [len(batch) + row for row in taught_by(new, informative_rows_of_draw)]
        batch = one_after_the_other(batch, new, drawn)
        drawn += len(more)
    return batch, rows


def one_after_the_other(first: Batch, second: Batch, groups_before: int) -> Batch:
    """Return one batch with the rows of both, where their columns are: nothing comes here.

    Args:
        first: rows that come first.
        second: rows with the same columns.
        groups_before: the number that is added to the second's group numbers.
    """
    a, b = len(first), len(second)
    names = [name for name in first.columns if name in second]
    # A map needs tables of equal length: each side is padded with its row 0, and ``Concatenation`` takes the right part of each.
    both = first.take(np.r_[np.arange(a), np.zeros(b, np.int64)])
    other = second.take(np.r_[np.zeros(a, np.int64), np.arange(b)])
    both = both.join(other, **{f"{OTHER}{name}": name for name in names})
    reads = [*names, *(f"{OTHER}{name}" for name in names)]
    return both.map(Concatenation(a, groups_before), reads=reads, writes=names).drop(*reads[len(names) :])


OTHER = "of the other "


@dataclass(frozen=True)
class Concatenation:
    """A function over a table of both batches' columns that takes the first rows of the one and the last of the other."""

    rows: int
    groups_before: int

    def __call__(self, table: Table) -> dict[str, Column]:
        """Return the columns, one after the other."""
        from hfsdk.core.table import concat, take

        ours, theirs = np.arange(self.rows), np.arange(self.rows, table.num_rows)
        names = [name for name in table if not name.startswith(OTHER)]
        columns = {name: concat([take(table[name], ours), take(table[OTHER + name], theirs)]) for name in names}
        later = np.asarray(columns["group"])[self.rows :] + self.groups_before
        return columns | {"group": np.r_[np.asarray(columns["group"])[: self.rows], later]}
