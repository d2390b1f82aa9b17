"""``Closing``: whether the controller is closed; whatever waits looks here."""

from __future__ import annotations

import threading

from hfsdk.core.errors import SessionClosedError

WAIT_S = 0.2
"""How often what waits for something else looks whether the session was closed meanwhile."""


class Closing:
    """Set once, when the session is closed."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def begin(self) -> bool:
        """Close; return whether that is new."""
        new = not self._event.is_set()
        self._event.set()
        return new

    @property
    def begun(self) -> bool:
        """Whether the session is closed."""
        return self._event.is_set()

    def check(self) -> None:
        """Raise SessionClosedError once it is."""
        if self._event.is_set():
            raise SessionClosedError("the session is closed; make a new one with hf.Session(...)")

    def wait(self, seconds: float) -> bool:
        """Wait for the end; return whether it came."""
        return self._event.wait(seconds)
