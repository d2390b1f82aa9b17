"""How long simulated responses are: ``ResponseLengths``.

Some are stated (all alike, uniform, log-normal), some are fitted to what real runs of RL published (:data:`MEASURED`). Few publish
every length; most publish a mean, a median and the longest, so that is what is fitted::

    quantiles      log tokens are linear between the published quantiles, over the normal distribution's quantiles; a log-normal
                   distribution is a straight line there. Below the lowest the first line goes on, above the highest all are as long
    log-normal     by median and mean: mean / median = exp(sigma^2 / 2)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Annotated, Any

import numpy as np

from hfsdk.core.checks import NamedFields, NonNegative, Positive, Title, Within, check_fields, checked, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.field_texts import documented
from hfsdk.core.roles import Sampling
from hfsdk.core.table import Array
from hfsdk.core.text import nearest

LENGTH_KINDS = ("full", "uniform", "lognormal")
"""Names of distributions that need nothing else."""

SHORTEST_SHARE = 0.001
"""Share of responses below which a straight line through quantiles is not followed."""


@documented
@dataclass(frozen=True, kw_only=True)
class ResponseLengths(NamedFields):
    """How long simulated responses are: a stated distribution, drawn by a stable hash of (seed, position, copy).

    The layout and the ranks play no part, so a sample has the same length everywhere. Nothing is longer than ``max_new_tokens``:
    what would be is cut there, as it is in a real run.

    Example: ``ResponseLengths(kind="lognormal", median=0.3)``, ``ResponseLengths.measured("math-4b")``.
    """

    kind: str = "full"
    """``"full"``: every response has ``max_new_tokens``; ``"uniform"``: from the least to the most allowed; ``"lognormal"``: a long
    tail; ``"quantiles"``: as those say."""
    median: Annotated[float, Within(above=0, most=1)] = 0.4
    """Median of ``"lognormal"``, as a share of ``max_new_tokens``."""
    sigma: NonNegative = 0.6
    """Standard deviation of the logarithm of ``"lognormal"``."""
    median_tokens: NonNegative = 0.0
    """Median of ``"lognormal"`` in tokens, in place of a share."""
    quantiles: tuple[tuple[float, float], ...] = ()
    """(share of responses, tokens that they have at most) of ``"quantiles"``, ascending."""
    source: Title = ""
    """The source of the numbers."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind not in (*LENGTH_KINDS, "quantiles"):
            raise OptionError(
                f"response lengths are one of {', '.join(LENGTH_KINDS)}, quantiles; got kind={shown(self.kind)}. What real runs "
                f"published: ResponseLengths.measured({next(iter(MEASURED), '')!r})"
            )
        if self.kind == "quantiles":
            _check_quantiles(self.quantiles)

    @classmethod
    @checked
    def lognormal(cls, *, median: Positive, mean: Positive, source: Title = "") -> ResponseLengths:
        """Return the log-normal distribution that has this median and mean, in tokens: sigma^2 = 2 ln(mean / median).

        Args:
            median: the median in tokens.
            mean: the mean in tokens, before anything is cut; at least the median.
            source: the run or paper that they come from.

        Raises:
            OptionError: the mean is below the median.
        """
        if mean < median:
            raise OptionError(f"a log-normal distribution's mean is at least its median; got mean={mean:g} and median={median:g}")
        sigma = math.sqrt(2 * math.log(mean / median))
        return cls(kind="lognormal", median_tokens=float(median), sigma=sigma, source=source)

    @classmethod
    @checked
    def of_quantiles(cls, quantiles: Mapping[float, float], *, source: Title = "") -> ResponseLengths:
        """Return the distribution through these quantiles, e.g. ``{0.5: 6701, 0.9: 9700, 0.99: 32768}``.

        Args:
            quantiles: share of responses (between 0 and 1) -> tokens that they have at most; two at least, both ascending.
            source: the run or paper that they come from.

        Raises:
            OptionError: they are not ascending, or fewer than two.
        """
        return cls(kind="quantiles", quantiles=tuple(sorted((float(p), float(n)) for p, n in quantiles.items())), source=source)

    @classmethod
    @checked
    def measured(cls, name: str) -> ResponseLengths:
        """Return a distribution fitted to the numbers of a real run; ``hfsdk.core.response_lengths.MEASURED`` has all of them.

        Args:
            name: ``"math-4b"`` (Qwen3-4B on DAPO-Math, at most 32,768 tokens) or ``"agent-35b"`` (Qwen3.5-35B-A3B with tools).

        Raises:
            OptionError: there is none of that name.
        """
        if name not in MEASURED:
            raise OptionError(f"no measured response lengths {shown(name)}; {nearest(name, MEASURED)}")
        return MEASURED[name]

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
        lengths: Array = np.rint(self._at(normal, most))
        return lengths.clip(least, most).astype(np.int64)

    def _at(self, normal: Array, most: int) -> Array:
        """Return the tokens of responses at these quantiles of the normal distribution."""
        if self.kind == "lognormal":
            with np.errstate(over="ignore"):  # infinity is cut like all that is too long
                spread: Array = np.exp(self.sigma * normal)
            return (self.median_tokens or self.median * most) * spread
        at = np.array([NormalDist().inv_cdf(share) for share, _ in self.quantiles])
        logs = np.log([tokens for _, tokens in self.quantiles])
        first = NormalDist().inv_cdf(SHORTEST_SHARE)
        if first < at[0]:
            slope = (logs[1] - logs[0]) / (at[1] - at[0])
            at, logs = np.r_[first, at], np.r_[logs[0] - slope * (at[0] - first), logs]
        num_tokens: Array = np.exp(np.interp(normal, at, logs))
        return num_tokens


def _check_quantiles(quantiles: tuple[tuple[float, float], ...]) -> None:
    """Check that quantiles are a distribution.

    Raises:
        OptionError: they are not.
    """
    rising = all(p < q and m <= n for (p, m), (q, n) in pairwise(quantiles))
    inside = all(0 < share < 1 and tokens >= 1 for share, tokens in quantiles)
    if len(quantiles) < 2 or not rising or not inside:
        raise OptionError(
            "quantiles of response lengths are at least two shares between 0 and 1, each with the tokens that so many responses "
            f"have at most, both ascending, e.g. {{0.5: 6701, 0.9: 9700, 0.99: 32768}}; got {str(dict(quantiles))[:200]}"
        )


MEASURED: Mapping[str, ResponseLengths] = {
    "math-4b": ResponseLengths.of_quantiles(
        {0.5: 6701, 0.9: 9700, 0.99: 32768},
        source="GRPO of a Qwen3-4B on DAPO-Math, notes of a study (github.com/okoge-kaz/miles, fef9f73, August 2026): "
        "p90 9,431 to 9,966 and p99 32,768 where 32,768 tokens are allowed; the median is that of the same run where 24,576 are",
    ),
    "agent-35b": ResponseLengths.lognormal(
        median=1727.5, mean=2069.7,
        source="GRPO of a Qwen3.5-35B-A3B with tools on four H200, a rollout's log (github.com/whisper-la/Dressage, 29 June 2026): "
        "1,056 responses of 2,069.7 tokens in the mean and 1,727.5 in the median; a log-normal distribution by these two. "
        "The longest of as many is 11,100 by it, and was 10,353",
    ),
}  # fmt: skip
"""Distributions fitted to numbers that real runs published, as facts; each names its source and the numbers."""


def draw_lengths(lengths: Any, sampling: Sampling, seed: int, positions: Array, copies: Array) -> Array:
    """Return the lengths that a distribution of the user's draws, [rows].

    Raises:
        OptionError: it is not one whole number for every sample, from 1 to the most that is sampled.
    """
    most, drawn = sampling.max_new_tokens, np.asarray(lengths.draw(sampling, seed, positions, copies))
    numeric = drawn.shape == (len(positions),) and drawn.dtype.kind in "iuf"
    if not numeric or not ((drawn >= 1) & (drawn <= most) & (drawn == np.floor(drawn))).all():
        raise OptionError(
            f"{type(lengths).__name__}.draw must give a whole number from 1 to max_new_tokens={most} for each of "
            f"{len(positions)} samples; it gave {shown(drawn)}"
        )
    tokens: Array = drawn.astype(np.int64)
    return tokens


def _unit_hash(seed: int, positions: Array, copies: Array, salt: int) -> Array:
    """Return one number in (0, 1) per row: splitmix64 (Steele et al., 2014) over seed, salt, position and copy.

    Each word is mixed before the next one joins: ``seed ^ position`` alone would deal the same numbers to all seeds, in another
    order.
    """
    state = np.zeros(len(positions), dtype=np.uint64)
    for word in (np.full(len(positions), seed % 2**64, dtype=np.uint64), np.full(len(positions), salt), positions, copies):
        state = (state ^ word.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
