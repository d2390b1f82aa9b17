"""What a cluster's layouts are whatever a step does (``Known``): kept from one search to the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.roles import RoleSpec
from hfsdk.core.table import Array
from hfsdk.planner.perf.memory import MemoryEstimate
from hfsdk.planner.perf.perf_model import Links, Setup
from hfsdk.planner.search.fitting import LayoutsOf
from hfsdk.planner.search.pools import Kind, kinds_of

MOST_SETUPS = 50_000
"""Setups that are remembered; a search over 4,096 devices makes about 10,000."""
Fitting = tuple[tuple[LayoutsOf, ...], Array, Array, Array]
"""Layouts, and bytes resident, of a frozen base, and working of each."""


@dataclass(eq=False, kw_only=True)
class Known:
    """What a cluster's layouts are whatever a step does: setups, links, bytes. Searches share it, and find the same without it."""

    kinds: tuple[Kind, ...]
    bridged: frozenset[Kind]
    """Kinds whose nodes have a bridge between two halves, which each layout crosses in its own way."""
    numbers: Iterator[int] = field(default_factory=count)
    likes: dict[tuple[RoleSpec, int], int] = field(default_factory=dict)
    """Each role, with its long row, has a number of its own, also where a what-if's thread and a cell search at the same time."""
    setups: dict[Any, Setup] = field(default_factory=dict)
    roles: dict[Any, RoleSpec] = field(default_factory=dict)
    links: dict[Any, Links] = field(default_factory=dict)
    bytes: dict[Any, MemoryEstimate] = field(default_factory=dict)
    fitting: dict[Any, Fitting] = field(default_factory=dict)


@lru_cache(maxsize=4)
def _known(cluster: ClusterSpec) -> Known:
    kinds = kinds_of(cluster)
    near = {kind: cluster.links_of([cluster.node_of(node[0]) for node in kind.nodes])[0] for kind in kinds}
    return Known(kinds=kinds, bridged=frozenset(kind for kind in kinds if near[kind].bridge))


def known_of(cluster: ClusterSpec) -> Known:
    """Return what was found of a cluster's layouts so far; anew where it has become much."""
    found = _known(cluster)
    if len(found.setups) > MOST_SETUPS:
        _known.cache_clear()
        found = _known(cluster)
    return found
