"""Weights straight from the ranks of a trained role to those of its shadow on another pool, while both pools are at it.

The ranks of both pools are in one world of their own (a *link*), the trained role's first, as the plan numbers them; each gives and
takes its boxes in the plan's rounds (see ``transport.py``), from parameter to parameter::

    pool "train", tp2                       link of 4                          pool "rollout", tp2
    rank 0: isend upper halves, norms  -->  0 to 2: upper halves, norms   -->  rank 2: irecv into vLLM's parameters
    rank 1: isend lower halves         -->  1 to 3: lower halves, norms   -->  rank 3: irecv into vLLM's parameters

On GPUs that is NCCL: by NVLink or CUDA IPC on a node, by the network between nodes, never through host memory. Giving lasts until
everything is taken: a trained role whose weights go by the object store (``bridge.py``) is free as soon as its objects stand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Bundle
from hfsdk.engine.calls.shadow_plan import plan_between
from hfsdk.engine.process import rendezvous
from hfsdk.engine.process.safepoint import PeerFailed
from hfsdk.engine.weights import fingerprints, transport
from hfsdk.engine.weights.bridge import Route, boxes_of
from hfsdk.engine.weights.fingerprints import Sums
from hfsdk.engine.weights.role_state import SCALAR_HEAD
from hfsdk.resharding.box_moves import Move, moves_between
from hfsdk.resharding.proof import Proof, Witness
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import TransportReport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GPU_LOOK_S = 0.0005
"""How often the host looks whether a GPU has done its work."""

Tensors = Mapping[str, torch.Tensor]
NOTHING: Tensors = {}


@dataclass(frozen=True, eq=False)
class Way:
    """How one rank gives or takes weights over a link."""

    route: Route
    """The route of this rank: its number in the link, and the bytes between it and every other one."""
    plan: ReshardPlan | None
    """The plan, for a shadow that generates."""
    witness: Witness
    """The witness of the boxes that are given and taken."""
    parts: tuple[tuple[str, tuple[Move, ...]], ...] = ()
    """The moves of all ranks by dtype, for a shadow that infers and has no such plan; a scalar head is fp32 whatever the model
    is."""

    @classmethod
    def between(cls, trained: RoleSpec, shadow: RoleSpec, route: Route) -> Way:
        """Plan as both sides do, each for itself, for the rank of ``route``."""
        present, needed = (route.boxes, ()) if route.rank < route.num_sources else ((), route.boxes)
        if shadow.rollout is not None:
            plan = plan_between(trained, shadow)
            return cls(route, plan, Witness(plan.moves, route.rank, present, needed))
        nodes = (*trained.nodes, *shadow.nodes) or (0,) * route.num_ranks
        moves = moves_between(boxes_of(trained), boxes_of(shadow), nodes)
        head = tuple(move for move in moves if move.source_local == SCALAR_HEAD)
        rest = tuple(move for move in moves if move.source_local != SCALAR_HEAD)
        parts = ((trained.dtype, rest), ("fp32", head)) if head else ((trained.dtype, rest),)
        return cls(route, None, Witness(moves, route.rank, present, needed), parts)

    def problem(self, sources: Tensors, targets: Tensors) -> Exception | None:
        """Return the error that keeps this rank from giving or taking; ``None`` without one."""
        rank = self.route.rank
        if self.plan is not None:
            return transport.problem(self.plan, rank, sources, targets)
        name = f"{self.route.name}'s moves"
        problems = (transport.problem_of_moves(moves, dtype, name, rank, sources, targets) for dtype, moves in self.parts)
        return next((problem for problem in problems if problem is not None), None)

    def move(self, sources: Tensors, targets: Tensors, group: ProcessGroup) -> TransportReport:
        """Give the tensors in ``sources``, or take into ``targets``; collective over the link. The tensors were found to fit.

        Raises:
            RuntimeError: the bytes are not those of the plan, or a rank is gone.
        """
        rank, num_ranks = self.route.rank, self.route.num_ranks
        if self.plan is not None:
            report = transport.execute(self.plan, rank, sources, targets, group, checked=True, apart=True)
        else:
            reports = [
                transport.execute_moves(moves, dtype, rank, num_ranks, sources, targets, group) for dtype, moves in self.parts
            ]
            report = _sum(reports)
        planned = sum(self.route.planned)
        if rank < self.route.num_sources and report.bytes_sent != planned:
            raise RuntimeError(f"{self.route.name} rank {rank} sent {report.bytes_sent} bytes; the plan says {planned}")
        for peer, count in enumerate(report.received_from if rank >= self.route.num_sources else ()):
            self.route.check(peer, count)
        return report

    def fingerprints(self, sources: Tensors) -> Sums:
        """Return the fingerprints of the boxes that this rank is to give."""
        if self.plan is not None:
            return fingerprints.of_given(self.witness, sources, transport.TORCH_DTYPES[self.plan.dtype])
        travels = {move.source_local: transport.TORCH_DTYPES[dtype] for dtype, moves in self.parts for move in moves}
        return fingerprints.of_given(self.witness, sources, travels)

    def proof(self, sums: Sums, targets: Tensors, group: ProcessGroup) -> Proof | None:
        """Compare the arrived weights with those that left; ``None`` on a rank that gives. Collective over the link.

        Args:
            sums: :meth:`fingerprints`, from before the move.
            targets: the local tensors of a rank that takes.
            group: the link's group.
        """
        counts = [self.witness.num_given(rank) for rank in range(self.route.num_ranks)]
        given_sums = fingerprints.gathered(sums, counts, group)
        if self.route.rank < self.route.num_sources:
            return None
        return fingerprints.compared(self.witness, targets, given_sums, self.route.num_ranks)

    def given(self) -> list[Bundle]:
        """Return the bytes that this rank gave to every other; the boxes themselves are kept nowhere."""
        first, rank = self.route.num_sources, self.route.rank
        return [Bundle(rank, (peer - first,), None, count) for peer, count in enumerate(self.route.planned) if count]


def _sum(reports: list[TransportReport]) -> TransportReport:
    """Add up the reports of one rank's turns."""
    received = tuple(map(sum, zip(*(report.received_from for report in reports), strict=True)))
    sent, seconds = sum(report.bytes_sent for report in reports), sum(report.seconds for report in reports)
    return TransportReport(sent, sum(received), 0, 0, received, seconds)


@dataclass(eq=False)
class _Use:
    """The use that a call makes of a link."""

    call_id: int
    gpu: int | None
    limit_s: float
    group: ProcessGroup | None = None
    """``None`` until the ranks have met."""


class DirectLinks:
    """The links that a worker has joined, each made at its first use and kept for the next.

    A rank that fails leaves its link, so that ranks that wait for it fail too, and so on: a link is whole or gone, and what went
    over it is there on all ranks or has failed on all.
    """

    def __init__(self) -> None:
        self._joined: dict[int, tuple[rendezvous.Link, ProcessGroup]] = {}
        self._in_use: _Use | None = None
        self._cut_call = -1

    @contextmanager
    def using(self, link: rendezvous.Link, rank: int, call_id: int, gpu: int | None = None) -> Iterator[ProcessGroup]:
        """Join a link, where that has not happened, and use it for a call; collective over both pools.

        Args:
            link: the link to join.
            rank: this process's rank in the link.
            call_id: the call's id, for :meth:`cut`.
            gpu: torch's number of this process's GPU; ``None`` without one. Moves that were begun on it are over when this returns.

        Raises:
            PeerFailed: the link was cut meanwhile.
        """
        use = self._in_use = _Use(call_id, gpu, link.limit_s)
        is_cut: Callable[[], bool] = lambda: self._cut_call == call_id  # noqa: E731
        try:
            use.group = self._join(link, rank, gpu, is_cut)
            yield use.group
            self.settle()
            if is_cut():
                raise PeerFailed
            use.group.allreduce([torch.zeros(1)]).wait()  # nobody goes on, perhaps to wait for its own pool, before all can
        except BaseException as error:
            self.leave(link.number)
            if is_cut() and isinstance(error, RuntimeError):  # what gloo or NCCL said of it
                raise PeerFailed from error
            raise
        finally:
            self._in_use = None

    def _join(self, link: rendezvous.Link, rank: int, gpu: int | None, is_cut: Callable[[], bool]) -> ProcessGroup:
        if link.number not in self._joined:
            for number in [number for number, (old, _) in self._joined.items() if old.pools == link.pools]:
                self.leave(number)
            self._joined[link.number] = link, rendezvous.meet(link, rank, gpu, is_cut)
            if is_cut():  # while they connected
                raise PeerFailed
        return self._joined[link.number][1]

    def settle(self) -> None:
        """Wait until every transfer that was begun over the link in use is over.

        Raises:
            PeerFailed: the link was cut.
            RuntimeError: it took longer than the link's limit.
        """
        use = self._in_use
        if use is not None and use.gpu is not None:
            _await_stream(use.gpu, use.limit_s, lambda: self._cut_call == use.call_id)

    def cut(self, call_id: int) -> None:
        """End the waits of a call on its link, also those to come; from another thread."""
        self._cut_call = call_id
        use = self._in_use
        if use is not None and use.call_id == call_id and use.group is not None:
            rendezvous.cut(use.group)

    def leave(self, number: int) -> None:
        """Leave a link, if it was joined."""
        joined = self._joined.pop(number, None)
        if joined is not None:
            rendezvous.part(joined[1])

    def leave_all(self) -> None:
        """Leave every link; for a process that leaves its pool."""
        for number in list(self._joined):
            self.leave(number)


def _await_stream(gpu: int, limit_s: float, is_cut: Callable[[], bool]) -> None:
    """Wait until a GPU has done its work: never in CUDA itself, as a kernel of NCCL waits for its peers for ever.

    Raises:
        RuntimeError: it did not within the limit.
        PeerFailed: the link was cut; NCCL's abort has ended the kernels, or is about to.
    """
    done, end = torch.cuda.Event(), time.monotonic() + limit_s
    done.record(torch.cuda.current_stream(gpu))
    while not done.query():
        if is_cut():
            raise PeerFailed
        if time.monotonic() > end:
            raise RuntimeError(f"the weights were not there within {limit_s:g} s: a rank of the other pool hangs")
        time.sleep(GPU_LOOK_S)
