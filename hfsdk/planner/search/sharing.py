"""When the jobs of a step end where workers share cores, for many plans at once, by the rule of :mod:`hfsdk.core.clock`.

::

    4 workers on 2 cores      pool of 3, alone       2/3 of its speed
                              beside a pool of 1     both at half speed, until one of them is done

All workers of a job are taken to have as much to do as its slowest one; the simulated runtime replays rank by rank.
"""

from __future__ import annotations

import numpy as np

from hfsdk.core.clock import DONE_S, core_speeds
from hfsdk.core.table import Array


def shared_times(work: Array, before: Array, waits: Array, workers: Array, cores: Array) -> tuple[Array, Array]:
    """Return when every job starts and when it ends.

    Args:
        work: seconds of every job at full speed, [plan, job].
        before: seconds between its start and its work, in which it needs no core, [job].
        waits: whether a job (row) waits for the end of another one (column), [job, job]; earlier ones only.
        workers: of every job on every node, [job, node].
        cores: of every node, [node].

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
        rate = np.where(there, speeds[:, None, :], 1.0).min(2)
        until = np.where(at_work, left / rate, np.where(running & (early > DONE_S), early, np.where(running, 0.0, np.inf)))
        took = until.min(1, where=~done, initial=np.inf)
        took = np.where(np.isfinite(took), took, 0.0)[:, None]
        now = now + took[:, 0]
        early = np.where(running & ~at_work, early - took, early)
        left = np.where(at_work, left - took * rate, left)
        ended = running & (early <= DONE_S) & (left <= DONE_S)
        ends = np.where(ended, now[:, None], ends)
        done |= ended
    return starts, ends
