"""``Execution``: carries a call out on its lane: waits for its inputs, plans it, hands it to the runtime, notes how it ended."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from hfsdk.core.arguments import NO_ARGUMENTS
from hfsdk.core.dataflow import Call
from hfsdk.core.errors import (
    CallCancelledError,
    CallError,
    DependencyError,
    HfsdkError,
    LostColumnError,
    WorkerDiedError,
)
from hfsdk.core.methods import LOAD_STATE, NUM_UPDATES, STEP, UPDATE
from hfsdk.core.runtime import Order, Runtime, Stored, TransferBrokenError, Work
from hfsdk.core.trace import Span
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls.dispatch import check_aligned, mesh_of, plan_orders, task_order
from hfsdk.engine.calls.rerun import Rerun
from hfsdk.engine.controller.announcer import Announcer
from hfsdk.engine.controller.call_queue import WAIT_S, ShutdownFlag
from hfsdk.engine.controller.records import (
    FINISHED,
    CallRecord,
    Ledger,
    Reads,
    RoleRecord,
    column_bytes,
    raised,
    tokens_of,
    weights_taken,
)
from hfsdk.engine.controller.role_placement import RolePlacer
from hfsdk.engine.controller.weight_syncs import WeightSyncs

MOST_FLOWS = 256
"""The number of last calls of which it is known who read what from whom."""

STRANGERS = "strangers"
"""Attribute of a call's span: packets of somebody else's connections that the worker's closed ports have dropped since the last."""

STRANGERS_TEXT = (
    "somebody else's program connects to the ports by which this session's workers find each other. It gets no answer and changes "
    "nothing; SECURITY.md says what else may reach them. On a machine that others use, ask who looks at its ports."
)

TELLS_S = 5.0
"""How long a call whose worker ended may take to end as well, after what it wrote and others wrote is noted as lost."""


class Execution:
    """Carries calls out. Runs on lanes, without the controller's lock, which a place that drains a lane holds."""

    def __init__(
        self, runtime: Runtime, ledger: Ledger, homes: RolePlacer, syncs: WeightSyncs, announcer: Announcer, closing: ShutdownFlag
    ) -> None:
        self._runtime, self._ledger, self._homes, self._syncs = runtime, ledger, homes, syncs
        self._announcer, self._closing = announcer, closing
        self._flows: deque[CallRecord] = deque()
        self._flows_lock = threading.Lock()
        self._strangers_told = False

    def carry_out(self, record: CallRecord) -> None:
        """Run one call to its end; called by its lane."""
        request = record.request
        assert request is not None
        self._wait_inputs(record)
        if record.cancel_asked or record.state in FINISHED:
            self.finish(record, CallCancelledError("cancelled before it started", **where(record.call)))
            return
        role = self._homes.roles.get(request.role)
        try:
            stored = self._stored_inputs(record)
            check_aligned(request, stored)
            self._run(record, request, role, stored)
        except HfsdkError as error:
            self.finish(record, located(error, record.call))
        except Exception as error:  # the lane must outlive a defect of our own, and the user must hear of it
            text = "".join(traceback.format_exception(error))
            self.finish(record, CallError(f"hfsdk failed inside: {error!r}", details=text, **where(record.call)))

    def _run(self, record: CallRecord, request: m.Submit, role: RoleRecord | None, stored: dict[int, Stored]) -> None:
        work = self._plan(record, request, role, stored)
        self._note_reads(record, Reads(request, work.orders, stored, task=work.pool is None))
        record.rerun = Rerun.of(record.call, request, stored)
        if not record.begin():
            raise CallCancelledError("cancelled before it started")
        self._announcer.tell_of("call_started", record)
        try:
            outcome = self._runtime.task(work) if work.pool is None else self._runtime.call(work)
        except (WorkerDiedError, TransferBrokenError) as error:
            self._pools_died(record, error)
            return
        self._tell_of_strangers(outcome.spans)
        record.rerun = record.rerun.ended(outcome.stored)
        record.stored, record.spans = None if record.released else outcome.stored, outcome.spans
        record.column_bytes = column_bytes(outcome.stored) if outcome.stored else {}
        # a shadow's own call: it read the weights too, with the call (bundles) or over a link before it (taken)
        if record.sync is not None and record.sync.call is not record and record.reads is not None:
            bundles = work.weights.bundles if work.weights is not None else record.sync.taken
            if bundles:
                record.reads.add(weights_taken(record.sync.call.call.id, bundles))
            record.sync.taken = ()
        if outcome.error is not None:
            # an update that failed may have taken some of its optimizer steps: the ranks say how many
            if role is not None and request.method == UPDATE.name:
                try:
                    self._recount_updates(role, record, work)
                except WorkerDiedError as error:
                    self._pools_died(record, error)
                    return
            if record.sync is not None and work.weights is not None:
                # a cancelled call has not touched the weights, which can be given again
                record.sync.failed = not isinstance(outcome.error, CallCancelledError)
            raise outcome.error
        if work.pool is not None:
            record.num_tokens = tokens_of(request, stored, outcome.stored)
        record.result = list(outcome.results) if request.result == "all" else next(iter(outcome.results), None)
        if record.sync is not None and role is not None:
            self._syncs.keep(role, record, record.sync)
        if role is not None:
            self._count_updates(role, record)
        self.finish(record, None)

    def _tell_of_strangers(self, spans: Iterable[Span]) -> None:
        """Tell the session's owner, once, that somebody else tries to connect to the workers."""
        if not self._strangers_told and any(span.attrs.get(STRANGERS) for span in spans):
            self._strangers_told = True
            self._announcer.tell({"type": "notice", "text": STRANGERS_TEXT})

    def _plan(self, record: CallRecord, request: m.Submit, role: RoleRecord | None, stored: dict[int, Stored]) -> Work:
        """Return a call as the runtime takes it; its role is loaded by then, as is a shadow that takes weights straight from it."""
        if role is None or role.spec.function is not None:
            return Work(record.call, None, (task_order(request, stored),), request.timeout_s)
        pool, sync = self._homes.ensure_loaded(role), record.sync
        work = Work(record.call, pool, plan_orders(request, role.spec, stored))
        if role.spec.shadow_of and sync is not None:
            if sync.meeting is not None and sync.call.error is not None:
                record.root = sync.call.origin  # told once
            work = replace(work, weights=self._syncs.weights_for(role, sync), version=sync.version)
        elif sync is not None and sync.meeting is not None:
            work = replace(work, taker=self._syncs.taker(record, role, sync, sync.meeting))
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
        errors = [self._homes.pool_lost(pool, error, record) for pool, error in lost]
        words, first = " ".join(error.message for error in errors), errors[0]
        self.finish(record, type(first)(words, **{**first.fields(), **where(record.call)}))

    def finish(self, record: CallRecord, error: Exception | None) -> None:
        """End a call, well or with an error, and let listeners know; one that is over stays as it is."""
        if record.state in FINISHED:
            return
        cancelled = isinstance(error, CallCancelledError)
        state = "done" if error is None else "cancelled" if cancelled else "failed"
        role = self._homes.roles.get(record.call.role)
        if state == "failed" and role is not None:
            role.unseen = record
        if state != "done" and record.call.method == LOAD_STATE.name and record.made is not None:
            record.made.line.apart = False  # older states are behind the role as before
        record.sync = None
        record.request = replace(record.request, arguments=NO_ARGUMENTS, inputs={}) if record.request else None
        record.end(state, error, tell=lambda: self._announcer.tell_of(f"call_{state}", record))
        if record.released:  # perhaps since its columns were noted
            record.stored = None

    def _wait_inputs(self, record: CallRecord) -> None:
        sources = [self._ledger[call_id] for call_id in record.call.inputs]
        if record.sync is not None and record.sync.call is not record:
            sources.append(record.sync.call)
        events = [source.finished for source in sources] + list(record.after)
        record.after = ()
        for event in events:
            while not event.wait(WAIT_S):
                if record.cancel_asked or self._closing.begun:
                    record.cancel_asked = True
                    return

    def _stored_inputs(self, record: CallRecord) -> dict[int, Stored]:
        stored = {}
        for call_id in record.call.inputs:
            source = self._ledger[call_id]
            if source.state == "failed" or (source.state == "lost" and source.root is not None):
                record.root = source.origin  # told once
            self.check_usable(source, record.call)
            assert source.stored is not None
            stored[call_id] = source.stored
        return stored

    def check_usable(self, source: CallRecord, user: Call | None) -> None:
        """Raise what keeps a call's columns from being read."""
        at = where(user) if user else {}
        if source.state == "lost":
            again = f"run {source.call} again" + (f" ({source.call.line})" if source.call.line else "")
            text = f"the columns {', '.join(source.call.writes)} died with the worker that held them; {again}"
            died = source.root.error if source.root is not None and source.root.finished.wait(TELLS_S) else None
            if died is None:
                raise LostColumnError(text, **at)
            raise LostColumnError(f"{text}. {getattr(died, 'message', died)}", **at) from died  # told nowhere else
        if source.state == "cancelled":
            raise CallCancelledError(f"its input {source.call} was cancelled", **at)
        if source.error is not None:
            if user is None:
                source.origin.seen = True
                raise raised(source.error)
            error = DependencyError(f"its input {source.call} failed: {source.error}", **at)
            error.__cause__ = source.error
            raise error


def where(call: Call) -> dict[str, Any]:
    """Return the fields by which an error says which call it belongs to."""
    return {"role": call.role, "method": call.method, "line": call.line}


def located(error: HfsdkError, call: Call) -> HfsdkError:
    """Say which call an error belongs to, where it does not say so itself."""
    if isinstance(error, CallError):
        fields = {**error.fields(), **{k: v for k, v in where(call).items() if not error.fields()[k]}}
        located: HfsdkError = type(error)(error.message, **fields)
    else:
        located = type(error)(f"{call}" + (f" (started at {call.line})" if call.line else "") + f": {error}")
    located.__cause__ = error.__cause__
    return located
