"""The narrow waist: every message ``Session`` and handles send to the ``Controller``. Small, frozen, picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hfsdk.core.arguments import NO_ARGUMENTS, Arguments
from hfsdk.core.builtin import Method
from hfsdk.core.methods import method_of
from hfsdk.core.pending import ColumnRef
from hfsdk.core.placement import Placement
from hfsdk.core.protocol import TransferProtocol
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import StateCopy, Stored
from hfsdk.core.table import Table


@dataclass(frozen=True)
class Declare:
    """Add a role, or replace the one of this name. Reply: whether anything changed."""

    role: RoleSpec


@dataclass(frozen=True)
class Remove:
    """Free a role and forget it."""

    role: str


@dataclass(frozen=True)
class PlaceRoles:
    """Put roles on pools and load them; roles that lived elsewhere, or in another layout, move with their state."""

    placement: Placement
    roles: tuple[RoleSpec, ...]
    """Every placed role, its layouts filled for its pool."""
    fresh: bool = False
    """Whether roles that move start again from their initial weights."""
    wait: bool = True
    """Whether the reply comes when they are loaded; otherwise when they are on their way (see :class:`AwaitLoads`)."""


@dataclass(frozen=True)
class AwaitLoads:
    """Wait until the roles of the last :class:`PlaceRoles` are loaded; raises what was lost, or why one is not loaded."""

    role: str = ""
    """The role whose failure is raised, and that of what generates for it: each other role is tried again, and raises its own
    failure, at its next call. Empty: every role."""


@dataclass(frozen=True, eq=False)
class Put:
    """Store a local table. Reply: the id under which its columns are known."""

    table: Table
    step: int | None = None
    """The step, as of :class:`Submit`."""


@dataclass(frozen=True, eq=False)
class PutByReference:
    """Store a table as :class:`Put` does, from a process beside the controller's: it lies in the runtime's store already."""

    stored: Stored
    """The table's description, without parts."""
    content: Any
    """The runtime's reference to it, which another process owns."""
    num_bytes: int
    step: int | None = None


@dataclass(frozen=True, eq=False)
class Submit:
    """Start a call of a role's method, or a CPU task (``role="session"``). Reply: its id."""

    role: str
    method: str
    phase: str
    inputs: Mapping[str, ColumnRef]
    writes: tuple[str, ...]
    num_rows: int
    protocol: TransferProtocol | None = None
    arguments: Arguments = NO_ARGUMENTS
    line: str = ""
    function: str = ""
    timeout_s: float | None = None
    result: str = "first"
    """The ranks whose small results are kept: ``"first"`` (rank 0's) or ``"all"`` (a list by rank)."""
    wait_s: float = 0.0
    """The seconds that the answer may wait for the call's end, where it has a way to go: the caller waits for that next."""
    step: int | None = None
    """The step that the call is of, as :class:`BeginStep` numbered it; ``None`` by hand, where phases say when one begins."""

    @classmethod
    def of(
        cls, role: str, method: Method, arguments: Arguments = NO_ARGUMENTS, inputs: Mapping[str, ColumnRef] | None = None,
        num_rows: int = 0, *, timeout_s: float | None = None,
    ) -> Submit:  # fmt: skip
        """Return the message that starts a call as its method declares it."""
        function = arguments.function
        return cls(
            role, method.name, method.phase, dict(inputs or {}), method.writes, num_rows, method.protocol, arguments,
            function=f"{function.name}@{function.version}" if function else "", timeout_s=timeout_s,
            result="all" if method.of_all_ranks else "first",
        )  # fmt: skip

    @property
    def kind(self) -> Method:
        """The method that the call carries out."""
        return method_of(self.method)


@dataclass(frozen=True)
class Wait:
    """Wait for calls. Reply: whether all are done; raises the failure of one that is not."""

    call_ids: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, eq=False)
class Fetch:
    """Bring columns of done calls. Reply: a Table."""

    columns: Mapping[str, ColumnRef]


@dataclass(frozen=True, eq=False)
class Locate:
    """Ask where columns of done calls lie, for a process beside the controller's that fetches them itself.

    Reply: a tuple of :class:`~hfsdk.core.runtime.Pick`; raises as :class:`Fetch`.
    """

    columns: Mapping[str, ColumnRef]


@dataclass(frozen=True)
class Cancel:
    """Stop calls at their next safe point, and what depends on them."""

    call_ids: tuple[int, ...]


@dataclass(frozen=True)
class Release:
    """Drop these calls' columns: nobody refers to them any more."""

    call_ids: tuple[int, ...]


@dataclass(frozen=True)
class Logs:
    """Ask what a worker of a role printed."""

    role: str
    rank: int


@dataclass(frozen=True)
class MarkRecorded:
    """Note that the step of these calls has a row of its own in the history, so that ``"changes"`` leaves them out."""

    call_ids: tuple[int, ...]


@dataclass(frozen=True)
class BeginStep:
    """Begin a step: the calls that carry its number are of it, whatever else runs. Reply: its number in the trace."""

    least: int = 0
    """The number is this one, unless the trace is further."""


@dataclass(frozen=True)
class Recover:
    """Remember where a role's last checkpoint lies, and of which update it is, for rebuilding its pool."""

    role: str
    folder: str
    num_updates: int


@dataclass(frozen=True)
class Saved:
    """Ask whether the files of a role's last ``save_state`` are complete; raises what keeps them from it.

    Reply: ``None`` until they are, then the size and checksum of each, as far as whoever wrote them knows it.
    """

    role: str


@dataclass(frozen=True)
class AskHostRoom:
    """Ask what copies of trained roles, which are placed, would take of each node's host memory, and what it has.

    Reply: a ``HostRoom`` for every node that is to copy something.
    """

    roles: tuple[str, ...]
    unless_kept: bool
    """Whether roles are left out whose state a snapshot has already."""


@dataclass(frozen=True)
class TakeSnapshot:
    """Keep the state of trained roles as it is behind everything submitted so far.

    Reply: a :class:`~hfsdk.core.runtime.Kept` for each; that of an earlier snapshot where nothing has changed the role since.
    """

    roles: tuple[str, ...]


@dataclass(frozen=True)
class Rewind:
    """Give trained roles kept states back; training from then on belongs to ``branch``."""

    kept: tuple[StateCopy, ...]
    branch: str = ""
    """Empty: the one there is."""


@dataclass(frozen=True)
class Return:
    """Give trained roles back the states that they had before the session went elsewhere for a while.

    Whatever became of a role meanwhile: one whose state is gone with a worker has what is behind that state at its next call.
    Reply: the states that such roles come back with, in words.
    """

    kept: tuple[StateCopy, ...]
    branch: str = ""
    """Empty: the one there is."""


@dataclass(frozen=True)
class Forget:
    """A snapshot is not needed any more; what no other one refers to is freed."""

    kept: tuple[StateCopy, ...]


@dataclass(frozen=True)
class AcknowledgeFailures:
    """Take the failures that nobody has looked at as seen, so that no later call raises them.

    Workers that have ended as well, or hang, are taken as gone with them; nothing may run meanwhile.
    """

    calls: tuple[int, ...] | None = None
    """The calls whose failures alone are taken as seen, and of no worker; others may run meanwhile."""


@dataclass(frozen=True)
class TraceNote:
    """Draw in the trace's current step that something took a time, and why."""

    method: str
    """One of :mod:`hfsdk.core.methods`, of the session."""
    start_ns: int
    """The time of its beginning, in nanoseconds since 1970."""
    seconds: float
    why: str


@dataclass(frozen=True)
class Close:
    """End everything."""


Message = (
    Declare
    | Remove
    | PlaceRoles
    | Put
    | PutByReference
    | Submit
    | Wait
    | Fetch
    | Locate
    | Cancel
    | Release
    | Logs
    | BeginStep
    | AwaitLoads
    | MarkRecorded
    | Recover
    | Saved
    | AskHostRoom
    | TakeSnapshot
    | Rewind
    | Return
    | Forget
    | AcknowledgeFailures
    | TraceNote
    | Close
)
