"""The place of every rank in a weight transition: its coordinates in both layouts, and its node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hfsdk.core.checks import is_whole, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.layout import Coordinates, Layout, Mesh

Groups = dict[tuple[int, int], tuple[int, ...]]
"""The ranks at each (pp, tp) of a layout."""


@dataclass(frozen=True)
class RankOrder:
    """How the ranks of two filled layouts stand on the same devices, or on a pool each."""

    train: Layout
    rollout: Layout
    grouping: str
    """``"strided"``: the training shard lies inside the rollout shard (HybridFlow); ``"vanilla"``: consecutive in both."""
    apart: bool
    """Whether the rollout lives on ranks of its own, numbered after the trainer's."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.train.size + self.rollout.size * self.apart

    def train_at(self, rank: int) -> Coordinates | None:
        """Return the position of a rank in the training layout (``None`` for one that only generates)."""
        return self._trainer(rank) if rank < self.train.size else None

    def rollout_at(self, rank: int) -> Coordinates | None:
        """Return the position of a rank in the rollout layout (``None`` for one that only trains)."""
        if self.apart:
            rank -= self.train.size
        return self._generator(rank) if rank >= 0 else None

    def train_groups(self) -> Groups:
        """Return the ranks that hold the same training shard."""
        return self._groups(self.train_at)

    def rollout_groups(self) -> Groups:
        """Return the ranks that need the same rollout shard."""
        return self._groups(self.rollout_at)

    def _groups(self, position: Callable[[int], Coordinates | None]) -> Groups:
        groups: Groups = {}
        for rank in range(self.num_ranks):
            at = position(rank)
            if at is not None:
                groups[at.pp, at.tp] = (*groups.get((at.pp, at.tp), ()), rank)
        return groups

    def _trainer(self, rank: int) -> Coordinates:
        if self.grouping == "strided":  # no axis is permuted for a rollout on other ranks
            return Mesh(layout=self.train, rollout_tp=1 if self.apart else self.rollout.tp).coordinates(rank)
        return _consecutive(self.train, rank)

    def _generator(self, rank: int) -> Coordinates:
        train, rollout = self.train, self.rollout
        if self.grouping == "vanilla" or self.apart:
            return _consecutive(rollout, rank)
        rest = rank // rollout.tp
        if train.pp % rollout.pp:
            per_stage = rollout.num_replicas
            return Coordinates(tp=rank % rollout.tp, pp=rest // per_stage, dp=rest % per_stage)
        pp = self._trainer(rank).pp // (train.pp // rollout.pp)
        # replicas: the groups of rollout.tp consecutive ranks within one of the rollout's stages, in order
        first = pp * (train.size // rollout.pp) // rollout.tp
        return Coordinates(tp=rank % rollout.tp, pp=pp, dp=rest - first)


def _consecutive(layout: Layout, rank: int) -> Coordinates:
    """Return a position where tp varies fastest, then pp, then dp: the paper's rank order."""
    return Coordinates(tp=rank % layout.tp, pp=rank // layout.tp % layout.pp, dp=rank // (layout.tp * layout.pp))


def nodes_of_ranks(nodes: Sequence[int] | int | None, num_ranks: int) -> tuple[int, ...]:
    """Return the node of every rank, given each, or how many ranks a node has; ``None``: all are on one.

    Raises:
        OptionError: the nodes are not whole numbers, or are for another number of ranks.
    """
    if nodes is None:
        return (0,) * num_ranks
    if isinstance(nodes, int) and is_whole(nodes) and nodes >= 1:
        return tuple(rank // nodes for rank in range(num_ranks))
    if not isinstance(nodes, list | tuple) or not all(is_whole(node) and node >= 0 for node in nodes):
        wanted = "how many ranks a node has, at least 1, or a list with every rank's node"
        raise OptionError(f"nodes must be {wanted}; got nodes={shown(nodes)}")
    if len(nodes) != num_ranks:
        raise OptionError(f"the plan has {num_ranks} ranks; nodes names {len(nodes)}")
    return tuple(int(node) for node in nodes)
