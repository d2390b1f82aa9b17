"""``Solution``, a placement with its best layouts, and ``Best``, the best solutions of a search so far."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hfsdk.core.checks import with_checked
from hfsdk.core.table import Array
from hfsdk.planner.perf.memory import MemoryEstimate, bases_once
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.planner.perf.sizing import sized, waits
from hfsdk.planner.search.candidates import NamedSeconds, Tables
from hfsdk.planner.search.fitting import LayoutsOf, with_layouts
from hfsdk.planner.search.items import Item, Job, Mode
from hfsdk.planner.search.leaf import Leaf
from hfsdk.planner.search.space import Space

Sharing = frozenset[tuple[frozenset[str], frozenset[str]]]
"""The type of a choice of which items share devices: (items of a pool, items of the pool it is a part of)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Solution:
    """A plan: a placement, and the best layouts in it."""

    seconds: float
    """Seconds as they were compared: every rollout on GPUs with the cache that it has alone, and response lengths of several
    steps."""
    leaf: Leaf
    layouts: tuple[LayoutsOf, ...]
    """Layouts of every item of the leaf's mode."""

    @property
    def grouping(self) -> Sharing:
        """The items that share devices: (items of a pool, items of the pool it is a part of)."""
        return grouping_names(self.leaf.space.mode, self.leaf.blocks, self.leaf.hosts)

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """The mode's items as they are placed: rollouts on GPUs with the sizes that all roles on their devices leave."""
        space = self.leaf.space
        if not space.sizes_are_open:
            return space.mode.items
        roles = [with_layouts(item.role, x) for item, x in zip(space.mode.items, self.layouts, strict=True)]
        options = [role.rollout_options for role in sized(roles, self.leaf.placement(), space.tables.cluster)]
        return tuple(
            replace(item, role=with_checked(item.role, rollout_options=o), like=with_checked(item.like, rollout_options=o))
            if waits(item.role) else item
            for item, o in zip(space.mode.items, options, strict=True)
        )  # fmt: skip

    def held_on(self, block: int) -> dict[str, MemoryEstimate]:
        """Return the bytes that the items of a block ask of each of its devices, each frozen base once."""
        leaf, tables = self.leaf, self.leaf.space.tables
        kind, size = leaf.kind(block), leaf.num_devices(block)
        own_items = {self.items[i].name: (self.items[i], self.layouts[i]) for i in leaf.blocks[block]}
        estimates = {name: tables.bytes_of(item, layouts, kind, size) for name, (item, layouts) in own_items.items()}
        return bases_once((with_layouts(item.role, layouts) for item, layouts in own_items.values()), estimates)

    def timed(self) -> Solution:
        """Return it with the seconds of the step with those sizes, to be compared by them."""
        seconds, retimed = self.step_seconds, copy(self)  # with all that was found out for them
        object.__setattr__(retimed, "seconds", seconds)
        return retimed

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of the step with those sizes, in the mean over the response lengths of several steps."""
        return self.makespan(self.mean_job_seconds) if self.leaf.space.sizes_are_open else self.seconds

    @property
    def methods(self) -> list[str]:
        """Methods of the calls on devices, in order."""
        return [job.method for job in self.leaf.space.mode.jobs if job.item]

    @property
    def varies(self) -> bool:
        """Whether some responses are longer than others."""
        return any(job.call is not None and job.call.drawn for job in self.leaf.space.mode.jobs)

    @cached_property
    def steps_s(self) -> tuple[float, ...]:
        """Seconds of the run's first steps with those sizes; empty where all responses are as long."""
        calls = [job.call for job in self.leaf.space.mode.jobs if job.call is not None]
        count = 1 + max(len(call.drawn) for call in calls) if self.varies else 0
        return tuple(self.makespan(_seconds(self._phases_of(step))) for step in range(count))

    def makespan(self, job_seconds: Array) -> float:
        """Return the seconds of a step whose jobs take so long."""
        space = self.leaf.space
        return float(space.replay.makespan(job_seconds[None], space.arrangements[self.leaf.arrangement].grouping)[0])

    @cached_property
    def job_phases(self) -> list[tuple[Job, float, NamedSeconds]]:
        """(job, seconds before its first span, its phases) for every job of the plan, with the run's first response lengths.

        Where workers share cores, with what pools that are at work at the same time make each other slower.
        """
        return self._phases_of(0)

    def _phases_of(self, step: int) -> list[tuple[Job, float, NamedSeconds]]:
        alone = self._alone(self.leaf.space.tables.of_step(step))
        if not self.leaf.space.tables.cluster.shares_cores:
            return alone
        starts, ends = self.leaf.shared(_seconds(alone)[None])
        rows = []
        for j, (job, before, phases) in enumerate(alone):
            alone_s = sum(s for _, s in phases)
            longer = (float(ends[0, j] - starts[0, j]) - (before if job.item else 0.0)) / alone_s if alone_s else 1.0
            rows.append((job, before, [(name, s * longer) for name, s in phases]))
        return rows

    def seconds_by(self, perf: PerfModel) -> float:
        """Return the seconds of the step by another model of time, in the same layouts; not where workers share cores."""
        tables = self.leaf.space.tables
        return self.makespan(_seconds(self._alone(Tables(tables.cluster, perf, least=tables.least, alone=tables.alone))))

    def _alone(self, tables: Tables) -> list[tuple[Job, float, NamedSeconds]]:
        leaf, space = self.leaf, self.leaf.space
        devices = leaf.devices()
        assert devices is not None
        homes = {i: b for b, block in enumerate(leaf.blocks) for i in block}
        number = {item.name: i for i, item in enumerate(space.mode.items)}
        rows: list[tuple[Job, float, NamedSeconds]] = []
        for j, job in enumerate(space.mode.jobs):
            if not job.item:
                rows.append((job, 0.0, [(job.method, float(space.fixed[j]))]))
                continue
            i = number[job.item]
            block = homes[i]
            far = False
            if job.sync:
                both = devices[block], devices[homes[number[job.source]]]
                far = len({tables.cluster.node_of(d) for pool_devices in both for d in (min(pool_devices), max(pool_devices))}) > 1
            phases = tables.phases(self.items[i], job, self.layouts[i], leaf.kind(block), leaf.num_devices(block), far=far)
            rows.append((job, tables.perf.dispatch_s, phases))
        return rows

    @cached_property
    def job_seconds(self) -> Array:
        """Seconds of every job of the plan with the run's first response lengths, [job]."""
        return _seconds(self.job_phases)

    @cached_property
    def mean_job_seconds(self) -> Array:
        """The same in the mean over the response lengths of several steps, by which plans are compared."""
        return _seconds(self._phases_of(-1)) if self.varies else self.job_seconds


def _seconds(rows: Sequence[tuple[Job, float, NamedSeconds]]) -> Array:
    return np.array([sum(s for _, s in phases) + (before if job.item else 0.0) for job, before, phases in rows])


def grouping_names(mode: Mode, blocks: Sequence[Sequence[int]], hosts: Sequence[int]) -> Sharing:
    """Name who shares devices with whom."""
    members = [frozenset(mode.items[i].name for i in block) for block in blocks]
    return frozenset((m, members[h] if h >= 0 else frozenset()) for m, h in zip(members, hosts, strict=True))


@dataclass(eq=False)
class Best:
    """The best plans so far, each of its own kind: of a grouping, or of a placement."""

    top: int
    by_placement: bool = False
    best_alone: bool = False
    """Whether only plans that are faster than all others still count."""
    by_key: dict[Hashable, Solution] = field(default_factory=dict)

    def key(self, leaf: Leaf) -> Hashable:
        """Return the key under which a placement competes: those that are alike share one."""
        arrangement = leaf.space.arrangements[leaf.arrangement]
        grouping = leaf.space.mode.shadows, leaf.space.groupings[arrangement.grouping]
        return (*grouping, arrangement.kinds, leaf.sizes) if self.by_placement else grouping

    @property
    def worst(self) -> float:
        """Seconds at which a plan of a new kind is among the best."""
        seconds = sorted(solution.seconds for solution in self.by_key.values())
        if self.best_alone and seconds:
            return seconds[0]
        return seconds[self.top - 1] if len(seconds) >= self.top else np.inf

    def limit(self, key: Hashable) -> float:
        """Return the seconds below which a plan of this kind changes anything."""
        own = self.by_key[key].seconds if key in self.by_key else np.inf
        return min(own, self.worst)

    def limits(self, space: Space) -> Array:
        """Return that for every arrangement."""
        worst = self.worst
        if self.by_placement:
            return np.full(len(space.arrangements), worst)
        own = [self.by_key.get((space.mode.shadows, space.groupings[a.grouping])) for a in space.arrangements]
        return np.array([worst if solution is None else min(worst, solution.seconds) for solution in own])

    def offer(self, leaf: Leaf) -> None:
        """Choose the layouts of a placement, and keep it where it is among the best."""
        key = self.key(leaf)
        chosen = leaf.best(self.limit(key))
        if chosen is not None:
            self.by_key[key] = Solution(seconds=chosen[0], leaf=leaf, layouts=chosen[1])

    def ranked(self) -> list[Solution]:
        """Return the best, fastest first; of equally fast ones the first that was offered.

        A search begins with nothing that another one left behind, so that the order is a matter of the question alone.
        """
        return sorted(self.by_key.values(), key=lambda solution: solution.seconds)[: self.top]
