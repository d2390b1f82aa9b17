"""``Run``: what ``session.train`` has done so far; it can be watched, paused and stopped while it goes on."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hfsdk.core.checks import Index, checked
from hfsdk.core.errors import CallCancelledError, OptionError, SessionClosedError
from hfsdk.core.exiting import exiting
from hfsdk.core.pending import Timeout
from hfsdk.core.rows import Row, Rows
from hfsdk.core.trace import KEPT_STEPS, Trace

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd

    from hfsdk.viz.frame import Picture

NUM_SAMPLES = 3
MEASURED = ("seconds", "tokens_per_s", "busy_share", "memory_bytes", "cost")
"""Of a step's row what is measured, and so differs from run to run."""


@dataclass(eq=False)
class Run:
    """What ``session.train`` returns. In a notebook it draws itself, live while it runs: curves, samples, each step's time."""

    rows: Rows = field(default_factory=Rows)
    """One dict of numbers per step; kept in a few bytes per number, however many steps there are."""
    paused: bool = False
    """Whether it stopped between two steps to be gone on with: by ``session.train`` again or, in the background, ``resume()``."""
    stopped: bool = False
    """Whether ``stop`` ended it."""
    last: Any = None
    """The last step, with its batch."""
    steps: int = 0
    """Steps asked for."""
    background: bool = False
    """Whether it runs in a thread of its own (``session.train(..., wait=False)``)."""
    error: Exception | None = None
    """What ended a run in the background."""
    running: bool = False
    """Whether it has not ended; a paused run in the background has not."""

    def __post_init__(self) -> None:
        self._turn = threading.Condition()
        self._pause_asked = self._stop_asked = False
        self._extra = 0
        self._cancel: Callable[[], None] | None = None
        self._thread = 0
        self.runner: threading.Thread | None = None
        """The thread of a run in the background."""
        self._saving = False
        self._own: set[int] = set()
        self._foreign: set[int] = set()
        """Calls that were started meanwhile by the run's step, and by others."""
        self._samples: dict[int, list[Mapping[str, Any]]] = {}
        self._calls: dict[int, list[tuple[str, float, float]]] = {}
        self._trace_steps: dict[int, int] = {}
        self._now: dict[str, Any] = {}
        self._predicted = False
        self._num_devices, self._price_per_device_hour = 0, 0.0

    @property
    def device_hours(self) -> float:
        """Devices of the session times the hours of the run's steps; virtual hours where the session is simulated."""
        seconds = [row.get("seconds") for row in self.rows]
        return self._num_devices * sum(s for s in seconds if isinstance(s, float | int) and math.isfinite(s)) / 3600

    @property
    def cost(self) -> float | None:
        """What these device-hours cost, in the currency of ``price_per_device_hour``; ``None`` where the session has no price."""
        return self.device_hours * self._price_per_device_hour if self._price_per_device_hour else None

    @property
    def history(self) -> pd.DataFrame:
        """One row per step."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    @property
    def state(self) -> str:
        """``"running"``, ``"paused"``, ``"stopped"``, ``"failed"`` or ``"finished"``."""
        if self.error is not None:
            return "failed"
        return "stopped" if self.stopped else "paused" if self.paused else "running" if self.running else "finished"

    # -- control

    def pause(self) -> None:
        """Pause after the step that is running; nothing when the run has ended. May be called from any thread."""
        with self._turn:
            self._pause_asked = self.running

    def resume(self) -> None:
        """Go on with a paused run in the background.

        Raises:
            OptionError: the run has ended, or is not in the background.
        """
        self._need_background("resume")
        with self._turn:
            self._pause_asked, self._extra = False, 0
            self.paused = False  # now, so that a wait() right after this one waits for what comes
            self._turn.notify_all()

    def step(self) -> None:
        """Run one more step of a paused run in the background, and pause again.

        Raises:
            OptionError: the run has ended, or is not in the background.
        """
        self._need_background("step")
        with self._turn:
            self._pause_asked, self._extra = True, self._extra + 1
            self._turn.notify_all()

    def stop(self) -> None:
        """End the run now: the running call is cancelled and its step does not count; nothing when the run has ended.

        May be called from any thread.
        """
        with self._turn:
            if not self.running:
                return
            self._stop_asked, self.paused = True, False
            self._turn.notify_all()
        if self._cancel is not None:
            self._cancel()

    @checked
    def wait(self, timeout_s: Timeout | None = None) -> Run:
        """Wait until a run in the background has ended or paused, and return it.

        Raises:
            TimeoutError: it still runs.
            CallError: a call failed; any other error that ended it is raised as it was.
        """
        with self._turn:
            if not self._turn.wait_for(lambda: not self.running or (self.paused and not self._extra), timeout_s):
                at = f"step {len(self.rows)} of {self.steps}"
                raise TimeoutError(f"the run is at {at} after {timeout_s} s; wait again, or stop() it")
        if self.error is not None:
            raise self.error
        return self

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop the run, and wait until it is over; from its own thread only stop it."""
        self.stop()
        runner = self.runner
        if runner is not None and runner is not threading.current_thread():
            runner.join(timeout_s)

    def leave(self) -> None:
        """Stop for good because the interpreter ends; nothing is shown any more."""
        exiting.set()
        self.close()

    def _need_background(self, what: str) -> None:
        if not self.background:
            raise OptionError(f"{what}() goes with session.train(..., wait=False); call session.train again to go on")
        if not self.running:
            raise OptionError(f"{what}() was asked of a run that has {self.state}; call session.train again to go on")

    # -- for the loop

    def begins(self, steps: int, background: bool, cancel: Callable[[], None]) -> None:
        """The loop begins."""
        self.steps, self.background, self._cancel, self.running = steps, background, cancel, True

    def on_devices(self, num_devices: int, price_per_device_hour: float) -> None:
        """Say how many devices the run holds, and what one costs."""
        self._num_devices, self._price_per_device_hour = num_devices, price_per_device_hour

    def on_this_thread(self) -> None:
        """Say that the loop runs on the thread that calls this."""
        self._thread = threading.get_ident()

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
        return not self.running or self.paused or (self._saving and threading.get_ident() == self._thread)

    def ends(self, error: Exception | None = None, interrupted: bool = False) -> None:
        """The loop is over, by an error or by the user's interrupt where it is not done."""
        with self._turn:
            self.error = None if self.is_stop(error) else error
            self.stopped = self.stopped or (self.error is None and (self._stop_asked or interrupted))
            self.running, self.paused, self._now = False, self.paused and not self.background, {}
            self._turn.notify_all()

    def is_stop(self, error: Exception | None) -> bool:
        """Whether an error is only what ``stop`` did to the running calls."""
        return self._stop_asked and isinstance(error, CallCancelledError | SessionClosedError)

    def may_go_on(self) -> bool:
        """Return whether there shall be a next step; in the background a pause waits here."""
        with self._turn:
            while self._pause_asked and self.background and not self._extra and not self._stop_asked:
                self.paused = True  # again, where a pause follows a resume before this thread woke
                self._turn.notify_all()
                self._turn.wait()
            if self.background:
                self.paused = False
            if self._pause_asked and not self.background and self.rows:
                self.paused = True
            self._extra = max(0, self._extra - 1)
            return not self._stop_asked and not self.paused

    def note(self, row: Row, step: Any, trace: Trace, trace_step: int, samples: list[Mapping[str, Any]]) -> None:
        """Take a finished step: its numbers, where its time went, and a few samples."""
        self.rows.append(row)
        self.last = step
        self._own.clear()
        number = row["step"]
        ended = [(s, s.duration_s) for s in trace.calls if s.duration_s is not None]
        calls = [(f"{s.role}.{s.method or s.name}".lstrip("."), (s.start_ns - trace.start_ns) / 1e9, took) for s, took in ended]
        self._predicted = trace.source == "predicted"
        self._calls[number], self._trace_steps[number], self._samples[number] = calls, trace_step, samples
        for kept in (self._calls, self._trace_steps, self._samples):
            for old in list(kept)[:-KEPT_STEPS]:
                del kept[old]

    @checked
    def samples_of(self, step: Index) -> list[Mapping[str, Any]]:
        """Return the samples kept of a step, while it is one of the newest."""
        return self._samples.get(step, [])

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Take an event of a call, for what is shown of now."""
        if event["type"] in ("call_started", "call_progress"):
            known = self._now if self._now.get("call_id") == event["call_id"] else {"since_s": time.monotonic()}
            found = {k: event[k] for k in ("call", "done", "total", "unit") if event.get(k) is not None}
            self._now = {**known, **found, "call_id": event["call_id"]}
        if event["type"] == "call_started":
            mine = threading.get_ident() == self._thread
            (self._own if mine else self._foreign).add(event["call_id"])
            if mine and self._stop_asked and self._cancel is not None:
                self._cancel()  # stop came between two calls of a step

    @property
    def own_calls(self) -> set[int]:
        """Calls that the running step has started."""
        return self._own

    def of_step(self, trace: Trace) -> Trace:
        """Return a trace without the calls that others started meanwhile."""
        return Trace(tuple(s for s in trace if s.call_id not in self._foreign), trace.title)

    # -- looking

    def view(self) -> dict[str, Any]:
        """Return plain data for display; does not wait."""
        rows = list(self.rows)
        return {
            "state": self.state, "error": "" if self.error is None else f"{type(self.error).__name__}: {self.error}",
            "steps": self.steps, "background": self.background, "asked": self._asked(), "rows": rows,
            "predicted": self._predicted, "device_hours": self.device_hours, "cost": self.cost,
            "now": dict(self._now) if self.running else {},
            "calls": dict(self._calls), "trace_steps": dict(self._trace_steps), "samples": dict(self._samples),
        }  # fmt: skip

    def _asked(self) -> str:
        if not self.running or self.paused:
            return ""
        return "stop" if self._stop_asked else "pause" if self._pause_asked and not self._extra else ""

    def _picture_(self) -> Picture:
        from hfsdk.viz.dashboard.view import DashboardPicture, dashboard_view

        return DashboardPicture(dashboard_view(self.view()))

    def _ipython_display_(self) -> None:
        from hfsdk.viz.hooks import show_run

        show_run(self)

    def __repr__(self) -> str:
        score = f", score {self.rows[-1]['score_mean']:.3f}" if self.rows and "score_mean" in self.rows[-1] else ""
        of = f" of {self.steps}" if self.running else ""
        hours = f", {self.device_hours:.3g} {'predicted ' * self._predicted}device-hours" if self.rows and self._num_devices else ""
        cost = f", cost {self.cost:.4g}" if self.cost is not None and self.rows else ""
        return f"Run({len(self.rows)}{of} steps, {self.state}{score}{hours}{cost})"


class CurrentRun:
    """The last run of a session: what may not happen in the middle of a step asks here.

    Attributes:
        run: ``None`` where nothing was trained yet.
    """

    def __init__(self) -> None:
        self.run: Run | None = None

    def check_between_steps(self, what: str) -> None:
        """Refuse what would take a step half done.

        Raises:
            OptionError: a step of the run is under way.
        """
        if self.run is not None and not self.run.between_steps:
            raise OptionError(
                f"{what}() would take a step of {self.run!r} half done; run.pause() and run.wait() first, or train with save_every"
            )

    def watch(self) -> Run:
        """Return the last run of :meth:`train`; as the last line of a cell it is drawn, live while it goes on.

        Raises:
            OptionError: nothing was trained in this session yet.
        """
        if self.run is None:
            raise OptionError("there is no run to watch; session.train(hf.PPO(), prompts, steps=50, wait=False) starts one")
        return self.run


def resources(trace: Trace, seconds: float, num_devices: int, price_per_second: float) -> dict[str, float]:
    """Return what a step took of the devices: tokens_per_s, busy_share, memory_bytes of the fullest device, cost.

    Tokens are those generated; busy is the mean over the ``num_devices`` that have a role, those that ran nothing included.
    Numbers that nothing measured are left out.
    """
    found: dict[str, float] = {}
    made = [float(s.attrs["tokens"]) for s in trace.calls if s.phase == "generation" and "tokens" in s.attrs]
    if made and seconds > 0:
        found["tokens_per_s"] = sum(made) / seconds
    total, idle = trace.device_seconds()
    if total and num_devices:
        found["busy_share"] = (total - idle) / (num_devices * trace.duration_s)
    for gauge in ("allocated_bytes", "rss_bytes"):  # of the GPU where there is one
        used = [float(s.attrs[gauge]) for s in trace if gauge in s.attrs]
        if used:
            break
    if used:
        found["memory_bytes"] = max(used)
    if price_per_second > 0:
        found["cost"] = price_per_second * seconds
    return found
