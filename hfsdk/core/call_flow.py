"""A call of the dataflow and what flows into it.

``Call`` is what was asked, ``CallRun`` how it ran, ``Transfer`` who reads what from whom, ``Edge`` what goes from one
call to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hfsdk.core.field_texts import documented
from hfsdk.core.layout import Mesh

PHASES = ("generation", "preparation", "learning")
"""HybridFlow's three stages of an RLHF iteration (section 2.1)."""


@documented
@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a role's method: a node of the dataflow."""

    id: int
    """Number of the call in its session."""
    role: str
    """Whose method it is."""
    method: str
    """Its name, e.g. ``"generate"``."""
    phase: str = ""
    """``"generation"``, ``"preparation"`` or ``"learning"``."""
    reads: tuple[str, ...] = ()
    """Columns that it reads."""
    read_from: tuple[int, ...] = ()
    """For each of ``reads`` the id of the call that wrote it, perhaps under another name (``batch.alias``)."""
    writes: tuple[str, ...] = ()
    """Columns that it writes."""
    inputs: tuple[int, ...] = ()
    """Ids of the calls whose columns this one reads."""
    protocol: str = ""
    """How rows go to the ranks and back, e.g. ``"THREE_D"``."""
    num_rows: int = 0
    """Rows of the batch."""
    step: int = 0
    """The step that it belongs to."""
    line: str = ""
    """Where the user started it, e.g. ``"cell 4, line 2"``."""
    function: str = ""
    """Name and version of the user's function it runs, e.g. ``"positive@3f2a91c0"``."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


@dataclass(frozen=True, kw_only=True)
class CallRun:
    """How a call ran, or where it stands."""

    state: str = "pending"
    start_ns: int = 0
    duration_s: float | None = None
    """Seconds; ``None`` while it runs."""
    predicted: bool = False
    pool: str = ""
    """Empty for a CPU task and the user's own data."""
    devices: tuple[int, ...] = ()
    """The device of every rank."""
    mesh: Mesh | None = None
    column_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every column it wrote."""
    resharded: int | None = None
    """Bytes of weights that its ranks received of each other before it; ``None`` where nothing was resharded or measured."""
    fetched: Mapping[int, int] = field(default_factory=dict)
    """Rank -> bytes that it mapped, as it measured them itself: values and offsets of numeric columns."""


@dataclass(frozen=True)
class Holder:
    """One object that a call wrote, or one part of the weights."""

    rank: int | None
    """``None``: a CPU task, or the user's process."""
    rows: int
    num_bytes: int


@dataclass(frozen=True)
class Piece:
    """What a rank reads of one object."""

    holder: int
    """Number of the object among the transfer's ``holders``."""
    rows: int
    num_bytes: int
    which: str
    """The rows' numbers in the batch of the call that wrote them, e.g. ``"0-3, 7"``; long lists end in ``"…"``."""


@dataclass(frozen=True)
class Share:
    """Ranks that read the same, and what each of them reads."""

    ranks: tuple[int | None, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Transfer:
    """What one call reads of another."""

    source: int
    """Id of the call that wrote it."""
    columns: tuple[str, ...]
    column_bytes: tuple[int, ...]
    """Of every column, each row once, however many ranks read it."""
    holders: tuple[Holder, ...]
    shares: tuple[Share, ...]
    kind: str = "columns"
    """``"columns"`` or ``"weights"``."""


@dataclass(frozen=True)
class CallFlow:
    """A call, how it ran, and what it read."""

    call: Call
    run: CallRun
    reads: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class Edge:
    """Columns, or weights, that flow from one call to another."""

    source: int
    target: int
    columns: tuple[str, ...]
    num_bytes: int | None = None
    """Each row once; ``None`` until the call has been planned."""
    kind: str = "columns"
    """``"columns"``, or ``"weights"`` (from a trained role to its shadow)."""
    transfer: Transfer | None = field(default=None, repr=False)

    @property
    def bytes_read(self) -> int | None:
        """Bytes summed over everyone who reads them: ranks that hold one model together read the same rows."""
        if self.transfer is None:
            return None
        return sum(p.num_bytes * len(share.ranks) for share in self.transfer.shares for p in share.pieces)
