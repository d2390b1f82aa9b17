"""What an interrupt does to ``train``: it pauses the run, stops its call, or is held back while the run begins or ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

MOST_HELD = 2
"""Interrupts that are held back while a run begins or ends; the next one is raised wherever it finds the run."""


class Interrupts:
    """Counts interrupts while ``train`` runs.

    While its steps run, the first only asks for a pause and the next are raised. While it begins and ends they are held back, so
    that nothing is half begun or half ended; :meth:`answer` raises those that came meanwhile.
    """

    def __init__(self, pause: Callable[[], None]) -> None:
        self.count = 0
        self._pause, self._raised, self._held = pause, False, 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take one: the handler of the signal."""
        self.count += 1
        if self._raised and self.count == 1:
            self._pause()
        elif self._raised or self._held == MOST_HELD:
            raise KeyboardInterrupt
        else:
            self._held += 1

    def answer(self) -> None:
        """Raise an interrupt that was held back."""
        if self.count:
            raise KeyboardInterrupt

    @contextmanager
    def raised(self) -> Iterator[None]:
        """While the steps run."""
        self._raised = True
        try:
            self.answer()
            yield
        finally:
            self._raised = False


@contextmanager
def interrupts_held(pause: Callable[[], None]) -> Iterator[Interrupts]:
    """Hold interrupts back, on the main thread; elsewhere there are none."""
    interrupts = Interrupts(pause)
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    previous = signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)
