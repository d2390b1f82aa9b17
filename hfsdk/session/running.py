"""``Run``: what ``session.train`` has done so far; it can be watched, paused and stopped while it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from hfsdk.core.checks import Index, checked
from hfsdk.core.completion import Computed
from hfsdk.core.errors import OptionError
from hfsdk.core.first_bad import FirstBad
from hfsdk.core.guided import RUN, Guided
from hfsdk.core.pending import Timeout
from hfsdk.core.rows import Rows
from hfsdk.core.snapshot import Snapshot
from hfsdk.session.best_checkpoint import BestCheckpoint
from hfsdk.session.compared_runs import ComparedRuns
from hfsdk.session.progress import main_numbers
from hfsdk.session.run_control import RunControl
from hfsdk.session.run_record import Resized, Restored

if TYPE_CHECKING:
    import pandas as pd

    from hfsdk.viz.frame import Picture


class Run(Guided):
    """What ``session.train`` returns. In a notebook it draws itself, live while it runs: curves, samples, each step's time.

    Attributes:
        state: ``"running"``, ``"paused"``, ``"stopped"``, ``"failed"`` or ``"finished"``.
        rows: one dict of numbers per step; ``history`` is the same as a table.
        last: the last step, with its batch.
        steps: steps asked for.
        device_hours: devices of the session times the hours of the run's steps.
        cost: what these cost; ``None`` where the session has no price.
        best: the best checkpoint so far, where ``keep_best`` was given.
        warnings: what the numbers say is wrong, with what to do.
        restores: the workers' deaths that it went on after (``session.train(..., on_death="restore")``).
        resized: when it went on over fewer devices (``session.train(..., shrink=True)``), and over all of them again.
        background: whether it runs in a thread of its own (``session.train(..., wait=False)``).
        error: what ended a run in the background.
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
        """What ended a run in the background."""
        return self._control.error

    # -- what it has done

    @property
    def steps(self) -> int:
        """Steps asked for."""
        return self._control.steps

    @property
    def rows(self) -> Rows:
        """One dict of numbers per step; kept in a few bytes per number, however many steps there are."""
        return self._control.record.rows

    @Computed
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
        """What the numbers say is wrong, each with its step and what to do; said once per run."""
        return list(self._control.record.warnings)

    @property
    def restores(self) -> list[Restored]:
        """The workers' deaths that it went on after: step, step it went back to, seconds, error."""
        return list(self._control.record.restores)

    @property
    def resized(self) -> list[Resized]:
        """When it went on over fewer devices because a node had left (``shrink=True``), and over more again."""
        return list(self._control.record.resized)

    @property
    def device_hours(self) -> float:
        """Devices of the session times the hours of the run's steps; virtual hours where the session is simulated."""
        return self._control.record.device_hours

    @property
    def cost(self) -> float | None:
        """What these device-hours cost, in the currency of ``price_per_device_hour``; ``None`` where the session has no price."""
        return self._control.record.cost

    @checked
    def samples_of(self, step: Index) -> list[Mapping[str, Any]]:
        """Return the samples kept of a step, while it is one of the newest."""
        return self._control.record.samples.get(step, [])

    # -- the first bad number

    @property
    def algorithm(self) -> Any:
        """What it trains by; ``None`` where that is in another process."""
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
            "restores": [str(one) for one in (*record.restores, *record.resized)],
            "predicted": record.predicted, "device_hours": self.device_hours, "cost": self.cost,
            "now": dict(control.calls.now) if self.running and not self.paused else {},
            "calls": dict(record.calls), "trace_steps": dict(record.trace_steps), "samples": dict(record.samples),
        }  # fmt: skip

    def _picture_(self) -> Picture:
        from hfsdk.viz.dashboard.view import DashboardPicture, dashboard_view

        return DashboardPicture(dashboard_view(self.view()))

    def _ipython_display_(self) -> None:
        from hfsdk.viz.hooks import show_run

        show_run(self)

    def __repr__(self) -> str:
        record = self._control.record
        known = main_numbers(self.rows[-1]) if self.rows else {}
        words = {"score_mean": "score", "actor_loss": "loss", "accuracy": "accuracy"}
        score = "".join(f", {words[name]} {number:.3f}" for name, number in known.items() if name in words)
        of = f" of {self.steps}" if self.running else ""
        hours = (
            f", {self.device_hours:.3g} {'predicted ' * record.predicted}device-hours" if self.rows and record.num_devices else ""
        )
        cost = f", cost {self.cost:.4g}" if self.cost is not None and self.rows else ""
        found = self.best
        when = "" if found is None else f"after step {found.step}" if found.step >= 0 else "before the first step"
        best = f", best held-out score {found.score:.3f} {when}" if found is not None else ""
        warned = f", {len(self.warnings)} warning{'s' * (len(self.warnings) > 1)}" if self.warnings else ""
        restored = f", went on after {len(record.restores)} death{'s' * (len(record.restores) > 1)}" if record.restores else ""
        return f"Run({len(self.rows)}{of} steps, {self.state}{score}{best}{warned}{restored}{hours}{cost})"


class Elsewhere(Protocol):
    """Trains in another process."""

    def train(self, wanted: Any, shown: bool) -> Run:
        """Train as is wanted; ``shown``: with progress."""
        ...


class CurrentRun:
    """The last run of a session: what may not happen in the middle of a step asks here.

    Attributes:
        run: the last one; ``None`` where nothing was trained yet.
        compared: the finished runs of the last ``compare``.
        number: how many runs there were.
        elsewhere: who trains, where runs go on beside the controller, in another process; ``None``: this one.
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
        """Whether the run, perhaps in its last step, was asked to pause or to stop."""
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
        """Return the last run of :meth:`train`; as the last line of a cell it is drawn, live while it goes on.

        Raises:
            OptionError: nothing was trained in this session yet.
        """
        if self.run is None:
            raise OptionError("there is no run to watch; session.train(hf.PPO(), prompts, steps=50, wait=False) starts one")
        return self.run

    def close(self) -> None:
        """Stop the run where one goes on, and wait until it is over."""
        if self.run is not None:
            self.run._control.close()
