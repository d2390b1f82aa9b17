"""How large the numbers of columns are, and where the largest is: a function over a table, run where the columns lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hfsdk.core.table import Ragged, Table
from hfsdk.core.unscored import is_unscored

TIMES = 10.0
"""A number is bad from so many times the usual size on."""
LEAST = 1.0
"""The least that counts as usual: a loss in nats, a KL in nats, a ratio, a gradient's norm, a score."""


@dataclass(frozen=True)
class Spread:
    """How far the values of one column spread, and the first bad one."""

    largest: float
    """The largest absolute value among the finite ones."""
    at: tuple[int, int | None]
    """The sample and token that have it; no token in a column with one number per sample."""
    next_largest: float
    """The largest absolute value among the finite ones of the other samples."""
    bad: float | None
    """The first that is not finite."""
    bad_at: tuple[int, int | None]
    """Sample and token of ``bad``; no token either where all values of the sample are bad."""
    value: float
    """The largest itself, with its sign."""


def spreads(table: Table) -> dict[str, Spread]:
    """Return the spread of every column of floating-point numbers that has any."""
    by_name = {name: _spread(column) for name, column in table.items()}
    return {name: spread for name, spread in by_name.items() if spread is not None}


def _spread(column: Any) -> Spread | None:
    values = column.flat if isinstance(column, Ragged) else column
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f" or not values.size or values.ndim != 1:
        return None
    lengths = column.lengths if isinstance(column, Ragged) else np.ones(len(values), np.int64)
    samples = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    # Unscored samples are their own NaN on purpose and must not be reported as bad.
    finite = np.isfinite(values) | is_unscored(values)
    sizes = np.where(np.isfinite(values), np.abs(values), 0.0)
    top = int(sizes.argmax())
    # One sample with many large tokens would hide how far it lies from the rest, so its own tokens do not count as usual.
    others = sizes[samples != samples[top]]

    def place(index: int) -> tuple[int, int | None]:
        sample = int(samples[index])
        return sample, int(index - starts[sample]) if isinstance(column, Ragged) else None

    bad: float | None = None
    bad_at: tuple[int, int | None] = 0, None
    if not finite.all():
        first = int(np.flatnonzero(~finite)[0])
        bad, bad_at = float(values[first]), place(first)
        if lengths[bad_at[0]] > 1 and not finite[samples == bad_at[0]].any():
            bad_at = bad_at[0], None
    return Spread(
        float(sizes[top]), place(top), float(others.max()) if len(others) else 0.0, bad, bad_at, float(values[top])
    )  # fmt: skip


def odd(now: Spread, before: Spread | None) -> float | None:
    """Return how large a column's numbers usually are where one is far above that, infinity where one is not finite; else ``None``.

    Usual is what the column had in the step before, where there is one, and else what the other samples have. A column that held
    a column that is not finite in the step before either is judged by its other numbers.
    """
    if now.bad is not None and (before is None or before.bad is None):
        return float("inf")
    usual = max(LEAST, now.next_largest if before is None else before.largest)
    return usual if now.largest > TIMES * usual else None
