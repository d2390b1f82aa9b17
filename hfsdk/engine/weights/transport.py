"""Executes a ``ReshardPlan``: copies what a rank has, exchanges the rest in rounds, counts the bytes.

Two rounds are under way at any time; what a rank copies from its own shard it copies while they travel::

    round 0     pack -> isend/irecv .............. wait -> unpack -> give up what is done with
    round 1                 pack -> isend/irecv .............. wait -> unpack -> ...
    copies           q0 -> qkv_proj      k0 -> qkv_proj      gate0 -> gate_up_proj ...

A large piece is a message of its own and travels from tensor to tensor without a buffer wherever it is contiguous there; small ones
share a message. All ranks cut the rounds from the plan alone, so nothing but weights travels.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hfsdk.core.spec import DTYPE_BYTES
from hfsdk.engine.weights.receipts import Receipts
from hfsdk.resharding.box_moves import Move
from hfsdk.resharding.boxes import Offsets
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import TransportReport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BUCKET_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
"""Most bytes of buffers on a rank, for sending and receiving in two rounds."""

OWN_MESSAGE_BYTES = 64 * 2**10
"""From this size on a piece is a message of its own."""

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Slices = tuple[slice, ...]


def _nothing(name: str) -> None:
    """Leave storage as it is."""


@dataclass(frozen=True)
class _Piece:
    """A box of a local tensor and its place in a flat buffer."""

    local: str
    box: Slices
    size: Offsets
    first: int
    last: int


@dataclass(frozen=True)
class _Message:
    """What goes to, or comes from, one peer at once."""

    peer: int
    tag: int
    numel: int
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True)
class _Copy:
    """A box that a rank copies from one of its tensors to another."""

    source: str
    source_box: Slices
    target: str
    target_box: Slices
    numel: int


@dataclass
class _Round:
    """What goes out, comes in and is copied meanwhile; then the local tensors that this rank is done with."""

    sends: list[_Message] = field(default_factory=list)
    receives: list[_Message] = field(default_factory=list)
    copies: list[_Copy] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    """Targets that are written for the first time."""
    done: list[str] = field(default_factory=list)
    """Sources that are read for the last time."""


@dataclass(frozen=True)
class _Schedule:
    """A plan as one rank carries it out."""

    rounds: tuple[_Round, ...]
    bytes_received: int
    """By the plan's own account."""


_schedules: dict[tuple[int, int, int], tuple[weakref.ref[ReshardPlan], _Schedule]] = {}
"""Schedules by (id of the plan, rank, bucket bytes); dropped with their plan."""


def execute(
    plan: ReshardPlan,
    rank: int,
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    group: ProcessGroup | None,
    *,
    bucket_bytes: int | None = None,
    shared: Mapping[str, str] | None = None,
    begin: Callable[[str], None] = _nothing,
    done: Callable[[str], None] = _nothing,
    checked: bool = False,
    apart: bool = False,
) -> TransportReport:
    """Move the weights of ``plan`` from ``sources`` into ``targets``; called on every rank of the plan.

    Args:
        plan: what moves; the same on all ranks.
        rank: this rank in the plan, which is its rank in ``group``.
        sources: the trainer's local tensors by the plan's source names; cast to the plan's dtype before sending.
        targets: the rollout's local tensors by the plan's target names, in the plan's dtype.
        group: the pool's world (gloo for CPU tensors, NCCL for CUDA); ``None`` is the default group.
        bucket_bytes: bounds the buffers (see :data:`BUCKET_BYTES`); the same on all ranks.
        shared: targets that are their source (target name -> source name): nothing of them is copied.
        begin: called with a target's name before it is first written.
        done: called with a source's name when it is no longer needed.
        checked: whether :func:`problem` was asked before.
        apart: whether the ranks are of two pools, of which one outlives the other (see ``receipts.py``).

    Raises:
        RuntimeError: the plan does not fit the tensors (before anything moves), or the bytes received are not those of the plan.
    """
    error = None if checked else problem(plan, rank, sources, targets)
    if error:
        raise error
    start = time.perf_counter()
    device = _device_of(sources, targets)
    schedule = _schedule(plan, rank, bucket_bytes or BUCKET_BYTES[device.type])
    run = _Run(TORCH_DTYPES[plan.dtype], device, sources, targets, group, shared or {}, begin, done, apart)
    run.all(schedule.rounds)
    if sum(run.received.values()) != schedule.bytes_received:
        raise RuntimeError(f"rank {rank} received {sum(run.received.values())} bytes; the plan says {schedule.bytes_received}")
    return run.report(plan.num_ranks, time.perf_counter() - start)


def execute_moves(
    moves: Sequence[Move],
    dtype: str,
    rank: int,
    num_ranks: int,
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    group: ProcessGroup,
    *,
    bucket_bytes: int | None = None,
) -> TransportReport:
    """Carry out moves between two pools for which there is no :class:`ReshardPlan`; called on every rank, with those of all.

    Args:
        moves: in the same order on all ranks.
        dtype: that the boxes travel in; sources of another are cast.
        rank: this rank in the moves, which is its rank in ``group``.
        num_ranks: how many there are.
        sources: tensors by the moves' source names; none on a rank that only takes.
        targets: tensors by the moves' target names, of ``dtype``; none on a rank that only gives.
        group: of all ranks.
        bucket_bytes: bounds the buffers (see :data:`BUCKET_BYTES`); the same on all ranks.
    """
    start, device = time.perf_counter(), _device_of(sources, targets)
    run = _Run(TORCH_DTYPES[dtype], device, sources, targets, group, {}, _nothing, _nothing, apart=True)
    run.all(_make_rounds(moves, rank, DTYPE_BYTES[dtype], bucket_bytes or BUCKET_BYTES[device.type]))
    return run.report(num_ranks, time.perf_counter() - start)


def _device_of(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> torch.device:
    """Return where the tensors are; a rank that only gives, or only takes, has those of one side."""
    return next(iter((targets or sources).values())).device


def problem(plan: ReshardPlan, rank: int, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> RuntimeError | None:
    """Return what keeps a plan from being carried out with these tensors; ``None`` if nothing does."""
    return problem_of_moves(plan.moves, plan.dtype, str(plan), rank, sources, targets)


def problem_of_moves(
    moves: Iterable[Move], dtype_name: str, plan: str, rank: int, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> RuntimeError | None:
    """Return what keeps moves, of what is named ``plan``, from being carried out with these tensors."""
    dtype = TORCH_DTYPES[dtype_name]
    ends: dict[tuple[bool, str], list[int]] = {}
    for move in moves:
        if move.source == rank:
            _extend(ends, (True, move.source_local), move.source_start, move.size)
        if move.target == rank:
            _extend(ends, (False, move.target_local), move.target_start, move.size)
    for (is_source, name), end in ends.items():
        what, tensors = ("source", sources) if is_source else ("target", targets)
        if name not in tensors:
            return RuntimeError(f"the plan is of another model ({plan}): there is no {what} {name} on rank {rank}")
        shape = tuple(tensors[name].shape)
        if len(shape) != len(end) or any(last > n for last, n in zip(end, shape, strict=True)):
            return RuntimeError(f"the plan is of another model ({plan}): {what} {name} has shape {shape}, it needs {tuple(end)}")
        if not is_source and tensors[name].dtype != dtype:
            return RuntimeError(f"target {name} has {tensors[name].dtype}, but the plan moves {dtype}; plan again")
    return None


def _extend(ends: dict[tuple[bool, str], list[int]], key: tuple[bool, str], start: Offsets, size: Offsets) -> None:
    known = ends.setdefault(key, [0] * len(start))
    for dim, (first, count) in enumerate(zip(start, size, strict=True)):
        known[dim] = max(known[dim], first + count)


class _Run:
    """One execution on one rank."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor],
        group: ProcessGroup | None, shared: Mapping[str, str], begin: Callable[[str], None], done: Callable[[str], None],
        apart: bool,
    ) -> None:  # fmt: skip
        self.dtype, self.device, self.group = dtype, device, group
        self.with_receipts = apart and device.type == "cpu"
        self.sources, self.targets, self.shared, self.begin, self.done = sources, targets, shared, begin, done
        self.sent = self.copied = self.shared_numel = 0
        self.received: dict[int, int] = defaultdict(int)

    def report(self, num_ranks: int, seconds: float) -> TransportReport:
        """Return what was counted."""
        size, by_rank = self.dtype.itemsize, tuple(self.received.get(peer, 0) for peer in range(num_ranks))
        return TransportReport(self.sent, sum(by_rank), self.copied * size, self.shared_numel * size, by_rank, seconds)

    @torch.no_grad()
    def all(self, rounds: tuple[_Round, ...]) -> None:
        """Carry out the rounds, the next one begun before the one under way is finished."""
        finish: Callable[[], None] | None = None
        for step in rounds:
            for name in step.begun:
                self.begin(name)
            finish_this = self._post(step)
            self._copy(step)
            if finish is not None:
                finish()
            finish = finish_this
        if finish is not None:
            finish()

    def _post(self, step: _Round) -> Callable[[], None]:
        """Start a round's transfers; the returned function waits for them and puts what came in its place."""
        operations: list[dist.P2POp] = []
        incoming: list[tuple[_Message, Tensor]] = []
        for message in step.sends:
            buffer = self._packed(message)
            operations.append(dist.P2POp(dist.isend, buffer, group=self.group, group_peer=message.peer, tag=message.tag))
            self.sent += buffer.nbytes
        for message in step.receives:
            buffer = self._into(message)
            operations.append(dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=message.peer, tag=message.tag))
            incoming.append((message, buffer))
        works = dist.batch_isend_irecv(operations) if operations else []
        receipts = self._receipts(step) if self.with_receipts else None

        def finish() -> None:
            if receipts is not None:
                receipts.wait(works)
            else:
                for work in works:
                    work.wait()
            for message, buffer in incoming:
                self._unpack(message, buffer)
            for name in step.done:
                self.done(name)

        return finish

    def _receipts(self, step: _Round) -> Receipts:
        return Receipts(self.group, (message.peer for message in step.sends), (message.peer for message in step.receives))

    def _packed(self, message: _Message) -> Tensor:
        if len(message.pieces) == 1:
            piece = message.pieces[0]
            view = self.sources[piece.local][piece.box]
            if view.is_contiguous() and view.dtype == self.dtype:
                return view
        buffer = torch.empty(message.numel, dtype=self.dtype, device=self.device)
        for piece in message.pieces:
            buffer[piece.first : piece.last].view(piece.size).copy_(self.sources[piece.local][piece.box])
        return buffer

    def _into(self, message: _Message) -> Tensor:
        if len(message.pieces) == 1:
            piece = message.pieces[0]
            view = self.targets[piece.local][piece.box]
            if view.is_contiguous():
                return view
        return torch.empty(message.numel, dtype=self.dtype, device=self.device)

    def _unpack(self, message: _Message, buffer: Tensor) -> None:
        for piece in message.pieces:
            target = self.targets[piece.local][piece.box]
            if target.data_ptr() != buffer.data_ptr():
                target.copy_(buffer.view(-1)[piece.first : piece.last].view(piece.size))
        self.received[message.peer] += buffer.nbytes

    def _copy(self, step: _Round) -> None:
        for copy in step.copies:
            if copy.target in self.shared:
                self.shared_numel += copy.numel
            else:
                self.targets[copy.target][copy.target_box].copy_(self.sources[copy.source][copy.source_box])
                self.copied += copy.numel


# ---- rounds


def _schedule(plan: ReshardPlan, rank: int, bucket_bytes: int) -> _Schedule:
    key = (id(plan), rank, bucket_bytes)
    found = _schedules.get(key)
    if found is None or found[0]() is not plan:
        found = (weakref.ref(plan, lambda _: _schedules.pop(key, None)), _make_schedule(plan, rank, bucket_bytes))
        _schedules[key] = found
    return found[1]


def _make_schedule(plan: ReshardPlan, rank: int, bucket_bytes: int) -> _Schedule:
    rounds = _make_rounds(_in_order(plan), rank, DTYPE_BYTES[plan.dtype], bucket_bytes)
    return _Schedule(rounds, plan.bytes_received(rank))


def _make_rounds(moves: Iterable[Move], rank: int, size: int, bucket_bytes: int) -> tuple[_Round, ...]:
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
    mine = {pair: _cut(theirs, limit) for pair, theirs in pairs.items() if rank in pair}
    copied = -(-sum(move.numel for move in own) * size // bucket_bytes)  # so many buckets full
    rounds = [_Round() for _ in range(max([1, copied, *map(len, mine.values())]))]
    last_sent: dict[str, int] = {}
    for (source, target), parts in mine.items():
        tag = 0
        for number, part in enumerate(parts):
            messages = [_message(target if source == rank else source, tag + i, together, sending=source == rank)
                        for i, together in enumerate(_messages(part, OWN_MESSAGE_BYTES // size))]  # fmt: skip
            tag += len(messages)
            if source == rank:
                rounds[number].sends += messages
                last_sent |= {move.source_local: number for move in part if number >= last_sent.get(move.source_local, 0)}
            else:
                rounds[number].receives += messages
    _spread(own, rounds, last_sent)
    _mark(rounds, sources)
    return tuple(rounds)


def _in_order(plan: ReshardPlan) -> Iterator[Move]:
    """Yield the moves, those of one of the rollout's parameters together, so that a shard is given up as another grows."""
    for section in plan.sections:
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


def _message(peer: int, tag: int, moves: list[Move], *, sending: bool) -> _Message:
    """Describe a message as its sender or its receiver sees it."""
    pieces, at = [], 0
    for move in moves:
        local, start = (move.source_local, move.source_start) if sending else (move.target_local, move.target_start)
        pieces.append(_Piece(local, _box(start, move.size), move.size, at, at + move.numel))
        at += move.numel
    return _Message(peer, tag, at, tuple(pieces))


def _spread(own: list[Move], rounds: list[_Round], last_sent: Mapping[str, int]) -> None:
    """Give every copy a round: that in which its source is last sent, or one that goes on evenly through the copies."""
    total = sum(move.numel for move in own)
    at = 0
    for move in own:
        number = last_sent.get(move.source_local, at * len(rounds) // max(1, total))
        at += move.numel
        source, target = _box(move.source_start, move.size), _box(move.target_start, move.size)
        rounds[number].copies.append(_Copy(move.source_local, source, move.target_local, target, move.numel))


def _mark(rounds: list[_Round], sources: set[str]) -> None:
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
    assert set(last) == sources


def _box(start: Offsets, size: Offsets) -> Slices:
    return tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))
