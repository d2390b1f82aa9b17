"""Generalised advantage estimation (arXiv 1506.02438), the one recursion: over numpy's arrays and torch's tensors alike.

Algorithms run it over padded batches in torch (`rlmath.gae`), the picture of a sample's credit over one sequence in numpy.
"""

from __future__ import annotations

from typing import Any


def estimate(rewards: Any, values: Any, next_values: Any, gamma: float, lam: float, advantages: Any) -> Any:
    """Fill ``advantages`` (GAE eq. 16), backwards over the last axis, and return the deltas.

    ``delta_t = r_t + gamma * V_{t+1} - V_t`` and ``A_t = delta_t + gamma * lam * A_{t+1}``, with A = 0 behind the last entry.

    Args:
        rewards: rewards per token, shape [..., L].
        values: value of the state before each token, shape [..., L].
        next_values: values of the state after it, 0 behind the last token, shape [..., L].
        gamma: discount per token.
        lam: GAE's lambda.
        advantages: the array that they are written to, shape [..., L].
    """
    deltas = rewards + gamma * next_values - values
    running: Any = 0.0
    for t in reversed(range(deltas.shape[-1])):
        running = deltas[..., t] + gamma * lam * running
        advantages[..., t] = running
    return deltas
