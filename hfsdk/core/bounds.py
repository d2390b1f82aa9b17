"""What stands beside a type in ``Annotated``: ``Within``, ``Length``, ``OneOf``; and what a rule is, with its no."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

MOST_ITEMS = 10_000_000
"""Longest list that is taken where nothing else is said."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Ends of a range of numbers."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    finite: bool = True

    def holds(self, number: float) -> bool:
        """Return whether a number is within."""
        return self.least <= number <= self.most and self.above < number < self.below

    @property
    def words(self) -> str:
        """``"from 1 to 4,096"``, ``"of at least 0"``, ``"above 0 and at most 1"``."""
        if self.least > -math.inf and self.most < math.inf:
            return f"from {figure(self.least)} to {figure(self.most)}"
        lower = {"of at least": self.least, "above": self.above}
        upper = {"at most": self.most, "below": self.below}
        return " and ".join(f"{word} {figure(bound)}" for word, bound in (lower | upper).items() if math.isfinite(bound))


class Within(Bounds):
    """Bounds of a number, beside its type: ``Annotated[int, Within(1, 4096)]``, ``Annotated[float, Within(above=0)]``."""

    def __init__(
        self, least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf, below: float = math.inf
    ) -> None:
        super().__init__(least=least, most=most, above=above, below=below)


@dataclasses.dataclass(frozen=True)
class Length:
    """Bounds of the number of characters of a text, or of the items of a list or a mapping: ``Annotated[str, Length(1, 200)]``."""

    least: int = 0
    most: int = MOST_ITEMS
    encoded: bool = True
    """Whether a text is refused that has no UTF-8 form; one that is only shown may have none."""

    @property
    def words(self) -> str:
        """``"of 1 to 200"``."""
        return f"of at least {self.least:,}" if self.most >= MOST_ITEMS else f"of {self.least:,} to {self.most:,}"


@dataclasses.dataclass(frozen=True)
class OneOf:
    """The texts that are taken: ``Annotated[str, OneOf("token_mean", "sequence_mean")]``."""

    texts: tuple[str, ...]

    def __init__(self, *texts: str) -> None:
        object.__setattr__(self, "texts", texts)


NONFINITE = Bounds(finite=False)
"""Beside ``float``: infinite numbers and NaN are taken too."""


@dataclasses.dataclass(frozen=True)
class Refused:
    """A rule's no.

    Attributes:
        wanted: what would have been taken, where the rule's own words do not tell.
        at: where inside the value, e.g. ``"[3]"``.
        value: what stands there.
    """

    wanted: str = ""
    at: str = ""
    value: Any = None


NO = Refused()


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """What one annotation takes: ``take`` gives the value in plain Python, or :class:`Refused`.

    Attributes:
        take: the rule itself.
        one: its words, ``"a whole number"``.
        many: the same of several, ``"whole numbers"``.
    """

    take: Callable[[Any], Any]
    one: str
    many: str


def figure(number: float) -> str:
    """Return a bound as people read it."""
    return f"{number:,}" if isinstance(number, int) and abs(number) < 10**13 else f"{number:g}"
