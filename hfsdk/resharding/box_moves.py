"""Moves between ranks that hold boxes of tensors and ranks that need boxes, as pure arithmetic.

The boxes may be of any engine on either side; :mod:`hfsdk.resharding.layer_sections` plans those of Megatron and vLLM.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hfsdk.resharding.boxes import Box, Offsets, inside, intersect

Side = tuple[tuple[tuple[int, ...], tuple[Box, ...]], ...]
"""The boxes of each side: (ranks, the boxes that they hold or need)."""

Ends = Mapping[tuple[bool, str], Offsets]
"""The ends of the boxes of a local tensor, by (whether it is a source, its name)."""

_Holders = list[tuple[tuple[int, ...], Box]]
"""Ranks that hold a box."""


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a tensor that goes from ``source`` rank's local parameter into ``target`` rank's (maybe itself)."""

    tensor: str
    source: int
    target: int
    source_local: str
    source_start: Offsets
    target_local: str
    target_start: Offsets
    size: Offsets

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def of_layer(self, by: int) -> Move:
        """Return the same move ``by`` layers further on."""
        return Move(
            _shifted(self.tensor, by), self.source, self.target, _shifted(self.source_local, by), self.source_start,
            _shifted(self.target_local, by), self.target_start, self.size,
        )  # fmt: skip


def ends_of(moves: Iterable[Move], rank: int) -> Ends:
    """Return how large the local tensors of a rank have to be for these moves."""
    ends: dict[tuple[bool, str], Offsets] = {}
    for move in moves:
        gives, takes = (True, move.source_local), (False, move.target_local)
        for key, at, start in ((gives, move.source, move.source_start), (takes, move.target, move.target_start)):
            if at == rank:
                end = tuple(map(operator.add, start, move.size))
                ends[key] = tuple(map(max, ends.get(key, end), end))
    return ends


def moves_between(present: Sequence[Sequence[Box]], needed: Sequence[Sequence[Box]], nodes: Sequence[int]) -> tuple[Move, ...]:
    """Plan how ranks, each with the boxes it needs, get them from other ranks, numbered before them, with the boxes they hold.

    The boxes may be of any engine on either side; a plan of a transition is for those of Megatron and vLLM.
    """
    before: Side = tuple(((rank,), tuple(boxes)) for rank, boxes in enumerate(present))
    after: Side = tuple(((rank,), tuple(boxes)) for rank, boxes in enumerate(needed, len(present)))
    return cheapest_moves(before, after, nodes, [0] * len(nodes), one_source_per_node=True)


def cheapest_moves(
    present: Side, needed: Side, nodes: Sequence[int], sent: list[int], *, count: int = 1, one_source_per_node: bool = False
) -> tuple[Move, ...]:
    """Take every needed box from the rank itself where it holds it, else from its node, else from any, the idlest first.

    Args:
        present: the boxes that each rank holds.
        needed: the boxes that each rank needs.
        nodes: the node of every rank.
        sent: elements that every rank has sent so far; counted on here.
        count: how often these moves will happen.
        one_source_per_node: all ranks of a node take a part from the same holder.
    """
    by_tensor: dict[str, _Holders] = defaultdict(list)
    for ranks, boxes in present:
        for box in boxes:
            by_tensor[box.tensor].append((ranks, box))
    moves = []
    sources: dict[tuple[str, Offsets, Offsets, int], tuple[int, Box]] = {}
    for targets, boxes in needed:
        for box in boxes:
            parts = _parts_of(box, by_tensor[box.tensor])
            for target in targets:
                for (start, size), who in parts.items():
                    key = box.tensor, start, size, nodes[target]
                    # Ranks of a node that need the same part read it from one object in the node's store, so it crosses the network
                    # once.
                    chosen = sources.get(key) if one_source_per_node else None
                    source, holder = chosen or _cheapest_source(who, target, nodes, sent)
                    # Loads are counted for all layers that these moves stand for, so that the next section goes on where this one
                    # leaves off.
                    if source != target and chosen is None:
                        sent[source] += count * math.prod(size)
                    if one_source_per_node:
                        sources[key] = source, holder
                    moves.append(Move(
                        box.tensor, source, target, holder.local, inside(holder, start), box.local, inside(box, start), size,
                    ))  # fmt: skip
    return tuple(moves)


def _parts_of(needed: Box, holders: _Holders) -> dict[tuple[Offsets, Offsets], _Holders]:
    """Return the distinct parts of a box, (start, size), and who holds each."""
    parts: dict[tuple[Offsets, Offsets], _Holders] = defaultdict(list)
    for ranks, box in holders:
        part = intersect(box, needed)
        if part:
            parts[part].append((ranks, box))
    assert sum(math.prod(size) for _, size in parts) == needed.numel, f"{needed} is not covered once"
    return parts


def _cheapest_source(who: _Holders, target: int, nodes: Sequence[int], sent: list[int]) -> tuple[int, Box]:
    best: tuple[tuple[bool, int, int], Box] | None = None
    for ranks, box in who:
        for rank in ranks:
            if rank == target:
                return rank, box
            # The same node first, then the rank that has sent least so far; its number makes the choice the same everywhere.
            key = nodes[rank] != nodes[target], sent[rank], rank
            if best is None or key < best[0]:
                best = key, box
    assert best is not None
    return best[0][2], best[1]


def _shifted(name: str, by: int) -> str:
    """Return the name of the same parameter ``by`` layers further on."""
    if not by:
        return name
    model, layers, number, rest = name.split(".", 3)
    return f"{model}.{layers}.{int(number) + by}.{rest}"
