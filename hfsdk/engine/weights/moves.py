"""A role that moves to a pool on other devices: its state, straight from the ranks that have it to the ranks that need it.

Nothing is copied on the way. A rank gives its share (``shares.py``) where it lies, weights, masters and moments; what one takes is
written where its own share lies, and data-parallel ranks then give each other the rest::

    pool "actor (before)", tp2        link of 4                       pool "actor", dp2, distributed AdamW
    rank 0: upper halves         -->  boxes of Hugging Face's    -->  rank 2: first half of all weights, masters, moments
    rank 1: lower halves         -->  tensors that both have     -->  rank 3: second half     <-- weights -->  rank 2

Until the last byte is there the role goes on to live in the old pool: a move that fails costs nothing but itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hfsdk.core.spec import DTYPE_BYTES
from hfsdk.engine.weights import shares
from hfsdk.engine.weights.bridge import Route
from hfsdk.engine.weights.direct import Tensors, Way
from hfsdk.engine.weights.role_state import Shard, Summary
from hfsdk.engine.weights.shares import StateShare
from hfsdk.engine.weights.transport import TORCH_DTYPES
from hfsdk.resharding.box_moves import Move, moves_between
from hfsdk.resharding.boxes import Box
from hfsdk.resharding.proof import Witness

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Inventory:
    """The parts of a state that one rank gives or takes."""

    summary: Summary
    boxes: Mapping[str, tuple[Box, ...]]
    """The boxes by dtype; a box's tensor is ``"kind name"``, and each has its own local tensor."""


def inventory(share: StateShare, shard: Shard, *, gives: bool) -> tuple[Inventory, Tensors]:
    """Return a rank's boxes and their values, views of the share's; all givers together give each number once."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    tensors: dict[str, torch.Tensor] = {}
    for number, (strip, box, part, first) in enumerate(shares.parts(share, shard)):
        if first or not gives:
            local = str(number)
            tensors[local] = part
            boxes[NAMES[strip.dtype]].append(Box(f"{strip.kind} {box.tensor}", box.start, box.size, local, (0,) * part.dim()))
    return Inventory(share.summary, {dtype: tuple(these) for dtype, these in boxes.items()}), tensors


def way_of_state(
    role: str, rank: int, sources: Sequence[Inventory], targets: Sequence[Inventory], nodes: Sequence[int] = ()
) -> Way:
    """Plan, as every rank does for itself, how a state goes over a link.

    Args:
        role: the role's name.
        rank: this rank in the link, the old place's ranks first.
        sources: the inventory of each rank of the old place.
        targets: the inventory of each rank of the new place.
        nodes: the number of every rank's node.
    """
    num_ranks = len(sources) + len(targets)
    parts: list[tuple[str, tuple[Move, ...]]] = []
    own_moves: list[Move] = []
    planned = [0] * num_ranks
    for dtype in sorted({dtype for inventory in (*sources, *targets) for dtype in inventory.boxes}):
        present, needed = ([inventory.boxes.get(dtype, ()) for inventory in side] for side in (sources, targets))
        moves = moves_between(present, needed, nodes or (0,) * num_ranks)
        parts.append((dtype, moves))
        for move in moves:
            if rank in (move.source, move.target):
                own_moves.append(move)
                # The sum less this rank is the peer, whichever end this rank is; a move within the rank counts for itself.
                planned[move.source + move.target - rank] += DTYPE_BYTES[dtype] * move.numel
    sides = [*((inventory, ()) for inventory in map(_boxes, sources)), *(((), inventory) for inventory in map(_boxes, targets))]
    witness = Witness([move for _, moves in parts for move in moves], rank, *sides[rank])
    return Way(Route(role, rank, len(sources), num_ranks, tuple(own_moves), tuple(planned)), None, witness, tuple(parts))


def _boxes(inventory: Inventory) -> tuple[Box, ...]:
    return tuple(box for boxes in inventory.boxes.values() for box in boxes)
