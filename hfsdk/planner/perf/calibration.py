"""``PerfModel.fit``: constants from measured steps; those that the steps cannot tell stay.

Each phase of each call is one observation: its seconds on a rank in the mean (``generate.decode``, ``update.backward``, ...), what
a call took besides (``.rest``), and every CPU task. On GPUs phases are timed by CUDA events (``hfsdk.core.trace.Span``): kernels
count in the phase that launched them, not where the host waits for them. With constants c = c0 exp(theta), observation i, weights
w::

    minimise   sum_i  w_i^2 huber(log predicted_i(theta) - log measured_i)  +  PRIOR sum_k theta_k^2

Logarithms make an error of a factor the same everywhere; ``w_i^2 = sqrt(t_i / t_max)`` lets long phases count more without
silencing short ones; Huber's loss (1964) bounds what one odd measurement can do, and the prior keeps each constant where the run
says nothing of it. Solved by Gauss and Newton's method with Levenberg's damping, in numpy. A constant that no observation depends
on is not fitted at all, nor are more than eight, those on which observations depend most; the report names the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import numpy as np

from hfsdk.core.checks import checked
from hfsdk.core.clock import stretch
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import OptionError
from hfsdk.core.roles import RoleSpec
from hfsdk.core.table import Array
from hfsdk.core.trace import Span, Trace, Traced
from hfsdk.planner.perf.bands import BandCoverage, bands_of, kept_by

if TYPE_CHECKING:
    import pandas as pd


FITTED = (
    "train_efficiency", "forward_efficiency", "weight_efficiency", "copy_efficiency", "optimizer_bytes", "launch_s", "agree_s",
    "step_s", "link_efficiency", "dispatch_s", "task_s",
)  # fmt: skip
"""The constants of ``PerfModel`` that a measured run may change: those of which it says most."""
MOST_FITTED = 8
"""Most constants that are fitted."""
LEAST_ELASTICITY = 0.02
"""A constant is fitted if doubling it changes some observation, weighed, by at least about this share."""
MOST_OWN = 0.5
"""An observation that decides more than so much of its own prediction says nothing of how right predictions are."""
SHORTEST_S = 1e-4
"""Phases shorter than this are not observed: clocks and Python's own time are most of them."""
PASSES = ("forward", "backward", "wait")
"""Phases told together where stages of a pipeline wait for each other."""


class MethodQuestion(Protocol):
    """The question that the simulated runtime asks of a performance model for a call (its ``CostQuestion`` is one)."""

    @property
    def method(self) -> str:
        """The method of the role, e.g. ``"step"``."""
        ...

    @property
    def role(self) -> RoleSpec:
        """The role as it is placed."""
        ...

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of its pool, by rank."""
        ...

    @property
    def rows(self) -> tuple[tuple[Array, Array], ...]:
        """Prompt lengths and response lengths of each group of ranks."""
        ...

    @property
    def weights(self) -> tuple[int, ...]:
        """Number of ranks of each group."""
        ...

    @property
    def stale(self) -> bool:
        """Whether the rollout lacks the trainer's weights."""
        ...

    @property
    def first(self) -> bool:
        """Whether it has had none before."""
        ...


class Predicts(Protocol):
    """A performance model whose fields are its constants (``PerfModel`` is one)."""

    @property
    def dispatch_s(self) -> float:
        """Seconds between a call's start and its work on the devices."""
        ...

    def host_task(self, num_rows: int, num_tokens: int) -> float:
        """Return the seconds of a CPU task."""
        ...

    def method_costs(
        self, method: str, role: RoleSpec, cluster: ClusterSpec, devices: Sequence[int], rows: Sequence[tuple[Array, Array]],
        stale: bool = False, first: bool = False,
    ) -> Sequence[Mapping[str, float]]:  # fmt: skip
        """Return, for each group of ranks that share rows, the call's seconds by span name."""
        ...

    def _moved(self, logs: Mapping[str, float]) -> Self:
        """Return a model whose constants are so many e-folds from where they are."""
        ...


M = TypeVar("M", bound=Predicts)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured step and the questions of its calls: ``session.measured()``."""

    trace: Trace
    cluster: ClusterSpec
    questions: Mapping[int, Sequence[MethodQuestion]]
    """The roles, devices, and rows of each group of ranks, by call."""
    tasks: Mapping[int, tuple[int, int]]
    """CPU task -> its rows and tokens."""


class Measurable(Protocol):
    """An object that has a measured step, e.g. a session."""

    def measured(self, step: int = -1) -> Measured:
        """Return it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Seconds of one phase of one call, measured and predicted."""

    call: str
    """The call, e.g. ``"actor.generate"``."""
    phase: str
    step: int = 0
    """Number of the measured step among the given ones."""
    measured_s: float
    before_s: float
    after_s: float
    left_out_s: float | None = None
    """Predicted by a fit without this observation; ``None`` where it alone decides a constant, and nothing else tells of that."""

    @property
    def kind(self) -> str:
        """The method and phase, e.g. ``"generate.decode"``: observations of one kind share a band."""
        return f"{self.call.rpartition('.')[2]}.{self.phase}"


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant before and after."""

    name: str
    before: float
    after: float
    determined: bool
    """Whether it was fitted; one of which the run says nothing, or less than of eight others, stands as it was."""


@dataclass(frozen=True, kw_only=True)
class Calibration(Generic[M]):
    """The result of ``PerfModel.fit``."""

    perf: M
    """The fitted model."""
    constants: tuple[Constant, ...]
    observations: tuple[Observation, ...]
    bands: Mapping[str, tuple[float, float]]
    """Kind of observation -> multipliers between which four in five of measured over predicted lie where the fit has not seen
    them; ``""`` is all kinds together."""
    kept: Mapping[str, BandCoverage] = field(default_factory=dict)
    """Kind of observation -> how many of those left out in turn were within its band then; ``""`` is all kinds together."""

    @property
    def error_before(self) -> float:
        """Median over the calls of |predicted - measured| / measured, with the constants as they were."""
        return _median_error(self.by_call(), 1)

    @property
    def error_after(self) -> float:
        """The same with the fitted constants."""
        return _median_error(self.by_call(), 2)

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Constants of which the run says nothing, or less than of eight others."""
        return tuple(c.name for c in self.constants if not c.determined)

    def by_call(self) -> dict[str, tuple[float, float, float]]:
        """Return call -> seconds (measured, predicted before, predicted after), summed over its phases.

        With several steps, the calls of the second are ``"actor.generate (2)"``.
        """
        by_call: dict[str, tuple[float, float, float]] = {}
        for o in self.observations:
            call = f"{o.call} ({o.step + 1})" if o.step else o.call
            m, b, a = by_call.get(call, (0.0, 0.0, 0.0))
            by_call[call] = m + o.measured_s, b + o.before_s, a + o.after_s
        return by_call

    @checked
    def band(self, kind: str = "") -> tuple[float, float]:
        """Return the multipliers of a kind, e.g. ``"generate.decode"``; of one that was not observed those of all."""
        return self.bands.get(kind, self.bands[""])

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per observation: step, call, phase, measured_s, before_s, after_s, error_before and error_after."""
        import pandas as pd

        rows = [
            {
                "step": o.step, "call": o.call, "phase": o.phase,
                "measured_s": o.measured_s, "before_s": o.before_s, "after_s": o.after_s,
                "error_before": o.before_s / o.measured_s - 1, "error_after": o.after_s / o.measured_s - 1,
            }
            for o in self.observations
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def view(self) -> dict[str, Any]:
        """Return plain data."""
        calls = [{"call": call, "measured_s": m, "before_s": b, "after_s": a} for call, (m, b, a) in self.by_call().items()]
        constants = [{"name": c.name, "before": c.before, "after": c.after, "determined": c.determined} for c in self.constants]
        return {
            "error_before": self.error_before, "error_after": self.error_after, "calls": calls, "constants": constants,
            "bands": {kind: list(band) for kind, band in self.bands.items()},
            "kept": {kind: [coverage.held, coverage.num_rows] for kind, coverage in self.kept.items()},
        }  # fmt: skip

    def __repr__(self) -> str:
        low, high = self.bands[""]
        coverage = f", and so were {coverage} that were left out in turn" if (coverage := self.kept.get("")) else ""
        lines = [
            f"Calibration from {len(self.observations)} observations: median error of a call {100 * self.error_before:.0f} % "
            f"before, {100 * self.error_after:.0f} % after; four in five phases within x{low:.2f} to x{high:.2f}{coverage}"
        ]
        for call, (measured, before, after) in self.by_call().items():
            errors = "".join(f"{100 * (s / measured - 1):+8.0f} %" for s in (before, after))
            lines.append(f"  {call:<28} {measured:8.3f} s measured, {before:8.3f} s and {after:8.3f} s predicted {errors}")
        for c in self.constants:
            change = f"{c.before:.4g} -> {c.after:.4g}" if c.determined else f"{c.before:.4g} (the run says too little of it)"
            lines.append(f"  {c.name:<28} {change}")
        return "\n".join(lines)


def fit(
    measured: Measured | Measurable | Sequence[Measured | Measurable], start: M, constants: Sequence[str] = FITTED
) -> Calibration[M]:
    """See ``PerfModel.fit``."""
    source: Any = measured
    several = isinstance(source, Sequence) and not isinstance(source, str | bytes | Traced)
    steps = [_measured(step) for step in (source if several else [source])]
    _check(steps, constants, start)
    observed = [o for step in steps for o in _observations(step, start)]
    if not observed:
        raise OptionError("there is nothing to calibrate from: no call of a model in the measured step; run a step first")
    seconds = np.array([o.seconds for o in observed])
    logs, weights = np.log(seconds), (seconds / seconds.max()) ** 0.25
    names = [name for name in constants if hasattr(start, name)]

    def predict(theta: Array, chosen: Sequence[str]) -> Array:
        perf = start._moved(dict(zip(chosen, theta, strict=True)))
        answers: dict[tuple[int, int], Mapping[str, float]] = {}
        predicted: Array = np.log(np.maximum([o.predict(perf, answers) for o in observed], 1e-9))
        return predicted

    # judged where all of them fit best: a constant far below its true value hardly shows where it stands
    slopes = jacobian(lambda t: predict(t, names), solve(lambda t: predict(t, names) - logs, np.zeros(len(names)), weights))
    most = np.abs(weights[:, None] * slopes).max(axis=0)
    least = max(LEAST_ELASTICITY, np.sort(most)[-MOST_FITTED:][0])
    chosen = [name for name, effect in zip(names, most, strict=True) if effect >= least]
    theta = solve(lambda t: predict(t, chosen) - logs, np.zeros(len(chosen)), weights)
    after = dict(zip(chosen, theta, strict=True))
    fitted = start._moved(after)
    before_s, after_s = np.exp(predict(np.zeros(0), [])), np.exp(predict(theta, chosen))
    own = leverages(lambda t: predict(t, chosen) - logs, theta, weights)
    left_out_s = seconds * (after_s / seconds) ** (1 / (1 - np.minimum(own, MOST_OWN)))
    observations = tuple(
        Observation(
            call=o.call,
            phase=o.phase,
            step=[step is o.step for step in steps].index(True),
            measured_s=o.seconds,
            before_s=float(b),
            after_s=float(a),
            left_out_s=float(without) if h < MOST_OWN else None,
        )
        for o, b, a, without, h in zip(observed, before_s, after_s, left_out_s, own, strict=True)
    )
    fitted_constants = tuple(
        Constant(name=n, before=getattr(start, n), after=getattr(fitted, n), determined=n in after) for n in names
    )
    off = _left_out(observations)
    bands = {kind: (math.exp(low), math.exp(high)) for kind, (low, high) in bands_of(off).items()}
    return Calibration(perf=fitted, constants=fitted_constants, observations=observations, bands=bands, kept=kept_by(off))


@dataclass(frozen=True)
class _Observed:
    """A phase that was measured, and how a model predicts it."""

    call: str
    phase: str
    seconds: float
    step: Measured
    call_id: int
    stretch: float
    """The factor by which ranks that share cores take longer."""

    def predict(self, perf: Predicts, answers: dict[tuple[int, int], Mapping[str, float]]) -> float:
        """Return the seconds; ``answers`` keeps each call's."""
        if self.phase == "rest":
            return perf.dispatch_s
        if self.phase == "task":
            return perf.host_task(*self.step.tasks[self.call_id])
        key = id(self.step), self.call_id
        if key not in answers:
            answers[key] = phase_seconds(perf, self.step.cluster, self.step.questions[self.call_id])
        seconds = answers[key]
        names = PASSES if self.phase == "passes" else (self.phase,)
        return self.stretch * sum(seconds.get(name, 0.0) for name in names)


def phase_seconds(perf: Predicts, cluster: ClusterSpec, questions: Iterable[MethodQuestion]) -> dict[str, float]:
    """Return a call's seconds by phase, on its ranks in the mean."""
    by_phase: dict[str, float] = {}
    for question in questions:
        answers = perf.method_costs(
            question.method, question.role, cluster, question.devices, question.rows, question.stale, question.first
        )
        for answer, ranks in zip(answers, question.weights, strict=True):
            for name, seconds in answer.items():
                by_phase[name] = by_phase.get(name, 0.0) + seconds * ranks / len(question.devices)
    return by_phase


def _observations(step: Measured, perf: Predicts) -> list[_Observed]:
    by_call: dict[int, list[Span]] = {}
    for span in step.trace:
        if span.device is not None and span.duration_s is not None:
            by_call.setdefault(span.call_id, []).append(span)
    observations = []
    for span in step.trace.calls:
        if span.duration_s is None or span.attrs.get("state", "done") != "done":
            continue
        call = f"{span.role}.{span.method}"
        if span.call_id in step.tasks:
            observations.append(_Observed(call, "task", span.duration_s, step, span.call_id, 1.0))
        elif step.questions.get(span.call_id):
            observations += _phases(step, perf, span, call, by_call.get(span.call_id, []))
    return [observation for observation in observations if observation.seconds >= SHORTEST_S]


def _phases(step: Measured, perf: Predicts, call: Span, name: str, spans: Sequence[Span]) -> list[_Observed]:
    """Return a call's phases that the model predicts at all, and the rest of its time."""
    questions = step.questions[call.call_id]
    predicted = phase_seconds(perf, step.cluster, questions)
    ranks: dict[int, dict[str, float]] = {span.rank or 0: {} for span in spans}
    for span in spans:
        if span.parent == call.method or (not span.parent and span.name != call.method):
            of_rank = ranks[span.rank or 0]
            of_rank[span.name] = of_rank.get(span.name, 0.0) + (span.duration_s or 0.0)
    if not ranks:
        return []
    names = list(dict.fromkeys(n for of_rank in ranks.values() for n in of_rank))
    groups: dict[str, tuple[str, ...]] = {n: (n,) for n in names if predicted.get(n, 0.0) > 0}
    if "wait" in names:
        # With pipeline stages a rank's passes and its waits are one: waiting is another stage's work.
        groups = {n: g for n, g in groups.items() if n not in PASSES} | {"passes": PASSES}
    stretch = _stretch(step.cluster, questions[0].devices)
    total = max(sum(s for n, s in of_rank.items() if any(n in g for g in groups.values())) for of_rank in ranks.values())
    phases = []
    for label, group in groups.items():
        mean = sum(of_rank.get(n, 0.0) for of_rank in ranks.values() for n in group) / len(ranks)
        phases.append(_Observed(name, label, mean, step, call.call_id, stretch))
    return [*phases, _Observed(name, "rest", max(0.0, (call.duration_s or 0.0) - total), step, call.call_id, 1.0)]


def _stretch(cluster: ClusterSpec, devices: Sequence[int]) -> float:
    if not cluster.shares_cores:
        return 1.0
    workers = Counter(cluster.node_of(device) for device in devices)
    return max((stretch(count, cluster.cores_of(node)) for node, count in workers.items()), default=1.0)


def _measured(step: Measured | Measurable) -> Measured:
    if isinstance(step, Measured):
        return step
    if not callable(getattr(step, "measured", None)) or isinstance(step, type):
        raise OptionError(
            "PerfModel.fit takes a real session (its last step), session.measured(step), or a list of these; "
            f"got {type(step).__name__}"
        )
    return step.measured()


def _check(steps: Sequence[Measured], constants: Sequence[str], start: Predicts) -> None:
    names = set(vars(start))
    unknown = [name for name in constants if name not in names and name not in FITTED]
    if unknown or not constants or (len(constants) > MOST_FITTED and tuple(constants) != FITTED):
        raise OptionError(
            f"one run fits 1 to {MOST_FITTED} constants of {type(start).__name__} ({', '.join(sorted(names))}); "
            f"got {list(constants)}"
        )
    for step in steps:
        if step.trace.source == "predicted":
            title = step.trace.title or "the trace"
            raise OptionError(f"{title} was predicted, not measured; calibrate from a step of a real session")


def _left_out(observations: Sequence[Observation]) -> dict[str, list[float]]:
    """Return, by kind, log measured over predicted of observations that the fit has not seen; a kind may have none that tells."""
    logs: dict[str, list[float]] = {}
    for o in observations:
        ones = logs.setdefault(o.kind, [])
        if o.left_out_s is not None:
            ones.append(math.log(o.measured_s / o.left_out_s))
    return logs


def _median_error(calls: Mapping[str, tuple[float, float, float]], which: int) -> float:
    errors = [abs(seconds[which] / seconds[0] - 1) for seconds in calls.values() if seconds[0] > 0]
    return float(np.median(errors)) if errors else 0.0


# -- robust, regularised least squares: Gauss and Newton's method with Levenberg's damping

PRIOR = 3e-3
"""Weight of the prior: a constant a factor of ten from its preset counts as much as one observation that is 13 % off."""
HUBER = 0.2
"""Log error from which on an observation counts linearly: about 20 %."""
MOST = math.log(100.0)
"""No constant moves by more than a factor of a hundred."""


def jacobian(function: Callable[[Array], Array], theta: Array, h: float = 1e-3) -> Array:
    """Return the derivatives by central differences, [observations, constants]."""
    columns = [(function(theta + h * e) - function(theta - h * e)) / (2 * h) for e in np.eye(len(theta))]
    return np.stack(columns, axis=1) if columns else np.zeros((len(function(theta)), 0))


def leverages(residuals: Callable[[Array], Array], theta: Array, weights: Array) -> Array:
    """Return how much of each residual its own observation has taken away, from 0 to 1: the diagonal of the hat matrix.

    A residual r of leverage h would be r / (1 - h) had its observation been left out (to first order; of least squares exactly:
    Allen, 1974), and was decided by it alone where h is 1.
    """
    if not len(theta):
        return np.zeros(len(weights))
    size, slopes = np.abs(residuals(theta)), jacobian(residuals, theta)
    robust = weights**2 * np.minimum(1.0, HUBER / np.maximum(size, 1e-12))
    inverse = np.linalg.inv(slopes.T @ (robust[:, None] * slopes) + PRIOR * np.eye(len(theta)))
    diagonal: Array = robust * np.einsum("ik,kl,il->i", slopes, inverse, slopes)
    return diagonal.clip(0.0, 1.0)


def solve(residuals: Callable[[Array], Array], theta: Array, weights: Array, rounds: int = 40) -> Array:
    """Minimise the robust, regularised sum of squares (``hfsdk.planner.perf.calibration``)."""
    if not len(theta):
        return theta

    def loss(residual: Array, at: Array) -> float:
        size = np.abs(residual)
        huber = np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)
        return float((weights**2 * huber).sum() + PRIOR * (at**2).sum())

    damping, residual = 1e-2, residuals(theta)
    for _ in range(rounds):
        robust = weights**2 * np.minimum(1.0, HUBER / np.maximum(np.abs(residual), 1e-12))
        slopes = jacobian(residuals, theta)
        hessian = slopes.T @ (robust[:, None] * slopes) + PRIOR * np.eye(len(theta))
        gradient = slopes.T @ (robust * residual) + PRIOR * theta
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -gradient)
        tried = np.clip(theta + step, -MOST, MOST)
        after = residuals(tried)
        if loss(after, tried) < loss(residual, theta):
            moved = float(np.abs(tried - theta).max())
            theta, residual, damping = tried, after, max(1e-9, damping / 5)
            if moved < 1e-5:
                break
        else:
            damping *= 8
            if damping > 1e9:
                break
    return theta
