"""``train``: the loop around an algorithm's step. Progress, metrics, early stop, checkpoints, and pausing by interrupt."""

from __future__ import annotations

import atexit
import signal
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hfsdk.algorithms import DPO
from hfsdk.algorithms.invariants import CHECK, WARNED, warn
from hfsdk.core.batch import Batch
from hfsdk.core.checks import Count, Index, checked
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
from hfsdk.run.best import COLUMN, BestCheckpointTracker, KeepBest, best_tracker
from hfsdk.run.health import Health
from hfsdk.run.metric_outliers import Jumps
from hfsdk.run.notebook import Watcher, wants_progress, watcher_of
from hfsdk.run.recovery import RAISE, AutoRestore, ElasticFallback, restorer
from hfsdk.run.run import NUM_SAMPLES, Bar, Run, RunControl, progress_bar, resources
from hfsdk.run.trackers import Tracker, Tracking, start, trackers
from hfsdk.run.train_config import TrainConfig
from hfsdk.session.algorithm import Algorithm
from hfsdk.session.client import calls_of, user_line
from hfsdk.session.context import STEPS, Context
from hfsdk.session.parts import Parts
from hfsdk.session.streams import PromptStream, RowStream, streams_of
from hfsdk.state.history import ORDER

LEAVE_S = 5.0
"""How long the end of the interpreter waits for a call of a run that goes on."""


@checked
def train(  # noqa: D417
    parts: Parts,
    algorithm: Algorithm,
    prompts: Any,
    *,
    steps: Count,
    metrics: Sequence[Callable[[Batch], Mapping[str, float] | float]] = (),
    stop: Callable[[dict[str, Any]], bool] | None = None,
    save_every: Index = 0,
    folder: str | Path | None = None,
    keep: Count = 1,
    resume: str | Path | None = None,
    keep_best: KeepBest | PromptStream | None = None,
    track: str | Tracker | Sequence[str | Tracker] = (),
    on_death: str = RAISE,
    max_restores: Count = 3,
    shrink: bool = False,
    check: str | None = "light",
    look_back: Index = 2,
    progress: bool | None = None,
    wait: bool = True,
) -> Run:
    """Run ``steps`` steps of an algorithm: ``algorithm.step(session.models, next(prompts))``, with its metrics.

    The first interrupt pauses after the running step and returns the run so far (``run.paused``); the second cancels the
    running call and raises; a third detaches. A step that did not finish gives its prompts back.

    Args:
        algorithm: e.g. ``hf.PPO(clip=0.2)``.
        prompts: from :meth:`prompts`; for `DPO` pairs from :meth:`pairs`. Or data as these take them, e.g. a list of texts, in
            batches of 32; the same data given again goes on where it was.
        steps: steps to run now.
        metrics: own metrics, each a function of the step's batch that returns a number (named as the function) or a dict.
        stop: called with each step's row of metrics; true ends the run.
        save_every: save to ``folder`` after every so many steps; 0 is never.
        folder: where to save, a path or an address. A save there of another process that this one has not loaded is replaced; a
            notice says so first.
        keep: how many of these saves the folder holds, as in :meth:`save`.
        resume: a folder written by ``save``: everything goes on from there, the place in ``prompts`` included.
        keep_best: held-out prompts: of all the run goes through, its start included, the checkpoint whose responses to them score
            best is kept in ``folder/best`` (``run.best``). How often and how it is measured: :class:`hf.KeepBest
            <hfsdk.run.best.KeepBest>`.
        track: where every step is kept as well: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, one with options, e.g.
            ``hf.TensorBoard("logs")``, or several; see :mod:`hfsdk.run.trackers`.
        on_death: what a worker that dies does to the run: ``"raise"`` ends it; ``"restore"`` goes on from the last save in
            ``folder``, with the same prompts, seeds and so numbers as without the death (``run.restores``). It needs
            ``save_every``, and saves the start too. What your functions keep between calls is not part of a save.
        max_restores: deaths that a run goes on after; one more ends it.
        shrink: with ``on_death="restore"``: whether the run may go on over fewer devices where a node has left the cluster. That is
            planned for every node before the run begins, and told; when it, or another node like it, is there again, the roles move
            back after the running step (``run.resized``). The samples are those of the undisturbed run, but for the rounding of
            sums over other ranks.
        check: what is checked in every step. ``"light"``: what must hold before anything is updated (ratio 1, nothing clipped,
            trainer and rollout apart by rounding alone); ``"full"``: besides, some rows of each generation are replayed through the
            trainer at once (``replay_gap_max``, in nats; a forward pass of 8 rows); ``None``: none of it. What does not hold is an
            `InvariantWarning`. That weights arrive as they left is proven whatever this says (``actor.last_reshard.verified``).
        look_back: how many snapshots of itself the run keeps, the newest, for ``run.first_bad()``; 0 takes none. Each is a copy of
            the trained roles in the workers' host memory; none is taken that a node has less than four times as much free for. The
            first is taken before the first step, others when 4 % of the steps' time pays for them. The next run lets them go.
        progress: whether to draw the dashboard (in a notebook) or a bar (in a terminal); by default in both.
        wait: whether to return when the steps are done. Otherwise they run in a thread, the run returns at once, and
            ``run.pause()``, ``run.step()``, ``run.resume()``, ``run.stop()`` and ``run.wait()`` steer it.

    Returns:
        The run; ``run.history`` has one row per step: the algorithm's metrics, your own, and what the step took: seconds,
        tokens_per_s (generated), busy_share (mean of the devices), memory_bytes (fullest device), cost; after some steps
        held_out_score (``keep_best``). What the numbers say is wrong, with what to do, is a warning and in ``run.warnings``; a
        number that jumps is too.

    Raises:
        OptionError: an option is out of its range, or a tracker's package is not installed.
        PlacementError: the session lacks roles that the algorithm uses; names all, before anything is loaded. With ``shrink``:
            without one of the nodes the roles fit nowhere.
        CheckpointError: ``resume`` is not a checkpoint of these roles, or the saves would not fit on the disk.
        CallError: a call failed; a `WorkerDiedError`, that a worker died once more than the run may go on after; a
            `NonFiniteLossError`, that a loss, gradient or KL is NaN or infinite: ``session.run.first_bad()`` finds out why.
    """
    shown = wants_progress() if progress is None else progress
    wanted = TrainConfig(
        algorithm,
        prompts,
        steps,
        metrics,
        stop,
        save_every,
        folder,
        keep,
        resume,
        keep_best,
        track,
        on_death,
        max_restores,
        shrink,
        look_back,
        wait,
        check,
    )
    parts.client.check_open()
    if parts.runs.elsewhere is not None:
        return parts.runs.elsewhere.train(wanted, shown)
    return carry_out(parts, wanted, shown, aside=not wait)


def carry_out(parts: Parts, wanted: TrainConfig, shown: bool, *, aside: bool) -> Run:
    """Train in this process; ``aside``: on a thread of its own. For the rest see :func:`train`."""
    algorithm, steps, folder, save_every = wanted.algorithm, wanted.steps, wanted.folder, wanted.save_every
    wanted.check(parts)
    if aside and not can_start_threads():
        raise OptionError(
            "wait=False trains on a thread of its own, and this Python can start none (as in a browser); leave it out"
        )
    if folder is not None:
        parts.saves.check_space(folder, steps // save_every if save_every else 0, wanted.keep)
    chosen = trackers(wanted.track)
    if parts.runs.run is not None and parts.runs.run.running:
        raise OptionError(f"{parts.runs.run!r} is still under way; session.run.stop() ends it, session.run.wait() waits for it")
    best = best_tracker(parts, wanted.keep_best, algorithm, folder, wanted.resume)
    if wanted.resume is not None:
        parts.saves.load(wanted.resume)
    if folder is not None and save_every:
        parts.saves.tell_of_anothers(folder)
    stream = parts.sources.stream_of(wanted.prompts, pairs=isinstance(algorithm, DPO))
    parts.saves.tell_of_place(wanted.resume, stream)
    saving = (save_every, folder, wanted.keep) if save_every and folder is not None else (0, "", 1)
    control = RunControl()
    run = Run(control)
    if parts.runs.run is not None and isinstance(parts.runs.run._control.search, FirstBadSearch):
        parts.runs.run._control.search.again.look_back.forget()
    look_back = RollingSnapshots(parts, 0 if parts.context.simulated else wanted.look_back, control.saving)
    if not parts.context.simulated:
        control.search = FirstBadSearch(StepsAgain(parts, algorithm, stream, look_back), control)
    smaller = ElasticFallback(parts, algorithm, stream) if wanted.shrink and not parts.context.simulated else None
    if smaller is not None:
        smaller.prepare()
    with interrupts_held(control.pause) as interrupts:  # what has begun also ends: an interrupt is answered in between
        after_death = restorer(parts, control, best, wanted.on_death, wanted.max_restores, saving, smaller)
        loop = _Loop(
            parts, algorithm, stream, wanted.metrics, wanted.stop, saving, best, after_death, look_back, control, run, wanted.level
        )  # fmt: skip
        try:
            loop.begin(start(parts, algorithm, stream, steps, chosen), steps, not wanted.wait, shown)
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


def _how(control: RunControl, failed: Exception | None) -> str:
    """Return how a run that is about to end has ended."""
    if failed is not None and not control.is_stop(failed):
        return "failed"
    return "finished" if len(control.record.rows) == control.steps else "paused" if control.paused else "stopped"


@dataclass(eq=False)
class _Loop:
    """A run from its begin to its end, on the thread that called ``train`` or on one of its own."""

    parts: Parts
    algorithm: Algorithm
    prompts: RowStream
    metrics: Sequence[Metric]
    stop: Callable[[Row], bool] | None
    saving: tuple[int, str | Path, int]
    best: BestCheckpointTracker | None
    after_death: AutoRestore | None
    look_back: RollingSnapshots
    control: RunControl
    run: Run
    level: str | None
    tracking: Tracking | None = None
    watcher: Watcher | None = None
    unsubscribe: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.warnings = RunWarnings(self.parts.context, self.control)

    def begin(self, tracking: Tracking, steps: int, background: bool, shown: bool) -> None:
        """Begin the run: who tracks, watches and listens to it knows of it, and the session too."""
        parts, control, cluster = self.parts, self.control, self.parts.context.cluster
        self.tracking = tracking
        control.begin(steps, background, lambda: _stop_calls(parts, control))
        parts.runs.run = self.run
        control.record.num_devices, control.record.price_per_device_hour = cluster.num_devices, cluster.price_per_device_hour
        self.unsubscribe = parts.client.subscribe(control.on_event)
        self.watcher = watcher_of(self.run) if shown else None

    def end(self, failed: Exception | None, *, done: bool) -> None:
        """End what has begun; whoever watches is told. A second time does nothing."""
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
            self.parts.client.settle([*own, *self.control.calls.own], LEAVE_S)

    def attend(self, shown: bool, interrupts: Interrupts) -> None:
        """Run the loop to its end; whatever happens, who watches is told that it is over."""
        failed: Exception | None = None
        done = False
        self.control.calls.take_thread()
        token, level = WARNED.set(set()), CHECK.set(self.level)
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
                self.look_back.forget()
                bar.back_to(len(control.record.rows))

    def _take_step(self, interrupts: Interrupts, bar: Bar) -> bool:
        """Take a step and do what is due after it; return whether there shall be another one."""
        parts, control, record, (every, folder, keep) = self.parts, self.control, self.control.record, self.saving
        self.look_back.before_step()
        row = _one_step(parts, self.algorithm, self.prompts, self.metrics, control, self.best)
        self.look_back.after_step(row["seconds"])
        bar.show(row)
        if self.tracking is not None:
            self.tracking.step(row, record.samples.get(row["step"], []))
        self.look_back.frozen |= self.warnings.take(row)
        if self.best is not None:
            with self._saving_best(self.best):
                self.best.take(row)
        if every and row["step"] % every == every - 1:
            with control.saving():
                parts.saves.save(folder, keep=keep)
            record.saved = {"folder": str(folder), "step": row["step"]}
        if self.stop is not None and self.stop(row):
            control.stopped = True
            self._measure_the_end(row)
            return False
        if interrupts.count and len(record.rows) < control.steps:
            control.paused = True
            left = control.steps - len(record.rows)
            parts.context.notice(
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
            self.parts.log.amend(measured)
            if self.tracking is not None:
                self.tracking.amend({"step": row["step"], **measured})
            self.best.take(row)

    @contextmanager
    def _saving_best(self, best: BestCheckpointTracker) -> Iterator[None]:
        """Between two steps: what is measured is no call of a step, and may be saved."""
        try:
            with self.control.saving():
                yield
        except BaseException:
            _stop_calls(self.parts, self.control)
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
    parts: Parts,
    algorithm: Algorithm,
    prompts: RowStream,
    metrics: Sequence[Metric],
    control: RunControl,
    best: BestCheckpointTracker | None,
) -> Row:
    """Run one step and record its row; a step that does not finish is cancelled and gives its prompts back."""
    number = parts.context.next_step()
    parts.context.counters.set(STEPS, number - 1)  # with steps that were taken by hand before the first of train
    places, counts = [(stream, stream.position) for stream in streams_of(algorithm, prompts)], parts.context.counters.all()
    started, finished = time.perf_counter(), False
    in_trace = parts.client.begin_step(number)
    try:
        with parts.client.in_step(in_trace), _first_failure(), replaying(parts.context.simulated) as replayed:
            step = algorithm.step(parts.deployment.models, next(prompts))
            if step is None:
                raise OptionError(f"{type(algorithm).__name__}.step returned nothing; return what its metrics() reads, e.g. a Step")
            row: Row = {"step": parts.context.counters.next(STEPS)}
            with suppress(SimulatedValueError):  # shapes and times only: no metrics to show
                row |= numbers_of(algorithm.metrics(step), f"{type(algorithm).__name__}.metrics")
                row |= replayed()
                for metric in metrics:
                    row |= own_metric(metric, step.batch, row)
        if parts.context.simulated:
            parts.client.wait(parts.client.open_calls(), None)  # perhaps nothing was read that waited for them
        trace = control.calls.of_step(parts.traces[in_trace].snapshot())
        row["seconds"] = trace.duration_s if parts.context.simulated else time.perf_counter() - started
        cluster, placement = parts.context.cluster, parts.deployment.placement
        used = {device for pool in (placement.pools if placement else ()) for device in pool.devices}
        row |= resources(trace, row["seconds"], len(used), cluster.price_per_device_hour * len(cluster.devices) / 3600)
        finished = True
    finally:
        if not finished:
            for stream, position in places:
                stream.position = position
            parts.context.counters.replace(counts)  # the seeds of its updates: gone on with, the run is as if it had not stopped
            _stop_calls(parts, control)
    own = set(control.calls.own)
    try:
        if best is not None:
            row |= best.measure(row["step"], len(control.record.rows) + 1 == control.steps)
    except BaseException:
        _stop_calls(parts, control)
        raise
    finally:  # the step counts, whatever comes of measuring what it led to
        control.record.add(row, step, trace, in_trace, _samples(step))
        control.calls.own.clear()
        parts.log.record(row, algorithm, own, metrics)
    return row


def _samples(step: Any) -> list[Mapping[str, Any]]:
    """Return a few samples of a step for the run's picture; an algorithm of the user's may keep none."""
    batch = getattr(step, "batch", None)
    return list(batch.view(NUM_SAMPLES)["samples"]) if isinstance(batch, Batch) else []


def _stop_calls(parts: Parts, control: RunControl) -> None:
    """Cancel what the run's step has started, whose end the run tells of; calls that the user started beside it go on."""
    if not parts.client.closed:
        own = set(control.calls.own)
        parts.client.cancel([call for call in parts.client.open_calls() if call in own])
        parts.client.send(m.AcknowledgeFailures(tuple(own)))


# What an interrupt does to ``train``: it pauses the run, stops its call, or is held back while the run begins or ends.

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


# ``replaying``: the check ``"full"`` of a run's step, by log-probs that are computed again as soon as they were drawn.

REPLAY_GAP = "replay_gap_max"
"""Largest distance of trainer and rollout on a token of the rows that were replayed, in nats."""


@contextmanager
def replaying(simulated: bool) -> Iterator[Callable[[], Row]]:
    """Replay some rows of what is generated meanwhile, where the run's check is ``"full"``; what it yields says how far apart."""
    kept: list[tuple[Batch, str]] | None = [] if CHECK.get() == "full" and not simulated else None
    token = REPLAYED.set(kept)
    try:
        yield lambda: _numbers(kept or [])
    finally:
        REPLAYED.reset(token)


def _numbers(replayed: list[tuple[Batch, str]]) -> Row:
    if not replayed:
        return {}
    gaps = [(largest_gap(batch), GAP_TOLERANCE[dtype]["max"]) for batch, dtype in replayed]
    worst, most = max(gaps, key=lambda one: one[0] / one[1])
    if not worst <= most:
        warn([
            f"{REPLAY_GAP} is {worst:.3g} nats where rounding stays below {most:g}: rows that were replayed as soon as they were "
            "drawn have other log-probs in the trainer than in the rollout; actor.explain_gap(batch) takes the difference apart"
        ])  # fmt: skip
    return {REPLAY_GAP: worst}


# Numbers of a step that an algorithm or a metric of the user's returned: floats by name, or an error that says whose they are.

Metric = Callable[[Batch], Mapping[str, float] | float]


def own_metric(metric: Metric, batch: Batch, others: Container[str]) -> dict[str, float]:
    """Return what a metric of the user's says of a step's batch; one number has the function's name.

    Args:
        metric: the function.
        batch: the step's.
        others: names of numbers that the step has already, the algorithm's and other metrics'.

    Raises:
        OptionError: it returned no numbers, or one of a name that is taken.
    """
    value = metric(batch)
    name = getattr(metric, "__name__", type(metric).__name__)
    found = numbers_of(value if isinstance(value, Mapping) else {name: value}, f"the metric {name}", (float,))
    if taken := [key for key in found if key in others]:
        raise OptionError(
            f"the metric {name} calls a number {taken[0]!r}, which the algorithm or another metric gives already: call the "
            "function, or the key of the dict that it returns, something else"
        )
    return found


TAKEN = frozenset({
    "kind", "branch", "parent", "algorithm", "snapshot", "role", "line", "loss_function", "updates", "metrics", "step", "seconds",
    ORDER,
})  # fmt: skip
"""Columns of the history that no number of the user's may have the name of."""


def numbers_of(numbers: Any, who: str, kept: tuple[type, ...] = (int, float, str, type(None))) -> Row:
    """Return the numbers of a step by name; what is of no kept type, e.g. a tensor, as a float.

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
            row[str(key)] = value if type(value) in kept else float(value)
        except SimulatedValueError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(value).__name__
            raise OptionError(f"{who} must return a number or a dict of numbers; {key!r} is of type {kind}") from error
    return row


# ``RunWarnings``: what is said of a run's numbers step by step: what :mod:`health <hfsdk.run.health>` and `jumps` find.

BY_A_NUMBER = (NonFiniteLossError, ColumnError, RewardFunctionError)
"""Errors that a number which is not finite may end in."""
FINDS = "session.run.first_bad() finds where it comes from"


class RunWarnings:
    """The warnings of one run."""

    def __init__(self, context: Context, control: RunControl) -> None:
        self._context, self._control = context, control
        self.go_back(())

    def go_back(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Know of these steps alone: the run goes on after them."""
        known = list(rows)
        self._health, self._jumps = Health(known), Jumps(known)

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
        """Note in which step a run has failed and, where that was by a number, say in the error what finds it."""
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
