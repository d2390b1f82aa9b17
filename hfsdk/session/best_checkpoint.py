"""``BestCheckpoint``: the best checkpoint of a run, as ``session.train(keep_best=...)`` keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCORE, STEP, START, MEASURE = "best.score", "best.step", "best.start", "best.measure"
"""Counters: the best held-out score, the step after which it was measured (-1 before the first), the score at the start, and a
number that tells how it was measured: prompts, sampling, reward."""


@dataclass(frozen=True)
class BestCheckpoint:
    """The best checkpoint of a run so far: ``run.best``."""

    score: float
    """Mean score of the held-out prompts' responses."""
    step: int
    """The step after which it was measured and saved; -1 before the first."""
    start: float
    """The held-out score before the first step."""
    folder: Path | str
    """Where it is, a path or an address in a store: ``session.load(run.best.folder)``."""

    @property
    def gain(self) -> float:
        """By how much the score rose from the start."""
        return self.score - self.start

    def __repr__(self) -> str:
        when = f"step {self.step}" if self.step >= 0 else "before the first step"
        return f"BestCheckpoint({when}: held-out score {self.score:.4g} ({self.start:.4g} at the start), in {self.folder})"
