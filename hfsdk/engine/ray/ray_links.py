"""The open pools of Ray's workers, and the links between two of them over which weights go straight (see ``direct.py``)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hfsdk.core.placement import Pool
from hfsdk.core.trace import Span
from hfsdk.engine.process.rendezvous import Link

if TYPE_CHECKING:
    from hfsdk.engine.worker.answer import Answer

PEER_LEFT = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
)
"""What gloo and NCCL say on a rank whose peer has left, or that has left itself."""


@dataclass(eq=False)
class DeviceWorker:
    """The worker process of one device, which joins one pool after another."""

    device: int
    handle: Any
    log_file: str
    pid: int | None = None
    """Known once it has joined a pool."""


@dataclass(eq=False)
class PoolState:
    """An open pool and its workers, by rank."""

    pool: Pool
    members: list[DeviceWorker]
    last_seen: tuple[Span, ...] = ()
    """Spans that were running at the last look, for messages about a death."""

    @property
    def workers(self) -> list[Any]:
        """Their handles."""
        return [member.handle for member in self.members]


class RayLinks:
    """The links between open pools: made when weights first go from one to the other, and again where one was opened again."""

    def __init__(
        self, meeting_place: Callable[[Sequence[DeviceWorker]], tuple[str, tuple[str, ...]]], timeout_s: float | None
    ) -> None:
        """Have none yet.

        Args:
            meeting_place: returns where workers find each other and, where these are several machines, their addresses.
            timeout_s: how long a rank waits for the others; ``None``: 10 minutes.
        """
        self._meeting_place, self._timeout_s = meeting_place, timeout_s
        self._numbers = itertools.count()
        self._links: dict[Link, tuple[PoolState, PoolState]] = {}
        self._lock = threading.Lock()

    def between(self, giver: PoolState, taker: PoolState) -> Link:
        """Return the link of two pools as they are open now; their workers join it when they first use it."""
        with self._lock:
            opened = next((link for link, ends in self._links.items() if ends == (giver, taker)), None)
        if opened is None:
            members = [*giver.members, *taker.members]
            store, addresses = self._meeting_place(members)
            names = giver.pool.name, taker.pool.name
            opened = Link(next(self._numbers), names, store, len(members), addresses, self._timeout_s)
            with self._lock:
                self._links[opened] = giver, taker
        return opened

    def drop(self, link: Link) -> None:
        """Have the workers of both pools leave a link; the next transfer makes another."""
        with self._lock:
            ends = self._links.pop(link, ())
        for state in ends:
            for worker in state.workers:
                worker.drop_link.remote(link.number)

    def forget(self, pool: PoolState) -> None:
        """Have all leave the links of a pool that closes."""
        with self._lock:
            links = [link for link, ends in self._links.items() if pool in ends]
        for link in links:
            self.drop(link)


def without_consequences(answers: Sequence[Answer]) -> list[Answer]:
    """Leave out what ranks only told because a peer had left, unless nothing else was told."""
    causes = [answer.error is not None and not any(words in str(answer.error) for words in PEER_LEFT) for answer in answers]
    if not any(causes):
        return list(answers)
    return [answer if is_cause else replace(answer, error=None) for answer, is_cause in zip(answers, causes, strict=True)]
