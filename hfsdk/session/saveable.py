"""``Saveable``: what of a session a checkpoint keeps, and takes the place of when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hfsdk.models import ModelHandle
from hfsdk.session.context import Context
from hfsdk.session.deployment import Deployment
from hfsdk.session.folder_lock import Turns
from hfsdk.session.history_log import HistoryLog
from hfsdk.session.streams import StreamPlaces


@dataclass(eq=False)
class Saveable:
    """What of a session is saved and loaded, and who it belongs to."""

    context: Context
    deployment: Deployment
    places: StreamPlaces
    log: HistoryLog
    turns: Turns = field(default_factory=Turns)
    """Of the threads that save this session."""

    def trained(self) -> list[ModelHandle]:
        """Return the roles whose weights are saved."""
        return [handle for handle in self.deployment.book if handle.role.trainable]

    def to_save(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides weights."""
        context = self.context
        positions = self.places.positions()
        return {"seed": context.seed, "counters": context.kept_counters(), "positions": positions, **self.log.to_save()}

    def take(self, saved: Mapping[str, Any]) -> None:
        """Take over what a checkpoint kept besides weights."""
        self.context.seed = int(saved["seed"])
        self.context.counters.replace(saved["counters"])
        self.log.take(saved)
        self.places.take(saved["positions"])
