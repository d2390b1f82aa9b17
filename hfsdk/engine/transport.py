"""Executes a ``ReshardPlan``: copies what a rank has, packs and exchanges the rest, counts the bytes.

All pieces one rank sends another are packed into one flat buffer, in plan order, in rounds of bounded size::

    rank 0   q0 k0 v0 gate0 ... --pack--> [#### round 0 ####][## round 1 ##] --isend-->
    rank 1                                [#### round 0 ####][## round 1 ##] --unpack--> qkv_proj, gate_up_proj, ...

Both sides cut the rounds from the plan alone, so nothing but weights travels. Copies within a rank go directly.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hfsdk.boxes import Offsets
from hfsdk.resharding import Move, ReshardPlan
from hfsdk.spec import DTYPE_BYTES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BUCKET_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
"""Most bytes a rank packs for sending, and most it receives, in one round; what stays in cache travels faster by gloo."""

_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class TransportReport:
    """What one rank moved."""

    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    """Bytes copied between this rank's own tensors, in the plan's dtype."""
    seconds: float


@dataclass(frozen=True)
class _Piece:
    """A box of a local tensor and its place in a flat buffer."""

    local: str
    box: Slices
    size: Offsets
    first: int
    last: int


@dataclass(frozen=True)
class _Round:
    """What goes out and comes in at once: per peer the number of elements and the pieces."""

    sends: tuple[tuple[int, int, tuple[_Piece, ...]], ...]
    receives: tuple[tuple[int, int, tuple[_Piece, ...]], ...]


@dataclass(frozen=True)
class _Schedule:
    """A plan as one rank carries it out."""

    copies: tuple[tuple[str, Slices, str, Slices, int], ...]
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
    bucket_bytes: int | None = None,
) -> TransportReport:
    """Move the weights of ``plan`` from ``sources`` into ``targets``; called on every rank of the plan.

    Args:
        plan: what moves; the same on all ranks.
        rank: this rank in the plan, which is its rank in ``group``.
        sources: the trainer's local tensors by the plan's source names; cast to the plan's dtype before sending.
        targets: the rollout's local tensors by the plan's target names, in the plan's dtype.
        group: the pool's world (gloo for CPU tensors, NCCL for CUDA); ``None`` is the default group.
        bucket_bytes: bounds the buffers (see :data:`BUCKET_BYTES`); the same on all ranks.

    Raises:
        KeyError: a tensor that the plan names is missing.
        RuntimeError: a target has another dtype, or the bytes received are not those of the plan.
    """
    start = time.perf_counter()
    device = next(iter(targets.values())).device
    schedule = _schedule(plan, rank, bucket_bytes or BUCKET_BYTES[device.type])
    dtype = _TORCH_DTYPES[plan.dtype]
    for name in sorted({copy[2] for copy in schedule.copies}):
        if targets[name].dtype != dtype:
            raise RuntimeError(f"target {name} has {targets[name].dtype}, but the plan moves {dtype}; plan again")
    copied = sent = received = 0
    with torch.no_grad():
        for source, source_box, target, target_box, numel in schedule.copies:
            targets[target][target_box].copy_(sources[source][source_box])
            copied += numel
        for step in schedule.rounds:
            out, into = _exchange(step, dtype, sources, targets, group)
            sent += out
            received += into
    if received != schedule.bytes_received:
        raise RuntimeError(f"rank {rank} received {received} bytes; the plan says {schedule.bytes_received}")
    return TransportReport(sent, received, copied * DTYPE_BYTES[plan.dtype], time.perf_counter() - start)


def _exchange(
    step: _Round,
    dtype: torch.dtype,
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    group: ProcessGroup | None,
) -> tuple[int, int]:
    """Send and receive one round; returns (bytes sent, bytes received)."""
    device = next(iter(targets.values())).device
    operations: list[dist.P2POp] = []
    sent = received = 0
    for peer, numel, pieces in step.sends:
        buffer = torch.empty(numel, dtype=dtype, device=device)
        for piece in pieces:
            buffer[piece.first : piece.last].view(piece.size).copy_(sources[piece.local][piece.box])
        operations.append(dist.P2POp(dist.isend, buffer, group=group, group_peer=peer))
        sent += buffer.nbytes
    incoming: list[tuple[Tensor, tuple[_Piece, ...]]] = []
    for peer, numel, pieces in step.receives:
        buffer = torch.empty(numel, dtype=dtype, device=device)
        operations.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer))
        incoming.append((buffer, pieces))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for buffer, pieces in incoming:
        for piece in pieces:
            targets[piece.local][piece.box].copy_(buffer[piece.first : piece.last].view(piece.size))
            received += (piece.last - piece.first) * buffer.element_size()
    return sent, received


def _schedule(plan: ReshardPlan, rank: int, bucket_bytes: int) -> _Schedule:
    key = (id(plan), rank, bucket_bytes)
    found = _schedules.get(key)
    if found is None or found[0]() is not plan:
        found = (weakref.ref(plan, lambda _: _schedules.pop(key, None)), _make_schedule(plan, rank, bucket_bytes))
        _schedules[key] = found
    return found[1]


def _make_schedule(plan: ReshardPlan, rank: int, bucket_bytes: int) -> _Schedule:
    pairs: dict[tuple[int, int], list[Move]] = defaultdict(list)
    copies = []
    for move in plan.moves:
        if move.source != move.target:
            pairs[move.source, move.target].append(move)
        elif move.target == rank:
            source, target = _box(move.source_start, move.size), _box(move.target_start, move.size)
            copies.append((move.source_local, source, move.target_local, target, move.numel))
    limit = _elements_per_pair(pairs, bucket_bytes, DTYPE_BYTES[plan.dtype])
    mine = {pair: _cut(moves, limit) for pair, moves in pairs.items() if rank in pair}
    rounds = []
    for number in range(max((len(cuts) for cuts in mine.values()), default=0)):
        now = [(pair, cuts[number]) for pair, cuts in mine.items() if number < len(cuts)]
        sends = tuple((to, *_pack(part, True)) for (source, to), part in now if source == rank)
        receives = tuple((source, *_pack(part, False)) for (source, to), part in now if to == rank)
        rounds.append(_Round(sends, receives))
    return _Schedule(tuple(copies), tuple(rounds), plan.bytes_received(rank))


def _elements_per_pair(pairs: Mapping[tuple[int, int], list[Move]], bucket_bytes: int, element_size: int) -> int:
    """Return how many elements a pair may exchange at once, so that no rank's buffers pass the bucket."""
    out: dict[int, int] = defaultdict(int)
    into: dict[int, int] = defaultdict(int)
    for source, target in pairs:
        out[source] += 1
        into[target] += 1
    busiest = max([1, *out.values(), *into.values()])
    return max(1, bucket_bytes // element_size // busiest)


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


def _pack(moves: list[Move], sending: bool) -> tuple[int, tuple[_Piece, ...]]:
    """Return (number of elements, pieces) of a flat buffer, as its sender or its receiver sees it."""
    pieces, at = [], 0
    for move in moves:
        local, start = (move.source_local, move.source_start) if sending else (move.target_local, move.target_start)
        pieces.append(_Piece(local, _box(start, move.size), move.size, at, at + move.numel))
        at += move.numel
    return at, tuple(pieces)


def _box(start: Offsets, size: Offsets) -> Slices:
    return tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))
