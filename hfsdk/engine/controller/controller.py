"""The single controller: takes messages, keeps calls in order, plans them, and hands them to a runtime.

Every pool has a *lane*, a thread that runs the pool's calls one after the other in the order they were submitted; CPU tasks
have a lane of their own. A lane waits for a call's inputs, plans it (``dispatch``), and calls the runtime::

    user's thread          lane of pool "all"                       lane of CPU tasks
    actor.generate   ->    plan, runtime.call(...)
    reward.scores    ->      .                                      waits for generate, then runtime.task(...)
    critic.values    ->    runs after generate, while the reward runs

The controller holds references and metadata, never columns.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hfsdk.core.arguments import NO_ARGUMENTS, ToShadow
from hfsdk.core.dataflow import Call
from hfsdk.core.errors import (
    CallCancelledError,
    CallError,
    CheckpointError,
    ColumnError,
    DependencyError,
    HfsdkError,
    LostColumnError,
    PlacementError,
    SessionClosedError,
    WorkerDiedError,
)
from hfsdk.core.files import FileSum
from hfsdk.core.methods import EXPORT_WEIGHTS, LOAD_STATE, NUM_UPDATES, STEP, UPDATE
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.placement import SHADOWS, Placement, Pool
from hfsdk.core.protocol import ONE_TO_ALL
from hfsdk.core.runtime import Kept, Order, Progress, Runtime, Stored, Taker, TransferBrokenError, Weights, Work
from hfsdk.core.table import Table
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls.dispatch import check_aligned, mesh_of, picks_for, plan_orders, task_order
from hfsdk.engine.calls.host_memory import HostRoom, needed_by_node, rooms
from hfsdk.engine.controller.flows import Reads, column_bytes, weights_taken
from hfsdk.engine.controller.homes import Homes
from hfsdk.engine.controller.lane import Lane
from hfsdk.engine.controller.ledger import Ledger
from hfsdk.engine.controller.looks import Live, Looks
from hfsdk.engine.controller.records import (
    FINISHED,
    CallRecord,
    Meeting,
    RoleRecord,
    Sync,
    raised,
    source_of,
    stored_table,
    tokens_of,
)
from hfsdk.engine.controller.rerun import Rerun

TASKS = "tasks"
"""Name of the lane of CPU tasks."""

MOST_FLOWS = 256
"""Of so many calls, the last ones, it is known who read what from whom."""

MONITOR_S = 0.2
"""How often running calls are asked for their progress."""

Listener = Callable[[dict[str, Any]], None]


class Controller:
    """See the module's text. One instance serves one session; ``send`` may be called from any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.RLock()
        self._listeners: list[Listener] = []
        self._calls = Ledger()
        self._homes = Homes(runtime, self._calls, self._lane, self._emit)
        self._roles, self._lanes, self._keeping = self._homes.roles, self._homes.lanes, self._homes.keeping
        self._next_id = 0
        self._step = 0
        self._learned = False
        """Whether something was learned since the last generation; a generation after it begins the next step."""
        self._next_begins = False
        """Whether the next call does so too, whatever it is."""
        self._closed = False
        self._closing = threading.Event()
        self._live: Live = {}
        self._looks = Looks(runtime, self._calls, self._homes, lambda: self._step, lambda: self._live)
        self._flows: deque[CallRecord] = deque()
        self._flows_lock = threading.Lock()
        threading.Thread(target=self._monitor, name="hfsdk-monitor", daemon=True).start()
        self._handlers: dict[type, Callable[[Any], Any]] = {
            m.Declare: self._declare, m.Remove: self._remove, m.Place: self._place, m.Put: self._put,
            m.Submit: self._submit, m.Wait: self._wait, m.Fetch: self._fetch, m.Ask: self._ask,
            m.AskColumn: self._ask_column, m.Cancel: self._cancel, m.Release: self._release, m.Look: self._look,
            m.Logs: self._logs, m.NextStep: self._next_step, m.Recover: self._recover, m.Saved: self._saved, m.Close: self._close,
            m.AskHostRoom: self._host_room, m.Snapshot: self._snapshot, m.Rewind: self._rewind, m.Forget: self._forget,
            m.AwaitLoads: self._await_loads, m.InRow: self._in_row,
        }  # fmt: skip

    def send(self, message: m.Message) -> Any:
        """Handle one message and return its reply.

        Raises:
            SessionClosedError: after ``Close``.
            HfsdkError: what the message's handling ends with.
        """
        if not isinstance(message, (m.Close, m.Release, m.Forget)):
            self.check_open()
        return self._handlers[type(message)](message)

    def check_open(self) -> None:
        """Raise SessionClosedError once the session is closed."""
        if self._closed:
            raise SessionClosedError("the session is closed; make a new one with hf.Session(...)")

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(event)`` for every start, progress and end of a call; return a function that unsubscribes."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    # -- roles and placement

    def _declare(self, message: m.Declare) -> bool:
        with self._lock:
            return self._homes.declare(message.role)

    def _remove(self, message: m.Remove) -> None:
        with self._lock:
            self._homes.remove(message.role)

    def _place(self, message: m.Place) -> Placement:
        with self._lock:
            self._homes.place(message)
        if message.wait:
            self._homes.await_loads()
        return message.placement

    def _await_loads(self, message: m.AwaitLoads) -> None:
        self._homes.await_loads()

    def _recover(self, message: m.Recover) -> None:
        self._homes.recover(message)

    def _saved(self, message: m.Saved) -> Mapping[str, FileSum] | None:
        pool = self._homes.role(message.role).pool
        if pool is None:
            raise CheckpointError(f"the workers that were writing {message.role}'s state ended; save again")
        return self._runtime.saved(message.role, pool)

    # -- snapshots

    def _host_room(self, message: m.AskHostRoom) -> tuple[HostRoom, ...]:
        with self._lock:
            records = [self._homes.role(name) for name in message.roles]
            if message.unless_kept:
                records = [record for record in records if record.kept is None or not self._keeping.has(record.kept)]
            steps = [self._keeping.head(record).num_updates for record in records]
        placed = [(record.spec, record.pool.devices, step > 0) for record, step in zip(records, steps, strict=True) if record.pool]
        cluster = self._runtime.cluster
        needed = needed_by_node((spec, [cluster.node_of(d) for d in devices], trained) for spec, devices, trained in placed)
        return rooms(needed, self._runtime.free_host_bytes(sorted({d for _, devices, _ in placed for d in devices})))

    def _snapshot(self, message: m.Snapshot) -> tuple[Kept, ...]:
        with self._lock:
            self._settle(message.roles)
            return self._keeping.keep(message.roles)

    def _rewind(self, message: m.Rewind) -> None:
        with self._lock:
            self._keeping.check(message.kept)
            self._settle(())
            self._keeping.give_back(message.kept, message.branch)

    def _forget(self, message: m.Forget) -> None:
        self._keeping.forget(() if self._closed else message.kept)

    def _settle(self, roles: tuple[str, ...]) -> None:
        """Finish what was submitted; raise a failure of these roles that nobody has seen."""
        for lane in list(self._lanes):
            self._homes.drain(lane)
        for name in roles:
            self._raise_unseen(self._homes.role(name))

    @staticmethod
    def _raise_unseen(role: RoleRecord | None) -> None:
        """Raise a role's failure that nobody has looked at."""
        if role is not None and role.unseen is not None:
            failed, role.unseen = role.unseen, None
            assert failed.error is not None
            if not failed.origin.seen:
                failed.origin.seen = True
                raise raised(failed.error)

    # -- calls

    def _submit(self, message: m.Submit) -> int:
        with self._lock:
            role = self._roles.get(message.role)
            shadow = self._shadow_for(message)
            for asked in (role, shadow):
                self._raise_unseen(asked)
            if role is None and message.role != "session":
                self._homes.role(message.role)
            if shadow is not None:
                message = replace(message, role=shadow.spec.name)
            on_pool = role is not None and role.spec.function is None
            if on_pool and self._homes.placement is None:
                raise PlacementError("no placement yet; call session.place('colocate')")
            lane = self._homes.placement.pool_of(message.role).name if on_pool and self._homes.placement else TASKS
            for name, ref in message.inputs.items():
                source = self._calls.find(ref.call_id)
                if source is None or source.released:
                    raise ColumnError(f"column {name!r} is gone: nothing referred to it any more; run the call that wrote it again")
            sources = [self._calls[ref.call_id] for ref in message.inputs.values()]
            self._keeping.check_fresh(message, sources)
            if message.phase == "generation" or (self._next_begins and message.phase in ("preparation", "learning")):
                if self._learned:
                    self._step += 1
                    self._calls.begin_step(self._step)
                self._learned = self._next_begins = False
            self._learned = self._learned or message.phase == "learning"
            if role is not None and message.kind.changes_weights:
                role.changes += 1
            sync = self._sync(role, shadow, message.phase) if role is not None and shadow is not None else None
            record = CallRecord(self._make_call(message), message, sync=sync)
            record.source = source_of(message)
            self._keeping.stamp(record, role, sources)
            self._enqueue(record, lane)
        return record.call.id

    def _next_step(self, message: m.NextStep) -> None:
        self._next_begins = True

    def _in_row(self, message: m.InRow) -> None:
        with self._lock:
            self._calls.in_row(message.call_ids)

    def _enqueue(self, record: CallRecord, lane: str) -> None:
        """Put a call on its lane, behind what runs on lanes that share devices with it."""
        self._calls.add(record)
        pool = next((p for p in self._homes.placement.pools if p.name == lane), None) if self._homes.placement else None
        if pool is not None:
            record.after = self._homes.before(pool)
        self._lane(lane).put(record)

    def _shadow_for(self, message: m.Submit) -> RoleRecord | None:
        """Return the shadow that carries a call out in place of the trained role it is submitted to."""
        ending = next((ending for ending, method in SHADOWS.items() if method == message.method), None)
        return self._roles.get(f"{message.role}.{ending}") if ending else None

    def _sync(self, role: RoleRecord, shadow: RoleRecord, phase: str) -> Sync:
        """Have the weights as they are at this point of the submission order; asked for once, however many calls use them."""
        last = role.sync
        if last is not None and last.version == role.changes and last.usable(shadow):
            return last
        assert self._homes.placement is not None
        name = role.spec.name
        request = m.Submit(name, EXPORT_WEIGHTS.name, phase, {}, (), 0, ONE_TO_ALL, ToShadow(shadow=shadow.spec), result="all")
        record = CallRecord(self._make_call(request), request)
        role.sync = record.sync = sync = Sync(role.changes, record, shadow.spec)
        giver, taker = self._homes.placement.pool_of(name), self._homes.placement.pool_of(shadow.spec.name)
        if self._runtime.goes_direct(giver, taker):
            sync.meeting = Meeting()
        self._enqueue(record, giver.name)
        if sync.meeting is not None:
            self._hold(shadow, taker, sync.meeting, record)
        return sync

    def _hold(self, shadow: RoleRecord, pool: Pool, meeting: Meeting, record: CallRecord) -> None:
        """Hold a shadow's lane for the call that gives it weights, from when it gets there until that call is over."""

        def hold(pool: Pool) -> None:
            meeting.pool = pool
            meeting.arrived.set()
            while not record.finished.wait(MONITOR_S):
                self.check_open()

        meeting.wait = self._homes.post_loaded(shadow, hold)
        meeting.over = self._lanes[pool.name].last

    def _taker(self, record: CallRecord, role: RoleRecord, sync: Sync, meeting: Meeting) -> Taker:
        """Wait until the shadow's lane is held for a call that gives it weights; return who takes them.

        Raises:
            CallCancelledError: the call was cancelled meanwhile.
            HfsdkError: the shadow cannot be loaded.
        """
        while not meeting.arrived.wait(MONITOR_S):
            if record.cancel_asked or self._closed:
                raise CallCancelledError("cancelled before it started")
            if meeting.over.is_set() and not meeting.arrived.is_set():
                meeting.wait()
        assert meeting.pool is not None
        shadow = self._roles.get(sync.shadow.name)
        if shadow is not None:
            shadow.synced = -1  # until it has all of them
        return Taker(role.spec, sync.shadow, meeting.pool, sync.version, role.num_updates)

    def _make_call(self, message: m.Submit) -> Call:
        self._next_id += 1
        return Call(
            id=self._next_id, role=message.role, method=message.method, phase=message.phase,
            reads=tuple(message.inputs), read_from=tuple(ref.call_id for ref in message.inputs.values()), writes=message.writes,
            inputs=tuple(dict.fromkeys(ref.call_id for ref in message.inputs.values())),
            protocol=message.protocol.name if message.protocol else "", num_rows=message.num_rows, step=self._step,
            line=message.line, function=message.function,
        )  # fmt: skip

    def _put(self, message: m.Put) -> int:
        described = stored_table("your data", message.table, ())  # what cannot travel is told by its column's name
        stored = replace(described, parts=(self._runtime.put(message.table),))
        with self._lock:
            self._next_id += 1
            call = Call(
                id=self._next_id,
                role="session",
                method="put",
                writes=tuple(message.table),
                num_rows=stored.num_rows,
                step=self._step,
            )
            record = CallRecord(call, None, stored=stored)
            record.end("done")
            record.column_bytes = column_bytes(stored)
            self._calls.add(record)
        return call.id

    def run_record(self, record: CallRecord) -> None:
        """Run one call to its end; called by its lane."""
        request = record.request
        assert request is not None
        self._wait_inputs(record)
        if record.cancel_asked or record.state in FINISHED:
            self._finish(record, CallCancelledError("cancelled before it started", **_where(record.call)))
            return
        role = self._roles.get(request.role)
        try:
            stored = self._stored_inputs(record)
            check_aligned(request, stored)
            self._run(record, request, role, stored)
        except HfsdkError as error:
            self._finish(record, _locate(error, record.call))
        except Exception as error:  # the lane must outlive a defect of our own, and the user must hear of it
            text = "".join(traceback.format_exception(error))
            self._finish(record, CallError(f"hfsdk failed inside: {error!r}", details=text, **_where(record.call)))

    def _run(self, record: CallRecord, request: m.Submit, role: RoleRecord | None, stored: dict[int, Stored]) -> None:
        work = self._plan(record, request, role, stored)
        self._note_reads(record, Reads(request, work.orders, stored, task=work.pool is None))
        record.rerun = Rerun.of(record.call, request, stored)
        if not record.begin():
            raise CallCancelledError("cancelled before it started")
        self._emit_call("call_started", record)
        try:
            outcome = self._runtime.task(work) if work.pool is None else self._runtime.call(work)
        except (WorkerDiedError, TransferBrokenError) as error:
            self._pools_died(record, error)
            return
        record.rerun = record.rerun.ended(outcome.stored)
        record.stored, record.spans = None if record.released else outcome.stored, outcome.spans
        record.column_bytes = column_bytes(outcome.stored) if outcome.stored else {}
        if record.sync is not None and record.sync.call is not record and record.reads is not None:
            taken = work.weights.bundles if work.weights is not None else record.sync.taken
            if taken:
                record.reads.add(weights_taken(record.sync.call.call.id, taken))
            record.sync.taken = ()
        if outcome.error is not None:
            if role is not None and request.method == UPDATE.name:
                self._recount_updates(role, record, work)
            if record.sync is not None and work.weights is not None:
                record.sync.failed = not isinstance(outcome.error, CallCancelledError)
            raise outcome.error
        if work.pool is not None:
            record.num_tokens = tokens_of(request, stored, outcome.stored)
        record.result = list(outcome.results) if request.result == "all" else next(iter(outcome.results), None)
        if record.sync is not None and role is not None:
            self._keep_sync(role, record, record.sync)
        if role is not None:
            self._count_updates(role, record)
        self._finish(record, None)

    def _plan(self, record: CallRecord, request: m.Submit, role: RoleRecord | None, stored: dict[int, Stored]) -> Work:
        """Return what a call is to the runtime; its role is loaded by then, as is a shadow that takes weights straight from it."""
        if role is None or role.spec.function is not None:
            return Work(record.call, None, (task_order(request, stored),), request.timeout_s)
        pool, sync = self._homes.ensure_loaded(role), record.sync
        work = Work(record.call, pool, plan_orders(request, role.spec, stored))
        if role.spec.shadow_of and sync is not None:
            if sync.meeting is not None and sync.call.error is not None:
                record.root = sync.call.origin  # told once
            work = replace(work, weights=self._weights_for(role, sync), version=sync.version)
        elif sync is not None and sync.meeting is not None:
            work = replace(work, taker=self._taker(record, role, sync, sync.meeting))
        record.pool, record.mesh = pool, mesh_of(role.spec)
        return work

    def _note_reads(self, record: CallRecord, reads: Reads) -> None:
        """Remember what a call reads, for the picture; of the last calls only."""
        record.reads = reads
        with self._flows_lock:  # not the controller's: a place that drains this lane holds that one
            self._flows.append(record)
            if len(self._flows) > MOST_FLOWS:
                old = self._flows.popleft()
                old.reads = old.rerun = None

    @staticmethod
    def _weights_for(shadow: RoleRecord, sync: Sync) -> Weights | None:
        """Return the weights a shadow must take over before its call; ``None`` where it has them."""
        if sync.call.error is not None:
            raise DependencyError(f"the weights for {shadow.spec.name} did not come: {sync.call.error}")
        return None if shadow.synced == sync.version else sync.weights

    def _keep_sync(self, role: RoleRecord, record: CallRecord, sync: Sync) -> None:
        """After a transfer's call: the weights stand ready, or the shadow has them; after the shadow's: they are let go."""
        if sync.meeting is not None and not role.spec.shadow_of:
            sync.taken, record.result = tuple(bundle for sent in record.result for bundle in sent), None
            shadow = self._roles.get(sync.shadow.name)
            if shadow is not None:
                shadow.num_updates, shadow.synced = role.num_updates, sync.version
        elif role.spec.shadow_of:
            if sync.weights is not None:
                role.num_updates = sync.weights.num_updates
            role.synced, sync.weights = sync.version, None
        else:
            sync.weights = Weights(role.spec, tuple(bundle for sent in record.result for bundle in sent), role.num_updates)
            record.result = None

    def _count_updates(self, role: RoleRecord, record: CallRecord) -> None:
        if record.call.method == UPDATE.name:
            role.num_updates += len(record.result or ())
        elif record.call.method == STEP.name:
            role.num_updates += 1
        elif record.call.method == LOAD_STATE.name and isinstance(record.result, dict):
            role.num_updates = int(record.result.get("num_updates", 0))
        if record.made is not None:
            record.made.num_updates = role.num_updates

    def _recount_updates(self, role: RoleRecord, record: CallRecord, work: Work) -> None:
        """Ask a rank how many optimizer steps stand after an update that was cancelled or refused in between."""
        order = Order(np.zeros(0, dtype=np.int64), (), False)
        ask = replace(work.call, method=NUM_UPDATES.name, reads=(), read_from=(), writes=(), inputs=(), num_rows=0)
        outcome = self._runtime.call(Work(ask, work.pool, (order,) * len(work.orders)))
        role.num_updates = int(outcome.results[0])
        if record.made is not None:
            record.made.num_updates = role.num_updates

    def _pools_died(self, record: CallRecord, error: WorkerDiedError | TransferBrokenError) -> None:
        """Workers ended during a call: of its pool, or of one of the two, or both, that it ran on."""
        assert record.pool is not None
        lost = error.lost if isinstance(error, TransferBrokenError) else ((record.pool, error),)
        told = [self._homes.pool_lost(pool, error, record) for pool, error in lost]
        words, first = " ".join(error.message for error in told), told[0]
        self._finish(record, type(first)(words, **{**first.fields(), **_where(record.call)}))

    def _finish(self, record: CallRecord, error: Exception | None) -> None:
        if record.state in FINISHED:
            return
        cancelled = isinstance(error, CallCancelledError)
        state = "done" if error is None else "cancelled" if cancelled else "failed"
        role = self._roles.get(record.call.role)
        if state == "failed" and role is not None:
            role.unseen = record
        record.sync = None
        record.request = replace(record.request, arguments=NO_ARGUMENTS, inputs={}) if record.request else None
        record.end(state, error, tell=lambda: self._emit_call(f"call_{state}", record))
        if record.released:  # perhaps since its columns were noted
            record.stored = None

    def _wait_inputs(self, record: CallRecord) -> None:
        sources = [self._calls[call_id] for call_id in record.call.inputs]
        if record.sync is not None and record.sync.call is not record:
            sources.append(record.sync.call)
        events = [source.finished for source in sources] + list(record.after)
        record.after = ()
        for event in events:
            while not event.wait(MONITOR_S):
                if record.cancel_asked or self._closed:
                    record.cancel_asked = True
                    return

    def _stored_inputs(self, record: CallRecord) -> dict[int, Stored]:
        stored = {}
        for call_id in record.call.inputs:
            source = self._calls[call_id]
            if source.state == "failed" or (source.state == "lost" and source.root is not None):
                record.root = source.origin  # told once
            self._check_usable(source, record.call)
            assert source.stored is not None
            stored[call_id] = source.stored
        return stored

    def _check_usable(self, source: CallRecord, user: Call | None) -> None:
        """Raise what keeps a call's columns from being read."""
        where = _where(user) if user else {}
        if source.state == "lost":
            again = f"run {source.call} again" + (f" ({source.call.line})" if source.call.line else "")
            raise LostColumnError(
                f"the columns {', '.join(source.call.writes)} died with the worker that held them; {again}", **where
            )
        if source.state == "cancelled":
            raise CallCancelledError(f"its input {source.call} was cancelled", **where)
        if source.error is not None:
            if user is None:
                source.origin.seen = True
                raise raised(source.error)
            error = DependencyError(f"its input {source.call} failed: {source.error}", **where)
            error.__cause__ = source.error
            raise error

    # -- looking

    def _wait(self, message: m.Wait) -> bool:
        asked = [record for record in map(self._calls.find, message.call_ids) if record is not None]  # others are over long since
        for record in asked:
            if not record.finished.wait(message.timeout_s):
                return False
        for record in asked:
            if record.error is not None:
                record.origin.seen = True
                raise raised(record.error)
        return True

    def _fetch(self, message: m.Fetch) -> Table:
        stored = {}
        for ref in message.columns.values():
            source = self._calls[ref.call_id]
            self._check_usable(source, None)
            assert source.stored is not None
            stored[ref.call_id] = source.stored
        first = next(iter(message.columns.values()))
        num_rows = len(first.rows) if first.rows is not None else stored[first.call_id].num_rows
        return self._runtime.fetch(picks_for(message.columns, np.arange(num_rows), stored))

    def _ask(self, message: m.Ask) -> Any:
        if message.what == "state":
            known = self._calls.find(message.call_id)
            return "gone" if known is None else known.state
        record = self._calls[message.call_id]
        if message.what == "writer":
            return "your data" if record.call.method == "put" else str(record.call)
        return record.result if message.what == "result" else record.stored

    def _ask_column(self, message: m.AskColumn) -> ColumnInfo | None:
        record = self._calls.find(message.ref.call_id)
        return None if record is None or record.stored is None else record.stored.columns.get(message.ref.name)

    def _release(self, message: m.Release) -> None:
        for call_id in message.call_ids:
            record = self._calls.find(call_id)
            if record is not None:
                record.released = True
                if record.state in FINISHED:
                    record.stored = None

    def _look(self, message: m.Look) -> Any:
        return self._looks.answer(message)

    def _logs(self, message: m.Logs) -> str:
        record = self._homes.role(message.role)
        if record.pool is None:
            return f"{message.role} is not loaded; no worker has printed anything for it"
        return self._runtime.logs(record.pool, message.rank)

    # -- cancel, monitor, close

    def _cancel(self, message: m.Cancel) -> None:
        with self._lock:
            asked = set(message.call_ids)
            for record in self._calls:
                if record.state in FINISHED or record.state == "lost":
                    continue
                if record.call.id in asked or asked.intersection(record.call.inputs):
                    asked.add(record.call.id)
                    if record.ask_cancel():
                        self._runtime.cancel(record.call.id, record.pool)
                    else:
                        self._finish(record, CallCancelledError("cancelled before it started", **_where(record.call)))

    def _monitor(self) -> None:
        while not self._closing.wait(MONITOR_S):
            running = [r for r in self._calls if r.state == "running" and r.pool is not None]
            live = {}
            for record in running:
                assert record.pool is not None
                try:
                    progress, spans = self._runtime.progress(record.pool)
                except SessionClosedError:
                    return
                live[record.pool.name] = (progress, spans)
                if progress is not None and progress.call_id == record.call.id and self._listeners:
                    self._emit_call("call_progress", record, progress)
            self._live = live

    def _emit_call(self, kind: str, record: CallRecord, progress: Progress | None = None) -> None:
        if not self._listeners:
            return
        call = record.call
        self._emit({
            "type": kind, "call_id": call.id, "call": str(call), "line": call.line, "phase": call.phase, "step": call.step,
            "done": progress.done if progress else None, "total": progress.total if progress else None,
            "unit": progress.unit if progress else "", "seconds": record.duration_s,
            "error": str(record.error) if record.error else None,
        })  # fmt: skip

    def _emit(self, event: dict[str, Any]) -> None:
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:  # a picture that cannot be drawn must not stop the work, nor this thread
                traceback.print_exc()
                if listener in self._listeners:
                    self._listeners.remove(listener)

    def _lane(self, name: str) -> Lane:
        with self._lock:
            if name not in self._lanes:
                self._lanes[name] = Lane(self, name)
            return self._lanes[name]

    def _close(self, message: m.Close) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            running = [r for r in self._calls if r.state not in FINISHED]
        self._closing.set()
        for record in running:
            if record.ask_cancel():
                self._runtime.cancel(record.call.id, record.pool)
        for lane in self._lanes.values():
            lane.stop()
        self._runtime.close()
        for record in running:
            self._finish(record, SessionClosedError("the session was closed while this call was under way"))


def _where(call: Call) -> dict[str, Any]:
    return {"role": call.role, "method": call.method, "line": call.line}


def _locate(error: HfsdkError, call: Call) -> HfsdkError:
    """Say which call an error belongs to, where it does not say so itself."""
    if isinstance(error, CallError):
        fields = {**error.fields(), **{k: v for k, v in _where(call).items() if not error.fields()[k]}}
        located: HfsdkError = type(error)(error.message, **fields)
    else:
        located = type(error)(f"{call}" + (f" (started at {call.line})" if call.line else "") + f": {error}")
    located.__cause__ = error.__cause__
    return located
