"""``Run``: the progress of ``session.train``; it can be watched, paused and stopped while it goes on."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hfsdk.core.call_events import Event
from hfsdk.core.checks import Index, checked
from hfsdk.core.errors import CallCancelledError, OptionError, SessionClosedError
from hfsdk.core.first_bad import FirstBad
from hfsdk.core.hints import RUN, AttributeHints, CompletableProperty
from hfsdk.core.pending import Timeout
from hfsdk.core.rows import Row, Rows
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.system import exiting
from hfsdk.core.trace import KEPT_STEPS, Trace
from hfsdk.session.context import BestCheckpoint
from hfsdk.session.streams import whole_text_of

if TYPE_CHECKING:
    import pandas as pd

    from hfsdk.viz.frame import Picture


class Run(AttributeHints):
    """A training run, as ``session.train`` returns it. In a notebook it draws itself, live: curves, samples, each step's time.

    Attributes:
        state: ``"running"``, ``"paused"``, ``"stopped"``, ``"failed"`` or ``"finished"``.
        rows: one dict of numbers per step; ``history`` is the same as a table.
        last: the last step, with its batch.
        steps: steps asked for.
        device_hours: devices of the session times the hours of the run's steps.
        cost: the price of these device-hours; ``None`` where the session has no price.
        best: the best checkpoint so far, where ``keep_best`` was given.
        warnings: the warnings about the run's numbers, each with what to do.
        restores: the workers' deaths that it went on after (``session.train(..., on_death="restore")``).
        resized: when it went on over fewer devices (``session.train(..., shrink=True)``), and over all of them again.
        background: whether it runs in a thread of its own (``session.train(..., wait=False)``).
        error: the exception that ended a run in the background.
        algorithm, prompts: what it trains by and from.
        last_good: the newest snapshot of the run's own before its first bad number.
    """

    _elsewhere = RUN

    def __init__(self, control: RunControl | None = None) -> None:
        self._control = RunControl() if control is None else control

    @property
    def state(self) -> str:
        """``"running"``, ``"paused"``, ``"stopped"``, ``"failed"`` or ``"finished"``."""
        return self._control.state

    @property
    def running(self) -> bool:
        """Whether it has not ended; a paused run in the background has not."""
        return self._control.running

    @property
    def paused(self) -> bool:
        """Whether it stopped between two steps, to be gone on with by ``session.train`` or, in the background, ``resume()``."""
        return self._control.paused

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` ended it."""
        return self._control.stopped

    @property
    def background(self) -> bool:
        """Whether it runs in a thread of its own (``session.train(..., wait=False)``)."""
        return self._control.background

    @property
    def kept_as(self) -> str:
        """The name of its session where that is kept, and the run goes on without this process; else ``""``."""
        return self._control.kept_as

    @property
    def error(self) -> Exception | None:
        """The exception that ended a run in the background."""
        return self._control.error

    # -- what it has done

    @property
    def steps(self) -> int:
        """The number of steps to take."""
        return self._control.steps

    @property
    def rows(self) -> Rows:
        """One dict of numbers per step; kept in a few bytes per number, however many steps there are."""
        return self._control.record.rows

    @CompletableProperty
    def last(self) -> Any:
        """The last step, with its batch."""
        return self._control.last()

    @property
    def history(self) -> pd.DataFrame:
        """One row per step."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    @property
    def best(self) -> BestCheckpoint | None:
        """The best checkpoint so far: score, step, folder; ``None`` unless ``keep_best`` was given."""
        return self._control.record.best

    @property
    def warnings(self) -> list[str]:
        """The warnings about the run's numbers, each with its step and what to do; said once per run."""
        return list(self._control.record.warnings)

    @property
    def restores(self) -> list[Restored]:
        """The workers' deaths that it went on after: step, step it went back to, seconds, error."""
        return list(self._control.record.restores)

    @property
    def resized(self) -> list[Resized]:
        """The times that it went on over fewer devices because a node had left (``shrink=True``), and over more again."""
        return list(self._control.record.resized)

    @property
    def device_hours(self) -> float:
        """Devices of the session times the hours of the run's steps; virtual hours where the session is simulated."""
        return self._control.record.device_hours

    @property
    def cost(self) -> float | None:
        """The price of these device-hours, in the unit of ``price_per_device_hour``; ``None`` where the session has no price."""
        return self._control.record.cost

    @checked
    def samples_of(self, step: Index) -> list[Mapping[str, Any]]:
        """Return the samples kept of a step, while it is one of the newest."""
        return self._control.record.samples.get(step, [])

    # -- the first bad number

    @property
    def algorithm(self) -> Any:
        """The algorithm that it trains by; ``None`` where that is in another process."""
        return None if self._control.search is None else self._control.search.algorithm

    @property
    def prompts(self) -> Any:
        """The stream that its steps take from; ``None`` where that is in another process."""
        return None if self._control.search is None else self._control.search.prompts

    @property
    def last_good(self) -> Snapshot | None:
        """The newest snapshot that the run has taken of itself before its first bad number, for ``session.rewind(...)``."""
        return None if self._control.search is None else self._control.search.last_good()

    @checked
    def first_bad(self, step: Index | None = None, *, stay: bool = False) -> FirstBad | None:
        """Find where the run's first bad number comes from: step, call, mini-batch, sample, token, weight, ranks and layer.

        A step is bad when it failed; when its loss, gradient's norm, KL or ratio is not finite; or when one of these or a score
        jumps: it is more than 10 times the largest of the 32 steps before (100 times for scores; all count as at least 1), and
        more than 10 median absolute deviations from their median, of at least 3 steps. The steps from a snapshot of the run's own
        (``session.train(look_back=...)``) are done again, bit for bit, and the first number that is bad is looked for in the
        columns, the weights, then the mini-batches, samples and tokens of the updates. That takes about as long as these steps.

        Args:
            step: the step to look at, in place of the first bad one.
            stay: leave the session at the snapshot, on a new branch, rather than where it was; no copy of that is taken then.

        Returns:
            What was found; ``None`` where the run has no bad number.

        Raises:
            OptionError: the run has no such step, no snapshot from before it, goes on in another process, or is simulated; or a
                step of a run is under way.
            CallError: a call fails that did not in the run, e.g. as a worker has died.
        """
        if self._control.search is None:
            why = (
                f"the run goes on beside the controller of {self.kept_as!r}, which keeps no snapshots of it "
                "for a kernel to search; train in a session without keep=True to look for it" if self.kept_as
                else "it is simulated, or has not begun: there are no numbers"
            )  # fmt: skip
            raise OptionError(f"first_bad() cannot do the steps of {self!r} again: {why}")
        return self._control.search.find(step, stay=stay)

    # -- control

    def pause(self) -> None:
        """Pause after the step that is running; nothing when the run has ended. May be called from any thread."""
        self._control.pause()

    def resume(self) -> None:
        """Go on with a paused run in the background.

        Raises:
            OptionError: the run has ended, or is not in the background.
        """
        self._control.resume()

    def step(self) -> None:
        """Run one more step of a paused run in the background, and pause again.

        Raises:
            OptionError: the run has ended, or is not in the background.
        """
        self._control.step()

    def stop(self) -> None:
        """End the run now: the running call is cancelled and its step does not count; nothing when the run has ended.

        May be called from any thread.
        """
        self._control.stop()

    @checked
    def wait(self, timeout_s: Timeout | None = None) -> Run:
        """Wait until a run in the background has ended or paused, and return it.

        Args:
            timeout_s: most seconds to wait; ``None`` is without end.

        Raises:
            TimeoutError: it still runs.
            CallError: a call failed; any other error that ended it is raised as it was.
        """
        self._control.wait(timeout_s)
        return self

    # -- looking

    def view(self) -> dict[str, Any]:
        """Return plain data for display; does not wait."""
        control, record = self._control, self._control.record
        return {
            "state": self.state, "error": "" if self.error is None else f"{type(self.error).__name__}: {self.error}",
            "steps": self.steps, "background": self.background, "asked": control.request, "rows": list(self.rows),
            "saved": record.saved, "warnings": self.warnings,
            "restores": [str(event) for event in (*record.restores, *record.resized)],
            "predicted": record.predicted, "device_hours": self.device_hours, "cost": self.cost,
            "now": dict(control.calls.now) if self.running and not self.paused else {},
            "calls": dict(record.calls), "trace_steps": dict(record.trace_steps), "samples": dict(record.samples),
        }  # fmt: skip

    def _picture_(self) -> Picture:
        from hfsdk.viz.pictures.dashboard import DashboardPicture, dashboard_view

        return DashboardPicture(dashboard_view(self.view()))

    def _ipython_display_(self) -> None:
        from hfsdk.viz.hooks import show_run

        show_run(self)

    def __repr__(self) -> str:
        record = self._control.record
        numbers = main_numbers(self.rows[-1]) if self.rows else {}
        words = {"score_mean": "score", "actor_loss": "loss", "accuracy": "accuracy"}
        score = "".join(f", {words[name]} {number:.3f}" for name, number in numbers.items() if name in words)
        of = f" of {self.steps}" if self.running else ""
        hours = (
            f", {self.device_hours:.3g} {'predicted ' * record.predicted}device-hours" if self.rows and record.num_devices else ""
        )
        cost = f", cost {self.cost:.4g}" if self.cost is not None and self.rows else ""
        checkpoint = self.best
        when = "" if checkpoint is None else f"after step {checkpoint.step}" if checkpoint.step >= 0 else "before the first step"
        best = f", best held-out score {checkpoint.score:.3f} {when}" if checkpoint is not None else ""
        warned = f", {len(self.warnings)} warning{'s' * (len(self.warnings) > 1)}" if self.warnings else ""
        restored = f", went on after {len(record.restores)} death{'s' * (len(record.restores) > 1)}" if record.restores else ""
        return f"Run({len(self.rows)}{of} steps, {self.state}{score}{best}{warned}{restored}{hours}{cost})"


class Elsewhere(Protocol):
    """Trains in another process."""

    def train(self, config: Any, shown: bool) -> Run:
        """Train as the config says; ``shown``: with progress."""
        ...


class CurrentRun:
    """The last run of a session: what may not happen in the middle of a step asks here.

    Attributes:
        run: the last one; ``None`` where nothing was trained yet.
        compared: the finished runs of the last ``compare``.
        number: how many runs there were.
        elsewhere: the process that trains, where runs go on beside the controller, in another process; ``None``: this one.
    """

    def __init__(self) -> None:
        self._run: Run | None = None
        self.number = 0
        self.elsewhere: Elsewhere | None = None
        self.compared = ComparedRuns()

    @property
    def run(self) -> Run | None:
        """The last run; ``None`` where nothing was trained yet."""
        return self._run

    @run.setter
    def run(self, run: Run | None) -> None:
        self._run = run
        self.number += 1

    @property
    def goes_on(self) -> bool:
        """Whether the run is under way, and not paused."""
        return self.run is not None and not self.run._control.between_steps

    @property
    def pause_asked(self) -> bool:
        """Whether the run, perhaps in its last step, has a request to pause or to stop."""
        return self.run is not None and self.run._control.end_asked

    def check_between_steps(self, what: str) -> None:
        """Refuse what would take a step half done.

        Raises:
            OptionError: a step of the run is under way.
        """
        if self.run is not None and not self.run._control.between_steps:
            raise OptionError(
                f"{what}() would take a step of {self.run!r} half done; run.pause() and run.wait() first, or train with save_every"
            )

    def watch(self) -> Run:
        """Carry out ``session.watch``; its text says what the arguments are."""
        if self.run is None:
            raise OptionError("there is no run to watch; session.train(hf.PPO(), prompts, steps=50, wait=False) starts one")
        return self.run

    def close(self) -> None:
        """Stop the run where one goes on, and wait until it is over."""
        if self.run is not None:
            self.run._control.close()


# -- progress in a terminal

SCORED, LEARNED = ("score_mean", "kl_mean"), ("actor_loss", "accuracy", "margin")
"""A step's main numbers: of what it scored, or of an algorithm that scores nothing, as DPO."""


def main_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's main numbers, by name."""
    return {name: row[name] for name in (SCORED if SCORED[0] in row else LEARNED) if name in row}


class Bar:
    """A progress bar with the last row's main numbers, or nothing."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def show(self, row: Mapping[str, Any]) -> None:
        """Advance by one step."""
        shown = main_numbers(row) | ({"seconds": row["seconds"]} if "seconds" in row else {})
        if self._bar is not None:
            self._bar.set_postfix({name: f"{number:.3f}" for name, number in shown.items()}, refresh=False)
            self._bar.update(1)

    def back_to(self, done: int) -> None:
        """Go back to so many steps."""
        if self._bar is not None:
            self._bar.n = done
            self._bar.refresh()


@contextmanager
def progress_bar(steps: int, shown: bool) -> Iterator[Bar]:
    """Show a bar in the terminal, or nothing."""
    if not shown:
        yield Bar(None)
        return
    from tqdm.std import tqdm  # plain text: it stays in a saved notebook as it was

    with tqdm(total=steps, desc="train", unit="step", file=sys.stdout, leave=True) as bar:
        yield Bar(bar)


# -- what finished steps leave

NUM_SAMPLES = 3
MEASURED = ("seconds", "tokens_per_s", "busy_share", "memory_bytes", "cost")
"""The numbers of a step's row that are measured, and so differ from run to run."""

CallTime = tuple[str, float, float]
"""A call's name, its start within the step in seconds, and its seconds."""


@dataclass(frozen=True)
class Restored:
    """A worker's death that a run went on after."""

    step: int
    """The step in which, or after which, the run heard of it."""
    back_to: int
    """The step after whose save the run went on; one less than its first where that was its start."""
    seconds: float
    """The seconds from the error until everything was as it was saved; the workers' start included."""
    error: str
    """The death, in a line."""

    def __str__(self) -> str:
        return (
            f"a worker died in step {self.step}, and the run goes on from its save after step {self.back_to}, "
            f"{self.seconds:.1f} s later: {self.error}"
        )


@dataclass(frozen=True)
class Resized:
    """Nodes left the cluster or came back, and a run went on over other devices."""

    step: int
    """The step after which it did."""
    num_devices: int
    """The number of devices that it goes on over."""
    of_devices: int
    """The number of devices of the whole cluster."""
    seconds: float
    """The seconds until the roles were there."""
    why: str
    """A sentence about the nodes that left or came back."""

    def __str__(self) -> str:
        over = f"{self.num_devices} of {self.of_devices}" if self.num_devices < self.of_devices else f"all {self.of_devices}"
        return f"{self.why}: after step {self.step} the run goes on over {over} devices ({self.seconds:.1f} s)"


@dataclass(eq=False)
class RunRecord:
    """The finished steps of a run. Calls and samples are kept of the newest steps alone."""

    rows: Rows = field(default_factory=Rows)
    """One dict of numbers per step."""
    last: Any = None
    """The last step, with its batch."""
    num_devices: int = 0
    """Devices that the run holds."""
    price_per_device_hour: float = 0.0
    """The price in any currency; 0 where it is not known."""
    predicted: bool = False
    """Whether the seconds are those of a virtual clock."""
    saved: dict[str, Any] | None = None
    """The last save of ``save_every``: its ``folder``, and the ``step`` after which it was written."""
    calls: dict[int, list[CallTime]] = field(default_factory=dict)
    """The calls of each step."""
    trace_steps: dict[int, int] = field(default_factory=dict)
    """A step's number in the run -> its number in ``session.trace``."""
    samples: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    """The samples of each step."""
    warnings: list[str] = field(default_factory=list)
    """The warnings about its numbers (:mod:`hfsdk.run.health`), each with its step."""
    best: BestCheckpoint | None = None
    """The best checkpoint so far, of a run that keeps it."""
    restores: list[Restored] = field(default_factory=list)
    """The deaths that it went on after."""
    failed_step: int | None = None
    """The step in which the run ended by an error."""
    resized: list[Resized] = field(default_factory=list)
    """The times that it went on over fewer devices, and over all of them again."""

    @property
    def device_hours(self) -> float:
        """Devices times the hours of the steps."""
        seconds = [row.get("seconds") for row in self.rows]
        return self.num_devices * sum(s for s in seconds if isinstance(s, float | int) and math.isfinite(s)) / 3600

    @property
    def cost(self) -> float | None:
        """The price of these device-hours; ``None`` where the session has none."""
        return self.device_hours * self.price_per_device_hour if self.price_per_device_hour else None

    def add(self, row: Row, step: Any, trace: Trace, trace_step: int, samples: list[Mapping[str, Any]]) -> None:
        """Take a finished step: its numbers, where its time went, and a few samples."""
        self.rows.append(row)
        self.last = step
        number = row["step"]
        ended = [(s, s.duration_s) for s in trace.calls if s.duration_s is not None]
        calls = [(f"{s.role}.{s.method or s.name}".lstrip("."), (s.start_ns - trace.start_ns) / 1e9, took) for s, took in ended]
        self.predicted = trace.source == "predicted"
        self.calls[number], self.trace_steps[number], self.samples[number] = calls, trace_step, samples
        for by_step in (self.calls, self.trace_steps, self.samples):
            for old in list(by_step)[:-KEPT_STEPS]:
                del by_step[old]

    def cut_after(self, step: int) -> None:
        """Leave of the run what was until a step."""
        self.rows = Rows(row for row in self.rows if row["step"] <= step)
        for by_step in (self.calls, self.trace_steps, self.samples):
            for late in [number for number in by_step if number > step]:
                del by_step[late]


def resources(trace: Trace, seconds: float, num_devices: int, price_per_second: float) -> dict[str, float]:
    """Return a step's use of the devices: tokens_per_s, busy_share, memory_bytes of the fullest device, cost.

    Tokens are those generated; busy is the mean over the ``num_devices`` that have a role, those that ran nothing included.
    Numbers that nothing measured are left out.
    """
    usage: dict[str, float] = {}
    made = [float(s.attrs["tokens"]) for s in trace.calls if s.phase == "generation" and "tokens" in s.attrs]
    if made and seconds > 0:
        usage["tokens_per_s"] = sum(made) / seconds
    total, idle = trace.device_seconds()
    if total and num_devices:
        usage["busy_share"] = (total - idle) / (num_devices * trace.duration_s)
    for gauge in ("allocated_bytes", "rss_bytes"):  # of the GPU where there is one
        used = [float(s.attrs[gauge]) for s in trace if gauge in s.attrs]
        if used:
            break
    if used:
        usage["memory_bytes"] = max(used)
    if price_per_second > 0:
        usage["cost"] = price_per_second * seconds
    return usage


# -- whether a run goes on


class FindsFirstBad(Protocol):
    """Finds a run's first bad number."""

    @property
    def algorithm(self) -> Any:
        """The algorithm that the run trains with."""
        ...

    @property
    def prompts(self) -> Any:
        """The stream that it takes from."""
        ...

    def find(self, step: int | None, *, stay: bool) -> FirstBad | None:
        """Find it."""
        ...

    def last_good(self) -> Snapshot | None:
        """Return the snapshot that this goes back to."""
        ...


@dataclass(eq=False)
class RunControl:
    """The state of a run, and the requests to its loop; :class:`~hfsdk.run.run.Run` shows it to the user.

    The loop calls ``begin``, then before each step ``may_go_on``, and ``end``. The others may be called from any thread.
    """

    record: RunRecord = field(default_factory=RunRecord)
    """The steps that have finished."""
    steps: int = 0
    """The number of steps to take."""
    background: bool = False
    """Whether it runs in a thread of its own."""
    running: bool = False
    """Whether it has not ended; a paused run in the background has not."""
    paused: bool = False
    """Whether it stopped between two steps to be gone on with."""
    stopped: bool = False
    """Whether ``stop`` ended it."""
    error: Exception | None = None
    """The exception that ended it in the background."""
    thread: threading.Thread | None = None
    """The thread of a run in the background."""
    kept_as: str = ""
    """The name of its session where that is kept."""
    search: FindsFirstBad | None = None
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
        """The requests: whether to pause, whether to stop, and the single steps that are to come."""
        return self._pause_asked, self._stop_asked, self._steps_asked

    @property
    def end_asked(self) -> bool:
        """Whether there is a request to pause or to stop, whether or not the run has got to it."""
        return self._pause_asked or self._stop_asked

    @property
    def request(self) -> str:
        """The request to the running step that has not been met yet: ``"pause"``, ``"stop"`` or nothing."""
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
        """Let the run's own thread save, between two steps."""
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
            current = self.now if self.now.get("call_id") == event["call_id"] else {"since_s": time.monotonic()}
            progress = {k: event[k] for k in ("call", "done", "total", "unit") if event.get(k) is not None}
            self.now = {**current, **progress, "call_id": event["call_id"]}
        if event["type"] != "call_started":
            return False
        own = self.on_own_thread()
        if own:
            self.own.add(event["call_id"])
        return own

    def of_step(self, trace: Trace) -> Trace:
        """Return a trace with the step's own calls: without those from before it, by hand, and those of others meanwhile."""
        return Trace(tuple(s for s in trace if s.call_id in self.own), trace.title)


# -- the runs that ``compare`` keeps


@dataclass(frozen=True)
class ComparedRun:
    """One algorithm with one seed, all its steps done."""

    algorithm: type
    options: str
    """The algorithm's options as they were when it ran: :func:`options_of`."""
    seed: int
    steps: int
    rows: Sequence[Row]
    """The steps' rows as the experiment has them."""
    branch: str

    def answers(self, algorithm: Any, seed: int, steps: int) -> bool:
        """Return whether this run has this algorithm, seed and number of steps."""
        same = self.algorithm is type(algorithm) and self.options == options_of(algorithm)
        return same and (self.seed, self.steps) == (seed, steps)


def options_of(algorithm: Any) -> str:
    """Return a text that is the same for algorithms of one class with equal options, those that it does not show included."""
    own = getattr(algorithm, "__dict__", {})
    return f"{algorithm!r}{[(name, whole_text_of(value)) for name, value in sorted(own.items())]}"


@dataclass(eq=False)
class ComparedRuns:
    """The finished runs of the session's last ``compare``, which ``resume=True`` takes instead of running them again.

    A run is taken where the algorithm has equal options (and is of the same class, not of one defined anew), the seed and the
    number of steps are equal, and it began at the same point: branch, counters and updates, roles as declared, place in the
    prompts.
    """

    start: Hashable = None
    """The point at which they began; any value that tells two points apart."""
    finished: list[ComparedRun] = field(default_factory=list)

    def begin(self, start: Hashable, resume: bool) -> bool:
        """Begin a comparison at a point; return whether ``resume`` finds runs that began elsewhere, and so are dropped."""
        missed = resume and bool(self.finished) and start != self.start
        if not resume or start != self.start:
            self.start, self.finished = start, []
        return missed

    def find(self, algorithm: Any, seed: int, steps: int) -> ComparedRun | None:
        """Return a finished run, ``None`` where it has to be run."""
        return next((run for run in self.finished if run.answers(algorithm, seed, steps)), None)
