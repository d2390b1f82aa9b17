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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hfsdk.engine import rendezvous, transport
from hfsdk.engine.bridge import Route, boxes_of
from hfsdk.engine.role_state import SCALAR_HEAD
from hfsdk.engine.safepoint import PeerFailed
from hfsdk.engine.shadow_plan import plan_between
from hfsdk.resharding import Move, ReshardPlan, TransportReport, moves_between
from hfsdk.roles import RoleSpec
from hfsdk.runtime import Bundle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensors = Mapping[str, torch.Tensor]
NOTHING: Tensors = {}


@dataclass(frozen=True, eq=False)
class Way:
    """How one rank gives or takes weights over a link."""

    route: Route
    """Of this rank: its number in the link, and what goes between it and every other one."""
    plan: ReshardPlan | None
    """For a shadow that generates."""
    parts: tuple[tuple[str, tuple[Move, ...]], ...] = ()
    """For one that infers, which has no such plan: (dtype, moves of all ranks); a scalar head is fp32 whatever the model is."""

    @classmethod
    def between(cls, trained: RoleSpec, shadow: RoleSpec, route: Route) -> Way:
        """Plan as both sides do, each for itself, for the rank of ``route``."""
        if shadow.rollout is not None:
            return cls(route, plan_between(trained, shadow))
        nodes = (*trained.nodes, *shadow.nodes) or (0,) * route.num_ranks
        moves = moves_between(boxes_of(trained), boxes_of(shadow), nodes)
        head = tuple(move for move in moves if move.source_local == SCALAR_HEAD)
        rest = tuple(move for move in moves if move.source_local != SCALAR_HEAD)
        return cls(route, None, ((trained.dtype, rest), ("fp32", head)) if head else ((trained.dtype, rest),))

    def problem(self, sources: Tensors, targets: Tensors) -> Exception | None:
        """Return what keeps this rank from giving or taking; ``None`` if nothing does."""
        rank = self.route.rank
        if self.plan is not None:
            return transport.problem(self.plan, rank, sources, targets)
        name = f"{self.route.name}'s moves"
        found = (transport.problem_of_moves(moves, dtype, name, rank, sources, targets) for dtype, moves in self.parts)
        return next((problem for problem in found if problem is not None), None)

    def move(self, sources: Tensors, targets: Tensors, group: ProcessGroup) -> TransportReport:
        """Give what is in ``sources``, or take into ``targets``; collective over the link. The tensors were found to fit.

        Raises:
            RuntimeError: the bytes are not those of the plan, or a rank is gone.
        """
        rank, num_ranks = self.route.rank, self.route.num_ranks
        if self.plan is not None:
            report = transport.execute(self.plan, rank, sources, targets, group, checked=True)
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

    def given(self) -> list[Bundle]:
        """Return what this rank gave to every other, by the bytes alone: nothing of it stands anywhere."""
        first, rank = self.route.num_sources, self.route.rank
        return [Bundle(rank, (peer - first,), None, count) for peer, count in enumerate(self.route.planned) if count]


def _sum(reports: list[TransportReport]) -> TransportReport:
    """Add up what one rank did in turns."""
    received = tuple(map(sum, zip(*(report.received_from for report in reports), strict=True)))
    sent, seconds = sum(report.bytes_sent for report in reports), sum(report.seconds for report in reports)
    return TransportReport(sent, sum(received), 0, 0, received, seconds)


class Links:
    """The links that a worker has joined, each made at its first use and kept for the next.

    A rank that fails leaves its link, so that whoever waits for it fails too, and so on: a link is whole or gone.
    """

    def __init__(self) -> None:
        self._joined: dict[int, tuple[rendezvous.Link, ProcessGroup]] = {}
        self._in_use: tuple[int, ProcessGroup] | None = None
        self._is_cut = False

    @contextmanager
    def using(self, link: rendezvous.Link, rank: int, call_id: int, gpu: int | None = None) -> Iterator[ProcessGroup]:
        """Join a link, where that has not happened, and use it for a call; collective over both pools.

        Args:
            link: which.
            rank: this process's in it.
            call_id: of the call, for :meth:`cut`.
            gpu: torch's number of this process's GPU; ``None`` without one. What was begun on it is over when this returns.

        Raises:
            PeerFailed: the link was cut meanwhile.
        """
        if link.number not in self._joined:
            for number in [number for number, (old, _) in self._joined.items() if old.pools == link.pools]:
                self.leave(number)
            self._joined[link.number] = link, rendezvous.meet(link, rank, gpu)
        self._is_cut, self._in_use = False, (call_id, self._joined[link.number][1])
        try:
            yield self._in_use[1]
            if gpu is not None:
                torch.cuda.current_stream(gpu).synchronize()
            if self._is_cut:
                raise PeerFailed
        except BaseException:
            self._in_use = None
            self.leave(link.number)
            raise
        finally:
            self._in_use = None

    def cut(self, call_id: int) -> None:
        """End what a call waits for on its link, from another thread: NCCL returns at once, gloo when its peers have left."""
        in_use = self._in_use
        if in_use is not None and in_use[0] == call_id:
            self._is_cut = True
            in_use[1].abort()

    def leave(self, number: int) -> None:
        """Leave a link, if it was joined."""
        joined = self._joined.pop(number, None)
        if joined is not None:
            rendezvous.part(joined[1])

    def leave_all(self) -> None:
        """Leave every link; for a process that leaves its pool."""
        for number in list(self._joined):
            self.leave(number)

