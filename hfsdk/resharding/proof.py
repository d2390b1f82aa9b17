"""Proofs that weights arrived: of every box that moves a fingerprint where it left and where it is, and whether they agree.

A fingerprint does not depend on the layout, so that the two sides may be of different engines, in another order of rows, cut by
other axes; how it is taken is in :mod:`hfsdk.engine.weights.fingerprints`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from hfsdk.resharding.box_moves import Move
from hfsdk.resharding.boxes import Box, Offsets

Key = tuple[str, Offsets, Offsets]
"""A box of a local tensor of the rank that gives it: (name, start, size)."""


@dataclass(frozen=True)
class WrongBox:
    """A box whose values are not the ones that left."""

    tensor: str
    """Name of the Hugging Face tensor."""
    start: Offsets
    size: Offsets
    source: int
    """Rank that it came from."""
    target: int
    left: int
    """Fingerprint on ``source``, 64 bits."""
    arrived: int
    """Fingerprint on ``target``."""

    def __str__(self) -> str:
        return (
            f"{self.tensor}[{_cut(self.start, self.size)}] from rank {self.source} to rank {self.target}: "
            f"{self.left:#018x} left, {self.arrived:#018x} is there"
        )


@dataclass(frozen=True)
class Proof:
    """The result of comparing the boxes that one rank took."""

    proven: tuple[int, ...]
    """Number of boxes whose fingerprints agree, by the rank that they came from."""
    shared: int = 0
    """Boxes that did not move, as both engines use one storage."""
    wrong: tuple[WrongBox, ...] = ()

    @property
    def num_boxes(self) -> int:
        """All that it took."""
        return sum(self.proven) + self.shared + len(self.wrong)


@dataclass(frozen=True)
class SentBox:
    """A box that a rank gives."""

    local: str
    local_start: Offsets
    size: Offsets
    start: Offsets
    """Start of the box in the Hugging Face tensor."""


@dataclass(frozen=True)
class Taken:
    """A box that a rank takes."""

    move: Move
    start: Offsets
    """Start of the box in the Hugging Face tensor, by the layout of the rank that takes it."""
    number: int
    """Number of the box among the boxes that ``move.source`` gives."""


class Witness:
    """The boxes that a rank gives and takes, numbered so that all ranks find each other's by number alone.

    The plan says where a box lies on each side; where in the whole tensor that is follows from each side's own layout. So a plan
    that mistakes one place for another is found, too.

    Args:
        moves: moves of all ranks, or of this rank alone; the same on all ranks that compare.
        rank: this rank in the moves.
        present: the boxes that it holds, if it gives.
        needed: the boxes that it needs, if it takes.
        shared: targets that are their source, of which nothing moves.
    """

    def __init__(
        self, moves: Sequence[Move], rank: int, present: Sequence[Box], needed: Sequence[Box], shared: Container[str] = ()
    ) -> None:
        self.rank = rank
        numbers: dict[int, dict[Key, int]] = defaultdict(dict)
        sent, received = {}, []
        before, self._after = _by_local(present), _by_local(needed)
        self.num_shared = 0
        for move in moves:
            of_source = numbers[move.source]
            key = move.source_local, move.source_start, move.size
            # A box that several ranks take has one number: it is summed once where it leaves.
            number = of_source.setdefault(key, len(of_source))
            stays = move.source == move.target == rank and move.target_local in shared
            if move.source == rank and not stays and number not in sent:
                sent[number] = SentBox(*key, _where(before, move.tensor, move.source_local, move.source_start))
            if move.target == rank:
                self.num_shared += stays
                if not stays:
                    received.append(Taken(move, self.start_of(move), number))
        self.gives: Mapping[int, SentBox] = sent
        self.takes: Sequence[Taken] = tuple(received)
        self._numbers = numbers

    def start_of(self, move: Move) -> Offsets:
        """Return where a box that this rank takes begins in the Hugging Face tensor."""
        return _where(self._after, move.tensor, move.target_local, move.target_start)

    def num_given(self, source: int) -> int:
        """Return how many boxes a rank gives, the shared ones included."""
        return len(self._numbers.get(source, ()))

    def number(self, source: int, key: Key) -> int:
        """Return the number of a box among the boxes that a rank gives."""
        return self._numbers[source][key]


def _by_local(boxes: Sequence[Box]) -> dict[tuple[str, str], list[Box]]:
    by_place: dict[tuple[str, str], list[Box]] = defaultdict(list)
    for box in boxes:
        by_place[box.tensor, box.local].append(box)
    return by_place


def _where(boxes: Mapping[tuple[str, str], Sequence[Box]], tensor: str, local: str, at: Offsets) -> Offsets:
    """Return where a place in a local tensor lies in the Hugging Face tensor."""
    for box in boxes[tensor, local]:
        if all(lo <= here < lo + count for lo, here, count in zip(box.local_start, at, box.size, strict=True)):
            return tuple(first + here - lo for first, here, lo in zip(box.start, at, box.local_start, strict=True))
    raise KeyError(f"{local} has nothing of {tensor} at {at}")


def _cut(start: Offsets, size: Offsets) -> str:
    return ", ".join(f"{first}:{first + count}" for first, count in zip(start, size, strict=True))
