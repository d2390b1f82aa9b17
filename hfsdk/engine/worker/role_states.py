"""``RoleStates``: one rank's part in exporting and restoring a role's state: kept, moved, or in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hfsdk.core.arguments import Folder, StateMove
from hfsdk.core.errors import CheckpointError
from hfsdk.core.roles import RoleSpec
from hfsdk.core.store import any_path
from hfsdk.engine.process.rendezvous import Link
from hfsdk.engine.process.safepoint import SafePoint
from hfsdk.engine.training import megatron_checkpoint
from hfsdk.engine.training.megatron_groups import RoleGroups
from hfsdk.engine.training.trainer import Trainer
from hfsdk.engine.weights import bridge, shares
from hfsdk.engine.weights.direct import NOTHING
from hfsdk.engine.weights.moves import Inventory, inventory, way_of_state
from hfsdk.engine.weights.role_state import Summary
from hfsdk.engine.worker.kept_share import KeptShare
from hfsdk.engine.worker.role_host import RoleHost
from hfsdk.engine.worker.transition import Transition
from hfsdk.resharding.reshard_report import TransportReport


class RoleStates:
    """See the module's text; every method is collective over the role."""

    def __init__(self, spec: RoleSpec, worker: RoleHost, groups: RoleGroups, trainer: Trainer, transition: Transition) -> None:
        self._spec, self._worker, self._groups = spec, worker, groups
        self._trainer, self._transition = trainer, transition

    def export(self) -> KeptShare:
        """Return a copy of this rank's share of the state; in pieces any layout reads it."""
        self._transition.to_training()
        return KeptShare(self._trainer.share(), self._trainer.shard)

    def restore(self, kept: KeptShare) -> None:
        """Take a state back of which this rank, in this layout, kept its share."""
        self._transition.to_training()
        self._trainer.take_share(kept.share)
        self._transition.stale = True

    def restore_parts(self, parts: Sequence[tuple[Summary, bridge.Packed]]) -> None:
        """Take over a state that the ranks of another place or layout have packed (``KeptShare.packed``).

        Raises:
            CheckpointError: the parts are not all of it.
        """
        self._transition.to_training()
        share, problem = self._trainer.blank_share(parts[0][0]), None
        try:
            with bridge.unpacked(packed for _, packed in parts) as pieces:
                shares.fill(share, self._trainer.shard, pieces)
        except CheckpointError as error:
            problem = str(error)
        problems = [text for text in self._groups.gather_objects(problem) if text]
        if problems:
            raise CheckpointError(problems[0])
        self._trainer.take_share(share)
        self._transition.stale = True

    # -- straight to another pool

    def offer(self) -> Inventory:
        """Say what this rank gives of the state to another pool."""
        self._transition.to_training()
        with self._trainer.giving_share() as share:
            return inventory(share, self._trainer.shard, gives=True)[0]

    def need(self, summary: Summary) -> Inventory:
        """Say what this rank takes of a state that comes from another pool."""
        return inventory(self._trainer.blank_share(summary, "meta"), self._trainer.shard, gives=False)[0]

    def give(self, move: StateMove[Inventory], link: Link, safe: SafePoint) -> TransportReport:
        """Give the state to the pool where the role will live; it stays here too. Collective over both."""
        way = way_of_state(self._spec.name, move.rank, move.given, move.taken, move.nodes)
        with self._trainer.giving_share() as share:
            sources = inventory(share, self._trainer.shard, gives=True)[1]
            return self._worker.exchange(way, link, sources, NOTHING, safe)

    def take(self, move: StateMove[Inventory], link: Link, safe: SafePoint) -> TransportReport:
        """Take the state over from the pool where the role lived; collective over both."""
        way = way_of_state(self._spec.name, move.rank, move.given, move.taken, move.nodes)
        with self._trainer.taking_share(move.given[0].summary) as share:
            targets = inventory(share, self._trainer.shard, gives=False)[1]
            report = self._worker.exchange(way, link, NOTHING, targets, safe)
        self._transition.stale = True
        return report

    # -- in a checkpoint

    def save(self, folder: str) -> dict[str, Any]:
        """Copy this rank's share and leave the writing to a thread, which ``Worker.saved`` asks."""
        name, trainer = self._spec.name, self._trainer
        saving = megatron_checkpoint.begin_save(name, trainer.share(), trainer.shard, self._groups, any_path(folder) / name)
        self._worker.saves[name] = saving
        return {"num_updates": trainer.num_updates}

    def load(self, asked: Folder) -> Mapping[str, Any]:
        """Read the state of a checkpoint of any layout.

        Raises:
            CheckpointError: it is gone, or not whole.
        """
        trainer, name = self._trainer, self._spec.name
        folder = any_path(asked.folder) / name
        share = trainer.blank_share(megatron_checkpoint.read_checked(folder, self._groups, checked=asked.checked))
        megatron_checkpoint.load(folder, share, trainer.shard)
        trainer.take_share(share)
        self._transition.stale = True
        return {"num_updates": trainer.num_updates}
