"""``Announcer``: sends listeners the start, progress and end of calls; the monitor asks running calls for their progress."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

from hfsdk.core.call_events import Event, Listener
from hfsdk.core.errors import SessionClosedError
from hfsdk.core.runtime import Progress, Runtime
from hfsdk.engine.controller.call_queue import WAIT_S, ShutdownFlag
from hfsdk.engine.controller.queries import Live
from hfsdk.engine.controller.records import CallRecord, Ledger


class Announcer:
    """Sends listeners the events of calls; anyone may announce, on any thread."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(event)`` from now on; return a function that unsubscribes."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    @property
    def heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def tell_of(self, kind: str, record: CallRecord, progress: Progress | None = None) -> None:
        """Announce what has become of a call."""
        if not self._listeners:
            return
        call = record.call
        self.tell({
            "type": kind, "call_id": call.id, "call": str(call), "line": call.line, "phase": call.phase, "step": call.step,
            "done": progress.done if progress else None, "total": progress.total if progress else None,
            "unit": progress.unit if progress else "", "seconds": record.duration_s,
            "error": str(record.error) if record.error else None,
        })  # fmt: skip

    def tell(self, event: Event) -> None:
        """Announce an event."""
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:  # a picture that cannot be drawn must not stop the work, nor this thread
                traceback.print_exc()
                if listener in self._listeners:
                    self._listeners.remove(listener)


class Monitor(threading.Thread):
    """Asks running calls for their progress, several times a second.

    Attributes:
        live: pool -> its running call's progress and spans, at the last look.
    """

    def __init__(self, runtime: Runtime, ledger: Ledger, announcer: Announcer, closing: ShutdownFlag) -> None:
        super().__init__(name="hfsdk-monitor", daemon=True)
        self._runtime, self._ledger, self._announcer, self._closing = runtime, ledger, announcer, closing
        self.live: Live = {}

    def run(self) -> None:
        """Look until the controller closes."""
        while not self._closing.wait(WAIT_S):
            live = {}
            for record in [r for r in self._ledger if r.state == "running" and r.pool is not None]:
                assert record.pool is not None
                try:
                    progress, spans = self._runtime.progress(record.pool)
                except SessionClosedError:
                    return
                live[record.pool.name] = (progress, spans)
                if progress is not None and progress.call_id == record.call.id and self._announcer.heard:
                    self._announcer.tell_of("call_progress", record, progress)
            self.live = live
