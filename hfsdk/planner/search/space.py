"""Lower bounds of a mode's plans: each job's least seconds for every set of items and pool size, for the bounds of the search.

A job of an item that shares its devices with others has at least the seconds of the item's fastest layout among those that leave
room for the others' least bytes. With devices left idle a larger pool is never worse, so the least over all smaller sizes bounds a
whole range of sizes (``least``); a size itself has ``exact``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from hfsdk.core.table import Array
from hfsdk.planner.perf.sizing import waits
from hfsdk.planner.search.bases import ALONE, Least, base_groups, least_of_all
from hfsdk.planner.search.candidates import Candidates, Tables, room
from hfsdk.planner.search.items import Grouping, Mode
from hfsdk.planner.search.pools import Kind
from hfsdk.planner.search.replay import Replay


@dataclass(frozen=True, eq=False)
class Arrangement:
    """A grouping, and of every block the kind of nodes it lies on."""

    grouping: int
    kinds: tuple[int, ...]


class Space:
    """All plans of one mode on a cluster's kinds of nodes, with lower bounds of their jobs' seconds.

    Attributes:
        mode: items and jobs.
        kinds: the kinds of nodes.
        arrangements: ways to share devices and to choose kinds; the search adds sizes, then layouts.
        base_groups: for every item, which others begin with the same frozen base.
        sizes_are_open: whether sizes of a rollout come from the memory of GPUs.
    """

    def __init__(
        self,
        mode: Mode,
        groupings: Sequence[Grouping],
        kinds: Sequence[Kind],
        tables: Tables,
        everything: bool,
        other: Space | None = None,
    ) -> None:
        """Lay out the plans; nothing is timed yet.

        Args:
            mode: items and jobs.
            groupings: the ways to share devices.
            kinds: the kinds of nodes.
            tables: predicts seconds and bytes.
            everything: whether layouts are kept that cannot be in a best plan.
            other: the same plans by other tables. Those differ only for rollouts whose sizes are open; the rest is reused.
        """
        self.mode, self.groupings, self.kinds, self.tables = mode, list(groupings), list(kinds), tables
        self.replay = Replay(mode, self.groupings)
        self.jobs_of = [mode.jobs_of(item.name) for item in mode.items]
        self.base_groups = base_groups(item.role for item in mode.items)
        # Two rollouts on a pool must have the same tp: a layout that is worse alone may be the only one that agrees with the other.
        self.everything = everything or sum(item.role.rollout is not None for item in mode.items) > 1
        self.sizes_are_open = any(waits(item.role) for item in mode.items) and not all(kind.on_cpu for kind in kinds)
        self._candidates_of: dict[tuple[int, int, int], Candidates] = {}
        self._pads: dict[tuple[int, int], tuple[Array, Array, Array, Least]] = {}
        if other is not None:
            # Items whose rollout has its sizes already cost the same under both tables, and those are most.
            same = {i for i, item in enumerate(mode.items) if not waits(item.role)}
            self._candidates_of |= {key: entry for key, entry in other._candidates_of.items() if key[0] in same}
            self._pads |= {key: entry for key, entry in other._pads.items() if key[0] in same}
        self.arrangements = [a for g, grouping in enumerate(self.groupings) for a in self._arrange(g, grouping)]

    def timed_by(self, tables: Tables) -> Space:
        """Return the same plans with other seconds for rollouts whose sizes are open, and the same bytes."""
        return Space(self.mode, self.groupings, self.kinds, tables, self.everything, other=self)

    def _arrange(self, number: int, grouping: Grouping) -> list[Arrangement]:
        """Choose a kind for every block: parts lie on their hosts' kind; the whole cluster is one pool alone, without parts."""
        free = [b for b, host in enumerate(grouping.hosts) if host < 0]
        arrangements = []
        for chosen in product(range(len(self.kinds)), repeat=len(free)):
            # The kind of the whole cluster has all devices: nothing is left for a second pool.
            if any(self.kinds[k].whole for k in chosen) and len(grouping.blocks) > 1:
                continue
            kinds = dict(zip(free, chosen, strict=True))
            arrangements.append(Arrangement(number, tuple(kinds[b if h < 0 else h] for b, h in enumerate(grouping.hosts))))
        return arrangements

    # -- candidates

    def candidates(self, item: int, kind: int, size: int) -> Candidates:
        """Return an item's layouts on a pool of the size with this number."""
        key = item, kind, size
        if key not in self._candidates_of:
            jobs = [self.mode.jobs[j] for j in self.jobs_of[item]]
            devices, unit = int(self.kinds[kind].sizes[size]), self.mode.items[item]
            depends = unit.trained is not None and self.tables.far(self.kinds[kind], devices) is None  # on where its weights are
            everything = self.everything or depends
            self._candidates_of[key] = self.tables.candidates(
                unit, jobs, self.kinds[kind], devices, everything=everything, shares=self.base_groups[item] != ALONE
            )
        return self._candidates_of[key]

    def _padded(self, item: int, kind: int) -> tuple[Array, Array, Array, Least]:
        """Return seconds [size, candidate, job], resident and working [size, candidate], and the least bytes [size].

        They are infinite where there is no candidate.
        """
        if (item, kind) in self._pads:
            return self._pads[item, kind]
        by_size = [self.candidates(item, kind, s) for s in range(len(self.kinds[kind].sizes))]
        most = max(1, *map(len, by_size))
        seconds = np.full((len(by_size), most, len(self.jobs_of[item])), np.inf)
        resident, working = np.full((len(by_size), most), np.inf), np.full((len(by_size), most), np.inf)
        own, base = np.full(len(by_size), np.inf), np.zeros(len(by_size))
        for s, candidates in enumerate(by_size):
            count = len(candidates)
            seconds[s, :count], resident[s, :count] = candidates.seconds, candidates.resident
            working[s, :count] = candidates.working
            own[s], base[s] = candidates.own.min(initial=np.inf), candidates.base.min(initial=np.inf) if len(candidates) else 0.0
        self._pads[item, kind] = seconds, resident, working, Least(resident.min(1), own, base)
        return self._pads[item, kind]

    # -- tables of bounds: one row for every (kind, block); row 0 is that of a block that is not there

    @cached_property
    def blocks(self) -> list[tuple[int, tuple[int, ...]]]:
        """(kind, items) of every row but the first."""
        blocks = {(k, b) for a in self.arrangements for k, b in zip(a.kinds, self.groupings[a.grouping].blocks, strict=True)}
        return sorted(blocks)

    @cached_property
    def rows(self) -> Array:
        """[arrangement, block]: the row of each block."""
        number = {block: n for n, block in enumerate(self.blocks, start=1)}
        rows = np.zeros((len(self.arrangements), self.replay.most_blocks), dtype=np.int64)
        for n, a in enumerate(self.arrangements):
            for b, (kind, block) in enumerate(zip(a.kinds, self.groupings[a.grouping].blocks, strict=True)):
                rows[n, b] = number[kind, block]
        return rows

    @cached_property
    def grouping_of(self) -> Array:
        """[arrangement]: its grouping."""
        return np.array([a.grouping for a in self.arrangements])

    @cached_property
    def hosts(self) -> Array:
        """[arrangement, block]: the block it lies on a part of, or -1."""
        host_of = np.full((len(self.arrangements), self.replay.most_blocks), -1)
        for n, a in enumerate(self.arrangements):
            hosts = self.groupings[a.grouping].hosts
            host_of[n, : len(hosts)] = hosts
        return host_of

    @cached_property
    def kind_of(self) -> Array:
        """[arrangement, block]: its kind; -1 for a block that is not there."""
        kinds = np.full((len(self.arrangements), self.replay.most_blocks), -1)
        for n, a in enumerate(self.arrangements):
            kinds[n, : len(a.kinds)] = a.kinds
        return kinds

    @cached_property
    def sizes(self) -> Array:
        """[row, size number]: devices; infinite beyond a kind's last size, nothing in row 0."""
        most = max(len(kind.sizes) for kind in self.kinds)
        devices = np.full((len(self.blocks) + 1, most), np.inf)
        devices[0] = 0
        for n, (kind, _) in enumerate(self.blocks, start=1):
            devices[n, : len(self.kinds[kind].sizes)] = self.kinds[kind].sizes
        return devices

    @cached_property
    def num_sizes(self) -> Array:
        """[row]: how many sizes there are."""
        return np.array([1, *(len(self.kinds[kind].sizes) for kind, _ in self.blocks)])

    @cached_property
    def exact(self) -> Array:
        """[row, size number, job]: least seconds on a pool of this size; 0 for others' jobs, infinite where nothing fits."""
        exact = np.zeros((*self.sizes.shape, len(self.mode.jobs)))
        exact[1:] = np.where(np.isfinite(self.sizes[1:, :, None]), 0.0, np.inf)
        for n, (kind, block) in enumerate(self.blocks, start=1):
            count = len(self.kinds[kind].sizes)
            parts = [self._padded(i, kind) for i in block]
            least = {i: part[3] for i, part in zip(block, parts, strict=True)}
            for i, (seconds, resident, working, _) in zip(block, parts, strict=True):
                others = least_of_all(least, self.base_groups, but=i)
                # Others of the block hold at least their least: what does not fit even then is in no plan.
                fits = resident + working + np.reshape(others, (-1, 1)) <= room(self.kinds[kind])
                best = np.where(fits[:, :, None], seconds, np.inf).min(1)
                best[~fits.any(1)] = np.inf
                exact[n, :count, self.jobs_of[i]] = best.T
                if not self.jobs_of[i]:  # a role without a call has to fit all the same
                    exact[n, :count][~fits.any(1)] = np.inf
        return exact

    @cached_property
    def least(self) -> Array:
        """The same over all sizes up to this one."""
        return np.minimum.accumulate(self.exact, axis=1)

    @cached_property
    def work(self) -> Array:
        """[row]: seconds of all jobs on the largest pool of the kind, as far as they fit there."""
        rows = np.arange(len(self.num_sizes))
        seconds = self.least[rows, self.num_sizes - 1]
        seconds_by_row: Array = np.where(np.isfinite(seconds), seconds, 0.0).sum(1)
        return seconds_by_row

    @cached_property
    def held(self) -> tuple[Array, Array]:
        """[row, size number]: least bytes held all the time, and least working bytes, over all sizes up to this one."""
        resident, working = np.zeros(self.sizes.shape), np.zeros(self.sizes.shape)
        for n, (kind, block) in enumerate(self.blocks, start=1):
            count = len(self.kinds[kind].sizes)
            parts = [self._padded(i, kind) for i in block]
            resident[n, :count] = least_of_all({i: part[3] for i, part in zip(block, parts, strict=True)}, self.base_groups)
            working[n, :count] = np.max([part[2].min(1) for part in parts], axis=0)
        return np.minimum.accumulate(resident, axis=1), np.minimum.accumulate(working, axis=1)

    @cached_property
    def rooms(self) -> Array:
        """[kind]: bytes of a device that roles can have."""
        return np.array([room(kind) for kind in self.kinds], dtype=float)

    @cached_property
    def devices(self) -> Array:
        """[kind]: how many devices there are; the last entry, for a block that is not there, is 0."""
        return np.array([*(kind.num_devices for kind in self.kinds), 0], dtype=float)

    @cached_property
    def fixed(self) -> Array:
        """[job]: seconds of CPU tasks; 0 for others."""
        perf, seconds = self.tables.perf, np.zeros(len(self.mode.jobs))
        for j, job in enumerate(self.mode.jobs):
            if not job.item and job.call is not None:
                seconds[j] = perf.host_task(job.call.num_rows, job.call.num_read_tokens)
        return seconds
