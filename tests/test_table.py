"""Columns of rows of different lengths: what the user gives is read once, and no further than it holds."""

import itertools

import numpy as np
import pytest

from hfsdk.core.errors import ColumnError
from hfsdk.core.table import Ragged


def test_rows_may_come_one_after_another():
    column = Ragged.of(iter([[1, 2], [], [3]]), np.int32)
    assert [list(column[i]) for i in range(len(column))] == [[1, 2], [], [3]]


def test_what_is_no_row_is_told_before_the_next_is_read():
    endless = itertools.count(7)
    with pytest.raises(ColumnError, match="row 0 must be a list of values; got 7"):
        Ragged.of(endless)
    assert next(endless) == 8


def test_an_object_that_fails_while_it_is_read_is_told():
    def rows():
        yield [1]
        raise OSError("the disk is gone")

    with pytest.raises(ColumnError, match="rows cannot be read"):
        Ragged.of(rows())
