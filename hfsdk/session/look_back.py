"""``LookBack``: the few snapshots that a run takes of itself, so that its steps can be done again; bounded in time and memory.

::

    step        0   1   2   3   4   5   6   7      one before the first step; the next when the steps since have paid for it:
    snapshots   s               s           s      together they take SHARE of the steps' time at most
    kept                        s           s      the newest two; from a bad step on those from before it

Each is a snapshot as ``session.snapshot`` takes it, but for that neither ``session.snapshots`` nor the history lists it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from hfsdk.core.errors import CheckpointError
from hfsdk.core.snapshot import Snapshot
from hfsdk.engine.calls.host_memory import too_large
from hfsdk.session.session_parts import Parts

SHARE = 0.04
"""Of the time of a run's steps that its snapshots may take; a run of a few steps has taken one all the same."""
MEMORY_SHARE = 0.25
"""Of the host memory that is free on a node that one of them may take."""
TOLD_SHARE = 0.05
"""From which on that is told."""


@dataclass(eq=False)
class LookBack:
    """See the module's text."""

    parts: Parts
    most: int
    """Snapshots that are kept; 0 takes none."""
    saving: Callable[[], AbstractContextManager[None]]
    """Marks the moment between two steps in which the run's own thread may copy."""
    snapshots: list[Snapshot] = field(default_factory=list)
    """The oldest first."""
    seconds: float = 0.0
    """That they have taken."""
    last_s: float = 0.0
    """That the last one took."""
    steps_s: float = 0.0
    """That the run's steps have taken."""
    frozen: bool = False
    """Whether a step was bad, so that those from before it are to stay."""
    told: bool = False
    """Whether was said what they take."""
    refused: str = ""
    """Why none is taken, where that is so."""

    def before_step(self) -> None:
        """Take one where the steps so far pay for it."""
        due = not self.snapshots or (not self.frozen and self.seconds + self.last_s <= SHARE * self.steps_s)
        if not self.most or self.refused or not due or not self.parts.snapshots.trained:
            return
        with self.saving():
            room = self.parts.snapshots.room()  # loads what is not loaded yet, which is no part of a snapshot
            begun = time.perf_counter()
            if words := too_large(room, MEMORY_SHARE):
                self._refuse(words)
                return
            if not self.told and (words := too_large(room, TOLD_SHARE)):
                self.told = True
                self.parts.context.notice(
                    f"a snapshot of this run takes {words}, and the newest {self.most} are kept for run.first_bad(); "
                    "session.train(..., look_back=0) takes none"
                )
            del self.snapshots[: len(self.snapshots) + 1 - self.most]
            try:
                self.snapshots.append(self.parts.snapshots.keep(f"before step {self.parts.context.next_step()}"))
            except CheckpointError as error:
                self._refuse(str(error))
                return
        self.last_s = time.perf_counter() - begun
        self.seconds += self.last_s

    def after_step(self, seconds: float) -> None:
        """A step has ended after so many seconds."""
        self.steps_s += seconds

    def before(self, step: int) -> Snapshot | None:
        """Return the newest snapshot that is a step older than ``step``, or else one right before it; ``None`` where none is."""
        fit = [snapshot for snapshot in self.snapshots if snapshot.steps <= step]
        older = [snapshot for snapshot in fit if snapshot.steps < step]
        return (older or fit or [None])[-1]  # type: ignore[list-item]

    def forget(self) -> None:
        """Let them go, and begin anew."""
        self.snapshots.clear()
        self.frozen = False

    def _refuse(self, why: str) -> None:
        self.refused = why
        self.parts.context.notice(
            f"this run takes no snapshots of itself, and run.first_bad() has none to go back to: one would take {why}. Place the "
            "roles over more nodes, or take one where there is room: session.snapshot('before')"
        )
