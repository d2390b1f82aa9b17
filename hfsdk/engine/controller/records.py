"""The controller's records of each call and each role, and pure checks of them."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from hfsdk.core.builtin import SEQUENCES
from hfsdk.core.checks import shown
from hfsdk.core.dataflow import MOST_RANKS, Call, CallFlow, CallRun, Holder, ObjectRead, Share, Transfer
from hfsdk.core.errors import CallError, ColumnError, LayoutError
from hfsdk.core.layout import Mesh
from hfsdk.core.methods import EXPORT_WEIGHTS
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.placement import Placement, Pool
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Bundle, Order, Part, RoleState, StateCopy, Stored, Weights
from hfsdk.core.table import Array, Ragged, Table, kind_of
from hfsdk.core.trace import KEPT_STEPS, Span
from hfsdk.core.unscored import unscored_or_none
from hfsdk.engine.calls.dispatch import one_array_each
from hfsdk.engine.calls.messages import Submit
from hfsdk.engine.calls.queries import Change
from hfsdk.engine.calls.rerun import Rerun

FINISHED = ("done", "failed", "cancelled")


@dataclass(eq=False)
class LaneReservation:
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
    """The shadow's pool, by then."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set when the lane goes on; without ``arrived``, when the shadow could not be loaded."""
    wait: Callable[[], None] = lambda: None
    """Raises the error that kept the shadow from loading."""


@dataclass(eq=False)
class WeightSync:
    """Weights of a trained role on their way to its shadow."""

    version: int
    """The role's ``changes`` when they were requested."""
    call: CallRecord
    """Takes them out of the trained role."""
    shadow: RoleSpec
    """The shadow that they are for: every box is addressed to those of its ranks that need it."""
    weights: Weights | None = None
    """The weights once ``call`` is done, until the shadow has them."""
    failed: bool = False
    """Whether a call that was to take them over failed: a later one asks for others."""
    meeting: LaneReservation | None = None
    """The shadow's lane, where they go straight from pool to pool: ``call`` then is over when the shadow has them."""
    taken: tuple[Bundle, ...] = ()
    """The bundles that the shadow was given then, until its next call is told to have read them."""

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
    sync: WeightSync | None = None
    """The weights that a shadow's call must have; for the call that brings them: where to leave them."""
    rerun: Rerun | None = None
    """How to carry it out again on a simulated twin."""
    reads: Reads | None = None
    """The objects that its ranks read, as planned when it ran."""
    column_bytes: Mapping[str, int] = field(default_factory=dict)
    """The bytes of every column that it wrote."""
    mesh: Mesh | None = None
    branch: str = ""
    """The branch on which it was submitted."""
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
        """Note that the call shall stop; return whether it runs already, and so needs a message."""
        with self._turn:
            self.cancel_asked = True
            return self.state == "running"

    def end(self, state: str, error: Exception | None = None, tell: Callable[[], None] = lambda: None) -> None:
        """End the call: ``tell`` listeners, then let those who wait go on."""
        if self.start_ns:
            self.duration_s = time.perf_counter() - self.start_s
        self.state, self.error = state, error
        try:
            tell()
        finally:
            self.finished.set()

    @property
    def change(self) -> Change:
        """The call's effect on its role's weights."""
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
    """The version of the weights when it was noted, which come from it."""
    restore: str = ""
    """Folder to load after the initial weights, once: the checkpoint of a role whose pool died."""
    restore_kept: StateCopy | None = None
    """The state of a snapshot to give it then instead, where the pool died after one was taken."""
    state: RoleState | None = None
    """The state that a moving role takes along, until it is loaded at its new place."""
    changes: int = 0
    """Grows with every submitted call that changes the weights, and when they are loaded again."""
    sync: WeightSync | None = None
    """The last transfer of the weights to the role's shadow."""
    synced: int = -1
    """The ``changes`` of its role that a shadow's weights have seen; -1 where it has taken over none."""
    version: Version | None = None
    """The version of the weights, as submitted so far; ``None`` before the first call that uses them."""
    kept: StateCopy | None = None
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


# -- the calls that the controller remembers

MOST_CALLS = 10_000
"""The number of calls beyond which the oldest go, whatever step they are of."""


class Ledger:
    """The calls of a session, as far as they are remembered. Adding and pruning need the controller's lock; looking needs none.

    A session runs for days; what it remembers must not grow with its steps. Calls of the last
    :data:`~hfsdk.core.trace.KEPT_STEPS` steps are kept whole, with their spans, up to :data:`MOST_CALLS`: a loop that only
    evaluates is one long step. An older one stays only while it is under way or somebody can still ask for what it wrote (a
    batch, a metric); of the others nothing stays but, where the user trained by hand, one
    :class:`~hfsdk.engine.calls.queries.Change` for the history::

        step   0 ........ 149 | 150 ................... 199 |
               changes by hand | calls, spans, dataflow      |  <- now
               calls that a live batch refers to
    """

    def __init__(self) -> None:
        self._records: dict[int, CallRecord] = {}
        self._changes: list[Change] = []
        self._in_rows: set[int] = set()
        """Calls of steps that have a row of their own in the history, while they are kept."""
        self.first_step = 0
        """The oldest step whose calls are all kept; of the one that runs, those beyond :data:`MOST_CALLS` are not."""
        self._look_at = MOST_CALLS

    def add(self, record: CallRecord) -> None:
        """Remember a call."""
        self._records[record.call.id] = record
        if len(self._records) > self._look_at:
            old = list(self._records.values())[: -MOST_CALLS // 2]
            self._let_go(old)
            self.first_step = max(self.first_step, min(old[-1].call.step + 1, record.call.step))
            self._look_at = max(MOST_CALLS, len(self._records) + MOST_CALLS // 4)  # not at each call, where all are held

    def find(self, call_id: int) -> CallRecord | None:
        """Return a call, ``None`` where it is not kept any more."""
        return self._records.get(call_id)

    def __getitem__(self, call_id: int) -> CallRecord:
        """Return a call.

        Raises:
            ColumnError: it is not kept any more.
        """
        record = self._records.get(call_id)
        if record is None:
            raise ColumnError(
                f"call {call_id} is no longer kept: nothing referred to what it wrote, and a session keeps the calls of its last "
                f"{KEPT_STEPS} steps. Run it again."
            )
        return record

    def __iter__(self) -> Iterator[CallRecord]:
        """Go through the calls as they are now, in the order they were submitted in; without the controller's lock."""
        return iter(list(self._records.values()))

    def of_step(self, step: int | None) -> list[CallRecord]:
        """Return the calls of a step; ``None`` is all that are kept."""
        return [record for record in self if step in (None, record.call.step)]

    def in_row(self, call_ids: Sequence[int]) -> None:
        """Note calls whose step has a row of its own in the history."""
        self._in_rows.update(call_id for call_id in call_ids if call_id in self._records)

    def changes(self) -> list[Change]:
        """Return the changes of weights outside of steps with a row of their own, in the order of submission."""
        recent = [r.change for r in self if r.made is not None and r.call.id not in self._in_rows]
        return sorted([*self._changes, *recent], key=lambda change: change.call_id)

    def begin_step(self, step: int) -> None:
        """A step begins: let go what is too old and not needed."""
        self.first_step = max(self.first_step, step - KEPT_STEPS + 1)
        self._let_go([record for record in self._records.values() if record.call.step < self.first_step])

    def _let_go(self, old: Sequence[CallRecord]) -> None:
        """Forget those of some calls that are over and that nobody needs."""
        under_way = [record for record in self._records.values() if not _over(record)]
        needed = {call_id for record in under_way for call_id in record.call.inputs}
        for record in old:
            if not _over(record) or record.call.id in needed or not record.unasked:
                continue
            if record.made is not None and record.call.id not in self._in_rows:
                self._changes.append(record.change)
            del self._records[record.call.id]
            self._in_rows.discard(record.call.id)


def _over(record: CallRecord) -> bool:
    return record.state in (*FINISHED, "lost")


# -- the rows and bytes that a planned call reads, by rank and object: counted from its orders, without a look at values

MOST_RUNS = 8
"""The number of runs that row numbers are given in, at most."""


def transfers_of(
    request: Submit, orders: Sequence[Order], stored: Mapping[int, Stored], *, task: bool = False
) -> tuple[Transfer, ...]:
    """Return the transfers to the ranks of a call (or a CPU task's process), by the call that wrote them.

    Ranks with the same rows have the same picks, and are counted once.
    """
    return Reads(request, orders, stored, task=task).transfers


@dataclass(frozen=True, eq=False)
class _Group:
    """Ranks with the same rows, and what they pick: (columns, numbers of the parts, rows in each)."""

    ranks: tuple[int | None, ...]
    picks: tuple[tuple[Mapping[str, str], tuple[int, ...], tuple[Array, ...]], ...]


class Reads:
    """The objects that a planned call reads, counted when somebody looks: most calls' are never looked at.

    It holds row numbers and lengths, no handle: the objects that are read may be freed meanwhile.
    """

    def __init__(self, request: Submit, orders: Sequence[Order], stored: Mapping[int, Stored], *, task: bool = False) -> None:
        self._sources = {name: ref.call_id for name, ref in request.inputs.items()}
        numbers: dict[int, int] = {}
        for call in stored.values():
            numbers.update(call.numbers)
        ranks: dict[int, list[int | None]] = {}
        first: dict[int, Order] = {}
        for rank, (rows, order) in enumerate(zip(one_array_each([order.rows for order in orders]), orders, strict=True)):
            ranks.setdefault(id(rows), []).append(None if task else rank)
            first.setdefault(id(rows), order)
        self._groups = [
            _Group(tuple(ranks[key]), tuple(
                (pick.columns, tuple(numbers[id(handle)] for handle in pick.handles), pick.local_rows) for pick in order.picks
            ))
            for key, order in first.items()
        ]  # fmt: skip
        read = {self._sources[next(iter(columns))] for group in self._groups for columns, _, _ in group.picks}
        self._stored = {call_id: call.without_handles for call_id, call in stored.items() if call_id in read}
        self._more: tuple[Transfer, ...] = ()

    def add(self, transfer: Transfer) -> None:
        """Note something that was counted otherwise."""
        self._more += (transfer,)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """One for every call that is read from."""
        return self._counted + self._more

    @cached_property
    def _counted(self) -> tuple[Transfer, ...]:
        readings: dict[int, _Reading] = {}
        for group in self._groups:
            shares: dict[int, dict[int, ObjectRead]] = {}
            for columns, numbers, local_rows in group.picks:
                source = self._sources[next(iter(columns))]
                if source not in readings:
                    readings[source] = _Reading(source, self._stored[source], tell_rows=len(self._groups) <= MOST_RANKS)
                readings[source].add(columns, numbers, local_rows, shares.setdefault(source, {}))
            for source, pieces in shares.items():
                readings[source].shares.append(Share(group.ranks, tuple(pieces.values())))
        return tuple(reading.transfer() for reading in readings.values())


def column_bytes(stored: Stored) -> dict[str, int]:
    """Return the bytes of the values of every column."""
    return {name: round(float(_row_bytes(info, stored.num_rows).sum())) for name, info in stored.columns.items()}


def weights_taken(source: int, bundles: Sequence[Bundle]) -> Transfer:
    """Return the transfer of a trained role's weights to a shadow's ranks: which rank had which object for whom."""
    ranks = sorted({bundle.source for bundle in bundles})
    holders = tuple(Holder(rank, 0, sum(b.num_bytes for b in bundles if b.source == rank)) for rank in ranks)
    bytes_from: dict[int, dict[int, int]] = {}
    for bundle in bundles:
        for target in bundle.targets:
            of_target = bytes_from.setdefault(target, {})
            of_target[bundle.source] = of_target.get(bundle.source, 0) + bundle.num_bytes
    shares = tuple(
        Share((target,), tuple(ObjectRead(ranks.index(rank), 0, count, "") for rank, count in sorted(of_target.items())))
        for target, of_target in sorted(bytes_from.items())
    )
    return Transfer(source, ("weights",), (sum(h.num_bytes for h in holders),), holders, shares, "weights")


class _Reading:
    """The reads of one stored call, while they are counted."""

    def __init__(self, source: int, stored: Stored, *, tell_rows: bool) -> None:
        self.source, self.stored, self._tell_rows = source, stored, tell_rows
        self.shares: list[Share] = []
        self._sets: dict[tuple[tuple[str, str], ...], tuple[Array, Array]] = {}
        """Columns that are read together -> bytes of every row, and which rows are read."""

    def add(
        self, columns: Mapping[str, str], numbers: Sequence[int], local_rows: Sequence[Array], pieces: dict[int, ObjectRead]
    ) -> None:
        """Count one pick of a group of ranks."""
        key = tuple(columns.items())
        if key not in self._sets:
            size = sum((self._row_bytes(stored) for _, stored in key), np.zeros(self.stored.num_rows))
            self._sets[key] = size, np.zeros(self.stored.num_rows, dtype=bool)
        size, wanted = self._sets[key]
        for number, local in zip(numbers, local_rows, strict=True):
            rows = self.stored.parts[number].rows[local]
            if not len(rows):
                continue
            wanted[rows] = True
            piece = ObjectRead(number, len(rows), round(float(size[rows].sum())), _runs(rows) if self._tell_rows else "")
            pieces[number] = piece if number not in pieces else _both(pieces[number], piece)

    def _row_bytes(self, name: str) -> Array:
        return _row_bytes(self.stored.columns.get(name), self.stored.num_rows)

    def transfer(self) -> Transfer:
        """Return the counted transfer."""
        holders = tuple(Holder(part.rank, len(part.rows), part.num_bytes) for part in self.stored.parts)
        sizes = {
            name: round(float(self._row_bytes(stored)[wanted].sum()))
            for columns, (_, wanted) in self._sets.items() for name, stored in columns
        }  # fmt: skip
        return Transfer(self.source, tuple(sizes), tuple(sizes.values()), holders, tuple(self.shares))


def _both(a: ObjectRead, b: ObjectRead) -> ObjectRead:
    """Add up columns that have rows of their own (``batch.take`` of some) and come out of the same object."""
    more = a if a.rows >= b.rows else b
    return ObjectRead(a.holder, more.rows, a.num_bytes + b.num_bytes, more.which)


def _row_bytes(info: ColumnInfo | None, num_rows: int) -> Array:
    """Return the bytes of every row of a column; of a text the mean. A column that was not written has none."""
    if info is None:
        return np.zeros(num_rows)
    if info.dtype == "text":
        return np.full(num_rows, info.num_bytes / max(1, num_rows))
    size = np.dtype(info.dtype).itemsize
    lengths = np.ones(num_rows) if info.lengths is None else info.lengths
    return np.asarray(lengths * float(size))


def _runs(rows: Array) -> str:
    """Return row numbers as text, e.g. ``"0-3, 7"``."""
    ordered = np.sort(rows)
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 2) != 1)
    ends = np.append(starts[1:], len(ordered)) - 1
    runs = list(zip(ordered[starts[:MOST_RUNS]].tolist(), ordered[ends[:MOST_RUNS]].tolist(), strict=True))
    return _ranges(runs) + "…" * (len(starts) > MOST_RUNS)


def _ranges(runs: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


class Steps:
    """Numbers steps.

    A loop begins each of its steps and says of every call which it is of, so that several may be under way at once. Calls by hand
    say nothing: a generation after learning begins the next step.

    Attributes:
        number: the number of the step that began last.
    """

    def __init__(self, begun: Callable[[int], None]) -> None:
        self.number = 0
        self._begun = begun
        self._learned = False
        """Whether something was learned in the step that began last."""

    @property
    def upcoming(self) -> int:
        """The number that a step has which begins now."""
        return self.number + self._learned

    def begin(self, least: int) -> int:
        """Begin a step, and return its number: that of one in which nothing was learned yet goes on."""
        number = max(self.upcoming, least)
        if number > self.number:
            self.number, self._learned = number, False
            self._begun(number)
        return number

    def of_call(self, phase: str, step: int | None) -> int:
        """Return the step of a call of a phase; ``step``: the one that it says it is of."""
        if step is None and phase == "generation":
            self.begin(0)
        number = self.number if step is None else step
        self._learned = self._learned or (phase == "learning" and number == self.number)
        return number


# -- the weights that a call saw, and those that today's weights descend from

MAIN = "main"
"""The branch of a session that was never rewound."""


@dataclass(eq=False, slots=True)
class VersionBranch:
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
    line: VersionBranch
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
        for own in self.ancestors():
            other_version = theirs.get(id(own.line))
            if other_version is not None:
                return min(own, other_version, key=lambda version: version.number)
        return None


class Lineage:
    r"""Makes versions and says which are stale.

    Every submitted change of a trained role makes the next *version* of it; a rewind goes back to an older one, and what is
    trained from there on belongs to another branch::

        main      v1 -- v2 -- v3 -- v4 -- v5           a batch generated at v4 is of the branch main ...
                         \
        kl 0.1            '-- v6 -- v7                 ... and stale for v7, which comes from v2: a batch of v1 or v2 is not

    Pure bookkeeping: no weights, no processes.

    Attributes:
        branch: the branch of what is trained now.
    """

    def __init__(self) -> None:
        self.branch = MAIN
        self._made = 0

    def first(self, role: str) -> Version:
        """Return the version of a role's initial weights."""
        self._made += 1
        return Version(role, self._made, self.branch, VersionBranch(last=self._made), origin=self._made)

    def next(self, version: Version, num_updates: int, *, apart: bool = False) -> Version:
        """Return the version that a change makes of another, after so many optimizer steps in all.

        Where its weights come from elsewhere (``apart``) what was written before is not stale, but no older state is behind them.
        """
        self._made += 1
        goes_on = not apart and version.line.last == version.number
        line = version.line if goes_on else VersionBranch(version, apart)
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
