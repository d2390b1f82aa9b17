"""Numbers about two lists of numbers, and about texts: correlations, agreement in order, repetition, exact duplicates.

A number that is missing (NaN) in one of two lists leaves its pair out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hfsdk.core.table import Array

WORDS_TOGETHER = 2
"""n of the n-grams of words whose repetition is counted."""


def pearson(x: Array, y: Array) -> float:
    """Return the correlation of two lists, shape [N] each; NaN for fewer than two pairs, or where one of them does not vary."""
    x, y = _known(x, y)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    dx, dy = (one - one.mean() for one in (x / np.abs(x).max(), y / np.abs(y).max()))
    size = float(np.sqrt(np.sum(dx**2) * np.sum(dy**2)))
    return float(np.clip(np.sum(dx * dy) / size, -1.0, 1.0)) if size else float("nan")


def spearman(x: Array, y: Array) -> float:
    """Return the correlation of two lists' ranks (Spearman 1904; ties have their mean rank); NaN as :func:`pearson`."""
    x, y = _known(x, y)
    return pearson(ranks(x), ranks(y))


def ranks(x: Array) -> Array:
    """Return each number's rank from 1, ties the mean of theirs; shape [N]."""
    values, which, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Array = (last - (counts - 1) / 2)[which] if len(values) else np.zeros(0)
    return mean


def same_order(x: Array, y: Array) -> tuple[float, int]:
    """Return in what share of pairs two lists have the same order, and how many pairs are told apart by both.

    Pairs that are equal in a list have no order there and are not counted; NaN where there is none.
    """
    x, y = _known(x, y)
    agree = differ = 0
    for i in range(len(x) - 1):
        signs = np.sign(x[i + 1 :] - x[i]) * np.sign(y[i + 1 :] - y[i])
        agree, differ = agree + int((signs > 0).sum()), differ + int((signs < 0).sum())
    return (agree / (agree + differ) if agree + differ else float("nan")), agree + differ


def repetition(text: str) -> float:
    """Return the share of a text's word pairs that were there before (seq-rep-n, Welleck et al., arXiv 1908.04319, section 3)."""
    words = text.split()
    grams = [tuple(words[i : i + WORDS_TOGETHER]) for i in range(len(words) - WORDS_TOGETHER + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def duplicates(texts: Sequence[str]) -> list[list[int]]:
    """Return the numbers of texts that are exactly the same, for each text that is there twice or more."""
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        rows.setdefault(text, []).append(row)
    return [same for same in rows.values() if len(same) > 1]


def _known(x: Array, y: Array) -> tuple[Array, Array]:
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    known = np.isfinite(x) & np.isfinite(y)
    return x[known], y[known]
