"""A scorer's normalisation: the mean and the standard deviation of its raw scores, counted on samples or read from a folder."""

from __future__ import annotations

from typing import Any

import numpy as np

from hfsdk.core.checks import shown
from hfsdk.core.errors import ModelNotFoundError
from hfsdk.core.lora import ADAPTER_CONFIG
from hfsdk.core.roles import RoleSpec
from hfsdk.core.table import Table
from hfsdk.core.unscored import scored_rows
from hfsdk.core.untrusted import has_file, read_json

NORMALISATION = "hfsdk_score"
"""Key of a folder's ``config.json`` under which a scorer's mean and standard deviation are kept."""

LARGEST = float(np.finfo(np.float32).max)
"""Scores are kept in float32."""


class Moments:
    """Mean and standard deviation (unbiased) of a column with one number per scored sample; runs where the column is."""

    def __init__(self, column: str) -> None:
        """Name the column."""
        self.column = column

    def __call__(self, table: Table) -> tuple[float, float]:
        """Return both."""
        numbers = np.asarray(table[self.column], dtype=np.float64)[scored_rows(table, table.num_rows)]
        return float(np.mean(numbers)), float(np.std(numbers, ddof=1)) if len(numbers) > 1 else 0.0


def saved_normalisation(role: RoleSpec) -> tuple[float, float]:
    """Return the mean and the standard deviation that a scorer's folder has, or that of its adapters; (0, 1) where it has none.

    Raises:
        ModelNotFoundError: they are no such numbers, or the file is damaged.
    """
    folder, name = (role.adapters, ADAPTER_CONFIG) if role.adapters else (role.folder, "config.json")
    if not folder or not has_file(folder, name):
        return 0.0, 1.0
    saved: Any = read_json(folder, name).get(NORMALISATION, [0.0, 1.0])
    numbers = saved if isinstance(saved, list) and all(type(number) in (int, float) for number in saved) else []
    if len(numbers) != 2 or not all(abs(number) <= LARGEST for number in numbers) or not numbers[1] > 0:  # nor NaN
        raise ModelNotFoundError(
            f"{folder}/{name} has {NORMALISATION}={shown(saved)}; a mean and a standard deviation above 0 are needed. Mend it."
        )
    return float(numbers[0]), float(numbers[1])
