"""The single controller: takes messages, keeps calls in order, plans them, and hands them to a runtime.

Every pool has a *lane*, a thread that runs the pool's calls one after the other in the order they were submitted; CPU tasks
have a lane of their own. A lane waits for a call's inputs, plans it (``dispatch``), and calls the runtime::

    user's thread          lane of pool "all"                       lane of CPU tasks
    actor.generate   ->    plan, runtime.call(...)
    reward.scores    ->      .                                      waits for generate, then runtime.task(...)
    critic.values    ->    runs after generate, while the reward runs

Where no thread can be started, a call of a simulated session runs as it is submitted.

The controller holds references and metadata, never columns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, overload

import numpy as np

from hfsdk.core.call_events import Listener
from hfsdk.core.dataflow import Call
from hfsdk.core.errors import (
    CallCancelledError,
    ColumnError,
    HfsdkError,
    PlacementError,
    SessionClosedError,
    WorkerDiedError,
    unsaved,
)
from hfsdk.core.files import FileSum
from hfsdk.core.methods import PUT
from hfsdk.core.placement import Placement
from hfsdk.core.runtime import Pick, Runtime, StateCopy, Stored
from hfsdk.core.system import can_start_threads
from hfsdk.core.table import Table
from hfsdk.core.trace import Span
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.dispatch import picks_for
from hfsdk.engine.calls.host_memory import HostRoom, needed_by_node, rooms
from hfsdk.engine.controller.announcer import Announcer, Monitor
from hfsdk.engine.controller.call_queue import CallQueue, ShutdownFlag
from hfsdk.engine.controller.execution import Execution, where
from hfsdk.engine.controller.queries import QueryHandler
from hfsdk.engine.controller.records import (
    FINISHED,
    CallRecord,
    Ledger,
    RoleRecord,
    Steps,
    column_bytes,
    raised,
    source_of,
    stored_table,
)
from hfsdk.engine.controller.role_placement import RolePlacer
from hfsdk.engine.controller.weight_syncs import WeightSyncs

TASKS = "tasks"
"""Name of the lane of CPU tasks."""

T = TypeVar("T")


class Controller:
    """The single controller (HybridFlow, section 3). One instance serves one session; ``send`` may be called from any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.RLock()
        self._next_id = 0
        self._closing, self._announcer, self._calls = ShutdownFlag(), Announcer(), Ledger()
        self._steps = Steps(self._calls.begin_step)
        self._homes = RolePlacer(runtime, self._calls, self._lane, self._announcer.tell)
        self._roles, self._lanes, self._keeping = self._homes.roles, self._homes.lanes, self._homes.keeping
        self._syncs = WeightSyncs(runtime, self._homes, self._closing, self._make_call, self._enqueue)
        self._execution = Execution(runtime, self._calls, self._homes, self._syncs, self._announcer, self._closing)
        self._monitor = Monitor(runtime, self._calls, self._announcer, self._closing)
        self._threaded = runtime.kind != "simulated" or can_start_threads()
        if self._threaded:
            self._monitor.start()
        self._answers = QueryHandler(runtime, self._calls, self._homes, self._steps, lambda: self._monitor.live)
        self._handlers: dict[type, Callable[[Any], Any]] = {
            m.Declare: self._declare, m.Remove: self._remove, m.PlaceRoles: self._place, m.Put: self._put, m.Submit: self._submit,
            m.PutByReference: self._put_away, m.Locate: self._locate,
            m.Wait: self._wait, m.Fetch: self._fetch, m.Cancel: self._cancel, m.Release: self._release, m.Logs: self._logs,
            m.BeginStep: self._begin_step, m.Recover: self._homes.recover, m.Saved: self._saved,
            m.Close: self._close, m.AskHostRoom: self._host_room, m.TakeSnapshot: self._snapshot, m.Rewind: self._rewind,
            m.Return: self._return, m.Forget: self._forget, m.AcknowledgeFailures: self._overlook, m.TraceNote: self._note,
            m.AwaitLoads: lambda message: self._homes.await_loads(message.role), m.MarkRecorded: self._in_row,
        }  # fmt: skip

    @overload
    def send(self, message: q.Query[T]) -> T: ...

    @overload
    def send(self, message: m.Message) -> Any: ...

    def send(self, message: m.Message | q.Query[Any]) -> Any:
        """Handle one message and return its reply.

        Raises:
            SessionClosedError: after ``Close``, unless it only asks what is known here.
            HfsdkError: the error that the message's handling ends with.
        """
        answered_here = isinstance(message, q.Query) and type(message) not in q.OF_WORKERS
        if not answered_here and not isinstance(message, (m.Close, m.Release, m.Forget, m.Wait)):
            self._closing.check()
        return self._answers.answer(message) if isinstance(message, q.Query) else self._handlers[type(message)](message)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(event)`` for every start, progress and end of a call; return a function that unsubscribes."""
        return self._announcer.subscribe(listener)

    # -- roles and placement

    def _declare(self, message: m.Declare) -> bool:
        with self._lock:
            return self._homes.declare(message.role)

    def _remove(self, message: m.Remove) -> None:
        with self._lock:
            self._homes.remove(message.role)

    def _place(self, message: m.PlaceRoles) -> Placement:
        with self._lock:
            self._homes.place(message)
        if message.wait:
            self._homes.await_loads()
        return message.placement

    def _saved(self, message: m.Saved) -> Mapping[str, FileSum] | None:
        pool = self._homes.role(message.role).pool
        if pool is None:
            raise unsaved(message.role)
        return self._runtime.saved(message.role, pool)

    # -- snapshots

    def _host_room(self, message: m.AskHostRoom) -> tuple[HostRoom, ...]:
        with self._lock:
            records = [self._homes.role(name) for name in message.roles]
            if message.unless_kept:
                records = [record for record in records if record.kept is None or not self._keeping.still_has(record.kept)]
            steps = [self._keeping.head(record).num_updates for record in records]
        placed = [(record.spec, record.pool.devices, step > 0) for record, step in zip(records, steps, strict=True) if record.pool]
        cluster = self._runtime.cluster
        needed = needed_by_node((spec, [cluster.node_of(d) for d in devices], trained) for spec, devices, trained in placed)
        return rooms(needed, self._runtime.free_host_bytes(sorted({d for _, devices, _ in placed for d in devices})))

    def _snapshot(self, message: m.TakeSnapshot) -> tuple[StateCopy, ...]:
        with self._lock:
            self._settle(message.roles)
            return self._keeping.keep(message.roles)

    def _rewind(self, message: m.Rewind) -> None:
        with self._lock:
            self._keeping.check(message.kept)
            self._settle(())
            self._keeping.give_back(message.kept, message.branch)

    def _return(self, message: m.Return) -> tuple[str, ...]:
        with self._lock:
            self._settle(())
            self._keeping.give_back((), message.branch)  # whatever comes back is of it
            returned = [self._return_one(self._homes.role(state.role), state) for state in message.kept]
        return tuple(filter(None, returned))

    def _return_one(self, record: RoleRecord, state: StateCopy) -> str:
        """Give a role its state back; where that is gone, return in words with which older state the role comes back."""
        self._keeping.back_at(record, state)
        try:
            if self._keeping.still_has(state):
                self._keeping.give_back((state,), "")
                return ""
        except WorkerDiedError as error:
            return error.message
        except HfsdkError:  # its ranks may have parts of two states by now
            pass
        if record.loaded and record.pool is not None:
            self._runtime.release(state.role, record.pool)
        record.left()
        return self._homes.come_back(record)

    def _forget(self, message: m.Forget) -> None:
        self._keeping.forget(() if self._closing.begun else message.kept)

    def _settle(self, roles: tuple[str, ...]) -> None:
        """Finish what was submitted; raise a failure of these roles that nobody has seen."""
        for lane in list(self._lanes):
            self._homes.drain(lane)
        for name in roles:
            self._raise_unseen(self._homes.role(name))

    def _overlook(self, message: m.AcknowledgeFailures) -> None:
        if message.calls is not None:
            with self._lock:
                for role in self._roles.values():
                    if role.unseen is not None and role.unseen.call.id in message.calls:
                        role.unseen = None
            return
        dead = self._homes.dead_pools()
        with self._lock:
            self._homes.close_dead(dead)
            for role in self._roles.values():
                role.unseen = None

    def _note(self, message: m.TraceNote) -> None:
        with self._lock:
            self._next_id += 1
            call = Call(id=self._next_id, role="session", method=message.method, step=self._steps.number)
            span = Span(
                name=call.method, role=call.role, call_id=call.id, method=call.method, step=call.step,
                start_ns=message.start_ns, duration_s=message.seconds, attrs={"state": "done", "why": message.why},
            )  # fmt: skip
            record = CallRecord(call, None, spans=(span,))
            record.end("done")
            self._calls.add(record)

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
            shadow = self._syncs.shadow_for(message)
            for needed in (role, shadow):
                self._raise_unseen(needed)
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
            # checked before anything is counted: a refused call must leave no version and no step behind
            self._keeping.check_fresh(message, sources)
            step = self._steps.of_call(message.phase, message.step)
            if role is not None and message.kind.changes_weights:
                role.changes += 1
            sync = self._syncs.sync(role, shadow, message.phase, step) if role is not None and shadow is not None else None
            record = CallRecord(self._make_call(message, step), message, sync=sync)
            record.source = source_of(message)
            self._keeping.stamp(record, role, sources)
            self._enqueue(record, lane)
        return record.call.id

    def _begin_step(self, message: m.BeginStep) -> int:
        with self._lock:
            return self._steps.begin(message.least)

    def _in_row(self, message: m.MarkRecorded) -> None:
        with self._lock:
            self._calls.in_row(message.call_ids)

    def _enqueue(self, record: CallRecord, lane: str) -> None:
        """Put a call on its lane, behind the calls on lanes that share devices with it."""
        self._calls.add(record)
        pool = next((p for p in self._homes.placement.pools if p.name == lane), None) if self._homes.placement else None
        if pool is not None:
            record.after = self._homes.before(pool)
        self._lane(lane).put(record)

    def _make_call(self, message: m.Submit, step: int) -> Call:
        self._next_id += 1
        return Call(
            id=self._next_id, role=message.role, method=message.method, phase=message.phase,
            reads=tuple(message.inputs), read_from=tuple(ref.call_id for ref in message.inputs.values()), writes=message.writes,
            inputs=tuple(dict.fromkeys(ref.call_id for ref in message.inputs.values())),
            protocol=message.protocol.name if message.protocol else "", num_rows=message.num_rows, step=step,
            line=message.line, function=message.function,
        )  # fmt: skip

    def _put(self, message: m.Put) -> int:
        described = stored_table("your data", message.table, ())  # what cannot travel is told by its column's name
        return self._keep(replace(described, parts=(self._runtime.put(message.table),)), message.step)

    def _put_away(self, message: m.PutByReference) -> int:
        part = self._runtime.adopt(message.content, message.stored.num_rows, message.num_bytes)
        return self._keep(replace(message.stored, parts=(part,)), message.step)

    def _keep(self, stored: Stored, step: int | None) -> int:
        """Note a stored table under a call of its own, which is over."""
        with self._lock:
            self._next_id += 1
            call = Call(
                id=self._next_id,
                role="session",
                method=PUT.name,
                writes=tuple(stored.columns),
                num_rows=stored.num_rows,
                step=self._steps.number if step is None else step,
            )
            record = CallRecord(call, None, stored=stored)
            record.end("done")
            record.column_bytes = column_bytes(stored)
            self._calls.add(record)
        return call.id

    # -- looking

    def _wait(self, message: m.Wait) -> bool:
        records = [record for record in map(self._calls.find, message.call_ids) if record is not None]  # others are over long since
        for record in records:
            if not record.finished.is_set():
                self._closing.check()
            if not record.finished.wait(message.timeout_s):
                return False
        for record in records:
            if record.error is not None:
                record.origin.seen = True
                raise raised(record.error)
        return True

    def _fetch(self, message: m.Fetch) -> Table:
        return self._runtime.fetch(self._locate(message))

    def _locate(self, message: m.Fetch | m.Locate) -> tuple[Pick, ...]:
        stored = {}
        for ref in message.columns.values():
            source = self._calls[ref.call_id]
            self._execution.check_usable(source, None)
            assert source.stored is not None
            stored[ref.call_id] = source.stored
        first = next(iter(message.columns.values()))
        num_rows = len(first.rows) if first.rows is not None else stored[first.call_id].num_rows
        return picks_for(message.columns, np.arange(num_rows), stored)

    def _release(self, message: m.Release) -> None:
        for call_id in message.call_ids:
            record = self._calls.find(call_id)
            if record is not None:
                record.released = True
                if record.state in FINISHED:
                    record.stored = None

    def _logs(self, message: m.Logs) -> str:
        record = self._homes.role(message.role)
        if record.pool is None and record.spec.model is not None:
            return f"{message.role} is not loaded; no worker has printed anything for it"
        return self._runtime.logs(record.pool, message.rank)

    # -- cancel, monitor, close

    def _cancel(self, message: m.Cancel) -> None:
        with self._lock:
            cancelled = set(message.call_ids)
            for record in self._calls:
                if record.state in FINISHED or record.state == "lost":
                    continue
                if record.call.id in cancelled or cancelled.intersection(record.call.inputs):
                    cancelled.add(record.call.id)
                    if record.ask_cancel():
                        self._runtime.cancel(record.call.id, record.pool)
                    else:
                        self._execution.finish(record, CallCancelledError("cancelled before it started", **where(record.call)))

    def _lane(self, name: str) -> CallQueue:
        with self._lock:
            if name not in self._lanes:
                self._lanes[name] = CallQueue(name, self._closing, self._execution.carry_out, threaded=self._threaded)
            return self._lanes[name]

    def _close(self, message: m.Close) -> None:
        with self._lock:
            if not self._closing.begin():
                return
            running = [r for r in self._calls if r.state not in FINISHED]
        for record in running:
            if record.ask_cancel():
                self._runtime.cancel(record.call.id, record.pool)
        for lane in self._lanes.values():
            lane.stop()
        self._runtime.close()
        for record in running:
            self._execution.finish(record, SessionClosedError("the session was closed while this call was under way"))
