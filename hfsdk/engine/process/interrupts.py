"""Ctrl-C while something is being started or ended: held back until that is whole or gone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any


@dataclass
class _Hold:
    """The one hold of the main thread; inner ones belong to it."""

    previous: Any = None
    """The handler that was there; ``None`` while nothing is held back."""
    pending: bool = False
    passing: list[CodeType] = field(default_factory=list)
    """Code during which an interrupt passes at once: its caller can undo its work."""

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Keep the interrupt, or let it pass."""
        self.pending = True
        inner = frame
        while inner is not None and self.passing:
            if inner.f_code in self.passing:
                self.deliver(frame)
                return
            inner = inner.f_back

    def deliver(self, frame: FrameType | None = None) -> None:
        """Hand an interrupt that was kept to the handler that was there."""
        if self.pending:
            self.pending = False
            self.previous(signal.SIGINT, frame)


_HOLD = _Hold()


@contextmanager
def held(*passing: CodeType) -> Iterator[None]:
    """Hold back a Ctrl-C until the block is left, so that nothing in it is left half done.

    Only the main thread hears a Ctrl-C: elsewhere nothing is held back. Holds nest; the outermost one delivers.

    Args:
        passing: code in which an interrupt passes at once, because the block undoes that code's effects.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outermost = _HOLD.previous is None
    if outermost:
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # ignored, or the end of the process: there is nothing to hold back
            yield
            return
        _HOLD.pending, _HOLD.previous = False, handler
        signal.signal(signal.SIGINT, _HOLD.on_signal)
    _HOLD.passing += passing
    try:
        yield
    finally:
        del _HOLD.passing[len(_HOLD.passing) - len(passing) :]
        if outermost:
            signal.signal(signal.SIGINT, _HOLD.previous)
            pending, handler = _HOLD.pending, _HOLD.previous
            _HOLD.pending, _HOLD.previous = False, None
            if pending:
                handler(signal.SIGINT, None)


def deliver() -> None:
    """Let a Ctrl-C that is held back through here, where the caller can undo its work."""
    if threading.current_thread() is threading.main_thread() and _HOLD.previous is not None:
        _HOLD.deliver()
