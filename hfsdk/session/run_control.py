"""``RunControl``: whether a run goes on, between the loop that takes its steps and the threads that pause or stop it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from hfsdk.core.call_events import Event
from hfsdk.core.errors import CallCancelledError, OptionError, SessionClosedError
from hfsdk.core.exiting import exiting
from hfsdk.core.first_bad import FirstBad
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.trace import Trace
from hfsdk.session.run_record import RunRecord


class Search(Protocol):
    """Finds a run's first bad number."""

    algorithm: Any
    prompts: Any

    def find(self, step: int | None, *, stay: bool) -> FirstBad | None:
        """Find it."""
        ...

    def last_good(self) -> Snapshot | None:
        """Return the snapshot that this goes back to."""
        ...


@dataclass(eq=False)
class RunControl:
    """What the loop of ``session.train`` asks and says of its run; :class:`~hfsdk.session.running.Run` shows it to the user.

    The loop calls ``begin``, then before each step ``may_go_on``, and ``end``. The others may be called from any thread.
    """

    record: RunRecord = field(default_factory=RunRecord)
    """The steps that have finished."""
    steps: int = 0
    """Steps asked for."""
    background: bool = False
    """Whether it runs in a thread of its own."""
    running: bool = False
    """Whether it has not ended; a paused run in the background has not."""
    paused: bool = False
    """Whether it stopped between two steps to be gone on with."""
    stopped: bool = False
    """Whether ``stop`` ended it."""
    error: Exception | None = None
    """What ended it in the background."""
    thread: threading.Thread | None = None
    """The thread of a run in the background."""
    kept_as: str = ""
    """The name of its session where that is kept."""
    search: Search | None = None
    """Finds its first bad number, where the run goes on in this process."""

    def __post_init__(self) -> None:
        self.calls = StepCalls()
        self._changed = threading.Condition()
        self._pause_asked = self._stop_asked = self._saving = False
        self._steps_asked = 0
        """Single steps that a paused run shall take."""
        self._cancel: Callable[[], None] = lambda: None

    @property
    def state(self) -> str:
        """``"running"``, ``"paused"``, ``"stopped"``, ``"failed"`` or ``"finished"``."""
        if self.error is not None:
            return "failed"
        return "stopped" if self.stopped else "paused" if self.paused else "running" if self.running else "finished"

    @property
    def asked(self) -> tuple[bool, bool, int]:
        """Whether a pause was asked for, whether a stop was, and the single steps that are to come."""
        return self._pause_asked, self._stop_asked, self._steps_asked

    @property
    def end_asked(self) -> bool:
        """Whether a pause or a stop was asked for, whether or not the run has got to it."""
        return self._pause_asked or self._stop_asked

    @property
    def request(self) -> str:
        """What was asked of the running step and has not happened yet: ``"pause"``, ``"stop"`` or nothing."""
        if not self.running or self.paused:
            return ""
        return "stop" if self._stop_asked else "pause" if self._pause_asked and not self._steps_asked else ""

    def last(self) -> Any:
        """Return the last step, with its batch."""
        return self.record.last

    # -- from any thread

    def pause(self) -> None:
        """Pause after the step that is running; nothing when the run has ended."""
        with self._changed:
            self._pause_asked = self.running

    def resume(self) -> None:
        """Go on with a paused run in the background.

        Raises:
            OptionError: the run has ended, or is not in the background.
        """
        self._need_background("resume")
        with self._changed:
            self._pause_asked, self._steps_asked = False, 0
            self.paused = False  # now, so that a wait() right after this one waits for what comes
            self._changed.notify_all()

    def step(self) -> None:
        """Run one more step of a paused run in the background, and pause again.

        Raises:
            OptionError: the run has ended, or is not in the background.
        """
        self._need_background("step")
        with self._changed:
            self._pause_asked, self._steps_asked = True, self._steps_asked + 1
            self._changed.notify_all()

    def stop(self) -> None:
        """End the run now: the running call is cancelled and its step does not count; nothing when the run has ended."""
        with self._changed:
            if not self.running:
                return
            self._stop_asked, self.paused = True, False
            self._changed.notify_all()
        self._cancel()

    def wait(self, timeout_s: float | None) -> None:
        """Wait until a run in the background has ended or paused.

        Raises:
            TimeoutError: it still runs.
            CallError: a call failed; any other error that ended it is raised as it was.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self.running or (self.paused and not self._steps_asked), timeout_s):
                at = f"step {len(self.record.rows)} of {self.steps}"
                raise TimeoutError(f"the run is at {at} after {timeout_s} s; wait again, or stop() it")
        if self.error is not None:
            raise self.error

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop the run, and wait until it is over; from its own thread only stop it."""
        self.stop()
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def leave(self) -> None:
        """Stop for good because the interpreter ends; nothing is shown any more."""
        exiting.set()
        self.close()

    def _need_background(self, what: str) -> None:
        if not self.background:
            raise OptionError(f"{what}() goes with session.train(..., wait=False); call session.train again to go on")
        if not self.running:
            raise OptionError(f"{what}() was asked of a run that has {self.state}; call session.train again to go on")

    # -- from the loop

    def begin(self, steps: int, background: bool, cancel: Callable[[], None]) -> None:
        """The loop begins; ``cancel`` ends the calls of a running step."""
        self.steps, self.background, self._cancel, self.running = steps, background, cancel, True

    def end(self, error: Exception | None = None, interrupted: bool = False) -> None:
        """The loop is over, by an error or by the user's interrupt where it is not done."""
        with self._changed:
            self.error = None if self.is_stop(error) else error
            self.stopped = self.stopped or (self.error is None and (self._stop_asked or interrupted))
            self.running, self.paused, self.calls.now = False, self.paused and not self.background, {}
            self._changed.notify_all()

    def may_go_on(self) -> bool:
        """Return whether there shall be a next step; in the background a pause waits here."""
        with self._changed:
            while self._pause_asked and self.background and not self._steps_asked and not self._stop_asked:
                self.paused = True  # again, where a pause follows a resume before this thread woke
                self._changed.notify_all()
                self._changed.wait()
            if self.background:
                self.paused = False
            if self._pause_asked and not self.background and self.record.rows:
                self.paused = True
            self._steps_asked = max(0, self._steps_asked - 1)
            return not self._stop_asked and not self.paused

    def is_stop(self, error: Exception | None) -> bool:
        """Whether an error is only what ``stop`` did to the running calls."""
        return self._stop_asked and isinstance(error, CallCancelledError | SessionClosedError)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Between two steps the run's own thread may save."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    @property
    def between_steps(self) -> bool:
        """Whether no step is under way: it has ended, is paused, or saves."""
        return not self.running or self.paused or (self._saving and self.calls.on_own_thread())

    def on_event(self, event: Event) -> None:
        """Take an event of a call of the session."""
        started_here = self.calls.on_event(event)
        if started_here and self._stop_asked:
            self._cancel()  # stop came between two calls of a step


class StepCalls:
    """The calls that the session starts while a step of the run is under way.

    Attributes:
        own: ids of those that the step started; whoever finishes it clears them.
        now: name, progress and start of the call that runs, as far as they are known.
    """

    def __init__(self) -> None:
        self.own: set[int] = set()
        self.now: dict[str, Any] = {}
        self._thread = 0

    def take_thread(self) -> None:
        """The steps are taken on the thread that calls this."""
        self._thread = threading.get_ident()

    def on_own_thread(self) -> bool:
        """Whether the steps are taken on the thread that calls this."""
        return threading.get_ident() == self._thread

    def on_event(self, event: Event) -> bool:
        """Take an event of a call; return whether it is the start of one by the step."""
        if event["type"] in ("call_started", "call_progress"):
            known = self.now if self.now.get("call_id") == event["call_id"] else {"since_s": time.monotonic()}
            progress = {k: event[k] for k in ("call", "done", "total", "unit") if event.get(k) is not None}
            self.now = {**known, **progress, "call_id": event["call_id"]}
        if event["type"] != "call_started":
            return False
        mine = self.on_own_thread()
        if mine:
            self.own.add(event["call_id"])
        return mine

    def of_step(self, trace: Trace) -> Trace:
        """Return a trace with the step's own calls: without those from before it, by hand, and those of others meanwhile."""
        return Trace(tuple(s for s in trace if s.call_id in self.own), trace.title)
