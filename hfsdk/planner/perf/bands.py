"""Bands: between which multiples of its prediction the next measurement lies, stated for measurements that nothing was fitted to.

Of n values the next one, drawn alike, falls into each of the n + 1 gaps between them equally often (Vovk et al., 2005; Lei et al.,
arXiv 1604.04173)::

    9 values        . | . . . . . . . | .        outside the lowest and the highest: 2 of 10, so that four in five are inside
    4 values        . | . . | .                  2 of 5: four values alone cannot say where four in five are

Where they are too few they are taken as normal, around a middle and with a spread that all kinds together suggest: the next value
then has Student's t distribution (Gelman et al., Bayesian Data Analysis, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

SHARE = 0.8
"""Share of further measurements that a band is to hold."""

UNKNOWN_SPREAD = 0.25
"""Standard deviation of log measured over predicted where nothing is known of it: that of the presets, in round figures."""

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class BandCoverage:
    """How often bands held measurements that were left out, one in turn, when they were made."""

    held: int
    num_rows: int

    def __str__(self) -> str:
        return f"{self.held} of {self.num_rows}"


def gap(count: int, share: float = SHARE) -> int:
    """Return how many of so many values lie beyond either end of the narrowest band that holds the share; 0 where none does."""
    return math.floor((count + 1) * (1 - share) / 2 + 1e-9)


def order_band(values: Sequence[float], share: float = SHARE) -> Span | None:
    """Return the values between which the next one lies at least with this probability; ``None`` where they are too few."""
    beyond = gap(len(values), share)
    if not beyond:
        return None
    ordered = sorted(values)
    return ordered[beyond - 1], ordered[-beyond]


def spread_band(values: Sequence[float], spread: float, share: float = SHARE) -> Span:
    """Return between which values the next one lies, where all are normal and few.

    Args:
        values: values of one kind; may be empty.
        spread: standard deviation around 0 of the values of all kinds: counts as one more value at 0, and as two more that say
            how far values lie apart.
        share: probability of the band.
    """
    count = len(values)
    mean = float(np.mean(values)) if count else 0.0
    around = float(np.sum(np.square(np.subtract(values, mean)))) if count else 0.0
    squares = 2 * spread**2 + around + count / (count + 1) * mean**2
    middle, freedom = mean * count / (count + 1), count + 2
    half = student_quantile((1 + share) / 2, freedom) * math.sqrt(squares / freedom * (1 + 1 / (count + 1)))
    return middle - half, middle + half


def student_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution, to a thousandth from 0.1 to 0.9 and two degrees of freedom on.

    Expanded around the normal quantile (Abramowitz and Stegun, 26.7.5); of two degrees there is a closed form.
    """
    if freedom == 2:
        return (2 * share - 1) * math.sqrt(2 / (4 * share * (1 - share)))
    z = NormalDist().inv_cdf(share)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / float(freedom) ** power for power, term in enumerate(terms))


def bands_of(values: Mapping[str, Sequence[float]], share: float = SHARE) -> dict[str, Span]:
    """Return the band of every kind, and of all together as ``""``; by order where a kind has enough values, else by spread."""
    every = [value for ones in values.values() for value in ones]
    spread = math.sqrt(float(np.mean(np.square(every)))) if every else UNKNOWN_SPREAD
    whole = order_band(every, share) or spread_band(every, spread, share)
    return {"": whole} | {kind: order_band(ones, share) or spread_band(ones, spread, share) for kind, ones in values.items()}


def kept_by(values: Mapping[str, Sequence[float]], share: float = SHARE) -> dict[str, BandCoverage]:
    """Return, by kind, how many values lie in the band of their kind that is made of all others; as ``""`` in the band of all."""
    counts = {"": 0} | dict.fromkeys(values, 0)
    for kind, ones in values.items():
        for number, value in enumerate(ones):
            bands = bands_of({**values, kind: [*ones[:number], *ones[number + 1 :]]}, share)
            for name in ("", kind):
                counts[name] += bands[name][0] <= value <= bands[name][1]
    rows = {kind: len(ones) for kind, ones in values.items()}
    return {kind: BandCoverage(held=count, num_rows=rows[kind] if kind else sum(rows.values())) for kind, count in counts.items()}


def grouped_band(values: Mapping[Hashable, Sequence[float]], share: float = SHARE) -> Span | None:
    """Return between which values one of a further group lies, where values of a group are alike: every group counts the same.

    One value of each group, whichever it is, has the variance of the groups' means and, besides, their own; the next one has
    Student's t distribution around the mean of means, with as many degrees of freedom as there are other groups (one-way random
    effects: Searle, Casella and McCulloch, Variance Components, section 3.6). ``None`` of fewer than three groups.
    """
    count = len(values)
    if count < 3:
        return None
    means = [float(np.mean(ones)) for ones in values.values()]
    variance = float(np.var(means, ddof=1)) + float(np.mean([np.var(ones) for ones in values.values()]))
    half = student_quantile((1 + share) / 2, count - 1) * math.sqrt(variance * (1 + 1 / count))
    return float(np.mean(means)) - half, float(np.mean(means)) + half
