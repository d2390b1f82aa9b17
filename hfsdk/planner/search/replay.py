"""The clock of a step for many plans at once: when every job starts and ends, by the rule of :mod:`hfsdk.core.clock`.

Jobs run in the order of submission; a pool's devices are free when it and every pool that shares devices with it are; CPU tasks
have their own clock::

    end[j] = start_s(clock[pools that exclude j's], end[inputs of j]) + seconds[j]

The makespan never falls when a job takes longer, so that least seconds of every job give a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from hfsdk.core.clock import DONE_S, core_speeds, start_s
from hfsdk.core.table import Array
from hfsdk.planner.search.items import Grouping, Mode


@dataclass(frozen=True, eq=False)
class Replay:
    """The jobs of one mode under each of its groupings."""

    mode: Mode
    groupings: Sequence[Grouping]

    @cached_property
    def most_blocks(self) -> int:
        """Most pools of any grouping."""
        return max(len(g.blocks) for g in self.groupings)

    @cached_property
    def block_of(self) -> Array:
        """[grouping, job]: the block that carries a job out; the last number is that of CPU tasks."""
        names = [item.name for item in self.mode.items]
        blocks = np.full((len(self.groupings), len(self.mode.jobs)), self.most_blocks)
        for g, grouping in enumerate(self.groupings):
            homes = {names[i]: b for b, block in enumerate(grouping.blocks) for i in block}
            blocks[g] = [homes.get(job.item, self.most_blocks) for job in self.mode.jobs]
        return blocks

    @cached_property
    def excludes(self) -> Array:
        """[grouping, job, block]: whether a job waits for a block's clock: its own, that of its host, those of its parts."""
        count = self.most_blocks + 1
        shares = np.broadcast_to(np.eye(count, dtype=bool), (len(self.groupings), count, count)).copy()
        for g, grouping in enumerate(self.groupings):
            for part, host in enumerate(grouping.hosts):
                if host >= 0:
                    shares[g, part, host] = shares[g, host, part] = True
        excluded: Array = shares[np.arange(len(self.groupings))[:, None], self.block_of]
        return excluded

    def waits(self, grouping: int) -> Array:
        """Return which jobs (columns) each job (row) waits for: those it reads, and earlier ones on devices that it shares."""
        waits = np.zeros((len(self.mode.jobs), len(self.mode.jobs)), dtype=bool)
        for j, job in enumerate(self.mode.jobs):
            waits[j, list(job.after)] = True
            waits[j, :j] |= self.excludes[grouping, j][self.block_of[grouping, :j]]
        return waits

    @cached_property
    def has_parts(self) -> Array:
        """[grouping]: whether any block lies on a part of another."""
        return np.array([any(host >= 0 for host in g.hosts) for g in self.groupings])

    def ends(self, seconds: Array, grouping: Array | int) -> Array:
        """Return when every job ends.

        Args:
            seconds: the seconds of every job, [plan, job].
            grouping: numbers of groupings, [plan], or one of all plans, which is quicker.

        Returns:
            Seconds from the step's start, [plan, job].
        """
        if not isinstance(grouping, np.ndarray):
            return np.stack(self._ends_alike(seconds, grouping), axis=1)
        count, num_jobs = seconds.shape
        rows = np.arange(count)
        clocks = np.zeros((count, self.most_blocks + 1))
        blocks = self.block_of[grouping]
        excludes = self.excludes[grouping] if self.has_parts[grouping].any() else None
        ends = np.empty((count, num_jobs))
        for j in range(num_jobs):
            own = blocks[:, j]
            # Without parts a job waits for its own pool alone, which is a lookup in place of a maximum over all clocks.
            free = clocks[rows, own] if excludes is None else (clocks * excludes[:, j]).max(1)
            ends[:, j] = start_s([free, *(ends[:, source] for source in self.mode.jobs[j].after)]) + seconds[:, j]
            clocks[rows, own] = ends[:, j]
        return ends

    def _ends_alike(self, seconds: Array, grouping: int) -> list[Array]:
        """Return the same by job, of plans that share their devices alike."""
        clocks: dict[int, Array] = {}
        ends: list[Array] = []
        by_job = np.ascontiguousarray(seconds.T)
        for j, (job, own) in enumerate(zip(self.mode.jobs, self.block_of[grouping].tolist(), strict=True)):
            before = clocks if self.has_parts[grouping] else (own,)
            free = [clocks[b] for b in before if b in clocks and self.excludes[grouping, j, b]]
            ends.append(start_s([*free, *(ends[k] for k in job.after)]) + by_job[j])
            clocks[own] = ends[-1]
        return ends

    def makespan(self, seconds: Array, grouping: Array | int) -> Array:
        """Return the seconds of the step, [plan]; arguments as of :meth:`ends`."""
        if not isinstance(grouping, np.ndarray):
            return reduce(np.maximum, self._ends_alike(seconds, grouping))
        ends: Array = self.ends(seconds, grouping).max(1)
        return ends


# -- jobs where workers share cores


def shared_times(work: Array, before: Array, waits: Array, workers: Array, cores: Array) -> tuple[Array, Array]:
    """Return when every job starts and when it ends.

    ::

        4 workers on 2 cores      pool of 3, alone       2/3 of its speed
                                  with a pool of 1       both at half speed, until one of them is done

    All workers of a job are taken to have as much to do as its slowest one; the simulated runtime replays rank by rank.

    Args:
        work: seconds of every job at full speed, [plan, job].
        before: seconds between its start and its work, in which it needs no core, [job].
        waits: whether a job (row) waits for the end of another one (column), [job, job]; earlier ones only.
        workers: workers of every job on every node, [job, node].
        cores: cores of every node, [node].

    Returns:
        Seconds from the step's start: starts and ends, [plan, job].
    """
    count, num_jobs = work.shape
    left, early = work.copy(), np.tile(before, (count, 1))
    starts, ends = np.full((count, num_jobs), np.inf), np.full((count, num_jobs), np.inf)
    there = workers > 0
    needs = waits.astype(float).T
    now = np.zeros(count)
    done = np.zeros((count, num_jobs), dtype=bool)
    while not done.all():
        running = ~done & ((~done) @ needs == 0)
        starts = np.where(running & np.isinf(starts), now[:, None], starts)
        at_work = running & (early <= DONE_S) & (left > DONE_S)
        speeds = core_speeds(at_work @ workers, cores)
        # A job goes as fast as its workers on the busiest node.
        rate = np.where(there, speeds[:, None, :], 1.0).min(2)
        until = np.where(at_work, left / rate, np.where(running & (early > DONE_S), early, np.where(running, 0.0, np.inf)))
        # Nothing changes between two ends, so every plan jumps to its own next end; plans that are done stand still.
        took = until.min(1, where=~done, initial=np.inf)
        took = np.where(np.isfinite(took), took, 0.0)[:, None]
        now = now + took[:, 0]
        early = np.where(running & ~at_work, early - took, early)
        left = np.where(at_work, left - took * rate, left)
        ended = running & (early <= DONE_S) & (left <= DONE_S)
        ends = np.where(ended, now[:, None], ends)
        done |= ended
    return starts, ends
