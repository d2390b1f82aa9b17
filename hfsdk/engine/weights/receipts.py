"""Receipts: how ranks that share nothing but a link know, over gloo, that a message has come, without waiting for it in vain.

Gloo tells a wait that its peer is gone only while nothing of the message has travelled. What is half written to the connection, or
half read from it, is passed over when the connection breaks (``Pair::signalException`` of its TCP transport), and the wait for it
lasts as long as the group's limit. So nobody waits for a message of weights before another one, which has no bytes and so is never
half there, says that it came; on a connection messages keep their order::

    gives   isend weights, isend GIVEN, irecv TAKEN                       wait TAKEN: all of it has gone
    takes   irecv weights, irecv GIVEN      wait GIVEN: all of it is here; isend TAKEN

A rank that dies, or closes its connections (``rendezvous.part``), so ends what others wait for at once. NCCL needs none of this:
the host does not wait for its messages (``direct.DirectLinks``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

GIVEN, TAKEN = 2**30, 2**30 + 1
"""Tags; messages of weights are numbered from 0."""

GONE_S = 10.0
"""How long a receipt may take to be gone, once its reader is known to be there: less than the controller waits for a rank."""


class Receipts:
    """Those of one round on one rank."""

    def __init__(self, group: ProcessGroup | None, gives_to: Iterable[int], takes_from: Iterable[int]) -> None:
        """Begin to say that this round's messages, which are posted already, were given, and to listen.

        Args:
            group: gloo's.
            gives_to: peers to whom this rank sends in this round.
            takes_from: peers from whom it receives.
        """
        self._group, self._takes_from = group, sorted(set(takes_from))
        self._nothing = torch.empty(0, dtype=torch.uint8)
        to = sorted(set(gives_to))
        self._given = [self._say(peer, GIVEN) for peer in to]
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
        taken = [self._say(peer, TAKEN) for peer in self._takes_from]
        for heard in self._hear_taken:
            heard.wait()
        for work in (*works, *self._given, *taken):
            work.wait(timedelta(seconds=GONE_S))

    def _say(self, peer: int, tag: int) -> Work:
        return _posted(dist.isend(self._nothing, group=self._group, group_dst=peer, tag=tag))

    def _hear(self, peer: int, tag: int) -> Work:
        return _posted(dist.irecv(self._nothing, group=self._group, group_src=peer, tag=tag))


def _posted(work: Work | None) -> Work:
    assert work is not None  # this rank is in the group
    return work
