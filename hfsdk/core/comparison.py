"""Two accounts of the same calls side by side: measured against predicted, against another run, or against a guess."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError

if TYPE_CHECKING:
    import pandas as pd

Source = Literal["measured", "predicted", "guess"]


@dataclass(frozen=True, kw_only=True)
class ComparedCall:
    """One kind of call in both accounts; ``None`` where one of them has no such call."""

    call: str
    this_s: float | None
    other_s: float | None

    @property
    def error_s(self) -> float | None:
        """Seconds by which the other account is above this one (negative: below)."""
        return None if self.this_s is None or self.other_s is None else self.other_s - self.this_s

    @property
    def error(self) -> float | None:
        """The same as a share of this account: +0.25 is a quarter too much."""
        return None if self.error_s is None or not self.this_s else self.error_s / self.this_s


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of ``trace.compare(other)``; in a notebook it draws itself.

    ``this`` is the trace that was asked, ``other`` what it is held against. Errors are the other's: positive where it says more.
    """

    this: str
    other: str
    this_source: Source
    other_source: Source
    rows: tuple[ComparedCall, ...]
    total: ComparedCall
    """The whole trace's duration; of a guess the sum of the guessed calls."""

    @property
    def points(self) -> float | None:
        """How near the other account is, 0 to 100: the mean over the calls of smaller / larger seconds.

        100 is exact, 50 is off by a factor of two throughout. ``None`` where nothing can be compared.
        """
        timed = [(r.this_s, r.other_s) for r in self.rows if r.this_s is not None and r.other_s is not None]
        pairs = [(a, b) for a, b in timed if math.isfinite(a) and math.isfinite(b)]
        if not pairs:
            return None
        return 100 * sum(min(a, b) / max(a, b) if max(a, b) else 1.0 for a, b in pairs) / len(pairs)

    def __iter__(self) -> Iterator[ComparedCall]:
        return iter(self.rows)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per call and one for the total: call, this_s, other_s, error_s, error."""
        import pandas as pd

        return pd.DataFrame(self._table())

    def view(self) -> dict[str, Any]:
        """Return plain data for display."""
        return {
            "this": {"title": self.this, "source": self.this_source}, "other": {"title": self.other, "source": self.other_source},
            "rows": self._table(), "points": self.points,
        }  # fmt: skip

    def _table(self) -> list[dict[str, Any]]:
        return [
            {"call": r.call, "this_s": r.this_s, "other_s": r.other_s, "error_s": r.error_s, "error": r.error}
            for r in (*self.rows, self.total)
        ]

    def __repr__(self) -> str:
        width = max(len(r.call) for r in (*self.rows, self.total))
        head = f"{self.this} ({self.this_source}) against {self.other} ({self.other_source})"
        lines = [head + (f": {self.points:.0f} of 100 points" if self.points is not None else "")]
        for row in (*self.rows, self.total):
            error = "" if row.error is None else f"{100 * row.error:+7.0f} %"
            lines.append(f"  {row.call:<{width}} {_seconds(row.this_s)} {_seconds(row.other_s)} {error}")
        return "\n".join(lines)


MOST_SECONDS = 1e12


def against_guess(seconds: Mapping[str, float], guess: Mapping[str, float]) -> list[ComparedCall]:
    """Hold measured seconds per call (``"actor.update"``) against a guess by call or by method (``"update"``: all of them).

    Raises:
        OptionError: the guess is empty, names no call that ran or one twice, or is not a number of at least 0.
    """
    if not guess:
        raise OptionError(f"the guess is empty; guess seconds of calls, e.g. {{{next(iter(seconds), 'actor.generate')!r}: 1.0}}")
    rows: list[ComparedCall] = []
    guessed: set[str] = set()
    for name, value in guess.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= MOST_SECONDS:
            raise OptionError(f"a guess is seconds, a number of at least 0; for {shown(name)} it is {shown(value)}")
        calls = [call for call in seconds if name in (call, call.rpartition(".")[2])]
        if not calls:
            raise OptionError(f"the guess names {shown(name)}, which did not run; there are {', '.join(seconds) or 'no calls'}")
        twice = guessed & set(calls)
        if twice:
            raise OptionError(f"the guess counts {', '.join(sorted(twice))} twice, with {name!r} the second time; leave one out")
        guessed |= set(calls)
        rows.append(ComparedCall(call=str(name), this_s=sum(seconds[call] for call in calls), other_s=float(value)))
    return rows


def side_by_side(this: Mapping[str, float], other: Mapping[str, float]) -> list[ComparedCall]:
    """Pair two accounts by call, in the first one's order; calls of the other alone come last."""
    names: Sequence[str] = list(dict.fromkeys([*this, *other]))
    return [ComparedCall(call=name, this_s=this.get(name), other_s=other.get(name)) for name in names]


def _seconds(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:8.3f} s"
