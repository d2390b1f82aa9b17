"""Columns of rows of different lengths: what the user gives is read once, and no further than it holds."""

import itertools

import numpy as np
from expect import each, refuses

from hfsdk.core.errors import ColumnError
from hfsdk.core.table import Ragged


def test_rows_may_come_one_after_another():
    column = Ragged.of(iter([[1, 2], [], [3]]), np.int32)
    assert [list(column[i]) for i in range(len(column))] == [[1, 2], [], [3]]


def test_what_is_no_row_is_told_before_the_next_is_read():
    endless = itertools.count(7)
    with refuses(ColumnError, "row 0", "got 7"):
        Ragged.of(endless)
    assert next(endless) == 8


def test_an_object_that_fails_while_it_is_read_is_told():
    def rows():
        yield [1]
        raise OSError("the disk is gone")

    with refuses(ColumnError, "rows=<generator") as caught:
        Ragged.of(rows())
    assert isinstance(caught.value.__cause__, OSError)


class TestArithmetic:
    ONE, OTHER = Ragged.of([[1, 2], [3]], np.float32), Ragged.of([[10, 20], [30]], np.float32)

    @each(
        "found, wanted",
        [(OTHER - ONE, [9, 18, 27]), (2 * ONE, [2, 4, 6]), (np.float32(1) + ONE, [2, 3, 4]), (abs(-ONE), [1, 2, 3]),
         (np.exp(ONE - ONE), [1, 1, 1]), (ONE > 1, [False, True, True])],
    )  # fmt: skip
    def test_is_per_value(self, found, wanted):
        assert isinstance(found, Ragged)
        assert list(found.flat) == wanted
        assert list(found.lengths) == [2, 1]

    @each(
        "make, words",
        [(lambda one: one - Ragged.of([[1], [2, 3]]), "the same lengths"), (lambda one: one - np.array([1.0, 2.0]), "np.repeat"),
         (lambda one: np.add.reduce(one), "column.flat")],
    )  # fmt: skip
    def test_that_is_not_says_what_to_do(self, make, words):
        with refuses(ColumnError, words):
            make(self.ONE)

    def test_equality_is_of_whole_columns(self):
        assert Ragged.of([[1, 2], [3]], np.float32) == self.ONE
        assert self.ONE != self.OTHER


@each("fill", ["3", "x" * 1_000_000])
def test_text_fills_no_numbers(fill):
    with refuses(ColumnError, "fill", "int64"):
        Ragged.of([[1, 2], []], np.int64).padded(fill)


@each("rows, fill", [([[1, 2], [3]], 0), ([["a", "b"], ["c"]], "-")])
def test_short_rows_are_filled_at_the_right(rows, fill):
    assert Ragged.of(rows).padded(fill).tolist() == [rows[0], [rows[1][0], fill]]
