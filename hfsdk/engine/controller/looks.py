"""``Looks``: what the controller answers to those who look at it: calls, spans, dataflow, devices. Nothing changes by it.

Without the controller's lock, which a place holds while it waits for lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hfsdk.core.dataflow import CallFlow
from hfsdk.core.methods import method_of
from hfsdk.core.runtime import DeviceStatus, Progress, Runtime
from hfsdk.core.trace import Span
from hfsdk.engine.calls import messages as m
from hfsdk.engine.controller.homes import Homes
from hfsdk.engine.controller.ledger import Ledger
from hfsdk.engine.controller.records import FINISHED, CallRecord

Live = Mapping[str, tuple[Progress | None, tuple[Span, ...]]]
"""Pool -> its running call's progress and spans, at the monitor's last look."""


class Looks:
    """See the module's text."""

    def __init__(self, runtime: Runtime, ledger: Ledger, homes: Homes, step: Callable[[], int], live: Callable[[], Live]) -> None:
        self._runtime, self._ledger, self._homes, self._step, self._live = runtime, ledger, homes, step, live

    def answer(self, message: m.Look) -> Any:
        """Answer what was asked; see :class:`hfsdk.engine.calls.messages.Look`."""
        match message.what:
            case "roles":
                return self._homes.states
            case "placement":
                return self._homes.placement
            case "step":
                return self._step()
            case "first_step":
                return self._ledger.first_step
            case "devices":
                return self._devices()
            case "changes":
                return self._ledger.changes()
            case "controller_bytes":
                return self._runtime.controller_bytes()
        listed = [r for r in self._ledger.of_step(message.step) if method_of(r.call.method).listed]  # looking changes nothing seen
        return self._of_calls(message.what, listed)

    def _of_calls(self, what: str, records: Sequence[CallRecord]) -> Any:
        match what:
            case "calls":
                return [r.call for r in records]
            case "running":
                return [r.call for r in records if r.state not in (*FINISHED, "lost")]
            case "spans":
                return self._spans(records)
            case "dataflow":
                return self._dataflow(records)
            case "reruns":
                return [r.rerun for r in records if r.state == "done" and r.rerun is not None]
        raise ValueError(f"nobody can look at {what!r}")

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
