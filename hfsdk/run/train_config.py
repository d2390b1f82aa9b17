"""``TrainConfig``: what ``session.train`` was asked for, wherever the loop then runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError
from hfsdk.core.store import is_address
from hfsdk.run.best import KeepBest
from hfsdk.run.recovery import check_on_death
from hfsdk.run.trackers import Tracker
from hfsdk.session.algorithm import Algorithm, check_algorithm, check_roles
from hfsdk.session.parts import Parts
from hfsdk.session.streams import PromptStream, RowStream

LEVELS = ("light", "full", None)


@dataclass(frozen=True, eq=False)
class TrainConfig:
    """The arguments of :func:`hfsdk.run.train.train`."""

    algorithm: Algorithm
    prompts: Any
    steps: int
    metrics: Sequence[Callable[..., Any]]
    stop: Callable[[dict[str, Any]], bool] | None
    save_every: int
    folder: str | Path | None
    keep: int
    resume: str | Path | None
    keep_best: KeepBest | PromptStream | None
    track: str | Tracker | Sequence[str | Tracker]
    on_death: str
    max_restores: int
    shrink: bool
    look_back: int
    wait: bool
    level: str | None
    """What is checked in each step."""

    def check(self, parts: Parts) -> None:
        """Refuse what no run can be made of.

        Raises:
            OptionError: the algorithm is none, or options do not go together.
            PlacementError: the session lacks roles that it uses.
        """
        check_algorithm(self.algorithm)
        if self.level not in LEVELS:
            raise OptionError(f'check must be "light", "full" or None; got {shown(self.level)}')
        if self.save_every and self.folder is None:
            raise OptionError(f"save_every={self.save_every} needs a folder to save to (folder=...)")
        check_on_death(self.on_death, self.save_every, shrink=self.shrink)
        check_roles(self.algorithm, parts.deployment.models)

    def of(self, prompts: RowStream) -> TrainConfig:
        """Return the same with prompts that were made of its data."""
        return replace(self, prompts=prompts)

    def from_anywhere(self) -> TrainConfig:
        """Return the same for another process: with folders that mean the same there, without snapshots nobody asks for."""
        folder, resume = (
            path if path is None or is_address(path) else Path(path).absolute() for path in (self.folder, self.resume)
        )
        return replace(self, folder=folder, resume=resume, look_back=0)
