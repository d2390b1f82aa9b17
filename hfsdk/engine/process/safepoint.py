"""Points where a call may stop: ranks that run in lockstep agree on cancel and failure before they go on.

A rank must never leave its peers inside a collective. So cancel requests and exceptions wait for the next *safe point* (a
micro-batch in training, a decode step in generation), where an all-reduce of a few numbers over the ranks in lockstep tells
all of them the same thing::

    rank 0   micro-batch 3 | agree | micro-batch 4 | agree -> all raise Cancelled
    rank 1   micro-batch 3 | agree | micro-batch 4 | agree -> all raise Cancelled
                                     ^ cancel request arrives at rank 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Cancelled(Exception):  # noqa: N818 - an outcome, not an error
    """The call was cancelled, on every rank in lockstep at once."""


class PeerFailed(Exception):  # noqa: N818
    """Another rank raised; this one stops with it and has nothing to tell."""


class RanksDiffer(Exception):  # noqa: N818
    """The ranks in lockstep do not have the same state, told on all of them at once."""


@dataclass
class SafePoint:
    """Agreement on cancel and failure among the ranks of a process group.

    ``cancelled`` is asked at every safe point; it must only read a flag.
    """

    cancelled: Callable[[], bool]

    def agree(self, group: ProcessGroup | None, error: Exception | None = None, state: int = 0) -> None:
        """Stop here if any rank of ``group`` was cancelled or failed. ``group=None`` means this rank alone.

        Args:
            group: the ranks in lockstep; gloo.
            error: this rank's error.
            state: a number below 2^63 that must be the same on all of them, e.g. a checksum.

        Raises:
            Exception: ``error`` itself, on the rank that had it.
            PeerFailed: another rank had an error.
            RanksDiffer: no rank failed, and they do not have the same state.
            Cancelled: none of these, and at least one was asked to cancel.
        """
        cancelled, failed, differ = self.cancelled(), error is not None, False
        if group is not None and group.size() > 1:
            import torch
            import torch.distributed as dist

            flags = torch.tensor([int(cancelled), int(failed), state, -state])
            # dist.all_reduce hides what went wrong in a group that torch has not made, as that of a link
            group.allreduce([flags], dist.ReduceOp.MAX).wait()
            any_cancelled, any_failed, largest, smallest = flags.tolist()
            cancelled, failed, differ = bool(any_cancelled), bool(any_failed), largest != -smallest
        if error is not None:
            raise error
        if failed:
            raise PeerFailed
        if differ:
            raise RanksDiffer
        if cancelled:
            raise Cancelled
