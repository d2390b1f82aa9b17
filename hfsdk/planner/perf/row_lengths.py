"""``LengthSums``: the sums of rows' lengths that a pass needs, made once for many setups."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hfsdk.core.table import Array


class LengthSums(NamedTuple):
    """Sums over the rows of a rank; of ranks that share each row, over this one's parts."""

    tokens: float
    squares: float
    """Sum of the squares of the rows' lengths (attention)."""
    longest: float
    """Tokens of the longest row, whole."""
    each: Array
    """Tokens of every row, whole."""

    @classmethod
    def of(cls, lengths: Array | LengthSums, cp: int = 1) -> LengthSums:
        """Sum the lengths of some rows; of ``cp`` ranks that share each row, one has as much of its attention as the others."""
        if isinstance(lengths, LengthSums):
            return lengths if cp == 1 else lengths._replace(tokens=lengths.tokens / cp, squares=lengths.squares / cp)
        if not len(lengths):
            return cls(0.0, 0.0, 0.0, lengths)
        floats = lengths.astype(np.float64)
        return cls(float(floats.sum()) / cp, float(floats @ floats) / cp, float(floats.max()), floats)

    def micro_batches(self, most: int, cp: int = 1) -> tuple[int, float]:
        """Return how many micro-batches of ``most`` tokens there are, and the tokens of the largest.

        A row that is longer runs alone (:func:`hfsdk.core.microbatch.plan_pass`); what several rows leave free of a micro-batch
        is not counted.
        """
        longest = self.longest / cp
        filling = self.tokens if longest <= most else float(np.minimum(self.each, most * cp).sum()) / cp
        return math.ceil(filling / most), min(self.tokens, max(float(most), longest))
