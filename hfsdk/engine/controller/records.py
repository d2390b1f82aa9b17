"""What the controller remembers of each call and each role, and pure checks of it."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hfsdk.core.builtin import SEQUENCES
from hfsdk.core.call_flow import Call, CallFlow, CallRun
from hfsdk.core.checks import shown
from hfsdk.core.errors import CallError, ColumnError, LayoutError
from hfsdk.core.layout import Mesh
from hfsdk.core.methods import EXPORT_WEIGHTS
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.placement import Placement, Pool
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Bundle, Kept, Part, RoleState, Stored, Weights
from hfsdk.core.table import Ragged, Table, kind_of
from hfsdk.core.trace import Span
from hfsdk.core.unscored import unscored_or_none
from hfsdk.engine.calls.messages import Submit
from hfsdk.engine.calls.queries import Change
from hfsdk.engine.calls.rerun import Rerun
from hfsdk.engine.controller.flows import Reads
from hfsdk.engine.controller.lineage import Version

FINISHED = ("done", "failed", "cancelled")


@dataclass(eq=False)
class Meeting:
    """A shadow's lane is held free for the call that gives it weights.

    ::

        lane of the trained role   ... update   | wait | export_weights, on both pools |  next call
        lane of the shadow         ... generate | held ................................ |  generate with the new weights

    Both are put on their lanes at once, under the controller's lock, and wait only for what was put before: so they cannot wait
    for each other for ever.
    """

    arrived: threading.Event = field(default_factory=threading.Event)
    """Set when the shadow is loaded, and its lane does nothing else."""
    pool: Pool | None = None
    """Where, by then."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set when the lane goes on; without ``arrived``, when the shadow could not be loaded."""
    wait: Callable[[], None] = lambda: None
    """Raises why."""


@dataclass(eq=False)
class Sync:
    """Weights of a trained role on their way to its shadow."""

    version: int
    """The role's ``changes`` when they were asked for."""
    call: CallRecord
    """Takes them out of the trained role."""
    shadow: RoleSpec
    """For whom: every box is addressed to those of its ranks that need it."""
    weights: Weights | None = None
    """There once ``call`` is done, until the shadow has them."""
    failed: bool = False
    """Whether a call that was to take them over failed: a later one asks for others."""
    meeting: Meeting | None = None
    """Where they go straight from pool to pool: ``call`` then is over when the shadow has them."""
    taken: tuple[Bundle, ...] = ()
    """What the shadow was given then, until its next call is told to have read it."""

    def usable(self, shadow: RoleRecord) -> bool:
        """Whether the shadow has these weights, or will get them."""
        if self.failed or self.call.state in ("failed", "cancelled", "lost") or shadow.spec != self.shadow:
            return False
        return self.call.state != "done" or self.weights is not None or shadow.synced == self.version


@dataclass(eq=False)
class CallRecord:
    """One call from submission to its end."""

    call: Call
    request: Submit | None
    pool: Pool | None = None
    state: str = "pending"
    error: Exception | None = None
    seen: bool = False
    """Whether the user has seen the failure, or (of a root) one that comes from it."""
    root: CallRecord | None = None
    """The call whose failure this one failed with, where it failed for its input."""
    cancel_asked: bool = False
    stored: Stored | None = None
    result: Any = None
    released: bool = False
    finished: threading.Event = field(default_factory=threading.Event)
    start_ns: int = 0
    start_s: float = 0.0
    duration_s: float | None = None
    spans: Sequence[Span] = ()
    num_tokens: int = 0
    """Tokens generated, or passed through the model."""
    after: tuple[threading.Event, ...] = ()
    """Set once what was put earlier on lanes that share devices with this call's is over; it waits for them."""
    sync: Sync | None = None
    """For a shadow's call: the weights it must have; for the call that brings them: where to leave them."""
    rerun: Rerun | None = None
    """How to carry it out again on a simulated twin."""
    reads: Reads | None = None
    """What its ranks read, as planned when it ran."""
    column_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of every column it wrote."""
    mesh: Mesh | None = None
    branch: str = ""
    """On which it was submitted."""
    saw: frozenset[Version] = frozenset()
    """The weights that it, or a call whose columns it reads, was carried out with."""
    made: Version | None = None
    """The version of its role's weights that it makes."""
    source: str = ""
    """Source text of the user's function that it runs."""
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def unasked(self) -> bool:
        """Whether nobody can ask for its outcome any more: the user let go of it, or it was hfsdk's own."""
        return self.released or self.call.method == EXPORT_WEIGHTS.name

    @property
    def origin(self) -> CallRecord:
        """The call that failed first."""
        return self.root or self

    def begin(self) -> bool:
        """The call starts to run, unless it was cancelled before; return whether it does."""
        with self._turn:
            if self.cancel_asked or self.state in FINISHED:
                return False
            self.state, self.start_ns, self.start_s = "running", time.time_ns(), time.perf_counter()
            return True

    def ask_cancel(self) -> bool:
        """Note that the call shall stop; return whether it runs already, and so has to be told."""
        with self._turn:
            self.cancel_asked = True
            return self.state == "running"

    def end(self, state: str, error: Exception | None = None, tell: Callable[[], None] = lambda: None) -> None:
        """The call is over: ``tell`` listeners, then whoever waits goes on."""
        if self.start_ns:
            self.duration_s = time.perf_counter() - self.start_s
        self.state, self.error = state, error
        try:
            tell()
        finally:
            self.finished.set()

    @property
    def change(self) -> Change:
        """What it did to its role's weights."""
        call, updates = self.call, self.made.num_updates if self.made else 0
        return Change(call.id, call.role, call.method, call.function, call.line, self.branch, updates, self.state, call.step)

    @property
    def flow(self) -> CallFlow:
        """The call as a node of the dataflow."""
        own = next((s for s in self.spans if s.device is None and s.call_id == self.call.id), None)
        start_ns, duration_s = (own.start_ns, own.duration_s) if own else (self.start_ns, self.duration_s)
        fetched = {s.rank: int(s.attrs.get("bytes", 0)) for s in self.spans if s.name == "fetch" and s.rank is not None}
        weights = [int(s.attrs["bytes"]) for s in self.spans if s.name == "reshard" and "bytes" in s.attrs]
        run = CallRun(
            state=self.state, start_ns=start_ns, duration_s=duration_s, predicted=own is not None and own.predicted,
            pool=self.pool.name if self.pool else "", devices=self.pool.devices if self.pool else (), mesh=self.mesh,
            column_bytes=self.column_bytes, fetched=fetched, resharded=sum(weights) if weights else None,
        )  # fmt: skip
        return CallFlow(self.call, run, self.reads.transfers if self.reads is not None else ())

    @property
    def span(self) -> Span:
        """The call's own span on the controller's lane."""
        duration = self.duration_s
        attrs: dict[str, float | int | str] = {"rows": self.call.num_rows, "state": self.state, "line": self.call.line}
        whole = [s for s in self.spans if not s.parent]
        if whole:
            attrs["cpu_s"] = sum(float(s.attrs.get("cpu_s", 0.0)) for s in whole)
            own = [s for s in self.spans if s.parent and s.role == self.call.role]  # what a shadow takes is given here
            attrs["bytes"] = sum(int(s.attrs.get("bytes", 0)) for s in own)
        if self.num_tokens:
            attrs["tokens"] = self.num_tokens
        if self.call.function:
            attrs.update({"function": self.call.function, "source": self.source})
        if self.call.inputs:
            attrs["after"] = " ".join(map(str, self.call.inputs))
        return Span(
            name=self.call.method, role=self.call.role, call_id=self.call.id, method=self.call.method, step=self.call.step,
            pool=self.pool.name if self.pool else "", start_ns=self.start_ns or time.time_ns(), duration_s=duration,
            phase=self.call.phase, attrs=attrs,
        )  # fmt: skip


@dataclass(eq=False)
class RoleRecord:
    """A declared role and where it stands."""

    spec: RoleSpec
    loaded: bool = False
    pool: Pool | None = None
    num_updates: int = 0
    """Optimizer steps finished since the initial weights."""
    checkpoint: str = ""
    """Folder of the last checkpoint, for rebuilding its pool."""
    checkpoint_updates: int = 0
    checkpoint_version: Version | None = None
    """Of the weights when it was noted, which come from it."""
    restore: str = ""
    """Folder to load after the initial weights, once: the checkpoint of a role whose pool died."""
    restore_kept: Kept | None = None
    """The state of a snapshot to give it then instead, where the pool died after one was taken."""
    state: RoleState | None = None
    """What a moving role takes along, until it is loaded at its new place."""
    changes: int = 0
    """Grows with every submitted call that changes the weights, and when they are loaded again."""
    sync: Sync | None = None
    """The last transfer of the weights to the role's shadow."""
    synced: int = -1
    """Of a shadow: the ``changes`` of its role that its weights have seen; -1 where it has taken over none."""
    version: Version | None = None
    """Of the weights, as submitted so far; ``None`` before the first call that uses them."""
    kept: Kept | None = None
    """The state that a snapshot keeps, where it is still the role's own."""
    unseen: CallRecord | None = None
    """A failure: raised at the next call on this role, unless its origin has been seen by then."""

    @property
    def weights_updates(self) -> int:
        """Updates the weights have seen; -1 for a shadow that has taken over none yet."""
        return -1 if self.spec.shadow_of and self.synced < 0 else self.num_updates

    def left(self) -> None:
        """Note that no worker has the role any more."""
        self.loaded, self.pool, self.synced, self.sync = False, None, -1, None
        self.changes += 1


def raised(error: Exception) -> Exception:
    """Return a fresh copy of a stored error, so that each look has its own traceback."""
    if isinstance(error, CallError):
        copy = type(error)(error.message, **error.fields())
        copy.__cause__ = error.__cause__
        return copy
    return error.with_traceback(None)


def source_of(message: Submit) -> str:
    """Return the source text of the user's function that a call runs, where there is any."""
    return message.arguments.function.source if message.arguments.function else ""


def _pickled(name: str, column: Any) -> bytes:
    """Return a column of objects as it travels.

    Raises:
        ColumnError: it cannot.
    """
    try:
        return pickle.dumps(column)
    except Exception as error:  # whatever an object's pickling raises
        why = "it is nested too deeply" if isinstance(error, RecursionError) else type(error).__name__
        raise ColumnError(
            f"column {shown(name)} holds objects that cannot travel to the workers ({why}); give texts, numbers, lists or dicts"
        ) from None


def stored_table(name: str, table: Table, parts: tuple[Part, ...]) -> Stored:
    """Describe a local table that was put as one or more parts."""
    columns = {}
    for column_name, column in table.items():
        lengths = column.lengths if isinstance(column, Ragged) else None
        if isinstance(column, list):
            dtype, num_bytes = "text", len(_pickled(column_name, column))
        else:
            dtype, num_bytes = str(column.dtype), int(column.nbytes)
        columns[column_name] = ColumnInfo(kind_of(column), dtype, num_bytes, lengths, unscored_or_none(column))
    return Stored(name, table.num_rows, parts, columns)


def check_rollouts(placement: Placement, roles: Sequence[RoleSpec]) -> None:
    """Check that the rollouts of a pool agree on their tp: the generating engine keeps one for all of its process.

    Raises:
        LayoutError: two of them differ.
    """
    first: dict[str, RoleSpec] = {}
    for role in roles:
        if role.rollout is None or role.name not in placement.roles:
            continue
        other = first.setdefault(placement.roles[role.name], role)
        if other.rollout is not None and other.rollout.tp != role.rollout.tp:
            raise LayoutError(
                f"{other.name} (rollout tp={other.rollout.tp}) and {role.name} (rollout tp={role.rollout.tp}) share the pool "
                f"{placement.roles[role.name]!r}, whose processes run one rollout tp. Give both the same, release one of them, "
                "or place them on pools of their own."
            )


def tokens_of(request: Submit, inputs: Mapping[int, Stored], outcome: Stored | None) -> int:
    """Return how many tokens a call generated or, where it read responses, passed through its model."""
    if "response" not in request.inputs:
        written = outcome.columns.get("response") if outcome else None
        return 0 if written is None or written.lengths is None else int(written.lengths.sum())
    total = 0
    for name in SEQUENCES:
        ref = request.inputs.get(name)
        lengths = inputs[ref.call_id].columns[ref.name].lengths if ref else None
        if ref is not None and lengths is not None:
            total += int((lengths if ref.rows is None else lengths[ref.rows]).sum())
    return total
