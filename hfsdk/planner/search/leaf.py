"""The best layouts of one placement: which roles share devices and how large every pool is are given.

Every combination of the items' candidates that fits into memory is looked at, except those that a bound rules out: a layout is
dropped when the step is too long even with the fastest layouts of all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hfsdk.core.clock import TASK_NODE
from hfsdk.core.placement import Placement, Pool
from hfsdk.core.table import Array
from hfsdk.planner.search.bases import held_twice, least_of, least_of_all
from hfsdk.planner.search.candidates import Candidates, room
from hfsdk.planner.search.fitting import LayoutsOf
from hfsdk.planner.search.pools import Kind, pack, pack_parts
from hfsdk.planner.search.replay import shared_times
from hfsdk.planner.search.space import Space

Number = tuple[tuple[str, ...], int, tuple[int, ...]]
"""A placement's shadows, the number of its arrangement, and those of its pools' sizes."""

MOST_AT_ONCE = 4096
"""Combinations of the first items that are carried on without ruling out any."""
MOST_ROUNDS = 4
"""How often layouts are ruled out one by one, before they are combined: fewer layouts of one leave others less room and time."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Leaf:
    """A placement: an arrangement with the number of every block's size."""

    space: Space
    arrangement: int
    sizes: tuple[int, ...]

    @property
    def number(self) -> Number:
        """The placement of the search that it is."""
        return self.space.mode.shadows, self.arrangement, self.sizes

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Item numbers of every block."""
        return self.space.groupings[self.space.arrangements[self.arrangement].grouping].blocks

    @property
    def hosts(self) -> tuple[int, ...]:
        """The block that each block lies on a part of, or -1."""
        return self.space.groupings[self.space.arrangements[self.arrangement].grouping].hosts

    def kind(self, block: int) -> Kind:
        """Return the kind of nodes of a block."""
        return self.space.kinds[self.space.arrangements[self.arrangement].kinds[block]]

    def num_devices(self, block: int) -> int:
        """Return a block's devices."""
        return int(self.kind(block).sizes[self.sizes[block]])

    def devices(self) -> list[tuple[int, ...]] | None:
        """Return every block's device numbers; ``None`` where they cannot lie side by side."""
        by_block: list[tuple[int, ...]] = [()] * len(self.blocks)
        for kind in self.space.kinds:
            blocks = [b for b, host in enumerate(self.hosts) if host < 0 and self.kind(b) is kind]
            placed = pack(kind, [self.num_devices(b) for b in blocks]) if blocks else []
            if placed is None:
                return None
            for b, devices in zip(blocks, placed, strict=True):
                by_block[b] = devices
        for host in {h for h in self.hosts if h >= 0}:
            blocks = [b for b, h in enumerate(self.hosts) if h == host]
            placed = pack_parts(self.kind(host), by_block[host], [self.num_devices(b) for b in blocks])
            if placed is None:
                return None
            for b, devices in zip(blocks, placed, strict=True):
                by_block[b] = devices
        return by_block

    def placement(self) -> Placement:
        """Return it with device numbers; pools have the names that a dict of the same roles would give them."""
        devices = self.devices()
        assert devices is not None
        items = self.space.mode.items
        names = ["+".join(items[i].name for i in block) for block in self.blocks]
        if len(names) == 1:
            names = ["all"]
        order = sorted(range(len(names)), key=lambda b: (self.hosts[b] >= 0, devices[b][0]))
        pools = tuple(Pool(names[b], devices[b], names[self.hosts[b]] if self.hosts[b] >= 0 else "") for b in order)
        homes = {items[i].name: names[b] for b, block in enumerate(self.blocks) for i in block}
        return Placement(pools, {item.name: homes[item.name] for item in items})

    def best(self, limit: float) -> tuple[float, tuple[LayoutsOf, ...]] | None:
        """Return (seconds of a step, layouts of every item) where it is below ``limit``, else ``None``."""
        fitting = self.all_below(limit)
        if fitting is None or not len(fitting[0]):
            return None
        seconds, chosen, candidates = fitting
        at = int(np.argmin(seconds))
        return float(seconds[at]), tuple(c.layouts[chosen[at, i]] for i, c in enumerate(candidates))

    def all_below(self, limit: float) -> tuple[Array, Array, list[Candidates]] | None:
        """Return seconds [plan], candidate numbers [plan, item] and the candidates, of all plans below ``limit``."""
        candidates = self._candidates()
        if candidates is None or not all(map(len, candidates)):
            return None
        candidates = self._beside_others(candidates)
        # Every job at its least is a bound of all plans here: it costs one replay and rules out most placements.
        if not all(map(len, candidates)) or self._seconds(np.full((1, len(candidates)), -1), candidates)[0] >= limit:
            return None
        # Candidates that fall out leave others more time and fewer bytes to fit beside, so both filters go on until nothing
        # changes.
        for _ in range(MOST_ROUNDS):
            before = sum(map(len, candidates))
            candidates = self._promising(candidates, limit)
            if not all(map(len, candidates)) or not all(map(len, candidates := self._beside_others(candidates))):
                return None
            if sum(map(len, candidates)) == before:
                break
        chosen, seconds = np.zeros((1, 0), dtype=np.int64), np.zeros(1)
        # Items are added one at a time: a prefix that does not fit, or is too slow with the least of the rest, takes all of its
        # plans with it.
        for i in range(len(candidates)):
            count = len(candidates[i])
            chosen = np.column_stack([np.repeat(chosen, count, axis=0), np.tile(np.arange(count), len(chosen))])
            chosen = chosen[self._fits(chosen, candidates)]
            if len(chosen) and (len(chosen) > MOST_AT_ONCE or i == len(candidates) - 1):
                seconds = self._seconds(chosen, candidates)
                if i == len(candidates) - 1 and self.space.tables.cluster.shares_cores:
                    seconds = self._beside_other_pools(chosen, candidates, seconds, limit)
                chosen, seconds = chosen[seconds < limit], seconds[seconds < limit]
            if not len(chosen):
                return None
        return seconds, chosen, candidates

    def _candidates(self) -> list[Candidates] | None:
        """Return the candidates of every item, ``None`` where the pools do not fit side by side.

        Sizes that add up do fit where each divides the next up to the node; then device numbers are asked for syncs alone.
        """
        space, homes = self.space, {i: b for b, block in enumerate(self.blocks) for i in block}
        kinds = space.arrangements[self.arrangement].kinds
        candidates = [space.candidates(i, kinds[homes[i]], self.sizes[homes[i]]) for i in range(len(homes))]
        shadows = [i for i, item in enumerate(space.mode.items) if item.trained is not None]
        # Only a sync asks which devices a pool has; else sizes that are powers of two always fit side by side, and packing can be
        # left out.
        if not shadows and all(kind.node_size & (kind.node_size - 1) == 0 for kind in space.kinds):
            return candidates
        devices = self.devices()
        if devices is None:
            return None
        number = {item.name: i for i, item in enumerate(space.mode.items)}
        for i in shadows:
            trained = space.mode.items[i].trained
            if trained is not None and len(candidates[i]):
                candidates[i] = self._with_sync(i, candidates[i], set(devices[homes[i]]), set(devices[homes[number[trained.name]]]))
        return candidates

    def _beside_others(self, candidates: Sequence[Candidates]) -> list[Candidates]:
        """Leave out candidates that do not fit together with the least that others hold on the same device."""
        groups = self.space.base_groups
        of_item = [{i: least_of(candidates[i]) for i in block} for block in self.blocks]
        least = [float(least_of_all(least_bytes, groups)) for least_bytes in of_item]
        fitting = list(candidates)
        for b, block in enumerate(self.blocks):
            parts = [least[p] for p, host in enumerate(self.hosts) if host == b]
            # Of several parts each has devices of its own, so a host's device meets one of them; a part's device meets its host.
            beside = max(parts, default=0.0) + (least[self.hosts[b]] if self.hosts[b] >= 0 else 0.0)
            most = room(self.kind(b))
            for i in block:
                layouts = candidates[i]
                fits = layouts.resident + layouts.working + beside + float(least_of_all(of_item[b], groups, but=i)) <= most
                if not fits.all():
                    fitting[i] = layouts.take(np.flatnonzero(fits))
        return fitting

    def _with_sync(self, item: int, candidates: Candidates, own_devices: set[int], theirs: set[int]) -> Candidates:
        """Return candidates with the sync that the device numbers need: over the network, unless both pools lie in one node."""
        tables, unit = self.space.tables, self.space.mode.items[item]
        size, cluster = len(own_devices), tables.cluster
        block = next(b for b, members in enumerate(self.blocks) if item in members)
        assumed = tables.far(self.kind(block), size)
        is_far = len({cluster.node_of(d) for d in (min(own_devices), max(own_devices), min(theirs), max(theirs))}) > 1
        if assumed == is_far:
            return candidates
        # The tables priced the sync before the device numbers were known; only the difference is added.
        more = [tables.sync_s(unit, x, far=is_far) - tables.sync_s(unit, x, far=assumed) for x in candidates.layouts]
        syncs = [self.space.mode.jobs[j].sync for j in self.space.jobs_of[item]]
        return replace(candidates, seconds=candidates.seconds + np.outer(more, syncs))

    def _promising(self, candidates: Sequence[Candidates], limit: float) -> list[Candidates]:
        """Leave out the candidates with which the step is too long with any of the others."""
        counts = [len(layouts) for layouts in candidates]
        chosen = np.full((sum(counts), len(counts)), -1)
        first = np.cumsum([0, *counts])
        for i, count in enumerate(counts):
            chosen[first[i] : first[i + 1], i] = np.arange(count)
        below = self._seconds(chosen, candidates) < limit
        keep = [np.flatnonzero(below[first[i] : first[i + 1]]) for i in range(len(counts))]
        return [c if len(k) == len(c) else c.take(k) for c, k in zip(candidates, keep, strict=True)]

    def _seconds(self, chosen: Array, candidates: Sequence[Candidates]) -> Array:
        """Return the step's seconds; of items that are not chosen yet (or have -1) every job takes its least."""
        space, grouping = self.space, self.space.arrangements[self.arrangement].grouping
        return space.replay.makespan(self._jobs(chosen, candidates), grouping)

    def _beside_other_pools(self, chosen: Array, candidates: Sequence[Candidates], least: Array, limit: float) -> Array:
        """Return the step's seconds where pools that are at work at the same time share cores; never below ``least``."""
        seconds = least.copy()
        below = np.flatnonzero(least < limit)
        if len(below):
            seconds[below] = self.shared(self._jobs(chosen[below], candidates))[1].max(1)
        return seconds

    def _jobs(self, chosen: Array, candidates: Sequence[Candidates]) -> Array:
        """Return every job's seconds, [plan, job]."""
        space = self.space
        by_job = np.tile(space.fixed[:, None], (1, len(chosen)))  # as the replay reads them
        for i, layouts in enumerate(candidates):
            jobs = space.jobs_of[i]
            if not jobs:
                continue
            least = layouts.seconds.min(0) if len(layouts) else np.full(len(jobs), np.inf)
            if i >= chosen.shape[1]:
                by_job[jobs] = least[:, None]
            else:
                by_job[jobs] = np.vstack([layouts.seconds, least]).T[:, chosen[:, i]]  # of number -1 the last row, the least
        return by_job.T

    def shared(self, seconds: Array) -> tuple[Array, Array]:
        """Return starts and ends of the jobs of some plans, [plan, job], where workers share cores.

        Args:
            seconds: seconds of every job with all workers of its pool at work and nobody else, [plan, job].
        """
        space, cluster = self.space, self.space.tables.cluster
        devices = self.devices()
        assert devices is not None
        homes = {space.mode.items[i].name: b for b, block in enumerate(self.blocks) for i in block}
        number = space.arrangements[self.arrangement].grouping
        workers = np.zeros((len(space.mode.jobs), len(cluster.node_devices)))
        before, slower = np.zeros(len(space.mode.jobs)), np.ones(len(space.mode.jobs))
        for j, job in enumerate(space.mode.jobs):
            if not job.item:
                workers[j, TASK_NODE] = 1
                continue
            block = homes[job.item]
            for device in devices[block]:
                workers[j, cluster.node_of(device)] += 1
            before[j] = space.tables.perf.dispatch_s
            slower[j] = space.tables.slowdown(self.kind(block), self.num_devices(block))
        cores = np.array([cluster.cores_of(node) for node in range(len(cluster.node_devices))], dtype=float)
        # The tables' seconds hold for a pool that is alone on its cores; the replay shares cores itself and needs the work at full
        # speed.
        work = np.maximum(0.0, seconds - before) / slower
        return shared_times(work, before, space.replay.waits(number), workers, cores)

    def _fits(self, chosen: Array, candidates: Sequence[Candidates]) -> Array:
        """Return which choices of the first items fit into every device, and agree on the rollout's tp within a pool."""
        fits = np.ones(len(chosen), dtype=bool)
        resident, works = [], []
        for block in self.blocks:
            members = [i for i in block if i < chosen.shape[1]]
            together = sum((candidates[i].resident[chosen[:, i]] for i in members), np.zeros(len(chosen)))
            resident.append(together - held_twice(chosen, members, candidates, self.space.base_groups))
            works.append(
                np.max([candidates[i].working[chosen[:, i]] for i in members], axis=0) if members else np.zeros(len(chosen))
            )
            tps = [candidates[i].rollout_tps[chosen[:, i]] for i in members]
            tps = [tp for tp in tps if len(tp) and tp[0]]
            # The processes of a pool run one rollout tp (vLLM has one set of groups in each), so its rollouts agree on it.
            for tp in tps[1:]:
                fits &= tp == tps[0]
        for b, host in enumerate(self.hosts):
            most = room(self.kind(b))
            fits &= resident[b] + works[b] <= most
            if host >= 0:
                fits &= resident[b] + resident[host] + np.maximum(works[b], works[host]) <= most
        return fits


def describe(names: Mapping[int, str] | Sequence[str], leaf: Leaf) -> str:
    """Return a placement in words: ``"actor reference (64) | critic reward (64)"``; parts stand in brackets behind their pool."""

    def text(b: int) -> str:
        parts = [text(p) for p, host in enumerate(leaf.hosts) if host == b]
        inside = f" [{' | '.join(parts)}]" if parts else ""
        return f"{' '.join(names[i] for i in leaf.blocks[b])} ({leaf.num_devices(b)}){inside}"

    return " | ".join(text(b) for b, host in enumerate(leaf.hosts) if host < 0)
