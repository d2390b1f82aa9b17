"""Items that begin with the same frozen base hold it once on a device, where they cut it alike: sums of bytes that know it.

The bytes of items then depend on each other's layouts. A search bounds it from below: of a group of such items everybody's own
bytes, and the base of the one whose least is most::

    actor      adapters, moments     base, tp8            least of the three together: 1 + 1 + 0 GB of their own, and the base once
    critic     adapters, moments     base, tp8 or tp4     in tp8, critic tp4: the base of tp4 and that of tp8
    reference                        base, tp8
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from hfsdk.core.frozen_bases import base_of
from hfsdk.core.roles import RoleSpec
from hfsdk.core.table import Array
from hfsdk.planner.search.candidates import Candidates

ALONE = -1
"""The group of an item whose base, if it has one, no other item begins with."""


class Least(NamedTuple):
    """The least bytes that an item holds, in any of its layouts; each number by size of the pool, or one."""

    resident: Array | float
    own: Array | float
    base: Array | float


def base_groups(roles: Iterable[RoleSpec]) -> tuple[int, ...]:
    """Return a number for every role, the same for those that begin with the same frozen base; ``ALONE`` for all others."""
    bases = [base_of(role) for role in roles]
    return tuple(bases.index(base) if base is not None and bases.count(base) > 1 else ALONE for base in bases)


def least_of(candidates: Candidates) -> Least:
    """Return the least bytes of an item over its candidates."""
    return Least(candidates.resident.min(), candidates.own.min(), candidates.base.min())


def least_of_all(least: Mapping[int, Least], groups: Sequence[int], *, but: int = -1) -> Array:
    """Return the least bytes that items hold together on a device; with ``but``: next to that item, which holds its base itself.

    Args:
        least: the least bytes of every item there, by number.
        groups: the group of every item.
        but: number of an item there that is left out.
    """
    total: Array = np.zeros(())
    by_group: dict[int, list[int]] = {}
    for item in least:
        if item != but:
            by_group.setdefault(groups[item] if groups[item] != ALONE else -2 - item, []).append(item)
    for group, members in by_group.items():
        if len(members) == 1 and (but < 0 or groups[but] != group):
            total = total + least[members[0]].resident
            continue
        total = total + sum(least[item].own for item in members)
        if but < 0 or groups[but] != group:
            total = total + reduce(np.maximum, [least[item].base for item in members])
    return total


def held_twice(chosen: Array, items: Sequence[int], candidates: Sequence[Candidates], groups: Sequence[int]) -> Array:
    """Return the bytes that are not there twice because items hold one base, [plan].

    Args:
        chosen: candidate numbers, [plan, item].
        items: numbers of the items on one pool.
        candidates: candidates of all items.
        groups: the group of every item.
    """
    saved = np.zeros(len(chosen))
    for group in {groups[item] for item in items} - {ALONE}:
        members = [item for item in items if groups[item] == group]
        shapes = [candidates[item].shapes[chosen[:, item]] for item in members]
        bases = [candidates[item].base[chosen[:, item]] for item in members]
        for n in range(1, len(members)):  # of each with one before it in the same shape, the smaller of the two
            most = np.max([np.where(shapes[m] == shapes[n], bases[m], 0.0) for m in range(n)], axis=0)
            saved += np.minimum(most, bases[n])
    return saved
