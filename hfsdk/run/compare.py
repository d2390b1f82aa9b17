"""``compare``: several algorithms from one point, each with several seeds, and back again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms import DPO
from hfsdk.core.checks import Count, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.experiment import Experiment, read_baseline
from hfsdk.core.rows import Row
from hfsdk.core.snapshot import Snapshot
from hfsdk.engine.calls import queries as q
from hfsdk.run.host import TrainHost
from hfsdk.run.notebook import wants_progress
from hfsdk.run.run import ComparedRun, options_of
from hfsdk.run.train import train
from hfsdk.run.train_config import TrainConfig
from hfsdk.session.algorithm import Algorithm, check_algorithm, check_roles
from hfsdk.session.client import uninterrupted
from hfsdk.session.role_book import opened

if TYPE_CHECKING:
    from hfsdk.session.streams import RowStream


Algorithms = Sequence[Algorithm] | Mapping[str, Algorithm]

NAMES = {"score_mean": "score", "kl_mean": "kl", "response_tokens_mean": "length"}
"""The name of a number in a step's row -> its name in an experiment's."""

GO_ON = "the same call with resume=True keeps them and runs the others"
"""The advice about a comparison that ended early."""


def compare(
    host: TrainHost,
    algorithms: Algorithms,
    prompts: Any,
    *,
    steps: Count,
    seeds: Sequence[int] = (0, 1, 2),
    snapshot: Snapshot | str | None = None,
    baseline: str | Path | None = None,
    save_baseline: bool = False,
    resume: bool = False,
    progress: bool | None = None,
) -> Experiment:
    """Carry out ``session.compare``; its text says what the arguments are."""
    named = _named(algorithms)
    for algorithm in named.values():
        check_roles(algorithm, host.deployment.models)
    seeds = _different(seeds)
    options = {name: repr(algorithm) for name, algorithm in named.items()}
    if save_baseline and baseline is None:
        raise OptionError("save_baseline=True needs the file to write: baseline='ppo.json'")
    earlier = None if baseline is None or save_baseline else read_baseline(baseline, steps, options)
    if baseline is not None and host.context.simulated:
        raise OptionError("a simulated session has no scores to judge by a baseline; leave baseline out")
    stream = host.sources.stream_of(prompts, pairs=any(isinstance(variant, DPO) for variant in named.values()))
    shown = wants_progress() if progress is None else progress
    comparison = _Comparison(host, named, stream, steps, seeds, resume)
    comparison.run(snapshot, shown)
    experiment = Experiment(
        tuple(comparison.rows), options, seeds, steps, earlier, comparison.branches, tuple(comparison.unfinished)
    )  # fmt: skip
    if experiment.partial:
        host.context.notice(f"{comparison.ending()}. Their results are returned; {GO_ON}.")
    elif save_baseline and baseline is not None:
        experiment.save_baseline(baseline)
    return experiment


@dataclass(eq=False)
class _Comparison:
    """The runs of one ``compare``, one after the other, each from the same point."""

    host: TrainHost
    named: Mapping[str, Algorithm]
    prompts: RowStream
    steps: int
    seeds: Sequence[int]
    resume: bool

    def __post_init__(self) -> None:
        self.rows: list[Row] = []
        self.branches: dict[tuple[str, int], str] = {}
        self.unfinished = [(name, seed) for name in self.named for seed in self.seeds]
        """Runs that are still to come, in order."""

    @property
    def num_finished(self) -> int:
        """Runs that are done, those of before included."""
        return len(self.named) * len(self.seeds) - len(self.unfinished)

    def run(self, snapshot: Snapshot | str | None, shown: bool) -> None:
        """Run what is to be run, and go back to where the session was; an interrupt ends it early.

        Raises:
            OptionError: there is no such snapshot; nothing has changed.
            KeyboardInterrupt: no run was finished by then.
            CallError: a call failed.
        """
        host, before, here = self.host, self.host.runs.run, None
        requested = None if snapshot is None else host.snapshots.find(snapshot)
        # for interrupts outside of the runs, which hear theirs themselves: the session goes back in any case
        with uninterrupted() as interrupts:
            try:
                here = host.snapshots.snapshot("compare")
                start = here if requested is None else requested
                self._take_finished(start)
                with runs_bar(tuple(self.unfinished), self.steps, shown) as bar:
                    while self.unfinished and not interrupts and self._run_next(start, bar):
                        pass
            except KeyboardInterrupt as interrupt:  # inside of a run
                if not self.num_finished:
                    raise KeyboardInterrupt(self.ending()) from interrupt
            except Exception as error:
                if self.num_finished:
                    error.add_note(f"{self.ending()}; {GO_ON}.")
                raise
            finally:
                notices: tuple[str, ...] = ()
                if here is not None and not host.client.closed:
                    notices = host.snapshots.come_home(here)
                    host.snapshots.forget(here)
                host.runs.run = before
                for notice in notices:
                    host.context.notice(notice)
            if self.unfinished and not self.num_finished:
                raise KeyboardInterrupt(self.ending())
            interrupts.clear()  # it has been answered

    def _take_finished(self, start: Snapshot) -> None:
        """Take the runs that an earlier comparison finished, where these shall go on from it."""
        compared = self.host.runs.compared
        if compared.begin(self._point(start), self.resume):
            self.host.context.notice(
                "resume=True finds no runs to keep: the session was trained, or something in it declared anew, since the last "
                "compare; all runs begin again from here"
            )
        for name, seed in list(self.unfinished):
            compared_run = compared.find(self.named[name], seed, self.steps)
            if compared_run is not None:
                self._add(name, seed, compared_run.rows, compared_run.branch)

    def _point(self, start: Snapshot) -> Hashable:
        """Return the identity of the start: the branch, what was trained by hand, roles, counters, the prompts' place."""
        host = self.host
        by_hand = [c.call_id for c in host.client.send(q.Changes()) if c.branch == start.branch and c.call_id <= start.order]
        roles = [(repr(opened(role)), role.function.version if role.function else "") for role in start.roles]
        place = host.snapshots.place_of(start, self.prompts)
        return repr((start.branch, by_hand, roles, sorted(start.counters.items()), self.prompts._fingerprint, place))

    def _run_next(self, start: Snapshot, bar: RunsBar) -> bool:
        """Run the next one; return whether others may follow."""
        host, (name, seed) = self.host, self.unfinished[0]
        algorithm = self.named[name]
        options = options_of(algorithm)
        branch = host.snapshots.fork(start, _free(host, f"{name}, seed {seed}"))
        host.context.seed = seed
        bar.begin(name, seed)

        def stop(row: Row) -> bool:
            bar.step(row)
            return host.runs.pause_asked

        config = TrainConfig(algorithm=algorithm, prompts=self.prompts, steps=self.steps, stop=stop, look_back=0)
        run = train(host, config, progress=False)
        if len(run.rows) < self.steps:
            return False
        rows = [_row(name, seed, row) for row in run.rows]
        host.runs.compared.finished.append(ComparedRun(type(algorithm), options, seed, self.steps, rows, branch))
        self._add(name, seed, rows, branch)
        return not host.runs.pause_asked

    def _add(self, name: str, seed: int, rows: Sequence[Row], branch: str) -> None:
        self.rows += [{**row, "algorithm": name} for row in rows]
        self.branches[name, seed] = branch
        self.unfinished.remove((name, seed))

    def ending(self) -> str:
        """Say how far it came."""
        name, seed = self.unfinished[0]
        of = f"{self.num_finished} of {self.num_finished + len(self.unfinished)} runs are finished"
        return f"compare ended at {name}, seed {seed}: {of}, and the session is where it was"


def _row(name: str, seed: int, row: Mapping[str, Any]) -> Row:
    """Return a step's row under an experiment's names; unknown numbers are ``None``."""
    tokens = round(row["tokens_per_s"] * row["seconds"]) if "tokens_per_s" in row else None
    columns = {new: row.get(old) for old, new in NAMES.items()}
    others = {key: value for key, value in row.items() if key not in NAMES and key not in ("step", "seconds")}
    return {"algorithm": name, "seed": seed, "step": row["step"], **columns, "seconds": row["seconds"], "tokens": tokens, **others}


def _named(algorithms: Algorithms) -> dict[str, Algorithm]:
    """Return the algorithms by name: that of their class, and of those of one class also the options they differ in."""
    if isinstance(algorithms, Mapping):
        named = {str(name): algorithm for name, algorithm in algorithms.items()}
    else:
        named = {}
        for algorithm in algorithms:
            alike = [other for other in algorithms if type(other) is type(algorithm)]
            name = type(algorithm).__name__ + _differing(algorithm, alike)
            if name in named:
                raise OptionError(f"two of the algorithms are the same, {shown(algorithm)}; name them: {{'one': ..., 'two': ...}}")
            named[name] = algorithm
    if not named:
        raise OptionError("compare takes at least one algorithm, e.g. [hf.PPO(), hf.GRPO()]; got none")
    for algorithm in named.values():
        check_algorithm(algorithm)
    return named


def _differing(algorithm: Any, alike: Sequence[Any]) -> str:
    if len(alike) < 2 or not is_dataclass(algorithm):
        return ""
    names = [f.name for f in fields(algorithm) if any(getattr(o, f.name) != getattr(algorithm, f.name) for o in alike)]
    return f"({', '.join(f'{name}={getattr(algorithm, name)!r}' for name in names)})" if names else ""


def _different(seeds: Sequence[int]) -> tuple[int, ...]:
    if not seeds or len(set(seeds)) < len(seeds):
        raise OptionError(f"seeds are different whole numbers, e.g. [0, 1, 2]; got {shown(seeds)}")
    return tuple(seeds)


def _free(host: TrainHost, name: str) -> str:
    """Return a name that no branch has yet."""
    used = {branch.name for branch in host.log.history().branches}
    return name if name not in used else next(n for i in range(2, len(used) + 3) if (n := f"{name} ({i})") not in used)


# -- the bar of ``compare``: the run that is under way, and how long the rest will take

Planned = Sequence[tuple[str, int]]
"""(algorithm, seed) of every run that is to come, in order."""

FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}{postfix}]"


class Forecast:
    """Seconds to go, from what a step of each algorithm took; an algorithm that has not run yet counts as the mean of the others.

    The first step of a run has what comes before it (going back to the start), and so its length.
    """

    def __init__(self, planned: Planned, steps: int) -> None:
        self._left: dict[str, int] = {}
        for name, _ in planned:
            self._left[name] = self._left.get(name, 0) + steps
        self._took: dict[str, tuple[float, int]] = {}

    def note(self, name: str, seconds: float) -> None:
        """A step of an algorithm is done."""
        total, count = self._took.get(name, (0.0, 0))
        self._took[name] = total + seconds, count + 1
        self._left[name] -= 1

    @property
    def seconds(self) -> float | None:
        """Seconds to go; ``None`` before the first step."""
        if not self._took:
            return None
        each = {name: total / count for name, (total, count) in self._took.items()}
        other = sum(each.values()) / len(each)
        return sum(steps * each.get(name, other) for name, steps in self._left.items())


def spoken(seconds: float) -> str:
    """Return a time as one says it: ``40 s``, ``12 min``, ``3 h 5 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class RunsBar:
    """The bar, or nothing where none is drawn."""

    def __init__(self, bar: Any, planned: Planned, steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._bar, self._planned, self._clock = bar, planned, clock
        self.forecast = Forecast(planned, steps)
        self._number, self._name, self._since = 0, "", clock()

    def begin(self, name: str, seed: int) -> None:
        """A run begins."""
        self._number, self._name = self._number + 1, name
        if self._bar is not None:
            self._bar.set_description_str(
                f"compare: {name}, seed {seed} (run {self._number} of {len(self._planned)})", refresh=True
            )

    def step(self, row: Mapping[str, Any]) -> bool:
        """Advance by one step of a run that goes on: for its ``stop``."""
        now = self._clock()
        self.forecast.note(self._name, now - self._since)
        self._since = now
        left = self.forecast.seconds
        if self._bar is not None and left is not None:
            self._bar.set_postfix_str(f"about {spoken(left)} left" if left else "done", refresh=False)
            self._bar.update(1)
        return False


@contextmanager
def runs_bar(planned: Planned, steps: int, shown: bool) -> Iterator[RunsBar]:
    """Show the bar in the terminal or under the cell, or nothing."""
    if not shown:
        yield RunsBar(None, planned, steps)
        return
    from tqdm.std import tqdm  # plain text: it stays in a saved notebook as it was

    with tqdm(total=len(planned) * steps, desc="compare", bar_format=FORMAT, file=sys.stdout, leave=True) as bar:
        yield RunsBar(bar, planned, steps)
