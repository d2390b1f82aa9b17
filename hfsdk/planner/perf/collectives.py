"""How long ranks take to exchange their tensors: rings and all-to-alls over a link that they share.

Bytes cross at ``share`` of the link's bandwidth; ``messages`` is how many exchanges they are in, each with its hops::

    all-reduce    2 (n - 1) / n of a rank's bytes cross the ring (Patarasuk and Yuan, 2009); short ones take a tree's 2 log2(n) hops
    all-to-all    what leaves a rank crosses once, inside the node while the rest goes to others; short ones take log2(n) hops
    ring          what a rank passes on crosses once, in n - 1 hops
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hfsdk.core.cluster import LinkSpec
from hfsdk.core.table import Array


def all_reduce(num_bytes: Array | float, ranks: int, link: LinkSpec, messages: float, share: float) -> Array | float:
    """Return the seconds of sums over ``ranks``; 0 for one.

    Eager all-reduces of at most 64 KB on A100 and H100 take 21 us on 4 and 33-38 us on 8 devices (Vidur's profiles), which is
    2 log2(n) hops of 5 us.
    """
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) / ranks * num_bytes / (link.bandwidth * share) + messages * 2 * math.log2(ranks) * link.latency_s


class AllToAllLinks(NamedTuple):
    """The links of an all-to-all between ranks: one device's part."""

    near: LinkSpec
    """Inside a node."""
    far: LinkSpec
    """The link between nodes."""
    beside: int
    """Ranks on a node, at least."""


def all_to_all(
    near: Array | float, far: Array | float, ranks: int, links: AllToAllLinks | None, messages: float, share: float
) -> Array | float:
    """Return the seconds in which bytes of a rank get to others of ``ranks`` in its node and on other nodes; 0 for one."""
    if links is None or ranks == 1:
        return 0.0
    sent = np.maximum(near / (links.near.bandwidth * share), far / (links.far.bandwidth * share))
    seconds: Array = sent + messages * math.log2(ranks) * (links.near if links.beside == ranks else links.far).latency_s
    return seconds


def ring_pass(passed: float, ranks: int, link: LinkSpec | None, messages: float, share: float) -> float:
    """Return the seconds in which ``passed`` bytes of a rank go on to the next of ``ranks``; 0 for one."""
    if link is None or ranks == 1:
        return 0.0
    return passed / (link.bandwidth * share) + messages * (ranks - 1) * link.latency_s
