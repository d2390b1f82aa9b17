"""Local column data: ``Ragged`` (variable-length arrays, no padding) and ``Table`` (equal-length columns in memory).

A column of a :class:`Table` is one of three things:

=========  =========================================  ==============================================
kind       held as                                    example
=========  =========================================  ==============================================
scalar     ``numpy.ndarray`` of shape [num_rows]      scores, finish_reason (fixed-width), group
ragged     :class:`Ragged`                            prompt, response, values, advantages
object     ``list`` of length num_rows                text, a dataset's own columns
=========  =========================================  ==============================================

A :class:`hfsdk.core.batch.Batch` is the same table by reference: its columns live in the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hfsdk.core.checks import AnyNumber, check_fields, checked, is_whole, shown
from hfsdk.core.errors import ColumnError
from hfsdk.core.hints import RAGGED, AttributeHints
from hfsdk.core.text import printable

Array = npt.NDArray[Any]
RowLengths = tuple[Array, Array]
"""Prompt lengths and response lengths of some rows."""

MOST_ROWS = 10**8

RowNumbers = Sequence[int] | Sequence[bool] | Array
"""Numbers of rows, or one truth value for each row (a mask)."""


def row_numbers(rows: RowNumbers, num_rows: int, what: str) -> npt.NDArray[np.int64]:
    """Return the numbers of rows, none of them negative.

    Raises:
        ColumnError: these are not numbers of rows that ``what`` has.
    """
    index = np.asarray(rows)
    if index.ndim != 1 or (len(index) and index.dtype.kind not in "iub"):
        raise ColumnError(f"rows must be row numbers of {what}, e.g. [3, 1], or a mask; got rows={shown(rows)}")
    if index.dtype == bool:
        if len(index) != num_rows:
            raise ColumnError(f"the row mask has {len(index)} entries; {what} has {num_rows} samples")
        return np.flatnonzero(index)
    wrong = index[(index < -num_rows) | (index >= num_rows)]
    if len(wrong):
        raise ColumnError(f"row {wrong[0]} does not exist; {what} has {num_rows} samples (0 to {num_rows - 1})")
    index = index.astype(np.int64)
    return index if not len(index) or index.min() >= 0 else index % num_rows


@dataclass(frozen=True, eq=False)
class Ragged(AttributeHints, np.lib.mixins.NDArrayOperatorsMixin):
    """One variable-length array per row, held flat: row ``i`` is ``flat[offsets[i]:offsets[i + 1]]``.

    Example: ``Ragged.of([[1, 2], [], [3]])`` has ``flat`` = [1 2 3], ``offsets`` = [0 2 2 3], ``lengths`` = [2 0 1].

    Arithmetic and NumPy's elementwise functions take it, with a number or a column of the same lengths:
    ``np.exp(batch["old_log_probs"] - batch["ref_log_probs"])``.
    """

    flat: Array
    """All rows, one after the other; shape [total]."""
    offsets: npt.NDArray[np.int64]
    """Row starts and the end; shape [num_rows + 1]."""

    _elsewhere: ClassVar[Mapping[str, str]] = RAGGED

    def __post_init__(self) -> None:
        offsets = self.offsets
        if type(self.flat) is not np.ndarray or type(offsets) is not np.ndarray or offsets.ndim != 1 or self.flat.ndim != 1:
            check_fields(self, ColumnError)
            raise ColumnError(f"flat and offsets must be arrays of one axis; got shapes {self.flat.shape} and {offsets.shape}")
        if not len(offsets) or offsets.dtype.kind not in "iu" or offsets[0] != 0 or offsets[-1] != len(self.flat):
            raise ColumnError(f"offsets must begin at 0 and end at {len(self.flat)}, the number of values; got {shown(offsets)}")

    @classmethod
    @checked(error=ColumnError)
    def of(cls, rows: Iterable[Sequence[Any] | Array], dtype: Any = None) -> Ragged:
        """Build from one sequence per row."""
        try:
            dtype = None if dtype is None else np.dtype(dtype)
        except Exception as error:  # the user's own object raises what it likes
            raise ColumnError(f"dtype must be a dtype of numpy; got dtype={shown(dtype)}") from error
        arrays = [_as_row(row, dtype, i) for i, row in enumerate(_each(rows))]  # what is no row is told before the next is read
        filled = [a for a in arrays if len(a)]
        flat = np.concatenate(filled) if filled else np.zeros(0, dtype=dtype or np.float32)
        return cls.from_lengths(flat, [len(a) for a in arrays])

    @classmethod
    @checked(error=ColumnError)
    def from_lengths(cls, flat: Array, lengths: Sequence[int] | Array) -> Ragged:
        """Build from the flat values and each row's length."""
        sizes = np.asarray(lengths)
        if flat.ndim != 1 or sizes.ndim != 1 or (len(sizes) and (sizes.dtype.kind not in "iu" or sizes.min() < 0)):
            raise ColumnError(f"lengths must be whole numbers of at least 0 and flat of one axis; got lengths={shown(lengths)}")
        offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        if offsets[-1] != len(flat):
            raise ColumnError(f"the lengths add up to {offsets[-1]}, but there are {len(flat)} values")
        return cls(flat, offsets)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Length of every row; shape [num_rows]."""
        return np.diff(self.offsets)

    @property
    def dtype(self) -> Any:
        """Element dtype."""
        return self.flat.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets."""
        return int(self.flat.nbytes + self.offsets.nbytes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        if not is_whole(row):
            raise ColumnError(f"row must be a whole number; got row={shown(row)}")
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} does not exist; the column has {len(self)} rows")
        row %= len(self)
        return self.flat[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.flat, other.flat)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return id(self)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Ragged:
        """Apply an elementwise function of NumPy to the values."""
        columns = [column for column in inputs if isinstance(column, Ragged)]
        if method != "__call__" or "out" in options or "where" in options or ufunc.nout != 1 or ufunc.signature is not None:
            raise ColumnError(
                f"rows of different lengths take no {ufunc.__name__}.{method}; column.flat has all values in one array"
            )
        if any(not np.array_equal(column.offsets, self.offsets) for column in columns):
            raise ColumnError(f"{ufunc.__name__} takes columns whose rows have the same lengths")
        if any(np.ndim(column) for column in inputs if not isinstance(column, Ragged)):
            raise ColumnError(
                f"{ufunc.__name__} takes columns of rows and single numbers; np.repeat(numbers, column.lengths) has a number "
                "per value of column.flat"
            )
        flat = ufunc(*(column.flat if isinstance(column, Ragged) else column for column in inputs), **options)
        return Ragged(flat, self.offsets)

    @checked(error=ColumnError)
    def take(self, rows: RowNumbers) -> Ragged:
        """Return the rows with these numbers, in this order; consecutive rows are a view, not a copy.

        Raises:
            ColumnError: there is no such row.
        """
        index = row_numbers(rows, len(self), "the column")
        if len(index) == len(self) and np.array_equal(index, np.arange(len(self))):
            return self
        lengths = self.lengths[index]
        # A run of rows is the usual case (micro-batches, a rank's share) and must not copy gigabytes.
        if len(index) and np.array_equal(index, np.arange(index[0], index[0] + len(index))):
            first, last = int(index[0]), int(index[-1]) + 1
            return Ragged(
                self.flat[self.offsets[first] : self.offsets[last]],
                self.offsets[first : last + 1] - self.offsets[first],
            )
        offsets = np.zeros(len(index) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # Where each value comes from: the start of its row there minus its start here, plus its place here.
        positions = np.repeat(self.offsets[:-1][index] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Ragged(self.flat[positions], offsets)

    @checked(error=ColumnError)
    def map(self, flat: Array) -> Ragged:
        """Return other values in the same shape."""
        return Ragged.from_lengths(flat, self.lengths)

    @checked(error=ColumnError)
    def padded(self, fill: AnyNumber | bool | str = 0) -> Array:
        """Return a [num_rows, longest] array, rows left-aligned, the rest ``fill``."""
        lengths, refusal = self.lengths, ColumnError(f"fill must be one value of {self.flat.dtype}; got fill={shown(fill)}")
        if isinstance(fill, str) and self.flat.dtype.kind not in "OSU":
            raise refusal
        try:
            out = np.full((len(self), int(lengths.max(initial=0))), fill, dtype=self.flat.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise refusal from error
        mask = np.arange(out.shape[1])[None, :] < lengths[:, None]
        out[mask] = self.flat
        return out

    @staticmethod
    @checked(error=ColumnError)
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """Stack the rows of several."""
        if len({p.dtype.kind in "OSU" for p in parts}) > 1:
            raise ColumnError(f"parts must be all of numbers or all of texts; got {', '.join(str(p.dtype) for p in parts)}")
        flat = np.concatenate([p.flat for p in parts]) if parts else np.zeros(0, np.float32)
        lengths = np.concatenate([p.lengths for p in parts]) if parts else np.zeros(0, np.int64)
        return Ragged.from_lengths(flat, lengths)

    def __repr__(self) -> str:
        lengths = self.lengths
        spread = f"lengths {lengths.min()}..{lengths.max()}" if len(self) else "no rows"
        return f"Ragged({len(self)} rows, {spread}, {self.flat.dtype})"


Column = Array | Ragged | list[Any]


def _each(rows: Any) -> Iterator[Any]:
    """Yield the rows of the user's own object, one after another."""
    try:
        yield from rows
    except Exception as error:
        raise ColumnError(f"rows cannot be read; got rows={shown(rows)}") from error


def _as_row(row: Any, dtype: Any, number: int) -> Array:
    """Return one row of a ragged column.

    Raises:
        ColumnError: it is no list of numbers, or of another dtype.
    """
    try:
        array = np.asarray(row, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ColumnError(f"row {number} must be a list of numbers{f' of {dtype}' if dtype else ''}; got {shown(row)}") from error
    if array.ndim != 1:
        raise ColumnError(f"row {number} must be a list of values; got {shown(row)}")
    return array


def take(column: Column, rows: Sequence[int] | Array) -> Column:
    """Return some rows of a column of any kind."""
    if isinstance(column, Ragged):
        return column.take(rows)
    if isinstance(column, list):
        return [column[int(i)] for i in rows]
    return column[np.asarray(rows, dtype=np.int64)]


def concat(parts: Sequence[Column]) -> Column:
    """Stack the rows of columns of one kind."""
    first = parts[0]
    if isinstance(first, Ragged):
        return Ragged.concat([p for p in parts if isinstance(p, Ragged)])
    if isinstance(first, list):
        return [value for part in parts for value in part]
    stacked: Array = np.concatenate([np.asarray(p) for p in parts])
    return stacked


def kind_of(column: Column) -> str:
    """Return ``"ragged"``, ``"object"`` or ``"scalar"``."""
    if isinstance(column, Ragged):
        return "ragged"
    return "object" if isinstance(column, list) else "scalar"


def as_column(value: Any) -> Column:
    """Turn a user's list or array into a column: lists of sequences ragged, numbers scalar, the rest objects."""
    if isinstance(value, Ragged):
        return value
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value if value.ndim == 1 else Ragged.of(list(value))
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ColumnError(f"a column must be a list or an array with one entry per sample; got {shown(value)}")
    if isinstance(value, Sized) and len(value) > MOST_ROWS:
        raise ColumnError(f"a column has at most {MOST_ROWS:,} entries; got {shown(value)}")
    items = list(value)
    # Booleans and numbers before lists: a list of numbers is one number per sample, not one ragged row.
    if items and all(isinstance(v, (bool, int, float, np.number)) for v in items):
        return np.asarray(items)
    if items and all(_is_numbers(v) for v in items):
        return Ragged.of(items)
    return items


def _is_numbers(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype != object and value.ndim == 1
    return isinstance(value, (list, tuple)) and all(isinstance(v, (int, float, np.number)) for v in value)


class Table(Mapping[str, Column]):
    """Equal-length columns in memory; read-only as a mapping.

    Attributes:
        row_ids: the number of each row in the batch it was taken from; shape [num_rows].
    """

    @checked(error=ColumnError)
    def __init__(self, columns: Mapping[str, Column], row_ids: RowNumbers | None = None) -> None:
        self._columns = dict(columns)
        sizes = {name: len(column) for name, column in self._columns.items()}
        if len(set(sizes.values())) > 1:
            raise ColumnError(f"columns of different lengths: {sizes}; give every column one entry per sample")
        self.num_rows = next(iter(sizes.values()), 0 if row_ids is None else len(row_ids))
        try:
            self.row_ids: Array = np.arange(self.num_rows) if row_ids is None else np.asarray(row_ids, dtype=np.int64)
        except Exception as error:  # texts, or the user's own objects
            raise ColumnError(f"row_ids must be whole numbers, one for each row; got row_ids={shown(row_ids)}") from error
        if self.row_ids.shape != (self.num_rows,):
            raise ColumnError(f"row_ids must be {self.num_rows:,} whole numbers, one for each row; got row_ids={shown(row_ids)}")

    def __getitem__(self, name: str) -> Column:
        if not isinstance(name, str) or name not in self._columns:
            raise ColumnError(f"no column {shown(name)}; there are {sorted(self._columns)}")
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    @checked(error=ColumnError)
    def ragged(self, name: str) -> Ragged:
        """Return a ragged column, or say that it is of another kind."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise ColumnError(f"column {shown(name)} has one value per sample; a variable-length column is needed here")
        return column

    @checked(error=ColumnError)
    def take(self, rows: RowNumbers) -> Table:
        """Return some rows, in this order.

        Raises:
            ColumnError: there is no such row.
        """
        index = row_numbers(rows, self.num_rows, "the table")
        return Table({name: take(column, index) for name, column in self._columns.items()}, self.row_ids[index])

    @checked(error=ColumnError)
    def with_columns(self, columns: Mapping[str, Column]) -> Table:
        """Return the table with more (or other) columns."""
        return Table({**self._columns, **columns}, self.row_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the numeric columns."""
        return sum(int(column.nbytes) for column in self._columns.values() if not isinstance(column, list))

    def __repr__(self) -> str:
        return printable(f"Table({self.num_rows} rows: {', '.join(self._columns)})")
