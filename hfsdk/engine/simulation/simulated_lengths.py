"""How long simulated responses are: ``ResponseLengths``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hfsdk.core.errors import OptionError
from hfsdk.core.roles import Sampling
from hfsdk.core.table import Array

LENGTH_KINDS = ("full", "uniform", "lognormal")


@dataclass(frozen=True, kw_only=True)
class ResponseLengths:
    """How long simulated responses are: a stated distribution, drawn by a stable hash of (seed, position, copy).

    The layout and the ranks play no part, so a sample has the same length everywhere.
    """

    kind: str = "full"
    """``"full"``: every response has ``max_new_tokens``; ``"uniform"``: from the least to the most allowed;
    ``"lognormal"``: a long tail, cut at the most allowed."""
    median: float = 0.4
    """Median of ``"lognormal"``, as a share of ``max_new_tokens``."""
    sigma: float = 0.6
    """Standard deviation of the logarithm of ``"lognormal"``."""

    def __post_init__(self) -> None:
        if self.kind not in LENGTH_KINDS or not 0 < self.median <= 1 or self.sigma < 0:
            raise OptionError(
                f"response lengths are one of {', '.join(LENGTH_KINDS)} with a median in (0, 1] and a sigma of at least 0; "
                f"got kind={self.kind!r}, median={self.median}, sigma={self.sigma}"
            )

    def draw(self, sampling: Sampling, seed: int, positions: Array, copies: Array) -> Array:
        """Return the response length of every sample, [rows]."""
        most, least = sampling.max_new_tokens, max(1, sampling.min_new_tokens)
        if self.kind == "full" or sampling.ignore_eos:
            return np.full(len(positions), most, dtype=np.int64)
        u, v = (_unit_hash(seed, positions, copies, salt) for salt in (1, 2))
        if self.kind == "uniform":
            uniform: Array = least + np.floor(u * (most - least + 1)).astype(np.int64)
            return uniform
        normal = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)  # Box and Muller, 1958
        lengths: Array = np.rint(self.median * most * np.exp(self.sigma * normal))
        return lengths.clip(least, most).astype(np.int64)


def draw_lengths(lengths: Any, sampling: Sampling, seed: int, positions: Array, copies: Array) -> Array:
    """Return what a distribution of the user's draws, [rows].

    Raises:
        OptionError: it is not one whole number for every sample, from 1 to the most that is sampled.
    """
    most, drawn = sampling.max_new_tokens, np.asarray(lengths.draw(sampling, seed, positions, copies))
    numeric = drawn.shape == (len(positions),) and drawn.dtype.kind in "iuf"
    if not numeric or not ((drawn >= 1) & (drawn <= most) & (drawn == np.floor(drawn))).all():
        raise OptionError(
            f"{type(lengths).__name__}.draw must give a whole number from 1 to max_new_tokens={most} for each of "
            f"{len(positions)} samples; it gave {str(drawn)[:200]}"
        )
    found: Array = drawn.astype(np.int64)
    return found


def _unit_hash(seed: int, positions: Array, copies: Array, salt: int) -> Array:
    """Return one number in (0, 1) per row: splitmix64 (Steele et al., 2014) over seed, position, copy and salt."""
    state = np.full(len(positions), seed % 2**64, dtype=np.uint64)
    for word in (positions, copies, np.full(len(positions), salt)):
        state = (state ^ word.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
