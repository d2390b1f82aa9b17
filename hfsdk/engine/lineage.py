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


@dataclass(eq=False)
class Version:
    """One state of a role's weights."""

    role: str
    number: int
    """Grows with every version of any role, so a version's ancestors have smaller ones."""
    branch: str
    parent: Version | None = None
    num_updates: int = 0
    """Optimizer steps that the weights have seen; exact once the call that makes the version is over."""
    origin: int = 0
    """Number of the role's first version: another role of the same name begins anew."""

    def ancestors(self) -> Iterator[Version]:
        """Yield this version and those it comes from, the latest first."""
        version: Version | None = self
        while version is not None:
            yield version
            version = version.parent

    def descends_from(self, other: Version) -> bool:
        """Whether ``other`` is this version or one that it comes from."""
        for version in self.ancestors():
            if version.number <= other.number:
                return version is other
        return False

    def shared_with(self, other: Version) -> Version | None:
        """Return the latest version that both come from."""
        return next((version for version in self.ancestors() if other.descends_from(version)), None)


@dataclass(frozen=True)
class Change:
    """A call that changed a role's weights, for the history."""

    call_id: int
    role: str
    method: str
    function: str
    """Its loss as ``name@version``."""
    line: str
    branch: str
    num_updates: int
    """Optimizer steps that the role's weights have seen after it."""
    state: str
    """Of the call: ``"done"``, ``"pending"``, ..."""
    step: int
    """Of the trace."""


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
        return Version(role, self._made, self.branch, origin=self._made)

    def next(self, version: Version, num_updates: int) -> Version:
        """Return the version that a change makes of another, after so many optimizer steps in all."""
        self._made += 1
        return Version(version.role, self._made, self.branch, version, num_updates, version.origin)

    @staticmethod
    def stale(seen: Iterable[Version], now: Iterable[Version]) -> tuple[Version, Version] | None:
        """Return a version that was seen and the one of the same role now that does not come from it; ``None`` is all well."""
        heads = {version.origin: version for version in now}
        for version in sorted(seen, key=lambda version: version.number):
            head = heads.get(version.origin)
            if head is not None and not head.descends_from(version):
                return version, head
        return None
