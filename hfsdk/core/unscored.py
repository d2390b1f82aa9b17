"""Samples that a reward did not score: its ``None``, which is left out of everything that is learned, and never counts as 0.

In a column it is one NaN of its own bits (:data:`NOT_SCORED`), as R keeps its NA. So it goes wherever the column goes: through
``take``, ``alias`` and ``join``, into float64 and back, through a sum or a product with a number (IEEE 754-2019, 6.2.3). A NaN that
arithmetic made has other bits and stays an error.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hfsdk.core.errors import ColumnError
from hfsdk.core.table import Array, Column, Ragged

_BITS = np.uint32(0x7FC0_0A11)

NOT_SCORED: np.float32 = np.array([_BITS]).view(np.float32)[0]
"""The value in a column for a sample that was not scored."""

SCORES = ("scores", "costs", "baseline_scores")
"""The built-in columns of one number per sample in which it may stand."""

PART = "scores_of_"
"""Beginning of the names of columns with the scores of each part of a weighted sum: a sample that a part did not score may be
scored by the others, and what the sum says counts."""

_OF_DTYPE = {
    np.dtype(np.float32): (np.uint32, _BITS, np.uint32(0x7FFF_FFFF)),
    np.dtype(np.float64): (np.uint64, np.array([NOT_SCORED]).astype(np.float64).view(np.uint64)[0], np.uint64(2**63 - 1)),
}
"""Integer type to view a number's bits as, bits to find, and mask to compare (all but the sign), by dtype."""


def is_unscored(numbers: Array) -> Array:
    """Return of each number whether it is :data:`NOT_SCORED`; bool, of the same shape."""
    numbers = np.ascontiguousarray(numbers)
    if numbers.dtype not in _OF_DTYPE:
        return np.zeros(numbers.shape, dtype=bool)
    bits, wanted, mask = _OF_DTYPE[numbers.dtype]
    matches: Array = (numbers.view(bits) & mask) == wanted
    return matches


def unscored_rows(column: Column) -> Array:
    """Return the numbers of the rows of a column that are not scored, or that have a token which is not."""
    if isinstance(column, list):
        return np.zeros(0, dtype=np.int64)
    if not isinstance(column, Ragged):
        return np.flatnonzero(is_unscored(column))
    tokens = np.flatnonzero(is_unscored(column.flat))
    return np.unique(np.searchsorted(column.offsets, tokens, side="right") - 1)


def unscored_or_none(column: Column) -> Array | None:
    """Return the same, ``None`` where all rows are scored."""
    rows = unscored_rows(column)
    return rows if len(rows) else None


def scored_rows(columns: Mapping[str, Column], num_rows: int) -> Array:
    """Return the numbers of the rows that are scored in all of some columns.

    Raises:
        ColumnError: there is none.
    """
    scored = np.ones(num_rows, dtype=bool)
    for column in columns.values():
        scored[unscored_rows(column)] = False
    if num_rows and not scored.any():
        raise ColumnError(NONE_SCORED.format(num_rows))
    return np.flatnonzero(scored)


NONE_SCORED = (
    "none of the {} samples is scored, so there is nothing to learn from: the reward gave None for each (of a sum, every part "
    'did), or failed on it with failures="skip". reward.probe(batch) shows what it gives and why.'
)
"""The message for a batch without any score."""
