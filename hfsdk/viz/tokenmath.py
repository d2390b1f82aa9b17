"""Numbers per token for the pictures, in numpy: the browser does the same in float32 (``static/tokens.js``, ``clip.js``).

Torch is not needed to look; tests hold these against ``algorithms/rlmath.py``.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
MAX_LOG_RATIO = 20.0
"""The bound, as in ``rlmath``, to which log-ratios are cut before ``exp``."""


def pack(values: Any) -> str:
    """Return float32 numbers as base64 text: exact, NaN and infinity included, and short."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()


def unpack(text: str) -> npt.NDArray[np.float32]:
    """Return the numbers of :func:`pack`."""
    return np.frombuffer(base64.b64decode(text), dtype="<f4")


def subtract(a: Array, b: Array) -> Array:
    """Return ``a - b`` in float32."""
    with np.errstate(all="ignore"):
        return np.asarray(a, np.float32) - np.asarray(b, np.float32)


def k3(log_probs: Array, ref_log_probs: Array) -> Array:
    """Return the KL estimator k3, ``(r - 1) - log r`` with ``r = reference / policy``, in nats; shape [T]."""
    log_r = np.minimum(subtract(ref_log_probs, log_probs), np.float32(MAX_LOG_RATIO))
    with np.errstate(all="ignore"):
        return np.asarray(np.expm1(log_r) - log_r)


def ratio(new: Array, old: Array) -> Array:
    """Return ``exp(new - old)`` in float32, shape [T]."""
    with np.errstate(all="ignore"):
        return np.asarray(np.exp(np.minimum(subtract(new, old), np.float32(MAX_LOG_RATIO))))


def clipped(ratios: Array, advantages: Array, low: float, high: float) -> npt.NDArray[np.bool_]:
    """Return where clipping leaves a token without gradient: above 1 + high with A > 0, below 1 - low with A < 0."""
    a = np.asarray(advantages, np.float32)
    above, below = ratios > np.float32(1 + high), ratios < np.float32(1 - low)
    return np.asarray(((a > 0) & above) | ((a < 0) & below))


@dataclass(frozen=True)
class Whitening:
    """The change that was made to a batch's advantages after GAE."""

    state: str
    """``"no"``, ``"whitened"``, ``"other"`` (not GAE of these values, or changed by something else) or ``"unknown"``."""
    mean: float | None = None
    std: float | None = None


def whitening_of(advantages: Array, returns: Array, values: Array) -> Whitening:
    """Tell whether a batch's advantages were whitened: returns are advantages *before* whitening, plus values.

    Args:
        advantages: the column of the whole batch, shape [T], as are the others.
        returns: targets of the critic.
        values: the critic's values.
    """
    a, raw = np.asarray(advantages, np.float64), np.asarray(returns, np.float64) - np.asarray(values, np.float64)
    finite = np.isfinite(a) & np.isfinite(raw)
    if not finite.any():
        return Whitening("unknown")
    a, raw = a[finite], raw[finite]
    tolerance = 1e-4 * max(1.0, float(np.abs(raw).max()), float(np.abs(a).max()))
    if np.abs(a - raw).max() <= tolerance:
        return Whitening("no")
    mean, std = float(raw.mean()), float(raw.std(ddof=1)) if len(raw) > 1 else 0.0
    if np.abs(a - (raw - mean) / np.sqrt(std**2 + 1e-8)).max() <= 10 * tolerance:
        return Whitening("whitened", mean, std)
    return Whitening("other")
