"""``Tokens``: some samples of a batch brought here, with the bytes of every token, to be looked at token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hfsdk.core.builtin import SEQUENCES
from hfsdk.core.checks import check_options, is_whole, shown
from hfsdk.core.errors import ColumnError, OptionError
from hfsdk.core.table import Array, Ragged, Table, row_numbers

SHOWN_SAMPLES = 64
"""Samples shown when the caller does not choose."""
SHOWN_TOKENS = 8_000
"""Response tokens shown when the caller does not choose, at most (one sample at least)."""
MOST_TOKENS = 200_000
"""Response tokens that can be looked at together."""
MOST_OF_SAMPLE = 20_000
"""Tokens of one prompt, and of one response, that are drawn: the last of the one, the first of the other."""


def choose_rows(rows: Any, lengths: Array) -> Array:
    """Return the row numbers to show, of a batch whose responses have these lengths.

    Raises:
        ColumnError: a row does not exist, or none is chosen.
        OptionError: ``rows`` is a number, or the samples have more than ``MOST_TOKENS`` tokens.
    """
    count = len(lengths)
    if rows is None:
        fits = int(np.searchsorted(np.cumsum(lengths), SHOWN_TOKENS, side="right"))
        return np.arange(min(count, SHOWN_SAMPLES, max(1, fits)))
    if is_whole(rows):
        raise OptionError(f"rows={rows} is ambiguous; use rows=[{rows}] for that sample or rows=range({rows}) for the first")
    if isinstance(rows, str) or not isinstance(rows, slice | Sequence | np.ndarray):
        raise OptionError(f"rows must be sample numbers, e.g. range(8), [3, 1] or a mask; got rows={shown(rows)}")
    try:
        index = np.arange(count)[rows] if isinstance(rows, slice) else row_numbers(rows, count, "the batch")
    except (TypeError, ValueError) as error:
        raise OptionError(f"rows must be sample numbers, e.g. range(8), [3, 1] or a mask; got rows={shown(rows)}") from error
    if not len(index):
        raise ColumnError(f"no rows selected; the batch has {count} samples (0 to {count - 1})")
    total = int(lengths[index].sum())
    if total > MOST_TOKENS:
        raise OptionError(
            f"{len(index)} samples with {total:,} response tokens are asked for; at most {MOST_TOKENS:,} can be drawn together. "
            "Choose fewer, e.g. rows=range(64)."
        )
    return index


@dataclass(frozen=True, eq=False, repr=False)
class Tokens:
    """Some samples token by token. In a notebook it draws itself; ``hf.viz.tokens_picture`` gives the picture itself."""

    table: Table
    """Every column of the samples shown."""
    rows: Array
    """Row numbers of the samples in the batch."""
    num_rows: int
    """Samples of the whole batch."""
    first_rows: Array
    """The row of each sample's first token in the batch's ``to_pandas("tokens")``."""
    vocabulary: dict[int, bytes]
    """The bytes of every token id that occurs."""
    new: str | None = None
    """Column with the log-probabilities under the policy as it is now."""
    old: str = "old_log_probs"
    """Column of the ratio's denominator."""
    clip: float = 0.2
    """epsilon below 1, and above 1 without ``clip_high``."""
    clip_high: float | None = None
    """epsilon above 1."""
    color: str | None = None
    """The number that colours the tokens at first."""

    @classmethod
    def of(
        cls,
        table: Table,
        rows: Array,
        num_rows: int,
        first_rows: Array,
        token_bytes: Callable[[Sequence[int]], list[bytes]],
        *,
        new: str | None = None,
        old: str = "old_log_probs",
        clip: float = 0.2,
        clip_high: float | None = None,
        color: str | None = None,
    ) -> Tokens:
        """Look up the bytes of the tokens, and check the options against the columns."""
        check_clip(clip, clip_high)
        check_options("tokens", color=(color, str | None))
        lengths = table.ragged("response").lengths
        for name in (new, old) if new is not None else ():
            check_per_token(table, name, lengths)
        ids = [c.flat for name, c in table.items() if name in SEQUENCES and isinstance(c, Ragged)]
        used = [int(i) for i in np.unique(np.concatenate(ids))] if sum(map(len, ids)) else []
        vocabulary = dict(zip(used, token_bytes(used) if used else [], strict=True))
        return cls(table, rows, num_rows, first_rows, vocabulary, new, old, float(clip), clip_high, color)

    def shortened(self) -> Tokens:
        """Return the same with at most ``MOST_OF_SAMPLE`` tokens of each prompt and response; itself where none is longer."""
        lengths = self.table.ragged("response").lengths
        cuts = {}
        for name, column in self.table.items():
            if isinstance(column, Ragged) and len(column.flat) and column.lengths.max() > MOST_OF_SAMPLE:
                # Of a prompt its end is kept, next to the response; of a response its beginning.
                part = slice(-MOST_OF_SAMPLE, None) if name == "prompt" else slice(MOST_OF_SAMPLE)
                if name == "prompt" or np.array_equal(column.lengths, lengths):
                    rows = [column[i][part] for i in range(len(column.lengths))]
                    cuts[name] = Ragged.from_lengths(np.concatenate(rows), np.array([len(row) for row in rows]))
        if not cuts:
            return self
        table = self.table.with_columns(cuts)
        used = {int(i) for name in SEQUENCES if isinstance(c := table.get(name), Ragged) for i in np.unique(c.flat)}
        return replace(self, table=table, vocabulary={i: raw for i, raw in self.vocabulary.items() if i in used})

    def __repr__(self) -> str:
        clip = "" if self.new is None else f", ratio exp({self.new} - {self.old}) clipped at {self.clip:g}"
        tokens = len(self.table.ragged("response").flat)
        return f"Tokens({len(self.rows)} of {self.num_rows} samples, {tokens} response tokens{clip})"


def check_clip(clip: Any, clip_high: Any) -> None:
    """Refuse bounds of the ratio that are none.

    Raises:
        OptionError: says which, and what it should be.
    """
    check_options("", clip=(clip, float), clip_high=(clip_high, float | None))
    if not 0 < clip < 1:
        raise OptionError(f"clip must be between 0 and 1; got clip={clip!r}")
    if clip_high is not None and not 0 < clip_high < float("inf"):
        raise OptionError(f"clip_high must be above 0, or None; got clip_high={clip_high!r}")


def check_per_token(table: Table, name: str, lengths: Array) -> None:
    """Refuse a column that does not have one number per response token.

    Raises:
        ColumnError: names the column and the first sample that differs.
    """
    values = table.ragged(name)
    wrong = np.flatnonzero(values.lengths != lengths)
    if len(wrong):
        i = int(wrong[0])
        raise ColumnError(
            f"column {name!r} has {values.lengths[i]} values for sample {i} of those shown, whose response has {lengths[i]} "
            "tokens; give one value per response token"
        )
    if len(values.flat) and values.dtype.kind not in "fiub":
        raise ColumnError(f"column {name!r} holds {values.dtype}; numbers are needed, one per response token")
