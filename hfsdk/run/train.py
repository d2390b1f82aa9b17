"""``train``: the loop around an algorithm's step. Progress, metrics, early stop, checkpoints, and pausing by interrupt."""

from __future__ import annotations

import atexit
import signal
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from hfsdk.algorithms import DPO
from hfsdk.algorithms.invariants import CHECK, WARNED, warn
from hfsdk.core.batch import Batch
from hfsdk.core.errors import (
    ColumnError,
    DependencyError,
    HfsdkError,
    LostColumnError,
    NonFiniteLossError,
    OptionError,
    RewardFunctionError,
    SimulatedValueError,
)
from hfsdk.core.gap import GAP_TOLERANCE
from hfsdk.core.rows import Row
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.system import can_start_threads, exiting
from hfsdk.diagnose.first_bad import FirstBadSearch
from hfsdk.diagnose.step_recorder import RollingSnapshots, StepsAgain
from hfsdk.engine.calls import messages as m
from hfsdk.models.replays import REPLAYED, largest_gap
from hfsdk.run.best import COLUMN, BestCheckpointTracker, best_tracker
from hfsdk.run.health import Health
from hfsdk.run.host import TrainHost
from hfsdk.run.metric_outliers import Jumps
from hfsdk.run.notebook import Watcher, wants_progress, watcher_of
from hfsdk.run.recovery import AutoRestore, ElasticFallback, restorer
from hfsdk.run.run import NUM_SAMPLES, Bar, Run, RunControl, progress_bar, resources
from hfsdk.run.trackers import Tracker, Tracking, start, trackers
from hfsdk.run.train_config import TrainConfig
from hfsdk.session.client import calls_of, user_line
from hfsdk.session.context import STEPS, Context
from hfsdk.session.streams import RowStream, streams_of
from hfsdk.state.history import ORDER

LEAVE_S = 5.0
"""How long the end of the interpreter waits for a call of a run that goes on."""


def train(host: TrainHost, config: TrainConfig, *, progress: bool | None = None) -> Run:
    """Carry out ``session.train``: here, or beside the controller that keeps the session."""
    shown = wants_progress() if progress is None else progress
    host.client.check_open()
    if host.runs.elsewhere is not None:
        return host.runs.elsewhere.train(config, shown)
    return carry_out(host, config, shown, aside=not config.wait)


def carry_out(host: TrainHost, config: TrainConfig, shown: bool, *, aside: bool) -> Run:
    """Train in this process; ``aside``: on a thread of its own. For the rest see :meth:`hfsdk.Session.train`."""
    stream, best, chosen = _checked(host, config, aside=aside)
    control = RunControl()
    run = Run(control)
    # the snapshots of the run before are let go first: both runs' may not fit
    if host.runs.run is not None and isinstance(host.runs.run._control.search, FirstBadSearch):
        host.runs.run._control.search.again.look_back.forget()
    look_back = RollingSnapshots(host, 0 if host.context.simulated else config.look_back, control.saving)
    if not host.context.simulated:
        control.search = FirstBadSearch(StepsAgain(host, config.algorithm, stream, look_back), control)
    smaller = ElasticFallback(host, config.algorithm, stream) if config.shrink and not host.context.simulated else None
    if smaller is not None:
        smaller.prepare()
    with interrupts_held(control.pause) as interrupts:  # what has begun also ends: an interrupt is answered in between
        after_death = restorer(host, control, best, config, smaller)
        loop = _Loop(host, config, stream, best, after_death, look_back, control, run)
        try:
            loop.begin(start(host, config.algorithm, stream, config.steps, chosen), shown)
            interrupts.answer()
            if aside:
                loop.go_in_background(user_line())
                interrupts.answer()
        except BaseException as error:
            control.close()
            loop.end(error if isinstance(error, Exception) else None, done=False)
            raise
        if not aside:
            loop.attend(shown, interrupts)
    return run


_Checked = tuple[RowStream, BestCheckpointTracker | None, Sequence[Tracker]]
"""The prompts, what keeps the best checkpoint, and who keeps every step as well."""


def _checked(host: TrainHost, config: TrainConfig, *, aside: bool) -> _Checked:
    """Refuse what cannot be run before anything is changed, load what the run goes on from, and return its prompts."""
    folder = config.folder
    config.validate(host.deployment.models)
    if aside and not can_start_threads():
        raise OptionError(
            "wait=False trains on a thread of its own, and this Python can start none (as in a browser); leave it out"
        )
    if folder is not None:
        host.saves.check_space(folder, config.steps // config.save_every if config.save_every else 0, config.keep)
    chosen = trackers(config.track)
    if host.runs.run is not None and host.runs.run.running:
        raise OptionError(f"{host.runs.run!r} is still under way; session.run.stop() ends it, session.run.wait() waits for it")
    best = best_tracker(host, config.keep_best, config.algorithm, folder, config.resume)
    if config.resume is not None:
        host.saves.load(config.resume)
    if folder is not None and config.save_every:
        host.saves.tell_of_anothers(folder)
    stream = host.sources.stream_of(config.prompts, pairs=isinstance(config.algorithm, DPO))
    host.saves.tell_of_place(config.resume, stream)
    return stream, best, chosen


def _how(control: RunControl, failed: Exception | None) -> str:
    """Return how a run that is about to end has ended."""
    if failed is not None and not control.is_stop(failed):
        return "failed"
    return "finished" if len(control.record.rows) == control.steps else "paused" if control.paused else "stopped"


@dataclass(eq=False)
class _Loop:
    """A run from its begin to its end, on the thread that called ``train`` or on one of its own."""

    host: TrainHost
    config: TrainConfig
    prompts: RowStream
    best: BestCheckpointTracker | None
    after_death: AutoRestore | None
    look_back: RollingSnapshots
    control: RunControl
    run: Run
    tracking: Tracking | None = None
    watcher: Watcher | None = None
    unsubscribe: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.warnings = RunWarnings(self.host.context, self.control)

    def begin(self, tracking: Tracking, shown: bool) -> None:
        """Begin the run: who tracks, watches and listens to it knows of it, and the session too."""
        host, control, cluster = self.host, self.control, self.host.context.cluster
        self.tracking = tracking
        control.begin(self.config.steps, not self.config.wait, lambda: _stop_calls(host, control))
        host.runs.run = self.run
        control.record.num_devices, control.record.price_per_device_hour = cluster.num_devices, cluster.price_per_device_hour
        self.unsubscribe = host.client.subscribe(control.on_event)
        self.watcher = watcher_of(self.run) if shown else None

    def end(self, failed: Exception | None, *, done: bool) -> None:
        """End what has begun, and let watchers know. A second time does nothing."""
        control, unsubscribe = self.control, self.unsubscribe
        tracking, self.tracking, self.unsubscribe = self.tracking, None, lambda: None
        unsubscribe()
        try:
            if tracking is not None:
                tracking.close(_how(control, failed))
        finally:
            watcher, self.watcher = self.watcher, None
            if control.running:
                control.end(failed, interrupted=not done and failed is None)
            if watcher is not None:
                watcher.ended()

    def go_in_background(self, line: str) -> None:
        """Run the loop on a thread of its own."""
        self.control.thread = threading.Thread(target=self._in_background, args=(line,), name="hfsdk-train", daemon=True)
        atexit.register(self._leave)  # a thread that computes while the interpreter ends would take it down
        self.control.thread.start()

    def _in_background(self, line: str) -> None:
        with suppress(Exception), calls_of(line):  # the run keeps what failed, and run.wait() raises it
            self.attend(False, Interrupts(self.control.pause))
        if not exiting.is_set():
            atexit.unregister(self._leave)

    def _leave(self) -> None:
        """Stop for good because the interpreter ends, and wait for the call that a lane still computes."""
        own = set(self.control.calls.own)
        self.control.leave()
        with suppress(HfsdkError):
            self.host.client.settle([*own, *self.control.calls.own], LEAVE_S)

    def attend(self, shown: bool, interrupts: Interrupts) -> None:
        """Run the loop to its end, and let watchers know that it is over, however it ended."""
        failed: Exception | None = None
        done = False
        self.control.calls.take_thread()
        token, level = WARNED.set(set()), CHECK.set(self.config.check)
        try:
            with progress_bar(self.control.steps, shown and self.watcher is None) as drawn, interrupts.raised():
                self.go(interrupts, drawn)
            done = True
        except Exception as error:
            failed = error
            if not self.control.is_stop(error):
                self.warnings.failed(error)
                raise
        finally:
            WARNED.reset(token)
            CHECK.reset(level)
            self.end(failed, done=done)

    def go(self, interrupts: Interrupts, bar: Bar) -> None:
        control = self.control
        if self.best is not None:
            with self._saving_best(self.best):
                self.best.begin()
        if self.after_death is not None:
            self.after_death.begin()
        while len(control.record.rows) < control.steps and control.may_go_on():
            try:
                if self.after_death is not None:
                    self.after_death.grow()
                if not self._take_step(interrupts, bar):
                    break
            except HfsdkError as error:
                if self.after_death is None or not self.after_death.is_death(error):
                    raise
                self.after_death.go_back(error)
                self.warnings.go_back(control.record.rows)
                # parts of its snapshots are gone with the worker
                self.look_back.forget()
                bar.back_to(len(control.record.rows))

    def _take_step(self, interrupts: Interrupts, bar: Bar) -> bool:
        """Take a step, then save, measure and warn where that is due; return whether there shall be another one."""
        host, control, record, config = self.host, self.control, self.control.record, self.config
        self.look_back.before_step()
        row = _one_step(host, config, self.prompts, control, self.best)
        self.look_back.after_step(row["seconds"])
        bar.show(row)
        if self.tracking is not None:
            self.tracking.step(row, record.samples.get(row["step"], []))
        self.look_back.frozen |= self.warnings.take(row)
        if self.best is not None:
            with self._saving_best(self.best):
                self.best.take(row)
        if config.folder is not None and config.save_every and (row["step"] + 1) % config.save_every == 0:
            with control.saving():
                host.saves.save(config.folder, keep=config.keep)
            record.saved = {"folder": str(config.folder), "step": row["step"]}
        # asked after the save, so that what the run ends with is saved where a save was due
        if config.stop is not None and config.stop(row):
            control.stopped = True
            self._measure_the_end(row)
            return False
        if interrupts.count and len(record.rows) < control.steps:
            control.paused = True
            left = control.steps - len(record.rows)
            host.context.notice(
                f"paused after step {row['step']}, with {left} of {control.steps} steps left: session.train(..., steps={left}) "
                "goes on"
            )
            return False
        return True

    def _measure_the_end(self, row: Row) -> None:
        """Measure what ``stop`` ended the run with, where its step was not one to measure after."""
        if self.best is None or COLUMN in row:
            return
        with self._saving_best(self.best):
            measured = self.best.measure(row["step"], last=True)
            row.update(measured)
            self.control.record.rows.amend(measured)
            self.host.log.amend(measured)
            if self.tracking is not None:
                self.tracking.amend({"step": row["step"], **measured})
            self.best.take(row)

    @contextmanager
    def _saving_best(self, best: BestCheckpointTracker) -> Iterator[None]:
        """Let the best checkpoint be measured and saved between two steps; where that fails, end the calls it began."""
        try:
            with self.control.saving():
                yield
        except BaseException:
            _stop_calls(self.host, self.control)
            raise
        finally:
            self.control.calls.own.clear()
            self.control.record.best = best.best


@contextmanager
def _first_failure() -> Iterator[None]:
    """Raise what failed first, and not which of the algorithm's calls was waiting for it."""
    try:
        yield
        return
    except (DependencyError, LostColumnError) as error:
        first: BaseException = error
    while isinstance(first, DependencyError | LostColumnError) and first.__cause__ is not None:
        first = first.__cause__
    raise first.with_traceback(None)


def _one_step(
    host: TrainHost, config: TrainConfig, prompts: RowStream, control: RunControl, best: BestCheckpointTracker | None
) -> Row:
    """Run one step and record its row; a step that does not finish is cancelled and gives its prompts back."""
    algorithm, metrics = config.algorithm, config.metrics
    number = host.context.next_step()
    host.context.counters.set(STEPS, number - 1)  # with steps that were taken by hand before the first of train
    places, counts = [(stream, stream.position) for stream in streams_of(algorithm, prompts)], host.context.counters.all()
    started, finished = time.perf_counter(), False
    in_trace = host.client.begin_step(number)
    try:
        with host.client.in_step(in_trace), _first_failure(), replaying(host.context.simulated) as replayed:
            step = algorithm.step(host.deployment.models, next(prompts))
            if step is None:
                raise OptionError(f"{type(algorithm).__name__}.step returned nothing; return what its metrics() reads, e.g. a Step")
            row: Row = {"step": host.context.counters.next(STEPS)}
            with suppress(SimulatedValueError):  # shapes and times only: no metrics to show
                row |= numbers_of(algorithm.metrics(step), f"{type(algorithm).__name__}.metrics")
                row |= replayed()
                for metric in metrics:
                    row |= own_metric(metric, step.batch, row)
        if host.context.simulated:
            host.client.wait(host.client.open_calls(), None)  # perhaps nothing was read that waited for them
        trace = control.calls.of_step(host.traces[in_trace].snapshot())
        row["seconds"] = trace.duration_s if host.context.simulated else time.perf_counter() - started
        cluster, placement = host.context.cluster, host.deployment.placement
        used = {device for pool in (placement.pools if placement else ()) for device in pool.devices}
        row |= resources(trace, row["seconds"], len(used), cluster.price_per_device_hour * len(cluster.devices) / 3600)
        finished = True
    finally:
        if not finished:
            for stream, position in places:
                stream.position = position
            host.context.counters.replace(counts)  # the seeds of its updates: gone on with, the run is as if it had not stopped
            _stop_calls(host, control)
    own = set(control.calls.own)
    try:
        if best is not None:
            row |= best.measure(row["step"], len(control.record.rows) + 1 == control.steps)
    except BaseException:
        _stop_calls(host, control)
        raise
    finally:  # the step counts, whatever comes of measuring what it led to
        control.record.add(row, step, trace, in_trace, _samples(step))
        control.calls.own.clear()
        host.log.record(row, algorithm, own, metrics)
    return row


def _samples(step: Any) -> list[Mapping[str, Any]]:
    """Return a few samples of a step for the run's picture; an algorithm of the user's may keep none."""
    batch = getattr(step, "batch", None)
    return list(batch.view(NUM_SAMPLES)["samples"]) if isinstance(batch, Batch) else []


def _stop_calls(host: TrainHost, control: RunControl) -> None:
    """Cancel the calls that the run's step has started, whose end the run reports; calls that the user started beside it go on."""
    if not host.client.closed:
        own = set(control.calls.own)
        host.client.cancel([call for call in host.client.open_calls() if call in own])
        host.client.send(m.AcknowledgeFailures(tuple(own)))


# -- interrupts of ``train``: one pauses the run, stops its call, or is held back while the run begins or ends

MOST_HELD = 2
"""Interrupts that are held back while a run begins or ends; the next one is raised wherever it finds the run."""


class Interrupts:
    """Counts interrupts while ``train`` runs.

    While its steps run, the first only asks for a pause and the next are raised. While it begins and ends they are held back, so
    that nothing is half begun or half ended; :meth:`answer` raises those that came meanwhile.
    """

    def __init__(self, pause: Callable[[], None]) -> None:
        self.count = 0
        self._pause, self._raised, self._held_back = pause, False, 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take one: the handler of the signal."""
        self.count += 1
        if self._raised and self.count == 1:
            self._pause()
        elif self._raised or self._held_back == MOST_HELD:
            raise KeyboardInterrupt
        else:
            self._held_back += 1

    def answer(self) -> None:
        """Raise an interrupt that was held back."""
        if self.count:
            raise KeyboardInterrupt

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Have interrupts raised in this block: the steps run."""
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


# -- the check ``"full"`` of a run's step, by log-probs that are computed again as soon as they were drawn

REPLAY_GAP = "replay_gap_max"
"""Largest distance of trainer and rollout on a token of the rows that were replayed, in nats."""


@contextmanager
def replaying(simulated: bool) -> Iterator[Callable[[], Row]]:
    """Replay some rows of what is generated meanwhile, where the run's check is ``"full"``; what it yields says how far apart."""
    replayed: list[tuple[Batch, str]] | None = [] if CHECK.get() == "full" and not simulated else None
    token = REPLAYED.set(replayed)
    try:
        yield lambda: _numbers(replayed or [])
    finally:
        REPLAYED.reset(token)


def _numbers(replayed: list[tuple[Batch, str]]) -> Row:
    if not replayed:
        return {}
    gaps = [(largest_gap(batch), GAP_TOLERANCE[dtype]["max"]) for batch, dtype in replayed]
    worst, most = max(gaps, key=lambda gap: gap[0] / gap[1])
    if not worst <= most:
        warn([
            f"{REPLAY_GAP} is {worst:.3g} nats where rounding stays below {most:g}: rows that were replayed as soon as they were "
            "drawn have other log-probs in the trainer than in the rollout; actor.explain_gap(batch) takes the difference apart"
        ])  # fmt: skip
    return {REPLAY_GAP: worst}


# -- numbers of a step from an algorithm or a metric of the user's: floats by name, or an error that says whose they are

Metric = Callable[[Batch], Mapping[str, float] | float]


def own_metric(metric: Metric, batch: Batch, others: Container[str]) -> dict[str, float]:
    """Return the numbers of a user's metric for a step's batch; one number has the function's name.

    Args:
        metric: the function.
        batch: the step's.
        others: names of numbers that the step has already, the algorithm's and other metrics'.

    Raises:
        OptionError: it returned no numbers, or one of a name that is taken.
    """
    value = metric(batch)
    name = getattr(metric, "__name__", type(metric).__name__)
    numbers = numbers_of(value if isinstance(value, Mapping) else {name: value}, f"the metric {name}", (float,))
    if doubled := [key for key in numbers if key in others]:
        raise OptionError(
            f"the metric {name} calls a number {doubled[0]!r}, which the algorithm or another metric gives already: call the "
            "function, or the key of the dict that it returns, something else"
        )
    return numbers


TAKEN = frozenset({
    "kind", "branch", "parent", "algorithm", "snapshot", "role", "line", "loss_function", "updates", "metrics", "step", "seconds",
    ORDER,
})  # fmt: skip
"""Columns of the history that no number of the user's may have the name of."""


def numbers_of(numbers: Any, who: str, as_they_are: tuple[type, ...] = (int, float, str, type(None))) -> Row:
    """Return the numbers of a step by name; one whose type is not among ``as_they_are``, e.g. a tensor, as a float.

    Raises:
        OptionError: they are none, or the history has a column of this name already.
    """
    if not isinstance(numbers, Mapping):
        raise OptionError(f"{who} must return a dict of numbers by name; it returned {type(numbers).__name__}")
    row: Row = {}
    for key, value in numbers.items():
        if key in TAKEN:
            raise OptionError(f"{who} calls a number {key!r}, which is a column of the history already; give it another name")
        try:
            row[str(key)] = value if type(value) in as_they_are else float(value)
        except SimulatedValueError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(value).__name__
            raise OptionError(f"{who} must return a number or a dict of numbers; {key!r} is of type {kind}") from error
    return row


# -- warnings about a run's numbers, step by step: findings of :mod:`health <hfsdk.run.health>` and `jumps`

BY_A_NUMBER = (NonFiniteLossError, ColumnError, RewardFunctionError)
"""Errors that a number which is not finite may end in."""
FINDS = "session.run.first_bad() finds where it comes from"


class RunWarnings:
    """The warnings of one run."""

    def __init__(self, context: Context, control: RunControl) -> None:
        self._context, self._control = context, control
        self.go_back(())

    def go_back(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Start over with these steps alone: the run goes on after them."""
        earlier = list(rows)
        self._health, self._jumps = Health(earlier), Jumps(earlier)

    def take(self, row: Row) -> bool:
        """Warn of what a step's row says is wrong; return whether a number of it jumps.

        Raises:
            NonFiniteLossError: a loss, gradient, KL or ratio of it is not finite.
        """
        record, bad = self._control.record, self._jumps.take(row)
        texts = [f"{number}{f'; {FINDS}' if self._good() else ''}" for number in bad if number.usual is not None]
        for text in self._health.take(row) + texts[:1]:
            said = f"step {row['step']}: {text}"
            if said not in record.warnings:  # as it is where a step is taken again after a death
                record.warnings.append(said)
                self._context.notice(said)
        if bad and bad[0].usual is None:
            record.failed_step = row["step"]
            raise NonFiniteLossError(f"{bad[0]}: what is trained with it is lost, and the run ends here")
        return bool(bad)

    def failed(self, error: Exception) -> None:
        """Note the step in which a run has failed and, where that was by a number, name in the error the way to find it."""
        record = self._control.record
        if record.failed_step is None and not self._context.client.closed:
            record.failed_step = self._context.next_step()
        good = self._good()
        if good is not None and isinstance(error, BY_A_NUMBER):
            error.add_note(f"{FINDS}; session.rewind(session.run.last_good) goes back to {good.name!r}")

    def _good(self) -> Snapshot | None:
        """Return the snapshot that a search would go back to."""
        search = self._control.search
        return None if search is None else search.last_good()
