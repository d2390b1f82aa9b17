"""``Context``: the facts that all parts of a session share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hfsdk.assets.folder_tokenizer import FolderTokenizer
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import OptionError
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.user_line import warn_user
from hfsdk.engine.calls import queries as q
from hfsdk.models.counters import Counters
from hfsdk.session.client import ControllerClient
from hfsdk.session.role_specs import Backend

STEPS = "steps"
"""The counter of the steps of ``train``; a step's number is the same in history, dashboard and trace."""


class NearCluster(Protocol):
    """Does near the cluster what needs files there."""

    def declare(self, kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Declare a role; return its handle here."""
        ...

    def saves(self, what: str, folder: str, keep: int) -> Any:
        """Save or load the session there."""
        ...

    def tokenizer(self, folder: str) -> FolderTokenizer:
        """Return the tokenizer of a folder there."""
        ...


def no_snapshots(snapshot: Snapshot | str) -> Snapshot:
    """Find none: the session has not begun to keep them.

    Raises:
        OptionError: always.
    """
    raise OptionError(f"there is no snapshot {snapshot!r} here; session.snapshot('before') takes one")


@dataclass(eq=False)
class Context:
    """A session's name, devices, seed and way to the controller.

    Attributes:
        name: shown in pictures.
        cluster: the devices.
        runtime: the kind of runtime that runs the calls: ``"ray"`` or ``"simulated"``.
        client: the client that calls are sent through.
        seed: the seed of sampling, shuffling and new heads, where a call gives none.
        messages: notices so far.
        counters: numbers that are saved with the session.
        far: the worker near the cluster for what needs files there, where this process is not near it; else ``None``.
        find_snapshot: gives a snapshot by its name.
    """

    name: str
    cluster: ClusterSpec
    runtime: str
    client: ControllerClient
    seed: int
    messages: list[str] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    far: NearCluster | None = None
    find_snapshot: Callable[[Snapshot | str], Snapshot] = no_snapshots

    @property
    def simulated(self) -> bool:
        """Whether nothing is real: seconds are those of a virtual clock, and there are no values."""
        return self.runtime == "simulated"

    def next_step(self) -> int:
        """Return the number of the next step of ``train``: the trace's, until a first one was counted or loaded."""
        if self.counters.get(STEPS) is None:
            upcoming: int = self.client.send(q.UpcomingStep())
            return upcoming
        return self.counters.count(STEPS)

    def kept_counters(self) -> dict[str, float]:
        """Return the counters as a snapshot or a save keeps them: with the number that the next step has now."""
        return {**self.counters.all(), STEPS: self.next_step() - 1}

    @property
    def backend(self) -> Backend:
        """The runtime's properties that a role's declaration depends on."""
        return Backend(self.cluster, simulated=self.simulated)

    def notice(self, text: str) -> None:
        """Keep a notice for the session's picture, and warn."""
        self.messages.append(text)
        warn_user(text)


# -- the best checkpoint of a run

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
    """The checkpoint's place, a path or an address in a store: ``session.load(run.best.folder)``."""

    @property
    def gain(self) -> float:
        """The rise of the score from the start."""
        return self.score - self.start

    def __repr__(self) -> str:
        when = f"step {self.step}" if self.step >= 0 else "before the first step"
        return f"BestCheckpoint({when}: held-out score {self.score:.4g} ({self.start:.4g} at the start), in {self.folder})"


# -- the save that is written in the background, for what has to wait for it


class BackgroundSave(Protocol):
    """A save under way."""

    @property
    def looked(self) -> bool:
        """Whether someone has learned how it ended."""
        ...

    def settle(self) -> None:
        """Wait until it is over, however it ends."""
        ...

    def wait(self) -> object:
        """Wait until it is complete.

        Raises:
            HfsdkError: the error that it failed with.
        """
        ...


class PendingSave:
    """The last save in the background: it needs its roles and their workers until it is over."""

    def __init__(self) -> None:
        self._save: BackgroundSave | None = None

    def begin(self, save: BackgroundSave) -> None:
        """Take a save that has begun."""
        self._save = save

    def settle(self) -> None:
        """Wait until it is over, however it ends."""
        if self._save is not None:
            self._save.settle()

    def take(self) -> None:
        """Wait for a save whose end nobody has looked at, and forget it.

        Raises:
            HfsdkError: the error that it failed with.
        """
        if self._save is not None and not self._save.looked:
            self._save.wait()
        self._save = None
