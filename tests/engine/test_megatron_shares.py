"""Shares of a real model, pairwise: each layout and each model with both kinds of optimizer.

Every combination is in ``sweeps/test_share_layouts.py``.
"""

from share_laws import *  # noqa: F403  (its fixtures and tests, asked of KEYS and FILES)

KEYS = [
    ("dp4", "tied", True), ("dp4", "half", False), ("tp2 dp2", "half", True), ("tp2 dp2", "critic", False),
    ("pp2 dp2", "critic", True), ("pp2 dp2", "tied", False),
]  # fmt: skip
FILES = ["tp2 dp2"]
