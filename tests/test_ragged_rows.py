"""Rows of different lengths: taken in any order and as often as asked, padded each on its own line."""

import numpy as np
import pytest

from hfsdk.core.table import Ragged, Table

ROWS = [[1, 2, 3], [], [4], [5, 6]]


@pytest.mark.parametrize("index", [[3, 0], [2, 2, 1, 2], [0, 3, 3], [-1, -4], [1], [3, 2, 1, 0]])
def test_rows_come_in_the_order_asked_for_and_as_often(index):
    wanted = [ROWS[i] for i in index]
    assert [row.tolist() for row in Ragged.of(ROWS, np.int64).take(index)] == wanted
    table = Table({"a": Ragged.of(ROWS, np.int64), "b": np.arange(4), "c": list("wxyz")})
    taken = table.take(index)
    assert [row.tolist() for row in taken.ragged("a")] == wanted
    assert taken["b"].tolist() == [i % 4 for i in index]
    assert taken["c"] == ["wxyz"[i] for i in index]


def test_padding_stands_behind_each_row():
    padded = Ragged.of(ROWS, np.int64).padded(9)
    assert padded.tolist() == [[1, 2, 3], [9, 9, 9], [4, 9, 9], [5, 6, 9]]
