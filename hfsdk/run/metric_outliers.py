"""The first bad number of a run: not finite, or far above all that came before it. Pure: rows in, a sentence out.

A number jumps where it is more than `TIMES` the largest of the steps before, and more than `DEVIATIONS` median absolute deviations
away from their median (which a handful of outliers does not move)::

    actor_grad_norm   0.8  1.1  0.9  1.3 | 40      the largest was 1.3, and 40 > 10 x 1.3: it jumps
    actor_grad_norm   0    0    0    0   | 2       nothing was learned before; a first gradient is no jump

Numbers below `LEAST` count as that much: a loss of 1e-8 that becomes 1e-6 is rounding. The rule is for the one bad step; what goes
wrong over many is the matter of :mod:`hfsdk.run.health`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from hfsdk.core.column_spread import LEAST, TIMES

DEVIATIONS = 10.0
"""Median absolute deviations from the median of the steps before."""
LEAST_STEPS = 3
"""The number of steps with a number other than 0 before which nothing jumps."""
KEPT = 32
"""Newest steps that a number is compared with."""

ROLES = ("actor", "critic", "cost_critic", "ptx", "reward", "cost")
UPDATES = [f"{role}_{name}" for role in ROLES for name in ("loss", "grad_norm")]
NAMES = frozenset({*UPDATES, "loss", "grad_norm", "policy_loss", "value_loss", "kl_loss", "kl_mean", "ratio", "approx_kl"})
"""hfsdk's own numbers, which are watched; the user's own metrics may be what they like."""
SCORES = frozenset({"score_mean", "cost_mean"})
"""Numbers of the user's functions: a rare reward is 0 for many steps, so that these must be `TIMES` larger still."""


@dataclass(frozen=True)
class BadNumber:
    """A number of a step's row."""

    step: int
    name: str
    """The number's name in the row, e.g. ``"actor_grad_norm"``; ``""``: the step failed before it had numbers."""
    value: float
    usual: float | None
    """Largest of the steps before, at least `LEAST`; ``None`` where the number is not finite."""
    asked: bool = False
    """Whether the user named the step, whatever its numbers are."""

    def __str__(self) -> str:
        if not self.name:
            return f"step {self.step} {'was asked for' if self.asked else 'failed'}"
        if self.usual is None:
            return f"{self.name} of step {self.step} is {self.value:g}"
        return f"{self.name} of step {self.step} jumped to {self.value:.3g}; it was {self.usual:.3g} at most before"


def watched(name: str) -> bool:
    """Whether a number of a step's row is one that the rules are for: a loss, a gradient's norm, a KL, a ratio, a score."""
    return name in NAMES or name in SCORES


class Jumps:
    """The rule over one run: give it each step's row, it returns the numbers that are bad in it."""

    def __init__(self, rows: Iterable[Mapping[str, object]] = ()) -> None:
        self._before: dict[str, deque[float]] = {}
        for row in rows:
            self.take(row)

    def take(self, row: Mapping[str, object]) -> list[BadNumber]:
        """Return a step's bad numbers in the row's order, those that are not finite first; jumps do not count as usual later."""
        wrong, jumps = [], []
        step = row.get("step")
        for name, value in row.items():
            if not watched(name) or not isinstance(value, int | float):
                continue
            if not math.isfinite(value):
                if name in SCORES:  # of a step in which no sample was scored there is none
                    continue
                wrong.append(BadNumber(int(step) if isinstance(step, int) else 0, name, float(value), None))
                continue
            before = self._before.setdefault(name, deque(maxlen=KEPT))
            if usual := jump(name, float(value), before):
                jumps.append(BadNumber(int(step) if isinstance(step, int) else 0, name, float(value), usual))
            else:
                before.append(float(value))
        return wrong + jumps


def jump(name: str, value: float, before: Iterable[float]) -> float | None:
    """Return the usual size of a number that jumps to ``value``; ``None`` where it does not."""
    numbers = [number for number in before if number]
    if len(numbers) < LEAST_STEPS:
        return None
    usual = max(LEAST, max(map(abs, numbers))) * (TIMES if name in SCORES else 1.0)
    middle = median(numbers)
    spread = median(abs(number - middle) for number in numbers)
    return usual if abs(value) > TIMES * usual and abs(value - middle) > DEVIATIONS * spread else None


def first_bad(rows: Iterable[Mapping[str, object]]) -> BadNumber | None:
    """Return the first bad number of a run's rows."""
    jumps = Jumps()
    for row in rows:
        if bad_numbers := jumps.take(row):
            return bad_numbers[0]
    return None
