"""``ComparedRuns``: the finished runs of the session's last ``compare``, which ``resume=True`` takes instead of running them again.

A run is taken where the algorithm has equal options (and is of the same class, not of one defined anew), the seed and the number
of steps are equal, and it began at the same point: branch, counters and updates, roles as declared, place in the prompts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hfsdk.core.rows import Row
from hfsdk.session.streams import whole_text_of


@dataclass(frozen=True)
class ComparedRun:
    """One algorithm with one seed, all its steps done."""

    algorithm: type
    options: str
    """Of the algorithm, as they were when it ran: :func:`options_of`."""
    seed: int
    steps: int
    rows: Sequence[Row]
    """As the experiment has them."""
    branch: str

    def answers(self, algorithm: Any, seed: int, steps: int) -> bool:
        """Whether this run is what is asked for."""
        same = self.algorithm is type(algorithm) and self.options == options_of(algorithm)
        return same and (self.seed, self.steps) == (seed, steps)


def options_of(algorithm: Any) -> str:
    """Return a text that is the same for algorithms of one class with equal options, those that it does not show included."""
    own = getattr(algorithm, "__dict__", {})
    return f"{algorithm!r}{[(name, whole_text_of(value)) for name, value in sorted(own.items())]}"


@dataclass(eq=False)
class ComparedRuns:
    """See the module's text."""

    start: Hashable = None
    """Where they began; whatever tells two points apart."""
    finished: list[ComparedRun] = field(default_factory=list)

    def begin(self, start: Hashable, resume: bool) -> bool:
        """Begin a comparison at a point; return whether ``resume`` finds runs that began elsewhere, and so are dropped."""
        missed = resume and bool(self.finished) and start != self.start
        if not resume or start != self.start:
            self.start, self.finished = start, []
        return missed

    def find(self, algorithm: Any, seed: int, steps: int) -> ComparedRun | None:
        """Return a finished run, ``None`` where it has to be run."""
        return next((run for run in self.finished if run.answers(algorithm, seed, steps)), None)
