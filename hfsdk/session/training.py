"""``train``: the loop around an algorithm's step. Progress, metrics, early stop, checkpoints, and pausing by interrupt."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from hfsdk import upward
from hfsdk.algorithms.step import ALREADY_TOLD
from hfsdk.batch import Batch
from hfsdk.checks import is_whole
from hfsdk.engine import messages as m
from hfsdk.errors import OptionError, SimulatedValueError
from hfsdk.session.lines import calls_of, user_line
from hfsdk.session.running import NUM_SAMPLES, Row, Run, resources
from hfsdk.session.streams import RowStream
from hfsdk.session.tracking import Tracker, Tracking, start, trackers

if TYPE_CHECKING:
    from hfsdk.session.session import Session

Metric = Callable[[Batch], Mapping[str, float] | float]

class Algorithm(Protocol):
    """What ``train`` runs; see ``hfsdk.algorithms``."""

    def step(self, models: Any, prompts: Batch) -> Any:
        """Run one step; return something with the ``batch`` and what ``metrics`` needs."""
        ...

    def metrics(self, step: Any) -> Mapping[str, float]:
        """Return the numbers of a step; waits."""
        ...


class Watcher(Protocol):
    """Shows a run while it goes on; ``hfsdk`` puts the notebook's dashboard into ``ON_TRAIN``."""

    def ended(self) -> None:
        """The run has ended: show it as it stays."""
        ...


ON_TRAIN: list[Callable[[Run], Watcher | None]] = []
"""Called with every run at its start; where one answers, no text bar is drawn."""


def train(
    session: Session,
    algorithm: Algorithm,
    prompts: RowStream,
    *,
    steps: int,
    metrics: Sequence[Metric],
    stop: Callable[[Row], bool] | None,
    save_every: int,
    folder: str | Path | None,
    resume: str | Path | None,
    track: str | Tracker | Sequence[str | Tracker],
    progress: bool | None,
    wait: bool,
) -> Run:
    """See ``Session.train``."""
    _check_options(algorithm, prompts, steps, metrics, stop, save_every, folder)
    chosen = trackers(track)
    if not isinstance(wait, bool):
        raise OptionError(f"wait is True or False; got {wait!r}")
    if session.run is not None and session.run.running:
        raise OptionError(f"{session.run!r} is still under way; session.run.stop() ends it, session.run.wait() waits for it")
    if resume is not None:
        session.load(resume)
    tracking = start(session, algorithm, prompts, steps, chosen)
    run = session.run = Run()
    run.begins(steps, not wait, lambda: _stop_calls(session, run))
    run.on_devices(session.cluster.num_devices, session.cluster.price_per_device_hour)
    saving = (save_every, folder) if save_every and folder is not None else (0, "")
    loop = _Loop(session, algorithm, prompts, metrics, stop, saving, run, tracking)
    shown = wants_progress() if progress is None else progress
    unsubscribe = session.subscribe(run.on_event)
    watchers = [w for w in (make(run) for make in ON_TRAIN) if w is not None] if shown else []
    if wait:
        _attend(loop, shown and not watchers, watchers, unsubscribe)
    else:
        work = (loop, user_line(), watchers, unsubscribe)
        run.runner = threading.Thread(target=_in_background, args=work, name="hfsdk-train", daemon=True)
        atexit.register(run.leave)  # a thread that computes while the interpreter ends would take it down
        run.runner.start()
    return run


def _in_background(loop: _Loop, line: str, watchers: Sequence[Watcher], unsubscribe: Callable[[], None]) -> None:
    with suppress(Exception), calls_of(line):  # the run keeps what failed, and run.wait() raises it
        _attend(loop, False, watchers, unsubscribe)
    if not upward.exiting.is_set():
        atexit.unregister(loop.run.leave)


def _attend(loop: _Loop, bar: bool, watchers: Sequence[Watcher], unsubscribe: Callable[[], None]) -> None:
    """Run the loop to its end; whatever happens, who watches is told that it is over."""
    failed: Exception | None = None
    done = False
    loop.run.on_this_thread()
    told = ALREADY_TOLD.set(set())
    try:
        with _pausing(loop.run.pause) as interrupts, progress_bar(loop.run.steps, bar) as drawn:
            loop.go(interrupts, drawn)
        done = True
    except Exception as error:
        failed = error
        if not loop.run.is_stop(error):
            raise
    finally:
        ALREADY_TOLD.reset(told)
        unsubscribe()
        try:
            loop.tracking.close(_how(loop.run, failed))
        finally:
            loop.run.ends(failed, interrupted=not done and failed is None)
            for watcher in watchers:
                watcher.ended()


def _how(run: Run, failed: Exception | None) -> str:
    """Return how a run that is about to end has ended."""
    if failed is not None and not run.is_stop(failed):
        return "failed"
    return "finished" if len(run.rows) == run.steps else "paused" if run.paused else "stopped"


@dataclass(frozen=True)
class _Loop:
    session: Session
    algorithm: Algorithm
    prompts: RowStream
    metrics: Sequence[Metric]
    stop: Callable[[Row], bool] | None
    saving: tuple[int, str | Path]
    run: Run
    tracking: Tracking

    def go(self, interrupts: _Interrupts, bar: _Bar) -> None:
        session, run, (every, folder) = self.session, self.run, self.saving
        while len(run.rows) < run.steps and run.may_go_on():
            row = _one_step(session, self.algorithm, self.prompts, self.metrics, run)
            bar.show(row)
            self.tracking.step(row, run.samples_of(row["step"]))
            if every and row["step"] % every == every - 1:
                with run.saving():
                    session.save(folder)
            if self.stop is not None and self.stop(row):
                run.stopped = True
                break
            if interrupts.count and len(run.rows) < run.steps:
                run.paused = True
                session.notice(f"paused after step {row['step']}; call session.train again to go on")
                break


def _one_step(session: Session, algorithm: Algorithm, prompts: RowStream, metrics: Sequence[Metric], run: Run) -> Row:
    """Run one step and record its row; a step that does not finish is cancelled and gives its prompts back."""
    places, counts = [(stream, stream.position) for stream in _streams_of(algorithm, prompts)], session.counts()
    started, finished = time.perf_counter(), False
    session.client.send(m.NextStep())
    try:
        step = algorithm.step(session.models, next(prompts))
        if step is None:
            raise OptionError(f"{type(algorithm).__name__}.step returned nothing; return what its metrics() reads, e.g. a Step")
        row: Row = {"step": session.next_count("steps")}
        try:
            row |= algorithm.metrics(step)
            for metric in metrics:
                row |= _own_metric(metric, step.batch)
        except SimulatedValueError:
            session.client.wait(session.client.open_calls(), None)  # shapes and times only: no metrics to show
        trace = run.of_step(session.trace.snapshot())
        row["seconds"] = trace.duration_s if session.simulated_time else time.perf_counter() - started
        cluster = session.cluster
        placement = session.placement.placement
        used = {device for pool in (placement.pools if placement else ()) for device in pool.devices}
        row |= resources(trace, row["seconds"], len(used), cluster.price_per_device_hour * len(cluster.devices) / 3600)
        finished = True
    finally:
        if not finished:
            for stream, position in places:
                stream.position = position
            session.recount(counts)  # the seeds of its updates: gone on with, the run is as if it had not stopped
            _stop_calls(session, run)
    own = set(run.own_calls)
    run.note(row, step, trace, session.trace.step, _samples(step))
    session.record(row, algorithm, own, metrics)
    return row


def _streams_of(algorithm: Algorithm, prompts: RowStream) -> list[RowStream]:
    """Return the streams that a step takes from: its prompts', and those that the algorithm holds, e.g. ``SafeRLHF.ptx``."""
    return [prompts, *(held for held in getattr(algorithm, "__dict__", {}).values() if isinstance(held, RowStream))]


def _samples(step: Any) -> list[Mapping[str, Any]]:
    """Return a few samples of a step for the run's picture; an algorithm of the user's may keep none."""
    batch = getattr(step, "batch", None)
    return list(batch.view(NUM_SAMPLES)["samples"]) if isinstance(batch, Batch) else []


def _stop_calls(session: Session, run: Run) -> None:
    """Cancel what the run's step has started; calls that the user started beside it go on."""
    if not session.client.closed:
        own = set(run.own_calls)
        session.client.cancel([call for call in session.client.open_calls() if call in own])


def _own_metric(metric: Metric, batch: Batch) -> dict[str, float]:
    value = metric(batch)
    name = getattr(metric, "__name__", type(metric).__name__)
    if isinstance(value, Mapping):
        return {str(k): float(v) for k, v in value.items()}
    try:
        return {name: float(value)}
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise OptionError(f"the metric {name} must return a number or a dict of numbers; it returned {kind}") from error


def check_algorithm(algorithm: Any) -> None:
    """Check that it is something with a step.

    Raises:
        OptionError: it is not.
    """
    if isinstance(algorithm, type) or not callable(getattr(algorithm, "step", None)):
        raise OptionError(f"train takes an algorithm with a step, e.g. hf.PPO(clip=0.2); got {algorithm!r}")


def _check_options(
    algorithm: Algorithm, prompts: RowStream, steps: int, metrics: Sequence[Metric], stop: Any, save_every: int,
    folder: str | Path | None,
) -> None:  # fmt: skip
    check_algorithm(algorithm)
    if not isinstance(prompts, RowStream):
        raise OptionError(f"train takes the stream of session.prompts(...); got {type(prompts).__name__}")
    if not is_whole(steps) or steps < 1:
        raise OptionError(f"steps must be a whole number of at least 1; got {steps!r}")
    if not is_whole(save_every) or save_every < 0 or (save_every and folder is None):
        raise OptionError(f"save_every={save_every} needs a number of at least 0 and a folder to save to (folder=...)")
    if stop is not None and not callable(stop):
        raise OptionError(f"stop is a function of a step's row that says whether to end the run; got {stop!r}")
    for metric in metrics:
        if not callable(metric):
            raise OptionError(f"metrics are functions of a batch; got {metric!r}")


class _Interrupts:
    """Counts interrupts while ``train`` runs: the first only asks for a pause."""

    def __init__(self, pause: Callable[[], None]) -> None:
        self.count = 0
        self._pause = pause

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        self._pause()


@contextmanager
def _pausing(pause: Callable[[], None]) -> Iterator[_Interrupts]:
    interrupts = _Interrupts(pause)
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    previous = signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)


class _Bar:
    """A progress bar with the last row's main numbers, or nothing."""

    SHOWN = ("score_mean", "kl_mean", "seconds")

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def show(self, row: Mapping[str, Any]) -> None:
        """Advance by one step."""
        if self._bar is not None:
            self._bar.set_postfix({k: f"{row[k]:.3f}" for k in self.SHOWN if k in row}, refresh=False)
            self._bar.update(1)

    def step(self, row: Mapping[str, Any]) -> bool:
        """Advance by one step of a run that goes on: for its ``stop``."""
        self.show(row)
        return False


@contextmanager
def progress_bar(steps: int, shown: bool, what: str = "train") -> Iterator[_Bar]:
    """Show a bar in the terminal, or nothing."""
    if not shown:
        yield _Bar(None)
        return
    from tqdm.std import tqdm  # plain text: it stays in a saved notebook as it was

    with tqdm(total=steps, desc=what, unit="step", file=sys.stdout, leave=True) as bar:
        yield _Bar(bar)


def wants_progress() -> bool:
    """Whether someone looks: a terminal or a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return sys.stdout.isatty() or (shell is not None and getattr(shell, "kernel", None) is not None)
