"""Which constant of the model decides between two plans: at which value of it they would take equally long (``Hinge``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial

from hfsdk.core.alternative import Hinge
from hfsdk.planner.perf.perf_model import MOST_SHARE, PerfModel
from hfsdk.planner.search.solution import Solution

LOGS = tuple(math.log(factor) for factor in (1.25, 1.6, 2.0, 2.8, 4.0))
"""How far constants are moved, each way."""
HALVINGS = 8
AT_MOST = {"exposed_reduction": 1.0}
"""Constants that have a largest value besides efficiencies."""


def hinges(best: Solution, others: Sequence[Solution]) -> tuple[Hinge | None, ...]:
    """Return, for each of some slower plans, the constant that has to change least for it to be as fast as the best one.

    Both keep their layouts. ``None`` where no constant alone does it within a factor of four, or where workers share cores.
    """
    if best.leaf.space.tables.cluster.shares_cores:
        return (None,) * len(others)
    perf = best.leaf.space.tables.perf
    known: dict[PerfModel, float] = {}

    def seconds(made: PerfModel) -> float:
        if made not in known:
            known[made] = best.seconds_by(made)
        return known[made]

    def behind(one: Solution, made: PerfModel) -> float:
        return one.seconds_by(made) - seconds(made)

    return tuple(_least(perf, partial(behind, one)) for one in others)


def _least(perf: PerfModel, behind: Callable[[PerfModel], float]) -> Hinge | None:
    found: tuple[float, str] | None = None
    for constant in fields(perf):
        for log in _turns(perf, constant.name, behind):
            if found is None or abs(log) < abs(found[0]):
                found = log, constant.name
    if found is None:
        return None
    log, name = found
    return Hinge(constant=name, now=getattr(perf, name), at=getattr(_moved(perf, name, log), name))


def _turns(perf: PerfModel, name: str, behind: Callable[[PerfModel], float]) -> list[float]:
    """Return the nearest turn upwards and the nearest downwards, as logarithms of the factor."""
    if not getattr(perf, name):
        return []
    found = []
    for sign in (1.0, -1.0):
        near = 0.0
        for far in (sign * log for log in LOGS):
            if behind(_moved(perf, name, far)) <= 0:
                for _ in range(HALVINGS):
                    middle = (near + far) / 2
                    near, far = (near, middle) if behind(_moved(perf, name, middle)) <= 0 else (middle, far)
                found.append(far)
                break
            near = far
    return found


def _moved(perf: PerfModel, name: str, log: float) -> PerfModel:
    most = MOST_SHARE if name.endswith("efficiency") else AT_MOST.get(name, math.inf)
    return replace(perf, **{name: min(most, getattr(perf, name) * math.exp(log))})
