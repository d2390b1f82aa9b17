"""``RunsBar``: the bar of ``compare``: which run is under way, and how long the rest will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

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
