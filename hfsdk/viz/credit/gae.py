"""GAE of one sequence on arrays, so that nobody needs torch to look."""

from __future__ import annotations

import numpy as np

from hfsdk.core.credit import estimate
from hfsdk.viz.tokens.tokenmath import Array


def gae(rewards: Array, values: Array, gamma: float, lam: float) -> tuple[Array, Array]:
    """Return deltas and advantages of one sequence in float64 (GAE eq. 16; `rlmath.gae` is its batched twin in torch)."""
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    advantages = np.zeros_like(values)
    deltas = estimate(rewards, values, np.append(values[1:], 0.0)[: len(values)], gamma, lam, advantages)
    return deltas, advantages
