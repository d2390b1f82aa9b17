"""Weights on their way to another pool, whose processes share no process group with those who hold them.

They go by the plan: every rank puts the boxes it is to give into its node's object store, boxes that the same ranks need as one
object, and a rank that needs an object maps it and copies its boxes to their places::

    pool "train", tp2                  object stores                       pool "rollout", tp2 x 2: ranks 2 to 5 of the plan
    rank 0: upper halves, norms  -->   for 2 and 4: upper halves     -->   rank 2 and rank 4
    rank 1: lower halves, norms  -->   for 3 and 5: lower halves     -->   rank 3 and rank 5
                                 -->   for 2, 3, 4 and 5: norms      -->   all four

Nobody waits for anybody: the holders go on as soon as their objects stand, and the others read when they come to it. A role that
moves for good leaves all its pieces (see ``role_state.py``) in one object per rank, for any layout to pick from.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Bundle, Weights
from hfsdk.core.spec import DTYPE_BYTES
from hfsdk.engine.calls.dispatch import mesh_of
from hfsdk.engine.calls.shadow_plan import plan_between
from hfsdk.engine.weights import fingerprints
from hfsdk.engine.weights.on_host import copy_on_host
from hfsdk.engine.weights.role_state import SCALAR_HEAD, Shard, StatePiece, slices
from hfsdk.resharding.box_moves import Move, moves_between
from hfsdk.resharding.boxes import Box, vllm_boxes
from hfsdk.resharding.proof import Key, Proof, Witness
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import TransportReport

_AS_NUMPY = {torch.bfloat16: torch.int16}
"""Dtypes that numpy does not have, and the dtype their bits travel as."""

Packed = Sequence[tuple[StatePiece, Any, torch.dtype]]
"""Pieces as they travel: (a piece whose values are left out, their bits as a numpy array, their dtype)."""


def pack(pieces: Iterable[StatePiece]) -> list[tuple[StatePiece, Any, torch.dtype]]:
    """Copy pieces into a form that is mapped without a copy where it arrives; only those of one replica are kept."""
    nothing = torch.empty(0)
    packed = []
    for piece in pieces:
        if piece.first:
            host_copy = copy_on_host(piece.data.detach())
            packed.append((replace(piece, data=nothing), _as_numpy(host_copy), host_copy.dtype))
    return packed


@contextmanager
def unpacked(holders: Iterable[Packed]) -> Iterator[list[StatePiece]]:
    """Return the pieces of several holders; they are read-only, of which torch would warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield [replace(piece, data=torch.from_numpy(bits).view(dtype)) for packed in holders for piece, bits, dtype in packed]


def num_bytes_of(packed: Packed) -> int:
    """Return the bytes of the values."""
    return sum(int(bits.nbytes) for _, bits, _ in packed)


# ---- to a shadow, by the plan

Boxes = Sequence[tuple[Key, Any, torch.dtype, int]]
"""The content of a bundle: (a box, its bits as a numpy array, their dtype, its fingerprint)."""


@dataclass(frozen=True, eq=False)
class Route:
    """The weights that one rank of a trained role gives to its shadow, or that one rank of the shadow takes."""

    name: str
    """Name of the role that the rank belongs to."""
    rank: int
    """The rank in the plan, where the shadow's ranks are numbered after the trained role's."""
    num_sources: int
    num_ranks: int
    moves: tuple[Move, ...]
    """Moves of this rank."""
    planned: tuple[int, ...]
    """Bytes that go between this rank and every other one, by the plan."""
    boxes: tuple[Box, ...] = ()
    """The boxes that this rank holds, if it gives, or needs, if it takes."""

    @cached_property
    def witness(self) -> Witness:
        """The witness of the boxes that this rank gives or takes."""
        gives = self.rank < self.num_sources
        return Witness(self.moves, self.rank, self.boxes if gives else (), () if gives else self.boxes)

    @classmethod
    def between(cls, trained: RoleSpec, shadow: RoleSpec, *, source: int | None = None, target: int | None = None) -> Route:
        """Return the route of rank ``source`` of the trained role, or of rank ``target`` of its shadow.

        Both sides plan for themselves; a shadow that infers has a training layout, for which there is no
        :class:`ReshardPlan`, but the same pieces and sources.
        """
        assert trained.train is not None
        num_sources, num_ranks = trained.train.size, trained.train.size + mesh_of(shadow).layout.size
        name, rank = (trained.name, source) if source is not None else (shadow.name, num_sources + (target or 0))
        if shadow.rollout is not None:
            plan = plan_between(trained, shadow)
            moves = tuple(_moves_of(plan, rank))
            planned = (plan.matrix[rank] + plan.matrix[:, rank]).tolist()
        else:
            nodes = (*trained.nodes, *shadow.nodes) or (0,) * num_ranks
            # The scalar head is fp32 whatever the model is, so bytes are counted move by move.
            of_all = moves_between(boxes_of(trained), boxes_of(shadow), nodes)
            moves = tuple(move for move in of_all if rank in (move.source, move.target))
            planned = [0] * num_ranks
            for move in moves:
                size = DTYPE_BYTES["fp32" if move.source_local == SCALAR_HEAD else trained.dtype]
                planned[move.source + move.target - rank] += size * move.numel
        boxes = boxes_of(trained)[rank] if source is not None else boxes_taken(shadow, rank - num_sources)
        return cls(name, rank, num_sources, num_ranks, moves, tuple(planned), boxes)

    def check(self, peer: int, counted: int) -> None:
        """Compare the bytes that went between this rank and another with the plan's.

        Raises:
            RuntimeError: they differ.
        """
        if counted != self.planned[peer]:
            if self.rank < self.num_sources:
                what = f"{self.name} rank {self.rank} has {counted} bytes for rank {peer - self.num_sources} of its shadow"
            else:
                what = f"{self.name} rank {self.rank - self.num_sources} received {counted} bytes from rank {peer} of its role"
            raise RuntimeError(f"{what}; the plan says {self.planned[peer]}")


def _moves_of(plan: ReshardPlan, rank: int) -> Iterator[Move]:
    for section in plan.sections:
        own_moves = [move for move in section.moves if rank in (move.source, move.target)]
        yield from replace(section, moves=tuple(own_moves)).all_moves()


def boxes_of(role: RoleSpec) -> list[tuple[Box, ...]]:
    """Return the boxes that every rank of a role holds in Megatron's model."""
    mesh, scalar = mesh_of(role), role.head == "scalar"
    assert role.learned is not None
    return [Shard(spec=role.learned, layout=mesh.layout, at=mesh.coordinates(r), scalar=scalar).boxes for r in mesh.ranks]


def boxes_taken(shadow: RoleSpec, rank: int) -> tuple[Box, ...]:
    """Return the boxes that a rank of a shadow takes."""
    if shadow.rollout is None:
        return boxes_of(shadow)[rank]
    assert shadow.learned is not None
    return tuple(vllm_boxes(shadow.learned, shadow.rollout.tp, rank % shadow.rollout.tp))


@torch.no_grad()
def give(
    route: Route, tensors: Mapping[str, torch.Tensor], keep: Callable[[Any], Any], dtype: torch.dtype | None = None
) -> tuple[list[Bundle], TransportReport]:
    """Keep the boxes that a rank is to give, those for the same ranks as one object; return references and a report.

    Args:
        route: this rank's route.
        tensors: this rank's local tensors; a part may be a view of them, so ``keep`` must copy.
        keep: puts an object where the shadow finds it and returns a reference.
        dtype: the dtype to cast to; by default the tensors' own.

    Raises:
        RuntimeError: the bytes are not those of the plan.
    """
    start = time.perf_counter()
    needed_by: dict[Key, list[int]] = defaultdict(list)
    for move in route.moves:
        needed_by[move.source_local, move.source_start, move.size].append(move.target)
    # Boxes for the same ranks go as one object: a store has a cost per object, and a model has thousands of boxes.
    together: dict[tuple[int, ...], list[Key]] = defaultdict(list)
    for key, these in needed_by.items():
        together[tuple(sorted(these))].append(key)
    bundles, counted = [], dict.fromkeys(range(route.num_sources, route.num_ranks), 0)
    sums = fingerprints.of_given(route.witness, tensors, dtype or {name: tensor.dtype for name, tensor in tensors.items()})
    for ranks, keys in together.items():
        boxes = [
            (key, *_bits(tensors[key[0]][slices(key[1], key[2])], dtype), int(sums[route.witness.number(route.rank, key)]))
            for key in keys
        ]
        num_bytes = sum(int(bits.nbytes) for _, bits, _, _ in boxes)
        for rank in ranks:
            counted[rank] += num_bytes
        targets = tuple(rank - route.num_sources for rank in ranks)
        bundles.append(Bundle(route.rank, targets, keep(boxes), num_bytes))
    for rank, count in counted.items():
        route.check(rank, count)
    nothing = (0,) * route.num_ranks
    return bundles, TransportReport(sum(counted.values()), 0, 0, 0, nothing, time.perf_counter() - start)


def _bits(part: torch.Tensor, dtype: torch.dtype | None) -> tuple[Any, torch.dtype]:
    """Return a tensor's values as they travel, and their dtype."""
    cast = part.detach() if dtype is None else part.detach().to(dtype)
    values = cast.contiguous() if cast.device.type == "cpu" else copy_on_host(cast)
    return _as_numpy(values), values.dtype


def _as_numpy(values: torch.Tensor) -> Any:
    return values.view(_AS_NUMPY.get(values.dtype, values.dtype)).numpy()


@torch.no_grad()
def take(route: Route, weights: Weights, targets: Callable[[], Mapping[str, torch.Tensor]]) -> tuple[tuple[int, ...], Proof]:
    """Write the boxes given to a rank into its local tensors; return the bytes received from every rank of the plan, and a proof.

    Nothing is written, and ``targets`` not called, unless what came is what was planned.

    Raises:
        RuntimeError: what came is not what the plan says.
    """
    places = {(move.source, (move.source_local, move.source_start, move.size)): move for move in route.moves}
    received = [0] * route.num_ranks
    came = [(bundle.source, box) for bundle in weights.bundles for box in bundle.content]
    for source, (key, bits, _, _) in came:
        if (source, key) not in places:
            raise RuntimeError(f"{route.name} got {key} from rank {source}, which the plan does not send there")
        received[source] += int(bits.nbytes)
    for peer, count in enumerate(received):
        route.check(peer, count)
    local = targets()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is mapped is read-only, of which torch would warn
        for source, (key, bits, dtype, _) in came:
            move = places[source, key]
            target = local[move.target_local][slices(move.target_start, move.size)]
            target.copy_(torch.from_numpy(bits).view(dtype))
    sums_by_source: dict[int, dict[int, int]] = defaultdict(dict)
    for source, (key, _, _, left) in came:
        sums_by_source[source][route.witness.number(source, key)] = left
    return tuple(received), fingerprints.compared(route.witness, local, sums_by_source, route.num_ranks)
