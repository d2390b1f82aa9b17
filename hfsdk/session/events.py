"""Events of calls on their way to listeners: each call's start is told on the thread that made the call, before all else.

The controller's own events come from its lanes. A notebook can only draw under a cell from the thread that runs the cell, so
``call_started`` is sent here, at submission, and a lane's events that come too early wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Event = dict[str, Any]
Listener = Callable[[Event], None]

ENDS = ("call_done", "call_failed", "call_cancelled")


MOST_EARLY = 64
"""Calls whose events are kept until they are announced."""


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
