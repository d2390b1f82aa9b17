"""The rounds in which a rank carries a plan out: the parts that it sends, receives and copies in each, cut to buckets."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from hfsdk.core.spec import DTYPE_BYTES
from hfsdk.resharding.box_moves import Ends, Move, ends_of
from hfsdk.resharding.boxes import Offsets
from hfsdk.resharding.reshard_plan import ReshardPlan

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

OWN_MESSAGE_BYTES = 64 * 2**10
"""Bytes from which on a piece is a separate message."""

Slices = tuple[slice, ...]

_schedules: dict[tuple[int, int, int], tuple[weakref.ref[ReshardPlan], Schedule]] = {}
"""Schedules by (id of the plan, rank, bucket bytes); dropped with their plan, as are ends."""

_ends: dict[tuple[int, int], tuple[weakref.ref[ReshardPlan], Ends]] = {}
"""The ends of plans on a rank's tensors, by (id of the plan, rank)."""


@dataclass(frozen=True)
class BufferPiece:
    """A box of a local tensor and its place in a flat buffer."""

    local: str
    box: Slices
    size: Offsets
    first: int
    last: int


@dataclass(frozen=True)
class PeerMessage:
    """The content that goes to one peer, or comes from it, at once."""

    peer: int
    tag: int
    numel: int
    pieces: tuple[BufferPiece, ...]


@dataclass(frozen=True)
class Copy:
    """A box that a rank copies from one of its tensors to another."""

    source: str
    source_box: Slices
    target: str
    target_box: Slices
    numel: int


@dataclass
class Round:
    """The messages of one round, the copies meanwhile, and then the local tensors that this rank is done with."""

    sends: list[PeerMessage] = field(default_factory=list)
    receives: list[PeerMessage] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    """Targets that are written for the first time."""
    done: list[str] = field(default_factory=list)
    """Sources that are read for the last time."""


@dataclass(frozen=True)
class Schedule:
    """A plan as one rank carries it out."""

    rounds: tuple[Round, ...]
    bytes_received: int
    """Bytes received by the plan's own account."""


def schedule_of(plan: ReshardPlan, rank: int, bucket_bytes: int) -> Schedule:
    """Return how a rank carries a plan out; made once for each plan, rank and bucket."""
    return _cached(_schedules, (id(plan), rank, bucket_bytes), plan, lambda: _make_schedule(plan, rank, bucket_bytes))


def ends_in(plan: ReshardPlan, rank: int) -> Ends:
    """Return how large the local tensors of a rank have to be for a plan; found once for each plan and rank."""
    return _cached(_ends, (id(plan), rank), plan, lambda: ends_of(plan.moves, rank))


def _cached(cache: dict[K, tuple[weakref.ref[ReshardPlan], V]], key: K, plan: ReshardPlan, make: Callable[[], V]) -> V:
    """Return the result of ``make`` for a plan; it is made the first time only."""
    entry = cache.get(key)
    # An id may come back for another plan once the first is gone, so the plan itself is compared.
    if entry is None or entry[0]() is not plan:
        entry = cache[key] = (weakref.ref(plan, lambda _: cache.pop(key, None)), make())
    return entry[1]


def _make_schedule(plan: ReshardPlan, rank: int, bucket_bytes: int) -> Schedule:
    rounds = make_rounds(_in_order(plan), rank, DTYPE_BYTES[plan.dtype], bucket_bytes)
    return Schedule(rounds, plan.bytes_received(rank))


def make_rounds(moves: Iterable[Move], rank: int, size: int, bucket_bytes: int) -> tuple[Round, ...]:
    """Cut the moves of all ranks, of elements of ``size`` bytes, into the rounds of one."""
    pairs: dict[tuple[int, int], list[Move]] = defaultdict(list)
    own: list[Move] = []
    sources: set[str] = set()
    for move in moves:
        if move.source == rank:
            sources.add(move.source_local)
        if move.source != move.target:
            pairs[move.source, move.target].append(move)
        elif move.target == rank:
            own.append(move)
    limit = _elements_per_pair(pairs, bucket_bytes, size)
    own_parts = {pair: _cut(theirs, limit) for pair, theirs in pairs.items() if rank in pair}
    copied = -(-sum(move.numel for move in own) * size // bucket_bytes)  # so many buckets full
    rounds = [Round() for _ in range(max([1, copied, *map(len, own_parts.values())]))]
    last_sent: dict[str, int] = {}
    for (source, target), parts in own_parts.items():
        # Sender and receiver number the messages of a pair alike, since both cut the same moves in the same order.
        tag = 0
        for number, part in enumerate(parts):
            messages = [_message(target if source == rank else source, tag + i, together, sending=source == rank)
                        for i, together in enumerate(_messages(part, OWN_MESSAGE_BYTES // size))]  # fmt: skip
            tag += len(messages)
            if source == rank:
                rounds[number].sends += messages
                # = {|A copy must not give its source up before the last message of it has left (see _spread).
                last_sent |= {move.source_local: number for move in part if number >= last_sent.get(move.source_local, 0)}
            else:
                rounds[number].receives += messages
    _spread(own, rounds, last_sent)
    _mark(rounds, sources)
    return tuple(rounds)


def _in_order(plan: ReshardPlan) -> Iterator[Move]:
    """Yield the moves, those of one of the rollout's parameters together, so that a shard is given up as another grows."""
    for section in plan.sections:
        # Both engines' tensors are there at once only for the parameter under way: the peak is one parameter, not one model.
        by_parameter: dict[str, list[Move]] = defaultdict(list)
        for move in section.moves:
            by_parameter[move.source_local if plan.to_train else move.target_local].append(move)
        for by in range(section.count):
            for moves in by_parameter.values():
                yield from (move.of_layer(by) for move in moves) if by else moves


def _elements_per_pair(pairs: Mapping[tuple[int, int], list[Move]], bucket_bytes: int, element_size: int) -> int:
    """Return how many elements a pair may exchange in a round, so that no rank's buffers pass the bucket."""
    out: dict[int, int] = defaultdict(int)
    into: dict[int, int] = defaultdict(int)
    for source, target in pairs:
        out[source] += 1
        into[target] += 1
    busiest = max((out[rank] + into[rank] for rank in {*out, *into}), default=1)
    return max(1, bucket_bytes // element_size // busiest // 2)  # two rounds are under way


def _cut(moves: list[Move], limit: int) -> list[list[Move]]:
    """Deal moves, cut by rows where one is too large, into parts of at most ``limit`` elements (or one row)."""
    parts: list[list[Move]] = [[]]
    room = limit
    for move in moves:
        row = max(1, move.numel // move.size[0])
        first = 0
        while first < move.size[0]:
            fits = room // row
            # A row wider than the limit gets its own part: it cannot be cut further.
            if fits == 0 and parts[-1]:
                parts.append([])
                room = limit
                continue
            count = min(max(1, fits), move.size[0] - first)
            parts[-1].append(_rows_of(move, first, count))
            room -= count * row
            first += count
    return parts


def _rows_of(move: Move, first: int, count: int) -> Move:
    if count == move.size[0]:
        return move
    return Move(
        move.tensor, move.source, move.target,
        move.source_local, (move.source_start[0] + first, *move.source_start[1:]),
        move.target_local, (move.target_start[0] + first, *move.target_start[1:]),
        (count, *move.size[1:]),
    )  # fmt: skip


def _messages(part: list[Move], own_from: int) -> list[list[Move]]:
    """Group the moves of one pair in one round: large ones alone, the others together."""
    small = [move for move in part if move.numel < own_from]
    return [[move] for move in part if move.numel >= own_from] + ([small] if small else [])


def _message(peer: int, tag: int, moves: list[Move], *, sending: bool) -> PeerMessage:
    """Describe a message as its sender or its receiver sees it."""
    pieces, at = [], 0
    for move in moves:
        local, start = (move.source_local, move.source_start) if sending else (move.target_local, move.target_start)
        pieces.append(BufferPiece(local, _box(start, move.size), move.size, at, at + move.numel))
        at += move.numel
    return PeerMessage(peer, tag, at, tuple(pieces))


def _spread(own: list[Move], rounds: list[Round], last_sent: Mapping[str, int]) -> None:
    """Give every copy a round: that in which its source is last sent, or one that goes on evenly through the copies."""
    total = sum(move.numel for move in own)
    at = 0
    for move in own:
        number = last_sent.get(move.source_local, at * len(rounds) // max(1, total))
        at += move.numel
        source, target = _box(move.source_start, move.size), _box(move.target_start, move.size)
        rounds[number].copies.append(Copy(move.source_local, source, move.target_local, target, move.numel))


def _mark(rounds: list[Round], sources: set[str]) -> None:
    """Note where each target is first written and each source last read."""
    begun: set[str] = set()
    last: dict[str, int] = {}
    for number, step in enumerate(rounds):
        targets = [piece.local for message in step.receives for piece in message.pieces] + [copy.target for copy in step.copies]
        step.begun = [name for name in dict.fromkeys(targets) if name not in begun]
        begun.update(targets)
        read = [piece.local for message in step.sends for piece in message.pieces] + [copy.source for copy in step.copies]
        last |= dict.fromkeys(read, number)
    for name, number in last.items():
        rounds[number].done.append(name)
    # A source that no round reads would never be given up, and its memory never come back.
    assert set(last) == sources


def _box(start: Offsets, size: Offsets) -> Slices:
    return tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))
