"""``EventLog``: the last events of a kept session, numbered, for those who listen from afar."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from hfsdk.session.keeper_requests import Heard

KEPT_EVENTS = 4096
"""Events that are kept for a kernel that was away for a moment; one that missed more is told everything anew."""

GATHER_S = 0.05
"""How long an event waits for others, to travel with them."""

NOBODY = object()


class EventLog:
    """The last events, numbered, for those who listen from afar."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=KEPT_EVENTS)
        self._added = threading.Condition()
        self.last = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event."""
        with self._added:
            self.last += 1
            self._events.append((self.last, event))
            self._added.notify_all()

    def after(self, since: int, timeout_s: float, by: object, over: Callable[[], bool]) -> Heard:
        """Return what came after an event, but for what ``by`` told; wait for some, until it is over for whoever listens."""
        deadline = time.monotonic() + timeout_s
        with self._added:
            self._added.wait_for(lambda: self._is_news(since, by) or over(), timeout_s)
        if not over():
            time.sleep(max(0.0, min(GATHER_S, deadline - time.monotonic())))  # few answers, with several events each
        with self._added:
            first = self._events[0][0] if self._events else self.last + 1
            found = [event for number, event in self._events if number > since and event.get("by", NOBODY) != by]
            return Heard(tuple(found), self.last, missed=first > since + 1 and self.last > since)

    def _is_news(self, since: int, by: object) -> bool:
        """Whether something came that whoever listens has not told himself."""
        if self.last <= since:
            return False
        return any(number > since and event.get("by", NOBODY) != by for number, event in reversed(self._events))

    def wake(self) -> None:
        """Have those who wait look whether it is over for them."""
        with self._added:
            self._added.notify_all()
