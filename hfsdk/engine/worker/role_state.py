"""``RoleStateTransfer``: one rank's part in exporting and restoring a role's state: kept, moved, or in a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hfsdk.core.arguments import Folder, StateMove
from hfsdk.core.errors import CheckpointError, WeightMismatchError
from hfsdk.core.roles import RoleSpec
from hfsdk.core.store import any_path
from hfsdk.engine.process.rendezvous import Link
from hfsdk.engine.process.safepoint import SafePoint
from hfsdk.engine.training import checkpoint, megatron_model
from hfsdk.engine.training.megatron_groups import RoleGroups
from hfsdk.engine.training.trainer import Trainer
from hfsdk.engine.weights import bridge, shares
from hfsdk.engine.weights.direct import NOTHING
from hfsdk.engine.weights.fingerprints import Strips, added
from hfsdk.engine.weights.moves import Inventory, inventory, way_of_state
from hfsdk.engine.weights.role_state import SCALAR_HEAD, Shard, Summary
from hfsdk.engine.weights.shares import StateShare
from hfsdk.engine.worker.hybrid_engine import HybridEngine
from hfsdk.engine.worker.kept_share import KeptShare
from hfsdk.engine.worker.role_host import RoleHost
from hfsdk.resharding.boxes import Box
from hfsdk.resharding.reshard_report import TransportReport

if TYPE_CHECKING:
    from torch import Tensor

Sums = dict[str, tuple[str, int]]
"""(dtype, fingerprint) of each Hugging Face tensor."""

OfRank = tuple[int, list[tuple[str, str, int]]]
"""A rank's answer about its tensors: its dp rank; and the name, the dtype and the fingerprint of each part."""

BASE = "base"
"""The name under which the weights beside adapters stand, all as one."""


class RoleStateTransfer:
    """Exports and restores this rank's part of a role's state; every method is collective over the role."""

    def __init__(self, spec: RoleSpec, worker: RoleHost, groups: RoleGroups, trainer: Trainer, transition: HybridEngine) -> None:
        self._spec, self._worker, self._groups = spec, worker, groups
        self._trainer, self._transition = trainer, transition
        self._base: list[Sums] = []
        """Fingerprints of a base beside adapters; none before they are needed."""

    def export(self) -> KeptShare:
        """Return a copy of this rank's share of the state; in pieces any layout reads it."""
        self._transition.to_training()
        return KeptShare(self._share(), self._trainer.shard)

    def _share(self) -> StateShare:
        """Return a copy of this rank's share, with the fingerprints of the role's weights."""
        sums = self._agreed(self._fingerprints())
        share = self._trainer.share()
        return replace(share, summary=replace(share.summary, fingerprints=sums))

    def _fingerprints(self) -> list[Sums]:
        """Return those of each Hugging Face tensor that the role learns and, beside adapters, of its base as one; by replica."""
        trainer, shard = self._trainer, self._trainer.shard
        with trainer.on_device("weights"):
            sums = self._of(shard, trainer.local_tensors(), shard.boxes)
            if self._spec.lora is not None:
                whole = replace(shard, spec=trainer.spec)
                boxes = [box for box in whole.boxes if not (shard.scalar and box.local == SCALAR_HEAD)]
                self._base = self._base or self._of(whole, megatron_model.base_tensors(trainer.model), boxes)
                for of_replica, base in zip(sums, self._base, strict=True):
                    of_replica[BASE] = self._spec.dtype, added([fingerprint for _, fingerprint in base.values()])
        return sums

    def forget_base(self) -> None:
        """Forget the base's fingerprints: the user's code may have changed the weights beside adapters."""
        self._base = []

    def _of(self, shard: Shard, tensors: Mapping[str, Tensor], boxes: Sequence[Box]) -> list[Sums]:
        # a box that several ranks of a replica hold counts once
        own_boxes = [box for box in boxes if shard.is_first(box)]
        sums = Strips([(box.local, box.local_start, box.size, box.start) for box in own_boxes]).of(tensors).tolist()
        dtypes = [str(tensors[box.local].dtype).removeprefix("torch.") for box in own_boxes]
        fingerprints = [(box.tensor, dtype, fingerprint) for box, dtype, fingerprint in zip(own_boxes, dtypes, sums, strict=True)]
        parts: list[dict[tuple[str, str], list[int]]] = [defaultdict(list) for _ in range(self._groups.dp_size)]
        for dp, these in self._groups.gather((self._groups.dp_rank, fingerprints), OfRank):
            for tensor, dtype, fingerprint in these:
                parts[dp][tensor, dtype].append(fingerprint)
        return [{tensor: (dtype, added(these)) for (tensor, dtype), these in of_replica.items()} for of_replica in parts]

    @staticmethod
    def _agreed(replicas: Sequence[Mapping[str, tuple[str, int]]]) -> dict[str, tuple[str, int]]:
        """Return those that all replicas have alike; of a state made of different ones nothing could be said."""
        first, *others = replicas
        return {
            tensor: fingerprint
            for tensor, fingerprint in first.items()
            if all(other.get(tensor) == fingerprint for other in others)
        }

    def _check(self, expected: Mapping[str, tuple[str, int]], source: str) -> None:
        """Compare the weights with the fingerprints that came with them; on all ranks alike.

        Raises:
            WeightMismatchError: they differ.
        """
        if not expected:
            return
        for dp, of_replica in enumerate(self._fingerprints()):
            wrong = [
                (tensor, left, of_replica[tensor][1]) for tensor, (dtype, left) in expected.items()
                if tensor in of_replica and of_replica[tensor][0] == dtype and of_replica[tensor][1] != left
            ]  # fmt: skip
            if wrong:
                tensor, left, there = wrong[0]
                if tensor == BASE:
                    raise WeightMismatchError(
                        f"{source} is of adapters beside another model than {self._spec.name} has ({self._spec.folder}): its "
                        f"weights have fingerprint {there:#018x}, those had {left:#018x}. Declare the role with the model that was "
                        "trained."
                    )
                ranks = [rank for rank in self._groups.mesh.ranks if self._groups.mesh.coordinates(rank).dp == dp]
                more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
                raise WeightMismatchError(
                    f"{tensor}{more} of {self._spec.name} on ranks {ranks} is not what {source} had: {left:#018x} left, "
                    f"{there:#018x} is there. Load a save, or rewind to a snapshot."
                )

    def restore(self, kept_share: KeptShare) -> None:
        """Take back a state of which this rank, in this layout, kept its share."""
        self._transition.to_training()
        self._trainer.take_share(kept_share.share)
        self._transition.replaced()
        self._check(kept_share.share.summary.fingerprints, "the snapshot")

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
        problems = [text for text in self._groups.gather(problem, str | None) if text]
        if problems:
            raise CheckpointError(problems[0])
        self._trainer.take_share(share)
        self._transition.replaced()
        self._check(parts[0][0].fingerprints, "the place that it comes from")

    # -- straight to another pool

    def offer(self) -> Inventory:
        """Return this rank's offer of the state to another pool."""
        self._transition.to_training()
        sums = self._agreed(self._fingerprints())
        with self._trainer.giving_share() as share:
            offered = inventory(share, self._trainer.shard, gives=True)[0]
        return replace(offered, summary=replace(offered.summary, fingerprints=sums))

    def need(self, summary: Summary) -> Inventory:
        """Return this rank's needs of a state that comes from another pool."""
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
        self._transition.replaced()
        self._check(move.given[0].summary.fingerprints, "the place that it comes from")
        return report

    # -- in a checkpoint

    def save(self, folder: str) -> dict[str, Any]:
        """Copy this rank's share and leave the writing to a thread, which ``Worker.saved`` asks."""
        name, trainer = self._spec.name, self._trainer
        saving = checkpoint.begin_save(name, self._share(), trainer.shard, self._groups, any_path(folder) / name)
        self._worker.saves[name] = saving
        return {"num_updates": trainer.num_updates}

    def load(self, arguments: Folder) -> Mapping[str, Any]:
        """Read the state of a checkpoint of any layout.

        Raises:
            CheckpointError: it is gone, or not whole.
            WeightMismatchError: what was loaded is not what was saved.
        """
        trainer, name = self._trainer, self._spec.name
        folder = any_path(arguments.folder) / name
        share = trainer.blank_share(checkpoint.read_checked(folder, self._groups, checked=arguments.checked))
        checkpoint.load(folder, share, trainer.shard)
        trainer.take_share(share)
        self._transition.replaced()
        self._check(share.summary.fingerprints, "the save")
        return {"num_updates": trainer.num_updates}
