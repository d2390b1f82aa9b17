"""The process groups of one role, always explicit: several models with different layouts live in one process.

Megatron keeps *one* set of groups in ``parallel_state``; some of its functions read it behind the caller's back. hfsdk never
fills it. :class:`RoleGroups` makes the groups of a role's :class:`~hfsdk.core.layout.Mesh` (whose tp axis may be permuted, so
groups are made with ``sort_ranks=False``) and hands them to megatron as a ``ProcessGroupCollection``::

    layout tp2 dp2       rank             0       1       2       3
                         tp groups       [0 1]   [0 1]   [2 3]   [2 3]
                         dp groups       [0 2]   [1 3]   [0 2]   [1 3]
                         world           [0 1 2 3]

A group is made by its members alone, so that a rank makes a handful of them however many ranks there are, and once for a world: the
next role that needs the same ranks in the same order takes it. Its name is given here. torch would name it by its ranks and by how
many groups the process has already, which differs between members (stages between the ends make no ``ends``; a role may be on a
part of the world), or is the name of a group that has gone, whose keys are still in the store: then members wait for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hfsdk.core.errors import LayoutError
from hfsdk.engine.process import plain_objects, rendezvous

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch.distributed.distributed_c10d import GroupName

    from hfsdk.core.layout import Coordinates, Mesh

T = TypeVar("T")


class _ProcessGroups:
    """The groups of this process in its world."""

    world: Any = None
    groups: ClassVar[dict[tuple[int, ...], dist.ProcessGroup]] = {}


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of some ranks of the world, in this order, made where it is not there yet; its members do this together.

    It has the backends of the world: small agreements and Python objects go by gloo also where tensors go by NCCL. Its ranks wait
    for each other as long as those of the world; torch would give it its own limits.
    """
    if _ProcessGroups.world is not dist.group.WORLD:
        forget_groups()
        _ProcessGroups.world = dist.group.WORLD
    key = tuple(ranks)
    if key not in _ProcessGroups.groups:
        order: dict[str, Any] = {} if sorted(key) == [*key] else {"sort_ranks": False}  # torch 2.11 sorts always
        with _named("hfsdk-" + hashlib.sha256(repr(key).encode()).hexdigest()):
            made = dist.new_group(list(ranks), timeout=rendezvous.world_timeout(), use_local_synchronization=True, **order)
        assert made is not None
        _ProcessGroups.groups[key] = made
    return _ProcessGroups.groups[key]


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Have torch call the next group by a name; its own ``new_group`` takes none (torch 2.11 to 2.13)."""
    torchs = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda ranks, use_hashed_name: cast("GroupName", name)
    try:
        yield
    finally:
        distributed_c10d._process_group_name = torchs


def forget_groups() -> None:
    """Let go of all groups; for the caller that ends the world, and them with it."""
    _ProcessGroups.world = None
    _ProcessGroups.groups.clear()


def device() -> torch.device:
    """Return where this process computes: its current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class RoleGroups:
    """The groups of one role on this rank.

    Making it is collective: every rank of the role does it at the same time, with the same mesh.

    Attributes:
        rank: this process in the role: in the pool, or in the part of it where the role lives.
        first: rank in the world of the role's rank 0.
        coordinates: its tp, pp and dp position.
        tp, pp, dp: the groups along one axis, in the order of that axis; ``mp`` is tp x pp.
        ends: this rank's first and last pipeline stage, which share tied embeddings; ``None`` on the stages between.
        world: all ranks of the role.
    """

    def __init__(self, mesh: Mesh, first: int | None = None) -> None:
        """Make the groups.

        Args:
            mesh: the ranks' coordinates.
            first: for a role on a part of the world: the part's first rank; only the part's ranks make the groups then.

        Raises:
            LayoutError: the mesh has not as many ranks as the pool's world.
        """
        size = dist.get_world_size()
        if first is None and mesh.layout.size != size:
            raise LayoutError(
                f"layout '{mesh.layout}' has {mesh.layout.size} ranks; the pool has {size} workers. "
                "Change the layout or place the role on another pool."
            )
        self.mesh = mesh
        self.first = first or 0
        self.rank = dist.get_rank() - self.first
        self.coordinates: Coordinates = mesh.coordinates(self.rank)
        self.device = device()
        self.tp = self._along(mesh.groups("tp"))
        self.dp = self._along(mesh.groups("dp"))
        self.pp = self._along(mesh.groups("pp"))
        self.mp = self._along(_model_parallel(mesh))
        self.alone = self._along([[rank] for rank in mesh.ranks])
        self.ends = self._ends()
        self.world = self._along([list(mesh.ranks)])

    def _along(self, groups: list[list[int]]) -> dist.ProcessGroup:
        """Return the group of that list of the role's ranks which has this one; ranks of other lists make theirs meanwhile."""
        (own_ranks,) = (ranks for ranks in groups if self.rank in ranks)
        return group_of([self.first + rank for rank in own_ranks])

    def _ends(self) -> dist.ProcessGroup | None:
        stages = self.mesh.groups("pp")
        pairs = [sorted({group[0], group[-1]}, key=group.index) for group in stages]
        between = [[rank] for group in stages for rank in group[1:-1]]
        own_ends = self._along([*pairs, *between])
        return own_ends if self.is_first_stage or self.is_last_stage else None

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer."""
        return self.pp_rank == self.pp_size - 1

    @property
    def tp_size(self) -> int:
        """Tensor-parallel size."""
        return self.mesh.layout.tp

    @property
    def pp_size(self) -> int:
        """Pipeline-parallel size."""
        return self.mesh.layout.pp

    @property
    def dp_size(self) -> int:
        """Data-parallel size."""
        return self.mesh.layout.num_replicas

    @property
    def tp_rank(self) -> int:
        """Position on the tp axis."""
        return self.coordinates.tp

    @property
    def pp_rank(self) -> int:
        """Position on the pp axis."""
        return self.coordinates.pp

    @property
    def dp_rank(self) -> int:
        """Position on the dp axis."""
        return self.coordinates.dp

    def collection(self) -> ProcessGroupCollection:
        """Return the groups in megatron's own form, every field set, so that nothing falls back to global state.

        There is no context or expert parallelism: ``cp`` and ``ep`` are this rank alone, and the combined groups follow.
        So are ``pos_embd`` (there are no learned positions) and, between the end stages, ``embd`` (``None`` asks the
        global state).
        """
        from megatron.core.process_groups_config import ProcessGroupCollection

        tp, dp, pp, mp, alone = self.tp, self.dp, self.pp, self.mp, self.alone
        return ProcessGroupCollection(
            tp=tp, pp=pp, mp=mp, cp=alone, tp_cp=tp, hcp=None, embd=self.ends or alone, pos_embd=alone,
            ep=alone, expt_tp=tp, tp_ep=tp, tp_ep_pp=mp, tp_dp_cp=self.world if self.pp_size == 1 else None,
            dp=dp, dp_cp=dp, expt_dp=dp, intra_dp_cp=dp, intra_expt_dp=dp, inter_dist_opt=None, intra_dist_opt=self.world,
        )  # fmt: skip

    def gather(self, value: T, kind: Any) -> list[T]:
        """Return the value of every rank of the role, in rank order; see :func:`plain_objects.gather`."""
        return plain_objects.gather(value, kind, self.world)


def _model_parallel(mesh: Mesh) -> list[list[int]]:
    """Return the groups of ranks that hold one replica: same dp, in the order pp, then tp."""
    replicas: dict[int, list[int]] = {}
    for rank in mesh.ranks:
        replicas.setdefault(mesh.coordinates(rank).dp, []).append(rank)

    def order(rank: int) -> tuple[int, int]:
        at = mesh.coordinates(rank)
        return at.pp, at.tp

    return [sorted(ranks, key=order) for ranks in replicas.values()]


class GlobalGroupsError(RuntimeError):
    """Megatron asked its global ``parallel_state`` for a group (raised only after :func:`poison_parallel_state`)."""


def poison_parallel_state() -> None:
    """Make every question to megatron's global groups raise :class:`GlobalGroupsError`; for tests.

    hfsdk never initialises ``parallel_state``, so such a question would get ``None`` or an assertion in the good case and
    another role's group in the bad one. Names that other megatron modules imported are replaced too.
    """
    from megatron.core import parallel_state

    modules = [module for name, module in list(sys.modules.items()) if name.startswith("megatron.") and module is not None]
    endings = ("_group", "_groups", "_rank", "_ranks", "_world_size", "_group_gloo")
    for name, function in list(vars(parallel_state).items()):
        if name.startswith("get_") and name.endswith(endings) and callable(function):
            trap = _trap(name)
            for module in modules:
                if vars(module).get(name) is function:
                    setattr(module, name, trap)


def _trap(name: str) -> Any:
    def trap(*_args: Any, **_kwargs: Any) -> Any:
        raise GlobalGroupsError(f"parallel_state.{name} was called; pass a group of the role instead")

    return trap
