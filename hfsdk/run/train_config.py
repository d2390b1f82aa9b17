"""``TrainConfig``: the checked arguments of ``session.train``, which travel to where the loop runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError
from hfsdk.core.store import is_address
from hfsdk.run.best import KeepBest
from hfsdk.run.trackers import Tracker
from hfsdk.session.algorithm import Algorithm, check_algorithm, check_roles
from hfsdk.session.role_book import Models
from hfsdk.session.streams import PromptStream, RowStream

LEVELS = ("light", "full", None)

RAISE, RESTORE = "raise", "restore"
"""The answers of a run to a worker's death."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainConfig:
    """The arguments of :meth:`hfsdk.Session.train`, whose text says what each does, but for ``progress``."""

    algorithm: Algorithm
    prompts: Any
    steps: int
    metrics: Sequence[Callable[..., Any]] = ()
    stop: Callable[[dict[str, Any]], bool] | None = None
    save_every: int = 0
    folder: str | Path | None = None
    keep: int = 1
    resume: str | Path | None = None
    keep_best: KeepBest | PromptStream | None = None
    track: str | Tracker | Sequence[str | Tracker] = ()
    on_death: str = RAISE
    max_restores: int = 3
    shrink: bool = False
    check: str | None = "light"
    look_back: int = 2
    wait: bool = True

    def validate(self, models: Models) -> None:
        """Refuse arguments of which no run can be made.

        Raises:
            OptionError: the algorithm is none, or options do not go together.
            PlacementError: the session lacks roles that it uses.
        """
        check_algorithm(self.algorithm)
        if self.check not in LEVELS:
            raise OptionError(f'check must be "light", "full" or None; got {shown(self.check)}')
        if self.save_every and self.folder is None:
            raise OptionError(f"save_every={self.save_every} needs a folder to save to (folder=...)")
        if self.on_death not in (RAISE, RESTORE):
            raise OptionError(f'on_death is "{RAISE}" or "{RESTORE}"; got {self.on_death!r}')
        if self.on_death == RESTORE and not self.save_every:
            raise OptionError(
                'on_death="restore" goes on from the last save, and this run makes none: give it a folder and say how many steps a '
                'death may cost, e.g. folder="checkpoint", save_every=10'
            )
        if self.shrink and self.on_death != RESTORE:
            raise OptionError('shrink=True says where a run goes on after a node\'s death; it needs on_death="restore"')
        check_roles(self.algorithm, models)

    def of(self, prompts: RowStream) -> TrainConfig:
        """Return the same with prompts that were made of its data."""
        return replace(self, prompts=prompts)

    def from_anywhere(self) -> TrainConfig:
        """Return the same for another process: folders that mean the same there, no snapshots, which nobody asks for."""
        folder, resume = (
            path if path is None or is_address(path) else Path(path).absolute() for path in (self.folder, self.resume)
        )
        return replace(self, folder=folder, resume=resume, look_back=0)
