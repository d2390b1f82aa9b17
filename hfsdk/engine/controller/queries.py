"""``Answers``: the controller's answers to questions: calls, spans, dataflow, devices.

Nothing changes by it, but that a look at the cluster's nodes may find another one in place of one that left.
Without the controller's lock, which a place holds while it waits for lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hfsdk.core.dataflow import CallFlow
from hfsdk.core.methods import PUT, method_of
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.runtime import DeviceStatus, Progress, Runtime
from hfsdk.core.trace import Span
from hfsdk.engine.calls import queries as q
from hfsdk.engine.controller.records import FINISHED, CallRecord, Ledger, Steps
from hfsdk.engine.controller.role_placement import RolePlacer

T = TypeVar("T")

Live = Mapping[str, tuple[Progress | None, tuple[Span, ...]]]
"""Pool -> its running call's progress and spans, at the monitor's last look."""


class QueryHandler:
    """Answers the questions that change nothing."""

    def __init__(self, runtime: Runtime, ledger: Ledger, homes: RolePlacer, steps: Steps, live: Callable[[], Live]) -> None:
        self._runtime, self._ledger, self._homes, self._steps, self._live = runtime, ledger, homes, steps, live
        self._answers: dict[type[q.Query[Any]], Callable[[Any], Any]] = {
            q.StateOf: self._state, q.WriterOf: self._writer,
            q.ResultOf: lambda query: self._ledger[query.call_id].result,
            q.StoredOf: lambda query: self._ledger[query.call_id].stored,
            q.InfoOf: self._info,
            q.CurrentStep: lambda query: self._steps.number,
            q.UpcomingStep: lambda query: self._steps.upcoming,
            q.FirstStep: lambda query: self._ledger.first_step,
            q.CallsOf: lambda query: [r.call for r in self._listed(query.step)],
            q.RunningCalls: lambda query: [r.call for r in self._listed(None) if r.state not in (*FINISHED, "lost")],
            q.SpansOf: lambda query: self._spans(self._listed(query.step)),
            q.FlowsOf: lambda query: self._dataflow(self._listed(query.step)),
            q.RerunsOf: lambda query: [
                r.rerun for r in self._listed(query.step) if r.state == "done" and r.rerun is not None
            ],
            q.Changes: lambda query: self._ledger.changes(),
            q.Roles: lambda query: self._homes.states,
            q.KeptOf: lambda query: self._homes.keeping.of_version(self._homes.role(query.role), query.num_updates),
            q.CurrentPlacement: lambda query: self._homes.placement,
            q.Devices: lambda query: self._devices(),
            q.Nodes: lambda query: self._runtime.nodes(),
            q.HeldBytes: lambda query: sum(p.num_bytes for r in self._ledger if r.stored is not None for p in r.stored.parts),
            q.ControllerBytes: lambda query: self._runtime.controller_bytes(),
        }  # fmt: skip

    def answer(self, query: q.Query[T]) -> T:
        """Answer a question; see :mod:`hfsdk.engine.calls.queries`."""
        reply: T = self._answers[type(query)](query)
        return reply

    def _listed(self, step: int | None) -> list[CallRecord]:
        """Return the calls of a step that are shown: looking changes nothing that is seen."""
        return [record for record in self._ledger.of_step(step) if method_of(record.call.method).listed]

    def _state(self, query: q.StateOf) -> str:
        record = self._ledger.find(query.call_id)
        return "gone" if record is None else record.state

    def _writer(self, query: q.WriterOf) -> str:
        call = self._ledger[query.call_id].call
        return "your data" if call.method == PUT.name else str(call)

    def _info(self, query: q.InfoOf) -> ColumnInfo | None:
        record = self._ledger.find(query.ref.call_id)
        return None if record is None or record.stored is None else record.stored.columns.get(query.ref.name)

    def _dataflow(self, records: Sequence[CallRecord]) -> tuple[CallFlow, ...]:
        there = {r.call.id for r in records}
        sources = {t.source for r in records if r.reads is not None for t in r.reads.transfers}
        sources |= {i for r in records for i in r.call.inputs}
        others = [r for r in map(self._ledger.find, sorted(sources - there)) if r is not None]
        return tuple(record.flow for record in (*others, *records))

    def _spans(self, records: Sequence[CallRecord]) -> list[Span]:
        spans: list[Span] = []
        ids = {r.call.id for r in records if r.state == "running"}  # the last look may be older than a call's end
        for record in records:
            spans += record.spans
            own = any(s.device is None and s.call_id == record.call.id for s in record.spans)
            if record.start_ns and not own:
                spans.append(record.span)
        spans += [s for _, running in self._live().values() for s in running if s.call_id in ids]
        return spans

    def _devices(self) -> list[DeviceStatus]:
        whole = [pool for pool in list(self._homes.open_pools.values()) if not pool.within]
        return [status for pool in whole for status in self._runtime.devices(pool)]
