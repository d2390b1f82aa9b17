"""Rows on replicas under a rule of who takes which: each replica its own, one queue for all, or together on fewer.

::

    own queues      replica 0  a b c d .........      rows are dealt before anybody knows how long they are
                    replica 1  e f g h ==============
    one queue       a replica with room takes the next; a replica that has none left takes half of the fullest one's
    gathered        once all that is left fits on fewer replicas, it goes there, and the others are free
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hfsdk.planner.tails.replica import PendingResponse, Replica
from hfsdk.planner.tails.token_costs import TokenCosts

OWN, SHARED = "own", "shared"

SAME_TIME = 1e-9
"""Ends that are as near as this, relatively, are at the same time."""


@dataclass
class Generated:
    """The result of replicas that generated until all rows had ended, or until they were stopped."""

    ended: list[tuple[float, PendingResponse]] = field(default_factory=list)
    """(seconds, row), as they ended."""
    left: list[PendingResponse] = field(default_factory=list)
    """Rows that were stopped, or never came in."""
    seconds: float = 0.0
    busy_s: float = 0.0
    """Busy seconds of all replicas together."""


def generate(
    costs: TokenCosts, num_replicas: int, rows: Sequence[PendingResponse], rule: str = OWN, *, until_s: float = math.inf
) -> Generated:
    """Decode rows on replicas.

    Args:
        costs: predicts a replica's seconds.
        num_replicas: the number of replicas.
        rows: the rows in the order in which they come in; with ``"own"`` a replica gets neighbours.
        rule: ``"own"`` or ``"shared"``.
        until_s: when all are stopped, after the last whole step.
    """
    replicas = [Replica(costs) for _ in range(num_replicas)]
    queues = [deque(rows)] * num_replicas if rule == SHARED else [deque(part) for part in _parts(rows, num_replicas)]
    return _run(replicas, queues, until_s, shares=rule == SHARED)


def gather(
    costs: TokenCosts, num_replicas: int, rows: Sequence[PendingResponse], rule: str, at_s: float, onto: int
) -> tuple[Generated, float]:
    """Decode rows, bring those that are left at ``at_s`` together on fewer replicas, and go on there.

    Returns:
        Everything, and when the other replicas are free.
    """
    first = generate(costs, num_replicas, rows, rule, until_s=at_s)
    replicas = [Replica(costs, at_s) for _ in range(onto)]
    for replica, part in zip(replicas, _dealt(first.left, onto), strict=True):
        replica.take(part, moved=True)
    moved = max(replica.clock_s for replica in replicas)
    last = _run(replicas, [deque() for _ in replicas], math.inf, shares=False)
    return Generated([*first.ended, *last.ended], [], last.seconds, first.busy_s + last.busy_s), moved


def fits(costs: TokenCosts, rows: Iterable[PendingResponse], replicas: int) -> bool:
    """Whether rows fit on so many replicas, as :func:`gather` deals them."""
    parts = _dealt(rows, replicas)
    return all(len(part) <= costs.most_rows and sum(row.most for row in part) <= costs.cache_tokens for part in parts)


def _dealt(rows: Iterable[PendingResponse], count: int) -> list[list[PendingResponse]]:
    """Deal rows one by one in the order of their numbers; nobody knows how long they will be."""
    ordered = sorted(rows, key=lambda row: row.number)
    return [ordered[first::count] for first in range(count)]


def _parts(rows: Sequence[PendingResponse], count: int) -> list[Sequence[PendingResponse]]:
    """Return neighbours, as evenly as they can be: the first parts have one more."""
    size, more = divmod(len(rows), count)
    starts = [k * size + min(k, more) for k in range(count + 1)]
    return [rows[start:end] for start, end in pairwise(starts)]


def _run(replicas: Sequence[Replica], queues: Sequence[deque[PendingResponse]], until_s: float, *, shares: bool) -> Generated:
    generated = Generated()
    _deal(replicas, queues)
    events = [(replica.next_s(), number) for number, replica in enumerate(replicas)]
    heapq.heapify(events)
    while events and events[0][0] <= until_s and not math.isinf(events[0][0]):
        together, empty = events[0][0] * (1 + SAME_TIME), []
        while events and events[0][0] <= together:  # all that end now, before anybody takes rows from another
            at_s, number = heapq.heappop(events)
            replica = replicas[number]
            if at_s != replica.next_s():  # it gave rows away since
                continue
            generated.ended += [(replica.clock_s, row) for row in replica.finish()]
            _fill(replica, queues[number])
            heapq.heappush(events, (replica.next_s(), number))
            if not replica.num_rows:
                empty.append(replica)
        for replica in empty if shares else ():
            changed = _share(replica, replicas)
            for number in changed:
                heapq.heappush(events, (replicas[number].next_s(), number))
    if not math.isinf(until_s):
        for replica in replicas:
            replica.halt(until_s)
            generated.left += replica.give()
    for queue in {id(queue): queue for queue in queues}.values():
        generated.left += queue
    generated.left.sort(key=lambda row: row.number)
    generated.seconds = until_s if generated.left else max((at for at, _ in generated.ended), default=0.0)
    generated.busy_s = sum(replica.busy_s for replica in replicas)
    return generated


def _deal(replicas: Sequence[Replica], queues: Sequence[deque[PendingResponse]]) -> None:
    """Fill the replicas, one row after the other where they share a queue; rows that come in together are read together."""
    if len({id(queue) for queue in queues}) == len(replicas):
        for replica, queue in zip(replicas, queues, strict=True):
            _fill(replica, queue)
        return
    open_to, queue = deque(replicas), queues[0]
    while queue and open_to:
        replica = open_to.popleft()
        if replica.has_room(queue[0]):
            replica.take([queue.popleft()])
            open_to.append(replica)


def _fill(replica: Replica, queue: deque[PendingResponse]) -> None:
    while queue and replica.has_room(queue[0]):
        replica.take([queue.popleft()])


def _share(empty: Replica, replicas: Sequence[Replica]) -> list[int]:
    """Give an empty replica half of the rows of the fullest; return the numbers of both, none where nobody has two."""
    fullest = max(range(len(replicas)), key=lambda number: (replicas[number].num_rows, -number))
    donor = replicas[fullest]
    if donor.num_rows < 2:
        return []
    donor.halt(empty.clock_s)
    empty.clock_s = donor.clock_s = max(empty.clock_s, donor.clock_s)  # a step that is under way is lost
    empty.take(donor.give(0.5), moved=True)
    return [fullest, next(number for number, replica in enumerate(replicas) if replica is empty)]
