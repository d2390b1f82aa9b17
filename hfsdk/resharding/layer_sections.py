"""The plan of a weight transition by sections: tensors outside of layers, and layers that lie alike on both sides, planned once.

So the plan of a large model is small: 80 layers over 8 stages are 8 sections of moves, not 80.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from hfsdk.core.spec import ModelSpec
from hfsdk.resharding.box_moves import Move, Side, cheapest_moves
from hfsdk.resharding.boxes import Box, intersect, megatron_ends, megatron_layer, vllm_ends, vllm_layer
from hfsdk.resharding.rank_order import Groups, RankOrder


@dataclass(frozen=True)
class Section:
    """A part of a plan: the tensors outside of layers, or layers that move alike."""

    moves: tuple[Move, ...]
    """The moves of the first layer."""
    layers: range
    """The layers that it stands for; empty for the tensors outside of layers."""

    @property
    def count(self) -> int:
        """How often its moves happen."""
        return max(1, len(self.layers))

    def all_moves(self) -> Iterator[Move]:
        """Yield the moves of every layer."""
        yield from self.moves
        for by in range(1, self.count):
            for move in self.moves:
                yield move.of_layer(by)


@dataclass(frozen=True)
class ShardSizes:
    """Numbers of elements of one rank: of its shard before, of its shard after, and of both."""

    held: int
    needed: int
    common: int


def plan_sections(
    spec: ModelSpec, order: RankOrder, nodes: tuple[int, ...], *, to_train: bool = False
) -> tuple[tuple[Section, ...], tuple[ShardSizes, ...]]:
    """Plan the moves from the training shards to the rollout's (with ``to_train`` the way back), and count every rank's shards."""
    sent = [0] * len(nodes)
    counts = np.zeros((3, len(nodes)), dtype=np.int64)
    sections = []
    for layers, trained, generating in _sides(spec, order):
        present, needed = (generating, trained) if to_train else (trained, generating)
        times = max(1, len(layers))
        moves = cheapest_moves(present, needed, nodes, sent, count=times, one_source_per_node=order.apart)
        sections.append(Section(moves, layers))
        counts += times * _count(present, needed, len(nodes))
    return tuple(sections), tuple(ShardSizes(*map(int, column)) for column in counts.T)


def _sides(spec: ModelSpec, order: RankOrder) -> Iterator[tuple[range, Side, Side]]:
    """Yield each section's layers, and who has which boxes of the first of them in training and in the rollout."""
    train, rollout = order.train, order.rollout
    trained, generating = order.train_groups(), order.rollout_groups()
    per_stage, per_rollout_stage = spec.num_layers // train.pp, spec.num_layers // rollout.pp
    yield range(0), _ends(trained, partial(megatron_ends, spec, train)), _ends(generating, partial(vllm_ends, spec, rollout))
    for layers in _alike_layers(spec.num_layers, per_stage, per_rollout_stage):
        first = layers[0]
        stage, local = divmod(first, per_stage)
        present = tuple(
            (ranks, tuple(megatron_layer(spec, train.tp, tp, first, local)))
            for (pp, tp), ranks in trained.items() if pp == stage
        )  # fmt: skip
        needed = tuple(
            (ranks, tuple(vllm_layer(spec, rollout.tp, tp, first)))
            for (pp, tp), ranks in generating.items() if pp == first // per_rollout_stage
        )  # fmt: skip
        yield layers, present, needed


def _ends(groups: Groups, boxes_of: Callable[[int, int], tuple[list[Box], list[Box]]]) -> Side:
    """Return who has which boxes before and behind the layers, given those of (tp rank, pp rank)."""
    return tuple((ranks, tuple(box for end in boxes_of(tp, pp) for box in end)) for (pp, tp), ranks in groups.items())


def _alike_layers(num_layers: int, per_stage: int, per_rollout_stage: int) -> list[range]:
    """Cut the layers where a stage of either layout begins."""
    starts = sorted({*range(0, num_layers, per_stage), *range(0, num_layers, per_rollout_stage)})
    return [range(a, b) for a, b in zip(starts, [*starts[1:], num_layers], strict=True)]


def _count(present: Side, needed: Side, num_ranks: int) -> npt.NDArray[np.int64]:
    """Return the elements every rank holds, needs, and needs of what it holds; [3, ranks]."""
    counts = np.zeros((3, num_ranks), dtype=np.int64)
    held_by: dict[int, int] = {}
    for side, (ranks, boxes) in enumerate(present):
        for rank in ranks:
            counts[0, rank] += sum(box.numel for box in boxes)
            held_by[rank] = side
    for ranks, boxes in needed:
        in_common: dict[int, int] = {}
        for rank in ranks:
            counts[1, rank] += sum(box.numel for box in boxes)
            own = held_by.get(rank)
            if own is not None:
                # Ranks of one side hold the same boxes, so their common elements are counted once for all of them.
                if own not in in_common:
                    in_common[own] = _common(present[own][1], boxes)
                counts[2, rank] += in_common[own]
    return counts


def _common(present: Sequence[Box], needed: Sequence[Box]) -> int:
    by_tensor: dict[str, list[Box]] = defaultdict(list)
    for box in present:
        by_tensor[box.tensor].append(box)
    parts = (intersect(own_box, box) for box in needed for own_box in by_tensor[box.tensor])
    return sum(math.prod(part[1]) for part in parts if part)
