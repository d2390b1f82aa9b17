"""A lane of the controller: runs a pool's calls, one after the other, on a thread of its own where there are threads."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence

from hfsdk.core.errors import CallError, HfsdkError, SessionClosedError
from hfsdk.engine.controller.records import CallRecord, raised


class CallQueue:
    """Runs what it is given, one after the other, in submission order.

    Attributes:
        last: set once what was put on it last is over, and so all before that.
    """

    def __init__(self, name: str, closing: ShutdownFlag, carry_out: Callable[[CallRecord], None], *, threaded: bool) -> None:
        """Start it.

        Args:
            name: the name of its pool.
            closing: whether the controller is closed.
            carry_out: runs a call to its end.
            threaded: whether it has a thread; without one whoever puts something on it runs that at once.
        """
        self._closing, self._carry_out = closing, carry_out
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = queue.SimpleQueue()
        self._adding = threading.Lock()
        self.last = threading.Event()
        self.last.set()
        self._thread = threading.Thread(target=self._run, name=f"hfsdk-lane-{name}", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def put(self, record: CallRecord) -> None:
        """Add a call."""
        self._add(lambda: self._carry_out(record))

    def post(self, function: Callable[[], None], after: Sequence[threading.Event] = ()) -> Callable[[], None]:
        """Add a function, which runs once ``after`` are set; return another one that waits for it and raises what it raised."""
        failure: list[HfsdkError] = []

        def guarded() -> None:
            try:
                self._closing.check()
                for event in after:
                    while not event.wait(WAIT_S):
                        self._closing.check()
                function()
            except HfsdkError as error:
                failure.append(error)
            except Exception as error:  # the lane must outlive a defect of our own, and the user must hear of it
                failure.append(CallError(f"hfsdk failed inside: {error!r}", details=traceback.format_exc()))

        def wait() -> None:
            while not done.wait(WAIT_S):
                if self._thread is not None and not self._thread.is_alive():
                    raise SessionClosedError("the session was closed meanwhile")
            if failure:
                raise raised(failure[0])

        done = self._add(guarded)
        return wait

    def _add(self, run: Callable[[], None]) -> threading.Event:
        over = threading.Event()
        if self._thread is None:
            try:
                run()
            finally:
                over.set()
            return over
        with self._adding:
            self.last = over
            self._queue.put((run, over))
        return over

    def stop(self) -> None:
        """End after what is already queued."""
        self._queue.put(None)

    def _run(self) -> None:
        """Work through the queue."""
        while (item := self._queue.get()) is not None:
            run, over = item
            try:
                run()
            finally:
                over.set()


WAIT_S = 0.2
"""How often what waits for something else looks whether the session was closed meanwhile."""


class ShutdownFlag:
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
