"""A rank's share of a role's state: tensors that data-parallel ranks hold alike are copied once, a part by each rank.

Ranks that differ in dp alone have the same weights, and the same masters and moments too unless the optimizer is distributed. Each
rank's share of these is an equal part, in bytes; its share of a distributed optimizer (ZeRO stage 1) it is what the rank holds, as
it lies. dp=4, one local tensor after the other in a line, cut wherever a quarter ends::

    weights      [ embedding ..... | qkv .. | proj | fc1 ....... | fc2 .... ]     the same on all four
    share        |---- dp 0 ----|---- dp 1 ----|---- dp 2 ----|---- dp 3 ---|
    exp_avg      the same cuts, or Megatron's own: what dp 1 steps, dp 1 copies

A share is made of *strips*: consecutive numbers of one local tensor in row-major order. For a checkpoint, or a role that moves,
strips become pieces (``role_state.py``), boxes that no layout is written into; a strip that begins or ends inside a row gives up to
three::

    a local tensor [5, 8]      . . . . . . . .
    strip 11:37                . . . a a a a a      a   1 x 5
                               b b b b b b b b      b   2 x 8
                               b b b b b b b b
                               b b b b b b b b
                               c c c c c . . .      c   1 x 5

Pure functions over tensors: no files, no processes. ``shares.py`` takes shares from a model and gives them back.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from hfsdk.core.errors import CheckpointError
from hfsdk.engine.weights.role_state import Shard, StatePiece, Summary, copy_shared, slices
from hfsdk.resharding.boxes import Box, Offsets, intersect


@dataclass(frozen=True)
class Strip:
    """Consecutive numbers of one local tensor."""

    kind: str
    """``"weights"`` or one of ``role_state.KINDS``."""
    local: str
    """Name of the local tensor; masters and moments have their parameter's."""
    shape: Offsets
    """Shape of the whole local tensor."""
    dtype: torch.dtype
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        """Bytes of the numbers."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class StateShare:
    """One rank's share of a role's state: a copy on the CPU or, while the role moves, the model's own tensors."""

    layout: str
    """The training layout that it is of, and ``rank`` the rank."""
    rank: int
    summary: Summary
    content: tuple[tuple[Strip, torch.Tensor], ...]
    """Strips with their values, one-dimensional."""

    @classmethod
    def blank(cls, layout: str, rank: int, summary: Summary, strips: Iterable[Strip], device: str = "cpu") -> StateShare:
        """Return one that is all zero, for :func:`fill`; on the device ``"meta"`` it has no values."""
        content = ((strip, torch.zeros(strip.numel, dtype=strip.dtype, device=device)) for strip in strips)
        return cls(layout, rank, summary, tuple(content))

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return sum(strip.num_bytes for strip, _ in self.content)


def divided(kind: str, tensors: Mapping[str, tuple[Offsets, torch.dtype]], num_ranks: int) -> list[list[Strip]]:
    """Cut local tensors, laid in a line, into parts of equal bytes (but for one number), a part for each dp rank.

    Args:
        kind: the kind of strips.
        tensors: shape and dtype by local name.
        num_ranks: the number of parts.
    """
    ends = [0, *accumulate(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values())]
    parts: list[list[Strip]] = []
    for first, last in pairwise(ends[-1] * rank // num_ranks for rank in range(num_ranks + 1)):
        part = []
        for (name, (shape, dtype)), at in zip(tensors.items(), ends, strict=False):
            # a number that a cut goes through belongs to the part in which it begins
            start, stop = (min(max(0, -((at - cut) // dtype.itemsize)), math.prod(shape)) for cut in (first, last))
            if start < stop:
                part.append(Strip(kind, name, shape, dtype, start, stop))
        parts.append(part)
    return parts


def pieces(share: StateShare, shard: Shard) -> list[StatePiece]:
    """Cut a rank's share into pieces; those of whole rows stay views."""
    return [
        StatePiece(strip.kind, box.tensor, shard.shapes[box.tensor], box.start, part.contiguous(), first)
        for strip, box, part, first in parts(share, shard)
    ]


@torch.no_grad()
def fill(share: StateShare, shard: Shard, pieces: Iterable[StatePiece]) -> None:
    """Write pieces of any layout into a rank's share (see :meth:`StateShare.blank`); parts that it does not need are left.

    Raises:
        CheckpointError: the pieces do not cover the share.
    """
    offered: dict[tuple[str, str], dict[Box, StatePiece]] = defaultdict(dict)
    for piece in pieces:
        offered[piece.kind, piece.tensor].setdefault(piece.box, piece)  # replicas are one
    for strip, box, target, _ in parts(share, shard):
        covered = copy_shared(target, box, offered[strip.kind, box.tensor].values())
        if covered != box.numel:
            raise CheckpointError(
                f"the state has {covered} of the {box.numel} numbers of {strip.kind} {box.tensor} that this rank needs; "
                "it is incomplete or of another model"
            )


def parts(share: StateShare, shard: Shard) -> Iterator[tuple[Strip, Box, torch.Tensor, bool]]:
    """Yield (strip, a box of the Hugging Face tensor, view of the strip there, whether this tp and pp rank tells it)."""
    by_local: dict[str, list[Box]] = defaultdict(list)
    for box in shard.boxes:
        by_local[box.local].append(box)
    for strip, values in share.content:
        # A strip is cut by numbers, not by rows: it begins and ends within a row, and only rectangles are views.
        for start, size in rectangles(strip.start, strip.stop, strip.shape):
            here = Box("", start, size, strip.local, start)
            offset = math.prod(strip.shape[1:]) * start[0] + sum(start[1:]) - strip.start
            rectangle = values[offset : offset + here.numel].view(size)
            for box in by_local[strip.local]:
                shared = intersect(here, Box("", box.local_start, box.size, strip.local, box.local_start))
                if shared:
                    local_start, part_size = shared
                    there = tuple(a + s - b for a, s, b in zip(box.start, local_start, box.local_start, strict=True))
                    part = Box(box.tensor, there, part_size, strip.local, local_start)
                    yield strip, part, rectangle[slices(local_start, part_size, start)], shard.is_first(box)


def rectangles(start: int, stop: int, shape: Sequence[int]) -> list[tuple[Offsets, Offsets]]:
    """Return, as (start, size), the boxes of a vector or matrix that hold its numbers ``start:stop`` in row-major order."""
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    width = shape[1]
    boxes: list[tuple[Offsets, Offsets]] = []
    while start < stop:
        row, column = divmod(start, width)
        rows = (stop - start) // width if column == 0 else 0
        size = (rows, width) if rows else (1, min(width - column, stop - start))
        boxes.append(((row, column), size))
        start += math.prod(size)
    return boxes
