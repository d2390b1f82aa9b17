"""``train``: the loop around an algorithm's step. Progress, metrics, early stop, checkpoints, and pausing by interrupt."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from hfsdk.batch import Batch
from hfsdk.checks import is_whole
from hfsdk.errors import OptionError, SimulatedValueError
from hfsdk.session.prompts import PromptStream

if TYPE_CHECKING:
    import pandas as pd

    from hfsdk.session.session import Session

Metric = Callable[[Batch], Mapping[str, float] | float]
Row = dict[str, Any]


class Algorithm(Protocol):
    """What ``train`` runs; see ``hfsdk.algorithms``."""

    def step(self, models: Any, prompts: Batch) -> Any:
        """Run one step; return something with the ``batch`` and what ``metrics`` needs."""
        ...

    def metrics(self, step: Any) -> Mapping[str, float]:
        """Return the numbers of a step; waits."""
        ...


@dataclass
class Run:
    """What ``session.train`` returns."""

    rows: list[Row] = field(default_factory=list)
    paused: bool = False
    """Whether an interrupt ended it early; ``session.train`` again goes on."""
    stopped: bool = False
    """Whether ``stop`` ended it."""
    last: Any = None
    """The last step, with its batch."""

    @property
    def history(self) -> pd.DataFrame:
        """One row per step."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def __repr__(self) -> str:
        how = "paused" if self.paused else "stopped" if self.stopped else "finished"
        score = f", score {self.rows[-1]['score_mean']:.3f}" if self.rows and "score_mean" in self.rows[-1] else ""
        return f"Run({len(self.rows)} steps, {how}{score})"


def train(
    session: Session,
    algorithm: Algorithm,
    prompts: PromptStream,
    *,
    steps: int,
    metrics: Sequence[Metric],
    stop: Callable[[Row], bool] | None,
    save_every: int,
    folder: str | Path | None,
    resume: str | Path | None,
    progress: bool | None,
) -> Run:
    """See ``Session.train``."""
    _check_options(algorithm, prompts, steps, metrics, save_every, folder)
    if resume is not None:
        session.load(resume)
    run = session.run = Run()
    shown = _wants_progress() if progress is None else progress
    with _pausing() as interrupts, _bar(steps, shown) as bar:
        for _ in range(steps):
            row = _one_step(session, algorithm, prompts, metrics, run)
            bar.show(row)
            if save_every and row["step"] % save_every == save_every - 1 and folder is not None:
                session.save(folder)
            if stop is not None and stop(row):
                run.stopped = True
                break
            if interrupts.count:
                run.paused = True
                session.notice(f"paused after step {row['step']}; call session.train again to go on")
                break
    return run


def _one_step(session: Session, algorithm: Algorithm, prompts: PromptStream, metrics: Sequence[Metric], run: Run) -> Row:
    """Run one step and record its row; a step that does not finish is cancelled and gives its prompts back."""
    before, started, finished = (prompts.position, session.counts()), time.perf_counter(), False
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
        row["seconds"] = time.perf_counter() - started
        if session.simulated_time:
            row["seconds"] = session.trace.duration_s
        finished = True
    finally:
        if not finished:
            prompts.position = before[0]
            session.recount(before[1])  # the seeds of its updates: gone on with, the run is as if it had not stopped
            _stop_calls(session)
    run.rows.append(row)
    run.last = step
    session.record(row)
    return row


def _stop_calls(session: Session) -> None:
    if not session.client.closed:
        session.client.cancel(session.client.open_calls())


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


def _check_options(
    algorithm: Algorithm, prompts: PromptStream, steps: int, metrics: Sequence[Metric], save_every: int, folder: str | Path | None
) -> None:
    if isinstance(algorithm, type) or not callable(getattr(algorithm, "step", None)):
        raise OptionError(f"train takes an algorithm with a step, e.g. hf.PPO(clip=0.2); got {algorithm!r}")
    if not isinstance(prompts, PromptStream):
        raise OptionError(f"train takes the stream of session.prompts(...); got {type(prompts).__name__}")
    if not is_whole(steps) or steps < 1:
        raise OptionError(f"steps must be a whole number of at least 1; got {steps!r}")
    if not is_whole(save_every) or save_every < 0 or (save_every and folder is None):
        raise OptionError(f"save_every={save_every} needs a number of at least 0 and a folder to save to (folder=...)")
    for metric in metrics:
        if not callable(metric):
            raise OptionError(f"metrics are functions of a batch; got {metric!r}")


class _Interrupts:
    """Counts interrupts while ``train`` runs: the first only asks for a pause."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt


@contextmanager
def _pausing() -> Iterator[_Interrupts]:
    interrupts = _Interrupts()
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


@contextmanager
def _bar(steps: int, shown: bool) -> Iterator[_Bar]:
    if not shown:
        yield _Bar(None)
        return
    from tqdm.std import tqdm  # plain text: it stays in a saved notebook as it was

    with tqdm(total=steps, desc="train", unit="step", file=sys.stdout, leave=True) as bar:
        yield _Bar(bar)


def _wants_progress() -> bool:
    """Whether someone looks: a terminal or a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return sys.stdout.isatty() or (shell is not None and getattr(shell, "kernel", None) is not None)
