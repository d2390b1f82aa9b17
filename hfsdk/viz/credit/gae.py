"""GAE on arrays, so that nobody needs torch to look; tests hold it against ``rlmath.gae``."""

from __future__ import annotations

import numpy as np

from hfsdk.viz.tokens.tokenmath import Array


def gae(rewards: Array, values: Array, gamma: float, lam: float) -> tuple[Array, Array]:
    """Return deltas and advantages of one sequence in float64 (GAE eq. 16; `rlmath.gae` is its batched twin in torch)."""
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    deltas = rewards + gamma * np.append(values[1:], 0.0)[: len(values)] - values
    advantages, running = np.zeros_like(deltas), 0.0
    for t in reversed(range(len(deltas))):
        running = deltas[t] + gamma * lam * running
        advantages[t] = running
    return deltas, advantages
