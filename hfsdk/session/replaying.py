"""``replaying``: the check ``"full"`` of a run's step, by log-probs that are computed again as soon as they were drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hfsdk.algorithms.invariants import CHECK, warn
from hfsdk.core.batch import Batch
from hfsdk.core.gap import GAP_TOLERANCE
from hfsdk.core.rows import Row
from hfsdk.models.replays import REPLAYED, largest_gap

COLUMN = "replay_gap_max"
"""Largest distance of trainer and rollout on a token of the rows that were replayed, in nats."""


@contextmanager
def replaying(simulated: bool) -> Iterator[Callable[[], Row]]:
    """Replay some rows of what is generated meanwhile, where the run's check is ``"full"``; what it yields says how far apart."""
    kept: list[tuple[Batch, str]] | None = [] if CHECK.get() == "full" and not simulated else None
    token = REPLAYED.set(kept)
    try:
        yield lambda: _numbers(kept or [])
    finally:
        REPLAYED.reset(token)


def _numbers(replayed: list[tuple[Batch, str]]) -> Row:
    if not replayed:
        return {}
    gaps = [(largest_gap(batch), GAP_TOLERANCE[dtype]["max"]) for batch, dtype in replayed]
    worst, most = max(gaps, key=lambda one: one[0] / one[1])
    if not worst <= most:
        warn([
            f"{COLUMN} is {worst:.3g} nats where rounding stays below {most:g}: rows that were replayed as soon as they were drawn "
            "have other log-probs in the trainer than in the rollout; actor.explain_gap(batch) takes the difference apart"
        ])  # fmt: skip
    return {COLUMN: worst}
