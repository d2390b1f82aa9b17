"""Workers that share cores, rank by rank, by the rule of :mod:`hfsdk.core.clock`.

A machine without accelerators may have more workers than cores; then calls on disjoint pools overlap and take longer for it::

    4 workers on 2 cores      pool "actor"    | forward at full speed | ....... half speed ....... | full |
                              pool "critic"                           | ....... half speed ....... |

Ranks that wait (for the slowest of their stage, for inputs, for their turn) leave their core to the others, and so does a call
until its dispatch is over; a CPU task counts as one more. How long a call takes therefore depends on the calls after it,
so times are settled at a look, over the calls of the last :data:`OPEN_STEPS` steps; older ones stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hfsdk.core.clock import DONE_S, TASK_NODE, core_speeds
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.table import Array
from hfsdk.engine.simulation.values import Timeline

OPEN_STEPS = 3
"""Calls of so many of the last steps may still become longer by calls that are submitted later."""


@dataclass(eq=False)
class _Job:
    """A call that is not settled for good."""

    line: Timeline
    after: list[Timeline]
    """Calls that must be over: those before it on its devices, and those whose columns or weights it reads."""
    floor_s: float
    """The earliest start, whatever came before."""


@dataclass(eq=False)
class _Running:
    """A job while it is replayed."""

    job: _Job
    stage: int = -1
    dispatch_s: float = 0.0
    """Seconds of its dispatch that are left."""
    ranks: dict[int, list[list[float | str]]] = field(default_factory=dict)
    """Rank -> phases that are left of the stage, as [name, seconds left, start]."""
    done: dict[tuple[int, int], list[tuple[str, float, float]]] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)


class SharedCores:
    """Replays calls over the cores of a cluster. Without a node that has fewer cores than workers it is not asked.

    Args:
        cluster: its ``node_cores`` say how many cores the workers of each node share.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self._node_of = [node for node, members in enumerate(cluster.node_devices) for _ in members]
        self._cores = np.array([cluster.cores_of(node) for node in range(len(cluster.node_devices))])
        self._open: list[_Job] = []
        self._changed = False

    def add(self, line: Timeline, after: Iterable[Timeline], floor_s: float = 0.0) -> None:
        """Add a call, which waits for others and for a moment; its stages may be added until the next look."""
        waits = list({id(other): other for other in after}.values())
        open_lines = {id(job.line) for job in self._open}
        floor = max([floor_s, *(other.now_s for other in waits if id(other) not in open_lines)])
        self._open.append(_Job(line, [other for other in waits if id(other) in open_lines], floor))
        self._changed = True
        oldest = min(job.line.call.step for job in self._open)
        # Replaying every call since the start would take longer with each step; calls this old are settled for good.
        if oldest <= line.call.step - OPEN_STEPS:
            self.settle()
            self._open = [job for job in self._open if job.line.call.step > oldest]
            for job in self._open:
                gone = [other for other in job.after if other.call.step <= oldest]
                job.floor_s = max([job.floor_s, *(other.now_s for other in gone)])
                job.after = [other for other in job.after if other not in gone]

    def settle(self) -> None:
        """Give every open call its times, by the calls submitted so far."""
        if not self._changed:
            return
        self._changed = False
        replay = _Replay(self._open, self._node_of, self._cores)
        while replay.goes_on():
            pass


class _Replay:
    """Calls that are replayed from event to event."""

    def __init__(self, jobs: Iterable[_Job], node_of: Sequence[int], cores: Array) -> None:
        self._waiting = sorted(jobs, key=lambda job: job.line.call.id)
        self._node_of, self._cores = node_of, cores
        self._running: list[_Running] = []
        self._ended: set[int] = set()
        self._now = 0.0

    def goes_on(self) -> bool:
        """Start the calls that may start now and go to the next event; return whether there is one."""
        while self._start():
            pass
        if not self._running and not self._waiting:
            return False
        self._advance()
        return True

    def _ready(self) -> list[_Job]:
        return [job for job in self._waiting if all(id(other) in self._ended for other in job.after)]

    def _start(self) -> bool:
        """Start calls whose inputs are there; return whether one of them ended at once, so that others may start."""
        ended = len(self._ended)
        for job in [job for job in self._ready() if job.floor_s <= self._now]:
            self._waiting.remove(job)
            job.line.started_s = self._now
            run = _Running(job, dispatch_s=job.line.dispatch_s)
            self._running.append(run)
            if not run.dispatch_s:
                self._next_stage(run)
        return len(self._ended) > ended

    def _advance(self) -> None:
        busy: list[tuple[int, list[float | str]]] = []
        for run in self._running:
            busy += [(self._node(run, rank), phases[0]) for rank, phases in run.ranks.items() if phases]
        at_work = np.bincount([node for node, _ in busy], minlength=len(self._cores))
        # Between two events nothing starts or ends, so every phase goes on at one speed until the nearest end.
        rates = core_speeds(at_work, self._cores).tolist()
        ends = [float(phase[1]) / rates[node] for node, phase in busy]
        ends += [run.dispatch_s for run in self._running if run.dispatch_s]
        ends += [job.floor_s - self._now for job in self._ready()]
        took = min(ends)
        self._now += took
        for node, phase in busy:
            phase[1] = float(phase[1]) - took * rates[node]
        for run in list(self._running):
            run.dispatch_s = run.dispatch_s - took if run.dispatch_s > took + DONE_S else 0.0
            self._end_phases(run)
            if not run.dispatch_s and not run.ranks:
                self._next_stage(run)

    def _node(self, run: _Running, rank: int) -> int:
        devices = run.job.line.devices
        return self._node_of[devices[rank]] if devices else TASK_NODE

    def _end_phases(self, run: _Running) -> None:
        now = self._now
        for rank, phases in run.ranks.items():
            if phases and float(phases[0][1]) <= DONE_S:
                name, _, start = phases.pop(0)
                run.done.setdefault((run.stage, rank), []).append((str(name), float(start), now - float(start)))
                if phases:
                    phases[0][2] = now
        if not any(run.ranks.values()):
            run.ranks = {}

    def _next_stage(self, run: _Running) -> None:
        """Begin the next stage of a call, or end it."""
        line, now = run.job.line, self._now
        while run.stage + 1 < len(line.stages):
            run.stage += 1
            run.starts.append(now)
            for piece in line.stages[run.stage]:
                for rank in piece.ranks if any(piece.phases.values()) else ():
                    run.ranks[rank] = [[name, seconds, now] for name, seconds in piece.phases.items() if seconds]
            if run.ranks:
                return
        line.now_s, line.shared, line.stage_starts = now, run.done, run.starts
        self._ended.add(id(line))
        self._running.remove(run)
