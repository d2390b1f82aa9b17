"""Events of calls on their way to listeners: each call's start is told on the thread that made the call, before all else.

The controller's own events come from its lanes. A notebook can only draw under a cell from the thread that runs the cell, so
``call_started`` is sent here, at submission, and a lane's events that come too early wait for it.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable

from hfsdk.core.call_events import Event, Listener
from hfsdk.core.errors import CallCancelledError, SessionClosedError
from hfsdk.core.system import can_start_threads

ENDS = ("call_done", "call_failed", "call_cancelled")


MOST_EARLY = 64
"""Calls whose events are kept until they are announced."""


STOP_S = 1.0
"""How long whoever unsubscribes waits for the events that a listener has not heard yet."""


BEHIND_S = 0.25
"""How long a call's start waits for a listener that has not heard all that came before it."""


class Aside:
    """Calls a listener of the user's: at a call's start on the thread that made it, else on a thread of the listener's own.

    Where no thread can be started, always on the thread that made the call. So no lane of the controller ever waits for a
    listener, and whatever it asks of the session is served: it may look, wait, submit. What it submits itself it is not told
    of; it would answer its own answers for ever. It hears the end of a call before the start of one that was made after it,
    unless it is ``BEHIND_S`` behind.
    """

    def __init__(self, listener: Listener, is_closed: Callable[[], bool]) -> None:
        self._listener = listener
        self._is_closed = is_closed
        self._queue: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._here = threading.local()
        self._own: set[int] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def __call__(self, event: Event) -> None:
        """Take an event, on any thread."""
        if self._stopped or self._is_own(event):
            return
        if event["type"] == "call_started":
            self._await_earlier()
            self._tell(event)
            return
        if not can_start_threads():
            self._guarded(event)
            return
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="hfsdk-listener", daemon=True)
                thread.start()
                self._thread = thread
        self._queue.put(event)

    def _await_earlier(self) -> None:
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            heard = threading.Event()
            self._queue.put(heard)
            heard.wait(BEHIND_S)

    def _is_own(self, event: Event) -> bool:
        number = event.get("call_id", -1)
        if event["type"] == "call_started" and getattr(self._here, "inside", False):
            self._own.add(number)
        found = number in self._own
        if event["type"] in ENDS:
            self._own.discard(number)
        return found

    def _tell(self, event: Event) -> None:
        self._here.inside = True
        try:
            self._listener(event)
        finally:
            self._here.inside = False

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            if isinstance(event, threading.Event):
                event.set()
                continue
            if not self._stopped:
                self._guarded(event)

    def _guarded(self, event: Event) -> None:
        try:
            self._tell(event)
        except SessionClosedError:
            self._stopped = True
        except Exception as error:  # the user's: the work goes on, and the listener is dropped
            self._stopped = True
            if not (isinstance(error, CallCancelledError) and self._is_closed()):  # what it waited for ended with the session
                warnings.warn(f"a listener of this session raised and is dropped: {error!r}", UserWarning, stacklevel=2)

    def stop(self) -> None:
        """End after what the listener has not heard yet; wait a moment for that."""
        self._queue.put(None)
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_S)


class EventRelay:
    """Passes a controller's events on to one listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._announced: set[int] = set()
        self._early: dict[int, list[Event]] = {}

    def announce(self, event: Event) -> None:
        """Tell that a call has started, then what came too early."""
        self._listener(event)
        with self._lock:
            self._announced.add(event["call_id"])
            early = self._early.pop(event["call_id"], [])
        for late in early:
            self._pass_on(late)

    def on_event(self, event: Event) -> None:
        """Take an event of the controller, on one of its threads."""
        if event["type"] == "call_started":
            return
        if "call_id" not in event:
            self._listener(event)
            return
        with self._lock:
            if event["call_id"] not in self._announced:
                self._early.setdefault(event["call_id"], []).append(event)
                if len(self._early) > MOST_EARLY:  # weights on their way to a shadow are never announced
                    del self._early[next(iter(self._early))]
                return
        self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        self._listener(event)
        if event["type"] in ENDS:
            with self._lock:
                self._announced.discard(event["call_id"])
