r"""Which weights a call saw, and which of them today's weights descend from.

Every submitted change of a trained role makes the next *version* of it; a rewind goes back to an older one, and what is trained
from there on belongs to another branch::

    main      v1 -- v2 -- v3 -- v4 -- v5           a batch generated at v4 is of the branch main ...
                     \
    kl 0.1            '-- v6 -- v7                 ... and stale for v7, which comes from v2: a batch of v1 or v2 is not

Pure bookkeeping: no weights, no processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MAIN = "main"
"""The branch of a session that was never rewound."""


@dataclass(eq=False, slots=True)
class Line:
    """A stretch of a role's versions, each made from the one before; a rewind begins another.

    A version knows its line and not the version before it, so that those nobody refers to any more are gone: a run of a million
    updates is one line.
    """

    start: Version | None = None
    """The version of another line that it left; ``None`` for the initial weights'."""
    apart: bool = False
    """Whether its weights are not made of those of ``start``, but were loaded, or are the initial ones again."""
    last: int = 0
    """Number of its latest version."""


@dataclass(eq=False, slots=True)
class Version:
    """One state of a role's weights."""

    role: str
    number: int
    """Grows with every version of any role, so a version's ancestors have smaller ones."""
    branch: str
    line: Line
    num_updates: int = 0
    """Optimizer steps that the weights have seen; exact once the call that makes the version is over."""
    origin: int = 0
    """Number of the role's first version: another role of the same name begins anew."""

    def ancestors(self) -> Iterator[Version]:
        """Yield of every line that this version comes from the latest version that it does: itself, then where lines were left."""
        version: Version | None = self
        while version is not None:
            yield version
            version = version.line.start

    def descends_from(self, other: Version) -> bool:
        """Whether ``other`` is this version or one that it comes from."""
        return any(version.line is other.line and other.number <= version.number for version in self.ancestors())

    def made_of(self, other: Version) -> bool:
        """Whether its weights are those of ``other``, or were trained from them."""
        for version in self.ancestors():
            if version.line is other.line:
                return other.number <= version.number
            if version.line.apart:
                return False
        return False

    def shared_with(self, other: Version) -> Version | None:
        """Return the latest version that both come from."""
        theirs = {id(version.line): version for version in other.ancestors()}
        for mine in self.ancestors():
            found = theirs.get(id(mine.line))
            if found is not None:
                return min(mine, found, key=lambda version: version.number)
        return None


class Lineage:
    """Makes versions and says which are stale.

    Attributes:
        branch: what is trained now belongs to it.
    """

    def __init__(self) -> None:
        self.branch = MAIN
        self._made = 0

    def first(self, role: str) -> Version:
        """Return the version of a role's initial weights."""
        self._made += 1
        return Version(role, self._made, self.branch, Line(last=self._made), origin=self._made)

    def next(self, version: Version, num_updates: int, *, apart: bool = False) -> Version:
        """Return the version that a change makes of another, after so many optimizer steps in all.

        Where its weights come from elsewhere (``apart``) what was written before is not stale, but no older state is behind them.
        """
        self._made += 1
        goes_on = not apart and version.line.last == version.number
        line = version.line if goes_on else Line(version, apart)
        line.last = self._made
        return Version(version.role, self._made, self.branch, line, num_updates, version.origin)

    @staticmethod
    def stale(seen: Iterable[Version], now: Iterable[Version]) -> tuple[Version, Version] | None:
        """Return a version that was seen and the one of the same role now that does not come from it; ``None`` is all well."""
        heads = {version.origin: version for version in now}
        for version in sorted(seen, key=lambda version: version.number):
            head = heads.get(version.origin)
            if head is not None and not head.descends_from(version):
                return version, head
        return None
