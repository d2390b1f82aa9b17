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
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hfsdk.dataflow import Call, CallFlow
from hfsdk.engine import messages as m
from hfsdk.engine.dispatch import check_aligned, mesh_of, picks_for, plan_orders, task_order
from hfsdk.engine.flows import Reads, column_bytes, weights_taken
from hfsdk.engine.keeping import CHANGES, Keeping
from hfsdk.engine.lane import Lane
from hfsdk.engine.records import (
    FINISHED,
    CallRecord,
    RoleRecord,
    Sync,
    check_rollouts,
    raised,
    source_of,
    stored_table,
    tokens_of,
)
from hfsdk.engine.rerun import Rerun
from hfsdk.errors import (
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
from hfsdk.pending import ColumnInfo
from hfsdk.placement import SHADOWS, Placement, Pool
from hfsdk.protocol import ONE_TO_ALL
from hfsdk.roles import RoleSpec
from hfsdk.runtime import DeviceStatus, Kept, Order, Progress, Runtime, Stored, Weights, Work
from hfsdk.table import Table
from hfsdk.trace import Span

TASKS = "tasks"
"""Name of the lane of CPU tasks."""

MOST_FLOWS = 256
"""Of so many calls, the last ones, it is known who read what from whom."""

MONITOR_S = 0.2
"""How often running calls are asked for their progress."""

Listener = Callable[[dict[str, Any]], None]


UNSEEN = ("put", "last_reshard", "census")
"""Methods that are no part of a step: to look at it must not change what is seen."""


class Controller:
    """See the module's text. One instance serves one session; ``send`` may be called from any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.RLock()
        self._calls: dict[int, CallRecord] = {}
        self._roles: dict[str, RoleRecord] = {}
        self._placement: Placement | None = None
        self._open_pools: dict[str, Pool] = {}
        self._opening: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lanes: dict[str, Lane] = {}
        self._last: dict[str, CallRecord] = {}
        """The call submitted last on each lane."""
        self._listeners: list[Listener] = []
        self._next_id = 0
        self._step = 0
        self._learned = False
        """Whether something was learned since the last generation; a generation after it begins the next step."""
        self._next_begins = False
        """Whether the next call does so too, whatever it is."""
        self._closed = False
        self._closing = threading.Event()
        self._live: dict[str, tuple[Progress | None, tuple[Span, ...]]] = {}
        self._flows: deque[CallRecord] = deque()
        self._flows_lock = threading.Lock()
        self._keeping = Keeping(runtime, self._roles, self._post_loaded)
        threading.Thread(target=self._monitor, name="hfsdk-monitor", daemon=True).start()
        self._handlers: dict[type, Callable[[Any], Any]] = {
            m.Declare: self._declare, m.Remove: self._remove, m.Place: self._place, m.Put: self._put,
            m.Submit: self._submit, m.Wait: self._wait, m.Fetch: self._fetch, m.Ask: self._ask,
            m.AskColumn: self._ask_column, m.Cancel: self._cancel, m.Release: self._release, m.Look: self._look,
            m.Logs: self._logs, m.NextStep: self._next_step, m.Recover: self._recover, m.Saved: self._saved, m.Close: self._close,
            m.Snapshot: self._snapshot, m.Rewind: self._rewind, m.Forget: self._forget,
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
            old = self._roles.get(message.role.name)
            if old is not None and old.spec == message.role:
                return False
            if old is not None:
                self._unload(old)
            self._roles[message.role.name] = RoleRecord(message.role)
            return True

    def _remove(self, message: m.Remove) -> None:
        with self._lock:
            record = self._role(message.role)
            for shadow in [r for r in self._roles.values() if r.spec.shadow_of == message.role]:
                self._unload(shadow)
                del self._roles[shadow.spec.name]
            self._unload(record)
            del self._roles[message.role]

    def _unload(self, record: RoleRecord) -> None:
        if record.loaded and record.pool is not None:
            self._drain(record.pool.name)
            self._runtime.release(record.spec.name, record.pool)

    def _place(self, message: m.Place) -> Placement:
        """Drain what runs, take the state of roles that move, take pools apart and open the others, load."""
        placement, specs = message.placement, {spec.name: spec for spec in message.roles}
        with self._lock:
            check_rollouts(placement, message.roles)
            for lane in list(self._lanes):
                self._drain(lane)
            for name, record in list(self._roles.items()):
                if record.loaded and record.pool is not None and not self._stays(record, placement, specs.get(name)):
                    self._take_out(record, fresh=message.fresh)
                if record.spec.shadow_of and name not in specs:
                    del self._roles[name]
            kept = {pool.name: pool for pool in placement.pools}
            gone = [pool for name, pool in self._open_pools.items() if kept.get(name) != pool]
            for pool in sorted(gone, key=lambda pool: not pool.within):  # parts before the wholes
                self._runtime.close_pool(pool.name)
                del self._open_pools[pool.name]
            for name, spec in specs.items():
                self._roles.setdefault(name, RoleRecord(spec)).spec = spec
            self._placement = placement
        homes = {name: placement.pool_of(name) for name in specs}
        whole = [(name, pool) for name, pool in homes.items() if not pool.within]
        for wait in [self._lane(pool.name).post(self._load_later(name)) for name, pool in whole]:
            wait()
        for name, pool in homes.items():
            if pool.within:  # its workers are those of the whole: one at a time
                self._lane(pool.name).post(self._load_later(name))()
        return placement

    @staticmethod
    def _stays(record: RoleRecord, placement: Placement, spec: RoleSpec | None) -> bool:
        return spec is not None and spec == record.spec and placement.pool_of(spec.name) == record.pool

    def _take_out(self, record: RoleRecord, *, fresh: bool) -> None:
        """Free a role where it lives and keep what it has learned, for its next place."""
        pool, name = record.pool, record.spec.name
        assert pool is not None

        def take_out() -> None:
            if record.spec.trainable and not fresh:
                try:
                    record.state = self._runtime.export(name, pool)
                except WorkerDiedError as error:
                    raise self._pool_lost(pool, error) from None
            self._runtime.release(name, pool)

        self._lane(pool.name).post(take_out)()
        record.loaded, record.pool, record.synced = False, None, -1
        record.changes += 1
        if fresh:
            record.num_updates, record.restore = 0, ""
            self._keeping.changed(record, 0)

    def _load_later(self, role: str) -> Callable[[], None]:
        def load() -> None:
            self._ensure_loaded(self._role(role))

        return load

    def _ensure_loaded(self, record: RoleRecord) -> Pool:
        """Open the role's pool and load the role, if that has not happened; runs on the pool's lane."""
        if self._placement is None:
            raise PlacementError("no placement yet; call session.place('colocate')")
        pool = self._placement.pool_of(record.spec.name)
        self._open(pool)
        if not record.loaded:
            self._emit({"type": "role_loading", "role": record.spec.name, "pool": pool.name})
            record.pool = pool
            try:
                self._runtime.load(replace(record.spec, restore=record.restore), pool, record.state)
            except WorkerDiedError as error:
                raise self._pool_lost(pool, error) from None
            except CheckpointError as error:  # told once; the next call goes on without it
                record.restore, record.checkpoint, record.checkpoint_updates, record.num_updates = "", "", 0, 0
                raise CheckpointError(f"{error} The next call brings {record.spec.name} back with its initial weights.") from error
            record.loaded, record.restore, record.state = True, "", None
            self._emit({"type": "role_loaded", "role": record.spec.name, "pool": pool.name})
        return pool

    def _open(self, pool: Pool) -> None:
        with self._opening[pool.within or pool.name]:
            whole = next((p for p in self._placement.pools if p.name == pool.within), None) if self._placement else None
            for one in (whole, pool):
                if one is not None and one.name not in self._open_pools:
                    self._runtime.open_pool(one)
                    self._open_pools[one.name] = one

    def _drain(self, lane: str) -> None:
        if lane in self._lanes:
            self._lanes[lane].post(lambda: None)()

    def _role(self, name: str) -> RoleRecord:
        if name not in self._roles:
            raise PlacementError(f"no role {name!r}; the session has {', '.join(self._roles) or 'none'}")
        return self._roles[name]

    def _recover(self, message: m.Recover) -> None:
        record = self._role(message.role)
        record.checkpoint, record.checkpoint_updates = message.folder, message.num_updates

    def _saved(self, message: m.Saved) -> bool:
        pool = self._role(message.role).pool
        if pool is None:
            raise CheckpointError(f"the workers that were writing {message.role}'s state ended; save again")
        return self._runtime.saved(message.role, pool)

    # -- snapshots

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
            self._drain(lane)
        for name in roles:
            self._raise_unseen(self._role(name))

    def _post_loaded(self, record: RoleRecord, function: Callable[[Pool], None]) -> Callable[[], None]:
        """Run a function on a role's lane, after the role is loaded where it is not; return what waits for it."""
        if self._placement is None:
            raise PlacementError("no placement yet; call session.place('colocate')")

        def run() -> None:
            pool = self._ensure_loaded(record)
            try:
                function(pool)
            except WorkerDiedError as error:
                raise self._pool_lost(pool, error) from None

        return self._lane(self._placement.pool_of(record.spec.name).name).post(run)

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
                self._role(message.role)
            if shadow is not None:
                message = replace(message, role=shadow.spec.name)
            on_pool = role is not None and role.spec.function is None
            if on_pool and self._placement is None:
                raise PlacementError("no placement yet; call session.place('colocate')")
            lane = self._placement.pool_of(message.role).name if on_pool and self._placement else TASKS
            for name, ref in message.inputs.items():
                if ref.call_id not in self._calls or self._calls[ref.call_id].released:
                    raise ColumnError(
                        f"column {name!r} is gone: nothing referred to it any more; run the call that wrote it again"
                    )
            sources = [self._calls[ref.call_id] for ref in message.inputs.values()]
            self._keeping.check_fresh(message, sources)
            if message.phase == "generation" or (self._next_begins and message.phase in ("preparation", "learning")):
                self._step, self._learned, self._next_begins = self._step + self._learned, False, False
            self._learned = self._learned or message.phase == "learning"
            if role is not None and message.method in CHANGES:
                role.changes += 1
            sync = self._sync(role, shadow, message.phase) if role is not None and shadow is not None else None
            record = CallRecord(self._make_call(message), message, sync=sync)
            record.source = source_of(message)
            self._keeping.stamp(record, role, sources)
            self._enqueue(record, lane)
        return record.call.id

    def _next_step(self, message: m.NextStep) -> None:
        self._next_begins = True

    def _enqueue(self, record: CallRecord, lane: str) -> None:
        """Put a call on its lane, behind what runs on lanes that share devices with it."""
        self._calls[record.call.id] = record
        pool = next((p for p in self._placement.pools if p.name == lane), None) if self._placement else None
        if pool is not None and self._placement is not None:
            others = (self._last.get(other.name) for other in self._placement.overlapping(pool))
            record.after = tuple(other for other in others if other is not None and other.state not in FINISHED)
        self._last[lane] = record
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
        assert self._placement is not None
        name = role.spec.name
        request = m.Submit(name, "export_weights", phase, {}, (), 0, ONE_TO_ALL, {"shadow": shadow.spec}, result="all")
        record = CallRecord(self._make_call(request), request)
        role.sync = record.sync = Sync(role.changes, record, shadow.spec)
        self._enqueue(record, self._placement.pool_of(name).name)
        return role.sync

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
        part = self._runtime.put(message.table)
        stored = stored_table("your data", message.table, (part,))
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
            self._calls[call.id] = record
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
        if role is not None and role.spec.function is None:
            pool = self._ensure_loaded(role)
            work = Work(record.call, pool, plan_orders(request, role.spec, stored))
            if role.spec.shadow_of and record.sync is not None:
                work = replace(work, weights=self._weights_for(role, record.sync), version=record.sync.version)
            record.pool, record.mesh = pool, mesh_of(role.spec)
        else:
            work = Work(record.call, None, (task_order(request, stored),), request.timeout_s)
        self._note_reads(record, Reads(request, work.orders, stored, task=work.pool is None))
        record.rerun = Rerun.of(record.call, request, stored)
        if not record.begin():
            raise CallCancelledError("cancelled before it started")
        self._emit_call("call_started", record)
        try:
            outcome = self._runtime.task(work) if work.pool is None else self._runtime.call(work)
        except WorkerDiedError as error:
            self._pool_died(record, error)
            return
        record.rerun = record.rerun.ended(outcome.stored)
        record.stored, record.spans = None if record.released else outcome.stored, outcome.spans
        record.column_bytes = column_bytes(outcome.stored) if outcome.stored else {}
        if work.weights is not None and record.sync is not None and record.reads is not None:
            record.reads.add(weights_taken(record.sync.call.call.id, work.weights.bundles))
        if outcome.error is not None:
            if role is not None and request.method == "update":
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

    @staticmethod
    def _keep_sync(role: RoleRecord, record: CallRecord, sync: Sync) -> None:
        """After a transfer's call: the weights stand ready; after the shadow's: it has them, and they are let go."""
        if role.spec.shadow_of:
            if sync.weights is not None:
                role.num_updates = sync.weights.num_updates
            role.synced, sync.weights = sync.version, None
        else:
            sync.weights = Weights(role.spec, tuple(bundle for sent in record.result for bundle in sent), role.num_updates)
            record.result = None

    def _count_updates(self, role: RoleRecord, record: CallRecord) -> None:
        if record.call.method == "update":
            role.num_updates += len(record.result or ())
        elif record.call.method == "step":
            role.num_updates += 1
        elif record.call.method == "load_state" and isinstance(record.result, dict):
            role.num_updates = int(record.result.get("num_updates", 0))
        if record.made is not None:
            record.made.num_updates = role.num_updates

    def _recount_updates(self, role: RoleRecord, record: CallRecord, work: Work) -> None:
        """Ask a rank how many optimizer steps stand after an update that was cancelled or refused in between."""
        order = Order(np.zeros(0, dtype=np.int64), (), {}, False)
        ask = replace(work.call, method="num_updates", reads=(), read_from=(), writes=(), inputs=(), num_rows=0)
        outcome = self._runtime.call(Work(ask, work.pool, (order,) * len(work.orders)))
        role.num_updates = int(outcome.results[0])
        if record.made is not None:
            record.made.num_updates = role.num_updates

    def _pool_died(self, record: CallRecord, error: WorkerDiedError) -> None:
        assert record.pool is not None
        told = self._pool_lost(record.pool, error, record)
        self._finish(record, type(told)(told.message, **{**told.fields(), **_where(record.call)}))

    def _pool_lost(self, pool: Pool, error: WorkerDiedError, record: CallRecord | None = None) -> WorkerDiedError:
        """A worker ended, during the call ``record``: close its pool, so that the next call opens it again.

        Returns the error that says what is lost.
        """
        lost = []
        family = [p for p in self._open_pools.values() if (pool.within or pool.name) in (p.name, p.within)] or [pool]
        for one in sorted(family, key=lambda one: not one.within):
            self._runtime.close_pool(one.name, kill=True)
            self._open_pools.pop(one.name, None)
        for role in list(self._roles.values()):
            if role.pool not in family:
                continue
            role.loaded, role.pool, role.restore, role.synced, role.sync = False, None, role.checkpoint, -1, None
            role.changes += 1
            if role.spec.trainable:
                back = f"checkpoint {role.checkpoint}" if role.checkpoint else "its initial weights"
                missing = role.num_updates - (role.checkpoint_updates if role.checkpoint else 0)
                lost.append(f"{role.spec.name} comes back with {back} ({missing} update{'s' * (missing != 1)} lost)")
                role.num_updates = role.checkpoint_updates if role.checkpoint else 0
                self._keeping.changed(role, role.num_updates)
        dead = {device for one in family for device in one.devices}
        for other in list(self._calls.values()):  # columns live where they were written, whatever pool that was
            parts = other.stored.parts if other.pool is not None and other.stored is not None else ()
            if any(p.rank is not None and other.pool and other.pool.devices[p.rank] in dead for p in parts):
                other.state, other.root = "lost", record
        words = "; ".join(lost) or "no trained role lived there"
        return WorkerDiedError(
            f"{error.message} The pool is started again at the next call; {words}.", **error.fields()
        )

    def _finish(self, record: CallRecord, error: Exception | None) -> None:
        if record.state in FINISHED:
            return
        cancelled = isinstance(error, CallCancelledError)
        state = "done" if error is None else "cancelled" if cancelled else "failed"
        role = self._roles.get(record.call.role)
        if state == "failed" and role is not None:
            role.unseen = record
        record.end(state, error)
        record.sync = None
        if record.released:  # perhaps since its columns were noted
            record.stored = None
        record.request = replace(record.request, options={}, inputs={}) if record.request else None
        self._emit_call(f"call_{state}", record)

    def _wait_inputs(self, record: CallRecord) -> None:
        sources = [self._calls[call_id] for call_id in record.call.inputs]
        if record.sync is not None and record.sync.call is not record:
            sources.append(record.sync.call)
        sources += record.after
        record.after = ()
        for source in sources:
            while not source.finished.wait(MONITOR_S):
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
        for call_id in message.call_ids:
            if not self._calls[call_id].finished.wait(message.timeout_s):
                return False
        for call_id in message.call_ids:
            record = self._calls[call_id]
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
        record = self._calls[message.call_id]
        if message.what == "state":
            return record.state
        if message.what == "writer":
            return "your data" if record.call.method == "put" else str(record.call)
        return record.result if message.what == "result" else record.stored

    def _ask_column(self, message: m.AskColumn) -> ColumnInfo | None:
        stored = self._calls[message.ref.call_id].stored
        return None if stored is None else stored.columns.get(message.ref.name)

    def _release(self, message: m.Release) -> None:
        for call_id in message.call_ids:
            record = self._calls.get(call_id)
            if record is not None:
                record.released = True
                if record.state in FINISHED:
                    record.stored = None

    def _look(self, message: m.Look) -> Any:
        # without the controller's lock, which a place holds while it waits for lanes whose listeners may look
        records = [r for r in list(self._calls.values()) if r.call.method not in UNSEEN]
        if message.what == "calls":
            return [r.call for r in records if message.step in (None, r.call.step)]
        if message.what == "spans":
            return self._spans([r for r in records if message.step in (None, r.call.step)])
        if message.what == "roles":
            return {
                n: (r.spec, "loaded" if r.loaded else "declared", r.weights_updates) for n, r in list(self._roles.items())
            }
        if message.what == "changes":
            return [record.change for record in records if record.made is not None]
        if message.what == "dataflow":
            return self._dataflow([r for r in records if message.step in (None, r.call.step)])
        if message.what == "reruns":
            done = [r for r in records if message.step in (None, r.call.step) and r.state == "done"]
            return [record.rerun for record in done if record.rerun is not None]
        if message.what == "running":
            return [r.call for r in records if r.state not in FINISHED and r.state != "lost"]
        if message.what == "placement":
            return self._placement
        if message.what == "step":
            return self._step
        if message.what == "devices":
            return self._devices()
        return self._runtime.controller_bytes()

    def _dataflow(self, records: list[CallRecord]) -> tuple[CallFlow, ...]:
        there = {r.call.id for r in records}
        sources = {t.source for r in records if r.reads is not None for t in r.reads.transfers}
        sources |= {i for r in records for i in r.call.inputs}
        others = (self._calls[number] for number in sorted(sources - there) if number in self._calls)
        return tuple(record.flow for record in (*others, *records))

    def _spans(self, records: list[CallRecord]) -> list[Span]:
        spans: list[Span] = []
        ids = {r.call.id for r in records if r.state == "running"}  # the last look may be older than a call's end
        for record in records:
            spans += record.spans
            own = any(s.device is None and s.call_id == record.call.id for s in record.spans)
            if record.start_ns and not own:
                spans.append(record.span)
        spans += [s for _, running in self._live.values() for s in running if s.call_id in ids]
        return spans

    def _devices(self) -> list[DeviceStatus]:
        whole = [pool for pool in list(self._open_pools.values()) if not pool.within]
        return [status for pool in whole for status in self._runtime.devices(pool)]

    def _logs(self, message: m.Logs) -> str:
        record = self._role(message.role)
        if record.pool is None:
            return f"{message.role} is not loaded; no worker has printed anything for it"
        return self._runtime.logs(record.pool, message.rank)

    # -- cancel, monitor, close

    def _cancel(self, message: m.Cancel) -> None:
        with self._lock:
            asked = set(message.call_ids)
            for record in self._calls.values():
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
            running = [r for r in list(self._calls.values()) if r.state == "running" and r.pool is not None]
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
            running = [r for r in self._calls.values() if r.state not in FINISHED]
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
