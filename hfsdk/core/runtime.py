"""The seam: what a runtime must do, and the plain data that crosses it.

There are two runtimes, Ray (real work) and simulated (virtual clock, shapes only). The controller plans a call into one
:class:`Order` per rank and hands the :class:`Work` over; the runtime carries it out and returns an :class:`CallOutcome`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from hfsdk.core.arguments import NO_ARGUMENTS, Arguments
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.dataflow import Call
from hfsdk.core.errors import HfsdkError, WorkerDiedError
from hfsdk.core.files import FileSum
from hfsdk.core.microbatch import MiniBatchPlan
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.placement import Pool
from hfsdk.core.roles import RoleSpec
from hfsdk.core.table import Array, Table
from hfsdk.core.trace import Span


@dataclass(frozen=True, eq=False)
class Part:
    """One object that holds some rows of everything a call wrote."""

    rows: Array
    """Row numbers in the call's batch; shape [rows of this part]."""
    handle: Any
    """The runtime's own reference to the object."""
    num_bytes: int
    rank: int | None = None
    """Rank that wrote it, ``None`` for the user's process and CPU tasks."""


@dataclass(frozen=True, eq=False)
class Stored:
    """What one call wrote: its parts, and what is known of its columns without looking."""

    name: str
    num_rows: int
    parts: tuple[Part, ...]
    columns: Mapping[str, ColumnInfo]

    def locate(self, rows: Array) -> tuple[Array, Array]:
        """Return (number of the part, row inside the part) for each of ``rows``."""
        part_of, local = self._places
        return part_of[rows], local[rows]

    @cached_property
    def numbers(self) -> dict[int, int]:
        """``id`` of a part's handle -> the part's number."""
        return {id(part.handle): number for number, part in enumerate(self.parts)}

    @cached_property
    def without_handles(self) -> Stored:
        """The same, keeping no object alive; all that read it share the answer."""
        return replace(self, parts=tuple(replace(part, handle=None) for part in self.parts))

    @cached_property
    def _places(self) -> tuple[Array, Array]:
        """Of every row the number of its part and its row there: every rank of every reader asks for them."""
        part_of = np.full(self.num_rows, -1, dtype=np.int64)
        local = np.zeros(self.num_rows, dtype=np.int64)
        for number, part in enumerate(self.parts):
            part_of[part.rows] = number
            local[part.rows] = np.arange(len(part.rows))
        return part_of, local


@dataclass(frozen=True, eq=False)
class Pick:
    """Some rows and columns of one stored call, as one rank reads them."""

    handles: tuple[Any, ...]
    local_rows: tuple[Array, ...]
    """For every handle the rows to take from it."""
    order: Array | None
    """Where each taken row goes; ``None`` when they already stand in order."""
    columns: Mapping[str, str]
    """Name here -> name as stored."""
    source: str = ""
    """The call that wrote it, for messages."""

    @classmethod
    def of(cls, stored: Stored, rows: Array, columns: Mapping[str, str]) -> Pick:
        """Find the parts that hold ``rows`` (numbers in the stored call's batch)."""
        part_of, local = stored.locate(rows)
        order = None
        if (part_of[1:] < part_of[:-1]).any():
            taken = np.argsort(part_of, kind="stable")
            part_of, local, order = part_of[taken], local[taken], np.argsort(taken, kind="stable")
        edges = [0, *(np.flatnonzero(part_of[1:] != part_of[:-1]) + 1).tolist(), len(part_of)]
        used = part_of[edges[:-1]].tolist() if len(rows) else [0]  # without rows: an empty piece, which has the dtype
        return cls(
            tuple(stored.parts[p].handle for p in used),
            tuple(local[a:b] for a, b in pairwise(edges)),
            order,
            dict(columns),
            stored.name,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Assignment:
    """What a rank is to do with the rows it is given."""

    arguments: Arguments = NO_ARGUMENTS
    """The call's own."""
    micro_batches: tuple[tuple[int, ...], ...] = ()
    """Of a pass: the rows that run together."""
    mini_batches: tuple[MiniBatchPlan, ...] = ()
    """Of a loss: its optimizer steps, and the rows that run together in each."""
    link: Any = None
    """Over which weights go straight to another pool; the runtime's own."""


@dataclass(frozen=True, eq=False)
class Order(Assignment):
    """One rank's share of a call."""

    rows: Array
    """Numbers of this rank's rows in the call's batch."""
    picks: tuple[Pick, ...]
    keep: bool = True
    """Whether this rank's columns are gathered (the others compute the same)."""


@dataclass(frozen=True, eq=False)
class RoleState:
    """A trained role's weights and optimizer state on the way from one place to another, by reference."""

    handles: tuple[Any, ...]
    """One object per rank that holds a part nobody before it holds."""
    num_bytes: int = 0
    devices: tuple[int, ...] = ()
    """Whose workers own these objects: they are gone with them."""


class StateGoneError(Exception):
    """A state that a role was to be loaded with is gone with the worker that held it; the role is not loaded, its pool is well.

    The controller answers it with an older state and tells the user, so that nobody outside the engine sees it.
    """


@dataclass(frozen=True)
class StateCopy:
    """A copy of a trained role's state, as its workers keep it: in the host memory of their processes, each its own part."""

    number: int
    """Under which the workers know it; unique in the session."""
    role: str
    layout: str
    """Training layout that it was taken in; it can be given back to any other."""
    devices: tuple[int, ...]
    """Whose workers hold a part, by rank."""
    part_bytes: tuple[int, ...]
    num_updates: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts; what data-parallel ranks hold alike is kept once."""
        return sum(self.part_bytes)


@dataclass(frozen=True, eq=False)
class Bundle:
    """Boxes of weights that the same ranks of a shadow need from one rank of its role: one object."""

    source: int
    """Rank of the role that holds them."""
    targets: tuple[int, ...]
    """Ranks of the shadow that need them."""
    content: Any
    """The runtime's own reference to the object; on the rank that takes it over what it refers to."""
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Weights:
    """A trained role's weights on the way to its shadow, by reference."""

    role: RoleSpec
    """The trained role where it lives; with the shadow's own layout it gives the plan."""
    bundles: tuple[Bundle, ...]
    num_updates: int = 0
    """Optimizer steps that the weights have seen."""
    link: Any = None
    """Over which they come straight from the ranks that hold them, where no bundle stands; the runtime's own."""

    def of_rank(self, rank: int) -> Weights:
        """Return what is addressed to one rank of the shadow."""
        return replace(self, bundles=tuple(bundle for bundle in self.bundles if rank in bundle.targets))


@dataclass(frozen=True, eq=False)
class ShadowReceiver:
    """The shadow that takes weights straight from the ranks that give them, while they do."""

    trained: RoleSpec
    """Whose weights they are, where it lives."""
    shadow: RoleSpec
    pool: Pool
    version: int
    """Of the weights (see :class:`Work`)."""
    num_updates: int
    """Optimizer steps that they have seen."""


class TransferBrokenError(Exception):
    """Workers of one pool, or of both, ended or hang while weights went straight from one to the other."""

    def __init__(self, lost: Sequence[tuple[Pool, WorkerDiedError]]) -> None:
        super().__init__(" ".join(str(error) for _, error in lost))
        self.lost = tuple(lost)


@dataclass(frozen=True, eq=False)
class Work:
    """A call, planned: one order per rank of the role's pool, or one order for a CPU task."""

    call: Call
    pool: Pool | None
    orders: tuple[Order, ...]
    timeout_s: float | None = None
    """Most seconds the user's function may take (CPU tasks)."""
    weights: Weights | None = None
    """Weights of the trained role that a shadow takes over before it carries the call out."""
    version: int = 0
    """Which weights a shadow must have: a number that grows with every change of the trained role."""
    taker: ShadowReceiver | None = None
    """Of a call that gives weights straight to a shadow, whose pool does nothing else meanwhile."""


@dataclass(frozen=True, eq=False)
class CallOutcome:
    """What a call gave: its columns by reference and every rank's small result."""

    stored: Stored | None
    results: tuple[Any, ...] = ()
    spans: Sequence[Span] = ()
    error: HfsdkError | None = None
    """What the call ended with on its ranks; the spans then say how far they came."""


@dataclass(frozen=True)
class Progress:
    """How far the running call is, summed over the ranks that report it."""

    call_id: int
    done: float
    total: float
    unit: str


@dataclass(frozen=True)
class DeviceStatus:
    """A worker as it is now."""

    device: int
    rank: int
    pool: str
    pid: int | None
    used_bytes: int | None
    """Memory in use: proportional set size on CPU, allocated bytes on an accelerator."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Role -> measured bytes of its weights, gradients, optimizer state and rollout copy."""
    offloaded: Mapping[str, int] = field(default_factory=dict)
    """Role -> bytes of it that are in host memory instead of on the device now; only roles that offload something."""
    asleep: Mapping[str, int] = field(default_factory=dict)
    """Role -> bytes of its rollout that are nowhere now, because it sleeps; only roles whose rollout can."""


class NodeStatus(NamedTuple):
    """A node of the session's cluster as it is now."""

    name: str
    """As messages call it, e.g. ``"node 1 (10.0.0.2)"``."""
    here: bool
    """Whether the controller is on it: without it there is no session."""
    present: bool
    """Whether it is there; one that left and came back, or another in its place, is."""


class Runtime(Protocol):
    """Carries calls out. Methods block unless they say otherwise; the controller calls them from its lanes."""

    kind: str
    """``"ray"`` or ``"simulated"``."""
    cluster: ClusterSpec

    def open_pool(self, pool: Pool) -> None:
        """Start the pool's workers and join them into one world."""
        ...

    def close_pool(self, name: str, *, kill: bool = False) -> None:
        """Take the pool apart; its workers stay for the next pool on their devices, unless ``kill``."""
        ...

    def load(self, role: RoleSpec, pool: Pool, state: RoleState | None = None, source: Pool | None = None) -> None:
        """Build a role on every rank of its pool, with a state that it had elsewhere or its folder's weights.

        Args:
            role: what to build.
            pool: where.
            state: what :meth:`export` returned.
            source: in place of it, the open pool where the role lives; its ranks give the state straight to the new ones, and
                keep it (see :meth:`goes_direct`).

        Raises:
            StateGoneError: the state is gone with a worker that held it.
            TransferBrokenError: workers ended or hang while ``source`` gave the state.
        """
        ...

    def rename_pool(self, old: str, new: str) -> None:
        """Call an open pool by another name."""
        ...

    def export(self, role: str, pool: Pool) -> RoleState:
        """Take a role's state out, whatever its layout; the role stays as it is."""
        ...

    def keep(self, role: str, pool: Pool, number: int) -> StateCopy:
        """Copy a role's state, where it lives; the role stays as it is."""
        ...

    def free_host_bytes(self, devices: Sequence[int]) -> Mapping[int, int]:
        """Return the free host memory of these devices' nodes, by node; nodes that cannot tell are left out."""
        ...

    def nodes(self) -> tuple[NodeStatus, ...]:
        """Look at the nodes of the cluster; where one has left and there is another like it, that one takes its place."""
        ...

    def holds(self, kept: StateCopy) -> bool:
        """Return whether every worker that holds a part of a kept state is still there."""
        ...

    def restore(self, role: RoleSpec, pool: Pool, kept: StateCopy) -> None:
        """Give a loaded role a kept state, whatever the layouts of the two."""
        ...

    def forget(self, kept: StateCopy) -> None:
        """Free a kept state; returns at once."""
        ...

    def release(self, role: str, pool: Pool) -> None:
        """Free a role on its pool."""
        ...

    def call(self, work: Work) -> CallOutcome:
        """Run a call on a pool; raise where its workers ended or hang, and return what else it ends with.

        Raises:
            TransferBrokenError: workers ended or hang, of a call with a ``taker``.
        """
        ...

    def goes_direct(self, giver: Pool, taker: Pool) -> bool:
        """Return whether weights go straight from one pool to the other, with both at it, or stand somewhere in between."""
        ...

    def task(self, work: Work) -> CallOutcome:
        """Run a function over columns in a CPU task."""
        ...

    def put(self, table: Table) -> Part:
        """Store a local table."""
        ...

    def adopt(self, content: Any, num_rows: int, num_bytes: int) -> Part:
        """Store a table that another process has put into the runtime's store; it does not come by here."""
        ...

    def fetch(self, picks: Sequence[Pick]) -> Table:
        """Bring columns here."""
        ...

    def cancel(self, call_id: int, pool: Pool | None) -> None:
        """Ask the ranks that run this call to stop at their next safe point; returns at once."""
        ...

    def progress(self, pool: Pool) -> tuple[Progress | None, tuple[Span, ...]]:
        """Return the running call's progress and the worker spans running now."""
        ...

    def devices(self, pool: Pool) -> tuple[DeviceStatus, ...]:
        """Return the pool's workers as they are now."""
        ...

    def saved(self, role: str, pool: Pool) -> Mapping[str, FileSum] | None:
        """Return ``None`` until the files of a role's last ``save_state`` are complete; the look that finds them so completes them.

        Then what each must be, by its name in the role's folder, as far as it was counted while they were written.

        Raises:
            CheckpointError: they cannot be written, or the workers that wrote them ended.
        """
        ...

    def logs(self, pool: Pool | None, rank: int) -> str:
        """Return what a worker printed; without a pool, the user's functions over columns."""
        ...

    def controller_bytes(self) -> int:
        """Return the column bytes that passed through the controller between calls (should be 0)."""
        ...

    def close(self) -> None:
        """End every process and free every segment."""
        ...
