"""Micro-batches of a pass and mini-batches of an update: which rows run together, planned once and sent to every rank.

Pure numpy, so that the controller, the simulation and the trainer use the same plan. Rows of a micro-batch are packed one behind
the other, so it costs as many tokens as they have; micro-batches are as few as fit, and about equally large::

    lengths 9 8 3 3 2, dp=2, max_tokens=10     dp rank 0:  (9)   (3)       12 tokens
                                               dp rank 1:  (8)   (3 2)     13 tokens

A loss over pairs needs both rows of a pair at once: with ``together=2`` rows 0 and 1, 2 and 3, ... are planned as one.

Every dp rank gets the same number of micro-batches (empty ones fill up), because ranks agree at each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt

from hfsdk.core.errors import OptionError
from hfsdk.core.protocol import balanced_split

TokenCounts = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class PassPlan:
    """The micro-batches of one pass over some rows."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """Row numbers, indexed ``[dp_rank][i]``; every dp rank has equally many micro-batches, some may be empty."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per dp rank."""
        return len(self.micro_batches[0])

    def rows_of(self, dp_rank: int) -> tuple[int, ...]:
        """Return the row numbers a dp rank works on, in order of its micro-batches."""
        return tuple(chain.from_iterable(self.micro_batches[dp_rank]))


@dataclass(frozen=True)
class MiniBatchPlan:
    """One optimizer step: its rows and how they run."""

    epoch: int
    index: int
    """Number of the mini-batch in its epoch."""
    rows: tuple[int, ...]
    """Row numbers; the same for every layout."""
    passes: PassPlan
    num_tokens: int
    """Response tokens over all dp ranks: the denominator of token means."""
    num_rows: int
    """Rows over all dp ranks: the denominator of sequence means."""


def plan_pass(total_lengths: TokenCounts, dp: int, max_tokens: int, rows: Sequence[int] | None = None) -> PassPlan:
    """Spread rows over dp ranks by tokens and cut each rank's share into micro-batches.

    Longest rows first, each to the rank with the fewest tokens so far; the same input gives the same plan. A row longer than
    ``max_tokens`` runs alone.

    Args:
        total_lengths: prompt plus response tokens of every row of the batch.
        dp: data-parallel ranks.
        max_tokens: most tokens of one micro-batch.
        rows: the row numbers to plan; all rows by default.

    Raises:
        OptionError: ``dp`` or ``max_tokens`` is below 1.
    """
    if dp < 1 or max_tokens < 1:
        raise OptionError(f"dp and max_tokens must be at least 1; got dp={dp}, max_tokens={max_tokens}")
    lengths = np.asarray(total_lengths, dtype=np.int64)
    chosen = np.arange(len(lengths)) if rows is None else np.asarray(rows, dtype=np.int64)
    return _plan_pass(lengths.tobytes(), chosen.tobytes(), dp, max_tokens)


@lru_cache(maxsize=16)
def _plan_pass(lengths_bytes: bytes, chosen_bytes: bytes, dp: int, max_tokens: int) -> PassPlan:
    """See :func:`plan_pass`; the models of a step pass over the same rows one after the other."""
    # Arrays cannot be keys of a cache, their bytes can.
    lengths, chosen = (np.frombuffer(data, dtype=np.int64) for data in (lengths_bytes, chosen_bytes))
    shares = [chosen[share] for share in balanced_split(lengths[chosen], dp)]
    cut = [_cut(share[np.lexsort((share, -lengths[share]))], lengths, max_tokens) for share in shares]
    # Ranks agree at every micro-batch, so a rank with fewer of them passes empty ones at the end.
    count = max(len(micro_batches) for micro_batches in cut)
    return PassPlan(tuple(tuple(m + [()] * (count - len(m))) for m in cut))


def _cut(share: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], max_tokens: int) -> list[tuple[int, ...]]:
    """Cut rows, sorted from long to short, into as few micro-batches as fit, about equally large."""
    num_alone = int((lengths[share] >= max_tokens).sum())
    alone, rest = share[:num_alone].tolist(), share[num_alone:]
    # never fewer than the tokens fill, nor than there are rows of which no two fit together
    count = max(-(-int(lengths[rest].sum()) // max_tokens), int((2 * lengths[rest] > max_tokens).sum()))
    while True:
        parts = balanced_split(lengths[rest], count) if count else ()
        if all(lengths[rest[part]].sum() <= max_tokens for part in parts):
            return [(row,) for row in alone] + [tuple(rest[np.sort(part)].tolist()) for part in parts]
        count += 1


def plan_update(
    total_lengths: TokenCounts,
    response_lengths: TokenCounts,
    dp: int,
    epochs: int,
    mini_batches: int,
    max_tokens: int,
    seed: int,
    shuffle: bool = True,
    together: int = 1,
    rows: Sequence[int] | None = None,
) -> tuple[MiniBatchPlan, ...]:
    """Plan an update: ``epochs`` x ``mini_batches`` optimizer steps, in order.

    Which rows form a mini-batch depends on ``seed`` and the epoch alone, never on ``dp``. Sizes differ by at most one row (by
    ``together`` rows, which stay in one micro-batch and in order).

    ``rows`` take part, by default all: the plan is that of a batch without the others. Where they are fewer than
    ``mini_batches``, each is one.

    Raises:
        OptionError: more mini-batches than rows, a count below 1, or rows that are not whole sets of ``together``.
    """
    if rows is not None:
        return _plan_some(
            total_lengths, response_lengths, dp, epochs, mini_batches, max_tokens, seed, shuffle, together, np.asarray(rows)
        )
    if together > 1:
        return _plan_sets(total_lengths, response_lengths, dp, epochs, mini_batches, max_tokens, seed, shuffle, together)
    total = np.asarray(total_lengths, dtype=np.int64)
    response = np.asarray(response_lengths, dtype=np.int64)
    if epochs < 1 or mini_batches < 1:
        raise OptionError(f"epochs and mini_batches must be at least 1; got epochs={epochs}, mini_batches={mini_batches}")
    if mini_batches > len(total):
        raise OptionError(
            f"mini_batches={mini_batches}, but the batch has {len(total)} rows; a mini-batch needs at least one row. "
            f"Use mini_batches of at most {len(total)}."
        )
    plans = []
    for epoch in range(epochs):
        # The order hangs on seed and epoch alone: dp=1 and dp=8 take the same steps, which the parity laws compare.
        order = np.random.default_rng([seed, epoch]).permutation(len(total)) if shuffle else np.arange(len(total))
        for index, part in enumerate(np.array_split(order, mini_batches)):
            rows = tuple(part.tolist())
            passes = plan_pass(total, dp, max_tokens, rows)
            plans.append(MiniBatchPlan(epoch, index, rows, passes, int(response[part].sum()), len(rows)))
    return tuple(plans)


def _plan_some(
    total_lengths: TokenCounts, response_lengths: TokenCounts, dp: int, epochs: int, mini_batches: int, max_tokens: int, seed: int,
    shuffle: bool, together: int, rows: npt.NDArray[np.int64],
) -> tuple[MiniBatchPlan, ...]:  # fmt: skip
    """Plan a batch of some rows alone, and put their numbers in; of sets of rows only those that are whole."""
    sets, counts = np.unique(rows // together, return_counts=True)
    # A set that has lost a row has nothing to be compared with.
    whole = sets[counts == together]
    chosen = (whole[:, None] * together + np.arange(together)).ravel()
    total, response = (np.asarray(lengths, dtype=np.int64)[chosen] for lengths in (total_lengths, response_lengths))
    fewer = min(mini_batches, len(whole))
    plans = plan_update(total, response, dp, epochs, fewer, max_tokens, seed, shuffle, together)

    def numbers(places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(chosen[list(places)].tolist())

    return tuple(
        replace(
            plan, rows=numbers(plan.rows),
            passes=PassPlan(tuple(tuple(numbers(micro) for micro in of_rank) for of_rank in plan.passes.micro_batches)),
        )
        for plan in plans
    )  # fmt: skip


def _plan_sets(
    total_lengths: TokenCounts, response_lengths: TokenCounts, dp: int, epochs: int, mini_batches: int, max_tokens: int, seed: int,
    shuffle: bool, together: int,
) -> tuple[MiniBatchPlan, ...]:  # fmt: skip
    """Plan sets of ``together`` rows as if each were one row, and put their rows in its place."""
    if len(total_lengths) % together:
        raise OptionError(f"the loss takes sets of {together} rows; the batch has {len(total_lengths)} rows")
    sets = len(total_lengths) // together
    if mini_batches > sets:
        raise OptionError(
            f"mini_batches={mini_batches}, but the batch has {sets} sets of {together} rows; a mini-batch needs at least one. Use "
            f"mini_batches of at most {sets}."
        )
    total, response = (np.asarray(x, dtype=np.int64).reshape(-1, together).sum(1) for x in (total_lengths, response_lengths))
    plans = plan_update(total, response, dp, epochs, mini_batches, max_tokens, seed, shuffle)

    def rows(sets: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(unit * together + k for unit in sets for k in range(together))

    return tuple(
        replace(
            plan, rows=rows(plan.rows), num_rows=plan.num_rows * together,
            passes=PassPlan(tuple(tuple(rows(micro) for micro in of_rank) for of_rank in plan.passes.micro_batches)),
        )
        for plan in plans
    )  # fmt: skip
