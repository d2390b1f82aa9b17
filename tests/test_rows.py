"""Rows read as the list of dicts that was put in, and take a few bytes per number."""

import math
import tracemalloc

import pandas as pd

from hfsdk.core.rows import Rows


def test_what_comes_out_is_what_went_in_types_included():
    rows = [
        {"step": 0, "kl": 0.1, "branch": "main", "own": True}, {"step": 1, "kl": math.inf, "branch": "main", "own": None}, {},
        {"step": 2**70, "kl": 3}, {"kl": 0.5, "step": 4}, {"step": 0, "kl": 0.1, "branch": "other", "own": [1]},
    ]  # fmt: skip
    kept = Rows(rows)
    assert kept == rows
    assert list(kept) == rows
    assert [[type(v) for v in row.values()] for row in kept] == [[type(v) for v in row.values()] for row in rows]
    assert [list(row) for row in kept] == [list(row) for row in rows], "the order of the keys"
    assert (kept[-1], kept[1:3], len(kept)) == (rows[-1], rows[1:3], 6)
    assert pd.DataFrame(list(kept)).equals(pd.DataFrame(rows))


def test_a_row_that_came_out_is_the_readers_own():
    kept = Rows([{"a": 1}])
    kept[0]["a"] = 2
    assert kept[0] == {"a": 1}


def test_a_number_takes_eight_bytes():
    """Beside its numbers a row takes its shape and its place, eight bytes each; as a dict it would take some three hundred."""
    tracemalloc.start()
    try:
        kept = Rows({"step": i, "kl": i / 7} for i in range(10_000))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept) == 10_000
    assert taken < 4 * 10_000 * 16, "an array has some room to grow, and other threads allocate meanwhile"
