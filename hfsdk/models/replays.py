"""Log-probs that are replayed beside a run: some rows of each generation go through the trainer again, before it is updated."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.roles import Sampling

ROWS = 8
"""The number of a batch's rows that are replayed, spread over it."""

REPLAYED: ContextVar[list[tuple[Batch, str]] | None] = ContextVar("replayed", default=None)
"""The batches replayed in this step, each with the trainer's dtype; ``None`` where nothing is to be."""


def sample_of(batch: Batch, sampling: Sampling) -> Batch | None:
    """Return the rows of a generation to replay; ``None`` where its log-probs are of another distribution than the trainer's."""
    if sampling.top_k or sampling.top_p < 1.0 or sampling.min_new_tokens:
        return None
    return batch.take(np.unique(np.linspace(0, len(batch) - 1, min(ROWS, len(batch))).astype(np.int64)))


def largest_gap(batch: Batch) -> float:
    """Return how far trainer and rollout are apart on a token at most, in nats; waits."""
    table = batch.table("rollout_log_probs", "old_log_probs")
    generated, replayed = (table.ragged(name).flat for name in ("rollout_log_probs", "old_log_probs"))
    return float(np.abs(generated - replayed).max()) if len(replayed) else 0.0
