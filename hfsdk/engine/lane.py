"""A lane of the controller: the thread that runs a pool's calls, one after the other."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from typing import Protocol

from hfsdk.engine.records import CallRecord, raised
from hfsdk.errors import CallError, HfsdkError, SessionClosedError

WAIT_S = 0.2
"""How often a waiting caller looks whether the lane still runs."""


class Owner(Protocol):
    """What a lane asks of its controller."""

    def check_open(self) -> None:
        """Raise SessionClosedError once the session is closed."""
        ...

    def run_record(self, record: CallRecord) -> None:
        """Run one call to its end."""
        ...


class Lane(threading.Thread):
    """Runs what it is given, one after the other, in submission order."""

    def __init__(self, controller: Owner, name: str) -> None:
        super().__init__(name=f"hfsdk-lane-{name}", daemon=True)
        self._controller = controller
        self._queue: queue.SimpleQueue[CallRecord | Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def put(self, record: CallRecord) -> None:
        """Add a call."""
        self._queue.put(record)

    def post(self, function: Callable[[], None]) -> Callable[[], None]:
        """Add a function; return another one that waits for it and raises what it raised."""
        done = threading.Event()
        failure: list[HfsdkError] = []

        def guarded() -> None:
            try:
                self._controller.check_open()
                function()
            except HfsdkError as error:
                failure.append(error)
            except Exception as error:  # the lane must outlive a defect of our own, and the user must hear of it
                failure.append(CallError(f"hfsdk failed inside: {error!r}", details=traceback.format_exc()))
            finally:
                done.set()

        def wait() -> None:
            while not done.wait(WAIT_S):
                if not self.is_alive():
                    raise SessionClosedError("the session was closed meanwhile")
            if failure:
                raise raised(failure[0])

        self._queue.put(guarded)
        return wait

    def stop(self) -> None:
        """End after what is already queued."""
        self._queue.put(None)

    def run(self) -> None:
        """Work through the queue."""
        while (item := self._queue.get()) is not None:
            if isinstance(item, CallRecord):
                self._controller.run_record(item)
            else:
                item()
