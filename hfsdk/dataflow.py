"""The RLHF dataflow as it ran: ``Call`` (a node) and ``Dataflow`` (nodes, and edges that carry columns)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PHASES = ("generation", "preparation", "learning")
"""HybridFlow's three stages of an RLHF iteration (section 2.1)."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a role's method: a node of the dataflow."""

    id: int
    role: str
    method: str
    phase: str = ""
    reads: tuple[str, ...] = ()
    read_from: tuple[int, ...] = ()
    """For each of ``reads`` the id of the call that wrote it, perhaps under another name (``batch.alias``)."""
    writes: tuple[str, ...] = ()
    inputs: tuple[int, ...] = ()
    """Ids of the calls whose columns this one reads."""
    protocol: str = ""
    num_rows: int = 0
    step: int = 0
    line: str = ""
    """Where the user started it, e.g. ``"cell 4, line 2"``."""
    function: str = ""
    """Name and version of the user's function it runs, e.g. ``"positive@3f2a91c0"``."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


@dataclass(frozen=True)
class Edge:
    """Columns that flow from one call to another."""

    source: int
    target: int
    columns: tuple[str, ...]
    num_bytes: int | None = None


@dataclass(frozen=True)
class Dataflow:
    """Calls and the columns between them."""

    calls: tuple[Call, ...]
    edges: tuple[Edge, ...] = ()

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def to_text(self) -> str:
        """Return one line per call: its number, what it reads and writes, and from whom."""
        lines = []
        for call in self.calls:
            sources = ", ".join(f"{'+'.join(e.columns)} <- #{e.source}" for e in self.edges if e.target == call.id)
            lines.append(
                f"#{call.id} {call} [{call.phase}] writes {', '.join(call.writes) or '-'}  ({sources or 'no input'})"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Dataflow({len(self.calls)} calls, {len(self.edges)} edges)\n{self.to_text()}"
