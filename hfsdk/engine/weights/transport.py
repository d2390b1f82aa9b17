"""Executes a ``ReshardPlan``: copies a rank's own parts, exchanges the rest in rounds, counts the bytes.

Two rounds are under way at any time; what a rank copies from its own shard it copies while they travel::

    round 0     pack -> isend/irecv .............. wait -> unpack -> give up what is done with
    round 1                 pack -> isend/irecv .............. wait -> unpack -> ...
    copies           q0 -> qkv_proj      k0 -> qkv_proj      gate0 -> gate_up_proj ...

A large piece is a separate message and travels from tensor to tensor without a buffer wherever it is contiguous there; small ones
share a message. All ranks cut the rounds from the plan alone, so nothing but weights travels.
"""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hfsdk.core.spec import DTYPE_BYTES
from hfsdk.engine.weights.transport_rounds import PeerMessage, Round, Slices, ends_in, make_rounds, schedule_of
from hfsdk.resharding.box_moves import Ends, Move, ends_of
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import TransportReport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


BUCKET_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
"""Most bytes of buffers on a rank, for sending and receiving in two rounds."""

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _nothing(name: str) -> None:
    """Leave storage as it is."""


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
        plan: the moves; the same on all ranks.
        rank: this rank in the plan, which is its rank in ``group``.
        sources: the trainer's local tensors by the plan's source names; cast to the plan's dtype before sending.
        targets: the rollout's local tensors by the plan's target names, in the plan's dtype.
        group: the pool's world (gloo for CPU tensors, NCCL for CUDA); ``None`` is the default group.
        bucket_bytes: bounds the buffers (see :data:`BUCKET_BYTES`); the same on all ranks.
        shared: targets that are their source (target name -> source name): nothing of them is copied.
        begin: called with a target's name before it is first written.
        done: called with a source's name when it is no longer needed.
        checked: whether :func:`problem` was asked before.
        apart: whether the ranks are of two pools, of which one outlives the other (see ``transport.py``).

    Raises:
        RuntimeError: the plan does not fit the tensors (before anything moves), or the bytes received are not those of the plan.
    """
    error = None if checked else problem(plan, rank, sources, targets)
    if error:
        raise error
    start = time.perf_counter()
    device = _device_of(sources, targets)
    schedule = schedule_of(plan, rank, bucket_bytes or BUCKET_BYTES[device.type])
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
        moves: the moves, in the same order on all ranks.
        dtype: that the boxes travel in; sources of another are cast.
        rank: this rank in the moves, which is its rank in ``group``.
        num_ranks: the number of ranks.
        sources: tensors by the moves' source names; none on a rank that only takes.
        targets: tensors by the moves' target names, of ``dtype``; none on a rank that only gives.
        group: the group of all ranks.
        bucket_bytes: bounds the buffers (see :data:`BUCKET_BYTES`); the same on all ranks.
    """
    start, device = time.perf_counter(), _device_of(sources, targets)
    run = _Run(TORCH_DTYPES[dtype], device, sources, targets, group, {}, _nothing, _nothing, apart=True)
    run.all(make_rounds(moves, rank, DTYPE_BYTES[dtype], bucket_bytes or BUCKET_BYTES[device.type]))
    return run.report(num_ranks, time.perf_counter() - start)


def _device_of(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> torch.device:
    """Return where the tensors are; a rank that only gives, or only takes, has those of one side."""
    return next(iter((targets or sources).values())).device


def problem(plan: ReshardPlan, rank: int, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> RuntimeError | None:
    """Return the error that keeps a plan from being carried out with these tensors; ``None`` without one."""
    return _problem(ends_in(plan, rank), plan.dtype, plan, rank, sources, targets)


def problem_of_moves(
    moves: Iterable[Move], dtype_name: str, plan: str, rank: int, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> RuntimeError | None:
    """Return the error where the moves of the plan named ``plan`` do not fit these tensors; ``None`` where they do."""
    return _problem(ends_of(moves, rank), dtype_name, plan, rank, sources, targets)


def _problem(
    ends: Ends, dtype_name: str, plan: object, rank: int, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> RuntimeError | None:
    dtype = TORCH_DTYPES[dtype_name]
    for (is_source, name), end in ends.items():
        what, tensors = ("source", sources) if is_source else ("target", targets)
        if name not in tensors:
            return RuntimeError(f"the plan is of another model ({plan}): there is no {what} {name} on rank {rank}")
        shape = tuple(tensors[name].shape)
        # A tensor may be larger than the plan needs (padding of the vocabulary), never smaller.
        if len(shape) != len(end) or any(map(operator.gt, end, shape)):
            return RuntimeError(f"the plan is of another model ({plan}): {what} {name} has shape {shape}, it needs {end}")
        if not is_source and tensors[name].dtype != dtype:
            return RuntimeError(f"target {name} has {tensors[name].dtype}, but the plan moves {dtype}; plan again")
    return None


def _part(tensor: Tensor, box: Slices, numel: int) -> Tensor:
    """Return a box of a tensor; where that is all of it, without the microseconds that a view takes."""
    return tensor if tensor.numel() == numel else tensor[box]


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
        """Return the counts as a report."""
        size, by_rank = self.dtype.itemsize, tuple(self.received.get(peer, 0) for peer in range(num_ranks))
        return TransportReport(self.sent, sum(by_rank), self.copied * size, self.shared_numel * size, by_rank, seconds)

    @torch.no_grad()
    def all(self, rounds: tuple[Round, ...]) -> None:
        """Carry out the rounds, the next one begun before the one under way is finished."""
        finish: Callable[[], None] | None = None
        for step in rounds:
            for name in step.begun:
                self.begin(name)
            # The next round's messages travel while this one's copies run and the one before is waited for.
            finish_this = self._post(step)
            self._copy(step)
            if finish is not None:
                finish()
            finish = finish_this
        if finish is not None:
            finish()

    def _post(self, step: Round) -> Callable[[], None]:
        """Start a round's transfers; the returned function waits for them and puts the received parts in their places."""
        operations: list[dist.P2POp] = []
        incoming: list[tuple[PeerMessage, Tensor]] = []
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

    def _receipts(self, step: Round) -> Receipts:
        return Receipts(self.group, (message.peer for message in step.sends), (message.peer for message in step.receives))

    def _packed(self, message: PeerMessage) -> Tensor:
        if len(message.pieces) == 1:
            piece = message.pieces[0]
            view = self.sources[piece.local][piece.box]
            # A large contiguous piece is sent from where it lies: no buffer, no copy.
            if view.is_contiguous() and view.dtype == self.dtype:
                return view
        buffer = torch.empty(message.numel, dtype=self.dtype, device=self.device)
        for piece in message.pieces:
            buffer[piece.first : piece.last].view(piece.size).copy_(self.sources[piece.local][piece.box])
        return buffer

    def _into(self, message: PeerMessage) -> Tensor:
        if len(message.pieces) == 1:
            piece = message.pieces[0]
            view = self.targets[piece.local][piece.box]
            if view.is_contiguous():
                return view
        return torch.empty(message.numel, dtype=self.dtype, device=self.device)

    def _unpack(self, message: PeerMessage, buffer: Tensor) -> None:
        for piece in message.pieces:
            target = self.targets[piece.local][piece.box]
            if target.data_ptr() != buffer.data_ptr():
                target.copy_(buffer.view(-1)[piece.first : piece.last].view(piece.size))
        self.received[message.peer] += buffer.nbytes

    def _copy(self, step: Round) -> None:
        for copy in step.copies:
            if copy.target in self.shared:
                self.shared_numel += copy.numel
            else:
                source = _part(self.sources[copy.source], copy.source_box, copy.numel)
                _part(self.targets[copy.target], copy.target_box, copy.numel).copy_(source)
                self.copied += copy.numel


# -- receipts of messages, by which ranks do not wait in vain

GIVEN, TAKEN = 2**30, 2**30 + 1
"""Tags; messages of weights are numbered from 0."""

GONE_S = 10.0
"""How long a receipt may take to be gone, once its reader is known to be there: less than the controller waits for a rank."""


class Receipts:
    """Receipts of one round on one rank.

    Gloo tells a wait that its peer is gone only while nothing of the message has travelled. A message that is half written to the
    connection, or half read from it, is passed over when the connection breaks (``Pair::signalException`` of its TCP transport),
    and the wait for it lasts as long as the group's limit. So nobody waits for a message of weights before another one, which has
    no bytes and so is never half there, says that it came; on a connection messages keep their order::

        gives   isend weights, isend GIVEN, irecv TAKEN                       wait TAKEN: all of it has gone
        takes   irecv weights, irecv GIVEN      wait GIVEN: all of it is here; isend TAKEN

    A rank that dies, or closes its connections (``rendezvous.part``), so ends what others wait for at once. NCCL needs none of
    this: the host does not wait for its messages (``direct.DirectLinks``).
    """

    def __init__(self, group: ProcessGroup | None, gives_to: Iterable[int], takes_from: Iterable[int]) -> None:
        """Begin to say that this round's messages, which are posted already, were given, and to listen.

        Args:
            group: a gloo group.
            gives_to: peers to whom this rank sends in this round.
            takes_from: peers from whom it receives.
        """
        self._group, self._takes_from = group, sorted(set(takes_from))
        self._nothing = torch.empty(0, dtype=torch.uint8)
        to = sorted(set(gives_to))
        self._given_notes = [self._say(peer, GIVEN) for peer in to]
        self._hear_given = [self._hear(peer, GIVEN) for peer in self._takes_from]
        self._hear_taken = [self._hear(peer, TAKEN) for peer in to]

    def wait(self, works: Sequence[Work]) -> None:
        """Wait until all of the round has come and gone.

        Args:
            works: the messages of weights.

        Raises:
            RuntimeError: a peer is gone.
        """
        for heard in self._hear_given:
            heard.wait()
        taken_notes = [self._say(peer, TAKEN) for peer in self._takes_from]
        for heard in self._hear_taken:
            heard.wait()
        for work in (*works, *self._given_notes, *taken_notes):
            work.wait(timedelta(seconds=GONE_S))

    def _say(self, peer: int, tag: int) -> Work:
        return _posted(dist.isend(self._nothing, group=self._group, group_dst=peer, tag=tag))

    def _hear(self, peer: int, tag: int) -> Work:
        return _posted(dist.irecv(self._nothing, group=self._group, group_src=peer, tag=tag))


def _posted(work: Work | None) -> Work:
    assert work is not None  # this rank is in the group
    return work
